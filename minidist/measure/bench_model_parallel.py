"""Who competes in `minidist bench model-parallel`: our pipelines, our tensor parallelism, torch's.

Pipelines: the same stages (cut by `md.split`), 8 micro-batches of one sequence of 128 tokens. Their
floor is what the slowest stage computes, drawn out by the schedule's bubble. With fewer cores than
ranks there is no such bubble: while one rank waits another has its core.

Tensor parallel: a batch of 4 x 128 tokens on every rank. Its floor is the sharded layers without
communication and the all-reduces by themselves.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from minidist.comm import collectives as coll
from minidist.measure.bench import Contestant
from minidist.measure.bench_data_parallel import ADAMW, device
from minidist.train.model import GPTConfig, build_gpt, loss_fn

PIPELINE_CONFIG = GPTConfig(vocab=4096, seq=128, width=384, layers=8, heads=6)
TENSOR_CONFIG = GPTConfig(vocab=4096, seq=128, width=384, layers=6, heads=8)
MICROBATCHES = 8
TENSOR_BATCH = 4

# row -> our schedule, chunks per rank, and torch's schedule classes for the same idea
SCHEDULES = {
    "gpipe": ("gpipe", 1, ["ScheduleGPipe"]),
    "1f1b": ("1f1b", 1, ["Schedule1F1B"]),
    "interleaved": ("interleaved", 2, ["ScheduleInterleaved1F1B", "ScheduleLoopedBFS"]),
    "zb-h1": ("zb-h1", 1, ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"]),
}
GOALS = {
    "gpipe": {2: 1.0, 4: 1.0},
    "1f1b": {2: 1.0, 4: 1.0},
    "interleaved": {2: 1.0, 4: 1.0},
    "zb-h1": {2: 0.98, 4: 0.98},
    "tp": {2: 0.8, 4: 0.7},
}


def contestants(row: str, config: GPTConfig | None = None) -> list[Contestant]:
    """The contestants of a row, to be called on every rank."""
    if row == "tp":
        return TensorJob(config or TENSOR_CONFIG).contestants()
    return PipelineJob(row, config or PIPELINE_CONFIG).contestants()


def _batch(config: GPTConfig, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000)
    shape = (rows, config.seq)
    inputs, targets = (torch.randint(config.vocab, shape, generator=generator) for _ in range(2))
    return inputs.to(device()), targets.to(device())


class PipelineJob:
    """One row: a schedule of ours and torch's for the same idea."""

    def __init__(self, row: str, config: GPTConfig):
        self.config, self.device = config, device()
        self.schedule, self.chunks, self.theirs = SCHEDULES[row]
        self.inputs, self.targets = _batch(config, MICROBATCHES)
        self.rank, self.world = coll.rank(), coll.world_size()

    def contestants(self) -> list[Contestant]:
        peers = [
            Contestant(f"torch {name.removeprefix('Schedule')}", "peer", partial(self.torchs, name))
            for name in self.theirs
        ]
        alone = Contestant("slowest stage and bubble", "floor", self.alone, self.stretch())
        return [alone, Contestant("minidist", "ours", self.ours), *peers]

    def parts(self, chunks: int) -> list[nn.Module]:
        from minidist.parallel.pipeline import split

        model = build_gpt(self.config, seed=0).to(self.device)
        return split(model, self.world, chunks)

    def training(self, parameters, forward_backward):
        optimizer = torch.optim.AdamW(parameters, **ADAMW)

        def step() -> Tensor | None:
            loss = forward_backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    def ours(self):
        from minidist.parallel.pipeline import Pipeline

        pipeline = Pipeline(
            self.parts(self.chunks),
            schedule=self.schedule,
            microbatches=MICROBATCHES,
            loss_fn=loss_fn,
        )
        return self.training(
            pipeline.parameters(), lambda: pipeline.step(self.inputs, self.targets)
        )

    def stretch(self) -> float:
        """How much longer than its busy time a rank takes in the ideal schedule."""
        from minidist.parallel.schedules import schedule

        if self.device.type == "cpu" and _cores() < self.world:
            return 1.0
        plan = schedule(self.schedule, self.world, MICROBATCHES, self.chunks)
        return 1 + plan.simulate(f=1, b=2).bubble

    def alone(self):
        """This rank's stages on all micro-batches, without any other rank."""
        from minidist.parallel.schedules import schedule

        plan = schedule(self.schedule, self.world, MICROBATCHES, self.chunks)
        parts = self.parts(self.chunks)
        mine = [plan.stage(self.rank, chunk) for chunk in range(self.chunks)]
        width = self.config.width
        hidden = torch.randn(1, self.config.seq, width, device=self.device)

        def forward_backward() -> None:
            for inputs, targets in zip(self.inputs.split(1), self.targets.split(1), strict=True):
                for stage in mine:
                    first, last = stage == 0, stage == len(parts) - 1
                    out = parts[stage](inputs if first else hidden.detach().requires_grad_())
                    loss_fn(out, targets).backward() if last else out.backward(hidden)

        return self.training(
            [p for stage in mine for p in parts[stage].parameters()], forward_backward
        )

    def torchs(self, name: str):
        from torch.distributed.pipelining import PipelineStage, schedules

        kind = getattr(schedules, name)
        single = issubclass(kind, schedules.PipelineScheduleSingle)
        chunks = 1 if single else 2
        last = self.world * chunks - 1
        mine = [c * self.world + self.rank for c in range(chunks)]
        if name == "ScheduleZBVZeroBubble":
            mine = [self.rank, last - self.rank]  # down and up the V
        parts = self.parts(chunks)
        stages = [PipelineStage(parts[i], i, last + 1, self.device) for i in mine]
        # torch divides the gradients by the number of micro-batches, as the mean loss needs.
        program = kind(
            stages[0] if single else stages, n_microbatches=MICROBATCHES, loss_fn=loss_fn
        )

        def forward_backward() -> Tensor | None:
            losses: list[Tensor] = []
            arguments = (self.inputs,) if 0 in mine else ()
            options = {"target": self.targets, "losses": losses} if last in mine else {}
            program.step(*arguments, **options)
            return torch.stack(losses).mean().detach() if losses else None

        return self.training([p for i in mine for p in parts[i].parameters()], forward_backward)


class TensorJob:
    """Our Megatron layout beside DTensor's `parallelize_module` on the same model."""

    def __init__(self, config: GPTConfig):
        self.config, self.device = config, device()
        self.inputs, self.targets = _batch(config, TENSOR_BATCH)

    def contestants(self) -> list[Contestant]:
        return [
            Contestant("sharded layers, no communication", "floor", self.alone),
            Contestant("all-reduces", "floor", self.collectives),
            Contestant("minidist", "ours", self.ours),
            Contestant("torch DTensor, blocks", "peer", partial(self.dtensor, False)),
            Contestant("torch DTensor, blocks and vocabulary", "peer", partial(self.dtensor, True)),
        ]

    def model(self) -> nn.Module:
        return build_gpt(self.config, seed=0).to(self.device)

    def training(self, model: nn.Module, loss_of, around=nullcontext):
        # DTensors and plain tensors cannot share a fused step.
        kinds: dict[type, list] = {}
        for parameter in model.parameters():
            kinds.setdefault(type(parameter.data), []).append(parameter)
        optimizers = [torch.optim.AdamW(parameters, **ADAMW) for parameters in kinds.values()]

        def step() -> Tensor:
            with around():
                loss = loss_of(model(self.inputs), self.targets)
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        return step

    def ours(self):
        from minidist.parallel.tensor import tensor_parallel, vocab_parallel_cross_entropy

        loss = partial(vocab_parallel_cross_entropy, vocab_size=self.config.vocab)
        return self.training(tensor_parallel(self.model()), loss)

    def alone(self):
        """The same layers in a group of one rank: this rank's shapes, no traffic."""
        n, config = coll.world_size(), self.config
        model = self.model()
        for block in model.blocks:
            attention, mlp = block.attention, block.mlp
            attention.qkv = nn.Linear(config.width, 3 * config.width // n)
            attention.proj = nn.Linear(config.width // n, config.width)
            mlp.up = nn.Linear(config.width, 4 * config.width // n)
            mlp.down = nn.Linear(4 * config.width // n, config.width)
        model.embed.token = nn.Embedding(config.vocab, config.width)
        model.head.lm = nn.Linear(config.width, config.vocab // n, bias=False)
        targets = self.targets % (config.vocab // n)
        step = self.training(model.to(self.device), lambda out, _: loss_fn(out, targets))
        return lambda: step() and None

    def collectives(self):
        """Four all-reduces of the hidden state per block, two for the vocabulary."""
        hidden = torch.zeros(TENSOR_BATCH, self.config.seq, self.config.width, device=self.device)

        def step() -> None:
            for _ in range(4 * self.config.layers + 2):
                coll.all_reduce(hidden)

        return step

    def dtensor(self, vocabulary: bool):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            loss_parallel,
            parallelize_module,
        )

        mesh = init_device_mesh(self.device.type, (coll.world_size(),))
        model = self.model()
        for block in model.blocks:
            _rows_by_rank(block.attention.qkv, coll.world_size())
            parallelize_module(
                block,
                mesh,
                {
                    "attention.qkv": ColwiseParallel(),
                    "attention.proj": RowwiseParallel(),
                    "mlp.up": ColwiseParallel(),
                    "mlp.down": RowwiseParallel(),
                },
            )
        if not vocabulary:
            return self.training(model, loss_fn)
        parallelize_module(
            model,
            mesh,
            {
                "embed.token": RowwiseParallel(input_layouts=Replicate()),
                "head.lm": ColwiseParallel(use_local_output=False),
            },
        )
        step = self.training(model, loss_fn, loss_parallel)
        return lambda: _local(step())


def _rows_by_rank(qkv: nn.Linear, ranks: int) -> None:
    """DTensor cuts rows in order, and our rows are [3, heads, head_dim]: bring each rank's heads of
    q, k and v together, or it would get all of q and none of v."""
    with torch.no_grad():
        for tensor in (qkv.weight, qkv.bias):
            rows = tensor.view(3, ranks, -1, *tensor.shape[1:]).transpose(0, 1)
            tensor.copy_(rows.reshape(tensor.shape).clone())


def _local(loss: Tensor) -> Tensor:
    return loss.full_tensor() if hasattr(loss, "full_tensor") else loss


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
