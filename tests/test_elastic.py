"""Training that goes on after a rank was killed, under torch's own launcher, and on other ranks."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

SIZES = ["--batch", "12", "--width", "16", "--layers", "4", "--heads", "4", "--seq", "16",
         "--dtype", "float64"]  # fmt: skip


def _command(*options, torchrun=None):
    start = [sys.executable, "-m"]
    if torchrun is not None:
        start += ["torch.distributed.run", "--nproc-per-node", str(torchrun), "--max-restarts", "3",
                  "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m"]  # fmt: skip
    return [*start, "minidist", "train", *SIZES, *options]


def _run(*options):
    _finish(_start(*options))


def _start(*options):
    return subprocess.Popen(
        _command(*options), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def _finish(job):
    try:
        _, errors = job.communicate(timeout=120)
    finally:
        job.kill()
    assert job.returncode == 0, errors[-2000:]


def _losses(path):
    return json.loads(path.read_text())["rows"][0]["loss"]


def _ranks_of(launcher):
    """Process ids of the training processes that a launcher has started."""
    listing = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True).stdout
    pairs = [line.split() for line in listing.splitlines()[1:]]
    return [int(pid) for pid, parent in pairs if int(parent) == launcher]


@pytest.mark.timeout(300)
def test_killed_ranks_are_restarted_and_the_curve_is_the_same(tmp_path):
    """SIGKILL to one rank at two moments: torchrun starts all again, from the last checkpoint."""
    steps = ["--strategy", "zero1", "--steps", "10"]
    whole = _start(*steps, "--ranks", "2", "--json", str(tmp_path / "whole.json"))
    run = tmp_path / "run"
    job = subprocess.Popen(
        _command(*steps, "--checkpoint-dir", str(run), "--save-every", "1",
                 "--json", str(tmp_path / "killed.json"), torchrun=2),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
    )  # fmt: skip
    try:
        killed = 0
        deadline = time.monotonic() + 150
        for wanted in (2, 5):
            while time.monotonic() < deadline and job.poll() is None:
                saved = [int(p.name[5:13]) for p in run.glob("step-????????")]
                if saved and max(saved) >= wanted:
                    victims = _ranks_of(job.pid)
                    if len(victims) == 2:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(victims[wanted % 2], signal.SIGKILL)
                            killed += 1
                        break
                time.sleep(0.01)
        _, errors = job.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 0, errors[:6000]
    _finish(whole)
    assert killed == 2
    # Exactly: the same ranks add the same numbers in the same order.
    assert _losses(tmp_path / "killed.json") == _losses(tmp_path / "whole.json")


@pytest.mark.timeout(120)
def test_another_strategy_on_another_number_of_ranks_goes_on(tmp_path):
    run = str(tmp_path / "run")
    whole = _start(
        "--strategy", "ddp", "--ranks", "3", "--steps", "8", "--json", str(tmp_path / "whole.json")
    )
    _run("--strategy", "zero2", "--ranks", "2", "--steps", "4", "--checkpoint-dir", run)
    _run("--strategy", "fsdp", "--ranks", "4", "--steps", "8", "--checkpoint-dir", run,
         "--json", str(tmp_path / "moved.json"))  # fmt: skip
    _finish(whole)
    want, got = _losses(tmp_path / "whole.json"), _losses(tmp_path / "moved.json")
    assert len(got) == 8
    assert got == pytest.approx(want, rel=1e-10)
    kept = sorted(p.name for p in (tmp_path / "run").iterdir())
    assert kept == ["step-00000004", "step-00000008"]


@pytest.mark.timeout(150)
def test_a_finished_run_says_so(tmp_path):
    options = ["--strategy", "single", "--steps", "2", "--checkpoint-dir", str(tmp_path / "run")]
    _run(*options)
    again = subprocess.run(_command(*options), capture_output=True, text=True, timeout=120)
    assert again.returncode != 0 and "raise --steps" in again.stderr + again.stdout
