"""A unit of FSDP: a module whose parameters come and go together, and what is going on in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from minidist.comm import collectives as coll
from minidist.parallel.fsdp_flat import FlatShard
from minidist.parallel.fsdp_placement import Placement


class Unit:
    """A module whose parameters are gathered and freed together."""

    def __init__(self, name: str, module: nn.Module, parent: Unit | None):
        self.name, self.module, self.parent = name, module, parent
        self.flats: list[FlatShard] = []
        self.inner: list[Unit] = [self]  # this unit and those inside it
        self.lenders: list[Unit] = []  # outer units that hold parameters which this one uses too
        self.owners: list[nn.Module] = []  # modules inside that register parameters
        self.undo: list[Callable[[], None]] = []  # takes our hooks off the modules
        self.visits = 0  # forwards running and backwards open: whole parameters are installed
        self.pending = 0  # forwards whose backward has not come
        self.waiting = False  # gradients that still have to be reduced

    def __repr__(self) -> str:
        return f"Unit({self.name or 'root'!r})"

    @property
    def trainable(self) -> bool:
        return any(flat.trainable for flat in self.flats)

    @property
    def gathered(self) -> bool:
        return all(flat.gathered or flat.gathering is not None for flat in self.flats)

    def replace_forward(self, forward: Callable) -> None:
        # On the object, not through hooks: `module.forward(x)` has to gather too.
        before = self.module.__dict__.get("forward")
        self.module.forward = forward

        def put_back() -> None:
            del self.module.forward
            if before is not None:
                self.module.forward = before

        self.undo.append(put_back)

    def release(self) -> None:
        """Take everything off the modules that was put there."""
        for undo in self.undo:
            undo()
        self.undo.clear()

    def without_own(self, output: Any) -> Any:
        """`output` with copies in place of parameters and views of them: what leaves the unit would
        be read when their memory has been freed."""
        own = {f.full.untyped_storage()._cdata for f in self.flats if not f.always_whole}

        def is_own(value: Any) -> bool:
            return isinstance(value, Tensor) and value.untyped_storage()._cdata in own

        if not own or not any(map(is_own, tree_leaves(output))):
            return output
        return tree_map(lambda value: value.clone() if is_own(value) else value, output)

    def begin_gather(self) -> None:
        for flat in self.flats:
            flat.begin_gather()

    def finish_gather(self) -> None:
        for flat in self.flats:
            flat.finish_gather()

    def collect_gradients(self) -> None:
        for flat in self.flats:
            flat.collect_gradients()

    def free(self) -> None:
        """Give back the whole parameters, unless they are in use."""
        if not self.visits:
            for flat in self.flats:
                flat.free()

    def enter(self) -> None:
        self.visits += 1
        if self.visits == 1:
            for flat in self.flats:
                flat.install(flat.wholes)

    def leave(self) -> None:
        self.visits -= 1
        if not self.visits:
            for flat in self.flats:
                flat.install(flat.pieces)


class Replicated:
    """The ignored parameters: whole on every rank, their gradients averaged when backward ends."""

    def __init__(self, params: dict[str, nn.Parameter], placement: Placement, on_gradient):
        self.names, self.params, self.placement = list(params), list(params.values()), placement
        self.used: set[int] = set()
        for index, param in enumerate(self.params):
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._note(index, on_gradient))

    def _note(self, index: int, on_gradient) -> Callable[[Tensor], None]:
        def hook(param: Tensor) -> None:
            self.used.add(index)
            on_gradient()

        return hook

    def average(self, used: list[bool]) -> None:
        """`.grad` becomes the mean over all ranks. What came from an earlier backward is equal
        everywhere, so averaging the sum averages what is new."""
        self.used.clear()
        kinds: dict[tuple, list[nn.Parameter]] = {}
        for param, was_used in zip(self.params, used, strict=True):
            if was_used:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                kinds.setdefault((param.dtype, param.device), []).append(param)
        for params in kinds.values():
            grads = [param.grad for param in params]
            flat = torch.cat([g.reshape(-1) for g in grads])
            flat.mul_(1 / (self.placement.world_size * self.placement.replicas))
            for group in self.placement.groups:
                coll.all_reduce(flat, group=group, by="fsdp ignored gradients")
            for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                grad.copy_(part.view(grad.shape))


class Use:
    """One forward of a unit, and the backward through it. Times are counted, not measured."""

    def __init__(self, unit: Unit, start: int, recomputing: bool):
        self.unit, self.start, self.end = unit, start, start
        self.recomputing = recomputing  # activation checkpointing, inside a backward
        self.open = False  # its backward has begun and not ended
        self.task = -1  # autograd's number of that backward; those inside it have higher ones
        self.versions = [[piece._version for piece in flat.pieces] for flat in unit.flats]

    def is_over(self, other: Use) -> bool:
        """Whether nothing of this use is left to go backward when the backward of `other` begins.

        Autograd goes strictly backwards in time, so what ran after `other` is over. A recomputed
        use ran late, in place of a forward long ago: of those all are over but what it is nested in
        and what is nested in it.
        """
        if self.start > other.end:
            return True
        nested = other.unit in self.unit.inner or self.unit in other.unit.inner
        recomputed = self.recomputing or other.recomputing
        return recomputed and (self.unit is other.unit or not nested)

    def check(self) -> None:
        """Backward has to see the values that forward saw."""
        for flat, versions in zip(self.unit.flats, self.versions, strict=True):
            for name, piece, version in zip(flat.names, flat.pieces, versions, strict=True):
                if piece._version != version:
                    raise RuntimeError(
                        f"FSDP: parameter {name!r} was changed between forward and backward (an "
                        "optimizer step in between?): run the forward again before the backward"
                    )


class Hint:
    """In which order units will probably be needed. Only a hint: any other order works too."""

    def __init__(self, expected: list[Unit]):
        self.expected, self.at = expected, 0

    def after(self, unit: Unit, count: int) -> list[Unit] | None:
        """The `count` units expected after `unit`; None if it was not expected itself."""
        try:
            self.at = self.expected.index(unit, self.at) + 1
        except ValueError:
            return None
        return self.expected[self.at : self.at + count]


def tensors_in(values: Any) -> list[Tensor]:
    """All tensors in what a module returned."""
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def agree_on_use(members: list[FlatShard | Replicated], placement: Placement) -> list[list[bool]]:
    """Collective. Per parameter of `members`: whether any rank had a gradient for it."""
    flags = [i in member.used for member in members for i in range(len(member.names))]
    used = iter(placement.any_rank(flags, "fsdp used parameters"))
    return [[next(used) for _ in member.names] for member in members]
