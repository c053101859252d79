"""Public bug reports that concern DDP, as tests with their right values (shared case list, B..).

Each test says what a wrong implementation gives. World 2 unless the case names others.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import minidist as md
from minidist.comm import ledger
from minidist.parallel import hooks

TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}


def linear(inputs, outputs, value=None, bias=False):
    layer = nn.Linear(inputs, outputs, bias=bias).double()
    if value is not None:
        nn.init.constant_(layer.weight, value)
    return layer


def filled(*shape, value=1.0):
    return torch.full(shape, float(value), dtype=torch.float64)


def mean_of_serial(make, loss, world):
    """Gradients of the mean over ranks of `loss(model, rank)`, in one process."""
    model = make()
    for rank in range(world):
        (loss(model, rank) / world).backward()
    return [p.grad for p in model.parameters()]


def error_of(function):
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return None


# --- B01, B04, B05, B07: which parameters take part -----------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("cap", [25, 0])
def test_b01_tied_weights(run_ranks, world, cap):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 2)
            self.head = nn.Linear(2, 5, bias=False)
            nn.init.ones_(self.embedding.weight)
            self.head.weight = self.embedding.weight

        def forward(self, token):
            return self.head(self.embedding(token))

    def gradient():
        model = md.DDP(Tied().double(), bucket_cap_mb=cap)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(2):  # learning and normal
            model.zero_grad()
            model(torch.tensor([0, 4, 2][dist.get_rank()])).sum().backward()
        grad = model.module.head.weight.grad.clone()
        optimizer.step()
        assert model.module.head.weight is model.module.embedding.weight
        return grad, model.module.head.weight.detach()

    uses = torch.zeros(5, dtype=torch.float64)
    for token in [0, 4, 2][:world]:
        uses[token] += 5 / world
    right = (1 + uses).unsqueeze(1).expand(5, 2)
    if world == 2:
        assert right[:, 0].tolist() == [3.5, 1, 1, 1, 3.5]
    for grad, weight in run_ranks(gradient, world):
        torch.testing.assert_close(grad, right, **TOLERANCE)
        torch.testing.assert_close(weight, 1 - right, **TOLERANCE)


def test_b04_unfrozen_after_wrapping(run_ranks):
    def gradients():
        first, second = linear(1, 1, 1), linear(1, 1, 1)
        first.requires_grad_(False)
        model = md.DDP(nn.Sequential(first, second))
        results, x = [], filled(1, 1, value=1 + dist.get_rank())
        for step in range(5):
            if step == 1:
                first.requires_grad_(True)
            model.zero_grad()
            model(x).sum().backward()
            results.append([None if p.grad is None else p.grad.item() for p in model.parameters()])
        return results, [b.names for b in model.buckets]

    for results, names in run_ranks(gradients, 2):
        # Not averaged: 1.0 on rank 0 and 2.0 on rank 1.
        assert results == [[None, 1.5]] + [[1.5, 1.5]] * 4
        assert names == [["1.weight", "0.weight"]], "the late one is in a bucket from now on"


def test_b04_frozen_after_wrapping(run_ranks):
    def gradients():
        model = md.DDP(nn.Sequential(linear(1, 1, 1), linear(1, 1, 1)), bucket_cap_mb=0)
        results, x = [], filled(1, 1, value=1 + dist.get_rank())
        for step in range(6):
            model.module[0].requires_grad_(not 2 <= step < 4)
            model.zero_grad()
            model(x).sum().backward()
            results.append([None if p.grad is None else p.grad.item() for p in model.parameters()])
        return results

    assert run_ranks(gradients, 2) == [[[1.5, 1.5]] * 2 + [[None, 1.5]] * 2 + [[1.5, 1.5]] * 2] * 2


def test_b04_frozen_on_one_rank_only(run_ranks):
    def message():
        model = md.DDP(nn.Sequential(linear(1, 1, 1), linear(1, 1, 1)))
        model(filled(1, 1)).sum().backward()
        if dist.get_rank() == 1:
            model.module[0].requires_grad_(False)
        return error_of(lambda: model(filled(1, 1)).sum().backward())

    for text in run_ranks(message, 2):
        assert "'0.weight' has requires_grad=True on rank 0 but False on rank 1" in text


class TwoBranches(nn.Module):
    def __init__(self, value=0.0):
        super().__init__()
        self.a, self.b = linear(1, 1, value), linear(1, 1, value)

    def forward(self, x, both=False):
        return self.a(x) + self.b(x) if both else self.a(x)


@pytest.mark.parametrize("cap", [None, 0])
def test_b05_a_parameter_that_no_rank_uses(run_ranks, cap):
    def one_step():
        x = filled(1, 1, value=1 + dist.get_rank())
        model = md.DDP(TwoBranches(), bucket_cap_mb=cap)
        error = error_of(lambda: model(x).sum().backward())
        averaged = model.module.a.weight.grad.item(), model.module.b.weight.grad
        after = error_of(lambda: model(x, both=True).sum().backward())

        model = md.DDP(TwoBranches(), bucket_cap_mb=cap, find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
        steps = []
        for _ in range(3):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            steps.append((model.module.a.weight.grad.item(), model.module.b.weight.grad))
        return error, averaged, after, steps

    for error, averaged, after, steps in run_ranks(one_step, 2):
        assert "'b.weight' (all ranks)" in error and "find_unused_parameters=True" in error
        assert averaged == (1.5, None), "used parameters hold the mean even so"
        assert after is None, "the wrapper works on after the error"
        # Local gradients: -1 on rank 0 and -2 on rank 1 after the first step.
        assert steps == [(1.5, None)] * 3


@pytest.mark.parametrize("cap", [None, 0])
@pytest.mark.parametrize("world", [2, 3])
def test_b07_a_parameter_that_some_ranks_use(run_ranks, world, cap):
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = linear(2, 2), linear(2, 2)

        def forward(self, x):
            y = self.first(x).sum()
            return y + self.second(x).sum() if dist.get_rank() == 0 else y

    def gradients():
        x = filled(1, 2)
        strict = md.DDP(Skip(), bucket_cap_mb=cap)
        errors = [error_of(lambda: strict(x).backward()) for _ in range(2)]
        model = md.DDP(Skip(), bucket_cap_mb=cap, find_unused_parameters=True)
        results = []
        for step in range(4):
            model.zero_grad(set_to_none=step != 2)
            model(x).backward()
            results.append([p.grad.clone() for p in model.parameters()])
        return errors, results

    others = list(range(1, world))
    for errors, results in run_ranks(gradients, world):
        for text in errors:
            assert f"'second.weight' (ranks {others} only)" in text
        for first, second in results:
            torch.testing.assert_close(first, filled(2, 2), **TOLERANCE)
            torch.testing.assert_close(second, filled(2, 2, value=1 / world), **TOLERANCE)


def test_b07_a_rank_that_uses_no_parameter_at_all(run_ranks):
    class Bypass(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear(1, 1, 3)

        def forward(self, x):
            return self.layer(x) if dist.get_rank() == 0 else x * 1

    def gradients(find):
        model = md.DDP(Bypass(), find_unused_parameters=find)
        results = []
        for _ in range(3):
            model.zero_grad()
            error = error_of(lambda: model(filled(1, 1).requires_grad_()).sum().backward())
            results.append(error if error else model.module.layer.weight.grad.item())
        return results

    assert run_ranks(gradients, 2, True) == [[0.5] * 3] * 2
    for texts in run_ranks(gradients, 2, False):
        assert all("'layer.weight' (ranks [1] only)" in text for text in texts)


def test_unused_with_gradients_left_from_before(run_ranks):
    """A stale gradient of a parameter that is now unused counts once, not per rank and not zero."""

    def gradients():
        model = md.DDP(TwoBranches(), find_unused_parameters=True)
        x = filled(1, 1, value=1 + dist.get_rank())
        model(x, both=True).sum().backward()  # both 1.5
        model(x).sum().backward()  # a adds 1.5, nobody uses b
        model(x, both=dist.get_rank() == 0).sum().backward()  # a adds 1.5, b adds (1 + 0) / 2
        with model.no_sync():
            model(x, both=True).sum().backward()
        model(x).sum().backward()  # b was used inside no_sync only
        return model.module.a.weight.grad.item(), model.module.b.weight.grad.item()

    assert run_ranks(gradients, 2) == [(1.5 * 5, 1.5 + 0.5 + 1.5)] * 2


# --- B10, B11, B13, B15: several forwards, accumulation, buffers, uneven inputs -------------------


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_b10_two_forwards_then_two_backwards(run_ranks, order, world):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()

    def losses(model, rank):
        x = filled(2, 3, value=rank + 1)
        return model(x).sum(), model(2 * x).pow(2).sum()

    def gradients(find):
        model = md.DDP(make(), bucket_cap_mb=0, find_unused_parameters=find)
        for _ in range(2):
            model.zero_grad()
            pair = losses(model, dist.get_rank())
            for i in order:
                pair[i].backward()
        return [p.grad for p in model.parameters()]

    right = mean_of_serial(make, lambda model, rank: sum(losses(model, rank)), world)
    for find in (False, True):
        for grads in run_ranks(gradients, world, find):
            for mine, expected in zip(grads, right, strict=True):
                torch.testing.assert_close(mine, expected, **TOLERANCE)


@pytest.mark.parametrize("forward_inside", [True, False])
@pytest.mark.parametrize("backward_inside", [True, False])
def test_b11_which_half_of_no_sync_decides(run_ranks, forward_inside, backward_inside):
    from contextlib import nullcontext

    def total():
        model = md.DDP(linear(1, 1, 1))
        results = []
        for _ in range(2):
            model.zero_grad()
            ledger.last.clear()
            with model.no_sync() if forward_inside else nullcontext():
                loss = model(filled(1, 1, value=1 + dist.get_rank())).sum()
            with model.no_sync() if backward_inside else nullcontext():
                loss.backward()
            reductions = sum(r.op == "all_reduce" for r in ledger.last)
            between = model.module.weight.grad.item()
            model(filled(1, 1, value=10 + dist.get_rank())).sum().backward()
            results.append((reductions, between, model.module.weight.grad.item()))
        return results

    for rank, results in enumerate(run_ranks(total, 2)):
        # The backward decides: inside, the gradient stays local and nothing is sent.
        assert results == [(0, 1.0 + rank, 12.0) if backward_inside else (1, 1.5, 12.0)] * 2


def test_b13_two_forwards_one_backward_with_buffers(run_ranks):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("scale", torch.ones(3))

        def forward(self, x):
            y = self.layer(x) * self.scale
            if self.training:
                self.scale = self.scale + 1 + (dist.get_rank() if dist.is_initialized() else 0)
            return y

    def make(kind):
        torch.manual_seed(0)
        if kind == "scaled":
            return Scaled().double()
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()

    def x_of(rank):
        return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)).double()

    def loss(model, rank):
        return model(x_of(rank)).pow(2).sum() + model(2 * x_of(rank)).sum().sin()

    def gradients(kind):
        model = md.DDP(make(kind))
        results = []
        for _ in range(2):
            start = copy.deepcopy(model.module)
            model.zero_grad()
            loss(model, dist.get_rank()).backward()
            results.append(([p.grad.clone() for p in model.parameters()], start))
        return results, [b.clone() for b in model.buffers()]

    def of(rank):  # each rank begins with a fresh buffer
        return lambda model, _: loss(model, rank)

    for kind in ("scaled", "norm"):
        results = run_ranks(gradients, 2, kind)
        right = []
        for parts in zip(
            *(mean_of_serial(lambda kind=kind: make(kind), of(r), 1) for r in range(2)), strict=True
        ):
            right.append(sum(parts) / 2)
        for grads, buffers in results:
            for mine, expected in zip(grads[0][0], right, strict=True):
                torch.testing.assert_close(mine, expected, **TOLERANCE)
            for mine, zero in zip(buffers, results[0][1], strict=True):
                assert torch.equal(mine, zero)


@pytest.mark.parametrize("divide_by, right", [("world", -6.0), ("active", -8.0)])
def test_b15_uneven_inputs(run_ranks, divide_by, right):
    def train():
        model = md.DDP(linear(1, 1, 0))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with model.join(divide_by):
            for x in [[2, 4], [6]][dist.get_rank()]:
                optimizer.zero_grad()
                model(filled(1, 1, value=x)).sum().backward()
                optimizer.step()
        # Afterwards everything is as before.
        optimizer.zero_grad()
        model(filled(1, 1, value=1 + dist.get_rank())).sum().backward()
        return model.module.weight.item(), model.module.weight.grad.item()

    assert run_ranks(train, 2) == [(right, 1.5)] * 2


@pytest.mark.parametrize("batches", [(0, 3, 1), (3, 0, 0), (2, 2, 2), (0, 0, 0), (1, 2, 4)])
def test_b15_uneven_inputs_with_buffers_hooks_and_accumulation(run_ranks, batches):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.skipped = nn.Linear(3, 3)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += 1
            return self.layer(x)

    def train():
        torch.manual_seed(dist.get_rank())
        hook = hooks.PowerSGD(rank=1)
        model = md.DDP(Counting(), bucket_cap_mb=0, comm_hook=hook, find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for _ in range(batches[dist.get_rank()]):
                optimizer.zero_grad()
                with model.no_sync():
                    model(torch.randn(2, 3)).sum().backward()
                model(torch.randn(2, 3)).sum().backward()
                optimizer.step()
            trained = [p.detach().clone() for p in model.parameters()]
        final = [p.detach() for p in model.parameters()]
        return final, trained, model.module.seen.item()

    results = run_ranks(train, 3)
    trained_to_the_end = results[batches.index(max(batches))][1]
    for final, _, seen in results:
        assert seen == 2 * max(batches), "the buffers of a rank that trained to the end"
        for mine, right in zip(final, trained_to_the_end, strict=True):
            assert torch.equal(mine, right)


def test_b15_ranks_in_different_phases(run_ranks):
    def message():
        model = md.DDP(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        model.train(dist.get_rank() == 0)  # rank 1 skips the broadcast of buffers

        def training():
            with model.join():
                model(torch.randn(3, 2)).sum().backward()

        return error_of(training)

    for text in run_ranks(message, 2):
        assert "not in the same phase" in text


def test_b15_two_joined_modules_are_refused(run_ranks):
    def message():
        a, b = md.DDP(linear(1, 1)), md.DDP(linear(1, 1))
        with pytest.raises(ValueError, match="'world' or 'active'"), a.join("all"):
            pass
        with a.join():
            return error_of(lambda: b.join().__enter__())

    for text in run_ranks(message, 2):
        assert "only one module" in text


def test_b15_an_error_inside_join_is_not_swallowed(run_ranks):
    def message():
        model = md.DDP(linear(1, 1))

        def training():
            with model.join():
                raise RuntimeError("bad batch")

        return error_of(training)

    assert run_ranks(message, 2) == ["bad batch"] * 2


# --- B17, B19, B21: odd tensors -------------------------------------------------------------------


def test_b17_a_scalar_parameter(run_ranks):
    class Tempered(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear(2, 2, 1)
            self.temperature = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, x):
            return self.layer(x) * self.temperature

    def round_trip():
        model = md.DDP(Tempered())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(filled(1, 2, value=1 + dist.get_rank())).sum().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        fresh = Tempered()
        fresh.load_state_dict(model.state_dict())
        other = torch.optim.Adam(fresh.parameters(), lr=0.1)
        other.load_state_dict(optimizer.state_dict())
        same = torch.equal(fresh.temperature, model.module.temperature)
        step = other.state[fresh.temperature]["step"]
        return grads, fresh.temperature.shape, same, step.shape, step.item()

    right = mean_of_serial(Tempered, lambda model, r: model(filled(1, 2, value=1 + r)).sum(), 2)
    for grads, shape, same, step_shape, step in run_ranks(round_trip, 2):
        assert (shape, same, step_shape, step) == ((), True, (), 1.0)
        for mine, expected in zip(grads, right, strict=True):
            torch.testing.assert_close(mine, expected, **TOLERANCE)


def test_b19_transposed_and_strided_parameters(run_ranks):
    class Strided(nn.Module):
        def __init__(self, start):
            super().__init__()
            whole = torch.arange(15.0).double() + start
            self.transposed = nn.Parameter(whole.view(3, 5).t())
            self.column = nn.Parameter((torch.arange(8.0).double() + start).view(4, 2)[:, 0])

        def forward(self, x):
            weight = torch.arange(15.0).double().view(5, 3)
            return (self.transposed * weight * x).sum() + (self.column * weight[:4, 1] * x).sum()

    def gradients():
        module = Strided(100 * dist.get_rank())
        assert not module.transposed.is_contiguous() and not module.column.is_contiguous()
        model = md.DDP(module)
        values = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            model.zero_grad()
            model(1.0 + dist.get_rank()).backward()
        return values, [p.grad for p in model.parameters()]

    right = mean_of_serial(lambda: Strided(0), lambda model, rank: model(1.0 + rank), 2)
    for values, grads in run_ranks(gradients, 2):
        for value, grad, start, expected in zip(
            values, grads, Strided(0).parameters(), right, strict=True
        ):
            assert torch.equal(value, start)
            assert torch.equal(grad, expected)  # halves and small integers: exact


def test_b21_complex_parameters_and_buffers(run_ranks):
    class Wave(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.tensor([1 + 1j, 2 - 1j], dtype=torch.complex128))
            self.register_buffer("phase", torch.tensor([1j, -1j]) * (1 + rank_or_zero()))

        def forward(self, x):
            return (self.p * x).abs().pow(2).sum()

    def rank_or_zero():
        return dist.get_rank() if dist.is_initialized() else 0

    def gradients():
        model = md.DDP(Wave())
        x = (dist.get_rank() + 1) * torch.tensor([1 + 2j, 3], dtype=torch.complex128)
        for _ in range(2):
            model.zero_grad()
            model(x).backward()
        plain = model.module.p.grad.clone()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        # A conjugated view as the gradient.
        model.zero_grad()
        (model.module.p.conj() * x).real.sum().backward()
        return plain, norm.item(), model.module.p.grad.resolve_conj(), model.module.phase.tolist()

    right = torch.tensor([25 + 25j, 90 - 45j], dtype=torch.complex128)
    for grad, norm, conjugated, phase in run_ranks(gradients, 2):
        torch.testing.assert_close(grad, right, **TOLERANCE)
        assert norm == pytest.approx(right.abs().square().sum().sqrt().item(), rel=1e-12)
        assert torch.equal(conjugated, 1.5 * torch.tensor([1 + 2j, 3], dtype=torch.complex128))
        assert phase == [1j, -1j]


# --- B27, B29: autograd ---------------------------------------------------------------------------


def test_b27_higher_order_autograd(run_ranks):
    def gradients():
        model = md.DDP(linear(1, 1, 1))
        results = []
        for _ in range(3):
            model.zero_grad()
            x = filled(1, 1, value=1 + dist.get_rank()).requires_grad_()
            y = model(x)
            (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            ledger.last.clear()
            local = torch.autograd.grad(y.sum(), model.parameters(), retain_graph=True)[0].item()
            assert not ledger.last, "autograd.grad talks to nobody"
            (y + g * g).sum().backward()
            results.append((local, model.module.weight.grad.item()))
        model.zero_grad()
        model(filled(1, 1, value=1 + dist.get_rank())).sum().backward(create_graph=True)
        return results, model.module.weight.grad.item()

    for rank, (results, last) in enumerate(run_ranks(gradients, 2)):
        assert results == [(1.0 + rank, 3.5)] * 3
        assert last == 1.5


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant", "none"])
@pytest.mark.parametrize("find", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_b29_activation_checkpointing(run_ranks, world, kind, find):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.shared, self.private, self.tail = (nn.Linear(3, 3).double() for _ in range(3))

        def block(self, x):
            return torch.tanh(self.shared(x))

        def forward(self, x, kind):
            def call(block, x):
                if kind == "none":
                    return block(x)
                return checkpoint(block, x, use_reentrant=kind == "reentrant")

            x = call(self.block, x)
            x = call(lambda x: torch.tanh(self.private(x)), x)
            # Inside and outside of a checkpoint: its gradient comes in parts.
            return self.tail(call(self.block, x)) + self.shared(x)

    def loss(model, rank, kind):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(rank)).double()
        return model(x.requires_grad_(), kind).pow(2).sum()

    def gradients():
        model = md.DDP(Shared(), bucket_cap_mb=0, find_unused_parameters=find)
        results = []
        for _ in range(3):
            ledger.last.clear()
            model.zero_grad()
            loss(model, dist.get_rank(), kind).backward()
            reductions = [r.by for r in ledger.last if r.op == "all_reduce"]
            results.append(([p.grad.clone() for p in model.parameters()], reductions))
        return results

    right = mean_of_serial(Shared, lambda model, rank: loss(model, rank, "none"), world)
    for results in run_ranks(gradients, world):
        for grads, reductions in results:
            assert reductions == [f"ddp bucket {i}" for i in range(6)], "one reduction per bucket"
            for mine, expected in zip(grads, right, strict=True):
                torch.testing.assert_close(mine, expected, **TOLERANCE)


def test_b29_reentrant_block_without_differentiable_input_is_reported(run_ranks):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linear(2, 2), linear(2, 2)

        def forward(self, x):
            return self.b(checkpoint(self.a, x, use_reentrant=True))

    @pytest.mark.filterwarnings("ignore")
    def message():
        import warnings

        warnings.simplefilter("ignore")  # torch's own hint
        model = md.DDP(Block())
        return error_of(lambda: model(filled(1, 2)).sum().backward())

    for text in run_ranks(message, 2):
        assert "'a.weight' (all ranks)" in text and "reentrant" in text


def test_b29_a_whole_model_inside_a_reentrant_checkpoint(run_ranks):
    def gradient():
        model = md.DDP(linear(1, 1, 1))
        for _ in range(2):
            model.zero_grad()
            x = filled(1, 1, value=1 + dist.get_rank()).requires_grad_()
            checkpoint(model, x, use_reentrant=True).sum().backward()
        return model.module.weight.grad.item()

    assert run_ranks(gradient, 2) == [1.5] * 2


# --- B41, B43, B97, B99: saving, changed objects, copies, compilation -----------------------------


class HasModule(nn.Module):
    """With a child called 'module', and a BatchNorm, whose version travels in the metadata."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def forward(self, x):
        return self.head(self.module(x))


@pytest.mark.parametrize("world", [1, 2])
def test_b41_state_dict_has_the_modules_own_names(run_ranks, world):
    def check():
        plain = HasModule()
        names = list(plain.state_dict())
        wrapped = md.DDP(HasModule())
        twice = md.DDP(md.DDP(HasModule()))
        for model in (wrapped, twice):
            assert list(model.state_dict()) == names
            plain.load_state_dict(model.state_dict(), strict=True)
            with torch.no_grad():
                for param in plain.parameters():
                    param.add_(1)
            model.load_state_dict(plain.state_dict(), strict=True)
            for a, b in zip(plain.parameters(), model.parameters(), strict=True):
                assert torch.equal(a, b)
            with pytest.raises(RuntimeError, match=r"Missing key.*head\.bias"):
                model.load_state_dict(
                    {k: v for k, v in plain.state_dict().items() if k != "head.bias"}
                )
            with pytest.raises(ValueError, match="assign"):
                model.load_state_dict(plain.state_dict(), assign=True)
        # As a child of another module.
        outer = nn.ModuleDict({"net": wrapped, "other": nn.Linear(2, 2)})
        plain_outer = nn.ModuleDict({"net": plain, "other": nn.Linear(2, 2)})
        assert list(outer.state_dict()) == list(plain_outer.state_dict())
        outer.load_state_dict(plain_outer.state_dict(), strict=True)
        plain_outer.load_state_dict(outer.state_dict(), strict=True)
        return True

    assert run_ranks(check, world) == [True] * world


@pytest.mark.parametrize("cap", [None, 0])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_b43_any_way_of_zeroing(run_ranks, world, cap):
    def training(model, ranks):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        history = []
        for step in range(7):
            if step == 0:
                optimizer.zero_grad(set_to_none=True)
            elif step in (1, 5):
                model.zero_grad(set_to_none=False)
            elif step == 2:
                for param in model.parameters():
                    param.grad = None
            elif step == 3:
                optimizer.zero_grad(set_to_none=False)
            elif step == 4:
                for param in model.parameters():
                    param.grad = torch.zeros_like(param)
            # step 6: not zeroed, the gradient of step 5 counts twice
            for rank in ranks:
                (model(filled(1, 2, value=1 + rank)).pow(2).sum() / len(ranks)).backward()
            optimizer.step()
            history.append([p.detach().clone() for p in model.parameters()])
        return history

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).double()

    def on_ranks():
        return training(md.DDP(make(), bucket_cap_mb=cap), [dist.get_rank()])

    right = training(make(), range(world))
    results = run_ranks(on_ranks, world)
    for history in results:
        for mine, zero, expected in zip(history, results[0], right, strict=True):
            for a, b, c in zip(mine, zero, expected, strict=True):
                assert torch.equal(a, b)
                torch.testing.assert_close(a, c, **TOLERANCE)


@pytest.mark.parametrize("find", [False, True])
def test_parameters_replaced_or_converted_after_wrapping(run_ranks, find):
    def messages():
        model = md.DDP(nn.Sequential(linear(2, 2), linear(2, 2)), find_unused_parameters=find)
        model.module[1].weight = nn.Parameter(torch.zeros(2, 2).double())
        replaced = error_of(lambda: model(filled(1, 2)).sum().backward())
        model = md.DDP(linear(2, 2))
        model.float()  # before the first backward nothing depends on the dtype
        for _ in range(2):
            assert error_of(lambda: model(torch.ones(1, 2)).sum().backward()) is None
        model.double()  # also swaps the memory of the tensors that .grad holds
        converted = error_of(lambda: model(filled(1, 2)).sum().backward())
        return replaced, converted

    for replaced, converted in run_ranks(messages, 2):
        assert "'1.weight'" in replaced and "replaced" in replaced
        assert "'weight'" in converted and "float64 now" in converted


def test_b97_deepcopy_is_independent(run_ranks):
    def copies():
        torch.manual_seed(0)
        model = md.DDP(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(model, optimizer):
            optimizer.zero_grad()
            x = torch.randn(4, 2, generator=torch.Generator().manual_seed(dist.get_rank()))
            model(x.double()).pow(2).sum().backward()
            optimizer.step()

        step(model, optimizer)
        old = [t.clone() for t in model.state_dict().values()]
        if dist.get_rank() == 0:
            ema = copy.deepcopy(model)  # one rank alone may keep the average
            assert all(p.grad is None for p in ema.parameters())
        copied, plain = copy.deepcopy(model), copy.deepcopy(model.module)
        step(model, optimizer)
        for other in (copied, plain):
            for now, before in zip(other.state_dict().values(), old, strict=True):
                assert torch.equal(now, before)
        # The copy trains on its own, and averages on its own.
        step(copied, torch.optim.SGD(copied.parameters(), lr=0.1))
        for a, b in zip(model.parameters(), copied.parameters(), strict=True):
            assert torch.equal(a, b) and a.data_ptr() != b.data_ptr()
        # A copy of the plain module has no hooks.
        ledger.last.clear()
        plain(torch.ones(2, 2).double()).sum().backward()
        assert not ledger.last
        return [p.detach() for p in model.parameters()]

    results = run_ranks(copies, 2)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("order", ["step", "wrapped", "module", "module.compile()"])
def test_b99_compile_in_any_order(run_ranks, order):
    def gradients():
        torch._dynamo.reset()
        layer = nn.Sequential(linear(1, 1, 1), nn.BatchNorm1d(1, affine=False).double().eval())
        if order == "module":
            model = md.DDP(torch.compile(layer, backend="aot_eager"))
        elif order == "module.compile()":
            layer.compile(backend="aot_eager")
            model = md.DDP(layer)
        elif order == "wrapped":
            wrapped = md.DDP(layer)
            model = torch.compile(wrapped, backend="aot_eager")
        else:
            model = md.DDP(layer)

        def step(x):
            model(x).sum().backward()

        if order == "step":
            step = torch.compile(step, backend="aot_eager")
        results = []
        for _ in range(3):
            layer.zero_grad()
            step(filled(1, 1, value=1 + dist.get_rank()))
            results.append(round(layer[0].weight.grad.item(), 4))
        return results

    assert run_ranks(gradients, 2, timeout=90) == [[1.5] * 3] * 2


# --- B47, B49, B87: precision, weighting, agreement -----------------------------------------------


def test_b47_sums_of_bf16_gradients(run_ranks):
    def gradients():
        results = []
        for hook in (hooks.all_reduce, hooks.reduce_scatter_all_gather, hooks.fp32_reduce):
            model = md.DDP(nn.Linear(1, 1, bias=False, dtype=torch.bfloat16), comm_hook=hook)
            x = torch.full((1, 1), 256.0 if dist.get_rank() == 0 else 1.0, dtype=torch.bfloat16)
            for _ in range(2):
                model.zero_grad()
                model(x).sum().backward()
            results.append(model.module.weight.grad.item())
        return results

    results = run_ranks(gradients, 4)
    # The mean is 64.75, halfway between the bf16 neighbours 64.5 and 65 (ties go to the even 65).
    assert all(r == results[0] for r in results), "ranks agree bit for bit"
    for value in results[0][:2]:
        assert value in (64.0, 64.5, 65.0), "bf16 sums: off by up to one part in 128, documented"
    assert results[0][2] == torch.tensor(64.75).bfloat16().item() == 65.0


def test_b49_weighting_by_the_global_number_of_tokens(run_ranks):
    """The loss helper multiplies by the world size what DDP divides by."""

    def gradient(tokens, steps):
        model = md.DDP(linear(1, 1, 1))
        mine = tokens[dist.get_rank()]
        total = sum(len(part) for rank in tokens for part in rank)
        for i in range(steps):
            x = torch.tensor(mine[i], dtype=torch.float64).view(-1, 1)
            loss = model(x).sum() * dist.get_world_size() / total
            if i < steps - 1:
                with model.no_sync():
                    loss.backward()
            else:
                loss.backward()
        return model.module.weight.grad.item()

    # Mean of the ranks' means: 4.0.
    assert run_ranks(gradient, 2, [[[1.0] * 5], [[7.0]]], 1) == [pytest.approx(2.0, rel=1e-12)] * 2
    tokens = [[[1.0, 2.0, 3.0], [4.0, 5.0]], [[6.0], [7.0, 8.0, 9.0, 10.0]]]
    assert run_ranks(gradient, 2, tokens, 2) == [pytest.approx(5.5, rel=1e-12)] * 2
    assert run_ranks(gradient, 2, [[[3.0, 5.0]], [[]]], 1) == [pytest.approx(4.0)] * 2


B87 = {
    "one layer more": ("parameter number 2", "missing on rank 0 but '1.weight'"),
    "same size, other shape": ("parameter number 0", "[2, 3]", "[3, 2]"),
    "dtype": ("parameter number 0", "float64", "float32"),
    "order": ("parameter number 0", "'a' float32 [2]", "'b' float32 [2]"),
    "requires_grad": ("parameter number 1", "requires grad", "no grad"),
    "bucket size": ("setting 'bucket_cap_mb' is 25 on rank 0 but 1 on rank 1",),
    "buffer": ("buffer number 0 is missing on rank 0", "'extra'"),
    "strides": ("strides of weight",),
    "hook": ("setting 'comm_hook'", "PowerSGD(2", "PowerSGD(4"),
}


@pytest.mark.parametrize("difference", B87)
@pytest.mark.parametrize("world", [2, 3])
def test_b87_ranks_that_built_different_models(run_ranks, world, difference):
    def message():
        odd = dist.get_rank() == 1
        model, options = nn.Linear(3, 2), {}
        if difference == "one layer more":
            model = nn.Sequential(nn.Linear(3, 2), *([nn.Linear(2, 2)] if odd else []))
        elif difference == "same size, other shape":
            model = nn.Linear(2, 3, bias=False) if odd else nn.Linear(3, 2, bias=False)
        elif difference == "dtype":
            model = nn.Linear(3, 2, dtype=torch.float32 if odd else torch.float64)
        elif difference == "order":
            pair = {"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(2))}
            model = nn.Module()
            for name in sorted(pair, reverse=odd):
                model.register_parameter(name, pair[name])
        elif difference == "requires_grad" and odd:
            model.bias.requires_grad_(False)
        elif difference == "bucket size" and odd:
            options = {"bucket_cap_mb": 1}
        elif difference == "buffer" and odd:
            model.register_buffer("extra", torch.zeros(1))
        elif difference == "strides":
            model.weight = nn.Parameter(torch.zeros(2, 3).t() if odd else torch.zeros(3, 2))
            model.weight = nn.Parameter(torch.zeros(3, 3).t() if odd else torch.zeros(3, 3))
        elif difference == "hook":
            options = {"comm_hook": hooks.PowerSGD(4 if odd else 2)}
        before = [p.detach().clone() for p in model.parameters()]
        text = error_of(lambda: md.DDP(model, **options))
        unchanged = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        return text, unchanged

    for text, unchanged in run_ranks(message, world):
        assert unchanged
        assert "different on ranks [1]" in text
        for part in B87[difference]:
            assert part in text


# --- training loops -------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3])
def test_two_wrapped_modules_in_one_graph(run_ranks, world):
    """Generator and discriminator: each backward reaches both, each step uses one."""

    def make():
        torch.manual_seed(0)
        return nn.Linear(2, 2).double(), nn.Linear(2, 1).double()

    def training(generator, critic, ranks):
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, critic)]
        for _ in range(3):
            for sign, optimizer in ((1, optimizers[1]), (-1, optimizers[0])):
                for o in optimizers:
                    o.zero_grad()
                for rank in ranks:
                    fake = generator(filled(2, 2, value=1 + rank))
                    loss = sign * (critic(fake).mean() - critic(filled(2, 2, value=rank)).mean())
                    (loss / len(ranks)).backward()
                optimizer.step()
        return [p.detach() for m in (generator, critic) for p in m.parameters()]

    def on_ranks():
        return training(*(md.DDP(m, bucket_cap_mb=0) for m in make()), [dist.get_rank()])

    right = training(*make(), range(world))
    results = run_ranks(on_ranks, world)
    for mine in results:
        for a, b, c in zip(mine, results[0], right, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, c, **TOLERANCE)


def test_errors_in_forward_and_backward_leave_no_state_behind(run_ranks):
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("backward failed")

    class Fragile(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linear(1, 1, 1), linear(1, 1, 1)

        def forward(self, x, fail=None):
            if fail == "forward":
                raise ValueError("forward failed")
            y = self.a(x)
            return self.b(Bad.apply(y) if fail == "backward" else y)

    def gradients():
        model = md.DDP(Fragile(), bucket_cap_mb=0)
        results = []
        for fail in (None, None, "forward", None, "backward", None, None):
            model.zero_grad()
            try:
                model(filled(1, 1, value=1 + dist.get_rank()), fail).sum().backward()
                results.append([p.grad.item() for p in model.parameters()])
            except ValueError as error:
                results.append(str(error))
        return results

    right = [1.5, 1.5]
    expected = [right, right, "forward failed", right, "backward failed", right, right]
    assert run_ranks(gradients, 2) == [expected] * 2


def test_forward_without_grad_and_evaluation(run_ranks):
    def gradients():
        model = md.DDP(nn.Sequential(linear(1, 1, 1), nn.Dropout(0.5)))
        results = []
        for _ in range(3):
            with torch.no_grad():
                model.eval()
                if dist.get_rank() == 0:  # alone: evaluation is local
                    assert model(filled(1, 1)).item() == 1.0
            model.zero_grad()
            model(filled(1, 1, value=1 + dist.get_rank())).sum().backward()
            results.append(model.module[0].weight.grad.item())
        return results

    assert run_ranks(gradients, 2) == [[1.5] * 3] * 2


def test_loss_from_a_tensor_kept_inside(run_ranks):
    """B26's pattern: the loss is built from an attribute, not from what forward returned."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linear(2, 2, 1), linear(2, 2, 1)

        def forward(self, x):
            self.kept = self.a(x) ** 2
            return self.b(self.kept)

    def gradients():
        model = md.DDP(Keeps(), find_unused_parameters=True, bucket_cap_mb=0)
        results = []
        for _ in range(3):
            model.zero_grad()
            model(filled(1, 2, value=1 + dist.get_rank()))
            model.module.kept.sum().backward()
            results.append((model.module.a.weight.grad.clone(), model.module.b.weight.grad))
        return results

    # d/dw of (w x)^2 summed over 2 equal inputs x: 2 (2x) x = 4 x^2, mean over x = 1, 2: 10.
    for results in run_ranks(gradients, 2):
        for a, b in results:
            assert torch.equal(a, filled(2, 2, value=10)) and b is None
