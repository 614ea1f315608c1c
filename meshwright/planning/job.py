"""The job that is planned: a config without its data, tokenizer and checkpoints."""

from __future__ import annotations

import dataclasses
import tempfile

from meshwright.config.job_config import (
    BYTES,
    Checkpoint,
    Compile,
    JobConfig,
    Metrics,
    Profiling,
    Training,
    Validation,
    WeightedSource,
)
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
    plain = Training()
    of_data = {
        name: getattr(plain, name)
        for name in (*WeightedSource.model_fields, "datasets")
        if name in Training.model_fields
    }
    of_data |= {name: getattr(plain, name) for name in ("max_epochs", "max_bad_records")}
    job = {"max_run_seconds": 0, "dump_folder": tempfile.gettempdir()}
    config = config.model_copy(
        update={
            "job": config.job.model_copy(update=job),
            "model": config.model.model_copy(
                update={"tokenizer_path": BYTES, "chat_template_path": ""}
            ),
            "training": config.training.model_copy(update=of_data),
            "compile": Compile(),
            "parallelism": config.parallelism.model_copy(
                update={"enable_async_tensor_parallel": False}  # it changes no tensor
            ),
            "validation": Validation(),
            "checkpoint": Checkpoint(),
            "metrics": Metrics(),
            "profiling": Profiling(),
        }
    )
    plan = preflight(config, world_size, checks_memory=False)
    return _with_ring(plan) if is_gpu else plan


def _with_ring(plan: Plan) -> Plan:
    """Write out the attention that "auto" takes on GPUs, where the mesh says it is on CPUs."""
    config = plan.config
    parallelism, training = config.parallelism, config.training
    has_kernel = plan.model_args.table.rope.head_dim % 8 == 0
    if (
        parallelism.context_parallel_degree > 1
        and parallelism.context_parallel_attention == "auto"
        and training.mixed_precision_param == "bfloat16"
        and not training.mask_documents
        and has_kernel
    ):
        parallelism = parallelism.model_copy(update={"context_parallel_attention": "ring"})
        config = config.model_copy(update={"parallelism": parallelism})
    return dataclasses.replace(plan, config=config)
