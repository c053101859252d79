"""第 5 组：ZeRO | Set 5: ZeRO

数据并行里，每个 rank 都存着一样的优化器状态、一样的平均梯度。ZeRO 让每个 rank 只管其中的 1/n。
这里的参数都首尾相接放进一个一维的 flat，补 0 到 n 的倍数，切成 n 段：rank r 负责第 r 段（shard）。
除了 dist，还会用到 minidist 的两个集合通信（flat 和 shard 都是一维、连续的）：
- coll.reduce_scatter(shard, flat, "mean")：shard 变成所有 rank 的 flat 的平均值中自己的那一段；
- coll.all_gather(flat, shard)：把每个 rank 的 shard 首尾相接放进 flat。
先运行 minidist start-exercises my-exercises，在那个文件夹里写。
检查：minidist check 5.1 --src my-exercises（全组：check 5）。

In data parallel training every rank keeps the same optimizer state and the same mean gradients.
ZeRO makes each rank responsible for 1/n of them. Here all parameters are laid end to end in one 1-D
tensor (flat), padded with zeros to a multiple of n, and cut into n parts: rank r is responsible for
part r, its shard. Besides dist you need two collectives of minidist (flat and shard are 1-D and
contiguous):
- coll.reduce_scatter(shard, flat, "mean"): shard becomes this rank's part of the mean of all flats;
- coll.all_gather(flat, shard): puts all ranks' shards end to end into flat.
Run minidist start-exercises my-exercises first, and write in that folder.
To check: minidist check 5.1 --src my-exercises (the set: check 5).
"""

import torch
import torch.distributed as dist

from minidist.comm import collectives as coll


def flatten(tensors):
    """首尾相接，补 0 到 rank 个数的倍数（已写好） | End to end, padded with zeros (given)."""
    flat = torch.cat([t.detach().flatten() for t in tensors])
    return torch.cat([flat, flat.new_zeros(-flat.numel() % dist.get_world_size())])


def copy_back(flat, tensors):
    """把 flat 的各段就地拷回（已写好） | Copy the parts of flat back, in place (given)."""
    sizes = [t.numel() for t in tensors]
    with torch.no_grad():
        for t, part in zip(tensors, flat[: sum(sizes)].split(sizes), strict=True):
            t.copy_(part.view_as(t))


def state_bytes(parameters, stage, n):
    """5.1 每个阶段的显存 | Memory of each stage (10 min)

    混合精度 Adam：每个参数有 2 字节的 16 位参数、2 字节的 16 位梯度，优化器为它存 12 字节（32
    位的参数副本、动量、方差，各 4 字节）。stage 0 是普通的数据并行；stage 1 把优化器状态分给 n
    个 rank；stage 2 还分梯度；stage 3 还分参数。返回一个 rank 上的字节数：{"parameters": ...,
    "gradients": ..., "optimizer": ...}。
    提示：parameters 是模型的参数总数，不用取整。

    Mixed-precision Adam: every parameter has 2 bytes of 16-bit weight and 2 bytes of 16-bit
    gradient, and the optimizer keeps 12 bytes for it (a 32-bit copy of the weight, momentum and
    variance, 4 bytes each). Stage 0 is plain data parallel; stage 1 divides the optimizer state
    among n ranks; stage 2 divides the gradients too; stage 3 the parameters as well. Return the
    bytes on one rank: {"parameters": ..., "gradients": ..., "optimizer": ...}.
    Hint: `parameters`
    is the number of parameters of the model; nothing is rounded.
    """
    # BEGIN HINT 5.1
    # 三项都从 (2, 2, 12) * parameters 开始；stage >= 1 时优化器那一项除以 n，>= 2 梯度，>= 3
    # 参数。
    #
    # Start from (2, 2, 12) * parameters; divide the optimizer's by n from stage 1 on, the
    # gradients' from 2 on, the parameters' from 3 on.
    # END HINT
    # BEGIN SOLUTION 5.1
    return {
        "parameters": 2 * parameters / (n if stage >= 3 else 1),
        "gradients": 2 * parameters / (n if stage >= 2 else 1),
        "optimizer": 12 * parameters / (n if stage >= 1 else 1),
    }
    # END SOLUTION


def step_stage1(parameters, shard, optimizer):
    """5.2 ZeRO-1：只更新自己的一段 | ZeRO-1: step your own part (30 min)

    backward 已经做完，每个 rank 有自己数据的完整梯度。parameters：参数的列表；shard：一维的
    nn.Parameter，是 flatten(parameters) 中自己的那一段的副本，也是 optimizer 唯一的参数。做一
    步 ZeRO-1：把所有梯度 flatten，all_reduce 并求平均；取自己的一段作为 shard.grad；
    optimizer.step()；all_gather 各 rank 更新后的 shard；拷回所有参数；最后把每个参数的 .grad
    设为 None。
    提示：自己的一段是 flat.chunk(n)[rank]。

    backward is done, and every rank has the whole gradient of its own data. parameters: a list;
    shard: a 1-D nn.Parameter, a copy of this rank's part of flatten(parameters), and the only
    parameter of optimizer. Do one step of ZeRO-1: flatten all gradients, all_reduce them and take
    the mean; give your part to shard.grad; optimizer.step(); all_gather the updated shards; copy
    them back into all parameters; finally set every parameter's .grad to None.
    Hint: your part is
    flat.chunk(n)[rank].
    """
    # BEGIN HINT 5.2
    # flat = flatten([p.grad for p in parameters]) 之后的顺序：all_reduce，除以 n，shard.grad =
    # 自己的段，step，coll.all_gather(flat, shard.detach())，copy_back(flat, parameters)，清空
    # 梯度。
    #
    # After flat = flatten([p.grad for p in parameters]), in this order: all_reduce, divide by n,
    # shard.grad = your part, step, coll.all_gather(flat, shard.detach()),
    # copy_back(flat, parameters), clear the gradients.
    # END HINT
    # BEGIN SOLUTION 5.2
    rank, n = dist.get_rank(), dist.get_world_size()
    flat = flatten([p.grad for p in parameters])
    dist.all_reduce(flat)
    flat /= n
    shard.grad = flat.chunk(n)[rank].clone()
    optimizer.step()
    coll.all_gather(flat, shard.detach())
    copy_back(flat, parameters)
    for p in parameters:
        p.grad = None
    # END SOLUTION


def reduce_and_free(parameters, shard):
    """5.3 ZeRO-2：梯度也只留自己的一段 | ZeRO-2: keep only your part of the gradient (15 min)

    backward 已经做完。用一次 reduce-scatter 得到平均梯度中自己的一段，加到 shard.grad 上
    （shard.grad 为 None 时就是它本身；已经有值时是梯度累积，要加上去），然后把每个参数的 .grad
    设为 None，完整的梯度就此释放。没有返回值。shard 同 5.2。
    提示：不要先 all_reduce 再切：那样通信量是两倍，每个 rank 也还是存着完整的平均梯度。

    backward is done. With a single reduce-scatter get your part of the mean gradient and add it to
    shard.grad (if that is None it becomes it; if there is a value, gradients are being accumulated,
    and it has to be added), then set every parameter's .grad to None: the whole gradient is gone.
    Nothing is returned. shard is as in 5.2.
    Hint: do not all_reduce and cut afterwards; that moves
    twice as much, and every rank holds the whole mean gradient.
    """
    # BEGIN HINT 5.3
    # 先建好自己的一段：mine = torch.empty_like(shard.detach())；再 coll.reduce_scatter(mine,
    # flat, "mean")。
    #
    # mine = torch.empty_like(shard.detach()); coll.reduce_scatter(mine, flat, "mean").
    # END HINT
    # BEGIN SOLUTION 5.3
    flat = flatten([p.grad for p in parameters])
    mine = torch.empty_like(shard.detach())
    coll.reduce_scatter(mine, flat, "mean")
    shard.grad = mine if shard.grad is None else shard.grad + mine
    for p in parameters:
        p.grad = None
    # END SOLUTION


def step_with_masters(parameters, master, optimizer):
    """5.4 32 位的主副本 | Masters in 32 bits (20 min)

    parameters 是 bfloat16 的，.grad 也是。master：一维 float32 的 nn.Parameter，自己那一段参数
    的 32 位主副本，optimizer 的唯一参数。做一步：reduce-scatter 梯度（"mean"，先转成 float32
    再求平均，精度更好），作为 master.grad；optimizer.step()；然后 all_gather 参数，通信时用
    bfloat16（字节数减半）；拷回 parameters，清空 .grad 和 master.grad。
    提示：小的更新在 bfloat16 里会被舍入掉，所以主副本要一直保留，绝不能从 bfloat16 的参数重新
    读回来。

    The parameters are bfloat16, and so are their .grad. master: a 1-D float32 nn.Parameter, the
    32-bit copy of your part of the parameters and the only parameter of optimizer. Do one step:
    reduce-scatter the gradients ("mean", converted to float32 first, which is more precise) into
    master.grad; optimizer.step(); then all_gather the parameters, in bfloat16 (half the bytes);
    copy them back into parameters, and clear every .grad and master.grad.
    Hint: small updates
    vanish in bfloat16, so the master copy has to live on; never read it back from the bfloat16
    parameters.
    """
    # BEGIN HINT 5.4
    # 梯度先转换：flatten(...).float()；收集时：flat = torch.empty(n * master.numel(),
    # dtype=torch.bfloat16)；coll.all_gather(flat, master.detach().bfloat16())。
    #
    # flatten(...).float(); flat = torch.empty(n * master.numel(), dtype=torch.bfloat16);
    # coll.all_gather(flat, master.detach().bfloat16()).
    # END HINT
    # BEGIN SOLUTION 5.4
    n = dist.get_world_size()
    flat = flatten([p.grad for p in parameters]).float()
    master.grad = torch.empty_like(master.detach())
    coll.reduce_scatter(master.grad, flat, "mean")
    optimizer.step()
    low = torch.empty(n * master.numel(), dtype=torch.bfloat16)
    coll.all_gather(low, master.detach().bfloat16())
    copy_back(low, parameters)
    master.grad = None
    for p in parameters:
        p.grad = None
    # END SOLUTION


def clip_(shards, max_norm):
    """5.5 全局范数裁剪 | Clip by the global norm (15 min)

    shards：这个 rank 的参数段的列表，每段的 .grad 是平均梯度的一段；所有 rank 的段合起来是整个
    模型。求整个模型梯度的 2-范数；如果它超过 max_norm，就把每段 .grad 就地乘以 max_norm / 范数，
    否则不动。返回裁剪前的范数（0 维张量，每个 rank 相同）。
    提示：范数的平方可以相加，范数本身不能。

    shards: a list of this rank's parts of the parameters; the .grad of each is a part of the mean
    gradient, and the parts of all ranks together are the whole model. Take the 2-norm of the whole
    model's gradient; if it exceeds max_norm, multiply every .grad in place by max_norm / norm, else
    leave them alone. Return the norm before clipping (a 0-d tensor, the same on all ranks).
    Hint: squares of norms add up, norms do not.
    """
    # BEGIN HINT 5.5
    # total = 各段 grad 平方和之和；dist.all_reduce(total)；norm = total.sqrt()。只有 norm >
    # max_norm 时才缩小，绝不放大。
    #
    # total = the sum of all squares of your parts; dist.all_reduce(total); norm = total.sqrt().
    # Shrink only when norm > max_norm, and never enlarge.
    # END HINT
    # BEGIN SOLUTION 5.5
    total = torch.stack([s.grad.pow(2).sum() for s in shards]).sum()
    dist.all_reduce(total)
    norm = total.sqrt()
    if norm > max_norm:
        for s in shards:
            s.grad *= max_norm / norm
    return norm
    # END SOLUTION


def offload_step(shard, host, optimizer):
    """5.6 卸载到主机 | Offload to the host (10 min)

    shard：GPU 上的 bfloat16 参数段，.grad 是自己的那段平均梯度。host：主机内存里的 float32 主
    副本，是 optimizer 的唯一参数，所以动量和方差也都在主机上。做一步：把梯度搬到 host.grad（类
    型和设备都跟 host 一致）；立即释放 shard.grad；optimizer.step()；把结果就地拷回 shard（别的
    地方还引用着同一块内存，不能换成新张量）。没有返回值。这里没有 GPU，两边其实都在 CPU 上，但
    代码要写得在 GPU 上也对。
    提示：t.to(host) 会取 host 的设备和类型。

    shard: the bfloat16 part of the parameters on the GPU, with your part of the mean gradient in
    .grad. host: the float32 master copy in the host's memory, the only parameter of optimizer, so
    momentum and variance live on the host too. Do one step: bring the gradient to host.grad (dtype
    and device of host); free shard.grad at once; optimizer.step(); copy the result back into shard
    in place (others refer to the same memory, it must not become a new tensor). Nothing is
    returned. There is no GPU here and both are on the CPU, but the code has to be right on one as
    well.
    Hint: t.to(host) takes host's device and dtype.
    """
    # BEGIN HINT 5.6
    # host.grad = shard.grad.to(host)；shard.grad = None；step；with torch.no_grad():
    # shard.copy_(host)。copy_ 会自己换类型和设备。
    #
    # host.grad = shard.grad.to(host); shard.grad = None; step; with torch.no_grad():
    # shard.copy_(host). copy_ converts dtype and device by itself.
    # END HINT
    # BEGIN SOLUTION 5.6
    host.grad = shard.grad.to(host)
    shard.grad = None
    optimizer.step()
    with torch.no_grad():
        shard.copy_(host)
    # END SOLUTION


class MiniZero:
    """5.7 训练 GPT：边反向边释放 | Train the GPT: free gradients during backward (45 min)

    一个小 ZeRO-2。groups：参数列表的列表（例如每层一组）；每组有自己的 shard，优化器作用在所有
    shard 上（__init__ 已写好）。每个参数的梯度一写进 p.grad，钩子就会调用 self._ready(i)，i 是
    组号。请写：
    - _ready(i)：这一组的梯度都到齐时（每个参数的 .grad 都不是 None），立刻用 reduce_and_free，
      于是任何时候只有少数几组还存着完整的梯度。
    - step()：先把全局范数裁剪到 max_norm（5.5），再 self.optimizer.step()，然后对每一组
      all_gather 更新后的 shard 并拷回参数，最后把每个 shard.grad 设为 None。检查时会用它训练一个
      小 GPT，损失要和 minidist 的 ZeRO-2、和单进程训练一样。
    提示：钩子按参数到达的顺序调用，组里
      的最后一个参数到达时才满。

    A small ZeRO-2. groups: a list of lists of parameters (one per layer, say); every group has its
    own shard, and the optimizer works on all shards (__init__ is given). As soon as a parameter's
    gradient is in p.grad, a hook calls self._ready(i) with the number of its group. Write:
    - _ready(i): when all gradients of this group are there (no .grad is None), call
      reduce_and_free at once, so that only few groups hold whole gradients at any time.
    - step(): clip by the global norm to max_norm (5.5), then self.optimizer.step(), then for every
      group all_gather the updated shard and copy it back into the parameters; finally set every
      shard.grad to None.
    The check trains a small GPT with it, to the same losses as minidist's ZeRO-2 and as a single
    process.
    Hint: the hook is called for each parameter as it arrives; a group is full only when
    its last one has come.
    """

    def __init__(self, groups, optimizer_class, max_norm=1.0, **defaults):
        rank, n = dist.get_rank(), dist.get_world_size()
        self.groups, self.max_norm = groups, max_norm
        self.shards = [
            torch.nn.Parameter(flatten(group).chunk(n)[rank].clone()) for group in groups
        ]
        self.optimizer = optimizer_class(self.shards, **defaults)
        for i, group in enumerate(groups):
            for p in group:
                p.register_post_accumulate_grad_hook(lambda _, i=i: self._ready(i))

    # BEGIN HINT 5.7
    # step 里每组的 flat：torch.empty(n * shard.numel())，然后 coll.all_gather(flat,
    # shard.detach())。
    #
    # The flat of each group in step: torch.empty(n * shard.numel()), then
    # coll.all_gather(flat, shard.detach()).
    # END HINT
    def _ready(self, i):
        # BEGIN SOLUTION 5.7
        if all(p.grad is not None for p in self.groups[i]):
            reduce_and_free(self.groups[i], self.shards[i])
        # END SOLUTION

    def step(self):
        # BEGIN SOLUTION 5.7
        clip_(self.shards, self.max_norm)
        self.optimizer.step()
        for group, shard in zip(self.groups, self.shards, strict=True):
            flat = torch.empty(dist.get_world_size() * shard.numel())
            coll.all_gather(flat, shard.detach())
            copy_back(flat, group)
            shard.grad = None
        # END SOLUTION
