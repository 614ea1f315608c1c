"""The work that follows a step: decided once, and alike on every rank."""

from dataclasses import dataclass

from meshwright.config.job_config import JobConfig


@dataclass(frozen=True)
class StepActions:
    """The work after a step."""

    stop: bool
    """The job ends with this step; it is saved at the end."""
    validate: bool
    log: bool
    save: bool
    """By the interval; a job that ends saves in any case."""
    collect_garbage: bool

    @property
    def needs_host_figures(self) -> bool:
        """Whether the host needs the device's metrics now, and waits for them."""
        return self.log or self.save or self.stop


def actions_after(
    step: int, config: JobConfig, *, is_first: bool, is_last: bool, is_asked_to_stop: bool
) -> StepActions:
    """Decide; `is_last`: there is no step after this one, or no data for it."""
    validate = config.validation.enable and (is_last or step % config.validation.freq == 0)
    stats_freq = config.metrics.layer_stats_freq
    has_stats = stats_freq > 0 and step % stats_freq == 0
    stop, saves = is_last or is_asked_to_stop, config.checkpoint
    is_save_step = step % saves.interval == 0 or (step == 1 and saves.enable_first_step_checkpoint)
    return StepActions(
        stop=stop,
        validate=validate,
        log=is_first or stop or validate or has_stats or step % config.metrics.log_freq == 0,
        save=is_save_step and not stop and saves.saves,
        collect_garbage=step % config.training.gc_freq == 0,
    )
