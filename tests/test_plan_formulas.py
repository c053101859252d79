"""Every published row that a formula of minidist.plan covers, with the tolerance of its printing.

The rows are read from minidist/plan/published.json: changing a formula or a row fails here. Sources
that truncate (ZeRO Table 1, last column) or print GiB as "GB" (DeepSpeed's estimator) are compared
as their records say they print.
"""

import math

import pytest

from minidist.plan import formulas
from minidist.plan.shapes import PRESETS, Transformer
from minidist.plan.validate import records

ROWS = records()
GIB = 2**30


def rows(start):
    """(record, id) of each row whose quantity begins with `start`."""
    found = [pytest.param(r, id=r["id"]) for r in ROWS.values() if r["quantity"].startswith(start)]
    assert found, start
    return found


def value(name):
    return ROWS[name]["value"]


def printed(number, like):
    """`number` rounded as often as `like` shows decimals."""
    decimals = len(str(like).partition(".")[2]) if "." in str(like) else 0
    return math.floor(number * 10**decimals + 0.5) / 10**decimals


# ---- model states ------------------------------------------------------------------------------


@pytest.mark.parametrize("row", rows("per-device model-state memory"))
def test_zero_table_1_and_figure_1(row):
    where = row["conditions"]
    parameters = where.get("params", 7.5e9)
    got = sum(formulas.state_bytes(parameters, where["stage"], where["Nd"]).values()) / 1e9
    if row["match"] == "truncated":
        assert math.floor(got) == row["value"]
    else:
        assert printed(got, row["value"]) == pytest.approx(row["value"], abs=1e-9)


def test_a_wrong_stage_would_be_noticed():
    # Negative control: sharding the gradients too early changes the 31.4 GB of Figure 1 to 16.6.
    one = sum(formulas.state_bytes(7.5e9, 1, 64).values()) / 1e9
    two = sum(formulas.state_bytes(7.5e9, 2, 64).values()) / 1e9
    assert printed(one, 31.4) == 31.4 and printed(two, 31.4) == 16.6


def test_zero_limits():
    def saving(stage, n):
        return 16 / sum(formulas.state_bytes(1, stage, n).values())

    assert saving(1, 10**9) == pytest.approx(4, rel=1e-6)  # zero-0002, "4x" only in the limit
    assert saving(2, 10**9) == pytest.approx(8, rel=1e-6)  # zero-0003
    assert saving(3, 64) == 64  # zero-0004, exact
    assert (round(saving(1, 8), 2), round(saving(2, 8), 2)) == (2.91, 4.27)
    assert (round(saving(1, 64), 2), round(saving(2, 64), 2)) == (3.82, 7.21)
    assert formulas.CONVENTIONS["16"].total == value("zero-0001")


@pytest.mark.parametrize("row", rows("max model size"))
def test_zero_table_2(row):
    mp = row["conditions"]["MP"]
    for stage, text in enumerate(row["value"][:4]):
        got = formulas.largest_model(32e9, stage, 64, mp) / 1e9
        want = float(text[:-1]) * (1000 if text.endswith("T") else 1)
        # The paper rounds to one decimal before multiplying by MP, and 1024 to "1T".
        assert got == pytest.approx(want, rel=0.03)


@pytest.mark.parametrize(
    "record, convention", [("zero-0074", "16"), ("zero-0075", "20"), ("zero-0074", "fp32")]
)
def test_playbook_memory(record, convention):
    sizes = [1e9, 7e9, 70e9, 405e9]
    got = [sum(formulas.state_bytes(n, convention=convention).values()) / 1e9 for n in sizes]
    assert got == value(record)


@pytest.mark.parametrize(
    "record, convention",
    [("zero-0076", "20"), ("zero-0077", "18"), ("zero-0078", "fp32")],
)
def test_megatron_distributed_optimizer(record, convention):
    total, sharded = value(record)
    assert formulas.CONVENTIONS[convention].total == int(total)
    whole, rest = (int(part) for part in sharded.replace("/d", "").split(" + "))
    for d in (1, 8, 64):
        got = sum(formulas.state_bytes(1, 1, d, convention).values())
        assert got == pytest.approx(whole + rest / d)


def test_difference_between_8_and_128_gpus():
    row = ROWS["configs-0363"]
    parameters = PRESETS["llama-3.1-8b"].parameters
    got = [sum(formulas.state_bytes(parameters, 3, n).values()) for n in (8, 128)]
    assert (got[0] - got[1]) / GIB == pytest.approx(row["computed"], abs=0.01)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="stage must be"):
        formulas.state_bytes(1, 4)
    with pytest.raises(ValueError, match="unknown convention '12'.*16, 18, 20, fp32"):
        formulas.state_bytes(1, 1, convention="12")
    with pytest.raises(ValueError, match="world_size"):
        formulas.state_bytes(1, 1, 0)


# ---- offload -----------------------------------------------------------------------------------

COLD = (2851e6, 32e6)


@pytest.mark.parametrize(
    "number, estimate",
    [
        ("0087", lambda p, big: formulas.deepspeed_zero2_bytes(p, 8, offload=True)),
        ("0088", lambda p, big: formulas.deepspeed_zero2_bytes(p, 8)),
        ("0089", lambda p, big: formulas.deepspeed_zero3_bytes(
            p, big, 8, offload=("optimizer", "parameters"))),
        ("0090", lambda p, big: formulas.deepspeed_zero3_bytes(
            p, big, 8, offload=("optimizer", "parameters"), zero_init=False)),
        ("0091", lambda p, big: formulas.deepspeed_zero3_bytes(p, big, 8, offload=("optimizer",))),
        ("0092", lambda p, big: formulas.deepspeed_zero3_bytes(
            p, big, 8, offload=("optimizer",), zero_init=False)),
        ("0093", lambda p, big: formulas.deepspeed_zero3_bytes(p, big, 8)),
        ("0094", lambda p, big: formulas.deepspeed_zero3_bytes(p, big, 8, zero_init=False)),
    ],
)  # fmt: skip
def test_deepspeed_estimator(number, estimate):
    got = [size / GIB for size in estimate(*COLD)]
    assert got == pytest.approx(ROWS[f"offload-{number}"]["value"], abs=0.006)


@pytest.mark.parametrize(
    "number, estimate",
    [
        ("0079", lambda p: formulas.deepspeed_zero2_bytes(p, 8, offload=True)),
        ("0080", lambda p: formulas.deepspeed_zero2_bytes(p, 8)),
        ("0083", lambda p: formulas.deepspeed_zero3_bytes(p, 32e6, 8, offload=("optimizer",))),
        ("0084", lambda p: formulas.deepspeed_zero3_bytes(
            p, 32e6, 8, offload=("optimizer",), zero_init=False)),
    ],
)  # fmt: skip
def test_deepspeed_estimator_on_a_live_model(number, estimate):
    # "2851M" is rounded to millions, the printed sizes to 0.01 GB.
    got = [size / GIB for size in estimate(2851e6)]
    assert got == pytest.approx(ROWS[f"offload-{number}"]["value"], rel=5e-4, abs=0.011)


def test_deepspeed_current_code_and_other_examples():
    code = formulas.deepspeed_zero2_bytes(2851e6, 8, version="code")[1] / GIB
    assert code == pytest.approx(11.28, abs=0.01)  # the note of offload-0088
    parts = [(), ("optimizer", "parameters"), ("optimizer",)]
    got = [
        formulas.deepspeed_zero3_bytes(737.67e6, 32.9e6, 4, offload=part)[1] / 2**20
        for part in parts
    ]
    assert [math.floor(size) for size in got] == value("offload-0095")
    # 13B on 24 GB: ZeRO-2 with offload needs 26 GB for the 16-bit weights alone.
    assert formulas.deepspeed_zero2_bytes(13e9, 1, offload=True)[1] / 1e9 == value("offload-0125")
    cpu, _ = formulas.deepspeed_zero3_bytes(13e9, 0, 1, offload=("optimizer", "parameters"))
    assert cpu / 1.5 / 1e9 == 234 and round(cpu / GIB) == 327


# ---- activations -------------------------------------------------------------------------------

TABLE_2 = {
    "0178": {"tp": 1},
    "0179": {"tp": 4},
    "0180": {"tp": 4, "sequence_parallel": True},
    "0181": {"tp": 4, "recompute": "selective"},
    "0182": {"tp": 4, "sequence_parallel": True, "recompute": "selective"},
    "0183": {"tp": 4, "recompute": "full"},
}


@pytest.mark.parametrize("number", TABLE_2)
def test_korthikanti_table_2_as_printed(number):
    s, b, h, a = 2048, 4, 6144, 64
    text = ROWS[f"activations-{number}"]["formula"]
    names = {"s": s, "b": b, "h": h, "a": a, "t": TABLE_2[number]["tp"]}
    want = eval(text, {"__builtins__": {}}, names)
    assert formulas.activation_bytes(s, b, h, a, **TABLE_2[number]) == pytest.approx(want)


@pytest.mark.parametrize(
    "configuration, derived", [("0191", "0193"), ("0194", "0196"), ("0200", "0202")]
)
def test_activations_of_korthikanti_models(configuration, derived):
    row = ROWS[f"activations-{configuration}"]["value"]
    s, b, h, a = 2048, row["micro_batch"], row["hidden"], row["heads"]
    got = [
        formulas.activation_bytes(s, b, h, a, row["TP"], parallel, recompute) / GIB
        for parallel, recompute in (
            (False, "none"), (True, "none"), (False, "selective"), (True, "selective"),
        )
    ]  # fmt: skip
    # Full recomputation as the record counts it: the layer's input, cut over the ranks.
    got.append(formulas.activation_bytes(s, b, h, a, 1, False, "full") / GIB)
    want = ROWS[f"activations-{derived}"]["value"]
    assert got[:4] == pytest.approx(want[:4], abs=1e-4)
    assert got[4] in (pytest.approx(want[4], abs=1e-4), pytest.approx(2 * want[4], abs=1e-4))


def test_activation_decomposition_and_savings():
    s, b, h, a = 2048, 1, 12288, 96
    scores = 5 * a * s / h
    elements = s * b * h
    assert formulas.activation_bytes(s, b, h, a) == pytest.approx(elements * (34 + scores))
    ratios, saved, overhead = value("activations-0190")
    for (layers, hidden, heads), ratio, percent, flops in zip(
        ((96, 12288, 96), (105, 20480, 128)), ratios, saved, overhead, strict=True
    ):
        assert 5 * heads * s / hidden == pytest.approx(ratio)
        whole = formulas.activation_bytes(s, 1, hidden, heads)
        assert 100 * (1 - 34 * s * hidden / whole) == pytest.approx(percent, abs=0.6)
        model = formulas.gpt_flops(64, s, layers, hidden, 51200, "none")
        hardware_flops = formulas.gpt_flops(64, s, layers, hidden, 51200, "selective")
        assert 100 * (hardware_flops / model - 1) == pytest.approx(flops, abs=0.06)


def test_first_stage_interleaving_and_extra_terms():
    s, b, h, a, layers, tp = 2048, 1, 12288, 96, 96, 8
    per_layer = formulas.activation_bytes(s, b, h, a, tp, sequence_parallel=True)
    for pp in (1, 8, 16):
        got = formulas.first_stage_activation_bytes(s, b, h, a, layers, tp, pp)
        assert got == pytest.approx(layers * per_layer)  # activations-0185: independent of pp
    factor = formulas.first_stage_activation_bytes(s, b, h, a, layers, tp, 8, 3)
    assert factor / (layers * per_layer) == pytest.approx(1 + 7 / 24)  # activations-0186
    share = formulas.extra_activation_bytes(2048, 4, 6144, 51200, 8)
    total = 48 * formulas.activation_bytes(2048, 4, 6144, 64, 8, sequence_parallel=True)
    # activations-0206: the paper prints 0.01 %, its own formula gives 0.57 %.
    assert 100 * share / total == pytest.approx(ROWS["activations-0206"]["computed"], abs=0.01)


# ---- FLOPs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", rows("Table 1 row"))
def test_narayanan_table_1_parameters_and_time(record):
    row = record["value"]
    parameters = formulas.gpt_parameters(row["layers"], row["hidden"], 51200, 2048)
    # Printed with one decimal; 18.4 for 18.45 and 1.7 for 1.65 are the paper's own roundings.
    assert parameters / 1e9 == pytest.approx(row["params_B"], abs=0.051)
    flops = formulas.gpt_flops(row["batch"], 2048, row["layers"], row["hidden"], 51200)
    seconds = flops / row["GPUs"] / row["TFLOPs_per_GPU"] / 1e12
    assert seconds == pytest.approx(record["computed"]["iter_s"], abs=0.006)
    aggregate = row["TFLOPs_per_GPU"] * row["GPUs"] / 1000
    assert aggregate == pytest.approx(row["aggregate_PFLOPs"], rel=0.02)
    assert 100 * row["TFLOPs_per_GPU"] / 312 == pytest.approx(row["pct_peak"], abs=0.6)


@pytest.mark.parametrize("record", rows("Table 2 row"))
def test_narayanan_table_2_days(record):
    _, size, _, _, gpus, _, achieved, days = record["value"]
    got = formulas.training_seconds(size * 1e9, 300e9, gpus, achieved * 1e12) / 86400
    assert got == pytest.approx(record["computed"], abs=0.06)
    assert 0.96 < got / days <= 1.0  # the record's note: 1-3 % below the printed days


@pytest.mark.parametrize(
    "number, size, tokens, gpus, achieved",
    [("0174", 174.6, 300, 1024, 140), ("0175", 1008, 450, 3072, 163)],
)
def test_narayanan_training_days(number, size, tokens, gpus, achieved):
    seconds = formulas.training_seconds(size * 1e9, tokens * 1e9, gpus, achieved * 1e12)
    assert round(seconds / 86400) == value(f"megatron-{number}")


@pytest.mark.parametrize("times", ["0192", "0195", "0201"])
def test_korthikanti_utilisation(times):
    full, present, gain, mfu, hfu = value(f"activations-{times}")
    row = ROWS[f"activations-{int(times) - 1:04d}"]["value"]
    sizes = (row["global_batch"], 2048, row["layers"], row["hidden"], 51200)
    peak = row["GPUs"] * 312e12 * present
    assert 100 * (full / present - 1) == pytest.approx(gain, abs=0.25)
    assert 100 * formulas.gpt_flops(*sizes, "none") / peak == pytest.approx(mfu, abs=0.25)
    assert 100 * formulas.gpt_flops(*sizes, "selective") / peak == pytest.approx(hfu, abs=0.25)


def test_mt_nlg_and_llama_utilisation():
    seconds, achieved = value("configs-0334")
    flops = formulas.gpt_flops(1920, 2048, 105, 20480, 51200)
    got = flops / 2240 / seconds / 1e12
    assert got == pytest.approx(ROWS["configs-0334"]["computed"], abs=0.06)
    assert got == pytest.approx(achieved, rel=0.005)
    llama = value("configs-0337")
    assert 100 * llama["TFLOPs"] / 989 == pytest.approx(llama["MFU"], abs=0.6)
    assert llama["TP"] * llama["PP"] * llama["DP"] == llama["GPUs"]
    tokens = llama["seq"] * llama["batch_per_DP"] * llama["DP"]
    assert tokens / 1e6 == pytest.approx(16.78, abs=0.01)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_exact_flops_equal_the_published_formulas(recompute):
    # The sum over matrix products is the published closed form, for any GPT.
    for layers, hidden, heads, vocab in ((48, 6144, 64, 51200), (3, 12, 3, 101)):
        shape = Transformer(layers, hidden, heads, vocab=vocab, seq=2048)
        want = formulas.gpt_flops(7, 2048, layers, hidden, vocab, recompute)
        if recompute == "selective":
            # Equation 8 adds three forwards of the attention core; recomputing it is one.
            want -= 2 * 4 * 7 * 2048**2 * hidden * layers
        assert shape.training_flops(7 * 2048, recompute=recompute) == pytest.approx(want)


def test_exact_parameters_and_equation_2():
    for name in ("gpt-1.7b", "gpt3-175b", "gpt-1t"):
        shape = PRESETS[name]
        published = formulas.gpt_parameters(shape.layers, shape.hidden, shape.vocab, shape.seq)
        # Equation 2 leaves out the final norm, exactly.
        assert shape.parameters - round(published) == 2 * shape.hidden


@pytest.mark.parametrize("number, size", [("0373", "8b"), ("0374", "70b"), ("0375", "405b")])
def test_llama_presets(number, size):
    shape = PRESETS[f"llama-3.1-{size}"]
    got = [shape.hidden, shape.layers, shape.heads, shape.kv_heads, shape.ffn]
    assert got == value(f"configs-{number}")
    assert shape.vocab == 128256


def test_shoeybi_configurations():
    for hidden, heads, layers, size, _, _ in value("megatron-0128"):
        shape = Transformer(layers, hidden, heads, seq=1024)
        assert shape.parameters / 1e9 == pytest.approx(size, abs=0.06)
