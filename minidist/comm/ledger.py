"""The ledger: one record for every collective or message, with the bytes this rank really sent.

Three readers use it. `measure` subscribes and adds up traffic and draws the timeline; the watchdog
looks at `last` to say who waits where; tests compare `sent_bytes` with the formulas and with the
operating system's own counters.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


@dataclass(slots=True)
class Record:
    """One collective or message as seen by this rank. Times are `time.perf_counter()` seconds."""

    seq: int  # counts per group (messages: per peer); the first difference tells where ranks parted
    op: str  # all_reduce, reduce_scatter, all_gather, broadcast, send, recv, ...
    group: str  # name of the process group
    group_size: int
    numel: int  # elements of the whole tensor the operation is about
    dtype: str
    payload_bytes: int  # numel x element size
    sent_bytes: int  # what this rank puts on the wire with the algorithm actually used
    by: str  # who asked, for example "ddp bucket 3"
    site: tuple[str, int, str]  # file, line, function of the caller outside comm/
    issued: float
    finished: float | None = None  # None while under way
    waited: float = 0.0  # seconds the calling thread stood still in wait()
    peer: int | None = None  # the other rank of a message
    tag: int | None = None

    def __str__(self) -> str:
        file, line, function = self.site
        state = "done" if self.finished is not None else "under way"
        to = f" with rank {self.peer}" if self.peer is not None else ""
        return (
            f"#{self.seq} {self.op}{to} of {self.numel} {self.dtype} in group {self.group} "
            f"({state}, {self.by or 'user'}, {os.path.basename(file)}:{line} {function})"
        )


# What the watchdog shows. Bounded, or a long run would keep every record alive.
last: deque[Record] = deque(maxlen=256)
_subscribers: list[Callable[[Record], None]] = []
_count: defaultdict[str, int] = defaultdict(int)


def subscribe(callback: Callable[[Record], None]) -> None:
    """Call `callback(record)` each time an operation finishes on this rank."""
    _subscribers.append(callback)


def unsubscribe(callback: Callable[[Record], None]) -> None:
    """Stop calling `callback`; unknown callbacks are ignored."""
    if callback in _subscribers:
        _subscribers.remove(callback)


def reset() -> None:
    """Forget all records, counts and subscribers (a fresh process group starts from zero)."""
    last.clear()
    _count.clear()
    _subscribers.clear()


def open_record(
    op: str,
    group: str,
    group_size: int,
    numel: int,
    dtype: str,
    payload_bytes: int,
    sent_bytes: int,
    by: str,
    peer: int | None = None,
    tag: int | None = None,
) -> Record:
    """Write down that an operation starts now. `close_record` completes it."""
    # Messages are counted apart, for each peer: how many a rank sends is its own affair, and would
    # hide where the collectives of two ranks part.
    key = group if peer is None else f"{group} {op} {peer}"
    seq = _count[key]
    _count[key] = seq + 1
    record = Record(
        seq, op, group, group_size, numel, dtype, payload_bytes, sent_bytes, by,
        _call_site(), time.perf_counter(), peer=peer, tag=tag,
    )  # fmt: skip
    last.append(record)
    return record


def close_record(record: Record, wait_started: float | None = None) -> None:
    """The operation is complete on this rank; `wait_started` is when the caller began to wait."""
    if record.finished is not None:
        return
    record.finished = time.perf_counter()
    if wait_started is not None:
        record.waited = record.finished - wait_started
    for callback in _subscribers:
        callback(record)


def _call_site() -> tuple[str, int, str]:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
