"""From a strategy's name to something that trains: model, optimizer, and one way to run a step.

Each branch is what a user of `md` would write in their own trainer. The order is the same
everywhere: cut layers (tensor parallel), choose this rank's layers (pipeline), then replicate or
shard what is left (data parallel), because each works on what the one before has left here.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minidist.comm import collectives as coll
from minidist.comm.mesh import build_mesh
from minidist.train.config import Layout, TrainConfig
from minidist.train.expected import place_of
from minidist.train.model import Block, build_gpt, loss_fn

OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


class Trainer:
    """One strategy on one rank: `forward_backward`, `step`, and who holds the loss."""

    def __init__(self, config: TrainConfig, layout: Layout, device: torch.device):
        self.config, self.layout, self.device = config, layout, device
        self.place = place_of(coll.rank(), layout)
        self.mesh = build_mesh(layout.dp, layout.pp, layout.tp)
        # Of each replica one rank speaks: the first tensor-parallel rank of the last stage.
        self.owns_loss = self.place.tp == 0 and self.place.pp == layout.pp - 1
        self.loss_fn = loss_fn
        self.pipeline = None
        model = build_gpt(config.model, config.seed, self._parameter_dtype()).to(device)
        if layout.tp > 1:
            model = self._cut_layers(model)
        if layout.pp > 1:
            model = self._cut_stages(model)
        self.module, self.optimizer = self._data_parallel(model)
        if layout.pp > 1:
            self.pipeline = self._pipeline(self.module)

    # --- a step ---------------------------------------------------------------------------------

    def forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Gradients of this rank's rows; the loss, or None on ranks that never see it."""
        if self.pipeline is not None:
            return self.pipeline.step(inputs, targets)
        loss = self.loss_fn(self.module(inputs), targets)
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    # --- how it is put together -----------------------------------------------------------------

    def _parameter_dtype(self) -> torch.dtype:
        # FSDP's 32-bit shard is the master copy; it converts as it gathers.
        if self.config.masters and self.layout.dp_kind.startswith("fsdp"):
            return torch.float32
        return self.config.torch_dtype()

    def _cut_layers(self, model: nn.Module) -> nn.Module:
        from minidist.parallel.tensor import tensor_parallel, vocab_parallel_cross_entropy

        group = self.mesh["tp"]
        self.loss_fn = partial(
            vocab_parallel_cross_entropy, vocab_size=self.config.model.vocab, group=group
        )
        return tensor_parallel(model, group)

    def _cut_stages(self, model: nn.Module) -> nn.Module:
        from minidist.parallel.pipeline import split

        # Equal numbers of blocks; embed and head come on top of the first and the last stage.
        costs = [0.0, *[1.0] * self.config.model.layers, 0.0]
        stages = split(model, self.layout.pp, costs=costs)
        return stages[self.place.pp]

    def _pipeline(self, stage: nn.Module):
        from minidist.parallel.pipeline import Pipeline

        return Pipeline(
            stage,
            schedule=self.layout.schedule,
            microbatches=self.layout.microbatches,
            loss_fn=self.loss_fn,
            group=self.mesh["pp"],
        )

    def _data_parallel(self, module: nn.Module):
        kind, group = self.layout.dp_kind, self.mesh["dp"]
        optimizer_class, options = OPTIMIZERS[self.config.optimizer], {"lr": self.config.lr}
        if self.config.optimizer == "sgd":
            options["momentum"] = 0.9
        cap = self.config.bucket_cap_mb
        masters = torch.float32 if self.config.masters else None
        if kind in ("zero1", "zero2"):
            from minidist.parallel.zero import ZeroOptimizer

            return module, ZeroOptimizer(
                module.named_parameters(),
                optimizer_class,
                stage=int(kind[-1]),
                bucket_cap_mb=cap,
                master_dtype=masters,
                group=group,
                **options,
            )
        if kind in ("fsdp", "fsdp-grad-op"):
            from minidist.parallel.fsdp import FSDP, MixedPrecision

            precision = MixedPrecision(torch.bfloat16, torch.float32) if masters else None
            strategy = "FULL_SHARD" if kind == "fsdp" else "SHARD_GRAD_OP"
            module = FSDP(
                module, strategy=strategy, units=[Block], mixed_precision=precision, group=group
            )
        elif self.layout.dp > 1:
            from minidist.parallel.ddp import DDP

            module = DDP(module, bucket_cap_mb=cap, group=group)
        if masters and kind == "ddp":
            from minidist.parallel.zero import ZeroOptimizer

            # Nothing to share in a group of one: the masters and states of plain mixed precision.
            alone, _ = dist.new_subgroups(1)
            return module, ZeroOptimizer(
                module.named_parameters(),
                optimizer_class,
                bucket_cap_mb=cap,
                master_dtype=masters,
                group=alone,
                **options,
            )
        return module, optimizer_class(module.parameters(), **options)
