"""Set 3 on the ranks, first part: tensor parallel."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from minidist.learn.checks import miniature
from minidist.train.model import MLP, Attention, GPTConfig, build_gpt

_SHAPE = GPTConfig(vocab=16, seq=6, width=8, layers=1, heads=4)


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _same(module_class, *arguments) -> nn.Module:
    """A layer with the same random weights and biases on every rank."""
    module = module_class(*arguments)
    for i, p in enumerate(module.parameters()):
        p.data = _random(i, *p.shape) * 0.5
    return module


def _input(*shape: int) -> torch.Tensor:
    return _random(99, *shape).requires_grad_()


def conjugate_pair(mine):
    rank = dist.get_rank()
    result = {}
    for name, function in (("f", mine.CopyToRanks), ("g", mine.SumOverRanks)):
        x = (torch.arange(4.0) + 10 * rank + 1).requires_grad_()
        inner = x * 1.0
        before = inner.detach().clone()
        y = function.apply(inner)
        (y * torch.tensor([1.0, 2.0, 3.0, 4.0]) * (rank + 1)).sum().backward()
        result[f"{name}: output | 输出"] = y
        result[f"{name}: gradient | 梯度"] = x.grad
        result[f"{name}: input untouched | 输入未变"] = torch.equal(inner.detach(), before)
    return result


def _layer(layer, x, spy, weights=None) -> dict:
    """Output, gradients and number of messages of a layer."""
    begin = spy.here
    y = layer(x)
    forward = len(spy.calls(since=begin))
    weights = _random(7, *y.shape) if weights is None else weights
    (y * weights).sum().backward()
    backward = len(spy.calls(since=begin)) - forward
    return {
        "output | 输出": y,
        "gradient of the input | 输入的梯度": x.grad,
        "gradients of the parameters | 参数的梯度": [p.grad for p in layer.parameters()],
        "messages forward, backward | 前向、反向的通信次数": [forward, backward],
    }


def column(mine):
    layer = mine.ColumnLinear(_same(nn.Linear, 6, 8))
    shapes = [list(p.shape) for p in layer.parameters()]
    weights = _random(7, 3, 8).chunk(dist.get_world_size(), 1)[dist.get_rank()]
    result = {"shapes of weight and bias | 形状": shapes}
    return result | _layer(layer, _input(3, 6), mine.spy, weights)


def row(mine):
    layer = mine.RowLinear(_same(nn.Linear, 8, 6))
    own = _random(99, 3, 8).chunk(dist.get_world_size(), 1)[dist.get_rank()]
    shapes = [list(p.shape) for p in layer.parameters()]
    result = {"shapes of weight and bias | 形状": shapes}
    return result | _layer(layer, own.clone().requires_grad_(), mine.spy)


def mlp(mine):
    return _layer(mine.ParallelMLP(_same(MLP, _SHAPE)), _input(2, 3, 8), mine.spy)


def attention(mine):
    layer = mine.ParallelAttention(_same(Attention, _SHAPE))
    return _layer(layer, _input(2, 6, 8), mine.spy)


def vocab_cross_entropy(mine):
    n, rank = dist.get_world_size(), dist.get_rank()
    targets = torch.tensor([0, 7, 3, 5, 4])
    result = {}
    # Multiplied by 300, exp() of what has not been shifted overflows.
    for name, scale in (("small logits | 小的 logits", 1.0), ("large logits | 大的 logits", 300.0)):
        own = (_random(5, 5, 8) * scale).chunk(n, 1)[rank].clone().requires_grad_()
        begin = mine.spy.here
        loss = mine.vocab_cross_entropy(own, targets)
        loss.backward()
        result[f"{name} · loss | 损失"] = loss
        result[f"{name} · gradient | 梯度"] = own.grad
        few = mine.spy.sent(since=begin) <= 5 * len(targets)
    return result | {"at most 5 numbers per token | 每个 token 最多通信 5 个数": few}


def tensor_parallel(mine):
    model = build_gpt(miniature.TINY, seed=miniature.SEED)
    whole = sum(p.numel() for p in model.parameters())
    mine.tensor_parallel(model)
    held = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for inputs, targets in miniature.batches():
        loss = mine.vocab_cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {
        "loss | 损失": losses,
        f"parameters per rank, of {whole} | 每个 rank 的参数": held,
        "embedding | 词嵌入": model.embed.token.weight[:2],
    }
