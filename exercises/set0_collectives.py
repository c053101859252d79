"""第 0 组：集合通信 | Set 0: collectives

只用点对点的收发，把集合通信自己写出来。每个函数会在所有 rank 上同时被调用，进程组已经建好：
dist.get_rank()、dist.get_world_size()；dist.send(t, 对方) 与 dist.recv(t, 对方) 会等到完成，
dist.isend 与 dist.irecv 立即返回一个 work，之后要 work.wait()。先把 t 建好（如
torch.empty_like(x)），recv 才能把数据放进去。
先运行 minidist start-exercises my-exercises，在那个文件夹里写。
检查：minidist check 0.1 --src my-exercises（全组：check 0）。

Write collectives yourself, from point-to-point messages alone. Each function is called on all ranks
at the same time, and the process group is there: dist.get_rank(), dist.get_world_size().
dist.send(t, peer) and dist.recv(t, peer) wait until they are done; dist.isend and dist.irecv return
a work at once, and work.wait() comes later. recv writes into a tensor that you make first (such as
torch.empty_like(x)).
Run minidist start-exercises my-exercises first, and write in that folder.
To check: minidist check 0.1 --src my-exercises (the set: check 0).
"""

from math import ceil, log2

import torch
import torch.distributed as dist


def pass_on(x):
    """0.1 传给右邻 | Pass it to the right (5 min)

    把所有 rank 想成一个圈：rank r 的右邻是 r + 1，最后一个的右邻是 rank 0。把自己的 x（任意形
    状）发给右邻，返回从左邻收到的张量。x 不要改动。
    提示：如果大家都先 send，谁也没有在 recv，谁的 send 都完成不了。

    Think of the ranks as a circle: the right neighbour of rank r is r + 1, and that of the last is
    rank 0. Send your x (any shape) to the right and return the tensor that comes from the left. x
    stays as it is.
    Hint: if everybody calls send first, nobody is receiving, and no send completes.
    """
    # TODO 0.1: 在这里写你的代码 | your code here
    raise NotImplementedError("0.1 还没有写 | not written yet")


def all_gather(x):
    """0.2 全收集 | All-gather (15 min)

    x：一维张量，每个 rank 上大小相同 [k]。返回 [n, k]：第 r 行是 rank r 的 x，在每个 rank 上都
    一样（n 是 rank 的个数）。只用 0.1 的 pass_on：转一圈，每一轮把上一轮收到的传下去，共 n - 1
    轮。
    提示：第 i 轮收到的是左边第 i 个 rank 的数据。

    x: a 1-D tensor of the same size [k] on every rank. Return [n, k] with rank r's x in row r, the
    same on every rank (n is the number of ranks). Use only pass_on of 0.1: go round the circle,
    handing on in each round what arrived in the round before, n - 1 rounds in all.
    Hint: in round i
    you receive the data of the i-th rank to your left.
    """
    # TODO 0.2: 在这里写你的代码 | your code here
    raise NotImplementedError("0.2 还没有写 | not written yet")


def tree_broadcast(x, root):
    """0.3 树形广播 | Broadcast along a tree (20 min)

    让每个 rank 的 x（任意形状）都就地变成 rank root 的值。每一轮，已经有数据的 rank 各发给一个
    还没有的，所以有数据的 rank 数每轮翻倍，共 ceil(log2(n)) 轮；不能由 root 一个一个地发给大家。
    rank 的个数 n 不一定是 2 的幂。
    提示：按离 root 的距离 place = (rank - root) % n 来想：root 的 place 是 0。

    Give every rank, in place, the values that x (any shape) has on rank root. In every round, each
    rank that has the data sends it to one that has not, so the number of ranks that have it
    doubles: ceil(log2(n)) rounds. The root must not send to everybody one by one. The number of
    ranks n need not be a power of two.
    Hint: think in distances from the root, place = (rank -
    root) % n: the root is place 0.
    """
    # TODO 0.3: 在这里写你的代码 | your code here
    raise NotImplementedError("0.3 还没有写 | not written yet")


def ring_all_reduce(x):
    """0.4 环形 all-reduce | Ring all-reduce (45 min)

    返回所有 rank 的 x 之和（和 x 形状相同，x 不改动），只用 pass_on，并且每个 rank 只发送约
    2(n-1)/n 个 x 的量。做法：把 x 展平、补 0 到 n 的倍数、切成 n 块。第一阶段 n - 1 轮：每轮把
    一块的部分和传给右邻，并把收到的加到自己的那一块上；之后每个 rank 恰好有一块是完整的和。第
    二阶段 n - 1 轮：把完整的块传一圈，收到的直接替换自己的。最后拼起来、去掉补的 0、恢复形状。
    提示：第一阶段第 k 轮（k 从 0 数），rank r 发送第 (r - k) % n 块，所以收到的是第 (r - k -
    1) % n 块。

    Return the sum of x over all ranks (the shape of x; x itself stays), using only pass_on, where
    every rank sends only about 2(n-1)/n times the size of x. How: flatten x, pad it with zeros to a
    multiple of n, cut it into n chunks. First phase, n - 1 rounds: pass the partial sum of one
    chunk to the right, and add what arrives to your own chunk; then each rank holds one chunk that
    is complete. Second phase, n - 1 rounds: send the complete chunks round, replacing your own by
    what arrives. Finally join them, cut off the padding, restore the shape.
    Hint: in round k of the
    first phase (from 0), rank r sends chunk (r - k) % n, so what arrives is chunk (r - k - 1) % n.
    """
    # TODO 0.4: 在这里写你的代码 | your code here
    raise NotImplementedError("0.4 还没有写 | not written yet")


def all_reduce_cost(algorithm, n, nbytes):
    """0.5 它们各要多少代价 | What they cost (10 min)

    n 个 rank 对 nbytes 字节做 all-reduce。返回 (轮数, 最忙的 rank 发送的字节数)。algorithm 是：
    - "central"：大家都发给 rank 0，它求和后再一个一个发回去。算 2 轮。
    - "tree"：沿着 0.3 的树加到 rank 0，再沿着树广播。每个方向 ceil(log2(n)) 轮；最忙的是根：广
      播时它每轮都发一次完整的 nbytes。
    - "ring"：0.4 的做法。n 为 1 时没有通信，返回 (0, 0)。
    提示：环形每轮只发 1/n。

    n ranks all-reduce nbytes bytes. Return (rounds, bytes that the busiest rank sends). algorithm:
    - "central": everybody sends to rank 0, which adds up and sends the result to each of them.
      Counted as 2 rounds.
    - "tree": up the tree of 0.3 to rank 0, then down again as a broadcast. ceil(log2(n)) rounds
      each way; the root is the busiest: in the broadcast it sends the whole nbytes in every round.
    - "ring": as in 0.4.
    With n = 1 nothing is sent: (0, 0).
    Hint: a ring sends 1/n in every round.
    """
    # TODO 0.5: 在这里写你的代码 | your code here
    raise NotImplementedError("0.5 还没有写 | not written yet")


def average_and_step(model, lr):
    """0.6 用自己的 all-reduce 训练 | Train with your own all-reduce (10 min)

    每个 rank 已经用自己的数据做完 backward()。用 0.4 的 ring_all_reduce 求每个参数的平均梯度，
    然后更新：参数 = 参数 - lr * 平均梯度，最后把 .grad 设为 None。不许用 dist.all_reduce。检查
    时会用它训练一个小 GPT，损失要和单进程训练一样。
    提示：更新参数要放在 torch.no_grad() 里。

    Every rank has run backward() on its own data. Take the mean gradient of every parameter with
    your ring_all_reduce of 0.4, update parameter = parameter - lr * mean gradient, and set .grad to
    None. dist.all_reduce is not allowed. The check trains a small GPT with it, to the same losses
    as a single process.
    Hint: parameters are updated under torch.no_grad().
    """
    # TODO 0.6: 在这里写你的代码 | your code here
    raise NotImplementedError("0.6 还没有写 | not written yet")
