"""Comparing what a learner's code gave with what the solution gave, and showing the difference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist.learn.attempt import Array
from minidist.learn.words import Fact

SHOWN = 6  # values of an array in a message
SHORT = 120  # characters of a nested list that is shown whole
_MISSING = Fact("(没有 | missing)", "(没有)", "(missing)")


@dataclass(frozen=True)
class Difference:
    """The first place where two results differ: `where` ("gradient | 梯度 · 0.weight"), both sides
    as text, and what can be said about any exercise (a constant factor, a missing return)."""

    rank: int
    where: str
    got: str
    want: str
    zh: str = ""
    en: str = ""


def difference(got: list, want: list, tolerance: float) -> Difference | None:
    """The first difference between two lists with one result per rank; None when equal.

    When only some ranks are right, that is said: it is the most telling thing about it.
    """
    found = [_differ(g, w, "", tolerance) for g, w in zip(got, want, strict=True)]
    wrong = [rank for rank, d in enumerate(found) if d]
    if not wrong:
        return None
    where, got_text, want_text, zh, en = found[wrong[0]]
    right = [rank for rank in range(len(want)) if rank not in wrong]
    if right:
        ranks = ", ".join(map(str, right))
        zh = f"rank {ranks} 上的结果是对的。{zh}"
        en = f"On rank {ranks} the result is right. {en}".rstrip()
    return Difference(wrong[0], where, got_text, want_text, zh, en)


def same(got: list, want: list, tolerance: float) -> bool:
    """Whether two results are equal on every rank."""
    return difference(got, want, tolerance) is None


def first_case(got: list, want: list, tolerance: float) -> str | None:
    """The label of the first case that is wrong on some rank."""
    labels = want[0] if isinstance(want[0], dict) else ()
    return next((c for c in labels if not same_case(got, want, c, tolerance)), None)


def same_case(got: list, want: list, case: str, tolerance: float) -> bool:
    """Whether two results are equal in one case on every rank."""
    pairs = zip(got, want, strict=True)
    return not any(_differ(g.get(case), w.get(case), "", tolerance) for g, w in pairs)


def _differ(got: Any, want: Any, where: str, tolerance: float) -> tuple | None:
    """(where, got, want, zh, en) of the first difference."""
    got, want = _even(got, want)
    if isinstance(want, Array) and isinstance(got, Array):
        return _arrays(got, want, where, tolerance)
    if isinstance(want, dict) and isinstance(got, dict):
        for key in want:
            inner = f"{where} · {key}" if where else key
            if key not in got:
                return inner, _MISSING, show(want[key]), "", ""
            found = _differ(got[key], want[key], inner, tolerance)
            if found:
                return found
        extra = [k for k in got if k not in want]
        return (where, f"+ {', '.join(extra)}", "", "", "") if extra else None
    if isinstance(want, list) and isinstance(got, list):
        if len(got) == len(want):
            for i, (g, w) in enumerate(zip(got, want, strict=True)):
                if _differ(g, w, "", tolerance):
                    if any(isinstance(x, (dict, Array, list)) for x in (g, w)):
                        inner = _differ(g, w, f"{where}[{i}]", tolerance)
                        texts = show(got), show(want)
                        short = all(isinstance(x, list) for x in (g, w))
                        short = short and max(map(len, texts)) <= SHORT
                        return (where, *texts, "", "") if short else inner
                    return where, _list(got, i), _list(want, i), "", ""
            return None
        zh = f"应有 {len(want)} 项，得到 {len(got)} 项。"
        en = f"{len(want)} item{'s' * (len(want) != 1)} expected, and there "
        en += "is 1." if len(got) == 1 else f"are {len(got)}."
        return where, show(got), show(want), zh, en
    if _numbers(got, want):
        if _close(float(got), float(want), tolerance):
            return None
        said = ("", "") if isinstance(want, bool) else _factor([float(got)], [float(want)])
        return where, show(got), show(want), *said
    if type(got) is type(want) and got == want:
        return None
    if got is None:
        zh = "函数什么也没有返回（None）：少了 return 吗？"
        en = "The function returned nothing (None): is a return missing?"
        return where, "None", show(want), zh, en
    return where, show(got), show(want), "", ""


def _arrays(got: Array, want: Array, where: str, tolerance: float) -> tuple | None:
    if got.shape != want.shape:
        zh, en = "形状不同。", "The shapes differ."
        if math.prod(got.shape) == math.prod(want.shape) and len(want.shape) == len(got.shape):
            zh += "各维好像换了位置。"
            en += " Dimensions seem to be exchanged."
        return where, f"shape {list(got.shape)}", f"shape {list(want.shape)}", zh, en
    if got.values is None or want.values is None:
        return None
    g, w = got.values.reshape(-1), want.values.reshape(-1)
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        close = (g == w) | (np.isnan(g) & np.isnan(w))
        close |= abs(g - w) <= tolerance * np.maximum(1.0, abs(w))
    if close.all():
        return None
    start = max(0, min(int(close.argmin()) - 1, len(w) - SHOWN))
    index = f"[{start}:{start + SHOWN}]" if len(w) > SHOWN else ""
    texts = (_row(values[start : start + SHOWN]) for values in (g, w))
    return where + index, *texts, *_factor(g.tolist(), w.tolist())


def _close(a: float, b: float, tolerance: float) -> bool:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return True
    return abs(a - b) <= tolerance * max(1.0, abs(b))


def _factor(got: list[float], want: list[float]) -> tuple[str, str]:
    """What can be said when everything is wrong in the same way."""
    if any(math.isnan(g) for g in got):
        return "结果里有 NaN。", "There is NaN in the result."
    if any(map(math.isinf, got)):
        return "结果里有无穷大。", "There is an infinite value in the result."
    pairs = [(g, w) for g, w in zip(got, want, strict=True) if abs(w) > 1e-6]
    if not pairs:
        return "", ""
    factor = pairs[0][0] / pairs[0][1]
    if len(pairs) == 1 and min(abs(f - round(f)) for f in (factor, 1 / (factor or 1))) > 1e-3:
        return "", ""  # any number is some factor of another
    if all(abs(g - factor * w) <= 1e-3 * abs(w) for g, w in pairs):
        if abs(factor) < 1e-6:
            return "结果全是 0。", "Everything is zero."
        if abs(factor - 1) > 1e-2:
            text = f"{factor:.4g}"
            return (
                f"每个值都是应有值的 {text} 倍。",
                f"Every value is {text} times what it should be.",
            )
    return "", ""


# ------------------------------------------------------------------------------------ showing


def show(value: Any) -> str:
    """A value in one short line."""
    if isinstance(value, Array):
        if value.values is None:
            return f"shape {list(value.shape)}"
        flat = value.values.reshape(-1)
        text = _row(flat[:SHOWN], len(flat) > SHOWN)
        return f"{text} shape {list(value.shape)}" if len(value.shape) > 1 else text
    if isinstance(value, dict):
        return _cut("{" + ", ".join(f"{k}: {show(v)}" for k, v in value.items()) + "}")
    if isinstance(value, list):
        return _cut("[" + ", ".join(show(v) for v in value) + "]")
    if isinstance(value, bool) or value is None:
        return {True: "True", False: "False", None: "None"}[value]
    if isinstance(value, (int, float)):
        return _number(value)
    return _cut(str(value))


def _list(values: list, index: int) -> str:
    start = max(0, min(index - 3, len(values) - 2 * SHOWN))
    text = ", ".join(show(v) for v in values[start : start + 2 * SHOWN])
    left, right = "… " if start else "", " …" if start + 2 * SHOWN < len(values) else ""
    return _cut(f"[{left}{text}{right}]")


def _row(values, more: bool = False) -> str:
    return "[" + ", ".join(_number(float(v)) for v in values) + (", …]" if more else "]")


def _number(value: float) -> str:
    if isinstance(value, int) or (value == int(value) if math.isfinite(value) else False):
        return f"{int(value):,}" if abs(value) >= 10_000 else str(int(value))
    return f"{value:.5g}"


def _cut(text: str, longest: int = 200) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _numbers(*values: Any) -> bool:
    return all(isinstance(v, (int, float)) for v in values) and (
        len({isinstance(v, bool) for v in values}) == 1
    )


def _even(got: Any, want: Any) -> tuple[Any, Any]:
    """A tensor of one value may stand for a number, and a list of numbers for a tensor."""
    if isinstance(got, Array) and not isinstance(want, Array):
        got = _unpack(got)
    elif isinstance(want, Array) and not isinstance(got, Array):
        want = _unpack(want)
    return got, want


def _unpack(array: Array) -> Any:
    return array if array.values is None else array.values.tolist()
