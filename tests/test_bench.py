"""The benchmark harness: right contestants, right arithmetic, nobody can win by computing less."""

import io
import json
import re
import time
from functools import partial

import pytest
import torch
from rich.console import Console

from minidist.cli import main
from minidist.comm import collectives as coll
from minidist.comm.launch import RankFailure
from minidist.comm.tuning import tuned
from minidist.measure import bench, bench_data_parallel, bench_model_parallel, bench_report
from minidist.measure.bench import Contestant, Outcome, Skip
from minidist.measure.commands import SMALL

KEYS = {
    "name", "world", "ours_seconds", "peers", "best_peer", "ratio_to_best_peer", "floor_seconds",
    "ratio_to_floor", "ours_peak_bytes", "best_peer_peak_bytes",
}  # fmt: skip


def outcome(role, rounds, factor=1.0, **more):
    """As launched, a peer is half as fast here."""
    turns = [t for r in rounds for t in r]
    launched = [[2 * t for t in r] for r in rounds if role == "peer"]
    idle = [0.0] * len(turns)
    return Outcome(role, factor, rounds, [t / 2 for t in turns], idle, launched, **more)


def test_ratio_is_of_medians_per_round_then_median_over_rounds():
    row = bench.summarise(
        "ddp",
        2,
        {
            "compute": outcome("floor", [[1.0, 1.0], [2.0, 2.0], [1.0, 1.0]], factor=1.5),
            "reduce": outcome("floor", [[0.5, 0.5], [1.0, 1.0], [0.5, 0.5]]),
            # The machine was half as fast in the second round: no ratio is touched by that.
            "minidist": outcome("ours", [[3.0, 3.0], [6.0, 6.0], [3.3, 3.3]], peak_bytes=7),
            "fast": outcome("peer", [[4.0, 2.0], [6.0, 6.0], [3.0, 3.0]], peak_bytes=9),
            "slow": outcome("peer", [[9.0, 9.0]] * 3, peak_bytes=1),
            "absent": Outcome("peer", skipped="not installed"),
        },
        goal=0.5,
    )
    assert row.keys() >= KEYS
    assert row["best_peer"] == "fast"
    assert row["ratio_to_best_peer"] == 1.0
    assert row["ratio_spread"] == [1.0, pytest.approx(1.1)]
    assert (row["best_peer_as_launched"], row["ratio_as_launched"]) == ("fast", 0.5)
    assert row["met"] is True
    assert row["floor_seconds"] == 1.5 + 0.5
    assert row["ratio_to_floor"] == pytest.approx(1.5)
    assert (row["ours_peak_bytes"], row["best_peer_peak_bytes"]) == (7, 9)
    assert row["skipped"] == {"absent": "not installed"}
    assert set(row["peers"]) == {"fast", "slow"}


def test_remarks_say_what_the_table_does_not():
    outcomes = {
        "minidist": outcome("ours", [[3.0]], peak_bytes=120),
        "torch": outcome("peer", [[2.0]], peak_bytes=100),
        "absent": Outcome("peer", skipped="not installed"),
    }
    row = bench.summarise("ddp", 2, outcomes, goal=0.74)
    row["other_load"] = 1.5
    assert bench_report.remarks([row]) == [
        "ddp, 2 ranks: absent left out: not installed",
        "Other programs kept up to 1.5 cores busy meanwhile: trust only the ratios, and those of "
        "CPU time (--json) most.",
        "ddp, 2 ranks: needs 20% more memory than torch.",
        "Goal missed by ddp at 2 ranks.",
    ]
    row.update(met=True, other_load=0.0, skipped={}, ours_peak_bytes=100)
    assert bench_report.remarks([row]) == ["All 1 goals are met."]
    assert bench_report.line(row) == "ddp, 2 ranks: 3000.0 ms, 0.75 of torch, 1.50 tuned like us"


def test_the_fastest_version_counts_on_both_sides():
    outcomes = {
        "minidist": outcome("ours", [[1.0]]),
        "minidist, one bucket": outcome("ours", [[0.9]]),
        "torch": outcome("peer", [[2.0]]),
        "torch, one bucket": outcome("peer", [[1.8]]),
    }
    row = bench.summarise("ddp", 2, outcomes, goal=0.6)
    assert (row["ours"], row["best_peer"]) == ("minidist, one bucket", "torch, one bucket")
    assert row["ratio_to_best_peer"] == pytest.approx(0.5)
    assert row["variants"] == {"minidist": 1.0, "minidist, one bucket": 0.9}


def test_the_table_fits_an_ordinary_terminal():
    outcomes = {
        "minidist, one bucket": outcome("ours", [[0.2551]], peak_bytes=281_000_000),
        "torch DDP + ZeRO, parameters as bucket view": outcome(
            "peer", [[0.2662]], peak_bytes=292_000_000
        ),
    }
    row = bench.summarise("fsdp-grad-op", 4, outcomes, goal=0.97)
    table = Console(width=80, record=True, file=io.StringIO())
    table.print(bench_report.table([row]))
    text = table.export_text()
    assert all(part in text for part in ("fsdp-grad-op", "one bucket", "255.1", "281 │", "(292)"))


def test_a_row_without_peers():
    row = bench.summarise("ddp", 2, {"minidist": outcome("ours", [[1.0]])}, goal=0.9)
    assert row["ratio_to_best_peer"] is row["met"] is row["best_peer"] is None
    bench_report.table([row])
    assert bench_report.remarks([row]) == []


def made_up(log):
    """Contestants that note whose turn it is; one is slow on rank 1, three cannot take part."""

    def counting(name, loss):
        def build():
            def step():
                if coll.rank() == 0:
                    with open(log, "a", encoding="utf-8") as turns:
                        print(name if tuned() else f"{name}, as launched", file=turns)
                return None if loss is None else torch.tensor(loss)

            return step

        return build

    def slow():
        def step():
            if coll.rank() == 1:
                torch.ones(300, 300) @ torch.ones(300, 300)
                time.sleep(0.02)
            return torch.tensor(2.0)

        return step

    def absent():
        if coll.rank() == 1:
            raise Skip("not installed on rank 1")
        return lambda: None

    def broken():
        raise AttributeError("this torch has no such thing\nsecond line")

    return [
        Contestant("floor", "floor", counting("floor", None)),
        Contestant("minidist", "ours", counting("minidist", 2.0)),
        Contestant("good", "peer", counting("good", 2.0001)),
        Contestant("slow", "peer", slow),
        Contestant("wrong", "peer", counting("wrong", 1.9)),
        Contestant("absent", "peer", absent),
        Contestant("broken", "peer", broken),
    ]


def check(outcomes):
    assert outcomes["absent"].skipped == "not installed on rank 1"
    assert outcomes["broken"].skipped == "AttributeError: this torch has no such thing"
    assert outcomes["wrong"].skipped == "its loss is 1.90000 where ours is 2.00000"
    assert not outcomes["wrong"].rounds
    # A turn is as long as its slowest rank, also seen from the quick one.
    assert all(0.02 < t < 0.2 for r in outcomes["slow"].rounds for t in r)
    assert [len(r) for r in outcomes["good"].rounds] == [2, 2]
    assert not outcomes["minidist"].launched


WARM_UP = bench.WARM_UP + 1  # and a step to see the memory
TURNS = [["floor"] * 2, ["minidist"] * 2, ["good"] * 2]


def test_turns_alternate_and_misfits_are_left_out(tmp_path):
    """Peers have a second turn each, in ranks of their own that nobody has tuned."""
    log = tmp_path / "turns"
    outcomes = bench.run(partial(made_up, str(log)), 2, rounds=2, steps=2, timeout=60)
    check(outcomes)
    assert [len(r) for r in outcomes["good"].launched] == [2, 2]
    assert all(0.02 < t < 0.2 for r in outcomes["slow"].launched for t in r)
    turns = log.read_text().splitlines()
    assert turns[: 4 * WARM_UP : WARM_UP] == ["floor", "minidist", "good", "wrong"]
    apart = ["good, as launched"]
    assert turns[4 * WARM_UP :][: 2 * WARM_UP : WARM_UP] == [*apart, "wrong, as launched"]
    floor, ours, peer = TURNS
    peer = peer + apart * 2
    assert turns[6 * WARM_UP :] == (floor + ours + peer + peer[::-1] + ours + floor) * 2


def test_what_a_peer_computes_as_launched_counts_too():
    def make():
        loss = 2.0 if tuned() else 1.9
        return [
            Contestant("minidist", "ours", lambda: lambda: torch.tensor(2.0)),
            Contestant("peer", "peer", lambda: lambda: torch.tensor(loss)),
        ]

    outcomes = bench.run(make, 2, rounds=1, timeout=60)
    assert outcomes["peer"].skipped == "its loss is 1.90000 where ours is 2.00000"
    assert outcomes["minidist"].rounds and not outcomes["peer"].rounds


def test_the_limit_is_that_of_the_row():
    def make():
        def step():
            time.sleep(0.2)
            return torch.tensor(1.0)

        return [Contestant("minidist", "ours", lambda: step)]

    with pytest.raises(RankFailure, match="not finished after"):
        bench.run(make, 2, rounds=50, timeout=3)


def test_under_torchrun_everybody_is_in_the_ranks_that_are_there(run_ranks, tmp_path):
    outcomes = run_ranks(bench.run, 2, partial(made_up, str(tmp_path / "turns")), 2, rounds=2)
    floor, ours, peer = TURNS
    for outcome in outcomes:
        check(outcome)
        assert not outcome["good"].launched
    turns = (tmp_path / "turns").read_text().splitlines()
    assert turns[4 * WARM_UP :] == (floor + ours + peer + peer + ours + floor) * 2
    row = bench.summarise("ddp", 2, outcomes[0], goal=0.9)
    assert row["ratio_as_launched"] is row["met"] is None
    assert row["ratio_to_best_peer"] > 0
    words = f"{row['ratio_to_best_peer']:.2f} tuned like us"
    assert bench_report.line(row).endswith(f" ms, {words}")
    table = Console(width=100, record=True, file=io.StringIO())
    table.print(bench_report.table([row]))
    assert "good" in table.export_text()


def test_our_own_failure_is_no_reason_to_skip(run_ranks):
    def run():
        def build():
            raise AttributeError("a bug of ours")

        bench.run(lambda: [Contestant("minidist", "ours", build)], 2, rounds=1)

    with pytest.raises(RankFailure, match="a bug of ours"):
        run_ranks(run, 2)


def test_peak_memory_is_what_the_contestant_needs(run_ranks):
    def run():
        def build():
            kept = torch.ones(2_000_000)

            def step():
                (kept + 1).add_(1)  # one more of the same size, for a moment
                return torch.tensor(1.0)

            return step

        return bench.run(lambda: [Contestant("minidist", "ours", build)], 2, rounds=1)["minidist"]

    for result in run_ranks(run, 2, timeout=60):
        if result.peak_bytes is None:
            pytest.skip("mallinfo2 is in glibc only")
        assert result.peak_bytes == pytest.approx(16e6, rel=0.02)


def test_one_step_between_barriers_is_refused():
    with pytest.raises(ValueError, match="at least 2 steps, got 1"):
        bench.run(list, 2, steps=1)


@pytest.mark.parametrize(
    ("module", "row", "peers"),
    [
        (bench_data_parallel, "ddp", 3),
        (bench_data_parallel, "zero1", 3),
        (bench_data_parallel, "zero2", 3),
        (bench_data_parallel, "fsdp-full", 2),
        (bench_data_parallel, "fsdp-grad-op", 2),
        (bench_model_parallel, "gpipe", 1),
        (bench_model_parallel, "1f1b", 1),
        (bench_model_parallel, "interleaved", 2),
        (bench_model_parallel, "zb-h1", 2),
        (bench_model_parallel, "tp", 2),
    ],
)
def test_every_row_runs_and_all_contestants_train_alike(run_ranks, module, row, peers):
    def run(make, row, config):
        return bench.run(lambda: make(row, config), 2, rounds=1)

    outcomes = run_ranks(run, 2, module.contestants, row, SMALL, timeout=60)[0]
    # A peer may be missing in another torch version; one whose loss differs is a bug of the bench.
    assert not [o.skipped for o in outcomes.values() if o.skipped and "its loss" in o.skipped]
    result = bench.summarise(row, 2, outcomes, goal=None)
    assert result.keys() >= KEYS
    assert result["ours_seconds"] > 0
    assert result["floor_seconds"] > 0
    if torch.__version__.startswith("2.13"):
        assert len(result["peers"]) == peers, result["skipped"]
        assert result["ratio_to_best_peer"] > 0


def test_deepspeed_takes_part_or_says_why(run_ranks):
    import importlib.util

    if importlib.util.find_spec("deepspeed") is not None:
        pytest.skip("DeepSpeed is installed: the bench itself runs it")

    def run(config):
        everybody = bench_data_parallel.contestants("zero1", config, deepspeed=True)
        mine = [c for c in everybody if "DeepSpeed" in c.name]
        return bench.run(lambda: mine, 2, rounds=1)

    outcomes = run_ranks(run, 2, SMALL)[0]
    assert "not installed" in outcomes["DeepSpeed ZeRO-1"].skipped


def test_the_command_writes_its_files(tmp_path, capfd):
    files = {name: tmp_path / name for name in ("b.json", "b.png", "traces")}
    code = main(
        ["bench", "data-parallel", "--rows", "ddp", "--world", "2", "--rounds", "1", "--small",
         "--json", str(files["b.json"]), "--plot", str(files["b.png"]),
         "--trace", str(files["traces"])]
    )  # fmt: skip
    assert code == 0
    assert "torch DDP" in capfd.readouterr().out
    content = json.loads(files["b.json"].read_text())
    assert content.keys() >= {"minidist", "torch", "machine", "rows", "date"}
    assert content["rows"][0].keys() >= KEYS
    assert files["b.png"].read_bytes().startswith(b"\x89PNG")
    spans = json.loads((files["traces"] / "ddp-2.json").read_text())["traceEvents"]
    assert {e["pid"] for e in spans} == {0, 1}
    assert any(e.get("cat") == "communication" for e in spans)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "there is no bench 'nope'"),
        (["--rows", "dpp"], "there is no row 'dpp'; choose from ddp"),
        (["model-parallel", "--rows", "ddp"], "there is no row 'ddp'"),
        (["--world", "1"], "numbers of ranks from 2 up"),
        (["--world", "2,x"], "numbers of ranks from 2 up"),
        (["--rounds", "0"], "greater than or equal to 1"),
        (["--steps", "1"], "greater than or equal to 2"),
        (["--json", "/no/such/folder/b.json"], "does not exist"),
    ],
)
def test_mistakes_are_one_line(capfd, arguments, message):
    assert main(["bench", *arguments]) == 2
    captured = capfd.readouterr()
    assert re.search(re.escape(message), captured.err)
    assert captured.err.count("\n") == 1
