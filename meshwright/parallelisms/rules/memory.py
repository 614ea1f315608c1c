"""The memory that a rank needs at the least, and how it keeps gradients. Free of torch."""

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import NamedTuple

from meshwright.config.job_config import JobConfig, Update
from meshwright.config.rules import Check, Facts, Row, Rule
from meshwright.models.parameter import Parameter
from meshwright.models.table import DecoderSpec
from meshwright.parallelisms.rules.stages import stages_of_rank
from meshwright.system.errors import ConfigError, config_error

GIB = 2**30

BYTES = {"float32": 4, "bfloat16": 2}

USUAL_DEVICE_GIB = 80

LARGEST_PART = 0.25
"""Of the memory that weights and optimizer leave of a device: unsharded gradients may take it
between microbatches. The rest is for activations, which aren't known here."""


class Load(NamedTuple):
    """Parameters of the rank that has most of them, before FSDP2 shards them."""

    parameters: int
    trained: int
    trained_in_stage: int
    """Of one stage, that with most. A rank's stages need not have unsharded gradients, nor gathered
    weights, at the same time: torch frees those of a stage that is done."""
    parameters_in_stage: int


def heaviest_load(
    config: JobConfig,
    table: DecoderSpec,
    stage_modules: Sequence[Sequence[str]],
    frozen: frozenset[str],
) -> Load:
    """The load of the rank of the pipeline that has most parameters.

    Args:
        stage_modules: modules of each stage.
        frozen: names of the parameters that aren't trained.
    """
    p = config.parallelism
    tp, ep = p.tensor_parallel_degree, p.expert_parallel_degree

    def size(parameters: Iterable[Parameter], of_experts: int) -> int:
        """Add up the parts of `parameters`; experts' are split into so many."""
        total = 0
        for one in parameters:
            of_others = tp if len(one.shape) > 1 else 1
            total += one.numel // (of_experts if one.layout == "experts" else of_others)
        return total

    def of_stage(modules: Sequence[str]) -> Load:
        own = [item for module in modules for item in table.by_block[module].items()]
        every = [one for _, one in own]
        trained = [one for name, one in own if name not in frozen]
        # FSDP2 and ep share dp_shard x cp x tp. So of experts there are tp parts before FSDP2
        # shards over dp_shard x cp, and ep once it has gathered.
        return Load(size(every, tp), size(trained, tp), size(trained, ep), size(every, ep))

    stages = [of_stage(modules) for modules in stage_modules]
    ranks, schedule, loads = p.pipeline_parallel_degree, p.pipeline_parallel_schedule, list[Load]()
    for rank in range(ranks):
        mine = [stages[index] for index in stages_of_rank(rank, ranks, len(stages), schedule)]
        held, trained, trained_gathered, gathered = zip(*mine, strict=True)
        loads.append(Load(sum(held), sum(trained), max(trained_gathered), max(gathered)))
    return max(loads, key=lambda load: load.parameters)


def choose_reduction(config: JobConfig, load: Load) -> Update:
    """Decide about `fsdp_reduce_gradients` = "auto", where that has an effect.

    "every_microbatch" saves memory, and costs a reduce-scatter of every parameter per microbatch.
    It is chosen if there are several microbatches, nothing else needs unsharded gradients, and
    either

    - unsharded gradients take more, beyond the rank's shard of them, than `LARGEST_PART` of the
      memory that weights, optimizer and the shard leave of a device, or
    - `mixed_precision_reduce` is bfloat16: unsharded gradients would be added up in that type.
    """
    parallelism, training = config.parallelism, config.training
    is_open = parallelism.fsdp_reduce_gradients == "auto"
    if not (is_open and config.num_microbatches > 1 and config.has_fsdp):
        return {}
    shard = BYTES[training.dtype] / _num_shards(config)
    saved = load.trained * (BYTES[training.mixed_precision_reduce] - shard)
    device = (config.job.device_memory_gib or USUAL_DEVICE_GIB) * GIB
    # of a config without a choice, so without unsharded gradients
    free = device - sum(least_memory(config, load).values())
    is_possible = (
        parallelism.pipeline_parallel_degree == 1
        and not config.optimizer.early_step_in_backward
        and training.dtype == "float32"  # shards are added up in it
    )
    is_wanted = saved > LARGEST_PART * max(free, 0) or training.mixed_precision_reduce == "bfloat16"
    choice = "every_microbatch" if is_possible and is_wanted else "last_microbatch"
    return {"parallelism": {"fsdp_reduce_gradients": choice}}


def least_memory(config: JobConfig, load: Load) -> dict[str, float]:
    """Bytes that the rank with the heaviest load surely has on its device at once, by purpose.

    Without activations, buffers and gathered parameters. The moment is the end of the
    last backward or the optimizer step, whichever needs more.

    Args:
        config: with `fsdp_reduce_gradients` chosen.
    """
    parallelism, training = config.parallelism, config.training
    shards, width = _num_shards(config), BYTES[training.dtype]
    adds_up = config.num_microbatches > 1 and parallelism.fsdp_reduce_gradients == "last_microbatch"
    whole = load.trained_in_stage * BYTES[training.mixed_precision_reduce] if adds_up else 0
    gathered = 0
    if parallelism.keeps_gathered and shards > 1:
        gathered = load.parameters_in_stage * BYTES[training.mixed_precision_param]
    in_backward: dict[str, float] = {"gathered weights": gathered, "unsharded gradients": whole}
    if training.enable_cpu_offload:
        return in_backward
    shard = load.trained * width / shards
    kept = {
        "weights": load.parameters * width / shards,
        # two moments; of a matrix-wise optimizer, one
        "optimizer": (2 if config.optimizer.name in ("AdamW", "Adam") else 1) * shard,
    }
    in_step = 0 if config.optimizer.early_step_in_backward else shard
    return kept | (in_backward if gathered + whole > in_step else {"gradients": in_step})


def _fits_device(config: JobConfig, facts: Facts) -> Iterator[ConfigError]:
    """The device has the memory that a rank surely needs, as far as the device is known."""
    device_gib, needed = facts.device_memory_gib, facts.least_bytes or {}
    if device_gib is None:
        device_gib = config.job.device_memory_gib or inf
    parallelism, total = config.parallelism, sum(needed.values()) / GIB
    if total <= device_gib:
        return
    parts = ", ".join(f"{what} {size / GIB:.1f}" for what, size in needed.items() if size)
    ways = ["more ranks, or a higher tensor_parallel_degree"]
    is_alone = parallelism.pipeline_parallel_degree == 1
    if needed.get("unsharded gradients") and is_alone:
        ways.insert(0, 'parallelism.fsdp_reduce_gradients = "every_microbatch"')
    if not config.training.enable_cpu_offload:
        ways.append("training.enable_cpu_offload = true")
    yield config_error(
        "parallelism.data_parallel_shard_degree",
        parallelism.data_parallel_shard_degree,
        f"a rank needs at least {total:.1f} GiB of its device's {device_gib:.1f} ({parts}), and "
        "activations besides",
        f"use {'; or '.join(ways)}",
    )


def _adds_up_in_bf16(config: JobConfig, _: Facts) -> bool:
    """Return whether microbatches would be added up in bfloat16: sums of many are off by 1 %."""
    parallelism, training = config.parallelism, config.training
    sums_in_fp32 = (
        parallelism.fsdp_reduce_gradients == "every_microbatch"
        and training.dtype == "float32"
        # FSDP2 adds up what replicas have to exchange at the end in the type of the exchange
        and parallelism.data_parallel_replicate_degree == 1
    )
    is_exact = training.mixed_precision_reduce == "float32" or sums_in_fp32
    return not is_exact and config.num_microbatches > 1


RULES: tuple[Row[Facts], ...] = (
    Rule(
        "training.mixed_precision_reduce",
        _adds_up_in_bf16,
        "would also add up the {config.num_microbatches} microbatches of a step in bfloat16",
        'set it to "float32" (only FSDP without pipeline, replicas (HSDP) and '
        'optimizer.early_step_in_backward, with fsdp_reduce_gradients = "every_microbatch" and '
        "fp32 weights, adds them up in fp32)",
    ),
    Rule(
        "parallelism.fsdp_reduce_gradients",
        lambda c, _: (
            c.training.dtype != "float32"
            and c.parallelism.fsdp_reduce_gradients == "every_microbatch"
            # replicas add up in mixed_precision_reduce
            and c.parallelism.data_parallel_replicate_degree == 1
            and c.num_microbatches > 1
        ),
        "would add up the {config.num_microbatches} microbatches of a step in training.dtype, "
        "{training.dtype}",
        'set it to "last_microbatch", or training.dtype to "float32"',
    ),
    Check(_fits_device, needs="least_bytes"),
)
"""Judged on a config with `fsdp_reduce_gradients` chosen."""


def _num_shards(config: JobConfig) -> int:
    parallelism = config.parallelism
    return parallelism.data_parallel_shard_degree * parallelism.context_parallel_degree
