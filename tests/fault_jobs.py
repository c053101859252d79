"""Jobs in which something goes wrong on rank 1: the same on our ranks and under torchrun.

As a program, `torchrun ... fault_jobs.py NAME FOLDER [ARGUMENT...]`: with torch's DDP, FSDP and
checkpoints. `planted` in the folder gets the moment of the fault.
"""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

LIMIT = 3.0  # seconds that torch's ranks wait for each other; ours find out without a limit
PHASES = ("forward", "backward", "step", "save")
KINDS = ("raises", "exits", "is killed", "is stopped")


def plant(kind, folder):
    """Rank 1 fails here, in the given way."""
    Path(folder, "planted").write_text(str(time.time()))
    if kind == "raises":
        raise ArithmeticError("planted")
    if kind == "exits":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL if kind == "is killed" else signal.SIGSTOP)


class Here(nn.Module):
    """Passes its input on, and calls a function in forward and in backward."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        self.call("forward")
        x = x * 1
        x.register_hook(lambda gradient: self.call("backward"))
        return x


class Ours:
    """The strategies and checkpoints of this package."""

    def build(self, model, optimizer_class, strategy):
        import minidist as md

        return md.shard(model, optimizer_class, strategy, lr=0.01)

    def save(self, path, model, optimizer, step):
        import minidist as md

        md.save(path, model, optimizer, step=step)

    def load(self, path, model, optimizer):
        import minidist as md

        return md.load(path, model, optimizer)["step"]


class Torchs:
    """torch's own."""

    def build(self, model, optimizer_class, strategy):
        if strategy == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        else:
            from torch.distributed.fsdp import fully_shard

            for layer in model:
                fully_shard(layer)
            fully_shard(model)
        return model, optimizer_class(model.parameters(), lr=0.01)

    def _state(self, model, optimizer):
        from torch.distributed.checkpoint.state_dict import get_state_dict

        names = ("model", "optimizer")
        return dict(zip(names, get_state_dict(model, optimizer), strict=True))

    def save(self, path, model, optimizer, step):
        dcp.save({**self._state(model, optimizer), "step": step}, checkpoint_id=path)

    def load(self, path, model, optimizer):
        state = {**self._state(model, optimizer), "step": 0}
        dcp.load(state, checkpoint_id=path)
        return state["step"]


def built(side, strategy, call, width=32):
    """(model, optimizer) that call `call(phase)` in forward, backward and step."""

    class Optimizer(torch.optim.AdamW):
        def step(self, *args, **kwargs):
            call("step")
            return super().step(*args, **kwargs)

    torch.manual_seed(0)
    layers = [nn.Linear(width, width), Here(call), nn.Linear(width, width)]
    return side.build(nn.Sequential(*layers), Optimizer, strategy)


def train(side, strategy, phase, kind, folder, steps=4, names="step-{}"):
    """A checkpoint after every step; in step 2, rank 1 fails in the given phase."""
    step = 0

    def call(at):
        if (step, at, dist.get_rank()) == (2, phase, 1):
            # Long enough to be seen there, or nobody could say where it was.
            time.sleep(0 if kind == "raises" else 0.7)
            plant(kind, folder)

    write_data = dcp.FileSystemWriter.write_data

    def write(self, *args, **kwargs):
        done = write_data(self, *args, **kwargs)
        call("save")  # the files are there, the checkpoint is not complete
        return done

    dcp.FileSystemWriter.write_data = write
    try:
        model, optimizer = built(side, strategy, call)
        for step in range(steps):
            loss = model(torch.ones(4, 32)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            side.save(Path(folder, names.format(step)), model, optimizer, step)
    finally:
        dcp.FileSystemWriter.write_data = write_data
    return float(loss)


def fill_up(path):
    """Leave about 8 KB of the file system under `path`."""
    with open(Path(path, "filler"), "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                pass
        file.truncate(max(0, file.tell() - (1 << 13)))


def save_on_a_full_disk(side, folder, how, second="step-1"):
    """One checkpoint that fits, then one, replacing it or beside it, that does not: what is said,
    after how long, and what is there then."""
    model, optimizer = built(side, "ddp", lambda phase: None, width=128)
    model(torch.ones(4, 128)).mean().backward()
    optimizer.step()
    side.save(Path(folder, "step-1"), model, optimizer, 1)
    if how == "rlimit":
        import resource

        # Python ignores SIGXFSZ: the write itself fails.
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    elif dist.get_rank() == 0:
        fill_up(folder)
    dist.barrier()
    begun = time.monotonic()
    try:
        side.save(Path(folder, second), model, optimizer, 2)
        said = "nothing was raised"
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begun
    try:
        step = side.load(Path(folder, "step-1"), model, optimizer)
    except BaseException as error:
        step = f"{type(error).__name__}: {error}".split("\n")[0]
    left = {p.name for p in Path(folder).iterdir()} - {"filler", "step-1"}
    return {"said": said, "seconds": seconds, "step": step, "left": sorted(left)}
