"""From the results of a run's ranks to one row: measured beside expected, and why they differ."""

from __future__ import annotations

from minidist.parallel.flat import SHARD_ALIGN
from minidist.parallel.schedules import Action, Schedule
from minidist.train.config import Layout, TrainConfig
from minidist.train.expected import buckets, expected, place_of

# The model states of the papers: what stands between backward and step.
STANDING = ("parameters", "gradients", "optimizer")
UNEXPLAINED = "not explained: please report this"
TOLERANCE = 0.01  # what may differ from its formula without a reason


def make_row(
    config: TrainConfig, results: list[dict], reference: list[float] | None = None
) -> dict:
    """One row of ``compare`` and ``train`` (keys in DESIGN section 3).

    Memory is that of the fullest rank and traffic that of the busiest one, each beside the formula
    for the very same rank; every rank's own numbers are under ``per_rank``. ``reference`` are the
    losses of the single process.
    """
    layout = Layout(**results[0]["layout"])
    fullest = max(range(len(results)), key=lambda rank: results[rank]["peak_total"])
    busiest = max(range(len(results)), key=lambda rank: sent_bytes(results[rank]))
    measured = results[fullest]
    should = expected(config, layout, fullest)
    row = {
        "strategy": config.strategy,
        "ranks": len(results),
        "dtype": config.dtype,
        "layout": layout._asdict(),
        "loss": results[0]["losses"],
        "max_rel_loss_diff": largest_difference(results[0]["losses"], reference),
        "bytes": kinds_of(measured),
        "bytes_formula": should["bytes"],
        "sent": sent_bytes(results[busiest]),
        "sent_formula": expected(config, layout, busiest)["sent"],
        "bubble": bubble_in_slots(results, layout),
        "bubble_formula": should["bubble"],
        "step_seconds": max((r["step_seconds"] for r in results), key=lambda t: t or 0),
        "fullest_rank": fullest,
        "busiest_rank": busiest,
        "at_peak": measured["at_peak"],
        "per_rank": [{"bytes": kinds_of(r), "sent": sent_bytes(r)} for r in results],
    }
    row["notes"] = notes(row, measured, config)
    return row


# By how much each stage divides 16 bytes per parameter (ZeRO section 5), and the limit for large N.
FACTORS = {
    "ddp": ("1", "1x"),
    "zero1": ("16 / (4 + 12/N)", "4x"),
    "zero2": ("16 / (2 + 14/N)", "8x"),
    "fsdp": ("N", "N x"),
}


def make_mixed_row(config: TrainConfig, results: list[dict], whole: float | None) -> dict:
    """A row of the mixed-precision block: bytes per parameter that stand between backward and step,
    and by how much that is less than ``whole``, what DDP was measured to hold per parameter."""
    held = results[0]["held"]
    per = {kind: held[kind] / config.model.parameters for kind in STANDING}
    per["together"] = sum(per.values())
    states = expected(config, Layout(**results[0]["layout"]), 0)["bytes"]
    should = sum(states[kind] for kind in STANDING) / config.model.parameters
    text, limit = FACTORS[config.strategy]
    return {
        "strategy": config.strategy,
        "ranks": len(results),
        "dtype": f"{config.dtype}, float32 masters",
        "loss": results[0]["losses"],
        "bytes": {kind: held[kind] for kind in STANDING},
        "bytes_formula": {kind: states[kind] for kind in STANDING},
        "bytes_per_parameter": per,
        "factor": (whole or per["together"]) / per["together"],
        "factor_formula": 16 / should,
        "factor_text": text,
        "factor_limit": limit,
    }


def kinds_of(result: dict) -> dict[str, int]:
    """Bytes of one rank by kind.

    parameters, gradients, optimizer: what stands between backward and step, the model states that
    the papers count. activations: at their highest. gathered: parameters that are whole only while
    they are used, at most. buffers: what only communication needs, at most: receive buffers, and
    gradients on their way to be reduced.
    """
    held, peak = result["held"], result["peak"]
    return {
        "parameters": held["parameters"],
        "gathered": peak["parameters"] - held["parameters"],
        "gradients": held["gradients"],
        "optimizer": held["optimizer"],
        "activations": peak["activations"],
        "buffers": peak["buffers"] + peak["gradients"] - held["gradients"],
        "peak": result["peak_total"],
    }


def sent_bytes(result: dict) -> int:
    return result["sent"]["total"]["sent_bytes"]


def largest_difference(losses: list[float], reference: list[float] | None) -> float | None:
    """Largest relative difference from the single process over all steps."""
    if reference is None:
        return None
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


def bubble_in_slots(results: list[dict], layout: Layout) -> float | None:
    """The bubble of what the ranks really ran, in slots: a forward takes one, a backward two.

    The executed order of every rank is played on the schedule's clock. Seconds would not show it
    here: with more ranks than cores an idle stage's time is another stage's computing time.
    """
    if layout.pp == 1:
        return None
    pipeline = [r for r in range(len(results)) if place_of(r, layout)._replace(pp=0) == (0, 0, 0)]
    actions = [[_action(name) for name in results[rank]["actions"]] for rank in pipeline]
    run = Schedule("measured", layout.pp, layout.microbatches, layout.chunks, actions)
    return run.simulate(f=1, b=2).bubble


def _action(name: str) -> Action:
    microbatch, _, chunk = name[1:].partition(".")
    return Action(name[0], int(microbatch), int(chunk or 0))


def notes(row: dict, result: dict, config: TrainConfig) -> dict[str, str]:
    """Why a cell is more than 1 % off its formula, for each that is; the reason is looked for in
    the measurement and the sizes, and a difference that none explains says so."""
    found = {}
    layout = Layout(**row["layout"])
    cells = {**row["bytes"], "sent": row["sent"]}
    formulas = {**row["bytes_formula"], "sent": row["sent_formula"]}
    for cell, formula in formulas.items():
        difference = cells[cell] - formula
        if abs(difference) <= TOLERANCE * max(abs(formula), 1):
            continue
        if cell == "peak":
            found[cell] = _why_peak(row["bytes"], result["at_peak"])
        else:
            found[cell] = _why(cell, difference, config, layout)
    return found


def _why_peak(kinds: dict[str, int], at_peak: dict[str, int]) -> str:
    """The formula adds up every kind's highest value; the fullest moment has them in part."""
    standing = kinds["gradients"] + kinds["buffers"]
    moving = at_peak["gradients"] + at_peak["buffers"]
    parameters = kinds["parameters"] + kinds["gathered"]
    reasons = []
    if moving < (1 - TOLERANCE) * standing:
        reasons.append("not all gradients exist at the fullest moment")
    if at_peak["activations"] < (1 - TOLERANCE) * kinds["activations"]:
        reasons.append("some activations are released by then")
    if at_peak["parameters"] < (1 - TOLERANCE) * parameters:
        reasons.append("not all units are gathered by then")
    if at_peak["temporary"] > TOLERANCE * kinds["peak"]:
        reasons.append("results under way are there for a moment")
    return "; ".join(reasons) or UNEXPLAINED


def _why(cell: str, difference: float, config: TrainConfig, layout: Layout) -> str:
    size = 4 if config.masters else config.torch_dtype().itemsize
    tensors = 4 + 12 * config.model.layers + 3
    padding = tensors * layout.dp * SHARD_ALIGN * size
    if layout.dp > 1 and cell != "activations" and 0 < difference <= 2 * padding:
        return "flat buffers are padded to equal, aligned shards"
    if cell == "buffers" and layout.dp_kind == "zero2":
        sizes = [bucket * config.torch_dtype().itemsize for bucket in buckets(config)]
        if any(abs(difference - bucket) <= TOLERANCE * bucket for bucket in sizes):
            return "a third bucket is open: gradients come out of order where two buckets meet"
    if cell == "optimizer" and 0 < difference <= 4 * tensors:
        return "Adam counts its steps in one number per tensor"
    if cell == "sent" and 0 < difference <= 1024:
        return "flags and shapes that ranks agree on, a few bytes"
    return UNEXPLAINED
