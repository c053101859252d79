"""第 3 组（上）：张量并行 | Set 3, first part: tensor parallel

把一层的矩阵切到各个 rank 上：每个 rank 拿到同样的输入，各算一部分。rank 的个数是 n =
dist.get_world_size()，要切的维度都能被 n 整除。两条规则贯穿这一组：前向在哪里求和，反向就在哪
里原样通过；反过来也一样。
先运行 minidist start-exercises my-exercises，在那个文件夹里写。
检查：minidist check 3.1 --src my-exercises（全组：check 3）。

The matrix of one layer is cut over the ranks: all get the same input, and each computes a part. The
number of ranks is n = dist.get_world_size(), and what is cut is a multiple of n. One rule runs
through this set: where forward sums over the ranks, backward passes through; and the other way
round.
Run minidist start-exercises my-exercises first, and write in that folder.
To check: minidist check 3.1 --src my-exercises (the set: check 3).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class CopyToRanks(torch.autograd.Function):
    """3.1 一对共轭的操作 f 与 g | The conjugate pair f and g (15 min)

    Megatron 的 f 和 g，写成两个 autograd.Function：
    - CopyToRanks（f）：前向原样返回 x；反向对梯度做 all-reduce（求和）。用在切开的层的输入上：
      每个 rank 只算出输入梯度的一部分，要加起来。
    - SumOverRanks（g）：前向对 x 做 all-reduce（求和）；反向原样返回梯度。用在部分和上。
      all_reduce 是就地修改的，不能改到传进来的张量：先 clone。
    提示：forward 和 backward 都有 ctx
      这个参数，这里不需要存任何东西。

    Megatron's f and g, as two autograd.Functions:
    - CopyToRanks (f): forward returns x as it is; backward all-reduces (sums) the gradient. It goes
      before a layer that is cut: each rank computes only a part of the gradient of the input, and
      the parts have to be added.
    - SumOverRanks (g): forward all-reduces (sums) x; backward returns the gradient as it is. It
      goes after partial sums. all_reduce works in place and must not change the tensor that came
      in: clone first.
    Hint: both forward and backward take ctx; nothing needs to be saved here.
    """

    @staticmethod
    def forward(ctx, x):
        # TODO 3.1: 在这里写你的代码 | your code here
        raise NotImplementedError("3.1 还没有写 | not written yet")

    @staticmethod
    def backward(ctx, grad):
        # TODO 3.1: 在这里写你的代码 | your code here
        raise NotImplementedError("3.1 还没有写 | not written yet")


class SumOverRanks(torch.autograd.Function):
    """3.1 的 g，见上 | g of 3.1, see above."""

    @staticmethod
    def forward(ctx, x):
        # TODO 3.1: 在这里写你的代码 | your code here
        raise NotImplementedError("3.1 还没有写 | not written yet")

    @staticmethod
    def backward(ctx, grad):
        # TODO 3.1: 在这里写你的代码 | your code here
        raise NotImplementedError("3.1 还没有写 | not written yet")


def f(x):
    """CopyToRanks（已写好） | (given)."""
    return CopyToRanks.apply(x)


def g(x):
    """SumOverRanks（已写好） | (given)."""
    return SumOverRanks.apply(x)


class ColumnLinear(nn.Module):
    """3.2 列并行 | Column parallel (10 min)

    把一个完整的 nn.Linear（full，每个 rank 上都一样）按输出特征切开：y = x Wᵀ + b 中，rank r
    只算第 r 份输出。__init__ 设置 self.weight 和 self.bias，都是 nn.Parameter：形状 [out/n,
    in] 和 [out/n]。forward：完整的 x [..., in] -> 自己的那份输出 [..., out/n]。反向之后 x.grad
    必须是完整的。
    提示：torch 的 weight 是 [out, in]，所以“列并行”切的是它的第 0 维；用到 f。

    Cut a whole nn.Linear (full, the same on every rank) by output features: of y = x Wᵀ + b, rank r
    computes only the r-th share. __init__ sets self.weight and self.bias, both nn.Parameter, of
    shapes [out/n, in] and [out/n]. forward: the whole x [..., in] -> your share of the output
    [..., out/n]. After backward, x.grad has to be complete.
    Hint: torch's weight is [out, in], so
    "column parallel" cuts its dimension 0; you need f.
    """

    def __init__(self, full):
        super().__init__()
        # TODO 3.2: 在这里写你的代码 | your code here
        raise NotImplementedError("3.2 还没有写 | not written yet")

    def forward(self, x):
        # TODO 3.2: 在这里写你的代码 | your code here
        raise NotImplementedError("3.2 还没有写 | not written yet")


class RowLinear(nn.Module):
    """3.3 行并行 | Row parallel (10 min)

    按输入特征切开：rank r 拿到输入的第 r 份 [..., in/n]，用 weight 的第 r 份列（形状 [out,
    in/n]）算出一个完整大小的部分和；各 rank 的部分和加起来才是输出 [..., out]，每个 rank 一样。
    self.bias 是完整的 [out]，只能加一次。反向时，每个 rank 得到自己那份输入的梯度。
    提示：用到 g。

    Cut by input features: rank r gets the r-th share of the input [..., in/n] and multiplies with
    its share of the columns of weight (shape [out, in/n]), which gives a partial sum of full size;
    the sum of these over the ranks is the output [..., out], the same on every rank. self.bias is
    whole, [out], and may be added only once. In backward every rank gets the gradient of its own
    share of the input.
    Hint: you need g.
    """

    def __init__(self, full):
        super().__init__()
        # TODO 3.3: 在这里写你的代码 | your code here
        raise NotImplementedError("3.3 还没有写 | not written yet")

    def forward(self, x):
        # TODO 3.3: 在这里写你的代码 | your code here
        raise NotImplementedError("3.3 还没有写 | not written yet")


class ParallelMLP(nn.Module):
    """3.4 Megatron 的 MLP | Megatron's MLP (10 min)

    full 是 GPT 的 MLP：full.down(F.gelu(full.up(x)))，up 和 down 是 nn.Linear，x 是 [...,
    width]。用 3.2 和 3.3 切开它，使输出和梯度都和完整的一样，而前向只有一次 all-reduce，反向也
    只有一次。
    提示：GELU 不是线性的，不能作用在部分和上；想想哪一层按列切、哪一层按行切，中间才不需要通信。

    full is the MLP of the GPT: full.down(F.gelu(full.up(x))), where up and down are nn.Linear and x
    is [..., width]. Cut it with 3.2 and 3.3 so that output and gradients equal those of the whole
    one, with a single all-reduce in forward and a single one in backward.
    Hint: GELU is not linear
    and cannot be applied to partial sums; which layer has to be cut by columns, and which by rows,
    so that nothing is communicated in between?
    """

    def __init__(self, full):
        super().__init__()
        # TODO 3.4: 在这里写你的代码 | your code here
        raise NotImplementedError("3.4 还没有写 | not written yet")

    def forward(self, x):
        # TODO 3.4: 在这里写你的代码 | your code here
        raise NotImplementedError("3.4 还没有写 | not written yet")


class ParallelAttention(nn.Module):
    """3.5 Megatron 的注意力 | Megatron's attention (30 min)

    full 是 GPT 的 Attention：full.qkv 是 nn.Linear(width, 3 * width)，它的输出特征按 [3,
    heads, head_dim] 排列（先是所有头的 q，再是 k，再是 v）；full.proj 是 nn.Linear(width,
    width)；full.head_dim 是每个头的宽度。每个 rank 负责 heads / n 个完整的头。__init__ 里要把
    qkv 切成自己的头，proj 用 RowLinear；forward 的注意力部分已写好。
    提示：不能直接把 3 * width 行平均切成 n 份：那样 rank 0 会拿到所有的 q。

    full is the Attention of the GPT: full.qkv is nn.Linear(width, 3 * width), its output features
    are laid out [3, heads, head_dim] (q of all heads, then k, then v); full.proj is
    nn.Linear(width, width); full.head_dim is the width of a head. Each rank is responsible for
    heads / n whole heads. In __init__, cut qkv to your own heads, and use RowLinear for proj; the
    attention itself in forward is given.
    Hint: you cannot simply cut the 3 * width rows into n
    equal runs: rank 0 would get all of q.
    """

    def __init__(self, full):
        super().__init__()
        self.head_dim = full.head_dim
        # TODO 3.5: 在这里写你的代码 | your code here
        raise NotImplementedError("3.5 还没有写 | not written yet")

    def own_qkv(self, x):
        """x [batch, seq, width] -> 自己的头的 q、k、v | of your heads, [batch, seq, 3*width/n]."""
        # TODO 3.5: 在这里写你的代码 | your code here
        raise NotImplementedError("3.5 还没有写 | not written yet")

    def forward(self, x):
        qkv = self.own_qkv(x)
        batch, seq, features = qkv.shape
        heads = features // (3 * self.head_dim)
        q, k, v = qkv.view(batch, seq, 3, heads, self.head_dim).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).reshape(batch, seq, heads * self.head_dim))


def vocab_cross_entropy(logits, targets):
    """3.6 词表切开的交叉熵 | Cross-entropy over a cut vocabulary (40 min)

    logits：[tokens, vocab/n]，rank r 拿着第 r 份类别（从 r * vocab/n 开始）；targets：int64
    [tokens]，是全局的类别编号，每个 rank 一样。返回平均交叉熵（0 维），等于 F.cross_entropy(完
    整的 logits, targets)，可以反向传播。不许收集完整的 logits，每个 token 只通信几个数。要数值
    稳定：logits 可能有几百那么大，先减去每一行的最大值，而这个最大值是所有 rank 上的。
    提示：损失 = log(Σ exp(z)) - z[target]，两项都用 g 求和；不拥有 target 的 rank 贡献 0。

    logits: [tokens, vocab/n]; rank r holds the r-th share of the classes (from r * vocab/n on).
    targets: int64 [tokens], global class numbers, the same on every rank. Return the mean
    cross-entropy (0-d), equal to F.cross_entropy(whole logits, targets), through which backward
    works. The whole logits must not be gathered: a few numbers per token are enough. It has to be
    stable: logits may be several hundred, so subtract each row's maximum first, and that is the
    maximum over all ranks.
    Hint: loss = log(Σ exp(z)) - z[target]; sum both terms with g; ranks
    that do not own the target contribute 0.
    """
    # TODO 3.6: 在这里写你的代码 | your code here
    raise NotImplementedError("3.6 还没有写 | not written yet")


def tensor_parallel(model):
    """3.7 切开 GPT | Cut the GPT (10 min)

    就地切开 GPT：把每个 block（model.blocks）的 block.attention 和 block.mlp 换成 3.5 和 3.4
    的版本；输出层 model.head.lm（nn.Linear，没有 bias）按类别切：把它的 weight 换成自己的那份
    行 [vocab/n, width]，返回值就是切开的 logits，再用 vocab_cross_entropy 算损失。进入 head.lm
    的激活值前面要有 f：已经替你用 hook 做了（见下）。检查时用它训练一个小 GPT，损失要和完整的
    模型一样。没有返回值。
    提示：其余的层（embedding、norm）每个 rank 都保留完整的一份，只要 f 和 g 放对了，它们的梯度
    在各 rank 上就相同。

    Cut the GPT in place: replace block.attention and block.mlp of every block (model.blocks) by
    those of 3.5 and 3.4. The output layer model.head.lm (nn.Linear without bias) is cut by classes:
    replace its weight by your share of the rows, [vocab/n, width]; the model then returns cut
    logits, and vocab_cross_entropy gives the loss. The activation that enters head.lm needs an f
    before it: that is done for you with a hook (below). The check trains a small GPT with it, to
    the losses of the whole model. Nothing is returned.
    Hint: the other layers (embedding, norms)
    stay whole on every rank; if f and g are in place their gradients agree.
    """
    model.head.lm.register_forward_pre_hook(lambda _, inputs: (f(inputs[0]),))
    # TODO 3.7: 在这里写你的代码 | your code here
    raise NotImplementedError("3.7 还没有写 | not written yet")
