"""What runs on the other side of `launch`: one process per rank, and the template they are copied from.

On Linux the ranks are forks of a template process that has torch loaded: a start takes about 0.1 s
instead of seconds, and costs 5 MB of private memory per rank. The template never runs an operation
and has no second thread, so that forking it is safe. It dies with the program that started it, and
its ranks die with it, however they end.
"""

from __future__ import annotations

import ctypes
import datetime
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
from multiprocessing.connection import Connection
from typing import Any

# Whatever a caller wants to keep on the ranks between two runs (notebook cells: their variables).
state: dict[str, Any] = {}

# Imported once in the template instead of once per rank. Without torch._dynamo the first optimizer or
# DDP of every rank would spend seconds on importing it.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch._dynamo",
    "numpy",
    "cloudpickle",
    "minidist.comm.collectives",
    "minidist.comm.watchdog",
)
PR_SET_PDEATHSIG = 1


# ---------------------------------------------------------------------------------- the template


def serve(control_fd: int, parent: int) -> None:
    """Fork a rank for every request on the control socket, until its other end is closed.

    A request is one byte with five file descriptors: where to report the rank's process id and exit
    code, and the four that `rank_main` takes.
    """
    for name in PRELOAD:
        try:
            __import__(name)
        except ImportError:  # cloudpickle may be missing; whatever else is, the rank will say so
            pass
    control = socket.socket(fileno=control_fd)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # its only work is to wake up select()
    ranks: dict[int, int] = {}  # process id -> where its exit code is reported
    me = os.getpid()
    try:
        # The time limit notices a parent that was killed while a fork of it still holds the socket.
        while os.getppid() == parent:
            readable, _, _ = select.select([control, wake_read], [], [], 1.0)
            if wake_read in readable:
                os.read(wake_read, 4096)
                _reap(ranks)
            if control in readable:
                request, fds, _, _ = socket.recv_fds(control, 1, 5)
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
                    _die_with(me)
                    rank_main(*rank_fds)
                os.write(status_fd, pid.to_bytes(8, "little"))
                ranks[pid] = status_fd
                for fd in rank_fds:
                    os.close(fd)
    finally:
        if os.getpid() == me:
            for pid in ranks:
                kill_rank(pid)
        os._exit(0)


def _reap(ranks: dict[int, int]) -> None:
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        kill_rank(pid)  # what the rank itself had started, such as data loader workers
        fd = ranks.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        try:
            os.write(fd, code.to_bytes(8, "little", signed=True))
        except BrokenPipeError:  # nobody wants to know any more
            pass
        os.close(fd)


def kill_rank(pid: int) -> None:
    """End a rank and everything in its process group, also when it is stopped or stuck in C++."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _die_with(parent: int) -> None:
    """Ask Linux to kill this process when its parent goes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it went before we asked
            os._exit(1)


# -------------------------------------------------------------------------------------- one rank


def rank_main(connection_fd: int, stdout_fd: int, stderr_fd: int, store_fd: int) -> None:
    """Be one rank: join the process group, then run what arrives on the connection. Never returns."""
    # A process group of its own: Ctrl-C in the terminal reaches the program, which decides, and the
    # rank can be ended together with everything it starts.
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    os.dup2(stdout_fd, 1)
    os.dup2(stderr_fd, 2)
    os.close(stdout_fd)
    os.close(stderr_fd)
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    sys.stdout = _text(1)
    sys.stderr = _text(2)
    connection = Connection(connection_fd)
    rank = _Rank(connection)
    try:
        rank.join_group(pickle.loads(connection.recv_bytes()), store_fd)
        rank.loop()
    except EOFError:
        pass
    except BaseException as error:
        rank.report(error)
    os._exit(0)


def _text(fd: int) -> io.TextIOWrapper:
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


class _Rank:
    """Runs calls on the main thread, while a second thread answers "where are you?"."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self.lock = threading.Lock()
        self.calls: queue.SimpleQueue = queue.SimpleQueue()

    def send(self, kind: str, *content) -> None:
        message = dumps((kind, *content))
        with self.lock:
            self.connection.send_bytes(message)

    def join_group(self, setup: dict, store_fd: int) -> None:
        os.chdir(setup["cwd"])
        os.environ.clear()
        os.environ.update(setup["env"])
        sys.path[:] = setup["path"]
        sys.argv[:] = setup["argv"]
        import torch
        import torch.distributed as dist

        # Before any operation: as many threads as cores in every rank would slow all of them down.
        torch.set_num_threads(setup["threads"])
        if setup["debug"]:
            dist.set_debug_level(dist.DebugLevel.DETAIL)
        store = dist.FileStore(setup["store"] or f"/proc/self/fd/{store_fd}", setup["ranks"])
        dist.init_process_group(
            "gloo",
            store=store,
            rank=setup["rank"],
            world_size=setup["ranks"],
            timeout=datetime.timedelta(seconds=setup["timeout"]),
        )
        threading.Thread(target=self.listen, daemon=True, name="minidist-listen").start()
        self.send("ready")

    def listen(self) -> None:
        from minidist.comm import watchdog

        while True:
            try:
                kind, *content = pickle.loads(self.connection.recv_bytes())
            except (EOFError, OSError):
                # The program is gone. The main thread may be stuck in C++ and cannot be asked.
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
            try:
                function, args, kwargs = pickle.loads(content[0])
                result = dumps(function(*args, **kwargs))
                function = args = kwargs = None
            except BaseException as error:
                self.report(error)
            else:
                _flush()
                with self.lock:
                    self.connection.send_bytes(pickle.dumps(("done",)))
                    self.connection.send_bytes(result)

    def report(self, error: BaseException) -> None:
        from minidist.comm import watchdog

        _flush()
        self.send("error", watchdog.describe(error))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass


# ------------------------------------------------------------------------------------- transport


def dumps(value: Any) -> bytes:
    """Pickle by value: functions and classes that cannot be imported, CPU copies of tensors."""
    out = io.BytesIO()
    _pickler()(out).dump(value)
    return out.getvalue()


def _named_code(arguments: tuple, file: str) -> types.CodeType:
    return types.CodeType(*arguments).replace(co_filename=file)


_Pickler = None


def _pickler():
    global _Pickler
    if _Pickler is None:
        try:
            from cloudpickle import Pickler as base
        except ImportError:
            base = pickle.Pickler

        class ByValue(base):
            def reducer_override(self, value):
                if type(value) is types.CodeType and hasattr(base, "dispatch_table"):
                    # cloudpickle forgets the file; tracebacks need it to show the line.
                    return _named_code, (
                        base.dispatch_table[types.CodeType](value)[1],
                        value.co_filename,
                    )
                torch = sys.modules.get("torch")
                if torch is not None and type(value) is torch.Tensor:
                    whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
                    if value.device.type not in ("cpu", "meta") or not whole:
                        # A view would take its whole storage along, and a device tensor a device.
                        copy = value.detach().cpu().clone().requires_grad_(value.requires_grad)
                        return copy.__reduce_ex__(5)
                if hasattr(base, "reducer_override"):
                    return super().reducer_override(value)
                return NotImplemented

        _Pickler = ByValue
    return _Pickler
