"""Modules that compute in another precision than the rest: in fp32, or in float8. Free of torch."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from meshwright.config.job_config import JobConfig
from meshwright.config.rules import Check, Choice, Facts, Row, Rule
from meshwright.models.table import DecoderSpec
from meshwright.system.errors import ConfigError, config_error, did_you_mean


def choose_type(config: JobConfig, facts: Facts) -> Choice:
    """Decide about `training.mixed_precision_param` = "auto"; the reason is told if the CPU did."""
    training = config.training
    if training.mixed_precision_param != "auto":
        return Choice()
    needs_bf16 = training.dtype == "bfloat16" or config.float8.enable
    asks_cpu = not facts.expects_gpus and not needs_bf16
    slow = facts.slow_bf16 if asks_cpu else ""
    dtype = "float32" if slow else "bfloat16"
    reason = slow or "this CPU has fast instructions for it"
    line = f'training.mixed_precision_param = "auto": {dtype}, since {reason}' if asks_cpu else ""
    return Choice({"training": {"mixed_precision_param": dtype}}, line)


def find_fp32_modules(config: JobConfig, model: DecoderSpec) -> list[str]:
    """Return the names of the modules that `training.fp32_modules` matches, without those inside
    another."""
    patterns = config.training.fp32_modules
    names = model.module_names if patterns else ()
    matches = {name for name in names if any(fnmatchcase(name, one) for one in patterns)}
    inside = tuple(f"{name}." for name in matches)
    return [name for name in names if name in matches and not name.startswith(inside)]


def has_part_of_block(modules: Iterable[str]) -> bool:
    """Return whether one of these modules is inside a block."""
    return any(name.count(".") > 1 for name in modules)


def _parts_of_blocks(config: JobConfig, facts: Facts) -> list[str]:
    return [name for name in find_fp32_modules(config, facts.spec) if has_part_of_block([name])]


def _fp32_patterns(config: JobConfig, facts: Facts) -> Iterator[ConfigError]:
    """Each pattern matches modules that may differ from their surroundings."""
    key, patterns = "training.fp32_modules", config.training.fp32_modules
    names = facts.spec.module_names if patterns else ()
    valid = {re.sub(r"\d+", "*", name) for name in names}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            yield config_error(key, pattern, "matches no module", did_you_mean(pattern, valid))
    is_tied = facts.spec.tie_embeddings
    if is_tied and {"tok_embeddings", "output"} & {*find_fp32_modules(config, facts.spec)}:
        yield config_error(
            key,
            patterns,
            "names the embedding or the output, which are one matrix (model.args.tie_embeddings)",
            "leave both out, or set model.args.tie_embeddings = false",
        )


def _counted_parts(config: JobConfig, facts: Facts) -> Iterator[ConfigError]:
    """No block that holds an fp32 module counts its operations when it is recomputed.

    A block with experts does in any mode: recomputation keeps some of its results.
    """
    checkpoint, inside = config.activation_checkpoint, _parts_of_blocks(config, facts)
    has_experts = any(int(name.split(".")[1]) in facts.spec.mixtures for name in inside)
    if checkpoint.saves_by_op and inside:
        counter = 'activation_checkpoint.selective_ac_option = "op"'
    elif has_experts and checkpoint.mode in ("selective", "full"):
        counter = "a block with experts"
    else:
        return
    yield config_error(
        "training.fp32_modules",
        config.training.fp32_modules,
        "names modules inside a block, where FSDP's operations differ when it is recomputed, and "
        f"{counter} counts them",
        'name whole blocks, as "layers.0", or set activation_checkpoint.mode = '
        f'"{"none" if has_experts else "full"}"',
    )


def _linear_layers(config: JobConfig, model: DecoderSpec) -> Mapping[str, tuple[int, int]]:
    return model.linear_layers(config.parallelism.tensor_parallel_degree)


def find_float8_layers(
    config: JobConfig, model: DecoderSpec, fp32_modules: Sequence[str]
) -> list[str]:
    """Return the names of the layers that multiply in float8; without `float8.enable` none."""
    if not config.float8.enable:
        return []
    outside = tuple(f"{name}." for name in fp32_modules)
    return [
        name
        for name in _linear_layers(config, model)
        if not any(part in name for part in config.float8.filter_fqns)
        and not f"{name}.".startswith(outside)
    ]


def _float8_layers(config: JobConfig, facts: Facts) -> Iterator[ConfigError]:
    """Each filter matches a layer, one is left, and GPUs can multiply those that are."""
    options, key = config.float8, "float8.filter_fqns"
    if not options.enable:
        return
    layers = _linear_layers(config, facts.spec)
    valid = {re.sub(r"layers\.\d+\.", "", name) for name in layers}
    for part in options.filter_fqns:
        if not any(part in name for name in layers):
            yield config_error(key, part, "is part of no layer's name", did_you_mean(part, valid))
    chosen = find_float8_layers(config, facts.spec, find_fp32_modules(config, facts.spec))
    if not chosen:
        rule = "leaves no layer to multiply in float8, or training.fp32_modules does"
        yield config_error(
            key, options.filter_fqns, rule, "name fewer, or set float8.enable = false"
        )
    if not options.emulate:
        yield from _multiples(config, {name: layers[name] for name in chosen})


def _multiples(config: JobConfig, layers: Mapping[str, tuple[int, int]]) -> Iterator[ConfigError]:
    rule = "GPUs multiply in float8 if every size is a multiple of 16, and "
    uneven = [name for name, (rows, columns) in layers.items() if rows % 16 or columns % 16]
    for name in uneven[:1]:
        rows, columns = layers[name]
        yield config_error(
            "float8.filter_fqns",
            config.float8.filter_fqns,
            f"{rule}a rank's part of {name} is {rows} x {columns}",
            f'add "{name.split(".", 2)[-1]}"',
        )
    tokens = config.training.local_batch_size * config.training.seq_len
    tokens //= config.parallelism.context_parallel_degree
    if tokens % 16:
        yield config_error(
            "float8.enable",
            True,
            f"{rule}a rank has {tokens} tokens of a microbatch",
            "change training.seq_len or training.local_batch_size",
        )


RULES: tuple[Row[Facts], ...] = (
    Check(_fp32_patterns, needs="model"),
    Rule(
        "training.fp32_modules",
        lambda c, facts: c.compile.enable is True and _parts_of_blocks(c, facts),
        "names modules inside a block, where torch.compile cannot trace FSDP's hooks",
        'name whole blocks, as "layers.0", or set compile.enable = false',
        needs="model",
    ),
    Check(_counted_parts, needs="model"),
    Check(_float8_layers, needs="model"),
)
