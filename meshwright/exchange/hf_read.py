"""Weights out of a model folder of Hugging Face, on any mesh: each rank reads its shards."""

from collections.abc import Mapping

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.checkpoint.place import Place
from meshwright.exchange.hf_folder import check_tensors, find_tensors
from meshwright.models.args import DecoderArgs
from meshwright.models.hugging_face import HuggingFaceForm
from meshwright.models.initialize import local_box


class HuggingFaceWeights:
    """The weights of a folder, in parts and under our names.

    Raises:
        ConfigError: if they are not the weights of a model with `args`.
    """

    def __init__(self, place: Place, form: HuggingFaceForm, args: DecoderArgs) -> None:
        self._place = place
        self._stored = find_tensors(place)
        self._foreign = check_tensors(place, form, args, self._stored)
        files = {tensor.file for tensor in self._stored.values()}
        try:  # they are mapped, not read
            self._open = {file: safe_open(file, framework="pt") for file in files}
        except (OSError, SafetensorError) as error:
            raise place.error(str(error)) from None

    @torch.no_grad()
    def load(self, parameters: Mapping[str, Tensor]) -> None:
        """Fill `parameters`, plain or sharded, by their names in the plain model, in place.

        Beside them there is one tensor's local part in memory, and of queries and keys up to two
        heads more. Not collective.

        Raises:
            ConfigError: if a copy that the files hold of a tensor differs from it.
        """
        for name, parameter in parameters.items():
            local, offset = local_box(parameter)
            if local.numel():
                local.copy_(self.read(name, tuple(local.shape), offset))

    def read(self, name: str, shape: tuple[int, ...], offset: tuple[int, ...]) -> Tensor:
        """Return the box of `shape` at `offset` in the parameter `name`, in the type it is stored
        in."""
        foreign = self._foreign[name]
        head_dim = foreign.head_dim or 1
        # rows of a head lie in another order, so heads are read whole
        first = offset[0] // head_dim * head_dim
        end = -(-(offset[0] + shape[0]) // head_dim) * head_dim
        rest = [slice(start, start + size) for start, size in zip(offset, shape, strict=True)][1:]
        box = self._slice(foreign.name, (slice(first, end), *rest))
        for copy in foreign.copies:
            if copy in self._stored:
                self._place.check(
                    torch.equal(box, self._slice(copy, (slice(first, end), *rest))),
                    f"{copy} differs from {foreign.name}, but config.json says that they are one",
                    "set tie_word_embeddings = false in it, if they are two",
                )
        if foreign.head_dim is not None:
            box = pairs(box, foreign.head_dim)
        return box[offset[0] - first :][: shape[0]]

    def _slice(self, name: str, box: tuple[slice, ...]) -> Tensor:
        tensor: Tensor = self._open[self._stored[name].file].get_slice(name)[box]  # type: ignore[no-untyped-call]
        return tensor


def pairs(halves: Tensor, head_dim: int) -> Tensor:
    """Rows of whole heads, from their order for a rotation of (i, i + H/2) to (2i, 2i + 1)."""
    return halves.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def halves(pairs: Tensor, head_dim: int) -> Tensor:
    """Return the inverse of `pairs`."""
    return pairs.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
