"""How verdicts, tasks and progress look in a terminal, in one language or both."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minidist.learn import strip
from minidist.learn.grade import FAILED, NOT_WRITTEN, PASSED, TIMEOUT, Verdict
from minidist.learn.progress import Progress
from minidist.learn.strip import Task
from minidist.learn.words import both, said

_MARKS = {
    PASSED: ("✓", "green"),
    FAILED: ("✗", "red"),
    TIMEOUT: ("⧗", "red"),
    NOT_WRITTEN: ("·", "dim"),
    "changed": ("?", "yellow"),
    "unknown": ("·", "dim"),
}
# What stays on one line: a command or call, a word, one Chinese character; with the marks after it.
_WIDE = r"\u3000-\u9fff\uff00-\uffef"
_MARKS_AFTER = r"[，。：；、）”！？]*"
_PIECE = re.compile(
    rf"`[^`]*`[^\s{_WIDE}]*{_MARKS_AFTER}\s*|[（“]*(?:[^\s{_WIDE}]+(?:\([^()\n]*\))?|[{_WIDE}]){_MARKS_AFTER}\s*|\s+"
)
_LEGEND = {
    "zh": "✓ 通过  ✗ 还不对  ⧗ 没有完成  ? 改过，还没再检查  · 还没有写",
    "en": "✓ passed  ✗ not yet right  ⧗ did not finish  ? changed since  · not written yet",
}


def title(task: Task, language: str) -> str:
    """``2.1 平均梯度 | Average the gradients``."""
    return f"{task.id} " + " | ".join(both(task.title_zh, task.title_en, language))


def show_folder(console: Console, folder: Path, language: str) -> None:
    """Which folder is checked: as short as it can be said from here."""
    here = Path.cwd()
    shown = folder.relative_to(here) if folder.is_relative_to(here) else folder
    words = " | ".join(both("检查的文件夹", "checking", language))
    console.print(Text(f"{words}: {folder if folder == here else shown}"), soft_wrap=True)


def show_verdict(console: Console, verdict: Verdict, language: str, again: bool = False) -> None:
    """One line when it is fine, the message with its facts when not; `again`: it is the last one's
    message, which is not repeated."""
    task = strip.all_tasks()[verdict.exercise]
    mark, style = _MARKS[verdict.status]
    line = Text(f"{mark} ", style=style)
    line.append(title(task, language), style="" if verdict.status == NOT_WRITTEN else "bold")
    if verdict.status == NOT_WRITTEN:
        zh, en = verdict.zh.rstrip("。"), verdict.en.rstrip(".")
        en = en[:1].lower() + en[1:]
        line.append("  " + " | ".join(both(zh, en, language)), style="dim")
    if again:
        line.append("  " + " | ".join(both("同上", "the same", language)), style="dim")
    console.print(line, soft_wrap=True)
    if again:
        return
    if verdict.status in (FAILED, TIMEOUT):
        for text in both(verdict.zh, verdict.en, language):
            console.print(Text(text), style="yellow", soft_wrap=True)
        for fact in verdict.facts:
            console.print(Text("    " + said(fact, language)), soft_wrap=True)
    if verdict.printed and verdict.status != NOT_WRITTEN:
        heading = " | ".join(both("你的代码打印了", "your code printed", language))
        console.print(Text(f"    {heading}:"), style="dim")
        for printed in verdict.printed:
            console.print(Text("    " + printed), style="dim", soft_wrap=True)
    if verdict.borrowed and verdict.status != NOT_WRITTEN:
        numbers = ", ".join(verdict.borrowed)
        zh = f"（用到了你还没有写的 {numbers}，这里先用了我们的。）"
        en = f"(It uses {numbers}, not written yet: ours stood in.)"
        console.print(Text("    " + " ".join(both(zh, en, language))), style="dim", soft_wrap=True)
    if verdict.status in (FAILED, TIMEOUT):
        console.print()


def show_task(console: Console, task: Task, language: str) -> None:
    """The task text."""
    console.print(Text(f"{title(task, language)}  ({task.minutes} min)"), style="bold")
    console.print(Text("\n" + wrapped(task.words(language), console.width)), soft_wrap=True)


def show_hint(console: Console, task: Task, language: str) -> None:
    """The second hint."""
    heading = " | ".join(both("第二个提示", "second hint", language))
    console.print(Text(f"{title(task, language)} · {heading}\n"), style="bold")
    hint = strip.flowed(strip.in_language(task.hint, language))
    console.print(Text(wrapped(hint, console.width)), soft_wrap=True)


def wrapped(text: str, width: int) -> str:
    """Lines of at most `width` columns, broken between words or Chinese characters, never inside
    a piece of code or before a punctuation mark."""
    out = []
    for line in text.splitlines():
        indent = "  " if line.startswith("- ") else ""
        row = ""
        for piece in _PIECE.findall(line):
            if row and cell_len(row + piece.rstrip()) > width and row.strip():
                out.append(row.rstrip())
                row = indent + piece.lstrip()
            else:
                row += piece
        out.append(row.rstrip())
    return "\n".join(out)


def show_progress(
    console: Console, progress: Progress, language: str, shown: list[Task] | None = None
) -> None:
    """One line per set, of those that `shown` is in or of all: what is solved."""
    table = Table.grid(padding=(0, 2))
    solved = 0
    sets = {task.id.partition(".")[0] for task in shown or strip.all_tasks().values()}
    tasks = [t for t in strip.all_tasks().values() if t.id.partition(".")[0] in sets]
    for number in sorted({task.id.partition(".")[0] for task in tasks}, key=int):
        members = [task for task in tasks if task.id.partition(".")[0] == number]
        marks, passed = Text(), 0
        for task in members:
            status = progress.status(task)
            mark, style = _MARKS.get(status, _MARKS["unknown"])
            marks.append(mark + " ", style=style)
            passed += status == PASSED
        solved += passed
        titles = [_set_title(file) for file in dict.fromkeys(task.file for task in members)]
        zh, en = "、".join(t[0] for t in titles), ", ".join(t[1] for t in titles)
        name = " | ".join(dict.fromkeys(both(zh, en, language)))
        table.add_row(f"  {number}", name, marks, f"{passed}/{len(members)}")
    console.print()
    console.print(table)
    console.print(f"  {solved}/{len(tasks)}")
    for legend in both(*_LEGEND.values(), language):
        console.print(f"  {legend}", style="dim", soft_wrap=True)


def _set_title(file: str) -> tuple[str, str]:
    text = (strip.solutions_folder() / file).read_text(encoding="utf-8")
    first = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    zh, _, en = first.partition(" | ")
    return zh.partition("：")[2] or zh, en.partition(": ")[2] or en
