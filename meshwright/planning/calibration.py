"""Measures the device of this machine, for predictions of step time."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import hardware
from meshwright.errors import check
from meshwright.planning.timing import Rates

SECONDS = 0.3
"""Of each measurement; it is repeated until then, and the median counts."""
SIDES = (128, 256, 512, 1024, 2048)
"""Of square matrix products."""
DTYPES = (torch.bfloat16, torch.float32)


def measure(word: str) -> Rates:
    """Return the rates of this machine's device.

    Raises:
        ConfigError: if `word` says another kind of device than the machine has.
    """
    has_gpu = torch.cuda.is_available()
    check(
        has_gpu != (word == "cpu"),
        "--device",
        word,
        "is not the device of this machine",
        f"--device {'h100, ...' if has_gpu else 'cpu'}",
    )
    device = torch.device("cuda" if has_gpu else "cpu")
    matrix, attention, stream = {}, {}, {}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        matrix[name] = [_matrix(side, dtype, device) for side in SIDES]
        forward, backward = _attention(dtype, device)
        attention[name], attention[f"{name} backward"] = forward, backward
    for name, (function, passes) in _pointwise(device).items():
        stream[name] = passes / _seconds(function, device)
    small = torch.ones(8, device=device)
    today = datetime.date.today().isoformat()
    threads = f", {torch.get_num_threads()} threads" if not has_gpu else ""
    return Rates(
        f"measured on {hardware.device_name(device)}{threads}, torch {torch.__version__}, {today}",
        matrix,
        attention,
        stream,
        _seconds(lambda: small + small, device),
        0.0,
        0.0,
        0.0,
    )


def _matrix(side: int, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    count = 2.0 * side**3
    return count, count / _seconds(lambda: a @ b, device)


def _attention(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """FLOP/s of causal attention, forward and backward, of the pairs that count."""
    shape = (2, 8, 512, 64)
    q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))
    pairs = shape[0] * shape[1] * shape[2] ** 2 / 2

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    grad = torch.ones(shape, device=device, dtype=dtype)
    alone = _seconds(forward, device)
    both = _seconds(lambda: torch.autograd.grad(forward(), (q, k, v), grad), device)
    return 4 * pairs * shape[3] / alone, 10 * pairs * shape[3] / max(both - alone, alone / 10)


def _pointwise(device: torch.device) -> dict[str, tuple[Callable[[], object], int]]:
    """Operators that move bytes: how to run each, and the bytes of its tensors, each counted once,
    as `work.Operator` does."""
    size = 1 << 22
    x, y = (torch.randn(size, device=device).bfloat16() for _ in range(2))
    wide, grad = (torch.randn(size, device=device) for _ in range(2))
    logits = torch.randn(256, size // 256, device=device)
    aten, weight = torch.ops.aten, torch.randn(size, device=device)
    weight.grad = grad
    optimizer = torch.optim.AdamW([weight], fused=True)
    width, wide_bytes = x.nbytes, wide.nbytes
    return {
        "": (lambda: x + y, 3 * width),
        "mul": (lambda: x * y, 3 * width),
        "pow": (lambda: wide.pow(2), 2 * wide_bytes),
        "silu": (lambda: F.silu(x), 2 * width),
        "silu_backward": (lambda: aten.silu_backward(x, y), 3 * width),
        "_to_copy": (lambda: x.float(), width + wide_bytes),
        "copy_": (lambda: wide.clone(), 2 * wide_bytes),
        "_log_softmax": (lambda: logits.log_softmax(-1), 2 * wide_bytes),
        "_log_softmax_backward_data": (
            lambda: aten._log_softmax_backward_data(logits, logits, -1, torch.float32),
            2 * wide_bytes,
        ),
        "_fused_adamw_": (optimizer.step, 4 * wide_bytes),
    }


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    found: list[float] = []
    function()
    end = time.perf_counter() + SECONDS
    while len(found) < 3 or time.perf_counter() < end:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found)
