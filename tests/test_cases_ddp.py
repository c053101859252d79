"""Public bug reports about DDP as tests (case list, B..): use of parameters, training loops.

Each test says what a wrong implementation gives. World 2 unless the case names others.
"""

import copy

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

import minidist as md
from minidist.comm import ledger
from minidist.parallel import hooks

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
