"""Set 4 on the ranks: FSDP."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from minidist.learn.checks import miniature
from minidist.train.model import build_gpt, loss_fn

_SHAPES = ((2, 3), (4,), (3, 1))  # thirteen numbers: two ranks need one element of padding


def _tensors() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=g) for shape in _SHAPES]


def _layer(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def _data() -> torch.Tensor:
    """This rank's own rows."""
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(30 + dist.get_rank()))


def _held(unit) -> int:
    return unit.full.untyped_storage().nbytes()


def cut(mine):
    tensors = _tensors()
    shard = mine.cut(tensors)
    own = shard.untyped_storage().nbytes() == shard.numel() * shard.element_size()
    parts = mine.gather(shard, [t.shape for t in tensors])
    return {
        "cut: own part | 自己的一段": shard,
        "cut: own memory only | 只占自己的内存": own,
        "gather": list(parts),
        "gather: shapes | 形状": [list(p.shape) for p in parts],
        "all in one shape | 只有一个形状": list(mine.gather(shard, [(13,)])),
    }


def gather_and_free(mine):
    unit = mine.Unit(_layer())
    spy = mine.spy
    result = {"bytes after __init__ | 初始化之后的字节数": _held(unit)}
    begin = spy.here
    full = unit.full
    unit.gather()
    result["bytes after gather | 收集之后的字节数"] = _held(unit)
    result["the same tensor | 还是同一个张量"] = unit.full is full
    if _held(unit) < unit.nbytes or unit.full is not full:  # reading freed memory would crash
        return result
    result["parameters | 参数"] = [p.detach().clone() for p in unit.parts]
    unit.gather()
    result["messages of two gathers | 收集两次的通信次数"] = len(spy.calls(since=begin))
    unit.free()
    result["bytes after free | 释放之后的字节数"] = _held(unit)
    with torch.no_grad():
        unit.shard += 1.0
    unit.gather()
    result["after a step of the shard | 更新 shard 之后"] = [p.detach().clone() for p in unit.parts]
    unit.free()
    result["own part kept | 自己的一段还在"] = unit.shard
    return result


def _safe(unit, spy):
    """Gather and free as they should be, except that free writes NaN instead of giving memory back:
    code that reads freed parameters then gets NaN instead of crashing."""
    state = {"there": False, "gathers": 0}

    def gather():
        if not state["there"]:
            shards = [torch.empty_like(unit.shard.detach()) for _ in range(dist.get_world_size())]
            dist.all_gather(shards, unit.shard.detach())
            unit.full.copy_(torch.cat(shards))
            state["there"] = True
            state["gathers"] += 1

    def free():
        unit.full.fill_(float("nan"))
        state["there"] = False

    unit.full.untyped_storage().resize_(unit.nbytes)
    unit.gather, unit.free = gather, free
    free()
    spy.mark("ready")
    return state


def forward(mine):
    unit = mine.Unit(_layer())
    state = _safe(unit, mine.spy)
    x = _data().requires_grad_()
    y = mine.forward(unit, x)
    there = state["there"]
    freed_before = state["gathers"]
    y.sum().backward()
    return {
        "output | 输出": y,
        "freed after forward | 前向之后已释放": not there,
        "gradient of the input | 输入的梯度": x.grad,
        "gathers in forward and backward | 前向与反向共收集": [freed_before, state["gathers"]],
    }


def arrived(mine):
    units = [mine.Unit(_layer(seed)) for seed in (0, 1)]
    states = [_safe(unit, mine.spy) for unit in units]
    begin = mine.spy.here

    def step():
        x = _data().requires_grad_()
        for unit in units:
            unit.gather()
            x = unit.compute(x)
            unit.free()
        x.pow(2).mean().backward()

    step()
    first = [None if u.shard.grad is None else u.shard.grad.clone() for u in units]
    cleared = all(p.grad is None for u in units for p in u.parts)
    there = [s["there"] for s in states]
    step()
    scatters = mine.spy.calls("reduce_scatter", "all_reduce", since=begin)
    return {
        "gradient of the shards | 各段的梯度": first,
        "whole gradients cleared | 完整的梯度已清空": cleared,
        "parameters freed after backward | 反向之后参数已释放": [not t for t in there],
        "after a second backward | 第二次反向之后": [u.shard.grad for u in units],
        "reductions | 规约": [e.op for e in scatters],
    }


def prefetch(mine):
    spy = mine.spy
    units = [mine.Unit(_layer(seed)) for seed in range(3)]
    most = 0

    def watch(unit, i):
        compute, start = unit.compute, unit.start_gather

        def computing(x):
            nonlocal most
            most = max(most, sum(_held(u) > 0 for u in units))
            if _held(unit) == 0 or spy.unwaited(f"gather {i}"):
                spy.mark(f"unit {i} not there")
                return x * float("nan")
            spy.mark(f"compute {i}")
            return compute(x)

        def starting():
            spy.mark(f"start {i}")
            work = start()
            spy.events[-1].note = f"gather {i}"
            return work

        unit.compute, unit.start_gather = computing, starting

    for i, unit in enumerate(units):
        watch(unit, i)
    begin = spy.here
    y = mine.forward_with_prefetch(units, _data())
    marks = [e.op for e in spy.events[begin:] if not e.size]
    return {
        "output | 输出": y,
        "order | 顺序": marks,
        "most units at once | 同时存在的单元": most,
        "left afterwards | 之后还占着的": sum(_held(u) > 0 for u in units),
    }


def mixed_precision(mine):
    n, rank = dist.get_world_size(), dist.get_rank()
    shard = torch.linspace(-1, 1, 5) * (rank + 1.234)
    begin = mine.spy.here
    full = mine.gather_low(shard)
    gathered = sorted({e.dtype for e in mine.spy.calls(since=begin)})
    g = torch.Generator().manual_seed(60 + rank)
    flat = (torch.randn(4 * n, generator=g) * 3).bfloat16()
    begin = mine.spy.here
    grad = mine.reduce_grad(flat)
    calls = mine.spy.calls(since=begin)
    return {
        "gather_low: parameters | 参数": full,
        "gather_low: dtype | 类型": str(full.dtype),
        "gather_low: communicated in | 通信用的类型": gathered,
        "reduce_grad: gradient | 梯度": grad,
        "reduce_grad: dtype | 类型": str(grad.dtype),
        "reduce_grad: collectives | 用到的集合通信": sorted({e.op for e in calls}),
        "reduce_grad: averaged in | 求平均用的类型": sorted({e.dtype for e in calls}),
    }


def train(mine):
    model = build_gpt(miniature.TINY, seed=miniature.SEED)
    losses = mine.train(model, miniature.batches(), loss_fn, 1e-2)
    calls = mine.spy.calls("all_gather", "reduce_scatter")
    whole = len(miniature.batches()) * sum(p.numel() for p in model.parameters())
    return {
        "loss | 损失": losses,
        "bytes of whole parameters left | 还占着的完整参数": sum(
            p.untyped_storage().nbytes() for p in model.parameters()
        ),
        "gathered twice per step | 每步收集两次": round(
            sum(2 * e.numel for e in calls if e.op == "all_gather") / whole, 1
        ),
        "gathers per step | 每步收集的次数": sum(e.op == "all_gather" for e in calls)
        / len(miniature.batches()),
        "forward prefetches | 前向有预取": sum(e.async_op for e in calls if e.op == "all_gather")
        >= len(miniature.batches()) * len(model.layers()),
    }
