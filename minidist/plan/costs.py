"""Seconds and bytes of the pieces a training step is made of: layers, logits, optimizer, messages.

A piece costs its FLOPs at (efficiency x peak) plus its memory traffic at (efficiency x bandwidth).
Matrix products are counted by both, elementwise kernels by the bytes they read and write, which is
why small models, narrow tensor-parallel slices and long sequences come out slower per FLOP.
Tensor-parallel collectives inside a layer are on the critical path unless the software overlaps
them, and are reported apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from minidist.plan.hardware import Cluster
from minidist.plan.shapes import Transformer

DP_KINDS = ("ddp", "zero1", "zero2", "fsdp", "fsdp-grad-op", "hybrid")
ZERO_STAGE = {"ddp": 0, "zero1": 1, "zero2": 2, "fsdp-grad-op": 2, "fsdp": 3, "hybrid": 3}
RECOMPUTE = ("none", "selective", "full")

# Host memory bandwidth that an offloaded Adam reaches, bytes/s per node. From the DeepSpeed ZenFlow
# blog: more than 4 s for Llama-2-7B, at 28 bytes read and written per parameter.
HOST_BANDWIDTH = 50e9
PCIE_EFFICIENCY = 0.8
# A fused attention kernel runs at about half the rate of a large matrix product (forward and
# backward together, causal): assumed for every accelerator.
FLASH_RATE = 0.5


@dataclass(frozen=True)
class Software:
    """What the training program does, as far as it changes time or memory.

    `attention`: ``"flash"`` (a fused kernel, no seq x seq matrix, skips what is masked) or
    ``"matrix"``. `fused`: chains of elementwise operations are one kernel. `tp_overlap`: ``"none"``
    or ``"backward"`` (hide the backward collective behind the weight gradient). `dp_overlap`:
    gradients are reduced during backward, parameters gathered ahead. `reduce_bytes`: bytes per
    element of reduced gradients. `gather_bytes`: of gathered parameters. `linear`: precision of the
    linear layers. `regather`: FSDP frees a layer after recomputing it and gathers it once more for
    its backward, which cannot be prefetched (a checkpoint around the sharded unit instead of
    inside).
    """

    attention: str = "flash"
    fused: bool = True
    sequence_parallel: bool = True
    tp_overlap: str = "backward"
    dp_overlap: bool = True
    reduce_bytes: int = 2
    gather_bytes: int = 2
    bucket_bytes: float | None = None  # None: one message per layer
    linear: str = "bf16"
    regather: bool = False


@dataclass(frozen=True)
class Layout:
    """How the ranks share the work; dp * tp * pp = GPUs.

    `microbatch`: sequences per forward. `chunks`: virtual stages per rank. `offload`: ``"none"``,
    ``"optimizer"`` (its state and the reduced gradients live on the host) or ``"parameters"``
    (these too). `shard`: GPUs over which ``hybrid`` shards.
    """

    dp: int = 1
    dp_kind: str = "ddp"
    tp: int = 1
    pp: int = 1
    microbatch: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    recompute: str = "none"
    offload: str = "none"
    shard: int | None = None

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def shards(self) -> int:
        """Ranks over which the data-parallel kind shards."""
        if self.dp_kind == "ddp":
            return 1
        return min(self.shard or self.dp, self.dp) if self.dp_kind == "hybrid" else self.dp

    def __str__(self):
        axes = [f"{self.dp_kind} {self.dp}"] if self.dp > 1 or self.dp_kind != "ddp" else []
        axes += [f"tp {self.tp}"] if self.tp > 1 else []
        axes += [f"pp {self.pp}"] if self.pp > 1 else []
        text = f"{' x '.join(axes) or 'one GPU'}, micro-batch {self.microbatch}"
        if self.pp > 1 and self.chunks > 1:
            text += f", {self.chunks} chunks"
        if self.recompute != "none":
            text += f", {self.recompute} recompute"
        if self.offload != "none":
            text += f", {self.offload} offload"
        return text


def microbatches(layout: Layout, global_batch: int) -> int:
    """Micro-batches per step and replica. ValueError when the batch does not divide."""
    step = layout.dp * layout.microbatch
    if global_batch % step:
        raise ValueError(
            f"global batch {global_batch} is not a multiple of dp x micro-batch = "
            f"{layout.dp} x {layout.microbatch}"
        )
    return global_batch // step


# ---- time --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerSeconds:
    """One layer and micro-batch on one rank. `*_comm` is the exposed tensor-parallel part, included
    in `forward`, `backward` (which includes what is recomputed) and `weight` (the weight-gradient
    part of backward)."""

    forward: float
    backward: float
    weight: float
    forward_comm: float
    backward_comm: float


def _elementwise_bytes(shape: Transformer, fused: bool) -> tuple[float, float]:
    """Bytes that elementwise kernels read and write per token and hidden unit in one forward of a
    layer: (on the residual stream, which only sequence parallel cuts; inside the parallel region).

    Counted for 2-byte values: a fused norm reads and writes (4), so does an activation; a residual
    add reads two and writes one (6), a dropout mask adds its byte. Unfused RMS norm and rotary
    embedding go through several 32-bit kernels, which is what torch.compile removes.
    """
    wide = shape.ffn / shape.hidden
    norm = 4 if shape.norm == "layer" or fused else 30
    add = 6 + (1 if shape.dropout else 0)
    if shape.gated:
        activation = (6 if fused else 10) * wide
        query_key = 1 + shape.kv_heads / shape.heads
        positions = (4 if fused else 20) * query_key if shape.positions == "rotary" else 0
        return 2 * norm + 2 * add, activation + positions
    return 2 * norm + 2 * add, 4 * wide + 4  # activation; the copy that puts heads together again


def _matmul_bytes(shape: Transformer, tokens: int, tp: int) -> float:
    """Bytes the four matrix products of a layer read and write in one forward (2-byte values)."""
    q, kv = shape.hidden // tp, 2 * shape.head_dim * shape.kv_heads_per_rank(tp)
    wide = shape.ffn // tp
    up = 2 * wide if shape.gated else wide
    values = 2 * (shape.hidden + q) + kv + 2 * shape.hidden + up + wide
    return 2 * (tokens * values + shape.matmul_parameters(tp))


def layer_seconds(
    shape: Transformer, layout: Layout, cluster: Cluster, software: Software
) -> LayerSeconds:
    """Time of one layer for one micro-batch, with tensor parallelism over `layout.tp` ranks."""
    card, tp = cluster.accelerator, layout.tp
    tokens = layout.microbatch * shape.seq
    peak = card.flops["bf16"] * card.efficiency
    linear_peak = card.flops.get(software.linear, card.flops["bf16"]) * card.efficiency
    memory = card.memory_bandwidth * card.efficiency

    linear = 2 * tokens * shape.matmul_parameters(tp) / linear_peak
    linear += _matmul_bytes(shape, tokens, tp) / memory
    cast = 0.0
    if software.linear == "fp8":  # inputs of the four products: read, find the largest, write
        inputs = 2 + (1 + shape.ffn / shape.hidden) / tp
        cast = 5 * inputs * tokens * shape.hidden / memory

    flops = 4 * tokens * shape.seq * shape.hidden / tp
    if software.attention == "flash":
        core = flops / 2 / (FLASH_RATE * peak)  # what the causal mask hides is skipped
        core_backward = 2.5 * core  # recomputes the scores once more
    else:
        scores = shape.heads / tp * tokens * shape.seq
        products = max(flops / peak, 4 * scores / memory)
        softmax = (4 + (5 if shape.dropout else 0)) * scores / memory
        core = products + softmax
        core_backward = 2 * core

    stream, inside = _elementwise_bytes(shape, software.fused)
    cut = tp if software.sequence_parallel else 1
    elementwise = (stream / cut + inside / tp) * tokens * shape.hidden / memory

    # Two all-reduces, or with sequence parallel two all-gathers and two reduce-scatters: same
    # bytes.
    message = 2 * tokens * shape.hidden
    comm = 2 * cluster.collective_seconds("all_reduce", message, tp)
    hidden_comm = min(comm, linear) if software.tp_overlap == "backward" else 0.0

    forward = linear + cast + core + elementwise + comm
    again = {"none": 0.0, "selective": core, "full": forward}[layout.recompute]
    if software.attention == "flash" and layout.recompute == "selective":
        # Nothing of the core is kept anyway; selective then means torchtitan's: every other matrix
        # product and everything elementwise is done again.
        again = linear / 2 + cast + elementwise
    backward = 2 * (linear + elementwise + cast) + core_backward + comm - hidden_comm + again
    again_comm = comm if layout.recompute == "full" else 0.0
    return LayerSeconds(
        forward, backward, linear + cast, comm, comm - hidden_comm + again_comm
    )  # fmt: skip


def logits_seconds(
    shape: Transformer, layout: Layout, cluster: Cluster, software: Software
) -> tuple[float, float]:
    """Final product and loss of one micro-batch: (forward, backward). Cut over tp by vocabulary."""
    card = cluster.accelerator
    tokens = layout.microbatch * shape.seq
    product = 2 * tokens * shape.hidden * shape.padded_vocab(layout.tp) / layout.tp
    product /= card.flops["bf16"] * card.efficiency
    # 32-bit logits: written, read for the loss, and again backward.
    loss = (8 if software.fused else 14) * tokens * shape.vocab / layout.tp
    loss /= card.memory_bandwidth * card.efficiency
    return product + loss, 2 * product + loss


def optimizer_seconds(parameters: float, layout: Layout, cluster: Cluster) -> float:
    """Adam on `parameters` elements held by this rank: about 34 bytes each pass through memory
    (three 32-bit states read and written, the gradient read for its norm and again, the 16-bit copy
    written). Offloaded, the host does it for all GPUs of the node."""
    if layout.offload == "none":
        card = cluster.accelerator
        return 34 * parameters / (card.memory_bandwidth * card.efficiency)
    sharing = min(cluster.gpus, cluster.gpus_per_node)
    transfer = (2 + 2) * parameters / (cluster.accelerator.pcie * PCIE_EFFICIENCY)
    return 28 * parameters * sharing / HOST_BANDWIDTH + transfer


def send_seconds(shape: Transformer, layout: Layout, cluster: Cluster, software: Software) -> float:
    """One activation from a stage to the next: each tensor-parallel rank sends its part, and the
    parts are gathered on the other side unless sequence parallel wants them cut anyway."""
    if layout.pp == 1:
        return 0.0
    size = 2 * layout.microbatch * shape.seq * shape.hidden
    seconds = cluster.send_seconds(size / layout.tp, layout.tp * layout.dp)
    if not software.sequence_parallel:
        seconds += cluster.collective_seconds("all_gather", size, layout.tp)
    return seconds


def data_parallel_seconds(
    op: str, elements: float, element_bytes: float, layout: Layout, cluster: Cluster
) -> float:
    """One collective of the data-parallel group over `elements` elements (of one tp, pp rank).

    ``hybrid`` gathers and scatters over its shard group only; its all-reduce of the shard across
    the replicas is added to the reduce-scatter.
    """
    size = elements * element_bytes
    ranks = layout.shards if layout.dp_kind == "hybrid" else layout.dp
    seconds = cluster.collective_seconds(op, size, ranks, layout.tp)
    if layout.dp_kind == "hybrid" and op == "reduce_scatter":
        replicas, stride = layout.dp // ranks, layout.tp * ranks
        seconds += cluster.collective_seconds("all_reduce", size / ranks, replicas, stride)
    return seconds


# ---- memory ------------------------------------------------------------------------------------


def layer_activation_elements(shape: Transformer, software: Software) -> tuple[float, float]:
    """16-bit values kept per token by one layer, in units of the hidden size:
    (on the residual stream, inside the tensor-parallel region). Masks count as half a value.

    Stream: the inputs of both norms, and of attention and MLP. Inside: query, key, value, the
    attention's output, and the MLP's inner values: before and after the activation; gated, also the
    product's two factors. For a GPT with dropout this is the 34 of Korthikanti 2022.
    """
    kv = 2 * shape.kv_heads / shape.heads
    wide = shape.ffn / shape.hidden
    mlp = (3 if software.fused else 4) * wide if shape.gated else 2 * wide
    stream = 4 + (1 if shape.dropout else 0)
    inside = 1 + kv + 1 + mlp
    return stream, inside


def layer_activation_bytes(shape: Transformer, layout: Layout, software: Software) -> float:
    """Bytes one layer keeps per micro-batch on one rank, until its backward."""
    tokens = layout.microbatch * shape.seq
    tp = layout.tp
    cut = tp if software.sequence_parallel else 1
    if layout.recompute == "full":
        return 2 * tokens * shape.hidden / cut
    stream, inside = layer_activation_elements(shape, software)
    if software.attention == "flash" and layout.recompute == "selective":
        inside /= 2  # every other matrix product is done again, so is what feeds it
    size = 2 * tokens * shape.hidden * (stream / cut + inside / tp)
    if software.attention == "matrix" and layout.recompute == "none":
        size += (5 if shape.dropout else 4) * shape.heads / tp * tokens * shape.seq
    return size


def logits_bytes(shape: Transformer, layout: Layout) -> float:
    """Logits of one micro-batch: 16-bit, 32-bit for the loss, and the gradient of one of them."""
    return 10 * layout.microbatch * shape.seq * shape.padded_vocab(layout.tp) / layout.tp
