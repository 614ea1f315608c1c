"""`meshwright config`: the values of a config and their origin, and the meaning of every key."""

import json
import re
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from textwrap import fill
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel
from pydantic.errors import PydanticInvalidForJsonSchema

from meshwright.config.changes import differences
from meshwright.config.command_line import Parser
from meshwright.config.explain import suggest_key
from meshwright.config.fields import SECTIONS, Key, entries, json_schema, summary
from meshwright.config.loader import FOLDER, parse_config, preset_names, read, to_toml
from meshwright.config.own_options import strict
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
        print("\n".join(_documentation(given.help, _option_models(given))))
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


def _option_models(given: Namespace) -> dict[str, type[BaseModel]]:
    """Return the models of [options.NAME] that the module of CONFIG declares, by name."""
    if not given.config:
        return {}
    from meshwright.train.resolve_model import extend_by, option_models  # help needs it rarely

    config = read(given).config()
    module = config.experimental.custom_import
    extend_by(module)
    models = {name: strict(model) for name, model in option_models(config).items()}
    for name, model in models.items():
        try:
            model.model_json_schema()
        except PydanticInvalidForJsonSchema as error:
            rule = f"OPTIONS has {name!r}, of which no TOML can give a key: {error.message}"
            fix = "give the key a type that JSON has"
            raise config_error("experimental.custom_import", module, rule, fix) from None
    return models


def _documentation(named: str, options: Mapping[str, type[BaseModel]]) -> Iterator[str]:
    """Usage and every key, or the keys of one section, or one key.

    Args:
        options: models of [options.NAME], by name.
    """
    own = {f"options.{name}": model for name, model in options.items()}
    sections: dict[str, type[BaseModel]] = {**SECTIONS, **own}
    if named:
        named = named.removeprefix("--")
        shown = [*chain(*(_documentation_of(*one, within=named) for one in sections.items()))]
        if not shown:
            of_key = suggest_key(named.split(".")[:2])
            near = did_you_mean(named, sections)
            fix = of_key if of_key.startswith("did you mean") else near
            raise config_error("--help", named, "no such section or key", fix)
        yield from shown
        return
    yield "usage: meshwright config [CONFIG] [--section.key VALUE ...] [--presets]"
    yield "       meshwright config [CONFIG] --help [SECTION | SECTION.KEY]\n"
    yield "Show every value of a config, with its origin.\n"
    yield "example:\n  meshwright config my_job.toml --optimizer.lr 1e-3\n"
    yield "Every key can stand in the TOML as [section] key = value, or on the command line as"
    yield "--section.key value. A true/false key needs no value: --compile.enable means true."
    yield "With CONFIG, so are the tables [options.NAME] of the module that it imports."
    for name, section in sections.items():
        yield from _documentation_of(name, section)


def _documentation_of(name: str, section: type[BaseModel], within: str = "") -> Iterator[str]:
    """A section and its keys.

    Args:
        within: only those that are this section or key, or in it; "": all.
    """

    def is_within(key: str) -> bool:
        return not within or f"{key}.".startswith(f"{within}.")

    shown = [entry for entry in entries(section) if is_within(f"{name}.{entry.name}")]
    if not (shown or is_within(name)):
        return
    about = summary(section).removeprefix(f"[{name}] ")
    yield f"\n{fill(f'[{name}] {about}', 100)}"
    for entry in shown:
        yield f"  --{name}.{entry.name} {entry.kind} (default: {entry.default})"
        if entry.text:  # a model of the user's may have none
            yield fill(entry.text, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)


def schema(options: Mapping[str, type[BaseModel]] = MappingProxyType({})) -> dict[str, Any]:
    """Return the JSON Schema of a TOML, with the names of models and optimizers.

    Args:
        options: models of [options.NAME], by name.
    """
    names: dict[Key, Sequence[str]] = {
        ("model", "name"): tuple(MODELS),
        ("optimizer", "name"): tuple(OPTIMIZERS),
    }
    return json_schema(names, preset_names(), options)


def run_schema(given: Namespace) -> None:
    """Print it; with a config, its module's options and names are in it."""
    print(json.dumps(schema(_option_models(given)), indent=2))
