"""A user's config as a small job with the same structure."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from meshwright.config.changes import changed
from meshwright.config.job_config import Average, Checkpoint, JobConfig, Metrics, Profiling, Sentry
from meshwright.config.parallelism import ActivationCheckpoint, Compile, Parallelism
from meshwright.config.section import BYTES
from meshwright.config.training import BadSteps, Source, Validation
from meshwright.datasets.named_sources import entries, is_streamed
from meshwright.datasets.sources import find_dataset
from meshwright.models.args import DecoderArgs
from meshwright.train.optim.registry import fitted_groups

GLOBAL_BATCH = 8  # sequences: one for each of 8 data-parallel ranks
STEPS = 10
NUM_VALIDATED = 11  # samples: a whole global batch, and one that is filled up
NUM_LAYERS, MOST_LAYERS = 5, 9  # 5 are uneven over 2, 3 or 4 stages
VOCAB_SIZE = 259  # odd, and room for bytes
HEAD_DIM = 4
OWN_HEAD_DIM = 6  # of families that set the width of heads: not dim / n_heads
MOST_SHARDS = 16  # of a stream: each has documents for several samples
LARGEST_TP, MAX_RANKS = 4, 8


@dataclass(frozen=True)
class Sizes:
    """Sizes of the small job that depend on what it runs on."""

    seq_len: int
    dim_per_head: int
    hidden_per_rank: int
    """FFN hidden size of a tensor-parallel rank."""
    loss_chunk_tokens: int
    """Several chunks in every microbatch, unless cp leaves a sequence no more."""
    highest_lr: float
    """Peak learning rate, at most: `HIGHEST_LR`, over the root of how much wider the model is."""
    keeps_heads: bool = False
    """Heads are as wide as the user's, by which kernels of attention are chosen."""


WARMUP_STEPS = 2
"""Without them the first step, in which Adam moves every weight by the rate whatever its gradient,
is so large that rounding grows like above `HIGHEST_LR`."""

HIGHEST_LR = 1e-3
"""Peak learning rate of the small job, at most. Its weights are about 0.02, and Adam changes each
by up to the rate per step. At 0.01 training is chaotic, so rounding grows until a correct mesh
differs at step 10. At this rate rounding doesn't grow."""

ON_CPUS = Sizes(32, HEAD_DIM, 22, 16, HIGHEST_LR)
"""A hidden size of 22 per rank divides by tp, but the rest not by 4 ranks."""

ON_GPUS = Sizes(256, 16, 48, 128, HIGHEST_LR / 2, keeps_heads=True)
"""Multiples of 16, as products in float8 and in groups need them; and queries enough for the kernel
of flex attention that trains (torch takes another below 128), also with cp."""

OF_HEADS = ("partial_rotary_factor", "query_scale", "attention_multiplier")
"""Fields of the model's args that follow the width of heads, besides those that end with
"head_dim"."""

LOWEST_LOGITS = 1.0
"""Threshold of QK-clip in the small job, at most: the largest logits of some heads are above it."""

PEAK_TFLOPS = 1.0
"""Per second and device, which MFU is a part of: more than a step of a second takes."""

DETERMINISTIC = {"deterministic": True, "attention_kernel": "auto"}
"""Keys of `training` of a job with deterministic kernels: cuDNN's attention has none."""

KEPT = ("norm_eps", "rope_theta", "rope_scaling", "tie_embeddings")
"""Fields of the model's args that stay the user's; all others follow from the small size."""


def largest_tp(args: DecoderArgs, degree: int = 1) -> int:
    """Tensor-parallel degree up to which the shrunken model, like the user's, can be sharded.

    Args:
        degree: the user's, if that is above `LARGEST_TP`.
    """
    most = MAX_RANKS if degree >= MAX_RANKS else LARGEST_TP
    return math.gcd(*args.table.parts.values(), most)


def small_parts(parts: Sequence[Sequence[str]], num_layers: int) -> list[list[str]]:
    """Return the stages `parts` of a model of `num_layers`, with few layers each, counted anew."""
    is_small = num_layers <= MOST_LAYERS
    most = num_layers if is_small else max(1, MOST_LAYERS // len(parts))
    small, count = [], 0
    for part in parts:
        layers = [name for name in part if name.startswith("layers.")][:most]
        before = [name for name in part if name == "tok_embeddings"]
        after = [name for name in part if name in ("norm", "output")]
        names = [f"layers.{count + index}" for index in range(len(layers))]
        small.append([*before, *names, *after])
        count += len(layers)
    return small


def _num_layers(parallelism: Parallelism, num_layers: int) -> int:
    """Enough for the user's stages, uneven over them."""
    if parts := parallelism.module_fqns_per_model_part:
        names = [name for part in small_parts(parts, num_layers) for name in part]
        return sum(name.startswith("layers.") for name in names)
    pp = min(parallelism.pipeline_parallel_degree, MAX_RANKS)
    stages = pp * max(parallelism.pipeline_parallel_stages_per_rank, 1)
    return max(NUM_LAYERS, min(stages + 1, MOST_LAYERS))


def _matching(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the patterns that match a name of the small model."""
    return [pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)]


def _optimizer(config: JobConfig, names: Sequence[str], highest: float) -> dict[str, object]:
    """Return the keys of the small job's optimizer.

    Args:
        names: of its parameters.
        highest: peak learning rate of a parameter, at most.
    """
    groups = fitted_groups(config.optimizer.groups, names)
    highest_lr = highest / max([1.0, *(group.lr_scale for group in groups)])
    threshold = config.optimizer.qk_clip_threshold
    return {
        "lr": min(config.optimizer.lr, highest_lr),
        "early_step_in_backward": False,
        "groups": groups,
        "qk_clip_threshold": None if threshold is None else min(threshold, LOWEST_LOGITS),
        "qk_clip_interval": min(config.optimizer.qk_clip_interval, 2),
    }


def _average(config: JobConfig) -> Average:
    """Return a mean that six steps show, if the config asks for one. It keeps another share than it
    takes in, so that the two can't be exchanged."""
    return Average(decay=0.75) if config.checkpoint.average.is_on else Average()


def _weighted_parts(config: JobConfig) -> list[dict[str, Any]]:
    """Return two parts of a mixture, of the smallest and the largest weight of losses; none, if the
    losses of all are weighted alike."""
    weights = {part.loss_weight for part in config.training.datasets}
    if len(weights) < 2:
        return []
    return [
        {"name": name, "dataset": Source().dataset, "weight": 1.0, "loss_weight": weight}
        for name, weight in (("least", min(weights)), ("most", max(weights)))
    ]


def _small_args(config: JobConfig, args: DecoderArgs, sizes: Sizes) -> DecoderArgs:
    """Return dimensions that divide where the user's do, and are odd where that finds mistakes."""
    tp = largest_tp(args, config.parallelism.tensor_parallel_degree)
    kv_heads = tp if tp > 1 else min(args.n_kv_heads, 3)
    heads = kv_heads * min(args.n_heads // args.n_kv_heads, 2)
    has_own_width = args.head_dim not in (None, args.dim / args.n_heads)
    few: dict[str, Any] = {
        "dim": heads * sizes.dim_per_head,
        "n_layers": _num_layers(config.parallelism, args.n_layers),
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "hidden_dim": sizes.hidden_per_rank * max(tp, 2),
        "vocab_size": VOCAB_SIZE,
        "head_dim": OWN_HEAD_DIM if has_own_width else HEAD_DIM,
    }
    if getattr(args, "mup_base_dim", None) is not None:
        few["mup_base_dim"] = few["dim"] // 2  # at the user's ratio the rate could be far too high
    few |= args.small()
    if not sizes.keeps_heads:
        return dataclasses.replace(args, **few)
    own = {name: value for name, value in vars(args).items() if value is not None}
    wide = {n: value for n, value in own.items() if n.endswith("head_dim") or n in OF_HEADS}
    if few["head_dim"] is not None:
        wide.setdefault("head_dim", args.dim // args.n_heads)
    try:
        return dataclasses.replace(args, **(few | wide))
    except ValueError:  # heads that are as wide as the model has room for, as an OLMoE's
        return dataclasses.replace(args, **(few | {"head_dim": sizes.dim_per_head}))


def shrink(config: JobConfig, args: DecoderArgs, sizes: Sizes = ON_CPUS) -> JobConfig:
    """Return the job on one process that every mesh is compared with.

    Kept: family, tied embeddings, rotary scaling, grouped heads, seed, optimizer, schedule,
    clipping, whether documents are masked and data is streamed. Replaced: dimensions, by small ones
    that divide where the user's do and are odd where that finds mistakes; data, by that of
    `job.py`; precision, by bf16 products; cases in fp32 change that, and all but "user types" the
    types of weights, reductions and Muon; a rate above the highest of `sizes`.

    On GPUs, kernels are deterministic: a resume is compared bit by bit.
    """
    small_args = _small_args(config, args, sizes)
    user_args = {name: value for name, value in config.model.args.items() if name in KEPT}
    dimensions = {
        name: value
        for name, value in vars(small_args).items()
        if name not in KEPT and value is not None  # which TOML hasn't
    }
    first = entries(config.training, "training")[0]
    has_stream = find_dataset(first.source.dataset) is not None and is_streamed(first)
    names = [*small_args.table.parameters]
    frozen = _matching(config.model.frozen, names)
    layers = small_args.table.linear_layers()
    left_out = [part for part in config.float8.filter_fqns if any(part in name for name in layers)]
    tokenizer = {"tokenizer_type": "", "tokenizer_path": BYTES}
    model = {"args": user_args | dimensions, "frozen": frozen, **tokenizer}
    parts = _weighted_parts(config)
    training = {
        **Source().model_dump(exclude={"dataset"} if parts else set()),
        "dataset_mode": "streamed" if has_stream else "cached",
        "stream_shards": min(config.training.stream_shards, MOST_SHARDS),
        "datasets": parts,
        "max_epochs": 0,
        "local_batch_size": GLOBAL_BATCH,
        "global_batch_size": GLOBAL_BATCH,
        "seq_len": sizes.seq_len,
        "steps": STEPS,
        "mixed_precision_param": "bfloat16",
        "fp32_modules": _matching(config.training.fp32_modules, small_args.table.module_names),
        "loss_chunk_tokens": sizes.loss_chunk_tokens,
        "enable_cpu_offload": False,  # cases have it: it must not change the model
    }
    config = changed(
        config,
        {
            "model": model,
            "training": training,
            "optimizer": _optimizer(config, names, sizes.highest_lr),
            "lr_scheduler": {
                "warmup_steps": WARMUP_STEPS,
                "decay_start": None if config.lr_scheduler.decay_start is None else 2,
            },
            "float8": {"filter_fqns": left_out},
        },
    )
    device = {"float8": {"emulate": True}} if sizes is ON_CPUS else {"training": DETERMINISTIC}
    config = changed(config, device)
    return config.model_copy(
        update={
            "parallelism": Parallelism(),
            "activation_checkpoint": ActivationCheckpoint(),
            "compile": Compile(enable=False),  # cases say otherwise
            "validation": Validation(num_samples=NUM_VALIDATED),
            "bad_steps": BadSteps(),  # a case takes none
            "checkpoint": Checkpoint(average=_average(config)),
            "metrics": config.metrics.model_copy(
                update={
                    "log_freq": Metrics().log_freq,
                    "layer_stats_freq": min(config.metrics.layer_stats_freq, 1),
                    "every_step": False,
                    "peak_tflops": PEAK_TFLOPS,
                    "enable_tensorboard": False,
                    "enable_wandb": False,
                }
            ),
            "profiling": Profiling(),
            "sentry": Sentry(),
        }
    )
