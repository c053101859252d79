"""What autograd keeps between forward and backward for our GPT: the formula, addend by addend.

Korthikanti 2022 (section 4.1) counts 34 bytes per token and unit of width for a 16-bit layer of
Megatron, and 5 * heads * seq for its attention scores. Ours keeps fewer: 16 numbers per token and
unit of width, because the attention kernel never stores its seq x seq scores (Dao 2022) and there
is no dropout, whose masks are 2 of the 34 bytes. Each addend names the operation that needs it; the
tests compare the sum with `torch.autograd.graph.saved_tensors_hooks`, to the byte.
"""

from __future__ import annotations

import torch

from minidist.train.model import GPTConfig

TOKEN_ID = 8  # int64


def embed_bytes(config: GPTConfig, tokens: int, dtype: torch.dtype = torch.float32) -> int:
    """The token ids, from which the embedding's backward knows the rows it has to add to."""
    return tokens * TOKEN_ID


def block_bytes(
    config: GPTConfig, tokens: int, dtype: torch.dtype = torch.float32, tp: int = 1
) -> int:
    """One decoder layer. ``tp`` ranks share what lies between a column and a row linear; the rest
    (norms and residual stream) is whole on each of them."""
    width, size = config.width, dtype.itemsize
    # The softmax's normaliser stays in the precision it was accumulated in.
    accumulated = max(size, torch.float32.itemsize)
    whole = (
        width  # input of norm1: the residual stream
        + 2  # its mean and inverse deviation
        + width  # output of norm1, input of qkv
        + width  # input of norm2: the residual stream again
        + 2
        + width  # output of norm2, input of mlp.up
    )
    shared = (
        3 * width  # q, k and v
        + width  # output of attention, input of proj
        + 4 * width  # output of mlp.up, input of gelu
        + 4 * width  # output of gelu, input of mlp.down
    )
    normaliser = config.heads * accumulated  # log-sum-exp of each row of scores, per head
    return tokens * (whole * size + (shared * size + normaliser) // tp)


def head_bytes(
    config: GPTConfig, tokens: int, dtype: torch.dtype = torch.float32, tp: int = 1
) -> int:
    """Last norm, output matrix and cross-entropy."""
    size = dtype.itemsize
    per_token = (
        config.width  # input of the norm
        + 2
        + config.width  # output of the norm, input of lm
        + config.vocab // tp  # log-probabilities: the gradient is softmax minus one-hot
    )
    # The logits themselves are not kept. The sum of the class weights is: one number.
    return tokens * (per_token * size + TOKEN_ID) + size


def layer_activation_bytes(
    config: GPTConfig, batch: int, seq: int, dtype: torch.dtype = torch.float32, tp: int = 1
) -> list[int]:
    """Saved bytes of each of ``[embed, *blocks, head with the loss]`` for ``batch`` rows of ``seq``
    tokens on one of ``tp`` tensor-parallel ranks, without dropout.

    Raises ValueError with dropout: its masks are left out of this formula.
    """
    if config.dropout:
        raise ValueError("the formula has no addend for dropout masks: use dropout=0")
    tokens = batch * seq
    blocks = [block_bytes(config, tokens, dtype, tp)] * config.layers
    return [embed_bytes(config, tokens, dtype), *blocks, head_bytes(config, tokens, dtype, tp)]


def activation_bytes(
    config: GPTConfig, batch: int, seq: int, dtype: torch.dtype = torch.float32, tp: int = 1
) -> int:
    """Their sum: what one rank holds after the forward pass of the whole model, in bytes."""
    return sum(layer_activation_bytes(config, batch, seq, dtype, tp))
