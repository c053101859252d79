"""One clock for all ranks, so that their timelines can be laid under each other."""

from __future__ import annotations

import platform
import time

import torch

from minidist.comm import collectives
from minidist.comm.mesh import resolve_group

_clock = time.perf_counter


def difference(group=None, rounds: int = 8) -> float:
    """Seconds to add to this rank's `perf_counter()` to get rank 0's. Every rank must call it.

    Zero on the machine of rank 0, where the clock is the same one. Otherwise rank 0 answers
    `rounds` times "what time is it?", and the fastest answer counts: it is off by at most half its
    round trip.
    """
    me, n = collectives.rank(group), collectives.world_size(group)
    machines = collectives.all_gather_object(_machine(), group, by="timeline")
    shift = 0.0
    for other in range(1, n):
        if machines[other] == machines[0] or me not in (0, other):
            continue
        measured = _ask_time(other, me, group, rounds)
        if me == other:
            shift = measured
    return shift


def _ask_time(other: int, me: int, group, rounds: int) -> float:
    device = "cuda" if "nccl" in str(torch.distributed.get_backend(resolve_group(group))) else "cpu"
    message = torch.zeros(1, dtype=torch.float64, device=device)
    best, shift = float("inf"), 0.0
    for _ in range(rounds):
        if me == 0:
            collectives.recv(message, other, group=group, by="timeline")
            message.fill_(_clock())
            collectives.send(message, other, group=group, by="timeline")
            continue
        asked = _clock()
        collectives.send(message, 0, group=group, by="timeline")
        collectives.recv(message, 0, group=group, by="timeline")
        theirs, answered = message.item(), _clock()
        if answered - asked < best:
            best, shift = answered - asked, theirs - (asked + answered) / 2
    return shift


def _machine() -> str:
    try:  # changes with every boot, as the clock does, and is the same in every container
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return platform.node()
