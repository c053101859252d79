"""Where FSDP keeps what, in which dtype, and the small things that all ranks agree on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from minidist.comm import collectives as coll


@dataclass(frozen=True)
class MixedPrecision:
    """Gather and compute in `param_dtype`, reduce gradients in `reduce_dtype` (None: the same).

    The shard is the master and stays in 32 bits (16-bit parameters become 32-bit there): small
    updates are not lost, and gradients add up over micro-steps in 32 bits.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """(master, compute, reduce) dtypes of a parameter of `dtype`."""
        if not dtype.is_floating_point:  # complex numbers and integers stay as they are
            return dtype, dtype, dtype
        compute = self.param_dtype or dtype
        changed = self.param_dtype is not None or self.reduce_dtype is not None
        master = torch.promote_types(dtype, torch.float32) if changed else dtype
        return master, compute, self.reduce_dtype or compute

    def cast(self, values: Any) -> Any:
        """Floating tensors anywhere in `values` (arguments of a forward), in `param_dtype`."""
        if self.param_dtype is None:
            return values
        floating = lambda v: isinstance(v, Tensor) and v.is_floating_point()  # noqa: E731
        return tree_map(lambda v: v.to(self.param_dtype) if floating(v) else v, values)


@dataclass(frozen=True)
class Placement:
    """Where shards and copies live. Groups of one rank are None: there is nothing to send."""

    shard_group: Any  # parameters are cut over these ranks
    replica_group: Any  # and kept equal over these (NO_SHARD, HYBRID_SHARD)
    device: torch.device  # where the model computes
    offload: bool  # shards and their gradients stay in host memory
    precision: MixedPrecision
    keep_shapes: bool  # NO_SHARD: nothing is cut, so parameters keep their shapes

    @property
    def rank(self) -> int:
        return 0 if self.shard_group is None else self.shard_group.rank()

    @property
    def world_size(self) -> int:
        return 1 if self.shard_group is None else self.shard_group.size()

    @property
    def replicas(self) -> int:
        return 1 if self.replica_group is None else self.replica_group.size()

    @property
    def one_at_a_time(self) -> bool:
        """Whether a transfer ends before the next begins. On a CPU all of them take their time from
        the computation: two at once are no faster, and hold the memory of both."""
        return self.device.type == "cpu"

    @property
    def groups(self) -> list[Any]:
        """All groups in which something has to be sent."""
        return [g for g in (self.shard_group, self.replica_group) if g is not None]

    def spread(self, tensor: Tensor, by: str) -> None:
        """Collective. Give every rank the values of the first one."""
        for group in self.groups:
            coll.broadcast(tensor, 0, group=group, by=by)

    def any_rank(self, flags: list[bool], by: str) -> list[bool]:
        """Collective. For each flag whether it is set on any rank."""
        mine = torch.tensor(flags, dtype=torch.uint8, device=self.device)
        for group in self.groups:
            everyone = mine.new_zeros(group.size() * mine.numel())
            coll.all_gather(everyone, mine, group=group, by=by)
            mine = everyone.view(group.size(), -1).amax(0)
        if isinstance(mine, FakeTensor):  # a dry run has no values
            return flags
        return mine.bool().tolist()
