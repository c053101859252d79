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
# # 6. 总结与选型建议 | Summary and Choosing

# %% [markdown]
# <div lang="zh">
#
# **目标**：前五章造好了工具，这一章决定用哪一个。你会
#
# - 把文档的决策树写成十来行代码，和一个会算内存、算时间的规划器对答案，看它在哪里够用、在哪里不够；
# - 逐行检验文档的“典型配置”表和 4.5 节的建议；
# - 在 8 个 rank 上亲手拼出 2 × 2 × 2 的三维并行，并证明它和单进程是同一次训练；
# - 把所有策略放在一张图上，量出“显存、通信、易用性”的三角。
#
# **时间**：约 2 小时。**对应文档**：第 6 节（决策树、典型配置、核心要点），以及 4.5 节的建议。**先读**：第 2 到第 5 章，至少各读小结。
#
# **练习**：`minidist check 6`。
#
# </div>
#
# <div lang="en">
#
# **Goals**: the chapters so far made the tools, this one decides which to use. You will
#
# - write the document's decision tree in a dozen lines and compare its answers with a planner that computes memory and time, to see where the tree suffices and where it does not;
# - check the table of typical configurations and the advice of section 4.5 line by line;
# - put 2 × 2 × 2 three-dimensional parallelism together on 8 ranks by hand, and prove that it is the same training as one process;
# - see all strategies in one picture: the triangle of memory, traffic and ease of use, measured.
#
# **Time**: about 2 hours. **Follows** section 6 of the document (decision tree, typical configurations, key points) and the advice of 4.5. **Before this**: chapters 2 to 5, or at least their summaries.
#
# **Exercises**: `minidist check 6`.
#
# </div>

# %%
# %load_ext minidist
# %matplotlib inline
import matplotlib.pyplot as plt
import torch
import minidist as md
from minidist.comm import collectives as coll
from minidist.learn import claims, figures
from minidist.train.data import TextBatches, load_tokens

# %% [markdown]
# ## 6.1 决策树 | The decision tree

# %% [markdown]
# <div lang="zh">
#
# 文档的决策树只问三个问题：
#
# 1. 模型放得进单卡吗？放得进 → **DDP**。
# 2. 放不进 → **FSDP / ZeRO**。所有卡的显存加起来够吗？够 → FULL_SHARD / ZeRO-3；不够 → 再加 **CPU 卸载（offload）**。
# 3. 单层超大吗？是 → 结合**张量并行**。
#
# “放得进”是多少字节？第 2 章的答案：每个参数 16 字节（混合精度加 Adam：2 + 2 + 12）。于是整棵树是一个小函数。
#
# **先猜**：下面七种情况，树会怎么答？写下来再运行。1.3B 在一张 24 GB 的卡上要特别想一想：16 × 1.3 = 20.8 GB。
#
# </div>
#
# <div lang="en">
#
# The document's tree asks three questions:
#
# 1. Does the model fit one card? If so → **DDP**.
# 2. If not → **FSDP / ZeRO**. Is the memory of all cards together enough? If so → FULL_SHARD / ZeRO-3; if not → add **CPU offload**.
# 3. Is a single layer very large? If so → combine with **tensor parallel**.
#
# How many bytes are "fit"? Chapter 2's answer: 16 per parameter (mixed precision with Adam: 2 + 2 + 12). That makes the whole tree a small function.
#
# **Predict**: what will the tree say in the seven cases below? Write it down, then run. Think twice about 1.3B on one card of 24 GB: 16 × 1.3 = 20.8 GB.
#
# </div>

# %%
def tree(billions, gpus, gigabytes):
    states = 16 * billions                            # GB: parameters, gradients, optimizer
    if states < gigabytes:
        return "DDP" if gpus > 1 else "one card"
    if states < gpus * gigabytes:
        answer = "FULL_SHARD / ZeRO-3"
    else:
        answer = "ZeRO-3 + CPU offload"
    layer = 0.02 * billions                           # GB: 16-bit weights of one of some 100 layers
    # Two gathered layers and one of gradients: over a tenth of the card?
    return answer + (" + TP" if 3 * layer > 0.1 * gigabytes else "")

cases = [(0.35, 8, "a100"), (1.3, 1, "rtx4090"), (7, 8, "a100"), (13, 8, "a100"), (13, 1, "rtx4090"),
         (70, 8, "a100"), (175, 1024, "a100")]
gigabytes = {"a100": 80, "rtx4090": 24, "h100": 80}
for billions, gpus, gpu in cases:
    print(f"{billions:>5}B on {gpus:>4} x {gpu:<8} {tree(billions, gpus, gigabytes[gpu])}")

# %% [markdown]
# ### 规划器怎么答 | What the planner says

# %% [markdown]
# <div lang="zh">
#
# `md.plan` 不靠经验规则：它把所有可行的布局（dp × tp × pp、微批次、重算、offload……）都算一遍，内存用第 2 到第 5 章的公式（这些公式我们都用真的代码量过），时间用一个按已发表的训练记录校准过的模型，然后取最快的、放得下的那个。
#
# </div>
#
# <div lang="en">
#
# `md.plan` has no rules of thumb: it computes every possible layout (dp × tp × pp, micro-batch, recomputation, offload, ...), memory by the formulas of chapters 2 to 5 (which we measured with real code), time by a model calibrated on published training runs, and takes the fastest that fits.
#
# </div>

# %%
for billions, gpus, gpu in cases:
    found = md.plan(params=billions * 1e9, gpus=gpus, gpu=gpu)
    best = found.best
    print(f"{billions:>5}B on {gpus:>4} x {gpu:<8} {best.layout}: {best.total_bytes / 1e9:.0f} of "
          f"{found.usable / 1e9:.0f} GB, {best.tflops_per_gpu:.0f} TFLOP/s")

# %% [markdown]
# <div lang="zh">
#
# 主干一致，三处不同，都很有教益：
#
# - **1.3B 一张 24 GB**：树说放得下，其实放不下。24 GB 里 CUDA 上下文和碎片要占去一截，激活值还没算。所以边界附近不能只数 16 字节。
# - **70B 在 8 张卡上**：两边都说要 offload，规划器还加了张量并行。它把激活值也切小了，于是不必重算，比只用 FSDP 快两成多。树只管放不放得下，不管快慢。
# - **175B 在 1024 张卡上**：规划器又加了流水线；每张卡只剩三十二分之一的层，ZeRO-1 就够了。还有一个树没有问的问题：这么多卡，batch 够不够分？见 6.2。
#
# （`fsdp 1` 是说：只有一张卡，用 FSDP 的卸载，什么也没有分片。）
#
# 树的每个问题也可以带着数字问一遍。把下面的函数当成一个小工具，换成你自己的硬件试试（`gpu` 还可以是 `h100`、`h200`、`b200`、`l40s`、`v100`……或者一个 `.toml` 文件）：
#
# </div>
#
# <div lang="en">
#
# The trunk agrees, and the three differences are instructive:
#
# - **1.3B on one card of 24 GB**: fits, says the tree, and it does not. Context and fragmentation take their share of the 24 GB, and activations were not counted. Near the border 16 bytes are not the whole story.
# - **70B on 8 cards**: both say offload, the planner adds tensor parallel. That cuts the activations as well, so nothing has to be recomputed, and it is over 20 % faster than FSDP alone. The tree asks what fits, not what is fast.
# - **175B on 1024 cards**: the planner adds a pipeline, and with the layers cut 32 ways ZeRO-1 is enough. And there is a question that the tree does not ask: is the batch large enough for so many cards? See 6.2.
#
# (`fsdp 1` is FSDP's offload on one card: nothing is sharded.)
#
# The tree's questions can also be asked with numbers. Take the function below as a small tool and try your own hardware (`gpu` can also be `h100`, `h200`, `b200`, `l40s`, `v100`, ... or a `.toml` file):
#
# </div>

# %%
from IPython.display import display
from minidist.learn.widget import plan_picture, planner_widget
from minidist.plan import explain

def ask(**question):
    """The decision tree with numbers, then the best layouts. Arguments as in md.plan."""
    found = md.plan(**question)
    for node in explain.decision_tree(found):
        print(f"{node.question}\n    {node.answer} -> {node.leads_to}")
    print(f"\nbest: {found.best.layout}\n{found.reason}")
    for family, why in found.rejected.items():
        print(f"    not {family}: {why}")
    display(plan_picture(found, top=4))

ask(params=7e9, gpus=8, gpu="a100")      # 7e9 picks the nearest known shape, Llama 2 7B (6.74B)

# %% [markdown]
# ### 自己动手调 | Turn the knobs

# %% [markdown]
# <div lang="zh">
#
# 下面是带控件的规划器：动任何一个，表格、图和理由都跟着变（没有内核的页面上只看得到第一个答案）。
#
# **先猜**，再动手，每次从头开始只改一处：
#
# 1. 序列长度 4096 → 32768：参数一个也没多，为什么最好的布局变了？
# 2. 64 张卡，全局 batch 固定为 8：FSDP 还能单独用吗？多少时间在计算？
# 3. 只有 1 张卡：7B 还能训练吗？
#
# </div>
#
# <div lang="en">
#
# The planner with controls: move any of them, and the table, the picture and the reasons follow (a page without a kernel shows the first answer only).
#
# **Predict**, then try, changing one thing at a time from the start:
#
# 1. sequences from 4096 to 32768 tokens: not one parameter more, so why does the best layout change?
# 2. 64 cards and a global batch of 8: does FSDP alone still work? How much of the time is computing?
# 3. a single card: can 7B still be trained?
#
# </div>

# %%
planner_widget(params=7e9, gpus=8, gpu="a100")

# %% [markdown]
# <div lang="zh">
#
# 1. 激活值随序列变长，模型状态不变：一条 32768 的序列，单张卡要重算才放得下，慢 25%；几张卡一起算一条更快，于是出现张量并行。
# 2. 不能：8 条序列分不到 64 张卡（`fsdp-grad-op` 就是 SHARD_GRAD_OP），只能 8 张卡一起算一条；通信占去两成多的时间，变窄的矩阵又让计算本身变慢（207 → 148 TFLOP/s）。这正是 6.2 要讲的。
# 3. 能：优化器状态和梯度搬到主机内存，速度损失不到一成。80 GB 的卡装得下 16 位参数和激活值；换成 24 GB 的卡，参数最好也搬走，留下就得重算，慢三成。
#
# </div>
#
# <div lang="en">
#
# 1. Activations grow with the sequence, model states do not: one card holds a sequence of 32768 only with recomputation, 25 % slower; several cards sharing one are faster, and tensor parallel appears.
# 2. No: 8 sequences cannot be dealt to 64 cards, so 8 cards share one (`fsdp-grad-op` is SHARD_GRAD_OP); messages take over a fifth of the time, and narrower matrices make computing itself slower (207 → 148 TFLOP/s). This is the point of 6.2.
# 3. Yes: optimizer state and gradients move to the host's memory, at a cost of less than a tenth of the speed. A card of 80 GB holds 16-bit parameters and activations; on one of 24 GB the parameters had better leave too: keeping them means recomputation, 30 % slower.
#
# </div>

# %% [markdown]
# ### 放不下的时候 | When nothing fits

# %% [markdown]
# <div lang="zh">
#
# **先猜**：70B 在一张 24 GB 的卡上，全部卸载到 CPU，够不够？
#
# </div>
#
# <div lang="en">
#
# **Predict**: 70B on a single card of 24 GB with everything offloaded to the CPU, will that do?
#
# </div>

# %%
try:
    ask(params=70e9, gpus=1, gpu="rtx4090")
except ValueError as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown]
# <div lang="zh">
#
# 不够：正在用的几层权重，加上激活值（各层的检查点和最后的 logits），一共要 30 GB，超过可用的 21 GB。错误里说出了三种改法；照着改一种，序列减半（这个模型自己的长度是 8192）：
#
# </div>
#
# <div lang="en">
#
# No: the weights of the layers in use and the activations (a checkpoint per layer, and the logits at the end) come to 30 GB, more than the usable 21 GB. The error names three ways out; here is one of them, sequences of half the length (the model's own is 8192):
#
# </div>

# %%
found = md.plan(params=70e9, gpus=1, gpu="rtx4090", seq=4096)
print(found.best.layout, f"| {found.best.total_bytes / 1e9:.0f} GB on the card, {found.best.host_bytes / 1e9:.0f} GB on the host")
print(f"{found.best.total_seconds / 3600:.1f} hours per step of {found.global_batch} sequences")

# %% [markdown]
# <div lang="zh">
#
# 别忘了主机：1.27 TB 内存，每参数 18 字节；规划器允许每台机器 2 TB（`host_memory=` 可改）。
#
# </div>
#
# <div lang="en">
#
# Mind the host: 1.27 TB, 18 bytes per parameter. The planner allows 2 TB per machine (`host_memory=` changes it).
#
# </div>

# %% [markdown]
# ### 4.5 节的两条建议 | Two pieces of advice from section 4.5

# %% [markdown]
# <div lang="zh">
#
# 文档 4.5 节说：“>7B：FSDP + CPU Offload”，“多节点：用 SHARD_GRAD_OP 减少跨节点通信”。
#
# **先猜**：13B 在 8 张 80 GB 的卡上要 offload 吗？7B 跨 8 个节点时，SHARD_GRAD_OP 和 HYBRID_SHARD 各能省多少跨节点通信？
#
# </div>
#
# <div lang="en">
#
# Section 4.5 of the document says: ">7B: FSDP + CPU offload", and "several nodes: SHARD_GRAD_OP for less traffic between them".
#
# **Predict**: does 13B on 8 cards of 80 GB need offload? For 7B on 8 nodes, how much of the traffic between nodes do SHARD_GRAD_OP and HYBRID_SHARD save?
#
# </div>

# %%
claims.show("j")

# %%
claims.show("i")

# %% [markdown]
# ## 6.2 典型配置 | Typical configurations

# %% [markdown]
# <div lang="zh">
#
# 文档的表格，每行给规划器一个例子：
#
# **先猜**：四行里，哪一行规划器会有不同意见？
#
# </div>
#
# <div lang="en">
#
# The document's table, with an example of each row given to the planner:
#
# **Predict**: with which of the four rows will the planner disagree?
#
# </div>

# %%
for row in explain.configurations():
    print(f"{row['size']:>7}, {row['gpus']:>6} GPUs, batch {row['batch']:>8}: {row['scheme']}")
    print(f"         {row['example']}: {row['planner']}\n         {row['note']}")

# %% [markdown]
# <div lang="zh">
#
# 三行一致。7B 到 70B 那行，规划器不用流水线：64 张以上的 H100，FSDP 加节点内的张量并行已经放得下，而且更快。流水线要到更大的模型才值得。例子靠近各行的上端；到了第二行的下端，3B 在 8 张卡上仍然是 DDP（4.5）。
#
# 表里还有一列容易被忽略：**全局 batch**。
#
# **先猜**：70B，512 张 H100，全局 batch 256。能不能只用 FSDP？
#
# </div>
#
# <div lang="en">
#
# Three agree. For 7B to 70B the planner leaves the pipeline out: on 64 and more H100s FSDP with tensor parallel inside each node fits, and is faster. Pipelines pay for larger models. The examples sit near the upper end of their rows: at the lower end of the second, 3B on 8 cards is still DDP (4.5).
#
# One more column is easily overlooked: the **global batch**.
#
# **Predict**: 70B, 512 H100s, a global batch of 256. Is FSDP alone possible?
#
# </div>

# %%
try:
    md.plan(params=70e9, gpus=512, gpu="h100", global_batch=256, tp=1, pp=1)
except ValueError as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown]
# <div lang="zh">
#
# 不行，哪怕内存足够：数据并行（包括 FSDP）每张卡至少要有一条序列，512 张卡分不了 256 条。全局 batch 不能无限加大（太大了收敛变慢，见第 2 章的学习率），所以卡再多，就得让几张卡一起算**同一条**序列，也就是张量或流水线并行。这是大规模训练要用三维并行的一个原因。
#
# **先猜**：175B，1024 张 A100，全局 batch 256、512、2048。三种情况下，三根轴（dp × tp × pp）都是最快的吗？
#
# </div>
#
# <div lang="en">
#
# No, however much memory there is: data parallelism, FSDP included, needs at least one sequence per card, and 256 cannot be dealt to 512. The global batch cannot grow for ever (too large, and training converges more slowly; see the learning rate in chapter 2), so with still more cards several of them have to work on **the same** sequence, which is tensor or pipeline parallel. That is one reason why large training runs use three dimensions.
#
# **Predict**: 175B on 1024 A100s, with a global batch of 256, 512 and 2048. Are three axes (dp × tp × pp) fastest in every case?
#
# </div>

# %%
for batch in (256, 512, 2048):
    for name, choice in (("best", {}), ("no pipeline", {"pp": 1})):
        best = md.plan(params=175e9, gpus=1024, gpu="a100", global_batch=batch, **choice).best
        print(f"batch {batch:>4}, {name:>11}: {best.layout}; {best.tflops_per_gpu:.0f} TFLOP/s, "
              f"{best.seconds['bubble'] / best.total_seconds:.0%} bubble, "
              f"{best.seconds['dp_communication'] / best.total_seconds:.0%} data-parallel messages")

# %% [markdown]
# <div lang="zh">
#
# 三个答案都离不开张量并行（256 和 512 时序列比卡少，纯 FSDP 根本不可能）。256 时每张卡的活太少，数据并行的通信藏不住，不用流水线只有 132 TFLOP/s，于是加流水线，得到 162。512 时两根轴就够。2048 时 batch 不算紧张，流水线仍快 5%。所以 batch 不够分只是原因之一，另一个是通信能不能藏住。
#
# </div>
#
# <div lang="en">
#
# All three answers need tensor parallel (with 256 and 512 there are fewer sequences than cards, and pure FSDP is impossible). With 256 every card has so little to do that data-parallel messages no longer hide: without a pipeline it is 132 TFLOP/s, with one 162. With 512 two axes are enough. With 2048 the batch is less scarce, and the pipeline still wins by 5 %. So a batch that does not go round is one reason; whether communication can be hidden is another.
#
# </div>

# %% [markdown]
# ## 6.3 三维并行 | 3D Parallelism

# %% [markdown]
# <div lang="zh">
#
# 把三根轴拼起来：8 个 rank 排成 **dp 2 × pp 2 × tp 2** 的网格（mesh）。每个 rank 有三个坐标，属于三个组：
#
# - **tp 组**的 rank 看**同样的数据**，各算每层的一片；
# - **pp 组**的 rank 看同样的数据，各算几层；
# - **dp 组**的 rank 有同样的那部分参数，看**不同的数据**。
#
# 次序有讲究：tp 的邻居编号相邻，因为它通信最多，要放在节点内最快的互连上；pp 通信最少，可以跨节点。
#
# **先猜**：rank 5 的坐标是什么？它和谁平均梯度，和谁一起算一个矩阵，把激活值发给谁？
#
# </div>
#
# <div lang="en">
#
# Now all three axes together: 8 ranks in a mesh of **dp 2 × pp 2 × tp 2**. Each rank has three coordinates and belongs to three groups:
#
# - ranks of a **tp group** see **the same data**, each computes a slice of every layer;
# - ranks of a **pp group** see the same data, each computes some of the layers;
# - ranks of a **dp group** hold the same part of the parameters and see **different data**.
#
# The order matters: neighbours in tp have neighbouring numbers, because tp talks most and belongs on the fastest links, inside one node; pp talks least and may cross nodes.
#
# **Predict**: what are the coordinates of rank 5? With whom does it average gradients, with whom does it compute a matrix, and to whom does it send activations?
#
# </div>

# %%
# %%ranks 8
mesh = md.build_mesh(dp=2, pp=2, tp=2)      # dist: torch.distributed, there in every %%ranks cell
groups = {axis: dist.get_process_group_ranks(mesh[axis].get_group()) for axis in ("dp", "pp", "tp")}
print("(dp, pp, tp) =", tuple(mesh.get_coordinate()), groups)

# %% [markdown]
# ### 亲手拼 | By hand

# %% [markdown]
# <div lang="zh">
#
# 先切层，再分段，最后复制：张量并行要看到完整的层，流水线要完整的模块，数据并行什么模块都行。三行加一个 loss：
#
# </div>
#
# <div lang="en">
#
# First cut the layers, then deal them out, then replicate: tensor parallel wants whole layers, the pipeline whole modules, data parallel takes any module. Three lines and a loss:
#
# </div>

# %%
from functools import partial

config = md.GPTConfig(seq=32, width=64, layers=4)
batches = TextBatches(load_tokens(), seq=32, batch=32)
STEPS = 6

def by_hand(mesh):
    model = md.tensor_parallel(md.build_gpt(config), mesh["tp"])
    stage = md.split(model, 2)[mesh["pp"].get_local_rank()]
    replica = md.DDP(stage, group=mesh["dp"])
    loss_fn = partial(md.vocab_parallel_cross_entropy, group=mesh["tp"])
    return md.Pipeline(replica, schedule="1f1b", microbatches=4, loss_fn=loss_fn, group=mesh["pp"])

def train(step, params, rows):
    """`rows(step)` gives this rank's data; `step(inputs, targets)` its loss, or None."""
    optimizer = torch.optim.SGD(params, lr=0.2)
    losses = []
    for i in range(STEPS):
        losses.append(step(*rows(i)))
        optimizer.step()
        optimizer.zero_grad()
    return [None if loss is None else float(loss) for loss in losses]

model = md.build_gpt(config)

def one_process(inputs, targets):
    loss = md.loss_fn(model(inputs), targets)
    loss.backward()
    return loss.detach()

reference = train(one_process, model.parameters(), batches.at)

# %% [markdown]
# ### 先错一次：数据按 rank 分 | First a mistake: data dealt out by rank

# %% [markdown]
# <div lang="zh">
#
# 数据并行时我们写 `batches.at(step, rank, world_size)`。照搬到三维里会怎样？
#
# **先猜**：会报错吗？
#
# </div>
#
# <div lang="en">
#
# With data parallelism we wrote `batches.at(step, rank, world_size)`. What if that is carried over?
#
# **Predict**: will it raise an error?
#
# </div>

# %%
# %%ranks 8 --out losses
pipeline = by_hand(mesh)
losses = train(pipeline.step, pipeline.parameters(), lambda step: batches.at(step, rank, world_size))

# %%
print("one process:", *(f"{loss:.3f}" for loss in reference))
for r, each in enumerate(losses):
    if each[0] is not None:
        print(f"rank {r}:     ", *(f"{loss:.3f}" for loss in each))

# %% [markdown]
# <div lang="zh">
#
# 没有报错，前四步损失也在下降，有时甚至比单进程还低。但同一个 tp 组的两个 rank 看了不同的数据：它们各算半个矩阵，加在一起的是两条不相干的序列；流水线的第一段读 rank 0 的输入，最后一段用的却是 rank 2 的答案，模型在学“不相干的下一个字”。看得出的线索：从第 5 步起**损失又升了**，离单进程越来越远。
#
# 正确的规则：数据按 **dp 坐标**分，同一个 dp 坐标下的 pp × tp 个 rank 拿同样的行。
#
# </div>
#
# <div lang="en">
#
# No error, and for four steps the losses do fall, at times below the single process. But the two ranks of a tp group saw different data: each computes half a matrix, and what is added up belongs to two unrelated sequences; the first stage of a pipeline reads rank 0's inputs and the last one uses rank 2's answers, so the model learns unrelated next letters. The clue: from step 5 on **the loss rises again** and parts from the single process.
#
# The rule: data are dealt out by the **dp coordinate**; the pp × tp ranks below it get the same rows.
#
# </div>

# %%
# %%ranks 8 --out losses,sent
pipeline = by_hand(mesh)
mine = mesh["dp"].get_local_rank()
losses = train(pipeline.step, pipeline.parameters(), lambda step: batches.at(step, mine, 2))

with md.measure(memory=False, timeline=False) as m:
    pipeline.step(*batches.at(0, mine, 2))
names = {mesh[axis].get_group().group_name: axis for axis in ("dp", "pp", "tp")}
sent = {names[group]: total.sent_bytes for group, total in m.traffic.by_group.items() if group in names}

# %%
def mean_over_replicas(losses):
    """The last stage's ranks (3 and 7, or 2 and 6) know the loss of their rows."""
    return [(a + b) / 2 for a, b in zip(losses[3], losses[7])]

figures.loss_curves({"one process": reference, "2 x 2 x 2 by hand": mean_over_replicas(losses)}, "one process");

# %% [markdown]
# <div lang="zh">
#
# 和单进程是同一次训练。三根轴各发了多少字节？
#
# **先猜**：哪根轴最多，哪根最少？
#
# </div>
#
# <div lang="en">
#
# It is the same training as in one process. How many bytes did each axis send?
#
# **Predict**: which axis sends most, which least?
#
# </div>

# %%
for axis in ("tp", "dp", "pp"):
    print(f"{axis}: " + ", ".join(f"rank {r} {sent[r].get(axis, 0):>7,}" for r in (0, 2)) + " bytes per step")

# %% [markdown]
# <div lang="zh">
#
# tp 约是 dp 的五倍，pp 最少，所以 tp 放在节点内最快的互连上：网格的次序就是这么来的。
#
# </div>
#
# <div lang="en">
#
# tp sends about five times as much as dp, pp least: hence the order of the mesh.
#
# </div>

# %% [markdown]
# ### 同样的东西，在 minidist 里 | The same in minidist

# %%
import inspect
from minidist.parallel import combine

source = inspect.getsource(combine.Parallel.__init__).splitlines()
start = next(i for i, line in enumerate(source) if 'self.sizes["tp"] > 1' in line)
print("\n".join(source[start : start + 6]), "\n        ...")
start = next(i for i, line in enumerate(source) if "parts, rank = split" in line)
print("\n".join(source[start : start + 2]), "\n        ...")
print(next(line for line in source if "self.stages = nn.ModuleList" in line))

# %% [markdown]
# <div lang="zh">
#
# `minidist/parallel/combine.py` 的 `md.parallelize` 就是这三步，另外处理了手写时会踩的坑：
#
# | 手写的 | `md.parallelize` | 少了会怎样 |
# |---|---|---|
# | 数据并行只有 DDP | `dp="ddp"`、`"zero1"`、`"zero2"`、`"fsdp"` | 状态在 dp 组里重复 |
# | 流水线里每个微批次都平均一次 | 只在最后一个微批次后归约 | 通信量成倍增加 |
# | 各 rank 自己裁剪梯度 | `clip_grad_norm_` 求全局范数：切开的相加，重复的只算一次 | 各 rank 的缩放系数不同，副本分家 |
# | 首尾共享的词嵌入不管 | 两端求和，范数里只算一次 | 共享的参数分家 |
# | 状态散在各处 | `full_state_dict()` 还原成普通模型的名字和形状 | 存下来没人能用 |
#
# </div>
#
# <div lang="en">
#
# `md.parallelize` in `minidist/parallel/combine.py` is these three steps, and minds what one trips over by hand:
#
# | ours | `md.parallelize` | what breaks without it |
# |---|---|---|
# | DDP only | `dp="ddp"`, `"zero1"`, `"zero2"`, `"fsdp"` | states repeated within dp groups |
# | (easily) averages every micro-batch | reduces once, after the last micro-batch | several times the traffic |
# | each rank clips its own gradients | `clip_grad_norm_` takes the global norm: what is cut adds up, what is repeated counts once | ranks scale differently, replicas part ways |
# | ignores an embedding shared by both ends | sums both ends, counts it once in the norm | shared parameters part ways |
# | state lies scattered | `full_state_dict()` has the plain model's names and shapes | a checkpoint that nobody can use |
#
# </div>

# %%
# %%ranks 8 --out curves
curves, norms = {}, {}
for dp in ("ddp", "zero1", "fsdp"):
    parallel = md.parallelize(md.build_gpt(config), mesh, dp=dp, schedule="1f1b", microbatches=4)
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.2)
    losses = []
    for step in range(STEPS):
        loss = parallel.step(*batches.at(step, mesh["dp"].get_local_rank(), 2))
        losses.append(None if loss is None else loss.item())
        norms[dp] = parallel.clip_grad_norm_(100.0).item()
        optimizer.step()
        optimizer.zero_grad()
    curves[dp] = losses
print("norm of all gradients in the last step:", *(f"{dp} {norm:.4f}" for dp, norm in norms.items()))

# %%
shown = {"one process": reference}
for dp in curves[0]:
    shown[f"{dp} 2 x pp 2 x tp 2"] = mean_over_replicas([each[dp] for each in curves])
figures.loss_curves(shown, "one process");

# %% [markdown]
# ## 6.4 三角权衡 | The triangle

# %% [markdown]
# <div lang="zh">
#
# 文档最后说，这是**显存节省、通信开销、易用性**的三角权衡。前两条边可以量：`minidist compare` 用每种策略训练同一个 GPT，并把损失、内存、字节都和公式对照。这里挑几种，4 个 rank：
#
# **先猜**：在“内存、通信”的平面上，谁会在左下角（又省又少）？为什么它没有一统天下？
#
# </div>
#
# <div lang="en">
#
# The document ends with a triangle: **memory saved, traffic paid, ease of use**. Two of its sides can be measured: `minidist compare` trains one GPT with every strategy and holds losses, memory and bytes to the formulas. Here are some of them, on 4 ranks:
#
# **Predict**: in the plane of memory and traffic, who will be in the lower left corner (little of both)? And why has it not replaced all others?
#
# </div>

# %%
import json
import subprocess
import sys
import tempfile
from pathlib import Path

out = Path(tempfile.mkdtemp()) / "compare.json"
strategies = "single,ddp,zero1,zero2,fsdp,tp,pp-gpipe,pp-1f1b,tp-pp"
command = [sys.executable, "-m", "minidist", "compare", "--steps", "2", "--no-mixed",
           "--strategies", strategies, "--json", out]
subprocess.run(command, check=True, capture_output=True, timeout=200)
rows = json.loads(out.read_text())["rows"]
print(f"{'':>10} {'memory':>7} {'sent':>7}  {'loss differs by':>15}")
for row in rows:
    print(f"{row['strategy']:>10} {row['bytes']['peak'] / 1e6:>4.1f} MB {row['sent'] / 1e6:>4.1f} MB  "
          f"{row['max_rel_loss_diff']:>15.0e}")

# %%
_, ax = plt.subplots(figsize=(6.5, 4), layout="constrained")
for row in rows[1:]:
    x, y = row["bytes"]["peak"] / 1e6, row["sent"] / 1e6
    ax.plot(x, y, "o", color="#4477AA")
    ax.annotate(row["strategy"], (x, y), xytext=(5, 4), textcoords="offset points", fontsize=8)
alone = rows[0]["bytes"]["peak"] / 1e6
ax.axvline(alone, color="#888888", linestyle="--")
ax.annotate("one process ", (alone, 1), ha="right", fontsize=8)
ax.set_xlabel(figures.label("memory of the fullest rank (MB)", "最满的 rank 的内存"), fontsize=8, loc="right")
ax.set_title(figures.label("MB sent per rank and step", "每 rank 每步发送"), loc="left", fontsize=10)
ax.set_xlim(left=0)
ax.set_ylim(bottom=-1);

# %% [markdown]
# <div lang="zh">
#
# 左下角是流水线。（DDP 比单进程少一半，省的是激活值：每个 rank 只有四分之一的 batch；模型状态一点没省。）它没有一统天下，因为图上少了第三条边：它有气泡（这里 3/8），要求模型能均匀地切成段，还要改训练循环。易用性无法量，但可以数你要改什么（$\psi$ 是参数量，N 是数据并行的 rank 数，t 是张量并行的 rank 数，p 是流水线的段数）：
#
# | | 你要改的 | 内存 | 通信 | 计算的损失 |
# |---|---|---|---|---|
# | DDP | 包一行 | 不省 | $2\psi$，可藏 | 几乎没有 |
# | ZeRO-1 / 2 | 换优化器 | 状态 ÷ N（参数除外） | $2\psi$，可藏 | 几乎没有 |
# | FSDP / ZeRO-3 | 包一行，选单元 | 全部 ÷ N，加正在用的单元 | $3\psi$，可藏 | 小模型藏不住 |
# | 张量并行 | 改写每一层 | 层 ÷ t | 随数据增长，藏不住 | 矩阵变窄，等通信 |
# | 流水线并行 | 切模型，换训练循环 | 层 ÷ p，在途激活值 | 最少 | 气泡 |
# | offload | 一个选项 | 几乎全部 | PCIe | 看 batch 和 CPU：上面模拟不到一成；DeepSpeed 的 ZenFlow 文章里，7B 在 4 张 A100 上六成以上的时间在等 |
#
# 所以次序总是：**能简单就简单**。先 DDP；放不下时 ZeRO / FSDP；全局 batch 不够分、或单层太大时加节点内的张量并行；更大时跨节点加流水线；卡实在不够才 offload。
#
# </div>
#
# <div lang="en">
#
# The pipeline is in the corner. (DDP takes half of the single process, which is activations: a rank has a quarter of the batch. Of the model states it saves nothing.) It has not replaced the others because the third side is missing from the picture: it has a bubble (3/8 here), wants a model that cuts into even stages, and changes the training loop. Ease cannot be measured, but what you have to change can be counted ($\psi$ parameters, N data-parallel ranks, t tensor-parallel ranks, p pipeline stages):
#
# | | what you change | memory | traffic | compute lost |
# |---|---|---|---|---|
# | DDP | wrap, one line | saves none | $2\psi$, can be hidden | next to none |
# | ZeRO-1 / 2 | the optimizer | states ÷ N (not parameters) | $2\psi$, can be hidden | next to none |
# | FSDP / ZeRO-3 | wrap, choose units | everything ÷ N, plus units in use | $3\psi$, can be hidden | small models cannot hide it |
# | tensor parallel | rewrite every layer | layers ÷ t | grows with data, cannot be hidden | narrow matrices, waits |
# | pipeline parallel | cut the model, another loop | layers ÷ p, activations in flight | the least | bubble |
# | offload | an option | nearly everything | PCIe | depends on batch and CPU: less than a tenth in the simulation above; over 60 % of an iteration in DeepSpeed's ZenFlow post (7B on 4 A100) |
#
# Hence the order: **as simple as will do**. DDP first; when that does not fit, ZeRO or FSDP; when the batch runs out or layers are too large, tensor parallel inside the node; larger still, a pipeline across nodes; offload only when there are too few cards.
#
# </div>

# %% [markdown]
# ## 小结 | Summary

# %% [markdown]
# <div lang="zh">
#
# 文档的六条核心要点，和量出它们的地方：
#
# - **DDP** 最简单，要求模型塞进单卡：每个参数 16 字节，加卡不省（2.3）。
# - **FSDP / ZeRO** 消除冗余：同一个 all-reduce 拆成两半，状态 ÷ N（第 4、5 章）。
# - **张量并行** 解决单层过大，要节点内的高带宽：跨节点时一步里三成以上在等（3.1）。
# - **流水线并行** 解决层数过多：通信最少，气泡 $(p-1)/m$，由阶段数和微批次数决定，层数不在公式里（3.2）。
# - **三维并行**：tp 在节点内，pp 跨节点，dp 在最外面；大规模时的一个原因是 batch 不够分，另一个是通信要藏得住（6.2、6.3）。
# - **三角权衡**：能简单就简单（6.4）。
#
# 本章多出来的三条：边界附近 16 字节不够数，要把激活值和预留算进去；跨节点用 HYBRID_SHARD；offload 看“每卡分到的状态”，不看模型大小。
#
# **延伸阅读**（文档列的四个，加两个）：PyTorch 文档 *DistributedDataParallel* 与 *FullyShardedDataParallel*；Rajbhandari et al. 2020, *ZeRO*，第 5、7 节；Shoeybi et al. 2019, *Megatron-LM*；Narayanan et al. 2021，第 3、5 节（怎样组合三根轴）；Grattafiori et al. 2024, *Llama 3*，3.3.2（405B 的四维并行）。
#
# **练习**：`minidist check 6`。**下一章**：走出这台机器。
#
# </div>
#
# <div lang="en">
#
# The document's six key points, and where they were measured:
#
# - **DDP** is the simplest start and needs a model that fits one card: 16 bytes per parameter, and more cards save none (2.3).
# - **FSDP / ZeRO** remove redundancy: one all-reduce taken apart into its halves, states ÷ N (chapters 4 and 5).
# - **Tensor parallel** is for layers too large, and wants the bandwidth inside a node: across nodes a third of the step and more is waiting (3.1).
# - **Pipeline parallel** is for too many layers: the least traffic, a bubble of $(p-1)/m$ that depends on stages and micro-batches; layers are not in the formula (3.2).
# - **3D parallelism**: tp inside the node, pp across nodes, dp outermost; at scale partly because the batch runs out, partly to keep communication hidden (6.2, 6.3).
# - **The triangle**: as simple as will do (6.4).
#
# And three of this chapter's own: near the border 16 bytes are not enough, count activations and reserves; across nodes use HYBRID_SHARD; offload is a question of states per card, not of model size.
#
# **Further reading** (the document's four, and two more): PyTorch's documentation of *DistributedDataParallel* and *FullyShardedDataParallel*; Rajbhandari et al. 2020, *ZeRO*, sections 5 and 7; Shoeybi et al. 2019, *Megatron-LM*; Narayanan et al. 2021, sections 3 and 5 (how to combine the axes); Grattafiori et al. 2024, *Llama 3*, 3.3.2 (405B in four dimensions).
#
# **Exercises**: `minidist check 6`. **Next**: beyond this machine.
#
# </div>
