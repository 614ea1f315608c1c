"""`meshwright plan`: memory, traffic and step time of a job, on this machine, without a GPU."""

import contextlib
import os
import sys
from argparse import Namespace

from meshwright.config.loader import config_errors, load_given
from meshwright.errors import check


def run(given: Namespace) -> None:
    """Plan the job that `given` names, and print the plan.

    Raises:
        ConfigError: if the job cannot run.
    """
    with contextlib.redirect_stdout(sys.stderr):  # libraries' output is no part of the plan
        text = _answer(given)
    print(text)


def _answer(given: Namespace) -> str:
    # not at the top: it needs torch, which `--help` and the checks of options do not
    from meshwright.planning import command

    device = given.device
    check(bool(device), "--device", device, "is needed", "--device h100, cpu, 80, ...")
    check(bool(given.config), "CONFIG", given.config, "is needed", "name a TOML")
    check(given.world_size > 0, "--world-size", given.world_size, "must be positive", "8, say")
    check(given.rank >= 0, "--rank", given.rank, "must not be negative")
    for option in ("rank", "all_stages", "html", "no_remedies"):
        value = getattr(given, option)
        key, fix = f"--{option.replace('_', '-')}", "leave out one of the two"
        check(not (given.search and value), key, value, "has no effect on a --search", fix)
    workers = given.workers if given.workers > 0 else len(os.sched_getaffinity(0))
    config, provenance = load_given(given)
    with config_errors(provenance):
        if given.search:
            return command.search(config, given.world_size, device, workers, given.json)
        return command.plan(
            config,
            given.world_size,
            device,
            rank=given.rank,
            all_stages=given.all_stages,
            as_json=given.json,
            html=given.html,
            tries_remedies=not given.no_remedies,
            workers=workers,
        )
