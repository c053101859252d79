"""The planner's answers: layouts that people use, reasons that are true, one line for bad input."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import minidist as md
from minidist.plan.estimate import usable_bytes
from minidist.plan.hardware import accelerator, cluster
from minidist.plan.planner import NothingFits, in_code
from minidist.plan.shapes import PRESETS, from_parameters


def ask(**question):
    start = time.perf_counter()
    found = md.plan(**question)
    assert time.perf_counter() - start < 5
    return found


def check_consistent(found):
    """What must hold for every plan."""
    best = found.best
    assert best.total_bytes <= usable_bytes(found.cluster)
    assert best.layout.gpus == found.cluster.gpus
    assert found.reason in found.rows()[0]["why"]
    assert "torchrun" in found.command and "-m minidist train" in found.command
    for row in found.rows():
        assert sum(v for k, v in row["bytes"].items() if k != "peak") == pytest.approx(
            row["bytes"]["peak"]
        )
        assert row["why"] and row["tflops_per_gpu"] > 0
    for reason in found.rejected.values():
        assert reason.startswith("does not fit") or "slower" in reason or "as fast" in reason or (
            "faster on paper" in reason
        )  # fmt: skip


def test_7b_on_8_h100():
    # torchtitan runs its 8B so (facts configs-0341), Megatron Core with tp 1 pp 1 (0364).
    found = ask(params=7e9, gpus=8, gpu="h100")
    layout = found.best.layout
    assert layout.dp_kind in ("fsdp", "zero1", "zero2") and (layout.tp, layout.pp) == (1, 1)
    assert layout.offload == layout.recompute == "none"
    assert found.rejected["ddp"].startswith("does not fit: 1")
    assert "slower" in found.rejected["tensor parallel 8"]
    check_consistent(found)


def test_70b_on_256():
    # torchtitan: FSDP 32 x TP 8; Megatron Core: TP 4 x PP 4; the Playbook: either, no offload.
    found = ask(params=70e9, gpus=256)
    layout = found.best.layout
    assert layout.tp in (4, 8) and layout.dp_kind in ("fsdp", "zero1") and layout.pp <= 4
    assert layout.offload == "none"
    check_consistent(found)


def test_13b_on_one_rtx4090():
    # The document, 5.4: possible on 24 GB, slow. ZeRO-2 offload is not enough: 26 GB of weights.
    found = ask(params=13e9, gpus=1, gpu="rtx4090")
    layout = found.best.layout
    assert (layout.dp_kind, layout.offload, layout.recompute) == ("fsdp", "parameters", "full")
    assert found.best.host_bytes / 1e9 == pytest.approx(234, abs=1)
    assert "26 GB" in found.rejected["zero2 + optimizer offload"]
    assert 'md.FSDP(..., offload="cpu")' in in_code(layout)
    check_consistent(found)


def test_175b_on_1024_a100():
    # BLOOM: tp 4 pp 12 zero1; GPT-3 in Narayanan 2021: tp 8 pp 12.
    found = ask(params=175e9, gpus=1024, gpu="a100")
    layout = found.best.layout
    assert layout.tp in (4, 8) and layout.pp >= 4 and layout.dp_kind in ("ddp", "zero1")
    assert "does not fit" in found.rejected["zero1"]
    assert 120 < found.best.tflops_per_gpu < 220
    check_consistent(found)


@pytest.mark.parametrize(
    "question, kinds",
    [
        ({"params": 350e6, "gpus": 8, "gpu": "a100"}, {"ddp"}),
        ({"params": 7e9, "gpus": 64, "gpu": "a100"}, {"fsdp", "zero1", "hybrid"}),
        ({"model": "llama-3.1-8b", "gpus": 128, "gpu": "h100"}, {"fsdp", "hybrid"}),
        ({"params": 125e6, "gpus": 1, "gpu": "rtx3090"}, {"ddp"}),
        ({"params": 13e9, "gpus": 8, "gpu": "a100"}, {"fsdp", "zero1", "zero2"}),
    ],
)
def test_other_questions(question, kinds):
    found = ask(**question)
    assert found.best.layout.dp_kind in kinds and found.best.layout.offload == "none"
    check_consistent(found)


def test_limits_are_kept():
    found = ask(params=7e9, gpus=16, gpu="a100", tp=4, pp=2, dp_kind="zero1", microbatch=2,
                recompute="full")  # fmt: skip
    for e in found.layouts:
        layout = e.layout
        assert (layout.tp, layout.pp, layout.dp_kind, layout.microbatch, layout.recompute) == (
            4, 2, "zero1", 2, "full",
        )  # fmt: skip


def test_a_module_a_name_and_a_shape():
    model = md.build_gpt(md.GPTConfig(seq=64, width=64, layers=4, heads=4))
    found = ask(model=model, gpus=2, gpu="rtx4090")
    assert found.shape.parameters == sum(p.numel() for p in model.parameters())
    assert found.best.layout.dp_kind == "ddp"
    assert ask(model="gpt2", gpus=1).shape is PRESETS["gpt2"]
    assert ask(layers=8, hidden=512, heads=8, gpus=1).shape.layers == 8
    assert ask(model="gpt2", gpus=1, seq=256).shape.seq == 256


@pytest.mark.parametrize("size", [2e8, 1.3e9, 3e9, 7e9, 30e9, 120e9, 600e9, 2e12])
def test_a_size_becomes_a_usual_shape(size):
    shape = from_parameters(size)
    assert shape.parameters == pytest.approx(size, rel=0.05)
    assert 20 < shape.hidden / shape.layers < 350
    assert shape.heads % 4 == 0


# ---- nothing fits ------------------------------------------------------------------------------


def test_nothing_fits_says_what_would():
    with pytest.raises(
        NothingFits, match=r"nothing fits: .*GB.*it would fit if you use \d+"
    ) as why:
        md.plan(params=70e9, gpus=8, gpu="a100", offload="none")
    found = why.value.plan
    assert "\n" not in str(why.value)
    assert found.best is None and "use 16 of these GPUs" in found.changes
    assert "allow offload to the host" in found.changes
    # The changes are true.
    assert md.plan(params=70e9, gpus=16, gpu="a100", offload="none").best
    assert md.plan(params=70e9, gpus=8, gpu="a100").best.layout.offload != "none"
    size = next(c for c in found.changes if c.startswith("use GPUs with"))
    memory = float(size.split()[3]) * 1e9 * 1.01
    assert md.plan(params=70e9, gpus=8, gpu="a100", offload="none", memory=memory).best


def test_host_memory_limits_offload():
    with pytest.raises(NothingFits, match="234 GB of host memory per node, more than 64 GB"):
        md.plan(params=13e9, gpus=1, gpu="rtx4090", host_memory=64e9)


# ---- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "question, words",
    [
        ({"params": 7e9, "gpus": 0}, "gpus must be at least 1, got 0"),
        ({"params": 7e9, "gpu": "a1000"}, "unknown GPU 'a1000'; known: v100, a100"),
        ({"params": 7e9, "tp": 3}, "heads not divisible by tp: 32 heads, tp 3"),
        ({"model": "gpt-5"}, "unknown model 'gpt-5'; known: gpt2"),
        ({"params": 7e9, "gpus": 12}, "12 GPUs do not fill nodes of 8"),
        ({"params": 7e9, "pp": 64, "gpus": 64}, "more pipeline stages than layers"),
        ({"params": 7e9, "tp": 16, "gpus": 8}, "tp 16 does not divide 8 GPUs"),
        ({"params": 7e9, "dp_kind": "zero9"}, "unknown dp_kind 'zero9'"),
        ({"params": 7e9, "recompute": "half"}, "unknown recompute 'half'"),
        ({"params": 7e9, "offload": "disk"}, "unknown offload 'disk'"),
        ({"params": 7e9, "microbatch": 0}, "microbatch must be at least 1"),
        ({"params": 7e9, "seq": 0}, "seq must be at least 1"),
        ({"params": 7e9, "global_batch": 0}, "global batch must be at least 1"),
        ({"params": 7e9, "dp_kind": "fsdp", "tp": 1, "pp": 1, "global_batch": 9}, "no layout: "),
        ({"params": 10}, "params must be at least 1e6"),
        ({"params": float("nan")}, "params must be at least 1e6 and below 1e18, got nan"),
        ({"params": 7e9, "top": 0}, "top must be at least 1, got 0"),
        ({"params": 7e9, "memory": -5e9}, "memory must be above 0"),
        ({"params": 7e9, "memory": 1e9}, "1 GB per GPU is less than what the driver"),
        ({"params": 7e9, "port": 0}, "network must be above 0"),
        ({"params": 7e9, "host_memory": 0}, "host memory must be above 0"),
        ({}, "say which model"),
        ({"layers": 4, "hidden": 64}, "needs all of layers, hidden and heads"),
        ({"model": nn.Linear(2, 2)}, "cannot read the shape of Linear"),
        ({"params": 7e9, "convention": "12"}, "unknown convention '12'"),
        ({"params": 7e9, "gpu": "missing.toml"}, "no such hardware file"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line(question, words):
    with pytest.raises(ValueError, match="^.*") as error:
        md.plan(**question)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_hardware_from_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nmemory_gb = 48\nbf16_tflops = 100\n')
    with pytest.raises(ValueError, match="lacks memory_bandwidth_gbs"):
        accelerator(str(path))
    path.write_text(
        'name = "mine"\nmemory_gb = 48\nbf16_tflops = 100\nmemory_bandwidth_gbs = 900\n'
        "nvlink_gbs = 200\nefficiency = 0.6\n"
    )
    card = accelerator(str(path))
    assert (card.memory, card.flops["bf16"], card.nvlink) == (48e9, 1e14, 2e11)
    assert ask(params=1e9, gpus=8, gpu=str(path)).best
    for wrong in ('"much"', "0", "-1", "true"):
        text = 'name = "mine"\nmemory_gb = 48\nbf16_tflops = 100\n'
        path.write_text(text + f"memory_bandwidth_gbs = {wrong}\n")
        with pytest.raises(ValueError, match="memory_bandwidth_gbs must be a number above 0"):
            accelerator(str(path))
    path.write_text("name = ")
    with pytest.raises(ValueError, match="mine.toml"):
        accelerator(str(path))
    with pytest.raises(ValueError, match="gpus per node"):
        cluster("a100", 8, gpus_per_node=0)


# ---- the commands ------------------------------------------------------------------------------


def run(*arguments, timeout=60):
    return subprocess.run(
        [sys.executable, "-m", "minidist", *arguments], capture_output=True, text=True,
        timeout=timeout, env={**os.environ, "COLUMNS": "160"},
    )  # fmt: skip


def test_plan_command_writes_the_agreed_json(tmp_path):
    path, chart = tmp_path / "plan.json", tmp_path / "plan.png"
    done = run(
        "plan", "--params", "7e9", "--gpus", "8", "--gpu", "h100", "--json", str(path), "--chart",
        str(chart),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Why not" in done.stdout and "torchrun --nproc-per-node 8" in done.stdout
    assert chart.read_bytes()[:4] == b"\x89PNG"
    content = json.loads(path.read_text())
    assert {"minidist", "torch", "machine", "rows", "layouts"} <= set(content)
    assert content["torch"] == torch.__version__
    keys = {"dp", "dp_kind", "tp", "pp", "microbatch", "recompute", "offload", "bytes", "seconds",
            "tflops_per_gpu", "why"}  # fmt: skip
    assert all(keys <= set(layout) for layout in content["layouts"])
    kinds = {"parameters", "gradients", "optimizer", "activations", "buffers", "peak"}
    assert set(content["layouts"][0]["bytes"]) == kinds


@pytest.mark.timeout(150)
def test_the_printed_command_trains_in_the_layout_found(tmp_path):
    found = md.plan(
        layers=4, hidden=64, heads=4, seq=32, global_batch=8, gpus=2, pp=2, microbatch=2
    )
    assert found.best.layout.chunks == 2 and in_code(found.best.layout) == []
    path = tmp_path / "run.json"
    command = [sys.executable, "-m", "torch.distributed.run", *found.command.split()[1:]]
    # A rendezvous of its own: torchrun's usual port may be taken.
    command.insert(3, "--standalone")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--steps", "1", "--json", str(path)], capture_output=True, text=True,
        timeout=120, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    row = json.loads(path.read_text())["rows"][0]
    assert row["ranks"] == 2 and row["loss"]
    # Of an interleaved schedule with 2 stages, 2 chunks and the plan's micro-batches.
    want = 1 / (2 * found.best.microbatches)
    assert row["bubble_formula"] == pytest.approx(want)


def test_explain_shows_the_tree_and_both_tables():
    done = run("plan", "--params", "7e9", "--explain")
    assert done.returncode == 0, done.stderr
    for words in (
        "does the model fit on one card?", "Typical configurations", "7B-70B", "ZeRO-3 + TP + PP",
        "Advice", "wrong as a rule", "HYBRID_SHARD",
    ):  # fmt: skip
        assert words in done.stdout, words


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["plan", "--params", "7e9", "--gpus", "0"], "gpus must be at least 1"),
        (["plan", "--params", "7e9", "--tp", "3"], "heads not divisible by tp"),
        (["plan", "--params", "7e9", "--gpu", "tpu"], "unknown GPU 'tpu'"),
        (["plan", "--params", "1e12", "--gpus", "1", "--gpu", "rtx4090"], "nothing fits"),
        (["simulate", "--model", "llama-3.1-8b", "--tp", "3"], "tp x pp = 3 x 1"),
        (["simulate", "--model", "llama-3.1-8b", "--pp", "2", "--schedule", "spiral"], "spiral"),
        (["simulate", "--model", "gpt2", "--trace", "/no/such/folder/x.json"], "does not exist"),
    ],
)
def test_commands_answer_mistakes_in_one_line(arguments, words):
    done = run(*arguments)
    assert done.returncode == 2
    assert words in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_simulate_command(tmp_path):
    trace, path = tmp_path / "trace.json", tmp_path / "run.json"
    done = run(
        "simulate", "--params", "7e9", "--gpus", "16", "--gpu", "a100", "--dp-kind", "zero1",
        "--pp", "4", "--schedule", "interleaved", "--trace", str(trace), "--json", str(path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "bubble" in done.stdout
    assert json.loads(trace.read_text())["traceEvents"]
    row = json.loads(path.read_text())["rows"][0]
    assert row["bubble"] > 0 and row["seconds"]["total"] > 0


def test_validate_command_shows_errors(tmp_path, capsys):
    from minidist.cli import main

    path = tmp_path / "errors.json"
    assert main(["simulate", "--validate", "--json", str(path)]) == 0
    assert "44 of 44 rows within what is promised" in capsys.readouterr().out.replace("\n", " ")
    rows = json.loads(path.read_text())["rows"]
    assert {"source", "case", "published", "predicted", "error"} <= set(rows[0])


def test_planning_needs_no_torch():
    code = "import sys, minidist.plan as p; p.plan(params=7e9); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
