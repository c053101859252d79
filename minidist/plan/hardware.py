"""Accelerators, the links between them, and what a collective costs on them.

Rates are bytes per second in one direction, memory is bytes (1e9 per GB), FLOP/s are dense. Each
accelerator has one *efficiency*: the fraction of its peak FLOP/s that a large matrix product
sustains, and of its memory bandwidth that an elementwise kernel does. That is the only constant
fitted to training runs; `validate.py` says to which, and shows the errors everywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path


@dataclass(frozen=True)
class Accelerator:
    """One GPU. `flops` maps a precision to peak FLOP/s; `source` says where the figures are
    from."""

    name: str
    flops: dict
    memory: float
    memory_bandwidth: float
    efficiency: float
    nvlink: float = 0.0  # bytes/s to its peers in the node; 0: they talk over PCIe
    pcie: float = 31e9  # bytes/s to the host
    calibrated: bool = False
    source: str = ""


@dataclass(frozen=True)
class Link:
    """How fast one GPU talks to its peers over one kind of wire.

    `bandwidth`: per GPU, one direction. `efficiency`: the share of it that large messages reach.
    `ramp`: bytes on the wire at which half of that is reached; small messages pay it as a constant
    time. `hop`: latency of each step of a ring.
    """

    bandwidth: float
    efficiency: float
    hop: float
    ramp: float

    def seconds(self, wire_bytes: float, hops: int) -> float:
        return hops * self.hop + (wire_bytes + self.ramp) / (self.bandwidth * self.efficiency)


@dataclass(frozen=True)
class Cluster:
    """`gpus` accelerators, `gpus_per_node` to a node, each with its own port to the network.

    `rails` is how many of a node's ports one ring uses: all of them with a current NCCL; 1 for a
    software that leaves the others idle. Ranks are placed tensor parallel first (neighbours in a
    node), then data parallel, then pipeline.
    """

    accelerator: Accelerator
    gpus: int
    gpus_per_node: int
    intra: Link
    inter: Link
    rails: int | None = None
    cpu_memory: float = 0.0  # bytes per node, 0: unknown
    notes: tuple = field(default=())

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    def collective_seconds(self, op: str, size: float, ranks: int, stride: int = 1) -> float:
        """Time of a ring `op` over an array of `size` bytes in total.

        The group is `ranks` GPUs, `stride` apart: stride 1 fills nodes, a stride of a whole node
        puts every rank on another node. Latency is per hop, inside and between nodes (the constants
        of torch's DTensor cost model); bandwidth is that of the slowest piece of the ring. A node
        that holds r members of the group feeds the ring through r of its ports.
        """
        if ranks <= 1 or size == 0:
            return 0.0
        factor = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}[op]
        wire = factor * (ranks - 1) / ranks * size
        members = max(1, min(ranks, self.gpus_per_node // stride))  # of this group, in one node
        nodes = -(-ranks // members)
        if nodes == 1:
            return BASE_LATENCY + self.intra.seconds(wire, factor * (ranks - 1))
        hops = factor * (ranks - nodes) * self.intra.hop + factor * nodes * self.inter.hop
        ports = min(members, self.rails or members)
        across = wire / ports
        slowest = self.inter.seconds(across, 0)
        if members > 1:
            slowest = max(slowest, self.intra.seconds(wire, 0))
        return BASE_LATENCY + hops + slowest

    def send_seconds(self, size: float, stride: int) -> float:
        """Time to send `size` bytes to the GPU `stride` ranks away."""
        if size == 0:
            return 0.0
        link = self.intra if stride < self.gpus_per_node and self.gpus > stride else self.inter
        return BASE_LATENCY + link.hop + size / (link.bandwidth * link.efficiency)


# torch's DTensor cost model (distributed/tensor/_collective_utils.py): 6.6 us to start, 0.6 us per
# hop inside a node, 2.7 us between nodes.
BASE_LATENCY = 6.6e-6
INTRA_HOP = 0.6e-6
INTER_HOP = 2.7e-6

# 8 A100 reach 235 of 300 GB/s with nccl-tests (stas00/ml-engineering). One ramp cannot follow
# NCCL's changes of algorithm: with 12 MB the 20 published sizes come out within a third from 256 kB
# on, and up to half too slow below.
NVLINK_EFFICIENCY = 0.78
NVLINK_RAMP = 12e6
# "80-90 % of the advertised speed" (the same source).
NETWORK_EFFICIENCY = 0.85
NETWORK_RAMP = 1e6

_GENERATION = "assumed like the calibrated card of its generation"

ACCELERATORS: dict[str, Accelerator] = {
    a.name: a
    for a in (
        Accelerator("v100", {"fp16": 125e12, "bf16": 125e12, "fp32": 15.7e12}, 32e9, 0.9e12, 0.53,
                    150e9, 15.8e9, True, "ml-engineering; HBM bandwidth: vendor sheet"),
        Accelerator("a100", {"bf16": 312e12, "fp32": 19.5e12}, 80e9, 2.0e12, 0.76, 300e9, 31e9,
                    True, "ml-engineering TFLOPS, HBM and NVLink tables"),
        Accelerator("a100-40gb", {"bf16": 312e12, "fp32": 19.5e12}, 40e9, 1.555e12, 0.76, 300e9,
                    31e9, True, "ml-engineering; HBM: vendor sheet"),
        Accelerator("h100", {"bf16": 989e12, "fp8": 1979e12, "fp32": 67e12}, 80e9, 3.35e12, 0.58,
                    450e9, 63e9, True, "ml-engineering TFLOPS, HBM and NVLink tables"),
        Accelerator("h100-96gb", {"bf16": 989e12, "fp8": 1979e12, "fp32": 67e12}, 96e9, 2.4e12,
                    0.58, 450e9, 63e9, True, "torchtitan benchmarks: HBM2e 2.4 TB/s, 500 W"),
        Accelerator("h100-pcie", {"bf16": 756e12, "fp8": 1513e12, "fp32": 51e12}, 80e9, 2.0e12,
                    0.58, 0.0, 63e9, False, f"ml-engineering; {_GENERATION}"),
        Accelerator("h200", {"bf16": 989e12, "fp8": 1979e12, "fp32": 67e12}, 141e9, 4.8e12, 0.58,
                    450e9, 63e9, False, f"ml-engineering; {_GENERATION}"),
        Accelerator("b200", {"bf16": 2250e12, "fp8": 4500e12, "fp32": 80e12}, 180e9, 8.0e12, 0.5,
                    900e9, 63e9, False, "ml-engineering; efficiency assumed"),
        Accelerator("l40s", {"bf16": 362e12, "fp8": 733e12, "fp32": 91.6e12}, 48e9, 0.864e12, 0.5,
                    0.0, 31e9, False, "ml-engineering; memory: vendor sheet; efficiency assumed"),
        Accelerator("rtx4090", {"bf16": 165.2e12, "fp8": 330e12, "fp32": 82.6e12}, 24e9, 1.008e12,
                    0.6, 0.0, 31e9, False, "third-party tables; efficiency assumed"),
        Accelerator("rtx3090", {"bf16": 71e12, "fp32": 35.6e12}, 24e9, 0.936e12, 0.6, 0.0, 31e9,
                    False, "vendor sheet; efficiency assumed"),
    )
}  # fmt: skip

# Network port per GPU of the usual servers, bytes/s: HDR (200 Gbit/s), NDR (400), XDR (800).
_PORTS = {"v100": 12.5e9, "a100": 25e9, "h100": 50e9, "h200": 50e9, "b200": 100e9}


def accelerator(name: str) -> Accelerator:
    """A known accelerator by name (``a100``, ``A100-40GB``...), or from a ``.toml`` file.

    The file has ``name``, ``memory_gb``, ``bf16_tflops``, ``memory_bandwidth_gbs`` and, if wanted,
    ``efficiency``, ``nvlink_gbs``, ``pcie_gbs``, ``fp8_tflops``. ValueError for an unknown name.
    """
    if name.endswith(".toml"):
        return _from_toml(Path(name))
    found = ACCELERATORS.get(name.lower())
    if found is None:
        known = ", ".join(ACCELERATORS)
        raise ValueError(f"unknown GPU {name!r}; known: {known}; or a .toml file")
    return found


def _from_toml(path: Path) -> Accelerator:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        raise ValueError("a .toml file needs Python 3.11 or newer") from None
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"no such hardware file: {path}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    needed = ("name", "memory_gb", "bf16_tflops", "memory_bandwidth_gbs")
    missing = [key for key in needed if key not in values]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    for key, value in values.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # Without NVLink the cards talk over PCIe: 0 is possible there.
        if key != "name" and not (number and (value > 0 or (value == 0 and key == "nvlink_gbs"))):
            raise ValueError(f"{path}: {key} must be a number above 0, got {value!r}")
    flops = {"bf16": values["bf16_tflops"] * 1e12}
    if "fp8_tflops" in values:
        flops["fp8"] = values["fp8_tflops"] * 1e12
    return Accelerator(
        values["name"], flops, values["memory_gb"] * 1e9, values["memory_bandwidth_gbs"] * 1e9,
        values.get("efficiency", 0.55), values.get("nvlink_gbs", 0.0) * 1e9,
        values.get("pcie_gbs", 31.0) * 1e9, source=str(path),
    )  # fmt: skip


def cluster(
    gpu: str | Accelerator = "h100",
    gpus: int = 8,
    *,
    gpus_per_node: int = 8,
    port: float | None = None,
    rails: int | None = None,
    memory: float | None = None,
    cpu_memory: float = 0.0,
) -> Cluster:
    """`gpus` of one kind wired as such servers usually are.

    `port`: bytes/s of each GPU's network port (default: that of the usual server, 12.5e9 where none
    is known). `memory`: bytes per GPU instead of the accelerator's. Raises ValueError.
    """
    if gpus < 1:
        raise ValueError(f"gpus must be at least 1, got {gpus}")
    if gpus_per_node < 1:
        raise ValueError(f"gpus per node must be at least 1, got {gpus_per_node}")
    if gpus > gpus_per_node and gpus % gpus_per_node:
        raise ValueError(f"{gpus} GPUs do not fill nodes of {gpus_per_node}")
    for name, size in (("network", port), ("memory", memory)):
        if size is not None and not size > 0:
            raise ValueError(f"{name} must be above 0")
    card = accelerator(gpu) if isinstance(gpu, str) else gpu
    if memory is not None:
        card = replace(card, memory=memory)
    if port is None:
        port = _PORTS.get(card.name.split("-")[0], 12.5e9)
    # Over PCIe every byte crosses the host bridge twice when two GPUs exchange at once.
    intra = (
        Link(card.nvlink, NVLINK_EFFICIENCY, INTRA_HOP, NVLINK_RAMP)
        if card.nvlink
        else Link(card.pcie, 0.5, INTER_HOP, NETWORK_RAMP)
    )
    inter = Link(port, NETWORK_EFFICIENCY, INTER_HOP, NETWORK_RAMP)
    return Cluster(card, gpus, gpus_per_node, intra, inter, rails, cpu_memory)
