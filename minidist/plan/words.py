"""Reasons in both languages: English text that carries its Chinese."""

from __future__ import annotations


class Words(str):
    """English, used like any string; `.zh` is the same said in Chinese."""

    zh: str

    def __new__(cls, english: str, chinese: str = "") -> Words:
        words = super().__new__(cls, english)
        words.zh = chinese or english
        return words


def chinese(text: str) -> str:
    """The Chinese of `text` where it has one, else the text."""
    return getattr(text, "zh", text)


# What the words below are made of: kinds of memory, parts of a step.
KINDS_ZH = {
    "parameters": "参数", "gradients": "梯度", "optimizer": "优化器状态", "activations": "激活值",
    "buffers": "缓冲区",
}  # fmt: skip
PARTS = {
    "compute": Words("compute", "计算"),
    "tp_communication": Words("tensor-parallel messages", "张量并行通信"),
    "pp_communication": Words("stage messages", "流水线阶段间的通信"),
    "dp_communication": Words("data-parallel messages", "数据并行通信"),
    "bubble": Words("the pipeline bubble", "流水线气泡"),
    "optimizer": Words("the optimizer step", "优化器更新"),
}
