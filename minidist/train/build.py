"""From a strategy's name to something that trains: model, optimizer, and one way to run a step.

Each branch is what a user of `md` would write in their own trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from minidist.comm import collectives as coll
from minidist.comm.mesh import build_mesh
from minidist.train.config import Layout, TrainConfig
from minidist.train.expected import place_of
from minidist.train.model import Block, build_gpt, loss_fn
from minidist.train.optim import MasterOptimizer

OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
# Adam's default, 1e-8, hides nothing in float32; the options are the same for every strategy.
OPTIONS = {"adamw": {"weight_decay": 0.01}, "adam": {}, "sgd": {"momentum": 0.9}}


class Trainer:
    """One strategy on one rank: `forward_backward`, `step`, and who holds the loss."""

    def __init__(self, config: TrainConfig, layout: Layout, device: torch.device):
        self.config, self.layout, self.device = config, layout, device
        self.place = place_of(coll.rank(), layout)
        self.mesh = build_mesh(layout.dp, layout.pp, layout.tp)
        # Of each replica one rank speaks: the first tensor-parallel rank of the last stage.
        self.owns_loss = self.place.tp == 0 and self.place.pp == layout.pp - 1
        self.options = {"lr": config.lr, **OPTIONS[config.optimizer]}
        model = build_gpt(config.model, config.seed, self._parameter_dtype()).to(device)
        self.module: nn.Module
        self.optimizer: torch.optim.Optimizer
        # (inputs, targets) of this rank -> loss, with gradients left behind
        self._run: Callable[[Tensor, Tensor], Tensor | None]
        if layout.pp > 1 or (layout.tp > 1 and layout.dp > 1):
            self._combine(model)
        else:
            self._one_axis(model)

    def forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Gradients of this rank's rows; their mean loss, or None on ranks that never see it."""
        return self._run(inputs, targets)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    # --- one axis -------------------------------------------------------------------------------

    def _one_axis(self, model: nn.Module) -> None:
        """Forward, backward, step: the loop does not show which strategy it is."""
        loss_of = loss_fn
        if self.layout.tp > 1:
            model, loss_of = self._cut_layers(model)
        self.module, self.optimizer = self._data_parallel(model)

        def run(inputs: Tensor, targets: Tensor) -> Tensor:
            loss = loss_of(self.module(inputs), targets)
            loss.backward()
            return loss.detach()

        self._run = run

    def _cut_layers(self, model: nn.Module):
        from minidist.parallel.tensor import tensor_parallel, vocab_parallel_cross_entropy

        group = self.mesh["tp"]
        loss_of = partial(
            vocab_parallel_cross_entropy, vocab_size=self.config.model.vocab, group=group
        )
        return tensor_parallel(model, group), loss_of

    def _data_parallel(self, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        kind, group = self.layout.dp_kind, self.mesh["dp"]
        if kind in ("zero1", "zero2"):
            return model, self._zero(model, group, stage=int(kind[-1]))
        if kind in ("fsdp", "fsdp-grad-op"):
            model = self._fsdp(model, group)
        elif self.layout.dp > 1:
            from minidist.parallel.ddp import DDP

            model = DDP(model, bucket_cap_mb=self.config.bucket_cap_mb, group=group)
        if self.config.masters and kind == "ddp":
            return model, MasterOptimizer(model.parameters(), self._optimizer_class, **self.options)
        return model, self._optimizer_class(model.parameters(), **self.options)

    def _zero(self, model: nn.Module, group, stage: int) -> torch.optim.Optimizer:
        from minidist.parallel.zero import ZeroOptimizer

        return ZeroOptimizer(
            model.named_parameters(),
            self._optimizer_class,
            stage=stage,
            bucket_cap_mb=self.config.bucket_cap_mb,
            master_dtype=torch.float32 if self.config.masters else None,
            group=group,
            **self.options,
        )

    def _fsdp(self, model: nn.Module, group) -> nn.Module:
        from minidist.parallel.fsdp import FSDP, MixedPrecision

        strategy = "FULL_SHARD" if self.layout.dp_kind == "fsdp" else "SHARD_GRAD_OP"
        precision = None
        if self.config.masters:
            precision = MixedPrecision(self.config.torch_dtype(), torch.float32)
        return FSDP(model, strategy=strategy, units=[Block], mixed_precision=precision, group=group)

    @property
    def _optimizer_class(self):
        return OPTIMIZERS[self.config.optimizer]

    def _parameter_dtype(self) -> torch.dtype:
        # FSDP's 32-bit shard is the master copy; it converts as it gathers.
        if self.config.masters and self.layout.dp_kind.startswith("fsdp"):
            return torch.float32
        return self.config.torch_dtype()

    # --- several axes, or a pipeline ------------------------------------------------------------

    def _combine(self, model: nn.Module) -> None:
        from minidist.parallel.combine import parallelize

        parallel = parallelize(
            model,
            self.mesh,
            dp=self.layout.dp_kind,
            schedule=self.layout.schedule,
            microbatches=self.layout.microbatches,
            chunks=self.layout.chunks,
        )
        self.module, self._run = parallel, parallel.step
        self.optimizer = parallel.optimizer(self._optimizer_class, **self.options)
