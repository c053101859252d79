"""``--plot``: what each rank holds and sends, as bars, with the formulas as marks."""

from __future__ import annotations

from pathlib import Path

from minidist.train.report import KINDS

# Distinguishable in grey and with colour-blind eyes (Okabe and Ito 2008).
COLOURS = {
    "parameters": "#0072B2",
    "gathered": "#56B4E9",
    "gradients": "#D55E00",
    "optimizer": "#009E73",
    "activations": "#CCCCCC",
    "buffers": "#F0E442",
}


def plot_rows(rows: list[dict], path: str | Path) -> None:
    """Two panels: bytes per rank by kind (stacked), bytes sent per rank and step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in rows if "error" not in row]
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: works without a display and leaves no global state
    memory, traffic = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    names = [row["strategy"] for row in rows]
    places = range(len(rows))
    bottom = [0.0] * len(rows)
    for kind in KINDS:
        heights = [row["bytes"][kind] / 1e6 for row in rows]
        memory.bar(places, heights, bottom=bottom, color=COLOURS[kind], label=kind, width=0.7)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    _marks(memory, places, [row["bytes_formula"].get("peak") for row in rows])
    memory.set_ylabel("MB on the fullest rank")
    memory.set_title(
        f"{rows[0]['dtype']}, {max(row['ranks'] for row in rows)} ranks: every kind at its highest"
    )
    memory.legend(frameon=False, ncols=4)
    sent = [row["sent"] / 1e6 for row in rows]
    traffic.bar(places, sent, color="#0072B2", width=0.7)
    _marks(traffic, places, [row["sent_formula"] for row in rows])
    traffic.legend(frameon=False)
    traffic.set_ylabel("MB sent per step, busiest rank")
    traffic.set_xticks(list(places), names, rotation=30, ha="right")
    for axes in (memory, traffic):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _marks(axes, places, formulas: list[float | None]) -> None:
    known = [(x, value / 1e6) for x, value in zip(places, formulas, strict=True) if value]
    if known:
        xs, ys = zip(*known, strict=True)
        axes.plot(xs, ys, linestyle="", marker="_", markersize=34, color="black", label="formula")
