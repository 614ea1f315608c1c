"""One rank of a job: python -m meshwright.train CONFIG [--section.key value ...]"""

import os
import sys

import meshwright
from meshwright.system.errors import EXIT_CONFIG, ConfigError
from meshwright.system.log import busy, log_to_console, print_error
from meshwright.system.modules import uncollected
from meshwright.system.processes import Launch, Requests
from meshwright.system.slurm import check_tasks


def start() -> None:
    """Run this process's rank, and leave with its exit code."""
    meshwright.exit_unless_linux()
    if "RANK" not in os.environ:
        try:
            check_tasks(1, os.environ)  # here, since torch takes seconds to import
        except ConfigError as error:
            print_error(error)
            sys.exit(EXIT_CONFIG)
    launch = Launch.of_environment()
    log_to_console(is_launched=launch.pid > 0, terminal=launch.terminal)
    with Requests("exit", launch.folder) as requests:
        with busy("loading torch"), uncollected():
            # not above: processes that tokenize read this file too, and need no torch
            from meshwright.train.main import main
        main(launch, requests)


if __name__ == "__main__":
    start()
