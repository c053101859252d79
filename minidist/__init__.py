"""minidist: distributed training strategies, small enough to read.

``import minidist as md`` gives every public name below. Each is imported from its module on first
use, so that importing the package costs nothing and needs neither torch nor a process group.
"""

import importlib
import sys
import types

__version__ = "0.1.0"

# The whole public surface: name -> the module that defines it.
_PUBLIC = {
    # running
    "launch": "comm.launch",
    "Ranks": "comm.launch",
    "RankFailure": "comm.launch",
    "init": "comm.context",
    "build_mesh": "comm.mesh",
    "measure": "measure",
    # data parallel family
    "DDP": "parallel.ddp",
    "ZeroOptimizer": "parallel.zero",
    "FSDP": "parallel.fsdp",
    "MixedPrecision": "parallel.fsdp",
    "shard": "parallel.combine",
    # model parallel
    "ColumnParallelLinear": "parallel.tensor",
    "RowParallelLinear": "parallel.tensor",
    "VocabParallelEmbedding": "parallel.tensor",
    "vocab_parallel_cross_entropy": "parallel.tensor",
    "tensor_parallel": "parallel.tensor",
    "tp_rng": "parallel.tensor",
    "schedule": "parallel.schedules",
    "Schedule": "parallel.schedules",
    "Action": "parallel.schedules",
    "Pipeline": "parallel.pipeline",
    "split": "parallel.pipeline",
    "parallelize": "parallel.combine",
    # around
    "plan": "plan",
    "save": "train.checkpoint",
    "load": "train.checkpoint",
    "DistributedSampler": "train.data",
    "scale_lr": "train.optim",
    "Warmup": "train.optim",
    "seed_all": "train.optim",
    "token_mean_scale": "train.optim",
    "windows": "train.optim",
    "accumulate": "train.optim",
    "GPT": "train.model",
    "GPTConfig": "train.model",
    "build_gpt": "train.model",
    "loss_fn": "train.model",
}

__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'minidist' has no attribute {name!r}")
    module = importlib.import_module(f"minidist.{_PUBLIC[name]}")
    # `measure` and `plan` name both a package and its main function; see _Package.
    value = module if _PUBLIC[name] == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})


class _Module(types.ModuleType):
    """Pickled by name, like every module: functions that use one travel to the ranks."""

    def __reduce__(self):
        return importlib.import_module, (self.__name__,)


class _CallableModule(_Module):
    """``md.measure()`` is ``minidist.measure.measure()``, and ``md.measure.tag`` still works."""

    def __call__(self, *args, **kwargs):
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **kwargs)


class _Package(_Module):
    """Makes the packages that share their name with a public function callable.

    Importing ``minidist.measure`` anywhere sets the attribute ``measure`` of this package to that
    module, in place of the function. Without this, ``md.measure()`` would work or fail depending
    on what was imported before.
    """

    def __setattr__(self, name, value):
        if _PUBLIC.get(name) == name and isinstance(value, types.ModuleType):
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def load_ipython_extension(ipython):
    """``%load_ext minidist``: the notebook commands of ``minidist.learn``."""
    from minidist import learn

    learn.load_ipython_extension(ipython)
