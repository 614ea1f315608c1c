"""How many processes a job has, and this machine's devices for them. Free of torch."""

import os
import subprocess
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import check

CPU_RANKS = 2
"""On a machine without GPUs."""


CPU_INFO = Path("/proc/cpuinfo")
BF16_INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"}
"""As the Linux kernel names them; the last is ARM's."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a job."""

    per_machine: int
    machines: int
    gpus: int
    """GPUs of this machine that may be used."""

    @property
    def total(self) -> int:
        """Ranks over all machines."""
        return self.per_machine * self.machines


def count_ranks(given: Namespace) -> Ranks:
    """Return the ranks that the options --ngpu and --nnodes, or NGPU and NNODES, ask for.

    Raises:
        ConfigError: if they are no positive numbers, or this machine has fewer GPUs.
    """
    gpus = count_gpus()
    per_machine = _positive(given.ngpu, "--ngpu", "NGPU", gpus or CPU_RANKS)
    machines = _positive(given.nnodes, "--nnodes", "NNODES", 1)
    return Ranks(per_machine, machines, gpus)


def _positive(option: str | None, name: str, variable: str, default: int) -> int:
    """Return the option's value, or else the variable's, or else the default."""
    key, text = (name, option) if option is not None else (variable, os.environ.get(variable))
    if not text:
        return default
    is_positive = text.isdecimal() and int(text) > 0
    check(is_positive, key, text, "must be a positive number", f"write {key}={default}")
    return int(text)


def count_gpus() -> int:
    """Return the number of GPUs that torch will see, without the time that importing it takes."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        before_end = visible.split("-1")[0]  # -1 ends the list
        return sum(bool(device.strip()) for device in before_end.split(","))
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except OSError:  # there is no driver
        return 0
    return sum(line.startswith("GPU") for line in listed.stdout.splitlines())


def why_bf16_is_slow() -> str:
    """Return why this machine's CPU multiplies slower in bfloat16 than in float32; empty: it does
    not, or the system does not say."""
    try:
        lines = [line.partition(":") for line in CPU_INFO.read_text().splitlines()]
    except OSError:  # not Linux
        return ""
    found = {name.strip(): value.split() for name, _, value in reversed(lines)}
    flags = {*found.get("flags", []), *found.get("Features", [])}
    if flags and not BF16_INSTRUCTIONS & flags:
        return (
            "this CPU has no instructions for it, and multiplies up to 40 times faster in float32"
        )
    is_intel = found.get("vendor_id") == ["GenuineIntel"]
    if is_intel and "avx512_bf16" in flags and "amx_bf16" not in flags:
        # a Xeon of model 207: 88 GFLOP/s within a core's cache, against 175 in float32
        return "this CPU has no AMX, and multiplies up to twice as fast in float32"
    return ""
