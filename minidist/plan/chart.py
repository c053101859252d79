"""Pictures of a plan and of a simulated step (matplotlib, imported only here)."""

from __future__ import annotations

from minidist.plan.planner import Plan
from minidist.plan.simulator import Simulation
from minidist.plan.words import KINDS_ZH

PARTS_ZH = {
    "compute": "计算", "tp_communication": "张量并行通信", "pp_communication": "流水线通信",
    "dp_communication": "数据并行通信", "bubble": "气泡", "optimizer": "优化器",
}  # fmt: skip


def plan_figure(plan: Plan, top: int = 6, label=lambda english, chinese: english):
    """Memory by kind and time by part of the best layouts, one bar each; returns the figure.

    `label` makes the text of a label from its English and Chinese.
    """
    from matplotlib.figure import Figure

    layouts = plan.layouts[:top]
    figure = Figure(figsize=(11, 2 + 0.45 * len(layouts)), layout="constrained")
    memory, time = figure.subplots(1, 2, sharey=True)
    names = [str(e.layout).replace(" x ", " ") for e in layouts]
    kinds = [label(kind, chinese) for kind, chinese in KINDS_ZH.items()]
    _bars(memory, names, [[e.bytes[k] / 1e9 for k in KINDS_ZH] for e in layouts], kinds)
    memory.axvline(plan.usable / 1e9, color="black", linestyle="--", linewidth=1)
    memory.set_xlabel(label("memory per GPU (GB); dashed: usable", "每张卡的显存；虚线：可用"))
    parts = [label(part.replace("_", " "), chinese) for part, chinese in PARTS_ZH.items()]
    _bars(time, names, [[e.seconds[p] for p in PARTS_ZH] for e in layouts], parts)
    time.set_xlabel(label("time per step (s)", "每步时间"))
    memory.invert_yaxis()  # the best on top; both axes share their rows
    figure.suptitle(f"{plan.shape} on {plan.cluster.gpus} x {plan.cluster.accelerator.name}")
    return figure


def _bars(axis, names, rows, labels):
    left = [0.0] * len(rows)
    for i, label in enumerate(labels):
        values = [row[i] for row in rows]
        if any(values):
            axis.barh(names, values, left=left, label=label)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axis.legend(fontsize="x-small", loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3)


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
