"""Tensor parallel: one layer's matrix is cut over the ranks, and every rank works on all the data.

    column parallel   Y = X A, A cut by output features: each rank computes a *slice* of Y
    row parallel      Y = X A, A cut by input features: each rank computes a full-size *partial sum*

        X ──f──[ A1 | A2 ]── gelu ──[ B1 / B2 ]──g── Y        (Megatron's MLP)

The slices of the first layer are just the inputs that the second needs, so nothing is gathered in
between; only the partial sums meet, in one all-reduce. `f` is the identity forward and an
all-reduce backward (each rank knows only its part of dL/dX), `g` is the reverse. Document 3.1 says
that row parallel ranks "compute a part of the hidden state": they compute all of it, but only a
part of each number, and the parts are added. It also says column outputs are concatenated: usually
they are not.

nn.Linear stores A transposed ([out, in]), so column parallel cuts dimension 0 of `weight` and row
parallel dimension 1.

With sequence parallel the parts outside of the two matrices (norms, dropout, residual) work on a
slice of the tokens: f becomes an all-gather and g a reduce-scatter over tokens, the same bytes as
the all-reduce they replace, and activations outside shrink by N.

Chapter 3.1; Shoeybi et al. 2019 section 3; Narayanan et al. 2021 section 2.3; Korthikanti et al.
2022 section 4.2.2.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from minidist.comm import collectives as coll
from minidist.comm.mesh import resolve_group
from minidist.parallel.autograd import (
    TOKENS,
    copy_to_ranks,
    gather_slices,
    join_slices,
    keep_slice,
    start_gather,
    start_sum_scatter,
    sum_over_ranks,
    sum_slices,
    summed,
)
from minidist.parallel.cut import Cut, cut_rows, join_cut, shard_parameter, take_cut
from minidist.parallel.vocab import VocabParallelEmbedding, vocab_parallel_cross_entropy

__all__ = [
    "ColumnParallelLinear", "Cut", "RowParallelLinear", "VocabParallelEmbedding", "copy_to_ranks",
    "gather_slices", "join_cut", "join_slices", "keep_slice", "sum_over_ranks", "sum_slices",
    "take_cut", "tensor_parallel", "tp_rng", "vocab_parallel_cross_entropy",
]  # fmt: skip


class _ColumnLinear(torch.autograd.Function):
    """x A^T + b with f (or the gather of tokens) inside, so that the sum over ranks of dL/dX
    travels while dL/dA is computed."""

    @staticmethod
    def forward(ctx, x, weight, bias, pg, sequence_parallel):
        ctx.save_for_backward(x, weight)
        ctx.pg, ctx.sequence_parallel, ctx.has_bias = pg, sequence_parallel, bias is not None
        # Only the slice is kept for backward: gathering twice costs traffic, keeping all costs
        # memory.
        whole = start_gather(x, TOKENS, pg).wait() if sequence_parallel else x
        return F.linear(whole, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        gathering = (
            start_gather(x, TOKENS, ctx.pg) if ctx.sequence_parallel and need_weight else None
        )
        grad_x = grad_weight = grad_bias = work = None
        if need_x:
            grad_x = grad @ weight.to(grad.dtype)
            if ctx.sequence_parallel:
                work = start_sum_scatter(grad_x, TOKENS, ctx.pg)
            else:
                work = coll.all_reduce(grad_x, group=ctx.pg, async_op=True, by="tp f backward")
        if need_weight:
            whole = gathering.wait() if gathering else x
            rows, columns = grad.flatten(0, -2), whole.flatten(0, -2).to(grad.dtype)
            grad_weight = (rows.t() @ columns).to(weight.dtype)
        if ctx.has_bias and need_bias:
            grad_bias = grad.flatten(0, -2).sum(0).to(weight.dtype)
        return (work.wait() if work else None), grad_weight, grad_bias, None, None


class ColumnParallelLinear(nn.Module):
    """nn.Linear cut by output features: [..., in] -> this rank's slice [..., out / N].

    `gather_output=True`: every rank gets the whole output (an all-gather that the usual pair of
    column and row does not need). `sequence_parallel=True`: the input is this rank's slice of the
    tokens. Starts with exactly the values that nn.Linear(in_features, out_features) would draw
    here, whatever N. Raises ValueError if N does not divide `out_features`.
    """

    def __init__(self, in_features, out_features, bias=True, *, gather_output=False,
                 sequence_parallel=False, group=None, device=None, dtype=None):  # fmt: skip
        super().__init__()
        full = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self._cut(full, resolve_group(group), 1, gather_output, sequence_parallel)

    @classmethod
    def from_module(cls, full_layer: nn.Linear, group=None, *, parts: int = 1, gather_output=False,
                    sequence_parallel=False) -> ColumnParallelLinear:  # fmt: skip
        """Cut an existing nn.Linear. `parts=3`: the output is three tensors side by side (q, k,
        v), and each is cut on its own, so that a rank gets matching heads of all three."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._cut(full_layer, resolve_group(group), parts, gather_output, sequence_parallel)
        return layer

    def _cut(self, full: nn.Linear, pg, parts: int, gather_output: bool, sequence_parallel: bool):
        if full.out_features % (parts * pg.size()):
            raise ValueError(
                f"ColumnParallelLinear: out_features={full.out_features} in {parts} part(s) cannot "
                f"be cut over {pg.size()} ranks: choose a multiple of {parts * pg.size()}"
            )
        self.group, self.parts = pg, parts
        self.in_features, self.out_features = full.in_features, full.out_features
        self.gather_output, self.sequence_parallel = gather_output, sequence_parallel
        self.weight = shard_parameter(cut_rows(full.weight, parts, pg), full.weight, parts=parts)
        self.bias = None
        if full.bias is not None:
            self.bias = shard_parameter(cut_rows(full.bias, parts, pg), full.bias, parts=parts)

    def forward(self, x: Tensor) -> Tensor:
        y = _ColumnLinear.apply(x, self.weight, self.bias, self.group, self.sequence_parallel)
        return join_slices(y, -1, self.group) if self.gather_output else y


class RowParallelLinear(nn.Module):
    """nn.Linear cut by input features: this rank's slice [..., in / N] -> the whole output [...,
    out].

    Each rank's product is a full-size partial sum; they are added over the ranks, and the bias is
    added once, after that. `input_is_parallel=False`: the input is whole and cut here.
    `sequence_parallel=True`: the output is this rank's slice of the tokens (reduce-scatter instead
    of all-reduce). Starts with exactly the values that nn.Linear(in_features, out_features) would
    draw here, whatever N. Raises ValueError if N does not divide `in_features`.
    """

    def __init__(self, in_features, out_features, bias=True, *, input_is_parallel=True,
                 sequence_parallel=False, group=None, device=None, dtype=None):  # fmt: skip
        super().__init__()
        full = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self._cut(full, resolve_group(group), input_is_parallel, sequence_parallel)

    @classmethod
    def from_module(cls, full_layer: nn.Linear, group=None, *, input_is_parallel=True,
                    sequence_parallel=False) -> RowParallelLinear:  # fmt: skip
        """Cut an existing nn.Linear."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._cut(full_layer, resolve_group(group), input_is_parallel, sequence_parallel)
        return layer

    def _cut(self, full: nn.Linear, pg, input_is_parallel: bool, sequence_parallel: bool):
        if full.in_features % pg.size():
            raise ValueError(
                f"RowParallelLinear: in_features={full.in_features} cannot be cut over {pg.size()} "
                f"ranks: choose a multiple of {pg.size()}"
            )
        self.group = pg
        self.in_features, self.out_features = full.in_features, full.out_features
        self.input_is_parallel, self.sequence_parallel = input_is_parallel, sequence_parallel
        own = full.weight.detach().chunk(pg.size(), 1)[pg.rank()].clone()
        self.weight = shard_parameter(own, full.weight, dim=1)
        self.bias = None
        if full.bias is not None:
            self.bias = nn.Parameter(full.bias.detach().clone(), full.bias.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        if not self.input_is_parallel:
            x = keep_slice(x, -1, self.group)
        partial = F.linear(x, self.weight)
        if not self.sequence_parallel:
            y = sum_over_ranks(partial, self.group)
            return y if self.bias is None else y + self.bias
        y = sum_slices(partial, TOKENS, self.group)
        # Each rank adds the bias to its own tokens only: the gradient must be summed over the
        # ranks.
        return y if self.bias is None else y + copy_to_ranks(self.bias, self.group)


# --- dropout and whole models -------------------------------------------------------------------


@contextmanager
def tp_rng(group=None):
    """Random numbers that differ between the ranks of the group: for dropout on *sharded*
    activations.

    Outside, the ranks' streams are the same (replicated activations must be dropped alike).
    Inside, this rank uses a stream seeded with one number of the common stream and its rank.
    Nothing is kept between calls, so activation checkpointing, which rewinds the common stream,
    gets the same masks again.
    """
    pg = resolve_group(group)
    seed = int(torch.randint(2**31, ()))
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed + 0x9E3779B1 * (pg.rank() + 1))
        yield


def _in_tp_rng(module: nn.Module, pg) -> None:
    plain = module.forward

    def forward(*args, **kwargs):
        with tp_rng(pg):
            return plain(*args, **kwargs)

    module.forward = forward


def _sum_gradients(parameters, pg) -> None:
    """Parameters that work on sharded tokens: each rank sees its tokens only, the gradient is the
    sum."""
    for parameter in parameters:
        parameter.register_hook(lambda grad: summed(grad, pg, "tp norm gradient"))


def tensor_parallel(model: nn.Module, group=None, *, sequence_parallel: bool = False) -> nn.Module:
    """Cut the built-in GPT over the group, in place, and return it.

    Attention by heads (column qkv, row proj), the MLP by hidden features (column up, row down),
    the token table and the output matrix by vocabulary. Logits come out cut by classes: use
    `vocab_parallel_cross_entropy(..., vocab_size=config.vocab)`. Four all-reduces per block and
    step, two forward, two backward. `sequence_parallel=True`: between the layers each rank holds
    1/N of the tokens. Raises ValueError, before anything changes, if N does not divide the heads
    or the hidden width, if the model is already cut, or if it is not a whole GPT.
    """
    missing = [name for name in ("config", "embed", "blocks", "head") if not hasattr(model, name)]
    if missing:
        raise ValueError(
            f"tensor_parallel cuts a whole GPT, and this {type(model).__name__} has no "
            f"{', '.join(missing)}: cut it before md.split and before it is wrapped; another "
            "model's layers are cut by ColumnParallelLinear.from_module and RowParallelLinear"
            ".from_module"
        )
    if isinstance(model.embed.token, VocabParallelEmbedding):
        raise ValueError("tensor_parallel: this model is already cut; call it once")
    pg, config = resolve_group(group), model.config
    if config.heads % pg.size():
        raise ValueError(
            f"tensor_parallel: {config.heads} heads cannot be cut over {pg.size()} ranks: "
            "a rank holds whole heads"
        )
    sp = {"sequence_parallel": sequence_parallel}
    tied = model.head.lm.weight is model.embed.token.weight
    model.embed.token = VocabParallelEmbedding.from_module(model.embed.token, pg)
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        attention.qkv = ColumnParallelLinear.from_module(attention.qkv, pg, parts=3, **sp)
        attention.proj = RowParallelLinear.from_module(attention.proj, pg, **sp)
        mlp.up = ColumnParallelLinear.from_module(mlp.up, pg, **sp)
        mlp.down = RowParallelLinear.from_module(mlp.down, pg, **sp)
        if config.dropout:
            _in_tp_rng(block if sequence_parallel else attention, pg)
        if sequence_parallel:
            _sum_gradients([*block.norm1.parameters(), *block.norm2.parameters()], pg)
    model.head.lm = ColumnParallelLinear.from_module(_padded_rows(model.head.lm, pg), pg, **sp)
    model.head.lm.weight.tp_cut = Cut(0, 1, config.vocab)
    if tied:
        model.head.lm.weight = model.embed.token.weight
    if sequence_parallel:
        _sum_gradients(model.head.norm.parameters(), pg)
        model.embed.register_forward_hook(lambda module, args, x: keep_slice(x, TOKENS, pg))
    return model


def _padded_rows(lm: nn.Linear, pg) -> nn.Linear:
    missing = -lm.out_features % pg.size()
    if not missing:
        return lm
    padded = nn.Linear(lm.in_features, lm.out_features + missing, bias=False, device="meta")
    padded.weight = nn.Parameter(F.pad(lm.weight.detach(), (0, 0, 0, missing)))
    return padded
