"""Collectives: thin, typed functions on any process group, each written down in the ledger.

On NCCL they are the native calls. On gloo (CPU) two of them are our own, because the native ones
are slow or costly there (measured on torch 2.13): `reduce_scatter` really moves all-reduce traffic,
2(N-1)/N of the buffer instead of (N-1)/N, and `all_gather` copies through extra buffers. Sending
each chunk straight to its owner, in `direct.py`, is 2-8 times faster; chapter 0 builds the same
thing from send and receive.

What gloo does wrongly without an error is caught here: strided tensors are made contiguous and
copied back, complex tensors travel as pairs of reals, sizes that cannot match raise before anything
is sent. `MINIDIST_DEBUG=1` also compares operation, size, dtype and call site over all ranks before
every collective, so that a mismatch is an error that shows both places instead of a hang.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.comm import ledger
from minidist.comm.direct import DirectReduceScatter, direct_all_gather, parts_beside
from minidist.comm.mesh import resolve_group

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
# torch 2.13 renamed the flat forms and warns about the old names.
_native_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_native_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Work:
    """A collective under way. `wait()` makes its result valid, closes its ledger record and
    returns it.

    On CUDA `wait()` makes the current stream wait, the host goes on. Calling it again does nothing.
    """

    def __init__(
        self,
        result: Tensor,
        record: ledger.Record | None,
        pending: list[Any],
        finish: Callable[[], None] | None = None,
    ):
        self._result, self._record, self._pending, self._finish = result, record, pending, finish

    def wait(self) -> Tensor:
        if self._record is not None:
            started = time.perf_counter()
            for work in self._pending:
                work.wait()
            if self._finish is not None:
                self._finish()
            ledger.close_record(self._record, started)
            # Dropping the handles frees the buffers that they keep alive.
            self._record, self._pending, self._finish = None, [], None
        return self._result

    def done(self) -> bool:
        """Whether `wait()` would return without blocking."""
        return all(work.is_completed() for work in self._pending)


def rank(group=None) -> int:
    """This process's rank inside `group`."""
    return resolve_group(group).rank()


def world_size(group=None) -> int:
    """The number of ranks in `group`."""
    return resolve_group(group).size()


def all_reduce(
    tensor: Tensor, op: str = "sum", *, group=None, async_op: bool = False, by: str = ""
):
    """Combine `tensor` (any shape) over the group, in place: every rank ends with the same values.

    Sends 2(N-1)/N of the tensor's bytes per rank (ring: reduce-scatter, then all-gather).
    `op`: sum, mean, max, min, product. Returns the tensor, or a `Work` with `async_op=True`.
    """
    pg = resolve_group(group)
    _check_op(op, tensor)
    n = pg.size()
    record = _open("all_reduce", pg, tensor, 2 * (n - 1) * _bytes(tensor) // n, by)
    if n == 1 or tensor.numel() == 0:
        return _finished(tensor, record, async_op)
    wire, finish = _wire(tensor)
    _agree(pg, record)
    pending = [dist.all_reduce(wire, _OPS[op], group=pg, async_op=True)]
    return _result(Work(tensor, record, pending, finish), async_op)


def reduce_scatter(
    shard: Tensor,
    full: Tensor,
    op: str = "sum",
    *,
    group=None,
    async_op: bool = False,
    by: str = "",
    scratch: list[Tensor] | None = None,
    tag: int = 0,
):
    """Combine `full` over the group and keep this rank's part: `shard[i] = op over ranks of
    full[rank*s + i]`.

    `full` is 1-D and contiguous with N * shard.numel() elements and must not change before
    `wait()`; `shard` may be this rank's own slice of it. Sends (N-1)/N of the bytes of `full` per
    rank. On gloo the sum runs in rank order 0..N-1, so the bits do not depend on how tensors are
    bucketed. `scratch`: what `make_scratch(shard, full)` gave, to receive into.
    `tag`: see `all_gather`.
    """
    pg = resolve_group(group)
    _check_op(op, full)
    n = pg.size()
    _check_flat("reduce_scatter", full, shard, n)
    record = _open("reduce_scatter", pg, full, (n - 1) * _bytes(shard), by)
    if n == 1 or full.numel() == 0:
        if shard.data_ptr() != full.data_ptr():
            shard.copy_(full)
        return _finished(shard, record, async_op)
    _agree(pg, record)
    if _is_direct(pg, full):
        scratch = make_scratch(shard, full, pg) if scratch is None else scratch
        exchange = DirectReduceScatter(shard, full, op, pg, scratch, tag)
        work = Work(shard, record, exchange.pending, exchange.finish)
    else:
        whole, part = (torch.view_as_real(t) if t.is_complex() else t for t in (full, shard))
        pending = [_native_reduce_scatter(part, whole, _OPS[op], group=pg, async_op=True)]
        work = Work(shard, record, pending)
    return _result(work, async_op)


def make_scratch(shard: Tensor, full: Tensor, group=None) -> list[Tensor]:
    """Memory for `reduce_scatter(shard, full, scratch=...)`, none where it is native. For a caller
    that keeps or counts it: separate tensors, because malloc maps what is larger than 32 MiB anew
    every time."""
    pg = resolve_group(group)
    count = parts_beside(shard, full, pg.size()) if _is_direct(pg, full) else 0
    return [torch.empty_like(shard) for _ in range(count)]


def all_gather(
    full: Tensor, shard: Tensor, *, group=None, async_op: bool = False, by: str = "", tag: int = 0
):
    """Put every rank's `shard` end to end into `full`: `full[r*s : (r+1)*s] = shard of rank r`.

    Both 1-D and contiguous, full.numel() == N * shard.numel(). `shard` may be this rank's own slice
    of `full`, then nothing is copied. Sends (N-1)/N of the bytes of `full` per rank. `tag`: calls
    with different tags (0 to 2**20) cannot be mistaken for each other on gloo: ranks that take
    different paths wait, and are found waiting, instead of mixing up what belongs to different
    buffers.
    """
    pg = resolve_group(group)
    n = pg.size()
    _check_flat("all_gather", full, shard, n)
    record = _open("all_gather", pg, full, (n - 1) * _bytes(shard), by)
    if n == 1 or full.numel() == 0:
        if shard.data_ptr() != full.data_ptr():
            full.copy_(shard)
        return _finished(full, record, async_op)
    _agree(pg, record)
    if _is_direct(pg, full):
        work = Work(full, record, direct_all_gather(full, shard, pg, tag))
    else:
        whole, part = (torch.view_as_real(t) if t.is_complex() else t for t in (full, shard))
        work = Work(full, record, [_native_all_gather(whole, part, group=pg, async_op=True)])
    return _result(work, async_op)


def broadcast(tensor: Tensor, src: int = 0, *, group=None, async_op: bool = False, by: str = ""):
    """Give every rank the values that `tensor` has on rank `src` of the group, in place."""
    pg = resolve_group(group)
    n = pg.size()
    _check_peer("src", src, n)
    record = _open("broadcast", pg, tensor, _broadcast_bytes(pg, tensor, src), by)
    if n == 1 or tensor.numel() == 0:
        return _finished(tensor, record, async_op)
    wire, finish = _wire(tensor)
    _agree(pg, record)
    source = dist.get_global_rank(pg, src)
    pending = [dist.broadcast(wire, source, group=pg, async_op=True)]
    return _result(Work(tensor, record, pending, finish), async_op)


def all_to_all(
    out: Tensor,
    inp: Tensor,
    *,
    out_splits: list[int] | None = None,
    in_splits: list[int] | None = None,
    group=None,
    async_op: bool = False,
    by: str = "",
):
    """Send part j of `inp` to rank j and receive part j of `out` from rank j.

    Parts are equal cuts of dimension 0, or the given row counts. Sends all but this rank's own
    part.
    """
    pg = resolve_group(group)
    n = pg.size()
    if in_splits is None and (inp.shape[0] % n or out.shape[0] % n):
        raise ValueError(
            f"all_to_all cuts dimension 0 into {n} equal parts, but it has {inp.shape[0]} rows in "
            f"and {out.shape[0]} rows out: pad it, or pass in_splits and out_splits"
        )
    own = inp.shape[0] // n if in_splits is None else in_splits[pg.rank()]
    row = _bytes(inp) // inp.shape[0] if inp.shape[0] else 0
    record = _open("all_to_all", pg, inp, (inp.shape[0] - own) * row, by)
    if n == 1:
        out.copy_(inp)
        return _finished(out, record, async_op)
    _agree(pg, record, sizes_may_differ=in_splits is not None)
    wire, finish = _wire(out)
    pending = [
        dist.all_to_all_single(wire, _wire(inp)[0], out_splits, in_splits, group=pg, async_op=True)
    ]
    return _result(Work(out, record, pending, finish), async_op)


def isend(tensor: Tensor, dst: int, *, group=None, tag: int = 0, by: str = "") -> Work:
    """Start to send `tensor` to rank `dst` of the group. It must not change before `wait()`."""
    pg = resolve_group(group)
    _check_peer("dst", dst, pg.size(), pg.rank())
    record = _open("send", pg, tensor, _bytes(tensor), by, dst, tag)
    wire, _ = _wire(tensor)
    peer = dist.get_global_rank(pg, dst)
    return Work(tensor, record, [dist.isend(_staged(wire, pg), peer, group=pg, tag=tag)])


def irecv(tensor: Tensor, src: int, *, group=None, tag: int = 0, by: str = "") -> Work:
    """Start to receive into `tensor` from rank `src` of the group; valid after `wait()`."""
    pg = resolve_group(group)
    _check_peer("src", src, pg.size(), pg.rank())
    record = _open("recv", pg, tensor, 0, by, src, tag)
    wire, finish = _wire(tensor)
    landing = _staged(wire, pg)
    if landing is not wire:
        finish = _copy_back(tensor, landing)
    peer = dist.get_global_rank(pg, src)
    return Work(tensor, record, [dist.irecv(landing, peer, group=pg, tag=tag)], finish)


def send(tensor: Tensor, dst: int, *, group=None, tag: int = 0, by: str = "") -> None:
    """Send `tensor` to rank `dst` of the group and wait until it may change again."""
    isend(tensor, dst, group=group, tag=tag, by=by).wait()


def recv(tensor: Tensor, src: int, *, group=None, tag: int = 0, by: str = "") -> Tensor:
    """Receive into `tensor` from rank `src` of the group and return it."""
    return irecv(tensor, src, group=group, tag=tag, by=by).wait()


def barrier(group=None, *, by: str = "") -> None:
    """Wait until every rank of the group is here."""
    pg = resolve_group(group)
    record = ledger.open_record("barrier", pg.group_name, pg.size(), 0, "-", 0, 0, by)
    started = time.perf_counter()
    if pg.size() > 1:
        dist.barrier(group=pg)
    ledger.close_record(record, started)


def all_gather_object(obj: Any, group=None, *, by: str = "") -> list[Any]:
    """Every rank's (picklable, small) object, in rank order. For agreements, not for data."""
    pg = resolve_group(group)
    record = ledger.open_record("all_gather_object", pg.group_name, pg.size(), 0, "-", 0, 0, by)
    started = time.perf_counter()
    result: list[Any] = [obj]
    if pg.size() > 1:
        result = [obj] * pg.size()
        # A dry run has nobody to ask, and under FakeTensorMode no values to unpickle.
        if dist.get_backend(pg) != "fake":
            dist.all_gather_object(result, obj, group=pg)
    ledger.close_record(record, started)
    return result


# --- small helpers ----------------------------------------------------------------------------


def _backend(pg, device: torch.device) -> str:
    for entry in dist.get_backend_config(pg).split(","):
        kind, _, name = entry.partition(":")
        if kind == device.type:
            return name
    return dist.get_backend(pg)


def _is_direct(pg, tensor: Tensor) -> bool:
    # gloo sends and receives only host memory, so CUDA tensors on gloo take the native collectives.
    return tensor.device.type == "cpu" and _backend(pg, tensor.device) == "gloo"


def _staged(tensor: Tensor, pg) -> Tensor:
    return tensor.cpu() if tensor.is_cuda and _backend(pg, tensor.device) == "gloo" else tensor


def _wire(tensor: Tensor) -> tuple[Tensor, Callable[[], None] | None]:
    """A contiguous real tensor with the same values, and what copies the result back (or None)."""
    wire, finish = tensor.detach(), None
    if wire.is_conj() or wire.is_neg() or not wire.is_contiguous():
        # gloo reads a strided tensor as if it were dense: wrong values, no error.
        wire = wire.resolve_conj().resolve_neg().contiguous()
        finish = _copy_back(tensor, wire)
    return (torch.view_as_real(wire) if wire.is_complex() else wire), finish


def _copy_back(tensor: Tensor, wire: Tensor) -> Callable[[], None]:
    def copy() -> None:
        with torch.no_grad():
            tensor.copy_(
                torch.view_as_complex(wire) if tensor.is_complex() != wire.is_complex() else wire
            )

    return copy


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _broadcast_bytes(pg, tensor: Tensor, src: int) -> int:
    n, place = pg.size(), (pg.rank() - src) % pg.size()
    if (
        _backend(pg, tensor.device) != "gloo"
    ):  # pipelined ring: all but the last rank pass it on once
        return _bytes(tensor) if place < n - 1 else 0
    # gloo: binomial tree. Place p is reached in round bit_length(p) and sends in the later rounds.
    children, reach = 0, 1 << place.bit_length()
    while place + reach < n:
        children, reach = children + 1, reach * 2
    return children * _bytes(tensor)


def _open(op: str, pg, tensor: Tensor, sent: int, by: str, peer=None, tag=None) -> ledger.Record:
    return ledger.open_record(
        op, pg.group_name, pg.size(), tensor.numel(), str(tensor.dtype).removeprefix("torch."),
        _bytes(tensor), sent, by, peer, tag,
    )  # fmt: skip


def _finished(tensor: Tensor, record: ledger.Record, async_op: bool):
    record.sent_bytes = 0
    return _result(Work(tensor, record, []), async_op)


def _result(work: Work, async_op: bool):
    return work if async_op else work.wait()


def _check_op(op: str, tensor: Tensor) -> None:
    if op not in _OPS:
        raise ValueError(f"unknown reduction {op!r}: use one of {', '.join(_OPS)}")
    if tensor.is_complex() and op not in ("sum", "mean"):
        raise ValueError(f"complex tensors can be summed or averaged, not reduced with {op!r}")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"the mean of {tensor.dtype} is not an integer: use op='sum' and divide")


def _check_flat(op: str, full: Tensor, shard: Tensor, n: int) -> None:
    if full.dim() != 1 or shard.dim() != 1 or full.numel() != n * shard.numel():
        raise ValueError(
            f"{op} over {n} ranks needs 1-D tensors with full.numel() == {n} * shard.numel(), "
            f"got full {tuple(full.shape)} and shard {tuple(shard.shape)}"
        )
    if full.dtype != shard.dtype or full.device != shard.device:
        raise ValueError(
            f"{op} needs one dtype and device, got full {full.dtype} on {full.device} "
            f"and shard {shard.dtype} on {shard.device}"
        )
    if not (full.is_contiguous() and shard.is_contiguous()):
        raise ValueError(f"{op} needs contiguous tensors: call .contiguous() first")


def _check_peer(name: str, peer: int, n: int, me: int | None = None) -> None:
    if not 0 <= peer < n:
        raise ValueError(f"{name}={peer} is not a rank of this group of {n} (ranks 0 to {n - 1})")
    if peer == me:
        raise ValueError(
            f"{name}={peer} is this rank itself: no backend sends to itself, copy instead"
        )


def debug_enabled() -> bool:
    """Whether MINIDIST_DEBUG=1: collectives are compared over ranks, padding is filled with NaN."""
    return os.environ.get("MINIDIST_DEBUG", "0") not in ("", "0")


def _agree(pg, record: ledger.Record, sizes_may_differ: bool = False) -> None:
    """MINIDIST_DEBUG=1: all ranks compare what they are about to do, before anything is sent."""
    if not debug_enabled():
        return
    mine = (record.op, 0 if sizes_may_differ else record.numel, record.dtype)
    everyone: list[Any] = [None] * pg.size()
    dist.all_gather_object(everyone, (mine, str(record)), group=pg)
    if any(other[0] != everyone[0][0] for other in everyone):
        calls = "\n".join(f"  rank {r}: {text}" for r, (_, text) in enumerate(everyone))
        raise RuntimeError(
            f"the ranks called different collectives in group {pg.group_name}:\n{calls}\n"
            "every rank of a group must make the same calls in the same order, with the same sizes"
        )
