"""torchrun with the job's own exit code, and without its report of what the job has said.

    python -m meshwright.cli.launch TORCHRUN_ARGUMENTS train.py --job.config_file CONFIG ...

torchrun itself exits with 1 whatever its ranks exit with, and buries the reason under a table.
"""

import logging
import signal
import sys
import tempfile
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args, run

from meshwright.errors import EXIT_CONFIG, EXIT_SAVE, EXIT_TRAINING


def main() -> None:
    """Run the job; exit as its failed rank did, or with 128 + n if that was killed by signal n."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        # torchrun copies what ranks print to files, and leaves them behind
        with tempfile.TemporaryDirectory(prefix="meshwright_console_") as folder:
            run(parse_args(["--log-dir", folder, *sys.argv[1:]]))
    except ChildFailedError as error:
        _report(error)
    except SignalException as signalled:
        sys.exit(128 + signalled.sigval)


def _report(error: ChildFailedError) -> NoReturn:
    rank, failure = min(error.failures.items(), key=lambda item: _suspicion(item[1]))
    # what `record` in train.py has caught, if the rank got that far
    recorded = (failure.error_file_data or {}).get("message")
    caught: dict[str, Any] = recorded if isinstance(recorded, dict) else {}
    if failure.exitcode in (EXIT_CONFIG, EXIT_TRAINING, EXIT_SAVE):
        if rank > 0 and "message" in caught:  # the first rank's console is shown, and says it
            print(f"meshwright: rank {rank}: {caught['message']}", file=sys.stderr)
        sys.exit(failure.exitcode)
    if failure.exitcode < 0:
        print(f"meshwright: rank {rank} was killed by {failure.signal_name()}", file=sys.stderr)
        sys.exit(128 - failure.exitcode)
    print(f"meshwright: rank {rank} failed (exit {failure.exitcode})", file=sys.stderr)
    print(caught.get("extraInfo", {}).get("py_callstack", ""), end="", file=sys.stderr)
    sys.exit(failure.exitcode)


def _suspicion(failure: ProcessFailure) -> tuple[int, int]:
    """Sorts the failed rank that is the cause before those that fell because of it."""
    if failure.exitcode in (EXIT_CONFIG, EXIT_TRAINING, EXIT_SAVE):
        kind = 0
    elif failure.exitcode == -signal.SIGTERM:  # torchrun's, to the ranks that are left
        kind = 3
    elif failure.exitcode < 0:  # others lose their connection to it, and may be noticed before it
        kind = 1
    else:
        kind = 2
    return kind, failure.timestamp


if __name__ == "__main__":
    main()
