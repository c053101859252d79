"""Uneven inputs: ranks that have run out of batches keep the others' collectives company.

    rank 0   batch  batch  batch  batch | done
    rank 1   batch  batch | answers: announce, buffers, buckets (zeros) ... | done

Without it the rank with one batch more waits in its all-reduce for ever. Inside `DDP.join()`
every rank announces what it does next (one small all-reduce: who is present, which phase), and a
rank that has finished listens to the announcements and takes part with zeros, until nobody is
present.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from minidist.comm import collectives as coll

BUFFERS, BACKWARD = 1, 2  # the phases of a training step in which ranks talk
_open_groups: set[str] = set()


class Announcements:
    """Who is still training, asked before every phase in which ranks talk."""

    def __init__(self, group, device: torch.device, divide_by: str):
        self.group, self.device, self.divide_by = group, device, divide_by
        self.last_present = [0]

    def announce(self, phase: int = 0) -> tuple[list[int], int]:
        """Collective. Returns the ranks that are present and their phase; 0: I have finished."""
        report = torch.zeros(self.group.size() + 1, dtype=torch.int64, device=self.device)
        if phase:
            report[self.group.rank()] = 1
            report[-1] = phase
        *here, total = coll.all_reduce(report, group=self.group, by="ddp join").tolist()
        present = [rank for rank, yes in enumerate(here) if yes]
        if not present:
            return present, 0
        self.last_present = present
        if total % len(present):
            raise RuntimeError(
                "DDP.join: the ranks that still have data are not in the same phase: some are in a "
                "training forward, others already in backward. Every step must do the same on all"
            )
        return present, total // len(present)

    def answer(self, phases: dict[int, Callable[[list[int]], None]]) -> None:
        """This rank has finished: take part in what others announce, until all have finished."""
        while True:
            present, phase = self.announce()
            if not present:
                return
            phases[phase](present)


@contextmanager
def only_one(group) -> Iterator[None]:
    """Answers to one module's announcements must not meet those of another on the same group."""
    if group.group_name in _open_groups:
        raise RuntimeError(
            "DDP.join: only one module of a process group can be joined at a time: wrap modules "
            "that are trained together in one DDP"
        )
    _open_groups.add(group.group_name)
    try:
        yield
    finally:
        _open_groups.discard(group.group_name)
