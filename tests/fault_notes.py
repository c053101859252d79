"""What is seen of a fault: after how many seconds, with what message, what is left behind.

With MINIDIST_FAULTS=FILE every test that plants a fault adds a line to FILE, and
`python tests/fault_notes.py FILE` writes them as the table of minidist/comm/FAULTS.md.
"""

import json
import os
import re
import sys
import tempfile
import time
from contextlib import contextmanager

import psutil
import pytest

BUSY = 10.0  # added to every time limit: the machine may be doing other things


def note(seconds, message, left="nothing", key=None):
    """Keep what was seen, under the name of the running test, if somebody wants to know."""
    path = os.environ.get("MINIDIST_FAULTS")
    if path:
        test = key or re.split(r"::| \(", os.environ["PYTEST_CURRENT_TEST"])[1]
        seen = {"test": test, "seconds": seconds, "message": message, "left": left}
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(seen) + "\n")


class Traces:
    """What this program and its ranks have open; `left()`: what is there now and was not before."""

    def __init__(self):
        self.before = self._now()

    def _now(self):
        fds = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        shared = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
        ours = {name for name in os.listdir(tempfile.gettempdir()) if "minidist" in name}
        return fds, shared, ours

    def left(self, pids):
        """In words, "nothing" in the best case. What ends on its own gets a moment to do so."""
        end = time.monotonic() + 2
        while True:
            fds, shared, ours = (
                now - before for now, before in zip(self._now(), self.before, strict=True)
            )
            alive = [pid for pid in pids if psutil.pid_exists(pid)]
            said = [f"{len(alive)} processes"] * bool(alive)
            said += [f"{fds} file descriptors"] * (fds > 0)
            # Those of other programs carry other numbers.
            shared = {n for n in shared if any(str(p) in n for p in pids) or "minidist" in n}
            said += sorted(f"/dev/shm/{name}" for name in shared)
            said += sorted(ours)
            if not said or time.monotonic() > end:
                return ", ".join(said) or "nothing"
            time.sleep(0.05)


def fails(fn, *args, ranks=3, within, standing=None, planted=None, timeout=30, **kwargs):
    """`fn` on fresh ranks must fail within that many seconds, counted from the moment in the file
    `planted` if there is one, and leave nothing; returns the failure."""
    from minidist.comm.launch import RankFailure, Ranks

    Ranks(1).close()  # the template, which stays, is there from now on
    traces = Traces()
    with standing or Ranks(ranks, timeout=30) as group:
        pids, begun = group.pids, time.time()
        with pytest.raises(RankFailure) as caught:
            group.run(fn, *args, timeout=timeout, **kwargs)
        ended = time.time()
    if planted is not None:
        begun = float(planted.read_text())
    left = traces.left(pids)
    note(ended - begun, str(caught.value), left)
    assert ended - begun < within + BUSY, f"took {ended - begun:.1f} s"
    assert left == "nothing"
    assert set(caught.value.states) == set(range(ranks))
    return caught.value


@contextmanager
def small_disk(folder, kib):
    """A file system of its own at `folder`, of this size; skips where nobody may mount one."""
    import subprocess

    mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "minidist-test", str(folder)]
    if sys.platform != "linux" or os.geteuid() != 0 or subprocess.run(mount).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
