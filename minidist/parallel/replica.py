"""What a wrapper of a module needs besides its mechanism: agree, equal values, save, copy.

A checkpoint must not show that there was a wrapper: `Replica` saves and loads under the module's
own names, alone and as a child of other modules. Copies and pickles leave the process group behind.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from minidist.comm import collectives as coll
from minidist.measure import tag
from minidist.parallel.agree import check_same_parameters

# The wrapper that a parameter belongs to, as a weak reference. Not an attribute of the parameter:
# that would be pickled with it.
owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


class Replica(nn.Module):
    """Base of a wrapper that keeps the whole `module` on every rank of `group`.

    A subclass gives `_runtime`, the names of its attributes that belong to this process, and
    `_listen`, which makes them (not collective).
    """

    _runtime: tuple[str, ...] = ("group",)

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def _listen(self) -> None:
        raise NotImplementedError

    def _retire(self) -> None:
        raise NotImplementedError

    # --- saving -------------------------------------------------------------------------------

    def state_dict(self, *args, **kwargs) -> dict[str, Any]:
        """The module's own state dict."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ):
        """Load a state dict of the plain module, in place; `assign=True` is a ValueError."""
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
        """An independent wrapper with its own values and hooks. One rank alone may do it."""
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        kept = {k: v for k, v in self.__dict__.items() if k not in self._runtime}
        copied.__dict__.update(copy.deepcopy(kept, memo))
        copied.group = self.group
        if copied.group is not None:
            copied._listen()
        return copied

    def __getstate__(self) -> dict[str, Any]:
        if self.group is not None and self.group is not dist.group.WORLD:
            raise TypeError(
                "a wrapper on a part of the ranks cannot be pickled, its group exists only in this "
                "job: pickle .module, or save .state_dict()"
            )
        return {k: v for k, v in self.__dict__.items() if k not in self._runtime}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.group = None  # found again at the first forward

    # --- agreement and equal values -------------------------------------------------------------

    def _enter(self, group, settings: Mapping[str, Any]) -> None:
        """Collective: all ranks agree on the model and the settings, and take rank 0's values.

        Raises on all ranks: RuntimeError that names the first difference, ValueError for parameters
        without values or when none requires a gradient.
        """
        self.group = group
        named = dict(self.module.named_parameters())
        ready = {name: param for name, param in named.items() if not is_lazy(param)}
        # Flat buffers follow the memory of dense tensors, so it must have the same order.
        strides = {
            f"strides of {name}": param.stride()
            for name, param in ready.items()
            if not param.is_contiguous()
        }
        if group.size() > 1:
            check_same_parameters(
                named.items(), group, extra={**settings, **strides}, who=type(self).__name__,
                named_buffers=self.module.named_buffers(),
            )  # fmt: skip
        empty = [name for name, param in named.items() if name not in ready or param.is_meta]
        if empty:
            raise ValueError(
                f"{type(self).__name__}: parameters without values: {', '.join(empty)}. Before "
                "wrapping, run a forward (lazy modules) or to_empty() and an initialisation (meta)"
            )
        if not any(param.requires_grad for param in named.values()):
            raise ValueError(
                f"{type(self).__name__}: no parameter requires a gradient, so there is nothing to "
                "average"
            )
        if group.size() > 1:
            self._send_values(0)
        self._listen()

    def _take_over(self) -> None:
        """Averaging twice would divide twice: an older wrapper of the same parameters retires."""
        named = dict(self.module.named_parameters())
        mine = set(map(id, named.values()))
        for name, param in named.items():
            older = owners.get(param, lambda: None)()
            if older is not None and older is not self:
                if not mine.issuperset(map(id, older.module.parameters())):
                    raise RuntimeError(
                        f"{type(self).__name__}: parameter {name!r} belongs to a larger module "
                        "that is already wrapped: wrap only the outer one"
                    )
                older._retire()
            owners[param] = weakref.ref(self)

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

        A buffer whose values change is replaced by a new tensor. Overwriting it would break (or,
        past the version check, silently falsify) the backward of an earlier forward that saved it.
        """
        places = [(m, n) for m, n in self._buffer_places if m._buffers.get(n) is not None]
        if not places:
            return
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


def _dense(tensor: Tensor) -> Tensor:
    """`tensor` itself if it is plain row-major memory, else such a copy."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def _as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: every dtype can travel, also those in which gloo cannot compute."""
    return tensor.view(-1).view(torch.uint8)
