"""Joining a job: the ranks that torchrun started, the ranks of `launch`, or a world of one."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from minidist.comm import watchdog
from minidist.comm.processes import loopback
from minidist.comm.tuning import tune_process


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

    Under torchrun: its process group, with NCCL when every rank on this machine has a GPU of its
    own, else gloo. Inside `launch`: the group that is there, which stays as it is. Otherwise a
    world of one rank, without any port. `timeout`: seconds a rank waits for another, to join or in
    a collective; the error after that, or when a rank is lost, says what every rank was doing.
    """
    if dist.is_initialized():
        yield _context()
        return
    backend = backend or _choose_backend()
    if "nccl" in backend and not torch.cuda.is_available():
        raise RuntimeError(f"backend {backend!r} needs a GPU, and there is none here: use 'gloo'")
    local_rank, local_ranks = _env("LOCAL_RANK", 0), _env("LOCAL_WORLD_SIZE", 1)
    if "nccl" in backend:
        torch.cuda.set_device(local_rank)  # or every rank would use the first GPU
    if local_ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # a thread per core in every rank slows all of them down
    if local_ranks == _env("WORLD_SIZE", 1) and (inside := loopback()):
        # All on this machine: gloo would listen where other machines can connect.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", inside)
    limit = datetime.timedelta(seconds=timeout)
    beacon = None
    if "WORLD_SIZE" in os.environ and "nccl" not in backend:
        tune_process()
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ):
        _join(backend, timeout)
        beacon = _beacon(timeout)
    else:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit
        )
    try:
        yield _context()
    except BaseException as error:
        if beacon is not None:
            beacon.failed(error)
        raise
    else:
        if beacon is not None:
            beacon.close("finished")
    finally:
        dist.destroy_process_group()


def _join(backend: str, timeout: float) -> None:
    rank, size = _env("RANK", 0), _env("WORLD_SIZE", 1)
    by_hand = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = datetime.timedelta(seconds=timeout)
    store = _connect(limit, host=by_hand and rank == 0)
    if by_hand:
        _compare_world_sizes(store, rank, size, timeout)
    # Only the group keeps the store: rank 0's ends with it.
    dist.init_process_group(
        backend, store=_names_for("group", store), timeout=limit, rank=rank, world_size=size
    )


def _beacon(timeout: float) -> watchdog.Beacon:
    # A connection of its own: that of the process group is locked while the main thread waits.
    store = _names_for("beacon", _connect(datetime.timedelta(seconds=5)))
    limit = timeout if "nccl" in dist.get_backend() else None
    return watchdog.Beacon(store, dist.get_rank(), dist.get_world_size(), limit)


def _connect(timeout: datetime.timedelta, host: bool = False) -> dist.Store:
    """A new connection to the job's store, which torchrun keeps, or else rank 0 (`host`)."""
    return dist.TCPStore(
        os.environ["MASTER_ADDR"], _env("MASTER_PORT", 0), is_master=host, timeout=timeout,
        wait_for_workers=False, multi_tenant=True,
    )  # fmt: skip


def _names_for(purpose: str, store: dist.Store) -> dist.Store:
    """The store with names of its own for this attempt. torchrun's lives through restarts: without
    them it may still hold the address of a killed rank, and connecting to that fails."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"minidist/{purpose}/{attempt}/{os.environ['WORLD_SIZE']}", store)


def _compare_world_sizes(store: dist.Store, rank: int, size: int, timeout: float) -> None:
    """An error at once if a rank was told another size, and within the limit if one is missing.

    Without it gloo connects the ranks that are there. The one that has to be dialled waits for five
    times the limit, which is fixed in gloo, while the other waits for a rank that nobody started.
    """

    limit = datetime.timedelta(seconds=timeout)

    def told(other: int) -> str:
        """ "" if rank `other` was told the same, or what is wrong."""
        key = f"minidist/told/{other}"
        try:
            store.wait([key], limit)
        except dist.DistStoreError:
            return f"rank {other} of {size} did not join within {timeout:g} s"
        its = int(store.get(key))
        return f"rank {rank} was told WORLD_SIZE={size}, rank {other} WORLD_SIZE={its}" * (
            its != size
        )

    store.set(f"minidist/told/{rank}", str(size))
    if rank == 0:  # one rank asks all the others, who ask it: a large job has no time for all pairs
        problem = next(filter(None, map(told, range(1, size))), "")
        store.set("minidist/told/verdict", problem)
    else:
        problem = told(0)
        if not problem:  # rank 0 may be waiting for somebody, up to the limit
            store.wait(["minidist/told/verdict"], 2 * limit)
            problem = store.get("minidist/told/verdict").decode()
    if problem:
        raise (TimeoutError if "did not join" in problem else RuntimeError)(problem)


def _context() -> Context:
    rank = dist.get_rank()
    local_rank = _env("LOCAL_RANK", rank)
    backends = str(dist.get_backend_config())
    device = torch.device("cuda", local_rank) if "nccl" in backends else torch.device("cpu")
    return Context(rank, dist.get_world_size(), local_rank, device, dist.get_backend())


def _choose_backend() -> str:
    # device_count() asks the driver without starting CUDA in this process.
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return "cpu:gloo,cuda:nccl" if gpus >= _env("LOCAL_WORLD_SIZE", 1) else "gloo"


def _env(name: str, default: int) -> int:
    return int(os.environ.get(name, default))
