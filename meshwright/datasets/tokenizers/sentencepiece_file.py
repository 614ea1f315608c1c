"""A `tokenizer.model` of sentencepiece."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import sentencepiece

from meshwright.datasets.tokenizers.special_tokens import well_formed

SPACE = "\u2581"  # a space in a piece


@dataclass(frozen=True)
class Settings:
    """How a sentencepiece model treats text. Source: sentencepiece_model.proto."""

    is_unigram: bool
    """Otherwise it is a BPE."""
    has_byte_fallback: bool
    charsmap: bytes
    """Characters to be replaced, in sentencepiece's own form."""
    has_dummy_prefix: bool
    """A space is put before a text."""
    drops_extra_spaces: bool


class SentencePieceTokenizer:
    """A sentencepiece model. Control tokens in text are just text to it."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        self.fingerprint = hashlib.sha256(content).hexdigest()[:16]
        self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
        self.vocab_size: int = self._model.vocab_size()
        self.bos_id = _id_or_none(self._model.bos_id())
        self.eos_id = _id_or_none(self._model.eos_id())
        self.unknown_id = _id_or_none(self._model.unk_id())
        self._content = content

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

    @property
    def pieces(self) -> list[tuple[str, float]]:
        """Each id's piece and score."""
        model = self._model
        return [(model.id_to_piece(i), model.get_score(i)) for i in range(self.vocab_size)]

    def is_usual(self, token_id: int) -> bool:
        """Return whether the piece is found in text as it stands: it is not special, nor of a
        byte."""
        model = self._model
        return not (
            model.is_control(token_id)
            or model.is_unknown(token_id)
            or model.is_byte(token_id)
            or model.is_unused(token_id)
        )

    @property
    def special_pieces(self) -> dict[int, str]:
        """Pieces that are never found in text, by id."""
        model = self._model
        return {
            i: model.id_to_piece(i)
            for i in range(self.vocab_size)
            if model.is_control(i) or model.is_unknown(i)
        }

    @cached_property
    def settings(self) -> Settings:
        """How the model treats text, as its file says.

        Raises:
            ValueError: if it is neither a unigram model nor a BPE.
        """
        from sentencepiece.sentencepiece_model_pb2 import ModelProto  # here: only exports need it

        model = ModelProto.FromString(self._content)
        trainer, normalizer = model.trainer_spec, model.normalizer_spec
        kind = trainer.model_type
        if kind not in (trainer.UNIGRAM, trainer.BPE):
            raise ValueError(f"it is a sentencepiece model of kind {kind}, not unigram or BPE")
        return Settings(
            is_unigram=kind == trainer.UNIGRAM,
            has_byte_fallback=trainer.byte_fallback,
            charsmap=normalizer.precompiled_charsmap,
            has_dummy_prefix=normalizer.add_dummy_prefix,
            drops_extra_spaces=normalizer.remove_extra_whitespaces,
        )

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(well_formed(text))
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._model.decode([i for i in ids if i < self.vocab_size])
        return text


def _id_or_none(token_id: int) -> int | None:
    return token_id if token_id >= 0 else None  # sentencepiece says -1 for a token it lacks
