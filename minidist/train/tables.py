"""The tables of ``compare`` and ``train`` (rich), and the bars of ``--plot`` (matplotlib)."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from minidist.train.config import TrainConfig
from minidist.train.report import KINDS, machine, megabytes

HEADERS = {
    "parameters": "param",
    "gathered": "gather",
    "gradients": "grad",
    "optimizer": "optim",
    "activations": "activ",
    "buffers": "buffer",
}
WIDTH = 118  # the table needs this much; a narrower terminal wraps rather than loses columns


def wide_console() -> Console:
    console = Console(highlight=False)
    if console.width < WIDTH:
        console = Console(highlight=False, width=WIDTH)
    return console


def show_comparison(
    rows: list[dict],
    mixed_rows: list[dict],
    unfit: dict[str, str],
    config: TrainConfig,
    ranks: int,
    console: Console,
) -> None:
    """Everything that ``minidist compare`` prints."""
    model = config.model
    console.print(
        f"[bold]One GPT, {len(rows)} ways to train it[/]: {model.parameters:,} parameters, "
        f"{model.layers} layers of width {model.width}, {config.batch} x {model.seq} tokens per "
        f"step, {config.steps} steps, {config.dtype}, {ranks} ranks on {machine()['cores']} cores\n"
        "[dim]upper line: measured; lower line: formula. MB (10^6 bytes) on the fullest rank, sent "
        "by the busiest rank. Bubble: idle slots / busy slots. Step time: x the single process.[/]"
    )
    compare_table(rows, console)
    for name, reason in unfit.items():
        console.print(f"  left out: {name} ({reason})")
    for row in rows + mixed_rows:
        if "error" in row:
            console.print(f"\n[bold red]{row['strategy']} failed[/]: {escape(row['error'])}")
    if mixed_rows:
        console.print(
            "\n[bold]The same in mixed precision[/]: 16-bit parameters and gradients, 32-bit "
            "master and Adam states, 16 bytes per parameter\n[dim]Model states between backward "
            "and step, really run. FSDP's 32-bit shard is its master copy. In pure 32 bits (above) "
            "ZeRO-1 saves at most 2x.[/]"
        )
        mixed_table(mixed_rows, console)


def compare_table(rows: list[dict], console: Console) -> None:
    """One line of measured values per strategy, the formula's below it, letters for reasons."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    table.add_column("loss", justify="right")
    table.add_column("max rel\ndiff", justify="right")
    for kind in KINDS:
        table.add_column(f"{HEADERS[kind]}\nMB", justify="right")
    table.add_column("peak\nMB", justify="right")
    table.add_column("sent\nMB/step", justify="right")
    table.add_column("bubble\nslots", justify="right")
    table.add_column("step\ntime", justify="right")
    letters = Letters()
    alone = next((r["step_seconds"] for r in rows if r["strategy"] == "single"), None)
    for row in rows:
        if "error" in row:
            table.add_row(row["strategy"], Text("failed", style="bold red"))
        else:
            table.add_row(*_cells(row, alone, letters))
    console.print(table)
    for line in letters.lines():
        console.print(line)


def _cells(row: dict, alone: float | None, letters: Letters) -> list[Text]:
    pairs = [(row["bytes"][kind], row["bytes_formula"].get(kind), kind) for kind in KINDS]
    pairs.append((row["bytes"]["peak"], row["bytes_formula"].get("peak"), "peak"))
    pairs.append((row["sent"], row["sent_formula"], "sent"))
    return [
        Text(row["strategy"], style="bold"),
        Text(f"{row['loss'][-1]:.4f}"),
        _difference(row["max_rel_loss_diff"]),
        *(_pair(*pair, row["notes"], letters) for pair in pairs),
        _bubble(row["bubble"], row["bubble_formula"]),
        _ratio(row["step_seconds"], alone),
    ]


def _difference(value: float | None) -> Text:
    if value is None:
        return Text("")
    return Text("0" if value == 0 else f"{value:.0e}")


def _pair(measured: float, formula: float | None, cell: str, notes: dict, letters: Letters) -> Text:
    """Measured over formula, with a letter where they differ by more than the tolerance."""
    text = Text(megabytes(measured))
    if formula is None:
        return text
    if cell in notes:
        text.append(letters.of(notes[cell]), style="yellow")
    text.append("\n" + megabytes(formula), style="dim")
    return text


def _bubble(measured: float | None, formula: float | None) -> Text:
    if measured is None:
        return Text("")
    return Text(f"{measured:.3f}").append(f"\n{formula:.3f}", style="dim")


def _ratio(seconds: float, alone: float | None) -> Text:
    if seconds is None or alone is None:
        return Text("" if seconds is None else f"{seconds * 1e3:.0f} ms")
    return Text(f"{seconds / alone:.2f}x")


class Letters:
    """Footnotes: the same reason gets the same letter."""

    def __init__(self):
        self.reasons: dict[str, str] = {}

    def of(self, reason: str) -> str:
        if reason not in self.reasons:
            number = len(self.reasons)
            letter = chr(ord("a") + number % 26) * (1 + number // 26)
            self.reasons[reason] = letter
        return self.reasons[reason]

    def lines(self) -> list[str]:
        return [f"  [yellow]{letter}[/] {reason}" for reason, letter in self.reasons.items()]


def mixed_table(rows: list[dict], console: Console) -> None:
    """Bytes per parameter of the model states, and by how much each stage divides them."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    for name in ("parameters", "gradients", "optimizer", "together"):
        table.add_column(f"{name}\nB/param", justify="right")
    for name in ("saved\nmeasured", "saved\nformula", "with N\nranks", "large N"):
        table.add_column(name, justify="right")
    for row in rows:
        if "error" in row:
            table.add_row(row["strategy"], Text("failed", style="bold red"))
            continue
        per = row["bytes_per_parameter"]
        table.add_row(
            Text(row["strategy"], style="bold"),
            *(f"{per[kind]:.2f}" for kind in ("parameters", "gradients", "optimizer", "together")),
            f"{row['factor']:.3f}x",
            f"{row['factor_formula']:.3f}x",
            row["factor_text"],
            row["factor_limit"],
        )
    console.print(table)


def run_table(row: dict, console: Console) -> None:
    """What one run of ``train`` cost: a line per quantity, measured and by formula."""
    layout = row["layout"]
    mesh = " x ".join(f"{axis} {layout[axis]}" for axis in ("dp", "pp", "tp"))
    console.print(
        f"{row['strategy']} on {row['ranks']} ranks ({mesh}), {row['dtype']}: "
        f"loss {row['loss'][0]:.4f} -> {row['loss'][-1]:.4f} in {len(row['loss'])} steps"
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("per rank")
    table.add_column("measured", justify="right")
    table.add_column("formula", justify="right")
    letters = Letters()
    for kind in (*KINDS, "peak"):
        measured, formula = row["bytes"][kind], row["bytes_formula"].get(kind)
        cells = _pair(measured, formula, kind, row["notes"], letters).plain.split("\n")
        table.add_row(f"{kind}, MB", *cells)
    cells = _pair(row["sent"], row["sent_formula"], "sent", row["notes"], letters)
    table.add_row("sent per step, MB", *cells.plain.split("\n"))
    if row["bubble"] is not None:
        table.add_row("bubble, slots", f"{row['bubble']:.3f}", f"{row['bubble_formula']:.3f}")
    if row["step_seconds"] is not None:
        table.add_row("step, ms", f"{row['step_seconds'] * 1e3:.1f}")
    console.print(table)
    for line in letters.lines():
        console.print(line)
