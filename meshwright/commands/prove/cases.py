"""The meshes and options that a proof runs."""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.commands.prove.shrink import GLOBAL_BATCH, MAX_RANKS, largest_tp, small_parts
from meshwright.commands.prove.user_options import (
    REDUCE,
    REDUCE_TYPE,
    SCHEDULE,
    STAGES,
    STAGES_PER_RANK,
    Options,
    for_mesh,
    own_options,
    reduction_choices,
    stored_in_fp32,
    user_types,
)
from meshwright.config.changes import changed
from meshwright.config.job_config import JobConfig
from meshwright.config.parallelism import Parallelism
from meshwright.models.args import DecoderArgs
from meshwright.parallelisms.rules.degrees import (
    DEGREES,
    KEYS,
    mesh_text,
    power_meshes,
    shards_experts_apart,
)
from meshwright.parallelisms.rules.stages import SCHEDULES
from meshwright.system.errors import ConfigError
from meshwright.train.facts import look
from meshwright.train.resolve import resolve

LARGEST_DEGREE = 4

SHARING = ("dp_shard", "cp", "tp")
"""Axes among whose ranks a mesh's "ep" deals out the experts."""

RESHARD: tuple[Literal["always", "never"], ...] = ("always", "never")
SHARDED, HSDP = {"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2}
FP32: dict[str, Any] = {"mixed_precision_param": "float32", "fp32_modules": []}

Degrees = Mapping[str, int]
Sections = Mapping[str, Any]
Kind = Literal["fp32", "tf32", "bf16 sums", "bf16", "user types"]


@dataclass(frozen=True)
class Case:
    """A small job that must equal the one on a single process."""

    name: str
    config: JobConfig
    world_size: int
    kind: Kind = "fp32"
    """Names the reference that it is held against, and the bounds. "bf16 sums": it multiplies the
    reference's own numbers, one sequence at a time, and only adds up in another order. "user types"
    does the same with weights, reductions and Muon in the config's types, which are fp32 in other
    cases. "tf32": as "fp32", but a GPU may round factors to TF32. Cases in bf16 multiply in float8
    where the config does, and have wider bounds."""

    @property
    def bounds(self) -> str:
        """Their name in `BOUNDS`."""
        replaced = ("bf16", "float8"), ("user", "float8 user")
        for kind, in_float8 in replaced if self.config.float8.enable else ():
            if self.kind.startswith(kind):
                return self.kind.replace(kind, in_float8)
        return self.kind

    @property
    def mesh(self) -> dict[str, int]:
        """Degrees above 1, by axis."""
        parallelism = self.config.parallelism
        degrees = {axis: getattr(parallelism, key) for axis, key in DEGREES.items()}
        return {axis: degree for axis, degree in degrees.items() if degree > 1}


def reference_case(small: JobConfig, kind: Kind = "fp32") -> Case:
    """One process, nothing parallel, nothing recomputed, nothing compiled."""
    if kind == "user types":  # one process has no reduction: it adds microbatches up in fp32
        small = changed(small, {"training": {"mixed_precision_reduce": "float32"}})
    return build_case("one process", small, {}, kind="bf16 sums" if kind == "bf16" else kind)


def default_cases(config: JobConfig, small: JobConfig, args: DecoderArgs) -> list[Case]:
    """Return the config's own shape, each of its axes by itself, and options that users switch."""
    used, options = _used_axes(config, args), own_options(config)
    if config.compile.enable == "auto":  # a separate case is compiled, unless an option needs it
        has_budget = config.activation_checkpoint.mode == "memory_budget"
        options["compile"]["enable"] = "auto" if has_budget else False
    chosen = reduction_choices(config, args)
    options["parallelism"][REDUCE] = chosen[0]
    cases = _own_cases(config, small, args, used, options)
    shape = cases[0].mesh
    cases += [*_accumulating(small, cases, options, chosen)]
    for axis in used if len(used) > 1 else ():
        cases.append(_largest(f"{axis} only", config, small, args, [axis], {}))
    if args.table.mixtures:
        for mesh in ({"dp_shard": 2}, {"dp_shard": 4}, {"dp_shard": 2, "tp": 2}):
            if mesh.get("tp", 1) <= largest_tp(args):
                cases.append(build_case("experts", small, mesh | {"ep": 2}))
    modes: dict[str, dict[str, Any]] = {
        "checkpointed, full": {"activation_checkpoint": {"mode": "full"}},
        "checkpointed, selective": {"activation_checkpoint": {"mode": "selective"}},
        "compiled": {"compile": {"enable": True}},
    }
    in_own = {f"checkpointed, {config.activation_checkpoint.mode}"}
    if config.compile.enable is True and config.compile.backend == "inductor":
        in_own.add("compiled")
    for name in [name for name in modes if name not in in_own]:
        cases.append(build_case(name, small, _compilable(shape), **modes[name]))
    if not shape.keys() >= HSDP.keys():
        cases.append(build_case("HSDP", small, HSDP))
    cases += [*_bf16_cases(config, small, args, options, cases[0])]
    if config.float8.enable:
        for name, sections in modes.items():
            others = for_mesh(options, SHARDED) | sections
            case = build_case(f"float8, {name}", small, SHARDED, kind="bf16", **others)
            if can_run(case):  # some modes don't go with `fp32_modules`
                cases.append(case)
    return _within_torch(cases, args)


def quick_cases(cases: Sequence[Case]) -> list[Case]:
    """Return three of `default_cases`: the config's own shape, and two that compile nothing and
    need no reference in bf16, on other meshes if there are some."""
    own, *others = cases
    eager = [c for c in others if c.kind == "fp32" and c.config.compile.enable is False]
    return [own, *sorted(eager, key=lambda case: case.mesh == own.mesh)[:2]]


def _accumulating(
    small: JobConfig, own: Sequence[Case], options: Options, chosen: Sequence[str]
) -> Iterator[Case]:
    """Yield the cases `own` with two microbatches a step, and one process with four. A pipeline has
    several in any case.

    Args:
        chosen: values of `fsdp_reduce_gradients` that the user's job may have.
    """
    if "pp" in own[0].mesh:
        return
    yield build_case(
        "4 microbatches", small, {}, num_microbatches=4, **for_mesh(options, (), is_eager=True)
    )
    for case in own:
        for reduction in chosen:
            name = "as configured, 2 microbatches"
            if reduction != chosen[0]:
                name += f", {reduction}"
            config = changed(case.config, {"parallelism": {REDUCE: reduction}})
            yield build_case(name, config, _within_batch(case.mesh), num_microbatches=2)


def _bf16_cases(
    config: JobConfig, small: JobConfig, args: DecoderArgs, options: Options, own: Case
) -> Iterator[Case]:
    """Yield the cases in bf16, with the user's options.

    Args:
        own: the first of `_own_cases`.
    """
    eager = for_mesh(options, HSDP, is_eager=True)
    yield build_case("bf16", small, HSDP, kind="bf16 sums", **eager)
    if config.parallelism.pipeline_parallel_degree > 1:
        mesh = {"pp": 2, "dp_shard": 2}
        eager = for_mesh(options, mesh, is_eager=True)
        yield build_case("bf16", small, mesh, kind="bf16 sums", **eager)
    if args.table.mixtures:
        mesh = SHARDED | {"ep": 2}
        yield build_case("bf16", small, mesh, kind="bf16", **for_mesh(options, mesh))
    if types := user_types(config):
        # a reduction in bf16 can't go over several microbatches and replicas
        mesh = SHARDED if REDUCE_TYPE in types else HSDP
        eager = for_mesh(options, mesh, is_eager=True)
        yield build_case(f"bf16 {', '.join(types)}", small, mesh, kind="user types", **eager)
    if {"tp", "cp"} & own.mesh.keys() or options["compile"]["enable"] is not False:
        stages = own.config.parallelism.model_dump(include={STAGES, STAGES_PER_RANK})
        found = for_mesh(options, own.mesh)
        found["parallelism"] |= stages
        yield build_case("bf16", small, own.mesh, kind="bf16", **found)


def every_mesh(small: JobConfig, args: DecoderArgs) -> list[Case]:
    """Return all meshes of 2, 4 and 8 ranks with degrees up to 4 (data parallel: 8) that can run,
    every schedule with every policy of resharding, and some in bf16."""
    cases = []
    most = dict.fromkeys(KEYS, LARGEST_DEGREE) | dict.fromkeys(HSDP, MAX_RANKS)
    for degrees in power_meshes(most):
        mesh = {axis: degree for axis, degree in degrees.items() if degree > 1}
        if not 1 < num_ranks(mesh) <= MAX_RANKS:
            continue
        cases.append(build_case("mesh", small, mesh))
        sharing = math.prod(mesh.get(axis, 1) for axis in SHARING) if args.table.mixtures else 1
        for ep in (2, 4, 8):
            if ep <= sharing:
                cases.append(build_case("mesh", small, mesh | {"ep": ep}))
    each = {"fsdp_reduce_gradients": "every_microbatch"}  # "auto" of large models
    for mesh in ({"dp_shard": 2}, HSDP):
        name = "2 microbatches, each reduced"
        cases.append(build_case(name, small, mesh, num_microbatches=2, parallelism=each))
    for name in SCHEDULES:
        mesh, schedule = {"pp": 2, "dp_shard": 2}, {"pipeline_parallel_schedule": name}
        cases.append(build_case(name, small, mesh, parallelism=schedule))
        if SCHEDULES[name].splits_backward:  # gradients of weights take a different path
            cases.append(
                build_case(f"{name}, bf16", small, mesh, kind="bf16 sums", parallelism=schedule)
            )
        for policy in RESHARD:
            keys = schedule | {"fsdp_reshard_after_forward": policy}
            case = build_case(f"{name}, reshard {policy}", small, mesh, parallelism=keys)
            if can_run(case):  # some pairs are rejected
                cases.append(case)
    for mesh in (HSDP, {"dp_shard": 4}, {"pp": 2, "dp_shard": 2}):
        cases.append(build_case("bf16", small, mesh, kind="bf16 sums"))
    for mesh in ({"tp": 2}, {"cp": 2}, {"dp_shard": 2, "tp": 2}, {"pp": 2, "cp": 2}):
        cases.append(build_case("bf16", small, mesh, kind="bf16"))
    cases = [case for case in cases if case.mesh.get("tp", 1) <= largest_tp(args)]
    if args.table.copies_embedding:
        cases = [case for case in cases if not ("pp" in case.mesh and _is_v(case))]
    return _within_torch(cases, args)


def _is_v(case: Case) -> bool:
    """Return whether the first and the last stage would be on one rank."""
    return SCHEDULES[case.config.parallelism.pipeline_parallel_schedule].is_v


def _within_torch(cases: Iterable[Case], args: DecoderArgs) -> list[Case]:
    """Return distinct cases; without experts on a separate mesh if torch is too old,
    which no job of the config could be."""
    if args.table.mixtures and not shards_experts_apart():
        cases = (case for case in cases if not {"tp", "ep"} & case.mesh.keys())
    return distinct(cases)


def _used_axes(config: JobConfig, args: DecoderArgs) -> list[str]:
    used = [axis for axis, key in KEYS.items() if getattr(config.parallelism, key) not in (0, 1)]
    if "tp" in used and largest_tp(args) == 1:
        used.remove("tp")
    return used


def _own_cases(
    config: JobConfig,
    small: JobConfig,
    args: DecoderArgs,
    used: Collection[str],
    options: Options,
) -> list[Case]:
    """Return the config's axes with its options: three at a time if it has more, or two where three
    leave its schedule too few microbatches."""
    cases: list[Case] = []
    for count in (3, 2):
        groups = itertools.combinations(used, min(count, len(used)))
        cases = [_largest("as configured", config, small, args, axes, options) for axes in groups]
        if all(map(can_run, cases)):
            break
    return cases


def _largest(
    name: str,
    config: JobConfig,
    small: JobConfig,
    args: DecoderArgs,
    axes: Collection[str],
    options: Sections,
) -> Case:
    """Return the case with as many of the config's degrees as fit, and its stages if they do. If
    none can run: the smallest."""
    kept, stages = dict(options.get("parallelism", {})), list[dict[str, Any]]()
    if "pp" in axes:
        per_rank = {STAGES_PER_RANK: config.parallelism.pipeline_parallel_stages_per_rank}
        if parts := config.parallelism.module_fqns_per_model_part:
            stages.append({STAGES: small_parts(parts, args.n_layers), **per_rank})
        stages.append(per_rank)
    else:
        kept.pop(SCHEDULE, None)
    cases = [
        build_case(name, small, mesh, **{**options, "parallelism": kept | own})
        for mesh in (_degrees(config.parallelism, args, axes), dict.fromkeys(axes, 2))
        for own in (*stages, {})
    ]
    return next(filter(can_run, cases), cases[-1])


def _degrees(parallelism: Parallelism, args: DecoderArgs, axes: Collection[str]) -> dict[str, int]:
    """Return a mesh of at most `MAX_RANKS`, with the config's degree along an axis where it fits,
    and otherwise with the largest that does."""
    wanted = {axis: getattr(parallelism, KEYS[axis]) for axis in axes}
    if wanted.get("dp_shard") == -1:  # as many ranks as there will be
        wanted["dp_shard"] = 4 if len(axes) == 1 else 2
    mesh = dict.fromkeys(axes, 2)
    for axis in sorted(axes, key=lambda axis: wanted[axis]):
        most = MAX_RANKS * mesh[axis] // math.prod(mesh.values())
        if axis == "tp":
            most = min(most, largest_tp(args, wanted[axis]))
        power = 1 << (most.bit_length() - 1)
        fitting = min(wanted[axis], most) if axis == "pp" else math.gcd(wanted[axis], power)
        mesh[axis] = max(2, fitting)
    return with_ep(mesh, parallelism.expert_parallel_degree)


def with_ep(mesh: dict[str, int], degree: int) -> dict[str, int]:
    """Return `mesh` with the largest part of an expert-parallel degree that its ranks allow."""
    ep = math.gcd(degree, *[math.prod(mesh.get(axis, 1) for axis in SHARING)])
    return mesh | ({"ep": ep} if ep > 1 else {})


def num_ranks(mesh: Degrees) -> int:
    """Return the ranks of a mesh; ep takes ranks of other axes."""
    return math.prod(degree for axis, degree in mesh.items() if axis != "ep")


def can_run(case: Case) -> bool:
    """Return whether every rule accepts the case."""
    try:
        resolve(case.config, look(case.config, case.world_size))
    except ConfigError:
        return False
    return True


def _compilable(shape: Degrees) -> Degrees:
    """`shape`, or the first axes of it at degree 2: eight compilers on one machine take minutes."""
    if num_ranks(shape) <= 4:
        return shape
    axes = [axis for axis in shape if axis != "ep"]
    return with_ep(dict.fromkeys(axes[:2], 2), min(shape.get("ep", 1), 2))


def _within_batch(shape: Degrees) -> Degrees:
    """`shape`, or less of data parallelism where that leaves one sequence for two microbatches."""
    dp = math.prod(shape.get(axis, 1) for axis in HSDP)
    return shape if 2 * dp <= GLOBAL_BATCH else dict.fromkeys(shape, 2)


def build_case(
    name: str,
    small: JobConfig,
    mesh: Degrees,
    *,
    num_microbatches: int = 0,
    kind: Kind = "fp32",
    **sections: Mapping[str, Any],
) -> Case:
    """`small` on `mesh`, with the keys of `sections` over its own.

    Args:
        num_microbatches: of a rank in a step; 0: a single one, or with a pipeline as many as can
            be. A sum in bf16 has its reference's.
    """
    dp = mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)
    if kind in ("bf16 sums", "user types") or ("pp" in mesh and not num_microbatches):
        num_microbatches = GLOBAL_BATCH // dp
    updates: dict[str, dict[str, Any]] = {key: dict(values) for key, values in sections.items()}
    degrees = {key: mesh.get(axis, 1) for axis, key in DEGREES.items()}
    updates["parallelism"] = updates.get("parallelism", {}) | degrees
    local = {"local_batch_size": GLOBAL_BATCH // (dp * max(num_microbatches, 1))}
    precision = FP32 if kind in ("fp32", "tf32") else {}
    if small.float8.enable:
        updates["float8"] = {"enable": not precision}
        name = name.replace("bf16", "float8")
    stored: Options = {} if kind == "user types" else stored_in_fp32(small)
    updates["training"] = (
        stored.get("training", {}) | updates.get("training", {}) | local | precision
    )
    updates["optimizer"] = stored.get("optimizer", {}) | updates.get("optimizer", {})
    config = changed(small, updates)
    shape = mesh_text(mesh)
    return Case(f"{name}: {shape}" if shape else name, config, num_ranks(mesh), kind)


def distinct(cases: Iterable[Case]) -> list[Case]:
    """Without cases that would run the same as an earlier one."""
    found: dict[str, Case] = {}
    for case in cases:
        found.setdefault(case.config.model_dump_json(), case)
    return list(found.values())
