"""What the operating system says, to keep our own bookkeeping honest.

Two independent witnesses: the allocator and the kernel for memory, the network device for traffic.
Each function returns None where its source does not exist (macOS, Windows, musl), never a guess.
"""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class LoopbackCounters(NamedTuple):
    """Counters of the loopback device since boot, for the whole network namespace.

    What one process sends to another on this machine is counted once in `bytes` (headers included).
    """

    bytes: int
    packets: int


def resident_bytes() -> int | None:
    """Physical memory of this process in bytes (RSS).

    Good for whole processes and for offload. Inside a training step it says little: the allocator
    keeps freed pages and reuses them without asking the kernel.
    """
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * _PAGE
    except OSError:
        try:
            import psutil
        except ImportError:
            return None
        return psutil.Process().memory_info().rss


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def _find_mallinfo2():
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):
        return None  # glibc has it from 2.33 on; musl, macOS and Windows do not
    function.restype = _Mallinfo2
    return function


_mallinfo2 = _find_mallinfo2()


def malloced() -> int | None:
    """Bytes that malloc has handed out in this process and not got back (glibc only), about 3 us.

    Sees every tensor on the CPU, also those made inside C++ that no Python hook can see, and
    `storage.resize_(0)`. Also counts Python's own large objects, so compare differences. Small
    blocks count with the allocator's rounding: it is within 0.25 MB for a training step.
    """
    if _mallinfo2 is None:
        return None
    info = _mallinfo2()
    return info.uordblks + info.hblkhd


def loopback_counters() -> LoopbackCounters | None:
    """Bytes and packets on the loopback device, or None without /proc (not Linux).

    gloo sends between local ranks through this device. A TCP segment carries up to 64 KiB there,
    so headers add about 0.1 % to large messages. Read from /proc/self and not from /sys, which
    shows the namespace that mounted it instead of the caller's.
    """
    try:
        with open("/proc/self/net/dev", encoding="ascii") as devices:
            for line in devices:
                name, _, counters = line.partition(":")
                if name.strip() == "lo":
                    received_and_sent = (
                        counters.split()
                    )  # eight columns each, bytes and packets first
                    return LoopbackCounters(int(received_and_sent[8]), int(received_and_sent[9]))
    except OSError:
        pass
    return None
