"""The job that is planned: a config without its data, tokenizer and checkpoints."""

from __future__ import annotations

import tempfile

from meshwright.config.job_config import BYTES, JobConfig, Training, WeightedSource
from meshwright.config.update import changed
from meshwright.errors import check
from meshwright.preflight import Plan, preflight


def plan_job(config: JobConfig, world_size: int, *, is_gpu: bool) -> Plan:
    """Check `config` for `world_size` ranks, but not for files, and not for memory.

    Raises:
        ConfigError: if the job cannot run, or if only the compiler knows its memory.
    """
    check(
        config.activation_checkpoint.mode != "memory_budget",
        "activation_checkpoint.mode",
        "memory_budget",
        "only the compiler knows what it keeps",
        'plan mode = "none" for the most, and "full" for the least',
    )
    check(
        not config.float8.enable,
        "float8.enable",
        True,
        "a plan does not count the casts to float8, nor the speed of its products",
        "plan without it: weights, gradients and optimizer take the same memory",
    )
    plain = JobConfig()
    of_data = {
        name: getattr(plain.training, name)
        for name in (*WeightedSource.model_fields, "datasets")
        if name in Training.model_fields
    }
    of_data |= {name: getattr(plain.training, name) for name in ("max_epochs", "max_bad_records")}
    config = changed(
        config,
        {
            "job": {"max_run_seconds": 0, "dump_folder": tempfile.gettempdir()},
            "model": {"tokenizer_path": BYTES, "chat_template_path": ""},
            "training": of_data,
            "parallelism": {"enable_async_tensor_parallel": False},  # it changes no tensor
        },
    )
    given = config.checkpoint
    left_out = ("compile", "validation", "checkpoint", "metrics", "profiling")
    config = config.model_copy(update={name: getattr(plain, name) for name in left_out})
    saving = {name: getattr(given, name) for name in ("enable", "async_mode")}
    # a plan is of eager blocks
    config = changed(config, {"compile": {"enable": False}, "checkpoint": saving})
    return preflight(config, world_size, is_gpu=is_gpu, checks_memory=False)
