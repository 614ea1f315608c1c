"""The cases of `meshwright prove --every-mesh` in a drawn order, of which a part can be run.

    python -m tests.campaigns.every_mesh gpt_oss qwen3_next --cases 20 --seed 1
    python -m tests.campaigns.every_mesh gpt_oss qwen3_next --cases 20 --seed 1 --skip 20

The second command runs the next 20 of each. A name is that of a preset without `debug_`; keys of
the config may follow. Prints a line for each case, and exits with 1 if one differs from one
process.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence

from meshwright.commands.prove import report
from meshwright.commands.prove.cases import Case, default_cases, distinct, every_mesh
from meshwright.commands.prove.prove import Row, prove
from meshwright.commands.prove.shrink import shrink
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.train.resolve_model import resolve_model


def draw(name: str, words: Sequence[str], seed: int) -> tuple[JobConfig, list[Case]]:
    """Return the small job of a debug preset and all cases of its proof, in the seed's order."""
    config = load_config([f"--job.config_file=train_configs/debug_{name}.toml", *words])
    _, args = resolve_model(config)
    small = shrink(config, args)
    cases = distinct([*default_cases(config, small, args), *every_mesh(small, args)])
    random.Random(seed).shuffle(cases)
    return small, cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+")
    parser.add_argument("--cases", type=int, default=20, help="of each")
    parser.add_argument("--skip", type=int, default=0, help="the first so many")
    parser.add_argument("--seed", type=int, default=0)
    options, words = parser.parse_known_args()
    has_failed = False
    for name in options.names:
        small, cases = draw(name, words, options.seed)
        part = cases[options.skip : options.skip + options.cases]
        start, rows = time.perf_counter(), list[Row]()
        print(f"{name}, seed {options.seed}: {len(part)} of {len(cases)} cases", flush=True)
        for row in prove(small, part):
            rows.append(row)
            minutes = (time.perf_counter() - start) / 60
            print(report.line(f"{minutes:5.1f}", report.cells(row)), flush=True)
            for line in [*row.verdict.failures, *row.verdict.details.splitlines()]:
                print(f"      {line}", flush=True)
            has_failed |= bool(row.verdict.failures)
        print(f"{name}: {report.summary(rows, len(part))}", flush=True)
    sys.exit(1 if has_failed else 0)


if __name__ == "__main__":
    main()
