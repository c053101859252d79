"""The document's decision tree and its two tables, answered with numbers for a given model.

Sections 4.5 and 6 give rules of thumb. Each is repeated here in short, with what the planner finds
for an example of its size beside it, and a note that says whether the two agree. The notes follow
from the numbers: better hardware tables change them.
"""

from __future__ import annotations

from dataclasses import dataclass

from minidist.plan import formulas
from minidist.plan.planner import Plan, plan


@dataclass(frozen=True)
class Node:
    """One question of the tree: `answer` yes or no with its numbers, and where it leads."""

    question: str
    answer: str
    leads_to: str


def decision_tree(found: Plan) -> list[Node]:
    """Section 6: fits one card? -> DDP; else FSDP/ZeRO: enough in all? -> FULL_SHARD, else offload;
    one layer very large? -> add tensor parallel. Walked for this model and machine."""
    shape, usable, gpus = found.shape, found.usable, found.cluster.gpus
    states = formulas.CONVENTIONS[found.convention].total * shape.parameters
    one = found.rejected.get("ddp", "")
    ddp_fits = "does not fit" not in one and not (
        found.best is not None and found.best.layout.offload != "none"
    )
    nodes = [
        Node(
            "does the model fit on one card?",
            f"{'yes' if ddp_fits else 'no'}: {states / 1e9:.0f} GB of model states, and "
            f"activations on top, against {usable / 1e9:.0f} GB usable",
            "DDP" if ddp_fits else "FSDP / ZeRO",
        )
    ]
    if ddp_fits:
        return nodes
    enough = states / gpus < 0.8 * usable
    nodes.append(
        Node(
            "is the memory of all cards together enough?",
            f"{'yes' if enough else 'no'}: {states / 1e9:.0f} GB over {gpus} cards is "
            f"{states / gpus / 1e9:.1f} GB each, plus activations",
            "FULL_SHARD / ZeRO-3" if enough else "add CPU offload",
        )
    )
    layer = shape.layer_parameters()
    # Two gathered layers and one gradient, 16 bits each, is what FULL_SHARD needs besides its
    # shards.
    working = 6 * layer
    large = working > 0.1 * usable
    nodes.append(
        Node(
            "is a single layer very large?",
            f"{'yes' if large else 'no'}: one layer is {layer / 1e9:.2g}B parameters, gathering "
            f"two and reducing one takes {working / 1e9:.1f} GB",
            "add tensor parallel" if large else "no tensor parallel needed for memory",
        )
    )
    return nodes


def configurations() -> list[dict]:
    """Section 6, typical configurations: size -> scheme, with the planner's answer for an
    example."""
    rows = (
        ("<1B", "2-8", "DDP", "64-256", {"params": 350e6, "gpus": 8, "gpu": "a100"}, {"ddp"}),
        ("1B-7B", "8-64", "FSDP / ZeRO-3", "128-512",
         {"params": 7e9, "gpus": 8, "gpu": "a100"}, {"fsdp"}),
        ("7B-70B", "64-512", "ZeRO-3 + TP + PP", "256-1024",
         {"params": 70e9, "gpus": 256, "gpu": "h100"}, {"fsdp", "tp", "pp"}),
        (">70B", "512+", "3D parallelism", "512-2048",
         {"params": 175e9, "gpus": 1024, "gpu": "a100"}, {"tp", "pp"}),
    )  # fmt: skip
    return [
        {"size": size, "gpus": gpus, "scheme": scheme, "batch": batch,
         **_example(question, wanted)}
        for size, gpus, scheme, batch, question, wanted in rows
    ]  # fmt: skip


def _example(question: dict, wanted: set) -> dict:
    found = plan(**question)
    size = f"{question['params'] / 1e9:.3g}B on {question['gpus']} {question['gpu']}"
    return {"example": size, "planner": str(found.best.layout), "note": _note(found, wanted)}


def _note(found: Plan, wanted: set) -> str:
    """Agrees, or what the planner leaves out or adds, and what that would cost."""
    layout = found.best.layout
    used = {"tp"} if layout.tp > 1 else set()
    used |= {"pp"} if layout.pp > 1 else set()
    used |= {layout.dp_kind} if layout.dp > 1 else set()
    missing = wanted - used
    if not missing:
        return "agrees"
    notes = []
    for axis in sorted(missing):
        family = {"pp": "tensor x pipeline", "tp": "tensor parallel 8"}.get(axis, axis)
        cost, _, extra = found.rejected.get(family, "").partition(": ")
        extra = extra.replace(" more of ", " of ")
        with_it = f"{family} is {cost} (its largest extra: {extra})" if extra else "not needed"
        notes.append(f"no {axis} here: {with_it}")
    return "; ".join(notes)


def advice() -> list[dict]:
    """Section 4.5, four pieces of advice, each with a measured answer."""
    small = plan(params=350e6, gpus=8, gpu="a100")
    seven = plan(params=7e9, gpus=8, gpu="a100")
    thirteen = plan(params=13e9, gpus=8, gpu="a100")
    lonely = plan(params=13e9, gpus=1, gpu="rtx4090")
    # What leaves a node of 8 among 64 cards; a world-wide group sends 56 of 64 pieces there.
    across = {name: copies * 14 * 56 / 64 for name, copies in (("replicate", 2), ("full", 3))}
    across["hybrid"] = formulas.cross_host_traffic(14, 64, 8, "hybrid", exact=True)
    saved = {name: 1 - volume / across["full"] for name, volume in across.items()}
    needs_offload = thirteen.best.layout.offload != "none"
    return [
        {
            "advice": "<1B: DDP is enough",
            "found": f"350M on 8 A100: {small.best.layout}",
            "note": "agrees" if small.best.layout.dp_kind == "ddp" else "differs",
        },
        {
            "advice": "1B-7B: FSDP FULL_SHARD is best",
            "found": f"7B on 8 A100: {seven.best.layout}; zero1 "
            f"{seven.rejected.get('zero1', 'is the best')}",
            "note": "agrees" if seven.best.layout.dp_kind == "fsdp" else "differs",
        },
        {
            "advice": ">7B: FSDP + CPU offload",
            "found": f"13B on 8 A100: {thirteen.best.layout} in "
            f"{thirteen.best.total_bytes / 1e9:.0f} GB; on one RTX 4090: {lonely.best.layout}, "
            f"{lonely.best.host_bytes / 1e9:.0f} GB of host memory",
            "note": "agrees" if needs_offload else "wrong as a rule: it depends on model states "
            "per card, and offload is for when these do not fit",
        },
        {
            "advice": "several nodes: SHARD_GRAD_OP for less traffic across nodes",
            "found": "7B over 8 nodes of 8, GB per card and step that cross nodes: FULL_SHARD "
            f"{across['full']:.1f}, SHARD_GRAD_OP {across['replicate']:.1f}, HYBRID_SHARD "
            f"{across['hybrid']:.1f}",
            "note": f"imprecise: it saves {saved['replicate']:.0%}, HYBRID_SHARD "
            f"{saved['hybrid']:.0%} where the model states fit in a node"
            if saved["hybrid"] > saved["replicate"] else "agrees",
        },
    ]  # fmt: skip
