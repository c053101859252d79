"""`md.measure().traffic`: what the ledger says equals the formulas and the kernel's counters."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

import minidist as md
from minidist.comm import collectives as coll

MB = 1 << 20


def every_collective(numel):
    """One call each on float32 tensors; returns what this rank should send, by operation."""
    n, me = coll.world_size(), coll.rank()
    size = 4 * numel
    full, shard = torch.ones(numel), torch.ones(numel // n)
    coll.all_reduce(torch.ones(numel), by="test")
    coll.reduce_scatter(shard, full, by="test")
    coll.all_gather(full, shard, by="test")
    coll.all_to_all(torch.empty(numel), torch.ones(numel))
    message = torch.ones(numel)
    if me == 0:
        coll.send(message, n - 1, by="pipeline")
    elif me == n - 1:
        coll.recv(message, 0, by="pipeline")
    return {
        "all_reduce": 2 * (n - 1) * size // n,
        "reduce_scatter": (n - 1) * size // n,
        "all_gather": (n - 1) * size // n,
        "all_to_all": (n - 1) * size // n,
        "send": size if me == 0 and n > 1 else 0,
        "recv": 0,
    }


@pytest.mark.parametrize("world", [2, 3, 4])
def test_bytes_equal_the_formulas(run_ranks, world):
    def run():
        with md.measure() as m:
            expected = every_collective(1200)
        sent = {op: m.traffic[op].sent_bytes for op in expected}
        return expected, sent, m.traffic.as_dict()

    for rank, (expected, sent, table) in enumerate(run_ranks(run, world)):
        assert sent == expected
        assert table["total"]["sent_bytes"] == sum(expected.values())
        assert table["by_op"]["all_reduce"] == {
            "calls": 1,
            "payload_bytes": 4800,
            "sent_bytes": expected["all_reduce"],
        }
        assert table["by_caller"]["test"]["calls"] == 3
        assert table["by_caller"]["user"]["calls"] == 1
        assert ("pipeline" in table["by_caller"]) == (rank in (0, world - 1))
        assert sum(t["sent_bytes"] for t in table["by_group"].values()) == sum(expected.values())


def test_groups_are_kept_apart(run_ranks):
    def run():
        pair = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
        mine = pair[coll.rank() // 2]
        with md.measure() as m:
            coll.all_reduce(torch.ones(100), group=mine)
            coll.all_reduce(torch.ones(100))
        return sorted(t.sent_bytes for t in m.traffic.by_group.values())

    # 2(N-1)/N x 400 bytes in the pair and in the world.
    assert run_ranks(run, 4) == [[400, 600]] * 4


def test_one_rank_sends_nothing(run_ranks):
    def run():
        with md.measure() as m:
            every_collective(1200)
        return m.traffic.sent_bytes, m.traffic["all_reduce"].calls

    def alone():
        with md.measure() as m:
            coll.all_reduce(torch.ones(10))
        return m.traffic.sent_bytes, m.traffic["all_reduce"].calls

    assert run_ranks(alone, 1) == [(0, 1)]


def test_an_operation_belongs_to_where_it_was_issued(run_ranks):
    def run():
        work = coll.all_reduce(torch.ones(100), async_op=True)
        with md.measure() as late:
            work.wait()
        with md.measure() as early:
            work = coll.all_reduce(torch.ones(100), async_op=True)
        work.wait()
        with md.measure() as outer:
            with md.measure() as inner:
                coll.all_reduce(torch.ones(100))
            coll.all_reduce(torch.ones(100))
        return [m.traffic["all_reduce"].calls for m in (late, early, outer, inner)]

    assert run_ranks(run, 2) == [[0, 1, 2, 1]] * 2


def test_nothing_is_recorded_when_switched_off(run_ranks):
    def run():
        with md.measure(traffic=False, timeline=False) as m:
            coll.all_reduce(torch.ones(100))
        return m.traffic, m.timeline, m.memory.peak_total

    assert run_ranks(run, 2) == [(None, None, 400)] * 2


def test_the_table_can_be_printed(run_ranks):
    def run():
        with md.measure() as m:
            every_collective(1200)
        return str(m.traffic)

    text = run_ranks(run, 2)[0]
    assert "all_reduce" in text
    assert "total" in text


# The loopback counters are those of a whole network namespace, and other programs talk there too.
# So this check runs alone in a namespace of its own.
ALONE = """
    import ctypes, fcntl, os, socket, struct, sys

    CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
        print("cannot make a network namespace:", os.strerror(ctypes.get_errno()))
        sys.exit(77)
    SIOCSIFFLAGS, IFF_UP = 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        fcntl.ioctl(s, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))

    import json

    import torch

    import minidist as md
    from minidist.comm import collectives as coll
    from minidist.measure.process import loopback_counters


    def run(megabytes):
        n, me, numel = coll.world_size(), coll.rank(), megabytes * 262144
        full, shard = torch.ones(numel), torch.ones(numel // n)
        out, inp, message = torch.empty(numel), torch.ones(numel), torch.ones(numel)

        def exchange():
            if me == 0:
                coll.send(message, n - 1)
            elif me == n - 1:
                coll.recv(message, 0)

        operations = {
            "all_reduce": lambda: coll.all_reduce(inp),
            "reduce_scatter": lambda: coll.reduce_scatter(shard, full),
            "all_gather": lambda: coll.all_gather(full, shard),
            "broadcast": lambda: coll.broadcast(inp),
            "all_to_all": lambda: coll.all_to_all(out, inp),
            "send": exchange,
        }
        table = {}
        for name, operation in operations.items():
            operation()  # connections, once
            coll.barrier()
            tries = []
            for _ in range(4):  # when a receiver gets no core for long, TCP sends again: not ours
                before = loopback_counters()
                coll.barrier()  # or a quick rank would send before this one has read
                with md.measure(memory=False, timeline=False) as m:
                    operation()
                coll.barrier()
                tries.append(loopback_counters().bytes - before.bytes)
                coll.barrier()
            on_the_wire = min(tries)
            table[name] = (sum(coll.all_gather_object(m.traffic.sent_bytes)), on_the_wire)
        return table


    if __name__ == "__main__":
        cases = json.loads(sys.argv[1])
        print("RESULT", json.dumps([md.launch(run, *case)[0] for case in cases]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counters of the Linux kernel")
def test_bytes_equal_the_kernels_loopback_counters(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text(textwrap.dedent(ALONE))
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    done = subprocess.run(
        [sys.executable, str(script), json.dumps([[2, 16], [3, 6], [4, 4]])],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(row for row in done.stdout.splitlines() if row.startswith("RESULT"))
    for table in json.loads(line[len("RESULT") :]):
        for name, (ledger, kernel) in table.items():
            assert ledger > 0
            assert kernel == pytest.approx(ledger, rel=0.05), f"{name}: {ledger} against {kernel}"
