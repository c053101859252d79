"""The exercises: what a learner is told, in which language, and which exercise comes first."""

import re

import pytest
from submissions import filled

from minidist import cli as minidist_cli
from minidist.comm.failure import RankFailure
from minidist.learn import exercise_notebook, exercise_report, story, strip, uses, words
from minidist.learn.attempt import Code
from minidist.learn.exercise_commands import _with_used
from minidist.learn.grade import Grader, solution

TASKS = strip.all_tasks()
CJK = re.compile(r"[\u4e00-\u9fff]")
SOLVED = solution("2.1").text


@pytest.fixture(scope="module")
def grader():
    with Grader() as grader:
        yield grader


def code(text: str) -> Code:
    return Code("/somewhere/set2_ddp.py", text)


def solved_but(**bodies: str) -> Code:
    """Set 2 solved, but for the bodies of some holes."""
    holes = {name.strip("_").replace("_", ".") for name in bodies}
    return code(filled(*(n for n in TASKS if n[0] == "2" and n not in holes), **bodies))


# ------------------------------------------------------------------------- which comes first


def test_what_an_exercise_uses_is_read_from_the_text():
    assert uses.used("2.5", SOLVED) == ("2.3", "2.4")  # its check builds a MiniDDP
    assert uses.used("2.9", SOLVED) == ("2.3", "2.4", "2.5", "2.8")
    assert uses.used("2.1", SOLVED) == () == uses.used("2.5", "def f(")
    other = SOLVED.replace("reversed(parameters)", "parameters")
    assert other != SOLVED
    assert uses.digest("2.9", other) != uses.digest("2.9", SOLVED)
    assert uses.digest("2.8", other) == uses.digest("2.8", SOLVED)
    assert uses.digest("2.9", "# a comment\n" + SOLVED) == uses.digest("2.9", SOLVED)


@pytest.mark.parametrize(
    ("number", "body", "later"),
    [
        ("2.3", "return [list(parameters)]", ("2.4", "2.5")),
        ("2.3", "pass", ("2.4", "2.9")),  # an exception, not a wrong result
        ("2.8", "return base_lr", ("2.9",)),
    ],
)
def test_the_earlier_exercise_that_fails_is_named(grader, number, body, later):
    submission = solved_but(**{f"_{number.replace('.', '_')}": body})
    for exercise in later:
        verdict = grader.check(exercise, submission)
        assert verdict.status == "failed" and verdict.known_mistake is None
        assert verdict.en == f"It uses your {number}, which does not pass yet: start there."
        assert f"你的 {number}" in verdict.zh and verdict.facts
    assert "uses your" not in grader.check(number, submission).en


def test_a_later_exercise_is_not_blamed(grader):
    verdict = grader.check("2.4", solved_but(_2_5="return None", _2_4="pass"))
    assert verdict.status == "failed" and "uses your" not in verdict.en


def test_a_change_in_what_it_uses_is_checked_again(tmp_path):
    file = tmp_path / "set2_ddp.py"
    file.write_text(SOLVED, encoding="utf-8")
    before = {n: _with_used(tmp_path, TASKS[n]) for n in ("2.1", "2.3", "2.9")}
    file.write_text(SOLVED.replace("reversed(parameters)", "parameters"), encoding="utf-8")
    after = {n: _with_used(tmp_path, TASKS[n]) for n in before}
    assert {n for n in before if before[n] != after[n]} == {"2.3", "2.9"}


# ----------------------------------------------------------------------------- which mistake


def test_a_mistake_is_recognised_where_it_first_shows(grader):
    # Two mistakes at once: forward order, and an empty bucket where the first one is too large.
    body = """
        buckets, bucket, size = [], [], 0
        for p in parameters:
            nbytes = p.numel() * p.element_size()
            if size + nbytes > cap_bytes:
                buckets.append(bucket)
                bucket, size = [], 0
            bucket.append(p)
            size += nbytes
        return buckets + [bucket]
    """
    verdict = grader.check("2.3", solved_but(_2_3=body))
    assert verdict.known_mistake == "forward order"
    assert "[[0, 1, 2], [3], [4]]" in verdict.facts[1]  # the whole list, not one bucket of it


def test_one_wrong_number_is_too_little_to_name_a_mistake(grader):
    body = "for p in model.parameters():\n    p.grad = None if p.grad is None else p.grad\nreturn"
    assert grader.check("2.1", solved_but(_2_1=body)).known_mistake == "local"
    # Right gradients, but 7 calls: no planted answer of 2.2 does that.
    body = "average_gradients(model)\ndist.all_reduce(torch.zeros(1))"
    verdict = grader.check("2.2", solved_but(_2_2=body))
    assert verdict.status == "failed" and verdict.known_mistake is None


def test_a_forgotten_return_is_not_taken_for_a_missing_gradient(grader):
    verdict = grader.check("2.3", solved_but(_2_3="pass"))
    assert "return" in verdict.en and ".grad" not in verdict.en
    verdict = grader.check("2.6", solved_but(_2_6="pass"))
    assert "return" in verdict.en and ".grad" not in verdict.en


def test_half_written_says_what_is_missing(grader):
    hole = '        raise NotImplementedError("2.4 还没有写 | not written yet")\n'
    text = re.sub(
        r"(    def finish\(self\):\n).*?(\n    @contextmanager)", rf"\1{hole}\2", SOLVED, flags=re.S
    )
    verdict = grader.check("2.4", code(text))
    assert verdict.status == "not written"
    assert verdict.en == "`finish` is still missing." and "`finish`" in verdict.zh


def failure(*words_of_ranks: str) -> RankFailure:
    return RankFailure("not finished after 3 s", 0, "", dict(enumerate(words_of_ranks)))


def test_all_in_one_collective_is_an_endless_loop_and_no_deadlock():
    at = " at /a/set2_ddp.py:9: dist.all_reduce(x)  [all_reduce number 70]"
    same = failure(f"waiting in all_reduce{at}", f"waiting in all_reduce{at}")
    assert story.tell(same, "/a/set2_ddp.py", 3).kind == "timeout"
    sends = failure(f"waiting in send{at}", f"waiting in send{at}")
    assert story.tell(sends, "/a/set2_ddp.py", 3).kind == "deadlock"
    assert story.tell(failure(f"waiting in all_reduce{at}", "finished"), "/a", 3).kind == "deadlock"


def test_every_rank_of_a_mismatch_is_listed(grader):
    once = "        if rank == 0:\n            dist.all_reduce(loss)\n"
    text = SOLVED.replace("        dist.all_reduce(loss)\n", once)
    facts = grader.check("2.9", code(text)).facts
    assert facts[0].startswith("rank 0 calls") and facts[1].startswith("rank 1 calls"), facts


# ------------------------------------------------------------------------------ the language


def test_a_label_in_either_language():
    label = words.label("root=3: x untouched | x 未变 · 0.weight[2:8]")
    assert label == "root=3: x untouched | x 未变 · 0.weight[2:8]"
    assert (label.zh, label.en) == (
        "root=3: x 未变 · 0.weight[2:8]",
        "root=3: x untouched · 0.weight[2:8]",
    )
    assert words.label("rows | 各行[0:6]").en == "rows[0:6]"


def test_one_language_only_also_for_who_waits_where(grader):
    body = "if dist.get_rank() == 0:\n    dist.all_reduce(torch.zeros(3))"
    for wrong in (solved_but(_2_1=body), solved_but(_2_1="pass")):
        verdict = grader.check("2.1", wrong)
        assert not CJK.search(verdict.message("en"))
        assert not re.search("waiting in|finished|gradient|got |want ", verdict.message("zh"))
    assert "停在 all_reduce" in grader.check("2.1", solved_but(_2_1=body)).message("zh")


@pytest.fixture
def check(capsys, tmp_path):
    """`check(text, *arguments)`: what `minidist check` prints for a file of set 2."""

    def run(text: str, *arguments: str) -> str:
        (tmp_path / "set2_ddp.py").write_text(text, encoding="utf-8")
        minidist_cli.main(["check", *arguments, "--src", str(tmp_path)])
        return capsys.readouterr().out

    return run


def test_one_language_on_the_command_line(check):
    out = check(filled("2.2", _2_1="pass"), "2.1", "2.3", "--lang", "en")
    assert "did not change" in out and not CJK.search(out)
    out = check(filled("2.2", _2_1="pass"), "2.1", "2.3", "--lang", "zh")
    assert "还没有写" in out and "应为" in out
    assert not re.search("got|want|gradient|checking|written", out)


def test_the_folder_is_named_and_only_the_set_is_counted(check, tmp_path):
    out = check(SOLVED, "2.8")
    assert out.splitlines()[0] == f"检查的文件夹 | checking: {tmp_path}"
    assert "1/9" in out and "FSDP" not in out


def test_a_syntax_error_is_told_once(check):
    out = check("def f(:\n", "2", "--lang", "en")
    assert out.count("not valid Python") == 1 and out.count("the same") == 8


def test_our_solution_has_its_def_lines():
    text = TASKS["2.4"].solution
    assert text.startswith("def _ready(self, p):\n    if not self.sync:")
    assert "\n\ndef finish(self):\n    while" in text and "BEGIN" not in text
    assert TASKS["2.3"].skeleton.startswith("def make_buckets(parameters, cap_bytes):\n")
    assert "2.4 还没有写" in TASKS["2.4"].skeleton and "HINT" not in TASKS["2.4"].skeleton


def test_lines_are_joined_and_wrapped_without_cutting_code():
    text = strip.flowed("先运行\n它（很\n短），用 a\nb。\n提示：c\n- one\n  two")
    assert text == "先运行它（很短），用 a b。\n提示：c\n- one two"
    rows = exercise_report.wrapped("字" * 30 + " `minidist check 2.1 --src x` 然后，看。", 40)
    assert any("`minidist check 2.1 --src x`" in row for row in rows.splitlines())
    assert not any(row.startswith(("，", "。")) for row in rows.splitlines())


# ------------------------------------------------------------------------------ the notebook


def test_a_notebook_brings_its_own_earlier_exercise_or_ours_stands_in(monkeypatch):
    monkeypatch.setattr(exercise_notebook, "_grader", None)
    space: dict = {}
    exec(SOLVED, space)
    try:
        verdict = exercise_notebook.verdict_of(TASKS["2.5"], [space["accumulate"]])
        assert verdict.status == "passed", verdict.message("en")
        own = {"MiniDDP": space["MiniDDP"]}
        verdict = exercise_notebook.verdict_of(TASKS["2.5"], [space["accumulate"]], None, own)
        assert verdict.status == "passed" and "2.4" not in verdict.borrowed

        class MiniDDP(space["MiniDDP"]):
            def finish(self):
                pass

        own = {"MiniDDP": MiniDDP}
        verdict = exercise_notebook.verdict_of(TASKS["2.5"], [space["accumulate"]], None, own)
        assert verdict.status == "failed"
    finally:
        exercise_notebook._grader.__exit__()
