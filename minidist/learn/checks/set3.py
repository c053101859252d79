"""Set 3, model parallel: tensor (3.1 to 3.7) and pipeline (3.8 to 3.12)."""

from __future__ import annotations

from minidist.learn.checks import set3_pipeline, set3_tensor

EXERCISES = (*set3_tensor.EXERCISES, *set3_pipeline.EXERCISES)
