"""Reads a job's first weights on any mesh: each rank reads its shards of the folder."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.checkpoint.conversion.hf_folder import check_tensors, find_tensors
from meshwright.checkpoint.conversion.initial_load import (
    LOAD_KEY,
    InitialWeights,
    find_initial,
    find_names,
    meta_form,
    torchtitan_form,
)
from meshwright.checkpoint.conversion.meta_folder import check_meta_folder
from meshwright.checkpoint.find import find_checkpoint
from meshwright.checkpoint.on_ranks import on_first_rank, select_on_ranks
from meshwright.checkpoint.reader import CheckpointWeights
from meshwright.config.job_config import Checkpoint
from meshwright.models.args import DecoderArgs
from meshwright.models.family import Family, HuggingFaceForm, MetaForm
from meshwright.parallelisms.shards import local_box
from meshwright.system.files import Place

READING_TIMEOUT = timedelta(hours=1)


class ForeignWeights(ABC):
    """The weights in another's folder, in boxes and under our names.

    Raises:
        ConfigError: if they are not the weights of a model with `args`.
    """

    @abstractmethod
    def read(self, name: str, shape: tuple[int, ...], offset: tuple[int, ...]) -> Tensor:
        """Return the box of `shape` at `offset` in the parameter `name`, in the type it is stored
        in.

        Raises:
            ConfigError: if a copy that the files hold of the parameter differs from it.
        """

    @torch.no_grad()
    def load(self, parameters: Mapping[str, Tensor]) -> None:
        """Fill `parameters`, plain or sharded, by their names in the plain model, in place.

        Beside them there is one tensor's local part in memory, and of queries and keys up to two
        heads more. Not collective.

        Raises:
            ConfigError: as `read` does.
        """
        for name, parameter in parameters.items():
            local, offset = local_box(parameter)
            if local.numel():
                local.copy_(self.read(name, tuple(local.shape), offset))


class HuggingFaceWeights(ForeignWeights):
    """The weights of a model folder of Hugging Face."""

    def __init__(self, place: Place, form: HuggingFaceForm, args: DecoderArgs) -> None:
        self._place = place
        self._stored = find_tensors(place)
        self._foreign = check_tensors(place, form, args, self._stored)
        files = {tensor.file for tensor in self._stored.values()}
        try:  # they are mapped, not read
            self._open = {file: safe_open(file, framework="pt") for file in files}
        except (OSError, SafetensorError) as error:
            raise place.error(str(error)) from None

    def load(self, parameters: Mapping[str, Tensor]) -> None:
        """As the base's. Tensors for which no family's files have a place stay as they are."""
        super().load({name: t for name, t in parameters.items() if name in self._foreign})

    def read(self, name: str, shape: tuple[int, ...], offset: tuple[int, ...]) -> Tensor:
        foreign = self._foreign[name]
        rest = [slice(start, start + size) for start, size in zip(offset, shape, strict=True)][1:]
        if foreign.slices:
            names = foreign.slices[offset[0] : offset[0] + shape[0]]
            return torch.stack([self._slice(part, tuple(rest)) for part in names])
        if foreign.file_shape:
            rest[0] = slice(rest[0].start + foreign.start, rest[0].stop + foreign.start)
        head_dim = foreign.head_dim or 1
        # rows of a head lie in another order, so heads are read whole
        first = offset[0] // head_dim * head_dim
        end = -(-(offset[0] + shape[0]) // head_dim) * head_dim
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


class MetaWeights(ForeignWeights):
    """The weights of a model folder of Meta's, put together of the pieces in its files."""

    def __init__(self, place: Place, form: MetaForm, args: DecoderArgs) -> None:
        self._place, self._form, self._args = place, form, args
        pieces = check_meta_folder(place, form, args)
        self._cut, self._files = pieces.cut, [*pieces.files.values()]

    def read(self, name: str, shape: tuple[int, ...], offset: tuple[int, ...]) -> Tensor:
        box, copy = self._read(name, shape, offset), self._form.copy_of(name, self._args)
        if copy is not None and copy in self._cut:
            self._place.check(
                torch.equal(box, self._read(copy, shape, offset)),
                f"{copy} differs from {name}, but model.args.tie_embeddings says that they are one",
                "set model.args.tie_embeddings = false",
            )
        return box

    def _read(self, name: str, shape: tuple[int, ...], offset: tuple[int, ...]) -> Tensor:
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


def open_weights(
    initial: InitialWeights, family: Family, args: DecoderArgs
) -> ForeignWeights | CheckpointWeights:
    """Return the reader of `initial`, for a model of `family` with `args`.

    Raises:
        ConfigError: if they cannot be read.
    """
    place = initial.place
    match initial.kind:
        case "hf":
            return HuggingFaceWeights(place, family.hf, args)
        case "meta":
            return MetaWeights(place, meta_form(place, family), args)
        case "torchtitan":
            names = find_names(place, torchtitan_form(place, family), args)
            return CheckpointWeights(place, names.__getitem__)
        case "ours":
            return CheckpointWeights(place)


@contextmanager
def open_initial(config: Checkpoint) -> Iterator[InitialWeights]:
    """Give the folder to start from. The first rank chooses it.

    A checkpoint of ours is selected as for a resume, in a folder of several the newest good one,
    and held meanwhile. Other formats have no checksums. Collective: every rank must call it.

    Raises:
        ConfigError: on every rank, if there is none, or the one that is named is damaged, or all.
    """
    group = dist.new_group(backend="gloo", timeout=READING_TIMEOUT)
    try:
        with ExitStack() as held:
            initial = on_first_rank(partial(find_initial, config), group)
            if initial.manifest is not None:
                named = Place(LOAD_KEY, Path(config.initial_load_path))
                choice = select_on_ranks(partial(find_checkpoint, named), group, held)
                assert choice is not None  # `find_initial` has found one
                place = Place(LOAD_KEY, choice.path)
                initial = initial._replace(place=place, manifest=choice.manifest)
            yield initial
    finally:
        dist.destroy_process_group(group)
