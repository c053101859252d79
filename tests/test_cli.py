"""The command line: one line for every mistake, exit codes, JSON keys, a rank that is killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from minidist.cli import COMMANDS, main

SMALL = ["--layers", "2", "--width", "32", "--heads", "2", "--seq", "16", "--batch", "8"]


ENDLESS = [sys.executable, "-m", "minidist", "train", "--steps", "1000000", *SMALL]


def command(*arguments, timeout=100, env=None, **options):
    """The installed command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "minidist", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        **options,
    )


# --- mistakes -----------------------------------------------------------------------------------

MISTAKES = [
    (["train", "--ranks", "0"], "ranks must be at least 1"),
    (["train", "--ranks", "-2"], "ranks must be at least 1"),
    (["train", "--ranks", "four"], "--ranks"),
    (["train", "--strategy", "dpp"], "unknown strategy 'dpp'; choose one of single, ddp"),
    (["train", "--strategy", "pp-1f1b", "--layers", "6"], "6 layers do not divide into 4"),
    (
        ["train", "--strategy", "pp-1f1b", "--microbatches", "5"],
        "do not divide into 5 micro-batches",
    ),
    (["train", "--strategy", "pp-interleaved"], "4 layers do not divide into 8"),
    (["train", "--batch", "6"], "batch of 6 does not divide among 4"),
    (["train", "--strategy", "tp", "--heads", "2"], "2 attention heads do not divide among 4"),
    (["train", "--width", "10"], "10 is not a multiple of 4"),
    (["train", "--dp", "3"], "dp=3"),
    (["train", "--dp", "0"], "dp must be at least 1"),
    (["train", "--strategy", "single", "--ranks", "2"], "does not work out"),
    (["train", "--strategy", "fsdp-grad-op", "--tp", "2", "--ranks", "4"], "does not combine"),
    (["train", "--strategy", "fsdp", "--pp", "2", "--tied"], "tied table on two pipeline stages"),
    (["train", "--schedule", "gpipe"], "a schedule needs a pipeline"),
    (["train", "--pp", "2", "--schedule", "gpype"], "gpype"),
    (["train", "--text", "/no/such/file.txt"], "text file not found: /no/such/file.txt"),
    (["train", "--seq", "999999"], "the text is shorter than one sequence"),
    (["train", "--dtype", "float8"], "unknown dtype 'float8'"),
    (["train", "--optimizer", "lion"], "unknown optimizer 'lion'"),
    (["train", "--steps", "0"], "steps must be at least 1"),
    (["train", "--lr", "0"], "lr must be positive"),
    (["train", "--seed", "-1"], "must not be negative"),
    (["train", "--timeout", "0"], "timeout must be positive"),
    (["train", "--json", "/no/such/folder/out.json"], "/no/such/folder does not exist"),
    (["train", "--frobnicate"], "No such option"),
    (["train", "surplus"], "surplus"),
    (["compare", "--ranks", "0"], "ranks must be at least 1"),
    (["compare", "--strategies", "ddp,dpp"], "unknown strategy 'dpp'"),
    (["compare", "--strategies", ","], "no strategy named"),
    (["compare", "--strategies", "tp", "--heads", "2"], "2 attention heads do not divide"),
    (["compare", "--strategies", "ddp", "--batch", "6"], "batch of 6"),
    (["compare", "--dtype", "int8"], "unknown dtype 'int8'"),
    (["compare", "--bucket", "-1"], "bucket"),
    (["compare", "--text", "/no/such/file.txt"], "text file not found"),
    (["compare", "--plot", "/no/such/folder/bars.png"], "/no/such/folder does not exist"),
    (["dance"], "unknown command 'dance'; choose one of compare, train"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=lambda v: " ".join(v) if isinstance(v, list) else None)  # noqa: E501  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(arguments, words, capsys, monkeypatch):
    import minidist.train.commands as commands

    def start(*arguments, **options):
        raise AssertionError("ranks were started before the arguments were checked")

    monkeypatch.setattr(commands, "Ranks", start)
    monkeypatch.setattr("minidist.train.compare.Ranks", start)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, err
    assert words in err and "Traceback" not in err


def test_a_text_shorter_than_one_sequence(tmp_path, capsys):
    (tmp_path / "short.txt").write_text("too short")
    assert main(["train", "--text", str(tmp_path / "short.txt")]) == 2
    assert "9 tokens, and a sequence of 64 needs 65" in capsys.readouterr().err


def test_the_same_in_a_process_of_its_own():
    for arguments in (["train", "--ranks", "0"], ["train", "--text", "/no/such/file"]):
        done = command(*arguments)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1 and done.stdout == ""


def test_without_typer_and_rich(tmp_path):
    # An empty package of that name that fails to import stands for one that is not installed.
    for name in ("typer", "rich"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = command("train", env={"PYTHONPATH": path})
    assert done.returncode == 1 and done.stdout == ""
    assert "pip install minidist[cli]" in done.stderr and done.stderr.count("\n") == 1
    assert "compare" in command("--help", env={"PYTHONPATH": path}).stdout


# --- help ---------------------------------------------------------------------------------------


def test_overview_and_version(capsys):
    assert main([]) == 0 and main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("minidist 0.")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name, capsys):
    code = main([name, "--help"])
    out, err = capsys.readouterr()
    if code == 1 and "is not part of this version" in err:
        pytest.skip(f"{name} is not part of this version")
    assert code == 0, err
    assert f"minidist {name}" in out
    quiet = ("learn", "start-exercises")  # they open a browser, copy files: nothing to write
    assert "--json" in out or name in quiet


def test_the_overview_answers_at_once():
    code = "import sys, minidist.cli as c; c.main(['dance']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False"


# --- runs ---------------------------------------------------------------------------------------

ROW = {
    "strategy", "ranks", "dtype", "loss", "max_rel_loss_diff", "bytes", "bytes_formula", "sent",
    "sent_formula", "bubble", "bubble_formula", "step_seconds",
}  # fmt: skip
KINDS = {"parameters", "gradients", "optimizer", "activations", "buffers", "peak"}


def check_document(document, rows):
    assert {"minidist", "torch", "machine", "rows"} <= document.keys()
    assert len(document["rows"]) == rows
    for row in document["rows"]:
        assert row.keys() >= ROW
        assert row["bytes"].keys() >= KINDS
        assert row["bytes_formula"].keys() >= {"parameters", "gradients", "optimizer"}


def test_train_writes_json_and_compare_agrees(tmp_path, capsys):
    out = tmp_path / "train.json"
    arguments = ["train", "--strategy", "zero1", "--ranks", "2", "--steps", "3", *SMALL]
    assert main([*arguments, "--json", str(out)]) == 0
    printed = capsys.readouterr()
    assert "zero1 on 2 ranks" in printed.out and "step 3/3" in printed.err
    document = json.loads(out.read_text())
    check_document(document, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["train.json"]  # nothing left beside it

    both, bars = tmp_path / "compare.json", tmp_path / "bars.png"
    arguments = [
        "compare",
        "--strategies",
        "zero1,pp-gpipe",
        "--ranks",
        "2",
        "--steps",
        "3",
        *SMALL,
    ]
    assert main([*arguments, "--json", str(both), "--plot", str(bars), "--no-mixed"]) == 0
    comparison = json.loads(both.read_text())
    check_document(comparison, 3)
    rows = {row["strategy"]: row for row in comparison["rows"]}
    assert rows["zero1"]["loss"] == document["rows"][0]["loss"]  # to the last bit
    assert rows["single"]["max_rel_loss_diff"] == 0
    assert rows["pp-gpipe"]["bubble"] == pytest.approx(rows["pp-gpipe"]["bubble_formula"])
    assert bars.read_bytes().startswith(b"\x89PNG")


def test_compare_leaves_out_what_does_not_fit(capsys):
    small = [*SMALL, "--steps", "2", "--ranks", "2", "--no-mixed"]
    assert main(["compare", *small, "--layers", "3"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"left out: pp-1f1b \(3 layers do not divide into 2 pipeline stages\)", out)
    assert "zero2" in out


def test_torchrun_gives_the_same_losses(tmp_path):
    options = ["--strategy", "fsdp", "--steps", "4", *SMALL]
    local, joined = tmp_path / "local.json", tmp_path / "joined.json"
    assert main(["train", "--ranks", "2", *options, "--json", str(local)]) == 0
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
    ]  # fmt: skip
    done = subprocess.run(
        [*torchrun, "-m", "minidist", "train", *options, "--json", str(joined)],
        capture_output=True, text=True, timeout=110, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [json.loads(path.read_text())["rows"][0]["loss"] for path in (local, joined)]
    assert losses[0] == losses[1]


def test_a_killed_rank_ends_the_command(tmp_path):
    errors = tmp_path / "errors"
    with errors.open("w") as stderr:
        run = subprocess.Popen(
            [*ENDLESS, "--ranks", "3", "--batch", "9"],
            stdout=subprocess.DEVNULL, stderr=stderr, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while "step 1/" not in errors.read_text():
            assert time.monotonic() < deadline and run.poll() is None, errors.read_text()
            time.sleep(0.1)
        family = psutil.Process(run.pid).children(recursive=True)
        # The ranks are the children of the template process, in the order they were made.
        ranks = sorted(
            (p for p in family if p.ppid() != run.pid), key=lambda process: process.create_time()
        )
        assert len(ranks) == 3
        killed = time.monotonic()
        os.kill(ranks[1].pid, signal.SIGKILL)
        assert run.wait(timeout=15) == 1
        assert time.monotonic() - killed < 15
        said = errors.read_text()
        assert re.search(r"rank 1 .*SIGKILL", said), said
        assert "Traceback" not in said
        gone, alive = psutil.wait_procs(family, timeout=5)
        assert not alive
    finally:
        run.kill()
        run.wait()


def test_ctrl_c_ends_the_command(tmp_path):
    errors = tmp_path / "errors"
    with errors.open("w") as stderr:
        run = subprocess.Popen(
            [*ENDLESS, "--ranks", "2"],
            stdout=subprocess.DEVNULL, stderr=stderr, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while "step 1/" not in errors.read_text():
            assert time.monotonic() < deadline and run.poll() is None, errors.read_text()
            time.sleep(0.1)
        family = psutil.Process(run.pid).children(recursive=True)
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=15) in (1, 130)
        assert "Traceback" not in errors.read_text()
        gone, alive = psutil.wait_procs(family, timeout=5)
        assert not alive
    finally:
        run.kill()
        run.wait()
