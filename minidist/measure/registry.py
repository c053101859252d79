"""Which measurements are open, so that `tag`, `span` and the hooks find them without being told.

An event belongs to the measurements that its own thread opened. A thread that opened none
(autograd's device threads, a communication thread) reports to all of them.
"""

from __future__ import annotations

import threading

measurements: dict[int, list] = {}  # thread id -> its open measurements, outermost first
_lock = threading.Lock()


def add(measurement) -> bool:
    """Returns whether it is the first one open in the whole process."""
    with _lock:
        first = not measurements
        measurements.setdefault(threading.get_ident(), []).append(measurement)
        return first


def remove(measurement) -> bool:
    """Returns whether it was the last one open in the whole process."""
    with _lock:
        for thread, opened in list(measurements.items()):
            if measurement in opened:
                opened.remove(measurement)
                if not opened:
                    del measurements[thread]
        return not measurements


def here() -> list:
    """The measurements that an event of the calling thread belongs to."""
    if not measurements:
        return []
    return list(measurements.get(threading.get_ident()) or everywhere())


def gradient_hooks(parameter) -> list:
    """The hooks that run when the parameter's gradient is complete, without those that measure.

    For strategies that look whether a parameter has hooks: being observed must not change anything.
    """
    hooks = (parameter._post_accumulate_grad_hooks or {}).values()
    return [hook for hook in hooks if not getattr(hook, "minidist_observer", False)]


def everywhere() -> list:
    """Every open measurement of the process."""
    with _lock:
        return [m for opened in measurements.values() for m in opened]
