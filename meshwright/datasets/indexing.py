"""The index of a file of tokens that stays where it lies, for a token cache."""

import zlib

import numpy as np
import numpy.typing as npt

from meshwright.datasets.token_cache import BLOCK_BYTES
from meshwright.datasets.token_files import FormatError, TokenFile
from meshwright.datasets.tokenizers.kinds import Tokenizer
from meshwright.errors import ConfigError

Array = npt.NDArray[np.generic]
ENOUGH_TOKENS = 64
"""Of which every second would not be 0 by chance."""


def index_tokens(file: TokenFile, tokenizer: Tokenizer) -> dict[str, Array]:
    """Read the file once: lengths of its documents, checksums, and bytes of text.

    Raises:
        FormatError: if it holds an id that the tokenizer has not, or no ends of documents, or if
            it has no header and looks like tokens of a wider type.
    """
    if file.lengths is None and tokenizer.eos_id is None:
        raise FormatError("its documents cannot be told apart: the tokenizer has no EOS")
    try:
        bytes_of = np.array(tokenizer.token_bytes)
    except ConfigError:  # this tokenizer does not tell; nothing but a line in the log needs it
        bytes_of = np.zeros(tokenizer.vocab_size, np.int64)
    checksums, ends, num_bytes, begin = list[int](), [np.empty(0, np.int64)], 0, 0
    may_be_halves = file.is_bare and file.num_tokens >= ENOUGH_TOKENS
    for tokens in file.chunks():
        if int(tokens.max()) >= tokenizer.vocab_size:
            where = begin + int(np.flatnonzero(tokens >= tokenizer.vocab_size)[0])
            raise FormatError(
                f"token {where} has id {int(tokens[where - begin])}, and the tokenizer has "
                f"{tokenizer.vocab_size}: it is of another tokenizer, or of another type"
            )
        may_be_halves = may_be_halves and not tokens[1::2].any()
        content = tokens.tobytes()
        checksums += [
            zlib.crc32(content[at : at + BLOCK_BYTES]) for at in range(0, len(content), BLOCK_BYTES)
        ]
        num_bytes += int(bytes_of[tokens].sum())
        if file.lengths is None:
            found = np.flatnonzero(tokens == tokenizer.eos_id) + begin
            ends.append(found if file.has_eos_first else found + 1)
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
    return {
        "lengths": lengths,
        "token_checksums": np.array(checksums, np.uint32),
        "num_bytes": np.int64(num_bytes),  # type: ignore[dict-item]  # an array of no dimension
    }
