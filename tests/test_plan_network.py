"""Published traffic, pipeline bubbles, collective times and hardware figures against minidist.plan.

As in test_plan_formulas.py: the rows come from minidist/plan/published.json.
"""

from itertools import pairwise

import pytest

from minidist.plan import formulas, hardware
from minidist.plan.validate import records

ROWS = records()


def rows(start):
    """(record, id) of each row whose quantity begins with `start`."""
    found = [pytest.param(r, id=r["id"]) for r in ROWS.values() if r["quantity"].startswith(start)]
    assert found, start
    return found


def value(name):
    return ROWS[name]["value"]


# ---- traffic -----------------------------------------------------------------------------------


@pytest.mark.parametrize("row", rows("communication volume per step"))
def test_zero_traffic(row):
    stage = row["conditions"]["stage"]
    assert formulas.data_parallel_traffic(1, stage) == row["value"]
    assert formulas.data_parallel_traffic(8, stage, 8) == row["value"] * 7


def test_traffic_with_accumulation():
    got = [formulas.data_parallel_traffic(1, stage, microbatches=4) for stage in (0, 1, 2, 3)]
    assert got == [2, 2, 5, 12]
    with pytest.raises(ValueError, match="stage"):
        formulas.data_parallel_traffic(1, 5)


def test_fsdp_paper_cross_host_traffic():
    w, g = 64, 8
    got = [
        formulas.cross_host_traffic(1, w, g, "replicate"),
        formulas.cross_host_traffic(1, w, g, "full"),
        formulas.cross_host_traffic(1, w, g, "hybrid"),
        formulas.cross_host_traffic(1, w, g, "hybrid", exact=True),
    ]
    assert [round(x, 3) for x in got] == [1.969, 2.953, 0.246, 0.219]  # the note of fsdp-0227
    assert got[1] / got[0] == value("fsdp-0226")


def test_fsdp_peak_parameters():
    units = [10, 30, 20]
    assert formulas.fsdp_peak_parameters(units, 4) == 60 / 4 + 30  # fsdp-0228
    assert formulas.fsdp_peak_parameter_bytes(units, 4) == 4 * 15 + 2 * 30  # fsdp-0229
    assert formulas.fsdp_peak_parameters(units, 4, gathered=2) == 15 + 50


def test_tensor_and_pipeline_traffic():
    s, b, h = 1024, 2, 512
    assert formulas.tensor_parallel_traffic(s, b, h, 8) == 8 * b * s * h * 7 / 8  # megatron-0136
    recomputed = formulas.tensor_parallel_traffic(s, b, h, 8, recompute=True, asymptotic=True)
    assert recomputed == 12 * s * h * b  # zero-0073
    assert formulas.pipeline_traffic(s, b, h) == b * s * h  # megatron-0137
    assert formulas.pipeline_traffic(s, b, h, 8, scatter_gather=True) == b * s * h / 8


def test_when_tensor_parallel_moves_more():
    # Claim d: more than data parallel exactly above 3 h tokens per step, on the same n GPUs.
    h, n = 4096, 8
    tokens = formulas.tensor_beats_data_parallel_tokens(h)
    assert tokens == 12288
    tensor = formulas.tensor_parallel_traffic(tokens, 1, h, n)
    assert tensor == pytest.approx(formulas.data_parallel_traffic(12 * h * h, 0, n))


def test_idefics_communication_time():
    # 3 x 16-bit parameters through 340 Gbit/s: the 11 s that the source computes.
    seconds = 2 * formulas.data_parallel_traffic(80e9, 3) / (340e9 / 8)
    assert round(seconds) == value("configs-0377")[0]


# ---- bubbles -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, schedule",
    [("pipeline-0211", "1f1b"), ("pipeline-0212", "zb-h1"), ("pipeline-0214", "zb-v")],
)
def test_zero_bubble_table(name, schedule):
    for p, m in ((4, 8), (8, 64)):
        want = eval(value(name)[0].replace("3m", "3*m"), {"p": p, "m": m})
        assert formulas.bubble(schedule, p, m) == pytest.approx(want)


def test_bubbles_name_their_denominator():
    p, m, v = 4, 8, 2
    assert formulas.bubble("gpipe", p, m) == (p - 1) / m  # megatron-0133
    assert formulas.bubble("interleaved", p, m, v) == (p - 1) / (v * m)  # megatron-0134
    assert formulas.bubble("gpipe", p, m, of="total") == pytest.approx((p - 1) / (m + p - 1))
    # GPipe: negligible when M >= 4 K; it is a fifth of the total there at most.
    assert all(formulas.bubble("gpipe", k, 4 * k, of="total") < 0.2 for k in (2, 8, 64))
    with pytest.raises(ValueError, match="ideal or total"):
        formulas.bubble("gpipe", p, m, of="time")
    with pytest.raises(ValueError, match="unknown schedule"):
        formulas.bubble("spiral", p, m)


@pytest.mark.parametrize("row", rows("micro-batch and virtual stages"))
def test_table_1_bubbles(row):
    table = ROWS[f"megatron-{int(row['id'].split('-')[1]) - 1:04d}"]["value"]
    setup = row["value"]
    dp = table["GPUs"] // table["TP"] // table["PP"]
    m = table["batch"] // dp // setup["mbs"]
    assert m == row["computed"]["m"]
    got = formulas.bubble("interleaved", table["PP"], m, setup["v"])
    assert got == pytest.approx(row["computed"]["bubble_over_ideal"], abs=5e-5)
    layers = table["layers"] / table["PP"]
    assert layers == setup["layers_per_stage"]


def test_bloom_and_neox_bubbles():
    bloom, neox = value("configs-0328"), value("configs-0332")
    m = bloom["GBS"] // bloom["DP"] // bloom["MBS"]
    assert 100 * formulas.bubble("1f1b", bloom["PP"], m) == pytest.approx(8.6, abs=0.05)
    assert 100 * formulas.bubble("1f1b", neox["PP"], neox["GAS"]) == pytest.approx(9.4, abs=0.05)


def test_dualpipe_table():
    f, b, w, both, p = 1.0, 2.0, 0.9, 2.5, 8
    names = {"PP": p, "F": f, "B": b, "W": w, "FB": both}
    for number, method in (("0216", "1f1b"), ("0217", "zb-h1"), ("0218", "dualpipe")):
        text = value(f"pipeline-{number}")[0].replace("F&B", "FB").replace(")(", ")*(")
        for factor in "23":
            text = text.replace(f"{factor}W", f"{factor}*W")
        assert formulas.bubble_seconds(method, p, f, b, w, both) == pytest.approx(eval(text, names))


def test_in_flight():
    assert formulas.in_flight("gpipe", 4, 16, 0) == 16  # megatron-0135
    assert [formulas.in_flight("1f1b", 4, 16, r) for r in range(4)] == [4, 3, 2, 1]
    assert formulas.in_flight("1f1b", 4, 2, 0) == 2
    with pytest.raises(ValueError, match="simulator"):
        formulas.in_flight("interleaved", 4, 16, 0)


def test_equation_1():
    # megatron-0138: (b'/b + p - 1)(tf + tb) with b' = B / d
    assert formulas.pipeline_seconds(64, 2, 4, 8, 1.0, 2.0) == (64 / 4 / 2 + 8 - 1) * 3.0


# ---- collectives and hardware ------------------------------------------------------------------


@pytest.mark.parametrize("row", rows("all-reduce 8xA100 NVLink3"))
def test_bus_bandwidth(row):
    microseconds, published = row["value"]
    got = formulas.bus_bandwidth("all_reduce", row["conditions"]["bytes"], microseconds * 1e-6, 8)
    assert got / 1e9 == pytest.approx(published, rel=1e-3, abs=0.006)


@pytest.mark.parametrize("row", rows("busbw factor"))
def test_bus_factors(row):
    op = row["quantity"].removeprefix("busbw factor ").replace("-", "_")
    op = op.replace("in_network", "in-network")
    text = str(row["value"]).split(" as ")[0].replace("2(", "2*(")
    for n in (2, 8):
        assert formulas.BUS_FACTORS[op](n) == pytest.approx(eval(text, {"n": n}))


def test_ring_and_hierarchical_times():
    n, size, speed, alpha = 8, 1e9, 1e11, 1e-6
    ring = formulas.ring_seconds("all_reduce", size, n, speed, alpha)
    assert ring == pytest.approx(2 * (n - 1) * alpha + 2 * (n - 1) / n * size / speed)
    gather = formulas.ring_seconds("all_gather", size, n, speed, alpha)
    assert gather == pytest.approx((n - 1) * alpha + (n - 1) / n * size / speed)
    assert ring == pytest.approx(2 * gather)
    assert formulas.ring_seconds("all_reduce", size, 1, speed) == 0
    # Two levels: only size / per_node crosses the slow links.
    two = formulas.hierarchical_all_reduce_seconds(size, 4, 8, 1e11, 1e10)
    flat = formulas.ring_seconds("all_reduce", size, 32, 1e10)
    assert two == pytest.approx(2 * 7 / 8 * size / 1e11 + 2 * 3 / 4 * size / 8 / 1e10)
    assert two < flat / 3


def test_link_model_follows_the_measured_curve():
    # One latency and one ramp cannot follow NCCL's changes of algorithm: within a third from 256 kB
    # on, and the large messages that matter for training within a fifth.
    machine = hardware.cluster("a100", 8)
    previous = 0.0
    for row in (r.values[0] for r in rows("all-reduce 8xA100 NVLink3")):
        size, published = row["conditions"]["bytes"], row["value"][0] * 1e-6
        got = machine.collective_seconds("all_reduce", size, 8)
        assert got > previous
        previous = got
        if size >= 2**18:
            assert got == pytest.approx(published, rel=0.34)
        if size >= 2**27:
            assert got == pytest.approx(published, rel=0.2)


def test_hardware_table():
    cards = hardware.ACCELERATORS
    peaks = {"a100": "0309", "h100": "0310", "h200": "0311", "h100-pcie": "0312", "b200": "0313",
             "l40s": "0314", "v100": "0315"}  # fmt: skip
    for name, number in peaks.items():
        assert cards[name].flops["bf16"] / 1e12 == value(f"hardware-{number}"), name
    memory = {"a100": "0319", "h100": "0320", "h200": "0321", "b200": "0322", "h100-pcie": "0323"}
    for name, number in memory.items():
        size, bandwidth = value(f"hardware-{number}")
        assert (cards[name].memory / 1e9, cards[name].memory_bandwidth / 1e12) == (size, bandwidth)
    links = {"v100": "0297", "a100": "0298", "h100": "0299", "h200": "0299", "b200": "0300"}
    for name, number in links.items():
        assert cards[name].nvlink / 1e9 == value(f"hardware-{number}")[0]
    card = cards["rtx4090"]
    got = [card.memory / 1e9, card.memory_bandwidth / 1e9, card.flops["bf16"] / 1e12]
    assert got == value("hardware-0324") and card.nvlink == 0
    assert (cards["a100"].pcie / 1e9, cards["h100"].pcie / 1e9) == (
        value("hardware-0301")[0], value("hardware-0302")[0],
    )  # fmt: skip
    ports = [hardware.cluster(name, 8).inter.bandwidth * 8 / 1e9 for name in ("a100", "h100")]
    assert ports == [value("hardware-0304"), value("hardware-0305")]
    # No card is said to sustain more than the largest matrix products measured on it.
    for name, number in (("a100", "0316"), ("h100", "0317"), ("b200", "0318")):
        assert cards[name].efficiency * cards[name].flops["bf16"] / 1e12 < value(
            f"hardware-{number}"
        )
    nvlink = hardware.cluster("a100", 8).intra
    assert nvlink.bandwidth * nvlink.efficiency / 1e9 == pytest.approx(
        value("collectives-0291"), rel=0.01
    )


def test_latency_constants_are_torchs():
    ours = [hardware.BASE_LATENCY, hardware.INTRA_HOP, hardware.INTER_HOP]
    assert [1e6 * seconds for seconds in ours] == pytest.approx(value("collectives-0263")[:3])


def test_more_ranks_never_make_a_collective_faster():
    machine = hardware.cluster("a100", 1024)
    for op in ("all_reduce", "all_gather", "reduce_scatter"):
        times = [machine.collective_seconds(op, 1e9, n) for n in (1, 2, 4, 8, 16, 64, 1024)]
        assert all(a < b for a, b in pairwise(times))
    one_rail = hardware.cluster("a100", 1024, rails=1)
    assert one_rail.collective_seconds("all_gather", 1e9, 1024) > 5 * times[-1]
