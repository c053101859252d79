"""Gradient buckets: which gradients travel together, and the flat buffer they travel in.

    parameters, first gradient first     head.w    block2.b  block2.w    block1.b  block1.w  ...
    buckets                              [0: 1 MB ][1: 25 MB            ][2: 25 MB           ...

One collective per parameter pays its latency hundreds of times; one for everything cannot start
before backward has ended. Buckets are the middle. The first is small, so that something is under
way soon. Chapter 2; Li et al. 2020, "PyTorch Distributed", section 3.2.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minidist.measure import tag
from minidist.parallel.flat import FlatLayout


class GradBucket:
    """What a communication hook gets: the gradients of some parameters, end to end in `flat`.

    `flat`: 1-D, `layout.padded_numel` elements (a multiple of the world size; padding comes
    last). `tensors`: views of `flat`, one per parameter, with its shape and strides. The last
    bucket has one more, of one element: the flag by which ranks tell each other that something
    was unusual. `names`, `params`: the parameters in bucket order. `index`, `group`,
    `world_size`, `by` (for the ledger). Memory is taken on first use, so that a plan that is
    replaced never had any.
    """

    def __init__(self, index: int, names: list[str], params: list[nn.Parameter], group, flag: bool):
        self.index, self.names, self.params = index, names, params
        self.group, self.world_size = group, group.size()
        self.by = f"ddp bucket {index}"
        self.layout = FlatLayout([*params, (1,)] if flag else params, self.world_size)
        self._has_flag = flag
        self._flat: Tensor | None = None
        self._tensors: list[Tensor] = []

    @property
    def flat(self) -> Tensor:
        if self._flat is None:
            self._flat = self.layout.buffer(self.params[0].dtype, self.params[0].device)
            tag(self._flat, "gradients")
            self._tensors = [
                self._flat.as_strided(param.shape, _strides(param), offset)
                for param, offset in zip(self.params, self.layout.offsets, strict=False)
            ]
            if self._has_flag:
                self._tensors.append(self._flat[self.layout.numel - 1 : self.layout.numel])
        return self._flat

    @property
    def tensors(self) -> list[Tensor]:
        if self._flat is None:
            _ = self.flat
        return self._tensors

    @property
    def flag(self) -> Tensor | None:
        return self.tensors[-1] if self._has_flag else None


def plan_buckets(
    params: Sequence[Tensor], order: Sequence[int], cap_mb: float | None, first_mb: float | None
) -> list[list[int]]:
    """Cut `order` (indices into `params`) into buckets of one dtype and device each.

    A bucket is closed by the parameter that brings it to its limit: `first_mb` MiB for the first
    bucket of each dtype and device (never more than `cap_mb`), `cap_mb` for the others. None: no
    limit, 0: one parameter per bucket. Buckets come in the order in which they will be full.
    """
    cap = math.inf if cap_mb is None else cap_mb * 2**20
    first = cap if cap_mb is None or first_mb is None else min(first_mb * 2**20, cap)
    filling: dict[tuple, list[int]] = {}
    room: dict[tuple, float] = {}  # bytes until the bucket that is being filled is full
    closed: list[list[int]] = []
    for index in order:
        param = params[index]
        key = (param.dtype, param.device)
        filling.setdefault(key, []).append(index)
        room[key] = room.get(key, first) - param.numel() * param.element_size()
        if room[key] <= 0:
            closed.append(filling.pop(key))
            room[key] = cap
    # What stayed open is complete when its last gradient arrives.
    place = {index: position for position, index in enumerate(order)}
    rest = sorted(filling.values(), key=lambda bucket: place[bucket[-1]])
    return sorted([*closed, *rest], key=lambda bucket: place[bucket[-1]])


def _strides(param: Tensor) -> tuple[int, ...]:
    """The strides autograd would give the gradient: a channels_last or transposed weight keeps its
    own (fused optimizers walk both memories in step), one with gaps becomes dense."""
    return torch.empty_like(param, device="meta").stride()
