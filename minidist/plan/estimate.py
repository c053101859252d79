"""Memory by kind and step time by part of one layout, in closed form: fast enough to try hundreds.

The times use the same pieces (`costs.py`) as the simulator and agree with it within a few percent
(a test). The bytes are the largest rank's, at the moment when its activations are largest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from minidist.plan import costs
from minidist.plan.costs import ZERO_STAGE, Layout, Software
from minidist.plan.formulas import state_bytes
from minidist.plan.hardware import Cluster
from minidist.plan.shapes import Transformer
from minidist.plan.simulator import Step

# What a device cannot give to tensors: context, kernels and communication buffers (2 GB), and about
# 5 % that the allocator loses to fragmentation.
RESERVED_BYTES = 2e9
FRAGMENTATION = 0.05


@dataclass(frozen=True)
class Estimate:
    """What one layout would need and take. Bytes per GPU (`host_bytes`: per node), seconds per
    step."""

    layout: Layout
    microbatches: int
    bytes: dict
    seconds: dict
    host_bytes: float
    tflops_per_gpu: float

    @property
    def total_bytes(self) -> float:
        return sum(self.bytes.values())

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


def usable_bytes(cluster: Cluster) -> float:
    """Bytes of one GPU that tensors can fill."""
    return cluster.accelerator.memory * (1 - FRAGMENTATION) - RESERVED_BYTES


def estimate(
    shape: Transformer,
    cluster: Cluster,
    layout: Layout,
    global_batch: int,
    software: Software | None = None,
    convention: str = "16",
) -> Estimate:
    """Predict one layout. Raises ValueError where the sizes do not fit together."""
    step = Step(shape, cluster, layout, global_batch, software or Software())
    seconds = _pipeline_seconds(step) if layout.pp > 1 else _layer_seconds(step)
    parameters = max(
        shape.rank_parameters(layout.tp, layout.pp, stage) for stage in {0, layout.pp - 1}
    )
    owned = parameters / layout.shards
    seconds["optimizer"] = costs.optimizer_seconds(owned, layout, cluster)
    if layout.dp_kind in ("zero1", "zero2"):
        seconds["dp_communication"] += step.gather(parameters)
    total = sum(seconds.values())
    flops = shape.training_flops(step.tokens)
    return Estimate(
        layout, step.m, _bytes(step, convention), seconds, _host_bytes(step, parameters),
        flops / total / cluster.gpus / 1e12,
    )  # fmt: skip


# ---- time --------------------------------------------------------------------------------------


def _layer_seconds(step: Step) -> dict:
    """No pipeline: what the network does beside the compute of each micro-batch, and what shows."""
    shape, layout, layer = step.shape, step.layout, step.layer
    tp = shape.layers * (layer.forward_comm + layer.backward_comm)
    forward = shape.layers * layer.forward + step.logits[0]
    backward = shape.layers * layer.backward + step.logits[1]
    one = shape.layer_parameters(layout.tp)
    ends = shape.rank_parameters(layout.tp) - shape.layers * one
    gather = shape.layers * step.gather(one) + step.gather(ends)
    reduce = shape.layers * step.reduce(one) + step.reduce(ends)
    first, last = step.gather(shape.embedding_parameters(layout.tp)), step.reduce(ends)
    exposed = 0.0
    if not step.software.dp_overlap:
        exposed = step.reduce(shape.rank_parameters(layout.tp))
        reduce = 0.0
    if step.sharded:
        again = gather if step.reshard else 0.0
        exposed += first + max(0.0, gather - first - forward)
        exposed += max(0.0, again + reduce - last - backward) + last
        exposed *= step.m
    elif layout.dp_kind == "zero2":
        exposed += (step.m - 1) * max(0.0, reduce - forward - backward)
        exposed += max(last, reduce - backward)
    elif layout.dp > 1:
        exposed += max(last, reduce - backward)
    return {
        "compute": step.m * (forward + backward - tp), "tp_communication": step.m * tp,
        "pp_communication": 0.0, "dp_communication": exposed, "bubble": 0.0,
    }  # fmt: skip


def _pipeline_seconds(step: Step) -> dict:
    """The slowest stage works all the time except for the bubble; messages between stages show
    because 1F1B has no slack: each micro-batch waits for one in either direction."""
    shape, layout, layer = step.shape, step.layout, step.layer
    p, v, m = layout.pp, layout.chunks, step.m
    layers = shape.stage_layers(p)
    tp = layers[0] * (layer.forward_comm + layer.backward_comm)
    ordinary = layers[0] * (layer.forward + layer.backward)
    last = layers[-1] * (layer.forward + layer.backward) + sum(step.logits)
    slowest = max(ordinary, last)
    bubble = (p - 1) * ordinary / v
    waits = 2 * step.send * (p - 1) * (1 + m / p if v == 1 else v)
    parameters = shape.rank_parameters(layout.tp, p, 0)
    reduce = step.reduce(parameters) / (v if step.software.dp_overlap else 1)
    gather = step.gather(parameters) if step.sharded else 0.0
    return {
        "compute": m * (slowest - tp), "tp_communication": m * tp, "pp_communication": waits,
        "dp_communication": (reduce if layout.dp > 1 else 0.0) + gather, "bubble": bubble,
    }  # fmt: skip


# ---- memory ------------------------------------------------------------------------------------


def activation_bytes(step: Step) -> float:
    """Activations of the fullest rank: micro-batches in flight times its layers, one layer at work
    when it is recomputed, and the logits on the last stage."""
    shape, layout, software = step.shape, step.layout, step.software
    working = 0.0
    if layout.recompute != "none":
        whole = replace(layout, recompute="none")
        working = costs.layer_activation_bytes(shape, whole, software) - step.activation
    logits = costs.logits_bytes(shape, layout)
    p, v, m = layout.pp, layout.chunks, step.m
    if p == 1:
        return shape.layers * step.activation + working + logits
    layers = shape.stage_layers(p)[0]
    if layout.schedule == "gpipe":
        first = last = m * layers
    elif v > 1:
        chunks = min(m * v, 2 * (p - 1) + (v - 1) * p + 1)
        first, last = chunks * layers / v, min(m * v, (v - 1) * p + 1) * layers / v
    else:
        first, last = min(m, p) * layers, layers
    return max(first * step.activation, last * step.activation + logits) + working


def _bytes(step: Step, convention: str) -> dict:
    shape, layout, software = step.shape, step.layout, step.software
    activations = activation_bytes(step)
    one = shape.layer_parameters(layout.tp)
    largest = max(one, shape.embedding_parameters(layout.tp))
    stage = ZERO_STAGE[layout.dp_kind]
    best = None
    for rank in {0, layout.pp - 1}:
        parameters = shape.rank_parameters(layout.tp, layout.pp, rank)
        state = state_bytes(parameters, stage, layout.shards, convention)
        buffers = 0.0
        if step.sharded:  # at most two units gathered, and the gradient of one on its way
            state = state_bytes(parameters, 3, layout.shards, convention)
            gathered = parameters if layout.dp_kind == "fsdp-grad-op" else 2 * largest
            buffers = min(gathered, parameters) * software.gather_bytes
            buffers += min(largest, parameters) * software.reduce_bytes
        elif layout.dp_kind == "zero2":
            buffers = min(2 * one, parameters) * software.reduce_bytes
        if layout.pp > 1 and stage >= 2:
            # Inside a pipeline gradients stay whole until a stage's last backward.
            state["gradients"] = state_bytes(parameters, 0, 1, convention)["gradients"]
        if layout.offload != "none":
            state["optimizer"] = state["gradients"] = 0.0
            buffers = max(buffers, 2 * largest * software.reduce_bytes)
        if layout.offload == "parameters":
            state["parameters"] = 0.0
        row = {**state, "activations": activations, "buffers": buffers}
        if best is None or sum(row.values()) > sum(best.values()):
            best = row
    return best


def _host_bytes(step: Step, parameters: int) -> float:
    """Host memory per node for what is offloaded: 16 bytes per parameter for optimizer state and
    gradients, 18 with the parameters (DeepSpeed, memory.rst, without its factor for buffers)."""
    layout, cluster = step.layout, step.cluster
    if layout.offload == "none":
        return 0.0
    each = 18 if layout.offload == "parameters" else 16
    return each * parameters / layout.shards * min(cluster.gpus, cluster.gpus_per_node)
