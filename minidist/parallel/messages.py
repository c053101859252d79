"""The messages a pipeline schedule needs: their order, and whether they can deadlock. Pure data.

A schedule (schedules.py) lists computations only. `programs` adds the sends and receives between
them, which is what the executor (pipeline.py) runs. `rendezvous` plays such programs under the
hardest rule a transport may have: a send completes only once its receive is posted. It catches two
neighbours that both send first and then wait for each other (NCCL has no tags, and no buffers to
rely on).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from minidist.parallel.schedules import Action, Schedule, ScheduleError, Transfer


class Send(NamedTuple):
    """Start sending; nobody waits for it, except for the memory."""

    transfer: Transfer


class Receive(NamedTuple):
    """Post the receive; the action that needs the value waits for it later."""

    transfer: Transfer


def programs(
    schedule: Schedule, ahead: int = 0, kinds: str = "FBIW"
) -> list[list[Action | Send | Receive]]:
    """[rank]: its actions with sends and receives in between.

    All messages have one global order: the time at which the simulator finishes their producer.
    With `ahead=0` every rank issues its sends and receives exactly in that order, so that the two
    ends of a pair agree on what comes next: right for transports that match in order (NCCL).
    With `ahead=k` a receive is posted up to k actions before it is needed, past other messages:
    data then flows while this rank computes; right for transports that match by tag (gloo).
    A send directly follows its producer. `kinds="F"` leaves only the forward, for evaluation.
    """
    timeline = schedule.simulate(f=schedule.chunks, b=2 * schedule.chunks)
    produced = sorted(
        (slot.end, message)
        for rank, slots in enumerate(timeline.slots)
        for slot in slots
        if slot.action.kind in kinds and (message := schedule.outgoing(rank, slot.action))
    )
    place = {message: i for i, (_, message) in enumerate(produced)}

    def program(rank):
        actions = [action for action in schedule.actions[rank] if action.kind in kinds]
        needs = [schedule.incoming(rank, action) for action in actions]
        in_order = sorted(filter(None, needs), key=place.get)
        posted = set()

        def post(messages):
            new = [message for message in messages if message and message not in posted]
            posted.update(new)
            return map(Receive, new)

        def up_to(message):
            return (
                in_order[: bisect_right(in_order, place[message], key=place.get)] if message else ()
            )

        for i, action in enumerate(actions):
            made = schedule.outgoing(rank, action)
            yield from post(up_to(needs[i]))
            yield from post(needs[i + 1 : i + 1 + ahead])
            yield action
            yield from post(up_to(made))
            if made:
                yield Send(made)

    return [list(program(rank)) for rank in range(schedule.stages)]


def rendezvous(
    schedule: Schedule,
    programs: list[list[Action | Send | Receive]],
    buffers: int = 0,
    ordered: bool = True,
    blocking_receives: bool = False,
) -> None:
    """Play `programs` with sends that complete only once their receive is posted.

    buffers: how many unfinished sends a rank may leave behind before it blocks (0: each one
    blocks; what passes with 0 passes with more). ordered: messages of a rank complete in the order
    in which it issued them, as in one queue without tags. blocking_receives: a receive waits at
    once, as it does while shapes are being learned. Raises ScheduleError that tells what each stuck
    rank waits for.
    """
    position = [0] * len(programs)
    unfinished: list[dict[Transfer, None]] = [{} for _ in programs]  # in the order of issue
    done: set[Transfer] = set()

    def settle(rank, newest):
        """Complete what `rank` made possible; in a queue one completion allows the next."""
        mine = unfinished[rank]
        message = next(iter(mine), None) if ordered else newest
        if message is None or message in done:
            return
        ends = unfinished[message.source], unfinished[message.target]
        if all((next(iter(end), None) == message) if ordered else message in end for end in ends):
            done.add(message)
            for end in ends:
                del end[message]
            if ordered:
                settle(message.source, None)
                settle(message.target, None)

    def waits_for(rank):
        sends = [message for message in unfinished[rank] if message.source == rank]
        if len(sends) > buffers:
            return f"rank {rank} is sending {sends[0]}"
        receives = [message for message in unfinished[rank] if message.target == rank]
        if receives and blocking_receives:
            return f"rank {rank} is receiving {receives[0]}"
        step = programs[rank][position[rank]] if position[rank] < len(programs[rank]) else None
        if isinstance(step, Action):
            message = schedule.incoming(rank, step)
            if message and message not in done:
                return f"rank {rank} waits before {step} for {message}"
        return None

    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(programs):
            while position[rank] < len(program) and not waits_for(rank):
                step = program[position[rank]]
                position[rank] += 1
                progress = True
                if not isinstance(step, Action):
                    unfinished[rank][step.transfer] = None
                    settle(rank, step.transfer)
    stuck = [reason for rank in range(len(programs)) if (reason := waits_for(rank))]
    lost = [f"{message} never meets its other end" for mine in unfinished for message in mine]
    if stuck or lost:
        raise ScheduleError(f"{schedule.name}: deadlock: " + "; ".join(stuck or lost))
