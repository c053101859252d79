"""``planner_widget()``: the planner with controls, in a notebook.

The controls need ipywidgets and a live kernel. What they lead to is ordinary output that is
replaced at every change: it stays in the saved notebook, on GitHub and in a static page, where a
widget would be nothing. Texts hold both languages like the prose, so that ``%lang`` chooses here
too.
"""

from __future__ import annotations

import base64
import io

from minidist.learn.style import chinese_font, label
from minidist.plan.hardware import ACCELERATORS
from minidist.plan.planner import Plan, plan
from minidist.plan.shapes import PRESETS
from minidist.plan.words import chinese

SIZES = {
    "350M": 350e6, "1.3B": 1.3e9, "3B": 3e9, "7B": 7e9, "13B": 13e9, "30B": 30e9, "70B": 70e9,
    "175B": 175e9, "530B": 530e9, "1T": 1e12,
}  # fmt: skip
AUTO = "auto 自动"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_RUN = "[Run this cell: the controls appear here. / 运行这个单元格，控件出现在这里。]"
_MISSING = (
    "The controls need ipywidgets: pip install minidist[learn]. Here is the answer without them.\n"
    "控件需要 ipywidgets：pip install minidist[learn]。下面是没有控件的答案。"
)


def planner_widget(
    model: str | None = None,
    *,
    params: float | None = None,
    gpus: int = 8,
    gpu: str = "h100",
    seq: int | None = None,
    global_batch: int | None = None,
    recompute: str | None = None,
    top: int = 4,
) -> PlannerWidget:
    """The `top` best layouts with controls for the arguments, which mean the same as in `md.plan`.

    None leaves a choice to the planner; without `model` or `params` it is 7B. Show it as the last
    line of a cell.
    """
    size = model or params or 7e9
    return PlannerWidget(
        {"model": size, "gpus": gpus, "gpu": gpu, "seq": seq, "global_batch": global_batch,
         "recompute": recompute}, top,
    )  # fmt: skip


class PlannerWidget:
    """What a cell shows. `controls`: name -> ipywidget, empty without ipywidgets; `question`: what
    they say now, as arguments of `md.plan`; `plan`: the answer, or None when `problem` (one line)
    says why there is none; `text`: Markdown in both languages; `picture`: png bytes or None."""

    def __init__(self, values: dict, top: int):
        self.top = top
        self._values = values
        self._handles: list = []
        self.controls = _controls(values)
        for control in self.controls.values():
            control.observe(self._changed, names="value")
        self._answer()

    @property
    def question(self) -> dict:
        values = {name: control.value for name, control in self.controls.items()} or self._values
        values = {name: value or None for name, value in values.items()}
        model = values.pop("model")
        return {"model" if isinstance(model, str) else "params": model, **values}

    def _changed(self, _) -> None:
        self._answer()
        for handle, bundle in zip(self._handles, self._bundles(), strict=False):
            handle.update(bundle, raw=True)

    def _answer(self) -> None:
        self.plan, self.problem = None, None
        try:
            self.plan = plan(**self.question, top=self.top)
        except ValueError as error:
            self.problem = error.args[0]
        if self.plan is not None:
            self.text = _explain(self.plan)
            self.picture = _png(plan_picture(self.plan, self.top))
        else:
            self.text = _blocks(chinese(self.problem), self.problem)
            self.picture = None

    def _ipython_display_(self) -> None:
        from IPython.display import display

        if self.controls:
            from ipywidgets import HBox, VBox

            rows = list(self.controls.values())
            box = VBox([HBox(rows[:3]), HBox(rows[3:])])
            view = box._repr_mimebundle_()[WIDGET_VIEW]
            # Where there is no live widget, its Python repr would say nothing.
            display({WIDGET_VIEW: view, "text/plain": _RUN}, raw=True)
        else:
            display({"text/plain": _MISSING}, raw=True)
        self._handles = [display(b, raw=True, display_id=True) for b in self._bundles()]

    def _bundles(self) -> list[dict]:
        plain = "\n".join(line for line in self.text.splitlines() if "div" not in line)
        picture = {"text/plain": ""}
        if self.picture:
            image = base64.b64encode(self.picture).decode()
            picture = {"image/png": image, "text/plain": "<memory and time of each layout>"}
        return [{"text/markdown": self.text, "text/plain": plain}, picture]


def plan_picture(found: Plan, top: int = 4):
    """Memory and time of the best layouts, labels in both languages; returns the figure."""
    import matplotlib

    from minidist.plan.chart import plan_figure

    family = ["DejaVu Sans", *filter(None, [chinese_font()])]
    with matplotlib.rc_context({"font.family": family}):
        return plan_figure(found, top, label)


# ---------------------------------------------------------------------------------------- controls


def _controls(values: dict) -> dict:
    try:
        import ipywidgets
    except ImportError:
        return {}

    def control(kind, name, text, options, **more):
        value = values[name] or options[0][1]
        return kind(
            options=_with(options, value), value=value, description=text,
            style={"description_width": "9em"}, layout={"width": "24em"}, **more,
        )  # fmt: skip

    slider, menu = ipywidgets.SelectionSlider, ipywidgets.Dropdown
    later = {"continuous_update": False}  # answer when the slider is let go
    models = [*SIZES.items(), *((name, name) for name in PRESETS)]
    cards = [(name, name) for name in ACCELERATORS]
    auto = [(AUTO, 0)]  # not None, which would mean that nothing is chosen
    return {
        "model": control(menu, "model", "model 模型", models),
        "gpus": control(slider, "gpus", "GPUs 卡数", _powers(1, 4096), **later),
        "gpu": control(menu, "gpu", "GPU 型号", cards),
        "seq": control(slider, "seq", "tokens 序列长", auto + _powers(512, 131072), **later),
        "global_batch": control(
            slider, "global_batch", "batch 批大小", auto + _powers(1, 8192), **later
        ),
        "recompute": control(
            menu, "recompute", "recompute 重算", [*auto, ("yes 是", "full"), ("no 否", "none")]
        ),
    }  # fmt: skip


def _powers(first: int, last: int) -> list[tuple[str, int]]:
    return [(str(2**i), 2**i) for i in range(first.bit_length() - 1, last.bit_length())]


def _with(options: list[tuple], value) -> list[tuple]:
    """The options, with one more for a value that is not among them, in order of size."""
    if any(known == value for _, known in options):
        return options
    name = f"{value / 1e9:g}B" if isinstance(value, float) else str(value)
    below = [o for o in options if isinstance(value, str)
             or (not isinstance(o[1], str) and o[1] < value)]  # fmt: skip
    return [*below, (name, value), *(o for o in options if o not in below)]


# ------------------------------------------------------------------------------------------- words


def _explain(found: Plan) -> str:
    """The table, why the best one wins and the others lose, in Markdown."""
    shape, machine = found.shape, found.cluster
    lines = [
        f"**{shape}** ({shape.parameters / 1e9:.3g}B), {machine.gpus} x "
        f"**{machine.accelerator.name}**, seq {shape.seq}, batch {found.global_batch}",
        "",
        "| layout 布局 | GB | s/step 每步 | TFLOP/s | tokens/s/GPU |",
        "|:--|--:|--:|--:|--:|",
    ]
    for e, row in zip(found.layouts, found.rows(), strict=True):
        lines.append(
            f"| {e.layout} | {e.total_bytes / 1e9:.0f} | {e.total_seconds:.2f} | "
            f"{e.tflops_per_gpu:.0f} | {row['tokens_per_second_per_gpu']:.0f} |"
        )
    others = found.rejected.items()
    zh = [f"**{found.best.layout}**：{chinese(found.reason)}"]
    en = [f"**{found.best.layout}**: {found.reason}"]
    if others:
        zh += ["", "不选别的，因为：", ""]
        zh += [f"- {chinese(family)}：{chinese(why)}" for family, why in others]
        en += ["", "Why not the others:", ""] + [f"- {family}: {why}" for family, why in others]
    return "\n".join([*lines, "", _blocks("\n".join(zh), "\n".join(en))])


def _blocks(zh: str, en: str) -> str:
    if zh == en:  # a message that has no Chinese
        return en
    return f'<div lang="zh">\n\n{zh}\n\n</div>\n\n<div lang="en">\n\n{en}\n\n</div>'


def _png(figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=80)
    return file.getvalue()
