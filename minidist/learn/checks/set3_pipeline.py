"""Set 3, pipeline parallel: the classic wrong answers. `run3_pipeline.py` runs them."""

from __future__ import annotations

from minidist.learn.checks import Exercise, wrong

_NAIVE = '[(kind, i) for i in range(m) for kind in "FB"]'
_GPIPE = '[(kind, i) for kind in "FB" for i in range(m)]'
_WARMUP = "min(m, stages - stage - 1)"
_BUBBLE = "    return (stages - 1) / (m + stages - 1)"
_FLYING = '"1f1b": min(m, stages - stage)}'

EXERCISES = (
    Exercise("3.8", "simple_orders", (
        wrong(
            "naive as GPipe",
            "naive_order 先做完了所有前向：那是 GPipe。朴素的做法是一个微批次的前向和反向都做完，"
            "才轮到下一个。",
            "naive_order runs all forwards first: that is GPipe. Naive means that forward and "
            "backward of one micro-batch are finished before the next begins.",
            (_NAIVE, _GPIPE + " "),
        ),
        wrong(
            "GPipe as naive",
            "gpipe_order 一个前向、一个反向地交替：那样后面的阶段没事可做。GPipe 先做完所有前向，"
            "把流水线填满。",
            "gpipe_order alternates forward and backward, which leaves the later stages idle. "
            "GPipe runs all forwards first and so fills the pipeline.",
            (_GPIPE, _NAIVE + " "),
        ),
        wrong(
            "backwards reversed",
            "反向的顺序倒过来了：这里要求反向也按 0, 1, ..., m - 1。",
            "The backwards are in reverse order: here they run 0, 1, ..., m - 1 as well.",
            (_GPIPE, '[("F", i) for i in range(m)] + [("B", i) for i in reversed(range(m))]'),
        ),
        wrong(
            "only forwards",
            "只有前向：每个微批次还要有一个反向，共 2 * m 个动作。",
            "There are only forwards: every micro-batch needs a backward too, 2 * m actions in "
            "all.",
            (_GPIPE, '[("F", i) for i in range(m)]'),
        ),
    ), world=1),
    Exercise("3.9", "one_f_one_b", (
        wrong(
            "warm-up one too many",
            "预热多了一个：应是 stages - stage - 1 个前向。多一个，每个阶段就多存一份激活值；最"
            "后一个阶段应当直接 F0 B0。",
            "One warm-up forward too many: there are stages - stage - 1. One more means one "
            "more activation to keep on every stage; the last stage starts right away with F0 "
            "B0.",
            (_WARMUP, "min(m, stages - stage)"),
        ),
        wrong(
            "mirrored",
            "预热的个数反了：越靠前的阶段，后面的阶段越多，预热也越多：stages - stage - 1，不是 "
            "stage。",
            "The warm-up is mirrored: the earlier a stage, the more stages are behind it and "
            "the longer its warm-up: stages - stage - 1, not stage.",
            (_WARMUP, "min(m, stage)"),
        ),
        wrong(
            "GPipe",
            "这是 GPipe 的顺序：所有前向都在反向之前，激活值要存 m 份。1F1B 预热之后就一个前向、"
            "一个反向地交替。",
            "This is GPipe's order: all forwards before any backward, with m activations to "
            "keep. After its warm-up 1F1B takes one forward and one backward in turn.",
            (_WARMUP, "m"),
        ),
        wrong(
            "naive",
            "这是朴素的顺序，没有预热：除最后一个阶段外，都在等梯度回来。",
            "This is the naive order, without warm-up: every stage but the last waits for its "
            "gradient to come back.",
            (_WARMUP, "0"),
        ),
        wrong(
            "backward first",
            "稳定期里先做了反向再做前向：1F1B 是先一个前向、再一个反向。",
            "In the steady phase the backward came before the forward: 1F1B takes the forward "
            "first.",
            ('        if warmup + i < m:\n            order.append(("F", warmup + i))\n        order.append(("B", i))\n',
             '        order.append(("B", i))\n        if warmup + i < m:\n            order.append(("F", warmup + i))\n'),
        ),
        wrong(
            "no cool-down",
            "收尾的反向丢了：预热了几个前向，最后就还有几个反向要做。",
            "The backwards of the cool-down are missing: as many as there were forwards in the "
            "warm-up.",
            ("    for i in range(m):\n", "    for i in range(m - warmup):\n"),
        ),
        wrong(
            "few micro-batches",
            "微批次比阶段少时，预热超过了 m 个：要取 min(m, ...)。",
            "With fewer micro-batches than stages the warm-up exceeds m: take min(m, ...).",
            (_WARMUP, "stages - stage - 1"),
        ),
    ), world=1),
    Exercise("3.10", "bubble", (
        wrong(
            "of the ideal time",
            "(stages - 1) / m 是相对于理想时间（没有气泡时）的比例；这里要的是占总时间的比例，"
            "分母是 m + stages - 1。",
            "(stages - 1) / m is relative to the ideal time without any bubble; asked for is "
            "the fraction of the total time, whose denominator is m + stages - 1.",
            (_BUBBLE, "    return (stages - 1) / m"),
        ),
        wrong(
            "1F1B smaller",
            "1F1B 的气泡和 GPipe 一样大：它省的是内存，不是时间。",
            "1F1B has the same bubble as GPipe: what it saves is memory, not time.",
            (_BUBBLE, '    if schedule == "1f1b":\n        return (stages - 1) / (m + stages - 1) / 2\n' + _BUBBLE),
        ),
        wrong(
            "naive like GPipe",
            "朴素的做法任何时候只有一个阶段在工作，和 m 无关：空闲 (stages - 1) / stages。",
            "With the naive order one stage works at any time, whatever m: idle for (stages - "
            "1) / stages.",
            ("        return (stages - 1) / stages\n", "        return (stages - 1) / (m + stages - 1)\n"),
        ),
        wrong(
            "both ends",
            "装满和排空的空闲重复算了：每个阶段的空闲一共是 stages - 1 格（一格是一个前向加一个"
            "反向），不是两倍。",
            "Filling and draining were counted twice: a stage is idle for stages - 1 slots in "
            "all (a slot is one forward and one backward), not for twice that.",
            (_BUBBLE, "    return 2 * (stages - 1) / (m + 2 * (stages - 1))"),
        ),
        wrong(
            "1F1B keeps all",
            "1F1B 不会存 m 份：阶段 s 预热 stages - s - 1 个，再加正在做的一个，最多 min(m, "
            "stages - s) 份。",
            "1F1B does not keep m: stage s warms up with stages - s - 1 and runs one more, so "
            "at most min(m, stages - s).",
            (_FLYING, '"1f1b": m}'),
        ),
        wrong(
            "same on every stage",
            "1F1B 每个阶段存的份数不同：第一个阶段最多（stages 份），最后一个只有 1 份。",
            "In 1F1B the stages differ: the first keeps most (stages), the last only one.",
            (_FLYING, '"1f1b": min(m, stages)}'),
        ),
        wrong(
            "off by one",
            "少算了一份：除了预热的，还有正在做的那一个。",
            "One too few: besides the warm-up there is the one being worked on.",
            (_FLYING, '"1f1b": min(m, stages - stage - 1)}'),
        ),
        wrong(
            "never more than m",
            "在途的微批次不可能多于 m：要取 min(m, ...)。",
            "There cannot be more than m micro-batches in flight: take min(m, ...).",
            (_FLYING, '"1f1b": stages - stage}'),
        ),
    ), world=1),
    Exercise("3.11", "run_stage", (
        wrong(
            "blocking sends",
            "死锁：相邻的两个阶段都停在 send 上。1F1B 里，一边要发激活值，另一边要发梯度，谁都"
            "不在接收。用 isend，循环结束后再 wait。",
            "A deadlock: two neighbouring stages both stand in send. In 1F1B one sends an "
            "activation while the other sends a gradient, and neither receives. Use isend, and "
            "wait after the loop.",
            ("works.append(dist.isend(y.detach(), stage + 1))", "dist.send(y.detach(), stage + 1)"),
            ("works.append(dist.isend(x.grad, stage - 1))", "dist.send(x.grad, stage - 1)"),
            story=r"deadlock.*waiting in send",
        ),
        wrong(
            "not divided",
            "梯度大了 m 倍：每个微批次的损失要除以 m，加起来才是整个 batch 的平均。",
            "The gradients are m times too large: divide each micro-batch's loss by m, so that "
            "they add up to the mean of the batch.",
            (" / len(inputs)", ""),
        ),
        wrong(
            "input without gradient",
            "收到的输入没有 requires_grad_()：它的 .grad 是 None，没有梯度可以发给前一个阶段。",
            "The received input lacks requires_grad_(): its .grad is None, and there is nothing "
            "to send to the stage before.",
            ("                x.requires_grad_()\n", ""),
            story="NoneType",
        ),
        wrong(
            "newest first",
            "反向取出的不是第 i 个微批次的激活值，而是最后存的那个：1F1B 里它们刚好不同步，梯度"
            "就配错了。按 i 来取。",
            "Backward took the activation stored last instead of that of micro-batch i, so "
            "gradients met the wrong activations. Look it up by i.",
            ("            x, y = held.pop(i)\n", "            x, y = held.popitem()[1]\n"),
        ),
        wrong(
            "own order",
            "数值对了，但没有按 order 执行：你先做完了所有前向。1F1B 的意义正在于早做反向、早释"
            "放激活值。",
            "The values are right, but order was not followed: all forwards ran first. The "
            "point of 1F1B is to run backwards early and let go of activations.",
            ("    for kind, i in order:\n", "    for kind, i in sorted(order, key=lambda a: a[0] == \"B\"):\n"),
        ),
        wrong(
            "gradient of the next stage ignored",
            "收到了下一个阶段的梯度却没有用：要把它传给 y.backward(grad)。",
            "The gradient from the next stage was received but not used: pass it to "
            "y.backward(grad).",
            ("                y.backward(grad)\n", "                y.backward(torch.ones_like(y))\n"),
        ),
        wrong(
            "last micro-batch only",
            "只剩下最后一个微批次的梯度：微批次之间不能清空 .grad，backward 会自己累加。",
            "Only the last micro-batch's gradient is left: do not clear .grad between "
            "micro-batches; backward adds up.",
            ("            x, y = held.pop(i)\n", "            x, y = held.pop(i)\n            module.zero_grad()\n"),
        ),
        wrong(
            "loss of the last micro-batch",
            "梯度对了，但返回的只是最后一个微批次的损失。",
            "The gradients are right, but what is returned is the loss of the last micro-batch.",
            ("                total += y.item()\n", "                total = y.item()\n"),
        ),
    ), world=4),
    Exercise("3.12", "train_pipeline", (
        wrong(
            "dealt out",
            "层是轮流分给各阶段的（layers[rank::n]）：执行的顺序就变了。每个阶段要拿连续的一份。",
            "The layers were dealt out in turn (layers[rank::n]), which changes their order: "
            "every stage needs a contiguous run.",
            ("*layers[rank * share : (rank + 1) * share]", "*layers[rank::n]"),
        ),
        wrong(
            "gradients kept",
            "每一步之后没有清空梯度：optimizer.zero_grad()。",
            "The gradients were not cleared after a step: optimizer.zero_grad().",
            ("        optimizer.zero_grad()\n", ""),
        ),
        wrong(
            "loss not shared",
            "只有最后一个阶段知道损失，别的 rank 返回的是 0（或 None）：用 dist.broadcast 从 "
            "rank n - 1 广播。",
            "Only the last stage knows the loss; the others return 0 (or None): dist.broadcast "
            "it from rank n - 1.",
            ("        dist.broadcast(t, n - 1)\n", ""),
        ),
        wrong(
            "loss from rank 0",
            "从 rank 0 广播了，而损失在最后一个阶段，即 rank n - 1。",
            "It was broadcast from rank 0, but the loss is on the last stage, rank n - 1.",
            ("        dist.broadcast(t, n - 1)\n", "        dist.broadcast(t, 0)\n"),
        ),
        wrong(
            "one micro-batch",
            "损失对了，但没有切成 m 个微批次：整个 batch 一次流过，阶段之间就没有重叠可言。",
            "The losses are right, but the batch was not cut into m micro-batches: it went "
            "through in one piece, and stages cannot overlap.",
            ("        shape = (len(inputs) // m, ", "        m = 1\n        shape = (len(inputs) // m, "),
        ),
        wrong(
            "not stepped",
            "模型没有变：忘了 optimizer.step()。",
            "The model does not move: optimizer.step() is missing.",
            ("        optimizer.step()\n", ""),
        ),
    ), seconds=20.0),
)  # fmt: skip
