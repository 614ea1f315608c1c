"""Weights out of a model folder of Meta's, on any mesh: each rank reads its shards."""

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.place import Place
from meshwright.exchange.meta_folder import check_meta_folder
from meshwright.models.args import DecoderArgs
from meshwright.models.foreign import MetaForm
from meshwright.models.initialize import local_box


class MetaWeights:
    """The weights of a folder, put together of the pieces in its files.

    Raises:
        ConfigError: if they are not the weights of a model with `args`.
    """

    def __init__(self, place: Place, form: MetaForm, args: DecoderArgs) -> None:
        self._place, self._form, self._args = place, form, args
        pieces = check_meta_folder(place, form, args)
        self._cut = pieces.cut
        self._files = [self._map(file) for file in pieces.files]

    def _map(self, file: Path) -> dict[str, Tensor]:
        try:  # mapped into memory: unused parts are not read
            tensors: dict[str, Tensor] = torch.load(
                file, map_location="cpu", mmap=True, weights_only=True
            )
        except (OSError, RuntimeError, pickle.UnpicklingError) as error:
            raise self._place.error(f"{file.name}: {error}") from None
        return tensors

    @torch.no_grad()
    def load(self, parameters: Mapping[str, Tensor]) -> None:
        """Fill `parameters`, plain or sharded, by their names in the plain model, in place.

        Beside them there is one tensor's local part in memory. Not collective.

        Raises:
            ConfigError: if a copy that the files hold of a tensor differs from it.
        """
        for name, parameter in parameters.items():
            local, offset = local_box(parameter)
            if not local.numel():
                continue
            box = self.read(name, tuple(local.shape), offset)
            local.copy_(box)
            copy = self._form.copy_of(name, self._args)
            if copy is not None and copy in self._cut:
                self._place.check(
                    torch.equal(box, self.read(copy, tuple(local.shape), offset)),
                    f"{copy} differs from {name}, but model.args.tie_embeddings says that they are "
                    "one",
                    "set model.args.tie_embeddings = false",
                )

    def read(self, name: str, shape: tuple[int, ...], offset: tuple[int, ...]) -> Tensor:
        """Return the box of `shape` at `offset` in the tensor `name`, in the type it is stored
        in."""
        cut = self._cut[name]
        if cut is None:
            return _box(self._files[0][name], shape, offset)
        parts, start = [], 0
        for tensors in self._files:
            piece = tensors[name]
            begin = max(offset[cut], start)
            end = min(offset[cut] + shape[cut], start + piece.shape[cut])
            if begin < end:
                part_shape = (*shape[:cut], end - begin, *shape[cut + 1 :])
                part_offset = (*offset[:cut], begin - start, *offset[cut + 1 :])
                parts.append(_box(piece, part_shape, part_offset))
            start += piece.shape[cut]
        return parts[0] if len(parts) == 1 else torch.cat(parts, cut)


def _box(tensor: Tensor, shape: tuple[int, ...], offset: tuple[int, ...]) -> Tensor:
    return tensor[tuple(slice(o, o + size) for o, size in zip(offset, shape, strict=True))]
