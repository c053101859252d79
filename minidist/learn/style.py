"""How the pictures look: fonts, bilingual labels, colours, axes, legends, units."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    "gathered": "#99BBDD",  # full parameters, only while they are used
    "gradients": "#228833",
    "optimizer": "#CCBB44",
    "activations": "#EE6677",
    "buffers": "#66CCEE",
    "temporary": "#BBBBBB",
}
LANE_COLORS = {"compute": "#4477AA", "communication": "#EE6677", "wait": "#888888"}
ACTION_COLORS = {"F": "#4477AA", "B": "#228833", "I": "#228833", "W": "#CCBB44"}
OPERATION_COLORS = {
    "all_reduce": "#4477AA",
    "reduce_scatter": "#228833",
    "all_gather": "#EE6677",
    "broadcast": "#CCBB44",
    "all_to_all": "#66CCEE",
    "send": "#AA3377",
}
LINE_COLORS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#888888")

KIND_ZH = {
    "parameters": "参数",
    "gathered": "收集到的参数",
    "gradients": "梯度",
    "optimizer": "优化器状态",
    "activations": "激活值",
    "buffers": "缓冲区",
    "temporary": "临时",
}
LANE_ZH = {"compute": "计算", "communication": "通信", "wait": "等待"}
ACTION_NAMES = {
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
    """The text of a label: English · Chinese, or English alone where no font shows Chinese."""
    return f"{english} · {chinese}" if chinese and chinese_font() else english


def new_axes(ax: Axes | None, size: tuple[float, float], grid: str) -> Axes:
    """`ax`, or the axes of a new figure of `size` inches, with `grid` lines along "x" or "both"."""
    import matplotlib.pyplot as plt
    from matplotlib.text import Text

    # `font.family`, not `font.sans-serif`: only the former falls back glyph by glyph.
    family = chinese_font()
    plt.rcParams["font.family"] = ["DejaVu Sans", family] if family else ["DejaVu Sans"]
    if ax is None:
        _, ax = plt.subplots(figsize=size, layout="constrained")
    else:  # made before the line above, perhaps: its texts have the families of that time
        for text in ax.findobj(Text):
            text.set_fontfamily(plt.rcParams["font.family"])
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=8)
    ax.grid(axis=grid, color="#E5E5E5", linewidth=0.8)
    ax.set_axisbelow(True)
    return ax


def set_title(ax: Axes, english: str, chinese: str, given: str | None) -> None:
    """What the caller gave, else the usual title in both languages."""
    ax.set_title(given if given is not None else label(english, chinese), loc="left", fontsize=10)


def set_legend(ax: Axes) -> None:
    """Below the picture: inside, it would cover data sooner or later."""
    handles, texts = ax.get_legend_handles_labels()
    if not texts:
        return
    # Bars before the thin marks, whatever order matplotlib lists them in.
    order = sorted(range(len(texts)), key=lambda i: not hasattr(handles[i], "patches"))
    figure = ax.get_figure()
    place = ax.get_subplotspec()
    columns = place.get_gridspec().ncols if place else 1
    width = 0.9 * figure.get_size_inches()[0] / columns
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


def byte_unit(largest: float) -> tuple[float, str]:
    """``(bytes, name)`` of the unit that suits a largest value."""
    return _unit(largest, [(1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes")])


def time_unit(longest: float) -> tuple[float, str]:
    """``(seconds, name)`` of the unit that suits a longest time."""
    return _unit(longest, [(1, "s"), (1e-3, "ms"), (1e-6, "µs")])
