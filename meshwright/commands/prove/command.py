"""`meshwright prove`: show that a config trains the same model on every mesh."""

import functools
import os
import sys
from argparse import Namespace
from pathlib import Path

from meshwright.commands.options import add_stage, check_named, of_stage, output_folder
from meshwright.commands.prove.cases import (
    Case,
    default_cases,
    distinct,
    every_mesh,
    quick_cases,
)
from meshwright.commands.prove.on_gpus import check_gpus, gpu_cases, within
from meshwright.commands.prove.shrink import MAX_RANKS, ON_CPUS, ON_GPUS, shrink
from meshwright.config.command_line import Parser
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import read
from meshwright.config.rules import Facts, check_rules
from meshwright.models.args import DecoderArgs
from meshwright.parallelisms.rules.compile_choice import why_no_compiler
from meshwright.system.errors import check, config_error, numbered
from meshwright.system.machine import hide_gpus
from meshwright.train.facts import check_extensions, missing_packages
from meshwright.train.resolve_model import check_own_model, resolve_model
from meshwright.train.rules import WITHOUT_DATA


def add_options(parser: Parser) -> None:
    """Options of `meshwright prove`."""
    every = "try every schedule, and every mesh of 2, 4 and 8 ranks"
    parser.add_argument("--every-mesh", action="store_true", help=every)
    gpu = "run on the GPUs of this machine, over NCCL, instead of CPU processes"
    parser.add_argument("--gpu", action="store_true", help=gpu)
    quick = "run three cases: the config's own mesh, and two others that compile nothing"
    parser.add_argument("--quick", action="store_true", help=quick)
    coordinates = "check muP: train small models of several widths for a few steps, and no mesh"
    parser.add_argument("--coordinates", action="store_true", help=coordinates)
    add_stage(parser)
    parser.add_argument(
        "--output",
        type=output_folder,
        metavar="FOLDER",
        help="folder for the tables (default: {dump_folder}/proof)",
    )


EXCLUSIVE = (("--quick", "--every-mesh", "--coordinates"), ("--gpu", "--coordinates"))
"""Options of which one may be given."""


def run(options: Namespace) -> None:
    """Run the proof; exit with 1 if a case differs from one process.

    Raises:
        ConfigError: if the config couldn't run on any number of ranks, or the output can't be
            written.
    """
    check_named(options.config)
    _check_exclusive(options)
    gpus = check_gpus() if options.gpu else 0
    print(f"proving {options.config} ...", flush=True)
    if gpus:
        # torch would otherwise start the driver to count GPUs, and then can't fork
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    else:
        hide_gpus()
    # not at the top: torch takes a second
    from meshwright.commands.prove import report
    from meshwright.commands.prove.properties import check_properties
    from meshwright.commands.prove.prove import Row, prove
    from meshwright.commands.prove.reference import check_reference
    from meshwright.system.hardware import count_usable_gpus

    gpus = gpus and min(gpus, count_usable_gpus(gpus))
    config = of_stage(read(options).config(), options.stage)
    family, args = resolve_model(config)
    check_extensions(config)
    check_own_model(config, family, args)
    # a proof reports to nobody, so only one of them matters
    missing = missing_packages() & {"torchao"}
    check_rules(config, Facts(model=args, missing_packages=missing), WITHOUT_DATA)
    if options.coordinates:
        _prove_coordinates(config, args)
        return
    if config.training.mask_documents:  # then every case compiles, the reference included
        reason = why_no_compiler(gpus > 0)
        rule = f"its attention is compiled, and {reason}"
        check(not reason, "training.mask_documents", True, rule, "install a C++ compiler")
    small = shrink(config, args, ON_GPUS if gpus else ON_CPUS)
    cases, num_left_out = _choose_cases(options, config, small, args, gpus)
    folder = options.output or Path(config.job.dump_folder) / "proof"

    rows, count = list[Row](), len(cases)
    write = functools.partial(report.write, folder, small, gpus=gpus)
    write(rows, count)  # a folder that can't be written to is found now
    print(report.explanation(small, report.ON_CONSOLE))
    print(f"{folder}/proof.md has more columns.\n")
    backend = "nccl" if gpus else "gloo"
    checked = check_reference(config, small, backend)
    print(f"reference against plain PyTorch: {checked.row}")
    for line in checked.failures:
        print(f"    {line}")
    properties = check_properties(small, backend)
    print("\n" + report.property_line([*report.PROPERTY_COLUMNS]))
    for one in properties:
        print(report.property_line(report.property_cells(one)))
        for line in one.failures:
            print(f"    {line}")
    print(flush=True)
    width = len(str(count))
    print(report.line(" " * (2 * width + 1), report.COLUMNS))
    for row in prove(small, cases, gpus):
        rows.append(row)
        print(report.line(f"{len(rows):>{width}}/{count}", report.cells(row)), flush=True)
        not_run = [f"not run: {row.verdict.not_run}"] if row.verdict.not_run else []
        for line in (*row.verdict.failures, *not_run):
            print(f"    {line}")
        # later cases take minutes, and may be interrupted
        write(rows, count, checked, properties)
    caveats = ["differs from plain PyTorch"] if checked.failures else []
    if broken := [one.name for one in properties if one.failures]:
        caveats.append(f"fails {', '.join(broken)}")
    which = f", which {' and '.join(caveats)}" if caveats else ""
    where = f", on {numbered(gpus, 'GPU')}" if gpus else ""
    print(f"\n{report.summary(rows, count)}{which}{where}; see {folder}/proof.md")
    if num_left_out:
        print(f"without --quick, {numbered(num_left_out, 'more case')} would run")
    if caveats or any(row.verdict.failures for row in rows):
        sys.exit(1)


def _check_exclusive(options: Namespace) -> None:
    for names in EXCLUSIVE:
        chosen = [name for name in names if getattr(options, name[2:].replace("-", "_"))]
        if len(chosen) > 1:
            rule = f"is given together with {chosen[1]}"
            raise config_error(chosen[0], True, rule, "leave out one of the two")


def _choose_cases(
    options: Namespace, config: JobConfig, small: JobConfig, args: DecoderArgs, gpus: int
) -> tuple[list[Case], int]:
    """Return the cases that run, or that this machine's GPUs are too few for; and how many more
    would run without --quick."""
    found = default_cases(config, small, args)
    cases = found
    if gpus:
        # torch takes a second
        import torch

        allows_tf32 = torch.get_float32_matmul_precision() != "highest"
        cases = gpu_cases(config, small, found, gpus, allows_tf32=allows_tf32)
    if options.every_mesh:
        found = [*found, *every_mesh(small, args)]
        cases = distinct([*cases, *within(found, gpus or MAX_RANKS)])
    if options.quick:
        few = quick_cases(cases)
        return few, len(cases) - len(few)
    return distinct([*cases, *found]) if gpus else cases, 0


def _prove_coordinates(config: JobConfig, args: DecoderArgs) -> None:
    """Print what each width has, and exit with 1 if it depends on the width."""
    # torch takes a second
    from meshwright.commands.prove.coordinates import BOUND, WIDTHS, check_coordinates

    coordinates = check_coordinates(config, args)
    widths = ", ".join(map(str, WIDTHS))
    print(f"RMS of layers, and decrease of the loss, at widths {widths}\n")
    failures = list[str]()
    for one in coordinates:
        values = "".join(f"{value:>10.3g}" for value in one.values)
        print(f"{one.name:<36}{values}{one.spread:>8.2f}", flush=True)
        failures += filter(None, [one.failure])
    print()
    for line in failures:
        print(line)
    if failures:
        sys.exit(1)
    print(f"largest over smallest is at most {BOUND} for each: muP holds at these widths")
