"""Notebook ranks through a real kernel, what is sent to them, and the pictures."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from jupyter_core.utils import run_sync
from nbclient import NotebookClient

import minidist
from minidist.learn import figures, lang, ship, style

SOON = 4.0  # "within a second", on a machine that is busy with other tests


@dataclass
class Ran:
    """What a cell showed."""

    text: str  # all text outputs
    error: str  # the error as the notebook shows it, "" if none
    pictures: int
    seconds: float


class Kernel:
    """A real IPython kernel that runs one cell after the other."""

    def __init__(self):
        self.notebook = nbformat.v4.new_notebook()
        self.client = NotebookClient(self.notebook, timeout=60, allow_errors=True)
        self.context = self.client.setup_kernel()
        self.context.__enter__()
        self.run("%load_ext minidist")

    @property
    def pid(self) -> int:
        return self.client.km.provisioner.pid

    def run(self, source: str, interrupt_after: float | None = None) -> Ran:
        cell = nbformat.v4.new_code_cell(source)
        self.notebook.cells.append(cell)
        if interrupt_after is not None:
            threading.Timer(interrupt_after, os.kill, (self.pid, signal.SIGINT)).start()
        start = time.monotonic()
        self.client.execute_cell(cell, len(self.notebook.cells) - 1)
        seconds = time.monotonic() - start
        texts, errors, pictures = [], [], 0
        for output in cell.outputs:
            if output.output_type == "stream":
                texts.append(output.text)
            elif output.output_type == "error":
                errors.append("\n".join(output.traceback))
            else:
                texts.append(output.data.get("text/plain", ""))
                pictures += "image/png" in output.data
        return Ran("\n".join(texts), "\n".join(errors), pictures, seconds)

    def close(self):
        self.context.__exit__(None, None, None)


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel()
    yield kernel
    kernel.close()


def running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int], seconds: float = 10) -> list[int]:
    end = time.monotonic() + seconds
    while any(map(running, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return [pid for pid in pids if running(pid)]


def rank_pids(kernel: Kernel) -> list[int]:
    """Every process that the ranks of this notebook consist of, with their template."""
    kernel.run("%%ranks --out pids\nimport os\npids = os.getpid(), os.getppid()")
    text = kernel.run("' '.join(str(p) for p in {p for pair in pids for p in pair})").text
    return [int(pid) for pid in text.strip("'").split()]


# ------------------------------------------------------------------------------- what a cell does


def test_output_is_grouped_by_rank_and_the_last_expression_shown(kernel):
    ran = kernel.run(
        "%%ranks 4\nprint('hello from', rank)\n"
        "x = torch.tensor([rank + 1.0])\ndist.all_reduce(x)\nx"
    )
    assert ran.error == ""
    assert ran.text.splitlines() == [
        line
        for rank in range(4)
        for line in (f"[rank {rank}] hello from {rank}", f"[rank {rank}] tensor([10.])")
    ]
    assert kernel.run("%%ranks 4\nx;").text == ""  # a semicolon hides it, as in any notebook


def test_variables_stay_between_cells(kernel):
    kernel.run("%%ranks 3\nkept = rank * 10")
    ran = kernel.run("%%ranks\nkept")  # as many ranks as last time
    assert ran.text.splitlines() == ["[rank 0] 0", "[rank 1] 10", "[rank 2] 20"]


def test_output_comes_while_the_cell_runs(kernel):
    seen = []
    kernel.run("%%ranks 2\nimport time")

    def look():
        seen.extend(o.get("data", {}).get("text/plain") for o in kernel.notebook.cells[-1].outputs)

    timer = threading.Timer(1.0, look)
    timer.start()
    ran = kernel.run("%%ranks 2\nprint('early')\ntime.sleep(2)\nprint('late')")
    timer.join()
    assert seen == ["[rank 0] early\n[rank 1] early"]
    assert ran.text.count("late") == 2


def test_progress_bars_show_their_last_state(kernel):
    ran = kernel.run(
        "%%ranks 2\nimport sys\n"
        "for i in range(3): print(f'\\rstep {i}', end='', file=sys.stderr, flush=True)\n"
        "print(file=sys.stderr)\nprint('no newline', end='')"
    )
    assert ran.text.splitlines() == [
        f"[rank {r}] {line}" for r in range(2) for line in ("step 2", "no newline")
    ]


def test_functions_classes_modules_and_values_of_the_notebook_are_there(kernel):
    kernel.run(
        "import math\nfactor = 10\ndata = {'a': [1, 2]}\n"
        "def helper(v):\n    return math.sqrt(v) * factor * rank\n"
        "class Box:\n    def __init__(self, v): self.v = v\n"
        "    def value(self): return helper(self.v)\n"
        "box = Box(4)"
    )
    ran = kernel.run("%%ranks 2\nbox.value(), Box(9).value(), data['a'], math.pi > 3")
    assert ran.error == ""
    assert ran.text.splitlines() == [
        "[rank 0] (0.0, 0.0, [1, 2], True)",
        "[rank 1] (20.0, 30.0, [1, 2], True)",
    ]


def test_a_name_means_what_was_assigned_last(kernel):
    kernel.run("n = 1\nshared = [0]")
    kernel.run("%%ranks 2\nn = n + 1\nshared.append(rank)")  # reads the notebook's, makes its own
    assert "[rank 1] (2, [0, 1])" in kernel.run("%%ranks 2\nn, shared").text
    kernel.run("n = 50")
    assert "[rank 1] (50, [0, 1])" in kernel.run("%%ranks 2\nn, shared").text
    kernel.run("shared.append(7)")  # changed in place: newer as well
    assert "[rank 1] (50, [0, 7])" in kernel.run("%%ranks 2\nn, shared").text
    kernel.run("late = 1")
    kernel.run("%%ranks 2\nlate = rank + 100")  # never sent, and now older than the ranks' own
    assert "[rank 1] 101" in kernel.run("%%ranks 2\nlate").text
    kernel.run("%%ranks 2 --out late\nlate += 1")
    assert "[rank 1] 102" in kernel.run("%%ranks 2\nlate").text  # the list stays in the notebook


def test_rank_and_world_size_are_the_ranks_own(kernel):
    kernel.run("rank = 'mine'\nworld_size = -1")
    assert "[rank 1] (1, 2)" in kernel.run("%%ranks 2\nrank, world_size").text
    kernel.run("del rank, world_size")


def test_a_value_that_cannot_be_sent_is_explained(kernel):
    kernel.run("generator = (i for i in [1])")
    ran = kernel.run("%%ranks 2\nlist(generator)")
    assert "NameError: name 'generator' is not defined" in ran.error
    assert "`generator` of the notebook cannot be sent to a rank: TypeError" in ran.error


def test_out_brings_back_one_entry_per_rank(kernel):
    kernel.run(
        "%%ranks 3 --out total,only_last\ntotal = torch.tensor(rank * 1.0)\n"
        "if rank == 2: only_last = 'here'"
    )
    assert kernel.run("total, only_last").text == (
        "([tensor(0.), tensor(1.), tensor(2.)], [None, None, 'here'])"
    )
    assert "no rank has a variable of that name" in kernel.run("%%ranks --out nothing\n1").error
    ran = kernel.run("%%ranks --out lock\nimport threading\nlock = threading.Lock()")
    assert "--out lock: a lock cannot be sent to the notebook" in ran.error


def test_figures_are_shown_per_rank(kernel):
    ran = kernel.run(
        "%%ranks 2\nimport matplotlib.pyplot as plt\nplt.plot([rank, 1])\nprint('drawn');"
    )
    assert ran.error == "" and ran.pictures == 2
    assert "[rank 0] figure" in ran.text and "[rank 1] figure" in ran.text
    assert kernel.run("%%ranks 2\n1").pictures == 0  # closed: not shown a second time


# --------------------------------------------------------------------------------- when it fails


def test_one_rank_raises_while_the_others_wait(kernel):
    kernel.run("%%ranks 4\nx = torch.ones(2)")
    ran = kernel.run("%%ranks 4\nif rank == 1:\n    raise ValueError('boom')\ndist.all_reduce(x)")
    count = len(kernel.notebook.cells)
    assert ran.seconds < SOON
    lines = ran.error.splitlines()
    assert lines[0] == "RankFailure: rank 1 raised ValueError: boom"
    assert f'  File "<cell In[{count}]>", line 3, in <module>' in lines
    assert "ValueError: boom" in lines
    where = f"waiting in all_reduce at <cell In[{count}]>:4: dist.all_reduce(x)"
    assert [line for line in lines if line.startswith("rank ")] == [
        f"rank {r}: {where}" for r in (0, 2, 3)
    ]
    again = kernel.run("%%ranks 4\nx = torch.ones(1)\ndist.all_reduce(x)\nx.item()")
    assert again.seconds < SOON and again.text.count("4.0") == 4


def test_an_error_that_all_ranks_survive_keeps_their_variables(kernel):
    kernel.run("%%ranks 4\nprecious = rank")
    ran = kernel.run("%%ranks 4\nprecios")
    assert "rank 3: same error" in ran.error and "with their variables" in ran.error
    assert "[rank 3] 3" in kernel.run("%%ranks 4\nprecious").text


def test_an_error_names_the_line_of_a_function_of_the_notebook(kernel):
    kernel.run("def divide(a):\n    b = 0\n    return a / b")
    count = len(kernel.notebook.cells)
    ran = kernel.run("%%ranks 2\ndivide(1)")
    assert f'File "<cell In[{count}]>", line 3, in divide\n    return a / b' in ran.error


@pytest.mark.parametrize(
    ("source", "file"),
    [
        ("torch.nn.Linear(3, 2)(torch.ones(4))", "torch/nn/modules/linear.py"),
        ("import minidist as md\nmd.GPTConfig(layers=0)", "minidist/train/model.py"),
    ],
)
def test_an_error_in_a_library_does_not_depend_on_where_it_is_installed(kernel, source, file):
    ran = kernel.run(f"%%ranks 2\n{source}")
    assert f'File "{file}", line' in ran.error
    assert str(Path(minidist.__file__).parents[1]) not in ran.error


@pytest.mark.parametrize(
    ("source", "line", "story"),
    [
        (
            "if rank == 2:\n    dist.barrier()\nelse:\n    dist.all_reduce(torch.ones(3))",
            5,
            ["rank 0 calls ALLREDUCE [3] Float", "rank 2 calls BARRIER at <cell In[{n}]>:3: dist."],
        ),
        (
            "dist.all_reduce(torch.ones(3 + (rank == 2)))",
            2,
            ["rank 0 calls ALLREDUCE [3] Float, rank 2 calls ALLREDUCE [4] Float"],
        ),
        (
            "dist.all_reduce(torch.ones(3, dtype=torch.int32 if rank == 2 else torch.float32))",
            2,
            ["rank 0 calls ALLREDUCE [3] Float, rank 2 calls ALLREDUCE [3] Int"],
        ),
    ],
    ids=["operation", "shape", "dtype"],
)
def test_different_collectives_are_reported_at_once(kernel, source, line, story):
    kernel.run("%%ranks 4\n1;")
    ran = kernel.run(f"%%ranks 4\n{source}")
    assert ran.seconds < SOON
    assert ran.error.startswith("RankFailure: rank 0 raised RuntimeError: the ranks call different")
    n = len(kernel.notebook.cells)
    assert f'File "<cell In[{n}]>", line {line}, in <module>' in ran.error
    for words in story:
        assert words.format(n=n) in ran.error
    healthy = "%%ranks 4\nx = torch.ones(1)\ndist.all_reduce(x)\nx.item()"
    assert "[rank 0] 4.0" in kernel.run(healthy).text


def test_a_deadlock_is_found_and_says_who_waits_where(kernel):
    kernel.run("%%ranks 4\n1;")
    ran = kernel.run("%%ranks 4\nif rank != 2:\n    dist.all_reduce(torch.ones(3))")
    assert ran.seconds < 3 + SOON
    lines = ran.error.splitlines()
    where = f"at <cell In[{len(kernel.notebook.cells)}]>:3: dist.all_reduce(torch.ones(3))"
    assert lines[0].startswith("RankFailure: deadlock")
    assert lines[1:5] == [
        f"rank 0: waiting in all_reduce {where}",
        f"rank 1: waiting in all_reduce {where}",
        "rank 2: finished",
        f"rank 3: waiting in all_reduce {where}",
    ]
    assert "[rank 3] 4" in kernel.run("%%ranks 4\nworld_size").text


def test_a_cell_that_takes_too_long_ends_at_its_timeout(kernel):
    kernel.run("%%ranks 2\nimport time")
    ran = kernel.run("%%ranks 2 --timeout 1\ntime.sleep(30 * rank)")
    assert 1 <= ran.seconds < 1 + SOON
    assert ran.error.startswith("RankFailure: not finished after 1 s\nrank 0: finished\nrank 1: ")
    assert "]>:2: time.sleep(30 * rank)" in ran.error and "--timeout SECONDS" in ran.error


def test_a_rank_that_dies_is_named(kernel):
    ran = kernel.run(
        "%%ranks 3\nimport os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGSEGV)\n"
        "dist.barrier()"
    )
    assert ran.error.startswith("RankFailure: rank 1 was killed by SIGSEGV")
    assert "if rank == 1: os.kill(" in ran.error  # the line at which it died
    assert ran.seconds < SOON


def test_interrupt_ends_an_endless_loop_and_a_wait(kernel):
    endless = "while True:\n    pass"
    waiting = "if rank:\n    dist.barrier()\nimport time; time.sleep(50)"
    for source, state in (
        (endless, "rank 1: running <module> at"),
        (waiting, "rank 1: waiting in barrier at"),
    ):
        kernel.run("%%ranks 2\n1;")
        ran = kernel.run(f"%%ranks 2 --timeout 50\n{source}", interrupt_after=1.0)
        assert ran.seconds < 1 + SOON
        assert ran.error.startswith("RanksInterrupted: interrupted") and state in ran.error
        assert "[rank 1] 2" in kernel.run("%%ranks 2\nworld_size").text


def test_new_ranks_are_announced_when_variables_are_lost(kernel):
    kernel.run("%%ranks 2\ny = 1")
    pids = rank_pids(kernel)
    ran = kernel.run("%%ranks 3\n'y' in globals()")
    assert ran.text.startswith("3 new ranks") and "[rank 2] False" in ran.text
    assert len(wait_until_gone(pids, 3)) == 1  # the template stays for the next ones
    kernel.run("%%ranks 3\ny = 1")
    ran = kernel.run("%%ranks 3 --fresh\n'y' in globals()")
    assert ran.text.splitlines() == [f"[rank {r}] False" for r in range(3)]


def test_new_ranks_get_the_values_of_the_notebook_again(kernel):
    kernel.run("sent = 'once'")
    assert "[rank 1] 'once'" in kernel.run("%%ranks 2\nsent").text
    assert "[rank 1] 'once'" in kernel.run("%%ranks 2 --fresh\nsent").text


def test_a_rank_knows_the_source_of_its_cells(kernel):
    ran = kernel.run(
        "%%ranks 1\nimport traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n"
        "    traceback.print_exc()"
    )
    assert "[rank 0]     1 / 0" in ran.text


def test_checks_are_on_by_default_and_off_with_fast(kernel):
    level = "dist.get_debug_level().name"
    assert kernel.run(f"%%ranks 2\n{level}").text.endswith("[rank 1] 'DETAIL'")
    assert kernel.run(f"%%ranks 2 --fast\n{level}").text.endswith("[rank 1] 'OFF'")


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("%%ranks 0\n1", "the number of ranks must be 1 or more, got '0'"),
        ("%%ranks two\n1", "the number of ranks must be 1 or more, got 'two'"),
        ("%%ranks 2 --timeout -1\n1", "--timeout must be seconds above 0, got '-1'"),
        ("%%ranks 2 --out 3x\n1", "--out needs names separated by commas, got '3x'"),
        ("%%ranks 2 --quick\n1", "unrecognized arguments: --quick"),
        ("%lang fr", "unknown language 'fr'"),
    ],
)
def test_wrong_options_get_one_line(kernel, cell, message):
    text = kernel.run(cell).text.strip()
    assert message in text and text.startswith("UsageError") and "\n" not in text


def test_a_cell_that_is_not_python_never_reaches_the_ranks(kernel):
    ran = kernel.run("%%ranks 2\nx = = 1")
    assert f'File "<cell In[{len(kernel.notebook.cells)}]>", line 2' in ran.error
    assert "SyntaxError" in ran.error and "magic.py" not in ran.error
    assert "work in the notebook, not on a rank" in kernel.run("%%ranks 2\n%time 1").error


def test_language_switch_in_the_kernel(kernel):
    assert "中文" in kernel.run("%lang zh").text
    html = kernel.notebook.cells[-1].outputs[0].data["text/html"]
    assert '[lang="en"]' in html and "display: none" in html


# ---------------------------------------------------------------------- nothing is left behind


@pytest.mark.parametrize("how", ["killed", "restarted", "shut down"])
def test_nothing_is_left_when_the_kernel_goes(how):
    kernel = Kernel()
    try:
        kernel.run("%%ranks 3\n1;")
        pids = rank_pids(kernel)
        assert len(pids) == 4 and all(map(running, pids))
        if how == "killed":
            os.kill(kernel.pid, signal.SIGKILL)
        elif how == "restarted":
            run_sync(kernel.client.km.restart_kernel)(now=False)
        else:
            run_sync(kernel.client.km.shutdown_kernel)(now=False)
        assert wait_until_gone(pids) == []
    finally:
        kernel.close()


def test_failed_cell_healthy_cell_endless_cell_healthy_cell():
    """Case B105: one rank fails before a collective; an endless loop is interrupted."""
    kernel = Kernel()
    try:
        kernel.run("%%ranks 2\n1;")
        start = time.monotonic()
        healthy = "%%ranks 2\nx = torch.ones(1)\ndist.all_reduce(x)\nprint('sum', x.item())"
        failed = kernel.run(
            "%%ranks 2\nprint('before')\nif rank == 1: raise RuntimeError('lost')\n"
            "dist.all_reduce(torch.ones(1))"
        )
        first = kernel.run(healthy)
        endless = kernel.run("%%ranks 2\nwhile True: pass", interrupt_after=1.0)
        second = kernel.run(healthy)
        assert time.monotonic() - start < 4 * SOON
        assert failed.text.splitlines() == ["[rank 0] before", "[rank 1] before"]
        assert failed.error.startswith("RankFailure: rank 1 raised RuntimeError: lost")
        assert "rank 0: waiting in" in failed.error
        assert first.text == second.text == "[rank 0] sum 2.0\n[rank 1] sum 2.0"
        assert endless.error.startswith("RanksInterrupted")
        pids = rank_pids(kernel)
    finally:
        kernel.close()
    assert wait_until_gone(pids) == []


# ------------------------------------------------------------------- what is sent, without a kernel

CELL = """
import numpy as np, os.path
x = a + 1
y += 2
def f(q, *, unused_default=k):
    global z
    z = q + b
    local = 3
    return [c * i for i in d]
class K(Base):
    v = v
    def m(self): return K.n + e
for i in range(3): pass
(w := 3)
"""


def test_names_that_a_cell_reads_and_assigns():
    assert ship.names_read(CELL) - {"range"} == set("aykbcdveK") | {"Base"}
    assert ship.names_assigned(CELL) == set("xyfzKiw") | {"np", "os"}


def test_only_what_changed_is_sent_again():
    notebook = {"__name__": "__main__", "k": 3, "unused": 1}
    exec("def helper(v):\n    return v * k", notebook)
    shipment = ship.Shipment(notebook, hidden=set())
    assert set(shipment.pack("helper(2)")[0]) == {"helper", "k"}
    assert shipment.pack("helper(2)") == ({}, {})
    notebook["k"] = 4
    assert set(shipment.pack("helper(2)")[0]) == {"k"}
    shipment.forget()
    assert set(shipment.pack("helper(2)")[0]) == {"helper", "k"}


def test_functions_see_the_names_of_the_rank():
    notebook = {"__name__": "__main__", "k": 3}
    exec("def helper(v, w=2):\n    return v * k + w + rank\nalias = lambda: helper(1)", notebook)
    values, _ = ship.Shipment(notebook, hidden=set()).pack("alias()")
    namespace = {"__builtins__": __builtins__, "rank": 100}
    ship.unpack(values, namespace)
    assert namespace["alias"]() == 105
    namespace["k"] = 10
    assert namespace["alias"]() == 112


# ------------------------------------------------------------------------------------- language


def test_language_styles():
    assert lang.css("both") == ""
    assert '[lang="en"] { display: none; }' in lang.css("zh")
    assert '[lang="zh"] { display: none; }' in lang.css("en")
    with pytest.raises(ValueError, match="unknown language 'de'"):
        lang.css("de")


def test_rank_cells_survive_the_text_form(tmp_path):
    import jupytext

    source = "%%ranks 4 --out x\nx = rank  # %lang is not a command here\nx"
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source), nbformat.v4.new_code_cell("%lang zh")]
    )
    text = jupytext.writes(notebook, fmt="py:percent")
    assert "# %%ranks 4 --out x" in text  # commented out: the file stays valid Python
    compile(text, "chapter.py", "exec")
    again = jupytext.reads(text, fmt="py:percent")
    assert [cell.source for cell in again.cells] == [source, "%lang zh"]


# -------------------------------------------------------------------------------------- pictures


@pytest.fixture
def pyplot():
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a missing glyph (an empty box) is a warning
        yield plt
        for number in plt.get_fignums():
            plt.figure(number).canvas.draw()
    plt.close("all")


def widths(ax) -> list[list[float]]:
    return [[bar.get_width() for bar in container] for container in ax.containers]


def one_rank(rank, *spans):
    """A timeline: spans are (name, lane, start, end)."""
    names = ("name", "lane", "start", "end")
    return types.SimpleNamespace(
        rank=rank, spans=[types.SimpleNamespace(**dict(zip(names, s, strict=True))) for s in spans]
    )


def test_memory_bars_are_the_numbers(pyplot):
    rows = {
        "rank 0": {"parameters": 4e6, "gradients": 2e6, "peak": 9e6},
        "rank 1": {"parameters": 1e6, "optimizer": 3e6},
    }
    ax = figures.memory_bars(rows, formula={"rank 0": 6e6})
    assert widths(ax) == [[4.0, 1.0], [2.0, 0.0], [0.0, 3.0]]
    assert ax.get_xlabel() == "MB"
    assert [t.get_text() for t in ax.get_yticklabels()] == ["rank 0", "rank 1"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # the first row is on top
    assert {"6", "4"} <= {text.get_text() for text in ax.texts}


def test_traffic_bars_are_the_numbers(pyplot):
    from minidist.measure.traffic import Total, Traffic

    traffic = Traffic()
    traffic.by_op["all_reduce"] = Total(calls=1, payload_bytes=1000, sent_bytes=1500)
    ax = figures.traffic_bars({"ddp": traffic, "none": {}}, formula={"ddp": 1500})
    assert widths(ax) == [[1.5, 0.0]] and ax.get_xlabel() == "kB"


def test_gantt_of_a_plan_places_every_action(pyplot):
    import minidist as md

    plan = md.schedule("gpipe", 2, 1).simulate(f=1, b=2)
    ax = figures.gantt(plan.slots)
    bars = [(bar.get_x(), bar.get_width(), bar.get_y() + 0.42) for c in ax.containers for bar in c]
    assert sorted(bars) == [pytest.approx(b) for b in [(0, 1, 0), (1, 1, 1), (2, 2, 1), (4, 2, 0)]]
    assert "50%" in ax.get_title(loc="left")  # 6 busy slots of 2 ranks x 6


def test_gantt_of_a_measurement_finds_the_actions(pyplot):
    spans = [("F0", "compute", 5.0, 5.01), ("bucket 0", "communication", 5.0, 6.0)]
    second = one_rank(1, ("B12.1", "compute", 5.01, 5.02))
    slots = figures.measured_slots([one_rank(0, *spans), second])
    assert [[(str(action), end) for action, _, end in mine] for mine in slots] == [
        [("F0", 5.01)],
        [("B12.1", 5.02)],
    ]
    ax = figures.gantt(slots, unit="s")
    assert "(ms)" in ax.get_xlabel() and ax.get_xlim() == pytest.approx((0, 20))


def test_timeline_starts_at_zero_and_picks_a_unit(pyplot):
    backward = ("backward", "compute", 100.0, 100.02)
    bucket = ("bucket 0", "communication", 100.01, 100.04)
    ax = figures.timeline([one_rank(0, backward, bucket), one_rank(1, backward)])
    assert widths(ax) == [pytest.approx([20, 20]), pytest.approx([30])]
    assert "(ms)" in ax.get_xlabel() and ax.get_xlim() == pytest.approx((0, 40))
    assert len(ax.get_yticklabels()) == 4
    assert len(figures.timeline([one_rank(0, backward, bucket)], lanes=["compute"]).containers) == 1


def test_loss_curves_say_how_far_apart_they_are(pyplot):
    ax = figures.loss_curves({"single": [2.0, 1.0], "ddp": [2.0, 1.1]}, reference="single")
    assert "0.1" in ax.get_legend().get_texts()[1].get_text()


def test_scaling_is_relative_to_the_smallest_world(pyplot):
    ax = figures.scaling_curves({"ddp": {1: 8.0, 2: 5.0, 4: 4.0}})
    assert list(ax.lines[1].get_ydata()) == [1.0, 1.6, 2.0]


def test_empty_data_draws_an_empty_picture(pyplot):
    figures.memory_bars({})
    figures.traffic_bars({})
    figures.gantt([])
    figures.timeline([])
    figures.loss_curves({})
    figures.scaling_curves({})


def test_without_a_chinese_font_the_chinese_part_is_left_out(monkeypatch, pyplot):
    monkeypatch.setattr(style, "chinese_font", lambda: None)
    assert style.label("memory", "内存") == "memory"
    ax = figures.memory_bars({"a": {"parameters": 1}})
    shown = [ax.get_title(loc="left"), ax.get_legend().get_texts()[0].get_text()]
    assert all(text.isascii() for text in shown)


def test_with_a_chinese_font_it_is_the_fallback_of_the_usual_one(monkeypatch, pyplot):
    monkeypatch.setattr(style, "chinese_font", lambda: "STIXGeneral")
    assert style.label("memory", "内存") == "memory · 内存"
    figures.loss_curves({})
    assert pyplot.rcParams["font.family"] == ["DejaVu Sans", "STIXGeneral"]
    pyplot.rcdefaults()
    _, ax = pyplot.subplots()  # axes of the caller's, from before any picture of ours
    figures.loss_curves({}, ax=ax)
    for text in (ax.xaxis.label, ax._left_title):
        assert text.get_fontfamily() == ["DejaVu Sans", "STIXGeneral"]
    pyplot.close("all")
    pyplot.rcdefaults()


# ---------------------------------------------------------------------------------- the command


def test_the_command_starts_jupyterlab_where_it_is_told(tmp_path, monkeypatch):
    from minidist.learn import commands

    started = []
    monkeypatch.setattr(os, "execv", lambda program, argv: started.append((program, argv)))
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "/theirs")
    commands.learn(tmp_path, browser=False, port=1234)
    ((program, argv),) = started
    assert program == sys.executable and argv[1:3] == ["-m", "jupyterlab"]
    assert {f"--ServerApp.root_dir={tmp_path}", "--ServerApp.port=1234"} < set(argv)
    theirs, ours = os.environ["JUPYTER_CONFIG_PATH"].split(os.pathsep)
    assert theirs == "/theirs"
    with open(os.path.join(ours, "labconfig", "page_config.json"), encoding="utf-8") as file:
        assert (
            "@jupyterlab/apputils-extension:announcements" in json.load(file)["disabledExtensions"]
        )


def test_the_command_says_when_there_is_no_such_folder(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "minidist", "learn", str(tmp_path / "none")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "there is no folder" in done.stderr


def test_learn_is_not_imported_with_the_core():
    code = "import minidist as md, sys; md.launch; print('minidist.learn' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"
