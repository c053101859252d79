"""ZeRO-1 and 2 against one process: values, bits, bytes, memory, states, offload."""

import pytest

TOLERANCE = 1e-10  # float64; the sum over ranks runs in another order than over rows in one process
WORLDS = (1, 2, 3, 4)


def _model(seed=0, dtype=None):
    import torch

    from minidist.train.model import GPTConfig, build_gpt

    config = GPTConfig(vocab=37, seq=8, width=16, layers=2, heads=2)
    return build_gpt(config, seed, dtype or torch.float64)


def _batches(steps):
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 37, (steps, 2, 12, 8), generator=generator)


def _difference(ours, serial):
    return max(
        ((p - q).abs().max() / q.abs().max().clamp(min=1e-30)).item()
        for p, q in zip(ours, serial, strict=True)
    )


def _parity(stage, cap, optimizer, mode):
    """Largest relative difference of parameters from one process over 4 steps."""
    import torch

    import minidist as md
    from minidist.train.model import loss_fn

    rank, n = md.comm.collectives.rank(), md.comm.collectives.world_size()
    name, options = optimizer
    serial, model = _model(0), _model(rank)  # rank 0's values must win
    plain = getattr(torch.optim, name)(serial.parameters(), **options)
    zero = md.ZeroOptimizer(
        model.named_parameters(),
        getattr(torch.optim, name),
        stage=stage,
        bucket_cap_mb=cap,
        **options,
    )
    worst = 0.0

    def mine(batch, part=slice(None)):
        x, y = (rows.chunk(n)[rank][part] for rows in batch)
        return loss_fn(model(x), y) * (len(x) * n / 12)

    batches = _batches(4)
    for step, batch in enumerate(batches):
        loss_fn(serial(batch[0]), batch[1]).backward()
        if mode == "two backwards":
            loss_fn(serial(batches[step - 1][0]), batches[step - 1][1]).backward()
            mine(batches[step - 1]).backward()
        if mode == "no_sync":
            with zero.no_sync():
                mine(batch, slice(0, 1)).backward()
            mine(batch, slice(1, None)).backward()
        elif mode == "no_sync only":
            with zero.no_sync():
                mine(batch).backward()
        else:
            mine(batch).backward()
        if mode == "clip":
            want = torch.nn.utils.clip_grad_norm_(serial.parameters(), 0.05)
            got = zero.clip_grad_norm_(0.05)
            assert abs(got / want - 1) < 1e-12
        plain.step()
        zero.step()
        plain.zero_grad()
        zero.zero_grad(set_to_none=bool(step % 2))
        worst = max(worst, _difference(model.parameters(), serial.parameters()))
    return worst


SGD = ("SGD", {"lr": 0.5, "momentum": 0.9})  # Adam would hide a wrong scale
ADAMW = ("AdamW", {"lr": 0.01})


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("mode", ["plain", "two backwards", "no_sync", "no_sync only", "clip"])
def test_equals_one_process(run_ranks, world, stage, mode):
    for cap in (0, 0.005, None):
        assert max(run_ranks(_parity, world, stage, cap, SGD, mode)) < TOLERANCE


@pytest.mark.parametrize("optimizer", [
    ADAMW, ("AdamW", {"lr": 0.01, "fused": True}), ("Adam", {"lr": 0.01, "amsgrad": True}),
    ("RMSprop", {"lr": 0.01}), ("Adagrad", {"lr": 0.01}), ("NAdam", {"lr": 0.01}),
], ids=lambda o: o[0])  # fmt: skip
def test_optimizers(run_ranks, optimizer):
    assert max(run_ranks(_parity, 3, 2, 0.005, optimizer, "plain")) < 1e-8  # eps under a root


@pytest.mark.parametrize("bug", ["sum", "local"])
def test_negative_controls(run_ranks, bug):
    """A sum instead of a mean and a missing reduction must show."""

    def body():
        from minidist.comm import collectives as coll
        from minidist.parallel import zero

        class Broken:
            def __getattr__(self, name):
                return getattr(coll, name)

            def reduce_scatter(self, shard, full, **options):
                if bug == "sum":
                    full.mul_(coll.world_size())
                    return coll.reduce_scatter(shard, full, **options)
                own = full.view(coll.world_size(), -1)[coll.rank()] * coll.world_size()
                shard.copy_(own)
                return coll.Work(shard, None, [])

        zero.coll = Broken()
        try:
            return _parity(1, None, SGD, "plain")
        finally:
            zero.coll = coll

    assert max(run_ranks(body, 2)) > 1e-3


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2])
def test_equals_ddp_to_the_bit(run_ranks, world, stage):
    """With DDP's gradients summed in rank order too; at two ranks every order is the same."""

    def body(optimizer):
        import torch

        import minidist as md
        from minidist.parallel import hooks
        from minidist.train.model import loss_fn

        rank, n = md.comm.collectives.rank(), md.comm.collectives.world_size()
        name, options = optimizer
        kind = getattr(torch.optim, name)
        hook = hooks.reduce_scatter_all_gather if n > 2 else None
        first, second = _model(0, torch.float32), _model(0, torch.float32)
        ddp = md.DDP(first, bucket_cap_mb=0.01, comm_hook=hook)
        plain = kind(ddp.parameters(), foreach=False, **options)
        zero = md.ZeroOptimizer(
            second.parameters(), kind, stage=stage, bucket_cap_mb=0.004, foreach=False, **options
        )
        for batch in _batches(4):
            x, y = (rows.chunk(n)[rank] for rows in batch)
            for model, optimizer in ((ddp, plain), (second, zero)):
                loss_fn(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        return all(
            torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True)
        )

    # SGD's update is a few multiplications and additions per element, the same wherever it lies.
    assert all(run_ranks(body, world, SGD))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_bytes_and_memory_follow_the_formulas(run_ranks, world):
    def body(stage):
        import torch
        from torch import nn

        import minidist as md
        from minidist.comm import collectives as coll

        n, width = coll.world_size(), 96  # 96 x 96 divides by 2, 3 and 4 with 16 elements to spare
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8)))
        zero = md.ZeroOptimizer(
            model.parameters(), torch.optim.Adam, stage=stage, bucket_cap_mb=0, lr=0.01
        )
        x = torch.randn(4, width)
        for _ in range(2):
            model(x).pow(2).mean().backward()
            zero.step()
        coll.barrier()
        with md.measure(model, zero) as meter:
            model(x).pow(2).mean().backward()
            held = dict(meter.memory.current)
            zero.step()
        whole = 4 * 8 * width * width
        sent = {op: line["sent_bytes"] for op, line in meter.traffic.as_dict()["by_op"].items()}
        share = whole * (n - 1) // n
        assert sent["reduce_scatter"] == sent["all_gather"] == share, sent
        counts = 4 * 8  # Adam's step, one number per bucket
        assert held["parameters"] == whole
        assert held["gradients"] == (whole if stage == 1 else whole // n)
        assert held["optimizer"] == 2 * whole // n + counts
        return meter.memory.peak_total

    first, second = run_ranks(body, world, 1), run_ranks(body, world, 2)
    assert max(second) < min(first)  # one bucket travels and one fills, the rest is a shard


def test_stage_2_peak_is_lower_under_accumulation(run_ranks):
    def body(stage):
        import torch
        from torch import nn

        import minidist as md

        model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(12)))
        zero = md.ZeroOptimizer(
            model.parameters(), torch.optim.SGD, stage=stage, bucket_cap_mb=0, lr=0.01
        )
        x = torch.randn(2, 128)
        for _ in range(2):
            with md.measure(model, zero) as meter:
                for _ in range(3):  # reduced every time: stage 2 adds up shards
                    model(x).pow(2).mean().backward()
                zero.step()
        return meter.memory.peak_total  # of the second time: states and buffers exist

    assert max(run_ranks(body, 4, 2)) < 0.8 * min(run_ranks(body, 4, 1))


@pytest.mark.parametrize("stage", [1, 2])
def test_masters_follow_a_32_bit_run(run_ranks, stage):
    """bf16 parameters with float32 masters and reduction equal masters kept in one process."""

    def body():
        import torch

        import minidist as md
        from minidist.train.model import loss_fn

        rank, n = md.comm.collectives.rank(), md.comm.collectives.world_size()
        model = _model(0, torch.bfloat16)
        zero = md.ZeroOptimizer(
            model.parameters(), torch.optim.AdamW, stage=stage, lr=1e-3,
            master_dtype=torch.float32, reduce_dtype=torch.float32,
        )  # fmt: skip
        serial = _model(0, torch.bfloat16)
        masters = [torch.nn.Parameter(p.detach().float()) for p in serial.parameters()]
        plain = torch.optim.AdamW(masters, lr=1e-3)
        for batch in _batches(3):
            parts = []
            for r in range(n):
                x, y = (rows.chunk(n)[r] for rows in batch)
                loss = loss_fn(serial(x).float(), y)
                parts.append(torch.autograd.grad(loss, list(serial.parameters())))
            for master, *grads in zip(masters, *parts, strict=True):
                master.grad = sum(g.float() / n for g in grads)
            plain.step()
            with torch.no_grad():
                for p, master in zip(serial.parameters(), masters, strict=True):
                    p.copy_(master)
            x, y = (rows.chunk(n)[rank] for rows in batch)
            loss_fn(model(x).float(), y).backward()
            zero.step()
        whole = zero.full_state_dict()["master"]
        # float32 additions in the same order: only the fused multiply-adds may differ.
        return max((whole[i] - m).abs().max().item() for i, m in enumerate(masters))

    assert max(run_ranks(body, 2)) < 1e-6


def test_full_state_moves_between_world_sizes_and_plain_optimizers(run_ranks):
    """Save on 2 ranks, continue on 1, 3 and 4 and in a plain optimizer: as if uninterrupted."""
    shapes = [(7,), (10,), (1,), (3, 5), ()]

    def steps(optimizer, params, start, count):
        import torch

        generator = torch.Generator().manual_seed(3)
        grads = [[torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
                 for _ in range(4)]  # fmt: skip
        for step in range(start, start + count):
            for param, grad in zip(params, grads[step], strict=True):
                param.grad = grad.clone()
            optimizer.step()
        return [p.detach().clone() for p in params]

    def fresh():
        import torch

        generator = torch.Generator().manual_seed(2)
        return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64))
                for s in shapes]  # fmt: skip

    def save():
        import os

        import torch

        import minidist as md

        os.environ["MINIDIST_DEBUG"] = "1"  # NaN in the padding: none may reach the state
        try:
            params = fresh()
            zero = md.ZeroOptimizer(params, torch.optim.Adam, stage=2, lr=0.1)
            values = steps(zero, params, 0, 2)
            return values, zero.full_state_dict()
        finally:
            del os.environ["MINIDIST_DEBUG"]

    def resume(values, state, stage):
        import torch

        import minidist as md

        params = fresh()
        with torch.no_grad():
            for param, value in zip(params, values, strict=True):
                param.copy_(value)
        zero = md.ZeroOptimizer(params, torch.optim.Adam, stage=stage, lr=0.5)
        zero.load_full_state_dict(state)
        result = steps(zero, params, 2, 2)
        return [p.tolist() for p in result], zero.full_state_dict()

    import torch

    params = fresh()
    plain = torch.optim.Adam(params, lr=0.1)
    middle = steps(plain, params, 0, 2)
    want = steps(plain, params, 2, 2)

    values, state = run_ranks(save, 2)[0]
    for value, expected in zip(values, middle, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    for world in (1, 3, 4):
        for stage in (1, 2):
            got, after = run_ranks(resume, world, values, state, stage)[0]
            for value, expected in zip(got, want, strict=True):
                torch.testing.assert_close(
                    torch.tensor(value, dtype=torch.float64), expected, rtol=1e-12, atol=0
                )
            for index, moments in plain.state_dict()["state"].items():
                for key, moment in moments.items():
                    assert after["state"][index][key].shape == moment.shape
                    torch.testing.assert_close(
                        after["state"][index][key], moment, rtol=1e-12, atol=1e-15
                    )
    again = fresh()
    for param, value in zip(again, values, strict=True):
        param.data.copy_(value)
    other = torch.optim.Adam(again, lr=0.5)
    other.load_state_dict(state)
    for value, expected in zip(steps(other, again, 2, 2), want, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)


def test_shard_state_round_trip(run_ranks):
    def body():
        import io

        import torch

        import minidist as md
        from minidist.train.model import loss_fn

        model = _model(0)
        zero = md.ZeroOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        batch = _batches(1)[0]
        loss_fn(model(batch[0]), batch[1]).backward()
        zero.step()
        file = io.BytesIO()
        torch.save(zero.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=False)
        first = zero.full_state_dict()
        for values in zero.state.values():
            values["exp_avg"].zero_()
        zero.load_state_dict(saved)
        second = zero.full_state_dict()
        same = all(
            torch.equal(first["state"][i]["exp_avg"], second["state"][i]["exp_avg"])
            for i in first["state"]
        )
        try:
            zero.load_state_dict({**saved, "shard": [7, 9]})
        except ValueError as error:
            return same and "[7, 9]" in str(error)

    assert all(run_ranks(body, 2))


def test_disk_offload_gives_the_same_numbers_and_frees_memory(tmp_path):
    """The operating system's count of resident memory falls by the bytes of Adam's moments."""

    layers = 30

    def body(offload, directory):
        import torch
        from torch import nn

        import minidist as md
        from minidist.comm import collectives as coll
        from minidist.measure.process import resident_bytes
        from minidist.parallel.offload import trim_heap

        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(layers)))
        x = torch.randn(2, 1024)
        zero = md.ZeroOptimizer(
            model.parameters(), torch.optim.AdamW, lr=0.01, bucket_cap_mb=4,
            offload=f"disk:{directory}" if offload else None,
        )  # fmt: skip
        model(x).pow(2).mean().backward()
        zero.finish_reductions()
        trim_heap()
        before = resident_bytes()
        zero.step()
        trim_heap()
        grown = resident_bytes() - before
        for _ in range(2):
            model(x).pow(2).mean().backward()
            zero.step()
        values = sum(p.double().sum().item() for p in model.parameters())
        return values, grown, 2 * 4 * layers * 1024 * 1024 // coll.world_size()

    import minidist as md

    # New processes: in used ones the allocator would fill pages that it has kept from other tests.
    kept, moved = (md.launch(body, 2, offload, str(tmp_path), timeout=60) for offload in (0, 1))
    for (value, grown, expected), (same, small, _) in zip(kept, moved, strict=True):
        assert value == same
        assert abs((grown - small) / expected - 1) < 0.1, (grown, small, expected)
    assert list(tmp_path.iterdir()) == []  # nameless files: nothing to clean up


def test_inside_ddp_changes_nothing(run_ranks):
    def body(wrapper):
        import torch

        import minidist as md
        from minidist.train.model import loss_fn

        rank, n = md.comm.collectives.rank(), md.comm.collectives.world_size()
        serial, model = _model(0), _model(0)
        if wrapper == "ours":
            wrapped = md.DDP(model)
        else:
            wrapped = torch.nn.parallel.DistributedDataParallel(model)
        zero = md.ZeroOptimizer(model.parameters(), torch.optim.SGD, lr=0.5)
        plain = torch.optim.SGD(serial.parameters(), lr=0.5)
        for batch in _batches(3):
            loss_fn(serial(batch[0]), batch[1]).backward()
            x, y = (rows.chunk(n)[rank] for rows in batch)
            loss_fn(wrapped(x), y).backward()
            plain.step()
            zero.step()
            plain.zero_grad()
            zero.zero_grad()
        return _difference(model.parameters(), serial.parameters())

    for wrapper in ("ours", "torch"):
        assert max(run_ranks(body, 2, wrapper)) < TOLERANCE


def test_refusals(run_ranks):
    def body():
        import torch
        from torch import nn

        import minidist as md

        class Lamb(torch.optim.Optimizer):
            def __init__(self, params, lr):
                super().__init__(params, {"lr": lr})

            @torch.no_grad()
            def step(self):
                for p in self.param_groups[0]["params"]:
                    p -= self.param_groups[0]["lr"] * p.norm() / p.grad.norm() * p.grad

        def zero(params=None, kind=torch.optim.SGD, **options):
            params = [nn.Parameter(torch.ones(3, 2))] if params is None else params
            return md.ZeroOptimizer(params, kind, **{"lr": 0.1, **options})

        taken = [nn.Parameter(torch.ones(2))]
        keep = zero(taken)
        messages = []
        for call in (
            lambda: zero(stage=3),
            lambda: zero(bucket_cap_mb=-1),
            lambda: zero(offload="gpu"),
            lambda: zero(offload="disk:/no/such/directory"),
            lambda: zero(kind=Lamb),
            lambda: zero(kind=torch.optim.LBFGS),
            lambda: zero(kind=torch.optim.Muon),
            lambda: zero(kind=torch.optim.Adafactor),
            lambda: zero(taken),
            lambda: zero([("w", nn.Parameter(torch.ones(2, device="meta")))]),
        ):
            try:
                call()
                messages.append("no error")
            except ValueError as error:
                messages.append(str(error))
        assert keep is not None
        return messages

    parts = ["stage", "bucket_cap_mb", "'gpu'", "/no/such/directory", "Lamb updates an element",
             "LBFGS", "Muon", "Adafactor", "already belongs", "w is on the meta"]  # fmt: skip
    for messages in run_ranks(body, 2):
        for message, part in zip(messages, parts, strict=True):
            assert part in message
