"""`model.flavor` as the path of a model folder of Hugging Face."""

from collections.abc import Mapping
from typing import Any


def is_path(value: str) -> bool:
    """Return whether the value of a key that takes a path or a name is a path."""
    return "/" in value or value.partition(":")[0].endswith(".py")


def is_folder(flavor: object) -> bool:
    """Return whether a flavor is a path: names of sizes have no slash."""
    return isinstance(flavor, str) and "/" in flavor


def follow_folder(raw: dict[str, Any]) -> None:
    """Take the tokenizer from the folder that `model.flavor` names, and the first weights if
    `checkpoint.initial_load_in_hf` asks for some, in place, unless they are given."""
    model, checkpoint = raw.get("model"), raw.get("checkpoint")
    if not isinstance(model, Mapping) or not is_folder(model.get("flavor")):
        return
    raw["model"] = {"tokenizer_path": model["flavor"]} | dict(model)
    if isinstance(checkpoint, Mapping) and checkpoint.get("initial_load_in_hf") is True:
        raw["checkpoint"] = {"initial_load_path": model["flavor"]} | dict(checkpoint)
