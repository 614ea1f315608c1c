"""The job's log: on the console, and in one file per rank."""

import faulthandler
import io
import logging
import os
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from meshwright.system.errors import ConfigError

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger("meshwright")

WIDTH = 100
"""Columns of a line on the console, at most."""

COLUMNS = "MESHWRIGHT_COLUMNS"
"""Environment variable with a different number of them."""

INDENT = " " * 9
"""As wide as the time that starts each line."""

EXCERPT = " " * 4

SPEAK_EVERY_S = 10.0

RED, YELLOW, RESET = "\x1b[31m", "\x1b[33m", "\x1b[0m"

NOT_SHOWN = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f\ud800-\udfff]|\x1b(?!\[[0-9;]*m)"
    r"|(?P<login>(?i:(?<=http://)|(?<=https://)|(?<=://)[^\s/:@]*:)[^\s/]+(?=@))"
)
"""Control characters, but for lines and colors; bytes of a file's name that are no text; and the
user and the password in an address."""


def shown(text: str) -> str:
    """Return text as a terminal and a log may have it: a document or the name of a file must not
    steer a terminal, and nobody is to read a password."""
    return NOT_SHOWN.sub(lambda m: "*" * len(m[0]) if m["login"] else repr(m[0])[1:-1], text)


class _Terminal(io.TextIOWrapper):
    def write(self, text: str) -> int:
        return super().write(shown(text))


class FileFormatter(logging.Formatter):
    """The time and the message, as they may be shown."""

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))


class ConsoleFormatter(FileFormatter):
    """The time of day and the message, in lines of at most `width` columns.

    A longer word, such as a path, stays whole, for copying. Of a record with `coloured` (`extra`),
    a console with color shows that text instead. A record with `is_command` is a line to copy: it
    has no time, and stays whole.
    """

    def __init__(self, width: int, *, has_colour: bool) -> None:
        super().__init__("%(asctime)s %(message)s", "%H:%M:%S")
        self._width, self._has_colour = width, has_colour

    def format(self, record: logging.LogRecord) -> str:
        if hasattr(record, "is_command"):
            return record.getMessage()
        if self._has_colour and hasattr(record, "coloured"):
            return f"{self.formatTime(record, self.datefmt)} {record.coloured}"
        text = super().format(record)
        if not record.exc_info:  # a traceback's lines are places to find
            lines = (wrap(line, self._width, INDENT + "  ") for line in text.split("\n"))
            text = "\n".join(lines)
        if self._has_colour and record.levelno >= logging.WARNING:
            colour = RED if record.levelno >= logging.ERROR else YELLOW
            text = f"{colour}{text}{RESET}"
        return text


def wrap(line: str, width: int, indent: str) -> str:
    """Return `line` in lines of at most `width` columns, all but the first after `indent`."""
    if len(line) <= width:
        return line
    return textwrap.fill(
        line,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )


def align(rows: Sequence[Sequence[object]]) -> str:
    """One line a row, each column as wide as its widest, all but the first two spaces apart."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in texts)
    return "\n".join(lines)


def print_error(text: object) -> None:
    """Print a message to stderr, headed by our name, in lines that fit the console.

    Lines of a config, which are shown indented with carets below them, stay whole.
    """
    width = console_width(sys.stderr)
    with suppress(OSError):  # nobody reads it any more: `| tee`, a terminal that is closed
        for line in shown(f"meshwright: {text}").split("\n"):
            is_excerpt = line.startswith(EXCERPT)
            print(line if is_excerpt else wrap(line, width, EXCERPT), file=sys.stderr)


class ConsoleHandler(logging.StreamHandler[TextIO]):
    """The console; with a progress bar, messages appear above it. An error ends the bar.

    A console that is gone, as a terminal that was closed, takes nothing more, and ends nothing.
    """

    bar: "tqdm[None] | None" = None
    """In the last line of the terminal; of all consoles."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self.bar is not None:
                self.bar.clear()
                if record.levelno >= logging.ERROR:
                    ConsoleHandler.bar = None
            super().emit(record)
            if self.bar is not None:
                self.bar.refresh()
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        if isinstance(sys.exception(), OSError):
            ConsoleHandler.bar = None
        else:
            super().handleError(record)


def is_terminal(stream: TextIO) -> bool:
    """Return whether a person watches `stream`, on a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_colour(stream: TextIO) -> bool:
    """Return whether to color text on `stream`. Source: https://no-color.org."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def console_width(stream: TextIO) -> int:
    """Return the columns of a line on `stream`."""
    with suppress(KeyError, ValueError):
        return max(int(os.environ[COLUMNS]), 40)
    with suppress(OSError, ValueError):  # it is no terminal
        return min(WIDTH, os.get_terminal_size(stream.fileno()).columns or WIDTH)
    return WIDTH


def log_to_console(*, is_launched: bool = False, terminal: str = "") -> None:
    """Send the log of this rank to stdout, or its warnings only if another rank says the same.

    Records of `logger.debug` go to the log's file only. So does a record with `is_printed`
    (`extra`): another process has shown it.

    Args:
        is_launched: whether our launcher started this rank; it shows the ranks of LOG_RANK.
        terminal: of the launcher, as `Launch` names it.
    """
    stream = _open_terminal(terminal) or sys.stdout
    handler, env = ConsoleHandler(stream), os.environ
    # the first rank, or a rank that the user has asked for: our launcher shows local rank 0 of each
    # machine by default, and others for --log-rank alone
    says_all = env.get("RANK", "0") == "0" or "LOG_RANK" in env
    says_all |= is_launched and env.get("LOCAL_RANK") != "0"
    handler.setLevel(logging.INFO if says_all else logging.WARNING)
    handler.setFormatter(ConsoleFormatter(console_width(stream), has_colour=has_colour(stream)))
    handler.addFilter(lambda record: not getattr(record, "is_printed", False))
    logger.handlers = [handler]
    logger.setLevel(logging.DEBUG)
    logger.propagate = False


def _open_terminal(terminal: str) -> TextIO | None:
    """Return the launcher's terminal, if this rank is the one that is shown there."""
    local_rank, _, path = terminal.partition(":")
    if not path or local_rank != os.environ.get("LOCAL_RANK"):
        return None
    try:  # as no rank's controlling terminal: Ctrl-C goes to the launcher
        return open(os.open(path, os.O_WRONLY | os.O_NOCTTY), "w", encoding="utf-8")
    except OSError:
        return None


def steady_streams() -> None:
    """Let nothing that is printed fail: streams that the shell has closed, as by `>&-`, lead to
    nowhere, for this process and its ranks; a character that the console's encoding lacks is
    printed as its code, and so is one that would steer the terminal."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the next file would get the number
            os.dup2(nowhere, number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))
        elif number and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
            if number == 1 and stream.isatty() and not isinstance(stream, _Terminal):
                sys.stdout = _Terminal(stream.buffer, stream.encoding, stream.errors, None, True)


def console_stream() -> TextIO:
    """Return where the console's log goes."""
    found = (handler.stream for handler in logger.handlers if isinstance(handler, ConsoleHandler))
    return next(found, sys.stdout)


def log_to_file(folder: Path, rank: int) -> None:
    """Also append the log of this rank to `folder`/rank_N.log; on SIGUSR2, its threads' stacks."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # checks of permissions didn't see it: a quota, /proc, ...
        what = f"job.dump_folder: {folder} cannot be made: {error.strerror}"
        raise ConfigError("job.dump_folder", f"{what}\n  fix: choose a different folder") from None
    path = (folder / f"rank_{rank}.log").absolute()
    if str(path) in {getattr(handler, "baseFilename", "") for handler in logger.handlers}:
        return  # an earlier stage of the job
    try:
        handler = RankFile(path)
    except OSError as error:  # a full disk, or another user's file
        logger.warning("%s cannot be written: %s; training continues", path, error.strerror)
        faulthandler.register(signal.SIGUSR2)  # to stderr: by default it would end the rank
        return
    handler.setFormatter(FileFormatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    logger.addHandler(handler)
    assert handler.stream is not None  # it is opened at once
    # written in C, so also by a rank that hangs in a collective or a compiler
    faulthandler.register(signal.SIGUSR2, file=handler.stream)


class RankFile(logging.FileHandler):
    """A file whose disk may be full: it warns once, and tries again with every record."""

    _has_warned = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s cannot be written: %s", self.baseFilename, sys.exception())


@contextmanager
def busy(
    task: str, progress: Callable[[], str] | None = None, every_s: float | None = None
) -> Iterator[None]:
    """Log every `SPEAK_EVERY_S` seconds that `task` isn't done yet.

    Args:
        progress: returns how far it is, e.g. "12 of 64 parts"; "": nothing is to be logged.
        every_s: seconds between two logs; None: `SPEAK_EVERY_S`.
    """
    is_done, start = threading.Event(), time.perf_counter()

    def speak() -> None:
        while not is_done.wait(every_s or SPEAK_EVERY_S):
            far = progress() if progress else None
            if far != "":
                seconds, far = time.perf_counter() - start, f", {far}" if far else ""
                logger.info("%s: %.0f s so far%s", task, seconds, far)

    thread = threading.Thread(target=speak, name="busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
