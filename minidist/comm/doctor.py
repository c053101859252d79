"""What this machine can run: the facts that decide it, and a short test that really does it.

Each line of the examination has a judgement: ok, note or problem.
Nothing here needs a GPU, and CUDA is asked only when a driver is there.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from importlib import metadata
from typing import NamedTuple

OK, NOTE, PROBLEM = "ok", "note", "problem"


class Line(NamedTuple):
    what: str
    value: str
    judgement: str = OK
    advice: str = ""


def examine() -> list[Line]:
    """Cores, memory, shared memory, limits, network, GPUs and versions, without starting a rank."""
    import torch

    return [
        *_versions(torch),
        *_processors(),
        *_memory(),
        *_limits(),
        *_network(),
        *_gpus(torch),
    ]


def self_test(ranks: int = 4) -> list[Line]:
    """Start ranks, reduce, shard, pass a message and train a step; a few seconds."""
    from minidist.comm.launch import RankFailure, Ranks

    started = time.perf_counter()
    try:
        with Ranks(ranks, timeout=60) as standing:
            lines = [Line(f"start {ranks} ranks", f"{time.perf_counter() - started:.1f} s")]
            started = time.perf_counter()
            differences = standing.run(_small_training)
            seconds = time.perf_counter() - started
    except (RankFailure, OSError, RuntimeError) as error:
        text = str(error).split("\n")[0]
        return [Line("self-test", text, PROBLEM, "the first lines above say what is missing")]
    worst = max(differences)
    judgement = OK if worst < 1e-12 else PROBLEM
    lines.append(Line("collectives, ZeRO step", f"{seconds:.1f} s", OK))
    lines.append(Line("difference from one process", f"{worst:.1e}", judgement))
    return lines


def _small_training() -> float:
    import torch

    from minidist.comm import collectives as coll
    from minidist.parallel.zero import ZeroOptimizer

    rank, n = coll.rank(), coll.world_size()
    torch.manual_seed(0)
    serial, model = (torch.nn.Linear(8, 8).double() for _ in range(2))
    model.load_state_dict(serial.state_dict())
    x = torch.randn(4 * n, 8, dtype=torch.float64)
    zero = ZeroOptimizer(model.parameters(), torch.optim.SGD, stage=2, lr=0.1)
    plain = torch.optim.SGD(serial.parameters(), lr=0.1)
    serial(x).pow(2).mean().backward()
    model(x.chunk(n)[rank]).pow(2).mean().backward()
    plain.step()
    zero.step()
    if n > 1:
        passed = coll.isend(torch.full((2,), float(rank)), (rank + 1) % n)
        coll.recv(torch.empty(2), (rank - 1) % n)
        passed.wait()
    pairs = zip(model.parameters(), serial.parameters(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


def _versions(torch) -> list[Line]:
    lines = [
        Line("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        Line("python", platform.python_version(), *_at_least(sys.version_info[:2], (3, 10))),
        Line("torch", torch.__version__, *_at_least(_numbers(torch.__version__), (2, 6))),
    ]
    uses = {"numpy": "the core", "cloudpickle": "functions from notebooks",
            "typer": "the command line", "jupyterlab": "the chapters"}  # fmt: skip
    for package, use in uses.items():
        try:
            lines.append(Line(package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            lines.append(Line(package, "missing", NOTE, f"needed for {use}"))
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        lines.append(Line("gloo", "missing", PROBLEM, "this torch cannot talk between processes"))
    return lines


def _processors() -> list[Line]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if cores >= 4:
        return [Line("cores", str(cores))]
    return [
        Line("cores", str(cores), NOTE, "4 ranks share them: times say little, bytes are exact")
    ]


def _memory() -> list[Line]:
    lines = []
    try:
        pages, size = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        free = pages * size
        small = (NOTE, "4 ranks need about 1 GB") if free < 2**30 else (OK, "")
        lines.append(Line("free memory", _gib(free), *small))
    except (ValueError, OSError, AttributeError):
        pass
    limit = _control_group_limit()
    if limit is not None:
        lines.append(Line("memory limit", _gib(limit), NOTE, "of this container"))
    for what, path in (("shared memory", "/dev/shm"), ("temporary files", tempfile.gettempdir())):
        if os.path.isdir(path):
            free = shutil.disk_usage(path).free
            small = (NOTE, f"{path} is nearly full") if free < 2**28 else (OK, "")
            lines.append(Line(what, f"{_gib(free)} free in {path}", *small))
    return lines


def _control_group_limit() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 2**60:
            return int(text)
    return None


def _limits() -> list[Line]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = (NOTE, "raise it with `ulimit -n 4096`") if 0 < files < 512 else (OK, "")
    return [Line("open files", str(files), *few)]


def _network() -> list[Line]:
    lines = []
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            probe.listen()
            with socket.create_connection(probe.getsockname(), timeout=2):
                pass
        lines.append(Line("loopback", "127.0.0.1 answers"))
    except OSError as error:
        lines.append(Line("loopback", str(error), PROBLEM, "local ranks cannot reach each other"))
    names = [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []
    lines.append(Line("interfaces", ", ".join(names) or "unknown"))
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = os.environ.get(variable)
        if wanted and not any(name.startswith(wanted.lstrip("^=")) for name in names):
            lines.append(Line(variable, wanted, PROBLEM, "there is no such interface here"))
    return lines


def _gpus(torch) -> list[Line]:
    if not torch.cuda.is_available():
        return [Line("GPU", "none", NOTE, "everything runs on the CPU with gloo")]
    lines = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        lines.append(Line(f"GPU {index}", f"{found.name}, {_gib(found.total_memory)}"))
    if torch.distributed.is_nccl_available():
        lines.append(Line("NCCL", ".".join(map(str, torch.cuda.nccl.version()))))
    else:
        lines.append(Line("NCCL", "missing", PROBLEM, "GPUs would talk through the host"))
    return lines


def _at_least(have: tuple, want: tuple) -> tuple[str, str]:
    text = ".".join(map(str, want))
    return (OK, "") if have >= want else (PROBLEM, f"needs {text} or newer")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
