"""A small GPT: the one model that every strategy trains.

A pre-norm decoder (Vaswani 2017 with the layer norms of GPT-2; GELU; learned positions), written so
that each way of parallelising finds the cut it needs:

* **Pipeline**: `layers()` lists embed, blocks and head, each a function from one tensor to one
  tensor, and running them in turn *is* the forward pass.
* **Tensor parallel**: attention reads the number of heads off the width of what `qkv` returns, so a
  rank that owns 2 of 4 heads needs a narrower `qkv` and `proj` and nothing else.
* **FSDP**: a block is the natural unit, gathered and freed as a whole.

    tokens [batch, seq] -> embed -> block x layers -> head -> logits [batch, seq, vocab]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Shape of the model. ``vocab=256`` is one token per byte; ``seq`` is the longest sequence.

    ``tied=True`` makes the output matrix the token embedding itself (Press and Wolf 2017): one
    parameter used at both ends, which a pipeline has to add up across its first and last stage.

    Raises ValueError when a size is not positive or ``heads`` does not divide ``width``.
    """

    vocab: int = 256
    seq: int = 64
    width: int = 64
    layers: int = 4
    heads: int = 4
    tied: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab", "seq", "width", "layers", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(
                f"width must divide into heads: {self.width} is not a multiple of {self.heads}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def parameters(self) -> int:
        """How many numbers the model holds (a tied matrix once); equals the sum of ``numel()``."""
        width = self.width
        attention = width * 3 * width + 3 * width + width * width + width
        mlp = width * 4 * width + 4 * width + 4 * width * width + width
        block = attention + mlp + 2 * 2 * width  # two layer norms, each a weight and a bias
        embed = self.vocab * width + self.seq * width
        head = 2 * width + (0 if self.tied else self.vocab * width)
        return embed + self.layers * block + head


class Embed(nn.Module):
    """Token plus position: int64 ``[batch, seq]`` -> ``[batch, seq, width]``."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.width)
        self.position = nn.Parameter(torch.empty(config.seq, config.width))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.token(tokens) + self.position[: tokens.shape[1]])


class Attention(nn.Module):
    """Causal self-attention, ``[batch, seq, width]`` -> ``[batch, seq, width]``.

    The features of ``qkv`` are laid out ``[3, heads, head_dim]``: cutting the heads axis gives each
    tensor-parallel rank whole heads of q, k and v. The head count is read off the tensor, because
    on such a rank ``qkv`` returns only its own heads.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        batch, seq, features = qkv.shape
        heads = features // (3 * self.head_dim)
        q, k, v = qkv.view(batch, seq, 3, heads, self.head_dim).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.proj(out.transpose(1, 2).reshape(batch, seq, heads * self.head_dim))


class MLP(nn.Module):
    """Two linears around a GELU, four times as wide inside; the shape stays ``[..., width]``."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """One decoder layer, ``[batch, seq, width]`` -> the same shape.

    Normalising *before* each half leaves the residual stream untouched from embed to head, so that
    gradients reach the first layer undiminished and no learning-rate tricks are needed.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Head(nn.Module):
    """Last norm and output matrix: ``[batch, seq, width]`` -> logits ``[batch, seq, vocab]``."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.lm = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm(self.norm(x))


class GPT(nn.Module):
    """The model; see the head of this file. Initialised from torch's global random stream."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embed = Embed(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = Head(config)
        if config.tied:
            self.head.lm.weight = self.embed.token.weight
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """GPT-2's initialisation: normal with deviation 0.02, zero biases, unit norms.

        The two matrices of a block that write into the residual stream start smaller by
        1/sqrt(2 * layers): each block adds its variance to the stream, and without this it would
        grow with depth.
        """
        residual_std = 0.02 / (2 * self.config.layers) ** 0.5
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            elif name.endswith(("attention.proj.weight", "mlp.down.weight")):
                parameter.normal_(std=residual_std)
            else:
                parameter.normal_(std=0.02)

    def layers(self) -> list[nn.Module]:
        """``[embed, *blocks, head]``, each tensor -> tensor; composed in order they are forward."""
        return [self.embed, *self.blocks, self.head]

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 tokens ``[batch, seq]`` -> logits ``[batch, seq, vocab]``."""
        x = tokens
        for layer in self.layers():
            x = layer(x)
        return x


def build_gpt(config: GPTConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> GPT:
    """The same weights on every rank, for every strategy, from ``(config, seed)`` alone.

    Weights are drawn in float32 and then converted, so a float64 run starts from the same numbers
    as a float32 run. The caller's random stream is left where it was: building a model must not
    shift the dropout masks that follow.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = GPT(config)
    return model.to(dtype)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats over all tokens: logits ``[batch, seq, vocab]``, int64 targets
    ``[batch, seq]`` -> scalar."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
