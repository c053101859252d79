"""Brings every event that changes memory to the open `Memory` counters of a thread.

Five sources, all put up when a measurement opens and taken down when it closes:

* a dispatch mode sees each operation's inputs and outputs, hence each storage when it appears;
* weak references (in `memory.py`) tell when it is freed;
* saved-tensor hooks tell what autograd keeps for backward, and when it lets go;
* a hook on each parameter met tells which memory backward put into `.grad`;
* a hook on all optimizers tells what they keep as state.

`storage.resize_()`, with which FSDP frees and regrows its units, is not an operation; while
anything measures, that one method of torch is wrapped. None of these touches a value, so results
are bit for bit those of an unmeasured run, and modifying a saved tensor in place still raises.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from minidist.measure import registry
from minidist.measure.memory import Memory, storages

_LIFT = torch.ops.aten.lift_fresh.default
_threads = threading.local()
_original_resize = torch.UntypedStorage.resize_
_optimizer_hook = None


def start(memory: Memory) -> None:
    """Begin to report the calling thread's events to `memory`."""
    watch = getattr(_threads, "watch", None)
    if watch is None:
        watch = _threads.watch = _Watch()
        watch.open()
    watch.memories = [*watch.memories, memory]


def stop(memory: Memory) -> None:
    """The reverse; call it in the thread that called `start`, before leaving other contexts."""
    watch = getattr(_threads, "watch", None)
    if watch is None or memory not in watch.memories:
        raise RuntimeError("a measurement must be closed by the thread that opened it")
    watch.memories = [m for m in watch.memories if m is not memory]
    if not watch.memories:
        _threads.watch = None
        watch.close()


def patch() -> None:
    """Process-wide sources, while at least one measurement is open."""
    global _optimizer_hook
    torch.UntypedStorage.resize_ = _resize
    _optimizer_hook = register_optimizer_step_post_hook(_after_optimizer_step)


def unpatch() -> None:
    global _optimizer_hook
    torch.UntypedStorage.resize_ = _original_resize
    _optimizer_hook.remove()
    _optimizer_hook = None


class _Watch(TorchDispatchMode):
    """One per thread that measures; several measurements of a thread share it, however nested.

    Operations that autograd's device threads run for this thread arrive here too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memories: list[Memory] = []
        self._saved_hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks: list = []
        self._observer = self._after_gradient

    def open(self) -> None:
        self.__enter__()
        self._saved_hooks.__enter__()

    def close(self) -> None:
        self._saved_hooks.__exit__(None, None, None)
        self.__exit__(None, None, None)
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if types and any(_is_wrapper(t) for t in types):
            # A DTensor: decline, and its own code runs with this mode still on, so that the
            # operations on the local parts pass here. Only the parameters must be noted first.
            self._meet((args, kwargs), True)
            return NotImplemented
        # torch.from_numpy and torch.tensor wrap memory that they just made, and "lift" it.
        always_there = func is not _LIFT
        self._meet(args, always_there)
        if kwargs:
            self._meet(kwargs.values(), always_there)
            out = func(*args, **kwargs)
        else:
            out = func(*args)
        self._meet((out,), False)
        for memory in self.memories:
            memory.settle()
        return out

    def _meet(self, values: Iterable, always_there: bool) -> None:
        """Report all tensors in nested lists, tuples and dicts."""
        memories = self.memories
        for value in values:
            cls = type(value)
            # Nearly every operand is known already. Asking one by one would cost a tiny model half
            # of its step, so this asks as little as possible.
            if cls is Tensor and value.layout is torch.strided:
                storage = value.untyped_storage()
                for memory in memories:
                    if not memory.knows(storage):
                        self._report(value, None, always_there)
                        break
            elif isinstance(value, Tensor):
                self._report(value, None, always_there)
            elif cls is tuple or cls is list:
                self._meet(value, always_there)
            elif isinstance(value, dict):
                self._meet(value.values(), always_there)

    def _report(self, tensor: Tensor, kind: str | None, always_there: bool) -> None:
        cls = type(tensor)
        if cls is nn.Parameter or (cls is not Tensor and getattr(tensor, "_is_param", False)):
            kind = kind or "parameters"
            self._watch_gradient(tensor)
        for storage in storages(tensor):
            for memory in self.memories:
                memory.see(storage, tensor, kind, always_there)

    def _watch_gradient(self, parameter: Tensor) -> None:
        if not (parameter.requires_grad and parameter.is_leaf):
            return
        # The hook itself is the mark that this was done. A list of parameters would need weak
        # references, and `module.to()` refuses to swap a tensor that has any.
        hooks = parameter._post_accumulate_grad_hooks or {}
        for hook in reversed(hooks.values()):
            if hook == self._observer:
                return
            if not hasattr(hook, "minidist_observer"):
                break
        # It must come after the strategy's hooks, to see what they leave in `.grad`.
        for key in [key for key, hook in hooks.items() if hook == self._observer]:
            del hooks[key]
        self._hooks.append(parameter.register_post_accumulate_grad_hook(self._observer))

    def _after_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._report(parameter.grad, "gradients", False)

    _after_gradient.minidist_observer = True  # see registry.gradient_hooks

    def _pack(self, tensor: Tensor) -> _Saved:
        entries = []
        for storage in storages(tensor):
            for memory in self.memories:
                entry = memory.save(storage, tensor)
                if entry is not None:
                    entries.append((memory, entry))
        return _Saved(tensor, entries)


class _Saved:
    """What autograd keeps in place of a saved tensor: its lifetime is that of the activation."""

    __slots__ = ("entries", "tensor", "version")

    def __init__(self, tensor: Tensor, entries: list):
        self.tensor, self.entries = tensor, entries
        # torch cannot check for in-place changes through hooks, so it is done here.
        self.version = None if tensor.is_inference() else tensor._version

    def __del__(self) -> None:
        for memory, entry in self.entries:
            memory.release(entry)


def _unpack(saved: _Saved) -> Tensor:
    tensor = saved.tensor
    if saved.version is not None and tensor._version != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a {tensor.dtype} tensor of shape {list(tensor.shape)} was saved for "
            f"backward at version {saved.version} and is now at version {tensor._version}. "
            "Hint: torch.autograd.set_detect_anomaly(True) shows the operation"
        )
    return tensor


def _resize(storage, size):
    result = _original_resize(storage, size)
    for measurement in registry.everywhere():
        if measurement.memory is not None:
            measurement.memory.resized(storage)
    return result


def _after_optimizer_step(optimizer, args, kwargs) -> None:
    for measurement in registry.here():
        if measurement.memory is not None:
            count_optimizer(measurement.memory, optimizer)


def count_module(memory: Memory, module: nn.Module) -> None:
    """Count a module that existed before the measurement: parameters, gradients, buffers."""
    for parameter in module.parameters():
        _count(memory, parameter, "parameters")
        if parameter.grad is not None:
            _count(memory, parameter.grad, "gradients")
    for buffer in module.buffers():
        _count(memory, buffer, "buffers")
    memory.settle()


def count_optimizer(memory: Memory, optimizer) -> None:
    """Count an optimizer's state, and the parameters and gradients it works on."""
    for tensor in _tensors(optimizer.state.values()):
        _count(memory, tensor, "optimizer")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _count(memory, parameter, "parameters")
            if parameter.grad is not None:
                _count(memory, parameter.grad, "gradients")
    memory.settle()


def count_tensor(memory: Memory, tensor: Tensor) -> None:
    """Count a tensor that existed before the measurement."""
    _count(memory, tensor, "parameters" if isinstance(tensor, nn.Parameter) else None)
    memory.settle()


def _count(memory: Memory, tensor: Tensor, kind: str | None) -> None:
    for storage in storages(tensor):
        memory.see(storage, tensor, kind, always_there=True)


_wrapper_types: dict[type, bool] = {}


def _is_wrapper(kind: type) -> bool:
    known = _wrapper_types.get(kind)
    if known is None:
        known = hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")
        _wrapper_types[kind] = known
    return known


def _tensors(values: Iterable) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())
