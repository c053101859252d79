"""Public bug reports about DDP as tests (case list, B..): odd tensors, autograd, failures.

Each test says what a wrong implementation gives. World 2 unless the case names others.
"""

import pytest
import torch
import torch.distributed as dist
from ddp_models import (
    TOLERANCE,
    error_of,
    filled,
    linear,
    mean_of_serial,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import minidist as md
from minidist.comm import ledger

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
