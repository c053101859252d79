"""Collectives that autograd can go through: what each does forward, and what its gradient does.

    name               forward                backward         where
    copy_to_ranks  f   identity               sum              entry of a column cut
    sum_over_ranks g   sum                    identity         exit of a row cut
    gather_slices      all-gather along dim   reduce-scatter   entry, tokens are sharded; any loss
                                                               that every rank computes itself
    sum_slices         reduce-scatter         all-gather       exit, tokens are sharded
    keep_slice         own slice              all-gather       from replicated to sharded
    join_slices        all-gather             own slice        from sharded to replicated

Each row read from right to left is another row: the gradient of a gather is a sum-and-scatter,
that of a copy is a sum. A plain all-gather without such a backward cuts the graph, and the loss
trains on a part of its gradient. Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section
4.2.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minidist.comm import collectives as coll
from minidist.comm.mesh import resolve_group

TOKENS = -2  # activations are [..., tokens, features]; sequence parallel cuts the tokens


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_op = backward
        return forward(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.backward_op(grad), None, None


def copy_to_ranks(x: Tensor, group=None) -> Tensor:
    """Megatron's f: x forward; the gradient is the sum of all ranks' gradients."""
    pg = resolve_group(group)
    return _Collective.apply(x, lambda t: t.view_as(t), lambda g: summed(g, pg, "tp f backward"))


def sum_over_ranks(x: Tensor, group=None) -> Tensor:
    """Megatron's g: the sum of all ranks' x; the gradient passes unchanged to every rank's x."""
    pg = resolve_group(group)
    return _Collective.apply(x, lambda t: summed(t, pg, "tp g forward"), lambda g: g)


def gather_slices(x: Tensor, dim: int, group=None) -> Tensor:
    """All ranks' x end to end along `dim`; the gradient is summed over ranks, and each keeps its
    slice.

    Right when every rank goes on with its own computation on the whole (a column cut, a contrastive
    loss). If data parallelism then averages gradients, the result is that of the mean of all
    losses.
    """
    pg = resolve_group(group)
    return _Collective.apply(
        x, lambda t: start_gather(t, dim, pg).wait(), lambda g: start_sum_scatter(g, dim, pg).wait()
    )


def sum_slices(x: Tensor, dim: int, group=None) -> Tensor:
    """This rank's slice along `dim` of the sum of all ranks' x; the gradient is gathered."""
    pg = resolve_group(group)
    return _Collective.apply(
        x, lambda t: start_sum_scatter(t, dim, pg).wait(), lambda g: start_gather(g, dim, pg).wait()
    )


def keep_slice(x: Tensor, dim: int, group=None) -> Tensor:
    """This rank's slice along `dim` of an x that is the same on all ranks; the gradient is
    gathered."""
    pg = resolve_group(group)
    return _Collective.apply(
        x, lambda t: own_slice(t, dim, pg), lambda g: start_gather(g, dim, pg).wait()
    )


def join_slices(x: Tensor, dim: int, group=None) -> Tensor:
    """All ranks' x end to end along `dim`, for a continuation that is the same on all ranks: its
    gradient is already whole on each of them, and every rank takes its slice."""
    pg = resolve_group(group)
    return _Collective.apply(
        x, lambda t: start_gather(t, dim, pg).wait(), lambda g: own_slice(g, dim, pg)
    )


class Pending:
    """A collective along one dimension, under way: flat buffers outside, the right shape after
    wait()."""

    def __init__(self, work: coll.Work, shape: torch.Size, dim: int):
        self.work, self.shape, self.dim = work, shape, dim

    def wait(self) -> Tensor:
        return self.work.wait().view(self.shape).movedim(0, self.dim)


def summed(x: Tensor, pg, by: str) -> Tensor:
    # A copy: the argument is autograd's, others may still read it.
    return coll.all_reduce(x.clone(memory_format=torch.contiguous_format), group=pg, by=by)


def start_gather(x: Tensor, dim: int, pg) -> Pending:
    rows = x.movedim(dim, 0).contiguous()
    full = rows.new_empty(rows.numel() * pg.size())
    shape = torch.Size((rows.shape[0] * pg.size(), *rows.shape[1:]))
    work = coll.all_gather(full, rows.view(-1), group=pg, async_op=True, by="tp gather")
    return Pending(work, shape, dim)


def start_sum_scatter(x: Tensor, dim: int, pg) -> Pending:
    rows = x.movedim(dim, 0).contiguous()
    check_divisible(f"dimension {dim} of {tuple(x.shape)}", rows.shape[0], pg)
    shard = rows.new_empty(rows.numel() // pg.size())
    shape = torch.Size((rows.shape[0] // pg.size(), *rows.shape[1:]))
    work = coll.reduce_scatter(shard, rows.view(-1), group=pg, async_op=True, by="tp sum-scatter")
    return Pending(work, shape, dim)


def own_slice(x: Tensor, dim: int, pg) -> Tensor:
    check_divisible(f"dimension {dim} of {tuple(x.shape)}", x.shape[dim], pg)
    return x.chunk(pg.size(), dim)[pg.rank()].contiguous()


def check_divisible(what: str, size: int, pg) -> None:
    if size % pg.size():
        raise ValueError(f"{what} ({size}) cannot be cut into {pg.size()} equal parts")
