"""`run_ranks`: multi-rank tests on ranks that stay between tests (about 2 ms for a collective)."""

import os
import sys

# Before torch loads: several ranks share the cores, and a process that has ever run an operation on
# two OpenMP threads must not be forked.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import cloudpickle
import pytest

from minidist.comm.launch import RankFailure, Ranks

_pools: dict[int, Ranks] = {}
# By value, so that the ranks need not import pytest and the test's module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def _fresh(fn, args, kwargs):
    """On the rank: undo what earlier tests may have left behind, then run the test's function."""
    import torch
    import torch.distributed as dist

    from minidist.comm import ledger, worker

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    ledger.reset()
    worker.state.clear()
    # Each group holds threads and sockets: hundreds of tests with groups of their own add up.
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    return fn(*args, **kwargs)


def _run_ranks(fn, world, *args, timeout=20, **kwargs):
    """`fn(*args, **kwargs)` on `world` standing ranks; results in rank order.

    A failure ends the ranks: whatever it left behind must not reach the next test.
    """
    __tracebackhide__ = True
    module = sys.modules.get(getattr(fn, "__module__", None))
    if module is not None and module.__name__.startswith("test_"):
        cloudpickle.register_pickle_by_value(module)
    pool = _pools.get(world)
    if pool is None or not pool.alive:
        pool = _pools[world] = Ranks(world)
    try:
        return pool.run(_fresh, fn, args, kwargs, timeout=timeout)
    except RankFailure as failure:  # the story is enough: not the stack of the launcher as well
        raise failure.with_traceback(None) from None


@pytest.fixture(scope="session")
def run_ranks():
    yield _run_ranks
    for pool in _pools.values():
        pool.close()
    _pools.clear()
