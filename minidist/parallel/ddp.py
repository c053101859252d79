"""Distributed data parallel: every rank keeps the whole model, and gradients are averaged.

    kept by each rank    parameters   gradients   optimizer states      (nothing is sharded)
                         whole        whole       whole

    backward             gradient ready    copy it into its bucket, divided by N
                         bucket full       start its all-reduce, go on with backward   } overlap
                         backward ends     wait for all of them; .grad is the mean

One backward reads from top to bottom in `_Backward`: hook -> bucket -> collective -> wait.
`.grad` is a view of the bucket, so the reduced gradient is never copied back. An all-reduce moves
2(N-1)/N of the parameter bytes per rank and step: twice the parameters, "2x" in the document,
only for large N.

The first backward only learns: it sends nothing until its end, then rebuilds the buckets in the
order in which gradients arrived on rank 0. Registration order is only a guess at that order. It
also learns which parameters get gradients from nested backwards (reentrant checkpointing), in
several parts: those never leave before the end of backward.

Chapter 2; document section 2; Li et al. 2020, "PyTorch Distributed", sections 3.2 and 4.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minidist.comm import collectives as coll
from minidist.comm.mesh import resolve_group
from minidist.measure import tag
from minidist.parallel import hooks, uneven
from minidist.parallel.buckets import GradBucket, plan_buckets
from minidist.parallel.graph import ForwardOutputs, not_compiled
from minidist.parallel.replica import Replica
from minidist.parallel.replica import owners as _owners  # noqa: F401  (ZeRO looks here)
from minidist.parallel.unusual import settle


class DDP(Replica):
    """Wrap `module` so that `.grad` is the mean over ranks when `backward()` returns.

    Construction is collective: all ranks compare their parameters, and take rank 0's values.

    `bucket_cap_mb`, `first_bucket_mb`: MiB per bucket (None: one bucket, 0: one per parameter).
    `broadcast_buffers`: after each training forward all ranks take rank 0's buffers. A changed
    buffer is replaced, not overwritten: an earlier forward may have saved the old one for its
    backward. `find_unused_parameters`: a parameter that a backward does not reach counts as
    zeros; if no rank reached it, its `.grad` stays as it was. Without this option `backward()`
    raises on all ranks and names it. `comm_hook`: how a bucket is reduced, see `hooks.py`.

    Gradients add up over backwards, as without a wrapper; each backward outside `no_sync()`
    averages. They add up in the parameter's dtype. `torch.autograd.grad` returns this rank's own
    values, and `.grad` has no graph of its own after `backward(create_graph=True)`. The memory of
    `.grad` is used again by the next backward: clone a gradient to keep it. In a group of one rank
    DDP does nothing. A parameter belongs to the DDP that wrapped it last.
    """

    _runtime = (
        "group", "buckets", "_names", "_params", "_place", "_bucketed", "_learning", "_sync",
        "_active", "_dry_run", "_running", "_in_flight", "_forwards", "_announcements",
        "_in_parts", "_handles", "_buffer_places",
    )  # fmt: skip

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_cap_mb: float | None = 25,
        first_bucket_mb: float | None = 1,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        comm_hook: Callable[[GradBucket], Any] | None = None,
        group=None,
    ):
        super().__init__(module)
        for name, size in (("bucket_cap_mb", bucket_cap_mb), ("first_bucket_mb", first_bucket_mb)):
            if size is not None and size < 0:
                raise ValueError(f"{name} must be None or at least 0, got {size}")
        self.bucket_cap_mb, self.first_bucket_mb = bucket_cap_mb, first_bucket_mb
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.comm_hook = comm_hook or hooks.all_reduce
        self._enter(resolve_group(group), self._settings())

    def forward(self, *args, **kwargs):
        if self.group is None:  # unpickled: all ranks meet again at their first forward
            self._enter(resolve_group(None), self._settings())
        output = self.module(*args, **kwargs)
        if self._active and torch.is_grad_enabled():
            self._after_forward(output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients add up locally, nothing is sent. For all but the last micro-batch of a step.

        The *backward* decides: only a `backward()` outside averages, and it averages all that has
        added up, wherever the forwards ran. A forward inside does not broadcast buffers.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @contextmanager
    def join(self, divide_by: str = "world") -> Iterator[None]:
        """`with ddp.join():` around a loop with different numbers of batches per rank.

        A rank that leaves the block early answers the others with zeros until all have left; then
        all take the parameters and buffers of a rank that trained to the end. (Optimizer states
        of the early ranks miss those last steps.) `divide_by`: gradients are divided by the
        number of ranks of the group ("world"), or of those that still had data in that step
        ("active").
        """
        if divide_by not in ("world", "active"):
            raise ValueError(f"divide_by must be 'world' or 'active', got {divide_by!r}")
        if not self._active:
            yield
            return
        with uneven.only_one(self.group):
            device = self._params[0].device
            self._announcements = uneven.Announcements(self.group, device, divide_by)
            try:
                yield
                self._announcements.answer({
                    uneven.BUFFERS: lambda present: self._send_buffers(present[0]),
                    uneven.BACKWARD: lambda present: _Backward(self, absent=True).finish(),
                })  # fmt: skip
                self._send_values(self._announcements.last_present[0])
            finally:
                self._announcements = None

    # --- construction -------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        keys = ("bucket_cap_mb", "first_bucket_mb", "broadcast_buffers", "find_unused_parameters")
        hook = getattr(self.comm_hook, "__qualname__", None) or repr(self.comm_hook)
        hook = re.sub(r" at 0x[0-9a-f]+", "", hook)  # addresses differ between ranks
        return {**{key: getattr(self, key) for key in keys}, "comm_hook": hook}

    def _listen(self) -> None:
        """Start to follow the gradients of the module's parameters. Not collective."""
        named = dict(self.module.named_parameters())
        self._names, self._params = list(named), list(named.values())
        self._sync = True
        self._active = self.group.size() > 1  # and no other DDP has taken over
        self._dry_run = dist.get_backend(self.group) == "fake"
        self._running: weakref.ref[_Backward] | None = None
        self._in_flight: list[Any] = []
        self._forwards: weakref.WeakSet[ForwardOutputs] = weakref.WeakSet()
        self._announcements: uneven.Announcements | None = None  # inside join()
        self._in_parts: set[int] = set()  # parameters that nested backwards give gradients to
        self._handles: dict[int, Any] = {}  # hooks on parameters
        self._buffer_places = [(m, name) for m in self.module.modules() for name in m._buffers]
        for buffer in self.module.buffers():
            tag(buffer, "buffers")
        if self._active:
            self._take_over()
            self._make_buckets([i for i, p in enumerate(self._params) if p.requires_grad][::-1])

    def _retire(self) -> None:
        """Another DDP has wrapped the same parameters."""
        for handle in self._handles.values():
            handle.remove()
        self._handles, self._active = {}, False

    def _make_buckets(self, order: list[int], *, learned: bool = False) -> None:
        """Plan buckets for these parameters (indices, the first to arrive first), and hook them."""
        self._learning = not learned
        members = set(order)
        self._bucketed = [index in members for index in range(len(self._params))]
        plan = plan_buckets(self._params, order, self.bucket_cap_mb, self.first_bucket_mb)
        self.buckets: list[GradBucket] = []
        self._place: dict[int, tuple[GradBucket, int]] = {}
        for number, indices in enumerate(plan):
            names, params = [self._names[i] for i in indices], [self._params[i] for i in indices]
            last = number == len(plan) - 1
            self.buckets.append(GradBucket(number, names, params, self.group, flag=last))
            self._place |= {i: (self.buckets[-1], slot) for slot, i in enumerate(indices)}
        for index in self._place.keys() - self._handles.keys():
            hook = _Hook(self, lambda running, param, index=index: running.arrive(index, param))
            self._handles[index] = self._params[index].register_post_accumulate_grad_hook(hook)

    def _wait_for_buckets(self) -> None:
        for work in self._in_flight:
            work.wait()
        self._in_flight.clear()

    # --- between forward and backward ---------------------------------------------------------

    @not_compiled
    def _after_forward(self, output: Any) -> None:
        if self.broadcast_buffers and self.training and self._sync and self._buffer_places:
            self._send_buffers(self._announce(uneven.BUFFERS)[0])
        hook = _Hook(self, lambda running, grad: None)  # it is enough that a backward has begun
        first_only = not self.find_unused_parameters
        self._forwards.add(ForwardOutputs(output, self._params, hook, stop_at_first=first_only))

    def _announce(self, phase: int) -> list[int]:
        """The ranks that take part in this phase: all, unless some have finished inside join()."""
        if self._announcements is None:
            return list(range(self.group.size()))
        return self._announcements.announce(phase)[0]

    def _backward(self) -> _Backward:
        """The backward that autograd is running now; a new one if the last has ended or failed."""
        running = self._running and self._running()
        if running is None:
            running = _Backward(self)
            # Only autograd keeps it alive: when an error ends backward early, it is gone.
            self._running = weakref.ref(running)
            torch.autograd.Variable._execution_engine.queue_callback(running.finish)
        return running


class _Hook:
    """Brings an event of autograd to the backward it belongs to."""

    def __init__(self, ddp: DDP, react: Callable[[_Backward, Tensor], None]):
        self.ddp = weakref.ref(ddp)  # a strong one would keep a wrapper alive that was thrown away
        self.react = react

    @not_compiled
    def __call__(self, tensor: Tensor) -> None:
        ddp = self.ddp()
        if ddp is not None and ddp._sync and ddp._active:
            self.react(ddp._backward(), tensor)


class _Backward:
    """One backward of one DDP: hook -> bucket -> collective -> wait."""

    def __init__(self, ddp: DDP, absent: bool = False):
        self.ddp, self.absent = ddp, absent  # absent: this rank has no data left, see `join`
        self.task = torch._C._current_graph_task_id()
        self.arrived: dict[int, None] = {}  # parameters, in order of arrival
        self.filled: set[int] = set()  # parameters whose gradient is in its bucket
        self.lacking = [len(b.params) for b in ddp.buckets]  # gradients each bucket waits for
        self.next = 0  # buckets leave in order, or ranks would mix them up
        self.unusual = 0  # how many things all ranks should hear of, see unusual.py
        self.scale = 1 / ddp.group.size()
        self.unreached = bool(ddp._forwards) and not any(f.reaches for f in ddp._forwards)
        # Left by a backward that failed. Its buckets are about to be written again.
        ddp._wait_for_buckets()

    def arrive(self, index: int, param: nn.Parameter) -> None:
        """The hook: `param.grad` has just been added to."""
        ddp = self.ddp
        if not self.arrived:
            self.begin()
        self.arrived[index] = None
        if torch._C._current_graph_task_id() != self.task:
            ddp._in_parts.add(index)
        if index in self.filled:
            raise RuntimeError(
                f"DDP: parameter {ddp._names[index]!r} received a gradient after its bucket was "
                "filled. Either its use cannot be seen from what forward() returned (return that "
                "tensor, too), or it is now used inside a reentrant checkpoint and was not before "
                "(checkpoint with use_reentrant=False)"
            )
        if ddp._learning or index in ddp._in_parts or index not in ddp._place:
            return  # more may come, or ranks must agree on it first: at the end of backward
        param.grad = self.fill(index)
        self.launch_full_buckets()

    def begin(self) -> None:
        """Before the first gradient."""
        ddp = self.ddp
        if self.absent:
            return
        present = ddp._announce(uneven.BACKWARD)
        if ddp._announcements is not None and ddp._announcements.divide_by == "active":
            self.scale = 1 / len(present)
        # Later would be too late: the last bucket may have left with its flag by then.
        self.unusual += ddp._bucketed != [p.requires_grad for p in ddp._params]
        if ddp.find_unused_parameters and ddp._forwards and not ddp._learning:
            reached = set().union(*(f.reaches for f in ddp._forwards)) | ddp._in_parts
            for index in ddp._place.keys() - reached:
                self.fill(index)  # or its bucket, and all that follow, would wait for the end
                self.unusual += 1

    def fill(self, index: int) -> Tensor:
        """Put a gradient into its bucket, divided by N on the way; returns its place there."""
        ddp = self.ddp
        bucket, slot = ddp._place[index]
        grad, place = ddp._params[index].grad, bucket.tensors[slot]
        if self.absent or (grad is None and index not in self.arrived):
            place.zero_()
        elif grad is None:
            raise RuntimeError(
                f"DDP: another hook took the gradient of {ddp._names[index]!r} away before it was "
                "averaged: wrap the module before registering hooks that consume gradients"
            )
        elif grad.dtype != place.dtype:
            raise RuntimeError(
                f"DDP: parameter {ddp._names[index]!r} was {place.dtype} when it was wrapped and "
                f"is {grad.dtype} now: convert first, then wrap"
            )
        else:
            if grad.is_sparse:
                grad = grad.to_dense()
            if grad.requires_grad:  # backward(create_graph=True)
                grad = grad.detach()
            # It may already lie there (zero_grad(set_to_none=False), or not zeroed).
            torch.mul(grad, self.scale, out=place)
        self.filled.add(index)
        self.lacking[bucket.index] -= 1
        # A tensor object of its own: module.to() and others swap the memory of what .grad holds.
        return place.detach()

    def launch_full_buckets(self) -> None:
        buckets = self.ddp.buckets
        while self.next < len(buckets) and self.lacking[self.next] == 0:
            bucket = buckets[self.next]
            if bucket.flag is not None:
                bucket.flag.fill_(self.unusual)
            self.ddp._in_flight.append(self.ddp.comm_hook(bucket))
            self.next += 1

    @not_compiled
    @torch.no_grad()
    def finish(self) -> None:
        """At the end of backward: what is left leaves, and everything is waited for."""
        ddp = self.ddp
        ddp._running = None
        if not self.arrived:
            if not (self.unreached or self.absent):
                return  # torch.autograd.grad: nothing has been added to any .grad
            self.begin()
        if ddp._learning:
            self.learn()
        params, place = ddp._params, ddp._place
        lost = [i for i in place if i not in self.arrived and params[i].requires_grad]
        had_grad = [p.grad is not None and not self.absent for p in params]
        for index in place.keys() - self.filled:
            gradient = self.fill(index)
            if index in self.arrived:
                params[index].grad = gradient
        self.unusual += 0 if self.absent else len(lost)
        self.launch_full_buckets()
        ddp._wait_for_buckets()
        # On a GPU, reading the flag waits for the reductions: the price of an error before step().
        # In a dry run there are no other ranks, and maybe no values.
        if self.unusual if ddp._dry_run else ddp.buckets[-1].flag.item():
            agreed = settle(ddp, lost, had_grad, self.scale, self.absent)
            for index in [] if self.absent else lost:
                if agreed.had_grad[index]:
                    bucket, slot = place[index]
                    params[index].grad = bucket.tensors[slot].detach()
            if agreed.trainable != ddp._bucketed and any(agreed.trainable):
                ddp._make_buckets([i for i, yes in enumerate(agreed.trainable) if yes][::-1])

    def learn(self) -> None:
        """Rebuild the buckets in the order in which gradients arrived on rank 0."""
        ddp = self.ddp
        order = [*(i for i in self.arrived if i in ddp._place)]
        order += [i for i in ddp._place if i not in self.arrived]
        order = coll.all_gather_object(order, ddp.group, by="ddp bucket order")[0]
        ddp._make_buckets(order, learned=True)
        self.lacking = [len(b.params) for b in ddp.buckets]
