"""The file format: timelines as a trace that Chrome and Perfetto open.

One process per rank, one thread per lane; times in microseconds since the earliest timeline began.
The format is the Trace Event Format ("X" spans, "C" counters, "M" metadata).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minidist.measure.timeline import Span, Timeline

_LANES = ("compute", "communication", "wait")  # in this order from the top


def merge(sources: Iterable[Timeline | str | os.PathLike], path: str | os.PathLike) -> None:
    """Write one trace from several timelines, or from files written by `Timeline.save` or `merge`.

    Files keep the clock they were written with: right for ranks of one machine. Two sources of the
    same rank (two runs, say) are kept apart as two processes. ValueError for any other file.
    """
    parts = [
        _read(source) if isinstance(source, (str, os.PathLike)) else _events(source)
        for source in sources
    ]
    origin = min((start for start, _ in parts), default=0.0)
    events: list[dict] = []
    used: set[int] = set()
    for start, part in parts:
        places = {}
        for rank in sorted({event["pid"] for event in part}):
            pid = rank
            while pid in used:
                pid += 1000
            used.add(pid)
            places[rank] = pid
        for event in part:
            event["pid"] = places[event["pid"]]
            if event["ph"] != "M":
                event["ts"] += (start - origin) * 1e6
        events += part
    # Metadata first, then in order of time, enclosing spans before what they enclose.
    events.sort(key=lambda e: (e["ph"] != "M", e.get("ts", 0), -e.get("dur", 0)))
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"clock": "perf_counter", "origin_seconds": origin},
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file)


def _events(timeline: Timeline) -> tuple[float, list[dict]]:
    origin = timeline.started
    lanes = dict.fromkeys((*_LANES, *(s.lane for s in timeline.spans)))
    name = f"rank {timeline.rank}"
    if timeline.dropped:
        name += f" ({timeline.dropped} later spans dropped)"
    events = [
        _meta(timeline.rank, "process_name", name=name),
        _meta(timeline.rank, "process_sort_index", sort_index=timeline.rank),
    ]
    tid = 0
    for lane in lanes:
        for number, row in enumerate(_rows([s for s in timeline.spans if s.lane == lane])):
            title = lane if number == 0 else f"{lane} {number + 1}"
            events.append(_meta(timeline.rank, "thread_name", tid, name=title))
            events.append(_meta(timeline.rank, "thread_sort_index", tid, sort_index=tid))
            for s in row:
                event = {
                    "ph": "X",
                    "name": s.name,
                    "cat": lane,
                    "ts": _micro(s.start, origin),
                    # The difference of rounded ends, so that nested spans end nested.
                    "dur": _micro(s.end, origin) - _micro(s.start, origin),
                    "pid": timeline.rank,
                    "tid": tid,
                }
                if s.args:
                    event["args"] = s.args
                events.append(event)
            tid += 1
    for moment, values in timeline.samples:
        events.append(
            {
                "ph": "C",
                "name": "memory",
                "ts": _micro(moment, origin),
                "pid": timeline.rank,
                "tid": 0,
                "args": values,
            }
        )
    return origin, events


def _micro(seconds: float, origin: float) -> float:
    return round((seconds - origin) * 1e9) / 1e3  # microseconds, to the nanosecond


def _meta(rank: int, kind: str, tid: int = 0, **args) -> dict:
    return {"ph": "M", "name": kind, "pid": rank, "tid": tid, "ts": 0, "args": args}


def _rows(spans: list[Span]) -> list[list[Span]]:
    """Spread spans over as few rows as it takes for those in a row to follow or enclose each other.

    A trace viewer draws one row as a stack of calls. Collectives under way at the same time overlap
    without being nested, which it would draw wrongly or drop.
    """
    rows: list[tuple[list[Span], list[float]]] = [([], [])]  # spans, and the ends of the open ones
    for s in sorted(spans, key=lambda s: (s.start, -s.end)):
        for _, ends in rows:
            while ends and ends[-1] <= s.start:
                ends.pop()
        place = next((row for row in rows if not row[1] or s.end <= row[1][-1]), None)
        if place is None:
            place = ([], [])
            rows.append(place)
        place[0].append(s)
        place[1].append(s.end)
    return [row for row, _ in rows]


def _read(path: str | os.PathLike) -> tuple[float, list[dict]]:
    with open(path, encoding="utf-8") as file:
        document = json.load(file)
    if not isinstance(document, dict) or "origin_seconds" not in document.get("otherData", {}):
        raise ValueError(f"{path} is not a trace written by Timeline.save")
    return document["otherData"]["origin_seconds"], document["traceEvents"]
