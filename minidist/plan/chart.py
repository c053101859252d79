"""Pictures of a plan and of a simulated step (matplotlib, imported only here)."""

from __future__ import annotations

from minidist.plan.planner import Plan
from minidist.plan.simulator import Simulation

# Chinese, and a colour that means the same in every picture (those of the chapters' figures).
KINDS = {
    "parameters": ("参数", "#4477AA"), "gradients": ("梯度", "#228833"),
    "optimizer": ("优化器状态", "#CCBB44"), "activations": ("激活值", "#EE6677"),
    "buffers": ("缓冲区", "#66CCEE"),
}  # fmt: skip
PARTS = {
    "compute": ("计算", "#4477AA"), "tp_communication": ("张量并行通信", "#EE6677"),
    "pp_communication": ("流水线通信", "#AA3377"), "dp_communication": ("数据并行通信", "#66CCEE"),
    "bubble": ("气泡", "#BBBBBB"), "optimizer": ("优化器", "#CCBB44"),
}  # fmt: skip


def plan_figure(plan: Plan, top: int = 6, label=lambda english, chinese: english):
    """Memory by kind and time by part of the best layouts, one bar each; returns the figure.

    `label` makes the text of a label from its English and Chinese.
    """
    from matplotlib.figure import Figure

    layouts = plan.layouts[:top]
    figure = Figure(figsize=(11, 1.7 + 0.45 * len(layouts)), layout="constrained")
    memory, time = figure.subplots(1, 2, sharey=True)
    names = [_two_lines(str(e.layout)) for e in layouts]
    usable = plan.usable / 1e9
    memory.axvline(
        usable, color="black", linestyle="--", linewidth=1, label=label("usable", "可用")
    )
    sizes = [{kind: size / 1e9 for kind, size in e.bytes.items()} for e in layouts]
    _bars(memory, names, sizes, KINDS, label)
    memory.set_xlabel(label("GB per GPU", "每张卡的显存"))
    _bars(time, names, [e.seconds for e in layouts], PARTS, label)
    time.set_xlabel(label("seconds per step", "每步时间"))
    memory.invert_yaxis()  # the best on top; both axes share their rows
    # Beside the axes there is no room when the names are long.
    for axis, place in ((memory, "outside upper center"), (time, "outside lower center")):
        figure.legend(
            *axis.get_legend_handles_labels(), loc=place, ncols=6, fontsize="small", frameon=False
        )
    title = f"{plan.shape} on {plan.cluster.gpus} x {plan.cluster.accelerator.name}"
    memory.set_title(title, loc="left", fontsize="medium")
    return figure


def _two_lines(name: str) -> str:
    """Long names leave no room for the bars."""
    head, comma, tail = name.partition(", ")
    return f"{head},\n{tail}" if comma and len(name) > 24 else name


def _bars(axis, names, rows, parts, label):
    left = [0.0] * len(rows)
    for part, (chinese, color) in parts.items():
        values = [row[part] for row in rows]
        if any(values):
            text = label(part.replace("_", " "), chinese)
            axis.barh(names, values, left=left, label=text, color=color)
        left = [a + b for a, b in zip(left, values, strict=True)]


def timeline_figure(run: Simulation, ranks: int = 8):
    """Every task of the step on its rank's lanes: compute above, network below; returns the
    figure."""
    from matplotlib.figure import Figure

    colors = {
        "forward": "tab:blue", "backward": "tab:green", "communication": "tab:orange",
        "optimizer": "tab:red",
    }  # fmt: skip
    shown = sorted({t.rank for t in run.tasks})[:ranks]
    figure = Figure(figsize=(11, 1 + 0.5 * len(shown)), layout="constrained")
    axis = figure.subplots()
    for rank in shown:
        for kind, color in colors.items():
            spans = [
                (t.start, t.end - t.start) for t in run.tasks if (t.rank, t.kind) == (rank, kind)
            ]
            low = rank + (0.25 if kind == "communication" else -0.25)
            axis.broken_barh(
                spans, (low - 0.2, 0.4), facecolors=color, label=kind if rank == shown[0] else None
            )
    axis.set_yticks(shown, [f"rank {rank}" for rank in shown])
    axis.invert_yaxis()
    axis.set_xlabel("seconds")
    axis.legend(fontsize="small", loc="upper right")
    return figure
