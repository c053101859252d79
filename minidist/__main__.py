"""``python -m minidist`` is the same as the ``minidist`` command."""

import sys

from minidist.cli import main

if __name__ == "__main__":
    sys.exit(main())
