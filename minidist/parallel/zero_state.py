"""Saving and loading a `ZeroOptimizer`: as this rank's shard, or whole and independent of the
cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from minidist.comm import collectives as coll

if TYPE_CHECKING:
    from minidist.parallel.zero import ZeroOptimizer
    from minidist.parallel.zero_bucket import Bucket


def full(zero: ZeroOptimizer) -> dict[str, Any]:
    place = _places(zero)
    state: dict[int, dict[str, Any]] = {}
    masters: dict[int, Tensor] = {}
    for bucket in zero.buckets:
        indices = [place[p] for p in bucket.params]
        for key, value in zero.state.get(bucket.shard, {}).items():
            for index, part in zip(indices, _whole(zero, bucket, value), strict=True):
                state.setdefault(index, {})[key] = part
        if bucket.shard.dtype != bucket.full.dtype:
            parts = _whole(zero, bucket, bucket.shard.detach())
            masters.update(zip(indices, parts, strict=True))
    result = {"state": dict(sorted(state.items())), "param_groups": _packed_groups(zero)}
    return {**result, "master": dict(sorted(masters.items()))} if masters else result


@torch.no_grad()
def load_full(zero: ZeroOptimizer, saved: dict[str, Any]) -> None:
    place = _places(zero)
    _check_fits(zero, saved, place)
    _load_options(zero, saved)
    for bucket in zero.buckets:
        values = [saved["state"].get(place[p], {}) for p in bucket.params]
        keys = list(dict.fromkeys(key for value in values for key in value))
        state = {key: _own(zero, bucket, key, [v.get(key) for v in values]) for key in keys}
        _set_state(zero, bucket, state)
        if bucket.shard.dtype != bucket.full.dtype:
            masters = saved.get("master")
            # Saved without masters: the parameters are all there is.
            parts = [masters[place[p]] for p in bucket.params] if masters else bucket.params
            bucket.shard.copy_(_own(zero, bucket, "master", [p.detach() for p in parts]))


def shard(zero: ZeroOptimizer) -> dict[str, Any]:
    return {
        "state": {b.index: dict(zero.state.get(b.shard, {})) for b in zero.buckets},
        "masters": {b.index: b.shard.detach() for b in zero.buckets
                    if b.shard.dtype != b.full.dtype},
        "param_groups": _packed_groups(zero),
        "shard": _cut(zero),
    }  # fmt: skip


@torch.no_grad()
def load_shard(zero: ZeroOptimizer, saved: dict[str, Any]) -> None:
    theirs = saved.get("shard")
    if theirs is None or list(theirs) != _cut(zero):
        raise ValueError(
            f"this state is of the cut {theirs} (rank, world size, bucket shards), needed is "
            f"{_cut(zero)}: full_state_dict() moves between world sizes and from plain optimizers"
        )
    _load_options(zero, saved)
    for bucket in zero.buckets:
        state = saved["state"][bucket.index].items()
        _set_state(zero, bucket, {k: v.clone() if isinstance(v, Tensor) else v for k, v in state})
        if bucket.index in saved["masters"]:
            bucket.shard.copy_(saved["masters"][bucket.index])


def _places(zero: ZeroOptimizer) -> dict[nn.Parameter, int]:
    return {p: i for i, p in enumerate(p for g in zero.param_groups for p in g["params"])}


def _cut(zero: ZeroOptimizer) -> list[int]:
    return [zero.rank, zero.world_size, *(b.layout.shard_numel for b in zero.buckets)]


def _packed_groups(zero: ZeroOptimizer) -> list[dict[str, Any]]:
    place = _places(zero)
    return [{**g, "params": [place[p] for p in g["params"]]} for g in zero.param_groups]


def _check_fits(zero: ZeroOptimizer, saved: dict[str, Any], place: dict[nn.Parameter, int]) -> None:
    ours, theirs = ([len(g["params"]) for g in groups]
                    for groups in (zero.param_groups, saved["param_groups"]))  # fmt: skip
    if ours != theirs:
        raise ValueError(f"the saved groups have {theirs} parameters, this optimizer has {ours}")
    shapes = {index: param.shape for param, index in place.items()}
    for index, values in saved["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != shapes[index]:
                raise ValueError(
                    f"saved state {key!r} of parameter {index} has shape {tuple(value.shape)}, the "
                    f"parameter has {tuple(shapes[index])}"
                )


def _load_options(zero: ZeroOptimizer, saved: dict[str, Any]) -> None:
    for group, options in zip(zero.param_groups, saved["param_groups"], strict=True):
        group.update({k: v for k, v in options.items() if k not in ("params", "param_names")})


def _set_state(zero: ZeroOptimizer, bucket: Bucket, state: dict[str, Any]) -> None:
    zero.state.pop(bucket.shard, None)
    bucket.on_disk = {k: v for k, v in bucket.on_disk.items() if k == "master"}
    if state:
        zero.state[bucket.shard] = state


def _whole(zero: ZeroOptimizer, bucket: Bucket, value: Any) -> list[Any]:
    """One value per parameter: sharded states gathered, scalars (Adam's step) copied."""
    if not (isinstance(value, Tensor) and value.shape == bucket.shard.shape):
        return [value.clone() if isinstance(value, Tensor) else value for _ in bucket.params]
    value = value.to(bucket.full.device)
    whole = value.new_empty(bucket.layout.padded_numel)
    coll.all_gather(whole, value.contiguous(), group=zero.process_group, by="zero state")
    return [view.clone() for view in bucket.layout.views(whole)]


def _own(zero: ZeroOptimizer, bucket: Bucket, key: str, values: list[Any]) -> Any:
    """This rank's shard of one state, from its value for each parameter (None: it has none yet)."""
    example = next(value for value in values if value is not None)
    # Adam's count is 0-d, and so are the moments of a 0-d parameter: only the name tells.
    elementwise = key != "step" and any(
        isinstance(v, Tensor) and v.shape == p.shape
        for v, p in zip(values, bucket.params, strict=True)
    )
    if not elementwise:
        return example.clone() if isinstance(example, Tensor) else example
    whole = bucket.layout.buffer(example.dtype, bucket.shard.device)
    parts = [torch.zeros(p.shape, dtype=example.dtype) if v is None else v
             for v, p in zip(values, bucket.params, strict=True)]  # fmt: skip
    return bucket.layout.shard(bucket.layout.pack(parts, whole), zero.rank).clone()
