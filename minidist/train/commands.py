"""``minidist train`` and ``minidist compare``: arguments in, tables and files out."""

from __future__ import annotations

import json
import math
import os
import sys
from contextlib import contextmanager
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from minidist.comm.launch import Ranks, print_output
from minidist.parallel.schedules import NAMES as SCHEDULES
from minidist.train.compare import (
    BATCH,
    CONTESTANTS,
    MODEL,
    STEPS,
    Arena,
    chosen,
    compare_mixed,
    contest,
    mixed_precision,
)
from minidist.train.compare import compare as compare_all
from minidist.train.config import STRATEGIES, ConfigError, TrainConfig
from minidist.train.loop import train as train_here
from minidist.train.model import GPTConfig
from minidist.train.report import document, writable, write_json
from minidist.train.rows import make_row
from minidist.train.tables import run_table, show_comparison, wide_console

# typer reads annotations itself, and on Python 3.10 only knows Optional.
OptionalInt = Optional[int]  # noqa: UP045
OptionalText = Optional[str]  # noqa: UP045

# A line of rank 0 that is progress and not output. The parent turns it into its bar.
PROGRESS = "\x1eminidist-step "

Width = Annotated[int, typer.Option(help="Features per token.")]
Layers = Annotated[int, typer.Option(help="Decoder layers.")]
Heads = Annotated[int, typer.Option(help="Attention heads.")]
Seq = Annotated[int, typer.Option(help="Tokens per sequence.")]
Text = Annotated[OptionalText, typer.Option(help="Text file (default: Python's own help texts).")]
Json = Annotated[OptionalText, typer.Option("--json", help="Write the results here.")]
Dtype = Annotated[str, typer.Option(help="float32, float64 or bfloat16.")]
Axis = Annotated[OptionalInt, typer.Option(help="Ranks along this axis of the mesh.")]


def train(
    strategy: Annotated[
        str, typer.Option(help=f"How to spread the work: {', '.join(STRATEGIES)}.")
    ] = "ddp",
    ranks: Annotated[
        OptionalInt,
        typer.Option(help="Local ranks (default: 4, or what the axes need)."),
    ] = None,
    dp: Axis = None,
    pp: Axis = None,
    tp: Axis = None,
    schedule: Annotated[
        OptionalText,
        typer.Option(help=f"Of the pipeline: {', '.join(SCHEDULES)} (default: 1f1b)."),
    ] = None,
    microbatches: Annotated[
        OptionalInt,
        typer.Option(help="Per pipeline (default: 2 per stage)."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 20,
    batch: Annotated[int, typer.Option(help="Rows per step, over all ranks.")] = 16,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 0,
    optimizer: Annotated[str, typer.Option(help="adamw, adam or sgd.")] = "adamw",
    dtype: Dtype = "float32",
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = 0,
    text: Text = None,
    width: Width = 64,
    layers: Layers = 4,
    heads: Heads = 4,
    seq: Seq = 64,
    tied: Annotated[bool, typer.Option("--tied", help="Output matrix = token embedding.")] = False,
    checkpoint_dir: Annotated[
        OptionalText, typer.Option(help="Continue from the latest checkpoint here, and write more.")
    ] = None,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 10,
    timeout: Annotated[float, typer.Option(help="Limit for the whole run in seconds.")] = 3600,
    json_file: Json = None,
) -> int:
    """Train a small GPT with one strategy.

    Starts local ranks, or joins the job when torchrun started it; the losses are the same.

      minidist train --strategy fsdp --ranks 4 --steps 20

      minidist train --strategy zero1 --dp 2 --tp 2 --json run.json

      torchrun --nproc-per-node 4 -m minidist train --strategy fsdp

      torchrun --nproc-per-node 4 --max-restarts 3 -m minidist train --checkpoint-dir run1
    """
    if timeout <= 0:
        raise typer.BadParameter(f"timeout must be positive, got {timeout:g}")
    joined = under_torchrun()
    if ranks is None:
        ranks = int(os.environ["WORLD_SIZE"]) if joined else _ranks_for(strategy, dp, pp, tp)
    elif joined and ranks != int(os.environ["WORLD_SIZE"]):
        raise typer.BadParameter(
            f"torchrun started {os.environ['WORLD_SIZE']} ranks, --ranks says {ranks}"
        )
    with one_line_errors():
        config = TrainConfig(
            strategy=strategy,
            model=GPTConfig(seq=seq, width=width, layers=layers, heads=heads, tied=tied),
            steps=steps,
            batch=batch,
            lr=lr,
            warmup=warmup,
            optimizer=optimizer,
            dtype=dtype,
            seed=seed,
            text=text,
            dp=dp,
            pp=pp,
            tp=tp,
            schedule=schedule,
            microbatches=microbatches,
            checkpoint_dir=checkpoint_dir,
            save_every=save_every,
        )
        config.check(ranks)
        check_writable(json_file)
    if joined:
        main = os.environ["RANK"] == "0"
        results = _train_joined(config, main)
        if not main:
            return 0
    else:
        results = _train_locally(config, ranks, timeout)
    row = make_row(config, results)
    run_table(row, Console(highlight=False))
    if json_file:
        write_json(json_file, document([row]))
    return 0


def compare(
    ranks: Annotated[int, typer.Option(help="Local ranks for all but the single process.")] = 4,
    strategies: Annotated[
        OptionalText,
        typer.Option(help=f"Comma-separated (default: {','.join(CONTESTANTS)})."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps; the last is measured.")] = STEPS,
    batch: Annotated[int, typer.Option(help="Rows per step, over all ranks.")] = BATCH,
    dtype: Dtype = "float32",
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    optimizer: Annotated[str, typer.Option(help="adamw, adam or sgd.")] = "adamw",
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = 0,
    text: Text = None,
    width: Width = MODEL.width,
    layers: Layers = MODEL.layers,
    heads: Heads = MODEL.heads,
    seq: Seq = MODEL.seq,
    bucket: Annotated[float, typer.Option(help="Gradient bucket of DDP and ZeRO in MiB.")] = 0.5,
    mixed: Annotated[
        bool, typer.Option(help="Also the 16-bit accounting: 16 bytes per parameter.")
    ] = True,
    json_file: Json = None,
    plot: Annotated[OptionalText, typer.Option(help="Write memory and traffic bars (png).")] = None,
) -> int:
    """Train the same GPT with every strategy and show what each one costs.

    Each line of the table has what was measured, and below it what the formula says. The losses are
    held to those of a single process that sees the same batches.

      minidist compare

      minidist compare --dtype float64 --json out.json

      minidist compare --strategies ddp,zero1,zero2,fsdp --steps 10 --plot bars.png
    """
    with one_line_errors():
        base = TrainConfig(
            strategy="single",
            model=GPTConfig(seq=seq, width=width, layers=layers, heads=heads),
            steps=steps,
            batch=batch,
            lr=lr,
            optimizer=optimizer,
            dtype=dtype,
            seed=seed,
            text=text,
            bucket_cap_mb=bucket,
        )
        names = chosen(strategies)
        if ranks < 1:
            raise ConfigError(f"ranks must be at least 1, got {ranks}")
        configs, unfit = contest(base, names, ranks)
        if unfit and (strategies is not None or len(configs) < 2):
            raise ConfigError(next(iter(unfit.values())))
        check_writable(json_file, plot)
    console = wide_console()
    rows, mixed_rows = [], []
    with Arena(ranks) as arena, console.status("starting ranks") as status:
        for row in compare_all(configs, arena):
            rows.append(row)
            status.update(f"{len(rows)} of {len(configs)} strategies done")
        if mixed:
            mixed_rows = list(compare_mixed(mixed_precision(base, configs), arena))
    show_comparison(rows, mixed_rows, unfit, base, ranks, console)
    if json_file:
        write_json(json_file, document(rows, mixed_precision=mixed_rows))
    if plot:
        from minidist.train.plots import plot_rows

        plot_rows(rows, plot)
    return 1 if any("error" in row for row in rows + mixed_rows) else 0


def under_torchrun() -> bool:
    """Whether somebody else has already started the ranks of this job."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ)


def _ranks_for(strategy: str, *axes: int | None) -> int:
    if strategy == "single":
        return 1
    sizes = [size for size in axes if size is not None]
    # Axes that are all given say how many ranks they need; one that is left open fills up to 4.
    product = math.prod(sizes)
    return product if len(sizes) == len(axes) or product >= 4 else 4


@contextmanager
def one_line_errors():
    """Mistakes in the arguments become typer's: one line on stderr, exit code 2."""
    try:
        yield
    except ValueError as error:  # ConfigError, and the model's own checks
        raise typer.BadParameter(str(error)) from None


def check_writable(*paths: str | None) -> None:
    for path in paths:
        problem = writable(path)
        if problem:
            raise ConfigError(problem)


def _train_joined(config: TrainConfig, main: bool) -> list[dict]:
    with StepBar(config, shown=main) as bar:
        return train_here(config, bar.step)


def _train_locally(config: TrainConfig, ranks: int, timeout: float) -> list[dict]:
    with StepBar(config) as bar:

        def output(rank: int, stream: str, line: str) -> None:
            if line.startswith(PROGRESS):
                bar.step(*json.loads(line.removeprefix(PROGRESS)))
            else:
                print_output(rank, stream, line)

        with Ranks(ranks, timeout=timeout, on_output=output) as standing:
            return standing.run(_train_on_rank, config)[0]


def _train_on_rank(config: TrainConfig) -> list[dict]:
    """Runs on every local rank; rank 0 tells the parent how far it is."""

    def on_step(step: int, loss: float) -> None:
        if os.environ["RANK"] == "0":
            print(PROGRESS + json.dumps([step, loss]), flush=True)

    return train_here(config, on_step)


class StepBar:
    """A bar on stderr with the loss beside it; plain lines where stderr is not a terminal."""

    def __init__(self, config: TrainConfig, shown: bool = True):
        self.steps, self.shown = config.steps, shown
        self.console = Console(stderr=True)
        self.every = max(1, config.steps // 10)
        columns = (
            TextColumn(config.strategy),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
        )
        self.bar = Progress(*columns, console=self.console, disable=not self._is_bar())
        self.task = self.bar.add_task("", total=config.steps, loss="-")

    def _is_bar(self) -> bool:
        return self.shown and self.console.is_terminal

    def __enter__(self) -> StepBar:
        self.bar.start()
        return self

    def __exit__(self, *error) -> None:
        self.bar.stop()

    def step(self, step: int, loss: float) -> None:
        if self._is_bar():
            self.bar.update(self.task, completed=step + 1, loss=f"{loss:.4f}")
        elif self.shown and ((step + 1) % self.every == 0 or step == 0):
            print(f"step {step + 1}/{self.steps}  loss {loss:.4f}", file=sys.stderr, flush=True)
