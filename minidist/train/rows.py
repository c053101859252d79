"""From the results of a run's ranks to one row: measured beside expected, and why they differ."""

from __future__ import annotations

from minidist.parallel.schedules import Action, Schedule
from minidist.train.config import Layout, TrainConfig
from minidist.train.expected import expected, place_of
from minidist.train.report import KINDS

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
        "bytes": {**kinds_of(measured), "peak": measured["peak_total"]},
        "bytes_formula": should["bytes"],
        "sent": sent_bytes(results[busiest]),
        "sent_formula": expected(config, layout, busiest)["sent"],
        "bubble": bubble_in_slots(results, layout),
        "bubble_formula": should["bubble"],
        "step_seconds": max((r["step_seconds"] for r in results), key=lambda t: t or 0),
        "fullest_rank": fullest,
        "busiest_rank": busiest,
        "per_rank": [
            {"bytes": {**kinds_of(r), "peak": r["peak_total"]}, "sent": sent_bytes(r)}
            for r in results
        ],
    }
    row["notes"] = notes(row, config, layout)
    return row


def kinds_of(result: dict) -> dict[str, int]:
    """Model states as they stand between backward and step, the others at their highest."""
    held, peak = result["held"], result["peak"]
    return {kind: (held if kind in STANDING else peak)[kind] for kind in KINDS}


STANDING = ("parameters", "gradients", "optimizer")


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


def notes(row: dict, config: TrainConfig, layout: Layout) -> dict[str, str]:
    """Why a cell is more than 1 % off its formula, for each that is."""
    return {}
