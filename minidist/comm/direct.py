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

    def __init__(self, shard: Tensor, full: Tensor, op: str, pg, scratch: list[Tensor], tag: int):
        n, me = pg.size(), pg.rank()
        chunks = full.view(n, -1)
        received = list(scratch)
        if len(received) < n - 1:  # one part arrives where the sum will be
            received.append(shard)
        self.op, self.n, self.me, self.shard = op, n, me, shard
        self.parts = [chunks[me]] * n  # contribution of each rank to my chunk, in rank order
        sources, targets = _round(me, n)
        for src, part in zip(sources, received, strict=True):
            self.parts[src] = part
        tag = _TAG_REDUCE_SCATTER + 2 * tag
        self.pending = _exchange(
            [(chunks[dst], dst) for dst in targets],
            [(self.parts[src], src) for src in sources],
            pg,
            tag,
        )

    def finish(self) -> None:
        combine, total = COMBINE[self.op], self.parts[0]
        for r in range(1, self.n):
            # The sum so far lives in a received chunk: `full` stays as it was until the last
            # addition.
            out = self.shard if r == self.n - 1 else (total if r == self.me else self.parts[r])
            total = combine(total, self.parts[r], out=out)
        if self.op == "mean":
            self.shard.div_(self.n)


def parts_beside(shard: Tensor, full: Tensor, n: int) -> int:
    """How many tensors like `shard` a reduce-scatter needs beside `shard` and `full`."""
    apart = shard.untyped_storage()._cdata != full.untyped_storage()._cdata
    return max(0, n - 1 - apart)


def direct_all_gather(full: Tensor, shard: Tensor, pg, tag: int) -> list[Any]:
    n, me = pg.size(), pg.rank()
    places = full.view(n, -1)
    sources, targets = _round(me, n)
    pending = _exchange(
        [(shard, dst) for dst in targets],
        [(places[src], src) for src in sources],
        pg,
        _TAG_ALL_GATHER + 2 * tag,
    )
    if shard.data_ptr() != places[me].data_ptr():
        places[me].copy_(shard)
    return pending


def _round(me: int, n: int) -> tuple[list[int], list[int]]:
    """Whom to receive from and whom to send to: the next rank first and so on round the circle, or
    everybody would talk to rank 0 first."""
    return [(me - step) % n for step in range(1, n)], [(me + step) % n for step in range(1, n)]


def _exchange(sends: list, receives: list, pg, tag: int) -> list[Any]:
    # Sends first. While this thread writes to a peer, gloo's own thread cannot serve the same
    # connection, and if something is coming in there it asks again and again: up to 5 % of a step.
    pending = [_isend(tensor, dst, pg, tag) for tensor, dst in sends]
    return pending + [_irecv(tensor, src, pg, tag) for tensor, src in receives]


def _isend(tensor: Tensor, dst: int, pg, tag: int):
    return pg.send([tensor], dst, tag)


def _irecv(tensor: Tensor, src: int, pg, tag: int):
    return pg.recv([tensor], src, tag)
