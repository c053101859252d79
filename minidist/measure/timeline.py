"""What happened when, on this rank: spans that open as a Chrome or Perfetto trace.

    lane "compute"         forward and backward of each module, optimizer steps, `span(...)`
    lane "communication"   each collective or message from its start to its end
    lane "wait"            the part of it during which the calling thread stood still

Communication under compute is hidden, communication under a wait is exposed; `overlap()` says how
much of each. Open the file at https://ui.perfetto.dev or chrome://tracing.

Times are `time.perf_counter()` seconds, on Linux one clock for all processes of a machine; ranks on
several machines are brought to rank 0's clock when their timelines are gathered. On CUDA they are
the host's times: a kernel runs later than its launch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import NamedTuple

from minidist.comm import collectives, ledger
from minidist.measure import clock, registry, trace

_MAX_SPANS = 1_000_000  # about 200 MB; what comes after is dropped and counted


class Span(NamedTuple):
    """One thing that took time. `start` and `end` in seconds on the rank's clock."""

    name: str
    lane: str
    start: float
    end: float
    args: dict | None = None


class _NoSpan:
    __slots__ = ()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return None


class _OpenSpan:
    __slots__ = ("_lane", "_name", "_start")

    def __init__(self, name: str, lane: str):
        self._name, self._lane = name, lane

    def __enter__(self):
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exception):
        end = time.perf_counter()
        for timeline in here():
            timeline.add(self._name, self._lane, self._start, end)


_NO_SPAN = _NoSpan()


def span(name: str, lane: str = "compute"):
    """`with span("forward"):` puts the block into the timeline. Without a measurement it does
    nothing, in a fifth of a microsecond."""
    return _OpenSpan(name, lane) if registry.measurements else _NO_SPAN


def here() -> list[Timeline]:
    """The timelines that an event of the calling thread belongs to."""
    return [m.timeline for m in registry.here() if m.timeline is not None]


class Timeline:
    """The spans of one rank. `save` writes a trace, `gather` and `trace.merge` join ranks."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.spans: list[Span] = []
        self.samples: list[tuple[float, dict[str, int]]] = []  # time, bytes by kind
        self.dropped = 0
        self.started = time.perf_counter()
        self._memory = None

    def start(self, rank: int, memory=None) -> None:
        """The measurement begins. With `memory`, every compute span ends with a sample of it."""
        self.rank, self.started, self._memory = rank, time.perf_counter(), memory

    def stop(self) -> None:
        self._memory = None

    def add(self, name: str, lane: str, start: float, end: float, args: dict | None = None) -> None:
        """Put one finished span in, times from `time.perf_counter()`."""
        if len(self.spans) >= _MAX_SPANS:
            self.dropped += 1
            return
        self.spans.append(Span(name, lane, start, end, args))
        if self._memory is not None and lane == "compute":
            self.samples.append((end, self._memory.current))

    def add_record(self, record: ledger.Record) -> None:
        """A collective or message: its span, and the wait for it."""
        name = f"{record.op} ({record.by})" if record.by else record.op
        args = {
            "payload bytes": record.payload_bytes,
            "sent bytes": record.sent_bytes,
            "group": record.group,
            "group size": record.group_size,
            "number": record.seq,
            "called at": f"{record.site[0]}:{record.site[1]} {record.site[2]}",
        }
        if record.peer is not None:
            args["peer"] = record.peer
        self.add(name, "communication", record.issued, record.finished, args)
        if record.waited > 0:
            begin = max(record.issued, record.finished - record.waited)
            self.add(f"wait for {name}", "wait", begin, record.finished)

    def overlap(self) -> dict[str, float]:
        """How much communication was hidden, in seconds.

        `communication`: time during which at least one operation was under way. It is the sum of
        `exposed`: the calling thread stood still for it; `hidden`: the thread computed meanwhile;
        `neither`: it did something that no span covers. An asynchronous operation that nobody looks
        at counts as under way until its `wait()`, so `hidden` is an upper bound.
        """
        busy = _union((s.start, s.end) for s in self.spans if s.lane == "communication")
        waits = _union((s.start, s.end) for s in self.spans if s.lane == "wait")
        others = _union(
            (s.start, s.end) for s in self.spans if s.lane not in ("communication", "wait")
        )
        communication = _length(busy)
        exposed = _length(_intersection(busy, waits))
        covered = _length(_intersection(busy, _union([*waits, *others])))
        return {
            "communication": communication,
            "exposed": exposed,
            "hidden": covered - exposed,
            "neither": communication - covered,
        }

    def shifted(self, seconds: float) -> Timeline:
        """The same spans on another clock."""
        other = Timeline(self.rank)
        other.spans = [s._replace(start=s.start + seconds, end=s.end + seconds) for s in self.spans]
        other.samples = [(moment + seconds, values) for moment, values in self.samples]
        other.dropped, other.started = self.dropped, self.started + seconds
        return other

    def save(self, path: str | os.PathLike) -> None:
        """Write this rank's trace (JSON)."""
        trace.merge([self], path)

    def gather(self, path: str | os.PathLike | None = None, group=None) -> list[Timeline] | None:
        """Bring the timelines of all ranks of the group to rank 0 of it, on rank 0's clock.

        Every rank must call it. Rank 0 gets the list and writes one trace with all ranks to `path`
        if given; the others get None.
        """
        shift = clock.difference(group)
        everyone = collectives.all_gather_object(self.shifted(shift), group, by="timeline")
        if collectives.rank(group) != 0:
            return None
        if path is not None:
            trace.merge(everyone, path)
        return everyone


# --- intervals ----------------------------------------------------------------------------------


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _intersection(a: list[tuple[float, float]], b: list[tuple[float, float]]):
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(intervals: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)
