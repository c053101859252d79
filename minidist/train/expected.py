"""What a rank should hold and send, from sizes alone: the column beside every measured one.

Nothing here looks at a run. The published formulas are those of `minidist.plan.formulas`, each with
its source; this file adds them up for our GPT on one rank of a layout, together with what papers
leave out because it vanishes at their scale (the embedding, the head, communication buffers).
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch

from minidist.parallel.buckets import plan_buckets
from minidist.parallel.schedules import Schedule, schedule
from minidist.parallel.split import split
from minidist.plan import formulas
from minidist.plan.shapes import Transformer
from minidist.train.activations import layer_activation_bytes
from minidist.train.config import Layout, TrainConfig
from minidist.train.model import GPT, GPTConfig
from minidist.train.report import KINDS

# Which ZeRO stage each data-parallel kind is (document 4.2 and 5.2).
STAGE = {"ddp": 0, "zero1": 1, "zero2": 2, "fsdp-grad-op": 2, "fsdp": 3}
# Numbers per parameter that the optimizer keeps: Adam's momentum and variance, SGD's momentum.
STATES = {"adamw": 2, "adam": 2, "sgd": 1}


class Place(NamedTuple):
    """Coordinates of a rank in the mesh (dp, pp, tp), the order of `build_mesh`."""

    dp: int
    pp: int
    tp: int


def place_of(rank: int, layout: Layout) -> Place:
    return Place(rank // (layout.pp * layout.tp), rank // layout.tp % layout.pp, rank % layout.tp)


def shape_of(config: GPTConfig) -> Transformer:
    """Our model in the planner's terms: learned positions, biases, layer norms."""
    return Transformer(
        layers=config.layers,
        hidden=config.width,
        heads=config.heads,
        vocab=config.vocab,
        seq=config.seq,
        tied=config.tied,
    )


def expected(config: TrainConfig, layout: Layout, rank: int) -> dict:
    """What one rank should hold (the kinds of `rows.kinds_of`), send per step, and wait.

    Returns ``{"bytes": {kind: bytes}, "sent": bytes, "bubble": fraction of ideal time or None}``.
    ``peak`` is the sum of all kinds, as if they were all at their highest at once. Kinds without a
    formula are missing: ``gathered`` and ``buffers`` of sharded data parallelism inside of another
    axis, ``activations`` of schedules that split the backward.
    """
    place = place_of(rank, layout)
    size = config.torch_dtype().itemsize
    layers = layers_of(config.model, layout, place)
    parameters = _parameters(config.model, layout, layers)
    held = _states(config, layout, parameters)
    held |= _activations(config, layout, place, layers)
    held |= _passing(config, layout, parameters)
    if len(held) == len(KINDS):
        held["peak"] = sum(held.values())
    return {
        "bytes": held,
        "sent": size * _sent_elements(config, layout, place, layers, parameters),
        "bubble": _bubble(layout),
    }


def _states(config: TrainConfig, layout: Layout, parameters: int) -> dict[str, float]:
    """ZeRO section 3.1 and 5: which of the three kinds a stage divides by the number of ranks."""
    stage, ranks = STAGE[layout.dp_kind], layout.dp
    if layout.dp_kind == "fsdp-grad-op":
        stage = 3  # between steps it keeps a shard of the parameters, too; `gathered` has the rest
    if layout.dp_kind == "zero2" and layout.pp > 1:
        stage = 1  # micro-batches add up whole gradients, which only step() reduces
    if config.masters:
        # FSDP's 32-bit shard is its master copy: 4 + 4 + 8 where the others keep 2 + 2 + 12.
        convention = "fp32" if layout.dp_kind.startswith("fsdp") else "16"
        return formulas.state_bytes(parameters, stage, ranks, convention)
    # The fp32 convention is one number for parameter and gradient and two for Adam.
    states = formulas.state_bytes(parameters, stage, ranks, "fp32")
    scale = config.torch_dtype().itemsize / 4
    states = {kind: count * scale for kind, count in states.items()}
    states["optimizer"] *= STATES[config.optimizer] / 2
    return states


def layers_of(config: GPTConfig, layout: Layout, place: Place) -> list[list[int]]:
    """Which of ``[embed, *blocks, head]`` each chunk of this rank holds, by `md.split`."""
    if layout.pp == 1:
        return [list(range(config.layers + 2))]
    with torch.device("meta"):
        stages = split(GPT(config), layout.pp, layout.chunks)
    plan = _schedule(layout)
    ends = list(accumulate(len(stage.layer_names) for stage in stages))
    held = []
    for chunk in range(layout.chunks):
        stage = plan.stage(place.pp, chunk)
        held.append(list(range(ends[stage] - len(stages[stage].layer_names), ends[stage])))
    return held


def _schedule(layout: Layout) -> Schedule:
    return schedule(layout.schedule, layout.pp, layout.microbatches, layout.chunks)


def _parameters(config: GPTConfig, layout: Layout, layers: list[list[int]]) -> int:
    """Numbers in the layers of one rank; a tied matrix counts on both of its stages."""
    shape, last = shape_of(config), config.layers + 1
    held = [layer for chunk in layers for layer in chunk]
    count = sum(shape.layer_parameters(layout.tp) for layer in held if 0 < layer < last)
    if 0 in held:
        count += shape.embedding_parameters(layout.tp)
    if last in held:
        count += shape.norm_parameters()
        if not config.tied or 0 not in held:
            count += shape.output_parameters(layout.tp)
    return count


def _activations(
    config: TrainConfig, layout: Layout, place: Place, layers: list[list[int]]
) -> dict[str, int]:
    """What autograd keeps for the micro-batches that this rank holds at once. Of a schedule that
    splits the backward nothing is said: between its two halves a part is kept."""
    rows = config.batch // layout.dp // layout.microbatches
    dtype = config.torch_dtype()
    each = layer_activation_bytes(config.model, rows, config.model.seq, dtype, layout.tp)
    per_chunk = [sum(each[layer] for layer in chunk) for chunk in layers]
    if layout.pp == 1:
        return {"activations": per_chunk[0]}
    if layout.schedule in ("naive", "gpipe", "1f1b"):
        held = formulas.in_flight(layout.schedule, layout.pp, layout.microbatches, place.pp)
        return {"activations": per_chunk[0] * held}
    live = highest = 0
    for action in _schedule(layout).actions[place.pp]:
        if action.kind == "W":
            return {}
        live += per_chunk[action.chunk] * (1 if action.kind == "F" else -1)
        highest = max(highest, live)
    return {"activations": highest}


def _passing(config: TrainConfig, layout: Layout, parameters: int) -> dict[str, float]:
    """Memory that only communication needs: gathered parameters, unreduced gradients, receive
    buffers. Zero where gradients are reduced in place (DDP) and where activations are sent."""
    kind, ranks = layout.dp_kind, layout.dp
    size = config.torch_dtype().itemsize
    if ranks == 1:
        return {"gathered": 0, "buffers": 0}
    if kind == "ddp":
        # Gradients of earlier micro-batches add up beside the buckets, until the last one.
        beside = parameters if layout.pp > 1 and layout.microbatches > 1 else 0
        return {"gathered": 0, "buffers": size * beside}
    if layout.tp > 1 or layout.pp > 1:
        return {}
    others, apart = (ranks - 1) / ranks, (ranks - 2) / ranks
    if kind in ("zero1", "zero2"):
        sizes = [size * bucket for bucket in buckets(config)]
        # The other ranks' parts of a bucket arrive beside it. Stage 1 lets the reductions of two
        # neighbours travel at once. Stage 2 one, for it also has to keep the whole gradients of
        # that bucket, and of the next while they arrive; one part arrives in the later shard.
        if kind == "zero1":
            passing = others * max(map(sum, pairs(sizes)))
        else:
            passing = max(apart * travels + travels + fills for travels, fills in pairs(sizes))
        return {"gathered": 0, "buffers": passing}
    # FSDP: the root unit (embed and head) stays whole while a block is used and the next one comes.
    block = shape_of(config.model).layer_parameters()
    root = shape_of(config.model).parameters - config.model.layers * block
    two = min(2, config.model.layers)
    whole = root + (two if kind == "fsdp" else config.model.layers) * block
    # In backward the root's gradients are whole, and those of a block twice when it ends, where its
    # parameters have just been freed: as autograd made them and end to end. The shards of both,
    # counted as gradients, do not exist yet. A moment later other ranks' parts of the block arrive;
    # this column adds up what each kind has at its highest.
    reduced_size = 4 if config.masters else size
    buffers = reduced_size * (others * (root + block) + apart * block) + size * block
    return {"gathered": size * whole, "buffers": buffers}


def buckets(config: TrainConfig) -> list[int]:
    """Elements of each gradient bucket, the first to be full first: parameters in reverse order,
    cut at the cap (Li 2020, section 3.2.3)."""
    with torch.device("meta"):
        parameters = list(GPT(config.model).to(config.torch_dtype()).parameters())
    order, cap = range(len(parameters))[::-1], config.bucket_cap_mb
    plan = plan_buckets(parameters, order, cap, cap)
    return [sum(parameters[index].numel() for index in bucket) for bucket in plan]


def pairs(sizes: list[int]) -> list[tuple[int, int]]:
    """Each bucket and the one after it; the last has none after it."""
    return list(zip(sizes, [*sizes[1:], 0], strict=True))


def _sent_elements(
    config: TrainConfig, layout: Layout, place: Place, layers: list[list[int]], parameters: int
) -> float:
    rows, seq, width = config.batch // layout.dp, config.model.seq, config.model.width
    sent = formulas.data_parallel_traffic(parameters, STAGE[layout.dp_kind], layout.dp)
    held = [layer for chunk in layers for layer in chunk]
    first, last = 0 in held, config.model.layers + 1 in held
    if layout.tp > 1:
        blocks = len(held) - first - last
        sent += blocks * formulas.tensor_parallel_traffic(seq, rows, width, layout.tp)
        # Embedding, output matrix and loss are cut over the vocabulary (Shoeybi 2019, section 3).
        # Embedding: one all-reduce of its output. Output matrix: one of its input's gradient.
        # Loss: the maximum and three sums, one number per token each.
        per_token = first * width + last * (width + 4)
        sent += 2 * (layout.tp - 1) / layout.tp * rows * seq * per_token
    if layout.pp > 1:
        # Per boundary one activation forward and one gradient back, of all micro-batches together.
        stages = [_schedule(layout).stage(place.pp, chunk) for chunk in range(layout.chunks)]
        ends = sum((s > 0) + (s < layout.pp * layout.chunks - 1) for s in stages)
        sent += ends * formulas.pipeline_traffic(seq, rows, width)
        if config.model.tied and (first or last):
            # The two copies of the table exchange their gradients.
            sent += 2 * (2 - 1) / 2 * shape_of(config.model).output_parameters(layout.tp)
    return sent


def _bubble(layout: Layout) -> float | None:
    if layout.pp == 1:
        return None
    return formulas.bubble(layout.schedule, layout.pp, layout.microbatches, layout.chunks)
