"""What goes wrong on several ranks: found in how long, said how, and nothing left behind.

Every case runs under its own limit, which is far above what it needs: a hang is a failure.
"""

import os
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from fault_notes import BUSY, fails, note

import minidist as md
from minidist.comm import collectives as coll
from minidist.comm import processes
from minidist.comm.launch import Ranks

pytestmark = pytest.mark.timeout(60)


def line_of(fn, text):
    """file:line of the line of `fn` that contains `text`."""
    import inspect

    lines, first = inspect.getsourcelines(fn)
    (number,) = [i for i, line in enumerate(lines) if text in line]
    return f"{__file__}:{first + number}"


# ---------------------------------------------------------------------- one rank raises, ends, dies


def test_a_rank_raises_while_the_others_wait():
    def work():
        if dist.get_rank() == 1:
            raise ValueError("a mistake")
        dist.all_reduce(torch.ones(10))

    error = fails(work, within=1)
    assert error.rank == 1
    assert 'raise ValueError("a mistake")' in error.traceback
    assert error.traceback.endswith("ValueError: a mistake")
    assert error.states[1] == "raised ValueError: a mistake"
    for rank in (0, 2):
        expected = f"waiting in all_reduce at {line_of(work, 'dist.all_reduce')}: dist.all_reduce"
        assert error.states[rank].startswith(expected)
    told = str(error).splitlines()
    assert told[0] == "rank 1 raised ValueError: a mistake"
    assert "Traceback" in told[1] and line_of(work, "raise").split(":")[0] in told[2]
    assert [line[:6] for line in told[-2:]] == ["rank 0", "rank 2"]
    assert "worker.py" not in str(error), "our own frames say nothing to the user"


def test_all_ranks_raise_the_same():
    def work():
        dist.barrier()
        raise KeyError("missing")

    error = fails(work, within=1)
    assert error.rank == 0
    assert str(error).splitlines()[-2:] == ["rank 1: same error", "rank 2: same error"]


def test_the_cause_is_told_even_when_its_echo_arrives_first():
    def work():
        if dist.get_rank() == 1:
            dist.destroy_process_group()  # the others lose their connection now
            time.sleep(0.2)
            raise ValueError("the cause")
        dist.all_reduce(torch.ones(10))

    error = fails(work, within=2)
    assert error.rank == 1 and "the cause" in str(error).splitlines()[0]
    assert error.states[0].startswith("lost the connection to a rank, waiting in all_reduce at")


def test_causes_of_an_exception_are_kept():
    def work():
        try:
            torch.ones(2) @ torch.ones(3)
        except RuntimeError as error:
            raise ValueError("wrong layer") from error

    error = fails(work, ranks=1, within=1)
    assert "direct cause" in error.traceback and "size" in error.traceback
    assert str(error).index("RuntimeError") < str(error).index("Traceback", 200)


def test_a_network_error_of_the_user_is_no_echo():
    def work():
        if dist.get_rank() == 1:
            raise ConnectionRefusedError(111, "Connection refused")
        dist.barrier()

    error = fails(work, ranks=2, within=1)
    assert error.states[1] == "raised ConnectionRefusedError: [Errno 111] Connection refused"


def test_endless_recursion_is_told_shortly():
    def work():
        work()

    error = fails(work, ranks=1, within=2)
    assert "RecursionError" in str(error) and "more calls" in str(error)
    assert len(str(error).splitlines()) < 100


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("sys.exit(3)", "raised SystemExit: 3"),
        ("exec('raise KeyboardInterrupt')", "raised KeyboardInterrupt"),
        ("os._exit(4)", "ended its process .* with exit code 4"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL from outside"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "was killed by SIGTERM"),
        ("os.abort()", "was killed by SIGABRT"),
    ],
)
def test_a_rank_ends(how, said):
    def work():
        if dist.get_rank() == 1:
            time.sleep(0.2)
            eval(how, {"sys": sys, "os": os, "signal": signal})
        dist.all_reduce(torch.ones(10))

    error = fails(work, within=1)
    assert error.rank == 1
    import re

    assert re.search(said, error.states[1]) and re.search(f"rank 1 {said}", str(error))
    for rank in (0, 2):
        assert "waiting in all_reduce at" in error.states[rank]


def test_a_rank_is_killed_from_outside_within_five_seconds():
    def work():
        while True:
            dist.all_reduce(torch.ones(10))

    with Ranks(3, timeout=30) as group:
        pid = group.pids[2]
        threading.Timer(1.5, os.kill, (pid, signal.SIGKILL)).start()
        begun = time.monotonic()
        with pytest.raises(md.RankFailure) as caught:
            group.run(work)
        assert time.monotonic() - begun < 1.5 + 5
    error = caught.value
    note(time.monotonic() - begun - 1.5, str(error))
    assert error.rank == 2 and f"SIGKILL from outside (process {pid}" in error.states[2]
    # What it was doing, from the last time it was asked.
    assert "last seen" in error.states[2] and line_of(work, "dist.all_reduce") in error.states[2]


def test_a_crash_in_cpp_is_told_with_its_line_and_last_words(capfd):
    def work():
        if dist.get_rank() == 1:
            import ctypes

            os.write(2, b"some last words\n")
            ctypes.string_at(0)
        dist.barrier()

    error = fails(work, ranks=2, within=1)
    assert "rank 1 was killed by SIGSEGV" in str(error)
    assert line_of(work, "ctypes.string_at").replace(":", '", line ') in error.traceback
    assert error.traceback.endswith("some last words")


def test_a_rank_fails_while_another_has_finished_and_another_computes():
    def work():
        if dist.get_rank() == 0:
            return
        if dist.get_rank() == 1:
            time.sleep(0.1)
            raise ValueError("a mistake")
        while True:
            pass

    error = fails(work, within=1)
    assert error.states[0] == "finished" and error.states[2].startswith("running work at")


def test_failure_in_the_middle_of_a_step(run_ranks):
    def step(where):
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def broken(*_):
            if dist.get_rank() == 1:
                raise ArithmeticError(f"in {where}")

        if where == "forward":
            model.register_forward_hook(broken)
        elif where == "backward":
            model.weight.register_hook(broken)
        else:
            optimizer.register_step_pre_hook(broken)
        model(torch.ones(2, 4)).sum().backward()
        for p in model.parameters():
            coll.all_reduce(p.grad, by="step")
        optimizer.step()
        dist.barrier()

    for where in ("forward", "backward", "step"):
        with pytest.raises(md.RankFailure, match=f"rank 1 raised ArithmeticError: in {where}"):
            run_ranks(step, 2, where)
    assert run_ranks(dist.get_rank, 2) == [0, 1], "the pool starts again after a failure"


# ---------------------------------------------------------------------------- too late, or for ever


def test_a_stopped_rank_is_found_without_a_limit():
    def work():
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(10))

    error = fails(work, within=3.5)
    assert str(error).startswith("stuck: rank 1 is stopped, nobody else can go on")
    assert error.rank == 1 and "is stopped (process" in error.states[1]
    assert error.states[0].startswith("waiting in all_reduce at")


def test_a_stopped_rank_that_nobody_waits_for_may_go_on():
    def work():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            end = time.monotonic() + 4
            while time.monotonic() < end:  # at work
                pass
            os.kill(other, signal.SIGCONT)
        dist.barrier()

    with Ranks(2) as group:
        other = group.pids[1]
        group.run(work)


def test_a_rank_that_was_stopped_between_two_calls(monkeypatch):
    monkeypatch.setattr(processes, "_STALLED", 1)
    with Ranks(2) as group:
        group.run(dist.barrier)
        os.kill(group.pids[1], signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(md.RankFailure) as caught:
            # Too large for the socket's buffer: sending must not wait for ever either.
            group.run(lambda x: dist.barrier(), torch.ones(10_000_000), timeout=1)
        assert time.monotonic() - begun < 4 + BUSY
        assert caught.value.rank == 1 and "is stopped" in caught.value.states[1]


def test_a_rank_that_holds_the_interpreter():
    def work():
        if dist.get_rank() == 1:
            import ctypes

            ctypes.PyDLL(None).sleep(1000)
        dist.barrier()

    error = fails(work, ranks=2, timeout=1, within=2)
    assert error.rank == 1 and "does not answer" in error.states[1]


def test_a_rank_that_computes_for_ever():
    def work():
        while dist.get_rank() == 1:
            pass
        dist.barrier()

    error = fails(work, timeout=1.5, within=1.5)
    assert error.rank == 1 and error.states[1].startswith(f"running work at {__file__}")
    assert "in work" in error.traceback


def test_one_rank_skips_a_collective():
    """Found long before the limit, because everybody waits and nobody can come."""

    def work():
        coll.all_reduce(torch.ones(4), by="gradient")
        if dist.get_rank() != 1:
            coll.all_reduce(torch.ones(8), by="loss")

    error = fails(work, within=3.5)
    told = str(error)
    assert told.startswith("deadlock")
    assert error.rank == 1 and error.states[1] == "finished"
    for rank in (0, 2):
        assert f"waiting in all_reduce at {line_of(work, 'ones(8)')}" in error.states[rank]
        assert "[all_reduce of 8 float32, loss, number 1 in group 0, for " in error.states[rank]
    assert (
        "First difference, collective 1 of group 0: ranks 0, 2: all_reduce of 8 float32 at "
        f"{line_of(work, 'ones(8)')}; rank 1: did not get there" in told
    )


def test_collectives_in_another_order():
    def work():
        x = torch.ones(5)
        if dist.get_rank() == 0:
            coll.all_reduce(x)
        coll.broadcast(x, src=1)
        if dist.get_rank() != 0:
            coll.all_reduce(x)
        coll.barrier()

    error = fails(work, within=5)
    assert "First difference, collective 0 of group 0" in str(error) or "SIGABRT" in str(error)


def test_two_ranks_receive_from_each_other():
    def work():
        rank = dist.get_rank()
        if rank < 2:
            coll.recv(torch.ones(3), 1 - rank)

    error = fails(work, within=3.5)
    assert str(error).startswith("deadlock")
    assert error.states[0].startswith("waiting in recv at") and "with rank 1" in error.states[0]
    assert error.states[2] == "finished"


def test_waiting_on_a_work_handle_of_torch():
    def work():
        request = dist.irecv(torch.ones(3), (dist.get_rank() + 1) % 2)
        request.wait()

    error = fails(work, ranks=2, within=3.5)
    assert str(error).startswith("deadlock") and error.states[0].startswith("waiting at")


def test_a_slow_rank_is_not_a_deadlock():
    def asleep():
        if dist.get_rank() == 1:
            time.sleep(3)
        dist.barrier()

    def busy_in_a_thread():
        """Rank 0 receives what a second thread of rank 1 sends later, while rank 1 waits too."""
        x = torch.ones(2)
        if dist.get_rank() == 0:
            dist.recv(x, 1)
            dist.send(x, 1)
        else:

            def later():
                time.sleep(3)
                dist.send(x, 0)

            thread = threading.Thread(target=later)
            thread.start()
            dist.recv(x, 0)
            thread.join()

    with Ranks(2) as group:
        group.run(asleep)
        group.run(busy_in_a_thread)


# -------------------------------------------------------------------------------------- mismatches


def different_shapes():
    dist.all_reduce(torch.ones(10 + 1000 * dist.get_rank()))


def different_types():
    dist.all_reduce(torch.ones(10, dtype=(torch.float32, torch.float64)[dist.get_rank()]))


def different_operations():
    x = torch.ones(10)
    dist.all_reduce(x) if dist.get_rank() == 0 else dist.broadcast(x, 1)


@pytest.mark.parametrize("work", [different_shapes, different_types, different_operations])
def test_mismatch_with_checks(work):
    """debug=True: an error on every rank at once, in a few words."""
    error = fails(work, ranks=2, standing=Ranks(2, debug=True), within=1)
    assert error.rank == 0
    assert "the ranks call different collectives: rank 0 calls ALLREDUCE [10] Float" in str(error)
    assert line_of(work, "dist.all_reduce").replace(":", '", line ') in str(error)
    assert str(error).endswith("rank 1: same error")
    assert "CollectiveFingerPrint" in error.traceback, "the whole of torch's words stays available"


@pytest.mark.parametrize("work", [different_shapes, different_types])
def test_mismatch_without_checks_ends_the_process(work):
    """gloo aborts: no Python exception, but still its words and the line."""
    error = fails(work, ranks=2, within=1)
    assert "was killed by SIGABRT" in str(error)
    assert "Received data size doesn't match expected size" in error.traceback
    assert line_of(work, "dist.all_reduce").replace(":", '", line ') in error.traceback


# --------------------------------------------------------------------------------- what is returned


def test_a_result_that_cannot_be_sent():
    error = fails(threading.Lock, ranks=2, within=1)
    assert "the result, a lock, cannot be sent back" in str(error)


def test_a_result_that_cannot_be_made_here_leaves_the_ranks():
    class Odd:
        def __reduce__(self):
            return int, ("not a number",)

    with Ranks(2) as group:
        with pytest.raises(ValueError, match="not a number"):
            group.run(Odd)
        assert group.run(dist.get_rank) == [0, 1]


def test_failures_survive_pickling():
    import pickle

    error = pickle.loads(pickle.dumps(md.RankFailure("story", 1, "stack", {0: "finished"})))
    assert (str(error), error.rank, error.traceback) == ("story", 1, "stack")


def test_not_enough_memory_on_one_rank():
    def work():
        if dist.get_rank() == 1:
            import resource

            resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
            torch.ones(1 << 30)
        dist.barrier()

    error = fails(work, ranks=2, within=2)
    assert error.rank == 1 and "alloc" in error.states[1]
