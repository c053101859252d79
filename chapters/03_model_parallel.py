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
# # 3. 模型并行 | Model Parallelism

# %% [markdown]
# <div lang="zh">
#
# **目标**：数据并行是每张卡一份完整模型、各读各的数据。这一章反过来：**把模型本身切开**。横着切每一层，是张量并行；竖着切层与层之间，是流水线并行。你会
#
# - 亲手切开一个矩阵乘法，补上 f 和 g，拼出 Megatron 的一层，再加上序列并行；
# - 写一个三十来行的流水线执行器，只换一张动作表，就得到 naive、GPipe、1F1B，然后看 interleaved 和 zero-bubble；
# - 每一步都和单进程训练对照，并测出它的内存、通信和空闲。
#
# **时间**：约 3 小时，两半可以分两次读。**对应文档**：第 3 节（3.1 张量并行、3.2 流水线并行、3.3 对比）。**先读**：第 0 章（集合通信），第 2 章的 2.1。
#
# **练习**：在终端运行 `minidist start-exercises my-exercises` 领一份，写好后用 `minidist check 3 --src my-exercises` 检查。
#
# </div>
#
# <div lang="en">
#
# **Goals**: data parallelism gives every card a whole model and its own data. This chapter turns that around and **cuts the model itself**: across every layer, which is tensor parallelism, or between layers, which is pipeline parallelism. You will
#
# - cut one matrix product by hand, add f and g, put Megatron's layer together, and go on to sequence parallelism;
# - write a pipeline executor of some thirty lines that becomes naive, GPipe or 1F1B when you hand it another list of actions, then meet interleaved and zero-bubble;
# - compare every step with single-process training, and measure its memory, traffic and idle time.
#
# **Time**: about 3 hours; the two halves can be read on two days. **Follows** section 3 of the document (3.1 tensor parallel, 3.2 pipeline parallel, 3.3 comparison). **Before this**: chapter 0 (collectives), section 2.1 of chapter 2.
#
# **Exercises**: in a terminal, `minidist start-exercises my-exercises` makes your copy and `minidist check 3 --src my-exercises` checks it.
#
# </div>

# %%
# %load_ext minidist
import torch
from torch.nn.functional import cross_entropy, gelu, linear

import minidist as md
from minidist.comm import collectives as coll
from minidist.learn import claims, figures
from minidist.train.data import TextBatches, load_tokens

# %% [markdown]
# ## 3.1 张量并行 | Tensor Parallel

# %% [markdown]
# ### 第一步：切开一个矩阵乘法 | Step 1: cut one matrix product

# %% [markdown]
# <div lang="zh">
#
# 张量并行把**每一层**切给所有 rank。和数据并行不同，各 rank 看的是**同样的数据**，一起算每一个矩阵。最有名的实现是 Megatron-LM。
#
# 线性层就是 $Y = XA$：$X$ 的每一行是一个 token，$A$ 是权重。$A$ 有两个方向可以切：
#
# - **列并行（column parallel）**：按列切，也就是按**输出**特征切；
# - **行并行（row parallel）**：按行切，也就是按**输入**特征切。
#
# 用文档的例子：一个 4096 × 4096 的层，切到 2 张卡上。
#
# **先猜**：文档说行并行是“每卡算部分 hidden state”。输入 8 个 token，行并行时每张卡算出来的张量是 `[8, 2048]` 还是 `[8, 4096]`？
#
# </div>
#
# <div lang="en">
#
# Tensor parallelism cuts **every layer** over all ranks. Unlike in data parallelism, all ranks see **the same data** and compute each matrix together. Megatron-LM is the best-known implementation.
#
# A linear layer is $Y = XA$: each row of $X$ is a token, $A$ holds the weights. $A$ can be cut in two directions:
#
# - **column parallel**: by columns, that is by **output** features;
# - **row parallel**: by rows, that is by **input** features.
#
# The document's example: a layer of 4096 × 4096 on 2 cards.
#
# **Predict**: the document says of row parallel that each card computes a part of the hidden state. With 8 tokens as input, is the tensor that each card computes `[8, 2048]` or `[8, 4096]`?
#
# </div>

# %%
# %%ranks 2
torch.manual_seed(0)                     # the same X and A on both ranks
X, A = torch.randn(8, 4096), torch.randn(4096, 4096) / 64
Y = X @ A                                # what a single card would compute

mine = X @ A.chunk(world_size, dim=1)[rank]    # column: Linear(4096, 2048), as in the document
print("column: X", [*X.shape], "-> my result", [*mine.shape])
parts = torch.empty(world_size, *mine.shape)
coll.all_gather(parts.view(-1), mine.view(-1))
column_right = torch.allclose(torch.cat([*parts], dim=1), Y, atol=1e-4)

X_slice = X.chunk(world_size, dim=1)[rank]     # row: a slice of the input features suffices
partial = X_slice @ A.chunk(world_size, dim=0)[rank]
print("row:    X", [*X_slice.shape], "-> my result", [*partial.shape])
print(f"mine[0, 0] = {partial[0, 0]:.3f}, right would be {Y[0, 0]:.3f}")
coll.all_reduce(partial)
print("column: joined == Y:", column_right, "| row: summed == Y:", torch.allclose(partial, Y, atol=1e-4))

# %% [markdown]
# <div lang="zh">
#
# 行并行的结果是**完整大小** `[8, 4096]`，每个数都在，但每个数都只算了一半：它们是**部分和（partial sum）**，加起来才对。列并行正相反：只有一半的数，但每个数都已经算完。
#
# | | 列并行 | 行并行 |
# |---|---|---|
# | 需要的输入 | 全部 $X$ | $X$ 的一片列 |
# | 算出来的 | $Y$ 的一片，已算完 | 整个 $Y$ 的部分和 |
# | 得到完整的 $Y$ | 拼接（all-gather），但**常常不需要** | 相加（all-reduce） |
# | `nn.Linear.weight`（存的是转置 `[out, in]`） | 切第 0 维 | 切第 1 维 |
# | bias | 跟着切 | 每卡完整，求和**之后**加一次 |
#
# </div>
#
# <div lang="en">
#
# The result of row parallel has the **full size**, `[8, 4096]`: every number is there, and every one is half done. They are **partial sums**, right only when added up. Column parallel is the opposite: half of the numbers, each of them finished.
#
# | | column parallel | row parallel |
# |---|---|---|
# | needs of the input | all of $X$ | a slice of $X$'s columns |
# | computes | a slice of $Y$, finished | partial sums of all of $Y$ |
# | to have $Y$ whole | join (all-gather), **often not needed** | add up (all-reduce) |
# | `nn.Linear.weight` (stored transposed, `[out, in]`) | cut dimension 0 | cut dimension 1 |
# | bias | cut along | whole everywhere, added once, **after** the sum |
#
# </div>

# %%
claims.show("e")

# %% [markdown]
# ### 第二步：先列后行，中间不用通信 | Step 2: column then row, no communication in between

# %% [markdown]
# <div lang="zh">
#
# “常常不需要拼接”：因为列并行输出的那一片，正好就是行并行需要的输入。Transformer 的 MLP 是 $\mathrm{gelu}(XA)\,B$：$A$ 按列切，$B$ 按行切。gelu 逐元素计算，在一片上算和在整体上算一样。
#
# **先猜**：这样的 MLP，前向要通信几次？如果反过来，$A$ 按行切，$B$ 按列切呢？
#
# </div>
#
# <div lang="en">
#
# "Often not needed", because the slice that column parallel puts out is just the input that row parallel wants. The MLP of a transformer is $\mathrm{gelu}(XA)\,B$: cut $A$ by columns and $B$ by rows. gelu works element by element, so a slice of it is the gelu of the slice.
#
# **Predict**: how often does such an MLP communicate in its forward? And the other way round, $A$ by rows and $B$ by columns?
#
# </div>

# %%
config = md.GPTConfig(seq=32, width=64, layers=2)
mlp = md.build_gpt(config).blocks[0].mlp         # up: 64 -> 256, down: 256 -> 64
x = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(1))

# %%
# %%ranks 4
def cut(weight, dim):
    return weight.chunk(world_size, dim)[rank]

with torch.no_grad(), md.measure(memory=False, timeline=False) as m:
    hidden = gelu(linear(x, cut(mlp.up.weight, 0), cut(mlp.up.bias, 0)))    # column
    partial = linear(hidden, cut(mlp.down.weight, 1))                       # row
    y = coll.all_reduce(partial) + mlp.down.bias
print("column, row:", m.traffic.calls, "call;  right:", torch.allclose(y, mlp(x), atol=1e-6))

with torch.no_grad():
    partial = linear(cut(x, -1), cut(mlp.up.weight, 1))                     # row first
    summed = coll.all_reduce(partial.clone())
    print(f"row first: gelu of the sum and sum of the gelus differ by "
          f"{(gelu(summed) - coll.all_reduce(gelu(partial))).abs().max():.2f}")

# %% [markdown]
# <div lang="zh">
#
# 先列后行：**一次** all-reduce。先行后列：gelu 不是线性的，部分和必须先加起来才能过 gelu，这是一次；B 按列切，输出还要拼接，又是一次。所以顺序总是先列后行。
#
# </div>
#
# <div lang="en">
#
# Column then row: **one** all-reduce. Row then column: gelu is not linear, so the partial sums have to meet before it, and the slices have to be joined after it, which makes two. Hence the order is always column, then row.
#
# </div>

# %% [markdown]
# ### 第三步：反向，f 和 g | Step 3: backward, f and g

# %% [markdown]
# <div lang="zh">
#
# 前向对了，反向呢？把这对线性层写成模块。出口的求和叫 **g**：前向 all-reduce，反向什么都不做（每个部分和的梯度就是 $dY$ 本身）。入口我们先什么都不做：
#
# </div>
#
# <div lang="en">
#
# The forward is right; what about backward? Here are the two layers as modules. The sum at the exit is called **g**: an all-reduce forward, nothing backward (the gradient of every partial sum is $dY$ itself). At the entry we do nothing for now:
#
# </div>

# %%
class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return coll.all_reduce(x.clone())

    @staticmethod
    def backward(ctx, grad):
        return grad

g = SumForward.apply

def f(x):
    return x                    # nothing, for now

# %%
def shard_of(tensor, dim, parts=1):
    """This rank's slice along `dim`; with `parts`, of each of several tensors lying side by side."""
    n, r = coll.world_size(), coll.rank()
    return torch.cat([part.chunk(n, dim)[r] for part in tensor.detach().chunk(parts, dim)], dim)

class Column(torch.nn.Module):
    def __init__(self, full, parts=1):
        super().__init__()
        self.weight = torch.nn.Parameter(shard_of(full.weight, 0, parts))
        self.bias = torch.nn.Parameter(shard_of(full.bias, 0, parts))

    def forward(self, x):
        return linear(f(x), self.weight, self.bias)

class Row(torch.nn.Module):
    def __init__(self, full):
        super().__init__()
        self.weight = torch.nn.Parameter(shard_of(full.weight, 1))
        self.bias = torch.nn.Parameter(full.bias.detach().clone())

    def forward(self, x):
        return g(linear(x, self.weight)) + self.bias

# %% [markdown]
# <div lang="zh">
#
# 在一个小 GPT 里换掉所有 MLP，和单进程比较一步的梯度。
#
# **先猜**：损失会和单进程一样吗？哪些参数的梯度会不对：MLP 自己的权重，还是 MLP 之前的（norm、embedding……）？
#
# </div>
#
# <div lang="en">
#
# Replace every MLP of a small GPT, and compare the gradients of one step with the single process.
#
# **Predict**: will the loss be that of the single process? Which gradients will be wrong: those of the MLP's own weights, or those of what comes before it (norm, embedding, ...)?
#
# </div>

# %%
batches = TextBatches(load_tokens(), seq=32, batch=8)
inputs, targets = batches.at(0)
reference = md.build_gpt(config)
reference_loss = md.loss_fn(reference(inputs), targets)
reference_loss.backward()
right = {name: param.grad for name, param in reference.named_parameters()}

def with_cut_mlps():
    model = md.build_gpt(config)
    for block in model.blocks:
        block.mlp.up, block.mlp.down = Column(block.mlp.up), Row(block.mlp.down)
    return model

def check_gradients(model):
    """Compare every gradient with the single process; of a cut parameter, with its slice."""
    for name, param in reversed(list(model.named_parameters())):
        expected = right[name]
        if param.shape != expected.shape:
            dim = 0 if param.shape[0] != expected.shape[0] else 1
            expected = shard_of(expected, dim, parts=3 if "qkv" in name else 1)
        if not torch.allclose(param.grad, expected, atol=1e-5):
            size = param.grad.norm() / expected.norm()
            raise RuntimeError(f"{name}: gradient is wrong, {size:.2f} times as large as it should be")

# %% tags=["raises-exception"]
# %%ranks 4
model = with_cut_mlps()
loss = md.loss_fn(model(inputs), targets)
loss.backward()
if rank == 0:
    print("loss as in one process:", torch.allclose(loss, reference_loss))
check_gradients(model)

# %% [markdown]
# <div lang="zh">
#
# 损失完全正确，最后一个 MLP 自己的梯度也正确，可是它**之前**的一切都错了，而且每个 rank 错得不一样：每个 rank 只知道 $dL/dX$ 中经过自己那一片权重的部分。又是一个不报错的错误：损失照样会下降。
#
# 补上入口的 **f**：前向什么都不做，反向把各 rank 的 $dX$ 加起来。f 和 g 互为转置：一个前向通信，一个反向通信。
#
# </div>
#
# <div lang="en">
#
# The loss is right, the gradients of the last MLP itself are right, and everything **before** it is wrong, on every rank in its own way: each rank knows only the part of $dL/dX$ that went through its own slice of the weights. Another mistake that raises nothing; the loss would fall all the same.
#
# The remedy is **f** at the entry: nothing forward, and backward the sum of all ranks' $dX$. f and g are each other's transpose: one communicates backward, the other forward.
#
# </div>

# %%
class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return coll.all_reduce(grad.clone())

f = SumBackward.apply

# %%
# %%ranks 4
model = with_cut_mlps()
md.loss_fn(model(inputs), targets).backward()
check_gradients(model)
print("all gradients right")

# %% [markdown]
# ### 第四步：Megatron 的一层 | Step 4: Megatron's layer

# %% [markdown]
# <div lang="zh">
#
# 注意力也一样：q、k、v 的投影按列切，输出投影按行切。唯一的讲究是**按头切**：一个 rank 拿到若干个完整的头，头与头之间本来就互不相干，所以中间同样不用通信。我们的 `qkv` 是一个大矩阵，输出排成 `[q | k | v]`，所以要在三段里**各切一片**（`parts=3`）；直接切成四段的话，rank 0 会拿到 q 的四分之三而没有 k、v，形状却一点不错。
#
# **先猜**：这样的一层，一个训练步（前向加反向）有几次 all-reduce？每次多少字节？
#
# </div>
#
# <div lang="en">
#
# Attention works the same way: the projections of q, k and v are cut by columns, the output projection by rows. The one subtlety: cut **by heads**. A rank gets some whole heads, and heads have nothing to do with each other, so again nothing is sent in between. Our `qkv` is one large matrix with its output laid out `[q | k | v]`, so a slice is taken of **each of the three** (`parts=3`); cut into four straight away, rank 0 would get three quarters of q and no k or v, in perfectly good shapes.
#
# **Predict**: how many all-reduces does such a layer have in one training step (forward and backward), and of how many bytes?
#
# </div>

# %%
def megatron(model):
    for block in model.blocks:
        block.attention.qkv = Column(block.attention.qkv, parts=3)
        block.attention.proj = Row(block.attention.proj)
        block.mlp.up, block.mlp.down = Column(block.mlp.up), Row(block.mlp.down)
    return model

def train(model, steps=8):
    """Every rank sees the whole batch: tensor parallel ranks work on the same data."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for step in range(steps):
        inputs, targets = batches.at(step)
        loss = md.loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

def formula_bytes(t):
    """8 b s h (t-1)/t numbers per layer, of 4 bytes each."""
    (b, s), h = inputs.shape, config.width
    return 8 * b * s * h * (t - 1) // t * config.layers * 4

one_process = train(md.build_gpt(config))

# %%
# %%ranks 4 --out losses
model = megatron(md.build_gpt(config))
with md.measure(memory=False, timeline=False) as m:
    md.loss_fn(model(inputs), targets).backward()
if rank == 0:
    calls, sent = m.traffic["all_reduce"].calls, m.traffic.sent_bytes
    block = sum(p.numel() for p in model.blocks[0].parameters())
    whole = sum(p.numel() for p in reference.blocks[0].parameters())
    print(f"{calls} all-reduces for {config.layers} layers, {sent:,} bytes sent")
    print(f"formula 8 b s h (t-1)/t per layer: {formula_bytes(world_size):,} bytes")
    print(f"parameters of one layer on this rank: {block:,} of {whole:,}")
model.zero_grad()
losses = train(model)

# %%
figures.loss_curves({"one process": one_process, "tensor parallel, 4 ranks": losses[0]}, "one process");

# %% [markdown]
# <div lang="zh">
#
# 每层 **4 次**：注意力和 MLP 各有一个 g（前向）和一个 f（反向）。每次传 $b \cdot s \cdot h$ 个数（batch × 序列长 × 宽度），环形 all-reduce 每个数发 $2(t-1)/t$ 次，合计每层 $8bsh(t-1)/t$ 个数。注意通信量与**数据量**成正比，与参数量无关，和数据并行正好相反。
#
# 每层的参数是原来的四分之一多一点：norm 和 row 的 bias 每个 rank 都有完整的一份。这就是文档说的“适合单层超大场景”：参数、梯度、优化器状态和矩阵乘法都除以 t。
#
# </div>
#
# <div lang="en">
#
# **Four** per layer: attention and MLP have one g (forward) and one f (backward) each. Every one moves $b \cdot s \cdot h$ numbers (batch × sequence × width), a ring all-reduce sends each of them $2(t-1)/t$ times, so $8bsh(t-1)/t$ numbers per layer. Mind that this traffic grows with the **data** and not with the parameters, the opposite of data parallelism.
#
# The parameters of a layer shrink to a little over a quarter: norms and row biases are whole on every rank. This is what the document means by "suits a very large single layer": parameters, gradients, optimizer states and matrix products are all divided by t.
#
# </div>

# %% [markdown]
# ### 又一个不报错的错误：bias 加了 N 次 | Another quiet mistake: the bias added N times

# %% [markdown]
# <div lang="zh">
#
# 假如 `Row` 像普通线性层那样，把 bias 放进矩阵乘法里再求和：
#
# **先猜**：第一步的损失就会不对吗？
#
# </div>
#
# <div lang="en">
#
# Suppose `Row` adds its bias inside the product, as a plain linear layer does, and then sums:
#
# **Predict**: will the very first loss be wrong?
#
# </div>

# %%
class BiasTooOften(Row):
    def forward(self, x):
        return g(linear(x, self.weight, self.bias))

# %%
# %%ranks 4
model = megatron(md.build_gpt(config))
for block in model.blocks:
    for layer in (block.attention.proj, block.mlp.down):
        layer.__class__ = BiasTooOften             # the same parameters, another forward
if rank == 0:
    print("difference from one process, step by step:")
wrong = train(model)
if rank == 0:
    print(*(f"{abs(a - b):.0e}" for a, b in zip(wrong, one_process)))

# %% [markdown]
# <div lang="zh">
#
# 第一步完全一样，因为 bias 的初值是零；之后就再也对不上了，差在 0.003 到 0.05 之间：bias 起了四倍的作用。教训：对照实验不要只看第一步，测试里的 bias 不要从零开始。修法就是上面的 `Row`：bias 在 g **之后**加。
#
# </div>
#
# <div lang="en">
#
# The first step is the same, because biases start at zero; from then on it never agrees again, and is off by 0.003 to 0.05: every bias acts four times. The lesson: never compare the first step only, and do not start biases at zero in a test. The remedy is the `Row` above: the bias comes **after** g.
#
# </div>

# %% [markdown]
# ### 词表也切开 | The vocabulary, cut as well

# %% [markdown]
# <div lang="zh">
#
# 最后的输出矩阵（宽度 × 词表）是小模型里最大的矩阵，列并行切开后，每个 rank 只有**一部分类别**的 logits。
#
# **先猜**：算交叉熵时，要先把 logits 拼完整（每个 token V 个数）吗？
#
# </div>
#
# <div lang="en">
#
# The last matrix (width × vocabulary) is the largest of a small model. Cut by columns, every rank has the logits of **some of the classes**.
#
# **Predict**: to compute cross-entropy, do the logits have to be joined first (V numbers per token)?
#
# </div>

# %%
# %%ranks 4
torch.manual_seed(0)
logits, labels = torch.randn(256, 256), torch.randint(256, (256,))   # 256 tokens, 256 classes
size = 256 // world_size                                             # classes of this rank
mine, first = logits.chunk(world_size, 1)[rank], rank * size

with md.measure(memory=False, timeline=False) as m:
    top = coll.all_reduce(mine.amax(1), "max")                 # so that exp() cannot overflow
    total = coll.all_reduce((mine - top[:, None]).exp().sum(1))
    here = (labels >= first) & (labels < first + size)         # whose class is the right one?
    hit = mine.gather(1, (labels - first).clamp(0, size - 1)[:, None])[:, 0]
    hit = coll.all_reduce(torch.where(here, hit - top, 0.0))
    loss = (total.log() - hit).mean()
print("right:", torch.allclose(loss, cross_entropy(logits, labels)),
      f"| sent {m.traffic.sent_bytes:,} bytes; joining would send {(world_size - 1) * mine.nbytes:,}")

# %% [markdown]
# <div lang="zh">
#
# 不用：每个 token 只要 3 个数（最大值、指数和、正确类别的 logit）。词表越大越划算。`md.vocab_parallel_cross_entropy` 就是它，加上反向、label smoothing 和 `ignore_index`；`md.VocabParallelEmbedding` 则切输入端的 embedding：查自己有的 token，别的填零，再求和。
#
# </div>
#
# <div lang="en">
#
# No: 3 numbers per token will do (maximum, sum of exponentials, logit of the right class). The larger the vocabulary, the better the bargain. `md.vocab_parallel_cross_entropy` is this plus backward, label smoothing and `ignore_index`; `md.VocabParallelEmbedding` cuts the embedding at the input: look up the tokens you own, zeros for the others, and sum.
#
# </div>

# %% [markdown]
# ### 第五步：序列并行 | Step 5: sequence parallel

# %% [markdown]
# <div lang="zh">
#
# 还有浪费：norm、残差、dropout 这些**不切**的部分，t 个 rank 做着完全相同的计算，存着完全相同的激活值。办法：在这些地方让每个 rank 只管**一部分 token**，进入矩阵之前再拼起来：
#
# - 入口 f 换成：前向沿 token **all-gather**，反向 reduce-scatter；
# - 出口 g 换成：前向 **reduce-scatter**（求和，但只留自己的 token），反向 all-gather。
#
# **先猜**：通信的字节数会变多、变少，还是不变？
#
# </div>
#
# <div lang="en">
#
# There is some waste left: in what is **not** cut (norms, residuals, dropout) all t ranks do the same computation and keep the same activations. So there let every rank look after **some of the tokens**, and join them only before a matrix:
#
# - f at the entry becomes an **all-gather** over tokens forward, a reduce-scatter backward;
# - g at the exit becomes a **reduce-scatter** forward (the sum, of which each keeps its own tokens), an all-gather backward.
#
# **Predict**: do the bytes go up, go down, or stay?
#
# </div>

# %%
def gather(x):          # [batch, tokens / N, features] -> [batch, tokens, features]
    mine = x.movedim(1, 0).contiguous()
    full = mine.new_empty(coll.world_size() * len(mine), *mine.shape[1:])
    coll.all_gather(full.view(-1), mine.view(-1))
    return full.movedim(0, 1)

def sum_scatter(x):     # the sum over ranks, of which each keeps its own tokens
    full = x.movedim(1, 0).contiguous()
    mine = full.new_empty(len(full) // coll.world_size(), *full.shape[1:])
    coll.reduce_scatter(mine.view(-1), full.view(-1))
    return mine.movedim(0, 1)

class GatherTokens(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: gather(x))
    backward = staticmethod(lambda ctx, grad: sum_scatter(grad))

class ScatterTokens(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: sum_scatter(x))
    backward = staticmethod(lambda ctx, grad: gather(grad))

# %% [markdown]
# <div lang="zh">
#
# `Column` 和 `Row` 一个字都不用改，它们用的就是 `f` 和 `g`。外面的部分现在相当于**对 token 的数据并行**：每个 rank 算自己那些 token 的损失，而 norm、embedding、bias 这些不切的参数，每个 rank 只见过自己的 token，梯度要在最后求和（忘了它，又是一个不报错的错误）。
#
# </div>
#
# <div lang="en">
#
# `Column` and `Row` need no change at all: they use whatever `f` and `g` are. Outside of them we now have **data parallelism over tokens**: every rank computes the loss of its own tokens, and parameters that are not cut (norms, embedding, biases) have seen only these, so their gradients have to be summed at the end (forget that, and you have another mistake that raises nothing).
#
# </div>

# %%
def loss_of_my_tokens(model, inputs, targets):
    n, r = coll.world_size(), coll.rank()
    x = model.embed(inputs).chunk(n, dim=1)[r]
    for layer in model.layers()[1:]:
        x = layer(x)
    return md.loss_fn(x, targets.chunk(n, dim=1)[r]) / n      # my share of the mean

def sum_uncut_gradients(model):
    for name, param in model.named_parameters():
        if param.shape == right[name].shape:
            coll.all_reduce(param.grad)

# %%
# %%ranks 4 --out memory,sent
memory, sent = {}, {}
for name in ("tensor parallel", "+ sequence parallel"):
    model = megatron(md.build_gpt(config))
    with md.measure(model, timeline=False) as m:
        if name == "tensor parallel":
            f, g = SumBackward.apply, SumForward.apply
            md.loss_fn(model(inputs), targets).backward()
        else:
            f, g = GatherTokens.apply, ScatterTokens.apply
            loss_of_my_tokens(model, inputs, targets).backward()
    memory[name] = {"activations": m.memory.peak["activations"]}
    sent[name] = {op: total.sent_bytes for op, total in m.traffic.by_op.items()}
sum_uncut_gradients(model)                # after the measurement: small, and not counted above
check_gradients(model)
print("all gradients right")
f, g = SumBackward.apply, SumForward.apply      # back to plain tensor parallel

# %%
import matplotlib.pyplot as plt

with md.measure(reference, timeline=False) as m:
    md.loss_fn(reference(inputs), targets).backward()
bars = {"one process": {"activations": m.memory.peak["activations"]}} | memory[0]
_, (memory_ax, traffic_ax) = plt.subplots(1, 2, figsize=(10, 2), layout="constrained")
figures.memory_bars(bars, ax=memory_ax)
figures.traffic_bars(sent[0], dict.fromkeys(sent[0], formula_bytes(4)), ax=traffic_ax);

# %% [markdown]
# <div lang="zh">
#
# 字节数不变：一次 all-reduce 本来就是 reduce-scatter 加 all-gather，我们只是把两半拆到了层的两头。激活值则又小了一截：现在连不切的部分也除以 t 了，因为 norm 和残差只管自己的 token。（但我们的写法让 `linear` 存下了拼好的完整输入；下面 minidist 的版本只存自己那一片，反向时再拼一次，用一点通信换内存。）
#
# </div>
#
# <div lang="en">
#
# The bytes stay: an all-reduce always was a reduce-scatter and an all-gather, and we have only moved its two halves to the two ends of a layer. Activations shrink once more: what is not cut is divided by t as well, because norms and residuals now hold their own tokens only. (Ours still lets `linear` keep the joined input; minidist's version below keeps its slice only and gathers again in backward, a little traffic for memory.)
#
# </div>

# %% [markdown]
# ### 同样的东西，在 minidist 里 | The same in minidist

# %%
import inspect
from minidist.parallel import tensor

print(inspect.getsource(tensor._ColumnLinear.backward))

# %% [markdown]
# <div lang="zh">
#
# 这是 `minidist/parallel/tensor.py` 里列并行层的反向。和我们手写的相比：
#
# | 手写的 | minidist | 为什么 |
# |---|---|---|
# | f 是单独的一步 | f 和矩阵乘法合在一起：$dX$ 的求和在路上时，先算 $dA$ | 藏住一部分通信 |
# | 序列并行存下完整输入 | 只存自己那一片，反向再拼一次 | 省激活值的内存，代价是多一次 all-gather |
# | 词表不切 | embedding、输出矩阵和损失都切 | 词表往往是最大的矩阵 |
# | 没有 dropout | `md.tp_rng`：切开的激活用各 rank 不同的随机数，没切开的用相同的 | 否则要么各 rank 的掩码相同，要么本该一致的副本变得不同 |
# | 随便切 | 头数、宽度除不尽时，改动任何东西之前就报错 | 形状对而结果错的切法太多 |
#
# 用法是一行 `md.tensor_parallel(model)`。单独的层是 `md.ColumnParallelLinear` 和 `md.RowParallelLinear`，构造参数和 `nn.Linear` 一样。
#
# </div>
#
# <div lang="en">
#
# This is the backward of the column parallel layer in `minidist/parallel/tensor.py`. Compared with our own:
#
# | ours | minidist | why |
# |---|---|---|
# | f is a step of its own | f is part of the product: while the sum of $dX$ travels, $dA$ is computed | hides some of the communication |
# | sequence parallel keeps the joined input | keeps its slice, gathers again in backward | saves activations for one more all-gather |
# | vocabulary not cut | embedding, output matrix and loss are | it often is the largest matrix |
# | no dropout | `md.tp_rng`: other random numbers on each rank where activations are cut, the same ones where they are not | otherwise cut parts would drop the same elements, and uncut parts would differ between ranks |
# | cuts anything | heads and widths that do not divide raise before anything changes | too many cuts have good shapes and wrong results |
#
# Using it is one line, `md.tensor_parallel(model)`. The layers by themselves are `md.ColumnParallelLinear` and `md.RowParallelLinear`, constructed like `nn.Linear`.
#
# </div>

# %%
# %%ranks 4 --out curves
def train_tensor_parallel(**options):
    model = md.tensor_parallel(md.build_gpt(config), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for step in range(8):
        x, y = batches.at(step)
        loss = md.vocab_parallel_cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

curves = {"md.tensor_parallel": train_tensor_parallel(),
          "+ sequence_parallel": train_tensor_parallel(sequence_parallel=True)}

# %%
figures.loss_curves({"one process": one_process} | curves[0], "one process");

# %% [markdown]
# ### 代价 | What it costs

# %% [markdown]
# <div lang="zh">
#
# 文档说张量并行“通信量大”。比数据并行大多少？张量并行的通信随 token 数增长，数据并行的通信只看参数量，所以一定有个交点。
#
# **先猜**：宽度 64，同样 4 个 rank，每步多少个 token 时两者相等？
#
# </div>
#
# <div lang="en">
#
# The document calls the traffic of tensor parallel large. Larger than that of data parallel? The one grows with the tokens, the other depends on the parameters alone, so there must be a point where they meet.
#
# **Predict**: with a width of 64 and the same 4 ranks, at how many tokens per step are they equal?
#
# </div>

# %%
# %%ranks 4 --out rows
rows = {}
for size in (1, 2, 4, 8, 16):                    # sequences of 32 tokens
    x, y = TextBatches(load_tokens(), seq=32, batch=size).at(0)
    model = md.tensor_parallel(md.build_gpt(config))
    with md.measure(memory=False, timeline=False) as m:
        md.vocab_parallel_cross_entropy(model(x), y).backward()
    rows[32 * size] = m.traffic.sent_bytes
model = md.DDP(md.build_gpt(config))
md.loss_fn(model(x), y).backward()
with md.measure(memory=False, timeline=False) as m:
    md.loss_fn(model(x), y).backward()
rows["ddp"] = m.traffic.sent_bytes

# %%
sent = dict(rows[0])
ddp = sent.pop("ddp")
_, ax = plt.subplots(figsize=(6, 2.8), layout="constrained")
ax.plot(list(sent), [size / 1e6 for size in sent.values()], "o-", color="#EE6677", label="tensor parallel")
ax.axhline(ddp / 1e6, color="#4477AA", label="data parallel")
ax.axvline(3 * 64, color="#888888", linestyle="--", label="3h tokens")
ax.set_xlabel(figures.label("tokens per step", "每步 token 数"), fontsize=8, loc="right")
ax.set_title(figures.label("MB sent per rank and step", "每 rank 每步发送"), loc="left", fontsize=10)
ax.legend(frameon=False, fontsize=8);

# %% [markdown]
# <div lang="zh">
#
# 大约在 $3h$ 个 token 处（只算 Transformer 层时恰好是 $3h$；这里的 embedding 让两边都多一点）。$h = 4096$ 时是 12,288 个 token，也就是三条 4k 的序列：日常的 batch 都比它大得多，所以“张量并行通信多”通常成立。但“模型并行通信多”就不对了，3.2 节的流水线是所有方法里通信最少的：
#
# </div>
#
# <div lang="en">
#
# At about $3h$ tokens (exactly $3h$ if only transformer layers are counted; here the embedding adds a little on both sides). For $h = 4096$ that is 12,288 tokens, three sequences of 4k: everyday batches are far larger, so tensor parallel usually does send more. "Model parallel sends more" is another matter, for the pipeline of section 3.2 sends the least of all:
#
# </div>

# %%
claims.show("d")

# %% [markdown]
# <div lang="zh">
#
# 更要紧的是**在什么时候**通信：数据并行的 all-reduce 可以藏在反向下面，张量并行的不行，下一个矩阵正等着它。所以它要最快的互连。用模拟器看 Llama 8B 在 H100 上，同一个副本切给越来越多的卡：
#
# **先猜**：从 8 卡（一台机器，NVLink）到 16 卡（两台，网络），张量并行通信占一步的比例怎么变？
#
# </div>
#
# <div lang="en">
#
# What matters more is **when** it communicates. Data parallelism hides its all-reduces under backward; tensor parallelism cannot, the next matrix is waiting. So it wants the fastest wires. The simulator shows Llama 8B on H100s, one replica cut over more and more cards:
#
# **Predict**: from 8 cards (one machine, NVLink) to 16 (two, over the network), how does the share of the step change that tensor parallel communication takes?
#
# </div>

# %%
from minidist.plan import PRESETS, simulate
from minidist.plan.costs import Layout, Software
from minidist.plan.hardware import cluster

def waiting(tp, overlap):
    """The share of a step in which compute waits for tensor parallel communication."""
    step = simulate(PRESETS["llama-3.1-8b"], cluster("h100", tp), Layout(tp=tp), 8, Software(tp_overlap=overlap))
    return step.parts["tp_communication"] / step.seconds

for tp in (2, 4, 8, 16, 32):
    where = "1 machine" if tp <= 8 else f"{tp // 8} machines"
    print(f"tp {tp:>2} ({where:>10}): {waiting(tp, 'none'):>4.0%} of the step waits; "
          f"{waiting(tp, 'backward'):>4.0%} if f is hidden under the weight gradient")

# %% [markdown]
# <div lang="zh">
#
# 文档还说张量并行没有气泡（下面“每层 4.5 次”：每层 4 次，多出的半次属于 embedding 和输出矩阵，摊到了各层上）：
#
# </div>
#
# <div lang="en">
#
# The document also says that tensor parallel has no bubble (of the 4.5 all-reduces per layer below, four are a layer's own; the half belongs to the embedding and the output matrix, spread over the layers):
#
# </div>

# %%
claims.show("k")

# %% [markdown]
# ## 3.2 流水线并行 | Pipeline Parallel

# %% [markdown]
# <div lang="zh">
#
# 换一个方向切：把不同的层放到不同的 rank 上，数据像流水线一样往后传。文档画的是 12 层分给 3 张卡：
#
# `GPU 0: [layers 0-3] → GPU 1: [layers 4-7] → GPU 2: [layers 8-11]`
#
# `md.split` 就做这件事。模型不只有 12 个一样的层，前有 embedding，后有输出矩阵，它按计算量分得尽量均匀：
#
# </div>
#
# <div lang="en">
#
# Now the other direction: different layers go to different ranks, and data flow from one to the next. The document draws 12 layers on 3 cards:
#
# `GPU 0: [layers 0-3] → GPU 1: [layers 4-7] → GPU 2: [layers 8-11]`
#
# `md.split` does this. A model is more than 12 equal layers; there is the embedding in front and the output matrix behind, and it balances by work:
#
# </div>

# %%
for stage in md.split(md.build_gpt(md.GPTConfig(layers=12)), 3):
    print(f"GPU {stage.index}:", ", ".join(stage.layer_names))

# %% [markdown]
# ### 一个执行器，一张动作表 | One executor, one list of actions

# %% [markdown]
# <div lang="zh">
#
# 所有流水线调度（naive、GPipe、1F1B……）做的都是同样两件事：某个微批次的**前向 F** 和**反向 B**。不同的只有**次序**。所以先写一个执行器，它照着一张动作表做：
#
# - F：从上一个 rank 收激活值，算，发给下一个 rank；
# - B：从下一个 rank 收梯度，反向，把输入的梯度发给上一个 rank。
#
# 中间要留着 F 的输入和输出，等它的 B 来用，这就是“在途（in flight）”的激活值。
#
# </div>
#
# <div lang="en">
#
# All pipeline schedules (naive, GPipe, 1F1B, ...) do the same two things: the **forward F** and the **backward B** of some micro-batch. Only the **order** differs. So we write one executor that follows a list of actions:
#
# - F: receive activations from the rank before, compute, send to the rank after;
# - B: receive gradients from the rank after, run backward, send the gradient of the input to the rank before.
#
# In between it keeps the input and output of F for the B to come: these are the activations **in flight**.
#
# </div>

# %%
config = md.GPTConfig(seq=32, width=64, layers=8)
batches = TextBatches(load_tokens(), seq=32, batch=16)

def run(actions, stage, inputs, targets):
    """One step of this rank. `inputs` and `targets` are lists of micro-batches."""
    rank, last, m = coll.rank(), coll.world_size() - 1, len(inputs)
    held, sends, loss, peak = {}, [], 0.0, 0
    for action in actions:
        kind, i, _ = action          # F or B; which micro-batch; (chunk, always 0)
        if kind == "F":
            x = inputs[i] if rank == 0 else receive(rank - 1, inputs[i])
            with md.measure.span(str(action)):
                y = stage(x)
                if rank == last:
                    y = md.loss_fn(y, targets[i]) / m        # my share of the mean
                    loss += y.item()
            held[i] = x, y
            peak = max(peak, len(held))
            if rank < last:
                sends.append(coll.isend(y.detach(), rank + 1))
        else:
            grad = None if rank == last else receive(rank + 1, inputs[i])
            x, y = held.pop(i)
            with md.measure.span(str(action)):
                y.backward(grad)
            if rank > 0:
                sends.append(coll.isend(x.grad, rank - 1))
    for send in sends:
        send.wait()
    return loss, peak

def receive(source, tokens):
    return coll.recv(torch.empty(*tokens.shape, config.width), source).requires_grad_()

# %% [markdown]
# <div lang="zh">
#
# 还需要一样东西。这台机器的核比 rank 少，4 个 rank 同时计算会互相抢核，看不出流水线的样子。所以我们给每个阶段套上一个**模拟的设备**：前向每行数据花 10 毫秒，反向 20 毫秒（睡眠不占核），真实的计算照做。这样时间就和 4 台独立的设备一样。
#
# </div>
#
# <div lang="en">
#
# One more thing. This machine has fewer cores than we have ranks; 4 ranks that compute at once would fight for them and hide the shape of the pipeline. So each stage gets an **emulated device**: 10 ms per row of data forward, 20 ms backward (sleeping takes no core), around the real computation. Time then passes as on 4 devices.
#
# </div>

# %%
import time

class Device(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, rows):
        ctx.rows = rows
        time.sleep(0.010 * rows)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.020 * ctx.rows)
        return grad, None

class OnDevice(torch.nn.Module):
    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    def forward(self, x):
        return Device.apply(self.stage(x), len(x))

# %% [markdown]
# ### 第一步：naive | Step 1: naive

# %% [markdown]
# <div lang="zh">
#
# 最朴素的做法：整个 batch 依次流过所有阶段，再依次流回来。每个 rank 的动作表只有 F0、B0。
#
# **先猜**：4 个 rank，每个 rank 有多少时间是闲着的？
#
# </div>
#
# <div lang="en">
#
# The plainest way: the whole batch flows through all stages, and back again. Every rank's list is just F0, B0.
#
# **Predict**: with 4 ranks, how much of the time is each of them idle?
#
# </div>

# %%
from minidist.parallel.schedules import Action, Schedule

def naive(p, m, rank):
    return [Action(kind, i) for i in range(m) for kind in "FB"]

def planned(build, p, m):
    """The lists of all ranks, played on a clock: forward 1, backward 2, no processes needed."""
    return Schedule(build.__name__, p, m, 1, [build(p, m, r) for r in range(p)]).simulate(f=1, b=2)

def length(slots):
    return max(mine[-1][2] for mine in slots) - min(mine[0][1] for mine in slots)

def pipeline_step(build, m, tries=3):
    """One step on the ranks. Returns loss, most in flight, measured slots (on rank 0, of the fastest
    try: others may be using this machine), and gradients by name."""
    best = None
    for _ in range(tries):
        stage = md.split(md.build_gpt(config), coll.world_size())[coll.rank()]
        inputs, targets = batches.at(0)
        assert len(inputs) % m == 0, f"{len(inputs)} rows do not divide into {m} micro-batches"
        inputs, targets = inputs.chunk(m), targets.chunk(m)
        actions = build(coll.world_size(), m, coll.rank())
        coll.barrier()
        with md.measure(memory=False, traffic=False) as measured:
            loss, peak = run(actions, OnDevice(stage), inputs, targets)
        slots = figures.measured_slots(measured.timeline.gather() or [])
        if slots and (best is None or length(slots) < length(best)):
            best = slots
    return loss, peak, best, {name: p.grad for name, p in stage.named_parameters()}

# %%
PLANNED, MEASURED = figures.label("planned", "计划"), figures.label("measured", "实测")

def compare_slots(build, p, m, slots):
    _, axes = plt.subplots(2, 1, figsize=(9, 4.6), layout="constrained")
    titles = [f"{build.__name__}, {word}" for word in (PLANNED, MEASURED)]
    figures.gantt(planned(build, p, m).slots, title=titles[0], ax=axes[0])
    figures.gantt(slots, unit="s", title=titles[1], ax=axes[1])

# %%
# %%ranks 4
loss, peak, slots, grads = pipeline_step(naive, 1, tries=1)
if rank == 0:
    compare_slots(naive, 4, 1, slots)

# %% [markdown]
# <div lang="zh">
#
# 任何时刻都只有一个 rank 在干活，四分之三的时间是空闲（文档给的 ❌）。上图是动作表在纸面上的推演，下图是 4 个进程真跑出来的，两张图来自**同一张动作表**。
#
# </div>
#
# <div lang="en">
#
# One rank works at a time, three quarters of the time is idle (the document's ❌). The upper picture is the list played on paper, the lower one is what 4 processes really did; both come from the **same list of actions**.
#
# </div>

# %% [markdown]
# ### 第二步：GPipe | Step 2: GPipe

# %% [markdown]
# <div lang="zh">
#
# 把 batch 切成 m 个**微批次（micro-batch）**：第一个微批次到了 rank 1，rank 0 就可以做第二个。GPipe 先做完所有 F，再做所有 B。
#
# 把一个微批次做一次前向的时间叫一个**时隙**，反向要两个。
#
# **先猜**：p = 4 个阶段，m = 8 个微批次。流水线要花几个时隙灌满和排空？空闲占总时间的几分之几？
#
# </div>
#
# <div lang="en">
#
# Cut the batch into m **micro-batches**: when the first one has moved on to rank 1, rank 0 can do the second. GPipe does all F, then all B.
#
# Let a **slot** be the time of one forward of one micro-batch; a backward takes two.
#
# **Predict**: p = 4 stages, m = 8 micro-batches. How many slots does it take to fill and to drain the pipeline, and what fraction of the total time is idle?
#
# </div>

# %%
def gpipe(p, m, rank):
    return [Action("F", i) for i in range(m)] + [Action("B", i) for i in range(m)]

# %%
# %%ranks 4 --out results
loss, peak, slots, grads = pipeline_step(gpipe, 8)
if rank == 0:
    compare_slots(gpipe, 4, 8, slots)
results = loss, peak, grads

# %% [markdown]
# <div lang="zh">
#
# 空闲的部分叫**气泡（bubble）**：每个 rank 等 p − 1 个前向（灌满）和 p − 1 个反向（排空），即 3 × 1 + 3 × 2 = 9 个时隙。说气泡有多大，一定要说**分母**：
#
# - 占**理想时间**（没有气泡的时间）的比例：$(p-1)/m$ = 3/8，Megatron 的说法；
# - 占**总时间**的比例：$(p-1)/(m+p-1)$ = 3/11 ≈ 27%，GPipe 的说法，也是图上的数字。
#
# 数值上和单进程一样吗？
#
# </div>
#
# <div lang="en">
#
# The idle part is the **bubble**: every rank waits for p − 1 forwards (filling) and p − 1 backwards (draining), 3 × 1 + 3 × 2 = 9 slots. Whoever says how large a bubble is has to name the **denominator**:
#
# - of the **ideal time** (that without a bubble): $(p-1)/m$ = 3/8, as Megatron puts it;
# - of the **total time**: $(p-1)/(m+p-1)$ = 3/11 ≈ 27%, as GPipe puts it, and as in the picture.
#
# Are the numbers those of the single process?
#
# </div>

# %%
reference = md.build_gpt(config)
inputs, targets = batches.at(0)
reference_loss = md.loss_fn(reference(inputs), targets)
reference_loss.backward()

def check_pipeline(results):
    """All stages' gradients together against the single process."""
    grads = {name: grad for _, _, mine in results for name, grad in mine.items()}
    worst = max((grads[name] - p.grad).abs().max().item() for name, p in reference.named_parameters())
    print(f"loss {results[-1][0]:.6f}, one process {reference_loss:.6f}; gradients differ by {worst:.0e}; "
          f"most in flight {[peak for _, peak, _ in results]}")

check_pipeline(results)

# %% [markdown]
# <div lang="zh">
#
# 一样。再看气泡随什么变。文档说“层数/微批越多气泡越小”。
#
# **先猜**：这句话的两半，哪半对？
#
# </div>
#
# <div lang="en">
#
# They are. Now what does the bubble depend on? The document says that it shrinks with more layers or more micro-batches.
#
# **Predict**: which half of that is right?
#
# </div>

# %%
# %%ranks 4
for m in (2, 4, 8, 16):
    _, _, slots, _ = pipeline_step(gpipe, m)
    if rank == 0:
        busy = sum(end - begin for mine in slots for _, begin, end in mine) / 4
        plan = planned(gpipe, 4, m)
        print(f"m = {m:>2}: bubble / ideal time {plan.bubble:.0%}; "
              f"bubble / total time {plan.bubble_of_total:.0%} planned, {1 - busy / length(slots):.0%} measured")

# %%
claims.show("f")

# %% [markdown]
# <div lang="zh">
#
# 微批次多，气泡小；代价是每个微批次变小：固定的开销要付更多次（上面 m 越大，实测比计划高得越多），真实的 GPU 上，太小的矩阵乘法也算得慢。**层数**不在公式里：层多了，如果因此多用几个阶段（p 变大），气泡反而变大。层多只有一个间接的好处：可以把每个 rank 的层再分成几段，见第四步。
#
# </div>
#
# <div lang="en">
#
# More micro-batches, smaller bubble; the price is that each becomes smaller: fixed costs are paid more often (above, the measured bubble exceeds the plan the more, the larger m is), and on a real GPU small matrix products are slow. **Layers** are not in the formula: if more layers lead you to more stages (a larger p), the bubble grows. More layers help in one roundabout way: each rank's share can be cut into several chunks, see step 4.
#
# </div>

# %% [markdown]
# ### 第三步：1F1B | Step 3: 1F1B

# %% [markdown]
# <div lang="zh">
#
# GPipe 的 rank 0 攒了 8 个微批次的激活值，m 越大攒得越多：气泡小和内存省不可兼得。**1F1B**（今天的主流）的主意：一旦第一个反向可以做了就马上做，之后一前一后交替，做完一个就释放一个。
#
# 每个 rank 先做几个 F 热身（warm-up）：离最后一个 rank 越远，第一个梯度回来得越晚，所以是 p − rank − 1 个。
#
# **先猜**：和 GPipe 比，1F1B 的气泡是变大、变小，还是一样？rank 0 最多有几个微批次在途？
#
# </div>
#
# <div lang="en">
#
# GPipe's rank 0 piled up the activations of 8 micro-batches, and of more as m grows: a small bubble or little memory, but not both. The idea of **1F1B**, today's usual choice: do the first backward as soon as it can be done, then alternate, one forward, one backward, and free a micro-batch each time.
#
# Every rank warms up with a few F: the farther it is from the last rank, the later its first gradient comes back, so p − rank − 1 of them.
#
# **Predict**: is the bubble of 1F1B larger than GPipe's, smaller, or equal? How many micro-batches will rank 0 have in flight?
#
# </div>

# %%
def one_f_one_b(p, m, rank):
    warmup = min(m, p - rank - 1)
    actions = [Action("F", i) for i in range(warmup)]
    for i in range(m):
        if warmup + i < m:
            actions.append(Action("F", warmup + i))
        actions.append(Action("B", i))
    return actions

for rank in range(4):
    print(f"rank {rank}:", *one_f_one_b(4, 8, rank))

# %%
# %%ranks 4 --out results
loss, peak, slots, grads = pipeline_step(one_f_one_b, 8)
if rank == 0:
    compare_slots(one_f_one_b, 4, 8, slots)
results = loss, peak, grads

# %%
check_pipeline(results)

# %% [markdown]
# <div lang="zh">
#
# 气泡**一样**（只是换了位置），在途的微批次从 8 变成 4、3、2、1，而且不再随 m 增长。执行器一个字没改，只换了一张表。量一量激活值占的内存：
#
# </div>
#
# <div lang="en">
#
# The bubble is **the same** (only its place changed); micro-batches in flight went from 8 to 4, 3, 2, 1, and no longer grow with m. The executor did not change by a word, only the list did. In bytes of activations:
#
# </div>

# %%
# %%ranks 4 --out rows
rows = {}
for build in (gpipe, one_f_one_b):
    stage = md.split(md.build_gpt(config), world_size)[rank]
    inputs, targets = (part.chunk(8) for part in batches.at(0))
    with md.measure(stage, timeline=False) as m:
        run(build(world_size, 8, rank), stage, inputs, targets)
    rows[f"{build.__name__}, rank {rank}"] = {"activations": m.memory.peak["activations"]}

# %%
bars = {name: row for build in ("gpipe", "one_f_one_b") for each in rows
        for name, row in each.items() if name.startswith(build)}
figures.memory_bars(bars, title=figures.label("peak of activations", "激活值峰值"));

# %% [markdown]
# <div lang="zh">
#
# （rank 3 的比按个数算的多一些，因为它还拿着 logits。）下面的结论是在 2 个 rank 上重测的：在途 8 个对 2 个；上面则是 8 个对 4 个。
#
# </div>
#
# <div lang="en">
#
# (Rank 3 has somewhat more than its number of micro-batches, because it holds the logits as well.) The claim is measured again on 2 ranks, with 8 micro-batches in flight against 2; above it was 8 against 4.
#
# </div>

# %%
claims.show("m")

# %% [markdown]
# ### 出错：热身数写反了 | A mistake: the warm-up the wrong way round

# %% [markdown]
# <div lang="zh">
#
# 热身是 p − rank − 1。写成 `rank` 会怎样？
#
# **先猜**：结果错、变慢，还是卡住？
#
# </div>
#
# <div lang="en">
#
# The warm-up is p − rank − 1. What if somebody writes `rank`?
#
# **Predict**: wrong results, slower, or stuck?
#
# </div>

# %%
def wrong_way_round(p, m, rank):
    return one_f_one_b(p, m, p - rank - 1)       # rank 3's list on rank 0, and so on

# %% tags=["raises-exception"]
# %%ranks 4
pipeline_step(wrong_way_round, 8)

# %% [markdown]
# <div lang="zh">
#
# 卡住：rank 0 做完 F0 就等 B0，可 rank 3 要先做 4 个 F（热身 3 个，再加 1 个）才轮到 B0，等着 rank 0 的 F1。错误里写着谁在等谁；至于等的是哪个动作，要看动作表本身。调度只是数据，所以**不用开进程就能看**：
#
# </div>
#
# <div lang="en">
#
# Stuck: rank 0 does F0 and waits for B0, while rank 3 wants 4 forwards before its B0 (3 to warm up and one more) and waits for rank 0's F1. The error says who waits for whom; for which action, look at the list itself. A schedule is data, so that can be done **without any process**:
#
# </div>

# %%
try:
    planned(wrong_way_round, 4, 8)
except ValueError as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown]
# ### 第四步：交错调度（interleaved） | Step 4: interleaved

# %% [markdown]
# <div lang="zh">
#
# 气泡是灌满流水线的时间，每个阶段越“短”，灌满越快。所以让每个 rank 拿 v 段**不相邻**的层（rank 0 拿第 0 段和第 4 段……），数据绕 v 圈，每一段只有 1/v 长。
#
# 我们的执行器只会一段，从这里起用 `md.Pipeline`，它和我们的写法一样读动作表，多会了几样东西（见下）。
#
# **先猜**：v = 2 时，气泡变成几分之几？通信呢？
#
# </div>
#
# <div lang="en">
#
# The bubble is the time to fill the pipeline, and the shorter the stages, the faster it fills. So give every rank v chunks of layers that are **not neighbours** (rank 0 gets chunks 0 and 4, ...); data go round v times, through chunks of 1/v the length.
#
# Our executor knows one chunk only; from here on we use `md.Pipeline`, which reads a list of actions like ours and knows a few more things (see below).
#
# **Predict**: with v = 2, what becomes of the bubble? And of the traffic?
#
# </div>

# %%
class Chunk(OnDevice):
    def forward(self, x):
        return Device.apply(self.stage(x), len(x) / 2)      # half of the layers, half of the time

# %%
# %%ranks 4 --out results
def library_step(name, chunks, device):
    plan = md.schedule(name, world_size, 8, chunks)
    parts = md.split(md.build_gpt(config), world_size, chunks)
    mine = [device(parts[plan.stage(rank, c)]) for c in range(chunks)]
    pipeline = md.Pipeline(mine, schedule=plan, microbatches=8, loss_fn=md.loss_fn)
    pipeline.step(*batches.at(0))                           # the first step agrees on shapes
    best = None
    for _ in range(3):
        coll.barrier()
        with md.measure(memory=False) as m:
            pipeline.step(*batches.at(0))
        slots = figures.measured_slots(m.timeline.gather() or [])
        if slots and (best is None or length(slots) < length(best)):
            best = slots
    return m.traffic.by_op["send"], best

results = {}
for name, chunks, device in (("1f1b", 1, OnDevice), ("interleaved", 2, Chunk)):
    sent, slots = library_step(name, chunks, device)
    results[name] = sent.calls, sent.sent_bytes
    if rank == 0 and name == "interleaved":
        _, axes = plt.subplots(2, 1, figsize=(9, 4.6), layout="constrained")
        plan = md.schedule(name, 4, 8, chunks).simulate(f=1, b=2)
        figures.gantt(plan.slots, title=f"interleaved, {PLANNED}", ax=axes[0])
        figures.gantt(slots, unit="s", title=f"interleaved, {MEASURED}", ax=axes[1])

# %%
for name, chunks in (("1f1b", 1), ("interleaved", 2)):
    plan = md.schedule(name, 4, 8, chunks).simulate(f=1, b=2)
    calls, size = results[1][name]
    print(f"{name:>11}: bubble / ideal {plan.bubble:.1%}, rank 1 sends {calls} messages, {size:,} bytes; "
          f"in flight {[n / chunks for n in plan.in_flight]}")

# %% [markdown]
# <div lang="zh">
#
# 深浅两色是同一个 rank 的两段。气泡减半，$(p-1)/(v\,m)$；消息数翻倍，因为数据绕了两圈；在途的激活值也多了一些。Megatron 用它，因为流水线的消息本来就小。（微批次数必须是 p 的倍数。）
#
# </div>
#
# <div lang="en">
#
# Dark and pale are the two chunks of a rank. The bubble is halved, $(p-1)/(v\,m)$; twice the messages, because data go round twice; and somewhat more activations in flight. Megatron uses it, since the messages of a pipeline are small to begin with. (The number of micro-batches has to be a multiple of p.)
#
# </div>

# %% [markdown]
# ### 第五步：零气泡（zero-bubble） | Step 5: zero-bubble

# %% [markdown]
# <div lang="zh">
#
# 反向其实是两件事：对**输入**的梯度 I（上一个 rank 等着要）和对**权重**的梯度 W（没人等）。把 B 拆成 I 和 W，W 就可以挪到气泡里去做。
#
# **先猜**：设 F = I = W = 1。1F1B 的气泡是 9 个时隙（3 个 F 加 3 个 B）。把 W 全部挪好之后还剩几个？
#
# </div>
#
# <div lang="en">
#
# A backward really is two things: the gradient of the **input**, I, which the rank before is waiting for, and that of the **weights**, W, which nobody waits for. Cut B into I and W, and W can move into the bubble.
#
# **Predict**: let F = I = W = 1. The bubble of 1F1B is 9 slots (3 F and 3 B). How many are left when W has been moved as well as possible?
#
# </div>

# %%
_, axes = plt.subplots(3, 1, figsize=(9, 6.6), layout="constrained")
for ax, name in zip(axes, ("1f1b", "zb-h1", "zb-v")):
    plan = md.schedule(name, 4, 8).simulate(f=1, b=2, w=1)
    bubble = plan.makespan - plan.ideal
    slots = figures.label(f"{bubble:g} slots of bubble", f"气泡 {bubble:g} 个时隙")
    figures.gantt(plan.slots, title=f"{name}: {slots}", ax=ax)

# %%
# %%ranks 4
for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)):
    parts = md.split(md.build_gpt(config), world_size, chunks)
    pipeline = md.Pipeline(parts, schedule=name, microbatches=8, loss_fn=md.loss_fn)
    loss = pipeline.step(*batches.at(0))
    norm = pipeline.clip_grad_norm_(float("inf"))
    if loss is not None:
        print(f"{name:>11}: loss {loss:.6f}, norm of all gradients {norm:.6f}")

# %% [markdown]
# <div lang="zh">
#
# zb-h1 剩 3 个时隙，内存与 1F1B 的最大值相同；zb-v 让每个 rank 拿一去一回两段（rank 0 同时有最前和最后一段，所以损失在 rank 0 上），每个 rank 中途不再停顿，只剩各 rank 开工有先后造成的 3 × ½ = 1.5 个时隙。五种调度的损失和梯度完全一致：**调度只改变次序，不改变结果**。
#
# （“一个时隙”假设 F、I、W 一样长。真实的比例不同，气泡不会正好是零；这里只画时隙，因为这台机器的核少于 rank，量不出差别。）
#
# </div>
#
# <div lang="en">
#
# zb-h1 leaves 3 slots at the memory of 1F1B's fullest rank; zb-v gives every rank one chunk on the way down and one on the way back (rank 0 holds both the first and the last, so the loss appears there), no rank pauses any more in between, and what is left are the 3 × ½ = 1.5 slots by which the ranks start one after the other. All five schedules have the same loss and gradients: **a schedule changes the order, never the result**.
#
# (A "slot" assumes that F, I and W take equally long. Real ratios differ, and the bubble is not exactly zero; here we draw slots only, since a machine with fewer cores than ranks cannot show the difference.)
#
# </div>

# %% [markdown]
# ### 同样的东西，在 minidist 里 | The same in minidist

# %%
from minidist.parallel import pipeline as library

print(inspect.getsource(library.Pipeline._run))

# %% [markdown]
# <div lang="zh">
#
# `minidist/parallel/pipeline.py` 的主循环，和我们的 `run` 是同一个形状；动作表在 `schedules.py`，是不碰 torch 的纯数据，执行器、模拟器、图和测试都读它。多出来的东西：
#
# | 手写的 | `md.Pipeline` | 少了会怎样 |
# |---|---|---|
# | 每次都等到要用才收 | 收发由 `messages.py` 插进动作表，提前几步就开始收 | 通信不能与计算重叠 |
# | 形状写死 | 第一步各阶段互相告知形状和类型 | 只能传一种张量 |
# | 发送的张量一直留着 | 发完就释放，输出只留计算图的根 | 在途内存多一倍 |
# | 每个微批次权重相同 | 按有效 token 数加权（`ignore_index`） | 长短不一时损失不对 |
# | 不管共享的参数 | 首尾共享的 embedding 在两端求和（`tied`） | 两份共享参数变得不一样 |
# | 出错就挂起 | 构造和每一步之前，各 rank 先互相核对 | 一个 rank 的 batch 不对，大家都等 |
#
# </div>
#
# <div lang="en">
#
# The main loop of `minidist/parallel/pipeline.py` has the shape of our `run`; the lists of actions are in `schedules.py`, plain data without any torch, read by the executor, the simulator, the pictures and the tests. What it adds:
#
# | ours | `md.Pipeline` | what breaks without it |
# |---|---|---|
# | receives when it needs the data | `messages.py` puts sends and receives into the list, some actions ahead | communication cannot overlap with compute |
# | shapes fixed in the code | in the first step stages tell each other shapes and types | only one kind of tensor can travel |
# | sent tensors stay alive | freed once sent; of an output only the root of its graph is kept | twice the memory in flight |
# | all micro-batches weigh the same | weighed by valid tokens (`ignore_index`) | a wrong loss when lengths differ |
# | parameters are all separate | an embedding shared by both ends is summed (`tied`) | shared parameters part ways |
# | a mistake hangs | ranks agree before construction and before each step | one rank with a bad batch, and all wait |
#
# </div>

# %% [markdown]
# ## 3.3 对比 | Comparison

# %% [markdown]
# <div lang="zh">
#
# 同一个模型、同样的 16 行数据、同样 4 个 rank，三种切法并排量。
#
# **先猜**：每步每个 rank 发的字节，从多到少怎么排？
#
# </div>
#
# <div lang="en">
#
# The same model, the same 16 rows and the same 4 ranks, cut in three ways and measured side by side.
#
# **Predict**: put them in order of bytes sent per rank and step.
#
# </div>

# %%
# %%ranks 4 --out held,sent
def measured_step(model, step):
    step()                                                   # the first step plans buckets and shapes
    for param in model.parameters():
        param.grad = None
    with md.measure(model, timeline=False) as m:
        step()
    kinds = {kind: m.memory.peak[kind] for kind in ("parameters", "gradients", "activations")}
    return kinds, {op: total.sent_bytes for op, total in m.traffic.by_op.items()}, m.traffic.calls

inputs, targets = batches.at(0)
mine = batches.at(0, rank, world_size)
ddp = md.DDP(md.build_gpt(config))
tp = md.tensor_parallel(md.build_gpt(config))
pp = md.Pipeline(md.split(md.build_gpt(config), 4), schedule="1f1b", microbatches=8, loss_fn=md.loss_fn)
steps = {
    "data parallel": (ddp, lambda: md.loss_fn(ddp(mine[0]), mine[1]).backward()),
    "tensor parallel": (tp, lambda: md.vocab_parallel_cross_entropy(tp(inputs), targets).backward()),
    "pipeline parallel": (pp, lambda: pp.step(inputs, targets)),
}
held, sent = {}, {}
for name, (model, step) in steps.items():
    held[name], sent[name], calls = measured_step(model, step)
    if rank == 1:
        print(f"{name:>17}: {sum(p.numel() for p in model.parameters()):>7,} parameters, "
              f"{calls:>3} communication calls (receives included)")

# %%
_, (above, below) = plt.subplots(2, 1, figsize=(7.5, 4.6), layout="constrained")
figures.memory_bars(held[1], title=figures.label("memory of rank 1", "rank 1 的内存"), ax=above)
title = figures.label("bytes sent by rank 1 in one step", "rank 1 一步发送的字节")
figures.traffic_bars(sent[1], title=title, ax=below);

# %% [markdown]
# <div lang="zh">
#
# 张量并行的激活值最多，因为每个 rank 都看全部 16 行，而数据并行只看 4 行。流水线发得最少，差一个数量级。
#
# 把文档的对比表填上我们量到的数，再加一列数据并行：
#
# | 维度 | 数据并行 | 张量并行 | 流水线并行 |
# |---|---|---|---|
# | 切什么 | 数据 | 层内：每个矩阵 | 层间：整层 |
# | 每 rank 的参数 | 全部 | 约 1/t（norm、行 bias 重复） | 约 1/p |
# | 每步通信 | 每桶一次，共 $2\psi(N-1)/N$ 个数（$\psi$ 是参数量），随参数增长 | 每层 4 次，$8bsh(t-1)/t$，随数据增长 | 每条边界每方向 $bsh$，最少 |
# | 能否藏在计算下 | 能 | 基本不能，每次都在关键路径上 | 大部分能 |
# | 气泡 | 无 | 无（但 rank 同样会停下来等通信） | 有，$(p-1)/m$ |
# | 适用 | 模型放得下一张卡 | 单层大；节点内，最快的互连 | 层多；可以跨节点 |
# | 最多切到 | batch 的行数 | 头数（和节点的卡数） | 层数 |
# | 实现 | 包一层 | 要改写模型的层 | 模型不动，但要调度器 |
#
# 文档里的两个数要当作量级来读：“单层超大 (>10B)” 指的是整个**模型**超过 10B 左右；在稠密模型里，即使论文中 1T 参数的 GPT，单独一层也不到 8B（MoE 一层的专家加起来可以超过 10B，那要靠专家并行来切）。“层数极深 (>100)” 也不是门槛，流水线常用在几十层的模型上，层数只决定最多能切几段：
#
# </div>
#
# <div lang="en">
#
# Tensor parallel holds the most activations, because each of its ranks sees all 16 rows, while a data parallel rank sees 4. The pipeline sends least, by an order of magnitude.
#
# The document's table, filled with what we measured, and with a column for data parallel:
#
# | | data parallel | tensor parallel | pipeline parallel |
# |---|---|---|---|
# | what is cut | data | inside a layer: every matrix | between layers: whole layers |
# | parameters per rank | all | about 1/t (norms, row biases repeated) | about 1/p |
# | traffic per step | once per bucket, $2\psi(N-1)/N$ numbers in all ($\psi$: number of parameters), grows with parameters | 4 times per layer, $8bsh(t-1)/t$, grows with data | $bsh$ per boundary and direction, the least |
# | hidden under compute? | yes | hardly, each is on the critical path | mostly |
# | bubble | none | none (but ranks stop all the same, for communication) | $(p-1)/m$ |
# | good for | a model that fits a card | large layers; inside a machine, on the fastest wires | many layers; may cross machines |
# | at most | rows of the batch | heads (and cards of a machine) | layers |
# | to implement | wrap it | rewrite the model's layers | leaves the model alone, needs a scheduler |
#
# Two figures of the document are orders of magnitude: "a single very large layer (>10B)" is about a whole **model** of more than some 10B; among dense models even the published GPT of 1T parameters has no layer of 8B (the experts of one MoE layer may come to more than 10B together; those are cut by expert parallelism). Nor is "very deep (>100 layers)" a threshold: pipelines are common for models of a few dozen layers, and the depth only limits into how many stages they can be cut:
#
# </div>

# %%
for name in ("llama-3.1-8b", "llama-3.1-70b", "gpt3-175b", "llama-3.1-405b", "gpt-1t"):
    shape = PRESETS[name]
    print(f"{name:>15}: {shape.layers:>3} layers of {shape.layer_parameters() / 1e9:.2f}B parameters")

# %% [markdown]
# ## 小结 | Summary

# %% [markdown]
# <div lang="zh">
#
# - 列并行：每卡一片**算完的**输出，通常不拼接；行并行：每卡一份**完整大小的部分和**，相加，bias 最后加一次。
# - 先列后行，中间不通信；f（反向求和）和 g（前向求和）缺一不可，缺了也不报错。
# - 每层 4 次 all-reduce，$8bsh(t-1)/t$，都在关键路径上：用节点内最快的互连。序列并行不多发字节，省下激活值。
# - 流水线调度就是一张动作表。气泡占理想时间的 $(p-1)/m$，即占总时间的 $(p-1)/(m+p-1)$，由阶段数和微批次数决定，与层数无关。
# - 1F1B 与 GPipe 气泡相同，在途从 m 个降到至多 p − rank 个；interleaved 用 v 倍消息换 1/v 的气泡；zero-bubble 把权重梯度挪进气泡。
# - 流水线的通信最少，适合跨节点；张量并行最多，适合节点内。
#
# **延伸阅读**：Shoeybi et al. 2019, *Megatron-LM*，第 3 节（f 和 g）；Narayanan et al. 2021, *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*，2.2（1F1B、interleaved）、2.3、3.2；Korthikanti et al. 2022, *Reducing Activation Recomputation*，4.2（序列并行）；Huang et al. 2019, *GPipe*，2.3；Qi et al. 2023, *Zero Bubble Pipeline Parallelism*。
#
# **练习**：`minidist check 3`。**下一章**：FSDP。
#
# </div>
#
# <div lang="en">
#
# - Column parallel: every card a slice of **finished** outputs, usually not joined. Row parallel: every card **full-size partial sums**, added up, the bias once at the end.
# - Column then row, nothing sent in between; f (sums backward) and g (sums forward) are both needed, and neither is missed with an error.
# - 4 all-reduces per layer, $8bsh(t-1)/t$, all on the critical path: use the fastest wires inside a machine. Sequence parallel sends no more and saves activations.
# - A pipeline schedule is a list of actions. Its bubble is $(p-1)/m$ of ideal time, $(p-1)/(m+p-1)$ of total time, and depends on stages and micro-batches, not on layers.
# - 1F1B has GPipe's bubble with at most p − rank in flight instead of m; interleaved buys 1/v of the bubble with v times the messages; zero-bubble moves weight gradients into it.
# - Pipelines send the least and may cross machines; tensor parallel sends the most and should not.
#
# **Further reading**: Shoeybi et al. 2019, *Megatron-LM*, section 3 (f and g); Narayanan et al. 2021, *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, 2.2 (1F1B, interleaved), 2.3, 3.2; Korthikanti et al. 2022, *Reducing Activation Recomputation*, 4.2 (sequence parallel); Huang et al. 2019, *GPipe*, 2.3; Qi et al. 2023, *Zero Bubble Pipeline Parallelism*.
#
# **Exercises**: `minidist check 3`. **Next**: FSDP.
#
# </div>
