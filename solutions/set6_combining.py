"""第 6 组：组合 | Set 6: combining

大模型同时用几种并行。rank 排成一个三维的网格 dp × pp × tp，dp 在最外层，tp 在最内层：rank 0,
1, ..., tp - 1 是同一个张量并行组，它们通信最频繁，所以放在同一台机器里。每个 rank 在每一维各属
于一个组。
先运行 minidist start-exercises my-exercises，在那个文件夹里写。
检查：minidist check 6.1 --src my-exercises（全组：check 6）。

Large models use several kinds of parallelism at once. The ranks form a mesh dp × pp × tp, with dp
outermost and tp innermost: ranks 0, 1, ..., tp - 1 are one tensor parallel group, which
communicates most and therefore sits inside one machine. Along each dimension a rank belongs to one
group.
Run minidist start-exercises my-exercises first, and write in that folder.
To check: minidist check 6.1 --src my-exercises (the set: check 6).
"""

import torch
import torch.distributed as dist

import minidist as md


def coordinates(rank, dp, pp, tp):
    """6.1 网格坐标 | Coordinates in the mesh (5 min)

    返回 rank 在 dp × pp × tp 网格里的坐标 (i_dp, i_pp, i_tp)。tp 变得最快，dp 变得最慢。
    提示：和多维数组按行存储时下标的算法一样。

    Return the coordinates (i_dp, i_pp, i_tp) of a rank in the dp × pp × tp mesh. tp varies fastest,
    dp slowest.
    Hint: it is the arithmetic of an array stored row by row.
    """
    # BEGIN HINT 6.1
    # rank = (i_dp * pp + i_pp) * tp + i_tp；反过来用 // 和 %。
    #
    # rank = (i_dp * pp + i_pp) * tp + i_tp; undo it with // and %.
    # END HINT
    # BEGIN SOLUTION 6.1
    return rank // (pp * tp), rank // tp % pp, rank % tp
    # END SOLUTION


def groups_of(axis, dp, pp, tp):
    """6.2 每一维的组 | The groups along an axis (10 min)

    axis 是 "dp"、"pp" 或 "tp"。返回这一维的所有组，每个组是 rank 的列表（升序），组按第一个
    rank 升序排列。同一个组里的 rank，别的坐标都相同，只有这一维的坐标不同。例：dp=2, pp=1,
    tp=2 时，tp 的组是 [[0, 1], [2, 3]]，dp 的组是 [[0, 2], [1, 3]]。
    提示：可以用 6.1 把 rank 按另外两个坐标分类。

    axis is "dp", "pp" or "tp". Return all groups along it, each a list of ranks in ascending order,
    the groups ordered by their first rank. The ranks of a group share the other coordinates and
    differ in this one. Example: with dp=2, pp=1, tp=2 the tp groups are [[0, 1], [2, 3]] and the dp
    groups [[0, 2], [1, 3]].
    Hint: with 6.1 sort the ranks by their two other coordinates.
    """
    # BEGIN HINT 6.2
    # 字典：键是去掉这一维的坐标，值是 rank 的列表；按 rank 的顺序放进去，list(字典.values())
    # 就是答案。
    #
    # A dict from the coordinates without this axis to lists of ranks; filled in the order of ranks,
    # list(of its values) is the answer.
    # END HINT
    # BEGIN SOLUTION 6.2
    place = ("dp", "pp", "tp").index(axis)
    found = {}
    for rank in range(dp * pp * tp):
        others = list(coordinates(rank, dp, pp, tp))
        del others[place]
        found.setdefault(tuple(others), []).append(rank)
    return list(found.values())
    # END SOLUTION


def make_groups(dp, tp):
    """6.3 建立通信组 | Make the process groups (15 min)

    在 dp × tp 的网格（pp = 1）上建立通信组，返回自己所在的两个组 (dp_group, tp_group)。
    dist.new_group(ranks) 建立一个组，它是集合操作：所有 rank 都必须以同样的顺序为每一个组调用
    它，包括自己不在其中的组。
    提示：一共要调用 tp + dp 次，用 6.2 列出所有的组。

    Make the process groups of a dp × tp mesh (pp = 1), and return the two that this rank is in,
    (dp_group, tp_group). dist.new_group(ranks) makes one, and is itself collective: every rank has
    to call it for every group, in the same order, also for groups it is not in.
    Hint: tp + dp calls
    in all; list the groups with 6.2.
    """
    # BEGIN HINT 6.3
    # 对每个 axis、对 groups_of(axis, dp, 1, tp) 的每个 ranks：group = dist.new_group(ranks)；
    # 如果自己在 ranks 里，就记下来。
    #
    # For each axis, for each ranks in groups_of(axis, dp, 1, tp): group = dist.new_group(ranks);
    # keep it if this rank is among them.
    # END HINT
    # BEGIN SOLUTION 6.3
    own = {}
    for axis in ("dp", "tp"):
        for ranks in groups_of(axis, dp, 1, tp):
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                own[axis] = group
    return own["dp"], own["tp"]
    # END SOLUTION


def global_norm(sharded, replicated, tp_group):
    """6.4 张量并行下的全局范数 | The global norm under tensor parallelism (15 min)

    sharded：切开的参数的梯度，各 rank 不同，合起来才是完整的；replicated：每个 rank 都有完整一
    份的参数（如 LayerNorm）的梯度，各 rank 相同。都是张量的列表。返回整个模型梯度的 2-范数（0
    维张量，组里每个 rank 相同）。
    提示：复制的参数只能算一次。

    sharded: gradients of parameters that are cut; they differ from rank to rank, and only together
    they are whole. replicated: gradients of parameters of which every rank has all (LayerNorm, for
    one), the same on every rank. Both are lists of tensors. Return the 2-norm of the whole model's
    gradient (a 0-d tensor, the same on all ranks of the group).
    Hint: what is replicated counts
    once.
    """
    # BEGIN HINT 6.4
    # 只把 sharded 的平方和在 tp_group 里 all_reduce，再加上自己的 replicated 的平方和，最后开
    # 方。
    #
    # all_reduce the squares of sharded only, in tp_group; add your own squares of replicated; take
    # the root last.
    # END HINT
    # BEGIN SOLUTION 6.4
    total = torch.stack([t.pow(2).sum() for t in sharded]).sum()
    dist.all_reduce(total, group=tp_group)
    total = total + torch.stack([t.pow(2).sum() for t in replicated]).sum()
    return total.sqrt()
    # END SOLUTION


def train_2d(model, batches, lr):
    """6.5 2 × 2 训练 GPT | Train the GPT on 2 × 2 (25 min)

    4 个 rank，dp = 2、tp = 2。用 6.3 的组：md.tensor_parallel(model, tp_group) 就地切开 GPT，
    之后 model(x) 给出按类别切开的 logits，损失是 md.vocab_parallel_cross_entropy(logits, y,
    group=tp_group)。batches[i] 是第 i 步的全局 batch (inputs, targets)，每个 rank 都拿到全部。
    同一个 tp 组的 rank 必须用同样的行；行按 dp 坐标分：取第 i_dp 份连续的行。backward 之后，每
    个参数的梯度只在 dp_group 里求平均。然后 SGD（学习率 lr），清空梯度。返回每一步的全局损失
    （float 的列表）。损失要和单进程训练一样。
    提示：tp 组里各 rank 的损失本来就一样，全局损失是 dp 组里的平均。

    4 ranks, dp = 2, tp = 2. With the groups of 6.3: md.tensor_parallel(model, tp_group) cuts the
    GPT in place; model(x) then gives logits cut by classes, and the loss is
    md.vocab_parallel_cross_entropy(logits, y, group=tp_group). batches[i] is the global batch
    (inputs, targets) of step i, whole on every rank. Ranks of one tp group must use the same rows;
    rows are shared by the dp coordinate: take the i_dp-th of dp equal runs of rows. After backward
    every parameter's gradient is averaged in dp_group only. Then SGD (learning rate lr), and clear
    the gradients. Return the global loss of every step (a list of float). They have to be those of
    a single process.
    Hint: the ranks of a tp group have the same loss anyway; the global loss is
    the mean over the dp group.
    """
    # BEGIN HINT 6.5
    # 坐标与数据：i_dp, _, _ = coordinates(rank, 2, 1, 2)；x = inputs.chunk(2)[i_dp]；
    # dist.all_reduce(p.grad, group=dp_group)；p.grad /= 2。
    #
    # i_dp, _, _ = coordinates(rank, 2, 1, 2); x = inputs.chunk(2)[i_dp];
    # dist.all_reduce(p.grad, group=dp_group); p.grad /= 2.
    # END HINT
    # BEGIN SOLUTION 6.5
    dp_group, tp_group = make_groups(2, 2)
    i_dp, _, _ = coordinates(dist.get_rank(), 2, 1, 2)
    md.tensor_parallel(model, tp_group)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for inputs, targets in batches:
        x, y = inputs.chunk(2)[i_dp], targets.chunk(2)[i_dp]
        loss = md.vocab_parallel_cross_entropy(model(x), y, group=tp_group)
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=dp_group)
            p.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=dp_group)
        losses.append(total.item() / 2)
    return losses
    # END SOLUTION


def layout(parameters, layers, gpus, gpus_per_node, gpu_bytes):
    """6.6 给定硬件，怎样组合 | A layout for given hardware (15 min)

    返回 (dp, pp, tp)。规则（训练状态按每个参数 16 字节计，张量并行和流水线并行都把它平分）：
    - tp：从 1, 2, 4, 8, ... 里取最小的一个，使 16 * parameters / tp 不超过 gpu_bytes；但 tp 不
      能跨机器，不超过 gpus_per_node；都放不下时取 gpus_per_node（它是 2 的幂）。
    - pp：从 1, 2, 3, ... 里取最小的一个，使 16 * parameters / (tp * pp) 不超过 gpu_bytes，并且
      layers 能被 pp 整除，gpus 能被 tp * pp 整除。没有这样的 pp 时返回 None。
    - dp：剩下的卡全部用于数据并行。
    提示：先定 tp，再定 pp，最后 dp = gpus // (tp * pp)。pp 不会超过 layers。

    Return (dp, pp, tp). The rules (the training state is 16 bytes per parameter; tensor and
    pipeline parallelism both divide it evenly):
    - tp: the smallest of 1, 2, 4, 8, ... for which 16 * parameters / tp is not more than gpu_bytes;
      but tp must not cross machines: at most gpus_per_node. If none fits, gpus_per_node (a power of
      two).
    - pp: the smallest of 1, 2, 3, ... for which 16 * parameters / (tp * pp) is not more than
      gpu_bytes, and which divides layers, and for which tp * pp divides gpus. If there is none,
      return None.
    - dp: all remaining GPUs are used for data parallelism.
    Hint: first tp, then pp, then dp = gpus // (tp * pp). pp never exceeds layers.
    """
    # BEGIN HINT 6.6
    # tp = 1；while 16 * parameters / tp > gpu_bytes and tp < gpus_per_node: tp *= 2。然后 for
    # pp in range(1, layers + 1): 三个条件都满足就返回。
    #
    # tp = 1; while 16 * parameters / tp > gpu_bytes and tp < gpus_per_node: tp *= 2.
    # Then for pp in range(1, layers + 1): return once all three conditions hold.
    # END HINT
    # BEGIN SOLUTION 6.6
    tp = 1
    while 16 * parameters / tp > gpu_bytes and tp < gpus_per_node:
        tp *= 2
    for pp in range(1, layers + 1):
        fits = 16 * parameters / (tp * pp) <= gpu_bytes
        if fits and layers % pp == 0 and gpus % (tp * pp) == 0:
            return gpus // (tp * pp), pp, tp
    return None
    # END SOLUTION
