"""Cutting a model into pipeline stages: consecutive layers, about equal work each (document 3.2).

`split(model, stages)` returns one `Stage` per virtual stage, in order. A stage keeps the layers
under their original names, so that its `state_dict()` is a part of the model's own.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence

import torch
from torch import nn

from minidist.comm import collectives as coll
from minidist.parallel.microbatches import flatten, unflatten
from minidist.parallel.schedules import Schedule


class Stage(nn.Module):
    """Some consecutive layers of a model; `forward(x)` runs them in turn.

    index, count: which virtual stage of how many. tied: parameters that another stage holds as
    well, {name shared by all holders: this stage's parameter}.
    """

    def __init__(self, layers: dict[str, nn.Module], index: int, count: int):
        super().__init__()
        self.index, self.count = index, count
        self.layer_names = tuple(layers)
        self._tied: dict[str, str] = {}  # shared name -> name here
        for name, layer in layers.items():
            *parents, last = name.split(".")
            place: nn.Module = self
            for parent in parents:
                if parent not in place._modules:
                    place.add_module(parent, nn.Module())
                place = place._modules[parent]
            place.add_module(last, layer)

    @property
    def tied(self) -> dict[str, nn.Parameter]:
        return {shared: self.get_parameter(name) for shared, name in self._tied.items()}

    def forward(self, x):
        # Looked up by name at every call: wrapping or replacing a layer later keeps working.
        for name in self.layer_names:
            x = self.get_submodule(name)(x)
        return x


def split(
    model: nn.Module, stages: int, chunks: int = 1, costs: Sequence[float] | None = None
) -> list[Stage]:
    """Cut `model` into stages * chunks parts of consecutive layers with about equal cost.

    The layers are `model.layers()` (each takes what the one before returns, and together they are
    `model.forward`) or the children of an nn.Sequential. costs: one number per layer, for example
    from `layer_costs`; default: counted, the parameters a layer multiplies with (an embedding is
    looked up, not multiplied). The largest part is as small as possible; among such cuts the parts
    are as even as possible (sizes of equal layers differ by at most one). Every rank builds all
    parts and `Pipeline` picks its own. Parameters that several parts share are remembered
    (`Stage.tied`).

    Raises TypeError when the model does not list its layers, ValueError when there are fewer layers
    than parts, when `costs` does not fit, or when parameters belong to no layer.
    """
    layers = _named_layers(model)
    parts = stages * chunks
    if stages < 1 or chunks < 1:
        raise ValueError(f"stages and chunks must be at least 1, not {stages} and {chunks}")
    if parts > len(layers):
        raise ValueError(
            f"{len(layers)} layers cannot fill {parts} pipeline stages ({stages} ranks x {chunks} "
            f"chunks): every stage needs at least one layer"
        )
    if costs is None:
        costs = [_count(layer) for layer in layers.values()]
    if len(costs) != len(layers) or min(costs) < 0:
        raise ValueError(f"costs needs one number >= 0 per layer: {len(layers)}, not {len(costs)}")
    names = list(layers)
    result = []
    for index, (first, last) in enumerate(_balance(list(costs), parts)):
        mine = {name: layers[name] for name in names[first:last]}
        result.append(Stage(mine, index, parts))
    _find_tied(model, result)
    return result


def deal(parts: list[nn.Module], schedule: Schedule, rank: int) -> list[nn.Module]:
    """The chunks of `rank`, in order: picked if `parts` are all of a split model, else checked."""
    indices = [schedule.stage(rank, chunk) for chunk in range(schedule.chunks)]
    if len(parts) == schedule.virtual_stages and all(isinstance(part, Stage) for part in parts):
        return [parts[index] for index in indices]
    for part, index in zip(parts, indices, strict=True):
        if isinstance(part, Stage) and (part.index, part.count) != (index, schedule.virtual_stages):
            raise ValueError(
                f"rank {rank} was given part {part.index} of {part.count}, but {schedule.name} "
                f"puts part {index} of {schedule.virtual_stages} there"
            )
    return parts


def layer_costs(model: nn.Module, inputs, repeats: int = 3, group=None) -> list[float]:
    """Seconds of each layer's forward and backward on `inputs` (one micro-batch), for `split`.

    Collective: rank 0's fastest of `repeats` measurements counts on every rank, because all ranks
    must cut at the same place. Leaves the model and random streams as they were.
    """
    seconds = []
    with torch.random.fork_rng():
        for original in _named_layers(model).values():
            layer = copy.deepcopy(original)  # a backward adds to gradients, a forward to statistics
            tensors, layout = flatten(inputs)
            best = float("inf")
            for _ in range(repeats):
                leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
                _synchronize(leaves)
                start = time.perf_counter()
                out = layer(unflatten(leaves, layout))
                ends = [t for t in flatten(out)[0] if t.requires_grad]
                if ends:
                    torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
                _synchronize(leaves)
                best = min(best, time.perf_counter() - start)
            seconds.append(best)
            inputs = out
    return coll.all_gather_object(seconds, group, by="split: layer costs")[0]


def _synchronize(tensors):
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()


def _named_layers(model: nn.Module) -> dict[str, nn.Module]:
    layers = getattr(model, "layers", None)
    if callable(layers) and not isinstance(layers, nn.Module):  # a ModuleList is callable too
        listed = list(layers())
    elif isinstance(model, nn.Sequential):
        listed = list(model)
    else:
        raise TypeError(
            f"{type(model).__name__} does not say how to cut it: give it a method layers() that "
            "returns its layers in order, each taking what the one before returns, or use "
            "nn.Sequential. Values that skip layers have to travel through them, in a tuple or dict"
        )
    if bad := [type(layer).__name__ for layer in listed if not isinstance(layer, nn.Module)]:
        raise TypeError(f"every layer must be an nn.Module, not {', '.join(bad)}")
    # With duplicates: a Sequential may hold one module twice (shared weights), under two names.
    known: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        known.setdefault(id(module), []).append(name)
    layers = {}
    for i, layer in enumerate(listed):
        names = known.get(id(layer), [])
        layers[names.pop(0) if names else f"layer_{i}"] = layer
    held = {id(p) for layer in listed for p in layer.parameters()}
    if left := [name for name, p in model.named_parameters() if id(p) not in held]:
        raise ValueError(f"parameters outside of all layers would be lost: {', '.join(left)}")
    return layers


def _count(layer: nn.Module) -> float:
    looked_up = (nn.Embedding, nn.EmbeddingBag)
    modules = [m for m in layer.modules() if not isinstance(m, looked_up)]
    # A parameterless layer costs a little, so that a model of nothing else is cut evenly as well.
    return 1 + sum(p.numel() for m in modules for p in m.parameters(recurse=False))


def _balance(costs: list[float], parts: int) -> list[tuple[int, int]]:
    """(first, last+1) of each part: smallest largest sum, then smallest sum of squares."""
    n = len(costs)
    total = [0.0]
    small = (sum(costs) or 1) / n * 1e-6  # or layers that cost nothing would pile up in one part
    for cost in costs:
        total.append(total[-1] + cost + small)

    def best(combine, weigh):
        """Dynamic programme over `table[k][i]`: the first i layers in k parts."""
        table = [{0: (0.0, 0)}]
        for k in range(1, parts + 1):
            row = {}
            for i in range(k, n - (parts - k) + 1):
                row[i] = min(
                    (combine(table[k - 1][j][0], weigh(total[i] - total[j])), j)
                    for j in range(k - 1, i)
                    if j in table[k - 1]
                )
            table.append(row)
        return table

    largest = best(max, lambda cost: cost)[parts][n][0] * (1 + 1e-12)
    infinite = float("inf")
    table = best(lambda a, b: a + b, lambda cost: cost**2 if cost <= largest else infinite)
    cuts = [n]
    for k in range(parts, 0, -1):
        cuts.append(table[k][cuts[-1]][1])
    cuts.reverse()
    return list(zip(cuts, cuts[1:], strict=False))


def _find_tied(model: nn.Module, stages: list[Stage]) -> None:
    holders: dict[int, list[tuple[Stage, str]]] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            holders.setdefault(id(parameter), []).append((stage, name))
    names = {id(p): name for name, p in model.named_parameters()}
    for key, places in holders.items():
        if len(places) > 1:
            for stage, name in places:
                stage._tied[names[key]] = name
