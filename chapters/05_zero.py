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
# # 5. DeepSpeed ZeRO

# %% [markdown]
# <div lang="zh">
#
# **目标**：亲手写出 ZeRO 的三个阶段和卸载（offload），每一步只比前一步多几行：切优化器状态（ZeRO-1）→ 切梯度（ZeRO-2）→ 切参数（ZeRO-3）→ 状态搬到磁盘。每一步都和单进程训练对照，量内存、数字节，并核对文档里的 4×、8×、“+1.5×”。另外还有三件训练大模型躲不开的事：32 位主副本、全局范数裁剪、梯度累积。
#
# **时间**：约 3 小时。**对应文档**：第 5 节（5.1 概述、5.2 三阶段、5.3 ZeRO vs FSDP、5.4 Offload）。**先读**：第 2 章（桶与钩子）、第 4 章（收集与释放）。
#
# **练习**：`minidist check 5`。只看中文：在任意单元格运行 `%lang zh`。
#
# </div>
#
# <div lang="en">
#
# **Goals**: write the three stages of ZeRO and offload with your own hands, each a few lines more than the one before: shard the optimizer states (ZeRO-1) → the gradients (ZeRO-2) → the parameters (ZeRO-3) → move states to disk. Every step is compared with single-process training, its memory measured, its bytes counted, and the document's 4×, 8× and "+1.5×" checked. Besides, three things no training of a large model gets around: 32-bit masters, clipping by the global norm, gradient accumulation.
#
# **Time**: about 3 hours. **Follows** section 5 of the document (5.1 overview, 5.2 three stages, 5.3 ZeRO vs FSDP, 5.4 offload). **Before this**: chapter 2 (buckets and hooks), chapter 4 (gather and free).
#
# **Exercises**: `minidist check 5`. English only: run `%lang en` in any cell.
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
# ## 5.1 概述 | Overview

# %% [markdown]
# <div lang="zh">
#
# ZeRO（Zero Redundancy Optimizer，零冗余优化器）是微软 2020 年的论文，DeepSpeed 是它的实现。它和 FSDP 的目标一样：数据并行里 N 份相同的状态，只留一份。区别在于 ZeRO 把“留一份”分成三档，可以只切最大的那一块。
#
# 哪一块最大？大模型用**混合精度**训练：参数和梯度是 16 位，但更新要在 32 位里做（原因见 5.2 末尾）。
#
# **先猜**：文档说 Adam 要存动量和方差，约 2 倍参数量。在混合精度下，优化器占模型状态的几成？
#
# </div>
#
# <div lang="en">
#
# ZeRO (Zero Redundancy Optimizer) is a 2020 paper from Microsoft; DeepSpeed is its implementation. Its aim is FSDP's: of the N identical states of data parallel training, keep one. The difference is that ZeRO does so in three stages, so that you can cut just the largest part.
#
# Which part is the largest? Large models train in **mixed precision**: parameters and gradients have 16 bits, but updates are made in 32 (for the reason see the end of 5.2).
#
# **Predict**: the document says that Adam stores momentum and variance, about twice the parameters. In mixed precision, which share of the model states is the optimizer's?
#
# </div>

# %%
from minidist.plan import formulas
from minidist.train.optim import MasterOptimizer

config = md.GPTConfig(seq=16, width=64, layers=6)
batches = TextBatches(load_tokens(), seq=16, batch=8)        # 8 rows over all ranks
STATES = ("parameters", "gradients", "optimizer")

def held(model, optimizer, rank=0, world_size=1):
    """Bytes per parameter by kind, between backward and step: when all model states exist."""
    for step in range(2):                                    # Adam makes its states in step 0
        inputs, targets = batches.at(step, rank, world_size)
        with md.measure(model, optimizer, timeline=False) as m:
            md.loss_fn(model(inputs), targets).backward()
            kinds = dict(m.memory.current)
            optimizer.step()
            kinds["optimizer"] = m.memory.current["optimizer"]
        optimizer.zero_grad()
    return {kind: kinds[kind] / config.parameters for kind in STATES}

model = md.build_gpt(config, dtype=torch.bfloat16)
optimizer = MasterOptimizer(model.parameters(), torch.optim.AdamW)    # steps on 32-bit copies
alone = held(model, optimizer)
print("bytes per parameter:", *(f"{kind} {value:.2f} " for kind, value in alone.items()))

# %% [markdown]
# <div lang="zh">
#
# 2 + 2 + 12 = 16 字节，优化器占四分之三：32 位的主副本（master）4 字节、动量 4、方差 4。“2 倍参数量”按**个数**数没错，按**字节**数就漏了主副本，而且 32 位的一个数顶 16 位的两个。所以第一刀切在优化器上。
#
# </div>
#
# <div lang="en">
#
# 2 + 2 + 12 = 16 bytes, and three quarters are the optimizer's: a 32-bit master copy (4 bytes), momentum (4), variance (4). "Twice the parameters" is right when you count **numbers**; counted in **bytes** it leaves out the master, and a 32-bit number weighs as much as two of 16 bits. So that is where the first cut goes.
#
# </div>

# %% [markdown]
# ## 5.2 三阶段 | The three stages

# %% [markdown]
# ### 参照：单进程与 DDP | The references: one process, and DDP

# %% [markdown]
# <div lang="zh">
#
# 先用 fp32 写，好与单进程对照（只差加法次序，1e-7）；混合精度放到后面。`train` 留了一个口子：`prepare(model)` 返回一个函数，在 `backward()` 之后做**全部**剩下的事（同步、更新、清零）。阶段 0 到 3，就是四个不同的 `prepare`。
#
# `flatten` 和第 2、4 章一样：全部参数成为一个缓冲区的视图，全部梯度成为另一个的视图，都补零到 N 的倍数。
#
# </div>
#
# <div lang="en">
#
# We write in fp32 first, so that numbers can be compared with one process (they differ by the order of additions only, 1e-7); mixed precision comes later. `train` leaves one opening: `prepare(model)` returns a function that does **everything** that is left after `backward()` (synchronise, update, clear). Stages 0 to 3 are four different `prepare`s.
#
# `flatten` does what chapters 2 and 4 did: all parameters become views of one buffer, all gradients views of another, both padded to a multiple of N.
#
# </div>

# %%
STEPS = 8

def new_optimizer(params):
    return torch.optim.AdamW(params, lr=1e-3, fused=True)    # fused: updates without temporaries

def train(prepare, rank=0, world_size=1, steps=STEPS):
    model = md.build_gpt(config)
    finish_step = prepare(model)
    losses = []
    for step in range(steps):
        inputs, targets = batches.at(step, rank, world_size)
        loss = md.loss_fn(model(inputs), targets)
        loss.backward()
        finish_step()
        losses.append(loss.item())
    return losses

def plain(model):
    optimizer = new_optimizer(model.parameters())

    def finish_step():
        optimizer.step()
        optimizer.zero_grad()
    return finish_step

reference = train(plain)
print(f"{config.parameters:,} parameters; loss:", *(f"{loss:.3f}" for loss in reference))

# %%
def views(flat, params):
    """The pieces of `flat` that belong to `params`, in their shapes."""
    parts = flat[: sum(p.numel() for p in params)].split([p.numel() for p in params])
    return [part.view(p.shape) for part, p in zip(parts, params)]

def flatten(params):
    """A flat buffer of which the parameters become views."""
    n = coll.world_size()
    values = torch.zeros(n * -(-sum(p.numel() for p in params) // n))    # a multiple of n
    for p, view in zip(params, views(values, params)):
        view.copy_(p.detach())
        p.data = view
    return values

def flat_gradients(params, values):
    grads = torch.zeros_like(values)
    for p, view in zip(params, views(grads, params)):
        p.grad = view                                        # backward adds into it
    return grads

# %%
def stage_0(model):                                          # DDP: nothing is sharded
    params = list(model.parameters())
    values = flatten(params)
    everything = torch.nn.Parameter(values)
    everything.grad = grads = flat_gradients(params, values)
    optimizer = new_optimizer([everything])

    def finish_step():
        coll.all_reduce(grads, "mean")
        optimizer.step()
        grads.zero_()
    return finish_step

# %% [markdown]
# ### 阶段 1：切优化器状态 | Stage 1: shard the optimizer states

# %% [markdown]
# <div lang="zh">
#
# 想法很直接：每个 rank 只为自己那四分之一参数保存动量和方差，只更新那四分之一，然后大家把更新后的参数拼起来（all-gather）。改动只有两处：优化器只看 `shard`（自己那四分之一），更新之后加一次 all-gather。
#
# 文档的表说通信量“≈ DDP”。**先猜**：下面这一版呢？（内存的单位是字节/参数，通信的单位是“几份参数”，DDP 是 1.5 份。）
#
# </div>
#
# <div lang="en">
#
# The idea is simple: every rank keeps momentum and variance for its own quarter of the parameters, updates that quarter, and then all of them put the updated parameters together (all-gather). Two changes: the optimizer sees `shard` only (this rank's quarter), and an all-gather follows the update.
#
# The document's table says communication "≈ DDP". **Predict**: is that so for this version? (Memory is in bytes per parameter, communication in copies of the parameters; DDP sends 1.5.)
#
# </div>

# %%
def own(flat):
    """This rank's quarter of a flat buffer, as a view."""
    return flat.chunk(coll.world_size())[coll.rank()]

def stage_1_first_try(model):
    params = list(model.parameters())
    values = flatten(params)
    grads = flat_gradients(params, values)
    shard = torch.nn.Parameter(own(values))
    shard.grad = own(grads)
    optimizer = new_optimizer([shard])                       # states for a quarter only

    def finish_step():
        coll.all_reduce(grads, "mean")
        optimizer.step()                                     # changes my quarter of `values`
        coll.all_gather(values, own(values))                 # everybody's quarters, in place
        grads.zero_()
    return finish_step

# %%
def compare(prepare):
    """Train on all ranks, then measure one step."""
    losses = train(prepare, coll.rank(), coll.world_size())
    model = md.build_gpt(config)
    finish_step = prepare(model)
    for step in range(2):
        inputs, targets = batches.at(step, coll.rank(), coll.world_size())
        with md.measure(model, timeline=False) as m:
            md.loss_fn(model(inputs), targets).backward()
            finish_step()
    kinds = {kind: m.memory.peak[kind] for kind in STATES}
    sent = {op: total.sent_bytes for op, total in m.traffic.by_op.items()}
    if coll.rank() == 0:
        per = {kind: value / config.parameters for kind, value in kinds.items()}
        print(f"{prepare.__name__:>17}:", *(f"{kind} {value:.2f} " for kind, value in per.items()),
              f"| copies sent {sum(sent.values()) / 4 / config.parameters:.2f}")
    return {"losses": losses, "memory": kinds, "sent": sent}

# %%
# %%ranks 4 --out results
results = {prepare.__name__: compare(prepare) for prepare in (stage_0, stage_1_first_try)}

# %% [markdown]
# <div lang="zh">
#
# 内存对了（优化器从 8 字节降到 2），通信却从 1.5 份涨到 2.25 份：all-reduce 1.5，再加 all-gather 0.75。
#
# 多余的是哪一半？all-reduce = reduce-scatter + all-gather，它的后一半把**平均梯度**送到每个 rank，可每个 rank 只用得着自己那四分之一。去掉它：
#
# </div>
#
# <div lang="en">
#
# The memory is right (the optimizer went from 8 bytes to 2), but communication rose from 1.5 copies to 2.25: 1.5 for the all-reduce and 0.75 for the all-gather.
#
# Which half is superfluous? An all-reduce is a reduce-scatter and an all-gather; its second half brings the **mean gradients** to every rank, which has no use for them beyond its own quarter. Drop it:
#
# </div>

# %%
def stage_1(model):
    params = list(model.parameters())
    values = flatten(params)
    grads = flat_gradients(params, values)
    shard = torch.nn.Parameter(own(values))
    shard.grad = own(grads)
    optimizer = new_optimizer([shard])

    def finish_step():
        coll.reduce_scatter(shard.grad, grads, "mean")       # the mean of my quarter only
        optimizer.step()
        coll.all_gather(values, own(values))
        grads.zero_()
    return finish_step

# %%
# %%ranks 4 --out results
results["stage_1"] = compare(stage_1)

# %% [markdown]
# <div lang="zh">
#
# 1.5 份，和 DDP 一样多：ZeRO-1 只是把 all-reduce 拆成两半，在中间塞进了更新。文档的“≈ DDP”成立，**前提**是这样写。
#
# </div>
#
# <div lang="en">
#
# 1.5 copies, as many as DDP: ZeRO-1 merely opens the all-reduce in the middle and puts the update in there. The document's "≈ DDP" holds, **provided** you write it this way.
#
# </div>

# %% [markdown]
# ### 阶段 2：再切梯度 | Stage 2: shard the gradients as well

# %% [markdown]
# <div lang="zh">
#
# 平均之后，每个 rank 的梯度只有四分之一有用，另外四分之三可以扔。但要真正省下内存，不能等反向结束：那时完整的梯度已经占过内存了。所以要像第 2 章那样分**桶**：一个桶（这里是一层）的梯度一到齐，就 reduce-scatter，留下自己那片，扔掉其余的。
#
# **先猜**：fp32、4 个 rank，完整的梯度是 4 字节/参数。阶段 2 的梯度峰值会是 1（四分之一）、2 左右，还是接近 4？
#
# </div>
#
# <div lang="en">
#
# Once averaged, a quarter of the gradients is of use to a rank and three quarters can go. But to save memory in earnest you cannot wait for the end of backward: by then the whole gradients have been there. So they go into **buckets** as in chapter 2: as soon as the gradients of a bucket (here: a layer) are complete, reduce-scatter it, keep your piece, throw the rest away.
#
# **Predict**: in fp32 on 4 ranks the whole gradients are 4 bytes per parameter. Will the gradient peak of stage 2 be 1 (a quarter), around 2, or close to 4?
#
# </div>

# %%
class Bucket:
    """Parameters that are reduced, updated and gathered together."""

    def __init__(self, params):
        self.params, self.missing = params, len(params)
        self.values = flatten(params)
        self.shard = torch.nn.Parameter(own(self.values))
        for p in params:
            p.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, param):
        self.missing -= 1
        if self.missing == 0:                                # the bucket is full
            self.missing = len(self.params)
            self.reduce()

    def reduce(self):
        flat = md.measure.tag(torch.zeros_like(self.values), "gradients")   # to be counted as such
        for p, place in zip(self.params, views(flat, self.params)):
            place.copy_(p.grad)
            p.grad = None
        self.shard.grad = md.measure.tag(torch.empty_like(self.shard), "gradients")
        coll.reduce_scatter(self.shard.grad, flat, "mean")   # my quarter stays, `flat` goes

# %%
def stage_2(model):
    buckets = [Bucket(list(layer.parameters())) for layer in model.layers()]
    optimizer = new_optimizer([bucket.shard for bucket in buckets])

    def finish_step():
        optimizer.step()
        for bucket in buckets:
            coll.all_gather(bucket.values, own(bucket.values))
        optimizer.zero_grad()
    return finish_step

# %%
# %%ranks 4 --out results
results["stage_2"] = compare(stage_2)

# %% [markdown]
# <div lang="zh">
#
# 2 左右：四分之一，加上正在归约的那一层，而且是**两份**（各参数的 `grad` 和拼起来的 `flat`）。桶越小，多出来的越少（ZeRO-2 什么时候不比 ZeRO-1 省，后面会看到）。通信不变：本来就要 reduce-scatter，现在只是早一点、分几次发。
#
# </div>
#
# <div lang="en">
#
# Around 2: a quarter, and the layer that is being reduced, **twice** (the `grad` of each parameter, and `flat` in which they are put together). Smaller buckets, less on top (when ZeRO-2 saves nothing over ZeRO-1 we will see below). Communication stays the same: the reduce-scatter was needed anyway, it now leaves earlier and in several parts.
#
# </div>

# %% [markdown]
# ### 阶段 3：连参数也切 | Stage 3: shard the parameters too

# %% [markdown]
# <div lang="zh">
#
# 这一步就是第 4 章：参数用时收集，用完释放。在桶上加两个动作 `gather` 和 `free`，再用钩子放到对的时刻：前向之前收集，前向之后释放；这一层**输出的梯度**一到，说明它的反向要开始了，再收集；反向之后的释放就放在 `reduce` 里。更新之后不用 all-gather 了，下一步用到时自然会收集。
#
# **先猜**：通信变成几份？文档写的是“+1.5×”。
#
# </div>
#
# <div lang="en">
#
# This step is chapter 4: gather parameters for use, free them after. The bucket gets two more moves, `gather` and `free`, and hooks put them at the right moments: gather before forward, free after it; when the **gradient of the layer's output** arrives, its backward is about to begin: gather again; the free after backward goes into `reduce`. No all-gather follows the update any more, the next step gathers when it needs to.
#
# **Predict**: how many copies will be sent now? The document says "+1.5×".
#
# </div>

# %%
class Unit(Bucket):
    """A bucket whose parameters are whole only while its layer computes."""

    def __init__(self, layer):
        super().__init__(list(layer.parameters()))
        self.shard.data = self.shard.detach().clone()        # `values` will come and go
        self.free()
        layer.register_forward_pre_hook(self.gather)
        layer.register_forward_hook(self.after_forward)

    def after_forward(self, layer, inputs, output):
        self.free()
        output.register_hook(self.gather)     # the gradient of the output: backward begins

    def gather(self, *_):
        self.values.untyped_storage().resize_(4 * self.values.numel())
        coll.all_gather(self.values, self.shard.detach())

    def free(self):
        self.values.untyped_storage().resize_(0)

    def reduce(self):
        self.free()
        super().reduce()

# %%
def stage_3(model):
    units = [Unit(layer) for layer in model.layers()]
    optimizer = new_optimizer([unit.shard for unit in units])

    def finish_step():
        optimizer.step()
        optimizer.zero_grad()
    return finish_step

# %%
# %%ranks 4 --out results
results["stage_3"] = compare(stage_3)

# %%
def mean_over_ranks(name):
    return [sum(step) / len(step) for step in zip(*(each[name]["losses"] for each in results))]

curves = {"one process": reference}
curves |= {name: mean_over_ranks(name) for name in ("stage_0", "stage_1", "stage_2", "stage_3")}
figures.loss_curves(curves, "one process");

# %%
import matplotlib.pyplot as plt

shown = ("stage_0", "stage_1", "stage_2", "stage_3")
P, N = config.parameters, 4
once = (N - 1) / N * 4 * P
_, (left, right) = plt.subplots(1, 2, figsize=(10, 2.8), layout="constrained")
figures.memory_bars({name: results[0][name]["memory"] for name in shown},
                    {f"stage_{k}": sum(formulas.state_bytes(P, k, N, "fp32").values())
                     for k in range(4)}, ax=left)
figures.traffic_bars({name: results[0][name]["sent"] for name in shown},
                     {f"stage_{k}": (3 if k == 3 else 2) * once for k in range(4)}, ax=right);

# %% [markdown]
# <div lang="zh">
#
# 四条曲线与单进程重合，内存一档比一档少，都落在公式（黑线）上，只有阶段 2、3 多出正在用的那一层（它的梯度是两份）。（每条把参数、梯度、优化器各自的峰值加在一起，这些峰值不一定在同一时刻。）通信：前三档都是 1.5 份，阶段 3 是 2.25 份，即 DDP 的 **1.5 倍**。所以文档的“+1.5×”应读作“×1.5”，也就是 **+50%**：参数多收集一次。
#
# </div>
#
# <div lang="en">
#
# Four curves on top of the single process; memory falls from stage to stage and ends at the formula (black line), with the layer in use on top in stages 2 and 3 (its gradients twice). (A bar adds up each kind's own peak; these need not come at the same moment.) Communication: 1.5 copies for the first three, 2.25 for stage 3, which is **1.5 times** DDP's. So the document's "+1.5×" should read "×1.5", that is **+50%**: parameters are gathered once more.
#
# </div>

# %% [markdown]
# ### 先错一次：有一个 rank 没用到某一层 | A mistake: a layer that one rank did not use

# %% [markdown]
# <div lang="zh">
#
# 我们的桶“装满就发”。设想 rank 3 的数据恰好跳过了第 2 层（条件分支、专家混合、随机丢层都会这样）。
#
# **先猜**：rank 3 少了那一层的梯度，会怎样？
#
# </div>
#
# <div lang="en">
#
# Our bucket "leaves when it is full". Suppose the data of rank 3 happen to skip layer 2 (a conditional branch, a mixture of experts, stochastic depth).
#
# **Predict**: rank 3 has no gradients for that layer. What happens?
#
# </div>

# %%
def skipping_step(model, finish_step, rank):
    x, targets = batches.at(0, rank, 4)
    for i, layer in enumerate(model.layers()):
        if not (rank == 3 and i == 2):
            x = layer(x)
    md.loss_fn(x, targets).backward()
    finish_step()

# %% tags=["raises-exception"]
# %%ranks 4
import os

os.environ["MINIDIST_DEBUG"] = "1"          # all ranks compare every call before it is made
model = md.build_gpt(config)
skipping_step(model, stage_2(model), rank)

# %% [markdown]
# <div lang="zh">
#
# 看 `First difference` 那一行：rank 0～2 在归约 49984 个数的一层，rank 3 已经到了只有 17408 个数的词嵌入（`MINIDIST_DEBUG=1` 让各 rank 在每次通信之前先比对；不打开它，收到的字节数不对，进程会直接崩溃）。
#
# 更可怕的是**没有**报错的那一步：rank 3 少了第 2 层，于是别人的第 2 层和它的第 1 层**大小相同**，已经被悄悄加在一起了。
#
# 修法：**每次反向，每个 rank 都按同一次序发同样的桶**，没有梯度的地方填零。`md.ZeroOptimizer` 就是这样做的：
#
# </div>
#
# <div lang="en">
#
# Look at the line `First difference`: ranks 0 to 2 reduce a layer of 49984 numbers while rank 3 has arrived at the embedding with its 17408 (`MINIDIST_DEBUG=1` lets the ranks compare notes before every call; without it the number of bytes that arrive is wrong, and the process crashes).
#
# Worse is the step that did **not** complain: rank 3 skipped layer 2, so the others' layer 2 met its layer 1, **of the same size**, and the two have silently been added up.
#
# The remedy: **in every backward every rank sends the same buckets in the same order**, with zeros where there is no gradient. That is what `md.ZeroOptimizer` does:
#
# </div>

# %%
# %%ranks 4
os.environ["MINIDIST_DEBUG"] = "0"
model = md.build_gpt(config)
optimizer = md.ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, stage=2, lr=1e-3)
skipping_step(model, optimizer.step, rank)
weight = model.blocks[1].mlp.up.weight.detach()
print("same on all ranks:", torch.equal(weight, coll.broadcast(weight.clone(), src=0)))

# %% [markdown]
# ### 同样的东西，在 minidist 里 | The same in minidist

# %%
import inspect
from minidist.parallel.zero import ZeroOptimizer

print(inspect.getsource(ZeroOptimizer._on_gradient))
print(inspect.getsource(ZeroOptimizer._reduce))

# %% [markdown]
# <div lang="zh">
#
# | 手写的 | `md.ZeroOptimizer` | 少了会怎样 |
# |---|---|---|
# | 桶装满就发 | 按编号依次发（`self._next`）；反向结束时把没装满的也发掉 | 上面那个错误 |
# | 收到之前不往下走 | 异步发出，反向继续；阶段 2 同时只有一个在路上 | 通信全露在外面；在路上的太多，内存又回来了 |
# | 释放的内存每次还给系统 | 让进程留住释放的内存（`tune_process`） | 反复缺页：系统要把每一页重新清零 |
# | 一层一桶 | 25 MB 一桶，按反向次序装 | 小层太碎，大层太大 |
# | 一组超参数 | 每个参数组各自分桶，学习率随调度器变 | 偏置也被加了权重衰减 |
# | fp32 | `master_dtype`、`reduce_dtype` | 见下面“32 位主副本” |
# | — | `no_sync`、`clip_grad_norm_`、完整与分片的存盘、冻结参数 | 训练脚本跑不起来 |
#
# 阶段 3 在 minidist 里就是 `md.FSDP`。一个开关选择全部这些：
#
# </div>
#
# <div lang="en">
#
# | ours | `md.ZeroOptimizer` | what breaks without it |
# |---|---|---|
# | a full bucket leaves | buckets leave in order of their number (`self._next`); at the end of backward also those that are not full | the mistake above |
# | waits for the result at once | sends asynchronously while backward goes on; in stage 2 only one at a time is under way | all communication is exposed; or, with too many under way, the memory is back |
# | gives freed memory back to the system every time | the process keeps freed memory (`tune_process`) | page faults over and over: the system clears every page again |
# | one bucket per layer | buckets of 25 MB in backward order | small layers make crumbs, large ones lumps |
# | one set of options | buckets per parameter group, learning rates follow the scheduler | weight decay on biases |
# | fp32 | `master_dtype`, `reduce_dtype` | see "32-bit masters" below |
# | — | `no_sync`, `clip_grad_norm_`, full and sharded state dicts, frozen parameters | no real training script runs |
#
# Stage 3 is `md.FSDP` in minidist. One switch chooses among all of them:
#
# </div>

# %%
# %%ranks 4 --out results
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp")

def train_sharded(strategy, steps=STEPS):
    model, optimizer = md.shard(md.build_gpt(config), torch.optim.AdamW, strategy, lr=1e-3)
    losses = []
    for step in range(steps):
        inputs, targets = batches.at(step, rank, world_size)
        loss = md.loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

results = {strategy: {"losses": train_sharded(strategy)} for strategy in STRATEGIES}
same = results["zero1"] == results["zero2"] == results["zero3"]
if rank == 0:
    print("zero1, zero2 and zero3 agree to the last bit:", same)

# %%
curves = {"one process": reference} | {name: mean_over_ranks(name) for name in results[0]}
figures.loss_curves(curves, "one process");

# %% [markdown]
# ### 4×、8×、N×？ | 4×, 8×, N×?

# %% [markdown]
# <div lang="zh">
#
# 现在核对文档的表，用它所说的混合精度（16 字节/参数）。每个 rank 剩下的字节数，由“切了什么”直接写出：
#
# | 阶段 | 每参数字节 | 节省 |
# |---|---|---|
# | 0（DDP） | $2 + 2 + 12 = 16$ | 1 |
# | 1 | $2 + 2 + 12/N$ | $16 / (4 + 12/N)$ |
# | 2 | $2 + (2 + 12)/N$ | $16 / (2 + 14/N)$ |
# | 3 | $16/N$ | $N$ |
#
# **先猜**：我们的 4 个 rank，阶段 1 和 2 各省几倍？多少张卡才到 4 倍和 8 倍？
#
# </div>
#
# <div lang="en">
#
# Now check the document's table, in the mixed precision it speaks of (16 bytes per parameter). What is left on each rank can be read off what is cut:
#
# | stage | bytes per parameter | saving |
# |---|---|---|
# | 0 (DDP) | $2 + 2 + 12 = 16$ | 1 |
# | 1 | $2 + 2 + 12/N$ | $16 / (4 + 12/N)$ |
# | 2 | $2 + (2 + 12)/N$ | $16 / (2 + 14/N)$ |
# | 3 | $16/N$ | $N$ |
#
# **Predict**: with our 4 ranks, how many times less do stages 1 and 2 take? And how many cards does it take to get to 4 and 8 times?
#
# </div>

# %%
# %%ranks 4 --out measured
measured = {}
for stage in (1, 2, 3):
    if stage == 3:       # 32-bit shards, gathered and computed in bf16
        precision = md.MixedPrecision(torch.bfloat16, torch.float32)
        model = md.FSDP(md.build_gpt(config), units=[Block], mixed_precision=precision)
        optimizer = torch.optim.AdamW(model.parameters())
    else:
        model = md.build_gpt(config, dtype=torch.bfloat16)
        optimizer = md.ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, stage=stage,
                                     master_dtype=torch.float32)
    measured[stage] = held(model, optimizer, rank, world_size)

# %%
from minidist.plan.costs import Layout
from minidist.plan.dryrun import dry_run

KIND = {1: "zero1", 2: "zero2", 3: "fsdp"}
bars = {"one process (= DDP)": alone}
print("saving      N=4 measured   N=8 dry run   N=64 dry run   N to infinity, formula")
for stage in (1, 2, 3):
    bars[f"ZeRO-{stage}, N=4"] = measured[0][stage]
    row = [16 / sum(measured[0][stage].values())]
    for n in (8, 64):
        row.append(16 * P / dry_run(config, Layout(dp=n, dp_kind=KIND[stage])).states)
    limit = 16 / sum(formulas.state_bytes(1, stage, 1e12).values())
    print(f"ZeRO-{stage}: {row[0]:>12.2f} {row[1]:>13.2f} {row[2]:>14.2f}",
          f"{limit:>15.2f}" if stage < 3 else "              N")
figures.memory_bars(bars, {"one process (= DDP)": 16} | {f"ZeRO-{k}, N=4": sum(formulas.state_bytes(1, k, 4).values())
                                         for k in (1, 2, 3)},
                    title="bytes per parameter between backward and step");

# %% [markdown]
# <div lang="zh">
#
# 干跑里跑的是同一份 `ZeroOptimizer` 和 `FSDP` 代码，只是张量没有数据（第 4 章）。4× 和 8× 是 N 趋于无穷的**极限**，而且以混合精度的 16 字节为前提：一台 8 卡的机器上是 2.9× 和 4.3×，64 张卡才有 3.8× 和 7.2×。只有阶段 3 真的与 N 成正比（63.4 而不是 64，是因为补零，模型这么小才看得出来；它的 4 字节分法不同：`md.FSDP` 的分片本身就是 fp32 主副本，所以参数 1、梯度 1、优化器 2）。纯 fp32（4 + 4 + 8）时极限更低：ZeRO-1 是 2×，ZeRO-2 是 4×。
#
# </div>
#
# <div lang="en">
#
# The dry run executes the same code of `ZeroOptimizer` and `FSDP`, with tensors that hold no data (chapter 4). 4× and 8× are **limits** as N goes to infinity, and they presuppose the 16 bytes of mixed precision: a machine of 8 cards gets 2.9× and 4.3×, and it takes 64 cards for 3.8× and 7.2×. Only stage 3 is truly proportional to N (63.4 and not 64: padding, which shows in a model this small; its 4 bytes are divided in another way: the shard of `md.FSDP` is the fp32 master itself, hence 1 for parameters, 1 for gradients, 2 for the optimizer). In pure fp32 (4 + 4 + 8) the limits are lower: 2× for ZeRO-1, 4× for ZeRO-2.
#
# </div>

# %%
claims.show("b")

# %% [markdown]
# ### ZeRO-2 什么时候不比 ZeRO-1 省 | When ZeRO-2 saves nothing

# %% [markdown]
# <div lang="zh">
#
# 论坛上的常见问题：“我把 stage 1 改成 2，怎么反而爆显存了？”
#
# **先猜**：反向刚结束时，梯度加通信缓冲区一共多少字节/参数（fp32）？桶分别是 25 MB（比我们的模型还大）、0.4 MB、0.1 MB。
#
# </div>
#
# <div lang="en">
#
# A common question in forums: "I changed stage 1 to 2, why do I run out of memory now?"
#
# **Predict**: when backward has just ended, how many bytes per parameter (fp32) are gradients and communication buffers together? With buckets of 25 MB (more than our model), 0.4 MB and 0.1 MB.
#
# </div>

# %%
# %%ranks 4
for cap in (25, 0.4, 0.1):
    row = []
    for stage in (1, 2):
        model = md.build_gpt(config)
        optimizer = md.ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, stage=stage,
                                     bucket_cap_mb=cap)
        for step in range(2):
            inputs, targets = batches.at(step, rank, world_size)
            with md.measure(model, optimizer, timeline=False) as m:
                md.loss_fn(model(inputs), targets).backward()
            now = m.memory.current
            optimizer.step()
        row.append((now["gradients"] + now["buffers"]) / config.parameters)
    if rank == 0:
        print(f"buckets of {cap:>4} MB ({len(optimizer.buckets):>2} of them):"
              f"  ZeRO-1 {row[0]:.2f}  ZeRO-2 {row[1]:.2f} bytes per parameter")

# %% [markdown]
# <div lang="zh">
#
# 桶比模型还大时，ZeRO-2 **一点也不省**：7 = 完整的梯度 4 + 接收缓冲区 3，两者相同。桶小下来，它才显出优势；接收缓冲区也随桶变小。
#
# DeepSpeed 的 `reduce_bucket_size` 默认是 5 亿个元素，bf16 就是 1 GB，重叠时还要几份；模型只有几亿参数时，这比省下的还多。所以：**调小桶，或者干脆用 ZeRO-1**。
#
# 另一个原因是梯度累积。ZeRO-1 可以等最后一个微批次再归约；ZeRO-2 不肯留完整的梯度，只好每个微批次都归约：
#
# </div>
#
# <div lang="en">
#
# With a bucket larger than the model ZeRO-2 saves **nothing**: 7 = the whole gradients 4 + the receive buffers 3, for both. Only with smaller buckets does it show its worth; the receive buffers shrink with the bucket too.
#
# DeepSpeed's `reduce_bucket_size` is 500 million elements by default, 1 GB in bf16, several times over with overlap; for a model of a few hundred million parameters that is more than is saved. So: **make buckets smaller, or be content with ZeRO-1**.
#
# The other reason is gradient accumulation. ZeRO-1 can wait for the last micro-batch with its reduction; ZeRO-2, which will not keep whole gradients, has to reduce every one:
#
# </div>

# %%
# %%ranks 4
from contextlib import nullcontext

def accumulated_step(model, optimizer, wait):
    """Four micro-batches; with `wait` only the last one communicates."""
    inputs, targets = batches.at(rank)                       # 8 rows on every rank here
    for i, (x, y) in enumerate(zip(inputs.chunk(4), targets.chunk(4))):
        with optimizer.no_sync() if wait and i < 3 else nullcontext():
            (md.loss_fn(model(x), y) / 4).backward()
    optimizer.step()

for name, wait in (("every micro-batch", False), ("no_sync", True)):
    model = md.build_gpt(config)
    optimizer = md.ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, stage=2,
                                 bucket_cap_mb=0.1)
    for _ in range(2):
        with md.measure(model, optimizer, timeline=False) as m:
            accumulated_step(model, optimizer, wait)
    if rank == 0:
        grads = (m.memory.peak["gradients"] + m.memory.peak["buffers"]) / config.parameters
        sent = m.traffic.sent_bytes / (4 * config.parameters)
        print(f"ZeRO-2, {name:>17}: {sent:.2f} copies sent; gradients and buffers "
              f"at most {grads:.2f}")

# %% [markdown]
# <div lang="zh">
#
# 累积 m 个微批次：ZeRO-2 发送 $(m+1)(N-1)/N$ 份（这里 m = 4，3.75），或者用 `no_sync` 只发 1.5 份，却把完整的梯度留在内存里，也就退回到 ZeRO-1。没有免费的午餐，只有两张价目表。
#
# </div>
#
# <div lang="en">
#
# With m accumulated micro-batches ZeRO-2 sends $(m+1)(N-1)/N$ copies (3.75 here, m = 4), or only 1.5 with `no_sync`, which keeps the whole gradients in memory and is thus ZeRO-1 again. No free lunch, just two price lists.
#
# </div>

# %% [markdown]
# ### 32 位主副本 | 32-bit masters

# %% [markdown]
# <div lang="zh">
#
# 那 12 字节里的 4 字节，为什么非留不可？bf16 的有效位只有 8 个**二进制**位（约 2～3 位十进制）。
#
# **先猜**：bf16 里 1 + 0.001 等于多少？训练时一步更新大约是学习率那么大，比如 0.0001。
#
# </div>
#
# <div lang="en">
#
# 4 of those 12 bytes are the master copy: why must it stay? bf16 has only 8 significant bits (2 to 3 decimal digits).
#
# **Predict**: what is 1 + 0.001 in bf16? In training an update is about as large as the learning rate, say 0.0001.
#
# </div>

# %%
weight = torch.tensor(1.0, dtype=torch.bfloat16)
for _ in range(1000):
    weight = weight + 0.001
print(f"1 + 1000 x 0.001 in bf16: {weight.item()}")

# %%
# %%ranks 4 --out results
def train_with(dtype, master_dtype, steps=60):
    model = md.build_gpt(config, dtype=dtype)
    optimizer = md.ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, lr=3e-5,
                                 master_dtype=master_dtype)
    losses = []
    for step in range(steps):
        inputs, targets = batches.at(step, rank, world_size)
        loss = md.loss_fn(model(inputs).float(), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses}

results = {"fp32": train_with(torch.float32, None),
           "bf16, 32-bit masters": train_with(torch.bfloat16, torch.float32),
           "bf16 only": train_with(torch.bfloat16, None)}

# %%
def smooth(values, width=10):
    return [sum(values[i : i + width]) / width for i in range(len(values) - width + 1)]

figures.loss_curves({name: smooth(mean_over_ranks(name)) for name in results[0]}, "fp32",
                    title=figures.label("loss, mean of 10 steps", "损失，10 步的平均"));

# %% [markdown]
# <div lang="zh">
#
# 小的更新被四舍五入吞掉了：1 加一千次 0.001 还是 1，训练也明显落后。32 位主副本把小更新攒起来，攒够了才在 16 位参数里显出来，曲线与 fp32 重合。
#
# ZeRO 让它几乎免费：主副本也是“只有更新时才用”的状态，只需要自己那一片，每卡 4/N 字节。只要几行：
#
# ```python
# shard = torch.nn.Parameter(own(values).float())
# shard.grad = mine.float()              # 我这一片的 16 位平均梯度
# optimizer.step()
# own(values).copy_(shard.detach())      # 转回 16 位，然后 all-gather
# ```
#
# fp16 还需要**损失缩放（loss scaling）**：梯度太小会变成 0，所以先乘一个大数；溢出就跳过这一步。分片之后，溢出只出现在**一个** rank 的那一片里，必须所有 rank 一起决定跳不跳（`minidist/parallel/scaler.py`）；bf16 的指数范围与 fp32 相同，不需要它。
#
# </div>
#
# <div lang="en">
#
# Small updates are swallowed by rounding: 1 plus a thousand times 0.001 is still 1, and training clearly falls behind. The 32-bit masters save small updates up until they are large enough to show in 16 bits, and the curve is that of fp32.
#
# ZeRO makes them nearly free: a master is just another state that only the update needs, so a rank keeps its own piece, 4/N bytes per card. It takes a few lines:
#
# ```python
# shard = torch.nn.Parameter(own(values).float())
# shard.grad = mine.float()              # the 16-bit mean gradient of my piece
# optimizer.step()
# own(values).copy_(shard.detach())      # back to 16 bits, then all-gather
# ```
#
# fp16 needs **loss scaling** besides: gradients that are too small become 0, so the loss is multiplied by a large number first, and a step that overflows is skipped. With sharded gradients the overflow is in the piece of **one** rank, and all ranks have to decide together whether to skip (`minidist/parallel/scaler.py`). bf16 has the exponents of fp32 and needs none of it.
#
# </div>

# %% [markdown]
# ### 全局范数裁剪 | Clipping by the global norm

# %% [markdown]
# <div lang="zh">
#
# 大模型训练几乎都要裁剪梯度：范数超过 1 就按比例缩小。但是分片以后，每个 rank 只看得到自己那四分之一。
#
# **先猜**：每个 rank 各自对自己那片调用 `clip_grad_norm_(…, 1.0)`，合起来的梯度范数是多少？方向还对吗？
#
# </div>
#
# <div lang="en">
#
# Training large models nearly always clips gradients: if their norm exceeds 1 they are scaled down to it. But now every rank only sees its own quarter.
#
# **Predict**: each rank calls `clip_grad_norm_(..., 1.0)` on its own piece. What is the norm of all of them together? Is the direction still right?
#
# </div>

# %%
model = md.build_gpt(config)
md.loss_fn(model(batches.at(0)[0]), batches.at(0)[1]).backward()
true_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
print(f"one process: norm {true_norm:.4f} before clipping")

# %%
# %%ranks 4
def mean_shard():
    """My quarter of the mean gradient."""
    model = md.build_gpt(config)
    params = list(model.parameters())
    grads = flat_gradients(params, flatten(params))
    inputs, targets = batches.at(0, rank, world_size)
    md.loss_fn(model(inputs), targets).backward()
    coll.reduce_scatter(own(grads), grads, "mean")
    return own(grads).clone()

def global_norm(shard):
    return coll.all_reduce(shard.square().sum()).sqrt().item()

shard = mean_shard()
wrong = shard / max(1, shard.norm().item())                  # every rank by its own norm
right = shard / max(1, global_norm(shard))                   # all by the same one
print(f"my own norm {shard.norm():.4f}")
for name, clipped in (("own norm", wrong), ("global norm", right)):
    norm = global_norm(clipped)
    cosine = coll.all_reduce(clipped @ shard).item() / norm / global_norm(shard)
    if rank == 0:
        print(f"clipped by {name:>11}: norm {norm:.4f}, cosine with the true gradient {cosine:.4f}")

# %% [markdown]
# <div lang="zh">
#
# 各自裁剪：总范数大到 $\sqrt{N}$ = 2 倍，而且各片缩小的比例不同，**方向也变了**（这里四片的范数碰巧相近，所以偏得不多）。不报错，训练也能跑，只是变成了另一个算法，还随卡数而变。正确的做法只多一次 4 字节的通信：平方和 all-reduce，再开方。
#
# 两个细节：填充必须是零，否则会混进范数；有的参数在每个 rank 上都有一份（如张量并行里的 LayerNorm），它们只能数一次。`md.ZeroOptimizer` 和 `md.FSDP` 都有 `clip_grad_norm_`。不要对它们用 torch 的同名函数：ZeRO 之后 `.grad` 是空的，它返回 0；在 md.FSDP 上它只看得到这个 rank 的那些片，于是每个 rank 按不同的范数裁剪。两种情况都一声不响。
#
# </div>
#
# <div lang="en">
#
# Clipped one by one, the total norm is $\sqrt{N}$ = 2 times too large, and as every piece shrinks by a different factor, **the direction changes too** (not by much here, where the four norms happen to be alike). Nothing complains and training runs; it is just another algorithm, and one that depends on the number of cards. The right way costs one more message of 4 bytes: all-reduce the sum of squares, then take the root.
#
# Two details: padding must be zero or it gets into the norm; and parameters that are replicated (a LayerNorm in tensor parallel) must count once. `md.ZeroOptimizer` and `md.FSDP` have a `clip_grad_norm_`. Do not use torch's on them: after ZeRO `.grad` is empty and it returns 0; with md.FSDP it sees this rank's pieces only, and every rank clips by another norm, both without a word.
#
# </div>

# %%
# %%ranks 4
model = md.build_gpt(config)
optimizer = md.ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, stage=2)
inputs, targets = batches.at(0, rank, world_size)
md.loss_fn(model(inputs), targets).backward()
torchs = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
ours = optimizer.clip_grad_norm_(1.0).item()
print(f"ZeRO: torch's function {torchs:.4f}, optimizer.clip_grad_norm_ {ours:.4f}")

model = md.FSDP(md.build_gpt(config), units=[Block])
md.loss_fn(model(inputs), targets).backward()
ours = model.clip_grad_norm_(100.0).item()                   # nothing to clip: only the norm
torchs = torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0).item()
print(f"FSDP: torch's function {torchs:.4f}, model.clip_grad_norm_ {ours:.4f}")

# %% [markdown]
# ## 5.3 ZeRO vs FSDP

# %% [markdown]
# <div lang="zh">
#
# `zero3` 和 `fsdp` 是**同一个算法**。在 minidist 里它们干脆是同一个类的两个名字，所以两条曲线重合不算证据。证据是你自己写的 `stage_3`：它作为 ZeRO 的第三阶段写出来，做的却正是第 4 章的 FSDP；还有 `zero1`、`zero2`、`zero3` 的损失逐位相同。这是一家人，区别只在各自留下什么：
#
# | 每个 rank 上完整的是 | ZeRO | FSDP（文档 4.2） | FSDP2 | minidist |
# |---|---|---|---|---|
# | 全部 | 0 | `NO_SHARD` | DDP | `md.DDP` |
# | 参数、梯度 | 1 | — | — | `md.ZeroOptimizer(stage=1)` |
# | 参数 | 2 | `SHARD_GRAD_OP`（两步之间也收成分片） | `reshard_after_forward=False` | `md.ZeroOptimizer(stage=2)` |
# | 正在用的层 | 3 | `FULL_SHARD` | `reshard_after_forward=True` | `md.FSDP` |
# | 节点之间复制，节点内同上 | MiCS、ZeRO++ 的 hpZ | `HYBRID_SHARD` | 二维 mesh | `strategy="HYBRID_SHARD"` |
#
# 文档比较了三个方面，放到今天：
#
# - **易用性**：DeepSpeed 用一份 JSON 配置加它自己的引擎（`model_engine.backward(loss)`、`model_engine.step()`）；FSDP2 是对每层调用一次 `fully_shard(layer)`，循环不变。
# - **特性**：DeepSpeed 的卸载更丰富（CPU、NVMe、参数与优化器分开选），还有 ZeRO++（压缩通信）和混合引擎（RLHF 里训练与生成共用一份权重）；FSDP 有 CPU 卸载、`torch.compile`、DTensor，能直接与张量并行、流水线组合。
# - **生态**：两者都很成熟，Hugging Face 的 accelerate 都支持。文档说 ZeRO“工程化更成熟”，2022 年前后确实如此；今天两边都有大规模训练在用。
#
# </div>
#
# <div lang="en">
#
# `zero3` and `fsdp` are **one algorithm**. In minidist they are two names for one class, so that their curves agree proves nothing. The evidence is your own `stage_3`, written as a third ZeRO stage, which does what chapter 4's FSDP does, and the losses of `zero1`, `zero2` and `zero3`, equal to the last bit. One family, whose members differ in what they keep:
#
# | whole on every rank | ZeRO | FSDP (document 4.2) | FSDP2 | minidist |
# |---|---|---|---|---|
# | everything | 0 | `NO_SHARD` | DDP | `md.DDP` |
# | parameters, gradients | 1 | — | — | `md.ZeroOptimizer(stage=1)` |
# | parameters | 2 | `SHARD_GRAD_OP` (a shard between steps) | `reshard_after_forward=False` | `md.ZeroOptimizer(stage=2)` |
# | the layers in use | 3 | `FULL_SHARD` | `reshard_after_forward=True` | `md.FSDP` |
# | replicas across nodes, inside a node as above | MiCS, hpZ of ZeRO++ | `HYBRID_SHARD` | 2-D mesh | `strategy="HYBRID_SHARD"` |
#
# The document compares three aspects; here they are as of today:
#
# - **Ease of use**: DeepSpeed takes a JSON configuration and its own engine (`model_engine.backward(loss)`, `model_engine.step()`); FSDP2 is a call `fully_shard(layer)` per layer, and your loop stays as it is.
# - **Features**: DeepSpeed has more kinds of offload (CPU, NVMe, parameters and optimizer chosen apart), ZeRO++ (compressed communication) and a hybrid engine (in RLHF training and generation share one set of weights); FSDP has CPU offload, `torch.compile` and DTensor, and combines directly with tensor and pipeline parallel.
# - **Ecosystem**: both are mature, Hugging Face accelerate supports either. The document calls ZeRO's engineering more mature, and around 2022 it was; today large training runs rely on either.
#
# </div>

# %% [markdown]
# <div lang="zh">
#
# 同一个阶段 2，两种写法：
#
# ```json
# {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true},
#  "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e7, "offload_optimizer": {"device": "cpu"}}}
# ```
#
# ```python
# optimizer = md.ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, stage=2,
#                              bucket_cap_mb=100, master_dtype=torch.float32, offload="cpu")
# ```
#
# </div>
#
# <div lang="en">
#
# Stage 2 said in both ways:
#
# ```json
# {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true},
#  "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e7, "offload_optimizer": {"device": "cpu"}}}
# ```
#
# ```python
# optimizer = md.ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, stage=2,
#                              bucket_cap_mb=100, master_dtype=torch.float32, offload="cpu")
# ```
#
# </div>

# %% [markdown]
# ## 5.4 卸载 | Offload

# %% [markdown]
# <div lang="zh">
#
# 优化器状态一步只用一次，其余时间白占着最贵的内存。于是搬到便宜的地方：GPU → CPU 内存（ZeRO-Offload）→ 硬盘（ZeRO-Infinity）。这台机器没有 GPU，状态本来就在 CPU 内存里，所以我们演示**下一层**：内存 → 硬盘。道理完全一样，而且量得出来。
#
# 手写很短：Adam 第一步造出状态之后，把它们换成**映射到文件**的张量（`torch.from_file`），优化器照常更新。
#
# **先猜**：内存里的优化器状态会变成多少？损失会变吗？
#
# </div>
#
# <div lang="en">
#
# Optimizer states are used once per step, and for the rest of the time they occupy the most expensive memory there is. So move them to a cheaper place: GPU → CPU memory (ZeRO-Offload) → disk (ZeRO-Infinity). This machine has no GPU and the states are in CPU memory anyway, so we show the **next** tier: memory → disk. The idea is the same, and here it can be measured.
#
# Our own version is short: once Adam has made its states in the first step, swap them for tensors **mapped to a file** (`torch.from_file`); the optimizer goes on as usual.
#
# **Predict**: how much optimizer state will be left in memory? Will the loss change?
#
# </div>

# %%
import tempfile

def stage_2_on_disk(model):
    buckets = [Bucket(list(layer.parameters())) for layer in model.layers()]
    optimizer = new_optimizer([bucket.shard for bucket in buckets])
    folder = tempfile.TemporaryDirectory()

    def to_disk(tensor, name):
        if tensor.untyped_storage().filename is not None:    # is there already
            return tensor
        file = torch.from_file(f"{folder.name}/{name}", shared=True, size=tensor.numel())
        return file.copy_(tensor)

    def finish_step():
        optimizer.step()
        for i, bucket in enumerate(buckets):
            state = optimizer.state[bucket.shard]
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = to_disk(state[key], f"{key}.{i}")
            coll.all_gather(bucket.values, own(bucket.values))
        optimizer.zero_grad()
    return finish_step

# %%
# %%ranks 4 --out results
results = {prepare.__name__: compare(prepare) for prepare in (stage_2, stage_2_on_disk)}
if rank == 0:
    same = results["stage_2"]["losses"] == results["stage_2_on_disk"]["losses"]
    print("same losses, bit for bit:", same)

# %% [markdown]
# <div lang="zh">
#
# 按张量记账，内存里的状态几乎归零，损失逐位相同。`md.ZeroOptimizer(offload="disk")` 多做两件事：更新之后立刻把页面还给系统（`madvise`，否则读过的页面仍占着内存）；文件没有名字（进程死了也不留垃圾）。
#
# </div>
#
# <div lang="en">
#
# Counted by tensors, next to nothing of the states is left in memory, and the losses are equal bit for bit. `md.ZeroOptimizer(offload="disk")` does two more things: it gives the pages back right after the update (`madvise`; pages that have been read otherwise stay in memory), and its files have no names (nothing is left behind even if the process dies).
#
# </div>

# %%
# %%ranks 4
for offload in (None, "disk"):
    model = md.build_gpt(config)
    optimizer = md.ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, stage=2,
                                 offload=offload)
    for step in range(2):
        inputs, targets = batches.at(step, rank, world_size)
        with md.measure(model, optimizer, timeline=False) as m:
            loss = md.loss_fn(model(inputs), targets)
            loss.backward()
            optimizer.step()
    if rank == 0:
        memory, disk = (m.memory.on(tier).current["optimizer"] for tier in ("cpu", "disk"))
        print(f"offload={offload!s:>4}: {memory:>9,} bytes of states in memory, {disk:>9,} on disk; "
              f"loss {loss.item():.4f}")

# %% [markdown]
# <div lang="zh">
#
# （剩下的几个字节是步数计数器。）
#
# 付出的是时间。我们的文件很小，都躺在系统的页缓存里，几乎不花时间；真实的规模要按**每步搬多少字节**来算。卸载到 CPU，过 PCIe 的是梯度（下行 2 字节/参数）和更新后的参数（上行 2）；卸载到硬盘，状态要读一遍、写一遍（12 + 12）：
#
# </div>
#
# <div lang="en">
#
# (The few bytes that remain are step counters.)
#
# The price is time. Our files are small and lie in the system's page cache, which costs next to nothing; at real scale reckon with the **bytes to be moved in every step**. Offloaded to the CPU, gradients (2 bytes per parameter, down) and updated parameters (2, up) cross PCIe; offloaded to disk, states are read and written (12 + 12):
#
# </div>

# %%
for tier, per_parameter, bandwidth in (("CPU over PCIe", 2 + 2, 25e9), ("NVMe disk", 12 + 12, 5e9)):
    moved = per_parameter * 13e9
    print(f"13B, {tier:>13}: {moved / 1e9:4.0f} GB per step, at {bandwidth / 1e9:.0f} GB/s "
          f"{moved / bandwidth:4.0f} s")

# %% [markdown]
# ### 什么放在哪里 | What lives where

# %% [markdown]
# <div lang="zh">
#
# 文档说：
#
# - ZeRO-2 + Offload：优化器状态 → CPU，梯度 + 参数 → GPU；
# - ZeRO-3 + Offload：优化器状态 + 参数 → CPU，仅梯度 → GPU（临时）。
#
# 问一句“更新在哪里做”就知道少了什么：Adam 在 CPU 上更新，它需要**梯度**，所以梯度分片一定也要到 CPU 去。GPU 上剩下的是：
#
# | | GPU 上常驻 | GPU 上临时 | CPU（每参数字节，所有 rank 合计；每个 rank 除以 N） |
# |---|---|---|---|
# | ZeRO-2 + Offload | 完整的 16 位参数，2 字节/参数 | 正在归约的桶、激活值 | 16：主副本、动量、方差各 4，梯度 4 |
# | ZeRO-3 + Offload | 几乎没有 | 正在用的层的参数和梯度、激活值 | 18：再加 16 位参数 2 |
#
# </div>
#
# <div lang="en">
#
# The document says:
#
# - ZeRO-2 + Offload: optimizer states → CPU, gradients + parameters → GPU;
# - ZeRO-3 + Offload: optimizer states + parameters → CPU, only gradients → GPU (temporarily).
#
# Ask where the update is made, and you see what is missing: Adam runs on the CPU, it needs the **gradients**, so the gradient shard has to go there as well. On the GPU there remain:
#
# | | on the GPU all the time | on the GPU for a while | CPU (bytes per parameter, all ranks together; a rank has 1/N) |
# |---|---|---|---|
# | ZeRO-2 + Offload | the whole 16-bit parameters, 2 bytes per parameter | the bucket that is being reduced, activations | 16: master, momentum, variance 4 each, gradients 4 |
# | ZeRO-3 + Offload | next to nothing | parameters and gradients of the layer in use, activations | 18: also the 16-bit parameters, 2 |
#
# </div>

# %%
claims.show("l")

# %%
claims.show("h")

# %% [markdown]
# ### 24 GB 的卡微调 13B？ | 13B on a 24 GB card?

# %% [markdown]
# <div lang="zh">
#
# **先猜**：13B、bf16、Adam、一张 24 GB 的卡。ZeRO-2 + Offload 放得下吗？ZeRO-3 + Offload 呢？主机内存要多少？
#
# </div>
#
# <div lang="en">
#
# **Predict**: 13B, bf16, Adam, one card of 24 GB. Does ZeRO-2 + Offload fit? ZeRO-3 + Offload? How much host memory does it take?
#
# </div>

# %%
layer = md.plan.Transformer(layers=40, hidden=5120, heads=40).layer_parameters()
cpu, gpu = formulas.deepspeed_zero2_bytes(13e9, 1, offload=True)
print(f"ZeRO-2 + Offload: GPU {gpu / 1e9:5.1f} GB for the parameters alone, "
      f"{'fits' if gpu < 24e9 else 'does not fit'}")
cpu, gpu = formulas.deepspeed_zero3_bytes(13e9, layer, 1, offload=("optimizer", "parameters"))
print(f"ZeRO-3 + Offload: GPU {gpu / 1e9:5.1f} GB and activations; "
      f"host {13 * 18} GB, with DeepSpeed's buffers {cpu / 1e9:.0f} GB")

plan = md.plan(params=13e9, gpus=1, gpu="rtx4090")
best = plan.best
tokens = plan.global_batch * plan.shape.seq / best.total_seconds
print(f"\nplanner: {best.layout}\nGPU {best.total_bytes / 1e9:.0f} GB, host {best.host_bytes / 1e9:.0f} GB, "
      f"{tokens:.0f} tokens per second; step {best.total_seconds:.0f} s, "
      f"of which Adam on the CPU {best.seconds['optimizer']:.0f} s")
print(f"10 million tokens of fine-tuning take {10e6 / tokens / 3600:.1f} hours, "
      f"pre-training on 260 billion {260e9 / tokens / 3600 / 24 / 365:.0f} years")

# %% [markdown]
# <div lang="zh">
#
# 所以文档的说法成立，但要加三个条件：必须是 **ZeRO-3**（ZeRO-2 光参数就要 26 GB），要开激活重算，主机要有**约 240 GB** 内存（DeepSpeed 的估算器连缓冲区一起算，是 351 GB）：卡是消费级的，主机不是。时间上微调可行，预训练不行。
#
# 速度为什么还过得去？每步要过 PCIe 的是参数（每次前向、反向各一遍，2 字节/参数）和梯度，批次大了，计算时间远超搬运时间；CPU 上的 Adam 则受内存带宽限制，规划器估计每步约 9 秒。想在 24 GB 上微调又没有大内存，今天更常见的选择是 LoRA / QLoRA：只训练一小部分参数，优化器状态也就小了。
#
# </div>
#
# <div lang="en">
#
# So the document is right, under three conditions: it has to be **ZeRO-3** (for ZeRO-2 the parameters alone are 26 GB), with activation recomputation, on a host with **about 240 GB** of memory (DeepSpeed's estimator says 351 with its buffers): the card is a consumer's, the host is not. The time is fine for fine-tuning and hopeless for pre-training.
#
# Why is it not slower still? What crosses PCIe in a step are the parameters (once for each forward and backward, 2 bytes per parameter) and the gradients; with a large batch compute takes far longer than that. Adam on the CPU is limited by memory bandwidth; the planner reckons with about 9 seconds per step. To fine-tune on 24 GB without so much host memory, the usual choice today is LoRA / QLoRA: few trained parameters, hence small optimizer states.
#
# </div>

# %% [markdown]
# ## 小结 | Summary

# %% [markdown]
# <div lang="zh">
#
# - 混合精度每参数 16 字节，其中 12 是优化器的：先切它。
# - 阶段 1 = reduce-scatter → 更新自己那片 → all-gather；阶段 2 分桶、边反向边归约，梯度只留一片；阶段 3 参数用时收集、用完释放，就是 FSDP。
# - 损失与单进程相同，三个阶段之间逐位相同。
# - 4×、8× 是 N → ∞ 的极限：8 张卡是 2.9× 和 4.3×。阶段 3 的通信是 DDP 的 1.5 倍（+50%），不是 +1.5 倍。
# - 桶比模型大时，ZeRO-2 不比 ZeRO-1 省内存；梯度累积时它每个微批次都要归约。
# - 主副本用 32 位，只存一片；裁剪用全局范数；溢出要一起决定；每个 rank 每次反向发同样的桶。
# - 卸载把状态（和梯度分片）搬到便宜的内存，用时间换空间；13B 在 24 GB 上要 ZeRO-3、重算和 240 GB 主机内存。
#
# **延伸阅读**：Rajbhandari et al. 2020, *ZeRO*，第 3（内存去了哪里）、5、7 节；Ren et al. 2021, *ZeRO-Offload*，第 4 节；Rajbhandari et al. 2021, *ZeRO-Infinity*，第 5 节；Wang et al. 2023, *ZeRO++*；Micikevicius et al. 2018, *Mixed Precision Training*，第 3 节；DeepSpeed 文档 *Memory Requirements*。
#
# **练习**：`minidist check 5`（在 `exercises/` 里）。**下一章**：怎么选，怎么组合。
#
# </div>
#
# <div lang="en">
#
# - Mixed precision takes 16 bytes per parameter, 12 of which are the optimizer's: cut these first.
# - Stage 1 = reduce-scatter → update your own piece → all-gather. Stage 2 reduces bucket by bucket during backward and keeps a piece of the gradients. Stage 3 gathers parameters for use and frees them after: it is FSDP.
# - The losses are those of one process, and equal bit for bit among the three stages.
# - 4× and 8× are limits for N → ∞: 8 cards get 2.9× and 4.3×. Stage 3 communicates 1.5 times as much as DDP (+50%), not 1.5 times more.
# - With a bucket larger than the model ZeRO-2 saves no memory over ZeRO-1; with gradient accumulation it has to reduce every micro-batch.
# - Masters in 32 bits, a piece each; clip by the global norm; decide together about overflows; every rank sends the same buckets in every backward.
# - Offload moves states (and the gradient shard) to cheaper memory and trades time for space; 13B on 24 GB takes ZeRO-3, recomputation and 240 GB of host memory.
#
# **Further reading**: Rajbhandari et al. 2020, *ZeRO*, sections 3 (where the memory goes), 5 and 7; Ren et al. 2021, *ZeRO-Offload*, section 4; Rajbhandari et al. 2021, *ZeRO-Infinity*, section 5; Wang et al. 2023, *ZeRO++*; Micikevicius et al. 2018, *Mixed Precision Training*, section 3; DeepSpeed documentation, *Memory Requirements*.
#
# **Exercises**: `minidist check 5` (in `exercises/`). **Next**: how to choose, and how to combine.
#
# </div>
