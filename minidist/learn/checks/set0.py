"""Set 0, collectives: the classic wrong answers. `run0.py` runs them."""

from __future__ import annotations

from minidist.learn.checks import Exercise, wrong

_BOTH = """    works = [dist.irecv(received, (rank - 1) % n), dist.isend(x, (rank + 1) % n)]
    for work in works:
        work.wait()
"""
_SEND = """        if place < reach and place + reach < n:
            dist.send(x, (place + reach + root) % n)
        elif reach <= place < 2 * reach:
            dist.recv(x, (place - reach + root) % n)
"""
_PHASE_2 = """        received = pass_on(chunks[(rank + 1 - k) % n])
        chunks[(rank - k) % n] = received
"""

EXERCISES = (
    Exercise("0.1", "pass_on", (
        wrong(
            "all send first",
            "所有 rank 都停在 send 上：大家都先发送，没有人在接收，所以谁的 send 都完成不了。先"
            "用 irecv 和 isend 把两件事都开始，再等待。",
            "Every rank stands in send: everybody sends first, nobody receives, so no send "
            "completes. Start both with irecv and isend, and wait afterwards.",
            (_BOTH, "    dist.send(x, (rank + 1) % n)\n    dist.recv(received, (rank - 1) % n)\n"),
            story=r"deadlock(.*: waiting in send){4}",
        ),
        wrong(
            "all receive first",
            "所有 rank 都停在 recv 上：大家都先等着收，没有人发送。先用 irecv 和 isend 把两件事"
            "都开始，再等待。",
            "Every rank stands in recv: everybody waits for a message first, and nobody sends "
            "one. Start both with irecv and isend, and wait afterwards.",
            (_BOTH, "    dist.recv(received, (rank - 1) % n)\n    dist.send(x, (rank + 1) % n)\n"),
            story=r"deadlock(.*: waiting in recv){4}",
        ),
        wrong(
            "the other way",
            "方向反了：这是右邻的数据。要发给右邻 (rank + 1) % n，从左邻 (rank - 1) % n 接收。",
            "The wrong way round: this came from the right. Send to the right, (rank + 1) % n, "
            "and receive from the left, (rank - 1) % n.",
            ("dist.irecv(received, (rank - 1) % n), dist.isend(x, (rank + 1) % n)",
             "dist.irecv(received, (rank + 1) % n), dist.isend(x, (rank - 1) % n)"),
        ),
        wrong(
            "own data",
            "返回的还是自己的 x：收到的数据在 recv 写入的那个张量里。",
            "What comes back is your own x: the data that arrived is in the tensor given to recv.",
            ("    return received", "    return x"),
        ),
        wrong(
            "not waited",
            "没有等 irecv 完成就用了结果：wait() 之前，张量里还是原来的内容。",
            "The result was used before irecv was done: until wait(), the tensor still holds "
            "what was in it before.",
            ("    received = torch.empty_like(x)", "    received = torch.zeros_like(x)"),
            ("    for work in works:\n        work.wait()\n", "    works[1].wait()\n"),
        ),
        wrong(
            "overwritten",
            "收到的数据写进了 x 自己，于是 x 被改掉了（而且 x 可能还没发完就被覆盖）。接收要用"
            "另一个张量。",
            "What arrives was written into x itself: x is changed (and may be overwritten "
            "before it has been sent). Receive into another tensor.",
            ("    return received", "    x.copy_(received)\n    return x"),
        ),
        wrong(
            "no circle",
            "圈的两端没有接上：rank 0 的左邻是最后一个 rank，最后一个的右邻是 rank 0。用 % n。",
            "The ends of the circle are not joined: left of rank 0 is the last rank, right of "
            "the last is rank 0. Use % n.",
            ("dist.isend(x, (rank + 1) % n)", "dist.isend(x, rank + 1)"),
            story="rank 4 does not exist",
        ),
    ), world=4),
    Exercise("0.2", "all_gather", (
        wrong(
            "own again",
            "每一轮传的都是自己的 x，所以除了自己的，到手的全是左邻的数据。要把上一轮收到的传下"
            "去：piece = pass_on(piece)。",
            "You pass your own x in every round, so all you ever get is your left neighbour's. "
            "Hand on what arrived in the round before: piece = pass_on(piece).",
            ("        piece = pass_on(piece)", "        piece = pass_on(x)"),
        ),
        wrong(
            "in order of arrival",
            "数据都到了，但按到达的顺序放，各 rank 的结果不一样：第 i 轮收到的是 rank (rank - "
            "i) % n 的。",
            "Everything arrived, but it is in the order of arrival, other on every rank: what "
            "comes in round i belongs to rank (rank - i) % n.",
            ("        rows[(rank - i) % n] = piece", "        rows[i] = piece"),
            ("    rows = [x] * n\n", "    rows = [x] * n  # own row first\n"),
        ),
        wrong(
            "mirrored",
            "各行放反了：数据从左边来，第 i 轮的是 rank (rank - i) % n 的，不是 rank + i 的。",
            "The rows are mirrored: data comes from the left, so round i brings that of rank "
            "(rank - i) % n, not of rank + i.",
            ("rows[(rank - i) % n] = piece", "rows[(rank + i) % n] = piece"),
        ),
        wrong(
            "one round short",
            "少了一轮：n 个 rank 要 n - 1 轮，有一行没有收到。",
            "One round is missing: n ranks need n - 1 rounds, and one row never arrived.",
            ("    for i in range(1, n):", "    for i in range(1, n - 1):"),
        ),
        wrong(
            "one round too many",
            "结果对，但多转了一轮：第 n 轮收到的是自己的数据，白发了一次。n - 1 轮就够了。",
            "The result is right, but there was one round too many: what arrives in round n is "
            "your own. n - 1 rounds are enough.",
            ("    for i in range(1, n):", "    for i in range(1, n + 1):"),
        ),
        wrong(
            "end to end",
            "接成了一条长的一维张量；要的是 [n, k]，每个 rank 一行：用 torch.stack，不是 "
            "torch.cat。",
            "They were joined into one long 1-D tensor; wanted is [n, k], a row per rank: "
            "torch.stack, not torch.cat.",
            ("torch.stack(rows)", "torch.cat(rows)"),
        ),
        wrong(
            "library",
            "结果对，但用了现成的集合通信：这一题只用 pass_on。",
            "The result is right, but it came from a ready-made collective: use only pass_on here.",
            ("        piece = pass_on(piece)\n", "        piece = pass_on_with_the_library(piece, rank, n)\n"),
            ("    rank, n = dist.get_rank(), dist.get_world_size()\n",
             "    def pass_on_with_the_library(x, rank, n):\n        parts = [torch.empty_like(x) for _ in range(n)]\n"
             "        dist.all_gather(parts, x)\n        return parts[(rank - 1) % n]\n\n"
             "    rank, n = dist.get_rank(), dist.get_world_size()\n"),
        ),
    ), world=4),
    Exercise("0.3", "tree_broadcast", (
        wrong(
            "one by one",
            "值对了，但都是 root 一个一个发的：它要发 n - 1 次，别人都在等。已经拿到数据的 rank "
            "也要帮忙往下传。",
            "The values are right, but the root sent to everybody one by one: n - 1 sends, "
            "while the others wait. Ranks that have the data have to pass it on as well.",
            ("    place = (rank - root) % n\n    reach = 1\n    while reach < n:\n",
             "    place = (rank - root) % n\n    reach = 1\n    for other in range(n):\n"
             "        if place == 0 and other != rank:\n            dist.send(x, other)\n"
             "        elif place and other == rank:\n            dist.recv(x, root)\n    while False:\n"),
        ),
        wrong(
            "root ignored",
            "不管 root 是谁，发出去的总是 rank 0 的值：要用离 root 的距离 (rank - root) % n，换"
            "回 rank 时再加上 root。",
            "Whatever the root, it is rank 0's values that are sent: use the distance (rank - "
            "root) % n, and add root again to get a rank.",
            ("    place = (rank - root) % n\n", "    place, root = rank, 0\n"),
        ),
        wrong(
            "not a power of two",
            "收和发对不上：有的 rank 在发给没有在收的 rank。最常见的原因：rank 的个数不是 2 的"
            "幂，最后一轮里有的接收者并不存在，所以发之前要检查 place + reach < n。",
            "Sends and receives do not match: some rank sends to one that is not receiving. The "
            "usual reason: the number of ranks is no power of two, and some receivers of the "
            "last round do not exist, so test that place + reach < n before sending.",
            ("        if place < reach and place + reach < n:\n", "        if place < reach:\n"),
            story=r"deadlock|rank \d+ does not exist",
        ),
        wrong(
            "library",
            "结果对，但用了 dist.broadcast：这一题要用 send 和 recv 自己写。",
            "The result is right, but it came from dist.broadcast: write it with send and recv.",
            ("    while reach < n:\n", "    dist.broadcast(x, root)\n    while False:\n"),
        ),
        wrong(
            "too few rounds",
            "轮数不够，离 root 最远的 rank 没有收到：循环要继续到 reach >= n 为止"
            "（ceil(log2(n)) 轮）。",
            "Too few rounds: the ranks farthest from the root received nothing. Go on until "
            "reach >= n (ceil(log2(n)) rounds).",
            ("    while reach < n:", "    while reach < n // 2:"),
        ),
        wrong(
            "too early",
            "有的 rank 还没收到就先转发了，传出去的是它自己的旧值：只有 place < reach 的 rank "
            "已经有数据。",
            "Some rank passed on before it had received, and sent its own old values: only "
            "places below reach have the data.",
            (_SEND, "        if place % 2 == 0 and place + 1 < n and reach == 1:\n"
                    "            dist.send(x, (place + 1 + root) % n)\n"
                    "        elif place % 2 == 1 and reach == 1:\n"
                    "            dist.recv(x, (place - 1 + root) % n)\n"
                    "        elif reach > 1 and place < reach and place + reach < n:\n"
                    "            dist.send(x, (place + reach + root) % n)\n"
                    "        elif reach > 1 and reach <= place < 2 * reach:\n"
                    "            dist.recv(x.clone(), (place - reach + root) % n)\n"),
        ),
    ), world=5),
    Exercise("0.4", "ring_all_reduce", (
        wrong(
            "second phase shifted",
            "第二阶段差了一块：第一阶段之后，rank r 上完整的是第 (r + 1) % n 块，所以第 k 轮要"
            "发第 (r + 1 - k) % n 块。",
            "The second phase is off by one chunk: after the first, the complete chunk of rank "
            "r is (r + 1) % n, so round k sends chunk (r + 1 - k) % n.",
            (_PHASE_2, "        received = pass_on(chunks[(rank - k) % n])\n"
                       "        chunks[(rank - k - 1) % n] = received\n"),
        ),
        wrong(
            "added twice",
            "第二阶段又加了一遍：这时收到的已经是完整的和，要替换自己的块，不是加上去。",
            "The second phase added again: what arrives there is a complete sum and replaces "
            "your chunk.",
            ("        chunks[(rank - k) % n] = received", "        chunks[(rank - k) % n] = chunks[(rank - k) % n] + received"),
        ),
        wrong(
            "first phase only",
            "只做了第一阶段：每个 rank 只有一块是完整的和，其余是部分和。还要再转一圈，把完整的"
            "块发给大家。",
            "Only the first phase was done: each rank has one complete chunk and partial sums "
            "elsewhere. Go round once more to hand out the complete ones.",
            ("    for k in range(n - 1):\n        received = pass_on(chunks[(rank + 1 - k) % n])",
             "    for k in range(0):\n        received = pass_on(chunks[(rank + 1 - k) % n])"),
        ),
        wrong(
            "one round short",
            "第一阶段少了一轮：n 个 rank 的数要加 n - 1 次才齐。",
            "The first phase is one round short: adding up n ranks takes n - 1 rounds.",
            ("    for k in range(n - 1):\n        received = pass_on(chunks[(rank - k) % n])",
             "    for k in range(n - 2):\n        received = pass_on(chunks[(rank - k) % n])"),
        ),
        wrong(
            "mean",
            "你求的是平均值，这一题要的是和。",
            "You took the mean; the sum is asked for.",
            ("    return torch.cat(chunks)[: x.numel()].view(x.shape)",
             "    return torch.cat(chunks)[: x.numel()].view(x.shape) / n"),
        ),
        wrong(
            "no padding",
            "元素个数不是 n 的倍数时，chunk 切出来的块大小不一（甚至块数不够）：先补 0 到 n 的"
            "倍数。",
            "When the number of elements is no multiple of n, chunk gives chunks of different "
            "sizes (or too few): pad with zeros to a multiple of n first.",
            ("    padding = -flat.numel() % n", "    padding = 0"),
            story=r"Received data size|size of tensor|list index out of range",
        ),
        wrong(
            "padding left",
            "补的 0 没有去掉，结果比 x 长：拼起来之后取前 x.numel() 个，再恢复形状。",
            "The padding is still there, and the result is longer than x: take the first "
            "x.numel() elements before restoring the shape.",
            ("[: x.numel()].view(x.shape)", ""),
        ),
        wrong(
            "everything every round",
            "和是对的，但每轮发的都是整个 x，共 n - 1 份：那是“转一圈求和”，通信量是环形的 n / "
            "2 倍。要切块，每轮只发一块。",
            "The sum is right, but the whole x went round in every step: n - 1 times its size, "
            "n / 2 times what a ring needs. Cut it into chunks and send one per round.",
            ("    flat = x.flatten()\n",
             "    total, piece = x.clone(), x\n    for _ in range(n - 1):\n"
             "        piece = pass_on(piece)\n        total = total + piece\n    return total\n"
             "    flat = x.flatten()\n"),
        ),
        wrong(
            "library",
            "结果对，但用了 dist.all_reduce：这一题要用 pass_on 自己写。",
            "The result is right, but it came from dist.all_reduce: write it with pass_on.",
            ("    flat = x.flatten()\n", "    total = x.clone()\n    dist.all_reduce(total)\n    return total\n    flat = x.flatten()\n"),
        ),
        wrong(
            "x changed",
            "x 自己被改掉了：flatten 和 chunk 可能只是 x 的视图，在视图上 += 会改到 x。用 a = a "
            "+ b，或先 clone。",
            "x itself was changed: flatten and chunk may be views of x, and += on a view "
            "changes x. Use a = a + b, or clone first.",
            ("    flat = torch.cat([flat, flat.new_zeros(padding)])", "    flat = torch.cat([flat, flat.new_zeros(padding)]) if padding else flat"),
            ("        chunks[(rank - k - 1) % n] = chunks[(rank - k - 1) % n] + received", "        chunks[(rank - k - 1) % n] += received"),
        ),
    ), world=4),
    Exercise("0.5", "all_reduce_cost", (
        wrong(
            "half a ring",
            "环形只算了一半：n - 1 轮求和之后，还有 n - 1 轮把结果发给大家。",
            "Only half of the ring is counted: after n - 1 rounds of adding, n - 1 more hand "
            "the result round.",
            ("    return 2 * (n - 1), 2 * (n - 1) / n * nbytes", "    return n - 1, (n - 1) / n * nbytes"),
        ),
        wrong(
            "whole buffer per round",
            "环形每轮只发一块，即 nbytes / n，不是全部。",
            "A ring sends one chunk per round, nbytes / n, not everything.",
            ("    return 2 * (n - 1), 2 * (n - 1) / n * nbytes", "    return 2 * (n - 1), 2 * (n - 1) * nbytes"),
        ),
        wrong(
            "factor 2",
            "2 × nbytes 只是 n 很大时的极限；准确的是 2(n-1)/n × nbytes，n = 2 时只有它的一半。",
            "2 x nbytes is the limit for many ranks; exactly it is 2(n-1)/n x nbytes, which for "
            "n = 2 is half of that.",
            ("2 * (n - 1) / n * nbytes", "2 * nbytes"),
        ),
        wrong(
            "one way up the tree",
            "树要走两遍：先往上求和，再往下广播，所以轮数是 2 * ceil(log2(n))。",
            "The tree is walked twice: up to add, down to broadcast, so there are 2 * "
            "ceil(log2(n)) rounds.",
            ("        return 2 * depth, depth * nbytes", "        return depth, depth * nbytes"),
        ),
        wrong(
            "not rounded up",
            "rank 的个数不是 2 的幂时，轮数要向上取整：ceil(log2(n))。",
            "When the number of ranks is no power of two, round up: ceil(log2(n)).",
            ("        depth = ceil(log2(n))", "        depth = int(log2(n))"),
        ),
        wrong(
            "average rank",
            "central 里最忙的是 rank 0：它要发回 n - 1 份；别的 rank 才只发一份。",
            "In central the busiest is rank 0, which sends n - 1 copies back; the other ranks "
            "send one.",
            ("        return 2, (n - 1) * nbytes", "        return 2, nbytes"),
        ),
        wrong(
            "one rank",
            "只有一个 rank 时没有通信：返回 (0, 0)。",
            "With one rank nothing is sent: (0, 0).",
            ("    if n == 1:\n        return 0, 0\n", ""),
        ),
    ), world=1),
    Exercise("0.6", "average_and_step", (
        wrong(
            "sum",
            "用的是梯度之和：要除以 world_size。学习率等于悄悄放大了 world_size 倍，损失从第二"
            "步起就不一样。",
            "The sum of the gradients was used: divide by the world size. The learning rate is "
            "silently multiplied, and losses differ from the second step on.",
            (" / dist.get_world_size()", ""),
        ),
        wrong(
            "local",
            "没有通信：每个 rank 用自己的梯度更新，各 rank 的模型就此分道扬镳。",
            "Nothing was communicated: every rank stepped with its own gradient, and the copies "
            "drift apart.",
            ("ring_all_reduce(p.grad) / dist.get_world_size()", "p.grad"),
        ),
        wrong(
            "uphill",
            "方向反了：参数要减去 lr * 梯度，现在损失在上升。",
            "The wrong direction: subtract lr * gradient. As it is, the loss goes up.",
            ("            p -= lr", "            p += lr"),
        ),
        wrong(
            "gradients kept",
            "没有清空 .grad：下一步的 backward 会加在旧的梯度上。",
            ".grad was not cleared: the next backward adds to the old gradients.",
            ("            p.grad = None\n", ""),
        ),
        wrong(
            "library",
            "结果对，但用了 dist.all_reduce：这一题要用自己写的 ring_all_reduce。",
            "The result is right, but it came from dist.all_reduce: use your own "
            "ring_all_reduce here.",
            ("            p -= lr * ring_all_reduce(p.grad)", "            dist.all_reduce(p.grad)\n            p -= lr * p.grad"),
        ),
        wrong(
            "leaf",
            "参数是需要梯度的叶子张量，不能直接就地修改：放进 with torch.no_grad():。",
            "A parameter is a leaf that requires a gradient and cannot be changed in place as "
            "it is: do it under torch.no_grad().",
            ("    with torch.no_grad():", "    if True:"),
            story="a leaf Variable that requires grad",
        ),
    ), seconds=20.0),
)  # fmt: skip
