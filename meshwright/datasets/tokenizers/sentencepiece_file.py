"""A `tokenizer.model` of sentencepiece."""

import hashlib
from functools import cached_property
from pathlib import Path

import sentencepiece

from meshwright.datasets.tokenizers.special_tokens import well_formed

SPACE = "\u2581"  # a space in a piece


class SentencePieceTokenizer:
    """A sentencepiece model. Control tokens in text are just text to it."""

    def __init__(self, path: Path) -> None:
        self.content = path.read_bytes()
        self.fingerprint = hashlib.sha256(self.content).hexdigest()[:16]
        self._model = sentencepiece.SentencePieceProcessor(model_proto=self.content)
        self.vocab_size: int = self._model.vocab_size()
        self.bos_id = _id_or_none(self._model.bos_id())
        self.eos_id = _id_or_none(self._model.eos_id())

    @cached_property
    def token_bytes(self) -> list[int]:
        return [self._bytes_of(i) for i in range(self.vocab_size)]

    def _bytes_of(self, token_id: int) -> int:
        if self._model.is_byte(token_id):
            return 1
        # an unknown piece stands for a run of characters of any length, so for none in particular
        if self._model.is_control(token_id) or self._model.is_unknown(token_id):
            return 0
        piece: str = self._model.id_to_piece(token_id)
        return len(piece.replace(SPACE, " ").encode("utf-8"))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(well_formed(text))
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._model.decode([i for i in ids if i < self.vocab_size])
        return text


def _id_or_none(token_id: int) -> int | None:
    return token_id if token_id >= 0 else None  # sentencepiece says -1 for a token it lacks
