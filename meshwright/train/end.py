"""The end of a job: how its steps ended, whether it can resume, and the last export."""

import time
from collections.abc import Mapping
from enum import Enum, auto
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.checkpoint.store import open_checkpoint
from meshwright.config.job_config import Checkpoint, JobConfig
from meshwright.parallelisms.meshes import barrier
from meshwright.system import errors
from meshwright.system.files import NamedPath
from meshwright.system.log import logger
from meshwright.system.processes import Requests
from meshwright.train.announce import announce_end, note_end
from meshwright.train.resolve import ResolvedJob
from meshwright.train.running_job import RunningJob
from meshwright.train.stop import StopAgreement


class End(Enum):
    """How the steps of a stage of training ended."""

    STOPPED = auto()
    """The ranks were asked to stop, before the last step or before the next stage."""
    STAGE = auto()
    """All steps of the stage are taken, and another stage follows."""
    DATA = auto()
    """`training.max_epochs` leaves no data for one more step."""
    DONE = auto()
    """All steps are taken."""


def how_it_ends(resolved: ResolvedJob, step: int, reason: str, *, is_complete: bool) -> End:
    """Return how a stage ends with `step`.

    Args:
        reason: why the ranks stop; "": nobody has asked them to.
        is_complete: there is no step left.
    """
    if not is_complete:
        return End.STOPPED
    if resolved.next_stage is not None:
        return End.STOPPED if reason else End.STAGE
    return End.DONE if step >= resolved.config.training.steps else End.DATA


def end_steps(job: RunningJob, agreement: StopAgreement, step: int, *, is_complete: bool) -> End:
    """Close the parts of the steps, and say how they ended, in the log and in the history.

    Raises:
        StorageError, ConfigError, TrainingError, DataError: as `raise_data_error`, and
            `check_resumes` if the ranks were asked to stop.
    """
    resolved, config, reason = job.resolved, job.resolved.config, agreement.decision.reason
    is_new = step > resolved.resume_step
    job.loader.close()
    if reason:
        agreement.clear_stop_file()
    if failures := agreement.failures(step):
        raise_data_error(config.checkpoint, failures, step, is_new=is_new)
    end = how_it_ends(resolved, step, reason, is_complete=is_complete)
    match end:
        case End.STOPPED:
            if is_new:
                check_resumes(config.checkpoint, f"after step {step} of {resolved.steps}: {reason}")
            words = "stopped after step %d of %d: %s; start it again to resume"
            logger.info(words, step, resolved.steps, reason)
            note_end(resolved, step, f"stopped: {reason}")
        case End.STAGE:
            logger.info("stage %d ends with step %d", resolved.stage_number, step)
            note_end(resolved, step, f"finished stage {resolved.stage_number}")
        case End.DATA | End.DONE:
            how = "finished"
            if end is End.DATA:
                why = f"the data ends here: training.max_epochs = {config.training.max_epochs}"
                logger.info("%s", why)
                how = f"finished: {why}"
            best, seconds = job.best_validation.best, time.perf_counter() - job.since
            announce_end(resolved, job.reporter.tokens_seen, best, step, seconds)
            note_end(resolved, step, how)
    barrier()  # the first rank to leave with an error has torchrun end the others
    # the next stage makes its own: each has threads, and a connection to every other rank
    for group in (agreement.group, job.checkpoints.ranks.group):
        dist.destroy_process_group(group)
    return end


def raise_data_error(
    config: Checkpoint, failures: Mapping[int, Exception], step: int, *, is_new: bool
) -> None:
    """End a job of which some ranks can't read the data of the step after `step`.

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
        if isinstance(error, errors.StorageError):
            raise errors.StorageError(fault)
        raise errors.ConfigError(getattr(error, "key", ""), fault)
    check_resumes(config, fault)
    fix = "if the cause was temporary, run the same command again: the last step is saved"
    raise errors.DataError(errors.one_fix(f"{fault}{errors.FIX}{fix}"))


def check_resumes(config: Checkpoint, stopped: str) -> None:
    """Raise `TrainingError` if the same command, run again, wouldn't resume from here."""
    if not config.saves:
        why = "checkpoint.load_only = true" if config.enable else "checkpoint.enable = false"
        raise errors.TrainingError(f"{stopped}; nothing was saved, because {why}")
    if config.load_step != -1:
        raise errors.TrainingError(
            f"{stopped}; it is saved, but checkpoint.load_step = {config.load_step} would start "
            "from there again\n  fix: leave checkpoint.load_step out"
        )


def check_has_data(step: int) -> None:
    """Raise `ConfigError` if `step`, for which there is no data, is the first."""
    if step == 1:
        key, fix = "training.max_epochs", "raise it, add data, or lower training.global_batch_size"
        raise errors.ConfigError(key, f"{key}: gives less than one global batch\n  fix: {fix}")


def export_at_end(resolved: ResolvedJob, requests: Requests) -> bool:
    """Export the last checkpoint if the config asks for it. False: a request to stop ends it."""
    config = resolved.config.checkpoint
    if not (config.last_save_in_hf and config.saves):
        return True
    try:
        requests.check()  # it may have come during the last save
        export_last(resolved)
    except errors.StopRequested as asked:
        logger.info("%s: the export is left out; start it again for it", asked)
        return False
    return True


def prepare_export(config: JobConfig) -> None:
    """Import the modules of `export_last`, if it is asked for: files may change during the job."""
    if config.checkpoint.last_save_in_hf:
        import_module("meshwright.checkpoint.conversion.export")
        import_module("meshwright.checkpoint.conversion.tokenizer_files")


def export_last(resolved: ResolvedJob) -> None:
    """Export the newest checkpoint to {dump_folder}/hf, unless it is there already; `SaveError` if
    it can't be written, or differs from the saved one."""
    # not above: other jobs would import them before their first step
    from meshwright.checkpoint.conversion.export import Export, export
    from meshwright.checkpoint.conversion.tokenizer_files import tokenizer_files

    config = resolved.config
    place = NamedPath("checkpoint.last_save_in_hf", resolved.checkpoint_folder)
    try:
        with open_checkpoint(place, logger.warning) as (found, manifest):
            out = Path(config.job.dump_folder).absolute() / "hf" / found.path.name
            if out.exists():
                return
            job = Export(
                found,
                manifest,
                resolved.family,
                resolved.tokenizer,
                tokenizer_files(
                    resolved.tokenizer,
                    config.model.tokenizer_path,
                    seq_len=config.training.seq_len,
                    chat_template_path=config.model.chat_template_path,
                ),
                dtype=getattr(torch, config.checkpoint.export_dtype),
                has_mtp=config.checkpoint.export_mtp,
            )
            export(job, out, logger.info)
    except errors.ConfigError as error:
        raise errors.SaveError(
            f"the checkpoint is saved, but not as a model folder: {error}"
        ) from None
