"""Tensor and sequence parallel layers against the serial layer, and the bug reports about them."""

import math

import pytest

WORLDS = (1, 2, 3, 4)
TOLERANCE = {"rtol": 1e-12, "atol": 1e-13}


def _gpt(sequence_parallel, tied, vocab, checkpoint=False):
    """Largest relative difference of the loss from the serial model over four SGD steps."""
    import torch
    from torch.utils.checkpoint import checkpoint as recompute

    import minidist as md
    from minidist.train.model import GPTConfig, build_gpt

    config = GPTConfig(vocab=vocab, seq=12, width=24, layers=2, heads=12, tied=tied)
    serial, model = build_gpt(config, 0, torch.float64), build_gpt(config, 0, torch.float64)
    md.tensor_parallel(model, sequence_parallel=sequence_parallel)
    if checkpoint:
        for block in model.blocks:
            plain = block.forward
            block.forward = lambda x, plain=plain: recompute(plain, x, use_reentrant=False)
    optimizers = [torch.optim.SGD(m.parameters(), 0.5) for m in (serial, model)]
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randint(0, vocab, (2, 3, 12), generator=generator)
    y[0, :3] = -100
    worst = 0.0
    for _ in range(4):
        want = torch.nn.functional.cross_entropy(
            serial(x).flatten(0, 1), y.flatten(), label_smoothing=0.1
        )
        got = md.vocab_parallel_cross_entropy(model(x), y, vocab_size=vocab, label_smoothing=0.1)
        worst = max(worst, abs(got / want - 1).item())
        for loss, optimizer in zip((want, got), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return worst


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gpt_equals_serial(run_ranks, world, sequence_parallel):
    for tied, vocab in ((False, 24), (True, 24), (False, 25), (True, 25)):
        assert max(run_ranks(_gpt, world, sequence_parallel, tied, vocab)) < 1e-12
    assert max(run_ranks(_gpt, world, sequence_parallel, False, 24, checkpoint=True)) < 1e-12


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_column_and_row_gradients(run_ranks, world, sequence_parallel):
    """B64, B65: outputs and all gradients are slices of the serial ones."""

    def body():
        import torch
        from torch import nn

        import minidist as md
        from minidist.parallel.tensor import join_cut, keep_slice

        torch.manual_seed(0)
        up, down = nn.Linear(8, 24).double(), nn.Linear(24, 8).double()
        x = torch.randn(2, 12, 8, dtype=torch.float64)
        target = torch.randn(2, 12, 8, dtype=torch.float64)
        column = md.ColumnParallelLinear.from_module(up, sequence_parallel=sequence_parallel)
        row = md.RowParallelLinear.from_module(down, sequence_parallel=sequence_parallel)
        whole_x = x.clone().requires_grad_()
        want = down(torch.tanh(up(whole_x)))
        (want * target).sum().backward()
        mine_x = (keep_slice(x, -2) if sequence_parallel else x.clone()).detach().requires_grad_()
        cut = (lambda t: keep_slice(t, -2)) if sequence_parallel else (lambda t: t)
        got = row(torch.tanh(column(mine_x)))
        torch.testing.assert_close(got, cut(want), **TOLERANCE)
        (got * cut(target)).sum().backward()
        torch.testing.assert_close(mine_x.grad, cut(whole_x.grad), **TOLERANCE)
        for layer, serial in ((column, up), (row, down)):
            whole = join_cut(layer.weight.grad, layer.weight.tp_cut)
            torch.testing.assert_close(whole, serial.weight.grad, **TOLERANCE)
        bias = join_cut(column.bias.grad, column.bias.tp_cut)
        torch.testing.assert_close(bias, up.bias.grad, **TOLERANCE)
        torch.testing.assert_close(row.bias.grad, down.bias.grad, **TOLERANCE)
        return mine_x.grad.tolist()

    grads = run_ranks(body, world)
    if sequence_parallel and world > 1:
        assert grads[0] != grads[1]  # the bug gave every rank the same


@pytest.mark.parametrize("world", [1, 2, 4])
def test_initial_values_are_the_serial_ones(run_ranks, world):
    """B57: concatenated shards equal nn.Linear and nn.Embedding bit for bit, for the same seed."""

    def body():
        import torch
        from torch import nn

        import minidist as md
        from minidist.parallel.tensor import join_cut

        shards = []
        for ours, serial, sizes in (
            (md.ColumnParallelLinear, nn.Linear, (16, 32)),
            (md.RowParallelLinear, nn.Linear, (1024, 32)),
            (md.VocabParallelEmbedding, nn.Embedding, (30, 8)),
        ):
            torch.manual_seed(5)
            whole = serial(*sizes)
            after = torch.rand(1)
            torch.manual_seed(5)
            layer = ours(*sizes)
            assert torch.equal(torch.rand(1), after)  # as many numbers drawn as serially
            assert torch.equal(join_cut(layer.weight, layer.weight.tp_cut), whole.weight)
            shards.append(layer.weight.tolist())
        return shards

    ranks = run_ranks(body, world)
    for layer in range(3):
        values = [str(shards[layer]) for shards in ranks]
        assert len(set(values)) == world


def test_row_bias_gradient_counts_once(run_ranks):
    """B60: batch of 3, loss = sum of outputs: dL/db = 3 (1.5 and 6 are the bugs)."""

    def body(sequence_parallel):
        import torch

        import minidist as md
        from minidist.comm import collectives as coll

        row = md.RowParallelLinear(4, 2, sequence_parallel=sequence_parallel)
        tokens = 4 if sequence_parallel else 3
        row(torch.ones(tokens, 4 // coll.world_size())).sum().backward()
        return row.bias.grad.tolist()

    assert run_ranks(body, 2, False) == [[3.0, 3.0]] * 2
    assert run_ranks(body, 2, True) == [[4.0, 4.0]] * 2


def test_entry_sums_the_input_gradient_once(run_ranks):
    """B65: x=1, rows 1 and 2, loss = sum(y): dx = 3 on both ranks (1 and 2, or 6, are the bugs)."""

    def body(exit_too):
        import torch
        from torch import nn

        import minidist as md

        full = nn.Linear(1, 2, bias=False)
        full.weight.data = torch.tensor([[1.0], [2.0]])
        column = md.ColumnParallelLinear.from_module(full, gather_output=exit_too)
        x = torch.ones(1, 1, requires_grad=True)
        column(x).sum().backward()
        return x.grad.item()

    assert run_ranks(body, 2, False) == [3.0, 3.0]
    assert run_ranks(body, 2, True) == [3.0, 3.0]


def test_missing_entry_is_caught(run_ranks):
    """Without f the layers before a column cut train on a part of their gradient."""

    def body():
        from minidist.comm import collectives as coll
        from minidist.parallel import tensor

        class NoSum:
            def __getattr__(self, name):
                return getattr(coll, name)

            def all_reduce(self, x, *args, async_op=False, by="", **options):
                if by == "tp f backward":
                    return coll.Work(x, None, [])
                return coll.all_reduce(x, *args, async_op=async_op, by=by, **options)

        tensor.coll = NoSum()
        try:
            return _gpt(False, False, 24)
        finally:
            tensor.coll = coll

    assert min(run_ranks(body, 2)) > 1e-6


def test_bias_added_n_times_is_caught(run_ranks):
    def body():
        import torch
        from torch import nn

        import minidist as md

        full = nn.Linear(4, 3)
        row = md.RowParallelLinear.from_module(full)
        x = torch.randn(2, 4)
        torch.distributed.broadcast(x, 0)
        mine = x.chunk(2, -1)[torch.distributed.get_rank()]
        partial = nn.functional.linear(mine, row.weight, row.bias)  # bias before the sum
        torch.distributed.all_reduce(partial)
        right = torch.allclose(row(mine), full(x), atol=1e-6)
        return right and not torch.allclose(partial, full(x), atol=1e-3)

    def same_start():
        import torch

        torch.manual_seed(0)
        return body()

    assert all(run_ranks(same_start, 2))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_vocabulary_parallel_loss(run_ranks, world):
    """B61: no padding classes in the softmax, a global maximum, translated indices."""

    def body():
        import torch
        import torch.nn.functional as F

        import minidist as md
        from minidist.comm import collectives as coll

        rank, n = coll.rank(), coll.world_size()
        vocab = 5
        width = -(-vocab // n)

        def loss(full, targets, **options):
            padded = F.pad(full, (0, width * n - vocab), value=7.0)  # garbage in the padding
            mine = padded.chunk(n, -1)[rank].clone().requires_grad_()
            value = md.vocab_parallel_cross_entropy(mine, targets, vocab_size=vocab, **options)
            value.backward()
            return value.item(), mine.grad

        zeros, grad = loss(torch.zeros(1, vocab, dtype=torch.float64), torch.tensor([3]))
        big, _ = loss(
            torch.tensor([[1000.0, 0, 0, -1000, 0]], dtype=torch.float64), torch.tensor([1])
        )
        torch.manual_seed(0)
        logits = torch.randn(6, vocab, dtype=torch.float64)
        targets = torch.tensor([0, 1, 2, 3, 4, -100])
        for smoothing in (0.0, 0.2):
            serial = logits.clone().requires_grad_()
            want = F.cross_entropy(serial, targets, label_smoothing=smoothing)
            want.backward()
            got, grad = loss(logits, targets, label_smoothing=smoothing)
            assert abs(got / want.item() - 1) < 1e-12
            padded = F.pad(serial.grad, (0, width * n - vocab)).chunk(n, -1)[rank]
            torch.testing.assert_close(grad, padded, **TOLERANCE)
        return zeros, big

    for zeros, big in run_ranks(body, world):
        assert zeros == pytest.approx(math.log(5), abs=1e-12)  # ln 6 with a phantom class
        assert big == pytest.approx(1000.0)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_vocabulary_parallel_embedding(run_ranks, world):
    def body():
        import torch
        from torch import nn

        import minidist as md
        from minidist.parallel.tensor import join_cut

        torch.manual_seed(0)
        full = nn.Embedding(7, 4, padding_idx=5).double()
        mine = md.VocabParallelEmbedding.from_module(full)
        tokens = torch.tensor([[0, 5, 6, 3], [5, 1, 2, 6]])
        scale = torch.randn(2, 4, 4, dtype=torch.float64)
        (full(tokens) * scale).sum().backward()
        out = mine(tokens)
        assert torch.equal(out, full(tokens))
        (out * scale).sum().backward()
        grad = join_cut(mine.weight.grad, mine.weight.tp_cut)
        torch.testing.assert_close(grad, full.weight.grad, **TOLERANCE)
        assert full.weight.grad[5].eq(0).all()
        messages = []
        for call in (
            lambda: mine(torch.tensor([7])),
            lambda: md.vocab_parallel_cross_entropy(torch.zeros(1, 2), torch.tensor([99])),
        ):
            try:
                call()
            except IndexError as error:
                messages.append(str(error))
        return messages

    for messages in run_ranks(body, world):
        assert "7 in a vocabulary of 7" in messages[0] and "99" in messages[1]


def test_gather_lets_gradients_through(run_ranks):
    """B67: every rank computes (z0+z1)^2, gradients averaged: 18 (9 and 36 are the bugs)."""

    def body(first_only):
        import torch

        from minidist.comm import collectives as coll
        from minidist.parallel.tensor import gather_slices

        rank = coll.rank()
        w = torch.tensor(1.0, requires_grad=True)
        z = gather_slices((w * (rank + 1)).view(1), 0)
        loss = z.sum() ** 2
        if first_only and rank:
            loss = loss * 0
        loss.backward()
        return coll.all_reduce(w.grad.clone(), "mean").item()

    assert run_ranks(body, 2, False) == [18.0, 18.0]
    assert run_ranks(body, 2, True) == [9.0, 9.0]  # the mean of the losses 9 and 0 is half as large


def test_dropout_streams(run_ranks):
    """Different on shards, the same on replicas, the same again on recompute."""

    def body():
        import torch
        from torch import nn
        from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

        import minidist as md

        torch.manual_seed(3)
        drop, ones = nn.Dropout(0.5), torch.ones(64)
        before = drop(ones).tolist()
        with md.tp_rng():
            sharded = drop(ones).tolist()
        after = drop(ones).tolist()
        masks = []

        def forward(x):
            with md.tp_rng():
                y = drop(x)
            masks.append((y != 0).tolist())
            return y

        x = torch.ones(64, requires_grad=True)
        with set_checkpoint_early_stop(False):
            checkpoint(forward, x, use_reentrant=False).sum().backward()
        return before, sharded, after, masks[0] == masks[1], (x.grad != 0).tolist() == masks[0]

    first, second = run_ranks(body, 2)
    assert first[0] == second[0] and first[2] == second[2]
    assert first[1] != second[1] and first[0] != first[2]
    assert all(first[3:]) and all(second[3:])
    assert run_ranks(body, 2)[0] == first  # one seed reproduces everything


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_of_a_block(run_ranks, world):
    """8 b s h (t-1)/t elements per layer and step, the same with sequence parallel (Narayanan 3.2);
    with it the column layers gather their input once more in backward."""

    def body(sequence_parallel):
        import torch

        import minidist as md
        from minidist.train.model import GPTConfig, build_gpt

        config = GPTConfig(vocab=16, seq=8, width=16, layers=1, heads=4)
        model = build_gpt(config, 0)
        md.tensor_parallel(model, sequence_parallel=sequence_parallel)
        x = torch.randn(
            2, 8 // (torch.distributed.get_world_size() if sequence_parallel else 1), 16
        )
        block = model.blocks[0]
        with md.measure() as meter:
            block(x.requires_grad_()).sum().backward()
        return {op: t.sent_bytes for op, t in meter.traffic.by_op.items()}

    tensor = 2 * 8 * 16 * 4
    share = tensor * (world - 1) // world
    for sent in run_ranks(body, world, False):
        assert sent == {"all_reduce": 4 * 2 * share}
    for sent in run_ranks(body, world, True):
        norms_and_biases = 6 * 2 * 16 * 4 * (world - 1) // world
        assert sent["reduce_scatter"] == 4 * share
        assert sent["all_gather"] == (4 + 2) * share
        assert sent["all_reduce"] == norms_and_biases


def test_sizes_that_cannot_be_cut(run_ranks):
    def body():
        import torch
        from torch import nn

        import minidist as md
        from minidist.parallel.tensor import sum_slices
        from minidist.train.model import GPTConfig, build_gpt

        model = build_gpt(GPTConfig(heads=4))
        messages = []
        for call in (
            lambda: md.ColumnParallelLinear(4, 5),
            lambda: md.RowParallelLinear(5, 4),
            lambda: md.ColumnParallelLinear.from_module(nn.Linear(4, 12), parts=3),
            lambda: md.tensor_parallel(model),
            lambda: sum_slices(torch.ones(5, 2), 0),
            lambda: md.vocab_parallel_cross_entropy(torch.ones(2, 3), torch.ones(3).long()),
        ):
            try:
                call()
                messages.append("no error")
            except ValueError as error:
                messages.append(str(error))
        assert isinstance(model.embed.token, nn.Embedding)  # nothing changed before the refusal
        return messages

    parts = ["out_features=5", "in_features=5", "3 part(s)", "4 heads", "(5, 2)", "targets (3,)"]
    for messages in run_ranks(body, 3):
        for message, part in zip(messages, parts, strict=True):
            assert part in message or (part == "3 part(s)" and "no error" not in message), message


def test_a_part_or_an_already_cut_model_is_refused(run_ranks):
    def body():
        import torch

        import minidist as md
        from minidist.train.model import GPTConfig, build_gpt

        cut = md.tensor_parallel(build_gpt(GPTConfig(vocab=8, seq=4, width=8, layers=2, heads=4)))
        before = [p.detach().clone() for p in cut.parameters()]
        stage = md.split(build_gpt(GPTConfig(vocab=8, seq=4, width=8, layers=2, heads=4)), 2)[0]
        messages = []
        for model in (stage, torch.nn.Linear(2, 2), cut):
            with pytest.raises(ValueError) as caught:
                md.tensor_parallel(model)
            messages.append(str(caught.value))
        assert all(map(torch.equal, before, cut.parameters()))
        return messages

    for stage, linear, twice in run_ranks(body, 2):
        assert "this Stage has no config" in stage and "before md.split" in stage
        assert "this Linear has no" in linear and "from_module" in linear
        assert "already cut" in twice
