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
# # 1. 分布式训练概览 | Overview

# %% [markdown]
# <div lang="zh">
#
# **目标**：算清一次训练要多少显存、多少时间；把四大范式（DDP、模型并行、FSDP、ZeRO）在 4 个真实进程上各跑一遍，看它们各省什么、各传什么；再把文档的选型规则变成能算的规则。
#
# **时间**：约 1 小时。**对应文档**：开篇与第 1 节。**先读**：第 0 章；`nn.Module` 与训练循环。文档要求 torch ≥ 2.1；minidist 要 torch ≥ 2.4，不需要 DeepSpeed，也不需要 GPU。
#
# **练习**：在终端运行 `minidist start-exercises my-exercises` 领一份，写好后用 `minidist check 1 --src my-exercises` 检查。只看中文：运行 `%lang zh`。
#
# </div>
#
# <div lang="en">
#
# **Goals**: work out how much memory and time a training run takes; run each of the four paradigms (DDP, model parallel, FSDP, ZeRO) on 4 real processes and see what each saves and sends; turn the document's rule for choosing into one that can be computed.
#
# **Time**: about 1 hour. **Follows** the introduction and section 1 of the document. **Before this**: chapter 0; `nn.Module` and training loops. The document asks for torch ≥ 2.1; minidist for torch ≥ 2.4, and neither DeepSpeed nor a GPU is needed.
#
# **Exercises**: in a terminal, `minidist start-exercises my-exercises` makes your copy and `minidist check 1 --src my-exercises` checks it. English only: run `%lang en`.
#
# </div>

# %%
# %load_ext minidist
import torch
import minidist as md
from minidist.learn import figures
from minidist.plan import formulas

# %% [markdown]
# ## 1.1 万亿参数 | A trillion parameters

# %% [markdown]
# <div lang="zh">
#
# 文档开篇：参数涨到万亿，单卡训练已不可行。GPT 的参数量可以直接从形状算出（Narayanan 2021 式 2）。L 层、宽度 h：每层注意力 $4h^2$、MLP $8h^2$，合起来
#
# $$P \approx 12\,L\,h^2 \quad(\text{再加上词表和位置 } (V+s)\,h)$$
#
# 其中 $V$ 是词表大小，$s$ 是序列长度。训练一个 token 约需 $6P$ 次浮点运算（前向 2P，反向 4P）；若重算激活值，再加 2P，下面就按 8P 算。
#
# **先猜**：128 层、宽 25600 的 GPT 有多少参数？它的模型状态（16 字节/参数）要多少张 80 GB 的卡？
#
# </div>
#
# <div lang="en">
#
# The document opens with trillions of parameters, for which one card will not do. The parameters of a GPT follow from its shape (Narayanan 2021, equation 2). With L layers of width h, attention has $4h^2$ per layer and the MLP $8h^2$, together
#
# $$P \approx 12\,L\,h^2 \quad(\text{plus vocabulary and positions, } (V+s)\,h)$$
#
# where $V$ is the size of the vocabulary and $s$ the sequence length. Training on one token takes about $6P$ floating point operations (2P forward, 4P backward), and 2P more if activations are recomputed; the code below counts these, 8P in all.
#
# **Predict**: how many parameters has a GPT of 128 layers and width 25600? How many cards of 80 GB do its model states need, at 16 bytes per parameter?
#
# </div>

# %%
P = formulas.gpt_parameters(layers=128, hidden=25600, vocab=51200, seq=2048)
states = sum(formulas.state_bytes(P).values())
print(f"{P / 1e12:.2f}T parameters, {states / 1e12:.1f} TB of model states = "
      f"{states / 80e9:.0f} cards, before any activations")
days = formulas.training_seconds(P, tokens=450e9, gpus=3072, flops_per_gpu=163e12) / 86400
years = formulas.training_seconds(P, tokens=450e9, gpus=1, flops_per_gpu=163e12) / 86400 / 365
print(f"450B tokens: {days:.0f} days on 3072 A100 (at 163 TFLOP/s each), {years:.0f} years on one")

# %% [markdown]
# <div lang="zh">
#
# 163 TFLOP/s、84 天正是论文报告的数字（5.1 节）。所以核心问题有**两个**：存储怎么分摊，计算怎么分摊。（文档里“核（kernel）心问题”的音标标在了“核”字上；“核心”在这里就是 core，与 GPU 的 kernel 无关。）
#
# </div>
#
# <div lang="en">
#
# 163 TFLOP/s and 84 days are what the paper reports (section 5.1). So there are **two** core questions: how to share the memory, and how to share the compute. (The document's pronunciation hint "kernel" in 核心问题 landed on a part of the word: 核心 means core here, and has nothing to do with GPU kernels.)
#
# </div>

# %% [markdown]
# ## 1.2 显存花在哪里 | Where the memory goes

# %% [markdown]
# <div lang="zh">
#
# 一个参数在训练中占的字节：
#
# | | 全 fp32 + Adam | 混合精度 + Adam |
# |---|---|---|
# | 参数 | 4 | 2（bf16/fp16） |
# | 梯度 | 4 | 2 |
# | 优化器：动量 + 方差 | 4 + 4 | 4 + 4 |
# | 优化器：fp32 主副本 | – | 4 |
# | **合计** | **16** | **16** |
#
# 两种配置都是 16，只是分布不同；混合精度省的是计算时间和激活值，**不省模型状态**。此外还有**激活值**：与 batch 成正比，随序列变长而增加（不用融合注意力时还有平方项），与参数量没有直接的比例关系。
#
# **先猜**：batch 翻倍时，参数、梯度、优化器状态、激活值，哪几种会跟着翻倍？
#
# </div>
#
# <div lang="en">
#
# The bytes that one parameter takes in training:
#
# | | all fp32, Adam | mixed precision, Adam |
# |---|---|---|
# | parameter | 4 | 2 (bf16/fp16) |
# | gradient | 4 | 2 |
# | optimizer: momentum + variance | 4 + 4 | 4 + 4 |
# | optimizer: fp32 master copy | – | 4 |
# | **total** | **16** | **16** |
#
# Both come to 16, spread differently; mixed precision saves compute time and activations, **not model states**. On top there are **activations**: in proportion to the batch, growing with the sequence (quadratically in part, unless attention is fused), and not in proportion to the parameters.
#
# **Predict**: parameters, gradients, optimizer states, activations: which of them double when the batch doubles?
#
# </div>

# %%
from minidist.train.optim import MasterOptimizer

config = md.GPTConfig(seq=64, width=128, layers=4)

def one_step(rows, mixed=False):
    """Bytes by kind: model states between backward and step, activations at their peak."""
    model = md.build_gpt(config, dtype=torch.bfloat16 if mixed else torch.float32)
    make = (lambda p: MasterOptimizer(p, torch.optim.AdamW)) if mixed else torch.optim.AdamW
    optimizer = make(model.parameters())
    tokens = torch.randint(256, (rows, 65), generator=torch.Generator().manual_seed(0))
    for _ in range(2):                                   # Adam makes its states in the first step
        with md.measure(model, optimizer, timeline=False) as m:
            md.loss_fn(model(tokens[:, :-1]), tokens[:, 1:]).backward()
            kinds = {k: m.memory.current[k] for k in ("parameters", "gradients")}
            optimizer.step()
            kinds["optimizer"] = m.memory.current["optimizer"]
        optimizer.zero_grad()
    return {**kinds, "activations": m.memory.peak["activations"]}

bars = {"fp32, batch 4": one_step(4), "fp32, batch 8": one_step(8),
        "bf16 + masters, batch 8": one_step(8, mixed=True)}
figures.memory_bars(bars);

# %%
for name, kinds in bars.items():
    per_parameter = {k: v / config.parameters for k, v in kinds.items() if k != "activations"}
    print(f"{name:<24}", *(f"{k} {v:.1f}" for k, v in per_parameter.items()),
          f"= {sum(per_parameter.values()):.1f} bytes per parameter")

# %% [markdown]
# <div lang="zh">
#
# 只有激活值随 batch 翻倍；两种精度的模型状态都是 16 字节。激活值可以用公式估计：16 位、不重算时每层约 $s\,b\,h\,(34 + 5\,a s/h)$ 字节（$s$ 序列长度，$b$ batch，$h$ 宽度，$a$ 注意力头数；Korthikanti 2022；用融合的注意力核时没有第二项）。重算（recomputation）可以把它压到每层 $2sbh$，代价是多做一次前向。
#
# 所以，“7B 的模型是 14 GB，24 GB 的卡放得下”是个常见的误会：
#
# </div>
#
# <div lang="en">
#
# Only the activations double with the batch, and model states are 16 bytes in both precisions. Activations can be estimated: in 16 bits and without recomputation about $s\,b\,h\,(34 + 5\,a s/h)$ bytes per layer ($s$: sequence length, $b$: batch, $h$: width, $a$: attention heads; Korthikanti 2022; a fused attention kernel removes the second term). Recomputation brings it down to $2sbh$ per layer, for the price of another forward.
#
# Hence "a 7B model is 14 GB and fits on a card of 24 GB" is a common mistake:
#
# </div>

# %%
try:
    md.plan(params=7e9, gpus=1, gpu="rtx4090", offload="none")
except ValueError as problem:
    print(problem)

# %% [markdown]
# <div lang="zh">
#
# 14 GB 只是**推理**时的权重。训练要 7 × 16 = 112 GB 的模型状态，再加激活值。（规划器取最接近的公开模型，6.74B：模型状态 108 GB，全部重算时激活值约 3 GB。24 GB 中能用的只有 21 GB：CUDA 和各种库占去约 2 GB，张量之间的空隙约 5%。）改法写在错误信息里：更多的卡（分片），更大的卡，或卸载到主机。
#
# </div>
#
# <div lang="en">
#
# 14 GB are the weights for **inference**. Training takes 7 × 16 = 112 GB of model states, and activations. (The planner takes the nearest published shape, 6.74B: 108 GB of model states, and about 3 GB of activations with everything recomputed. Of the 24 GB only 21 can be used: CUDA and the libraries take some 2 GB, gaps between tensors some 5%.) The message says what would help: more cards (sharding), larger cards, or offload to the host.
#
# </div>

# %% [markdown]
# ## 1.3 四大范式 | The paradigms

# %% [markdown]
# <div lang="zh">
#
# 文档的表，加上每种切什么、传什么：
#
# | 范式 | 核心思想 | 单机扩展 | 跨机扩展 | 每步传什么 |
# |---|---|---|---|---|
# | DDP | 每卡完整模型，分摊 batch | ★★★ | ★★★ | 梯度，all-reduce |
# | 模型并行 | 把模型切到多卡 | ★★ | ★★ | 激活值（张量并行：每层；流水线：阶段之间） |
# | FSDP / ZeRO | 分片优化器状态 / 梯度 / 参数 | ★★★ | ★★★ | 梯度 reduce-scatter，参数 all-gather |
#
# 星星是印象，我们来量。下面让同一个小 GPT 在 4 个 rank 上用每种策略训练 4 步，从同样的权重、同样的数据出发。
#
# **先猜**：哪种策略每个 rank 的参数最少？哪种发送的字节最少？损失会一样吗？
#
# </div>
#
# <div lang="en">
#
# The document's table, with what each sends:
#
# | paradigm | idea | scaling within a machine | scaling across machines | sent per step |
# |---|---|---|---|---|
# | DDP | whole model on each card, the batch is shared out | ★★★ | ★★★ | gradients, all-reduce |
# | model parallel | the model is cut over cards | ★★ | ★★ | activations (tensor parallel: in each layer; pipeline: between stages) |
# | FSDP / ZeRO | optimizer states / gradients / parameters are sharded | ★★★ | ★★★ | gradients reduce-scattered, parameters all-gathered |
#
# Stars are impressions; let us measure. One small GPT trains for 4 steps on 4 ranks with each strategy, from the same weights and on the same data.
#
# **Predict**: with which strategy does a rank hold the fewest parameters? Which sends the fewest bytes? Will the losses be equal?
#
# </div>

# %%
from minidist.train.config import TrainConfig
from minidist.train.loop import train

names = ("ddp", "zero1", "zero2", "fsdp", "tp", "pp-1f1b")
model = md.GPTConfig(seq=64, width=128, layers=4)
configs = {name: TrainConfig(name, model, steps=4, batch=16) for name in names}
single = train(TrainConfig("single", model, steps=4, batch=16))[0]

# %%
# %%ranks 4 --out results
results = {name: train(configs[name])[rank] for name in names}

# %%
kinds = ("parameters", "gradients", "optimizer", "activations")
worst = {name: max((r[name] for r in results), key=lambda one: sum(one["held"].values()))
         for name in names}
figures.memory_bars({"one process": {k: single["peak"][k] for k in kinds},
                     **{name: {k: worst[name]["peak"][k] for k in kinds} for name in names}},
                    title=figures.label("fullest rank, each kind at its peak", "最满的 rank，各类的峰值"))
figures.traffic_bars({name: {op: total["sent_bytes"] for op, total in
                             worst[name]["sent"]["by_op"].items()} for name in names},
                     title=figures.label("bytes sent by the fullest rank in one step", "最满的 rank 每步发送的字节"));

# %%
for name in names:
    apart = max(abs(a - b) / b for a, b in zip(worst[name]["losses"], single["losses"]))
    print(f"{name:<8} losses differ from one process by {apart:.0e}")

# %% [markdown]
# <div lang="zh">
#
# - 损失都与单进程一致：并行是**实现方式**，不改变训练的数学。
# - DDP 不省任何模型状态；ZeRO-1、ZeRO-2、FSDP 依次把优化器状态、梯度、参数切成四份。可是图上 FSDP 并不比 ZeRO-2 少：这个模型只有 4 层，正在用和预取的单元一凑整，就占了参数的大半；层数多了，临时凑整的那一两层才微不足道。
# - 参数最少的：计算当中是张量并行和流水线；FSDP 平时也只有四分之一，但用到的单元要临时收集。
# - 激活值：DDP、ZeRO、FSDP 的少，是因为每个 rank 只有四分之一的数据；对**同一条**样本，只有张量并行和流水线能把激活值切开。
# - 发送字节：流水线最少，FSDP 是 DDP 的 1.5 倍，张量并行与 token 数成正比（这里 batch 大、模型窄，所以很多）。
#
# </div>
#
# <div lang="en">
#
# - All losses agree with the single process: parallelism is a way of **carrying out** training and does not change its mathematics.
# - DDP saves none of the model states; ZeRO-1, ZeRO-2 and FSDP cut optimizer states, gradients and parameters into four, one after the other. Yet in the picture FSDP has no less than ZeRO-2: this model has only 4 layers, and the units in use and fetched ahead, which are whole for a moment, are most of it; among many layers the one or two that are whole hardly count.
# - Fewest parameters: while computing, tensor and pipeline parallel; at rest FSDP has a quarter, too, but it gathers the units in use.
# - Activations: DDP, ZeRO and FSDP have fewer because each rank has a quarter of the data; of the **same** sample only tensor and pipeline parallel can cut them.
# - Bytes sent: least for the pipeline, FSDP 1.5 times DDP, tensor parallel in proportion to the tokens (many here, for a narrow model with a large batch).
#
# </div>

# %% [markdown]
# ### 星星对不对？ | Are the stars right?

# %% [markdown]
# <div lang="zh">
#
# 用模拟器看 70B 模型在 H100 上的效率，比较 8 张卡（一台机器）与 64 张卡（8 台）。每张卡平均 4 条序列，激活值重算。流水线的第二列用 8 台机器，每台只出一张卡：同样 8 段，但每条边界都跨机器。
#
# **先猜**：张量并行跨出一台机器后，还剩多少？
#
# </div>
#
# <div lang="en">
#
# The simulator on a 70B model on H100: 8 cards (one machine) and 64 (8 machines), 4 sequences per card on average, activations recomputed. The second column of the pipeline is for 8 machines with one card each: the same 8 stages, with every boundary between machines.
#
# **Predict**: how much is left of tensor parallel once it leaves the machine?
#
# </div>

# %%
from minidist.plan import PRESETS, simulate
from minidist.plan.costs import Layout
from minidist.plan.hardware import cluster

shape = PRESETS["llama-3.1-70b"]

def efficiency(machine, **layout):
    """TFLOP/s per card."""
    sequences = 4 * machine.gpus
    return simulate(shape, machine, Layout(recompute="full", **layout), sequences).tflops_per_gpu

one, eight = cluster("h100", 8), cluster("h100", 64)         # machines with 8 cards
apart = cluster("h100", 8, gpus_per_node=1)                  # 8 machines with one card each
rows = {
    "DDP (does not fit!)": [efficiency(m, dp=m.gpus, dp_kind="ddp") for m in (one, eight)],
    "FSDP / ZeRO-3": [efficiency(m, dp=m.gpus, dp_kind="fsdp") for m in (one, eight)],
    "tensor parallel": [efficiency(m, tp=m.gpus) for m in (one, eight)],
    "pipeline, 1F1B": [efficiency(m, pp=8) for m in (one, apart)],
    "tensor 8 x FSDP": [efficiency(one, tp=8), efficiency(eight, tp=8, dp=8, dp_kind="fsdp")],
}
print("TFLOP/s per card     1 machine  8 machines")
for name, (within, across) in rows.items():
    print(f"{name:<20} {within:>9.0f}  {across:>10.0f}")

# %% [markdown]
# <div lang="zh">
#
# “模型并行 ★★/★★”把两种不同的东西混在了一起。**张量并行**在节点内还不错，跨机就一落千丈。**流水线**跨机没有损失；它损失的是气泡（这里占 17%），而气泡可以用更多微批次来减小。（再切到 40 段就只剩 234：每段只有两层，再加一个输出矩阵，分不均匀了。）
#
# FSDP 比 DDP 还快一点：每张卡只更新自己那一片参数（DDP 的更新占一步的 3%），而多出来的通信藏住了。不过它跨机的三颗星也有前提：每张卡的 token 足够多，能盖住参数的收集。在 64 张卡上让每张卡的 token 少下去：
#
# </div>
#
# <div lang="en">
#
# "Model parallel ★★/★★" lumps two different things together. **Tensor parallel** does well inside a machine and collapses across machines. A **pipeline** loses nothing by crossing; what it loses is the bubble (17% here), which more micro-batches make smaller. (Cutting on to 40 stages would give 234: two layers each and an output matrix no longer divide evenly.)
#
# FSDP is even a little faster than DDP: a card updates its own shard only (DDP spends 3% of a step on the update), and the additional traffic is hidden. But its three stars across machines have a condition: enough tokens per card to hide the gathering of parameters. On 64 cards, with fewer and fewer tokens on each:
#
# </div>

# %%
from dataclasses import replace

for tokens in (8192, 1024, 256):
    run = simulate(replace(shape, seq=tokens), eight, Layout(recompute="full", dp=64, dp_kind="fsdp"), 64)
    print(f"{tokens:>5} tokens per card: {run.tflops_per_gpu:.0f} TFLOP/s")

# %% [markdown]
# ## 1.4 选型 | Choosing

# %% [markdown]
# <div lang="zh">
#
# 文档的规则：**放得进单卡 → DDP；放不下 → FSDP/ZeRO；层数极深 → 流水线；单层超大 → 张量**。
#
# “放得下”要按 16 字节/参数加上激活值来算。“层数极深”“单层超大”也可以量化：把一层的参数收集完整（FSDP 同时要放一两层），要占显存的多大一块？下面以八分之一为界。
#
# **先猜**：7B 在 8 × 80 GB 上、70B 在 256 × 80 GB 上，规则各会选什么？写成代码只有几行：
#
# </div>
#
# <div lang="en">
#
# The document's rule: **fits on one card → DDP; does not → FSDP/ZeRO; very many layers → pipeline; a very large single layer → tensor**.
#
# "Fits" has to be counted with 16 bytes per parameter and the activations. "Very many" and "very large" can be made precise as well: how much of the memory does a gathered layer take (FSDP holds one or two at a time)? Below, the limit is an eighth.
#
# **Predict**: what will the rule choose for 7B on 8 cards of 80 GB, and for 70B on 256? In code it is a few lines:
#
# </div>

# %%
def choose(parameters, layers, cards, card=80e9, activations=0.3):
    """The document's rule. `activations`: share of a card that is kept free for them."""
    room = card * (1 - activations)
    if sum(formulas.state_bytes(parameters).values()) < room:
        return "DDP"
    largest = 4 * parameters / layers                       # a layer, gathered and reduced, 16 bits
    if sum(formulas.state_bytes(parameters, stage=3, world_size=cards).values()) + 2 * largest < room:
        return "FSDP / ZeRO-3"
    return "+ tensor parallel" if largest > room / 8 else "+ pipeline or offload"

cases = {"1.3B on 8 A100": (1.3e9, 24, 8, "a100"), "7B on 8 A100": (7e9, 32, 8, "a100"),
         "70B on 8 A100": (70e9, 80, 8, "a100"), "70B on 256 H100": (70e9, 80, 256, "h100"),
         "1T on 3072 A100": (1e12, 128, 3072, "a100")}
for name, (parameters, layers, cards, gpu) in cases.items():
    try:
        best = str(md.plan(params=parameters, gpus=cards, gpu=gpu).best.layout)
    except ValueError:
        best = "nothing fits without offload"
    print(f"{name:<16} rule: {choose(parameters, layers, cards):<22} planner: {best}")

# %% [markdown]
# <div lang="zh">
#
# 规则管**放不放得下**，规划器（`md.plan`，第 6 章）还算**快不快**。70B 在 256 张卡上，只用 FSDP 也放得下，但必须重算激活值（一条 8192 个 token 的序列，不重算远不止 80 GB）。把每层再切到节点内的 4 张卡上，不重算也放得下，什么都不用算两遍：一步 17 秒，而不是 21 秒。
#
# 70B 在 8 张卡上，模型状态平分下来每卡 140 GB，只有卸载到主机才放得下；万亿参数时三种并行一起用。另外，“层数极深”本身不是选流水线的理由，理由是**张量并行出不了节点**，而模型仍然放不下。
#
# </div>
#
# <div lang="en">
#
# The rule is about what **fits**; the planner (`md.plan`, chapter 6) also computes what is **fast**. 70B on 256 cards fits with FSDP alone, but only by recomputing activations (a sequence of 8192 tokens needs far more than 80 GB without). With the layers also cut over 4 cards of a machine they fit, nothing is computed twice, and a step takes 17 s instead of 21.
#
# 70B on 8 cards comes to 140 GB of model states per card, which fits only with offload to the host; for a trillion parameters the planner uses all three kinds. And many layers are no reason for a pipeline by themselves; the reason is that **tensor parallel must stay in the node** while the model still does not fit.
#
# </div>

# %% [markdown]
# ## 小结 | Summary

# %% [markdown]
# <div lang="zh">
#
# - $P \approx 12Lh^2$；训练一个 token 约 $6P$ 次运算；模型状态 16 字节/参数；激活值与 batch 成正比，随序列变长而增加。
# - 权重文件的大小不是训练所需的显存，差 8 倍。
# - DDP 省时间不省显存；ZeRO/FSDP 把冗余的状态切掉；模型并行连激活值也切。
# - “模型并行”分两种：张量并行留在节点内，流水线可以跨节点。
# - 规则：先看放不放得下（16 字节），再看快不快（规划器）。
#
# | 接下来 | 章 |
# |---|---|
# | DDP | 2 |
# | 张量并行、流水线 | 3 |
# | FSDP | 4 |
# | ZeRO | 5 |
# | 选型与 3D | 6 |
# | 真实集群 | 7 |
#
# **延伸阅读**：Narayanan et al. 2021，第 2、3、5.1 节；Rajbhandari et al. 2020, *ZeRO*，第 3 节（显存去哪了）；Korthikanti et al. 2022，第 4 节（激活值）。
#
# **练习**：`minidist check 1`。
#
# </div>
#
# <div lang="en">
#
# - $P \approx 12Lh^2$; about $6P$ operations per token; model states 16 bytes per parameter; activations in proportion to the batch, and growing with the sequence.
# - The size of a file of weights is not the memory that training takes; the difference is a factor of 8.
# - DDP saves time, not memory; ZeRO and FSDP cut away redundant states; model parallelism cuts activations, too.
# - "Model parallel" is two things: tensor parallel stays in the node, a pipeline may cross nodes.
# - The rule: first what fits (16 bytes), then what is fast (the planner).
#
# | next | chapter |
# |---|---|
# | DDP | 2 |
# | tensor and pipeline parallel | 3 |
# | FSDP | 4 |
# | ZeRO | 5 |
# | choosing, and 3D | 6 |
# | real clusters | 7 |
#
# **Further reading**: Narayanan et al. 2021, sections 2, 3 and 5.1; Rajbhandari et al. 2020, *ZeRO*, section 3 (where did all the memory go); Korthikanti et al. 2022, section 4 (activations).
#
# **Exercises**: `minidist check 1`.
#
# </div>
