"""`meshwright report`: a run as one HTML file."""

from argparse import Namespace

from meshwright.commands.options import input_path, output_file
from meshwright.config.command_line import Parser
from meshwright.metrics.report.page import page
from meshwright.metrics.report.run import read_run


def add_options(parser: Parser) -> None:
    """Options of `meshwright report`."""
    parser.add_argument("run_dir", type=input_path, metavar="RUN_DIR", help="a job.dump_folder")
    parser.add_argument(
        "--output",
        type=output_file,
        metavar="FILE",
        help="HTML file (default: RUN_DIR/report.html)",
    )


def run(given: Namespace) -> None:
    """Write the report of a dump folder.

    Raises:
        ConfigError: if the folder holds no run.
    """
    read = read_run(given.run_dir)
    output = given.output or given.run_dir / "report.html"
    output.write_text(page(read), "utf-8")
    print(output)
