"""Which layout for this model on these GPUs, with what memory and speed, and why not another.

`plan` turns a question into a `Plan`: the layouts that fit, best first, the reasons, and the
command that runs the best one. The search itself is in ``search.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minidist.plan import costs
from minidist.plan.costs import Layout
from minidist.plan.estimate import Estimate, usable_bytes
from minidist.plan.hardware import Accelerator, Cluster, cluster
from minidist.plan.search import Search, compare
from minidist.plan.shapes import PRESETS, Transformer, from_module, from_parameters, with_sequence
from minidist.plan.words import Words, chinese


@dataclass
class Plan:
    """The answer. `layouts` fit, best first; `rejected` maps a family of layouts to why it loses.
    Reasons are English and carry their Chinese (`words.Words`)."""

    shape: Transformer
    cluster: Cluster
    global_batch: int
    convention: str
    layouts: list[Estimate]
    rejected: dict[str, str]
    reason: str
    changes: list[str] = field(default_factory=list)
    tried: int = 0

    @property
    def best(self) -> Estimate | None:
        """None only in the plan that NothingFits carries."""
        return self.layouts[0] if self.layouts else None

    @property
    def usable(self) -> float:
        return usable_bytes(self.cluster)

    def rows(self) -> list[dict]:
        """The layouts as plain data, best first."""
        return [self._row(e) for e in self.layouts]

    def _row(self, e: Estimate) -> dict:
        layout = e.layout
        why = self.reason if e is self.best else compare(e, self.best)
        return {
            "dp": layout.dp, "dp_kind": layout.dp_kind, "tp": layout.tp, "pp": layout.pp,
            "microbatch": layout.microbatch, "microbatches": e.microbatches,
            "schedule": layout.schedule if layout.pp > 1 else None, "chunks": layout.chunks,
            "recompute": layout.recompute, "offload": layout.offload,
            "bytes": {**e.bytes, "peak": e.total_bytes}, "host_bytes": e.host_bytes,
            "seconds": {**e.seconds, "total": e.total_seconds},
            "tflops_per_gpu": e.tflops_per_gpu,
            "tokens_per_second_per_gpu": self.global_batch * self.shape.seq / e.total_seconds
            / self.cluster.gpus,
            "why": why,
        }  # fmt: skip

    def to_json(self) -> dict:
        from minidist.train.report import document

        rows = self.rows()
        return document(
            rows, layouts=rows, model=str(self.shape), parameters=self.shape.parameters,
            gpu=self.cluster.accelerator.name, gpus=self.cluster.gpus,
            global_batch=self.global_batch, seq=self.shape.seq, usable_bytes=self.usable,
            convention=self.convention, rejected=self.rejected, changes=self.changes,
            command=self.command if self.best else None,
            in_code=in_code(self.best.layout) if self.best else [],
        )  # fmt: skip

    @property
    def command(self) -> str:
        """The shell command that trains a GPT of this width and depth in the best layout."""
        return train_command(self)

    def __str__(self) -> str:
        head = f"{self.shape} ({self.shape.parameters / 1e9:.3g}B) on {self.cluster.gpus} x "
        head += self.cluster.accelerator.name
        if self.best is None:
            return "\n".join([head, self.reason, *self.changes])
        return "\n".join([head, f"best: {self.best.layout}", self.reason, self.command])


class NothingFits(ValueError):
    """No layout fits. The message is one line with what would help; `.plan` has the reasons."""

    def __init__(self, plan: Plan):
        self.plan = plan
        changes = [chinese(change) for change in plan.changes]
        super().__init__(
            Words(
                f"{plan.reason}; it would fit if you {', or '.join(plan.changes)}",
                f"{chinese(plan.reason)}。下面任何一种改法都放得下：{'；'.join(changes)}。",
            )
        )


def plan(
    model=None,
    *,
    params: float | None = None,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    gpus: int = 8,
    gpu: str | Accelerator = "h100",
    memory: float | None = None,
    gpus_per_node: int = 8,
    port: float | None = None,
    seq: int | None = None,
    global_batch: int | None = None,
    convention: str = "16",
    tp: int | None = None,
    pp: int | None = None,
    dp_kind: str | None = None,
    microbatch: int | None = None,
    recompute: str | None = None,
    offload: str | None = None,
    host_memory: float = 2e12,
    top: int = 10,
) -> Plan:
    """Find the best layout to train `model` on `gpus` accelerators.

    `model`: a preset's name (``llama-3.1-70b``), a `Transformer`, or an ``nn.Module`` with a
    config; or `params` alone; or `layers`, `hidden` and `heads`. `memory` in bytes per GPU and
    `port` in bytes per second override what is known of the accelerator; `host_memory` in bytes per
    node limits offload. `seq` in tokens, `global_batch` in sequences per step. `tp`, `pp`,
    `dp_kind`, `microbatch`, `recompute` (none, full), `offload` (none, optimizer, parameters) fix
    that choice. `convention`: bytes per parameter, see `formulas.CONVENTIONS`. Raises ValueError,
    one line, for what cannot be, and NothingFits (one too) with what would have to change when
    every layout is too large.
    """
    shape = shape_of(model, params, layers, hidden, heads)
    if top < 1:
        raise ValueError(f"top must be at least 1, got {top}")
    if not host_memory > 0:
        raise ValueError("host memory must be above 0; offload none does without it")
    if seq is not None:
        if seq < 1:
            raise ValueError(f"seq must be at least 1, got {seq}")
        shape = with_sequence(shape, seq)
    machine = cluster(
        gpu, gpus, gpus_per_node=gpus_per_node, port=port, memory=memory, cpu_memory=host_memory
    )
    if usable_bytes(machine) <= 0:
        raise ValueError(
            f"{machine.accelerator.memory / 1e9:g} GB per GPU is less than what the driver and "
            "communication buffers take"
        )
    batch = default_batch(shape, gpus) if global_batch is None else global_batch
    if batch < 1:
        raise ValueError(f"global batch must be at least 1, got {batch}")
    limits = {
        "tp": tp, "pp": pp, "dp_kind": dp_kind, "microbatch": microbatch, "recompute": recompute,
        "offload": offload,
    }  # fmt: skip
    _check(shape, machine, limits)
    search = Search(shape, machine, batch, convention, limits)
    layouts = search.fitting()
    if not layouts:
        raise NothingFits(
            Plan(
                shape, machine, batch, convention, [], search.families(None),
                search.nothing_fits(), search.changes(), len(search.estimates),
            )
        )  # fmt: skip
    best = layouts[0]
    return Plan(
        shape, machine, batch, convention, layouts[:top], search.families(best),
        search.why_best(best), tried=len(search.estimates),
    )  # fmt: skip


def shape_of(model, params=None, layers=None, hidden=None, heads=None) -> Transformer:
    """The model that the arguments of `plan` describe. Raises ValueError."""
    if isinstance(model, Transformer):
        return model
    if isinstance(model, str):
        if model not in PRESETS:
            raise ValueError(f"unknown model {model!r}; known: {', '.join(PRESETS)}")
        return PRESETS[model]
    if model is not None:
        return from_module(model)
    if layers or hidden or heads:
        if not (layers and hidden and heads):
            raise ValueError("a shape needs all of layers, hidden and heads")
        return Transformer(layers, hidden, heads)
    if params is None:
        raise ValueError("say which model: a name, params=, or layers=, hidden= and heads=")
    return from_parameters(params)


def default_batch(shape: Transformer, gpus: int) -> int:
    """Sequences per step as in the document's table of typical configurations (upper half of its
    ranges), a multiple of the GPUs, and no more than 64 per GPU."""
    size = shape.parameters
    usual = 128 if size < 1e9 else 256 if size < 8e9 else 512 if size < 75e9 else 2048
    usual = min(usual, 64 * gpus)
    return max(1, round(usual / gpus)) * gpus


def _check(shape: Transformer, machine: Cluster, limits: dict) -> None:
    """What the caller fixed must be possible at all."""
    if limits["tp"] is not None:
        shape.check_tp(limits["tp"])
    if limits["pp"] is not None:
        shape.stage_layers(limits["pp"])
    for axis in ("tp", "pp"):
        if limits[axis] and machine.gpus % limits[axis]:
            raise ValueError(f"{axis} {limits[axis]} does not divide {machine.gpus} GPUs")
    for name, known in (
        ("dp_kind", costs.DP_KINDS),
        ("recompute", costs.RECOMPUTE),
        ("offload", ("none", "optimizer", "parameters")),
    ):
        if limits[name] is not None and limits[name] not in known:
            raise ValueError(f"unknown {name} {limits[name]!r}; known: {', '.join(known)}")
    if limits["microbatch"] is not None and limits["microbatch"] < 1:
        raise ValueError(f"microbatch must be at least 1, got {limits['microbatch']}")


def train_command(plan: Plan) -> str:
    """The torchrun line for the best layout; `minidist train` builds its GPT of this width and
    depth."""
    layout, shape, machine = plan.best.layout, plan.shape, plan.cluster
    nodes = machine.nodes
    where = f"--nnodes {nodes} " if nodes > 1 else ""
    line = f"torchrun {where}--nproc-per-node {min(machine.gpus, machine.gpus_per_node)}"
    if nodes > 1:
        line += " --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
    kind = "fsdp" if layout.dp_kind == "hybrid" else layout.dp_kind
    line += f" -m minidist train --strategy {kind} --dp {layout.dp} --tp {layout.tp}"
    line += f" --pp {layout.pp} --microbatches {plan.best.microbatches} --batch {plan.global_batch}"
    if layout.chunks == 2:
        line += " --schedule interleaved"
    line += f" --layers {shape.layers} --width {shape.hidden} --heads {shape.heads}"
    return line + f" --seq {shape.seq} --dtype bfloat16"


def in_code(layout: Layout) -> list[str]:
    """What of the layout is not an option of `minidist train`, and how to say it in Python."""
    notes = []
    if layout.chunks > 2:
        notes.append(
            f'md.Pipeline(chunks, schedule="interleaved"): {layout.chunks} chunks per rank'
        )
    if layout.recompute != "none":
        notes.append("torch.utils.checkpoint around every block: full recomputation")
    if layout.offload == "optimizer":
        notes.append('md.ZeroOptimizer(..., stage=2, offload="cpu")')
    if layout.offload == "parameters":
        notes.append('md.FSDP(..., offload="cpu")')
    if layout.dp_kind == "hybrid":
        notes.append('md.FSDP(..., strategy="HYBRID_SHARD")')
    return notes
