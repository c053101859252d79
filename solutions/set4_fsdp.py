"""第 4 组：FSDP | Set 4: FSDP

FSDP 连参数也切开：每个 rank 平时只存参数的 1/n（shard），用到某个单元（unit，例如一层）时才把
它的完整参数收集起来，用完立即释放。用到 minidist 的两个集合通信（shard 和 flat 都是一维、连续
的）：
- coll.all_gather(flat, shard)：把每个 rank 的 shard 首尾相接放进 flat；
- coll.reduce_scatter(shard, flat, "mean")：shard 变成所有 rank 的 flat 的平均值中自己的那一段。
  加上 async_op=True，它们立即返回一个 work，结果在 work.wait() 之后才能用。
先运行 minidist start-exercises my-exercises，在那个文件夹里写。
检查：minidist check 4.1 --src my-exercises（全组：check 4）。

FSDP cuts the parameters too: a rank keeps only 1/n of them (its shard), gathers the whole
parameters of a unit (a layer, say) when they are needed, and frees them at once afterwards. You
need two collectives of minidist (shard and flat are 1-D and contiguous):
- coll.all_gather(flat, shard): puts all ranks' shards end to end into flat;
- coll.reduce_scatter(shard, flat, "mean"): shard becomes this rank's part of the mean of all flats.
With async_op=True they return a work at once; the result may be used after work.wait().
Run minidist start-exercises my-exercises first, and write in that folder.
To check: minidist check 4.1 --src my-exercises (the set: check 4).
"""

import torch
import torch.distributed as dist
from torch import nn

from minidist.comm import collectives as coll


def cut(tensors):
    """4.1 切开再收集 | Cut and gather (15 min)

    两个函数。cut(tensors)：把张量首尾相接放进一个一维张量，补 0 到 n 的倍数（n 是 rank 的个数），
    返回自己的第 rank 段。返回的必须是独立的副本：如果只是一个视图，整块内存就还占着。
    gather(shard, shapes)：反过来，收集所有的段，去掉补的 0，返回形状为 shapes 的张量的列表，每
    个 rank 一样。
    提示：补 0 的个数是 -numel % n。

    Two functions. cut(tensors): lay the tensors end to end in one 1-D tensor, pad it with zeros to
    a multiple of n (the number of ranks), and return part number `rank`. It has to be a copy of its
    own: a view would keep the whole memory alive. gather(shard, shapes): the way back. Gather all
    parts, drop the padding, and return the list of tensors with these shapes, the same on every
    rank.
    Hint: the number of zeros is -numel % n.
    """
    # BEGIN HINT 4.1
    # cut：flat.chunk(n)[rank].clone()。gather：flat = torch.empty(n * shard.numel())，
    # coll.all_gather，然后按 math.prod(shape) 切开，再 view(shape)。torch.Size 有 .numel()。
    #
    # cut: flat.chunk(n)[rank].clone(). gather: flat = torch.empty(n * shard.numel()),
    # coll.all_gather, then split by torch.Size(shape).numel() and view(shape).
    # END HINT
    # BEGIN SOLUTION 4.1
    n = dist.get_world_size()
    flat = torch.cat([t.detach().flatten() for t in tensors])
    flat = torch.cat([flat, flat.new_zeros(-flat.numel() % n)])
    return flat.chunk(n)[dist.get_rank()].clone()
    # END SOLUTION


def gather(shard, shapes):
    """4.1 的第二个函数，见上 | The second function of 4.1, see above."""
    # BEGIN SOLUTION 4.1
    flat = shard.new_empty(dist.get_world_size() * shard.numel())
    coll.all_gather(flat, shard)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    # END SOLUTION


class _GatherInBackward(torch.autograd.Function):
    """什么也不算；反向经过这里时收集参数（已写好） | Computes nothing; gathers when backward comes
    by (given)."""

    @staticmethod
    def forward(ctx, unit, y):
        ctx.unit = unit
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        ctx.unit.gather()
        return None, grad


class Unit(nn.Module):
    """4.2 收集与释放 | Gather and free (20 min)

    一个 FSDP 单元。__init__（已写好）：module 的所有参数变成一维张量 self.full 的视图，
    self.shard 是自己的那一段（optimizer 更新的就是它），self.nbytes 是 self.full 的字节数。请
    写两个方法，它们只改变 self.full 的存储空间（storage），不改变任何张量对象，所以参数这些视
    图会跟着变：
    - free()：把存储空间缩到 0 字节：self.full.untyped_storage().resize_(0)。
    - gather()：先把存储空间恢复到 self.nbytes 字节，再把所有 rank 的 shard 收集进 self.full。
      如果完整的参数本来就在（存储空间不是 0），什么也不做。
    提示：self.shard 是 nn.Parameter，通信时用 self.shard.detach()。

    An FSDP unit. __init__ (given): all parameters of module become views of the 1-D tensor
    self.full, self.shard is this rank's part (what the optimizer steps on), and self.nbytes is the
    size of self.full in bytes. Write two methods. They change only the storage of self.full and no
    tensor object, so the parameters, being views, follow:
    - free(): shrink the storage to 0 bytes: self.full.untyped_storage().resize_(0).
    - gather(): bring the storage back to self.nbytes bytes, then gather all ranks' shards into
      self.full. If the whole parameters are there already (the storage is not empty), do nothing.
    Hint: self.shard is an nn.Parameter; give self.shard.detach() to the collective.
    """

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.parts = list(module.parameters())
        rank, n = dist.get_rank(), dist.get_world_size()
        flat = torch.cat([p.detach().flatten() for p in self.parts])
        self.full = torch.cat([flat, flat.new_zeros(-flat.numel() % n)])
        self.nbytes = self.full.untyped_storage().nbytes()
        offset = 0
        for p in self.parts:
            p.data = self.full[offset : offset + p.numel()].view(p.shape)
            p.register_post_accumulate_grad_hook(self._arrived)
            offset += p.numel()
        self.shard = nn.Parameter(self.full.chunk(n)[rank].clone())
        self.free()

    def compute(self, x):
        """用已经收集好的参数计算（已写好） | Compute with parameters that are there (given)."""
        return _GatherInBackward.apply(self, self.module(x))

    # BEGIN HINT 4.2
    # storage = self.full.untyped_storage()；storage.nbytes() 是现在的字节数。gather：if
    # storage.nbytes() == 0: storage.resize_(self.nbytes); coll.all_gather(...)。
    #
    # storage = self.full.untyped_storage(); storage.nbytes() is its present size.
    # gather: if storage.nbytes() == 0: storage.resize_(self.nbytes); coll.all_gather(...).
    # END HINT
    def free(self):
        # BEGIN SOLUTION 4.2
        self.full.untyped_storage().resize_(0)
        # END SOLUTION

    def gather(self):
        # BEGIN SOLUTION 4.2
        storage = self.full.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.nbytes)
            coll.all_gather(self.full, self.shard.detach())
        # END SOLUTION

    def start_gather(self):
        """开始收集，不等待（已写好） | Start to gather without waiting (given)."""
        self.full.untyped_storage().resize_(self.nbytes)
        return coll.all_gather(self.full, self.shard.detach(), async_op=True)

    def forward(self, x):
        return forward(self, x)

    def _arrived(self, p):
        arrived(self)


def forward(unit, x):
    """4.3 前向 | Forward (10 min)

    用一个 Unit 做前向：收集、计算、释放，返回结果。反向到达这个单元时参数必须再收集一次：
    unit.compute(x) 已经安排好了，直接调用 unit.module(x) 则没有。
    提示：三行，加一个 return。

    Run a Unit forward: gather, compute, free, and return the result. When backward reaches this
    unit its parameters have to be gathered again: unit.compute(x) arranges that, a plain
    unit.module(x) does not.
    Hint: three lines and a return.
    """
    # BEGIN HINT 4.3
    # 依次写：unit.gather()；y = unit.compute(x)；unit.free()；return y。
    #
    # unit.gather(); y = unit.compute(x); unit.free(); return y.
    # END HINT
    # BEGIN SOLUTION 4.3
    unit.gather()
    y = unit.compute(x)
    unit.free()
    return y
    # END SOLUTION


def arrived(unit):
    """4.4 反向：reduce-scatter | Backward: reduce-scatter (20 min)

    反向时，unit.parts 中每有一个参数的 .grad 写好，就会调用一次 arrived(unit)。当所有参数的
    .grad 都在了：把它们首尾相接、补 0，用 reduce-scatter（"mean"）得到自己的那一段，加到
    unit.shard.grad 上（为 None 时就是它；已有值是梯度累积），把每个 .grad 设为 None，再释放完
    整的参数。没有到齐时什么也不做。没有返回值。
    提示：补到和 unit.full 一样长（释放之后它的形状还在）。

    During backward, arrived(unit) is called each time the .grad of one of unit.parts is ready. Once
    all of them are there: lay them end to end, pad with zeros, get your part by a reduce-scatter
    ("mean") and add it to unit.shard.grad (if that is None it becomes it; a value means that
    gradients are being accumulated); set every .grad to None; and free the whole parameters. Before
    that, do nothing. Nothing is returned.
    Hint: pad to the length of unit.full (a freed tensor
    still has its shape).
    """
    # BEGIN HINT 4.4
    # 到齐：all(p.grad is not None for p in unit.parts)。自己的一段放进
    # torch.empty_like(unit.shard.detach())。
    #
    # All there: all(p.grad is not None for p in unit.parts). Your part goes into
    # torch.empty_like(unit.shard.detach()).
    # END HINT
    # BEGIN SOLUTION 4.4
    if any(p.grad is None for p in unit.parts):
        return
    flat = torch.cat([p.grad.flatten() for p in unit.parts])
    flat = torch.cat([flat, flat.new_zeros(unit.full.numel() - flat.numel())])
    mine = torch.empty_like(unit.shard.detach())
    coll.reduce_scatter(mine, flat, "mean")
    unit.shard.grad = mine if unit.shard.grad is None else unit.shard.grad + mine
    for p in unit.parts:
        p.grad = None
    unit.free()
    # END SOLUTION


def forward_with_prefetch(units, x):
    """4.5 预取 | Prefetch (20 min)

    依次用 units 做前向，并让通信和计算重叠：在计算第 i 个单元之前，先开始收集第 i + 1 个
    （unit.start_gather() 立即返回一个 work），再等第 i 个的 work，然后计算、释放。任何时候最多
    有两个单元的完整参数。返回最后的结果。
    提示：第一个单元没有别的计算可以重叠，先开始、再等就好；最后一个后面没有可以预取的。

    Run the units forward one after the other with communication overlapped: before computing unit
    i, start gathering unit i + 1 (unit.start_gather() returns a work at once); then wait for the
    work of unit i, compute, free. At most two units hold whole parameters at any time. Return the
    last result.
    Hint: there is nothing to overlap the first one with, just start it and wait; after
    the last there is nothing to prefetch.
    """
    # BEGIN HINT 4.5
    # work = units[0].start_gather()；循环里：ahead = units[i + 1].start_gather()（如果有），
    # work.wait()，x = unit.compute(x)，unit.free()，work = ahead。
    #
    # work = units[0].start_gather(); in the loop: ahead = units[i + 1].start_gather() if there is
    # one, work.wait(), x = unit.compute(x), unit.free(), work = ahead.
    # END HINT
    # BEGIN SOLUTION 4.5
    work = units[0].start_gather()
    for i, unit in enumerate(units):
        ahead = units[i + 1].start_gather() if i + 1 < len(units) else None
        work.wait()
        x = unit.compute(x)
        unit.free()
        work = ahead
    return x
    # END SOLUTION


def gather_low(shard):
    """4.6 混合精度 | Mixed precision (10 min)

    两个函数。gather_low(shard)：shard 是 float32 的参数段，返回完整的 bfloat16 参数（一维，[n
    * shard.numel()]），通信时也要用 bfloat16。reduce_grad(flat)：flat 是本 rank 完整的
    bfloat16 梯度（一维），返回自己那一段的平均梯度，float32；求平均必须在 float32 里做，因为
    bfloat16 只有 8 位有效数字，加一次就舍入一次。
    提示：先转换类型再通信，还是先通信再转换，对这两个函数是相反的理由、同样的做法。

    Two functions. gather_low(shard): shard is a float32 part of the parameters; return the whole
    parameters in bfloat16 (1-D, [n * shard.numel()]), and communicate in bfloat16.
    reduce_grad(flat): flat is this rank's whole gradient in bfloat16 (1-D); return your part of the
    mean gradient in float32. The averaging has to happen in float32: bfloat16 has 8 significant
    bits, and every addition would round.
    Hint: in both, convert first and communicate afterwards.
    """
    # BEGIN HINT 4.6
    # gather_low：full = torch.empty(n * shard.numel(), dtype=torch.bfloat16)；
    # coll.all_gather(full, shard.detach().bfloat16())。reduce_grad：先 flat.float()。
    #
    # gather_low: full = torch.empty(n * shard.numel(), dtype=torch.bfloat16);
    # coll.all_gather(full, shard.detach().bfloat16()). reduce_grad: flat.float() first.
    # END HINT
    # BEGIN SOLUTION 4.6
    full = torch.empty(dist.get_world_size() * shard.numel(), dtype=torch.bfloat16)
    coll.all_gather(full, shard.detach().bfloat16())
    return full
    # END SOLUTION


def reduce_grad(flat):
    """4.6 的第二个函数，见上 | The second function of 4.6, see above."""
    # BEGIN SOLUTION 4.6
    mine = torch.empty(flat.numel() // dist.get_world_size())
    coll.reduce_scatter(mine, flat.float(), "mean")
    return mine
    # END SOLUTION


def train(model, batches, loss_fn, lr):
    """4.7 训练 GPT | Train the GPT (20 min)

    把这一组拼起来。model.layers() 是依次执行的层；每层做成一个 Unit。优化器是
    torch.optim.AdamW，作用在所有 unit.shard 上，学习率 lr。batches[i] 是第 i 步的 (inputs,
    targets)，全局 batch，每个 rank 都拿到全部；自己取第 rank 份连续的行。每一步：用
    forward_with_prefetch 前向，loss_fn(logits, y)，backward，更新，清空 shard 的梯度。返回每一
    步的全局损失（float 的列表），即各 rank 损失的平均值。损失要和 minidist 的 FSDP、和单进程训
    练一样。
    提示：inputs.chunk(n)[rank]。

    Put the set together. model.layers() are the layers in order; make each a Unit. The optimizer is
    torch.optim.AdamW on all unit.shard, with learning rate lr. batches[i] is (inputs, targets) of
    step i, the global batch, whole on every rank; take the rank-th of n equal runs of rows. In
    every step: forward with forward_with_prefetch, loss_fn(logits, y), backward, step, clear the
    shards' gradients. Return the global loss of every step (a list of float): the mean of the
    ranks' losses. They have to equal those of minidist's FSDP and of a single process.
    Hint: inputs.chunk(n)[rank].
    """
    # BEGIN HINT 4.7
    # units = [Unit(layer) for layer in model.layers()]；optimizer = torch.optim.AdamW([u.shard
    # for u in units], lr=lr)。全局损失：loss.detach() 做 all_reduce，再除以 n。
    #
    # units = [Unit(layer) for layer in model.layers()];
    # optimizer = torch.optim.AdamW([u.shard for u in units], lr=lr).
    # Global loss: all_reduce loss.detach(), divide by n.
    # END HINT
    # BEGIN SOLUTION 4.7
    rank, n = dist.get_rank(), dist.get_world_size()
    units = [Unit(layer) for layer in model.layers()]
    optimizer = torch.optim.AdamW([unit.shard for unit in units], lr=lr)
    losses = []
    for inputs, targets in batches:
        x, y = inputs.chunk(n)[rank], targets.chunk(n)[rank]
        loss = loss_fn(forward_with_prefetch(units, x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / n)
    return losses
    # END SOLUTION
