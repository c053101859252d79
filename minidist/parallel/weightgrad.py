"""The backward pass in two parts, for zero-bubble schedules: input gradients now, weights later.

Backward of a linear layer is two matrix products of the same size. The previous stage waits for
one of them, the gradient of the input; for the other, the gradient of the weight, nobody waits
before the optimizer step (Qi et al., arXiv:2401.10241, section 2). Under `deferred(pending)` a
linear layer computes only the first in backward and writes down what the second needs: its input
and the gradient of its output. `accumulate(pending)` catches up. Everything else in a module
(norms, embeddings, any operation but `F.linear`) gets its whole gradient in the first part: right
for any module, there is only less to move.

After the first part the graph of the micro-batch is free; two matrices per linear layer remain.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

_plain_linear = F.linear
_PLAIN = (Tensor, torch.nn.Parameter)


@contextmanager
def deferred(pending: list):
    """Inside, linear layers append their weight gradients to `pending` when backward reaches them.

    Needed around the forward and around the backward: activation checkpointing runs the forward a
    second time in there and must find the same operations. That is also why this replaces the
    function itself: a TorchFunctionMode is switched off while `torch.autograd.backward` runs.
    """

    def linear(input, weight, bias=None):
        # A weight computed from others (parametrised, gathered) has a graph of its own, which the
        # first part frees; tensor subclasses (DTensor) bring their own backward.
        plain = type(input) in _PLAIN and all(
            p is None or (p.is_leaf and type(p) in _PLAIN) for p in (weight, bias)
        )
        if plain and weight.requires_grad and torch.is_grad_enabled():
            return _Linear.apply(input, weight, bias, pending)
        return _plain_linear(input, weight, bias)

    before, F.linear = F.linear, linear
    try:
        yield
    finally:
        F.linear = before


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, pending):
        ctx.save_for_backward(input, weight)
        # Saved-tensor hooks may hand back an alias of the weight, not the parameter itself.
        ctx.parameters, ctx.pending = (weight, bias), pending
        return _plain_linear(input, weight, bias)

    @staticmethod
    def backward(ctx, grad_output):
        input, weight = ctx.saved_tensors
        ctx.pending.append((*ctx.parameters, input, grad_output))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        # Under autocast the product ran in 16 bits: so do its gradients, the parameters stay 32.
        grad_input = grad_output @ weight.to(grad_output.dtype)
        return grad_input.to(input.dtype), None, None, None


@torch.no_grad()
def accumulate(pending: list, also: Iterable[Tensor] = ()) -> None:
    """Add the weight gradients written down in `pending` to `.grad`, and empty the list.

    Goes through autograd, not `weight.grad += ...`: hooks of data parallelism must run. `also`:
    other parameters that have to take part in this backward, with a gradient of zero.
    """
    tensors, grads = [], []
    while pending:
        weight, bias, input, grad_output = pending.pop()
        grad_output = grad_output.reshape(-1, grad_output.shape[-1])
        input = input.reshape(-1, input.shape[-1]).to(grad_output.dtype)
        tensors.append(weight)
        grads.append((grad_output.t() @ input).to(weight.dtype))
        if bias is not None and bias.requires_grad:
            tensors.append(bias)
            grads.append(grad_output.sum(0).to(bias.dtype))
    met = {id(tensor) for tensor in tensors}
    rest = [p for p in also if p.requires_grad and id(p) not in met]
    if tensors or rest:
        torch.autograd.backward(tensors + rest, grads + [torch.zeros_like(p) for p in rest])
