"""Devices by name: memory, rates and links, each with its source. Free of torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from meshwright.errors import check

GIB = 2**30
OTHER_FORMS = {"nvl", "pcie"}
"""Words of drivers' names, as "NVIDIA H100 PCIe": slower than those of the table."""


@dataclass(frozen=True)
class Device:
    """Published figures of one device, and of a usual node of them."""

    name: str
    memory_gib: float
    """As its driver counts."""
    is_gpu: bool = True
    flops_per_s: float = 0.0
    """Dense bf16 peak; 0: not known."""
    bytes_per_s: float = 0.0
    """Of its memory."""
    link_bytes_per_s: float = 0.0
    """To others of its node, one direction."""
    network_bytes_per_s: float = 0.0
    """To other nodes, one direction, per device."""
    per_node: int = 8
    source: str = ""

    def peak(self, dtype: str) -> float:
        """Return its FLOP/s in bfloat16 or float32."""
        return self.flops_per_s / (16 if dtype == "float32" else 1)  # without TF32

    def may_be(self, driver_name: str) -> bool:
        """Return whether its driver may call it so, as "NVIDIA H100 80GB HBM3": true of a device
        that is known by its memory alone."""
        words = {*re.split(r"\W+", driver_name.lower())}
        is_known = self.flops_per_s > 0
        return not is_known or (self.name.split()[0].lower() in words and not words & OTHER_FORMS)


DEVICES = {
    "h100": Device(
        "H100 SXM 80 GB", 79.2, True, 989e12, 3.35e12, 450e9, 50e9, 8,
        "NVIDIA H100 data sheet; network of a DGX H100, 8 x 400 Gb/s",
    ),
    "h200": Device(
        "H200 SXM 141 GB", 139.8, True, 989e12, 4.8e12, 450e9, 50e9, 8,
        "NVIDIA H200 data sheet; network of a DGX H200, 8 x 400 Gb/s",
    ),
    "a100": Device(
        "A100 SXM 80 GB", 79.2, True, 312e12, 2.039e12, 300e9, 25e9, 8,
        "NVIDIA A100 data sheet; network of a DGX A100, 8 x 200 Gb/s",
    ),
    "b200": Device(
        "B200 180 GB", 178.4, True, 2250e12, 8e12, 900e9, 50e9, 8,
        "NVIDIA DGX B200 data sheet; network 8 x 400 Gb/s",
    ),
    "mi300x": Device(
        "MI300X 192 GB", 191.5, True, 1307.4e12, 5.3e12, 448e9, 50e9, 8,
        "AMD Instinct MI300X data sheet; network 8 x 400 Gb/s",
    ),
}  # fmt: skip
NAMES = (*DEVICES, "cpu")


def find_device(word: str, ranks: int = 1) -> Device:
    """Return the device that --device names: one of the table, "cpu", or GiB of some GPU.

    Args:
        ranks: of the job. On CPUs all of them run on this machine, and share its memory evenly.

    Raises:
        ConfigError: if it is neither.
    """
    if word in DEVICES:
        return DEVICES[word]
    if word == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
        return Device("cpu", round(total / ranks, 2), is_gpu=False, per_node=1 << 30)
    try:
        gib = float(word)
    except ValueError:
        gib = 0.0
    check(gib > 0, "--device", word, "no such device", f"use {', '.join(NAMES)}, or GiB of a GPU")
    return Device(f"GPU of {gib:g} GiB", gib)


@dataclass(frozen=True)
class Overhead:
    """Memory besides tensors, modelled: a range in bytes."""

    what: str
    low: float
    high: float


def overheads(device: Device, peak: int, rounded: int, num_groups: int) -> list[Overhead]:
    """Model a rank's memory besides its tensors.

    Args:
        peak, rounded: bytes of tensors, as they are, and as the CUDA allocator rounds them.
        num_groups: process groups of more than one rank, each with an NCCL communicator.
    """
    if not device.is_gpu:
        return [Overhead("Python and torch", 0.4 * GIB, 1.0 * GIB)]
    mib = 2**20
    return [
        Overhead("allocator: rounding", rounded - peak, rounded - peak),
        Overhead("allocator: fragmentation", 0.0, 0.05 * peak),
        Overhead("CUDA context and kernels", 0.4 * GIB, 0.8 * GIB),
        Overhead("cuBLAS and attention workspaces", 32 * mib, 256 * mib),
        Overhead("NCCL", num_groups * 50 * mib, num_groups * 400 * mib),
    ]


def verdict(device: Device, peak: int, modelled: list[Overhead]) -> str:
    """Return "fits", "tight" (it depends on the modelled part) or "does not fit"."""
    memory = device.memory_gib * GIB
    if peak + sum(part.high for part in modelled) <= memory:
        return "fits"
    return "tight" if peak + sum(part.low for part in modelled) <= memory else "does not fit"
