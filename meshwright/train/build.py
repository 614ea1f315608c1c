"""Builds the parts of a resolved job: model, trainer, initial weights, loader."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

from meshwright.checkpoint.conversion.initial_load import family_there
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.on_ranks import AllRanks
from meshwright.config.job_config import JobConfig
from meshwright.datasets.excluded import ExcludedParts, find_excluded
from meshwright.datasets.loader import Loader, slots_of
from meshwright.datasets.named_sources import entries
from meshwright.datasets.samples import SampleRules
from meshwright.datasets.stream import Cursor, OpenSource, SampleStream
from meshwright.datasets.tokenizers.kinds import Tokenizer
from meshwright.metrics.reporter import Phases, Work
from meshwright.models.decoder import Decoder
from meshwright.models.parameter import block_of
from meshwright.parallelisms.initialize import initialize, initialize_parameters
from meshwright.parallelisms.local_model import Allocate, LocalModel, allocate, build_local_model
from meshwright.parallelisms.meshes import Meshes
from meshwright.parallelisms.parallelize import parallelize
from meshwright.system.hardware import peak_of
from meshwright.system.log import logger
from meshwright.train.layer_stats import LayerStats
from meshwright.train.loss_by_source import LossBySource
from meshwright.train.losses import own_loss
from meshwright.train.optim.average import Average
from meshwright.train.optim.in_backward import OptimizerInBackward
from meshwright.train.optim.optimizers import build_optimizer
from meshwright.train.optim.qk_clip import QKClip
from meshwright.train.optim.registry import average_decay
from meshwright.train.optim.schedules import learning_rate
from meshwright.train.own_metrics import OwnMetrics
from meshwright.train.resolve import ResolvedJob
from meshwright.train.resolve_model import own_options
from meshwright.train.trainer import Trainer


def build_model(
    resolved: ResolvedJob, meshes: Meshes, device: torch.device, *, allocate: Allocate = allocate
) -> LocalModel:
    """Build this rank's part of the model, parallelised; its values are arbitrary. Collective."""
    config, training = resolved.config, resolved.config.training
    applied: list[str] = []

    def prepare(stage: Decoder) -> None:
        applied.extend(
            parallelize(
                stage,
                meshes,
                config,
                fp32_modules=resolved.fp32_modules,
                float8_layers=resolved.float8_layers,
            )
        )
        allocate(stage, torch.device("cpu") if training.enable_cpu_offload else device, device)

    model = build_local_model(
        partial(Decoder, resolved.model_args, training.seq_len),
        prepare,
        resolved.pipeline_modules,
        frozen=resolved.frozen,
        fp32_modules=resolved.fp32_modules,
        meshes=meshes,
        training=training,
        schedule=config.parallelism.pipeline_parallel_schedule,
        device=device,
    )
    loss = own_loss(config, own_options(config))
    for stage in model.stages:
        if stage.output is not None:
            stage.output.loss.own = loss
    if model.pipeline is not None:
        logger.info("%s", model.pipeline.summary)
    for line in dict.fromkeys(applied):  # of all stages
        logger.info("%s", line)
    return model


def build_trainer(
    resolved: ResolvedJob,
    meshes: Meshes,
    device: torch.device,
    *,
    allocate: Allocate = allocate,
    note: Callable[[str], None] | None = None,
) -> Trainer:
    """Build this rank's part of a job. Collective.

    Args:
        note: gets each phase of each step as it starts, in words.
    """
    config = resolved.config
    model = build_model(resolved, meshes, device, allocate=allocate)
    spec, ranks = resolved.model_args.table, meshes.stage.get_group()
    table = spec.parameters
    optimizer = build_optimizer(
        model.named_parameters(), config.optimizer, table, ranks, own_options(config)
    )
    is_early, decay = config.optimizer.early_step_in_backward, average_decay(config)
    normed = table if config.metrics.grad_norm_by_group else ()
    freq, threshold = config.metrics.layer_stats_freq, config.optimizer.qk_clip_threshold
    interval = config.optimizer.qk_clip_interval
    sources = entries(config.training, "training")
    names = [entry.name for entry in sources]
    loss_weights = [entry.loss_weight for entry in sources]
    return Trainer(
        model,
        optimizer,
        meshes,
        learning_rate(config, resolved.steps, own_options(config)),
        Phases(device, note),
        early=OptimizerInBackward(optimizer) if is_early else None,
        average=None if decay is None else Average(model, decay),
        max_norm=config.training.max_norm,
        reduce_every_microbatch=config.parallelism.fsdp_reduce_gradients == "every_microbatch",
        reshard_every_microbatch=config.parallelism.fsdp_reshard_after_forward != "never",
        by_source=LossBySource(model, names, meshes, device) if len(names) > 1 else None,
        own_metrics=OwnMetrics(own_options(config)),
        norm_groups=list(dict.fromkeys(map(block_of, normed))),
        layer_stats=LayerStats(model, meshes, spec, resolved.frozen, freq) if freq else None,
        qk_clip=None if threshold is None else QKClip(model, meshes, spec, threshold, interval),
        loss_weights=torch.tensor(loss_weights, device=device)
        if set(loss_weights) != {1}
        else None,
        mtp_loss_weight=config.training.mtp_loss_weight,
    )


def initialize_weights(resolved: ResolvedJob, model: LocalModel, ranks: AllRanks) -> None:
    """Give parameters and buffers their values at step 0. Collective.

    Raises:
        ConfigError: if their source isn't the one that `resolve` saw.
    """
    config = resolved.config.checkpoint
    if not config.initial_load_path:
        for stage in model.stages:
            initialize(stage, resolved.config.training.seed)
        return
    # late: few jobs start from weights of a different job
    from meshwright.checkpoint.conversion.readers import load_upcycled, open_initial, open_weights

    start, noise = time.perf_counter(), config.initial_load_upcycle_noise
    with open_initial(config, ranks) as initial:
        there = family_there(config, resolved.model_args, resolved.family)
        weights = open_weights(initial, *there)
        table, seed = resolved.model_args.table, resolved.config.training.seed
        new = set[str]()
        if config.initial_load_new_mtp:
            there_table = there[1].table
            new |= table.parameters.keys() - there_table.parameters.keys()
            new |= table.state.keys() - there_table.state.keys()
        for stage in model.stages:
            initialize_parameters(stage, seed, new)
            stage.init_buffers()
            stage.init_state()
        tensors = model.state_dict(keep_vars=True)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in new}
        if noise is None:
            weights.load(tensors)
        else:
            load_upcycled(weights, table, noise, seed, tensors)
    path = initial.place.path
    logger.info("initial weights from %s in %.1f s", path, time.perf_counter() - start)
    if initial.manifest is not None:
        warn_of_tokenizer(initial.manifest, resolved.tokenizer)


def warn_of_tokenizer(saved: Manifest, tokenizer: Tokenizer) -> None:
    """Warn if weights come from a job with another tokenizer: to them, ids mean other text. It may
    be meant, as where tokens were added."""
    before = saved["data_identity"].get("model.tokenizer_path", tokenizer.fingerprint)
    if before != tokenizer.fingerprint:
        words = "the initial weights were trained with another tokenizer, %s (%s): they know its "
        words += "ids, and not those of this job's, %s, unless that only adds tokens"
        logger.warning(words, saved["tokenizer_path"], before, tokenizer.fingerprint)


def build_loader(
    resolved: ResolvedJob,
    sources: Sequence[OpenSource],
    meshes: Meshes,
    device: torch.device,
    cursor: Cursor,
) -> Loader:
    """Return this rank's batches, from `cursor` on."""
    training = resolved.config.training
    rules = SampleRules(
        training.seq_len + 1,
        training.seed,
        training.max_epochs,
        training.max_bad_records,
    )
    excluded = find_excluded(training.exclude, sources, are_all=resolved.is_only_stage)
    stream = build_stream(resolved, sources, meshes, cursor, rules, excluded)
    return Loader(
        stream,
        training.local_batch_size,
        mask_documents=training.mask_documents,
        pin_memory=device.type == "cuda",
        mtp_depth=resolved.model_args.mtp_depth,
    )


def build_stream(
    resolved: ResolvedJob,
    sources: Sequence[OpenSource],
    meshes: Meshes,
    cursor: Cursor,
    rules: SampleRules,
    excluded: Mapping[str, ExcludedParts] | None = None,
) -> SampleStream:
    """Return the samples of the job, of which this rank's part is asked for."""
    local, batch = (
        resolved.config.training.local_batch_size,
        resolved.config.training.global_batch_size,
    )
    slots = slots_of(meshes.dp.get_local_rank(), meshes.dp.size(), local, batch)
    return SampleStream(
        sources, cursor, rules, batch=batch, slots=frozenset(slots), excluded=excluded
    )


def work_of(resolved: ResolvedJob, device: torch.device) -> Work:
    """Return the work of a step of the job, over its ranks."""
    config = resolved.config
    table, seq_len = resolved.model_args.table, config.training.seq_len
    return Work(
        tokens_per_step=config.tokens_per_step,
        flops_per_token=table.flops_per_token(seq_len),
        causal_flops_per_token=table.flops_per_token(seq_len, is_causal=True),
        num_devices=dist.get_world_size(),
        peak_flops_per_s=_peak_flops_per_s(config, device),
    )


def _peak_flops_per_s(config: JobConfig, device: torch.device) -> float | None:
    """Return the peak that MFU is a part of, and log it; None if nobody has given it."""
    if config.metrics.peak_tflops:
        peak, source = config.metrics.peak_tflops * 1e12, "metrics.peak_tflops"
    else:
        found = peak_of(device, getattr(torch, config.training.mixed_precision_param))
        if found is None:
            return None
        peak, source = found
    logger.debug("peak for mfu: %.4g TFLOP/s per device (%s)", peak / 1e12, source)
    return peak
