"""The one noun that DDP, ZeRO and FSDP share: several tensors end to end in one flat buffer.

    tensors      [ w1 ......... ][ b1 ][ w2 ............ ][ b2 ]
    flat buffer  [ w1 ......... | b1 | w2 ............ | b2 |pad]
    shards       [   rank 0     |    rank 1    |    rank 2     ]     equal, cut through tensors

One large collective instead of many small ones, and equal shards whatever the shapes. A shard may
hold the end of one tensor and the beginning of the next, `pieces` says which. DDP all-reduces the
buffer; ZeRO-1/2 reduce-scatter gradients and all-gather parameters; FSDP also frees it between
uses.

Document 4.2 and 5.2; Rajbhandari et al. 2020 section 5; Zhao et al. 2023 (FSDP) section 3.2.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minidist.comm.collectives import debug_enabled

# Each shard holds a multiple of this many elements, so that shards begin on a cache line and
# vector instructions need no ragged head.
SHARD_ALIGN = 16


class Piece(NamedTuple):
    """The part of one tensor that lies in one shard, as element ranges."""

    index: int  # which tensor of the layout
    start: int  # first and one-past-last element of the (flattened) tensor
    stop: int
    shard_start: int  # where that part begins in the shard


class FlatLayout:
    """Where each tensor lies in a flat buffer that cuts into `world_size` equal shards.

    `tensors`: tensors or shapes, in order; any shape, also 0-d and empty. Only shapes are read.
    Pure arithmetic, holds no memory: `buffer()` makes some. Tensors lie in row-major element order
    whatever their strides, so a transposed or channels_last weight comes back with the same values.
    """

    def __init__(self, tensors: Iterable[Tensor | Sequence[int]], world_size: int = 1):
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self.shapes = [torch.Size(t.shape if isinstance(t, Tensor) else t) for t in tensors]
        self.numels = [shape.numel() for shape in self.shapes]
        self.offsets, end = [], 0
        for numel in self.numels:
            self.offsets.append(end)
            end += numel
        self.numel = end  # elements that mean something
        unit = world_size * SHARD_ALIGN if world_size > 1 else 1
        self.padded_numel = -(-end // unit) * unit  # elements with padding
        self.shard_numel = self.padded_numel // world_size

    def buffer(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """A new flat buffer of `padded_numel` elements with clean padding; values uninitialised."""
        flat = torch.empty(self.padded_numel, dtype=dtype, device=device)
        self.clean_padding(flat)
        return flat

    def clean_padding(self, flat: Tensor) -> None:
        """Zero the padding, which takes part in norms and reductions. MINIDIST_DEBUG=1 fills it
        with NaN: whatever lets padding leak into a result then shows."""
        padding = flat[self.numel :]
        padding.fill_(float("nan") if debug_enabled() and flat.is_floating_point() else 0)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of `flat` with the shapes of the tensors."""
        return [
            flat[offset : offset + numel].view(shape)
            for offset, numel, shape in zip(self.offsets, self.numels, self.shapes, strict=True)
        ]

    @torch.no_grad()
    def pack(self, tensors: Sequence[Tensor], flat: Tensor) -> Tensor:
        """Copy `tensors` to their places in `flat` (converting dtype if it differs); returns
        `flat`."""
        for view, tensor in zip(self.views(flat), tensors, strict=True):
            view.copy_(tensor)
        return flat

    def shard(self, flat: Tensor, rank: int) -> Tensor:
        """The view of `flat` that belongs to `rank`: `shard_numel` elements."""
        return flat[rank * self.shard_numel : (rank + 1) * self.shard_numel]

    def pieces(self, rank: int) -> list[Piece]:
        """Which part of which tensor lies in the shard of `rank`, in order; padding is in no
        piece."""
        begin = rank * self.shard_numel
        end = min(begin + self.shard_numel, self.numel)
        pieces = []
        for index, (offset, numel) in enumerate(zip(self.offsets, self.numels, strict=True)):
            start, stop = max(offset, begin), min(offset + numel, end)
            if start < stop:
                pieces.append(Piece(index, start - offset, stop - offset, start - begin))
        return pieces
