"""What the miniatures at the end of the sets train: a tiny GPT on real text."""

from __future__ import annotations

import torch
import torch.distributed as dist

from minidist.train.data import TextBatches, load_tokens
from minidist.train.model import GPTConfig, build_gpt, loss_fn

TINY = GPTConfig(vocab=256, seq=8, width=16, layers=2, heads=2)
SEED = 7
ROWS = 4
STEPS = 3


def batches(rows: int = ROWS, steps: int = STEPS) -> list:
    """The global batches, the same on every rank: (inputs, targets), each [rows, seq]."""
    source = TextBatches(load_tokens(), TINY.seq, rows, seed=3)
    return [source.at(step) for step in range(steps)]


def own_rows(batch, rank: int, world_size: int) -> list[torch.Tensor]:
    """This rank's rows of a global batch."""
    return [t.chunk(world_size)[rank] for t in batch]


def mean_over_ranks(value: torch.Tensor, group=None) -> float:
    """The mean of a number over the ranks, without touching it."""
    value = value.detach().clone()
    dist.all_reduce(value, group=group)
    return value.item() / dist.get_world_size(group)


def single_process(
    optimizer_class, steps: int = STEPS, rows: int = ROWS, **defaults
) -> list[float]:
    """The losses that every strategy has to give: the same training in one process."""
    model = build_gpt(TINY, seed=SEED)
    optimizer = optimizer_class(model.parameters(), **defaults)
    losses = []
    for inputs, targets in batches(rows, steps):
        loss = loss_fn(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
