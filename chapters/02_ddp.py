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
# # 2. DDP: 分布式数据并行 | Distributed Data Parallel

# %% [markdown]
# <div lang="zh">
#
# **目标**：亲手把单进程训练变成 4 个进程的数据并行训练，一共四步：逐参数 all-reduce → 拼成一个扁平缓冲区 → 分桶 → 与反向计算重叠。每一步都和单进程训练对照，并测出它发了多少次、多少字节、花了多少时间。读完后你能看懂 `minidist/parallel/ddp.py` 的每一行。
#
# **时间**：约 2 小时。**对应文档**：第 2 节（2.1 原理、2.2 关键特性、2.3 局限性）。**先读**：第 0 章（进程组与集合通信）；会写 PyTorch 训练循环。
#
# **练习**：先 `minidist start-exercises my-exercises`，在那里写；检查用 `minidist check 2 --src my-exercises`。只看中文：在任意单元格运行 `%lang zh`。
#
# </div>
#
# <div lang="en">
#
# **Goals**: turn single-process training into data parallel training on 4 processes with your own hands, in four steps: one all-reduce per parameter → one flat buffer → buckets → overlap with backward. Every step is compared with single-process training, and we measure how many messages and bytes it sends and how long it takes. Afterwards every line of `minidist/parallel/ddp.py` will make sense.
#
# **Time**: about 2 hours. **Follows** section 2 of the document (2.1 principle, 2.2 key features, 2.3 limits). **Before this**: chapter 0 (process groups, collectives); you can write a PyTorch training loop.
#
# **Exercises**: `minidist start-exercises my-exercises` makes a copy to write in; `minidist check 2 --src my-exercises` checks it. English only: run `%lang en` in any cell.
#
# </div>

# %%
# %load_ext minidist
import torch
import torch.distributed as dist
import minidist as md
from minidist.comm import collectives as coll
from minidist.learn import claims, figures
from minidist.train.data import TextBatches, load_tokens

# %% [markdown]
# ## 2.1 原理 | Principle

# %% [markdown]
# <div lang="zh">
#
# 每张卡（这里是每个进程，称为一个 **rank**）都有一份完整的模型副本，只是各自读不同的数据：
#
# 1. 各自前向、反向，得到**自己那部分数据**的梯度；
# 2. 用一次**全归约（all-reduce）**把梯度换成所有 rank 的平均；
# 3. 各自用这个平均梯度更新自己的副本。
#
# 起点相同，每步加上的更新也相同，所以副本永远相同。没有人分发参数，也没有主节点，同步完全靠第 2 步。
#
# **先猜**：全局 batch 有 64 行，分给 4 个 rank，每个 rank 对自己的 16 行求平均损失再反向。四份梯度的平均，和单个进程对 64 行求平均损失得到的梯度，是完全相等、近似相等，还是差 4 倍？
#
# </div>
#
# <div lang="en">
#
# Every card (here every process, called a **rank**) holds a complete replica of the model and reads different data:
#
# 1. each runs forward and backward and has the gradient of **its own** data;
# 2. one **all-reduce** replaces the gradients by their mean over all ranks;
# 3. each updates its own replica with that mean.
#
# Equal starting points plus equal updates: the replicas stay equal for ever. Nobody hands out parameters and there is no master; step 2 does all the synchronising.
#
# **Predict**: a global batch of 64 rows is dealt to 4 ranks; each takes the mean loss of its 16 rows and runs backward. Is the mean of the four gradients equal to the gradient of one process's mean loss over all 64 rows: exactly, nearly, or off by a factor of 4?
#
# </div>

# %% [markdown]
# ### 参照：单进程 | The reference: one process

# %% [markdown]
# <div lang="zh">
#
# 一个小 GPT，训练 8 步。`train` 里没有任何分布式的东西，只留了一个口子：`prepare(model)` 返回一个函数，在 `backward()` 之后调用。本章的四步，就是四个不同的 `prepare`。
#
# `batches.at(step, rank, world_size)` 返回这个 rank 在这一步的那几行；**全局** batch 只由步数决定，与 rank 的个数无关，所以能公平对照。
#
# </div>
#
# <div lang="en">
#
# A small GPT, 8 steps. Nothing in `train` is distributed; it only leaves one opening: `prepare(model)` returns a function that is called after `backward()`. The four steps of this chapter are four different `prepare`s.
#
# `batches.at(step, rank, world_size)` gives this rank's rows of a step. The **global** batch depends on the step alone, not on the number of ranks, which makes the comparison fair.
#
# </div>

# %%
config = md.GPTConfig(seq=64, width=64, layers=4)
batches = TextBatches(load_tokens(), seq=64, batch=64)   # 64 rows over all ranks
STEPS, LR = 8, 0.2

def train(prepare, rank=0, world_size=1):
    model = md.build_gpt(config)               # same seed: the same weights on every rank
    average_gradients = prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        inputs, targets = batches.at(step, rank, world_size)
        loss = md.loss_fn(model(inputs), targets)
        loss.backward()
        average_gradients()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model

def nothing(model):
    return lambda: None

reference, reference_model = train(nothing)
print(f"{config.parameters:,} parameters in {len(list(reference_model.parameters()))} tensors")
print("loss:", *(f"{loss:.3f}" for loss in reference))

# %% [markdown]
# ### 先犯个错：忘了同步 | First the mistake: no synchronisation

# %% [markdown]
# <div lang="zh">
#
# `%%ranks 4` 让单元格在 4 个常驻进程上运行，笔记本里的函数和变量会自动送过去。先什么都不同步。
#
# **先猜**：4 个 rank 互不通信，各自的损失会下降吗？你怎么看得出有问题？
#
# </div>
#
# <div lang="en">
#
# `%%ranks 4` runs the cell on 4 standing processes; functions and variables of the notebook travel along. To begin with, no synchronisation at all.
#
# **Predict**: 4 ranks that never talk. Will their losses fall? How would you notice that something is wrong?
#
# </div>

# %%
# %%ranks 4
losses, model = train(nothing, rank, world_size)
print("loss:", *(f"{loss:.3f}" for loss in losses))

# %% [markdown]
# <div lang="zh">
#
# 损失照样下降，没有任何报错。可这已经是 4 个不同的模型了：每个只见过四分之一的数据。这是数据并行里最常见、也最安静的错误。办法是**主动检查**副本是否相同（函数里的 `rank` 和 `world_size` 在每个 rank 上就是它自己的编号和总数）：
#
# </div>
#
# <div lang="en">
#
# The losses fall all the same, and nothing complains. But these are 4 different models by now, each of which has seen a quarter of the data. It is the most common mistake of data parallelism and the quietest one. The remedy is to **check** that the replicas are equal (`rank` and `world_size` in a function are, on every rank, its own number and how many there are):
#
# </div>

# %%
def check_replicas(model):
    for name, param in model.named_parameters():
        ours, rank_0s = param.detach(), coll.broadcast(param.detach().clone(), src=0)
        if not torch.equal(ours, rank_0s):
            apart = (ours - rank_0s).abs().max()
            raise RuntimeError(f"{name} differs from rank 0 by up to {apart:.1g}")

# %% tags=["raises-exception"]
# %%ranks 4
check_replicas(model)

# %% [markdown]
# <div lang="zh">
#
# 第一个参数就已经不同。注意错误信息写明了：哪个 rank 出错、在哪一行、其他 rank 当时停在哪里。（rank 0 和自己比当然没问题，它停在下一次 `broadcast` 里等别人。）下面开始修。
#
# </div>
#
# <div lang="en">
#
# Already the first parameter differs. Look at the rest of the message: which rank failed, at which line of the cell, and where every other rank was at that moment. (Rank 0, equal to itself, had gone on to the next `broadcast` and was waiting there.) Now let us mend it.
#
# </div>

# %% [markdown]
# ### 第一步：每个参数一次 all-reduce | Step 1: one all-reduce per parameter

# %% [markdown]
# <div lang="zh">
#
# 最短的正确写法。`op="mean"`：求和再除以 rank 数。
#
# </div>
#
# <div lang="en">
#
# The shortest version that is right. `op="mean"`: add up, divide by the number of ranks.
#
# </div>

# %%
def per_parameter(model):
    def average_gradients():
        for param in model.parameters():
            coll.all_reduce(param.grad, "mean")
    return average_gradients

# %%
def compare(prepare):
    """Train on all ranks; on each: same replicas? how far from the single process?"""
    losses, model = train(prepare, rank, world_size)
    check_replicas(model)
    pairs = zip(model.parameters(), reference_model.parameters())
    apart = max((a - b).abs().max().item() for a, b in pairs)
    if rank == 0:
        print(f"{prepare.__name__}: replicas equal; weights differ from one process by {apart:.0e}")
    return losses

# %%
# %%ranks 4 --out losses
losses = compare(per_parameter)

# %%
global_loss = [sum(each) / len(each) for each in zip(*losses)]
figures.loss_curves({"one process": reference, "4 ranks": global_loss}, "one process");

# %% [markdown]
# <div lang="zh">
#
# 答案：**数学上完全相等，浮点上近似相等**。平均的平均等于总平均，前提是每个 rank 的行数相同；剩下约 1e-7 的差别来自 float32 加法的次序（64 行一起加，或 16 行 16 行地加）。
#
# 两个常见的变体都是错的：
#
# - 用 `sum` 而不是 `mean`：梯度大 4 倍，等于偷偷把学习率乘了 4；
# - 各 rank 行数（或有效 token 数）不同时仍用 `mean`：行数少的 rank 权重偏大。这时要用总 token 数做分母，见 `md.token_mean_scale`。
#
# </div>
#
# <div lang="en">
#
# The answer: **exactly equal in mathematics, nearly equal in floating point**. A mean of means is the overall mean as long as every rank has the same number of rows; what is left, around 1e-7, is the order of float32 additions (64 rows in one go, or 16 at a time).
#
# Two popular variants are wrong:
#
# - `sum` in place of `mean`: gradients 4 times too large, as if somebody had multiplied the learning rate by 4;
# - `mean` although ranks have different numbers of rows (or of valid tokens): a rank with few rows weighs too much. Then the total number of tokens is the right denominator, see `md.token_mean_scale`.
#
# </div>

# %% [markdown]
# ### 量一量 | Measuring it

# %% [markdown]
# <div lang="zh">
#
# 正确了，快不快？每次集合通信都有固定开销（**延迟 latency**）再加上与字节数成正比的时间（**带宽 bandwidth**）。我们的 rank 都在同一台机器上，几乎没有延迟。为了看到真实网络上的差别，下面的 `Network` **模拟**一条慢网线：每条消息在收发两端排队，花费 `latency + 字节数 / bandwidth` 的时间，数据本身仍然真的传过去。表里两种时间都会给出。计时用 2 个 rank：rank 比核多的时候，量到的主要是抢核。
#
# </div>
#
# <div lang="en">
#
# Right, but fast? Every collective costs a fixed time (**latency**) plus a time in proportion to its bytes (**bandwidth**). Our ranks live in one machine and have next to no latency. To see what a real network would make of it, `Network` below **emulates** a slow wire: messages queue up, and each takes `latency + bytes / bandwidth`; the data still really travels. The tables show both times. We time with 2 ranks: with more ranks than cores one would mostly measure the fight for cores.
#
# </div>

# %%
import time

class Network:
    """`start(tensor)` begins to average a tensor; the result is there after `.wait()`."""

    def __init__(self, latency=0.0, bandwidth=float("inf")):
        self.latency, self.bandwidth, self.free = latency, bandwidth, 0.0

    def start(self, tensor):
        work = coll.all_reduce(tensor, "mean", async_op=True)
        n, size = dist.get_world_size(), tensor.numel() * tensor.element_size()
        sent = 2 * (n - 1) / n * size                       # what each rank puts on the wire
        begin = max(self.free, time.perf_counter())         # one message after the other
        self.free = begin + self.latency + sent / self.bandwidth
        return Arrival(work, self.free)

class Arrival:
    def __init__(self, work, arrives):
        self.work, self.arrives = work, arrives

    def wait(self):
        with md.measure.span("network", lane="wait"):
            time.sleep(max(0.0, self.arrives - time.perf_counter()))
        return self.work.wait()

# %%
def one_step(model, average_gradients, step=0):
    with md.measure.span("forward + backward"):
        inputs, targets = batches.at(step, dist.get_rank(), dist.get_world_size())
        md.loss_fn(model(inputs), targets).backward()
    average_gradients()
    model.zero_grad()

def report(prepare):
    """Messages and bytes of one step; best milliseconds of 5, here and on the emulated network."""
    row = []
    for wire in (Network(), Network(latency=0.5e-3, bandwidth=40e6)):
        model = md.build_gpt(config)
        average_gradients = prepare(model, wire)
        one_step(model, average_gradients)
        times = []
        for step in range(5):
            coll.barrier()
            start = time.perf_counter()
            one_step(model, average_gradients, step)
            times.append(time.perf_counter() - start)
        row.append(min(times) * 1e3)
    with md.measure(memory=False, timeline=False) as m:
        one_step(model, average_gradients)
    if dist.get_rank() == 0:
        calls, sent = m.traffic["all_reduce"].calls, m.traffic["all_reduce"].sent_bytes
        print(f"{prepare.__name__:>14}: {calls:>3} all-reduces, {sent:,} bytes sent; "
              f"{row[0]:4.0f} ms here, {row[1]:4.0f} ms on the network")

# %%
def no_communication(model, wire=None):
    return lambda: None

def per_parameter(model, wire=Network()):
    def average_gradients():
        for param in model.parameters():
            wire.start(param.grad).wait()
    return average_gradients

# %%
# %%ranks 2 --fast
report(no_communication)
report(per_parameter)

# %% [markdown]
# <div lang="zh">
#
# `no_communication` 是底线：只有计算。53 个参数张量，53 次 all-reduce，53 份延迟。（`--fast` 关掉了教学用的通信检查，测时间时才用。）
#
# </div>
#
# <div lang="en">
#
# `no_communication` is the floor: compute and nothing else. 53 parameter tensors, 53 all-reduces, 53 latencies. (`--fast` switches off the checks that make mistakes easy to read; use it only for timing.)
#
# </div>

# %% [markdown]
# ### 第二步：一个扁平缓冲区 | Step 2: one flat buffer

# %% [markdown]
# <div lang="zh">
#
# 把所有梯度首尾相接放进一个一维缓冲区，一次 all-reduce 送完，再拷回去。这就是 `minidist/parallel/flat.py` 的概念，后面 ZeRO 和 FSDP 也都建立在它之上。
#
# **先猜**：消息从 53 条变成 1 条，发送的**字节数**变多、变少，还是不变？
#
# </div>
#
# <div lang="en">
#
# Lay all gradients end to end in one one-dimensional buffer, send it with a single all-reduce, copy them back. `minidist/parallel/flat.py` is made for such buffers, and ZeRO and FSDP are built on them as well.
#
# **Predict**: 53 messages become 1. Do the **bytes** go up, go down, or stay?
#
# </div>

# %%
def flat(model, wire=Network()):
    params = list(model.parameters())

    def average_gradients():
        buffer = torch.cat([param.grad.flatten() for param in params])
        wire.start(buffer).wait()
        place = 0
        for param in params:
            param.grad = buffer[place : place + param.numel()].view_as(param)
            place += param.numel()
    return average_gradients

# %%
# %%ranks 2 --fast
report(flat)
losses = compare(flat)

# %% [markdown]
# <div lang="zh">
#
# 字节数不变，延迟只付一次。而且拷回去这一步可以省掉：让 `param.grad` 直接成为缓冲区的**视图**（view）就行，上面正是这样做的。
#
# 可是还有一个缺点：必须等**整个**反向结束，通信才能开始。网络空等计算，然后计算空等网络。
#
# </div>
#
# <div lang="en">
#
# The bytes stay, the latency is paid once. The copy back is not even needed: `param.grad` can become a **view** of the buffer, as it does above.
#
# One flaw remains: communication cannot start before **all** of backward has ended. First the network waits for the compute, then the compute for the network.
#
# </div>

# %% [markdown]
# ### 第三步：分桶 | Step 3: buckets

# %% [markdown]
# <div lang="zh">
#
# 折中：把梯度分成若干个**桶（bucket）**，每桶一次 all-reduce。反向从最后一层往前算，所以最先就绪的是最后一层的梯度：桶要按**参数顺序的倒序**来装。
#
# </div>
#
# <div lang="en">
#
# The compromise: gradients go into a few **buckets**, one all-reduce each. Backward runs from the last layer to the first, so the last layer's gradients are ready first: buckets are filled in the **reverse** order of the parameters.
#
# </div>

# %%
CAP = 256 * 1024   # bytes per bucket; DDP's default is 25 MB, for larger models than ours

class Bucket:
    def __init__(self, params):
        self.params, self.missing = params, len(params)

    def start(self, wire):
        self.buffer = torch.cat([param.grad.flatten() for param in self.params])
        self.work = wire.start(self.buffer)

    def finish(self):
        self.work.wait()
        parts = self.buffer.split([param.numel() for param in self.params])
        for param, part in zip(self.params, parts):
            param.grad = part.view_as(param)
        self.missing = len(self.params)

def fill_buckets(model, cap=CAP):
    buckets, params, size = [], [], 0
    for param in reversed(list(model.parameters())):
        params.append(param)
        size += param.numel() * param.element_size()
        if size >= cap:
            buckets.append(Bucket(params))
            params, size = [], 0
    return buckets + ([Bucket(params)] if params else [])

# %%
def in_buckets(model, wire=Network()):
    buckets = fill_buckets(model)

    def average_gradients():
        for bucket in buckets:
            bucket.start(wire)
        for bucket in buckets:
            bucket.finish()
    return average_gradients

# %%
# %%ranks 2 --fast
report(in_buckets)
losses = compare(in_buckets)

# %% [markdown]
# <div lang="zh">
#
# 还没有变快：我们仍然等反向结束才开始发。但现在每个桶可以**单独**出发了。
#
# </div>
#
# <div lang="en">
#
# Not faster yet: we still wait for the end of backward before anything leaves. But now every bucket could leave **on its own**.
#
# </div>

# %% [markdown]
# ### 第四步：与反向重叠 | Step 4: overlapped with backward

# %% [markdown]
# <div lang="zh">
#
# `param.register_post_accumulate_grad_hook(f)`：反向过程中，这个参数的 `.grad` 一算好，PyTorch 就调用 `f(param)`。于是：
#
# **钩子（hook）→ 桶满 → 立刻开始 all-reduce，不等它 → 反向继续 → 最后统一等待。**
#
# 这一行就是 DDP 的全部机制。
#
# **先猜**：在模拟网络上，第四步的时间会接近 `no_communication`、接近 `flat`，还是在两者之间？
#
# </div>
#
# <div lang="en">
#
# `param.register_post_accumulate_grad_hook(f)`: during backward, as soon as this parameter's `.grad` is complete, PyTorch calls `f(param)`. Hence:
#
# **hook → bucket full → start its all-reduce and do not wait → backward goes on → wait for all at the end.**
#
# That is the whole mechanism of DDP.
#
# **Predict**: on the emulated network, will step 4 take about as long as `no_communication`, about as long as `flat`, or something in between?
#
# </div>

# %%
def overlapped(model, wire=Network(), cap=CAP):
    buckets = fill_buckets(model, cap)
    bucket_of = {param: bucket for bucket in buckets for param in bucket.params}

    def gradient_ready(param):
        bucket = bucket_of[param]
        bucket.missing -= 1
        if bucket.missing == 0:
            bucket.start(wire)             # backward goes on while this travels

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(gradient_ready)

    def average_gradients():
        for bucket in buckets:
            bucket.finish()
    return average_gradients

# %%
# %%ranks 2 --fast
for prepare in (no_communication, per_parameter, flat, in_buckets, overlapped):
    report(prepare)
losses = compare(overlapped)

# %% [markdown]
# <div lang="zh">
#
# 在两者之间，取决于有多少通信能藏在反向下面。第一个桶要等最后几层的梯度，最后一个桶在反向结束时才满，它的通信**总是**露在外面。把两条时间线画出来看（rank 0，模拟网络）：
#
# </div>
#
# <div lang="en">
#
# In between: it depends on how much of the communication fits under backward. The first bucket waits for the gradients of the last layers, and the last bucket is full only when backward ends, so that its communication is **always** exposed. Here are the two timelines (rank 0, emulated network):
#
# </div>

# %%
def timeline_of(prepare):
    """The spans of the fastest of 6 steps (others may be disturbed by what else runs here)."""
    model = md.build_gpt(config)
    average_gradients = prepare(model, Network(latency=0.5e-3, bandwidth=40e6))
    fastest = float("inf")
    for step in range(6):
        coll.barrier()
        with md.measure(memory=False, traffic=False) as m:
            one_step(model, average_gradients)
        line = m.timeline
        line.spans = [s for s in line.spans if s.lane != "compute" or "+" in s.name]
        length = max(s.end for s in line.spans) - min(s.start for s in line.spans)
        if length < fastest:
            fastest, best = length, line
    return best

# %%
# %%ranks 2 --fast
pair = timeline_of(flat), timeline_of(overlapped)
if rank == 0:
    for line, name in zip(pair, (figures.label("flat", "扁平"), figures.label("overlapped", "重叠"))):
        figures.timeline([line], title=name)

# %% [markdown]
# <div lang="zh">
#
# 上图：反向结束，通信才开始。下图：桶在反向途中就一个接一个地出发，红条的大部分与蓝条同时进行，灰色的等待明显变短。
#
# 桶的大小是一个取舍：太小，延迟付很多次；太大，出发得太晚。在模拟网络上扫一遍：
#
# </div>
#
# <div lang="en">
#
# Above: communication starts when backward has ended. Below: buckets leave one after the other while backward is under way, most of the red runs alongside the blue, and the grey wait is clearly shorter.
#
# The size of a bucket is a trade-off: too small, and latency is paid many times; too large, and everything leaves late. A sweep on the emulated network:
#
# </div>

# %%
def milliseconds(cap):
    model = md.build_gpt(config)
    average_gradients = overlapped(model, Network(latency=0.5e-3, bandwidth=40e6), cap)
    times = []
    for step in range(5):
        coll.barrier()
        start = time.perf_counter()
        one_step(model, average_gradients, step)
        times.append(time.perf_counter() - start)
    return min(times) * 1e3

# %%
# %%ranks 2 --fast
for cap in (1, 64 * 1024, 256 * 1024, 4 * 2**20):
    count, taken = len(fill_buckets(md.build_gpt(config), cap)), milliseconds(cap)
    if rank == 0:
        size = "one tensor" if cap == 1 else f"{cap // 1024} kB"
        print(f"bucket of {size:>10}: {count:>2} buckets, {taken:4.0f} ms")

# %% [markdown]
# <div lang="zh">
#
# 时间每次运行都会有出入，但规律不变：两头慢，中间快。PyTorch 的默认值是 25 MB，第一个桶只有 1 MB，好让网络早点忙起来。
#
# </div>
#
# <div lang="en">
#
# The times vary from run to run, the shape does not: slow at both ends, fast in the middle. PyTorch's default is 25 MB, with a first bucket of only 1 MB to get the network busy early.
#
# </div>

# %% [markdown]
# ### 桶要按编号的顺序发 | Buckets leave in order of their number

# %% [markdown]
# <div lang="zh">
#
# 上面的代码还有一个漏洞。集合通信不看名字，只看次序：各 rank 的第 k 次 all-reduce 加在一起。如果一个模型在不同 rank 上使用各层的次序不同（按数据选分支的模型就会这样），先满的桶也就不同。下面两个桶一样大，rank 1 上碰巧是桶 1 先满。
#
# **先猜**：正确的平均值是 1.5 和 10.5。会报错、会死等，还是得到别的数？
#
# </div>
#
# <div lang="en">
#
# There is still a hole in the code above. Collectives go by order, not by name: the k-th all-reduce of each rank is added to the k-th of the others. When ranks use the layers of a model in different orders (a model that picks a branch by its data does), other buckets fill first. Below are two buckets of the same size, and on rank 1 bucket 1 happens to be full first.
#
# **Predict**: the right means are 1.5 and 10.5. Will there be an error, a wait for ever, or other numbers?
#
# </div>

# %%
# %%ranks 2
full = [torch.full((3,), 1.0 + rank), torch.full((3,), 10.0 + rank)]   # buckets 0 and 1
order = [0, 1] if rank == 0 else [1, 0]                   # in which order they became full
works = [coll.all_reduce(full[i], "mean", async_op=True) for i in order]
for work in works:
    work.wait()
print("bucket 0:", full[0].tolist(), " bucket 1:", full[1].tolist())

# %% [markdown]
# <div lang="zh">
#
# 全是 6，没有任何报错：rank 0 的桶 0 和 rank 1 的桶 1 加到了一起。所以桶必须严格按 0, 1, 2, … 的顺序发：先满的桶等前面的桶，前面的一发出，后面已经满了的就跟着发出。练习 2.4 就写这个。
#
# </div>
#
# <div lang="en">
#
# Everything is 6, and nothing complains: bucket 0 of rank 0 was added to bucket 1 of rank 1. So buckets must leave strictly in the order 0, 1, 2, ...: one that is full early waits for those before it, and follows as soon as they are out. Exercise 2.4 is about writing this.
#
# </div>

# %% [markdown]
# ### 同样的东西，在 minidist 里 | The same in minidist

# %% [markdown]
# <div lang="zh">
#
# `minidist/parallel/ddp.py` 里的 `md.DDP` 就是第四步。钩子和“桶满就走”这两个函数：
#
# </div>
#
# <div lang="en">
#
# `md.DDP` in `minidist/parallel/ddp.py` is step 4. Here are the hook and "leave when full":
#
# </div>

# %%
import inspect
from minidist.parallel import ddp

print(inspect.getsource(ddp._Backward.arrive))
print(inspect.getsource(ddp._Backward.launch_full_buckets))

# %% [markdown]
# <div lang="zh">
#
# 和我们手写的相比，多出来的每一处都是为了一种会出错的情况：
#
# | 手写的 | `md.DDP` | 少了会怎样 |
# |---|---|---|
# | 桶一满就发 | 桶按编号**依次**发（`self.next`） | 各 rank 就绪的次序可能不同，于是把不同的桶加到了一起 |
# | 倒序装桶 | 第一次反向只观察，按 rank 0 上梯度实际到达的次序重新装桶 | 定义次序与使用次序不一致的模型，重叠效果变差 |
# | `torch.cat` 再除 | 一次 `torch.mul(grad, 1/N, out=桶里的位置)`，`.grad` 就是桶的视图 | 每步多拷贝一遍全部梯度 |
# | 假设种子相同 | 构造时检查形状一致，再广播 rank 0 的参数和缓冲区 | 起点不同，副本永远不同 |
# | 假设每个参数都有梯度 | `find_unused_parameters`；没有它，就在**所有** rank 上报错并点名 | 桶永远不满，从不发出：出错，或者用了上一步的旧梯度 |
# | 每次反向都平均 | `no_sync()` | 梯度累积时通信量成倍增加（见 2.2） |
# | 不管 BatchNorm | `broadcast_buffers`：每次前向后统一为 rank 0 的缓冲区 | 各 rank 的统计量各走各的 |
#
# 用法只有一行：
#
# </div>
#
# <div lang="en">
#
# Compared with our own, every addition is there for one way in which things go wrong:
#
# | ours | `md.DDP` | what breaks without it |
# |---|---|---|
# | a full bucket leaves at once | buckets leave **in order of their number** (`self.next`) | ranks may fill them in different orders and would add up different buckets |
# | buckets in reverse order | the first backward only watches, then buckets are rebuilt in the order in which gradients arrived on rank 0 | poor overlap when a model uses its parts in another order than it defines them |
# | `torch.cat`, then divide | one `torch.mul(grad, 1/N, out=place in the bucket)`, and `.grad` is a view of the bucket | one more copy of all gradients per step |
# | trusts the seeds | checks shapes at construction, then broadcasts rank 0's parameters and buffers | different starts, different replicas for ever |
# | trusts that every parameter has a gradient | `find_unused_parameters`; without it an error on **all** ranks that names the parameter | a bucket never fills and never leaves: an error, or last step's gradient |
# | averages in every backward | `no_sync()` | gradient accumulation sends several times as much (see 2.2) |
# | ignores BatchNorm | `broadcast_buffers`: after each forward all take rank 0's buffers | every rank keeps statistics of its own |
#
# Using it is one line:
#
# </div>

# %%
def train_wrapped(wrap):
    model = wrap(md.build_gpt(config))           # the only line that knows about ranks
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        inputs, targets = batches.at(step, rank, world_size)
        loss = md.loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    check_replicas(model)
    return losses

# %%
# %%ranks 4 --out losses,torch_losses --fast
from torch.nn.parallel import DistributedDataParallel  # torch 2.13's crashes without --fast

losses = train_wrapped(md.DDP)
torch_losses = train_wrapped(DistributedDataParallel)

# %%
curves = {"one process": reference}
for name, each in (("torch DDP", torch_losses), ("md.DDP", losses)):
    curves[name] = [sum(parts) / len(parts) for parts in zip(*each)]
figures.loss_curves(curves, "one process");

# %% [markdown]
# ### 又一个错误：有参数没用到 | Another mistake: an unused parameter

# %% [markdown]
# <div lang="zh">
#
# 有的模型在某些步里不用某个分支。它的桶永远不满，也就从没发出。我们手写的版本如果在第一步就遇到，会停在 `finish` 里（`AttributeError`：没有 `work` 可等）；如果前面的步用到过这个分支，就更糟：`finish` 再次拿到**上一步**的结果，不报错，只是算错。`md.DDP` 则在所有 rank 上报错，并说出是哪个参数：
#
# </div>
#
# <div lang="en">
#
# Some models skip a branch in some steps. Its bucket never fills and so never leaves. If that happens in the first step, our own version stops in `finish` (`AttributeError`: there is no `work` to wait for). If earlier steps did use the branch, it is worse: `finish` finds the result of the **last** step again, nothing complains, and the gradient is wrong. `md.DDP` raises on all ranks and names the parameter:
#
# </div>

# %%
class TwoBranches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.skipped = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.used(x)

# %% tags=["raises-exception"]
# %%ranks 4
model = md.DDP(TwoBranches())
model(torch.randn(4, 8)).sum().backward()

# %%
# %%ranks 4
model = md.DDP(TwoBranches(), find_unused_parameters=True)
model(torch.randn(4, 8)).sum().backward()
print("used:", model.module.used.weight.grad is not None,
      " skipped:", model.module.skipped.weight.grad is not None)

# %% [markdown]
# ## 2.2 关键特性 | Key features

# %% [markdown]
# ### 通信量：2 倍参数量？ | Traffic: twice the parameters?

# %% [markdown]
# <div lang="zh">
#
# 文档说每步通信 2 倍参数量，并把 all-reduce 比作 ping-pong。更准确的图景是**环**：N 个 rank 围成一圈，先转 N−1 轮把和累加起来（reduce-scatter），再转 N−1 轮把结果传开（all-gather）。每轮每个 rank 只发 1/N，合计 $2(N-1)/N$。第 0 章用 send/recv 把它写了出来。
#
# **先猜**：刚才计时用了 2 个 rank，`report` 打出的字节数是参数字节数（4 × 236,928）的几倍？4 个 rank 呢？
#
# </div>
#
# <div lang="en">
#
# The document says twice the parameters per step, and likens all-reduce to ping-pong. The better picture is a **ring**: N ranks in a circle, N−1 rounds add up the sums (reduce-scatter), N−1 rounds pass the results on (all-gather). Every rank sends 1/N in each round, $2(N-1)/N$ in total. Chapter 0 builds it from send and receive.
#
# **Predict**: we timed with 2 ranks: how many times the bytes of the parameters (4 × 236,928) were the bytes that `report` printed? And with 4 ranks?
#
# </div>

# %%
claims.show("a")

# %% [markdown]
# <div lang="zh">
#
# 2 个 rank 时恰好是 1 倍，4 个时 1.5 倍，2 倍是 N 很大时的极限（N = 8 和 1024 是用同一份 DDP 代码在单进程里**干跑** dry run 量出来的）。
#
# 想再少，可以压缩：**通信钩子（communication hook）** 决定一个满桶怎样变成平均值。bf16 减半，PowerSGD（低秩近似加误差反馈）更少，代价是梯度不再精确：
#
# </div>
#
# <div lang="en">
#
# Exactly 1 with 2 ranks, 1.5 with 4; 2 is the limit for large N (N = 8 and 1024 were measured by a **dry run** of the same DDP code in one process).
#
# For less, compress: a **communication hook** decides how a full bucket becomes the mean. bf16 halves it, PowerSGD (a low-rank approximation with error feedback) sends still less; the price is that gradients are no longer exact:
#
# </div>

# %%
# %%ranks 4 --out sent,hook_losses
from minidist.parallel import hooks

choices = {"all_reduce (fp32)": None, "bf16_compress": hooks.bf16_compress,
           "PowerSGD(4)": hooks.PowerSGD(4)}
sent, hook_losses = {}, {}
for name, hook in choices.items():
    with md.measure(memory=False, timeline=False) as m:
        hook_losses[name] = train_wrapped(lambda model: md.DDP(model, comm_hook=hook))
    total = m.traffic["all_reduce"]
    sent[name] = {"all_reduce": total.sent_bytes / STEPS}

# %%
figures.traffic_bars(sent[0])
curves = {"one process": reference}
for name in sent[0]:
    parts = zip(*(each[name] for each in hook_losses))
    curves[name] = [sum(step) / len(step) for step in parts]
figures.loss_curves(curves, "one process");

# %% [markdown]
# ### 同步训练：等最慢的 | Synchronous: everyone waits for the slowest

# %% [markdown]
# <div lang="zh">
#
# all-reduce 要等每个 rank 都到场，所以一步的时间由最慢的那张卡决定。让 rank 2 每步多睡 100 毫秒：
#
# **先猜**：其他三个 rank 的一步会慢多少？它们的时间花在哪里？
#
# </div>
#
# <div lang="en">
#
# An all-reduce needs every rank to show up, so the slowest card decides how long a step takes. Let rank 2 sleep 100 ms in every step:
#
# **Predict**: how much slower will a step be on the other three ranks, and where do they spend that time?
#
# </div>

# %%
def waits(model, straggler):
    coll.barrier()
    with md.measure(memory=False) as m:
        start = time.perf_counter()
        for step in range(5):
            if rank == straggler:
                time.sleep(0.1)
            inputs, targets = batches.at(step, rank, world_size)
            md.loss_fn(model(inputs), targets).backward()
        taken = time.perf_counter() - start
    return taken / 5 * 1e3, m.timeline.overlap()["exposed"] / 5 * 1e3

# %%
# %%ranks 4 --fast
model = md.DDP(md.build_gpt(config))
waits(model, None)                                   # warm up
for straggler in (None, 2):
    step, waited = waits(model, straggler)
    print(f"straggler {straggler}: {step:3.0f} ms per step, of which {waited:3.0f} ms waiting")

# %% [markdown]
# <div lang="zh">
#
# 所有 rank 一起变慢，快的 rank 把时间花在等待上，慢的那个几乎不等。所以看到“通信慢”时，先找掉队者，再怪网络。
#
# 如果有一个 rank 干脆**少做一步**（数据分得不均，或者一个 `continue`），别人就会永远等下去。这里会被发现，并说明谁停在哪里：
#
# </div>
#
# <div lang="en">
#
# All ranks slow down together; the fast ones spend the time waiting, the slow one hardly waits. So when "communication is slow", look for the straggler before blaming the network.
#
# When one rank **skips** a step altogether (uneven data, or a stray `continue`), the others wait for ever. Here it is found out, with who waits where:
#
# </div>

# %% tags=["raises-exception"]
# %%ranks 4
model = md.DDP(md.build_gpt(config))
for step in range(3):
    inputs, targets = batches.at(step, rank, world_size)
    if rank == 3 and step == 1:
        continue                      # "this batch looked odd, skip it"
    md.loss_fn(model(inputs), targets).backward()

# %% [markdown]
# <div lang="zh">
#
# （236,929 是 236,928 个梯度加上 1 个标志：`md.DDP` 在最后一个桶的末尾多带一个数，好让所有 rank 都知道有没有哪个 rank 这一步不寻常，例如有参数没用到。）
#
# 修法：让所有 rank 步数相同（`DistributedSampler` 就保证这一点，见下），或者在数据真的不均匀时用 `with model.join():`，提前结束的 rank 会用零梯度陪着别人走完。
#
# </div>
#
# <div lang="en">
#
# (236,929 is 236,928 gradients and 1 flag: `md.DDP` lets one more number travel at the end of the last bucket, so that all ranks learn whether this step was unusual on any of them, with an unused parameter for instance.)
#
# The remedy: give all ranks the same number of steps (`DistributedSampler` guarantees it, see below), or, when data really are uneven, use `with model.join():`; ranks that finish early then answer the others with zeros to the end.
#
# </div>

# %%
# %%ranks 4
model = md.DDP(md.build_gpt(config))
done = 0
with model.join():
    for step in range(3 if rank == 3 else 5):       # rank 3 has fewer batches
        inputs, targets = batches.at(step, rank, world_size)
        md.loss_fn(model(inputs), targets).backward()
        done += 1
print(f"{done} batches, and no one waits for ever")

# %% [markdown]
# ### 全局 batch 与梯度累积 | The global batch, and gradient accumulation

# %% [markdown]
# <div lang="zh">
#
# 全局 batch = 每卡 batch × 卡数（× 累积次数）。显存放不下想要的 batch，就把它拆成几个**微批次（micro-batch）**，梯度加起来再更新一次。
#
# **先猜**：累积 4 个微批次，直接写循环会通信几次？需要几次？
#
# </div>
#
# <div lang="en">
#
# Global batch = batch per card × cards (× accumulated micro-batches). If the batch you want does not fit into memory, cut it into **micro-batches**, add up their gradients, and update once.
#
# **Predict**: with 4 accumulated micro-batches, how often does a plain loop communicate? How often does it have to?
#
# </div>

# %%
from contextlib import nullcontext

def accumulated_step(model, use_no_sync):
    inputs, targets = batches.at(0, rank, world_size)
    parts = list(zip(inputs.chunk(4), targets.chunk(4)))
    for i, (x, y) in enumerate(parts):
        last = i == len(parts) - 1
        with nullcontext() if last or not use_no_sync else model.no_sync():
            (md.loss_fn(model(x), y) / len(parts)).backward()

# %%
# %%ranks 4 --out rows
rows, gradients = {}, {}
for name, use_no_sync in (("every micro-batch", False), ("no_sync", True)):
    model = md.DDP(md.build_gpt(config))
    accumulated_step(model, use_no_sync)          # the first backward also plans the buckets
    model.zero_grad()
    with md.measure(memory=False, timeline=False) as m:
        accumulated_step(model, use_no_sync)
    rows[name] = {"all_reduce": m.traffic["all_reduce"].sent_bytes}
    gradients[name] = torch.cat([p.grad.flatten() for p in model.parameters()])
a, b = gradients.values()
if rank == 0:
    print("same gradients:", torch.allclose(a, b, atol=1e-6))

# %%
once = 2 * 3 / 4 * 4 * config.parameters     # 2(N-1)/N x 4 bytes x parameters
figures.traffic_bars(rows[0], {"every micro-batch": 4 * once, "no_sync": once});

# %% [markdown]
# <div lang="zh">
#
# 梯度一样，通信差 4 倍。规则：除最后一个微批次外，都放在 `no_sync()` 里；损失要除以微批次的个数。torch 的 DDP 还要求**前向**也在 `no_sync()` 里；`md.DDP` 只看反向在哪里。`md.accumulate` 把这个循环写好了，包括最后一个不满的窗口。
#
# </div>
#
# <div lang="en">
#
# The same gradients for a quarter of the traffic. The rule: all micro-batches but the last go under `no_sync()`, and the loss is divided by their number. torch's DDP wants the **forward** under `no_sync()` as well; `md.DDP` only asks where the backward is. `md.accumulate` is this loop, including a last window that is not full.
#
# </div>

# %% [markdown]
# ### 初始化与 DistributedSampler | Initialisation and DistributedSampler

# %% [markdown]
# <div lang="zh">
#
# 文档给的两样东西：`init_process_group(backend="nccl")` 让进程互相找到，`DistributedSampler` 让它们读不同的数据。
#
# - **后端（backend）**：GPU 用 `nccl`，CPU 用 `gloo`。`%%ranks` 已经替我们初始化好了；脚本里用 `with md.init():`，它读取 `torchrun` 给的环境变量，并自己选后端（第 7 章）。
# - **采样器**：每轮（epoch）把全体样本洗一次牌，第 r 个 rank 取第 r、r+N、r+2N…… 个。
#
# **先猜**：10 个样本分给 4 个 rank，每个 rank 几个？
#
# </div>
#
# <div lang="en">
#
# The document names two things: `init_process_group(backend="nccl")` lets processes find each other, `DistributedSampler` makes them read different data.
#
# - **Backend**: `nccl` on GPUs, `gloo` on CPUs. `%%ranks` has done it for us; in a script `with md.init():` reads what `torchrun` put into the environment and chooses the backend (chapter 7).
# - **Sampler**: every epoch all samples are shuffled once, and rank r takes number r, r+N, r+2N, ...
#
# **Predict**: 10 samples for 4 ranks. How many does each get?
#
# </div>

# %%
# %%ranks 4
print(f"backend {dist.get_backend()}, rank {rank} of {world_size}")
sampler = md.DistributedSampler(10)          # rank and world size from the process group
for epoch in (0, 1):
    sampler.set_epoch(epoch)
    print(f"epoch {epoch}: {list(sampler)}", f"repeats: {(~sampler.mask).sum().item()}")
print("drop_last:", list(md.DistributedSampler(10, drop_last=True)))

# %% [markdown]
# <div lang="zh">
#
# 3 个：10 不能被 4 整除，采样器从头补了 2 个（`mask` 标出重复的，评估时别算两遍），或者用 `drop_last=True` 丢掉零头。每个 rank 的步数**必须相同**，否则就是上面那个死等。
#
# 忘记 `set_epoch` 不会报错，只是每轮的次序都一样：
#
# </div>
#
# <div lang="en">
#
# 3: 10 is no multiple of 4, so the sampler repeats 2 samples from the front (`mask` marks them, so that an evaluation does not count them twice), or leaves the remainder out with `drop_last=True`. All ranks **must** have the same number of steps, or they wait for ever as above.
#
# A forgotten `set_epoch` raises nothing; every epoch just has the same order:
#
# </div>

# %%
sampler = md.DistributedSampler(1000, rank=0, world_size=4)
first, again = list(sampler), list(sampler)
sampler.set_epoch(1)
print("without set_epoch the same order:", first == again, "| with it:", first == list(sampler))

# %% [markdown]
# ### 线性缩放学习率 | Linear scaling of the learning rate

# %% [markdown]
# <div lang="zh">
#
# 卡数变成 k 倍，全局 batch 也变成 k 倍，同样多的数据只走 1/k 的步数。文档的建议：学习率线性放大。道理是梯度是**平均值**：大 batch 的一步走得和小 batch 的一步一样远，却要顶 k 步用。
#
# 预热（warm-up）：刚开始权重变化快，直接用大学习率容易发散，所以前几步从小学习率线性升上去。
#
# 先看实验：同样读 2048 行数据，一个进程 batch 8 走 256 步，或 4 个 rank 合起来 batch 32 走 64 步。
#
# **先猜**：大 batch 的学习率不变、×2、×4，哪种最接近小 batch 的曲线？
#
# </div>
#
# <div lang="en">
#
# k times the cards, k times the global batch: the same data in 1/k of the steps. The document's advice is to scale the learning rate linearly. The reason is that the gradient is a **mean**: one step on the large batch moves as far as one step on a small batch did, and has to stand in for k of them.
#
# Warm-up: at the start weights change quickly and a large rate easily diverges, so the first steps climb to it from the small one.
#
# The experiment: 2048 rows of data each, one process with batch 8 in 256 steps, or 4 ranks with batch 32 in 64 steps.
#
# **Predict**: the same rate, ×2 or ×4 for the large batch: which comes closest to the curve of the small batch?
#
# </div>

# %%
small = md.GPTConfig(seq=32, width=32, layers=2, heads=2)
held_out = TextBatches(load_tokens(), seq=32, batch=128, seed=9).at(0)

def curve(batch, lr, warmup=0, start_lr=0.0, momentum=0.0, rank=0, world_size=1):
    """Loss on held-out rows after every 256 rows of training data."""
    data = TextBatches(load_tokens(), seq=32, batch=batch)
    model = md.build_gpt(small) if world_size == 1 else md.DDP(md.build_gpt(small))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    schedule, losses = md.Warmup(lr, warmup, start_lr), []
    for step in range(2048 // batch):
        optimizer.param_groups[0]["lr"] = schedule(step)
        inputs, targets = data.at(step, rank, world_size)
        optimizer.zero_grad()
        md.loss_fn(model(inputs), targets).backward()
        optimizer.step()
        if (step + 1) * batch % 256 == 0:
            with torch.no_grad():
                losses.append(md.loss_fn(model(held_out[0]), held_out[1]).item())
    return losses

# %%
# %%ranks 4 --out big
big = {f"batch 32, lr x {factor}": curve(32, 0.03 * factor, rank=rank, world_size=world_size)
       for factor in (1, 2, 4)}

# %%
title = figures.label("held-out loss, every 256 rows", "验证损失，每 256 行")
figures.loss_curves({"batch 8": curve(8, 0.03), **big[0]}, title=title);

# %% [markdown]
# <div lang="zh">
#
# ×4 几乎压在小 batch 的曲线上，不变的那条落后很多。
#
# 但学习率有上限。训练刚开始时权重变化最快，也最容易越过这个上限。换成带动量（0.9）的 SGD 和更大的学习率 0.5，**先猜**：不预热会怎样？
#
# </div>
#
# <div lang="en">
#
# ×4 lies nearly on top of the small batch, the unchanged rate is far behind.
#
# But there is a limit to the rate, and it is passed most easily at the beginning, when weights change fastest. With momentum (0.9) and a larger rate of 0.5, **predict**: what happens without warm-up?
#
# </div>

# %%
# %%ranks 4 --out big
ranks = {"rank": rank, "world_size": world_size}
big = {"no warm-up": curve(32, 0.5, momentum=0.9, **ranks),
       "16 steps of warm-up": curve(32, 0.5, 16, start_lr=0.03, momentum=0.9, **ranks)}

# %%
ax = figures.loss_curves(big[0], title=title)
ax.set_ylim(2.8, 8);

# %% [markdown]
# <div lang="zh">
#
# 不预热就发散，预热 16 步就好。那么线性缩放对所有优化器都成立吗？文档没有限定，我们来量：在梯度噪声占主导时，一大步要走得和 k 小步一样远，学习率该乘多少？
#
# </div>
#
# <div lang="en">
#
# Without warm-up it diverges; 16 steps of warm-up are enough. So does linear scaling hold for every optimizer? The document does not say otherwise, so let us measure: where gradient noise dominates, by how much must the rate grow for one large step to go as far as k small ones?
#
# </div>

# %%
claims.show("n")

# %% [markdown]
# <div lang="zh">
#
# 所以：**SGD 用线性，Adam 通常用平方根**，都要预热，都只是起点，还要再调。DDP 本身不动学习率，`md.scale_lr(base_lr, base_batch, batch, rule="linear" | "sqrt")` 和 `md.Warmup` 负责这件事。
#
# </div>
#
# <div lang="en">
#
# So: **linear for SGD, usually the square root for Adam**, with warm-up for both, and as a starting point only. DDP itself never touches the rate; `md.scale_lr(base_lr, base_batch, batch, rule="linear" | "sqrt")` and `md.Warmup` are there for it.
#
# </div>

# %% [markdown]
# ## 2.3 局限性 | Limits

# %% [markdown]
# <div lang="zh">
#
# 每张卡都要装下**整个**模型：参数、梯度、优化器状态，一样不少。
#
# **先猜**：从 1 个 rank 加到 4 个，每个 rank 的模型状态占用的内存怎么变？
#
# </div>
#
# <div lang="en">
#
# Every card has to hold the **whole** model: parameters, gradients, optimizer states, all of it.
#
# **Predict**: from 1 rank to 4, how does the memory that model states take on each rank change?
#
# </div>

# %%
def held_by_adam():
    """Bytes by kind between backward and step, with Adam."""
    model = md.DDP(md.build_gpt(config))
    optimizer = torch.optim.Adam(model.parameters())
    inputs, targets = batches.at(0, coll.rank(), coll.world_size())
    for _ in range(2):
        with md.measure(model, optimizer, timeline=False) as m:
            md.loss_fn(model(inputs), targets).backward()
            kinds = dict(m.memory.current)
            optimizer.step()
            kinds["optimizer"] = m.memory.current["optimizer"]
    return {kind: kinds[kind] for kind in ("parameters", "gradients", "optimizer")}

bars = {"1 rank": md.launch(held_by_adam, 1)[0], "2 ranks": md.launch(held_by_adam, 2)[0]}

# %%
# %%ranks 4 --out held
held = held_by_adam()

# %%
bars |= {f"4 ranks, rank {r}": bytes_ for r, bytes_ in enumerate(held)}
figures.memory_bars(bars, dict.fromkeys(bars, 16 * config.parameters));

# %% [markdown]
# <div lang="zh">
#
# 不变。fp32 + Adam 是每个参数 4 + 4 + 8 = **16 字节**，每个 rank 都是这么多（黑线）。混合精度训练也是 16：2（参数）+ 2（梯度）+ 12（fp32 主副本、动量、方差）。于是单卡能装的最大模型，与卡数无关：
#
# </div>
#
# <div lang="en">
#
# It does not change. fp32 with Adam is 4 + 4 + 8 = **16 bytes** per parameter, on every rank (black line). Mixed precision comes to 16 as well: 2 (parameters) + 2 (gradients) + 12 (fp32 master copy, momentum, variance). So the largest model does not depend on the number of cards:
#
# </div>

# %%
from minidist.plan import formulas

for card, gigabytes in (("24 GB", 24), ("80 GB", 80)):
    for ranks in (1, 8, 1024):
        most = formulas.largest_model(gigabytes * 1e9, stage=0, world_size=ranks)
        print(f"{card} x {ranks:>4}: {most / 1e9:.1f}B parameters, before any activations")

# %% [markdown]
# <div lang="zh">
#
# 这就是第 4、5 章（FSDP 与 ZeRO）的出发点：N 份一模一样的状态里，有 N−1 份是多余的。
#
# </div>
#
# <div lang="en">
#
# Here chapters 4 and 5 (FSDP and ZeRO) begin: of N identical copies of these states, N−1 are redundant.
#
# </div>

# %% [markdown]
# ## 小结 | Summary

# %% [markdown]
# <div lang="zh">
#
# - 数据并行 = 相同的起点 + 平均梯度 + 相同的更新；与单进程训练只差浮点加法的次序。
# - 机制：钩子 → 桶满 → 异步 all-reduce → 反向结束时等待。桶太小付延迟，太大来不及重叠。
# - 每步每个 rank 发送 $2(N-1)/N$ 份参数；`no_sync` 让累积的微批次只付一次。
# - 同步训练等最慢的；少做一步就是死等。采样器保证步数相同，记得 `set_epoch`。
# - 学习率不会自己变：SGD 线性，Adam 通常平方根，配预热。
# - 每张卡 16 字节/参数，加卡不省内存。
#
# **延伸阅读**：Li et al. 2020, *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*，3.2 节（桶与重叠）、第 4 节；Goyal et al. 2017, *Accurate, Large Minibatch SGD*，2.1、2.2 节（线性缩放与预热）；Vogels et al. 2019, *PowerSGD*；Patarasuk & Yuan 2009（环形 all-reduce）。
#
# **练习**：第 2 组，`minidist check 2 --src my-exercises`。**下一章**：模型并行。
#
# </div>
#
# <div lang="en">
#
# - Data parallel = equal starts + mean gradients + equal updates; it differs from one process only by the order of float additions.
# - The mechanism: hook → bucket full → asynchronous all-reduce → wait at the end of backward. Buckets that are too small pay latency, too large ones miss the overlap.
# - Every rank sends $2(N-1)/N$ copies of the parameters per step; with `no_sync` accumulated micro-batches pay once.
# - Synchronous means waiting for the slowest; a skipped step means waiting for ever. The sampler keeps step counts equal; remember `set_epoch`.
# - The learning rate does not change by itself: linear for SGD, usually the square root for Adam, with warm-up.
# - 16 bytes per parameter on every card; more cards save no memory.
#
# **Further reading**: Li et al. 2020, *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, sections 3.2 (buckets and overlap) and 4; Goyal et al. 2017, *Accurate, Large Minibatch SGD*, sections 2.1 and 2.2 (linear scaling, warm-up); Vogels et al. 2019, *PowerSGD*; Patarasuk & Yuan 2009 (ring all-reduce).
#
# **Exercises**: set 2, `minidist check 2 --src my-exercises`. **Next**: model parallel.
#
# </div>
