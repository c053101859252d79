"""The loss of a batch from the losses of its micro-batches, exactly.

The mean over a batch is not the mean of its micro-batches' means when these have different numbers
of terms: fewer rows in the last one, or fewer targets that count. So each mean is weighted by its
number of terms, before its backward, and gradients are those of the batch as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minidist.parallel.microbatches import flatten


class BatchLoss:
    """loss_fn(output, targets) -> scalar over a micro-batch. reduction: what it does there, "mean"
    or "sum". count(targets) -> number of terms in its mean. `Pipeline` tells the defaults."""

    def __init__(self, loss_fn: Callable, reduction: str | None, count: Callable | None):
        self.loss_fn = loss_fn
        self.reduction = reduction or option(loss_fn, "reduction", "mean")
        self.count = count or (lambda targets: terms(loss_fn, targets))
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be mean or sum, not {self.reduction!r}")
        self.begin([], 1.0)

    def begin(self, targets: list[Any], scale: float) -> None:
        """A step starts: the targets of all its micro-batches; `scale` multiplies the gradients."""
        self.targets, self.scale = targets, scale
        self.total: Tensor | None = None  # loss of the micro-batches so far
        self.shares = [1.0] * len(targets)
        if self.reduction == "mean":
            counts = [float(self.count(target)) for target in targets]
            everything = sum(counts)
            self.shares = [count / everything if everything else float("nan") for count in counts]

    def part(self, output: Any, microbatch: int) -> Tensor:
        """What this micro-batch adds to the batch's loss, times `scale`: call backward on it."""
        share, targets = self.shares[microbatch], self.targets[microbatch]
        self.targets[microbatch] = None
        if share == 0:  # not one target counts: its mean is 0/0, but no part of the batch's mean
            tensors = [tensor for tensor in flatten(output)[0] if tensor.requires_grad]
            return torch.stack([(tensor * 0).sum() for tensor in tensors]).sum()
        loss = self.loss_fn(output, targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(f"loss_fn must return a scalar tensor, not {type(loss).__name__}")
        part = loss.detach().reshape(()) * share
        self.total = part if self.total is None else self.total + part
        return loss * (share * self.scale)


def terms(loss_fn, target: Any) -> float:
    """How many terms the mean that `loss_fn` takes over this micro-batch has.

    Class indices (integer targets): those that are not `ignore_index`, each weighted by the loss's
    class weights if it has any. Other targets: their elements. Nested targets: by the first tensor.
    """
    tensors, _ = flatten(target)
    if not tensors:
        return 1
    target = tensors[0]
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        return target.numel()
    counted = target != option(loss_fn, "ignore_index", -100)
    weight = option(loss_fn, "weight", None)
    if isinstance(weight, Tensor):
        return weight[target[counted]].sum().item()
    return int(counted.sum())


def option(loss_fn, name: str, default):
    """A setting of a loss: of a module like nn.CrossEntropyLoss, or of functools.partial(...)."""
    value = getattr(loss_fn, name, None)
    if value is None:
        value = getattr(loss_fn, "keywords", {}).get(name)
    return default if value is None else value
