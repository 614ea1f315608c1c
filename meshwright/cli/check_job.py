"""`meshwright check`: find what would keep a job from running, without starting it."""

from collections.abc import Sequence

from meshwright.config.loader import config_errors, load_config
from meshwright.errors import ConfigError
from meshwright.log import log_to_console
from meshwright.preflight import drift_of, preflight


def main(arguments: Sequence[str]) -> None:
    """Raise `ConfigError` unless the job can run on the given number of ranks; say how it differs
    from the one that saved the checkpoint that it resumes from."""
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
    if plan.resume_step:
        log_to_console()
        drift_of(plan).log()
