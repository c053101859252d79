"""Weight gradients of linear layers: added in place, or later.

Backward of a linear layer is two matrix products of the same size: the gradient of its input, which
the previous stage waits for, and that of its weight, which nobody waits for before the optimizer
step. A pipeline can use both facts, in any module, because this only replaces `F.linear`:

* Later (zero-bubble schedules: Qi et al., arXiv:2401.10241, section 2). The backward computes the
  first product and writes down what the second needs, the layer's input and its output's gradient.
  `accumulate` catches up when the schedule says W. The graph of the micro-batch is free before.
* In place (all others). A step adds up the gradients of many micro-batches. Autograd makes a new
  tensor each time and adds it to `.grad`; one `addmm_` into `.grad` saves the tensor and a pass
  over memory, 4 % of a step on CPU. (Megatron-LM: gradient accumulation fusion.)

Everything else (norms, embeddings, biases, weights that are computed from others) goes the usual
way through autograd, in the first part of the backward, and so do weights with hooks if not later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from minidist.measure.registry import gradient_hooks

_plain_linear = F.linear
_PLAIN = (Tensor, torch.nn.Parameter)
_LARGE = 2**16  # elements; a smaller weight's addition costs less than a Python function does


class LinearGradients:
    """The weight gradients of one micro-batch in one part of the model. later, in_place: see above.

    Wrap the forward in `forward()` and the backward in `backward()`. The latter needs it as well:
    activation checkpointing runs the forward again in there and must find the same operations.
    (A TorchFunctionMode would not do: torch switches it off while a backward runs.)
    """

    def __init__(self, later: bool, in_place: bool):
        self.later, self.in_place = later, in_place
        self._pending: list[tuple[Tensor, Tensor, Tensor]] = []
        self._in_backward = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        def linear(input, weight, bias=None):
            # A weight computed from others (parametrised, gathered) has a graph of its own, which
            # the first part frees; tensor subclasses (DTensor) bring their own backward.
            plain = type(input) in _PLAIN and type(weight) in _PLAIN and weight.is_leaf
            wanted = self.later or (self.in_place and weight.numel() >= _LARGE)
            if plain and wanted and weight.requires_grad and torch.is_grad_enabled():
                # Hooks of a parameter run whenever a backward gets to it, gradient or not: one
                # that is to wait must be out of sight, and something else keep the graph alive.
                tracked = _anchor() if self.later else weight
                return _Linear.apply(input, tracked, bias, (weight,), self)
            return _plain_linear(input, weight, bias)

        before, F.linear = F.linear, linear
        try:
            yield
        finally:
            F.linear = before

    @contextmanager
    def backward(self) -> Iterator[None]:
        self._in_backward = True
        try:
            with self.forward():
                yield
        finally:
            self._in_backward = False

    def of(self, weight: Tensor, input: Tensor, grad_output: Tensor) -> Tensor | None:
        """The gradient of `weight` [out, in] from [..., in] and [..., out], for autograd to add to
        `.grad`; None if that has been done here, or will be."""
        # A module may call autograd.grad itself, in its forward or to differentiate twice. That is
        # not for `.grad`.
        for_grad = self._in_backward and not torch.is_grad_enabled()
        if not self.later:
            return self._now(weight, input, grad_output, for_grad and self.in_place)
        if for_grad:
            self._pending.append((weight, input, grad_output))
        return None

    def _now(self, weight, input, grad_output, in_place: bool) -> Tensor | None:
        grad_output = grad_output.reshape(-1, grad_output.shape[-1])
        # Under autocast the product ran in 16 bits, and so do its gradients.
        input = input.reshape(-1, input.shape[-1]).to(grad_output.dtype)
        if in_place and _can_add(weight, grad_output.dtype):
            weight.grad.addmm_(grad_output.t(), input)
            return None
        return (grad_output.t() @ input).to(weight.dtype)

    @torch.no_grad()
    def accumulate(self, also: Iterable[Tensor] = ()) -> None:
        """Catch up. `also`: parameters that have to take part in this one backward, because data
        parallelism waits for all of them; those without a gradient here get one of zeros."""
        grads: dict[Tensor, Tensor] = {}
        while self._pending:
            weight, *factors = self._pending.pop()
            grad = self._now(weight, *factors, self.in_place)
            if grad is not None:
                grads[weight] = grads[weight] + grad if weight in grads else grad
        for parameter in also:
            if parameter.requires_grad:
                grads.setdefault(parameter, torch.zeros_like(parameter))
        if grads:  # through autograd, not `.grad += grad`: hooks must run
            torch.autograd.backward(list(grads), list(grads.values()))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, tracked, bias, holder, gradients):
        (weight,) = holder
        ctx.save_for_backward(input, weight)
        # Saved-tensor hooks may hand back an alias of the weight, not the parameter itself.
        ctx.weight, ctx.gradients = weight, gradients
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _plain_linear(input, weight, bias)

    @staticmethod
    def backward(ctx, grad_output):
        input, weight = ctx.saved_tensors
        for_input, for_weight, for_bias, *_ = ctx.needs_input_grad
        grad_input = grad_weight = grad_bias = None
        if for_input:
            grad_input = (grad_output @ weight.to(grad_output.dtype)).to(input.dtype)
        if for_weight:
            grad_weight = ctx.gradients.of(ctx.weight, input, grad_output)
        if for_bias:
            grad_bias = grad_output.reshape(-1, grad_output.shape[-1]).sum(0).to(ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None


def _anchor() -> Tensor:
    return torch.empty(0, requires_grad=True)


def _can_add(weight: Tensor, dtype: torch.dtype) -> bool:
    grad = weight.grad
    return (
        grad is not None
        and grad.dtype == dtype == weight.dtype
        and grad.layout == torch.strided
        and not grad.requires_grad
        and not weight._backward_hooks
        and not gradient_hooks(weight)
    )
