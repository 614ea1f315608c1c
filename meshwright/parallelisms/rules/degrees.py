"""Rules across sections, and the values that follow from the rest of the config."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from meshwright.config.job_config import JobConfig, changed
from meshwright.models.args import divisors_of
from meshwright.models.table import DecoderSpec
from meshwright.parallelisms.rules.stages import splits_backward
from meshwright.system.errors import check
from meshwright.system.modules import has_torch, torch_version

KEYS = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}
"""Key in [parallelism] of the degree of each axis. Outermost first: neighbouring ranks, which share
a node, get the axes that communicate most."""

AXES = tuple(KEYS)

DEGREES = KEYS | {"ep": "expert_parallel_degree"}
"""With the key of the one degree that is no axis of its own; see `ParallelDims.ep`."""

ASYNC_TENSOR_PARALLEL = "parallelism.enable_async_tensor_parallel"


def resolve_auto_values(config: JobConfig, world_size: int, num_stages: int) -> JobConfig:
    """Return `config` with every -1 replaced by its value on `world_size` ranks.

    Args:
        num_stages: of the pipeline, over all ranks; a batch that is not given fills them once.

    Raises:
        ConfigError: if the degrees do not multiply to `world_size`, or the batch does not divide.
    """
    parallelism = config.parallelism
    key = f"parallelism.{KEYS['dp_shard']}"
    shard = parallelism.data_parallel_shard_degree
    names = (KEYS[axis] for axis in ("dp_replicate", "cp", "tp", "pp"))
    degrees = {f"parallelism.{name}": getattr(parallelism, name) for name in names}
    others = math.prod(degrees.values())
    if shard == -1:
        # the one that is too many by itself, or else the largest
        at_fault = max(degrees, key=lambda name: (world_size % degrees[name] > 0, degrees[name]))
        check(
            world_size % others == 0,
            at_fault,
            degrees[at_fault],
            f"this and the other given degrees multiply to {others}, which does not divide "
            f"{world_size} ranks",
            f"launch a multiple of {others} ranks, or lower a degree",
        )
        shard = world_size // others
    check(
        shard * others == world_size,
        key,
        shard,
        f"the degrees multiply to {shard * others}, but there are {world_size} ranks",
        f"launch {shard * others} ranks (NGPU), or set it to -1"
        if shard
        else "set it to -1 for all ranks that the other degrees leave over",
    )
    dp = shard * parallelism.data_parallel_replicate_degree
    training = config.training
    per_microbatch = dp * training.local_batch_size
    global_batch_size = training.global_batch_size
    if global_batch_size == -1:
        global_batch_size = per_microbatch * num_stages
    nearest = max(1, round(global_batch_size / per_microbatch)) * per_microbatch
    check(
        global_batch_size > 0 and global_batch_size % per_microbatch == 0,
        "training.global_batch_size",
        global_batch_size,
        f"must be a positive multiple of {per_microbatch} = {dp} data-parallel "
        f"ranks x local_batch_size {training.local_batch_size}",
        f"the nearest is {nearest}" + _other_ranks(config, world_size, others),
    )
    return changed(
        config,
        {
            "parallelism": {"data_parallel_shard_degree": shard},
            "training": {"global_batch_size": global_batch_size},
        },
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


NARROWEST = 16
"""Width of heads that flex attention takes on GPUs at least: torch._inductor.kernel.flex (2.11 and
2.13), "embedding dimension of the query, key, and value must be at least 16"."""


def check_device(
    config: JobConfig,
    device_type: str,
    *,
    head_dim: int = NARROWEST,
    has_windows: bool = False,
    waits_for_offload: bool = True,
    has_float8: bool = True,
) -> None:
    """Rules that only a rank can check, which knows its device.

    Args:
        head_dim: width of the model's narrowest heads.
        has_windows: some of its layers see only the last tokens.
        waits_for_offload: torch runs a gradient's hooks after its copy to the host is complete.
        has_float8: the device multiplies in float8.

    Raises:
        ConfigError: naming the first that is broken.
    """
    parallelism, leave = config.parallelism, "leave it out"
    check(
        has_float8 or not config.float8.enable or config.float8.emulate,
        "float8.enable",
        True,
        "needs NVIDIA GPUs of compute capability 8.9 or newer (Ada, Hopper, Blackwell)",
        f"{leave}; or set float8.emulate = true, which is slow, to try it",
    )
    is_idle = parallelism.tensor_parallel_degree == 1
    is_on = parallelism.enable_async_tensor_parallel and not is_idle
    rule = f"needs GPUs, and this machine trains on its {device_type}"
    is_gpu, kernel = device_type == "cuda", config.training.attention_kernel
    check(is_gpu or not is_on, ASYNC_TENSOR_PARALLEL, is_on, rule, leave)
    check(is_gpu or kernel == "auto", "training.attention_kernel", kernel, rule, leave)
    check(
        not is_gpu
        or waits_for_offload
        or not (config.optimizer.early_step_in_backward and config.training.enable_cpu_offload),
        "optimizer.early_step_in_backward",
        True,
        "with training.enable_cpu_offload it would read gradients that are still being copied from "
        "the GPU (torch before 2.13)",
        "use torch 2.13 or newer, or leave one of the two out",
    )
    if not is_gpu or not (config.training.mask_documents or has_windows):
        return
    key, value = "training.mask_documents", str(config.training.mask_documents)
    what, leave = "flex attention, which does it on GPUs,", "leave it out"
    if not value:
        key, value = "model.flavor", config.model.flavor
        what, leave = "flex attention, which has its windows on GPUs,", "choose another model"
    check(
        parallelism.pipeline_parallel_degree == 1
        or parallelism.pipeline_parallel_schedule in ("GPipe", "1F1B", "Interleaved1F1B"),
        key,
        value,
        f"{what} is not known to work with a schedule that goes backward twice, as "
        f"{parallelism.pipeline_parallel_schedule} does",
        'set parallelism.pipeline_parallel_schedule = "1F1B" or "Interleaved1F1B"',
    )
    check(
        head_dim >= NARROWEST,
        key,
        value,
        f"{what} takes no heads of {head_dim}, below {NARROWEST}",
        f"set a lower model.args.n_heads, or {leave}",
    )


def check_divisible(config: JobConfig, model: DecoderSpec) -> None:
    """Check that every dimension split over ranks is divisible by their number, and that every
    rank has rows of the vocabulary.

    Raises:
        ConfigError: naming the first that does not, and the degrees that would do.
    """
    cp = config.parallelism.context_parallel_degree
    seq_len = config.training.seq_len
    check(
        cp == 1 or seq_len % (2 * cp) == 0,
        "parallelism.context_parallel_degree",
        cp,
        f"twice it must divide training.seq_len = {seq_len}: a rank has two chunks of a sequence",
        f"the nearest training.seq_len is {max(1, round(seq_len / (2 * cp))) * 2 * cp}",
    )
    degree = config.parallelism.tensor_parallel_degree
    per_rank = " / context_parallel_degree" if cp > 1 else ""
    parts = {**model.parts, f"training.seq_len{per_rank}": seq_len // cp}
    common = math.gcd(*parts.values())
    for name, size in parts.items():
        check(
            size % degree == 0,
            "parallelism.tensor_parallel_degree",
            degree,
            f"does not divide {name} = {size}",
            f"use {divisors_of(common)}",
        )
    rows = -(-model.vocab_size // degree)  # as torch cuts: the last ranks may have fewer, or none
    check(
        rows * (degree - 1) < model.vocab_size,
        "parallelism.tensor_parallel_degree",
        degree,
        f"{rows} rows of the vocabulary, model.args.vocab_size = {model.vocab_size}, for each rank "
        "leave none for the last",
        f"set model.args.vocab_size = {rows * degree}, or lower the degree",
    )


def shards_experts_apart() -> bool:
    """Return whether FSDP2 of this torch may shard experts over a mesh of their own."""
    return has_torch(2, 12)


def check_experts(config: JobConfig, model: DecoderSpec) -> None:
    """Check that the experts can be dealt out, and that every option has experts to act on.

    Args:
        config: without -1.

    Raises:
        ConfigError: naming the first that is wrong, and a value that would do.
    """
    key, p, leave = "parallelism.expert_parallel_degree", config.parallelism, "leave it out"
    degree = p.expert_parallel_degree
    if not model.mixtures:
        # the config.toml of a job gives every key
        given = config.experts.model_dump(exclude_defaults=True)
        options = {key: degree} if degree > 1 else {f"experts.{k}": v for k, v in given.items()}
        for name, value in options.items():
            check(False, name, value, "the model has no experts", leave)
        return
    ranks = p.data_parallel_shard_degree * p.context_parallel_degree * p.tensor_parallel_degree
    counts = [mixture.n_experts for mixture in model.mixtures.values()]
    fix = f"use {divisors_of(math.gcd(ranks, *counts))}"
    rule = (
        f"must divide the {ranks} ranks of data_parallel_shard_degree x context_parallel_degree x "
        "tensor_parallel_degree, among which experts are dealt out"
    )
    check(ranks % degree == 0, key, degree, rule, fix)
    for count in counts:
        rule = f"does not divide model.args.n_experts = {count}"
        check(count % degree == 0, key, degree, rule, fix)
    check(
        max(degree, p.tensor_parallel_degree) == 1 or shards_experts_apart(),
        key if degree > 1 else "parallelism.tensor_parallel_degree",
        max(degree, p.tensor_parallel_degree),
        "shards experts over another mesh than the rest of a layer, which torch "
        f"{torch_version()} cannot",
        "use torch 2.12 or newer, or set both degrees to 1",
    )
    rule = "experts in float8 are not proved to train"
    check(not config.float8.enable, "float8.enable", True, rule, leave)
    key, rule = "optimizer.early_step_in_backward", "is not proved to train experts"
    check(not config.optimizer.early_step_in_backward, key, True, rule, leave)
    check(
        not splits_backward(p) or config.activation_checkpoint.mode == "none",
        "parallelism.pipeline_parallel_schedule",
        p.pipeline_parallel_schedule,
        "goes backward twice, and recomputation keeps the chosen experts for one pass alone",
        'choose Interleaved1F1B, or set activation_checkpoint.mode = "none"',
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
    """Not an axis of its own: of the ranks along dp_shard, cp and tp, those that share the experts
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
