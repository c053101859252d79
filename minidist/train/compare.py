"""The main job: the same GPT under every strategy, beside one process, and what each one costs.

All contestants start from the same weights and see the same global batches. They run one after
the other on the same standing ranks; a failing one is reported in its row and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from minidist.comm.launch import RankFailure, Ranks
from minidist.train.config import ConfigError, TrainConfig
from minidist.train.loop import train
from minidist.train.model import GPTConfig
from minidist.train.rows import make_row

STRATEGIES = (
    "single", "ddp", "zero1", "zero2", "fsdp-grad-op", "fsdp", "tp",
    "pp-naive", "pp-gpipe", "pp-1f1b", "dp-tp", "dp-pp", "tp-pp",
)  # fmt: skip
# The document's table of stages (5.2) counts 16 bytes per parameter.
MIXED = ("ddp", "zero1", "zero2", "fsdp")
# Large enough that model states, not row counts, decide the bytes; small enough for two minutes on
# two cores. 1.6M parameters.
MODEL = GPTConfig(vocab=256, seq=64, width=128, layers=8, heads=4)
BATCH, STEPS = 16, 6
TIMEOUT = 300.0  # seconds for one contestant


def contest(base: TrainConfig, strategies: Iterable[str], ranks: int) -> dict[str, TrainConfig]:
    """One configuration per strategy, each checked on its number of ranks.

    Raises ConfigError for the first that cannot run, before anything starts.
    """
    tokens = None
    configs = {}
    for name in strategies:
        config = base.with_strategy(name)
        if tokens is None:
            config.check(1 if name == "single" else ranks)
            tokens = config.batches().tokens
        config.check(1 if name == "single" else ranks, tokens)
        configs[name] = config
    return configs


def mixed_precision(base: TrainConfig, strategies: Iterable[str]) -> dict[str, TrainConfig]:
    """The second block: 16-bit parameters and gradients, 32-bit masters and Adam states, really run
    for a few steps. Bytes do not depend on the batch, so it is small."""
    mixed = replace(base, dtype="bfloat16", optimizer="adamw", masters=True, steps=2)
    return {name: mixed.with_strategy(name) for name in MIXED if name in strategies}


def run(
    configs: dict[str, TrainConfig], ranks: int, on_start: Callable[[str], None] = lambda name: None
) -> Iterator[dict]:
    """Train each configuration and yield its row as it is done; "single" first, on one rank.

    A strategy that fails gives ``{"strategy": name, "error": message}``.
    """
    reference: list[float] | None = None
    pool: Ranks | None = None
    try:
        for name, config in sorted(configs.items(), key=lambda item: item[0] != "single"):
            on_start(name)
            try:
                if name == "single":
                    with Ranks(1, timeout=TIMEOUT) as alone:
                        results = alone.run(train, config)[0]
                    reference = results[0]["losses"]
                else:
                    if pool is None or not pool.alive:
                        pool = Ranks(ranks, timeout=TIMEOUT)
                    results = pool.run(train, config)[0]
            except RankFailure as failure:
                yield {"strategy": name, "error": str(failure)}
            else:
                yield make_row(config, results, reference)
    finally:
        if pool is not None:
            pool.close()


def chosen(names: str | None) -> list[str]:
    """``--strategies a,b,c``. The single process always takes part: it is the measure."""
    if not names:
        return list(STRATEGIES)
    picked = [name.strip() for name in names.split(",") if name.strip()]
    if not picked:
        raise ConfigError("no strategy named; see minidist compare --help")
    return ["single", *(name for name in dict.fromkeys(picked) if name != "single")]
