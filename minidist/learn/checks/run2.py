"""Set 2 on the ranks: what is done with the learner's functions, and what is looked at."""

from __future__ import annotations

from contextlib import nullcontext

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
    """A model after backward on this rank's own data, with one part in the middle left out."""
    used = _model()
    model = nn.ModuleDict({"first": used[:2], "idle": nn.Linear(2, 2), "last": used[2:]})
    x, y = _data()
    nn.functional.mse_loss(model["last"](model["first"](x)), y).backward()
    return model


def average_gradients(mine):
    model = _with_gradients()
    before = [p.detach().clone() for p in model.parameters()]
    mine.average_gradients(model)
    kept = all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    return {"gradient | 梯度": named_gradients(model), "weights untouched | 权重未变": kept}


def average_flat(mine):
    model = _with_gradients()
    mine.average_flat(model)
    return {
        "gradient | 梯度": named_gradients(model),
        "all_reduce calls | 调用次数": len(mine.spy.calls("all_reduce")),
    }


def make_buckets(mine):
    def buckets(sizes, cap, dtype=torch.float32):
        parameters = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in sizes]
        number = {id(p): i for i, p in enumerate(parameters)}
        made = mine.make_buckets(parameters, cap)
        return made if made is None else [[number[id(p)] for p in b] for b in made]

    return {
        _bucket_label("40, 80, 120, 160, 200", 240): buckets([10, 20, 30, 40, 50], 240),
        _bucket_label("20, 400, 20, 360", 80): buckets([5, 100, 5, 90], 80),
        _bucket_label("20, 40, 60", 100, "float16"): buckets([10, 20, 30], 100, torch.float16),
        _bucket_label("40, 40, 40, 40", 80): buckets([10, 10, 10, 10], 80),
    }


def _bucket_label(sizes: str, cap: int, dtype: str = "float32") -> str:
    english = (
        f"parameters 0, 1, ... of {sizes} bytes ({dtype}), cap_bytes={cap}; numbers per bucket"
    )
    chinese = f"第 0、1、… 个参数为 {sizes} 字节（{dtype}），cap_bytes={cap}；每个桶里是第几个"
    return f"{english} | {chinese}"


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


class _Shuffled(nn.Module):
    """Uses its layers in another order than it defines them: the first bucket fills last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.last, self.middle, self.first = nn.Linear(4, 2), nn.Linear(4, 4), nn.Linear(3, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def _gradients_of(mine, module: nn.Module, steps: int = 1, cap: int = 80) -> dict:
    ddp = mine.MiniDDP(module, cap)
    x, y = _data()
    for step in range(steps):
        ddp.zero_grad()
        nn.functional.mse_loss(ddp(x * (step + 1)), y).backward()
        ddp.finish()
    return named_gradients(module)


def _launched_in_backward(mine, module: nn.Module, sync: bool = True) -> int:
    """Collectives that one backward has started when it ends."""
    ddp = mine.MiniDDP(module, 80)
    x, y = _data()
    begin = mine.spy.here
    with nullcontext() if sync else ddp.no_sync():
        nn.functional.mse_loss(ddp(x), y).backward()
    count = len(mine.spy.calls(since=begin))
    if sync:
        ddp.finish()
    return count


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
        "gradient | 梯度": gradients,
        "second step | 第二步": _gradients_of(mine, _model(1), steps=2),
        "buckets launched before the first layer | 反向到达第一层之前已发出的桶": started,
        "on their way when backward ends | 反向结束时还在路上的桶": flying,
        "waited for all | 都等待过": all(e.waited for e in calls),
        "messages | 通信次数": len(calls),
        "layers used in another order than defined | 使用顺序与定义顺序不同": _gradients_of(
            mine, _Shuffled()
        ),
        "the same, buckets launched when backward ends | 同上，反向结束时已发出的桶": (
            _launched_in_backward(mine, _Shuffled())
        ),
        "collectives in a backward under no_sync | no_sync 里的反向发出的通信": (
            _launched_in_backward(mine, _model(), sync=False)
        ),
        "a layer nobody uses | 谁都没用到的层": _gradients_of(mine, _Branches((0, 1))),
        "a layer only rank 1 uses | 只有 rank 1 用到的层": _gradients_of(mine, _Branches((1,))),
    }


def accumulate(mine):
    spy = mine.spy
    model = _model()
    ddp = mine.MiniDDP(model, 80)
    x, y = _data(6)
    begin = spy.here
    model[0].weight.register_hook(lambda _: spy.mark("first layer"))
    parts = list(zip(x.chunk(3), y.chunk(3), strict=True))
    loss = mine.accumulate(ddp, parts, nn.functional.mse_loss)
    calls = spy.calls(since=begin)
    early = [e for e in spy.events[begin : spy.place("first layer", last=True)] if e.size]
    return {
        "gradient | 梯度": named_gradients(model),
        "messages | 通信次数": len(calls),
        "buckets launched in the last backward, before the first layer"
        " | 最后一次反向到达第一层之前已发出的桶": len(early),
        "loss | 损失": loss,
        "loss is a 0-d tensor | 损失是 0 维张量": isinstance(loss, torch.Tensor)
        and loss.dim() == 0,
        "loss without graph | 损失不带计算图": not getattr(loss, "requires_grad", False),
        "sync afterwards | 之后 sync 的值": bool(ddp.sync),
    }


def sampler_indices(mine):
    result, kinds = {}, set()
    for items, world, epoch in ((8, 4, 0), (10, 4, 0), (10, 4, 1), (2, 4, 0), (3, 8, 0), (7, 3, 5)):
        for rank in range(world):
            indices, padding = mine.sampler_indices(items, rank, world, epoch, seed=1)
            key = f"items={items} rank={rank} of {world} epoch={epoch}"
            result[f"{key}: indices | 下标"] = [int(i) for i in indices]
            result[f"{key}: is_padding"] = [bool(p) for p in padding]
            kinds |= {type(i).__name__ for i in indices} | {type(p).__name__ for p in padding}
    return result | {"types | 类型": sorted(kinds)}


def global_mean(mine):
    rank = dist.get_rank()
    values = torch.tensor([[1.25, 2.5, 9.75], [4.5, 5.25, 6.125]][rank])
    uneven = mine.global_mean(values, [False, False, rank == 0])
    nothing = mine.global_mean(values, [rank == 1] * 3)
    before = values.clone()
    return {
        "mean | 平均": uneven,
        "rank 1 has only padding | rank 1 全是补的": nothing,
        "values untouched | 输入未变": torch.equal(values, before),
    }


def learning_rate(mine):
    def row(*arguments):
        return [mine.learning_rate(step, *arguments) for step in range(7)]

    return {
        "base 0.1 at 32, batch 128, 4 warm-up steps": row(0.1, 32, 128, 4),
        "the same batch | 同样的 batch": row(0.1, 32, 32, 3),
        "no warm-up | 不预热": row(0.1, 32, 64, 0),
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
        "loss | 损失": losses,
        "distance walked | 权重走过的距离": moved,
        "rows of each forward | 每次前向的行数": rows,
        "gradient elements sent | 发送的梯度元素": sum(e.numel for e in calls if e.numel > 1),
    }
