"""What a wrapper around a module needs besides its mechanism: saving, copying, equal values.

A checkpoint must not show that there was a wrapper: `Replica` saves and loads under the module's own
names, alone and as a child of other modules. Copies and pickles leave the process group behind.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minidist.comm import collectives as coll
from minidist.measure import tag


class Replica(nn.Module):
    """Base of a wrapper that holds the whole `module` and is saved as if it were that module."""

    # Attributes of a subclass that belong to this process: they are made anew by `_listen`.
    _runtime: tuple[str, ...] = ()

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def _listen(self) -> None:
        raise NotImplementedError

    # --- saving -------------------------------------------------------------------------------

    def state_dict(self, *args, **kwargs) -> dict[str, Any]:
        """The module's own state dict."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ):
        """Load a state dict of the plain module, in place. `assign=True` is refused (ValueError)."""
        if assign:
            raise ValueError(
                "assign=True would put other parameters in the place of those whose gradients are "
                "averaged: load into the plain module, then wrap it"
            )
        return self.module.load_state_dict(state_dict, strict=strict)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args) -> None:
        # The wrapper as a child: its parent hands down keys "<prefix>weight" and descends to the
        # child "module", where torch looks for "<prefix>module.weight".
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}module.{key[len(prefix) :]}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    # --- copying ------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict) -> Replica:
        """An independent wrapper with its own values and hooks. Not collective: one rank may do it."""
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        kept = {k: v for k, v in self.__dict__.items() if k not in self._runtime}
        copied.__dict__.update(copy.deepcopy(kept, memo))
        copied.group = self.group
        if copied.group is not None:
            copied._listen()
        return copied

    def __getstate__(self) -> dict[str, Any]:
        if self.group is not None and self.group is not torch.distributed.group.WORLD:
            raise TypeError(
                "a wrapper on a part of the ranks cannot be pickled, its group exists only in this "
                "job: pickle .module, or save .state_dict()"
            )
        return {k: v for k, v in self.__dict__.items() if k not in self._runtime}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.group = None  # found again at the first forward

    # --- equal values on all ranks --------------------------------------------------------------

    def _buffer_places(self) -> list[tuple[nn.Module, str]]:
        return [
            (owner, name)
            for owner in self.module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def _send_values(self, source: int) -> None:
        """Collective: overwrite all parameters and buffers with those of rank `source`."""
        pending = []
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            tensor = tensor.detach()
            wire = _dense(tensor)
            work = coll.broadcast(
                _as_bytes(wire), source, group=self.group, async_op=True, by="ddp values"
            )
            pending.append((work, tensor, wire))
        for work, tensor, wire in pending:
            work.wait()
            if wire is not tensor:  # it had gaps, and a dense copy travelled
                tensor.copy_(wire)

    @torch.no_grad()
    def _send_buffers(self, source: int) -> None:
        """Collective: give all ranks the buffers of rank `source`, in one message of bytes.

        A buffer whose values change is replaced by a new tensor. Overwriting it would break (or, past
        the version check, silently falsify) the backward of an earlier forward that saved it.
        """
        places = self._buffer_places()
        mine = [_as_bytes(_dense(owner._buffers[name].detach())) for owner, name in places]
        message = torch.cat(mine)
        coll.broadcast(message, source, group=self.group, by="ddp buffers")
        fresh: dict[int, Tensor] = {}  # one buffer may be registered in several places
        theirs = message.split([part.numel() for part in mine])
        for (owner, name), own, new in zip(places, mine, theirs, strict=True):
            old = owner._buffers[name]
            if id(old) not in fresh:
                if torch.equal(own, new):
                    continue
                values = new.clone().view(old.dtype).view(old.shape)
                fresh[id(old)] = tag(torch.empty_like(old).copy_(values), "buffers")
            owner._buffers[name] = fresh[id(old)]


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Every tensor in what a module returned: in containers, dataclasses and plain objects, too."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from tensors_in(list(output.values()))
    elif isinstance(output, (list, tuple, set)):
        for item in output:
            yield from tensors_in(item)
    elif is_dataclass(output) and not isinstance(output, type):
        yield from tensors_in(list(vars(output).values()))


def leaves_behind(nodes: Iterable[Any], wanted: Mapping[int, int], stop_at_first: bool) -> set[int]:
    """Walk the autograd graph back from `nodes`: which wanted leaves (id -> index) it reaches."""
    found: set[int] = set()
    seen, stack = set(), list(nodes)
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        index = wanted.get(id(getattr(node, "variable", None)))
        if index is not None:
            found.add(index)
            if stop_at_first:
                break
        stack.extend(following for following, _ in node.next_functions)
    return found


def _dense(tensor: Tensor) -> Tensor:
    """`tensor` itself if it is plain row-major memory, else such a copy."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def _as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: every dtype can travel, also those in which gloo cannot compute."""
    return tensor.view(-1).view(torch.uint8)
