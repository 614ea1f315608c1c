"""Compiles the blocks of jobs for an H100 that is not there, by inductor and Triton.

python -m tests.helpers.simulated_gpu.compiled [CASE ...]      needs g++ and Triton

Graphs are traced on fake tensors, inductor writes their kernels, and Triton compiles these to
machine code. Nothing is launched: the graphs run on as fake tensors. Every name of torch that is
replaced here is private.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers.simulated_gpu.cases import CASES, COMPILED, Case
from tests.helpers.simulated_gpu.guard import build_guard, load_guard

graphs: list[str] = []
"""Compiled, in order: forward or backward."""
kernels: Counter[str] = Counter()
"""That Triton compiled, by name."""


def install() -> None:
    """Make inductor and Triton take the device of `fake_cuda`, which is installed here, too."""
    import torch
    import torch.nn.functional as F
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import compile_fx, config
    from torch._inductor.runtime import triton_helpers, triton_heuristics

    from meshwright.models import attention
    from tests.helpers.simulated_gpu import fake_cuda

    rms_norm, compiled = F.rms_norm, attention._compiled
    fake_cuda.install()
    attention._compiled, eager_norm = compiled, F.rms_norm

    def norm(*args: Any) -> Any:  # in graphs, inductor's own, which needs no kernel of torch's
        return (rms_norm if torch.compiler.is_compiling() else eager_norm)(*args)

    class Generator(torch.Generator):
        device = torch.device("cuda", 0)

        def clone_state(self) -> Generator:
            return Generator()

        def graphsafe_get_state(self) -> Generator:
            return self

        def graphsafe_set_state(self, state: Any) -> Generator:
            return self

    class Driver:
        """Triton's, of a device."""

        def get_current_target(self) -> Any:
            return triton.backends.compiler.GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

    def precompile(tuner: Any, *_: Any, **__: Any) -> None:
        for options in tuner.configs:
            tuner._precompile_config(options)
        kernels[tuner.inductor_meta["kernel_name"]] += 1

    def compile_and_run_on(graph: Any, inputs: Any, **options: Any) -> Any:
        graphs.append("backward" if options.get("is_backward") else "forward")
        original.inner(copy.deepcopy(graph), inputs, **options)

        def run(args: list[Any]) -> Any:
            given = list(args)
            args.clear()
            return graph.forward(*given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def compile_graph(graph: Any, inputs: Any, config_patches: Any = None, **options: Any) -> Any:
        with config.patch(config_patches or {}):
            return original.whole(graph, inputs, inner_compile=compile_and_run_on, **options)

    original = mock.Mock(inner=compile_fx.compile_fx_inner, whole=compile_fx.compile_fx)
    of_device = {
        "get_device_properties": lambda device=None: fake_cuda.Properties,
        "get_raw_stream": lambda index: 0,
        "is_available": lambda: True,
        "get_compute_capability": lambda device=None: 90,
        "current_device": lambda: 0,
    }
    for name, function in of_device.items():
        setattr(CudaInterface, name, staticmethod(function))
        setattr(CudaInterface.Worker, name, staticmethod(function))
    config.compile_threads, config.force_disable_caches = 1, True
    config.joint_graph_constant_folding = False  # it computes on the device
    for owner, new in (
        (F, {"rms_norm": norm}),
        (torch.cuda, {"_exchange_device": lambda _: 0, "_maybe_exchange_device": lambda _: 0}),
        (torch.cuda, {"default_generators": (Generator(),)}),
        # dynamo tells it from that of torch.cuda
        (torch.accelerator, {"current_stream": lambda device=None: fake_cuda.current_stream()}),
        (torch._C, {"_cuda_getCurrentRawStream": lambda index: 0}),
        (triton_helpers, {"set_driver_to_gpu": lambda: None}),
        (triton_heuristics.CachingAutotuner, {"precompile": precompile}),
        (compile_fx, {"compile_fx": functools.wraps(compile_fx.compile_fx)(compile_graph)}),
    ):
        for name, value in new.items():
            setattr(owner, name, value)
    triton.runtime.driver.set_active(Driver())


def compile_job(case: Case) -> dict[str, Any]:
    """Return what the first two steps of a rank compiled."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from meshwright.commands.plan.simulate import deal
    from meshwright.config.loader import load_config
    from meshwright.parallelisms import expert_parallel
    from meshwright.parallelisms.meshes import build_meshes
    from tests.helpers.one_rank import OneRank
    from tests.helpers.resolved import resolved
    from tests.helpers.simulated_gpu.rank import DEVICE

    torch._dynamo.reset()
    graphs.clear()
    kernels.clear()
    dist.init_process_group("fake", store=FakeStore(), rank=case.rank, world_size=case.world_size)
    words = [word for word in case.words if not word.startswith("--compile.enable")]
    plan = resolved(
        load_config([*words, "--compile.enable=true"]), case.world_size, expects_gpus=True
    )
    meshes = build_meshes(plan.dims, "cuda")
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, mock.patch.object(expert_parallel, "on_host", deal):
        rank = OneRank(plan, meshes, DEVICE)
        rank.initialize()
        rank.step(1, rank.batches())
        first = len(graphs)
        rank.step(2, rank.batches())
    dist.destroy_process_group()
    return {"graphs": first, "kernels": len(kernels), "compiled anew": len(graphs) - first}


def main() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU that is there is left alone
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
        guard = build_guard(Path(folder))
        if guard is None:
            sys.exit("needs g++")
        load_guard(guard)
        install()
        from torch._subclasses.fake_tensor import FakeTensorMode

        FakeTensorMode.avoid_device_init = True
        print("| job | graphs | kernels | graphs of step 2 |\n|---|---|---|---|")
        for name in sys.argv[1:] or COMPILED:
            try:
                found = compile_job((CASES | COMPILED)[name])
            except Exception:
                sys.exit(f"{name}:\n{traceback.format_exc()}")
            print(f"| {' | '.join(map(str, [name, *found.values()]))} |", flush=True)


if __name__ == "__main__":
    main()
