"""The planner with controls: a control moves, the answer follows; in a kernel and without a widget.

What is saved is ordinary output, in both languages, the same at every run.
"""

import builtins
import re

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

import minidist as md
from minidist.learn import widget
from minidist.learn.widget import WIDGET_VIEW, PlannerWidget, planner_widget
from minidist.plan.planner import NothingFits
from minidist.plan.words import Words, chinese


def first_row(text: str) -> list[str]:
    """The cells of the best layout in the table."""
    line = next(line for line in text.splitlines() if re.match(r"\| (?!layout|:)", line))
    return [cell.strip() for cell in line.strip("|").split("|")]


def row_of(found) -> list[str]:
    e, row = found.best, found.rows()[0]
    return [
        str(e.layout), f"{e.total_bytes / 1e9:.0f}", f"{e.total_seconds:.2f}",
        f"{e.tflops_per_gpu:.0f}", f"{row['tokens_per_second_per_gpu']:.0f}",
    ]  # fmt: skip


def test_each_control_changes_the_answer_to_what_the_planner_says():
    shown = planner_widget(params=7e9, gpus=8, gpu="a100")
    question = {"params": 7e9, "gpus": 8, "gpu": "a100"}
    assert first_row(shown.text) == row_of(md.plan(**question))
    assert first_row(shown.text)[0] == "fsdp 8, micro-batch 2"
    assert shown.picture.startswith(b"\x89PNG")
    for name, value, words in (
        ("seq", 32768, "tp 4"),
        ("recompute", "full", "full recompute"),
        ("gpu", "h100", "full recompute"),
        ("global_batch", 8, "micro-batch"),
        ("gpus", 64, "tp"),
        ("model", "llama-3.1-70b", "tp 8"),
    ):
        before, picture = shown.text, shown.picture
        shown.controls[name].value = value
        question[name] = value
        if name == "model":
            del question["params"]
        assert shown.text != before and shown.picture != picture, name
        assert first_row(shown.text) == row_of(md.plan(**question)), name
        assert words in first_row(shown.text)[0], name
    shown.controls["global_batch"].value = 0  # back to what the planner chooses
    del question["global_batch"]
    assert first_row(shown.text) == row_of(md.plan(**question))


def test_nothing_fits_and_back_again():
    shown = planner_widget("llama-3.1-70b", gpus=1, gpu="rtx4090")
    assert isinstance(shown.problem, Words) and shown.picture is None and shown.plan is None
    with pytest.raises(NothingFits) as error:
        md.plan("llama-3.1-70b", gpus=1, gpu="rtx4090")
    assert str(error.value) in shown.text and "\n" not in str(error.value)
    assert "都放不下" in shown.text and "把序列缩短到 4096 个 token" in shown.text
    shown.controls["seq"].value = 4096
    assert shown.problem is None and "parameters offload" in first_row(shown.text)[0]


def test_unusual_values_become_options_in_their_place():
    shown = planner_widget(params=9e9, gpus=24, seq=3000, global_batch=48)
    assert shown.question == {
        "params": 9e9, "gpus": 24, "gpu": "h100", "seq": 3000, "global_batch": 48,
        "recompute": None,
    }  # fmt: skip
    counts = [value for _, value in shown.controls["gpus"].options]
    assert counts == sorted(counts) and 24 in counts
    names = [name for name, _ in shown.controls["model"].options]
    assert names[names.index("9B") - 1 : names.index("9B") + 2] == ["7B", "9B", "13B"]
    assert planner_widget(gpu="x").text.startswith("unknown GPU 'x'; known: v100")


def test_every_reason_is_in_both_languages():
    for question in (
        {"params": 7e9, "gpus": 8}, {"params": 70e9, "gpus": 256}, {"params": 7e9, "gpus": 1},
        {"params": 13e9, "gpus": 1, "gpu": "rtx4090"},
        {"params": 175e9, "gpus": 1024, "gpu": "a100"},
    ):  # fmt: skip
        found = md.plan(**question)
        for reason in (found.reason, *found.rejected.values()):
            assert re.search("[\u4e00-\u9fff]", chinese(reason)), reason
            assert not re.search("[\u4e00-\u9fff]", reason), reason
            # The same numbers in both, whatever their order.
            numbers = [sorted(re.findall(r"\d+\.?\d*", text)) for text in (reason, chinese(reason))]
            assert numbers[0] == numbers[1], reason


def test_without_ipywidgets_the_answer_and_what_to_install(monkeypatch, capsys):
    real = builtins.__import__

    def refuse(name, *more):
        if name == "ipywidgets":
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    shown = planner_widget(params=7e9, gpus=8, gpu="a100", seq=8192)
    assert shown.controls == {}
    assert first_row(shown.text) == row_of(md.plan(params=7e9, gpus=8, gpu="a100", seq=8192))
    bundles = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, **_: bundles.append(bundle))
    shown._ipython_display_()
    assert "pip install minidist[learn]" in bundles[0]["text/plain"]
    assert [list(bundle)[0] for bundle in bundles[1:]] == ["text/markdown", "image/png"]


@pytest.mark.timeout(60)
def test_in_a_kernel_outputs_are_replaced_and_ordinary():
    """A control set from code acts like one moved by hand: the earlier cell's output changes."""
    source = "from minidist.learn.widget import planner_widget\n"
    source += "shown = planner_widget(params=7e9, gpus=8, gpu='a100')\nshown"
    notebook = new_notebook(
        cells=[new_code_cell(source), new_code_cell("shown.controls['seq'].value = 32768")]
    )
    client = NotebookClient(notebook, timeout=50, store_widget_state=False)
    with client.setup_kernel():
        client.execute_cell(notebook.cells[0], 0)
        controls, text, picture = (dict(output.data) for output in notebook.cells[0].outputs)
        assert WIDGET_VIEW in controls and controls["text/plain"] == widget._RUN
        assert "PlannerWidget" not in str(notebook), "nothing but what is shown on purpose"
        want = PlannerWidget(
            {"model": 7e9, "gpus": 8, "gpu": "a100", "seq": 0, "global_batch": 0, "recompute": ""},
            4,
        )
        assert text["text/markdown"] == want.text and first_row(want.text)[0].startswith("fsdp 8")
        assert '<div lang="zh">\n\n**fsdp 8' in text["text/markdown"]
        client.execute_cell(notebook.cells[1], 1)
    _, later, image = (dict(output.data) for output in notebook.cells[0].outputs)
    assert "tp 4" in first_row(later["text/markdown"])[0]
    assert image["image/png"] != picture["image/png"]
    assert not notebook.cells[1].outputs
    nbformat.validate(notebook)
