"""What DDP does when a backward was unusual on some rank: all ranks talk, then all raise or go on.

In the normal case ranks must not spend a message on asking each other whether everything is fine.
So each backward carries one number along in the last bucket: how many parameters of this rank got
no gradient, or were frozen or unfrozen. If the sum over ranks is not zero, every rank sees that,
and calls `settle`. No rank can be left waiting by an error that only another one has noticed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from minidist.comm import collectives as coll


class Report(NamedTuple):
    """One rank's view of the backward that has just ended, per parameter of the module."""

    lost: list[str]  # names of parameters that got no gradient
    replaced: list[str]  # those among them that the module no longer has
    trainable: list[bool]  # requires_grad
    had_grad: list[bool]  # whether there was a .grad


def settle(ddp, lost: list[int], had_grad: list[bool], scale: float, absent: bool) -> Report:
    """Collective. Returns what all ranks agree on: `trainable`, and `had_grad` on *any* rank.

    Raises RuntimeError on all ranks, with names, when ranks froze different parameters, when a
    parameter was replaced, or when one got no gradient without `find_unused_parameters`. Averages
    parameters unfrozen since the buckets were made. An `absent` rank (inside `join`) only listens.
    """
    names, params = ddp._names, ddp._params
    present_ids = set(map(id, ddp.module.parameters()))
    replaced = [names[i] for i in lost if id(params[i]) not in present_ids]
    mine = Report([names[i] for i in lost], replaced, [p.requires_grad for p in params], had_grad)
    reports = coll.all_gather_object(None if absent else mine, ddp.group, by="ddp: unusual")
    present = {rank: report for rank, report in enumerate(reports) if report is not None}
    first = next(iter(present.values()))
    agreed = first._replace(
        had_grad=[any(had) for had in zip(*(r.had_grad for r in present.values()), strict=True)]
    )
    _raise_if_frozen_differently(names, present)
    _raise_if_replaced(present)
    if not ddp.find_unused_parameters:
        _raise_if_unused(present)
    for index, (yes, had) in enumerate(zip(agreed.trainable, agreed.had_grad, strict=True)):
        if yes and had and index not in ddp._place:  # in no bucket yet: on its own, this once
            param = params[index]
            empty = absent or param.grad is None
            grad = torch.zeros_like(param) if empty else param.grad * scale
            coll.all_reduce(grad, group=ddp.group, by=f"ddp {names[index]}")
            if not absent:
                param.grad = grad
    return agreed


def _raise_if_frozen_differently(names: list[str], present: dict[int, Report]) -> None:
    zero, first = next(iter(present.items()))
    for rank, report in present.items():
        for name, here, there in zip(names, first.trainable, report.trainable, strict=True):
            if here != there:
                raise RuntimeError(
                    f"DDP: parameter {name!r} has requires_grad={here} on rank {zero} but {there} "
                    f"on rank {rank}: freeze and unfreeze the same parameters on all ranks"
                )


def _raise_if_replaced(present: dict[int, Report]) -> None:
    found = _by_name({rank: report.replaced for rank, report in present.items()})
    if found:
        raise RuntimeError(
            f"DDP: parameters were replaced in the module after it was wrapped: {found}. Gradients "
            "of the new ones are not averaged: change the module first, then wrap it"
        )


def _raise_if_unused(present: dict[int, Report]) -> None:
    found = _by_name({rank: report.lost for rank, report in present.items()})
    if found:
        raise RuntimeError(
            f"DDP: parameters got no gradient in this backward: {found}. The others have been "
            "averaged, but stepping now would be an accident. If this is meant: pass "
            "find_unused_parameters=True. If they are never used: freeze them with "
            "requires_grad_(False). If they were used: the loss must come from what forward() "
            "returned, and a reentrant checkpoint needs an input that requires a gradient"
        )


def _by_name(names_of_rank: dict[int, list[str]]) -> str:
    ranks_of_name: dict[str, list[int]] = {}
    for rank, names in names_of_rank.items():
        for name in names:
            ranks_of_name.setdefault(name, []).append(rank)
    everywhere = len(names_of_rank)
    return ", ".join(
        f"{name!r} (" + ("all ranks" if len(r) == everywhere else f"ranks {r} only") + ")"
        for name, r in ranks_of_name.items()
    )
