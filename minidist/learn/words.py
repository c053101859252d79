"""Words of a message in one language or both."""

from __future__ import annotations

import re

_INDEX = re.compile(r"(.*?)((?:\[[\d:]+\])*)$", re.DOTALL)  # "0.weight", "[2:8]"
LANGUAGES = ("zh", "en", "both")


class Fact(str):
    """A line of a message: as a string it shows both languages, `.zh` and `.en` show one."""

    zh: str
    en: str

    def __new__(cls, both: str, zh: str, en: str) -> Fact:
        fact = super().__new__(cls, both)
        fact.zh, fact.en = zh, en
        return fact


def said(text: str, language: str) -> str:
    """A text, or a `Fact`, in "zh", "en" or "both"."""
    return getattr(text, language, str(text))


def label(text: str) -> Fact:
    """The place of a difference, ``gradient | 梯度 · 0.weight``, as a `Fact`.

    The parts are between dots; what stands before a colon belongs to both languages.
    """
    zh, en = [], []
    for part in text.split(" · "):
        part, index = _INDEX.match(part).groups()
        english, bar, chinese = part.partition(" | ")
        shared, colon, _ = english.rpartition(": ")
        zh.append((shared + colon + chinese if bar else part) + index)
        en.append(english + index)
    return Fact(text, " · ".join(zh), " · ".join(en))


def both(zh: str, en: str, language: str) -> list[str]:
    """The texts to show for a choice of zh, en or both."""
    return {"zh": [zh], "en": [en]}.get(language, [zh, en])
