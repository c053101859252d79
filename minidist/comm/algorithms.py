"""How a collective is made: the classic algorithms, written from send and receive alone.

Nothing in the strategies calls these (`collectives.py` uses the backend's own, or the direct
exchange). They are here to be read, run and measured beside each other in chapter 0: same result,
different number of rounds (latency) and different bytes per rank (bandwidth).

    all-reduce of B bytes, N ranks   rounds      bytes sent by the busiest rank
    central (a parameter server)     2           (N-1) B      rank 0 sends everything
    tree                             2 log2 N    log2(N) B    the root, child after child
    ring                             2 (N-1)     2 (N-1)/N B  every rank the same
    direct                           2           2 (N-1)/N B  the same, to all peers at once

`seconds` turns a row into time on links with a latency and a bandwidth. Thakur et al. 2005,
"Optimization of Collective Communication Operations in MPICH"; Patarasuk and Yuan 2009 (ring).
"""

from __future__ import annotations

from math import ceil, log2

import torch
from torch import Tensor

from minidist.comm import collectives as coll

# --- ring: every rank talks only to its neighbours ----------------------------------------------


def ring_all_reduce(tensor: Tensor, group=None) -> Tensor:
    """Sum over ranks, in place. Half the ring's work adds up chunks, the other half spreads the
    sums."""
    chunks = _chunks(tensor, group)
    _ring_reduce_scatter(chunks, group)
    _ring_all_gather(chunks, group)
    return _unchunk(chunks, tensor)


def ring_reduce_scatter(tensor: Tensor, group=None) -> Tensor:
    """This rank's chunk (of N equal ones, dimension 0) of the sum over ranks. `tensor` is not
    changed."""
    n = coll.world_size(group)
    if tensor.shape[0] % n:
        raise ValueError(f"dimension 0 has {tensor.shape[0]} rows, not a multiple of {n} ranks")
    chunks = list(tensor.clone().chunk(n))
    _ring_reduce_scatter(chunks, group)
    return chunks[coll.rank(group)]


def ring_all_gather(chunk: Tensor, group=None) -> Tensor:
    """All ranks' chunks end to end along dimension 0."""
    chunks = [torch.empty_like(chunk) for _ in range(coll.world_size(group))]
    chunks[coll.rank(group)] = chunk.contiguous()
    _ring_all_gather(chunks, group)
    return torch.cat(chunks)


def _ring_reduce_scatter(chunks: list[Tensor], group) -> None:
    # In round k rank r passes on the partial sum of chunk r-k-1 and adds its own part to the one
    # that arrives. After N-1 rounds the sum of chunk r is complete on rank r.
    rank, n = coll.rank(group), coll.world_size(group)
    for k in range(n - 1):
        out, into = (rank - k - 1) % n, (rank - k - 2) % n
        chunks[into] += _swap(chunks[out], torch.empty_like(chunks[into]), 1, group)


def _ring_all_gather(chunks: list[Tensor], group) -> None:
    # In round k rank r passes on chunk r-k, which it received the round before.
    rank, n = coll.rank(group), coll.world_size(group)
    for k in range(n - 1):
        out, into = (rank - k) % n, (rank - k - 1) % n
        chunks[into] = _swap(chunks[out], chunks[into], 1, group)


# --- tree: the distance doubles in every round ----------------------------------------------------


def tree_broadcast(tensor: Tensor, root: int = 0, group=None) -> Tensor:
    """Rank `root`'s values on every rank, in place: those who have them pass them on, log2 N
    rounds."""
    n = coll.world_size(group)
    place = (coll.rank(group) - root) % n  # the root is place 0
    reach = 1  # places below it have the values
    while reach < n:
        if place < reach and place + reach < n:
            coll.send(tensor, (place + reach + root) % n, group=group, by="tree broadcast")
        elif reach <= place < 2 * reach:
            coll.recv(tensor, (place - reach + root) % n, group=group, by="tree broadcast")
        reach *= 2
    return tensor


def tree_reduce(tensor: Tensor, root: int = 0, group=None) -> Tensor:
    """The sum over ranks on rank `root`, in place; the other ranks are left with partial sums."""
    n = coll.world_size(group)
    place = (coll.rank(group) - root) % n
    reach = 1 << max(0, ceil(log2(n)) - 1) if n > 1 else 0
    while reach:  # the broadcast tree, walked from the leaves to the root
        if place < reach and place + reach < n:
            part = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            tensor += coll.recv(part, (place + reach + root) % n, group=group, by="tree reduce")
        elif reach <= place < 2 * reach:
            coll.send(tensor, (place - reach + root) % n, group=group, by="tree reduce")
        reach //= 2
    return tensor


def tree_all_reduce(tensor: Tensor, group=None) -> Tensor:
    """Sum over ranks, in place: up the tree to rank 0, and down again."""
    return tree_broadcast(tree_reduce(tensor, 0, group), 0, group)


# --- direct: everybody with everybody, one round each -------------------------------------------


def direct_all_reduce(tensor: Tensor, group=None) -> Tensor:
    """Sum over ranks, in place: chunk j goes straight to rank j, the sums go straight to
    everybody."""
    rank, n = coll.rank(group), coll.world_size(group)
    chunks = _chunks(tensor, group)
    received = [torch.empty_like(chunks[rank]) for _ in range(n)]
    _exchange([(received[r], chunks[r], r) for r in range(n) if r != rank], group)
    for r in range(n):
        if r != rank:
            chunks[rank] += received[r]
    _exchange([(chunks[r], chunks[rank], r) for r in range(n) if r != rank], group)
    return _unchunk(chunks, tensor)


# --- central: what one would write first --------------------------------------------------------


def central_all_reduce(tensor: Tensor, group=None) -> Tensor:
    """Sum over ranks, in place, through rank 0: its link carries everything and all others wait."""
    rank, n = coll.rank(group), coll.world_size(group)
    if rank:
        coll.send(tensor, 0, group=group, by="central")
        return coll.recv(tensor, 0, group=group, by="central")
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(1, n)]
    for work in [coll.irecv(p, r, group=group, by="central") for r, p in enumerate(parts, 1)]:
        tensor += work.wait()
    for work in [coll.isend(tensor, r, group=group, by="central") for r in range(1, n)]:
        work.wait()
    return tensor


# --- what they cost -----------------------------------------------------------------------------

ALL_REDUCE = {
    "central": central_all_reduce,
    "tree": tree_all_reduce,
    "ring": ring_all_reduce,
    "direct": direct_all_reduce,
}


def all_reduce_cost(algorithm: str, ranks: int, nbytes: float) -> tuple[int, float]:
    """Rounds, and bytes that the busiest rank sends, for an all-reduce of `nbytes` (see the
    table)."""
    if algorithm not in ALL_REDUCE:
        raise ValueError(f"unknown algorithm {algorithm!r}: use one of {', '.join(ALL_REDUCE)}")
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    if ranks == 1:
        return 0, 0.0
    depth = ceil(log2(ranks))
    share = 2 * (ranks - 1) / ranks * nbytes
    return {
        "central": (2, (ranks - 1) * nbytes),
        "tree": (2 * depth, depth * nbytes),
        "ring": (2 * (ranks - 1), share),
        "direct": (2, share),
    }[algorithm]


def seconds(algorithm: str, ranks: int, nbytes: float, latency: float, bandwidth: float) -> float:
    """Time of an all-reduce: rounds x `latency` (seconds) + bytes on the busiest rank / `bandwidth`
    (bytes per second in each direction). The tree's two phases do not overlap: it pays the root's
    bytes in both, received on the way up and sent on the way down."""
    rounds, sent = all_reduce_cost(algorithm, ranks, nbytes)
    phases = 2 if algorithm in ("tree", "central") else 1
    return rounds * latency + phases * sent / bandwidth


# --- helpers ------------------------------------------------------------------------------------


def _chunks(tensor: Tensor, group) -> list[Tensor]:
    n = coll.world_size(group)
    flat = tensor.flatten().clone()
    short = -flat.numel() % n
    if short:  # a ring needs equal chunks; the padding is cut off again in _unchunk
        flat = torch.cat([flat, flat.new_zeros(short)])
    return list(flat.chunk(n)) if flat.numel() else [flat] * n


def _unchunk(chunks: list[Tensor], tensor: Tensor) -> Tensor:
    flat = torch.cat(chunks)[: tensor.numel()]
    return tensor.copy_(flat.view(tensor.shape))


def _swap(out: Tensor, into: Tensor, distance: int, group) -> Tensor:
    """Send to the rank `distance` ahead while receiving from the one behind."""
    rank, n = coll.rank(group), coll.world_size(group)
    # Both are started before either is waited for: if every rank first sent and waited, none would
    # be receiving, and messages too large for the buffers in between would never leave.
    receiving = coll.irecv(into, (rank - distance) % n, group=group, by="ring")
    sending = coll.isend(out, (rank + distance) % n, group=group, by="ring")
    sending.wait()
    return receiving.wait()


def _exchange(messages: list[tuple[Tensor, Tensor, int]], group) -> None:
    works = [coll.irecv(into, peer, group=group, by="direct") for into, _, peer in messages]
    works += [coll.isend(out, peer, group=group, by="direct") for _, out, peer in messages]
    for work in works:
        work.wait()
