"""torchrun with the job's own exit code, and without its report of what the job has said.

    python -m meshwright.cli.launch TORCHRUN_ARGUMENTS train.py --job.config_file CONFIG ...

torchrun itself exits with 1 whatever its ranks exit with, and buries the reason under a table.
"""

import logging
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

CONFIG_ERROR = 2


def main() -> None:
    """Run the job; exit as the first rank that failed did, or with 128 + n for signal n."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(parse_args(sys.argv[1:]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == CONFIG_ERROR:  # every rank has the same, and the first has said it
            sys.exit(CONFIG_ERROR)
        if failure.exitcode < 0:
            print(f"meshwright: rank {rank} was killed by {failure.signal_name()}", file=sys.stderr)
            sys.exit(128 - failure.exitcode)
        reason = (
            "" if failure.message.startswith("To enable traceback") else f":\n{failure.message}"
        )
        print(f"meshwright: rank {rank} failed (exit {failure.exitcode}){reason}", file=sys.stderr)
        sys.exit(failure.exitcode)
    except SignalException as signalled:
        sys.exit(128 + signalled.sigval)


if __name__ == "__main__":
    main()
