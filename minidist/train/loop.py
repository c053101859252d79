"""One training loop for every strategy, on whatever process group this rank is in.

    for step in range(steps):
        inputs, targets = this rank's rows of the global batch
        loss = trainer.forward_backward(inputs, targets)     # communicates as the strategy does
        trainer.step()

The strategy is all in `build.py`; nothing here asks which one it is. Local ranks, torchrun and the
comparison call the same `train`, which is why their losses are equal to the last bit.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch

from minidist.comm import collectives as coll
from minidist.comm.context import init
from minidist.measure import measure
from minidist.train.build import Trainer
from minidist.train.config import TrainConfig
from minidist.train.optim import Warmup, set_lr

# How the pipeline names the spans of what it runs: F0, B3, and with several chunks I2.1.
ACTION = re.compile(r"[FBIW]\d+(\.\d+)?")
OnStep = Callable[[int, float], None]


def train(config: TrainConfig, on_step: OnStep | None = None) -> list[dict]:
    """Train on this rank, together with the other ranks of its process group.

    Joins the job by itself: a torchrun job, the ranks of `launch`, or a world of one. The last step
    runs under `measure`, after warm-up and with all optimizer states in place; the steps between
    are timed and carry no instruments.

    Args:
        config: the same on every rank; checked here too: a mistake is the same error on all.
        on_step: called after each step with its number and the global loss. It costs one exchange
            of a number per step, which is left out of the traffic but not out of the time.

    Returns the plain data of every rank, in rank order, on every rank: ``losses`` (mean over the
    global batch), ``step_seconds``, ``layout``, and of the measured step ``held`` (bytes by kind
    between backward and step), ``peak`` (by kind, each at its own moment), ``at_peak`` and
    ``peak_total`` (the fullest moment), ``sent`` (traffic), ``actions`` (what the pipeline ran).
    """
    # Another number of threads adds up matrix products in another order: results would differ.
    torch.set_num_threads(config.threads)
    with init() as context:
        layout = config.check(context.world_size)
        batches = config.batches()
        trainer = Trainer(config, layout, context.device)
        schedule = Warmup(config.lr, config.warmup)
        losses: list[float] = []
        local: list[torch.Tensor | None] = []
        progress = Progress(config, trainer)
        start = progress.resume(losses)
        clock = Clock(start, config.steps, context.device)
        measured: dict = {}
        for step in range(start, config.steps):
            inputs, targets = batches.at(step, trainer.place.dp, layout.dp)
            inputs, targets = inputs.to(context.device), targets.to(context.device)
            set_lr(trainer.optimizer, schedule(step))
            clock.before(step)
            if step == config.steps - 1:
                loss, measured = _measured_step(trainer, inputs, targets)
            else:
                loss = trainer.forward_backward(inputs, targets)
                trainer.step()
            local.append(loss)
            saves = progress.due(step + 1)
            if on_step is not None or saves:
                losses += _global_losses(local, trainer)
                local.clear()
            if on_step is not None:
                on_step(step, losses[-1])
            if saves:
                progress.save(step + 1, losses)
        losses += _global_losses(local, trainer)
        mine = {
            "losses": losses,
            "step_seconds": clock.seconds,
            "layout": layout._asdict(),
            **measured,
        }
        return coll.all_gather_object(mine, by="results")


class Progress:
    """Checkpoints of a run: where it stands, and the losses so far.

    All else follows from the step: batches are a function of it, and so is the learning rate.
    A run that was killed continues as if nothing had happened, on any number of ranks.
    """

    KEEP = 2  # a checkpoint that is being read must not vanish while the next one is written

    def __init__(self, config: TrainConfig, trainer: Trainer):
        self.config, self.trainer = config, trainer
        self.directory = Path(config.checkpoint_dir) if config.checkpoint_dir else None

    def resume(self, losses: list[float]) -> int:
        """Load the latest checkpoint, if there is one; returns the step to go on with."""
        if self.directory is None:
            return 0
        from minidist.train.checkpoint import latest, load  # brings in all strategies

        found = latest(self.directory)
        if found is None:
            return 0
        saved = load(found, self.trainer.module, self.trainer.optimizer)
        losses += saved["losses"]
        return saved["step"]

    def due(self, done: int) -> bool:
        """Whether a checkpoint is written after `done` steps."""
        every, last = self.config.save_every, self.config.steps
        return self.directory is not None and (done % every == 0 or done == last)

    def save(self, done: int, losses: list[float]) -> None:
        from minidist.train.checkpoint import save

        module, optimizer = self.trainer.module, self.trainer.optimizer
        save(self.directory / f"step-{done:08d}", module, optimizer, step=done, losses=losses)
        if coll.rank() == 0:
            for old in sorted(self.directory.glob("step-*"))[: -self.KEEP]:
                shutil.rmtree(old, ignore_errors=True)


class Clock:
    """Seconds per step over the steps between the first (allocations, imports) and the measured
    last one, as one block: waiting for the ranks after every step would hide what a strategy leaves
    running into the next one."""

    def __init__(self, start: int, steps: int, device: torch.device):
        self.first, self.last, self.device = min(start + 1, steps - 2), steps - 1, device
        self._start = 0.0  # not running
        self.seconds: float | None = None  # fewer than two steps: nothing to time

    def before(self, step: int) -> None:
        if step == self.first and step < self.last:
            self._synchronize()
            self._start = time.perf_counter()
        elif step == self.last and self._start:
            self._synchronize()
            self.seconds = (time.perf_counter() - self._start) / (self.last - self.first)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _measured_step(trainer: Trainer, inputs: torch.Tensor, targets: torch.Tensor):
    """One step under instruments: its loss, and what it held and sent on this rank."""
    coll.barrier(by="before the measured step")  # or waits for slower ranks count as this step's
    with measure(trainer.module, trainer.optimizer) as meter:
        loss = trainer.forward_backward(inputs, targets)
        held = dict(meter.memory.current)  # between backward and step: all model states exist
        trainer.step()
        # The optimizer's states were there all along, but only its step shows them to the meter.
        held["optimizer"] = meter.memory.current["optimizer"]
    memory = meter.memory
    return loss, {
        "held": held,
        "peak": dict(memory.peak),
        "at_peak": dict(memory.at_peak),
        "peak_total": memory.peak_total,
        "sent": meter.traffic.as_dict(),
        "actions": [s.name for s in meter.timeline.spans if ACTION.fullmatch(s.name)],
    }


def _global_losses(local: list[torch.Tensor | None], trainer: Trainer) -> list[float]:
    """Mean over the global batch of each step, from the ranks that have a loss of their own.

    Gathered and added in rank order rather than all-reduced: the sum then has the same bits however
    many steps travel together.
    """
    if not local:
        return []
    mine = torch.zeros(len(local), dtype=torch.float64, device=trainer.device)
    if trainer.owns_loss:
        mine.copy_(torch.stack([loss.detach() for loss in local]))
    world = coll.world_size()
    everyone = mine.new_empty(world * len(local))
    coll.all_gather(everyone, mine, by="loss report")
    return (everyone.view(world, -1).cumsum(0)[-1] / trainer.layout.dp).tolist()
