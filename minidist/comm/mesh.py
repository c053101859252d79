"""Cutting the world into groups: a mesh of ranks with the axes dp, pp and tp.

Chapter 6; the order of the axes is Megatron-LM's (Narayanan et al. 2021, section 3): the ranks of a
tensor-parallel group are neighbours, because they talk most and want the fastest wires.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from minidist.comm.tuning import tune_connections

AXES = ("dp", "pp", "tp")


def build_mesh(dp: int = 1, pp: int = 1, tp: int = 1) -> DeviceMesh:
    """A mesh of shape (dp, pp, tp) over all ranks; `mesh["tp"]` is the group of one axis.

    Rank r stands at (r // (pp*tp), r // tp % pp, r % tp). Every rank must call this, with the same
    sizes. Raises ValueError unless dp * pp * tp is the world size, TypeError for sizes that are not
    whole numbers, RuntimeError without a process group.
    """
    sizes = dict(zip(AXES, (dp, pp, tp), strict=True))
    for axis, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{axis} must be a whole number of ranks, got {size!r}")
        if size < 1:
            raise ValueError(f"{axis} must be at least 1, got {size}")
    world = resolve_group(None).size()
    if dp * pp * tp != world:
        raise ValueError(
            f"dp * pp * tp must be the number of ranks: {dp} * {pp} * {tp} = {dp * pp * tp}, "
            f"but this job has {world} rank{'s' if world > 1 else ''}"
        )
    return init_device_mesh(_device_type(), (dp, pp, tp), mesh_dim_names=AXES)


def resolve_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """The process group meant by `group`: None is the world, a one-dimensional mesh is its group.
    The first time a group is asked for, its connections are tuned (`tuning.py`).

    Raises RuntimeError without a process group or when this rank is not in `group`, ValueError for
    a mesh of several dimensions, TypeError for anything else.
    """
    if isinstance(group, dist.ProcessGroup):
        tune_connections(group)
        return group
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "there is no process group here: run this inside minidist.launch(fn, ranks=...), "
            "or inside `with minidist.init():`"
        )
    if group is None:
        return resolve_group(dist.group.WORLD)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"a group must be one axis of the mesh, but this mesh has {group.ndim} "
                f"({', '.join(group.mesh_dim_names or ())}): pass for example mesh['dp']"
            )
        return resolve_group(group.get_group())
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise RuntimeError(f"rank {dist.get_rank()} is not a member of this group")
    raise TypeError(
        f"group must be a ProcessGroup, a one-dimensional DeviceMesh or None, got {type(group)}"
    )


def _device_type() -> str:
    # The mesh's device decides which backend its groups use. CUDA only when the world speaks NCCL:
    # a machine may have fewer GPUs than ranks, and then everything stays on the CPU.
    backends = dist.get_backend_config(dist.group.WORLD)
    return "cuda" if "nccl" in str(backends) and torch.cuda.is_available() else "cpu"
