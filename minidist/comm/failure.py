"""Telling what went wrong on several ranks: the first cause, and what all the others were doing."""

from __future__ import annotations

import os
import re
import signal
import sysconfig

from minidist.comm import watchdog
from minidist.comm.watchdog import Frame, source

# Code from here is machinery: the interesting line is the last one that is not.
_LIBRARIES = (
    *(os.path.abspath(sysconfig.get_paths()[p]) + os.sep for p in ("stdlib", "purelib", "platlib")),
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    "<frozen ",
)
# What torch says with debug=True; sorted by rank it is the same on both of them.
_MISMATCH = re.compile(
    r"Rank (\d+) is running collective: CollectiveFingerPrint\(SequenceNumber=\d+(?:, )?"
    r"OpType=(\w+)(?:, TensorShape=\[([^]]*)\], TensorDtypes=(\w+))?"
)
_LAST_WORDS = 15  # lines on stderr before the end of a rank that are shown
_MOST_FRAMES = 20  # of each end of a very deep stack
INTERRUPTED = "interrupted"


class _Story:
    """`rank`: the one to look at first. `traceback`: its traceback, or where it stood.
    `states`: for every rank, in words, what it had done or was doing."""

    def __init__(self, message: str, rank: int, traceback: str, states: dict[int, str]):
        super().__init__(message)
        self.rank, self.traceback, self.states = rank, traceback, states

    def __reduce__(self):
        return type(self), (str(self), self.rank, self.traceback, self.states)

    def _render_traceback_(self) -> list[str]:
        # IPython shows this instead of the stack of the program that only waited.
        return [f"{type(self).__name__}: {line}" if i == 0 else line
                for i, line in enumerate(str(self).splitlines())]  # fmt: skip


class RankFailure(_Story, RuntimeError):
    """A rank raised, died, or did not finish in time. `str()` tells the story.

    `rank`: the rank that failed first, or is missing. `traceback`: its traceback, or its stack.
    `states`: for every rank, in words, what it had done or was doing.
    """


class RanksInterrupted(_Story, KeyboardInterrupt):
    """Ctrl-C: the ranks were ended; the same attributes as `RankFailure` say where they were."""


def failed(
    errors: dict[int, dict], snaps: dict[int, dict], silent: dict[int, str], n: int
) -> RankFailure:
    """A rank raised or died. `errors` in order of arrival; `snaps` of all ranks that answer, and
    why the others are `silent`."""
    first = _first_cause(errors)
    cause = errors[first]
    same = [r for r in errors if _plain(errors[r]["text"]) == _plain(cause["text"])]
    said = states(errors, snaps, silent, n)
    lines = [f"rank {first} {said[first]}"]
    if any(link["frames"] for link in cause["chain"]):
        lines = [f"rank {first} {_first_line(said[first])}", format_error(cause, shorten=True)]
    for rank, words in said.items():
        if rank != first:
            words = _first_line(words) + (_at(errors[rank]) if rank in errors else "")
            lines.append(f"rank {rank}: {'same error' if rank in same else words}")
    return RankFailure(_joined(lines, snaps), first, format_error(cause), said)


def late(
    headline: str,
    errors: dict[int, dict],
    snaps: dict[int, dict],
    silent: dict[int, str],
    seen: dict[int, dict],
    waiting: set[int],
    n: int,
) -> RankFailure | RanksInterrupted:
    """Not all came back: too late, a deadlock, or an interrupt (then there may be errors too).
    `seen`: earlier snapshots, all there is of a rank that does not answer."""
    said = states(errors, snaps, silent, n)
    first = _missing(snaps, waiting, n)
    frames = {**seen, **snaps}.get(first, {"frames": []})["frames"]
    stack = format_frames(frames) or said[first]
    lines = [headline, *(f"rank {rank}: {words}" for rank, words in said.items())]
    kind = RanksInterrupted if headline == INTERRUPTED else RankFailure
    return kind(_joined(lines, snaps), first, stack, said)


def stuck(held: set[int]) -> str:
    """The headline when nothing moves any more; `held`: ranks that are stopped."""
    if not held:
        return "deadlock: every rank that still runs waits for another one"
    names = f"rank{'s' if len(held) > 1 else ''} {', '.join(map(str, sorted(held)))}"
    return f"stuck: {names} {'are' if len(held) > 1 else 'is'} stopped, nobody else can go on"


def died(pid: int, code: int, last_words: list[str], crash: str, seen: dict | None) -> dict:
    """The error of a rank whose process has ended. `last_words`: the end of its stderr; `crash`:
    the stacks that Python wrote down; `seen`: what it was doing when it was last asked."""
    if code < 0:
        name = _signal_name(-code)
        text = f"was killed by {name} (process {pid})"
        if name == "SIGKILL":
            text = f"was killed by {name} from outside (process {pid}; was memory short?)"
    else:
        text = f"ended its process {pid} with exit code {code}"
    frames = _crash_frames(crash)
    words = "\n".join(last_words[-_LAST_WORDS:])
    link = {"frames": frames, "text": words or text, "link": None}
    if not frames and last_seen(seen):
        text += last_seen(seen)
        link |= {"frames": seen["frames"], "text": words, "title": "Where it was last seen:"}
    return {"text": text, "chain": [link], "consequence": False, "died": True}


def last_seen(snap: dict | None) -> str:
    """What a rank was doing when it last answered, to be put behind what is known of it now."""
    return f"; last seen {doing(snap)}" if snap is not None and snap["frames"] else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _crash_frames(crash: str) -> list[Frame]:
    """The main thread's stack out of what `faulthandler` writes, as Python's other stacks."""
    for thread in crash.split("\n\n"):
        found = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', thread, re.MULTILINE)
        if any(function == "forked_main" for _, _, function in found):
            return watchdog.own([(f, int(line), fn, "") for f, line, fn in reversed(found)])
    return []


def _first_cause(errors: dict[int, dict]) -> int:
    # A lost connection is only the echo of what happened elsewhere, even when it is heard first.
    first = min(errors, key=lambda r: (errors[r]["consequence"], list(errors).index(r)))
    return min(r for r in errors if _kind(errors[r]) == _kind(errors[first]))


def _kind(error: dict) -> tuple:
    """The same for errors of which none came first: then the lowest rank is told, every time."""
    kind = "mismatch" if _MISMATCH.search(error["text"]) else error["text"].partition(":")[0]
    place = "" if kind == "mismatch" else _at(error)
    return error["consequence"], bool(error.get("died")), kind, place


def _missing(snaps: dict[int, dict], waiting: set[int], n: int) -> int:
    """The rank the others wait for: it does not answer, works on alone, or has left."""
    kinds: dict[tuple, list[int]] = {}
    for rank in range(n):
        if rank not in snaps:
            kind: tuple = (0, "")
        elif rank in waiting:
            op = watchdog.waiting_in(snaps[rank]["frames"])
            kind = (3, op) if op else (1, "")
        else:
            kind = (2, "")
        kinds.setdefault(kind, []).append(rank)
    # The odd one out; between equals the one that could still be doing something.
    return kinds[min(kinds, key=lambda k: (len(kinds[k]), k))][0]


def states(
    errors: dict[int, dict], snaps: dict[int, dict], silent: dict[int, str], n: int
) -> dict[int, str]:
    """For every rank, in words, what it did or is doing."""
    said = {}
    for rank in range(n):
        if rank in errors:
            said[rank] = outcome(errors[rank])
        else:
            said[rank] = doing(snaps[rank]) if rank in snaps else silent[rank]
    return said


def outcome(error: dict) -> str:
    """How a rank failed, in words."""
    if error.get("died"):
        return error["text"]
    if error["consequence"]:
        how = "timed out" if "Timed out" in error["text"] else "lost the connection to a rank"
        return f"{how}, {_place(error['chain'][0]['frames'])}"
    return f"raised {_plain(error['text'])}"


def _at(error: dict) -> str:
    """The line of the user's code that raised; "" where the outcome already tells the place."""
    frames = [f for f in error["chain"][0]["frames"] if not is_library(f[0])]
    if error.get("died") or error["consequence"] or not frames:
        return ""
    line = source(frames[-1])
    return f" at {frames[-1][0]}:{frames[-1][1]}" + (f": {line}" if line else "")


def _joined(lines: list[str], snaps: dict[int, dict]) -> str:
    difference = watchdog.first_difference(snaps)
    return "\n".join([*lines, difference] if difference else lines)


def _plain(text: str) -> str:
    """torch's report of a mismatch in a few words; anything else as it is."""
    calls = _MISMATCH.findall(text)
    if not calls:
        return text
    # A rank reports itself correctly; of another one, torch reads only calls with a shape rightly.
    calls = sorted({calls[0], *(call for call in calls if call[3])})
    said = [f"rank {r} calls {op} [{shape}] {dtype}".rstrip(" []") for r, op, shape, dtype in calls]
    return f"{text.partition(':')[0]}: the ranks call different collectives: {', '.join(said)}"


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


# ------------------------------------------------------------------------------------- formatting


def doing(snap: dict) -> str:
    """One line: what a rank was doing when it was asked."""
    if not snap["frames"]:
        return "finished"  # back in the loop that waits for the next call
    text = _place(snap["frames"])
    pending = [r for r in snap["records"] if not r["done"]]
    if pending and watchdog.waiting_in(snap["frames"]):
        lines = {(file, line) for file, line, _, _ in snap["frames"]}
        r = next((r for r in pending if tuple(r["site"][:2]) in lines), pending[0])
        peer = "" if r["peer"] is None else f" with rank {r['peer']}"
        by = f", {r['by']}" if r["by"] else ""
        number = f"number {r['seq']} in group {r['group']}"
        text += f"  [{r['op']}{peer}{watchdog.size(r)}{by}, {number}, for {r['age']:.1f} s]"
    return text


def _place(frames: list[Frame]) -> str:
    if not frames:
        return "outside of any call"
    op = watchdog.waiting_in(frames)
    frame = ([f for f in frames if not is_library(f[0])] or frames)[-1]
    text = "waiting" if op == "wait" else f"waiting in {op}" if op else f"running {frame[2]}"
    line = source(frame)
    return f"{text} at {frame[0]}:{frame[1]}" + (f": {line}" if line else "")


def is_library(file: str) -> bool:
    """Whether a file is Python's, an installed package's or minidist's rather than the user's."""
    return file.startswith(_LIBRARIES)


def format_frames(frames: list[Frame], shorten: bool = False) -> str:
    """Frames as Python prints them; `shorten` leaves out the inside of libraries."""
    lines, hidden = [], 0
    if shorten and len(frames) > 2 * _MOST_FRAMES:  # endless recursion
        left_out = f"  ... {len(frames) - 2 * _MOST_FRAMES} more calls"
        ends = frames[:_MOST_FRAMES], frames[-_MOST_FRAMES:]
        return f"\n{left_out}\n".join(format_frames(end, shorten) for end in ends)
    shorten = shorten and any(not is_library(f[0]) for f in frames)
    for i, frame in enumerate(frames):
        if shorten and is_library(frame[0]) and i < len(frames) - 1:
            hidden += 1
            continue
        if hidden:
            lines.append(f"  ... {hidden} call{'s' if hidden > 1 else ''} inside libraries")
            hidden = 0
        lines.append(f'  File "{frame[0]}", line {frame[1]}, in {frame[2]}')
        line = source(frame)
        if line:
            lines.append(f"    {line}")
    return "\n".join(lines)


def format_error(error: dict, shorten: bool = False) -> str:
    """An error with its causes first, as Python prints them."""
    parts = []
    for link in reversed(error["chain"]):
        if link["link"] == "cause":
            parts.append("\nThe above exception was the direct cause of the following exception:\n")
        elif link["link"] == "context":
            parts.append("\nDuring handling of the above exception, another exception occurred:\n")
        if link["frames"]:
            parts.append(link.get("title", "Traceback (most recent call last):"))
            parts.append(format_frames(link["frames"], shorten))
        parts.append(_plain(link["text"]) if shorten else link["text"])
    return "\n".join(filter(None, parts))
