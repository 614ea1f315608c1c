"""A user's config as a small job with the same structure."""

import dataclasses
import math
from fnmatch import fnmatchcase

from meshwright.config.job_config import (
    BYTES,
    ActivationCheckpoint,
    Checkpoint,
    Compile,
    JobConfig,
    Metrics,
    Parallelism,
    Profiling,
    Validation,
)
from meshwright.models.args import DecoderArgs

GLOBAL_BATCH = 8  # sequences: one for each of 8 data-parallel ranks
SEQ_LEN = 32
STEPS = 20
NUM_LAYERS = 5  # uneven over 2, 3 or 4 stages
VOCAB_SIZE = 259  # odd, and room for bytes
HEAD_DIM = 4
LARGEST_TP = 4
DIMENSIONS = ("dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "vocab_size")


def largest_tp(args: DecoderArgs) -> int:
    """Tensor-parallel degree up to which the shrunken model, like the user's, can be cut."""
    return math.gcd(args.n_heads, args.n_kv_heads, args.hidden_dim, LARGEST_TP)


def shrink(config: JobConfig, args: DecoderArgs) -> JobConfig:
    """The job on one process that every mesh is compared with.

    Kept: family, tied embeddings, rotary scaling, grouped heads, seed, optimizer, schedule,
    clipping. Replaced: dimensions, by small ones that divide where the user's do and are odd where
    that finds mistakes; data, by the standard library's source as bytes; precision, by fp32.
    """
    tp = largest_tp(args)
    kv_heads = tp if tp > 1 else min(args.n_kv_heads, 3)
    heads = kv_heads * min(args.n_heads // args.n_kv_heads, 2)
    small_args = dataclasses.replace(
        args,
        dim=heads * HEAD_DIM,
        n_layers=NUM_LAYERS,
        n_heads=heads,
        n_kv_heads=kv_heads,
        hidden_dim=22 * max(tp, 2),  # divides by tp, but what is left not by 4 ranks
        vocab_size=VOCAB_SIZE,
    )
    dimensions = {name: getattr(small_args, name) for name in DIMENSIONS}
    frozen = [  # patterns of layers that the small model has
        pattern
        for pattern in config.model.frozen
        if any(fnmatchcase(name, pattern) for name in small_args.parameter_names())
    ]
    model = {
        "args": config.model.args | dimensions,
        "tokenizer_path": BYTES,
        "frozen": frozen,
    }
    training = {
        "dataset": "python_stdlib",
        "dataset_path": "",
        "dataset_subset": "",
        "dataset_split": "train",
        "dataset_column": "text",
        "dataset_format": "",
        "dataset_mode": "auto",
        "datasets": [],
        "max_epochs": 0,
        "local_batch_size": GLOBAL_BATCH,
        "global_batch_size": GLOBAL_BATCH,
        "seq_len": SEQ_LEN,
        "steps": STEPS,
        "dtype": "float32",
        "mixed_precision_param": "float32",
        "fp32_modules": [],
        "mixed_precision_reduce": "float32",
    }
    warmup_steps = min(config.lr_scheduler.warmup_steps, 2)
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=model),
            "training": config.training.model_copy(update=training),
            "lr_scheduler": config.lr_scheduler.model_copy(update={"warmup_steps": warmup_steps}),
            "parallelism": Parallelism(),
            "activation_checkpoint": ActivationCheckpoint(),
            "compile": Compile(),
            "validation": Validation(),
            "checkpoint": Checkpoint(),
            "metrics": Metrics(enable_tensorboard=False),
            "profiling": Profiling(),
        }
    )
