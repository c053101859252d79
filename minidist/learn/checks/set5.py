"""Set 5, ZeRO: the classic wrong answers. `run5.py` runs them."""

from __future__ import annotations

from minidist.learn.checks import Exercise, wrong

_SUM_ZH = "用的是梯度之和，不是平均值。"
_SUM_EN = "The sum of the gradients was used, not their mean. "
_CLIP = """    if norm > max_norm:
        for s in shards:
            s.grad *= max_norm / norm
"""

EXERCISES = (
    Exercise("5.1", "state_bytes", (
        wrong(
            "everything divided",
            "stage 1 只分优化器状态：参数和梯度仍是完整的。你把三项都除了。",
            "Stage 1 divides the optimizer state only; parameters and gradients stay whole. You "
            "divided all three.",
            ("2 * parameters / (n if stage >= 3 else 1)", "2 * parameters / (n if stage >= 1 else 1)"),
            ("2 * parameters / (n if stage >= 2 else 1)", "2 * parameters / (n if stage >= 1 else 1)"),
        ),
        wrong(
            "nothing divided",
            "没有除以 n：ZeRO 正是让每个 rank 只存 1/n。",
            "Nothing is divided by n, and that is the point of ZeRO: each rank keeps 1/n.",
            ("(n if stage >= 3 else 1)", "1"), ("(n if stage >= 2 else 1)", "1"), ("(n if stage >= 1 else 1)", "1"),
        ),
        wrong(
            "no master copy",
            "优化器只算了动量和方差（8 字节），漏了 32 位的参数副本（4 字节）：一共 12。",
            "The optimizer was given momentum and variance only (8 bytes), without the 32-bit "
            "copy of the weight (4 bytes): 12 in all.",
            ("12 * parameters", "8 * parameters"),
        ),
        wrong(
            "single precision",
            "你按纯 float32 算了（4 + 4 + 8）。题目是混合精度：2 + 2 + 12。",
            "These are the numbers of pure float32 (4 + 4 + 8). The task is mixed precision: 2 "
            "+ 2 + 12.",
            ('"parameters": 2 *', '"parameters": 4 *'), ('"gradients": 2 *', '"gradients": 4 *'),
            ("12 * parameters", "8 * parameters"),
        ),
        wrong(
            "stages mixed up",
            "顺序反了：stage 2 先分梯度，stage 3 才分参数。",
            "The wrong order: stage 2 divides the gradients, and only stage 3 the parameters.",
            ('3 else 1),\n        "gradients": 2 * parameters / (n if stage >= 2',
             '2 else 1),\n        "gradients": 2 * parameters / (n if stage >= 3'),
        ),
        wrong(
            "only its own stage",
            "每个阶段包含前面的：stage 3 也分梯度和优化器状态，条件要用 >=，不是 ==。",
            "Each stage includes those before it: stage 3 divides gradients and optimizer state "
            "as well, so >= and not ==.",
            ("stage >= 2", "stage == 2"), ("stage >= 1", "stage == 1"),
        ),
    ), world=1),
    Exercise("5.2", "step_stage1", (
        wrong(
            "sum",
            _SUM_ZH + "all_reduce 之后要除以 n。",
            _SUM_EN + "Divide by n after the all_reduce.",
            ("    flat /= n\n", ""),
        ),
        wrong(
            "local gradient",
            "没有规约梯度：每一段只用了负责它的那个 rank 自己的数据。",
            "The gradients were not reduced: every part was stepped with the data of its own "
            "rank only.",
            ("    dist.all_reduce(flat)\n    flat /= n\n", ""),
        ),
        wrong(
            "always part 0",
            "每个 rank 都取了第 0 段的梯度：自己的一段是 flat.chunk(n)[rank]。",
            "Every rank took part 0 of the gradient: yours is flat.chunk(n)[rank].",
            ("flat.chunk(n)[rank].clone()", "flat.chunk(n)[0].clone()"),
        ),
        wrong(
            "not gathered",
            "别的 rank 更新的那些参数没有收回来：每个 rank 只有自己的一段是新的，各 rank 的模型"
            "就不一样了。更新之后要 all_gather。",
            "The parts that other ranks updated never came back: on each rank only its own part "
            "is new, and the copies differ. all_gather after the step.",
            ("    coll.all_gather(flat, shard.detach())\n", "    flat = flatten(parameters)\n    flat.chunk(n)[rank].copy_(shard.detach())\n"),
        ),
        wrong(
            "gathered too early",
            "all_gather 在 optimizer.step() 之前，收到的是更新前的参数：每一步都晚了一步。",
            "all_gather came before optimizer.step(), so the old parameters were gathered: "
            "everything is one step late.",
            ("    optimizer.step()\n    coll.all_gather(flat, shard.detach())\n", "    coll.all_gather(flat, shard.detach())\n    optimizer.step()\n"),
        ),
        wrong(
            "gradients kept",
            "参数的 .grad 没有设为 None：下一次 backward 会加在旧的梯度上。",
            "The parameters' .grad was not set to None: the next backward adds to the old "
            "gradients.",
            ("    for p in parameters:\n        p.grad = None\n", ""),
        ),
        wrong(
            "gradients gathered",
            "拷回参数的是梯度，不是更新后的参数：要 all_gather 的是 shard，而不是 shard.grad。",
            "What was copied into the parameters are gradients: all_gather the updated shard, "
            "not shard.grad.",
            ("    coll.all_gather(flat, shard.detach())\n", "    coll.all_gather(flat, shard.grad)\n"),
        ),
    )),
    Exercise("5.3", "reduce_and_free", (
        wrong(
            "all-reduced",
            "数值对了，但先做了完整的 all_reduce 再切：通信量是 reduce-scatter 的两倍，而且每个 "
            "rank 都曾存着完整的平均梯度。",
            "The values are right, but a whole all_reduce was cut afterwards: twice the traffic "
            "of a reduce-scatter, and every rank held the whole mean gradient.",
            ('    coll.reduce_scatter(mine, flat, "mean")\n', "    dist.all_reduce(flat)\n    mine.copy_(flat.chunk(dist.get_world_size())[dist.get_rank()] / dist.get_world_size())\n"),
        ),
        wrong(
            "sum",
            _SUM_ZH + 'coll.reduce_scatter 默认求和，要写 "mean"（或者再除以 n）。',
            _SUM_EN + 'coll.reduce_scatter sums by default: say "mean" (or divide by n).',
            ('flat, "mean")', "flat)"),
        ),
        wrong(
            "whole gradients kept",
            "完整的梯度没有释放：把每个参数的 .grad 设为 None，否则 ZeRO-2 什么内存也没省。",
            "The whole gradients are still there: set every .grad to None, or ZeRO-2 saves no "
            "memory at all.",
            ("    for p in parameters:\n        p.grad = None\n", ""),
        ),
        wrong(
            "replaced",
            "第二次 backward 的结果盖掉了第一次的：shard.grad 已有值时要加上去（梯度累积）。",
            "The second backward replaced the first: when shard.grad holds a value, add to it "
            "(gradients are being accumulated).",
            ("mine if shard.grad is None else shard.grad + mine", "mine"),
        ),
        wrong(
            "local part",
            "没有通信：取的只是自己梯度里的那一段。",
            "Nothing was communicated: this is just the part of your own gradient.",
            ('    coll.reduce_scatter(mine, flat, "mean")\n', "    mine.copy_(flat.chunk(dist.get_world_size())[dist.get_rank()])\n"),
        ),
    )),
    Exercise("5.4", "step_with_masters", (
        wrong(
            "re-read from 16 bits",
            "小的更新丢了：主副本每一步都从 bfloat16 的参数重新读回，不到最后一位的更新全被舍入"
            "掉。主副本要一直保留。",
            "Small updates got lost: the master copy was read back from the bfloat16 parameters "
            "in every step, which rounds away whatever is below their last bit. Keep it.",
            ("    optimizer.step()\n", "    with torch.no_grad():\n        master.copy_(flatten(parameters).chunk(n)[dist.get_rank()])\n    optimizer.step()\n"),
        ),
        wrong(
            "gathered in 32 bits",
            "数值对了，但 all_gather 用的是 float32：参数反正要变成 bfloat16，先转换再通信，字"
            "节数减半。",
            "The values are right, but float32 was gathered: the parameters become bfloat16 "
            "anyway, so convert first and send half the bytes.",
            ("    low = torch.empty(n * master.numel(), dtype=torch.bfloat16)\n    coll.all_gather(low, master.detach().bfloat16())\n",
             "    low = torch.empty(n * master.numel())\n    coll.all_gather(low, master.detach())\n"),
        ),
        wrong(
            "reduced in 16 bits",
            "梯度是在 bfloat16 里求的平均，每一次加法都在舍入：先转成 float32 再做 "
            "reduce-scatter。",
            "The gradients were averaged in bfloat16, rounding with every addition: convert to "
            "float32 before the reduce-scatter.",
            (".float()\n    master.grad = torch.empty_like(master.detach())\n    coll.reduce_scatter(master.grad, flat, \"mean\")\n",
             "\n    low = torch.empty_like(master.detach(), dtype=torch.bfloat16)\n    coll.reduce_scatter(low, flat, \"mean\")\n    master.grad = low.float()\n"),
        ),
        wrong(
            "sum",
            _SUM_ZH + 'coll.reduce_scatter 要写 "mean"。',
            _SUM_EN + 'Tell coll.reduce_scatter "mean".',
            ('flat, "mean")', "flat)"),
        ),
        wrong(
            "gradients kept",
            ".grad 没有清空：parameters 的和 master 的都要设为 None。",
            "A .grad was not cleared: set those of the parameters and of the master to None.",
            ("    master.grad = None\n    for p in parameters:\n        p.grad = None\n", ""),
        ),
        wrong(
            "not copied back",
            "主副本更新了，但模型里的 bfloat16 参数还是旧的：all_gather 之后要拷回去。",
            "The master copy moved, but the model's bfloat16 parameters did not: copy them back "
            "after the all_gather.",
            ("    copy_back(low, parameters)\n", ""),
        ),
    ), tolerance=2e-6),
    Exercise("5.5", "clip", (
        wrong(
            "local norm",
            "这是本 rank 自己的范数，各 rank 不同，裁剪的倍数也就不同：平方和要先 all_reduce，"
            "再开方。",
            "This is the norm of your own parts; it differs from rank to rank, and so does the "
            "clipping. all_reduce the sum of squares, then take the root.",
            ("    dist.all_reduce(total)\n", ""),
        ),
        wrong(
            "norms added",
            "你把各 rank 的范数加了起来。能相加的是平方：先求平方和，all_reduce，最后开方。",
            "You added up the ranks' norms. It is the squares that add: sum of squares, "
            "all_reduce, and the root last.",
            ("    dist.all_reduce(total)\n    norm = total.sqrt()\n", "    norm = total.sqrt()\n    dist.all_reduce(norm)\n"),
        ),
        wrong(
            "root of norms",
            "范数偏小：每段先开了方又加起来。要把所有元素的平方直接相加。",
            "The norm of each part was taken before adding up: add the squares of all elements "
            "instead.",
            ("s.grad.pow(2).sum() for s", "s.grad.norm() for s"),
        ),
        wrong(
            "mean over ranks",
            "平方和除了 n：各 rank 的段是不同的参数，不是同一个量的副本，不能求平均。",
            "The sum of squares was divided by n: the ranks hold different parameters, not "
            "copies of one number, so there is nothing to average.",
            ("    norm = total.sqrt()\n", "    norm = (total / dist.get_world_size()).sqrt()\n"),
        ),
        wrong(
            "always scaled",
            "小的梯度被放大了：范数不超过 max_norm 时不要动。",
            "Small gradients were enlarged: leave them alone when the norm is below max_norm.",
            (_CLIP, "    for s in shards:\n        s.grad *= max_norm / norm\n"),
        ),
        wrong(
            "each part by itself",
            "每一段按自己的范数裁剪了：所有段要乘同一个倍数，否则梯度的方向就变了。",
            "Each part was clipped by its own norm: all parts need the same factor, or the "
            "gradient changes direction.",
            (_CLIP, "    for s in shards:\n        if s.grad.norm() > max_norm:\n            s.grad *= max_norm / s.grad.norm()\n"),
        ),
        wrong(
            "norm after clipping",
            "返回的是裁剪之后的范数；要的是裁剪之前的。",
            "What was returned is the norm after clipping; the one before is asked for.",
            ("    return norm", "    return norm.clamp(max=max_norm)"),
        ),
    )),
    Exercise("5.6", "offload_step", (
        wrong(
            "not copied back",
            "主机上的副本更新了，但 GPU 上的 shard 还是旧的：最后要拷回去。",
            "The host's copy moved, but the shard on the GPU is still the old one: copy it back "
            "at the end.",
            ("    with torch.no_grad():\n        shard.copy_(host)\n", ""),
        ),
        wrong(
            "new tensor",
            "shard 换成了新的张量：别的地方引用的还是旧内存。要用 copy_ 就地写入。",
            "shard became a new tensor: whoever refers to the old memory sees no change. Write "
            "in place with copy_.",
            ("        shard.copy_(host)", "        shard.data = host.detach().to(shard.dtype, copy=True)"),
        ),
        wrong(
            "wrong dtype",
            "host.grad 的类型要和 host 一样（float32）；shard 的类型也不能变。用 t.to(host)。",
            "host.grad needs the dtype of host (float32), and the shard must keep its own. Use "
            "t.to(host).",
            ("    host.grad = shard.grad.to(host)", "    host.grad = shard.grad"),
            story="grad_dtype|assigned grad has data of a different type",
        ),
        wrong(
            "freed too late",
            "shard.grad 到 optimizer.step() 时还在：主机在算，GPU 的内存却没有让出来。搬走梯度"
            "之后立刻设为 None。",
            "shard.grad was still there during optimizer.step(): the host computes while GPU "
            "memory is held. Set it to None as soon as the gradient has moved.",
            ("    shard.grad = None\n    optimizer.step()\n", "    optimizer.step()\n    shard.grad = None\n"),
        ),
        wrong(
            "never freed",
            "shard.grad 一直没有释放：它会占着 GPU 的内存，下一步的梯度还会加在上面。",
            "shard.grad was never freed: it holds GPU memory, and the next gradient adds to it.",
            ("    shard.grad = None\n    optimizer.step()\n", "    optimizer.step()\n"),
        ),
        wrong(
            "accumulated on the host",
            "host.grad 上次的值还在，这次又加了上去：每一步都要换成新的梯度。",
            "host.grad still held the last step's value, and the new one was added: replace it "
            "in every step.",
            ("    host.grad = shard.grad.to(host)", "    host.grad = shard.grad.to(host) + (0 if host.grad is None else host.grad)"),
        ),
    ), world=1),
    Exercise("5.7", "mini_zero", (
        wrong(
            "freed at the end",
            "损失对了，但直到 backward 结束都存着完整的梯度：在 _ready 里，一组到齐就规约并释放。",
            "The losses are right, but the whole gradient was held until the end of backward: "
            "reduce and free in _ready, as soon as a group is complete.",
            ("        if all(p.grad is not None for p in self.groups[i]):\n            reduce_and_free(self.groups[i], self.shards[i])\n", "        pass\n"),
            ("        clip_(self.shards, self.max_norm)\n", "        for group, shard in zip(self.groups, self.shards, strict=True):\n            reduce_and_free(group, shard)\n        clip_(self.shards, self.max_norm)\n"),
        ),
        wrong(
            "too early",
            "组里的第一个梯度到达就去规约了，其余的 .grad 还是 None：要等全组到齐。",
            "The group was reduced when its first gradient came, while the others were still "
            "None: wait until all of them are there.",
            ("        if all(p.grad is not None for p in self.groups[i]):\n", "        if True:\n"),
            story="NoneType",
        ),
        wrong(
            "not clipped",
            "没有裁剪梯度：optimizer.step() 之前先调用 clip_(self.shards, self.max_norm)。",
            "The gradients were not clipped: call clip_(self.shards, self.max_norm) before "
            "optimizer.step().",
            ("        clip_(self.shards, self.max_norm)\n", ""),
        ),
        wrong(
            "not gathered",
            "更新后的参数没有收回来：别的 rank 负责的那些段一直停在旧值。",
            "The updated parameters were not gathered: the parts of the other ranks stay as "
            "they were.",
            ("            coll.all_gather(flat, shard.detach())\n", "            flat = flatten(group)\n            flat.chunk(dist.get_world_size())[dist.get_rank()].copy_(shard.detach())\n"),
        ),
        wrong(
            "gradients kept",
            "shard.grad 没有清空：reduce_and_free 会把下一步的梯度加上去。",
            "shard.grad was not cleared: reduce_and_free adds the next step's gradient to it.",
            ("            shard.grad = None\n", ""),
        ),
        wrong(
            "stepped too late",
            "先收集参数、再更新：模型用的一直是上一步的参数。optimizer.step() 要放在 all_gather "
            "之前。",
            "The parameters were gathered before the step, so the model is always one step "
            "behind: optimizer.step() comes before the all_gather.",
            ("        self.optimizer.step()\n", ""),
            ("            shard.grad = None\n", "        self.optimizer.step()\n        for shard in self.shards:\n            shard.grad = None\n"),
        ),
    ), seconds=20.0),
)  # fmt: skip
