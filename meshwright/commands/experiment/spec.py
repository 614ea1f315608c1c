"""Reads the TOML of an experiment: its budget, and its arms as keys over the base's.

base = "debug_model"            # a TOML or a preset; relative to this file
budget = {steps = 200}          # or tokens, or seconds
[arms.hot]
"optimizer.lr" = "x2"           # times the base's
"""

import itertools
import json
import math
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, TypeVar

import tomli
from pydantic import Field, NonNegativeFloat, PositiveInt, ValidationError, model_validator

from meshwright.config.explain import explain_syntax, explain_value
from meshwright.config.provenance import Provenance, shown_path
from meshwright.config.section import Section
from meshwright.system.errors import (
    CombinedConfigError,
    ConfigError,
    check,
    config_error,
    did_you_mean,
)

BASE = "base"

RESERVED = (BASE, "budget", "experiment.json", "leases", "results.jsonl")
"""Names that the folder of an experiment has already."""

OWN_KEYS = ("base", "ranks", "on", "from")
"""Keys of an arm that aren't keys of a config."""

NAME = re.compile(r"[A-Za-z0-9][\w.,+=-]{0,150}")

Values = dict[str, Any]
"""By dotted key."""


class Budget(Section):
    """How long each run trains: one of the three."""

    steps: PositiveInt | None = None
    tokens: PositiveInt | None = None
    """An arm with a different batch then takes a different number of steps."""
    seconds: PositiveInt | None = None
    """Of steps, without start-up, compilation, validation and saves. Turned into steps once."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if len(self.model_fields_set) != 1:
            raise ValueError("needs steps, tokens or seconds, and only one of them")
        return self


class Screening(Section):
    """[screen] Drops most of the TOML's arms before any verdict."""

    steps: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Part of the budget that the last round trains; each round before, half of the next."""
    keep: PositiveInt = 4
    """Arms that are left."""
    seeds: Annotated[list[int], Field(min_length=1)] = Field([1_000_000])
    """None of them is a seed of the verdict: an arm that was lucky with it would be so again."""


class Runs(Section):
    """What the TOML of any list of runs says."""

    base: str
    folder: str = ""
    """Where the runs go, relative to the file. Absent: outputs/NAME next to it."""
    metric: str = ""
    """Absent: validation/loss; with `checkpoint.average`, average/validation/loss."""
    ranks: PositiveInt | None = None
    """Of each run, on one node. Absent: as `meshwright train` takes them."""
    common: dict[str, Any] = Field(default_factory=dict)


class Spec(Runs):
    """The TOML of an experiment."""

    seeds: Annotated[int, Field(ge=2, le=1000)] = 8
    """Most seeds of an arm: 0, 1, 2, ..."""
    budget: Budget
    margin: NonNegativeFloat = 0.002
    """Nats. A smaller difference is none."""
    arms: dict[str, dict[str, Any]] = Field(default_factory=dict)
    grid: dict[str, Any] = Field(default_factory=dict)
    one_by_one: dict[str, Any] = Field(default_factory=dict, alias="list")
    random: dict[str, Any] = Field(default_factory=dict)
    screen: Screening | None = None


class Request(NamedTuple):
    """An arm as it is asked for."""

    name: str
    place: str
    """Its key in the TOML; "": it was added by a command."""
    keys: Values
    """As they are written: "x2" stands for twice the value of its reference."""
    base: str = ""
    """A TOML or preset of its own; "": the experiment's."""
    ranks: int | None = None
    on: str = BASE
    """The arm that it changes, and is compared with."""
    is_drawn: bool = False
    """From a grid, a list or at random, where the base itself may come up."""
    steps: int = 0
    """Of each of its runs; 0: the budget decides."""
    branch: int = 0
    """`from`: the step of `on`'s checkpoint of the same seed that it starts from; 0: none."""


class Document(NamedTuple):
    """An experiment's TOML, checked."""

    file: Path
    spec: Spec
    provenance: Provenance

    @property
    def folder(self) -> Path:
        """Where its runs go."""
        return self.file.parent / (self.spec.folder or f"outputs/{self.file.stem}")

    def requests(self) -> list[Request]:
        """Return the arms of the TOML, in its order.

        Raises:
            ConfigError: if one isn't an arm, or two have one name.
        """
        found = [
            *(as_request(name, f"arms.{name}", table) for name, table in self.spec.arms.items()),
            *_grid(self.spec.grid),
            *_one_by_one(self.spec.one_by_one),
            *_random(self.spec.random),
        ]
        names = set[str]()
        for request in found:
            check(request.name not in names, request.place, request.name, "is the name of two arms")
            names.add(request.name)
        if (screen := self.spec.screen) is not None:
            shared = [seed for seed in screen.seeds if 0 <= seed < self.spec.seeds]
            rule = f"seeds 0 to {self.spec.seeds - 1} are the verdict's, which must be fresh"
            check(not shared, "screen.seeds", screen.seeds, rule, "write others, or leave it out")
            for request in found:
                rule = "an arm of a screening can't change one that may be dropped"
                check(request.on == BASE, f"{request.place}.on", request.on, rule, "add it later")
        return found

    def explain(self, error: ConfigError) -> ConfigError:
        """Return the error with the line of its key in the TOML."""
        return ConfigError("", self.provenance.explain(error))


def read_spec(file: Path) -> Document:
    """Read the TOML of an experiment.

    Raises:
        ConfigError: with file and line, if it isn't one.
    """
    document = Document(file.absolute(), *read_toml(file, Spec, "an experiment"))
    try:
        document.requests()
    except ConfigError as error:
        raise document.explain(error) from None
    return document


Kind = TypeVar("Kind", bound=Section)


def read_toml(file: Path, kind: type[Kind], what: str) -> tuple[Kind, Provenance]:
    """Read a TOML as a section, and the places of its keys.

    Args:
        what: the name of such a file, for the message that it's missing.

    Raises:
        ConfigError: with file and line, if it isn't one.
    """
    file, provenance = file.absolute(), Provenance()
    if not file.is_file():
        raise ConfigError("", f"{file}: no such file\n  fix: name the TOML of {what}")
    text = file.read_text("utf-8-sig", "replace")
    try:
        raw = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise explain_syntax(error, shown_path(file)) from None
    provenance.add_toml(file, text)
    try:
        return kind.model_validate(raw), provenance
    except ValidationError as error:
        errors = [_explain(mistake, kind) for mistake in error.errors()]
        raise ConfigError("", provenance.explain(CombinedConfigError(errors))) from None


def _explain(mistake: Any, kind: type[Section]) -> ConfigError:
    location = [str(part) for part in mistake["loc"]]
    key = ".".join(location)
    if mistake["type"] == "extra_forbidden":
        tables: dict[str, type[Section]] = {"budget": Budget, "screen": Screening}
        table = tables.get(location[0], kind)
        names = [field.alias or name for name, field in table.model_fields.items()]
        return ConfigError(key, f"unknown key {key}\n  fix: {did_you_mean(location[-1], names)}")
    if mistake["type"] == "missing":
        return ConfigError(key, f"{key}: must be given")
    return explain_value(key, mistake)


def as_request(name: str, place: str, table: Mapping[str, Any]) -> Request:
    """Return the arm that a table of keys asks for.

    Raises:
        ConfigError: if it isn't one.
    """
    is_name = NAME.fullmatch(name) is not None and name not in RESERVED
    rule = f"can't name an arm: letters, digits and _ . , + = - can, but not {', '.join(RESERVED)}"
    check(is_name, place, name, rule, "write a different name")
    keys = dict(flattened(table))
    base, ranks, on, branch = (keys.pop(key, None) for key in OWN_KEYS)
    check(isinstance(base, str | None), f"{place}.base", base, "must be the path of a TOML")
    is_count = ranks is None or (type(ranks) is int and ranks > 0)
    check(is_count, f"{place}.ranks", ranks, "must be a positive number")
    is_step = branch is None or (type(branch) is int and branch > 0)
    check(is_step, f"{place}.from", branch, "must be a step", "write from = 100")
    check(isinstance(on, str | None), f"{place}.on", on, "must be the name of an arm")
    check(not (on and base), f"{place}.on", on, "is given together with a base", "leave out one")
    loose = next((key for key in keys if "." not in key), None)
    rule = "is no key of a config"
    fix = f'write "section.key" = value; an arm\'s own keys are {", ".join(OWN_KEYS)}'
    check(loose is None, f"{place}.{loose}", keys.get(str(loose)), rule, fix)
    return Request(name, place, keys, base or "", ranks, on or BASE, branch=branch or 0)


def flattened(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each key in a table and the tables in it."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _lists(table: Mapping[str, Any], place: str) -> dict[str, list[Any]]:
    keys = dict(flattened(table))
    for key, values in keys.items():
        is_list = isinstance(values, list) and len(values) > 0
        check(is_list, f"{place}.{key}", values, "must be a list of values", "write [...]")
    return keys


def _grid(table: Mapping[str, Any]) -> Iterator[Request]:
    keys = _lists(table, "grid")
    for values in itertools.product(*keys.values()) if keys else ():
        yield _drawn("grid", dict(zip(keys, values, strict=True)))


def _one_by_one(table: Mapping[str, Any]) -> Iterator[Request]:
    for key, values in _lists(table, "list").items():
        for value in values:
            yield _drawn("list", {key: value})


def _drawn(place: str, keys: Values) -> Request:
    parts = (f"{key.rpartition('.')[2]}={_word(value)}" for key, value in keys.items())
    return as_request(",".join(parts), place, keys)._replace(is_drawn=True)


def _word(value: object) -> str:
    return re.sub(r"[^\w.+-]+", "_", str(value).lower() if isinstance(value, bool) else str(value))


def _random(table: Mapping[str, Any]) -> Iterator[Request]:
    """Draw `count` arms; each draw is a function of `seed` and its number only, so a larger count
    adds arms and keeps the first ones."""
    if not table:
        return
    count, seed = table.get("count"), table.get("seed", 0)
    if type(count) is not int or count < 1:
        raise config_error("random.count", count, "must be a positive number", "write count = 16")
    check(type(seed) is int, "random.seed", seed, "must be a whole number")
    ranges = {key: value for key, value in table.items() if key not in ("count", "seed")}
    for number in range(1, count + 1):
        draw = random.Random(f"{seed} {number}")
        keys = {key: _draw(draw, f"random.{key}", value) for key, value in ranges.items()}
        yield as_request(f"random-{number}", "random", keys)._replace(is_drawn=True)


def _draw(draw: random.Random, place: str, written: Any) -> Any:
    match written:
        case [_, *_]:
            return draw.choice(written)
        case {"log": [float() | int() as low, float() | int() as high]} if 0 < low < high:
            return float(f"{math.exp(draw.uniform(math.log(low), math.log(high))):.3g}")
        case {"uniform": [float() | int() as low, float() | int() as high]} if low < high:
            return float(f"{draw.uniform(low, high):.3g}")
        case {"int": [int() as low, int() as high]} if low < high:
            return draw.randint(low, high)
    fix = (
        "write [a, b, c], {log = [a, b]} of positive numbers, {uniform = [a, b]} or {int = [a, b]}"
    )
    raise config_error(place, written, "isn't a range to draw from", fix)


def as_word(value: object) -> str:
    """Return a value as the command line of `meshwright train` takes it, which is TOML; text has no
    quotes there."""
    if isinstance(value, str):
        return value
    # JSON with other separators, and a different word for infinity, is TOML
    return json.dumps(value, separators=(", ", " = ")).replace("Infinity", "inf")
