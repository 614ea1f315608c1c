"""A `tokenizer.json` of Hugging Face."""

import hashlib
import json
import os
import re
from collections.abc import Collection
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers, pre_tokenizers

from meshwright.datasets.tokenizers import json_file
from meshwright.datasets.tokenizers.special_tokens import (
    OWN,
    PATH_KEY,
    SPACE,
    TokenizerKeys,
    special_names,
    well_formed,
)
from meshwright.system.errors import RecordError, first_line

# Read by `tokenizers` at each batch. Where it isn't set, a batch of a single text starts a thread
# for each core; whoever tokenizes in several processes has use for one in each.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

KNOWN_EOS = (
    "<|end_of_text|>",
    "</s>",
    "<|endoftext|>",
    "<eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<EOS>",
    "[EOS]",
    "[SEP]",
)

SPEAK_FOR_THEMSELVES = {"Sequence", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
"""Decoders under which a piece is its text, with `SPACE` for a space and <0x0A> for a byte."""

WALL = "\ufdd2"
"""Mark within text that looks like a special token and isn't. It has no token. Unicode keeps it,
as all noncharacters, for marks within a program."""


class HuggingFaceTokenizer:
    """A `tokenizer.json`.

    `before` has the tokens that the file's own post-processor puts before a text, without the EOS,
    which would separate documents twice. EOS is the token that it puts last, otherwise a well-known
    one in the file: of several, the one in a file next to it as `eos_token`, else the first
    of `KNOWN_EOS`. Only if it has none, any token in a file next to it. Added tokens that
    aren't special are found in any text, as their families mean them to be.

    Args:
        ends: BOS and EOS that go before that.
    """

    def __init__(self, path: Path, ends: TokenizerKeys = OWN) -> None:
        content = path.read_bytes()
        self._tokenizer, raw, self.made = json_file.load(content)
        """`made` is the content of the tokenizer.json that is read instead of the file."""
        known = self.made.encode() if self.made else content
        self.fingerprint = hashlib.sha256(known).hexdigest()[:16]
        self.before, self.after = json_file.around_document(raw)
        self._tokenizer.post_processor = None  # it adds tokens, or trims white space from places
        ids = {*self._tokenizer.get_vocab(with_added_tokens=True).values()}
        if unknown := {*self.before, *self.after} - ids:
            raise ValueError(f"its post-processor adds the id {min(unknown)}, which no token has")
        self.vocab_size: int = max(ids) + 1
        names, by_config = special_names(path), "model.bos_token or model.eos_token names"
        if ends.bos is not None:
            self.before = self._ids_of(ends.bos, by_config)
        if ends.eos is not None:
            self.after = self._ids_of(ends.eos, by_config)
        elif not self.after:
            self.after = self._find_eos(names.get("eos_token"))
        self.before = [token_id for token_id in self.before if token_id not in self.after]
        self.bos_id = self.before[0] if self.before else None
        self.eos_id = self.after[-1] if self.after else None
        # others would add a token that the vocabulary lacks, with an id that the model lacks
        names = {name: it for name, it in names.items() if it is None or self.has_token(it)}
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
        self._decoder, self._unknown = raw.get("decoder"), _unknown_of(raw["model"])
        self._has_byte_pieces = bool(raw["model"].get("byte_fallback"))
        self.loses_text = not _has_every_byte(raw)
        self._found_in_text = self._specials_found_in_text()
        self._encoder = self._tokenizer
        if self._found_in_text:
            self._encoder = self._without_pieces(raw, self._found_in_text)

    def _ids_of(self, token: str | None, named: str) -> list[int]:
        """Return the id of a token that something names; none for none."""
        token_id: int | None = self._tokenizer.token_to_id(token) if token else None
        if token and token_id is None:
            raise ValueError(f"lacks {token!r}, which {named}")
        return [] if token_id is None else [token_id]

    def has_token(self, token: str) -> bool:
        """Return whether there is a token of this text, special or not."""
        return self._tokenizer.token_to_id(token) is not None

    def _find_eos(self, named: str | None) -> list[int]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special}
        known = [token for token in KNOWN_EOS if self._tokenizer.token_to_id(token) is not None]
        # "</s>" may be HTML to a tokenizer that has a different EOS
        known = [token for token in known if token in special] or known
        best = named if named in known or not known else known[0]
        return self._ids_of(best, "a file next to it names as eos_token")

    def _make_special(self, token_id: int) -> str:
        """Return a token's name. Some files list it as an ordinary one, and so find it in text."""
        token = str(self._tokenizer.id_to_token(token_id))
        added = self._tokenizer.get_added_tokens_decoder().get(token_id)
        if added is None or not added.special:
            self._tokenizer.add_special_tokens([token])
        return token

    def _specials_found_in_text(self) -> list[str]:
        """Return the special tokens that the model takes for pieces of text like any other: word
        models and Unigram do, where they are in its vocabulary."""
        found = []
        for token, token_id in self.special_ids.items():
            for text in (token, f"{token} a{token}"):
                with suppress(RecordError):  # a text that the model has no pieces for
                    if token != self._unknown and token_id in _encode(self._tokenizer, text):
                        found.append(token)
        return list(dict.fromkeys(found))

    def _without_pieces(self, raw: dict[str, Any], names: list[str]) -> tokenizers.Tokenizer:
        """Return the tokenizer for text: `names` are no pieces of its model, and so are text."""
        encoder = tokenizers.Tokenizer.from_str(json.dumps(json_file.without_pieces(raw, names)))
        encoder.post_processor, encoder.encode_special_tokens = None, True
        for token_id, token in self._tokenizer.get_added_tokens_decoder().items():
            if not token.special and encoder.token_to_id(token.content) != token_id:
                raise ValueError(
                    f"makes the special token {names[0]!r} of a text that merely contains it"
                )
        return encoder

    @cached_property
    def token_bytes(self) -> list[int] | None:
        decoders = _types(self._decoder)
        is_byte_level = "ByteLevel" in decoders
        if not is_byte_level and not (decoders and decoders <= SPEAK_FOR_THEMSELVES):
            return None
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
        return _encode(self._encoder, well_formed(text))

    def count_lost(self, text: str) -> tuple[int, int]:
        """Return how many characters of `text`, apart from white space, have no token but the
        unknown one, and how many there are."""
        encoding = self._encoder.encode(well_formed(text), add_special_tokens=False)
        unknown = None if self._unknown is None else self._encoder.token_to_id(self._unknown)
        spans = zip(encoding.ids, encoding.offsets, strict=True)
        kept = {i for token_id, span in spans if token_id != unknown for i in range(*span)}
        characters = [i for i, character in enumerate(text) if not character.isspace()]
        return sum(i not in kept for i in characters), len(characters)

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
            RecordError: if the model has no pieces for it and no unknown token.
        """
        parser = self._walled_parser if has_walls and WALL in text else self._parser
        try:
            encoding = parser.encode(text, add_special_tokens=False)
        except Exception as error:  # the library raises bare ones
            raise _cannot_encode(text, error) from error
        return encoding.ids, encoding.offsets

    @cached_property
    def _parser(self) -> tokenizers.Tokenizer:
        """The same tokenizer, but it parses special tokens."""
        return tokenizers.Tokenizer.from_str(self._tokenizer.to_str())

    @cached_property
    def _walled_parser(self) -> tokenizers.Tokenizer:
        """The same, but it parses them first of all, and then the walls fall out."""
        normalizer = self._tokenizer.normalizer
        for token in self._tokenizer.get_added_tokens_decoder().values():
            name, is_late = token.content, token.special and token.normalized
            is_late = is_late and normalizer and normalizer.normalize_str(name) != name
            if is_late or name in self._found_in_text:
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


def _encode(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    """Return the ids of `text`.

    Raises:
        RecordError: if the model has no pieces for it and no unknown token.
    """
    try:
        # a batch of one: without the places of the tokens, which take a fifth of `encode`'s time
        [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    except Exception as error:  # as above
        raise _cannot_encode(text, error) from error
    ids: list[int] = encoding.ids
    return ids


def _cannot_encode(text: str, error: Exception) -> RecordError:
    what = f"fails on a text that starts with {text[:40]!r}: {first_line(error)}"
    return RecordError(PATH_KEY, f"{PATH_KEY}: the tokenizer {what}")


def _unknown_of(model: dict[str, Any]) -> str | None:
    """Return the token that stands for text that a model has no pieces for."""
    number = model.get("unk_id")  # Unigram's, into a list of pieces and scores
    return model.get("unk_token") if number is None else model["vocab"][number][0]


def _has_every_byte(raw: dict[str, Any]) -> bool:
    """Return whether the model has a piece for each byte, and so a token for any text."""
    pieces = json_file.pieces_of(raw)
    if "ByteLevel" in _types([raw.get("pre_tokenizer"), raw.get("normalizer")]):
        return all(character in pieces for character in pre_tokenizers.ByteLevel.alphabet())
    has_bytes = raw["model"].get("byte_fallback")
    return bool(has_bytes) and all(f"<0x{byte:02X}>" in pieces for byte in range(256))


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
