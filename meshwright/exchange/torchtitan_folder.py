"""The content of a torchtitan checkpoint, and whether it is of the wanted model. No torch.

It is a checkpoint of torch.distributed.checkpoint, as ours are, with other names and no manifest:
shapes are the only facts about the model. The rest (the number of heads, the norms' epsilon, the
rotation) is taken from the config.
"""

from pathlib import Path

from meshwright.checkpoint.manifest import MANIFEST
from meshwright.checkpoint.place import Place
from meshwright.checkpoint.saved_tensors import INDEX, SavedTensor, read_saved_tensors
from meshwright.models.args import DecoderArgs
from meshwright.models.foreign import TorchtitanForm

SHOWN = 10
"""Tensors that an error names at most."""


def is_torchtitan_folder(path: Path) -> bool:
    """Return whether `path` looks like a step's folder of torchtitan's."""
    return (path / INDEX).is_file() and not (path / MANIFEST).exists()


def find_names(place: Place, form: TorchtitanForm, args: DecoderArgs) -> dict[str, str]:
    """Return the name there of each parameter of the model with `args`.

    Raises:
        ConfigError: naming every tensor that is missing, has another shape, or has no place.
    """
    try:
        saved = read_saved_tensors(place.path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise place.error(f"{INDEX} cannot be read: {reason}") from None
    place.check(
        not any(name.startswith("rng.") for name in saved),
        f"is a checkpoint of meshwright's that is damaged: it has no {MANIFEST}",
        "name another step's folder",
    )
    shapes = args.parameter_shapes()
    prefix = next((p for p in form.PREFIXES if _of_model(saved, p, form)), "")
    found, wrong = {}, []
    for ours, shape in shapes.items():
        theirs = next((name for name in form.names(ours) if prefix + name in saved), None)
        if theirs is None:
            wrong.append(f"{prefix}{ours} is not there")
            continue
        found[ours] = prefix + theirs
        if saved[found[ours]].shape != shape:
            wrong.append(f"{found[ours]} has shape {saved[found[ours]].shape} there, not {shape}")
    tied = {prefix + name for name in form.names("output.weight")} if args.tie_embeddings else set()
    others = sorted(_of_model(saved, prefix, form) - set(found.values()) - tied)
    wrong += [f"{name} has no place in the model" for name in others]
    more = f" (and {len(wrong) - SHOWN} more)" if len(wrong) > SHOWN else ""
    place.check(
        not wrong,
        f"is a checkpoint of torchtitan's, or of another model: {'; '.join(wrong[:SHOWN])}{more}",
        "set model.flavor and model.args to the model that it is of",
    )
    return found


def _of_model(saved: dict[str, SavedTensor], prefix: str, form: TorchtitanForm) -> set[str]:
    starts = tuple(prefix + start for start in form.OF_MODEL)
    return {name for name in saved if name.startswith(starts)}
