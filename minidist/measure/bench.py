"""Timing side by side: contestants take turns on the same cores, and are compared by ratios.

Times on a shared machine drift by tens of percent within minutes, ratios of neighbours do not. So:

* all contestants of a row take turns on the same cores; every second time the order is reversed;
* a turn is a block of at least two steps between barriers: with a barrier after every step, what a
  step leaves running (the gather at the end of a ZeRO step) would be hidden in the barrier;
* a turn's time is that of its slowest rank; a round's is the median of its turns;
* a ratio is taken within a round, and the median over rounds is reported.

Same model, data, dtype and optimizer for all, one thread per rank. Peers take each turn twice: in
the ranks where we run, which `comm.tuning` has prepared, and in ranks of their own that are as the
system makes them, which is how torch's users launch them. Every contestant must reach the loss of
the others in the warm-up steps, or it has computed something else and is left out.
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
from minidist.comm import worker
from minidist.comm.launch import RankFailure, Ranks
from minidist.comm.tuning import tuned
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
    launched: list[list[float]] = field(default_factory=list)  # peers: rounds as launched
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

    def add(self, turns: list[tuple[float, float, float]]) -> None:
        """One turn, as every rank saw it (see `_turn`)."""
        walls, cpus, busy = zip(*turns, strict=True)
        self.rounds[-1].append(max(walls))
        self.cpu.append(statistics.mean(cpus))
        self.others.append(max(0.0, busy[0] - sum(cpus) / max(walls)))


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

    On `world` new local ranks, and as many more for the peers as launched; or in the process group
    that is there, where peers run only beside us. `steps`: per turn, at least 2. `trace`: file for
    a Perfetto trace of two of our steps. Raises `RankFailure` if a rank fails.
    """
    if steps < 2:
        raise ValueError(f"a turn has at least 2 steps, got {steps}: see the head of this file")
    if dist.is_initialized():  # torchrun started the ranks
        return _compete(_call_here, None, make, rounds, steps, trace)
    # What peers print (deprecations, banners) is not shown; a failure is told by RankFailure.
    quiet = {"timeout": timeout, "on_output": lambda rank, stream, line: None}
    with Ranks(world, **quiet) as ours, Ranks(world, tune=False, **quiet) as launched:
        end = time.monotonic() + timeout

        def in_time(ranks: Ranks) -> Callable:
            def call(*function_and_arguments) -> list:
                left = end - time.monotonic()
                if left <= 0:
                    raise RankFailure(f"not finished after {timeout:g} s", 0, "", {})
                return ranks.run(*function_and_arguments, timeout=left)

            return call

        return _compete(in_time(ours), in_time(launched), make, rounds, steps, trace)


def _call_here(function: Callable, *args) -> list:
    return coll.all_gather_object(function(*args))


def _compete(call, launched, make, rounds: int, steps: int, trace: str | None) -> dict:
    """`call(function, *args)` runs it on every rank and returns their answers, `launched` the same
    in the ranks for peers as launched, if there are any."""
    outcomes = _merged(call(_prepare_all, make, ("floor", "ours", "peer")))
    apart = _merged(launched(_prepare_all, make, ("peer",))) if launched else {}
    for name, outcome in apart.items():
        here = outcomes[name]
        here.skipped = here.skipped or outcome.skipped or _differs(outcome.loss, here.loss)
    names = [name for name, outcome in outcomes.items() if not outcome.skipped]

    def beside_us(name: str) -> None:
        outcomes[name].add(call(_turn, name, steps))

    def as_launched(name: str) -> None:
        if name in apart:
            turns = launched(_turn, name, steps)
            outcomes[name].launched[-1].append(max(wall for wall, _, _ in turns))

    for _ in range(rounds):
        for name in names:
            outcomes[name].rounds.append([])
            if name in apart:
                outcomes[name].launched.append([])
        for name in names:
            beside_us(name)
            as_launched(name)
        for name in names[::-1]:
            as_launched(name)
            beside_us(name)
    if not launched and not tuned():  # on NCCL there is nothing to prepare: all ranks are alike
        for name in names:
            outcomes[name].launched = outcomes[name].rounds
    ours = [name for name in names if outcomes[name].role == "ours"]
    if ours and trace is not None:
        call(_trace, ours[0], trace)
    for ranks in filter(None, (call, launched)):
        ranks(_forget)
    return outcomes


def _merged(ranks: list[dict[str, Outcome]]) -> dict[str, Outcome]:
    """One rank's outcomes, with the worst peak and the first loss that any rank has."""
    for name, outcome in ranks[0].items():
        everyone = [outcomes[name] for outcomes in ranks]
        peaks = [o.peak_bytes for o in everyone if o.peak_bytes is not None]
        outcome.peak_bytes = max(peaks, default=None)
        outcome.loss = next((o.loss for o in everyone if o.loss is not None), None)
    return ranks[0]


# --- on the ranks -------------------------------------------------------------------------------


def _prepare_all(make: Callable[[], list[Contestant]], roles: tuple) -> dict[str, Outcome]:
    """Build and warm up everybody; those that cannot take part are marked as skipped."""
    torch.set_num_threads(1)
    outcomes, ready = {}, worker.state.setdefault("bench", {})
    ready.clear()
    for contestant in make():
        if contestant.role in roles:
            outcome = outcomes[contestant.name] = Outcome(contestant.role, contestant.factor)
            step = _prepare(contestant, outcome)
            if step is not None:
                ready[contestant.name] = step
    _check_losses(outcomes)
    for name in [name for name in ready if outcomes[name].skipped]:
        del ready[name]
    return outcomes


def _turn(name: str, steps: int) -> tuple[float, float, float]:
    """Seconds and own CPU seconds per step, and how many cores of the machine were busy."""
    step = worker.state["bench"][name]
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


def _forget() -> None:
    del worker.state["bench"]


def _trace(name: str, path: str) -> None:
    step = worker.state["bench"][name]
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


def _check_losses(outcomes: dict[str, Outcome]) -> None:
    """Leave out peers whose loss differs from ours; if nobody agrees with us, we are wrong."""
    everyone = coll.all_gather_object({n: o.loss for n, o in outcomes.items()})
    ours = next((n for n, o in outcomes.items() if o.role == "ours"), None)
    for name, outcome in outcomes.items():
        if ours and outcome.role != "floor":
            differences = [_differs(losses[name], losses[ours]) for losses in everyone]
            outcome.skipped = outcome.skipped or next(filter(None, differences), None)


def _differs(loss: float | None, ours: float | None) -> str | None:
    if loss is None or ours is None or abs(loss - ours) <= 2e-3 * abs(ours):
        return None
    return f"its loss is {loss:.5f} where ours is {ours:.5f}"


# --- the report ---------------------------------------------------------------------------------


def summarise(name: str, world: int, outcomes: dict[str, Outcome], goal: float | None) -> dict:
    """One row of the report, in the keys of the JSON file. Ratios below 1 are in our favour.

    `ratio_to_best_peer`: beside us, `ratio_as_launched`: in ranks of its own, see the head of this
    file. The goals are ratios to torch as its users launch it.
    """
    ran = {n: o for n, o in outcomes.items() if o.rounds}
    variants = {n: o for n, o in ran.items() if o.role == "ours"}
    ours_name = min(variants, key=lambda n: variants[n].seconds, default=None)
    ours = variants.get(ours_name)
    peers = {n: o for n, o in ran.items() if o.role == "peer"}
    launched = {n: o.as_launched() for n, o in peers.items() if o.launched}
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
