"""Spans of forward, backward and optimizer steps, from torch's own global hooks.

Forward: the hooks around every module. Backward has no such pair of moments, so it is read off the
graph: a module's backward begins when the gradient of its output is complete (just before the
output's node runs) and ends when the gradient of its input is. Hooks on graph nodes change nothing
in the graph, unlike `register_full_backward_hook`.
"""

from __future__ import annotations

import threading
import time
import weakref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from minidist.measure import timeline as timelines

_handles: list = []
_users = 0
_lock = threading.Lock()
# Dotted paths below the outermost module, which has the empty path.
_names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_threads = threading.local()


def patch() -> None:
    """Put the hooks up, for the whole process; they stay until every `patch` has its `unpatch`."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _handles.extend(
                (
                    register_module_forward_pre_hook(_before_forward),
                    register_module_forward_hook(_after_forward, always_call=True),
                    register_optimizer_step_pre_hook(_before_step),
                    register_optimizer_step_post_hook(_after_step),
                )
            )


def unpatch() -> None:
    global _users
    with _lock:
        _users -= 1
        while not _users and _handles:
            _handles.pop().remove()


def name_modules(root: nn.Module) -> None:
    """Let the spans of these modules carry their dotted names. The outermost module of a call is
    named by itself; this is for modules that are called one by one, like pipeline stages."""
    for name, module in root.named_modules():
        _names.setdefault(module, name)


def _stack(name: str) -> list:
    stack = getattr(_threads, name, None)
    if stack is None:
        stack = []
        setattr(_threads, name, stack)
    return stack


def _before_forward(module: nn.Module, args) -> None:
    stack = _stack("forward")
    if not stack and module not in _names:
        name_modules(module)
    stack.append((module, time.perf_counter()))


def _after_forward(module: nn.Module, args, output) -> None:
    end = time.perf_counter()
    stack = _stack("forward")
    # A module that raised leaves its children's entries behind; a measurement that opened in the
    # middle of a forward has not seen its beginning.
    while stack and stack[-1][0] is not module:
        stack.pop()
    if not stack:
        return
    _, start = stack.pop()
    path = _names.get(module)
    name = path or type(module).__name__
    again = torch._C._current_graph_task_id() != -1  # recomputed inside backward: checkpointing
    label = f"{name} recomputed" if again else f"{name} forward"
    for timeline in timelines.here():
        timeline.add(label, "compute", start, end)
    if torch.is_grad_enabled():
        _watch_backward(_BackwardCall(name, path), _tensors(args), _tensors(output))


def _watch_backward(call: _BackwardCall, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    for tensor in outputs:
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(call.begin)
    for tensor in inputs:
        if tensor.requires_grad:
            get_gradient_edge(tensor).node.register_prehook(call.end)


class _BackwardCall:
    """The backward of one call of one module."""

    __slots__ = ("name", "path", "started")

    def __init__(self, name: str, path: str | None):
        self.name, self.path, self.started = name, path, None

    def begin(self, gradients) -> None:
        if self.started is not None or not timelines.here():
            return
        now = time.perf_counter()
        stack = _stack("backward")
        if not stack:
            # A first layer has no input gradient to end with: the end of backward closes it.
            torch.autograd.Variable._execution_engine.queue_callback(_close_all)
        # Whatever is open and does not contain this module is over: its sibling begins.
        while stack and not stack[-1].contains(self):
            stack[-1].close(now)
        self.started = now
        stack.append(self)

    def end(self, gradients) -> None:
        stack = _stack("backward")
        if self in stack:
            now = time.perf_counter()
            while stack[-1] is not self:
                stack[-1].close(now)
            self.close(now)

    def contains(self, other: _BackwardCall) -> bool:
        if self.path is None or other.path is None:
            return False
        return self.path == "" or other.path.startswith(self.path + ".")

    def close(self, now: float) -> None:
        _stack("backward").remove(self)
        for timeline in timelines.here():
            timeline.add(f"{self.name} backward", "compute", self.started, now)
        self.started = None


def _close_all() -> None:
    now, stack = time.perf_counter(), _stack("backward")
    while stack:
        stack[-1].close(now)


def _before_step(optimizer, args, kwargs) -> None:
    _stack("step").append((optimizer, time.perf_counter()))


def _after_step(optimizer, args, kwargs) -> None:
    end, stack = time.perf_counter(), _stack("step")
    while stack:
        owner, start = stack.pop()
        if owner is optimizer:
            for timeline in timelines.here():
                timeline.add(f"{type(optimizer).__name__} step", "compute", start, end)
            return


def _tensors(value) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for part in value for tensor in _tensors(part)]
