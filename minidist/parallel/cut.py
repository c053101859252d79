"""How a parameter is cut over tensor-parallel ranks, and put together again."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from minidist.comm.mesh import resolve_group
from minidist.parallel.autograd import start_gather


def cut_rows(full: Tensor, parts: int, pg) -> Tensor:
    """This rank's rows of each of `parts` equal blocks of rows."""
    blocks = full.detach().unflatten(0, (parts, pg.size(), -1))
    return blocks[:, pg.rank()].flatten(0, 1).clone()


class Cut(NamedTuple):
    """How a parameter was cut: along `dim`, as `parts` blocks side by side, of `size` true rows."""

    dim: int
    parts: int
    size: int


def shard_parameter(shard: Tensor, full: nn.Parameter, dim: int = 0, parts: int = 1):
    parameter = nn.Parameter(shard, full.requires_grad)
    # Norms and checkpoints need to know: every rank's part counts, replicas count once.
    parameter.tp_cut = Cut(dim, parts, full.shape[dim])
    return parameter


def join_cut(shard: Tensor, cut: Cut, group=None) -> Tensor:
    """The whole tensor on every rank from the ranks' shards (collective)."""
    pg = resolve_group(group)
    whole = start_gather(shard.detach(), cut.dim, pg).wait()
    blocks = whole.unflatten(cut.dim, (pg.size(), cut.parts, -1)).transpose(cut.dim, cut.dim + 1)
    return blocks.flatten(cut.dim, cut.dim + 2).narrow(cut.dim, 0, cut.size).contiguous()


def take_cut(whole: Tensor, cut: Cut, group=None) -> Tensor:
    """This rank's shard of a whole tensor, padded with zeros where N does not divide its size."""
    pg = resolve_group(group)
    if whole.shape[cut.dim] != cut.size:
        raise ValueError(
            f"expected {cut.size} rows in dimension {cut.dim}, got {tuple(whole.shape)}"
        )
    rows = whole.movedim(cut.dim, 0)
    missing = -cut.size % (cut.parts * pg.size())
    if missing:
        rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
    return cut_rows(rows, cut.parts, pg).movedim(0, cut.dim).contiguous()
