"""Where a job's first weights come from, if not from its own checkpoint or its seed. No torch."""

import dataclasses
from pathlib import Path
from typing import Literal, NamedTuple

from meshwright.checkpoint import commit
from meshwright.checkpoint.find import find_checkpoint, read_manifest, saved_args
from meshwright.checkpoint.hf_folder import Place, check_args, check_hf_folder, is_hf_folder
from meshwright.checkpoint.meta_folder import check_meta_folder, is_meta_folder
from meshwright.checkpoint.torchtitan_folder import find_names, is_torchtitan_folder
from meshwright.config.job_config import Checkpoint
from meshwright.errors import check
from meshwright.models.args import DecoderArgs
from meshwright.models.family import Family
from meshwright.models.foreign import MetaForm, TorchtitanForm

KEY = "checkpoint.initial_load_path"


class Initial(NamedTuple):
    """A folder to start from."""

    kind: Literal["ours", "hf", "meta", "torchtitan"]
    place: Place
    """A step's folder, of those that have steps."""


def find_initial(config: Checkpoint) -> Initial:
    """The folder to start from.

    Raises:
        ConfigError: if it is not there, or not of the kind that is said.
    """
    place = Place(KEY, Path(config.initial_load_path))
    place.check(place.path.exists(), "no such folder")
    place.check(place.path.is_dir(), "is not a folder")
    if config.initial_load_in_hf:
        place.check(is_hf_folder(place.path), "holds no config.json of Hugging Face", _other(False))
        return Initial("hf", place)
    if is_meta_folder(place.path):
        return Initial("meta", place)
    found = place if is_torchtitan_folder(place.path) else find_checkpoint(place)
    if found is None:
        is_hf = is_hf_folder(place.path)
        place.check(False, "holds no checkpoint", _other(True) if is_hf else "")
        raise AssertionError
    for suffix in (commit.UNFINISHED, commit.DELETED):
        place.check(not found.path.name.endswith(suffix), "is not a complete checkpoint")
    return Initial("torchtitan" if is_torchtitan_folder(found.path) else "ours", found)


def _other(is_hf: bool) -> str:
    kind = "a folder of Hugging Face's" if is_hf else "one of Meta's, torchtitan's or meshwright's"
    return f"set checkpoint.initial_load_in_hf = {str(is_hf).lower()} if it is {kind}"


def check_initial(
    config: Checkpoint,
    args: DecoderArgs,
    family: Family,
) -> None:
    """Check that the folder to start from holds the weights of a model with `args`.

    Args:
        family: of the model, with the forms in which others have it.

    Raises:
        ConfigError: naming what is wrong.
    """
    kind, place = find_initial(config)
    match kind:
        case "hf":
            check_hf_folder(place, family.hf, args)
        case "meta":
            check_meta_folder(place, meta_form(place, family), args)
        case "torchtitan":
            find_names(place, torchtitan_form(place, family), args)
        case "ours":
            manifest = read_manifest(place)
            name = manifest.get("model_name", family.name)  # older checkpoints do not say it
            check(
                name == family.name,
                "model.name",
                family.name,
                f"{place.path} holds weights of the family {name!r}",
                f'set model.name = "{name}", or start from another folder',
            )
            saved = saved_args(place, manifest, type(args)).resolved
            names = [field.name for field in dataclasses.fields(saved)]
            there = {name: (f"model.args.{name}", getattr(saved, name)) for name in names}
            check_args(args, there, str(place.path))


def meta_form(place: Place, family: Family) -> MetaForm:
    """The form of Meta's folders of the model's family; raises `ConfigError` if there is none."""
    if family.meta is None:
        place.check(False, f"is a folder of Meta's, and Meta has no {family.name}")
    assert family.meta is not None
    return family.meta


def torchtitan_form(place: Place, family: Family) -> TorchtitanForm:
    """The form of torchtitan's checkpoints of the family; raises `ConfigError` if it is unknown."""
    if family.torchtitan is None:
        fix = "export it to Hugging Face's form there, and set checkpoint.initial_load_in_hf = true"
        place.check(False, f"is torchtitan's, whose form of {family.name} cannot be read", fix)
    assert family.torchtitan is not None
    return family.torchtitan
