"""Byte-level BPEs made of ranks: tiktoken's files, as Meta has them since 2024, and plain bytes."""

import base64
import binascii
from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from meshwright.datasets.tokenizers.special_tokens import TIKTOKEN_LINE

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Of Meta's files: no token reaches over the end of a match."""

NUM_SPECIALS = 256

NAMED_SPECIALS = (  # Meta's of July 2024; in April some were reserved still, under the same ids
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)


def special_tokens() -> list[str]:
    """Return the special tokens of Meta's files, in the order of their ids."""
    reserved = NUM_SPECIALS - len(NAMED_SPECIALS)  # 0, 1 and 2 are among the named
    return [*NAMED_SPECIALS, *(f"<|reserved_special_token_{3 + i}|>" for i in range(reserved))]


def of_tiktoken(content: bytes) -> tokenizers.Tokenizer:
    """Return the tokenizer of a file that has a line for each token: its base64 and its rank.

    Raises:
        ValueError: if the ranks are not 0, 1, 2 ..., or a byte has none.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        found = TIKTOKEN_LINE.fullmatch(line)
        try:
            token = base64.b64decode(found[1]) if found else b""
        except binascii.Error:
            token = b""
        if not found or not token:
            raise ValueError(f"line {number} is not a base64 token and its rank: {line[:40]!r}")
        if int(found[2]) != number - 1 or token in ranks:
            raise ValueError(f"line {number} gives rank {int(found[2])} to {token!r}, out of order")
        ranks[token] = number - 1
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"has no token for the byte 0x{missing[0]:02x}; is it cut off?")
    specials = dict(enumerate(special_tokens(), len(ranks)))
    return with_specials(of_ranks(ranks, SPLIT_PATTERN), specials, bos_id=len(ranks))


def of_ranks(ranks: Mapping[bytes, int], split_pattern: str | None) -> tokenizers.Tokenizer:
    """Return a byte-level BPE. With a pattern, no token reaches over the end of a match."""
    # the character that stands for each byte: GPT-2's table
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    names = [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
    named = {"".join(names[byte] for byte in token): rank for token, rank in ranks.items()}
    in_order = sorted(named, key=named.__getitem__)
    model = models.BPE(vocab=named, merges=merges(in_order, named), ignore_merges=True)
    made = tokenizers.Tokenizer(model)
    steps: list[Any] = []
    if split_pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split_pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    return made


def merges(pieces: Iterable[str], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return every pair of pieces that makes a piece, in the order in which pieces are
    preferred."""
    found = []
    for piece in pieces:
        splits = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        pairs = [pair for pair in splits if pair[0] in ids and pair[1] in ids]
        found += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return found


def with_specials(
    made: tokenizers.Tokenizer, specials: Mapping[int, str], bos_id: int | None
) -> tokenizers.Tokenizer:
    """Add special tokens, of which one begins a text.

    Raises:
        ValueError: if one would have another id.
    """
    in_order = [name for _, name in sorted(specials.items())]
    made.add_special_tokens([AddedToken(name, normalized=False) for name in in_order])
    for token_id, name in specials.items():
        if made.token_to_id(name) != token_id:
            raise ValueError(f"{name!r} would have the id {made.token_to_id(name)}, not {token_id}")
    if bos_id is not None:
        bos = specials[bos_id]
        made.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, bos_id)]
        )
    return made
