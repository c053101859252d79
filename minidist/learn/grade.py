"""Grading: run an exercise with the learner's code, compare with the solution, find the mistake.

    right?      the same run with solutions/*.py, on ranks where no learner's code ever runs
    which one?  each known wrong answer through the same run, until one gives the learner's result,
                else the learner's result in the first case that is wrong
    whose?      when the exercise uses an earlier one that does not pass, that one is named instead

The ranks stay between checks. Those that ran a learner's code are replaced after any trouble, and
for every submission. This bounds accidents (hanging, forking, exiting, printing without end); it is
no sandbox against malice.
"""

from __future__ import annotations

import re
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minidist.comm.launch import RankFailure, Ranks
from minidist.learn import attempt as rank_side
from minidist.learn import strip, uses
from minidist.learn.attempt import Attempt, Code
from minidist.learn.checks import Exercise, Wrong, exercise
from minidist.learn.compare import Difference, difference, first_case, same, same_case
from minidist.learn.story import Story, tell
from minidist.learn.words import Fact, label, said

PASSED, FAILED, NOT_WRITTEN, TIMEOUT = "passed", "failed", "not written", "timeout"
PRINTED_LINES = 12  # of what the learner's code prints, kept for the message
_NOT_THEIRS = re.compile(
    r"\[rank\d+\]:\[[A-Z]\d+ |^\[[WE]\d+ |^terminate called|^  what\(\)|enforce fail"
)


@dataclass(frozen=True)
class Verdict:
    """The result of one check. `zh` and `en`: what to tell; `facts`: more lines (got and want, who
    waited where); `printed`: the end of what the code printed; `whole_file`: it is the same for
    every exercise of the file."""

    exercise: str
    status: str
    zh: str = ""
    en: str = ""
    known_mistake: str | None = None
    facts: tuple[str, ...] = ()
    printed: tuple[str, ...] = ()
    borrowed: tuple[str, ...] = ()
    seconds: float = 0.0
    whole_file: bool = False

    def message(self, language: str) -> str:
        """The whole message in "zh" or "en"."""
        facts = (said(fact, language) for fact in self.facts)
        return "\n".join([getattr(self, language), *facts]).strip()

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
    _statuses: dict[tuple[str, str], str] = field(default_factory=dict)  # of learners' code

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
        self._statuses.clear()

    # ------------------------------------------------------------------------------- one check

    def check(self, identifier: str, code: Code) -> Verdict:
        """Check one exercise. Never raises for what the learner's code does."""
        started = time.perf_counter()
        check = exercise(identifier)
        printed: deque[str] = deque(maxlen=PRINTED_LINES)
        verdict = self._check(check, code, printed)
        if verdict.status in (FAILED, TIMEOUT) and not verdict.whole_file:
            verdict = self._blamed(verdict, code)
        return Verdict(
            **{
                **vars(verdict),
                "printed": tuple(printed),
                "seconds": time.perf_counter() - started,
            }
        )

    def _blamed(self, verdict: Verdict, code: Code) -> Verdict:
        """The verdict, or that an earlier exercise comes first, because this one uses it."""
        here = strip.order(verdict.exercise)
        for number in uses.used(verdict.exercise, code.text):
            if strip.order(number) > here or verdict.exercise in uses.used(number, code.text):
                continue  # one that runs this one's code fails because of it
            if self._status(number, code) in (FAILED, TIMEOUT):
                zh = f"它用到了你的 {number}，而 {number} 还没有通过：先从那里改起。"
                en = f"It uses your {number}, which does not pass yet: start there."
                return replace(verdict, zh=zh, en=en, known_mistake=None)
        return verdict

    def _status(self, identifier: str, code: Code) -> str:
        key = identifier, uses.digest(identifier, code.text)
        if key not in self._statuses:
            self._check(exercise(identifier), code, deque(maxlen=1))
        return self._statuses[key]

    def _check(self, check: Exercise, code: Code, printed: deque[str]) -> Verdict:
        verdict = self._judged(check, code, printed)
        if code.text:
            self._statuses[check.id, uses.digest(check.id, code.text)] = verdict.status
        return verdict

    def _judged(self, check: Exercise, code: Code, printed: deque[str]) -> Verdict:
        problem = _syntax(check, code)
        if problem:
            return problem
        limit = self.seconds or check.seconds
        try:
            answers = self._run_learners(check, code, limit, printed)
        except RankFailure as failure:
            return self._failed(check, tell(failure, code.file, limit))
        if any(a.unwritten for a in answers):
            return _not_written(check, code)
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
        facts = _got_and_want(found, check.world)
        name = mistake.name if mistake else None
        return Verdict(check.id, FAILED, zh, en, name, facts, borrowed=borrowed)

    def _recognised(self, check: Exercise, got: list) -> Wrong | None:
        wrongs = [w for w in check.wrongs if not w.story]
        for wrong in wrongs:
            if same(got, self.planted(check, wrong), check.tolerance):
                return wrong
        # What a mistake does later depends on how it was written; where it first shows tells most.
        right, tolerance = self.right(check), check.tolerance
        case = first_case(got, right, tolerance)
        if case is None or not isinstance(right[0][case], (list, dict, rank_side.Array)):
            return None  # one number or bool is too little to tell mistakes apart
        for wrong in wrongs:
            planted = self.planted(check, wrong)
            at = first_case(planted, right, tolerance)
            if at == case and same_case(got, planted, case, tolerance):
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


def _syntax(check: Exercise, code: Code) -> Verdict | None:
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
        zh = "这个文件有语法错误，所以里面的题都没法检查。"
        en = "This file is not valid Python, so none of its exercises can be checked."
        return Verdict(check.id, FAILED, zh, en, facts=(f"{why}", place), whole_file=True)
    return None


def _not_written(check: Exercise, code: Code) -> Verdict:
    """Not written yet; when only a part is missing, which."""
    left = uses.holes(code.text, check.id)
    if not left or left == uses.holes(strip.strip(solution(check.id).text), check.id):
        return Verdict(check.id, NOT_WRITTEN, "还没有写。", "Not written yet.")
    names = ", ".join(f"`{name}`" for name in left)
    zh = f"还差 {names} 没有写。"
    en = f"{names} {'is' if len(left) == 1 else 'are'} still missing."
    return Verdict(check.id, NOT_WRITTEN, zh, en)


def _unknown(found: Difference) -> tuple[str, str]:
    zh, en = "结果不对。", "Not the expected result."
    return (f"{zh}{found.zh}", f"{en} {found.en}") if found.zh else (zh, en)


def _got_and_want(found: Difference, world: int) -> tuple[Fact, ...]:
    texts = []
    for language in ("both", "zh", "en"):
        place = [f"rank {found.rank}"] * (world > 1) + [said(label(found.where), language)]
        got, want = said(found.got, language), said(found.want, language)
        texts.append((" · ".join(p for p in place if p), got, want))
    (both, *_), (zh, *_), (en, *_) = texts
    gots, wants = zip(*(t[1:] for t in texts), strict=True)
    return (
        Fact(both, zh, en),
        Fact(f"  得到 got   {gots[0]}", f"  得到 {gots[1]}", f"  got   {gots[2]}"),
        Fact(f"  应为 want  {wants[0]}", f"  应为 {wants[1]}", f"  want  {wants[2]}"),
    )
