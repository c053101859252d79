"""What a run writes down: JSON for machines (keys in one place), and how bytes are shown."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

KINDS = ("parameters", "gathered", "gradients", "optimizer", "activations", "buffers")


def machine() -> dict:
    """What the numbers of a file were measured on."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cores": cores,
        "gpus": [torch.cuda.get_device_name(i) for i in range(gpus)],
    }


def document(rows: list[dict], **more) -> dict:
    """The frame that every ``--json`` file has: versions, machine, rows."""
    import torch

    from minidist import __version__

    return {
        "minidist": __version__,
        "torch": torch.__version__,
        "machine": machine(),
        "rows": rows,
        **more,
    }


def write_json(path: str | Path, content: dict) -> None:
    """Write aside, then rename: a reader never sees half a file."""
    path = Path(path)
    aside = path.with_name(path.name + f".{os.getpid()}")
    aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)


def writable(path: str | Path | None) -> str | None:
    """Why nothing can be written there, in words, or None: to be asked before a long run."""
    if path is None:
        return None
    path = Path(path)
    if path.is_dir():
        return f"{path} is a folder, not a file"
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"cannot write to {path}"
    return None


def megabytes(count: float) -> str:
    """Bytes in MB (10**6), three digits: "0.14", "13.2", "132"."""
    value = count / 1e6
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
