"""Start ranks on this machine, run a function on them, and say what happened when it fails.

`launch` is one call on fresh ranks; `Ranks` keeps them between calls (notebooks, tests). The
processes are in `processes` and `worker`; how a failure is told is in `failure` and `watchdog`.
"""

from __future__ import annotations

import atexit
import itertools
import math
import operator
import os
import pickle
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from minidist.comm import failure, processes, watchdog, worker
from minidist.comm.failure import RankFailure, RanksInterrupted
from minidist.comm.processes import Output

__all__ = ["RankFailure", "Ranks", "RanksInterrupted", "launch", "print_output"]

GRACE = 0.3  # seconds the other ranks get after the first bad news: the cause may be heard second
_START_LIMIT = 120.0  # seconds until all ranks must have joined the process group
_ANSWER_LIMIT = 3.0  # seconds to answer "where are you?"; a busy machine needs more than it seems


def launch(fn: Callable, ranks: int = 2, *args, timeout: float | None = 60, **kwargs) -> list:
    """Run `fn(*args, **kwargs)` on `ranks` local processes that share a process group (gloo).

    Returns the results in rank order; tensors come back on the CPU. `fn` and its arguments travel
    by value: functions of a notebook, a REPL, a test, or a script without a main guard all work.
    The ranks see nothing else of the program's memory. What they print appears as it comes, marked
    with the rank. Every rank uses one thread for operations (OMP_NUM_THREADS changes that).
    `timeout`: seconds until the whole call must be done; None for no limit. Ranks that wait for
    each other for ever, or for one that is stopped, are found after about 2 seconds in any case.
    Raises `RankFailure` when a rank raises, dies or is late, after ending all ranks.
    """
    packed = _packed(fn, args, kwargs)  # what cannot travel fails before anything is started
    with Ranks(ranks, timeout=timeout) as standing:
        return standing._run(packed, timeout, None)


class Ranks:
    """`n` local processes with a process group, which stay and keep their memory between calls.

    `timeout`: the limit for one call, in seconds (None: no limit). `debug`: torch checks that all
    ranks call the same collective with the same shapes, which turns mismatches into errors and
    costs 2-4 times the time of a small collective. `on_output(rank, "stdout" | "stderr", line)`
    gets what the ranks print, line by line as it comes, instead of the terminal; a line that ends
    in "\\r" is unfinished and comes again (progress bars). `keep`: a failure after which every rank
    has returned leaves the ranks standing; otherwise they are ended. `backend`: "gloo", or
    "cpu:gloo,cuda:nccl" with one GPU per rank. `tune=False`: see `tuning.py`.
    """

    def __init__(
        self,
        n: int,
        timeout: float | None = 60,
        debug: bool = False,
        on_output: Output | None = None,
        keep: bool = False,
        backend: str = "gloo",
        tune: bool = True,
    ):
        self._processes: list[processes.Forked | processes.Spawned] = []
        self.n = _whole(n)
        _check_timeout(timeout)
        self.timeout, self.debug, self.keep = timeout, debug, keep
        self.backend, self.tune = backend, tune
        self._on_output = on_output or print_output
        self._owner = os.getpid()
        self._busy = threading.Lock()
        self._answers: dict[int, dict[int, dict]] = {}  # question -> rank -> snapshot
        self._folder: str | None = None
        try:
            self._start()
            self._collect(_Call(n), _START_LIMIT, self._on_output)
        except BaseException:
            self.kill()
            raise
        _standing.add(self)

    @property
    def alive(self) -> bool:
        """Whether all ranks are there, so that `run` can be called."""
        return bool(self._processes) and all(p.code() is None for p in self._processes)

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [p.pid for p in self._processes]

    def run(
        self,
        fn: Callable,
        *args,
        timeout: float | None = None,
        on_output: Output | None = None,
        **kwargs,
    ) -> list:
        """Call `fn(*args, **kwargs)` on every rank; results in rank order.

        `timeout` and `on_output` replace those of this object for this call. Raises `RankFailure`
        like `launch`; unless `keep` applies, the ranks have ended then. `worker.state` is a dict on
        every rank in which `fn` can leave things for later calls.
        """
        _check_timeout(timeout)
        packed = _packed(fn, args, kwargs)
        return self._run(packed, self.timeout if timeout is None else timeout, on_output)

    def where(self) -> dict[int, str]:
        """What every rank is doing right now, in words; also from another thread during `run`."""
        snaps = self.snapshots()
        return failure.states({}, snaps, self._silent(snaps, {}), self.n)

    def snapshots(self) -> dict[int, dict]:
        """The same as data, without ranks that do not answer: `frames` (file, line,
        function, source line) from the outermost on, and the last `records` of the ledger."""
        if self._busy.acquire(blocking=False):
            try:
                snaps = self._snapshots(_Call(self.n), lambda *_: None)
            finally:
                self._busy.release()
        else:  # the thread that is in `run` reads the answers
            question = self._ask(range(self.n))
            end = time.monotonic() + _ANSWER_LIMIT
            while len(self._answers[question]) < self.n and time.monotonic() < end:
                time.sleep(0.01)
            snaps = self._answers.pop(question)
        return snaps

    def kill(self) -> None:
        """End all ranks at once, whatever they are doing."""
        if self._owner != os.getpid():  # in a fork of the program: they are not ours
            return
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.close()
        self._processes = []
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def close(self) -> None:
        """End the ranks in order; those that are not done after 2 seconds by force."""
        for process in self._processes:
            with suppress(OSError):
                process.send("bye")
        end = time.monotonic() + 2
        for process in self._processes:
            process.wait(end - time.monotonic())
        self.kill()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind, *_) -> None:
        self.close() if kind is None else self.kill()

    def __del__(self) -> None:
        if getattr(self, "_processes", None):
            self.kill()

    # --------------------------------------------------------------------------------- starting

    def _start(self) -> None:
        store_fd, path = processes.nameless_file()
        self._folder = path and os.path.dirname(path)
        try:
            for rank in range(self.n):
                process = processes.start(rank, store_fd)
                self._processes.append(process)
                process.send(self._setup(rank, path))
        finally:
            if store_fd is not None:
                os.close(store_fd)

    def _setup(self, rank: int, store: str | None) -> dict:
        # What torchrun would say of another job must not reach these ranks.
        env = {k: v for k, v in os.environ.items() if not k.startswith(("MASTER_", "TORCHELASTIC"))}
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        env |= {"WORLD_SIZE": str(self.n), "LOCAL_WORLD_SIZE": str(self.n)}
        loopback = processes.loopback()
        if loopback:  # or gloo would listen where other machines can connect
            env["GLOO_SOCKET_IFNAME"] = loopback
        if self.debug:
            env["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        threads = env.get("OMP_NUM_THREADS", "")
        return {
            "rank": rank,
            "ranks": self.n,
            "backend": self.backend,
            "tune": self.tune,
            "store": store,
            "debug": self.debug,
            "threads": int(threads) if threads.isdecimal() and int(threads) else 1,
            "env": env,
            "cwd": os.getcwd(),
            "path": processes.search_path(),
            "argv": sys.argv,
        }

    # ------------------------------------------------------------------ waiting for the answers

    def _run(self, packed: bytes, limit: float | None, on_output: Output | None) -> list:
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("these ranks are busy with another call")
        call = _Call(self.n)
        try:
            if not self.alive:
                raise RuntimeError("these ranks have ended: make new ones with Ranks(n)")
            for process in self._processes:
                with suppress(OSError):  # it has ended or stopped, which is found out below
                    process.send("call", packed)
            self._collect(call, limit, on_output or self._on_output)
        except BaseException:
            if not (self.keep and call.all_returned()):
                self.kill()
            raise
        finally:
            self._busy.release()
        return [pickle.loads(result) for result in call.results]

    def _collect(self, call: _Call, limit: float | None, emit: Output) -> None:
        """Wait until every rank has answered; or raise the story of why not."""
        watch = watchdog.Watch()
        late = math.inf if limit is None else time.monotonic() + limit
        headline, question = "", None
        try:
            while call.waiting and not headline and time.monotonic() < min(late, call.give_up):
                pause = min(late, call.give_up, watch.next) - time.monotonic()
                for rank, kind, content in self._news(call.waiting, pause, emit):
                    seen = watch.seen | self._answers.get(question, {})
                    call.take(rank, kind, content, self._processes[rank], seen.get(rank))
                if call.waiting and not call.errors and time.monotonic() >= watch.next:
                    # Not those in a debugger: somebody is looking at them.
                    held = {r for r in call.waiting if self._processes[r].stopped("T")}
                    if watch.look(self._answers.get(question, {}), call.waiting - held):
                        headline = failure.stuck(held)
                    if question is None or watch.complete:
                        self._answers.pop(question, None)
                        question = self._ask(call.waiting - held)
            if call.waiting and not call.errors and not headline:
                headline = f"not finished after {limit:g} s"
        except KeyboardInterrupt:
            headline = failure.INTERRUPTED
        self._answers.pop(question, None)
        if not headline and not call.errors:
            return
        snaps = self._snapshots(call, emit)
        silent = self._silent(call.errors.keys() | snaps.keys(), watch.seen)
        if call.errors and headline != failure.INTERRUPTED:
            raise failure.failed(call.errors, snaps, silent, self.n)
        stories = call.errors, snaps, silent, watch.seen
        raise failure.late(headline, *stories, call.waiting, self.n)

    def _news(self, ranks: Iterable[int], seconds: float, emit: Output) -> list[tuple]:
        """Pass on output for at most `seconds`, until there is news: (rank, kind, content), where
        kind is done, error or died."""
        by_source = {s: self._processes[r] for r in ranks for s in self._processes[r].sources()}
        ready = {by_source[source] for source in wait(list(by_source), max(0.0, seconds))}
        news = []
        for process in sorted(ready, key=lambda p: p.rank):
            process.read_output(emit)
            if process.has_news():
                kind, *content = process.receive(emit)
                if kind == "where":
                    if content[0] in self._answers:
                        self._answers[content[0]][process.rank] = content[1]
                elif kind != "print":
                    news.append((process.rank, kind, content[0]))
        return news

    def _ask(self, ranks: Iterable[int]) -> int:
        """Ask ranks where they are; what they say will be in `_answers`, by this number."""
        question = next(_questions)
        self._answers[question] = {}
        for rank in ranks:
            with suppress(OSError):
                self._processes[rank].send("where", question)
        return question

    def _snapshots(self, call: _Call, emit: Output) -> dict[int, dict]:
        """What every rank that is there is doing now; answers to the call may still come in."""
        ranks = {r for r in range(self.n) if not call.died(r) and not self._processes[r].stopped()}
        question = self._ask(ranks)
        end = time.monotonic() + _ANSWER_LIMIT
        while ranks - set(self._answers[question]) and time.monotonic() < end:
            for rank, kind, content in self._news(ranks, end - time.monotonic(), emit):
                call.take(rank, kind, content, self._processes[rank], None)
                if kind == "died":
                    ranks.discard(rank)
        return self._answers.pop(question)

    def _silent(self, heard: Iterable[int], seen: dict[int, dict]) -> dict[int, str]:
        """Why the ranks that were not heard do not answer, and where they were when last seen."""
        silent = {p.rank: p.silence() for p in self._processes if p.rank not in heard}
        return {r: words + failure.last_seen(seen.get(r)) for r, words in silent.items()}


class _Call:
    """What has come back from the ranks for one call."""

    def __init__(self, n: int):
        self.waiting = set(range(n))
        self.results: list[bytes] = [b""] * n
        self.errors: dict[int, dict] = {}  # in order of arrival
        self.give_up = math.inf

    def take(self, rank: int, kind: str, content: Any, process, seen: dict | None) -> None:
        """One answer; `seen`: the rank's last snapshot, all there is when it has died."""
        self.waiting.discard(rank)
        if kind == "done":
            self.results[rank] = content
            return
        if rank in self.errors:  # that it raised says more than that it ended afterwards
            return
        if kind == "died":
            words = list(process.last_words)
            content = failure.died(process.pid, content, words, process.crash(), seen)
        self.errors[rank] = content
        # A rank that lost its peer is heard at once, the peer's end perhaps a little later.
        patience = 3 * GRACE if content["consequence"] else GRACE
        self.give_up = min(self.give_up, time.monotonic() + patience)

    def died(self, rank: int) -> bool:
        return self.errors.get(rank, {}).get("died", False)

    def all_returned(self) -> bool:
        return not self.waiting and not any(self.died(r) for r in self.errors)


def print_output(rank: int, stream: str, line: str) -> None:
    """Show a line that a rank printed, marked with the rank."""
    out = getattr(sys, stream)
    unfinished = line.endswith("\r")
    if unfinished and not out.isatty():
        return
    text = f"[rank {rank}] {line}"
    encoding = getattr(out, "encoding", None) or "utf-8"
    # A terminal that cannot show a character must not end the job.
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    print(text, end="" if unfinished else "\n", file=out, flush=True)


# ------------------------------------------------------------------------------------ small helpers

_questions = itertools.count()
_standing: weakref.WeakSet[Ranks] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for ranks in list(_standing):
        ranks.kill()


def _packed(fn: Callable, args: tuple, kwargs: dict) -> bytes:
    if not callable(fn):
        raise TypeError(f"a function is needed to run on every rank, got {fn!r}")
    try:
        if getattr(fn, "__module__", "") == "__main__" and not worker.by_value():
            raise pickle.PicklingError("the ranks cannot import it from the main program")
        return worker.dumps((fn, args, kwargs))
    except Exception as error:
        name = getattr(fn, "__qualname__", repr(fn))
        hint = "" if worker.by_value() else ". Functions that cannot be imported need cloudpickle"
        raise TypeError(f"{name} cannot be sent to the ranks: {error}{hint}") from error


def _whole(n: int) -> int:
    try:
        n = operator.index(None if isinstance(n, bool) else n)
    except TypeError:
        raise TypeError(f"the number of ranks must be a whole number, got {n!r}") from None
    if n < 1:
        raise ValueError(f"at least one rank is needed, got ranks={n}")
    return n


def _check_timeout(timeout: float | None) -> None:
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds or None, got {timeout!r}")
    if not timeout > 0:
        raise ValueError(f"timeout must be more than 0 seconds, got {timeout!r}")
