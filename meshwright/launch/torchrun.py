"""The ranks, through torchrun; which itself exits with 1 whatever its ranks exit with, and buries
the reason under a table.
"""

import argparse
import logging
import os
import signal
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args, run

from meshwright.config.loader import load_config
from meshwright.errors import EXIT_CODES, EXIT_HANG, EXIT_INTERRUPTED, EXIT_STOPPED, ConfigError
from meshwright.history import note_missing_end
from meshwright.launch.process import FROM_LAUNCHER, HEARTBEATS, LAUNCHER, stop_signals
from meshwright.launch.watch import Watch, tail, try_to_write
from meshwright.log import TERMINAL, logger, print_error

OWN_CODES = tuple(EXIT_CODES.values())
"""Exit codes whose cause the ranks have reported themselves."""
INTERRUPTED = signal.SIGINT.name
BY_TORCHRUN = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""It ends the ranks that are left, by a signal that they may take time over."""

PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
"""torchrun's environment variable for the beginning of every line of a rank."""


def launch() -> None:
    """Run the command line; exit as its failed rank did, with 128 + n if signal n killed it.

    A signal that asks to stop is left to the ranks, by way of a file; a second one kills them.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # torchrun copies ranks' output to files, and leaves them behind
    with tempfile.TemporaryDirectory(prefix="meshwright_console_") as folder:
        request = Path(folder) / "stop"
        hearts = Path(folder) / "heartbeats"  # the first rank makes it
        os.environ |= {FROM_LAUNCHER: str(request), LAUNCHER: str(os.getpid())}
        os.environ[HEARTBEATS] = str(hearts)
        os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # where a rank was that C++ ended
        for number in stop_signals():
            signal.signal(number, lambda number, _: _ask_to_stop(request, number))
        others = "SIGHUP,SIGQUIT"  # for torchrun to handle
        args = parse_args(["--log-dir", folder, "--signals-to-handle", others, *sys.argv[1:]])
        _set_up_console(args)
        ending = "" if args.nproc_per_node == "1" else "s"
        logger.info("starting %s rank%s on this machine", args.nproc_per_node, ending)
        watch = Watch(hearts, partial(_stderr_of, args), partial(_logs, args), logger.warning)
        try:
            with watch:
                run(args)
        except ChildFailedError as error:
            if watch.verdict is not None:
                _note_end(args, watch, f"hung: {watch.verdict[-1]}")
                for line in watch.verdict:
                    print_error(line)
                sys.exit(EXIT_HANG)
            _report(error, is_asked=request.exists(), args=args, watch=watch)
        except SignalException as signalled:
            sys.exit(EXIT_INTERRUPTED if str(signalled) == INTERRUPTED else 128 + signalled.sigval)


def _set_up_console(args: argparse.Namespace) -> None:
    """Show the lines of a single rank as they are, and tell it of the terminal."""
    if not args.local_ranks_filter.isdecimal():  # several are shown: each line says whose it is
        return
    # torchrun takes no empty template for its default "[rank0]:", but one that comes out empty
    args.role, os.environ[PREFIX] = "", "${role_name}"
    with suppress(OSError):  # there is no terminal
        os.environ[TERMINAL] = f"{args.local_ranks_filter}:{os.ttyname(sys.stdout.fileno())}"


def _ask_to_stop(request: Path, number: int) -> None:
    name = signal.Signals(number).name
    if request.exists():
        raise SignalException(name, signal.SIGKILL)  # torchrun sends it on
    if not any(request.parent.iterdir()):  # where torchrun makes a folder before it starts ranks
        # it waits for other machines, for minutes
        sys.exit(EXIT_INTERRUPTED if name == INTERRUPTED else EXIT_STOPPED)
    unfinished = request.with_suffix(".new")
    unfinished.write_text(name, "ascii")
    unfinished.rename(request)  # never seen empty
    # a handler may have interrupted a print
    os.write(2, f"meshwright: {name}: the job saves and stops; again: killed\n".encode())


def _report(
    error: ChildFailedError, *, is_asked: bool, args: argparse.Namespace, watch: Watch
) -> NoReturn:
    rank, failure = min(error.failures.items(), key=lambda item: _suspicion(item[1]))
    # the exception that `record` in main.py has caught, if the rank got that far
    recorded = (failure.error_file_data or {}).get("message")
    caught: dict[str, Any] = recorded if isinstance(recorded, dict) else {}
    if failure.exitcode == EXIT_STOPPED:
        sys.exit(EXIT_STOPPED)
    if failure.exitcode in OWN_CODES:
        if rank > 0 and "message" in caught:  # the first rank's console is shown, and says it
            print_error(f"rank {rank}: {caught['message']}")
        sys.exit(failure.exitcode)
    place = watch.last_place(rank)
    where = f", in {place}" if place else ""
    code = failure.exitcode
    if "extraInfo" not in caught:
        _show_stderr(rank, failure, args)
    if code < 0:
        code = 128 - code
        how = f"was killed by {failure.signal_name()}"
    else:
        how = f"failed (exit {code})"
    if callstack := caught.get("extraInfo", {}).get("py_callstack", ""):
        print(callstack.rstrip(), file=sys.stderr)
    _note_end(args, watch, f"failed: rank {rank} {how}{where}")
    print_error(f"rank {rank} {how}{where}")
    # whoever asked may have signalled more processes than us: ranks that were starting, compilers
    sys.exit(EXIT_STOPPED if is_asked else code)


def _note_end(args: argparse.Namespace, watch: Watch, reason: str) -> None:
    """Add the end to the history of the run, if its first rank was here and could not."""
    step = watch.last_step(0)
    if step is not None:
        try_to_write(lambda: note_missing_end(_logs(args).parent, step, reason, watch.began))


TAIL_LINES = 20
TAIL_BYTES = 2**20
STDERR = "*/attempt_*/{}/stderr.log"
"""Where torchrun's --tee copies the stderr of a rank to: LOG_DIR/JOB/attempt_N/LOCAL_RANK."""
FAULT = "Fatal Python error"
"""How Python begins to say where it was when C++ ended it."""


def _show_stderr(rank: int, failure: ProcessFailure, args: argparse.Namespace) -> None:
    """Keep the ends of the stderr of this machine's ranks, and print the end of `rank`'s.

    C++ has no traceback that could reach us: NCCL's watchdog says why it aborts on stderr.
    """
    first = rank - failure.local_rank
    files = Path(args.log_dir).glob(STDERR.format("*"))
    ends = {first + int(file.parent.name): tail(file, TAIL_BYTES) for file in files}
    if rank not in ends:
        return
    where = ""
    with suppress(ConfigError, OSError):
        folder = _logs(args)
        for number, end in ends.items():
            (folder / f"stderr_{number}.log").write_text(end, "utf-8")
        where = f" ({folder}/stderr_*.log)"
    shown = args.local_ranks_filter
    if shown and str(failure.local_rank) not in shown.split(","):
        before, fault, after = ends[rank].rpartition(FAULT)
        lines = (before or after).splitlines()[-TAIL_LINES:]
        if fault:
            lines += (fault + after).splitlines()[:TAIL_LINES]
        print_error(f"the end of rank {rank}'s stderr{where}:")
        print(*lines, sep="\n", file=sys.stderr)


def _logs(args: argparse.Namespace) -> Path:
    """Return the job's folder of logs, which is made if need be.

    Raises:
        OSError: if it cannot be made.
        ConfigError: if the job's own config cannot be read any more.
    """
    config, _ = load_config(args.training_script_args)
    folder = Path(config.job.dump_folder) / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _stderr_of(args: argparse.Namespace, local_rank: int) -> Path | None:
    return next(Path(args.log_dir).glob(STDERR.format(local_rank)), None)


def _suspicion(failure: ProcessFailure) -> tuple[int, float]:
    """Sorts the failed rank that is the cause before those that fell because of it."""
    if failure.exitcode in OWN_CODES:
        kind = 0
    elif failure.exitcode in BY_TORCHRUN:
        kind = 4
    elif failure.exitcode == EXIT_STOPPED:  # all agreed to
        kind = 3
    elif failure.exitcode < 0:  # others lose their connection to it, and may be noticed before it
        kind = 1
    else:
        kind = 2
    try:  # torchrun counts whole seconds; a rank writes this file when it fails
        when = Path(failure.error_file).stat().st_mtime
    except OSError:
        when = failure.timestamp
    return kind, when
