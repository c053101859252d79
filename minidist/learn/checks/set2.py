"""Set 2, DDP: the classic wrong answers. `run2.py` runs them."""

from __future__ import annotations

from minidist.learn.checks import Exercise, wrong
from minidist.learn.checks.set2_data import EXERCISES as DATA
from minidist.learn.checks.set2_overlap import EXERCISES as OVERLAP

_AVERAGE = """            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
"""
_FLAT = "    flat /= dist.get_world_size()\n    for g, part in zip(grads"
_BACK = """    for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
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
            "last one left",
            "最后一个参数没有拷回：它的 .grad 还是本 rank 自己的。",
            "The last parameter was not copied back: its .grad is still this rank's own.",
            ("zip(grads, flat.split([g.numel() for g in grads]), strict=True)",
             "zip(grads[:-1], flat.split([g.numel() for g in grads]))"),
        ),
        wrong(
            "place stands still",
            "每个参数拿到的都是 flat 开头的那几个数：切下一段以后，位置要往前移 g.numel()。",
            "Every parameter was given the front of flat: after each part the place has to move on "
            "by g.numel().",
            (_BACK, "    for g in grads:\n        part = flat[: g.numel()]\n"),
        ),
        wrong(
            "place counts the idle",
            "切 flat 时，没有 .grad 的参数也占了位置：它不在 flat 里。`place += p.numel()` 要放在 "
            "`if p.grad is not None` 里面。",
            "The place in flat moved on for a parameter without .grad too, but flat does not hold "
            "it: `place += p.numel()` belongs inside `if p.grad is not None`.",
            (_BACK + "        g.copy_(part.view_as(g))",
             "    place = 0\n    for p in model.parameters():\n        if p.grad is not None:\n"
             "            p.grad.copy_(flat[place : place + p.numel()].view_as(p))\n"
             "        place += p.numel()"),
            story="is invalid for input of size",
        ),
        wrong(
            "zeros for none",
            "没有参与计算的参数得到了一个全 0 的 .grad；它应该仍是 None，跳过它（优化器对 0 和 "
            "None 的处理不同，例如权重衰减）。",
            "A parameter that took no part was given a .grad of zeros; it should stay None and be "
            "skipped (an optimizer treats the two differently: weight decay, for one).",
            ("    grads = [p.grad for p in model.parameters() if p.grad is not None]\n",
             "    for p in model.parameters():\n"
             "        p.grad = torch.zeros_like(p) if p.grad is None else p.grad\n"
             "    grads = [p.grad for p in model.parameters()]\n"),
        ),
        wrong(
            "not flattened",
            "torch.cat 只能拼接维数相同的张量：先把每个梯度展平，g.flatten()。",
            "torch.cat joins tensors of the same number of dimensions only: flatten each gradient "
            "first, g.flatten().",
            ("torch.cat([g.flatten() for g in grads])", "torch.cat(grads)"),
            story="same number of dimensions|Sizes of tensors must match except",
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
            "closed when full",
            "你在装到或超过 cap_bytes 以后才关桶（第 2 章的 fill_buckets 就是这样）；这一题要在会"
            "超过之前关：放进去会超，就先关上当前的桶。",
            "You close a bucket once it has reached cap_bytes, as fill_buckets in chapter 2 does; "
            "here it is closed before: if the parameter would not fit, close the bucket first.",
            ("        if bucket and size + nbytes > cap_bytes:\n            buckets.append(bucket)\n"
             "            bucket, size = [], 0\n        bucket.append(p)\n        size += nbytes\n",
             "        bucket.append(p)\n        size += nbytes\n        if size >= cap_bytes:\n"
             "            buckets.append(bucket)\n            bucket, size = [], 0\n"),
        ),
        wrong(
            "size kept",
            "另开一个桶时，size 没有清零：新桶从旧桶的字节数接着数，于是很快又“满”了。",
            "size was not set back to 0 with the new bucket: it goes on from the old bucket's "
            "bytes, and the new one is full at once.",
            ("            bucket, size = [], 0", "            bucket = []"),
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
    *OVERLAP,
    *DATA,
)  # fmt: skip
