"""Files of tokens that others have made, read where they lie.

Megatron-LM's `.bin` with `.idx`, and shards of one array of tokens: `.npy` or `.bin`, with numpy's
header, with llm.c's (nanoGPT's successors, modded-nanogpt), or with none (OLMo, nanoGPT).
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshwright.datasets.files import Entry

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"


MEGATRON_DTYPES = {4: "<u4", 8: "<u2"}
"""Codes of int32 and uint16, Megatron's types of tokens; no id is negative."""


LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""Magic number and version of llm.c's headers; a header has 256 numbers of 32 bits."""


LLM_C_HEADER = 1024


NUMPY_MAGIC = b"\x93NUMPY"


CHUNK = 1 << 22
"""Tokens looked at together."""


Lengths = npt.NDArray[np.uint32]


class FormatError(ValueError):
    """A file has not the format that its name says."""


@dataclass(frozen=True)
class TokenFile:
    """Tokens from byte `offset` of a file to its end, and how documents are told apart."""

    path: Path
    offset: int
    dtype: str
    lengths: Lengths | None = None
    """Of the documents; None: each has one EOS,"""
    has_eos_first: bool = False
    """which is its first token, instead of its last."""
    is_bare: bool = False
    """It has no header to say of which type its tokens are."""

    @property
    def num_tokens(self) -> int:
        """To the end of the file."""
        return (self.path.stat().st_size - self.offset) // np.dtype(self.dtype).itemsize

    def chunks(self) -> Iterator[npt.NDArray[np.unsignedinteger]]:
        """Yield its tokens, `CHUNK` at a time."""
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            while content := file.read(CHUNK * np.dtype(self.dtype).itemsize):
                yield np.frombuffer(content, self.dtype)


class TokenFiles:
    """The files of a source, in the order of their names: in place of documents."""

    def __init__(self, entry: Entry, paths: Sequence[str]) -> None:
        self._entry, self._paths = entry, paths
        self.parts = len(paths)

    def open(self, vocab_size: int) -> list[TokenFile]:
        """Look at the head of every file.

        Args:
            vocab_size: of the tokenizer; files without a header are of the smallest unsigned type
                that holds it, as OLMo-core and nanoGPT have it.

        Raises:
            ConfigError: if one has another format, or another type than the first.
        """
        found = [self.open_one(number, vocab_size) for number in range(self.parts)]
        for file in found:
            if file.dtype != found[0].dtype:
                what = f"is of type {file.dtype}, and {found[0].path} of {found[0].dtype}"
                raise self.error(file.path, what)
        return found

    def open_one(self, number: int, vocab_size: int) -> TokenFile:
        """Look at the head of one file, as `open` does at all."""
        path = Path(self._paths[number])
        try:
            if self._entry.source.dataset == "megatron":
                return open_megatron(path)
            return open_array(path, "<u2" if vocab_size <= 1 << 16 else "<u4")
        except (FormatError, OSError) as error:
            raise self.error(path, str(error)) from None

    def error(self, path: Path, what: str) -> Exception:
        """That a file is at fault."""
        return self._entry.error("dataset_path", f"{path}: {what}")


def open_megatron(path: Path) -> TokenFile:
    """Open a `.bin` by the `.idx` beside it.

    Source: Megatron-LM, `megatron/core/datasets/indexed_dataset.py`. The index: 9 bytes of magic,
    version 1 (uint64), code of the type (uint8), number of sequences and of document boundaries
    (uint64 each), int32 length and int64 place of each sequence, int64 boundaries: the first
    sequence of each document, and the end.
    """
    index = path.with_suffix(".idx").read_bytes()
    head = struct.calcsize("<QBQQ")
    if not index.startswith(MEGATRON_MAGIC) or len(index) < 9 + head:
        raise FormatError(f"{path.with_suffix('.idx').name} is no index of Megatron's")
    version, code, num_sequences, num_bounds = struct.unpack_from("<QBQQ", index, 9)
    dtype = MEGATRON_DTYPES.get(code)
    if version != 1 or dtype is None:
        raise FormatError(f"its index has version {version} and type {code}, not 1 and 4 or 8")
    ends = np.cumsum([9 + head, 4 * num_sequences, 8 * num_sequences, 8 * num_bounds]).tolist()
    if len(index) < ends[-1] or num_bounds < 1:
        raise FormatError("its index is cut short")
    sizes = np.frombuffer(index, "<i4", num_sequences, ends[0]).astype(np.int64)
    places = np.frombuffer(index, "<i8", num_sequences, ends[1])
    bounds = np.frombuffer(index, "<i8", num_bounds, ends[2])
    starts = np.concatenate([[0], np.cumsum(sizes)])
    is_whole = (
        (sizes >= 0).all()
        and np.array_equal(places, starts[:-1] * np.dtype(dtype).itemsize)
        and path.stat().st_size == starts[-1] * np.dtype(dtype).itemsize
    )
    if not is_whole:
        raise FormatError("its index is of another file, or sequences do not follow each other")
    is_sorted = bounds[0] == 0 and bounds[-1] == num_sequences and (np.diff(bounds) >= 0).all()
    if not is_sorted:
        raise FormatError("its index has documents that are not its sequences, in their order")
    lengths = np.diff(starts[bounds])
    return TokenFile(path, 0, dtype, lengths[lengths > 0].astype(np.uint32))


def open_array(path: Path, bare: str) -> TokenFile:
    """Open a shard of one array by its header; `bare` is the type of one without.

    Source: numpy's format 1 to 3; llm.c, `dev/data/data_common.py` (documents begin with EOS).
    """
    with open(path, "rb") as file:
        head = file.read(LLM_C_HEADER)
        if head.startswith(NUMPY_MAGIC):
            file.seek(0)
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0
            if version != (1, 0):
                read = np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            names = {"<u2": "<u2", "<u4": "<u4", "<i4": "<u4"}
            if len(shape) != 1 or dtype.str not in names:
                raise FormatError(f"holds {dtype.str} of shape {shape}, not a row of u2, u4 or i4")
            found = TokenFile(path, file.tell(), names[dtype.str])
            if found.num_tokens != shape[0]:
                raise FormatError(f"has {found.num_tokens} tokens, and its header says {shape[0]}")
            return found
    if len(head) == LLM_C_HEADER:
        magic, version, count = struct.unpack_from("<iii", head)
        if kind := LLM_C.get((magic, version)):
            found = TokenFile(path, LLM_C_HEADER, kind, has_eos_first=True)
            if found.num_tokens != count:
                raise FormatError(f"has {found.num_tokens} tokens, and its header says {count}")
            return found
    if path.stat().st_size % np.dtype(bare).itemsize:
        raise FormatError(f"its size is no multiple of {np.dtype(bare).itemsize} bytes")
    return TokenFile(path, 0, bare, is_bare=True)
