"""Which exercises one builds on. Read from the text alone: nothing is run."""

from __future__ import annotations

import ast
import functools
import hashlib
from pathlib import Path

from minidist.learn import checks, strip


def used(identifier: str, text: str) -> tuple[str, ...]:
    """The exercises of the same file that `identifier` calls, directly or not, in order.

    `text`: the learner's file; nothing is used when it is not valid Python.
    """
    found, nodes = _reached(identifier, text)
    found &= {getattr(n, "name", "") for n in nodes}
    others = (t for t in strip.all_tasks().values() if t.id != identifier)
    file = strip.all_tasks()[identifier].file
    return tuple(t.id for t in others if t.file == file and found & set(t.names))


def digest(identifier: str, text: str) -> str:
    """Changes when code that the check of `identifier` runs changes, and not with comments."""
    found, nodes = _reached(identifier, text)
    every = {name for t in strip.all_tasks().values() for name in t.names}
    parts = [n for n in nodes if getattr(n, "name", None) not in every - found]
    code = "\n".join(ast.dump(n) for n in parts) if parts else text
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def holes(text: str, identifier: str) -> list[str]:
    """Names of the functions that still hold a hole of `identifier`, inner ones of a class too."""
    hole = f"{identifier} {strip.NOT_WRITTEN}"
    found = []
    for node in ast.walk(_parsed(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            constants = (c.value for c in ast.walk(node) if isinstance(c, ast.Constant))
            if hole in constants:
                found.append(node.name)
    return found


@functools.cache
def asked(identifier: str) -> frozenset[str]:
    """The learner's names that the run of a check asks for (`mine.MiniDDP`)."""
    number = identifier.partition(".")[0]
    nodes: list[ast.stmt] = []
    for path in sorted(Path(checks.__file__).parent.glob(f"run{int(number)}*.py")):
        nodes += ast.parse(path.read_text(encoding="utf-8")).body
    found = _closure({checks.exercise(identifier).run}, nodes)
    return frozenset(
        a.attr
        for node in nodes
        if getattr(node, "name", None) in found
        for a in ast.walk(node)
        if isinstance(a, ast.Attribute) and getattr(a.value, "id", None) == "mine"
    )


def _reached(identifier: str, text: str) -> tuple[set[str], list[ast.stmt]]:
    nodes = _parsed(text).body
    return _closure({*strip.all_tasks()[identifier].names, *asked(identifier)}, nodes), nodes


@functools.lru_cache(maxsize=8)
def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _closure(names: set[str], nodes: list[ast.stmt]) -> set[str]:
    """`names` and the names that their definitions mention, and so on."""
    definitions = {n.name: n for n in nodes if hasattr(n, "name")}
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            inside = ast.walk(definitions[name]) if name in definitions else ()
            todo += [n.id for n in inside if isinstance(n, ast.Name)]
    return found
