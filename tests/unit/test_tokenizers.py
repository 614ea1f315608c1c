"""Both kinds of tokenizer file behind one interface."""

import json
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meshwright.datasets.tokenizers import build_tokenizer

SHIPPED = Path(__file__).parents[2] / "assets" / "tokenizers" / "python_2k.model"
TEXT = 'def f(x):\n    """Grüße, 世界 <s>"""\n\treturn  x**2  # 1234\n'


def test_the_shipped_sentencepiece_model() -> None:
    tokenizer = build_tokenizer(str(SHIPPED))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (2048, 1, 2)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT  # nothing is unknown: bytes stand in for rare letters
    assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)  # "<s>" in text is just text
    reference = sentencepiece.SentencePieceProcessor(model_file=str(SHIPPED))
    assert ids == reference.encode(TEXT, add_bos=False, add_eos=False)
    assert len(ids) < 0.7 * len(TEXT.encode())


def test_bytes_need_no_file() -> None:
    tokenizer = build_tokenizer("bytes")
    ids = tokenizer.encode(TEXT)
    assert ids == list(TEXT.encode())
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id]) == TEXT
    assert max(*ids, tokenizer.bos_id, tokenizer.eos_id) < tokenizer.vocab_size


@pytest.fixture
def llama3_style(tmp_path: Path) -> Path:
    """A small byte-level BPE with Llama 3's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_tokenizer_json(llama3_style: Path) -> None:
    tokenizer = build_tokenizer(str(llama3_style))  # by its folder
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    size = Tokenizer.from_file(str(llama3_style / "tokenizer.json")).get_vocab_size()
    assert tokenizer.vocab_size == size > 256
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_special_tokens_are_those_that_the_config_names(llama3_style: Path) -> None:
    (llama3_style / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<|begin_of_text|>"}, "eos_token": "<|eot_id|>"})
    )
    tokenizer = build_tokenizer(str(llama3_style / "tokenizer.json"))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 2)
