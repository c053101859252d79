"""The exercises: every solution passes, every known mistake gets its message, nothing a submission
does ends the grader, and the ways in (command line, pytest, notebook) agree."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from minidist.learn import checks, compare, exercise_notebook, strip
from minidist.learn.attempt import Array, Code, plain
from minidist.learn.exercise_commands import check_one
from minidist.learn.grade import Grader, solution
from minidist.learn.progress import FILE, Progress
from minidist.learn.spy import Spy

ROOT = Path(__file__).parents[1]
TASKS = strip.all_tasks()
MINIATURES = ("0.6", "1.4", "2.9", "3.7", "3.12", "4.7", "5.7", "6.5")
CJK = re.compile(r"[\u4e00-\u9fff]")


@pytest.fixture(scope="module")
def grader():
    with Grader() as grader:
        yield grader


def untouched(number: str) -> Code:
    ours = solution(number)
    return Code(ours.file, strip.strip(ours.text))


def filled(*numbers: str, **bodies: str) -> str:
    """An exercise file in which the holes of `numbers` hold our solution, and others a given body:
    filled(_2_1="pass")."""
    own = {name.strip("_").replace("_", "."): body for name, body in bodies.items()}
    ours = solution([*numbers, *own][0])
    kept = [re.escape(n) for n in numbers] or ["nothing"]
    text = re.sub(rf"# (BEGIN SOLUTION (?:{'|'.join(kept)})\n)", r"# kept \1", ours.text)
    for number, body in own.items():
        hole = rf"^( *)# BEGIN SOLUTION {re.escape(number)}\n.*?# END SOLUTION\n"

        def body_there(match, body=body):
            return textwrap.indent(textwrap.dedent(body).strip("\n"), match[1]) + "\n"

        text = re.sub(hole, body_there, text, flags=re.DOTALL | re.MULTILINE)
    lines, inside = [], False
    for line in text.splitlines():  # the END lines of holes that were kept
        inside = inside or "# BEGIN SOLUTION" in line and "# kept" not in line
        if "# END SOLUTION" in line and not inside:
            continue
        inside = inside and "# END SOLUTION" not in line
        lines.append(line)
    return strip.strip("\n".join(lines))


# --------------------------------------------------------------------------------- one source


def test_exercises_are_in_step_with_the_solutions(capsys):
    assert strip.main(["--check"]) == 0, capsys.readouterr().out


def test_strip_leaves_tasks_and_takes_solutions_and_second_hints():
    text = (ROOT / "solutions" / "set2_ddp.py").read_text(encoding="utf-8")
    stripped = strip.strip(text)
    assert "BEGIN" not in stripped and "END" not in stripped
    assert "p.grad /= dist.get_world_size()" in text
    assert "p.grad /= dist.get_world_size()" not in stripped
    assert 'raise NotImplementedError("2.1 还没有写 | not written yet")' in stripped
    assert TASKS["2.1"].hint.splitlines()[0] in text
    assert TASKS["2.1"].hint.splitlines()[0] not in stripped
    ast.parse(stripped)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# BEGIN SOLUTION 1.1\n", "has no END"),
        ("# END SOLUTION\n", "without its BEGIN"),
        ("# BEGIN SOLUTION 1.1\n# BEGIN HINT 1.1\n# END HINT\n# END SOLUTION\n", "nested"),
        ("# BEGIN SOLUTION\n# END SOLUTION\n", "number is missing"),
    ],
)
def test_markers_that_do_not_fit_are_an_error(text, message):
    with pytest.raises(strip.MarkError, match=message):
        strip.strip(text)


def test_a_hole_without_a_task_is_an_error():
    text = 'def f():\n    """no title"""\n    # BEGIN SOLUTION 1.1\n    # END SOLUTION\n'
    with pytest.raises(strip.MarkError, match="needs a task"):
        strip.parse(text, "x.py")


def test_seven_sets_and_a_check_for_every_task():
    assert {number.partition(".")[0] for number in TASKS} == set("0123456")
    for number in "0123456":
        ids = [e.id for e in checks._module("set", number).EXERCISES]
        assert ids == [n for n in TASKS if n.partition(".")[0] == number]


@pytest.mark.parametrize("number", TASKS)
def test_texts_are_there_in_both_languages(number):
    task, check = TASKS[number], checks.exercise(number)
    assert CJK.search(task.title_zh) and not CJK.search(task.title_en)
    assert 5 <= task.minutes <= 60
    for text in (task.text, task.hint):
        chinese, english = (strip.in_language(text, language) for language in ("zh", "en"))
        assert CJK.search(chinese) and len(chinese) > 20
        assert not CJK.search(english) and len(english) > 30
    assert "提示" in task.text and "Hint" in task.text
    assert len(check.wrongs) >= 3
    assert len({w.name for w in check.wrongs}) == len(check.wrongs)
    for wrong in check.wrongs:
        assert CJK.search(wrong.zh) and not CJK.search(wrong.en)
        assert len(wrong.zh) >= 5 and len(wrong.en) >= 10
    # One message per mistake: equal texts could not be told apart.
    assert len({w.en for w in check.wrongs}) == len({w.zh for w in check.wrongs})


# ------------------------------------------------------------------------------ the meta-test


@pytest.mark.parametrize("number", TASKS)
def test_untouched_solved_and_every_known_mistake(grader, number):
    verdict = grader.check(number, untouched(number))
    assert (verdict.status, verdict.zh, verdict.en) == (
        "not written",
        "还没有写。",
        "Not written yet.",
    )
    assert not verdict.facts and not verdict.printed and not verdict.borrowed

    ours = solution(number)
    verdict = grader.check(number, ours)
    assert verdict.status == "passed", verdict.message("en")
    assert not verdict.printed

    check = checks.exercise(number)
    for wrong in check.wrongs:
        planted = Code(ours.file, wrong.plant(ours.text, number))
        assert planted.text != ours.text
        verdict = grader.check(number, planted)
        assert verdict.known_mistake == wrong.name, (wrong.name, verdict.message("en"))
        assert (verdict.zh, verdict.en) == (wrong.zh, wrong.en)
        assert verdict.status in (("failed", "timeout") if wrong.story else ("failed",))
        assert verdict.facts  # got and want, or who waited where
        if not wrong.story:
            assert "got" in verdict.facts[1] and "want" in verdict.facts[2]


# -------------------------------------------------------------- miniatures against the real thing


def real_losses(number):
    """The losses of the same training with minidist's own strategy, and in one process."""
    import minidist as md
    from minidist.learn.checks import miniature as mini
    from minidist.train.model import build_gpt, loss_fn

    rank, world = dist.get_rank(), dist.get_world_size()
    model = build_gpt(mini.TINY, seed=mini.SEED)
    sgd, adam = torch.optim.SGD, torch.optim.AdamW
    schedule = lambda step: None  # noqa: E731
    clip, rows = None, (rank, world)
    loss_of = lambda model, x, y: loss_fn(model(x), y)  # noqa: E731
    if number == "0.6":
        model, optimizer = md.shard(model, sgd, "ddp", lr=0.3)
        alone = (sgd, {"lr": 0.3})
    elif number == "2.9":
        model, optimizer = md.shard(model, sgd, "ddp", lr=0.1)
        schedule, alone = md.Warmup(0.4, steps=2, start_lr=0.1), (sgd, {"lr": 0.1})
    elif number == "4.7":
        model, optimizer = md.shard(model, adam, "fsdp", lr=1e-2)
        alone = (adam, {"lr": 1e-2})
    elif number == "5.7":
        model, optimizer = md.shard(model, adam, "zero2", lr=1e-2)
        alone, clip = (adam, {"lr": 1e-2}), 0.5
    elif number == "3.7":
        model = md.tensor_parallel(model)
        optimizer, rows, alone = sgd(model.parameters(), lr=0.3), (0, 1), (sgd, {"lr": 0.3})
        loss_of = lambda model, x, y: md.vocab_parallel_cross_entropy(model(x), y)  # noqa: E731
    losses = []
    for step, batch in enumerate(mini.batches()):
        x, y = mini.own_rows(batch, *rows)
        loss = loss_of(model, x, y)
        loss.backward()
        if schedule(step):
            optimizer.param_groups[0]["lr"] = schedule(step)
        if clip:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mini.mean_over_ranks(loss))
    return losses, one_process(alone, schedule, clip)


def one_process(alone, schedule, clip):
    from minidist.learn.checks import miniature as mini
    from minidist.train.model import build_gpt, loss_fn

    model = build_gpt(mini.TINY, seed=mini.SEED)
    optimizer = alone[0](model.parameters(), **alone[1])
    losses = []
    for step, (x, y) in enumerate(mini.batches()):
        loss = loss_fn(model(x), y)
        loss.backward()
        if schedule(step):
            optimizer.param_groups[0]["lr"] = schedule(step)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def parallel_losses(number):
    """Pipeline and 2 x 2, whose loops are minidist's own."""
    import minidist as md
    from minidist.learn.checks import miniature as mini
    from minidist.train.model import build_gpt

    sizes = {"dp": 2, "tp": 2} if number == "6.5" else {"pp": 2}
    mesh = md.build_mesh(**sizes)
    model = md.parallelize(
        build_gpt(mini.TINY, seed=mini.SEED), mesh, dp="ddp",
        microbatches=1 if number == "6.5" else 4, schedule="1f1b",
    )  # fmt: skip
    optimizer = model.optimizer(torch.optim.SGD, lr=0.3)
    losses = []
    for x, y in mini.batches():
        if number == "6.5":
            half = dist.get_rank() // 2
            x, y = x.chunk(2)[half], y.chunk(2)[half]
        loss = model.step(x, y)
        optimizer.step()
        optimizer.zero_grad()
        shared = torch.tensor(0.0 if loss is None else float(loss))
        dist.all_reduce(shared)
        losses.append(shared.item() / (4 if number == "6.5" else 1))
    return losses, one_process((torch.optim.SGD, {"lr": 0.3}), lambda step: None, None)


@pytest.mark.parametrize("number", [n for n in MINIATURES if n != "1.4"])
def test_a_miniature_trains_the_gpt_to_minidists_losses(grader, run_ranks, number):
    got = plain_list(grader.right(checks.exercise(number))[0]["loss 损失"])
    world = 4 if number == "6.5" else 2
    function = parallel_losses if number in ("3.12", "6.5") else real_losses
    real, alone = run_ranks(function, world, number)[0]
    # Sums in another order: 1e-6 of a loss of 5.5; a wrong gradient moves the third loss by 1e-2.
    assert got == pytest.approx(real, rel=2e-5)
    assert got == pytest.approx(alone, rel=2e-5)
    assert len(set(got)) == 3 and got[2] < got[0] - 0.1


def test_all_strategies_of_the_first_miniature_give_one_loss(grader):
    result = grader.right(checks.exercise("1.4"))[0]
    losses = [plain_list(v) for k, v in result.items() if "loss" in k]
    states = [v for k, v in result.items() if "bytes" in k]
    assert losses[0] == pytest.approx(losses[1], rel=2e-5)
    assert losses[0] == pytest.approx(losses[2], rel=2e-5)
    assert states[1] < 0.6 * states[0] and states[2] < 0.6 * states[0]


def plain_list(value):
    return value.values.tolist() if isinstance(value, Array) else value


# --------------------------------------------------------------------- whatever a submission does

BODIES = {
    "raises": ("raise ValueError('mine')", "failed", "ValueError: mine"),
    "exits": ("import sys\nsys.exit(0)", "failed", "exit()"),
    "exits at once": ("import os\nos._exit(0)", "failed", "ended its process"),
    "kills itself": ("import os\nos.kill(os.getpid(), 9)", "failed", "SIGKILL"),
    "endless": ("while True:\n    pass", "timeout", "Not finished within 3 s"),
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
    grader.seconds = 3.0 if name == "endless" else None
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
    verdict = grader.check("2.1", Code("/a/set2_ddp.py", "while True: pass\n"))
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
    assert grader.check("2.1", solution("2.1")).status == "passed"


# ------------------------------------------------------------------- exercises in any order


def test_what_is_not_written_yet_is_borrowed(grader):
    verdict = grader.check("4.7", Code("/somewhere/set4_fsdp.py", filled("4.7")))
    assert verdict.status == "passed", verdict.message("en")
    assert set(verdict.borrowed) == {"4.1", "4.2", "4.3", "4.4", "4.5", "4.6"}


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


# -------------------------------------------------------------------------------- command line


def cli(*arguments, folder=ROOT, timeout=110):
    return subprocess.run(
        [sys.executable, "-m", "minidist", *map(str, arguments)],
        cwd=folder, capture_output=True, text=True, timeout=timeout,
        env={**os.environ, "COLUMNS": "120", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip


@pytest.fixture
def copy(tmp_path):
    done = cli("start-exercises", tmp_path / "mine")
    assert done.returncode == 0, done.stderr
    return tmp_path / "mine"


def solve(folder: Path, *numbers: str) -> None:
    (folder / TASKS[numbers[0]].file).write_text(filled(*numbers), encoding="utf-8")


def test_untouched_exercises_are_all_not_written(copy):
    done = cli("check", "--src", copy)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr and not done.stderr
    assert done.stdout.count("not written yet") == len(TASKS) + 1  # and the legend
    assert f"0/{len(TASKS)}" in done.stdout


def test_solutions_pass_on_the_command_line(tmp_path):
    shutil.copytree(ROOT / "solutions", tmp_path / "s")
    done = cli("check", "0", "1", "--src", tmp_path / "s", "--lang", "en")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not CJK.search(done.stdout)
    assert "0/" not in done.stdout.split("Sets")[0].replace("10/", "").replace("0/", "", 5)


def test_start_exercises_never_overwrites(copy):
    mine = copy / "set2_ddp.py"
    mine.write_text("# my work\n", encoding="utf-8")
    done = cli("start-exercises", copy)
    assert done.returncode == 0 and "未改动" in done.stdout and "untouched" in done.stdout
    assert mine.read_text(encoding="utf-8") == "# my work\n"


def test_task_hint_and_solution_after_one_try(copy):
    assert "add_(" not in cli("check", "2.1", "--task", "--src", copy).stdout
    assert "Hint" in cli("check", "2.1", "--task").stdout
    hint = cli("check", "2.1", "--hint", "--lang", "zh").stdout
    assert "get_world_size" in hint and "One loop" not in hint
    refused = cli("check", "2.1", "--solution", "--src", copy)
    assert (
        refused.returncode == 1 and "first" in refused.stdout and "p.grad /=" not in refused.stdout
    )
    cli("check", "2.1", "--src", copy)  # an untouched hole is no try
    assert cli("check", "2.1", "--solution", "--src", copy).returncode == 1
    text = filled(_2_1="pass")
    (copy / "set2_ddp.py").write_text(text, encoding="utf-8")
    done = cli("check", "2.1", "--src", copy)
    assert done.returncode == 1 and "did not change" in done.stdout and "得到 got" in done.stdout
    shown = cli("check", "2.1", "--solution", "--src", copy)
    assert shown.returncode == 0 and "p.grad /= dist.get_world_size()" in shown.stdout


def test_progress_is_remembered_and_notices_changes(copy):
    solve(copy, "2.1", "2.3")
    assert cli("check", "2.1", "2.2", "--src", copy).returncode == 1
    progress = Progress.of(copy)
    status = {n: progress.status(TASKS[n]) for n in ("2.1", "2.2", "2.3")}
    assert status == {"2.1": "passed", "2.2": "not written", "2.3": "unknown"}
    text = filled("2.1", "2.3").replace("if p.grad is not None", "if p.grad is not None and True")
    (copy / "set2_ddp.py").write_text("# a comment changes nothing\n" + text, encoding="utf-8")
    assert Progress.of(copy).status(TASKS["2.1"]) == "changed"
    solve(copy, "2.1", "2.3")
    assert Progress.of(copy).status(TASKS["2.1"]) == "passed"
    (copy / FILE).write_text("not json", encoding="utf-8")
    assert Progress.of(copy).status(TASKS["2.1"]) == "unknown"


def test_a_folder_of_submissions_and_json(copy, tmp_path):
    every = tmp_path / "all"
    for name in ("ann", "bob", "cyd"):
        (every / name).mkdir(parents=True)
    (every / "ann" / "set1_choosing.py").write_text(filled("1.2", "1.3"), encoding="utf-8")
    bad = filled("1.3", _1_2="while True:\n    pass")
    (every / "bob" / "set1_choosing.py").write_text(bad, encoding="utf-8")
    (every / "cyd" / "set2_ddp.py").write_bytes(b"\xff\xfe not utf-8")
    file = tmp_path / "grades.json"
    done = cli("check", "1.2", "1.3", "--src", every, "--json", file, "--timeout", "3")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    content = json.loads(file.read_text(encoding="utf-8"))
    assert {"minidist", "torch", "machine", "rows"} <= set(content)
    rows = {(r["submission"], r["exercise"]): r for r in content["rows"]}
    assert len(rows) == 6
    assert rows["ann", "1.2"]["status"] == rows["ann", "1.3"]["status"] == "passed"
    assert rows["bob", "1.2"]["status"] == "timeout" and rows["bob", "1.3"]["status"] == "passed"
    assert rows["cyd", "1.2"]["status"] == "failed"
    keys = {"exercise", "status", "known_mistake", "message_zh", "message_en", "seconds"}
    assert all(keys <= set(row) for row in rows.values())
    assert not list(every.rglob(FILE))  # nothing is left in students' folders


def test_json_on_the_terminal_is_only_json(copy):
    solve(copy, "1.3")
    done = cli("check", "1.3", "--src", copy, "--json", "-")
    rows = json.loads(done.stdout)["rows"]
    assert done.returncode == 0 and [r["status"] for r in rows] == ["passed"]
    assert not (copy / FILE).exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "9.9"], "no exercise 9.9"),
        (["check", "--lang", "fr"], "zh, en or both"),
        (["check", "--src", "nowhere"], "no folder nowhere"),
        (["check", "--src", "tests"], "no exercise files"),
        (["check", "--timeout", "-1"], "more than 0"),
        (["check", "1.3", "--json", "/nowhere/x.json"], "does not exist"),
        (["start-exercises", "README.md"], "is a file"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, words):
    done = cli(*arguments)
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1


def test_watch_checks_again_on_save(copy):
    program = subprocess.Popen(
        [sys.executable, "-u", "-m", "minidist", "check", "1.3", "--watch", "--src", str(copy)],
        stdout=subprocess.PIPE, text=True, encoding="utf-8",
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    try:
        seen = read_until(program, "not written yet")
        solve(copy, "1.3")
        seen = read_until(program, "✓ 1.3")
        assert seen
        (copy / TASKS["1.3"].file).write_text("def choose(", encoding="utf-8")
        read_until(program, "not valid Python")
    finally:
        program.kill()
        program.wait()


def read_until(program, words: str, seconds: float = 60) -> str:
    end, seen = time.monotonic() + seconds, ""
    while time.monotonic() < end:
        seen += program.stdout.readline()
        if words in seen:
            return seen
    raise AssertionError(seen)


def test_pytest_runs_the_same_checks(copy):
    solve(copy, "1.2", "1.3")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(copy)],
        cwd=copy, capture_output=True, text=True, timeout=110,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    assert f"{len(TASKS) - 2} failed, 2 passed" in done.stdout
    assert "2.1 [not written]" in done.stdout and "Traceback" not in done.stdout


def test_the_program_that_grades_does_not_load_torch():
    code = "import sys, minidist.learn.exercise_commands, minidist.learn.checks.set2\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


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
        assert "needs exactly these" in kernel.run('check("4.1", helper)').error
        assert "no exercise" in kernel.run('check("9.9")').error
    finally:
        kernel.close()
