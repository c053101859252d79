"""Fully sharded data parallel (ZeRO-3): every rank keeps 1/N of everything, and gathers to compute.

    kept by each rank    parameters             gradients   optimizer states
    NO_SHARD             whole                  whole       whole               (like DDP)
    SHARD_GRAD_OP        whole, forward to      1/N         1/N
                         backward, then 1/N
    FULL_SHARD           1/N + units in use     1/N         1/N
    HYBRID_SHARD         as FULL_SHARD in a group of N, and the same again in other groups

    forward of a unit    all-gather its parameters -> compute -> free them
    backward of a unit   all-gather again -> compute -> free -> reduce-scatter its gradients
    optimizer            any torch optimizer, on the pieces of parameters that this rank owns

While a unit computes, the next one (in the order of the last time) is being gathered, and the
gradients of the one before are being reduced. Bytes sent per step: 3(N-1)/N of the parameters,
2(N-1)/N when they stay gathered between forward and backward.

How does a unit's backward announce its beginning and its end? The gradient of its output starts it.
Autograd runs strictly backwards in time, so when the output of an earlier unit gets its gradient,
everything that ran later is done: that ends it. Neither depends on which parameters were used, so
all ranks send the same things in the same order whatever their data.

Chapter 5; document 4 and 5.2; Rajbhandari et al. 2020, "ZeRO", section 5.3; Zhao et al. 2023,
"PyTorch FSDP". What a unit holds is in `fsdp_unit.py`, the division into units in `fsdp_init.py`,
saving and loading in `fsdp_state.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from minidist.comm import collectives as coll
from minidist.measure import span, tag
from minidist.parallel import fsdp_init
from minidist.parallel.agree import check_same_parameters
from minidist.parallel.fsdp_module import ShardedModule
from minidist.parallel.fsdp_unit import (
    FlatShard,
    MixedPrecision,
    Placement,
    Replicated,
    Unit,
    agree_on_use,
    spread,
)

__all__ = ["FSDP", "MixedPrecision"]


class Use:
    """One forward of a unit, and the backward through it. Times are counted, not measured."""

    __slots__ = ("unit", "start", "end", "recomputing", "open")

    def __init__(self, unit: Unit, start: int, recomputing: bool):
        self.unit, self.start, self.end = unit, start, start
        self.recomputing = recomputing  # activation checkpointing, inside a backward
        self.open = False  # its backward has begun and not ended


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


class FSDP(ShardedModule):
    """Wrap `module` so that each rank keeps a shard of parameters, gradients and optimizer states.

    TODO
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        strategy: str = "FULL_SHARD",
        units: Any = None,
        mixed_precision: MixedPrecision | None = None,
        offload: str | None = None,
        prefetch: int = 1,
        ignored: Any = None,
        group: Any = None,
        init: Any = None,
    ):
        super().__init__()
        if strategy not in fsdp_init.STRATEGIES:
            raise ValueError(
                f"unknown strategy {strategy!r}: use one of {', '.join(fsdp_init.STRATEGIES)}"
            )
        if offload not in (None, "cpu"):
            raise ValueError(f"offload must be None or 'cpu', got {offload!r}")
        if not isinstance(prefetch, int) or prefetch < 0:
            raise ValueError(f"prefetch must be a number of units, 0 or more, got {prefetch!r}")
        self.module, self.strategy, self.prefetch = module, strategy, prefetch
        shard_group, replica_group = fsdp_init.resolve_groups(strategy, group)
        self.placement = Placement(
            shard_group, replica_group, fsdp_init.compute_device(module, shard_group),
            offload is not None, mixed_precision or MixedPrecision(), strategy == "NO_SHARD",
        )  # fmt: skip
        plan = fsdp_init.Plan(module, units, ignored, FSDP)
        for members in (shard_group, replica_group):
            if members is not None:
                settings = {"strategy": strategy, "prefetch": prefetch,
                            "mixed_precision": mixed_precision, "offload": offload,
                            "units": [u.name for u in plan.units]}  # fmt: skip
                check_same_parameters(
                    plan.params.items(), members, extra=settings, who="FSDP",
                    named_buffers=module.named_buffers(),
                )  # fmt: skip
        plan.check()
        self.flats: list[FlatShard] = plan.build(self.placement, init)
        self.units: list[Unit] = plan.units
        self._unit_of = {flat: unit for unit in self.units for flat in unit.flats}
        ignored_params = {name: plan.params[name] for name in plan.replicated}
        self.replicated = Replicated(ignored_params, self.placement, self._queue_end)
        for name, buffer in module.named_buffers():
            spread(buffer, self.placement, f"fsdp {name} start")
        self._reset()
        for unit in self.units:
            self._surround(unit)
        for owner, unit in plan.unit_of.items():
            if owner is not unit.module and owner._parameters and unit in self.units:
                self._listen(owner, unit)

    def _reset(self) -> None:
        self._sync = True
        self._running: list[Use] = []  # forwards under way, outermost first
        self._opened: list[Use] = []  # backwards under way
        self._clock = 0
        self._ahead: list[Unit] = []  # gathered before they are needed
        self._forward_hint, self._backward_hint = Hint([]), Hint([])
        self._starts: list[Unit] = []  # the order of this forward
        self._ends: list[Unit] = []
        self._recomputed: Unit | None = None
        self._with_grad = True
        self._keep_graph = False
        self._end_queued = False
        self._in_flight: FlatShard | None = None  # being reduced; one at a time, they share scratch
        self._reduced: dict[FlatShard, None] = {}  # reduced in this backward
        self._scratch: dict[torch.dtype, Tensor] = {}

    def _surround(self, unit: Unit) -> None:
        """Put gather and free around the module's forward, however it is called."""
        compute = unit.module.forward

        @torch.compiler.disable
        @functools.wraps(compute)
        def forward(*args, **kwargs):
            return self._run(unit, compute, args, kwargs)

        unit.module.forward = forward

    def _listen(self, owner: nn.Module, unit: Unit) -> None:
        """Also the output of a module inside the unit may announce the backward: a loss can be made
        of what the unit stored on the way, without its output."""

        def on_output(module, args, output):
            use = next((use for use in reversed(self._running) if use.unit is unit), None)
            if use is not None:
                self._watch(use, output)

        owner.register_forward_hook(torch.compiler.disable(on_output))

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    # --- forward: gather -> compute -> free -------------------------------------------------------

    def _run(self, unit: Unit, compute, args, kwargs):
        if self.summoned is not None:  # inside full_params(): everything is there
            with torch.no_grad():
                return compute(*args, **kwargs)
        for lender in unit.lenders:
            if not lender.visits:  # called past the unit that holds a shared parameter
                inner = functools.partial(self._run, unit, compute)
                return self._run(lender, inner, (args, kwargs), {})
        use = self._begin_forward(unit)
        try:
            with span(f"forward {unit.name or 'root'}"):
                output = compute(*self._cast(args), **self._cast(kwargs))
        except BaseException:
            self._end_forward(use, failed=True)
            raise
        self._end_forward(use)
        self._watch(use, output)
        return output

    def _begin_forward(self, unit: Unit) -> Use:
        recomputing = _in_backward()
        if not self._running and not recomputing:
            self._begin_outermost(unit)
        use = Use(unit, self._tick(), recomputing)
        self._running.append(use)
        if recomputing:
            self._free_recomputed(unit)
            self._make_ready(unit, None)
        else:
            self._starts.append(unit)
            unit.pending += self._with_grad
            self._make_ready(unit, self._forward_hint.after(unit, self.prefetch))
        unit.enter()
        return use

    def _end_forward(self, use: Use, failed: bool = False) -> None:
        unit = use.unit
        self._running.pop()
        use.end = self._tick()
        unit.leave()
        if use.recomputing:
            self._recomputed = unit  # its backward comes next
            return
        self._ends.append(unit)
        if not self._with_grad or self.strategy in ("FULL_SHARD", "HYBRID_SHARD"):
            unit.free()
        if not self._running:
            self._end_outermost(unit, failed)

    def _make_ready(self, unit: Unit, upcoming: list[Unit] | None) -> None:
        """Gather `unit`, and start to gather what will be needed next (None: unknown). At most
        `prefetch` units are ahead: what was fetched on a hint that proved wrong is freed first."""
        if unit in self._ahead:
            self._ahead.remove(unit)
        unit.begin_gather()
        unit.finish_gather()
        if upcoming is None:
            return
        for other in [u for u in self._ahead if u not in upcoming]:
            self._ahead.remove(other)
            other.free()
        for other in upcoming:
            if not other.gathered:
                other.begin_gather()
                self._ahead.append(other)

    def _begin_outermost(self, unit: Unit) -> None:
        if self._end_queued:
            self._abandon_backward()
        for inner in unit.inner:
            # Left over from a forward without backward: the optimizer may have changed the shards.
            inner.free()
            for flat in inner.flats:
                flat.follow_pieces(self._on_gradient)
        self._with_grad = torch.is_grad_enabled()
        if unit is self.units[0]:
            self._starts, self._ends = [], []

    def _end_outermost(self, unit: Unit, failed: bool) -> None:
        self._free_ahead()
        if failed:  # no backward will come through what had run
            for unit in self.units:
                unit.pending = 0
                unit.free()
        elif unit is self.units[0]:
            self._forward_hint = Hint(self._starts)
            if self._with_grad:
                self._backward_hint = Hint(self._ends[::-1])

    def _free_ahead(self) -> None:
        for unit in self._ahead:
            unit.free()
        self._ahead.clear()

    def _free_recomputed(self, unit: Unit) -> None:
        """A checkpoint around many units recomputes all before the first backward: keep one."""
        if self._recomputed not in (None, unit):
            self._recomputed.free()
        self._recomputed = None

    # --- backward: gather -> compute -> free -> reduce-scatter ----------------------------------

    def _watch(self, use: Use, output: Any) -> None:
        """Let the gradient of the output announce the unit's backward."""
        if not torch.is_grad_enabled():
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(functools.partial(self._begin_backward, use))

    def _begin_backward(self, use: Use, grad: Tensor) -> None:
        if use.open:
            return
        self._queue_end()
        with torch.no_grad():
            for later in [u for u in self._opened if u.start > use.end]:
                self._end_backward(later)
            use.open = True
            self._opened.append(use)
            self._make_ready(use.unit, self._backward_hint.after(use.unit, self.prefetch))
            use.unit.enter()

    def _on_gradient(self, flat: FlatShard, index: int, whole: nn.Parameter) -> None:
        self._queue_end()
        unit = self._unit_of[flat]
        unit.waiting |= not unit.visits  # nothing announced this backward: reduce it at the end
        grad, whole.grad = whole.grad, None
        with torch.no_grad():
            flat.add_gradient(index, grad)

    def _end_backward(self, use: Use) -> None:
        """Everything that ran after the beginning of this use has gone backward."""
        unit = use.unit
        use.open = False
        self._opened.remove(use)
        unit.leave()
        unit.pending = max(0, unit.pending - 1)
        if not unit.visits and not self._keep_graph:
            unit.free()
        if unit.trainable:
            unit.waiting = True
            # Used again in this backward: its gradients are not complete.
            if self._sync and not unit.pending and not unit.visits:
                self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        unit.waiting = False
        for flat in unit.flats:
            if flat.trainable:
                if self._in_flight is not None:
                    self._in_flight.finish_reduce()
                flat.begin_reduce(self._scratch_for(flat))
                self._in_flight = flat
                self._reduced[flat] = None

    def _queue_end(self) -> None:
        """Once per backward: let autograd call `_end_of_backward`."""
        if self._end_queued:
            return
        # create_graph: a second backward will read the parameters through the graph of this one.
        self._keep_graph = torch.is_grad_enabled()
        self._end_queued = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    @torch.no_grad()
    def _end_of_backward(self) -> None:
        self._end_queued = False
        for use in sorted(self._opened, key=lambda use: use.start, reverse=True):
            self._end_backward(use)
        if self._sync:
            for unit in reversed(self.units):
                if unit.waiting:
                    self._reduce(unit)
            self._settle()
        self._free_ahead()
        self._recomputed = None
        for unit in self.units:
            unit.pending = 0
            if not self._keep_graph:
                unit.free()

    def _settle(self) -> None:
        """Hand the reduced gradients to the pieces' `.grad`."""
        if not self._reduced and not self.replicated.names:
            return
        used = agree_on_use([*self.flats, self.replicated], self.placement)
        for flat, flags in zip(self.flats, used, strict=False):
            if flat in self._reduced:
                flat.finish_reduce()
                flat.settle(flags)
        self.replicated.average(used[-1])
        self._in_flight = None
        self._reduced.clear()

    def _abandon_backward(self) -> None:
        """The last backward ended with an error: forget what it left half done."""
        self._end_queued = False
        for use in self._opened:
            use.open = False
            use.unit.leave()
        self._opened.clear()
        self._free_ahead()
        for flat in self.flats:
            flat.drop_gradients()
        for unit in self.units:
            unit.pending, unit.waiting = 0, False
        self._in_flight, self._keep_graph = None, False
        self._reduced.clear()

    def _scratch_for(self, flat: FlatShard) -> Tensor | None:
        """Where the peers' parts arrive: kept, as fresh memory costs page faults every step."""
        group = self.placement.shard_group
        need = coll.scratch_numel(flat.grads, group) if group is not None else 0
        if not need:
            return None
        dtype = flat.grads.dtype
        if dtype not in self._scratch:
            same = [f.grads for f in self.flats if f.grads.dtype == dtype]
            most = max(coll.scratch_numel(grads, group) for grads in same)
            self._scratch[dtype] = tag(flat.grads.new_empty(most), "buffers")
        return self._scratch[dtype][:need]

    # --- small helpers ----------------------------------------------------------------------------

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _cast(self, values: Any) -> Any:
        dtype = self.placement.precision.param_dtype
        if dtype is None:
            return values
        return tree_map(
            lambda v: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v, values
        )

    # --- for the user -----------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients add up locally, whole, and nothing is reduced: less traffic for more memory.

        The *backward* decides, wherever the forward ran: only a `backward()` outside reduces, and
        it reduces all that has added up.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @property
    def busy(self) -> bool:
        return bool(self._running or self._opened)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
