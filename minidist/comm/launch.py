"""Start ranks on this machine, run a function on them, and say what happened when it fails.

`launch` is one call on fresh ranks; `Ranks` keeps them standing between calls (notebooks, tests).
The processes come from `worker`; how a failure is told is in `watchdog`.
"""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from minidist.comm import watchdog, worker

# After the first bad news the others get this long to send theirs: the cause may arrive second.
GRACE = 0.3
START_LIMIT = 120.0  # seconds until all ranks must have joined the process group
Output = Callable[[int, str, str], None]


class RankFailure(RuntimeError):
    """A rank raised, died, or did not finish in time.

    `rank`: the rank that failed first. `traceback`: its traceback, or where it stood.
    `states`: for every rank, in words, what it had done or was doing.
    """

    def __init__(self, message: str, rank: int, traceback: str, states: dict[int, str]):
        super().__init__(message)
        self.rank, self.traceback, self.states = rank, traceback, states

    def __reduce__(self):
        return type(self), (str(self), self.rank, self.traceback, self.states)

    def _render_traceback_(self):  # IPython: our story, not the stack of this file
        return str(self).splitlines()


def launch(fn: Callable, ranks: int = 2, *args, timeout: float | None = 60, **kwargs) -> list:
    """Run `fn(*args, **kwargs)` on `ranks` local processes that share a process group (gloo).

    Returns the results in rank order; tensors come back on the CPU. `fn` and its arguments travel by
    value, so functions of a notebook, a REPL, a test or an unguarded script work. What the ranks
    print appears as it comes, marked with the rank.
    `timeout`: seconds until the whole call must be done; None for no limit.
    Raises `RankFailure` when a rank raises, dies or is late, after ending all ranks.
    """
    if not callable(fn):
        raise TypeError(f"launch needs a function to run on every rank, got {fn!r}")
    _check_timeout(timeout)
    with Ranks(ranks, timeout=timeout) as standing:
        return standing.run(fn, *args, **kwargs)


class Ranks:
    """`n` local processes with a process group, that stay and keep their memory between calls.

    `timeout`: the limit for each call, in seconds (None: no limit). `debug`: torch checks every
    collective for agreement, which turns mismatches into errors, and costs 2-4 times the time of a
    small collective. `on_output(rank, "stdout" | "stderr", line)`: gets what the ranks print, line
    by line as it comes, instead of the terminal; a line that ends in "\\r" is unfinished and will
    come again (progress bars). `keep`: after an error to which every rank has answered (it raised
    or finished, none is stuck) leave the ranks standing with their memory; the caller makes sure
    that they still agree on which collective comes next.
    """

    def __init__(
        self,
        n: int,
        timeout: float | None = 60,
        debug: bool = False,
        on_output: Output | None = None,
        keep: bool = False,
    ):
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"the number of ranks must be a whole number, got {n!r}")
        if n < 1:
            raise ValueError(f"at least one rank is needed, got ranks={n}")
        _check_timeout(timeout)
        self.n, self.timeout, self.debug, self.keep = n, timeout, debug, keep
        self._on_output = on_output or print_output
        self._busy = threading.Lock()
        self._ranks: list[_Process] = []
        self._folder: str | None = None
        try:
            self._start()
            self._collect("ready", START_LIMIT, self._on_output)
        except BaseException:
            self.kill()
            raise

    def _start(self) -> None:
        store_fd, path = _nameless_store()
        if path is not None:
            self._folder = os.path.dirname(path)
        try:
            for rank in range(self.n):
                process = _Process(rank, store_fd)
                self._ranks.append(process)
                process.send_bytes(pickle.dumps(self._setup(rank, path)))
        finally:
            os.close(store_fd)

    def _setup(self, rank: int, store: str | None) -> dict:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("MASTER_", "TORCHELASTIC"))}
        env |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.n),
            "LOCAL_WORLD_SIZE": str(self.n),
        }
        loopback = _loopback()
        if loopback:
            # Or gloo listens on the machine's outside address.
            env["GLOO_SOCKET_IFNAME"] = loopback
        if self.debug:
            env["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        # The program's own limit comes first, because it can say where everybody waits.
        limit = 24 * 3600.0 if self.timeout is None else self.timeout + 30
        return {
            "rank": rank,
            "ranks": self.n,
            "store": store,
            "timeout": limit,
            "debug": self.debug,
            "threads": max(1, _cores() // self.n),
            "env": env,
            "cwd": os.getcwd(),
            "path": [p or os.getcwd() for p in sys.path],
            "argv": sys.argv,
        }

    @property
    def alive(self) -> bool:
        """Whether all ranks are there and `run` can be called."""
        return bool(self._ranks) and all(p.code() is None for p in self._ranks)

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [p.pid for p in self._ranks]

    def run(
        self,
        fn: Callable,
        *args,
        timeout: float | None = None,
        on_output: Output | None = None,
        **kwargs,
    ) -> list:
        """Call `fn(*args, **kwargs)` on every rank; results in rank order.

        `timeout` and `on_output` replace those of this object for one call. After a `RankFailure`
        the ranks are gone (unless `keep`): make new ones.
        """
        if not callable(fn):
            raise TypeError(f"run needs a function to call on every rank, got {fn!r}")
        _check_timeout(timeout)
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("these ranks are busy with another call")
        try:
            if not self.alive:
                raise RuntimeError("these ranks have ended: make new ones with Ranks(n)")
            call = pickle.dumps(("call", _dumps(fn, args, kwargs)))
            for process in self._ranks:
                process.send_bytes(call)
            limit = self.timeout if timeout is None else timeout
            return self._collect("done", limit, on_output or self._on_output)
        except RankFailure:
            raise  # `_failure` has decided what becomes of the ranks
        except BaseException:
            if sys.exc_info()[0] not in (TypeError, pickle.PicklingError):
                self.kill()
            raise
        finally:
            self._busy.release()

    def where(self) -> dict[int, str]:
        """What every rank is doing right now, in words. May be called from another thread."""
        raise NotImplementedError

    def kill(self) -> None:
        """End all ranks at once, whatever they are doing."""
        for process in self._ranks:
            process.kill()
        for process in self._ranks:
            process.close()
        self._ranks = []
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def close(self) -> None:
        """End the ranks in order; after 2 seconds by force."""
        for process in self._ranks:
            try:
                process.send_bytes(pickle.dumps(("bye",)))
            except OSError:
                pass
        end = time.monotonic() + 2
        for process in self._ranks:
            process.wait(end - time.monotonic())
        self.kill()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_ranks", None):
            self.kill()

    # ------------------------------------------------------------------ waiting for the answers

    def _collect(self, final: str, limit: float | None, emit: Output) -> list:
        waiting = set(range(self.n))
        results: list[Any] = [None] * self.n
        errors: dict[int, dict] = {}  # in order of arrival
        deadline = None if limit is None else time.monotonic() + limit
        give_up = None
        head = ""
        try:
            while waiting:
                now = time.monotonic()
                if deadline is not None and now >= deadline:
                    head = f"not finished after {limit:g} s"
                    break
                if give_up is not None and now >= give_up:
                    break
                ends = [t for t in (deadline, give_up, now + 0.2) if t is not None]
                for rank in self._ready(waiting, min(ends) - now, emit):
                    message = self._ranks[rank].receive()
                    self._ranks[rank].drain(emit)
                    if message[0] == final:
                        waiting.discard(rank)
                        if final == "done":
                            results[rank] = self._ranks[rank].receive_result()
                    elif message[0] == "error":
                        waiting.discard(rank)
                        errors[rank] = message[1]
                        give_up = give_up or time.monotonic() + GRACE
        except KeyboardInterrupt:
            head = "interrupted"
        if not errors and not head:
            return results
        raise self._failure(head, waiting, errors)

    def _ready(self, waiting: set[int], seconds: float, emit: Output) -> list[int]:
        """Pass output on for at most `seconds`; the ranks that have a message or have died."""
        sources: dict[Any, _Process] = {}
        for rank in waiting:
            for source in self._ranks[rank].sources():
                sources[source] = self._ranks[rank]
        for source in wait(list(sources), max(0.0, seconds)):
            sources[source].drain(emit)
        return [r for r in sorted(waiting) if self._ranks[r].has_message()]

    def _snapshots(self, ranks: set[int]) -> dict[int, dict]:
        answers: dict[int, dict] = {}
        asked = set()
        for rank in ranks:
            try:
                self._ranks[rank].send_bytes(pickle.dumps(("where", 0)))
                asked.add(rank)
            except OSError:
                pass
        end = time.monotonic() + 1
        while asked - set(answers) and time.monotonic() < end:
            for rank in self._ready(asked - set(answers), 0.1, lambda *_: None):
                message = self._ranks[rank].receive()
                if message[0] == "where":
                    answers[rank] = message[2]
                elif message[0] == "error":
                    asked.discard(rank)
        return answers

    def _failure(self, head: str, waiting: set[int], errors: dict[int, dict]) -> RankFailure:
        snaps = self._snapshots(waiting)
        if waiting or not self.keep:
            self.kill()
        states = {}
        for rank in range(self.n):
            if rank in errors:
                error = errors[rank]
                states[rank] = error.get("state") or watchdog.raised(error)
            elif rank in snaps:
                states[rank] = watchdog.doing(snaps[rank])
            elif rank in waiting:
                states[rank] = (
                    "did not answer (stopped, or inside a call that holds the interpreter)"
                )
            else:
                states[rank] = "finished"
        if errors:
            first = min(errors, key=lambda r: (errors[r]["consequence"], list(errors).index(r)))
            same = [r for r in errors if errors[r]["message"] == errors[first]["message"]]
            first = min(same)
            text = watchdog.format_error(errors[first])
            short = watchdog.format_error(errors[first], shorten=True)
            lines = [f"rank {first} failed", short]
        else:
            first = min(waiting)
            text = watchdog.format_frames(snaps[first]["frames"]) if first in snaps else ""
            lines = [head]
        for rank, words in states.items():
            if errors and rank == first:
                continue
            if errors and rank in errors and errors[rank]["message"] == errors[first]["message"]:
                words = "same error"
            lines.append(f"rank {rank}: {words}")
        return RankFailure("\n".join(lines), first, text, states)


def print_output(rank: int, stream: str, line: str) -> None:
    """Show what a rank printed, marked with the rank."""
    if not line.endswith("\r"):
        print(f"[rank {rank}] {line}", file=getattr(sys, stream), flush=True)


# ------------------------------------------------------------------------- processes, seen from here


class _Process:
    """One rank: its connection, its output, and its exit code once it has ended."""

    def __init__(self, rank: int, store_fd: int):
        self.rank = rank
        self._code: int | None = None
        here, there = socket.socketpair()
        self._out = {}
        writers = []
        for stream in ("stdout", "stderr"):
            read, write = os.pipe()
            os.set_blocking(read, False)
            self._out[read] = [stream, b"", 0.0]
            writers.append(write)
        status_read, status_write = os.pipe()
        try:
            _template().fork([status_write, there.fileno(), *writers, store_fd])
        finally:
            there.close()
            for fd in (*writers, status_write):
                os.close(fd)
        self._status = status_read
        self._connection = Connection(here.detach())
        self.pid = int.from_bytes(os.read(status_read, 8), "little")
        if not self.pid:
            raise RuntimeError("the template process of the ranks has ended unexpectedly")

    def send_bytes(self, data: bytes) -> None:
        self._connection.send_bytes(data)

    def sources(self) -> list:
        return [self._connection, self._status, *self._out]

    def has_message(self) -> bool:
        return self.code() is not None or self._connection.poll()

    def receive(self) -> tuple:
        try:
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            self.wait(1.0)
            code = self.code()
            how = (
                f"killed by {signal.Signals(-code).name}"
                if code and code < 0
                else f"exited with code {code}"
            )
            return "error", {
                "type": "", "message": how, "state": how, "consequence": False,
                "chain": [{"frames": [], "text": f"the process {self.pid} was {how}" if code and code < 0 else f"the process {self.pid} {how}", "link": None}],
            }  # fmt: skip

    def receive_result(self) -> Any:
        return pickle.loads(self._connection.recv_bytes())

    def drain(self, emit: Output) -> None:
        """Pass on what the rank has printed so far, as whole lines."""
        for fd, entry in self._out.items():
            while True:
                try:
                    data = os.read(fd, 1 << 16)
                except BlockingIOError:
                    break
                if not data:
                    break
                *lines, entry[1] = (entry[1] + data).split(b"\n")
                for line in lines:
                    emit(self.rank, entry[0], line.rsplit(b"\r", 1)[-1].decode("utf-8", "replace"))

    def code(self) -> int | None:
        """Exit code, negative for a signal, None while it runs."""
        if self._code is None and wait([self._status], 0):
            data = os.read(self._status, 8)
            self._code = int.from_bytes(data, "little", signed=True) if data else -signal.SIGKILL
        return self._code

    def wait(self, seconds: float) -> None:
        if self._code is None and wait([self._status], max(0.0, seconds)):
            self.code()

    def kill(self) -> None:
        if self.code() is None:
            worker.kill_rank(self.pid)

    def close(self) -> None:
        self.wait(5.0)
        self._connection.close()
        for fd in (self._status, *self._out):
            os.close(fd)


class _Template:
    """The process that ranks are forked from."""

    def __init__(self):
        here, there = socket.socketpair()
        code = (
            f"import sys; sys.path[:] = {[p or os.getcwd() for p in sys.path]!r}; "
            f"from minidist.comm.worker import serve; serve({there.fileno()}, {os.getpid()})"
        )
        self.owner = os.getpid()
        self.socket = here
        # numpy's BLAS starts a thread per core on import: the template must have none.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", code],
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            env=env,
            start_new_session=True,
        )
        there.close()
        self.lock = threading.Lock()

    def fork(self, fds: list[int]) -> None:
        with self.lock:
            socket.send_fds(self.socket, [b"F"], fds)

    def usable(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def close(self) -> None:
        self.socket.close()
        if self.owner == os.getpid():
            try:
                self.process.wait(2)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


_the_template: _Template | None = None
_template_lock = threading.Lock()


def _template() -> _Template:
    global _the_template
    with _template_lock:
        if _the_template is None or not _the_template.usable():
            _the_template = _Template()
        return _the_template


@atexit.register
def shutdown() -> None:
    """End the idle template process (it ends by itself when the program does)."""
    global _the_template
    with _template_lock:
        if _the_template is not None:
            _the_template.close()
            _the_template = None


# ------------------------------------------------------------------------------------ small helpers


def _dumps(fn: Callable, args: tuple, kwargs: dict) -> bytes:
    return worker.dumps((fn, args, kwargs))


def _nameless_store() -> tuple[int, str | None]:
    """A file for the ranks to find each other: nameless where possible, so nothing can be left over."""
    if sys.platform == "linux":
        return os.memfd_create("minidist-store"), None
    path = os.path.join(tempfile.mkdtemp(prefix="minidist-"), "store")
    return os.open(path, os.O_CREAT | os.O_RDWR, 0o600), path


def _loopback() -> str | None:
    names = (
        {name for _, name in socket.if_nameindex()} if hasattr(socket, "if_nameindex") else set()
    )
    return next((name for name in ("lo", "lo0") if name in names), None)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_timeout(timeout: float | None) -> None:
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        raise ValueError(f"timeout must be a positive number of seconds or None, got {timeout!r}")
