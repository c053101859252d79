"""What starting and ending ranks leaves behind: nothing, however they or the program end."""

import os
import signal
import subprocess
import tempfile
import threading
import time

import psutil
import pytest
import torch.distributed as dist
from fault_notes import note
from programs import not_of_the_pools, run_script, started, total, until

import minidist as md
from minidist.comm import processes
from minidist.comm.launch import Ranks, launch

pytestmark = pytest.mark.timeout(60)


# ------------------------------------------------------------------------------ nothing left behind


def test_five_in_a_row_two_at_once_and_one_that_raises():
    """B85: no child process, no process group, no listening socket afterwards."""
    for _ in range(5):
        assert launch(total, 2)[0].tolist() == [3.0] * 3
    answers = {}
    threads = [
        threading.Thread(target=lambda n=n: answers.update({n: launch(total, n)})) for n in (2, 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers[2][0].tolist() == [3.0] * 3 and answers[3][0].tolist() == [6.0] * 3
    with pytest.raises(md.RankFailure):
        launch(lambda: 1 / dist.get_rank(), 2)
    assert not dist.is_initialized()
    left = not_of_the_pools()
    assert {p.pid for p in left} == {os.getpid(), processes._template.process.pid}
    assert not [c for p in left for c in p.net_connections("all") if c.status == "LISTEN"]


@pytest.mark.timeout(600)
def test_many_launches_leave_nothing():
    """MINIDIST_LAUNCHES=1000 for more."""
    wanted, done = int(os.environ.get("MINIDIST_LAUNCHES", "50")), 0
    launch(total, 2)
    fds = len(os.listdir("/proc/self/fd"))
    template = f"/proc/{processes._template.process.pid}/fd"
    template_fds = len(os.listdir(template))
    files = set(os.listdir(tempfile.gettempdir()))
    shared = set(os.listdir("/dev/shm"))
    threads = threading.active_count()
    begun = time.monotonic()
    while done < wanted and time.monotonic() < begun + 500:  # a machine with much else to do
        launch(total, 2)
        done += 1
    note((time.monotonic() - begun) / done, f"{done} launches, seconds of one")
    assert len(os.listdir("/proc/self/fd")) <= fds
    # The template may not have heard yet that the last ranks have gone.
    assert until(lambda: len(os.listdir(template)) <= template_fds, 2), os.listdir(template)
    assert len(not_of_the_pools()) == 2  # this program and the template
    assert not {f for f in set(os.listdir(tempfile.gettempdir())) - files if "minidist" in f}
    assert set(os.listdir("/dev/shm")) <= shared
    assert threading.active_count() == threads


def test_the_template_has_one_thread():
    launch(total, 2)
    assert psutil.Process(processes._template.process.pid).num_threads() == 1


def test_an_idle_template_is_replaced_when_it_has_gone():
    launch(total, 2)
    processes.shutdown()
    assert launch(total, 2)[1].tolist() == [3.0] * 3
    processes._template.process.kill()
    assert launch(total, 2)[1].tolist() == [3.0] * 3


def test_a_script_without_main_guard_runs_once(tmp_path):
    code, out, err = run_script(
        tmp_path,
        """
        print("top of the script")
        import minidist as md, torch.distributed as dist
        class Answer:
            pass
        def work():
            a = Answer(); a.rank = dist.get_rank()
            return a
        answers = md.launch(work, 2)
        print([a.rank for a in answers], all(isinstance(a, Answer) for a in answers))
        """,
    )
    assert (code, out, err) == (0, "top of the script\n[0, 1] True\n", "")


def test_spawned_ranks_do_the_same(tmp_path):
    """The way of macOS and Windows, here on Linux."""
    code, out, err = run_script(
        tmp_path,
        """
        print("top of the script")
        import minidist as md, torch, torch.distributed as dist
        from minidist.comm.launch import Ranks
        def work():
            x = torch.ones(1); dist.all_reduce(x)
            print("on rank", dist.get_rank())
            return int(x)
        def fail():
            if dist.get_rank() == 1:
                raise ValueError("a mistake")
            dist.barrier()
        with Ranks(2) as ranks:
            print(ranks.run(work))
            try:
                ranks.run(fail)
            except md.RankFailure as failure:
                print(failure)
        """,
        MINIDIST_START="spawn",
    )
    assert code == 0, err
    assert out.count("top of the script") == 1
    assert "[rank 0] on rank 0\n" in out and "[rank 1] on rank 1\n" in out
    assert "[2, 2]" in out
    assert "rank 1 raised ValueError: a mistake" in out
    assert "rank 0: waiting in barrier at" in out


STUCK = """
    import ctypes, os, minidist as md, torch, torch.distributed as dist
    from minidist.comm import processes
    def work():
        if {fork!r} and dist.get_rank() == 1:
            os.system("sleep 1000 &")
        print("pid", os.getpid())
        if dist.get_rank() == 1:
            {stuck}
        dist.all_reduce(torch.ones(1))
    md.launch(lambda: None, 3)
    if {fork!r} and os.fork() == 0:  # a fork that outlives the program, and holds its sockets
        os.write(1, b"fork %d\\n" % os.getpid())
        import time; time.sleep(40); os._exit(0)
    os.write(1, b"pid %d\\n" % processes._template.process.pid)
    md.launch(work, 3, timeout=None)
    """


@pytest.mark.parametrize(
    ("stuck", "fork"),
    [
        ("import time; time.sleep(1000)", False),
        ("ctypes.PyDLL(None).sleep(1000)", False),  # holds the interpreter: no thread can act
        ("os.kill(os.getpid(), 19)", True),
    ],
)
def test_killing_the_program_leaves_nothing(tmp_path, stuck, fork):
    pids, forked = [], None
    with started(tmp_path, STUCK.format(stuck=stuck, fork=fork)) as program:
        while len(pids) < 4 or (fork and forked is None):
            kind, pid = program.stdout.readline().split()[-2:]
            if kind == "fork":
                forked = int(pid)
            else:
                pids.append(int(pid))
        time.sleep(0.3)
        ours = [psutil.Process(pid) for pid in pids]
        ours += [child for p in ours for child in p.children(recursive=True)]
        program.send_signal(signal.SIGKILL)
        program.wait()
        killed = time.monotonic()
        gone = until(lambda: not any(p.is_running() for p in ours), 10)
        note(time.monotonic() - killed, "nothing, nobody is left to say it")
        if forked:
            os.kill(forked, signal.SIGKILL)
    assert gone, ours


def test_what_a_rank_has_started_ends_with_it():
    def work():
        return subprocess.Popen(["sleep", "1000"]).pid

    pids = launch(work, 2)
    assert until(lambda: not any(psutil.pid_exists(pid) for pid in pids), 5)


def test_a_normal_end_with_ranks_still_standing_leaves_nothing(tmp_path):
    code, out, err = run_script(
        tmp_path,
        """
        from minidist.comm.launch import Ranks
        from minidist.comm import processes
        ranks = Ranks(2)
        print(*ranks.pids, processes._template.process.pid)
        """,
    )
    assert (code, err) == (0, "")
    assert until(lambda: not any(psutil.pid_exists(int(pid)) for pid in out.split()), 5)


def test_control_c_ends_the_ranks_and_says_where_they_were(tmp_path):
    work = """
        import os, threading, time, minidist as md
        def work():
            threading.Timer(0.3, print, ("pid", os.getpid())).start()  # when it sleeps
            time.sleep(1000)
        md.launch(work, 2)
        """
    with started(tmp_path, work) as program:
        pids = [int(program.stdout.readline().split()[-1]) for _ in range(2)]
        program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=20)
    assert program.returncode not in (0, None)
    assert "RanksInterrupted: interrupted" in err
    for rank in range(2):
        assert f"rank {rank}: running work at" in err and "time.sleep(1000)" in err
    assert until(lambda: not any(psutil.pid_exists(pid) for pid in pids), 5)


def test_a_fork_of_the_program_does_not_end_its_ranks():
    with Ranks(2) as ranks:
        pid = os.fork()
        if pid == 0:
            ranks.kill()
            ranks.__del__()
            os._exit(0)
        os.waitpid(pid, 0)
        assert ranks.run(total)[0].tolist() == [3.0] * 3
