"""Models, data and comparisons that the DDP tests share.

Float64 and SGD: a wrong scale shows, and the tolerance is rounding only.
"""

import torch
import torch.distributed as dist
from torch import nn

import minidist as md

TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}


class Net(nn.Module):
    """Registered in another order than used, a shared layer, a 0-d parameter, a buffer in use."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(7, 3)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.shared = nn.Linear(7, 7)
        self.first = nn.Linear(5, 7)
        self.register_buffer("offset", torch.linspace(-1, 1, 7))

    def forward(self, x):
        h = torch.tanh(self.first(x) + self.offset)
        h = torch.tanh(self.shared(torch.tanh(self.shared(h))))
        return self.last(h) * self.temperature


def make(cls=Net, seed=0):
    torch.manual_seed(seed)
    return cls().double()


def inputs(rank, step, width=5):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, width, generator=generator, dtype=torch.float64)


def serial(world, steps=3, lr=0.1):
    """The same training in one process: the loss is the mean over the ranks' batches."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            (model(inputs(rank, step)).pow(2).mean() / world).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train(steps=3, lr=0.1, **options):
    """The same on ranks, started from different values on purpose."""
    model = md.DDP(make(seed=dist.get_rank()), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        model(inputs(dist.get_rank(), step)).pow(2).mean().backward()
        optimizer.step()
    return [p.detach() for p in model.module.parameters()]


def check_equal(results, expected):
    for parameters in results:
        for mine, zero, right in zip(parameters, results[0], expected, strict=True):
            assert torch.equal(mine, zero), "ranks drifted apart"
            torch.testing.assert_close(mine, right, **TOLERANCE)


def linear(inputs, outputs, value=None, bias=False):
    layer = nn.Linear(inputs, outputs, bias=bias).double()
    if value is not None:
        nn.init.constant_(layer.weight, value)
    return layer


def filled(*shape, value=1.0):
    return torch.full(shape, float(value), dtype=torch.float64)


def mean_of_serial(make, loss, world):
    """Gradients of the mean over ranks of `loss(model, rank)`, in one process."""
    model = make()
    for rank in range(world):
        (loss(model, rank) / world).backward()
    return [p.grad for p in model.parameters()]


def error_of(function):
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return None
