"""Loss scaling for float16 gradients, when each rank sees only a part of them.

float16 loses gradients below 6e-8, so the loss is multiplied by a large number first. If that is
too much, some gradient becomes infinite: the step is skipped and the number halved. With sharded
gradients the infinity is on one rank only, and a rank may own no gradient at all: all ranks must
decide together, or their parameters part for good. Micikevicius et al. 2018, "Mixed Precision
Training".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from minidist.comm import collectives as coll
from minidist.parallel.zero import ZeroOptimizer


class LossScaler:
    """Like `torch.amp.GradScaler`, with one decision for all ranks of `group`.

        scaler.scale(loss).backward()
        stepped = scaler.step(optimizer)    # divides the gradients; all ranks skip on inf or nan

    Works with `ZeroOptimizer` and any optimizer over parameters whose `.grad` is set (DDP, FSDP).
    `growth_interval`: after that many good steps in a row the scale doubles.
    """

    def __init__(self, initial: float = 2.0**16, growth_interval: int = 2000, group=None):
        if initial <= 0 or growth_interval < 1:
            raise ValueError(
                f"initial ({initial}) and growth_interval ({growth_interval}) must be positive"
            )
        self.value, self.growth_interval, self.group = float(initial), growth_interval, group
        self._good_steps = 0

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale: call `backward()` on this."""
        return loss * self.value

    @torch.no_grad()
    def step(self, optimizer: Optimizer) -> bool:
        """Unscale and step, or skip and halve the scale. Collective. Returns whether it stepped."""
        if isinstance(optimizer, ZeroOptimizer):
            gradients = [part for _, part in optimizer.mean_gradients()]
            device = optimizer.param_groups[0]["params"][0].device
        else:
            params = [p for g in optimizer.param_groups for p in g["params"]]
            gradients, device = [p.grad for p in params if p.grad is not None], params[0].device
        # A rank without gradients takes part with a neutral 0, or the others would wait for it.
        bad = torch.zeros(1, device=device)
        for gradient in gradients:
            bad = torch.maximum(bad, (~gradient.isfinite()).any().to(bad))
            gradient.div_(self.value)
        coll.all_reduce(bad, "max", group=self.group, by="loss scaler")
        if bad.item():
            self.value, self._good_steps = self.value / 2, 0
            optimizer.zero_grad()
            return False
        optimizer.step()
        self._good_steps += 1
        if self._good_steps == self.growth_interval:
            self.value, self._good_steps = self.value * 2, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """The scale and the good steps so far; the same on all ranks."""
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved scale."""
        self.value, self._good_steps = float(state["value"]), int(state["good_steps"])
