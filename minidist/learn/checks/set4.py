"""Set 4, FSDP: the classic wrong answers. `run4.py` runs them."""

from __future__ import annotations

from minidist.learn.checks import Exercise, wrong

_PADDED = "    flat = torch.cat([flat, flat.new_zeros(-flat.numel() % n)])\n"
_LOOP = """        ahead = units[i + 1].start_gather() if i + 1 < len(units) else None
        work.wait()
        x = unit.compute(x)
        unit.free()
        work = ahead
"""
_START = "    work = units[0].start_gather()\n"

EXERCISES = (
    Exercise("4.1", "cut", (
        wrong(
            "no padding",
            "没有补 0：13 个元素分给 2 个 rank，chunk 给出的段就不一样长。先补到 n 的倍数。",
            "Nothing was padded: 13 elements on 2 ranks give parts of different lengths. Pad to "
            "a multiple of n first.",
            (_PADDED, ""),
            story="Received data size",
        ),
        wrong(
            "a view",
            "返回的只是整块内存的一个视图：只要它还在，完整的参数就没有释放。加上 .clone()。",
            "What is returned is a view of the whole memory: as long as it lives, nothing is "
            "freed. Add .clone().",
            ("flat.chunk(n)[dist.get_rank()].clone()", "flat.chunk(n)[dist.get_rank()]"),
        ),
        wrong(
            "always part 0",
            "每个 rank 都拿了第 0 段：下标要用自己的 rank。",
            "Every rank took part 0: use your rank as the index.",
            ("flat.chunk(n)[dist.get_rank()].clone()", "flat.chunk(n)[0].clone()"),
        ),
        wrong(
            "dealt out",
            "你是轮流发牌（flat[rank::n]）；这里要的是连续的段。轮流分的话，一次 all_gather 之"
            "后顺序就乱了。",
            "You dealt the elements out in turn (flat[rank::n]); contiguous parts are wanted. "
            "Dealt out, they come back in the wrong order after an all_gather.",
            ("flat.chunk(n)[dist.get_rank()].clone()", "flat[dist.get_rank() :: n].clone()"),
        ),
        wrong(
            "padded in front",
            "0 补在了前面：要补在末尾，否则所有参数的位置都错开了。",
            "The zeros were put in front; they belong at the end, or every parameter is shifted.",
            (_PADDED, "    flat = torch.cat([flat.new_zeros(-flat.numel() % n), flat])\n"),
        ),
        wrong(
            "shapes forgotten",
            "gather 返回的是一维的段：还要 view 成 shapes 里的形状。",
            "gather returns 1-D parts: view them in the given shapes.",
            ("[part.view(shape) for part, shape in zip(parts, shapes, strict=True)]", "list(parts)"),
        ),
    )),
    Exercise("4.2", "gather_and_free", (
        wrong(
            "not freed",
            "free() 之后存储空间还是原来的大小：把变量设为 None 或新建张量不会释放参数还在引用"
            "的内存，要用 untyped_storage().resize_(0)。",
            "After free() the storage is as large as before: a variable set to None, or a new "
            "tensor, frees nothing that the parameters still refer to. Use "
            "untyped_storage().resize_(0).",
            ("        self.full.untyped_storage().resize_(0)\n", "        self.full.zero_()\n"),
        ),
        wrong(
            "not restored",
            "收集之前没有恢复存储空间：释放后的张量没有内存可写。先 resize_(self.nbytes)。",
            "The storage was not brought back before gathering: a freed tensor has no memory to "
            "write to. First resize_(self.nbytes).",
            ("            storage.resize_(self.nbytes)\n            coll.all_gather(self.full, self.shard.detach())\n",
             "            full = torch.empty(self.full.numel())\n            coll.all_gather(full, self.shard.detach())\n"),
        ),
        wrong(
            "new tensor",
            "self.full 换成了新的张量，而参数还是旧张量的视图，看不到新的内容。要恢复同一个存储"
            "空间，写进同一个张量。",
            "self.full became a new tensor, while the parameters are views of the old one and "
            "see nothing of it. Bring back the same storage and write into the same tensor.",
            ("            storage.resize_(self.nbytes)\n", "            storage.resize_(self.nbytes)\n            self.full = torch.zeros(self.full.numel())\n"),
        ),
        wrong(
            "gathered twice",
            "参数已经在了，又通信了一次：先看 storage.nbytes() 是不是 0。反向里这样的重复会让通"
            "信量翻倍。",
            "The parameters were there, and were gathered again: test storage.nbytes() == 0 "
            "first. In backward such repeats double the traffic.",
            ("        if storage.nbytes() == 0:\n", "        if True:\n"),
        ),
        wrong(
            "only own part",
            "只填了自己的那一段，别的段是没有初始化的内存（或 0）：要 all_gather 所有 rank 的 "
            "shard。",
            "Only your own part was filled in; the others are uninitialised memory (or zeros): "
            "all_gather the shards of all ranks.",
            ("            coll.all_gather(self.full, self.shard.detach())\n", "            self.full.zero_()\n            self.full.chunk(dist.get_world_size())[dist.get_rank()].copy_(self.shard.detach())\n"),
        ),
    )),
    Exercise("4.3", "forward", (
        wrong(
            "not gathered",
            "输出是 NaN：参数还没有收集就计算了（检查时，释放了的参数被填成 NaN；真实情况下会崩"
            "溃或读到垃圾）。先 unit.gather()。",
            "The output is NaN: the unit computed before its parameters were gathered (in this "
            "check freed parameters read as NaN; in reality they crash, or are garbage). First "
            "unit.gather().",
            ("    unit.gather()\n", ""),
        ),
        wrong(
            "not freed",
            "前向之后没有释放：所有单元的完整参数会越积越多，等于没有切分。计算完立刻 "
            "unit.free()。",
            "Nothing was freed after forward: the whole parameters of all units pile up, as if "
            "nothing were sharded. unit.free() right after computing.",
            ("    unit.free()\n", ""),
        ),
        wrong(
            "no gather in backward",
            "反向得到 NaN：反向时参数已经释放，却没有再收集一次。用 unit.compute(x)，它会在反向"
            "到达时收集。",
            "Backward gives NaN: the parameters were freed by then and not gathered again. Use "
            "unit.compute(x), which gathers when backward arrives.",
            ("unit.compute(x)", "unit.module(x)"),
        ),
        wrong(
            "freed first",
            "在计算之前就释放了：顺序是收集、计算、释放。",
            "Freed before computing: the order is gather, compute, free.",
            ("    y = unit.compute(x)\n    unit.free()\n", "    unit.free()\n    y = unit.compute(x)\n"),
        ),
        wrong(
            "graph cut",
            "输出对了，但计算图断了：前向不能放在 torch.no_grad() 里，也不能对结果 detach。",
            "The output is right, but the graph is cut: do not run forward under "
            "torch.no_grad(), and do not detach its result.",
            ("    return y", "    return y.detach().requires_grad_()"),
        ),
    )),
    Exercise("4.4", "arrived", (
        wrong(
            "sum",
            '用的是梯度之和，不是平均值：coll.reduce_scatter 要写 "mean"。',
            'The sum of the gradients was used, not their mean: tell coll.reduce_scatter "mean".',
            ('flat, "mean")', "flat)"),
        ),
        wrong(
            "too early",
            "第一个梯度到达就去规约了，其余的 .grad 还是 None：要等 unit.parts 全部到齐。",
            "Reduced when the first gradient came, while the others were still None: wait until "
            "all of unit.parts are there.",
            ("    if any(p.grad is None for p in unit.parts):\n        return\n", ""),
            story="NoneType",
        ),
        wrong(
            "not freed",
            "反向之后完整的参数还在：规约完梯度就 unit.free()，否则反向结束时整个模型都在内存里。",
            "The whole parameters are still there after backward: unit.free() once the gradient "
            "is reduced, or the entire model is in memory when backward ends.",
            ("        p.grad = None\n    unit.free()\n", "        p.grad = None\n"),
        ),
        wrong(
            "gradients kept",
            "完整的梯度没有清空：每个 p.grad 要设为 None，否则内存没有省下来，下一次反向还会加"
            "上旧的梯度。",
            "The whole gradients were kept: set every p.grad to None, or no memory is saved and "
            "the next backward adds to old gradients.",
            ("    for p in unit.parts:\n        p.grad = None\n", ""),
        ),
        wrong(
            "replaced",
            "第二次反向的结果盖掉了第一次的：shard.grad 已有值时要加上去（梯度累积）。",
            "The second backward replaced the first: when shard.grad holds a value, add to it "
            "(gradients are being accumulated).",
            ("mine if unit.shard.grad is None else unit.shard.grad + mine", "mine"),
        ),
        wrong(
            "all-reduced",
            "数值对了，但用的是 all_reduce 再切：通信量是 reduce-scatter 的两倍。",
            "The values are right, but an all_reduce was cut afterwards: twice the traffic of a "
            "reduce-scatter.",
            ('    coll.reduce_scatter(mine, flat, "mean")\n', "    dist.all_reduce(flat)\n    mine.copy_(flat.chunk(dist.get_world_size())[dist.get_rank()] / dist.get_world_size())\n"),
        ),
        wrong(
            "local",
            "没有通信：取的只是自己梯度里的那一段。",
            "Nothing was communicated: this is just the part of your own gradient.",
            ('    coll.reduce_scatter(mine, flat, "mean")\n', "    mine.copy_(flat.chunk(dist.get_world_size())[dist.get_rank()])\n"),
        ),
    )),
    Exercise("4.5", "prefetch", (
        wrong(
            "no prefetch",
            "结果对，但没有重叠：第 i + 1 个单元的收集要在计算第 i 个之前开始。",
            "The result is right, but nothing overlaps: unit i + 1 has to start gathering "
            "before unit i computes.",
            (_START, ""),
            (_LOOP, "        unit.start_gather().wait()\n        x = unit.compute(x)\n        unit.free()\n"),
        ),
        wrong(
            "all at once",
            "一开始就把所有单元都收集了：完整的模型同时在内存里，等于没有切分。最多提前一个。",
            "All units were gathered at the start: the whole model is in memory at once, as if "
            "nothing were sharded. One ahead is enough.",
            (_START, "    works = [unit.start_gather() for unit in units]\n"),
            (_LOOP, "        works[i].wait()\n        x = unit.compute(x)\n        unit.free()\n"),
        ),
        wrong(
            "not waited",
            "没有等收集完成就计算了：work.wait() 之前，参数还没有到。",
            "Computed before the gather was done: until work.wait() the parameters have not "
            "arrived.",
            ("        work.wait()\n        x = unit.compute(x)\n", "        x = unit.compute(x)\n"),
        ),
        wrong(
            "waited for the wrong one",
            "等错了 work：计算第 i 个单元之前要等的是第 i 个的收集，不是刚开始的第 i + 1 个。",
            "Waited for the wrong work: before computing unit i wait for its own gather, not "
            "for that of unit i + 1, which has just started.",
            ("        work.wait()\n        x = unit.compute(x)\n", "        (ahead or work).wait()\n        x = unit.compute(x)\n"),
        ),
        wrong(
            "not freed",
            "计算完没有释放：单元越积越多。每个单元算完立刻 unit.free()。",
            "Units were not freed after computing and pile up: unit.free() as soon as each is "
            "done.",
            ("        unit.free()\n", ""),
        ),
    )),
    Exercise("4.6", "mixed_precision", (
        wrong(
            "gathered in 32 bits",
            "gather_low 的值对了，但通信用的是 float32，字节数多一倍：先转换成 bfloat16 再 "
            "all_gather。",
            "gather_low's values are right, but float32 was communicated, twice the bytes: "
            "convert to bfloat16 first, then all_gather.",
            ("    full = torch.empty(dist.get_world_size() * shard.numel(), dtype=torch.bfloat16)\n    coll.all_gather(full, shard.detach().bfloat16())\n    return full\n",
             "    full = torch.empty(dist.get_world_size() * shard.numel())\n    coll.all_gather(full, shard.detach())\n    return full.bfloat16()\n"),
        ),
        wrong(
            "averaged in 16 bits",
            "梯度是在 bfloat16 里求的平均：先 flat.float() 再 reduce-scatter，否则每次相加都要"
            "舍入，rank 越多误差越大。",
            "The gradient was averaged in bfloat16: flat.float() before the reduce-scatter, or "
            "every addition rounds, the more so the more ranks there are.",
            ('    mine = torch.empty(flat.numel() // dist.get_world_size())\n    coll.reduce_scatter(mine, flat.float(), "mean")\n    return mine\n',
             '    mine = torch.empty(flat.numel() // dist.get_world_size(), dtype=torch.bfloat16)\n    coll.reduce_scatter(mine, flat, "mean")\n    return mine.float()\n'),
        ),
        wrong(
            "gradient in 16 bits",
            "平均是在 float32 里求的，但返回的是 bfloat16：优化器要用 float32 的梯度更新 "
            "float32 的主参数。",
            "The mean was taken in float32, but bfloat16 is returned: the optimizer needs a "
            "float32 gradient for its float32 parameters.",
            ("    return mine\n", "    return mine.bfloat16()\n"),
        ),
        wrong(
            "sum",
            'reduce_grad 返回的是和：coll.reduce_scatter 要写 "mean"。',
            'reduce_grad returns the sum: tell coll.reduce_scatter "mean".',
            ('flat.float(), "mean")', "flat.float())"),
        ),
        wrong(
            "parameters in 32 bits",
            "gather_low 返回的是 float32：要的是 bfloat16 的参数，计算才会用 16 位。",
            "gather_low returns float32: the parameters are wanted in bfloat16, so that the "
            "computation runs in 16 bits.",
            ("    return full\n", "    return full.float()\n"),
        ),
    )),
    Exercise("4.7", "train", (
        wrong(
            "same rows",
            "每个 rank 都用了整个全局 batch：取自己的那一份行，inputs.chunk(n)[rank]。",
            "Every rank used the whole global batch: take your share of the rows, "
            "inputs.chunk(n)[rank].",
            ("inputs.chunk(n)[rank], targets.chunk(n)[rank]", "inputs.chunk(n)[0], targets.chunk(n)[0]"),
        ),
        wrong(
            "gradients kept",
            "每一步之后没有清空 shard 的梯度，旧的梯度又算了一遍：optimizer.zero_grad()。",
            "The shards' gradients were not cleared after a step and count again: "
            "optimizer.zero_grad().",
            ("        optimizer.zero_grad()\n", ""),
        ),
        wrong(
            "local loss",
            "返回的是本 rank 的损失，各 rank 不同：all_reduce 之后除以 n。",
            "The returned losses are this rank's own and differ from rank to rank: all_reduce, "
            "then divide by n.",
            ("        dist.all_reduce(total)\n        losses.append(total.item() / n)", "        losses.append(total.item())"),
        ),
        wrong(
            "optimizer on the model",
            "模型没有变：优化器作用在 model.parameters() 上，而要更新的是 unit.shard。完整的参"
            "数只是暂时收集来的副本。",
            "The model does not move: the optimizer works on model.parameters(), but what has "
            "to be stepped is unit.shard. Whole parameters are only copies, gathered for a "
            "moment.",
            ("[unit.shard for unit in units]", "list(model.parameters())"),
        ),
        wrong(
            "one unit",
            "损失对了，但整个模型做成了一个单元：收集时全部参数同时在内存里。每层一个 Unit。",
            "The losses are right, but the whole model is one unit: gathered, all of it is in "
            "memory at once. One Unit per layer.",
            ("    units = [Unit(layer) for layer in model.layers()]\n", "    units = [Unit(model)]\n"),
        ),
        wrong(
            "no prefetch",
            "损失对了，但前向没有预取：用 forward_with_prefetch(units, x)。",
            "The losses are right, but forward does not prefetch: use "
            "forward_with_prefetch(units, x).",
            ("        loss = loss_fn(forward_with_prefetch(units, x), y)\n", "        for unit in units:\n            x = unit(x)\n        loss = loss_fn(x, y)\n"),
        ),
    ), seconds=20.0),
)  # fmt: skip
