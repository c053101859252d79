"""The planner's search: every layout of a question, estimated, ranked and put into words.

Every way to cut the GPUs into data-, tensor- and pipeline-parallel groups is estimated, with each
kind of data parallelism, micro-batch and recomputation; what does not fit is kept too, because
"does not fit: 112 GB > 74 GB" is most of an explanation. Offload to the host is tried only when
nothing else fits, as the last resort that it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from minidist.plan.costs import Layout, Software
from minidist.plan.estimate import (
    FRAGMENTATION,
    RESERVED_BYTES,
    Estimate,
    estimate,
    usable_bytes,
)
from minidist.plan.shapes import Transformer, with_sequence
from minidist.plan.words import KINDS_ZH, PARTS, Words

MICROBATCHES = (1, 2, 4, 8, 16)
# Of two layouts that take about the same time, the one with fewer moving parts is the better
# answer. Each adds this fraction to the predicted time when ranking, within the accuracy of the
# prediction.
COMPLEXITY = {
    "tp": 0.03, "pp": 0.05, "chunks": 0.005, "recompute": 0.005, "tight": 0.02, "sharded": 0.03,
    "ddp": 0.0, "zero1": 0.001, "zero2": 0.004, "fsdp": 0.004, "fsdp-grad-op": 0.006,
    "hybrid": 0.006,
}  # fmt: skip


OFFLOADED = {
    "optimizer": Words("optimizer state and gradients", "优化器状态和梯度"),
    "parameters": Words("parameters, gradients and optimizer state", "参数、梯度和优化器状态"),
}


class Search:
    """All layouts of one question, estimated once."""

    def __init__(self, shape, machine, batch, convention, limits, software=None):
        self.shape, self.machine, self.batch = shape, machine, batch
        self.convention, self.limits = convention, limits
        self.software = software or Software()
        self.usable = usable_bytes(machine)
        offload = limits["offload"] or "none"
        self.estimates = [self._estimate(layout) for layout in self.candidates(offload)]
        if not self.estimates:
            raise ValueError(
                Words(
                    f"no layout: a global batch of {batch} does not divide over {machine.gpus} "
                    "GPUs within the given limits",
                    f"没有可行的布局：在这些限制下，全局 batch {batch} 分不到 {machine.gpus} 张卡",
                )
            )
        if limits["offload"] is None and not any(map(self.fits, self.estimates)):
            for offload in ("optimizer", "parameters"):
                self.estimates += [self._estimate(layout) for layout in self.candidates(offload)]

    def _estimate(self, layout: Layout) -> Estimate:
        return estimate(
            self.shape, self.machine, layout, self.batch, self.software, self.convention
        )

    def fits(self, e: Estimate) -> bool:
        host = self.machine.cpu_memory
        return e.total_bytes <= self.usable and (not host or e.host_bytes <= host)

    def score(self, e: Estimate) -> float:
        """Predicted time, a little longer for each complication."""
        layout, extra = e.layout, COMPLEXITY[e.layout.dp_kind]
        extra += COMPLEXITY["tp"] * (layout.tp > 1) + COMPLEXITY["pp"] * (layout.pp > 1)
        # Beside a tensor or pipeline grid, sharding the optimizer is no complication any more.
        alone = layout.tp == layout.pp == 1
        extra += COMPLEXITY["sharded"] * (alone and layout.dp_kind != "ddp")
        extra += COMPLEXITY["chunks"] * (layout.chunks > 1)
        extra += COMPLEXITY["recompute"] * (layout.recompute != "none")
        extra += COMPLEXITY["tight"] * (e.total_bytes > 0.9 * self.usable)
        return e.total_seconds * (1 + extra)

    def fitting(self) -> list[Estimate]:
        """The best by `score`, then the others by predicted time; of layouts that differ only in
        micro-batch, chunks or recomputation the best one."""
        chosen: dict[tuple, Estimate] = {}
        for e in sorted(filter(self.fits, self.estimates), key=self.score):
            layout = e.layout
            chosen.setdefault((layout.dp_kind, layout.tp, layout.pp, layout.offload), e)
        best, *others = chosen.values() or [None]
        return [best, *sorted(others, key=lambda e: e.total_seconds)] if best else []

    def candidates(self, offload: str) -> Iterator[Layout]:
        """Every layout within the limits whose numbers work out."""
        shape, machine, limits = self.shape, self.machine, self.limits
        for tp in _divisors(min(machine.gpus, machine.gpus_per_node)):
            if limits["tp"] not in (None, tp) or machine.gpus % tp or not _cuts(shape, tp):
                continue
            for pp in _divisors(machine.gpus // tp):
                if limits["pp"] not in (None, pp) or pp > shape.layers:
                    continue
                dp = machine.gpus // tp // pp
                for kind in self._kinds(dp, pp, tp, offload):
                    yield from self._variants(Layout(dp, kind, tp, pp, offload=offload))

    def _kinds(self, dp: int, pp: int, tp: int, offload: str) -> list[str]:
        """Kinds of data parallelism that mean something here.

        Inside a pipeline gradients stay whole until the last micro-batch, so stage 1 is what
        shards; gathering parameters for every micro-batch would not pay.
        """
        nodes = self.machine.nodes
        if offload != "none":
            kinds = {"optimizer": ["zero2"], "parameters": ["fsdp"]}[offload] if pp == 1 else []
        elif dp == 1:
            kinds = ["ddp"]
        elif pp > 1:
            kinds = ["ddp", "zero1"]
        else:
            kinds = ["ddp", "zero1", "zero2", "fsdp-grad-op", "fsdp"]
            if nodes > 1 and tp < self.machine.gpus_per_node:
                kinds.append("hybrid")
        wanted = self.limits["dp_kind"]
        return [kind for kind in kinds if wanted in (None, kind)]

    def _variants(self, layout: Layout) -> Iterator[Layout]:
        limits, layers = self.limits, self.shape.layers
        shard = self.machine.gpus_per_node // layout.tp if layout.dp_kind == "hybrid" else None
        recompute = [limits["recompute"]] if limits["recompute"] else ["none", "full"]
        sizes = [limits["microbatch"]] if limits["microbatch"] else MICROBATCHES
        for microbatch in sizes:
            if self.batch % (layout.dp * microbatch):
                continue
            m = self.batch // layout.dp // microbatch
            chunks = [1]
            if layout.pp > 1 and m % layout.pp == 0:
                chunks += [v for v in (2, 4) if layers % (layout.pp * v) == 0]
            for v in chunks:
                schedule = "interleaved" if v > 1 else "1f1b"
                for again in recompute:
                    yield replace(
                        layout, microbatch=microbatch, chunks=v, schedule=schedule, shard=shard,
                        recompute=again,
                    )  # fmt: skip

    # ---- words -----------------------------------------------------------------------------------

    def families(self, best: Estimate | None) -> dict[str, Words]:
        """The layouts one would think of first, and why each is not the answer."""
        nodes, per_node = self.machine.nodes, min(self.machine.gpus, self.machine.gpus_per_node)
        every = {
            "ddp": lambda x: (x.dp_kind, x.tp, x.pp) == ("ddp", 1, 1),
            "zero1": lambda x: (x.dp_kind, x.tp, x.pp) == ("zero1", 1, 1),
            "zero2": lambda x: (x.dp_kind, x.tp, x.pp, x.offload) == ("zero2", 1, 1, "none"),
            "fsdp": lambda x: (x.dp_kind, x.tp, x.pp, x.offload) == ("fsdp", 1, 1, "none"),
            "hybrid": lambda x: x.dp_kind == "hybrid" and x.tp == 1,
            Words(f"tensor parallel {per_node}", f"张量并行 {per_node}"):
            lambda x: x.tp == per_node > 1 and x.pp == 1 and x.dp_kind in ("ddp", "zero1"),
            Words(f"fsdp x tensor parallel {per_node}", f"fsdp x 张量并行 {per_node}"):
            lambda x: nodes > 1 and x.tp == per_node > 1 and x.dp_kind == "fsdp",
            Words("pipeline", "流水线"): lambda x: x.pp > 1 and x.tp == 1,
            Words("tensor x pipeline", "张量 x 流水线"): lambda x: x.pp > 1 and x.tp > 1,
            Words("zero2 + optimizer offload", "zero2 + 优化器 offload"):
            lambda x: (x.offload, x.tp) == ("optimizer", 1),
            Words("fsdp + parameter offload", "fsdp + 参数 offload"):
            lambda x: (x.offload, x.tp) == ("parameters", 1),
        }  # fmt: skip
        reasons = {}
        for name, belongs in every.items():
            members = [e for e in self.estimates if belongs(e.layout)]
            if not members or (best is not None and belongs(best.layout)):
                continue
            fitting = [e for e in members if self.fits(e)]
            if fitting:
                reasons[name] = compare(min(fitting, key=self.score), best)
            else:
                smallest = min(members, key=lambda e: e.total_bytes)
                reasons[name] = self.does_not_fit(smallest)
        return reasons

    def does_not_fit(self, e: Estimate) -> Words:
        if e.total_bytes <= self.usable:
            need, have = e.host_bytes / 1e9, self.machine.cpu_memory / 1e9
            return Words(
                f"does not fit: {need:.0f} GB > {have:.0f} GB of host memory per node",
                f"放不下：每台机器要 {need:.0f} GB 主机内存，只有 {have:.0f} GB",
            )
        largest = max(e.bytes, key=e.bytes.get)
        need, have, most = e.total_bytes / 1e9, self.usable / 1e9, e.bytes[largest] / 1e9
        return Words(
            f"does not fit: {need:.0f} GB > {have:.0f} GB usable ({largest} {most:.0f} GB)",
            f"放不下：要 {need:.0f} GB（{KINDS_ZH[largest]} {most:.0f} GB），可用 {have:.0f} GB",
        )

    def why_best(self, best: Estimate) -> Words:
        """One sentence: what makes it fit, and what it pays."""
        layout, parts = best.layout, best.seconds
        total, gb, usable = best.total_seconds, best.total_bytes / 1e9, self.usable / 1e9
        whole, host = 16 * self.shape.parameters / 1e9, best.host_bytes / 1e9
        english, chinese = (
            f"Fits in {gb:.0f} of {usable:.0f} GB",
            f"占 {usable:.0f} GB 中的 {gb:.0f} GB",
        )
        if layout.offload != "none":
            away = OFFLOADED[layout.offload]
            english += f" because {away} live on the host ({host:.0f} GB of its memory per node)"
            chinese += f"，因为{away.zh}放在主机上（每台机器占 {host:.0f} GB 主机内存）"
        elif layout.gpus > 1:
            english += f" ({whole:.0f} GB of model states in all)"
            chinese += f"（模型状态共 {whole:.0f} GB）"
        if layout.recompute == "none":
            english += ", without recomputing anything"
            chinese += "，不需要重算"
        worst = max((part for part in parts if part != "compute"), key=parts.get)
        busy, lost = parts["compute"] / total, parts[worst] / total
        english += f", and computes {100 * busy:.0f} % of the time"
        chinese += f"；{100 * busy:.0f}% 的时间在计算"
        if busy < 0.995:
            english += f" (most of the rest is {PARTS[worst]}, {100 * lost:.1f} %)"
            chinese += f"（其余主要是{PARTS[worst].zh}，{100 * lost:.1f}%）"
        return Words(english + ".", chinese + "。")

    def nothing_fits(self) -> Words:
        smallest = min(self.estimates, key=lambda e: e.total_bytes)
        usable, need = self.usable / 1e9, smallest.total_bytes / 1e9
        if smallest.total_bytes <= self.usable:
            need, have = smallest.host_bytes / 1e9, self.machine.cpu_memory / 1e9
            return Words(
                f"nothing fits: {smallest.layout} would fit the GPUs but needs {need:.0f} GB of "
                f"host memory per node, more than {have:.0f} GB",
                f"都放不下：{smallest.layout} 的显存够，但每台机器要 {need:.0f} GB 主机内存，"
                f"只有 {have:.0f} GB",
            )
        tried = len(self.estimates)
        return Words(
            f"nothing fits: the smallest of {tried} layouts, {smallest.layout}, needs "
            f"{need:.0f} GB of {usable:.0f} GB usable",
            f"都放不下：{tried} 种布局里最小的是 {smallest.layout}，要 {need:.0f} GB，"
            f"可用 {usable:.0f} GB",
        )

    def changes(self) -> list[Words]:
        """What would make it fit: each was tried."""
        found = []
        for factor in (2, 4, 8, 16, 32, 64, 128):
            more = replace(self.machine, gpus=self.machine.gpus * factor)
            if self._would_fit(machine=more, batch=max(self.batch, more.gpus)):
                found.append(Words(f"use {more.gpus} of these GPUs", f"用 {more.gpus} 张这种卡"))
                break
        smallest = min(e.total_bytes for e in self.estimates)
        if smallest > self.usable:
            size = f"{_memory_for(smallest) / 1e9:.0f} GB"
            found.append(Words(f"use GPUs with {size}", f"用 {size} 的卡"))
        host = min(
            (e.host_bytes for e in self.estimates if e.total_bytes <= self.usable), default=0
        )
        if host:
            size = f"{host / 1e9:.0f} GB"
            found.append(
                Words(f"have {size} of host memory per node", f"每台机器有 {size} 主机内存")
            )
        if self.limits["offload"] == "none" and self._would_fit(offload=None):
            found.append(Words("allow offload to the host", "允许 offload 到主机"))
        for seq in (self.shape.seq // 2, self.shape.seq // 4, self.shape.seq // 8):
            if seq >= 128 and self._would_fit(shape=with_sequence(self.shape, seq)):
                found.append(
                    Words(f"use sequences of {seq} tokens", f"把序列缩短到 {seq} 个 token")
                )
                break
        fixed = [name for name, value in self.limits.items() if value is not None]
        if fixed and self._would_fit(**dict.fromkeys(fixed)):
            names = ", ".join(fixed)
            found.append(Words(f"leave {names} open", f"不固定 {names}"))
        return found

    def _would_fit(self, shape=None, machine=None, batch=None, **limits) -> bool:
        try:
            other = Search(
                shape or self.shape, machine or self.machine, batch or self.batch,
                self.convention, {**self.limits, **limits}, self.software,
            )  # fmt: skip
        except ValueError:
            return False
        return bool(other.fitting())


def compare(e: Estimate, best: Estimate) -> Words:
    """Why `e`, which fits too, is not the best."""
    ratio = e.total_seconds / best.total_seconds
    if ratio < 0.995:
        faster = f"{100 * (1 - ratio):.1f}"
        return Words(
            f"{faster} % faster on paper, but more complicated or nearly full",
            f"纸面上快 {faster}%，但更复杂，或者显存几乎占满",
        )
    if ratio < 1.005:
        return Words("as fast, no simpler", "一样快，但并不更简单")
    more = {part: e.seconds[part] - best.seconds[part] for part in e.seconds}
    worst = max(more, key=more.get)
    cause = PARTS[worst]
    if worst == "compute":
        if e.layout.recompute == "full" and best.layout.recompute == "none":
            cause = Words("recomputed layers", "重算")
        elif e.layout.microbatch < best.layout.microbatch:
            cause = Words("compute, in smaller micro-batches", "计算（微批次更小）")
        elif e.layout.pp > 1:
            cause = Words("compute on the stage with the logits", "计算（在算 logits 的那一段）")
        else:
            cause = Words("compute, in narrower matrix products", "计算（矩阵更窄）")
    seconds, slower = more[worst], f"{100 * (ratio - 1):.0f}"
    shown = f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"
    return Words(
        f"{slower} % slower: {shown} s more of {cause}",
        f"慢 {slower}%：{cause.zh}多用 {shown} s",
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _cuts(shape: Transformer, tp: int) -> bool:
    try:
        shape.check_tp(tp)
    except ValueError:
        return False
    return True


def _memory_for(total: float) -> float:
    """The memory of a GPU of which `total` bytes are usable."""
    return (total + RESERVED_BYTES) / (1 - FRAGMENTATION)
