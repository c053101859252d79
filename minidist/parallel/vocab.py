"""The vocabulary cut over ranks: token table, and cross-entropy on logits that stay cut.

    table    V x d    rank r holds rows r V/N ...: it looks up its own tokens, zeros for the others
    logits   ... x V  rank r holds its classes: three numbers per token are summed, not V gathered

The vocabulary is the largest single matrix of a small model, and gathered logits its largest
activation. Chapter 3.1; Shoeybi et al. 2019, section 3 (embedding and loss).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from minidist.comm import collectives as coll
from minidist.comm.mesh import resolve_group
from minidist.parallel.autograd import TOKENS, sum_over_ranks, sum_slices
from minidist.parallel.cut import shard_parameter


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
        self.weight = shard_parameter(padded.chunk(pg.size())[pg.rank()].clone(), full.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        # A fake tensor (a dry run) has no values to look at.
        if tokens.device.type == "cpu" and tokens.numel() and type(tokens) is Tensor:
            low, high = tokens.aminmax()
            if low < 0 or high >= self.num_embeddings:
                raise IndexError(
                    f"tokens {int(low)} to {int(high)} in a vocabulary of {self.num_embeddings}"
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
            f"targets {tuple(targets.shape)} must have the shape of logits {tuple(logits.shape)} "
            "without the last dimension"
        )
    if targets.device.type == "cpu" and type(targets) is Tensor:
        wrong = (targets != ignore_index) & ((targets < 0) | (targets >= vocab))
        if wrong.any():
            raise IndexError(f"target {int(targets[wrong][0])} in a vocabulary of {vocab}")
    return _VocabCrossEntropy.apply(logits, targets, label_smoothing, ignore_index, vocab, pg)
