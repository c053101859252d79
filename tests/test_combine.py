"""dp x pp x tp against one process: losses, norms, weights, state under original names."""

import pytest

TOLERANCE = 1e-10  # float64; sums over ranks run in another order than in one process

LAYOUTS = [  # (dp, pp, tp)
    (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (3, 1, 1),
    (1, 1, 4), (1, 4, 1),
]  # fmt: skip


def _train(layout, dp, schedule="1f1b", chunks=1, tied=False, sequence_parallel=False, steps=3):
    """Largest relative difference from one process over losses, norms and final weights."""
    import torch

    import minidist as md
    from minidist.train.model import GPTConfig, build_gpt, loss_fn

    config = GPTConfig(vocab=30, seq=8, width=16, layers=4, heads=4, tied=tied)
    serial, mine = (build_gpt(config, 0, torch.float64) for _ in range(2))
    mesh = md.build_mesh(*layout)
    parallel = md.parallelize(
        mine, mesh, dp=dp, schedule=schedule, chunks=chunks, microbatches=4,
        sequence_parallel=sequence_parallel,
    )  # fmt: skip
    # SGD with momentum: a wrong scale of the gradient shows at once, Adam would hide it.
    options = {"lr": 0.5, "momentum": 0.9}
    optimizers = (
        torch.optim.SGD(serial.parameters(), **options),
        parallel.optimizer(torch.optim.SGD, **options),
    )
    generator = torch.Generator().manual_seed(1)
    worst, dp_rank = 0.0, mesh["dp"].get_local_rank()
    for _ in range(steps):
        x, y = torch.randint(0, 30, (2, 4 * layout[0], 8), generator=generator)
        want = loss_fn(serial(x), y)
        want.backward()
        want_norm = torch.nn.utils.clip_grad_norm_(serial.parameters(), 0.5)
        got = parallel.step(x.chunk(layout[0])[dp_rank], y.chunk(layout[0])[dp_rank])
        norm = parallel.clip_grad_norm_(0.5)
        worst = max(worst, abs(norm / want_norm - 1).item())
        if got is not None:
            mean = md.comm.collectives.all_reduce(got.clone(), "mean", group=mesh["dp"])
            worst = max(worst, abs(mean / want - 1).item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = parallel.full_state_dict()
    assert list(state) and set(state) == set(serial.state_dict())
    for name, value in serial.state_dict().items():
        worst = max(worst, ((state[name] - value).abs().max() / value.abs().max()).item())
    parallel.load_full_state_dict(build_gpt(config, 7, torch.float64).state_dict())
    again, fresh = parallel.full_state_dict(), build_gpt(config, 7, torch.float64).state_dict()
    assert all(torch.equal(again[name], fresh[name]) for name in fresh)
    return worst


def _ranks(layout):
    return layout[0] * layout[1] * layout[2]


@pytest.mark.parametrize("dp", ["ddp", "zero1", "zero2", "fsdp"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_equals_one_process(run_ranks, layout, dp):
    assert max(run_ranks(_train, _ranks(layout), layout, dp, timeout=60)) < TOLERANCE


@pytest.mark.parametrize("dp", ["ddp", "zero1", "zero2", "fsdp"])
def test_three_axes_on_eight_ranks(run_ranks, dp):
    assert max(run_ranks(_train, 8, (2, 2, 2), dp, timeout=90)) < TOLERANCE


@pytest.mark.parametrize("dp", ["ddp", "zero1"])
@pytest.mark.parametrize("layout", [(1, 2, 1), (2, 2, 1), (1, 2, 2), (1, 1, 2)], ids=str)
def test_tied_embedding_and_head(run_ranks, layout, dp):
    result = run_ranks(_train, _ranks(layout), layout, dp, tied=True, timeout=60)
    assert max(result) < TOLERANCE


@pytest.mark.parametrize(
    "schedule,chunks", [("gpipe", 1), ("naive", 1), ("interleaved", 2), ("zb-h1", 1)]
)
@pytest.mark.parametrize("dp", ["ddp", "zero2", "fsdp"])
def test_schedules_under_data_parallel(run_ranks, schedule, chunks, dp):
    if (dp, schedule) == ("fsdp", "zb-h1"):
        pytest.skip("refused, see test_refusals")
    result = run_ranks(_train, 4, (2, 2, 1), dp, schedule=schedule, chunks=chunks, timeout=60)
    assert max(result) < TOLERANCE


@pytest.mark.parametrize("layout", [(1, 1, 4), (2, 1, 2), (1, 2, 2)], ids=str)
def test_sequence_parallel(run_ranks, layout):
    result = run_ranks(_train, _ranks(layout), layout, "ddp", sequence_parallel=True, timeout=60)
    assert max(result) < TOLERANCE


def test_norm_counts_replicas_once(run_ranks):
    """Sharded gradients 3 and 4 and a replicated one of 12: 13 (17.69 and 12.51 are the bugs)."""

    def body(dp):
        import torch
        from torch import nn

        import minidist as md
        from minidist.parallel.combine import Parallel
        from minidist.parallel.tensor import Cut

        mesh = md.build_mesh(dp=dp, tp=2)
        model = nn.ParameterDict({"cut": torch.zeros(1), "whole": torch.zeros(1)})
        parallel = Parallel.__new__(Parallel)
        nn.Module.__init__(parallel)
        parallel.mesh, parallel.strategy, parallel.pipeline = mesh, "ddp", None
        parallel.cuts, parallel._optimizer = {"cut": Cut(0, 1, 2)}, None
        parallel.stages = nn.ModuleList([model])
        model["cut"].grad = torch.tensor([3.0 + mesh["tp"].get_local_rank()])
        model["whole"].grad = torch.tensor([12.0])
        return parallel.clip_grad_norm_(1e9).item()

    assert run_ranks(body, 2, 1) == [13.0] * 2
    assert run_ranks(body, 4, 2) == [13.0] * 4


def test_shard_switch(run_ranks):
    def body():
        import torch

        import minidist as md
        from minidist.train.model import GPTConfig, build_gpt, loss_fn

        config = GPTConfig(vocab=30, seq=8, width=16, layers=2, heads=2)
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randint(0, 30, (2, 6, 8), generator=generator)
        rank, n = md.comm.collectives.rank(), md.comm.collectives.world_size()
        losses = {}
        for strategy in ("ddp", "zero1", "zero2", "zero3", "fsdp"):
            model, optimizer = md.shard(
                build_gpt(config, 0, torch.float64), torch.optim.AdamW, strategy, lr=0.01
            )
            for _ in range(3):
                loss_fn(model(x.chunk(n)[rank]), y.chunk(n)[rank]).backward()
                optimizer.step()
                optimizer.zero_grad()
            losses[strategy] = loss_fn(model(x), y).item()
        serial = build_gpt(config, 0, torch.float64)
        optimizer = torch.optim.AdamW(serial.parameters(), lr=0.01)
        for _ in range(3):
            loss_fn(serial(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        want = loss_fn(serial(x), y).item()
        return max(abs(loss / want - 1) for loss in losses.values())

    for world in (1, 2, 3):
        assert max(run_ranks(body, world)) < TOLERANCE


def test_refusals(run_ranks):
    def body():
        import torch

        import minidist as md
        from minidist.train.model import GPTConfig, build_gpt

        messages = []
        tied = build_gpt(GPTConfig(layers=2, tied=True))
        for call in (
            lambda: md.shard(tied, torch.optim.SGD, "zero4", lr=0.1),
            lambda: md.parallelize(tied, md.build_mesh(pp=2), dp="fsdp"),
            lambda: md.parallelize(build_gpt(GPTConfig(heads=1)), md.build_mesh(tp=2)),
            lambda: md.parallelize(build_gpt(GPTConfig()), md.build_mesh(pp=2), schedule="2f2b"),
            lambda: md.parallelize(
                build_gpt(GPTConfig()), md.build_mesh(pp=2), schedule="zb-h1", dp="fsdp"
            ),
        ):
            try:
                call()
            except ValueError as error:
                messages.append(str(error))
        return messages

    for messages in run_ranks(body, 2):
        assert len(messages) == 5
        parts = ["'zero4'", "tied", "1 heads", "2f2b", "zb-h1"]
        for message, part in zip(messages, parts, strict=True):
            assert part in message
