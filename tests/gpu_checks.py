"""Checks for a machine with one NVIDIA GPU; run by gpu_checks.sh, not by pytest."""

import statistics
import sys
import time
import traceback

import torch

import minidist as md
from minidist.comm.launch import launch
from minidist.train.model import GPTConfig, build_gpt, loss_fn

CONFIG = GPTConfig(vocab=512, seq=128, width=512, layers=6, heads=8)


def _data(batch=8, config=CONFIG, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randint(0, config.vocab, (2, batch, config.seq), generator=generator)
    return x.cuda(), y.cuda()


def _strategies():
    return ("ddp", "zero1", "zero2", "fsdp")


def nccl_with_one_rank():
    """Every strategy on NCCL equals plain training on the GPU, in float64."""
    config = GPTConfig(vocab=64, seq=16, width=32, layers=2, heads=2)
    x, y = _data(4, config)
    with md.init() as context:
        assert context.backend == "nccl" and context.device.type == "cuda", context
        serial = build_gpt(config, 0, torch.float64).cuda()
        plain = torch.optim.AdamW(serial.parameters(), lr=0.01)
        for _ in range(3):
            loss_fn(serial(x), y).backward()
            plain.step()
            plain.zero_grad()
        want = loss_fn(serial(x), y).item()
        for strategy in _strategies():
            model = build_gpt(config, 0, torch.float64).cuda()
            model, optimizer = md.shard(model, torch.optim.AdamW, strategy, lr=0.01)
            for _ in range(3):
                loss_fn(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            got = loss_fn(model(x), y).item()
            assert abs(got / want - 1) < 1e-10, (strategy, got, want)


def _train_on_gpu(strategy):
    config = GPTConfig(vocab=64, seq=16, width=32, layers=2, heads=2)
    x, y = _data(12, config)
    rank, n = md.comm.collectives.rank(), md.comm.collectives.world_size()
    model = build_gpt(config, 0, torch.float64).cuda()
    model, optimizer = md.shard(model, torch.optim.AdamW, strategy, lr=0.01)
    for _ in range(3):
        loss_fn(model(x.chunk(n)[rank]), y.chunk(n)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss_fn(model(x), y).item()


def gloo_with_cuda_tensors():
    """2 and 4 ranks share the GPU and talk through the host: the same losses as one rank."""
    for strategy in _strategies():
        want = launch(_train_on_gpu, 1, strategy)[0]
        for ranks in (2, 4):
            for got in launch(_train_on_gpu, ranks, strategy, timeout=120):
                assert abs(got / want - 1) < 1e-10, (strategy, ranks, got, want)


def memory_equals_torchs_counter():
    """The meter's peak against torch.cuda.max_memory_allocated, within 5 %."""
    x, y = _data()
    with md.init():
        model, optimizer = md.shard(build_gpt(CONFIG).cuda(), torch.optim.AdamW, "fsdp", lr=1e-3)
        for measured in (False, True):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            with md.measure(model, optimizer) as meter:
                loss_fn(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            torch.cuda.synchronize()
            if measured:
                theirs = torch.cuda.max_memory_allocated()
                ours = meter.memory.peak_total
                print(f"    ours {ours / 1e6:.1f} MB, torch {theirs / 1e6:.1f} MB")
                assert abs(ours / theirs - 1) < 0.05


def disk_and_host_offload():
    """Optimizer states on the host: the GPU's memory falls by their bytes, values stay equal."""
    x, y = _data()
    results = {}
    for offload in (None, "cpu"):
        with md.init():
            model = build_gpt(CONFIG).cuda()
            zero = md.ZeroOptimizer(
                model.parameters(), torch.optim.AdamW, stage=2, lr=1e-3, offload=offload
            )
            for _ in range(2):
                loss_fn(model(x), y).backward()
                zero.step()
            torch.cuda.synchronize()
            results[offload] = (loss_fn(model(x), y).item(), torch.cuda.memory_allocated())
            del model, zero
    (a, on_gpu), (b, on_host) = results[None], results["cpu"]
    expected = 2 * 4 * CONFIG.parameters
    print(
        f"    GPU memory fell by {(on_gpu - on_host) / 1e6:.1f} MB, states {expected / 1e6:.1f} MB"
    )
    assert abs(a / b - 1) < 1e-3
    assert on_gpu - on_host > 0.9 * expected


def as_fast_as_torch():
    """Alternating with torch's DDP on one rank: medians of the ratio, to be at most 1.10."""
    x, y = _data(16)
    with md.init():
        peers = {}
        module = build_gpt(CONFIG).cuda()
        ddp = torch.nn.parallel.DistributedDataParallel(module)
        peers["torch ddp"] = ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-3, fused=True)
        for strategy in _strategies():
            peers[strategy] = md.shard(
                build_gpt(CONFIG).cuda(), torch.optim.AdamW, strategy, lr=1e-3, fused=True
            )
        times = {name: [] for name in peers}
        for round_ in range(12):
            for name, (model, optimizer) in peers.items():
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(3):
                    with torch.autocast("cuda", torch.bfloat16):
                        loss = loss_fn(model(x), y)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                torch.cuda.synchronize()
                if round_ >= 2:
                    times[name].append(time.perf_counter() - started)
        base = statistics.median(times["torch ddp"])
        ratios = {name: statistics.median(values) / base for name, values in times.items()}
        print("    " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))
        assert ratios["ddp"] <= 1.10, ratios


CHECKS = [
    nccl_with_one_rank,
    gloo_with_cuda_tensors,
    memory_equals_torchs_counter,
    disk_and_host_offload,
    as_fast_as_torch,
]


def main():
    if not torch.cuda.is_available():
        print("no GPU here: nothing checked")
        return 0
    failed = 0
    for check in CHECKS:
        started = time.perf_counter()
        try:
            check()
            outcome = "passed"
        except Exception:
            traceback.print_exc()
            failed, outcome = failed + 1, "FAILED"
        print(f"{outcome}  {check.__name__}  {time.perf_counter() - started:.1f} s", flush=True)
    print(f"{len(CHECKS) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
