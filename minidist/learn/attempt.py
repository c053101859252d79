"""The rank side of a check: load the learner's code, run the exercise, send back plain values.

What comes back holds no class of the learner's and needs no torch to read: numbers, strings, lists,
dicts, and `Array`. Whatever the code does to this process must not reach the next check: a fork of
the rank ends here, memory is bounded, and the grader replaces ranks that have been in trouble.
"""

from __future__ import annotations

import linecache
import os
import pickle
import random
import sys
import threading
import types
import warnings
from dataclasses import dataclass
from typing import Any

from minidist.learn.strip import NOT_WRITTEN

MEMORY = 8 << 30  # bytes a learner's code may allocate on a rank before it gets a MemoryError
MOST_ELEMENTS = 200_000  # of one array that is sent back
MOST_ITEMS = 2_000  # of a list or dict
LONGEST = 2_000  # characters of a string


@dataclass
class Array:
    """A tensor or array: values as float64 (complex: real and imaginary part in a last axis)."""

    dtype: str
    shape: tuple[int, ...]
    values: Any  # numpy array, or None when there are too many


@dataclass(frozen=True)
class Code:
    """Where the learner's functions are: the `text` of a `file`, or pickled `functions`."""

    file: str
    text: str = ""
    functions: bytes = b""


@dataclass(frozen=True)
class Attempt:
    """What a run gave on one rank. `borrowed`: numbers of exercises that were not written and
    whose solution stood in. `missing`: a name that is not there. `dirty`: something was left
    unfinished, this rank should not be used again."""

    value: Any = None
    unwritten: bool = False
    missing: str = ""
    borrowed: tuple[str, ...] = ()
    dirty: bool = False


def attempt(identifier: str, code: Code, solution: Code, others: dict[str, tuple[str, ...]]):
    """Run exercise `identifier` with `code` on this rank.

    `others`: number -> names of the other exercises in the same file; those not written yet are
    taken from `solution`, so that exercises can be done in any order.
    """
    process, folder = os.getpid(), os.getcwd()
    try:
        _limit_memory()
        _fresh()
        return _attempt(identifier, code, solution, others)
    finally:
        if os.getpid() != process:  # the learner's code has forked: there must be one answer
            os._exit(0)
        os.chdir(folder)


def _attempt(identifier, code, solution, others) -> Attempt:
    import torch.distributed as dist

    from minidist.learn.checks import exercise, run_of
    from minidist.learn.spy import Spy

    run = run_of(exercise(identifier))
    spy = Spy()
    threads = threading.active_count()
    borrowed: list[str] = []
    try:
        warnings.simplefilter("ignore")  # torch's, which are no output of the learner's
        with spy:  # also while the code is loaded: `from torch.distributed import all_reduce`
            mine = load(code)
            for name in others.get(identifier, ()):
                if name not in mine:
                    return Attempt(missing=name)
            _stand_in(mine, solution, identifier, others, borrowed)
            asked = _Mine(mine | {"spy": spy})
            value = run(asked)
    except NotImplementedError as error:
        if NOT_WRITTEN not in str(error):
            raise
        return Attempt(unwritten=True, dirty=bool(spy.events))
    dirty = spy.unfinished or threading.active_count() > threads or not dist.is_initialized()
    used = _reachable(mine, asked.names)
    needed = tuple(number for number in borrowed if used & set(others[number]))
    return Attempt(plain(value), borrowed=needed, dirty=dirty)


def load(code: Code, name: str = "mine") -> dict[str, Any]:
    """The names of a learner's file, or the functions that came from a notebook."""
    if code.functions:
        return pickle.loads(code.functions)
    # Tracebacks and "who waits where" read the lines from here, also of planted mistakes.
    lines = code.text.splitlines(keepends=True)
    linecache.cache[code.file] = (len(code.text), None, lines, code.file)
    module = types.ModuleType(name)
    module.__file__ = code.file
    sys.modules[name] = module  # where dataclasses look a class's module up
    exec(compile(code.text, code.file, "exec", dont_inherit=True), vars(module))
    return {k: v for k, v in vars(module).items() if not k.startswith("__")} | {"_module": module}


def _stand_in(mine: dict, solution: Code, identifier: str, others, borrowed: list[str]) -> None:
    if "_module" not in mine:
        ours = load(solution, "ours")
        there = {*others[identifier], *mine, *_complete(mine, ours)}
        borrowed += [n for n, names in others.items() if not there & set(names)]
        mine |= {name: value for name, value in ours.items() if name not in mine}
        return
    written = {}
    for number, names in others.items():
        if number == identifier or not any(_unwritten(mine.get(n), number) for n in names):
            written |= {name: mine[name] for name in names if name in mine}
        else:
            borrowed.append(number)
    if not borrowed:
        return
    ours = load(solution, "ours")
    for number in borrowed:
        for name in others[number]:
            mine[name] = ours[name]
            setattr(mine["_module"], name, ours[name])
    # And the other way: where ours calls what the learner has written, it is the learner's.
    vars(ours["_module"]).update(written)


class _Mine:
    """The learner's functions as attributes; remembers which of them were asked for."""

    def __init__(self, values: dict[str, Any]):
        self.values = values
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return self.values[name]


def _reachable(mine: dict, names: set[str]) -> set[str]:
    """`names`, and whatever global names their functions and classes mention, and so on."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name in found or name not in mine:
            continue
        found.add(name)
        value = mine[name]
        for part in vars(value).values() if isinstance(value, type) else [value]:
            part = getattr(part, "__func__", part)
            if isinstance(part, types.FunctionType):
                todo += _mentioned(part.__code__)
    return found


def _mentioned(code: types.CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*map(_mentioned, inner))


def _complete(mine: dict, ours: dict) -> set[str]:
    """Functions of a notebook bring along what they use of it, whose names are returned; what is
    not there is ours."""
    brought: set[str] = set()
    for value in list(mine.values()):
        methods = vars(value).values() if isinstance(value, type) else [value]
        for function in methods:
            function = getattr(function, "__func__", function)  # a static method
            around = getattr(function, "__globals__", {})
            brought |= {n for n in around if n in ours and around[n] is not ours[n]}
            for name, our in ours.items():
                around.setdefault(name, our)
    return brought


def _unwritten(value: Any, number: str) -> bool:
    """Whether a function, or a method of a class, still holds the hole of this exercise."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__wrapped__", value)  # a decorated function
    if isinstance(value, types.FunctionType):
        return _says(value.__code__, f"{number} {NOT_WRITTEN}")
    # Not into classes inside of classes: torch's own refer back to themselves.
    return isinstance(value, type) and any(
        _unwritten(v, number) for v in vars(value).values() if not isinstance(v, type)
    )


def _says(code: types.CodeType, text: str) -> bool:
    return any(
        c == text or (isinstance(c, types.CodeType) and _says(c, text)) for c in code.co_consts
    )


# ------------------------------------------------------------------------------- this process


def _fresh() -> None:
    """Undo what an earlier check may have left behind."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from minidist.comm import ledger, worker

    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    ledger.reset()
    worker.state.clear()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _limit_memory() -> None:
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        if soft == resource.RLIM_INFINITY:  # not yet limited
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    except (ImportError, OSError, ValueError):
        pass  # where memory cannot be limited, the system's own limit has to do


# ---------------------------------------------------------------------------------- plain values


def plain(value: Any, depth: int = 0) -> Any:
    """`value` in types that the grader can read and trust."""
    import numpy as np
    import torch

    if value is None or isinstance(value, (bool, int, float)):
        return value if type(value) in (type(None), bool, int, float) else float(value)
    if isinstance(value, str):
        return str(value)[:LONGEST]
    if isinstance(value, torch.Tensor):
        value = value.detach()
        dtype = str(value.dtype).removeprefix("torch.")
        shape = tuple(value.shape)
        if value.numel() > MOST_ELEMENTS:
            return Array(dtype, shape, None)
        if value.is_complex():
            value = torch.view_as_real(value)
        return Array(dtype, shape, value.to("cpu", torch.float64).numpy().copy())
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(torch.from_numpy(np.array(value)), depth)
    if depth < 8 and isinstance(value, (list, tuple, range)):
        return [plain(v, depth + 1) for v in value[:MOST_ITEMS]]
    if depth < 8 and isinstance(value, (set, frozenset)):
        return plain(sorted(value, key=repr), depth)
    if depth < 8 and isinstance(value, dict):
        items = list(value.items())[:MOST_ITEMS]
        return {str(k)[:LONGEST]: plain(v, depth + 1) for k, v in items}
    return f"<{type(value).__name__}>"
