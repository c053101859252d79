"""``solutions/*.py`` is the one source of the exercises; this file reads it and makes the holes.

    # BEGIN HINT 2.3            the second hint, shown by `minidist check 2.3 --hint`; not in the
    # ...                       exercise file
    # END HINT
    # BEGIN SOLUTION 2.3        becomes "not written yet" in the exercise file
    ...
    # END SOLUTION

The task text is the docstring of the first function or class that holds the hole; its first line is
``2.3 Chinese title | English title (minutes min)``. An exercise may have several holes.

    python -m minidist.learn.strip            write exercises/ from solutions/
    python -m minidist.learn.strip --check    exit 1 and show the difference if they are not in step
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import re
import sys
from dataclasses import dataclass
from pathlib import Path

_MARK = re.compile(r"^(\s*)# (BEGIN|END) (SOLUTION|HINT)(?: (\S+))?\s*$")
_TITLE = re.compile(r"^(\d+\.\d+) (.+?) \| (.+?) \((\d+) min\)$")
_CJK = re.compile(r"[\u3400-\u9fff\uff00-\uffef]")
# Chinese punctuation has its own room: no space beside it where lines are joined.
_NO_SPACE = re.compile(r".[\u3000-\u303f\uff00-\uffef]|[\u3000-\u303f\uff00-\uffef].")
NOT_WRITTEN = "还没有写 | not written yet"


class MarkError(ValueError):
    """The markers of a solution file do not fit together."""


@dataclass(frozen=True)
class Task:
    """One exercise as the solution file tells it.

    `names`: the functions and classes with a hole, in order. `text`: the task, paragraphs of both
    languages. `solution`: the functions with the holes filled, as one text. `hint`: the second
    hint. `skeleton`: the code that is given, without the task text.
    """

    id: str
    file: str
    names: tuple[str, ...]
    title_zh: str
    title_en: str
    minutes: int
    text: str
    hint: str
    solution: str
    skeleton: str

    def words(self, language: str) -> str:
        """The task text in "zh" or "en"; paragraphs of code belong to both."""
        return flowed(in_language(self.text, language))


def in_language(text: str, language: str) -> str:
    """The paragraphs of one language ("zh", "en"), or all of them ("both")."""
    if language == "both":
        return text
    paragraphs = re.split(r"\n\s*\n", text)
    other = (lambda p: not _CJK.search(p)) if language == "zh" else _CJK.search
    return "\n\n".join(p for p in paragraphs if not other(p) or p.startswith("    "))


def flowed(text: str) -> str:
    """Paragraphs without the line breaks that only the width of a source file asked for."""
    lines: list[str] = []
    for line in text.splitlines():
        before = lines[-1] if lines else ""
        item = re.match(r"- |提示：|Hint: |    ", line)
        if not line.strip() or not before.strip() or item or before.startswith("    "):
            lines.append(line)
            continue
        line = line.strip()
        edge = before[-1] + line[0]
        close = _NO_SPACE.match(edge) or all(map(_CJK.match, edge))
        lines[-1] = before + ("" if close else " ") + line
    return "\n".join(lines)


def strip(text: str, file: str = "<solution>") -> str:
    """A solution file's text with every solution replaced by a hole, and without second hints."""
    out: list[str] = []
    for kind, name, line, indent in _walk(text, file):
        if kind == "begin SOLUTION":
            out.append(f"{indent}# TODO {name}: 在这里写你的代码 | your code here")
            out.append(f'{indent}raise NotImplementedError("{name} {NOT_WRITTEN}")')
        elif kind == "text":
            out.append(line)
    return "\n".join(out) + "\n"


def parse(text: str, file: str) -> dict[str, Task]:
    """The tasks of one solution file, by number, in the file's order."""
    held: dict[str, list[str]] = {}  # "HINT 2.3" -> its lines
    rows: dict[str, list[int]] = {}  # "2.3" -> line numbers of its holes
    for number, (kind, name, line, _) in enumerate(_walk(text, file), 1):
        if kind.startswith("in "):
            held.setdefault(f"{kind[3:]} {name}", []).append(line)
        elif kind == "begin SOLUTION":
            rows.setdefault(name, []).append(number)
    tree = ast.parse(text)
    definitions = [n for n in tree.body if hasattr(n, "name")]
    stubs = strip(text, file)
    given = {n.name: n for n in ast.parse(stubs).body if hasattr(n, "name")}
    tasks = {}
    for name, numbers in rows.items():
        around = [d for d in definitions if any(d.lineno < n <= d.end_lineno for n in numbers)]
        doc = ast.get_docstring(around[0]) if around else None
        title = _TITLE.match((doc or "").partition("\n")[0])
        if not title or title[1] != name:
            raise MarkError(f"{file}: the hole {name} needs a task '{name} 标题 | Title (10 min)'")
        hint = held.get(f"HINT {name}", [])
        tasks[name] = Task(
            id=name,
            file=file,
            names=tuple(d.name for d in around),
            title_zh=title[2],
            title_en=title[3],
            minutes=int(title[4]),
            text=doc.partition("\n")[2].strip("\n"),
            hint="\n".join(line.strip().removeprefix("#").removeprefix(" ") for line in hint),
            solution=_solved(text, tree, numbers),
            skeleton="\n\n\n".join(_code(stubs, given[d.name]) for d in around),
        )
    return tasks


def _solved(text: str, tree: ast.Module, numbers: list[int]) -> str:
    """The functions around the holes that begin at these lines, filled."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    parts: dict[int, str] = {}
    for number in numbers:
        around = [n for n in ast.walk(tree) if isinstance(n, kinds)]
        around = [n for n in around if n.lineno < number <= n.end_lineno]
        inner = max(around, key=lambda n: n.lineno)
        parts[inner.lineno] = _code(text, inner)
    return "\n\n".join(parts[line] for line in sorted(parts))


def _code(text: str, node) -> str:
    """The source of a function or class, without its docstring and our marks."""
    lines = text.splitlines()
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    chosen = range(first, node.end_lineno + 1)
    if ast.get_docstring(node, clean=False) is not None:
        doc = node.body[0]
        chosen = [n for n in chosen if not doc.lineno <= n <= doc.end_lineno]
    out, hint = [], False
    for line in (lines[n - 1] for n in chosen):
        mark = _MARK.match(line)
        hint = mark[2] == "BEGIN" and mark[3] == "HINT" if mark else hint
        if not mark and not hint:
            out.append(line)
    return inspect.cleandoc("\n" + "\n".join(out))


def _walk(text: str, file: str):
    """(kind, id, line, indent) for every line; kind: text, begin X, in X or end X."""
    inside: tuple[str, str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        mark = _MARK.match(line)
        if not mark:
            yield (f"in {inside[0]}", inside[1], line, "") if inside else ("text", "", line, "")
            continue
        indent, edge, what, name = mark.groups()
        if edge == "BEGIN" and (inside or not name):
            raise MarkError(f"{file}:{number}: {'a number is missing' if not name else 'nested'}")
        if edge == "END" and (not inside or inside[0] != what):
            raise MarkError(f"{file}:{number}: END {what} without its BEGIN")
        yield f"{edge.lower()} {what}", name or inside[1], line, indent
        inside = (what, name) if edge == "BEGIN" else None
    if inside:
        raise MarkError(f"{file}: BEGIN {inside[0]} {inside[1]} has no END")


# -------------------------------------------------------------------------------------- the folders


def solutions_folder() -> Path:
    """Beside this package, as in a checkout; else in the working folder."""
    beside = Path(__file__).parents[2] / "solutions"
    for folder in (beside, Path("solutions").resolve()):
        if any(folder.glob("set*.py")):
            return folder
    raise FileNotFoundError(
        "the exercises are part of a checkout of minidist: run this where the folder solutions/ is"
    )


@functools.cache
def all_tasks() -> dict[str, Task]:
    """Every exercise, by number, in order."""
    tasks: dict[str, Task] = {}
    for path in sorted(solutions_folder().glob("set*.py")):
        for name, task in parse(path.read_text(encoding="utf-8"), path.name).items():
            if name in tasks:
                raise MarkError(f"exercise {name} is in {tasks[name].file} and in {path.name}")
            tasks[name] = task
    return dict(sorted(tasks.items(), key=lambda item: order(item[0])))


def order(name: str) -> tuple[int, ...]:
    """2.10 comes after 2.9."""
    return tuple(int(part) for part in name.split("."))


def main(arguments: list[str]) -> int:
    source = solutions_folder()
    target = source.parent / "exercises"
    different = 0
    for path in sorted(source.glob("set*.py")):
        want = strip(path.read_text(encoding="utf-8"), path.name)
        there = target / path.name
        have = there.read_text(encoding="utf-8") if there.exists() else ""
        if have == want:
            continue
        different += 1
        if "--check" in arguments:
            lines = have.splitlines(True), want.splitlines(True)
            sys.stdout.writelines(difflib.unified_diff(*lines, str(there), "from solutions"))
        else:
            target.mkdir(exist_ok=True)
            there.write_text(want, encoding="utf-8")
    for path in sorted(target.glob("set*.py")):
        if not (source / path.name).exists():
            different += 1
            print(f"{path} has no solution file")
    return int("--check" in arguments and different > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
