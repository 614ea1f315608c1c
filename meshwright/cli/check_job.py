"""`meshwright check`: find what would keep a job from running, without starting it."""

from argparse import Namespace

from meshwright.config.loader import config_errors, load_given
from meshwright.launch.machine import count_ranks
from meshwright.log import log_to_console, logger
from meshwright.preflight import drift_of, preflight


def run(given: Namespace) -> None:
    """Raise `ConfigError` unless the job can run on the given number of ranks.

    Say which options have no effect, and how the job differs from the one that saved the checkpoint
    to resume from.
    """
    ranks = count_ranks(given)
    config, provenance = load_given(given)
    with config_errors(provenance):
        plan = preflight(config, ranks.total)
    if plan.idle_options or plan.resume_step:
        log_to_console()
    for text in plan.idle_options:
        logger.info("%s", text)
    if plan.resume_step:
        drift_of(plan).log()
