"""Pipeline parallelism: each rank holds some layers, micro-batches flow through (document 3.2).

    rank 0  layers 0-3    F0 F1 F2 F3 ........ B0 F4     parameters, gradients, optimizer: 1/p
    rank 1  layers 4-7       F0 F1 F2 .... B0 F3 ...     activations: the micro-batches in flight
    rank 2  layers 8-11         F0 F1 . B0 F2 B1 ...     traffic per micro-batch and boundary: one
    rank 3  layers 12-15           F0 B0 F1 B1 F2 B2       activation down, its gradient back

The order of things is not decided here: schedules.py lists it, and `_run` walks through that list,
with the sends and receives that messages.py puts in between. The naive model parallelism of the
second document (a batch goes through all devices in turn) is `schedule="naive", microbatches=1`.

What holds for every schedule:

* Loss and gradients are those of the whole batch in one process, whatever the number of stages and
  micro-batches. Each micro-batch is scaled once, before its backward, and added to `.grad`.
* Receives are posted before they are needed and in an order that cannot deadlock.
* A micro-batch's graph is freed in its backward, a stage's output as soon as it has been sent.
* BatchNorm works on micro-batches: it normalises each by its own statistics and updates the running
  ones once per micro-batch. Recomputation (activation checkpointing) does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.batchnorm import _NormBase

from minidist.comm import collectives as coll
from minidist.measure import span
from minidist.parallel.batchloss import BatchLoss
from minidist.parallel.mailbox import Mailbox
from minidist.parallel.messages import Receive, Send, programs
from minidist.parallel.microbatches import cut, flatten, join
from minidist.parallel.schedules import Action, Schedule
from minidist.parallel.schedules import schedule as build_schedule
from minidist.parallel.split import Stage, deal, layer_costs, split
from minidist.parallel.tied import Tied
from minidist.parallel.weightgrad import LinearGradients

__all__ = ["Pipeline", "Stage", "layer_costs", "split"]

_AHEAD = 3  # by how many actions a receive is posted early; each costs one buffer


class Pipeline(nn.Module):
    """This rank's part of a pipeline over the ranks of `group`. Collective.

    stages: this rank's module, or its list of chunks (virtual stage chunk*p + rank; for zb-v down
      and up again), or all parts from `md.split`, of which it takes its own. A stage takes one
      argument, what the stage before returned: a tensor, or tuples, lists and dicts of tensors,
      None, numbers. What a later stage needs has to be handed on by the stages between.
    schedule: a name (see `md.schedule`) or a Schedule of your own.
    loss_fn: loss_fn(output of the last stage, targets) -> scalar, called on the last stage's rank.
    reduction: what loss_fn does over a micro-batch, "mean" or "sum"; default: its own `reduction`
      if it has one, else "mean".
    count: count(targets of a micro-batch) -> number of terms in its mean, which is its weight in
      the mean of the batch. Default: the elements of the targets; of class indices those that are
      not `ignore_index` (-100), times the loss's class weights.
    tied: {name: parameter} of which other ranks hold copies under the same name (embedding and head
      that share weights); `md.split` finds them. Copies start equal and get the same, summed
      gradient.
    dynamic: exchange shapes before every message, for stages whose output shapes depend on the
      values. Otherwise they are agreed on once for each combination of input shapes.

    ValueError on all ranks if the parts or sizes of any rank do not fit.
    """

    def __init__(
        self,
        stages: nn.Module | list[nn.Module],
        *,
        schedule: str | Schedule = "1f1b",
        microbatches: int,
        loss_fn: Callable[[Any, Any], Tensor],
        reduction: str | None = None,
        count: Callable[[Any], float] | None = None,
        tied: dict[str, nn.Parameter] | None = None,
        dynamic: bool = False,
        group=None,
    ):
        super().__init__()
        self.group, self.rank, size = group, coll.rank(group), coll.world_size(group)
        self.dynamic = dynamic
        problem = settings = None
        try:
            parts = list(stages) if isinstance(stages, (list, nn.ModuleList)) else [stages]
            self.schedule = _resolve(schedule, size, microbatches, parts)
            self.chunks = nn.ModuleList(deal(parts, self.schedule, self.rank))
            settings = (self.schedule.name, size, microbatches, self.schedule.chunks, dynamic)
            settings += (crc32(repr(self.schedule.actions).encode()),)
            self.loss = BatchLoss(loss_fn, reduction, count)
        except (ValueError, TypeError) as error:
            problem = str(error)
        _agree(problem, settings, group)

        self.is_first = self.schedule.owner(0)[0] == self.rank
        self.is_last = self.schedule.owner(self.schedule.virtual_stages - 1)[0] == self.rank
        self.peak_in_flight = 0  # measured in the last step: most (micro-batch, chunk) pairs
        parameter = next(self.parameters(), torch.empty(0))
        self.device = parameter.device
        self.mailbox = Mailbox(self.schedule, group, self.device)
        last = {(a.kind, a.chunk): a for a in self.schedule.actions[self.rank] if a.kind != "I"}
        self._final = set(last.values())  # the last F and the last B or W of each chunk
        self._norms = [[m for m in c.modules() if isinstance(m, _NormBase)] for c in self.chunks]
        self._programs: dict[tuple[str, int], list] = {}
        self._signature: dict[str, Any] = {}
        self._held: dict[tuple[int, int], tuple[list, list, LinearGradients]] = {}
        shared = dict(tied or {})
        for chunk in self.chunks:
            shared.update(getattr(chunk, "tied", {}))
        self.tied = Tied(shared, group)

    # ------------------------------------------------------------------ what users call
    def step(self, inputs: Any, targets: Any, *, scale: float = 1.0) -> Tensor | None:
        """Forward and backward of one batch; gradients are added to `.grad`. Collective.

        inputs are used on the first stage's rank, targets on the last stage's (others may pass
        None). Tensors, also in tuples and dicts, are cut along dimension 0 into micro-batches, the
        larger ones first; a list is taken as the micro-batches themselves. scale multiplies the
        gradients, not the returned loss: 1/k for k accumulated steps, or loss scaling.

        Returns the loss of the whole batch (a detached scalar) on the last stage's rank, None on
        the others. ValueError on all ranks, before any computation, if the batch cannot be cut.
        """
        self._inputs, targets = self._begin("train", inputs, targets)
        self.loss.begin(targets, scale)
        self.tied.before_step()
        with torch.enable_grad():
            self._run("FBIW")
        self.tied.after_step()
        return self.loss.total

    @torch.no_grad()
    def forward(self, inputs: Any) -> Any:
        """Evaluate a batch, cut as `step` does. Collective. Call `.eval()` first, as ever.

        Returns the output, joined again along dimension 0, on the last stage's rank, else None.
        """
        self._inputs, _ = self._begin("eval", inputs, None)
        self._outputs: dict[int, Any] = {}  # by micro-batch
        self._run("F")
        outputs, self._outputs = self._outputs, {}
        return join([outputs[i] for i in sorted(outputs)]) if self.is_last else None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over the whole pipeline is at most `max_norm`; a
        tied parameter counts once. Returns the norm before. Collective over `group`."""
        mine = [p for p in self.parameters() if p.grad is not None]
        counted = [p.grad.flatten() for p in mine if p not in self.tied.duplicates]
        norms = [torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64) for grad in counted]
        norm = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64)
        norm = torch.linalg.vector_norm(norm.to(self.device), norm_type)
        if norm_type == float("inf"):
            norm = coll.all_reduce(norm, "max", group=self.group, by="pipeline clip")
        else:
            norm = coll.all_reduce(norm**norm_type, group=self.group, by="pipeline clip")
            norm = norm ** (1 / norm_type)
        for parameter in mine:
            parameter.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0).to(parameter.dtype))
        return norm

    # ------------------------------------------------------------------ the executor
    def _run(self, kinds: str) -> None:
        """Walk through this rank's program: the one loop that serves every schedule."""
        perform = {"F": self._forward, "B": self._backward, "I": self._backward, "W": self._weights}
        for item in self._program(kinds):
            if isinstance(item, Receive):
                self.mailbox.post(item.transfer)
            elif isinstance(item, Send):
                self.mailbox.send(item.transfer)
            else:
                perform[item.kind](item)
        self.mailbox.finish()

    def _forward(self, action: Action) -> None:
        kind, microbatch, chunk = action
        stage = self.schedule.stage(self.rank, chunk)
        last = stage == self.schedule.virtual_stages - 1
        training = torch.is_grad_enabled()
        if stage == 0:
            value, leaves = self._inputs[microbatch], []
        else:
            value, leaves = self.mailbox.take_activation(microbatch, stage)
        weights = LinearGradients(
            later=self.schedule.splits_backward,
            in_place=not hasattr(self.chunks[chunk], "no_sync"),  # its hooks may be out of sight
        )
        with span(str(action)), self._reducing(action), weights.forward():
            output = self.chunks[chunk](value)
            if last and training:
                output = self.loss.part(output, microbatch)
        if training:
            # The graph is held by its roots, not by the output: that is free once it is sent.
            roots = [get_gradient_edge(t) for t in flatten(output)[0] if t.requires_grad]
            self._held[microbatch, chunk] = leaves, roots, weights
            self.peak_in_flight = max(self.peak_in_flight, len(self._held))
        if not last:
            self.mailbox.put_activation(microbatch, stage + 1, output)
        elif not training:
            self._outputs[microbatch] = output

    def _backward(self, action: Action) -> None:
        """B: all gradients. I: those of linear weights have to wait."""
        kind, microbatch, chunk = action
        stage = self.schedule.stage(self.rank, chunk)
        last = stage == self.schedule.virtual_stages - 1
        grads = None if last else self.mailbox.take_gradients(microbatch, stage)
        leaves, roots, weights = self._held[microbatch, chunk]
        with span(str(action)), self._reducing(action), weights.backward():
            with _frozen_statistics(self._norms[chunk]):
                if roots:
                    torch.autograd.backward(roots, grads)
        if kind == "I":
            self._held[microbatch, chunk] = [], [], weights
        else:
            del self._held[microbatch, chunk]
        if stage:
            self.mailbox.put_gradients(microbatch, stage - 1, leaves)

    def _weights(self, action: Action) -> None:
        *_, weights = self._held.pop((action.microbatch, action.chunk))
        chunk = self.chunks[action.chunk]
        with span(str(action)), self._reducing(action):
            # Data parallelism expects all gradients of a chunk in one backward, also those done.
            reduces = hasattr(chunk, "no_sync") and action in self._final
            weights.accumulate(chunk.parameters() if reduces else ())

    def _reducing(self, action: Action):
        """A data-parallel chunk (one with `no_sync`) reduces once, in its last backward."""
        chunk = self.chunks[action.chunk]
        local = hasattr(chunk, "no_sync") and action not in self._final
        return chunk.no_sync() if local else nullcontext()

    def _program(self, kinds: str) -> list:
        # While shapes are being learned, a receive waits for them: then nothing may be posted out
        # of order. Nor on CUDA, where NCCL matches messages by order, not by tag.
        ahead = 0 if self.mailbox.learning or self.device.type != "cpu" else _AHEAD
        if (kinds, ahead) not in self._programs:
            self._programs[kinds, ahead] = programs(self.schedule, ahead, kinds)[self.rank]
        return self._programs[kinds, ahead]

    # ------------------------------------------------------------------ before a step
    def _begin(self, mode: str, inputs: Any, targets: Any) -> tuple[list, list]:
        """Cut the batch; agree with all ranks that it can be run and whether its shapes are new.

        One small all-reduce. Without it a rank that refuses its batch would leave the others
        waiting for messages, and a rank in between would not know that shapes have changed.
        """
        input_parts, target_parts, problem = [], [], None
        key = input_rows = target_rows = 0
        try:
            if self.is_first:
                input_parts, input_rows = cut(inputs, self.schedule.microbatches, "inputs")
                layouts = [flatten(part)[1] for part in input_parts]
                key = hash(repr((mode, layouts))) & (2**61 - 1)
            if self.is_last and mode == "train":
                target_parts, target_rows = cut(targets, self.schedule.microbatches, "targets")
        except ValueError as error:
            problem = str(error)
        # What else may change shapes, or which tensors get a gradient.
        chunks = [(c.training, [p.requires_grad for p in c.parameters()]) for c in self.chunks]
        kind = self.device.type
        now = (chunks, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        changed = self._signature.get(mode) != now
        self._signature[mode] = now
        state = [problem is not None, changed or self.dynamic, key, input_rows, target_rows]
        state = torch.tensor(state, dtype=torch.int64, device=self.device)
        coll.all_reduce(state, "max", group=self.group, by="pipeline agrees on the batch")
        problems, changed, key, input_rows, target_rows = state.tolist()
        if problems:
            _agree(problem, None, self.group)
        if input_rows and target_rows and input_rows != target_rows:
            raise ValueError(f"inputs have {input_rows} rows, but targets have {target_rows}")
        self.mailbox.begin(key, forget=bool(changed))
        self._held.clear()
        return input_parts, list(target_parts)

    # ------------------------------------------------------------------ names
    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under the names they have in the model that was split."""
        met = set()  # zb-v puts embedding and head on one rank: tied, they are one parameter
        for start, chunk in self._named_chunks(prefix and prefix + "."):
            for name, parameter in chunk.named_parameters("", recurse, remove_duplicate):
                if parameter not in met or not remove_duplicate:
                    met.add(parameter)
                    yield start + name, parameter

    def state_dict(self, *args, **kwargs) -> dict[str, Any]:
        """This rank's part of the state dict of the model that was split, under the same names."""
        return {
            start + name: value
            for start, chunk in self._named_chunks()
            for name, value in chunk.state_dict(*args, **kwargs).items()
        }

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Take this rank's part out of a state dict of the whole model (or of this part)."""
        for start, chunk in self._named_chunks():
            names = [name for name in chunk.state_dict() if start + name in state_dict]
            chunk.load_state_dict({name: state_dict[start + name] for name in names}, strict)

    def _named_chunks(self, start: str = "") -> list[tuple[str, nn.Module]]:
        # Parts of a split model have different names; hand-made chunks may not.
        plain = len(self.chunks) == 1 or all(isinstance(chunk, Stage) for chunk in self.chunks)
        return [(start if plain else f"{start}{i}.", c) for i, c in enumerate(self.chunks)]


def _resolve(schedule: str | Schedule, size: int, microbatches: int, parts: list) -> Schedule:
    if bad := [type(part).__name__ for part in parts if not isinstance(part, nn.Module)]:
        raise TypeError(f"stages must be nn.Modules, not {', '.join(bad)}")
    whole = all(isinstance(part, Stage) and part.count == len(parts) for part in parts)
    if whole and len(parts) % size:
        raise ValueError(f"a model split into {len(parts)} parts cannot be dealt to {size} ranks")
    chunks = len(parts) // size if whole else len(parts)
    if isinstance(schedule, str):
        return build_schedule(schedule, size, microbatches, chunks)
    sizes = (schedule.stages, schedule.microbatches, schedule.chunks)
    if sizes != (size, microbatches, chunks):
        raise ValueError(
            f"the schedule is for {sizes} ranks, micro-batches and chunks, "
            f"but there are {(size, microbatches, chunks)}"
        )
    return schedule.validate()


def _agree(problem: str | None, settings: Any, group) -> None:
    """Raise on all ranks if any has a problem or other settings than the rest."""
    everyone = coll.all_gather_object((problem, settings), group, by="pipeline settings")
    if problems := [f"rank {r}: {text}" for r, (text, _) in enumerate(everyone) if text]:
        raise ValueError("; ".join(problems) if len(problems) < len(everyone) else problem)
    if len(set(everyone)) > 1:
        raise ValueError(
            "the ranks built different pipelines (schedule, ranks, microbatches, chunks, dynamic, "
            "digest of the actions): "
            + "; ".join(f"rank {rank} {text}" for rank, (_, text) in enumerate(everyone))
        )


@contextmanager
def _frozen_statistics(norms: list[nn.Module]):
    """Batch norms keep normalising by the batch but leave their running statistics as they are:
    forwards that run inside a backward are recomputations and must not count a second time."""
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
