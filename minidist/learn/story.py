"""A failure on the ranks, told to a learner in both languages: what happened, who waited where."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from minidist.comm.failure import RankFailure, is_library
from minidist.learn.words import Fact

_PLACE = re.compile(r" at (?P<file>[^:\n]+):(?P<line>\d+)(?:: (?P<code>[^\n]*?))?(?:  \[.*)?$")
_CALLS = "raised RuntimeError: the ranks call different collectives: rank "
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line \d+, in ')
_USER_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in .*\n(?:    (?P<code>.*))?'
)


@dataclass(frozen=True)
class Story:
    """`kind`: deadlock, timeout, mismatch, died or error. `facts`: lines for both languages."""

    kind: str
    zh: str
    en: str
    facts: tuple[str, ...]
    text: str  # what a known mistake's `story` is looked for in


# What an exception usually means, whatever the exercise.
_EXPLAINED = (
    (
        r"a leaf Variable that requires grad",
        "参数是需要梯度的叶子张量，不能直接就地修改：用 `with torch.no_grad():` 包起来。",
        "A parameter is a leaf that requires a gradient and cannot be changed in place as it is: "
        "do it under `with torch.no_grad():`.",
    ),
    (
        r"'NoneType' object|NoneType",
        "某个值是 None。没有参与计算的参数，`.grad` 就是 None；也可能有函数忘了 return。",
        "Some value is None. The `.grad` of a parameter that took no part is None; or a function "
        "has forgotten to return something.",
    ),
    (
        r"does not require grad and does not have a grad_fn|modified by an inplace operation",
        "计算图断了：有一步的结果不再知道自己从哪里来（detach、.data、no_grad 或就地修改）。",
        "The graph is broken: some result no longer knows where it came from (detach, .data, "
        "no_grad, or a change in place).",
    ),
    (
        r"must match the size|size mismatch|shapes cannot be multiplied|shape '.*' is invalid",
        "两个张量的形状对不上。把两边的 .shape 打印出来看看。",
        "The shapes of two tensors do not fit. Print both .shape and look.",
    ),
    (
        r"SystemExit",
        "代码调用了 exit()。检查只需要函数返回，不需要结束进程。",
        "The code called exit(). A check wants the function to return, not the process to end.",
    ),
    (
        r"MemoryError|can't allocate memory|bad_alloc",
        "用了太多内存：某个张量比题目需要的大得多。",
        "Too much memory: some tensor is far larger than the task needs.",
    ),
)


def tell(failure: RankFailure, file: str, seconds: float) -> Story:
    """The story of a failed check. `file`: the learner's, whose lines are shown."""
    text = str(failure)
    if text.startswith("not finished") and _all_wait(failure):
        # On a busy machine the time limit can come before the deadlock is certain.
        text = f"deadlock: {text}"
    if text.startswith("deadlock"):
        return Story(
            "deadlock",
            "死锁：还在运行的 rank 都在等别的 rank，谁也不会再前进。看看下面每个 rank 停在哪里："
            "集合通信要所有 rank 以同样的顺序调用，每个 send 都要有对方的 recv 接着。",
            "A deadlock: every rank that still runs waits for another one, and none will move "
            "again. See below where each of them stands: a collective needs the same call from "
            "every rank in the same order, and a send needs the other side's recv.",
            _states(failure),
            f"deadlock\n{text}",
        )
    if text.startswith("not finished"):
        return Story(
            "timeout",
            f"{seconds:g} 秒内没有完成：可能有死循环，或在等永远不会来的东西。每个 rank 停在：",
            f"Not finished within {seconds:g} s: perhaps an endless loop, or waiting for something "
            "that never comes. Where each rank stands:",
            _states(failure),
            f"timeout\n{text}",
        )
    if "call different collectives" in text:
        detail = text.split("call different collectives: ", 1)[1].partition("\n")[0]
        others = [f for f in _states(failure) if f"{f.partition(':')[0]} calls" not in detail]
        others = [f.rpartition("different collectives: ")[2] if _CALLS in f else f for f in others]
        return Story(
            "mismatch",
            "各 rank 调用的集合通信不一致（操作、形状或数据类型不同）。"
            "每个 rank 都必须以相同的顺序做相同的调用。",
            "The ranks call different collectives (another operation, shape or dtype). Every rank "
            "has to make the same calls in the same order.",
            tuple(part.strip() for part in detail.split(", rank")[:1])
            + tuple(f"rank{part}" for part in detail.split(", rank")[1:])
            + tuple(others)
            + _user_line(failure, file),
            f"mismatch\n{text}",
        )
    if "Received data size doesn't match" in text:
        return Story(
            "mismatch",
            "收到的数据比接收用的张量大：两边的形状（或数据类型）不一样。",
            "More data arrived than the receiving tensor holds: the two sides disagree about the "
            "shape (or dtype).",
            _user_line(failure, file),
            f"died\n{text}",
        )
    words = failure.states.get(failure.rank, "").partition("\n")[0]
    if words.startswith(("ended its process", "was killed")):
        return Story(
            "died",
            "进程在检查中途结束了：代码里有 os._exit、exit，或者底层崩溃了。",
            "The process ended in the middle of the check: os._exit or exit in the code, or a "
            "crash below Python.",
            (f"rank {failure.rank}: {words}",),
            f"died\n{text}",
        )
    return _error(failure, file, words)


def _error(failure: RankFailure, file: str, words: str) -> Story:
    lines = [line for line in failure.traceback.splitlines() if line.strip()]
    raised = next((x for x in reversed(lines) if not x.startswith((" ", "Traceback"))), words)
    raised = _shorten(raised, 300)
    zh, en = "运行时出错。", "It failed while running."
    if "NoneType" in raised and not _in_file(lines, file):
        zh = "运行时出错。某个函数什么也没有返回（None）：少了 return 吗？"
        en = "It failed while running. A function returned nothing (None): is a return missing?"
        return Story("error", zh, en, (f"rank {failure.rank}: {raised}",), _text(failure))
    for pattern, chinese, english in _EXPLAINED:
        if re.search(pattern, raised):
            zh, en = f"运行时出错。{chinese}", f"It failed while running. {english}"
            break
    facts = (f"rank {failure.rank}: {raised}", *_user_line(failure, file))
    return Story("error", zh, en, facts, _text(failure))


def _text(failure: RankFailure) -> str:
    return f"error\n{failure.traceback}\n{failure}"


def _in_file(lines: list[str], file: str) -> bool:
    """Whether the deepest frame of a traceback is the learner's, or torch's called from there."""
    frames = [m["file"] for m in map(_FRAME.match, lines) if m]
    own = [f for f in frames if not is_library(f) or f == file]
    return not frames or bool(own) or not file


def _user_line(failure: RankFailure, file: str) -> tuple[str, ...]:
    """The line of the learner's code that raised, deepest first."""
    found = [m for m in _USER_FRAME.finditer(failure.traceback + "\n") if m["file"] == file]
    if not found:  # a notebook: the last frame outside of libraries is a cell
        frames = _USER_FRAME.finditer(failure.traceback + "\n")
        found = [m for m in frames if not is_library(m["file"])]
    if not found:
        return ()
    m = found[-1]
    code = f": {_shorten(m['code'].strip())}" if m["code"] else ""
    return (f"{os.path.basename(m['file'])}:{m['line']}{code}",)


def _all_wait(failure: RankFailure) -> bool:
    words = [w.partition("  [")[0] for w in failure.states.values()]
    waiting = [w for w in words if w.startswith("waiting")]
    # All of them in one and the same collective: it is not the first time that they meet there.
    together = len(set(words)) == 1 and not re.match(r"waiting in i?(send|recv)", words[0])
    return (
        bool(waiting)
        and not (together and len(words) > 1)
        and all(w.startswith(("waiting", "finished")) for w in words)
    )


def _states(failure: RankFailure) -> tuple[str, ...]:
    facts = []
    for rank, words in sorted(failure.states.items()):
        words = words.partition("\n")[0]
        place = _PLACE.search(words)
        doing = words[: place.start()] if place else words.partition("  [")[0]
        at = ""
        if place:
            at = f"  {os.path.basename(place['file'])}:{place['line']}"
            at += f": {_shorten(place['code'])}" if place["code"] else ""
        zh, en = _translated(doing)
        texts = (zh if zh == en else f"{zh} | {en}", zh, en)
        facts.append(Fact(*(f"rank {rank}: {text}{at}" for text in texts)))
    return tuple(facts)


def _translated(doing: str) -> tuple[str, str]:
    """(zh, en) of what a rank was doing."""
    for english, chinese in (
        ("waiting in ", "停在 {}"),
        ("running ", "正在运行 {}"),
    ):
        if doing.startswith(english):
            return chinese.format(doing[len(english) :]), doing
    fixed = {"waiting": "等待中", "finished": "已结束"}
    return fixed.get(doing, doing), doing


def _shorten(text: str, longest: int = 160) -> str:
    text = text.splitlines()[0] if text else ""
    return text if len(text) <= longest else text[: longest - 1] + "…"
