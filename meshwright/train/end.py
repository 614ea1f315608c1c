"""The end of a job: whether it can resume, as an error, and the export of its last checkpoint."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import torch

from meshwright.checkpoint.find import open_checkpoint
from meshwright.config.job_config import Checkpoint, JobConfig
from meshwright.system.errors import (
    ConfigError,
    DataError,
    SaveError,
    StopRequested,
    StorageError,
    TrainingError,
)
from meshwright.system.files import Place
from meshwright.system.log import logger
from meshwright.system.processes import Requests
from meshwright.train.resolve import ResolvedJob


def raise_data_error(
    config: Checkpoint, failures: Mapping[int, Exception], step: int, *, is_new: bool
) -> None:
    """End a job of which some ranks cannot read the data of the step after `step`.

    Args:
        failures: their errors, by rank.
        is_new: this process has taken steps, so starting it again makes progress.

    Raises:
        StorageError: if the process has taken no step, and the error may pass.
        ConfigError: if it has taken no step, and the error stays: a scheduler that restarts the job
            would loop forever.
        TrainingError: as `check_resumes`.
        DataError: otherwise.
    """
    rank, error = min(failures.items())
    fault = f"the data cannot be read after step {step}: rank {rank}: {error}"
    if not is_new:
        if isinstance(error, StorageError):
            raise StorageError(fault)
        raise ConfigError(getattr(error, "key", ""), fault)
    check_resumes(config, fault)
    fix = "if the cause was temporary, run the same command again: the last step is saved"
    raise DataError(fault if isinstance(error, StorageError) else f"{fault}\n  fix: {fix}")


def check_resumes(config: Checkpoint, stopped: str) -> None:
    """Raise `TrainingError` if the same command, run again, would not resume from here."""
    if not config.saves:
        why = "checkpoint.load_only = true" if config.enable else "checkpoint.enable = false"
        raise TrainingError(f"{stopped}; nothing was saved, because {why}")
    if config.load_step != -1:
        raise TrainingError(
            f"{stopped}; it is saved, but checkpoint.load_step = {config.load_step} would begin "
            "from there again\n  fix: leave checkpoint.load_step out"
        )


def check_has_data(step: int) -> None:
    """Raise `ConfigError` if `step`, for which there is no data, is the first."""
    if step == 1:
        key, fix = "training.max_epochs", "raise it, add data, or lower training.global_batch_size"
        raise ConfigError(key, f"{key}: gives less than one global batch\n  fix: {fix}")


def export_at_end(plan: ResolvedJob, requests: Requests) -> bool:
    """Export the last checkpoint if the config asks for it. False: a request to stop ends it."""
    config = plan.config.checkpoint
    if not (config.last_save_in_hf and config.saves):
        return True
    try:
        requests.check()  # it may have come during the last save
        export_last(plan)
    except StopRequested as asked:
        logger.info("%s: the export is left out; start it again for it", asked)
        return False
    return True


def prepare_export(config: JobConfig) -> None:
    """Import what `export_last` will need, if it is asked for: files may change during the job."""
    if config.checkpoint.last_save_in_hf:
        import_module("meshwright.checkpoint.conversion.export")
        import_module("meshwright.checkpoint.conversion.tokenizer_files")


def export_last(plan: ResolvedJob) -> None:
    """Export the newest checkpoint to {dump_folder}/hf, unless it is there already; `SaveError` if
    it cannot be written, or is not what was saved."""
    # not above: other jobs would import them before their first step
    from meshwright.checkpoint.conversion.export import Job, export
    from meshwright.checkpoint.conversion.tokenizer_files import tokenizer_files

    config = plan.config
    place = Place("checkpoint.last_save_in_hf", plan.checkpoint_folder)
    try:
        with open_checkpoint(place, logger.warning) as (found, manifest):
            out = Path(config.job.dump_folder).absolute() / "hf" / found.path.name
            if out.exists():
                return
            job = Job(
                found,
                manifest,
                plan.family,
                plan.tokenizer,
                tokenizer_files(
                    plan.tokenizer,
                    config.model.tokenizer_path,
                    seq_len=config.training.seq_len,
                    chat_template_path=config.model.chat_template_path,
                ),
                dtype=getattr(torch, config.checkpoint.export_dtype),
            )
            export(job, out, logger.info)
    except ConfigError as error:
        raise SaveError(f"the checkpoint is saved, but not as a model folder: {error}") from None
