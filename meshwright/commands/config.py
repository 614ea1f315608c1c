"""`meshwright config`: the values of a config and their origin, and the meaning of every key."""

import json
import re
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from textwrap import fill
from typing import Any

from meshwright.config.changes import differences
from meshwright.config.command_line import Parser
from meshwright.config.explain import suggest_key
from meshwright.config.fields import Key, entries, find_field, json_schema, summary
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import FOLDER, parse_config, preset_names, read, to_toml
from meshwright.config.provenance import HEADER, Provenance, table_below
from meshwright.models.families import MODELS
from meshwright.system.errors import config_error, did_you_mean
from meshwright.system.log import console_width, wrap
from meshwright.train.optim.registry import OPTIMIZERS


def add_options(parser: Parser) -> None:
    parser.add_argument(
        "-h",
        "--help",
        nargs="?",
        const="",
        metavar="NAME",
        help="print the documentation of a section or a key (default: of all keys)",
    )
    parser.add_argument(
        "--presets", action="store_true", help="list the presets with their purposes"
    )


def run(given: Namespace) -> None:
    """Print the config as TOML, each value with its origin; or the presets; or the help."""
    if given.presets:
        width = console_width(sys.stdout)
        for name in preset_names():
            # a preset starts with the line of its schema, and then says for what it is
            about = (FOLDER / f"{name}.toml").read_text("utf-8").splitlines()[1].removeprefix("# ")
            print(wrap(f"{name:<16} {about}", width, " " * 17))
    elif given.help is not None:
        print("\n".join(_documentation(given.help)))
    else:
        written = read(given)
        print("\n".join(_with_origins(to_toml(written.config()), written.provenance)))


def add_options_diff(parser: Parser) -> None:
    parser.add_argument("a", help="a TOML file, or a preset by name")
    parser.add_argument("b", help="a TOML file, or a preset by name")


def run_diff(given: Namespace) -> None:
    """Print the keys in which two configs differ, with the origin of each; exit with 1 if any."""
    both = [read(parse_config([name])) for name in (given.a, given.b)]
    a, b = (written.config().model_dump(exclude={"job": {"config_file"}}) for written in both)
    of_a, of_b = (written.provenance.origin for written in both)
    found = list(differences(a, b))
    if not found:
        print("equal")
        return
    width = console_width(sys.stdout)
    for each in found:  # a table of two values and two files would be wider than a console
        print(each.key)
        for name, value, origin in (("A", each.old, of_a), ("B", each.new, of_b)):
            print(wrap(f"  {name}: {value!r} ({origin(each.key)})", width, "     "))
    sys.exit(1)


def _with_origins(toml: str, provenance: Provenance) -> Iterator[str]:
    """Lines of TOML, each value with a comment that says where it was written."""
    table, counts = "", Counter[Key]()
    lists_in_one_line = re.sub(r"\n +", " ", toml).replace(",\n]", " ]")
    lines = lists_in_one_line.rstrip().split("\n")
    width = max(len(line) for line in lines if len(line) < 60)
    for line in lines:
        if header := HEADER.match(line):
            table = ".".join(table_below(header, counts))
        elif line:
            origin = provenance.origin(f"{table}.{line.partition(' = ')[0]}")
            line = f"{line:{width}}  # {origin}"
        yield line


def _documentation(section_name: str) -> Iterator[str]:
    """Usage and every key, or the keys of one section, or one key."""
    sections = list(JobConfig.model_fields)
    if section_name:
        name, _, key = section_name.removeprefix("--").partition(".")
        if name not in sections or (key and find_field((name, key)) is None):
            near = did_you_mean(name, sections)
            of_key = suggest_key([name, key] if key else [name])
            fix = of_key if of_key.startswith("did you mean") else near
            raise config_error("--help", section_name, "no such section or key", fix)
        yield from _documentation_of(name, key)
        return
    yield "usage: meshwright config [CONFIG] [--section.key VALUE ...] [--presets]"
    yield "       meshwright config --help [SECTION | SECTION.KEY]\n"
    yield "Show every value of a config, with its origin.\n"
    yield "example:\n  meshwright config my_job.toml --optimizer.lr 1e-3\n"
    yield "Every key can stand in the TOML as [section] key = value, or on the command line as"
    yield "--section.key value. A true/false key needs no value: --compile.enable means true."
    for name in sections:
        yield from _documentation_of(name)


def _documentation_of(section_name: str, key: str = "") -> Iterator[str]:
    """The keys of a section, or one of them."""
    yield f"\n{fill(summary(section_name), 100)}"
    for entry in entries(section_name):
        if key not in ("", entry.name):
            continue
        yield f"  --{section_name}.{entry.name} {entry.kind} (default: {entry.default})"
        yield fill(entry.text, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a TOML, with the names of models and optimizers."""
    names: dict[Key, Sequence[str]] = {
        ("model", "name"): tuple(MODELS),
        ("optimizer", "name"): tuple(OPTIMIZERS),
    }
    return json_schema(names, preset_names())


def run_schema(given: Namespace) -> None:
    """Print it."""
    print(json.dumps(schema(), indent=2))
