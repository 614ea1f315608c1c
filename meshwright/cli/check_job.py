"""`meshwright check`: find what would keep a job from running, without starting it."""

from collections.abc import Sequence

from meshwright.config.loader import config_errors, load_config
from meshwright.errors import ConfigError
from meshwright.log import log_to_console, logger
from meshwright.preflight import drift_of, preflight


def main(arguments: Sequence[str]) -> None:
    """Raise `ConfigError` unless the job can run on the given number of ranks.

    Say which options have no effect, and how the job differs from the one that saved the checkpoint
    to resume from.
    """
    ranks, *overrides = arguments or [""]
    if not (ranks.isdecimal() and int(ranks) > 0):
        raise ConfigError(
            "",
            f"RANKS = {ranks!r}: must be a positive number"
            "\n  fix: meshwright check RANKS --job.config_file CONFIG",
        )
    config, provenance = load_config(overrides)
    with config_errors(provenance):
        plan = preflight(config, int(ranks))
    if plan.idle_options or plan.resume_step:
        log_to_console()
    for text in plan.idle_options:
        logger.info("%s", text)
    if plan.resume_step:
        drift_of(plan).log()
