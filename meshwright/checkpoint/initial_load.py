"""Where a job's first weights come from, if not from its own checkpoint or its seed. No torch."""

import dataclasses
from pathlib import Path

from meshwright.checkpoint.find import find_checkpoint, read_manifest, saved_args
from meshwright.checkpoint.hf_folder import Place, check_args, check_hf_folder, is_hf_folder
from meshwright.config.job_config import Checkpoint
from meshwright.models.foreign import HuggingFaceForm
from meshwright.models.llama import LlamaArgs

KEY = "checkpoint.initial_load_path"


def find_initial(config: Checkpoint) -> Place:
    """The folder to start from: of Hugging Face, or a step's.

    Raises:
        ConfigError: if it is not there, or not of the kind that is said.
    """
    place = Place(KEY, Path(config.initial_load_path))
    place.check(place.path.exists(), "no such folder")
    place.check(place.path.is_dir(), "is not a folder")
    if config.initial_load_in_hf:
        place.check(is_hf_folder(place.path), "holds no config.json of Hugging Face", _other(False))
        return place
    found = find_checkpoint(place)
    if found is None:
        is_hf = is_hf_folder(place.path)
        place.check(False, "holds no checkpoint", _other(True) if is_hf else "")
        raise AssertionError
    return found


def _other(is_hf: bool) -> str:
    kind = "a folder of Hugging Face's" if is_hf else "a checkpoint of meshwright's"
    return f"set checkpoint.initial_load_in_hf = {str(is_hf).lower()} if it is {kind}"


def check_initial(config: Checkpoint, form: HuggingFaceForm, args: LlamaArgs) -> None:
    """Check that the folder to start from holds the weights of a model with `args`.

    Raises:
        ConfigError: naming what is wrong.
    """
    place = find_initial(config)
    if config.initial_load_in_hf:
        check_hf_folder(place, form, args)
        return
    saved = saved_args(place, read_manifest(place))
    names = [field.name for field in dataclasses.fields(saved)]
    there = {name: (f"model.args.{name}", getattr(saved, name)) for name in names}
    check_args(args, there, str(place.path))
