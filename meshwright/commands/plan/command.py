"""`meshwright plan`: memory, traffic and step time of a job, on this machine, without a GPU."""

import contextlib
import os
import subprocess
import sys
from argparse import Namespace

from meshwright.commands.options import input_path, output_file
from meshwright.commands.plan.devices import DEVICES, find_device
from meshwright.commands.train import host_settings
from meshwright.config.command_line import Parser
from meshwright.config.loader import load_given
from meshwright.system.errors import ConfigError, check
from meshwright.system.machine import Ranks, count_cores, count_gpus


def add_options(parser: Parser) -> None:
    """Options of `meshwright plan`."""
    parser.add_argument("--world-size", type=int, metavar="N", default=0, help="ranks of the job")
    parser.add_argument(
        "--device",
        metavar="D",
        default="",
        help="h100, h200, a100, b200, mi300x, cpu, or GiB of another GPU",
    )
    parser.add_argument(
        "--rank", type=int, metavar="R", help="a rank to simulate (default: those that need most)"
    )
    parser.add_argument("--all-stages", action="store_true", help="one rank of every stage")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--html", type=output_file, metavar="FILE", help="write a page, too")
    parser.add_argument("--search", action="store_true", help="find the best mesh and modes")
    parser.add_argument(
        "--calibrate",
        type=output_file,
        metavar="FILE",
        help="measure this machine with N ranks, and write its rates to FILE; takes minutes",
    )
    parser.add_argument(
        "--rates", type=input_path, metavar="FILE", help="take times from a file of --calibrate"
    )
    parser.add_argument(
        "--no-remedies", action="store_true", help="try no switches if it does not fit"
    )
    parser.add_argument(
        "--workers", type=int, default=0, metavar="N", help="processes (default: one per core)"
    )


def run(given: Namespace) -> None:
    """Plan the job that `given` names, and print the plan; or measure this machine.

    Raises:
        ConfigError: if the job cannot run.
    """
    if given.calibrate is not None:
        _calibrate(given)
        return
    with contextlib.redirect_stdout(sys.stderr):  # libraries' output is no part of the plan
        text = _answer(given)
    print(text)


def _calibrate(given: Namespace) -> None:
    """Measure this machine with as many ranks as a job would have here, and their settings."""
    options = ["device", "rates", "search", "rank", "all_stages", "json", "html"]
    options += ["no_remedies", "workers"]
    idle = {"CONFIG": given.config}
    idle |= {f"--{option.replace('_', '-')}": getattr(given, option) for option in options}
    idle |= {f"--{'.'.join(key)}": value for key, value in given.overrides.items()}
    for key, value in idle.items():
        check(not value, key, value, "has no effect on --calibrate", "leave out one of the two")
    path = given.calibrate.absolute()
    gpus = count_gpus()
    count = given.world_size or gpus or 1
    check(count > 0, "--world-size", count, "must be positive", "the ranks of a job here")
    fix = f"--world-size {gpus}, or hide them with CUDA_VISIBLE_DEVICES= to measure the CPU"
    check(gpus == 0 or count <= gpus, "--world-size", count, f"there are {gpus} GPUs", fix)
    ranks = Ranks(per_machine=count, machines=1, gpus=gpus)
    words = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    words += ["-m", "meshwright.commands.plan.calibration", str(path)]
    environment = {**os.environ, **host_settings(ranks, os.environ)}
    done = subprocess.run([sys.executable, "-m", *words], env=environment, check=False)
    if done.returncode != 0:
        raise SystemExit(done.returncode)
    print(f"wrote {given.calibrate}")


def _answer(given: Namespace) -> str:
    device = given.device
    needed = {
        "--device": (device, "--device h100, or cpu, or the GiB of another GPU"),
        "CONFIG": (given.config, "name a TOML, or a preset"),
        "--world-size": (given.world_size, "--world-size 8, or the ranks of your job"),
    }
    for key, (value, fix) in needed.items():
        if not value:
            raise ConfigError("", f"{key}: not given\n  fix: {fix}")
    check(given.world_size > 0, "--world-size", given.world_size, "must be positive", "8, say")
    check(given.rank is None or given.rank >= 0, "--rank", given.rank, "must not be negative")
    for option in ("rank", "all_stages", "html", "no_remedies"):
        value = getattr(given, option)
        key, fix = f"--{option.replace('_', '-')}", "leave out one of the two"
        is_given = value is not None and value is not False
        check(not (given.search and is_given), key, value, "has no effect on a --search", fix)
    has_rates = given.rates is not None or find_device(device, given.world_size).flops_per_s > 0
    fix = f"name one of {', '.join(DEVICES)}, or a file with --rates"
    check(has_rates or not given.search, "--device", device, "has no known rates to rank by", fix)
    workers = given.workers if given.workers > 0 else count_cores()
    what = "searching a mesh" if given.search else "planning"
    ranks = f"{given.world_size} rank{'s' * (given.world_size > 1)}"
    print(f"{what} for {given.config} on {ranks} ...", flush=True)  # the rest takes seconds
    config = load_given(given)
    # not at the top: it needs torch, which `--help` and the checks so far do not
    from meshwright.commands.plan import plan as command

    if given.search:
        return command.search(
            config, given.world_size, device, given.rates, workers, as_json=given.json
        )
    return command.plan(
        config,
        given.world_size,
        device,
        given.rates,
        rank=given.rank,
        all_stages=given.all_stages,
        as_json=given.json,
        html=given.html,
        tries_remedies=not given.no_remedies,
        workers=workers,
    )
