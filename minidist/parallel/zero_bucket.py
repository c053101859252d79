"""What ZeRO-1 and 2 keep of some parameters: values, a shard to update, gradients on the way."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from minidist.comm import collectives as coll
from minidist.parallel import offload as tiers
from minidist.parallel.flat import FlatLayout


class Bucket:
    """Parameters of one group and dtype that are reduced, updated and gathered together."""

    def __init__(self, index: int, group_index: int, names: list[str], params: list[nn.Parameter]):
        self.index, self.group_index, self.names, self.params = index, group_index, names, params
        self.layout: FlatLayout
        self.full: Tensor  # all parameter values; the model's parameters are views of it
        self.shard: nn.Parameter  # what the inner optimizer updates
        self.inner: Optimizer
        self.on_disk: dict[str, tiers.DiskTensor] = {}
        self.grad: Tensor | None = None  # local gradients, already divided by the world size
        self.grad_views: list[Tensor] = []
        self.filled: set[int] = set()  # parameters whose gradient came since the last reduction
        self.arrived = 0  # gradients in the backward that will reduce this bucket
        self.work: coll.Work | None = None  # the reduction under way
        self.mean: Tensor | None = None  # this rank's shard of the mean gradient, until step()
