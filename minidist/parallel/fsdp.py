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
gradients of the one before are being reduced (on a CPU one after the other). Bytes sent per step:
3(N-1)/N of the parameters, 2(N-1)/N when they stay gathered between forward and backward.

How does a unit's backward announce its beginning and its end? The gradient of its output starts it.
Autograd runs strictly backwards in time, so when the output of an earlier unit gets its gradient,
everything that ran later is done: that ends it. Neither depends on which parameters were used, so
all ranks send the same things in the same order whatever their data.

Chapter 4; document 4 and 5.2; Rajbhandari et al. 2020, "ZeRO", section 5.3; Zhao et al. 2023,
"PyTorch FSDP". What a unit holds is in `fsdp_unit.py`, the division into units in `fsdp_init.py`,
saving and loading in `fsdp_state.py`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from minidist.measure import span
from minidist.parallel.fsdp_flat import FlatShard
from minidist.parallel.fsdp_init import Plan, check_optimizers, copy_module, make_placement
from minidist.parallel.fsdp_module import ShardedModule
from minidist.parallel.fsdp_placement import MixedPrecision
from minidist.parallel.fsdp_unit import Hint, Replicated, Unit, Use, agree_on_use, tensors_in

__all__ = ["FSDP", "MixedPrecision"]


class FSDP(ShardedModule):
    """Wrap `module` so that each rank keeps a shard of parameters, gradients and optimizer states.

    Construction is collective: all ranks compare their parameters and take rank 0's values. Any
    torch optimizer that treats every element on its own, over `.parameters()`, is then ZeRO-3.

    `strategy`: NO_SHARD, SHARD_GRAD_OP, FULL_SHARD or HYBRID_SHARD (see the top of this file).
    `units`: module classes, or a predicate on modules; each match is gathered and freed as a whole,
    the rest belongs to the root unit, which stays whole from its forward's begin to its end. None:
    all is one unit. `prefetch`: how many units are gathered ahead. While a unit computes, whole are
    it, the units around it, and `prefetch` more.
    `mixed_precision`: see `MixedPrecision`; floating inputs of units are converted, outputs not.
    `offload="cpu"`: shards, their gradients and so the optimizer states stay in host memory (the
    optimizer steps there); without a GPU there is no other memory and it changes nothing.
    `ignored`: modules, module classes or a predicate, left whole on all ranks. Their gradients *are
    averaged* when backward ends, so any optimizer keeps them equal.
    `group`: ProcessGroup, 1-D mesh or None for the world. For HYBRID_SHARD a 2-D mesh (replicas,
    shards), a pair (shard_group, replica_group), or None: shard inside each machine of
    LOCAL_WORLD_SIZE ranks.
    `init(module)`: gives values to what a module on the meta device registers itself; default: its
    `reset_parameters()`. Memory is taken unit by unit, never for the whole model.

    Between forward and backward, `named_parameters()` yields what the optimizer must hold, at any
    time the same objects: under the original names this rank's elements, in 1-D, perhaps none (in
    NO_SHARD whole and in their shapes). They are the module's own Parameter objects, so an
    optimizer that was built before wrapping works too. Freeze and unfreeze them at any time.

    `.grad` is the mean over ranks when `backward()` returns, and adds up over backwards. What this
    rank did not use counts as zeros; a parameter that no rank used keeps `.grad` as it was.
    `torch.autograd.grad` returns this rank's own values. Buffers are equal at first, then each
    rank's own. All ranks must run the same units in the same order; what each computes inside is
    its own affair. `copy.deepcopy` makes an independent copy in the same groups, for an EMA.

    Raises ValueError for what cannot be sharded, RuntimeError naming the first difference between
    ranks; on all ranks, before anything is changed.
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
        init: Callable[[nn.Module], None] | None = None,
    ):
        super().__init__()
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
            raise ValueError(f"prefetch must be a number of units, 0 or more, got {prefetch!r}")
        self.strategy, self.prefetch = strategy, prefetch
        self.placement = make_placement(module, strategy, mixed_precision, offload, group)
        plan = Plan(module, units, ignored, FSDP)
        plan.check(self.placement, {"strategy": strategy, "prefetch": prefetch})
        flats = plan.build(self.placement, init)
        ignored_params = {name: plan.params[name] for name in plan.replicated}
        for name, tensor in (*ignored_params.items(), *module.named_buffers()):
            self.placement.spread(tensor.data, f"fsdp {name} start")
        self._begin(module, plan.units, flats, ignored_params)
        check_optimizers()

    def _begin(self, module: nn.Module, units: list[Unit], flats: list[FlatShard], ignored) -> None:
        self.module, self.units, self.flats = module, units, flats
        self._unit_of = {flat: unit for unit in units for flat in unit.flats}
        self._sync = True
        self._running: list[Use] = []  # forwards under way, outermost first
        self._opened: list[Use] = []  # backwards under way
        self._clock = itertools.count()
        self._ahead: list[Unit] = []  # gathered before they are needed
        self._forward_hint, self._backward_hint = Hint([]), Hint([])
        self._starts: list[Unit] = []  # in which order the units of this forward began
        self._ends: list[Unit] = []  # and ended
        self._recomputed: Unit | None = None
        self._with_grad = True  # the outermost forward began with gradients enabled
        self._keep_graph = False
        self._end_queued = False
        self._in_flight: FlatShard | None = None  # being reduced; one at a time shares memory
        self._reduced: set[FlatShard] = set()  # in this backward
        self.replicated = Replicated(ignored, self.placement, self._on_replicated_gradient)
        for unit in units:
            self._surround(unit)
            self._listen(unit)
            if len(unit.inner) > 1:  # its parameters are whole while the units inside go backward
                for flat in unit.flats:
                    flat.at_once = True

    def _surround(self, unit: Unit) -> None:
        """Put gather and free around the module's forward, however it is called."""
        compute = unit.module.forward

        @torch.compiler.disable
        @functools.wraps(compute)
        def forward(*args, **kwargs):
            return self._run(unit, compute, args, kwargs)

        unit.replace_forward(forward)

    def _listen(self, unit: Unit) -> None:
        """Also the output of a module inside the unit may announce the backward: a loss can be made
        of what the unit stored on the way, without its output."""

        def on_output(module, args, output):
            for use in reversed(self._running):
                if use.unit is unit:
                    self._watch(use, output)
                    break

        unit.undo += [owner.register_forward_hook(on_output).remove for owner in unit.owners]

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
        cast = self.placement.precision.cast
        use = self._begin_forward(unit)
        try:
            with span(f"forward {unit.name or 'root'}"):
                output = unit.without_own(compute(*cast(args), **cast(kwargs)))
        except BaseException:
            self._end_forward(use, failed=True)
            raise
        self._end_forward(use)
        self._watch(use, output)
        return output

    def _begin_forward(self, unit: Unit) -> Use:
        task = _backward_task()
        recomputing = task != -1
        if not self._running and not recomputing:
            self._begin_outermost(unit)
        use = Use(unit, next(self._clock), recomputing)
        self._running.append(use)
        if recomputing:
            self._free_recomputed(unit, task)
            self._make_ready(unit)
        else:
            self._starts.append(unit)
            unit.pending += self._with_grad
            self._make_ready(unit)
            self._look_ahead(self._forward_hint.after(unit, self.prefetch))
        unit.enter()
        return use

    def _end_forward(self, use: Use, failed: bool = False) -> None:
        unit = use.unit
        self._running.pop()
        use.end = next(self._clock)
        unit.leave()
        if use.recomputing:
            self._recomputed = unit  # its backward comes next
            return
        self._ends.append(unit)
        if not self._with_grad or self.strategy in ("FULL_SHARD", "HYBRID_SHARD"):
            unit.free()
        if not self._running:
            self._end_outermost(unit, failed)

    def _make_ready(self, unit: Unit) -> None:
        # Not when a gradient comes: which gradients come may differ between ranks, and what is sent
        # next must not. (SHARD_GRAD_OP sends nothing next, and waits for the first gradient.)
        if self.placement.one_at_a_time and self.strategy != "SHARD_GRAD_OP":
            self._finish_in_flight()
        if unit in self._ahead:
            self._ahead.remove(unit)
        unit.begin_gather()
        unit.finish_gather()

    def _look_ahead(self, upcoming: list[Unit] | None) -> None:
        """Start to gather what will be needed next (None: unknown). At most `prefetch` units are
        ahead: what was fetched on a hint that proved wrong is freed first."""
        if upcoming is None:
            return
        for other in [u for u in self._ahead if u not in upcoming]:
            self._ahead.remove(other)
            other.free()
        for unit in upcoming:
            if not unit.gathered:
                unit.begin_gather()
                self._ahead.append(unit)

    def _begin_outermost(self, unit: Unit) -> None:
        if self.busy:
            raise RuntimeError("FSDP: a forward inside another one's forward")
        self._ahead.clear()
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
                # Backward begins where forward ended: fetch while the loss is computed.
                if any(unit.trainable for unit in self.units):
                    gathered_first = [u for u in self._backward_hint.expected if u.flats]
                    self._look_ahead(gathered_first[: self.prefetch])

    def _free_ahead(self) -> None:
        for unit in self._ahead:
            unit.free()
        self._ahead.clear()

    def _free_recomputed(self, unit: Unit, task: int) -> None:
        """Before more is recomputed: backwards inside this one, of reentrant checkpoints, are over.
        And a checkpoint around many units recomputes all before the first backward: keep one."""
        with torch.no_grad():
            for over in [u for u in self._opened if u.task > task]:
                self._end_backward(over)
        if self._recomputed not in (None, unit):
            self._recomputed.free()
        self._recomputed = None

    # --- backward: gather -> compute -> free -> reduce-scatter ----------------------------------

    def _watch(self, use: Use, output: Any) -> None:
        """Let the gradient of the output announce the unit's backward."""
        if torch.is_grad_enabled():
            for tensor in (output,) if isinstance(output, Tensor) else tensors_in(output):
                if tensor.grad_fn is not None:
                    # As tensor.register_hook, with half of its Python.
                    hook = functools.partial(self._on_output_gradient, use)
                    tensor.grad_fn.register_prehook(hook)

    def _on_output_gradient(self, use: Use, grads: tuple[Tensor, ...]) -> None:
        if not use.open:  # called for every output of every module in the unit
            self._begin_backward(use)

    @torch.compiler.disable
    def _begin_backward(self, use: Use) -> None:
        if not self._end_queued:
            self._queue_end()
        with torch.no_grad():
            for over in [u for u in self._opened if u.is_over(use)]:
                self._end_backward(over)
            use.check()
            use.open, use.task = True, _backward_task()
            self._opened.append(use)
            self._make_ready(use.unit)
            use.unit.enter()
            self._look_ahead(self._backward_hint.after(use.unit, self.prefetch))

    def _on_gradient(self, flat: FlatShard, index: int, whole: nn.Parameter) -> None:
        if not self._end_queued:
            self._queue_end()
        unit = self._unit_of[flat]
        if not unit.visits:
            unit.waiting = True  # nothing announced this backward: reduce it at the end
        if self.strategy == "SHARD_GRAD_OP" and self.placement.one_at_a_time:
            self._finish_in_flight()  # before this unit fills memory with its own
        flat.gradient_came(index)

    def _on_replicated_gradient(self) -> None:
        if not self._end_queued:
            self._queue_end()

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
            unit.collect_gradients()
            unit.waiting = True
            # Used again in this backward: its gradients are not complete.
            if self._sync and not unit.pending and not unit.visits:
                self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        unit.waiting = False
        for flat in unit.flats:
            if flat.trainable:
                self._finish_in_flight()
                flat.begin_reduce()
                self._in_flight = flat
                self._reduced.add(flat)

    def _finish_in_flight(self) -> None:
        if self._in_flight is not None:
            self._in_flight.finish_reduce()
            self._in_flight = None

    def _queue_end(self) -> None:
        """Once per backward: let autograd call `_end_of_backward`."""
        # create_graph: a second backward will read the parameters through the graph of this one.
        self._keep_graph = torch.is_grad_enabled()
        self._end_queued = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    @torch.compiler.disable
    @torch.no_grad()
    def _end_of_backward(self) -> None:
        self._end_queued = False
        for use in sorted(self._opened, key=lambda use: use.start, reverse=True):
            self._end_backward(use)
        for unit in reversed(self.units):
            if unit.waiting:
                unit.collect_gradients()
                if self._sync:
                    self._reduce(unit)
        if self._sync:
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

    def recover(self) -> None:
        if self._end_queued and _backward_task() == -1:
            self._abandon_backward()

    @property
    def busy(self) -> bool:
        self.recover()
        return bool(self._running or self._opened)

    def __deepcopy__(self, memo):
        """An independent copy: its own shards and hooks, the same groups. Not collective."""
        return copy_module(self, memo)


def _backward_task() -> int:
    """The number of the backward that autograd is running here; -1 for none."""
    return torch._C._current_graph_task_id()
