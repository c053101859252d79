"""Set 6, combining: the classic wrong answers. `run6.py` runs them."""

from __future__ import annotations

from minidist.learn.checks import Exercise, wrong

_COORDINATES = "rank // (pp * tp), rank // tp % pp, rank % tp"
_FITS = "fits = 16 * parameters / (tp * pp) <= gpu_bytes"

EXERCISES = (
    Exercise("6.1", "coordinates", (
        wrong(
            "dp innermost",
            "顺序反了：你让 dp 变得最快。tp 通信最频繁，要放在最内层，才会落在同一台机器里。",
            "The order is reversed: you have dp vary fastest. tp communicates most and has to "
            "be innermost, so that it stays inside one machine.",
            (_COORDINATES, "rank % dp, rank // dp % pp, rank // (dp * pp)"),
        ),
        wrong(
            "pp innermost",
            "pp 变得最快了：最内层应是 tp。",
            "pp varies fastest: tp should be innermost.",
            (_COORDINATES, "rank // (pp * tp), rank % pp, rank // pp % tp"),
        ),
        wrong(
            "no wrap-around",
            "i_pp 没有取余：rank // tp 还要 % pp，否则会超出 pp。",
            "i_pp was not wrapped: rank // tp needs a % pp, or it exceeds pp.",
            ("rank // tp % pp", "rank // tp"),
        ),
        wrong(
            "order of the answer",
            "坐标算对了，但返回的顺序是 (i_tp, i_pp, i_dp)：要 (i_dp, i_pp, i_tp)。",
            "The coordinates are right, but in the order (i_tp, i_pp, i_dp): (i_dp, i_pp, i_tp) "
            "is asked for.",
            (_COORDINATES, "rank % tp, rank // tp % pp, rank // (pp * tp)"),
        ),
    ), world=1),
    Exercise("6.2", "groups_of", (
        wrong(
            "shared coordinate",
            "你把这一维坐标相同的 rank 放在了一组：正好反了，同一组里的 rank 是这一维不同、其余"
            "都相同。",
            "You grouped ranks with the same coordinate along this axis; it is the other way "
            "round: they differ in this one and share the others.",
            ("        del others[place]\n", "        others = others[place : place + 1]\n"),
        ),
        wrong(
            "contiguous for dp",
            "dp 的组不是连续的 rank：连续的是 tp 组。dp 组里的 rank 相隔 pp * tp。",
            "dp groups are not runs of ranks; those are the tp groups. In a dp group the ranks "
            "are pp * tp apart.",
            ('("dp", "pp", "tp").index(axis)', '("tp", "pp", "dp").index(axis)'),
        ),
        wrong(
            "only the first group",
            "少了别的组：这一维有几个组，就要返回几个。",
            "Groups are missing: return all of those along the axis.",
            ("    return list(found.values())", "    return list(found.values())[:1]"),
        ),
        wrong(
            "all in one",
            "所有 rank 都在一个组里了：另外两个坐标不同的 rank 要分开。",
            "All ranks are in one group: ranks whose other coordinates differ belong apart.",
            ("tuple(others), []", "(), []"),
        ),
    ), world=1),
    Exercise("6.3", "make_groups", (
        wrong(
            "only own groups",
            "只为自己的组调用了 new_group：它是集合操作，所有 rank 都要为每一个组、以同样的顺序"
            "调用，否则互相等待，或者把不同的组当成同一个。",
            "new_group was called for this rank's own groups only: it is collective, and every "
            "rank has to call it for every group in the same order, or ranks wait for each "
            "other, or take different groups for one.",
            ("            group = dist.new_group(ranks)\n            if dist.get_rank() in ranks:\n                own[axis] = group\n",
             "            if dist.get_rank() in ranks:\n                own[axis] = dist.new_group(ranks)\n"),
            story="deadlock.*waiting in new_group",
        ),
        wrong(
            "exchanged",
            "两个组反了：先返回 dp 组，再返回 tp 组。",
            "The two groups are exchanged: first the dp group, then the tp group.",
            ('own["dp"], own["tp"]', 'own["tp"], own["dp"]'),
        ),
        wrong(
            "last group",
            "返回的是最后建立的组，不是自己所在的组：只在自己属于 ranks 时记下来。",
            "The group made last was returned, not the one this rank is in: keep it only if "
            "this rank is among its ranks.",
            ("            if dist.get_rank() in ranks:\n                own[axis] = group\n", "            own[axis] = group\n"),
        ),
        wrong(
            "whole world",
            "两个组都是所有 rank：那样梯度会在切开的参数之间求平均。",
            "Both groups hold all ranks: gradients would be averaged across parameters that are "
            "cut.",
            ("            group = dist.new_group(ranks)\n", "            group = dist.group.WORLD\n"),
        ),
    ), world=4),
    Exercise("6.4", "global_norm", (
        wrong(
            "replicated counted n times",
            "复制的参数算了 n 次：每个 rank 都有一份，只能算一份。只对 sharded 的平方和做 "
            "all_reduce。",
            "What is replicated was counted n times: every rank has a copy of it, and it counts "
            "once. all_reduce the squares of sharded only.",
            ("    total = torch.stack([t.pow(2).sum() for t in sharded]).sum()\n", "    total = torch.stack([t.pow(2).sum() for t in [*sharded, *replicated]]).sum()\n"),
            ("    total = total + torch.stack([t.pow(2).sum() for t in replicated]).sum()\n", ""),
        ),
        wrong(
            "local",
            "没有通信：切开的参数只算了自己的那份，各 rank 的范数不同，裁剪的倍数也就不同。",
            "Nothing was communicated: of the cut parameters only this rank's share was "
            "counted, so norms differ from rank to rank, and so would the clipping.",
            ("    dist.all_reduce(total, group=tp_group)\n", ""),
        ),
        wrong(
            "norms added",
            "各 rank 的范数直接相加了：能相加的是平方。",
            "The ranks' norms were added: it is the squares that add.",
            ("    dist.all_reduce(total, group=tp_group)\n", "    total = total.sqrt()\n    dist.all_reduce(total, group=tp_group)\n    total = total.pow(2)\n"),
        ),
        wrong(
            "replicated forgotten",
            "漏了复制的参数：它们也是模型的一部分，算一次。",
            "What is replicated is missing: it is part of the model too, and counts once.",
            ("    total = total + torch.stack([t.pow(2).sum() for t in replicated]).sum()\n", ""),
        ),
        wrong(
            "no root",
            "返回的是平方和：最后还要开方。",
            "This is the sum of squares: take the root at the end.",
            ("    return total.sqrt()", "    return total"),
        ),
    )),
    Exercise("6.5", "train_2d", (
        wrong(
            "rows by rank",
            "行是按 tp 坐标（或 rank 的奇偶）分的：同一个 tp 组里的 rank 各算一部分特征，必须用"
            "同样的行。按 dp 坐标分。",
            "Rows were shared by the tp coordinate (or by odd and even ranks): the ranks of a "
            "tp group each compute a part of the features and need the same rows. Share them by "
            "the dp coordinate.",
            ("    i_dp, _, _ = coordinates", "    _, _, i_dp = coordinates"),
        ),
        wrong(
            "averaged over everything",
            "梯度在所有 rank 上求了平均：切开的权重在 tp 组里是不同的参数，混在一起就错了。只在 "
            "dp_group 里平均。",
            "Gradients were averaged over all ranks: in a tp group cut weights are different "
            "parameters, and mixing them is wrong. Average in dp_group only.",
            ("            dist.all_reduce(p.grad, group=dp_group)\n            p.grad /= 2\n", "            dist.all_reduce(p.grad)\n            p.grad /= 4\n"),
        ),
        wrong(
            "averaged in the tp group",
            "梯度在 tp 组里求了平均：那里是不同的参数，要在 dp 组里。",
            "Gradients were averaged in the tp group, where the parameters are different ones: "
            "average in the dp group.",
            ("            dist.all_reduce(p.grad, group=dp_group)\n", "            dist.all_reduce(p.grad, group=tp_group)\n"),
        ),
        wrong(
            "not averaged",
            "梯度没有在 dp 组里求平均：两个副本各走各的。",
            "Gradients were not averaged in the dp group: the two copies drift apart.",
            ("            dist.all_reduce(p.grad, group=dp_group)\n            p.grad /= 2\n", "            pass\n"),
        ),
        wrong(
            "sum",
            "用的是梯度之和：在 dp 组里求和之后还要除以 2。",
            "The sum of the gradients was used: divide by 2 after summing in the dp group.",
            ("            p.grad /= 2\n", ""),
        ),
        wrong(
            "whole batch everywhere",
            "损失对了，但每个 rank 都算了整个 batch：数据并行就没有分担任何工作。",
            "The losses are right, but every rank computed the whole batch: data parallelism "
            "shares no work.",
            ("inputs.chunk(2)[i_dp], targets.chunk(2)[i_dp]", "inputs, targets"),
        ),
        wrong(
            "local loss",
            "返回的是自己那份数据的损失：全局损失是 dp 组里的平均。",
            "This is the loss of your own rows: the global loss is the mean over the dp group.",
            ("        dist.all_reduce(total, group=dp_group)\n        losses.append(total.item() / 2)", "        losses.append(total.item())"),
        ),
    ), world=4, seconds=30.0),
    Exercise("6.6", "layout", (
        wrong(
            "tensor parallel across machines",
            "tp 超过了一台机器的卡数：每层都要 all-reduce，跨机器的带宽撑不住。最多 "
            "gpus_per_node。",
            "tp exceeds the GPUs of one machine: it all-reduces in every layer, which links "
            "between machines cannot carry. At most gpus_per_node.",
            (" and tp < gpus_per_node", ""),
        ),
        wrong(
            "parameters only",
            "只算了参数的 2 字节：训练状态是每个参数 16 字节。",
            "Only the 2 bytes of the parameters were counted: the training state takes 16 bytes "
            "per parameter.",
            ("    while 16 * parameters / tp", "    while 2 * parameters / tp"), (_FITS, "fits = 2 * parameters / (tp * pp) <= gpu_bytes"),
        ),
        wrong(
            "layers cut",
            "pp 不能整除 layers：各阶段的层数不一样，最慢的一个会拖住所有的。",
            "pp does not divide layers: stages get different numbers of layers, and the slowest "
            "holds up the rest.",
            (" and layers % pp == 0", ""),
        ),
        wrong(
            "GPUs left over",
            "tp * pp 不能整除 gpus：有的卡用不上。",
            "tp * pp does not divide gpus: some of them are left over.",
            (" and gpus % (tp * pp) == 0", ""),
        ),
        wrong(
            "pipeline first",
            "先用了流水线，再用张量并行：规则是先在机器里用 tp，不够再加 pp。",
            "Pipeline came before tensor parallelism: the rule is tp inside the machine first, "
            "and pp only when that is not enough.",
            ("    while 16 * parameters / tp > gpu_bytes and tp < gpus_per_node:\n        tp *= 2\n", ""),
        ),
        wrong(
            "strictly less",
            "刚好等于 gpu_bytes 也放得下：规则是“不超过”。",
            "Exactly gpu_bytes fits as well: the rule says not more than.",
            ("16 * parameters / tp > gpu_bytes", "16 * parameters / tp >= gpu_bytes"), ("(tp * pp) <= gpu_bytes", "(tp * pp) < gpu_bytes"),
        ),
        wrong(
            "order of the answer",
            "返回的顺序是 (tp, pp, dp)：要 (dp, pp, tp)。",
            "The order is (tp, pp, dp): (dp, pp, tp) is asked for.",
            ("return gpus // (tp * pp), pp, tp", "return tp, pp, gpus // (tp * pp)"),
        ),
    ), world=1),
)  # fmt: skip
