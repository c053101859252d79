"""The table of checks: per exercise one run on ranks, and the known wrong answers.

    set2.py     for the grader: the table of set 2, with the messages; imports nothing heavy
    run2.py     for the ranks: what is done with the learner's functions in set 2

The right answer is nowhere written down: it is what the same run gives with the solution. A wrong
answer is the solution with an edit, so it stays in step when the solution is rewritten, and the
tests plant every one of them to see that exactly its message appears.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Wrong:
    """A classic mistake: the solution with `edits` (old, new), and what to tell who made it.

    `story`: for mistakes that never give a result, a regular expression that the failure's story
    must contain ("deadlock", the text of an exception); the wrong code is then not run to compare.
    """

    name: str
    zh: str
    en: str
    edits: tuple[tuple[str, str], ...]
    story: str = ""

    def plant(self, source: str, identifier: str) -> str:
        """The text of a solution file with this mistake in it, in the holes of that exercise."""
        # Odd parts are the holes, each with its END line.
        hole = rf"(# BEGIN SOLUTION {re.escape(identifier)}\n.*?# END SOLUTION\n)"
        parts = re.split(hole, source, flags=re.DOTALL)
        for old, new in self.edits:
            places = [i for i in range(1, len(parts), 2) if old in parts[i]]
            if len(places) != 1 or parts[places[0]].count(old) != 1:
                raise ValueError(
                    f"{identifier}, wrong answer {self.name!r}: {old!r} must be there once"
                )
            parts[places[0]] = parts[places[0]].replace(old, new)
        return "".join(parts)


@dataclass(frozen=True)
class Exercise:
    """How one exercise is checked.

    `run` is the name of a function `run(mine)` in the set's run file, called on every one of
    `world` ranks; `mine` has the learner's functions as attributes (`mine.average_gradients`), and
    `mine.spy` knows what they sent. It returns what is compared with the solution's: a dict of
    labels ("gradient 梯度") to numbers, tensors, strings, lists or dicts of these. Labels are
    compared in order, and the first difference is shown.
    """

    id: str
    run: str
    wrongs: tuple[Wrong, ...]
    world: int = 2
    tolerance: float = 1e-5  # relative, and absolute for values below 1
    seconds: float = 10.0  # limit for one run


def wrong(name: str, zh: str, en: str, *edits: tuple[str, str], story: str = "") -> Wrong:
    """A `Wrong`, in the order in which one reads it."""
    return Wrong(name, zh, en, tuple(edits), story)


def exercise(identifier: str) -> Exercise:
    """The check of one exercise. Raises KeyError for a number that does not exist."""
    found = [e for e in _module("set", identifier).EXERCISES if e.id == identifier]
    if not found:
        raise KeyError(identifier)
    return found[0]


def run_of(check: Exercise) -> Callable[[Any], Any]:
    """The function that runs a check; for the ranks, because it needs torch."""
    return getattr(_module("run", check.id), check.run)


def _module(kind: str, identifier: str):
    number = identifier.partition(".")[0]
    try:
        return importlib.import_module(f"{__name__}.{kind}{int(number)}")
    except ValueError:
        raise KeyError(identifier) from None
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{kind}{int(number)}":
            raise
        raise KeyError(identifier) from None
