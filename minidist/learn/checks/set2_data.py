"""Set 2, DDP: the classic wrong answers about data, learning rate and the training loop."""

from __future__ import annotations

from minidist.learn.checks import Exercise, wrong

_RATE = "return base_lr + (target - base_lr) * (step + 1) / warmup_steps"

EXERCISES = (
    Exercise("2.6", "sampler_indices", (
        wrong(
            "contiguous",
            "你给每个 rank 的是连续的一段；规则是轮流：rank r 取第 r, r + world_size, … 个。轮"
            "流取，同一步的样本才是打乱后相邻的那些，与 rank 数无关。",
            "You gave each rank a contiguous run; the rule is round robin: rank r takes "
            "positions r, r + world_size, ... Then a global step sees the same samples whatever "
            "the number of ranks.",
            ("    places = range(rank, total, world_size)",
             "    share = total // world_size\n"
             "    places = range(rank * share, (rank + 1) * share)"),
        ),
        wrong(
            "own shuffle",
            "各 rank 的打乱顺序不同（种子里有 rank），样本会重复，也会漏掉。种子只能由 seed 和 "
            "epoch 决定。",
            "Every rank shuffled differently (its rank is in the seed): samples are repeated "
            "and others are missed. The seed may depend on seed and epoch only.",
            ("manual_seed(seed + epoch)", "manual_seed(seed + epoch + rank)"),
        ),
        wrong(
            "epoch ignored",
            "每一轮的顺序都一样：epoch 没有用上（真实代码里就是忘了 set_epoch）。",
            "Every epoch has the same order: epoch is not used (in real code: set_epoch was "
            "forgotten).",
            ("manual_seed(seed + epoch)", "manual_seed(seed)"),
        ),
        wrong(
            "dropped",
            "没有补齐：各 rank 的个数不同，或者把零头丢了。个数多的 rank 会在最后一步里永远等下"
            "去；这里要求从开头补到一样多。",
            "Nothing was padded: ranks get different numbers, or the rest was dropped. A rank "
            "with one more would wait for ever in its last step; here the front is appended "
            "until all have the same number.",
            ("    total = -(-items // world_size) * world_size\n", "    total = items\n"),
        ),
        wrong(
            "rest dropped",
            "零头被丢掉了（drop_last 的做法）。这里要求补齐，一个样本也不少。",
            "The incomplete round was dropped (that is drop_last). Here it is filled up, so "
            "that no sample is missing.",
            ("total = -(-items // world_size) * world_size", "total = items // world_size * world_size"),
        ),
        wrong(
            "last repeated",
            "补的是最后一个样本的重复；规则是从打乱后的顺序的开头接着取。",
            "You padded by repeating the last sample; the rule is to continue from the front of "
            "the order.",
            ("order[i % items] for i in places", "order[min(i, items - 1)] for i in places"),
        ),
        wrong(
            "padded with 0",
            "补的都是 0 号样本；规则是从打乱后的顺序的开头接着取：order[i % items]。",
            "You padded with sample 0; the rule is to continue from the front of the shuffled "
            "order: order[i % items].",
            ("order[i % items] for i in places", "(order[i] if i < items else 0) for i in places"),
        ),
        wrong(
            "tensors in the list",
            "数值都对，但列表里装的是 0 维张量：要 int 的列表（.tolist()）。",
            "The values are right, but the list holds 0-d tensors: a list of int was asked for "
            "(.tolist()).",
            ("torch.randperm(items, generator=g).tolist()", "torch.randperm(items, generator=g)"),
        ),
        wrong(
            "front used up",
            "样本比 rank 少得多时，从开头只接一遍不够长，有的 rank 一个也没有：开头要一遍遍地重"
            "复，即 order[i % items]。",
            "With far fewer items than ranks one copy of the front is too short, and some ranks "
            "get nothing: repeat it as often as needed, order[i % items].",
            ("    return [order[i % items] for i in places], [i >= items for i in places]",
             "    places = [i for i in places if i < 2 * items]\n"
             "    return [order[i % items] for i in places], [i >= items for i in places]"),
        ),
        wrong(
            "padding not marked",
            "下标都对了，但补出来的没有标记：第 i 个位置在 i >= items 时是补的。",
            "The indices are right, but what was appended is not marked: position i is padding "
            "when i >= items.",
            ("[i >= items for i in places]", "[False for i in places]"),
        ),
    ), world=1),
    Exercise("2.7", "global_mean", (
        wrong(
            "padding counted",
            "补的重复样本也算进去了：有的样本算了两遍，评估结果就偏了。先用 is_padding 去掉它们。",
            "The repeated samples were counted as well: some count twice, and the result is "
            "off. Leave out what is_padding marks.",
            ("    real = ~torch.tensor(is_padding, dtype=torch.bool)",
             "    real = torch.ones(len(is_padding), dtype=torch.bool)"),
        ),
        wrong(
            "only padding",
            "你留下的正好是补的样本：is_padding 为 True 的才是要去掉的，取反再用。",
            "You kept exactly the padding: True in is_padding marks what to leave out, so "
            "invert it.",
            ("    real = ~torch.tensor", "    real = torch.tensor"),
        ),
        wrong(
            "mean of means",
            "你对各 rank 的平均值再求了平均。真实样本的个数不同时，这样不对（一个都没有时还会得"
            "到 NaN）：要把和与个数分别加起来，再相除。",
            "You averaged the ranks' means. With different numbers of real samples that is "
            "wrong (and NaN when a rank has none): add up sums and numbers separately, then "
            "divide.",
            ("    dist.all_reduce(pair)\n    return pair[0] / pair[1]",
             "    mean = pair[0] / pair[1]\n    dist.all_reduce(mean)\n"
             "    return mean / dist.get_world_size()"),
        ),
        wrong(
            "local",
            "每个 rank 只算了自己的样本，各 rank 的结果不同：和与个数都要先 all_reduce。",
            "Each rank used its own samples only, and the ranks disagree: all_reduce both the "
            "sum and the number.",
            ("    dist.all_reduce(pair)\n", ""),
        ),
        wrong(
            "whole numbers",
            "小数部分丢了：和与个数放进了整数类型的张量。用浮点类型，例如 values.dtype。",
            "The fraction is lost: the sum went into a tensor of integers. Use a floating type, "
            "values.dtype for one.",
            ("real.sum().to(values.dtype)])", "real.sum().to(values.dtype)]).long()"),
        ),
        wrong(
            "stayed away",
            "有的 rank 没有参加 all_reduce，别的 rank 就一直在等它：没有真实样本的 rank 也要参加，"
            "它的和与个数都是 0，不能提前 return。",
            "Some rank did not join the all_reduce, and the others wait for it: a rank without real "
            "samples must join too, with a sum and a number of 0, and not return early.",
            ("    pair = torch.stack", "    if not real.any():\n        return values.sum()\n"
                                      "    pair = torch.stack"),
            story="deadlock",
        ),
        wrong(
            "local count",
            "和是全局的，个数却只是本 rank 的：个数也要 all_reduce。",
            "The sum is global, but the number is this rank's own: all_reduce the number too.",
            ("    dist.all_reduce(pair)\n    return pair[0] / pair[1]",
             "    count = pair[1].clone()\n    dist.all_reduce(pair)\n    return pair[0] / count"),
        ),
    )),
    Exercise("2.8", "learning_rate", (
        wrong(
            "not scaled",
            "学习率没有随 batch 放大：target = base_lr * batch / base_batch。",
            "The rate does not grow with the batch: target = base_lr * batch / base_batch.",
            ("target = base_lr * batch / base_batch", "target = base_lr"),
        ),
        wrong(
            "square root",
            "你用的是平方根缩放（常用于 Adam）；这里要的是线性缩放。",
            "You scaled with the square root (usual for Adam); linear scaling was asked for.",
            ("target = base_lr * batch / base_batch",
             "target = base_lr * (batch / base_batch) ** 0.5"),
        ),
        wrong(
            "from zero",
            "你的预热从 0 开始；这里要求从 base_lr 开始。",
            "The ramp starts at zero; here it starts at base_lr.",
            (_RATE, "return target * (step + 1) / warmup_steps"),
        ),
        wrong(
            "one step late",
            "差了一步：第 0 步就要上升一份，第 warmup_steps - 1 步到达 target。用 (step + 1) / "
            "warmup_steps。",
            "Off by one: step 0 has already risen by one increment, and step warmup_steps - 1 "
            "is at the target. Use (step + 1) / warmup_steps.",
            ("(step + 1) / warmup_steps", "step / warmup_steps"),
        ),
        wrong(
            "no warm-up",
            "没有预热：一上来就用放大后的学习率，开头几步很容易发散。",
            "There is no warm-up: the scaled rate from the first step on easily diverges.",
            (_RATE, "return target"),
        ),
        wrong(
            "division by zero",
            "warmup_steps 可以是 0（不预热）：先处理 step >= warmup_steps 的情形，再做除法。",
            "warmup_steps may be 0 (no warm-up): treat step >= warmup_steps before dividing.",
            ("    if step >= warmup_steps:\n        return target\n    return base_lr",
             "    ramp = min(1.0, (step + 1) / warmup_steps)\n    return base_lr"),
            story="ZeroDivisionError",
        ),
    ), world=1),
    Exercise("2.9", "train", (
        wrong(
            "same rows",
            "每个 rank 都用了整个全局 batch：损失看起来是对的，但没有分担任何工作。取自己的那一"
            "份行。",
            "Every rank used the whole global batch: the losses look right, but no work is "
            "shared. Take your own share of the rows.",
            ("        x, y = inputs.chunk(world_size)[rank], targets.chunk(world_size)[rank]",
             "        x, y = inputs, targets"),
        ),
        wrong(
            "rank 0's rows",
            "每个 rank 都取了第 0 份数据：用 rank 来选，否则其余的数据根本没有用上。",
            "Every rank took share 0 of the data: select by rank, or the rest is never used.",
            ("inputs.chunk(world_size)[rank], targets.chunk(world_size)[rank]",
             "inputs.chunk(world_size)[0], targets.chunk(world_size)[0]"),
        ),
        wrong(
            "gradients kept",
            "每一步之后没有清空梯度，上一步的梯度又算了一遍：optimizer.zero_grad()。",
            "The gradients were not cleared after a step, so the last step's count again: "
            "optimizer.zero_grad().",
            ("        optimizer.zero_grad()\n", ""),
        ),
        wrong(
            "fixed rate",
            "学习率始终等于 lr：没有用 learning_rate 的结果设置 group[\"lr\"]，或者传给 "
            "learning_rate 的 base_batch 不对（应是 train 的参数 base_batch）。",
            "The learning rate always equals lr: group[\"lr\"] was not set from learning_rate, or "
            "learning_rate got a wrong base_batch (it is the argument of train).",
            ('            group["lr"] = learning_rate(step, lr, base_batch, len(inputs), warmup_steps)',
             '            group["lr"] = lr'),
        ),
        wrong(
            "rate of own rows",
            "线性缩放用的是本 rank 的行数。全局 batch 是所有 rank 合起来的：len(inputs)。",
            "Linear scaling was given this rank's rows. The global batch is that of all ranks "
            "together: len(inputs).",
            ("base_batch, len(inputs), warmup_steps)", "base_batch, len(x), warmup_steps)"),
        ),
        wrong(
            "local loss",
            "返回的是本 rank 的损失，各 rank 不同：先 all_reduce，再除以 world_size。",
            "The returned losses are this rank's own and differ from rank to rank: all_reduce "
            "them and divide by the world size.",
            ("        dist.all_reduce(loss)\n        losses.append(loss.item() / world_size)",
             "        losses.append(loss.item())"),
        ),
    ), seconds=20.0),
)  # fmt: skip
