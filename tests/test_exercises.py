"""The exercises: every solution passes, every known mistake gets exactly its message, and the
miniatures train the GPT to minidist's losses."""

import ast
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from submissions import untouched

from minidist.learn import checks, strip
from minidist.learn.attempt import Array, Code
from minidist.learn.grade import Grader, solution

ROOT = Path(__file__).parents[1]
TASKS = strip.all_tasks()
MINIATURES = ("0.6", "1.4", "2.9", "3.7", "3.12", "4.7", "5.7", "6.5")
CJK = re.compile(r"[\u4e00-\u9fff]")


@pytest.fixture(scope="module")
def grader():
    with Grader() as grader:
        yield grader


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
        # What waits is found out long before the limit; what loops for ever is not.
        grader.seconds = 3.0 if wrong.story.startswith("timeout") else None
        verdict = grader.check(number, planted)
        grader.seconds = None
        assert verdict.known_mistake == wrong.name, (wrong.name, verdict.message("en"))
        assert (verdict.zh, verdict.en) == (wrong.zh, wrong.en)
        assert verdict.status in (("failed", "timeout") if wrong.story else ("failed",))
        assert verdict.facts  # got and want, or who waited where
        if not wrong.story:
            assert "got" in verdict.facts[1] and "want" in verdict.facts[2]
        assert not CJK.search(verdict.message("en"))


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
    got = plain_list(grader.right(checks.exercise(number))[0]["loss | 损失"])
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
