"""The strategies at 64 ranks in one process, without memory: the bytes that real tensors need."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

import minidist as md
from minidist.train.model import GPT, Block, GPTConfig, loss_fn

CONFIG = GPTConfig(vocab=64, seq=16, width=32, layers=3, heads=4)
WORLD = 64


@pytest.fixture
def fake_world():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=WORLD)
    yield
    dist.destroy_process_group()


def wrap(strategy, model):
    options = {"lr": 1e-3, "foreach": False}
    if strategy == "ddp":
        model = md.DDP(model)
    elif strategy.startswith("zero"):
        stage = int(strategy[-1])
        return model, md.ZeroOptimizer(
            model.named_parameters(), torch.optim.AdamW, stage=stage, **options
        )
    else:
        model = md.FSDP(model, strategy="FULL_SHARD", units=[Block])
    return model, torch.optim.AdamW(model.parameters(), **options)


def run(strategy, fake):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() if fake else nullcontext():
        torch.manual_seed(0)
        tokens = torch.randint(CONFIG.vocab, (2, CONFIG.seq))
        model, optimizer = wrap(strategy, GPT(CONFIG))
        with md.measure(model, optimizer) as m:
            for _ in range(2):
                loss_fn(model(tokens), tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
        return m.memory.as_dict(), m.traffic.as_dict()["by_op"]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_fake_tensors_at_64_ranks(fake_world, strategy):
    memory, traffic = run(strategy, fake=True)
    assert (memory, traffic) == run(strategy, fake=False)
    P = CONFIG.parameters
    optimizer = memory["current"]["optimizer"]
    if strategy == "ddp":
        assert memory["peak"]["parameters"] == 4 * P
        assert optimizer == 8 * P + 4 * len(list(GPT(CONFIG).parameters()))
    else:
        # A shard holds whole cache lines, so padding adds at most 64 bytes per state and bucket.
        assert 8 * P / WORLD <= optimizer < 8 * P / WORLD + 4096
    if strategy == "fsdp":
        assert memory["current"]["parameters"] < 4 * P / WORLD + 4096
        assert memory["peak"]["parameters"] < 4 * P
