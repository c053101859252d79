"""Timing side by side: contestants in one process group, alternating, compared by ratios.

Times on a shared machine drift by tens of percent within minutes, ratios of neighbours do not. So:

* all contestants of a row live in the same ranks and take turns; every second turn goes backwards;
* a turn is a block of at least two steps between barriers: with a barrier after every step, what a
  step leaves running (the gather at the end of a ZeRO step) would be hidden in the barrier;
* a turn's time is that of its slowest rank; a round's is the median of its turns;
* a ratio is taken within a round, and the median over rounds is reported.

Same model, data, dtype and optimizer for all, one thread per rank. Peers take each turn twice: with
the scheduling of our ranks, and with the system's default, as they run where nothing of ours is
(`comm.context.schedule_as`; that freed memory is kept serves all). Every contestant must reach the
loss of the others in the warm-up steps, or it has computed something else and is left out.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minidist.comm import collectives as coll
from minidist.comm.context import schedule_as
from minidist.comm.launch import Ranks
from minidist.measure.meter import measure
from minidist.measure.process import malloced

WARM_UP = 3
PAUSE = 0.01  # seconds before a turn, in which what the last one left running can end


class Skip(Exception):
    """This contestant cannot run here; the text says why."""


@dataclass
class Contestant:
    """`build()` runs once on every rank and returns `step() -> loss or None`.

    `role`: "ours", "peer", or "floor". The floors of a row add up (compute, and the bytes that
    cannot be avoided); `factor` multiplies one of them (a pipeline's bubble).
    """

    name: str
    role: str
    build: Callable[[], Callable[[], Tensor | None]]
    factor: float = 1.0


@dataclass
class Outcome:
    """What one contestant's ranks measured together. Seconds per step, bytes of the worst rank."""

    role: str
    factor: float = 1.0
    rounds: list[list[float]] = field(default_factory=list)  # turns of each round
    cpu: list[float] = field(default_factory=list)  # CPU seconds per step and rank, per turn
    others: list[float] = field(default_factory=list)  # cores busy with other work, per turn
    launched: list[list[float]] = field(
        default_factory=list
    )  # peers' rounds with default scheduling
    peak_bytes: int | None = None
    loss: float | None = None
    skipped: str | None = None

    def of_round(self, r: int) -> float:
        return self.factor * statistics.median(self.rounds[r])

    @property
    def seconds(self) -> float:
        return self.factor * statistics.median([t for turns in self.rounds for t in turns])

    def as_launched(self) -> Outcome:
        return replace(self, rounds=self.launched)


def run(
    make: Callable[[], list[Contestant]],
    world: int,
    *,
    rounds: int = 5,
    steps: int = 2,
    timeout: float = 600,
    trace: str | None = None,
) -> dict[str, Outcome]:
    """Let the contestants that `make()` returns on each rank compete; their outcomes by name.

    On `world` new local ranks, or in the process group that is there. `steps`: per turn, at least
    2. `trace`: file for a Perfetto trace of two of our steps. Raises `RankFailure` if a rank fails.
    """
    if steps < 2:
        raise ValueError(f"a turn has at least 2 steps, got {steps}: see the head of this file")
    if dist.is_initialized():  # torchrun started the ranks
        return compete(make, rounds, steps, trace)
    # What peers print (deprecations, banners) is not shown; a failure is told by RankFailure.
    with Ranks(world, timeout=timeout, on_output=lambda rank, stream, line: None) as ranks:
        return ranks.run(compete, make, rounds, steps, trace)[0]


def compete(make, rounds: int, steps: int, trace: str | None = None) -> dict[str, Outcome]:
    """On every rank: prepare all contestants, let them take turns, put the numbers together."""
    torch.set_num_threads(1)
    entries = {}
    for contestant in make():
        entries[contestant.name] = (Outcome(contestant.role, contestant.factor), contestant)
    ready: dict[str, Callable] = {}
    for name, (outcome, contestant) in entries.items():
        step = _prepare(contestant, outcome)
        if step is not None:
            ready[name] = step
    outcomes = {name: outcome for name, (outcome, _) in entries.items()}
    _check_losses(outcomes, ready)
    names = list(ready)
    for _ in range(rounds):
        for name in names:
            outcomes[name].rounds.append([])
            outcomes[name].launched.append([])
        for order in (names, names[::-1]):
            for name in order:
                outcome = outcomes[name]
                wall, cpu, busy = _turn(ready[name], steps)
                outcome.rounds[-1].append(wall)
                outcome.cpu.append(cpu)
                outcome.others.append(busy)
                if outcome.role == "peer":
                    schedule_as("normal")
                    outcome.launched[-1].append(_turn(ready[name], steps)[0])
                    schedule_as("batch")
    for name in names:
        _combine(outcomes[name])
    ours = [name for name in names if outcomes[name].role == "ours"]
    if ours and trace is not None:
        _trace(ready[ours[0]], trace)
    return outcomes


def _turn(step: Callable, steps: int) -> tuple[float, float, float]:
    """Seconds and own CPU seconds per step, and how many cores of the machine were busy."""
    time.sleep(PAUSE)
    coll.barrier()
    busy, cpu, start = _busy_seconds(), time.process_time(), time.perf_counter()
    for _ in range(steps):
        step()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    wall = time.perf_counter() - start
    return wall / steps, (time.process_time() - cpu) / steps, (_busy_seconds() - busy) / wall


def _prepare(contestant: Contestant, outcome: Outcome) -> Callable | None:
    """Build and warm up; the step, or None on all ranks if it cannot run on one of them."""
    gc.collect()
    before, reason, step = _used_memory(), None, None
    try:
        step = contestant.build()
    except Skip as skip:
        reason = str(skip)
    except Exception as error:  # a peer that this torch version or backend cannot run
        if contestant.role != "peer":
            raise
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    outcome.skipped = next(filter(None, coll.all_gather_object(reason)), None)
    if outcome.skipped:
        return None
    loss = None
    for _ in range(WARM_UP):
        loss = step()
    outcome.loss = None if loss is None else float(loss)
    del loss
    outcome.peak_bytes = _peak_memory(step, before)
    return step


def _trace(step: Callable, path: str) -> None:
    with measure(memory=False) as measured:
        step()
        step()
    measured.timeline.gather(path)


def _used_memory() -> int | None:
    if torch.cuda.is_initialized():
        return torch.cuda.memory_allocated()
    return malloced()


def _peak_memory(step: Callable, before: int | None) -> int | None:
    """Highest memory during one step, less what was in use before the contestant was built.

    Asks the allocator, not our own meter, because the peers' C++ buffers are no tensors of Python.
    """
    if before is None:
        return None
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before
    with _MallocPeak() as sampled:
        step()
    return max(0, sampled.peak - before)


class _MallocPeak(TorchDispatchMode):
    """Asks malloc at the end of every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = malloced()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented  # a DTensor: its local operations pass here again
        out = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, malloced())
        return out


def _check_losses(outcomes: dict[str, Outcome], ready: dict[str, Callable]) -> None:
    """Leave out peers whose loss differs from ours; if nobody agrees with us, we are wrong."""
    everyone = coll.all_gather_object({n: outcomes[n].loss for n in ready if outcomes[n].loss})
    ours = next((n for n in ready if outcomes[n].role == "ours"), None)
    for name in [n for n in ready if outcomes[n].role != "floor" and n != ours]:
        pairs = [(loss[name], loss[ours]) for loss in everyone if name in loss and ours in loss]
        if ours and any(abs(a - b) > 2e-3 * abs(b) for a, b in pairs):
            theirs, mine = pairs[0]
            outcomes[name].skipped = f"its loss is {theirs:.5f} where ours is {mine:.5f}"
            del ready[name]
    if ours is not None:
        outcomes[ours].loss = next((loss[ours] for loss in everyone if ours in loss), None)


def _combine(outcome: Outcome) -> None:
    """Slowest rank of each turn, mean CPU time, worst peak."""
    everyone = coll.all_gather_object(outcome)
    outcome.rounds = _slowest([o.rounds for o in everyone])
    outcome.launched = _slowest([o.launched for o in everyone])
    outcome.cpu = [statistics.mean(turn) for turn in zip(*(o.cpu for o in everyone), strict=True)]
    walls = [turn for turns in outcome.rounds for turn in turns]
    outcome.others = [
        max(0.0, busy - len(everyone) * cpu / wall)
        for busy, cpu, wall in zip(everyone[0].others, outcome.cpu, walls, strict=True)
    ]
    if outcome.peak_bytes is not None:
        outcome.peak_bytes = max(o.peak_bytes for o in everyone)


def _slowest(ranks: list[list[list[float]]]) -> list[list[float]]:
    return [[max(turn) for turn in zip(*turns, strict=True)] for turns in zip(*ranks, strict=True)]


def summarise(name: str, world: int, outcomes: dict[str, Outcome], goal: float | None) -> dict:
    """One row of the report, in the keys of the JSON file. Ratios below 1 are in our favour.

    `ratio_to_best_peer`: with the same scheduling, `ratio_as_launched`: see the head of this file.
    The goals are ratios to torch as its users launch it.
    """
    ran = {n: o for n, o in outcomes.items() if o.rounds}
    variants = {n: o for n, o in ran.items() if o.role == "ours"}
    ours_name = min(variants, key=lambda n: variants[n].seconds, default=None)
    ours = variants.get(ours_name)
    peers = {n: o for n, o in ran.items() if o.role == "peer"}
    launched = {n: o.as_launched() for n, o in peers.items()}
    floors = [o for o in ran.values() if o.role == "floor"]
    best, ratio, spread = _against(ours, peers)
    best_launched, ratio_launched, spread_launched = _against(ours, launched)
    row = {
        "name": name,
        "world": world,
        "ours": ours_name,
        "ours_seconds": ours.seconds if ours else None,
        "variants": {n: o.seconds for n, o in variants.items()},
        "peers": {n: o.seconds for n, o in peers.items()},
        "best_peer": best,
        "ratio_to_best_peer": ratio,
        "ratio_spread": spread,
        "cpu_ratio_to_best_peer": None,
        "peers_as_launched": {n: o.seconds for n, o in launched.items()},
        "best_peer_as_launched": best_launched,
        "ratio_as_launched": ratio_launched,
        "ratio_as_launched_spread": spread_launched,
        "goal": goal,
        "met": None if goal is None or ratio_launched is None else ratio_launched <= goal,
        "floor_seconds": sum(o.seconds for o in floors) if floors else None,
        "floor": {n: o.seconds for n, o in ran.items() if o.role == "floor"},
        "ratio_to_floor": None,
        "ours_peak_bytes": ours.peak_bytes if ours else None,
        "best_peer_peak_bytes": peers[best].peak_bytes if best else None,
        "peer_peak_bytes": {n: o.peak_bytes for n, o in peers.items()},
        "cpu_seconds": {n: statistics.median(o.cpu) for n, o in ran.items()},
        "other_load": statistics.median(t for o in ran.values() for t in o.others) if ran else None,
        "loss": ours.loss if ours else None,
        "skipped": {n: o.skipped for n, o in outcomes.items() if o.skipped},
    }
    if ours and best:
        cpu = [statistics.median(o.cpu) for o in (ours, peers[best])]
        row["cpu_ratio_to_best_peer"] = cpu[0] / cpu[1] if cpu[1] else None
    if ours and floors:
        row["ratio_to_floor"] = statistics.median(
            ours.of_round(r) / sum(o.of_round(r) for o in floors) for r in range(len(ours.rounds))
        )
    return row


def _against(ours: Outcome | None, peers: dict[str, Outcome]) -> tuple:
    """The fastest peer, the median over rounds of the ratio to it, and that ratio's range."""
    best = min(peers, key=lambda n: peers[n].seconds, default=None)
    if ours is None or best is None:
        return best, None, None
    ratios = [ours.of_round(r) / peers[best].of_round(r) for r in range(len(ours.rounds))]
    return best, statistics.median(ratios), [min(ratios), max(ratios)]


def _busy_seconds() -> float:
    """CPU seconds that all programs of this machine have used since boot; 0 where unknown."""
    try:
        with open("/proc/stat", encoding="ascii") as stat:
            ticks = [int(t) for t in stat.readline().split()[1:9]]
    except OSError:
        return 0.0
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # less idle, waiting
