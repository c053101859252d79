"""What travels through a pipeline: nested values as lists of tensors, batches as micro-batches.

A stage may return a tensor, or tuples, lists and dicts of tensors, None, numbers and strings. Only
tensors travel; the rest is the `layout`, on which both ends agree once (pipeline.py). Numbers
travel as tensors without dimensions, so that they may change with every micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """The place of one tensor in a layout. number: the Python type it has for the stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    number: type | None = None


def flatten(value: Any) -> tuple[list[Tensor], Any]:
    """(tensors, layout): the tensors of a nested value in order, and what is left of it."""
    tensors: list[Tensor] = []

    def visit(part):
        number = type(part) if isinstance(part, (bool, int, float)) else None
        if number:
            part = torch.tensor(part, dtype=torch.float64 if number is float else None)
        if isinstance(part, Tensor):
            tensors.append(part)
            return Slot(tuple(part.shape), part.dtype, part.requires_grad, number)
        return _map(visit, part)

    layout = visit(value)
    return tensors, layout


def unflatten(tensors: list[Tensor], layout: Any) -> Any:
    """The nested value again; the inverse of `flatten`."""
    rest = iter(tensors)

    def visit(part):
        if isinstance(part, Slot):
            tensor = next(rest)
            return part.number(tensor.item()) if part.number else tensor
        return _map(visit, part)

    return visit(layout)


def slots(layout: Any) -> list[Slot]:
    """The slots of a layout, in the order of the tensors."""
    found: list[Slot] = []

    def visit(part):
        return found.append(part) if isinstance(part, Slot) else _map(visit, part)

    visit(layout)
    return found


def _map(function, part):
    if isinstance(part, tuple) and hasattr(part, "_fields"):  # a namedtuple
        return type(part)(*map(function, part))
    if isinstance(part, (tuple, list)):
        return type(part)(map(function, part))
    if isinstance(part, dict):
        return {key: function(item) for key, item in part.items()}
    return part


def cut(batch: Any, microbatches: int, what: str) -> tuple[list[Any], int]:
    """(micro-batches, rows): `batch` cut along dimension 0 of its tensors, the larger parts first.

    8 rows in 3 parts are 3, 3, 2. Tensors without dimensions, None, numbers and strings go to every
    micro-batch. A list is taken as the micro-batches themselves (their shapes may then differ at
    will); rows is 0 in that case. Raises ValueError naming the sizes.
    """
    if isinstance(batch, list):
        if len(batch) != microbatches:
            raise ValueError(
                f"{what}: a list holds the micro-batches themselves, {microbatches} of them, "
                f"not {len(batch)} (use a tuple for a value with several parts)"
            )
        return batch, 0
    tensors, layout = flatten(batch)
    rows = {len(tensor) for tensor in tensors if tensor.dim()}
    if not rows:
        raise ValueError(f"{what}: a tensor is needed here, not {type(batch).__name__}")
    if len(rows) > 1:
        raise ValueError(
            f"{what}: cannot be cut along dimension 0, its tensors have {sorted(rows)} rows; pass "
            f"a list of {microbatches} micro-batches instead"
        )
    (count,) = rows
    if count < microbatches:
        raise ValueError(f"{what}: {count} rows cannot be cut into {microbatches} micro-batches")
    columns = [
        tensor.tensor_split(microbatches) if tensor.dim() else [tensor] * microbatches
        for tensor in tensors
    ]
    return [unflatten(list(row), layout) for row in zip(*columns, strict=True)], count


def join(parts: list[Any]) -> Any:
    """The inverse of `cut`: tensors joined along dimension 0; anything else from the first part."""
    first, *_ = parts
    if isinstance(first, Tensor) and first.dim():
        return torch.cat(parts)
    if isinstance(first, dict):
        return {key: join([part[key] for part in parts]) for key in first}
    if isinstance(first, (tuple, list)):
        joined = [join(list(items)) for items in zip(*parts, strict=True)]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    return first
