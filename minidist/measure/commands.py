"""``minidist bench``: our strategies beside torch's own, in time and memory."""

from __future__ import annotations

import datetime
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Optional

import torch.distributed as dist
import typer
from rich.console import Console

from minidist.comm.context import init
from minidist.measure import bench as engine
from minidist.measure import bench_data_parallel, bench_model_parallel, bench_report
from minidist.train.model import GPTConfig
from minidist.train.report import document, writable, write_json

# typer reads annotations itself, and on Python 3.10 only knows Optional.
OptionalText = Optional[str]  # noqa: UP045

SMALL = GPTConfig(vocab=128, seq=16, width=32, layers=8, heads=4)
FAMILIES = {"data-parallel": bench_data_parallel, "model-parallel": bench_model_parallel}


def bench(
    family: Annotated[
        str, typer.Argument(help="data-parallel, model-parallel, or all of both.")
    ] = "all",
    world: Annotated[str, typer.Option(help="Numbers of ranks, with commas.")] = "2,4",
    rows: Annotated[
        OptionalText, typer.Option(help="Only these strategies, with commas.", show_default="all")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds; everybody has two turns in each.")
    ] = 5,
    steps: Annotated[int, typer.Option(min=2, help="Steps per turn.")] = 2,
    deepspeed: Annotated[bool, typer.Option(help="DeepSpeed takes part too.")] = False,
    small: Annotated[bool, typer.Option(help="A tiny model: checks the bench itself.")] = False,
    timeout: Annotated[float, typer.Option(help="Limit per row in seconds.")] = 900,
    json_file: Annotated[OptionalText, typer.Option("--json", help="Write the rows here.")] = None,
    plot: Annotated[OptionalText, typer.Option(help="Write bars of all times here (PNG).")] = None,
    trace: Annotated[
        OptionalText,
        typer.Option(help="Folder for a Perfetto trace of one step of ours per row."),
    ] = None,
) -> int:
    """Time our strategies beside torch's own, turn by turn on the same cores.

    Every contestant has the same model, data, dtype, optimizer and one thread per rank. Reports
    medians, the ratio to the best peer (as launched, and in ranks tuned like ours), the ratio to
    the floor (compute alone plus the communication that cannot be avoided) and the peak memory of
    a step.

      minidist bench data-parallel --world 2,4 --json bench.json

      minidist bench model-parallel --rows 1f1b,tp --rounds 3 --trace traces
    """
    plan = _plan(family, world, rows)
    for path in (json_file, plot):
        problem = writable(path)
        if problem:
            raise typer.BadParameter(problem)
    if trace is not None:
        Path(trace).mkdir(parents=True, exist_ok=True)
    talks = os.environ.get("RANK", "0") == "0"  # under torchrun the first rank speaks
    out, progress = Console(highlight=False), Console(stderr=True, highlight=False, quiet=not talks)
    date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    about = {"rounds": rounds, "steps": steps}
    done = []
    with init() if dist.is_torchelastic_launched() else nullcontext():
        for module, row, ranks in plan:
            options: dict[str, Any] = {"config": SMALL} if small else {}
            if module is bench_data_parallel:
                options["deepspeed"] = deepspeed
            with progress.status(f"{row}, {ranks} ranks"):
                outcomes = engine.run(
                    partial(module.contestants, row, **options),
                    ranks,
                    rounds=rounds,
                    steps=steps,
                    timeout=timeout,
                    trace=None if trace is None else str(Path(trace) / f"{row}-{ranks}.json"),
                )
            goal = None if small else module.GOALS[row].get(ranks)
            done.append(engine.summarise(row, ranks, outcomes, goal))
            progress.print(bench_report.line(done[-1]), markup=False)
            if talks and json_file is not None:  # row by row: an interrupted run is not lost
                write_json(json_file, document(done, date=date, **about))
    if not talks:
        return 0
    out.print(bench_report.table(done))
    for remark in bench_report.remarks(done):
        out.print(remark, markup=False)
    if plot is not None:
        bench_report.plot(done, plot)
    return 0


def _plan(family: str, world: str, rows: str | None) -> list[tuple]:
    """(module, row, ranks) in the order they will run; BadParameter for what does not exist."""
    if family not in (*FAMILIES, "all"):
        raise typer.BadParameter(
            f"there is no bench {family!r}; choose {', '.join(FAMILIES)} or all of both"
        )
    modules = list(FAMILIES.values()) if family == "all" else [FAMILIES[family]]
    known = {row: module for module in modules for row in module.GOALS}
    wanted = list(known) if rows is None else [row.strip() for row in rows.split(",")]
    for row in wanted:
        if row not in known:
            raise typer.BadParameter(f"there is no row {row!r}; choose from {', '.join(known)}")
    if dist.is_torchelastic_launched():
        worlds = [int(os.environ["WORLD_SIZE"])]
    else:
        worlds = [int(w) for w in world.split(",") if w.strip().isdigit()]
        if not worlds or len(worlds) != len(world.split(",")) or min(worlds) < 2:
            raise typer.BadParameter(
                f"--world takes numbers of ranks from 2 up, with commas, not {world!r}"
            )
    return [(known[row], row, ranks) for row in wanted for ranks in worlds]
