"""Builds the observers of a job, which are everything optional in it, and its sinks."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.config.changes import to_json
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import to_toml
from meshwright.datasets.stream import OpenSource
from meshwright.metrics import sinks
from meshwright.metrics.console import Console
from meshwright.metrics.observers import Observer
from meshwright.metrics.profiling import Profiler
from meshwright.metrics.reporter import SinkWriter
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.meshes import Meshes
from meshwright.system.errors import ConfigError, check
from meshwright.system.modules import describe_error, file_of
from meshwright.train.bad_step_report import BadStepReporter
from meshwright.train.best_validation import BestValidation
from meshwright.train.resolve import ResolvedJob
from meshwright.train.resolve_model import CORRECT_IT, IMPORT_KEY, BuildSink, user_sinks
from meshwright.train.sample_texts import SampleTexts
from meshwright.train.sentry import Sentry
from meshwright.train.step_record import StepRecord
from meshwright.train.trainer import Trainer


def build_bad_steps(
    resolved: ResolvedJob,
    device: torch.device,
    sources: Sequence[OpenSource],
    samples_read: tuple[int, ...],
) -> BadStepReporter:
    """Return the report of skipped steps, with their detector."""
    return BadStepReporter(
        resolved.config,
        device,
        sources=[source.entry.name for source in sources],
        step=resolved.resume_step,
        samples_read=samples_read,
    )


def build_observers(
    resolved: ResolvedJob,
    meshes: Meshes,
    trainer: Trainer,
    bad_steps: BadStepReporter,
    best_validation: BestValidation,
    record: StepRecord,
    writer: SinkWriter,
) -> dict[str, Observer]:
    """Return every observer of the job, by the name under which a checkpoint has its state, in the
    order in which they are called."""
    config = resolved.config
    observers: dict[str, Observer] = {"bad_steps": bad_steps}
    if config.sentry.interval:
        observers["sentry"] = Sentry(resolved, meshes, trainer)
    if trainer.average is not None:
        observers["average"] = trainer.average
    if config.validation.sample_prompts:
        observers["sample_texts"] = SampleTexts(resolved, meshes, trainer.model, writer.add_texts)
    folder, rank = Path(config.job.dump_folder), dist.get_rank()
    return observers | {
        "best_validation": best_validation,
        "step_record": record,
        "sinks": writer,
        "profiler": Profiler(config.profiling, folder, rank, resolved.resume_step),
    }


def load_observers(observers: Mapping[str, Observer], saved: Mapping[str, Any]) -> None:
    """Give each observer the state that a checkpoint has under its name, if there is one.

    Args:
        saved: the manifest, or states in the place of some of its.
    """
    for name, observer in observers.items():
        if (state := saved.get(name)) is not None:
            observer.load_state_dict(state)


def build_sinks(
    resolved: ResolvedJob, model: LocalModel, extra_sinks: Sequence[sinks.Sink]
) -> SinkWriter:
    """Return the writer of records to the config's sinks, on the first rank, and to the extra ones,
    on each rank."""
    if dist.get_rank() > 0:
        return SinkWriter(extra_sinks)
    console = Console(resolved.steps, resolved.resume_step)
    files = _files(resolved.config, resolved.resume_step)
    every = [console, *files, *extra_sinks, *_other_sinks(resolved, model)]
    return SinkWriter(every, console.advance)


def _other_sinks(resolved: ResolvedJob, model: LocalModel) -> Iterator[sinks.Sink]:
    """Yield the sinks of the user's own module, and the one of expert load; an `OSError` of
    theirs is a warning."""
    folder = Path(resolved.config.job.dump_folder)
    for name, build in user_sinks(resolved.config).items():
        yield sinks.SafeSink(name, partial(_own_sink, name, build, resolved.config))
    if resolved.model_args.table.mixtures:
        file = folder / "experts.json"
        loads = partial(sinks.LoadsFile, file, lambda: model.balance.loads)
        yield sinks.SafeSink(file.name, loads)


def _own_sink(name: str, build: BuildSink, config: JobConfig) -> sinks.Sink:
    """Build a sink of the user's module; `ConfigError` if that fails, but for an `OSError`."""
    try:
        sink: sinks.Sink = build(config, Path(config.job.dump_folder))
        broken = "" if isinstance(sink, sinks.Sink) else f"makes {sink!r:.60}, and no sink"
    except (ConfigError, OSError):
        raise
    except Exception as error:  # whatever the user's code raises
        broken = f"raises {describe_error(error, file_of(build))}"
    rule = f"SINKS has {name!r}, which {broken}"
    check(not broken, IMPORT_KEY, config.experimental.custom_import, rule, CORRECT_IT)
    return sink


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
