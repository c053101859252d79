"""ZeRO stages 1 and 2: every rank keeps the whole model but updates only its shard of it.

    kept by each rank     parameters   gradients             optimizer states
    DDP                   whole        whole                 whole
    ZeRO-1                whole        whole                 1/N
    ZeRO-2                whole        1/N (+ two buckets)   1/N

    backward              step on the shard             afterwards
    bucket is full        wait for the shard's mean     all-gather the updated parameters
    reduce-scatter it     inner optimizer on the shard  of each bucket, in place

Stages 1 and 2 move as many bytes as DDP: a reduce-scatter and an all-gather are the two halves of
an all-reduce, 2(N-1)/N of the parameters. Stage 3 also shards the parameters: see `fsdp.py`.

Chapter 5; document 5.2; Rajbhandari et al. 2020, "ZeRO", sections 5.1, 5.2 and 7.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from minidist.comm import collectives as coll
from minidist.comm.mesh import resolve_group
from minidist.measure import tag
from minidist.parallel import offload as tiers
from minidist.parallel import zero_state
from minidist.parallel.agree import check_same_parameters
from minidist.parallel.buckets import plan_buckets
from minidist.parallel.elementwise import refuse_unless_elementwise
from minidist.parallel.flat import FlatLayout
from minidist.parallel.zero_bucket import Bucket

# Which ZeroOptimizer a parameter belongs to. Not an attribute of it: that would be pickled with it.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


class ZeroOptimizer(Optimizer):
    """A `torch.optim.Optimizer` whose states (stage 1) and mean gradients (stage 2) are sharded.

    `params_or_groups`: as for any torch optimizer (named parameters give better error messages).
    `optimizer_class`: any class that treats every element on its own; `**defaults` go to it. Others
    (LBFGS, LAMB, Muon, Adafactor) are recognised by a trial and refused with a ValueError.
    `bucket_cap_mb`: parameter MiB per bucket (None: one bucket, 0: one per parameter).
    `master_dtype=torch.float32`: keep 32-bit masters of 16-bit parameters and step on those.
    `reduce_dtype`: dtype in which gradients add up and travel (default: the parameters' own).
    `offload`: "cpu" keeps states, masters and the gradient shard in host memory, "disk" or
    "disk:DIRECTORY" keeps states and masters in memory-mapped files.

    Construction is collective and takes rank 0's values. Gradients are reduced during backward, no
    DDP is needed (inside `md.DDP` they are taken as they are). After `backward()` the parameters'
    `.grad` is None: the mean lives in the shards; clip with this class's `clip_grad_norm_`, not
    torch's. `step()` uses it up, whether or not `zero_grad()` is called; backwards without a step
    between them add up. In `no_sync()` gradients add up locally, and the next backward outside (or
    `step()`) reduces the sum. A parameter that no rank reached gets a zero gradient, as in FSDP:
    momentum and weight decay go on.
    """

    def __init__(
        self,
        params_or_groups,
        optimizer_class: type[Optimizer],
        *,
        stage: int = 1,
        bucket_cap_mb: float | None = 25,
        master_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        offload: str | None = None,
        group=None,
        **defaults: Any,
    ):
        if stage not in (1, 2):
            raise ValueError(f"stage must be 1 or 2, got {stage!r}: stage 3 is md.FSDP")
        if bucket_cap_mb is not None and bucket_cap_mb < 0:
            raise ValueError(f"bucket_cap_mb must be None or at least 0, got {bucket_cap_mb}")
        self.tier, self.directory = tiers.check_tier(offload)
        refuse_unless_elementwise(optimizer_class, defaults)
        self.process_group = resolve_group(group)
        self.rank, self.world_size = self.process_group.rank(), self.process_group.size()
        self.stage, self.bucket_cap_mb = stage, bucket_cap_mb
        self.master_dtype, self.reduce_dtype = master_dtype, reduce_dtype
        self.optimizer_class = optimizer_class
        self.buckets: list[Bucket] = []
        self.reduce_in_backward = True  # False: gradients stay in .grad until step() takes them
        self._place: dict[nn.Parameter, tuple[Bucket, int]] = {}
        self._frozen: dict[nn.Parameter, str] = {}
        self._sync = True
        self._next = 0  # the bucket to be reduced next: all ranks must use one order
        self._callback_queued = False
        self._in_flight: list[Bucket] = []  # being reduced, the oldest first
        inner_defaults = optimizer_class([nn.Parameter(torch.zeros(1))], **defaults).defaults
        super().__init__(params_or_groups, inner_defaults)

    # --- construction -------------------------------------------------------------------------

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Shard and spread one more group of parameters. Collective: all ranks add the same one."""
        super().add_param_group(param_group)
        group, number = self.param_groups[-1], len(self.param_groups) - 1
        unnamed = [f"group {number}, parameter {i}" for i in range(len(group["params"]))]
        named = list(zip(group.get("param_names") or unnamed, group["params"], strict=True))
        try:
            self._check(named, number)
        except Exception:
            self.param_groups.pop()
            raise
        self._frozen.update({param: name for name, param in named if not param.requires_grad})
        trained = [(name, param) for name, param in named if param.requires_grad]
        names, params = [n for n, _ in trained], [p for _, p in trained]
        # Backward produces gradients roughly in reverse order: the first bucket is full first.
        cap, order = self.bucket_cap_mb, range(len(params))[::-1]
        for indices in plan_buckets(params, order, cap, cap):
            bucket = Bucket(
                len(self.buckets), number, [names[i] for i in indices], [params[i] for i in indices]
            )
            self.buckets.append(bucket)
            self._shard_bucket(bucket)

    def _check(self, named: list[tuple[str, nn.Parameter]], number: int) -> None:
        settings = {
            key: getattr(self, key)
            for key in ("stage", "bucket_cap_mb", "master_dtype", "reduce_dtype", "optimizer_class")
        }
        problem = "; ".join(filter(None, (_cannot_be_sharded(*item) for item in named)))
        check_same_parameters(
            named, self.process_group, who="ZeroOptimizer",
            extra={**settings, "group": number, "problem": problem},
        )  # fmt: skip
        if problem:
            raise ValueError(f"ZeroOptimizer: {problem}")

    def _shard_bucket(self, bucket: Bucket) -> None:
        layout = bucket.layout = FlatLayout(bucket.params, self.world_size)
        first = bucket.params[0]
        bucket.full = layout.pack(bucket.params, layout.buffer(first.dtype, first.device))
        coll.broadcast(bucket.full, 0, group=self.process_group, by="zero start")
        tag(bucket.full, "parameters")
        for i, (param, view) in enumerate(
            zip(bucket.params, layout.views(bucket.full), strict=True)
        ):
            param.data = view
            self._place[param] = (bucket, i)
            _owners[param] = me = weakref.ref(self)
            # Weak, or the parameters would keep a discarded optimizer alive.
            param.register_post_accumulate_grad_hook(lambda p, me=me: me() and me()._on_gradient(p))
        shard = layout.shard(bucket.full, self.rank)
        if self.master_dtype not in (None, shard.dtype):
            shard = tag(shard.to(self.master_dtype), "optimizer")
        if self.tier == "cpu" and shard.is_cuda:
            shard = tiers.to_host(shard)
        elif self.tier == "disk" and not _same(shard, self._own_values(bucket)):
            bucket.on_disk["master"] = tiers.DiskTensor(shard, self.directory)
            shard = bucket.on_disk["master"].tensor
        bucket.shard = nn.Parameter(shard)
        bucket.inner = self.optimizer_class([{"params": [bucket.shard], **self.options(bucket)}])
        bucket.inner.state = self.state  # one dictionary: shard -> its states

    def options(self, bucket: Bucket) -> dict[str, Any]:
        """The options of the bucket's parameter group (lr, betas, ...), as they are now."""
        group = self.param_groups[bucket.group_index]
        return {k: v for k, v in group.items() if k not in ("params", "param_names")}

    def _own_values(self, bucket: Bucket) -> Tensor:
        return bucket.layout.shard(bucket.full, self.rank)

    # --- backward: collect, reduce ------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add gradients up locally without reducing them; the backward decides, not the forward."""
        self._sync, before = False, self._sync
        try:
            yield
        finally:
            self._sync = before

    def _on_gradient(self, param: nn.Parameter) -> None:
        if not self.reduce_in_backward or _averaged_by_ddp(param):
            return
        bucket, i = self._place[param]
        self._collect(bucket, i, param)
        if not self._sync:
            return
        bucket.arrived += 1  # not len(filled): those may have come in an earlier no_sync() backward
        if not self._callback_queued:
            self._callback_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.arrived < len(bucket.params):
                break
            self._reduce(bucket)

    def _collect(self, bucket: Bucket, i: int, param: nn.Parameter) -> None:
        """Move a gradient into the bucket, divided by N on the way (the copy is needed anyway)."""
        self._open(bucket)
        grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
        if i in bucket.filled:
            bucket.grad_views[i].add_(grad, alpha=1 / self.world_size)
        else:
            torch.mul(grad, 1 / self.world_size, out=bucket.grad_views[i])
            bucket.filled.add(i)
        param.grad = None

    def _open(self, bucket: Bucket) -> None:
        """Make the bucket's buffer free to be written, whatever an earlier backward left in it."""
        self._settle(bucket)
        if bucket.grad is None:
            self._take_grad_buffer(bucket)
        elif bucket.mean is not None and _same(bucket.mean, self._own_grad(bucket)):
            bucket.mean = bucket.mean.clone()  # stage 1 reduced in place

    def _reduce(self, bucket: Bucket) -> None:
        """Start the reduce-scatter of the next bucket in line."""
        self._open(bucket)
        for i, view in enumerate(bucket.grad_views):
            if i not in bucket.filled:  # a rank may not skip it: the others wait for this part
                view.zero_()
        # A reduction in flight needs a receive buffer, and keeps its bucket's full gradient alive:
        # stage 2 allows one, so that at most two full buckets exist (one travels, one fills).
        while len(self._in_flight) > (1 if self.stage == 1 else 0):
            self._settle(self._in_flight[0])
        shard = self._own_grad(bucket)  # stage 1 reduces in place: no extra memory
        if self.stage == 2:
            shard = tag(torch.empty_like(shard), "gradients")
        received = coll.make_scratch(shard, bucket.grad, self.process_group)
        bucket.work = coll.reduce_scatter(
            shard, bucket.grad, group=self.process_group, async_op=True,
            by=f"zero{self.stage} bucket {bucket.index}",
            scratch=[tag(part, "buffers") for part in received],
        )  # fmt: skip
        self._in_flight.append(bucket)
        bucket.filled.clear()
        bucket.arrived = 0
        self._next += 1

    def _settle(self, bucket: Bucket) -> None:
        """Wait until the bucket's reduction is complete, and keep only the shard of the mean."""
        if bucket.work is None:
            return
        shard, bucket.work = bucket.work.wait(), None
        self._in_flight.remove(bucket)
        if self.tier == "cpu" and shard.is_cuda:
            shard = tiers.to_host(shard)
        bucket.mean = shard if bucket.mean is None else bucket.mean.add_(shard)
        if self.stage == 2:
            bucket.grad, bucket.grad_views = None, []

    def _end_of_backward(self) -> None:
        # Exactly one reduction per bucket and backward on every rank, also of buckets that this
        # rank's graph did not reach: ranks that reduced different buckets would wait for ever.
        while self._next < len(self.buckets):
            self._reduce(self.buckets[self._next])
        self._next, self._callback_queued = 0, False

    def finish_reductions(self) -> None:
        """Complete what backward began: afterwards every bucket has its shard of the mean."""
        for param, (bucket, i) in self._place.items():
            if param.grad is not None:  # put there by hand, by DDP, or not taken in backward
                self._collect(bucket, i, param)
        if any(b.filled or (b.work is None and b.mean is None) for b in self.buckets):
            self._end_of_backward()  # gradients of no_sync(), or a backward that reached nothing
        for bucket in self.buckets:
            self._settle(bucket)
        for param, name in self._frozen.items():
            # Only now: reductions that are dropped under way would disturb the group.
            if param.requires_grad and param.grad is not None:
                raise RuntimeError(
                    f"ZeroOptimizer: {name} was frozen when this optimizer was made, so it is in "
                    "no bucket and would not be trained: make a new ZeroOptimizer"
                )
        if self.tier == "cpu" and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # the shards are on their way to the host

    # --- the step -----------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure=None):
        """Update this rank's shards with the mean gradients, then gather parameters everywhere."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.finish_reductions()
        gathers = []
        for bucket in self.buckets:  # while one bucket is updated, the one before is gathered
            bucket.inner.param_groups[0].update(self.options(bucket))  # schedulers change ours
            bucket.shard.grad = bucket.mean.to(bucket.shard.dtype)
            bucket.inner.step()
            bucket.shard.grad = bucket.mean = None
            if self.tier == "disk":
                self._to_disk(bucket)
            mine = self._own_values(bucket)
            if not _same(mine, bucket.shard):
                mine.copy_(bucket.shard, non_blocking=True)  # the model's image of the master
            gathers.append(coll.all_gather(
                bucket.full, mine, group=self.process_group, async_op=True,
                by=f"zero{self.stage} bucket {bucket.index}",
            ))  # fmt: skip
        for gather in gathers:
            gather.wait()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no step has used, local and reduced."""
        super().zero_grad(set_to_none)
        for bucket in self.buckets:
            self._settle(bucket)
            bucket.mean = None
            bucket.filled.clear()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the mean gradients so that their norm over all ranks is at most `max_norm`.

        Returns the norm before scaling (0-d, float32 or float64), equal on all ranks. Collective;
        between backward and step.
        """
        parts = [part for _, part in self.mean_gradients()]  # disjoint over ranks, no padding
        dtypes = [torch.promote_types(b.full.dtype.to_real(), torch.float32) for b in self.buckets]
        wide = torch.float64 if torch.float64 in dtypes else torch.float32
        mine = torch.zeros(len(parts) + 1, dtype=wide, device=self.buckets[0].full.device)
        for i, part in enumerate(parts):
            real = torch.view_as_real(part).norm(dim=-1) if part.is_complex() else part
            mine[i] = torch.linalg.vector_norm(real, norm_type, dtype=wide)
        if math.isinf(norm_type):
            norm = coll.all_reduce(mine.max(), "max", group=self.process_group, by="zero clip")
        else:
            norm = (mine**norm_type).sum()
            coll.all_reduce(norm, group=self.process_group, by="zero clip")
            norm = norm ** (1 / norm_type)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for part in parts:
            part.mul_(scale.to(part.device, part.dtype.to_real()))
        return norm

    @torch.no_grad()
    def mean_gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter with the part of its mean gradient that this rank owns (1-D, to be scaled
        in place), between backward and step. Collective when reductions are still to be made."""
        self.finish_reductions()
        for bucket in self.buckets:
            for piece in bucket.layout.pieces(self.rank):
                part = bucket.mean.narrow(0, piece.shard_start, piece.stop - piece.start)
                yield bucket.params[piece.index], part

    # --- buffers ------------------------------------------------------------------------------

    def _own_grad(self, bucket: Bucket) -> Tensor:
        return bucket.layout.shard(bucket.grad, self.rank)

    def _take_grad_buffer(self, bucket: Bucket) -> None:
        bucket.grad = torch.empty(
            bucket.layout.padded_numel,
            dtype=self.reduce_dtype or bucket.full.dtype,
            device=bucket.full.device,
        )
        # With stage 2 gradients only pass through; what stays is the shard.
        tag(bucket.grad, "gradients" if self.stage == 1 else "buffers")
        bucket.layout.clean_padding(bucket.grad)
        bucket.grad_views = bucket.layout.views(bucket.grad)

    def _to_disk(self, bucket: Bucket) -> None:
        """Move states that a step has made to files, and give back the pages of those there."""
        moved = False
        for key, value in self.state[bucket.shard].items():
            file = bucket.on_disk.get(key)
            sharded = isinstance(value, Tensor) and value.shape == bucket.shard.shape
            if sharded and (file is None or value is not file.tensor):
                bucket.on_disk[key] = tiers.DiskTensor(value, self.directory)
                self.state[bucket.shard][key] = bucket.on_disk[key].tensor
                moved = True
        for file in bucket.on_disk.values():
            file.release()
        if moved:
            value = file = None
            tiers.trim_heap()

    # --- saving ---------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, Any]:
        """The state dict of the plain optimizer, whole tensors on every rank (collective).

        Keyed by parameter index like torch's: it loads into a plain `optimizer_class` and into a
        ZeroOptimizer of any stage and world size. 32-bit masters are under the extra key `master`.
        """
        return zero_state.full(self)

    def load_full_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's shard out of a `full_state_dict()` or a plain optimizer's state dict.

        ValueError, before anything changes, if its groups or shapes do not fit.
        """
        zero_state.load_full(self, state_dict)

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard of the state; loads on the same rank of the same number of ranks."""
        return zero_state.shard(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` gave on this rank; ValueError if it was cut differently."""
        zero_state.load_shard(self, state_dict)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two shards are the same memory."""
    storages = (t.untyped_storage()._cdata for t in (a, b))  # fake tensors have no data_ptr
    return len(set(storages)) == 1 and a.storage_offset() == b.storage_offset()


def _averaged_by_ddp(param: nn.Parameter) -> bool:
    from minidist.parallel import ddp  # only here: stages 1 and 2 need no DDP

    owner = ddp._owners.get(param)
    return owner is not None and owner() is not None


def _cannot_be_sharded(name: str, param: nn.Parameter) -> str:
    owner = _owners.get(param, lambda: None)()
    if owner is not None:
        return f"parameter {name} already belongs to a ZeroOptimizer"
    if param.is_meta:
        return f"parameter {name} is on the meta device and has no values: initialise it first"
    return ""
