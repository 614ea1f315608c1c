"""torchrun with the job's own exit code, and without its report of what the job has said.

    python -m meshwright.cli.launch TORCHRUN_ARGUMENTS train.py --job.config_file CONFIG ...

torchrun itself exits with 1 whatever its ranks exit with, and buries the reason under a table.
"""

import logging
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from meshwright.errors import EXIT_CONFIG, EXIT_TRAINING


def main() -> None:
    """Run the job; exit as its failed rank did, or with 128 + n if that was killed by signal n."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(parse_args(sys.argv[1:]))
    except ChildFailedError as error:
        # a rank that was killed is why others then fail, whichever was noticed first
        killed = [failure for failure in error.failures.values() if failure.exitcode < 0]
        failure = killed[0] if killed else error.get_first_failure()[1]
        rank = next(rank for rank, theirs in error.failures.items() if theirs is failure)
        if failure.exitcode in (EXIT_CONFIG, EXIT_TRAINING):  # all ranks end so; the job said why
            sys.exit(failure.exitcode)
        if failure.exitcode < 0:
            print(f"meshwright: rank {rank} was killed by {failure.signal_name()}", file=sys.stderr)
            sys.exit(128 - failure.exitcode)
        recorded = (failure.error_file_data or {}).get("message", {})  # by `record`, in train.py
        traceback = recorded.get("extraInfo", {}).get("py_callstack", "")
        print(f"meshwright: rank {rank} failed (exit {failure.exitcode})", file=sys.stderr)
        print(traceback, end="", file=sys.stderr)
        sys.exit(failure.exitcode)
    except SignalException as signalled:
        sys.exit(128 + signalled.sigval)


if __name__ == "__main__":
    main()
