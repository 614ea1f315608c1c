"""Devices by name: memory, rates and links, each with its source. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.system.errors import check
from meshwright.system.machine import machine_bytes

if TYPE_CHECKING:
    from meshwright.train.resolve import ResolvedJob

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """Published numbers of one device, and of a usual node of them."""

    name: str
    memory_gib: float
    """As its driver counts."""
    is_gpu: bool = True
    flops_per_s: float = 0.0
    """Dense bf16 peak; 0: not known. That of float8 is twice as much, where there is float8."""
    fp32_flops_per_s: float = 0.0
    """Peak of float32 without TF32."""
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
        return self.fp32_flops_per_s if dtype == "float32" else self.flops_per_s


DEVICES = {
    "h100": Device(
        "H100 SXM 80 GB", 79.2, True, 989e12, 67e12, 3.35e12, 450e9, 50e9, 8,
        "NVIDIA H100 data sheet; network of a DGX H100, 8 x 400 Gb/s",
    ),
    "h200": Device(
        "H200 SXM 141 GB", 139.8, True, 989e12, 67e12, 4.8e12, 450e9, 50e9, 8,
        "NVIDIA H200 data sheet; network of a DGX H200, 8 x 400 Gb/s",
    ),
    "a100": Device(
        "A100 SXM 80 GB", 79.2, True, 312e12, 19.5e12, 2.039e12, 300e9, 25e9, 8,
        "NVIDIA A100 data sheet; network of a DGX A100, 8 x 200 Gb/s",
    ),
    "b200": Device(
        "B200 180 GB", 178.4, True, 2250e12, 75e12, 8e12, 900e9, 50e9, 8,
        "NVIDIA DGX B200 data sheet; network 8 x 400 Gb/s",
    ),
    "mi300x": Device(
        "MI300X 192 GB", 191.5, True, 1307.4e12, 163.4e12, 5.3e12, 448e9, 50e9, 8,
        "AMD Instinct MI300X data sheet; network 8 x 400 Gb/s",
    ),
}  # fmt: skip


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
        total = machine_bytes() / GIB
        return Device("cpu", round(total / ranks, 2), is_gpu=False, per_node=1 << 30)
    try:
        gib = float(word)
    except ValueError:
        gib = 0.0
    fix = f"use {', '.join(DEVICES)}, cpu, or GiB of a GPU"
    check(gib > 0, "--device", word, "no such device", fix)
    return Device(f"GPU of {gib:g} GiB", gib)


Ways = tuple[float, float]
"""Of attention: forward, backward."""


@dataclass(frozen=True)
class Parts:
    """Parts of the data sheet that operators of a training step reach."""

    matmul: float
    """Of the bf16 FLOP/s, as all others but the last."""
    grouped: float
    """Matmuls of experts."""
    wide: Ways
    """Attention of heads from `WIDE` on, by the kernel that torch chooses; masked pairs left
    out."""
    narrow: Ways
    """Of narrower heads."""
    flash: Ways
    """By FlashAttention 2, and by flex attention, which was not timed."""
    memory: float
    """Of the memory's bytes/s, for operators without FLOPs."""
    source: str

    def attention(self, kernel: str, width: int) -> Ways:
        """Return the parts of a kernel for heads of `width`."""
        return self.flash if kernel == "flash" else self.wide if width >= WIDE else self.narrow


WIDE = 128

SAME = 0.45, 0.45

PUBLISHED = Parts(0.6, 0.6, SAME, SAME, SAME, 0.8, "estimated by published runs on H100s")
"""Of devices without measurements."""

HOPPER = Parts(
    0.728, 0.455, (0.59, 0.48), (0.455, 0.354), (0.32, 0.27), 0.854, "estimated by parts of an H200"
)
"""benchmarks/results/gpu.md, whose jobs chose those of matmuls and of narrow heads. An H100 has the
same chip, and slower memory."""

MEASURED = ("H100", "H200")
"""First words of the names of devices with the parts of `HOPPER`."""

SHARED = 0.87
"""Part of an operator's rate that it keeps beside collectives, in a job of several ranks: with it,
the parts of one GPU lie in the middle of published jobs (benchmarks/results/plans.md)."""

NCCL = 0.75
"""Part of the bytes/s of links and network cards that NCCL reaches."""

FLOAT8 = {"rowwise": 0.48, "tensorwise": 0.6}
"""Parts of the float8 FLOP/s that products reach. rowwise: with it and `CAST`, a measured step has
its time (gpu.md). tensorwise: not measured, by what torchao publishes."""

CAST = 1.5
"""Bytes that casts to float8 read and write, over those of a product's operands in bf16."""

FUSED = 0.5
"""Part of its bytes that a pointwise operator of a block moves, once it is compiled with its
neighbors."""

LAUNCH_S, COLLECTIVE_S = 4e-6, 20e-6
"""Least times of an operator and of a collective."""

WAIT_S = 30e-6
"""That a GPU idles when the host waits for a number: its copy, and the launch of what follows. Not
measured."""

ERRORS = {"H100": 0.15, "H200": 0.2}
"""Of an estimated step time, by the first word of a device's name: within it are the published
steps of benchmarks/results/plans.md, and the measured ones of gpu.md next to it."""


@dataclass(frozen=True)
class Rates(Device):
    """A device with the rates that a training step reaches, instead of those of its data sheet."""

    parts: Parts = PUBLISHED
    fused: float = 1.0
    """See `FUSED`."""
    kernel: str = ""
    """Of attention: "flash", or torch's choice."""
    recipe: str = ""
    """Of the products in float8."""
    imbalance: float = 1.0
    """As `simulate` takes it: it belongs to the job, and slows its ranks down."""


def parts_of(device: Device) -> Parts:
    """Return the parts of its data sheet that the device reaches."""
    return HOPPER if device.name.partition(" ")[0] in MEASURED else PUBLISHED


def estimated(
    device: Device,
    *,
    is_compiled: bool = True,
    is_shared: bool = False,
    kernel: str = "",
    recipe: str = "rowwise",
    imbalance: float = 1.0,
) -> Rates:
    """Return the rates that a device's data sheet and `parts_of` give.

    Args:
        is_shared: the job has several ranks.
        kernel, recipe, imbalance: as in `Rates`.
    """
    parts = parts_of(device)
    kept = SHARED if is_shared and parts is HOPPER else 1.0
    reached = {
        "flops_per_s": parts.matmul * kept,
        "fp32_flops_per_s": parts.matmul * kept,
        "bytes_per_s": parts.memory * kept,
        "link_bytes_per_s": NCCL,
        "network_bytes_per_s": NCCL,
    }
    values = vars(device) | {name: part * getattr(device, name) for name, part in reached.items()}
    values |= {"parts": parts, "kernel": kernel, "recipe": recipe, "imbalance": imbalance}
    return Rates(**values, fused=FUSED if is_compiled else 1.0)


def rates_of(job: ResolvedJob, device: Device, imbalance: float = 1.0) -> Rates:
    """Return the rates of a job on the device."""
    config = job.config
    is_flash = config.training.attention_kernel == "flash" or config.training.deterministic
    return estimated(
        device,
        is_compiled=config.compile.is_on,
        is_shared=job.dims.num_ranks > 1,
        kernel="flash" if is_flash else "",
        recipe=config.float8.recipe_name,
        imbalance=imbalance,
    )


def error_of_time(device: Device) -> float | None:
    """Return the error of an estimated step time, as a part of it; None: no run on this device was
    compared."""
    return ERRORS.get(device.name.split()[0])


@dataclass(frozen=True)
class Overhead:
    """Memory besides tensors, modeled: a range in bytes."""

    what: str
    low: float
    high: float


FRAGMENTED = 0.05
"""Most that the CUDA allocator loses between blocks, as a part of the peak."""

MALLOC_KEEPS, OF_LASTING = 1.5, {"parameters": 0.0, "optimizer": 0.0, "activations": 0.25}
"""Most that malloc keeps of freed tensors, with the launcher's thresholds, as a part of the most
that there is of a purpose. Of those that come and go between others 1.0 to 1.6 were seen with gloo,
whose own buffers do so as well (benchmarks/results/plans.md)."""


def non_tensor_memory(
    resolved: ResolvedJob, device: Device, peak: int, num_groups: int, most: Mapping[str, float]
) -> list[Overhead]:
    """Model the memory that a rank of `plan` needs besides its tensors.

    Args:
        peak: bytes of tensors. Rounded up as the CUDA allocator does, they are 1e-6 more.
        num_groups: process groups of more than one rank, each with an NCCL communicator.
        most: bytes of each purpose over the step; for CPUs.
    """
    mib = 2**20
    if device.is_gpu:
        return [
            Overhead("allocator: fragmentation", 0.0, FRAGMENTED * peak),
            Overhead("CUDA context and kernels", 0.4 * GIB, 0.8 * GIB),
            Overhead("cuBLAS and attention workspaces", 32 * mib, 256 * mib),
            Overhead("NCCL", num_groups * 50 * mib, num_groups * 400 * mib),
        ]
    kept = sum(OF_LASTING.get(name, MALLOC_KEEPS) * size for name, size in most.items())
    found = [
        Overhead("Python and torch", 0.4 * GIB, 1.0 * GIB),
        Overhead("freed blocks that malloc keeps", 0.0, kept),
    ]
    checkpoint = resolved.config.checkpoint
    saved = sum(resolved.least_bytes.get(name, 0.0) for name in ("weights", "optimizer"))
    if checkpoint.enable and checkpoint.async_mode == "thread" and saved:
        size = float(round(saved))
        found.append(Overhead("copy of an asynchronous save", size, size))
    return found


def verdict(device: Device, peak: int, modelled: list[Overhead]) -> str:
    """Return "fits", "tight" (it depends on the modeled part) or "doesn't fit"."""
    memory = device.memory_gib * GIB
    if peak + sum(part.high for part in modelled) <= memory:
        return "fits"
    return "tight" if peak + sum(part.low for part in modelled) <= memory else "does not fit"
