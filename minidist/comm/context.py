"""Joining a job: the ranks that torchrun started, the ranks of `launch`, or a world of one."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Context:
    """Who this process is in the job."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str


@contextmanager
def init(backend: str | None = None, timeout: float = 60) -> Iterator[Context]:
    """Join the job that the environment describes; leave it at the end, also after an exception.

    Under torchrun: its process group, with NCCL when every local rank has a GPU of its own, else
    gloo. Inside `launch`: the group that is already there, which is left as it is. Otherwise a world
    of one rank, without any port. `timeout`: seconds a rank waits for another in a collective.
    """
    if dist.is_initialized():
        yield _context()
        return
    device, backend = _choose(backend)
    limit = datetime.timedelta(seconds=timeout)
    if dist.is_torchelastic_launched() or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ):
        dist.init_process_group(backend, timeout=limit)
    else:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit
        )
    try:
        yield _context()
    finally:
        dist.destroy_process_group()


def _context() -> Context:
    local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    backend = dist.get_backend()
    device = torch.device("cuda", local_rank) if "nccl" in backend else torch.device("cpu")
    return Context(dist.get_rank(), dist.get_world_size(), local_rank, device, backend)


def _choose(backend: str | None) -> tuple[torch.device, str]:
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if backend is None:
        enough = torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
        backend = "cpu:gloo,cuda:nccl" if enough else "gloo"
    if "nccl" in backend:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank), backend
    return torch.device("cpu"), backend
