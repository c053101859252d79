"""The exercises: nothing a submission does ends the grader; borrowing, comparing, notebooks."""

import ast
import re
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from programs import until
from submissions import filled

from minidist.learn import compare, exercise_notebook, strip
from minidist.learn.attempt import Code, plain
from minidist.learn.exercise_commands import check_one
from minidist.learn.grade import Grader, solution
from minidist.learn.spy import Spy

ROOT = Path(__file__).parents[1]
TASKS = strip.all_tasks()
CJK = re.compile(r"[\u4e00-\u9fff]")


@pytest.fixture(scope="module")
def grader():
    with Grader() as grader:
        yield grader


# --------------------------------------------------------------------- whatever a submission does

BODIES = {
    "raises": ("raise ValueError('mine')", "failed", "ValueError: mine"),
    "exits": ("import sys\nsys.exit(0)", "failed", "exit()"),
    "exits at once": ("import os\nos._exit(0)", "failed", "ended its process"),
    "kills itself": ("import os\nos.kill(os.getpid(), 9)", "failed", "SIGKILL"),
    "endless": ("while True:\n    pass", "timeout", "Not finished within 3 s"),
    "prints for ever": ("while True:\n    print('x' * 1000)", "timeout", "Not finished within 3 s"),
    "one rank only": ("if dist.get_rank() == 0:\n    dist.barrier()", "timeout", "deadlock"),
    "other collectives": (
        "x = torch.zeros(2)\n"
        "dist.all_reduce(x) if dist.get_rank() else dist.broadcast(x, 0)",
        "failed",
        "different collectives",
    ),
    "odd exception": (
        "class Odd(BaseException):\n"
        "    def __str__(self):\n        raise RuntimeError\n"
        "raise Odd",
        "failed",
        "It failed while running",
    ),
    "a megabyte in an exception": ("raise ValueError('x' * 1_000_000)", "failed", "ValueError"),
    "deep": ("average_gradients(model)", "failed", "RecursionError"),
    "memory": ("x = torch.zeros(1 << 40)", "failed", "Too much memory"),
    "reads input": ("input()", "failed", "EOFError"),
    "no group left": ("dist.destroy_process_group()", "failed", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_a_bad_submission_is_a_result_and_the_next_check_works(grader, name):
    body, status, words = BODIES[name]
    code = Code("/somewhere/set2_ddp.py", filled(_2_1=body))
    grader.seconds = 3.0 if status == "timeout" and "Not finished" in words else None
    try:
        verdict = grader.check("2.1", code)
    finally:
        grader.seconds = None
    assert verdict.status == status, verdict
    assert words.lower() in verdict.message("en").lower()
    assert CJK.search(verdict.message("zh"))
    assert len(verdict.message("en")) < 3000
    assert grader.check("2.1", solution("2.1")).status == "passed"


def test_what_waits_where_is_told_with_the_learners_lines(grader):
    body = "if dist.get_rank() == 0:\n    dist.all_reduce(torch.zeros(3))"
    verdict = grader.check("2.1", Code("/somewhere/set2_ddp.py", filled(_2_1=body)))
    assert any("all_reduce(torch.zeros(3))" in fact for fact in verdict.facts), verdict.facts
    assert any(re.match(r"rank 1: .*(finished|barrier|等|已结束)", fact) for fact in verdict.facts)


def test_a_fork_is_not_a_second_answer(grader):
    text = filled(_2_1="import os\nos.fork()")
    for _ in range(2):
        verdict = grader.check("2.1", Code("/somewhere/set2_ddp.py", text))
        assert verdict.known_mistake == "local", verdict
    assert grader.check("2.2", solution("2.2")).status == "passed"


def test_processes_that_a_submission_starts_end_with_it(grader, tmp_path):
    note = tmp_path / "pids"
    body = f"""
        import os, subprocess, time
        with open({str(note)!r}, "a") as file:
            pid = os.fork()
            if pid == 0:
                time.sleep(600)
            print(pid, subprocess.Popen(["sleep", "600"]).pid, file=file)
    """
    assert grader.check("2.1", Code("/a/set2_ddp.py", filled(_2_1=body))).known_mistake == "local"
    pids = [int(pid) for pid in note.read_text().split()]
    assert len(pids) == 4
    grader.new_submission()
    assert until(lambda: not any(alive(pid) for pid in pids), 10)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_megabyte_of_output_is_cut(grader):
    body = "print('x' * 1_000_000)\nfor i in range(10_000):\n    print('line', i)"
    verdict = grader.check("2.1", Code("/somewhere/set2_ddp.py", filled(_2_1=body)))
    assert verdict.known_mistake == "local"
    assert 0 < len(verdict.printed) <= 12 and max(map(len, verdict.printed)) < 300


def test_what_the_code_prints_is_shown(grader):
    text = filled("2.1").replace("dist.all_reduce(p.grad)", "dist.all_reduce(p.grad); print('hi')")
    verdict = grader.check("2.1", Code("/somewhere/set2_ddp.py", text))
    assert verdict.status == "passed" and "[rank 0] hi" in verdict.printed


def test_trouble_at_import_and_files_that_are_no_python(grader):
    verdict = grader.check("2.1", Code("/a/set2_ddp.py", "def f(:\n"))
    assert verdict.status == "failed" and "not valid Python" in verdict.en
    assert "set2_ddp.py:1" in verdict.facts[1]
    verdict = grader.check("2.1", Code("/a/set2_ddp.py", "import nothing_like_this\n"))
    assert "nothing_like_this" in verdict.message("en") and "set2_ddp.py:1" in verdict.message("zh")
    verdict = grader.check("2.1", Code("/a/set2_ddp.py", "import torch\n"))
    assert "`average_gradients`" in verdict.zh and "`average_gradients`" in verdict.en
    with Grader(seconds=2.0) as short:
        verdict = short.check("2.1", Code("/a/set2_ddp.py", "while True: pass\n"))
    assert verdict.status == "timeout"


def test_state_does_not_leak_into_the_next_check(grader):
    body = """
        import os, threading, time
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        os.chdir("/")
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        dist.isend(torch.zeros(1), 1 - dist.get_rank())
        dist.new_group([0])
    """
    grader.check("2.1", Code("/somewhere/set2_ddp.py", filled(_2_1=body)))
    for number in ("2.1", "2.4", "2.9"):
        verdict = grader.check(number, solution(number))
        assert verdict.status == "passed", verdict.message("en")


def test_code_that_kills_other_processes_does_not_end_the_grader(grader):
    grader._results.clear()
    text = filled(_2_1="import os, signal\nos.kill(os.getppid(), signal.SIGKILL)")
    assert grader.check("2.1", Code("/somewhere/set2_ddp.py", text)).status == "failed"
    verdict = grader.check("2.1", solution("2.1"))
    assert verdict.status == "passed", verdict.message("en")


# ------------------------------------------------------------------- exercises in any order


def test_what_is_not_written_yet_is_borrowed(grader):
    verdict = grader.check("4.7", Code("/somewhere/set4_fsdp.py", filled("4.7")))
    assert verdict.status == "passed", verdict.message("en")
    assert set(verdict.borrowed) == {"4.1", "4.2", "4.3", "4.4", "4.5"}  # 4.6 is not called


def test_borrowed_code_calls_the_learners(grader):
    # 4.2 is ours; its hook calls `arrived`, which must be the learner's, and is wrong.
    text = filled(_4_4="unit.free()")
    verdict = grader.check("4.4", Code("/somewhere/set4_fsdp.py", text))
    assert verdict.status == "failed" and "4.2" in verdict.borrowed
    assert grader.check("4.4", Code("/somewhere/set4_fsdp.py", filled("4.4"))).status == "passed"


def test_own_mistakes_in_an_earlier_exercise_are_the_learners(grader):
    text = filled("2.4", _2_3="return [list(parameters)]")
    verdict = grader.check("2.4", Code("/somewhere/set2_ddp.py", text))
    assert verdict.status == "failed" and "2.3" not in verdict.borrowed


# -------------------------------------------------------------------------- comparing, watching


def differ(got, want, tolerance=1e-5):
    return compare.difference([plain(got)], [plain(want)], tolerance)


def test_differences_say_where_and_what_can_be_said_in_general():
    assert differ({"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([1.0, 2.0])}) is None
    assert differ({"a": 1.0}, {"a": torch.tensor(1.0)}) is None  # a number for a 0-d tensor
    found = differ({"gradient": {"w": torch.full((9,), 4.0)}}, {"gradient": {"w": torch.ones(9)}})
    assert found.where.startswith("gradient · w") and "4 times" in found.en and "4 倍" in found.zh
    assert "return" in differ(None, {"a": 1.0}).en
    assert "NaN" in differ(torch.tensor([float("nan")]), torch.tensor([1.0])).en
    assert "exchanged" in differ(torch.zeros(2, 3), torch.zeros(3, 2)).en
    assert "3 items" in differ([1, 2, 3, 4], [1, 2, 3]).en
    assert differ(torch.tensor([1.0]), torch.tensor([1.0 + 1e-7])) is None
    assert differ(torch.tensor([1.0]), torch.tensor([1.001])) is not None
    assert differ(True, 1) is not None
    assert "zero" in differ(torch.zeros(3), torch.ones(3)).en


def test_ranks_that_are_right_are_named():
    found = compare.difference([1.0, 2.0, 3.0], [1.0, 2.0, 4.0], 1e-5)
    assert found.rank == 2 and "rank 0, 1" in found.en


def test_only_plain_values_come_back():
    class Strange:
        def __repr__(self):
            raise RuntimeError

    assert plain(Strange()) == "<Strange>"
    assert plain({1: (2, {3})}) == {"1": [2, [3]]}
    assert plain(torch.zeros(1_000_000)).values is None
    assert len(plain("x" * 10**6)) <= 2000
    assert plain(torch.ones(2, dtype=torch.bfloat16)).dtype == "bfloat16"
    loop = []
    loop.append(loop)
    plain(loop)


def spied():
    from minidist.comm import collectives as coll

    rank, other = dist.get_rank(), 1 - dist.get_rank()
    originals = dist.all_reduce, coll.all_gather
    with Spy() as spy:
        x = torch.ones(3)
        work = dist.all_reduce(x, async_op=True)
        early = x.clone()
        flying = spy.unfinished
        work.wait()
        into = torch.zeros(2)
        ops = [
            dist.P2POp(dist.isend, torch.full((2,), float(rank)), other),
            dist.P2POp(dist.irecv, into, other),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        full = torch.zeros(4)
        coll.all_gather(full, torch.full((2,), float(rank)))
        spy.mark("here")
        dist.all_reduce(torch.zeros(5))
    same = originals == (dist.all_reduce, coll.all_gather)
    ops = [e.op for e in spy.events]
    numbers = [spy.sent("send"), spy.sent("all_gather"), spy.sent(since=spy.place("here"))]
    return early.tolist(), x.tolist(), flying, spy.unfinished, into.tolist(), ops, numbers, same


def test_the_spy_sees_the_outermost_calls_and_holds_results_back(run_ranks):
    early, x, flying, unfinished, into, ops, numbers, same = run_ranks(spied, 2)[0]
    assert early == [1, 1, 1] and x == [2, 2, 2] and flying and not unfinished
    assert into == [1, 1] and same
    assert ops == ["all_reduce", "send", "recv", "all_gather", "here", "all_reduce"]
    assert numbers == [2, 2, 5]


def test_a_missing_file_is_a_result(grader, tmp_path):
    verdict = check_one(grader, tmp_path, TASKS["2.1"])
    assert verdict.status == "failed" and "set2_ddp.py" in verdict.zh


# ------------------------------------------------------------------------------------ notebook


def test_functions_of_a_notebook(monkeypatch):
    monkeypatch.setattr(exercise_notebook, "_grader", None)

    def average_gradients(model):
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)

    verdict = exercise_notebook.verdict_of(TASKS["2.1"], [average_gradients])
    assert verdict.known_mistake == "sum"

    def broken(model):
        raise ValueError("in the notebook")

    verdict = exercise_notebook.verdict_of(TASKS["2.1"], [broken])
    assert "in the notebook" in verdict.message("en")
    assert 'raise ValueError("in the notebook")' in verdict.facts[1]

    def unwritten(model):
        raise NotImplementedError("2.1 还没有写 | not written yet")

    verdict = exercise_notebook.verdict_of(TASKS["2.1"], [unwritten])
    assert verdict.status == "not written"
    exercise_notebook._grader.__exit__()


def test_check_in_a_real_notebook():
    from test_learn import Kernel

    kernel = Kernel()
    try:
        task = kernel.run('check("2.3")')
        assert "make_buckets" in task.text or "Make buckets" in task.text
        assert "分桶" in task.text and not task.error
        kernel.run(
            "import torch.distributed as dist\n"
            "def average_gradients(model):\n"
            "    for p in model.parameters():\n"
            "        if p.grad is not None:\n"
            "            dist.all_reduce(p.grad); p.grad /= helper()\n"
            "def helper():\n"
            "    return dist.get_world_size()\n"
        )
        passed = kernel.run('check("2.1", average_gradients)')
        assert "✓ 2.1" in passed.text and "通过" in passed.text, passed
        kernel.run("def helper():\n    return 1\n")
        failed = kernel.run('check("2.1", average_gradients)')
        assert "SUM" in failed.text.upper() and "✗ 2.1" in failed.text
        # A class whose helpers are not in the notebook: ours stand in.
        own = ast.get_source_segment(
            solution("2.4").text,
            next(
                n
                for n in ast.parse(solution("2.4").text).body
                if getattr(n, "name", "") == "MiniDDP"
            ),
        )
        kernel.run(
            f"import torch\nfrom contextlib import contextmanager\nfrom torch import nn\n{own}"
        )
        passed = kernel.run('check("2.4", MiniDDP)')
        assert "✓ 2.4" in passed.text, passed
        # Now it is there for 2.5, and the task shows what is given.
        kernel.run("def accumulate(ddp, microbatches, loss_fn):\n    return torch.zeros(())\n")
        assert "✗ 2.5" in kernel.run('check("2.5", accumulate)').text
        task = kernel.run('check("2.4")').text
        assert "def _launch(self, i):" in task and "# TODO 2.4" in task
        hint = kernel.run('check("2.4", hint=True)')
        assert "len(self.launched)" in hint.text and not hint.error
        assert "needs exactly these" in kernel.run('check("4.1", helper)').error
        assert "no exercise" in kernel.run('check("9.9")').error
    finally:
        kernel.close()
