# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 0. 分布式训练基础概念 | Foundations of Distributed Training

# %% [markdown]
# <div lang="zh">
#
# **目标**：第一次让几个进程对话；用 send/recv 亲手拼出 all-reduce；把基础文档里的每个数字和每段示意代码真正跑一遍。读完后你会知道数据并行、模型并行、混合并行各在切什么、传什么，并能看懂后面各章的术语（文末有中英术语表）。
#
# **时间**：约 2 小时。**对应文档**：基础篇《分布式训练基础概念》全文。**先读**：会写 PyTorch 训练循环即可，不需要 GPU，也不需要任何分布式经验。
#
# **练习**：在终端运行 `minidist start-exercises my-exercises` 领一份，写好后用 `minidist check 0 --src my-exercises` 检查。只看中文：在任意单元格运行 `%lang zh`。
#
# </div>
#
# <div lang="en">
#
# **Goals**: let processes talk for the first time; build all-reduce with your own hands from send and receive; really run every number and every code sketch of the document on foundations. Afterwards you know what data, model and hybrid parallelism cut and what they send, and the vocabulary of the later chapters (a Chinese-English glossary closes this one).
#
# **Time**: about 2 hours. **Follows** the whole document on foundations. **Before this**: you can write a PyTorch training loop; no GPU and no experience with several processes is needed.
#
# **Exercises**: in a terminal, `minidist start-exercises my-exercises` makes your copy and `minidist check 0 --src my-exercises` checks it. English only: run `%lang en` in any cell.
#
# </div>

# %%
# %load_ext minidist
import torch
import torch.distributed as dist
import minidist as md
from minidist.comm import collectives as coll
from minidist.learn import claims, figures

# %% [markdown]
# ## 0.1 什么是分布式训练 | What distributed training is

# %% [markdown]
# <div lang="zh">
#
# 把一次训练拆给多个进程（通常一个进程管一张卡）一起做。无非三件事：
#
# - **切模型**：每个进程只放一部分；
# - **切数据**：每个进程读不同的数据；
# - **合梯度**：算完后把结果合起来，大家再一起更新。
#
# 进程之间**没有共享的变量**，只能互发消息。先认识三个词：
#
# | 词 | 意思 |
# |---|---|
# | rank | 进程的编号，从 0 开始 |
# | world size | 一共几个进程 |
# | 进程组 process group | 能互相通信的一组进程 |
#
# `%%ranks 4` 让一个单元格在 4 个真实的进程里同时运行。这样的单元格里有现成的 `rank`、`world_size`、`torch` 和 `dist`；它用到的笔记本里的值和函数会一起送过去。（笔记本自己没有 `rank`。更多用法：`%%ranks?`。）
#
# **先猜**：下面的 `x` 在 4 个进程里会打印出几个不同的值？
#
# </div>
#
# <div lang="en">
#
# Share one training run among several processes (usually one process per card). There are only three things to do:
#
# - **cut the model**: each process holds a part;
# - **cut the data**: each process reads different data;
# - **combine the gradients**: put the results together, then everybody updates.
#
# Processes **share no variables**; they can only send messages. Three words first:
#
# | word | meaning |
# |---|---|
# | rank | the number of a process, from 0 |
# | world size | how many there are |
# | process group | processes that can talk to each other |
#
# `%%ranks 4` runs a cell in 4 real processes at once. In such a cell `rank`, `world_size`, `torch` and `dist` are given; values and functions of the notebook that it uses are sent along. (In the notebook itself there is no `rank`. All options: `%%ranks?`.)
#
# **Predict**: how many different values of `x` will the 4 processes print?
#
# </div>

# %%
x = torch.tensor([1.0])

# %%
# %%ranks 4
x += rank                                  # every process changes its own copy
print(f"rank {rank} of {world_size}: x = {x.item()}")

# %%
x        # and here in the notebook?

# %% [markdown]
# <div lang="zh">
#
# 四个。`x` 被**复制**到每个进程，谁改谁的；笔记本里的 `x` 一动没动。要让别人知道，必须发消息。最基本的消息是**点对点（point-to-point, P2P）**：一个 `send`，一个 `recv`。
#
# </div>
#
# <div lang="en">
#
# Four. `x` was **copied** into each process, each changed its own, and the notebook's is untouched. To let others know, a message must be sent. The most basic kind is **point-to-point (P2P)**: one `send`, one `recv`.
#
# </div>

# %%
# %%ranks 4
if rank == 0:
    coll.send(torch.tensor([3.14]), dst=1)
if rank == 1:
    box = torch.zeros(1)                   # room for what arrives
    coll.recv(box, src=0)
    print(f"rank 1 received {box.item():.2f}")

# %% [markdown]
# ### 出错：大家都先发 | A mistake: everybody sends first

# %% [markdown]
# <div lang="zh">
#
# 每个 rank 把一块数据交给右邻居、从左邻居收一块。看起来很自然的写法：先发，再收。
#
# **先猜**：会发生什么？（耐心等一下：minidist 要过几秒才敢断定。）
#
# </div>
#
# <div lang="en">
#
# Every rank hands a piece of data to its right neighbour and takes one from the left. The natural way to write it: send, then receive.
#
# **Predict**: what will happen? (Be patient: minidist waits some seconds before it is sure.)
#
# </div>

# %% tags=["raises-exception"]
# %%ranks 4
right, left = (rank + 1) % world_size, (rank - 1) % world_size
mine, theirs = torch.full((4_000_000,), float(rank)), torch.empty(4_000_000)
coll.send(mine, right)
coll.recv(theirs, left)

# %% [markdown]
# <div lang="zh">
#
# **死锁（deadlock）**：`send` 要等对方来收，而对方也在 `send` 里等。单看哪个 rank 都没错，凑在一起谁也走不动。错误信息里能看到 4 个 rank 都停在同一行；方括号里依次是：在等哪个 rank、多大的张量、第几次（从 0 数起；这里数的是发给同一个 rank 的消息，集合通信则数组里的第几次；所有 rank 组成的组编号是 0）、等了多久。（有的通信库会把小消息先存进缓冲区，于是侥幸成功，消息一变大才卡住，这样的错更难找。在这里，小消息也会卡住。）
#
# 修法：用不等待的 `isend` / `irecv`，两个都发起之后再等。
#
# </div>
#
# <div lang="en">
#
# A **deadlock**: `send` waits for the other side to receive, and the other side is waiting in its own `send`. No rank is wrong by itself; together they are stuck. The message shows all 4 ranks at the same line. The brackets say which rank it waits for, how large the tensor is, the how-manyth such call this is (counted from 0: of messages to the same rank, or of collectives in a group; group 0 is all ranks), and for how long it has waited. (Some libraries put small messages into a buffer and get through by luck, until a message is larger; that is harder to find. Here small ones get stuck as well.)
#
# The remedy: `isend` and `irecv`, which do not wait; start both, then wait.
#
# </div>

# %%
def swap(outgoing, incoming):
    """Send to the right neighbour while receiving from the left one."""
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    sending, receiving = coll.isend(outgoing, right), coll.irecv(incoming, left)
    sending.wait()
    return receiving.wait()

# %%
# %%ranks 4
mine, theirs = torch.full((4_000_000,), float(rank)), torch.empty(4_000_000)
print(f"from my left neighbour: {swap(mine, theirs)[0].item():.0f}")

# %% [markdown]
# ## 0.2 为什么需要分布式训练 | Why distribute

# %% [markdown]
# <div lang="zh">
#
# 文档给了三个理由：模型太大、数据太多、时间等不起。数据多，例如 GPT-3 的 3000 亿个 token 约是 1.2 TB 文本（每个 token 约 4 字节）。另外两条，我们把数算一遍。
#
# 训练时，每个参数不只占参数本身：混合精度 + Adam 要 2（参数）+ 2（梯度）+ 12（fp32 主副本、动量、方差）= **16 字节**。计算量约为 6 × 参数 × token 次浮点运算；放不下激活值时，反向要把前向**再算一遍**（重算），约 8 倍。下面按 8 算。
#
# **先猜**：1750 亿参数的 GPT-3，至少要几张 80 GB 的卡才放得下它的模型状态？一张卡要训练多少年？
#
# </div>
#
# <div lang="en">
#
# The document gives three reasons: the model is too large, there is too much data, time is too short. As for data, the 300 billion tokens of GPT-3 are about 1.2 TB of text (some 4 bytes per token). For the other two, let us do the arithmetic.
#
# In training a parameter takes more than itself: mixed precision with Adam needs 2 (parameter) + 2 (gradient) + 12 (fp32 master copy, momentum, variance) = **16 bytes**. Compute is about 6 × parameters × tokens floating point operations, or 8 if activations do not fit and backward **computes the forward again** (recomputation). The code below counts 8.
#
# **Predict**: how many cards of 80 GB does it take at least to hold the model states of GPT-3 with its 175 billion parameters? How many years would one card train?
#
# </div>

# %%
from minidist.plan import formulas

parameters, tokens = 175e9, 300e9
states = sum(formulas.state_bytes(parameters).values())
print(f"model states: {states / 1e12:.1f} TB = {states / 80e9:.0f} cards of 80 GB (parameters "
      f"alone in 16 bits: {2 * parameters / 1e9:.0f} GB = {2 * parameters / 80e9:.1f} cards)")
one = formulas.training_seconds(parameters, tokens, gpus=1, flops_per_gpu=140e12)
many = formulas.training_seconds(parameters, tokens, gpus=1024, flops_per_gpu=140e12)
print(f"one card at 140 TFLOP/s: {one / 86400 / 365:.0f} years; 1024 cards: {many / 86400:.0f} days")

# %% [markdown]
# <div lang="zh">
#
# 140 TFLOP/s 是 1024 张 A100 上真实达到的速度（Narayanan 2021，5.1 节，34 天）。
#
# </div>
#
# <div lang="en">
#
# 140 TFLOP/s is what was really reached on 1024 A100 (Narayanan 2021, section 5.1; 34 days).
#
# </div>

# %% [markdown]
# ### 45 天变 6 天 | From 45 days to 6

# %% [markdown]
# <div lang="zh">
#
# 文档讲的经历：单卡 45 天，8 台机器 6 天。**先猜**：加速比和效率各是多少？按 Amdahl 定律，不能并行的部分最多占多少？
#
# </div>
#
# <div lang="en">
#
# The document tells of a job that took 45 days on one card and 6 days on 8 machines. **Predict**: what are its speed-up and efficiency? By Amdahl's law, how large can the part be that does not run in parallel?
#
# </div>

# %%
speedup = 45 / 6
serial = (8 / speedup - 1) / (8 - 1)           # Amdahl: speedup = 1 / (serial + (1 - serial) / n)
print(f"speed-up {speedup:.1f} on 8 machines, efficiency {speedup / 8:.0%}, "
      f"serial part at most {serial:.1%}")

# %% [markdown]
# <div lang="zh">
#
# 效率 94%：毫无损失的话应该是 45/8 ≈ 5.6 天，多出来的 0.4 天是通信、等待和负载不均。这是很好的成绩，前提是每台机器只有一张卡；如果每台有 8 张，同样的“45 天变 6 天”就只有 12% 的效率了。所以说加速比时要讲清楚：**几张卡，对什么基准**。
#
# 文档也提醒：通信、同步、负载，哪一环出问题，都可能还不如单卡。我们量一下这台机器：总 batch 不变，分给 1、2、4 个 rank，一个大一点的模型和一个极小的模型。
#
# **先猜**：4 个 rank 能快 4 倍吗？极小的那个呢？（想想这台机器有几个核。）
#
# </div>
#
# <div lang="en">
#
# An efficiency of 94%: without any loss it would have been 45/8 = 5.6 days; communication, waiting and imbalance took 0.4 of the 6. That is very good, provided each machine had one card; with 8 cards in each, the same "45 days to 6" would be an efficiency of 12%. So whoever quotes a speed-up should say: **on how many cards, against what**.
#
# The document also warns that with bad communication, synchronisation or balance it may be slower than one card. Let us measure this machine: the same total batch on 1, 2 and 4 ranks, for a larger model and a tiny one.
#
# **Predict**: will 4 ranks be 4 times as fast? And with the tiny one? (How many cores has this machine?)
#
# </div>

# %%
import time
from minidist.train.data import TextBatches, load_tokens

def step_seconds(config, rows):
    """Best of 8 steps of data parallel training on `rows` rows in total."""
    model = md.DDP(md.build_gpt(config))
    batches, best = TextBatches(load_tokens(), config.seq, rows), float("inf")
    for step in range(8):
        inputs, targets = batches.at(step, coll.rank(), coll.world_size())
        coll.barrier()
        start = time.perf_counter()
        md.loss_fn(model(inputs), targets).backward()
        best = min(best, time.perf_counter() - start)
    return best

larger = md.GPTConfig(seq=64, width=128, layers=4), 32
tiny = md.GPTConfig(seq=8, width=16, layers=2, heads=2), 4
seconds = {name: {n: max(md.launch(step_seconds, n, *job)) for n in (1, 2, 4)}
           for name, job in (("larger model", larger), ("tiny model", tiny))}

# %%
figures.scaling_curves(seconds);

# %% [markdown]
# <div lang="zh">
#
# 这份输出来自一台两核的机器，所以 2 个 rank 以内才有真正的加速（你的机器核多，会更好看）；极小的模型分得越开越慢，因为一次通信比全部计算还贵。分布式不是免费的：**算得够多，传得够少**，才划算。
#
# </div>
#
# <div lang="en">
#
# These outputs come from a machine with two cores, hence real speed-up only up to 2 ranks (yours may have more); the tiny model gets slower the more it is spread out, because one message costs more than all of its compute. Distribution is not free: it pays when there is **enough to compute and little to send**.
#
# </div>

# %% [markdown]
# ## 0.3 数据并行与模型并行 | Data parallel and model parallel

# %% [markdown]
# <div lang="zh">
#
# 两种基本的分工方式，文档用一张表对比。我们补上本课程里的对应章节，以及需要小心的地方：
#
# | 维度 | 数据并行 | 模型并行 |
# |---|---|---|
# | 思路 | 每卡一份完整模型，分数据 | 每卡一部分模型，每份数据都要经过所有部分 |
# | 适用 | 模型放得进单卡，数据多 | 模型放不进单卡 |
# | 通信 | 梯度：all-reduce | 激活值及其梯度：P2P（按层切的流水线），或层内的 all-reduce（张量并行） |
# | 典型框架 | PyTorch DDP、Horovod | Megatron-LM；DeepSpeed（它最出名的 ZeRO 其实是**数据并行**的省显存做法，见第 5 章） |
# | 本课程 | 第 2、4、5 章 | 第 3 章 |
#
# “通信模式”这一行里有两个词：P2P 我们已经用过了，下面看 all-reduce 和它的亲戚。
#
# </div>
#
# <div lang="en">
#
# Two basic ways of sharing the work, which the document compares in a table. Here it is with the chapters of this course, and with what needs care:
#
# | | data parallel | model parallel |
# |---|---|---|
# | idea | a whole model on each card, the data are dealt out | a part of the model on each card, all data pass through all parts |
# | for | models that fit on a card, much data | models that do not fit on one card |
# | communication | gradients: all-reduce | activations and their gradients: P2P (a pipeline, cut by layers), or all-reduce inside the layers (tensor parallel) |
# | frameworks | PyTorch DDP, Horovod | Megatron-LM; DeepSpeed (whose best-known part, ZeRO, is a memory-saving way of **data** parallelism, see chapter 5) |
# | here | chapters 2, 4, 5 | chapter 3 |
#
# The line on communication has two words in it: P2P we have used, now for all-reduce and its relatives.
#
# </div>

# %% [markdown]
# ### 集合通信 | Collectives

# %% [markdown]
# <div lang="zh">
#
# **集合通信（collective）** 是一组 rank 一起完成的一次数据交换：每个 rank 都要调用，次序相同。常用的就是下面五种（all-to-all 本课程的策略用不到，专家并行会用）。rank r 的初始数据是 `[r, 10+r, 20+r, 30+r]`，看它们各变成什么（`--out after` 把每个 rank 的 `after` 带回笔记本，成为一个列表）：
#
# </div>
#
# <div lang="en">
#
# A **collective** is an exchange of data that a group of ranks makes together: every rank must call it, in the same order. The usual five follow (the strategies of this course do without all-to-all; expert parallelism needs it). Rank r starts with `[r, 10+r, 20+r, 30+r]`; see what becomes of it (`--out after` brings every rank's `after` back to the notebook, as a list):
#
# </div>

# %%
# %%ranks 4 --out after
def start():
    return torch.arange(4) * 10 + rank

after = {"start": start(), "broadcast": coll.broadcast(start(), src=2),
         "all_reduce": coll.all_reduce(start()),
         "reduce_scatter": coll.reduce_scatter(torch.empty(1, dtype=torch.int64), start()),
         "all_gather": coll.all_gather(torch.empty(16, dtype=torch.int64), start()),
         "all_to_all": coll.all_to_all(torch.empty(4, dtype=torch.int64), start())}
after = {name: value.tolist() for name, value in after.items()}

# %%
for name in after[0]:
    shown = [str(on_rank[name] if len(on_rank[name]) < 9 else "all 16") for on_rank in after]
    print(f"{name:<15}", *(f"{text:<17}" for text in shown))

# %% [markdown]
# <div lang="zh">
#
# | 集合通信 | 做什么 | 谁用它 |
# |---|---|---|
# | broadcast | 一个 rank 的数据给所有人 | 开始时统一参数 |
# | all-reduce | 求和，人人都得到整个结果 | DDP 的梯度；张量并行 |
# | reduce-scatter | 求和，每人只得到自己那一段 | ZeRO、FSDP 的梯度 |
# | all-gather | 每人一段，拼成整份，人人都有 | ZeRO、FSDP 的参数 |
# | all-to-all | 每人给每人一段 | 专家并行（MoE；本课程不涉及） |
# | （send / recv） | 点对点，不是集合通信 | 流水线 |
#
# 一条值得记住的等式：**all-reduce = reduce-scatter + all-gather**。DDP、ZeRO、FSDP 的差别，几乎就在于把这两半放在什么时候做。
#
# </div>
#
# <div lang="en">
#
# | collective | what it does | who uses it |
# |---|---|---|
# | broadcast | one rank's data to everybody | equal parameters at the start |
# | all-reduce | add up, everybody gets the whole result | DDP's gradients; tensor parallel |
# | reduce-scatter | add up, everybody gets their own part | gradients in ZeRO and FSDP |
# | all-gather | everybody's part, put together, for all | parameters in ZeRO and FSDP |
# | all-to-all | from everybody a part for everybody | expert parallel (MoE; not in this course) |
# | (send / recv) | point-to-point, no collective | pipelines |
#
# One equation worth remembering: **all-reduce = reduce-scatter + all-gather**. DDP, ZeRO and FSDP differ in little more than when they do these two halves.
#
# </div>

# %% [markdown]
# ### 自己做一个环形 all-reduce | Build a ring all-reduce

# %% [markdown]
# <div lang="zh">
#
# 只用上面的 `swap`。每个 rank 把数据切成 N 块，围成一圈：
#
# 1. **reduce-scatter，N−1 轮**：每轮把一块部分和传给右邻居，把左边来的加到自己的对应块上。结束时每个 rank 有一块是完整的和；
# 2. **all-gather，N−1 轮**：把完整的块沿着圈传一遍。
#
# 为了看清是谁的贡献，rank r 的每块都填 10^r：和里出现哪几位，就有谁的数据。
#
# **先猜**：4 个 rank、4 块，转几轮之后人人都是 1111？每个 rank 一共发了几块？
#
# </div>
#
# <div lang="en">
#
# With nothing but `swap` from above. Every rank cuts its data into N chunks; the ranks form a circle:
#
# 1. **reduce-scatter, N−1 rounds**: each round, pass one partial sum to the right and add what comes from the left to your own chunk. At the end every rank has one chunk with the complete sum;
# 2. **all-gather, N−1 rounds**: pass the complete chunks round the circle.
#
# To see whose data are in a sum, rank r fills its chunks with 10^r: each digit stands for one rank.
#
# **Predict**: with 4 ranks and 4 chunks, after how many rounds does everybody have 1111? How many chunks has each rank sent?
#
# </div>

# %%
def ring_all_reduce(chunks, show=lambda chunks: None):
    n = world_size
    assert len(chunks) == n, f"{n} ranks need {n} chunks, got {len(chunks)}"
    show(chunks)
    for k in range(n - 1):                                 # reduce-scatter
        out, into = (rank - k) % n, (rank - k - 1) % n
        chunks[into] += swap(chunks[out], torch.empty_like(chunks[into]))
        show(chunks)
    for k in range(n - 1):                                 # all-gather
        out, into = (rank + 1 - k) % n, (rank - k) % n
        swap(chunks[out], chunks[into])
        show(chunks)
    return chunks

# %%
# %%ranks 4 --out rounds
rounds = []
chunks = [torch.tensor(10**rank) for _ in range(world_size)]
with md.measure(memory=False, timeline=False) as m:
    ring_all_reduce(chunks, show=lambda now: rounds.append([int(c) for c in now]))
print(f"{m.traffic['send'].calls} chunks sent")

# %%
for k in range(len(rounds[0])):
    phase = "start" if k == 0 else "reduce-scatter" if k < len(rounds) else "all-gather"
    print(f"{k} {phase:<15}", "  ".join(f"rank {r}: {rounds[r][k]}" for r in range(2)))

# %% [markdown]
# <div lang="zh">
#
# （只显示 rank 0 和 1。）2(N−1) = 6 轮，每轮 1/N 的数据，所以每个 rank 发送的是数据的 **2(N−1)/N** 倍，与 N 几乎无关：这就是环的妙处。
#
# 还有别的算法。`minidist/comm/algorithms.py` 里是四种，都只用 send/recv 写成（B 是数据的字节数）：
#
# | 算法 | 轮数 | 最忙的 rank 发送 |
# |---|---|---|
# | central 集中（参数服务器）：一个 rank 收齐、求和、发回 | 2 | (N−1)·B |
# | tree 树 | 2·log₂N | log₂N·B |
# | ring 环 | 2(N−1) | 2(N−1)/N·B |
# | direct 直接 | 2 | 2(N−1)/N·B，但同时与所有人通信 |
#
# **先猜**：小消息和大消息，谁更快？（`--fast` 关掉刚才发现死锁的那些检查，只给算法本身计时；为此要启动新的 rank，之前的变量就没有了。）
#
# </div>
#
# <div lang="en">
#
# (Only ranks 0 and 1 are shown.) 2(N−1) = 6 rounds of 1/N of the data each, so every rank sends **2(N−1)/N** times its data, almost independent of N: that is the beauty of the ring.
#
# There are other algorithms. `minidist/comm/algorithms.py` has four, all written from send and receive (B: the bytes of the data):
#
# | algorithm | rounds | the busiest rank sends |
# |---|---|---|
# | central (a parameter server): one rank collects, adds and sends back | 2 | (N−1)·B |
# | tree | 2·log₂N | log₂N·B |
# | ring | 2(N−1) | 2(N−1)/N·B |
# | direct | 2 | 2(N−1)/N·B, but to everybody at once |
#
# **Predict**: which is fastest for a small message, and for a large one? (`--fast` leaves out the checks that found the deadlock, so that only the algorithm is timed; that needs new ranks, without the earlier variables.)
#
# </div>

# %%
# %%ranks 4 --out measured --fast
from minidist.comm.algorithms import ALL_REDUCE
import time

measured = {}
for name, all_reduce in ALL_REDUCE.items():
    data = torch.ones(1_000_000)
    with md.measure(memory=False, timeline=False) as m:
        all_reduce(data)
    assert data[0] == world_size
    best = [float("inf")] * 2
    for i, size in enumerate((256, 1_000_000)):
        for _ in range(5):
            data = torch.ones(size)
            coll.barrier()
            start = time.perf_counter()
            all_reduce(data)
            best[i] = min(best[i], time.perf_counter() - start)
    measured[name] = (m.traffic.sent_bytes, *best)

# %%
from minidist.comm.algorithms import ALL_REDUCE, all_reduce_cost
for name in ALL_REDUCE:
    sent = max(on_rank[name][0] for on_rank in measured)
    small, large = (max(on_rank[name][i] for on_rank in measured) * 1e3 for i in (1, 2))
    rounds_, formula = all_reduce_cost(name, 4, 4e6)
    print(f"{name:<8}{rounds_} rounds, busiest rank sends {sent / 1e6:4.1f} MB (formula "
          f"{formula / 1e6:4.1f}); 1 kB {small:5.2f} ms, 4 MB {large:5.1f} ms")

# %% [markdown]
# <div lang="zh">
#
# 字节数与公式分毫不差。时间不能当真：4 个进程挤在两个核上，走的是内存，每次都不同，而且每条消息都要切换一次进程。central 和 tree 总共只有 6 条消息，ring 和 direct 有 24 条，所以在这里更慢，数据小时尤其明显。换成真实网络，用“轮数 × 延迟 + 字节 ÷ 带宽”来看 64 张卡（每轮 10 微秒，每秒 50 GB）：
#
# </div>
#
# <div lang="en">
#
# The bytes are exactly those of the formula. The times are those of one machine's memory, where 4 ranks share two cores: they change from run to run, and every message costs a switch. Central and tree send 6 messages in all, ring and direct 24, which makes these slower here, above all for small data. On a real network, "rounds × latency + bytes ÷ bandwidth" for 64 cards (10 µs per round, 50 GB per second) gives:
#
# </div>

# %%
import matplotlib.pyplot as plt
from minidist.comm.algorithms import seconds as modelled
from minidist.learn.style import new_axes, set_legend

ax = new_axes(None, (7.5, 3.4), "both")
sizes = [4**k for k in range(5, 16)]
for name in ALL_REDUCE:
    ax.plot(sizes, [modelled(name, 64, size, 10e-6, 50e9) * 1e3 for size in sizes], label=name)
ax.set(xscale="log", yscale="log", xlabel="bytes", ylabel="ms")
ax.set_title(figures.label("all-reduce on 64 cards, modelled", "64 卡 all-reduce，模型估算"),
             loc="left", fontsize=10)
set_legend(ax)

# %% [markdown]
# <div lang="zh">
#
# 小消息看轮数：central 和 direct（2 轮）最快，tree（12 轮）其次，ring（126 轮）最慢。大消息看字节：ring 和 direct 远胜 central 和 tree。central 的中心要应付另外 63 张卡，消息大到约 45 kB 就不如 tree 了。（direct 在图上最好，但它要求每张卡同时与 63 张卡直连，只在节点内或小规模时现实。）NCCL 正是按大小在环与树之间切换。这也是 DDP 要分桶的原因（第 2 章）。
#
# </div>
#
# <div lang="en">
#
# Small messages are about rounds: central and direct (2) are first, the tree (12) follows, the ring (126) is last. Large ones are about bytes: ring and direct leave central and tree behind. Central's root has to serve 63 others, so from about 45 kB on even the tree beats it. (Direct looks best here, but needs every card connected to 63 others at once, which is realistic inside a node or at small scale.) NCCL switches between ring and tree by size. It is also why DDP uses buckets (chapter 2).
#
# </div>

# %% [markdown]
# ## 0.4 数据并行详解 | Data parallel in detail

# %% [markdown]
# <div lang="zh">
#
# 文档的例子：4 张卡，batch 64，每卡 16 条；各自算梯度，用 all-reduce 取平均，再一起更新。我们就按这组数字跑。
#
# **先猜**：4 份梯度平均后，与一次算 64 条的梯度相差多少？
#
# </div>
#
# <div lang="en">
#
# The document's example: 4 cards, a batch of 64, 16 samples each; every card computes its gradient, an all-reduce takes the mean, all update. We run just these numbers.
#
# **Predict**: how far is the mean of the 4 gradients from the gradient of all 64 at once?
#
# </div>

# %%
def make_data(n=64):
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(n, 8, generator=generator)
    return data, data.sin().sum(1, keepdim=True)

def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

loss_fn = torch.nn.functional.mse_loss

# %%
# %%ranks 4
data, target = make_data()
whole, mine = make_model(), make_model()
loss_fn(whole(data), target).backward()                     # all 64 at once

n = 64 // world_size
rows = slice(n * rank, n * rank + n)                        # my 16 samples
loss_fn(mine(data[rows]), target[rows]).backward()
alone = mine[0].weight.grad.clone()
for p in mine.parameters():
    coll.all_reduce(p.grad, "mean")

def apart(a, b):
    return ((a - b).norm() / b.norm()).item()

print(f"my {n} alone: off by {apart(alone, whole[0].weight.grad):.0%}; "
      f"mean of {world_size} x {n}: off by {apart(mine[0].weight.grad, whole[0].weight.grad):.0e}")

# %% [markdown]
# ### 文档的 DDP 代码 | The document's DDP sketch

# %% [markdown]
# <div lang="zh">
#
# 文档的示意代码先初始化进程组，再用 DDP 包住模型，循环照常写：
#
# ```python
# model = DDP(model)
# for data, target in dataloader:
#     loss = loss_fn(model(data), target)
#     loss.backward()
#     optimizer.step()
# ```
#
# 照搬到我们这里只需把 `nccl` 换成 CPU 上的 `gloo`（`%%ranks` 已经初始化好了），把 `torch` 的 DDP 换成 `md.DDP`。
#
# 不过这段循环里**少了一行**。**先猜**：是哪一行？少了它，损失曲线会怎样？
#
# </div>
#
# <div lang="en">
#
# The document's sketch initialises the process group and wraps the model in DDP; the loop is as always:
#
# ```python
# model = DDP(model)
# for data, target in dataloader:
#     loss = loss_fn(model(data), target)
#     loss.backward()
#     optimizer.step()
# ```
#
# To run it here, `nccl` becomes `gloo` on CPUs (`%%ranks` has initialised it), and torch's DDP becomes `md.DDP`.
#
# But this loop **lacks a line**. **Predict**: which one, and what does the loss curve look like without it?
#
# </div>

# %%
# %%ranks 4 --out losses
def train(zero_grad, steps=30):
    model = md.DDP(make_model())                            # as in the sketch
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data, target = make_data()
    n, losses = 64 // world_size, []
    rows = slice(n * rank, n * rank + n)
    for step in range(steps):
        loss = loss_fn(model(data[rows]), target[rows])
        loss.backward()
        optimizer.step()
        if zero_grad:
            optimizer.zero_grad()                           # the missing line
        losses.append(loss.item())
    return losses

losses = {"as printed": train(False), "with zero_grad": train(True)}

# %%
def reference(steps=30):
    model, (data, target), losses = make_model(), make_data(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_fn(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

def mean_over_ranks(losses, name):
    return [sum(each) / len(each) for each in zip(*(on_rank[name] for on_rank in losses))]

figures.loss_curves({"one process": reference(), **{name: mean_over_ranks(losses, name)
                     for name in losses[0]}}, "one process");

# %% [markdown]
# <div lang="zh">
#
# 少的是 `optimizer.zero_grad()`。梯度只加不清，等于动量系数为 1：一开始降得更快，随后来回震荡，停不下来（这不是分布式的错，单进程也一样）。补上之后，4 个 rank 与单进程完全重合。此外真正的脚本还需要：
#
# - `local_rank` 从 `torchrun` 设的环境变量 `LOCAL_RANK` 来，并先 `torch.cuda.set_device(local_rank)`；
# - `DistributedSampler`，否则每张卡读的是**同样的**数据；
# - 结束时 `destroy_process_group()`。`with md.init():` 把首尾都包办了（第 7 章）。
#
# </div>
#
# <div lang="en">
#
# `optimizer.zero_grad()` is missing. Gradients only pile up, which is momentum with a coefficient of 1: faster at first, then the loss swings to and fro and never settles (no fault of distribution, one process does the same). With it 4 ranks lie exactly on the single process. A real script needs more:
#
# - `local_rank` comes from the environment variable `LOCAL_RANK` that `torchrun` sets, and `torch.cuda.set_device(local_rank)` comes first;
# - a `DistributedSampler`, or all cards read the **same** data;
# - `destroy_process_group()` at the end. `with md.init():` takes care of both ends (chapter 7).
#
# </div>

# %% [markdown]
# ### 大 batch 配大学习率？ | A larger batch, a larger learning rate?

# %% [markdown]
# <div lang="zh">
#
# 文档说 batch 太大收敛会变慢，于是“线性缩放”：卡数翻倍，学习率也调大。准确地说：同样多的数据，大 batch 走的**步数**少了，每一步却仍然只走一个平均梯度那么远。第 2 章做了完整的实验，结论如下（这里现场重测）：
#
# </div>
#
# <div lang="en">
#
# The document says that a large batch converges more slowly, and answers with "linear scaling": twice the cards, a larger learning rate. To be exact: for the same data a large batch makes fewer **steps**, and each still goes only as far as a mean gradient. Chapter 2 has the whole experiment; the verdict, measured again here:
#
# </div>

# %%
claims.show("n")

# %% [markdown]
# ## 0.5 模型并行详解 | Model parallel in detail

# %% [markdown]
# <div lang="zh">
#
# 模型放不下一张卡，就切开。文档的示意代码把两个 `Linear(1024, 1024)` 放到两张卡上，前向时把激活值搬过去。先照抄它的 `__init__` 试试：
#
# </div>
#
# <div lang="en">
#
# When a model does not fit on a card, cut it. The document's sketch puts two `Linear(1024, 1024)` on two cards and moves the activation across in forward. First its `__init__` as printed:
#
# </div>

# %%
class ModelParallelModule(torch.nn.Module):
    def __init__(self):
        self.layer1 = torch.nn.Linear(1024, 1024)           # .to('cuda:0')
        self.layer2 = torch.nn.Linear(1024, 1024)           # .to('cuda:1')

try:
    ModelParallelModule()
except AttributeError as error:
    print(error)

# %% [markdown]
# <div lang="zh">
#
# 少了 `super().__init__()`，补上就好。更值得注意的是：那段代码是**一个**进程管两张卡，`x.to('cuda:1')` 在进程内搬数据，autograd 会自动把梯度搬回来。跨进程、跨机器时没有这种好事，反向要自己写：前向 `send` 激活值，反向 `send` 它的梯度。
#
# **先猜**：batch 为 8，两层之间前向传多少个数？反向呢？
#
# </div>
#
# <div lang="en">
#
# `super().__init__()` is missing; easily mended. More important: that code is **one** process with two cards, `x.to('cuda:1')` moves data inside it, and autograd moves the gradient back by itself. Between processes and machines nobody does that for you: forward `send`s the activation, backward `send`s its gradient.
#
# **Predict**: with a batch of 8, how many numbers cross between the two layers in forward? And in backward?
#
# </div>

# %%
def two_layers():
    torch.manual_seed(0)
    return torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024)

def naive_model_parallel(x, target):
    """Rank 0 has layer 1, rank 1 has layer 2. Returns this rank's layer with its gradients."""
    layer = two_layers()[rank]
    if rank == 0:
        hidden = layer(x)
        coll.send(hidden.detach(), dst=1)                   # forward: the activation
        gradient = coll.recv(torch.empty_like(hidden), src=1)
        hidden.backward(gradient)                           # go on where rank 1 stopped
    else:
        hidden = coll.recv(torch.empty(8, 1024), src=0).requires_grad_()
        loss_fn(layer(hidden), target).backward()
        coll.send(hidden.grad, dst=0)                       # backward: its gradient
    return layer

# %%
# %%ranks 2
torch.manual_seed(1)
x, target = torch.randn(8, 1024), torch.randn(8, 1024)
with md.measure(memory=False, timeline=False) as m:
    layer = naive_model_parallel(x, target)

both = two_layers()
loss_fn(both[1](both[0](x)), target).backward()             # the same in one process
same = torch.equal(layer.weight.grad, both[rank].weight.grad)
print(f"same gradients: {same}; sent {m.traffic.sent_bytes // 4:,} numbers; "
      f"my layer has {layer.weight.numel():,} weights")

# %% [markdown]
# <div lang="zh">
#
# 各传 8 × 1024 个数，而一层有一百多万个权重：数据并行要传的是**权重的梯度**。所以文档说“模型并行的通信量比数据并行大得多”，要看是哪种模型并行（下面的 h 是模型宽度）：
#
# </div>
#
# <div lang="en">
#
# 8 × 1024 numbers each way, while a layer has more than a million weights, and data parallelism sends the **gradients of weights**. So the document's "model parallelism communicates much more than data parallelism" depends on which kind is meant (h below is the width of the model):
#
# </div>

# %%
claims.show("d")

# %% [markdown]
# <div lang="zh">
#
# 文档建议用 NVLink 或 InfiniBand，对**张量并行**是对的：它每层都通信，而且计算必须等。看看同样 64 MB 的激活值，在不同的互连上要多久：
#
# </div>
#
# <div lang="en">
#
# The document recommends NVLink or InfiniBand, and for **tensor parallel** rightly so: it communicates in every layer, and compute has to wait. The same 64 MB of activations on different wires take:
#
# </div>

# %%
for wire, rate in (("10 Gbit Ethernet", 1.25e9), ("InfiniBand HDR, 200 Gbit", 25e9),
                   ("NVLink 4, one direction", 450e9)):
    print(f"{wire:<26}{64e6 / rate * 1e3:8.2f} ms")

# %% [markdown]
# ### 朴素的流水线 | The naive pipeline

# %% [markdown]
# <div lang="zh">
#
# 文档的经历：第 1–10 层在卡 0，第 11–20 层在卡 1，数据像流水线一样往后传。`md.split` 按层切开，`md.Pipeline(schedule="naive")` 就是上面手写的那套 send/recv。
#
# **先猜**：4 张卡，同一时刻有几张在工作？
#
# </div>
#
# <div lang="en">
#
# The document's story: layers 1-10 on card 0, layers 11-20 on card 1, data flow from card to card. `md.split` cuts by layers, and `md.Pipeline(schedule="naive")` is the hand-written send and receive from above.
#
# **Predict**: of 4 cards, how many work at the same time?
#
# </div>

# %%
# %%ranks 4 --out lines,loss
from minidist.train.data import TextBatches, load_tokens

config = md.GPTConfig(seq=32, width=64, layers=8)
inputs, targets = TextBatches(load_tokens(), 32, 16).at(0)
stages = md.split(md.build_gpt(config), world_size)
pipeline = md.Pipeline(stages[rank], schedule="naive", microbatches=4, loss_fn=md.loss_fn)
pipeline.step(inputs, targets)
with md.measure(memory=False, traffic=False) as m:
    loss = pipeline.step(inputs, targets)
print("my layers:", *stages[rank].layer_names)
lines = m.timeline
loss = None if loss is None else loss.item()             # only the last stage knows it

# %%
config = md.GPTConfig(seq=32, width=64, layers=8)
inputs, targets = TextBatches(load_tokens(), 32, 16).at(0)
alone = md.loss_fn(md.build_gpt(config)(inputs), targets).item()
print(f"loss: pipeline {loss[3]:.6f}, one process {alone:.6f}")
figures.gantt(figures.measured_slots(lines), unit="s", title=figures.label("naive, measured", "实测"))
figures.gantt(md.schedule("naive", 4, 4).simulate(f=1, b=2).slots,
              title=figures.label("naive, planned", "计划"));

# %% [markdown]
# <div lang="zh">
#
# 一张。每张卡都有四分之三的时间在等（上图是实测，下图是计划；数字是微批次编号。计划假设反向是前向的两倍长，这么小的模型并不守这个规矩）。怎样让它们同时忙起来，是第 3 章的主题：GPipe、1F1B、交错调度。
#
# </div>
#
# <div lang="en">
#
# One. Each card waits three quarters of the time (above as measured, below as planned; the numbers are micro-batches; the plan assumes a backward of twice the forward, and a model this small does not keep to that). How to keep all of them busy is the subject of chapter 3: GPipe, 1F1B, interleaving.
#
# </div>

# %% [markdown]
# ## 0.6 混合并行 | Hybrid parallel

# %% [markdown]
# <div lang="zh">
#
# 实际项目里通常几种一起用。文档列了三条，这里换成通行的叫法：
#
# | 文档的说法 | 通行的叫法 | 切什么 |
# |---|---|---|
# | 层间模型并行：按层切，解决显存 | 流水线并行（pipeline, PP） | 模型，按层 |
# | 层内数据并行：每层内部多卡并行 | 张量并行（tensor, TP） | 模型，层内的矩阵。叫“数据并行”容易误会：各卡算的是同一批数据 |
# | 流水线并行：微批次同时在不同阶段 | 流水线的**调度**（GPipe、1F1B） | 不再切模型，是让第一行的各阶段不空转的办法 |
#
# 再加上**数据并行（DP）**，就是所谓 3D 并行。卡排成一个网格（mesh），每个维度一种并行。4 个 rank 摆成 dp=2 × pp=2：
#
# **先猜**：rank 1 与谁在同一条流水线上，与谁交换梯度？
#
# </div>
#
# <div lang="en">
#
# Real projects usually combine several. The document lists three; here they are under their usual names:
#
# | the document says | usual name | what is cut |
# |---|---|---|
# | inter-layer model parallel: cut by layers, for memory | pipeline parallel (PP) | the model, by layers |
# | intra-layer "data parallel": several cards inside each layer | tensor parallel (TP) | the model, matrices inside layers. "Data parallel" is misleading here: all cards compute on the same data |
# | pipeline parallel: micro-batches in different stages at once | the **schedule** of the pipeline (GPipe, 1F1B) | nothing more is cut; it keeps the stages of the first row from idling |
#
# With **data parallel (DP)** this is called 3D parallelism. Cards form a grid (mesh), one dimension for each kind. 4 ranks as dp=2 × pp=2:
#
# **Predict**: with whom does rank 1 form a pipeline, and with whom does it exchange gradients?
#
# </div>

# %%
# %%ranks 4 --out step_loss
mesh = md.build_mesh(dp=2, pp=2)
peers = {axis: dist.get_process_group_ranks(mesh.get_group(axis)) for axis in ("pp", "dp")}
print(f"pipeline {peers['pp']}, gradients {peers['dp']}")

parallel = md.parallelize(md.build_gpt(config), mesh, dp="ddp", schedule="1f1b", microbatches=2)
optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-3)
batches, dp_rank = TextBatches(load_tokens(), 32, 16), mesh.get_local_rank("dp")
step_loss = []
for step in range(6):
    inputs, targets = batches.at(step, dp_rank, 2)          # each pipeline has half of the batch
    loss = parallel.step(inputs, targets)
    optimizer.step()
    optimizer.zero_grad()
    step_loss.append(None if loss is None else loss.item())

# %%
def one_process(steps=6):
    model = md.build_gpt(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches, losses = TextBatches(load_tokens(), 32, 16), []
    for step in range(steps):
        inputs, targets = batches.at(step)
        loss = md.loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

last_stages = [each for each in step_loss if each[0] is not None]    # they know the loss
hybrid = [sum(each) / 2 for each in zip(*last_stages)]
figures.loss_curves({"one process": one_process(), "dp 2 x pp 2": hybrid}, "one process");

# %% [markdown]
# <div lang="zh">
#
# 四个 rank、两种并行，与单进程的曲线重合。第 6 章把三种都用上，并讨论怎么选。
#
# </div>
#
# <div lang="en">
#
# Four ranks, two kinds of parallelism, and the curve of one process. Chapter 6 uses all three and discusses how to choose.
#
# </div>

# %% [markdown]
# ## 0.7 小结 | Summary

# %% [markdown]
# <div lang="zh">
#
# - 分布式训练 = 切模型、切数据、合结果；进程之间只有消息。
# - 大模型放不下（16 字节/参数），也等不起；但通信、等待、不均衡会吃掉收益，说效率时讲清基准。
# - send/recv 之上是集合通信；all-reduce = reduce-scatter + all-gather；环发数据的 2(N−1)/N 倍，树的轮数少。
# - 数据并行传梯度；流水线传激活值（最少）；张量并行每层都传（多，而且要等）。
# - 示意代码跑起来之前，先和单进程对照：少一行 `zero_grad()` 或 `super().__init__()`，肉眼很难发现。
#
# 文档最后的建议很中肯：没有万能的方案，**先用小规模实验验证，再上全量**。本课程就是这样做的：每一步都先与单进程对照。`minidist compare` 一条命令就能把所有策略都对照一遍。
#
# **延伸阅读**：Thakur et al. 2005, *Optimization of Collective Communication Operations in MPICH*；Patarasuk & Yuan 2009（环）；NVIDIA nccl-tests 的 PERFORMANCE.md；Narayanan et al. 2021, *Efficient Large-Scale Language Model Training on GPU Clusters*，第 2、5.1 节。
#
# **练习**：`minidist check 0`。**下一章**：概览。
#
# </div>
#
# <div lang="en">
#
# - Distributed training = cut the model, cut the data, combine the results; between processes there are only messages.
# - Large models do not fit (16 bytes per parameter) and take too long; but communication, waiting and imbalance eat into the gain, so say what an efficiency refers to.
# - Collectives are built from send and receive; all-reduce = reduce-scatter + all-gather; the ring sends 2(N−1)/N times its data, the tree needs fewer rounds.
# - Data parallel sends gradients; a pipeline sends activations (least of all); tensor parallel sends in every layer (much, and compute waits).
# - Before trusting a sketch, compare it with one process: a missing `zero_grad()` or `super().__init__()` is hard to see.
#
# The document closes with sound advice: there is no silver bullet, **try it small, then go large**. This course does just that: every step is compared with a single process. `minidist compare` does it for all strategies with one command.
#
# **Further reading**: Thakur et al. 2005, *Optimization of Collective Communication Operations in MPICH*; Patarasuk & Yuan 2009 (ring); PERFORMANCE.md of NVIDIA's nccl-tests; Narayanan et al. 2021, *Efficient Large-Scale Language Model Training on GPU Clusters*, sections 2 and 5.1.
#
# **Exercises**: `minidist check 0`. **Next**: the overview.
#
# </div>

# %% [markdown]
# ## 术语表 | Glossary

# %% [markdown]
# <div lang="zh">
#
# | 中文 | English | 含义 |
# |---|---|---|
# | 参数 | parameter /pəˈræmɪtər/ | 训练要学的数 |
# | 梯度 | gradient /ˈɡreɪdiənt/ | 损失对参数的导数 |
# | 张量 | tensor /ˈtensər/ | 多维数组 |
# | 核（函数） | kernel /ˈkɜːrnl/ | 在 GPU 上运行的一个函数 |
# | 动量 | momentum /məˈmentəm/ | 优化器里梯度的滑动平均 |
# | 方差 | variance | Adam 里梯度平方的滑动平均 |
# | 主副本 | master copy | 16 位训练时另存的 32 位参数 |
# | 优化器状态 | optimizer states | 动量、方差、fp32 主副本等 |
# | 激活值 | activations | 前向算出、反向要用的中间结果 |
# | 进程组 | process group | 一起通信的进程 |
# | 编号 / 总数 | rank / world size | 进程的编号和个数 |
# | 节点 | node | 一台机器 |
# | 网格 | mesh | 排成几维的 rank，每维一种并行 |
# | 点对点 | point-to-point (P2P) | send / recv |
# | 集合通信 | collective | 一组进程共同完成的通信 |
# | 广播 | broadcast | 一份数据给所有人 |
# | 全归约 | all-reduce | 求和，人人得到结果 |
# | 归约散发 | reduce-scatter | 求和，各得一段 |
# | 全收集 | all-gather | 各出一段，人人得到整份 |
# | 全交换 | all-to-all | 每人给每人一段 |
# | 延迟 / 带宽 | latency / bandwidth | 每条消息的固定时间 / 每秒字节数 |
# | 死锁 | deadlock | 互相等待，谁也走不了 |
# | 掉队者 | straggler | 拖慢所有人的那个 rank |
# | 关键路径 | critical path | 决定总时间的那一串前后相依的操作 |
# | 数据并行 | data parallel (DP) | 每个 rank 一份完整模型，各读不同的数据 |
# | 模型并行 | model parallel | 模型切到多个 rank |
# | 张量并行 | tensor parallel (TP) | 切层内的矩阵 |
# | 部分和 | partial sum | 大小完整、还要与其他 rank 相加的结果 |
# | 序列并行 | sequence parallel (SP) | TP 之外的部分按序列切 |
# | 专家并行 | expert parallel (EP) | MoE 模型的各个专家放在不同 rank 上 |
# | 流水线并行 | pipeline parallel (PP) | 按层切成阶段 |
# | 阶段 | stage | 流水线的一段：连续的几层 |
# | 微批次 | micro-batch | batch 再切成的小份 |
# | 调度 | schedule | 每个 rank 做前向和反向的次序 |
# | 气泡 | bubble | 流水线里空等的时间 |
# | 在途 | in flight | 已做前向、还没做反向的微批次 |
# | 热身 | warm-up | 1F1B 里第一个反向之前的前向 |
# | 交错 | interleaved | 每个 rank 放几段不相邻的层的调度 |
# | 零气泡 | zero-bubble | 用权重梯度填气泡的调度 |
# | 桶 | bucket | 一起发送的一组梯度 |
# | 分片 | shard | 一个 rank 保管的那一份 |
# | 扁平缓冲区 | flat buffer | 首尾相接放着多个张量的一维数组 |
# | 预取 | prefetch | 提前收集下一个要用的参数 |
# | 卸载 | offload | 把状态放到主机内存或磁盘 |
# | 重算 | recomputation / activation checkpointing | 不存激活值，反向时再算一遍 |
# | 混合精度 | mixed precision | 16 位计算，32 位主副本 |
# | 梯度累积 | gradient accumulation | 几个微批次的梯度加起来再更新 |
# | 预热 | warm-up | 学习率从小升到大 |
# | 线性缩放 | linear scaling | 学习率随 batch 成正比 |
#
# </div>
#
# <div lang="en">
#
# | English | 中文 | meaning |
# |---|---|---|
# | parameter /pəˈræmɪtər/ | 参数 | a number that training learns |
# | gradient /ˈɡreɪdiənt/ | 梯度 | derivative of the loss with respect to the parameters |
# | tensor /ˈtensər/ | 张量 | array of several dimensions |
# | kernel /ˈkɜːrnl/ | 核（函数） | one function that runs on a GPU |
# | momentum /məˈmentəm/ | 动量 | running mean of gradients in the optimizer |
# | variance | 方差 | running mean of squared gradients in Adam |
# | master copy | 主副本 | 32-bit parameters kept beside 16-bit ones |
# | optimizer states | 优化器状态 | momentum, variance, fp32 master copy |
# | activations | 激活值 | results of forward that backward needs |
# | process group | 进程组 | processes that communicate together |
# | rank / world size | 编号 / 总数 | number of a process / how many there are |
# | node | 节点 | one machine |
# | mesh | 网格 | ranks in a grid, one kind of parallelism per dimension |
# | point-to-point (P2P) | 点对点 | send / recv |
# | collective | 集合通信 | communication that a group makes together |
# | broadcast | 广播 | one rank's data for all |
# | all-reduce | 全归约 | add up, everybody has the result |
# | reduce-scatter | 归约散发 | add up, everybody has a part |
# | all-gather | 全收集 | everybody gives a part, all have the whole |
# | all-to-all | 全交换 | from everybody a part for everybody |
# | latency / bandwidth | 延迟 / 带宽 | fixed time per message / bytes per second |
# | deadlock | 死锁 | waiting for each other, forever |
# | straggler | 掉队者 | the rank that slows all others down |
# | critical path | 关键路径 | the chain of steps, each waiting for the one before, that sets the total time |
# | data parallel (DP) | 数据并行 | whole model on each rank, different data |
# | model parallel | 模型并行 | the model is cut over ranks |
# | tensor parallel (TP) | 张量并行 | matrices inside layers are cut |
# | partial sum | 部分和 | a full-size result still to be added up over ranks |
# | sequence parallel (SP) | 序列并行 | what TP leaves whole is cut along the sequence |
# | expert parallel (EP) | 专家并行 | the experts of an MoE model are on different ranks |
# | pipeline parallel (PP) | 流水线并行 | cut by layers into stages |
# | stage | 阶段 | a part of a pipeline: some consecutive layers |
# | micro-batch | 微批次 | a piece of a batch |
# | schedule | 调度 | the order of forwards and backwards on each rank |
# | bubble | 气泡 | idle time in a pipeline |
# | in flight | 在途 | micro-batches after their forward and before their backward |
# | warm-up (of a pipeline) | 热身 | in 1F1B, the forwards before the first backward |
# | interleaved | 交错 | a schedule with several chunks of layers, not neighbours, per rank |
# | zero-bubble | 零气泡 | a schedule that fills the bubble with weight gradients |
# | bucket | 桶 | gradients that travel together |
# | shard | 分片 | the part that one rank keeps |
# | flat buffer | 扁平缓冲区 | one-dimensional array of several tensors end to end |
# | prefetch | 预取 | gather the next parameters ahead of time |
# | offload | 卸载 | keep states in host memory or on disk |
# | recomputation / activation checkpointing | 重算 | do not keep activations, compute them again |
# | mixed precision | 混合精度 | 16-bit compute, 32-bit master copy |
# | gradient accumulation | 梯度累积 | add gradients of micro-batches, then update |
# | warm-up (of the learning rate) | 预热 | raise it from small to large |
# | linear scaling | 线性缩放 | learning rate in proportion to the batch |
#
# </div>
