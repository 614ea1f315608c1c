"""Whether `compile.enable = "auto"` compiles. Free of torch."""

import importlib.util
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path

from meshwright.config.job_config import JobConfig
from meshwright.config.rules import Choice, Facts, Row, Rule
from meshwright.parallelisms.rules.precision import find_fp32_modules, has_part_of_block
from meshwright.parallelisms.rules.stages import splits_backward
from meshwright.system.modules import has_torch, is_installed, torch_version

LEAST_STEPS_ON_CPU = 500
"""Steps from which compiling pays on a CPU. On two idle cores debug_model, the smallest preset,
took 31 s to compile and won them back after 142 steps, at 1.46 times the speed. The rest is a
margin for slower compilers and smaller gains."""


def choose_compile(config: JobConfig, facts: Facts) -> Choice:
    """Decide about `compile.enable` = "auto"; short jobs on CPUs aren't told.

    "auto" compiles if an option needs the compiler. Otherwise it compiles on GPUs, and on CPUs if
    the job has `LEAST_STEPS_ON_CPU`, unless an option is incompatible or a compiler is missing.
    """
    if config.compile.enable != "auto" or facts.model is None:
        return Choice()
    steps = config.training.steps
    if option := _option_that_compiles(config):
        is_on, reason = True, f"{option} needs it"
    elif not facts.expects_gpus and steps < LEAST_STEPS_ON_CPU:
        is_on, reason = False, ""
    elif obstacle := _obstacle(config, facts) or facts.no_compiler:
        is_on, reason = False, obstacle
    elif facts.expects_gpus:
        # not said where the GPUs weren't counted, as for `meshwright check --ngpu 8` on a laptop
        is_on, reason = True, "the job trains on GPUs" if facts.device_type else ""
    else:
        is_on, reason = True, f"the job has {steps:,} steps ({LEAST_STEPS_ON_CPU} or more)"
    line = f'compile.enable = "auto": {"compiled" if is_on else "eager"}, since {reason}'
    return Choice({"compile": {"enable": is_on}}, line if reason else "")


RULES: tuple[Row[Facts], ...] = (
    Rule(
        "compile.enable",
        lambda c, facts: (
            c.compile.enable is True
            and c.compile.backend == "inductor"
            and facts.device_type == "cpu"
            and facts.no_compiler
        ),
        "{detail}",
        "set compile.enable = false",
        needs="device_type",
    ),
    # torch can't count the work of flash attention with grouped heads: pytorch pull request 177188
    Rule(
        "activation_checkpoint.mode",
        lambda c, facts: (
            facts.expects_gpus
            and c.activation_checkpoint.mode == "memory_budget"
            and c.training.mixed_precision_param == "bfloat16"
            and not c.training.mask_documents
            and any(one.n_heads != one.n_kv_heads for one in facts.spec.attentions.values())
            and not has_torch(2, 12)
            and torch_version()
        ),
        "torch {detail} cannot on GPUs, if keys have fewer heads than queries",
        "use torch 2.13, or a different mode",
        needs="model",
    ),
)


def _option_that_compiles(config: JobConfig) -> str:
    """Return the option, if any, that has an effect in compiled blocks only."""
    if config.activation_checkpoint.mode == "memory_budget":
        return 'activation_checkpoint.mode = "memory_budget"'
    if config.overlaps_tensor_parallel:
        return "parallelism.enable_async_tensor_parallel"
    return ""


def _obstacle(config: JobConfig, facts: Facts) -> str:
    """Return why blocks shouldn't be compiled; "" if nothing in the config is against it."""
    parallelism, backend = config.parallelism, config.compile.backend
    if backend != "inductor":
        return f'compile.backend = "{backend}" makes no step faster'
    if has_part_of_block(find_fp32_modules(config, facts.spec)):
        return "training.fp32_modules names modules inside a block"
    if splits_backward(parallelism):
        return f"{parallelism.pipeline_parallel_schedule} computes gradients in two passes"
    return ""


def why_no_compiler(is_gpu: bool = False) -> str:
    """Return why inductor can't compile on this machine; "" if it can, as far as is seen.

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
    # it need not exist yet
    there = next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.exists())
    if os.statvfs(there).f_flag & os.ST_NOEXEC:
        return f"{folder} is mounted noexec (TORCHINDUCTOR_CACHE_DIR names a different folder)"
    has_c = any(map(shutil.which, (os.environ.get("CC", "gcc"), "clang")))
    if is_installed("triton") and not has_c:
        return "there is no C compiler for Triton (CC, gcc or clang)"
    return ""


def _torch_file() -> str:
    """Return the path of torch's `__init__.py`, without an import; "" if there is none."""
    spec = importlib.util.find_spec("torch")
    return (spec.origin or "") if spec is not None else ""
