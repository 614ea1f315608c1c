"""Published peaks of GPUs, in FLOPs per second: the base of MFU."""

import re
from dataclasses import dataclass

import torch

from meshwright.system.hardware import device_name

# Word in the name that the driver reports (first match wins) -> dense bf16 FLOP/s, and the vendor's
# document.
PEAKS: tuple[tuple[str, float, str], ...] = (
    ("H100 NVL", 835e12, "NVIDIA H100 data sheet (1,671 with sparsity)"),
    ("H100 PCIe", 756e12, "NVIDIA H100 data sheet (1,513 with sparsity)"),
    ("H100", 989e12, "NVIDIA H100 data sheet, SXM (1,979 with sparsity)"),
    ("H200 NVL", 835e12, "NVIDIA H200 data sheet (1,671 with sparsity)"),
    ("H200", 989e12, "NVIDIA H200 data sheet, SXM (1,979 with sparsity)"),
    ("GH200", 989e12, "NVIDIA GH200 data sheet (1,979 with sparsity)"),
    ("B200", 2250e12, "NVIDIA HGX B200 data sheet (4,500 with sparsity)"),
    ("A100", 312e12, "NVIDIA A100 data sheet"),
    ("L40S", 362e12, "NVIDIA L40S data sheet (733 with sparsity)"),
    ("MI300X", 1307.4e12, "AMD Instinct MI300X data sheet"),
    ("MI250X", 191.5e12, "AMD Instinct MI250X data sheet: 383, two devices a card"),
)


@dataclass(frozen=True)
class Peak:
    """Highest rate of matrix products on one device."""

    flops_per_s: float
    source: str
    """The vendor's document."""


def peak_of(device: torch.device, dtype: torch.dtype) -> Peak | None:
    """Return the published dense peak for bf16; None for other types, and devices that are not in
    the table, such as CPUs."""
    name = device_name(device)
    is_whole = not re.search(r"\bMIG\b", name)  # otherwise it is a slice of the named device
    for words, flops_per_s, source in PEAKS if dtype == torch.bfloat16 and is_whole else ():
        if re.search(rf"\b{words}\b", name):
            return Peak(flops_per_s, source)
    return None
