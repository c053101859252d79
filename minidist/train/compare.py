"""The main job: the same GPT under every strategy, beside one process, and what each one costs.

All contestants start from the same weights and see the same global batches. They run one after
the other on the same standing ranks; a failing one is reported in its row and the others go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from minidist.comm.launch import RankFailure, Ranks
from minidist.train.config import ALIASES, STRATEGIES, ConfigError, TrainConfig
from minidist.train.loop import train
from minidist.train.model import GPTConfig
from minidist.train.rows import make_mixed_row, make_row

CONTESTANTS = (
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


def contest(
    base: TrainConfig, strategies: Iterable[str], ranks: int
) -> tuple[dict[str, TrainConfig], dict[str, str]]:
    """One checked configuration per strategy, and why others cannot run on this many ranks.

    Raises ConfigError when the single process cannot run either: then the arguments are wrong.
    """
    base.with_strategy("single").check(1)
    tokens = base.batches().tokens
    fitting, unfit = {}, {}
    for name in strategies:
        config = base.with_strategy(name)
        try:
            config.check(1 if name == "single" else ranks, tokens)
        except ConfigError as error:
            unfit[name] = str(error)
        else:
            fitting[name] = config
    return fitting, unfit


def mixed_precision(base: TrainConfig, strategies: Iterable[str]) -> dict[str, TrainConfig]:
    """The second block: 16-bit parameters and gradients, 32-bit masters and Adam states, really run
    for two steps. Model states do not depend on the batch. DDP always takes part, as the whole."""
    mixed = replace(base, dtype="bfloat16", optimizer="adamw", masters=True, steps=2)
    chosen = [name for name in MIXED if name in strategies]
    if not chosen:
        return {}
    return {name: mixed.with_strategy(name) for name in dict.fromkeys(["ddp", *chosen])}


class Arena:
    """Where contestants run: one standing pool of ranks, remade when a contestant breaks it."""

    def __init__(self, ranks: int):
        self.ranks = ranks
        self._pool: Ranks | None = None

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *error) -> None:
        if self._pool is not None:
            self._pool.close()

    def run(self, config: TrainConfig) -> list[dict]:
        """Results of all ranks. Raises RankFailure."""
        if config.strategy == "single":
            with Ranks(1, timeout=TIMEOUT) as alone:
                return alone.run(train, config)[0]
        if self._pool is None or not self._pool.alive:
            self._pool = Ranks(self.ranks, timeout=TIMEOUT)
        return self._pool.run(train, config)[0]


def compare(configs: dict[str, TrainConfig], arena: Arena) -> Iterator[dict]:
    """Train each configuration and yield its row as it is done, "single" first.

    A strategy that fails gives ``{"strategy": name, "error": message}``.
    """
    reference: list[float] | None = None
    for name, config in sorted(configs.items(), key=lambda item: item[0] != "single"):
        try:
            results = arena.run(config)
        except RankFailure as failure:
            yield {"strategy": name, "error": str(failure)}
            continue
        if name == "single":
            reference = results[0]["losses"]
        yield make_row(config, results, reference)


def compare_mixed(configs: dict[str, TrainConfig], arena: Arena) -> Iterator[dict]:
    """The same for the mixed-precision block; DDP comes first, the others are held to it."""
    whole: float | None = None
    for name, config in configs.items():
        try:
            row = make_mixed_row(config, arena.run(config), whole)
        except RankFailure as failure:
            yield {"strategy": name, "error": str(failure)}
            continue
        if name == "ddp":
            whole = row["bytes_per_parameter"]["together"]
        yield row


def chosen(names: str | None) -> list[str]:
    """``--strategies a,b,c``. The single process always takes part: it is the measure.

    Raises ConfigError for an unknown name, or none at all.
    """
    if names is None:
        return list(CONTESTANTS)
    picked = [ALIASES.get(name.strip(), name.strip()) for name in names.split(",")]
    picked = [name for name in dict.fromkeys(picked) if name]
    if not picked:
        raise ConfigError("no strategy named")
    for name in picked:
        if name not in STRATEGIES:
            raise ConfigError(f"unknown strategy {name!r}; choose from {', '.join(STRATEGIES)}")
    return ["single", *(name for name in picked if name != "single")]
