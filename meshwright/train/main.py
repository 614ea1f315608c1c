"""One rank's process: run the job of the command line, and leave with its exit code."""

import contextlib
import os
import shlex
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from meshwright.config.loader import parse_config, read, with_lines
from meshwright.system import errors, hardware, slurm
from meshwright.system.log import logger, print_error
from meshwright.system.machine import allow_files, check_machines, given_rank
from meshwright.system.processes import Launch, Requests, before_training, die_with_parent
from meshwright.train.facts import look
from meshwright.train.job import run
from meshwright.train.resolve import ResolvedJob, resolve


def main(launch: Launch, requests: Requests) -> None:
    """Run the job that the command line describes; leave with its exit code."""
    if dist.is_torchelastic_launched():  # torchrun gives every rank its own session, so
        # nothing else would end it; without torchrun it may outlive its shell
        die_with_parent(launch.pid or os.getppid())
    # a machine's first rank mostly says the same, and this one is then ended; the first ranks of
    # other nodes don't wait: their launchers would be left by the first one's, and exit with 1
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    code, waits_s = 0, 0 if is_first else FIRST_RANK_PRINTS_WITHIN_S
    try:
        requests.when_asked = "raise"
        requests.check()
        try:
            given_rank()
            is_done = _run_command_line(launch, requests)
        finally:
            requests.when_asked = "hold"  # torchrun ends the other ranks of a job that has failed
        if not is_done:
            code = errors.EXIT_STOPPED
    except errors.StopRequested:
        code = _stopped_before_training(launch, requests)
    except errors.ConfigError as error:
        time.sleep(waits_s)
        print_error(error)
        code = errors.EXIT_CONFIG
    except (errors.TrainingError, errors.DataError, errors.SaveError) as error:
        logger.error("stopped: %s", error)
        code = errors.EXIT_CODES[type(error)]
    except Exception as error:
        # ranks that were asked a moment before this one are gone, and so are compilers
        if requests.look() and not requests.has_trained:
            logger.error("failed after the request", exc_info=error, extra={"is_printed": True})
            code = _stopped_before_training(launch, requests)
        else:
            _log_failure(error)
            code = 1
    with contextlib.suppress(OSError):  # a full disk, where they go to files
        sys.stdout.flush()
        sys.stderr.flush()
    if code in errors.EXIT_CODES.values() and code != errors.EXIT_CONFIG:
        time.sleep(waits_s)
    # gloo's threads abort some ranks during interpreter teardown, after all is done or reported
    os._exit(code)


def _stopped_before_training(launch: Launch, requests: Requests) -> int:
    """Return the exit code; say so if there is no launcher of ours that does."""
    if not requests.is_of_failure:
        words = before_training(requests.look())
        logger.info("%s", words, extra={"is_printed": launch.pid > 0})
    return requests.exit_code


def _log_failure(error: Exception) -> None:
    """Log the traceback; of a rank that another has left, only to the file."""
    if errors.LOST_PEER.search(str(error)):
        logger.error("failed: the connection to another rank is lost")
        logger.error("failed", exc_info=error, extra={"is_printed": True})
    else:
        logger.exception("failed")


COMPILERS = ("torch._dynamo", "torch._inductor", "triton")
"""Modules of the errors that compilation raises; private, for a hint only."""

FIRST_RANK_PRINTS_WITHIN_S = 5
"""Seconds other ranks of a machine wait before exiting, so that its first can report an error."""


def _to_plan() -> str:
    """Return the command that plans this job for a device like this rank's."""
    gib = hardware.memory_gib(torch.device("cuda")) if torch.cuda.is_available() else 0
    device = f"{gib:.1f}" if gib else "cpu"
    ranks = os.environ.get("WORLD_SIZE", "1")
    words = ["meshwright", "plan", *sys.argv[1:], "--world-size", ranks, "--device", device]
    return shlex.join(words)


@record  # an exception reaches the launcher, which shows the first failing rank's
def _run_command_line(launch: Launch, requests: Requests) -> bool:
    given = parse_config(sys.argv[1:])
    written = read(given)
    config = written.config()
    if not launch.is_checked and os.environ.get("RANK", "0") == "0":
        slurm.warn_of_usr1(os.environ)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    allow_files(world_size)
    resolved: ResolvedJob | None = None
    try:
        facts = look(
            config,
            world_size,
            expects_gpus=torch.cuda.is_available(),
            device_type="cuda" if torch.cuda.is_available() else "cpu",
            is_inherited=written.provenance.is_inherited,
        )
        resolved = resolve(config, facts)
        return run(resolved, requests=requests, launch=launch)
    except errors.ConfigError as error:
        if resolved is None and launch.is_checked:
            check_machines()
        raise with_lines(error, given) from None
    except torch.OutOfMemoryError as error:
        error.add_note(f"to see where memory goes, and which changes would fit:\n  {_to_plan()}")
        raise
    except Exception as error:
        is_of_compiler = type(error).__module__.startswith(COMPILERS)
        reason = resolved.reasons["compile.enable"] if resolved is not None else ""
        if is_of_compiler and reason:
            error.add_note(f"{reason}\n  fix: compile.enable = false")
        raise
