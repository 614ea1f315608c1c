"""`meshwright replay`: take a step of a run again."""

import dataclasses
import json
import math
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from meshwright.checkpoint import listing
from meshwright.config.command_line import Parser
from meshwright.system.errors import ConfigError, check, numbered
from meshwright.system.machine import count_gpus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshwright.commands.replay.recorded import RecordedRun
    from meshwright.commands.replay.replay import Replayed, Request

RESULT_WITHIN_S = 3600
"""Seconds of the longest collective: a rank may load, or compile, for so long."""

Work = TypeVar("Work")
Result = TypeVar("Result")


def add_options(parser: Parser) -> None:
    """Options of `meshwright replay`."""
    parser.add_argument("--step", type=int, metavar="N", help="the step to take again")
    parser.add_argument(
        "--scan",
        action="store_true",
        help="instead, the loss of every document, by the checkpoint before step N, or the newest",
    )
    parser.add_argument(
        "--ngpu", type=int, default=1, metavar="R", help="ranks to replay on (default: 1)"
    )
    parser.add_argument(
        "--samples", type=int, default=8, metavar="K", help="rows of each table (default: 8)"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def run(given: Namespace) -> None:
    """Replay a step, or scan the documents; exit with 1 if a step isn't as recorded.

    Raises:
        ConfigError: if the run doesn't tell enough, or can't be replayed here.
    """
    fix = "name a dump folder, as in: meshwright replay outputs/my_job --step 53"
    if not given.config:
        raise ConfigError("", f"RUN: not given\n  fix: {fix}")
    # not at the top: pydantic takes 0.1 s, which --help needs not wait for
    from meshwright.commands.replay.recorded import read_recorded

    recorded = read_recorded(Path(given.config))
    last = max(recorded.steps, default=0)
    check(given.step is not None or given.scan, "--step", given.step, "not given", "name a step")
    step = last + 1 if given.step is None else given.step
    rule = f"the run has taken {numbered(last, 'step')}"
    check(1 <= step <= last + given.scan, "--step", step, rule, f"name one from 1 to {last}")
    for name in ("ngpu", "samples"):
        check(getattr(given, name) > 0, f"--{name}", getattr(given, name), "must be positive")
    gpus = count_gpus()
    rule = f"there are {gpus} GPUs"
    check(not gpus or given.ngpu <= gpus, "--ngpu", given.ngpu, rule, "lower it")
    with _request(recorded, step, given) as request:
        _say_first(recorded, step, request, is_scan=given.scan)
        # not at the top: torch takes a second
        from meshwright.commands.replay import printed, replay

        if given.scan:
            scan = on_ranks(replay.scan, request, given.ngpu, bool(gpus))
            _print(given, dataclasses.asdict(scan), lambda: printed.lines_of_scan(scan))
            return
        replayed = on_ranks(replay.replay_steps, request, given.ngpu, bool(gpus))
    lines = lambda: printed.lines_of_replay(replayed, recorded.groups, given.config)  # noqa: E731
    _print(given, _as_json(replayed, recorded.groups), lines)
    if replayed.beyond_horizon or replayed.not_as_recorded:
        sys.exit(1)


@contextmanager
def _request(recorded: "RecordedRun", step: int, given: Namespace) -> "Iterator[Request]":
    """Give what the ranks are to do; meanwhile nothing deletes the checkpoint that they read."""
    # not at the top: torch takes a second
    from meshwright.commands.replay.recorded import held
    from meshwright.commands.replay.replay import Request

    checkpoint = recorded.checkpoint_before(step)
    start = recorded.start_of(step)
    path = listing.step_folder(recorded.checkpoint_folder(start), checkpoint)
    with (
        held(path) if checkpoint else nullcontext(),
        TemporaryDirectory(prefix="meshwright-replay-") as folder,
    ):
        config = recorded.config(step, checkpoint, given.ngpu, given, Path(folder))
        threads = start.get("kernels", {}).get("threads", 0)
        yield Request(config, given.ngpu, step, recorded.steps, threads, given.samples)


def _say_first(recorded: "RecordedRun", step: int, request: "Request", *, is_scan: bool) -> None:
    """Print what follows: imports and steps take a while. stdout is for the results only."""
    start, checkpoint = recorded.start_of(step), recorded.checkpoint_before(step)
    what = f"scan of the documents of {recorded.folder}"
    if not is_scan:
        mesh = f"{numbered(start['ranks'], 'rank')}, {start['mesh']}"
        what = f"replay of step {step} of {recorded.folder} ({mesh})"
    begin = f"checkpoint step-{checkpoint}" if checkpoint else "the initial weights"
    where = f"  on {numbered(request.ranks, 'process', 'es')}, from {begin}"
    print(f"{what}\n{where}", file=sys.stderr, flush=True)


def on_ranks(work: Callable[[Work], Result], request: Work, ranks: int, has_gpus: bool) -> Result:
    """Return the first rank's result of `work(request)`, a module's own function, on all ranks."""
    # not at the top: as above
    import torch
    import torch.distributed as dist

    from meshwright.commands.prove.ranks import RankPool

    if ranks == 1:
        try:
            return work(request)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    backend = "nccl" if has_gpus and torch.cuda.is_available() else "gloo"
    pool = RankPool(ranks, RESULT_WITHIN_S, [work.__module__], backend)
    try:
        return pool.run(work, request)[0]
    finally:
        pool.close()


def _print(given: Namespace, result: dict[str, Any], lines: "Callable[[], Iterator[str]]") -> None:
    if given.json:
        print(json.dumps(as_json_value(result), indent=1))
        return
    for line in lines():
        print(line)


def as_json_value(value: Any) -> Any:
    """Return a result with null where a number isn't finite: JSON has no word for it."""
    if isinstance(value, dict):
        return {key: as_json_value(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_json_value(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _as_json(replayed: "Replayed", groups: list[str]) -> dict[str, Any]:
    other, beyond = replayed.not_as_recorded, replayed.beyond_horizon
    return dataclasses.asdict(replayed) | {
        "groups": groups,
        "bounds": replayed.bounds,
        "first_other_step": other and other.taken["step"],
        "beyond_horizon_from_step": beyond and beyond.taken["step"],
    }
