"""Which optimizers may run on a flat shard: those that update every element on its own.

SGD, Adam, AdamW, RMSprop, ... look at one element and its own history. LAMB and LARS need the norm
of the whole layer, Adafactor its rows and columns, Muon the matrix, LBFGS everything: on a slice of
a flat buffer they would go on without an error, with other numbers. A list of names would miss the
optimizer that a user wrote, so the class is tried out instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim import Optimizer


def refuse_unless_elementwise(optimizer_class: type[Optimizer], defaults: dict[str, Any]) -> None:
    """ValueError unless two steps on a matrix and on its elements cut into two agree."""
    with unset_fake_temporarily():  # a dry run with fake tensors needs real values here
        _try_out(optimizer_class, defaults)


def _try_out(optimizer_class: type[Optimizer], defaults: dict[str, Any]) -> None:
    if "lr" in defaults:
        defaults = {**defaults, "lr": 0.1}  # a schedule may start at 0, and then nothing would move
    generator = torch.Generator().manual_seed(0)
    start, *grads = torch.randn(3, 24, dtype=torch.float64, generator=generator)
    results = []
    for shapes in ([(4, 6)], [(7,), (17,)]):
        sizes = [torch.Size(shape).numel() for shape in shapes]
        pieces = zip(start.split(sizes), shapes, strict=True)
        params = [nn.Parameter(piece.clone().view(shape)) for piece, shape in pieces]
        try:
            optimizer = optimizer_class(params, **defaults)
            for grad in grads:
                for param, part in zip(params, grad.split(sizes), strict=True):
                    param.grad = part.clone().view(param.shape)
                optimizer.step()
        except Exception as error:
            raise ValueError(
                f"{optimizer_class.__name__} cannot run on a flat shard: {error}. ZeRO needs an "
                "optimizer that updates every element on its own (SGD, Adam, AdamW, RMSprop, ...)"
            ) from error
        results.append(torch.cat([param.detach().flatten() for param in params]))
    if not torch.allclose(*results, rtol=1e-9, atol=0):
        raise ValueError(
            f"{optimizer_class.__name__} updates an element by looking at the rest of its tensor "
            "(a norm, a matrix): on a flat shard it would see only a part. Use an elementwise "
            "optimizer with ZeRO, or this one with DDP"
        )
