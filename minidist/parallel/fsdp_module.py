"""What a sharded model offers between steps: whole parameters, saving, clipping, being a module.

Nothing here takes part in forward or backward; that is `fsdp.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from minidist.comm import collectives as coll
from minidist.parallel import fsdp_state
from minidist.parallel.fsdp_flat import FlatShard
from minidist.parallel.fsdp_placement import Placement
from minidist.parallel.fsdp_unit import Replicated


class ShardedModule(nn.Module):
    """The part of `FSDP` that needs only its shards."""

    module: nn.Module
    placement: Placement
    flats: list[FlatShard]
    replicated: Replicated
    # Inside full_params(): the gradients that were put aside, of the parameters that are whole now.
    summoned: dict[nn.Parameter, Tensor | None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a forward or backward is under way."""
        raise NotImplementedError

    def recover(self) -> None:
        """If the last backward ended with an error, put back what it left half done."""
        raise NotImplementedError

    # --- whole parameters and gradients -----------------------------------------------------------

    @contextmanager
    def full_params(self, write: bool = True) -> Iterator[None]:
        """All parameters hold their whole values, on every rank. Collective.

        `named_parameters()` yields the same objects as outside. On exit each rank keeps its part of
        what was written (all ranks must write the same), or nothing with `write=False`. Forwards
        inside run without gradients. RuntimeError inside a forward or backward.
        """
        with self.whole_values():
            yield
            if write:
                self._keep_written()

    @contextmanager
    def whole_values(self, device: torch.device | None = None, keep: bool = True) -> Iterator[None]:
        """As `full_params`, but on `device`, and nothing written is kept. Ranks that do not `keep`
        the values only take part in the gathering."""
        if self.busy or self.summoned is not None:
            raise RuntimeError("whole parameters cannot be had inside a forward, backward or "
                               "another full_params()")  # fmt: skip
        self.summoned = {}
        try:
            with torch.no_grad():
                for flat in self.flats:
                    values = fsdp_state.whole(flat, flat.shard)
                    for piece, value in zip(flat.pieces, values if keep else (), strict=keep):
                        self.summoned[piece] = piece.grad
                        piece.grad = None  # it has the shape of the piece
                        # A tensor each: this flat buffer can go before the next is gathered.
                        piece.data = value.to(device or value.device, copy=True)
            yield
        finally:
            for flat in self.flats:
                for piece, view in zip(flat.pieces, flat.piece_views(flat.shard), strict=True):
                    if piece in self.summoned:
                        piece.data = view
                        piece.grad = self.summoned[piece]
            self.summoned = None

    @torch.no_grad()
    def _keep_written(self) -> None:
        for flat in self.flats:
            for i, view in enumerate(flat.piece_views(flat.shard)):
                view.copy_(fsdp_state.part(flat, i, flat.pieces[i].data))

    @torch.no_grad()
    def full_grads(self) -> dict[str, Tensor | None]:
        """Whole gradients by name, copies in host memory, on every rank. Collective; to look at."""
        grads: dict[str, Tensor | None] = {}
        for flat in self.flats:
            shard = torch.zeros_like(flat.shard)
            for piece, view in zip(flat.pieces, flat.piece_views(shard), strict=True):
                if piece.grad is not None:
                    view.copy_(piece.grad)
            values = fsdp_state.whole(flat, shard)
            for name, piece, value in zip(flat.names, flat.pieces, values, strict=True):
                grads[name] = None if piece.grad is None else value.to("cpu", copy=True)
        for name, param in zip(self.replicated.names, self.replicated.params, strict=True):
            grads[name] = None if param.grad is None else param.grad.to("cpu", copy=True)
        return {name: grads[name] for name, _ in self.module.named_parameters()}

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their norm, over all ranks, is at most `max_norm`.

        Collective, between backward and step. Returns the norm before scaling (0-d, at least 32
        bits), equal on all ranks. Every element counts once: pieces hold no padding, and ignored
        parameters are equal everywhere. torch.nn.utils.clip_grad_norm_ would see only this rank's
        pieces.
        """
        pieces = [p.grad for flat in self.flats for p in flat.pieces if p.grad is not None]
        others = [p.grad for p in self.replicated.params if p.grad is not None]
        wide = torch.float32
        for grad in (*pieces, *others):
            wide = torch.promote_types(wide, grad.real.dtype)
        largest, device = norm_type == float("inf"), self.placement.device
        total = _sum_of_powers(pieces, norm_type, wide, device)
        if self.placement.shard_group is not None:
            op = "max" if largest else "sum"
            coll.all_reduce(total, op, group=self.placement.shard_group, by="fsdp gradient norm")
        rest = _sum_of_powers(others, norm_type, wide, device)
        norm = torch.maximum(total, rest) if largest else (total + rest) ** (1 / norm_type)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad in (*pieces, *others):
            grad.mul_(scale.to(device=grad.device, dtype=grad.real.dtype))
        return norm

    # --- saving and loading -----------------------------------------------------------------------

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """What the plain module's `state_dict()` would be: whole tensors in host memory, original
        names and order. Collective; with `rank0_only` the other ranks get {}."""
        return fsdp_state.full_state_dict(self, rank0_only)

    def load_full_state_dict(self, state: dict[str, Any] | None, strict: bool = True):
        """Take this rank's part of a `full_state_dict()` or a plain module's. Collective; ranks
        other than 0 may pass None to be sent rank 0's. ValueError on all ranks, before anything is
        changed, if names or shapes do not match."""
        return fsdp_state.load_full_state_dict(self, state, strict)

    def sharded_state_dict(self) -> dict[str, Any]:
        """This rank's pieces and buffers, copied, without communication."""
        state = self.module.state_dict()
        state = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
        return {"shard": self._cut(), "state": state}

    def load_sharded_state_dict(self, saved: dict[str, Any]) -> None:
        """Load the `sharded_state_dict()` of the same rank, number of ranks and units. Collective;
        ValueError on all ranks if it was cut differently."""
        wrong = []
        if saved.get("shard") != self._cut():
            wrong = [
                f"this is the shard (rank, ranks, sizes) {saved.get('shard')}, needed is "
                f"{self._cut()}: full_state_dict() moves between numbers of ranks"
            ]
        fsdp_state.raise_everywhere(self, "load_sharded_state_dict", wrong)
        self.module.load_state_dict(saved["state"])

    def _cut(self) -> tuple:
        sizes = [(flat.names[0], flat.layout.shard_numel) for flat in self.flats]
        return self.placement.rank, self.placement.world_size, sizes

    def full_optim_state_dict(
        self, optimizer: Optimizer, *, rank0_only: bool = False
    ) -> dict[str, Any]:
        """The state dict that the plain optimizer of the plain model would have, in host memory.
        Collective. Loads into that optimizer, and here on any number of ranks."""
        return fsdp_state.full_optim_state_dict(self, optimizer, rank0_only)

    def load_full_optim_state_dict(
        self, optimizer: Optimizer, saved: dict[str, Any] | None
    ) -> None:
        """Load a `full_optim_state_dict()` or a plain optimizer's; None: `load_full_state_dict`.
        ValueError on all ranks, before anything is changed, if groups or shapes differ."""
        fsdp_state.load_full_optim_state_dict(self, optimizer, saved)

    # --- what every module does -------------------------------------------------------------------

    def named_modules(self, memo=None, prefix: str = "", remove_duplicate: bool = True):
        """Those of the wrapped module: names stay the original ones, here and in outer modules."""
        self.recover()  # names and parameters are the pieces', whatever happened
        return self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args, **kwargs):
        """This rank's pieces under the original names; `full_state_dict()` has whole tensors."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        """Load what `state_dict()` gave on this rank or, collectively, whole tensors."""
        if assign:
            raise ValueError("assign=True would replace the shards that FSDP works on")
        own, place = self.module.state_dict(keep_vars=True), fsdp_state.place_of(self.flats)
        for key, value in state_dict.items():
            if own.get(key) in place and value.shape != own[key].shape:
                return self.load_full_state_dict(state_dict, strict)
        return self.module.load_state_dict(state_dict, strict=strict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also drops what `no_sync()` has added up."""
        for flat in self.flats:
            flat.drop_gradients()
        super().zero_grad(set_to_none)

    def _apply(self, fn, recurse: bool = True):
        raise RuntimeError(
            "an FSDP module cannot be moved or converted: its parameters live in flat shards. Do "
            "that before wrapping, or use mixed_precision=MixedPrecision(...)"
        )

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __reduce_ex__(self, protocol):
        raise TypeError(
            "an FSDP module cannot be pickled: a process group cannot move. Save full_state_dict()"
        )


def _sum_of_powers(grads, norm_type: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Sum of |g|**norm_type over all elements, 0-d; for infinity their maximum."""
    largest = norm_type == float("inf")
    total = torch.zeros((), dtype=dtype, device=device)
    for grad in grads:
        if grad.numel():
            values = grad.abs() if grad.is_complex() else grad
            norm = torch.linalg.vector_norm(values, norm_type, dtype=dtype).to(device)
            total = torch.maximum(total, norm) if largest else total + norm**norm_type
    return total
