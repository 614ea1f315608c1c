"""A `tokenizer.json` of Hugging Face, or a file that one is made of."""

import base64
import binascii
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from meshwright.datasets.tokenizers.special_tokens import (
    OWN,
    PATH_KEY,
    SPACE,
    TIKTOKEN_LINE,
    Ends,
    is_tiktoken,
    special_names,
    well_formed,
)
from meshwright.system.errors import ConfigError

# Read by `tokenizers` at each batch. Where it is not set, a batch of a single text starts a thread
# for each core; whoever tokenises in several processes has use for one in each.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

KNOWN_EOS = (
    "<|end_of_text|>",
    "</s>",
    "<|endoftext|>",
    "<eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)

SPEAK_FOR_THEMSELVES = {"Sequence", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
"""Decoders under which a piece is its text, with `SPACE` for a space and <0x0A> for a byte."""

WALL = "\ufdd2"
"""Mark within text that looks like a special token and is not. It has no token. Unicode keeps it,
as all noncharacters, for marks within a program."""


class HuggingFaceTokenizer:
    """A `tokenizer.json`, or a `tokenizer.model` of tiktoken.

    The file alone says which tokens stand around a document. BOS is the token that its own
    post-processor puts first, unless that is the EOS, which would separate documents twice. EOS is
    the token that it puts last, otherwise the first of `KNOWN_EOS` in the file; only if it has
    none, the token that a file beside it names. Added tokens that are not special are found in any
    text, as their families mean them to be.

    Args:
        ends: BOS and EOS that go before that.
    """

    def __init__(self, path: Path, ends: Ends = OWN) -> None:
        content = path.read_bytes()
        self.fingerprint = hashlib.sha256(content).hexdigest()[:16]
        self.made: str | None = None
        """Content of the tokenizer.json that the file was made, unless it is one."""
        if is_tiktoken(content):
            self.made = of_tiktoken(content).to_str(pretty=True)
        self._tokenizer = tokenizers.Tokenizer.from_str(self.made or content.decode("utf-8"))
        self._tokenizer.no_truncation()  # documents are cut by the packing alone
        self._tokenizer.no_padding()
        first, last = self._added()
        self._tokenizer.post_processor = None  # it adds tokens, or trims white space from places
        self.vocab_size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        names, by_config = special_names(path), "model.bos_token or model.eos_token names"
        if ends.bos is not None:
            first = self._id_of(ends.bos, by_config)
        if ends.eos is not None:
            last = self._id_of(ends.eos, by_config)
        elif last is None:
            last = self._find_eos(names.get("eos_token"))
        self.bos_id, self.eos_id = (None if first == last else first), last
        for name, token_id in (("bos_token", self.bos_id), ("eos_token", self.eos_id)):
            if token_id is not None:
                names.setdefault(name, self._make_special(token_id))
        self.special_names = {name: token for name, token in names.items() if token is not None}
        self.special_ids: dict[str, int] = {
            token.content: token_id
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        self._tokenizer.encode_special_tokens = True  # as text, that is
        self._steps: dict[str, Any] = json.loads(self._tokenizer.to_str())
        model = self._steps.pop("model")  # by far the largest part
        self._unknown, self._has_byte_pieces = model.get("unk_token"), model.get("byte_fallback")
        self._check_that_text_stays_text()

    def _added(self) -> tuple[int | None, int | None]:
        """Return the special tokens that the post-processor puts first and last, if it does."""
        whole = self._tokenizer.encode("a")
        added = [
            token_id if is_special else None
            for token_id, is_special in zip(whole.ids, whole.special_tokens_mask, strict=True)
        ]
        return (added[0], added[-1]) if None in added else (None, None)

    def _id_of(self, token: str | None, named: str) -> int | None:
        """Return the id of a token that something names; None for none."""
        token_id: int | None = self._tokenizer.token_to_id(token) if token else None
        if token and token_id is None:
            raise ValueError(f"lacks {token!r}, which {named}")
        return token_id

    def _find_eos(self, named: str | None) -> int | None:
        added = self._tokenizer.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special}
        known = [token for token in KNOWN_EOS if self._tokenizer.token_to_id(token) is not None]
        # "</s>" may be HTML to a tokenizer that has another EOS
        best = next((token for token in known if token in special), next(iter(known), named))
        return self._id_of(best, "a file beside it names as eos_token")

    def _make_special(self, token_id: int) -> str:
        """Return a token's name. Some files list it as an ordinary one, and so find it in text."""
        token = str(self._tokenizer.id_to_token(token_id))
        added = self._tokenizer.get_added_tokens_decoder().get(token_id)
        if added is None or not added.special:
            self._tokenizer.add_special_tokens([token])
        return token

    def _check_that_text_stays_text(self) -> None:
        """Some models (Unigram) take a special token for a piece like any other."""
        for token, token_id in self.special_ids.items():
            if token != self._unknown and token_id in self.encode(f"{token} a{token}"):
                raise ValueError(
                    f"makes the special token {token!r} of a text that merely contains it"
                    "\n  fix: use the sentencepiece tokenizer.model of the same family"
                )

    @cached_property
    def token_bytes(self) -> list[int]:
        decoders = _types(self._steps["decoder"])
        is_byte_level = "ByteLevel" in decoders
        if not is_byte_level and not (decoders and decoders <= SPEAK_FOR_THEMSELVES):
            raise ConfigError(
                PATH_KEY,
                f"{PATH_KEY}: the pieces of this tokenizer do not tell how many bytes of "
                f"text they stand for (decoder: {', '.join(sorted(decoders)) or 'none'})\n"
                "  fix: use a byte-level, byte-fallback or sentencepiece tokenizer",
            )
        sizes = [0] * self.vocab_size
        for piece, token_id in self._tokenizer.get_vocab(with_added_tokens=False).items():
            # of a byte-level piece, each character stands for a byte
            sizes[token_id] = len(piece) if is_byte_level else self._bytes_of(piece)
        for token_id, token in self._tokenizer.get_added_tokens_decoder().items():
            sizes[token_id] = 0 if token.special else len(token.content.encode("utf-8"))
        return sizes

    def _bytes_of(self, piece: str) -> int:
        if self._has_byte_pieces and len(piece) == 6 and piece.startswith("<0x"):
            return 1
        if piece == self._unknown:  # stands for text of any length
            return 0
        return len(piece.replace(SPACE, " ").encode("utf-8"))

    def encode(self, text: str) -> list[int]:
        # a batch of one: without the places of the tokens, which take a fifth of `encode`'s time
        [encoding] = self._tokenizer.encode_batch_fast(
            [well_formed(text)], add_special_tokens=False
        )
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def encode_chat(
        self, text: str, *, has_walls: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text with special tokens in it, and the part of it that each is of.
        A `WALL` stands within what looks like a special token and is text; with `has_walls` false
        it is a character like any other.

        Raises:
            ValueError: if there are walls, and the tokenizer looks for special tokens when they
                have fallen out.
        """
        parser = self._walled_parser if has_walls and WALL in text else self._parser
        encoding = parser.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    @cached_property
    def _parser(self) -> tokenizers.Tokenizer:
        """The same tokenizer, but it parses special tokens."""
        return tokenizers.Tokenizer.from_str(self._tokenizer.to_str())

    @cached_property
    def _walled_parser(self) -> tokenizers.Tokenizer:
        """The same, but it parses them first of all, and then the walls fall out."""
        normalizer = self._tokenizer.normalizer
        for token in self._steps["added_tokens"]:
            name = token["content"]
            is_late = token["special"] and token["normalized"]
            if is_late and normalizer and normalizer.normalize_str(name) != name:
                raise ValueError(
                    "contains a special token of the tokenizer as text, which this kind of "
                    "tokenizer cannot keep apart from the template's own"
                )
        content = json.loads(self._tokenizer.to_str())
        for token in content["added_tokens"]:
            token["normalized"] &= not token["special"]
        parser = tokenizers.Tokenizer.from_str(json.dumps(content))
        steps = [normalizers.Replace(WALL, ""), *([normalizer] if normalizer else [])]
        parser.normalizer = normalizers.Sequence(steps)
        return parser


def any_of(tokens: Collection[str]) -> str:
    """Return a pattern that matches each of `tokens`, the longest that fits."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return "|".join(map(re.escape, longest_first)) or r"(?!)"  # (?!): never


def _types(step: object) -> set[str]:
    """Return the types of a step, or of all the steps in it, as the JSON file describes it."""
    if isinstance(step, list):
        return set().union(*map(_types, step))
    if not isinstance(step, dict):
        return set()
    inside = [step.get(key) for key in ("normalizers", "pretokenizers", "decoders")]
    return {step["type"]} | _types(inside)


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
    specials = {token: token_id for token_id, token in enumerate(special_tokens(), len(ranks))}
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
    made: tokenizers.Tokenizer, specials: Mapping[str, int], bos_id: int | None
) -> tokenizers.Tokenizer:
    """Add special tokens, of which one begins a text.

    Raises:
        ValueError: if one would have another id.
    """
    in_order = sorted(specials, key=specials.__getitem__)
    made.add_special_tokens([AddedToken(name, normalized=False) for name in in_order])
    for name, token_id in specials.items():
        if made.token_to_id(name) != token_id:
            raise ValueError(f"{name!r} would have the id {made.token_to_id(name)}, not {token_id}")
    if bos_id is not None:
        bos = next(name for name, token_id in specials.items() if token_id == bos_id)
        made.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, bos_id)]
        )
    return made
