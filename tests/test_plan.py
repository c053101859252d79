"""Planner and simulator: exact counts of built models, answers people would give, bad input.

Cases B102 (parameter counts per rank) and B103 (activation bytes) of the public bug reports; the
published runs are predicted within what the issue promises. No processes, no GPU.
"""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import minidist as md
from minidist.parallel.schedules import schedule
from minidist.plan import formulas
from minidist.plan.costs import (
    Layout,
    Software,
    layer_activation_bytes,
    logits_bytes,
    microbatches,
)
from minidist.plan.estimate import activation_bytes, estimate
from minidist.plan.hardware import accelerator, cluster
from minidist.plan.shapes import PRESETS, Transformer, from_module
from minidist.plan.simulator import Clock, Step, _play_pipeline, simulate
from minidist.plan.validate import cases, crossover, markdown, validate

# ---- B102: counts equal numel() of what is really built ----------------------------------------


class TinyLayer(nn.Module):
    """One layer as a tensor-parallel rank holds it; grouped keys and values, optional biases."""

    def __init__(self, s, tp):
        super().__init__()
        heads, kv = s.heads // tp, max(1, s.kv_heads // tp)
        norm = nn.LayerNorm if s.norm == "layer" else nn.RMSNorm
        self.norm1, self.norm2 = norm(s.hidden), norm(s.hidden)
        self.q = nn.Linear(s.hidden, heads * s.head_dim, bias=s.bias)
        self.kv = nn.Linear(s.hidden, 2 * kv * s.head_dim, bias=s.bias)
        self.proj = nn.Linear(heads * s.head_dim, s.hidden, bias=s.bias)
        wide = s.ffn // tp
        self.up = nn.ModuleList(
            nn.Linear(s.hidden, wide, bias=s.bias) for _ in range(2 if s.gated else 1)
        )
        self.down = nn.Linear(wide, s.hidden, bias=s.bias)


def build_rank(s, tp, pp, stage):
    """What rank (any, `stage`) of a (tp, pp) grid holds, as modules."""
    vocab = -(-s.vocab // tp)
    parts = nn.ModuleDict()
    parts["layers"] = nn.ModuleList(TinyLayer(s, tp) for _ in range(s.stage_layers(pp)[stage]))
    if stage == 0:
        parts["token"] = nn.Embedding(vocab, s.hidden)
        if s.positions == "learned":
            parts["position"] = nn.Embedding(s.seq, s.hidden)
    if stage == pp - 1:
        parts["norm"] = nn.LayerNorm(s.hidden) if s.norm == "layer" else nn.RMSNorm(s.hidden)
        parts["output"] = nn.Linear(s.hidden, vocab, bias=False)
        if s.tied and pp == 1:
            parts["output"].weight = parts["token"].weight
    return parts


def numel(module):
    return sum(p.numel() for p in module.parameters())  # a tied matrix once


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("more", [{}, {"gated": True, "norm": "rms", "positions": "rotary"}])
@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_b102_counts_equal_built_modules(bias, tied, more, tp, pp):
    s = Transformer(3, 12, 3, kv_heads=1, vocab=101, seq=7, bias=bias, tied=tied, **more)
    for stage in range(pp):
        assert s.rank_parameters(tp, pp, stage) == numel(build_rank(s, tp, pp, stage))
    if tp == pp == 1:
        assert s.parameters == numel(build_rank(s, 1, 1, 0))


def test_b102_the_classic_mistakes_are_different_numbers():
    s = Transformer(3, 12, 3, kv_heads=1, vocab=101, seq=7, tied=True)
    assert s.padded_vocab(3) == 102 and s.padded_vocab(1) == 101
    assert s.layer_parameters(3) * 3 > s.layer_parameters()  # norms and row biases are replicated
    assert s.parameters != replace(s, tied=False).parameters
    # With one stage per rank both ends hold the tied table, the model owns it once.
    ends = s.rank_parameters(1, 3, 0) + s.rank_parameters(1, 3, 1) + s.rank_parameters(1, 3, 2)
    assert ends - s.parameters == 101 * 12


@pytest.mark.parametrize("tied", [True, False])
def test_counts_of_our_gpt(tied):
    config = md.GPTConfig(vocab=101, seq=9, width=12, layers=3, heads=3, tied=tied)
    model = md.build_gpt(config)
    shape = from_module(model)
    assert shape.parameters == numel(model) == config.parameters
    assert (shape.layers, shape.hidden, shape.heads, shape.tied) == (3, 12, 3, tied)
    assert shape.layer_parameters() == numel(model.blocks[0])


def test_cutting_what_does_not_divide():
    s = Transformer(6, 12, 6, kv_heads=3)
    with pytest.raises(ValueError, match="heads not divisible by tp: 6 heads, tp 4"):
        s.layer_parameters(4)
    with pytest.raises(
        ValueError, match="kv_heads 3 can be neither divided nor repeated over tp 2"
    ):
        s.layer_parameters(2)
    with pytest.raises(ValueError, match="more pipeline stages than layers"):
        s.stage_layers(7)
    with pytest.raises(ValueError, match="hidden 10 is not a multiple of heads 3"):
        Transformer(1, 10, 3)
    with pytest.raises(ValueError, match="cannot read the shape of Linear"):
        from_module(nn.Linear(2, 2))


# ---- B103: activation bytes --------------------------------------------------------------------


def test_b103_activation_bytes():
    s = h = 1024
    plain = formulas.activation_bytes(s, 1, h, 16)
    assert plain == 35_651_584 + 83_886_080
    assert formulas.activation_bytes(s, 1, h, 16, tp=2) == 65_011_712
    assert formulas.activation_bytes(s, 1, h, 16, tp=2, sequence_parallel=True) == 59_768_832


def test_b103_measured_on_a_block_of_its_assumptions():
    """34 s b h + 5 a s^2 b on a real block: 2-byte values, 1-byte masks, scores kept.

    Left out by the formula, and 0.3 % here: the norms' means and deviations.
    """
    s, b, h, a = 64, 2, 128, 8
    torch.manual_seed(0)
    norm1, norm2 = nn.LayerNorm(h).bfloat16(), nn.LayerNorm(h).bfloat16()
    qkv, proj = nn.Linear(h, 3 * h).bfloat16(), nn.Linear(h, h).bfloat16()
    up, down = nn.Linear(h, 4 * h).bfloat16(), nn.Linear(4 * h, h).bfloat16()

    def dropout(x):
        return torch.native_dropout(x, 0.1, True)[0]

    def block(x):
        q, k, v = qkv(norm1(x)).view(b, s, 3, a, h // a).permute(2, 0, 3, 1, 4)
        q, k, v = (t.reshape(b * a, s, h // a) for t in (q * (h // a) ** -0.5, k, v))
        scores = dropout(torch.softmax(q @ k.transpose(1, 2), -1))
        out = (scores @ v).view(b, a, s, h // a).transpose(1, 2).reshape(b, s, h)
        x = x + dropout(proj(out))
        return x + dropout(down(nn.functional.gelu(up(norm2(x)))))

    kept = {}
    weights = {p.untyped_storage().data_ptr() for m in (norm1, norm2, qkv, proj, up, down)
               for p in m.parameters()}  # fmt: skip

    def save(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), t)
        return t

    x = torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        y = block(x)
    measured = sum(size for size, _ in kept.values())
    want = formulas.activation_bytes(s, b, h, a)
    assert measured == pytest.approx(want, rel=0.05), measured / want
    assert y.shape == x.shape


def test_b103_layer_model_equals_the_published_formula():
    for tp in (1, 2, 8):
        for parallel in (False, True):
            for recompute in ("none", "selective", "full"):
                shape = Transformer(4, 1024, 16, seq=1024, dropout=True)
                software = Software(attention="matrix", sequence_parallel=parallel)
                layout = Layout(tp=tp, microbatch=3, recompute=recompute)
                got = layer_activation_bytes(shape, layout, software)
                want = formulas.activation_bytes(1024, 3, 1024, 16, tp, parallel, recompute)
                # Of the checkpointed input each rank keeps its part where it is cut anyway.
                cut = tp if recompute == "full" and parallel else 1
                assert got == pytest.approx(want / cut)


def test_activations_of_our_gpt_agree_within_five_percent():
    """The planner's formula against what autograd keeps for the real GPT in bfloat16.

    It leaves out the norms' statistics and the attention's log-sum-exp (about 1 % at width 64).
    """
    config = md.GPTConfig(vocab=256, seq=64, width=64, layers=4, heads=4)
    model = md.build_gpt(config, dtype=torch.bfloat16)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    x = torch.randn(2, 64, 64, dtype=torch.bfloat16, requires_grad=True)
    kept = {}

    def save(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        model.blocks[1](model.blocks[0](x))
    measured = sum(size for size, _ in kept.values()) / 2
    shape = from_module(model)
    want = layer_activation_bytes(shape, Layout(microbatch=2), Software())
    assert measured == pytest.approx(want, rel=0.05), measured / want


# ---- published runs ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def predictions():
    return validate()


def test_published_runs_are_predicted_within_the_promise(predictions):
    promised = [row for row in predictions if row["tolerance"] is not None]
    assert len(promised) >= 44
    broken = [row for row in promised if abs(row["error"]) > row["tolerance"]]
    assert not broken, broken
    sources = {row["source"]: row["tolerance"] for row in promised}
    assert sources == {
        "Narayanan 2021 Table 1": 0.10, "Narayanan 2021 Table 2": 0.20,
        "Korthikanti 2022 Table 5": 0.10, "torchtitan": 0.20, "torchtitan, peak memory": 0.15,
    }  # fmt: skip
    # Every row of Tables 1 and 2 in the facts file is there.
    assert sum(r["source"].endswith("Table 1") for r in promised) == 7
    assert sum(r["source"].endswith("Table 2") for r in promised) == 10


def test_one_constant_per_accelerator_and_no_other_knob():
    # The same A100 in every A100 row, the same H100 in every torchtitan row.
    used = {}
    for case in cases():
        card = case.machine.accelerator
        used.setdefault(card.name, set()).add(card.efficiency)
    assert used == {name: {accelerator(name).efficiency} for name in used}
    software = {case.source: set() for case in cases()}
    for case in cases():
        software[case.source].add(case.software)
    assert len(software["Narayanan 2021 Table 1"]) == 1
    assert len(software["Narayanan 2021 Table 2"]) == 2  # DeepSpeed and Megatron


def test_the_crossover_of_zero3_and_3d_appears():
    rows = {row["gpus"]: row["zero3_tflops"] - row["three_d_tflops"] for row in crossover()}
    assert rows[192] > 0 > rows[768]
    assert rows[1536] < -90  # 44 against 141 in the paper


def test_validation_page_is_in_step():
    from pathlib import Path

    import minidist.plan.validate as module

    page = Path(module.__file__).with_name("VALIDATION.md").read_text(encoding="utf-8")
    assert page == markdown(), "python -m minidist.plan.validate writes it"


# ---- simulator ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, chunks", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("naive", 1)]
)
def test_simulated_pipeline_is_the_schedule(name, chunks):
    """With equal stages and free messages the simulator plays the schedule's own timeline."""
    shape, machine = Transformer(8, 512, 8, vocab=8, seq=256), cluster("a100", 4, gpus_per_node=4)
    step = Step(shape, machine, Layout(pp=4, schedule=name, chunks=chunks), 8, Software())
    step.send, step.logits = 0.0, (0.0, 0.0)
    plan = schedule(name, 4, 8, chunks)
    makespan = max(_play_pipeline(step, Clock(), plan))
    f, b, w = (2 * t for t in (step.layer.forward, step.layer.backward, step.layer.weight))
    assert makespan == pytest.approx(plan.simulate(f=f, b=b, w=w).makespan)
    if name != "zb-h1":  # its formula is for equal forward, input and weight times
        assert makespan / (8 * (f + b)) - 1 == pytest.approx(formulas.bubble(name, 4, 8, chunks))


def test_parts_add_up_and_trace_is_readable(tmp_path):
    shape, machine = PRESETS["gpt-7.5b"], cluster("a100", 64)
    for layout in (Layout(16, "zero1", 2, 2, 1), Layout(64, "fsdp"), Layout(8, "ddp", 8, 1, 2)):
        run = simulate(shape, machine, layout, 128)
        assert sum(run.parts.values()) == pytest.approx(run.seconds)
        assert all(seconds >= -1e-9 for seconds in run.parts.values()), run.parts
    path = tmp_path / "trace.json"
    run.save_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["ph"] for e in events} == {"X", "M", "C"}
    spans = [e for e in events if e["ph"] == "X"]
    for lane in (0, 1):  # a lane does one thing at a time
        mine = sorted((e["ts"], e["dur"]) for e in spans if e["tid"] == lane and e["pid"] == 0)
        assert all(t + d <= u + 1e-3 for (t, d), (u, _) in zip(mine, mine[1:], strict=False))


def test_fsdp_order_and_memory_of_the_simulation():
    shape, machine = Transformer(6, 1024, 8, vocab=1024), cluster("a100", 8)
    run = simulate(shape, machine, Layout(8, "fsdp"), 8)
    names = [t.name for t in sorted(run.tasks, key=lambda t: t.start) if t.lane == "network"]
    forward = names[: names.index("reduce logits")]
    assert forward[:3] == ["gather embedding", "gather layer 0", "gather layer 1"]
    # Backward: the next gather is issued before the reduce-scatter of the unit just finished.
    assert forward[-1] == "gather layer 5"
    assert names.index("gather layer 3") < names.index("reduce layer 4")
    assert names[-1] == "reduce embedding"
    assert names.count("gather layer 2") == 2  # forward and backward
    # At most two units are whole at once; nothing is left at the end.
    gathered = [size for _, _, kind, size in run.memory if kind == "gathered"]
    assert max(gathered) <= 2 * 2 * shape.layer_parameters() * 1.001
    assert gathered[-1] == 0
    kept = simulate(shape, machine, Layout(8, "fsdp-grad-op"), 8)
    whole = max(size for _, _, kind, size in kept.memory if kind == "gathered")
    assert whole == pytest.approx(2 * shape.parameters, rel=0.01)
    assert [t.name for t in kept.tasks].count("gather layer 2") == 1


@pytest.mark.parametrize("name, chunks", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_pipeline_memory_over_time(name, chunks):
    """Activations on every rank peak at what the schedule has in flight, and end at zero."""
    shape, machine = Transformer(8, 512, 8, vocab=512, seq=256), cluster("a100", 4)
    layout = Layout(pp=4, schedule=name, chunks=chunks)
    run = simulate(shape, machine, layout, 8)
    each = layer_activation_bytes(shape, layout, Software()) * 8 / 4 / chunks
    in_flight = schedule(name, 4, 8, chunks).in_flight
    for rank in range(4):
        sizes = [size for _, r, kind, size in run.memory if (r, kind) == (rank, "activations")]
        assert max(sizes) == pytest.approx(in_flight[rank] * each)
        assert sizes[-1] == pytest.approx(0, abs=1)
        if name == "1f1b":
            assert in_flight[rank] == formulas.in_flight(name, 4, 8, rank)
    if name != "gpipe":  # what the planner reserves for the first stage
        step = Step(shape, machine, layout, 8, Software())
        logits = logits_bytes(shape, layout)
        last = in_flight[-1] * each + logits
        assert activation_bytes(step) == pytest.approx(max(in_flight[0] * each, last), rel=1e-6)


def test_ddp_overlaps_its_reductions():
    shape, machine = PRESETS["gpt-1.7b"], cluster("a100", 64)
    overlapped = simulate(shape, machine, Layout(64, "ddp"), 64)
    at_the_end = simulate(shape, machine, Layout(64, "ddp"), 64, Software(dp_overlap=False))
    assert overlapped.seconds < at_the_end.seconds
    first = min(t.start for t in overlapped.tasks if t.kind == "communication")
    last = max(t.end for t in overlapped.tasks if t.kind == "backward")
    assert first < last


@pytest.mark.parametrize("tp, pp", [(1, 1), (8, 1), (1, 4), (4, 4)])
def test_estimates_agree_with_the_simulator(tp, pp):
    """The closed form that ranks layouts is within 3 % of playing the step."""
    for name, gpu, gpus in (("llama-2-7b", "h100", 16), ("gpt3-175b", "a100", 128)):
        shape, machine = PRESETS[name], cluster(gpu, gpus)
        for kind in ("ddp", "zero1") if pp > 1 else ("ddp", "zero1", "zero2", "fsdp", "hybrid"):
            for chunks in (1, 2) if pp > 1 else (1,):
                for recompute in ("none", "full"):
                    layout = Layout(
                        gpus // tp // pp, kind, tp, pp, 2, "interleaved" if chunks > 1 else "1f1b",
                        chunks, recompute, shard=max(1, 8 // tp),
                    )  # fmt: skip
                    batch = layout.dp * 2 * 4 * pp
                    quick = estimate(shape, machine, layout, batch).total_seconds
                    played = simulate(shape, machine, layout, batch).seconds
                    assert quick == pytest.approx(played, rel=0.03), layout


def test_simulation_refuses_what_does_not_fit_together():
    shape, machine = PRESETS["gpt2"], cluster("a100", 8)
    with pytest.raises(ValueError, match="dp x tp x pp = 4, but there are 8 GPUs"):
        simulate(shape, machine, Layout(4), 8)
    with pytest.raises(ValueError, match="global batch 9 is not a multiple"):
        simulate(shape, machine, Layout(8), 9)
    with pytest.raises(ValueError, match="unknown dp kind 'zero9'"):
        simulate(shape, machine, Layout(8, "zero9"), 8)
    with pytest.raises(ValueError, match="heads not divisible by tp"):
        simulate(shape, machine, Layout(1, tp=8), 8)
    assert microbatches(Layout(4, microbatch=2), 32) == 4
