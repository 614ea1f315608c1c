"""The job's logger: the console, and one file a rank."""

import faulthandler
import logging
import signal
import sys
from pathlib import Path

from meshwright.errors import ConfigError

logger = logging.getLogger("meshwright")

FORMAT = logging.Formatter("%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")


def log_to_console() -> None:
    """Send the log of this rank to stdout; the launcher shows those of LOG_RANK.

    A record with `is_said` (`extra`) is not shown: another process has shown it.
    """
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(FORMAT)
    handler.addFilter(lambda record: not getattr(record, "is_said", False))
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def log_to_file(folder: Path, rank: int) -> None:
    """Also append the log of this rank to `folder`/rank_N.log; on SIGUSR2, its threads' stacks."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # what no check of permissions foresees: a quota, /proc, ...
        message = f"job.dump_folder: {folder} cannot be made: {error.strerror}"
        raise ConfigError("job.dump_folder", message) from None
    handler = RankFile(folder / f"rank_{rank}.log")
    handler.setFormatter(FORMAT)
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
