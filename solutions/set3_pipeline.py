"""第 3 组（下）：流水线并行 | Set 3, second part: pipeline parallel

模型按层切成几个阶段（stage），每个 rank 一个阶段；一个 batch 切成 m 个微批次，依次流过各个阶段。
阶段 s 的前向要等阶段 s - 1 送来激活值，反向要等阶段 s + 1 送来梯度。一个动作写成 ("F", i) 或
("B", i)：第 i 个微批次的前向或反向，i 从 0 数。
先运行 minidist start-exercises my-exercises，在那个文件夹里写。
检查：minidist check 3.8 --src my-exercises（全组：check 3）。

The model is cut by layers into stages, one per rank; a batch is cut into m micro-batches that flow
through the stages. The forward of stage s waits for the activation from stage s - 1, its backward
for the gradient from stage s + 1. An action is ("F", i) or ("B", i): forward or backward of
micro-batch i, counting from 0.
Run minidist start-exercises my-exercises first, and write in that folder.
To check: minidist check 3.8 --src my-exercises (the set: check 3).
"""

import torch
import torch.distributed as dist
from torch import nn


def naive_order(m):
    """3.8 朴素与 GPipe 的顺序 | The orders of naive and GPipe (5 min)

    两个函数，各返回一个阶段的动作列表（这两种调度里，每个阶段的列表都一样）。naive_order(m)：
    一个微批次的前向和反向都做完，才轮到下一个。gpipe_order(m)：先做完所有前向，再做所有反向，
    都按微批次 0, 1, ..., m - 1 的顺序。
    提示：列表里一共有 2 * m 个动作。

    Two functions; each returns the list of actions of a stage (with these two schedules it is the
    same for all stages). naive_order(m): forward and backward of one micro-batch are finished
    before the next one begins. gpipe_order(m): first all forwards, then all backwards, both in the
    order 0, 1, ..., m - 1.
    Hint: there are 2 * m actions in the list.
    """
    # BEGIN HINT 3.8
    # naive：F0 B0 F1 B1 …；gpipe：F0 F1 … B0 B1 …。用列表推导式。
    #
    # naive: F0 B0 F1 B1 ...; gpipe: F0 F1 ... B0 B1 ... Use list comprehensions.
    # END HINT
    # BEGIN SOLUTION 3.8
    return [(kind, i) for i in range(m) for kind in "FB"]
    # END SOLUTION


def gpipe_order(m):
    """3.8 的第二个函数，见上 | The second function of 3.8, see above."""
    # BEGIN SOLUTION 3.8
    return [(kind, i) for kind in "FB" for i in range(m)]
    # END SOLUTION


def one_f_one_b(stage, stages, m):
    """3.9 1F1B 的顺序 | The order of 1F1B (20 min)

    返回第 stage 个阶段（从 0 数，共 stages 个）在 1F1B 调度下的动作列表。预热：先做 stages -
    stage - 1 个前向（m 更小时就是 m 个）。稳定期：一个前向、一个反向，交替进行，直到前向做完。
    收尾：做完剩下的反向。前向和反向各自按微批次的顺序。例：最后一个阶段没有预热，F0 B0 F1 B1
    ...。
    提示：预热的个数正好是这个阶段后面还有几个阶段，第一个梯度回来时刚好需要它。

    Return the list of actions of stage number `stage` (from 0, of `stages`) in the 1F1B schedule.
    Warm-up: stages - stage - 1 forwards first (or m, if m is smaller). Steady: one forward and one
    backward in turn, until the forwards are used up. Cool-down: the remaining backwards. Forwards
    and backwards each come in the order of micro-batches. Example: the last stage has no warm-up,
    F0 B0 F1 B1 ...
    Hint: the warm-up is the number of stages behind this one, which is when the
    first gradient comes back.
    """
    # BEGIN HINT 3.9
    # warmup = min(m, stages - stage - 1)。然后对 i in range(m)：如果 warmup + i < m，加 ("F",
    # warmup + i)；再加 ("B", i)。
    #
    # warmup = min(m, stages - stage - 1). Then for i in range(m): add ("F", warmup + i) if
    # warmup + i < m; then add ("B", i).
    # END HINT
    # BEGIN SOLUTION 3.9
    warmup = min(m, stages - stage - 1)
    order = [("F", i) for i in range(warmup)]
    for i in range(m):
        if warmup + i < m:
            order.append(("F", warmup + i))
        order.append(("B", i))
    return order
    # END SOLUTION


def bubble(schedule, stages, m):
    """3.10 气泡与在途的微批次 | Bubble, and micro-batches in flight (15 min)

    两个函数，schedule 是 "naive"、"gpipe" 或 "1f1b"，所有阶段一样快。bubble(schedule, stages,
    m)：每个阶段空闲的时间占总时间的比例（总时间从第一个动作开始到最后一个结束）。
    in_flight(schedule, stage, stages, m)：第 stage 个阶段上，最多同时有几个微批次做完了前向、
    还没做完反向，也就是要存着几份激活值。
    提示：流水线装满要 stages - 1 格，排空也要；GPipe 和 1F1B 的气泡一样大，差别在内存。

    Two functions; schedule is "naive", "gpipe" or "1f1b", and all stages are equally fast.
    bubble(schedule, stages, m): the fraction of the total time (from the start of the first action
    to the end of the last) for which a stage is idle. in_flight(schedule, stage, stages, m): the
    largest number of micro-batches on stage number `stage` whose forward is done and whose backward
    is not, which is how many activations it has to keep.
    Hint: filling the pipeline takes stages -
    1 slots, and so does draining it; GPipe and 1F1B have the same bubble and differ in memory.
    """
    # BEGIN HINT 3.10
    # gpipe、1f1b：(stages - 1) / (m + stages - 1)；naive：任何时候只有一个阶段在工作，(stages
    # - 1) / stages。在途：gpipe 是 m，naive 是 1，1f1b 是预热的个数加 1：min(m, stages -
    #   stage)。
    #
    # gpipe, 1f1b: (stages - 1) / (m + stages - 1); naive: one stage works at any time,
    # (stages - 1) / stages. In flight: m for gpipe, 1 for naive, and for 1f1b the warm-up plus one:
    # min(m, stages - stage).
    # END HINT
    # BEGIN SOLUTION 3.10
    if schedule == "naive":
        return (stages - 1) / stages
    return (stages - 1) / (m + stages - 1)
    # END SOLUTION


def in_flight(schedule, stage, stages, m):
    """3.10 的第二个函数，见上 | The second function of 3.10, see above."""
    # BEGIN SOLUTION 3.10
    return {"naive": 1, "gpipe": m, "1f1b": min(m, stages - stage)}[schedule]
    # END SOLUTION


def run_stage(module, order, inputs, targets, loss_fn, shape):
    """3.11 执行一个阶段 | Run one stage (45 min)

    在每个 rank 上执行它的动作列表 order；阶段的编号就是 dist.get_rank()，module 是这个阶段的模
    型。inputs 和 targets 是 m 个微批次的列表，第一个阶段用 inputs[i] 作输入，最后一个阶段用
    loss_fn(输出, targets[i]) 算损失；阶段之间传递的激活值（和梯度）形状都是 shape，float32。做
    完以后，每个参数的 .grad 是整个 batch 平均损失的梯度（每个微批次的损失除以 m）。最后一个阶
    段返回整个 batch 的损失（float），其余返回 None。
    - F：得到输入（第一个阶段取 inputs[i]，其余从前一个阶段 recv），算出输出，发给下一个阶段；
      最后一个阶段改为算损失。
    - B：最后一个阶段对损失 backward()；其余从下一个阶段收到输出的梯度，y.backward(梯度)。然后
      把输入的梯度 x.grad 发给前一个阶段。发送一律用 isend，最后再统一 wait：1F1B 里，一边在发激
      活值、另一边在发梯度，都用 send 就会互相等待。
    提示：收到的输入要先 requires_grad_()，它的
      .grad 才会有值；发送激活值时用 y.detach()。

    Run on every rank its list of actions; the number of the stage is dist.get_rank(), and module is
    its part of the model. inputs and targets are lists of m micro-batches; the first stage takes
    inputs[i], the last computes loss_fn(output, targets[i]); activations (and gradients) between
    stages have the given shape, float32. Afterwards every parameter's .grad is the gradient of the
    mean loss of the whole batch (each micro-batch's loss divided by m). The last stage returns the
    loss of the whole batch (a float), the others None.
    - F: get the input (the first stage: inputs[i]; the others recv it from the stage before),
      compute the output, send it to the next stage; the last stage computes the loss instead.
    - B: the last stage calls backward() on its loss; the others receive the gradient of their
      output from the next stage, and call y.backward(gradient). Then send the input's gradient,
      x.grad, to the stage before. Always send with isend and wait at the very end: in 1F1B one side
      sends an activation while the other sends a gradient, and with send they would wait for each
      other.
    Hint: a received input needs requires_grad_() to get a .grad; send y.detach().
    """
    # BEGIN HINT 3.11
    # 用一个字典 held[i] = (x, y) 记住前向的输入和输出（最后一个阶段的 y 是除以 m 的损失），B
    # 时 held.pop(i)。works 列表收集所有 isend 的返回值，循环之后逐个 wait。
    #
    # Keep held[i] = (x, y), input and output of a forward (on the last stage y is the loss divided
    # by m), and held.pop(i) in B. Collect what isend returns in a list, and wait for all of it
    # after the loop.
    # END HINT
    # BEGIN SOLUTION 3.11
    stage, last = dist.get_rank(), dist.get_world_size() - 1
    held, works, total = {}, [], 0.0
    for kind, i in order:
        if kind == "F":
            if stage == 0:
                x = inputs[i]
            else:
                x = torch.empty(shape)
                dist.recv(x, stage - 1)
                x.requires_grad_()
            y = module(x)
            if stage == last:
                y = loss_fn(y, targets[i]) / len(inputs)
                total += y.item()
            else:
                works.append(dist.isend(y.detach(), stage + 1))
            held[i] = x, y
        else:
            x, y = held.pop(i)
            if stage == last:
                y.backward()
            else:
                grad = torch.empty(shape)
                dist.recv(grad, stage + 1)
                y.backward(grad)
            if stage > 0:
                works.append(dist.isend(x.grad, stage - 1))
    for work in works:
        work.wait()
    return total if stage == last else None
    # END SOLUTION


def train_pipeline(model, batches, loss_fn, lr, m):
    """3.12 训练 GPT | Train the GPT (20 min)

    把流水线的部分拼起来。model.layers() 是依次执行的层，个数能被 rank 的个数整除：阶段 r 取连
    续的第 r 份，用 nn.Sequential 包起来。batches[i] 是第 i 步的 (inputs, targets)，每个 rank
    都拿到；切成 m 个微批次（沿第 0 维）。每一步：用 1F1B 的顺序和 run_stage 求梯度，SGD（学习
    率 lr）只更新自己这个阶段，清空梯度。返回每一步的损失（float 的列表），每个 rank 都一样：最
    后一个阶段把它广播给大家。损失要和单进程训练一样。
    提示：激活值的形状是 (每个微批次的行数, seq, model.config.width)。

    Put the pipeline part together. model.layers() are the layers in order, a multiple of the number
    of ranks: stage r takes the r-th run of them, in an nn.Sequential. batches[i] is (inputs,
    targets) of step i, the same on every rank; cut it into m micro-batches (dimension 0). In every
    step: get the gradients with run_stage in 1F1B order, step SGD (learning rate lr) on your own
    stage only, clear the gradients. Return the loss of every step (a list of float), the same on
    every rank: the last stage broadcasts it. The losses have to be those of a single process.
    Hint: activations have the shape (rows of a micro-batch, seq, model.config.width).
    """
    # BEGIN HINT 3.12
    # 广播损失：loss = run_stage(...)；t = torch.tensor(loss or 0.0)；dist.broadcast(t, n - 1)；
    # losses.append(t.item())。
    #
    # loss = run_stage(...); t = torch.tensor(loss or 0.0); dist.broadcast(t, n - 1);
    # losses.append(t.item()).
    # END HINT
    # BEGIN SOLUTION 3.12
    rank, n = dist.get_rank(), dist.get_world_size()
    layers = model.layers()
    share = len(layers) // n
    module = nn.Sequential(*layers[rank * share : (rank + 1) * share])
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    losses = []
    for inputs, targets in batches:
        shape = (len(inputs) // m, inputs.shape[1], model.config.width)
        order = one_f_one_b(rank, n, m)
        loss = run_stage(module, order, inputs.chunk(m), targets.chunk(m), loss_fn, shape)
        optimizer.step()
        optimizer.zero_grad()
        t = torch.tensor(loss or 0.0)
        dist.broadcast(t, n - 1)
        losses.append(t.item())
    return losses
    # END SOLUTION
