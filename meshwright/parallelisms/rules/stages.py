"""The stages of a pipeline: which modules each has, and which rank has which. Free of torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from meshwright.config.job_config import JobConfig
from meshwright.config.parallelism import Parallelism
from meshwright.config.rules import Check, Facts, Row, Rule
from meshwright.models.table import DecoderSpec
from meshwright.system.errors import ConfigError, config_error, did_you_mean
from meshwright.system.modules import has_torch, torch_version


@dataclass(frozen=True)
class Schedule:
    """The requirements of a schedule of `torch.distributed.pipelining`."""

    stages_per_rank: tuple[int, int | None]
    """Fewest and most."""
    is_v: bool = False
    """Rank r of p has stages r and 2p - 1 - r, else r, r + p, r + 2p, ..."""
    splits_backward: bool = False
    """Gradients of inputs and of weights are computed in two passes through the graph."""
    microbatches: str = ""
    """Rule on their number. stages: at least one a stage; rounds: full rounds over the ranks."""


SCHEDULES = {
    "GPipe": Schedule((1, 1)),
    "1F1B": Schedule((1, 1), microbatches="stages"),
    "Interleaved1F1B": Schedule((2, None), microbatches="rounds"),
    "InterleavedZeroBubble": Schedule((2, None), splits_backward=True, microbatches="rounds"),
    "ZBVZeroBubble": Schedule((2, 2), is_v=True, splits_backward=True),
    "DualPipeV": Schedule((2, 2), is_v=True, splits_backward=True, microbatches="stages"),
}


def stages_per_rank(parallelism: Parallelism) -> int:
    """Return the stages of each rank of a pipeline; -1 stands for the fewest, or for the parts."""
    per_rank = parallelism.pipeline_parallel_stages_per_rank
    if per_rank == -1:
        fewest, _ = SCHEDULES[parallelism.pipeline_parallel_schedule].stages_per_rank
        parts = len(parallelism.module_fqns_per_model_part)
        per_rank = max(fewest, parts // parallelism.pipeline_parallel_degree)
    return per_rank


def num_stages(parallelism: Parallelism) -> int:
    """Return the stages over all ranks."""
    degree = parallelism.pipeline_parallel_degree
    return 1 if degree == 1 else stages_per_rank(parallelism) * degree


def splits_backward(parallelism: Parallelism) -> bool:
    """Return whether there is a pipeline whose schedule computes gradients in two passes."""
    has_pipeline = parallelism.pipeline_parallel_degree > 1
    return has_pipeline and SCHEDULES[parallelism.pipeline_parallel_schedule].splits_backward


def _takes_stages(config: JobConfig, _: Facts) -> Iterator[ConfigError]:
    """The schedule can have so many stages on a rank."""
    p = config.parallelism
    name, per_rank = p.pipeline_parallel_schedule, stages_per_rank(p)
    fewest, most = SCHEDULES[name].stages_per_rank
    takes = f"{fewest}" if fewest == most else f"{fewest} or more"
    if p.pipeline_parallel_degree > 1 and not fewest <= per_rank <= (most or per_rank):
        yield config_error(
            "parallelism.pipeline_parallel_stages_per_rank",
            per_rank,
            f"schedule {name} takes {takes}",
            f"set it to {fewest}, or choose a different pipeline_parallel_schedule",
        )


def _has_microbatches(config: JobConfig, _: Facts) -> Iterator[ConfigError]:
    """The schedule has enough microbatches."""
    parallelism = config.parallelism
    ranks, name = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule
    if ranks == 1:
        return
    stages = num_stages(parallelism)
    per_microbatch = config.num_data_ranks * config.training.local_batch_size  # over all ranks
    nearest = num_microbatches = config.num_microbatches
    distance = 0
    while not takes_microbatches(name, nearest, ranks, stages):
        distance = -distance if distance > 0 else 1 - distance  # 1, -1, 2, -2, ...
        nearest = num_microbatches + distance
    rule = {
        "stages": f"{name} needs at least one a stage, {stages}",
        "rounds": f"{name} needs at least one a rank, {ranks}, and full rounds over the ranks",
    }.get(SCHEDULES[name].microbatches, f"{name} needs at least one a rank, {ranks}")
    if nearest != num_microbatches:
        yield config_error(
            "training.global_batch_size",
            num_microbatches * per_microbatch,
            f"makes {num_microbatches} microbatches of {per_microbatch} sequences; {rule}",
            f"the nearest is {nearest * per_microbatch}; or lower training.local_batch_size",
        )


def _has_layers(config: JobConfig, facts: Facts) -> Iterator[ConfigError]:
    """Every stage has a layer, and the parts that are given are the model's modules."""
    parallelism = config.parallelism
    num_layers = len(facts.spec.layers) - facts.spec.mtp_depth
    degree, stages = parallelism.pipeline_parallel_degree, num_stages(parallelism)
    if degree == 1:
        return
    if stages > num_layers:
        yield config_error(
            "parallelism.pipeline_parallel_degree",
            degree,
            f"makes {stages} stages, but the model has {num_layers} layers, and each needs one",
            f"use at most {num_layers * degree // stages}",
        )
    elif parallelism.module_fqns_per_model_part:
        error = _fault_of_parts(parallelism.module_fqns_per_model_part, stages, num_layers)
        yield from [error] if error is not None else []


def _fault_of_parts(
    parts: Sequence[Sequence[str]], stages: int, num_layers: int
) -> ConfigError | None:
    """Return what is wrong with the modules that are given for each stage; None: nothing is."""
    key = "parallelism.module_fqns_per_model_part"
    if len(parts) != stages:
        fix = "set pipeline_parallel_stages_per_rank, or merge or split parts"
        return config_error(key, parts, f"has {len(parts)} parts for {stages} stages", fix)
    wanted = ["tok_embeddings", *(f"layers.{i}" for i in range(num_layers)), "norm", "output"]
    names = [name for part in parts for name in part]
    for name in names:
        if name not in wanted:
            return config_error(key, name, "no such module", did_you_mean(name, wanted))
    if names != wanted:
        rule = "does not name every module once, in the order of the model"
        fix = f"write {', '.join(wanted[:2])}, ..., {', '.join(wanted[-3:])}"
        return config_error(key, parts, rule, fix)
    for part in parts:
        has_layer = any(name.startswith("layers.") for name in part)
        if not has_layer or ("norm" in part) != ("output" in part):
            rule = "a stage needs a layer, and norm and output stay together"
            return config_error(key, part, rule)
    return None


def _without_copy(facts: Facts) -> str:
    """Return the keys and values with which the last stage has no copy of the embedding."""
    tie = ["model.args.tie_embeddings = false"] if facts.spec.tie_embeddings else []
    mtp = ["model.args.mtp_depth = 0"] if facts.spec.mtp_depth else []
    return " and ".join(tie + mtp)


IN_TWO_PASSES = "computes gradients in two passes"

RULES: tuple[Row[Facts], ...] = (
    Check(_has_microbatches, needs="world_size"),
    Rule(
        "parallelism.pipeline_parallel_schedule",
        lambda c, _: splits_backward(c.parallelism) and c.compile.enable is True,
        f"{IN_TWO_PASSES}, which compiled blocks cannot",
        "set compile.enable = false, or choose Interleaved1F1B",
    ),
    Rule(
        "parallelism.pipeline_parallel_schedule",
        lambda c, _: splits_backward(c.parallelism) and c.activation_checkpoint.saves_by_op,
        f"{IN_TWO_PASSES}, and what activation checkpointing saves by op is gone after the first",
        'set activation_checkpoint.selective_ac_option = "2", or choose Interleaved1F1B',
    ),
    # torch looks up the parameters of a stage before backward gathers them: it finds the shards,
    # which aren't in the graph, and gives the weights no gradients (stage_backward_input of torch
    # 2.13, distributed/pipelining/_backward.py)
    Rule(
        "parallelism.fsdp_reshard_after_forward",
        lambda c, _: (
            splits_backward(c.parallelism) and c.parallelism.fsdp_reshard_after_forward == "always"
        ),
        f"{{parallelism.pipeline_parallel_schedule}} {IN_TWO_PASSES}, and torch would lose "
        "gradients of the weights freed after forward",
        'leave it out, or set pipeline_parallel_schedule = "Interleaved1F1B"',
    ),
    # up to torch 2.11, `stage_backward_weight` takes only nodes of torch's own (2.12 wasn't tried)
    Rule(
        "parallelism.pipeline_parallel_schedule",
        lambda c, _: (
            c.float8.enable
            and splits_backward(c.parallelism)
            and not has_torch(2, 13)
            and torch_version()
        ),
        f"{IN_TWO_PASSES}, which torch {{detail}} cannot in float8 layers",
        "use torch 2.13, or choose Interleaved1F1B",
    ),
    Rule(
        "parallelism.pipeline_parallel_schedule",
        lambda c, facts: (
            c.parallelism.pipeline_parallel_degree > 1
            and SCHEDULES[c.parallelism.pipeline_parallel_schedule].is_v
            and facts.spec.copies_embedding
            and _without_copy(facts)
        ),
        "has the first and the last stage on one rank, which would have the embedding twice, since "
        "it is tied, or MTP looks up tokens in the last stage",
        'choose "1F1B" or "Interleaved1F1B", or set {detail}',
        needs="model",
    ),
    Rule(
        "optimizer.early_step_in_backward",
        lambda c, facts: (
            c.parallelism.pipeline_parallel_degree > 1
            and c.optimizer.early_step_in_backward
            and facts.spec.copies_embedding
            and _without_copy(facts)
        ),
        "updates before the first and the last stage have added up their gradients of the "
        "embedding, which is tied, or which MTP looks up tokens in",
        "leave it out, or set {detail}",
        needs="model",
    ),
    Check(_has_layers, needs="model"),
)

TAKES_STAGES = Check(_takes_stages)
"""Judged on the config as it is written: a batch of -1 follows from the number of stages."""


def assign_modules(parallelism: Parallelism, model: DecoderSpec, seq_len: int) -> list[list[str]]:
    """Return the names of the modules of every stage: as the config says, else split evenly.

    The last stage also has the layers of MTP. Then, or if embeddings are tied, it has the embedding
    as well: a copy, which has the same name, first values
    and updates as the first stage's.
    """
    parts = parallelism.module_fqns_per_model_part
    predictors = [f"layers.{name}" for name in model.predictors]
    if not parts or parallelism.pipeline_parallel_degree == 1:
        size = model.stage_costs(seq_len)
        count = len(model.layers) - model.mtp_depth
        layers = [size[f"layers.{index}"] for index in range(count)]
        embedding = size["tok_embeddings"]
        output = embedding if model.tie_embeddings else size["output"]
        last = (1 + model.mtp_depth) * output + sum(size[name] for name in predictors)
        parts = split_evenly(layers, num_stages(parallelism), embedding=embedding, output=last)
    parts = [*parts[:-1], [*parts[-1], *predictors]]
    if len(parts) == 1 or not model.copies_embedding:
        return parts
    return [*parts[:-1], ["tok_embeddings", *parts[-1]]]


def takes_microbatches(schedule: str, num_microbatches: int, num_ranks: int, stages: int) -> bool:
    """Return whether `schedule` can run with so many microbatches a step, ranks, and stages in all.

    At least one a rank is asked of every schedule: with fewer, ranks would never work at once.
    """
    if num_microbatches < num_ranks:
        return False
    if SCHEDULES[schedule].microbatches == "stages":
        return num_microbatches >= stages
    if SCHEDULES[schedule].microbatches == "rounds":
        return num_microbatches % (num_microbatches // num_ranks) == 0
    return True


def stages_of_rank(rank: int, num_ranks: int, num_stages: int, schedule: str) -> list[int]:
    """Indices of the stages that a rank has, ascending; with one stage in all there is no pipeline,
    whatever the schedule that it would have."""
    if num_stages > 1 and SCHEDULES[schedule].is_v:
        return [rank, 2 * num_ranks - 1 - rank]
    return list(range(rank, num_stages, num_ranks))


def split_evenly(
    layers: Sequence[int], num_stages: int, *, embedding: int, output: int
) -> list[list[str]]:
    """Return the names of the modules of each stage, so that the costliest stage is as cheap as can
    be.

    Every stage has at least one layer; the first also the embedding, the last also norm and output.

    Args:
        layers, embedding, output: cost of each. With parameters as the cost, it stands for time in
            layers and output, and for memory in all three.
    """
    bounds = _even_bounds(tuple(layers), num_stages, embedding, output)
    parts = [[f"layers.{index}" for index in range(start, end)] for start, end in pairwise(bounds)]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts


@cache  # a search asks for the same split hundreds of times, 50 ms each for 126 layers
def _even_bounds(
    layers: tuple[int, ...], num_stages: int, embedding: int, output: int
) -> tuple[int, ...]:
    """Return the first layer of each stage, and the number of layers."""
    num_layers, before = len(layers), [0, *accumulate(layers)]  # costs of the first n layers
    heaviest = [0] * (num_layers + 1)  # of the best split of the first n layers into s stages
    squares = [0] * (num_layers + 1)  # its sum of squared costs: between equals, the most even
    starts: list[list[int]] = []  # by stage and n: where the last of those s stages starts
    for stage in range(num_stages):
        extra = (embedding if stage == 0 else 0) + (output if stage == num_stages - 1 else 0)
        found = [(0, 0, 0)] * (num_layers + 1)
        for end in range(stage + 1, num_layers + 1):
            options = [
                (max(heaviest[start], cost), squares[start] + cost**2, start)
                for start in range(stage, end if stage else 1)
                for cost in [before[end] - before[start] + extra]
            ]
            found[end] = min(options)
        heaviest, squares, begins = (list(column) for column in zip(*found, strict=True))
        starts.append(begins)
    bounds = [num_layers]
    for begins in reversed(starts):
        bounds.insert(0, begins[bounds[0]])
    return tuple(bounds)
