"""Schedules as data: published properties, order, deadlock, in-flight bounds. No processes."""

import itertools

import pytest

from minidist.parallel.messages import Receive, Send, programs, rendezvous
from minidist.parallel.schedules import NAMES, Action, Schedule, ScheduleError, schedule

CHUNKS = {"naive": (1, 2), "gpipe": (1, 2, 3), "interleaved": (1, 2, 3), "zb-v": (2,)}


def every_schedule(stages=range(1, 9), microbatches=range(1, 17), names=NAMES):
    for name, p, m in itertools.product(names, stages, microbatches):
        for v in CHUNKS.get(name, (1,)):
            if name != "interleaved" or m % p == 0:
                yield schedule(name, p, m, v)


# --- B79 and the whole kind: complete, in order, no deadlock ------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_size_is_complete_ordered_and_free_of_deadlock(name):
    for s in every_schedule(range(1, 7), (1, 2, 3, 4, 5, 6, 8, 12), [name]):
        s.validate()


def test_large_sizes():
    for name, p, m, v in (("1f1b", 8, 16, 1), ("interleaved", 8, 16, 3), ("zb-v", 8, 16, 2)):
        schedule(name, p, m, v).validate()


@pytest.mark.parametrize("buffers", [0, 1, 2, 7])
def test_no_deadlock_with_finite_buffers(buffers):
    for s in every_schedule((2, 3, 4), (1, 3, 4, 8)):
        for ahead in (0, 1, 3):
            plan = programs(s, ahead)
            rendezvous(s, plan, buffers=buffers, ordered=ahead == 0, blocking_receives=ahead == 0)


def test_backward_follows_forward_and_the_next_stages_backward():
    """The order seen on the clock, told apart from the code that made it."""
    for s in every_schedule((1, 2, 3, 4), (1, 2, 4, 6)):
        times = {}
        for rank, slots in enumerate(s.simulate(f=3, b=5, w=2, comm=1).slots):
            for (kind, microbatch, chunk), start, end in slots:
                times[kind, microbatch, s.stage(rank, chunk)] = start, end, rank
        last = s.virtual_stages - 1
        for (kind, microbatch, stage), (start, _, rank) in times.items():
            before = []
            if kind == "F" and stage:
                before.append(("F", microbatch, stage - 1))
            if kind in "BI":
                before.append(("F", microbatch, stage))
                before += [(kind, microbatch, stage + 1)] if stage < last else []
            if kind == "W":
                before.append(("I", microbatch, stage))
            for other in before:
                delay = 1 if times[other][2] != rank else 0
                assert times[other][1] + delay <= start


def test_only_the_forward_for_evaluation():
    for s in every_schedule((1, 3, 4), (1, 4, 12)):
        plan = programs(s, ahead=3, kinds="F")
        rendezvous(s, plan, ordered=False)
        actions = [step for program in plan for step in program if isinstance(step, Action)]
        assert len(actions) == s.virtual_stages * s.microbatches
        assert {action.kind for action in actions} == {"F"}


# --- published properties ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "v", "bubble", "least"),
    [
        ("naive", 1, lambda p, m, v: p - 1, lambda p: 1),
        ("gpipe", 1, lambda p, m, v: (p - 1) / m, lambda p: 1),
        ("1f1b", 1, lambda p, m, v: (p - 1) / m, lambda p: 1),
        ("interleaved", 1, lambda p, m, v: (p - 1) / m, lambda p: p),
        ("interleaved", 2, lambda p, m, v: (p - 1) / (v * m), lambda p: p),
        ("interleaved", 3, lambda p, m, v: (p - 1) / (v * m), lambda p: p),
        ("zb-h1", 1, lambda p, m, v: (p - 1) / (3 * m), lambda p: p),
        ("zb-v", 2, lambda p, m, v: (p - 1) / (6 * m), lambda p: 2 * p - 1),
    ],
)
def test_bubble_of_ideal_time(name, v, bubble, least):
    for p in range(1, 9):
        for m in range(least(p), 25):
            if name == "interleaved" and m % p:
                continue
            # One unit per chunk and F, I, W: whole numbers, so that the comparison is exact.
            timeline = schedule(name, p, m, v).simulate(f=v, b=2 * v)
            assert timeline.ideal == 3 * v * m
            assert timeline.bubble == bubble(p, m, v)
            assert timeline.bubble_of_total == pytest.approx(
                bubble(p, m, v) / (1 + bubble(p, m, v))
            )


@pytest.mark.parametrize("b", [1, 2, 3.5])
def test_bubble_does_not_depend_on_the_length_of_backward(b):
    for p, m in ((2, 3), (4, 8), (8, 8)):
        for name in ("gpipe", "1f1b"):
            assert schedule(name, p, m).simulate(1, b).bubble == pytest.approx((p - 1) / m)


def test_megatrons_and_blooms_numbers():
    assert schedule("1f1b", 12, 128).simulate().bubble == 11 / 128  # BLOOM-176B: 8.6 %
    assert schedule("1f1b", 4, 32).simulate().bubble == 3 / 32  # GPT-NeoX-20B: 9.4 %
    assert schedule("1f1b", 8, 12).simulate().makespan == 3 * (12 + 7)
    # DualPipe's table: bubble per rank of 1F1B is (p-1)(F+B), of ZB1P (p-1)(F+B-2W).
    f, b, w = 2, 5, 2
    for name, seconds in (("1f1b", 7 * (f + b)), ("zb-h1", 7 * (f + b - 2 * w))):
        timeline = schedule(name, 8, 24).simulate(f, b, w)
        assert timeline.makespan - timeline.ideal == seconds


def test_in_flight():
    for p, m in itertools.product(range(1, 9), range(1, 17)):
        assert schedule("naive", p, m).in_flight == [1] * p
        assert schedule("gpipe", p, m).in_flight == [m] * p
        assert schedule("1f1b", p, m).in_flight == [min(m, p - r) for r in range(p)]
        assert schedule("zb-h1", p, m).in_flight == [min(m, p)] * p
        # ZB-H1 needs the memory of 1F1B: the fullest rank holds the same.
        assert max(schedule("zb-h1", p, m).in_flight) == max(schedule("1f1b", p, m).in_flight)
        assert max(schedule("zb-v", p, m).in_flight) <= 2 * min(m, p)  # chunks of half a stage
        if m % p == 0:
            for v in (2, 3):
                # Korthikanti et al. 2022, 4.2.3: 1 + (p-1)/(p v) times the p v chunks of 1F1B.
                held = schedule("interleaved", p, m, v).in_flight
                assert held[0] == min(m * v, p * v + p - 1)


def test_zero_bubble_v_never_waits():
    for p in range(1, 9):
        for m in (2 * p - 1, 2 * p, 3 * p + 1):
            timeline = schedule("zb-v", p, m).simulate(2, 4)
            assert timeline.stalls == [0] * p
            assert timeline.in_flight == [min(2 * p, 2 * m)] * p


def test_naive_uses_one_rank_at_a_time():
    slots = sorted(s[1:] for row in schedule("naive", 4, 3).simulate().slots for s in row)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(slots))


def test_uneven_stages_and_communication():
    timeline = schedule("gpipe", 2, 2).simulate(f=[1, 3], b=[2, 6], comm=0.5)
    # Rank 1: waits 1 + 0.5, then 2 x 3 forward, 2 x 6 backward; rank 0 ends 0.5 + 2 later.
    assert timeline.makespan == 1.5 + 6 + 12 + 2.5
    assert timeline.ideal == 18
    with pytest.raises(ValueError, match="2 virtual stages"):
        schedule("gpipe", 2, 2).simulate(f=[1, 2, 3])


def test_placement():
    s = schedule("interleaved", 4, 4, 2)
    assert [s.stage(1, c) for c in range(2)] == [1, 5]
    v = schedule("zb-v", 4, 4)
    assert [v.stage(0, c) for c in range(2)] == [0, 7]
    assert [v.stage(3, c) for c in range(2)] == [3, 4]
    for placed in (s, v):
        assert [placed.stage(*placed.owner(stage)) for stage in range(8)] == list(range(8))


# --- bad arguments ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1F1B", 2, 2), "unknown; choose from naive, gpipe, 1f1b"),
        (("1f1b", 0, 2), "stages must be a positive whole number, not 0"),
        (("1f1b", 2, 0), "microbatches must be a positive whole number, not 0"),
        (("gpipe", 2, 2.5), "microbatches must be a positive whole number, not 2.5"),
        (("gpipe", 2, 2, -1), "chunks must be a positive whole number, not -1"),
        (("gpipe", True, 2), "stages must be a positive whole number, not True"),
        (("interleaved", 4, 6, 2), "6 is not a multiple of 4"),
        (("interleaved", 4, 2, 2), "2 is not a multiple of 4"),
        (("1f1b", 4, 8, 2), "1f1b has one chunk per rank, not 2"),
        (("zb-h1", 4, 8, 2), "zb-h1 has one chunk per rank, not 2"),
        (("zb-v", 4, 8, 3), "exactly 2 chunks per rank .* not 3"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        schedule(*arguments)


# --- negative controls: planted bugs must be caught ---------------------------------------------


def changed(s, rank, edit):
    actions = [list(row) for row in s.actions]
    edit(actions[rank])
    return Schedule(s.name, s.stages, s.microbatches, s.chunks, actions, s.placement)


def test_off_by_one_microbatch_is_caught():
    def edit(row):
        i = row.index(Action("B", 1))
        row[i] = Action("B", 2)

    with pytest.raises(ScheduleError, match="rank 2: missing B1"):
        changed(schedule("1f1b", 4, 6), 2, edit).validate()


def test_one_warmup_forward_too_few_on_the_last_rank_is_caught():
    """The mistake of torch 2.13's own schedule visualizer: the last rank starts with a backward."""

    def edit(row):
        row.remove(Action("F", 0))
        row.insert(1, Action("F", 0))

    with pytest.raises(ScheduleError, match="rank 3: B0 comes before F0"):
        changed(schedule("1f1b", 4, 4), 3, edit).validate()


def test_circular_wait_is_caught():
    # Rank 0 wants the first gradient before it has sent the micro-batch that rank 1 starts with.
    actions = [
        [Action("F", 0), Action("B", 0), Action("F", 1), Action("B", 1)],
        [Action("F", 1), Action("F", 0), Action("B", 0), Action("B", 1)],
    ]
    with pytest.raises(
        ScheduleError, match="wait for each other: rank 0 before B0, rank 1 before F1"
    ):
        Schedule("mine", 2, 2, 1, actions).validate()


def test_too_much_in_flight_is_caught():
    s = schedule("gpipe", 2, 4)
    with pytest.raises(ScheduleError, match="rank 0: 4 in flight, bound is 2"):
        Schedule("1f1b", 2, 4, 1, s.actions).validate()


def test_swapped_sends_are_caught():
    s = schedule("gpipe", 2, 3)
    plan = programs(s)
    first, second = [i for i, step in enumerate(plan[0]) if isinstance(step, Send)][:2]
    plan[0][first], plan[0][second] = plan[0][second], plan[0][first]
    with pytest.raises(ScheduleError, match="deadlock.*activation 1 for stage 1"):
        rendezvous(s, plan)


def test_both_sending_first_is_caught():
    """1F1B with each receive after the send, the classic: it passes only if somebody buffers."""
    s = schedule("1f1b", 2, 4)
    plan = []
    for rank, program in enumerate(programs(s)):
        naive = []
        for step in program:
            if isinstance(step, Action):
                message = s.incoming(rank, step)
                naive += [Receive(message)] if message else []
            naive += [step] if not isinstance(step, Receive) else []
        plan.append(naive)
    with pytest.raises(
        ScheduleError, match="rank 0 is sending activation 1.*rank 1 is sending grad"
    ):
        rendezvous(s, plan, ordered=False)
    rendezvous(s, plan, buffers=4, ordered=False)


def test_lost_message_is_caught():
    s = schedule("gpipe", 2, 1)
    plan = programs(s)
    plan[1] = [step for step in plan[1] if not isinstance(step, Send)]
    with pytest.raises(ScheduleError, match="rank 0 waits before B0 for gradient 0 for stage 0"):
        rendezvous(s, plan)
