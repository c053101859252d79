"""Which elements of which tensor a rank holds: what all strategies say alike in a checkpoint.

A part is a range of elements of one flattened parameter, or of its optimizer state, under the
parameter's own name. Buckets, units, padding and stages do not appear in it, so every strategy can
read what any other wrote.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from minidist.comm import collectives as coll
from minidist.parallel.combine import Parallel
from minidist.parallel.cut import Cut
from minidist.parallel.ddp import DDP
from minidist.parallel.fsdp import FSDP
from minidist.parallel.pipeline import Pipeline
from minidist.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from minidist.parallel.vocab import VocabParallelEmbedding
from minidist.parallel.zero import ZeroOptimizer


class Part(NamedTuple):
    """Elements [start, stop) of one flattened tensor, as this rank holds them."""

    entry: str  # "model.<name>" or "optimizer.<state>.<name>"
    shape: tuple[int, ...]  # of the whole tensor (of this rank's cut of it, with tensor parallel)
    cut: Cut | None  # how tensor parallel ranks cut it
    start: int
    stop: int
    values: Tensor  # 1-D, a view of the memory itself: loading writes here


def _stages(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, Parallel):
        return list(model.stages)
    return list(model.chunks) if isinstance(model, Pipeline) else [model]


def tp_place(model: nn.Module) -> tuple[int, int]:
    """Tensor parallel rank and size."""
    layers = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
    for module in model.modules():
        if isinstance(module, layers):
            return coll.rank(module.group), coll.world_size(module.group)
    return 0, 1


def parts_of(model: nn.Module, optimizer: Optimizer | None, info: dict | None) -> Iterator[Part]:
    """All parts of this rank. With `info` (loading) it first makes the states that were saved."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)  # tied parameters have several
    whole: dict[
        nn.Parameter, tuple[tuple[int, ...], int, int]
    ] = {}  # shape, start, stop of a piece
    for stage in _stages(model):
        module = stage.module if isinstance(stage, (DDP, FSDP)) else stage
        for name, param in module.named_parameters(remove_duplicate=False):
            names[param].append(name)
            whole[param] = (tuple(param.shape), 0, param.numel())
        for name, buffer in module.named_buffers():
            yield Part(f"model.{name}", tuple(buffer.shape), None, 0, buffer.numel(), _flat(buffer))
        for flat in stage.flats if isinstance(stage, FSDP) else ():
            for i, piece in enumerate(flat.pieces):
                whole[piece] = (tuple(flat.layout.shapes[i]), *flat.spans[i])
    cuts = model.cuts if isinstance(model, Parallel) else {
        name: param.tp_cut for param in names if hasattr(param, "tp_cut") for name in names[param]
    }  # fmt: skip
    for param, (shape, start, stop) in whole.items():
        for name in names[param]:
            yield Part(f"model.{name}", shape, cuts.get(name), start, stop, _flat(param.data))
    if optimizer is None:
        return
    zero = isinstance(optimizer, ZeroOptimizer)
    trained = {p for g in optimizer.param_groups for p in g["params"]}
    pieces = _zero_pieces(optimizer) if zero else [
        (p, p, 0, start, stop) for p, (_, start, stop) in whole.items() if p in trained
    ]  # fmt: skip
    saved = None if info is None else _saved_states(info)
    for param, owner, at, start, stop in pieces:
        shape, size = whole[param][0], stop - start
        if saved is not None:
            _make_states(optimizer, owner, saved.get(names[param][0], {}))
        for name in names[param]:
            for key, value in optimizer.state.get(owner, {}).items():
                if not isinstance(value, Tensor) or saved is not None and key not in saved[name]:
                    continue
                entry = f"optimizer.{key}.{name}"
                if value.shape == owner.shape and key != "step":
                    values = _flat(value)[at : at + size]
                    yield Part(entry, shape, cuts.get(name), start, stop, values)
                else:
                    yield Part(entry, (), None, 0, 1, value.view(1))
            if zero and owner.dtype != param.dtype:
                values = owner.data[at : at + size]
                yield Part(f"optimizer.master.{name}", shape, cuts.get(name), start, stop, values)


def _zero_pieces(zero: ZeroOptimizer) -> Iterator[tuple[nn.Parameter, nn.Parameter, int, int, int]]:
    for bucket in zero.buckets:
        here = {piece.index: piece for piece in bucket.layout.pieces(zero.rank)}
        for i, param in enumerate(bucket.params):
            piece = here.get(i)
            at, start, stop = (piece.shard_start, piece.start, piece.stop) if piece else (0, 0, 0)
            yield param, bucket.shard, at, start, stop


def _flat(tensor: Tensor) -> Tensor:
    """A 1-D view of the same memory, in row-major order."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    raise ValueError(
        f"a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} cannot be saved "
        "in place: make the parameters contiguous first"
    )


def _saved_states(info: dict) -> dict[str, dict[str, bool]]:
    """Per parameter name the saved optimizer states: key -> whether it is elementwise."""
    states: dict[str, dict[str, bool]] = defaultdict(dict)
    for entry, (shape, _, _) in info["layout"].items():
        kind, _, rest = entry.partition(".")
        if kind == "optimizer":
            key, _, name = rest.partition(".")
            states[name][key] = key != "step" and f"model.{name}" in info["layout"] and (
                shape == info["layout"][f"model.{name}"][0]
            )  # fmt: skip
    return states


def _make_states(optimizer: Optimizer, owner: nn.Parameter, keys: dict[str, bool]) -> None:
    """A fresh optimizer has no states yet: make what the checkpoint will fill."""
    state = optimizer.state[owner]
    for key, elementwise in keys.items():
        if key != "master" and key not in state:
            state[key] = torch.zeros_like(owner.data) if elementwise else torch.zeros(())
    if not state:
        del optimizer.state[owner]


def forget_states(optimizer: Optimizer, info: dict) -> None:
    """Saved before the first step: then nothing of an earlier training may stay."""
    saved = {key for keys in _saved_states(info).values() for key in keys}
    for owner in list(optimizer.state):
        for key in [key for key in optimizer.state[owner] if key not in saved]:
            del optimizer.state[owner][key]
        if not optimizer.state[owner]:
            del optimizer.state[owner]


def join(ranges, buffers, shape, cut: Cut | None, tp_size: int) -> Tensor:
    """The whole tensor from the flat ranges of all tensor-parallel ranks' cuts of it."""
    example = next(iter(buffers.values()))
    locals_ = [torch.empty(torch.Size(shape), dtype=example.dtype) for _ in range(tp_size)]
    for tp, start, stop, key in ranges:
        locals_[tp].view(-1)[start:stop] = buffers[key].view(-1)
    if cut is None:
        return locals_[0]
    blocks = torch.stack([t.unflatten(cut.dim, (cut.parts, -1)) for t in locals_], cut.dim + 1)
    return blocks.flatten(cut.dim, cut.dim + 2).narrow(cut.dim, 0, cut.size)


def take(whole: Tensor, cut: Cut, shape: tuple[int, ...], tp_rank: int) -> Tensor:
    rows = shape[cut.dim] // cut.parts  # per block and rank
    moved = whole.movedim(cut.dim, 0)
    ranks = -(-cut.size // (cut.parts * rows))
    short = ranks * cut.parts * rows - cut.size
    if short:
        moved = torch.cat([moved, moved.new_zeros(short, *moved.shape[1:])])
    own = moved.unflatten(0, (cut.parts, -1, rows))[:, tp_rank].flatten(0, 1)
    return own.movedim(0, cut.dim)
