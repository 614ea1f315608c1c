"""Leaves the caller's process as it was."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def restored_process() -> Iterator[None]:
    """Afterwards, restore what a job sets for its whole process: the environment, the garbage
    collector, torch's random numbers, its choice of deterministic algorithms, and the hook that
    prints errors, before which torch puts the rank."""
    environment, collects, hook = dict(os.environ), gc.isenabled(), sys.excepthook
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    is_strict = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    benchmarks = torch.backends.cudnn.benchmark
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        sys.excepthook = hook
        (gc.enable if collects else gc.disable)()
        torch.use_deterministic_algorithms(is_strict, warn_only=only_warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmarks
        # last, because torch may set variables meanwhile
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


@contextmanager
def usual_torch() -> Iterator[None]:
    """Within, torch records gradients, computes in the types of its inputs, and makes fp32 tensors
    on the CPU unless it is told, whatever the caller has set; afterwards the caller's settings
    count again."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        stack.enter_context(torch.inference_mode(False))  # which records gradients, too
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if device.type != "cpu":  # a mode, which every call of torch would pass through
            stack.enter_context(torch.device("cpu"))
        yield
