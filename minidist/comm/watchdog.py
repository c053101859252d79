"""Who waits where: what each rank is doing, in plain data that travels between processes.

`snapshot` and `describe` run on a rank. `Watch` runs in the program that started the ranks and
decides from snapshots that nothing will ever move again. `Beacon` serves under torchrun, where no
program of ours looks on: every rank keeps what it is doing in the job's store.
"""

from __future__ import annotations

import json
import linecache
import os
import sys
import threading
import time
import traceback

LISTENER = "minidist-listener"  # the thread that answers; not counted as a thread of the user
BEAT = 0.5  # seconds between two words of a rank under torchrun
ROUND = 0.25  # seconds between two looks at ranks from which nothing is heard
ROUNDS = 5  # this many looks without any movement, and all waiting: a deadlock
_IDLE_SECONDS = 0.003  # processor time that a waiting rank may use between two looks
_RECORDS = 64  # of the ledger, in a snapshot

_COMM = os.path.dirname(os.path.abspath(__file__)) + os.sep
# Where a rank waits for others: in functions of these files whose names begin so.
_WAITING_IN = ("distributed_c10d.py", os.path.join(_COMM, "collectives.py"))
_WAITS = (
    "all_", "barrier", "batch_", "broadcast", "destroy_", "gather", "init_", "irecv", "isend",
    "monitored_", "new_", "recv", "reduce", "scatter", "send", "split_", "wait",
)  # fmt: skip
# What calls the user's code on a rank: functions, and cells of a notebook.
_CALLERS = (
    os.path.join(_COMM, "worker.py"),
    os.path.join(os.path.dirname(_COMM[:-1]), "learn", "cell.py"),
)
# What an error says on a rank whose peer has gone or never came, and who must be saying it: the
# user's own network errors are no echo of another rank.
_CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "Application timeout caused pair closure",
    "Socket closed",
    "remote process exited",
    "failed to pass monitoredBarrier",  # torch's check of collectives, when a rank has gone
)

_SPEAKERS = ("gloo", "NCCL", "TCPStore", "torch.distributed.Dist", "monitoredBarrier")

Frame = tuple[str, int, str, str]  # file, line, function, source line ("" where not known here)


# ------------------------------------------------------------------------------------ on a rank


def snapshot() -> dict:
    """What the main thread of this process is doing, and its last collectives."""
    # Nothing may be imported here: the main thread may be in the middle of importing it.
    ledger = sys.modules.get("minidist.comm.ledger")
    frame = sys._current_frames().get(threading.main_thread().ident)
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    del frame  # it would keep alive what that function has let go meanwhile, buffers for one
    frames = own([(f.filename, f.lineno or 0, f.name, _known(f)) for f in reversed(stack)])
    now = time.perf_counter()
    records = [
        {
            "seq": r.seq, "op": r.op, "group": r.group, "group_size": r.group_size,
            "numel": r.numel, "dtype": r.dtype, "by": r.by, "peer": r.peer,
            "site": list(r.site), "age": now - r.issued, "done": r.finished is not None,
        }
        for r in (list(ledger.last)[-_RECORDS:] if ledger else ())
    ]  # fmt: skip
    return {
        "frames": frames,
        "records": records,
        "groups": _members({r["group"] for r in records}),
        "cpu": time.process_time() - time.thread_time(),  # without this thread, which answers
        "asleep": _others_asleep(),
        # A second thread of the user may be about to set things moving.
        "threads": sum(t.name != LISTENER for t in threading.enumerate()) - 1,
    }


def _others_asleep() -> bool:
    """Whether no thread but this one has work to do. On a busy machine one that has may not get a
    processor for seconds; one that only asks the store now and then is soon asleep again. True
    where this cannot be seen."""
    me = str(threading.get_native_id())
    try:
        awake = set(os.listdir("/proc/self/task")) - {me}
        for _ in range(5):
            awake = {thread for thread in awake if _state(thread) != "S"}
            if not awake:
                return True
            time.sleep(0.002)
    except OSError:
        return True
    return False


def _state(thread: str) -> str:
    with open(f"/proc/self/task/{thread}/stat", encoding="utf-8") as file:
        return file.read().rpartition(")")[2].split()[0]


def _known(frame: traceback.FrameSummary) -> str:
    # Lines of notebook cells may be known here and nowhere else; files are read by who prints them.
    entry = linecache.cache.get(frame.filename)
    if not entry or len(entry) < 4 or not 0 < (frame.lineno or 0) <= len(entry[2]):
        return ""
    return entry[2][frame.lineno - 1].strip()


def _members(names: set[str]) -> dict[str, list[int]]:
    dist = sys.modules.get("torch.distributed")
    if not names or dist is None or not dist.is_initialized():
        return {}
    known = {group.group_name: group for group in list(dist.distributed_c10d._world.pg_map)}
    return {n: dist.get_process_group_ranks(known[n]) for n in sorted(names & set(known))}


def describe(error: BaseException) -> dict:
    """An exception with its causes."""
    chain, seen = [], set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        stack = traceback.extract_tb(current.__traceback__)
        frames = own([(f.filename, f.lineno or 0, f.name, f.line or "") for f in stack])
        text = "".join(traceback.format_exception_only(type(current), current)).rstrip("\n")
        for part in getattr(current, "exceptions", ()):  # an ExceptionGroup
            text += "\n" + "".join(traceback.format_exception(part)).rstrip("\n")
        link = None
        following = current.__cause__
        if following is not None:
            link = "cause"
        elif current.__context__ is not None and not current.__suppress_context__:
            following, link = current.__context__, "context"
        chain.append({"frames": frames, "text": text, "link": link})
        current = following
    return {
        "text": chain[0]["text"],
        "chain": chain,
        # The rank that lost its peer is not the one to look at.
        "consequence": any(_is_consequence(link["text"]) for link in chain),
    }


def _is_consequence(text: str) -> bool:
    return any(mark in text for mark in _CONSEQUENCES) and any(who in text for who in _SPEAKERS)


def own(frames: list[Frame]) -> list[Frame]:
    """From the user's code on: what calls it on a rank says nothing."""
    loop = [i for i, f in enumerate(frames) if f[0] in _CALLERS]
    if loop and frames[loop[-1]][2] == "send":
        return []  # its answer may have arrived before this call returns
    return frames[loop[-1] + 1 :] if loop else frames


# --------------------------------------------------------------------------------- looking at it


def waiting_in(frames: list[Frame]) -> str | None:
    """The call in which a rank waits for others, by the name the user called; or None."""
    for file, _, function, _ in frames:
        if file.endswith(_WAITING_IN) and function.startswith(_WAITS):
            return function
    # `work.wait()` of torch has no Python frame: only the line of the caller tells.
    return "wait" if frames and ".wait(" in source(frames[-1]) else None


def source(frame: Frame) -> str:
    """The frame's source line."""
    linecache.checkcache(frame[0])  # the file may have changed since this program read it
    return (frame[3] or linecache.getline(frame[0], frame[1])).strip()


class Watch:
    """Decides that ranks wait for each other for ever, long before the time limit.

    All that still run are inside communication, none has moved, used the processor or has a second
    thread, in `ROUNDS` looks, one every `ROUND` seconds. A rank that is stopped does not run.
    """

    def __init__(self):
        self.next = time.monotonic() + ROUND
        self.seen: dict[int, dict] = {}  # the last snapshot of every rank
        self.complete = False  # whether all answered the last question
        self._before: dict[int, tuple] = {}
        self._still = 0

    def look(self, snaps: dict[int, dict], running: set[int]) -> bool:
        """One look at all ranks that run and have not finished; True when it is a deadlock."""
        self.next = time.monotonic() + ROUND
        self.seen |= snaps
        self.complete = running <= set(snaps)
        if not self.complete:
            self._still = 0
            return False
        now = {r: (snaps[r]["frames"], snaps[r]["records"][-1:], snaps[r]["cpu"]) for r in running}
        still = now.keys() == self._before.keys() and all(
            waiting_in(snaps[r]["frames"])
            and snaps[r]["asleep"]
            and snaps[r]["threads"] == 0
            and _unmoved(self._before[r], now[r])
            for r in running
        )
        self._still = self._still + 1 if still else 0
        self._before = now
        return self._still >= ROUNDS


def _unmoved(before: tuple, now: tuple) -> bool:
    last = [[{**record, "age": 0} for record in records] for _, records, _ in (before, now)]
    return before[0] == now[0] and last[0] == last[1] and now[2] - before[2] < _IDLE_SECONDS


def first_difference(snaps: dict[int, dict]) -> str:
    """Where the ranks' sequences of collectives part, in one line; "" if they do not.

    Messages between two ranks (send, recv) are left out: each rank has its own.
    """
    done: dict[tuple, dict[int, dict[int, dict]]] = {}  # group -> rank -> number -> record
    for rank, snap in snaps.items():
        for name, members in snap["groups"].items():
            numbered = {
                r["seq"]: r for r in snap["records"] if r["group"] == name and r["peer"] is None
            }
            done.setdefault((name, tuple(members)), {})[rank] = numbered
    for (name, members), by_rank in done.items():
        # A member without any record never came; one that does not answer may have.
        for rank in set(members) & set(snaps):
            by_rank.setdefault(rank, {})
        starts = [min(numbered) for numbered in by_rank.values() if numbered]
        ends = [max(numbered) for numbered in by_rank.values() if numbered]
        for seq in range(max(starts, default=0), max(ends, default=-1) + 1):
            said: dict[str, list[int]] = {}
            for rank in sorted(by_rank):
                record = by_rank[rank].get(seq)
                said.setdefault(_same_everywhere(record), []).append(rank)
            if len(said) > 1:
                parts = []
                for what, ranks in said.items():
                    record = by_rank[ranks[0]].get(seq)
                    at = f" at {record['site'][0]}:{record['site'][1]}" if record else ""
                    parts.append(f"{_ranks(ranks)} {what}{at}")
                return f"First difference, collective {seq} of group {name}: " + "; ".join(parts)
    return ""


def _same_everywhere(record: dict | None) -> str:
    if record is None:
        return "did not get there"
    if record["op"] == "all_to_all":  # each rank may have a size of its own
        return record["op"]
    return f"{record['op']}{size(record)}"


def size(record: dict) -> str:
    """How much a collective is about; nothing for a barrier."""
    return f" of {record['numel']} {record['dtype']}" if record["numel"] else ""


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}:"


# --------------------------------------------------------------------------------- under torchrun


class Beacon:
    """Keeps what this rank is doing in the job's store, twice a second, for the others to read.

    `limit`: seconds in one collective after which this rank prints what all are doing. NCCL ends
    the process when its own limit is over, without an exception that could say it.
    """

    def __init__(self, store, rank: int, world_size: int, limit: float | None = None):
        self.store, self.rank, self.world_size, self.limit = store, rank, world_size, limit
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name=LISTENER)
        self._thread.start()

    def _run(self) -> None:
        told = False
        while not self._stop.wait(BEAT):
            snap = snapshot()
            if not self._say(snap):
                return
            ages = [r["age"] for r in snap["records"] if not r["done"]]
            if self.limit and not told and max(ages, default=0.0) > 0.9 * self.limit:
                told = True
                print(self.table(), file=sys.stderr, flush=True)

    def _say(self, snap: dict, words: str = "") -> bool:
        try:
            self.store.set(str(self.rank), json.dumps([time.time(), words, snap]))
            return True
        except RuntimeError:  # the store's host has gone, and nobody is left to read it
            return False

    def close(self, words: str) -> None:
        """Say the last word: `finished`, or what was raised."""
        self._stop.set()
        self._thread.join(2 * BEAT)
        self._say(snapshot(), words)

    def failed(self, error: BaseException) -> None:
        """This rank raises `error`. If that is the echo of a lost or missing rank, say of which."""
        from minidist.comm.failure import outcome

        said = describe(error)
        self.close(outcome(said))
        if said["consequence"]:
            # The rank that failed may still be saying so; torchrun ends the others soon after it.
            time.sleep(0.1)
            if hasattr(error, "add_note"):
                error.add_note(self.table())
            else:
                print(self.table(), file=sys.stderr, flush=True)

    def table(self) -> str:
        """What every rank last said, one line each, and where their sequences part."""
        from minidist.comm.failure import doing

        lines, snaps = ["What the ranks of this job were doing:"], {}
        for rank in range(self.world_size):
            try:
                key = str(rank)
                said = self.store.get(key) if self.store.check([key]) else b'[0, "", null]'
                heard, words, snap = json.loads(said)
            except RuntimeError:
                snap = None
            if snap is None:
                lines.append(f"rank {rank}: nothing was heard of it")
                continue
            snaps[rank] = snap
            age = "" if words else f"  (heard {max(0.0, time.time() - heard):.1f} s ago)"
            lines.append(f"rank {rank}: {words or doing(snap)}{age}")
        difference = first_difference(snaps)
        return "\n".join([*lines, difference] if difference else lines)
