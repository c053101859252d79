"""Claims about ZeRO and FSDP: what sharding saves and costs, prefetch, offload."""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from minidist.comm import collectives as coll
from minidist.comm.launch import launch
from minidist.learn.claims import Claim, Finding
from minidist.learn.claims_data_parallel import MODEL, batch
from minidist.measure import measure
from minidist.parallel.fsdp import FSDP
from minidist.parallel.zero import ZeroOptimizer
from minidist.plan import formulas
from minidist.plan.costs import Layout
from minidist.plan.dryrun import DryRun, dry_run
from minidist.train.model import Block, GPTConfig, build_gpt, loss_fn

# For dry runs, where width costs nothing: padding of the shards is then nothing beside them.
WIDE = GPTConfig(seq=16, width=1024, layers=3, heads=8)
DEEP = replace(WIDE, layers=12)  # one gathered unit is a small part of it
SLIM = replace(MODEL, layers=8, vocab=64)  # the same for real ranks


def _dry(kind: str, ranks: int, config: GPTConfig = WIDE, masters: bool = True) -> DryRun:
    return dry_run(config, Layout(dp=ranks, dp_kind=kind), masters=masters)


# --- b: 4x, 8x, N x, and the traffic of stage 3 -------------------------------------------------


def measure_b() -> dict:
    numbers = {}
    ddp = _dry("ddp", 8).states  # the same for any number of ranks
    for n in (8, 64, 1024):
        for stage, kind in ((1, "zero1"), (2, "zero2"), (3, "fsdp")):
            numbers[f"saving_{stage}_{n}"] = ddp / _dry(kind, n).states
    whole, sharded = _dry("ddp", 8, masters=False), _dry("fsdp", 8, masters=False)
    numbers["traffic_3"] = sharded.sent_bytes / whole.sent_bytes
    return numbers


def judge_b(numbers: dict) -> Finding:
    def saving(stage, n):
        return numbers[f"saving_{stage}_{n}"]

    far = 1024
    limits = abs(saving(1, far) / 4 - 1) < 0.05 and abs(saving(2, far) / 8 - 1) < 0.05
    proportional = all(abs(saving(3, n) / n - 1) < 0.1 for n in (8, 64, far))
    traffic = numbers["traffic_3"]
    listed = [f"{saving(1, n):.2f}, {saving(2, n):.2f}, {saving(3, n):.1f}" for n in (8, 64, far)]
    return Finding(
        core=limits and proportional,
        details=(
            saving(1, 8) > 0.9 * 4 and saving(2, 8) > 0.9 * 8,  # also on one machine
            abs(traffic - 1 - 1.5) < 0.1,  # "+1.5x" read as it stands
        ),
        short=(
            f"N=8: {saving(1, 8):.1f}, {saving(2, 8):.1f}, {saving(3, 8):.1f}x; stage 3 "
            f"sends {traffic - 1:+.0%}",
            f"N=8：{saving(1, 8):.1f}、{saving(2, 8):.1f}、{saving(3, 8):.1f} 倍；"
            f"阶段 3 通信 {traffic - 1:+.0%}",
        ),
        measured=(
            f"saving of stages 1, 2, 3 with N=8: {listed[0]}; N=64: {listed[1]}; N=1024: "
            f"{listed[2]}; traffic of stage 3 / DDP {traffic:.2f}",
            f"阶段 1、2、3 的节省倍数 N=8：{listed[0]}；N=64：{listed[1]}；N=1024：{listed[2]}；"
            f"阶段 3 的通信量 / DDP = {traffic:.2f}",
        ),
        why=(
            "4x and 8x are limits for many ranks, at 16 bytes per parameter. Stage 3 sends 1.5 "
            f"times as much as DDP in total (3 against 2 copies): {traffic - 1:+.0%}, not +150%.",
            "4 倍和 8 倍是卡数很多时的极限，且以每参数 16 字节为前提。阶段 3 的总通信量是 DDP 的 "
            f"1.5 倍（3 份对 2 份），即 {traffic - 1:+.0%}，不是 +150%。",
        ),
    )


# --- c: memory of SHARD_GRAD_OP -----------------------------------------------------------------


def measure_c() -> dict:
    numbers = {}
    ddp = _dry("ddp", 8, DEEP).states
    for n in (8, 64):
        for name, kind in (("grad_op", "fsdp-grad-op"), ("full", "fsdp")):
            run = _dry(kind, n, DEEP)
            states = run.peak["parameters"] + run.held["gradients"] + run.held["optimizer"]
            numbers[f"{name}_{n}"] = states / ddp
    return numbers


def judge_c(numbers: dict) -> Finding:
    grad_op, full = ([numbers[f"{name}_{n}"] for n in (8, 64)] for name in ("grad_op", "full"))
    # O(1/N): eight times the ranks, an eighth of the memory (give or take a gathered unit).
    falls = grad_op[1] / grad_op[0] < 0.25
    return Finding(
        core=falls,
        details=(full[1] / full[0] < 0.25,),
        short=(
            f"{grad_op[0]:.2f} with 8 ranks, {grad_op[1]:.2f} with 64; FULL_SHARD {full[1]:.2f}",
            f"8 个 rank {grad_op[0]:.2f}，64 个 {grad_op[1]:.2f}；FULL_SHARD {full[1]:.2f}",
        ),
        measured=(
            f"memory of model states / DDP, N=8 and 64: SHARD_GRAD_OP {grad_op[0]:.3f} and "
            f"{grad_op[1]:.3f}, FULL_SHARD {full[0]:.3f} and {full[1]:.3f}",
            f"模型状态的内存 / DDP，N=8 与 64：SHARD_GRAD_OP {grad_op[0]:.3f} 与 {grad_op[1]:.3f}，"
            f"FULL_SHARD {full[0]:.3f} 与 {full[1]:.3f}",
        ),
        why=(
            "From forward to the end of backward every rank holds all parameters: 2 of the 16 "
            "bytes stay however many ranks there are, so it never gets below an eighth of DDP. "
            "Only FULL_SHARD falls as 1/N (plus the largest unit).",
            "从前向到反向结束，每个 rank 都持有全部参数：16 字节里的 2 字节不随卡数减少，最多省到 "
            "DDP 的八分之一。只有 FULL_SHARD 按 1/N 下降（外加最大的一个单元）。",
        ),
    )


# --- g: backward prefetch -----------------------------------------------------------------------


def _backward_gathers(prefetch: int) -> tuple[list[int], float, int]:
    """On a rank: blocks in the order they are gathered in backward; the share of these gathers that
    begin while the block before in that order still computes; peak parameter bytes."""
    config = replace(MODEL, layers=4)
    model = FSDP(build_gpt(config), units=[Block], prefetch=prefetch)
    inputs, targets = batch(2, coll.rank(), config)
    for _ in range(2):  # the order of use is learned
        loss_fn(model(inputs), targets).backward()
    with measure(model) as m:
        loss_fn(model(inputs), targets).backward()
    spans = sorted(m.timeline.spans, key=lambda span: span.start)
    turn = max(span.end for span in spans if span.name == "GPT forward")
    # The last thing that a block computes in backward is the gradient of its first norm.
    nearly_done = {
        int(found[1]): span.start
        for span in spans
        if (found := re.fullmatch(r"blocks\.(\d+)\.norm1 backward", span.name))
    }
    gathers = [
        (int(found[1]), span.start)
        for span in spans
        if (found := re.match(r"all_gather \(fsdp blocks\.(\d+)\.", span.name))
        and span.start > turn
    ]
    early = [start < nearly_done[block + 1] for block, start in gathers if block + 1 in nearly_done]
    peak = m.memory.peak["parameters"]
    return [block for block, _ in gathers], sum(early) / max(1, len(early)), peak


def measure_g() -> dict:
    (order, early, peak), (_, late, low) = (launch(_backward_gathers, 2, p)[0] for p in (1, 0))
    config = replace(MODEL, layers=4)
    unit = sum(p.numel() for p in Block(config).parameters())
    return {
        "early_prefetch": early,
        "early_without": late,
        "descending": float(order == sorted(order, reverse=True) and len(order) == config.layers),
        "extra_units": (peak - low) / (4 * unit),
    }


def judge_g(numbers: dict) -> Finding:
    early, without = numbers["early_prefetch"], numbers["early_without"]
    descending, extra = numbers["descending"], numbers["extra_units"]
    order = ("last to first", "从后往前") if descending else ("first to last", "从前往后")
    return Finding(
        core=early == 1 and without == 0,
        details=(descending == 1,),
        short=(
            f"{early:.0%} early with prefetch, {without:.0%} without; {extra:.1f} more unit "
            "in memory",
            f"预取时 {early:.0%} 提前，不预取 {without:.0%}；多占 {extra:.1f} 个单元",
        ),
        measured=(
            f"gathers begun while the layer before them still ran backward: {early:.0%} with "
            f"prefetch, {without:.0%} without; order of layers {order[0]}; {extra:.1f} more unit "
            "in memory",
            f"在前一个单元反向途中就已开始的收集：预取时 {early:.0%}，不预取时 {without:.0%}；"
            f"各层的次序{order[1]}；内存多出 {extra:.1f} 个单元",
        ),
        why=(
            'One clarification: "next" means next in backward order, the previous layer of the '
            "forward. It costs one more unit of parameters in memory.",
            "需要补充：“下一层”指反向次序里的下一层，也就是前向里的上一层。代价是内存里多放一个单元"
            "的参数。",
        ),
    )


# --- h, l: offload ------------------------------------------------------------------------------


def _offloaded(kind: str) -> dict:
    """On a rank, in fractions of one whole copy (4 bytes per parameter): what rests in host memory
    between backward and step, and what the device held at most."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_gpt(SLIM).to(device)
    copy = 4 * SLIM.parameters
    if kind == "zero2":
        optimizer = ZeroOptimizer(model.parameters(), torch.optim.Adam, stage=2, offload="cpu")
    else:
        model = FSDP(model, units=[Block], offload="cpu")
        optimizer = torch.optim.Adam(model.parameters())
    inputs, targets = (t.to(device) for t in batch(2, coll.rank(), SLIM))
    for _ in range(2):
        with measure(model, optimizer, timeline=False) as m:
            loss_fn(model(inputs), targets).backward()
            held = m.memory.on("cpu").current["gradients"]
            whole = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
            shards = sum(p.nbytes for p in model.parameters() if p.device.type == "cpu")
            optimizer.step()
        optimizer.zero_grad()
    on_device, on_host = m.memory.on(device).peak, m.memory.on("cpu").current
    resting = shards if kind == "fsdp" and device == "cpu" else 0  # also on the one device we have
    return {
        "host_optimizer": on_host["optimizer"] / copy,
        "host_gradients": held / copy,
        "host_parameters": shards / copy if kind == "fsdp" else 0.0,
        "device_parameters": (on_device["parameters"] - resting) / copy,
        "device_activations": on_device["activations"] / copy,
        "kept_gradients": whole / copy if kind == "zero2" else 0.0,
    }


OFFLOAD_RANKS = 4


def measure_h() -> dict:
    _, device_bytes = formulas.deepspeed_zero3_bytes(
        1e9, 5e7, 8, offload=("optimizer", "parameters")
    )
    return {
        **launch(_offloaded, OFFLOAD_RANKS, "fsdp")[0],
        "deepspeed_per_layer": device_bytes / 5e7,
    }


def judge_h(numbers: dict) -> Finding:
    n = OFFLOAD_RANKS
    states = numbers["host_optimizer"] * n / 2, numbers["host_parameters"] * n
    gathered, gradients = numbers["device_parameters"], numbers["host_gradients"] * n
    return Finding(
        core=all(abs(share - 1) < 0.1 for share in states),
        details=(
            gathered < 0.01 and numbers["device_activations"] < 0.01,  # "only gradients"
            gradients < 0.1,  # and they rest there
        ),
        short=(
            f"also {gathered:.0%} of parameters; {gradients:.0%} of gradient shards go to the host",
            f"还有 {gathered:.0%} 的参数；梯度分片 {gradients:.0%} 送到主机",
        ),
        measured=(
            f"in host memory: {states[0]:.0%} of the rank's optimizer states, {states[1]:.0%} of "
            f"its parameters and {gradients:.0%} of its gradient shard; on the device at times: "
            f"{gathered:.0%} of all parameters, and activations",
            f"在主机内存：本 rank 优化器状态的 {states[0]:.0%}、参数的 {states[1]:.0%}、梯度分片的 "
            f"{gradients:.0%}；设备上临时：全部参数的 {gathered:.0%}，以及激活值",
        ),
        why=(
            "The device also needs the gathered parameters of the layer at work and its "
            "activations, and gradient shards go to the host as well: that is where Adam steps.",
            "设备上还需要当前层收集来的参数和激活值；梯度分片也要送到主机，因为 Adam 在那里更新。",
        ),
    )


def measure_l() -> dict:
    _, device_bytes = formulas.deepspeed_zero2_bytes(1, 8, offload=True)
    return {**launch(_offloaded, OFFLOAD_RANKS, "zero2")[0], "deepspeed_device": device_bytes}


def judge_l(numbers: dict) -> Finding:
    n = OFFLOAD_RANKS
    states, gradients = numbers["host_optimizer"] * n / 2, numbers["host_gradients"] * n
    kept = numbers["kept_gradients"]
    return Finding(
        # What decides the memory of the device: 4 bytes per 16-bit parameter, or 2.
        core=kept > 0.9,
        details=(abs(states - 1) < 0.1,),
        short=(
            f"{kept:.0%} of gradients stay; {gradients:.0%} of their shards are on the host",
            f"留下 {kept:.0%} 的梯度；其分片 {gradients:.0%} 在主机",
        ),
        measured=(
            f"after backward {kept:.0%} of the gradients are left beside the parameters; in host "
            f"memory {gradients:.0%} of the rank's shard of them, {states:.0%} of its states. "
            f"DeepSpeed's estimator: {numbers['deepspeed_device']:.0f} bytes per parameter on the "
            "device",
            f"反向之后，参数旁边留下的梯度：{kept:.0%}；主机内存里：本 rank 梯度分片的 "
            f"{gradients:.0%}、优化器状态的 {states:.0%}。DeepSpeed 的估算：设备上每参数 "
            f"{numbers['deepspeed_device']:.0f} 字节",
        ),
        why=(
            "Parameters do stay on the GPU (2 bytes each), but gradients are reduced there and "
            "move to the host while backward produces them; the GPU keeps none.",
            "参数确实留在 GPU（每个 2 字节），但梯度在 GPU 上归约后，随着反向的进行就移到主机；"
            "GPU 不保留梯度。",
        ),
    )


CLAIMS = [
    Claim(
        "b", "5.2",
        ("ZeRO saves 4x, 8x, Nx", "ZeRO 省 4 倍、8 倍、N 倍"),
        ("ZeRO-1 saves 4x, ZeRO-2 8x, ZeRO-3 in proportion to N, for +1.5x communication.",
         "ZeRO-1 省 4 倍，ZeRO-2 省 8 倍，ZeRO-3 与卡数成正比，通信量 +1.5 倍。"),
        measure_b, judge_b,
    ),
    Claim(
        "c", "4.2",
        ("SHARD_GRAD_OP: memory 1/N", "SHARD_GRAD_OP 显存 1/N"),
        ("SHARD_GRAD_OP needs about 1/N of DDP's memory.", "SHARD_GRAD_OP 的显存约为 DDP 的 1/N。"),
        measure_c, judge_c,
    ),
    Claim(
        "g", "4.4",
        ("backward prefetch: next layer", "反向预取下一层"),
        ("Backward prefetch: while one layer runs backward, the next layer's parameters are "
         "gathered.",
         "反向预取：当前层反向时，提前收集下一层的参数。"),
        measure_g, judge_g,
    ),
    Claim(
        "h", "5.4",
        ("ZeRO-3 offload: only gradients on GPU", "ZeRO-3 卸载：GPU 只放梯度"),
        ("ZeRO-3 + offload: states and parameters on the CPU, only gradients on the GPU for a "
         "time.",
         "ZeRO-3 + Offload：优化器状态和参数在 CPU，GPU 上只临时放梯度。"),
        measure_h, judge_h,
    ),
    Claim(
        "l", "5.4",
        ("ZeRO-2 offload: gradients on GPU", "ZeRO-2 卸载：梯度在 GPU"),
        ("ZeRO-2 + offload: states on the CPU, gradients and parameters on the GPU.",
         "ZeRO-2 + Offload：优化器状态在 CPU，梯度和参数在 GPU。"),
        measure_l, judge_l,
    ),
]  # fmt: skip
