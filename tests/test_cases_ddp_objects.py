"""Public bug reports about DDP as tests (case list, B..): saving, copying, precision, agreement.

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
)
from torch import nn

import minidist as md
from minidist.comm import ledger
from minidist.parallel import hooks

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
