"""Set 2, DDP: the classic wrong answers about overlap and accumulation."""

from __future__ import annotations

from minidist.learn.checks import Exercise, wrong

_READY = """        while len(self.launched) < len(self.buckets) and all(
            q in self.ready for q in self.buckets[len(self.launched)]
        ):
"""

EXERCISES = (
    Exercise("2.4", "overlap", (
        wrong(
            "no overlap",
            "数值对了，但所有的桶都是在 backward 结束之后才发出的：通信和计算没有重叠。桶一满，"
            "就要在 _ready 里发出去。",
            "The values are right, but every bucket was launched after backward had ended: "
            "nothing overlaps. Launch a bucket in _ready, as soon as it is full.",
            (_READY, "        while False:\n"),
        ),
        wrong(
            "before ready",
            "桶里的第一个梯度一到就发出去了，其余的还没算好，被当成了 0。要等桶里所有参数都好了"
            "再发。",
            "A bucket was launched when its first gradient arrived; the others were not "
            "computed yet and counted as zeros. Wait until every parameter of the bucket is "
            "ready.",
            ("and all(\n            q in self.ready for q", "and any(\n            q in self.ready for q"),
        ),
        wrong(
            "sum",
            "拷回去的是和，不是平均值：flat 还要除以 world_size。",
            "What was copied back is the sum, not the mean: flat has to be divided by the world "
            "size.",
            ("            work.wait()\n            flat /= dist.get_world_size()\n",
             "            work.wait()\n"),
        ),
        wrong(
            "not waited",
            "没有 wait 就读了 flat：异步的 all_reduce 可能还在路上，读到的是自己的旧值。在真实"
            "的训练里，这个错误时有时无，最难查。",
            "flat was read without wait(): an asynchronous all_reduce may still be on its way, "
            "and you read your own old values. In real training this error comes and goes, "
            "which makes it the hardest to find.",
            ("            work.wait()\n            flat /=", "            flat /="),
        ),
        wrong(
            "waits inside",
            "每个桶一发出就在钩子里等它完成，backward 只好停下来：这是逐桶通信，不是重叠。把 "
            "work 记下来，到 finish() 再等。",
            "Each bucket is waited for in the hook that launched it, so backward stands still: "
            "that is bucketed, but not overlapped. Keep the work and wait in finish().",
            ("        ):\n            self.launched.append(self._launch(len(self.launched)))\n",
             "        ):\n            self.launched.append(self._launch(len(self.launched)))\n"
             "            self.launched[-1][0].wait()\n"),
        ),
        wrong(
            "unused forgotten",
            "没有用到的参数永远不会触发钩子，它所在的桶就永远不满，这个桶没有发出去。finish() "
            "要把剩下的桶也发出去。",
            "A parameter that was not used never calls the hook, so its bucket never fills and "
            "was never sent. finish() has to launch the remaining buckets too.",
            ("        while len(self.launched) < len(self.buckets):\n"
             "            self.launched.append(self._launch(len(self.launched)))\n"
             "        for bucket, (work, flat) in zip(self.buckets, self.launched, strict=True):",
             "        for bucket, (work, flat) in zip(self.buckets, self.launched):"),
        ),
        wrong(
            "launched kept",
            "第一步对，第二步错：finish() 没有清空 self.launched，第二步就以为所有的桶都已经发出，"
            "一个也没有发。self.ready 和 self.launched 都要清空。",
            "The first step is right, the second is not: finish() did not clear self.launched, so "
            "in the second step every bucket seems to be out already, and none is sent. Clear both "
            "self.ready and self.launched.",
            ("        self.launched.clear()\n", ""),
        ),
        wrong(
            "all at once",
            "发得太早：第一个桶一满，你就把所有的桶都发了出去，后面那些桶的梯度还没有算好。",
            "Too early: when the first bucket was full you launched all of them; the gradients of "
            "the others were not there yet.",
            (_READY + "            self.launched.append",
             "        full = all(q in self.ready for q in self.buckets[0])\n"
             "        while full and len(self.launched) < len(self.buckets):\n"
             "            self.launched.append"),
        ),
        wrong(
            "counts only",
            "你只数了好了几个参数，没有看是哪几个。模型使用各层的顺序可以与定义的顺序不同：这时数"
            "够了，桶 0 里的参数却还没有好。要检查这个桶里的每个参数是否都在 self.ready 里。",
            "You counted how many parameters are ready, not which. A model may use its layers in "
            "another order than it defines them: then the number is reached while those of bucket "
            "0 are not ready. Test whether every parameter of the bucket is in self.ready.",
            (_READY, "        while len(self.launched) < len(self.buckets) and len(self.ready) >= sum(\n"
                     "            len(b) for b in self.buckets[: len(self.launched) + 1]\n"
                     "        ):\n"),
        ),
        wrong(
            "if, not while",
            "桶 0 最后才满时，后面的桶早已满了，却没有跟着发出：_ready 每次只发了一个桶，其余的要"
            "等到 finish()。发出一个桶以后要接着看下一个：用 while，不用 if。",
            "Where bucket 0 fills last, those after it are full already but do not follow: _ready "
            "launched one bucket at a time, and the rest waits for finish(). After each launch look "
            "at the next bucket too: while, not if.",
            ("        while len(self.launched) < len(self.buckets) and all(",
             "        if len(self.launched) < len(self.buckets) and all("),
        ),
        wrong(
            "sync ignored",
            "no_sync() 里的反向也通信了：_ready 要先看 self.sync，为 False 时什么都不做。",
            "A backward under no_sync() communicated: _ready has to look at self.sync first and do "
            "nothing when it is False.",
            ("        if not self.sync:\n            return\n", ""),
        ),
        wrong(
            "in a list",
            "`p in bucket` 会用 == 逐元素比较张量，得到的不是一个 True 或 False。用 is 比较，或用"
            "集合、字典（它们按对象本身来找）：`p in self.ready`。",
            "`p in bucket` compares tensors with ==, element by element, which gives no single True "
            "or False. Compare with `is`, or use a set or dict, which look for the object itself: "
            "`p in self.ready`.",
            ("        self.ready.add(p)\n",
             "        self.ready.add(p)\n        mine = [b for b in self.buckets if p in b]\n"
             "        assert mine\n"),
            story=r"Boolean value of Tensor with more than one|\bin (?:b|bucket|self\.buckets\S*)\b[^\n]*"
                  r"\n[^\n]*\n?[^\n]*The size of tensor a",
        ),
        wrong(
            "never ends",
            "_ready 里的 while 永远不停：循环里必须有变化，每发出一个桶，len(self.launched) 就要"
            "多 1，并且到 len(self.buckets) 为止。",
            "The while loop in _ready never ends: something has to change in it. Every launch makes "
            "len(self.launched) one larger, and it stops at len(self.buckets).",
            ("            self.launched.append(self._launch(len(self.launched)))\n        # END",
             "            pass\n        # END"),
            story=r"timeout\n.*(?:running (?:_ready|<\w+>)|async_op=True)",
        ),
        wrong(
            "notes kept",
            "第二步出错：finish() 之后 self.ready 没有清空，上一步的记录还在，所以第二步的桶在"
            "梯度算好之前就发出去了。",
            "The second step goes wrong: self.ready was not cleared in finish(), and with last "
            "step's notes the buckets of the second step leave before their gradients are "
            "there.",
            ("        self.ready.clear()\n", ""),
        ),
        wrong(
            "wrong place",
            "写回时桶和它的结果没有对上：桶没有按 0, 1, 2, … 的顺序发，于是 self.launched[i] 不是"
            "桶 i 的。先满的桶要等前面的桶。",
            "A bucket was given another one's result: buckets were not launched in the order 0, 1, "
            "2, ..., so self.launched[i] is not bucket i's. One that is full early waits for those "
            "before it.",
            (_READY + "            self.launched.append(self._launch(len(self.launched)))\n",
             "        for i, bucket in enumerate(self.buckets):\n"
             "            if any(q is p for q in bucket) and all(q in self.ready for q in bucket):\n"
             "                self.launched.append(self._launch(i))\n"),
            story="split_with_sizes",
        ),
        wrong(
            "any order",
            "桶的发出顺序在各 rank 之间不一致：只用到部分层的 rank，先满的桶不一样，于是同一次 "
            "all_reduce 里一边是桶 1、另一边是桶 2。必须严格按 0, 1, 2, … 的顺序发。",
            "The ranks launch buckets in different orders: where a rank does not use a layer, "
            "another bucket is full first, and one all_reduce then mixes bucket 1 here with "
            "bucket 2 there. Launch strictly in the order 0, 1, 2, ...",
            (_READY + "            self.launched.append(self._launch(len(self.launched)))\n",
             "        for i, bucket in enumerate(self.buckets):\n"
             "            if i not in dict(self.launched) and all(q in self.ready for q in bucket):\n"
             "                self.launched.append((i, self._launch(i)))\n"),
            ("        while len(self.launched) < len(self.buckets):\n"
             "            self.launched.append(self._launch(len(self.launched)))\n"
             "        for bucket, (work, flat) in zip(self.buckets, self.launched, strict=True):",
             "        done = dict(self.launched)\n"
             "        for i in range(len(self.buckets)):\n"
             "            if i not in done:\n"
             "                done[i] = self._launch(i)\n"
             "        for bucket, (work, flat) in zip(self.buckets, [done[i] for i in sorted(done)]):"),
            story="mismatch",
        ),
    )),
    Exercise("2.5", "accumulate", (
        wrong(
            "not divided",
            "梯度大了：每个微批次的损失是平均值，几个微批次相加以后还要除以微批次的个数。",
            "The gradients are too large: each micro-batch's loss is a mean, and the sum over "
            "micro-batches has to be divided by their number.",
            ("            loss = loss_fn(ddp(x), y) / len(microbatches)\n            loss.backward()",
             "            loss = loss_fn(ddp(x), y)\n            loss.backward()"),
            ("    loss = loss_fn(ddp(x), y) / len(microbatches)\n    loss.backward()\n    ddp.finish",
             "    loss = loss_fn(ddp(x), y)\n    loss.backward()\n    ddp.finish"),
        ),
        wrong(
            "sync every time",
            "梯度对了，但每个微批次都通信了一次。除最后一个以外，都要放在 `with ddp.no_sync():` "
            "里，通信量才会降到 1/微批次数。",
            "The gradients are right, but every micro-batch was communicated. All but the last "
            "belong inside `with ddp.no_sync():`; that is what saves the traffic.",
            ("        with ddp.no_sync():\n            loss = loss_fn(ddp(x), y) / len(microbatches)\n"
             "            loss.backward()\n",
             "        loss = loss_fn(ddp(x), y) / len(microbatches)\n        loss.backward()\n"
             "        ddp.finish()\n"),
        ),
        wrong(
            "overlap lost",
            "梯度对了，也只通信了一轮，但连最后一个微批次也放在 no_sync() 里，所有的桶都等到 "
            "finish() 才发：没有重叠。最后一个微批次要在 no_sync() 外面。",
            "The gradients are right, and there was one round of communication. But the last "
            "micro-batch was under no_sync() too, so every bucket waited for finish() and nothing "
            "overlapped: the last one belongs outside.",
            ("    loss = loss_fn(ddp(x), y) / len(microbatches)\n    loss.backward()\n    ddp.finish",
             "    with ddp.no_sync():\n        loss = loss_fn(ddp(x), y) / len(microbatches)\n"
             "        loss.backward()\n    ddp.finish"),
        ),
        wrong(
            "first one sent",
            "第一个微批次反向时，桶就已经发出去了，后面几个微批次的梯度都没有算进去：前面的微批次"
            "要放在 `with ddp.no_sync():` 里。",
            "The buckets left in the backward of the first micro-batch, and the gradients of the "
            "others never went along: all but the last belong inside `with ddp.no_sync():`.",
            ("        with ddp.no_sync():\n            loss = loss_fn(ddp(x), y) / len(microbatches)\n"
             "            loss.backward()\n",
             "        loss = loss_fn(ddp(x), y) / len(microbatches)\n        loss.backward()\n"),
        ),
        wrong(
            "not finished",
            "通信开始了，但没有人等它结束、写回结果：最后一个微批次之后要调用 ddp.finish()。",
            "Communication was started, but nobody waited for it and wrote the result back: call "
            "ddp.finish() after the last micro-batch.",
            ("    ddp.finish()\n", ""),
        ),
        wrong(
            "only the last",
            "只剩下最后一个微批次的梯度：前面的被清掉了（zero_grad），或者没有做 backward。累积"
            "就是不清空，让 backward 加上去。",
            "Only the last micro-batch's gradient is left: the earlier ones were cleared "
            "(zero_grad) or never went backward. Accumulating means not clearing; backward "
            "adds.",
            ("    x, y = microbatches[-1]\n    loss = loss_fn",
             "    x, y = microbatches[-1]\n    ddp.zero_grad()\n    loss = loss_fn"),
        ),
        wrong(
            "never synced",
            "没有任何通信：最后一个微批次也在 no_sync 里，又没有 ddp.finish()。每个 rank 还是只有"
            "自己的梯度。",
            "Nothing was communicated: the last micro-batch was inside no_sync too, and "
            "ddp.finish() is missing. Every rank still has its own gradients.",
            ("    loss.backward()\n    ddp.finish()\n    return total",
             "    with ddp.no_sync():\n        loss.backward()\n    return total"),
        ),
        wrong(
            "last loss",
            "梯度对了，但返回的只是最后一个微批次的损失：要的是整个 batch 的平均损失。",
            "The gradients are right, but what was returned is the last micro-batch's loss: the "
            "mean over the whole batch was asked for.",
            ("    return total + loss.detach()", "    return loss.detach() * len(microbatches)"),
        ),
        wrong(
            "last part of the loss",
            "梯度对了，但返回的只是最后一个微批次的那一份损失：要把每个微批次的都加起来。",
            "The gradients are right, but what was returned is the last micro-batch's share of the "
            "loss: add up those of all micro-batches.",
            ("    return total + loss.detach()", "    return loss.detach()"),
        ),
        wrong(
            "a float",
            "梯度和损失都对，但返回的是 Python 的 float：要一个 0 维张量（2.9 还要对它做 "
            "all_reduce），所以用 loss.detach()，不用 loss.item()。",
            "Gradients and loss are right, but a Python float was returned: a 0-d tensor was asked "
            "for (2.9 all-reduces it), so loss.detach() and not loss.item().",
            ("    return total + loss.detach()", "    return (total + loss.detach()).item()"),
        ),
        wrong(
            "graph kept",
            "返回的损失还连着计算图，整个 batch 的激活值都会因此留在内存里：累加时用 "
            "loss.detach()。",
            "The returned loss still holds its graph, and with it the activations of the whole "
            "batch: add up loss.detach().",
            ("    return total + loss.detach()", "    return total + loss"),
        ),
    )),
)  # fmt: skip
