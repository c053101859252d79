"""Who competes in `minidist bench data-parallel`: our DDP, ZeRO and FSDP beside torch's own.

One GPT of 14 M parameters, float32, fused AdamW, a batch of 2 x 128 tokens per rank: small enough
that communication is a fifth of the step, as it is in practice on a fast network.

Where a rank has a core to itself or less, as on one CPU, communication during backward takes the
core away from it, and one bucket, sent at the end, may be faster. So DDP and ZeRO-1 take part in
two versions, and so does torch's DDP; the faster one counts, on both sides.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from minidist.comm import collectives as coll
from minidist.measure.bench import Contestant, Skip
from minidist.train.model import Block, Embed, GPTConfig, Head, build_gpt, loss_fn

CONFIG = GPTConfig(vocab=4096, seq=128, width=384, layers=6, heads=6)
BATCH = 2
ADAMW = {"lr": 1e-4, "weight_decay": 0.01, "fused": True}
UNITS = (Embed, Block, Head)
ONE_BUCKET_MB = 1 << 20

# Ratios to the best torch peer that prototypes reached, at 2 and 4 ranks.
GOALS = {
    "ddp": {2: 0.97, 4: 0.98},
    "zero1": {2: 0.95, 4: 0.96},
    "zero2": {2: 0.95, 4: 0.96},
    "fsdp-full": {2: 0.75, 4: 0.78},
    "fsdp-grad-op": {2: 0.78, 4: 0.82},
}


def contestants(row: str, config: GPTConfig = CONFIG, deepspeed: bool = False) -> list[Contestant]:
    """The contestants of a row, to be called on every rank; the first are the floor and ours."""
    job = Job(config)
    rs, ag = "reduce_scatter", "all_gather"
    bound, ours, peers = {
        "ddp": (job.floor(False, "all_reduce"), job.our_ddp(), job.torch_ddp(zero=False)),
        "zero1": (job.floor(True, rs, ag), job.our_zero(1), job.torch_ddp(zero=True)),
        "zero2": (job.floor(True, rs, ag), job.our_zero(2), job.torch_ddp(zero=True)),
        "fsdp-full": (
            job.floor(True, ag, ag, rs), job.our_fsdp("FULL_SHARD"), job.torch_fsdp(True)
        ),
        "fsdp-grad-op": (
            job.floor(True, ag, rs), job.our_fsdp("SHARD_GRAD_OP"), job.torch_fsdp(False)
        ),
    }[row]  # fmt: skip
    everybody = [*bound, *ours, *peers]
    stage = {"zero1": 1, "zero2": 2, "fsdp-full": 3}.get(row)
    if deepspeed and stage:
        everybody.append(Contestant(f"DeepSpeed ZeRO-{stage}", "peer", job.deepspeed(stage)))
    return everybody


class Job:
    """The same model, batch and optimizer for everybody."""

    def __init__(self, config: GPTConfig):
        self.config = config
        self.device = device()
        generator = torch.Generator().manual_seed(1000 + coll.rank())
        shape = (BATCH, config.seq)
        self.inputs, self.targets = (
            torch.randint(config.vocab, shape, generator=generator).to(self.device)
            for _ in range(2)
        )

    def model(self) -> nn.Module:
        return build_gpt(self.config, seed=0).to(self.device)

    def training(self, model: nn.Module, optimizer):
        def step() -> Tensor:
            loss = loss_fn(model(self.inputs), self.targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    # --- ours ---------------------------------------------------------------------------------

    def our_ddp(self) -> list[Contestant]:
        def build(**options):
            from minidist.parallel.ddp import DDP

            model = DDP(self.model(), **options)
            return self.training(model, torch.optim.AdamW(model.parameters(), **ADAMW))

        one_bucket = Contestant("minidist, one bucket", "ours", lambda: build(bucket_cap_mb=None))
        return [Contestant("minidist", "ours", build), one_bucket]

    def our_zero(self, stage: int) -> list[Contestant]:
        def build(**options):
            from minidist.parallel.zero import ZeroOptimizer

            model = self.model()
            optimizer = ZeroOptimizer(
                model.named_parameters(), torch.optim.AdamW, stage=stage, **options, **ADAMW
            )
            return self.training(model, optimizer)

        entries = [Contestant("minidist", "ours", build)]
        if stage == 1:  # stage 2 with one bucket would keep all gradients
            one_bucket = Contestant(
                "minidist, one bucket", "ours", lambda: build(bucket_cap_mb=None)
            )
            entries.append(one_bucket)
        return entries

    def our_fsdp(self, strategy: str) -> list[Contestant]:
        def build():
            from minidist.parallel.fsdp import FSDP

            model = FSDP(self.model(), strategy=strategy, units=list(UNITS))
            return self.training(model, torch.optim.AdamW(model.parameters(), **ADAMW))

        return [Contestant("minidist", "ours", build)]

    # --- the floor ------------------------------------------------------------------------------

    def floor(self, sharded: bool, *operations: str) -> list[Contestant]:
        """A step without communication, and the collectives that cannot be avoided by themselves.

        `sharded`: the optimizer has 1/N of the parameters to update, as in ZeRO and FSDP.
        """

        def alone():
            model = self.model()
            if not sharded:
                return self.training(model, torch.optim.AdamW(model.parameters(), **ADAMW))
            numel = sum(p.numel() for p in model.parameters()) // coll.world_size()
            shard = nn.Parameter(torch.zeros(numel, device=self.device))
            optimizer = torch.optim.AdamW([shard], **ADAMW)
            gradient = torch.zeros_like(shard)

            def step() -> None:
                loss_fn(model(self.inputs), self.targets).backward()
                shard.grad = gradient
                optimizer.step()
                model.zero_grad()

            return step

        def collectives():
            n = coll.world_size()
            numel = -(-sum(p.numel() for p in self.model().parameters()) // n) * n
            full = torch.zeros(numel, device=self.device)
            shard = full[: numel // n].clone()
            scratch = coll.make_scratch(shard, full)
            calls = {
                "all_reduce": lambda: coll.all_reduce(full),
                "reduce_scatter": lambda: coll.reduce_scatter(shard, full, scratch=scratch),
                "all_gather": lambda: coll.all_gather(full, shard),
            }

            def step() -> None:
                for operation in operations:
                    calls[operation]()

            return step

        return [
            Contestant("no communication", "floor", alone),
            Contestant(" + ".join(operations), "floor", collectives),
        ]

    # --- torch ----------------------------------------------------------------------------------

    def torch_ddp(self, zero: bool) -> list[Contestant]:
        def build(tuned: bool = False, **options):
            from torch.nn.parallel import DistributedDataParallel

            if tuned:
                options |= {"gradient_as_bucket_view": True, "static_graph": True}
            model = DistributedDataParallel(self.model(), **options)
            if not zero:
                return self.training(model, torch.optim.AdamW(model.parameters(), **ADAMW))
            from torch.distributed.optim import ZeroRedundancyOptimizer

            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=tuned, **ADAMW
            )
            return self.training(model, optimizer)

        name = "torch DDP + ZeRO" if zero else "torch DDP"
        tuned = f"{name}, parameters as bucket view" if zero else f"{name}, view and static graph"
        return [
            Contestant(name, "peer", build),
            Contestant(tuned, "peer", lambda: build(True)),
            Contestant(
                f"{tuned}, one bucket", "peer", lambda: build(True, bucket_cap_mb=ONE_BUCKET_MB)
            ),
        ]

    def torch_fsdp(self, reshard: bool) -> list[Contestant]:
        def first():
            from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
            from torch.distributed.fsdp.wrap import ModuleWrapPolicy

            strategy = ShardingStrategy.FULL_SHARD if reshard else ShardingStrategy.SHARD_GRAD_OP
            model = FullyShardedDataParallel(
                self.model(),
                sharding_strategy=strategy,
                auto_wrap_policy=ModuleWrapPolicy(set(UNITS)),
                use_orig_params=True,
                device_id=self.device,
            )
            return self.training(model, torch.optim.AdamW(model.parameters(), **ADAMW))

        def second():
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(self.device.type, (coll.world_size(),))
            model = self.model()
            for module in model.layers():
                fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
            fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
            return self.training(model, torch.optim.AdamW(model.parameters(), **ADAMW))

        return [
            Contestant("torch FSDP1", "peer", first),
            Contestant("torch FSDP2", "peer", second),
        ]

    # --- DeepSpeed --------------------------------------------------------------------------------

    def deepspeed(self, stage: int):
        def build():
            if self.device.type == "cpu":
                os.environ.setdefault("DS_ACCELERATOR", "cpu")
            try:
                import deepspeed
            except ImportError:
                raise Skip("DeepSpeed is not installed (pip install deepspeed)") from None
            # It reads the launcher's variables even when the process group is there already.
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            os.environ.setdefault("MASTER_PORT", "0")
            model = self.model()
            engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=torch.optim.AdamW(model.parameters(), **ADAMW),
                dist_init_required=False,
                config={
                    "train_micro_batch_size_per_gpu": BATCH,
                    # Its default buckets are 2 GB each, whatever the model.
                    "zero_optimization": {
                        "stage": stage,
                        "overlap_comm": True,
                        "reduce_bucket_size": 8 << 20,
                        "allgather_bucket_size": 8 << 20,
                    },
                    "zero_allow_untested_optimizer": True,
                    "zero_force_ds_cpu_optimizer": False,
                    "steps_per_print": 10**9,
                },
            )

            def step() -> Tensor:
                loss = loss_fn(engine(self.inputs), self.targets)
                engine.backward(loss)
                engine.step()
                return loss.detach()

            return step

        return build


def device() -> torch.device:
    """This rank's GPU if the job speaks NCCL, else the CPU."""
    if "nccl" in torch.distributed.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
