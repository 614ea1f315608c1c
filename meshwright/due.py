"""The decisions that follow a step."""

from dataclasses import dataclass

from meshwright.config.conditions import saves
from meshwright.config.job_config import Checkpoint, JobConfig


@dataclass(frozen=True)
class Due:
    """The work after a step, decided once and alike on every rank."""

    is_first: bool
    """The first step of this process: it has compiled, and its figures are logged."""
    stop: bool
    """The job ends with this step; it is saved at the end."""
    validate: bool
    log: bool
    save: bool
    """By the interval; a job that ends saves in any case."""
    collect_garbage: bool

    @property
    def look(self) -> bool:
        """Whether the host needs the device's figures now."""
        return self.log or self.save or self.stop


def _is_save_step(step: int, config: Checkpoint) -> bool:
    return step % config.interval == 0 or (step == 1 and config.enable_first_step_checkpoint)


def due_after(
    step: int, config: JobConfig, *, is_first: bool, is_last: bool, is_asked_to_stop: bool
) -> Due:
    """Decide.

    Args:
        is_last: there is no step after this one, or no data for it.
        is_asked_to_stop: as all ranks have agreed.
    """
    validate = config.validation.enable and (is_last or step % config.validation.freq == 0)
    stop = is_last or is_asked_to_stop
    return Due(
        is_first=is_first,
        stop=stop,
        validate=validate,
        log=is_first or stop or validate or step % config.metrics.log_freq == 0,
        save=saves(config.checkpoint) and not stop and _is_save_step(step, config.checkpoint),
        collect_garbage=step % config.training.gc_freq == 0,
    )
