"""Parameters that live on several pipeline ranks at once, such as a shared embedding and head.

Each holder computes the gradient of its own use. The copies stay one parameter only if all of them
start equal and receive the sum of these gradients, exactly the same one (a sum of floats depends on
its order). Megatron-LM does this with an all-reduce in an extra process group; point-to-point
messages need no group, and every holder adds up the same numbers in the same order.
"""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor, nn

from minidist.comm import collectives as coll

_TAG = 0x7E000000  # far above the tags of pipeline.py


class Tied:
    """parameters: {name: parameter} held by this rank; names that other ranks hold too are tied.

    Collective; the copies of each become equal to that of the holder with the lowest rank. Raises
    ValueError on all ranks when copies differ in shape or dtype.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], group=None):
        self.group, self.rank = group, coll.rank(group)
        mine = {name: (tuple(p.shape), str(p.dtype)) for name, p in parameters.items()}
        everyone = coll.all_gather_object(mine, group, by="pipeline: tied parameters")
        self.shared: list[tuple[nn.Parameter, list[int]]] = []  # parameter, ranks that hold it
        self.duplicates: set[nn.Parameter] = set()  # a lower rank counts these in norms
        for name in sorted({name for held in everyone for name in held}):
            holders = [rank for rank, held in enumerate(everyone) if name in held]
            kinds = {everyone[rank][name] for rank in holders}
            if len(kinds) > 1:
                raise ValueError(f"copies of tied parameter {name!r} differ: {sorted(kinds)}")
            if len(holders) > 1 and self.rank in holders:
                self.shared.append((parameters[name], holders))
                if self.rank != holders[0]:
                    self.duplicates.add(parameters[name])
        for i, (parameter, holders) in enumerate(self.shared):
            first = self._exchange(parameter.detach(), holders, i)[0]
            with torch.no_grad():
                parameter.copy_(first)
        self._before: list[Tensor | None] = []

    def before_step(self) -> None:
        """Set aside what earlier steps accumulated: it is a sum already, adding it up again would
        count it once per holder."""
        self._before = []
        for parameter, _ in self.shared:
            self._before.append(None if parameter.grad is None else parameter.grad.clone())
            if parameter.grad is not None:
                parameter.grad.zero_()  # in place: a bucket of data parallelism may own it

    @torch.no_grad()
    def after_step(self) -> None:
        """Sum the gradients of this step over the holders and add what was there before."""
        for i, ((parameter, holders), before) in enumerate(
            zip(self.shared, self._before, strict=True)
        ):
            if not parameter.requires_grad:
                continue
            mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            total = torch.stack(self._exchange(mine, holders, i)).sum(0)
            if before is not None:
                total += before
            if parameter.grad is None:
                parameter.grad = total
            else:
                parameter.grad.copy_(total)

    def _exchange(self, mine: Tensor, holders: list[int], number: int) -> list[Tensor]:
        """The holders' tensors in the order of their ranks.

        Each pair talks in turn and the lower rank sends first, so that the messages between two
        ranks have the same order on both (NCCL would wait forever if both sent first).
        """
        copies = {rank: torch.empty_like(mine) for rank in holders if rank != self.rank}
        how = {"group": self.group, "tag": _TAG + number, "by": "pipeline: tied"}
        works = []
        for low, high in combinations(holders, 2):
            if self.rank == low:
                works.append(coll.isend(mine, high, **how))
                works.append(coll.irecv(copies[high], high, **how))
            elif self.rank == high:
                works.append(coll.irecv(copies[low], low, **how))
                works.append(coll.isend(mine, low, **how))
        for work in works:
            work.wait()
        return [copies.get(rank, mine) for rank in holders]
