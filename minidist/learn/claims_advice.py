"""Claims that are advice (section 4.5): offload above 7B, and what to use on several nodes."""

from __future__ import annotations

import torch.distributed as dist

from minidist.comm import collectives as coll
from minidist.comm.launch import launch
from minidist.learn.claims import Claim, Finding
from minidist.learn.claims_data_parallel import MODEL, batch
from minidist.measure import measure
from minidist.parallel.fsdp import FSDP
from minidist.plan import formulas, plan
from minidist.train.model import Block, build_gpt, loss_fn

# --- i: several nodes ---------------------------------------------------------------------------


def _across_nodes(strategy: str) -> float:
    """On one of 4 ranks, two "nodes" of two: bytes sent to the other node per step, in copies of
    the parameters. Within the world our exchange sends each peer an equal part."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    partners = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = coll.rank()
    inside, across = pairs[rank // 2], partners[rank % 2]
    group = (inside, across) if strategy == "HYBRID_SHARD" else None
    model = FSDP(build_gpt(MODEL), strategy=strategy, units=[Block], group=group)
    inputs, targets = batch(2, rank)
    for _ in range(2):
        loss_fn(model(inputs), targets).backward()
    with measure(memory=False, timeline=False) as m:
        loss_fn(model(inputs), targets).backward()
    by_group = m.traffic.by_group
    sent = by_group[across.group_name].sent_bytes if across.group_name in by_group else 0
    world = dist.group.WORLD.group_name
    if world in by_group:
        sent += by_group[world].sent_bytes * 2 / 3  # two of the three peers are over there
    return sent / (4 * MODEL.parameters)


def measure_i() -> dict:
    numbers = {}
    for name in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"):
        numbers[name.lower()] = launch(_across_nodes, 4, name)[0]
    for name, copies in (("full", 3), ("grad_op", 2)):
        numbers[f"{name}_64"] = copies * (64 - 8) / 64  # 56 of 64 pieces come from other nodes
    numbers["hybrid_64"] = formulas.cross_host_traffic(1, 64, 8, "hybrid", exact=True)
    return numbers


def judge_i(numbers: dict) -> Finding:
    full, grad_op, hybrid = (
        numbers[name] for name in ("full_shard", "shard_grad_op", "hybrid_shard")
    )
    large = [numbers[f"{name}_64"] for name in ("full", "grad_op", "hybrid")]
    return Finding(
        core=grad_op < 0.8 * full and large[1] < 0.8 * large[0],
        details=(grad_op < hybrid and large[1] < large[2],),  # is it the way to do it?
        short=(
            f"copies sent across: {full:.1f} -> {grad_op:.1f}; HYBRID_SHARD {hybrid:.1f}",
            f"跨节点份数：{full:.1f} → {grad_op:.1f}；HYBRID_SHARD {hybrid:.1f}",
        ),
        measured=(
            "copies of the parameters sent to other nodes per rank and step, 2 nodes of 2: "
            f"FULL_SHARD {full:.2f}, SHARD_GRAD_OP {grad_op:.2f}, HYBRID_SHARD {hybrid:.2f}. On "
            f"8 nodes of 8, computed: {large[0]:.2f}, {large[1]:.2f}, {large[2]:.2f}",
            f"每 rank 每步发往其他节点的参数份数，2 节点 × 2：FULL_SHARD {full:.2f}，SHARD_GRAD_OP "
            f"{grad_op:.2f}，HYBRID_SHARD {hybrid:.2f}。8 节点 × 8，"
            f"按同样的口径计算：{large[0]:.2f}、{large[1]:.2f}、{large[2]:.2f}",
        ),
        why=(
            "It saves a third, but its collectives still span all nodes and parameters stay whole. "
            "HYBRID_SHARD gathers and reduces inside the node and sends only shards across.",
            "它省了三分之一，但集合通信仍跨所有节点，而且参数是整份的。HYBRID_SHARD 在节点内收集和"
            "归约，跨节点只发分片。",
        ),
    )


# --- j: offload above 7B ------------------------------------------------------------------------

LARGE = {
    "8B on 8 H100": ("llama-3.1-8b", "h100", 8),
    "13B on 8 A100": ("llama-2-13b", "a100", 8),
    "70B on 256 H100": ("llama-3.1-70b", "h100", 256),
    "13B on 1 RTX 4090": ("llama-2-13b", "rtx4090", 1),
}


def measure_j() -> dict:
    numbers = {}
    for name, (model, gpu, gpus) in LARGE.items():
        found = plan(model, gpus=gpus, gpu=gpu)
        numbers[f"offload {name}"] = float(found.best.layout.offload != "none")
        numbers[f"gigabytes {name}"] = found.best.total_bytes / 1e9
    best = plan("llama-2-13b", gpus=8, gpu="a100").best.total_seconds
    forced = plan("llama-2-13b", gpus=8, gpu="a100", offload="optimizer").best.total_seconds
    numbers["slower"] = forced / best
    return numbers


def judge_j(numbers: dict) -> Finding:
    needs = {name: numbers[f"offload {name}"] == 1 for name in LARGE}
    many = [name for name in LARGE if "RTX" not in name]
    gigabytes = {name: f"{numbers[f'gigabytes {name}']:.0f} GB" for name in LARGE}
    english = "; ".join(
        f"{name}: {'with' if needs[name] else 'no'} offload, {gigabytes[name]}" for name in LARGE
    )
    chinese = "；".join(
        f"{name.replace(' on ', '，')}：{'要' if needs[name] else '不'}卸载，{gigabytes[name]}"
        for name in LARGE
    )
    return Finding(
        core=all(needs[name] for name in many),
        details=(all(needs.values()),),
        short=(
            f"{sum(needs[name] for name in many)} of {len(many)} such layouts offload; forced: "
            f"{numbers['slower']:.2f}x the time",
            f"{len(many)} 个方案中 {sum(needs[name] for name in many)} 个需要；强制则时间 "
            f"{numbers['slower']:.2f} 倍",
        ),
        measured=(
            f"best layout by the planner: {english}; with forced offload 13B on 8 A100 takes "
            f"{numbers['slower']:.1f}x the time",
            f"规划器的最佳方案：{chinese}；13B 在 8 张 A100 上强制卸载，时间变为 "
            f"{numbers['slower']:.1f} 倍",
        ),
        why=(
            "Size alone decides nothing: model states divided by the number of cards do. Offload "
            "is the last resort when the cards together are too small.",
            "决定的不是模型大小，而是模型状态除以卡数。所有卡合起来仍放不下时，才用卸载。",
        ),
    )


CLAIMS = [
    Claim(
        "i", "4.5",
        ("several nodes: SHARD_GRAD_OP", "多节点用 SHARD_GRAD_OP"),
        ("On several nodes use SHARD_GRAD_OP to communicate less between nodes.",
         "多节点时用 SHARD_GRAD_OP 减少跨节点通信。"),
        measure_i, judge_i,
    ),
    Claim(
        "j", "4.5",
        ("above 7B: CPU offload", "超过 7B 用 CPU 卸载"),
        ("Above 7B use FSDP with CPU offload.", "超过 7B 用 FSDP + CPU Offload。"),
        measure_j, judge_j,
    ),
]  # fmt: skip
