"""Helpers of the launcher's tests: programs of their own, and what is still there afterwards."""

import os
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]


def total(value=1.0):
    """Every rank's answer is the same: value * (1 + 2 + ... + ranks), three times."""
    x = torch.full((3,), value * (dist.get_rank() + 1))
    dist.all_reduce(x)
    return x


def not_of_the_pools():
    """This program and its processes, without the ranks that `run_ranks` keeps for other tests."""
    pools = {pid for pool in sys.modules["conftest"]._pools.values() for pid in pool.pids}
    everyone = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return [p for p in everyone if p.pid not in pools]


def until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@contextmanager
def started(tmp_path, code, **environment):
    """A program of its own, without any main guard; it is gone afterwards, with its ranks."""
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(code), encoding="utf-8")
    program = subprocess.Popen(
        [sys.executable, "-u", str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield program
    finally:
        program.kill()
        program.communicate()


def run_script(tmp_path, code, timeout=50, **environment):
    """Exit code and output of a program."""
    with started(tmp_path, code, **environment) as program:
        out, err = program.communicate(timeout=timeout)
        return program.returncode, out, err
