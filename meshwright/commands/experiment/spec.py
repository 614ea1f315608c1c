"""Reads the TOML of an experiment: its budget, and its arms as keys over the base's.

base = "debug_model"            # a TOML or a preset; relative to this file
budget = {steps = 200}          # or tokens, or seconds
[arms.hot]
"optimizer.lr" = "x2"           # times the base's
"""

import itertools
import json
import math
import os
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from meshwright.config.explain import explain_mistake
from meshwright.config.loader import parse_toml
from meshwright.config.provenance import Provenance
from meshwright.config.section import ADDRESS, Section
from meshwright.system.errors import (
    CombinedConfigError,
    ConfigError,
    UnknownKeyError,
    check,
    config_error,
    did_you_mean,
)

BASE = "base"

RESERVED = (BASE, "budget", "experiment.json", "leases", "results.jsonl")
"""Names that the folder of an experiment has already."""

LONGEST_NAME = 150
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,+=-]{0,149}")

MOST_ARMS = 1000
"""Of a grid, or random draws."""

Values = dict[str, Any]
"""By dotted key."""

Seed = Annotated[int, Field(ge=0, lt=2**63)]


def flattened(table: Any) -> Any:
    """Return a table whose keys are the dotted keys of it and of the tables in it; anything else as
    it is.

    Raises:
        ValueError: if a key is there twice, since TOML takes "a.b" and a.b for two.
    """
    if not isinstance(table, Mapping):
        return table
    flat = Values()
    for name, value in table.items():
        inner = flattened(value) if isinstance(value, Mapping) else None
        own = {name: value} if inner is None else {f"{name}.{k}": v for k, v in inner.items()}
        if twice := flat.keys() & own.keys():
            raise ValueError(f"has {min(twice)} twice, once with quotes: leave one out")
        flat |= own
    return flat


Keys = Annotated[Values, BeforeValidator(flattened)]
Lists = Annotated[dict[str, Annotated[list[Any], Field(min_length=1)]], BeforeValidator(flattened)]


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
    seeds: Annotated[list[Seed], Field(min_length=1)] = Field([1_000_000])
    """None of them is a seed of the verdict: an arm that was lucky with it would be so again."""


class ArmTable(Section):
    """[arms.NAME] Keys of a config, and these."""

    model_config = ConfigDict(extra="allow")

    base: str = ""
    """A TOML or preset of its own; "": the experiment's."""
    ranks: PositiveInt | None = None
    on: str = ""
    branch: PositiveInt | None = Field(None, alias="from")


class Draws(Section):
    """[random] Keys of a config with their ranges, and these."""

    model_config = ConfigDict(extra="allow")

    count: Annotated[PositiveInt, Field(le=MOST_ARMS)]
    seed: int = 0


class Runs(Section):
    """What the TOML of any list of runs says."""

    base: str
    folder: str = ""
    """Where the runs go, relative to the file. Absent: outputs/NAME next to it."""
    metric: str = ""
    """Absent: validation/loss; with `checkpoint.average`, average/validation/loss."""
    ranks: PositiveInt | None = None
    """Of each run, on one node. Absent: as `meshwright train` takes them."""
    common: Keys = Field(default_factory=dict)

    @field_validator("folder")
    @classmethod
    def _check_local(cls, folder: str) -> str:
        if ADDRESS.match(folder):
            raise ValueError("is an address, and workers share a folder of a file system")
        return os.path.expanduser(folder)


class Spec(Runs):
    """The TOML of an experiment."""

    seeds: Annotated[int, Field(ge=2, le=1000)] = 8
    """Most seeds of an arm: 0, 1, 2, ..."""
    budget: Budget
    margin: NonNegativeFloat = 0.002
    """Nats. A smaller difference is none."""
    arms: dict[str, Keys] = Field(default_factory=dict)
    grid: Lists = Field(default_factory=dict)
    one_by_one: Lists = Field(default_factory=dict, alias="list")
    random: Draws | None = None
    screen: Screening | None = None


@dataclass(frozen=True)
class Request:
    """An arm as it is asked for."""

    name: str
    place: str
    """Its key in the TOML; "": it was added by a command."""
    asked: Values
    """Its keys as they are written: "x2" stands for twice the value of its reference."""
    base: str = ""
    """A TOML or preset of its own; "": the experiment's."""
    own_ranks: int | None = None
    on: str = BASE
    """The arm that it changes, and is compared with; "": it is the base."""
    steps: int = 0
    """Of each of its runs; 0: the budget decides."""
    branch: int = 0
    """`from`: the step of `on`'s checkpoint of the same seed that it starts from; 0: none."""
    is_drawn: bool = False
    """From a grid, a list or at random, where the base itself may come up."""

    def key(self, name: str) -> str:
        """Return one of its keys as errors have it."""
        return f"{self.place}.{name}".lstrip(".")

    def asks_as(self, other: "Request") -> bool:
        """Return whether both ask for the same runs, wherever they are written."""
        parts = ("asked", "base", "own_ranks", "on", "steps", "branch")
        return all(getattr(self, part) == getattr(other, part) for part in parts)


@dataclass(frozen=True)
class Document:
    """The TOML of a list of runs, checked: an experiment's, or a ladder's."""

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
        spec = self.spec
        requests = [as_request(name, f"arms.{name}", keys) for name, keys in spec.arms.items()]
        requests += _grid("grid", spec.grid)
        for key, values in spec.one_by_one.items():
            requests += _grid("list", {key: values})
        requests += _random(spec.random)
        names = Counter(one.name for one in requests)
        for one in requests:
            check(names[one.name] == 1, one.place, one.name, "is the name of two arms")
        if (screen := spec.screen) is not None:
            shared = [seed for seed in screen.seeds if 0 <= seed < spec.seeds]
            rule = f"seeds 0 to {spec.seeds - 1} are the verdict's, which must be fresh"
            check(not shared, "screen.seeds", screen.seeds, rule, "write others, or leave it out")
            for one in requests:
                rule = "an arm of a screening can't change one that may be dropped"
                check(one.on == BASE, one.key("on"), one.on, rule, "add it later")
        return requests

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
        why = "is a folder" if file.is_dir() else "no such file"
        raise ConfigError("", f"{file}: {why}\n  fix: name the TOML of {what}")
    raw, text = parse_toml(file)
    provenance.add_toml(file, text)
    try:
        return parsed(kind, without_dates(raw)), provenance
    except ConfigError as error:
        raise ConfigError("", provenance.explain(error)) from None


def parsed(kind: type[Kind], raw: Any, place: str = "") -> Kind:
    """Return the section that a table is.

    Raises:
        ConfigError: with all mistakes.
    """
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        mistakes = error.errors()
    tables: dict[str, type[Section]] = {"budget": Budget, "screen": Screening}
    errors = list[ConfigError]()
    for mistake in mistakes:
        location = tuple(str(part) for part in (*filter(None, [place]), *mistake["loc"]))
        if mistake["type"] != "extra_forbidden":
            errors += explain_mistake(mistake | {"loc": location})
            continue
        *table, name = location
        fields = tables.get("".join(table), kind).model_fields
        fix = did_you_mean(name, [field.alias or key for key, field in fields.items()])
        key = ".".join(location)
        errors.append(UnknownKeyError(key, f"unknown key {key}\n  fix: {fix}"))
    raise CombinedConfigError(errors)


def without_dates(value: Any) -> Any:
    """Return TOML's values with dates as text: no key takes one, and each then says so."""
    return json.loads(json.dumps(value, default=str))


def as_request(name: str, place: str, keys: Values, *, is_drawn: bool = False) -> Request:
    """Return the arm that keys ask for.

    Raises:
        ConfigError: if it isn't one.
    """
    rule = (
        "can't name an arm: up to 150 of a to z, A to Z, 0 to 9 and _ . , + = - can, a letter or "
    )
    rule += f"a digit first, but not {', '.join(RESERVED)}"
    is_name = NAME.fullmatch(name) is not None and name not in RESERVED
    check(is_name, place or "NAME", name, rule, "write a different name")
    table = parsed(ArmTable, keys, place)
    asked, branch = dict(table.model_extra or {}), table.branch or 0
    request = Request(
        name, place, asked, table.base, table.ranks, table.on or BASE, 0, branch, is_drawn
    )
    rule = "is given together with a base"
    check(not (table.on and table.base), request.key("on"), table.on, rule, "leave out one")
    fix = 'write "section.key" = value; an arm\'s own keys are base, ranks, on, from'
    for key, value in asked.items():
        check("." in key, request.key(key), value, "is no key of a config", fix)
    return request


def _grid(place: str, lists: Mapping[str, list[Any]]) -> Iterator[Request]:
    """Yield an arm for each combination of values."""
    count = math.prod(map(len, lists.values()))
    rule = f"more than {MOST_ARMS:,} arms, each of which is checked first"
    check(count <= MOST_ARMS, place, count, rule, "leave some out")
    for values in itertools.product(*lists.values()) if lists else ():
        keys = dict(zip(lists, values, strict=True))
        words = (f"{key.rpartition('.')[2]}={as_word(value)}" for key, value in keys.items())
        name = re.sub(r"[^A-Za-z0-9_.,+=-]+", "_", ",".join(words))
        if len(name) > LONGEST_NAME:
            name = f"{name[:100]}-{sha256(name.encode()).hexdigest()[:16]}"
        yield as_request(name, place, keys, is_drawn=True)


def _random(draws: Draws | None) -> Iterator[Request]:
    """Draw arms; each draw is a function of `seed` and its number only, so a larger count adds arms
    and keeps the first ones."""
    if draws is None:
        return
    for number in range(1, draws.count + 1):
        draw, ranges = random.Random(f"{draws.seed} {number}"), draws.model_extra or {}
        keys = {key: _draw(draw, f"random.{key}", value) for key, value in ranges.items()}
        yield as_request(f"random-{number}", "random", keys, is_drawn=True)


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
    names, inner = [place.removeprefix("random.")], written
    while isinstance(inner, dict) and inner and not inner.keys() & {"log", "uniform", "int"}:
        name, inner = next(iter(inner.items()))
        names.append(name)
    if "." not in names[0] and len(names) > 1:
        fix = f'put quotes around the key: "{".".join(names)}" = ...'
        raise config_error(place, written, "is a table, and no key of a config", fix)
    fix = "write [a, b], {log = [a, b]} of positive numbers, {uniform = [a, b]} or {int = [a, b]}"
    raise config_error(place, written, "isn't a range to draw from", fix)


def as_word(value: object) -> str:
    """Return a value as the command line of `meshwright train` takes it, which is TOML; text has no
    quotes there."""
    if isinstance(value, str):
        return value
    # JSON with other separators, and a different word for infinity, is TOML
    return json.dumps(value, separators=(", ", " = ")).replace("Infinity", "inf")
