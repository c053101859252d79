"""Public bug reports (B-numbers) as tests of ZeRO-1 and 2, each with its right value."""

import pytest

STAGES = pytest.mark.parametrize("stage", [1, 2])


def _zero(params, stage, cap=25, kind=None, **options):
    import torch

    import minidist as md

    options = options or {"lr": 1.0}
    return md.ZeroOptimizer(
        params, kind or torch.optim.SGD, stage=stage, bucket_cap_mb=cap, **options
    )


@STAGES
@pytest.mark.parametrize("world", [2, 3])
def test_b01_tied_weights(run_ranks, world, stage):
    """Ones of 5x2 as embedding and head, rank 0 feeds token 0, the last rank token 4."""

    def body():
        import torch
        from torch import nn

        from minidist.comm import collectives as coll

        rank, n = coll.rank(), coll.world_size()
        embedding, head = nn.Embedding(5, 2), nn.Linear(2, 5, bias=False)
        head.weight = embedding.weight
        nn.init.ones_(embedding.weight)
        model = nn.Sequential(embedding, head)
        zero = _zero(model.parameters(), stage)
        token = 0 if rank == 0 else 4
        model(torch.tensor([token])).sum().backward()
        zero.step()
        return (1 - embedding.weight.detach())[:, 0].tolist(), head.weight is embedding.weight, n

    for grads, tied, n in run_ranks(body, world):
        first = 1 + 5 / n
        last = 1 + 5 * (n - 1) / n
        assert grads == pytest.approx([first, 1, 1, 1, last]) and tied


@STAGES
def test_b04_unfrozen_later(run_ranks, stage):
    """A layer frozen at construction is not in the optimizer's buckets: unfreezing it needs
    add_param_group, and then it is averaged like the others."""

    def body():
        import torch
        from torch import nn

        from minidist.comm import collectives as coll

        a, b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        for layer in (a, b):
            nn.init.ones_(layer.weight)
        a.weight.requires_grad_(False)
        zero = _zero([a.weight, b.weight], stage)
        b(a(torch.full((1, 1), 1.0 + coll.rank()))).sum().backward()
        zero.step()
        first = b.weight.item()
        a.weight.requires_grad_()
        try:
            b(a(torch.full((1, 1), 1.0 + coll.rank()))).sum().backward()
            zero.step()
        except RuntimeError as error:
            return first, a.weight.item(), str(error)

    for first, frozen, message in run_ranks(body, 2):
        assert first == -0.5 and frozen == 1.0
        assert "group 0, parameter 0" in message and "new ZeroOptimizer" in message


@STAGES
@pytest.mark.parametrize("cap", [0, None])
def test_b05_unused_parameter(run_ranks, stage, cap):
    def body():
        import torch
        from torch import nn

        from minidist.comm import collectives as coll

        a, b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        for layer in (a, b):
            nn.init.zeros_(layer.weight)
        zero = _zero([a.weight, b.weight], stage, cap)
        a(torch.full((1, 1), 1.0 + coll.rank())).sum().backward()
        zero.step()
        return a.weight.item(), b.weight.item()

    assert run_ranks(body, 2) == [(-1.5, 0.0)] * 2


@STAGES
@pytest.mark.parametrize("cap", [0, None])
def test_b07_use_differs_by_rank(run_ranks, stage, cap):
    def body():
        import torch
        from torch import nn

        from minidist.comm import collectives as coll

        first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        for layer in (first, second):
            nn.init.eye_(layer.weight)
        zero = _zero([first.weight, second.weight], stage, cap)
        x = first(torch.ones(1, 2))
        (x if coll.rank() == 1 else second(x)).sum().backward()
        zero.step()
        eye = torch.eye(2)
        return (eye - first.weight).tolist(), (eye - second.weight).tolist()

    ones = [[1.0, 1.0], [1.0, 1.0]]
    halves = [[0.5, 0.5], [0.5, 0.5]]
    assert run_ranks(body, 2) == [(ones, halves)] * 2


@STAGES
def test_b07_a_rank_without_any_gradient(run_ranks, stage):
    def body():
        import torch
        from torch import nn

        from minidist.comm import collectives as coll

        weight = nn.Parameter(torch.zeros(3))
        zero = _zero([weight], stage)
        if coll.rank() == 0:
            weight.sum().backward()
        zero.step()
        return weight.tolist()

    assert run_ranks(body, 2) == [[-0.5] * 3] * 2


@STAGES
@pytest.mark.parametrize("forward_inside", [False, True])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_b11_no_sync(run_ranks, stage, forward_inside, backward_inside):
    """Total 12.0 in all four combinations; inside nothing is reduced."""

    def body():
        from contextlib import nullcontext

        import torch
        from torch import nn

        import minidist as md
        from minidist.comm import collectives as coll

        weight = nn.Parameter(torch.zeros(1))
        zero = _zero([weight], stage)
        with md.measure() as meter:
            with zero.no_sync() if forward_inside else nullcontext():
                loss = (weight * (1.0 + coll.rank())).sum()
            with zero.no_sync() if backward_inside else nullcontext():
                loss.backward()
            (weight * (10.0 + coll.rank())).sum().backward()
            zero.step()
        return -weight.item(), meter.traffic.by_op["reduce_scatter"].calls

    assert run_ranks(body, 2) == [(12.0, 1 if backward_inside else 2)] * 2


@STAGES
def test_b17_b19_b21_shapes_strides_and_complex_numbers(run_ranks, stage):
    def body():
        import torch
        from torch import nn

        from minidist.comm import collectives as coll

        rank = coll.rank()
        scalar = nn.Parameter(torch.tensor(2.0))
        transposed = nn.Parameter((torch.arange(15.0) + 100 * rank).view(3, 5).t())
        column = nn.Parameter((torch.arange(12.0) + 100 * rank).view(4, 3)[:, 0])
        empty = nn.Parameter(torch.empty(0, 3))
        params = [scalar, transposed, column, empty]
        zero = _zero(params, stage)
        start = [p.detach().clone() for p in params]
        scale = 1.0 + rank
        weights = torch.arange(15.0).view(5, 3)
        loss = scalar * scale + (transposed * weights).sum() * scale + (column**2).sum() * scale
        (loss + empty.sum()).backward()
        zero.step()
        moved = [(s - p.detach()).tolist() for s, p in zip(start, params, strict=True)]
        complex_ = nn.Parameter(torch.tensor([1 + 1j, 2 - 1j]))
        other = _zero([complex_], stage)
        x = (rank + 1) * torch.tensor([1 + 2j, 3 + 0j])
        (complex_ * x).abs().pow(2).sum().backward()
        norm = other.clip_grad_norm_(1e9).item()
        other.step()
        grads = (torch.tensor([1 + 1j, 2 - 1j]) - complex_.detach()).tolist()
        return [s.tolist() for s in start], moved, [tuple(p.shape) for p in params], grads, norm

    import torch

    for start, moved, shapes, grads, norm in run_ranks(body, 2):
        assert start[1] == torch.arange(15.0).view(3, 5).t().tolist()
        assert start[2] == [0.0, 3.0, 6.0, 9.0]
        assert moved[0] == 1.5 and moved[1] == (1.5 * torch.arange(15.0).view(5, 3)).tolist()
        assert moved[2] == [0.0, 9.0, 18.0, 27.0]
        assert shapes == [(), (5, 3), (4,), (0, 3)]
        assert grads == [25 + 25j, 90 - 45j]
        assert norm == pytest.approx((25**2 * 2 + 90**2 + 45**2) ** 0.5)


@STAGES
@pytest.mark.parametrize("world", [2, 3, 4])
def test_b23_padding_never_shows(run_ranks, world, stage):
    """NaN in the padding, sizes that do not divide: clip, Adam and the state stay exact."""

    def body():
        import os

        import torch
        from torch import nn

        os.environ["MINIDIST_DEBUG"] = "1"
        try:
            torch.manual_seed(0)
            shapes = [(5, 10), (3,), (7,), (10,)]
            serial = [nn.Parameter(torch.randn(s, dtype=torch.float64)) for s in shapes]
            params = [nn.Parameter(p.detach().clone()) for p in serial]
            zero = _zero(params, stage, kind=torch.optim.Adam, lr=0.1)
            plain = torch.optim.Adam(serial, lr=0.1)
            for _ in range(2):
                for ps, clip, optimizer in (
                    (serial, lambda: nn.utils.clip_grad_norm_(serial, 0.5), plain),
                    (params, lambda: zero.clip_grad_norm_(0.5), zero),
                ):
                    sum((p**2).sum() for p in ps).backward()
                    norm = clip()
                    assert norm.isfinite()
                    optimizer.step()
                    optimizer.zero_grad()
            state = zero.full_state_dict()["state"]
            for index, moments in plain.state_dict()["state"].items():
                for key, moment in moments.items():
                    torch.testing.assert_close(state[index][key], moment, rtol=1e-12, atol=1e-15)
            return max((p - q).abs().max().item() for p, q in zip(params, serial, strict=True))
        finally:
            del os.environ["MINIDIST_DEBUG"]

    assert max(run_ranks(body, world)) < 1e-12


@STAGES
def test_b27_higher_order(run_ranks, stage):
    def body():
        import torch
        from torch import nn

        from minidist.comm import collectives as coll

        w = nn.Parameter(torch.ones(1))
        zero = _zero([w], stage)
        x = torch.full((1,), 1.0 + coll.rank(), requires_grad=True)
        y = w * x
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (y + g * g).sum().backward()
        zero.step()
        first = 1 - w.item()
        (w * (1.0 + coll.rank())).sum().backward()
        zero.step()
        return first, 1 - first - w.item()

    assert run_ranks(body, 2) == [(3.5, 1.5)] * 2


@STAGES
@pytest.mark.parametrize("reentrant", [False, True])
def test_b29_checkpointing(run_ranks, stage, reentrant):
    def body(world_batch=4):
        import torch
        from torch import nn
        from torch.utils.checkpoint import checkpoint

        from minidist.comm import collectives as coll

        rank, n = coll.rank(), coll.world_size()
        torch.manual_seed(0)
        models = [nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]).double() for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        x = torch.randn(world_batch, 3, dtype=torch.float64)

        def loss(model, rows, recompute):
            shared, private = model
            run = (
                (lambda f, v: checkpoint(f, v, use_reentrant=reentrant))
                if recompute
                else (lambda f, v: f(v))
            )
            rows = rows.clone().requires_grad_()
            return private(run(shared, torch.tanh(run(shared, rows)))).pow(2).mean()

        zero = _zero(models[1].parameters(), stage, cap=0, lr=0.1)
        plain = torch.optim.SGD(models[0].parameters(), lr=0.1)
        for _ in range(3):
            loss(models[0], x, False).backward()
            loss(models[1], x.chunk(n)[rank], True).backward()
            plain.step()
            zero.step()
            plain.zero_grad()
        pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
        return max((p - q).abs().max().item() for p, q in pairs)

    assert max(run_ranks(body, 2)) < 1e-12


@STAGES
def test_b34_interleaved_groups_and_a_late_one(run_ranks, stage):
    def body():
        import torch
        from torch import nn

        params = [nn.Parameter(torch.zeros(2)) for _ in range(4)]
        groups = [{"params": [params[0], params[2]]}, {"params": [params[1], params[3]], "lr": 0.2}]
        zero = _zero(groups, stage, lr=0.1, momentum=0.9)
        for _ in range(2):
            for i, p in enumerate(params):
                p.grad = torch.full((2,), i + 1.0)
            zero.step()
        state = zero.full_state_dict()
        plain = torch.optim.SGD(
            [{"params": [params[0], params[2]]}, {"params": [params[1], params[3]]}], lr=7.0
        )
        plain.load_state_dict(state)
        buffers = [plain.state[p]["momentum_buffer"].tolist() for p in params]
        rates = [g["lr"] for g in plain.param_groups]

        a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        late = _zero([a], stage, lr=0.1)
        for with_b in (False, True):
            if with_b:
                late.add_param_group({"params": [b], "lr": 0.5})
            for p in (a, b) if with_b else (a,):
                p.grad = torch.ones(1)
            late.step()
        return buffers, rates, a.item(), b.item()

    for buffers, rates, a, b in run_ranks(body, 2):
        assert buffers == [pytest.approx([1.9 * (i + 1)] * 2) for i in range(4)]
        assert rates == [0.1, 0.2]
        assert a == pytest.approx(0.8) and b == pytest.approx(0.5)


def test_b34_a_group_on_one_rank_only_raises(run_ranks):
    def body():
        import torch
        from torch import nn

        from minidist.comm import collectives as coll

        zero = _zero([nn.Parameter(torch.ones(1))], 1)
        extra = 1 + coll.rank()  # the same call, another shape
        try:
            zero.add_param_group({"params": [nn.Parameter(torch.ones(extra))]})
        except RuntimeError as error:
            return str(error), len(zero.param_groups)

    for message, groups in run_ranks(body, 2):
        assert "group 1, parameter 0" in message and "[1]" in message and "[2]" in message
        assert groups == 1  # nothing has changed


@STAGES
def test_b37_saving_before_the_first_step_and_without_gradients(run_ranks, stage):
    def body():
        import torch
        from torch import nn

        torch.manual_seed(0)
        start = torch.randn(2, 3, dtype=torch.float64)

        def run(make, restart_at):
            used, never = (nn.Parameter(row.clone()) for row in start)
            optimizer = make([used, never])
            for step in range(2):
                if step == restart_at:
                    state = (
                        optimizer.full_state_dict() if hasattr(optimizer, "full_state_dict")
                        else optimizer.state_dict()
                    )  # fmt: skip
                    optimizer = None
                    optimizer = make([used, never])
                    load = getattr(optimizer, "load_full_state_dict", optimizer.load_state_dict)
                    load(state)
                (used**2).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return torch.cat([used, never]).tolist()

        def zero(params):
            return _zero(params, stage, kind=torch.optim.Adam, lr=0.1)

        def plain(params):
            return torch.optim.Adam(params, lr=0.1)

        want = run(plain, None)
        return [run(zero, at) for at in (None, 0, 1)], [want] * 3

    for got, want in run_ranks(body, 2):
        for values, expected in zip(got, want, strict=True):
            assert values == pytest.approx(expected, rel=1e-12)


@STAGES
@pytest.mark.parametrize("cap", [0, None])
def test_b43_any_way_of_zeroing(run_ranks, stage, cap):
    def body():
        import torch
        from torch import nn

        from minidist.comm import collectives as coll

        torch.manual_seed(0)
        model, serial = (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double() for _ in range(2))
        serial.load_state_dict(model.state_dict())
        coll.broadcast(torch.zeros(1))
        zero = _zero(model.parameters(), stage, cap, lr=0.1, momentum=0.9)
        plain = torch.optim.SGD(serial.parameters(), lr=0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(1)
        ways = [
            lambda: zero.zero_grad(set_to_none=True),
            lambda: zero.zero_grad(set_to_none=False),
            lambda: [setattr(p, "grad", None) for p in model.parameters()],
            lambda: model.zero_grad(),
            lambda: model.zero_grad(set_to_none=False),
        ]
        worst = 0.0
        for clear in ways:
            x = torch.randn(4, 3, dtype=torch.float64, generator=generator)
            serial(x).pow(2).mean().backward()
            model(x.chunk(2)[coll.rank()]).pow(2).mean().backward()
            plain.step()
            zero.step()
            plain.zero_grad()
            clear()
            pairs = zip(model.parameters(), serial.parameters(), strict=True)
            worst = max(worst, *((p - q).abs().max().item() for p, q in pairs))
        return worst

    assert max(run_ranks(body, 2)) < 1e-13


def test_b46_one_decision_about_overflow(run_ranks):
    """A single (1,3) weight: rank 1 owns nothing. The infinity is on rank 0."""

    def body(stage):
        import torch
        from torch import nn

        from minidist.comm import collectives as coll
        from minidist.parallel.scaler import LossScaler

        weight = nn.Parameter(torch.ones(1, 3))
        zero = _zero([weight], stage)
        scaler = LossScaler(initial=8.0, growth_interval=2)
        scaler.scale((weight * (1.0 + coll.rank())).sum()).backward()
        stepped = scaler.step(zero)
        clean = weight.tolist()
        bad = float("inf") if coll.rank() == 0 else 1.0
        scaler.scale((weight * bad).sum()).backward()
        skipped = not scaler.step(zero)
        same = weight.tolist() == clean
        values = [scaler.value]
        for _ in range(2):
            scaler.scale((weight * 0).sum()).backward()
            scaler.step(zero)
        return stepped, clean, skipped, same, [*values, scaler.value], scaler.state_dict()

    for stage in (1, 2):
        ranks = run_ranks(body, 2, stage)
        for stepped, clean, skipped, same, values, state in ranks:
            assert stepped and clean == [[-0.5] * 3] and skipped and same
            assert values == [4.0, 8.0] and state == ranks[0][-1]


@STAGES
def test_b47_reduction_precision(run_ranks, stage):
    """bf16 gradients 256, 1, 1, 1 reduced in fp32: 64.75; 300 micro-steps of 1.0: 300."""

    def body():
        import torch
        from torch import nn

        from minidist.comm import collectives as coll

        options = {"lr": 1.0, "reduce_dtype": torch.float32, "master_dtype": torch.float32}
        weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
        zero = _zero([weight], stage, **options)
        (weight * (256.0 if coll.rank() == 0 else 1.0)).sum().backward()
        zero.finish_reductions()
        means = [part.item() for _, part in zero.mean_gradients()]
        zero.step()
        zero.zero_grad()
        with zero.no_sync():
            for _ in range(300):
                weight.sum().backward()
        total = [part.item() for _, part in zero.mean_gradients()]
        return means + total

    values = [v for rank in run_ranks(body, 4) for v in rank]
    assert values == [64.75, 300.0]


def test_b87_ranks_that_built_different_models(run_ranks):
    def body(what):
        import torch
        from torch import nn

        from minidist.comm import collectives as coll

        odd = coll.rank() == 1
        shape = (3, 2) if odd and what == "shape" else (2, 3)
        dtype = torch.float64 if odd and what == "dtype" else torch.float32
        named = [
            ("a", nn.Parameter(torch.zeros(shape, dtype=dtype))),
            ("b", nn.Parameter(torch.zeros(4))),
        ]
        if odd and what == "order":
            named.reverse()
        if odd and what == "more":
            named.append(("c", nn.Parameter(torch.zeros(1))))
        cap = 1 if odd and what == "bucket" else 25
        try:
            _zero(named, 1, cap)
        except RuntimeError as error:
            return str(error)

    for what, part in [("shape", "[3, 2]"), ("dtype", "float64"), ("order", "'b'"), ("more", "'c'"),
                       ("bucket", "bucket_cap_mb")]:  # fmt: skip
        for message in run_ranks(body, 2, what):
            assert part in message, (what, message)


def test_pickling_and_copying_parameters(run_ranks):
    """B97: the model of a ZeroOptimizer can be copied and saved; the copy is independent."""

    def body():
        import copy
        import io

        import torch
        from torch import nn

        model = nn.Linear(3, 2)
        zero = _zero(model.parameters(), 1)
        clone = copy.deepcopy(model)
        torch.save(model, io.BytesIO())
        before = clone.weight.tolist()
        model(torch.ones(1, 3)).sum().backward()
        zero.step()
        clone(torch.ones(1, 3)).sum().backward()
        return clone.weight.tolist() == before, clone.weight.grad is not None

    assert run_ranks(body, 2) == [(True, True)] * 2


@STAGES
def test_schedulers_and_closures(run_ranks, stage):
    def body():
        import torch
        from torch import nn

        weight = nn.Parameter(torch.zeros(1))
        zero = _zero([weight], stage)
        scheduler = torch.optim.lr_scheduler.StepLR(zero, 1, gamma=0.5)

        def closure():
            zero.zero_grad()
            loss = weight.sum()
            loss.backward()
            return loss

        losses = []
        for _ in range(3):
            losses.append(zero.step(closure).item())
            scheduler.step()
        return weight.item(), losses

    assert run_ranks(body, 2) == [(-1.75, [0.0, -1.0, -1.5])] * 2
