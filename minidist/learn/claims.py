"""Every statement of the course documents that can be checked, checked now.

A claim has a `measure` function that really runs something (ranks, the simulator, a dry run at
scale, the published formulas) and returns plain numbers, and a `judge` function that turns numbers
into a verdict. Verdicts are never written down: other numbers, other verdict.

    right        what the statement says holds, in every part that was measured
    imprecise    its core holds, but not as far or not always as it says
    wrong        its core does not hold

    >>> from minidist.learn import claims
    >>> claims.show("a")          # in a notebook: statement, measurement, verdict, both languages
    >>> claims.check("a")         # the same as data

``minidist claims`` runs them all. Sections are those of the chapter on distributed training, "0"
stands for the document on foundations (chapter 0).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

VERDICT_ZH = {"right": "正确", "imprecise": "不够准确", "wrong": "错误"}
# Where the claims are measured; each module has a list CLAIMS.
_MODULES = ("claims_data_parallel", "claims_sharding", "claims_model_parallel", "claims_advice")
Numbers = dict[str, float]


@dataclass(frozen=True)
class Finding:
    """What a judge made of the numbers. `core`: the statement holds where it matters; `details`:
    what else it says, each True if that holds. Texts, English first: `short` for a line of a table,
    `measured` with everything, `why`."""

    core: bool
    details: tuple[bool, ...]
    short: tuple[str, str]
    measured: tuple[str, str]
    why: tuple[str, str]

    @property
    def verdict(self) -> str:
        if not self.core:
            return "wrong"
        return "right" if all(self.details) else "imprecise"


@dataclass(frozen=True)
class Claim:
    """A statement (English, Chinese), where it stands, how it is measured and judged."""

    id: str
    section: str
    title: tuple[str, str]
    statement: tuple[str, str]
    measure: Callable[[], Numbers]
    judge: Callable[[Numbers], Finding]


@dataclass(frozen=True)
class Checked:
    """A claim and what was found now."""

    claim: Claim
    numbers: Numbers
    finding: Finding

    @property
    def verdict(self) -> str:
        return self.finding.verdict

    def row(self) -> dict:
        """The row of ``minidist claims --json``."""
        return {
            "claim": self.claim.id,
            "section": self.claim.section,
            "title": self.claim.title[0],
            "title_zh": self.claim.title[1],
            "statement": self.claim.statement[0],
            "statement_zh": self.claim.statement[1],
            "short": self.finding.short[0],
            "short_zh": self.finding.short[1],
            "measured": self.finding.measured[0],
            "measured_zh": self.finding.measured[1],
            "verdict": self.verdict,
            "why": self.finding.why[0],
            "why_zh": self.finding.why[1],
            "numbers": self.numbers,
        }

    def markdown(self) -> str:
        """Both languages, in the blocks that `%lang` switches."""
        claim, found = self.claim, self.finding
        place_zh = _place(claim.section, "、基础篇", "基础篇")
        place = _place(claim.section, ", foundations", "foundations")
        zh = (
            f"**文档说**（{place_zh}）：{claim.statement[1]}\n\n"
            f"**实测**：{found.measured[1]}\n\n"
            f"**结论：{VERDICT_ZH[self.verdict]}**。{found.why[1]}"
        )
        en = (
            f"**The document says** ({place}): {claim.statement[0]}\n\n"
            f"**Measured now**: {found.measured[0]}\n\n"
            f"**Verdict: {self.verdict}**. {found.why[0]}"
        )
        return f'<div lang="zh">\n\n{zh}\n\n</div>\n\n<div lang="en">\n\n{en}\n\n</div>'

    def __str__(self) -> str:
        claim, found = self.claim, self.finding
        return (
            f"claim {claim.id} ({claim.section}): {claim.statement[0]}\n"
            f"measured now: {found.measured[0]}\nverdict: {self.verdict}. {found.why[0]}"
        )


def _place(section: str, also: str, alone: str) -> str:
    """A section for readers: "0" is the document on foundations."""
    return alone if section == "0" else section.replace(", 0", also)


def all_claims() -> list[Claim]:
    """All claims, a to n."""
    found = []
    for name in _MODULES:
        found += importlib.import_module(f"minidist.learn.{name}").CLAIMS
    return sorted(found, key=lambda claim: claim.id)


def get(identifier: str) -> Claim:
    """The claim with this letter; KeyError names the letters there are."""
    table = {claim.id: claim for claim in all_claims()}
    if identifier not in table:
        raise KeyError(f"no claim {identifier!r}: choose from {', '.join(table)}")
    return table[identifier]


def check(identifier: str) -> Checked:
    """Measure and judge one claim now."""
    claim = get(identifier)
    numbers = claim.measure()
    return Checked(claim, numbers, claim.judge(numbers))


def show(identifier: str) -> None:
    """Measure one claim now and show it in the notebook, in both languages."""
    from IPython.display import display

    found = check(identifier)
    bundle = {"text/markdown": found.markdown(), "text/plain": str(found)}
    display(bundle, raw=True)


def check_all(identifiers: Iterable[str] | None = None) -> list[Checked]:
    """Measure and judge these claims (default: all), in alphabetical order."""
    wanted = sorted(set(identifiers)) if identifiers else [claim.id for claim in all_claims()]
    return [check(identifier) for identifier in wanted]
