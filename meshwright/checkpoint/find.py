"""Which checkpoint of ours a path means. Free of torch."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from pydantic import TypeAdapter, ValidationError

from meshwright.checkpoint import commit
from meshwright.checkpoint.hf_folder import Place
from meshwright.models.args import DecoderArgs


def find_checkpoint(place: Place) -> Place | None:
    """The step's folder that `place` is, or the newest in it, or in a folder in it (which is how a
    dump folder has them); None if there is none.

    Raises:
        ConfigError: if several folders in it hold checkpoints.
    """
    path = place.path
    if (path / commit.MANIFEST).is_file():
        for suffix in (commit.UNFINISHED, commit.DELETED):
            place.check(not path.name.endswith(suffix), "is not a complete checkpoint")
        return place
    if not path.is_dir():
        return None
    folders = [path] if commit.saved_steps(path) else []
    folders = folders or [inner for inner in sorted(path.iterdir()) if commit.saved_steps(inner)]
    if not folders:
        return None
    names = ", ".join(str(folder) for folder in folders)
    place.check(len(folders) == 1, f"holds several folders of checkpoints: {names}", "name one")
    newest = commit.saved_steps(folders[0])[-1]
    return Place(place.key, commit.step_folder(folders[0], newest))


def read_manifest(place: Place) -> dict[str, Any]:
    """What a checkpoint says of itself.

    Raises:
        ConfigError: if it cannot be read.
    """
    with _telling(place):
        return commit.read_manifest(place.path)


@contextmanager
def being_read(place: Place) -> Iterator[None]:
    """Keep every job's retention from deleting the checkpoint meanwhile.

    Raises:
        ConfigError: if it is not there, or no longer.
    """
    with ExitStack() as stack:
        with _telling(place):
            stack.enter_context(commit.being_read(place.path))
        yield


@contextmanager
def _telling(place: Place) -> Iterator[None]:
    """Say by which key a damaged checkpoint was given."""
    try:
        yield
    except commit.DamagedError as error:
        place.check(False, f"is damaged: {error.what}", "name another step's folder")


def saved_args(place: Place, manifest: dict[str, Any], kind: type[DecoderArgs]) -> DecoderArgs:
    """Dimensions of the model that the checkpoint is of.

    Args:
        kind: those of its family.

    Raises:
        ConfigError: if it does not say.
    """
    try:
        return TypeAdapter(kind).validate_python(manifest.get("model_args"))
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        place.check(False, f"{commit.MANIFEST} has no model_args of a model: {reason}")
        raise AssertionError from None
