"""Builds the parts of a job from its plan: model, first weights, loader, reporter."""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.checkpoint.conversion.initial_load import family_there
from meshwright.checkpoint.manifest import Manifest
from meshwright.config.changes import to_json
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import to_toml
from meshwright.datasets.loader import Loader, slots_of
from meshwright.datasets.samples import SampleRules
from meshwright.datasets.stream import Cursor, OpenSource, SampleStream
from meshwright.metrics import sinks
from meshwright.metrics.console import Console
from meshwright.metrics.reporter import Phases, Reporter, Work
from meshwright.models.decoder import Decoder
from meshwright.parallelisms.initialize import initialize
from meshwright.parallelisms.local_model import Allocate, LocalModel, allocate, build_local_model
from meshwright.parallelisms.meshes import Meshes
from meshwright.parallelisms.parallelize import parallelize
from meshwright.system.hardware import peak_of
from meshwright.system.log import logger
from meshwright.train.resolve import ResolvedJob
from meshwright.train.resolve_model import user_sinks
from meshwright.train.resume import best_of


def build_model(
    plan: ResolvedJob, meshes: Meshes, device: torch.device, *, allocate: Allocate = allocate
) -> LocalModel:
    """Build this rank's part of the model, parallelised; its values are arbitrary. Collective."""
    config, training = plan.config, plan.config.training
    applied: list[str] = []

    def prepare(stage: Decoder) -> None:
        applied.extend(
            parallelize(
                stage,
                meshes,
                config,
                fp32_modules=plan.fp32_modules,
                float8_layers=plan.float8_layers,
            )
        )
        allocate(stage, torch.device("cpu") if training.enable_cpu_offload else device, device)

    model = build_local_model(
        partial(Decoder, plan.model_args, training.seq_len),
        prepare,
        plan.pipeline_modules,
        frozen=plan.frozen,
        fp32_modules=plan.fp32_modules,
        meshes=meshes,
        training=training,
        schedule=config.parallelism.pipeline_parallel_schedule,
        device=device,
    )
    if model.pipeline is not None:
        logger.info("%s", model.pipeline.summary)
    for line in dict.fromkeys(applied):  # of all stages
        logger.info("%s", line)
    return model


def initialize_weights(plan: ResolvedJob, model: LocalModel, group: dist.ProcessGroup) -> None:
    """Give parameters and buffers their values at step 0. Collective over `group`, the whole job.

    Raises:
        ConfigError: if their source is not the one that `resolve` saw.
    """
    config = plan.config.checkpoint
    if not config.initial_load_path:
        for stage in model.stages:
            initialize(stage, plan.config.training.seed)
        return
    # late: few jobs start from the weights of another
    from meshwright.checkpoint.conversion.readers import load_upcycled, open_initial, open_weights

    start, noise = time.perf_counter(), config.initial_load_upcycle_noise
    with open_initial(config, group) as initial:
        there = family_there(config, plan.model_args, plan.family)
        weights = open_weights(initial, *there)
        for stage in model.stages:
            stage.init_buffers()
            stage.init_state()
        tensors = model.state_dict(keep_vars=True)
        if noise is None:
            weights.load(tensors)
        else:
            table, seed = plan.model_args.table, plan.config.training.seed
            load_upcycled(weights, table, noise, seed, tensors)
    path = initial.place.path
    logger.info("first weights from %s in %.1f s", path, time.perf_counter() - start)


def build_loader(
    plan: ResolvedJob,
    sources: Sequence[OpenSource],
    meshes: Meshes,
    device: torch.device,
    cursor: Cursor,
) -> Loader:
    """Return this rank's batches, from `cursor` on."""
    training = plan.config.training
    rules = SampleRules(
        training.seq_len + 1, training.seed, training.max_epochs, training.max_bad_records
    )
    stream = build_stream(plan, sources, meshes, cursor, rules)
    local, masks = training.local_batch_size, training.mask_documents
    return Loader(stream, local, mask_documents=masks, pin_memory=device.type == "cuda")


def build_stream(
    plan: ResolvedJob,
    sources: Sequence[OpenSource],
    meshes: Meshes,
    cursor: Cursor,
    rules: SampleRules,
) -> SampleStream:
    """Return the samples of the job, of which this rank's part is asked for."""
    local, batch = plan.config.training.local_batch_size, plan.config.training.global_batch_size
    slots = slots_of(meshes.dp.get_local_rank(), meshes.dp.size(), local, batch)
    return SampleStream(sources, cursor, rules, batch=batch, slots=frozenset(slots))


def work_of(plan: ResolvedJob, device: torch.device) -> Work:
    """Return the work of a step of the job, over its ranks."""
    config = plan.config
    table, seq_len = plan.model_args.table, config.training.seq_len
    return Work(
        tokens_per_step=config.tokens_per_step,
        flops_per_token=table.flops_per_token(seq_len),
        causal_flops_per_token=table.flops_per_token(seq_len, is_causal=True),
        num_devices=dist.get_world_size(),
        peak_flops_per_s=_peak_flops_per_s(config, device),
    )


def build_reporter(
    plan: ResolvedJob,
    device: torch.device,
    phases: Phases,
    model: LocalModel,
    found: Manifest | None,
    validation_sources: Sequence[OpenSource],
    extra_sinks: Sequence[sinks.Sink],
) -> Reporter:
    """Return the figures of the job, which continues from `found`; its first rank writes them."""
    config, work = plan.config, work_of(plan, device)
    destinations, advance = [*extra_sinks], None
    if dist.get_rank() == 0:
        console = Console(plan.steps, plan.resume_step)
        files = _files(config, plan.resume_step)
        destinations = [console, *files, *extra_sinks, *_other_sinks(plan, model)]
        advance = console.advance
    tokens_seen = found["tokens_seen"] if found else 0
    best = best_of(found, plan, validation_sources) if found else None
    return Reporter(work, device, phases, destinations, tokens_seen, advance, best)


def _other_sinks(plan: ResolvedJob, model: LocalModel) -> Iterator[sinks.Sink]:
    """Yield the sinks of the user's own module, and the one of loads of experts; an `OSError` of
    theirs is a warning."""
    folder = Path(plan.config.job.dump_folder)
    for name, build in user_sinks(plan.config).items():
        yield sinks.SafeSink(name, partial(build, plan.config, folder))
    if plan.model_args.table.mixtures:
        file = folder / "experts.json"
        loads = partial(sinks.LoadsFile, file, lambda: model.balance.loads)
        yield sinks.SafeSink(file.name, loads)


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


def _files(config: JobConfig, resumed_step: int) -> Iterator[sinks.Sink]:
    """Yield every sink that the config asks for in addition to the console."""
    metrics, dump_folder = config.metrics, Path(config.job.dump_folder)
    lines = partial(sinks.JsonLines, dump_folder / "metrics.jsonl", resumed_step)
    yield sinks.SafeSink("metrics.jsonl", lines)
    samples = dump_folder / "samples.jsonl"
    writes_texts = config.validation.enable and bool(config.validation.sample_prompts)
    if writes_texts or samples.exists():  # to remove an earlier run's after the step to resume from
        texts = partial(sinks.TextLines, samples, resumed_step)
        yield sinks.SafeSink("samples.jsonl", texts)
    if metrics.enable_tensorboard or metrics.enable_wandb:
        # 0.1 s, which other ranks and jobs without it need not spend
        from meshwright.metrics.trackers import TensorBoard, WeightsAndBiases
    if metrics.enable_tensorboard:
        folder = dump_folder / metrics.save_tb_folder
        events = partial(TensorBoard, folder, resumed_step, to_toml(config))
        yield sinks.SafeSink(f"{folder}, for TensorBoard,", events)
    if metrics.enable_wandb:
        tracked = partial(
            WeightsAndBiases,
            dump_folder,
            to_json(config),
            project=metrics.wandb_project,
            entity=metrics.wandb_entity,
            name=metrics.wandb_name,
            is_resumed=resumed_step > 0,
        )
        yield sinks.SafeSink("the run for Weights & Biases", tracked)
