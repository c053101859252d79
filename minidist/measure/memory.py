"""Exact tensor bytes by kind: how much is parameters, gradients, optimizer state, activations.

Bytes are counted by *storage*, the piece of memory behind a tensor: any number of views of it, or
two names for one tied weight, count once. A storage is met when an operation takes or returns it
and forgotten when its memory is freed; nothing is estimated, nothing polled (`watch.py` brings the
events here).

What kind a storage is, the first rule that applies:

    1. what `tag(tensor, kind)` said: the strategies tag their flat buffers, buckets and shards
    2. parameters    an `nn.Parameter` lives in it
    3. gradients     backward has put it in some `parameter.grad`
    4. optimizer     an optimizer keeps it in its `state`
    5. activations   autograd keeps it for backward (from the save to the release)
    6. temporary     none of these: inputs, results under way, and what is not yet known to be of a
                     kind (a gradient until backward hands it over)

On a GPU the numbers are of CUDA tensors, and `memory.on("cpu")` has what was offloaded. Scratch
that a kernel allocates and frees inside one operation cannot be seen, on any device.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from minidist.measure import registry

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "temporary")
_PLAIN = (Tensor, torch.nn.Parameter)
_TAGS = ("parameters", "gradients", "optimizer", "activations", "buffers")


def tag(tensor: Tensor, kind: str, device: str | None = None) -> Tensor:
    """Say what the memory behind `tensor` is for: parameters, gradients, optimizer, activations or
    buffers (communication buckets, scratch, statistics).

    Means the whole storage, whatever part of it `tensor` shows, until it is freed or tagged again.
    Costs a microsecond and works whether or not anything measures. Returns `tensor`.
    `device="disk"` counts it apart from main memory, for memory-mapped files (`torch.from_file`
    is recognised by itself). ValueError for another kind.
    """
    if kind not in _TAGS:
        raise ValueError(f"kind must be one of {', '.join(_TAGS)}, got {kind!r}")
    for storage in storages(tensor):
        # An attribute on the storage object: torch keeps that object as long as the memory lives,
        # so the tag needs no registry and cannot be inherited by the next user of the address.
        storage.minidist_kind = kind
        if device is not None:
            storage.minidist_device = device
        mine = registry.here()
        for measurement in registry.everywhere() if mine else ():
            if measurement.memory is not None:
                adopt = measurement in mine
                measurement.memory.tagged(storage, tensor, adopt)
    return tensor


def storages(tensor: Tensor) -> Iterable:
    """The storages behind a tensor; for DTensor and sparse tensors those of its parts."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided:
        return (tensor.untyped_storage(),)
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]
        return [s for part in parts if isinstance(part, Tensor) for s in storages(part)]
    if tensor.layout is torch.sparse_coo:
        return [*storages(tensor._indices()), *storages(tensor._values())]
    try:
        return [tensor.untyped_storage()]
    except (NotImplementedError, RuntimeError):
        return []  # other sparse layouts, vmap's batched tensors: no storage of their own


class Bytes(dict):
    """Bytes by kind; a kind that never occurred is 0. `total` is their sum."""

    def __init__(self, values=(), **kinds: int):
        super().__init__(dict.fromkeys(KINDS, 0))
        self.update(values, **kinds)

    @property
    def total(self) -> int:
        return sum(self.values())


class _Entry:
    """One storage that is alive."""

    __slots__ = ("always_there", "changed", "device", "key", "kind", "nbytes", "ref", "saved")

    def __init__(self, key: int, nbytes: int, device: str, kind: str | None):
        self.key, self.nbytes, self.device, self.kind = key, nbytes, device, kind
        self.saved = 0  # how many tensors in it autograd keeps for backward
        self.always_there = False  # older than the measurement, and of its first kind ever since
        self.changed = 0  # clock when it got its size and kind, -1: always had them
        self.ref: weakref.ref | None = None

    @property
    def label(self) -> str:
        return self.kind or ("activations" if self.saved else "temporary")


class DeviceMemory:
    """The counters of one type of device. All values are bytes of this process."""

    def __init__(self) -> None:
        self.current = Bytes()
        # The highest value of each kind, each at its own moment: they do not add up to peak_total.
        self.peak = Bytes()
        self.current_total = 0
        self.peak_total = 0
        self.at_peak = Bytes()  # the parts of peak_total
        self._peak_clock = -1
        self._dirty = False

    def add(self, kind: str, nbytes: int, always_there: bool = False) -> None:
        self.current[kind] += nbytes
        self.current_total += nbytes
        self._dirty = True
        if always_there:
            # Met only now, but in use all along: all of history moves up.
            self.peak[kind] += nbytes
            self.peak_total += nbytes
            self.at_peak[kind] += nbytes

    def relabel(self, entry: _Entry, old: str, new: str) -> None:
        """The memory of `entry` turned out to be of kind `new`."""
        self.current[old] -= entry.nbytes
        self.current[new] += entry.nbytes
        self._dirty = True
        if old != "temporary":
            return
        # It was what it is now before anybody could know: a gradient under way, or the optimizer
        # state in the first step. The parts of the peak are named accordingly.
        if entry.changed <= self._peak_clock:
            self.at_peak[old] -= entry.nbytes
            self.at_peak[new] += entry.nbytes
        if entry.always_there:
            self.peak[old] -= entry.nbytes

    def settle(self, clock: int) -> None:
        """An event is complete: is this a new peak?"""
        if not self._dirty:
            return
        self._dirty = False
        current, peak = self.current, self.peak
        for kind in KINDS:
            if current[kind] > peak[kind]:
                peak[kind] = current[kind]
        if self.current_total > self.peak_total:
            self.peak_total = self.current_total
            self.at_peak = Bytes(current)
            self._peak_clock = clock

    def reset_peak(self, clock: int) -> None:
        self.peak, self.at_peak = Bytes(self.current), Bytes(self.current)
        self.peak_total = self.current_total
        self._peak_clock = clock


class Memory:
    """Bytes by kind on this rank, readable at any time during the measurement and after it.

    `current`, `peak`: `Bytes` by kind. `current_total`, `peak_total`: their sum and its highest
    value. `at_peak`: the parts at that moment. `on(device)`: the same for one device type.

    Counts what the measured code touches and what was handed to `measure(...)`. Memory that is
    older than the measurement counts from its start, however late it is first touched.
    """

    def __init__(self) -> None:
        self._devices: dict[str, DeviceMemory] = {}
        self._live: dict[int, _Entry] = {}
        # Storages die at any point of any thread, also in the middle of an update here. So their
        # callbacks only leave a note, (entry, died), and the next event works it off.
        self._notes: deque[tuple[_Entry, bool]] = deque()
        self._lock = threading.RLock()
        self._clock = 0
        self._changed = False

    # --- reading -----------------------------------------------------------------------------

    def on(self, device: str) -> DeviceMemory:
        """The counters of a device type: "cpu", "cuda", or "disk" for memory-mapped files."""
        with self._lock:
            self.settle()
            return self._devices.setdefault(device, DeviceMemory())

    @property
    def device(self) -> str:
        """The device type that the plain numbers are about: the accelerator if any was used."""
        with self._lock:
            return next((d for d in self._devices if d not in ("cpu", "meta", "disk")), "cpu")

    @property
    def current(self) -> Bytes:
        return Bytes(self.on(self.device).current)

    @property
    def peak(self) -> Bytes:
        return Bytes(self.on(self.device).peak)

    @property
    def at_peak(self) -> Bytes:
        return Bytes(self.on(self.device).at_peak)

    @property
    def current_total(self) -> int:
        return self.on(self.device).current_total

    @property
    def peak_total(self) -> int:
        return self.on(self.device).peak_total

    def reset_peak(self) -> None:
        """Forget the peaks: they start again from what is in use now (after warm-up steps)."""
        with self._lock:
            self.settle()
            for counters in self._devices.values():
                counters.reset_peak(self._clock)

    def as_dict(self) -> dict:
        """Plain numbers, for JSON."""
        return {
            "device": self.device,
            "current": dict(self.current),
            "peak": dict(self.peak),
            "at_peak": dict(self.at_peak),
            "current_total": self.current_total,
            "peak_total": self.peak_total,
        }

    def __str__(self) -> str:
        current, peak, at_peak = self.current, self.peak, self.at_peak
        rows = [f"{'bytes on ' + self.device:<16}{'current':>16}{'peak':>16}{'at the peak':>16}"]
        for kind in KINDS:
            rows.append(f"{kind:<16}{current[kind]:>16,}{peak[kind]:>16,}{at_peak[kind]:>16,}")
        total, highest = self.current_total, self.peak_total
        rows.append(f"{'total':<16}{total:>16,}{highest:>16,}{highest:>16,}")
        return "\n".join(rows)

    # --- events, brought by watch.py ----------------------------------------------------------

    def see(
        self, storage, tensor: Tensor, kind: str | None = None, always_there: bool = False
    ) -> _Entry:
        """A storage was met behind `tensor`, of this kind if nobody knew better.

        `always_there`: it came from outside; if it is new to us, it is older than we are.
        """
        if self._notes:
            self._work_off()
        entry, nbytes = self._live.get(storage._cdata), storage.nbytes()
        if entry is not None and entry.nbytes == nbytes and (kind is None or entry.kind):
            return entry  # nothing new, as for nearly every operand
        with self._lock:
            if entry is None:
                return self._adopt(storage, nbytes, tensor.device.type, kind, always_there)
            if entry.nbytes != nbytes:
                self._resize(entry, nbytes)
            if kind is not None and entry.kind is None:
                self._relabel(entry, kind=kind)
            return entry

    def knows(self, storage) -> bool:
        """Whether `see(storage)` would change nothing, as for nearly every operand."""
        if self._notes:
            self._work_off()
        entry = self._live.get(storage._cdata)
        return entry is not None and entry.nbytes == storage.nbytes()

    def tagged(self, storage, tensor: Tensor, adopt: bool) -> None:
        """Somebody said what a storage is for. `adopt`: count it even if we never met it."""
        with self._lock:
            if adopt:
                self.see(storage, tensor)
            entry = self._live.get(storage._cdata)
            if entry is not None:
                self._relabel(entry, kind=storage.minidist_kind)
                self._relocate(entry, storage.__dict__.get("minidist_device", entry.device))
                self.settle()

    def resized(self, storage) -> None:
        """`storage.resize_()` was called, which is no operation and has no other trace."""
        with self._lock:
            self._work_off()
            entry, nbytes = self._live.get(storage._cdata), storage.nbytes()
            if entry is not None:
                self._resize(entry, nbytes)
            elif nbytes:
                # Was empty when we began (a unit that FSDP had freed): it comes now, and was not
                # there all along, as a storage first met as an operand would be.
                # Fake tensors keep their storages on meta: only tensors know what they play.
                device = storage.device.type
                self._adopt(storage, nbytes, "cpu" if device == "meta" else device, None, False)
            self.settle()

    def save(self, storage, tensor: Tensor) -> _Entry | None:
        """Autograd keeps a tensor in this storage for backward; `release` undoes it.

        None if that makes no difference, as for a weight.
        """
        entry = self.see(storage, tensor, always_there=True)
        if entry.kind is not None:
            return None
        with self._lock:
            self._relabel(entry, saved=entry.saved + 1)
            self.settle()
            return entry

    def release(self, entry: _Entry) -> None:
        """Called from destructors: it must not take the lock."""
        self._notes.append((entry, False))

    def close(self) -> None:
        """The measurement is over: later frees no longer change the numbers."""
        with self._lock:
            self.settle()
            self._live, self._notes = {}, deque(maxlen=0)

    def settle(self) -> None:
        """An event (an operation with all it takes and returns) is complete."""
        if not self._changed and not self._notes:
            return
        with self._lock:
            self._work_off()
            self._changed = False
            for counters in self._devices.values():
                counters.settle(self._clock)
            self._clock += 1

    # --- bookkeeping, under the lock ------------------------------------------------------------

    def _adopt(self, storage, nbytes: int, device: str, kind: str | None, always_there: bool):
        known = storage.__dict__  # filled by tag(); `getattr` with a default would cost more
        kind = known.get("minidist_kind", kind)
        if device == "cpu" and storage.filename is not None:
            device = "disk"  # torch.from_file: the pages are the kernel's to drop
        entry = _Entry(storage._cdata, nbytes, known.get("minidist_device", device), kind)
        entry.always_there, entry.changed = always_there, -1 if always_there else self._clock
        notes = self._notes
        entry.ref = weakref.ref(storage, lambda _: notes.append((entry, True)))
        self._live[entry.key] = entry
        self._counters(entry).add(entry.label, nbytes, always_there)
        return entry

    def _counters(self, entry: _Entry) -> DeviceMemory:
        self._changed = True
        counters = self._devices.get(entry.device)
        if counters is None:
            counters = self._devices[entry.device] = DeviceMemory()
        return counters

    def _resize(self, entry: _Entry, nbytes: int) -> None:
        self._counters(entry).add(entry.label, nbytes - entry.nbytes)
        entry.nbytes, entry.changed, entry.always_there = nbytes, self._clock, False

    def _relabel(self, entry: _Entry, kind: str | None = None, saved: int | None = None) -> None:
        old = entry.label
        if kind is not None:
            entry.kind = kind
        if saved is not None:
            entry.saved = saved
        if entry.label != old:
            self._counters(entry).relabel(entry, old, entry.label)
            entry.changed, entry.always_there = self._clock, False

    def _relocate(self, entry: _Entry, device: str) -> None:
        if entry.device != device:
            self._counters(entry).add(entry.label, -entry.nbytes)
            entry.device, entry.changed, entry.always_there = device, self._clock, False
            self._counters(entry).add(entry.label, entry.nbytes)

    def _work_off(self) -> None:
        while self._notes:
            with self._lock:
                if not self._notes:
                    return
                entry, died = self._notes.popleft()
                if not died:
                    self._relabel(entry, saved=entry.saved - 1)
                elif self._live.get(entry.key) is entry:
                    del self._live[entry.key]
                    self._counters(entry).add(entry.label, -entry.nbytes)
