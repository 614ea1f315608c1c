"""Whether `compile.enable = "auto"` compiles. Free of torch."""

import importlib.util
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Collection
from pathlib import Path

from meshwright.config.job_config import JobConfig, changed
from meshwright.models.args import DecoderArgs
from meshwright.models.table import DecoderSpec
from meshwright.parallelisms.rules.precision import has_part_of_block
from meshwright.parallelisms.rules.stages import splits_backward
from meshwright.system.errors import check
from meshwright.system.modules import has_torch, torch_version

LEAST_FLOP = 100e12
"""Work of a whole job from which compiling pays."""


def resolve_compile(
    config: JobConfig, args: DecoderArgs, fp32_modules: Collection[str], *, is_gpu: bool
) -> tuple[JobConfig, str]:
    """Return `config` with `compile.enable` true or false, and how "auto" was decided.

    "auto" compiles if an option needs the compiler, as if true were given. Otherwise it compiles if

    - the job computes `LEAST_FLOP` or more over all of its steps, as MFU counts them,
    - the backend is inductor, since others make no step faster, and the machine has its compilers,
    - and no other option is incompatible with compiled blocks.

    On two CPU cores the first compilation took 31 s, and compiled steps were 1.46 times as fast: it
    paid after 100 s of eager steps, or 21 TFLOP. `LEAST_FLOP` leaves a factor of 5 for slower
    compilers and smaller gains. A GPU computes it in less than a second, and loses at most one
    compilation; later starts find it in inductor's cache.

    A job's work does not depend on the mesh, unless `training.global_batch_size` is -1: the data
    then depends on it, too. Data that ends before `training.steps` is not known here.

    Args:
        config: with every -1 filled in.
        fp32_modules: as `find_fp32_modules` gives them.
        is_gpu: ranks train on GPUs.

    Returns:
        The config, and a line for the log; empty if the config says true or false, or if the job
        is small.
    """
    if config.compile.enable != "auto":
        return config, ""
    training = config.training
    tokens = training.seq_len * training.global_batch_size * training.steps
    flop = args.table.flops_per_token(training.seq_len) * tokens
    is_on, reason = True, f"the job computes {_shown(flop)} ({_shown(LEAST_FLOP)} or more)"
    if option := _option_that_compiles(config):
        reason = f"{option} needs it"
    elif flop < LEAST_FLOP:
        is_on, reason = False, ""
    elif obstacle := _obstacle(config, fp32_modules) or why_no_compiler(is_gpu):
        is_on, reason = False, obstacle
    line = f'compile.enable = "auto": {"compiled" if is_on else "eager"}, since {reason}'
    return changed(config, {"compile": {"enable": is_on}}), line if reason else ""


def check_compiler(config: JobConfig, *, is_gpu: bool) -> None:
    """Raise `ConfigError` if ranks on this machine's CPUs are to compile, and cannot.

    Args:
        config: as `resolve_compile` returns it.
    """
    if config.compile.is_on and config.compile.backend == "inductor" and not is_gpu:
        reason = why_no_compiler()
        check(not reason, "compile.enable", True, reason, "set compile.enable = false")


def check_budget(config: JobConfig, model: DecoderSpec, *, is_gpu: bool) -> None:
    """Raise `ConfigError` if the compiler is to weigh memory against work that torch cannot count:
    of flash attention, on GPUs, whose heads are grouped (pytorch pull request 177188)."""
    mode, training = config.activation_checkpoint.mode, config.training
    is_grouped = any(x.attention.n_heads != x.attention.n_kv_heads for x in model.layers)
    is_flash = training.mixed_precision_param == "bfloat16" and not training.mask_documents
    check(
        not (is_gpu and mode == "memory_budget" and is_grouped and is_flash) or has_torch(2, 12),
        "activation_checkpoint.mode",
        mode,
        f"torch {torch_version()} cannot on GPUs, if keys have fewer heads than queries",
        "use torch 2.13, or another mode",
    )


def _option_that_compiles(config: JobConfig) -> str:
    """Return the option, if any, that has an effect in compiled blocks alone."""
    parallelism = config.parallelism
    if config.activation_checkpoint.mode == "memory_budget":
        return 'activation_checkpoint.mode = "memory_budget"'
    if parallelism.enable_async_tensor_parallel and parallelism.tensor_parallel_degree > 1:
        return "parallelism.enable_async_tensor_parallel"
    return ""


def _obstacle(config: JobConfig, fp32_modules: Collection[str]) -> str:
    """Return why blocks should not be compiled; "" if nothing in the config is against it."""
    parallelism, backend = config.parallelism, config.compile.backend
    if backend != "inductor":
        return f'compile.backend = "{backend}" makes no step faster'
    if has_part_of_block(fp32_modules):
        return "training.fp32_modules names modules inside a block"
    if splits_backward(parallelism):
        return f"{parallelism.pipeline_parallel_schedule} computes gradients in two passes"
    return ""


def why_no_compiler(is_gpu: bool = False) -> str:
    """Return why inductor cannot compile on this machine; "" if it can, as far as is seen.

    It looks where inductor does (torch/_inductor: config.py, cpp.cxx; cpp_builder.py,
    `_get_python_include_dirs`), and Triton, which compiles for GPUs (triton/runtime/build.py).
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler {compiler!r} (CXX names another)"
    headers = Path(sysconfig.get_path("include", "posix_prefix"))
    if not (headers / "Python.h").exists():
        return f"Python's headers for C++ are not installed ({headers})"
    if not is_gpu and len((file := _torch_file()).split()) > 1:
        # torch/_inductor/cpp_builder.py writes -L and the folder without quotes
        return f"inductor cannot link with torch in a folder with a blank in its name ({file})"
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()
    if not _may_hold_programs(Path(folder)):
        return f"{folder} is mounted noexec (TORCHINDUCTOR_CACHE_DIR names another folder)"
    has_c = any(map(shutil.which, (os.environ.get("CC", "gcc"), "clang")))
    if importlib.util.find_spec("triton") is not None and not has_c:
        return "there is no C compiler for Triton (CC, gcc or clang)"
    return ""


def _may_hold_programs(folder: Path) -> bool:
    """Return whether libraries can be loaded from a folder, which need not exist yet."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return not os.statvfs(there).f_flag & os.ST_NOEXEC


def _torch_file() -> str:
    """Return the path of torch's `__init__.py`, without an import; "" if there is none."""
    spec = importlib.util.find_spec("torch")
    return (spec.origin or "") if spec is not None else ""


def _shown(flop: float) -> str:
    """Return a number of operations with three digits and a unit."""
    for unit in ("", "K", "M", "G", "T", "P", "E"):
        if flop < 999.5:
            return f"{flop:.3g} {unit}FLOP"
        flop /= 1000
    return f"{flop:.3g} ZFLOP"
