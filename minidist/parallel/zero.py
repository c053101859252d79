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

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from minidist.comm import collectives as coll
from minidist.comm.mesh import resolve_group
from minidist.measure import tag
from minidist.parallel.agree import check_same_parameters
from minidist.parallel.flat import FlatLayout


class Bucket:
    """Several parameters of one group and dtype that are reduced, updated and gathered together."""

    def __init__(self, index: int, names: list[str], params: list[nn.Parameter], group_index: int):
        self.index, self.names, self.params, self.group_index = index, names, params, group_index
        self.layout: FlatLayout
        self.full: Tensor  # all parameter values; the model's parameters are views of it
        self.shard: nn.Parameter  # what the inner optimizer updates
        self.inner: Optimizer
        self.grad_buffer: Tensor | None = None  # memory of `grad`, as large as the largest bucket
        self.grad: Tensor | None = None  # local gradients, already divided by the world size
        self.grad_views: list[Tensor] = []
        self.filled: set[int] = set()  # parameters whose gradient came since the last reduction
        self.arrived = 0  # gradients in the backward that will reduce this bucket
        self.work: coll.Work | None = None  # the reduction under way
        self.mean: Tensor | None = None  # this rank's shard of the mean gradient, until step()

    def own_grad(self, rank: int) -> Tensor:
        return self.layout.shard(self.grad, rank)


class ZeroOptimizer(Optimizer):
    """A `torch.optim.Optimizer` whose states (stage 1) and reduced gradients (stage 2) are sharded.

    `params_or_groups`: as for any torch optimizer (named parameters give better error messages);
    `optimizer_class`: any optimizer that treats every element on its own (SGD, Adam, AdamW,
    RMSprop, ...; `**defaults` go to it). Others, whose update of one element depends on the rest
    of its tensor (LBFGS, LAMB, Muon), are recognised by a trial and refused with a ValueError.

    Reduces gradients itself during backward, so no DDP is needed. A rank whose backward did not
    reach a parameter contributes zeros. After `backward()` the parameters' `.grad` is None: the
    mean lives in the shards, clip with `clip_grad_norm_`. `step()` consumes it; backwards without
    a step between them add up. In `no_sync()` gradients add up locally, and the next backward
    outside reduces the sum.

    `bucket_cap_mb`: parameter bytes per bucket, in MiB (None: one bucket, 0: one per parameter).
    `master_dtype=torch.float32`: keep 32-bit masters of 16-bit parameters and step on those.
    `reduce_dtype`: dtype in which gradients add up and travel (default: the parameters' own).
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
            raise ValueError(f"stage must be 1 or 2, got {stage}: stage 3 is md.FSDP")
        self.process_group = resolve_group(group)
        self.rank, self.world_size = self.process_group.rank(), self.process_group.size()
        self.stage, self.bucket_cap_mb = stage, bucket_cap_mb
        self.master_dtype, self.reduce_dtype = master_dtype, reduce_dtype
        self.optimizer_class = optimizer_class
        _refuse_unless_elementwise(optimizer_class, defaults)
        self.buckets: list[Bucket] = []
        self._place: dict[nn.Parameter, tuple[Bucket, int]] = {}
        self._sync = True
        self.reduce_in_backward = True  # False: gradients stay in .grad until step() takes them
        self._next = 0  # the bucket to be reduced next: all ranks must use one order
        self._callback_queued = False
        # A reduction in flight needs a receive buffer, and keeps its bucket's full gradient alive:
        # stage 2 allows one, so that at most two full buckets exist (one travels, one fills).
        self._lanes: list[Bucket | None] = [None] * (2 if stage == 1 else 1)
        self._scratch: list[Tensor | None] = [None] * len(self._lanes)  # where peers' parts arrive
        self._free_grads: list[Tensor] = []
        inner_defaults = optimizer_class([nn.Parameter(torch.zeros(1))], **defaults).defaults
        super().__init__(params_or_groups, inner_defaults)

    # --- construction -------------------------------------------------------------------------

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Shard and spread one more group of parameters; every rank must add the same one."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        names = group.get("param_names") or [f"group {len(self.param_groups) - 1}, parameter {i}"
                                             for i in range(len(group["params"]))]  # fmt: skip
        named = list(zip(names, group["params"], strict=True))
        check_same_parameters(
            named, self.process_group, extra={"bucket_cap_mb": self.bucket_cap_mb}
        )
        me = weakref.ref(self)
        for bucket in self._make_buckets([(n, p) for n, p in named if p.requires_grad]):
            self._shard_bucket(bucket)
            for i, param in enumerate(bucket.params):
                owner = getattr(param, "_zero_owner", None)
                if owner is not None and owner() is not None:
                    raise ValueError(
                        f"parameter {bucket.names[i]} already belongs to a ZeroOptimizer"
                    )
                param._zero_owner = me
                self._place[param] = (bucket, i)
                # Weak, or parameters would keep a discarded optimizer (and its hooks) alive.
                param.register_post_accumulate_grad_hook(lambda p: me() and me()._on_gradient(p))

    def _make_buckets(self, named: list[tuple[str, nn.Parameter]]) -> list[Bucket]:
        # Backward produces gradients roughly in reverse order: the first bucket is full first.
        cap = float("inf") if self.bucket_cap_mb is None else self.bucket_cap_mb * 2**20
        made: list[Bucket] = []
        filling: dict[tuple[torch.dtype, torch.device], tuple[Bucket, float]] = {}
        for name, param in reversed(named):
            key = (param.dtype, param.device)
            size = param.numel() * param.element_size()
            bucket, used = filling.get(key, (None, 0))
            if bucket is None or used + size > cap:
                bucket, used = Bucket(len(self.buckets), [], [], len(self.param_groups) - 1), 0
                self.buckets.append(bucket)
                made.append(bucket)
            bucket.names.append(name)
            bucket.params.append(param)
            filling[key] = (bucket, used + size)
        return made

    def _shard_bucket(self, bucket: Bucket) -> None:
        layout = bucket.layout = FlatLayout(bucket.params, self.world_size)
        first = bucket.params[0]
        bucket.full = layout.pack(bucket.params, layout.buffer(first.dtype, first.device))
        coll.broadcast(bucket.full, 0, group=self.process_group, by="zero start")
        for param, view in zip(bucket.params, layout.views(bucket.full), strict=True):
            param.data = view
        tag(bucket.full, "parameters")
        shard = layout.shard(bucket.full, self.rank)
        if self.master_dtype is not None and self.master_dtype != shard.dtype:
            shard = shard.to(self.master_dtype)
            tag(shard, "optimizer")
        bucket.shard = nn.Parameter(shard)
        bucket.inner = self.optimizer_class([{"params": [bucket.shard], **self._options(bucket)}])

    def _options(self, bucket: Bucket) -> dict[str, Any]:
        group = self.param_groups[bucket.group_index]
        return {k: v for k, v in group.items() if k not in ("params", "param_names")}

    # --- backward: collect, reduce ------------------------------------------------------------

    @contextmanager
    def no_sync(self):
        """Add gradients up locally without reducing them; the backward decides, not the forward."""
        self._sync, before = False, self._sync
        try:
            yield
        finally:
            self._sync = before

    def _on_gradient(self, param: nn.Parameter) -> None:
        if not self.reduce_in_backward:
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
        """Move a fresh gradient into the bucket, divided by N on the way (the copy is needed
        anyway)."""
        self._settle(bucket)  # a reduction of an earlier backward still reads the buffer
        if bucket.grad is None:
            self._take_grad_buffer(bucket)
        elif (
            bucket.mean is not None
            and bucket.mean.data_ptr() == bucket.own_grad(self.rank).data_ptr()
        ):
            bucket.mean = (
                bucket.mean.clone()
            )  # stage 1 reduced in place, and is about to write there
        scale = 1 / self.world_size
        if i in bucket.filled:
            bucket.grad_views[i].add_(param.grad, alpha=scale)
        else:
            torch.mul(param.grad, scale, out=bucket.grad_views[i])
            bucket.filled.add(i)
        param.grad = None

    def _reduce(self, bucket: Bucket) -> None:
        """Start the reduce-scatter of the next bucket in line."""
        if bucket.grad is None:
            self._take_grad_buffer(bucket)
        for i, view in enumerate(bucket.grad_views):
            if i not in bucket.filled:  # a rank may not skip it: the others wait for this part
                view.zero_()
        lane = self._next % len(self._lanes)
        if self._lanes[lane] is not None:
            self._settle(self._lanes[lane])
        self._lanes[lane] = bucket
        if self.stage == 1:
            shard = bucket.own_grad(self.rank)  # in place: no extra memory
        else:
            shard = bucket.grad.new_empty(bucket.layout.shard_numel)
            tag(shard, "gradients")
        bucket.work = coll.reduce_scatter(
            shard, bucket.grad, group=self.process_group, async_op=True,
            by=f"zero{self.stage} bucket {bucket.index}", scratch=self._scratch_for(lane, bucket),
        )  # fmt: skip
        bucket.filled.clear()
        bucket.arrived = 0
        self._next += 1

    def _settle(self, bucket: Bucket) -> None:
        """Wait until the bucket's reduction is complete, and keep only the shard of the mean."""
        if bucket.work is None:
            return
        shard = bucket.work.wait()
        bucket.work = None
        bucket.mean = shard if bucket.mean is None else bucket.mean.add_(shard)
        if self.stage == 2:
            self._free_grads.append(bucket.grad_buffer)
            bucket.grad_buffer = bucket.grad = None
            bucket.grad_views = []

    def _end_of_backward(self) -> None:
        # Exactly one reduction per bucket and backward on every rank, also of buckets that this
        # rank's graph did not reach: ranks that reduced different buckets would wait for each
        # other for ever.
        while self._next < len(self.buckets):
            self._reduce(self.buckets[self._next])
        self._next, self._callback_queued = 0, False

    def _finish_reductions(self) -> None:
        for param, (bucket, i) in self._place.items():
            if param.grad is not None:  # put there by hand, or not taken in backward
                self._collect(bucket, i, param)
        if any(b.filled or (b.work is None and b.mean is None) for b in self.buckets):
            self._end_of_backward()  # gradients of no_sync(), or a backward that reached nothing
        for bucket in self.buckets:
            self._settle(bucket)

    # --- the step -----------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure=None):
        """Update this rank's shards with the mean gradients, then gather the parameters on all
        ranks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._finish_reductions()
        gathers = []
        for bucket in self.buckets:  # while one bucket is updated, the one before is gathered
            bucket.inner.param_groups[0].update(self._options(bucket))  # schedulers change ours
            bucket.shard.grad = bucket.mean.to(bucket.shard.dtype)
            bucket.inner.step()
            bucket.shard.grad = bucket.mean = None
            mine = bucket.layout.shard(bucket.full, self.rank)
            if mine.data_ptr() != bucket.shard.data_ptr():
                mine.copy_(bucket.shard)  # the low-precision image of the master
            gathers.append(
                coll.all_gather(
                    bucket.full, mine, group=self.process_group, async_op=True,
                    by=f"zero{self.stage} bucket {bucket.index}",
                )
            )  # fmt: skip
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

        Returns the norm before scaling (0-d, float32 or float64), equal on all ranks. Call it on
        every rank, between backward and step.
        """
        self._finish_reductions()
        # Shards are disjoint: every element counts once. Padding lies behind `valid`.
        parts = [b.mean[: self._valid(b)] for b in self.buckets]
        wide = torch.promote_types(parts[0].dtype, torch.float32)
        norms = [torch.linalg.vector_norm(p, norm_type, dtype=wide) for p in parts if p.numel()]
        total = torch.stack(norms) if norms else parts[0].new_zeros(1, dtype=wide)
        if norm_type == float("inf"):
            norm = coll.all_reduce(total.max(), "max", group=self.process_group, by="clip")
        else:
            powers = (total**norm_type).sum()
            norm = coll.all_reduce(powers, group=self.process_group, by="clip") ** (1 / norm_type)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for bucket in self.buckets:
            bucket.mean.mul_(scale.to(bucket.mean.dtype))
        return norm

    def mean_gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter with the part of its mean gradient that this rank owns (1-D, to be scaled
        in place), between backward and step. Collective when reductions are still to be made."""
        self._finish_reductions()
        for bucket in self.buckets:
            for piece in bucket.layout.pieces(self.rank):
                part = bucket.mean.narrow(0, piece.shard_start, piece.stop - piece.start)
                yield bucket.params[piece.index], part

    def _valid(self, bucket: Bucket) -> int:
        begin = self.rank * bucket.layout.shard_numel
        return max(0, min(bucket.layout.shard_numel, bucket.layout.numel - begin))

    # --- buffers ------------------------------------------------------------------------------

    def _take_grad_buffer(self, bucket: Bucket) -> None:
        dtype, need = self.reduce_dtype or bucket.full.dtype, bucket.layout.padded_numel
        if self.stage == 2:  # buffers go round: a fresh one would cost page faults in every step
            for i, buffer in enumerate(self._free_grads):
                if buffer.dtype == dtype and buffer.numel() >= need:
                    bucket.grad_buffer = self._free_grads.pop(i)
                    break
            same = [b for b in self.buckets if b.full.dtype == bucket.full.dtype]
            need = max(b.layout.padded_numel for b in same)
        if bucket.grad_buffer is None:
            bucket.grad_buffer = torch.empty(need, dtype=dtype, device=bucket.full.device)
            # Stage 2 keeps shards; what passes through these buffers is not kept by anybody.
            tag(bucket.grad_buffer, "gradients" if self.stage == 1 else "buffers")
        bucket.grad = bucket.grad_buffer[: bucket.layout.padded_numel]
        bucket.layout.clean_padding(bucket.grad)
        bucket.grad_views = bucket.layout.views(bucket.grad)

    def _scratch_for(self, lane: int, bucket: Bucket) -> Tensor | None:
        need = coll.scratch_numel(bucket.grad, self.process_group)
        buffer = self._scratch[lane]
        if need and (buffer is None or buffer.numel() < need or buffer.dtype != bucket.grad.dtype):
            most = max(b.layout.shard_numel for b in self.buckets) * (self.world_size - 1)
            buffer = self._scratch[lane] = bucket.grad.new_empty(most)
            tag(buffer, "buffers")
        return buffer[:need] if need else None

    # --- saving: independent of the number of ranks, or this rank's part -----------------------

    def full_state_dict(self) -> dict[str, Any]:
        """The state dict that the plain optimizer would have, whole tensors on every rank
        (collective).

        Keyed by parameter index like torch's, so it loads into a plain `optimizer_class` and into a
        ZeroOptimizer of any stage and world size. 32-bit masters are under the extra key `master`.
        """
        place = {p: i for i, p in enumerate(p for g in self.param_groups for p in g["params"])}
        state: dict[int, dict[str, Any]] = {}
        masters: dict[int, Tensor] = {}
        for bucket in self.buckets:
            indices = [place[p] for p in bucket.params]
            for key, value in bucket.inner.state.get(bucket.shard, {}).items():
                for index, part in zip(indices, self._whole(bucket, value), strict=True):
                    state.setdefault(index, {})[key] = part
            if bucket.shard.dtype != bucket.full.dtype:
                masters.update(
                    zip(indices, self._whole(bucket, bucket.shard.detach()), strict=True)
                )
        result = {"state": dict(sorted(state.items())), "param_groups": self._packed_groups(place)}
        return {**result, "master": dict(sorted(masters.items()))} if masters else result

    def load_full_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's shard out of a state dict of `full_state_dict()` or of a plain
        optimizer."""
        place = {p: i for i, p in enumerate(p for g in self.param_groups for p in g["params"])}
        groups = state_dict["param_groups"]
        ours, theirs = ([len(g["params"]) for g in gs] for gs in (self.param_groups, groups))
        if ours != theirs:
            raise ValueError(
                f"the saved parameter groups have {theirs} parameters, this has {ours}"
            )
        for index, values in state_dict["state"].items():
            param = next((p for p, i in place.items() if i == index), None)
            for key, value in values.items():
                if isinstance(value, Tensor) and value.dim() and value.shape != param.shape:
                    raise ValueError(
                        f"saved state {key!r} of parameter {index} has shape {tuple(value.shape)}, "
                        f"the parameter has {tuple(param.shape)}"
                    )
        for mine, saved in zip(self.param_groups, groups, strict=True):
            mine.update({k: v for k, v in saved.items() if k not in ("params", "param_names")})
        for bucket in self.buckets:
            saved = [state_dict["state"].get(place[p], {}) for p in bucket.params]
            keys = {key for values in saved for key in values}
            bucket.inner.state.clear()
            if keys:
                bucket.inner.state[bucket.shard] = {k: self._own(bucket, k, saved) for k in keys}
            masters = state_dict.get("master")
            if masters and bucket.shard.dtype != bucket.full.dtype:
                parts = [{"master": masters[place[p]]} for p in bucket.params]
                bucket.shard.data.copy_(self._own(bucket, "master", parts))

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard of the state; loads on the same rank of the same number of ranks."""
        place = {p: i for i, p in enumerate(p for g in self.param_groups for p in g["params"])}
        return {
            "state": {b.index: dict(b.inner.state.get(b.shard, {})) for b in self.buckets},
            "masters": {
                b.index: b.shard.detach() for b in self.buckets if b.shard.dtype != b.full.dtype
            },
            "param_groups": self._packed_groups(place),
            "shard": (self.rank, self.world_size, [b.layout.shard_numel for b in self.buckets]),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` gave on this rank; ValueError if it was cut differently."""
        mine = (self.rank, self.world_size, [b.layout.shard_numel for b in self.buckets])
        theirs = state_dict.get("shard")
        if theirs is None or tuple(theirs) != mine:
            raise ValueError(
                f"this is the shard {theirs} (rank, world size, bucket shards), needed is {mine}: "
                "use full_state_dict() to move between world sizes or from a plain optimizer"
            )
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({k: v for k, v in saved.items() if k not in ("params", "param_names")})
        for bucket in self.buckets:
            bucket.inner.state.clear()
            values = state_dict["state"][bucket.index]
            if values:
                copies = {k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()}
                bucket.inner.state[bucket.shard] = copies
            if bucket.index in state_dict["masters"]:
                bucket.shard.data.copy_(state_dict["masters"][bucket.index])

    def _packed_groups(self, place: dict[nn.Parameter, int]) -> list[dict[str, Any]]:
        return [{**g, "params": [place[p] for p in g["params"]]} for g in self.param_groups]

    def _whole(self, bucket: Bucket, value: Any) -> list[Any]:
        """One value per parameter: sharded states gathered, scalars (Adam's step) copied."""
        if not (isinstance(value, Tensor) and value.shape == bucket.shard.shape):
            return [value.clone() if isinstance(value, Tensor) else value for _ in bucket.params]
        full = value.new_empty(bucket.layout.padded_numel)
        coll.all_gather(full, value.contiguous(), group=self.process_group, by="zero state")
        return [view.clone() for view in bucket.layout.views(full)]

    def _own(self, bucket: Bucket, key: str, saved: list[dict[str, Any]]) -> Any:
        example = next(values[key] for values in saved if key in values)
        if not (isinstance(example, Tensor) and example.dim()) and not any(
            isinstance(v.get(key), Tensor) and v[key].dim() for v in saved
        ):
            return example.clone() if isinstance(example, Tensor) else example
        dtype = example.dtype
        full = bucket.layout.buffer(dtype, bucket.shard.device)
        parts = [v[key] if key in v else torch.zeros(p.shape, dtype=dtype)
                 for v, p in zip(saved, bucket.params, strict=True)]  # fmt: skip
        return bucket.layout.shard(bucket.layout.pack(parts, full), self.rank).clone()


def _refuse_unless_elementwise(optimizer_class: type[Optimizer], defaults: dict[str, Any]) -> None:
    """Two steps on a matrix must give the same values as on its elements cut into two pieces."""
    if "lr" in defaults:
        defaults = {**defaults, "lr": 0.1}
    generator = torch.Generator().manual_seed(0)
    start, *grads = torch.randn(3, 24, dtype=torch.float64, generator=generator)
    results = []
    for shapes in ([(4, 6)], [(7,), (17,)]):
        sizes = [torch.Size(shape).numel() for shape in shapes]
        params = [
            nn.Parameter(v.clone().view(s)) for v, s in zip(start.split(sizes), shapes, strict=True)
        ]
        try:
            optimizer = optimizer_class(params, **defaults)
            for grad in grads:
                for param, part in zip(params, grad.split(sizes), strict=True):
                    param.grad = part.clone().view(param.shape)
                optimizer.step()
        except Exception as error:
            raise ValueError(
                f"{optimizer_class.__name__} cannot run on a flat shard: {error}. ZeRO needs an "
                "optimizer that updates every element on its own (SGD, Adam, AdamW, RMSprop, ...)"
            ) from error
        results.append(torch.cat([p.detach().flatten() for p in params]))
    if not torch.allclose(*results, rtol=1e-9, atol=0):
        raise ValueError(
            f"{optimizer_class.__name__} updates an element by looking at the rest of its tensor "
            "(a norm, a matrix): on a flat shard it would see only a part. Use an elementwise "
            "optimizer with ZeRO, or this one with DDP"
        )
