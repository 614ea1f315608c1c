"""Modules that compute in another precision than the rest: in fp32, or in float8. Free of torch."""

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from meshwright.config.job_config import JobConfig, changed
from meshwright.models.args import DecoderArgs
from meshwright.models.table import DecoderSpec
from meshwright.system.errors import check, did_you_mean
from meshwright.system.machine import why_bf16_is_slow


def resolve_type(config: JobConfig, *, is_gpu: bool) -> tuple[JobConfig, str]:
    """Return `config` with `training.mixed_precision_param` = "auto" decided, and how it was.

    Each machine asks its own CPU; `check_agreement` rejects a job whose ranks find other types.

    Args:
        is_gpu: ranks train on GPUs, as far as is known here.

    Returns:
        The config, and a line for the log if the CPU decided; otherwise "".
    """
    training = config.training
    if training.mixed_precision_param != "auto":
        return config, ""
    needs_bf16 = training.dtype == "bfloat16" or config.float8.enable
    asks_cpu = not is_gpu and not needs_bf16
    reason = why_bf16_is_slow() if asks_cpu else ""
    dtype = "float32" if reason else "bfloat16"
    reason = reason or "this CPU has fast instructions for it"
    line = f'training.mixed_precision_param = "auto": {dtype}, since {reason}' if asks_cpu else ""
    return changed(config, {"training": {"mixed_precision_param": dtype}}), line


def find_fp32_modules(config: JobConfig, args: DecoderArgs) -> list[str]:
    """Return the names of the modules that `training.fp32_modules` matches, without those inside
    another.

    Raises:
        ConfigError: if a pattern matches none, or one that cannot differ from its surroundings.
    """
    key, patterns = "training.fp32_modules", config.training.fp32_modules
    if not patterns:
        return []
    names = args.table.module_names
    valid = {re.sub(r"\d+", "*", name) for name in names}
    for pattern in patterns:
        is_found = any(fnmatchcase(name, pattern) for name in names)
        check(is_found, key, pattern, "matches no module", did_you_mean(pattern, valid))
    found = {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}
    inside = tuple(f"{name}." for name in found)
    outermost = [name for name in names if name in found and not name.startswith(inside)]
    check(
        not args.tie_embeddings or found.isdisjoint({"tok_embeddings", "output"}),
        key,
        patterns,
        "names the embedding or the output, which are one matrix (model.args.tie_embeddings)",
        "leave both out, or set model.args.tie_embeddings = false",
    )
    return outermost


def has_part_of_block(modules: Iterable[str]) -> bool:
    """Return whether one of these modules is inside a block."""
    return any(name.count(".") > 1 for name in modules)


def check_fp32_modules(config: JobConfig, fp32_modules: Sequence[str], model: DecoderSpec) -> None:
    """Check that modules inside a block may stay fp32.

    Args:
        config: with `compile.enable` resolved.
        fp32_modules: the result of `find_fp32_modules`.
        model: of layers with experts recomputation keeps some results in any mode.

    Raises:
        ConfigError: if the block is compiled, or its operations are counted.
    """
    key, patterns = "training.fp32_modules", config.training.fp32_modules
    whole_blocks = 'name whole blocks, as "layers.0", or '
    inside = [name for name in fp32_modules if has_part_of_block([name])]
    check(
        not (inside and config.compile.is_on),
        key,
        patterns,
        "names modules inside a block, where torch.compile cannot trace FSDP's hooks",
        f"{whole_blocks}set compile.enable = false",
    )
    checkpoint, counter = config.activation_checkpoint, "a block with experts"
    has_experts = any(int(name.split(".")[1]) in model.mixtures for name in inside)
    is_counted = has_experts and checkpoint.mode in ("selective", "full")
    if (checkpoint.mode, checkpoint.selective_ac_option) == ("selective", "op"):
        counter, is_counted = 'activation_checkpoint.selective_ac_option = "op"', bool(inside)
    check(
        not is_counted,
        key,
        patterns,
        "names modules inside a block, where FSDP's operations differ when it is recomputed, and "
        f"{counter} counts them",
        f'{whole_blocks}set activation_checkpoint.mode = "{"none" if has_experts else "full"}"',
    )


def find_float8_layers(
    config: JobConfig, model: DecoderSpec, fp32_modules: Sequence[str]
) -> list[str]:
    """Return the names of the layers that multiply in float8; without `float8.enable` none.

    Raises:
        ConfigError: if a filter matches no layer, if none is left, or if GPUs cannot multiply one.
    """
    options, parallelism = config.float8, config.parallelism
    if not options.enable:
        return []
    layers = model.linear_layers(parallelism.tensor_parallel_degree)
    key = "float8.filter_fqns"
    for part in options.filter_fqns:
        valid = {re.sub(r"layers\.\d+\.", "", name) for name in layers}
        is_found = any(part in name for name in layers)
        check(is_found, key, part, "is part of no layer's name", did_you_mean(part, valid))
    outside = tuple(f"{name}." for name in fp32_modules)
    found = [
        name
        for name in layers
        if not any(part in name for part in options.filter_fqns)
        and not f"{name}.".startswith(outside)
    ]
    check(
        bool(found),
        key,
        options.filter_fqns,
        "leaves no layer to multiply in float8, or training.fp32_modules does",
        "name fewer, or set float8.enable = false",
    )
    if not options.emulate:
        _check_multiples(config, {name: layers[name] for name in found})
    return found


def _check_multiples(config: JobConfig, layers: Mapping[str, tuple[int, int]]) -> None:
    """Check that GPUs can multiply parts of these sizes in float8."""
    rule = "GPUs multiply in float8 if every size is a multiple of 16, and "
    for name, (rows, columns) in layers.items():
        check(
            rows % 16 == columns % 16 == 0,
            "float8.filter_fqns",
            config.float8.filter_fqns,
            f"{rule}a rank's part of {name} is {rows} x {columns}",
            f'add "{name.split(".", 2)[-1]}"',
        )
    tokens = config.training.local_batch_size * config.training.seq_len
    tokens //= config.parallelism.context_parallel_degree
    check(
        tokens % 16 == 0,
        "float8.enable",
        True,
        f"{rule}a rank has {tokens} tokens of a microbatch",
        "change training.seq_len or training.local_batch_size",
    )
