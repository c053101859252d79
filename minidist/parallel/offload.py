"""Where offloaded optimizer states live: in host memory, or in files on disk.

With a GPU the host is the cheaper tier (document 5.4; Ren et al. 2021, "ZeRO-Offload"). On a
machine without one the states are in host memory anyway, and the next tier is the disk (Rajbhandari
et al. 2021, "ZeRO-Infinity"): a memory-mapped file, whose pages are given back after use. The same
trade is then real and measurable on a laptop: resident memory for time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile

import torch
from torch import Tensor

from minidist.measure import tag

TIERS = (None, "cpu", "disk")


def check_tier(offload: str | None) -> tuple[str | None, str | None]:
    """`(tier, directory)` of an `offload` argument; ValueError for an unknown one."""
    tier, _, directory = (offload or "").partition(":")
    if (tier or None) not in TIERS or (directory and tier != "disk"):
        raise ValueError(
            f"offload must be None, 'cpu', 'disk' or 'disk:DIRECTORY', got {offload!r}"
        )
    if directory and not os.path.isdir(directory):
        raise ValueError(f"offload={offload!r}: {directory} is not a directory")
    return tier or None, directory or None


class DiskTensor:
    """A tensor in a file that has no name: it vanishes with the process, also with a killed one."""

    def __init__(self, like: Tensor, directory: str | None):
        nbytes = max(1, like.numel() * like.element_size())
        with tempfile.TemporaryFile(dir=directory) as file:
            # Reserved now: a full disk must be an error here, not a bus error in some later step.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, nbytes)
            else:
                file.truncate(nbytes)
            self._map = mmap.mmap(file.fileno(), nbytes)
        flat = torch.frombuffer(self._map, dtype=like.dtype, count=like.numel())
        self.tensor = tag(flat.view(like.shape), "optimizer", device="disk")
        self.tensor.copy_(like)

    def release(self) -> None:
        """Give the pages back: the values stay in the file, this process's memory falls."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def trim_heap() -> None:
    """Return freed heap to the system: glibc keeps it, and moving states would show no effect."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned host memory, so that it can travel while the GPU goes on."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=tensor.is_cuda)
