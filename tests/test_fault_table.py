"""Faults tried systematically: every row of minidist/comm/FAULTS.md that has no test elsewhere.

Rank 1 of 2 fails in a given phase of training, in a given way. All ranks must end within seconds,
the story must name the rank and the line where it was, nothing may be left behind, and the
checkpoint before it must load. What the figures were is kept in FAULTS.md, see `fault_notes`.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import fault_jobs
import fault_notes
import pytest
import torch
import torch.distributed as dist
from fault_jobs import KINDS, PHASES, Ours
from fault_notes import BUSY, fails, note, small_disk
from programs import ROOT, run_script, started, total

import minidist as md
from minidist.comm import collectives as coll
from minidist.comm.launch import Ranks, launch
from minidist.parallel.scaler import LossScaler
from minidist.train import checkpoint  # noqa: F401  (loaded once, for all ranks)

pytestmark = pytest.mark.timeout(60)
HERE = str(Path(fault_jobs.__file__).parent)
LINES = {
    "forward": "loss = model(",
    "backward": "loss.backward()",
    "step": "optimizer.step()",
    "save": "side.save(",
}
SAID = {
    "raises": "raise ArithmeticError",
    "exits": "with exit code 3; last seen running",
    "is killed": "was killed by SIGKILL from outside",
    "is stopped": "stuck: rank 1 is stopped, nobody else can go on",
}


def _step_of(folder, strategy="ddp"):
    """On a rank: the step of the latest checkpoint, once it is loaded."""
    model, optimizer = fault_jobs.built(Ours(), strategy, lambda phase: None)
    return Ours().load(md.train.checkpoint.latest(folder), model, optimizer)


# Every kind in every phase, and with every strategy; all combinations where they are quick, or when
# the table is measured.
CASES = [
    (strategy, kind, phase)
    for s, strategy in enumerate(("ddp", "zero2", "fsdp"))
    for k, kind in enumerate(KINDS)
    for p, phase in enumerate(PHASES)
    if kind == "raises" or (s + k + p) % 3 == 0 or os.environ.get("MINIDIST_FAULTS")
]


@pytest.mark.parametrize(("strategy", "kind", "phase"), CASES)
def test_a_rank_fails_in_training(strategy, kind, phase, tmp_path, run_ranks):
    planted = tmp_path / "planted"
    error = fails(
        fault_jobs.train, Ours(), strategy, phase, kind, str(tmp_path),
        ranks=2, within=4 if kind == "is stopped" else 1.5, planted=planted,
    )  # fmt: skip
    told = str(error)
    if (kind, phase) == ("raises", "save"):
        # An error of its own on every rank: who caused it, and that nothing was lost.
        assert "step-2 was not written, an older one is untouched; rank 1: Arithm" in told
    else:
        assert error.rank == 1 and SAID[kind] in told
    # The line of the user's program in which it was.
    assert LINES[phase] in error.traceback
    assert kind == "is stopped" or LINES[phase] in told
    assert run_ranks(_step_of, 1, str(tmp_path)) == [1]


@pytest.mark.parametrize(("moment", "found"), [(0, 1), (1, 1), (2, 2)])
def test_killed_between_the_renames_of_a_checkpoint(moment, found, tmp_path, run_ranks):
    """The new checkpoint is complete, the older one is moved away, the new one takes its place."""

    def save_twice(folder, moment):
        model, optimizer = fault_jobs.built(Ours(), "zero2", lambda phase: None)
        path, rename, renames = Path(folder, "step-1"), Path.rename, []
        Ours().save(path, model, optimizer, 1)

        def killed(self, target):
            if self.name.startswith(".metadata"):  # torch's own
                return rename(self, target)
            renames.append(target)
            if len(renames) > moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return rename(self, target)

        Path.rename = killed  # rank 0 alone renames
        Ours().save(path, model, optimizer, 2)

    error = fails(save_twice, str(tmp_path), moment, ranks=2, within=1.5)
    assert error.rank == 0 and "killed by SIGKILL" in str(error)
    assert run_ranks(_step_of, 1, str(tmp_path)) == [found]
    assert len(list(tmp_path.iterdir())) == 2

    def save_again(folder):
        model, optimizer = fault_jobs.built(Ours(), "ddp", lambda phase: None)
        Ours().save(Path(folder, "step-1"), model, optimizer, 3)

    run_ranks(save_again, 2, str(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"], "the next save clears up"
    assert run_ranks(_step_of, 1, str(tmp_path)) == [3]


# -------------------------------------------------------------------------------- the disk is full


@pytest.mark.parametrize("how", ["tmpfs", "rlimit"])
def test_the_disk_is_full_while_saving(how, tmp_path, run_ranks):
    """A small disk of its own (root only), and a limit on the size of files (everywhere)."""

    def check():
        for answer in launch(fault_jobs.save_on_a_full_disk, 2, Ours(), str(tmp_path), how):
            note(answer["seconds"], answer["said"], ", ".join(answer["left"]) or "nothing")
            assert answer["seconds"] < BUSY
            assert "step-1 was not written, an older one is untouched; rank " in answer["said"]
            assert ("No space left" if how == "tmpfs" else "File too large") in answer["said"]
            assert answer["step"] == 1, "the older one loads on the same ranks"
            assert answer["left"] == []

    if how == "tmpfs":
        with small_disk(tmp_path, 1024):
            check()
    else:
        check()


def test_a_folder_that_one_rank_cannot_make(tmp_path):
    def save(folder):
        def refused(self, *args, **kwargs):
            raise PermissionError(13, "Permission denied", str(self))

        model, optimizer = fault_jobs.built(Ours(), "zero2", lambda phase: None)
        if dist.get_rank() == 1:
            Path.mkdir = refused
        Ours().save(Path(folder, "step-1"), model, optimizer, 1)

    error = fails(save, str(tmp_path), ranks=2, within=1)
    assert "was not written, an older one is untouched; rank 1: PermissionError" in str(error)
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------- wrong values, wrong worlds


def test_nan_on_one_rank_reaches_all_ranks_alike(run_ranks):
    """A gradient of NaN or inf on one rank: with a LossScaler the step is skipped everywhere."""

    def step(strategy, value, scaled):
        seen = []
        model, optimizer = fault_jobs.built(Ours(), strategy, lambda phase: None)
        scaler = LossScaler(initial=4.0)
        whole = getattr(model, "full_state_dict", model.state_dict)
        before = {name: tensor.clone() for name, tensor in whole().items()}
        x = torch.ones(4, 32)
        if dist.get_rank() == 1:
            x[0, 0] = value
        loss = model(x).mean()
        if scaled:
            scaler.scale(loss).backward()
            seen.append(scaler.step(optimizer))
        else:
            loss.backward()
            optimizer.step()
        after = whole()
        same = all(torch.equal(after[name], before[name]) for name in before)
        bad = any(tensor.isnan().any().item() for tensor in after.values())
        return seen, same, bad

    for strategy in ("ddp", "zero2", "fsdp"):
        for value in (float("nan"), float("inf")):
            assert run_ranks(step, 2, strategy, value, True) == [([False], True, False)] * 2
            assert run_ranks(step, 2, strategy, value, False) == [([], False, True)] * 2
    note(0.0, "nothing is said: parameters are NaN on every rank; a LossScaler skips the step")


def different_kinds_of_the_same_size():
    coll.all_reduce(torch.ones(10, dtype=(torch.float32, torch.int32)[dist.get_rank()]))


def different_order():
    coll.all_reduce(torch.ones(10)) if dist.get_rank() == 0 else coll.broadcast(torch.ones(10), 1)
    coll.barrier()


@pytest.mark.parametrize("work", [different_kinds_of_the_same_size, different_order])
def test_mismatch_with_our_own_check(work, monkeypatch):
    """MINIDIST_DEBUG=1 also finds what torch lets pass, and shows both places."""
    monkeypatch.setenv("MINIDIST_DEBUG", "1")
    error = fails(work, ranks=2, within=1)
    assert "all_reduce" in str(error) and "test_fault_table.py" in str(error)


def test_ranks_that_cut_the_world_differently():
    """Rank 0 asks for two data parallel ranks, rank 1 for two tensor parallel ones."""

    def work():
        mesh = md.build_mesh(dp=2) if dist.get_rank() == 0 else md.build_mesh(tp=2)
        coll.all_reduce(torch.ones(4), group=mesh["dp"])

    error = fails(work, ranks=2, within=4)
    assert error.states


WORLDS = """
    import sys, torch, minidist as md
    from minidist.comm import collectives as coll
    with md.init(timeout=float(sys.argv[1])):
        coll.all_reduce(torch.ones(1))
    """


def _by_hand(tmp_path, code, ranks, limit):
    """Programs that are told by hand who they are: {rank: world size}; what each says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(code))
    programs = [
        subprocess.Popen(
            [sys.executable, str(script), str(limit)], stderr=subprocess.PIPE, text=True,
            env={**os.environ, **job, "RANK": str(rank), "WORLD_SIZE": str(world)},
        )
        for rank, world in ranks.items()
    ]  # fmt: skip
    try:
        return [program.communicate(timeout=40)[1] for program in programs]
    finally:
        for program in programs:
            program.kill()
            program.wait()


@pytest.mark.parametrize("worlds", [{0: 2, 1: 3}, {0: 3, 1: 2}])
def test_ranks_that_are_told_different_world_sizes(worlds, tmp_path):
    begun = time.monotonic()
    said = _by_hand(tmp_path, WORLDS, worlds, limit=30)
    seconds = time.monotonic() - begun
    note(seconds, said[0].splitlines()[-1])
    assert f"rank 0 was told WORLD_SIZE={worlds[0]}, rank 1 WORLD_SIZE={worlds[1]}" in said[0]
    # In its own words, unless rank 0, which keeps the store, has ended first.
    assert "Error" in said[1]
    assert seconds < 30, "nobody waits for the limit"


def test_a_rank_that_is_never_started(tmp_path):
    (said,) = _by_hand(tmp_path, WORLDS, {0: 2}, limit=1)
    assert "TimeoutError: rank 1 of 2 did not join within 1 s" in said


# --------------------------------------------------------------------- ports, programs, other jobs


def test_a_port_that_is_taken_does_not_matter(monkeypatch):
    """`launch` needs none: ranks find each other through a file without a name."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        begun = time.monotonic()
        assert launch(total, 2)[0].tolist() == [3.0] * 3
    note(time.monotonic() - begun, "no port is needed: the job runs")


def test_two_jobs_on_one_machine_at_once(tmp_path):
    """Two programs; one fails, the other does not notice."""
    code = """
        import sys, time, minidist as md, torch, torch.distributed as dist
        def work(bad):
            for i in range(20):
                dist.all_reduce(torch.ones(10)); time.sleep(0.02)
            if bad and dist.get_rank() == 1:
                raise ValueError("in the other job")
            dist.barrier()
            return dist.get_rank()
        print(md.launch(work, 2, {bad}))
        """
    folders = [tmp_path / name for name in ("good", "bad")]
    for folder in folders:
        folder.mkdir()
    with started(folders[1], code.format(bad=True)) as other:
        code, out, err = run_script(folders[0], code.format(bad=False))
        _, said = other.communicate(timeout=40)
    assert (code, out, err) == (0, "[0, 1]\n", "")
    assert "rank 1 raised ValueError: in the other job" in said
    note(0.0, "both run; what fails in one is told there alone")


# ---------------------------------------------------------------------------------------- security


def test_no_code_comes_from_a_checkpoint(tmp_path, run_ranks):
    """An index that would call functions, and a file of tensors that would."""

    def attempt(folder, attack):
        import pickle

        class Calls:
            def __reduce__(self):
                return os.system, (f"touch {folder}/came",)

        model, optimizer = fault_jobs.built(Ours(), "ddp", lambda phase: None)
        path = Path(folder, "step-1")
        Ours().save(path, model, optimizer, 1)
        if attack == "tensors":
            for file in path.glob("*.distcp"):
                torch.save(Calls(), file)
        else:
            saves = f"ctorch\nsave\n(V\nV{folder}/came\ntR.".encode()  # torch.save("", ".../came")
            code = saves if attack == "torch.save" else pickle.dumps(Calls())
            (path / ".metadata").write_bytes(code)
        try:
            Ours().load(path, model, optimizer)
        except RuntimeError as error:
            return str(error)
        finally:
            assert not Path(folder, "came").exists()

    for attack in ("torch.save", "os.system", "tensors"):
        (said,) = run_ranks(attempt, 1, str(tmp_path), attack)
        assert "is damaged" in said, (attack, said)


def test_functions_travel_inside_the_machine_and_nothing_listens_outside(monkeypatch):
    """The program talks to its ranks through socket pairs: no address, no name, no port."""
    import psutil

    from minidist.comm import processes

    def sockets():
        connections = psutil.Process().net_connections("all")
        inet = [c for c in connections if c.family in (socket.AF_INET, socket.AF_INET6)]
        ends = [end.ip for c in inet for end in (c.laddr, c.raddr) if end]
        return ends, [c.laddr for c in connections if c.family == socket.AF_UNIX and c.laddr]

    monkeypatch.setenv("MASTER_ADDR", "0.0.0.0")
    with Ranks(2) as group:
        group.run(dist.barrier)
        for ends, names in group.run(sockets):
            assert set(ends) == {"127.0.0.1"} and not names
        template = psutil.Process(processes._template.process.pid)
        assert not [c for c in template.net_connections("all") if c.laddr]
        for process in group._processes:
            pair = socket.socket(fileno=os.dup(process._connection.fileno()))
            with pair:
                assert pair.family == socket.AF_UNIX and pair.getsockname() in ("", b"")


# --------------------------------------------------------------------------------------- the table


def test_every_row_of_the_table_has_a_test_and_a_figure():
    page = (ROOT / "minidist" / "comm" / "FAULTS.md").read_text(encoding="utf-8")
    tests = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").glob("test_*.py"))
    for fault, ours, _ in fault_notes.ROWS:
        (row,) = (line for line in page.splitlines() if line.startswith(f"| {fault} |"))
        assert re.match(r"\d", row.split("|")[2].strip()), f"not measured: {fault}"
        for test in ours:
            assert f"def {test.partition('[')[0]}(" in tests, test
