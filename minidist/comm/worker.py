"""The other side of `launch`: one process per rank, and the template that ranks are copied from.

On Linux the ranks are forks of a template process that has torch loaded: starting four takes 0.1 s
instead of seconds, and a rank costs 5 MB of private memory instead of 140. The template never runs
an operation and has no second thread, which is what makes forking it safe. It ends with the program
that started it, and the ranks end with the template, however either of them ends.
"""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import gc
import importlib
import io
import os
import pickle
import queue
import select
import signal
import socket
import sys
import threading
import types
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from minidist.comm import watchdog

# Whatever a caller wants to keep on the ranks between two calls (notebook cells: their variables).
state: dict[str, Any] = {}

# Loaded once in the template instead of once per rank. Without torch._dynamo, the first optimizer
# or DDP of every rank would spend seconds on importing it.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch._dynamo",
    "numpy",
    "cloudpickle",
    "minidist.comm.collectives",
)
IDLE_LIMIT = (
    300  # seconds without a rank after which the template ends; the next start makes a new one
)
PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


# ---------------------------------------------------------------------------------- the template


def serve(control_fd: int, parent: int, preload: Iterable[str]) -> None:
    """Fork a rank for every request on the control socket, until its other end is closed.

    A request is one byte with six file descriptors: where to report the rank's process id and,
    later, its exit code (8 bytes each), and the five that `forked_main` takes.
    """
    for name in (*PRELOAD, *preload):
        with suppress(Exception):  # cloudpickle may be missing; what the rank needs, it will say so
            importlib.import_module(name)
    # Or the first collection in every rank would write to, and so copy, all of what they share.
    gc.freeze()
    control = socket.socket(fileno=control_fd)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # its only work is to end select()
    ranks: dict[int, int] = {}  # process id -> where to report its exit code
    template = os.getpid()
    idle = 0
    # With a time limit: the socket of a killed parent stays open if a fork of it lives on.
    while os.getppid() == parent and idle < IDLE_LIMIT:
        readable, _, _ = select.select([control, wake_read], [], [], 1.0)
        idle = idle + 1 if not ranks and not readable else 0
        if wake_read in readable:
            os.read(wake_read, 4096)
            _reap(ranks)
        if control in readable:
            request, fds, _, _ = socket.recv_fds(control, 1, 6)
            if not request:
                break
            status_fd, *rank_fds = fds
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for fd in (control_fd, wake_read, wake_write, status_fd, *ranks.values()):
                    os.close(fd)
                control.detach()
                _die_with(template)
                forked_main(*rank_fds)
            ranks[pid] = status_fd
            with suppress(BrokenPipeError):
                os.write(status_fd, pid.to_bytes(8, "little"))
            for fd in rank_fds:
                os.close(fd)
    for pid in ranks:
        kill_group(pid)
    os._exit(0)


def _reap(ranks: dict[int, int]) -> None:
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        kill_group(pid)  # what the rank itself had started, such as data loader workers
        fd = ranks.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        with suppress(BrokenPipeError):  # nobody wants to know any more
            os.write(fd, code.to_bytes(8, "little", signed=True))
        os.close(fd)


def kill_group(pid: int) -> None:
    """End a rank and everything in its process group, also when stopped or stuck in C++."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _die_with(parent: int) -> None:
    """Have Linux kill this process when its parent goes: a rank stuck in C++ cannot look itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it went before we asked
            os._exit(1)


# -------------------------------------------------------------------------------------- one rank


def forked_main(
    connection_fd: int, stdout_fd: int, stderr_fd: int, crash_fd: int, store_fd: int
) -> None:
    """Be a rank that was forked from the template. Never returns."""
    # At the level of file descriptors, so that what C++ prints before it aborts arrives as well.
    for fd, wanted in ((stdout_fd, 1), (stderr_fd, 2)):
        os.dup2(fd, wanted)
        os.close(fd)
    sys.stdout, sys.stderr = _text(1), _text(2)
    faulthandler.enable(crash_fd)  # if this process crashes: at which line
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # or all ranks, and all launches, would draw the template's numbers
    _Rank(Connection(connection_fd)).main(store_fd)


def spawned_main(connection: Connection) -> None:
    """Be a rank that started from nothing (macOS, Windows): output travels as messages."""
    rank = _Rank(connection)
    sys.stdout, sys.stderr = _Messages(rank, "stdout"), _Messages(rank, "stderr")
    rank.main(None)


def _text(fd: int) -> io.TextIOWrapper:
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


class _Messages(io.TextIOBase):
    def __init__(self, rank: _Rank, stream: str):
        self.rank, self.stream = rank, stream

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.rank.send("print", self.stream, text.encode("utf-8", "backslashreplace"))
        return len(text)


class _Rank:
    """Runs calls on the main thread, while a second thread answers "where are you?"."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self.lock = threading.Lock()
        self.calls: queue.SimpleQueue = queue.SimpleQueue()

    def main(self, store_fd: int | None) -> None:
        if hasattr(os, "setpgid") and os.getpgid(0) != os.getpid():
            # A process group of its own. Ctrl-C in the terminal reaches the program alone, which
            # decides; and the rank can be ended together with everything it starts.
            os.setpgid(0, 0)
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
        try:
            (setup,) = pickle.loads(self.connection.recv_bytes())
        except EOFError:
            os._exit(1)  # the program has gone
        try:
            self.join_group(setup, store_fd)
        except BaseException as error:
            self.send("error", watchdog.describe(error))
        else:
            self.loop()
        _flush()
        os._exit(0)  # no destructors: gloo's would wait for ranks that have already gone

    def join_group(self, setup: dict, store_fd: int | None) -> None:
        os.chdir(setup["cwd"])
        os.environ.clear()
        os.environ.update(setup["env"])
        sys.path[:] = setup["path"]
        sys.argv[:] = setup["argv"]
        threading.Thread(target=self.listen, daemon=True, name=watchdog.LISTENER).start()
        import torch
        import torch.distributed as dist

        from minidist.comm.tuning import tune_process

        # Before any operation: a thread per core in every rank would slow all of them down.
        torch.set_num_threads(setup["threads"])
        if setup["tune"] and "nccl" not in setup["backend"]:
            tune_process()
        if setup["debug"]:
            from minidist.comm import checks

            checks.enable()
        if "nccl" in setup["backend"]:
            torch.cuda.set_device(setup["rank"])
        dist.init_process_group(
            setup["backend"],
            store=dist.FileStore(setup["store"] or f"/proc/self/fd/{store_fd}", setup["ranks"]),
            rank=setup["rank"],
            world_size=setup["ranks"],
            # Never reached: the program has its own limit, and can say where everybody waits.
            timeout=datetime.timedelta(days=1),
        )
        self.send("done", dumps(None))

    def listen(self) -> None:
        while True:
            try:
                kind, *content = pickle.loads(self.connection.recv_bytes())
            except (EOFError, OSError):
                # The program is gone, and the main thread may be stuck in C++.
                os._exit(1)
            if kind == "where":
                self.send("where", content[0], watchdog.snapshot())
            else:
                self.calls.put((kind, *content))

    def loop(self) -> None:
        while True:
            kind, *content = self.calls.get()
            if kind == "bye":
                return
            answer = self.call(content[0])
            _flush()  # what was printed arrives before the answer
            self.send(*answer)

    def call(self, packed: bytes) -> tuple:
        ledger = sys.modules.get("minidist.comm.ledger")
        if ledger is not None:
            ledger.last.clear()  # or the story of a failure would begin in an earlier call
        try:
            function, args, kwargs = pickle.loads(packed)
            result = function(*args, **kwargs)
        except BaseException as error:
            return "error", watchdog.describe(error)
        try:
            return "done", dumps(result)
        except Exception as error:
            wrapped = TypeError(
                f"the result, a {type(result).__name__}, cannot be sent back: {error}. "
                "Return numbers, strings, tensors, or lists and dicts of these."
            )
            return "error", watchdog.describe(wrapped)

    def send(self, kind: str, *content) -> None:
        message = pickle.dumps((kind, *content))
        with self.lock:
            self.connection.send_bytes(message)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed by the user
            stream.flush()


# ------------------------------------------------------------------------------------- transport


def dumps(value: Any) -> bytes:
    """Pickle by value: functions and classes of notebooks, and tensors as CPU copies.

    Uses cloudpickle where it is installed; without it only functions that can be imported travel.
    """
    out = io.BytesIO()
    _pickler()(out, protocol=5).dump(value)
    return out.getvalue()


_ByValue: type[pickle.Pickler] | None = None


def _pickler() -> type[pickle.Pickler]:
    global _ByValue
    if _ByValue is None:
        try:
            from cloudpickle import Pickler as base
        except ImportError:
            base = pickle.Pickler

        class ByValue(base):
            def reducer_override(self, value):
                if type(value) is types.CodeType and hasattr(base, "dispatch_table"):
                    # cloudpickle drops the file name, by which tracebacks find the line.
                    _, parts = base.dispatch_table[types.CodeType](value)
                    return _code, (parts, value.co_filename)
                torch = sys.modules.get("torch")
                if torch is not None and type(value) is torch.Tensor and not _travels(value):
                    copy = value.detach().cpu().clone().requires_grad_(value.requires_grad)
                    return copy.__reduce_ex__(5)
                if hasattr(base, "reducer_override"):
                    return super().reducer_override(value)
                return NotImplemented

        _ByValue = ByValue
    return _ByValue


def by_value() -> bool:
    """Whether functions that cannot be imported can travel."""
    return _pickler().__mro__[1] is not pickle.Pickler


def _code(parts: tuple, file: str) -> types.CodeType:
    return types.CodeType(*parts).replace(co_filename=file)


def _travels(tensor) -> bool:
    """False where pickle would take a whole storage along for a small view, or name a device."""
    if tensor.device.type != "cpu" or tensor.layout is not sys.modules["torch"].strided:
        return tensor.device.type in ("cpu", "meta")
    return tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size()
