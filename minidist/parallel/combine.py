"""Combining: one switch over the data parallel family, and the axes dp x pp x tp together.

    1. tensor parallel   cut the layers over mesh["tp"]       neighbours, the fastest wires
    2. pipeline          keep this rank's stage of mesh["pp"]
    3. data parallel     replicate or shard what is left over mesh["dp"]

The order follows from what each needs: tensor parallel wants whole layers, the pipeline whole
modules, data parallel takes any module. A gradient is then the mean over dp of the sum over
micro-batches, and each rank holds it for its shard of its stage.

Chapter 6; document 6; Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
Clusters", section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from minidist.comm import collectives as coll
from minidist.parallel.ddp import DDP
from minidist.parallel.fsdp import FSDP
from minidist.parallel.pipeline import Pipeline, split
from minidist.parallel.schedules import schedule as build_schedule
from minidist.parallel.tensor import (
    join_cut,
    take_cut,
    tensor_parallel,
    vocab_parallel_cross_entropy,
)
from minidist.parallel.zero import ZeroOptimizer

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp")


def shard(
    model: nn.Module,
    optimizer_class: type[Optimizer],
    strategy: str,
    *,
    group=None,
    **defaults: Any,
) -> tuple[nn.Module, Optimizer]:
    """The same training loop under any data parallel strategy: `(model, optimizer)` for it.

    `strategy`: ddp, zero1, zero2, or zero3 = fsdp (each repeated layer becomes an all-gather unit).
    `**defaults` go to `optimizer_class`. Raises ValueError for another name, before anything
    changes.
    """
    _check_strategy(strategy)
    wrapped = _wrap(model, strategy, group, _repeated(model))
    return wrapped, _optimizer([wrapped], optimizer_class, strategy, group, defaults)


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    dp: str = "ddp",
    schedule: str = "1f1b",
    microbatches: int | None = None,
    chunks: int | None = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    sequence_parallel: bool = False,
) -> Parallel:
    """Spread `model` over a mesh with the axes dp, pp, tp (`md.build_mesh`). Collective.

    `dp`: ddp, zero1, zero2, fsdp (= zero3), used inside each dp group. `schedule`, `microbatches`
    (default: two per stage), `chunks` (parts of the model per rank, default: 2 for interleaved and
    zb-v, else 1): as in `md.Pipeline`.
    `loss_fn`: mean loss of (outputs, targets); default cross-entropy over the last dimension. With
    tp > 1 the model must be the built-in GPT, whose logits are cut by vocabulary, and its own loss
    is used.

        parallel = md.parallelize(model, md.build_mesh(dp=2, pp=2, tp=2), dp="zero1")
        optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-3)
        loss = parallel.step(inputs, targets)      # this dp rank's rows; forward and backward
        parallel.clip_grad_norm_(1.0)
        optimizer.step(); optimizer.zero_grad()
    """
    return Parallel(model, mesh, dp, schedule, microbatches, chunks, loss_fn, sequence_parallel)


class Parallel(nn.Module):
    """What `parallelize` returns: this rank's part of the model, and the step over all axes."""

    def __init__(self, model, mesh, dp, schedule, microbatches, chunks, loss_fn, sequence_parallel):
        super().__init__()
        _check_strategy(dp)
        self.mesh, self.strategy = mesh, dp
        self.sizes = {axis: mesh[axis].size() for axis in ("dp", "pp", "tp")}
        tied = len(list(model.parameters())) < len(
            list(model.named_parameters(remove_duplicate=False))
        )
        if tied and self.sizes["pp"] > 1 and dp in ("fsdp", "zero3"):
            raise ValueError(
                "tied parameters on two pipeline stages cannot be sharded by FSDP: stages would "
                "cut them differently. Use dp='ddp', 'zero1' or 'zero2', or untie them"
            )
        self.loss_fn = loss_fn or _cross_entropy
        if self.sizes["tp"] > 1:
            self.loss_fn = partial(
                vocab_parallel_cross_entropy, vocab_size=model.config.vocab, group=mesh["tp"]
            )
            tensor_parallel(model, mesh["tp"], sequence_parallel=sequence_parallel)
        repeated = _repeated(model)  # before the pipeline takes the lists apart
        stages, plan = [model], None
        if self.sizes["pp"] > 1:
            microbatches = microbatches or 2 * self.sizes["pp"]
            plan = build_schedule(schedule, self.sizes["pp"], microbatches, chunks)
            if plan.splits_backward and dp in ("fsdp", "zero3"):
                raise ValueError(
                    f"schedule {schedule!r} computes weight gradients after the backward in which "
                    "FSDP reduces and frees them: use it with dp='ddp', 'zero1' or 'zero2'"
                )
            parts, rank = split(model, self.sizes["pp"], plan.chunks), coll.rank(mesh["pp"])
            stages = [parts[plan.stage(rank, chunk)] for chunk in range(plan.chunks)]
        # Noted before wrapping: a sharded parameter is another object.
        self.cuts = {
            name: parameter.tp_cut
            for stage in stages
            for name, parameter in stage.named_parameters(remove_duplicate=False)
            if hasattr(parameter, "tp_cut")
        }
        self.stages = nn.ModuleList(_wrap(stage, dp, mesh["dp"], repeated) for stage in stages)
        self.pipeline = None
        if plan is not None:
            self.pipeline = Pipeline(
                list(self.stages), schedule=plan, microbatches=microbatches, loss_fn=self.loss_fn,
                tied={name: p for stage in stages for name, p in stage.tied.items()},
                group=mesh["pp"],
            )  # fmt: skip
        self._optimizer: Optimizer | None = None

    def optimizer(self, optimizer_class: type[Optimizer], **defaults: Any) -> Optimizer:
        """The optimizer of this rank's parameters; with zero1 and zero2 a ZeroOptimizer over dp."""
        self._optimizer = _optimizer(
            self.stages, optimizer_class, self.strategy, self.mesh["dp"], defaults
        )
        if self.pipeline is not None and isinstance(self._optimizer, ZeroOptimizer):
            # Several backwards make one gradient: reduce it once, in step(), not per micro-batch.
            self._optimizer.reduce_in_backward = False
        return self._optimizer

    def step(self, inputs: Any, targets: Any) -> Tensor | None:
        """Forward and backward of this dp rank's batch; gradients are added to those there.

        Returns the (detached, 0-d) mean loss of this dp rank's rows on ranks of the last stage,
        None on the others.
        """
        if self.pipeline is not None:
            return self.pipeline.step(inputs, targets)
        loss = self.loss_fn(self.stages[0](inputs), targets)
        loss.backward()
        return loss.detach()

    def forward(self, inputs: Any) -> Any:
        """Evaluate: outputs on ranks of the last stage (with tp: cut by vocabulary), else None."""
        return self.stages[0](inputs) if self.pipeline is None else self.pipeline(inputs)

    # --- the norm of all gradients: every logical element counts once ----------------------------

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their 2-norm over dp x pp x tp is at most `max_norm`
        (collective).

        Shards over tp, pp and (with zero, fsdp) dp are added up. What is replicated counts once:
        over dp with DDP, over tp for norms and biases after the sum, a tied pair of embedding and
        head. Returns the norm before scaling (0-d), equal on all ranks.
        """
        if isinstance(self._optimizer, ZeroOptimizer):
            gradients = list(self._optimizer.mean_gradients())
        else:
            gradients = [(p, p.grad) for p in self.stages.parameters() if p.grad is not None]
        once = {id(p) for p in self._counted_here()}
        wide = (
            torch.float64 if any(g.dtype == torch.float64 for _, g in gradients) else torch.float32
        )
        device = next(self.stages.parameters()).device
        total = torch.zeros((), dtype=wide, device=device)
        for parameter, gradient in gradients:
            if id(parameter) in once:
                total += torch.linalg.vector_norm(gradient, dtype=wide) ** 2
        axes = ["pp", "tp"] if self.strategy == "ddp" else ["dp", "pp", "tp"]
        for axis in axes:
            coll.all_reduce(total, group=self.mesh[axis], by="clip")
        norm = total.sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for _, gradient in gradients:
            gradient.mul_(scale.to(gradient.dtype))
        return norm

    def _counted_here(self) -> list[nn.Parameter]:
        first_tp = coll.rank(self.mesh["tp"]) == 0
        duplicates = self.pipeline.tied.duplicates if self.pipeline else ()
        return [
            parameter
            for name, parameter in self._named(self.stages)
            if (first_tp or name in self.cuts) and parameter not in duplicates
        ]

    # --- state under the model's own names, whole tensors ---------------------------------------

    def full_state_dict(self) -> dict[str, Tensor]:
        """The plain model's state dict, whole tensors under the original names on every rank
        (collective)."""
        mine: dict[str, Tensor] = {}
        for stage in self.stages:
            mine.update(stage.full_state_dict() if isinstance(stage, FSDP) else stage.state_dict())
        tp = self.mesh["tp"]
        mine = {
            name: join_cut(value, self.cuts[name], tp)
            if name in self.cuts
            else value.detach().clone()
            for name, value in mine.items()
        }
        if self.pipeline is None:
            return mine
        stages = coll.all_gather_object(mine, self.mesh["pp"], by="full state")
        return {name: value for stage in stages for name, value in stage.items()}

    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take this rank's part out of a plain model's state dict. KeyError names what is
        missing."""
        for stage in self.stages:
            names = list(stage.full_state_dict() if isinstance(stage, FSDP) else stage.state_dict())
            missing = [name for name in names if name not in state]
            if missing:
                raise KeyError(f"not in the state dict: {', '.join(missing)}")
            tp = self.mesh["tp"]
            part = {
                name: take_cut(state[name], self.cuts[name], tp)
                if name in self.cuts
                else state[name]
                for name in names
            }
            load = stage.load_full_state_dict if isinstance(stage, FSDP) else stage.load_state_dict
            load(part)

    @staticmethod
    def _named(stages) -> list[tuple[str, nn.Parameter]]:
        """Original names: those of the wrapped module."""
        return [
            item
            for stage in stages
            for item in (stage.module if isinstance(stage, DDP) else stage).named_parameters()
        ]


def _wrap(module: nn.Module, strategy: str, group, repeated: set[nn.Module]) -> nn.Module:
    if strategy == "ddp":
        trains = any(p.requires_grad for p in module.parameters())
        return DDP(module, group=group) if trains else module
    if strategy in ("fsdp", "zero3"):
        units = repeated.intersection(module.modules())
        return FSDP(module, units=units.__contains__ if units else None, group=group)
    return module


def _repeated(model: nn.Module) -> set[nn.Module]:
    """The default units of FSDP: the members of the model's lists, like a transformer's blocks."""
    return {m for parent in model.modules() if isinstance(parent, nn.ModuleList) for m in parent}


def _optimizer(modules, optimizer_class, strategy: str, group, defaults) -> Optimizer:
    if strategy in ("zero1", "zero2"):
        named = Parallel._named(modules)
        return ZeroOptimizer(
            named, optimizer_class, stage=int(strategy[-1]), group=group, **defaults
        )
    return optimizer_class([p for m in modules for p in m.parameters()], **defaults)


def _check_strategy(strategy: str) -> None:
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}: use one of {', '.join(STRATEGIES)}")


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())
