"""Set 6 on the ranks: meshes, groups, and two kinds of parallelism at once."""

from __future__ import annotations

import torch
import torch.distributed as dist

from minidist.learn.checks import miniature
from minidist.train.model import build_gpt

GB = 1e9


def coordinates(mine):
    return {
        f"dp={dp}, pp={pp}, tp={tp}": [
            list(mine.coordinates(rank, dp, pp, tp)) for rank in range(dp * pp * tp)
        ]
        for dp, pp, tp in ((2, 1, 2), (2, 3, 2), (1, 2, 4))
    }


def groups_of(mine):
    return {
        f"{axis} of dp={dp}, pp={pp}, tp={tp}": [
            list(group) for group in mine.groups_of(axis, dp, pp, tp)
        ]
        for dp, pp, tp in ((2, 1, 2), (2, 2, 2), (3, 2, 1))
        for axis in ("dp", "pp", "tp")
    }


def make_groups(mine):
    dp_group, tp_group = mine.make_groups(2, 2)
    result = {
        "ranks of the dp group | dp 组": sorted(dist.get_process_group_ranks(dp_group)),
        "ranks of the tp group | tp 组": sorted(dist.get_process_group_ranks(tp_group)),
    }
    for name, group in (("dp", dp_group), ("tp", tp_group)):
        total = torch.tensor(10.0 ** dist.get_rank())
        dist.all_reduce(total, group=group)
        result[f"sum over the {name} group | 组内求和"] = total
    return result


def global_norm(mine):
    rank = dist.get_rank()
    g = torch.Generator().manual_seed(40 + rank)
    sharded = [torch.randn(3, generator=g), torch.randn(2, 2, generator=g)]
    replicated = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    kept = [t.clone() for t in (*sharded, *replicated)]
    norm = mine.global_norm(sharded, replicated, dist.group.WORLD)
    same = all(torch.equal(a, b) for a, b in zip(kept, (*sharded, *replicated), strict=True))
    return {"norm | 范数": norm, "gradients untouched | 梯度未变": same}


def train_2d(mine):
    mine.spy.off()
    model = build_gpt(miniature.TINY, seed=miniature.SEED)
    rows = set()
    model.embed.register_forward_pre_hook(lambda _, inputs: rows.add(len(inputs[0])))
    losses = mine.train_2d(model, miniature.batches(), 0.3)
    own = model.blocks[0].mlp.up.weight.detach()
    return {
        "loss | 损失": losses,
        "a cut weight | 一个切开的权重": own[:1, :4],
        "a whole weight | 一个完整的权重": model.head.norm.weight.detach()[:4],
        "rows of each forward | 每次前向的行数": sorted(rows),
    }


def layout(mine):
    cases = {
        "1.3B, 8 GPUs of 80 GB": (1.3e9, 24, 8, 8, 80 * GB),
        "7B, 64 GPUs of 80 GB": (7e9, 32, 64, 8, 80 * GB),
        "70B, 512 GPUs of 80 GB": (70e9, 80, 512, 8, 80 * GB),
        "175B, 1024 GPUs of 80 GB": (175e9, 96, 1024, 8, 80 * GB),
        "13B, 16 GPUs of 24 GB, 4 per node": (13e9, 40, 16, 4, 24 * GB),
        "exactly 16 bytes per parameter | 刚好": (5e9, 24, 4, 4, 80 * GB),
        "1000B, 8 GPUs": (1000e9, 100, 8, 8, 80 * GB),
        "7 layers | 7 层": (20e9, 7, 56, 2, 80 * GB),
    }
    result = {}
    for name, arguments in cases.items():
        found = mine.layout(*arguments)
        result[f"{name}: (dp, pp, tp)"] = None if found is None else list(found)
    return result
