"""Learning: notebook cells on several ranks, pictures of what was measured, one language or both.

``%load_ext minidist`` in a notebook calls `load_ipython_extension`.
"""

from __future__ import annotations


def load_ipython_extension(ipython) -> None:
    """Register ``%%ranks`` and ``%lang``."""
    from minidist.learn import lang, magic

    ipython.register_magic_function(magic.RanksMagic(ipython), "cell", "ranks")
    ipython.register_magic_function(lang.lang, "line", "lang")
