"""The real strategy code as one rank of a job that does not exist: what it would hold and send.

One process plays rank r of N = 64 ... 1024: torch's fake process group completes every collective
at once, and fake tensors have shapes, types and storages but no memory, so that a model of billions
of parameters is built, trained for two steps and measured in seconds. Nothing here computes bytes:
`minidist.measure` reads them off the tensors and the ledger, as it does in a real run. So the
published tables are reproduced by our DDP, ZeroOptimizer, FSDP, tensor_parallel and Pipeline, and
not only by a formula.

Values are not computed; a strategy that looked at one would stop here with an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from minidist.comm import ledger
from minidist.comm.mesh import build_mesh
from minidist.measure import measure
from minidist.parallel.combine import parallelize
from minidist.parallel.ddp import DDP
from minidist.parallel.fsdp import FSDP, MixedPrecision
from minidist.parallel.mailbox import Mailbox
from minidist.parallel.microbatches import cut, flatten
from minidist.parallel.pipeline import Pipeline
from minidist.parallel.zero import ZeroOptimizer
from minidist.plan import costs, formulas
from minidist.plan.costs import Layout, Software
from minidist.plan.shapes import Transformer
from minidist.train.model import GPT, Block, GPTConfig, loss_fn
from minidist.train.optim import MasterOptimizer

FSDP_STRATEGY = {"fsdp": "FULL_SHARD", "fsdp-grad-op": "SHARD_GRAD_OP"}


@dataclass(frozen=True)
class DryRun:
    """What rank `rank` of `layout.gpus` would hold and send in its second step, in bytes.

    `held`: by kind between backward and step, when all model states exist. `peak`: by kind, each at
    its own moment. `at_peak`: by kind at the fullest moment. `sent`: by operation. `largest_unit`:
    the largest piece FSDP gathers at once, in the dtype it computes in. `blocks`: layers on this
    rank.
    """

    config: GPTConfig
    layout: Layout
    rank: int
    held: dict
    peak: dict
    at_peak: dict
    sent: dict
    largest_unit: int
    blocks: int

    @property
    def states(self) -> int:
        """Parameters, gradients and optimizer between backward and step: what ZeRO Table 1
        counts."""
        return sum(self.held[kind] for kind in ("parameters", "gradients", "optimizer"))

    @property
    def sent_bytes(self) -> int:
        return sum(self.sent.values())


@contextmanager
def fake_world(ranks: int, rank: int = 0) -> Iterator[None]:
    """A process group in which this process is `rank` of `ranks` and nobody else exists.

    RuntimeError when this process is already in a process group, ValueError for a rank outside.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not a rank of {ranks}")
    if dist.is_initialized():
        raise RuntimeError("a dry run needs a process without a process group: run it in another")
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        ledger.reset()


def gpt_config(shape: Transformer) -> GPTConfig:
    """Our GPT of this depth, width and vocabulary (for a GPT's shape: exactly this model)."""
    return GPTConfig(
        vocab=shape.vocab, seq=shape.seq, width=shape.hidden, layers=shape.layers,
        heads=shape.heads, tied=shape.tied,
    )  # fmt: skip


def dry_run(
    config: GPTConfig,
    layout: Layout,
    *,
    rank: int = 0,
    microbatches: int = 1,
    masters: bool = True,
    bucket_cap_mb: float | None = 25,
) -> DryRun:
    """Two training steps of our GPT as `rank` of `layout.gpus`; the second is measured.

    `masters`: 16 bytes per parameter (16-bit parameters and gradients, 32-bit masters and Adam
    states; with FSDP 32-bit shards that are gathered in 16 bits). Without: all in 32 bits.
    `layout.recompute` and `layout.offload` must be ``"none"``. Ranks are numbered as in
    `build_mesh`. Raises ValueError for what the strategies refuse, RuntimeError inside a process
    group.
    """
    if layout.recompute != "none" or layout.offload != "none":
        raise ValueError("the dry run plays layouts without recomputation and offload")
    if layout.dp_kind == "hybrid":
        raise ValueError("the dry run has no hybrid sharding; use fsdp on one shard group")
    with fake_world(layout.gpus, rank):
        # The mesh is made of real tensors and must exist before tensors turn fake.
        mesh = build_mesh(layout.dp, layout.pp, layout.tp)
        with FakeTensorMode(allow_non_fake_inputs=True):
            run = _Training(config, layout, mesh, microbatches, masters, bucket_cap_mb)
            run.forward_backward()
            run.step()
            with measure(run.module, run.optimizer, timeline=False) as meter:
                run.forward_backward()
                held = dict(meter.memory.current)
                run.step()
                # Adam's states were there all along, but only the step shows them to the meter.
                held["optimizer"] = meter.memory.current["optimizer"]
            return DryRun(
                config, layout, rank, held, dict(meter.memory.peak), dict(meter.memory.at_peak),
                {op: total.sent_bytes for op, total in meter.traffic.by_op.items()},
                run.largest_unit(), run.blocks,
            )  # fmt: skip


class _Training:
    """Model and optimizer of one rank, put together as a user of `md` would."""

    def __init__(self, config, layout, mesh, microbatches, masters, bucket_cap_mb):
        self.layout, self.microbatches, self.masters = layout, microbatches, masters
        sharded = layout.dp_kind in FSDP_STRATEGY
        # FSDP keeps 32-bit shards and converts as it gathers.
        dtype = torch.bfloat16 if masters and not sharded else torch.float32
        model = _build(config, dtype)
        self.blocks = config.layers
        if layout.tp > 1 or layout.pp > 1:
            self._combined(model, mesh)
        else:
            self._one_axis(model, mesh["dp"], bucket_cap_mb)
        rows = layout.microbatch * microbatches
        self.inputs = torch.zeros(rows, config.seq, dtype=torch.int64)
        self.targets = torch.zeros(rows, config.seq, dtype=torch.int64)

    def _one_axis(self, model: nn.Module, group, bucket_cap_mb) -> None:
        kind, options = self.layout.dp_kind, {"lr": 1e-3, "foreach": True}
        if kind in FSDP_STRATEGY:
            precision = MixedPrecision(torch.bfloat16, torch.float32) if self.masters else None
            self.module: nn.Module = FSDP(
                model, strategy=FSDP_STRATEGY[kind], units=[Block], mixed_precision=precision,
                group=group,
            )  # fmt: skip
            self.optimizer = torch.optim.AdamW(self.module.parameters(), **options)
        elif kind in ("zero1", "zero2"):
            self.module = model
            self.optimizer = ZeroOptimizer(
                model.named_parameters(), torch.optim.AdamW, stage=costs.ZERO_STAGE[kind],
                bucket_cap_mb=bucket_cap_mb, group=group,
                master_dtype=torch.float32 if self.masters else None, **options,
            )  # fmt: skip
        else:
            self.module = DDP(model, bucket_cap_mb=bucket_cap_mb, group=group)
            parameters = self.module.parameters()
            self.optimizer = (
                MasterOptimizer(parameters, torch.optim.AdamW, **options)
                if self.masters
                else torch.optim.AdamW(parameters, **options)
            )
        self._parallel = None

    def _combined(self, model: nn.Module, mesh) -> None:
        layout, options = self.layout, {"lr": 1e-3, "foreach": True}
        self.module = self._parallel = parallelize(
            model, mesh, dp=layout.dp_kind, schedule=layout.schedule, chunks=layout.chunks,
            microbatches=self.microbatches if layout.pp > 1 else None,
        )  # fmt: skip
        if self._parallel.pipeline is not None:
            self.blocks = sum(len(stage.layer_names) for stage in self._stages())
            self.blocks -= (self._parallel.pipeline.is_first) + (self._parallel.pipeline.is_last)
            _answer_locally(self._parallel.pipeline, model.config, layout.microbatch)
        if layout.dp_kind in ("zero1", "zero2") and self.masters:
            options["master_dtype"] = torch.float32
        if layout.dp_kind == "ddp" and self.masters:
            parameters = self._parallel.stages.parameters()
            self.optimizer = MasterOptimizer(parameters, torch.optim.AdamW, **options)
        else:
            self.optimizer = self._parallel.optimizer(torch.optim.AdamW, **options)

    def _stages(self) -> list[nn.Module]:
        return [getattr(stage, "module", stage) for stage in self._parallel.stages]

    def forward_backward(self) -> None:
        if self._parallel is not None:
            self._parallel.step(self.inputs, self.targets)
            return
        for inputs, targets in zip(
            self.inputs.chunk(self.microbatches), self.targets.chunk(self.microbatches), strict=True
        ):
            (loss_fn(self.module(inputs), targets) / self.microbatches).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def largest_unit(self) -> int:
        """Bytes of the largest unit that FSDP gathers at once."""
        wrapped = self._parallel.stages if self._parallel is not None else [self.module]
        units = [unit for module in wrapped if isinstance(module, FSDP) for unit in module.units]
        size = 2 if self.masters else 4
        return max((size * sum(f.layout.numel for f in u.flats) for u in units), default=0)


class _KnownShapes(Mailbox):
    """Stages of our GPT hand on one tensor, always of the same shape: nobody has to be asked."""

    def __init__(self, mailbox: Mailbox, activation: torch.Tensor):
        super().__init__(mailbox.schedule, mailbox.group, mailbox.device)
        self.layout = flatten(activation)[1]

    def _learn(self, transfer):
        self._layouts[transfer.microbatch, transfer.stage] = self.layout
        return self.layout

    def _teach(self, layout, transfer):
        self._layouts[transfer.microbatch, transfer.stage] = layout


def _answer_locally(pipeline: Pipeline, config: GPTConfig, rows: int) -> None:
    """The stages agree by messages on whether a batch can be run and on its shapes. In a dry run
    these have no values; what they would say is known, everything else runs as it is."""
    parameter = next(pipeline.parameters())
    stages = pipeline.schedule.virtual_stages
    activation = torch.empty(rows, config.seq, config.width, dtype=parameter.dtype)
    pipeline.mailbox = _KnownShapes(pipeline.mailbox, activation.requires_grad_())

    def begin(mode, inputs, targets):
        m = pipeline.schedule.microbatches
        pipeline.mailbox.begin(mode, forget=False)
        return cut(inputs, m, "inputs")[0], list(cut(targets, m, "targets")[0])

    pipeline._begin = begin
    pipeline.loss.count = torch.Tensor.numel  # all targets count
    # Without others to ask, every rank seems to hold the table that the first and the last share.
    ends = [pipeline.schedule.owner(0)[0], pipeline.schedule.owner(stages - 1)[0]]
    pipeline.tied.shared = [(parameter, ends) for parameter, _ in pipeline.tied.shared]


def _build(config: GPTConfig, dtype: torch.dtype) -> GPT:
    """The model in `dtype` from the start: fake modules cannot change theirs afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return GPT(config)
    finally:
        torch.set_default_dtype(before)


# ---- beside the formulas -----------------------------------------------------------------------


def compare(run: DryRun, microbatches: int = 1) -> list[dict]:
    """Rows of what, measured, formula, error (relative) for a run with masters: model states,
    activations at their peak, bytes sent. Left out by the formulas: statistics of norms and
    attention, step counters, padding, and a few numbers per token of the cut loss."""
    place = _Place(run, microbatches)
    rows = [_row(kind, run.held[kind], size) for kind, size in place.states().items()]
    rows.append(_row("model states", run.states, sum(place.states().values())))
    rows.append(_row("activations", run.peak["activations"], place.activations()))
    rows.append(_row("bytes sent", run.sent_bytes, place.sent()))
    return rows


class _Place:
    """The formulas for one rank of our GPT."""

    def __init__(self, run: DryRun, microbatches: int):
        config, layout = run.config, run.layout
        self.layout, self.blocks, self.m = layout, run.blocks, microbatches
        self.shape = shape = Transformer(
            config.layers, config.width, config.heads, vocab=config.vocab, seq=config.seq,
            tied=config.tied,
        )  # fmt: skip
        stage = run.rank // layout.tp % layout.pp
        self.stage, self.first, self.last = stage, stage == 0, stage == layout.pp - 1
        # The pipeline balances stages by work, so the number of blocks is read off the model.
        self.parameters = self.blocks * shape.layer_parameters(layout.tp)
        self.parameters += self.first * shape.embedding_parameters(layout.tp)
        self.parameters += self.last * shape.norm_parameters()
        if self.last and not (shape.tied and layout.pp == 1):
            self.parameters += shape.output_parameters(layout.tp)
        # Together with other axes FSDP computes in 32 bits; all others in 16.
        self.sharded = layout.dp_kind in FSDP_STRATEGY
        self.size = 4 if self.sharded and layout.tp * layout.pp > 1 else 2
        self.tokens = (shape.seq, layout.microbatch, shape.hidden)

    def states(self) -> dict:
        if self.sharded:
            return formulas.state_bytes(self.parameters, 3, self.layout.dp, "fp32")
        stage = costs.ZERO_STAGE[self.layout.dp_kind]
        states = formulas.state_bytes(self.parameters, stage, self.layout.shards)
        if self.layout.pp > 1:  # reduced once, after the last micro-batch
            states["gradients"] = 2 * self.parameters
        return states

    def activations(self) -> float:
        """Layers times micro-batches in flight; on the last stage also the final norm, the output
        matrix' input and the log-probabilities."""
        shape, layout, held = self.shape, self.layout, 1
        software = Software(sequence_parallel=False)
        kept = self.blocks * costs.layer_activation_bytes(shape, layout, software)
        if layout.pp > 1:
            held = formulas.in_flight(layout.schedule, layout.pp, self.m, self.stage)
        vocabulary = shape.padded_vocab(layout.tp) / layout.tp
        kept += self.last * 2 * shape.seq * layout.microbatch * (2 * shape.hidden + vocabulary)
        return held * kept * self.size / 2

    def sent(self) -> float:
        layout, shape, m = self.layout, self.shape, self.m
        if self.sharded:  # gathers in the compute dtype, reduces in 32 bits
            passes = {"fsdp": 2, "fsdp-grad-op": 1}[layout.dp_kind] * self.size + 4
            sent = m * passes * self.parameters * (layout.dp - 1) / layout.dp
        else:
            stage, again = costs.ZERO_STAGE[layout.dp_kind], 1 if layout.pp > 1 else m
            sent = 2 * formulas.data_parallel_traffic(self.parameters, stage, layout.dp, again)
        if layout.tp > 1:
            # The sum of the embedding and the gradient of the output matrix' input are one
            # all-reduce each, of the four that a layer has.
            layers = self.blocks + (self.first + self.last) / 4
            cut = formulas.tensor_parallel_traffic(*self.tokens, layout.tp)
            sent += self.size * m * layers * cut
        neighbours = (not self.first) + (not self.last)
        sent += self.size * m * neighbours * formulas.pipeline_traffic(*self.tokens)
        if layout.pp > 1 and shape.tied and (self.first or self.last):
            sent += self.size * shape.output_parameters(layout.tp)  # gradients of the shared table
        return sent


def _row(what: str, measured: float, formula: float) -> dict:
    error = measured / formula - 1 if formula else 0.0
    return {"what": what, "measured": measured, "formula": formula, "error": error}


def verify_plan(plan) -> list[dict]:
    """Dry run of the best layout of a plan; rows of `compare`.

    Our GPT stands in for the model: same depth, width and vocabulary. Left away, because it changes
    none of the states: recomputation, offload, several chunks per stage, micro-batches that do not
    change what is in flight, and the replicas of hybrid sharding.
    """
    best = plan.best.layout
    layout = replace(best, recompute="none", offload="none", chunks=1, schedule="1f1b")
    if layout.dp_kind == "hybrid":
        layout = replace(layout, dp_kind="fsdp", dp=layout.shards, shard=None)
    m = min(plan.best.microbatches, 2 * layout.pp) if layout.pp > 1 else 1
    return compare(dry_run(gpt_config(plan.shape), layout, microbatches=m), m)
