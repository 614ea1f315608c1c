"""Text to token ids and back, whatever the tokenizer file."""

import hashlib
import json
from pathlib import Path
from typing import Protocol

import sentencepiece
import tokenizers

from meshwright.config.job_config import BYTES
from meshwright.errors import ConfigError

KEY = "model.tokenizer_path"
FILE_NAMES = ("tokenizer.json", "tokenizer.model")
KNOWN_BOS = ("<|begin_of_text|>", "<s>")
KNOWN_EOS = ("<|end_of_text|>", "</s>", "<|endoftext|>")


class Tokenizer(Protocol):
    """What the data and generation need of a tokenizer."""

    vocab_size: int
    """One more than the largest id."""
    bos_id: int | None
    """Token before every document; None if the family has none."""
    eos_id: int | None
    """Token after every document; None if the family has none."""
    fingerprint: str
    """Of the file: equal where ids mean the same."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text` alone, without BOS and EOS."""

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`."""


class SentencePieceTokenizer:
    """A sentencepiece model, as Llama 2 has it."""

    def __init__(self, path: Path) -> None:
        self.fingerprint = _fingerprint(path)
        self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        self.vocab_size: int = self._model.vocab_size()
        self.bos_id = _id_or_none(self._model.bos_id())
        self.eos_id = _id_or_none(self._model.eos_id())

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text)
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._model.decode(ids)
        return text


class HuggingFaceTokenizer:
    """A `tokenizer.json`, as Llama 3 has it.

    BOS and EOS are those that the `tokenizer_config.json` beside it names, else well-known ones.
    """

    def __init__(self, path: Path) -> None:
        self.fingerprint = _fingerprint(path)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self.vocab_size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        config_path = path.with_name("tokenizer_config.json")
        config = json.loads(config_path.read_text("utf-8")) if config_path.exists() else {}
        self.bos_id = self._special("bos_token", config, KNOWN_BOS)
        self.eos_id = self._special("eos_token", config, KNOWN_EOS)

    def _special(self, name: str, config: dict[str, object], known: tuple[str, ...]) -> int | None:
        named = config.get(name)
        if isinstance(named, dict):  # older files hold a description of the token
            named = named["content"]
        for token in [named] if isinstance(named, str) else known:
            token_id: int | None = self._tokenizer.token_to_id(token)
            if token_id is not None:
                return token_id
        return None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


class ByteTokenizer:
    """UTF-8 bytes, then BOS and EOS: needs no file."""

    vocab_size = 258
    bos_id: int | None = 256
    eos_id: int | None = 257
    fingerprint = BYTES

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def build_tokenizer(path: str) -> Tokenizer:
    """The tokenizer in the file `path`, or in the folder `path` under its usual name; or bytes.

    Raises:
        ConfigError: if there is none, or it cannot be read.
    """
    if not path:
        raise ConfigError(
            KEY,
            f"{KEY}: not given\n  fix: name a tokenizer.model, a tokenizer.json, or their folder; "
            f"or {BYTES!r}, which needs no file",
        )
    if path == BYTES:
        return ByteTokenizer()
    file = Path(path)
    if file.is_dir():
        inside = [file / name for name in FILE_NAMES if (file / name).is_file()]
        if not inside:
            raise ConfigError(KEY, f"{KEY} = {path!r}: holds no {' or '.join(FILE_NAMES)}")
        file = inside[0]
    if not file.is_file():
        raise ConfigError(KEY, f"{KEY} = {path!r}: no such file or folder")
    kind = HuggingFaceTokenizer if file.suffix == ".json" else SentencePieceTokenizer
    try:
        return kind(file)
    except Exception as error:  # tokenizers raises bare Exception, sentencepiece RuntimeError
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(KEY, f"{KEY} = {str(file)!r}: not a {kind.__name__}: {reason}") from error


def _fingerprint(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _id_or_none(token_id: int) -> int | None:
    return token_id if token_id >= 0 else None  # sentencepiece says -1 for a token it lacks
