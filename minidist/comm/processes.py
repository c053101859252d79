"""The ranks' processes as seen from the program that started them.

`Forked` ranks are copies of a template process (Linux, see `worker`); `Spawned` ranks start from
nothing (macOS, Windows, or MINIDIST_START=spawn): the same, but 2-7 seconds slower each time.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from minidist.comm import worker

Output = Callable[[int, str, str], None]
_STALLED = 5  # seconds without a byte in the middle of a message: the other side is stopped
_SHOW_UNFINISHED = 0.2  # seconds between two views of an unfinished line (progress bars)
_LONGEST_LINE = 1 << 20
_READS = 16  # at most this many blocks at a time, or an endless printer would hide the time limit


def start(rank: int, store_fd: int | None) -> Forked | Spawned:
    """A new rank that waits for its setup."""
    return Spawned(rank) if store_fd is None else Forked(rank, store_fd)


def forking() -> bool:
    """Whether ranks can be forked from a template here."""
    # A process that has loaded macOS's own libraries must not be forked.
    return sys.platform == "linux" and os.environ.get("MINIDIST_START") != "spawn"


class _Lines:
    """Cuts what one rank prints into lines and passes them on."""

    def __init__(self, rank: int, stream: str, last_words: deque[str]):
        self.rank, self.stream, self.last_words = rank, stream, last_words
        self.rest, self.changed, self.shown_at = b"", False, 0.0

    def add(self, data: bytes, emit: Output) -> None:
        *lines, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > _LONGEST_LINE:
            lines, self.rest = [*lines, self.rest], b""
        for line in lines:
            self._emit(line, emit)
        self.changed = bool(self.rest)

    def unfinished(self, emit: Output) -> None:
        if self.changed and time.monotonic() - self.shown_at > _SHOW_UNFINISHED:
            self.changed, self.shown_at = False, time.monotonic()
            emit(self.rank, self.stream, _text(self.rest) + "\r")

    def end(self, emit: Output) -> None:
        if self.rest:
            self._emit(self.rest, emit)
        self.rest, self.changed = b"", False

    def _emit(self, line: bytes, emit: Output) -> None:
        text = _text(line)
        if self.stream == "stderr":
            self.last_words.append(text)
        emit(self.rank, self.stream, text)


def _text(line: bytes) -> str:
    # Of a line that was written over itself, only what one would see at the end.
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")


class _Process:
    """What both kinds share: messages, output, and the exit code once there is one."""

    pid: int
    _connection: Connection

    def __init__(self, rank: int):
        self.rank = rank
        self.last_words: deque[str] = deque(maxlen=50)
        self._lock = threading.Lock()
        self._jammed = False
        self._code: int | None = None
        self._lines = {s: _Lines(rank, s, self.last_words) for s in ("stdout", "stderr")}

    def send(self, *message) -> None:
        """Send one message; OSError when the process has gone or does not read."""
        with self._lock:
            if self._jammed:
                raise OSError("an earlier message got stuck half-way")
            self._jammed = True
            self._connection.send_bytes(pickle.dumps(message))
            self._jammed = False

    def has_news(self) -> bool:
        return self._connection.poll() or self.code() is not None

    def receive(self, emit: Output) -> tuple:
        """The next message; ("died", exit code) when the process has ended."""
        try:
            message = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            self.kill()  # it may have closed the connection and live on
            self.wait(5.0)
            self.read_output(emit, last=True)
            return "died", self.code()
        if message[0] == "print":
            self._lines[message[1]].add(message[2], emit)
        # What was printed before the message comes first.
        self.read_output(emit, last=message[0] in ("done", "error"))
        return message

    def read_output(self, emit: Output, last: bool = False) -> None:
        """Pass on what has been printed; `last`: unfinished lines too."""
        for lines in self._lines.values():
            lines.end(emit) if last else lines.unfinished(emit)

    def wait(self, seconds: float) -> None:
        """Wait for the end of the process for at most this long."""
        end = time.monotonic() + max(0.0, seconds)
        while self.code() is None and time.monotonic() < end:
            wait([self._ended()], max(0.0, end - time.monotonic()))

    def sources(self) -> list[Any]:
        """What `multiprocessing.connection.wait` should look at."""
        return [self._connection, self._ended()]

    def crash(self) -> str:
        """The stacks that Python wrote down when the process crashed."""
        return ""

    def stopped(self, how: str = "Tt") -> bool:
        """Whether SIGSTOP (T) or a debugger (t) holds the process; False where nobody can see."""
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8") as file:
                return file.read().rpartition(")")[2].split()[0] in how
        except OSError:
            return False

    def silence(self) -> str:
        """Why this rank does not answer, in words."""
        if self.stopped():
            return f"is stopped (process {self.pid} got SIGSTOP or is in a debugger)"
        return "does not answer (in a call that holds the interpreter)"

    def code(self) -> int | None:
        raise NotImplementedError

    def _ended(self) -> Any:
        raise NotImplementedError

    def kill(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.wait(5.0)
        self._connection.close()


class Forked(_Process):
    """A rank that is a copy of the template."""

    def __init__(self, rank: int, store_fd: int):
        super().__init__(rank)
        here, there = socket.socketpair()
        # A stopped rank neither reads nor writes: a large message would wait for it for ever.
        limit = struct.pack("ll", _STALLED, 0)
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        here.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        pipes = [os.pipe() for _ in range(4)]
        theirs = [write for _, write in pipes]
        self._status, self._stdout, self._stderr, self._crash = (read for read, _ in pipes)
        self._connection = Connection(here.detach())
        try:
            self.pid = _fork([theirs[0], there.fileno(), *theirs[1:], store_fd], self._status)
        except BaseException:
            self._close_fds()
            raise
        finally:
            there.close()
            for fd in theirs:
                os.close(fd)
        os.set_blocking(self._stdout, False)
        os.set_blocking(self._stderr, False)
        os.set_blocking(self._crash, False)

    def read_output(self, emit: Output, last: bool = False) -> None:
        for fd, stream in ((self._stdout, "stdout"), (self._stderr, "stderr")):
            for _ in range(_READS):
                try:
                    data = os.read(fd, 1 << 16)
                except BlockingIOError:
                    break
                if not data:
                    break
                self._lines[stream].add(data, emit)
        super().read_output(emit, last)

    def sources(self) -> list[Any]:
        return [*super().sources(), self._stdout, self._stderr]

    def crash(self) -> str:
        try:
            return os.read(self._crash, 1 << 16).decode("utf-8", "replace")
        except BlockingIOError:
            return ""

    def code(self) -> int | None:
        if self._code is None and wait([self._status], 0):
            data = os.read(self._status, 8)
            # Nothing: the template was killed, and its ranks with it.
            self._code = int.from_bytes(data, "little", signed=True) if data else -signal.SIGKILL
        return self._code

    def _ended(self) -> int:
        return self._status

    def kill(self) -> None:
        if self.code() is None:
            worker.kill_group(self.pid)

    def close(self) -> None:
        super().close()
        self._close_fds()

    def _close_fds(self) -> None:
        for fd in (self._status, self._stdout, self._stderr, self._crash):
            os.close(fd)
        self._connection.close()


class Spawned(_Process):
    """A rank that starts from nothing."""

    def __init__(self, rank: int):
        super().__init__(rank)
        context = multiprocessing.get_context("spawn")
        self._connection, there = context.Pipe()
        self._process = context.Process(target=worker.spawned_main, args=(there,))
        with _main_hidden:
            self._process.start()
        there.close()
        self.pid = self._process.pid

    def code(self) -> int | None:
        return self._process.exitcode

    def _ended(self) -> Any:
        return self._process.sentinel

    def kill(self) -> None:
        self._process.kill()
        if hasattr(os, "killpg"):
            worker.kill_group(self.pid)


class _MainHidden:
    """While a rank is spawned, nobody finds the program's main file: multiprocessing would have the
    rank run it, and a script without `if __name__ == "__main__"` would start ranks for ever."""

    def __init__(self):
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        self.lock.acquire()
        self.main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")

    def __exit__(self, *_) -> None:
        sys.modules["__main__"] = self.main
        self.lock.release()


_main_hidden = _MainHidden()


class Template:
    """The process that ranks are forked from, one per program, started when first needed."""

    def __init__(self):
        here, there = socket.socketpair()
        self.owner, self.lock, self.socket = os.getpid(), threading.Lock(), here
        # What the program uses of these, its ranks will use as well.
        loaded = [m for m in sys.modules if m.startswith(("minidist.", "torch.distributed."))]
        code = (
            f"import sys; sys.path[:] = {search_path()!r}; from minidist.comm.worker import serve; "
            f"serve({there.fileno()}, {os.getpid()}, {loaded!r})"
        )
        # numpy's BLAS starts a thread per core when it is imported: the template must have none.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", code],
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            env=env,
            start_new_session=True,  # Ctrl-C in the terminal is for the program alone
        )
        there.close()

    def fork(self, fds: list[int], status_fd: int) -> int:
        """The process id of a new rank; 0 when the template has ended."""
        try:
            with self.lock:
                socket.send_fds(self.socket, [b"F"], fds)
        except OSError:
            return 0
        while not wait([status_fd], 0.2):
            if self.process.poll() is not None:
                return 0
        return int.from_bytes(os.read(status_fd, 8), "little")

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


_template: Template | None = None
_template_lock = threading.Lock()


def _fork(fds: list[int], status_fd: int) -> int:
    global _template
    for _ in range(2):  # an idle template may end just now
        with _template_lock:
            if _template is None or not _template.usable():
                _template = Template()
            template = _template
        pid = template.fork(fds, status_fd)
        if pid:
            return pid
    raise RuntimeError(
        "the process that ranks are copied from ended at its start, see its message on stderr "
        "(MINIDIST_START=spawn does without it)"
    )


@atexit.register
def shutdown() -> None:
    """End the idle template. It goes by itself with the program, or after five minutes of rest."""
    global _template
    with _template_lock:
        if _template is not None:
            _template.close()
            _template = None


# ------------------------------------------------------------------------------------ small helpers


def nameless_file() -> tuple[int | None, str | None]:
    """A file through which ranks find each other: (descriptor, None), or (None, path) where files
    need a name. Without a name nothing can be left over, and no port is needed either."""
    if forking():
        return os.memfd_create("minidist-store"), None
    return None, os.path.join(tempfile.mkdtemp(prefix="minidist-"), "store")


def loopback() -> str | None:
    """The name of the interface that only this machine can reach."""
    names = [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []
    return next((name for name in ("lo", "lo0") if name in names), None)


def search_path() -> list[str]:
    """Where this program finds modules, valid in any working directory."""
    return [os.path.abspath(p) for p in sys.path]
