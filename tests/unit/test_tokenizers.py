"""Every kind of tokenizer file behind one interface, held against its family's library."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from meshwright.config.section import BYTES
from meshwright.datasets.tokenizers.chat import ChatTemplate
from meshwright.datasets.tokenizers.kinds import build_tokenizer, end_of_chat, prompt_tokens
from meshwright.datasets.tokenizers.special_tokens import TokenizerKeys
from meshwright.system.errors import ConfigError, RecordError
from tests.helpers.tokenizer_files import (
    CODE,
    HARD_TEXTS,
    byte_level_json,
    metaspace_json,
    random_texts,
    sentencepiece_model,
)

SHIPPED = Path(__file__).parents[2] / "assets" / "tokenizers" / "python_2k.model"
LLAMA3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
TEXTS = HARD_TEXTS + random_texts()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of each kind."""
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        "byte-level": byte_level_json(folder / "tokenizer.json", LLAMA3),
        "metaspace": metaspace_json(folder / "metaspace.json", ["<unk>", "<s>", "</s>"]),
        "sentencepiece": sentencepiece_model(folder / "sentencepiece.model"),
        "bytes": Path("bytes"),
    }


KINDS = ("byte-level", "metaspace", "sentencepiece", "bytes")
BYTE_LEVEL = ("byte-level", "bytes")


def test_the_shipped_sentencepiece_model() -> None:
    tokenizer = build_tokenizer(str(SHIPPED))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (2048, 1, 2)
    ids = tokenizer.encode(CODE)
    assert tokenizer.decode(ids) == CODE  # nothing is unknown: bytes stand in for rare letters
    assert len(ids) < 0.8 * len(CODE.encode())
    for text in [CODE, "世界", "x", "    \n\n"]:
        assert num_bytes(tokenizer, text) == len(text.encode()) + 1, text


@pytest.mark.parametrize("kind", KINDS)
def test_ids_beyond_the_vocabulary_have_no_text(kind: str, files: dict[str, Path]) -> None:
    """A model whose vocabulary is larger, to be cut evenly, may choose one."""
    tokenizer = build_tokenizer(str(files[kind]))
    ids = tokenizer.encode("def f")
    assert tokenizer.decode([*ids, tokenizer.vocab_size]) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_a_tokenizer_json_gives_the_ids_of_transformers(files: dict[str, Path], kind: str) -> None:
    ours = build_tokenizer(str(files[kind]))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(files[kind]))
    for text in TEXTS:  # transformers would parse special tokens: there are none in these
        expected = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ours.encode(text) == expected, text


def test_a_sentencepiece_model_gives_the_ids_of_its_library(files: dict[str, Path]) -> None:
    ours = build_tokenizer(str(files["sentencepiece"]))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(files["sentencepiece"]))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
    # as chat templates know them
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert ours.special_names == names


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_in_text_are_text(files: dict[str, Path], kind: str) -> None:
    tokenizer = build_tokenizer(str(files[kind]))
    specials = {tokenizer.bos_id, tokenizer.eos_id, *getattr(tokenizer, "special_ids", {}).values()}
    for token in [*LLAMA3, "<s>", "</s>", "<unk>"]:
        for text in (token, f"a{token}b", f"a {token} b", f"{token}{token}\n"):
            ids = tokenizer.encode(text)
            assert not specials & set(ids), text
            assert tokenizer.decode(ids).strip() == text.strip()


def test_bos_and_eos_are_special_whatever_the_file_says(tmp_path: Path) -> None:
    file = byte_level_json(tmp_path / "tokenizer.json", ["<|pad|>"])
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_tokens([AddedToken("<|end_of_text|>", special=False), "<tool>"])
    tokenizer.save(str(file))
    ours = build_tokenizer(str(file))
    assert ours.eos_id is not None
    assert ours.eos_id not in ours.encode("a <|end_of_text|>")
    assert tokenizer.token_to_id("<tool>") in ours.encode("a <tool>")  # no special token


def word_json(file: Path, words: list[str], unknown: str | None, specials: list[str]) -> Path:
    """A tokenizer of whole words, as research code makes them."""
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=unknown or "[none]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(file))
    return file


def test_special_tokens_that_a_model_has_as_pieces_are_text_in_a_text(tmp_path: Path) -> None:
    """Unigram models and models of whole words take them for pieces like any other."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((c, -3.0) for c in "▁a</s>")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = build_tokenizer(str(tmp_path))
    assert ours.encode("a </s>a") == [2, 3, 2, *(4, 5, 6, 7), 3]
    assert ours.eos_id == 1
    assert ours.decode([1]) == "</s>"
    words = word_json(tmp_path / "words.json", ["[UNK]", "[EOS]", "one"], "[UNK]", ["[EOS]"])
    assert build_tokenizer(str(words)).encode("one [EOS] one") == [2, 0, 2]


def test_a_word_without_a_piece_and_without_an_unknown_token_is_a_bad_record(tmp_path) -> None:
    tokenizer = build_tokenizer(str(word_json(tmp_path / "t.json", ["1", "2"], None, ["[EOS]"])))
    assert tokenizer.encode("1 2") == [0, 1]  # though it has no "a"
    with pytest.raises(RecordError, match="the tokenizer fails on a text that starts with '1 b'"):
        tokenizer.encode("1 b")


def with_settings(folder: Path, **settings: object) -> Any:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return build_tokenizer(str(folder))


def test_a_conversation_or_a_prompt_without_a_piece_is_an_error_of_its_own(tmp_path) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    ours = build_tokenizer(str(tmp_path))
    chat = ChatTemplate(ours, "{% for m in messages %}{{ m.content }} {% endfor %}")
    with pytest.raises(RecordError, match=r"a.jsonl:7: the conversation .* fails on a text that"):
        chat.encode([{"role": "assistant", "content": "other"}], "a.jsonl:7")
    with pytest.raises(RecordError, match="fails on a text that starts with 'other'"):
        prompt_tokens(ours, "other")


def test_tokens_around_a_document_do_not_depend_on_files_beside(tmp_path: Path) -> None:
    """`hf download REPOSITORY tokenizer.json` gives the ids of the whole folder."""
    file = byte_level_json(tmp_path / "tokenizer.json", LLAMA3)
    alone = build_tokenizer(str(file))
    bos, eos, turn = (alone.special_ids[token] for token in (*LLAMA3[:2], "<|eot_id|>"))
    assert (alone.bos_id, alone.eos_id) == (bos, eos)  # as its post-processor and its names say
    for settings in (
        {"bos_token": LLAMA3[0], "eos_token": "<|eot_id|>", "add_bos_token": False},  # a chat's
        {"bos_token": None},  # as Qwen's
        {"bos_token": LLAMA3[1], "eos_token": LLAMA3[1]},  # as GPT-2's and OLMo's
    ):
        found = with_settings(tmp_path, **settings)
        assert (found.bos_id, found.eos_id) == (bos, eos)
    chat = with_settings(tmp_path, eos_token="<|eot_id|>")
    assert end_of_chat(chat) == turn  # generation stops there, too
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer_config.json cannot be read"):
        build_tokenizer(str(tmp_path))


def test_a_document_begins_with_bos_only_if_the_post_processor_says_so(tmp_path: Path) -> None:
    """As Llama 3's does; not GPT-2's, OLMo's and Qwen's."""
    file = byte_level_json(tmp_path / "tokenizer.json", LLAMA3)
    plain = Tokenizer.from_file(str(file))
    eos = plain.token_to_id(LLAMA3[1])
    plain.post_processor = processors.ByteLevel()
    plain.save(str(file))
    for add_bos_token in (False, True):
        found = with_settings(tmp_path, bos_token=LLAMA3[0], add_bos_token=add_bos_token)
        assert (found.bos_id, found.eos_id) == (None, eos)
    plain.post_processor = processors.TemplateProcessing(
        single=f"{LLAMA3[1]} $A {LLAMA3[1]}", special_tokens=[(LLAMA3[1], eos)]
    )
    plain.save(str(file))  # the same token twice would separate documents twice
    assert (build_tokenizer(str(file)).bos_id, build_tokenizer(str(file)).eos_id) == (None, eos)


def test_the_config_names_other_tokens_around_a_document(tmp_path: Path) -> None:
    file = byte_level_json(tmp_path / "tokenizer.json", LLAMA3)
    by_name = build_tokenizer(str(file)).special_ids
    chat = build_tokenizer(str(file), TokenizerKeys("", "<|eot_id|>"))
    assert (chat.bos_id, chat.eos_id) == (None, by_name["<|eot_id|>"])
    assert build_tokenizer(str(file)).eos_id == by_name[LLAMA3[1]]  # another one
    with pytest.raises(ConfigError, match="lacks '<none>', which model.bos_token or model.eos_"):
        build_tokenizer(str(file), TokenizerKeys("<none>"))
    assert build_tokenizer(BYTES, TokenizerKeys("")).bos_id is None
    with pytest.raises(ConfigError, match="model.eos_token = 'a': only a tokenizer.json can have"):
        build_tokenizer(BYTES, TokenizerKeys(None, "a"))


def test_an_eos_that_only_a_file_beside_names(tmp_path: Path) -> None:
    file = byte_level_json(tmp_path / "tokenizer.json", ["<end of mine>"])
    assert build_tokenizer(str(file)).eos_id is None
    found = with_settings(tmp_path, eos_token={"content": "<end of mine>"})
    assert found.eos_id == found.special_ids["<end of mine>"]
    with pytest.raises(ConfigError, match="lacks '<eos!>', which a file next to it names as eos"):
        with_settings(tmp_path, eos_token="<eos!>")


def test_a_tokenizer_is_built_once_and_again_when_a_file_changes(tmp_path: Path) -> None:
    byte_level_json(tmp_path / "tokenizer.json", LLAMA3)
    first = build_tokenizer(str(tmp_path))
    assert build_tokenizer(str(tmp_path)) is first
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": null}')
    assert build_tokenizer(str(tmp_path)) is not first


def test_truncation_and_padding_in_a_file_are_not_heeded(tmp_path: Path) -> None:
    file = byte_level_json(tmp_path / "tokenizer.json", LLAMA3)
    whole, empty = (build_tokenizer(str(file)).encode(text) for text in (CODE, ""))
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(file))
    again = build_tokenizer(str(file))
    assert (again.encode(CODE), again.encode("")) == (whole, empty) == (whole, [])


def num_bytes(tokenizer: Any, text: str) -> int:
    return sum(tokenizer.token_bytes[i] for i in tokenizer.encode(text))


@pytest.mark.parametrize("kind", KINDS)
def test_token_bytes_add_up_to_the_text(files: dict[str, Path], kind: str) -> None:
    tokenizer = build_tokenizer(str(files[kind]))
    sizes = np.array(tokenizer.token_bytes)
    assert sizes.shape == (tokenizer.vocab_size,)
    has_space = kind not in BYTE_LEVEL  # in front of every text
    for text in filter(None, TEXTS):
        if has_space:
            text = " " + text.replace("\x00", "")  # sentencepiece leaves it out
        assert sizes[tokenizer.encode(text[has_space:])].sum() == len(text.encode()), text
    specials = {tokenizer.bos_id, tokenizer.eos_id, *getattr(tokenizer, "special_ids", {}).values()}
    assert not sizes[[*specials, *[0] * has_space]].any()  # 0 is the unknown token


def test_token_bytes_of_added_tokens_and_of_normalised_text(tmp_path: Path) -> None:
    file = byte_level_json(tmp_path / "tokenizer.json", LLAMA3)
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_tokens(["<tööl>"])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.save(str(file))
    ours = build_tokenizer(str(file))
    assert num_bytes(ours, "a<tööl>b") == len("a<tööl>b".encode())
    assert num_bytes(ours, "e\u0301") == len("é".encode())


def test_an_unknown_token_stands_for_no_bytes_in_particular(tmp_path: Path) -> None:
    model = models.BPE(vocab={"<unk>": 0, "a": 1}, merges=[], unk_token="<unk>", fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = build_tokenizer(str(tmp_path))
    assert ours.encode("aééa") == [1, 0, 1]
    assert ours.token_bytes == [0, 1]


def test_token_bytes_where_pieces_do_not_tell(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = build_tokenizer(str(tmp_path))
    assert ours.encode("ab") == [1, 2]
    assert ours.token_bytes is None


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_surrogate_pair_does_not_end_the_run(files: dict[str, Path], kind: str) -> None:
    tokenizer = build_tokenizer(str(files[kind]))
    broken = json.loads('"a \\ud83d b"')
    assert tokenizer.encode(broken) == tokenizer.encode("a \ufffd b")


def test_neither_threads_nor_torch(files: dict[str, Path]) -> None:
    """Whoever tokenises does so in several processes: threads in each would be too many."""
    program = f"""
import os, meshwright.datasets.tokenizers.chat
from meshwright.datasets.tokenizers.kinds import build_tokenizer
before = len(os.listdir("/proc/self/task"))
tokenizer = build_tokenizer({str(files["byte-level"])!r})
for _ in range(9):
    tokenizer.encode("some text " * 1000)
assert len(os.listdir("/proc/self/task")) == before
assert "torch" not in __import__("sys").modules
"""
    environment = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.model", b"", "is empty"),
        ("tokenizer.json", b" \n", "is empty"),
        ("tokenizer.json", b"{", "not a HuggingFaceTokenizer"),
        ("tokenizer.json", b"no JSON", "not a HuggingFaceTokenizer"),
        ("tokenizer.json", b"\xff\xfe{", "not a HuggingFaceTokenizer"),
        ("tokenizer_config.json", b'{"bos_token": "<s>"}', "not a HuggingFaceTokenizer"),
        ("tokenizer.model", b'{"bos_token": "<s>"}', "not a HuggingFaceTokenizer"),
        ("tokenizer.model", b"version https://git-lfs", "not a SentencePieceTokenizer"),
        ("tokenizer.model", SHIPPED.read_bytes()[:9999], "not a SentencePieceTokenizer"),
        ("tokenizer.model", b"AA== 0\nAQ== 1\n", "is a tiktoken file, which holds neither"),
    ],
)
def test_files_that_are_no_tokenizers(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        build_tokenizer(str(file))
    assert str(caught.value).startswith(f"model.tokenizer_path = {str(file)!r}: ")
    assert message in str(caught.value)
    assert caught.value.key == "model.tokenizer_path"


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    for path, message in (
        ("", "not given"),
        (str(tmp_path), "holds no tokenizer.json or tokenizer.model"),
        (str(tmp_path / "no.model"), "no such file or folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_tokenizer(path)
