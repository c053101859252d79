"""Claims about model parallelism: who sends how much, how layers are cut, bubbles and memory."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from minidist.comm import collectives as coll
from minidist.comm.launch import launch
from minidist.learn.claims import Claim, Finding
from minidist.learn.claims_data_parallel import batch
from minidist.measure import measure
from minidist.parallel.ddp import DDP
from minidist.parallel.pipeline import Pipeline
from minidist.parallel.schedules import schedule
from minidist.parallel.split import split
from minidist.parallel.tensor import ColumnParallelLinear, RowParallelLinear, tensor_parallel
from minidist.plan import PRESETS, simulate
from minidist.plan.costs import Layout, Software
from minidist.plan.hardware import cluster
from minidist.train.model import GPTConfig, build_gpt, loss_fn

RANKS = 4
SMALL = GPTConfig(vocab=64, seq=16, width=32, layers=4, heads=4)

# --- d: model parallel sends more than data parallel --------------------------------------------


def _sent_elements(kind: str, rows: int) -> float:
    """On a rank: float32 elements sent in one step on a global batch of `rows` sequences."""
    model = build_gpt(SMALL)
    inputs, targets = batch(rows, 0, SMALL)
    if kind == "dp":
        mine = slice(rows // RANKS * coll.rank(), rows // RANKS * (coll.rank() + 1))
        wrapped = DDP(model)
        step = lambda: loss_fn(wrapped(inputs[mine]), targets[mine]).backward()  # noqa: E731
    elif kind == "tp":
        cut = tensor_parallel(model)
        step = lambda: cut(inputs).square().mean().backward()  # noqa: E731
    else:
        stages = split(model, RANKS)
        pipeline = Pipeline(
            stages[coll.rank()], schedule="1f1b", microbatches=RANKS, loss_fn=loss_fn
        )
        step = lambda: pipeline.step(inputs, targets)  # noqa: E731
    step()  # agreements and bucket orders of the first step
    with measure(memory=False, timeline=False) as m:
        step()
    return m.traffic.sent_bytes / 4


def measure_d() -> dict:
    numbers = {"width": SMALL.width}
    for name, rows in (("few", 4), ("many", 64)):
        numbers[f"tokens_{name}"] = rows * SMALL.seq
        for kind in ("dp", "tp", "pp"):
            numbers[f"{kind}_{name}"] = max(launch(_sent_elements, RANKS, kind, rows))
    return numbers


def judge_d(numbers: dict) -> Finding:
    few, many = ([numbers[f"{k}_{size}"] / 1e3 for k in ("dp", "tp", "pp")]
                 for size in ("few", "many"))  # fmt: skip
    tokens = [numbers[f"tokens_{size}"] / numbers["width"] for size in ("few", "many")]
    return Finding(
        core=many[1] > 1.5 * many[0],  # tensor parallel, usual batch
        details=(few[1] > few[0], many[2] > many[0]),  # any batch; pipeline parallel, too
        short=(
            f"DP / TP / PP {few[0]:.0f} / {few[1]:.0f} / {few[2]:.0f}k at {tokens[0]:.0f}h tokens, "
            f"{many[0]:.0f} / {many[1]:.0f} / {many[2]:.0f}k at {tokens[1]:.0f}h",
            f"DP / TP / PP {few[0]:.0f} / {few[1]:.0f} / {few[2]:.0f}k（{tokens[0]:.0f}h 个 "
            f"token），{many[0]:.0f} / {many[1]:.0f} / {many[2]:.0f}k（{tokens[1]:.0f}h 个）",
        ),
        measured=(
            f"thousand elements sent per step by the busiest of 4 ranks, DP / TP / PP: "
            f"{few[0]:.0f} / {few[1]:.0f} / {few[2]:.0f} with {tokens[0]:.0f}h tokens per step, "
            f"{many[0]:.0f} / {many[1]:.0f} / {many[2]:.0f} with {tokens[1]:.0f}h",
            f"4 个 rank 中最忙的一个每步发送的千元素数，DP / TP / PP：每步 {tokens[0]:.0f}h 个 "
            f"token 时 {few[0]:.0f} / {few[1]:.0f} / {few[2]:.0f}，{tokens[1]:.0f}h 个时 "
            f"{many[0]:.0f} / {many[1]:.0f} / {many[2]:.0f}",
        ),
        why=(
            "Tensor parallel traffic grows with the tokens, DDP's does not: they cross at about 3h "
            "tokens per step. A pipeline sends least of all. What hurts in TP is that compute "
            "waits for it.",
            "张量并行的通信随 token 数增长，DDP 的不变，大约在每步 3h 个 token 处相交；"
            "流水线发得最少。张量并行真正的代价在于计算要等它。",
        ),
    )


# --- e: column and row parallel -----------------------------------------------------------------


def _cut_layers() -> dict:
    """On a rank: what the two cuts compute before anything is communicated, beside the whole."""
    torch.manual_seed(0)
    full = torch.nn.Linear(16, 16, bias=False)
    x, n, rank = torch.randn(8, 16), coll.world_size(), coll.rank()
    y = full(x).detach()
    mine = slice(16 // n * rank, 16 // n * (rank + 1))

    column = ColumnParallelLinear.from_module(full)(x).detach()
    parts = coll.all_gather_object(column)
    row_layer = RowParallelLinear.from_module(full)
    partial = x[:, mine] @ row_layer.weight.detach().T  # before the sum over ranks
    whole = row_layer(x[:, mine]).detach()

    model = tensor_parallel(build_gpt(SMALL))
    with measure(memory=False, timeline=False) as m:
        model.blocks[0](torch.randn(2, SMALL.seq, SMALL.width))

    def error(a, b):
        return ((a - b).norm() / b.norm()).item()

    return {
        "row_width": partial.shape[1] / 16,
        "row_slice_error": error(partial[:, mine], y[:, mine]),
        "row_sum_error": error(whole, y),
        "column_width": column.shape[1] / 16,
        "column_concat_error": error(torch.cat(parts, dim=1), y),
        "gathers": m.traffic["all_gather"].calls,
        "sums": m.traffic["all_reduce"].calls,
    }


def measure_e() -> dict:
    return launch(_cut_layers, RANKS)[0]


def judge_e(numbers: dict) -> Finding:
    width, off = numbers["row_width"], numbers["row_slice_error"]
    return Finding(
        # "Each card computes part of the hidden state": its part, finished.
        core=width < 1 and off < 1e-4,
        details=(numbers["column_concat_error"] < 1e-4, numbers["gathers"] > 0),
        short=(
            f"{width:.0%} of the features, off by {off:.0%}; their sum "
            f"by {numbers['row_sum_error']:.0e}",
            f"{width:.0%} 的特征，误差 {off:.0%}；求和后 {numbers['row_sum_error']:.0e}",
        ),
        measured=(
            f"row: every rank's result has {width:.0%} of the features and is off by {off:.0%}, "
            f"the sum over ranks by {numbers['row_sum_error']:.0e}; column: "
            f"{numbers['column_width']:.0%} of the features, concatenated off by "
            f"{numbers['column_concat_error']:.0e}; one block: {numbers['gathers']:.0f} "
            f"all-gathers, {numbers['sums']:.0f} all-reduces forward",
            f"行：每个 rank 的结果有 {width:.0%} 的特征，误差 {off:.0%}，各 rank 求和后误差 "
            f"{numbers['row_sum_error']:.0e}；列：每个 rank {numbers['column_width']:.0%} 的特征，"
            f"拼接后误差 {numbers['column_concat_error']:.0e}；一个 Block 的前向："
            f"{numbers['gathers']:.0f} 次 all-gather、{numbers['sums']:.0f} 次 all-reduce",
        ),
        why=(
            "A row cut takes a slice of the input features and yields a full-size partial sum: "
            "results are added, not put side by side. A column cut does yield slices, but Megatron "
            "feeds them to the row layer without gathering.",
            "按行切分取的是输入特征的一段，得到的是完整尺寸的部分和，要相加而不是拼接。按列切分得到的"
            "确实是切片，但 Megatron 不拼接，直接送进下一个行并行层。",
        ),
    )


# --- f, m: bubbles ------------------------------------------------------------------------------


def _bubble(name: str, stages: int, microbatches: int, layers: int, chunks: int = 1) -> float:
    """Idle time over the time without a bubble, with `layers` unit-time layers spread evenly."""
    work = layers / stages / chunks
    return schedule(name, stages, microbatches, chunks).simulate(f=work, b=2 * work).bubble


def measure_f() -> dict:
    return {
        "few_microbatches": _bubble("1f1b", 4, 4, 16),
        "many_microbatches": _bubble("1f1b", 4, 32, 16),
        "many_layers": _bubble("1f1b", 4, 4, 64),
        "many_stages": _bubble("1f1b", 8, 4, 64),
        "interleaved": _bubble("interleaved", 4, 4, 16, chunks=2),
    }


def judge_f(numbers: dict) -> Finding:
    few, many = numbers["few_microbatches"], numbers["many_microbatches"]
    layers, stages = numbers["many_layers"], numbers["many_stages"]
    inter = numbers["interleaved"]
    return Finding(
        core=many < 0.5 * few,
        details=(layers < 0.9 * few,),
        short=(
            f"{few:.0%}; 8x micro-batches {many:.0%}; 4x layers {layers:.0%}; 2x "
            f"stages {stages:.0%}",
            f"{few:.0%}；8 倍微批次 {many:.0%}；4 倍层数 {layers:.0%}；2 倍阶段 {stages:.0%}",
        ),
        measured=(
            f"idle / busy time, 4 stages: {few:.0%} with 4 micro-batches, {many:.0%} with 32; with "
            f"4 times the layers {layers:.0%}; with 8 stages {stages:.0%}; interleaved {inter:.0%}",
            f"空闲 / 计算时间，4 个阶段：4 个微批次 {few:.0%}，32 个 {many:.0%}；层数变为 4 倍 "
            f"{layers:.0%}；8 个阶段 {stages:.0%}；交错调度 {inter:.0%}",
        ),
        why=(
            "Micro-batches: yes, (p-1)/m. Layers are no variable; more stages make it larger. More "
            "layers help only by allowing more chunks per rank: (p-1)/(v m), for v times the "
            "messages.",
            "微批次：对，(p-1)/m。层数不在公式里，阶段越多气泡反而越大；层多只是让每个 rank 能放"
            "更多小段（交错）：(p-1)/(v m)，代价是 v 倍的消息。",
        ),
    )


def _peak_activations(name: str) -> float:
    model = build_gpt(SMALL)
    stages = split(model, 2)
    pipeline = Pipeline(stages[coll.rank()], schedule=name, microbatches=8, loss_fn=loss_fn)
    inputs, targets = batch(16, 0, SMALL)
    pipeline.step(inputs, targets)
    with measure(pipeline, traffic=False, timeline=False) as m:
        pipeline.step(inputs, targets)
    return m.memory.peak["activations"]


def measure_m() -> dict:
    numbers = {}
    for name in ("gpipe", "1f1b"):
        numbers[f"bubble_{name}"] = schedule(name, 4, 8).simulate(f=1, b=2).bubble
        numbers[f"in_flight_{name}"] = max(schedule(name, 4, 8).in_flight)
        numbers[f"bytes_{name}"] = launch(_peak_activations, 2, name)[0]
    return numbers


def judge_m(numbers: dict) -> Finding:
    bubbles = numbers["bubble_gpipe"], numbers["bubble_1f1b"]
    held = numbers["in_flight_gpipe"], numbers["in_flight_1f1b"]
    saving = numbers["bytes_gpipe"] / numbers["bytes_1f1b"]
    return Finding(
        core=held[1] < held[0] and saving > 1.2,
        details=(abs(bubbles[0] - bubbles[1]) < 1e-9,),
        short=(
            f"bubble {bubbles[0]:.1%} and {bubbles[1]:.1%}; in flight {held[0]:.0f} and "
            f"{held[1]:.0f}",
            f"气泡 {bubbles[0]:.1%} 与 {bubbles[1]:.1%}；在途 {held[0]:.0f} 与 {held[1]:.0f}",
        ),
        measured=(
            f"4 stages, 8 micro-batches: bubble GPipe {bubbles[0]:.1%}, 1F1B {bubbles[1]:.1%}; in "
            f"flight {held[0]:.0f} and {held[1]:.0f}; activations on rank 0 of 2 real ranks, GPipe "
            f"/ 1F1B: {saving:.1f}",
            f"4 个阶段、8 个微批次：气泡 GPipe {bubbles[0]:.1%}、1F1B {bubbles[1]:.1%}；同时在途 "
            f"{held[0]:.0f} 与 {held[1]:.0f}；2 个真实 rank 中 rank 0 的激活值，GPipe / 1F1B = "
            f"{saving:.1f}",
        ),
        why=(
            "GPipe keeps all m micro-batches, 1F1B at most p. Less bubble needs interleaving or "
            "zero-bubble schedules.",
            "GPipe 保留全部 m 个微批次，1F1B 最多 p 个。要减小气泡，得用交错或零气泡调度。",
        ),
    )


# --- k: tensor parallel has no bubble -----------------------------------------------------------


def _work_and_waits() -> dict:
    """On a rank: FLOPs of one forward and backward, calls for which compute stands still, and the
    share of communication that it waits for."""
    model = tensor_parallel(build_gpt(SMALL))
    inputs, _ = batch(4, 0, SMALL)
    model(inputs).square().mean().backward()
    with FlopCounterMode(display=False) as flops:
        model(inputs).square().mean().backward()
    with measure(memory=False) as m:
        model(inputs).square().mean().backward()
    overlap = m.timeline.overlap()
    return {
        "flops": flops.get_total_flops(),
        "calls": m.traffic["all_reduce"].calls,
        "exposed": overlap["exposed"] / max(overlap["communication"], 1e-9),
    }


def measure_k() -> dict:
    ranks = launch(_work_and_waits, RANKS)
    flops = [rank["flops"] for rank in ranks]
    shape, machine = PRESETS["llama-3.1-8b"], cluster("h100", 8)
    parts = {}
    for name, layout in (("tp", Layout(tp=8)), ("pp", Layout(pp=8))):
        run = simulate(shape, machine, layout, 8, Software(tp_overlap="none"))
        parts[f"bubble_{name}"] = run.parts["bubble"] / run.seconds
        parts[f"waits_{name}"] = run.parts["tp_communication"] / run.seconds
    return {
        "uneven": max(flops) / min(flops) - 1,
        "calls_per_layer": ranks[0]["calls"] / SMALL.layers,
        "exposed": min(rank["exposed"] for rank in ranks),
        **parts,
    }


def judge_k(numbers: dict) -> Finding:
    uneven, calls, exposed = (numbers[k] for k in ("uneven", "calls_per_layer", "exposed"))
    tp, pp, waits = numbers["bubble_tp"], numbers["bubble_pp"], numbers["waits_tp"]
    return Finding(
        core=uneven < 0.02 and tp < 0.01,
        details=(),
        short=(
            f"bubble {tp:.0%}, but waits for all-reduces {waits:.0%} of a step (8B, 8 H100)",
            f"气泡 {tp:.0%}，但一步的 {waits:.0%} 在等 all-reduce（8B，8 张 H100）",
        ),
        measured=(
            f"4 ranks: FLOPs differ by {uneven:.0%}, {calls:.1f} all-reduces per layer, compute "
            f"waits for {exposed:.0%} of their time or more; simulated 8B on 8 H100: bubble "
            f"{tp:.0%} (pipeline of 8: {pp:.0%}), waiting for all-reduces {waits:.0%} of the step",
            f"4 个 rank：计算量相差 {uneven:.0%}，每层 {calls:.1f} 次 all-reduce，其中至少 "
            f"{exposed:.0%} 的时间计算在等它；模拟 8B 于 8 张 H100：气泡 {tp:.0%}（8 段流水线："
            f"{pp:.0%}），等待 all-reduce 占一步的 {waits:.0%}",
        ),
        why=(
            "True but misleading: no rank idles for want of work, but all of them stand still at "
            "every all-reduce, four times per layer. Hence tensor parallel stays inside a node.",
            "对，但容易误导：没有 rank 因为没活而空闲，但每次 all-reduce 所有 rank 都停下来等，"
            "每层四次。所以张量并行只放在节点内。",
        ),
    )


CLAIMS = [
    Claim(
        "d", "0",
        ("model parallel sends more than DP", "模型并行通信更多"),
        ("Model parallelism communicates much more than data parallelism.",
         "模型并行的通信量比数据并行大得多。"),
        measure_d, judge_d,
    ),
    Claim(
        "e", "3.1",
        ("row cut: part of the hidden state", "行并行算部分 hidden state"),
        ("Row parallel: split by rows, each card computes part of the hidden state. Column "
         "parallel: the outputs are concatenated.",
         "行并行：按行切分，每卡算出部分 hidden state；列并行：各卡的输出拼接起来。"),
        measure_e, judge_e,
    ),
    Claim(
        "f", "3.2",
        ("more layers, smaller bubble", "层数越多气泡越小"),
        ("The more layers or micro-batches, the smaller the pipeline bubble.",
         "层数或微批次越多，流水线气泡越小。"),
        measure_f, judge_f,
    ),
    Claim(
        "k", "3.3",
        ("tensor parallel: no bubble", "张量并行无气泡"),
        ("Tensor parallel has no bubble.", "张量并行没有气泡。"),
        measure_k, judge_k,
    ),
    Claim(
        "m", "3.2",
        ("1F1B: less memory, same bubble", "1F1B 省显存、气泡相同"),
        ("1F1B saves memory against GPipe, with the same bubble.",
         "与 GPipe 相比，1F1B 省显存，气泡相同。"),
        measure_m, judge_m,
    ),
]  # fmt: skip
