"""Set 2 on the ranks: what is done with the learner's functions, and what is looked at."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from minidist.learn.checks import miniature
from minidist.train.model import build_gpt, loss_fn


def named_gradients(model: nn.Module) -> dict:
    """Name -> gradient, None where there is none."""
    return {name: p.grad for name, p in model.named_parameters()}


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def _data(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's own data."""
    g = torch.Generator().manual_seed(10 + dist.get_rank())
    return torch.randn(rows, 3, generator=g), torch.randn(rows, 2, generator=g)


def _with_gradients() -> nn.Module:
    """A model after backward on this rank's own data, with one part that took no part."""
    model = nn.ModuleDict({"used": _model(), "idle": nn.Linear(2, 2)})
    x, y = _data()
    nn.functional.mse_loss(model["used"](x), y).backward()
    return model


def average_gradients(mine):
    model = _with_gradients()
    before = [p.detach().clone() for p in model.parameters()]
    mine.average_gradients(model)
    kept = all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    return {"gradient 梯度": named_gradients(model), "weights untouched 权重未变": kept}


def average_flat(mine):
    model = _with_gradients()
    mine.average_flat(model)
    return {
        "gradient 梯度": named_gradients(model),
        "all_reduce calls 调用次数": len(mine.spy.calls("all_reduce")),
    }


def make_buckets(mine):
    def buckets(sizes, cap, dtype=torch.float32):
        parameters = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in sizes]
        number = {id(p): i for i, p in enumerate(parameters)}
        return [[number[id(p)] for p in b] for b in mine.make_buckets(parameters, cap)]

    return {
        "sizes 10 20 30 40 50, cap 240 bytes": buckets([10, 20, 30, 40, 50], 240),
        "one larger than the cap 一个参数比上限大": buckets([5, 100, 5, 90], 80),
        "float16": buckets([10, 20, 30], 100, torch.float16),
        "exactly full 刚好装满": buckets([10, 10, 10, 10], 80),
        "no parameters 没有参数": buckets([], 80),
    }


class _Branches(nn.Module):
    """A layer that only some ranks use in a step, and one that nobody uses."""

    def __init__(self, ranks: tuple[int, ...]):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.middle, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.never = nn.Linear(2, 2)
        self.ranks = ranks

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if dist.get_rank() in self.ranks:
            x = torch.tanh(self.middle(x))
        return self.last(x)


def _gradients_of(mine, module: nn.Module, steps: int = 1, cap: int = 80) -> dict:
    ddp = mine.MiniDDP(module, cap)
    x, y = _data()
    for step in range(steps):
        ddp.zero_grad()
        nn.functional.mse_loss(ddp(x * (step + 1)), y).backward()
        ddp.finish()
    return named_gradients(module)


def overlap(mine):
    spy = mine.spy
    model = _model()
    ddp = mine.MiniDDP(model, 80)
    begin = spy.here
    model[0].weight.register_hook(lambda _: spy.mark("first layer"))
    x, y = _data()
    nn.functional.mse_loss(ddp(x), y).backward()
    started = [e.op for e in spy.events[begin : spy.place("first layer")]].count("all_reduce")
    flying = sum(not e.waited for e in spy.calls("all_reduce", since=begin))
    ddp.finish()
    calls = spy.calls("all_reduce", since=begin)
    gradients = named_gradients(model)
    return {
        "gradient 梯度": gradients,
        "second step 第二步": _gradients_of(mine, _model(1), steps=2),
        "buckets launched before the first layer 反向到达第一层之前已发出的桶": started,
        "on their way when backward ends 反向结束时还在路上的桶": flying,
        "waited for all 都等待过": all(e.waited for e in calls),
        "messages 通信次数": len(calls),
        "a layer nobody uses 谁都没用到的层": _gradients_of(mine, _Branches((0, 1))),
        "a layer only rank 1 uses 只有 rank 1 用到的层": _gradients_of(mine, _Branches((1,))),
    }


def accumulate(mine):
    spy = mine.spy
    model = _model()
    ddp = mine.MiniDDP(model, 10_000)
    x, y = _data(6)
    begin = spy.here
    parts = list(zip(x.chunk(3), y.chunk(3), strict=True))
    loss = mine.accumulate(ddp, parts, nn.functional.mse_loss)
    calls = spy.calls(since=begin)
    return {
        "gradient 梯度": named_gradients(model),
        "messages 通信次数": len(calls),
        "loss 损失": loss,
        "loss without graph 损失不带计算图": not getattr(loss, "requires_grad", False),
        "sync afterwards 之后 sync 的值": bool(ddp.sync),
    }


def sampler_indices(mine):
    result = {}
    for items, world, epoch in ((8, 4, 0), (10, 4, 0), (10, 4, 1), (2, 4, 0), (3, 8, 0), (7, 3, 5)):
        for rank in range(world):
            indices, padding = mine.sampler_indices(items, rank, world, epoch, seed=1)
            key = f"items={items} rank={rank} of {world} epoch={epoch}"
            result[f"{key}: indices 下标"] = [int(i) for i in indices]
            result[f"{key}: is_padding"] = [bool(p) for p in padding]
    return result


def global_mean(mine):
    rank = dist.get_rank()
    values = torch.tensor([[1.0, 2.0, 9.0], [4.0, 5.0, 6.0]][rank])
    uneven = mine.global_mean(values, [False, False, rank == 0])
    nothing = mine.global_mean(values, [rank == 1] * 3)
    before = values.clone()
    return {
        "mean 平均": uneven,
        "rank 1 has only padding rank 1 全是补的": nothing,
        "values untouched 输入未变": torch.equal(values, before),
    }


def learning_rate(mine):
    def row(*arguments):
        return [mine.learning_rate(step, *arguments) for step in range(7)]

    return {
        "base 0.1 at 32, batch 128, 4 warm-up steps": row(0.1, 32, 128, 4),
        "the same batch 同样的 batch": row(0.1, 32, 32, 3),
        "no warm-up 不预热": row(0.1, 32, 64, 0),
    }


def train(mine):
    model = build_gpt(
        miniature.TINY, seed=miniature.SEED + dist.get_rank()
    )  # the wrapper must make them the same
    batches = miniature.batches()
    begin = mine.spy.here
    rows = []
    model.embed.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    losses = mine.train(model, batches, loss_fn, 0.1, 2, 1)
    reference = build_gpt(miniature.TINY, seed=miniature.SEED)
    start = dict(reference.named_parameters())
    moved = {
        name: (p.detach() - start[name].detach()).norm()
        for name, p in model.named_parameters()
        if name in ("embed.token.weight", "head.norm.weight")
    }
    calls = mine.spy.calls("all_reduce", since=begin)
    return {
        "loss 损失": losses,
        "distance walked 权重走过的距离": moved,
        "rows of each forward 每次前向的行数": rows,
        "gradient elements sent 发送的梯度元素": sum(e.numel for e in calls if e.numel > 1),
    }
