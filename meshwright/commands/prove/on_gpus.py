"""The cases of a proof on this machine's GPUs. Free of torch."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshwright.commands.prove.cases import FP32, HSDP, Case, Kind, distinct, num_ranks, with_ep
from meshwright.commands.prove.user_options import SCHEDULE, STAGES, STAGES_PER_RANK
from meshwright.config.changes import changed
from meshwright.config.job_config import JobConfig
from meshwright.config.parallelism import Parallelism
from meshwright.parallelisms.rules.degrees import DEGREES, mesh_text
from meshwright.system.errors import ConfigError, first_line
from meshwright.system.machine import count_gpus
from meshwright.train.facts import look
from meshwright.train.resolve import resolve

OF_PIPELINE = {SCHEDULE, STAGES, STAGES_PER_RANK}

KEPT_LONGEST = ("dp_replicate", "dp_shard", "cp", "pp", "tp")
"""Axes, from those that a machine with few GPUs does without first."""


def check_gpus() -> int:
    """Return how many GPUs this machine has.

    Raises:
        ConfigError: if it has none.
    """
    gpus = count_gpus()
    if not gpus:
        raise ConfigError(
            "--gpu",
            "--gpu: needs a GPU, and this machine has none (CUDA_VISIBLE_DEVICES may hide some)"
            "\n  fix: leave out --gpu: the cases then run on CPU processes",
        )
    return gpus


def gpu_cases(
    config: JobConfig,
    small: JobConfig,
    cases: Sequence[Case],
    gpus: int,
    *,
    allows_tf32: bool = False,
) -> list[Case]:
    """Return `cases`, each on a mesh of at most `gpus` ranks, and the job as it trains.

    Args:
        config: the user's.
        cases: from `default_cases`; the first has the config's own mesh.
        allows_tf32: GPUs may round factors of products in fp32 to TF32.
    """
    fitted = [fit(case, gpus) for case in cases]
    own = as_it_trains(config, small, fitted[0], allows_tf32=allows_tf32)
    return distinct([fitted[0], own, *fitted[1:]])


def fit(case: Case, most: int) -> Case:
    """Return the case on at most `most` ranks: the largest degree is halved until it fits, among
    equal ones data parallelism first. It keeps its number of microbatches, or their size if each
    is to be one sequence."""
    if case.world_size <= most:
        return case
    mesh = {axis: degree for axis, degree in case.mesh.items() if axis != "ep"}
    while num_ranks(mesh) > most:
        axis = max(mesh, key=lambda axis: (mesh[axis], -KEPT_LONGEST.index(axis)))
        mesh[axis] //= 2  # of 3: 1
        mesh = {axis: degree for axis, degree in mesh.items() if degree > 1}
    mesh = with_ep(mesh, case.config.parallelism.expert_parallel_degree)
    degrees: dict[str, Any] = {key: mesh.get(axis, 1) for axis, key in DEGREES.items()}
    if "pp" not in mesh:
        degrees |= Parallelism().model_dump(include=OF_PIPELINE)
    elif mesh["pp"] != case.mesh["pp"]:
        degrees |= Parallelism().model_dump(include={STAGES})
    local = case.config.training.local_batch_size
    if case.kind in ("fp32", "bf16") and "pp" not in mesh:
        local = local * _dp(case.mesh) // _dp(mesh)
    config = changed(case.config, {"parallelism": degrees, "training": {"local_batch_size": local}})
    return replace(case, name=_named(case, mesh), config=config, world_size=num_ranks(mesh))


def as_it_trains(
    config: JobConfig, small: JobConfig, own: Case, *, allows_tf32: bool = False
) -> Case:
    """Return the case `own` in the config's type, compiled as the config is and with the kernels
    that the job takes, though their sums may differ from run to run: cuDNN's attention on Hopper.

    Its products are rounded otherwise than its reference's: it has the bounds of `bf16`, or `tf32`
    where fp32 factors are rounded to that.
    """
    training = config.training
    is_fp32 = training.mixed_precision_param == "float32"
    kind: Kind = ("tf32" if allows_tf32 else "fp32") if is_fp32 else "bf16"
    update: dict[str, dict[str, Any]] = {
        "training": {
            "deterministic": training.deterministic,
            "attention_kernel": training.attention_kernel,
            **({} if is_fp32 else small.training.model_dump(include={*FP32})),
        },
        "compile": config.compile.model_dump(),
        "float8": {"enable": config.float8.enable},
    }
    if "tp" in own.mesh:
        asynchronous = config.parallelism.enable_async_tensor_parallel
        update["parallelism"] = {"enable_async_tensor_parallel": asynchronous}
    shape = mesh_text(own.mesh)
    name = f"as it trains: {shape}" if shape else "as it trains"
    return replace(own, name=name, config=changed(own.config, update), kind=kind)


def why_not_on(case: Case, gpus: int) -> str:
    """Return why a case can't run on a machine of so many GPUs; "" if it can, as far as is known
    before its ranks start."""
    if case.world_size > gpus:
        return f"needs {case.world_size} GPUs, and this machine has {gpus}"
    try:
        resolve(
            case.config, look(case.config, case.world_size, expects_gpus=True, device_type="cuda")
        )
    except ConfigError as error:
        return first_line(error)
    return ""


def within(cases: Sequence[Case], most: int) -> list[Case]:
    """Return the cases of at most `most` ranks."""
    return [case for case in cases if case.world_size <= most]


def _dp(mesh: dict[str, int]) -> int:
    return math.prod(mesh.get(axis, 1) for axis in HSDP)


def _named(case: Case, mesh: dict[str, int]) -> str:
    name, shape = case.name.removesuffix(f": {mesh_text(case.mesh)}"), mesh_text(mesh)
    return f"{name}: {shape}" if shape else name
