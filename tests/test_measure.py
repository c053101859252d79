"""`md.measure().memory`: bytes that can be computed by hand must come out to the byte."""

import copy
import ctypes
import gc
import threading
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import minidist as md
from minidist.measure import tag
from minidist.measure.memory import Bytes
from minidist.measure.process import malloced, resident_bytes

MB = 1 << 20


def numbers(module):
    return sum(p.numel() for p in module.parameters())


def mlp(width=64, hidden=128, out=10, activation=nn.ReLU):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, hidden), activation(), nn.Linear(hidden, out))


def step(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# --- kinds, by hand ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "per_parameter", "per_tensor"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0, 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 4, 0),
        (lambda p: torch.optim.Adam(p, foreach=False), 8, 4),  # two moments, and a scalar step
        (lambda p: torch.optim.Adam(p, foreach=True), 8, 4),
        (lambda p: torch.optim.AdamW(p, fused=True), 8, 4),
        (lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True), 12, 4),
    ],
)
def test_parameters_gradients_and_optimizer_state(make, per_parameter, per_tensor):
    model = nn.Linear(100, 50)
    optimizer = make(model.parameters())
    x = torch.randn(7, 100)
    P, tensors = numbers(model), len(list(model.parameters()))
    with md.measure() as m:
        model(x).sum().backward()
        assert m.memory.current == Bytes(parameters=4 * P, gradients=4 * P, temporary=7 * 100 * 4)
        optimizer.step()
        assert m.memory.current["optimizer"] == per_parameter * P + per_tensor * tensors
        optimizer.zero_grad()
        assert m.memory.current["gradients"] == 0
    assert m.memory.peak["gradients"] == 4 * P
    assert m.memory.current_total == m.memory.current.total
    assert m.memory.at_peak.total == m.memory.peak_total


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_bytes_follow_the_dtype(dtype):
    model = nn.Linear(10, 10).to(dtype)
    with md.measure() as m:
        model(torch.randn(3, 10, dtype=dtype)).sum().backward()
    assert m.memory.current["parameters"] == 110 * dtype.itemsize
    assert m.memory.current["gradients"] == 110 * dtype.itemsize


@pytest.mark.parametrize(
    ("activation", "hidden_tensors"),
    [
        (nn.ReLU, 1),  # keeps its output, which is also the next layer's input
        (nn.GELU, 2),  # keeps its input; the next layer keeps the output
        (nn.Identity, 1),  # keeps nothing; the next layer keeps the first one's output
    ],
)
def test_activations_of_an_mlp(activation, hidden_tensors):
    batch, width, hidden = 32, 64, 128
    model, x = mlp(width, hidden, activation=activation), torch.randn(batch, width)
    expected = 4 * batch * (width + hidden_tensors * hidden)
    with md.measure() as m:
        loss = model(x).sum()
        assert m.memory.current["activations"] == expected
        loss.backward()
        assert m.memory.current["activations"] == 0
    assert m.memory.peak["activations"] == expected


def test_nothing_is_kept_without_gradients():
    with md.measure() as m, torch.no_grad():
        mlp()(torch.randn(32, 64))
    assert m.memory.peak["activations"] == 0


def test_activation_checkpointing_keeps_the_inputs_only():
    model, x = mlp(), torch.randn(32, 64, requires_grad=True)
    with md.measure() as m:
        y = checkpoint(model, x, use_reentrant=False)
        assert m.memory.current["activations"] == 4 * 32 * 64
        y.sum().backward()
    assert m.memory.current["activations"] == 0


def test_module_buffers_given_to_measure():
    model = nn.BatchNorm1d(10)
    with md.measure(model) as m:
        model(torch.randn(5, 10))
    assert m.memory.current["buffers"] == 10 * 4 * 2 + 8  # mean, variance, an int64 counter


# --- a storage counts once ----------------------------------------------------------------------


def test_views_count_once():
    with md.measure() as m:
        x = torch.zeros(1000)
        views = [x[::2], x.view(10, 100).t(), x[3:4], x.detach(), x.expand(7, 1000)]
        assert m.memory.current_total == 4000
        del x
        assert m.memory.current_total == 4000  # the views keep the whole storage
        del views
        assert m.memory.current_total == 0
    assert m.memory.peak_total == 4000


def test_tied_weights_count_once():
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50, bias=False))
    model[1].weight = model[0].weight
    with md.measure() as m:
        model(torch.arange(5)).sum().backward()
    assert m.memory.current["parameters"] == 4 * 50 * 16
    assert m.memory.current["gradients"] == 4 * 50 * 16


def test_parameters_that_are_views_of_one_flat_buffer():
    flat = torch.zeros(120)
    weight, bias = nn.Parameter(flat[:100].view(10, 10)), nn.Parameter(flat[100:110])
    with md.measure() as m:
        F.linear(torch.ones(2, 10), weight, bias).sum().backward()
    assert m.memory.current["parameters"] == 480  # with the padding, and once


def test_storage_resize_is_followed():
    with md.measure() as m:
        full = torch.zeros(1000)
        full.untyped_storage().resize_(0)
        assert m.memory.current_total == 0
        other = torch.zeros(500)
        assert m.memory.peak_total == 4000, "the freed kilobytes must not count under the new ones"
        full.untyped_storage().resize_(8000)
        assert m.memory.current_total == 10000
        full.untyped_storage().resize_(0)
        torch.zeros(3).resize_(5)
        del other
        assert m.memory.current_total == 0


# --- what must show, and what must not ----------------------------------------------------------


@pytest.mark.parametrize("leak", [False, True])
def test_a_leak_of_one_tensor_shows(leak):
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    x, kept = torch.randn(32, 64), []
    step(model, optimizer, x)
    totals = []
    with md.measure() as m:
        for _ in range(4):
            loss = step(model, optimizer, x)
            if leak:
                kept.append(loss + torch.zeros(25))
            del loss
            totals.append(m.memory.current_total)
    growth = [b - a for a, b in zip(totals, totals[1:], strict=False)]
    assert growth == ([100, 100, 100] if leak else [0, 0, 0])


def test_memory_older_than_the_measurement_counts_from_its_start():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    x = torch.randn(32, 64)
    step(model, optimizer, x)
    state = 8 * numbers(model) + 4 * 4
    with md.measure() as first:
        model(x).sum().backward()
        before_step = first.memory.peak_total
        optimizer.step()
        optimizer.zero_grad()
    # The peak was in backward, long before the optimizer touched its state.
    assert first.memory.at_peak["optimizer"] == state
    assert first.memory.peak_total >= before_step + state
    with md.measure(model, optimizer, x) as second:
        assert second.memory.current == Bytes(
            parameters=4 * numbers(model), optimizer=state, temporary=x.nbytes
        )
        model(x).sum().backward()
        optimizer.step()
    assert second.memory.peak_total == first.memory.peak_total


def test_new_batches_are_not_taken_for_old_memory():
    with md.measure() as m:
        for _ in range(10):
            torch.from_numpy(np.zeros(1000, dtype=np.float32)) + 1
    assert m.memory.peak_total == 8000


def test_reset_peak():
    with md.measure() as m:
        big = torch.zeros(1000)
        del big
        m.memory.reset_peak()
        small = torch.zeros(10)
    assert m.memory.peak_total == small.nbytes == 40


def test_frees_after_the_measurement_do_not_change_it():
    with md.measure() as m:
        x = torch.zeros(1000)
    del x
    assert m.memory.current_total == 4000


# --- tags ---------------------------------------------------------------------------------------


def test_tags():
    with md.measure() as m:
        bucket = tag(torch.zeros(100), "buffers")
        assert m.memory.current == Bytes(buffers=400)
        tag(bucket[:10], "gradients")  # a view means its whole storage
        assert m.memory.current == Bytes(gradients=400)
    early = tag(torch.zeros(100), "optimizer")
    with md.measure() as m:
        early.add_(1)
    assert m.memory.peak == Bytes(optimizer=400)
    with pytest.raises(ValueError, match="kind must be one of parameters, .*got 'weights'"):
        tag(early, "weights")


def test_a_tag_wins_over_what_the_hooks_say():
    weight = nn.Parameter(tag(torch.zeros(10, 10), "buffers"))
    with md.measure() as m:
        F.linear(torch.ones(2, 10), weight).sum().backward()
    assert m.memory.current["parameters"] == 0
    assert m.memory.current["buffers"] == 400


def test_a_tag_dies_with_its_storage():
    for _ in range(20):  # the allocator hands the same address out again
        tag(torch.empty(1000), "optimizer")
        with md.measure() as m:
            torch.empty(1000)
        assert m.memory.peak["optimizer"] == 0


def test_memory_mapped_files_are_on_disk(tmp_path):
    with md.measure() as m:
        mapped = torch.from_file(str(tmp_path / "state"), shared=True, size=1000)
        tag(mapped, "optimizer")
        mapped.add_(1)
    assert m.memory.peak_total == 0
    assert m.memory.on("disk").current == Bytes(optimizer=4000)


def test_a_tag_can_place_memory_on_disk():
    with md.measure() as m:
        tag(torch.zeros(100), "optimizer", device="disk")
        kept = tag(torch.zeros(50), "optimizer", device="disk")
        assert m.memory.current_total == 0
        assert m.memory.on("disk").current["optimizer"] == kept.nbytes


# --- harmless -----------------------------------------------------------------------------------


def train(measured, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40), nn.Dropout(0.5), nn.GELU(), nn.Linear(40, 5))
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    x = torch.randn(8, 20)

    def run():
        for _ in range(3):
            checkpoint(model, x, use_reentrant=False).square().mean().backward()
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    if measured:
        with md.measure():
            run()
    else:
        run()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_results_are_bit_for_bit_those_of_an_unmeasured_run(options):
    for a, b in zip(train(False, **options), train(True, **options), strict=True):
        assert torch.equal(a, b)


def test_nothing_stays_behind():
    resize = torch.UntypedStorage.resize_
    model = mlp()
    with pytest.raises(ZeroDivisionError), md.measure():
        model(torch.randn(2, 64)).sum().backward()
        raise ZeroDivisionError
    assert torch.UntypedStorage.resize_ is resize
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not nn.modules.module._global_forward_hooks
    assert not _global_optimizer_post_hooks
    packed = []
    x = torch.randn(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        x.square()
    assert type(packed[0]) is torch.Tensor


def test_modified_saved_tensors_still_raise():
    x = torch.randn(3, requires_grad=True)
    with md.measure():
        y = (x * 2).sigmoid()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        h = x * 2
        z = h * h
        h.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


@pytest.mark.parametrize(
    "operation",
    [
        lambda h: h.exp_(),
        lambda h: h.sigmoid_().mul_(2),
        lambda h: F.relu(h, inplace=True),
        lambda h: h.add_(1).tanh_(),
        lambda h: h[1:].exp_(),
        lambda h: F.layer_norm(h, (4,)).mul_(3),
        lambda h: h.clamp_(0).sqrt_() if (h > 0).all() else h.abs_().sqrt_(),
        lambda h: torch.softmax(h, -1).masked_fill_(h.detach() > 9, 0),
    ],
)
def test_legitimate_in_place_operations_still_work(operation):
    x = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]], requires_grad=True)

    def outcome():
        x.grad = None
        try:
            operation(x * 2).sum().backward()
        except RuntimeError as error:
            return str(error)[:60]
        return x.grad.clone()

    plain = outcome()
    with md.measure():
        measured = outcome()
    if isinstance(plain, str):
        assert measured == plain
    else:
        assert torch.equal(plain, measured)


def test_deepcopy_inside_and_backward_outside():
    model = mlp()
    with md.measure() as m:
        twin = copy.deepcopy(model)
        loss = model(torch.randn(2, 64)).sum()
    loss.backward()  # the graph outlives the measurement
    twin(torch.randn(2, 64)).sum().backward()
    assert all(p.grad is not None for p in [*model.parameters(), *twin.parameters()])
    assert m.memory.current["activations"] > 0


def test_gradients_are_still_stolen_not_copied():
    """Autograd hands a gradient over without a copy only while nobody else refers to it."""
    weight = nn.Parameter(torch.zeros(1000))
    made = []

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return w.clone()

        @staticmethod
        def backward(ctx, g):
            grad = torch.ones(1000)
            made.append(grad.data_ptr())
            return grad

    with md.measure() as m:
        Made.apply(weight).sum().backward()
        assert weight.grad.data_ptr() == made[0]
    assert m.memory.current["gradients"] == 4000


def test_observing_comes_after_the_hooks_of_a_strategy():
    """A strategy moves the gradient into its bucket: the bucket is the gradient, not both."""
    weight, bucket = nn.Parameter(torch.ones(1000)), torch.zeros(1000)
    with md.measure() as m:
        with torch.no_grad():
            weight.mul_(2)  # seen before the strategy comes

        def move(parameter):
            bucket.copy_(parameter.grad)
            parameter.grad = bucket

        weight.register_post_accumulate_grad_hook(move)
        (weight * 2).sum().backward()
    assert m.memory.peak["gradients"] == m.memory.current["gradients"] == bucket.nbytes


def test_measurements_can_be_nested():
    with md.measure() as outer:
        a = torch.zeros(100)
        with md.measure() as inner:
            w = torch.zeros(50, requires_grad=True)
            b = w.square()
            assert inner.memory.current["activations"] == 200
        assert outer.memory.current["activations"] == 200
        del w, b
        assert outer.memory.current_total == a.nbytes
    assert inner.memory.current_total == 400
    assert outer.memory.peak_total == 800


def test_several_threads_measure_their_own():
    wrong = []

    def work(size):
        try:
            model = nn.Linear(size, size, bias=False)
            for _ in range(30):
                with md.measure() as m:
                    y = model(torch.ones(1, size)).sum()
                    y.backward()
                    model.zero_grad()
                got = (m.memory.peak["parameters"], m.memory.peak["gradients"])
                if got != (4 * size * size, 4 * size * size):
                    wrong.append((size, got))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(size,)) for size in (10, 20, 30, 40)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert not wrong


def test_wrong_use_is_refused():
    with pytest.raises(TypeError, match="modules, optimizers and tensors .* got list"):
        md.measure([torch.zeros(1)])
    with md.measure() as m:
        with pytest.raises(RuntimeError, match="opened before"):
            m.__enter__()


def test_odd_tensors():
    with md.measure() as m:
        empty = torch.empty(0)
        scalar = torch.tensor(3.0)
        sparse = torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (4,), check_invariants=True)
        quick = torch.empty(3, device="meta")
        (sparse + sparse).coalesce()
        empty + 1
        assert m.memory.on("meta").current_total == quick.nbytes
        del sparse
        gc.collect()
        assert m.memory.current_total == scalar.nbytes
    embedding = nn.Embedding(10, 4, sparse=True)
    with md.measure() as m:
        embedding(torch.tensor([1, 2])).sum().backward()
    assert m.memory.current["gradients"] == 2 * 8 + 2 * 4 * 4  # two int64 indices, two rows


# --- without memory: fake tensors ---------------------------------------------------------------


def test_fake_tensors_give_the_numbers_of_real_ones():
    from torch._subclasses.fake_tensor import FakeTensorMode

    def run():
        model = mlp(activation=nn.GELU)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        step(model, optimizer, torch.randn(32, 64))

    def measured():
        with md.measure() as m:
            run()
        return m.memory.as_dict()

    real = measured()
    with FakeTensorMode():
        fake = measured()
    assert fake["peak"]["parameters"] == real["peak"]["parameters"] > 0
    for kind in ("gradients", "optimizer", "activations"):
        assert fake["peak"][kind] == real["peak"][kind] > 0
    assert fake["peak_total"] == real["peak_total"]


def test_a_terabyte_of_fake_parameters():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), md.measure() as m:
        weight = nn.Parameter(torch.empty(500_000, 500_000))
        F.linear(torch.empty(1, 500_000), weight).sum().backward()
    assert m.memory.current["parameters"] == m.memory.current["gradients"] == 10**12


# --- against independent witnesses ----------------------------------------------------------------


class MallocPeak(TorchDispatchMode):
    """The highest malloc'ed bytes at the end of any operation."""

    def __init__(self):
        super().__init__()
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, malloced())
        return out


@pytest.mark.skipif(malloced() is None, reason="mallinfo2 is in glibc only")
def test_total_agrees_with_malloc():
    def run(on_warm=lambda: None):
        model = mlp(512, 2048, 512)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        x = torch.randn(1024, 512)
        for _ in range(3):
            step(model, optimizer, x)

    run()
    gc.collect()
    base = malloced()
    with MallocPeak() as witness:
        with md.measure() as m:
            run()
    assert m.memory.peak_total > 30 * MB
    assert witness.peak - base == pytest.approx(m.memory.peak_total, rel=0.005, abs=0.25 * MB)


def test_kinds_agree_with_torchs_memory_tracker():
    tracker_module = pytest.importorskip("torch.distributed._tools.mem_tracker")
    x = torch.randn(32, 64)

    def build():
        model = mlp(activation=nn.GELU)
        return model, torch.optim.Adam(model.parameters(), foreach=False)

    def run(model, optimizer):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = build()
    run(model, optimizer)
    tracker = tracker_module.MemTracker()
    tracker.track_external(model, optimizer, x)
    with tracker:
        run(model, optimizer)
    theirs = {
        str(getattr(kind, "value", kind)).lower(): value
        for kind, value in tracker.get_tracker_snapshot("peak")[torch.device("cpu")].items()
    }
    model, optimizer = build()
    run(model, optimizer)
    with md.measure(model, optimizer, x) as m:
        run(model, optimizer)
    ours = m.memory
    assert ours.peak_total == theirs["total"]
    assert ours.at_peak["parameters"] == theirs["parameter"]
    assert ours.at_peak["gradients"] == theirs["gradient"]
    # The peak lies inside the step, whose scratch is optimizer state to the tracker.
    assert ours.at_peak["optimizer"] + ours.at_peak["temporary"] == theirs["optstate"] + x.nbytes


def give_back():
    """Memory that was freed may stay with the process, and be taken again unseen."""
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)


@pytest.mark.skipif(resident_bytes() is None, reason="needs /proc or psutil")
def test_a_large_allocation_shows_in_the_resident_memory():
    torch.ones(10).add_(1)
    give_back()
    before = resident_bytes()
    with md.measure() as m:
        block = torch.ones(16 * MB)
        grown = resident_bytes() - before
        assert m.memory.current_total == block.nbytes == 64 * MB
        assert grown == pytest.approx(m.memory.current_total, rel=0.05)
        del block
        assert m.memory.current_total == 0
        give_back()
        assert resident_bytes() - before < 4 * MB


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_agrees_with_the_caching_allocator():
    model = mlp(512, 2048, 512).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(1024, 512, device="cuda")
    for _ in range(2):
        step(model, optimizer, x)
    torch.cuda.reset_peak_memory_stats()
    with md.measure(model, optimizer, x) as m:
        for _ in range(2):
            step(model, optimizer, x)
    assert m.memory.device == "cuda"
    # cuBLAS keeps a workspace that is no tensor, and blocks are rounded to 512 bytes.
    assert torch.cuda.max_memory_allocated() == pytest.approx(
        m.memory.peak_total, rel=0.02, abs=40 * MB
    )


# --- parallel -----------------------------------------------------------------------------------


def test_dtensors_count_their_local_part(run_ranks):
    def run():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        mesh = init_device_mesh("cpu", (2,))
        model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        with md.measure() as m:
            model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
        return dict(m.memory.current)

    half = 4 * 16 * 32  # bytes: two weights of 16 x 32, half of each here
    for current in run_ranks(run, 2):
        assert current["parameters"] == current["gradients"] == half
        assert current["optimizer"] == 2 * half + 2 * 4


def test_fully_sharded_parameters_that_are_gathered_and_freed(run_ranks):
    def run():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with md.measure(model) as m:
            model(torch.randn(4, 64)).sum().backward()
            model.zero_grad()
            for _ in range(200):  # a communication thread may hold its last buffer a little longer
                if m.memory.current_total < 20_000:
                    break
                time.sleep(0.005)
        return dict(m.memory.current), m.memory.current_total, m.memory.peak_total

    for current, total, peak in run_ranks(run, 2):
        shards = 4 * 64 * 64  # half of two weights
        assert current["parameters"] == shards
        assert total < shards + 4096, "gathered weights must be gone"
        assert peak > shards + 4 * 64 * 64  # at least one whole weight on top
