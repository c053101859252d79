"""Set 5 on the ranks: ZeRO."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from minidist.learn.checks import miniature
from minidist.train.model import build_gpt, loss_fn


def _parameters(dtype=torch.float32) -> list[nn.Parameter]:
    """Thirteen numbers in three parameters: two ranks need one element of padding."""
    g = torch.Generator().manual_seed(1)
    shapes = ((2, 3), (4,), (3, 1))
    return [nn.Parameter(torch.randn(s, generator=g).to(dtype)) for s in shapes]


def _give_gradients(parameters, step: int = 0) -> None:
    g = torch.Generator().manual_seed(100 * step + dist.get_rank())
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=g).to(p.dtype)


def _own_part(parameters, dtype=torch.float32) -> nn.Parameter:
    flat = torch.cat([p.detach().flatten() for p in parameters])
    flat = torch.cat([flat, flat.new_zeros(-flat.numel() % dist.get_world_size())])
    return nn.Parameter(flat.chunk(dist.get_world_size())[dist.get_rank()].to(dtype))


def _cleared(parameters) -> bool:
    return all(p.grad is None for p in parameters)


def state_bytes(mine):
    def rounded(parameters, stage, n):
        found = mine.state_bytes(parameters, stage, n)
        return {k: float(found[k]) for k in ("parameters", "gradients", "optimizer")}

    cases = [(1000, stage, 8) for stage in range(4)] + [(7.5e9, 1, 64), (7.5e9, 3, 64)]
    return {f"{p:g} parameters, stage {s}, n={n}": rounded(p, s, n) for p, s, n in cases}


def step_stage1(mine):
    parameters = _parameters()
    shard = _own_part(parameters)
    optimizer = torch.optim.SGD([shard], lr=0.1, momentum=0.9)
    begin = mine.spy.here
    for step in range(2):
        _give_gradients(parameters, step)
        mine.step_stage1(parameters, shard, optimizer)
    return {
        "parameters after two steps | 两步之后的参数": parameters,
        "own part | 自己的一段": shard,
        "gradients cleared | 梯度已清空": _cleared(parameters),
        "elements all-reduced | 做 all-reduce 的元素": mine.spy.sent("all_reduce", since=begin),
        "elements all-gathered | 做 all-gather 的元素": mine.spy.sent("all_gather", since=begin),
    }


def reduce_and_free(mine):
    parameters = _parameters()
    shard = _own_part(parameters)
    begin = mine.spy.here
    _give_gradients(parameters)
    mine.reduce_and_free(parameters, shard)
    first = None if shard.grad is None else shard.grad.clone()
    cleared = _cleared(parameters)
    _give_gradients(parameters, 1)
    mine.reduce_and_free(parameters, shard)
    calls = {e.op for e in mine.spy.calls(since=begin)}
    return {
        "own part of the mean gradient | 平均梯度的自己一段": first,
        "after a second backward | 第二次 backward 之后": shard.grad,
        "whole gradients freed | 完整梯度已释放": cleared,
        "collectives | 用到的集合通信": sorted(calls),
    }


def step_with_masters(mine):
    parameters = _parameters(torch.bfloat16)
    master = _own_part(parameters, torch.float32)
    optimizer = torch.optim.SGD([master], lr=1e-3)
    begin = mine.spy.here
    for step in range(6):
        _give_gradients(parameters, step % 2)
        mine.step_with_masters(parameters, master, optimizer)
    gathers = mine.spy.calls("all_gather", since=begin)
    return {
        "master copy | 主副本": master,
        "parameters | 参数": parameters,
        "gradients cleared | 梯度已清空": _cleared([*parameters, master]),
        "dtype of the all-gather | all-gather 的类型": sorted({e.dtype for e in gathers}),
        "dtype of parameters | 参数的类型": [str(p.dtype) for p in parameters],
        "dtype of the reduction | 规约的类型": sorted(
            {e.dtype for e in mine.spy.calls("reduce_scatter", "all_reduce", since=begin)}
        ),
    }


def clip(mine):
    def shards(scale):
        g = torch.Generator().manual_seed(50 + dist.get_rank())
        parts = [nn.Parameter(torch.zeros(n)) for n in (4, 3)]
        for p in parts:
            p.grad = scale * torch.randn(p.shape, generator=g)
        return parts

    large, small = shards(3.0), shards(0.05)
    return {
        "norm | 范数": mine.clip_(large, 1.0),
        "clipped gradients | 裁剪后的梯度": [p.grad for p in large],
        "norm of a small gradient | 小梯度的范数": mine.clip_(small, 1.0),
        "small gradients untouched | 小梯度不变": [p.grad for p in small],
    }


def offload_step(mine):
    shard = nn.Parameter(torch.linspace(-1, 1, 6).to(torch.bfloat16))
    host = nn.Parameter(shard.detach().float())
    optimizer = torch.optim.SGD([host], lr=1e-3, momentum=0.9)
    memory = shard.data_ptr()
    freed, left, kinds = [], [], set()
    optimizer.register_step_pre_hook(lambda *_: freed.append(shard.grad is None))
    for step in range(3):
        shard.grad = torch.full((6,), 0.3 + step, dtype=torch.bfloat16)
        mine.offload_step(shard, host, optimizer)
        left.append(shard.grad is None)
        kinds.add(str(host.grad.dtype) if host.grad is not None else "none")
    return {
        "host copy | 主机上的副本": host,
        "shard | 参数段": shard,
        "dtype of host.grad | 类型": sorted(kinds - {"none"}) or ["torch.float32"],
        "dtype of the shard | 参数段的类型": str(shard.dtype),
        "shard.grad freed before the step | 更新前已释放": freed,
        "shard.grad afterwards is None | 之后 shard.grad 为 None": left,
        "same memory | 同一块内存": shard.data_ptr() == memory,
    }


def mini_zero(mine):
    model = build_gpt(miniature.TINY, seed=miniature.SEED)
    rank, n = dist.get_rank(), dist.get_world_size()
    groups = [list(layer.parameters()) for layer in model.layers()]
    zero = mine.MiniZero(groups, torch.optim.AdamW, max_norm=0.5, lr=1e-2)
    most = 0

    def look(_):  # after the learner's hook: what is still held
        nonlocal most
        held = sum(p.numel() for p in model.parameters() if p.grad is not None)
        most = max(most, held)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(look)
    begin = mine.spy.here
    losses = []
    for batch in miniature.batches():
        inputs, targets = miniature.own_rows(batch, rank, n)
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        zero.step()
        losses.append(loss.detach())
    whole = sum(p.numel() for p in model.parameters())
    calls = {e.op for e in mine.spy.calls("reduce_scatter", "all_gather", since=begin)}
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    return {
        "loss | 损失": losses / n,
        "collectives | 用到的集合通信": sorted(calls),
        f"most gradient elements at once, of {whole} | 同时存在的完整梯度元素": most,
        "shard gradients cleared | 段的梯度已清空": _cleared(zero.shards),
    }
