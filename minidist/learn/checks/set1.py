"""Set 1, choosing: the classic wrong answers. `run1.py` runs them."""

from __future__ import annotations

from minidist.learn.checks import Exercise, wrong

_FSDP = "    if state_bytes / gpus + layer_bytes <= gpu_bytes:"

EXERCISES = (
    Exercise("1.1", "gpt_parameters", (
        wrong(
            "no biases",
            "漏了 bias：每层的四个线性层共有 3w + w + 4w + w = 9w 个偏置。",
            "The biases are missing: the four linears of a layer have 3w + w + 4w + w = 9w of "
            "them.",
            ("12 * width * width + 13 * width", "12 * width * width + 4 * width"),
        ),
        wrong(
            "no norms",
            "漏了 LayerNorm：每层有两个，各有 weight 和 bias，共 4w。",
            "The LayerNorms are missing: two per layer, each with a weight and a bias, 4w in all.",
            ("12 * width * width + 13 * width", "12 * width * width + 9 * width"),
        ),
        wrong(
            "the rule of thumb",
            "12 * width² 是大模型的估算；这里要精确的数，每层还有 13 * width 个偏置和归一化参数。",
            "12 * width² is the estimate for large models; exactly, a layer has 13 * width "
            "biases and norm parameters more.",
            (" + 13 * width", ""),
        ),
        wrong(
            "tied output",
            "漏了输出层：这里的输出层和词嵌入不是同一个矩阵，要再算一个 vocab × width。",
            "The output layer is missing: it is not the embedding matrix here, so there is "
            "another vocab × width.",
            ("head = 2 * width + vocab * width", "head = 2 * width"),
        ),
        wrong(
            "no positions",
            "漏了位置嵌入：seq × width。",
            "The position embedding is missing: seq × width.",
            ("vocab * width + seq * width", "vocab * width"),
        ),
        wrong(
            "no last norm",
            "漏了最后一个 LayerNorm：2 * width。",
            "The last LayerNorm is missing: 2 * width.",
            ("head = 2 * width + vocab * width", "head = vocab * width"),
        ),
    ), world=1),
    Exercise("1.2", "training_bytes", (
        wrong(
            "no master copy",
            "混合精度漏了 32 位的主副本：优化器要为每个参数另存 4 字节，否则小的更新会被舍入掉。",
            "Mixed precision lacks the 32-bit master copy: the optimizer keeps 4 more bytes per "
            "parameter, or small updates would round away.",
            (' + (precision == "mixed")', ""),
        ),
        wrong(
            "master copy always",
            "fp32 不需要主副本：参数本身就是 32 位的。",
            "fp32 needs no master copy: the parameters are 32-bit themselves.",
            ('(precision == "mixed")', "1"),
        ),
        wrong(
            "16-bit states",
            "优化器状态是 32 位的，各 4 字节，混合精度时也一样。",
            "Optimizer states are 32-bit, 4 bytes each, in mixed precision as well.",
            ('"optimizer": 4 * copies', '"optimizer": width * copies'),
        ),
        wrong(
            "one state for Adam",
            "Adam 有两个状态：动量和方差。",
            "Adam has two states: momentum and variance.",
            ('"adam": 2}', '"adam": 1}'),
        ),
        wrong(
            "32-bit gradients",
            "混合精度里梯度也是 16 位的，2 字节。",
            "In mixed precision gradients are 16-bit too, 2 bytes.",
            ('"gradients": width * parameters', '"gradients": 4 * parameters'),
        ),
    ), world=1),
    Exercise("1.3", "choose", (
        wrong(
            "layer forgotten",
            "平分之后还要加上完整的一层：FSDP 用到一层时要把它整个收集起来，那时的内存才是最高的。",
            "An equal share is not all: FSDP gathers a whole layer when it is needed, and that "
            "is when memory is highest.",
            (_FSDP, "    if state_bytes / gpus <= gpu_bytes:"),
        ),
        wrong(
            "not divided",
            "FSDP 把训练状态平分到所有卡上：要除以 gpus。",
            "FSDP divides the training state among all GPUs: divide by gpus.",
            (_FSDP, "    if state_bytes + layer_bytes <= gpu_bytes:"),
        ),
        wrong(
            "strictly less",
            "“不超过”就算放得下：刚好相等时也放得下，用 <=。",
            "It fits when it is not more: exactly equal fits as well, so <=.",
            ("    if state_bytes <= gpu_bytes:", "    if state_bytes < gpu_bytes:"),
        ),
        wrong(
            "huge layer too late",
            "顺序不对：一层就放不下时，不能只靠卸载或多加卡，要先检查 layer_bytes。",
            "The wrong order: when one layer alone does not fit, neither offload nor more GPUs "
            "help, so test layer_bytes first.",
            ('    if layer_bytes > gpu_bytes:\n        return "fsdp+tp"\n', ""),
        ),
        wrong(
            "always sharded",
            "放得进一张卡时不需要切分：DDP 的通信最少，也最简单。",
            "What fits on one GPU needs no sharding: DDP communicates least and is simplest.",
            ('        return "ddp"', '        return "fsdp"'),
        ),
        wrong(
            "share on one card",
            "DDP 的每张卡都存着完整的训练状态：不能用所有卡的总内存来判断。",
            "With DDP every GPU holds the whole training state: do not compare with the memory "
            "of all GPUs together.",
            ("    if state_bytes <= gpu_bytes:", "    if state_bytes <= gpu_bytes * gpus:"),
        ),
    ), world=1),
    Exercise("1.4", "train_and_measure", (
        wrong(
            "strategy ignored",
            "损失对了，但优化器状态没有变小：策略没有传给 md.shard。",
            "The losses are right, but the optimizer's state has not shrunk: the strategy was "
            "not passed to md.shard.",
            ("torch.optim.AdamW, strategy, lr=lr", 'torch.optim.AdamW, "ddp", lr=lr'),
        ),
        wrong(
            "same rows",
            "每个 rank 都用了第 0 份数据：按自己的 rank 取。",
            "Every rank used share 0 of the data: take your own.",
            ("inputs.chunk(n)[rank]", "inputs.chunk(n)[0]"), ("targets.chunk(n)[rank]", "targets.chunk(n)[0]"),
        ),
        wrong(
            "gradients kept",
            "每一步之后没有清空梯度：optimizer.zero_grad()。",
            "The gradients were not cleared after a step: optimizer.zero_grad().",
            ("        optimizer.zero_grad()\n", ""),
        ),
        wrong(
            "local loss",
            "返回的是本 rank 的损失：各 rank 的平均才是全局损失。",
            "These are this rank's own losses: the global loss is the mean over the ranks.",
            ("    dist.all_reduce(total)\n    return (total / n)", "    return (total)"),
        ),
        wrong(
            "sum of losses",
            "损失是各 rank 之和：还要除以 rank 的个数。",
            "The losses are sums over the ranks: divide by their number.",
            ("(total / n).tolist()", "total.tolist()"),
        ),
        wrong(
            "another kind",
            "返回的是参数的字节数：要的是 m.memory.current[\"optimizer\"]。",
            "What is returned are the bytes of the parameters: m.memory.current[\"optimizer\"] "
            "is asked for.",
            ('m.memory.current["optimizer"]', 'm.memory.current["parameters"]'),
        ),
    ), seconds=30.0),
)  # fmt: skip
