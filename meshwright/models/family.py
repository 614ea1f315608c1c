"""All in which model families differ, one record each. Free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.models.args import DecoderArgs
from meshwright.models.foreign import MetaForm, TorchtitanForm
from meshwright.models.hugging_face import HuggingFaceForm


@dataclass(frozen=True)
class Family:
    """A model family."""

    name: str
    """In `model.name`, and in the manifests of its checkpoints."""
    args: type[DecoderArgs]
    """Its dimensions, and how they expand to a model."""
    flavors: Mapping[str, DecoderArgs]
    """Sizes by name, a `debugmodel` for CPUs among them."""
    hf: HuggingFaceForm
    """How Hugging Face has it."""
    meta: MetaForm | None = None
    """Module that knows the form of Meta's folders; None: there are none of it."""
    torchtitan: TorchtitanForm | None = None
    """Module that knows the form of torchtitan's checkpoints; None: they cannot be read."""
