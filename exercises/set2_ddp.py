"""第 2 组：数据并行（DDP） | Set 2: data parallel (DDP)

每个 rank 都有一份完整的模型和自己的那份数据。每个函数都会在所有 rank 上同时被调用，进程组已经建好：
dist.get_rank()、dist.get_world_size()，以及 dist.all_reduce(t)（就地求和）、dist.broadcast(t, 0)。
先复制一份到自己的文件夹，在那里写：
    minidist start-exercises my-exercises
    minidist check 2.1 --src my-exercises           一道题；check 2 是全组
    minidist check 2.1 --hint                       第二个提示

Every rank has the whole model and its own share of the data. Each function is called on all ranks
at the same time, and the process group is there: dist.get_rank(), dist.get_world_size(),
dist.all_reduce(t) (sums in place), dist.broadcast(t, 0).
Make a copy in a folder of your own, and write there:
    minidist start-exercises my-exercises
    minidist check 2.1 --src my-exercises           one exercise; check 2 is the set
    minidist check 2.1 --hint                       a second hint
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn


def average_gradients(model):
    """2.1 平均梯度 | Average the gradients (5 min)

    每个 rank 已经用自己的数据做完了 backward()，所以每个参数的 .grad 各不相同。请把每个 .grad 换成
    它在所有 rank 上的平均值。有的参数没有参与计算，.grad 是 None，跳过它（它在每个 rank 上都是
    None）。不需要返回值。检查时有 2 个 rank。
    提示：dist.all_reduce(t) 求的是和，就地修改 t。

    Every rank has run backward() on its own data, so each parameter's .grad differs from rank to
    rank. Replace every .grad by its mean over all ranks. A parameter that took no part has .grad
    None (on every rank): skip it. Nothing is returned. The check has 2 ranks.
    Hint: dist.all_reduce(t) sums, and changes t in place.
    """
    # TODO 2.1: 在这里写你的代码 | your code here
    raise NotImplementedError("2.1 还没有写 | not written yet")


def average_flat(model):
    """2.2 展平：一次通信 | Flatten: one message (15 min)

    和 2.1 的结果一样，但整个模型只调用一次 all_reduce：把所有梯度首尾相接拼成一个一维张量（flat），
    做一次 all_reduce，求平均，再按原来的顺序和形状拷回各个 .grad。.grad 为 None 的参数仍然跳过（它
    可以在中间）。形状：flat 是 [所有梯度的元素总数]。
    提示：每次通信都有固定的延迟，几百个小张量就要付几百次。

    The same result as 2.1, but with a single all_reduce for the whole model: put all gradients end
    to end into one 1-D tensor (flat), all-reduce it once, take the mean, and copy the parts back
    into each .grad, in the same order and with the old shapes. Parameters whose .grad is None are
    skipped (there may be one in the middle). Shape: flat is [number of elements of all gradients].
    Hint: every message costs a fixed latency, and hundreds of small tensors pay it hundreds of
    times.
    """
    # TODO 2.2: 在这里写你的代码 | your code here
    raise NotImplementedError("2.2 还没有写 | not written yet")


def make_buckets(parameters, cap_bytes):
    """2.3 分桶 | Make buckets (10 min)

    parameters：参数的列表，按前向的顺序，至少一个。返回桶的列表，每个桶是参数的列表。规则：从最后一
    个参数开始，倒着往前走；一个参数放进当前的桶，除非桶里已经有参数，并且放进去以后会超过 cap_bytes
    字节，那就先关上这个桶、另开一个。比 cap_bytes 还大的参数独占一个桶。每个参数恰好出现一次。（第
    2 章的 fill_buckets 不同：它装到或超过上限以后才关桶。）
    提示：字节数是 `p.numel() * p.element_size()`。为什么倒着走：反向传播最先算出的是最后一层的梯
    度。

    parameters: a list of at least one, in the order of the forward pass. Return a list of buckets,
    each a list of parameters. The rule: start at the last parameter and walk backwards; a parameter
    goes into the current bucket, unless that bucket already holds something and would then exceed
    cap_bytes bytes: in that case close it and open a new one. A parameter larger than cap_bytes has
    a bucket to itself. Every parameter appears exactly once. (fill_buckets in chapter 2 is
    different: it closes a bucket once it has reached the cap or passed it.)
    Hint: the bytes are `p.numel() * p.element_size()`. Why backwards: backward computes the last
    layer's gradients first.
    """
    # TODO 2.3: 在这里写你的代码 | your code here
    raise NotImplementedError("2.3 还没有写 | not written yet")


class MiniDDP(nn.Module):
    """2.4 边算边发 | Overlap with backward (45 min)

    一个小 DDP。用法：`loss_fn(ddp(x), y).backward()`，然后 `ddp.finish()`，这时每个 .grad 都是平均
    值。已经写好的：__init__ 把 rank 0 的权重发给大家，用你的 make_buckets 分桶，并给每个参数装上一
    个钩子：它的梯度一写进 p.grad，就会调用 self._ready(p)。请写两个方法：
    - _ready(p)：记下 p 就绪了。一个桶里的参数都就绪了，就用 self._launch(i) 把它发出去，不等结果。
      桶必须严格按 0, 1, 2, ... 的顺序发，轮到它就尽早发：先满的桶要等前面的桶，前面的一发出，后面已
      经满了的就跟着发出。使用各层的顺序可以与定义的顺序不同。self.sync 为 False 时什么都不做。
    - finish()：把还没发的桶也按顺序发出去（有的参数这一步没有参与计算，它的桶永远不会满）；再等待每
      一个通信、求平均、写回 .grad（原来没有 .grad 的参数也会得到平均值）；最后为下一步清空
      self.ready 和 self.launched。
    提示：_launch(i) 已经写好，它返回 (work, flat)；work.wait() 之前不能读 flat。

    A small DDP. Use: `loss_fn(ddp(x), y).backward()`, then `ddp.finish()`; now every .grad is the
    mean. Already there: __init__ gives rank 0's weights to everybody, cuts buckets with your
    make_buckets, and installs a hook on every parameter: as soon as its gradient is in p.grad,
    self._ready(p) is called. Write two methods:
    - _ready(p): note that p is ready. When all parameters of a bucket are ready, start its
      all-reduce with self._launch(i), without waiting. Buckets must be launched strictly in the
      order 0, 1, 2, ..., and each as soon as it is its turn: one that is full early waits for those
      before it, and follows as soon as they are out. Layers may be used in another order than they
      are defined. When self.sync is False, do nothing.
    - finish(): launch the remaining buckets too, in order (the bucket of a parameter that took no
      part in this step never fills); then wait for each, take the mean, and write it back into
      .grad (parameters without one get one as well); finally clear self.ready and self.launched for
      the next step.
    Hint: _launch(i) is written, it returns (work, flat); flat must not be read before work.wait().
    """

    def __init__(self, module, cap_bytes=1024):
        super().__init__()
        self.module = module
        self.sync = True
        for t in [*module.parameters(), *module.buffers()]:
            dist.broadcast(t.detach(), 0)
        self.buckets = make_buckets([p for p in module.parameters() if p.requires_grad], cap_bytes)
        self.ready = set()  # parameters whose gradient is there
        self.launched = []  # (work, flat) of buckets 0, 1, ... so far
        for bucket in self.buckets:
            for p in bucket:
                p.register_post_accumulate_grad_hook(self._ready)

    def forward(self, *inputs):
        return self.module(*inputs)

    def _launch(self, i):
        """开始第 i 个桶的 all-reduce | Start the all-reduce of bucket i."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.buckets[i]]
        flat = torch.cat([g.flatten() for g in grads])
        return dist.all_reduce(flat, async_op=True), flat

    def _ready(self, p):
        # TODO 2.4: 在这里写你的代码 | your code here
        raise NotImplementedError("2.4 还没有写 | not written yet")

    def finish(self):
        # TODO 2.4: 在这里写你的代码 | your code here
        raise NotImplementedError("2.4 还没有写 | not written yet")

    @contextmanager
    def no_sync(self):
        """这个块里的反向不通信 | No communication for a backward in this block."""
        self.sync = False
        try:
            yield
        finally:
            self.sync = True


def accumulate(ddp, microbatches, loss_fn):
    """2.5 梯度累积：no_sync | Accumulate gradients: no_sync (15 min)

    用 2.4 的 MiniDDP 做一步，它的数据分成几个微批次：microbatches 是 (x, y) 的列表，每个大小相同，
    损失是 `loss_fn(ddp(x), y)`。结束时每个 .grad 要等于“整个 batch 一次算完”的平均梯度，而且只通信
    一轮：只有最后一个微批次的反向触发通信，并且与这次反向重叠。返回整个 batch 的损失：一个 0 维张量
    （不是 float），没有计算图，只看本 rank 的数据。
    提示：backward 会把梯度累加到 .grad 上；loss_fn 求的是平均，所以几个微批次的和还要再除以它们的个
    数。

    Do one step with the MiniDDP of 2.4 on data that comes as several micro-batches: a list of (x,
    y) of equal sizes, with `loss_fn(ddp(x), y)` as the loss. At the end every .grad must be the
    mean gradient of the whole batch, as if computed in one go, and there must be one round of
    communication only: the backward of the last micro-batch starts it, and overlaps with it. Return
    the loss of the whole batch: a 0-d tensor (no float) without a graph, of this rank's data only.
    Hint: backward adds to .grad; loss_fn takes a mean, so the sum over micro-batches has to be
    divided by how many there are.
    """
    # TODO 2.5: 在这里写你的代码 | your code here
    raise NotImplementedError("2.5 还没有写 | not written yet")


def sampler_indices(items, rank, world_size, epoch, seed=0):
    """2.6 分数据：DistributedSampler | Share the data: DistributedSampler (15 min)

    返回这个 rank 在这一轮（epoch）要看的下标（int 的列表）和一个同样长的 bool 列表 is_padding。规
    则：先把 0, …, items-1 打乱：`g = torch.Generator().manual_seed(seed + epoch)`，再
    `torch.randperm(items, generator=g)`，所有 rank 得到同样的顺序；如果个数不是 world_size 的倍数，
    就把顺序开头的几个再接到末尾，补到刚好是倍数；rank r 取第 `r`、`r + world_size`、
    `r + 2*world_size`…… 个。补出来的那些 is_padding 为 True。items 可能比 world_size 还少（这时开头
    要重复不止一遍）。
    提示：每个 rank 的个数必须相同，否则多出一步的那个 rank 会在 all_reduce 里永远等下去。

    Return this rank's indices for this epoch (a list of int) and a list of bool, is_padding, of the
    same length. The rule: shuffle 0, ..., items-1 with
    `g = torch.Generator().manual_seed(seed + epoch)` and `torch.randperm(items, generator=g)`, the
    same order on every rank; if the number is not a multiple of world_size, append items from the
    front of the order until it is; rank r takes positions `r`, `r + world_size`,
    `r + 2*world_size`, ... is_padding is True for what was appended. There may be fewer items than
    ranks (the front is then repeated more than once).
    Hint: every rank needs the same number, or a rank with one step more waits in all_reduce for
    ever.
    """
    # TODO 2.6: 在这里写你的代码 | your code here
    raise NotImplementedError("2.6 还没有写 | not written yet")


def global_mean(values, is_padding):
    """2.7 评估时别把补出来的样本算两遍 | Do not count padding twice (10 min)

    values：一维张量，本 rank 每个样本的损失；is_padding：同样长的 bool 列表，True 是 2.6 补出来的重
    复样本。返回所有 rank 的真实样本的平均损失（0 维张量），每个 rank 得到同一个值。有的 rank 可能一
    个真实样本也没有。
    提示：先各自求平均、再对平均值求平均，只有大家的个数一样时才对。

    values: a 1-D tensor, the loss of each of this rank's samples; is_padding: a list of bool of the
    same length, True for the repeated samples of 2.6. Return the mean loss over the real samples of
    all ranks (a 0-d tensor), the same value on every rank. A rank may have no real sample at all.
    Hint: a mean of every rank's mean is right only when all have the same number.
    """
    # TODO 2.7: 在这里写你的代码 | your code here
    raise NotImplementedError("2.7 还没有写 | not written yet")


def learning_rate(step, base_lr, base_batch, batch, warmup_steps):
    """2.8 线性缩放与预热 | Linear scaling with warm-up (10 min)

    在全局 batch 为 base_batch 时调好的学习率是 base_lr。现在全局 batch 是 batch：目标学习率按线性缩
    放，`target = base_lr * batch / base_batch`。前 warmup_steps 步从 base_lr 开始，每步上升同样多，
    第 warmup_steps 步（即 `step == warmup_steps - 1`，step 从 0 数起）刚好到达 target，之后保持不
    变。返回第 step 步的学习率。
    提示：第 0 步已经上升了一份，即 `base_lr + (target - base_lr) / warmup_steps`。warmup_steps 可以
    是 0。

    base_lr was tuned at a global batch of base_batch. The global batch is now `batch`: the target
    scales linearly, `target = base_lr * batch / base_batch`. During the first warmup_steps steps
    the rate rises from base_lr in equal increments and reaches the target exactly in the last of
    them (`step == warmup_steps - 1`, counting from 0); it stays there. Return the rate for this
    step.
    Hint: step 0 has risen by one increment already: `base_lr + (target - base_lr) / warmup_steps`.
    warmup_steps may be 0.
    """
    # TODO 2.8: 在这里写你的代码 | your code here
    raise NotImplementedError("2.8 还没有写 | not written yet")


def train(model, batches, loss_fn, lr, warmup_steps, base_batch):
    """2.9 训练 GPT | Train the GPT (20 min)

    把这一组拼起来：训练一个小 GPT，得到和 minidist 的 DDP、和单进程相同的损失。batches[i] 是第 i 步
    的 (inputs, targets)，是全局 batch，每个 rank 都拿到全部；形状 [全局 batch, seq]。每一步：取自己
    的那些行（rank r 取第 r 份连续的 1/world_size），切成 2 个微批次，用 accumulate 求梯度，设置这一
    步的学习率，然后 SGD 更新并清空梯度。学习率来自 2.8：lr 就是那里的 base_lr，也就是在全局 batch
    为 base_batch 行时调好的学习率；现在的全局 batch 是 inputs 的行数。返回每一步的全局损失（float
    的列表）：各 rank 损失的平均值。
    提示：优化器用 torch.optim.SGD，作用在 `ddp.parameters()` 上。

    Put the set together: train a small GPT to the same losses as minidist's DDP and as a single
    process. batches[i] is (inputs, targets) of step i, the global batch, whole on every rank; shape
    [global batch, seq]. In every step: take your own rows (rank r takes the r-th of world_size
    equal runs of rows), cut them into 2 micro-batches, get the gradients with accumulate, set this
    step's learning rate, then step SGD and clear the gradients. The rate comes from 2.8: lr is its
    base_lr, tuned at a global batch of base_batch rows; the global batch now is the number of rows
    of inputs. Return the global loss of every step (a list of float): the mean of the ranks'
    losses.
    Hint: the optimizer is torch.optim.SGD on `ddp.parameters()`.
    """
    # TODO 2.9: 在这里写你的代码 | your code here
    raise NotImplementedError("2.9 还没有写 | not written yet")
