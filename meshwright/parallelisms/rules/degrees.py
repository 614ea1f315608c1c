"""The degrees of the mesh and the global batch: their rules, and the values that fill in -1."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from meshwright.config.fields import value_of
from meshwright.config.job_config import JobConfig, Update
from meshwright.config.parallelism import Parallelism
from meshwright.config.rules import Check, Facts, Row, Rule, given_while
from meshwright.models.args import divisors_of
from meshwright.parallelisms.rules.stages import num_stages, splits_backward
from meshwright.system.errors import ConfigError, config_error
from meshwright.system.modules import has_torch, torch_version

KEYS = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}
"""Key in [parallelism] of the degree of each axis. Outermost first: neighboring ranks, which share
a node, get the axes that communicate most."""

AXES = tuple(KEYS)

DEGREES = KEYS | {"ep": "expert_parallel_degree"}
"""With the key of the one degree that is no axis of its own; see `ParallelDims.ep`."""


def _other_degrees(parallelism: Parallelism) -> dict[str, int]:
    """Return the degrees that multiply to the number of ranks with dp_shard's, by key."""
    names = (KEYS[axis] for axis in ("dp_replicate", "cp", "tp", "pp"))
    return {f"parallelism.{name}": getattr(parallelism, name) for name in names}


def _filled_in(parallelism: Parallelism, world_size: int) -> int:
    """Return the degree of dp_shard on `world_size` ranks, where -1 takes all that are left."""
    shard = parallelism.data_parallel_shard_degree
    return world_size // math.prod(_other_degrees(parallelism).values()) if shard == -1 else shard


def _mesh(config: JobConfig, facts: Facts) -> Iterator[ConfigError]:
    """The degrees multiply to the number of ranks, and the batch divides."""
    degrees, ranks = _other_degrees(config.parallelism), facts.ranks
    others, shard = math.prod(degrees.values()), _filled_in(config.parallelism, ranks)
    if shard * others == ranks:
        yield from _batch(config, ranks, shard)
    elif config.parallelism.data_parallel_shard_degree == -1:
        # the one that is too many by itself, or else the largest
        at_fault = max(degrees, key=lambda name: (ranks % degrees[name] > 0, degrees[name]))
        yield config_error(
            at_fault,
            degrees[at_fault],
            f"this and the other given degrees multiply to {others}, which does not divide "
            f"{ranks} ranks",
            f"launch a multiple of {others} ranks, or lower a degree",
        )
    else:
        yield config_error(
            f"parallelism.{KEYS['dp_shard']}",
            shard,
            f"the degrees multiply to {shard * others}, but there are {ranks} ranks",
            f"launch {shard * others} ranks (NGPU), or set it to -1"
            if shard
            else "set it to -1 for all ranks that the other degrees leave over",
        )


def _batch(config: JobConfig, ranks: int, shard: int) -> Iterator[ConfigError]:
    training = config.training
    dp = shard * config.parallelism.data_parallel_replicate_degree
    batch, per_microbatch = training.global_batch_size, dp * training.local_batch_size
    if batch == -1 or (batch > 0 and batch % per_microbatch == 0):
        return
    nearest = max(1, round(batch / per_microbatch)) * per_microbatch
    yield config_error(
        "training.global_batch_size",
        batch,
        f"must be a positive multiple of {per_microbatch} = {dp} data-parallel ranks x "
        f"local_batch_size {training.local_batch_size}",
        f"the nearest is {nearest}" + _other_ranks(config, ranks, ranks // shard),
    )


def _other_ranks(config: JobConfig, world_size: int, others: int) -> str:
    """Return the way out for a batch that isn't a multiple on `world_size` ranks: the next fewer
    and the next more ranks that it is split evenly over; "" if the degrees fix their number.

    Args:
        others: ranks of a replica of the model, times replicas.
    """
    parallelism, training = config.parallelism, config.training
    copies = parallelism.data_parallel_replicate_degree
    most, rest = divmod(training.global_batch_size, training.local_batch_size * copies)
    if parallelism.data_parallel_shard_degree != -1 or most < 1 or rest:
        return ""
    counts = [shard * others for shard in range(1, most + 1) if most % shard == 0]
    fewer = [str(count) for count in counts if count < world_size][-1:]
    more = [str(count) for count in counts if count > world_size][:1]
    word = "rank" if fewer + more == ["1"] else "ranks"
    return f"; or launch {' or '.join(fewer + more)} {word} (NGPU)"


def fill_in_mesh(config: JobConfig, world_size: int) -> Update:
    """Return the values of every -1 of a config that keeps to `MESH`.

    A batch that isn't given has a microbatch for each stage of the pipeline.
    """
    parallelism, training = config.parallelism, config.training
    shard, batch = _filled_in(parallelism, world_size), training.global_batch_size
    if batch == -1:
        dp = shard * parallelism.data_parallel_replicate_degree
        batch = dp * training.local_batch_size * num_stages(parallelism)
    return {
        "parallelism": {"data_parallel_shard_degree": shard},
        "training": {"global_batch_size": batch},
    }


NARROWEST = 16
"""Width of heads that flex attention takes on GPUs at least: torch._inductor.kernel.flex (2.11 and
2.13), "embedding dimension of the query, key, and value must be at least 16"."""


def _flex_attention(config: JobConfig, facts: Facts) -> Iterator[ConfigError]:
    """Flex attention, which GPUs use for documents and windows, can do both."""
    if facts.device_type != "cuda":
        return
    if config.training.mask_documents:
        key, does = "training.mask_documents", "does it"
        fix = "set a lower model.args.n_heads, or leave it out"
    elif facts.spec.needs_masks:
        key, does = "model.flavor", "has its windows, soft caps and sinks"
        fix = "set a lower model.args.n_heads, or choose a different model"
    else:
        return
    if splits_backward(config.parallelism):
        yield config_error(
            key,
            value_of(config, key),
            f"flex attention, which {does} on GPUs, is not known to work with a schedule that goes "
            f"backward twice, as {config.parallelism.pipeline_parallel_schedule} does",
            'set parallelism.pipeline_parallel_schedule = "1F1B" or "Interleaved1F1B"',
        )
    head_dim = min(attention.head_dim for attention in facts.spec.attentions.values())
    if head_dim < NARROWEST:
        yield config_error(
            key,
            value_of(config, key),
            f"flex attention, which {does} on GPUs, takes no heads of {head_dim}, below "
            f"{NARROWEST}",
            fix,
        )


DEVICE: tuple[Row[Facts], ...] = (
    given_while(
        "float8.enable",
        lambda c, facts: not (c.float8.emulate or facts.has_float8),
        "needs NVIDIA GPUs of compute capability 8.9 or newer (Ada, Hopper, Blackwell)",
        "leave it out; or set float8.emulate = true, which is slow, to try it",
        needs="has_float8",
    ),
    Rule(
        "parallelism.enable_async_tensor_parallel",
        lambda c, facts: c.overlaps_tensor_parallel and facts.device_type == "cpu",
        "needs GPUs, and this machine trains on its cpu",
        "leave it out",
        needs="device_type",
    ),
    given_while(
        "training.attention_kernel",
        lambda _, facts: facts.device_type == "cpu",
        "needs GPUs, and this machine trains on its cpu",
        "leave it out",
        needs="device_type",
    ),
    Rule(
        "optimizer.early_step_in_backward",
        lambda c, facts: (
            facts.device_type == "cuda"
            and c.optimizer.early_step_in_backward
            and c.training.enable_cpu_offload
            # an older torch runs hooks before the copy is complete: pytorch pull request 180666
            and not has_torch(2, 13)
        ),
        "with training.enable_cpu_offload it would read gradients that are still being copied from "
        "the GPU (torch before 2.13)",
        "use torch 2.13 or newer, or leave one of the two out",
        needs="device_type",
    ),
    Check(_flex_attention, needs="device_type model"),
    Rule(
        "activation_checkpoint.mode",
        lambda c, facts: (
            facts.device_type == "cuda"
            and c.activation_checkpoint.mode == "selective"
            and c.activation_checkpoint.selective_ac_option == "op"
            and c.compile.enable is False
            and any(
                one.soft_cap is not None or one.sink_std is not None
                for one in facts.spec.attentions.values()
            )
        ),
        "isn't known to work with eager flex attention that has a soft cap or sinks: traced, it "
        "goes backward through the cap twice",
        'set compile.enable = true, or activation_checkpoint.mode = "full"',
        needs="device_type model",
    ),
)
"""Rules of the device that a rank trains on."""


def _has_cores(config: JobConfig, facts: Facts) -> Iterator[ConfigError]:
    """Context parallelism gathers keys and values at each layer's core."""
    degree = config.parallelism.context_parallel_degree
    if degree > 1 and not all("core" in one.attention.bare_modules for one in facts.spec.layers):
        key, rule = "parallelism.context_parallel_degree", "this model's layers have no `core`"
        yield config_error(key, degree, rule, "set it to 1")


def _divisible(config: JobConfig, facts: Facts) -> Iterator[ConfigError]:
    """Every dimension that is split over ranks is divisible by their number, and every rank has
    rows of the vocabulary."""
    cp, seq_len = config.parallelism.context_parallel_degree, config.training.seq_len
    if cp > 1 and seq_len % (2 * cp):
        yield config_error(
            "parallelism.context_parallel_degree",
            cp,
            f"twice it must divide training.seq_len = {seq_len}: a rank has two chunks of a "
            "sequence",
            f"the nearest training.seq_len is {max(1, round(seq_len / (2 * cp))) * 2 * cp}",
        )
    key, degree = "parallelism.tensor_parallel_degree", config.parallelism.tensor_parallel_degree
    per_rank = " / context_parallel_degree" if cp > 1 else ""
    parts = {**facts.spec.parts, f"training.seq_len{per_rank}": seq_len // cp}
    uneven = [f"{name} = {size}" for name, size in parts.items() if size % degree]
    if uneven:
        fix = f"use {divisors_of(math.gcd(*parts.values()))}"
        yield config_error(key, degree, f"does not divide {uneven[0]}", fix)
    vocab_size = facts.spec.vocab_size
    rows = -(-vocab_size // degree)  # as torch cuts: the last ranks may have fewer, or none
    if rows * (degree - 1) >= vocab_size:
        yield config_error(
            key,
            degree,
            f"{rows} rows of the vocabulary, model.args.vocab_size = {vocab_size}, for each rank "
            "leave none for the last",
            f"set model.args.vocab_size = {rows * degree}, or lower the degree",
        )


def shards_experts_apart() -> bool:
    """Return whether FSDP2 of this torch may shard experts over their own mesh."""
    return has_torch(2, 12)


def _without_experts(config: JobConfig, facts: Facts) -> Iterator[ConfigError]:
    """Every option for experts has some to act on."""
    degree = config.parallelism.expert_parallel_degree
    # the config.toml of a job gives every key
    given = config.experts.model_dump(exclude_defaults=True)
    options = {f"experts.{key}": value for key, value in given.items()}
    if degree > 1:
        options = {"parallelism.expert_parallel_degree": degree}
    for name, value in options.items() if not facts.spec.mixtures else ():
        yield config_error(name, value, "the model has no experts", "leave it out")


def _deals_out_experts(config: JobConfig, facts: Facts) -> Iterator[ConfigError]:
    """The experts of each layer can be dealt out over the expert-parallel ranks."""
    p = config.parallelism
    key, degree = "parallelism.expert_parallel_degree", p.expert_parallel_degree
    ranks = p.data_parallel_shard_degree * p.context_parallel_degree * p.tensor_parallel_degree
    counts = [mixture.n_experts for mixture in facts.spec.mixtures.values()]
    fix = f"use {divisors_of(math.gcd(ranks, *counts))}"
    uneven = [count for count in counts if count % degree]
    if counts and ranks % degree:
        rule = (
            f"must divide the {ranks} ranks of data_parallel_shard_degree x "
            "context_parallel_degree x tensor_parallel_degree, among which experts are dealt out"
        )
        yield config_error(key, degree, rule, fix)
    elif uneven:
        yield config_error(key, degree, f"does not divide model.args.n_experts = {uneven[0]}", fix)


def _shards_experts(config: JobConfig, facts: Facts) -> Iterator[ConfigError]:
    """Torch can shard experts over another mesh than the rest of a layer, where that is needed."""
    ep, tp = (getattr(config.parallelism, DEGREES[axis]) for axis in ("ep", "tp"))
    if facts.spec.mixtures and max(ep, tp) > 1 and not shards_experts_apart():
        yield config_error(
            f"parallelism.{DEGREES['ep' if ep > 1 else 'tp']}",
            max(ep, tp),
            "shards experts over a different mesh than the rest of a layer, which torch "
            f"{torch_version()} cannot",
            "use torch 2.12 or newer, or set both degrees to 1",
        )


EXPERTS: tuple[Row[Facts], ...] = (
    Check(_without_experts, needs="model"),
    Check(_deals_out_experts, needs="model world_size"),
    Check(_shards_experts, needs="model"),
    given_while(
        "float8.enable",
        lambda _, facts: facts.spec.mixtures,
        "experts in float8 are not proved to train",
        "leave it out",
        needs="model",
    ),
    given_while(
        "optimizer.early_step_in_backward",
        lambda _, facts: facts.spec.mixtures,
        "is not proved to train experts",
        "leave it out",
        needs="model",
    ),
    Rule(
        "parallelism.pipeline_parallel_schedule",
        lambda c, facts: (
            facts.spec.mixtures
            and splits_backward(c.parallelism)
            and c.activation_checkpoint.mode != "none"
        ),
        "goes backward twice, and recomputation keeps the chosen experts for one pass only",
        'choose Interleaved1F1B, or set activation_checkpoint.mode = "none"',
        needs="model",
    ),
)

MESH = Check(_mesh, needs="world_size")
"""Judged on the config as it is written: one that breaks it has no mesh, and no -1 can be filled
in."""

RULES = (
    *DEVICE,
    Check(_has_cores, needs="model"),
    Check(_divisible, needs="model"),
    *EXPERTS,
)


def power_meshes(most: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield every mesh whose degrees are powers of two up to `most`, by axis; the last axis varies
    first."""
    powers = ([1 << i for i in range(limit.bit_length())] for limit in most.values())
    for degrees in itertools.product(*powers):
        yield dict(zip(most, degrees, strict=True))


@dataclass(frozen=True)
class ParallelDims:
    """Ranks along each axis of the mesh."""

    dp_replicate: int
    dp_shard: int
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 0
    """Not its own axis: of the ranks along dp_shard, cp and tp, those that share the experts
    of a layer, each with some of them. 0: the model has no experts."""

    @property
    def efsdp(self) -> int:
        """Ranks that share each expert's parameters."""
        return self.dp_shard * self.cp * self.tp // max(self.ep, 1)

    @property
    def has_own_experts(self) -> bool:
        """Return whether experts lie on other ranks than the rest of a layer."""
        return self.ep > 0 and max(self.ep, self.tp) > 1

    @property
    def dp(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_ranks(self) -> int:
        """Ranks of the job."""
        return self.dp * self.pp * self.cp * self.tp

    @property
    def first_ranks(self) -> range:
        """The first rank of each place of the pipeline."""
        return range(0, self.num_ranks, self.num_ranks // self.pp)

    def __str__(self) -> str:
        return mesh_text(asdict(self))


def mesh_text(mesh: Mapping[str, int]) -> str:
    """Return the axes that have more than one rank, as "dp_shard 4 x tp 2"."""
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1)
