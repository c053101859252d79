"""The model, the data, the sampler and the batch arithmetic (bug reports B49, B51, B54, B55)."""

import contextlib
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minidist.train.data import DistributedSampler, TextBatches, load_tokens
from minidist.train.model import GPT, GPTConfig, build_gpt, loss_fn
from minidist.train.optim import (
    Warmup,
    accumulate,
    scale_lr,
    seed_all,
    token_mean_scale,
    windows,
)

# --- model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_parameter_count_is_the_formula(tied):
    config = GPTConfig(vocab=31, seq=9, width=12, layers=3, heads=2, tied=tied)
    model = build_gpt(config)
    assert sum(p.numel() for p in model.parameters()) == config.parameters
    assert (model.head.lm.weight is model.embed.token.weight) == tied


def test_layers_in_turn_are_the_forward():
    model = build_gpt(GPTConfig())
    x = tokens = torch.randint(0, 256, (2, 64))
    for layer in model.layers():
        x = layer(x)
    assert torch.equal(x, model(tokens))
    assert len(model.layers()) == 6


def test_same_weights_from_seed_in_every_dtype_and_stream_untouched():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    single, double = build_gpt(GPTConfig(), 3), build_gpt(GPTConfig(), 3, torch.float64)
    assert torch.equal(torch.rand(3), expected)
    other = build_gpt(GPTConfig(), 4)
    for (name, a), b in zip(single.named_parameters(), double.parameters(), strict=True):
        assert torch.equal(a.double(), b), name
    assert not torch.equal(single.head.lm.weight, other.head.lm.weight)


def test_attention_is_causal_and_starts_near_uniform():
    config = GPTConfig()
    model = build_gpt(config)
    tokens = torch.randint(0, 256, (2, 64))
    changed = tokens.clone()
    changed[:, 40] = (changed[:, 40] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40:], after[:, 40:])
    assert abs(loss_fn(before, tokens).item() - 5.545) < 0.1  # ln 256


def test_attention_equals_its_definition():
    config = GPTConfig(width=24, heads=3)
    attention = build_gpt(config, dtype=torch.float64).blocks[0].attention
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    q, k, v = attention.qkv(x).chunk(3, -1)  # [3, heads, head_dim]: thirds are q, k and v
    heads = []
    for head in range(3):
        cut = slice(8 * head, 8 * head + 8)
        scores = q[..., cut] @ k[..., cut].transpose(1, 2) / 8**0.5
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
        heads.append(scores.softmax(-1) @ v[..., cut])
    torch.testing.assert_close(attention(x), attention.proj(torch.cat(heads, -1)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"width": 10, "heads": 4}, "10 is not a multiple of 4"),
        ({"layers": 0}, "layers"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_impossible_shapes_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        GPTConfig(**arguments)


def test_builds_on_meta():
    with torch.device("meta"):
        model = GPT(GPTConfig(width=4096, heads=32, layers=2))
    assert all(p.is_meta for p in model.parameters())


# --- data -------------------------------------------------------------------------------------


def test_global_batch_is_the_same_for_every_number_of_ranks():
    batches = TextBatches(load_tokens(), seq=32, batch=12, seed=7)
    inputs, targets = batches.at(5)
    assert inputs.dtype == torch.int64 and inputs.shape == targets.shape == (12, 32)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for world in (2, 3, 4, 6):
        parts = [batches.at(5, rank, world) for rank in range(world)]
        assert torch.equal(torch.cat([p[0] for p in parts]), inputs)
        assert torch.equal(torch.cat([p[1] for p in parts]), targets)
    assert not torch.equal(batches.at(6)[0], inputs)
    assert not torch.equal(TextBatches(load_tokens(), 32, 12, seed=8).at(5)[0], inputs)


def test_shortest_possible_text_is_used_to_its_last_token():
    inputs, targets = TextBatches(torch.arange(5), seq=4, batch=2).at(0)
    assert inputs.tolist() == [[0, 1, 2, 3]] * 2 and targets.tolist() == [[1, 2, 3, 4]] * 2


def test_text_that_cannot_be_used(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.txt"):
        load_tokens(tmp_path / "nowhere.txt")
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"empty\.txt"):
        load_tokens(tmp_path / "empty.txt")
    with pytest.raises(ValueError, match="4 tokens.*needs 5"):
        TextBatches(torch.arange(4), seq=4, batch=1)
    with pytest.raises(ValueError, match="10 does not divide among 4"):
        TextBatches(torch.arange(99), seq=4, batch=10).at(0, 0, 4)


# --- sampler (B54) ----------------------------------------------------------------------------


def epoch_of(world, epoch, start=0, items=10, **options):
    """What each rank visits, with the ranks' global streams seeded differently as in the report."""
    visits, masks = [], []
    for rank in range(world):
        torch.manual_seed(100 + rank)
        sampler = DistributedSampler(items, rank=rank, world_size=world, seed=3, **options)
        sampler.set_epoch(epoch, start)
        visits.append(list(sampler))
        masks.append(sampler.mask.tolist())
        assert len(sampler) == len(visits[-1]) == len(masks[-1])
    return visits, masks


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_b54_ranks_cover_the_data_without_overlap(epoch):
    visits, masks = epoch_of(3, epoch)
    assert [len(v) for v in visits] == [4, 4, 4]
    everything = [item for visit in visits for item in visit]
    assert set(everything) == set(range(10)) and len(everything) == 12
    real = [i for v, m in zip(visits, masks, strict=True) for i, r in zip(v, m, strict=True) if r]
    assert sorted(real) == list(range(10))  # without the two padded repeats: each item once
    dropped, _ = epoch_of(3, epoch, drop_last=True)
    flat = [item for visit in dropped for item in visit]
    assert [len(v) for v in dropped] == [3, 3, 3] and len(set(flat)) == 9


def test_b54_order_depends_on_seed_and_epoch_only():
    orders = [epoch_of(3, epoch)[0] for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    code = (
        "from minidist.train.data import DistributedSampler\n"
        "s = DistributedSampler(10, rank=1, world_size=3, seed=3); s.set_epoch(2); print(list(s))"
    )
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert fresh.stdout.strip() == str(orders[2][1])
    # The items of one global step are the same whatever the number of ranks.
    two, one = epoch_of(2, 1)[0], epoch_of(1, 1)[0][0]
    assert [i for pair in zip(*two, strict=True) for i in pair] == one


@pytest.mark.parametrize("drop_last", [False, True])
def test_b54_resume_in_mid_epoch(drop_last):
    whole, masks = epoch_of(3, 1, drop_last=drop_last)
    resumed, resumed_masks = epoch_of(3, 1, start=6, drop_last=drop_last)
    assert resumed == [visit[2:] for visit in whole]
    assert resumed_masks == [mask[2:] for mask in masks]
    # With another number of ranks: what is left, each item once.
    rest, rest_masks = epoch_of(2, 1, start=6)
    left = [
        i for v, m in zip(rest, rest_masks, strict=True) for i, r in zip(v, m, strict=True) if r
    ]
    done = {item for visit in whole for item in visit[:2]}
    assert sorted(left) == sorted(set(range(10)) - done)


def test_b54_more_ranks_than_items_and_consumed():
    visits, masks = epoch_of(7, 0, items=2)
    assert all(len(v) == 1 for v in visits) and sum(m[0] for m in masks) == 2
    sampler = DistributedSampler(100, rank=0, world_size=4)
    sampler.set_epoch(0, start=40)
    assert sampler.consumed(batches=2, batch=5) == 80
    assert list(DistributedSampler(0, rank=0, world_size=2)) == []
    with pytest.raises(ValueError, match="rank 4"):
        DistributedSampler(10, rank=4, world_size=4)
    with pytest.raises(ValueError, match="epoch"):
        sampler.set_epoch(0, start=101)


# --- learning rates ---------------------------------------------------------------------------


def test_scale_lr_and_warmup():
    assert scale_lr(0.1, 256, 8192) == pytest.approx(3.2)  # Goyal 2017: 32 x 256 images
    assert scale_lr(0.1, 256, 1024, rule="sqrt") == pytest.approx(0.2)
    assert scale_lr(0.1, 256, 64) == pytest.approx(0.025)
    ramp = Warmup(3.2, steps=4, start_lr=0.0)
    assert [ramp(s) for s in range(6)] == pytest.approx([0.8, 1.6, 2.4, 3.2, 3.2, 3.2])
    assert Warmup(0.5)(0) == 0.5
    with pytest.raises(ValueError, match="unknown rule 'cubic'.*linear, sqrt"):
        scale_lr(0.1, 256, 512, rule="cubic")
    with pytest.raises(ValueError, match="positive"):
        scale_lr(0.1, 0, 512)


# --- mean over tokens (B49) -------------------------------------------------------------------


def token_mean_gradient(x_of_rank, mask_of_rank):
    """Gradient of the mean over all tokens of w * x, by helper and averaging wrapper."""
    import torch.distributed as dist

    from minidist.comm import collectives as coll

    me = dist.get_rank()
    w = nn.Parameter(torch.ones((), dtype=torch.float64))
    window = [
        (torch.tensor(x, dtype=torch.float64), torch.tensor(m))
        for x, m in zip(x_of_rank[me], mask_of_rank[me], strict=True)
    ]
    scale = token_mean_scale([int(mask.sum()) for _, mask in window])
    for x, mask in window:
        ((w * x)[mask.bool()].sum() * scale).backward()
    coll.all_reduce(w.grad, "mean")  # what DDP does
    return float(w.grad)


def test_b49_five_tokens_and_one(run_ranks):
    # Sum of x over six tokens: 5 * 1 + 7 = 12, mean 2. The mean of the ranks' means would be 4.
    xs = [[[1.0] * 5], [[7.0]]]
    masks = [[[1] * 5], [[1]]]
    assert run_ranks(token_mean_gradient, 2, xs, masks) == pytest.approx([2.0, 2.0], rel=1e-15)


def test_b49_two_micro_steps_and_padding(run_ranks):
    # Valid tokens 3 and 1 on rank 0, 2 and 4 on rank 1; padding carries 100 and must not count.
    xs = [[[1, 2, 3, 100.0], [10, 100, 100, 100.0]], [[4, 5, 100, 100.0], [1, 1, 1, 1.0]]]
    masks = [[[1, 1, 1, 0], [1, 0, 0, 0]], [[1, 1, 0, 0], [1, 1, 1, 1]]]
    expected = (1 + 2 + 3 + 10 + 4 + 5 + 4) / 10
    for gradient in run_ranks(token_mean_gradient, 2, xs, masks):
        assert gradient == pytest.approx(expected, rel=1e-15)


def test_b49_rank_without_tokens_and_nobody_with_tokens(run_ranks):
    xs = [[[5.0, 7.0]], [[9.0, 9.0]]]
    assert run_ranks(token_mean_gradient, 2, xs, [[[1, 1]], [[0, 0]]]) == [6.0, 6.0]
    assert run_ranks(token_mean_gradient, 2, xs, [[[0, 0]], [[0, 0]]]) == [0.0, 0.0]


# --- accumulation (B51) -----------------------------------------------------------------------


class Syncs:
    """Stands for a wrapper: counts backwards inside and outside no_sync."""

    def __init__(self):
        self.quiet, self.log = False, []

    @contextlib.contextmanager
    def no_sync(self):
        self.quiet = True
        yield
        self.quiet = False


@pytest.mark.parametrize(("count", "size", "updates"), [(5, 2, 3), (3, 4, 1), (4, 2, 2)])
def test_b51_last_window_is_divided_by_its_true_length(count, size, updates):
    wrapper, w, gradients = Syncs(), nn.Parameter(torch.zeros(())), []

    def loss_of(batch):
        wrapper.log.append(wrapper.quiet)
        return w * batch

    for window in windows([torch.ones(())] * count, size):
        accumulate(window, loss_of, wrapper.no_sync)
        gradients.append(float(w.grad))
        assert wrapper.log[-1] is False  # every window ends with a reduction
        w.grad = None
    assert gradients == [1.0] * updates  # 0.5 at the end is the bug
    assert wrapper.log.count(False) == updates and len(wrapper.log) == count


def test_b51_two_ranks_reduce_once_per_window(run_ranks):
    def work():
        from minidist.comm import ledger
        from minidist.parallel.ddp import DDP

        model = DDP(nn.Linear(1, 1, bias=False))
        reductions, gradients = [], []

        def watch(record):
            if record.op in ("all_reduce", "reduce_scatter"):
                reductions.append(record.op)

        ledger.subscribe(watch)
        try:
            for window in windows([torch.ones(1, 1)] * 5, 2):
                reductions.clear()
                loss = accumulate(window, lambda x: model(x).sum(), model.no_sync)
                assert loss.ndim == 0
                gradients.append((float(model.module.weight.grad), len(reductions)))
                model.module.weight.grad = None
        finally:
            ledger.unsubscribe(watch)
        return gradients

    assert run_ranks(work, 2) == [[(1.0, 1)] * 3] * 2


def test_empty_windows_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        list(windows([1], 0))
    with pytest.raises(ValueError, match="at least one"):
        accumulate([], lambda batch: batch)


# --- random streams (B55) ---------------------------------------------------------------------


def weights_and_masks(seed, rank=None):
    with seed_all(seed, rank=rank):
        weight = nn.Linear(8, 8).weight.detach().clone()
    masks = [F.dropout(torch.ones(64), 0.5) for _ in range(2)]
    return weight, masks


def test_b55_equal_weights_different_masks():
    first, second, again = (weights_and_masks(0, rank) for rank in (0, 1, 0))
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1][0], second[1][0])  # between ranks
    assert not torch.equal(first[1][0], first[1][1])  # between steps
    assert torch.equal(first[1][0], again[1][0]) and torch.equal(first[1][1], again[1][1])
    # Neighbouring seeds and ranks do not meet: seed + rank would make these equal.
    assert not torch.equal(weights_and_masks(1, 0)[1][0], second[1][0])


def test_b55_on_ranks(run_ranks):
    runs = [run_ranks(weights_and_masks, 2, 0) for _ in range(2)]
    for a, b in [(runs[0][0], runs[1][0]), (runs[0][1], runs[1][1])]:
        assert torch.equal(a[0], b[0]) and torch.equal(a[1][1], b[1][1])
    assert torch.equal(runs[0][0][0], runs[0][1][0])
    assert not torch.equal(runs[0][0][1][0], runs[0][1][1][0])


# --- activations ------------------------------------------------------------------------------


def saved_bytes(model, run):
    """Bytes that autograd keeps of one forward pass, each storage once, parameters left out."""
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage  # held, or its address could be used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_activation_formula_is_what_autograd_saves(dtype, tied):
    from minidist.train.activations import activation_bytes

    for shape in [{}, {"width": 48, "heads": 3, "layers": 2, "vocab": 50, "seq": 20}]:
        config = GPTConfig(**shape, tied=tied)
        model = build_gpt(config, dtype=dtype)
        for batch, seq in [(2, config.seq), (3, config.seq - 7)]:
            inputs = torch.randint(0, config.vocab, (batch, seq))
            targets = torch.randint(0, config.vocab, (batch, seq))
            saved = saved_bytes(model, lambda i=inputs, t=targets, m=model: loss_fn(m(i), t))
            assert saved == activation_bytes(config, batch, seq, dtype)
    with pytest.raises(ValueError, match="dropout"):
        activation_bytes(GPTConfig(dropout=0.1), 1, 64)
