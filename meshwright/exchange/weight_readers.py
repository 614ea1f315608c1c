"""Readers of a job's first weights, by the kind of their source."""

from meshwright.checkpoint.weights import CheckpointWeights
from meshwright.exchange.hf_read import HuggingFaceWeights
from meshwright.exchange.initial_load import InitialWeights, meta_form, torchtitan_form
from meshwright.exchange.meta_read import MetaWeights
from meshwright.exchange.torchtitan_folder import find_names
from meshwright.models.args import DecoderArgs
from meshwright.models.family import Family


def open_weights(
    initial: InitialWeights, spec: Family, args: DecoderArgs
) -> HuggingFaceWeights | MetaWeights | CheckpointWeights:
    """Return the reader of `initial`.

    Args:
        spec: the model's family.
        args: the model's dimensions.

    Raises:
        ConfigError: if they cannot be read.
    """
    place = initial.place
    match initial.kind:
        case "hf":
            return HuggingFaceWeights(place, spec.hf, args)
        case "meta":
            return MetaWeights(place, meta_form(place, spec), args)
        case "torchtitan":
            names = find_names(place, torchtitan_form(place, spec), args)
            return CheckpointWeights(place, names.__getitem__)
        case "ours":
            return CheckpointWeights(place)
