"""Saving and loading a sharded model: whole tensors under their original names, or this rank's part.

What is whole does not depend on strategy, units or number of ranks: it loads into any other FSDP,
and into the plain model and its plain optimizer. The functions are collective: every rank calls
them, also where only rank 0 keeps the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from minidist.comm import collectives as coll
from minidist.parallel.fsdp_unit import FlatShard, spread

if TYPE_CHECKING:
    from minidist.parallel.fsdp import FSDP

# --- parameters ---------------------------------------------------------------------------------


def whole(flat: FlatShard, shard: Tensor) -> list[Tensor]:
    """Collective. Tensors of the original shapes from a buffer cut like `flat.shard`."""
    placement = flat.placement
    full = flat.layout.buffer(shard.dtype, placement.device)
    mine = flat.layout.shard(full, placement.rank)
    mine.copy_(shard)
    if placement.shard_group is not None:
        coll.all_gather(full, mine, group=placement.shard_group, by=f"{flat.by} whole")
    return flat.layout.views(full)


def part(flat: FlatShard, index: int, tensor: Tensor) -> Tensor:
    """This rank's elements of `tensor`, which has the shape of parameter `index`."""
    start, stop = flat.spans[index]
    elements = tensor.reshape(-1)[start:stop]
    return elements.view(tensor.shape) if flat.placement.keep_shapes else elements


@contextmanager
def full_params(fsdp: FSDP, write: bool) -> Iterator[None]:
    _show_whole(fsdp, None)
    try:
        yield
    finally:
        _show_pieces(fsdp, write)


@torch.no_grad()
def _show_whole(fsdp: FSDP, device: torch.device | None, keep: bool = True) -> None:
    """Let all parameters hold their whole values, on `device` (None: where the model computes).
    Ranks that do not `keep` them only take part in the gathering."""
    if fsdp.busy:
        raise RuntimeError("whole parameters cannot be had inside a forward or backward")
    fsdp.summoned = {}
    for flat in fsdp.flats:
        for piece, value in zip(flat.pieces, whole(flat, flat.shard), strict=True):
            if keep:
                fsdp.summoned[piece] = piece.grad
                piece.grad = None  # it has the shape of the piece
                # A tensor each, so that this flat buffer can go before the next one is gathered.
                piece.data = value.to(device or value.device, copy=True)


@torch.no_grad()
def _show_pieces(fsdp: FSDP, write: bool) -> None:
    for flat in fsdp.flats:
        views = flat.piece_views(flat.shard)
        for index, (piece, view) in enumerate(zip(flat.pieces, views, strict=True)):
            if piece in fsdp.summoned:
                if write:
                    view.copy_(part(flat, index, piece.data))
                piece.data = view
                piece.grad = fsdp.summoned[piece]
    fsdp.summoned = None


def full_state_dict(fsdp: FSDP, rank0_only: bool) -> dict[str, Any]:
    keep = not rank0_only or _is_first(fsdp)
    _show_whole(fsdp, torch.device("cpu"), keep)
    try:
        if not keep:
            return {}
        state = fsdp.module.state_dict(keep_vars=True)
        for key, value in state.items():
            if isinstance(value, Tensor):
                # Whole parameters are copies already; buffers and ignored parameters would change.
                copied = value in fsdp.summoned
                state[key] = value.detach() if copied else value.detach().cpu().clone()
        return state
    finally:
        _show_pieces(fsdp, write=False)


def load_full_state_dict(fsdp: FSDP, state: dict[str, Any] | None, strict: bool) -> Any:
    if _any_rank(fsdp, state is None):
        state = _from_rank_0(fsdp, state)
    own = fsdp.module.state_dict(keep_vars=True)  # tied weights under all their names
    place = _place(fsdp)
    local, wrong = type(own)(), []
    for key, value in state.items():
        flat, index = place.get(own.get(key), (None, None))
        if flat is None or not isinstance(value, Tensor):
            local[key] = value
        elif value.shape != flat.layout.shapes[index]:
            wrong.append(f"{key!r} has shape {list(value.shape)}, here it has "
                         f"{list(flat.layout.shapes[index])}")  # fmt: skip
        else:
            local[key] = part(flat, index, value)
    if strict:
        wrong += [f"{key!r} is missing" for key in own if key not in state]
        wrong += [f"{key!r} is not in this model" for key in state if key not in own]
    _raise_everywhere(fsdp, "load_full_state_dict", wrong)
    return fsdp.module.load_state_dict(local, strict=strict)


def load_state_dict(fsdp: FSDP, state: dict[str, Any], strict: bool) -> Any:
    own, place = fsdp.module.state_dict(keep_vars=True), _place(fsdp)
    for key, value in state.items():
        if own.get(key) in place and isinstance(value, Tensor) and value.shape != own[key].shape:
            return load_full_state_dict(fsdp, state, strict)
    return fsdp.module.load_state_dict(state, strict=strict)


def full_grads(fsdp: FSDP) -> dict[str, Tensor | None]:
    grads: dict[str, Tensor | None] = {}
    for flat in fsdp.flats:
        shard = torch.zeros_like(flat.shard)
        for piece, view in zip(flat.pieces, flat.piece_views(shard), strict=True):
            if piece.grad is not None:
                view.copy_(piece.grad)
        for name, piece, value in zip(flat.names, flat.pieces, whole(flat, shard), strict=True):
            grads[name] = None if piece.grad is None else value.cpu().clone()
    for name, param in zip(fsdp.replicated.names, fsdp.replicated.params, strict=True):
        grads[name] = None if param.grad is None else param.grad.cpu().clone()
    return {name: grads[name] for name, _ in fsdp.module.named_parameters()}


def sharded_state_dict(fsdp: FSDP) -> dict[str, Any]:
    state = fsdp.module.state_dict()
    state = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
    return {"shard": _cut(fsdp), "state": state}


def load_sharded_state_dict(fsdp: FSDP, saved: dict[str, Any]) -> None:
    wrong = []
    if saved.get("shard") != _cut(fsdp):
        wrong = [f"this is the shard (rank, ranks, sizes) {saved.get('shard')}, needed is "
                 f"{_cut(fsdp)}: full_state_dict() moves between numbers of ranks"]  # fmt: skip
    _raise_everywhere(fsdp, "load_sharded_state_dict", wrong)
    fsdp.module.load_state_dict(saved["state"])


def _cut(fsdp: FSDP) -> tuple:
    placement = fsdp.placement
    sizes = [(flat.names[0], flat.layout.shard_numel) for flat in fsdp.flats]
    return placement.rank, placement.world_size, sizes


# --- optimizer states ---------------------------------------------------------------------------


def full_optim_state_dict(fsdp: FSDP, optimizer: Optimizer, rank0_only: bool) -> dict[str, Any]:
    keep = not rank0_only or _is_first(fsdp)
    packed = optimizer.state_dict()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    number = {param: i for i, param in enumerate(params)}
    place = _place(fsdp)
    state: dict[int, dict[str, Any]] = {}
    mine: dict[int, dict[str, Any]] = {}  # parameter, key -> dtype of a cut tensor, or the value
    for i, values in packed["state"].items():
        if params[i] in place:
            name = place[params[i]][0].names[place[params[i]][1]]
            mine[i] = {k: _describe(v, params[i], name, k) for k, v in values.items()}
        else:  # an ignored parameter: whole on every rank
            state[i] = {k: _copy(v) for k, v in values.items()}
    known: dict[int, dict[str, Any]] = {}  # a rank may have no state for what it has no elements of
    for theirs in _gather_objects(fsdp, mine):
        for i, values in theirs.items():
            known.setdefault(i, {}).update(values)
    for flat in fsdp.flats:
        numbers = [number.get(piece) for piece in flat.pieces]
        cut = {k: v for i in numbers for k, v in known.get(i, {}).items() if _is_dtype(v)}
        for key, dtype in cut.items():
            shard = torch.zeros(flat.layout.shard_numel, dtype=dtype, device=flat.shard.device)
            for i, view in zip(numbers, flat.piece_views(shard), strict=True):
                if key in packed["state"].get(i, {}):
                    view.copy_(packed["state"][i][key])
            for i, value in zip(numbers, whole(flat, shard), strict=True):
                if keep and _is_dtype(known.get(i, {}).get(key)):
                    state.setdefault(i, {})[key] = value.to("cpu", copy=True)
    for i, values in known.items():  # what is the same on all ranks, like Adam's step
        for key, value in values.items():
            if not _is_dtype(value):
                state.setdefault(i, {})[key] = value
    if not keep:
        return {}
    return {"state": dict(sorted(state.items())), "param_groups": packed["param_groups"]}


def load_full_optim_state_dict(fsdp: FSDP, optimizer: Optimizer, saved: Any) -> None:
    if _any_rank(fsdp, saved is None):
        saved = _from_rank_0(fsdp, saved)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    place = _place(fsdp)
    ours = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in saved["param_groups"]]
    wrong = []
    if ours != theirs:
        wrong = [f"the saved parameter groups have {theirs} parameters, these have {ours}"]
    states = saved["state"] if not wrong else {}
    # The moments of a 0-d parameter look like a step count. What is 0-d for others too is one.
    counts = {"step"} | {
        key
        for i, values in states.items() if params[i] in place
        for key, value in values.items()
        if isinstance(value, Tensor) and not value.dim() and _shape(place[params[i]])
    }  # fmt: skip
    local: dict[int, dict[str, Any]] = {}
    for i, values in states.items():
        local[i] = {k: _copy(v) for k, v in values.items()}
        if params[i] not in place:
            continue
        flat, index = place[params[i]]
        for key, value in values.items():
            if not isinstance(value, Tensor) or key in counts:
                continue
            if value.shape == flat.layout.shapes[index]:
                local[i][key] = part(flat, index, value).clone()  # not a view that keeps the whole
            else:
                wrong.append(
                    f"{key!r} of {flat.names[index]!r} has shape {list(value.shape)}, the "
                    f"parameter has {list(flat.layout.shapes[index])}"
                )
    _raise_everywhere(fsdp, "load_full_optim_state_dict", wrong)
    optimizer.load_state_dict({**saved, "state": local})


def _describe(value: Any, piece: nn.Parameter, name: str, key: str) -> Any:
    if not isinstance(value, Tensor) or (value.dim() == 0 and piece.dim()):
        return _copy(value)
    if value.shape == piece.shape:
        return value.dtype
    raise ValueError(
        f"optimizer state {key!r} of parameter {name!r} has shape {list(value.shape)}, this rank's "
        f"piece has {list(piece.shape)}: only states with one number per element can be put together"
    )


def _is_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype)


def _copy(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _shape(place: tuple[FlatShard, int]) -> torch.Size:
    return place[0].layout.shapes[place[1]]


# --- agreeing -----------------------------------------------------------------------------------


def _place(fsdp: FSDP) -> dict[nn.Parameter, tuple[FlatShard, int]]:
    return {piece: (flat, i) for flat in fsdp.flats for i, piece in enumerate(flat.pieces)}


def _gather_objects(fsdp: FSDP, value: Any) -> list[Any]:
    """One object of every rank, of all shards and replicas."""
    everyone = [value]
    for group in (fsdp.placement.shard_group, fsdp.placement.replica_group):
        if group is not None:
            gathered = coll.all_gather_object(everyone, group, by="fsdp state")
            everyone = [v for values in gathered for v in values]
    return everyone


def _is_first(fsdp: FSDP) -> bool:
    groups = (fsdp.placement.shard_group, fsdp.placement.replica_group)
    return all(group is None or group.rank() == 0 for group in groups)


def _any_rank(fsdp: FSDP, flag: bool) -> bool:
    return any(_gather_objects(fsdp, flag))


def _from_rank_0(fsdp: FSDP, state: Any) -> Any:
    """Rank 0's state, on all ranks: its tensors one by one, the rest as one object."""
    if _any_rank(fsdp, _is_first(fsdp) and state is None):
        raise ValueError(
            "rank 0 must have the state; other ranks may pass None to get it from there"
        )
    tensors: list[Tensor] = []

    def take(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensors.append(value)
        return ("tensor", value.shape, value.dtype)

    def give(value: Any) -> Any:
        if not (isinstance(value, tuple) and value and value[0] == "tensor"):
            return value
        tensor = next(given) if first else torch.empty(value[1], dtype=value[2])
        device = fsdp.placement.device
        sent = tensor.detach().to(device).contiguous()
        spread(sent, fsdp.placement, "fsdp load")
        return sent.cpu()

    first = _is_first(fsdp)
    skeleton = _gather_objects(fsdp, _map(take, state) if first else None)[0]
    given = iter(tensors)
    return _map(give, skeleton)


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return type(value)((k, _map(function, v)) for k, v in value.items())
    if isinstance(value, list):
        return [_map(function, v) for v in value]
    return function(value)


def _raise_everywhere(fsdp: FSDP, who: str, wrong: list[str]) -> None:
    """If anything is wrong on any rank, raise on all, before anything has been changed."""
    everyone = [line for lines in _gather_objects(fsdp, wrong) for line in lines]
    if everyone:
        unique = list(dict.fromkeys(everyone))
        more = f" (and {len(unique) - 5} more)" if len(unique) > 5 else ""
        raise ValueError(f"{who}: {'; '.join(unique[:5])}{more}. Nothing has been changed")
