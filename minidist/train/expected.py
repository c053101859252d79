"""What a rank should hold and send, from sizes alone: the column beside every measured one.

Nothing here looks at a run. The published formulas are those of `minidist.plan.formulas`, each with
its source; this file adds them up for our GPT on one rank of a layout, together with what papers
leave out because it vanishes at their scale (the embedding, the head, communication buffers).
"""

from __future__ import annotations

from typing import NamedTuple

from minidist.plan import formulas
from minidist.plan.shapes import Transformer
from minidist.train.activations import layer_activation_bytes
from minidist.train.config import Layout, TrainConfig
from minidist.train.model import GPTConfig

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
    """Bytes held by kind (between backward and step; activations at their peak), bytes sent per
    step, and the bubble, on one rank.

    Returns ``{"bytes": {kind: bytes}, "sent": bytes, "bubble": fraction of ideal time or None}``.
    """
    place = place_of(rank, layout)
    size = config.torch_dtype().itemsize
    parameters = shape_of(config.model).rank_parameters(layout.tp, layout.pp, place.pp)
    return {
        "bytes": {
            **_states(config, layout, parameters),
            "activations": _activations(config, layout, place),
        },
        "sent": size * _sent_elements(config, layout, place, parameters),
        "bubble": _bubble(layout),
    }


def _states(config: TrainConfig, layout: Layout, parameters: int) -> dict[str, float]:
    """ZeRO section 3.1 and 5: which of the three kinds a stage divides by the number of ranks."""
    stage, ranks = STAGE[layout.dp_kind], layout.dp
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


def stage_layers(config: GPTConfig, stages: int, stage: int) -> slice:
    """Which of ``[embed, *blocks, head]`` a pipeline stage holds: equal numbers of blocks, embed
    with the first and head with the last."""
    blocks = config.layers // stages
    first = 0 if stage == 0 else 1 + stage * blocks
    last = config.layers + 2 if stage == stages - 1 else 1 + (stage + 1) * blocks
    return slice(first, last)


def _activations(config: TrainConfig, layout: Layout, place: Place) -> int:
    """What autograd keeps for the micro-batches that this stage holds at once."""
    rows = config.batch // layout.dp // layout.microbatches
    dtype = config.torch_dtype()
    layers = layer_activation_bytes(config.model, rows, config.model.seq, dtype, layout.tp)
    per_microbatch = sum(layers[stage_layers(config.model, layout.pp, place.pp)])
    if layout.pp == 1:
        return per_microbatch * layout.microbatches
    return per_microbatch * formulas.in_flight(
        layout.schedule, layout.pp, layout.microbatches, place.pp
    )


def _sent_elements(config: TrainConfig, layout: Layout, place: Place, parameters: int) -> float:
    rows, seq, width = config.batch // layout.dp, config.model.seq, config.model.width
    sent = formulas.data_parallel_traffic(parameters, STAGE[layout.dp_kind], layout.dp)
    if layout.tp > 1:
        blocks = config.model.layers // layout.pp
        sent += blocks * formulas.tensor_parallel_traffic(seq, rows, width, layout.tp)
        sent += _vocabulary_traffic(config, layout, place, rows * seq)
    if layout.pp > 1:
        boundary = formulas.pipeline_traffic(seq, rows, width)
        sent += boundary * ((place.pp < layout.pp - 1) + (place.pp > 0))
    return sent


def _vocabulary_traffic(config: TrainConfig, layout: Layout, place: Place, tokens: int) -> float:
    """Embedding, output matrix and loss cut over the vocabulary (Shoeybi 2019, section 3).

    Embedding: one all-reduce of its output forward. Output matrix: one of its input's gradient
    backward. Loss: maximum, sum of exponentials and the target's logit, one number per token each.
    """
    per_token = 0
    if place.pp == 0:
        per_token += config.model.width
    if place.pp == layout.pp - 1:
        per_token += config.model.width + 3
    return 2 * (layout.tp - 1) / layout.tp * tokens * per_token


def _bubble(layout: Layout) -> float | None:
    if layout.pp == 1:
        return None
    return formulas.bubble(layout.schedule, layout.pp, layout.microbatches, layout.chunks)
