"""`meshwright plan`: memory, traffic and step time of a job, on this machine, without a GPU."""

import contextlib
import sys
from argparse import Namespace

from meshwright.commands.options import add_stage, check_named, of_stage, output_file
from meshwright.commands.plan.devices import DEVICES, Device, find_device
from meshwright.config.command_line import Parser
from meshwright.config.loader import read
from meshwright.system.errors import check, numbered
from meshwright.system.log import console_width, wrap
from meshwright.system.machine import count_cores, hide_gpus


def add_options(parser: Parser) -> None:
    """Options of `meshwright plan`."""
    parser.add_argument(
        "--world-size", type=int, metavar="N", required=True, help="ranks of the job"
    )
    parser.add_argument(
        "--device",
        metavar="D",
        required=True,
        help=f"{', '.join(DEVICES)}, cpu, or the GiB of a different GPU",
    )
    parser.add_argument(
        "--rank",
        type=int,
        metavar="R",
        help="rank to simulate (default: those with the highest peak)",
    )
    parser.add_argument(
        "--all-stages", action="store_true", help="simulate one rank of every pipeline stage"
    )
    add_stage(parser)
    parser.add_argument(
        "--imbalance",
        type=float,
        metavar="F",
        default=1.0,
        help="tokens of the busiest expert-parallel rank, relative to the mean (default: 1)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--html", type=output_file, metavar="FILE", help="also write the plan as a page"
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="find the fastest mesh, recomputation and batch that fit",
    )
    parser.add_argument(
        "--no-remedies", action="store_true", help="don't look for changes that make it fit"
    )
    parser.add_argument(
        "--workers", type=int, default=0, metavar="N", help="processes (default: one per core)"
    )


def run(given: Namespace) -> None:
    """Plan the job that `given` names, and print the plan.

    Raises:
        ConfigError: if the job can't run.
    """
    with contextlib.redirect_stdout(sys.stderr):  # libraries' output is no part of the plan
        device = _check(given)
        what = "searching a mesh" if given.search else "planning"
        ranks = numbered(given.world_size, "rank")
        print(f"{what} for {given.config} on {ranks} ...", flush=True)  # the rest takes seconds
        config = of_stage(read(given).config(), given.stage)
        hide_gpus()
        # not at the top: they need torch, which `--help` and the checks so far don't
        from meshwright.commands.plan import report, search

        text = (search.search if given.search else report.plan)(config, given, device)
    width, lines = console_width(sys.stdout), text.split("\n")
    rows = [line if "  " in line.strip() else wrap(line, width, "  ") for line in lines]
    print(text if given.json else "\n".join(rows))  # rows of tables stay whole


def _check(given: Namespace) -> Device:
    """Check the options, and fill in the number of workers; return the device."""
    check_named(given.config)
    ranks, rank = given.world_size, given.rank
    rule = "is the rows of the busiest rank over their mean, so at least 1"
    check(given.imbalance >= 1, "--imbalance", given.imbalance, rule, "--imbalance 1.5, say")
    check(ranks > 0, "--world-size", ranks, "must be positive", "8, say")
    rule = f"must be below {ranks}, the number of ranks, and not negative"
    check(rank is None or 0 <= rank < ranks, "--rank", rank, rule, "--rank 0")
    for option in ("rank", "all_stages", "html", "no_remedies"):
        value = getattr(given, option)
        key, fix = f"--{option.replace('_', '-')}", "leave out one of the two"
        is_given = value is not None and value is not False
        check(not (given.search and is_given), key, value, "has no effect on a --search", fix)
    device = find_device(given.device, ranks)
    rule, fix = "has no known rates to rank by", f"name one of {', '.join(DEVICES)}"
    check(device.flops_per_s > 0 or not given.search, "--device", given.device, rule, fix)
    given.workers = given.workers if given.workers > 0 else count_cores()
    return device
