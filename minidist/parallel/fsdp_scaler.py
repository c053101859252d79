"""Loss scaling for fp16 with sharded gradients: an infinity on one rank makes all ranks skip."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minidist.comm import collectives as coll


class ShardedGradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for gradients that are cut over ranks, as `md.FSDP` leaves them.

    Each rank sees only its pieces. Without the agreement the rank that met an infinity would skip
    its step and halve its scale, the others would not, and parameters and scales would part ways
    without an error. A rank that holds no element of anything simply joins the others' decision.

    `device`, `init_scale`, ...: as in torch. `group`: where the gradients are cut (default: world);
    every rank of it must call `step` or `unscale_`.
    """

    def __init__(self, device: str = "cuda", *, group: Any = None, **options: Any):
        super().__init__(device, **options)
        self.group = group

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(*args, **kwargs)
        for flag in found.values():
            coll.all_reduce(flag, "max", group=self.group, by="loss scale: infinity found")
        return found
