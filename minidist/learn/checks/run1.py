"""Set 1 on the ranks: arithmetic, and the one switch between strategies."""

from __future__ import annotations

from minidist.learn.checks import miniature
from minidist.train.model import build_gpt

GB = 1e9


def gpt_parameters(mine):
    cases = ((256, 64, 64, 4), (1000, 10, 8, 1), (50257, 1024, 768, 12))
    return {
        f"vocab={v}, seq={s}, width={w}, layers={n}": mine.gpt_parameters(v, s, w, n)
        for v, s, w, n in cases
    }


def training_bytes(mine):
    result = {}
    for precision in ("fp32", "mixed"):
        for optimizer in ("sgd", "momentum", "adam"):
            found = mine.training_bytes(1000, precision, optimizer)
            kinds = ("parameters", "gradients", "optimizer")
            result[f"1000 parameters, {precision}, {optimizer}"] = {k: found[k] for k in kinds}
    return result


def choose(mine):
    cases = {
        "1.3B in 80 GB": (16 * 1.3 * GB, 0.2 * GB, 80 * GB, 8),
        "just fits | 刚好放下": (80 * GB, 1 * GB, 80 * GB, 8),
        "7B on 8 x 80 GB": (16 * 7 * GB, 0.5 * GB, 80 * GB, 8),
        "share fits, with a layer it does not | 平分放得下，加一层就放不下": (
            76 * GB,
            2 * GB,
            10 * GB,
            8,
        ),
        "share and layer just fit | 平分加一层刚好": (64 * GB, 2 * GB, 10 * GB, 8),
        "13B on one 24 GB card | 一张 24 GB": (16 * 13 * GB, 0.7 * GB, 24 * GB, 1),
        "one huge layer | 一层特别大": (900 * GB, 30 * GB, 24 * GB, 64),
        "a huge layer on many cards | 很多卡": (900 * GB, 30 * GB, 24 * GB, 1024),
    }
    return {name: mine.choose(*arguments) for name, arguments in cases.items()}


def train_and_measure(mine):
    mine.spy.off()
    result = {}
    for strategy in ("ddp", "zero1", "zero3"):
        model = build_gpt(miniature.TINY, seed=miniature.SEED)
        losses, nbytes = mine.train_and_measure(model, miniature.batches(), strategy, 1e-2)
        result[f"{strategy}: loss | 损失"] = losses
        result[f"{strategy}: bytes of optimizer state | 优化器状态的字节数"] = nbytes
    return result
