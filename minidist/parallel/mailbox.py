"""Messages between the stages of a pipeline: posting, sending, and agreeing on shapes.

A receive needs a buffer of the right shape before the message comes. Which tensors a stage sends,
of which shapes, is its `layout` (microbatches.py). Both ends learn it once for each combination of
input shapes: in that step a layout precedes every activation, later steps send tensors only.
"""

from __future__ import annotations

import pickle
from collections import deque
from typing import Any

import torch
from torch import Tensor

from minidist.comm import collectives as coll
from minidist.parallel.microbatches import flatten, slots, unflatten
from minidist.parallel.schedules import Schedule, Transfer

_UNFINISHED_SENDS = 4  # on CPU: how many sent tensors may stay alive behind the computation


class Mailbox:
    """What has arrived for this rank and what has to leave it: activations (nested values) and
    gradients (lists of tensors), each for a micro-batch and the virtual stage that receives it."""

    def __init__(self, schedule: Schedule, group, device: torch.device):
        self.schedule, self.group, self.device = schedule, group, device
        self.learning = True
        self._known: dict[Any, dict[tuple[int, int], Any]] = {}
        self._layouts: dict[
            tuple[int, int], Any
        ] = {}  # (micro-batch, stage) -> layout of its input
        # (what, micro-batch, stage) -> receives under way, tensors, layout
        self._mail: dict[tuple[str, int, int], tuple[list, list[Tensor], Any]] = {}
        self._sends: deque[coll.Work] = deque()

    def begin(self, shapes: Any, forget: bool) -> None:
        """A step starts whose inputs have these shapes (any key that all ranks agree on)."""
        if forget or len(self._known) > 1000:
            self._known.clear()
        self.learning = shapes not in self._known
        self._layouts = self._known.setdefault(shapes, {})
        self._mail.clear()

    def finish(self) -> None:
        """Wait for the sends that are still under way."""
        while self._sends:
            self._sends.popleft().wait()

    # ------------------------------------------------------------------ on this rank
    def put_activation(self, microbatch: int, stage: int, value: Any) -> None:
        """Leave the input of a stage: `send` takes it if that stage is on another rank."""
        tensors, layout = flatten(value)
        self._mail["activation", microbatch, stage] = [], [t.detach() for t in tensors], layout

    def take_activation(self, microbatch: int, stage: int) -> tuple[Any, list[Tensor]]:
        """Wait for the input of a stage. Returns it with the leaves that will get its gradients."""
        works, tensors, layout = self._mail.pop(("activation", microbatch, stage))
        for work in works:
            work.wait()
        leaves = []
        if torch.is_grad_enabled():
            for i, slot in enumerate(slots(layout)):
                if slot.requires_grad:
                    leaves.append(tensors[i].requires_grad_())
                    tensors[i] = _NotALeaf.apply(tensors[i])
        return unflatten(tensors, layout), leaves

    def put_gradients(self, microbatch: int, stage: int, leaves: list[Tensor]) -> None:
        """Leave the gradients of a stage's outputs, which the next stage found in its leaves."""
        grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]
        self._mail["gradient", microbatch, stage] = [], grads, None

    def take_gradients(self, microbatch: int, stage: int) -> list[Tensor]:
        """Wait for the gradients of a stage's outputs (those that require one, in order)."""
        works, tensors, _ = self._mail.pop(("gradient", microbatch, stage))
        for work in works:
            work.wait()
        return tensors

    # ------------------------------------------------------------------ between ranks
    def post(self, transfer: Transfer) -> None:
        """Allocate what a message needs and start to receive it."""
        key = what, microbatch, stage = transfer[:3]
        layout = None
        if what == "activation":
            layout = self._learn(transfer) if self.learning else self._layouts[microbatch, stage]
            wanted = slots(layout)
        else:  # one gradient for each tensor that this stage sent and that requires one
            wanted = [
                slot for slot in slots(self._layouts[microbatch, stage + 1]) if slot.requires_grad
            ]
        tensors = [self._empty(slot.shape, slot.dtype) for slot in wanted]
        works = [self._receive(tensor, transfer, i) for i, tensor in enumerate(tensors)]
        self._mail[key] = works, tensors, layout

    def send(self, transfer: Transfer) -> None:
        """Start to send what was put for this stage."""
        key = what, microbatch, stage = transfer[:3]
        _, tensors, layout = self._mail.pop(key)
        if what == "activation":
            if self.learning:
                self._teach(layout, transfer)
            elif layout != self._layouts[microbatch, stage]:
                raise RuntimeError(_changed(transfer, self._layouts[microbatch, stage], layout))
        for i, tensor in enumerate(tensors):
            self._send(tensor, transfer, i)

    def _teach(self, layout: Any, transfer: Transfer) -> None:
        self._layouts[transfer.microbatch, transfer.stage] = layout
        data = torch.frombuffer(bytearray(pickle.dumps(layout)), dtype=torch.uint8)
        self._send(torch.tensor([data.numel()], device=self.device), transfer, -2)
        self._send(data.to(self.device), transfer, -1)

    def _learn(self, transfer: Transfer) -> Any:
        length = self._receive(self._empty(1, torch.int64), transfer, -2).wait().item()
        data = self._receive(self._empty(length, torch.uint8), transfer, -1).wait()
        layout = pickle.loads(bytes(data.tolist()))
        self._layouts[transfer.microbatch, transfer.stage] = layout
        return layout

    def _send(self, tensor: Tensor, transfer: Transfer, i: int) -> None:
        # A send keeps its tensor alive until somebody waits for it, and gloo does not say by itself
        # that it is done. On CUDA waiting would hold up the compute stream, and NCCL does say so.
        most = _UNFINISHED_SENDS if self.device.type == "cpu" else float("inf")
        while self._sends and (len(self._sends) >= most or self._sends[0].done()):
            self._sends.popleft().wait()
        self._sends.append(coll.isend(tensor, transfer.target, **self._how(transfer, i)))

    def _receive(self, tensor: Tensor, transfer: Transfer, i: int) -> coll.Work:
        return coll.irecv(tensor, transfer.source, **self._how(transfer, i))

    def _how(self, transfer: Transfer, i: int) -> dict[str, Any]:
        what, microbatch, stage, *_ = transfer
        number = (microbatch * self.schedule.virtual_stages + stage) * 2 + (what == "gradient")
        by = f"pipeline {what} {microbatch} for stage {stage}"
        return {"group": self.group, "tag": number * 256 + i % 256, "by": by}

    def _empty(self, shape, dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)


class _NotALeaf(torch.autograd.Function):
    """The same memory under another name. Autograd forbids changing a leaf in place, and a stage
    may begin with nn.ReLU(inplace=True), which is fine in the whole model."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad


def _changed(transfer: Transfer, agreed: Any, layout: Any) -> str:
    def text(layout):
        return ", ".join(
            f"{slot.dtype} {list(slot.shape)}{' with gradient' if slot.requires_grad else ''}"
            for slot in slots(layout)
        )

    return (
        f"stage {transfer.stage - 1} returned {text(layout)} for micro-batch "
        f"{transfer.microbatch}, but {text(agreed)} in an earlier step with inputs of the same "
        "shapes. If shapes depend on the values, use Pipeline(..., dynamic=True)"
    )
