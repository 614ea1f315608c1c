"""Texts of a model in training, without a model."""

from types import SimpleNamespace

import pytest

from meshwright.config.training import Training, Validation
from meshwright.datasets.named_sources import check_sample_prompts
from meshwright.system.errors import ConfigError
from meshwright.train import sample_texts as parts
from meshwright.train.sample_texts import _continue

EOS = 9


def test_a_text_stays_ended_while_another_continues() -> None:
    chosen = iter([[EOS, 1], [2, 3], [4, EOS], [5, 6]])
    rows = [[0], [0, 0]]
    assert _continue(rows, lambda rows: next(chosen), 4, {EOS})
    assert rows == [[0], [0, 0, 1, 3]]
    assert next(chosen) == [5, 6]  # not asked for once all have ended


class _Words:
    """Puts spaces between tokens, as sentencepiece does: parts of a text do not join to it."""

    bos_id, eos_id = 0, EOS
    before, after = [0], [EOS]
    special_ids, special_names = {"<end>": 7}, {"eos_token": "<end>"}  # of a chat
    words = ("<s>", "one", "two", "three")

    def encode(self, text: str) -> list[int]:
        return [self.words.index(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(self.words[number] for number in ids)


def test_a_prompt_may_fill_a_sequence_with_its_tokens_and_is_written_once() -> None:
    """BOS, two words and three tokens."""
    validation = Validation(sample_prompts=["one two"], sample_tokens=3)
    check_sample_prompts(validation, _Words(), 6)
    with pytest.raises(ConfigError, match="its 3 tokens and validation.sample_tokens = 3"):
        check_sample_prompts(validation, _Words(), 5)
    validation = Validation(enable=True, sample_prompts=["one", "two", "one"], sample_tokens=1)
    with pytest.raises(ConfigError, match="sample_prompts.2.*is there already"):
        check_sample_prompts(validation, _Words(), 8)


def test_prompts_and_their_texts_are_decoded_together(monkeypatch) -> None:
    """After BOS, which is not shown; none if the job was asked to stop."""
    validation = Validation(sample_prompts=["one", "one two"], sample_tokens=2)
    config = SimpleNamespace(validation=validation, training=Training())
    plan = SimpleNamespace(config=config, tokenizer=_Words())
    seen, found = [], iter([[[2, 3], [3]], None])

    def continue_prompts(_: object, prompts: list[list[int]], *__: object, **options: object):
        seen.append((prompts, options["num_tokens"], options["stop"]))
        return next(found)

    monkeypatch.setattr(parts, "continue_prompts", continue_prompts)
    texts = [parts.write_texts(plan, None, None, lambda: False) for _ in range(2)]
    assert texts == [{"one": "one two three", "one two": "one two three"}, {}]
    assert seen == [([[0, 1], [0, 1, 2]], 2, {EOS, 7})] * 2
