"""Files of tokens that others have made, read where they lie.

Megatron-LM's `.bin` with `.idx`, datatrove's `.ds` with `.ds.index`, and shards of one array of
tokens: `.npy` or `.bin`, with numpy's header, with llm.c's (nanoGPT's successors, modded-nanogpt),
or with none (OLMo, nanoGPT).
"""

import io
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.datasets.data_file import DataFile
from meshwright.datasets.files import SourceEntry, beside
from meshwright.datasets.ranges import RangeFile, open_file
from meshwright.datasets.storage import stat
from meshwright.datasets.token_parts import BLOCK_BYTES, Lengths, PartIndex
from meshwright.datasets.tokenizers.kinds import Tokenizer

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"

MEGATRON_DTYPES = {4: "<u4", 5: "<u8", 8: "<u2"}
"""Codes of int32, int64 and uint16, Megatron's types of tokens; no id is negative."""

LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""Magic number and version of llm.c's headers; a header has 256 numbers of 32 bits."""

LLM_C_HEADER = 1024

NUMPY_MAGIC = b"\x93NUMPY"

NUMPY_DTYPES = {"<u2": "<u2", "<u4": "<u4", "<i4": "<u4", "<u8": "<u8", "<i8": "<u8"}
"""No id is negative: as a signed number, one would be larger than any vocabulary."""

MOST_NUMPY_HEADER = 1 << 16
"""Bytes. numpy writes 128; other programs leave room for a longer one."""

CHUNK = 1 << 23
"""Bytes looked at together."""

ENOUGH_TOKENS = 64
"""Of which every second wouldn't be 0 by chance."""


class FormatError(ValueError):
    """A file hasn't the format that its name says."""


@dataclass(frozen=True)
class TokenFile:
    """Tokens from byte `offset` of a file to its end, and how documents are told apart."""

    file: RangeFile
    size: int
    """Bytes of the file."""
    offset: int
    dtype: str
    lengths: Lengths | None = None
    """Of the documents; None: each has one EOS,"""
    has_eos_first: bool = False
    """which is its first token, instead of its last."""

    @property
    def num_tokens(self) -> int:
        """To the end of the file."""
        return (self.size - self.offset) // np.dtype(self.dtype).itemsize

    def chunks(self) -> Iterator[npt.NDArray[np.unsignedinteger]]:
        """Yield its tokens, `CHUNK` bytes at a time."""
        for begin in range(self.offset, self.size, CHUNK):
            content = self.file.read(begin, min(CHUNK, self.size - begin))
            if len(content) < min(CHUNK, self.size - begin):
                raise FormatError("has become shorter while it was read")
            yield np.frombuffer(content, self.dtype)


class TokenFiles:
    """The files of a source, in the order of their names: in place of documents."""

    def __init__(self, entry: SourceEntry, files: Sequence[DataFile]) -> None:
        self._entry, self.files = entry, files
        self.unused = Counter[str]()
        """Empty: as `Documents.unused`, and tokens have no columns."""

    def index(self, number: int, tokenizer: Tokenizer) -> PartIndex:
        """Read one file. One without a header is of the smallest unsigned type that holds the
        vocabulary, as OLMo-core and nanoGPT have it.

        Raises:
            ConfigError: if it has a different format, or holds tokens of a different tokenizer.
        """
        data_file = self.files[number]
        bare = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
        try:
            if self._entry.source.dataset == "megatron":
                file = open_megatron(data_file)
            elif data_file.path.endswith(".ds"):
                file = open_datatrove(data_file, bare)
            else:
                file = open_array(data_file, bare)
            return index_tokens(file, tokenizer)
        except (FormatError, OSError) as error:
            raise self._entry.error("dataset_path", f"{data_file.path}: {error}") from error


def open_megatron(data_file: DataFile) -> TokenFile:
    """Open a `.bin` by the `.idx` next to it.

    Source: Megatron-LM, `megatron/core/datasets/indexed_dataset.py`. The index: 9 bytes of magic,
    version 1 (uint64), code of the type (uint8), number of sequences and of document boundaries
    (uint64 each), int32 length and int64 place of each sequence, int64 boundaries: the first
    sequence of each document, and the end.
    """
    name = beside(data_file.path, ".idx")
    index = _whole(name)
    head = struct.calcsize("<QBQQ")
    if not index.startswith(MEGATRON_MAGIC) or len(index) < 9 + head:
        raise FormatError(f"{name.rpartition('/')[2]} is no index of Megatron's")
    version, code, num_sequences, num_bounds = struct.unpack_from("<QBQQ", index, 9)
    dtype = MEGATRON_DTYPES.get(code)
    if version != 1 or dtype is None:
        raise FormatError(f"its index has version {version} and type {code}, not 1 and 4, 5 or 8")
    ends = np.cumsum([9 + head, 4 * num_sequences, 8 * num_sequences, 8 * num_bounds]).tolist()
    if len(index) < ends[-1] or num_bounds < 1:
        raise FormatError("its index is cut short")
    sizes = np.frombuffer(index, "<i4", num_sequences, ends[0]).astype(np.int64)
    places = np.frombuffer(index, "<i8", num_sequences, ends[1])
    bounds = np.frombuffer(index, "<i8", num_bounds, ends[2])
    starts = np.concatenate([[0], np.cumsum(sizes)])
    item = np.dtype(dtype).itemsize
    is_of_file = np.array_equal(places, starts[:-1] * item) and data_file.size == starts[-1] * item
    if not (is_of_file and (sizes >= 0).all()):
        raise FormatError("its index is of a different file, or sequences do not follow each other")
    is_sorted = bounds[0] == 0 and bounds[-1] == num_sequences and (np.diff(bounds) >= 0).all()
    if not is_sorted:
        raise FormatError("its index has documents that are not its sequences, in their order")
    return _of_documents(data_file, dtype, np.diff(starts[bounds]))


def open_datatrove(data_file: DataFile, bare: str) -> TokenFile:
    """Open a `.ds` by the index next to it; `bare` is the type if there is none.

    Source: datatrove, `pipeline/tokens/tokenizer.py`. The index: the end of each document, in
    tokens, as uint64.
    """
    try:
        index = _whole(f"{data_file.path}.index")
    except FileNotFoundError:
        return open_array(data_file, bare)
    if len(index) % 8 or not index:
        raise FormatError("its index is cut short")
    ends = np.frombuffer(index, "<u8").astype(np.int64)
    if (np.diff(ends, prepend=0) < 0).any() or ends[-1] < 1:
        raise FormatError("its index has documents that do not follow each other")
    size, rest = divmod(data_file.size, int(ends[-1]))
    if rest or size not in (2, 4):
        raise FormatError(f"its index is of a different file: it ends at token {ends[-1]:,}")
    return _of_documents(data_file, f"<u{size}", np.diff(ends, prepend=0))


def _of_documents(data_file: DataFile, dtype: str, lengths: npt.NDArray[np.int64]) -> TokenFile:
    if lengths.max(initial=0) >= 1 << 32:
        raise FormatError("has a document of 2^32 tokens or more")
    of_documents = lengths[lengths > 0].astype(np.uint32)
    return TokenFile(RangeFile(data_file.path), data_file.size, 0, dtype, of_documents)


def _whole(path: str) -> bytes:
    with open_file(stat(path)) as file:
        return file.read()


def open_array(data_file: DataFile, bare: str) -> TokenFile:
    """Open a shard of one array by its header; `bare` is the type of one without.

    Source: numpy's format 1 to 3; llm.c, `dev/data/data_common.py` (documents start with EOS).
    """
    file = RangeFile(data_file.path)
    head = file.read(0, LLM_C_HEADER)
    if head.startswith(NUMPY_MAGIC):
        shape, dtype, offset = _numpy_header(file.read(0, MOST_NUMPY_HEADER))
        if len(shape) != 1 or dtype not in NUMPY_DTYPES:
            kinds = "u2, u4, i4, u8 or i8"
            raise FormatError(f"holds {dtype} of shape {shape}, not a row of {kinds}")
        opened = TokenFile(file, data_file.size, offset, NUMPY_DTYPES[dtype])
        return _with_count(opened, shape[0])
    if len(head) == LLM_C_HEADER:
        magic, version, count = struct.unpack_from("<iii", head)
        if kind := LLM_C.get((magic, version)):
            opened = TokenFile(file, data_file.size, LLM_C_HEADER, kind, has_eos_first=True)
            return _with_count(opened, count)
    if data_file.size % np.dtype(bare).itemsize:
        raise FormatError(f"its size is no multiple of {np.dtype(bare).itemsize} bytes")
    return TokenFile(file, data_file.size, 0, bare)


def _numpy_header(head: bytes) -> tuple[tuple[int, ...], str, int]:
    """Return the shape, the type and where the array starts."""
    header, stream = np.lib.format, io.BytesIO(head)
    try:
        is_first = header.read_magic(stream) == (1, 0)
        read = header.read_array_header_1_0 if is_first else header.read_array_header_2_0
        shape, _, dtype = read(stream)
    except ValueError as error:
        raise FormatError(f"its header is damaged: {error}") from error
    return shape, dtype.str, stream.tell()


def _with_count(opened: TokenFile, count: int) -> TokenFile:
    size = opened.offset + count * np.dtype(opened.dtype).itemsize
    if opened.size != size:
        raise FormatError(f"has {opened.size:,} bytes, and its header says {size:,}")
    return opened


def index_tokens(file: TokenFile, tokenizer: Tokenizer) -> PartIndex:
    """Read the file once, and return it as a part of a cache.

    Raises:
        FormatError: if it holds an id that the tokenizer hasn't, or no ends of documents, or if
            it has no header and looks like tokens of a wider type.
    """
    if file.lengths is None and tokenizer.eos_id is None:
        raise FormatError("its documents cannot be told apart: the tokenizer has no EOS")
    # where a tokenizer doesn't tell, nothing but a line in the log needs them
    bytes_of = np.array(tokenizer.token_bytes or [0] * tokenizer.vocab_size)
    checksums, ends, num_bytes, begin = list[int](), [np.empty(0, np.int64)], 0, 0
    is_bare = file.offset == 0 and file.lengths is None  # nothing says of which type they are
    may_be_halves = is_bare and file.num_tokens >= ENOUGH_TOKENS
    for tokens in file.chunks():
        if int(tokens.max()) >= tokenizer.vocab_size:
            where = begin + int(np.flatnonzero(tokens >= tokenizer.vocab_size)[0])
            raise FormatError(
                f"token {where} has id {int(tokens[where - begin])}, and the tokenizer has "
                f"{tokenizer.vocab_size}: it is of a different tokenizer, or of a different type"
            )
        may_be_halves = may_be_halves and not tokens[1::2].any()
        content = tokens.tobytes()
        checksums += [
            zlib.crc32(content[at : at + BLOCK_BYTES]) for at in range(0, len(content), BLOCK_BYTES)
        ]
        num_bytes += int(bytes_of[tokens].sum())
        if file.lengths is None:
            eos_at = np.flatnonzero(tokens == tokenizer.eos_id) + begin
            ends.append(eos_at if file.has_eos_first else eos_at + 1)
        begin += len(tokens)
    if may_be_halves:
        raise FormatError(
            f"every second token is 0: they are wider than {np.dtype(file.dtype).name}, which the "
            "tokenizer's vocabulary stands for where there is no header; convert it, or np.save it"
        )
    lengths = file.lengths
    if lengths is None:
        bounds = np.unique(np.concatenate([[0], *ends, [begin]]))
        lengths = np.diff(bounds).astype(np.uint32)
    of_blocks = np.array(checksums, np.uint32)
    return PartIndex(lengths, of_blocks, num_bytes, file.dtype, file.offset, file.file.stamp)
