"""From a plan to the reports of a job."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright import hardware
from meshwright.config.changes import to_json
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import to_toml
from meshwright.log import logger
from meshwright.metrics import sinks
from meshwright.metrics.console import Console
from meshwright.metrics.eta import Schedule
from meshwright.metrics.phases import Phases
from meshwright.metrics.record import Sink
from meshwright.metrics.reporter import Reporter, Work
from meshwright.metrics.weights_and_biases import WeightsAndBiases
from meshwright.preflight import Plan


def build_reporter(
    plan: Plan,
    device: torch.device,
    phases: Phases,
    extra_sinks: Sequence[Sink],
    resumed_step: int,
    tokens_seen: int,
    best_validation: tuple[int, float] | None,
) -> Reporter:
    """Return the figures of the job; its first rank writes them."""
    config = plan.config
    training = config.training
    work = Work(
        tokens_per_step=training.global_batch_size * training.seq_len,
        flops_per_token=plan.model_args.table.flops_per_token(training.seq_len),
        num_devices=dist.get_world_size(),
        peak_flops_per_s=_peak_flops_per_s(config, device),
    )
    if dist.get_rank() > 0:
        return Reporter(
            work, device, phases, extra_sinks, tokens_seen, best_validation=best_validation
        )
    console = Console(_schedule(config), resumed_step)
    destinations = [console, *_files(config, resumed_step), *extra_sinks]
    return Reporter(
        work, device, phases, destinations, tokens_seen, console.advance, best_validation
    )


def _peak_flops_per_s(config: JobConfig, device: torch.device) -> float | None:
    """Return the peak that MFU is a part of, and log it; None if nobody has given it."""
    if config.metrics.peak_tflops:
        tflops, source = config.metrics.peak_tflops, "metrics.peak_tflops"
    elif peak := hardware.peak_of(device, getattr(torch, config.training.mixed_precision_param)):
        tflops, source = peak.flops_per_s / 1e12, peak.source
    else:
        return None
    logger.info("peak for mfu: %.4g TFLOP/s per device (%s)", tflops, source)
    return tflops * 1e12


def _schedule(config: JobConfig) -> Schedule:
    return Schedule(
        config.training.steps,
        config.validation.freq if config.validation.enable else 0,
        config.checkpoint.interval if config.checkpoint.enable else 0,
    )


def _files(config: JobConfig, resumed_step: int) -> Iterator[Sink]:
    """Yield every sink that the config asks for beside the console."""
    metrics, dump_folder = config.metrics, Path(config.job.dump_folder)
    lines = partial(sinks.JsonLines, dump_folder / "metrics.jsonl", resumed_step)
    yield sinks.Spared("metrics.jsonl", lines)
    samples = dump_folder / "samples.jsonl"
    writes_texts = config.validation.enable and bool(config.validation.sample_prompts)
    if writes_texts or samples.exists():  # to remove an earlier run's after the step to resume from
        texts = partial(sinks.TextLines, samples, resumed_step)
        yield sinks.Spared("samples.jsonl", texts)
    if metrics.enable_tensorboard:
        # 0.1 s, which other ranks and jobs without it need not spend
        from meshwright.metrics.tensorboard_events import TensorBoard

        folder = dump_folder / metrics.save_tb_folder
        values = {
            f"{section}.{key}": value
            for section, table in to_json(config).items()
            for key, value in table.items()
        }
        events = partial(TensorBoard, folder, resumed_step, to_toml(config), values)
        yield sinks.Spared(f"{folder}, for TensorBoard,", events)
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
        yield sinks.Spared("the run for Weights & Biases", tracked)
