"""Pictures drawn from what was measured: memory, traffic, time, schedules, losses.

Every function takes what `minidist.measure` and the schedules give, or plain numbers, draws on
``ax`` or on a new figure, and returns the matplotlib ``Axes``. Labels are short: English, then
Chinese. When no Chinese font is installed the Chinese part is left out, so that nothing shows as
empty boxes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from minidist.learn.style import (
    ACTION_COLORS,
    ACTION_NAMES,
    KIND_COLORS,
    KIND_ZH,
    LANE_COLORS,
    LANE_ZH,
    LINE_COLORS,
    OPERATION_COLORS,
    byte_unit,
    label,
    new_axes,
    set_legend,
    set_title,
    time_unit,
)  # fmt: skip

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ACTION_SPAN = re.compile(r"([FBIW])(\d+)(?:\.(\d+))?")


# --------------------------------------------------------------------------- memory and traffic


def memory_bars(
    rows: Mapping[str, Mapping[str, float]],
    formula: Mapping[str, float] | None = None,
    *,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """One bar per row (a strategy, a stage or a rank), stacked by kind of memory.

    `rows`: name -> {kind: bytes}, such as ``measure().memory.at_peak`` or the ``bytes`` of a row of
    ``minidist compare --json``; a key ``peak`` is not stacked but marked by a line: the kinds do
    not all reach their own peak at the same moment.
    `formula`: name -> bytes that the formula gives for the whole bar, marked by a black line.
    """
    peaks = {name: row["peak"] for name, row in rows.items() if "peak" in row}
    bars = {name: {k: v for k, v in row.items() if k != "peak"} for name, row in rows.items()}
    present = {kind for row in bars.values() for kind, size in row.items() if size}
    kinds = [kind for kind in KIND_COLORS if kind in present] + sorted(present - set(KIND_COLORS))
    ax = _stacked_bars(
        bars,
        {kind: (label(kind, KIND_ZH.get(kind, "")), KIND_COLORS.get(kind)) for kind in kinds},
        [
            (peaks, "peak", "峰值", "#AA3377"),
            (formula or {}, "formula", "公式", "black"),
        ],
        ax,
    )
    set_title(ax, "memory per rank", "每个 rank 的内存", title)
    return ax


def traffic_bars(
    rows: Mapping[str, Any],
    formula: Mapping[str, float] | None = None,
    *,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """One bar per row, stacked by collective: the bytes that one rank sent.

    `rows`: name -> ``measure().traffic``, or {operation: bytes sent}. `formula`: name -> bytes,
    marked by a black line.
    """
    rows = {name: _by_operation(row) for name, row in rows.items()}
    present = {operation for row in rows.values() for operation, size in row.items() if size}
    known = [name for name in OPERATION_COLORS if name in present]
    parts = {
        name: (name, OPERATION_COLORS.get(name, "#888888"))
        for name in known + sorted(present - set(known))
    }
    ax = _stacked_bars(rows, parts, [(formula or {}, "formula", "公式", "black")], ax)
    set_title(ax, "bytes sent by one rank", "每个 rank 发送的字节", title)
    return ax


def _by_operation(sent) -> Mapping[str, float]:
    if hasattr(sent, "by_op"):
        return {operation: total.sent_bytes for operation, total in sent.by_op.items()}
    return sent


def _stacked_bars(rows, parts, marks, ax) -> Axes:
    """Horizontal bars; `parts`: key -> label, colour; `marks`: values, english, 中文, colour."""
    names = list(rows)
    ends = {name: sum(row.values()) for name, row in rows.items()}
    furthest = {
        name: max([ends[name], *(values[name] for values, *_ in marks if name in values)])
        for name in names
    }
    size, unit = byte_unit(max([0, *furthest.values()]))
    ax = new_axes(ax, (7.5, 1.1 + 0.32 * len(names)), "x")
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
    set_legend(ax)
    return ax


# ------------------------------------------------------------------------------------- schedules


def gantt(
    slots: Sequence[Sequence[tuple[Any, float, float]]],
    *,
    unit: str | None = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """A pipeline schedule, planned or measured: one line per rank, one block per action.

    `slots[rank]`: ``(action, start, end)``, such as ``schedule.simulate().slots`` or
    ``measured_slots(timelines)``; an action has ``kind`` (F, B, I, W), ``microbatch``, ``chunk``
    (odd chunks are paler). `unit`: what the times count; "s" picks a readable one, the default is
    the simulator's unit, one forward. The title ends with the idle share of ranks x total time.
    """
    blocks = [(rank, *slot) for rank, mine in enumerate(slots) for slot in mine]
    first = min((start for _, _, start, _ in blocks), default=0.0)
    total = max((end for *_, end in blocks), default=0.0) - first
    size, name = 1.0, unit or label("one forward", "一次前向")
    if unit == "s":
        size, name = time_unit(total)
    ax = new_axes(ax, (7.5, 1.1 + 0.42 * len(slots)), "x")
    for kind, color in ACTION_COLORS.items():
        for odd in (0, 1):
            here = [b for b in blocks if b[1].kind == kind and b[1].chunk % 2 == odd]
            if here:
                ax.barh(
                    [rank for rank, *_ in here],
                    [(end - start) / size for *_, start, end in here],
                    left=[(start - first) / size for *_, start, _ in here],
                    height=0.84, color=color, edgecolor="white", linewidth=0.6,
                    alpha=0.6 if odd else 1.0,
                    label=None if odd else label(*ACTION_NAMES[kind]),
                )  # fmt: skip
    for rank, action, start, end in blocks:
        if (end - start) > total / 70:  # else the number would not fit into its block
            ax.text(
                ((start + end) / 2 - first) / size, rank, str(action.microbatch),
                ha="center", va="center", fontsize=7, color="white",
            )  # fmt: skip
    ax.set_yticks(range(len(slots)), [f"rank {rank}" for rank in range(len(slots))])
    ax.set_ylim(len(slots) - 0.45, -0.55)
    ax.set_xlim(0, max(total, 1e-9) / size)
    ax.set_xlabel(f"{label('time', '时间')} ({name})", fontsize=8, loc="right")
    text = title if title is not None else label("pipeline", "流水线")
    if blocks:
        idle = 1 - sum(end - start for *_, start, end in blocks) / (len(slots) * total)
        text += f": {idle:.0%} {label('idle', '空闲')}"
    set_title(ax, "", "", given=text)
    set_legend(ax)
    return ax


def measured_slots(timelines: Sequence[Any]) -> list[list[tuple[Any, float, float]]]:
    """The actions that a pipeline really ran, from the timelines of its ranks, in rank order.

    `timelines[rank].spans`: those named like an action of the schedule (F0, B3, I2, W2, F1.1).
    """
    from minidist.parallel.schedules import Action

    slots = []
    for timeline in timelines:
        mine = []
        for span in timeline.spans:
            found = _ACTION_SPAN.fullmatch(span.name)
            if found:
                kind, microbatch, chunk = found.groups()
                mine.append((Action(kind, int(microbatch), int(chunk or 0)), span.start, span.end))
        slots.append(mine)
    return slots


# -------------------------------------------------------------------------------------- timeline


def timeline(
    timelines: Sequence[Any],
    *,
    lanes: Sequence[str] | None = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """What each rank did when: one line per rank and lane (compute, communication, wait).

    `timelines`: one per rank, each with ``rank`` and ``spans`` of ``name, lane, start, end`` in
    seconds, as ``measure().timeline.gather()`` gives them. `lanes`: which to draw, all if None.
    Where compute and communication of a rank are busy at the same time, communication is hidden.
    """
    found = {span.lane for one in timelines for span in one.spans}
    if lanes is None:
        lanes = [lane for lane in LANE_COLORS if lane in found] + sorted(found - set(LANE_COLORS))
    shown = [(one.rank, span) for one in timelines for span in one.spans if span.lane in lanes]
    first = min((span.start for _, span in shown), default=0.0)
    total = max((span.end for _, span in shown), default=0.0) - first
    size, unit = time_unit(total)
    rows = [(one.rank, lane) for one in timelines for lane in lanes]
    ax = new_axes(ax, (7.5, 1.1 + 0.3 * len(rows)), "x")
    for lane in lanes:
        # The outer span first, then those inside it on top.
        here = sorted(
            ((rows.index((rank, lane)), span) for rank, span in shown if span.lane == lane),
            key=lambda item: (item[0], item[1].start, -item[1].end),
        )
        ax.barh(
            [row for row, _ in here],
            [(span.end - span.start) / size for _, span in here],
            left=[(span.start - first) / size for _, span in here],
            height=0.8, color=LANE_COLORS.get(lane, "#CCBB44"), edgecolor="white", linewidth=0.5,
            label=label(lane, LANE_ZH.get(lane, "")),
        )  # fmt: skip
        for i, (row, span) in enumerate(here):
            later = here[i + 1] if i + 1 < len(here) else None
            holds_others = later and later[0] == row and later[1].start < span.end
            fits = span.end - span.start > 0.012 * len(span.name) * total
            if fits and not holds_others:
                ax.text(
                    ((span.start + span.end) / 2 - first) / size, row, span.name,
                    ha="center", va="center", fontsize=6.5, color="white", clip_on=True,
                )  # fmt: skip
    for i in range(len(lanes), len(rows), max(len(lanes), 1)):
        ax.axhline(i - 0.5, color="#BBBBBB", linewidth=0.6)
    ax.set_yticks(range(len(rows)), [f"rank {rank} {lane}" for rank, lane in rows])
    ax.set_ylim(len(rows) - 0.45, -0.55)
    ax.set_xlim(0, max(total, 1e-12) / size)
    ax.set_xlabel(f"{label('time', '时间')} ({unit})", fontsize=8, loc="right")
    set_title(ax, "timeline", "时间线", title)
    set_legend(ax)
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
    ax = new_axes(ax, (7.5, 3.2), "both")
    base = losses[reference] if reference is not None else None
    for i, (name, values) in enumerate(losses.items()):
        text = name
        if base is not None and name != reference:
            worst = max(
                (abs(a - b) / max(abs(b), 1e-12) for a, b in zip(values, base, strict=True)),
                default=0.0,
            )
            text = f"{name} ({label(f'differs by {worst:.1g}', f'相差 {worst:.1g}')})"
        width = 1.2 + 4.0 * (len(losses) - i - 1) / max(len(losses) - 1, 1)
        ax.plot(range(1, len(values) + 1), values, color=LINE_COLORS[i % len(LINE_COLORS)],
                linewidth=width, label=text, solid_capstyle="round")  # fmt: skip
    ax.set_xlabel(label("step", "步"), fontsize=8, loc="right")
    set_title(ax, "loss", "损失", title)
    set_legend(ax)
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
    ax = new_axes(ax, (5.5, 3.6), "both")
    worlds = sorted({world for times in seconds.values() for world in times})
    if worlds:
        ax.plot(worlds, [world / worlds[0] for world in worlds], color="#888888", linewidth=1,
                linestyle="--", label=label("ideal", "理想"))  # fmt: skip
    for (name, times), color in zip(seconds.items(), cycle(LINE_COLORS), strict=False):
        here = sorted(times)
        ax.plot(here, [here[0] / worlds[0] * times[here[0]] / times[n] for n in here],
                marker="o", markersize=4, color=color, label=name)  # fmt: skip
    ax.set_xticks(worlds)
    ax.set_ylim(bottom=0)
    ax.set_xlabel(label("ranks", "数量"), fontsize=8, loc="right")
    set_title(ax, "speed-up", "加速比", title)
    set_legend(ax)
    return ax
