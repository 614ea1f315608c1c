"""A `tokenizer.json` of Hugging Face."""

import hashlib
import json
import os
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from meshwright.datasets.tokenizers.special_tokens import (
    NAME_FILES,
    any_of,
    read_json_object,
    special_names,
    split_at_specials,
    well_formed,
)
from meshwright.system.errors import ConfigError

# Read by `tokenizers` at each batch. Where it is not set, a batch of a single text starts a thread
# for each core; whoever tokenises in several processes has use for one in each.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


KNOWN_BOS = ("<|begin_of_text|>", "<s>")


KNOWN_EOS = ("<|end_of_text|>", "</s>", "<|endoftext|>")


SPACE = "\u2581"  # a space in a piece of those kinds that are not byte-level


SPEAK_FOR_THEMSELVES = {"Sequence", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
"""Decoders under which a piece is its text, with `SPACE` for a space and <0x0A> for a byte."""


KNOW_NO_PLACE = {"Sequence", "Split", "Digits", "ByteLevel", "NFC", "NFD", "NFKC", "NFKD"}
"""Normalizers and pre-tokenizers that treat a text alike after a special token and at its start."""


class HuggingFaceTokenizer:
    """A `tokenizer.json`.

    BOS and EOS are named by the files beside it, otherwise well-known ones. BOS stands before a
    document only if `add_bos_token` in tokenizer_config.json says so, or without that key the
    file's own post-processor; and never if it is the EOS, which would separate documents twice.
    Added tokens that are not special are found in any text, as their families mean them to be.
    """

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        self.fingerprint = hashlib.sha256(content).hexdigest()[:16]
        self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        begins = self._tokenizer.encode("").ids[:1]
        _leave_text_alone(self._tokenizer)
        self.vocab_size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        names = special_names(path)
        named_bos = "bos_token" in names
        bos_id = self._find("bos_token", names, KNOWN_BOS)
        self.eos_id = self._find("eos_token", names, KNOWN_EOS)
        self._make_special([i for i in (bos_id, self.eos_id) if i is not None])
        said = read_json_object(path.with_name(NAME_FILES[0])).get("add_bos_token")
        is_added = said if isinstance(said, bool) else begins == [bos_id]
        self.bos_id = bos_id if is_added and bos_id != self.eos_id else None
        if self.bos_id is None and not named_bos:
            names.pop("bos_token", None)
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

    def _find(self, name: str, names: dict[str, str | None], known: tuple[str, ...]) -> int | None:
        """Return the id of BOS or EOS; puts a well-known one into `names`."""
        for token in [names[name]] if name in names else known:
            token_id: int | None = self._tokenizer.token_to_id(token) if token else None
            if token_id is not None:
                names[name] = token
                return token_id
        if names.get(name):
            raise ValueError(f"lacks {names[name]!r}, which a file beside it names as {name}")
        return None

    def _make_special(self, ids: list[int]) -> None:
        """Some files list BOS and EOS as ordinary tokens, and so would find them in text."""
        added = self._tokenizer.get_added_tokens_decoder()
        for token_id in ids:
            if token_id not in added or not added[token_id].special:
                self._tokenizer.add_special_tokens([self._tokenizer.id_to_token(token_id)])

    def _check_that_text_stays_text(self) -> None:
        """Some models (Unigram) take a special token for a piece like any other."""
        for token, token_id in self.special_ids.items():
            if token != self._unknown and token_id in self.encode(f"{token} a{token}"):
                raise ValueError(
                    f"makes the special token {token!r} of a text that merely contains it"
                    "\n  fix: use the sentencepiece tokenizer.model of the same family"
                )

    @property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in _types(self._steps["decoder"])

    @cached_property
    def token_bytes(self) -> list[int]:
        decoders = _types(self._steps["decoder"])
        if not self._is_byte_level and not (decoders and decoders <= SPEAK_FOR_THEMSELVES):
            raise ConfigError(
                "model.tokenizer_path",
                "model.tokenizer_path: the pieces of this tokenizer do not tell how many bytes of "
                f"text they stand for (decoder: {', '.join(sorted(decoders)) or 'none'})\n"
                "  fix: use a byte-level, byte-fallback or sentencepiece tokenizer",
            )
        sizes = [0] * self.vocab_size
        for piece, token_id in self._tokenizer.get_vocab(with_added_tokens=False).items():
            sizes[token_id] = self._bytes_of(piece)
        for token_id, token in self._tokenizer.get_added_tokens_decoder().items():
            sizes[token_id] = 0 if token.special else len(token.content.encode("utf-8"))
        return sizes

    def _bytes_of(self, piece: str) -> int:
        if self._is_byte_level:
            return len(piece)  # a character for each byte
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

    def encode_chat(self, text: str, breaks: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        if not breaks:
            encoding = self._parser.encode(text, add_special_tokens=False)
            return encoding.ids, encoding.offsets
        if not self._has_no_sense_of_place:
            raise ValueError(
                "contains a special token of the tokenizer as text, which this kind of tokenizer "
                "cannot keep apart from the template's own"
            )
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for start, end, is_special in split_at_specials(text, any_of(self.special_ids), breaks):
            if is_special:
                ids.append(self.special_ids[text[start:end]])
                spans.append((start, end))
            else:
                part = self._tokenizer.encode(text[start:end], add_special_tokens=False)
                ids += part.ids
                spans += [(start + a, start + b) for a, b in part.offsets]
        return ids, spans

    @cached_property
    def _parser(self) -> tokenizers.Tokenizer:
        """The same tokenizer, but it parses special tokens."""
        parser = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        _leave_text_alone(parser)
        return parser

    @cached_property
    def _has_no_sense_of_place(self) -> bool:
        """Whether the parts of a text between special tokens may be encoded one by one."""
        steps = [self._steps["normalizer"], self._steps["pre_tokenizer"]]
        plain = not any(
            token["lstrip"] or token["rstrip"] or token["single_word"]
            for token in self._steps["added_tokens"]
        )
        places = _types(steps) <= KNOW_NO_PLACE and '"add_prefix_space": true' not in json.dumps(
            steps
        )
        return plain and places


def _leave_text_alone(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.no_truncation()  # a file may ask for it; documents are cut by the packing alone
    tokenizer.no_padding()
    tokenizer.post_processor = None  # it adds tokens, or trims white space from places


def _types(step: object) -> set[str]:
    """Return the types of a step, or of all the steps in it, as the JSON file describes it."""
    if isinstance(step, list):
        return set().union(*map(_types, step))
    if not isinstance(step, dict):
        return set()
    inside = [step.get(key) for key in ("normalizers", "pretokenizers", "decoders")]
    return {step["type"]} | _types(inside)
