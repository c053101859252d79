"""The results of a benchmark as a table and as a picture."""

from __future__ import annotations

from pathlib import Path


def table(rows: list[dict]):
    """A rich table: one line per strategy and number of ranks. Times in milliseconds."""
    from rich.table import Table

    shown = Table(title="ms per step. A ratio below 1: less than the best peer as launched.")
    shown.add_column("strategy\nranks", no_wrap=True)
    shown.add_column("ours", justify="right", no_wrap=True)
    shown.add_column("best peer", min_width=12)
    headings = ("ratio\n(goal)", "tuned\nlike\nus", "to the\nfloor", "peak MB\n(peer)")
    for heading in headings:
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        peers, best = _peers(row)
        shown.add_row(
            f"{row['name']}\n{row['world']} ranks",
            _ours(row),
            f"{_ms(peers[best])} {best}" if best else "none ran",
            _ratio(row),
            _number(row["ratio_to_best_peer"]),
            _number(row["ratio_to_floor"]),
            f"{_mb(row['ours_peak_bytes'])}\n({_mb(row['best_peer_peak_bytes'])})",
        )
    return shown


def line(row: dict) -> str:
    """One row in one line, for a run that goes on."""
    which = (row["ours"] or "").partition(", ")[2]
    words = f"{row['name']}, {row['world']} ranks: {_ms(row['ours_seconds'])} ms"
    words += f" ({which})" if which else ""
    if row["ratio_as_launched"] is not None:
        words += f", {row['ratio_as_launched']:.2f} of {row['best_peer_as_launched']}"
    if row["ratio_to_best_peer"] is not None:
        _, best = _peers(row)
        other = "" if best == row["best_peer"] else f" of {row['best_peer']}"
        words += f", {row['ratio_to_best_peer']:.2f}{other} tuned like us"
    return words


def remarks(rows: list[dict]) -> list[str]:
    """What a reader must know beside the table: who did not run and why, a busy machine, goals."""
    words = []
    for row in rows:
        for name, reason in row["skipped"].items():
            words.append(f"{row['name']}, {row['world']} ranks: {name} left out: {reason}")
    load = max((row["other_load"] or 0.0 for row in rows), default=0.0)
    if load > 0.1:
        words.append(
            f"Other programs kept up to {load:.1f} cores busy meanwhile: trust only the ratios, "
            "and those of CPU time (--json) most."
        )
    for row in rows:
        ours, theirs = row["ours_peak_bytes"], row["best_peer_peak_bytes"]
        if ours is not None and theirs is not None and ours > 1.01 * theirs:
            words.append(
                f"{row['name']}, {row['world']} ranks: needs {ours / theirs - 1:.0%} more memory "
                f"than {row['best_peer']}."
            )
    judged = [row for row in rows if row["met"] is not None]
    missed = [f"{r['name']} at {r['world']} ranks" for r in judged if not r["met"]]
    if missed:
        words.append(f"Goal missed by {', '.join(missed)}.")
    elif judged:
        words.append(f"All {len(judged)} goals are met.")
    return words


def plot(rows: list[dict], path: str | Path) -> None:
    """Bars of the time per step, floor and contestants, one panel per strategy and ranks (PNG)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(3, max(1, len(rows)))
    lines = -(-len(rows) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(5.5 * columns, 2.6 * lines), squeeze=False, layout="constrained"
    )
    for axis, row in zip(axes.flat, rows, strict=False):
        bars = {**row["variants"], **_peers(row)[0]}
        bars = {name: seconds for name, seconds in bars.items() if seconds is not None}
        colors = ["tab:blue" if name in row["variants"] else "lightgray" for name in bars]
        axis.barh(list(bars), [1e3 * seconds for seconds in bars.values()], color=colors)
        axis.invert_yaxis()
        if row["floor_seconds"] is not None:
            axis.axvline(1e3 * row["floor_seconds"], color="tab:red", linestyle="--")
        axis.set_title(f"{row['name']}, {row['world']} ranks", fontsize=10)
        axis.tick_params(labelsize=8)
        axis.set_xlabel("ms per step (dashed: floor)", fontsize=8)
    for axis in axes.flat[len(rows) :]:
        axis.axis("off")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _peers(row: dict) -> tuple[dict[str, float], str | None]:
    """Their times and the best of them: as launched, or else in our ranks (under torchrun)."""
    if row["peers_as_launched"]:
        return row["peers_as_launched"], row["best_peer_as_launched"]
    return row["peers"], row["best_peer"]


def _ours(row: dict) -> str:
    """The faster version's time, and which one that is, if there are several."""
    which = (row["ours"] or "").partition(", ")[2]
    return "\n".join(filter(None, [_ms(row["ours_seconds"]), which]))


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f}"


def _mb(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:.0f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _ratio(row: dict) -> str:
    if row["ratio_as_launched"] is None:
        return ""
    color = {True: "[green]", False: "[red]", None: ""}[row["met"]]
    ratio = f"{color}{row['ratio_as_launched']:.2f}{'[/]' if color else ''}"
    return ratio if row["goal"] is None else f"{ratio}\n({row['goal']:.2f})"
