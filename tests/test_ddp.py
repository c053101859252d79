"""DDP's mechanism: parity with one process, traffic, overlap, memory, buckets, wrapping, copying.

The checks are also run against broken versions: see `test_the_checks_can_fail`.
"""

import copy
import io
import pickle
import time

import pytest
import torch
import torch.distributed as dist
from ddp_models import (
    TOLERANCE,
    check_equal,
    inputs,
    make,
    serial,
    train,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import minidist as md
from minidist.comm import collectives as coll
from minidist.comm import ledger
from minidist.parallel import hooks
from minidist.parallel.buckets import plan_buckets

WORLDS = [1, 2, 3, 4]


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
