"""DDP's mechanism: parity with one process, buckets, overlap, traffic, memory, hooks, odd tensors.

Rule 5 of the cases: each check is run once against a broken version (`test_the_checks_can_fail`).
Float64 and SGD: a wrong scale shows, and the tolerance is rounding only.
"""

import copy
import io
import pickle
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import minidist as md
from minidist.comm import collectives as coll
from minidist.comm import ledger
from minidist.parallel import hooks
from minidist.parallel.buckets import plan_buckets
from minidist.parallel.graph import tensors_in

WORLDS = [1, 2, 3, 4]
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}


class Net(nn.Module):
    """Registered in another order than used, a shared layer, a 0-d parameter, a buffer in use."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(7, 3)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.shared = nn.Linear(7, 7)
        self.first = nn.Linear(5, 7)
        self.register_buffer("offset", torch.linspace(-1, 1, 7))

    def forward(self, x):
        h = torch.tanh(self.first(x) + self.offset)
        h = torch.tanh(self.shared(torch.tanh(self.shared(h))))
        return self.last(h) * self.temperature


def make(cls=Net, seed=0):
    torch.manual_seed(seed)
    return cls().double()


def inputs(rank, step, width=5):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, width, generator=generator, dtype=torch.float64)


def serial(world, steps=3, lr=0.1):
    """The same training in one process: the loss is the mean over the ranks' batches."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            (model(inputs(rank, step)).pow(2).mean() / world).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train(steps=3, lr=0.1, **options):
    """The same on ranks, started from different values on purpose."""
    model = md.DDP(make(seed=dist.get_rank()), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        model(inputs(dist.get_rank(), step)).pow(2).mean().backward()
        optimizer.step()
    return [p.detach() for p in model.module.parameters()]


def check_equal(results, expected):
    for parameters in results:
        for mine, zero, right in zip(parameters, results[0], expected, strict=True):
            assert torch.equal(mine, zero), "ranks drifted apart"
            torch.testing.assert_close(mine, right, **TOLERANCE)


@pytest.mark.parametrize("cap", [25, None, 0, 1e-4], ids="cap={}".format)
@pytest.mark.parametrize("world", WORLDS)
def test_equals_one_process(run_ranks, world, cap):
    check_equal(run_ranks(train, world, bucket_cap_mb=cap), serial(world))


def local_only(bucket):
    """A broken hook: gradients stay local."""
    bucket.flat.mul_(bucket.world_size)
    return coll.all_reduce(torch.zeros(1), group=bucket.group, async_op=True)


def summed(bucket):
    """A broken hook: the sum instead of the mean."""
    bucket.flat.mul_(bucket.world_size)
    return hooks.all_reduce(bucket)


@pytest.mark.parametrize("broken", [local_only, summed])
def test_the_checks_can_fail(run_ranks, broken):
    with pytest.raises(AssertionError):
        check_equal(run_ranks(train, 2, comm_hook=broken), serial(2))


def test_different_starts_are_noticed(run_ranks):
    def without_rank_zeros_values():
        md.DDP._send_values, right = lambda self, source: None, md.DDP._send_values
        try:
            return train()
        finally:
            md.DDP._send_values = right

    with pytest.raises(AssertionError):
        check_equal(run_ranks(without_rank_zeros_values, 2), serial(2))


# --- traffic, overlap, memory ---------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 4])
def test_traffic_is_two_times_the_parameters(run_ranks, world):
    def traffic():
        model = md.DDP(make(), bucket_cap_mb=2e-4, first_bucket_mb=1e-4)
        records = []
        for step in range(3):
            if step == 2:
                ledger.subscribe(records.append)
            model(inputs(dist.get_rank(), step)).sum().backward()
        ledger.unsubscribe(records.append)
        count = sum(p.numel() for p in model.parameters())
        # One element more than the parameters: the flag in the last bucket.
        right = sum(2 * (world - 1) * b.layout.numel * 8 // world for b in model.buckets)
        assert sum(b.layout.numel for b in model.buckets) == count + 1
        return [(r.op, r.by) for r in records], sum(r.sent_bytes for r in records), right, count

    for calls, sent, right, count in run_ranks(traffic, world):
        # The buffer is looked at after each forward; everything else is one all-reduce per bucket.
        reductions = [by for op, by in calls if op == "all_reduce"]
        assert reductions == [f"ddp bucket {i}" for i in range(len(reductions))]
        assert len(reductions) > 2
        assert [op for op, _ in calls if op != "all_reduce"] == ["broadcast"]
        assert abs(right - 2 * (world - 1) * count * 8 / world) <= 16 + len(reductions)
        buffers = 7 * 8
        assert right <= sent <= right + 2 * buffers


def test_first_bucket_leaves_while_backward_goes_on(run_ranks):
    def events():
        model = md.DDP(make(), bucket_cap_mb=1e-4, first_bucket_mb=0, broadcast_buffers=False)
        seen = []

        def sent_so_far(grad):
            seen.append(sum(r.op == "all_reduce" for r in ledger.last))

        for step in range(2):
            ledger.last.clear()
            hidden = model.module.first.weight.register_hook(sent_so_far)
            model(inputs(dist.get_rank(), step)).sum().backward()
            hidden.remove()
        finished = [r.finished for r in ledger.last if r.op == "all_reduce"]
        return (
            seen,
            len(model.buckets),
            None not in finished and max(finished) <= time.perf_counter(),
        )

    for (first, second), buckets, all_waited_for in run_ranks(events, 2):
        assert first == 0, "the first backward only learns the order"
        assert 2 <= second < buckets, (
            "buckets of later layers leave before the first layer's gradient"
        )
        assert all_waited_for


def test_gradients_are_views_of_the_buckets(run_ranks):
    def addresses():
        model = md.DDP(make())
        places = []
        for step in range(3):
            model.zero_grad()
            model(inputs(dist.get_rank(), step)).sum().backward()
            places.append([p.grad.data_ptr() for p in model.parameters()])
        flat = model.buckets[0].flat.untyped_storage().data_ptr()
        same = [p.grad.untyped_storage().data_ptr() == flat for p in model.parameters()]
        return len(model.buckets), all(same), places[1] == places[2]

    assert run_ranks(addresses, 2) == [(1, True, True)] * 2


def test_memory_is_parameters_and_one_copy_of_gradients(run_ranks):
    def bytes_by_kind():
        with md.measure() as measured:
            model = md.DDP(make())
            for step in range(2):
                model.zero_grad()
                model(inputs(dist.get_rank(), step)).sum().backward()
        padded = sum(b.layout.padded_numel for b in model.buckets) * 8
        current = measured.memory.current
        return current["gradients"], padded, current["buffers"]

    for gradients, padded, buffers in run_ranks(bytes_by_kind, 2):
        assert gradients == padded
        assert buffers == 7 * 8


# --- buckets --------------------------------------------------------------------------------------


def test_plan():
    params = [torch.empty(n, dtype=torch.float32) for n in (4, 4, 8, 1, 0, 2)]
    byte = 2**-20
    order = [5, 4, 3, 2, 1, 0]
    assert plan_buckets(params, order, None, 1) == [order]
    assert plan_buckets(params, order, 0, 1) == [[5], [4], [3], [2], [1], [0]]
    assert plan_buckets(params, order, 32 * byte, 8 * byte) == [[5], [4, 3, 2], [1, 0]]
    assert plan_buckets(params, order, 1, 1) == [order]
    mixed = [torch.empty(4), torch.empty(4, dtype=torch.float64), torch.empty(4)]
    assert plan_buckets(mixed, [2, 1, 0], 1, 1) == [[1], [2, 0]], (
        "in the order of their last gradient"
    )


def test_buckets_follow_the_order_of_rank_zero(run_ranks):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(2, 2, bias=False) for _ in range(3))

        def forward(self, x):
            one, two = (self.a, self.b) if dist.get_rank() == 0 else (self.b, self.a)
            return two(one(self.c(x)))

    def names():
        model = md.DDP(Branches().double(), bucket_cap_mb=0)
        before = [name for bucket in model.buckets for name in bucket.names]
        grads = []
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
            grads.append(torch.stack([p.grad for p in model.parameters()]))
        return before, [name for bucket in model.buckets for name in bucket.names], grads

    results = run_ranks(names, 2)
    for before, after, grads in results:
        assert before == ["c.weight", "b.weight", "a.weight"], "reverse of registration"
        assert after == ["b.weight", "a.weight", "c.weight"], "as on rank 0"
        assert torch.equal(grads[0], grads[2])
        assert torch.equal(grads[2], results[0][2][2])


# --- tensors of all kinds -------------------------------------------------------------------------


class Zoo(nn.Module):
    """0-d, empty, channels_last, transposed, with gaps, complex, several dtypes."""

    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        conv = torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last)
        self.conv = nn.Parameter(conv)
        self.transposed = nn.Parameter(torch.arange(15.0).view(3, 5).t())
        self.gaps = nn.Parameter(torch.arange(8.0).view(4, 2)[:, 0])
        self.wave = nn.Parameter(torch.tensor([1 + 1j, 2 - 1j]))
        self.low = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.high = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x):
        weights = [torch.arange(p.numel()).view(p.shape) + 1 for p in self.parameters()]
        terms = [(p * w * x).abs().sum() for p, w in zip(self.parameters(), weights, strict=True)]
        return sum(term.double() for term in terms)


@pytest.mark.parametrize("cap", [25, 0])
@pytest.mark.parametrize("world", [2, 3])
def test_tensors_of_all_kinds(run_ranks, world, cap):
    def gradients():
        model = Zoo()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(dist.get_rank())  # different values per rank: rank 0's must win
        wrapped = md.DDP(model, bucket_cap_mb=cap)
        values = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            model.zero_grad()
            wrapped(dist.get_rank() + 1.0).backward()
        strides = [p.grad.stride() for p in model.parameters()]
        return values, [p.grad.clone() for p in model.parameters()], strides

    right = Zoo()
    for rank in range(world):
        (right(rank + 1.0) / world).backward()
    for values, grads, strides in run_ranks(gradients, world):
        for value, grad, stride, param in zip(
            values, grads, strides, right.parameters(), strict=True
        ):
            assert torch.equal(value, param)
            torch.testing.assert_close(grad, param.grad)
            assert stride == param.grad.stride(), "what autograd itself would give"


def test_sparse_gradients_become_dense(run_ranks):
    def gradient():
        model = md.DDP(nn.Embedding(4, 2, sparse=True))
        for _ in range(2):
            model.zero_grad()
            model(torch.tensor([dist.get_rank(), 3])).sum().backward()
        return model.module.weight.grad

    for grad in run_ranks(gradient, 2):
        assert torch.equal(grad, torch.tensor([[0.5] * 2, [0.5] * 2, [0.0] * 2, [1.0] * 2]))


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {}])
def test_optimizer_with_channels_last_weights(run_ranks, options):
    def conv(seed):
        torch.manual_seed(seed)
        return nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)

    def images(rank):
        return torch.randn(1, 3, 5, 5, generator=torch.Generator().manual_seed(rank)).double()

    def steps(model, ranks):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
        for _ in range(3):
            optimizer.zero_grad()
            for rank in ranks:
                (model(images(rank)).pow(2).mean() / len(ranks)).backward()
            optimizer.step()
        return [p.detach().contiguous() for p in model.parameters()]

    results = run_ranks(lambda: steps(md.DDP(conv(dist.get_rank())), [dist.get_rank()]), 2)
    check_equal(results, steps(conv(0), [0, 1]))


def test_outputs_in_containers():
    from dataclasses import dataclass

    @dataclass
    class Output:
        logits: torch.Tensor
        extra: dict

    a, b, c = (torch.ones(1) for _ in range(3))
    found = list(tensors_in(Output(a, {"x": [b, None, 3], "y": (c,)})))
    assert [id(t) for t in found] == [id(a), id(b), id(c)]


# --- buffers --------------------------------------------------------------------------------------


class Buffers(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("constant", torch.arange(3, dtype=torch.int16))
        self.register_buffer("nothing", None)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(0.0))
        self.register_buffer("wave", torch.tensor([1 + rank * 1j]))
        self.alias = nn.Module()
        self.alias.register_buffer("count", self.count)

    def forward(self, x):
        self.count += dist.get_rank() + 1
        return self.linear(x)


def test_buffers_are_rank_zeros_after_each_training_forward(run_ranks):
    def buffers():
        model = md.DDP(Buffers(dist.get_rank()))
        module = model.module
        constant = module.constant
        seen = []
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            seen.append(module.count.item())
        assert module.alias.count is module.count, "one buffer under two names stays one"
        assert module.constant is constant, "what did not change is not touched"
        with torch.no_grad():
            model(torch.ones(1, 2))  # evaluation talks to nobody: one rank may do it alone
        return seen, module.count.item(), module.wave.item(), module.mask.tolist()

    zero, one = run_ranks(buffers, 2)
    assert zero == ([1.0, 2.0], 3.0, 1 + 0j, [True, False])
    assert one == ([1.0, 2.0], 4.0, 1 + 0j, [True, False])


def test_buffers_stay_local_on_request_and_in_no_sync(run_ranks):
    def counts():
        model = md.DDP(Buffers(0), broadcast_buffers=False)
        model(torch.ones(1, 2)).sum().backward()
        other = md.DDP(Buffers(0))
        with other.no_sync():
            other(torch.ones(1, 2)).sum().backward()
        return model.module.count.item(), other.module.count.item()

    assert run_ranks(counts, 2) == [(1.0, 1.0), (2.0, 2.0)]


# --- communication hooks --------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 4])
def test_reduce_scatter_all_gather_adds_in_rank_order(run_ranks, world):
    def gradient():
        torch.manual_seed(dist.get_rank())
        mine = torch.randn(1000)
        model = md.DDP(nn.Linear(1000, 1), comm_hook=hooks.reduce_scatter_all_gather)
        for _ in range(2):
            model.zero_grad()
            model(mine).backward()
        return mine, model.module.weight.grad[0]

    results = run_ranks(gradient, world)
    total = results[0][0] * (1 / world)
    for given, _ in results[1:]:
        total = total + given * (1 / world)
    for _, grad in results:
        assert torch.equal(grad, total)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_same_bits_as_zero_1(run_ranks, world):
    # Not the fused kernel: its vector body and its scalar tail round differently, and which element
    # is in the tail depends on whether the optimizer sees tensors or the flat shard.
    def ddp_and_zero():
        mine = inputs(dist.get_rank(), 0).float()
        results = []
        for kind in ("ddp", "zero"):
            model = make().float()
            if kind == "ddp":
                model = md.DDP(model, comm_hook=hooks.reduce_scatter_all_gather)
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
            else:
                optimizer = md.ZeroOptimizer(
                    model.parameters(), torch.optim.AdamW, stage=1, lr=0.01, foreach=False
                )
            for _ in range(4):
                optimizer.zero_grad()
                model(mine).pow(2).mean().backward()
                optimizer.step()
            results.append([p.detach().clone() for p in model.parameters()])
        return results

    for ddp, zero in run_ranks(ddp_and_zero, world):
        for a, b in zip(ddp, zero, strict=True):
            assert torch.equal(a, b)


def test_bf16_compression(run_ranks):
    def gradients():
        model = md.DDP(make(), comm_hook=hooks.bf16_compress)
        sent = []
        for _ in range(2):
            sent.clear()
            ledger.last.clear()
            model.zero_grad()
            model(inputs(dist.get_rank(), 0)).sum().backward()
        sent = sum(r.sent_bytes for r in ledger.last if r.op == "all_reduce")
        return [p.grad.clone() for p in model.parameters()], sent

    model = make()
    for rank in range(2):
        (model(inputs(rank, 0)).sum() / 2).backward()
    results = run_ranks(gradients, 2)
    count = sum(p.numel() for p in model.parameters()) + 1
    for grads, sent in results:
        assert sent == count * 2
        for grad, param, zero in zip(grads, model.parameters(), results[0][0], strict=True):
            # Two roundings of at most 2^-9 relative to the summands, which may cancel.
            torch.testing.assert_close(grad, param.grad, rtol=2**-7, atol=2**-7)
            assert torch.equal(grad, zero)


class Matrix(nn.Module):
    def __init__(self, rows=12, columns=20):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(rows, columns))
        self.b = nn.Parameter(torch.zeros(columns))

    def forward(self, g, h):
        return (self.w * g).sum() + (self.b * h).sum()


def test_powersgd_is_exact_for_matrices_of_low_rank(run_ranks):
    def gradient():
        torch.manual_seed(1)
        left, right = torch.randn(12, 2).double(), torch.randn(20, 2).double()
        mine = left @ torch.diag(torch.tensor([1.0, 2 + dist.get_rank()]).double()) @ right.T
        model = md.DDP(make(Matrix), comm_hook=hooks.PowerSGD(rank=2))
        for _ in range(2):
            model.zero_grad()
            model(mine, torch.full((20,), float(dist.get_rank())).double()).backward()
        return mine, model.module.w.grad, model.module.b.grad

    results = run_ranks(gradient, 2)
    for _, w, b in results:
        torch.testing.assert_close(w, (results[0][0] + results[1][0]) / 2, **TOLERANCE)
        assert torch.equal(b, torch.full((20,), 0.5).double())


@pytest.mark.parametrize("world", [2, 3])
def test_powersgd_owes_exactly_what_it_did_not_deliver(run_ranks, world):
    def training():
        hook = hooks.PowerSGD(rank=1, warmup_steps=1)
        model = md.DDP(make(Matrix), comm_hook=hook)
        given, delivered, sent = 0, 0, []
        for step in range(5):
            torch.manual_seed(10 * step + dist.get_rank())
            mine = torch.randn(12, 20).double()
            ledger.last.clear()
            model.zero_grad()
            model(mine, torch.ones(20).double()).backward()
            given, delivered = given + mine / world, delivered + model.module.w.grad
            sent.append(sum(r.payload_bytes for r in ledger.last if r.op == "all_reduce"))
        return given, delivered, hook.error["w"], sent

    results = run_ranks(training, world)
    given = sum(r[0] for r in results)
    owed = sum(r[2] for r in results)
    for _, delivered, _, sent in results:
        assert torch.equal(delivered, results[0][1])
        torch.testing.assert_close(delivered + owed, given, **TOLERANCE)
        assert owed.norm() > 0.1
        assert sent[0] == (12 * 20 + 20 + 1) * 8, "the first step is not compressed"
        assert sent[1:] == [(12 + 20 + 20 + 1) * 8] * 4


def test_unused_parameters_are_noticed_under_every_hook(run_ranks):
    def messages():
        found = []
        for hook in (
            hooks.all_reduce, hooks.reduce_scatter_all_gather, hooks.bf16_compress,
            hooks.fp32_reduce, hooks.PowerSGD(rank=1),
        ):  # fmt: skip
            model = nn.ModuleDict({"a": nn.Linear(9, 9), "b": nn.Linear(9, 9)})
            model.forward = lambda x, m=model: m["a"](x) if dist.get_rank() else m["b"](m["a"](x))
            model = md.DDP(model, comm_hook=hook)
            for _ in range(2):
                try:
                    model(torch.ones(1, 9)).sum().backward()
                except RuntimeError as error:
                    found.append("'b.weight' (ranks [1] only)" in str(error))
        return found

    assert run_ranks(messages, 2) == [[True] * 10] * 2


# --- wrapping, copying, the world around ----------------------------------------------------------


def test_one_rank_is_no_wrapper(run_ranks):
    def alone():
        model = md.DDP(make())
        model(inputs(0, 0)).sum().backward()
        with model.no_sync(), model.join():
            model(inputs(0, 0)).sum().backward()
        return len(ledger.last), hasattr(model, "buckets")

    assert run_ranks(alone, 1) == [(0, False)]


def test_errors_at_construction(run_ranks):
    def messages():
        frozen = nn.Linear(2, 2).requires_grad_(False)
        found = []
        for model, options in [
            (frozen, {}),
            (nn.Linear(2, 2, device="meta"), {}),
            (nn.LazyLinear(2), {}),
            (nn.Linear(2, 2), {"bucket_cap_mb": -1}),
        ]:
            with pytest.raises(ValueError) as error:
                md.DDP(model, **options)
            found.append(str(error.value))
        return found

    for nothing, meta, lazy, size in run_ranks(messages, 2):
        assert "no parameter requires a gradient" in nothing
        assert "weight, bias" in meta and "to_empty" in meta
        assert "weight, bias" in lazy and "lazy" in lazy
        assert "bucket_cap_mb" in size


def test_wrapping_again_takes_over(run_ranks):
    def gradients():
        model = make()
        old = md.DDP(model)
        new = md.DDP(old)
        twice = md.DDP(model)
        results = []
        for wrapper in (old, new, twice, twice):
            model.zero_grad()
            ledger.last.clear()
            wrapper(inputs(dist.get_rank(), 0)).sum().backward()
            results.append(model.first.weight.grad.clone())
            reductions = sum(r.op == "all_reduce" for r in ledger.last)
        with pytest.raises(RuntimeError, match=r"'weight' belongs to a larger module"):
            md.DDP(model.first)
        return results, reductions

    right = make()
    for rank in range(2):
        (right(inputs(rank, 0)).sum() / 2).backward()
    for results, reductions in run_ranks(gradients, 2):
        assert reductions == 1
        for grad in results:
            torch.testing.assert_close(grad, right.first.weight.grad, **TOLERANCE)


def test_a_wrapper_that_is_thrown_away_is_silent(run_ranks):
    def reductions():
        import gc

        model = make()
        md.DDP(model)
        gc.collect()
        ledger.last.clear()
        model(inputs(dist.get_rank(), 0)).sum().backward()
        return len(ledger.last)

    assert run_ranks(reductions, 2) == [0, 0]


def test_a_part_of_the_ranks(run_ranks):
    def gradients():
        mesh = md.build_mesh(dp=2, tp=2)
        model = md.DDP(nn.Linear(1, 1, bias=False).double(), group=mesh["dp"])
        for _ in range(2):
            model.zero_grad()
            model(torch.full((1, 1), 1.0 + dist.get_rank()).double()).sum().backward()
        with pytest.raises(TypeError, match=r"pickle \.module"):
            pickle.dumps(model)
        copied = copy.deepcopy(model)
        return model.module.weight.grad.item(), copied.group is model.group

    assert run_ranks(gradients, 4) == [(2.0, True), (3.0, True), (2.0, True), (3.0, True)]


def test_pickled_ranks_meet_again_at_the_first_forward(run_ranks):
    def again():
        model = md.DDP(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)).double(), bucket_cap_mb=0)
        model(inputs(dist.get_rank(), 0)).sum().backward()
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        with torch.no_grad():
            loaded.module[0].weight.add_(dist.get_rank())
        for _ in range(2):
            loaded.zero_grad()
            loaded(inputs(dist.get_rank(), 0)).sum().backward()
        same = all(
            torch.equal(a.grad, b.grad)
            for a, b in zip(model.parameters(), loaded.parameters(), strict=True)
        )
        return same, loaded.bucket_cap_mb

    assert run_ranks(again, 2) == [(True, 0)] * 2


def test_dry_run_at_world_64():
    """The real code in one process: fake group, fake tensors."""
    code = """
import torch, torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
import minidist as md
from minidist.comm import ledger
dist.init_process_group("fake", rank=3, world_size=64, store=FakeStore())
with FakeTensorMode():
    model = md.DDP(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)))
    for _ in range(2):
        ledger.last.clear()
        model.zero_grad()
        model(torch.ones(2, 512)).sum().backward()
sent = sum(r.sent_bytes for r in ledger.last)
print(sent, sum(p.numel() for p in model.parameters()) * 4)
"""
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    sent, size = map(int, done.stdout.split())
    assert size * 2 * 63 / 64 <= sent <= (size + 4) * 2 * 63 / 64


def test_checkpointed_blocks_share_no_state_between_steps(run_ranks):
    """A use that first appears after the learning backward is an error, never a wrong mean."""

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
            self.twice = False

        def forward(self, x):
            y = checkpoint(self.a, x, use_reentrant=True) if self.twice else x
            return self.b(self.a(y))

    def message():
        model = md.DDP(Late(), bucket_cap_mb=0)
        for twice in (False, True):
            model.module.twice = twice
            model.zero_grad()
            try:
                model(torch.ones(1, 2, requires_grad=True)).sum().backward()
            except RuntimeError as error:
                return str(error)
        return None

    for text in run_ranks(message, 2):
        assert "use_reentrant=False" in text


def test_a_hook_that_takes_gradients_away_is_an_error(run_ranks):
    def message():
        layer = nn.Linear(1, 1)

        def consume(param):
            param.grad = None

        layer.weight.register_post_accumulate_grad_hook(consume)
        model = md.DDP(layer)
        with pytest.raises(RuntimeError, match="took the gradient of 'weight'"):
            model(torch.ones(1, 1)).sum().backward()
        return True

    assert run_ranks(message, 2) == [True] * 2


@pytest.mark.parametrize("hook", [hooks.all_reduce, hooks.reduce_scatter_all_gather])
def test_debug_mode_fills_padding_with_nan(run_ranks, hook):
    def debugged():
        import os

        os.environ["MINIDIST_DEBUG"] = "1"
        try:
            parameters = train(comm_hook=hook)
        finally:
            del os.environ["MINIDIST_DEBUG"]
        return parameters

    check_equal(run_ranks(debugged, 3), serial(3))
