"""A mixture as a file of weighted paths, `training.mix_file`, in place of many tables."""

import os
from typing import Any

from meshwright.config.training import Source
from meshwright.system.errors import ConfigError, check

KEY = "training.mix_file"


def follow_mix(raw: dict[str, Any]) -> None:
    """Write the lines of `training.mix_file` as tables of `training.datasets`, in place. Each gets
    the other keys of a source from `[training]`, and the path as its name.

    Raises:
        ConfigError: if the file cannot be read, or a line is not a weight and a path.
    """
    training = raw.get("training")
    path = training.get("mix_file") if isinstance(training, dict) else None
    if not isinstance(training, dict) or not isinstance(path, str) or not path:
        return
    check(
        not training.get("datasets"),
        KEY,
        path,
        "is given beside training.datasets",
        "leave out one",
    )
    fix = 'say of which kind its files are, e.g. training.dataset = "json"'
    check(bool(training.get("dataset")), KEY, path, "needs training.dataset", fix)
    check(
        not training.get("dataset_path"), KEY, path, "is given beside dataset_path", "leave it out"
    )
    shared = {key: training.pop(key) for key in Source.model_fields if key in training}
    del training["mix_file"]
    found = [
        shared | {"weight": weight, "dataset_path": place, "name": name}
        for weight, place, name in _lines(path)
    ]
    check(bool(found), KEY, path, "names no files", "write lines like `0.7 web/*.jsonl`")
    training["datasets"] = found


def _lines(path: str) -> list[tuple[float, str, str]]:
    """Return weight, path and name of each line: the name is the path as it is written."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = file.read().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(KEY, f"{KEY} = {path!r}: cannot be read: {reason}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        weight, _, name = line.strip().partition(" ")
        try:
            value, name = float(weight), name.strip()
        except ValueError:
            value, name = 0.0, ""
        if not (0 < value < float("inf") and name):
            fix = "write a positive weight, a space and a path, e.g. `0.7 web/*.jsonl`"
            message = f"{path}:{number}: {line.strip()!r} is not a weight and a path\n  fix: {fix}"
            raise ConfigError(KEY, message)
        place = os.path.expanduser(name)
        found.append((value, os.path.normpath(os.path.join(os.path.dirname(path), place)), name))
    return found
