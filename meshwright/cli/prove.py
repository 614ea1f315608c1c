"""`meshwright prove`: show that a config trains the same model on every mesh."""

import sys
import textwrap
from argparse import Namespace
from pathlib import Path

from meshwright.config.checks import check_divisible
from meshwright.config.contradictions import check_contradictions
from meshwright.config.loader import config_errors, load_given
from meshwright.parallelisms.pipeline_split import assign_modules, check_split_float8
from meshwright.preflight import check_installed
from meshwright.proof import report
from meshwright.proof.cases import default_cases, distinct, every_mesh
from meshwright.proof.prove import Row, prove
from meshwright.proof.shrink import shrink
from meshwright.resolve_model import resolve_model


def run(given: Namespace) -> None:
    """Run the proof; exit with 1 unless every case equals one process.

    Raises:
        ConfigError: if the config could not run on any number of ranks.
    """
    config, provenance = load_given(given)
    with config_errors(provenance):
        check_contradictions(config)
        check_installed("float8.enable", config.float8.enable, "torchao")
        check_split_float8(config)
        _, args = resolve_model(config)
        check_divisible(config, args.table)
        assign_modules(config.parallelism, args.n_layers, layer=1, embedding=1, output=1)
    small = shrink(config, args)
    cases = default_cases(config, small, args)
    if given.every_mesh:
        cases = distinct([*cases, *every_mesh(small, args)])
    folder = given.output or Path(config.job.dump_folder) / "proof"

    print(textwrap.fill(report.EXPLANATION, 100))
    print("Shown here are the main columns; the page has all of them.\n")
    print(report.line(report.COLUMNS))
    rows: list[Row] = []
    for row in prove(small, cases):
        rows.append(row)
        print(report.line(report.cells(row)), flush=True)
        for failure in row.verdict.failures:
            print(f"    {failure}")
    report.write(folder, small, rows)
    failed = sum(bool(row.verdict.failures) for row in rows)
    print(f"\n{len(rows) - failed} of {len(rows)} cases equal one process; see {folder}/proof.html")
    if failed:
        sys.exit(1)
