"""Run torchrun, and report the failing rank's own exit code and error."""

import argparse
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import parse_args, run

from meshwright.config.loader import load_config
from meshwright.launch.heartbeat import HEARTBEATS, LOOK_EVERY_S
from meshwright.launch.meeting import OTHER_PROGRAM, Meeting
from meshwright.launch.watch import Watch, in_time, tail
from meshwright.metrics.sinks import note_missing_end
from meshwright.system import errors
from meshwright.system.files import text_of
from meshwright.system.log import SPEAK_EVERY_S, logger, print_error
from meshwright.system.processes import (
    STOP,
    STOP_SIGNALS,
    TRAINED,
    Launch,
    before_training,
    stop_signals,
)

PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
"""torchrun's environment variable for the start of every line of a rank."""

RANKS = "meshwright.train"
"""The module that a rank runs."""

STDERR = "*/attempt_*/{}/stderr.log"
"""Where torchrun's --tee copies the stderr of a rank to: LOG_DIR/JOB/attempt_N/LOCAL_RANK."""

FAULT = "Fatal Python error"
"""How Python starts to say where it was when C++ ended it."""

TAIL_LINES, TAIL_BYTES = 20, 2**20

STUCK_S = 2.0
"""Seconds that the main thread gets to hear of a signal, if there are no ranks yet."""

SILENT_S = 60.0
"""Seconds after which a program that has the port of the rendezvous, and says nothing, ends the
job."""

OTHER_PORT = f"{errors.FIX}choose a different port, the same on all nodes"


def launch() -> None:
    """Run the command line; exit as `exit_code` says.

    A signal that asks to stop is left to the ranks, by way of a file; a second Ctrl-C kills them.
    """
    _silence_torchrun()
    # torchrun copies ranks' output to files, and leaves them behind
    with tempfile.TemporaryDirectory(prefix="meshwright_console_") as folder:
        request = Path(folder) / STOP
        os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # where a rank was that C++ ended
        heard: list[int] = []
        _write_requests(request)
        for number in stop_signals():
            signal.signal(number, lambda number, _: _ask_to_stop(request, number, heard))
        if signal.getsignal(signal.SIGQUIT) is not signal.SIG_IGN:
            signal.signal(signal.SIGQUIT, _kill)
        _end_though_stuck(Path(folder), heard)
        # torchrun is left no signal: it would take even the ones that nohup has us ignore. A name
        # that is none it passes over
        args = parse_args(["--log-dir", folder, "--signals-to-handle", "", *sys.argv[1:]])
        launch = replace(
            Launch.of_environment(),
            pid=os.getpid(),
            folder=folder,
            terminal=_set_up_console(args),
        )
        os.environ |= launch.as_variable()
        if int(args.nnodes) == 1:
            _ask_for_no_name()
        _announce_wait(args, Path(folder))
        hearts = Path(folder) / HEARTBEATS

        def leave() -> None:
            _report_hang(args, watch)
            _leave(Path(folder), errors.EXIT_HANG)

        watch = Watch(hearts, partial(_stderr_of, args), partial(_logs, args), leave)
        try:
            with watch:
                run(args)
        except (ChildFailedError, RendezvousError) as error:
            if watch.verdict is not None:
                _report_hang(args, watch)
                sys.exit(errors.EXIT_HANG)
            if isinstance(error, ChildFailedError):
                sys.exit(_report(error, request, args, watch))
            print_error(_apart(error, args, Path(folder)))
            sys.exit(1)
        except SignalException as signalled:
            lost = "there was nothing new to save"
            if _has_trained(request):
                lost = "the steps since the last checkpoint are lost"
            print_error(f"{signalled}: killed; {lost}")
            sys.exit(128 + signal.Signals[str(signalled)])


def _silence_torchrun() -> None:
    """Hold back torchrun's reports of signals and failed ranks: we have our own."""
    for name in list(logging.root.manager.loggerDict):  # each module of it has its own level
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _announce_wait(args: argparse.Namespace, folder: Path) -> None:
    """Log every ten seconds, in a thread, that there are no ranks yet, and which of the other
    nodes are missing."""
    meeting = None
    if int(args.nnodes) > 1:
        meeting = Meeting(args.rdzv_endpoint, int(args.nnodes), args.rdzv_id)

    def speak() -> None:
        begun, due_s = time.monotonic(), SPEAK_EVERY_S
        heard_at = begun
        with suppress(OSError):  # the folder goes with the job
            while not _has_ranks(folder):
                if meeting is not None:
                    meeting.come()
                now = time.monotonic()
                heard_at = heard_at if meeting is not None and meeting.is_silent else now
                # torchrun itself would wait for ever
                if now - heard_at > SILENT_S and not _has_ranks(folder):
                    print_error(
                        f"RDZV_ENDPOINT = {args.rdzv_endpoint!r}: {OTHER_PROGRAM}{OTHER_PORT}"
                    )
                    _leave(folder, errors.EXIT_CONFIG)
                if (waited_s := now - begun) >= due_s:
                    due_s += SPEAK_EVERY_S
                    what = "starting the ranks" if meeting is None else meeting.describe()
                    logger.info("%s: %.0f s so far", what, waited_s)
                time.sleep(LOOK_EVERY_S)

    threading.Thread(target=speak, name="rendezvous", daemon=True).start()


def _ask_for_no_name() -> None:
    """Have torchrun take the host name as it is.

    It looks the name up for records that nobody reads, and without an answer that takes 20 s
    each time. If torchrun asks in a different way one day, those seconds come back.
    """
    socket.getfqdn = lambda name="": name or socket.gethostname()


def _apart(error: RendezvousError, args: argparse.Namespace, folder: Path) -> str:
    """Return the message that the nodes didn't meet, or have lost each other since."""
    at = f"{args.rdzv_endpoint}: {errors.first_line(error.__cause__ or error)}\n  fix: "
    if _has_ranks(folder):
        return f"the nodes have lost each other at {at}see the consoles of all"
    if int(args.nnodes) == 1:
        return f"the ranks cannot meet at {at}start it again"
    return f"the {args.nnodes} nodes did not meet at {at}start the same command on all"


def _end_though_stuck(folder: Path, heard: Sequence[int]) -> None:
    """Have a thread end this process if it is asked to stop before there are ranks, and its main
    thread doesn't come back from C++: there it waits for the first node.

    Args:
        heard: signals that the main thread has answered, and may be stuck after.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    # Python's handlers wait for the main thread; the number is written here at once
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def listen() -> None:
        with suppress(OSError):  # the folder goes with the job
            while not _has_ranks(folder):
                (number,) = os.read(read_end, 1)
                time.sleep(STUCK_S)
                if number in (*STOP_SIGNALS, signal.SIGQUIT) and not _has_ranks(folder):
                    name = signal.Signals(number).name
                    if not heard:
                        print_error(before_training(name))
                    is_kill = number == signal.SIGQUIT
                    _leave(folder, 128 + number if is_kill else errors.code_of_request(name))

    threading.Thread(target=listen, name="signals", daemon=True).start()


def _leave(folder: Path, code: int) -> NoReturn:
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(code)


def _set_up_console(args: argparse.Namespace) -> str:
    """Show the lines of a single rank as they are; return the terminal to tell it of, if any."""
    if not args.local_ranks_filter.isdecimal():  # several are shown: each line says whose it is
        return ""
    # torchrun takes no empty template for its default "[rank0]:", but one that comes out empty
    args.role, os.environ[PREFIX] = "", "${role_name}"
    try:
        return f"{args.local_ranks_filter}:{os.ttyname(sys.stdout.fileno())}"
    except OSError:  # there is none
        return ""


def _has_ranks(folder: Path) -> bool:
    """Return whether ranks have been started: torchrun makes a folder for each start before."""
    return any(path.is_dir() for path in folder.iterdir())


def _has_trained(request: Path) -> bool:
    return request.with_name(TRAINED).exists()


def _write_requests(request: Path) -> None:
    """Write every request now; to ask is to rename one, since the disk may be full by then."""
    for number in stop_signals():
        request.with_suffix(f".{number.name}").write_text(number.name, "ascii")


def _ask_to_stop(request: Path, number: int, heard: list[int]) -> None:
    name = signal.Signals(number).name
    heard.append(number)
    if number == signal.SIGINT and heard.count(number) > 1:
        _kill(number)
    if not _has_ranks(request.parent):  # it waits for other nodes, for minutes
        if len(heard) == 1:
            print_error(before_training(name))
        sys.exit(errors.code_of_request(name))
    if request.exists():
        if number == signal.SIGINT:
            with suppress(OSError):
                os.write(2, b"meshwright: SIGINT: the job is stopping; again: killed\n")
        # Slurm's warning and then its SIGTERM, a shell that hangs up after its terminal: no hurry
        return
    request.with_suffix(f".{name}").rename(request)
    late = "stops, at the latest after its first step"
    will = "saves and stops" if _has_trained(request) else late
    again = "; again: killed" if number == signal.SIGINT else ""
    # a handler may have interrupted a print; the reader of our stderr (`| tee`) may be gone by now
    with suppress(OSError):
        os.write(2, f"meshwright: {name}: the job {will}{again}\n".encode())


def _kill(number: int, _: object = None) -> NoReturn:
    raise SignalException(signal.Signals(number).name, signal.SIGKILL)  # torchrun sends it on


def _report_hang(args: argparse.Namespace, watch: Watch) -> None:
    lines = watch.verdict or []
    _note_end(args, watch, f"hung: {lines[-1]}")
    for line in lines:
        print_error(line)


def _report(error: ChildFailedError, request: Path, args: argparse.Namespace, watch: Watch) -> int:
    """Say why the job ended, unless its ranks have; return its exit code."""
    ends = [_end(rank, failure) for rank, failure in error.failures.items()]
    asked = text_of(request)
    code = errors.exit_code(ends, asked, has_trained=_has_trained(request))
    end = errors.cause(ends)
    failure = error.failures[end.rank]
    if code in (errors.EXIT_STOPPED, errors.EXIT_INTERRUPTED):
        if not _has_trained(request):
            print_error(before_training(asked or "a request to stop"))
            _note_end(args, watch, f"stopped: {asked or 'a request to stop'}")
        return code
    if code in errors.EXIT_CODES.values():
        message = _recorded(failure).get("message")
        shown = [one for one in error.failures.values() if _is_shown(one.local_rank, args)]
        if message and message not in [_recorded(one).get("message") for one in shown]:
            print_error(f"rank {end.rank}: {message}")
        return code
    beat = watch.last_beat(end.rank)
    where = f", in {beat.place}" if beat else ""
    how = f"was killed by {failure.signal_name()}" if end.code < 0 else f"failed (exit {code})"
    if end.code in errors.BY_TORCHRUN:
        how = "was ended by SIGTERM"
    hint = ""
    if end.code == -signal.SIGKILL:
        hint = "; most often there is too little memory: dmesg"
    if end.has_lost_peer:  # it hasn't failed by itself
        how = "lost its connection to another rank"
        hint = "; look for the first failure on the consoles of all nodes (traceback: the logs)"
    elif text := _traceback(failure):
        _print(text)
    else:
        _show_stderr(end.rank, failure, args)
    _note_end(args, watch, f"failed: rank {end.rank} {how}{where}")
    print_error(f"rank {end.rank} {how}{where}{hint}")
    if asked:
        print_error("the job was asked to stop, but failed before it saved")
    return code


def _recorded(failure: ProcessFailure) -> dict[str, Any]:
    """Return the exception that `record` in main.py has caught; {} if the rank got not that far."""
    recorded = (failure.error_file_data or {}).get("message")
    return recorded if isinstance(recorded, dict) else {}


def _traceback(failure: ProcessFailure) -> str:
    text: str = _recorded(failure).get("extraInfo", {}).get("py_callstack", "")
    return text.rstrip()


def _end(rank: int, failure: ProcessFailure) -> errors.RankEnd:
    try:  # torchrun counts whole seconds; a rank writes this file when it fails
        when = Path(failure.error_file).stat().st_mtime
    except OSError:
        when = failure.timestamp
    return errors.RankEnd(
        rank, failure.exitcode, when, bool(errors.LOST_PEER.search(_traceback(failure)))
    )


def _print(*lines: str) -> None:
    with suppress(OSError):  # nobody reads it any more
        print(*lines, sep="\n", file=sys.stderr)


def _note_end(args: argparse.Namespace, watch: Watch, reason: str) -> None:
    """Add the end to the history of the run, if its first rank was here and couldn't."""
    if (beat := watch.last_beat(0)) is not None:
        in_time(lambda: note_missing_end(_logs(args).parent, beat.step, reason, watch.began))


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
    with suppress(errors.ConfigError, OSError):
        folder = _logs(args)
        for number, end in ends.items():
            (folder / f"stderr_{number}.log").write_text(end, "utf-8")
        where = f" ({folder}/stderr_*.log)"
    if not _is_shown(failure.local_rank, args):
        before, *fault = ends[rank].partition(FAULT)
        lines = before.splitlines()[-TAIL_LINES:] + "".join(fault).splitlines()[:TAIL_LINES]
        if lines:
            print_error(f"the end of rank {rank}'s stderr{where}:")
            _print(*lines)


def _logs(args: argparse.Namespace) -> Path:
    """Make the job's folder of logs; raise ConfigError if its config can't be read any more."""
    words = args.training_script_args
    if RANKS in words:  # `python -m meshwright.train`, as `meshwright train` starts ranks
        words = words[words.index(RANKS) + 1 :]
    config = load_config(words)
    folder = Path(config.job.dump_folder) / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _stderr_of(args: argparse.Namespace, local_rank: int) -> Path | None:
    return next(Path(args.log_dir).glob(STDERR.format(local_rank)), None)


def _is_shown(local_rank: int, args: argparse.Namespace) -> bool:
    shown = args.local_ranks_filter
    return not shown or str(local_rank) in shown.split(",")
