"""Set 3 on the ranks: tensor (3.1 to 3.7) and pipeline (3.8 to 3.12)."""

from minidist.learn.checks.run3_pipeline import *  # noqa: F403
from minidist.learn.checks.run3_tensor import *  # noqa: F403
