"""The published arithmetic of distributed training: memory, traffic, bubbles, times.

Plain functions of numbers. Each names its source; each row of ``published.json`` that one of them
covers is a test. Units are in the names or the first line: bytes, elements, seconds, bytes/second.
Sources by short name:

* ZeRO: Rajbhandari et al. 2020 (arXiv 1910.02054)
* Narayanan 2021: Efficient Large-Scale Language Model Training on GPU Clusters (arXiv 2104.04473)
* Korthikanti 2022: Reducing Activation Recomputation in Large Transformer Models (arXiv 2205.05198)
* FSDP: Zhao et al. 2023 (arXiv 2304.11277);  GPipe: Huang et al. 2019 (arXiv 1811.06965)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

# ---- parameters and FLOPs ----------------------------------------------------------------------


def gpt_parameters(layers, hidden, vocab, seq):
    """Parameters of a GPT, Narayanan 2021 equation 2. Leaves out the final norm (2 * hidden)."""
    correction = 13 / (12 * hidden) + (vocab + seq) / (12 * layers * hidden)
    return 12 * layers * hidden**2 * (1 + correction)


def gpt_flops(batch, seq, layers, hidden, vocab, recompute="full"):
    """FLOPs of one iteration over `batch` sequences.

    ``"full"``: Narayanan 2021 equation 3 (96...). ``"none"``: model FLOPs, Korthikanti 2022
    equation 7 (72...). ``"selective"``: hardware FLOPs, equation 8 as printed, whose s/(3h) counts
    three forwards of the attention core as recomputed; one is what the recomputation does, and what
    `Transformer.training_flops` counts (s/(4.5h)).
    """
    tokens = batch * seq
    if recompute == "full":
        attention, logits, factor = seq / (6 * hidden), vocab / (16 * layers * hidden), 96
    elif recompute in ("none", "selective"):
        attention = seq / ((3 if recompute == "selective" else 6) * hidden)
        logits, factor = vocab / (12 * layers * hidden), 72
    else:
        raise ValueError(f"recompute must be none, selective or full, got {recompute!r}")
    return factor * tokens * layers * hidden**2 * (1 + attention + logits)


def training_seconds(parameters, tokens, gpus, flops_per_gpu):
    """Time to see `tokens` tokens with full recomputation: 8 T P / (n X), Narayanan 2021 equation
    4.

    `flops_per_gpu` is the achieved FLOP/s. Without recomputation the 8 is a 6.
    """
    return 8 * tokens * parameters / (gpus * flops_per_gpu)


# ---- model states ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Convention:
    """Bytes per parameter of what training keeps. `optimizer` is everything only the step needs."""

    name: str
    parameters: int
    gradients: int
    optimizer: int
    source: str

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


CONVENTIONS = {
    c.name: c
    for c in (
        Convention("16", 2, 2, 12, "16-bit parameters and gradients, 32-bit master, momentum and "
                   "variance; ZeRO section 3.1"),
        Convention("18", 2, 4, 12, "as 16, with 32-bit gradients; Megatron Core, bf16"),
        Convention("20", 2, 2, 16, "as 16, with a 32-bit copy of the gradients beside the master; "
                   "Megatron Core, fp16; The Ultra-Scale Playbook"),
        Convention("fp32", 4, 4, 8, "everything in 32 bits; also FSDP with mixed precision, whose "
                   "32-bit shard is the master copy"),
    )
}  # fmt: skip


def state_bytes(parameters, stage=0, world_size=1, convention="16"):
    """Bytes per GPU of parameters, gradients and optimizer state, a dict with those keys.

    ZeRO stage 0 keeps everything whole, 1 shards the optimizer state over `world_size`, 2 also the
    gradients, 3 also the parameters; ZeRO section 5 and Table 1. Not included: the layer that
    stage 3 has gathered at the moment, and activations.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage must be 0, 1, 2 or 3, got {stage!r}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if convention not in CONVENTIONS:
        known = ", ".join(CONVENTIONS)
        raise ValueError(f"unknown convention {convention!r}; known: {known}")
    c = CONVENTIONS[convention]
    return {
        "parameters": parameters * c.parameters / (world_size if stage >= 3 else 1),
        "gradients": parameters * c.gradients / (world_size if stage >= 2 else 1),
        "optimizer": parameters * c.optimizer / (world_size if stage >= 1 else 1),
    }


def largest_model(memory, stage, world_size, model_parallel=1, convention="16"):
    """Parameters whose states just fill `memory` bytes per GPU; ZeRO Table 2, theoretical
    columns."""
    per_parameter = sum(state_bytes(1, stage, world_size, convention).values())
    return model_parallel * memory / per_parameter


def deepspeed_zero2_bytes(parameters, gpus, offload=False, version="documented"):
    """(CPU bytes per node, GPU bytes) by DeepSpeed's ZeRO-2 estimator, memory.rst.

    `version="documented"` is the 4p + 16p/N of the documentation, ``"code"`` the 2p + 18p/N of the
    current code. CPU figures include DeepSpeed's own 1.5 for buffers. It prints them divided by
    2**30 and calls that GB.
    """
    if offload:
        return parameters * max(4 * gpus, 16) * 1.5, 2 * parameters
    whole, shared = {"documented": (4, 16), "code": (2, 18)}[version]
    return parameters * 4 * gpus * 1.5, whole * parameters + shared * parameters / gpus


def deepspeed_zero3_bytes(parameters, largest_layer, gpus, nodes=1, offload=(), zero_init=True):
    """(CPU bytes per node, GPU bytes) by DeepSpeed's ZeRO-3 estimator, memory.rst.

    `offload` holds ``"optimizer"`` and/or ``"parameters"``. `zero_init`: parameters are sharded as
    they are made; without it every process first builds the whole model on the CPU.
    """
    gathered = 4 * largest_layer
    if "parameters" in offload:
        gpu, per_parameter = gathered, 18
    elif "optimizer" in offload:
        gpu, per_parameter = gathered + 2 * parameters / gpus, 16
    else:
        gpu, per_parameter = gathered + 18 * parameters / gpus, 0
    if not zero_init:
        return parameters * max(4 * gpus, per_parameter / nodes) * 1.5, gpu
    if not offload:
        return largest_layer * 4 * gpus * 1.5, gpu
    return parameters * per_parameter / nodes * 1.5, gpu


def fsdp_peak_parameters(units, world_size, gathered=1):
    """Peak elements of parameters: sum/F + the largest units gathered at once, FSDP section 3.2.1.

    `units`: elements per unit. The paper counts one gathered unit; prefetching holds one more.
    """
    return sum(units) / world_size + sum(sorted(units)[-gathered:])


def fsdp_peak_parameter_bytes(units, world_size, full=4, low=2, gathered=1):
    """As `fsdp_peak_parameters` in bytes: shard in `full`, gathered in `low`; FSDP section 4.4."""
    return full * sum(units) / world_size + low * sum(sorted(units)[-gathered:])


# ---- activations -------------------------------------------------------------------------------


def activation_bytes(
    seq, batch, hidden, heads, tp=1, sequence_parallel=False, recompute="none", keep_scores=True
):
    """Bytes kept per GPT layer and micro-batch, Korthikanti 2022 Table 2.

    Assumes 2-byte values, 1-byte dropout masks, and (`keep_scores`) the three seq x seq matrices of
    attention; a fused attention kernel keeps none of them, which is ``keep_scores=False`` and
    equals selective recomputation. 34 = attention 11, MLP 19, two norms 4. Tensor parallel leaves
    10 whole on every rank: the inputs of norms, attention and MLP, and two masks; sequence parallel
    cuts these too. ``"full"`` keeps the layer's input only, 2 bytes per element, whole on every
    rank.
    """
    elements = seq * batch * hidden
    if recompute == "full":
        return 2 * elements
    if recompute not in ("none", "selective"):
        raise ValueError(f"recompute must be none, selective or full, got {recompute!r}")
    whole = 34 / tp if sequence_parallel else 10 + 24 / tp
    scores = 5 * heads * seq / (hidden * tp) if keep_scores and recompute == "none" else 0
    return elements * (whole + scores)


def first_stage_activation_bytes(seq, batch, hidden, heads, layers, tp, pp=1, chunks=1):
    """Activations of the first 1F1B stage with sequence parallel: independent of `pp`, because the
    stage holds layers/pp layers of pp micro-batches; Korthikanti 2022 equation 5.

    Interleaving with `chunks` > 1 stages per rank multiplies it by 1 + (p-1)/(p m), section 4.2.3.
    """
    factor = 1 if chunks == 1 else 1 + (pp - 1) / (pp * chunks)
    return factor * layers * activation_bytes(seq, batch, hidden, heads, tp, True)


def extra_activation_bytes(seq, batch, hidden, vocab, tp, pp=1):
    """What lies outside the layers on the first stage: pp embedding masks, and (one stage only)
    final norm, output input and 32-bit logits; Korthikanti 2022 section 4.3.

    The paper prints "less than 0.01 %" of the total for its 22B model; its own formula gives 0.57
    %.
    """
    elements = seq * batch * hidden / tp
    return pp * elements + (4 * elements * (1 + vocab / hidden) if pp == 1 else 0)


# ---- traffic -----------------------------------------------------------------------------------


def data_parallel_traffic(parameters, stage, world_size=None, microbatches=1):
    """Elements that one rank sends per step, ZeRO section 7.

    2 psi for DDP (all-reduce) and stages 1 and 2 (reduce-scatter + all-gather), 3 psi for stage 3
    (two all-gathers + reduce-scatter). With `world_size` the ring's exact factor (N-1)/N. With
    gradient accumulation, stage 2 reduces every micro-batch into its shard and stage 3 also gathers
    for every one; stages 0 and 1 wait for the last.
    """
    passes = {0: 2, 1: 2, 2: 1 + microbatches, 3: 3 * microbatches}
    if stage not in passes:
        raise ValueError(f"stage must be 0, 1, 2 or 3, got {stage!r}")
    ring = 1 if world_size is None else (world_size - 1) / world_size
    return passes[stage] * parameters * ring


def cross_host_traffic(model_bytes, world_size, gpus_per_host, strategy, exact=False):
    """Bytes per GPU that leave the host, FSDP section 3.2.2.

    `strategy`: ``replicate``, ``full`` or ``hybrid`` (shard in the host, all-reduce the shard
    across hosts). The paper prints 2M(W-1)/(GW) for hybrid; the all-reduce among W/G hosts costs
    2(M/G)(W/G-1)/(W/G), `exact`.
    """
    w, g = world_size, gpus_per_host
    if strategy == "hybrid":
        hosts = w / g
        return 2 * model_bytes / g * ((hosts - 1) / hosts if exact else (w - 1) / w)
    return {"replicate": 2, "full": 3}[strategy] * model_bytes * (w - 1) / w


def tensor_parallel_traffic(seq, batch, hidden, tp, recompute=False, asymptotic=False):
    """Elements sent per layer, rank and micro-batch: 8 b s h (t-1)/t, Narayanan 2021 section 3.2.

    Two all-reduces forward, two backward, each 2(t-1)/t of the message. Recomputing the forward
    adds two more: 12 b s h in the limit, ZeRO section 8. Sequence parallel moves the same.
    """
    ring = 1 if asymptotic else (tp - 1) / tp
    return (12 if recompute else 8) * batch * seq * hidden * ring


def pipeline_traffic(seq, batch, hidden, tp=1, scatter_gather=False):
    """Elements per stage boundary, direction and micro-batch: b s h, or b s h / t when each of the
    t tensor-parallel ranks sends its part only; Narayanan 2021 sections 3.2 and 4.1."""
    return batch * seq * hidden / (tp if scatter_gather else 1)


def tensor_beats_data_parallel_tokens(hidden):
    """Tokens per step above which splitting a layer moves more than replicating it: 3 h.

    8 s b h (t-1)/t against 24 h^2 (n-1)/n on the same GPUs, without recomputation or embeddings.
    """
    return 3 * hidden


# ---- pipeline bubbles --------------------------------------------------------------------------


def bubble(schedule, stages, microbatches, chunks=1, of="ideal"):
    """Idle time of a pipeline as a fraction.

    `of="ideal"` divides by the time without a bubble: (p-1)/m for GPipe and 1F1B, (p-1)/(v m)
    interleaved (Narayanan 2021 section 2.2), (p-1)/(3 m) for ZB-H1 and 0 for ZB-V with equal
    forward, input- and weight-gradient times (Zero Bubble, README). `of="total"` divides by the
    time with it: (p-1)/(m+p-1), GPipe section 2.3. Naive: one micro-batch.
    """
    p, m = stages, 1 if schedule == "naive" else microbatches
    per_stage = {
        "naive": 1, "gpipe": 1, "1f1b": 1, "interleaved": 1 / chunks, "zb-h1": 1 / 3, "zb-v": 0,
    }  # fmt: skip
    if schedule not in per_stage:
        raise ValueError(f"unknown schedule {schedule!r}; known: {', '.join(per_stage)}")
    if of not in ("ideal", "total"):
        raise ValueError(f"of must be ideal or total, got {of!r}")
    ideal = (p - 1) * per_stage[schedule] / m
    return ideal if of == "ideal" else ideal / (1 + ideal)


def bubble_seconds(schedule, stages, f, b, w=0.0, f_and_b=None):
    """Bubble per rank in seconds: DualPipe's table (DeepSeek-V3 Table 2).

    `f`, `b`: a stage's forward and *full* backward; `w`: its weight-gradient part; `f_and_b`: a
    forward and a backward overlapped. 1F1B (p-1)(f+b), ZB1P (p-1)(f+b-2w), DualPipe
    (p/2-1)(f_and_b+b-3w).
    """
    if schedule == "dualpipe":
        return (stages / 2 - 1) * ((f + b if f_and_b is None else f_and_b) + b - 3 * w)
    return (stages - 1) * (f + b - {"1f1b": 0, "zb-h1": 2}[schedule] * w)


def in_flight(schedule, stages, microbatches, rank):
    """Micro-batches whose activations `rank` (0-based) holds at most: all m for GPipe, min(m,
    p-rank) for 1F1B; Narayanan 2021 section 2.2.1, Korthikanti 2022 appendix C. ZB-H1 keeps every
    rank at what 1F1B holds on rank 0, min(m, p); Zero Bubble section 2.1."""
    if schedule == "gpipe":
        return microbatches
    if schedule == "1f1b":
        return min(microbatches, stages - rank)
    if schedule == "zb-h1":
        return min(microbatches, stages)
    if schedule == "naive":
        return 1
    raise ValueError(f"no closed form for {schedule!r}: play the schedule in the simulator")


def pipeline_seconds(global_batch, microbatch, dp, stages, forward, backward):
    """Batch time without communication: (b'/b + p - 1)(tf + tb), Narayanan 2021 equation 1."""
    return (ceil(global_batch / dp / microbatch) + stages - 1) * (forward + backward)


# ---- collectives -------------------------------------------------------------------------------

# Bus bandwidth = algorithm bandwidth x this; size is the whole array (nccl-tests, PERFORMANCE.md).
BUS_FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1,
    "reduce": lambda n: 1,
    "all_reduce in-network": lambda n: (n - 1) / (n + 1),  # the switch adds (NVLink SHARP)
}


def bus_bandwidth(op, size, seconds, ranks):
    """Bytes per second of each link that an operation on `size` bytes in `seconds` amounts to."""
    return size / seconds * BUS_FACTORS[op](ranks)


def ring_seconds(op, size, ranks, bandwidth, latency=0.0):
    """Latency-bandwidth time of a ring collective on an array of `size` bytes in total.

    (n-1) steps for all-gather and reduce-scatter, 2(n-1) for all-reduce, each `latency` seconds,
    plus the bytes that cross each link at `bandwidth` bytes per second; nccl-tests PERFORMANCE.md.
    """
    if ranks == 1:
        return 0.0
    steps = 2 * (ranks - 1) if op == "all_reduce" else ranks - 1
    return steps * latency + BUS_FACTORS[op](ranks) * size / bandwidth


def hierarchical_all_reduce_seconds(size, nodes, per_node, intra, inter, latency=(0.0, 0.0)):
    """Reduce-scatter in the node, all-reduce of the shard across nodes, all-gather in the node.

    `intra` and `inter` in bytes per second and GPU. Every GPU of a node drives its own share across
    the slow links, so these carry size / per_node each.
    """
    inside = ring_seconds("reduce_scatter", size, per_node, intra, latency[0])
    across = ring_seconds("all_reduce", size / per_node, nodes, inter, latency[1])
    return 2 * inside + across


def overlapped_seconds(compute, communication):
    """Time of two things that run side by side, and the part of communication that shows."""
    return max(compute, communication), max(0.0, communication - compute)
