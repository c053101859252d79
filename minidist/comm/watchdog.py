"""Who waits where: what each rank is doing, told so that one sees which rank is missing.

`snapshot` and `describe` run on a rank; everything they return is plain data that the program which
started the ranks can print, with the source lines that only it may know (cells of a notebook).
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import threading
import time
import traceback

# Frames from here are machinery; the interesting line is the last one that is not.
_MINIDIST = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_COMM = os.path.join(_MINIDIST, "comm") + os.sep
# What runs the user's code on a rank: a function, or a notebook cell.
_RUNNERS = {os.path.join(_COMM, "worker.py"), os.path.join(_MINIDIST, "learn", "cell.py")}
_LIBRARIES = tuple(
    {os.path.abspath(p) + os.sep for p in sysconfig.get_paths().values()} | {_MINIDIST, "<frozen "}
)
# Errors that a rank gets because another one went away or never came.
_CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Application timeout caused pair closure",
    "Socket closed",
    "remote process exited",
    "did not come to this collective",
)
# torch's check of collectives (TORCH_DISTRIBUTED_DEBUG=DETAIL) says on each rank what that rank
# called, correctly, and what another rank called, sometimes wrongly; so only the first is kept.
_MISMATCH = re.compile(
    r"Detected mismatch between collectives on ranks\. Rank (\d+) is running collective: "
    r"CollectiveFingerPrint\(SequenceNumber=\d+(?:, )?OpType=(\w+)"
    r"(?:, TensorShape=(\[[^\]]*\]), TensorDtypes=(\w+))?.*",
    re.DOTALL,
)
_DISAGREE = "the ranks call different collectives, shapes or types here: "
# The same check when a rank has gone: named after torch's inner workings, with a useless time.
_ABSENT = re.compile(r"\[Rank \d+\]: Ranks ([\d, ]+) failed to pass monitoredBarrier in \d+ ms")

Frame = tuple[str, int, str, str]  # file, line, function, source line ("" where unknown)


def is_library(file: str) -> bool:
    """Whether this file is torch's, Python's or minidist's rather than the user's."""
    return file.startswith(_LIBRARIES)


def snapshot() -> dict:
    """What the main thread of this rank is doing, and its last collectives. Plain data."""
    from minidist.comm import ledger

    frame = sys._current_frames().get(threading.main_thread().ident)
    frames = _own(traceback.extract_stack(frame)) if frame is not None else []
    now = time.perf_counter()
    records = [
        {
            "seq": r.seq,
            "op": r.op,
            "group": r.group,
            "group_size": r.group_size,
            "numel": r.numel,
            "dtype": r.dtype,
            "by": r.by,
            "peer": r.peer,
            "site": r.site,
            "age": now - r.issued,
            "done": r.finished is not None,
        }
        for r in list(ledger.last)
    ]
    return {"frames": frames, "collective": collective(frames), "records": records}


def collective(frames: list[Frame]) -> str | None:
    """The communication call that these frames are inside of, by the name the user called."""
    for file, _, function, _ in frames:
        if file == os.path.join(_COMM, "collectives.py") or file.endswith("distributed_c10d.py"):
            if function not in ("wrapper", "__call__"):
                return function
    return None


def describe(error: BaseException) -> dict:
    """An exception with its causes as plain data."""
    chain, seen = [], set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        frames = _own(traceback.extract_tb(current.__traceback__))
        if isinstance(current, SyntaxError):
            frames += [(current.filename or "?", current.lineno or 0, "", current.text or "")]
        link = None
        following = current.__cause__
        if following is not None:
            link = "cause"
        elif not current.__suppress_context__ and current.__context__ is not None:
            following, link = current.__context__, "context"
        text = "".join(traceback.format_exception_only(type(current), current)).rstrip("\n")
        text = _plain(text)
        chain.append({"frames": frames, "text": text, "link": link})
        current = following
    return {
        "type": type(error).__name__,
        "message": _plain(str(error)),
        "chain": chain,
        "consequence": any(_is_consequence(link["text"]) for link in chain),
    }


def _plain(text: str) -> str:
    """An error message of torch's collective checks in words for the person who caused it."""
    text = _ABSENT.sub(r"rank \1 did not come to this collective", text)
    return _MISMATCH.sub(_mismatch, text)


def _mismatch(found: re.Match) -> str:
    rank, op, shape, dtype = found.groups()
    what = f" of shape {shape}, {dtype}" if shape else ""
    return f"{_DISAGREE}rank {rank} calls {op.lower()}{what}"


def _is_consequence(text: str) -> bool:
    return any(mark in text for mark in _CONSEQUENCES)


def _own(stack) -> list[Frame]:
    """Frames from the user's code on: the ranks' own loop in front of it says nothing."""
    frames = [(f.filename, f.lineno or 0, f.name, f.line or "") for f in stack]
    ours = [i for i, f in enumerate(frames) if f[0] in _RUNNERS]
    return frames[ours[-1] + 1 :] if ours else frames


# ---------------------------------------------------------------------------- telling the story


def source(frame: Frame) -> str:
    """The frame's source line; notebook cells are known only where they were typed."""
    return frame[3].strip() or linecache.getline(frame[0], frame[1]).strip()


def user_frame(frames: list[Frame]) -> Frame | None:
    """The innermost line of the user's code, else the innermost of all."""
    for frame in reversed(frames):
        if not is_library(frame[0]):
            return frame
    return frames[-1] if frames else None


def format_frames(frames: list[Frame], shorten: bool = False) -> str:
    """Frames as Python prints them; `shorten` leaves out the inner workings of libraries."""
    lines, hidden = [], 0
    any_user = any(not is_library(f[0]) for f in frames)
    for i, frame in enumerate(frames):
        if shorten and any_user and is_library(frame[0]) and i < len(frames) - 1:
            hidden += 1
            continue
        if hidden:
            lines.append(f"  ... {hidden} more inside libraries")
            hidden = 0
        lines.append(f'  File "{frame[0]}", line {frame[1]}, in {frame[2]}')
        text = source(frame)
        if text:
            lines.append(f"    {text}")
    return "\n".join(lines)


def format_error(error: dict, shorten: bool = False) -> str:
    """The whole chain of exceptions, the causes first, as Python prints it."""
    parts = []
    for link in reversed(error["chain"]):
        if link["link"] == "cause":
            parts.append("The above was the direct cause of:\n")
        elif link["link"] == "context":
            parts.append("While handling the above:\n")
        if link["frames"]:
            parts.append("Traceback (most recent call last):")
            parts.append(format_frames(link["frames"], shorten))
        parts.append(link["text"] + "\n")
    return "\n".join(parts).rstrip("\n")


def raised(error: dict) -> str:
    """One line: what a rank raised, and at which line of the user's code."""
    text = f"raised {error['type']}: {error['message']}"
    if error["message"].startswith(_DISAGREE):  # said once, by the rank reported first
        text = "calls " + error["message"].partition(" calls ")[2]
    frame = user_frame(error["chain"][0]["frames"])
    return text + _at(frame) if frame else text


def _at(frame: Frame) -> str:
    line = source(frame)
    return f" at {frame[0]}:{frame[1]}" + (f": {line}" if line else "")


def doing(snap: dict) -> str:
    """One line: what a rank was doing when it was asked."""
    frames = snap["frames"]
    frame = user_frame(frames)
    if frame is None:
        return "not running anything"
    waiting = [r for r in snap["records"] if not r["done"]]
    op = snap["collective"]
    verb = f"waiting in {op}" if op else f"running {frame[2]}"
    text = verb + _at(frame)
    if waiting:
        r = waiting[-1]
        by = f", for {r['by']}" if r["by"] else ""
        text += (
            f"  [{r['op']} number {r['seq']} of {r['numel']} {r['dtype']}{by}, {r['age']:.1f} s]"
        )
    return text
