"""How FSDP divides a model: which module is a unit, and which unit holds which parameter.

    units=[Block]                     embed.weight ----+
                                      blocks.0.* -> unit "blocks.0"   (inside the root)
    root unit: all that is in no      blocks.1.* -> unit "blocks.1"   (inside the root)
    other unit, also parameters       head.weight -----+--> root unit
    that several units share

A parameter belongs to the innermost unit around all the modules that register it. A weight tied
between two units therefore belongs to a unit around both, and is whole while either computes.

A model built on the meta device gets its memory here, unit by unit: at no time is more whole than
the units that are just being filled.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from minidist.comm.mesh import resolve_group
from minidist.measure.registry import gradient_hooks
from minidist.parallel.agree import check_same_parameters
from minidist.parallel.elementwise import refuse_unless_elementwise
from minidist.parallel.fsdp_flat import FlatShard
from minidist.parallel.fsdp_placement import MixedPrecision, Placement
from minidist.parallel.fsdp_unit import Unit

STRATEGIES = ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD")
Match = Callable[[nn.Module], bool]


def as_match(argument: object, what: str) -> Match:
    """A test for modules from what the user gave: classes, modules, or a predicate."""
    if argument is None:
        return lambda module: False
    if isinstance(argument, (type, nn.Module)):
        argument = (argument,)
    if isinstance(argument, Iterable):
        entries = tuple(argument)
        wrong = [e for e in entries if not isinstance(e, (type, nn.Module))]
        if wrong:
            raise TypeError(f"{what} must be module classes or a predicate, got {wrong[0]!r}")
        classes = tuple(e for e in entries if isinstance(e, type))
        modules = {id(e) for e in entries if isinstance(e, nn.Module)}
        return lambda module: isinstance(module, classes) or id(module) in modules
    if callable(argument):
        return argument
    raise TypeError(f"{what} must be module classes or a predicate, got {argument!r}")


def resolve_groups(strategy: str, group) -> tuple[object, object]:
    """(group to shard over, group to replicate over); None for a group of one rank."""
    if strategy == "HYBRID_SHARD":
        shards, replicas = _hybrid_groups(group)
    elif strategy == "NO_SHARD":
        shards, replicas = None, resolve_group(group)
    else:
        shards, replicas = resolve_group(group), None
    return tuple(g if g is not None and g.size() > 1 else None for g in (shards, replicas))


def _hybrid_groups(group):
    if isinstance(group, DeviceMesh):
        if group.ndim != 2:
            raise ValueError(
                f"HYBRID_SHARD needs a mesh of two dimensions (replicas, shards), got {group.ndim}"
            )
        return group.get_group(1), group.get_group(0)
    if isinstance(group, (tuple, list)):
        if len(group) != 2:
            raise ValueError("HYBRID_SHARD needs the pair (shard_group, replica_group)")
        return resolve_group(group[0]), resolve_group(group[1])
    if group is not None:
        raise ValueError(
            "HYBRID_SHARD needs a 2-D mesh (replicas, shards), a pair (shard_group, "
            "replica_group), or None to shard inside each machine of LOCAL_WORLD_SIZE ranks"
        )
    world = resolve_group(None).size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % local:
        raise ValueError(f"{world} ranks do not divide into machines of {local} (LOCAL_WORLD_SIZE)")
    shards, _ = dist.new_subgroups(local)
    columns = [list(range(place, world, local)) for place in range(local)]
    replicas, _ = dist.new_subgroups_by_enumeration(columns)
    return shards, replicas


class Plan:
    """Which parameter belongs to which unit, before anything is changed.

    `units`: the root first, then the others as they appear in the model. `members[unit]`: names of
    its parameters. `params`, `places`: per name the parameter, and every (module, attribute) where
    it is registered. `replicated`: names of the ignored parameters.
    """

    def __init__(self, module: nn.Module, units: object, ignored: object, wrapper: type):
        self._is_unit, self._is_ignored = as_match(units, "units"), as_match(ignored, "ignored")
        self._wrapper = wrapper  # FSDP itself
        self._names = {id(param): name for name, param in module.named_parameters()}
        self.params = dict(module.named_parameters())
        self.places: dict[str, list[tuple[nn.Module, str]]] = {}
        self._users: dict[str, list[Unit]] = {}
        self.replicated: list[str] = []
        root = Unit("", module, None)
        self.units = [root]
        self.unit_of: dict[nn.Module, Unit] = {}  # every module
        self._compiled: set[nn.Module] = set()  # what runs as compiled code: a hook would break it
        self._visit(module, "", root)
        if units is not None and len(self.units) == 1 and not self._is_unit(module):
            raise ValueError(f"no module of this {type(module).__name__} matches units={units!r}")
        self.replicated = [n for n in self.params if n in self.replicated]
        self.members: dict[Unit, list[str]] = {unit: [] for unit in self.units}
        for name in self.params:
            if name in self.places and name not in self.replicated:
                self._assign(name)
        # A unit without parameters of its own has nothing to gather.
        self.units = [u for u in self.units if u is root or self.members[u] or u.lenders]
        for unit in self.units:
            for outer in _and_outer(unit)[1:]:
                outer.inner.append(unit)
            unit.owners = [
                m for m, u in self.unit_of.items()
                if u is unit and m is not unit.module and m._parameters and m not in self._compiled
            ]  # fmt: skip

    def _visit(self, module: nn.Module, path: str, unit: Unit) -> None:
        if module in self.unit_of:
            return
        self.unit_of[module] = unit
        if isinstance(module, self._wrapper):
            raise ValueError(
                f"{path or 'the module'} is an FSDP module already: wrap once, and choose with "
                "units= what is gathered together"
            )
        if _is_compiled(module):
            self._compiled.update(module.modules())
        if self._is_ignored(module):
            self.replicated += [self._names[id(p)] for p in module.parameters()]
            self.unit_of.update(dict.fromkeys(module.modules(), unit))
            return
        for attribute, param in module._parameters.items():
            if param is not None:
                name = self._names[id(param)]
                self.places.setdefault(name, []).append((module, attribute))
                self._users.setdefault(name, []).append(unit)
        for attribute, child in module.named_children():
            child_path = f"{path}.{attribute}" if path else attribute
            inside = unit
            if child not in self.unit_of and self._is_unit(child) and not self._is_ignored(child):
                if type(child).forward is nn.Module.forward:  # ModuleList and the like
                    raise ValueError(
                        f"{child_path!r} ({type(child).__name__}) cannot be a unit: it has no "
                        "forward around which to gather. Choose the modules inside it"
                    )
                inside = Unit(child_path, child, unit)
                self.units.append(inside)
            self._visit(child, child_path, inside)

    def _assign(self, name: str) -> None:
        """The innermost unit around all users; those that are not it borrow the parameter."""
        users = self._users[name]
        around = [_and_outer(user) for user in users]
        holder = next(unit for unit in around[0] if all(unit in outer for outer in around))
        self.members[holder].append(name)
        for user in users:
            if user is not holder and holder not in user.lenders:
                user.lenders.append(holder)

    def check(self, placement: Placement, settings: dict) -> None:
        """Collective. What cannot be sharded, and ranks that differ, before anything is changed."""
        problem = self._problem()
        settings = {**settings, "precision": placement.precision, "offload": placement.offload,
                    "units": [unit.name for unit in self.units], "problem": problem}  # fmt: skip
        module = self.units[0].module
        for group in placement.groups:
            check_same_parameters(
                () if problem else self.params.items(), group, extra=settings, who="FSDP",
                named_buffers=module.named_buffers(),
            )  # fmt: skip
        if problem is not None:
            raise ValueError(problem)

    def _problem(self) -> str | None:
        for name, param in self.params.items():
            if name in self.replicated:
                continue
            if is_lazy(param):
                return (
                    f"parameter {name!r} has no shape yet (lazy module): run one forward before "
                    "wrapping"
                )
            if hasattr(param, "minidist_cut"):
                return (
                    f"parameter {name!r} is sharded already: this module was wrapped before. Use "
                    "that wrapper, or build the model anew"
                )
            if param._backward_hooks or gradient_hooks(param):
                return (
                    f"parameter {name!r} has a gradient hook, which would never run: autograd "
                    "sees the gathered parameter, not this one. Remove it, or put the parameter's "
                    "module into `ignored`"
                )
        return None

    def build(
        self, placement: Placement, init: Callable[[nn.Module], None] | None
    ) -> list[FlatShard]:
        """Collective. Shard unit after unit, giving meta parameters their memory on the way."""
        flats: list[FlatShard] = []
        left = {unit: set(self.members[unit]) for unit in self.units}
        for module in self.unit_of:  # in the order of registration: random numbers as without meta
            _materialise(module, self, placement.device, init)
            for unit in self.units:
                if left[unit] and not any(self.params[n].is_meta for n in left[unit]):
                    left[unit] = set()
                    flats += self._shard(unit, placement, len(flats))
        return flats

    def _shard(self, unit: Unit, placement, number: int) -> list[FlatShard]:
        kinds: dict[tuple, list[str]] = {}
        for name in self.members[unit]:
            param = self.params[name]
            # Frozen parameters apart: they are gathered, but have no gradients to send.
            kinds.setdefault((param.dtype, param.requires_grad), []).append(name)
        for names in kinds.values():
            params, places = [self.params[n] for n in names], [self.places[n] for n in names]
            unit.flats.append(FlatShard.cut(names, params, places, placement, number))
            number += 1
        return unit.flats


def make_placement(
    module: nn.Module, strategy: str, precision: MixedPrecision | None, offload: str | None, group
) -> Placement:
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}: use one of {', '.join(STRATEGIES)}")
    if offload not in (None, "cpu"):
        raise ValueError(f"offload must be None or 'cpu', got {offload!r}")
    shard_group, replica_group = resolve_groups(strategy, group)
    return Placement(
        shard_group, replica_group, compute_device(module, shard_group or replica_group),
        offload == "cpu", precision or MixedPrecision(), strategy == "NO_SHARD",
    )  # fmt: skip


def copy_module(original: Any, memo: dict[int, Any]) -> Any:
    """deepcopy of an FSDP module. `memo`: what has been copied so far, by id."""
    if original.busy or original.summoned is not None:
        raise RuntimeError("an FSDP module cannot be copied inside a forward or backward")
    twin = memo[id(original)] = type(original).__new__(type(original))
    nn.Module.__init__(twin)
    twin.training, twin.placement = original.training, original.placement
    twin.strategy, twin.prefetch = original.strategy, original.prefetch
    for unit in original.units:  # functions are copied by reference: they would serve this one
        unit.release()
    try:
        module = copy.deepcopy(original.module, memo)
    finally:
        for unit in original.units:
            original._surround(unit)
            original._listen(unit)
    units, flats = _copy_units(original.units, original.flats, memo)
    ignored = zip(original.replicated.names, original.replicated.params, strict=True)
    twin._begin(module, units, flats, {name: memo[id(param)] for name, param in ignored})
    return twin


def _copy_units(
    units: list[Unit], flats: list[FlatShard], memo: dict[int, Any]
) -> tuple[list[Unit], list[FlatShard]]:
    """The same units and shards for the modules and parameters that deepcopy's `memo` has."""
    twins: dict[Unit, Unit] = {}
    flat_twins = {flat: flat.copy(memo) for flat in flats}
    for unit in units:
        twin = twins[unit] = Unit(unit.name, memo[id(unit.module)], None)
        twin.flats = [flat_twins[flat] for flat in unit.flats]
        twin.owners = [memo[id(owner)] for owner in unit.owners]
    for unit, twin in twins.items():
        twin.parent = twins.get(unit.parent)
        twin.inner = [twins[inner] for inner in unit.inner]
        twin.lenders = [twins[lender] for lender in unit.lenders]
    return list(twins.values()), list(flat_twins.values())


def check_optimizers() -> None:
    """From now on, an optimizer's first step on pieces of parameters is preceded by a trial: rules
    that need the whole tensor (LAMB's norm, Muon's matrix) are refused, see `elementwise.py`."""
    if not _watched:
        _watched.append(register_optimizer_step_pre_hook(_check_optimizer))


_watched: list[Any] = []


def _check_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if getattr(optimizer, "minidist_checked", False):
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not any(getattr(param, "minidist_cut", False) for param in params):
        return
    optimizer.minidist_checked = True
    accepted = inspect.signature(type(optimizer).__init__).parameters
    defaults = {k: v for k, v in optimizer.defaults.items() if k in accepted}
    try:
        type(optimizer)([nn.Parameter(torch.zeros(2))], **defaults)
    except Exception:  # built in a way that cannot be repeated: nothing can be said about it
        return
    refuse_unless_elementwise(type(optimizer), defaults)


def _is_compiled(module: nn.Module) -> bool:
    return (
        hasattr(module, "_orig_mod")
        or module._compiled_call_impl is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


def compute_device(module: nn.Module, group) -> torch.device:
    """Where the model computes: its own device, or this rank's GPU if the group talks over NCCL."""
    given = next((t.device for t in (*module.parameters(), *module.buffers())), None)
    if given is not None and given.type not in ("cpu", "meta"):
        return given
    if group is not None and "nccl" in dist.get_backend_config(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _and_outer(unit: Unit) -> list[Unit]:
    chain = [unit]
    while chain[-1].parent is not None:
        chain.append(chain[-1].parent)
    return chain


def _materialise(module: nn.Module, plan: Plan, device: torch.device, init) -> None:
    """Memory and first values for what `module` itself registers on the meta device."""
    own = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
    if not any(t.is_meta for t in own):
        return
    fresh = False
    for attribute, param in module._parameters.items():
        if param is not None and param.is_meta:
            name = plan._names[id(param)]
            if plan.params[name].is_meta:  # else a tied weight that came with another module
                fresh = True
                empty = nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
                plan.params[name] = empty
                plan._names[id(empty)] = name
            module._parameters[attribute] = plan.params[name]
    for attribute, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            fresh = True
            module._buffers[attribute] = torch.empty_like(buffer, device=device)
    if not fresh:
        return
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    with torch.no_grad():
        if init is not None:
            init(module)
        elif reset is not None:
            reset()
        else:
            raise ValueError(
                f"{type(module).__name__} was built on the meta device and has no "
                "reset_parameters(): pass init=function(module) that gives its parameters values"
            )
