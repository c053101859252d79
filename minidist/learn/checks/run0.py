"""Set 0 on the ranks: collectives from send and receive."""

from __future__ import annotations

import torch
import torch.distributed as dist

from minidist.learn.checks import miniature
from minidist.train.model import build_gpt, loss_fn


def _values(*shape: int) -> torch.Tensor:
    """Other numbers on every rank, and no two alike."""
    g = torch.Generator().manual_seed(20 + dist.get_rank())
    return torch.randn(*shape, generator=g)


def _only_messages(spy, begin: int) -> bool:
    """Whether nothing but sends and receives was used."""
    return not [e for e in spy.calls(since=begin) if e.op not in ("send", "recv")]


def pass_on(mine):
    x = _values(2, 3)
    before = x.clone()
    begin = mine.spy.here
    received = mine.pass_on(x)
    return {
        "received | 收到的": received,
        "x untouched | x 未变": torch.equal(x, before),
        "another size | 另一种大小": mine.pass_on(_values(100_000))[:4],
        "only send and recv | 只用收发": _only_messages(mine.spy, begin),
    }


def all_gather(mine):
    begin = mine.spy.here
    x = _values(3)
    rows = mine.all_gather(x)
    return {
        "rows | 各行": rows,
        "only send and recv | 只用收发": _only_messages(mine.spy, begin),
        "elements sent | 发送的元素": mine.spy.sent("send", since=begin),
    }


def tree_broadcast(mine):
    result = {}
    for root in (0, 3):
        begin = mine.spy.here
        x = _values(4)
        mine.tree_broadcast(x, root)
        result[f"root={root}: x"] = x
        sends = len(mine.spy.calls("send", since=begin))
        result[f"root={root}: at most 3 sends per rank | 每个 rank 最多发 3 次"] = sends <= 3
        result[f"root={root}: only send and recv | 只用收发"] = _only_messages(mine.spy, begin)
    return result


def ring_all_reduce(mine):
    begin = mine.spy.here
    x = _values(4, 2)
    before = x.clone()
    total = mine.ring_all_reduce(x)
    sent = mine.spy.sent("send", since=begin)
    return {
        "sum | 和": total,
        "10 elements on 4 ranks | 4 个 rank、10 个元素": mine.ring_all_reduce(_values(2, 5)),
        "x untouched | x 未变": torch.equal(x, before),
        "only send and recv | 只用收发": _only_messages(mine.spy, begin),
        "elements sent for 8 | 为 8 个元素发送的元素": sent,
    }


def all_reduce_cost(mine):
    return {
        f"{algorithm}, n={n}, {nbytes} bytes": list(mine.all_reduce_cost(algorithm, n, nbytes))
        for algorithm in ("central", "tree", "ring")
        for n, nbytes in ((2, 100), (4, 1000), (6, 1200), (8, 4096), (1, 50))
    }


def average_and_step(mine):
    model = build_gpt(miniature.TINY, seed=miniature.SEED)
    rank, n = dist.get_rank(), dist.get_world_size()
    losses = []
    begin = mine.spy.here
    for batch in miniature.batches():
        inputs, targets = miniature.own_rows(batch, rank, n)
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        mine.average_and_step(model, 0.3)
        losses.append(loss.item())
    only_messages = _only_messages(mine.spy, begin)
    losses = torch.tensor(losses)
    dist.all_reduce(losses)
    return {
        "loss | 损失": losses / n,
        "gradients cleared | 梯度已清空": all(p.grad is None for p in model.parameters()),
        "only send and recv | 只用收发": only_messages,
    }
