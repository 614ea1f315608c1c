"""`meshwright report`: a run as one HTML file."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from meshwright.report.page import page
from meshwright.report.run import read_run


def main(arguments: Sequence[str]) -> None:
    """Write the report of a dump folder.

    Raises:
        ConfigError: if the folder holds no run.
    """
    parser = argparse.ArgumentParser("meshwright report", allow_abbrev=False)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a job.dump_folder")
    parser.add_argument("--output", type=Path, help="HTML file (default: RUN_DIR/report.html)")
    options = parser.parse_args(arguments)
    run = read_run(options.run_dir)
    output = options.output or options.run_dir / "report.html"
    output.write_text(page(run), "utf-8")
    print(output)
