"""Machines that are not here: kinds of GPUs, with figures from their datasheets, in a number of nodes.

Rates are bytes per second in one direction, in powers of 1000; datasheets give the sum of both directions.
Imports no torch.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from typing import Final

from pagewick.errors import ConfigError
from pagewick.option_checks import parse_bytes

_GIB: Final = 2**30
_GB: Final = 10**9
# x16, one direction. NVIDIA's datasheets give both directions: 32, 64 and 128 GB/s.
_PCIE3, _PCIE4, _PCIE5 = 16 * _GB, 32 * _GB, 64 * _GB
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_MAX_RANKS: Final = 4096


@dataclass(frozen=True, slots=True)
class GpuKind:
    """memory: bytes. The others are rates: bandwidth of that memory; host_link to main memory; gpu_link to GPUs of the
    same node; network from one GPU to other nodes, None if no common machine has one.
    """

    name: str
    memory: int
    bandwidth: int
    host_link: int
    gpu_link: int
    network: int | None = None


@dataclass(frozen=True, slots=True)
class Cluster:
    """num_nodes machines, each with num_gpus GPUs of one kind; every GPU is a rank."""

    kind: GpuKind
    num_gpus: int
    num_nodes: int = 1

    @property
    def num_ranks(self) -> int:
        return self.num_gpus * self.num_nodes

    @property
    def network(self) -> int:
        """Rate from one GPU to other nodes; 0 if there is only one node."""
        return self.kind.network or 0 if self.num_nodes > 1 else 0


# Memory is in GiB, as stacks and chips are. GDDR that corrects errors keeps a sixteenth from programs.
_KINDS: Final = (
    # NVIDIA DGX B200 datasheet: 8 x 180 GB, 64 TB/s; NVLink 14.4 TB/s; PCIe 5; ConnectX-7, 400 Gb/s for each GPU.
    GpuKind("B200", 180 * _GIB, 8000 * _GB, _PCIE5, 900 * _GB, 50 * _GB),
    # NVIDIA H200 datasheet, SXM: 141 GB, 4.8 TB/s; NVLink 900 GB/s, PCIe 5 128 GB/s. DGX H200: ConnectX-7.
    GpuKind("H200", 141 * _GIB, 4800 * _GB, _PCIE5, 450 * _GB, 50 * _GB),
    # NVIDIA H100 datasheet, SXM: 80 GB, 3.35 TB/s; NVLink 900 GB/s, PCIe 5 128 GB/s. DGX H100: ConnectX-7.
    GpuKind("H100", 80 * _GIB, 3350 * _GB, _PCIE5, 450 * _GB, 50 * _GB),
    # NVIDIA A100 datasheet, SXM: 80 GB, 2,039 GB/s; NVLink 600 GB/s, PCIe 4 64 GB/s. DGX A100: 200 Gb/s for each GPU.
    GpuKind("A100-80G", 80 * _GIB, 2039 * _GB, _PCIE4, 300 * _GB, 25 * _GB),
    # The same datasheet's first edition: 40 GB, 1,555 GB/s.
    GpuKind("A100-40G", 40 * _GIB, 1555 * _GB, _PCIE4, 300 * _GB, 25 * _GB),
    # NVIDIA V100 datasheet, SXM2: 32 GB, 900 GB/s; NVLink 300 GB/s, PCIe 3 32 GB/s.
    GpuKind("V100-32G", 32 * _GIB, 900 * _GB, _PCIE3, 150 * _GB),
    # NVIDIA L40S datasheet: 48 GB GDDR6 with ECC, 864 GB/s; PCIe 4 64 GB/s, no NVLink.
    GpuKind("L40S", 45 * _GIB, 864 * _GB, _PCIE4, _PCIE4),
    # NVIDIA L4 datasheet: 24 GB GDDR6 with ECC, 300 GB/s; PCIe 4 64 GB/s.
    GpuKind("L4", 24 * _GIB * 15 // 16, 300 * _GB, _PCIE4, _PCIE4),
    # NVIDIA A10 datasheet: 24 GB GDDR6 with ECC, 600 GB/s; PCIe 4 64 GB/s.
    GpuKind("A10", 24 * _GIB * 15 // 16, 600 * _GB, _PCIE4, _PCIE4),
    # NVIDIA T4 datasheet: 16 GB GDDR6 with ECC, 300 GB/s; PCIe 3 32 GB/s.
    GpuKind("T4", 15 * _GIB, 300 * _GB, _PCIE3, _PCIE3),
    # NVIDIA RTX 6000 Ada datasheet: 48 GB GDDR6 with ECC, 960 GB/s; PCIe 4 x16.
    GpuKind("RTX6000-Ada", 45 * _GIB, 960 * _GB, _PCIE4, _PCIE4),
    # NVIDIA's specifications of the GeForce RTX 5090, 4090 and 3090: 512 bits at 28 Gb/s, 384 at 21 and at 19.5.
    GpuKind("RTX5090", 32 * _GIB, 1792 * _GB, _PCIE5, _PCIE5),
    GpuKind("RTX4090", 24 * _GIB, 1008 * _GB, _PCIE4, _PCIE4),
    GpuKind("RTX3090", 24 * _GIB, 936 * _GB, _PCIE4, _PCIE4),
)


def kind_names() -> list[str]:
    """Return the kinds that are known by name."""
    return [kind.name for kind in _KINDS]


def parse_cluster(text: str, num_nodes: int = 1, network: int | None = None) -> Cluster:
    """Parse the GPUs of each node, such as `8xH200`, `8xRTX4090:48GiB:1008GB` or `2xMine:64GiB:2TB:64GB:200GB`.

    The parts are name, memory, its bandwidth, and rates to the host and to the other GPUs; if these are missing, they
    are those of the named kind, else of PCIe 4 x16. network: rate from one GPU to other nodes. Raises ConfigError.
    """
    counted = re.fullmatch(r"([0-9]{1,6})x(.*)", text)
    num_gpus, rest = (int(counted[1]), counted[2]) if counted is not None else (1, text)
    if not 1 <= num_gpus * num_nodes <= _MAX_RANKS:
        raise ConfigError(f"--gpus {text} with --nodes {num_nodes}: from 1 to {_MAX_RANKS} GPUs can be planned")
    kind = _kind_of(rest, text)
    kind = replace(kind, network=network) if network is not None else kind
    if num_nodes > 1 and kind.network is None:
        raise ConfigError(
            f"how fast {kind.name} reach other nodes is not known\n"
            "  say it with --network-bandwidth 50GB: bytes per second of one GPU, in one direction"
        )
    return Cluster(kind, num_gpus, num_nodes)


def parse_rate(text: str) -> int:
    """Parse bytes per second: `4.8TB`, `1008GB/s` or a plain number; units are powers of 1000. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)b?(?:/s)?\s*", text, re.IGNORECASE)
    rate = round(float(match[1]) * _UNITS[match[2].lower()]) if match is not None else 0
    if rate < 1:
        raise ConfigError(f"{text!r} is not a bandwidth; write bytes per second with a unit, for example 50GB or 4.8TB")
    return rate


def _kind_of(text: str, whole: str) -> GpuKind:
    name, *numbers = text.split(":")
    known = next((kind for kind in _KINDS if _plain(kind.name) == _plain(name)), None)
    if not numbers and known is not None:
        return known
    if not 2 <= len(numbers) <= 4 or not name:
        raise ConfigError(
            f"--gpus {whole}: {_unknown(name) if not numbers else 'memory and bandwidth are needed'}\n"
            "  write NAME:MEMORY:BANDWIDTH for another kind, for example 8xMine:48GiB:1008GB"
        )
    memory, rates = parse_bytes(numbers[0]), [parse_rate(number) for number in numbers[1:]]
    if memory < 1:
        raise ConfigError(f"--gpus {whole}: a GPU without memory")
    base = known or GpuKind(name, memory, rates[0], _PCIE4, _PCIE4)
    host_link, gpu_link = (rates[1:2] or [base.host_link])[0], (rates[2:3] or [base.gpu_link])[0]
    return GpuKind(name, memory, rates[0], host_link, gpu_link, base.network)


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(_plain(name), [_plain(kind) for kind in kind_names()], n=3, cutoff=0.7)
    shown = [kind for kind in kind_names() if _plain(kind) in near or _plain(kind).startswith(_plain(name) or "?")]
    return f"there is no kind {name!r} here; {'near' if shown else 'known'}: {', '.join(shown or kind_names())}"


def _plain(name: str) -> str:
    """Return a name without the parts that people write in several ways."""
    return re.sub(r"[-_ ]|^(nvidia)?[-_ ]?(geforce)?[-_ ]?(rtx)?", "", name.lower().removesuffix("b"))
