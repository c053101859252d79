"""What a call on ranks gives: results, output, standing ranks, and what is refused at once."""

import os
import socket
import sys
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from programs import not_of_the_pools, run_script, total, until

import minidist as md
from minidist.comm import worker
from minidist.comm.launch import Ranks, launch

pytestmark = pytest.mark.timeout(60)


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


def test_gloo_listens_on_loopback_only(monkeypatch):
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address != "127.0.0.1" for a in addresses):
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)  # what a cluster job would set

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
    # The last line, too, may come once more before its end is there.
    assert len(heard) >= 3 and all(h.endswith("\r") for h in heard[:-1])
    assert sum(h.endswith("of 3\r") for h in heard) >= 3


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
