"""Pictures drawn from what was measured: memory, traffic, time, schedules, losses.

Every function takes plain data (dicts of numbers, lists of spans), draws on ``ax`` or on a new
figure, and returns the matplotlib ``Axes``. Labels are short: English, then Chinese. When no
Chinese font is installed the Chinese part is left out, so that nothing shows as empty boxes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Families that hold simplified Chinese, in order of preference, on Linux, macOS and Windows.
_CJK_FAMILIES = (
    "Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Source Han Sans CN",
    "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans GB", "Heiti SC",
    "STHeiti", "Microsoft YaHei", "SimHei", "Noto Sans CJK JP", "Droid Sans Fallback",
    "Arial Unicode MS",
)  # fmt: skip

# Colours that stay apart for colour-blind readers and in grey print.
KIND_COLORS = {
    "parameters": "#4477AA",
    "gradients": "#228833",
    "optimizer": "#CCBB44",
    "activations": "#EE6677",
    "buffers": "#BBBBBB",
    "other": "#DDDDDD",
}
ACTION_COLORS = {"F": "#4477AA", "B": "#228833", "I": "#228833", "W": "#CCBB44"}
OPERATION_COLORS = {
    "all_reduce": "#4477AA",
    "reduce_scatter": "#228833",
    "all_gather": "#EE6677",
    "broadcast": "#CCBB44",
    "all_to_all": "#66CCEE",
    "send": "#AA3377",
}
_LINES = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#888888")

_KIND_ZH = {
    "parameters": "参数",
    "gradients": "梯度",
    "optimizer": "优化器状态",
    "activations": "激活值",
    "buffers": "缓冲区",
    "other": "其他",
}
_ACTION_NAMES = {
    "F": ("forward", "前向"),
    "B": ("backward", "反向"),
    "I": ("input gradient", "输入梯度"),
    "W": ("weight gradient", "权重梯度"),
}


# ------------------------------------------------------------------------------------- language


@functools.cache
def chinese_font() -> str | None:
    """An installed font family that really has Chinese glyphs, or None."""
    from matplotlib import font_manager, ft2font

    installed = {entry.name: entry.fname for entry in font_manager.fontManager.ttflist}
    for family in _CJK_FAMILIES:
        if family in installed and ft2font.FT2Font(installed[family]).get_char_index(ord("显")):
            return family
    return None


def label(english: str, chinese: str = "") -> str:
    """The text of a label: English, then Chinese if it can be shown."""
    return f"{english} {chinese}" if chinese and chinese_font() else english


def _axes(ax: Axes | None, size: tuple[float, float], grid: str) -> Axes:
    import matplotlib.pyplot as plt

    # `font.family`, not `font.sans-serif`: only the former falls back glyph by glyph.
    family = chinese_font()
    plt.rcParams["font.family"] = ["DejaVu Sans", family] if family else ["DejaVu Sans"]
    if ax is None:
        _, ax = plt.subplots(figsize=size, layout="constrained")
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=8)
    ax.grid(axis=grid, color="#E5E5E5", linewidth=0.8)
    ax.set_axisbelow(True)
    return ax


def _title(ax: Axes, english: str, chinese: str, given: str | None) -> None:
    ax.set_title(given if given is not None else label(english, chinese), loc="left", fontsize=10)


def _legend(ax: Axes) -> None:
    """Below the picture: inside, it would cover data sooner or later."""
    handles, texts = ax.get_legend_handles_labels()
    if not texts:
        return
    # Bars before the thin marks, whatever order matplotlib lists them in.
    order = sorted(range(len(texts)), key=lambda i: not hasattr(handles[i], "patches"))
    figure = ax.get_figure()
    width = 0.9 * figure.get_size_inches()[0] / ax.get_subplotspec().get_gridspec().ncols
    longest = max(sum(2 if ord(c) > 0x2E00 else 1 for c in text) for text in texts)
    ax.legend(
        [handles[i] for i in order], [texts[i] for i in order],
        ncols=max(1, int(width / (0.4 + 0.055 * longest))), frameon=False, fontsize=8,
        loc="upper left", borderaxespad=0, handlelength=1.2, columnspacing=1.2,
        bbox_to_anchor=(0, -0.62 / figure.get_size_inches()[1]),
    )  # fmt: skip


def _unit(largest: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The largest unit in which `largest` is at least 1 (else the smallest unit)."""
    for size, name in units:
        if largest >= size:
            return size, name
    return units[-1]


def _byte_unit(largest: float) -> tuple[float, str]:
    return _unit(largest, [(1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes")])


def _time_unit(longest: float) -> tuple[float, str]:
    return _unit(longest, [(1, "s"), (1e-3, "ms"), (1e-6, "µs")])


# --------------------------------------------------------------------------- memory and traffic


def memory_bars(
    rows: Mapping[str, Mapping[str, float]],
    formula: Mapping[str, float] | None = None,
    *,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """One bar per row (a strategy, a stage or a rank), stacked by kind of memory.

    `rows`: name -> {kind: bytes}, kinds as `measure().memory` names them; a key ``peak`` is not
    stacked but marked by a line: the kinds do not all reach their own peak at the same moment.
    `formula`: name -> bytes that the formula gives for the whole bar, marked by a black line.
    """
    peaks = {name: row["peak"] for name, row in rows.items() if "peak" in row}
    bars = {name: {k: v for k, v in row.items() if k != "peak"} for name, row in rows.items()}
    present = {kind for row in bars.values() for kind, size in row.items() if size}
    kinds = [kind for kind in KIND_COLORS if kind in present] + sorted(present - set(KIND_COLORS))
    ax = _stacked_bars(
        bars,
        {kind: (label(kind, _KIND_ZH.get(kind, "")), KIND_COLORS.get(kind)) for kind in kinds},
        [
            (peaks, "peak", "峰值", "#AA3377"),
            (formula or {}, "formula", "公式", "black"),
        ],
        ax,
    )
    _title(ax, "memory per rank", "每个 rank 的内存", title)
    return ax


def traffic_bars(
    rows: Mapping[str, Mapping[str, float]],
    formula: Mapping[str, float] | None = None,
    *,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """One bar per row, stacked by collective: the bytes that one rank sent.

    `rows`: name -> {operation: bytes sent}. `formula`: name -> bytes, marked by a black line.
    """
    present = {operation for row in rows.values() for operation, size in row.items() if size}
    known = [name for name in OPERATION_COLORS if name in present]
    parts = {
        name: (name, OPERATION_COLORS.get(name, "#888888"))
        for name in known + sorted(present - set(known))
    }
    ax = _stacked_bars(rows, parts, [(formula or {}, "formula", "公式", "black")], ax)
    _title(ax, "bytes sent by one rank", "每个 rank 发送的字节", title)
    return ax


def _stacked_bars(rows, parts, marks, ax) -> Axes:
    """Horizontal bars; `parts`: key -> label, colour; `marks`: values, english, 中文, colour."""
    names = list(rows)
    ends = {name: sum(row.values()) for name, row in rows.items()}
    furthest = {
        name: max([ends[name], *(values[name] for values, *_ in marks if name in values)])
        for name in names
    }
    size, unit = _byte_unit(max([0, *furthest.values()]))
    ax = _axes(ax, (7.5, 1.1 + 0.32 * len(names)), "x")
    left = [0.0] * len(names)
    for part, (text, color) in parts.items():
        widths = [rows[name].get(part, 0) / size for name in names]
        ax.barh(names, widths, left=left, color=color or "#DDDDDD", label=text, height=0.7)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for values, english, chinese, color in marks:
        at = [(i, values[name] / size) for i, name in enumerate(names) if name in values]
        if at:
            ax.vlines(
                [x for _, x in at], [i - 0.42 for i, _ in at], [i + 0.42 for i, _ in at],
                color=color, linewidth=1.6, label=label(english, chinese),
            )  # fmt: skip
    for i, name in enumerate(names):
        ax.annotate(
            f"{ends[name] / size:.3g}", (furthest[name] / size, i),
            xytext=(4, 0), textcoords="offset points", va="center", fontsize=8,
        )  # fmt: skip
    ax.set_ylim(len(names) - 0.4, -0.6)  # the first row on top
    ax.set_xlim(0, 1.1 * max([*furthest.values(), 1e-9]) / size)
    ax.set_xlabel(unit, fontsize=8, loc="right")
    _legend(ax)
    return ax


# ------------------------------------------------------------------------------------- schedules


def gantt(
    actions: Iterable[tuple[int, Any, float, float]],
    *,
    bubble: float | None = None,
    unit: str | None = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """A pipeline schedule, planned or measured: one line per rank, one block per action.

    `actions`: ``(rank, action, start, end)``; an action has ``kind`` (F, B, I, W), ``microbatch``
    and ``chunk``. `unit`: what the times count ("s" picks a readable one); the default is the
    planner's unit, one forward. `bubble`: idle share to print; computed from the blocks if None.
    """
    blocks = list(actions)
    first = min((start for _, _, start, _ in blocks), default=0.0)
    span = max((end for *_, end in blocks), default=0.0) - first
    size, name = (
        _time_unit(span) if unit == "s" else (1.0, unit or label("one forward", "一次前向"))
    )
    ranks = sorted({rank for rank, *_ in blocks})
    line = {rank: i for i, rank in enumerate(ranks)}
    chunks = 1 + max((action.chunk for _, action, _, _ in blocks), default=0)
    ax = _axes(ax, (7.5, 1.1 + 0.42 * len(ranks)), "x")
    for kind in ("F", "B", "I", "W"):
        mine = [block for block in blocks if block[1].kind == kind]
        for chunk in range(chunks):
            here = [block for block in mine if block[1].chunk == chunk]
            if not here:
                continue
            ax.barh(
                [line[rank] for rank, *_ in here],
                [(end - start) / size for *_, start, end in here],
                left=[(start - first) / size for *_, start, _ in here],
                height=0.84, color=ACTION_COLORS[kind], edgecolor="white", linewidth=0.6,
                alpha=1.0 if chunk % 2 == 0 else 0.65,
                label=label(*_ACTION_NAMES[kind]) if chunk == 0 else None,
            )  # fmt: skip
        for rank, action, start, end in mine:
            if (end - start) > span / 70:  # else the number would not fit into its block
                ax.text(
                    ((start + end) / 2 - first) / size, line[rank], str(action.microbatch),
                    ha="center", va="center", fontsize=7, color="white",
                )  # fmt: skip
    if bubble is None and blocks:
        bubble = 1 - sum(end - start for *_, start, end in blocks) / (len(ranks) * span)
    ax.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    ax.set_ylim(len(ranks) - 0.45, -0.55)
    ax.set_xlim(0, max(span, 1e-9) / size)
    ax.set_xlabel(f"{label('time', '时间')} ({name})", fontsize=8, loc="right")
    idle = f": {label('idle', '空闲')} {bubble:.0%}" if bubble is not None else ""
    _title(ax, "", "", (title or label("pipeline", "流水线")) + idle)
    _legend(ax)
    return ax


# -------------------------------------------------------------------------------------- timeline


def timeline(
    spans: Iterable[tuple[int, str, str, float, float]],
    *,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """What each rank did when: one line per rank and lane (compute, communication, waiting).

    `spans`: ``(rank, lane, name, start, end)`` in seconds. Where the lanes of one rank are busy at
    the same time, communication is hidden behind computation.
    """
    spans = sorted(spans, key=lambda span: (span[0], span[3]))
    first = min((start for *_, start, _ in spans), default=0.0)
    length = max((end for *_, end in spans), default=0.0) - first
    size, unit = _time_unit(length)
    lanes = sorted({lane for _, lane, *_ in spans}, key=lambda lane: (lane != "compute", lane))
    rows = [(rank, lane) for rank in sorted({span[0] for span in spans}) for lane in lanes]
    colors = dict(zip(lanes, cycle(_LINES), strict=False))
    ax = _axes(ax, (7.5, 1.1 + 0.3 * len(rows)), "x")
    for lane in lanes:
        mine = [span for span in spans if span[1] == lane]
        ax.barh(
            [rows.index((rank, lane)) for rank, *_ in mine],
            [(end - start) / size for *_, start, end in mine],
            left=[(start - first) / size for *_, start, _ in mine],
            height=0.8, color=colors[lane], edgecolor="white", linewidth=0.5, label=lane,
        )  # fmt: skip
        for rank, _, name, start, end in mine:
            if (end - start) / max(length, 1e-12) > 0.012 * len(name):  # only where it fits
                ax.text(
                    ((start + end) / 2 - first) / size, rows.index((rank, lane)), name,
                    ha="center", va="center", fontsize=6.5, color="white", clip_on=True,
                )  # fmt: skip
    for i in range(len(lanes), len(rows), max(len(lanes), 1)):
        ax.axhline(i - 0.5, color="#BBBBBB", linewidth=0.6)
    ax.set_yticks(range(len(rows)), [f"rank {rank} {lane}" for rank, lane in rows])
    ax.set_ylim(len(rows) - 0.45, -0.55)
    ax.set_xlim(0, max(length, 1e-12) / size)
    ax.set_xlabel(f"{label('time', '时间')} ({unit})", fontsize=8, loc="right")
    _title(ax, "timeline", "时间线", title)
    _legend(ax)
    return ax


# ---------------------------------------------------------------------------------------- curves


def loss_curves(
    losses: Mapping[str, Sequence[float]],
    reference: str | None = None,
    *,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Losses by step, on top of each other; `reference` names the one the others must equal.

    Equal curves hide each other, so each later one is drawn thinner, and the largest relative
    difference from the reference is written beside its name.
    """
    ax = _axes(ax, (7.5, 3.2), "both")
    base = losses[reference] if reference is not None else None
    for i, (name, values) in enumerate(losses.items()):
        text = name
        if base is not None and name != reference:
            worst = max(
                (abs(a - b) / max(abs(b), 1e-12) for a, b in zip(values, base, strict=True)),
                default=0.0,
            )
            text = f"{name} ({label('differs by', '相差')} {worst:.1g})"
        width = 1.2 + 4.0 * (len(losses) - i - 1) / max(len(losses) - 1, 1)
        ax.plot(range(1, len(values) + 1), values, color=_LINES[i % len(_LINES)],
                linewidth=width, label=text, solid_capstyle="round")  # fmt: skip
    ax.set_xlabel(label("step", "步"), fontsize=8, loc="right")
    _title(ax, "loss", "损失", title)
    _legend(ax)
    return ax


def scaling_curves(
    seconds: Mapping[str, Mapping[int, float]],
    *,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Speed-up over the smallest number of ranks, against the ideal line.

    `seconds`: name -> {ranks: seconds for the same total work}.
    """
    ax = _axes(ax, (5.5, 3.6), "both")
    worlds = sorted({world for times in seconds.values() for world in times})
    if worlds:
        ax.plot(worlds, [world / worlds[0] for world in worlds], color="#888888", linewidth=1,
                linestyle="--", label=label("ideal", "理想"))  # fmt: skip
    for (name, times), color in zip(seconds.items(), cycle(_LINES), strict=False):
        here = sorted(times)
        ax.plot(here, [here[0] / worlds[0] * times[here[0]] / times[n] for n in here],
                marker="o", markersize=4, color=color, label=name)  # fmt: skip
    ax.set_xticks(worlds)
    ax.set_ylim(bottom=0)
    ax.set_xlabel(label("ranks", "rank 数"), fontsize=8, loc="right")
    _title(ax, "speed-up", "加速比", title)
    _legend(ax)
    return ax


# ------------------------------------------------------------------------------- the main job


def comparison(rows: Sequence[Mapping[str, Any]], path: str | Path | None = None) -> Figure:
    """Memory and traffic of all strategies, from the rows of ``minidist compare --json``.

    Saved to `path` (its ending picks the format) if given.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.6 + 0.34 * len(rows)), layout="constrained", dpi=110)
    memory, traffic = figure.subplots(1, 2)
    names = [row["strategy"] for row in rows]
    memory_bars({n: row["bytes"] for n, row in zip(names, rows, strict=True)}, ax=memory)
    traffic_bars(
        {n: _by_operation(row["sent"]) for n, row in zip(names, rows, strict=True)},
        {
            n: sum(_by_operation(row["sent_formula"]).values())
            for n, row in zip(names, rows, strict=True)
            if row.get("sent_formula") is not None
        },
        title=label("bytes sent per rank and step", "每步每个 rank 发送的字节"),
        ax=traffic,
    )
    traffic.set_yticklabels([])
    if path is not None:
        figure.savefig(path)
    return figure


def _by_operation(sent: float | Mapping[str, float]) -> Mapping[str, float]:
    return sent if isinstance(sent, Mapping) else {label("sent", "发送"): sent}
