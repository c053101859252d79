"""`md.measure().timeline`: spans of the right things at the right times, in a file that opens."""

import json
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import minidist as md
from minidist.comm import collectives as coll
from minidist.measure import clock, span, trace
from minidist.measure.timeline import Timeline


def check_trace(path, ranks=(0,)):
    """What Chrome and Perfetto require of a file; returns its spans."""
    events = json.loads(path.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in events} == set(ranks)
    for event in events:
        assert event["ph"] in "XMC"
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
    named = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert named == {(rank, f"rank {rank}") for rank in ranks}
    lanes = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in spans} <= lanes
    times = [e["ts"] for e in events if e["ph"] != "M"]
    assert times == sorted(times)
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans)
    # In one lane spans follow or enclose each other, or a viewer draws nonsense.
    for lane in lanes:
        ends = []
        for e in (e for e in spans if (e["pid"], e["tid"]) == lane):
            end = e["ts"] + e["dur"]
            while ends and ends[-1] <= e["ts"] + 1e-3:
                ends.pop()
            assert not ends or end <= ends[-1] + 1e-3, f"{e['name']} crosses another span"
            ends.append(end)
    return spans


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def test_forward_backward_and_step_of_every_module(tmp_path):
    model = blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with md.measure() as m:
        with span("a step"):
            model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
    m.timeline.save(tmp_path / "trace.json")
    check_trace(tmp_path / "trace.json")
    at = {s.name: (s.start, s.end) for s in m.timeline.spans}
    paths = ["0", "0.up", "0.down", "1", "1.up", "1.down"]
    wanted = {f"{p} {way}" for p in ["Sequential", *paths] for way in ("forward", "backward")}
    assert set(at) == wanted | {"SGD step", "a step"}

    def inside(inner, outer):
        return at[outer][0] <= at[inner][0] <= at[inner][1] <= at[outer][1]

    assert all(inside(name, "a step") for name in at)
    for way in ("forward", "backward"):
        assert inside(f"0.up {way}", f"0 {way}")
        assert inside(f"0 {way}", f"Sequential {way}")
    assert at["0 forward"][1] <= at["1 forward"][0]
    assert at["1 backward"][1] <= at["0 backward"][0]
    assert at["1.down backward"][1] <= at["1.up backward"][0]
    assert at["Sequential backward"][1] <= at["SGD step"][0]


def test_siblings_with_one_input_do_not_overlap(tmp_path):
    class QKV(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            return self.q(x) * self.k(x) + self.v(x)

    with md.measure() as m:
        QKV()(torch.randn(2, 8, requires_grad=True)).sum().backward()
    m.timeline.save(tmp_path / "trace.json")
    names = [e["name"] for e in check_trace(tmp_path / "trace.json")]
    assert {f"{n} backward" for n in ("QKV", "q", "k", "v")} <= set(names)


def test_a_module_with_two_outputs_has_one_backward():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            y = self.inner(x)
            return {"a": y * 2, "b": [y + 1]}

    with md.measure() as m:
        out = Two()(torch.randn(2, 4))
        (out["a"].sum() + out["b"][0].sum()).backward()
    assert [s.name for s in m.timeline.spans].count("Two backward") == 1


def test_checkpointed_modules_show_the_second_forward(tmp_path):
    block = Block()
    with md.measure() as m:
        x = torch.randn(4, 16, requires_grad=True)
        checkpoint(block, x, use_reentrant=False).sum().backward()
    m.timeline.save(tmp_path / "trace.json")
    check_trace(tmp_path / "trace.json")
    names = [s.name for s in m.timeline.spans]
    assert names.count("Block forward") == names.count("Block recomputed") == 1


def test_a_module_that_raises_leaves_no_open_span():
    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError("on purpose")

    model = nn.Sequential(nn.Linear(2, 2), Fails())
    with md.measure() as m:
        with pytest.raises(ValueError, match="on purpose"):
            model(torch.zeros(1, 2))
        nn.Linear(2, 2)(torch.zeros(1, 2))
    assert m.timeline.spans[-1].name == "Linear forward"


def test_gradients_are_the_same_with_spans():
    def gradients(measured):
        model, x = blocks(), torch.linspace(-1, 1, 64).view(4, 16).requires_grad_()
        if measured:
            with md.measure():
                model(x).square().sum().backward()
        else:
            model(x).square().sum().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    for a, b in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(a, b)


def test_span_is_nothing_when_nothing_measures():
    assert span("a") is span("b")
    with span("a"):
        pass
    with md.measure() as m:
        with span("load data", lane="data"):
            time.sleep(0.002)
    (only,) = m.timeline.spans
    assert (only.name, only.lane) == ("load data", "data")
    assert only.end - only.start >= 0.002


def test_spans_of_helper_threads_are_taken_in():
    def work():
        with span("helper", lane="data"):
            pass

    with md.measure() as m:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert [s.name for s in m.timeline.spans] == ["helper"]


def test_collectives_and_waits_of_all_ranks_in_one_file(run_ranks, tmp_path):
    path = str(tmp_path / "trace.json")

    def run(path):
        with md.measure() as m:
            work = coll.all_reduce(torch.ones(100_000), async_op=True, by="bucket 0")
            second = coll.all_reduce(torch.ones(200_000), async_op=True, by="bucket 1")
            with span("backward"):
                torch.ones(300, 300) @ torch.ones(300, 300)
            work.wait()
            second.wait()
        everyone = m.timeline.gather(path)
        return everyone is None, m.timeline.overlap()

    results = run_ranks(run, 3, path)
    assert [nothing for nothing, _ in results] == [False, True, True]
    for _, overlap in results:
        assert overlap["communication"] == pytest.approx(
            overlap["hidden"] + overlap["exposed"] + overlap["neither"]
        )
        assert overlap["hidden"] > 0
        assert overlap["exposed"] > 0
    spans = check_trace(tmp_path / "trace.json", ranks=range(3))
    for rank in range(3):
        mine = {e["name"]: e for e in spans if e["pid"] == rank}
        assert mine["all_reduce (bucket 1)"]["args"]["payload bytes"] == 800_000
        assert mine["wait for all_reduce (bucket 1)"]["cat"] == "wait"
        # Under way at the same time, hence in two rows.
        a, b = mine["all_reduce (bucket 0)"], mine["all_reduce (bucket 1)"]
        assert a["tid"] != b["tid"]
    # One clock: no rank can be done before all have started.
    firsts = [e for e in spans if e["name"] == "all_reduce (bucket 0)"]
    assert max(e["ts"] for e in firsts) <= min(e["ts"] + e["dur"] for e in firsts)


def test_overlap_of_made_up_spans():
    timeline = Timeline()
    for name, lane, start, end in [
        ("forward", "compute", 0, 10),
        ("reduce", "communication", 4, 8),  # hidden
        ("reduce", "communication", 6, 14),  # hidden to 10, then exposed to 12, then nothing
        ("wait", "wait", 10, 12),
        ("gather", "communication", 20, 21),  # under nothing
    ]:
        timeline.add(name, lane, start, end)
    assert timeline.overlap() == {
        "communication": 11,
        "hidden": 6,
        "exposed": 2,
        "neither": 3,
    }


def test_waiting_inside_a_compute_span_is_exposed():
    timeline = Timeline()
    timeline.add("step", "compute", 0, 10)
    timeline.add("reduce", "communication", 2, 6)
    timeline.add("wait", "wait", 5, 6)
    assert timeline.overlap() == {"communication": 4, "hidden": 3, "exposed": 1, "neither": 0}


def test_files_can_be_merged_and_merged_again(tmp_path):
    paths = []
    for rank in range(3):
        timeline = Timeline(rank)
        timeline.started = 100.0 - rank
        timeline.add("work", "compute", 101.0, 102.0)
        paths.append(tmp_path / f"{rank}.json")
        timeline.save(paths[-1])
    trace.merge(paths[:2], tmp_path / "two.json")
    trace.merge([tmp_path / "two.json", str(paths[2])], tmp_path / "three.json")
    spans = check_trace(tmp_path / "three.json", ranks=range(3))
    # One moment in three files with three origins is one moment again.
    assert [e["ts"] for e in spans] == pytest.approx([3e6] * 3)
    trace.merge([paths[0], paths[0]], tmp_path / "twice.json")
    events = json.loads((tmp_path / "twice.json").read_text())["traceEvents"]
    assert len({e["pid"] for e in events}) == 2


def test_other_files_are_refused(tmp_path):
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match=r"other\.json is not a trace"):
        trace.merge([tmp_path / "other.json"], tmp_path / "out.json")


def test_clocks_of_several_machines_are_brought_together(run_ranks):
    """Ranks 1 and 2 get another machine's name and a clock that is hours off."""

    def run():
        ahead = [0.0, 5000.0, -7000.0][coll.rank()]
        true_clock, true_machine = clock._clock, clock._machine
        clock._clock = lambda: true_clock() + ahead
        clock._machine = lambda: f"machine {coll.rank()}"
        try:
            return clock.difference() + ahead
        finally:
            clock._clock, clock._machine = true_clock, true_machine

    for error in run_ranks(run, 3):
        assert abs(error) < 0.05


def test_one_machine_needs_no_correction(run_ranks):
    assert run_ranks(clock.difference, 2) == [0.0, 0.0]


def test_too_many_spans_are_counted_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("minidist.measure.timeline._MAX_SPANS", 3)
    timeline = Timeline()
    for i in range(5):
        timeline.add(f"{i}", "compute", i, i + 1)
    assert (len(timeline.spans), timeline.dropped) == (3, 2)
    timeline.save(tmp_path / "trace.json")
    assert "2 later spans dropped" in (tmp_path / "trace.json").read_text()


def test_memory_is_sampled_into_the_trace(tmp_path):
    model = blocks()
    with md.measure() as m:
        model(torch.randn(4, 16)).sum().backward()
    m.timeline.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    counters = [e["args"] for e in events if e["ph"] == "C"]
    parameters = 4 * sum(p.numel() for p in model.parameters())
    assert counters[-1]["parameters"] == counters[-1]["gradients"] == parameters
    assert max(c["activations"] for c in counters) > 0
