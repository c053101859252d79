"""The exercises from the command line and from pytest: the same results, and plain files."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from submissions import filled

from minidist import cli as minidist_cli
from minidist.learn import strip
from minidist.learn.progress import FILE, Progress

ROOT = Path(__file__).parents[1]
TASKS = strip.all_tasks()
CJK = re.compile(r"[\u4e00-\u9fff]")


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
    assert "10/10" in done.stdout


def test_start_exercises_never_overwrites(copy):
    mine = copy / "set2_ddp.py"
    mine.write_text("# my work\n", encoding="utf-8")
    done = cli("start-exercises", copy)
    assert done.returncode == 0 and "未改动" in done.stdout and "untouched" in done.stdout
    assert mine.read_text(encoding="utf-8") == "# my work\n"


def test_task_hint_and_solution_after_one_try(copy, capsys):
    def words(*arguments):
        """Exit code and output of `minidist check 2.1 ...`, without a process of its own."""
        code = minidist_cli.main(["check", "2.1", "--src", str(copy), *arguments])
        return code, capsys.readouterr().out

    assert words("--task")[0] == 0 and "Hint: dist.all_reduce" in words("--task")[1]
    assert "提示" not in words("--task", "--lang", "en")[1]
    hint = words("--hint", "--lang", "zh")[1]
    assert "get_world_size" in hint and "One loop" not in hint
    code, text = words("--solution")
    assert code == 1 and "first" in text and "先自己" in text and "p.grad /=" not in text
    words()  # an untouched hole is no try
    assert words("--solution")[0] == 1
    (copy / "set2_ddp.py").write_text(filled(_2_1="pass"), encoding="utf-8")
    code, text = words()
    assert code == 1 and "did not change" in text and "得到 got" in text
    code, text = words("--solution")
    assert code == 0 and "p.grad /= dist.get_world_size()" in text


def test_progress_is_remembered_and_notices_changes(copy):
    solve(copy, "2.1", "2.3")
    assert cli("check", "2.1", "2.2", "--src", copy).returncode == 1
    progress = Progress.of(copy)
    status = {n: progress.status(TASKS[n]) for n in ("2.1", "2.2", "2.3")}
    assert status == {"2.1": "passed", "2.2": "not written", "2.3": "unknown"}
    text = filled("2.1", "2.3").replace("if p.grad is not None", "if p.grad is not None and True")
    (copy / "set2_ddp.py").write_text(text, encoding="utf-8")
    assert Progress.of(copy).status(TASKS["2.1"]) == "changed"
    solve(copy, "2.1", "2.3")
    same = (copy / "set2_ddp.py").read_text(encoding="utf-8").replace("Hint: ", "# Hint: ")
    (copy / "set2_ddp.py").write_text("# comments and task texts do not count\n" + same, "utf-8")
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
