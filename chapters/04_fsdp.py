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
# # 4. FSDP: 全分片数据并行 | Fully Sharded Data Parallel

# %% [markdown]
# <div lang="zh">
#
# **目标**：亲手写出一个能用的 FSDP，一共四步：把一层的参数拼成扁平缓冲区并切成 N 片 → 用时收集、用完释放 → 反向里用 reduce-scatter 平均并分片梯度 → 预取，让通信藏到计算下面。每一步都和单进程训练对照，并量出内存和字节数。读完后你能看懂 `minidist/parallel/fsdp.py`，也知道文档里哪几条建议今天要打折扣。
#
# **时间**：约 3 小时。**对应文档**：第 4 节（4.1 问题、4.2 分片策略、4.3 流程、4.4 通信重叠、4.5 建议）。**先读**：第 0 章（all-gather 与 reduce-scatter）、第 2 章（扁平缓冲区、钩子、重叠）。
#
# **练习**：`minidist check 4`。只看中文：在任意单元格运行 `%lang zh`。
#
# </div>
#
# <div lang="en">
#
# **Goals**: write a working FSDP with your own hands, in four steps: lay a layer's parameters end to end and cut them into N pieces → gather them for use and free them after → average and shard the gradients with a reduce-scatter in backward → prefetch, so that communication hides under compute. Every step is compared with single-process training, and its memory and bytes are measured. Afterwards you can read `minidist/parallel/fsdp.py`, and you know which of the document's advice to take with a pinch of salt today.
#
# **Time**: about 3 hours. **Follows** section 4 of the document (4.1 problem, 4.2 sharding strategies, 4.3 flow, 4.4 overlap, 4.5 advice). **Before this**: chapter 0 (all-gather, reduce-scatter), chapter 2 (flat buffers, hooks, overlap).
#
# **Exercises**: `minidist check 4`. English only: run `%lang en` in any cell.
#
# </div>

# %%
# %load_ext minidist
import torch
import minidist as md
from minidist.comm import collectives as coll
from minidist.learn import claims, figures
from minidist.train.data import TextBatches, load_tokens
from minidist.train.model import Block

# %% [markdown]
# ## 4.1 问题 | The problem

# %% [markdown]
# <div lang="zh">
#
# 第 2 章的最后一张图：DDP 的每个 rank 都有全部参数、全部梯度、全部优化器状态。fp32 加 Adam 是每个参数 4 + 4 + 8 = 16 字节，加多少张卡都是 16。
#
# **先猜**：4 个 rank 一共占了 4 × 16 字节/参数。其中有多少是别的 rank 手里也有的**副本**？
#
# </div>
#
# <div lang="en">
#
# The last picture of chapter 2: with DDP every rank holds all parameters, all gradients and all optimizer states. In fp32 with Adam that is 4 + 4 + 8 = 16 bytes per parameter, and it stays 16 however many cards you add.
#
# **Predict**: 4 ranks hold 4 × 16 bytes per parameter. How much of that is a **copy** of something another rank holds as well?
#
# </div>

# %%
config = md.GPTConfig(seq=16, width=64, layers=12)
batches = TextBatches(load_tokens(), seq=16, batch=8)    # 8 rows over all ranks
STEPS = 8

def new_optimizer(params):
    return torch.optim.AdamW(params, lr=1e-3, fused=True)   # fused: updates without temporaries

def train(model, optimizer, steps=STEPS, rank=0, world_size=1):
    losses = []
    for step in range(steps):
        inputs, targets = batches.at(step, rank, world_size)
        loss = md.loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

model = md.build_gpt(config)
reference = train(model, new_optimizer(model.parameters()))
print(f"{config.parameters:,} parameters; loss:", *(f"{loss:.3f}" for loss in reference))

# %%
# %%ranks 4 --out held
model = md.DDP(md.build_gpt(config))
optimizer = new_optimizer(model.parameters())
train(model, optimizer, 2, rank, world_size)      # Adam makes its states in the first step
with md.measure(model, optimizer, timeline=False) as m:
    train(model, optimizer, 1, rank, world_size)
held = {kind: m.memory.at_peak[kind] for kind in ("parameters", "gradients", "optimizer")}

# %%
print(f"one rank: {sum(held[0].values()) / config.parameters:.1f} bytes per parameter")
figures.memory_bars({f"rank {r}": kinds for r, kinds in enumerate(held)},
                    {f"rank {r}": 16 * config.parameters for r in range(4)});

# %% [markdown]
# <div lang="zh">
#
# 四分之三。四条一模一样的长条，留一条就够了，其余的只是为了方便：谁都不用问别人要东西。（梯度在 `backward()` 之后相同，参数和状态始终相同。）
#
# FSDP 的想法：**四个 rank 合起来只保存一份**，每个 rank 保管四分之一；谁要用某一层，就临时把那一层凑齐，用完马上丢掉。代价是通信。
#
# </div>
#
# <div lang="en">
#
# Three quarters. Four identical bars, of which one would do; the others are a convenience: nobody ever has to ask anybody for anything. (Gradients are equal once `backward()` has returned, parameters and states always.)
#
# The idea of FSDP: **the four ranks together keep one copy**, a quarter each. Whoever needs a layer brings that layer together for a moment and drops it right after use. The price is communication.
#
# </div>

# %% [markdown]
# ## 4.2 分片策略 | Sharding strategies

# %% [markdown]
# ### 第一步：切开一个扁平参数 | Step 1: shard a flat parameter

# %% [markdown]
# <div lang="zh">
#
# 怎样把一层公平地分成 4 份？按参数张量分不行：大小差得太远，weight 有几百万个数，bias 只有几千个。办法和第 2 章的桶一样：首尾相接拼成一个一维缓冲区，末尾**补零（padding）** 到 4 的倍数，然后等分。一片可以从一个张量的中间开始，在另一个张量里结束。
#
# **先猜**：`Linear(4, 2)` 有 8 个权重（这里填 0 到 7）和 2 个偏置（80、81）。哪个 rank 拿到偏置？
#
# </div>
#
# <div lang="en">
#
# How do you divide a layer fairly among 4? Not by tensor: a weight has millions of numbers, a bias a few thousand. The way is that of the buckets in chapter 2: lay everything end to end in one one-dimensional buffer, **pad** it with zeros to a multiple of 4, cut equal pieces. A piece may begin in the middle of one tensor and end inside another.
#
# **Predict**: `Linear(4, 2)` has 8 weights (here 0 to 7) and 2 biases (80 and 81). Which rank gets the biases?
#
# </div>

# %%
# %%ranks 4
layer = torch.nn.Linear(4, 2)
layer.weight.data, layer.bias.data = torch.arange(8.0).view(2, 4), torch.tensor([80.0, 81.0])

flat = torch.cat([p.detach().flatten() for p in layer.parameters()])
size = -(-flat.numel() // world_size)             # elements per shard, rounded up: 3
flat = torch.nn.functional.pad(flat, (0, size * world_size - flat.numel()))
shard = flat[rank * size : (rank + 1) * size]
print(f"owns {shard.tolist()} of {flat.numel()} numbers")

# %% [markdown]
# <div lang="zh">
#
# 一个在 rank 2，一个在 rank 3；最后两个是补的零。逐元素更新的优化器（SGD、Adam、AdamW…）对此毫不在意：它只看到一串数。但凡要看到**这个元素以外**的优化器就不能这样切：LBFGS 要看全部参数，Muon 和 Adafactor 要看整个矩阵。
#
# 把各片收回来就是一次 all-gather，正好是切开的逆操作：
#
# </div>
#
# <div lang="en">
#
# One is on rank 2, the other on rank 3; the last two numbers are padding. An optimizer that treats every element on its own (SGD, Adam, AdamW...) does not mind: it sees a row of numbers. One that looks **beyond the element** (LBFGS at everything, Muon and Adafactor at whole matrices) cannot be cut this way.
#
# Bringing the pieces together again is an all-gather, the exact inverse of the cut:
#
# </div>

# %%
# %%ranks 4
whole = torch.empty(size * world_size)
coll.all_gather(whole, shard)
weight, bias = whole[:8].view(2, 4), whole[8:10]
print("same layer:", torch.equal(weight, layer.weight) and torch.equal(bias, layer.bias))

# %% [markdown]
# ### 三种策略，量出来 | The three strategies, measured

# %% [markdown]
# <div lang="zh">
#
# 文档的表里有三种策略，区别在于**什么时候**是完整的：
#
# | 策略 | 参数 | 梯度 | 优化器状态 | 文档说的显存 |
# |---|---|---|---|---|
# | `NO_SHARD` | 始终完整 | 完整 | 完整 | O(1) |
# | `SHARD_GRAD_OP` | 前向开始到反向结束完整，其余时间 1/N | 1/N | 1/N | ~O(1/N) |
# | `FULL_SHARD`（默认） | 只有正在用的那几层完整 | 1/N | 1/N | ~O(1/N) |
#
# 先不打开盒子，直接用 `md.FSDP` 量。`units=[Block]`：每个 `Block` 是一个**单元（unit）**，整体收集、整体释放。
#
# **先猜**：N = 4。按文档的表，后两种都应该是 DDP 的 1/4。实测峰值会是多少？
#
# </div>
#
# <div lang="en">
#
# The document's table has three strategies. They differ in **when** things are whole:
#
# | strategy | parameters | gradients | optimizer states | memory, says the document |
# |---|---|---|---|---|
# | `NO_SHARD` | always whole | whole | whole | O(1) |
# | `SHARD_GRAD_OP` | whole from the beginning of forward to the end of backward, else 1/N | 1/N | 1/N | ~O(1/N) |
# | `FULL_SHARD` (default) | only the few layers in use are whole | 1/N | 1/N | ~O(1/N) |
#
# The box stays closed for now, we measure `md.FSDP` as it is. `units=[Block]`: every `Block` is a **unit** that is gathered and freed as a whole.
#
# **Predict**: N = 4. By the table the last two should take 1/4 of DDP. What will the measured peaks be?
#
# </div>

# %%
def one_step_measured(strategy, rank, world_size):
    """Bytes by kind at the fullest moment of a step, and bytes sent by operation."""
    model = md.build_gpt(config)
    if strategy == "DDP":
        model = md.DDP(model)
    else:
        model = md.FSDP(model, strategy=strategy, units=[Block])
    optimizer = new_optimizer(model.parameters())
    train(model, optimizer, 2, rank, world_size)
    with md.measure(model, optimizer, timeline=False) as m:
        train(model, optimizer, 1, rank, world_size)
    sent = {op: total.sent_bytes for op, total in m.traffic.by_op.items()}
    return dict(m.memory.at_peak), sent

STRATEGIES = ("DDP", "NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD")

# %%
# %%ranks 4 --out memory,sent
memory, sent = {}, {}
for strategy in STRATEGIES:
    memory[strategy], sent[strategy] = one_step_measured(strategy, rank, world_size)

# %%
STATES = ("parameters", "gradients", "optimizer")
print("bytes per parameter at the fullest moment of a step")
for strategy in STRATEGIES:
    per_parameter = {k: memory[0][strategy][k] / config.parameters for k in STATES}
    total = sum(per_parameter.values())
    print(f"{strategy:>14}:", *(f"{k} {v:4.2f} " for k, v in per_parameter.items()),
          f"= {total:5.2f} bytes, {total / 16:.0%} of DDP")

# %%
P, N = config.parameters, 4
figures.memory_bars({name: {k: memory[0][name][k] for k in STATES} for name in STRATEGIES},
                    {"DDP": 16 * P, "NO_SHARD": 16 * P,
                     "SHARD_GRAD_OP": (4 + 16 / N) * P, "FULL_SHARD": 16 / N * P});

# %% [markdown]
# <div lang="zh">
#
# `FULL_SHARD` 略多于四分之一：分片的 25%，再加上正在用的几个单元（黑线右边多出的那一截；单元越小，这一截越短）。`SHARD_GRAD_OP` 却要将近一半：从前向开始到反向结束，**完整的参数一直在**，这部分不随 N 变小。公式是 4 + 16/N 字节/参数；峰值出现在反向途中，那时后面的层已经开始释放，前面各层的梯度还没有，所以实测比黑线略少。
#
# 4 个 rank 时差别还不大。N 变大呢？换成混合精度来算（参数和梯度 bf16，主副本和 Adam 状态 fp32，合计也是 16 字节/参数），ZeRO 论文的公式是 `SHARD_GRAD_OP` 2 + 14/N，`FULL_SHARD` 16/N。
#
# **先猜**：7.5B 的模型、64 张卡，`SHARD_GRAD_OP` 最接近 DDP 的 1/64、1/16，还是 1/8？
#
# </div>
#
# <div lang="en">
#
# `FULL_SHARD` takes a little more than a quarter: the 25% of its shards, and on top of them the units in use (what sticks out beyond the black line; the smaller the units, the shorter it is). But `SHARD_GRAD_OP` takes nearly half: the **whole parameters stay** from the beginning of forward to the end of backward, and that part does not shrink with N. The formula is 4 + 16/N bytes per parameter; the fullest moment comes on the way through backward, when the later layers begin to be freed and the earlier ones have no gradients yet, so the measured bar ends a little before the line.
#
# With 4 ranks the difference is modest. With more? In mixed precision (parameters and gradients in bf16, master copies and Adam states in fp32, 16 bytes per parameter again) the ZeRO paper's formulas are 2 + 14/N for `SHARD_GRAD_OP` and 16/N for `FULL_SHARD`.
#
# **Predict**: a 7.5B model on 64 cards. Which is `SHARD_GRAD_OP` closest to: 1/64, 1/16 or 1/8 of DDP?
#
# </div>

# %%
from minidist.plan import formulas

for strategy, stage in (("NO_SHARD", 0), ("SHARD_GRAD_OP", 2), ("FULL_SHARD", 3)):
    gigabytes = sum(formulas.state_bytes(7.5e9, stage, 64).values()) / 1e9
    print(f"{strategy:>14}: {gigabytes:6.1f} GB")

# %% [markdown]
# <div lang="zh">
#
# 约 1/7，而且再多的卡也只能接近 1/8：完整的 bf16 参数占 16 字节里的 2 字节，那是**地板**。公式可信吗？下一格用**干跑（dry run）** 核对：同一份 `md.FSDP` 代码，在一个进程里扮演 64 个 rank 中的一个，张量只有形状没有数据，字节照样数得清。
#
# </div>
#
# <div lang="en">
#
# About 1/7, and no number of cards gets below 1/8: the whole bf16 parameters are 2 of the 16 bytes, and that is the **floor**. Can the formulas be trusted? The next cell checks them by a **dry run**: the same `md.FSDP` code plays one of 64 ranks in a single process, with tensors that have shapes but no data, so that bytes can be counted all the same.
#
# </div>

# %%
claims.show("c")

# %% [markdown]
# <div lang="zh">
#
# 那为什么还要 `SHARD_GRAD_OP`？因为通信少。
#
# **先猜**：DDP 每步每个 rank 发送 1.5 份参数（$2(N-1)/N$，N = 4）。`SHARD_GRAD_OP` 和 `FULL_SHARD` 各发多少？
#
# </div>
#
# <div lang="en">
#
# Why have `SHARD_GRAD_OP` at all then? It communicates less.
#
# **Predict**: with DDP every rank sends 1.5 copies of the parameters per step ($2(N-1)/N$, N = 4). How much with `SHARD_GRAD_OP` and with `FULL_SHARD`?
#
# </div>

# %%
for strategy in STRATEGIES:
    print(f"{strategy:>14}: {sum(sent[0][strategy].values()) / (4 * P):.2f} copies of the parameters")
once = (N - 1) / N * 4 * P
figures.traffic_bars(sent[0], {"DDP": 2 * once, "NO_SHARD": 2 * once,
                               "SHARD_GRAD_OP": 2 * once, "FULL_SHARD": 3 * once});

# %% [markdown]
# <div lang="zh">
#
# 一次 all-reduce 本来就是 reduce-scatter 加 all-gather，各 $(N-1)/N$。`SHARD_GRAD_OP` 只是把两半拆开用：梯度 reduce-scatter，参数 all-gather，总量与 DDP **相同**。`FULL_SHARD` 在前向后丢掉了参数，反向得再收集一次：三份，**多 50%**。这就是显存与通信的交换，价格明码标出。
#
# </div>
#
# <div lang="en">
#
# An all-reduce has always been a reduce-scatter and an all-gather, $(N-1)/N$ each. `SHARD_GRAD_OP` merely uses the halves apart: gradients are reduce-scattered, parameters all-gathered, and the total is **the same** as DDP's. `FULL_SHARD` has dropped the parameters after forward and has to gather them again for backward: three parts, **50% more**. This is the trade of memory for communication, with its price tag.
#
# </div>

# %% [markdown]
# ## 4.3 流程 | The flow

# %% [markdown]
# <div lang="zh">
#
# 现在打开盒子。文档把 `FULL_SHARD` 的流程写成三行：
#
# 1. **前向**：all-gather 收集参数 → 计算 → 丢弃别人的分片；
# 2. **反向**：再 all-gather → 计算 → reduce-scatter 平均并分片梯度；
# 3. **优化器**：每个 rank 只更新自己的分片。
#
# 我们照着写，逐层进行：一层就是一个单元。
#
# </div>
#
# <div lang="en">
#
# Now we open the box. The document sums the flow of `FULL_SHARD` up in three lines:
#
# 1. **forward**: all-gather the parameters → compute → drop the shards of others;
# 2. **backward**: all-gather again → compute → reduce-scatter, which averages and shards the gradients;
# 3. **optimizer**: every rank updates its own shard only.
#
# We write just that, layer by layer: a layer is a unit.
#
# </div>

# %% [markdown]
# ### 第二步：收集与释放 | Step 2: gather and free

# %% [markdown]
# <div lang="zh">
#
# 一个单元有两块内存：`full`（全部参数，模型里的 `weight`、`bias` 都是它的视图）和 `shard`（自己那一片，优化器更新的就是它）。
#
# 释放有个诀窍：`full.untyped_storage().resize_(0)`。张量对象、视图、autograd 记下的引用都还在，只是背后的内存没了；重新分配并收集之后，它们又都有了正确的值。
#
# </div>
#
# <div lang="en">
#
# A unit has two pieces of memory: `full` (all its parameters; every `weight` and `bias` in the model is a view of it) and `shard` (this rank's piece, which is what the optimizer updates).
#
# There is a trick to freeing: `full.untyped_storage().resize_(0)`. The tensor object, its views, and what autograd has noted down all stay; only the memory behind them goes. Once it has been allocated and gathered again, all of them see the right values.
#
# </div>

# %%
def views(flat, params):
    """The pieces of `flat` that belong to `params`, in their shapes."""
    used = sum(p.numel() for p in params)
    parts = flat[:used].split([p.numel() for p in params])
    return [part.view(p.shape) for part, p in zip(parts, params)]

class Unit:
    """One layer: its parameters end to end in `full`, of which this rank owns `shard`."""

    def __init__(self, layer):
        n, rank = coll.world_size(), coll.rank()
        self.layer, self.params = layer, list(layer.parameters())
        size = -(-sum(p.numel() for p in self.params) // n)
        self.full = torch.zeros(size * n)
        self.nbytes = self.full.nbytes
        for p, view in zip(self.params, views(self.full, self.params)):
            view.copy_(p.data)
            p.data = view
        self.shard = torch.nn.Parameter(self.full[rank * size : (rank + 1) * size].clone())
        free(self)

def gather(unit):
    unit.full.untyped_storage().resize_(unit.nbytes)
    coll.all_gather(unit.full, unit.shard.detach())

def free(unit):
    unit.full.untyped_storage().resize_(0)

# %%
# %%ranks 4
units = [Unit(layer) for layer in md.build_gpt(config).layers()]

def whole_bytes():
    return sum(unit.full.untyped_storage().nbytes() for unit in units)

shards = sum(unit.shard.nbytes for unit in units)
before = whole_bytes()
gather(units[3])
during = whole_bytes()
free(units[3])
if rank == 0:
    print(f"{len(units)} units; this rank's shards: {shards:,} of {4 * config.parameters:,} bytes")
    print(f"whole parameters before, during, after: {before:,} / {during:,} / {whole_bytes():,}")

# %% [markdown]
# <div lang="zh">
#
# 如果忘了收集就去用呢？
#
# </div>
#
# <div lang="en">
#
# And if you use it without gathering it first?
#
# </div>

# %% tags=["raises-exception"]
# %%ranks 4
units[3].layer.mlp.up(torch.ones(1, 64))

# %% [markdown]
# <div lang="zh">
#
# 线性层和 LayerNorm 会礼貌地报错：形状还在，内存只有 0 字节。别的算子没这么客气：求一次和，甚至只是 `print(weight)`，就会直接读空指针，进程当场死掉。反过来也危险：释放之后**没人**报错、却读到旧值，那就更难查。所以 `md.FSDP` 在两次使用之间，把模型里的参数换成自己那一片（一维），并故意让 `full` 的版本号对不上（autograd 给每个张量记着它被就地改过几次，反向时核对）：谁要是在收集之前反向，autograd 就会拒绝。想看完整的值，用它的 `full_params()`（这个矩阵正好全落在 rank 1 和 2 的片里，rank 0 和 3 一个数也没有）：
#
# </div>
#
# <div lang="en">
#
# A linear layer or a LayerNorm complains politely: the shape is there, the memory is 0 bytes. Other operations are less kind: a sum, or a mere `print(weight)`, reads a null pointer and the process dies on the spot. The opposite is no better: freed memory that **nobody** complains about and that shows stale values is harder still to find. So between uses `md.FSDP` swaps the parameters in the model for this rank's pieces (1-D), and sets the version counter of `full` wrong on purpose (autograd counts a tensor's in-place changes and compares in backward): a backward that comes before the gather is refused by autograd. To look at whole values, use its `full_params()` (this matrix happens to lie in the pieces of ranks 1 and 2; ranks 0 and 3 have none of it):
#
# </div>

# %%
# %%ranks 4
model = md.FSDP(md.build_gpt(config), units=[Block])
weight = model.blocks[2].mlp.up.weight
print("between uses:", tuple(weight.shape))
with model.full_params(write=False):
    print("whole:", tuple(weight.shape))

# %% [markdown]
# ### 第三步：前向、反向、reduce-scatter | Step 3: forward, backward, reduce-scatter

# %% [markdown]
# <div lang="zh">
#
# 梯度的去向：反向之后，每个 rank 有这一层**自己那份数据**的完整梯度。我们需要的是平均值，而且只要自己那一片。这正是 reduce-scatter：第 j 片的平均值送到 rank j。完整的梯度随即丢掉。
#
# 为了看得清楚，这里不用钩子，而是把每一层单独前向、单独反向：上一层的输出断开计算图后交给下一层，反向时再把梯度逐层传回来。
#
# </div>
#
# <div lang="en">
#
# Where do gradients go? After its backward every rank has the layer's whole gradient **of its own data**. What we want is the mean, and of that only our own piece. That is a reduce-scatter: the mean of piece j goes to rank j. The whole gradient is dropped at once.
#
# To see everything we use no hooks but run each layer forward and backward on its own: a layer's output is cut from the graph before the next layer gets it, and in backward the gradient is handed back layer by layer.
#
# </div>

# %%
def reduce_gradients(unit):
    flat = torch.zeros(unit.full.numel())            # padding stays zero
    for p, place in zip(unit.params, views(flat, unit.params)):
        place.copy_(p.grad)
        p.grad = None
    unit.shard.grad = torch.empty_like(unit.shard)
    coll.reduce_scatter(unit.shard.grad, flat, "mean")

# %%
def forward_backward(units, inputs, targets, keep=False):
    """One FSDP step up to the gradients. `keep`: parameters stay whole until backward."""
    saved, x = [], inputs
    for unit in units:                               # 1. forward
        gather(unit)
        x = x.detach().requires_grad_(x.is_floating_point())
        saved.append((x, unit.layer(x)))
        x = saved[-1][1]
        if not keep:
            free(unit)
    logits = x.detach().requires_grad_()
    loss = md.loss_fn(logits, targets)
    loss.backward()
    gradient = logits.grad
    for unit in reversed(units):                     # 2. backward
        if not keep:
            gather(unit)
        x, output = saved.pop()
        output.backward(gradient)
        gradient = x.grad
        free(unit)
        reduce_gradients(unit)
    return loss.item()

# %%
# %%ranks 4 --out losses
def train_units(step_function=forward_backward, **options):
    units = [Unit(layer) for layer in md.build_gpt(config).layers()]
    optimizer = new_optimizer([unit.shard for unit in units])
    losses = []
    for step in range(STEPS):
        inputs, targets = batches.at(step, rank, world_size)
        losses.append(step_function(units, inputs, targets, **options))
        optimizer.step()                             # 3. every rank updates its shards
        optimizer.zero_grad()
    return losses

losses = {"FULL_SHARD": train_units(), "SHARD_GRAD_OP": train_units(keep=True)}

# %%
def mean_over_ranks(losses, name):
    return [sum(step) / len(step) for step in zip(*(each[name] for each in losses))]

curves = {"one process": reference}
curves |= {f"our {name}": mean_over_ranks(losses, name) for name in losses[0]}
figures.loss_curves(curves, "one process");

# %% [markdown]
# <div lang="zh">
#
# 三条曲线重合：分片只改变了**数放在哪里**，没有改变任何一个数。优化器完全是普通的 AdamW，它不知道自己只管着四分之一；于是“任何 torch 优化器 + 分片的参数”就是 ZeRO-3（第 5 章）。
#
# 两种策略的差别，在代码里只是 `keep` 这一个开关。
#
# </div>
#
# <div lang="en">
#
# Three curves on top of each other: sharding changes **where numbers live**, not a single one of them. The optimizer is plain AdamW and has no idea that it looks after a quarter only; so "any torch optimizer over sharded parameters" is ZeRO-3 (chapter 5).
#
# In code the two strategies differ by one switch, `keep`.
#
# </div>

# %% [markdown]
# ### 安静的错误：忘了平均 | A quiet mistake: gradients that were never averaged

# %% [markdown]
# <div lang="zh">
#
# **先猜**：有人觉得 reduce-scatter 多余，直接从自己的完整梯度里取出自己那一片。会报错吗？副本会不一致吗？损失会怎样？
#
# </div>
#
# <div lang="en">
#
# **Predict**: somebody thinks the reduce-scatter is superfluous and takes his piece out of his own whole gradient. Will there be an error? Will replicas differ? What will the loss do?
#
# </div>

# %%
# %%ranks 4 --out wrong
right_way = reduce_gradients

def reduce_gradients(unit):                          # wrong: nobody else's data count
    flat = torch.zeros(unit.full.numel())
    for p, place in zip(unit.params, views(flat, unit.params)):
        place.copy_(p.grad)
        p.grad = None
    unit.shard.grad = flat.chunk(world_size)[rank].clone()

wrong = {"not averaged": train_units()}
reduce_gradients = right_way

# %%
curves["not averaged"] = mean_over_ranks(wrong, "not averaged")
figures.loss_curves(curves, "one process");

# %% [markdown]
# <div lang="zh">
#
# 不报错。而且与 DDP 不同，第 2 章的 `check_replicas` 在这里**查不出来**：每一片只有一个主人，收集之后所有 rank 的参数永远一致。损失也在下降，只是 rank 2 管的那一片只从 rank 2 的数据里学。能发现它的只有和单进程的对照：差别在 1e-2 的量级，而正确版本是 1e-7。所以本仓库的每个策略都有这样一项测试。
#
# </div>
#
# <div lang="en">
#
# No error. And unlike with DDP, `check_replicas` of chapter 2 **cannot** find it: every piece has one owner, so after gathering the parameters are equal on all ranks for ever. The loss even falls; only, the piece that rank 2 looks after learns from rank 2's data alone. What finds it is the comparison with one process: a difference around 1e-2, where the right version has 1e-7. That is why every strategy in this repository is tested that way.
#
# </div>

# %% [markdown]
# ### 一步里的内存 | Memory in the course of a step

# %% [markdown]
# <div lang="zh">
#
# 在我们手写的 `gather` 和 `free` 之后各记一笔：此刻这个 rank 上一共有多少字节的参数（分片加完整的单元）。
#
# **先猜**：`FULL_SHARD` 的曲线是一条水平线、一个山峰，还是锯齿？`SHARD_GRAD_OP` 呢？
#
# </div>
#
# <div lang="en">
#
# Take a note after every `gather` and `free` of ours: how many bytes of parameters does this rank hold at this moment (shards and whole units)?
#
# **Predict**: will the curve of `FULL_SHARD` be a flat line, a mountain, or a saw? And that of `SHARD_GRAD_OP`?
#
# </div>

# %%
# %%ranks 4 --out moments
def watched(move):
    def and_noted(unit):
        move(unit)
        notes.append(sum(u.full.untyped_storage().nbytes() + u.shard.nbytes for u in units))
    return and_noted

plain, moments = (gather, free), {}
for name, keep in (("SHARD_GRAD_OP", True), ("FULL_SHARD", False)):
    units, notes = [Unit(layer) for layer in md.build_gpt(config).layers()], []
    gather, free = map(watched, plain)
    forward_backward(units, *batches.at(0, rank, world_size), keep=keep)
    gather, free = plain
    moments[name] = notes

# %%
from minidist.learn.style import LINE_COLORS, label, new_axes, set_legend

ax = new_axes(None, (7.5, 3), "y")
ax.axhline(4 * P / 1e6, color=LINE_COLORS[0], label="NO_SHARD")
for (strategy, notes), color in zip(moments[0].items(), LINE_COLORS[1:]):
    at = [i / (len(notes) - 1) for i in range(len(notes))]
    ax.step(at, [note / 1e6 for note in notes], where="post", label=strategy, color=color)
ax.axhline(4 * P / N / 1e6, color="black", linewidth=1, linestyle=":", label="1/N")
ax.set_ylim(bottom=0)
ax.set_xlabel(label("fraction of the step", "一步的进程"), fontsize=8, loc="right")
ax.set_title(label("parameters in memory (MB) over one step", "一步之内的参数内存"),
             loc="left", fontsize=10)
set_legend(ax)

# %% [markdown]
# <div lang="zh">
#
# 锯齿：每个齿是一层来了又走，底下垫着分片（点线）。两头和正中的矮齿是词嵌入和输出层。反向又收集了一遍，所以后半程的齿和前半程一样多。`SHARD_GRAD_OP` 在前向里一级级上台阶，到山顶时参数是完整的一份**外加**一份分片，反向里再一级级下来。
#
# 于是峰值 = 分片 + 同时完整的那几个单元；其中完整的那几个单元**与层数无关**。单元切得越小，峰值越低，消息也越小越多（延迟！）；整个模型只做一个单元，参数就一点也省不下（优化器状态仍然省）：
#
# </div>
#
# <div lang="en">
#
# A saw: each tooth is a layer that comes and goes, and underneath lie the shards (dotted). The short teeth at both ends and in the middle are the embedding and the output layer. Everything is gathered again for backward, so the second half has as many teeth as the first. `SHARD_GRAD_OP` climbs a staircase in forward, holds all of the parameters **plus** the shards at the top, and comes down in backward.
#
# So the peak is the shard and the few units that are whole at a time; what these take does **not depend on the number of layers**. Smaller units mean a lower peak, and more and smaller messages (latency!). With all of the model in one unit nothing is saved of the parameters (of the optimizer states it still is):
#
# </div>

# %%
# %%ranks 4
choices = {"one unit": None, "every Block": [Block],
           "every Linear and Block": [Block, torch.nn.Linear]}
for name, units in choices.items():
    model = md.FSDP(md.build_gpt(config), units=units)
    optimizer = new_optimizer(model.parameters())
    train(model, optimizer, 2, rank, world_size)
    with md.measure(model, optimizer, timeline=False) as m:
        train(model, optimizer, 1, rank, world_size)
    if rank == 0:
        peak = m.memory.peak["parameters"] / (4 * config.parameters)
        print(f"{name:>23}: peak {peak:.2f} copies of the parameters, "
              f"{m.traffic['all_gather'].calls:>3} all-gathers per step")

# %% [markdown]
# <div lang="zh">
#
# 每个 Block 一个单元时：0.46 = 分片 0.25 + 两个 Block（一个在用，一个预取，见 4.4）各 0.08 + 根单元（词嵌入和输出层）0.05；27 次 = 13 个单元 × 2，再加最后各 rank 交换“谁用到了什么”的 1 次。
#
# </div>
#
# <div lang="en">
#
# With a unit per Block: 0.46 = the shards 0.25 + two Blocks (one in use, one prefetched, see 4.4) of 0.08 each + the root unit (embedding and output layer) 0.05. 27 = 13 units × 2, and one more at the end, in which ranks exchange who used what.
#
# </div>

# %% [markdown]
# ### 同样的东西，在 minidist 里 | The same in minidist

# %% [markdown]
# <div lang="zh">
#
# `minidist/parallel/fsdp.py` 里，一个单元的反向是这样开始和结束的（`use` 是单元在前向里的一次使用，`visits` 数它正在被用几次，`_make_ready` 是收集加预取）：
#
# </div>
#
# <div lang="en">
#
# In `minidist/parallel/fsdp.py` the backward of a unit begins and ends like this (a `use` is one use of the unit in forward, `visits` counts the uses under way, `_make_ready` gathers and prefetches):
#
# </div>

# %%
import inspect
from minidist.parallel import fsdp, fsdp_flat

print(inspect.getsource(fsdp.FSDP._begin_backward))
print(inspect.getsource(fsdp.FSDP._end_backward))
print(inspect.getsource(fsdp_flat.FlatShard.begin_gather))

# %% [markdown]
# <div lang="zh">
#
# | 手写的 | `md.FSDP` | 少了会怎样 |
# |---|---|---|
# | 自己写逐层循环 | 换掉单元的 `forward`，在输出上挂钩子：输出的梯度一到，该单元的反向开始；更早的单元的输出有了梯度，它就结束 | 只能用于顺序模型；用户得改训练循环 |
# | 假设每个参数都有梯度 | 没有梯度的位置填零照发；最后各 rank 交换“谁用到了什么” | 各 rank 发的东西不同，程序挂起 |
# | `full` 释放后谁都能碰 | 换成一维的分片，并弄错版本号 | 读到已释放的内存 |
# | 参数都是 fp32 | `MixedPrecision`：分片是 fp32 主副本，收集和计算用 bf16 | 收集的字节多一倍 |
# | 释放的内存每次还给系统 | 让进程留住释放的内存（`tune_process`） | 反复缺页：系统要把每一页重新清零，慢 4%～10% |
# | 一条连接里可以积压 4 MB | 同一台机器的 rank 之间最多 256 KB 在途（`tune_connections`） | 拷贝时数据已不在缓存里，中断和唤醒也更多：收集和归约更慢 |
# | 平均在收到之后 | 拷进缓冲区时顺手除以 N | 多过一遍内存，fp16 求和还可能溢出 |
# | 一层一用 | 一层用多次、重算（checkpoint）、共享权重、冻结参数 | 第二次用时已被释放，梯度只算了一部分 |
#
# torch 自己的两代：FSDP1（`FullyShardedDataParallel`）和我们一样用扁平参数；FSDP2（`fully_shard`）改为每个参数各自沿第 0 维切开（DTensor），`SHARD_GRAD_OP` 变成 `reshard_after_forward=False`，`HYBRID_SHARD` 变成二维 mesh。流程没有变。
#
# </div>
#
# <div lang="en">
#
# | ours | `md.FSDP` | what breaks without it |
# |---|---|---|
# | a hand-written loop over layers | replaces the unit's `forward` and hooks its output: the gradient of the output begins the unit's backward; when an earlier unit's output has its gradient, it has ended | works for sequential models only, and users would have to rewrite their loop |
# | trusts that every parameter has a gradient | sends zeros where there is none; at the end ranks exchange who used what | ranks send different things, the program hangs |
# | anybody can touch `full` when it is freed | 1-D pieces in its place, and a wrong version counter | reads of freed memory |
# | all in fp32 | `MixedPrecision`: the shard is the fp32 master, gather and compute in bf16 | twice the bytes to gather |
# | gives freed memory back to the system every time | the process keeps freed memory (`tune_process`) | page faults over and over: the system clears every page again, 4 to 10% slower |
# | up to 4 MB wait in one connection | at most 256 KB between ranks of one machine (`tune_connections`) | copies miss the caches, and there are more interrupts and wake-ups: gathers and reductions are slower |
# | averages on arrival | divides by N while copying into the buffer | one more pass over memory, and fp16 sums may overflow |
# | each layer is used once | layers used twice, recomputation (checkpointing), shared weights, frozen parameters | freed before the second use, gradients of half the uses |
#
# torch has two generations: FSDP1 (`FullyShardedDataParallel`) with flat parameters like ours, and FSDP2 (`fully_shard`), which cuts each parameter on its own along dimension 0 (DTensor). There `SHARD_GRAD_OP` is called `reshard_after_forward=False`, and `HYBRID_SHARD` is a 2-D mesh. The flow is the same.
#
# </div>

# %%
# %%ranks 4 --out losses
losses = {}
for strategy in STRATEGIES[1:]:
    model = md.FSDP(md.build_gpt(config), strategy=strategy, units=[Block])
    losses[strategy] = train(model, new_optimizer(model.parameters()), STEPS, rank, world_size)

# %%
curves = {"one process": reference}
curves |= {f"md.FSDP {name}": mean_over_ranks(losses, name) for name in losses[0]}
figures.loss_curves(curves, "one process");

# %% [markdown]
# <div lang="zh">
#
# 混合精度也只是构造时的一个参数：分片是 fp32 主副本，收集时转成 bf16，参数那两份通信就减半（0.75 + 0.75 → 一共 0.75）：
#
# </div>
#
# <div lang="en">
#
# Mixed precision is one argument of the constructor: the shard is the fp32 master, what is gathered is converted to bf16, and the two gathers cost half (0.75 + 0.75 → 0.75 in all):
#
# </div>

# %%
# %%ranks 4
for name, precision in (("fp32", None), ("bf16", md.MixedPrecision(torch.bfloat16, torch.float32))):
    model = md.FSDP(md.build_gpt(config), units=[Block], mixed_precision=precision)
    optimizer = new_optimizer(model.parameters())
    losses = train(model, optimizer, 2, rank, world_size)
    with md.measure(memory=False, timeline=False) as m:
        train(model, optimizer, 1, rank, world_size)
    if rank == 0:
        copies = {op: m.traffic[op].sent_bytes / (4 * config.parameters)
                  for op in ("all_gather", "reduce_scatter")}
        print(f"{name}: loss {losses[1]:.2f}; sent, in fp32 copies:",
              *(f"{op} {value:.2f} " for op, value in copies.items()))

# %% [markdown]
# ## 4.4 通信重叠 | Overlapping communication

# %% [markdown]
# ### 第四步：预取 | Step 4: prefetch

# %% [markdown]
# <div lang="zh">
#
# 到目前为止，每一层都是先等参数到齐，再计算：网络和计算轮流空着。可是下一层要什么，我们早就知道。于是：**算这一层之前，先把下一层的收集发出去**，算完时它多半已经到了。
#
# - **前向预取**：算第 i 层时收集第 i+1 层；
# - **反向预取**：反向第 i 层时收集“下一个”要用的，反向里的下一个是第 i−1 层。
#
# 和第 2 章一样，用 `Network` **模拟**一条慢网线（消息排队，每条花 `字节数 / bandwidth`），否则本机上几乎看不到通信时间。`gather` 分成两半：`begin_gather` 发出去，`finish_gather` 等它到。
#
# **先猜**：每层的通信时间和计算时间差不多时，预取一层能省掉多少等待？预取两层会再省一半吗？
#
# </div>
#
# <div lang="en">
#
# So far every layer first waits for its parameters and then computes: network and compute take turns at being idle. But we know what the next layer will need. So: **before computing a layer, send off the gather of the next one**, and by the time we are done it has probably arrived.
#
# - **forward prefetch**: gather layer i+1 while layer i computes;
# - **backward prefetch**: during the backward of layer i gather what comes "next", and next in backward is layer i−1.
#
# As in chapter 2, `Network` **emulates** a slow wire (messages queue up, each takes `bytes / bandwidth`); on one machine there is hardly any communication time to see. `gather` falls into two halves: `begin_gather` sends it off, `finish_gather` waits for it.
#
# **Predict**: when communication takes about as long as compute in every layer, how much of the waiting does prefetching one layer save? Will two layers halve the rest?
#
# </div>

# %%
import time
from minidist.measure import span

class Network:
    """A wire on which messages queue up: each takes bytes / bandwidth."""

    def __init__(self, bandwidth):
        self.bandwidth, self.free_at, self.messages = bandwidth, 0.0, []

    def carry(self, name, work, nbytes):
        sent = nbytes * (coll.world_size() - 1) / coll.world_size()
        begin = max(self.free_at, time.perf_counter())
        self.free_at = begin + sent / self.bandwidth
        self.messages.append((name, "communication", begin, self.free_at))
        return work, self.free_at

def arrive(message):
    work, arrives_at = message
    with span("wait", lane="wait"):
        time.sleep(max(0.0, arrives_at - time.perf_counter()))
        work.wait()

# %%
def begin_gather(unit, wire):
    if unit.full.untyped_storage().nbytes() == 0:            # else it is here, or on its way
        unit.full.untyped_storage().resize_(unit.nbytes)
        work = coll.all_gather(unit.full, unit.shard.detach(), async_op=True)
        unit.coming = wire.carry("gather", work, unit.nbytes)

def finish_gather(unit):
    arrive(unit.coming)

def begin_reduce(unit, wire):
    flat = torch.zeros(unit.full.numel())
    for p, place in zip(unit.params, views(flat, unit.params)):
        place.copy_(p.grad)
        p.grad = None
    unit.shard.grad = torch.empty_like(unit.shard)
    work = coll.reduce_scatter(unit.shard.grad, flat, "mean", async_op=True)
    return wire.carry("reduce", work, unit.nbytes)

# %%
def get_ready(unit, ahead, wire):
    begin_gather(unit, wire)
    finish_gather(unit)
    for other in ahead:
        begin_gather(other, wire)                                # travels while we compute

# %%
def overlapped(units, inputs, targets, wire, prefetch=1):
    saved, x, reducing = [], inputs, []
    for i, unit in enumerate(units):
        get_ready(unit, units[i + 1 : i + 1 + prefetch], wire)
        with span(f"F{i}"):
            x = x.detach().requires_grad_(x.is_floating_point())
            saved.append((x, unit.layer(x)))
        x = saved[-1][1]
        free(unit)
    logits = x.detach().requires_grad_()
    loss = md.loss_fn(logits, targets)
    loss.backward()
    gradient = logits.grad
    for i, unit in reversed(list(enumerate(units))):
        get_ready(unit, units[max(0, i - prefetch) : i][::-1], wire)
        with span(f"B{i}"):
            x, output = saved.pop()
            output.backward(gradient)
            gradient = x.grad
        free(unit)
        reducing.append(begin_reduce(unit, wire))                # travels under the next backward
    for message in reducing:
        arrive(message)
    return loss.item()

# %%
# %%ranks 2 --fast --out lines,losses
wide = md.GPTConfig(seq=64, width=128, layers=6)
rows = TextBatches(load_tokens(), seq=64, batch=8)
units = [Unit(layer) for layer in md.build_gpt(wide).layers()]
lines, losses = {}, []
for prefetch in (0, 1, 2):
    steps = []
    for _ in range(8):
        wire = Network(bandwidth=200e6)
        coll.barrier()
        start = time.perf_counter()
        with md.measure(memory=False, traffic=False) as m:
            loss = overlapped(units, *rows.at(0, rank, world_size), wire, prefetch)
        taken = time.perf_counter() - start
        spans = [(s.name, s.lane, s.start, s.end) for s in m.timeline.spans
                 if s.name == "wait" or s.name[1:].isdigit()]
        steps.append((taken, spans + wire.messages))
    losses.append(loss)
    taken, lines[prefetch] = min(steps)
    waiting = sum(end - begin for _, lane, begin, end in lines[prefetch] if lane == "wait")
    if rank == 0:
        print(f"prefetch {prefetch}: {taken * 1e3:4.0f} ms, {waiting * 1e3:4.0f} ms of it waiting")

# %%
import matplotlib.pyplot as plt
from types import SimpleNamespace
from minidist.measure.timeline import Span

print("same loss with and without prefetch:", len(set(losses[0])) == 1)
_, axes = plt.subplots(2, 1, figsize=(7.5, 4.8), layout="constrained")
for ax, prefetch in zip(axes, (0, 1)):
    line = SimpleNamespace(rank=0, spans=[Span(*each) for each in lines[0][prefetch]])
    figures.timeline([line], title=f"prefetch {prefetch}", ax=ax)
widest = max(ax.get_xlim()[1] for ax in axes)
for ax in axes:
    ax.set_xlim(0, widest)

# %% [markdown]
# <div lang="zh">
#
# （2 个 rank，各占一个核；每种取 8 步里最快的一步，画的是 rank 0。）上图：红、蓝交替，每条红的下面都是灰色的等待。下图：收集与计算同时进行，reduce-scatter 也一样，发出之后不等它，下一层的反向接着算。等待省掉了一大块，但不会全没：第一层没有“之前”可用；反向里每层有一次收集**加**一次 reduce-scatter，在同一条网线上排队。预取更多层只能抹平抖动：网线一旦一直忙着，再早排队也不会更快，却要多占一个单元的内存。
#
# 数字每次运行都会变；不变的是**次序**。看 `md.FSDP` 真正发出的次序（3 层的模型，第二步；`>` 是发出收集，`F`、`B` 是开始计算，`<` 是发出 reduce-scatter，R 是根单元）：
#
# </div>
#
# <div lang="en">
#
# (2 ranks, a core each; the fastest of 8 steps, as rank 0 saw it.) Above: red and blue take turns, and under every red there is grey waiting. Below: gathers run alongside compute, and so do reduce-scatters, which leave while the next layer's backward goes on. Much of the waiting is gone, but not all: nothing comes before the first layer, and in backward every layer has a gather **and** a reduce-scatter, which queue on the same wire. Still more layers ahead only smooth out jitter: once the wire is busy all the time, queueing earlier makes it no faster, and costs the memory of one more unit.
#
# Numbers change from run to run; the **order** does not. Here is the order in which `md.FSDP` really issues things (3 layers, second step; `>` a gather is issued, `F` and `B` a computation begins, `<` a reduce-scatter is issued, R is the root unit):
#
# </div>

# %%
import re

def order_of(spans):
    """A step in short: `>0 F0 B0 <0` for gather, forward, backward and reduce of block 0."""
    story = []
    for s in sorted(spans, key=lambda s: s.start):
        if "used parameters" in s.name:
            continue
        number = re.search(r"blocks\.(\d)", s.name)
        number = number[1] if number else "R"
        if s.lane == "communication":
            story.append((">" if s.name.startswith("all_gather") else "<") + number)
        elif re.fullmatch(r"forward (blocks\.\d|root)", s.name):
            story.append("F" + number)
        elif re.fullmatch(r"blocks\.\d backward", s.name):
            story.append("B" + number)
    return " ".join(story)

# %%
# %%ranks 4
small = md.GPTConfig(seq=16, width=32, layers=3)
for prefetch in (0, 1, 2):
    model = md.FSDP(md.build_gpt(small), units=[Block], prefetch=prefetch)
    for step in range(2):             # the first step learns the order of the units
        with md.measure(model) as m:
            inputs, targets = batches.at(step, rank, world_size)
            md.loss_fn(model(inputs), targets).backward()
    if rank == 0:
        print(f"prefetch {prefetch}: {order_of(m.timeline.spans)}")
        print(f"            peak of the parameters: {m.memory.peak['parameters']:,} bytes")

# %% [markdown]
# <div lang="zh">
#
# 读法：`prefetch 0` 里每个 `>` 都紧贴在要用它的 `F` 或 `B` 之前，必须干等；`prefetch 1` 里 `>1` 在 `F0` **之前**就已发出，反向里 `>1` 在 `B2` 之前。所以文档说“反向时提前收集下一层”是对的，只要记住：反向里的“下一层”是前向的**上一层**。torch 的 FSDP1 把这叫 `BACKWARD_PRE`（先发收集，再算梯度）；`BACKWARD_POST` 是算完再发，省一个单元的内存，少一些重叠；FSDP2 只有前者。
#
# 反向里 `<2` 和 `>0` 挨着：在 GPU 上两次传输可以一起走；在 CPU 上通信和计算用的是同样的核，一起走并不更快，却要一起占内存，所以 `md.FSDP` 先等 `<2` 走完，再发 `>0`。
#
# 每多预取一层，峰值正好多一个 `Block`。次序是从上一步学来的：第一步没有预取。
#
# </div>
#
# <div lang="en">
#
# How to read it: with `prefetch 0` every `>` stands right before the `F` or `B` that needs it, which can only wait. With `prefetch 1` the gather `>1` leaves **before** `F0`, and in backward `>1` before `B2`. So the document is right that backward gathers the next layer ahead, as long as you remember that "next" in backward is the **previous** layer of the forward. torch's FSDP1 calls this `BACKWARD_PRE` (first the gather, then the gradients); `BACKWARD_POST` gathers afterwards, saves the memory of one unit and overlaps less; FSDP2 only has the former.
#
# In backward `<2` and `>0` stand side by side. On a GPU both may be under way together; on a CPU communication and compute share the cores, two transfers at once are no faster, but both take memory, so `md.FSDP` waits for the end of `<2` before `>0` leaves.
#
# Each unit of prefetch adds exactly one `Block` to the peak. The order is learnt from the step before: the first step has no prefetch.
#
# </div>

# %%
claims.show("g")

# %% [markdown]
# ## 4.5 建议 | Advice

# %% [markdown]
# <div lang="zh">
#
# 文档给了四条建议。前三条按参数量划线：<1B 用 DDP，1B～7B 用 `FULL_SHARD`，>7B 用 FSDP 加 CPU 卸载（offload）。
#
# 参数量是个好记的替身，真正的问题是：**模型状态（16 字节 × 参数量 / N）加上激活值，放得进一张卡吗？** 让规划器（第 6 章）按显存来答：
#
# **先猜**：8 张 80 GB 的卡，DDP 能用到多大？哪些模型需要卸载？
#
# </div>
#
# <div lang="en">
#
# The document has four pieces of advice. Three of them draw lines by parameter count: below 1B DDP, 1B to 7B `FULL_SHARD`, above 7B FSDP with CPU offload.
#
# The parameter count is a stand-in that is easy to remember. The real question is: **do the model states (16 bytes × parameters / N) and the activations fit on a card?** Let the planner (chapter 6) answer by memory:
#
# **Predict**: 8 cards of 80 GB. Up to which size will it choose DDP? Which models need offload?
#
# </div>

# %%
questions = [(0.5e9, 8, "a100"), (3e9, 8, "a100"), (7e9, 8, "a100"), (13e9, 8, "a100"),
             (70e9, 256, "h100"), (1e9, 8, "rtx4090"), (13e9, 8, "rtx4090")]
for params, gpus, gpu in questions:
    best = md.plan(params=params, gpus=gpus, gpu=gpu).best
    print(f"{params / 1e9:>4.3g}B on {gpus:>3} x {gpu:<7}: {best.layout}")

# %% [markdown]
# <div lang="zh">
#
# - **<1B 用 DDP**：方向对，而且在 80 GB 的卡上到 3B 都成立（3B × 16 = 48 GB，DDP 更简单）。理由就是上面量到的 +50% 通信：放得下，就不必付。但在 24 GB 的卡上，1B（16 GB 状态加激活值）已经该分片了。
# - **1B～7B 用 `FULL_SHARD`**：好的默认值。
# - **>7B 加 CPU 卸载**：作为规则是错的。13B 在 8 张 80 GB 的卡上只需每卡 26 GB 状态，70B 在 256 张卡上更不需要。卸载要把参数和梯度搬过 PCIe，还要 CPU 来更新，是**总显存不够**时的最后一招，例如只有 24 GB 的消费级卡。
#
# </div>
#
# <div lang="en">
#
# - **Below 1B DDP**: the right direction, and on 80 GB cards true up to 3B (3B × 16 = 48 GB). The reason is the +50% of communication measured above: do not pay for what fits anyway. On 24 GB cards, though, 1B (16 GB of states, and the activations) already wants sharding.
# - **1B to 7B `FULL_SHARD`**: a good default.
# - **Above 7B with CPU offload**: wrong as a rule. 13B on 8 cards of 80 GB needs 26 GB of states per card, 70B on 256 cards still less. Offload carries parameters and gradients over PCIe and leaves the update to the CPU; it is the last resort when **all cards together** are short of memory, such as consumer cards with 24 GB.
#
# </div>

# %%
claims.show("j")

# %% [markdown]
# ### 多节点 | Several nodes

# %% [markdown]
# <div lang="zh">
#
# 第四条：多节点时用 `SHARD_GRAD_OP` 减少跨节点通信。它确实少了反向的那次 all-gather（3 份变 2 份）；可是它的集合通信仍然**横跨所有节点**。
#
# 第四种策略 `HYBRID_SHARD` 换了一个办法：只在**节点内**分片（快网络），节点之间复制。每个单元先在节点内 reduce-scatter，然后只把自己那一片在节点之间 all-reduce。
#
# 把 4 个 rank 当成 2 个节点，每个 2 张卡。数一数每个 rank 平均有多少字节离开自己的节点。
#
# **先猜**：`SHARD_GRAD_OP` 和 `HYBRID_SHARD`，谁少，少多少？
#
# </div>
#
# <div lang="en">
#
# The fourth piece of advice: with several nodes use `SHARD_GRAD_OP`, to reduce communication between nodes. It does save the all-gather of backward (2 parts in place of 3); but its collectives still **span all nodes**.
#
# A fourth strategy, `HYBRID_SHARD`, goes about it differently: shard **inside a node** only (where the network is fast) and replicate across nodes. Every unit is reduce-scattered inside the node, and then each rank all-reduces just its own shard across nodes.
#
# Take our 4 ranks as 2 nodes of 2 cards, and count the bytes that leave a node, per rank on average.
#
# **Predict**: `SHARD_GRAD_OP` or `HYBRID_SHARD`, which sends less, and by how much?
#
# </div>

# %%
# %%ranks 4
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "cards"))   # ranks {0,1}, {2,3}
# Which part of what is sent in a group goes to another node. In the world 2 of 3 peers are there
# (all-gather and reduce-scatter send to each peer directly), and 2 of 4 links of a ring all-reduce.
WORLD = dist.group.WORLD.group_name      # dist: torch.distributed, there in every %%ranks cell
leaves = {mesh["cards"].get_group().group_name: 0, mesh["nodes"].get_group().group_name: 1}

for strategy in (*STRATEGIES, "HYBRID_SHARD"):
    model = md.build_gpt(config)
    if strategy == "DDP":
        model = md.DDP(model)
    else:
        group = mesh if strategy == "HYBRID_SHARD" else None
        model = md.FSDP(model, strategy=strategy, units=[Block], group=group)
    for step in range(2):
        with md.measure(model, timeline=False) as m:
            inputs, targets = batches.at(step, rank, world_size)
            md.loss_fn(model(inputs), targets).backward()
    leaves[WORLD] = 1 / 2 if strategy in ("DDP", "NO_SHARD") else 2 / 3
    crossing = sum(leaves[g] * total.sent_bytes for g, total in m.traffic.by_group.items())
    if rank == 0:
        print(f"{strategy:>14}: sends {crossing / (4 * config.parameters):.2f} copies to the other node, "
              f"keeps {sum(p.numel() for p in model.parameters()) / config.parameters:.2f}")

# %% [markdown]
# <div lang="zh">
#
# `HYBRID_SHARD` 最少。（`SHARD_GRAD_OP` 看起来比 DDP 还多，只因为我们的 reduce-scatter 直接发给每个 rank，而 all-reduce 走环；都走环的话两者相同。）节点越大差距越大。下面用同样的口径算：W 张卡、每节点 G 张，在全体里发的每一份有 (W − G)/W 离开节点（FSDP 论文的公式把跨节点的组里发的**全部**字节都算进来，所以数字更大：2 个节点 × 8 张卡时 FULL_SHARD 是 2.81）。以模型大小 M 为单位：
#
# </div>
#
# <div lang="en">
#
# `HYBRID_SHARD` sends least. (`SHARD_GRAD_OP` seems to send more than DDP only because our reduce-scatter goes to each rank directly while the all-reduce goes round a ring; with rings for both they are equal.) Larger nodes widen the gap. Counted the same way for W cards, G per node: of every copy sent in the world, (W − G)/W leaves the node. (The formula in the FSDP paper counts **everything** sent in a group that spans nodes and gives larger numbers: 2.81 for FULL_SHARD on 2 nodes of 8.) In units of the model's size M:
#
# </div>

# %%
print("nodes x cards    SHARD_GRAD_OP  FULL_SHARD  HYBRID_SHARD")
for nodes, G in ((2, 2), (2, 8), (8, 8)):
    W = nodes * G
    hybrid = formulas.cross_host_traffic(1, W, G, "hybrid", exact=True)
    print(f"{nodes:>5} x {G:<5} {2 * (W - G) / W:>16.2f} M {3 * (W - G) / W:>9.2f} M {hybrid:>11.2f} M")

# %% [markdown]
# <div lang="zh">
#
# 怎么选：
#
# | 装得下…… | 用 | 每卡显存（模型状态） |
# |---|---|---|
# | 全部模型状态在**一个节点**里 | `HYBRID_SHARD` | 16 × 参数量 / 每节点卡数 |
# | 只有在所有节点上才装得下 | `FULL_SHARD`，再大就加上张量并行和流水线（第 3、6 章） | 16 × 参数量 / 总卡数 |
# | 本段的完整参数在每张卡上，而且用了流水线 | `SHARD_GRAD_OP` | (2 + 14/N) × 参数量 |
#
# 最后一行不是凑数：流水线里每个微批次都要前向，若每次都重新收集，通信就乘以微批次数；Llama 3 因此在前向后不释放参数。
#
# </div>
#
# <div lang="en">
#
# How to choose:
#
# | what fits | use | memory per card (model states) |
# |---|---|---|
# | all model states in **one node** | `HYBRID_SHARD` | 16 × parameters / cards per node |
# | only in all nodes together | `FULL_SHARD`; for still larger models with tensor and pipeline parallel (chapters 3 and 6) | 16 × parameters / cards |
# | the whole parameters of a stage on each of its cards, and there is a pipeline | `SHARD_GRAD_OP` | (2 + 14/N) × parameters |
#
# The last row is not a filler: in a pipeline every micro-batch has a forward, and gathering again for each multiplies the traffic by their number; this is why Llama 3 keeps parameters after forward.
#
# </div>

# %%
claims.show("i")

# %% [markdown]
# ## 小结 | Summary

# %% [markdown]
# <div lang="zh">
#
# - FSDP = 每层一个扁平缓冲区，切成 N 片，各管一片；用时 all-gather，用完释放；反向用 reduce-scatter 平均并分片梯度；优化器只更新自己那片。
# - 与单进程训练的数值相同；优化器不知道自己只管一片，但必须是逐元素的。
# - 峰值 = 模型状态 / N + 正在用（和预取）的单元。`SHARD_GRAD_OP` 另有一份完整参数，**不是** O(1/N)。
# - 每步发送 $3(N-1)/N$ 份参数，比 DDP 多 50%；`SHARD_GRAD_OP` 与 DDP 相同。
# - 预取一个单元：在算这一层之前发出下一层的收集；反向的“下一层”是前向的上一层。
# - 放得下就 DDP；放不下就 `FULL_SHARD`；多节点先看 `HYBRID_SHARD`；总显存都不够，才卸载。
#
# **延伸阅读**：Zhao et al. 2023, *PyTorch FSDP*，3.2 节（分片策略）、3.3 节（重叠，图 5、6）、5.4 节；Rajbhandari et al. 2020, *ZeRO*，5.3 节和第 7 节；Llama Team 2024, *The Llama 3 Herd of Models*，3.3.2 节；PyTorch 文档 `fully_shard`。
#
# **练习**：`minidist check 4`（在 `exercises/` 里）。**下一章**：同一件事的另一个名字，ZeRO。
#
# </div>
#
# <div lang="en">
#
# - FSDP = one flat buffer per layer, cut into N pieces, one owner each; all-gather for use, free after use; in backward a reduce-scatter averages and shards the gradients; the optimizer updates its own pieces only.
# - The numbers are those of single-process training. The optimizer does not know that it has a piece only, but it has to work element by element.
# - Peak = model states / N + the units in use (and prefetched). `SHARD_GRAD_OP` holds the whole parameters besides and is **not** O(1/N).
# - $3(N-1)/N$ copies of the parameters are sent per step, 50% more than DDP; with `SHARD_GRAD_OP` as many as DDP.
# - Prefetching a unit: issue the gather of the next layer before computing this one. "Next" in backward is the previous layer of the forward.
# - DDP if it fits; if not, `FULL_SHARD`; with several nodes look at `HYBRID_SHARD` first; offload only when all cards together are short of memory.
#
# **Further reading**: Zhao et al. 2023, *PyTorch FSDP*, sections 3.2 (sharding strategies), 3.3 (overlap, figures 5 and 6) and 5.4; Rajbhandari et al. 2020, *ZeRO*, sections 5.3 and 7; Llama Team 2024, *The Llama 3 Herd of Models*, section 3.3.2; PyTorch documentation of `fully_shard`.
#
# **Exercises**: `minidist check 4` (in `exercises/`). **Next**: another name for the same thing, ZeRO.
#
# </div>
