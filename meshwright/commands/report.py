"""`meshwright report`: a run as one HTML file."""

from argparse import Namespace

from meshwright.metrics.report.page import page
from meshwright.metrics.report.run import read_run


def run(given: Namespace) -> None:
    """Write the report of a dump folder.

    Raises:
        ConfigError: if the folder holds no run.
    """
    read = read_run(given.run_dir)
    output = given.output or given.run_dir / "report.html"
    output.write_text(page(read), "utf-8")
    print(output)
