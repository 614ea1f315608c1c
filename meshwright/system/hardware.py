"""A rank's device: its choice, its published peak, its memory, its attention kernels."""

import os
import re
import resource
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshwright.system.errors import check

GIB = 1024**3


def pick_device(local_rank: int, num_expected: int = 0) -> torch.device:
    """Return this rank's GPU (NVIDIA's, or AMD's, which torch calls cuda too), made current; else
    the CPU.

    Args:
        num_expected: GPUs that the driver lists; 0: not known.

    Raises:
        ConfigError: if torch sees none of them, or too few for this rank.
    """
    num_gpus = count_usable_gpus(num_expected)
    if num_gpus == 0:
        return torch.device("cpu")
    rule = f"torch can use {num_gpus} GPUs"
    fix = "start no more ranks than GPUs that each sees (Slurm: --gpus-per-node, not per task)"
    check(local_rank < num_gpus, "LOCAL_RANK", local_rank, rule, fix)
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def count_usable_gpus(num_expected: int) -> int:
    """Return how many GPUs torch sees.

    Args:
        num_expected: GPUs that the driver lists; 0: not known.

    Raises:
        ConfigError: if torch sees none of them.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    rule = f"torch {torch.__version__} (CUDA {torch.version.cuda}) can use none of them"
    fix = "install a torch built for the driver that nvidia-smi shows, or set CUDA_VISIBLE_DEVICES="
    fix += " to train on the CPU"
    check(num_gpus > 0 or num_expected == 0, "GPUs", num_expected, rule, fix)
    return num_gpus


def device_name(device: torch.device) -> str:
    """Return the model name, e.g. "NVIDIA H100 80GB HBM3"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    found = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else device.type


def device_id(device: torch.device) -> str:
    """Return the number by which the driver tells this GPU from all others; "" of a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def kernels(device: torch.device) -> dict[str, object]:
    """Return the choices that decide which kernels compute a job, and so how its sums are rounded:
    the CPU's instructions and threads, the GPU's libraries."""
    facts: dict[str, object] = {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        facts |= {"cuda": torch.version.cuda, "hip": torch.version.hip}
        facts["cudnn"] = torch.backends.cudnn.version()
        facts["tf32"] = torch.backends.cuda.matmul.allow_tf32
    return facts


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


def peak_of(device: torch.device, dtype: torch.dtype) -> tuple[float, str] | None:
    """Return the published dense peak for bf16 in FLOP/s, and the vendor's document; None for other
    types, and devices that aren't in the table, such as CPUs."""
    name = device_name(device)
    if dtype != torch.bfloat16 or re.search(r"\bMIG\b", name):  # a slice of the named device
        return None
    found = ((peak, source) for words, peak, source in PEAKS if re.search(rf"\b{words}\b", name))
    return next(found, None)


def has_float8(device: torch.device) -> bool:
    """Return whether the device multiplies in float8. AMD's GPUs do so in their own types."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def memory_gib(device: torch.device) -> float:
    """Memory that this rank's GPU has."""
    return torch.cuda.get_device_properties(device).total_memory / GIB


def peak_memory_gib(device: torch.device) -> float:
    """Most memory this rank held: reserved on the device, or resident where that is the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def make_deterministic() -> None:
    """Allow only algorithms that give equal bits in equal runs; call it before CUDA is used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads nothing else
    torch.use_deterministic_algorithms(True)
    # otherwise torch fills all new memory with NaN first, to show reads of it
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


RIGHT_CUDNN = 91501
"""From this version on (as an integer) cuDNN's attention is right for any length of sequence, and
torch takes it first on its own; before, for multiples of 128 only (pytorch issue 169849)."""

SDPA_BACKENDS = {
    "cudnn": "CUDNN_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}
"""torch's names of its kernels of attention."""


def attention_order(
    kernel: str, *, capability: tuple[int, int], cudnn: int, seq_len: int, is_deterministic: bool
) -> list[str]:
    """Return torch's kernels of attention in the order to try them in; `cudnn`: 0 without it."""
    is_right = cudnn >= RIGHT_CUDNN or (cudnn > 0 and seq_len % 128 == 0)
    is_fastest = capability[0] in (9, 10) and not is_deterministic
    is_first = kernel == "cudnn" or (kernel == "auto" and is_fastest)
    others = ["flash", "efficient", "math"]
    return ["cudnn", *others] if is_right and is_first else others


class ChosenAttention(NamedTuple):
    """Kernels of attention on a GPU, by their names in `SDPA_BACKENDS`."""

    order: list[str]
    """In which torch tries them."""
    kernel: str
    """The first that takes the job's heads."""
    line: str
    """For the log."""


def choose_attention(
    kernel: str, device: torch.device, seq_len: int, dtype: torch.dtype, heads: tuple[int, int, int]
) -> ChosenAttention:
    """Choose torch's kernels of attention to sequences, or their chunks, of `seq_len` tokens.

    Args:
        kernel: `training.attention_kernel`; "fa3" is activated here.
        heads: query heads, key and value heads, width.

    Raises:
        ConfigError: if the kernel that is named doesn't take such heads on this GPU.
    """
    key, fix = "training.attention_kernel", 'use "auto"'
    if kernel == "fa3":
        from torch.nn.attention import activate_flash_attention_impl

        try:
            activate_flash_attention_impl("FA3")
        except (ImportError, RuntimeError, ValueError) as error:
            check(False, key, kernel, f"torch cannot activate it: {error}", fix)
    cudnn = 0 if torch.version.hip else torch.backends.cudnn.version() or 0
    order = attention_order(
        kernel,
        capability=torch.cuda.get_device_capability(device),
        cudnn=cudnn,
        seq_len=seq_len,
        is_deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    wrong = f"cuDNN {cudnn} is not right for {seq_len} tokens: use 9.15.1, or a multiple of 128"
    check(kernel != "cudnn" or "cudnn" in order, key, kernel, wrong, fix)
    found = _first_kernel(order, device, seq_len, dtype, heads)
    wanted = {"auto": found, "fa3": "flash"}.get(kernel, kernel)
    rule = f"torch has no such kernel for {heads[0]} heads of {heads[2]} in {dtype} on this GPU"
    check(found == wanted, key, kernel, rule, fix)
    name = "FlashAttention 3" if kernel == "fa3" else found
    version = f" {cudnn}" if found == "cudnn" else ""
    return ChosenAttention(order, found, f"attention: {name}{version}")


def _first_kernel(
    order: Sequence[str],
    device: torch.device,
    seq_len: int,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
) -> str:
    """Return the first kernel of `order` that takes such heads, as torch asks them."""
    n_heads, n_kv_heads, width = heads
    if dtype == torch.float32:  # as `causal_attention` repeats them
        n_kv_heads = n_heads
    length = seq_len % 128 + 128  # its kind of length, without the memory
    q, k = (
        torch.empty(1, n, length, width, dtype=dtype, device=device, requires_grad=True)
        for n in (n_heads, n_kv_heads)
    )
    params = torch.backends.cuda.SDPAParams(q, k, k, None, 0.0, True, n_heads != n_kv_heads)
    takes: dict[str, Callable[[Any], bool]] = {
        "cudnn": torch.backends.cuda.can_use_cudnn_attention,
        "flash": torch.backends.cuda.can_use_flash_attention,
        "efficient": torch.backends.cuda.can_use_efficient_attention,
    }
    return next((name for name in order if name in takes and takes[name](params)), "math")


def ordered_attention(order: Sequence[str]) -> AbstractContextManager[Any]:
    """Have torch try these kernels of attention, in this order; none: as it does by itself.

    For the whole process: backward, which recomputes on its own threads, chooses as forward did,
    and so does the compiler when it traces. Its caches don't know of the order, hence the tag.
    """
    if not order:
        return nullcontext()
    from torch.compiler import config
    from torch.nn.attention import SDPBackend, sdpa_kernel

    tag = f" attention {' '.join(order)}"
    if tag not in config.cache_key_tag:
        config.cache_key_tag += tag
    backends = [getattr(SDPBackend, SDPA_BACKENDS[name]) for name in order]
    return sdpa_kernel(backends, set_priority=True)
