"""The model families: all in which they differ, one record each."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.models import llama
from meshwright.models.foreign import HuggingFaceForm, MetaForm, TorchtitanForm
from meshwright.models.llama import hf as llama_hf
from meshwright.models.llama import meta as llama_meta
from meshwright.models.llama import torchtitan as llama_torchtitan


@dataclass(frozen=True)
class ModelSpec:
    """A model family.

    Its classes are named `module:object`, to be found with `pkgutil.resolve_name`, because the
    table is read before torch is loaded: a config must not wait seconds for its first mistake.
    """

    flavors: Mapping[str, llama.LlamaArgs]
    """Sizes by name."""
    model: str
    """Class of the model: `Model(args, seq_len)`, a `Decoder`."""
    parallelize: str
    """Function with the signature of `parallelize_llama`."""
    hf: HuggingFaceForm
    """Module that knows the form in which Hugging Face has it."""
    meta: MetaForm
    """Module that knows the form of Meta's folders."""
    torchtitan: TorchtitanForm
    """Module that knows the form of torchtitan's checkpoints."""


MODELS: dict[str, ModelSpec] = {
    "llama": ModelSpec(
        flavors=llama.FLAVORS,
        model="meshwright.models.llama.model:Llama",
        parallelize="meshwright.parallelisms.parallelize_llama:parallelize_llama",
        hf=llama_hf,
        meta=llama_meta,
        torchtitan=llama_torchtitan,
    ),
}
