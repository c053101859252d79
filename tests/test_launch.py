"""Starting and ending ranks: results, output, and above all what is left behind (nothing)."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import minidist as md
from minidist.comm import processes, worker
from minidist.comm.launch import Ranks, launch

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[1]


def total(value=1.0):
    x = torch.full((3,), value * (dist.get_rank() + 1))
    dist.all_reduce(x)
    return x


def not_of_the_pools():
    """This program and its processes, without the ranks that `run_ranks` keeps for other tests."""
    pools = {pid for pool in sys.modules["conftest"]._pools.values() for pid in pool.pids}
    everyone = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return [p for p in everyone if p.pid not in pools]


def until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def start_script(tmp_path, code, **environment):
    """A program of its own, without any main guard."""
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(code), encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, "-u", str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_script(tmp_path, code, timeout=50, **environment):
    """Its exit code and output."""
    program = start_script(tmp_path, code, **environment)
    try:
        out, err = program.communicate(timeout=timeout)
    finally:
        program.kill()
    return program.returncode, out, err


# ------------------------------------------------------------------------------------ what it gives


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_results_come_in_rank_order(ranks):
    answers = launch(lambda: (dist.get_rank(), dist.get_world_size(), total()), ranks)
    assert [(r, n) for r, n, _ in answers] == [(r, ranks) for r in range(ranks)]
    assert all(torch.equal(x, torch.full((3,), ranks * (ranks + 1) / 2)) for _, _, x in answers)


def test_arguments_closures_and_lambdas():
    base = torch.arange(4.0)

    class Scale:
        def __init__(self, by):
            self.by = by

        def __call__(self, x):
            return x * self.by

    def work(scale, *, shift):
        return scale(base) + shift, scale

    for answer, scale in launch(work, 2, Scale(3), shift=1):
        assert torch.equal(answer, base * 3 + 1)
        assert isinstance(scale, Scale)
    assert launch(lambda a, b=2: a + b, 2, 40) == [42, 42]


def test_tensors_come_back_by_value_and_without_their_storage():
    def work():
        big = torch.zeros(1_000_000)
        weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        return {"view": big[10:12], "weight": weight, "t": torch.arange(6).reshape(2, 3).t()}

    packed = worker.dumps(torch.zeros(1_000_000)[10:12])
    assert len(packed) < 2000, "a view of two elements took its whole storage along"
    before = len(os.listdir("/proc/self/fd"))
    for answer in launch(work, 2):
        assert answer["view"].untyped_storage().nbytes() == 8
        assert isinstance(answer["weight"], torch.nn.Parameter) and answer["weight"].requires_grad
        assert answer["weight"].dtype == torch.bfloat16
        assert torch.equal(answer["t"], torch.arange(6).reshape(2, 3).t())
        answer["view"] += 1  # memory of its own
    assert len(os.listdir("/proc/self/fd")) <= before


def test_environment_working_directory_and_threads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("A_SETTING", "as it is now")
    monkeypatch.setenv("MASTER_PORT", "1")  # of another job

    def work():
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        return (
            os.getcwd(), os.environ["A_SETTING"], "MASTER_PORT" in os.environ,
            [os.environ[n] for n in names], torch.get_num_threads(), dist.get_backend(),
        )  # fmt: skip

    for rank, answer in enumerate(launch(work, 2)):
        numbers = [str(rank), str(rank), "2", "2"]
        assert answer == (str(tmp_path), "as it is now", False, numbers, 1, "gloo")


def test_numpy_draws_differ_between_launches():
    import numpy

    draws = [launch(lambda: numpy.random.rand(), 2) for _ in range(2)]
    assert len({x for pair in draws for x in pair}) == 4


def test_gloo_listens_on_loopback_only():
    def addresses():
        dist.barrier()
        found = psutil.Process().net_connections("inet")
        return [c.laddr.ip for c in found if c.status == "LISTEN"]

    for found in launch(addresses, 2):
        assert found and set(found) == {"127.0.0.1"}


def test_init_and_mesh_inside_launch():
    def work():
        with md.init() as context:
            mesh = md.build_mesh(dp=2, tp=2)
            x = torch.ones(1) * context.rank
            dist.all_reduce(x, group=mesh["tp"].get_group())
        return dist.is_initialized(), context.rank, str(context.device), int(x)

    answers = launch(work, 4)
    assert answers == [
        (True, 0, "cpu", 1),
        (True, 1, "cpu", 1),
        (True, 2, "cpu", 5),
        (True, 3, "cpu", 5),
    ]


def test_a_rank_may_launch_ranks():
    def work():
        return launch(total, 2)[0].tolist() if dist.get_rank() == 0 else None

    assert launch(work, 2, timeout=40) == [[3.0] * 3, None]


def test_data_loader_workers_on_a_rank():
    def work():
        data = torch.utils.data.TensorDataset(torch.arange(8.0))
        return sum(float(x.sum()) for (x,) in torch.utils.data.DataLoader(data, 2, num_workers=2))

    assert launch(work, 2) == [28.0, 28.0]
    assert until(lambda: len(not_of_the_pools()) == 2, 5)  # this program and the template


# ------------------------------------------------------------------------------------------- output


def test_output_is_marked_and_live(capfd):
    def work():
        print("to stdout")
        print("to stderr", file=sys.stderr)
        os.system("echo from a child process")
        print("no newline at the end", end="")

    launch(work, 2)
    out, err = capfd.readouterr()
    for rank in range(2):
        assert f"[rank {rank}] to stdout\n" in out
        assert f"[rank {rank}] from a child process\n" in out
        assert f"[rank {rank}] no newline at the end\n" in out
        assert f"[rank {rank}] to stderr\n" in err


def test_output_arrives_while_the_function_runs():
    heard = []

    def work():
        print("first")
        time.sleep(1.0)
        print("second")

    with Ranks(1, on_output=lambda *line: heard.append((*line, time.monotonic()))) as ranks:
        ranks.run(work)
    assert [line[:3] for line in heard] == [(0, "stdout", "first"), (0, "stdout", "second")]
    assert heard[1][3] - heard[0][3] > 0.8


def test_progress_bars_come_as_unfinished_lines():
    heard = []

    def work():
        for i in range(4):
            print(f"\r{i} of 3", end="", flush=True)
            time.sleep(0.3)
        print("\rdone   ")

    with Ranks(1) as ranks:
        ranks.run(work, on_output=lambda rank, stream, line: heard.append(line))
    assert heard[-1] == "done   "
    assert len(heard) >= 3 and all(h.endswith("of 3\r") for h in heard[:-1])


def test_much_output_and_large_results():
    lines = []

    def work():
        for i in range(100_000):
            print(i, "x" * 50)
        return torch.ones(5_000_000)

    with Ranks(2, on_output=lambda rank, _, line: lines.append((rank, line))) as ranks:
        a, b = ranks.run(work)
    assert a.sum() == b.sum() == 5_000_000
    for rank in range(2):
        mine = [line for r, line in lines if r == rank]
        assert mine == [f"{i} {'x' * 50}" for i in range(100_000)]


# ----------------------------------------------------------------------------------- standing ranks


def test_standing_ranks_keep_their_memory():
    def remember(value):
        worker.state["value"] = value + dist.get_rank()

    def recall():
        return worker.state["value"]

    with Ranks(2) as ranks:
        pids = ranks.pids
        ranks.run(remember, 10)
        assert ranks.run(recall) == [10, 11]
        assert ranks.pids == pids and ranks.alive
    assert not ranks.alive
    with pytest.raises(RuntimeError, match="have ended"):
        ranks.run(recall)


def test_where_from_another_thread():
    def work():
        if dist.get_rank() == 1:
            time.sleep(1.5)  # the other waits
        dist.barrier()

    with Ranks(2) as ranks:
        assert ranks.where() == {0: "finished", 1: "finished"}
        thread = threading.Thread(target=ranks.run, args=(work,))
        thread.start()
        time.sleep(0.5)
        where = ranks.where()
        thread.join()
    assert "waiting in barrier at" in where[0] and "dist.barrier()" in where[0]
    assert "running work at" in where[1] and "time.sleep" in where[1]


def test_a_call_that_cannot_be_sent_leaves_the_ranks_alone():
    with Ranks(2) as ranks:
        with pytest.raises(TypeError, match="cannot be sent to the ranks"):
            ranks.run(lambda lock: None, threading.Lock())
        assert ranks.run(lambda: 1) == [1, 1]


def test_keep_leaves_ranks_standing_after_an_error_all_came_back_from():
    def work(fail):
        worker.state["n"] = worker.state.get("n", 0) + 1
        if fail:
            raise ValueError("typing mistake")
        return worker.state["n"]

    with Ranks(2, keep=True) as ranks:
        assert ranks.run(work, False) == [1, 1]
        with pytest.raises(md.RankFailure):
            ranks.run(work, True)
        assert ranks.run(work, False) == [3, 3]


# -------------------------------------------------------------------------- what is said at once


@pytest.mark.parametrize(
    ("ranks", "error"),
    [(0, ValueError), (-2, ValueError), (1.5, TypeError), ("2", TypeError), (True, TypeError)],
)
def test_wrong_number_of_ranks(ranks, error):
    with pytest.raises(error, match="rank"):
        launch(total, ranks)


def test_wrong_function_and_timeout():
    with pytest.raises(TypeError, match="function"):
        launch("total", 2)
    for timeout in (0, -1):
        with pytest.raises(ValueError, match="timeout"):
            launch(total, 2, timeout=timeout)
    with pytest.raises(TypeError, match="timeout"):
        launch(total, 2, timeout="1")


def test_without_cloudpickle_importable_functions_work(tmp_path):
    (tmp_path / "helper.py").write_text("def double(x):\n    return 2 * x\n", encoding="utf-8")
    _, out, err = run_script(
        tmp_path,
        """
        import sys
        sys.modules["cloudpickle"] = None
        import helper, minidist as md
        print(md.launch(helper.double, 2, 21))
        try:
            md.launch(lambda: 1, 2)
        except TypeError as error:
            print(error)
        def mine():
            pass
        try:
            md.launch(mine, 2)
        except TypeError as error:
            print(error)
        """,
    )
    assert out.startswith("[42, 42]\n"), err
    assert out.count("cloudpickle") == 2


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


@pytest.mark.timeout(120)  # 8 s on a machine that has nothing else to do
def test_two_hundred_launches_leave_nothing():
    launch(total, 2)
    fds = len(os.listdir("/proc/self/fd"))
    template_fds = len(os.listdir(f"/proc/{processes._template.process.pid}/fd"))
    files = set(os.listdir(tempfile.gettempdir()))
    shared = set(os.listdir("/dev/shm"))
    threads = threading.active_count()
    end = time.monotonic() + 60
    for _ in range(200):
        launch(total, 2)
        if time.monotonic() > end:  # a machine with much else to do
            break
    assert len(os.listdir("/proc/self/fd")) <= fds
    assert len(os.listdir(f"/proc/{processes._template.process.pid}/fd")) <= template_fds
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
    if {fork!r} and os.fork() == 0:  # a fork that outlives the program
        import time; time.sleep(3); os._exit(0)
    md.launch(lambda: None, 3)
    print("pid", processes._template.process.pid)
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
    program = start_script(tmp_path, STUCK.format(stuck=stuck, fork=fork))
    pids = []
    while len(pids) < 4:
        pids.append(int(program.stdout.readline().split()[-1]))
    time.sleep(0.3)
    ours = [psutil.Process(pid) for pid in pids]
    ours += [child for p in ours for child in p.children(recursive=True)]
    program.send_signal(signal.SIGKILL)
    program.wait()
    assert until(lambda: not any(p.is_running() for p in ours), 5), ours


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
    program = start_script(
        tmp_path,
        """
        import os, time, minidist as md
        def work():
            print("pid", os.getpid())
            time.sleep(1000)
        md.launch(work, 2)
        """,
    )
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
