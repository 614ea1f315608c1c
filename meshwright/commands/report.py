"""`meshwright report`: a run, or several in comparison, as one HTML file."""

from argparse import Namespace

from meshwright.commands.options import input_path, output_file, write_output
from meshwright.config.command_line import Parser
from meshwright.metrics.report.page import comparison, page
from meshwright.metrics.report.run import read_run
from meshwright.system.errors import check, config_error

MOST_RUNS = 9
"""Colors of a chart."""


def add_options(parser: Parser) -> None:
    parser.add_argument(
        "run_dirs",
        type=input_path,
        metavar="RUN_DIR",
        nargs="+",
        help="a job.dump_folder; further ones are compared with the first",
    )
    parser.add_argument(
        "--output",
        type=output_file,
        metavar="FILE",
        help="HTML file (default: RUN_DIR/report.html, or compare.html for several runs)",
    )


def run(given: Namespace) -> None:
    """Write the report of a dump folder, or the comparison of several.

    Raises:
        ConfigError: if a folder holds no run, or there are more than colors.
    """
    folders = given.run_dirs
    check(len(folders) <= MOST_RUNS, "RUN_DIR", len(folders), f"at most {MOST_RUNS}", "name fewer")
    runs = [read_run(folder) for folder in folders]
    try:
        text = page(runs[0]) if len(runs) == 1 else comparison(runs)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what, fix = f"a file in it is forged or damaged: {error!r}", "restore it, or remove it"
        raise config_error("RUN_DIR", ", ".join(map(str, folders)), what, fix) from None
    output = given.output or folders[0] / ("report.html" if len(runs) == 1 else "compare.html")
    write_output(output, text, "--output")
    print(output)
