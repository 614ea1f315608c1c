"""One rank's process: run the job of the command line, and leave with its exit code."""

import contextlib
import os
import shlex
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from meshwright import hardware
from meshwright.config.conditions import is_compiled
from meshwright.config.loader import config_errors, load_config
from meshwright.errors import (
    EXIT_CODES,
    EXIT_CONFIG,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    ConfigError,
    DataError,
    SaveError,
    TrainingError,
)
from meshwright.launch.heartbeat import heartbeat_of_this_rank
from meshwright.launch.process import CHECKED, LAUNCHER, die_with_parent
from meshwright.log import log_to_console, logger, print_error
from meshwright.metrics.planned import planned_ledger
from meshwright.preflight import preflight
from meshwright.train import run


def main() -> None:
    """Run the job that the command line describes; leave with its exit code."""
    if dist.is_torchelastic_launched():  # torchrun gives every rank a session of its own, so
        # nothing else would end it; without torchrun it may outlive its shell
        die_with_parent(int(os.environ.get(LAUNCHER, os.getppid())))
    log_to_console()
    code = 0
    try:
        if not _run_command_line():
            code = EXIT_STOPPED
    except ConfigError as error:
        print_error(error)
        code = EXIT_CONFIG
    except (TrainingError, DataError, SaveError) as error:
        logger.error("stopped: %s", error)
        code = EXIT_CODES[type(error)]
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except Exception:
        logger.exception("failed")
        code = 1
    with contextlib.suppress(OSError):  # a full disk, where they go to files
        sys.stdout.flush()
        sys.stderr.flush()
    if code in EXIT_CODES.values() and int(os.environ.get("RANK", "0")) > 0:
        time.sleep(FIRST_RANK_PRINTS_WITHIN_S)
    # gloo's threads abort some ranks during interpreter teardown, after all is done or reported
    os._exit(code)


COMPILERS = ("torch._dynamo", "torch._inductor", "triton")
"""Modules of the errors that compilation raises; private, for a hint alone."""
FIRST_RANK_PRINTS_WITHIN_S = 5
"""Seconds ranks > 0 wait before exiting, so that rank 0 can report a shared error first."""


def _to_plan() -> str:
    """Return the command that plans this job for a device like this rank's."""
    gib = hardware.memory_gib(torch.device("cuda")) if torch.cuda.is_available() else 0
    device = f"{gib:.1f}" if gib else "cpu"
    ranks = os.environ.get("WORLD_SIZE", "1")
    words = ["meshwright", "plan", *sys.argv[1:], "--world-size", ranks, "--device", device]
    return shlex.join(words)


@record  # an exception reaches the launcher, which shows the first failing rank's
def _run_command_line() -> bool:
    config, provenance = load_config(sys.argv[1:])
    if CHECKED not in os.environ and os.environ.get("RANK", "0") == "0":
        for note in provenance.notes:
            logger.info("%s", note)
    with config_errors(provenance):
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        plan = preflight(config, world_size, looks_at_files=False)
        try:
            return run(plan, heart=heartbeat_of_this_rank())
        except torch.OutOfMemoryError as error:
            lines = planned_ledger(config, world_size)
            lines += ["to see what needs the memory, and what would fit:", f"  {_to_plan()}"]
            error.add_note("\n".join(lines))
            raise
        except Exception as error:
            is_of_compiler = type(error).__module__.startswith(COMPILERS)
            if is_of_compiler and plan.compile_line and is_compiled(plan.config.compile):
                error.add_note(f"{plan.compile_line}\n  fix: compile.enable = false")
            raise
