"""第 1 组：选型 | Set 1: choosing

动手并行之前先算一算：模型要占多少内存，放不放得下，该用哪种并行。字节数一律用 float 或 int，不
取整。
先运行 minidist start-exercises my-exercises，在那个文件夹里写。
检查：minidist check 1.1 --src my-exercises（全组：check 1）。

Before making anything parallel, do the arithmetic: how much memory does the model take, does it
fit, and which paradigm follows. Bytes are float or int, and are not rounded.
Run minidist start-exercises my-exercises first, and write in that folder.
To check: minidist check 1.1 --src my-exercises (the set: check 1).
"""

import torch
import torch.distributed as dist

import minidist as md


def gpt_parameters(vocab, seq, width, layers):
    """1.1 模型有多少参数 | How many parameters (10 min)

    数一数这个课程的 GPT 有多少个参数：
    - 词嵌入 vocab × width，位置嵌入 seq × width；
    - 每一层（共 layers 层）：注意力的 qkv 是 width -> 3 * width，proj 是 width -> width；MLP
      的 up 是 width -> 4 * width，down 是 4 * width -> width；这四个线性层都有 bias；还有两个
      LayerNorm，各有 weight 和 bias，长度 width；
    - 最后一个 LayerNorm，以及输出层 width -> vocab，没有 bias。
    提示：大模型里，每层约 12 * width²，其余都可以忽略；这里要精确的数。

    Count the parameters of the GPT of this course:
    - token embedding vocab × width, position embedding seq × width;
    - each of the layers: in attention qkv, width -> 3 * width, and proj, width -> width; in the MLP
      up, width -> 4 * width, and down, 4 * width -> width; all four linears have a bias; and two
      LayerNorms, each with a weight and a bias of length width;
    - a last LayerNorm, and the output layer width -> vocab without bias.
    Hint: in large models a layer has about 12 * width², and the rest hardly matters; here the exact
    number is wanted.
    """
    # BEGIN HINT 1.1
    # 一层：(3w² + 3w) + (w² + w) + (4w² + 4w) + (4w² + w) + 2 · 2w = 12w² + 13w。
    #
    # One layer: (3w² + 3w) + (w² + w) + (4w² + 4w) + (4w² + w) + 2 · 2w = 12w² + 13w.
    # END HINT
    # BEGIN SOLUTION 1.1
    embedding = vocab * width + seq * width
    layer = 12 * width * width + 13 * width
    head = 2 * width + vocab * width
    return embedding + layers * layer + head
    # END SOLUTION


def training_bytes(parameters, precision, optimizer):
    """1.2 训练要多少内存 | How much memory training takes (10 min)

    返回训练状态的字节数 {"parameters": ..., "gradients": ..., "optimizer": ...}（激活值另算）。
    precision 是 "fp32"（参数和梯度各 4 字节）或 "mixed"（各 2 字节，但优化器要为每个参数另存一
    份 4 字节的 32 位主副本）。optimizer 是 "sgd"（没有别的状态）、"momentum"（每个参数一个 4
    字节的动量）或 "adam"（动量和方差，各 4 字节）。
    提示：混合精度的 Adam 是有名的每参数 16 字节。

    Return the bytes of the training state, {"parameters": ..., "gradients": ..., "optimizer": ...}
    (activations come on top). precision is "fp32" (4 bytes for a parameter and 4 for its gradient)
    or "mixed" (2 each, but the optimizer keeps a 32-bit master copy, 4 bytes per parameter).
    optimizer is "sgd" (no further state), "momentum" (one momentum per parameter, 4 bytes) or
    "adam" (momentum and variance, 4 bytes each).
    Hint: Adam in mixed precision is the famous 16
    bytes per parameter.
    """
    # BEGIN HINT 1.2
    # states = {"sgd": 0, "momentum": 1, "adam": 2}[optimizer]；mixed 再加 1 份主副本；每份 4
    # 字节。
    #
    # states = {"sgd": 0, "momentum": 1, "adam": 2}[optimizer]; mixed adds the master copy as one
    # more; 4 bytes each.
    # END HINT
    # BEGIN SOLUTION 1.2
    width = {"fp32": 4, "mixed": 2}[precision]
    copies = {"sgd": 0, "momentum": 1, "adam": 2}[optimizer] + (precision == "mixed")
    return {
        "parameters": width * parameters,
        "gradients": width * parameters,
        "optimizer": 4 * copies * parameters,
    }
    # END SOLUTION


def choose(state_bytes, layer_bytes, gpu_bytes, gpus):
    """1.3 该用哪种并行 | Which paradigm (10 min)

    文档的决策树，写成函数。state_bytes：训练状态（参数、梯度、优化器）的字节数；layer_bytes：
    最大的一层的参数的字节数（FSDP 用到它时要完整地收集起来）；gpu_bytes：一张卡的内存；gpus：
    卡数。依次判断，“不超过”就算放得下：
    - 训练状态放得进一张卡："ddp"；
    - 最大的一层连一张卡都放不下："fsdp+tp"；
    - 训练状态平分到所有卡上以后，再加上完整的一层，放得下："fsdp"；
    - 否则："fsdp+offload"。
    提示：判断的顺序就是上面的顺序。

    The document's decision tree as a function. state_bytes: bytes of the training state
    (parameters, gradients, optimizer); layer_bytes: bytes of the parameters of the largest layer
    (FSDP gathers it whole when it is needed); gpu_bytes: memory of one GPU; gpus: how many. Decide
    in this order, where "fits" means not more than:
    - the training state fits on one GPU: "ddp";
    - the largest layer does not fit on one GPU: "fsdp+tp";
    - an equal share of the training state, plus one whole layer, fits: "fsdp";
    - otherwise: "fsdp+offload".
    Hint: test in the order of the list.
    """
    # BEGIN HINT 1.3
    # 第三条：state_bytes / gpus + layer_bytes <= gpu_bytes。
    #
    # The third: state_bytes / gpus + layer_bytes <= gpu_bytes.
    # END HINT
    # BEGIN SOLUTION 1.3
    if state_bytes <= gpu_bytes:
        return "ddp"
    if layer_bytes > gpu_bytes:
        return "fsdp+tp"
    if state_bytes / gpus + layer_bytes <= gpu_bytes:
        return "fsdp"
    return "fsdp+offload"
    # END SOLUTION


def train_and_measure(model, batches, strategy, lr):
    """1.4 训练 GPT，换一个词就换策略 | Train the GPT; one word changes the strategy (20 min)

    用 minidist 训练，并量出优化器状态占多少字节。
    - model, optimizer = md.shard(model, torch.optim.AdamW, strategy, lr=lr)：strategy 是 "ddp"、
      "zero1"、"zero2" 或 "zero3"，之后的训练循环都一样。
    - batches[i] 是第 i 步的 (inputs, targets)，是全局 batch，每个 rank 都拿到全部；自己取第
      rank 份连续的行。
    - 损失是 md.loss_fn(model(x), y)；每一步之后清空梯度。
    - 最后一步放在 with md.measure(model, optimizer) as m: 里，之后
      m.memory.current["optimizer"] 是这个 rank 上优化器状态的字节数。返回 (losses, 字节数)：
      losses 是每一步的全局损失（各 rank 损失的平均值，float 的列表）。四种策略的损失应当相同，内
      存却不同。
    提示：平均损失用 dist.all_reduce，放在 measure 的外面。

    Train with minidist, and measure how many bytes the optimizer's state takes.
    - model, optimizer = md.shard(model, torch.optim.AdamW, strategy, lr=lr): strategy is "ddp",
      "zero1", "zero2" or "zero3"; the training loop after it is always the same.
    - batches[i] is (inputs, targets) of step i, the global batch, whole on every rank; take the
      rank-th of world_size equal runs of rows.
    - the loss is md.loss_fn(model(x), y); clear the gradients after every step.
    - put the last step inside with md.measure(model, optimizer) as m:; afterwards
      m.memory.current["optimizer"] is the number of bytes of optimizer state on this rank. Return
      (losses, bytes): losses is the global loss of every step (the mean of the ranks' losses, a
      list of float). All four strategies give the same losses with different memory.
    Hint: average
      the loss with dist.all_reduce, outside of measure.
    """
    # BEGIN HINT 1.4
    # 把一步写成内部函数 step(x, y)，返回损失；循环里前面的步直接调用，最后一步在 with 里调用。
    #
    # Write one step as an inner function step(x, y) that returns the loss; call it as it is for all
    # steps but the last, and inside the with for that one.
    # END HINT
    # BEGIN SOLUTION 1.4
    rank, n = dist.get_rank(), dist.get_world_size()
    model, optimizer = md.shard(model, torch.optim.AdamW, strategy, lr=lr)

    def step(inputs, targets):
        loss = md.loss_fn(model(inputs.chunk(n)[rank]), targets.chunk(n)[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = [step(*batch) for batch in batches[:-1]]
    with md.measure(model, optimizer) as m:
        losses.append(step(*batches[-1]))
    total = torch.stack(losses)
    dist.all_reduce(total)
    return (total / n).tolist(), m.memory.current["optimizer"]
    # END SOLUTION
