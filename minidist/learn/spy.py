"""What a learner's code sends, in which order, and whether it waited: one log per rank.

While a `Spy` is on, the functions of torch.distributed and of minidist's collectives are wrapped.
The outermost call is noted. Results of asynchronous calls appear only in `wait()`: code that reads
a buffer too early reads the old values every time, instead of sometimes.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, field
from typing import Any

# name -> the argument that receives the result, and the one with this rank's data
_TORCH = {
    "all_reduce": ("tensor", "tensor"),
    "reduce": ("tensor", "tensor"),
    "broadcast": ("tensor", "tensor"),
    "all_gather": ("tensor_list", "tensor"),
    "all_gather_into_tensor": ("output_tensor", "input_tensor"),
    "all_gather_single": ("output_tensor", "input_tensor"),
    "gather": ("gather_list", "tensor"),
    "scatter": ("tensor", "tensor"),
    "reduce_scatter": ("output", "input_list"),
    "reduce_scatter_tensor": ("output", "input"),
    "reduce_scatter_single": ("output", "input"),
    "all_to_all": ("output_tensor_list", "input_tensor_list"),
    "all_to_all_single": ("output", "input"),
    "barrier": (None, None),
    "all_gather_object": (None, None),
    "broadcast_object_list": (None, None),
    "send": (None, "tensor"),
    "isend": (None, "tensor"),
    "recv": ("tensor", "tensor"),
    "irecv": ("tensor", "tensor"),
}
_MINIDIST = {
    "all_reduce": ("tensor", "tensor"),
    "reduce_scatter": ("shard", "full"),
    "all_gather": ("full", "shard"),
    "broadcast": ("tensor", "tensor"),
    "all_to_all": ("out", "inp"),
    "send": (None, "tensor"),
    "isend": (None, "tensor"),
    "recv": ("tensor", "tensor"),
    "irecv": ("tensor", "tensor"),
    "barrier": (None, None),
    "all_gather_object": (None, None),
}
_KIND = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "isend": "send",
    "irecv": "recv",
}


@dataclass
class Event:
    """One call, or a mark that the check itself made (`op` is then the mark's text)."""

    op: str
    numel: int = 0  # elements this rank gave: for an all-gather its shard
    dtype: str = ""
    peer: int | None = None  # of a send or receive
    size: int = 0  # of the group
    async_op: bool = False
    waited: bool = True
    note: str = ""  # what a check wants to remember about it
    work: Any = field(default=None, repr=False)


class Spy:
    """`events`: everything in order. Use as a context manager, around the learner's code."""

    def __init__(self):
        self.events: list[Event] = []
        self._inside = False
        self._saved: list[tuple[Any, str, Any]] = []

    # ------------------------------------------------------------------------------- asking it

    def calls(self, *ops: str, since: int = 0) -> list[Event]:
        """The calls of these kinds (all, when none is named), marks left out."""
        return [e for e in self.events[since:] if e.size and (not ops or e.op in ops)]

    def sent(self, *ops: str, since: int = 0) -> int:
        """Elements in all calls of these kinds together."""
        return sum(e.numel for e in self.calls(*ops, since=since))

    def mark(self, text: str) -> None:
        """Put a mark into the log."""
        self.events.append(Event(text))

    def place(self, text: str, last: bool = False) -> int:
        """Where the first (or last) event of that name is; -1 if there is none."""
        places = [i for i, e in enumerate(self.events) if e.op == text]
        return places[-1 if last else 0] if places else -1

    def unwaited(self, note: str) -> bool:
        """Whether a call with this note has not been waited for."""
        return any(not e.waited for e in self.events if e.note == note)

    @property
    def here(self) -> int:
        """The log's present length, for `since`."""
        return len(self.events)

    @property
    def unfinished(self) -> bool:
        """Whether something asynchronous was never waited for: it may still be on its way."""
        return any(not e.waited for e in self.events)

    # ---------------------------------------------------------------------------------- wrapping

    def __enter__(self) -> Spy:
        import torch.distributed as dist

        from minidist.comm import collectives

        # In both modules where a function can be found: torch's P2POp compares them by identity.
        for modules, table in (
            ((dist, dist.distributed_c10d), _TORCH),
            ((collectives,), _MINIDIST),
        ):
            for name, (output, data) in table.items():
                original = getattr(modules[0], name, None)
                if original is not None:  # new names are missing in older versions of torch
                    self._replace(modules, name, self._wrap(name, original, output, data))
        return self

    def __exit__(self, *_) -> None:
        self.off()

    def off(self) -> None:
        """Stop looking on: for learners' code that calls minidist's strategies, which have their
        own instruments."""
        for module, name, original in self._saved:
            setattr(module, name, original)
        self._saved.clear()

    def _replace(self, modules, name: str, wrapper) -> None:
        for module in modules:
            self._saved.append((module, name, getattr(module, name)))
            setattr(module, name, wrapper)

    def _wrap(self, name: str, original, output: str | None, data: str | None):
        signature = inspect.signature(original)

        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            if self._inside:
                return original(*args, **kwargs)
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:  # the original says best what is wrong with the arguments
                return original(*args, **kwargs)
            return self._call(name, original, bound, output, data)

        return wrapper

    def _call(self, name: str, original, bound, output: str | None, data: str | None):
        given = bound.arguments
        event = Event(_KIND.get(name, name), size=_group_size(given.get("group")))
        event.numel, event.dtype = _amount(given.get(data))
        event.peer = next((given[k] for k in ("dst", "src") if k in given), None)
        event.async_op = bool(given.get("async_op")) or name in ("isend", "irecv")
        self.events.append(event)
        _check_peer(original, event)
        if not event.async_op:
            return self._quietly(original, bound)
        landing = None
        if output in given and given[output] is not None:
            landing = given[output]
            given[output] = _copies(landing)
        event.work = self._quietly(original, bound)
        if event.work is None:  # torch: this rank is not in the group
            return None
        event.waited = False
        return _Work(self, event, landing, given.get(output))

    def _quietly(self, original, bound: inspect.BoundArguments):
        self._inside = True
        try:
            return original(*bound.args, **bound.kwargs)
        finally:
            self._inside = False


class _Work:
    """An asynchronous call whose result is put in place by `wait()`."""

    def __init__(self, spy: Spy, event: Event, landing, arrived):
        self._spy, self._event, self._landing, self._arrived = spy, event, landing, arrived

    def wait(self, *args):
        self._spy._inside = True
        try:
            result = self._event.work.wait(*args)
        finally:
            self._spy._inside = False
        self._land()
        return self._landing if result is self._arrived and result is not None else result

    def is_completed(self) -> bool:
        done = self._event.work.is_completed()
        if done:
            self._land()
        return done

    def done(self) -> bool:
        done = self._event.work.done()
        if done:
            self._land()
        return done

    def _land(self) -> None:
        if self._event.waited:
            return
        self._event.waited = True
        if self._landing is None:
            return
        import torch

        whole = isinstance(self._landing, (list, tuple))
        there = self._landing if whole else [self._landing]
        came = self._arrived if whole else [self._arrived]
        with torch.no_grad():
            for old, new in zip(there, came, strict=True):
                old.copy_(new)

    def __getattr__(self, name):
        return getattr(self._event.work, name)


def _check_peer(original, event: Event) -> None:
    # torch itself waits for ever, or crashes, when it is asked for a rank that does not exist.
    import torch.distributed as dist

    if event.peer is None or original.__module__.startswith("minidist"):
        return  # minidist's own functions look at it themselves
    if not 0 <= event.peer < dist.get_world_size():
        last = dist.get_world_size() - 1
        raise ValueError(f"rank {event.peer} does not exist: the ranks are 0 to {last}")


def _copies(output):
    if isinstance(output, (list, tuple)):
        return [t.detach().clone() for t in output]
    return output.detach().clone()


def _group_size(group) -> int:
    import torch.distributed as dist

    try:
        if group is not None and hasattr(group, "get_group"):  # a one-dimensional DeviceMesh
            group = group.get_group()
        return dist.get_world_size(group)
    except (RuntimeError, ValueError):
        return 1


def _amount(data) -> tuple[int, str]:
    tensors = data if isinstance(data, (list, tuple)) else [data]
    if not tensors or not all(hasattr(t, "numel") for t in tensors):
        return 0, ""
    return sum(t.numel() for t in tensors), str(tensors[0].dtype).removeprefix("torch.")
