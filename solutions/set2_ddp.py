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
    # BEGIN HINT 2.1
    # 一个循环 `for p in model.parameters()`；all_reduce 之后再除以 dist.get_world_size()。不要写
    # `g = p.grad.clone()` 再对 g 操作：那样改的只是副本，p.grad 不变。
    #
    # One loop, `for p in model.parameters()`; after the all-reduce, divide by
    # dist.get_world_size(). Do not work on `g = p.grad.clone()`: only the copy would change, and
    # p.grad would not.
    # END HINT
    # BEGIN SOLUTION 2.1
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
    # END SOLUTION


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
    # BEGIN HINT 2.2
    # 拼接：`torch.cat([g.flatten() for g in grads])`。拷回：
    # `flat.split([g.numel() for g in grads])` 给出各段，再用 `g.copy_(part.view_as(g))`。
    #
    # Join: `torch.cat([g.flatten() for g in grads])`. Back:
    # `flat.split([g.numel() for g in grads])` gives the parts; then `g.copy_(part.view_as(g))`.
    # END HINT
    # BEGIN SOLUTION 2.2
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        g.copy_(part.view_as(g))
    # END SOLUTION


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
    # BEGIN HINT 2.3
    # 维护 bucket（当前桶）和 size（它的字节数）。循环结束时，最后一个桶还开着：别忘了收下它。
    #
    # Keep `bucket` (the open one) and `size` (its bytes). After the loop the last bucket is still
    # open: do not lose it.
    # END HINT
    # BEGIN SOLUTION 2.3
    buckets, bucket, size = [], [], 0
    for p in reversed(parameters):
        nbytes = p.numel() * p.element_size()
        if bucket and size + nbytes > cap_bytes:
            buckets.append(bucket)
            bucket, size = [], 0
        bucket.append(p)
        size += nbytes
    if bucket:
        buckets.append(bucket)
    return buckets
    # END SOLUTION


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

    # BEGIN HINT 2.4
    # 下一个该发的桶的编号就是 len(self.launched)。_ready：记下 p 以后，只要还有没发的桶，并且下一个
    # 桶里的每个参数都在 self.ready 里，就发出它，再看下一个。所以是循环，不是一次 if：一个桶发出以
    # 后，后面早已满了的桶也可以跟着发出。finish：先补发剩下的，再让桶和 self.launched 一一对应：等
    # 待、除、按 numel 切开、写回。
    #
    # The number of the next bucket to launch is len(self.launched). _ready: note p; then, as long
    # as there is a bucket left and every parameter of the next one is in self.ready, launch it and
    # look at the one after it. That is a loop, not a single `if`: once a bucket is out, later ones
    # that were full already can follow. finish: launch the rest; then go through the buckets and
    # self.launched side by side: wait, divide, split by numel, write back.
    # END HINT
    def _ready(self, p):
        # BEGIN SOLUTION 2.4
        if not self.sync:
            return
        self.ready.add(p)
        while len(self.launched) < len(self.buckets) and all(
            q in self.ready for q in self.buckets[len(self.launched)]
        ):
            self.launched.append(self._launch(len(self.launched)))
        # END SOLUTION

    def finish(self):
        # BEGIN SOLUTION 2.4
        while len(self.launched) < len(self.buckets):
            self.launched.append(self._launch(len(self.launched)))
        for bucket, (work, flat) in zip(self.buckets, self.launched, strict=True):
            work.wait()
            flat /= dist.get_world_size()
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = part.view_as(p).clone()
        self.ready.clear()
        self.launched.clear()
        # END SOLUTION

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
    # BEGIN HINT 2.5
    # 除最后一个以外，都在 `with ddp.no_sync():` 里做前向和反向；最后一个在外面，之后调用
    # `ddp.finish()`。每个 loss 先除以 len(microbatches) 再 backward。
    #
    # All but the last: forward and backward inside `with ddp.no_sync():`; the last one outside,
    # then call `ddp.finish()`. Divide every loss by len(microbatches) before its backward.
    # END HINT
    # BEGIN SOLUTION 2.5
    total = torch.zeros(())
    for x, y in microbatches[:-1]:
        with ddp.no_sync():
            loss = loss_fn(ddp(x), y) / len(microbatches)
            loss.backward()
        total += loss.detach()
    x, y = microbatches[-1]
    loss = loss_fn(ddp(x), y) / len(microbatches)
    loss.backward()
    ddp.finish()
    return total + loss.detach()
    # END SOLUTION


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
    # BEGIN HINT 2.6
    # 补到的长度：`total = ceil(items / world_size) * world_size`；第 i 个位置放
    # `order[i % items]`，当 `i >= items` 时就是补的。然后对位置 `range(rank, total, world_size)` 取
    # 值。
    #
    # The padded length: `total = ceil(items / world_size) * world_size`. Position i holds
    # `order[i % items]` and is padding when `i >= items`. Then take positions
    # `range(rank, total, world_size)`.
    # END HINT
    # BEGIN SOLUTION 2.6
    g = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(items, generator=g).tolist()
    total = -(-items // world_size) * world_size
    places = range(rank, total, world_size)
    return [order[i % items] for i in places], [i >= items for i in places]
    # END SOLUTION


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
    # BEGIN HINT 2.7
    # 把两个数放进一个张量：[真实样本的损失之和, 真实样本的个数]，一次 all_reduce，再相除。
    #
    # Put two numbers into one tensor, [sum over real samples, number of real samples]; one
    # all_reduce; then divide.
    # END HINT
    # BEGIN SOLUTION 2.7
    real = ~torch.tensor(is_padding, dtype=torch.bool)
    pair = torch.stack([values[real].sum(), real.sum().to(values.dtype)])
    dist.all_reduce(pair)
    return pair[0] / pair[1]
    # END SOLUTION


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
    # BEGIN HINT 2.8
    # 两种情形：`step >= warmup_steps` 时已经到了，先处理它，就不会除以 0。其余的 step 走过了 step +
    # 1 份，总共 warmup_steps 份。例子：从 0.1 到 0.4、预热 3 步，是 0.2、0.3、0.4。
    #
    # Two cases: at `step >= warmup_steps` the ramp is over; treating this first avoids a division
    # by 0. Any other step has risen by step + 1 of warmup_steps increments. For example, from 0.1
    # to 0.4 in 3 steps: 0.2, 0.3, 0.4.
    # END HINT
    # BEGIN SOLUTION 2.8
    target = base_lr * batch / base_batch
    if step >= warmup_steps:
        return target
    return base_lr + (target - base_lr) * (step + 1) / warmup_steps
    # END SOLUTION


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
    # BEGIN HINT 2.9
    # 自己的行：`inputs.chunk(world_size)[rank]`；微批次：`list(zip(x.chunk(2), y.chunk(2)))`。学习
    # 率：`for group in optimizer.param_groups: group["lr"] = learning_rate(...)`。损失：accumulate
    # 返回的是本 rank 的；每个 rank 都对它做 all_reduce，再除以 world_size。
    #
    # Own rows: `inputs.chunk(world_size)[rank]`; micro-batches:
    # `list(zip(x.chunk(2), y.chunk(2)))`. Rate:
    # `for group in optimizer.param_groups: group["lr"] = learning_rate(...)`. Loss: accumulate
    # returns this rank's; every rank all-reduces it and divides by world_size.
    # END HINT
    # BEGIN SOLUTION 2.9
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ddp = MiniDDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    losses = []
    for step, (inputs, targets) in enumerate(batches):
        x, y = inputs.chunk(world_size)[rank], targets.chunk(world_size)[rank]
        loss = accumulate(ddp, list(zip(x.chunk(2), y.chunk(2), strict=True)), loss_fn)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, lr, base_batch, len(inputs), warmup_steps)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        losses.append(loss.item() / world_size)
    return losses
    # END SOLUTION
