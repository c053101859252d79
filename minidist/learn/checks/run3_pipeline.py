"""Set 3 on the ranks, second part: pipeline parallel."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from minidist.learn.checks import miniature
from minidist.parallel.schedules import schedule
from minidist.train.model import build_gpt, loss_fn


def _words(order) -> str:
    """[("F", 0), ("B", 0)] -> "F0 B0"."""
    return " ".join(f"{kind}{i}" for kind, i in order)


def simple_orders(mine):
    return {
        "naive, m=4": _words(mine.naive_order(4)),
        "gpipe, m=4": _words(mine.gpipe_order(4)),
        "naive, m=1": _words(mine.naive_order(1)),
        "gpipe, m=3": _words(mine.gpipe_order(3)),
    }


def one_f_one_b(mine):
    cases = [(stage, 4, 6) for stage in range(4)] + [(0, 4, 2), (1, 4, 2), (0, 1, 3)]
    return {
        f"stage {stage} of {stages}, m={m}": _words(mine.one_f_one_b(stage, stages, m))
        for stage, stages, m in cases
    }


def bubble(mine):
    names = ("naive", "gpipe", "1f1b")
    result = {
        f"bubble: {name}, {stages} stages, m={m}": mine.bubble(name, stages, m)
        for name in names
        for stages, m in ((4, 8), (4, 1), (2, 6), (1, 5))
    }
    flying = {
        f"in flight: {name}, stage {stage} of {stages}, m={m}": mine.in_flight(
            name, stage, stages, m
        )
        for name in names
        for stage, stages, m in ((0, 4, 8), (2, 4, 8), (3, 4, 8), (0, 4, 2))
    }
    return result | flying


def run_stage(mine):
    stage, stages, m = dist.get_rank(), dist.get_world_size(), 4
    result = {}
    for name in ("gpipe", "1f1b"):
        torch.manual_seed(stage)
        module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        inputs = list(torch.randn(m, 2, 4, generator=torch.Generator().manual_seed(1)))
        targets = list(torch.randn(m, 2, 4, generator=torch.Generator().manual_seed(2)))
        done = _watch(module)
        actions = schedule(name, stages, m).actions[stage]
        order = [(action.kind, action.microbatch) for action in actions]
        loss = mine.run_stage(module, order, inputs, targets, nn.functional.mse_loss, (2, 4))
        result[f"{name}: gradients | 梯度"] = [p.grad for p in module.parameters()]
        result[f"{name}: loss | 损失"] = loss
        result[f"{name}: what was run | 实际执行的"] = " ".join(done)
    return result


def _watch(module: nn.Module) -> list[str]:
    """Which forwards and backwards the module runs, in order."""
    done: list[str] = []

    def forward(_, inputs, output):
        done.append("F")
        if output.requires_grad:
            output.register_hook(lambda _: done.append("B"))

    module.register_forward_hook(forward)
    return done


def train_pipeline(mine):
    model = build_gpt(miniature.TINY, seed=miniature.SEED)
    layers = model.layers()
    share = len(layers) // dist.get_world_size()
    rank = dist.get_rank()
    own = layers[rank * share : (rank + 1) * share]
    before = [[p.detach().clone() for p in layer.parameters()] for layer in layers]
    losses = mine.train_pipeline(model, miniature.batches(), loss_fn, 0.3, 4)
    moved = [
        any(not torch.equal(p, b) for p, b in zip(layer.parameters(), old, strict=True))
        for layer, old in zip(layers, before, strict=True)
    ]
    return {
        "loss | 损失": losses,
        "layers that moved | 变化了的层": moved,
        "gradients cleared | 梯度已清空": all(
            p.grad is None for layer in own for p in layer.parameters()
        ),
        "messages sent | 发送次数": len(mine.spy.calls("send")),
    }
