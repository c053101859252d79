"""What `comm/tuning.py` does to a rank, and that it touches nothing else."""

import os
import socket
import subprocess
import sys

import pytest

from minidist.comm import tuning
from minidist.comm.launch import Ranks

try:  # the system may allow less
    with open("/proc/sys/net/core/wmem_max", encoding="ascii") as limit:
        CAPPED = 2 * min(tuning.IN_FLIGHT, int(limit.read()))  # Linux counts its own overhead, too
except OSError:
    CAPPED = 0
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows its open files")


def buffers():
    """How this rank is scheduled, and the send buffers of its TCP connections: those of the world,
    and those of a second group before and after the group is first used."""
    import torch.distributed as dist

    from minidist.comm import collectives as coll

    def connections():
        found = {}
        for descriptor in tuning._open_files():
            try:
                with socket.socket(fileno=os.dup(descriptor)) as s:
                    if s.family == socket.AF_INET and s.getpeername():
                        found[s.getsockname(), s.getpeername()] = s.getsockopt(
                            socket.SOL_SOCKET, socket.SO_SNDBUF
                        )
            except OSError:
                pass
        return found

    coll.barrier()
    world = connections()
    pair = dist.new_group([0, 1])
    fresh = connections()
    if dist.get_rank() < 2:
        coll.barrier(pair)
    later = connections()
    new = later.keys() - world.keys()
    batch = os.sched_getscheduler(0) == os.SCHED_BATCH
    return batch, list(world.values()), [fresh[n] for n in new], [later[n] for n in new]


@linux
def test_connections_inside_the_machine_hold_little(run_ranks):
    for rank, (batch, world, fresh, later) in enumerate(run_ranks(buffers, 3)):
        assert batch
        assert len(world) == 2 and set(world) == {CAPPED}
        # Of a group that somebody else has made: when it is first used.
        assert len(later) == (1 if rank < 2 else 0)
        assert all(size != CAPPED for size in fresh) and all(size == CAPPED for size in later)


@linux
@pytest.mark.parametrize("way", ["argument", "variable"])
def test_nothing_is_touched_unless_wanted(monkeypatch, way):
    if way == "variable":
        monkeypatch.setenv("MINIDIST_TUNE", "0")
    with Ranks(3, tune=way != "argument") as ranks:
        for batch, world, _, later in ranks.run(buffers):
            assert not batch
            assert all(size != CAPPED for size in (*world, *later))


@linux
def test_only_connections_inside_the_machine_and_nothing_but_their_buffer():
    """In a process of its own: pytest's connections are not ours to change."""
    program = """
import os, socket
import torch.distributed as dist
from minidist.comm import tuning

def connected(here, there):
    with socket.create_server((there, 0)) as server:
        one = socket.create_connection(server.getsockname(), source_address=(here, 0))
        return one, server.accept()[0]

inside, other = connected("127.0.0.1", "127.0.0.1"), connected("127.0.0.1", "127.0.0.2")
size = lambda s: s.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
before = [size(s) for s in other]
socket.setdefaulttimeout(5)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
os.environ["MINIDIST_TUNE"] = "1"
tuning.tune_process()
open_files = len(tuning._open_files())
tuning.tune_connections(dist.group.WORLD)
assert len(tuning._open_files()) == open_files, "each look must be closed again"
assert [size(s) for s in inside] == [CAPPED] * 2, [size(s) for s in inside]
assert [size(s) for s in other] == before
assert all(os.get_blocking(s.fileno()) for s in (*inside, *other))
assert socket.getdefaulttimeout() == 5
datagrams = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
for s in datagrams:
    s.bind(("127.0.0.1", 0))
datagrams[0].connect(datagrams[1].getsockname())
before = size(datagrams[0])
tuning._connected.clear()
tuning.tune_connections(dist.group.WORLD)
assert size(datagrams[0]) == before, "only TCP"
inside[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
tuning.tune_connections(dist.group.WORLD)
assert size(inside[0]) == 16384, "once per group"
"""
    program = f"CAPPED = {CAPPED}\n{program}"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
