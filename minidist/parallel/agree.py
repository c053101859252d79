"""Agreeing before anything moves: all ranks built the same model, or all ranks say what differs.

A collective trusts that every rank brings a buffer of the same size with the same things at the
same places. If one rank built another model, it hangs, crashes, or (same number of elements, other
order) adds up gradients of different weights without a word. DDP, ZeRO and FSDP therefore compare
once, at construction, before the first tensor is sent: a digest of a few bytes first, and only when
digests differ the whole descriptions, so that every rank (rank 0 included) can name the first
difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from minidist.comm import collectives as coll


def check_same_parameters(
    named_parameters: Iterable[tuple[str, Tensor]],
    group=None,
    *,
    extra: Mapping[str, Any] | None = None,
    named_buffers: Iterable[tuple[str, Tensor]] = (),
    who: str = "the model",
) -> None:
    """Collective. Raise on *all* ranks when names, shapes, dtypes, requires_grad or order differ.

    `named_parameters`, `named_buffers`: (dotted name, tensor), in the order in which they are used.
    `extra`: settings that must agree too (bucket size, strategy, ...), compared by their `repr`.
    `who`: starts the message, for example "DDP". Devices are compared by kind (cpu, cuda): the
    index differs from rank to rank. The RuntimeError names the first difference to rank 0.
    """
    description = [(f"setting {key!r}", repr(value)) for key, value in (extra or {}).items()]
    description += _describe("parameter", named_parameters)
    description += _describe("buffer", named_buffers)
    differing = differing_ranks(description, group)
    if not differing:
        return
    everyone = coll.all_gather_object(description, group, by=f"{who}: what differs")
    other = differing[0]
    raise RuntimeError(
        f"{who}: the ranks do not agree. {_first_difference(everyone[0], everyone[other], other)}. "
        f"(Compared with rank 0; different on ranks {differing}.) Every rank must build the same "
        "model, with parameters registered in the same order and with the same settings, before it "
        "is wrapped. Nothing has been changed."
    )


def differing_ranks(value: Any, group=None) -> list[int]:
    """Collective. The ranks whose `repr(value)` differs from rank 0's (gathers 16 bytes)."""
    digest = hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()
    digests = coll.all_gather_object(digest, group, by="agree: digest")
    return [rank for rank, other in enumerate(digests) if other != digests[0]]


def _describe(kind: str, named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, str]]:
    lines = []
    for number, (name, tensor) in enumerate(named):
        dtype = str(tensor.dtype).removeprefix("torch.")
        grad = "requires grad" if tensor.requires_grad else "no grad"
        shape = "of unknown shape" if is_lazy(tensor) else list(tensor.shape)
        what = f"{name!r} {dtype} {shape} on {tensor.device.type}, {grad}"
        lines.append((f"{kind} number {number}", what))
    return lines


def _first_difference(zero: list[tuple[str, str]], other: list[tuple[str, str]], rank: int) -> str:
    # Settings, parameters and buffers follow one another, so a shorter list of parameters must not
    # be read as a list of other buffers: compare what stands under the same label.
    mine, theirs = dict(zero), dict(other)
    for label in [*mine, *(label for label in theirs if label not in mine)]:
        here, there = mine.get(label), theirs.get(label)
        if here != there:
            here, there = here or "missing", there or "missing"
            return f"{label} is {here} on rank 0 but {there} on rank {rank}"
    return f"rank 0 and rank {rank} list the same things in a different order"
