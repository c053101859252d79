"""The same faults under torch's own launcher, with torch's DDP, FSDP and checkpoints.

Not part of the tests: `MINIDIST_FAULTS=FILE pytest tests/faults_torch.py` measures them for the
table of minidist/comm/FAULTS.md. Nothing is demanded but an end: every job gets 20 seconds after
its fault, and what it left is counted and then removed.

As a program (what torchrun starts): `faults_torch.py JOB FOLDER [ARGUMENT...]`.
"""

import contextlib
import datetime
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import fault_jobs
import psutil
import torch
import torch.distributed as dist
from fault_jobs import KINDS, LIMIT, PHASES, Torchs, plant

LONGEST = 20.0  # seconds after the fault until it counts as a hang
ANY_PORT = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0")
MISFITS = ("shapes", "dtypes", "dtypes of one size", "order", "skips", "cuts")


# ------------------------------------------------------------------------------------- the jobs


def train(folder, *what):
    fault_jobs.train(Torchs(), *what, folder)


def collective(folder, what):
    """One collective that does not fit on rank 1."""
    rank = dist.get_rank()
    dist.barrier()
    if rank == 1:
        Path(folder, "planted").write_text(str(time.time()))
    if what == "shapes":
        dist.all_reduce(torch.ones(10 + 1000 * rank))
    elif what == "dtypes":
        dist.all_reduce(torch.ones(10, dtype=(torch.float32, torch.float64)[rank]))
    elif what == "dtypes of one size":
        dist.all_reduce(torch.ones(10, dtype=(torch.float32, torch.int32)[rank]))
    elif what == "order":
        x = torch.ones(10)
        dist.all_reduce(x) if rank == 0 else dist.broadcast(x, 1)
        dist.barrier()
    elif what == "skips" and rank == 0:
        dist.all_reduce(torch.ones(10))
    elif what == "skips":
        time.sleep(60)  # busy elsewhere; leaving would break the connection
    elif what == "cuts":
        from torch.distributed.device_mesh import init_device_mesh

        shape = (2, 1) if rank == 0 else (1, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        dist.all_reduce(torch.ones(4), group=mesh.get_group("dp"))


def values(folder, strategy):
    """NaN in the input of rank 1."""
    model, optimizer = fault_jobs.built(Torchs(), strategy, lambda phase: None)
    x = torch.ones(4, 32)
    if dist.get_rank() == 1:
        x[0, 0] = float("nan")
        Path(folder, "planted").write_text(str(time.time()))
    model(x).mean().backward()
    optimizer.step()
    bad = [p.isnan().any().item() for p in model.parameters()]
    print(f"[rank{dist.get_rank()}] parameters with NaN: {sum(map(bool, bad))} of {len(bad)}")


def disk(folder, how):
    answer = fault_jobs.save_on_a_full_disk(Torchs(), folder, how, "step-2")
    if dist.get_rank() == 0:
        print("ANSWER", json.dumps(answer))


def replace(folder):
    """Rank 1 is killed while the checkpoint is replaced by a newer one of the same name."""
    fault_jobs.train(Torchs(), "ddp", "save", "is killed", folder, names="same")


def read(folder):
    side, path = Torchs(), Path(folder, "same")
    print("ANSWER", side.load(path, *fault_jobs.built(side, "ddp", lambda phase: None)))


def memory(folder):
    if dist.get_rank() == 1:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
        Path(folder, "planted").write_text(str(time.time()))
        torch.ones(1 << 30)
    dist.barrier()


def stuck(folder):
    if dist.get_rank() == 1:
        Path(folder, "planted").write_text(str(time.time()))
        time.sleep(60)
    dist.barrier()


def killed(folder):
    if dist.get_rank() == 1:
        plant("is killed", folder)
    dist.barrier()


def fine(folder):
    dist.barrier()


# -------------------------------------------------------------------------------- the measurement


def command(folder, job, *arguments, options=ANY_PORT):
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *options]
    return [*start, __file__, job, str(folder), *arguments]


def begin(tmp_path, folder, job, *arguments, **how):
    """The launcher, its errors in a file, with a folder of its own for temporary files."""
    (tmp_path / "temporary").mkdir(exist_ok=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "temporary")}
    env["FAULT_JOB"] = str(tmp_path)
    with open(tmp_path / "errors", "ab") as errors:
        return subprocess.Popen(
            command(folder, job, *arguments, **how), env=env, stdout=errors, stderr=errors
        )


def temporary(tmp_path):
    """Temporary files, without the cache that torch keeps on purpose."""
    return [n for n in os.listdir(tmp_path / "temporary") if not n.startswith("torchinductor")]


def job_processes(tmp_path):
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("FAULT_JOB") == str(tmp_path):
                found.append(process)
    return found


def end(tmp_path, folder, launcher, unplanted=40.0):
    """Seconds from the fault to the end, what was said first, and what is left."""
    begun, deadline = time.time(), time.time() + unplanted
    planted = Path(folder, "planted")
    while launcher.poll() is None and time.time() < deadline:
        if planted.exists() and planted.read_text():
            begun = float(planted.read_text())
            deadline = begun + LONGEST
        time.sleep(0.02)
    seconds = time.time() - (float(planted.read_text()) if planted.exists() else begun)
    hung = launcher.poll() is None
    if not hung:
        time.sleep(0.5)
    left = job_processes(tmp_path)
    said = [f"{len(left)} processes"] * bool(left and not hung)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    launcher.wait()
    files = temporary(tmp_path)
    said += [f"{len(files)} temporary files ({files[0]})"] * bool(files and not hung)
    words = (tmp_path / "errors").read_text(errors="replace")
    if hung:
        words = f"still running after {LONGEST:g} s. " + first_error(words)
    else:
        words = first_error(words)
    return seconds, words, "ended by the test" if hung else ", ".join(said) or "nothing"


def first_error(words):
    """The line of a long text that a reader would look for: torchrun's summary names a rank that
    ended without an exception, its peers tell only the echo."""
    cause = words.partition("Root Cause")[2]
    died = re.search(r"rank +: (\d+).*\n +exitcode +: (-?\d+) \(pid: \d+\) *(.*)", cause)
    if died and died[2] != "1":
        return f"summary: rank {died[1]}, exitcode {died[2]} {died[3]}".rstrip()
    for pattern in (
        r"\[rank\d\]: [\w.]*(?:Error|Exception)\b.*",
        r"^[\w.]*(?:Error|Exception): .*",
        r"terminate called .*\n.*",
        r"exitcode +: .*",
        r"\[rank\d\] parameters.*",
    ):
        found = re.search(pattern, words, re.MULTILINE)
        if found:
            return found[0]
    return ""


def whole(tmp_path, job, *arguments, folder=None, **how):
    from fault_notes import note

    folder = folder or tmp_path
    seen = end(tmp_path, folder, begin(tmp_path, folder, job, *arguments, **how))
    note(*seen)
    return seen


import pytest  # noqa: E402  (the ranks do without)

pytestmark = pytest.mark.timeout(100)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_train(strategy, kind, phase, tmp_path):
    whole(tmp_path, "train", strategy, phase, kind)
    complete = {p.parent.name for p in tmp_path.glob("step-*/.metadata")}
    assert "step-1" in complete


@pytest.mark.parametrize("what", MISFITS)
def test_collective(what, tmp_path):
    whole(tmp_path, "collective", what)


def test_values(tmp_path):
    whole(tmp_path, "values", "ddp")


@pytest.mark.parametrize("how", ["tmpfs", "rlimit"])
def test_disk(how, tmp_path):
    from fault_notes import note, small_disk

    folder = tmp_path / "disk"
    folder.mkdir()

    def measure():
        launcher = begin(tmp_path, folder, "disk", how)
        end(tmp_path, folder, launcher)
        (found,) = re.findall("ANSWER (.*)", (tmp_path / "errors").read_text()) or ["{}"]
        answer = json.loads(found)
        words = re.findall(r"^\w+Error: .*", answer.get("said", ""), re.MULTILINE)
        after = "loads" if answer.get("step") == 1 else f"is lost ({answer.get('step')})"
        left = f"the checkpoint before {after}" + ", ".join(["", *answer.get("left", [])])
        note(answer.get("seconds", 0), (words or [answer.get("said", "?")])[0], left)

    if how == "tmpfs":
        with small_disk(folder, 1024):
            measure()
    else:
        measure()


def test_replace(tmp_path):
    from fault_notes import note

    seconds, words, left = end(tmp_path, tmp_path, begin(tmp_path, tmp_path, "replace"))
    end(tmp_path, tmp_path / "other", begin(tmp_path, tmp_path, "read"))
    found = re.findall(r"ANSWER (\d)", (tmp_path / "errors").read_text())
    step = f"step {found[0]}" if found else "nothing"
    note(seconds, words, f"{left}; of step 1 and the unfinished step 2, what loads is {step}")


def test_memory(tmp_path):
    whole(tmp_path, "memory")


def test_killed_as_the_kernel_does(tmp_path):
    whole(tmp_path, "killed")


def test_worlds(tmp_path):
    """Without a launcher: both are told by hand who they are."""
    from fault_notes import note

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    begun = time.time()
    programs = [
        subprocess.Popen(
            [sys.executable, __file__, "fine", str(tmp_path)], stderr=subprocess.PIPE, text=True,
            env={**os.environ, **job, "RANK": str(rank), "WORLD_SIZE": str(world)},
        )
        for rank, world in ((0, 2), (1, 3))
    ]  # fmt: skip
    try:
        said = [program.communicate(timeout=40)[1] for program in programs]
    finally:
        for program in programs:
            program.kill()
    note(time.time() - begun, first_error(said[1]) or first_error(said[0]))


def test_port(tmp_path):
    """torchrun is told a port that is taken."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        whole(tmp_path, "fine", options=(f"--master-port={taken.getsockname()[1]}",))


def test_parent(tmp_path):
    """The launcher is killed: what of its ranks is there 5 seconds later?"""
    from fault_notes import note

    launcher = begin(tmp_path, tmp_path, "stuck")
    while not (tmp_path / "planted").exists():
        time.sleep(0.1)
    launcher.send_signal(signal.SIGKILL)
    begun = time.time()
    launcher.wait()
    while job_processes(tmp_path) and time.time() < begun + LONGEST:
        time.sleep(0.05)
    seconds, left = time.time() - begun, job_processes(tmp_path)
    for process in left:
        process.kill()
    files = temporary(tmp_path)
    parts = [f"{len(left)} processes"] * bool(left)
    parts += [f"{len(files)} temporary files ({files[0]})"] * bool(files)
    words = first_error((tmp_path / "errors").read_text()) or "nothing is said"
    note(seconds, words, ", ".join(parts) or "nothing")


def test_two_jobs(tmp_path):
    """Twice the same command, as the documentation of torchrun begins."""
    from fault_notes import note

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first = begin(tmp_path / "a", tmp_path / "a", "stuck", options=())
    while not (tmp_path / "a" / "planted").exists() and first.poll() is None:
        time.sleep(0.1)
    b = tmp_path / "b"
    seen = end(b, b, begin(b, b, "fine", options=()))
    end(tmp_path / "a", tmp_path / "a", first)
    note(*seen)


def test_launches(tmp_path):
    """Five in a row, for the time of one and what is left."""
    from fault_notes import note

    begun = time.time()
    for _ in range(5):
        seconds, words, left = end(tmp_path, tmp_path, begin(tmp_path, tmp_path, "fine"))
    note((time.time() - begun) / 5, words or "5 launches", left)


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    limit = datetime.timedelta(seconds=LIMIT)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # the ranks may start seconds apart
        dist.init_process_group("gloo")
        dist.distributed_c10d._set_pg_timeout(limit)
    else:
        dist.init_process_group("gloo", timeout=limit)
    globals()[name](*rest)
    dist.destroy_process_group()
