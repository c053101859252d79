"""What is seen of a fault: after how many seconds, with what message, what is left behind.

With MINIDIST_FAULTS=FILE every test that plants a fault adds a line to FILE, and
`python tests/fault_notes.py FILE` prints them as the table of minidist/comm/FAULTS.md.
"""

import json
import os
import re
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

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


# ---------------------------------------------------------------------------------------- the table

_TRAINING = "test_a_rank_fails_in_training"
_OURS, _TORCHS = ("ddp", "zero2", "fsdp"), ("ddp", "fsdp")
# What happens, our tests, and those of `faults_torch`; several are variants of one row.
ROWS = [
    *(
        (
            f"a rank {kind} in {phase}",
            [f"{_TRAINING}[{s}-{kind}-{phase}]" for s in _OURS],
            [f"test_train[{s}-{kind}-{phase}]" for s in _TORCHS],
        )
        for kind in ("raises", "exits", "is killed", "is stopped")
        for phase in ("forward", "backward", "step", "save")
    ),
    ("a crash in C++", ["test_a_crash_in_cpp_is_told_with_its_line_and_last_words"], []),
    ("shapes differ", ["test_mismatch_without_checks_ends_the_process[different_shapes]"],
     ["test_collective[shapes]"]),
    ("shapes differ, with `debug=True`", ["test_mismatch_with_checks[different_shapes]"], []),
    ("dtypes differ", ["test_mismatch_without_checks_ends_the_process[different_types]"],
     ["test_collective[dtypes]"]),
    ("dtypes differ, with `debug=True`", ["test_mismatch_with_checks[different_types]"], []),
    ("dtypes of one size differ, with `MINIDIST_DEBUG=1`",
     ["test_mismatch_with_our_own_check[different_kinds_of_the_same_size]"],
     ["test_collective[dtypes of one size]"]),
    ("order differs", ["test_collectives_in_another_order"], ["test_collective[order]"]),
    ("order differs, with `MINIDIST_DEBUG=1`",
     ["test_mismatch_with_our_own_check[different_order]"], []),
    ("world sizes differ", ["test_ranks_that_are_told_different_world_sizes"], ["test_worlds"]),
    ("meshes differ", ["test_ranks_that_cut_the_world_differently"], ["test_collective[cuts]"]),
    ("a rank skips a collective", ["test_one_rank_skips_a_collective"],
     ["test_collective[skips]"]),
    ("two ranks wait for each other", ["test_two_ranks_receive_from_each_other"], []),
    ("a rank computes for ever (limit 1.5 s)", ["test_a_rank_that_computes_for_ever"], []),
    ("NaN or inf on one rank", ["test_nan_on_one_rank_reaches_all_ranks_alike"], ["test_values"]),
    ("disk full while saving (tmpfs of 1 MB)", ["test_the_disk_is_full_while_saving[tmpfs]"],
     ["test_disk[tmpfs]"]),
    ("disk full while saving (RLIMIT_FSIZE)", ["test_the_disk_is_full_while_saving[rlimit]"],
     ["test_disk[rlimit]"]),
    ("one rank may not write", ["test_a_folder_that_one_rank_cannot_make"], []),
    ("killed while a checkpoint replaces an older one",
     [f"test_killed_between_the_renames_of_a_checkpoint[{m}]" for m in ("0-1", "1-1", "2-2")],
     ["test_replace"]),
    ("port taken", ["test_a_port_that_is_taken_does_not_matter"], ["test_port"]),
    ("the program that started the ranks is killed", ["test_killing_the_program_leaves_nothing"],
     ["test_parent"]),
    ("two jobs at once", ["test_two_jobs_on_one_machine_at_once"], ["test_two_jobs"]),
    ("memory short: the allocator raises", ["test_not_enough_memory_on_one_rank"],
     ["test_memory"]),
    ("memory short: the kernel kills", ["test_a_rank_is_killed_from_outside_within_five_seconds"],
     ["test_killed_as_the_kernel_does"]),
    ("launches in a row", ["test_many_launches_leave_nothing"], ["test_launches"]),
]  # fmt: skip


def _cell(tests, seen):
    """Seconds of every variant; message and leftovers of the first."""
    found = [next((s for s in seen if s["test"].startswith(test)), None) for test in tests]
    found = [s for s in found if s is not None]
    if not found:
        return "| - | - | - "
    seconds = " / ".join(_figure(s["seconds"]) for s in found)
    first, *more = found[0]["message"].split("\n")
    if re.search("deadlock|different", first) and more and more[-1].startswith("First difference"):
        first = f"{first.rstrip(':')}. {more[-1]}"
    message = re.sub(r"\S*/(tests/|step-|program)", r"\1", first)
    message = re.sub(r"\[?/\w\S*/(\w+\.\w+)(:\d+)?\]?", r"\1", message).replace("|", "\\|")
    message = message.partition(". This is typically caused by")[0]
    left = re.sub(r"(torchelastic)_\w+", r"\1_...", found[0]["left"] or "nothing")
    left = re.sub(r"\b1 (process|file descriptor|temporary file)e?s\b", r"1 \1", left)
    if len(message) > 200:
        message = message[:200].rstrip() + " ..."
    return f"| {seconds} | {message or 'nothing is said'} | {left} "


def _figure(seconds):
    return f"{seconds:.2f}" if 0 < seconds < 0.1 else f"{seconds:.1f}"


def table(seen):
    """The rows as markdown, from what the tests have noted (later notes count)."""
    seen = seen[::-1]
    head = "| fault | minidist: seconds | what it says | left behind | torch: seconds "
    lines = [head + "| what it says | left behind |", "|---" * 7 + "|"]
    lines += [
        f"| {fault} {_cell(ours, seen)}{_cell(torchs, seen)}|" for fault, ours, torchs in ROWS
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    texts = [Path(name).read_text(encoding="utf-8") for name in sys.argv[1:]]
    print(table([json.loads(line) for text in texts for line in text.splitlines()]))
