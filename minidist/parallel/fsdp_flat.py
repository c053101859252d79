"""What FSDP keeps of a unit: flat buffers, of which this rank owns one shard.

                  between uses        while the unit computes      after its backward
    shard         this rank's 1/N     the same                     the same, for the optimizer
    full          freed (0 bytes)     all parameters, gathered     freed
    grads         none                none yet (see `at_once`)     all, until reduce-scattered
    pieces        in the modules      swapped for `wholes`         in the modules, `.grad` is 1/N

`FlatShard` is that memory, for parameters of one dtype, and its two movements, all-gather and
reduce-scatter. When they happen is decided in `fsdp.py`.

Freeing is `storage.resize_(0)`: tensors that autograd saved stay valid views of the storage, and
see the values again once it has been regrown and gathered. Until then their version counter is
wrong on purpose: a backward that comes too early is an error, not a read of freed memory.

Chapter 4; document 4.3 and 5.2; Zhao et al. 2023, "PyTorch FSDP", section 3.2.1.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from minidist.comm import collectives as coll
from minidist.measure import tag
from minidist.parallel.flat import FlatLayout
from minidist.parallel.fsdp_placement import Placement

_WHOLE, _FREED = 0, 1  # version counters of a full buffer


class FlatShard:
    """Parameters of one dtype, end to end: one shard per rank, whole while they are used.

    `names`: dotted names. `params` become `pieces`: the same objects, holding only this rank's
    elements, in 1-D. `places[i]`: every (module, attribute) where parameter i is registered; a tied
    weight has several. `shard`: this rank's part of `layout`, the master values. `number`: tells
    this buffer's messages from others'.
    """

    def __init__(
        self,
        names: list[str],
        params: list[nn.Parameter],
        places: list[list[tuple[nn.Module, str]]],
        layout: FlatLayout,
        shard: Tensor,
        placement: Placement,
        number: int,
    ):
        self.names, self.pieces, self.places = names, params, places
        self.layout, self.placement, self.number = layout, placement, number
        self.by = f"fsdp {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        _, compute, reduce = placement.precision.dtypes(shard.dtype)
        self.shard = tag(shard, "parameters")
        # Alone, with nothing to convert, the shard is the whole: no second copy.
        alone = placement.world_size == 1
        self.always_whole = alone and compute == shard.dtype and shard.device == placement.device
        self.full = shard if self.always_whole else layout.buffer(compute, placement.device)
        tag(self.full, "parameters")
        self.wholes = [
            nn.Parameter(view, requires_grad=param.requires_grad)
            for view, param in zip(layout.views(self.full), params, strict=True)
        ]
        self._cut(params)
        self.reduce_dtype = reduce
        self.grads: Tensor | None = None  # whole gradients, while some are in there
        self.grad_views: list[Tensor] = []
        self.hooked: set[int] = set()  # parameters whose gradients are noticed
        self.scale = 1 / (placement.world_size * placement.replicas)
        self.gathered = True
        self.gathering: coll.Work | None = None
        # Whether gradients are collected as they come. Else autograd keeps them until the backward
        # of the unit is over: room for `grads` is then where `full` was. Not where `full` stays,
        # nor where adding up needs the bits of `reduce_dtype`.
        self.at_once = self.always_whole or reduce != compute
        self.filled: set[int] = set()  # parameters with a gradient in `grads`
        self.used: set[int] = set()  # parameters with a gradient since the last agreement
        self.reducing: coll.Work | None = None
        self.means: list[tuple[Tensor, coll.Work | None]] = []  # reduced, not yet in `.grad`
        self.free()

    @classmethod
    def cut(cls, names, params, places, placement: Placement, number: int) -> FlatShard:
        """Collective. Shard whole parameters; all ranks take rank 0's values."""
        layout = FlatLayout(params, placement.world_size)
        values = layout.buffer(params[0].dtype, placement.device)
        layout.pack([param.detach() for param in params], values)
        placement.spread(values, f"fsdp {names[0]} start")
        master, _, _ = placement.precision.dtypes(values.dtype)
        home = torch.device("cpu") if placement.offload else placement.device
        own = layout.shard(values, placement.rank)
        shard = own.to(device=home, dtype=master, copy=True)
        del values, own  # before `full` is allocated
        if placement.offload and placement.device.type == "cuda":
            shard = shard.pin_memory()  # or copies could not be asynchronous
        return cls(names, params, places, layout, shard, placement, number)

    def copy(self, memo: dict[int, Any]) -> FlatShard:
        """An independent copy for the modules and parameters that `memo` (of deepcopy) has."""
        params = [memo[id(piece)] for piece in self.pieces]
        places = [[(memo[id(m)], name) for m, name in entries] for entries in self.places]
        return FlatShard(
            self.names, params, places, self.layout, self.shard.clone(), self.placement, self.number
        )  # fmt: skip

    def _cut(self, params: list[nn.Parameter]) -> None:
        """Let each parameter hold only its elements in this rank's shard (maybe none)."""
        self.spans = [(0, 0)] * len(params)  # elements of parameter i that are here
        self.ranges = [slice(0, 0)] * len(params)  # and where they are in the shard
        for piece in self.layout.pieces(self.placement.rank):
            self.spans[piece.index] = (piece.start, piece.stop)
            length = piece.stop - piece.start
            self.ranges[piece.index] = slice(piece.shard_start, piece.shard_start + length)
        for param, view in zip(params, self.piece_views(self.shard), strict=True):
            param.data = view
            param.minidist_cut = self.placement.world_size > 1  # see `check_optimizers`

    def piece_views(self, shard: Tensor) -> list[Tensor]:
        """This rank's elements of every parameter, as views of a buffer like `shard`."""
        views = [shard[part] for part in self.ranges]
        if self.placement.keep_shapes:
            return [v.view(s) for v, s in zip(views, self.layout.shapes, strict=True)]
        return views

    @property
    def trainable(self) -> bool:
        return any(whole.requires_grad for whole in self.wholes)

    # --- parameters: gather and free ------------------------------------------------------------

    def begin_gather(self) -> None:
        """Start to bring all shards together; does nothing if they are, or are coming."""
        if self.gathered or self.gathering is not None:
            return
        _regrow(self.full)
        mine = self.layout.shard(self.full, self.placement.rank)
        mine.copy_(self.shard, non_blocking=True)  # also converts, and brings it from the host
        if self.placement.shard_group is None:
            self._is_whole()
            return
        self.gathering = coll.all_gather(
            self.full, mine, group=self.placement.shard_group, async_op=True,
            by=f"{self.by} parameters", tag=self.number,
        )  # fmt: skip

    def finish_gather(self) -> None:
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
            self._is_whole()

    def _is_whole(self) -> None:
        self.gathered = True
        _set_version(self.full, _WHOLE)

    def free(self) -> None:
        """Give the memory of the whole parameters back; a gather under way is completed first."""
        self.finish_gather()
        if self.gathered and not self.always_whole:
            _free(self.full)
            _set_version(self.full, _FREED)
            self.gathered = False

    # --- gradients: collect, reduce-scatter, hand out ---------------------------------------------

    def gradient_came(self, index: int) -> None:
        """Autograd has put a gradient into `wholes[index].grad`."""
        grad = self.wholes[index].grad
        if self.at_once or grad is None or grad.layout is not torch.strided:
            self.collect_gradient(index)
        elif grad.untyped_storage()._cdata == self.full.untyped_storage()._cdata:
            self.collect_gradient(index)  # a function returned a parameter: it will be freed

    def collect_gradients(self) -> None:
        """Take all gradients that have come from where autograd has put them."""
        for index in range(len(self.wholes)):
            self.collect_gradient(index)

    def collect_gradient(self, index: int) -> None:
        """Put parameter `index`'s gradient at its place, divided by the number of ranks (the copy
        is needed anyway)."""
        grad, self.wholes[index].grad = self.wholes[index].grad, None
        if grad is None:
            return
        grad = grad.detach()  # with create_graph it has a graph
        if self.reducing is not None:  # an earlier reduction still reads the buffer
            self.finish_reduce()
        if self.grads is None:
            self._take_grads()
        grad = grad.to_dense() if grad.layout is not torch.strided else grad
        view = self.grad_views[index]
        if index in self.filled:
            view.add_(grad, alpha=self.scale)
        elif grad.dtype == view.dtype:
            torch.mul(grad, self.scale, out=view)
        else:  # convert first: dividing by 3 in 16 bits would round before the 32-bit sum
            view.copy_(grad).mul_(self.scale)
        self.filled.add(index)
        self.used.add(index)

    def begin_reduce(self) -> None:
        """Start to average the gradients over ranks; parameters without one count as zeros, so that
        what is sent never depends on the data."""
        if self.grads is None:
            self._take_grads()
        for index, view in enumerate(self.grad_views):
            if index not in self.filled:
                view.zero_()
        self.filled.clear()
        mean = self.grads.new_empty(self.layout.shard_numel)
        tag(mean, "gradients")
        if self.placement.shard_group is None:
            mean.copy_(self.grads)
            self.reducing = coll.Work(mean, None, [])
            return
        group = self.placement.shard_group
        received = coll.make_scratch(mean, self.grads, group)
        self.reducing = coll.reduce_scatter(
            mean, self.grads, group=group, async_op=True, by=f"{self.by} gradients",
            scratch=[tag(part, "buffers") for part in received], tag=self.number,
        )  # fmt: skip

    def finish_reduce(self) -> None:
        """Wait for the shard of the mean, and free the whole gradients."""
        if self.reducing is None:
            return
        mean = self.reducing.wait()
        self.reducing = None
        self.grads, self.grad_views = None, []
        work = None
        if self.placement.replica_group is not None:
            work = coll.all_reduce(
                mean, group=self.placement.replica_group, async_op=True, by=f"{self.by} replicas"
            )
        if work is None and all(piece.grad is not None for piece in self.pieces):
            self._add_up(mean, [True] * len(self.pieces))  # at once: the mean's memory can go
        else:
            self.means.append((mean, work))

    def settle(self, used: list[bool]) -> None:
        """Make the means `.grad` of the pieces. `used[i]`: some rank had a gradient for parameter
        i. One that nobody used keeps what it had, usually None, like a model that is not sharded.
        """
        for mean, work in self.means:
            if work is not None:
                work.wait()
            self._add_up(mean, used)
        self.means.clear()
        self.used.clear()

    def _add_up(self, mean: Tensor, used: list[bool]) -> None:
        mean = tag(mean.to(self.shard), "gradients")  # device and dtype of the master
        for piece, grad, was_used in zip(self.pieces, self.piece_views(mean), used, strict=True):
            if was_used and piece.requires_grad:
                if piece.grad is None:
                    piece.grad = grad
                else:
                    piece.grad.add_(grad)

    def drop_gradients(self) -> None:
        """Forget gradients that have not reached `.grad`."""
        if self.reducing is not None:
            self.reducing.wait()
            self.reducing = None
        for _, work in self.means:
            if work is not None:
                work.wait()
        self.means.clear()
        self.filled.clear()
        self.used.clear()
        self.grads, self.grad_views = None, []
        for whole in self.wholes:
            whole.grad = None

    def _take_grads(self) -> None:
        self.grads = tag(torch.empty_like(self.full, dtype=self.reduce_dtype), "gradients")
        self.grad_views = self.layout.views(self.grads)
        self.layout.clean_padding(self.grads)

    # --- what the modules see ---------------------------------------------------------------------

    def install(self, params: list[nn.Parameter]) -> None:
        """Register `params` (pieces or wholes) in the modules."""
        for param, places in zip(params, self.places, strict=True):
            for module, attribute in places:
                if type(module).__setattr__ is nn.Module.__setattr__:
                    module._parameters[attribute] = param
                else:  # RNNs keep a second list of their weights, up to date by assignment
                    setattr(module, attribute, param)

    def follow_pieces(self, on_gradient) -> None:
        """Take over what the user changed on the pieces since the last forward."""
        memory = self.shard.untyped_storage()._cdata
        for index, (piece, whole) in enumerate(zip(self.pieces, self.wholes, strict=True)):
            if piece.untyped_storage()._cdata != memory:
                raise RuntimeError(
                    f"parameter {self.names[index]!r} no longer lives in its FSDP shard: it was "
                    "moved, converted or replaced (.to(), .half(), p.data = ...) after wrapping. "
                    "Do that before wrapping, or change values in place"
                )
            if piece.requires_grad != whole.requires_grad:
                whole.requires_grad_(piece.requires_grad)
            if piece.requires_grad and index not in self.hooked:
                hook = functools.partial(on_gradient, self, index)
                whole.register_post_accumulate_grad_hook(hook)
                self.hooked.add(index)


def _free(buffer: Tensor) -> None:
    buffer.untyped_storage().resize_(0)


def _regrow(buffer: Tensor) -> None:
    buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())


def _set_version(buffer: Tensor, version: int) -> None:
    try:
        torch._C._autograd._unsafe_set_version_counter((buffer,), (version,))
    except TypeError:  # before torch 2.6
        torch._C._autograd._unsafe_set_version_counter(buffer, version)
