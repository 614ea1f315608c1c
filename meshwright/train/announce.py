"""A job's messages at its start and end, and the record of its config and history."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.config.changes import LEFT_OPEN, changed, differences, shown, to_json
from meshwright.config.loader import to_toml
from meshwright.config.provenance import with_comments
from meshwright.datasets.cached_source import CachedSource
from meshwright.datasets.named_sources import local_paths
from meshwright.datasets.sources import by_suffix, other_files
from meshwright.datasets.stream import OpenSource
from meshwright.datasets.tokenizers.kinds import Tokenizer, end_of_chat
from meshwright.metrics.console import duration
from meshwright.metrics.sinks import note_event
from meshwright.models.families import FAMILIES
from meshwright.system import hardware
from meshwright.system.errors import StopRequested, first_line, numbered
from meshwright.system.files import only_warn, whole_file
from meshwright.system.log import logger
from meshwright.system.processes import Launch
from meshwright.train.resolve import ResolvedJob


def announce(
    resolved: ResolvedJob,
    device: torch.device,
    launch: Launch,
    sources: Sequence[OpenSource] = (),
    validation_sources: Sequence[OpenSource] = (),
) -> None:
    """Describe the job in the log, and write its config to the dump folder.

    The console gets the lines that differ from job to job. Details go to the log's file.
    """
    config, path = resolved.config, Path(resolved.config.job.dump_folder) / "config.toml"
    if config.job.description:
        logger.info("%s", config.job.description)
    if (last := resolved.training_stages[-1]).stage_number > 1:
        steps = (
            f"steps {resolved.starts_after + 1:,} to {config.training.steps:,} of {last.steps:,}"
        )
        logger.info(
            "stage %d of %d: %s; the eta is its own",
            resolved.stage_number,
            last.stage_number,
            steps,
        )
    logger.info("config: %s; every value: %s", Path(config.job.config_file).name or "none", path)
    logger.debug("config, where it differs from the defaults:")
    for line in filter(None, to_toml(config, exclude_defaults=True).splitlines()):
        logger.debug("  %s", line)
    for text in resolved.notes if dist.get_rank() == 0 else ():  # they look at files
        logger.info("%s", text, extra={"is_printed": launch.is_checked})
    logger.info("%s", _describe_model(resolved))
    logger.info("%s", _describe_tokenizer(resolved.tokenizer))
    ranks, mesh = numbered(dist.get_world_size(), "rank"), str(resolved.dims) or "no mesh"
    device_name = hardware.device_name(device)
    logger.info("%s (%s) on %s; torch %s", ranks, mesh, device_name, torch.__version__)
    if launch.host_settings:
        logger.debug("chosen for this machine by the launcher: %s", launch.host_settings)
    if dist.get_rank() == 0:  # which looks at files
        announce_data("data", sources)
        announce_data("validation", validation_sources)
    logger.info("%s", _describe_steps(resolved, sources))
    logger.info(
        "global batch: %d sequences, %s tokens (%d x %s x %s)",
        config.training.global_batch_size,
        f"{config.tokens_per_step:,}",
        config.training.local_batch_size,
        numbered(resolved.dims.dp, "rank"),
        numbered(config.num_microbatches, "microbatch", "es"),
    )
    if dist.get_rank() == 0:
        with only_warn("%s cannot be written", path), whole_file(path) as file:
            file.write(_written(resolved).encode())


def _written(resolved: ResolvedJob) -> str:
    """Return the TOML of the job with every key. One that was left open, by -1 or "auto", stays
    open, so that it runs on any mesh; a comment has its value in this job."""
    # the family of a model folder
    given = changed(resolved.written, {"model": {"name": resolved.config.model.name}})
    ranks, comments = numbered(dist.get_world_size(), "rank"), dict[str, str]()
    if not given.training.stages:  # each of which may fill it in otherwise
        for key, old, new in differences(to_json(given), to_json(resolved.config)):
            if old in LEFT_OPEN:
                comments[key] = f"{shown(new)} on {ranks}"
    return with_comments(to_toml(given), comments)


def _describe_model(resolved: ResolvedJob) -> str:
    model, table = resolved.config.model, resolved.model_args.table
    words = f"{model.name} {model.flavor}: {table.num_params:,} parameters"
    if table.mixtures:
        words += f", {table.num_active_params:,} of them active for a token"
    if resolved.frozen:
        own = table.parameters.items()
        trained = sum(parameter.numel for name, parameter in own if name not in resolved.frozen)
        words += f", {trained:,} of them trained"
    return words


def _describe_steps(resolved: ResolvedJob, sources: Sequence[OpenSource]) -> str:
    """Say how much is left to train, how often that reads the data, and if it ends early."""
    training, num_tokens = resolved.config.training, resolved.config.tokens_per_step
    num_steps = resolved.steps - resolved.resume_step
    words = f"to train: {num_tokens * num_steps:,} tokens in {numbered(num_steps, 'step')}"
    if resolved.resume_step:
        words += f" of {resolved.steps:,}"
    num_samples = training.global_batch_size * num_steps
    whole = sum(source.entry.weight for source in sources)
    epochs = sorted(
        num_samples * source.entry.weight / whole / source.samples_per_epoch(training.seq_len + 1)
        for source in sources
        if isinstance(source, CachedSource)
    )
    if epochs:
        least, most = (f"{count:.3g}" for count in (epochs[0], epochs[-1]))
        words += f", {least} epochs" if least == most else f", {least} to {most} epochs"
    if resolved.steps < training.steps:
        words += f" (training.max_epochs = {training.max_epochs})"
    return words


def announce_data(purpose: str, sources: Sequence[OpenSource]) -> None:
    """Say in one line how much data there is, and which files next to it are left out."""
    if not sources:
        return
    name, paths, skipped = sources[0].entry.name, list[str](), list[str]()
    if len(sources) > 1:
        names = [source.entry.name for source in sources]
        name = f"{len(names)} sources ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})"
    for source in sources:
        files = local_paths(source.entry)
        paths += files
        skipped += other_files(source.entry.source.dataset_path, files)
    parts = [numbered(len(paths), "file")] if paths else []
    if len(kinds := by_suffix(paths)) > 1:
        parts[0] += f" ({', '.join(kinds)})"
    caches = [source.cache for source in sources if isinstance(source, CachedSource)]
    if caches:
        parts.append(numbered(sum(cache.num_documents for cache in caches), "document"))
        parts.append(f"{sum(cache.num_tokens for cache in caches):,} tokens")
    if len(caches) < len(sources):
        parts.append(f"{len(sources) - len(caches)} streamed" if caches else "streamed")
    rest = f"; left out: {', '.join(by_suffix(skipped))}" if skipped else ""
    logger.info("%s: %s: %s%s", purpose, name, ", ".join(parts), rest)
    for source in sources:
        if isinstance(source, CachedSource) and source.cache.loss_line:
            logger.warning("%s: %s", source.entry.name, source.cache.loss_line)


def _describe_tokenizer(tokenizer: Tokenizer) -> str:
    """Say which tokens stand around a document: a wrong one is seen in nothing else."""
    ids = {"BOS": tokenizer.bos_id, "EOS": tokenizer.eos_id}
    shown = ", ".join(
        f"{name} {'none' if i is None else f'{i} {tokenizer.decode([i])}'.strip()}"
        for name, i in ids.items()
    )
    words = f"tokenizer: {tokenizer.vocab_size:,} tokens, {shown}"
    named = end_of_chat(tokenizer)
    if named not in (None, tokenizer.eos_id):
        other = tokenizer.decode([named])
        words += f"; tokenizer_config.json names {other}: model.eos_token sets it"
    return words


def announce_end(
    resolved: ResolvedJob,
    tokens_seen: int,
    best_validation: tuple[int, float] | None,
    step: int,
    seconds: float,
) -> None:
    """Log a finished job's results, and the commands that use them.

    Args:
        tokens_seen: by all ranks, since step 1.
        best_validation: the step with the lowest validation loss, and that loss.
        seconds: that this process took.
    """
    tokens = resolved.config.tokens_per_step * (step - resolved.resume_step)
    earlier = f"; {tokens_seen:,} since step 1" if resolved.resume_step else ""
    logger.info("finished: %s tokens in %s%s", f"{tokens:,}", duration(seconds), earlier)
    if best_validation is not None:
        best, loss = best_validation
        logger.info("best validation loss: %.4f, at step %s", loss, f"{best:,}")
    config = resolved.config
    folder = shlex.quote(config.job.dump_folder)
    commands = [f"meshwright report {folder}"]
    if config.metrics.enable_tensorboard:
        commands.append(f"tensorboard --logdir {folder}")
    if config.checkpoint.saves:
        module = config.experimental.custom_import
        # a module without model and tokenizer: of a sink, or a dataset
        is_ours = f"meshwright.models.families.{config.model.name}" in FAMILIES
        is_ours = is_ours and not config.model.tokenizer_type
        own = f" --custom-import {shlex.quote(module)}" if module and not is_ours else ""
        commands.append(f'meshwright generate {folder} --prompt "..."{own}')
        if not config.checkpoint.last_save_in_hf:
            commands.append(f"meshwright export {folder} MODEL_FOLDER{own}")
    logger.info("next:")
    for command in commands:
        logger.info("  %s", command, extra={"is_command": True})


@contextmanager
def note_failure(resolved: ResolvedJob, step: Callable[[], int]) -> Iterator[None]:
    """Add an error, or a request to stop, that ends this process after `step()` to the history."""
    try:
        yield
    except (Exception, StopRequested) as error:
        how = "stopped" if isinstance(error, StopRequested) else "failed"
        note_end(resolved, max(step(), resolved.resume_step), f"{how}: {first_line(error)}")
        raise


def note_end(resolved: ResolvedJob, step: int, reason: str) -> None:
    """Add the end of this process to the history of the run, and to the log's file."""
    logger.debug("ended after step %d: %s", step, reason)
    if dist.get_rank() == 0:
        note_event(Path(resolved.config.job.dump_folder), step, "end", {"reason": reason})
