"""The file in the folder of an experiment: whose folder it is, and the arms in their order."""

import json
import math
from argparse import Namespace
from contextlib import chdir
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshwright.commands.experiment.spec import Document, Request, Values, as_word
from meshwright.config.changes import differences, shown, to_json
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import find_config, read
from meshwright.system.errors import ConfigError
from meshwright.system.files import make_folder, text_of, whole_file
from meshwright.system.lease import Lease

FILE, LEASES = "experiment.json", "leases"


@dataclass(frozen=True)
class Arm(Request):
    """An arm that can run."""

    number: int = 0
    """From 1 on, in the order in which they were asked for; 0: the base."""
    config: str = ""
    """Path of its TOML, from the folder of the experiment's."""
    keys: Values = field(default_factory=dict)
    """Over that TOML, by dotted key."""
    ranks: int = 1
    tokens_per_step: int = 0
    unpaired: list[str] = field(default_factory=list)
    """Which of "weights" and "data" differ from the reference's at equal seeds."""


@dataclass(frozen=True)
class Experiment:
    """An experiment whose arms are checked."""

    identity: Values
    metric: str
    arms: dict[str, Arm]
    """By name, in the order of their numbers; the first is the base."""
    on_gpus: bool
    """Where its runs are."""
    seconds_to_steps: int = 0
    """Steps that a budget in seconds stands for; 0: not measured, or a different budget."""

    def steps_of(self, arm: Arm) -> int:
        """Return the steps of each run of an arm."""
        if arm.steps:
            return arm.steps
        budget = self.identity["budget"]
        if budget["tokens"]:
            return math.ceil(budget["tokens"] / arm.tokens_per_step)
        return int(budget["steps"] or self.seconds_to_steps)


def load(document: Document) -> Experiment | None:
    """Return the experiment of the folder; None: nothing has run there.

    Raises:
        ConfigError: if it is damaged, or a different experiment's.
    """
    path = document.folder / FILE
    if not path.exists():
        return None
    try:
        kept = json.loads(text_of(path))
        arms = {arm["name"]: Arm(**arm) for arm in kept["arms"]}
        experiment = Experiment(**kept | {"arms": arms})
    except (TypeError, ValueError, KeyError) as error:
        rule = f"is damaged, or of a different version of Meshwright: {error!r}"
        fix = "restore it, or choose a different folder"
        raise ConfigError("", f"{path}: {rule}\n  fix: {fix}") from None
    for key, old, new in differences(experiment.identity, identity_of(document)):
        was = f"folder {document.folder} is a different experiment's: {key} = {shown(old)} there"
        fix = "choose a different folder, or change it back"
        raise document.explain(ConfigError("folder", f"{was}, {shown(new)} now\n  fix: {fix}"))
    return experiment


def save(document: Document, experiment: Experiment) -> None:
    """Keep it in the folder; the caller has the lease "arms"."""
    table = asdict(experiment)
    with whole_file(document.folder / FILE) as file:
        file.write(json.dumps(table | {"arms": [*table["arms"].values()]}, indent=1).encode())


def lease(document: Document, name: str) -> Lease:
    """Return the lease of that name, which workers on all nodes see."""
    make_folder(document.folder / LEASES)
    return Lease(document.folder / LEASES / name)


def identity_of(document: Document) -> Values:
    """Return everything that decides about the runs of the base."""
    with chdir(document.file.parent):
        base = without_job(config_of(path_of(document), document.spec.common))
    spec = document.spec.model_dump(include={"budget", "metric", "ranks", "screen"})
    own = {key: new for key, _, new in differences(without_job(JobConfig()), base)}
    return dict(json.loads(json.dumps(spec | {"base": own})))


def path_of(document: Document, name: str = "", key: str = "base") -> str:
    """Return the path of the TOML that an arm names, or else of the base's: from the folder of the
    document, unless it is a preset's or given as absolute. So a copy of the folder has its own.

    Raises:
        ConfigError: of `key`, if there is none.
    """
    try:
        written, folder = name or document.spec.base, document.file.parent
        path = find_config(written, folder)
        is_beside = path == folder / written and not Path(written).is_absolute()
        return str(path.relative_to(folder) if is_beside else path.absolute())
    except ConfigError as error:
        raise ConfigError(key, str(error)) from None


def config_of(path: str, keys: Values) -> JobConfig:
    """Return the config of a TOML with `keys` over it, as `meshwright train` would load it."""
    words = {tuple(key.split(".")): as_word(value) for key, value in keys.items()}
    return read(Namespace(config=path, overrides=words)).config()


def without_job(config: JobConfig) -> dict[str, Any]:
    """Return the values of all sections but [job], as JSON has them."""
    return {section: table for section, table in to_json(config).items() if section != "job"}
