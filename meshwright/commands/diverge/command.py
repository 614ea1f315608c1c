"""`meshwright diverge`: find where two runs part, and why."""

import json
import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from meshwright.commands.options import input_path
from meshwright.config.command_line import Parser
from meshwright.system.errors import check
from meshwright.system.machine import count_gpus

EXIT_DIFFERENT = 1
EXIT_UNEXPLAINED = 8
"""The runs differ, and nothing could be named."""

WORKER = Path("meshwright/commands/diverge/worker.py")


def add_options(parser: Parser) -> None:
    """Options of `meshwright diverge`."""
    parser.add_argument("a", type=input_path, help="the dump folder of a run")
    parser.add_argument("b", type=input_path, help="the one to compare with it")
    parser.add_argument(
        "--code-b",
        type=input_path,
        metavar="PATH",
        help="the checkout of Meshwright that B ran, if it isn't this one",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def run(given: Namespace) -> None:
    """Compare two runs; exit with 1 if they differ by more than rounding and the cause is named,
    with 8 if it isn't.

    Raises:
        ConfigError: if a folder holds no run, the runs have no step in common, or the checkout
            has no such command.
    """
    # not at the top: torch takes a second
    from meshwright.commands.diverge.verdict import Comparison
    from meshwright.commands.replay.command import as_json_value
    from meshwright.commands.replay.printed import entry
    from meshwright.commands.replay.recorded import read_recorded

    code_b = None if given.code_b is None else Path(given.code_b)
    if code_b is not None:
        rule, fix = f"holds no {WORKER}", "name a checkout of this version, or a later one"
        check((code_b / WORKER).is_file(), "--code-b", str(code_b), rule, fix)
    stages = list[tuple[str, str]]()

    def say(stage: str, text: str) -> None:
        key = "" if stages and stages[-1][0] == stage else stage
        stages.append((stage, text))
        if not given.json:
            print("\n".join(entry(key, text)), flush=True)

    a, b = (read_recorded(Path(folder)) for folder in (given.a, given.b))
    comparison = Comparison(a, b, code_b, count_gpus() or 0, say)
    verdict = comparison.verdict()
    if given.json:
        result = {
            "a": given.a,
            "b": given.b,
            "facts": [fact._asdict() for fact in comparison.facts],
            "stages": [{"stage": stage, "text": text} for stage, text in stages],
            "verdict": asdict(verdict),
        }
        print(json.dumps(as_json_value(result), indent=1, default=str))
    else:
        say("verdict", verdict.text)
    if verdict.kind not in ("equal", "rounding"):
        sys.exit(EXIT_UNEXPLAINED if verdict.kind == "unexplained" else EXIT_DIFFERENT)
