"""What to train and how to lay it out over ranks, checked before any rank starts.

Everything a run depends on is in one frozen `TrainConfig`, so that a local run, a torchrun job and
each contestant of `compare` are the same call. `check` finds every mistake that can be found
without starting a process and says it in one line.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from minidist.parallel.schedules import schedule as build_schedule
from minidist.train.data import TextBatches, load_tokens
from minidist.train.model import GPTConfig

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
OPTIMIZERS = ("adamw", "adam", "sgd")
AXES = ("dp", "pp", "tp")


class Recipe(NamedTuple):
    """What a strategy's name stands for."""

    axes: tuple[str, ...]  # the mesh axes it spreads ranks over, in the order they are filled
    dp: str = "ddp"  # ddp | zero1 | zero2 | fsdp-grad-op | fsdp
    schedule: str = "1f1b"  # only used when pp > 1


STRATEGIES: dict[str, Recipe] = {
    "single": Recipe(()),
    "ddp": Recipe(("dp",)),
    "zero1": Recipe(("dp",), dp="zero1"),
    "zero2": Recipe(("dp",), dp="zero2"),
    "fsdp-grad-op": Recipe(("dp",), dp="fsdp-grad-op"),
    "fsdp": Recipe(("dp",), dp="fsdp"),
    "tp": Recipe(("tp",)),
    "pp-naive": Recipe(("pp",), schedule="naive"),
    "pp-gpipe": Recipe(("pp",), schedule="gpipe"),
    "pp-1f1b": Recipe(("pp",), schedule="1f1b"),
    "pp-interleaved": Recipe(("pp",), schedule="interleaved"),
    "pp-zb-h1": Recipe(("pp",), schedule="zb-h1"),
    "dp-tp": Recipe(("tp", "dp")),
    "dp-pp": Recipe(("pp", "dp")),
    "tp-pp": Recipe(("tp", "pp")),
    "3d": Recipe(("tp", "pp", "dp")),
}
ALIASES = {"zero3": "fsdp", "zero": "fsdp", "dp": "ddp"}


class ConfigError(ValueError):
    """A mistake in the arguments; the text is one line for the person who typed them."""


class Layout(NamedTuple):
    """How a strategy sits on a number of ranks."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    dp_kind: str = "ddp"
    schedule: str = "1f1b"
    chunks: int = 1  # parts of the model per pipeline rank
    microbatches: int = 1

    @property
    def ranks(self) -> int:
        return self.dp * self.pp * self.tp


@dataclass(frozen=True)
class TrainConfig:
    """One training run. ``batch`` is the global batch in rows; ``dp``, ``pp`` and ``tp`` override
    what the strategy's name would choose; ``microbatches`` is per pipeline (default: two per stage,
    as many as the batch allows)."""

    strategy: str = "ddp"
    model: GPTConfig = field(default_factory=GPTConfig)
    steps: int = 20
    batch: int = 16
    lr: float = 1e-3
    warmup: int = 0
    optimizer: str = "adamw"
    dtype: str = "float32"
    seed: int = 0
    text: str | None = None
    dp: int | None = None
    pp: int | None = None
    tp: int | None = None
    schedule: str | None = None
    microbatches: int | None = None
    bucket_cap_mb: float = 25
    masters: bool = False  # 16-bit parameters and gradients, 32-bit master copy and states
    checkpoint_dir: str | None = None  # continue from its latest checkpoint, and write new ones
    save_every: int = 10  # steps between checkpoints
    threads: int = 1  # per rank; also for one rank, so that results and times can be compared

    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def batches(self) -> TextBatches:
        return TextBatches(load_tokens(self.text), self.model.seq, self.batch, self.seed)

    def layout(self, ranks: int) -> Layout:
        """Place the strategy on ``ranks`` ranks. Raises ConfigError when it does not fit."""
        name = ALIASES.get(self.strategy, self.strategy)
        if name not in STRATEGIES:
            raise ConfigError(
                f"unknown strategy {self.strategy!r}; choose one of {', '.join(STRATEGIES)}"
            )
        if ranks < 1:
            raise ConfigError(f"ranks must be at least 1, got {ranks}")
        recipe = STRATEGIES[name]
        sizes = self._axis_sizes(name, recipe, ranks)
        schedule = self.schedule or recipe.schedule
        layout = Layout(
            **sizes,
            dp_kind=recipe.dp,
            schedule=schedule,
            chunks=2 if schedule in ("interleaved", "zb-v") and sizes["pp"] > 1 else 1,
        )
        return layout._replace(microbatches=self._microbatches(layout))

    def _axis_sizes(self, name: str, recipe: Recipe, ranks: int) -> dict[str, int]:
        given = {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) is not None}
        for axis, size in given.items():
            if size < 1:
                raise ConfigError(f"{axis} must be at least 1, got {size}")
        sizes = {axis: given.get(axis, 1) for axis in AXES}
        free = [axis for axis in recipe.axes if axis not in given]
        used = sizes["dp"] * sizes["pp"] * sizes["tp"]
        for place, axis in enumerate(free):
            left = ranks // used
            # All but the last free axis get 2 ranks, the last one whatever is left.
            sizes[axis] = left if place == len(free) - 1 else min(2, left)
            used *= sizes[axis]
        if used != ranks:
            shape = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
            raise ConfigError(f"strategy {name!r} on {ranks} ranks does not work out: {shape}")
        return sizes

    def _microbatches(self, layout: Layout) -> int:
        if self.microbatches is not None:
            if self.microbatches < 1:
                raise ConfigError(f"microbatches must be at least 1, got {self.microbatches}")
            return self.microbatches
        rows = self.batch // layout.dp
        wanted = 1 if layout.pp == 1 else 2 * layout.pp
        return max((m for m in range(1, wanted + 1) if rows % m == 0), default=1)

    def check(self, ranks: int, tokens: Tensor | None = None) -> Layout:
        """Everything that can go wrong, before anything starts. Returns the layout.

        Raises ConfigError with one line. ``tokens`` saves reading the text again.
        """
        layout = self.layout(ranks)
        if self.dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {self.dtype!r}; choose one of {', '.join(DTYPES)}")
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(
                f"unknown optimizer {self.optimizer!r}; choose one of {', '.join(OPTIMIZERS)}"
            )
        for name in ("steps", "batch", "threads", "save_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.bucket_cap_mb is not None and self.bucket_cap_mb < 0:
            raise ConfigError(f"bucket must be at least 0 MiB, got {self.bucket_cap_mb:g}")
        if not self.lr > 0:
            raise ConfigError(f"lr must be positive, got {self.lr}")
        if self.warmup < 0 or self.seed < 0:
            raise ConfigError("warmup and seed must not be negative")
        if layout.dp_kind == "fsdp-grad-op" and layout.tp * layout.pp > 1:
            raise ConfigError("fsdp-grad-op does not combine with tp or pp; use fsdp or zero2")
        if layout.dp_kind == "fsdp" and self.model.tied and layout.pp > 1:
            raise ConfigError("fsdp cannot shard a tied table on two pipeline stages; use zero2")
        if self.schedule is not None and layout.pp == 1:
            raise ConfigError("a schedule needs a pipeline: choose --pp or a pp strategy")
        self._check_divisions(layout)
        try:
            tokens = load_tokens(self.text) if tokens is None else tokens
            TextBatches(tokens, self.model.seq, self.batch)
        except (OSError, ValueError) as error:
            raise ConfigError(str(error)) from None
        self._check_checkpoints()
        if self.model.vocab <= int(tokens.max()):
            raise ConfigError(
                f"the text has tokens up to {int(tokens.max())}, a vocabulary of "
                f"{self.model.vocab} is too small"
            )
        return layout

    def _check_checkpoints(self) -> None:
        if self.checkpoint_dir is None:
            return
        from minidist.train.checkpoint import latest, read_extra

        found = latest(self.checkpoint_dir)
        if found is None:
            return
        saved = read_extra(found)
        if not {"step", "losses"} <= set(saved):
            raise ConfigError(f"{found} was not written by minidist train: choose another folder")
        if saved["step"] >= self.steps:
            raise ConfigError(
                f"{found} is of a run that has done {saved['step']} steps: for more, raise --steps"
            )

    def _check_divisions(self, layout: Layout) -> None:
        stages = layout.pp * layout.chunks
        if layout.pp > 1 and self.model.layers % stages:
            raise ConfigError(
                f"{self.model.layers} layers do not divide into {stages} pipeline stages"
            )
        if self.model.heads % layout.tp:
            raise ConfigError(
                f"{self.model.heads} attention heads do not divide among {layout.tp} "
                "tensor-parallel ranks"
            )
        if self.batch % layout.dp:
            raise ConfigError(
                f"a global batch of {self.batch} does not divide among {layout.dp} "
                "data-parallel ranks"
            )
        if (self.batch // layout.dp) % layout.microbatches:
            raise ConfigError(
                f"{self.batch // layout.dp} rows per pipeline do not divide into "
                f"{layout.microbatches} micro-batches"
            )
        if layout.pp > 1:
            try:
                build_schedule(layout.schedule, layout.pp, layout.microbatches, layout.chunks)
            except ValueError as error:
                raise ConfigError(str(error)) from None

    def with_strategy(self, strategy: str, **changes) -> TrainConfig:
        return replace(self, strategy=strategy, **changes)
