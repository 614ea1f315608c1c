"""The meshes and options that a proof runs."""

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.config.checks import recomputes_attention
from meshwright.config.job_config import JobConfig, Parallelism
from meshwright.models.args import DecoderArgs
from meshwright.parallelisms.pipeline_split import SCHEDULES, takes_microbatches
from meshwright.proof.shrink import GLOBAL_BATCH, largest_tp

MAX_RANKS = 8
LARGEST_DEGREE = 4

KEYS = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}
"""Config key of each axis of the mesh."""

RING = {"context_parallel_attention": "ring"}
Degrees = Mapping[str, int]


@dataclass(frozen=True)
class Case:
    """A small job that must equal the one on a single process."""

    name: str
    config: JobConfig
    world_size: int


def reference_case(small: JobConfig) -> Case:
    """One process, nothing parallel, nothing recomputed, nothing compiled."""
    return _case("one process", small, {})


def default_cases(config: JobConfig, small: JobConfig, args: DecoderArgs) -> list[Case]:
    """The config's own shape, each of its axes alone, and what users switch on and off."""
    cases = []
    shapes = _own_shapes(config, args)
    for shape in shapes:
        own_options = _own_options(config, shape)
        if config.compile.enable and "tp" in shape and recomputes_attention(config):  # not on CPUs
            own_options["compile"] = {"enable": False}
            cases.append(_case("as configured, but eager", small, shape, **own_options))
        else:
            cases.append(_case("as configured", small, shape, **own_options))
    used = sorted({axis for shape in shapes for axis in shape}, key=list(KEYS).index)
    for axis in used:
        cases.append(_case(f"{axis} alone", small, {axis: 2}))
    if "cp" in used and not config.training.mask_documents:
        cases.append(_case("ring attention", small, {"cp": 2}, parallelism=RING))  # GPUs' default
    shape = shapes[0]
    modes: dict[str, dict[str, Any]] = {
        "checkpointed, full": {"activation_checkpoint": {"mode": "full"}},
        "checkpointed, selective": {"activation_checkpoint": {"mode": "selective"}},
        "compiled": {"compile": {"enable": True}},
    }
    for name, sections in modes.items():
        cases.append(_case(name, small, _compilable(shape), **sections))
    if "pp" not in shape:
        cases.append(_case("4 microbatches", small, {}, num_microbatches=4))
        cases.append(_case("2 microbatches", small, shape, num_microbatches=2))
    cases.append(_case("HSDP", small, {"dp_replicate": 2, "dp_shard": 2}))
    return distinct(cases)


def every_mesh(small: JobConfig, args: DecoderArgs) -> list[Case]:
    """All meshes of 2, 4 and 8 ranks with degrees up to 4 (data parallel: 8) that can run."""
    cases = []
    for degrees in itertools.product((1, 2, 4, 8), repeat=len(KEYS)):
        mesh = {axis: degree for axis, degree in zip(KEYS, degrees, strict=True) if degree > 1}
        if not 1 < math.prod(degrees) <= MAX_RANKS:
            continue
        if any(mesh.get(axis, 1) > LARGEST_DEGREE for axis in ("pp", "cp", "tp")):
            continue
        if mesh.get("tp", 1) <= largest_tp(args) and not ("pp" in mesh and args.tie_embeddings):
            cases.append(_case("mesh", small, mesh))
    if not args.tie_embeddings:
        for name in SCHEDULES:
            mesh, schedule = {"pp": 2, "dp_shard": 2}, {"pipeline_parallel_schedule": name}
            cases.append(_case(name, small, mesh, parallelism=schedule))
            for policy in ("always", "never"):
                if policy == "always" and SCHEDULES[name].splits_backward:
                    continue  # refused
                options = schedule | {"fsdp_reshard_after_forward": policy}
                cases.append(_case(f"{name}, reshard {policy}", small, mesh, parallelism=options))
    if not small.training.mask_documents:
        for mesh in ({"cp": 2}, {"cp": 4}, {"dp_shard": 2, "cp": 2}, {"pp": 2, "cp": 4}):
            if not ("pp" in mesh and args.tie_embeddings):
                cases.append(_case("ring attention", small, mesh, parallelism=RING))
    return distinct(cases)


def _own_shapes(config: JobConfig, args: DecoderArgs) -> list[Degrees]:
    """The config's axes at degree 2 (FSDP2 alone: 4); three at a time if it has more, or two where
    three leave its schedule too few microbatches."""
    parallelism = config.parallelism
    used = [axis for axis, key in KEYS.items() if getattr(parallelism, key) not in (0, 1)]
    if "tp" in used and largest_tp(args) == 1:
        used.remove("tp")
    if used == ["dp_shard"]:
        return [{"dp_shard": 4}]
    groups = [*itertools.combinations(used, min(len(used), 3))]
    if not all(_has_microbatches(parallelism, group) for group in groups):
        groups = [*itertools.combinations(used, 2)]
    return [dict.fromkeys(group, 2) for group in groups]


def _has_microbatches(parallelism: Parallelism, axes: Collection[str]) -> bool:
    """Whether the most microbatches that there can be, with these axes at degree 2, are enough."""
    if "pp" not in axes:
        return True
    name, most = parallelism.pipeline_parallel_schedule, GLOBAL_BATCH
    for axis in ("dp_replicate", "dp_shard"):
        most //= 2 if axis in axes else 1
    stages = 2 * SCHEDULES[name].stages_per_rank[0]
    return takes_microbatches(name, most, 2, stages)


def _own_options(config: JobConfig, shape: Degrees) -> dict[str, Any]:
    """How the config computes, without its degrees and what depends on the size of the model."""
    left_out = {*KEYS.values(), "module_fqns_per_model_part", "pipeline_parallel_stages_per_rank"}
    left_out.add("enable_async_tensor_parallel")  # needs GPUs
    if "cp" not in shape:
        left_out.add("context_parallel_attention")
    parallelism = config.parallelism.model_dump(exclude=left_out)
    return {
        "parallelism": parallelism,
        "activation_checkpoint": config.activation_checkpoint.model_dump(),
        "compile": config.compile.model_dump(),
    }


def _compilable(shape: Degrees) -> Degrees:
    """`shape`, or half of it: eight compilers on one machine take minutes."""
    return shape if math.prod(shape.values()) <= 4 else dict(itertools.islice(shape.items(), 2))


def _case(
    name: str, small: JobConfig, mesh: Degrees, *, num_microbatches: int = 1, **sections: Any
) -> Case:
    """`small` on `mesh`, with the keys of `sections` over its own."""
    dp = mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)
    if "pp" in mesh:
        num_microbatches = GLOBAL_BATCH // dp  # the most that there can be
    updates: dict[str, dict[str, Any]] = {key: dict(values) for key, values in sections.items()}
    degrees = {key: mesh.get(axis, 1) for axis, key in KEYS.items()}
    updates["parallelism"] = updates.get("parallelism", {}) | degrees
    local = GLOBAL_BATCH // (dp * num_microbatches)
    updates["training"] = {"local_batch_size": local}
    config = small.model_copy(
        update={
            section: getattr(small, section).model_copy(update=values)
            for section, values in updates.items()
        }
    )
    shape = " x ".join(f"{axis} {degree}" for axis, degree in mesh.items())
    return Case(f"{name}: {shape}" if shape else name, config, math.prod(mesh.values()))


def distinct(cases: list[Case]) -> list[Case]:
    """The first of those that would run the same."""
    return list({case.config.model_dump_json(): case for case in reversed(cases)}.values())[::-1]
