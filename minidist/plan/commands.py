"""``minidist plan`` and ``minidist simulate``: questions in, tables and files out."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.table import Table

from minidist.plan.costs import Layout, Software
from minidist.plan.explain import advice, configurations, decision_tree
from minidist.plan.hardware import cluster
from minidist.plan.planner import NothingFits, Plan, in_code, shape_of
from minidist.plan.planner import plan as find_plan
from minidist.plan.shapes import with_sequence
from minidist.plan.simulator import Simulation
from minidist.plan.simulator import simulate as run_step
from minidist.train.report import document, writable, write_json

# typer reads annotations itself, and on Python 3.10 only knows Optional.
OptionalInt = Optional[int]  # noqa: UP045
OptionalFloat = Optional[float]  # noqa: UP045
OptionalText = Optional[str]  # noqa: UP045

Params = Annotated[OptionalFloat, typer.Option(help="Parameters, for example 7e9.")]
Model = Annotated[OptionalText, typer.Option(help="A known model, for example llama-3.1-70b.")]
Layers = Annotated[OptionalInt, typer.Option(help="Layers of a shape of your own.")]
Hidden = Annotated[OptionalInt, typer.Option(help="Its hidden size.")]
Heads = Annotated[OptionalInt, typer.Option(help="Its attention heads.")]
Gpus = Annotated[int, typer.Option(help="How many.")]
Gpu = Annotated[str, typer.Option(help="Accelerator by name, or a .toml file.")]
PerNode = Annotated[int, typer.Option(help="GPUs in one machine.")]
Memory = Annotated[OptionalFloat, typer.Option(help="GB per GPU, instead of the known.")]
Network = Annotated[OptionalFloat, typer.Option(help="Gbit/s per GPU between nodes.")]
Seq = Annotated[OptionalInt, typer.Option(help="Tokens per sequence.")]
Batch = Annotated[OptionalInt, typer.Option(help="Sequences per step, over all GPUs.")]
Json = Annotated[OptionalText, typer.Option("--json", help="Write the results here.")]
Recompute = Annotated[OptionalText, typer.Option(help="none or full.")]
Kind = Annotated[
    OptionalText, typer.Option(help="ddp, zero1, zero2, fsdp, fsdp-grad-op or hybrid.")
]


@contextmanager
def one_line_errors():
    """Mistakes in the arguments become typer's: one line on stderr, exit code 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


def _check_writable(*paths: str | None) -> None:
    for path in paths:
        problem = writable(path)
        if problem:
            raise ValueError(problem)


# ---- plan --------------------------------------------------------------------------------------


def plan(
    params: Params = None,
    model: Model = None,
    layers: Layers = None,
    hidden: Hidden = None,
    heads: Heads = None,
    gpus: Gpus = 8,
    gpu: Gpu = "h100",
    gpus_per_node: PerNode = 8,
    memory: Memory = None,
    host_memory: Annotated[float, typer.Option(help="GB per node, for offload.")] = 2000,
    network: Network = None,
    seq: Seq = None,
    global_batch: Batch = None,
    convention: Annotated[
        str, typer.Option(help="Bytes per parameter of model states: 16, 18, 20 or fp32.")
    ] = "16",
    tp: Annotated[OptionalInt, typer.Option(help="Fix tensor parallel ranks.")] = None,
    pp: Annotated[OptionalInt, typer.Option(help="Fix pipeline stages.")] = None,
    dp_kind: Kind = None,
    microbatch: Annotated[OptionalInt, typer.Option(help="Fix sequences per forward.")] = None,
    recompute: Recompute = None,
    offload: Annotated[OptionalText, typer.Option(help="none, optimizer or parameters.")] = None,
    top: Annotated[int, typer.Option(help="Layouts to show.")] = 6,
    explain: Annotated[
        bool, typer.Option("--explain", help="The decision tree and rules of thumb, with numbers.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Run the real strategy code on fake tensors.")
    ] = False,
    chart: Annotated[OptionalText, typer.Option(help="Write a chart (png) here.")] = None,
    json_file: Json = None,
) -> int:
    """Which layout for which model on which GPUs, and why not another.

    minidist plan --params 7e9 --gpus 8 --gpu h100

    minidist plan --params 70e9 --gpus 256 --explain

    minidist plan --model llama-3.1-8b --gpus 8 --gpu a100 --seq 4096 --json plan.json
    """
    with one_line_errors():
        _check_writable(json_file, chart)
        try:
            found = find_plan(
                model, params=params, layers=layers, hidden=hidden, heads=heads, gpus=gpus, gpu=gpu,
                gpus_per_node=gpus_per_node, memory=_scaled(memory, 1e9),
                host_memory=host_memory * 1e9, port=_scaled(network, 1e9 / 8), seq=seq,
                global_batch=global_batch, convention=convention, tp=tp, pp=pp, dp_kind=dp_kind,
                microbatch=microbatch, recompute=recompute, offload=offload, top=top,
            )  # fmt: skip
        except NothingFits as error:
            if json_file:
                write_json(json_file, error.plan.to_json())
            raise
    console = Console(highlight=False)
    show_plan(found, console)
    if explain:
        show_explanation(found, console)
    checked = None
    if verify:
        checked = _verify(found, console)
    if chart:
        from minidist.plan.chart import plan_figure

        plan_figure(found, top).savefig(chart, dpi=120)
    if json_file:
        content = found.to_json()
        if checked is not None:
            content["verified"] = checked
        write_json(json_file, content)
    return 0


def show_plan(found: Plan, console: Console) -> None:
    shape, machine = found.shape, found.cluster
    console.print(
        f"[bold]{shape}[/] ({shape.parameters / 1e9:.3g}B parameters: {shape.layers} layers x "
        f"{shape.hidden}, {shape.seq} tokens) on [bold]{machine.gpus} x {machine.accelerator.name}"
        f"[/], {found.global_batch} sequences per step\n"
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name, justify in (
        ("layout", "left"), ("GB", "right"), ("s/step", "right"), ("TFLOP/s", "right"),
        ("tok/s/GPU", "right"), ("why", "left"),
    ):  # fmt: skip
        table.add_column(name, justify=justify, overflow="fold")
    for e, row in zip(found.layouts, found.rows(), strict=True):
        best = e is found.best
        table.add_row(
            ("[bold green]" if best else "") + str(e.layout), f"{e.total_bytes / 1e9:.0f}",
            f"{e.total_seconds:.2f}", f"{e.tflops_per_gpu:.0f}",
            f"{row['tokens_per_second_per_gpu']:.0f}", "best" if best else row["why"],
        )  # fmt: skip
    console.print(table)
    console.print(f"\n[bold]Why {found.best.layout}[/]: {found.reason}")
    parts = ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in found.best.bytes.items() if size)
    console.print(f"Memory (GB): {parts}.")
    if found.rejected:
        console.print("\n[bold]Why not[/]")
        for family, reason in found.rejected.items():
            console.print(f"  {family}: {reason}")
    console.print("\n[bold]Run it[/] (our GPT of this width and depth)")
    console.print(f"  {found.command}", soft_wrap=True)
    for note in in_code(found.best.layout):
        console.print(f"  and in code, {note}")
    if not machine.accelerator.calibrated:
        console.print(f"\nSpeed of {machine.accelerator.name}: {machine.accelerator.source}.")


def show_explanation(found: Plan, console: Console) -> None:
    console.print("\n[bold]The decision tree[/] (document section 6)")
    for node in decision_tree(found):
        console.print(f"  {node.question}\n    {node.answer} -> [bold]{node.leads_to}")
    console.print("\n[bold]Typical configurations[/] (document section 6)")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("size", "GPUs", "scheme", "batch", "example", "planner", "note"):
        table.add_column(name, overflow="fold")
    for row in configurations():
        table.add_row(
            *(row[k] for k in ("size", "gpus", "scheme", "batch", "example", "planner", "note"))
        )
    console.print(table)
    console.print("\n[bold]Advice[/] (document section 4.5)")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("advice", "found", "note"):
        table.add_column(name, overflow="fold")
    for row in advice():
        table.add_row(row["advice"], row["found"], row["note"])
    console.print(table)


def _verify(found: Plan, console: Console) -> list[dict]:
    from minidist.plan.dryrun import verify_plan

    with one_line_errors():
        rows = verify_plan(found)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("dry run of the real code", "bytes", "formula", "difference"):
        table.add_column(name, justify="left" if name.startswith("dry") else "right")
    for row in rows:
        table.add_row(
            row["what"], f"{row['measured']:,.0f}", f"{row['formula']:,.0f}", f"{row['error']:+.2%}"
        )
    console.print()
    console.print(table)
    return rows


# ---- simulate ----------------------------------------------------------------------------------


def simulate(
    params: Params = None,
    model: Model = None,
    layers: Layers = None,
    hidden: Hidden = None,
    heads: Heads = None,
    gpus: Gpus = 8,
    gpu: Gpu = "h100",
    gpus_per_node: PerNode = 8,
    network: Network = None,
    seq: Seq = None,
    global_batch: Batch = None,
    dp_kind: Kind = "fsdp",
    tp: Annotated[int, typer.Option(help="Tensor parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    schedule: Annotated[
        str, typer.Option(help="naive, gpipe, 1f1b, interleaved, zb-h1 or zb-v.")
    ] = "1f1b",
    chunks: Annotated[OptionalInt, typer.Option(help="Model parts per stage.")] = None,
    microbatch: Annotated[int, typer.Option(help="Sequences per forward.")] = 1,
    recompute: Recompute = "none",
    trace: Annotated[
        OptionalText, typer.Option(help="Write the timeline here, for ui.perfetto.dev.")
    ] = None,
    chart: Annotated[OptionalText, typer.Option(help="Draw the timeline (png) here.")] = None,
    validate: Annotated[
        bool, typer.Option("--validate", help="Predict published runs and show the errors.")
    ] = False,
    json_file: Json = None,
) -> int:
    """Play one training step on modelled hardware: time, bubble, exposed communication, memory.

    minidist simulate --validate

    minidist simulate --params 175e9 --gpus 1024 --gpu a100 --dp-kind zero1 --tp 8 --pp 8

    minidist simulate --model llama-3.1-8b --gpus 8 --trace step.json
    """
    console = Console(highlight=False)
    with one_line_errors():
        _check_writable(json_file, trace, chart)
        if validate:
            rows = show_validation(console)
        else:
            shape = shape_of(model, params, layers, hidden, heads)
            shape = with_sequence(shape, seq) if seq else shape
            machine = cluster(
                gpu, gpus, gpus_per_node=gpus_per_node, port=_scaled(network, 1e9 / 8)
            )
            layout = _layout(gpus, dp_kind, tp, pp, microbatch, schedule, chunks, recompute)
            batch = global_batch or layout.dp * microbatch * max(1, 4 * pp if pp > 1 else 1)
            run = run_step(shape, machine, layout, batch, Software())
            rows = [_row(run, layout, batch, shape)]
            show_run(run, layout, batch, shape, console)
            if trace:
                run.save_trace(trace)
            if chart:
                from minidist.plan.chart import timeline_figure

                timeline_figure(run).savefig(chart, dpi=120)
    if json_file:
        write_json(json_file, document(rows))
    return 0


def _layout(gpus, dp_kind, tp, pp, microbatch, schedule, chunks, recompute) -> Layout:
    for name, size in (("tp", tp), ("pp", pp), ("microbatch", microbatch), ("gpus", gpus)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if gpus % (tp * pp):
        raise ValueError(f"tp x pp = {tp} x {pp} does not divide {gpus} GPUs")
    if chunks is None:
        chunks = 2 if schedule in ("interleaved", "zb-v") else 1
    return Layout(gpus // tp // pp, dp_kind, tp, pp, microbatch, schedule, chunks, recompute)


def _row(run: Simulation, layout: Layout, batch: int, shape) -> dict:
    return {
        "model": str(shape), "layout": str(layout), "global_batch": batch,
        "seconds": {**run.parts, "total": run.seconds}, "bubble": run.bubble,
        "tflops_per_gpu": run.tflops_per_gpu, "peak_moving_bytes": run.peak_memory(),
    }  # fmt: skip


def show_run(run: Simulation, layout: Layout, batch: int, shape, console: Console) -> None:
    console.print(f"[bold]{shape}[/], {layout}, {batch} sequences per step\n")
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    for part, seconds in run.parts.items():
        share = f"{100 * seconds / run.seconds:.1f} %"
        table.add_row(part.replace("_", " "), f"{seconds:.3f} s", share)
    table.add_row("[bold]step", f"[bold]{run.seconds:.3f} s", "")
    console.print(table)
    console.print(
        f"\n{run.tflops_per_gpu:.0f} model TFLOP/s per GPU; bubble {100 * run.bubble:.1f} % of the "
        f"ideal time; activations, gathered parameters and gradients in flight peak at "
        f"{run.peak_memory() / 1e9:.1f} GB."
    )


def show_validation(console: Console) -> list[dict]:
    from minidist.plan.validate import crossover
    from minidist.plan.validate import validate as predict_all

    rows = predict_all()
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("source", "case", "published", "predicted", "", "error", "promised"):
        numeric = name in ("published", "predicted", "error", "promised")
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        promise = row["tolerance"]
        kept = promise is None or abs(row["error"]) <= promise
        table.add_row(
            row["source"], row["case"], f"{row['published']:.4g}", f"{row['predicted']:.4g}",
            row["unit"], ("" if kept else "[red]") + f"{row['error']:+.1%}",
            "-" if promise is None else f"{promise:.0%}",
        )  # fmt: skip
    console.print(table)
    promised = [row for row in rows if row["tolerance"]]
    kept = sum(abs(row["error"]) <= row["tolerance"] for row in promised)
    worst = max(promised, key=lambda row: abs(row["error"]))
    console.print(
        f"\n{kept} of {len(promised)} rows within what is promised; largest error there "
        f"{worst['error']:+.1%} ({worst['source']}, {worst['case']})."
    )
    console.print("\n[bold]ZeRO-3 against 3D parallelism[/], GPT-3 175B, 1536 sequences")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("A100s", "ZeRO-3", "3D", "faster"):
        table.add_column(name, justify="right")
    for row in crossover():
        zero, grid = row["zero3_tflops"], row["three_d_tflops"]
        winner = "ZeRO-3" if zero > grid else "3D"
        table.add_row(str(row["gpus"]), f"{zero:.0f}", f"{grid:.0f}", winner)
    console.print(table)
    return rows
