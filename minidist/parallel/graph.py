"""Where a backward begins: what a forward returned, and the autograd graph behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

# When a whole training step is compiled, dynamo would try to compile the hooks that backward calls.
# This form of torch.compiler.disable does not import dynamo before the first call.
not_compiled = torch._disable_dynamo


class ForwardOutputs:
    """Puts `hook` on the outputs of one forward: called with the gradient of each in backward.

    With reentrant checkpointing the first gradient comes from a backward inside the backward. Only
    the outputs are met by the outer one, at whose end everything is complete. Lives as long as the
    graph of that forward. `reaches`: indices of the parameters that the outputs depend on, or only
    one of them, if there is any, with `stop_at_first`.
    """

    def __init__(
        self,
        outputs: Any,
        params: Iterable[nn.Parameter],
        hook: Callable[[Tensor], None],
        stop_at_first: bool,
    ):
        self.hook = hook
        tensors = [tensor for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
        index_of = {id(param): index for index, param in enumerate(params)}
        self.reaches = leaves_behind([t.grad_fn for t in tensors], index_of, stop_at_first)
        for tensor in tensors:
            tensor.register_hook(self)

    @not_compiled
    def __call__(self, grad: Tensor) -> None:
        self.hook(grad)


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Every tensor in what a module returned: in nested containers and dataclasses, too."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from tensors_in(list(output.values()))
    elif isinstance(output, (list, tuple, set)):
        for item in output:
            yield from tensors_in(item)
    elif is_dataclass(output) and not isinstance(output, type):
        yield from tensors_in(list(vars(output).values()))


def leaves_behind(
    nodes: Iterable[Any], index_of: Mapping[int, int], stop_at_first: bool = False
) -> set[int]:
    """Walk the autograd graph back from `nodes`: indices of the leaves it ends at.

    `index_of`: id of a leaf tensor -> its index; other leaves are passed over.
    """
    found: set[int] = set()
    seen, stack = set(), list(nodes)
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        index = index_of.get(id(getattr(node, "variable", None)))
        if index is not None:
            found.add(index)
            if stop_at_first:
                break
        stack.extend(following for following, _ in node.next_functions)
    return found
