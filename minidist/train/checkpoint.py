"""Checkpoints: any strategy and number of ranks to any other, bit for bit.

Every rank writes the parts that it owns, nothing is gathered. A part is a range of elements of one
parameter (or of its optimizer state), under the parameter's own name:

    model.blocks.0.mlp.up.weight | tp 0 of 2 | elements 0 to 8192

so what a file holds does not depend on buckets, units, padding or stages. Loading reads, for each
parameter that a rank needs, the parts that overlap its own. Only a cut over tensor-parallel ranks
is put together first, one parameter at a time.

Files are those of torch.distributed.checkpoint. A checkpoint is written beside its place and
renamed when every rank is done: whatever has the final name is complete. At no moment is there no
complete one: a job killed between the two renames that replace an older checkpoint leaves both
beside their place, where `load` and `latest` find them. What is not a tensor is JSON, and the index
is read by an unpickler that knows only torch's own index classes: no code comes from files.

Chapter 7; Rajbhandari et al. 2020; "PyTorch Distributed Checkpoint" in torch's documentation.
"""

from __future__ import annotations

import glob
import json
import os
import pickle
import re
import shutil
import threading
import uuid
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException
from torch.optim import Optimizer

from minidist.comm import collectives as coll
from minidist.parallel.cut import Cut
from minidist.train.parts import Part, forget_states, join, parts_of, take, tp_place

_BATCH_BYTES = 64 * 2**20  # read at once: what a load needs besides the model itself
_INFO = "minidist.json"  # written last: a folder that has it is complete
_ASIDE = ".writing-"  # in the names of folders that are not, or not any longer, in their place
_under_way: set[str] = set()  # the same of this process: a save that starts must leave them alone


# --- what users call ------------------------------------------------------------------------------


def save(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    asynchronous: bool = False,
    **extra: Any,
) -> Saving | None:
    """Write a checkpoint to the directory `path` (collective), replacing an older one at the end.

    `model`: a plain module, or any wrapper of this package. `optimizer`: the one that trains it.
    `extra`: by name, numbers, strings, lists and dicts of them, or objects with `state_dict()`
    that gives such (schedulers, samplers). This rank's random state is saved too.
    `asynchronous=True`: values are copied to host memory, and a thread writes while training goes
    on; returns a `Saving` whose `wait()` completes it on all ranks."""
    snapshot = _Snapshot(Path(path), model, optimizer, extra, copy=asynchronous)
    if asynchronous:
        return Saving(snapshot)
    snapshot.write()
    return None


def load(
    path: str | os.PathLike, model: nn.Module, optimizer: Optimizer | None = None, **extra: Any
) -> dict[str, Any]:
    """Load a checkpoint into `model`, `optimizer` and the objects in `extra`, whatever wrote it.

    Returns the plain `extra` values that were saved. FileNotFoundError if there is no checkpoint;
    ValueError on all ranks, before anything changes, if names or shapes do not match;
    RuntimeError if files are damaged. Random states are restored if the number of ranks is the
    same."""
    path, group = Path(path), None
    reader, info = _open(path)
    parts = list(parts_of(model, optimizer, info))
    saved = _index(reader)
    _agree(_mismatches(parts, saved, info, optimizer is not None), f"cannot load {path}", group)
    options = info["param_groups"]
    if optimizer is not None and options is not None:
        ours = len(optimizer.param_groups)
        wrong = f"{len(options)} parameter groups in the checkpoint, {ours} here"
        _agree([wrong] if ours != len(options) else [], f"cannot load {path}", group)
        for mine, theirs in zip(optimizer.param_groups, options, strict=True):
            mine.update({k: tuple(v) if isinstance(v, list) else v for k, v in theirs.items()})
    problem = []
    try:
        _read(reader, parts, saved, info, tp_place(model)[0])
        if optimizer is not None:
            forget_states(optimizer, info)
    except (Exception, CheckpointException) as error:  # a damaged file has many names
        problem = [f"{type(error).__name__}: {error}".split("\n")[0]]
    everyone = coll.all_gather_object(problem, group, by="checkpoint load")
    if any(everyone):
        first = next(p for p in everyone if p)[0]
        raise RuntimeError(f"checkpoint {path} is damaged, the model is half loaded: {first}")
    values = {}
    for name, value in info["extra"].items():
        if name in extra:
            extra[name].load_state_dict(value)
        else:
            values[name] = value
    key = f"rng|{coll.rank(group)}"
    if info["world_size"] == coll.world_size(group) and key in saved.sizes:
        state = torch.empty(saved.sizes[key], dtype=torch.uint8)
        _fetch({key: state}, reader)
        torch.set_rng_state(state)
    return values


def latest(directory: str | os.PathLike) -> Path | None:
    """The complete checkpoint in `directory` with the highest number in its name, or None."""
    names = {p.name.partition(_ASIDE)[0] for p in Path(directory).glob("*")}
    found = [p for p in (Path(directory) / name for name in names) if _where(p) is not None]
    return max(found, key=lambda p: [int(n) for n in re.findall(r"\d+", p.name)], default=None)


def read_extra(path: str | os.PathLike) -> dict[str, Any]:
    """The plain values that were saved with a checkpoint, without loading it."""
    return _open(Path(path))[1]["extra"]


class Saving:
    """A save under way in a thread."""

    def __init__(self, snapshot: _Snapshot):
        self._error: BaseException | None = None
        # A group of its own: the thread's exchanges must not mix with those of the training.
        snapshot.group = dist.new_group(backend="gloo") if coll.world_size() > 1 else None
        self._thread = threading.Thread(target=self._run, args=(snapshot,), daemon=True)
        self._thread.start()

    def _run(self, snapshot: _Snapshot) -> None:
        try:
            snapshot.write()
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Return when the checkpoint is complete; raises what went wrong while writing."""
        self._thread.join()
        if self._error is not None:
            raise self._error


# --- writing -----------------------------------------------------------------------------------


class _Snapshot:
    def __init__(self, path: Path, model, optimizer, extra: dict[str, Any], copy: bool):
        self.path, self.group = path, None
        tp_rank, tp_size = tp_place(model)
        self.tensors: dict[str, Tensor] = {}
        layout: dict[str, Any] = {}
        for part in parts_of(model, optimizer, None):
            layout[part.entry] = [list(part.shape), part.cut, tp_size if part.cut else 1]
            if part.start < part.stop:  # replicas give the same key, and torch writes it once
                key = f"{part.entry}|{tp_rank if part.cut else 0}|{part.start}-{part.stop}"
                values = part.values.detach()
                self.tensors[key] = values.cpu().clone() if copy else values
        self.tensors[f"rng|{coll.rank()}"] = torch.get_rng_state()
        layouts = coll.all_gather_object(layout, by="checkpoint layout")
        groups = None if optimizer is None else [
            {k: v for k, v in g.items() if k not in ("params", "param_names") and _is_plain(v)}
            for g in optimizer.param_groups
        ]  # fmt: skip
        self.info = {
            "format": 1,
            "world_size": coll.world_size(),
            "layout": {entry: value for part in layouts for entry, value in part.items()},
            "param_groups": groups,
            "extra": {
                k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in extra.items()
            },
        }
        try:
            self.text = json.dumps(self.info)
        except TypeError as error:
            raise TypeError(
                f"extra values must be plain numbers, strings, lists or dicts: {error}"
            ) from None

    def write(self) -> None:
        token = coll.all_gather_object(uuid.uuid4().hex[:8], self.group, by="checkpoint")[0]
        aside = self.path.with_name(f"{self.path.name}{_ASIDE}{token}")
        _under_way.add(aside.name)
        try:
            # By itself: a rank that cannot must not leave the others waiting in torch's save.
            self._together(lambda: aside.mkdir(parents=True, exist_ok=True), aside)
            self._together(lambda: self._write_to(aside), aside)
            self._together(lambda: self._replace_by(aside), aside)
        finally:
            _under_way.discard(aside.name)

    def _together(self, action: Callable[[], None], aside: Path) -> None:
        """Run `action`, and raise on every rank if it failed on any."""
        problem = ""
        try:
            action()
        except (Exception, CheckpointException) as error:  # a full disk, no permission
            problem = _in_one_line(error, coll.rank(self.group))
        everyone = coll.all_gather_object(problem, self.group, by="checkpoint written")
        if any(everyone):
            if coll.rank(self.group) == 0:  # the others write no more
                shutil.rmtree(aside, ignore_errors=True)
            raise RuntimeError(
                f"checkpoint {self.path} was not written, an older one is untouched; "
                f"{next(filter(None, everyone))}"
            )

    def _write_to(self, aside: Path) -> None:
        with _without_advice():
            dcp.save(
                self.tensors,
                storage_writer=_Writer(aside, thread_count=1),
                process_group=self.group,
                no_dist=coll.world_size(self.group) == 1,
            )
        if coll.rank(self.group) == 0:  # under another name until the other ranks are done
            (aside / f"{_INFO}.part").write_text(self.text)

    def _replace_by(self, aside: Path) -> None:
        if coll.rank(self.group) != 0:
            return
        (aside / f"{_INFO}.part").rename(aside / _INFO)  # complete
        if self.path.exists():
            self.path.rename(aside.with_name(aside.name.replace(_ASIDE, f"{_ASIDE}old-")))
        aside.rename(self.path)
        # The older one, and what killed jobs have left behind.
        for other in _beside(self.path):
            if other.name not in _under_way:
                (other / _INFO).unlink(missing_ok=True)  # from now on not complete
                shutil.rmtree(other, ignore_errors=True)


class _Writer(dcp.FileSystemWriter):
    """Says why the system refuses to write, where torch's file format tells the consequence."""

    def write_data(self, *args, **kwargs):
        try:
            return super().write_data(*args, **kwargs)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def _in_one_line(error: BaseException, rank: int) -> str:
    """Which rank failed, and why: torch raises on all ranks what went wrong on some of them."""
    for rank, (cause, _) in getattr(error, "failures", {}).items():
        return f"rank {rank}: {type(cause).__name__}: {cause}".split("\n")[0]
    return f"rank {rank}: {type(error).__name__}: {error}".split("\n")[0]


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, type(None), tuple, list))


# --- reading -----------------------------------------------------------------------------------


class _Index(NamedTuple):
    sizes: dict[str, tuple[int, ...]]  # key in the files -> shape
    ranges: dict[str, list[tuple[int, int, int, str]]]  # entry -> (tp rank, start, stop, key)


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args, **kwargs):
        path = Path(self.path) / ".metadata"
        with path.open("rb") as file:
            metadata = _IndexUnpickler(file).load()
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    """torch's index is a pickle: allow its own classes, nothing that could run code."""

    _allowed = re.compile(
        r"torch\.distributed\.checkpoint\.metadata\.\w+"
        r"|torch\.distributed\.checkpoint\.filesystem\.(_StorageInfo|_StoragePrefix)"
        r"|torch\.(Size|serialization\._get_layout|storage\._get_dtype_from_pickle_storage_type)"
        r"|pathlib(\._local)?\.\w*Path"
        r"|collections\.OrderedDict|builtins\.(set|frozenset|tuple|list|dict)|_codecs\.encode"
    )

    def find_class(self, module: str, name: str):
        known = self._allowed.fullmatch(f"{module}.{name}")
        # Of torch's names only constants such as torch.float32: torch.save would write files.
        if known or (module == "torch" and isinstance(getattr(torch, name, None), _CONSTANTS)):
            found = super().find_class(module, name)
            # Not what torch's module has imported for itself.
            if not module.endswith(".metadata") or found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"the index names {module}.{name}, which no checkpoint needs")


_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


def _beside(path: Path) -> list[Path]:
    """Folders of checkpoint `path` that are not in its place, the newer one of a pair first."""
    found = path.parent.glob(f"{glob.escape(path.name)}{_ASIDE}*")
    return sorted(found, key=lambda p: f"{_ASIDE}old-" in p.name)


def _where(path: Path) -> Path | None:
    """The folder that holds checkpoint `path`: itself, or one that a killed job left beside it."""
    return next((p for p in [path, *_beside(path)] if (p / _INFO).is_file()), None)


def _open(path: Path) -> tuple[_Reader, dict[str, Any]]:
    folder = _where(path)
    if folder is None:
        newest = latest(path) if path.is_dir() else None
        hint = f"; did you mean {newest}?" if newest else ""
        raise FileNotFoundError(f"no complete checkpoint at {path}{hint}")
    return _Reader(folder), json.loads((folder / _INFO).read_text())


def _index(reader: _Reader) -> _Index:
    try:
        entries = reader.read_metadata().state_dict_metadata
    except Exception as error:
        raise RuntimeError(
            f"checkpoint {reader.path} is damaged: its index cannot be read: {error}"
        ) from None
    sizes = {key: tuple(value.size) for key, value in entries.items() if hasattr(value, "size")}
    ranges: dict[str, list] = defaultdict(list)
    for key in sizes:
        entry, _, rest = key.rpartition("|")
        entry, _, tp = entry.rpartition("|")
        if entry:
            start, _, stop = rest.partition("-")
            ranges[entry].append((int(tp), int(start), int(stop), key))
    return _Index(sizes, ranges)


def _mismatches(parts: list[Part], saved: _Index, info: dict, with_optimizer: bool) -> list[str]:
    layout, needed = info["layout"], {part.entry: part for part in parts}
    # A rank of a pipeline needs only its stage: what nobody needs is found out over all ranks.
    everyone = coll.all_gather_object(list(needed), by="checkpoint names")
    wanted = {entry for entries in everyone for entry in entries}
    kinds = ("model.", "optimizer.") if with_optimizer else ("model.",)
    masters = "optimizer.master."
    missing = [e for e in needed if e not in layout and not e.startswith(masters)]
    extra = [
        e for e in layout if e not in wanted and e.startswith(kinds) and not e.startswith(masters)
    ]
    wrong = [f"{entry} is not in the checkpoint" for entry in missing]
    wrong += [f"{entry} is in the checkpoint but not here" for entry in sorted(extra)]
    for entry, part in needed.items():
        if entry in layout:
            theirs, cut, tp = layout[entry]
            ours = _whole_shape(part.shape, part.cut)
            saved_shape = _whole_shape(tuple(theirs), Cut(*cut) if cut else None)
            if ours != saved_shape:
                wrong.append(f"{entry} has shape {saved_shape} in the checkpoint, {ours} here")
    return wrong


def _whole_shape(shape: tuple[int, ...], cut: Cut | None) -> tuple[int, ...]:
    return shape if cut is None else (*shape[: cut.dim], cut.size, *shape[cut.dim + 1 :])


def _read(reader: _Reader, parts: list[Part], saved: _Index, info: dict, tp_rank: int) -> None:
    """Fill every part, in batches of a bounded size."""
    batch: list[tuple[Part, dict[str, Tensor]]] = []
    size = 0
    for part in [*parts, None]:
        if part is not None:
            source = part.entry
            if source not in info["layout"]:  # masters that were never kept: the parameters are all
                source = source.replace("optimizer.master.", "model.")
            # Cut over tensor parallel ranks, here or there: elements are at other places.
            moved = part.cut is not None or info["layout"][source][1] is not None
            buffers = {
                key: torch.empty(saved.sizes[key], dtype=part.values.dtype)
                for _, start, stop, key in saved.ranges[source]
                if moved or (start < part.stop and part.start < stop)
            }
            batch.append((part._replace(entry=source), buffers))
            size += sum(b.numel() * b.element_size() for b in buffers.values())
        if batch and (part is None or size > _BATCH_BYTES):
            _fetch({key: b for _, buffers in batch for key, b in buffers.items()}, reader)
            for item, buffers in batch:
                _fill(item, buffers, saved, info, tp_rank)
            batch, size = [], 0


def _fetch(tensors: dict[str, Tensor], reader: _Reader) -> None:
    with _without_advice():  # each rank reads for itself: stages and shards need different things
        dcp.load(tensors, storage_reader=reader, no_dist=True)


@contextmanager
def _without_advice() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@torch.no_grad()
def _fill(part: Part, buffers: dict[str, Tensor], saved: _Index, info: dict, tp_rank: int) -> None:
    shape, cut, tp_size = info["layout"][part.entry]
    ranges = [item for item in saved.ranges[part.entry] if item[3] in buffers]
    if cut is None and part.cut is None:
        for _, start, stop, key in ranges:
            low, high = max(start, part.start), min(stop, part.stop)
            part.values[low - part.start : high - part.start] = buffers[key].view(-1)[
                low - start : high - start
            ]
        return
    whole = join(ranges, buffers, tuple(shape), Cut(*cut) if cut else None, tp_size)
    own = whole if part.cut is None else take(whole, part.cut, part.shape, tp_rank)
    part.values.copy_(own.reshape(-1)[part.start : part.stop])


def _agree(problems: list[str], what: str, group) -> None:
    everyone = coll.all_gather_object(problems, group, by="checkpoint agrees")
    lines = list(dict.fromkeys(line for rank in everyone for line in rank))
    if lines:
        more = f" (and {len(lines) - 5} more)" if len(lines) > 5 else ""
        raise ValueError(f"{what}: {'; '.join(lines[:5])}{more}. Nothing has been changed")
