"""``check("2.3", make_buckets)`` in a notebook: the same checks as ``minidist check``."""

from __future__ import annotations

import html
import re
import types
from collections.abc import Callable

from minidist.comm import worker
from minidist.learn import strip, uses, words
from minidist.learn.attempt import Code
from minidist.learn.grade import NOT_WRITTEN, PASSED, Grader, Verdict
from minidist.learn.strip import Task

_CELL = re.compile(r"\b\d+\.py:")  # ipykernel's name for the file of a cell
_grader: Grader | None = None


def check(
    exercise: str, *functions: Callable, timeout: float | None = None, hint: bool = False
) -> None:
    """Check your functions for an exercise on real ranks, or show its task.

        check("2.3")                     the task text, in both languages (%lang chooses one)
        check("2.3", hint=True)          the second hint
        check("2.3", make_buckets)       run the check and say what went wrong
        check("4.1", cut, gather)        exercises with several functions, in the task's order

    Where an exercise uses an earlier one, yours is taken if the notebook has it, else ours. The
    first check starts the ranks (2 seconds); they stay. `timeout`: seconds for one check.
    Raises ValueError for an exercise that does not exist, TypeError for the wrong number of
    functions.
    """
    tasks = strip.all_tasks()
    if str(exercise) not in tasks:
        raise ValueError(f"there is no exercise {exercise!r}; there are {', '.join(tasks)}")
    task = tasks[str(exercise)]
    if hint:
        _show(task, lambda language: strip.in_language(task.hint, language))
        return
    if not functions:
        _show(task, lambda language: f"{task.words(language)}\n\n\n{task.skeleton}")
        return
    if len(functions) != len(task.names) or not all(map(callable, functions)):
        raise TypeError(f"check({exercise!r}, {', '.join(task.names)}) needs exactly these")
    first = _grader is None
    if first:
        _note("正在启动进程，约 2 秒 … | starting the processes, about 2 seconds ...")
    verdict = verdict_of(task, functions, timeout, _notebook())
    if first:
        _clear()
    _show(task, lambda language: _text(task, verdict, language))


def verdict_of(
    task: Task, functions, timeout: float | None = None, around: dict | None = None
) -> Verdict:
    """The result of a check as data. `around`: the notebook's names, for earlier exercises."""
    global _grader
    if _grader is None:
        _grader = Grader()
    _grader.seconds = timeout
    own = dict(zip(task.names, functions, strict=True))
    file = {n for t in strip.all_tasks().values() if t.file == task.file for n in t.names}
    for name in uses.asked(task.id) & file - set(own):
        if callable((around or {}).get(name)):
            own[name] = around[name]
    return _grader.check(task.id, Code(_file_of(functions[0]), functions=worker.dumps(own)))


def _notebook() -> dict:
    from IPython import get_ipython

    shell = get_ipython()
    return shell.user_ns if shell else {}


def _note(text: str) -> None:
    print(text, flush=True)


def _clear() -> None:
    from IPython.display import clear_output

    clear_output(wait=True)  # until the verdict is there


def _file_of(function: Callable) -> str:
    """Where the function was written, so that its lines can be shown."""
    if isinstance(function, type):
        methods = [v for v in vars(function).values() if isinstance(v, types.FunctionType)]
        function = methods[0] if methods else function
    code = getattr(function, "__code__", None)
    return code.co_filename if code else ""


def _text(task: Task, verdict: Verdict, language: str) -> str:
    mark = {PASSED: "✓", NOT_WRITTEN: "·"}.get(verdict.status, "✗")
    lines = [f"{mark} {task.id}  {getattr(verdict, language)}"]
    lines += [f"    {_CELL.sub('In[…]:', words.said(fact, language))}" for fact in verdict.facts]
    if verdict.printed:
        lines.append("    " + {"zh": "你的代码打印了：", "en": "Your code printed:"}[language])
        lines += [f"    {line}" for line in verdict.printed]
    if verdict.borrowed and verdict.status != NOT_WRITTEN:
        numbers = ", ".join(verdict.borrowed)
        zh = f"（用到了 {numbers}，Notebook 里没有，这里用的是我们的。）"
        en = f"(It uses {numbers}, which the notebook does not have: ours stood in.)"
        lines.append("    " + {"zh": zh, "en": en}[language])
    return "\n".join(lines)


def _show(task: Task, text_in: Callable[[str], str]) -> None:
    from IPython.display import display

    titles = {"zh": f"{task.id} {task.title_zh}", "en": f"{task.id} {task.title_en}"}
    blocks, plain = [], []
    for language in ("zh", "en"):
        text = text_in(language)
        # `pre` keeps the layout, and blank lines in it do not end the block for Markdown.
        body = f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>'
        title = f"<strong>{html.escape(titles[language])}</strong>"
        blocks.append(f'<div lang="{language}">\n\n{title}\n\n{body}\n\n</div>')
        plain.append(f"{titles[language]}\n\n{text}")
    bundle = {"text/markdown": "\n\n".join(blocks), "text/plain": "\n\n".join(plain)}
    display(bundle, raw=True)
