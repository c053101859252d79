"""The pipeline executor against one process in float64, on 1 to 4 ranks; bug reports B69 to B83.

Tolerance 1e-10 relative: float64 noise here is about 1e-15, and the smallest bug these tests look
for (one micro-batch with the wrong weight) changes losses and gradients by more than 1e-2.
"""

import contextlib
import copy
import functools
import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import minidist as md
from minidist.comm import collectives as coll
from minidist.comm.launch import RankFailure
from minidist.parallel import weightgrad
from minidist.parallel.pipeline import Pipeline, layer_costs, split
from minidist.parallel.split import _balance
from minidist.train.model import GPTConfig, build_gpt, loss_fn

ALL = [
    ("naive", 1),
    ("gpipe", 1),
    ("gpipe", 2),
    ("1f1b", 1),
    ("interleaved", 2),
    ("zb-h1", 1),
    ("zb-v", 2),
]
SIMPLE = ["naive", "gpipe", "1f1b", "zb-h1"]


def close(a, b, what=""):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=lambda text: f"{what}: {text}")


def linears(n, width=4, seed=0):
    """`n` small nonlinear layers in float64, the same on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(n)]
    ).double()


def check_against(reference, pipe, loss, loss_of_pipe):
    """Loss and all gradients of this rank equal the single process's."""
    assert (loss_of_pipe is None) == (not pipe.is_last)
    if pipe.is_last:
        assert not loss_of_pipe.requires_grad
        close(loss_of_pipe, loss.detach(), "loss")
    named = dict(reference.named_parameters(remove_duplicate=False))
    for name, parameter in pipe.named_parameters():
        close(parameter.grad, named[name].grad, name)


# --- parity ------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(("name", "chunks"), ALL)
def test_gpt_equals_one_process(run_ranks, name, chunks, world):
    """Every schedule, ragged batch (13 rows), tied or not, two accumulated steps, evaluation."""

    def job(tied):
        config = GPTConfig(vocab=17, seq=6, width=8, layers=8, heads=2, tied=tied)
        model, reference = (build_gpt(config, dtype=torch.float64) for _ in range(2))
        x, y = torch.randint(0, 17, (2, 13, 6)).unbind()
        y[:4, :3] = -100  # unequal numbers of tokens that count
        pipe = Pipeline(
            split(model, world, chunks), schedule=name, microbatches=2 * world, loss_fn=loss_fn
        )
        for _ in range(2):
            loss = loss_fn(reference(x), y)
            loss.backward()
            check_against(reference, pipe, loss, pipe.step(x, y))
        assert pipe.peak_in_flight == pipe.schedule.in_flight[pipe.rank]
        output = pipe.eval()(x)
        if pipe.is_last:
            close(output, reference(x).detach(), "output")
        assert pipe.is_last or output is None

    for tied in (False, True):
        run_ranks(job, world, tied)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", SIMPLE)
def test_b69_fewer_microbatches_than_stages(run_ranks, name, world):
    def job():
        for microbatches in (1, 2, 3):
            model = linears(4)
            reference = copy.deepcopy(model)
            x, y = torch.randn(2, 6, 4, dtype=torch.float64).unbind()
            loss = F.mse_loss(reference(x), y)
            loss.backward()
            pipe = Pipeline(
                split(model, world), schedule=name, microbatches=microbatches, loss_fn=F.mse_loss
            )
            check_against(reference, pipe, loss, pipe.step(x, y))

    run_ranks(job, world)


@pytest.mark.parametrize("world", [2, 4])
def test_b69_what_interleaved_cannot_do_is_refused_everywhere(run_ranks, world):
    def job():
        before = coll.all_gather_object(0)  # a message that must not be mixed up with later ones
        parts = split(linears(8), world, 2)
        with pytest.raises(ValueError, match=f"{world - 1} is not a multiple of {world}"):
            Pipeline(parts, schedule="interleaved", microbatches=world - 1, loss_fn=F.mse_loss)
        return before

    run_ranks(job, world)


# --- loss scale ----------------------------------------------------------------------------------


class Row(nn.Module):
    """output = input + bias * 1: the loss of a row is the row's number, gradient known by hand."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        return x + self.bias


@pytest.mark.parametrize("name", SIMPLE)
def test_b71_uneven_microbatches(run_ranks, name):
    """8 rows in 3 micro-batches (3, 3, 2), loss of a row is its number: 3.5, not 3.8333."""

    def job(count=None):
        pipe = Pipeline(
            Row(),
            schedule=name,
            microbatches=3,
            loss_fn=lambda out, target: out.mean(),
            count=count,
        )
        rows = torch.arange(8, dtype=torch.float64)
        loss = pipe.step(rows, rows)
        assert pipe.chunks[0].bias.grad.item() == pytest.approx(1.0, rel=1e-12)
        return None if loss is None else loss.item()

    assert run_ranks(job, 2) == [None, pytest.approx(3.5, rel=1e-12)]
    # The bug, planted: every micro-batch weighs the same.
    assert run_ranks(job, 2, count=lambda target: 1)[1] == pytest.approx(23 / 6, rel=1e-12)


def test_b71_more_microbatches_than_rows_and_other_bad_batches(run_ranks):
    def job():
        pipe = Pipeline(Row(), microbatches=3, loss_fn=lambda out, target: out.mean())
        rows = torch.arange(8.0, dtype=torch.float64)
        for inputs, targets, message in (
            (rows[:2], rows[:2], "2 rows cannot be cut into 3 micro-batches"),
            (rows, rows[:2], "targets: 2 rows"),
            (rows, rows[:5], "inputs have 8 rows, but targets have 5"),
            (None, rows, "inputs: a tensor is needed here, not NoneType"),
            (rows, None, "targets: a tensor is needed here, not NoneType"),
            ([rows], rows, "3 of them, not 1"),
            ((rows, rows[:3]), rows, r"its tensors have \[3, 8\] rows"),
        ):
            # Only the ranks that use a value see that it is bad; all must hear of it.
            is_first, is_last = coll.rank() == 0, coll.rank() == 2
            with pytest.raises(ValueError, match=message):
                pipe.step(inputs if is_first else None, targets if is_last else None)
            assert pipe.chunks[0].bias.grad is None
        assert (pipe.step(rows, rows) is not None) == pipe.is_last  # still usable
        assert pipe.chunks[0].bias.grad.item() == pytest.approx(1.0)

    run_ranks(job, 3)


@pytest.mark.parametrize("name", SIMPLE)
def test_b73_two_accumulated_steps_give_the_sum_of_two_means(run_ranks, name):
    """Gradient 1 per micro-batch: 2.0 after two steps. 1.25 is what dividing `.grad` by M gives."""

    def job():
        pipe = Pipeline(
            Row(), schedule=name, microbatches=4, loss_fn=lambda out, target: out.mean()
        )
        rows = torch.arange(8, dtype=torch.float64)
        bias = pipe.chunks[0].bias
        grads = []
        for scale in (1.0, 1.0, 0.5):
            pipe.step(rows, rows, scale=scale)
            grads.append(bias.grad.item())
        loss = pipe.step(rows, rows, scale=0.5)
        assert loss is None or loss.item() == 3.5  # scale is for gradients only
        return grads

    for grads in run_ranks(job, 2):
        assert grads == [pytest.approx(1), pytest.approx(2), pytest.approx(2.5)]


LOSSES = {
    "mean": nn.CrossEntropyLoss(),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "class weights": nn.CrossEntropyLoss(weight=torch.arange(1, 6, dtype=torch.float64)),
    "ignore_index": nn.CrossEntropyLoss(ignore_index=2),
    "partial": functools.partial(F.cross_entropy, ignore_index=2, reduction="sum"),
    "smoothing": nn.CrossEntropyLoss(label_smoothing=0.1),
}


@pytest.mark.parametrize("loss_name", LOSSES)
def test_losses_do_not_depend_on_microbatches(run_ranks, loss_name):
    def job():
        loss_fn = LOSSES[loss_name]
        torch.manual_seed(0)
        x = torch.randn(11, 5, dtype=torch.float64)
        y = torch.randint(0, 5, (11,))
        y[:4] = 2  # with ignore_index=2 and 4 micro-batches, not one target of the first counts
        for name, microbatches in itertools.product(SIMPLE, (1, 2, 4)):
            model = linears(2, 5)
            reference = copy.deepcopy(model)
            loss = loss_fn(reference(x), y)
            loss.backward()
            pipe = Pipeline(
                split(model, 2), schedule=name, microbatches=microbatches, loss_fn=loss_fn
            )
            check_against(reference, pipe, loss, pipe.step(x, y))

    run_ranks(job, 2)


def test_loss_must_be_a_scalar(run_ranks):
    def job():
        model = split(linears(2), 2)
        pipe = Pipeline(
            model, microbatches=1, loss_fn=nn.MSELoss(reduction="none"), reduction="sum"
        )
        pipe.step(torch.randn(2, 4).double(), torch.randn(2, 4).double())

    with pytest.raises(RankFailure, match="loss_fn must return a scalar tensor"):
        run_ranks(job, 2)


# --- what travels --------------------------------------------------------------------------------


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        h = self.linear(x)
        return {
            "hidden": h, "mask": h > 0, "none": None, "rows": len(x), "rate": 0.5, "name": "first",
            "plain": h.detach() * 2, "pair": (h * 3, [torch.arange(len(x)), True]),
        }  # fmt: skip


class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, d):
        assert d["none"] is None and d["rate"] == 0.5 and d["name"] == "first"
        assert type(d["rows"]) is int and d["rows"] == len(d["hidden"]) and d["pair"][1][1] is True
        assert d["mask"].dtype == torch.bool and not d["plain"].requires_grad
        h = self.linear(d["hidden"] * d["mask"] + d["plain"] + d["pair"][1][0][:, None])
        return h, d["pair"][0], d["hidden"]


class Third(nn.Module):
    def forward(self, t):
        h, tripled, unused = t
        return h * tripled.sin()


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "naive"])
def test_nested_values_with_none_numbers_and_integers(run_ranks, name):
    def job():
        torch.manual_seed(0)
        model = nn.Sequential(First(), Second(), Third()).double()
        reference = copy.deepcopy(model)
        pipe = Pipeline(split(model, 3), schedule=name, microbatches=3, loss_fn=F.mse_loss)
        x = torch.randn(7, 4, dtype=torch.float64)
        # `rows` and the arange depend on the micro-batch, so the reference runs on micro-batches.
        loss = sum(
            F.mse_loss(reference(part), part, reduction="sum") / x.numel()
            for part in x.tensor_split(3)
        )
        loss.backward()
        check_against(reference, pipe, loss, pipe.step(x, x))

    run_ranks(job, 3)


class Skip(nn.Module):
    """y = s2(s1(h) + h): h leaves stage 0, passes stage 1 and is used again in stage 2."""

    def __init__(self, place):
        super().__init__()
        self.place, self.linear = place, nn.Linear(4, 4).double()

    def forward(self, value):
        if self.place == 0:
            return self.linear(value)
        if self.place == 1:
            return self.linear(value), value
        return self.linear(value[0] + value[1])


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_b75_skip_connection_over_a_stage(run_ranks, name, microbatches):
    def job():
        torch.manual_seed(0)
        stages = [Skip(place) for place in range(3)]
        s0, s1, s2 = (copy.deepcopy(stage.linear) for stage in stages)
        x, y = torch.randn(2, 8, 4, dtype=torch.float64).unbind()
        h = s0(x)
        loss = F.mse_loss(s2(s1(h) + h), y)
        loss.backward()
        pipe = Pipeline(
            stages[coll.rank()], schedule=name, microbatches=microbatches, loss_fn=F.mse_loss
        )
        mine = pipe.step(x, y)
        close(stages[pipe.rank].linear.weight.grad, (s0, s1, s2)[pipe.rank].weight.grad, "weight")
        if pipe.is_last:
            close(mine, loss.detach(), "loss")

    run_ranks(job, 3)


def test_b75_models_that_cannot_be_cut_are_refused():
    class Unet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.up(self.down(x)) + x

    with pytest.raises(TypeError, match=r"Unet does not say how to cut it.*layers\(\)"):
        split(Unet(), 2)


def test_shapes_are_agreed_again_when_they_change(run_ranks):
    """Other batch sizes, frozen parameters, lists of micro-batches with shapes of their own."""

    def job():
        model = linears(3)
        reference = copy.deepcopy(model)
        pipe = Pipeline(split(model, 3), microbatches=2, loss_fn=F.mse_loss)
        sent = []
        for step, rows in enumerate([4, 4, 7, 4, 7, "list", "frozen", "frozen", 4]):
            for module in (reference, pipe):
                module.zero_grad()
                for name, parameter in module.named_parameters():
                    parameter.requires_grad_(rows != "frozen" or not name.startswith("0."))
            if rows == "list":
                parts = [torch.randn(2, 3, 4).double(), torch.randn(5, 4).double()]
                loss = sum(F.mse_loss(reference(p), p, reduction="sum") for p in parts) / 44
                x = parts
            else:
                x = torch.randn(4 if rows == "frozen" else rows, 4, dtype=torch.float64)
                loss = F.mse_loss(reference(x), x)
            loss.backward()
            before = len(sent)
            mine = pipe.step(x, x)
            sent.append(pipe.mailbox.learning)
            assert len(sent) == before + 1
            named = dict(reference.named_parameters())
            for name, parameter in pipe.named_parameters():
                if parameter.requires_grad:
                    close(parameter.grad, named[name].grad, f"{name} in step {step}")
            if pipe.is_last:
                close(mine, loss.detach(), f"loss in step {step}")
        return sent

    learned = [True, False, True, False, False, True, True, False, True]
    assert run_ranks(job, 3) == [learned] * 3


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_autocast_may_be_switched_on_and_off(run_ranks, name):
    """16-bit activations travel as such; parameters and their gradients stay 32 bits wide."""

    def job():
        model = linears(4, 16).float()
        reference = copy.deepcopy(model)
        pipe = Pipeline(split(model, 2), schedule=name, microbatches=2, loss_fn=F.mse_loss)
        x = torch.randn(8, 16)
        sent = []
        for enabled in (False, True, True, False):
            for module in (pipe, reference):
                module.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                loss = F.mse_loss(reference(x).float(), x)
                loss.backward()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled), md.measure() as seen:
                pipe.step(x, x)
            for key, p in pipe.named_parameters():
                assert p.grad.dtype == torch.float32
                # bfloat16 keeps 8 bits: the two only add their roundings in another order.
                tolerance = 2e-2 if enabled else 1e-5
                grad = reference.get_parameter(key).grad
                assert (p.grad - grad).norm() <= tolerance * grad.norm(), key
            sent.append((pipe.mailbox.learning, seen.traffic["send"].sent_bytes))
        assert sent[2][1] == 2 * (4 * 16) * 2  # micro-batches x elements x bytes
        return [learning for learning, _ in sent]

    assert run_ranks(job, 2) == [[True, True, False, True]] * 2


class Lengths(nn.Module):
    """Its output's shape depends on the values: keeps the positive rows."""

    def forward(self, x):
        return x[x[:, 0] > 0]


@pytest.mark.parametrize("dynamic", [True, False])
def test_shapes_that_depend_on_the_values(run_ranks, dynamic):
    def job():
        stages = [Lengths(), nn.Identity()]
        pipe = Pipeline(
            stages[coll.rank()], microbatches=2, dynamic=dynamic, loss_fn=lambda out, _: out.sum(),
            reduction="sum",
        )  # fmt: skip
        losses = []
        for seed in range(4):
            torch.manual_seed(seed)
            x = torch.randn(12, 3, dtype=torch.float64)
            loss = pipe.step(x, x)
            if pipe.is_last:
                close(loss, x[x[:, 0] > 0].sum(), "loss")
            losses.append(loss)

    if dynamic:
        run_ranks(job, 2)
    else:
        with pytest.raises(
            RankFailure, match=r"stage 0 returned .* use Pipeline\(..., dynamic=True\)"
        ):
            run_ranks(job, 2)


def test_stage_that_begins_in_place(run_ranks):
    def job():
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True)]
        model = nn.Sequential(*layers).double()
        reference = copy.deepcopy(model)
        x = torch.randn(6, 4, dtype=torch.float64)
        loss = F.mse_loss(reference(x), x)
        loss.backward()
        parts = split(model, 2, costs=[1, 0.1, 0.5, 0.4])
        assert [part.layer_names for part in parts] == [("0",), ("1", "2", "3")]
        pipe = Pipeline(parts, microbatches=2, loss_fn=F.mse_loss)
        check_against(reference, pipe, loss, pipe.step(x, x))

    run_ranks(job, 2)


# --- tied parameters --------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize(
    ("world", "name", "chunks"),
    [(2, "1f1b", 1), (4, "1f1b", 1), (3, "zb-h1", 1), (2, "interleaved", 2), (2, "zb-v", 2)],
)
def test_b77_tied_embedding_and_head(run_ranks, world, name, chunks, optimizer):
    """Three steps with clipping and weight decay. zb-v: both on rank 0, nothing counted twice."""

    def job():
        config = GPTConfig(vocab=11, seq=5, width=8, layers=6, heads=2, tied=True)
        model, reference = (build_gpt(config, dtype=torch.float64) for _ in range(2))
        if coll.rank() == world - 1:  # copies must be made equal at the start
            with torch.no_grad():
                model.head.lm.weight.mul_(1.0 if name == "zb-v" else 1.5)
        make = {"SGD": functools.partial(torch.optim.SGD, lr=0.5), "AdamW": torch.optim.AdamW}
        pipe = Pipeline(split(model, world, chunks), schedule=name, microbatches=4, loss_fn=loss_fn)
        ours = make[optimizer](pipe.parameters(), weight_decay=0.1)
        theirs = make[optimizer](reference.parameters(), weight_decay=0.1)
        for _ in range(3):
            x, y = torch.randint(0, 11, (2, 8, 5)).unbind()
            loss = loss_fn(reference(x), y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            mine = pipe.step(x, y)
            close(pipe.clip_grad_norm_(0.5), norm, "norm")
            check_against(reference, pipe, loss, mine)
            for used in (ours, theirs):
                used.step()
                used.zero_grad()
        named = dict(reference.named_parameters(remove_duplicate=False))
        for key, parameter in pipe.named_parameters():
            close(parameter, named[key], key)
        copies = {key: p.detach() for key, p in pipe.named_parameters() if p.shape == (11, 8)}
        return pipe.is_first or pipe.is_last, list(copies.values())

    held = [tensors for _, tensors in run_ranks(job, world) if tensors]
    for tensors in held:
        assert torch.equal(tensors[0], held[0][0])  # bit for bit


def test_tied_by_hand_three_holders(run_ranks):
    def job():
        class Times(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.tensor(2.0 + coll.rank()).double())

            def forward(self, x):
                return x * self.weight

        stage = Times()
        pipe = Pipeline(
            stage, microbatches=2, loss_fn=lambda out, _: out.mean(), tied={"w": stage.weight}
        )
        x = torch.ones(4, dtype=torch.float64)
        pipe.step(x, x)
        pipe.step(x, x)
        return stage.weight.item(), stage.weight.grad.item()

    # y = w^3 x with w = 2 on every rank: dy/dw = 3 w^2 = 12, twice.
    assert run_ranks(job, 3) == [(2.0, 24.0)] * 3


# --- messages ----------------------------------------------------------------------------------


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 1.5, dtype=torch.float64))

    def forward(self, x):
        return x * self.weight


@pytest.mark.parametrize(("name", "chunks"), ALL)
def test_b79_large_activations(run_ranks, name, chunks):
    """4 MB per message over gloo, four ranks: nothing may count on the transport's own buffers."""

    def job():
        model = nn.Sequential(*[Scale() for _ in range(4 * chunks)])
        pipe = Pipeline(
            split(model, 4, chunks), schedule=name, microbatches=8, loss_fn=lambda o, _: o.mean()
        )
        x = torch.ones(8, 2**19, dtype=torch.float64)
        for _ in range(2):
            pipe.zero_grad()
            loss = pipe.step(x, x)
        n = 4 * chunks
        for parameter in pipe.parameters():
            close(parameter.grad, torch.full((1,), 1.5 ** (n - 1), dtype=torch.float64))
        assert loss is None or loss.item() == pytest.approx(1.5**n)

    run_ranks(job, 4, timeout=60)


def test_bytes_sent_are_the_formula(run_ranks):
    """b*s*h elements per boundary, direction and micro-batch, after the first step has agreed."""

    def job():
        config = GPTConfig(vocab=11, seq=5, width=8, layers=4, heads=2)
        pipe = Pipeline(split(build_gpt(config), 4), microbatches=4, loss_fn=loss_fn)
        x, y = torch.randint(0, 11, (2, 8, 5)).unbind()
        pipe.step(x, y)
        with md.measure() as seen:
            pipe.step(x, y)
        return seen.traffic["send"].sent_bytes, seen.traffic["send"].calls

    boundary = 8 * 5 * 8 * 4
    sent = run_ranks(job, 4)
    assert sent == [(boundary, 4), (2 * boundary, 8), (2 * boundary, 8), (boundary, 4)]


def test_the_measured_gantt_chart_has_the_planned_actions(run_ranks):
    def job():
        pipe = Pipeline(split(linears(4), 2), schedule="zb-h1", microbatches=3, loss_fn=F.mse_loss)
        x = torch.randn(6, 4, dtype=torch.float64)
        pipe.step(x, x)
        with md.measure() as seen:
            pipe.step(x, x)
        planned = [str(action) for action in pipe.schedule.actions[pipe.rank]]
        measured = [s.name for s in sorted(seen.timeline.spans, key=lambda s: s.start)]
        assert [name for name in measured if name in planned] == planned

    run_ranks(job, 2)


# --- memory --------------------------------------------------------------------------------------


class Watched(nn.Module):
    """Counts the micro-batches whose activations autograd holds: what tanh saves, while alive."""

    class Box:
        def __init__(self, tensor):
            self.tensor = tensor

    def __init__(self):
        super().__init__()
        self.live, self.peak = weakref.WeakSet(), 0
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x):
        def pack(tensor):
            box = Watched.Box(tensor)
            self.live.add(box)
            self.peak = max(self.peak, len(self.live))
            return box

        x = self.linear(x)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
            return torch.tanh(x)


@pytest.mark.parametrize("microbatches", [2, 3, 8])
@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved"])
def test_live_activations_are_the_schedules(run_ranks, name, microbatches):
    """Of 1F1B against GPipe: min(m, p - rank) against m."""
    world, chunks = (2, 2) if name == "interleaved" else (4, 1)
    if name == "interleaved" and microbatches % world:
        pytest.skip("interleaved needs a multiple of the ranks")

    def job():
        model = nn.Sequential(*[Watched() for _ in range(world * chunks)])
        pipe = Pipeline(
            split(model, world, chunks),
            schedule=name,
            microbatches=microbatches,
            loss_fn=F.mse_loss,
        )
        x = torch.randn(2 * microbatches, 4, dtype=torch.float64)
        live = []
        for _ in range(2):
            pipe.step(x, x)
            watched = [m for m in pipe.modules() if isinstance(m, Watched)]
            live.append(sum(w.peak for w in watched) if chunks == 1 else pipe.peak_in_flight)
            assert not any(len(w.live) for w in watched)
            # A chunk's own peak cannot exceed the rank's.
            assert all(w.peak <= pipe.schedule.in_flight[pipe.rank] for w in watched)
        return live

    expected = md.schedule(name, world, microbatches, chunks).in_flight
    if name in ("gpipe", "1f1b"):
        p, m = world, microbatches
        assert expected == [m if name == "gpipe" else min(m, p - r) for r in range(p)]
    assert run_ranks(job, world) == [[held, held] for held in expected]


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_weight_gradients_wait_for_their_turn(run_ranks, name):
    """After I the graph is gone and the linear weights have no gradient yet; W brings it."""

    def job():
        chunks = 2 if name == "zb-v" else 1
        pipe = Pipeline(
            split(linears(6), 2, chunks), schedule=name, microbatches=4, loss_fn=F.mse_loss
        )
        seen = []
        backward, weights = pipe._backward, pipe._weights

        def spy(action, original):
            matrices = [p for p in pipe.parameters() if p.dim() == 2]
            grads = [None if p.grad is None else p.grad.clone() for p in matrices]
            original(action)
            changed = any(
                (a is None) != (b.grad is None) or (a is not None and not torch.equal(a, b.grad))
                for a, b in zip(grads, matrices, strict=True)
            )
            seen.append((action.kind, changed))

        pipe._backward = lambda action: spy(action, backward)
        pipe._weights = lambda action: spy(action, weights)
        x = torch.randn(8, 4, dtype=torch.float64)
        pipe.step(x, x)
        assert pipe.peak_in_flight == pipe.schedule.in_flight[pipe.rank]
        assert set(seen) == {("I", False), ("W", True)}

    run_ranks(job, 2)


@contextlib.contextmanager
def every_weight_in_place():
    """Small weights too, whose gradients normally go through autograd."""
    before, weightgrad._LARGE = weightgrad._LARGE, 0
    try:
        yield
    finally:
        weightgrad._LARGE = before


class Odd(nn.Module):
    """What makes splitting backward hard: shared and parametrised weights, hooks, raw products."""

    def __init__(self, how=None):
        super().__init__()
        self.how = how
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.norm = nn.LayerNorm(4)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.raw = nn.Parameter(torch.randn(4, 4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.partly = nn.Linear(4, 4)
        self.partly.bias.requires_grad_(False)

    def forward(self, x):
        def inner(x):
            return self.b(F.gelu(self.a(self.norm(x)))) + self.b(x)

        if self.how is None:
            x = inner(x)
        else:
            x = checkpoint(inner, x, use_reentrant=self.how == "reentrant")
        x = self.normed(x) * 1
        if x.requires_grad:
            x.register_hook(lambda grad: 3 * grad)  # must act once
        x = self.partly(self.frozen(x @ self.raw + x))
        return F.linear(x, weight=self.a.weight, bias=None)


@pytest.mark.parametrize("how", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("zb-h1", 1), ("zb-v", 2)])
def test_any_module_also_checkpointed(run_ranks, name, chunks, how):
    def job():
        torch.manual_seed(0)
        model = nn.Sequential(*[Odd(how) for _ in range(2 * chunks)]).double()
        reference = copy.deepcopy(model)
        for layer in reference:
            layer.how = None
        x = torch.randn(9, 4, dtype=torch.float64)
        x.requires_grad_(how == "reentrant")  # or reentrant checkpointing skips the first layer
        pipe = Pipeline(split(model, 2, chunks), schedule=name, microbatches=3, loss_fn=F.mse_loss)
        target = torch.zeros(9, 4, dtype=torch.float64)
        for _ in range(2):
            loss = F.mse_loss(reference(x), target)
            loss.backward()
            with every_weight_in_place():
                mine = pipe.step(x.detach().requires_grad_(x.requires_grad), target)
        named = dict(reference.named_parameters())
        for key, parameter in pipe.named_parameters():
            if parameter.requires_grad:
                close(parameter.grad, named[key].grad, key)
            else:
                assert parameter.grad is None
        if pipe.is_last:
            close(mine, loss.detach(), "loss")

    run_ranks(job, 2)


class Force(nn.Module):
    """Differentiates in its forward, and again in backward: the gradient of an energy."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        with torch.no_grad():
            scale = x.abs().mean() * 0 + 1
        if not x.requires_grad:
            x = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(self.energy(x).sum(), x)
        (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return x - scale * force + first


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_modules_that_differentiate_themselves(run_ranks, name):
    def job():
        torch.manual_seed(0)
        model = nn.Sequential(Force(), Force()).double()
        reference = copy.deepcopy(model)
        pipe = Pipeline(split(model, 2), schedule=name, microbatches=3, loss_fn=F.mse_loss)
        x, y = torch.randn(2, 6, 4, dtype=torch.float64).unbind()
        for _ in range(2):
            loss = F.mse_loss(reference(x), y)
            loss.backward()
            with every_weight_in_place():
                mine = pipe.step(x, y)
        check_against(reference, pipe, loss, mine)

    run_ranks(job, 2)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_gradients_in_place_and_hooks(run_ranks, name):
    """The second micro-batch adds into the `.grad` of the first, unless hooks have to see it."""

    def job():
        model, reference = linears(4), linears(4)
        x, y = torch.randn(2, 8, 4, dtype=torch.float64).unbind()
        F.mse_loss(reference(x), y).backward()
        pipe = Pipeline(split(model, 2), schedule=name, microbatches=4, loss_fn=F.mse_loss)
        plain, hooked = [p for p in pipe.parameters() if p.dim() == 2]
        calls = []
        hooked.register_post_accumulate_grad_hook(lambda p: calls.append(p))
        with every_weight_in_place():
            pipe.step(x, y)
        assert len(calls) == 4
        named = dict(reference.named_parameters())
        for key, parameter in pipe.named_parameters():
            close(parameter.grad, named[key].grad, key)
        # A hook that changes the gradient is used as well.
        plain.register_hook(lambda grad: grad * 3)
        before = plain.grad.clone()
        with every_weight_in_place():
            pipe.step(x, y)
        close(plain.grad, before * 4)

    run_ranks(job, 2)


# --- batch norm ----------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.recompute, self.norm = recompute, nn.BatchNorm1d(1)

    def forward(self, x):
        if not self.recompute:
            return self.norm(x)
        return checkpoint(self.norm, x, use_reentrant=False)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", SIMPLE)
def test_b82_batch_norm_counts_each_microbatch_once(run_ranks, name, recompute):
    """Micro-batches [0, 2] and [4, 6], momentum 0.1: 0.1 * 1, then 0.9 * 0.1 + 0.1 * 5 = 0.59.
    Counting recomputation gives 1.104."""

    def job():
        stages = [nn.Sequential(nn.Identity(), Norm(recompute)).double(), nn.Linear(1, 1).double()]
        pipe = Pipeline(
            stages[coll.rank()], schedule=name, microbatches=2, loss_fn=lambda out, _: out.mean()
        )
        x = torch.tensor([[0.0], [2.0], [4.0], [6.0]], dtype=torch.float64)
        pipe.step(x, x)
        pipe.eval()(x)  # evaluation changes nothing
        if coll.rank() == 0:
            norm = stages[0][1].norm
            return norm.running_mean.item(), norm.num_batches_tracked.item()
        return None

    assert run_ranks(job, 2)[0] == (pytest.approx(0.59, rel=1e-12), 2)


# --- split -------------------------------------------------------------------------------------


def test_b83_split_is_even_complete_and_in_order():
    for layers, parts in itertools.product(range(1, 41), range(1, 25)):
        if layers >= parts:
            cuts = _balance([1.0] * layers, parts)
            sizes = [last - first for first, last in cuts]
            assert len(cuts) == parts and max(sizes) - min(sizes) <= 1
            assert [i for first, last in cuts for i in range(first, last)] == [*range(layers)]
    for layers, stages, chunks in itertools.product((1, 7, 10, 40), (1, 3, 8), (1, 2, 3)):
        if layers < stages * chunks:
            with pytest.raises(ValueError, match=f"{layers} layers cannot fill {stages * chunks}"):
                split(nn.Sequential(*[nn.Identity() for _ in range(layers)]), stages, chunks)
            continue
        parts = split(nn.Sequential(*[nn.Identity() for _ in range(layers)]), stages, chunks)
        assert len(parts) == stages * chunks
        assert [name for part in parts for name in part.layer_names] == [*map(str, range(layers))]
        sizes = [len(part.layer_names) for part in parts]
        assert max(sizes) - min(sizes) <= 1
    sizes = [len(part.layer_names) for part in split(linears(10), 3)]
    assert sorted(sizes) == [3, 3, 4]
    assert max(len(part.layer_names) for part in split(linears(38), 8)) == 5


def test_split_follows_costs():
    model = linears(6)
    assert [p.layer_names for p in split(model, 2, costs=[5, 1, 1, 1, 1, 1])] == [
        ("0",), ("1", "2", "3", "4", "5"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="6, not 2"):
        split(model, 2, costs=[1, 2])
    with pytest.raises(ValueError, match="at least 1"):
        split(model, 0)


def test_split_keeps_names_and_finds_ties():
    model = build_gpt(GPTConfig(layers=4, tied=True))
    parts = split(model, 3)
    assert {name for part in parts for name in part.state_dict()} == set(model.state_dict())
    assert [list(part.tied) for part in parts] == [
        ["embed.token.weight"],
        [],
        ["embed.token.weight"],
    ]
    x = tokens = torch.randint(0, 256, (2, 8))
    for part in parts:
        x = part(x)
    assert torch.equal(x, model(tokens))
    with pytest.raises(ValueError, match="outside of all layers would be lost: extra"):
        model.extra = nn.Parameter(torch.zeros(1))
        split(model, 2)


def test_measured_costs_are_the_same_on_all_ranks(run_ranks):
    def job():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 512), nn.Linear(512, 8))
        model[0].weight.grad = torch.ones(8, 8)
        random_state = torch.get_rng_state()
        costs = layer_costs(model, torch.randn(64, 8, generator=torch.Generator()))
        assert torch.equal(model[0].weight.grad, torch.ones(8, 8)) and model[1].weight.grad is None
        assert torch.equal(random_state, torch.get_rng_state())
        return costs

    first, second = run_ranks(job, 2)
    assert first == second and len(first) == 3 and min(first) > 0


# --- construction ------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_on_all_ranks(run_ranks):
    def job():
        parts = split(linears(6), 3)
        rank = coll.rank()

        def refused(message, stages, **settings):
            with pytest.raises(ValueError, match=message):
                Pipeline(stages, **{"microbatches": 2, "loss_fn": F.mse_loss, **settings})

        refused("rank 2: rank 2 was given part 1 of 3", parts[min(rank, 1)])
        refused("unknown; choose from", parts, schedule="fastest")
        refused("microbatches must be a positive", parts, microbatches=0)
        refused("6 parts cannot be dealt to 3|1f1b has one chunk", split(linears(6), 6))
        refused("2 parts cannot be dealt to 3 ranks", split(linears(6), 2))
        refused("different pipelines.*rank 1 .'1f1b', 3, 3", parts, microbatches=2 + (rank == 1))
        refused("reduction must be mean or sum", parts, reduction="none")
        refused("stages must be nn.Modules, not str", "model")
        refused("exactly 2 chunks", parts, schedule="zb-v")
        wrong = md.schedule("gpipe", 3, 2)
        wrong.actions[1].reverse()
        refused("rank 1: B1 comes before F1", parts, schedule=wrong)
        refused(
            "schedule is for .3, 2, 1.", parts, schedule=md.schedule("gpipe", 3, 2), microbatches=4
        )
        mine = md.schedule("gpipe", 3, 2)
        if rank == 1:
            mine.actions[1][:2] = mine.actions[1][1::-1]  # valid, but not what the others have
        refused("different pipelines.*digest", parts, schedule=mine)
        shape = nn.Parameter(torch.zeros(2 + rank))
        refused("copies of tied parameter 'w' differ", parts, tied={"w": shape})

    run_ranks(job, 3)


def test_own_schedule_and_hand_made_stages(run_ranks):
    """Any list that validates runs: here all backwards of GPipe in reverse order."""

    def job():
        plan = md.schedule("gpipe", 2, 4)
        for actions in plan.actions:
            actions[4:] = actions[:3:-1]
        model = linears(4)
        reference = copy.deepcopy(model)
        x, y = torch.randn(2, 8, 4, dtype=torch.float64).unbind()
        loss = F.mse_loss(reference(x), y)
        loss.backward()
        rank = coll.rank()
        pipe = Pipeline(
            model[2 * rank : 2 * rank + 2], schedule=plan, microbatches=4, loss_fn=F.mse_loss
        )
        pipe.step(x, y)
        close(model[2 * rank][0].weight.grad, reference[2 * rank][0].weight.grad)

    run_ranks(job, 2)


def test_state_dict_has_the_models_names(run_ranks):
    def job():
        model, other = linears(8), linears(8, seed=1)
        pipe = Pipeline(
            split(model, 2, 2), schedule="interleaved", microbatches=2, loss_fn=F.mse_loss
        )
        pipe.load_state_dict(other.state_dict())
        assert set(pipe.state_dict()) == {name for name, _ in pipe.named_parameters()}
        for name, parameter in pipe.named_parameters():
            assert torch.equal(parameter, other.state_dict()[name])
        return list(pipe.state_dict())

    held = run_ranks(job, 2)
    assert sorted(held[0] + held[1]) == sorted(linears(8).state_dict())


@pytest.mark.parametrize("kind", ["inf", 1.0, 2.0])
def test_clip_counts_every_element_once(run_ranks, kind):
    def job():
        model, reference = linears(4), linears(4)
        x = 10 * torch.randn(4, 4, dtype=torch.float64)
        F.mse_loss(reference(x), x).backward()
        pipe = Pipeline(split(model, 4), microbatches=2, loss_fn=F.mse_loss)
        pipe.step(x, x)
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1, float(kind))
        close(pipe.clip_grad_norm_(0.1, float(kind)), norm)
        for name, parameter in pipe.named_parameters():
            close(parameter.grad, reference.get_parameter(name).grad, name)

    run_ranks(job, 4)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_data_parallel_stages_reduce_once(run_ranks, name):
    """dp 2 x pp 2: each stage is wrapped in DDP, which reduces with the last micro-batch only."""

    def job():
        mesh = md.build_mesh(dp=2, pp=2)
        model, reference = linears(4), linears(4)
        batch = torch.randn(8, 4, dtype=torch.float64)
        F.mse_loss(reference(batch), batch).backward()
        x = batch.chunk(2)[coll.rank(mesh["dp"])]
        part = md.DDP(split(model, 2)[coll.rank(mesh["pp"])], group=mesh["dp"])
        pipe = Pipeline(part, schedule=name, microbatches=2, loss_fn=F.mse_loss, group=mesh["pp"])
        for step in range(2):  # the first step teaches DDP the order of its buckets
            pipe.zero_grad()
            with md.measure() as seen:
                pipe.step(x, x)
            for key, parameter in part.module.named_parameters():
                close(parameter.grad, reference.get_parameter(key).grad, f"{key} in step {step}")
        calls = seen.traffic["all_reduce"].calls
        assert calls == 2  # the batch is agreed on; one bucket

    run_ranks(job, 4)
