"""Putting what is sharded together, and cutting what is whole: state dicts of model and optimizer.

What is whole does not depend on strategy, units or number of ranks: it loads into any other FSDP,
and into the plain model and its plain optimizer. The functions are collective: every rank calls
them, also where only rank 0 keeps the result. Their public side is in `fsdp_module.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from minidist.comm import collectives as coll
from minidist.parallel.fsdp_flat import FlatShard

if TYPE_CHECKING:
    from minidist.parallel.fsdp_module import ShardedModule

Place = dict[nn.Parameter, tuple[FlatShard, int]]


def whole(flat: FlatShard, shard: Tensor) -> list[Tensor]:
    """Tensors of the original shapes, from a buffer that is cut like `flat.shard`."""
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


def place_of(flats: list[FlatShard]) -> Place:
    """Where the piece of each parameter is: which flat buffer, and which number there."""
    return {piece: (flat, i) for flat in flats for i, piece in enumerate(flat.pieces)}


# --- the model ----------------------------------------------------------------------------------


def full_state_dict(fsdp: ShardedModule, rank0_only: bool) -> dict[str, Any]:
    keep = not rank0_only or is_first(fsdp)
    with fsdp.whole_values(torch.device("cpu"), keep):
        if not keep:
            return {}
        state = fsdp.module.state_dict(keep_vars=True)
        for key, value in state.items():
            if isinstance(value, Tensor):
                # Whole parameters are copies already; buffers and ignored parameters would change.
                copied = value in fsdp.summoned
                state[key] = value.detach() if copied else value.detach().cpu().clone()
        return state


def load_full_state_dict(fsdp: ShardedModule, state: dict[str, Any] | None, strict: bool) -> Any:
    if any(_gather_objects(fsdp, state is None)):
        state = _from_rank_0(fsdp, state)
    own = fsdp.module.state_dict(keep_vars=True)  # tied weights under all their names
    place = place_of(fsdp.flats)
    local, wrong = type(own)(), []
    for key, value in state.items():
        flat, index = place.get(own.get(key), (None, None))
        if flat is None or not isinstance(value, Tensor):
            local[key] = value
        elif value.shape != flat.layout.shapes[index]:
            shapes = f"{list(value.shape)}, here it has {list(flat.layout.shapes[index])}"
            wrong.append(f"{key!r} has shape {shapes}")
        else:
            local[key] = part(flat, index, value)
    if strict:
        wrong += [f"{key!r} is missing" for key in own if key not in state]
        wrong += [f"{key!r} is not in this model" for key in state if key not in own]
    raise_everywhere(fsdp, "load_full_state_dict", wrong)
    return fsdp.module.load_state_dict(local, strict=strict)


# --- optimizer states ---------------------------------------------------------------------------


def full_optim_state_dict(
    fsdp: ShardedModule, optimizer: Optimizer, rank0_only: bool
) -> dict[str, Any]:
    keep = not rank0_only or is_first(fsdp)
    packed = optimizer.state_dict()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    number = {param: i for i, param in enumerate(params)}
    place = place_of(fsdp.flats)
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


def load_full_optim_state_dict(fsdp: ShardedModule, optimizer: Optimizer, saved: Any) -> None:
    if any(_gather_objects(fsdp, saved is None)):
        saved = _from_rank_0(fsdp, saved)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    place = place_of(fsdp.flats)
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
    raise_everywhere(fsdp, "load_full_optim_state_dict", wrong)
    optimizer.load_state_dict({**saved, "state": local})


def _describe(value: Any, piece: nn.Parameter, name: str, key: str) -> Any:
    if not isinstance(value, Tensor) or (value.dim() == 0 and piece.dim()):
        return _copy(value)
    if value.shape == piece.shape:
        return value.dtype
    raise ValueError(
        f"optimizer state {key!r} of parameter {name!r} has shape {list(value.shape)}, this rank's "
        f"piece has {list(piece.shape)}: only states with one number per element can be joined"
    )


def _is_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype)


def _copy(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _shape(place: tuple[FlatShard, int]) -> torch.Size:
    return place[0].layout.shapes[place[1]]


# --- agreeing -----------------------------------------------------------------------------------


def _gather_objects(fsdp: ShardedModule, value: Any) -> list[Any]:
    """One object of every rank, of all shards and replicas."""
    everyone = [value]
    for group in fsdp.placement.groups:
        gathered = coll.all_gather_object(everyone, group, by="fsdp state")
        everyone = [v for values in gathered for v in values]
    return everyone


def is_first(fsdp: ShardedModule) -> bool:
    return all(group.rank() == 0 for group in fsdp.placement.groups)


def _from_rank_0(fsdp: ShardedModule, state: Any) -> Any:
    """Rank 0's state, on all ranks: its tensors one by one, the rest as one object."""
    if any(_gather_objects(fsdp, is_first(fsdp) and state is None)):
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
        fsdp.placement.spread(sent, "fsdp load")
        return sent.cpu()

    first = is_first(fsdp)
    skeleton = _gather_objects(fsdp, _map(take, state) if first else None)[0]
    given = iter(tensors)
    return _map(give, skeleton)


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return type(value)((k, _map(function, v)) for k, v in value.items())
    if isinstance(value, list):
        return [_map(function, v) for v in value]
    return function(value)


def raise_everywhere(fsdp: ShardedModule, who: str, wrong: list[str]) -> None:
    """If anything is wrong on any rank, raise on all, before anything has been changed."""
    everyone = [line for lines in _gather_objects(fsdp, wrong) for line in lines]
    if everyone:
        unique = list(dict.fromkeys(everyone))
        more = f" (and {len(unique) - 5} more)" if len(unique) > 5 else ""
        raise ValueError(f"{who}: {'; '.join(unique[:5])}{more}. Nothing has been changed")
