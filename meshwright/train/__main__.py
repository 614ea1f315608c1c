"""One rank of a job: python -m meshwright.train CONFIG [--section.key value ...]"""

from meshwright.system.log import busy, log_to_console
from meshwright.system.modules import uncollected
from meshwright.system.processes import Launch, Requests


def start() -> None:
    """Run this process's rank, and leave with its exit code."""
    launch = Launch.of_environment()
    log_to_console(is_launched=launch.pid > 0, terminal=launch.terminal)
    with Requests("exit", launch.folder) as requests:
        with busy("loading torch"), uncollected():
            # not above: processes that tokenise read this file too, and need no torch
            from meshwright.train.main import main
        main(launch, requests)


if __name__ == "__main__":
    start()
