"""What a transformer is made of: sizes in, exact parameter counts and FLOPs out.

Every other file of this package starts from a `Transformer`. Its counts are integers and equal the
sum of ``numel()`` of a really built model, also for one rank of a tensor- and pipeline-parallel
group, because that is where planners go wrong: a second norm forgotten, replicated norms divided by
the tensor-parallel size, a tied output matrix counted twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Transformer:
    """Sizes of a decoder-only transformer (all counts in elements, `seq` in tokens).

    `kv_heads` (default: heads) fewer than heads is grouped-query attention; `ffn` (default: 4 *
    hidden) is the inner width of the MLP; `gated` adds the third MLP matrix of SwiGLU; `norm` is
    ``"layer"`` (weight and bias) or ``"rms"`` (weight only); `bias` gives the linear layers one;
    `positions` is ``"learned"`` (a table of seq x hidden) or ``"rotary"`` (no parameters); `tied`
    makes the output matrix the token embedding; `dropout` keeps one-byte masks. Raises ValueError
    for sizes that no model can have.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int | None = None
    ffn: int | None = None
    vocab: int = 51200
    seq: int = 2048
    gated: bool = False
    norm: str = "layer"
    bias: bool = True
    positions: str = "learned"
    tied: bool = True
    dropout: bool = False
    name: str = ""

    def __post_init__(self):
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.ffn is None:
            object.__setattr__(self, "ffn", 4 * self.hidden)
        for field in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not a multiple of heads {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.norm not in ("layer", "rms"):
            raise ValueError(f"norm must be layer or rms, got {self.norm!r}")
        if self.positions not in ("learned", "rotary"):
            raise ValueError(f"positions must be learned or rotary, got {self.positions!r}")

    def __str__(self):
        return self.name or f"{self.layers} layers x {self.hidden}"

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    # ---- one tensor-parallel rank --------------------------------------------------------------

    def check_tp(self, tp: int) -> None:
        """Raises ValueError when the layers cannot be cut for `tp` ranks."""
        if tp < 1:
            raise ValueError(f"tp must be at least 1, got {tp}")
        if self.heads % tp:
            raise ValueError(f"heads not divisible by tp: {self.heads} heads, tp {tp}")
        if self.kv_heads % tp and tp % self.kv_heads:
            raise ValueError(
                f"kv_heads {self.kv_heads} can be neither divided nor repeated over tp {tp}"
            )
        if self.ffn % tp:
            raise ValueError(f"ffn not divisible by tp: {self.ffn}, tp {tp}")

    def kv_heads_per_rank(self, tp: int) -> int:
        """Key/value heads held by each rank: with fewer heads than ranks each keeps a copy."""
        return max(1, self.kv_heads // tp)

    def padded_vocab(self, tp: int) -> int:
        """The vocabulary, rounded up until it cuts into `tp` equal parts."""
        return -(-self.vocab // tp) * tp

    def norm_parameters(self) -> int:
        return 2 * self.hidden if self.norm == "layer" else self.hidden

    def matmul_parameters(self, tp: int = 1) -> int:
        """Weights of one layer that take part in matrix products, on one of `tp` ranks."""
        q = self.hidden * self.head_dim * self.heads // tp
        kv = self.hidden * self.head_dim * self.kv_heads_per_rank(tp)
        mlp = (3 if self.gated else 2) * self.hidden * self.ffn // tp
        return 2 * q + 2 * kv + mlp  # q and the output projection, k and v, the MLP

    def layer_parameters(self, tp: int = 1) -> int:
        """One transformer layer on one of `tp` ranks.

        Column-parallel biases are cut with their weight; the bias of a row-parallel layer is added
        once after the sum and every rank holds all of it, like the two norms.
        """
        self.check_tp(tp)
        count = self.matmul_parameters(tp) + 2 * self.norm_parameters()
        if self.bias:
            qkv = self.head_dim * (self.heads // tp + 2 * self.kv_heads_per_rank(tp))
            mlp = (2 if self.gated else 1) * self.ffn // tp
            count += qkv + self.hidden + mlp + self.hidden
        return count

    def embedding_parameters(self, tp: int = 1) -> int:
        """Token table (cut over the vocabulary) and learned positions (whole on every rank)."""
        positions = self.seq * self.hidden if self.positions == "learned" else 0
        return self.padded_vocab(tp) // tp * self.hidden + positions

    def output_parameters(self, tp: int = 1) -> int:
        """The matrix from hidden to vocabulary; no bias, cut over the vocabulary."""
        return self.padded_vocab(tp) // tp * self.hidden

    # ---- one pipeline stage --------------------------------------------------------------------

    def stage_layers(self, pp: int) -> list[int]:
        """Layers of each stage: equal, the first stages take the remainder."""
        if pp < 1:
            raise ValueError(f"pp must be at least 1, got {pp}")
        if pp > self.layers:
            raise ValueError(f"more pipeline stages than layers: pp {pp}, {self.layers} layers")
        return [self.layers // pp + (stage < self.layers % pp) for stage in range(pp)]

    def rank_parameters(self, tp: int = 1, pp: int = 1, stage: int = 0) -> int:
        """Parameters that one rank of a (tp, pp) grid holds.

        A tied table lives on the first *and* the last stage, where it is the output matrix: each
        of the two ranks counts it, `parameters` counts it once.
        """
        count = self.stage_layers(pp)[stage] * self.layer_parameters(tp)
        if stage == 0:
            count += self.embedding_parameters(tp)
        if stage == pp - 1:
            count += self.norm_parameters()
            if not self.tied or pp > 1:
                count += self.output_parameters(tp)
        return count

    @property
    def parameters(self) -> int:
        """All parameters of the model, each counted once."""
        return self.rank_parameters()

    # ---- arithmetic ----------------------------------------------------------------------------

    def forward_flops(self, tokens: int, seq: int | None = None, causal: bool = False) -> dict:
        """FLOPs of one forward pass over `tokens` tokens in sequences of `seq`, by part.

        2 per weight and token for the matrix products, 4 * seq * hidden per token and layer for
        scores and weighted values (half with `causal`, when a kernel skips what is masked), 2 *
        hidden
        * vocab per token for the logits. The parts of Narayanan 2021, appendix.
        """
        seq = seq or self.seq
        attention = 4 * tokens * seq * self.hidden * self.layers
        return {
            "matmul": 2 * tokens * self.matmul_parameters() * self.layers,
            "attention": attention // 2 if causal else attention,
            "logits": 2 * tokens * self.hidden * self.vocab,
        }

    def training_flops(
        self, tokens: int, seq: int | None = None, recompute: str = "none", causal: bool = False
    ) -> int:
        """FLOPs of forward and backward over `tokens` tokens, and of what is recomputed.

        Backward costs twice the forward. ``recompute="full"`` repeats every layer's forward (not
        the logits), ``"selective"`` the attention core only (Korthikanti 2022, equations 7 and 8).
        """
        part = self.forward_flops(tokens, seq, causal)
        again = {
            "none": 0,
            "selective": part["attention"],
            "full": part["attention"] + part["matmul"],
        }
        if recompute not in again:
            raise ValueError(f"recompute must be none, selective or full, got {recompute!r}")
        return 3 * sum(part.values()) + again[recompute]


# ---- known models ------------------------------------------------------------------------------


def _llama(name, layers, hidden, heads, kv_heads, ffn, vocab=32000, seq=4096):
    return Transformer(
        layers, hidden, heads, kv_heads, ffn, vocab, seq, gated=True, norm="rms", bias=False,
        positions="rotary", tied=False, name=name,
    )  # fmt: skip


PRESETS: dict[str, Transformer] = {
    shape.name: shape
    for shape in (
        Transformer(12, 768, 12, vocab=50257, seq=1024, name="gpt2"),
        Transformer(24, 1024, 16, vocab=50257, seq=1024, name="gpt2-medium"),
        Transformer(36, 1280, 20, vocab=50257, seq=1024, name="gpt2-large"),
        Transformer(48, 1600, 25, vocab=50257, seq=1024, name="gpt2-xl"),
        Transformer(24, 2304, 24, name="gpt-1.7b"),
        Transformer(30, 3072, 32, name="gpt-3.6b"),
        Transformer(36, 4096, 32, name="gpt-7.5b"),
        Transformer(40, 6144, 48, name="gpt-18b"),
        Transformer(44, 6144, 64, vocab=50432, tied=False, name="gpt-neox-20b"),
        Transformer(48, 6144, 64, name="gpt-22b"),
        Transformer(48, 8192, 64, name="gpt-39b"),
        Transformer(60, 10240, 80, name="gpt-76b"),
        Transformer(96, 12288, 96, name="gpt3-175b"),
        Transformer(70, 14336, 112, vocab=250880, name="bloom-176b"),
        Transformer(96, 16384, 128, name="gpt-310b"),
        Transformer(105, 20480, 128, name="mt-nlg-530b"),
        Transformer(128, 25600, 160, name="gpt-1t"),
        _llama("llama-2-7b", 32, 4096, 32, 32, 11008),
        _llama("llama-2-13b", 40, 5120, 40, 40, 13824),
        _llama("llama-2-70b", 80, 8192, 64, 8, 28672),
        _llama("llama-3.1-8b", 32, 4096, 32, 8, 14336, 128256, 8192),
        _llama("llama-3.1-70b", 80, 8192, 64, 8, 28672, 128256, 8192),
        _llama("llama-3.1-405b", 126, 16384, 128, 8, 53248, 128256, 8192),
    )
}


def from_parameters(count: float) -> Transformer:
    """A shape with about `count` parameters: a known model within 5 %, else one of usual
    proportions.

    The made-up shape has heads of 128 (64 below 1e9 parameters), a hidden size that cuts over 8
    ranks, and about the ratio of hidden to layers of the models in Narayanan 2021, Table 1.
    """
    if not 1e6 <= count < 1e18:
        raise ValueError(f"params must be at least 1e6 and below 1e18, got {count:g}")
    known = min(PRESETS.values(), key=lambda shape: abs(shape.parameters - count))
    if abs(known.parameters - count) <= 0.05 * count:
        return known
    head = 64 if count < 1e9 else 128
    step = (8 if count > 2e9 else 4 if count > 1e8 else 1) * head
    billions = count / 1e9
    name = f"gpt-{billions:.3g}b" if billions < 1000 else f"gpt-{billions / 1000:.3g}t"
    best = None
    for hidden in range(step, 40 * 1024, step):
        layers = round((count - 2048 * hidden - 51200 * hidden) / (12 * hidden * hidden))
        if layers < 1:
            break
        shape = Transformer(layers, hidden, hidden // head, name=name)
        proportion = hidden / layers / (60 + hidden / 200)  # about 1 for the published models
        miss = abs(shape.parameters / count - 1)
        # Layers that cut into 4 or 8 stages are worth a percent of the parameters.
        score = 20 * miss + max(proportion, 1 / proportion) + 0.2 * (layers % 4 > 0)
        if best is None or score < best[0]:
            best = (score, shape)
    if best is None:
        raise ValueError(f"no shape found for {count:g} parameters; give layers, hidden and heads")
    return best[1]


def from_module(module) -> Transformer:
    """The shape of a built model, read from its ``config`` (ours, or one with the common names).

    Raises ValueError when there is no config to read, or when the parameter count that follows
    from it is more than 2 % off what the module really holds.
    """
    config = getattr(module, "config", None)

    def read(*names):
        return next((getattr(config, n) for n in names if getattr(config, n, None)), None)

    hidden = read("width", "hidden_size", "n_embd")
    layers = read("layers", "num_hidden_layers", "n_layer")
    heads = read("heads", "num_attention_heads", "n_head")
    if not (hidden and layers and heads):
        raise ValueError(
            f"cannot read the shape of {type(module).__name__}: it has no config with width, "
            "layers and heads; pass layers=, hidden= and heads= to the planner"
        )
    rms = any("rms" in type(m).__name__.lower() for m in module.modules())
    shape = Transformer(
        layers, hidden, heads, read("num_key_value_heads"), read("intermediate_size", "n_inner"),
        read("vocab", "vocab_size"), read("seq", "max_position_embeddings", "n_positions"),
        gated=rms, norm="rms" if rms else "layer", bias=not rms,
        positions="rotary" if rms else "learned",
        tied=bool(read("tied", "tie_word_embeddings")), name=type(module).__name__,
    )  # fmt: skip
    really = sum(parameter.numel() for parameter in module.parameters())
    if abs(shape.parameters - really) > 0.02 * really:
        raise ValueError(
            f"{type(module).__name__} holds {really:,} parameters, its config says "
            f"{shape.parameters:,}: pass the shape to the planner instead of the module"
        )
    return shape


def with_sequence(shape: Transformer, seq: int) -> Transformer:
    """The same model trained on sequences of `seq` tokens."""
    return replace(shape, seq=seq)
