"""``minidist check`` and ``minidist start-exercises``."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.text import Text

from minidist.learn import exercise_report as report
from minidist.learn import strip, uses
from minidist.learn.grade import (
    FAILED,
    NOT_WRITTEN,
    PASSED,
    Code,
    Grader,
    Verdict,
    from_folder,
)  # fmt: skip
from minidist.learn.progress import Progress, written
from minidist.learn.strip import Task
from minidist.learn.words import LANGUAGES, both

# typer reads annotations itself, and on Python 3.10 only knows Optional.
Numbers = Optional[list[str]]  # noqa: UP045
OptionalFolder = Optional[Path]  # noqa: UP045
OptionalText = Optional[str]  # noqa: UP045
OptionalSeconds = Optional[float]  # noqa: UP045

POLL = 0.3  # seconds between two looks at the files
EXTRAS = ("README.md", "test_mine.py")  # what comes along with the holes


def check(
    exercises: Annotated[
        Numbers, typer.Argument(help="2.3, a whole set like 2, or nothing for all of them.")
    ] = None,
    src: Annotated[
        OptionalFolder,
        typer.Option(help="Folder with your files, or with one folder per submission."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Check again on every save.")] = False,
    task: Annotated[bool, typer.Option("--task", help="Show the task text.")] = False,
    hint: Annotated[bool, typer.Option("--hint", help="Show the second hint.")] = False,
    solution: Annotated[
        bool, typer.Option("--solution", help="Show our solution, after one try of yours.")
    ] = False,
    lang: Annotated[str, typer.Option(help="zh, en or both.")] = "both",
    timeout: Annotated[OptionalSeconds, typer.Option(help="Seconds for one check.")] = None,
    json_file: Annotated[
        OptionalText, typer.Option("--json", help="Write the results here (- for the terminal).")
    ] = None,
) -> int:
    """Check your exercises on real ranks, and say what went wrong.

    Example: minidist check 2.1 --src my-exercises
    """
    _language(lang)
    if timeout is not None and not timeout > 0:
        raise typer.BadParameter("--timeout must be more than 0 seconds")
    tasks = _tasks(exercises or [], lang)
    console = Console(highlight=False, stderr=json_file == "-")
    if task or hint:
        for one in tasks:
            (report.show_task if task else report.show_hint)(console, one, lang)
        return 0
    folder = _folder(src)
    if solution:
        return _show_solutions(console, folder, tasks, lang)
    if watch:
        report.show_folder(console, folder, lang)
        return _watch(console, folder, tasks, lang, timeout)
    if json_file not in (None, "-"):
        from minidist.train.report import writable

        problem = writable(json_file)
        if problem:
            raise typer.BadParameter(f"--json: {problem}")
    report.show_folder(console, folder, lang)
    if not _is_submission(folder):
        return _grade_all(console, folder, tasks, lang, timeout, json_file)
    with Grader(timeout) as grader:
        # A teacher's run leaves nothing in the folder.
        verdicts = _grade(console, grader, folder, tasks, lang, remember=json_file is None)
    if json_file:
        _write(json_file, [v.row() for v in verdicts])
    else:
        report.show_progress(console, Progress.of(folder), lang, tasks)
    return int(any(v.status != PASSED for v in verdicts))


def start_exercises(
    folder: Annotated[Path, typer.Argument(help="Where your copy of the exercises shall be.")],
    lang: Annotated[str, typer.Option(help="zh, en or both.")] = "both",
) -> int:
    """Copy the exercises to a folder of your own, which no update overwrites.

    Example: minidist start-exercises my-exercises
    """
    _language(lang)
    source = strip.solutions_folder().parent / "exercises"
    files = sorted(source.glob("set*.py")) + [source / name for name in EXTRAS]
    if folder.exists() and not folder.is_dir():
        raise typer.BadParameter(f"{folder} is a file")
    folder.mkdir(parents=True, exist_ok=True)
    copied = 0
    for path in files:
        if not (folder / path.name).exists():  # never over somebody's work
            shutil.copyfile(path, folder / path.name)
            copied += 1
    kept = len(files) - copied
    mine = folder / "set2_ddp.py"
    zh = f"{folder}：{copied} 个文件已复制，{kept} 个已存在、未改动"
    en = f"{folder}: {copied} files copied, {kept} were there and are untouched"
    print(*both(zh, en, lang), "", sep="\n")
    zh = f"现在编辑一个文件，例如 {mine}，再检查其中的题："
    en = f"Now edit a file, for instance {mine}, and check its exercises:"
    print(*both(zh, en, lang), f"\n  minidist check 2.1 --src {folder}", sep="\n")
    return 0


def _language(lang: str) -> None:
    if lang not in LANGUAGES:
        raise typer.BadParameter(f"--lang is zh, en or both, not {lang!r}")


# ------------------------------------------------------------------------------------- one folder


def _grade(
    console: Console,
    grader: Grader,
    folder: Path,
    tasks: list[Task],
    lang: str,
    remember: bool,
    quiet: bool = False,
) -> list[Verdict]:
    """`quiet`: of what is not written yet, only the number is shown."""
    progress = Progress.of(folder)
    verdicts: list[Verdict] = []
    last: tuple | None = None
    for task in tasks:
        verdict = check_one(grader, folder, task)
        story = task.file, verdict.zh, *verdict.facts, *verdict.printed
        again = story == last and verdict.status == FAILED
        if not (quiet and verdict.status == NOT_WRITTEN):
            report.show_verdict(console, verdict, lang, again)
        last = story
        progress.note(task, verdict.status)
        if remember:
            progress.save()  # each time: the next one may be interrupted
        verdicts.append(verdict)
    left = sum(v.status == NOT_WRITTEN for v in verdicts) if quiet else 0
    if left:
        zh, en = f"{left} 道题还没有写", f"{left} not written yet"
        console.print("· " + " | ".join(both(zh, en, lang)), style="dim")
    return verdicts


def check_one(grader: Grader, folder: Path, task: Task) -> Verdict:
    """One exercise of a folder; a file that is missing or unreadable is a result as well."""
    try:
        code = from_folder(folder, task.id)
    except FileNotFoundError:
        return Verdict(task.id, FAILED, f"没有文件 {task.file}。", f"There is no file {task.file}.")
    except (OSError, UnicodeDecodeError) as error:
        zh, en = f"文件 {task.file} 读不了。", f"The file {task.file} cannot be read."
        return Verdict(task.id, FAILED, zh, en, facts=(str(error),))
    return grader.check(task.id, code)


def _show_solutions(console: Console, folder: Path, tasks: list[Task], lang: str) -> int:
    progress = Progress.of(folder)
    refused = False
    for task in tasks:
        console.print(Text(report.title(task, lang)), style="bold")
        if progress.tried(task):
            console.print(Text(task.solution + "\n"), soft_wrap=True)
            continue
        refused = True
        zh = f"先自己写一次，用 minidist check {task.id} 检查过之后，就可以看我们的解答。"
        en = f"Write something of your own first; after minidist check {task.id} ours is shown."
        for text in both(zh, en, lang):
            console.print(Text(text), style="yellow", soft_wrap=True)
    return int(refused)


def _watch(
    console: Console, folder: Path, tasks: list[Task], lang: str, timeout: float | None
) -> int:
    """Check again what changed, until Ctrl-C."""
    checked: dict[str, str] = {}
    with Grader(timeout) as grader:
        while True:
            now = {t.id: _with_used(folder, t) for t in tasks}
            time.sleep(POLL)
            changed = [t for t in tasks if checked.get(t.id) != now[t.id]]
            # A file is empty or half there while an editor writes it: wait until it stays the same.
            if not changed or any(now[t.id] != _with_used(folder, t) for t in changed):
                continue
            checked |= {t.id: now[t.id] for t in changed}
            console.rule(time.strftime("%H:%M:%S"))
            _grade(console, grader, folder, changed, lang, remember=True, quiet=True)
            report.show_progress(console, Progress.of(folder), lang, tasks)


def _with_used(folder: Path, task: Task) -> str:
    """Changes when the exercise changes, or one that it uses."""
    try:
        text = (folder / task.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        text = ""
    every = strip.all_tasks()
    return "".join(written(folder, every[n]) for n in (task.id, *uses.used(task.id, text)))


# ------------------------------------------------------------------------------- many submissions


def _grade_all(
    console: Console,
    folder: Path,
    tasks: list[Task],
    lang: str,
    timeout: float | None,
    json_file: str | None,
) -> int:
    """Every sub-folder is one submission, on ranks of its own."""
    rows, wrong = [], 0
    with Grader(timeout) as grader:
        for submission in sorted(p for p in folder.iterdir() if _is_submission(p)):
            console.rule(submission.name)
            verdicts = _grade(console, grader, submission, tasks, lang, remember=False)
            grader.new_submission()
            passed = sum(v.status == PASSED for v in verdicts)
            console.print(f"  {submission.name}: {passed}/{len(verdicts)}")
            wrong += len(verdicts) - passed
            rows += [{"submission": submission.name, **v.row()} for v in verdicts]
    if json_file:
        _write(json_file, rows)
    return int(wrong > 0)


def _write(json_file: str, rows: list[dict]) -> None:
    from minidist.train.report import document, write_json

    if json_file == "-":
        json.dump(document(rows), sys.stdout, indent=1, ensure_ascii=False)
        print()
    else:
        write_json(json_file, document(rows))


# ------------------------------------------------------------------------------------- arguments


def _tasks(selection: list[str], lang: str) -> list[Task]:
    try:
        tasks = strip.all_tasks()
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error)) from None
    if not selection:
        return list(tasks.values())
    chosen = []
    for number in selection:
        found = [t for t in tasks.values() if number in (t.id, t.id.partition(".")[0])]
        if not found:
            sets = sorted({t.partition(".")[0] for t in tasks}, key=int)
            zh = f"没有练习 {number}；有第 {sets[0]} 到 {sets[-1]} 组，例如 2 或 2.1"
            en = f"there is no exercise {number}; sets {sets[0]} to {sets[-1]}, like 2 or 2.1"
            raise typer.BadParameter(" | ".join(both(zh, en, lang)))
        chosen += [t for t in found if t not in chosen]
    return chosen


def _folder(src: Path | None) -> Path:
    """Where the learner's files are: --src, else the working folder, else its exercises/, else
    those beside this package."""
    if src is not None:
        if not src.is_dir():
            raise typer.BadParameter(f"there is no folder {src}")
        if not _is_submission(src) and not any(_is_submission(p) for p in src.iterdir()):
            raise typer.BadParameter(f"no exercise files (set*.py) in {src}")
        return src.resolve()
    beside = strip.solutions_folder().parent / "exercises"
    places = [Path(), Path("exercises"), beside]
    return next((p for p in places if _is_submission(p)), beside).resolve()


def _is_submission(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("set*.py"))


__all__ = ["Code", "check", "check_one", "start_exercises"]
