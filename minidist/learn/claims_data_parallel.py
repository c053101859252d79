"""Claims about DDP: what it sends per step, and what happens to the learning rate."""

from __future__ import annotations

import math

import torch

from minidist.comm import collectives as coll
from minidist.comm.launch import launch
from minidist.learn.claims import Claim, Finding
from minidist.measure import measure
from minidist.parallel.ddp import DDP
from minidist.plan.costs import Layout
from minidist.plan.dryrun import dry_run
from minidist.train.model import GPTConfig, build_gpt, loss_fn

MODEL = GPTConfig(seq=16, width=64, layers=2, heads=2)


def batch(rows: int = 2, seed: int = 0, config: GPTConfig = MODEL):
    """Random tokens and targets for `config`, int64 ``[rows, seq]`` each."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab, (rows, config.seq + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


# --- a: twice the parameters per step -----------------------------------------------------------


def _sent_per_step() -> tuple[float, float]:
    """On a rank: elements sent per parameter in one DDP step, and in one of two micro-batches of
    which the first is under no_sync."""
    model = DDP(build_gpt(MODEL))
    inputs, targets = batch(seed=coll.rank())
    parameters = MODEL.parameters
    loss_fn(model(inputs), targets).backward()  # the first backward also agrees on the buckets
    with measure(memory=False, timeline=False) as m:
        loss_fn(model(inputs), targets).backward()
    with measure(memory=False, timeline=False) as accumulated:
        with model.no_sync():
            loss_fn(model(inputs), targets).backward()
        loss_fn(model(inputs), targets).backward()
    size = 4 * parameters  # bytes of one float32 copy
    return m.traffic.sent_bytes / size, accumulated.traffic.sent_bytes / size


def measure_a() -> dict:
    numbers = {}
    for n in (2, 4):
        numbers[f"sent_{n}"], numbers[f"accumulated_{n}"] = launch(_sent_per_step, n)[0]
    for n in (8, 1024):
        run = dry_run(MODEL, Layout(dp=n, dp_kind="ddp"), masters=False)
        numbers[f"sent_{n}"] = run.sent_bytes / (4 * MODEL.parameters)
    return numbers


def judge_a(numbers: dict) -> Finding:
    sent = {int(key[5:]): value for key, value in numbers.items() if key.startswith("sent_")}
    # Without the ring's (N-1)/N the same number must appear for every N: the limit.
    limits = [value * n / (n - 1) for n, value in sent.items()]
    once = all(abs(numbers[f"accumulated_{n}"] / sent[n] - 1) < 0.01 for n in (2, 4))
    parts = ", ".join(f"N={n}: {value:.3f}" for n, value in sent.items())
    zh = "，".join(f"N={n}：{value:.3f}" for n, value in sent.items())
    return Finding(
        core=all(abs(limit - 2) < 0.02 for limit in limits),
        details=(once,),
        short=(
            f"{sent[2]:.2f}x with 2 ranks, {sent[8]:.2f}x with 8, {sent[1024]:.2f}x with 1024",
            f"2 个 rank {sent[2]:.2f} 倍，8 个 {sent[8]:.2f} 倍，1024 个 {sent[1024]:.2f} 倍",
        ),
        measured=(
            f"elements sent per rank and parameter {parts}",
            f"每个 rank 每个参数发送的元素数 {zh}",
        ),
        why=(
            f"An all-reduce sends 2(N-1)/N: {sent[2]:.2f} with 2 ranks, 2 only as N grows. In "
            "bytes times 4 (fp32) or 2 (bf16); with no_sync once per optimizer step.",
            f"all-reduce 发送 2(N-1)/N：2 个 rank 时是 {sent[2]:.2f}，N 很大时才趋于 2。换算成字节"
            "再乘 4（fp32）或 2（bf16）；配合 no_sync，每次优化器更新只付一次。",
        ),
    )


# --- n: the learning rate follows the batch -----------------------------------------------------


def _after_wrapping() -> tuple[float, float]:
    """On a rank: norm of DDP's gradient over that of one process with the same global batch, and
    the optimizer's learning rate over the one it was given."""
    n, rank = coll.world_size(), coll.rank()
    inputs, targets = batch(rows=4 * n)
    alone, together = build_gpt(MODEL), DDP(build_gpt(MODEL))
    optimizer = torch.optim.SGD(together.parameters(), lr=0.1)
    loss_fn(alone(inputs), targets).backward()
    rows = slice(4 * rank, 4 * rank + 4)
    loss_fn(together(inputs[rows]), targets[rows]).backward()

    def norm(model):
        return math.sqrt(sum(p.grad.double().square().sum() for p in model.parameters()))

    ratio = norm(together) / norm(alone)
    optimizer.step()
    return ratio, optimizer.param_groups[0]["lr"] / 0.1


def exponent(optimizer_class, k: int = 16, **options) -> float:
    """How the learning rate must grow with the batch, measured: rate = base x k**exponent.

    Noisy linear regression at a fixed point. k small steps move the weights some way along the
    true gradient; by which factor must the rate grow for one step on a batch k times as large to
    move as far? The exponent is the logarithm of that factor over the logarithm of k.
    """
    width, rows, steps, noise = 32, 8, 100, 4.0
    generator = torch.Generator().manual_seed(0)
    truth = torch.ones(width) / width**0.5

    def moved_per_step(size: int, count: int) -> float:
        weight = torch.zeros(width, requires_grad=True)
        optimizer = optimizer_class([weight], lr=1e-4, **options)
        for step in range(400 + count):
            if step == 400:  # the optimizer's averages have settled
                start = weight.detach().clone()
            x = torch.randn(size, width, generator=generator)
            y = x @ truth + noise * torch.randn(size, generator=generator)
            weight.grad = -2 * x.T @ y / size  # at weight 0, wherever we are
            optimizer.step()
        return float((weight.detach() - start) @ truth) / count

    factor = k * moved_per_step(rows, steps * k) / moved_per_step(rows * k, steps)
    return math.log(factor) / math.log(k)


def measure_n() -> dict:
    gradients, rates = zip(*launch(_after_wrapping, 4), strict=True)
    return {
        "gradient_norm_ratio": max(gradients, key=lambda ratio: abs(ratio - 1)),
        "lr_ratio": max(rates, key=lambda ratio: abs(ratio - 1)),
        "exponent_sgd": exponent(torch.optim.SGD),
        "exponent_adam": exponent(torch.optim.Adam, betas=(0.9, 0.99)),
    }


def judge_n(numbers: dict) -> Finding:
    sgd, adam = numbers["exponent_sgd"], numbers["exponent_adam"]
    ratio = numbers["gradient_norm_ratio"]
    return Finding(
        core=abs(sgd - 1) < 0.15,
        details=(abs(adam - 1) < 0.15,),
        short=(
            f"batch^{sgd:.1f} for SGD, batch^{adam:.1f} for Adam",
            f"SGD {sgd:.1f} 次方，Adam {adam:.1f} 次方",
        ),
        measured=(
            f"learning rate must grow as batch^{sgd:.1f} for SGD, batch^{adam:.1f} for Adam; "
            f"norm of DDP's gradient / single process {ratio:.4f} (4 ranks)",
            f"学习率应随 batch 的 {sgd:.1f} 次方（SGD）、{adam:.1f} 次方（Adam）增长；"
            f"DDP 的梯度范数 / 单进程 = {ratio:.4f}（4 个 rank）",
        ),
        why=(
            "DDP takes means and changes no learning rate. Linear scaling is Goyal's rule for SGD, "
            "with warm-up and up to a batch of about 8k; for Adam the square root is usual.",
            "DDP 只求平均，不会改学习率。线性缩放是 Goyal 为 SGD 总结的规则，需要预热，"
            "batch 到约 8k 为止；Adam 通常用平方根。",
        ),
    )


CLAIMS = [
    Claim(
        "a",
        "2.2",
        ("DDP sends 2x the parameters", "DDP 通信 2 倍参数量"),
        (
            "DDP communicates twice the number of parameters per step.",
            "DDP 每步的通信量是参数量的 2 倍。",
        ),
        measure_a,
        judge_a,
    ),
    Claim(
        "n",
        "2.2, 0",
        ("learning rate linear in the batch", "学习率随 batch 线性"),
        (
            "The learning rate must be scaled linearly with the global batch.",
            "全局 batch 变大时，学习率要线性放大。",
        ),
        measure_n,
        judge_n,
    ),
]
