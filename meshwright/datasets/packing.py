"""Documents to samples of equal length, without padding."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.datasets.sources import Documents
from meshwright.datasets.tokenizers import Tokenizer
from meshwright.errors import ConfigError


@dataclass(frozen=True)
class Cursor:
    """A place in the stream of samples, the same for every rank: all that a resume needs."""

    sample: int = 0
    """Samples before it, over all epochs."""
    epoch: int = 0
    document: int = 0
    """Position, in the epoch's order, of the document with the next token."""
    offset: int = 0
    """Tokens of that document, BOS and EOS included, that lie before."""


def pack(
    documents: Documents, tokenizer: Tokenizer, length: int, cursor: Cursor
) -> Iterator[tuple[list[int], Cursor]]:
    """Cut the endless stream BOS document EOS BOS document EOS ... into samples, from `cursor` on.

    Samples do not overlap, and no token is left out but the incomplete sample at the end of each
    epoch. Sample i depends on the arguments and i alone.

    Args:
        length: tokens a sample.

    Yields:
        `length` token ids, and the cursor behind them.

    Raises:
        ConfigError: if an epoch does not fill a single sample.
    """
    before = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    after = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    sample, epoch, start, offset = cursor.sample, cursor.epoch, cursor.document, cursor.offset
    while True:
        first_of_epoch = sample
        is_whole_epoch = start == 0 and offset == 0
        buffer: list[int] = []
        for document, text in enumerate(documents.read(epoch, start), start):
            tokens = before + tokenizer.encode(text) + after
            buffer += tokens[offset:]
            offset = 0
            # what was in the buffer before is less than a sample, so the first cut takes all of
            # it, and behind every cut the next token is one of this document
            cuts = len(buffer) // length
            for cut in range(cuts):
                left = len(buffer) - (cut + 1) * length
                sample += 1
                yield (
                    buffer[cut * length : (cut + 1) * length],
                    Cursor(sample, epoch, document, len(tokens) - left),
                )
            del buffer[: cuts * length]
        if is_whole_epoch and sample == first_of_epoch:
            raise ConfigError(
                "training.dataset",
                f"training.dataset: an epoch holds {len(buffer)} tokens, less than one sample of "
                f"{length}\n  fix: lower training.seq_len, or add data",
            )
        epoch, start, offset = epoch + 1, 0, 0
