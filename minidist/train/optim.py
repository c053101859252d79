"""Batch arithmetic: learning rates for bigger batches, means over tokens, accumulation, seeds.

Data parallelism multiplies the batch (document 2.2: global batch = per-rank batch x ranks), and
each helper here mends one thing that silently goes wrong when it does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from minidist.comm import collectives as coll
from minidist.comm.mesh import resolve_group
from minidist.measure import tag

RULES = {"linear": 1.0, "sqrt": 0.5}


def scale_lr(base_lr: float, base_batch: int, batch: int, rule: str = "linear") -> float:
    """Learning rate for ``batch`` when ``base_lr`` was tuned at ``base_batch`` (global batches).

    "linear": k times the batch, k times the rate. The gradient is a *mean*, so one step of a k
    times larger batch moves as far as one small step did and has to stand in for k of them
    (Goyal 2017, section 2.1; for SGD, up to some thousands of rows).
    "sqrt": the noise of that mean falls with the root of k only; the usual choice for Adam
    (Krizhevsky 2014; Hoffer 2017).

    A high rate from the first step diverges while weights still change fast: start with `Warmup`.

    Raises ValueError for an unknown rule or sizes that are not positive.
    """
    if rule not in RULES:
        raise ValueError(f"unknown rule {rule!r}; choose one of {', '.join(RULES)}")
    if base_lr <= 0 or base_batch <= 0 or batch <= 0:
        raise ValueError(
            f"learning rate and batches must be positive: {base_lr}, {base_batch}, {batch}"
        )
    return base_lr * (batch / base_batch) ** RULES[rule]


@dataclass(frozen=True)
class Warmup:
    """Learning rate as a function of the step: from ``start_lr`` up to ``lr`` in equal increments
    over ``steps`` steps, constant afterwards (gradual warm-up, Goyal 2017, section 2.2, where
    ``start_lr`` is the rate of the unscaled batch and the ramp takes five epochs).

    >>> lr = scale_lr(0.1, 256, 8192)             # 3.2
    >>> schedule = Warmup(lr, steps=500, start_lr=0.1)
    >>> set_lr(optimizer, schedule(step))         # before each optimizer step
    """

    lr: float
    steps: int = 0
    start_lr: float = 0.0

    def __call__(self, step: int) -> float:
        if step >= self.steps:
            return self.lr
        return self.start_lr + (self.lr - self.start_lr) * (step + 1) / self.steps


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr


class MasterOptimizer(torch.optim.Optimizer):
    """Mixed precision without sharding: 16-bit parameters, stepped on 32-bit master copies.

    A learning rate of 1e-4 changes a weight by less than a bfloat16's last bit, and small steps
    would round away; in the masters they add up (Micikevicius 2018, section 3.1). Per parameter: 2
    bytes of weight and 2 of gradient, and 12 for master, momentum and variance. That is the 16
    which ZeRO section 3.1 starts from; `md.ZeroOptimizer(master_dtype=...)` shards the 12.

    Args:
        params: the model's parameters, of a 16-bit dtype.
        optimizer_class: any torch optimizer; ``defaults`` are its arguments.
    """

    def __init__(self, params, optimizer_class: type[torch.optim.Optimizer], **defaults: Any):
        params = list(params)
        self.masters = [p.detach().float() for p in params]
        for master in self.masters:
            tag(master, "optimizer")
        self.inner = optimizer_class(self.masters, **defaults)
        super().__init__(params, dict(self.inner.defaults))

    @torch.no_grad()
    def step(self, closure=None):
        """One step on the masters; the parameters become their rounded images."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [p for group in self.param_groups for p in group["params"]]
        self.inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]  # schedules change ours
        for param, master in zip(params, self.masters, strict=True):
            master.grad = None if param.grad is None else param.grad.to(master.dtype)
        self.inner.step()
        for param, master in zip(params, self.masters, strict=True):
            master.grad = None
            param.copy_(master)
        return loss


def token_mean_scale(tokens: int | Sequence[int], *, group=None, averaged: bool = True) -> float:
    """What to multiply a *sum* of token losses by so that the gradient is the mean over tokens.

    The right loss of a batch is the sum over all its tokens divided by their number, over all ranks
    and micro-batches. Means of means are not that: a rank with one token would weigh as much as a
    rank with five.

    Args:
        tokens: valid tokens of this rank in the whole accumulation window, or one count per
            micro-batch. A rank without any is fine: its loss is an empty sum.
        group: the data-parallel ranks; one small all-reduce adds up their counts.
        averaged: the wrapper divides gradients by the number of ranks (DDP, ZeRO and FSDP do), so
            the factor makes up for it.

    Returns the factor; 0.0 when no rank has a token (the step is then empty, not NaN).

    >>> scale = token_mean_scale([int(m.sum()) for m in masks])
    >>> for inputs, mask in window:
    ...     ((token_loss(model(inputs)) * mask).sum() * scale).backward()
    """
    on_gpu = dist.get_backend(resolve_group(group)) == "nccl"  # which sends nothing else
    count = torch.tensor(int(np.sum(tokens)), device="cuda" if on_gpu else "cpu")
    coll.all_reduce(count, "sum", group=group, by="token count")
    if not count:
        return 0.0
    return (coll.world_size(group) if averaged else 1) / int(count)


def windows(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Groups of ``size`` micro-batches for gradient accumulation; the last one may be shorter.

    An epoch of 5 micro-batches with windows of 2 makes three updates. The last window is passed on
    with its true length, so that `accumulate` divides by 1 and not by 2.
    """
    if size < 1:
        raise ValueError(f"a window needs at least one micro-batch, got {size}")
    window: list[Any] = []
    for batch in batches:
        window.append(batch)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window


def accumulate(
    window: Sequence[Any],
    loss_of: Callable[[Any], Tensor],
    no_sync: Callable[[], AbstractContextManager] = nullcontext,
) -> Tensor:
    """Forward and backward over the micro-batches of one window; gradients end as their mean.

    Args:
        window: micro-batches of this rank, as many as there are (see `windows`).
        loss_of: micro-batch -> its mean loss, a scalar.
        no_sync: the wrapper's ``no_sync`` (DDP, ZeroOptimizer and FSDP have it). It covers all but
            the last micro-batch, *including their forwards*; the last one always synchronises, also
            in a short window, since gradients left behind would leak into the next update.

    Returns the mean loss, detached. The caller steps and clears the gradients.
    """
    if not window:
        raise ValueError("an accumulation window needs at least one micro-batch")
    total = None
    for index, batch in enumerate(window):
        last = index == len(window) - 1
        with nullcontext() if last else no_sync():
            # Divided by the window's true length: dividing by the nominal one makes the last,
            # shorter window of an epoch take a smaller step.
            loss = loss_of(batch) / len(window)
            loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    return total


@dataclass
class RandomStreams:
    """What `seed_all` returns; as a context manager it switches to the stream all ranks share."""

    seed: int
    _saved: list[tuple] = field(default_factory=list, repr=False)

    def __enter__(self) -> RandomStreams:
        self._saved.append((random.getstate(), np.random.get_state(), torch.get_rng_state()))
        _seed_everything(self.seed)
        return self

    def __exit__(self, *error) -> None:
        python_state, numpy_state, torch_state = self._saved.pop()
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_all(seed: int, *, group=None, rank: int | None = None) -> RandomStreams:
    """One seed, two kinds of randomness: equal weights on all ranks, different dropout masks.

    Seeds Python, NumPy and torch from ``(seed, rank)``, so that every rank drops other neurons and
    augments its images in another way: with one stream for all, N ranks would see N times the same
    noise. Initial weights must be equal instead; build the model inside the returned context:

    >>> with md.seed_all(0):
    ...     model = Net()          # the same on every rank
    >>> model.train()              # from here on every rank has its own stream

    Args:
        group: the data-parallel ranks (ranks of one tensor-parallel group are told apart by
            `md.tp_rng` instead); ``rank`` gives the place in it directly.
    """
    if rank is None:
        rank = coll.rank(group) if dist.is_initialized() else 0
    # Mixed, not added: seed + rank would make (seed 0, rank 1) and (seed 1, rank 0) the same.
    mixed = np.random.SeedSequence((seed, rank, 1)).generate_state(1, np.uint64)[0]
    _seed_everything(int(mixed) % 2**63)
    return RandomStreams(seed)
