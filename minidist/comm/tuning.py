"""What a rank does to run well on CPU cores that it shares with other ranks.

Three settings that are right for most programs and wrong for a rank: how its threads take turns,
what happens to freed memory, and how much data waits in a connection between ranks of this machine
(in any TCP connection inside the machine that this process has: gloo's cannot be told apart). They
serve torch's own strategies just as well. `MINIDIST_TUNE=0` leaves everything as the system has it.
Ranks on NCCL are not touched.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import threading
import weakref
from contextlib import suppress

import torch.distributed as dist

# Bytes that a connection takes from its sender and the receiver has not acknowledged; the system
# lets it grow to 4 MB. Measured with all-gathers and reduce-scatters of 14 M parameters: 37% less
# time at 2 ranks, 25% less at 4 (TCP's congestion control BBR; with reno 20% less at 2). Says perf:
# copies take a third less, for what was sent is still in the caches, and interrupts and wake-ups
# nearly vanish. Half as much is as good, twice not quite.
IN_FLIGHT = 256 << 10

_tuned = False
_looking = threading.Lock()
_connected: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def tune_process() -> None:
    """Once per rank, before it does anything."""
    global _tuned
    if os.environ.get("MINIDIST_TUNE", "1") == "0":
        return
    _tuned = True
    _schedule_as_batch()
    _keep_freed_memory()


def tuned() -> bool:
    """Whether this process is a rank that was prepared."""
    return _tuned


def tune_connections(group: dist.ProcessGroup) -> None:
    """Once per process group: cap what its connections inside this machine hold."""
    if not _tuned or group in _connected:
        return
    _connected.add(group)
    # gloo does not hand out its sockets. Connections to other machines need large buffers and keep
    # them; a connection inside this machine has the same address at both ends.
    with _looking:
        default = socket.getdefaulttimeout()
        socket.setdefaulttimeout(None)  # with one, Python would make what it touches non-blocking
        try:
            for descriptor in _open_files():
                with suppress(OSError):  # not connected, or closed in the meantime
                    if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                        _cap(os.dup(descriptor))
        finally:
            socket.setdefaulttimeout(default)


def _cap(descriptor: int) -> None:
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        return
    with connection:
        tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
        tcp = tcp and connection.type == socket.SOCK_STREAM
        if tcp and connection.getsockname()[0] == connection.getpeername()[0]:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, IN_FLIGHT)


def _schedule_as_batch() -> None:
    """A thread that has data to receive waits until the computing one has used its time, or waits
    itself. By default it takes the core at once, often while the other holds the lock of the very
    connection, and then spins. (Threads that are started later inherit it.) Only on Linux."""
    if hasattr(os, "SCHED_BATCH"):
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError):  # it has just ended, or a sandbox forbids it
                os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


def _keep_freed_memory() -> None:
    """Gradients, gathered parameters and receive buffers come and go in every step. The C library
    keeps what is freed instead of paying for each page again, as CUDA's caching allocator does on
    a GPU. Not on macOS or musl."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD in malloc.h
        mallopt(mmap_threshold, 32 << 20)  # the largest that glibc accepts
        mallopt(trim_threshold, (1 << 31) - 1)


def _open_files() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:  # only Linux has it
        return []
