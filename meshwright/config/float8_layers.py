"""The layers that multiply in float8."""

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from meshwright.config.job_config import JobConfig
from meshwright.errors import check, did_you_mean


class HasLayers(Protocol):
    """The linear layers of a model's blocks."""

    def linear_layers(self, tp: int = 1) -> Mapping[str, tuple[int, int]]: ...


def find_float8_layers(
    config: JobConfig, model: HasLayers, fp32_modules: Sequence[str]
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
