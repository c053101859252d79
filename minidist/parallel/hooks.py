"""Communication hooks for `md.DDP(..., comm_hook=hook)`: how a full bucket becomes the mean.

A hook is `hook(bucket: GradBucket) -> work`. It is called once per bucket and backward, in the
same order on every rank, as soon as the bucket is full, and should only *start* communication.
When `work.wait()` returns, `bucket.flat` must hold the sum over ranks of what it held before.
Gradients are already divided by the number of ranks, so that sum is the mean (and 16-bit sums do
not overflow). A hook may change the values a little (compression); it must carry every element of
`bucket.layout.numel` or every tensor of `bucket.tensors`, also the one-element flag of the last
one.

Chapter 2; for PowerSGD: Vogels, Karimireddy and Jaggi 2019, arXiv:1905.13727, algorithms 1 and 2.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from minidist.comm import collectives as coll
from minidist.measure import tag
from minidist.parallel.buckets import GradBucket


class Then:
    """A work that does something more once `work` is complete."""

    def __init__(self, work, finish: Callable[[], None]):
        self.work, self.finish = work, finish

    def wait(self) -> None:
        self.work.wait()
        with torch.no_grad():
            self.finish()


def all_reduce(bucket: GradBucket):
    """The default: one all-reduce, in the bucket's own dtype. 2(N-1)/N of its bytes per rank."""
    used = bucket.flat[: bucket.layout.numel]
    return coll.all_reduce(used, group=bucket.group, async_op=True, by=bucket.by)


def reduce_scatter_all_gather(bucket: GradBucket):
    """The two halves of an all-reduce, written out: what ZeRO-1 does before and after its step.

    Same bytes as `all_reduce`. On gloo our reduce-scatter adds in rank order, so DDP with this
    hook gives the same bits as ZeRO-1 at any world size; gloo's own ring adds each chunk in
    another order.
    """
    shard = bucket.layout.shard(bucket.flat, bucket.group.rank())
    work = coll.reduce_scatter(
        shard, bucket.flat, group=bucket.group, async_op=True, by=bucket.by
    )  # fmt: skip
    return Then(work, lambda: coll.all_gather(bucket.flat, shard, group=bucket.group, by=bucket.by))


def bf16_compress(bucket: GradBucket):
    """Send 32- and 64-bit gradients as bfloat16: half (a quarter) of the bytes.

    bfloat16 keeps the exponent range of float32 and 8 bits of precision: each gradient is off by at
    most 1/256 of itself, plus the rounding of the sums. Other dtypes travel as they are.
    """
    if bucket.flat.dtype not in (torch.float32, torch.float64):
        return all_reduce(bucket)
    used = bucket.flat[: bucket.layout.numel]
    small = used.to(torch.bfloat16)
    work = coll.all_reduce(small, group=bucket.group, async_op=True, by=f"{bucket.by} (bf16)")
    return Then(work, lambda: used.copy_(small))


def fp32_reduce(bucket: GradBucket):
    """Add 16-bit gradients up in float32 and round once: twice the bytes, no small part is lost.

    With plain bfloat16 sums, 64 + 0.25 + 0.25 + 0.25 may stay 64.
    """
    if bucket.flat.dtype not in (torch.bfloat16, torch.float16):
        return all_reduce(bucket)
    used = bucket.flat[: bucket.layout.numel]
    wide = used.float()
    work = coll.all_reduce(wide, group=bucket.group, async_op=True, by=f"{bucket.by} (fp32)")
    return Then(work, lambda: used.copy_(wide))


class PowerSGD:
    """Rank-r compression with error feedback: a matrix [m, n] travels as [m, r] and [n, r].

    One step of power iteration per backward, warm-started with the last result: P = M Q summed
    over ranks, made orthonormal, then Q = M'P summed, and every rank rebuilds P Q'. What this
    loses is kept on each rank and added to its next gradient (error feedback); without it
    training stalls.

    Matrices for which r(m+n) elements save less than `min_saving` times, vectors and 16-bit or
    complex gradients travel uncompressed. The first `warmup_steps` backwards are uncompressed.
    State is kept per parameter name, about one more copy of the compressed gradients. One object
    serves one DDP.
    """

    def __init__(
        self, rank: int = 2, *, min_saving: float = 2.0, warmup_steps: int = 0, seed: int = 0
    ):
        if rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}")
        self.rank, self.min_saving, self.warmup_steps, self.seed = (
            rank, min_saving, warmup_steps, seed,
        )  # fmt: skip
        self.error: dict[str, Tensor] = {}
        self.basis: dict[str, Tensor] = {}  # Q of the last step
        self._backwards = 0

    def __repr__(self) -> str:  # compared between ranks
        return f"PowerSGD({self.rank}, {self.min_saving}, {self.warmup_steps}, {self.seed})"

    def __call__(self, bucket: GradBucket):
        self._backwards += bucket.index == 0
        if self._backwards <= self.warmup_steps:
            return all_reduce(bucket)
        matrices, plain = {}, []
        for slot, tensor in enumerate(bucket.tensors):
            if self._worth_it(tensor):
                matrices[bucket.names[slot]] = tensor
            else:
                plain.append(tensor)
        if not matrices:
            return all_reduce(bucket)
        given = {name: self._given(name, tensor) for name, tensor in matrices.items()}
        left = [m @ self._basis(name, m) for name, m in given.items()]
        # One collective for the left factors and everything that is not compressed.
        packed = _pack([*left, *plain])
        work = coll.all_reduce(packed, group=bucket.group, async_op=True, by=f"{bucket.by} (P)")
        return Then(work, lambda: self._finish(bucket, matrices, given, left, plain, packed))

    def _finish(self, bucket, matrices, given, left, plain, packed) -> None:
        _unpack(packed, [*left, *plain])
        left = [torch.linalg.qr(p).Q for p in left]
        right = [m.T @ p for m, p in zip(given.values(), left, strict=True)]
        packed = _pack(right)
        coll.all_reduce(packed, group=bucket.group, by=f"{bucket.by} (Q)")
        _unpack(packed, right)
        for (name, m), p, q in zip(given.items(), left, right, strict=True):
            mean = p @ q.T
            self.basis[name] = q
            # Each rank keeps its share of what the mean lost, so that the shares add up to the
            # loss.
            self.error[name] = tag(m - mean / bucket.world_size, "buffers")
            matrices[name].copy_(mean.view(matrices[name].shape))

    def _worth_it(self, tensor: Tensor) -> bool:
        if tensor.dim() < 2 or tensor.dtype not in (torch.float32, torch.float64):
            return False
        m, n = tensor.shape[0], tensor.numel() // max(1, tensor.shape[0])
        return self.min_saving * self.rank * (m + n) <= m * n

    def _given(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's gradient as a matrix, with what earlier steps still owe it."""
        matrix = tensor.reshape(tensor.shape[0], -1).clone()
        owed = self.error.get(name)
        return matrix if owed is None else matrix.add_(owed)

    def _basis(self, name: str, matrix: Tensor) -> Tensor:
        """The last Q, or a random start that is the same on every rank."""
        if name not in self.basis:
            generator = torch.Generator().manual_seed(self.seed + zlib.crc32(name.encode()))
            columns = min(self.rank, *matrix.shape)
            start = torch.randn(matrix.shape[1], columns, generator=generator)
            self.basis[name] = start.to(matrix)
        return self.basis[name]


def _pack(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _unpack(packed: Tensor, tensors: list[Tensor]) -> None:
    for part, tensor in zip(packed.split([t.numel() for t in tensors]), tensors, strict=True):
        tensor.copy_(part.view(tensor.shape))
