"""No row of published.json is forgotten: formulas printed as text are evaluated and compared with
ours, limits that others report are the planner's answers, and what no formula covers is listed
with the reason.
"""

import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest

import minidist as md
from minidist.plan import costs, formulas, hardware, validate
from minidist.plan.costs import Layout
from minidist.plan.planner import NothingFits
from minidist.plan.shapes import PRESETS, Transformer

ROWS = validate.records()


def evaluate(text: str, **names):
    """The value of a printed formula; `12hL` and `2(n-1)` multiply, `^` is a power."""
    words = sorted([*names, "sum", "max"], key=len, reverse=True)
    tokens = re.findall("|".join([*words, r"\d+\.?\d*", r"[()+\-*/,^]"]), text)
    python, last = "", "("
    for token in tokens:
        operand = token[0].isalnum() or token == "("
        if operand and (last[0].isalnum() or last == ")") and last not in ("sum", "max"):
            python += "*"
        python += "**" if token == "^" else token
        last = token
    return eval(python, {"__builtins__": {}, "sum": sum, "max": max}, names)


def states(parameters, stage, n, convention="16"):
    return sum(formulas.state_bytes(parameters, stage, n, convention).values())


def zero3(*args, **more):
    return lambda which: formulas.deepspeed_zero3_bytes(*args, **more)[which]


# Sizes with different values for every name, so that exchanged names are noticed.
GPT = {"s": 2048, "b": 3, "h": 6144, "a": 64, "t": 8, "L": 48}
BOTH = ("optimizer", "parameters")
PRINTED = [
    # row, names of its formula, ours
    ("zero-0002", {"psi": 7.5e9, "Nd": 64}, lambda: states(7.5e9, 1, 64)),
    ("zero-0003", {"psi": 7.5e9, "Nd": 64}, lambda: states(7.5e9, 2, 64)),
    ("zero-0004", {"psi": 7.5e9, "Nd": 64}, lambda: states(7.5e9, 3, 64)),
    ("zero-0073", {"seq": 1024, "hidden": 4096, "batch": 8},
     lambda: formulas.tensor_parallel_traffic(1024, 8, 4096, 16, True, True)),
    ("offload-0096", {"params": 3e9},
     lambda: formulas.deepspeed_zero2_bytes(3e9, 8, offload=True)[1]),
    ("offload-0097", {"params": 3e9, "N": 8}, lambda: formulas.deepspeed_zero2_bytes(3e9, 8)[1]),
    ("offload-0098", {"params": 3e9, "N": 8},
     lambda: formulas.deepspeed_zero2_bytes(3e9, 8, version="code")[1]),
    ("offload-0099", {"params": 3e9, "N": 8, "largest_layer": 32e6},
     lambda: zero3(3e9, 32e6, 8)(1)),
    ("offload-0100", {"params": 3e9, "N": 8, "largest_layer": 32e6},
     lambda: zero3(3e9, 32e6, 8, offload=("optimizer",))(1)),
    ("offload-0101", {"largest_layer": 32e6}, lambda: zero3(3e9, 32e6, 8, offload=BOTH)(1)),
    ("offload-0102", {"params": 3e9, "total_gpus": 8},
     lambda: formulas.deepspeed_zero2_bytes(3e9, 8, offload=True)[0]),
    ("offload-0103", {"params": 3e9, "num_nodes": 2},
     lambda: zero3(3e9, 32e6, 16, 2, offload=BOTH)(0)),
    ("offload-0104", {"params": 3e9, "num_nodes": 2},
     lambda: zero3(3e9, 32e6, 16, 2, offload=("optimizer",))(0)),
    ("megatron-0133", {"p": 8, "m": 24}, lambda: formulas.bubble("1f1b", 8, 24)),
    ("megatron-0134", {"p": 8, "m": 24, "v": 3}, lambda: formulas.bubble("interleaved", 8, 24, 3)),
    ("megatron-0136", GPT, lambda: formulas.tensor_parallel_traffic(2048, 3, 6144, 8)),
    ("megatron-0139", {"l": 48, "h": 6144, "V": 51200, "s": 2048},
     lambda: formulas.gpt_parameters(48, 6144, 51200, 2048)),
    ("megatron-0140", {"B": 9, "l": 48, "h": 6144, "V": 51200, "s": 2048},
     lambda: formulas.gpt_flops(9, 2048, 48, 6144, 51200)),
    ("megatron-0141", {"T": 3e11, "P": 175e9, "n": 1024, "X": 140e12},
     lambda: formulas.training_seconds(175e9, 3e11, 1024, 140e12)),
    ("activations-0185", GPT,
     lambda: formulas.first_stage_activation_bytes(2048, 3, 6144, 64, 48, 8, pp=6)),
    ("activations-0186", {"p": 8, "m": 3},
     lambda: formulas.first_stage_activation_bytes(8, 1, 8, 1, 8, 1, 8, 3)
     / formulas.first_stage_activation_bytes(8, 1, 8, 1, 8, 1, 8)),
    ("activations-0187", {"p": 8, "S": 3}, lambda: formulas.in_flight("1f1b", 8, 24, 3)),
    ("activations-0188", {"B": 9, "L": 48, "h": 6144, "v": 51200, "s": 2048},
     lambda: formulas.gpt_flops(9, 2048, 48, 6144, 51200, "none")),
    ("activations-0189", {"B": 9, "L": 48, "h": 6144, "v": 51200, "s": 2048},
     lambda: formulas.gpt_flops(9, 2048, 48, 6144, 51200, "selective")),
    ("pipeline-0208", {"K": 8, "M": 24}, lambda: formulas.bubble("gpipe", 8, 24, of="total")),
    ("fsdp-0228", {"psi_i": [3, 5, 4], "F": 4},
     lambda: formulas.fsdp_peak_parameters([3, 5, 4], 4)),
    ("collectives-0261", {"n": 8, "alpha": 1e-5, "S": 1e9, "B": 3e11},
     lambda: formulas.ring_seconds("all_reduce", 1e9, 8, 3e11, 1e-5)),
    ("collectives-0262", {"n": 8, "alpha": 1e-5, "S": 1e9, "B": 3e11},
     lambda: formulas.ring_seconds("all_gather", 1e9, 8, 3e11, 1e-5)),
    ("goyal-0247", {"k": 32, "n": 256}, lambda: md.scale_lr(0.1, 256, 32 * 256)),
]  # fmt: skip


@pytest.mark.parametrize("name, names, ours", PRINTED, ids=[row[0] for row in PRINTED])
def test_a_printed_formula_is_ours(name, names, ours):
    row = ROWS[name]
    text = row.get("formula") or row["value"]
    text = text.removeprefix("O").removeprefix("lr = ")  # GPipe's order of magnitude; an equation
    for end in (" elements", ", independent", ", m ="):
        text = text.partition(end)[0]
    assert ours() == pytest.approx(evaluate(text, **names), rel=1e-12)


def test_formulas_printed_with_words():
    b, s, h, t = 3, 2048, 6144, 8
    plain, split = ROWS["megatron-0137"]["value"].split(" elements (")
    assert formulas.pipeline_traffic(s, b, h) == evaluate(plain, b=b, s=s, h=h)
    got = formulas.pipeline_traffic(s, b, h, t, scatter_gather=True)
    assert got == evaluate(split.partition(" with")[0], b=b, s=s, h=h, t=t)
    text = ROWS["megatron-0138"]["value"].partition(",")[0].replace("b'/b", "B/d/q")
    text = text.replace("tf(b)", "tf").replace("tb(b)", "tb")
    want = evaluate(text, B=64, d=4, q=2, p=8, tf=1.0, tb=2.0)
    assert formulas.pipeline_seconds(64, 2, 4, 8, 1.0, 2.0) == want
    strategies = zip(("replicate", "full", "hybrid"), ROWS["fsdp-0227"]["value"].split(";"),
                     strict=True)  # fmt: skip
    for strategy, text in strategies:
        got = formulas.cross_host_traffic(14e9, 64, 8, strategy)
        assert got == pytest.approx(evaluate(text, M=14e9, W=64, G=8)), strategy
    text = ROWS["fsdp-0229"]["value"].replace("max psi_i", "max(psi_i)")
    want = evaluate(text, K_full=4, K_low=2, Psi=12, F=4, psi_i=[3, 5, 4])
    assert formulas.fsdp_peak_parameter_bytes([3, 5, 4], 4) == want
    all_m, at_most_p = ROWS["megatron-0135"]["value"].split(" / at most ")
    assert formulas.in_flight("gpipe", 8, 24, 0) == evaluate(all_m, m=24)
    assert formulas.in_flight("1f1b", 8, 24, 0) == evaluate(at_most_p, p=8)
    enough = evaluate(ROWS["pipeline-0209"]["value"].removeprefix("M >= "), K=8)
    assert formulas.bubble("gpipe", 8, enough, of="total") < 0.2


def test_sums_that_sources_take_apart():
    attention, mlp, norms, whole = map(
        int, re.findall(r"(\d+)sbh", ROWS["activations-0184"]["value"])
    )
    per_element = formulas.activation_bytes(8, 1, 8, 1, keep_scores=False) / 64
    assert attention + mlp + norms == per_element == 34
    cut = formulas.activation_bytes(8, 1, 8, 1, tp=2, keep_scores=False) / 64
    assert cut == whole + (34 - whole) / 2
    script = ROWS["activations-0207"]["value"]
    assert "bytes/param 18, or 6+12/DP" in script and "18+4*ffn/h" in script
    assert states(1, 0, 1, "18") == 18 and states(1, 1, 64, "18") == 6 + 12 / 64
    assert per_element == 18 + 4 * 4
    # On the host: 16 bytes per parameter, 18 with the 16-bit parameters.
    sizes = [int(n) for n in re.findall(r"(\d+) (?:fp32|momentum|variance)",
                                        ROWS["offload-0105"]["value"])]  # fmt: skip
    more = sum(int(n) for n in re.findall(r"(\d+)(?= fp16|\s\+)", ROWS["offload-0106"]["value"]))
    for kind, each in (("optimizer", sum(sizes)), ("parameters", more)):
        best = md.plan(params=7e9, gpus=1, gpu="a100", offload=kind).best
        assert best.host_bytes == each * PRESETS["llama-2-7b"].parameters
    assert (sum(sizes), more) == (16, 18)


# ---- what others could and could not train ------------------------------------------------------


def fits(**question) -> bool:
    try:
        return bool(md.plan(seq=1024, host_memory=1.5e12, global_batch=16, **question).best)
    except NothingFits:
        return False


def test_limits_of_offload_are_those_reported():
    lonely = {"gpus": 1, "gpu": "v100"}
    largest = ROWS["offload-0107"]["value"] * 1e9
    assert largest == ROWS["offload-0108"]["value"][0] * 1e9 == 13e9
    assert fits(params=largest, offload="optimizer", **lonely)
    assert not fits(params=1.1 * largest, offload="optimizer", **lonely)
    _, with_parameters, _ = ROWS["offload-0114"]["value"]
    assert ROWS["offload-0113"]["value"] == f"over {with_parameters}"
    assert fits(params=with_parameters * 1e9, offload="parameters", **lonely)
    dgx2 = {"gpus": 16, "gpus_per_node": 16, "gpu": "v100", "offload": "optimizer"}
    assert fits(params=ROWS["offload-0111"]["value"] * 1e9, **dgx2)
    assert not fits(params=100e9, **dgx2)
    assert "CUDA OOM" in ROWS["offload-0122"]["value"] and ROWS["offload-0123"]["value"] == "works"
    small = {"gpus": 1, "gpu": "rtx3090", "offload": "optimizer"}
    assert not fits(params=11e9, **small) and fits(params=3e9, **small)


def test_seconds_of_an_offloaded_step():
    shape, machine = PRESETS["llama-2-7b"], hardware.cluster("a100", 4)
    layout = Layout(4, "zero2", offload="optimizer")
    seconds = costs.optimizer_seconds(shape.parameters / 4, layout, machine)
    assert "> 4 s" in ROWS["offload-0126"]["quantity"] and 4 < seconds < 4.5
    # Gradients down and parameters up, 16 bits each: twice the model's size.
    crossing = seconds - 28 * shape.parameters / costs.HOST_BANDWIDTH
    sent = crossing * machine.accelerator.pcie * costs.PCIE_EFFICIENCY
    assert sent == pytest.approx(ROWS["offload-0127"]["value"] * 2 * shape.parameters / 4)


def test_layer_times_of_the_22b_model():
    shape, machine = Transformer(48, 6144, 64, dropout=True), hardware.cluster("a100", 8)
    kinds = [("none", False), ("none", True), ("full", False), ("selective", False),
             ("selective", True)]  # fmt: skip
    for published, (recompute, parallel) in zip(
        ROWS["activations-0203"]["value"], kinds, strict=True
    ):
        software = replace(validate.MEGATRON_2022, sequence_parallel=parallel)
        layout = Layout(1, "ddp", 8, 1, 4, recompute=recompute)
        layer = costs.layer_seconds(shape, layout, machine, software)
        got = [1e3 * layer.forward, 1e3 * layer.backward]
        assert got == pytest.approx(published[:2], rel=0.08), (recompute, parallel)


def test_rules_of_others_are_what_the_planner_finds():
    def layout(**question):
        return md.plan(**question).best.layout

    # The Ultra-Scale Playbook's rules: configs-0369, configs-0370, configs-0371, configs-0372.
    small = layout(params=7e9, gpus=8)
    assert (small.tp > 1) + (small.pp > 1) + (small.dp_kind == "fsdp") == 1
    middle = layout(params=70e9, gpus=64)
    assert middle.dp_kind == "fsdp" or (middle.tp > 1 and middle.pp > 1)
    assert max(layout(params=70e9, gpus=512).tp, layout(params=70e9, gpus=512).pp) > 1
    large = layout(params=175e9, gpus=1024)
    assert large.tp > 1 and large.dp > 1
    # configs-0376: with a slow network replicas of a sharded node, with a slower one pipelines.
    slow = {"params": 7e9, "gpus": 64, "gpu": "a100"}
    assert layout(**slow, port=3e9).dp_kind == "hybrid"
    assert layout(**slow, port=1.25e9).pp > 1
    # configs-0364: Megatron Core's layout of an 8B on 8 GPUs (it adds context parallel).
    model, gpus, tp, pp, _ = ROWS["configs-0364"]["value"]
    best = layout(model="llama-3.1-8b", gpus=gpus)
    assert (model, best.tp, best.pp) == ("LLaMA-3 8B", tp, pp)


def test_ports_of_usual_servers_and_our_defaults():
    def gigabits(name):
        return hardware.cluster(name, 8).inter.bandwidth * 8 / 1e9

    assert gigabits("rtx4090") == ROWS["hardware-0303"]["value"]
    assert gigabits("b200") == ROWS["hardware-0306"]["value"]
    assert gigabits("h100") / 8 * 8 == ROWS["hardware-0307"]["value"]  # GB/s of 8 ports
    low, high = map(int, ROWS["hardware-0308"]["value"].split("-"))
    assert low <= 100 * hardware.NETWORK_EFFICIENCY <= high
    defaults = inspect.signature(md.DDP).parameters
    got = [defaults[name].default for name in ("bucket_cap_mb", "first_bucket_mb")]
    assert got == ROWS["ddp-0224"]["value"]


# ---- the rest ----------------------------------------------------------------------------------

NOT_COVERED = {
    "the model's shape or the batch is not given": """
        zero-0072 offload-0120 offload-0121 offload-0124 megatron-0176 megatron-0177 pipeline-0210
        fsdp-0236 fsdp-0237 fsdp-0239 fsdp-0240 configs-0326 configs-0327 configs-0330 configs-0378
        configs-0379""",
    "speed or size of a technique that the simulator does not play (offload in parts, to NVMe)": """
        offload-0109 offload-0115 offload-0116 offload-0117 offload-0118""",
    "a schedule or an axis that we do not have (ZB-2P, context and expert parallel)": """
        pipeline-0213 configs-0352 configs-0365 configs-0368""",
    "a gain measured on one program and machine, nothing to compute it from": """
        megatron-0130 pipeline-0215 ddp-0219 ddp-0220 ddp-0221 ddp-0222 fsdp-0230 fsdp-0231
        fsdp-0234 fsdp-0238 fsdp-0246""",
    "what a program does, in words: tests of the strategies check ours": """
        offload-0112 offload-0119 megatron-0132 ddp-0225 fsdp-0232 fsdp-0233 fsdp-0241 fsdp-0242
        fsdp-0243 fsdp-0244 fsdp-0245 configs-0340""",
    "accuracy after training on ImageNet": "goyal-0248 goyal-0249 goyal-0250 goyal-0251",
}


def test_every_row_is_covered_or_says_why_not():
    files = [*sorted(Path(__file__).parent.glob("test_plan*.py")), Path(validate.__file__)]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    text = re.sub(r"NOT_COVERED = \{.*?\n\}", "", text, flags=re.DOTALL)
    # Row numbers are unique over all groups: "0341", zero-0002, and the groups that rows() takes.
    numbers = set(re.findall(r'(?<=[-"])\d{4}\b', text))
    groups = tuple(re.findall(r'rows\("([^"]+)"\)', text))
    covered = {
        name for name, row in ROWS.items()
        if name[-4:] in numbers or row["quantity"].startswith(groups)
    }  # fmt: skip
    reasons = {name for names in NOT_COVERED.values() for name in names.split()}
    assert reasons <= set(ROWS), reasons - set(ROWS)
    assert not covered & reasons, sorted(covered & reasons)
    assert covered | reasons == set(ROWS), sorted(set(ROWS) - covered - reasons)
