"""The errors of a job that ends before its last step."""

from collections.abc import Mapping

from meshwright.config.job_config import Checkpoint
from meshwright.errors import ConfigError, DataError, TrainingError


def raise_data_error(
    config: Checkpoint, failures: Mapping[int, Exception], step: int, *, is_new: bool
) -> None:
    """End a job of which some ranks cannot read the data of the step after `step`.

    Args:
        failures: their errors, by rank.
        is_new: this process has taken steps, so starting it again makes progress. Otherwise it is a
            config error: a scheduler that restarts the job would loop forever.

    Raises:
        ConfigError: if the process has taken no step.
        TrainingError: as `check_resumes`.
        DataError: otherwise.
    """
    rank, error = min(failures.items())
    what = f"the data cannot be read after step {step}: rank {rank}: {error}"
    if not is_new:
        raise ConfigError(getattr(error, "key", ""), what)
    check_resumes(config, what)
    raise DataError(f"{what}\n  it is saved; what may pass is over when the job is started again")


def check_resumes(config: Checkpoint, stopped: str) -> None:
    """Check that the same command, run again, resumes from here.

    Otherwise a scheduler that restarts the job would loop forever.

    Raises:
        TrainingError: naming the key that prevents it.
    """
    if not config.enable:
        raise TrainingError(f"{stopped}; what was trained is lost: checkpoint.enable = false")
    if config.load_only:
        raise TrainingError(f"{stopped}; what was trained is lost: checkpoint.load_only = true")
    if config.load_step != -1:
        raise TrainingError(
            f"{stopped}; it is saved, but checkpoint.load_step = {config.load_step} would begin "
            "from there again: leave it out to resume"
        )


def check_has_data(step: int) -> None:
    """Raise `ConfigError` if `step`, for which there is no data, is the first."""
    if step == 1:
        key, fix = "training.max_epochs", "raise it, add data, or lower training.global_batch_size"
        raise ConfigError(key, f"{key}: gives less than one global batch\n  fix: {fix}")
