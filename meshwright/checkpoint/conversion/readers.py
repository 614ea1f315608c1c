"""Reads a job's initial weights on any mesh: each rank reads its shards of a folder."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.checkpoint.conversion.hf_folder import check_tensors, find_tensors
from meshwright.checkpoint.conversion.initial_load import LOAD_KEY, InitialWeights, find_initial
from meshwright.checkpoint.conversion.stored import Slices, read_values
from meshwright.checkpoint.on_ranks import AllRanks
from meshwright.checkpoint.reader import CheckpointWeights, Piece, Put, Weights
from meshwright.checkpoint.store import open_checkpoint
from meshwright.config.job_config import Checkpoint
from meshwright.models.args import DecoderArgs
from meshwright.models.family import Family, ForeignTensor, HuggingFaceForm
from meshwright.models.table import DecoderSpec
from meshwright.parallelisms.initialize import fill_normal
from meshwright.parallelisms.shards import Box, local_box, part_of_box
from meshwright.system.files import NamedPath
from meshwright.system.log import logger


class HuggingFaceWeights(Weights):
    """The weights of a Hugging Face model directory."""

    def __init__(self, place: NamedPath, form: HuggingFaceForm, args: DecoderArgs) -> None:
        self._stored = find_tensors(place)
        self._foreign = check_tensors(place, form, args, self._stored)
        every = (part for one in self._stored.values() for part in (one, *one.parts))
        files = {tensor.file for tensor in every}
        try:  # they are mapped, not read
            self._open = {file: safe_open(file, framework="pt") for file in files}
        except (OSError, SafetensorError) as error:
            raise place.error(str(error)) from None

    def load(self, tensors: Mapping[str, Tensor], put: Put = Tensor.copy_) -> None:
        """As the base's. Tensors for which no family's files have a place stay as they are."""
        super().load({name: t for name, t in tensors.items() if name in self._foreign}, put)

    def pieces(self, name: str) -> Iterator[Piece]:
        foreign = self._foreign[name]
        if foreign.groups:
            yield from self._pieces_in_groups(foreign)
            return
        start = (0,) * len(foreign.shape)
        if not foreign.slices and not foreign.file_shape:
            yield Piece((start, foreign.shape), partial(self._read, foreign))
            return
        for number in range(foreign.shape[0]):  # one expert at a time
            read = partial(self._read_stacked, foreign, number)
            if foreign.slices:
                read = partial(self._read_expert, foreign.slices[number])
            yield Piece(((number, *start[1:]), (1, *foreign.shape[1:])), read)

    def _pieces_in_groups(self, foreign: ForeignTensor) -> Iterator[Piece]:
        rows, *columns = foreign.shape
        length = rows // foreign.groups
        for group in range(foreign.groups):
            box = (group * length, *(0 for _ in columns)), (length, *columns)
            yield Piece(box, partial(self._read_group, foreign, group))

    def _read_group(self, foreign: ForeignTensor, group: int, box: Box) -> Tensor:
        """Read a part of a group. All its rows are read, since a head's are in another order."""
        assert foreign.file_shape is not None
        rows, *columns = _slices(box)
        length, there = (n // foreign.groups for n in (foreign.shape[0], foreign.file_shape[0]))
        first = group * there + foreign.start
        ones = [slice(1)] * (len(foreign.file_shape) - len(foreign.shape))
        read = self._slice(foreign.name, (slice(first, first + length), *ones, *columns))
        read = read.flatten(1)
        if foreign.head_dim is not None:
            read = pairs(read, foreign.head_dim, foreign.rotated)
        return read[rows]

    def _read_expert(self, name: str, box: Box) -> Tensor:
        return self._slice(name, _slices(box)[1:]).unsqueeze(0)

    def _read(self, foreign: ForeignTensor, box: Box) -> Tensor:
        rows, *rest = _slices(box)
        head_dim = foreign.head_dim or 1
        # rows of a head lie in a different order, so heads are read whole
        first, end = rows.start // head_dim * head_dim, -(-rows.stop // head_dim) * head_dim
        read = self._slice(foreign.name, (slice(first, end), *rest))
        if foreign.head_dim is not None:
            read = pairs(read, foreign.head_dim, foreign.rotated)
        return read[rows.start - first : rows.stop - first]

    def _read_stacked(self, foreign: ForeignTensor, number: int, box: Box) -> Tensor:
        experts, (_, rows, *columns) = slice(number, number + 1), _slices(box)
        start, step = foreign.start, foreign.step
        there = slice(start + rows.start * step, start + (rows.stop - 1) * step + 1)
        if foreign.is_transposed:
            return self._slice(foreign.name, (experts, *columns, there)).mT[:, ::step]
        return self._slice(foreign.name, (experts, there, *columns))[:, ::step]

    def _slice(self, name: str, box: Slices) -> Tensor:
        return read_values(self._stored[name], self._open, box)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(*box, strict=True))


def own_part(whole: Tensor, foreign: ForeignTensor) -> Tensor:
    """Return the part of a tensor of the files that is one of ours, as a view; of rows in groups
    with a dimension more, the first, of the groups."""
    if not foreign.file_shape:
        return whole
    if foreign.groups:
        length = foreign.shape[0] // foreign.groups
        groups = whole.view(foreign.groups, -1, *foreign.shape[1:])
        return groups[:, foreign.start : foreign.start + length]
    view = whole.mT if foreign.is_transposed else whole
    return view[:, foreign.start :: foreign.step][:, : foreign.shape[1]]


def pairs(halves: Tensor, head_dim: int, rotated: int | None = None) -> Tensor:
    """Rows of whole heads, from their order for a rotation of (i, i + R/2) to (2i, 2i + 1).

    Args:
        rotated: R; None: all.
    """
    return _reordered(halves, head_dim, rotated or head_dim, (2, -1))


def halves(pairs: Tensor, head_dim: int, rotated: int | None = None) -> Tensor:
    """Return the inverse of `pairs`."""
    return _reordered(pairs, head_dim, rotated or head_dim, (-1, 2))


def _reordered(rows: Tensor, head_dim: int, rotated: int, sizes: tuple[int, int]) -> Tensor:
    """Transpose the first rows of each head, as a matrix of these sizes."""
    turned, others = rows.unflatten(0, (-1, head_dim)).tensor_split([rotated], 1)
    turned = turned.unflatten(1, sizes).transpose(1, 2).flatten(1, 2)
    return torch.cat([turned, others], 1).flatten(0, 1)


def open_weights(initial: InitialWeights, family: Family, args: DecoderArgs) -> Weights:
    """Return the reader of `initial`, for a model of `family` with `args`.

    Raises:
        ConfigError: if they can't be read.
    """
    place = initial.place
    match initial.kind:
        case "hf":
            return HuggingFaceWeights(place, family.hf, args)
        case "ours":
            return CheckpointWeights(place)


@contextmanager
def open_initial(config: Checkpoint, ranks: AllRanks) -> Iterator[InitialWeights]:
    """Give the folder to start from. The first rank chooses it.

    A checkpoint of ours is selected as for a resume, in a folder of several the newest good one,
    and held meanwhile. Other formats have no checksums. Collective.

    Raises:
        ConfigError: on every rank, if there is none, or the one that is named is damaged, or all.
    """
    initial = ranks.on_first(partial(find_initial, config))
    if initial.manifest is None:
        yield initial
        return
    named = NamedPath(LOAD_KEY, Path(config.initial_load_path))
    with open_checkpoint(named, logger.warning, readers=ranks) as choice:
        yield InitialWeights("ours", *choice)


@torch.no_grad()
def load_upcycled(
    dense: Weights, table: DecoderSpec, noise: float, seed: int, parameters: Mapping[str, Tensor]
) -> None:
    """Fill a model with experts, each a copy of its layer's dense feed-forward with noise.

    Routers are fresh, and their state stays as it is. The noise, as all that is fresh, depends on
    the seed, the parameter's name and the element's index only, so no mesh changes a bit. In
    addition to `parameters` there is one matrix of a feed-forward in memory. Not collective.

    Source: Komatsuzaki et al. 2022, arXiv:2212.05055.

    Args:
        dense: weights of the dense model.
        table: of the model with experts.
        noise: its deviation, as a share of that of fresh weights.
        parameters: plain or sharded, by their names in the plain model.

    Raises:
        ConfigError: as `dense.load` does.
    """
    names = [name for name in parameters if name not in table.state]
    new = [name for name in names if ".experts." in name or ".router." in name]
    dense.load({name: parameters[name] for name in names if name not in new})
    for name in new:
        shape, (local, offset) = tuple(parameters[name].shape), local_box(parameters[name])
        if not local.numel():
            continue
        is_copy, std = ".experts." in name, table.parameters[name].std
        assert std is not None
        fill_normal(local, std * (noise if is_copy else 1), seed, name, shape, offset)
        if is_copy:
            whole = torch.empty(shape[1:])
            dense.load({name.replace(".experts.", ".") + ".weight": whole})
            box = offset[1:], tuple(local.shape[1:])
            local.add_(part_of_box(whole, box).to(local.device))
