"""Pipeline schedules as plain data: who computes what, in which order (document 3.2).

A schedule is one list of actions per rank. Nothing here touches torch or a process: the executor
(pipeline.py), the simulator, the pictures and the tests all read the same lists. Four ranks, 1F1B,
six micro-batches (rank down, time right; 0 is a forward, 00- its backward)::

    rank 0  0 1 2 3 . . . . . . 00- 4 11- 5 22- . 33- . 44- . 55-
    rank 1  . 0 1 2 . . . . 00- 3 11- 4 22- 5 33- . 44- . 55- . .
    rank 2  . . 0 1 . . 00- 2 11- 3 22- 4 33- 5 44- . 55- . . . .
    rank 3  . . . 0 00- 1 11- 2 22- 3 33- 4 44- 5 55- . . . . . .

Words: `stages` is the number p of pipeline ranks; a rank may hold several `chunks` v of the model,
so that there are p*v *virtual stages*. Actions: F forward, B backward; zero-bubble schedules cut B
into I (gradient of the input, which the previous stage waits for) and W (gradient of the weights,
which nobody waits for, so that it can fill the bubble).

Papers: GPipe (arXiv:1811.06965), 1F1B (PipeDream-Flush, arXiv:2006.09503), interleaved
(Megatron-LM, arXiv:2104.04473), ZB-H1 and ZB-V (arXiv:2401.10241, arXiv:2405.15362).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

NAMES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")


class ScheduleError(ValueError):
    """The lists of a schedule are incomplete, out of order, deadlock, or hold too much."""


class Action(NamedTuple):
    """One computation. `kind`: F, B, or I and W. `chunk`: which of this rank's model parts."""

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self):
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


class Transfer(NamedTuple):
    """A message between two ranks: an activation to the next virtual stage or a gradient back.

    `stage` is the virtual stage that receives it.
    """

    what: str
    microbatch: int
    stage: int
    source: int
    target: int

    def __str__(self):
        return (
            f"{self.what} {self.microbatch} for stage {self.stage} ({self.source} -> {self.target})"
        )


class Slot(NamedTuple):
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What `Schedule.simulate` found. Times in the unit of its arguments."""

    slots: list[list[Slot]]  # [rank]: start and end of every action, in order
    makespan: float  # from the start of the step until the last rank is done
    ideal: float  # compute of the busiest rank: the time without any bubble
    in_flight: list[
        int
    ]  # [rank]: largest number of forwards not yet given back, see Schedule.in_flight

    @property
    def bubble(self) -> float:
        """Fraction of IDEAL time, (makespan - ideal) / ideal: the (p-1)/m of Megatron-LM."""
        return (self.makespan - self.ideal) / self.ideal

    @property
    def bubble_of_total(self) -> float:
        """Fraction of TOTAL time, (makespan - ideal) / makespan: the (p-1)/(m+p-1) of GPipe."""
        return (self.makespan - self.ideal) / self.makespan

    @property
    def stalls(self) -> list[float]:
        """[rank]: idle time between its own first and last action. ZB-V reaches 0 on every rank;
        its makespan still shows p-1 slots, because the ranks start one after the other."""
        return [
            slots[-1].end - slots[0].start - sum(s.end - s.start for s in slots)
            for slots in self.slots
        ]


@dataclass(frozen=True)
class Schedule:
    """`actions[rank]` is what each rank computes, in order. Build one with `schedule(...)`, or by
    hand: `Pipeline(schedule=...)` runs any Schedule that `validate()` accepts."""

    name: str
    stages: int
    microbatches: int
    chunks: int
    actions: list[list[Action]] = field(repr=False)
    placement: str = (
        "loop"  # loop: chunk c of rank r is virtual stage c*p + r; v: there and back again
    )

    @property
    def virtual_stages(self) -> int:
        return self.stages * self.chunks

    @property
    def splits_backward(self) -> bool:
        """Whether backward is cut into I and W."""
        return any(action.kind == "I" for action in self.actions[0])

    def stage(self, rank: int, chunk: int = 0) -> int:
        """The virtual stage that `rank` holds as its `chunk`."""
        back = self.placement == "v" and chunk % 2
        return chunk * self.stages + (self.stages - 1 - rank if back else rank)

    def owner(self, stage: int) -> tuple[int, int]:
        """(rank, chunk) of a virtual stage."""
        chunk, rank = divmod(stage, self.stages)
        back = self.placement == "v" and chunk % 2
        return (self.stages - 1 - rank if back else rank), chunk

    @property
    def in_flight(self) -> list[int]:
        """[rank]: peak number of (micro-batch, chunk) pairs between their F and their B (or W).

        With v chunks each pair holds 1/v of the rank's layers: divide by `chunks` to compare.
        """
        peaks = []
        for actions in self.actions:
            live = peak = 0
            for action in actions:
                live += {"F": 1, "I": 0}.get(action.kind, -1)
                peak = max(peak, live)
            peaks.append(peak)
        return peaks

    def needs(self, rank: int, action: Action) -> list[tuple[int, Action]]:
        """The (rank, action) pairs that must be finished before this one may start."""
        kind, microbatch, chunk = action
        stage = self.stage(rank, chunk)
        if kind == "W":
            return [(rank, Action("I", microbatch, chunk))]
        needed = [] if kind == "F" else [(rank, Action("F", microbatch, chunk))]
        neighbour = stage - 1 if kind == "F" else stage + 1
        if 0 <= neighbour < self.virtual_stages:
            other, other_chunk = self.owner(neighbour)
            needed.append((other, Action(kind, microbatch, other_chunk)))
        return needed

    def incoming(self, rank: int, action: Action) -> Transfer | None:
        """The message this action waits for; None if its input is already on this rank."""
        stage = self.stage(rank, action.chunk)
        return self._transfer(action, stage - (1 if action.kind == "F" else -1), stage)

    def outgoing(self, rank: int, action: Action) -> Transfer | None:
        """The message this action produces; None if its result stays on this rank."""
        stage = self.stage(rank, action.chunk)
        return self._transfer(action, stage, stage + (1 if action.kind == "F" else -1))

    def _transfer(self, action: Action, source_stage: int, target_stage: int) -> Transfer | None:
        ends = source_stage, target_stage
        if action.kind == "W" or not all(0 <= stage < self.virtual_stages for stage in ends):
            return None
        source, target = (self.owner(stage)[0] for stage in ends)
        what = "activation" if action.kind == "F" else "gradient"
        if source == target:
            return None
        return Transfer(what, action.microbatch, target_stage, source, target)

    # ------------------------------------------------------------------ time
    def simulate(self, f=1, b=2, w=None, comm=0) -> Timeline:
        """Run the lists on a clock: an action starts when its rank is free and its input there.

        f, b: time of one micro-batch's forward and whole backward through ALL chunks of a rank; or
        a sequence with the time of each virtual stage. w: the weight-gradient part of b (default:
        half of it; only matters when backward is split, I then takes b - w). comm: delay of a
        message between two ranks; it keeps nobody busy. Raises ScheduleError when actions wait for
        each other in a circle.
        """
        per_stage = [
            list(t) if isinstance(t, Sequence) else [t / self.chunks] * self.virtual_stages
            for t in (f, b, w if w is not None else 0)
        ]
        if any(len(times) != self.virtual_stages for times in per_stage):
            raise ValueError(
                f"f, b and w need one time for each of {self.virtual_stages} virtual stages"
            )
        forward, backward, weight = per_stage
        if w is None:
            weight = [t / 2 for t in backward]
        cost = {
            "F": forward,
            "B": backward,
            "I": [t - part for t, part in zip(backward, weight, strict=True)],
            "W": weight,
        }
        end: list[dict[Action, float]] = [{} for _ in range(self.stages)]
        slots: list[list[Slot]] = [[] for _ in range(self.stages)]
        progress = True
        while progress:
            progress = False
            for rank, todo in enumerate(self.actions):
                while len(slots[rank]) < len(todo):
                    action = todo[len(slots[rank])]
                    needed = self.needs(rank, action)
                    if any(other_action not in end[other] for other, other_action in needed):
                        break
                    start = max(
                        [slots[rank][-1].end if slots[rank] else 0]
                        + [end[other][a] + (comm if other != rank else 0) for other, a in needed]
                    )
                    end[rank][action] = start + cost[action.kind][self.stage(rank, action.chunk)]
                    slots[rank].append(Slot(action, start, end[rank][action]))
                    progress = True
        stuck = [
            f"rank {rank} before {todo[len(slots[rank])]}"
            for rank, todo in enumerate(self.actions)
            if len(slots[rank]) < len(todo)
        ]
        if stuck:
            raise ScheduleError(f"{self.name}: actions wait for each other: {', '.join(stuck)}")
        return Timeline(
            slots=slots,
            makespan=max(slot.end for row in slots for slot in row),
            ideal=max(sum(slot.end - slot.start for slot in row) for row in slots),
            in_flight=self.in_flight,
        )

    # ------------------------------------------------------------ validation
    def validate(self) -> Schedule:
        """Check everything that can be known without running; returns self or raises ScheduleError.

        Complete (each action once, on its rank), in order (B after its F and after the next stage's
        backward, W after its I), free of deadlock (messages.rendezvous), and never more in flight
        than the published bound of its name.
        """
        from minidist.parallel.messages import programs, rendezvous

        for rank, actions in enumerate(self.actions):
            where = f"{self.name}, rank {rank}"
            wanted = {
                Action(kind, microbatch, chunk)
                for kind in ("FIW" if self.splits_backward else "FB")
                for microbatch in range(self.microbatches)
                for chunk in range(self.chunks)
            }
            if missing := sorted(wanted - set(actions)):
                raise ScheduleError(f"{where}: missing {', '.join(map(str, missing))}")
            if len(actions) != len(wanted):
                extra = sorted({a for a in actions if a not in wanted or actions.count(a) > 1})
                raise ScheduleError(f"{where}: unknown or repeated {', '.join(map(str, extra))}")
            position = {action: i for i, action in enumerate(actions)}
            for action in actions:
                for other, needed in self.needs(rank, action):
                    if other == rank and position[needed] > position[action]:
                        raise ScheduleError(f"{where}: {action} comes before {needed}")
        self.simulate()  # the order across ranks: raises if actions wait for each other in a circle
        rendezvous(self, programs(self, ahead=0), ordered=True, blocking_receives=True)
        rendezvous(self, programs(self, ahead=3), ordered=False)
        for rank, (held, bound) in enumerate(zip(self.in_flight, self._bounds(), strict=True)):
            if held > bound:
                raise ScheduleError(f"{self.name}, rank {rank}: {held} in flight, bound is {bound}")
        return self

    def _bounds(self) -> list[int]:
        p, m, v = self.stages, self.microbatches, self.chunks
        bound = {
            "naive": lambda rank: v,
            "1f1b": lambda rank: min(m, p - rank),
            "interleaved": lambda rank: min(m * v, _interleaved_warmup(p, v, rank) + 1),
            "zb-h1": lambda rank: min(m, p),
            "zb-v": lambda rank: min(2 * m, 2 * p),
        }.get(self.name, lambda rank: m * v)
        return [bound(rank) for rank in range(p)]


# -------------------------------------------------------------------- the schedules themselves
def schedule(name: str, stages: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """The action lists of `stages` pipeline ranks for one step of `microbatches` micro-batches.

    name         bubble / ideal time        peak in flight on rank r, in micro-batches
    naive        p - 1                      1: forward, backward, then the next micro-batch
    gpipe        (p-1)/m                    m: all forwards, then all backwards
    1f1b         (p-1)/m                    min(m, p-r)
    interleaved  (p-1)/(v m)                2(p-r-1) + (v-1)p + 1 chunks, each 1/v of the layers
    zb-h1        (p-1)/(3m) (F=I=W, m>=p)   min(m, p) on every rank: the maximum of 1f1b
    zb-v         no stalls (F=I=W, m>=2p-1) 2p half-size chunks: the maximum of 1f1b

    chunks: model parts per rank. naive and gpipe take any number (gpipe becomes breadth-first),
    interleaved too (1 is plain 1f1b; default 2), zb-v takes 2, the others 1. interleaved needs
    microbatches to be a multiple of stages, as in Megatron-LM; the others take any. Raises
    ValueError that names the sizes.
    """
    if name not in NAMES:
        raise ValueError(f"schedule {name!r} is unknown; choose from {', '.join(NAMES)}")
    if chunks is None:
        chunks = 2 if name in ("interleaved", "zb-v") else 1
    for label, size in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{label} must be a positive whole number, not {size!r}")
    if name in ("1f1b", "zb-h1") and chunks != 1:
        raise ValueError(f"{name} has one chunk per rank, not {chunks}; use interleaved for more")
    if name == "zb-v" and chunks != 2:
        raise ValueError(f"zb-v has exactly 2 chunks per rank (down and up the V), not {chunks}")
    if name == "interleaved" and microbatches % stages:
        raise ValueError(
            f"interleaved needs microbatches to be a multiple of stages: {microbatches} is not a "
            f"multiple of {stages}"
        )
    build = {
        "naive": _naive,
        "gpipe": _gpipe,
        "1f1b": _one_forward_one_backward,
        "interleaved": _interleaved if chunks > 1 else _one_forward_one_backward,
        "zb-h1": _zero_bubble_h1,
        "zb-v": _zero_bubble_v,
    }[name]
    actions = [build(stages, microbatches, chunks, rank) for rank in range(stages)]
    placement = "v" if name == "zb-v" else "loop"
    return Schedule(name, stages, microbatches, chunks, actions, placement)


def _naive(p, m, v, rank):
    order = []
    for microbatch in range(m):
        order += [Action("F", microbatch, chunk) for chunk in range(v)]
        order += [Action("B", microbatch, chunk) for chunk in reversed(range(v))]
    return order


def _gpipe(p, m, v, rank):
    forward = [Action("F", microbatch, chunk) for chunk in range(v) for microbatch in range(m)]
    backward = [
        Action("B", microbatch, chunk) for chunk in reversed(range(v)) for microbatch in range(m)
    ]
    return forward + backward


def _alternate(forward, backward, warmup):
    """`warmup` forwards, then a forward and a backward in turn, then the remaining backwards."""
    order = list(forward[:warmup])
    for i, action in enumerate(backward):
        order += forward[warmup + i : warmup + i + 1]
        order.append(action)
    return order


def _one_forward_one_backward(p, m, v, rank):
    # p-rank-1 forwards fill the pipeline behind this rank: the first backward comes back just then.
    forward = [Action("F", microbatch) for microbatch in range(m)]
    return _alternate(forward, [Action("B", microbatch) for microbatch in range(m)], p - rank - 1)


def _interleaved_warmup(p, v, rank):
    # Twice the distance to the last rank, because the ring runs v times, plus the first v-1 rounds.
    return 2 * (p - rank - 1) + (v - 1) * p if v > 1 else p - rank - 1


def _interleaved(p, m, v, rank):
    # Micro-batches go in rounds of p: p of them through chunk 0, the same p through chunk 1, ...
    def turn(i, kind):
        chunk = i // p % v
        return Action(kind, i // (p * v) * p + i % p, chunk if kind == "F" else v - 1 - chunk)

    forward = [turn(i, "F") for i in range(m * v)]
    backward = [turn(i, "B") for i in range(m * v)]
    return _alternate(forward, backward, _interleaved_warmup(p, v, rank))


def _zero_bubble_h1(p, m, v, rank):
    # Like 1f1b, but W trails I by `rank` micro-batches: the last ranks save their W for the end,
    # when 1f1b would idle. Then every rank holds p micro-batches, as rank 0 of 1f1b does (2.1).
    warmup = min(m, p - rank)
    order = [Action("F", microbatch) for microbatch in range(warmup)]
    for microbatch in range(m):
        order.append(Action("I", microbatch))
        if microbatch >= rank:
            order.append(Action("W", microbatch - rank))
        if warmup + microbatch < m:
            order.append(Action("F", warmup + microbatch))
    return order + [Action("W", microbatch) for microbatch in range(max(0, m - rank), m)]


def _zero_bubble_v(p, m, v, rank):
    # Rank 0 holds the first and the last virtual stage: its first backward needs no way back.
    order: list[Action] = []
    used = dict.fromkeys(("F0", "F1", "I0", "I1", "W0", "W1"), 0)

    def take(*names):
        for kind_chunk in names:
            if used[kind_chunk] < m:
                order.append(Action(kind_chunk[0], used[kind_chunk], int(kind_chunk[1])))
                used[kind_chunk] += 1

    take(*["F0"] * (2 * (p - rank) - 1))  # down the V and back up to here
    take(*["F1", "F0"] * rank)
    take(*["F1", "I1", "W1"] * (p - rank))  # the gradient comes down again
    while used["F0"] < m or used["F1"] < m:
        take("F0", "I0", "W0", "F1", "I1", "W1")
    take(*["I0", "I1"] * rank)  # W saved up for the end, as in zb-h1
    take(*["I0", "W0"] * (p - rank))
    take(*["W1"] * m, *["W0"] * m)
    return order
