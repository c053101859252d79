"""Grading: run an exercise with the learner's code, compare with the solution, find the mistake.

    right?      the same run with solutions/*.py, on ranks where no learner's code ever runs
    which one?  each known wrong answer through the same run, until one gives the learner's result

The ranks stay between checks. Those that ran a learner's code are replaced after any trouble, and
for every submission. This bounds accidents (hanging, forking, exiting, printing without end); it is
no sandbox against malice.
"""

from __future__ import annotations

import re
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minidist.comm.launch import RankFailure, Ranks
from minidist.learn import attempt as rank_side
from minidist.learn import strip
from minidist.learn.attempt import Attempt, Code
from minidist.learn.checks import Exercise, Wrong, exercise
from minidist.learn.compare import Difference, difference, same
from minidist.learn.story import Story, tell

PASSED, FAILED, NOT_WRITTEN, TIMEOUT = "passed", "failed", "not written", "timeout"
PRINTED_LINES = 12  # of what the learner's code prints, kept for the message
_NOT_THEIRS = re.compile(
    r"\[rank\d+\]:\[[A-Z]\d+ |^\[[WE]\d+ |^terminate called|^  what\(\)|enforce fail"
)


@dataclass(frozen=True)
class Verdict:
    """The result of one check. `zh` and `en`: what to tell; `facts`: lines for both languages (got
    and want, who waited where); `printed`: the end of what the code printed."""

    exercise: str
    status: str
    zh: str = ""
    en: str = ""
    known_mistake: str | None = None
    facts: tuple[str, ...] = ()
    printed: tuple[str, ...] = ()
    borrowed: tuple[str, ...] = ()
    seconds: float = 0.0

    def message(self, language: str) -> str:
        """The whole message in "zh" or "en"."""
        return "\n".join([getattr(self, language), *self.facts]).strip()

    def row(self) -> dict[str, Any]:
        """What `--json` writes."""
        return {
            "exercise": self.exercise,
            "status": self.status,
            "known_mistake": self.known_mistake,
            "message_zh": self.message("zh"),
            "message_en": self.message("en"),
            "seconds": round(self.seconds, 3),
        }


def from_folder(folder: Path, identifier: str) -> Code:
    """The learner's file for an exercise. Raises FileNotFoundError or UnicodeDecodeError."""
    path = Path(folder) / strip.all_tasks()[identifier].file
    return Code(str(path.resolve()), path.read_text(encoding="utf-8"))


@dataclass
class Grader:
    """Keeps ranks between checks; use as a context manager.

    `seconds`: limit for one run of a check, instead of the exercise's own.
    """

    seconds: float | None = None
    _trusted: dict[int, Ranks] = field(default_factory=dict)
    _learners: dict[int, Ranks] = field(default_factory=dict)
    _results: dict[tuple[str, str], list] = field(default_factory=dict)  # of known code

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_) -> None:
        self.new_submission()
        for ranks in self._trusted.values():
            ranks.close()
        self._trusted.clear()

    def new_submission(self) -> None:
        """End the ranks that ran learners' code: the next check gets fresh ones."""
        for ranks in self._learners.values():
            ranks.kill()
        self._learners.clear()

    # ------------------------------------------------------------------------------- one check

    def check(self, identifier: str, code: Code) -> Verdict:
        """Check one exercise. Never raises for what the learner's code does."""
        started = time.perf_counter()
        check = exercise(identifier)
        printed: deque[str] = deque(maxlen=PRINTED_LINES)
        verdict = self._check(check, code, printed)
        return Verdict(
            **{
                **vars(verdict),
                "printed": tuple(printed),
                "seconds": time.perf_counter() - started,
            }
        )

    def _check(self, check: Exercise, code: Code, printed: deque[str]) -> Verdict:
        problem = _syntax(code)
        if problem:
            return Verdict(check.id, FAILED, *problem)
        limit = self.seconds or check.seconds
        try:
            answers = self._run_learners(check, code, limit, printed)
        except RankFailure as failure:
            return self._failed(check, tell(failure, code.file, limit))
        if any(a.unwritten for a in answers):
            return Verdict(check.id, NOT_WRITTEN, "还没有写。", "Not written yet.")
        missing = next((a.missing for a in answers if a.missing), "")
        if missing:
            file = Path(code.file).name
            return Verdict(
                check.id,
                FAILED,
                f"{file} 里没有 `{missing}`：名字要和题目里的一样。",
                f"There is no `{missing}` in {file}: it needs the name that the task gives it.",
            )
        got = [a.value for a in answers]
        borrowed = answers[0].borrowed
        found = difference(got, self.right(check), check.tolerance)
        if found is None:
            return Verdict(check.id, PASSED, "通过。", "Passed.", borrowed=borrowed)
        mistake = self._recognised(check, got)
        zh, en = (mistake.zh, mistake.en) if mistake else _unknown(found)
        facts = _got_and_want(found)
        name = mistake.name if mistake else None
        return Verdict(check.id, FAILED, zh, en, name, facts, borrowed=borrowed)

    def _recognised(self, check: Exercise, got: list) -> Wrong | None:
        for wrong in check.wrongs:
            if not wrong.story and same(got, self.planted(check, wrong), check.tolerance):
                return wrong
        return None

    def _failed(self, check: Exercise, story: Story) -> Verdict:
        status = TIMEOUT if story.kind in ("deadlock", "timeout") else FAILED
        for wrong in check.wrongs:
            if wrong.story and re.search(wrong.story, story.text, re.DOTALL):
                return Verdict(check.id, status, wrong.zh, wrong.en, wrong.name, story.facts)
        return Verdict(check.id, status, story.zh, story.en, None, story.facts)

    # --------------------------------------------------------------------------------- running

    def right(self, check: Exercise) -> list:
        """What the run gives with the solution, per rank."""
        return self._known(check, "", solution(check.id))

    def planted(self, check: Exercise, wrong: Wrong) -> list:
        """What the run gives with a known wrong answer, per rank."""
        ours = solution(check.id)
        return self._known(check, wrong.name, Code(ours.file, wrong.plant(ours.text, check.id)))

    def _known(self, check: Exercise, name: str, code: Code) -> list:
        key = check.id, name
        if key not in self._results:
            try:
                self._results[key] = self._run_trusted(check, code)
            except RankFailure:  # a learner's code can end all processes of this user
                self._results[key] = self._run_trusted(check, code)
        return self._results[key]

    def _run_trusted(self, check: Exercise, code: Code) -> list:
        ranks = _standing(self._trusted, check.world)
        answers = ranks.run(
            rank_side.attempt, check.id, code, code, names(check.id),
            timeout=4 * check.seconds, on_output=lambda *_: None,
        )  # fmt: skip
        if any(a.dirty for a in answers):  # a wrong answer that does not wait, for one
            ranks.kill()
        return [a.value for a in answers]

    def _run_learners(self, check: Exercise, code: Code, limit: float, printed) -> list[Attempt]:
        def keep(rank: int, stream: str, line: str) -> None:
            if not _NOT_THEIRS.search(line) and not line.endswith("\r"):
                printed.append(f"[rank {rank}] {line[:200]}")

        ranks = _standing(self._learners, check.world)
        answers = ranks.run(
            rank_side.attempt, check.id, code, solution(check.id), names(check.id),
            timeout=limit, on_output=keep,
        )  # fmt: skip
        if any(a.dirty for a in answers):
            ranks.kill()
        return answers


def _standing(pools: dict[int, Ranks], world: int) -> Ranks:
    ranks = pools.get(world)
    if ranks is None or not ranks.alive:
        # With torch's own checks: a wrong collective is an error in 0.2 s instead of a crash.
        ranks = pools[world] = Ranks(world, debug=True)
    return ranks


def solution(identifier: str) -> Code:
    """Our solution's file."""
    return from_folder(strip.solutions_folder(), identifier)


def names(identifier: str) -> dict[str, tuple[str, ...]]:
    """The exercises of the same file, and the names of their functions and classes."""
    tasks = strip.all_tasks()
    file = tasks[identifier].file
    return {task.id: task.names for task in tasks.values() if task.file == file}


# ------------------------------------------------------------------------------------ messages


def _syntax(code: Code) -> tuple[str, str, None, tuple[str, ...]] | None:
    """What is wrong with the file before it can run, found without any rank."""
    if code.functions:
        return None
    try:
        compile(code.text, code.file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 0
        text = (getattr(error, "text", None) or "").strip()
        place = f"{Path(code.file).name}:{line}: {text}" if line else Path(code.file).name
        why = getattr(error, "msg", None) or str(error)
        return (
            "这个文件不是正确的 Python，所以里面的题都没法检查。",
            "This file is not valid Python, so none of its exercises can be checked.",
            None,
            (f"{why}", place),
        )
    return None


def _unknown(found: Difference) -> tuple[str, str]:
    zh, en = "结果不对。", "Not the expected result."
    return (f"{zh}{found.zh}", f"{en} {found.en}") if found.zh else (zh, en)


def _got_and_want(found: Difference) -> tuple[str, ...]:
    where = f" · {found.where}" if found.where else ""
    return (f"rank {found.rank}{where}", f"  得到 got   {found.got}", f"  应为 want  {found.want}")
