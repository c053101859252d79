"""Set 2, DDP: the classic wrong answers. `run2.py` runs them."""

from __future__ import annotations

from minidist.learn.checks import Exercise, wrong
from minidist.learn.checks.set2_data import EXERCISES as MORE

_AVERAGE = """            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
"""
_FLAT = "    flat /= dist.get_world_size()\n    for g, part in zip(grads"
_READY = """        while len(self.launched) < len(self.buckets) and all(
            q in self.ready for q in self.buckets[len(self.launched)]
        ):
"""

EXERCISES = (
    Exercise("2.1", "average_gradients", (
        wrong(
            "sum",
            "你得到的是各 rank 梯度之和，不是平均值：all_reduce 默认求和，之后还要除以 "
            "world_size。不除的话，等于悄悄把学习率放大了 world_size 倍。",
            "You have the sum of the gradients, not their mean: all_reduce sums, so divide by "
            "the world size afterwards. Left undivided, it silently multiplies the learning "
            "rate by the number of ranks.",
            ("            p.grad /= dist.get_world_size()\n", ""),
        ),
        wrong(
            "local",
            "梯度没有变，每个 rank 还是只有自己的。要么没有通信，要么改到的是副本：结果必须留在 "
            "p.grad 里。",
            "The gradients did not change: every rank still has its own. Either nothing was "
            "communicated, or a copy was changed: the result has to be in p.grad itself.",
            ("            dist.all_reduce(p.grad)\n            p.grad /=",
             "            g = p.grad.clone()\n            dist.all_reduce(g)\n            g /="),
        ),
        wrong(
            "parameters",
            "被平均的是参数 p，不是梯度 p.grad。各 rank 的权重本来就相同，平均以后什么也没变，"
            "而梯度仍是各自的：下一次更新之后各 rank 就分道扬镳了。",
            "The parameter p was averaged, not its gradient p.grad. The weights are equal on "
            "all ranks anyway, so that changes nothing, while the gradients stay local: after "
            "the next step the ranks drift apart.",
            (_AVERAGE, "            w = p.data / dist.get_world_size()\n"
                       "            dist.all_reduce(w)\n            p.data = w + 1e-3\n"),
        ),
        wrong(
            "only rank 0",
            "只有 rank 0 拿到了平均值。dist.reduce 把结果只交给一个 rank，而这里每个 rank 都要"
            "更新自己的那份模型，所以要用 all_reduce。",
            "Only rank 0 has the mean. dist.reduce gives its result to one rank; here every "
            "rank updates its own copy of the model, so all of them need it: all_reduce.",
            ("            dist.all_reduce(p.grad)\n            p.grad /= dist.get_world_size()",
             "            dist.reduce(p.grad, 0)\n            if dist.get_rank() == 0:\n"
             "                p.grad /= dist.get_world_size()"),
        ),
        wrong(
            "no gradient",
            "有的参数没有参与计算，它的 .grad 是 None，不能对 None 通信：先判断再跳过。",
            "A parameter that took no part has .grad None, and None cannot be reduced: test for "
            "it and skip that parameter.",
            ("        if p.grad is not None:\n            dist.all_reduce(p.grad)",
             "        if True:\n            dist.all_reduce(p.grad)"),
            story="Expected parameter `tensor`|'NoneType' object has no attribute",
        ),
        wrong(
            "returned value",
            "dist.all_reduce 就地修改张量，返回的是 None：不要写 p.grad = dist.all_reduce(...)，"
            "调用之后直接用 p.grad。",
            "dist.all_reduce works in place and returns None: do not assign its result; p.grad "
            "itself has changed after the call.",
            ("            dist.all_reduce(p.grad)\n            p.grad /= dist.get_world_size()",
             "            p.grad = dist.all_reduce(p.grad) / dist.get_world_size()"),
            story="unsupported operand type.*NoneType",
        ),
    )),
    Exercise("2.2", "average_flat", (
        wrong(
            "sum",
            "拷回去的是和，不是平均值：flat 还要除以 world_size。",
            "What was copied back is the sum, not the mean: flat has to be divided by the world "
            "size.",
            (_FLAT, "    for g, part in zip(grads"),
        ),
        wrong(
            "not copied back",
            "flat 算对了也没用：torch.cat 得到的是副本，结果必须再拷回每个 .grad。现在各 rank "
            "的梯度还是原来自己的。",
            "A correct flat is not enough: torch.cat makes a copy, and the result has to go "
            "back into every .grad. As it is, each rank still has its own gradients.",
            ("        g.copy_(part.view_as(g))", "        part.view_as(g)"),
        ),
        wrong(
            "one by one",
            "数值对了，但每个参数都单独通信了一次。这一题要求整个模型只调用一次 all_reduce。",
            "The values are right, but every parameter was sent by itself. The point here is "
            "one all_reduce for the whole model.",
            ("    dist.all_reduce(flat)\n    flat /=",
             "    for part in flat.split([g.numel() for g in grads]):\n"
             "        dist.all_reduce(part)\n    flat /="),
        ),
        wrong(
            "order",
            "各段放错了位置：拷回时的顺序必须和拼接时一样。形状相同的参数放错了也不会报错，只会"
            "算错。",
            "The parts went to the wrong places: they have to be copied back in the order in "
            "which they were joined. Where shapes happen to agree nothing complains; it is just "
            "wrong.",
            ("zip(grads, flat.split([g.numel() for g in grads]), strict=True):\n        g.copy_",
             "zip(reversed(grads), flat.split([g.numel() for g in reversed(grads)]), strict=True):"
             "\n        g.copy_"),
        ),
        wrong(
            "no gradient",
            "有的参数没有参与计算，它的 .grad 是 None，不能拼进 flat：先把它们排除，拷回时也用"
            "同一个列表。",
            "A parameter that took no part has .grad None, which cannot be joined: leave it "
            "out, and use the same list when copying back.",
            ("[p.grad for p in model.parameters() if p.grad is not None]", "[p.grad for p in model.parameters()]"),
            story="NoneType",
        ),
    )),
    Exercise("2.3", "make_buckets", (
        wrong(
            "lost the last",
            "最后那个没装满的桶丢了：循环结束时它还开着，要在循环之后收下它。丢掉的参数永远不会"
            "被平均。",
            "The last, partly filled bucket is lost: it is still open when the loop ends and "
            "has to be added after it. Its parameters would never be averaged.",
            ("    if bucket:\n        buckets.append(bucket)\n    return buckets",
             "    return buckets"),
        ),
        wrong(
            "forward order",
            "桶是按前向的顺序装的。反向传播先算出最后一层的梯度；第一个桶若装的是第一层，它要等"
            "到最后才满，就没有什么可以重叠的了。",
            "The buckets follow the forward order. Backward computes the last layer's gradients "
            "first; a first bucket with the first layer fills last, and nothing can overlap.",
            ("    for p in reversed(parameters):\n", "    for p in parameters:\n"),
        ),
        wrong(
            "elements",
            "你数的是元素个数，而 cap_bytes 是字节：每个元素要乘 p.element_size()（float32 是 4，"
            "float16 是 2）。",
            "You counted elements, but cap_bytes is in bytes: multiply by p.element_size() (4 "
            "for float32, 2 for float16).",
            ("nbytes = p.numel() * p.element_size()", "nbytes = p.numel()"),
        ),
        wrong(
            "always four bytes",
            "你假定每个元素 4 字节，float16 的参数只有 2：用 p.element_size()。",
            "You took 4 bytes for every element, but float16 has 2: use p.element_size().",
            ("nbytes = p.numel() * p.element_size()", "nbytes = p.numel() * 4"),
        ),
        wrong(
            "checked after",
            "桶超过了上限：你是放进去以后才检查的。要先看“放进去会不会超”，会超就先关上当前的桶。",
            "Buckets exceed the cap: the size was tested after adding. Test first whether "
            "adding would exceed it, and if so close the bucket before.",
            ("        if bucket and size + nbytes > cap_bytes:", "        if size > cap_bytes:"),
        ),
        wrong(
            "full one reopened",
            "刚好装满的桶是允许的：只有“超过” cap_bytes 才另开一个，要用 > 而不是 >=。",
            "A bucket may be exactly full: a new one is opened only when the cap would be "
            "exceeded, so > and not >=.",
            ("size + nbytes > cap_bytes", "size + nbytes >= cap_bytes"),
        ),
        wrong(
            "empty bucket",
            "列表里有空桶：比上限还大的参数到来时，当前的桶可能是空的，空桶不要收。",
            "There are empty buckets in the list: when a parameter larger than the cap comes, "
            "the open bucket may be empty; do not add it.",
            ("        if bucket and size + nbytes > cap_bytes:",
             "        if size + nbytes > cap_bytes:"),
        ),
    )),
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
            "notes kept",
            "第二步出错：finish() 之后 self.ready 没有清空，上一步的记录还在，所以第二步的桶在"
            "梯度算好之前就发出去了。",
            "The second step goes wrong: self.ready was not cleared in finish(), and with last "
            "step's notes the buckets of the second step leave before their gradients are "
            "there.",
            ("        self.ready.clear()\n", ""),
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
            "没有任何通信：最后一个微批次也在 no_sync 里，或者忘了 ddp.finish()。每个 rank 还是"
            "只有自己的梯度。",
            "Nothing was communicated: the last micro-batch was inside no_sync too, or "
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
            "graph kept",
            "返回的损失还连着计算图，整个 batch 的激活值都会因此留在内存里：累加时用 "
            "loss.detach()。",
            "The returned loss still holds its graph, and with it the activations of the whole "
            "batch: add up loss.detach().",
            ("    return total + loss.detach()", "    return total + loss"),
        ),
    )),
    *MORE,
)  # fmt: skip
