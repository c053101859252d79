"""Public bug reports that concern sharded parameters, with their right values (case list, B..).

Each test says what a wrong implementation gives. World 2 unless the case names others; every mode
means FULL_SHARD, SHARD_GRAD_OP and NO_SHARD.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import minidist as md
from minidist.comm import ledger

MODES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}


def linear(inputs, outputs, value=None, bias=False):
    layer = nn.Linear(inputs, outputs, bias=bias).double()
    if value is not None:
        nn.init.constant_(layer.weight, value)
    return layer


def filled(*shape, value=1.0):
    return torch.full(shape, float(value), dtype=torch.float64)


def values(wrapped):
    return {k: v.clone() for k, v in wrapped.full_state_dict().items()}


def live_bytes(wrapped):
    """Whole parameter bytes that exist now, beyond the shards."""
    return sum(
        flat.full.untyped_storage().nbytes() for flat in wrapped.flats if not flat.always_whole
    )


def settled(wrapped):
    """Nothing gathered, nothing under way, no whole gradients."""
    assert live_bytes(wrapped) == 0
    assert not wrapped.busy and not wrapped._ahead
    for flat in wrapped.flats:
        assert flat.gathering is None and flat.reducing is None and not flat.means
        assert flat.grads is None


def mean_of_serial(make, loss, world):
    """Gradients by name of the mean over ranks of `loss(model, rank)`, in one process."""
    model = make()
    for rank in range(world):
        (loss(model, rank) / world).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_grads(wrapped, right):
    grads = wrapped.full_grads()
    assert list(grads) == list(right)
    for name, grad in grads.items():
        if right[name] is None:
            assert grad is None, name
        else:
            torch.testing.assert_close(grad, right[name], **TOLERANCE, msg=name)


def both_linears(first=1.0, second=1.0):
    return nn.Sequential(linear(1, 1, first), linear(1, 1, second))


# --- B01, B04, B05, B07: which parameters take part -----------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 2)
        self.head = nn.Linear(2, 5, bias=False)
        nn.init.ones_(self.embedding.weight)
        self.head.weight = self.embedding.weight

    def forward(self, token):
        return self.head(self.embedding(token))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("units", [None, (nn.Embedding, nn.Linear)])
def test_b01_tied_weights(run_ranks, world, mode, units):
    def step():
        model = md.FSDP(Tied().double(), strategy=mode, units=units)
        assert [n for n, _ in model.named_parameters()] == ["embedding.weight"]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model(torch.tensor([[0, 4, 2][dist.get_rank()]])).sum().backward()
        grad = model.full_grads()["embedding.weight"]
        optimizer.step()
        assert model.module.head.weight is model.module.embedding.weight
        state = model.full_state_dict()
        assert list(state) == ["embedding.weight", "head.weight"]
        torch.testing.assert_close(state["embedding.weight"], state["head.weight"])
        return grad, state["head.weight"]

    uses = torch.zeros(5, dtype=torch.float64)
    for token in [0, 4, 2][:world]:
        uses[token] += 5 / world
    right = (1 + uses).unsqueeze(1).expand(5, 2)
    if world == 2:
        assert right[:, 0].tolist() == [3.5, 1, 1, 1, 3.5]
    for grad, weight in run_ranks(step, world):
        torch.testing.assert_close(grad, right, **TOLERANCE)
        torch.testing.assert_close(weight, 1 - right, **TOLERANCE)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("units", [None, nn.Linear])
def test_b04_unfrozen_later(run_ranks, mode, units):
    def gradients():
        module = both_linears()
        module[0].weight.requires_grad_(False)
        model = md.FSDP(module, strategy=mode, units=units)
        x = filled(1, 1, value=1 + dist.get_rank())
        model(x).sum().backward()
        before = model.full_grads()
        model.zero_grad()
        module[0].weight.requires_grad_(True)
        model(x).sum().backward()
        unfrozen = model.full_grads()
        model.zero_grad()
        module[1].weight.requires_grad_(False)  # the reverse: nothing may hang
        model(x).sum().backward()
        after = model.full_grads()
        return [[g and g.item() for g in grads.values()] for grads in (before, unfrozen, after)]

    for before, unfrozen, after in run_ranks(gradients, 2):
        assert before == [None, 1.5]
        assert unfrozen == [1.5, 1.5]  # 1.0 and 2.0: local gradients
        assert after == [1.5, None]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("units", [None, nn.Linear])
def test_b05_unused_by_all(run_ranks, mode, units):
    class OneOfTwo(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linear(1, 1, 0.0), linear(1, 1, 7.0)

        def forward(self, x):
            return self.a(x)

    def step():
        model = md.FSDP(OneOfTwo(), strategy=mode, units=units)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
        model(filled(1, 1, value=1 + dist.get_rank())).sum().backward()
        assert model.full_grads()["b.weight"] is None
        optimizer.step()
        state = model.full_state_dict()
        return state["a.weight"].item(), state["b.weight"].item()

    # b would be 3.5 if its gradient were zeros instead of None: the weight decay would apply.
    assert run_ranks(step, 2) == [(-1.5, 7.0)] * 2


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = linear(2, 2, 1.0), linear(2, 2, 1.0)

    def forward(self, x):
        skip = dist.get_rank() == 1
        return self.first(x) if skip else self.first(x) + self.second(x)


@pytest.mark.parametrize("mode", MODES)
def test_b07_unused_on_one_rank(run_ranks, mode):
    def gradients():
        # A trainable layer in front, so that the unit's end is announced before backward ends.
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.front, self.branches = linear(2, 2), Branches()
                with torch.no_grad():
                    self.front.weight.copy_(torch.eye(2))

            def forward(self, x):
                return self.branches(self.front(x))

        model = md.FSDP(Model(), strategy=mode, units=(nn.Linear, Branches)[1])
        for _ in range(2):
            model.zero_grad()
            model(filled(1, 2)).sum().backward()
        grads = model.full_grads()
        settled(model)
        return grads["branches.first.weight"], grads["branches.second.weight"]

    for first, second in run_ranks(gradients, 2):
        torch.testing.assert_close(first, filled(2, 2))
        torch.testing.assert_close(second, filled(2, 2, value=0.5))


def test_b07_unit_gathered_on_one_rank_only():
    def train():
        model = md.FSDP(Branches(), units=nn.Linear)
        model(filled(1, 2)).sum().backward()

    with pytest.raises(md.RankFailure, match="second.weight"):
        md.launch(train, 2, timeout=20)


# --- B10, B26, B27, B29: the shape of the graph ---------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_b10_two_forwards_two_backwards(run_ranks, mode, order):
    def make():
        torch.manual_seed(3)
        return nn.Sequential(linear(3, 3), linear(3, 3))

    def losses(model, rank):
        x = filled(2, 3, value=rank + 1)
        return [model(x).sum(), model(2 * x).pow(2).sum()]

    def run():
        model = md.FSDP(make(), strategy=mode, units=nn.Linear)
        both = losses(model, dist.get_rank())
        for index in order:
            both[index].backward()
        assert_grads(model, mean_of_serial(make, lambda m, r: sum(losses(m, r)), 2))
        settled(model)

    run_ranks(run, 2)


class Stores(nn.Module):
    """The loss is made of what the module stored, not of its output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b = linear(3, 3), linear(3, 3)

    def forward(self, x):
        self.c = self.a(x) ** 2
        return self.b(self.c)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrapped_as", ["root", "unit"])
def test_b26_loss_from_a_stored_intermediate(run_ranks, mode, wrapped_as):
    def make():
        return Stores() if wrapped_as == "root" else nn.Sequential(Stores())

    def loss(model, rank):
        model(filled(2, 3, value=rank + 1).requires_grad_())
        plain = model.module if isinstance(model, md.FSDP) else model
        return (plain if wrapped_as == "root" else plain[0]).c.sum()

    def run():
        model = md.FSDP(make(), strategy=mode, units=None if wrapped_as == "root" else Stores)
        for _ in range(2):
            model.zero_grad()
            loss(model, dist.get_rank()).backward()
        right = mean_of_serial(make, loss, 2)
        assert right[list(right)[1]] is None
        assert_grads(model, right)
        settled(model)

    run_ranks(run, 2)


def test_b26_without_any_announcement_it_is_an_error(run_ranks):
    class Hidden(nn.Module):
        """Stores what it computes from its own parameter: no module's output announces that."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 3, dtype=torch.float64))

        def forward(self, x, announce):
            self.c = x @ self.weight
            return self.c if announce else x

    def run():
        model = md.FSDP(Hidden())
        x = filled(2, 3).requires_grad_()
        model(x, announce=False)
        with pytest.raises(RuntimeError, match="expected version 0"):
            model.module.c.sum().backward()  # a crash of the process, if nothing guarded it
        # and the next step works
        model(x, announce=True).sum().backward()
        torch.testing.assert_close(model.full_grads()["weight"], filled(3, 3, value=2))
        settled(model)

    run_ranks(run, 2)


@pytest.mark.parametrize("mode", MODES)
def test_b26_gradients_that_need_no_weight(run_ranks, mode):
    class Bias(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused, self.bias = nn.Parameter(filled(2)), nn.Parameter(filled(3))

        def forward(self, x):
            self.c = x + self.bias  # nothing is saved, nothing announced: reduced at the end
            return x

    def run():
        model = md.FSDP(Bias(), strategy=mode)
        model(filled(2, 3))
        (model.module.c.sum() * (1 + dist.get_rank())).backward()
        settled(model)
        return model.full_grads()["bias"].tolist()

    assert run_ranks(run, 2) == [[3.0] * 3] * 2


@pytest.mark.parametrize("mode", MODES)
def test_b27_second_order(run_ranks, mode):
    def run():
        model = md.FSDP(linear(1, 1, 1.0), strategy=mode)
        x = filled(1, 1, value=1 + dist.get_rank()).requires_grad_()
        y = model(x)
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        assert model.full_grads()["weight"] is None  # local values, no state left behind
        (y + g * g).sum().backward()
        first = model.full_grads()["weight"].item()
        model.zero_grad()
        model(x).sum().backward()
        settled(model)
        return first, model.full_grads()["weight"].item()

    assert run_ranks(run, 2) == [(3.5, 1.5)] * 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reentrant", [True, False, None])
def test_b29_activation_checkpointing(run_ranks, mode, reentrant):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.shared, self.private = linear(3, 3), linear(3, 3)

        def forward(self, x):
            def call(layer, x):
                if reentrant is None:
                    return torch.tanh(layer(x))
                return checkpoint(lambda x: torch.tanh(layer(x)), x, use_reentrant=reentrant)

            return call(self.shared, self.private(call(self.shared, x)))

    def loss(model, rank):
        return model(filled(2, 3, value=rank + 1).requires_grad_()).sum()

    def run():
        model = md.FSDP(Model(), strategy=mode, units=nn.Linear)
        reductions = []

        def count(record):
            if "gradients" in record.by or "replicas" in record.by:
                reductions.append(record.by)

        for _ in range(2):
            model.zero_grad()
            reductions.clear()
            ledger.subscribe(count)
            loss(model, dist.get_rank()).backward()
            ledger.unsubscribe(count)
            assert len(reductions) == 2, reductions  # once per unit, though one was used twice
            assert_grads(model, mean_of_serial(Model, loss, 2))
            settled(model)

    run_ranks(run, 2)


# --- B11, B43, B47: adding gradients up -----------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("forward_inside", [True, False])
@pytest.mark.parametrize("backward_inside", [True, False])
def test_b11_no_sync(run_ranks, mode, forward_inside, backward_inside):
    def run():
        model = md.FSDP(linear(1, 1, 1.0), strategy=mode)
        sent = []
        ledger.subscribe(sent.append)

        def either(inside, function):
            if inside:
                with model.no_sync():
                    return function()
            return function()

        rank = dist.get_rank()
        loss = either(forward_inside, lambda: model(filled(1, 1, value=1 + rank)).sum())
        sent.clear()
        either(backward_inside, loss.backward)
        reduced = [r.by for r in sent if "parameters" not in r.by or "used" in r.by]
        model(filled(1, 1, value=10 + rank)).sum().backward()
        ledger.unsubscribe(sent.append)
        settled(model)
        return model.full_grads()["weight"].item(), len(reduced)

    for total, reduced in run_ranks(run, 2):
        assert total == 12.0
        assert (reduced == 0) == backward_inside  # the backward decides


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("units", [None, nn.Linear])
def test_b43_ways_to_clear_gradients(run_ranks, mode, units):
    def make():
        torch.manual_seed(2)
        return nn.Sequential(linear(3, 3, bias=True), linear(3, 2, bias=True))

    def run():
        model, serial = md.FSDP(make(), strategy=mode, units=units), make()
        optimizers = [
            torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, serial)
        ]
        clear = [
            lambda m, o: o.zero_grad(set_to_none=True),
            lambda m, o: o.zero_grad(set_to_none=False),
            lambda m, o: [setattr(p, "grad", None) for p in m.parameters()],
            lambda m, o: m.zero_grad(),
            lambda m, o: m.zero_grad(set_to_none=False),
            lambda m, o: [setattr(p, "grad", p.grad.clone()) for p in m.parameters()],
            lambda m, o: None,
        ]
        for step, how in enumerate(clear):
            x = torch.arange(12.0, dtype=torch.float64).view(4, 3) / (step + 1)
            model(x.chunk(2)[dist.get_rank()]).pow(2).mean().backward()
            serial(x).pow(2).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            for m, o in zip((model, serial), optimizers, strict=True):
                how(m, o)
            for name, value in model.full_state_dict().items():
                torch.testing.assert_close(value, serial.state_dict()[name], **TOLERANCE)

    run_ranks(run, 2)


@pytest.mark.parametrize("mode", MODES)
def test_b47_reduction_in_32_bits(run_ranks, mode):
    precision = md.MixedPrecision(torch.bfloat16, torch.float32)

    def mean():
        module = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        model = md.FSDP(module, strategy=mode, mixed_precision=precision)
        x = torch.tensor([[[256.0, 1.0, 1.0, 1.0][dist.get_rank()]]], dtype=torch.bfloat16)
        model(x).sum().backward()
        return model.full_grads()["weight"].item()

    assert run_ranks(mean, 4) == [64.75] * 4  # 64 or 65: summed in 16 bits

    def micro_steps(inside):
        module = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        model = md.FSDP(module, strategy=mode, mixed_precision=precision)
        x = torch.ones(1, 1, dtype=torch.bfloat16)
        for _ in range(299):
            if inside:
                with model.no_sync():
                    model(x).sum().backward()
            else:
                model(x).sum().backward()
        model(x).sum().backward()
        return model.full_grads()["weight"].item()

    for inside in (False, True):
        assert run_ranks(micro_steps, 1, inside) == [300.0]  # 256: added up in 16 bits

    class Often(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)

        def forward(self, x):
            return sum(checkpoint(self.layer, x, use_reentrant=True) for _ in range(300))

    def in_one_backward():  # a reentrant checkpoint hands over its part of the gradient by itself
        model = md.FSDP(Often(), strategy=mode, mixed_precision=precision)
        model(torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
        return model.full_grads()["layer.weight"].item()

    assert run_ranks(in_one_backward, 2) == [300.0] * 2


# --- B17, B19, B21, B23: shapes, layouts, dtypes --------------------------------------------------


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.layer = linear(2, 2)
        self.temperature = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.nothing = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))

    def forward(self, x):
        return self.layer(x) * self.temperature + self.nothing.sum()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["Adam", "NAdam"])  # NAdam keeps two numbers per parameter
def test_b17_zero_dimensional(run_ranks, world, mode, name):
    # NAdam's product of momenta is float32, and torch converts it to float64 when it is loaded.
    close = {"rtol": 1e-6, "atol": 1e-8, "check_dtype": False} if name == "NAdam" else TOLERANCE

    def loss(model, rank):
        return model(filled(1, 2, value=rank + 1)).pow(2).sum()

    def run():
        model, serial = md.FSDP(Scaled(), strategy=mode), Scaled()
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
        plain = getattr(torch.optim, name)(serial.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss(model, dist.get_rank()).backward()
            plain.zero_grad()
            (sum(loss(serial, r) for r in range(world)) / world).backward()
            assert model.full_grads()["temperature"].shape == ()
            optimizer.step()
            plain.step()
            state, moments = model.full_state_dict(), model.full_optim_state_dict(optimizer)
            assert state["temperature"].shape == () and state["nothing"].shape == (0, 3)
            for index, right in plain.state_dict()["state"].items():
                for key, value in right.items():
                    got = moments["state"][index][key]
                    assert got.shape == value.shape, (index, key)
                    torch.testing.assert_close(got, value, **close)
            # A round trip through the plain module and optimizer, back into fresh shards.
            module = Scaled()
            module.load_state_dict(state)
            model = md.FSDP(module, strategy=mode)
            optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
            model.load_full_optim_state_dict(optimizer, moments)
            for key, value in model.full_state_dict().items():
                torch.testing.assert_close(value, serial.state_dict()[key], **close)

    run_ranks(run, world)


@pytest.mark.parametrize("mode", MODES)
def test_b19_strided_parameters(run_ranks, mode):
    class Strided(nn.Module):
        def __init__(self, factor):
            super().__init__()
            table = factor * torch.arange(15.0, dtype=torch.float64).view(3, 5)
            self.turned = nn.Parameter(table.t())
            self.column = nn.Parameter((table + 1)[:, 0])
            image = torch.arange(24.0, dtype=torch.float64).view(1, 2, 3, 4) * factor
            self.image = nn.Parameter(image.to(memory_format=torch.channels_last))

        def forward(self, x):
            return (self.turned @ self.column * x[:5]).sum() + (self.image * x[:4]).sum()

    def run():
        rank = dist.get_rank()
        model = md.FSDP(Strided(rank + 1), strategy=mode)
        right = Strided(1)
        for name, value in model.full_state_dict().items():
            assert torch.equal(value, right.state_dict()[name]), name  # rank 0's values
        x = torch.arange(5.0, dtype=torch.float64)
        model(x * (rank + 1)).backward()
        assert_grads(model, mean_of_serial(lambda: Strided(1), lambda m, r: m(x * (r + 1)), 2))

    run_ranks(run, 2)


@pytest.mark.parametrize("mode", MODES)
def test_b21_complex(run_ranks, mode):
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.tensor([1 + 1j, 2 - 1j], dtype=torch.complex128))
            self.register_buffer("phase", torch.tensor([1j], dtype=torch.complex128))

        def forward(self, x):
            return (self.p * x).abs().pow(2).sum()

    def run():
        model = md.FSDP(Complex(), strategy=mode)
        x = (dist.get_rank() + 1) * torch.tensor([1 + 2j, 3], dtype=torch.complex128)
        loss = model(x)
        loss.backward()
        grad = model.full_grads()["p"]
        norm = model.clip_grad_norm_(1.0)
        clipped = model.full_grads()["p"]
        # conj() is a lazy view: its gradient arrives as a conjugated view
        model.zero_grad()
        with torch.no_grad():
            assert model.full_state_dict()["phase"].item() == 1j
        return grad, norm, clipped

    right = torch.tensor([25 + 25j, 90 - 45j], dtype=torch.complex128)
    for grad, norm, clipped in run_ranks(run, 2):
        torch.testing.assert_close(grad, right, **TOLERANCE)
        torch.testing.assert_close(norm, torch.linalg.vector_norm(right), **TOLERANCE)
        torch.testing.assert_close(clipped, right / norm, rtol=1e-6, atol=0)

    def conjugated():
        class Conjugates(Complex):
            def forward(self, x):
                return (self.p.conj() * x).real.sum()

        model = md.FSDP(Conjugates(), strategy=mode)
        model(torch.tensor([1 + 2j, 3j], dtype=torch.complex128)).backward()
        return model.full_grads()["p"]

    right = torch.tensor([1 + 2j, 3j], dtype=torch.complex128)
    for grad in run_ranks(conjugated, 2):
        torch.testing.assert_close(grad.resolve_conj(), right, **TOLERANCE)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world, rows, width", [(4, 5, 10), (4, 8, 3), (3, 7, 10), (2, 1, 3)])
def test_b23_padding_reaches_nothing(run_ranks, monkeypatch, mode, world, rows, width):
    def make():
        torch.manual_seed(6)
        return nn.Linear(width, rows).double()

    def run():
        import os

        os.environ["MINIDIST_DEBUG"] = "1"  # padding is NaN
        try:
            model, serial = md.FSDP(make(), strategy=mode), make()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            plain = torch.optim.Adam(serial.parameters(), lr=0.1)
            x = torch.arange(float(world * width), dtype=torch.float64).view(world, width)
            for _ in range(2):
                optimizer.zero_grad()
                plain.zero_grad()
                model(x[dist.get_rank()]).pow(2).sum().backward()
                (serial(x).pow(2).sum() / world).backward()
                norm = model.clip_grad_norm_(1.0)
                right = torch.nn.utils.clip_grad_norm_(serial.parameters(), 1.0)
                torch.testing.assert_close(norm, right, **TOLERANCE)
                optimizer.step()
                plain.step()
            saved, moments = model.full_state_dict(), model.full_optim_state_dict(optimizer)
            for name, value in serial.state_dict().items():
                assert saved[name].shape == value.shape
                torch.testing.assert_close(saved[name], value, rtol=1e-9, atol=1e-12)
            for index, state in plain.state_dict()["state"].items():
                for key, value in state.items():
                    got = moments["state"][index][key]
                    torch.testing.assert_close(got, value, rtol=1e-9, atol=1e-12)
            again = md.FSDP(make(), strategy=mode)
            again.load_full_state_dict(saved)
            for name, value in again.full_state_dict().items():
                assert torch.equal(value, saved[name])
        finally:
            del os.environ["MINIDIST_DEBUG"]

    run_ranks(run, world)


# --- B32, B34, B35, B37, B39, B41, B46: optimizer and checkpoints ---------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("p", [2.0, 1.0, float("inf")])
def test_b32_every_element_counts_once(run_ranks, mode, p):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cut = nn.Parameter(torch.zeros(20, dtype=torch.float64))
            self.whole = nn.Linear(1, 1, bias=False).double()

        def forward(self, x):
            return self.cut[0] * 3 + self.cut[19] * 4 + self.whole(x).sum() * 12

    def run():
        # Alone in its shard: elements 0-15 on rank 0 and 16-19 on rank 1. `whole` is on both.
        model = md.FSDP(Model(), strategy=mode, ignored=nn.Linear)
        model(filled(1, 1)).backward()
        norm = model.clip_grad_norm_(1e9, p)
        grads = model.full_grads()
        assert grads["whole.weight"].item() == 12
        return norm.item()

    right = {2.0: 13.0, 1.0: 19.0, float("inf"): 12.0}[p]  # 17.69 for p=2: `whole` counted twice
    assert run_ranks(run, 2) == pytest.approx([right] * 2, rel=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_b34_groups_and_saved_momentum(run_ranks, mode):
    class Four(nn.Module):
        def __init__(self):
            super().__init__()
            for i in range(4):
                setattr(self, f"p{i}", nn.Parameter(filled(3, i + 1)))

        def forward(self):
            return sum((i + 1) * getattr(self, f"p{i}").sum() for i in range(4))

    def grouped(model):
        p = dict(model.named_parameters())
        groups = [{"params": [p["p0"], p["p2"]]}, {"params": [p["p1"], p["p3"]], "lr": 0.2}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def run():
        model, serial = md.FSDP(Four(), strategy=mode), Four()
        optimizers = grouped(model), grouped(serial)
        for _ in range(2):
            for m, optimizer in zip((model, serial), optimizers, strict=True):
                m().backward()
                optimizer.step()
                optimizer.zero_grad()
        saved = model.full_optim_state_dict(optimizers[0])
        right = optimizers[1].state_dict()
        assert saved["param_groups"] == right["param_groups"]
        plain = grouped(Four())
        plain.load_state_dict(saved)  # strictly into the plain optimizer
        for index, state in right["state"].items():
            got = plain.state_dict()["state"][index]["momentum_buffer"]
            torch.testing.assert_close(got, state["momentum_buffer"], **TOLERANCE)
        for name, value in model.full_state_dict().items():
            torch.testing.assert_close(value, serial.state_dict()[name], **TOLERANCE)

    run_ranks(run, 2)


@pytest.mark.parametrize("mode", MODES)
def test_b34_group_added_later(run_ranks, mode):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(filled(1)), nn.Parameter(filled(1))

        def forward(self):
            return self.a.sum() + self.b.sum()

    def run():
        model = md.FSDP(Two(), strategy=mode)
        a, b = model.parameters()
        optimizer = torch.optim.SGD([a], lr=0.1)
        model().backward()
        optimizer.step()
        optimizer.add_param_group({"params": [b], "lr": 0.5})
        model.zero_grad()
        model().backward()
        optimizer.step()
        return [v.item() for v in model.full_state_dict().values()]

    for a, b in run_ranks(run, 2):
        assert (a, b) == pytest.approx((0.8, 0.5))


class LayerNormed(torch.optim.Optimizer):
    """lr * |w| / |g| * g with the norms of the whole tensor: a rule of the LAMB kind."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.norm() / p.grad.norm() * p.grad)


@pytest.mark.parametrize("mode", MODES)
def test_b35_rules_that_need_the_whole_tensor(run_ranks, mode):
    class Weight(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))

        def forward(self):
            return self.w[0]

    def run():
        model = md.FSDP(Weight(), strategy=mode)
        optimizer = LayerNormed(model.parameters())
        model().backward()
        if mode == "NO_SHARD":  # every rank has the whole tensor
            optimizer.step()
            return model.full_state_dict()["w"].tolist()
        with pytest.raises(ValueError, match="LayerNormed updates an element by looking"):
            optimizer.step()
        assert model.full_state_dict()["w"].tolist() == [3.0, 4.0]
        lbfgs = torch.optim.LBFGS(model.parameters())
        with pytest.raises(ValueError, match="LBFGS cannot run on a flat shard"):
            lbfgs.step(lambda: model())
        return None

    right = [2.5, 4.0] if mode == "NO_SHARD" else None  # 2.7: the norm of a slice
    assert run_ranks(run, 2) == [right] * 2


@pytest.mark.parametrize("mode", MODES)
def test_b37_optimizer_state_start(run_ranks, mode):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(7)
            self.used, self.never = linear(3, 3), linear(3, 3)

        def forward(self, x):
            return self.used(x)

    x = torch.arange(6.0, dtype=torch.float64).view(2, 3)

    def train(model, optimizer, rows):
        optimizer.zero_grad()
        model(rows).pow(2).mean().backward()
        optimizer.step()

    def first_part():
        model = md.FSDP(Half(), strategy=mode)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        empty = model.full_optim_state_dict(optimizer)
        assert empty["state"] == {}
        model.load_full_optim_state_dict(optimizer, empty)
        train(model, optimizer, x[dist.get_rank() :][:1])
        saved = model.full_optim_state_dict(optimizer)
        assert list(saved["state"]) == [0]  # the unused one stays without state
        return model.full_state_dict(), saved

    def second_part(state, saved):
        world, rank = dist.get_world_size(), dist.get_rank()
        model = md.FSDP(Half(), strategy=mode)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model.load_full_state_dict(state)
        model.load_full_optim_state_dict(optimizer, saved)
        train(model, optimizer, x if world == 1 else x[rank::world])
        return model.full_state_dict()

    serial = Half()
    optimizer = torch.optim.Adam(serial.parameters(), lr=0.1)
    state, saved = run_ranks(first_part, 2)[0]
    train(serial, optimizer, x)
    torch.testing.assert_close(state, serial.state_dict(), **TOLERANCE)
    train(serial, optimizer, x)
    for world in (1, 2):
        for result in run_ranks(second_part, world, state, saved):
            torch.testing.assert_close(result, serial.state_dict(), **TOLERANCE)


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        for i, shape in enumerate([(7,), (10,), (1,), (3, 5)]):
            setattr(self, f"p{i}", nn.Parameter(torch.randn(shape, dtype=torch.float64)))

    def forward(self, x):
        return sum(((p - x) ** 2).sum() for p in self.parameters())


@pytest.mark.parametrize("mode", MODES)
def test_b39_checkpoint_across_world_sizes(run_ranks, mode):
    targets = torch.arange(12.0, dtype=torch.float64)

    def train(model, optimizer, steps, rank=0, world=1):
        for _ in range(steps):
            optimizer.zero_grad()
            mine = targets[rank * 12 // world : (rank + 1) * 12 // world]
            loss_of = model if isinstance(model, Odd) else model.module
            del loss_of
            sum(model(x) for x in mine).div(12 / world).backward()
            optimizer.step()

    def run(steps, state=None, moments=None):
        import os

        os.environ["MINIDIST_DEBUG"] = "1"
        try:
            model = md.FSDP(Odd(), strategy=mode)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            if state is not None:
                model.load_full_state_dict(state)
                model.load_full_optim_state_dict(optimizer, moments)
            train(model, optimizer, steps, dist.get_rank(), dist.get_world_size())
            return model.full_state_dict(), model.full_optim_state_dict(optimizer)
        finally:
            del os.environ["MINIDIST_DEBUG"]

    serial = Odd()
    plain = torch.optim.Adam(serial.parameters(), lr=0.1)
    train(serial, plain, 4)
    state, moments = run_ranks(run, 2, 2)[0]
    for world in (1, 2, 3, 4):
        for result, after in run_ranks(run, world, 2, state, moments):
            torch.testing.assert_close(result, serial.state_dict(), **TOLERANCE)
            for index, right in plain.state_dict()["state"].items():
                torch.testing.assert_close(after["state"][index], right, **TOLERANCE)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_b41_checkpoint_names(run_ranks, world, mode):
    class Names(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Sequential(linear(2, 2, bias=True), nn.BatchNorm1d(2).double())
            self.modules_module = linear(2, 1)
            self.register_buffer("module_", filled(3))

    def run():
        right = Names().state_dict()
        model = md.FSDP(Names(), strategy=mode, units=nn.Linear)
        state = model.full_state_dict()
        assert list(state) == list(right)
        assert list(model.state_dict()) == list(right)
        Names().load_state_dict(state, strict=True)
        model.load_full_state_dict(right)
        model.load_state_dict(right)  # whole tensors are recognised
        model.load_state_dict(model.state_dict())
        for name, value in model.full_state_dict().items():
            assert torch.equal(value, right[name]), name
        names = [n for n, _ in model.named_parameters()]
        assert names == [n for n, _ in Names().named_parameters()]
        with pytest.raises(ValueError, match="is an FSDP module already"):
            md.FSDP(model)
        with pytest.raises(ValueError, match="is sharded already"):
            md.FSDP(model.module)
        outer = nn.ModuleDict({"inner": model})
        assert list(outer.state_dict()) == [f"inner.{name}" for name in right]

    run_ranks(run, world)


def test_b46_scaler_with_an_empty_rank(run_ranks):
    from minidist.parallel.fsdp_scaler import ShardedGradScaler

    def run():
        torch.manual_seed(0)
        model = md.FSDP(nn.Linear(3, 1, bias=False), units=None)  # 3 elements: rank 1 has none
        assert [p.numel() for p in model.parameters()] == [3 if dist.get_rank() == 0 else 0]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = ShardedGradScaler("cpu", init_scale=8.0, growth_interval=1000)
        history = []
        for value in (1.0, float("inf"), 1.0):
            x = torch.full((1, 3), value if dist.get_rank() == 0 else 1.0)
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            history.append((scaler.get_scale(), model.full_state_dict()["weight"]))
        return history, scaler.state_dict()

    (first, saved), (second, other) = run_ranks(run, 2)
    assert saved == other
    assert [scale for scale, _ in first] == [scale for scale, _ in second] == [8.0, 4.0, 4.0]
    torch.testing.assert_close(first[0][1], first[1][1], rtol=0, atol=0)  # the step was skipped
    assert not torch.equal(first[1][1], first[2][1])


# --- B87, B89, B91, B93: agreement, memory, order, ways of calling --------------------------------


@pytest.mark.parametrize(
    "difference", ["more", "transposed", "dtype", "order", "frozen", "strategy", "units"]
)
def test_b87_ranks_differ(run_ranks, difference):
    def run():
        other = dist.get_rank() == 1
        layers = {"first": nn.Linear(2, 3), "second": nn.Linear(3, 2)}
        options = {"units": nn.Linear}
        if other and difference == "more":
            layers["third"] = nn.Linear(1, 1)
        elif other and difference == "transposed":
            layers["first"] = nn.Linear(3, 2)
        elif other and difference == "dtype":
            layers["second"].double()
        elif other and difference == "order":
            layers = dict(reversed(layers.items()))
        elif other and difference == "frozen":
            layers["second"].requires_grad_(False)
        elif other and difference == "strategy":
            options["strategy"] = "SHARD_GRAD_OP"
        elif other and difference == "units":
            options["units"] = None
        module = nn.ModuleDict(layers)
        before = copy.deepcopy(module.state_dict())
        with pytest.raises(RuntimeError, match="FSDP: the ranks do not agree") as error:
            md.FSDP(module, **options)
        for name, value in module.state_dict().items():
            assert torch.equal(value, before[name])
        return str(error.value)

    messages = run_ranks(run, 2)
    assert messages[0] == messages[1]
    named = {"more": "third", "transposed": "first.weight", "dtype": "second.weight",
             "order": "second", "frozen": "second.weight", "strategy": "strategy",
             "units": "units"}  # fmt: skip
    assert named[difference] in messages[0]


def peak_of_live_bytes(model, train):
    """The most whole parameter bytes that exist at any gather."""
    from minidist.parallel import fsdp_flat

    peak, regrow = [0], fsdp_flat._regrow

    def counting(buffer):
        regrow(buffer)
        peak[0] = max(peak[0], live_bytes(model))

    fsdp_flat._regrow = counting
    try:
        train()
    finally:
        fsdp_flat._regrow = regrow
    return peak[0]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_b89_frozen_units_are_freed(run_ranks, prefetch):
    class WithUnusedInput(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(linear(16, 16) for _ in range(6))
            self.extra = linear(16, 16)

        def forward(self, x):
            unused = self.extra(x)
            for layer in self.layers:
                x = layer(x)
            return x + 0 * unused.detach()

    def run(frozen):
        module = WithUnusedInput()
        for layer in module.layers[1:5] if frozen else ():
            layer.requires_grad_(False)
        model = md.FSDP(module, units=nn.Linear, prefetch=prefetch)

        def step():
            model(filled(2, 16)).sum().backward()
            settled(model)

        step()  # the first step learns the order
        model.zero_grad()
        peak = peak_of_live_bytes(model, step)
        grads = model.full_grads()
        assert all(
            (grads[f"layers.{i}.weight"] is None) == (frozen and 0 < i < 5) for i in range(6)
        )
        return peak // (16 * 16 * 8)  # in units

    for frozen in (False, True):
        assert run_ranks(run, 2, frozen) == [1 + prefetch] * 2


class Ordered(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(9)
        self.units = nn.ModuleDict({name: linear(4, 4) for name in "ABCD"})

    def forward(self, x, order):
        for name in order:
            x = torch.tanh(self.units[name](x))
        return x


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("mode", MODES[:2])
def test_b91_order_changes(run_ranks, prefetch, mode):
    def run():
        model, serial = (
            md.FSDP(Ordered(), strategy=mode, units=nn.Linear, prefetch=prefetch),
            Ordered(),
        )
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, serial)]
        for order in ("ABCD", "ACD", "ADCB", "ABAB", "ABCD", "D", "DCBA"):
            x = torch.arange(8.0, dtype=torch.float64).view(2, 4) / 8
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(x[dist.get_rank()], order).pow(2).sum().backward()
            settled(model)
            (serial(x, order).pow(2).sum() / 2).backward()
            assert_grads(model, {n: p.grad for n, p in serial.named_parameters()})
            with torch.no_grad():  # an evaluation in between has an order of its own
                torch.testing.assert_close(model(x, "DA"), serial(x, "DA"), **TOLERANCE)
            settled(model)
            for optimizer in optimizers:
                optimizer.step()

    run_ranks(run, 2)


class Deep(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.scale = nn.Parameter(filled(1, value=depth + 1))
        self.inner = Deep(depth - 1) if depth else linear(1, 1, 2.0)
        self.silent = nn.Identity()
        self.leaf = linear(1, 1, 3.0)

    def forward(self, *, x=None):
        x = filled(1, 1) if x is None else x
        inner = self.inner(x) if isinstance(self.inner, nn.Linear) else self.inner(x=x)
        return self.silent(self.leaf(inner)) * self.scale


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("units", [nn.Linear, (nn.Linear, Deep, nn.Identity)])
@pytest.mark.parametrize("call", ["wrapper", "forward", "module", "module.forward", "no arguments"])
def test_b93_root_parameters_for_every_way_of_calling(run_ranks, mode, units, call):
    def loss(model, rank):
        if call == "no arguments":
            return model().sum()
        inner = getattr(model, "module", model)
        function = {"wrapper": model, "forward": model.forward, "module": inner,
                    "module.forward": inner.forward}[call]  # fmt: skip
        return function(x=filled(2, 1, value=rank + 1)).sum()

    def run():
        model = md.FSDP(Deep(3), strategy=mode, units=units)
        for _ in range(2):
            model.zero_grad()
            loss(model, dist.get_rank()).backward()
            assert_grads(model, mean_of_serial(lambda: Deep(3), loss, 2))
            settled(model)

    run_ranks(run, 2)


# --- B96, B97, B99: set-up, copies, compiling -----------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_b96_forward_before_the_optimizer(run_ranks, mode):
    class Vector(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(filled(40))

        def forward(self):
            return self.p.sum()

    def run(before):
        module = Vector()
        early = torch.optim.SGD(module.parameters(), lr=0.1)
        model = md.FSDP(module, strategy=mode)
        pieces = list(model.parameters())
        if before == "no_grad":
            with torch.no_grad():
                model()
        elif before == "grad":
            model()
        elif before == "backward":
            model().backward()
            model.zero_grad()
        elif before == "inside":
            with model.full_params():
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if before != "inside":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if before == "early":  # built over the module's parameters before wrapping
            optimizer = early
        assert all(a is b for a, b in zip(pieces, model.parameters(), strict=True))
        for _ in range(2):
            optimizer.zero_grad()
            loss = model()
            with torch.no_grad():
                model.eval()()
            model.train()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model()
        return model.full_state_dict()["p"]

    for before in ("nothing", "no_grad", "grad", "backward", "inside", "early"):
        for value in run_ranks(run, 2, before):
            torch.testing.assert_close(value, filled(40, value=0.8))  # 1.0: never updated


@pytest.mark.parametrize("mode", MODES)
def test_b97_deepcopy(run_ranks, mode):
    def make():
        torch.manual_seed(2)
        return nn.Sequential(linear(3, 3, bias=True), nn.BatchNorm1d(3).double(), linear(3, 2))

    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def train(model, optimizer):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()

    def run():
        model, serial = md.FSDP(make(), strategy=mode, units=nn.Linear), make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plain = torch.optim.SGD(serial.parameters(), lr=0.1)
        train(model, optimizer)
        train(serial, plain)
        twin, old = copy.deepcopy(model), values(model)
        train(model, optimizer)
        train(serial, plain)
        torch.testing.assert_close(values(twin), old, rtol=0, atol=0)  # unchanged
        torch.testing.assert_close(values(model), dict(serial.state_dict()), **TOLERANCE)
        # The copy trains on its own, with gradients and hooks of its own.
        now = values(model)
        train(twin, torch.optim.SGD(twin.parameters(), lr=0.1))
        torch.testing.assert_close(values(twin), now, **TOLERANCE)
        torch.testing.assert_close(values(model), now, rtol=0, atol=0)
        settled(model)
        settled(twin)
        # EMA over shards is the EMA of the full model.
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        average.update_parameters(model)
        before = values(model)
        train(model, optimizer)
        average.update_parameters(model)
        ema = values(average.module)
        for name, _ in model.named_parameters():
            torch.testing.assert_close(ema[name], (before[name] + values(model)[name]) / 2)

    run_ranks(run, 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", ["step function", "wrapped", "module", "blocks", "forward"])
def test_b99_compile(run_ranks, mode, what):
    def run():
        torch._dynamo.reset()

        def compiled(function):
            return torch.compile(function, backend="aot_eager")

        module = nn.Sequential(linear(1, 1, 1.0), linear(1, 1, 1.0))
        if what == "module":
            module = compiled(module)
        if what == "blocks":
            module = nn.Sequential(*map(compiled, module))
        if what == "forward":
            for layer in module:
                layer.forward = compiled(layer.forward)
        units = nn.Linear if what in ("step function", "wrapped", "forward") else None
        model = md.FSDP(module, strategy=mode, units=units)
        call = compiled(model) if what == "wrapped" else model

        def step(x):
            loss = call(x).sum()
            loss.backward()
            return loss

        if what == "step function":
            step = compiled(step)
        for _ in range(2):
            model.zero_grad()
            step(filled(1, 1, value=1 + dist.get_rank()))
        settled(model)
        return [g.item() for g in model.full_grads().values()]

    assert run_ranks(run, 2, timeout=60) == [[1.5, 1.5]] * 2
