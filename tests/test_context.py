"""Joining a job and cutting it into groups: init, build_mesh, resolve_group."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import minidist as md
from minidist.comm.mesh import resolve_group

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[1]


def program(code, *, torchrun=0, timeout=50, **environment):
    """Exit code and output of a program, alone or as `torchrun` ranks."""
    script = Path(environment.pop("folder")) / "program.py"
    script.write_text(code, encoding="utf-8")
    start = [sys.executable]
    if torchrun:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(torchrun)]
    done = subprocess.run(
        [*start, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


ALONE = """
import torch, torch.distributed as dist, minidist as md
with md.init() as job:
    x = torch.ones(2); dist.all_reduce(x)
    print(job.rank, job.world_size, job.local_rank, job.device, job.backend, x.tolist())
    with md.init() as inner:  # joins what is there, and leaves it
        pass
    print(dist.is_initialized())
print(dist.is_initialized())
try:
    with md.init():
        raise ValueError("inside")
except ValueError:
    print(dist.is_initialized())
with md.init() as job:  # and again
    print(md.build_mesh()["tp"].size())
"""


LISTENS = r"""
import os, psutil, torch, torch.distributed as dist, minidist as md
with md.init():
    dist.all_reduce(torch.ones(2))
    found = psutil.Process().net_connections("inet")
    ends = {c.laddr.ip for c in found if c.status == "LISTEN"}
    # In one piece: both ranks write to the same place.
    os.write(1, (" ".join([*ends, os.environ["GLOO_SOCKET_IFNAME"]]) + "\n").encode())
"""


@pytest.mark.parametrize("ranks", [0, 2])
def test_ranks_of_one_machine_listen_on_loopback_only(tmp_path, ranks):
    code, out, err = program(LISTENS, folder=tmp_path, torchrun=ranks)
    assert code == 0, err
    assert set(out.split()) == {"127.0.0.1", "lo"}


def test_alone_it_is_a_world_of_one(tmp_path):
    code, out, err = program(ALONE, folder=tmp_path)
    assert code == 0 and err == ""
    assert out.splitlines() == ["0 1 0 cpu gloo [1.0, 1.0]", "True", "False", "False", "1"]


JOINED = r"""
import os, torch, torch.distributed as dist, minidist as md
with md.init(timeout=20) as job:
    x = torch.ones(1) * (job.rank + 1); dist.all_reduce(x)
    mesh = md.build_mesh(pp=2)
    told = (job.rank, job.world_size, job.local_rank, job.device, int(x), torch.get_num_threads(),
            mesh["pp"].get_local_rank())
    # In one piece: both ranks write to the same place.
    os.write(1, (" ".join(map(str, told)) + "\n").encode())
assert not dist.is_initialized()
"""


def test_under_torchrun(tmp_path):
    code, out, err = program(JOINED, torchrun=2, folder=tmp_path)
    assert code == 0, err
    assert sorted(out.splitlines()) == ["0 2 0 cpu 3 1 0", "1 2 1 cpu 3 1 1"]


LOST = """
import time, torch, minidist as md
from minidist.comm import collectives as coll
with md.init(timeout=3) as job:
    coll.all_reduce(torch.ones(4), by="first")
    if job.rank == 1:
        time.sleep(20)
    coll.all_reduce(torch.ones(8), by="second")
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions carry notes from 3.11 on")
def test_under_torchrun_the_rank_that_waits_says_which_is_missing(tmp_path):
    code, out, err = program(LOST, torchrun=2, folder=tmp_path)
    assert code != 0
    told = [
        line.removeprefix("[rank0]: ") for line in err.splitlines() if line.startswith("[rank0]")
    ]
    start = told.index("What the ranks of this job were doing:")
    assert told[start + 1].startswith("rank 0: timed out, waiting in all_reduce at")
    assert "rank 1: running <module> at" in told[start + 2] and "time.sleep(20)" in told[start + 2]
    assert (
        "First difference, collective 1 of group 0: rank 0: all_reduce of 8 float32"
        in told[start + 3]
    )
    assert "rank 1: did not get there" in told[start + 3]


def test_nccl_without_a_gpu_is_said_at_once():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(RuntimeError, match="needs a GPU"), md.init(backend="nccl"):
        pass


def test_mesh_over_four_ranks(run_ranks):
    def work():
        mesh = md.build_mesh(dp=2, tp=2)
        sums = {}
        for axis in ("dp", "pp", "tp"):
            x = torch.tensor(float(dist.get_rank()))
            dist.all_reduce(x, group=resolve_group(mesh[axis]))
            sums[axis] = int(x)
        return mesh.mesh_dim_names, mesh.device_type, sums

    for rank, (names, device, sums) in enumerate(run_ranks(work, 4)):
        assert (names, device) == (("dp", "pp", "tp"), "cpu")
        # Neighbours are one tensor-parallel group; data-parallel peers are two apart.
        assert sums == {"dp": (2, 4)[rank % 2], "pp": rank, "tp": (1, 5)[rank // 2]}


def test_mesh_sizes_must_fit(run_ranks):
    def work(error, **sizes):
        with pytest.raises(error) as caught:
            md.build_mesh(**sizes)
        return str(caught.value)

    for told in run_ranks(work, 4, ValueError, dp=2, tp=3):
        assert "2 * 1 * 3 = 6" in told and "4 ranks" in told
    assert "pp must be at least 1, got 0" in run_ranks(work, 4, ValueError, dp=4, pp=0)[0]
    assert "dp must be a whole number" in run_ranks(work, 4, TypeError, dp=4.0)[0]


def test_resolve_group(run_ranks):
    def work():
        mesh = md.build_mesh(dp=2)
        some = dist.new_group([0])
        assert resolve_group(None) is dist.group.WORLD
        assert resolve_group(dist.group.WORLD) is dist.group.WORLD
        assert resolve_group(mesh["dp"]).size() == 2
        with pytest.raises(ValueError, match=r"3 \(dp, pp, tp\).*mesh\['dp'\]"):
            resolve_group(mesh)
        with pytest.raises(TypeError, match="ProcessGroup"):
            resolve_group("dp")
        if dist.get_rank() == 1:
            with pytest.raises(RuntimeError, match="rank 1 is not a member"):
                resolve_group(some)

    run_ranks(work, 2)
    with pytest.raises(RuntimeError, match="minidist.launch"):
        resolve_group(None)
