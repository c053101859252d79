"""Plays one training step on modelled hardware and says where the time and the memory went.

What is played is the real order of things: the action lists of ``parallel/schedules.py``, and the
gather, compute, free and reduce order of DDP, ZeRO and FSDP. Each rank has lanes that work in the
order in which things were issued, like streams: a task starts when its lane is free and what it
waits for is done. Data- and tensor-parallel peers do the same at the same time, so one rank of each
pipeline stage stands for all of them and any number of GPUs costs the same to simulate.

    compute  | F0 | F1 | F2 |   B2   |   B1   |   B0   | step |        ZeRO-3, three layers
    network  g0 | g1 | g2 |    g1 |  r2  g0 |  r1   |  r0 |             g gather, r reduce-scatter
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import ceil

from minidist.parallel.schedules import Action, Schedule, schedule
from minidist.plan import costs
from minidist.plan.costs import Layout, Software
from minidist.plan.hardware import Cluster
from minidist.plan.shapes import Transformer


@dataclass(frozen=True)
class Task:
    """Something a lane does. `kind`: forward, backward, communication, optimizer."""

    rank: int
    lane: str
    kind: str
    name: str
    start: float
    end: float


@dataclass
class Simulation:
    """Outcome of one step. Seconds; bytes; ranks are pipeline stages.

    `parts` splits the step of the busiest rank: compute, tp_communication, pp_communication,
    dp_communication (exposed parts only), bubble, optimizer; they add up to `seconds`.
    """

    seconds: float
    flops: float  # model FLOPs of the whole step, without recomputation
    gpus: int
    parts: dict
    tasks: list = field(repr=False, default_factory=list)
    memory: list = field(repr=False, default_factory=list)  # (time, rank, kind, bytes now)

    @property
    def tflops_per_gpu(self) -> float:
        """Model TFLOP/s per GPU; what is recomputed is not counted."""
        return self.flops / self.seconds / self.gpus / 1e12

    @property
    def bubble(self) -> float:
        """Idle time of the busiest rank as a fraction of the rest of its step (ideal time)."""
        return self.parts["bubble"] / (self.seconds - self.parts["bubble"])

    def peak_memory(self, rank: int = 0) -> float:
        """Largest sum over all kinds at one moment."""
        now, peak = {}, 0.0
        for _, where, kind, size in self.memory:
            if where == rank:
                now[kind] = size
                peak = max(peak, sum(now.values()))
        return peak

    def chrome_trace(self) -> dict:
        """The timeline for Perfetto or chrome://tracing: times in microseconds, a process per
        rank."""
        lanes = {lane: number for number, lane in enumerate(("compute", "network"))}
        events = [
            {"name": t.name, "cat": t.kind, "ph": "X", "ts": t.start * 1e6, "pid": t.rank,
             "dur": (t.end - t.start) * 1e6, "tid": lanes[t.lane]}
            for t in self.tasks
        ]  # fmt: skip
        for rank in sorted({t.rank for t in self.tasks}):
            name = {"name": f"rank {rank}"}
            events.append({"name": "process_name", "ph": "M", "pid": rank, "args": name})
            for lane, number in lanes.items():
                args = {"name": lane}
                events.append(
                    {"name": "thread_name", "ph": "M", "pid": rank, "tid": number, "args": args}
                )
        now = {}
        for time, rank, kind, size in self.memory:
            now.setdefault(rank, {})[kind] = size / 1e9
            events.append(
                {"name": "memory (GB)", "ph": "C", "pid": rank, "ts": time * 1e6,
                 "args": dict(now[rank])}
            )  # fmt: skip
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save_trace(self, path) -> None:
        with open(path, "w") as file:
            json.dump(self.chrome_trace(), file)


class Clock:
    """Lanes that work first in, first out, and the bytes that are alive."""

    def __init__(self):
        self.free = {}
        self.tasks = []
        self._changes = []

    def add(self, rank, lane, kind, name, seconds, ready=0.0) -> Task:
        """Issue a task on a lane; it starts when the lane is free and not before `ready`."""
        start = max(self.free.get((rank, lane), 0.0), ready)
        task = Task(rank, lane, kind, name, start, start + seconds)
        self.free[rank, lane] = task.end
        if seconds:
            self.tasks.append(task)
        return task

    def allocate(self, time, rank, kind, size):
        self._changes.append((time, rank, kind, size))

    def memory(self):
        """Running totals, in time order; what is freed goes before what is allocated."""
        now, rows = {}, []
        for time, rank, kind, size in sorted(self._changes, key=lambda c: (c[0], c[3])):
            now[rank, kind] = now.get((rank, kind), 0.0) + size
            rows.append((time, rank, kind, now[rank, kind]))
        return rows


class Step:
    """What one step needs to know, worked out once."""

    def __init__(self, shape, cluster, layout, global_batch, software):
        if layout.gpus != cluster.gpus:
            raise ValueError(f"dp x tp x pp = {layout.gpus}, but there are {cluster.gpus} GPUs")
        if layout.dp_kind not in costs.DP_KINDS:
            raise ValueError(f"unknown dp kind {layout.dp_kind!r}: {', '.join(costs.DP_KINDS)}")
        shape.check_tp(layout.tp)
        self.shape, self.cluster, self.layout, self.software = shape, cluster, layout, software
        self.m = costs.microbatches(layout, global_batch)
        self.tokens = global_batch * shape.seq
        self.layer = costs.layer_seconds(shape, layout, cluster, software)
        self.logits = costs.logits_seconds(shape, layout, cluster, software)
        self.send = costs.send_seconds(shape, layout, cluster, software)
        self.activation = costs.layer_activation_bytes(shape, layout, software)
        self.sharded = layout.dp_kind in ("fsdp", "hybrid", "fsdp-grad-op")
        self.reshard = layout.dp_kind in ("fsdp", "hybrid")

    def gather(self, elements: float) -> float:
        """Seconds to have `elements` parameters whole on this rank."""
        seconds = costs.data_parallel_seconds(
            "all_gather", elements, self.software.gather_bytes, self.layout, self.cluster
        )
        if self.layout.offload == "parameters":
            shard = elements * self.software.gather_bytes / self.layout.shards
            seconds += shard / (self.cluster.accelerator.pcie * costs.PCIE_EFFICIENCY)
        return seconds

    def reduce(self, elements: float) -> float:
        """Seconds to sum `elements` gradients: all-reduce for DDP, reduce-scatter for the
        others."""
        op = "all_reduce" if self.layout.dp_kind == "ddp" else "reduce_scatter"
        size = self.software.bucket_bytes
        messages = ceil(elements * self.software.reduce_bytes / size) if size else 1
        part = elements / messages
        return messages * costs.data_parallel_seconds(
            op, part, self.software.reduce_bytes, self.layout, self.cluster
        )

    def end_of_step(self, clock: Clock, rank: int, parameters: int, ready: float) -> float:
        """Optimizer, then (ZeRO-1 and 2) the gather of what it wrote. Returns the end."""
        owned = parameters / self.layout.shards
        seconds = costs.optimizer_seconds(owned, self.layout, self.cluster)
        step = clock.add(rank, "compute", "optimizer", "optimizer", seconds, ready)
        if self.layout.dp_kind in ("zero1", "zero2"):
            gather = self.gather(parameters)
            return clock.add(rank, "network", "communication", "gather", gather, step.end).end
        return step.end


def simulate(
    shape: Transformer,
    cluster: Cluster,
    layout: Layout,
    global_batch: int,
    software: Software | None = None,
) -> Simulation:
    """Play one step of `global_batch` sequences. Raises ValueError when the sizes do not fit
    together."""
    step = Step(shape, cluster, layout, global_batch, software or Software())
    clock, ends = _play(step)
    total = max(ends)
    waits = 0.0
    if layout.pp > 1 and step.send:
        # What the messages between stages cost is what the step gains when they are free.
        send, step.send = step.send, 0.0
        waits = total - max(_play(step)[1])
        step.send = send
    return Simulation(
        total, shape.training_flops(step.tokens), cluster.gpus, _parts(step, clock, ends, waits),
        clock.tasks, clock.memory(),
    )  # fmt: skip


def step_seconds(
    shape: Transformer,
    cluster: Cluster,
    layout: Layout,
    global_batch: int,
    software: Software | None = None,
) -> float:
    """The time alone, at half the cost of `simulate`."""
    step = Step(shape, cluster, layout, global_batch, software or Software())
    return max(_play(step)[1])


def _play(step: Step) -> tuple[Clock, list[float]]:
    """The clock after the whole step, and when each rank is done."""
    shape, layout, clock = step.shape, step.layout, Clock()
    if layout.pp == 1:
        ends, parameters = [_play_layers(step, clock)], [shape.rank_parameters(layout.tp)]
    else:
        plan = schedule(layout.schedule, layout.pp, step.m, layout.chunks)
        ends = _play_pipeline(step, clock, plan)
        parameters = [shape.rank_parameters(layout.tp, layout.pp, s) for s in range(layout.pp)]
    done = [
        step.end_of_step(clock, rank, count, ends[rank]) for rank, count in enumerate(parameters)
    ]
    return clock, done


# ---- without pipeline: layer by layer ----------------------------------------------------------


def _play_layers(step: Step, clock: Clock) -> float:
    """All micro-batches of one rank, layer by layer; returns when compute and network are done.

    FSDP gathers a unit while the one before it computes (at most two are whole at once), frees it
    after use, and in backward issues the next gather before the reduce-scatter of the unit that was
    just finished. DDP and ZeRO-1 reduce in the last micro-batch only, ZeRO-2 in every one.
    """
    shape, layout, software = step.shape, step.layout, step.software
    layer = shape.layer_parameters(layout.tp)
    last = shape.norm_parameters() + (0 if shape.tied else shape.output_parameters(layout.tp))
    units = [("embedding", shape.embedding_parameters(layout.tp), 0.0, 0.0, 0.0)]
    units += [
        (f"layer {i}", layer, step.layer.forward, step.layer.backward, step.activation)
        for i in range(shape.layers)
    ]
    logits = costs.logits_bytes(shape, layout)
    units.append(("logits", last, *step.logits, logits))
    regather = step.reshard and software.regather and layout.recompute == "full"

    for microbatch in range(step.m):
        final = microbatch == step.m - 1
        reduces = final or layout.dp_kind in ("zero2", "fsdp", "fsdp-grad-op", "hybrid")
        held = {}
        if step.sharded:
            held[0] = _gather(step, clock, units[0], 0.0)
        for i, (name, elements, forward, _, kept) in enumerate(units):
            begin = held[i].end if step.sharded else 0.0
            task = clock.add(0, "compute", "forward", f"F{microbatch} {name}", forward, begin)
            clock.allocate(task.end, 0, "activations", kept)
            if step.sharded and i + 1 < len(units):
                held[i + 1] = _gather(step, clock, units[i + 1], task.start)
                if step.reshard:  # the last one is needed again at once and stays
                    _free(step, clock, elements, task.end)
        for i in reversed(range(len(units))):
            name, elements, _, backward, kept = units[i]
            begin = held[i].end if step.sharded else 0.0
            if regather and kept:
                again = step.layer.forward
                task = clock.add(0, "compute", "forward", f"R{microbatch} {name}", again, begin)
                begin = clock.add(
                    0, "network", "communication", f"gather {name}", step.gather(elements), task.end
                ).end
                backward -= again
            task = clock.add(0, "compute", "backward", f"B{microbatch} {name}", backward, begin)
            clock.allocate(task.end, 0, "activations", -kept)
            if step.reshard and i:
                held[i - 1] = _gather(step, clock, units[i - 1], task.start)
            if step.sharded:
                _free(step, clock, elements, task.end)
            if reduces and software.dp_overlap:
                clock.allocate(task.start, 0, "gradients", elements * software.reduce_bytes)
                done = clock.add(
                    0, "network", "communication", f"reduce {name}", step.reduce(elements), task.end
                )
                clock.allocate(done.end, 0, "gradients", -elements * software.reduce_bytes)
    if not software.dp_overlap:
        seconds = step.reduce(sum(unit[1] for unit in units))
        clock.add(0, "network", "communication", "reduce", seconds, clock.free[0, "compute"])
    return max(clock.free[0, "compute"], clock.free.get((0, "network"), 0.0))


def _gather(step: Step, clock: Clock, unit: tuple, ready: float) -> Task:
    name, elements = unit[:2]
    seconds = step.gather(elements)
    task = clock.add(0, "network", "communication", f"gather {name}", seconds, ready)
    clock.allocate(task.start, 0, "gathered", elements * step.software.gather_bytes)
    return task


def _free(step: Step, clock: Clock, elements: int, time: float) -> None:
    clock.allocate(time, 0, "gathered", -elements * step.software.gather_bytes)


# ---- with pipeline: action by action -----------------------------------------------------------


def _play_pipeline(step: Step, clock: Clock, plan: Schedule) -> list[float]:
    """The action lists of all stages; returns when each stage's gradients are reduced.

    FSDP inside a pipeline keeps a chunk's parameters from its first forward to its last backward
    (gathering them for every micro-batch would not pay), and all kinds reduce a chunk after its
    last backward, while the other chunks go on.
    """
    layers = step.shape.stage_layers(plan.virtual_stages)
    last_of = [
        {(a.kind in "BW", a.chunk): i for i, a in enumerate(actions)} for actions in plan.actions
    ]
    seconds = {
        (kind, stage): _action_seconds(step, kind, layers[stage], stage, plan.virtual_stages)
        for kind in {a.kind for actions in plan.actions for a in actions}
        for stage in range(plan.virtual_stages)
    }
    ends: list[dict[Action, float]] = [{} for _ in range(plan.stages)]
    position = [0] * plan.stages
    gathered: dict[tuple[int, int], float] = {}
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(plan.actions):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                stage = plan.stage(rank, action.chunk)
                needs = plan.needs(rank, action)
                if any(needed not in ends[other] for other, needed in needs):
                    break
                # A value from another rank arrives one send later.
                arrivals = [ends[r][a] + (step.send if r != rank else 0) for r, a in needs]
                ready = max([0.0, *arrivals])
                if step.sharded and action.kind == "F":
                    ready = max(ready, _gather_chunk(step, clock, gathered, rank, stage, layers))
                kind = "forward" if action.kind == "F" else "backward"
                busy = seconds[action.kind, stage]
                task = clock.add(rank, "compute", kind, str(action), busy, ready)
                ends[rank][action] = task.end
                kept = step.activation * layers[stage]
                if action.kind in "FBW":
                    sign = 1 if action.kind == "F" else -1
                    clock.allocate(task.end, rank, "activations", sign * kept)
                if last_of[rank][True, action.chunk] == position[rank]:
                    elements = _chunk_parameters(step, stage, layers)
                    clock.add(
                        rank, "network", "communication", f"reduce chunk {action.chunk}",
                        step.reduce(elements), task.end,
                    )  # fmt: skip
                position[rank] += 1
                progress = True
    return [
        max(clock.free[rank, "compute"], clock.free.get((rank, "network"), 0.0))
        for rank in range(plan.stages)
    ]


def _chunk_parameters(step: Step, stage: int, layers: list[int]) -> int:
    return step.shape.rank_parameters(step.layout.tp, len(layers), stage)


def _gather_chunk(step, clock, gathered, rank, stage, layers) -> float:
    if (rank, stage) not in gathered:
        seconds = step.gather(_chunk_parameters(step, stage, layers))
        task = clock.add(rank, "network", "communication", f"gather stage {stage}", seconds)
        gathered[rank, stage] = task.end
    return gathered[rank, stage]


def _action_seconds(step: Step, kind: str, layers: int, stage: int, stages: int) -> float:
    forward, backward = layers * step.layer.forward, layers * step.layer.backward
    weight = layers * step.layer.weight
    if stage == stages - 1:
        forward += step.logits[0]
        backward += step.logits[1]
    return {"F": forward, "B": backward, "I": backward - weight, "W": weight}[kind]


# ---- where the time went -----------------------------------------------------------------------


def _parts(step: Step, clock: Clock, ends: list[float], waits: float) -> dict:
    """Splits the step of the rank that computes longest; the parts add up to the whole.

    Idle between its own tasks, and after its own end until the slowest rank's, is the pipeline's
    bubble (without a pipeline: waiting for the network); between its last backward and its own end
    the reduction of gradients shows.
    """
    layout, total = step.layout, max(ends)
    work = [0.0] * layout.pp
    last = [0.0] * layout.pp
    for task in clock.tasks:
        if task.lane == "compute" and task.kind != "optimizer":
            work[task.rank] += task.end - task.start
            last[task.rank] = max(last[task.rank], task.end)
    rank = work.index(max(work))
    optimizer = sum(t.end - t.start for t in clock.tasks if (t.rank, t.kind) == (rank, "optimizer"))
    layers = step.shape.stage_layers(layout.pp)[rank]
    tp = step.m * layers * (step.layer.forward_comm + step.layer.backward_comm)
    idle = total - work[rank] - optimizer
    data = ends[rank] - last[rank] - optimizer if layout.pp > 1 else idle
    return {
        "compute": work[rank] - tp, "tp_communication": tp, "pp_communication": waits,
        "dp_communication": data, "bubble": idle - data - waits, "optimizer": optimizer,
    }  # fmt: skip
