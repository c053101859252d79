"""torch's check that all ranks make the same calls, without its mistake about messages.

With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` every collective first compares operation, shape, dtype and
running number over the ranks. On gloo (up to torch 2.13) that number also counts ``send`` and
``recv``. In a pipeline the ranks in the middle send and receive more than those at its ends, so the
next collective, though the same everywhere, would be refused as a mismatch.

Here messages travel in a gloo group of their own, beside each checked one. Not in the helper group
that the check itself uses: its barrier sends plain messages too, and would take ours for its own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_carriers: dict[str, Any] = {}  # group name -> gloo backend for its messages
_create_wrapper = c10d._create_process_group_wrapper


def enable() -> None:
    """Check collectives of this process from now on; call it before the first group is made."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    if c10d._create_process_group_wrapper is _create_wrapper:
        c10d._create_process_group_wrapper = _create_wrapper_and_carrier
        for name in ("send", "recv", "recv_anysource"):
            setattr(dist.ProcessGroup, name, _carried(name))


def _create_wrapper_and_carrier(wrapped_pg, store_prefix, store, rank, world_size, timeout):
    for name in set(_carriers) - set(c10d._world.pg_names.values()):
        del _carriers[name]  # of a group that was destroyed: its sockets go with it
    own = dist.PrefixStore(f"messages:{store_prefix}", store)
    _carriers[store_prefix] = dist.ProcessGroupGloo(own, rank, world_size, timeout=timeout)
    return _create_wrapper(wrapped_pg, store_prefix, store, rank, world_size, timeout)


def _carried(name: str):
    native = getattr(dist.ProcessGroup, name)

    @functools.wraps(native)
    def method(self, tensors, *args):
        carrier = _carriers.get(self.group_name) if tensors[0].device.type == "cpu" else None
        if carrier is None:
            return native(self, tensors, *args)
        return getattr(carrier, name)(tensors, *args)

    return method
