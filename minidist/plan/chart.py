"""Pictures of a plan and of a simulated step (matplotlib, imported only here)."""

from __future__ import annotations

from minidist.plan.planner import Plan
from minidist.plan.simulator import Simulation

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")
PARTS = (
    "compute", "tp_communication", "pp_communication", "dp_communication", "bubble", "optimizer",
)  # fmt: skip


def plan_figure(plan: Plan, top: int = 6):
    """Memory by kind and time by part of the best layouts, one bar each; returns the figure."""
    from matplotlib.figure import Figure

    layouts = plan.layouts[:top]
    figure = Figure(figsize=(11, 2 + 0.45 * len(layouts)), layout="constrained")
    memory, time = figure.subplots(1, 2, sharey=True)
    names = [str(e.layout).replace(" x ", " ") for e in layouts]
    _bars(memory, names, [[e.bytes[k] / 1e9 for k in KINDS] for e in layouts], KINDS)
    memory.axvline(plan.usable / 1e9, color="black", linestyle="--", linewidth=1)
    memory.set_xlabel("memory per GPU (GB); dashed: usable")
    _bars(time, names, [[e.seconds[p] for p in PARTS] for e in layouts], PARTS)
    time.set_xlabel("time per step (s)")
    memory.invert_yaxis()  # the best on top; both axes share their rows
    figure.suptitle(f"{plan.shape} on {plan.cluster.gpus} x {plan.cluster.accelerator.name}")
    return figure


def _bars(axis, names, rows, labels):
    left = [0.0] * len(rows)
    for i, label in enumerate(labels):
        values = [row[i] for row in rows]
        if any(values):
            axis.barh(names, values, left=left, label=label.replace("_", " "))
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
