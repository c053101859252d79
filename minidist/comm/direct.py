"""The direct exchange: every chunk goes straight to the rank that needs it, all messages at once.

    reduce-scatter   rank r sends chunk j of its buffer to rank j, and adds up the N chunks it owns
    all-gather       rank r sends its chunk to everybody, straight into its place

Two rounds, and each rank sends (N-1)/N of the buffer, the least possible. On gloo this is 2-8 times
faster than the built-in reduce_scatter and all_gather; over a network with many ranks a ring would
spread the load better, and there NCCL is used anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

COMBINE = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}
# gloo matches messages by (peer, tag) in the order they were posted: our own exchanges keep tags of
# their own (odd and even numbers from here on), or a pipeline's activation could be taken for a
# chunk of a gradient.
_TAG_REDUCE_SCATTER, _TAG_ALL_GATHER = 0x7F000001, 0x7F000002


class DirectReduceScatter:
    """Every rank sends chunk j of its buffer to rank j, and adds up the N chunks it owns."""

    def __init__(self, shard: Tensor, full: Tensor, op: str, pg, scratch: Tensor | None, tag: int):
        n, me = pg.size(), pg.rank()
        chunks = full.view(n, -1)
        if scratch is None:
            scratch = full.new_empty((n - 1) * shard.numel())
        received = scratch.view(n - 1, -1)
        self.op, self.n, self.me, self.shard = op, n, me, shard
        self.parts = [chunks[me]] * n  # contribution of each rank to my chunk, in rank order
        self.pending = []
        tag = _TAG_REDUCE_SCATTER + 2 * tag
        for step in range(1, n):
            # Start with the next rank and go round, or everybody would talk to rank 0 first.
            src, dst = (me - step) % n, (me + step) % n
            self.parts[src] = received[step - 1]
            self.pending.append(_irecv(received[step - 1], src, pg, tag))
            self.pending.append(_isend(chunks[dst], dst, pg, tag))

    def finish(self) -> None:
        combine, total = COMBINE[self.op], self.parts[0]
        for r in range(1, self.n):
            # The sum so far lives in a received chunk: `full` stays as it was until the last
            # addition.
            out = self.shard if r == self.n - 1 else (total if r == self.me else self.parts[r])
            total = combine(total, self.parts[r], out=out)
        if self.op == "mean":
            self.shard.div_(self.n)


def direct_all_gather(full: Tensor, shard: Tensor, pg, tag: int) -> list[Any]:
    n, me = pg.size(), pg.rank()
    tag = _TAG_ALL_GATHER + 2 * tag
    places, pending = full.view(n, -1), []
    for step in range(1, n):
        src, dst = (me - step) % n, (me + step) % n
        pending.append(_irecv(places[src], src, pg, tag))
        pending.append(_isend(shard, dst, pg, tag))
    if shard.data_ptr() != places[me].data_ptr():
        places[me].copy_(shard)
    return pending


def _isend(tensor: Tensor, dst: int, pg, tag: int):
    return pg.send([tensor], dst, tag)


def _irecv(tensor: Tensor, src: int, pg, tag: int):
    return pg.recv([tensor], src, tag)
