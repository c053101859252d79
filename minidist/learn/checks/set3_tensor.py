"""Set 3, tensor parallel: the classic wrong answers. `run3_tensor.py` runs them."""

from __future__ import annotations

from minidist.learn.checks import Exercise, wrong

_REDUCED = "total = grad.contiguous().clone()\n        dist.all_reduce(total)\n        return total"
_ROW = "        return g(F.linear(x, self.weight)) + self.bias"

EXERCISES = (
    Exercise("3.1", "conjugate_pair", (
        wrong(
            "f without sum",
            "f 的反向没有求和：每个 rank 只有输入梯度的一部分，要在反向里 all-reduce。",
            "f does not sum in backward: each rank has only a part of the gradient of the input;"
            " all-reduce it there.",
            (_REDUCED, "return grad"),
        ),
        wrong(
            "g sums twice",
            "g 的反向也求和了：各 rank 的输出是同一个张量，梯度也相同，再求和就大了 n 倍。反向"
            "应原样返回。",
            "g sums in backward as well: the ranks' outputs are one and the same, with equal "
            "gradients, and summing makes them n times too large. Pass the gradient through.",
            ("        return grad\n", "        total = grad.contiguous().clone()\n        dist.all_reduce(total)\n        return total\n"),
        ),
        wrong(
            "exchanged",
            "f 和 g 反了：f 前向不通信、反向求和；g 前向求和、反向不通信。",
            "f and g are exchanged: f does nothing forward and sums backward; g sums forward "
            "and does nothing backward.",
            ("        total = x.contiguous().clone()\n        dist.all_reduce(total)\n        return total\n", "        return x.view_as(x) \n"),
            ("        return x.view_as(x)\n", "        total = x.contiguous().clone()\n        dist.all_reduce(total)\n        return total\n"),
            (_REDUCED, "return grad "),
            ("        return grad\n", "        total = grad.contiguous().clone()\n        dist.all_reduce(total)\n        return total\n"),
        ),
        wrong(
            "in place",
            "输入被改掉了：all_reduce 就地修改，之前要先 clone。",
            "The input was changed: all_reduce works in place, so clone first.",
            ("        total = x.contiguous().clone()\n        dist.all_reduce(total)\n        return total\n", "        total = x.detach()\n        dist.all_reduce(total)\n        return total.clone()\n"),
        ),
        wrong(
            "mean",
            "你求的是平均：部分和要相加，不能除以 n。",
            "You took the mean: partial sums are added, not divided by n.",
            ("        total = x.contiguous().clone()\n        dist.all_reduce(total)\n", "        total = x.contiguous().clone()\n        dist.all_reduce(total)\n        total /= dist.get_world_size()\n"),
        ),
        wrong(
            "no gradient",
            "g 的反向什么也没返回，梯度到这里就断了：返回 grad 本身。",
            "g returns nothing in backward, and the gradient ends here: return grad itself.",
            ("        return grad\n", "        return torch.zeros_like(grad)\n"),
        ),
    )),
    Exercise("3.2", "column", (
        wrong(
            "cut by input",
            "切错了维度：torch 的 weight 是 [out, in]，列并行切的是输出特征，即第 0 维。",
            "The wrong dimension: torch's weight is [out, in], and column parallel cuts output "
            "features, which is dimension 0.",
            ("chunk(n, 0)[rank]", "chunk(n, 1)[rank]"),
            story="shapes cannot be multiplied",
        ),
        wrong(
            "no f",
            "输出对了，但 x.grad 只是一部分：每个 rank 只算了自己那份输出带来的梯度。输入前面要"
            "有 f。",
            "The output is right, but x.grad is partial: each rank has only what comes from its "
            "own share of the output. Put f before the input.",
            ("F.linear(f(x), self.weight", "F.linear(x, self.weight"),
        ),
        wrong(
            "same part everywhere",
            "每个 rank 都拿了第 0 份：下标要用自己的 rank。",
            "Every rank took share 0: use your rank as the index.",
            ("chunk(n, 0)[rank]", "chunk(n, 0)[0]"), (".chunk(n)[rank].clone())", ".chunk(n)[0].clone())"),
        ),
        wrong(
            "bias not cut",
            "偏置没有切：输出只有 out/n 个特征，bias 也要取自己的那份。",
            "The bias is whole, but the output has out/n features: take your share of it.",
            ("full.bias.detach().chunk(n)[rank].clone()", "full.bias.detach().clone()"),
            story="expanded size of the tensor",
        ),
        wrong(
            "bias of rank 0",
            "weight 对了，但 bias 取的是第 0 份：也要用自己的 rank。",
            "The weight is right, but the bias is share 0: it needs your rank too.",
            (".chunk(n)[rank].clone())", ".chunk(n)[0].clone())"),
        ),
        wrong(
            "summed",
            "输出又做了 all-reduce：各 rank 的输出是不同的特征，不是部分和，不能相加。",
            "The output was all-reduced: the ranks hold different features, not partial sums, "
            "and must not be added.",
            ("        return F.linear(f(x), self.weight, self.bias)", "        return g(F.linear(f(x), self.weight, self.bias))"),
        ),
    )),
    Exercise("3.3", "row", (
        wrong(
            "bias added n times",
            "偏置加了 n 次：每个 rank 都在求和之前加了一遍。要在 g 之后加。",
            "The bias was added n times: every rank added it before the sum. Add it after g.",
            (_ROW, "        return g(F.linear(x, self.weight, self.bias))"),
        ),
        wrong(
            "bias divided",
            "输出碰巧是对的，但 bias 的梯度不对：每个 rank 在求和之前加了 bias/n。要在求和之后"
            "加一次完整的。",
            "The output happens to be right, but the gradient of the bias is not: every rank "
            "added bias/n before the sum. Add it once, whole, afterwards.",
            (_ROW, "        return g(F.linear(x, self.weight, self.bias / dist.get_world_size()))"),
        ),
        wrong(
            "not summed",
            "这只是部分和：各 rank 的结果要用 g 加起来。",
            "This is only a partial sum: add the ranks' results with g.",
            ("g(F.linear(x, self.weight))", "F.linear(x, self.weight)"),
        ),
        wrong(
            "no gradient",
            "输出对了，但梯度断了：dist.all_reduce 不会被 autograd 记录。要用 g（SumOverRanks）。",
            "The output is right, but the gradient is lost: autograd knows nothing of "
            "dist.all_reduce. Use g (SumOverRanks).",
            (_ROW, "        total = F.linear(x, self.weight).detach()\n        dist.all_reduce(total)\n        return total + self.bias + 0 * F.linear(x, self.weight)"),
        ),
        wrong(
            "gradient n times",
            "输入的梯度大了 n 倍：输入前面不要再用 f，行并行的反向不需要通信。",
            "The gradient of the input is n times too large: no f before the input, row "
            "parallel communicates nothing in backward.",
            ("g(F.linear(x, self.weight))", "f(g(F.linear(x, self.weight)))"),
        ),
        wrong(
            "cut by output",
            "切错了维度：行并行切的是输入特征，即 weight [out, in] 的第 1 维。",
            "The wrong dimension: row parallel cuts input features, dimension 1 of weight [out, "
            "in].",
            ("chunk(n, 1)[rank]", "chunk(n, 0)[rank]"),
            story="shapes cannot be multiplied",
        ),
    )),
    Exercise("3.4", "mlp", (
        wrong(
            "GELU on partial sums",
            "GELU 作用在部分和上了：它不是线性的，gelu(a) + gelu(b) ≠ gelu(a + b)。第一层按列切，"
            "中间就不需要求和。",
            "GELU was applied to partial sums: it is not linear, gelu(a) + gelu(b) is not "
            "gelu(a + b). Cut the first layer by columns, and nothing has to be summed in the "
            "middle.",
            ("        self.up = ColumnLinear(full.up)\n        self.down = RowLinear(full.down)\n",
             "        rank, n = dist.get_rank(), dist.get_world_size()\n        self.w = full.up.weight.detach().chunk(n, 1)[rank]\n        self.up, self.down = full.up, full.down\n"),
            ("        return self.down(F.gelu(self.up(x)))", "        rank, n = dist.get_rank(), dist.get_world_size()\n        part = F.gelu(F.linear(x.chunk(n, -1)[rank], self.w) + self.up.bias / n)\n        return self.down(g(part))"),
        ),
        wrong(
            "one all-reduce too many",
            "结果对，但通信多了：中间又求和了一次（而且每个 rank 存着完整的中间层）。列切之后直"
            "接接行切。",
            "The result is right, but something more is communicated in the middle. After the "
            "column cut the row cut follows directly.",
            ("        return self.down(F.gelu(self.up(x)))", "        y = self.down(F.gelu(self.up(x)))\n        dist.all_reduce(y.detach().clone())\n        return y"),
        ),
        wrong(
            "not cut",
            "结果对，但什么也没有切：每个 rank 都存着、算着完整的 MLP。",
            "The result is right, but nothing is cut: every rank holds and computes the whole MLP.",
            ("        self.up = ColumnLinear(full.up)\n        self.down = RowLinear(full.down)\n", "        self.up, self.down = full.up, full.down\n"),
        ),
        wrong(
            "no activation",
            "漏了 GELU。",
            "GELU is missing.",
            ("self.down(F.gelu(self.up(x)))", "self.down(self.up(x))"),
        ),
        wrong(
            "another activation",
            "用的是 ReLU；GPT 这里是 GELU。",
            "That is ReLU; the GPT has GELU here.",
            ("F.gelu", "F.relu"),
        ),
    )),
    Exercise("3.5", "attention", (
        wrong(
            "plain cut of qkv",
            "qkv 的行被直接平均切开了：3 * width 行按 [3, heads, head_dim] 排列，rank 0 拿到的"
            "是所有的 q 和一半的 k，不是自己的头的 q、k、v。先 view(3, n, -1, width)，再取 [:, "
            "rank]。",
            "The rows of qkv were cut into equal runs: they are laid out [3, heads, head_dim], "
            "so rank 0 gets all of q and half of k instead of q, k and v of its heads. First "
            "view(3, n, -1, width), then take [:, rank].",
            ("view(3, n, -1, width)[:, rank].reshape(-1, width)", "chunk(n, 0)[rank]"),
            ("view(3, n, -1)[:, rank].flatten().clone()", "chunk(n)[rank].clone()"),
        ),
        wrong(
            "heads of rank 0",
            "每个 rank 都算了同样的头：下标要用自己的 rank。",
            "Every rank computed the same heads: use your rank as the index.",
            ("[:, rank].reshape", "[:, 0].reshape"), ("[:, rank].flatten", "[:, 0].flatten"),
        ),
        wrong(
            "bias cut plainly",
            "weight 对了，但 bias 是直接平均切的：它也按 [3, heads, head_dim] 排列。",
            "The weight is right, but the bias was cut into equal runs: it is laid out [3, "
            "heads, head_dim] as well.",
            ("view(3, n, -1)[:, rank].flatten().clone()", "chunk(n)[rank].clone()"),
        ),
        wrong(
            "no f",
            "输出对了，但输入的梯度只是一部分：qkv 的输入前面要有 f。",
            "The output is right, but the gradient of the input is partial: put f before the "
            "input of qkv.",
            ("F.linear(f(x), self.weight", "F.linear(x, self.weight"),
        ),
        wrong(
            "interleaved heads",
            "你取的是第 rank, rank + n, … 个头；proj 按连续的行切，所以要连续的头：view(3, n, "
            "-1, width)。",
            "You took heads rank, rank + n, ...; proj is cut by contiguous rows, so the heads "
            "have to be contiguous: view(3, n, -1, width).",
            ("view(3, n, -1, width)[:, rank].reshape(-1, width)", "view(3, -1, n, full.head_dim, width)[:, :, rank].reshape(-1, width)"),
            ("view(3, n, -1)[:, rank].flatten().clone()", "view(3, -1, n, full.head_dim)[:, :, rank].flatten().clone()"),
        ),
    )),
    Exercise("3.6", "vocab_cross_entropy", (
        wrong(
            "local softmax",
            "分母只是本 rank 的类别之和：Σ exp 要用 g 在所有 rank 上求和。",
            "The denominator covers this rank's classes only: sum Σ exp over all ranks with g.",
            ("g(z.exp().sum(1))", "z.exp().sum(1)"),
        ),
        wrong(
            "overflow",
            "logits 大的时候 exp 溢出了：先减去每一行的最大值。",
            "With large logits exp overflows: subtract each row's maximum first.",
            ("z = logits - top[:, None]", "z = logits"),
        ),
        wrong(
            "local maximum",
            "每个 rank 减的是自己的最大值，减的数不同，各 rank 的 exp 就不能相加：最大值也要 "
            "all-reduce（MAX）。",
            "Each rank subtracted its own maximum, and exps that are shifted differently cannot "
            "be added: all-reduce the maximum too (MAX).",
            ("    dist.all_reduce(top, op=dist.ReduceOp.MAX)\n", ""),
        ),
        wrong(
            "not masked",
            "不拥有 target 的 rank 也贡献了某个类别的 logit：要乘上 mine，让它贡献 0。",
            "Ranks that do not own the target contributed some other class's logit: multiply by "
            "mine, so that they contribute 0.",
            ("[:, None])[:, 0] * mine)", "[:, None])[:, 0])"),
        ),
        wrong(
            "target not summed",
            "target 的 logit 没有用 g 求和：只有拥有它的 rank 才有这一项，别的 rank 上是 0。",
            "The target's logit was not summed with g: only the rank that owns it has it, the "
            "others have 0.",
            ("hit = g(z.gather(1, local.clamp(0, size - 1)[:, None])[:, 0] * mine)", "hit = z.gather(1, local.clamp(0, size - 1)[:, None])[:, 0] * mine"),
        ),
        wrong(
            "sum over tokens",
            "你求的是所有 token 的和；要的是平均。",
            "You summed over the tokens; the mean is asked for.",
            ("(total.log() - hit).mean()", "(total.log() - hit).sum()"),
        ),
        wrong(
            "local class numbers",
            "targets 是全局的类别编号：rank r 的第 0 列是第 r * vocab/n 类，要先减去它。",
            "targets are global class numbers: column 0 of rank r is class r * vocab/n, so "
            "subtract that first.",
            ("targets - dist.get_rank() * size", "targets"),
        ),
    )),
    Exercise("3.7", "tensor_parallel", (
        wrong(
            "only the MLP",
            "损失对，但注意力没有切：每个 rank 的参数还太多。block.attention 也要换。",
            "The losses are right, but attention is not cut, and each rank holds too many "
            "parameters: replace block.attention as well.",
            ("        block.attention = ParallelAttention(block.attention)\n", ""),
        ),
        wrong(
            "only attention",
            "损失对，但 MLP 没有切：它占每层参数的三分之二。block.mlp 也要换。",
            "The losses are right, but the MLP is not cut, and it holds two thirds of a block: "
            "replace block.mlp as well.",
            ("        block.mlp = ParallelMLP(block.mlp)\n", ""),
        ),
        wrong(
            "output layer whole",
            "输出层没有切：每个 rank 算出了所有类别，而 vocab_cross_entropy 以为这只是自己的那份。",
            "The output layer is not cut: every rank computes all classes, while "
            "vocab_cross_entropy takes them for its own share.",
            ("    lm.weight = nn.Parameter(lm.weight.detach().chunk(n, 0)[rank].clone())\n", ""),
        ),
        wrong(
            "same classes",
            "每个 rank 都拿了第 0 份类别：下标要用自己的 rank。",
            "Every rank took share 0 of the classes: use your rank as the index.",
            ("chunk(n, 0)[rank]", "chunk(n, 0)[0]"),
        ),
        wrong(
            "first block only",
            "只切了第一个 block。",
            "Only the first block was cut.",
            ("    for block in model.blocks:\n", "    for block in model.blocks[:1]:\n"),
        ),
    ), seconds=20.0),
)  # fmt: skip
