"""The pieces that decide and tell what went wrong, without processes where possible."""

import threading
import weakref

import pytest
import torch

import minidist as md
from minidist.comm import collectives as coll
from minidist.comm import failure, watchdog, worker
from minidist.comm.launch import RankFailure, Ranks, launch

pytestmark = pytest.mark.timeout(60)


def snap(*records, frames=(), group=("0", [0, 1])):
    rows = [
        {"seq": i, "op": op, "group": group[0], "group_size": 2, "numel": numel, "dtype": "float32",
         "by": "", "peer": None, "site": ["a.py", 10 + i, "f"], "age": 1.0, "done": True}
        for i, (op, numel) in enumerate(records)
    ]  # fmt: skip
    return {
        "frames": list(frames),
        "records": rows,
        "groups": {group[0]: group[1]},
        "cpu": 0.0,
        "threads": 0,
        "asleep": True,
    }


def test_first_difference():
    same = [("all_reduce", 8), ("barrier", 0)]
    assert watchdog.first_difference({0: snap(*same), 1: snap(*same)}) == ""
    told = watchdog.first_difference(
        {0: snap(*same), 1: snap(("all_reduce", 8), ("all_reduce", 4))}
    )
    assert told == (
        "First difference, collective 1 of group 0: rank 0: barrier at a.py:11; "
        "rank 1: all_reduce of 4 float32 at a.py:11"
    )
    assert "rank 1: did not get there" in watchdog.first_difference(
        {0: snap(*same), 1: snap(same[0])}
    )
    # A member that never came has no record of the group at all.
    nothing = {**snap(), "groups": {}}
    assert "collective 0 of group 0" in watchdog.first_difference({0: snap(*same), 1: nothing})
    # Messages are each rank's own affair.
    sent = snap(("all_reduce", 8))
    sent["records"] = [{**sent["records"][0], "op": "send", "peer": 1}, *sent["records"]]
    assert watchdog.first_difference({0: sent, 1: snap(("all_reduce", 8))}) == ""
    # all_to_all may have a size of its own on every rank.
    uneven = {0: snap(("all_to_all", 3)), 1: snap(("all_to_all", 5))}
    assert watchdog.first_difference(uneven) == ""


def test_an_interrupt_after_the_death_of_a_rank_tells_both():
    gone = failure.died(7, -9, [], "", None)
    told = failure.late(failure.INTERRUPTED, {1: gone}, {0: snap()}, {}, {}, {0}, 2)
    assert isinstance(told, KeyboardInterrupt) and not isinstance(told, Exception)
    assert told.states == {
        0: "finished",
        1: "was killed by SIGKILL from outside (process 7; was memory short?)",
    }


def test_a_deadlock_needs_all_ranks_to_stand_still():
    waits = [("x/distributed_c10d.py", 1, "barrier", "")]

    def looks(*rounds, waiting=frozenset({0, 1})):
        watch = watchdog.Watch()
        return [watch.look(snaps, set(waiting)) for snaps in rounds]

    still = {0: snap(frames=waits), 1: snap(frames=waits)}
    n = watchdog.ROUNDS
    assert looks(*[still] * (n + 1)) == [False] * n + [True]
    computing = {0: snap(frames=waits), 1: snap(frames=[("user.py", 3, "f", "")])}
    assert not any(looks(*[computing] * 9))
    assert not any(looks(*[{0: still[0]}] * 9)), "a rank that does not answer"
    threads = {0: still[0], 1: {**still[1], "threads": 1}}
    assert not any(looks(*[threads] * 9))
    starved = {0: still[0], 1: {**still[1], "asleep": False}}
    assert not any(looks(*[starved] * 9)), "a rank that waits for the processor"
    moving = [{0: still[0], 1: {**still[1], "cpu": 0.2 * i}} for i in range(9)]
    assert not any(looks(*moving)), "a rank that uses the processor"


def test_tracebacks_show_lines_of_functions_without_a_file():
    """A notebook cell: only this program knows its lines."""
    import linecache

    name = "<cell 7>"
    source = "def work():\n    raise ValueError('in a cell')\n"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    namespace = {}
    exec(compile(source, name, "exec"), namespace)
    with pytest.raises(md.RankFailure) as caught:
        launch(namespace["work"], 2)
    assert 'File "<cell 7>", line 2, in work\n    raise ValueError' in str(caught.value)


def test_library_files_are_told_apart():
    assert failure.is_library(torch.__file__) and failure.is_library(threading.__file__)
    assert failure.is_library(worker.__file__) and not failure.is_library(__file__)


def test_a_later_failure_does_not_tell_of_an_earlier_one():
    def different():
        coll.all_reduce(torch.ones(4 + coll.rank()))

    def divide():
        return 1 / 0

    with Ranks(2, timeout=20, debug=True, keep=True) as ranks:
        with pytest.raises(RankFailure, match="First difference"):
            ranks.run(different)
        with pytest.raises(RankFailure, match="ZeroDivisionError") as later:
            ranks.run(divide)
    assert "First difference" not in str(later.value)


def test_a_look_does_not_keep_alive_what_the_rank_lets_go(monkeypatch):
    """While it goes on, the main thread returns from a function that holds a large buffer."""
    looking, enough = threading.Event(), threading.Event()

    def slow():
        looking.set()
        return enough.wait(10)

    monkeypatch.setattr(watchdog, "_others_asleep", slow)
    thread = threading.Thread(target=watchdog.snapshot)

    def work():
        buffer = torch.ones(10)
        thread.start()
        assert looking.wait(10)
        return weakref.ref(buffer)

    buffer = work()
    try:
        assert buffer() is None
    finally:
        enough.set()
        thread.join()
