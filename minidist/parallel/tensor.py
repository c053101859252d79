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
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from minidist.comm import collectives as coll
from minidist.comm.mesh import resolve_group

# --- collectives that autograd can go through ----------------------------------------------------
#
#     name               forward                backward           where
#     copy_to_ranks  f   identity               sum                entry of a column cut
#     sum_over_ranks g   sum                    identity           exit of a row cut
#     gather_slices      all-gather along dim   reduce-scatter     entry, tokens are sharded; any loss
#                                                                  that every rank computes for itself
#     sum_slices         reduce-scatter         all-gather         exit, tokens are sharded
#     keep_slice         own slice              all-gather         from replicated to sharded
#     join_slices        all-gather             own slice          from sharded to replicated


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_op = backward
        return forward(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.backward_op(grad), None, None


def copy_to_ranks(x: Tensor, group=None) -> Tensor:
    """Megatron's f: x forward; the gradient is the sum of all ranks' gradients."""
    pg = resolve_group(group)
    return _Collective.apply(x, lambda t: t.view_as(t), lambda g: _sum(g, pg, "tp f backward"))


def sum_over_ranks(x: Tensor, group=None) -> Tensor:
    """Megatron's g: the sum of all ranks' x; the gradient passes unchanged to every rank's x."""
    pg = resolve_group(group)
    return _Collective.apply(x, lambda t: _sum(t, pg, "tp g forward"), lambda g: g)


def gather_slices(x: Tensor, dim: int, group=None) -> Tensor:
    """All ranks' x end to end along `dim`; the gradient is summed over ranks, and each keeps its
    slice.

    Right when every rank goes on with its own computation on the whole (a column cut, a contrastive
    loss). If data parallelism then averages gradients, the result is that of the mean of all
    losses.
    """
    pg = resolve_group(group)
    return _Collective.apply(
        x, lambda t: _gather(t, dim, pg).wait(), lambda g: _sum_scatter(g, dim, pg).wait()
    )


def sum_slices(x: Tensor, dim: int, group=None) -> Tensor:
    """This rank's slice along `dim` of the sum of all ranks' x; the gradient is gathered."""
    pg = resolve_group(group)
    return _Collective.apply(
        x, lambda t: _sum_scatter(t, dim, pg).wait(), lambda g: _gather(g, dim, pg).wait()
    )


def keep_slice(x: Tensor, dim: int, group=None) -> Tensor:
    """This rank's slice along `dim` of an x that is the same on all ranks; the gradient is
    gathered."""
    pg = resolve_group(group)
    return _Collective.apply(x, lambda t: _own(t, dim, pg), lambda g: _gather(g, dim, pg).wait())


def join_slices(x: Tensor, dim: int, group=None) -> Tensor:
    """All ranks' x end to end along `dim`, for a continuation that is the same on all ranks: its
    gradient is already whole on each of them, and every rank takes its slice."""
    pg = resolve_group(group)
    return _Collective.apply(x, lambda t: _gather(t, dim, pg).wait(), lambda g: _own(g, dim, pg))


class _Pending:
    """A collective along one dimension, under way: flat buffers outside, the right shape after
    wait()."""

    def __init__(self, work: coll.Work, shape: torch.Size, dim: int):
        self.work, self.shape, self.dim = work, shape, dim

    def wait(self) -> Tensor:
        return self.work.wait().view(self.shape).movedim(0, self.dim)


def _sum(x: Tensor, pg, by: str) -> Tensor:
    # A copy: the argument is autograd's, others may still read it.
    return coll.all_reduce(x.clone(memory_format=torch.contiguous_format), group=pg, by=by)


def _gather(x: Tensor, dim: int, pg) -> _Pending:
    rows = x.movedim(dim, 0).contiguous()
    full = rows.new_empty(rows.numel() * pg.size())
    shape = torch.Size((rows.shape[0] * pg.size(), *rows.shape[1:]))
    work = coll.all_gather(full, rows.view(-1), group=pg, async_op=True, by="tp gather")
    return _Pending(work, shape, dim)


def _sum_scatter(x: Tensor, dim: int, pg) -> _Pending:
    rows = x.movedim(dim, 0).contiguous()
    _check_divisible(f"dimension {dim} of {tuple(x.shape)}", rows.shape[0], pg)
    shard = rows.new_empty(rows.numel() // pg.size())
    shape = torch.Size((rows.shape[0] // pg.size(), *rows.shape[1:]))
    work = coll.reduce_scatter(shard, rows.view(-1), group=pg, async_op=True, by="tp sum-scatter")
    return _Pending(work, shape, dim)


def _own(x: Tensor, dim: int, pg) -> Tensor:
    _check_divisible(f"dimension {dim} of {tuple(x.shape)}", x.shape[dim], pg)
    return x.chunk(pg.size(), dim)[pg.rank()].contiguous()


def _check_divisible(what: str, size: int, pg) -> None:
    if size % pg.size():
        raise ValueError(f"{what} ({size}) cannot be cut into {pg.size()} equal parts")


# --- linear layers ------------------------------------------------------------------------------

TOKENS = -2  # activations are [..., tokens, features]; sequence parallel cuts the tokens


class _ColumnLinear(torch.autograd.Function):
    """x A^T + b with f (or the gather of tokens) inside, so that the sum over ranks of dL/dX
    travels while dL/dA is computed."""

    @staticmethod
    def forward(ctx, x, weight, bias, pg, sequence_parallel):
        ctx.save_for_backward(x, weight)
        ctx.pg, ctx.sequence_parallel, ctx.has_bias = pg, sequence_parallel, bias is not None
        # Only the slice is kept for backward: gathering twice costs traffic, keeping all costs
        # memory.
        whole = _gather(x, TOKENS, pg).wait() if sequence_parallel else x
        return F.linear(whole, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        gathering = _gather(x, TOKENS, ctx.pg) if ctx.sequence_parallel and need_weight else None
        grad_x = grad_weight = grad_bias = work = None
        if need_x:
            grad_x = grad @ weight.to(grad.dtype)
            if ctx.sequence_parallel:
                work = _sum_scatter(grad_x, TOKENS, ctx.pg)
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
                f"ColumnParallelLinear: out_features={full.out_features} in {parts} part(s) cannot be "
                f"cut over {pg.size()} ranks: choose a multiple of {parts * pg.size()}"
            )
        self.group, self.parts = pg, parts
        self.in_features, self.out_features = full.in_features, full.out_features
        self.gather_output, self.sequence_parallel = gather_output, sequence_parallel
        self.weight = _shard_parameter(_cut_rows(full.weight, parts, pg), full.weight, parts=parts)
        self.bias = None
        if full.bias is not None:
            self.bias = _shard_parameter(_cut_rows(full.bias, parts, pg), full.bias, parts=parts)

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
        self.weight = _shard_parameter(own, full.weight, dim=1)
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


def _cut_rows(full: Tensor, parts: int, pg) -> Tensor:
    """This rank's rows of each of `parts` equal blocks of rows."""
    blocks = full.detach().unflatten(0, (parts, pg.size(), -1))
    return blocks[:, pg.rank()].flatten(0, 1).clone()


class Cut(NamedTuple):
    """How a parameter was cut: along `dim`, as `parts` blocks side by side, of `size` true rows."""

    dim: int
    parts: int
    size: int


def _shard_parameter(shard: Tensor, full: nn.Parameter, dim: int = 0, parts: int = 1):
    parameter = nn.Parameter(shard, full.requires_grad)
    # Norms and checkpoints need to know: every rank's part counts, replicas count once.
    parameter.tp_cut = Cut(dim, parts, full.shape[dim])
    return parameter


def join_cut(shard: Tensor, cut: Cut, group=None) -> Tensor:
    """The whole tensor on every rank from the ranks' shards (collective)."""
    pg = resolve_group(group)
    whole = _gather(shard.detach(), cut.dim, pg).wait()
    blocks = whole.unflatten(cut.dim, (pg.size(), cut.parts, -1)).transpose(cut.dim, cut.dim + 1)
    return blocks.flatten(cut.dim, cut.dim + 2).narrow(cut.dim, 0, cut.size).contiguous()


def take_cut(whole: Tensor, cut: Cut, group=None) -> Tensor:
    """This rank's shard of a whole tensor, padded with zeros where N does not divide its size."""
    pg = resolve_group(group)
    if whole.shape[cut.dim] != cut.size:
        raise ValueError(
            f"expected {cut.size} rows in dimension {cut.dim}, got {tuple(whole.shape)}"
        )
    rows = whole.movedim(cut.dim, 0)
    missing = -cut.size % (cut.parts * pg.size())
    if missing:
        rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
    return _cut_rows(rows, cut.parts, pg).movedim(0, cut.dim).contiguous()


# --- vocabulary -----------------------------------------------------------------------------------


class VocabParallelEmbedding(nn.Module):
    """nn.Embedding cut by rows of the table: tokens [...] -> vectors [..., dim], whole on every
    rank.

    A rank looks up the tokens it owns and contributes zeros for the others; the sum is the lookup.
    A table that N does not divide is padded with rows that no token reaches. Tokens outside the
    table raise IndexError (masked out they would silently become zeros). `sequence_parallel=True`:
    each rank gets its slice of the tokens.
    """

    def __init__(self, num_embeddings, embedding_dim, padding_idx=None, *, sequence_parallel=False,
                 group=None, device=None, dtype=None):  # fmt: skip
        super().__init__()
        full = nn.Embedding(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self._cut(full, resolve_group(group), sequence_parallel)

    @classmethod
    def from_module(cls, full_layer: nn.Embedding, group=None, *, sequence_parallel=False):
        """Cut an existing nn.Embedding."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._cut(full_layer, resolve_group(group), sequence_parallel)
        return layer

    def _cut(self, full: nn.Embedding, pg, sequence_parallel: bool):
        self.group, self.sequence_parallel = pg, sequence_parallel
        self.num_embeddings, self.embedding_dim = full.num_embeddings, full.embedding_dim
        rows = -(-full.num_embeddings // pg.size())
        self.first = pg.rank() * rows
        padding = full.padding_idx
        owned = padding is not None and self.first <= padding < self.first + rows
        self.padding_idx = padding - self.first if owned else None
        padded = F.pad(full.weight.detach(), (0, 0, 0, rows * pg.size() - full.num_embeddings))
        self.weight = _shard_parameter(padded.chunk(pg.size())[pg.rank()].clone(), full.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.device.type == "cpu" and tokens.numel():
            low, high = tokens.aminmax()
            if low < 0 or high >= self.num_embeddings:
                raise IndexError(
                    f"tokens from {int(low)} to {int(high)} in a vocabulary of {self.num_embeddings}"
                )
        local = tokens - self.first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        vectors = F.embedding(local.masked_fill(elsewhere, 0), self.weight, self.padding_idx)
        vectors = vectors.masked_fill(elsewhere.unsqueeze(-1), 0)
        if self.sequence_parallel:
            return sum_slices(vectors, TOKENS, self.group)
        return sum_over_ranks(vectors, self.group)


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, smoothing, ignore_index, vocab, pg):
        width = logits.shape[-1]
        first = pg.rank() * width
        real = max(
            0, min(width, vocab - first)
        )  # behind it lie padding classes: not in the softmax
        top = logits[..., :real].amax(-1) if real else logits.new_full(targets.shape, -torch.inf)
        top = coll.all_reduce(top.contiguous(), "max", group=pg, by="tp loss max")
        shifted = logits - top.unsqueeze(-1)
        shifted[..., real:] = -torch.inf
        local = targets - first
        mine = (local >= 0) & (local < real)
        local = local.masked_fill(~mine, 0)
        hit = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0)
        total = shifted[..., :real].sum(-1)
        softmax = shifted.exp_()
        # One all-reduce for all three sums: they are small, the latency is what costs.
        sums = torch.stack([softmax.sum(-1), hit, total])
        denominator, hit, total = coll.all_reduce(sums, group=pg, by="tp loss sums")
        softmax /= denominator.unsqueeze(-1)
        losses = denominator.log() - (1 - smoothing) * hit - smoothing / vocab * total
        counted = targets != ignore_index
        count = counted.sum()
        ctx.save_for_backward(softmax, local, mine & counted, counted, count)
        ctx.smoothing, ctx.vocab, ctx.real = smoothing, vocab, real
        return losses.masked_fill(~counted, 0).sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        softmax, local, hit, counted, count = ctx.saved_tensors
        grad_logits = softmax.clone()
        grad_logits[..., : ctx.real] -= ctx.smoothing / ctx.vocab
        at_target = hit.to(softmax.dtype).unsqueeze(-1) * (ctx.smoothing - 1)
        grad_logits.scatter_add_(-1, local.unsqueeze(-1), at_target)
        grad_logits *= (counted * (grad / count)).unsqueeze(-1)
        return grad_logits, None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    group=None,
) -> Tensor:
    """F.cross_entropy (mean) on logits that are cut by classes: [..., V/N] and int64 targets [...].

    The maximum and the sums are global, so the result, the same on all ranks, equals the serial
    one, and large logits do not overflow. `vocab_size`: the true number of classes, where the last
    ones only pad the table: they are left out of the softmax and get no gradient. Moves three
    numbers per token instead of V. Raises IndexError for targets outside the vocabulary.
    """
    pg = resolve_group(group)
    vocab = logits.shape[-1] * pg.size() if vocab_size is None else vocab_size
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets {tuple(targets.shape)} must be logits {tuple(logits.shape)} without the last dimension"
        )
    if targets.device.type == "cpu":
        wrong = (targets != ignore_index) & ((targets < 0) | (targets >= vocab))
        if wrong.any():
            raise IndexError(f"target {int(targets[wrong][0])} in a vocabulary of {vocab}")
    return _VocabCrossEntropy.apply(logits, targets, label_smoothing, ignore_index, vocab, pg)


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
        parameter.register_hook(lambda grad: _sum(grad, pg, "tp norm gradient"))


def tensor_parallel(model: nn.Module, group=None, *, sequence_parallel: bool = False) -> nn.Module:
    """Cut the built-in GPT over the group, in place, and return it.

    Attention by heads (column qkv, row proj), the MLP by hidden features (column up, row down),
    the token table and the output matrix by vocabulary. Logits come out cut by classes: use
    `vocab_parallel_cross_entropy(..., vocab_size=config.vocab)`. Four all-reduces per block and
    step, two forward, two backward. `sequence_parallel=True`: between the layers each rank holds
    1/N of the tokens. Raises ValueError, before anything changes, if N does not divide the heads
    or the hidden width.
    """
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
