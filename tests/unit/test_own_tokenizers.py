"""Tokenizers and formats of rows from a module of the user's own."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from meshwright.checkpoint.conversion.tokenizer_files import why_not_exported
from meshwright.commands.saved import open_tokenizer
from meshwright.config.changes import to_json
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.datasets.encoding import NO_LOSS
from meshwright.datasets.opening import open_data
from meshwright.datasets.tokenizers.kinds import build_tokenizer
from meshwright.datasets.tokenizers.special_tokens import tokenizer_keys
from meshwright.system.errors import ConfigError, RecordError
from meshwright.system.files import NamedPath
from meshwright.train.facts import look_at_data
from meshwright.train.resolve_model import extend_by, extend_only_by
from tests.campaigns.new_user import example
from tests.helpers.resolved import resolved

TOKENIZER = example("tokenizer")
BOTH = TOKENIZER + example("format").replace("OPTIONS = ", "OPTIONS |= ")
PLAY = ["Anna: Hi Ben", "Ben: Hello"]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    extend_only_by("")


def job(folder: Path, code: str, **changes: object) -> JobConfig:
    (folder / "mine.py").write_text(code)
    (folder / "rows.jsonl").write_text((json.dumps({"lines": PLAY}) + "\n") * 40)
    (folder / "text.txt").write_text("".join(map(chr, range(32, 127))))
    keys = {
        "experimental.custom_import": f"{folder}/mine.py",
        "model.tokenizer_type": "characters",
        "model.tokenizer_path": f"{folder}/text.txt",
        "training.dataset": "json",
        "training.dataset_path": f"{folder}/rows.jsonl",
        "training.dataset_format": "screenplay",
        "training.seq_len": 16,
        "training.token_cache_folder": f"{folder}/cache",
    }
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    return load_config([f"--{key}={value}" for key, value in keys.items()])


def looked_at(config: JobConfig) -> None:
    for fault in look_at_data(config).faults:
        raise fault


@pytest.mark.parametrize("mode", ["cached", "streamed"])
def test_conversations_of_a_format_become_tokens_without_a_template(tmp_path, mode) -> None:
    config = job(tmp_path, BOTH, training__dataset_mode=mode)
    looked_at(config)
    (source,) = open_data("training", config, num_workers=2)
    if mode == "streamed":
        tokens = source.encoder.encode(next(source.documents.read(0, 1)))
    else:
        tokens = source.cache.tokens(0, 13)
    text = "".join(map(chr, (tokens & ~np.uint32(NO_LOSS)) + 32))
    assert text == f"Hi Ben{chr(95 + 32)}Hello{chr(95 + 32)}"
    assert ((tokens & NO_LOSS) == 0).tolist() == [False] * 7 + [True] * 6


def test_options_of_tokenizer_and_format_make_other_tokens(tmp_path) -> None:
    contents = set()
    options = (
        {},
        {"options__characters__lower": "true"},
        {"options__screenplay__assistant": "Anna"},
    )
    for one in options:
        config = job(tmp_path, BOTH, **one)
        looked_at(config)
        (source,) = open_data("training", config, num_workers=2)
        contents.add(source.content)
    assert len(contents) == 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"characters": Char', '"characters": lambda *_: None, "other": Char',
         "'characters': its function returns None, and no tokenizer"),
        ('"characters": Char', '3: Char', "TOKENIZERS must be a dict from names to cla"),
        ("def decode", "def decodes", "its tokenizer has no decode"),
        ("eos_id + 2", "eos_id", "has a special token outside its vocabulary of 95"),
        ("return [self._ids", "return [1 + self._ids", "with an id outside its vocabulary of 97"),
        ("return [self._ids", "return [1.0 * self._ids", "as .*, and no list of int"),
        ("self._unknown = self.eos_id + 1", "self._unknown = self.eos_id",
         "makes the special token 95 of the text ' two"),
        ('"<eos>": self.eos_id, ', "", "puts 95 around documents, which `special_ids` hasn't"),
        ("hashlib.sha256(known).hexdigest()[:16]", "0", "has no text as `fingerprint`"),
        ("return ids.count(self._unknown), len(ids)", "return ids.count(self._unknown)",
         "its tokenizer gives 0 as `count_lost` of 'Once upon a time', and no two numbers"),
        ("return ids.count(self._unknown), len(ids)", "return ids.lost, len(ids)",
         r"its tokenizer raises AttributeError: .*mine.py:\d+\)"),
        ("self._lower = options.lower", "1 / 0", r"cannot be built: ZeroDivision.*mine.py:19\)"),
        ("read = self", "read = text.nothing; self", r"raises AttributeError: .*mine.py:35\)"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_breaks_its_contract_is_named(tmp_path, old, new, message) -> None:
    assert TOKENIZER.count(old) >= 1
    code = TOKENIZER.replace(old, new, 1)
    plain = {"training__dataset": "text", "training__dataset_format": ""}
    plain |= {"model__eos_token": ""} if "lambda" in new else {}
    with pytest.raises(ConfigError, match=message):
        looked_at(job(tmp_path, code, **plain))


def test_a_wrong_option_of_a_tokenizer_or_a_format_is_one_error(tmp_path) -> None:
    for option in ("options__characters__lower", "options__screenplay__assistant"):
        with pytest.raises(ConfigError, match=option.replace("__", ".") + " = 3: "):
            looked_at(job(tmp_path, BOTH, **{option: "3"}))


def test_a_vocabulary_beyond_the_models_is_an_error_of_the_class(tmp_path) -> None:
    keys = {"model__args": "{vocab_size = 64}", "training__dataset": "sympy_source"}
    empty = {"training__dataset_path": "", "training__dataset_format": ""}
    config = job(tmp_path, TOKENIZER, **keys, **empty)
    rule = (
        "^model.tokenizer_type = 'characters': its vocabulary of 97 is larger than the model's, 64"
    )
    with pytest.raises(ConfigError, match=rule + "\n  fix: set model.args.vocab_size = 97$"):
        resolved(config, 1)


def test_a_name_that_no_module_has_is_one_error(tmp_path) -> None:
    with pytest.raises(
        ConfigError, match="model.tokenizer_type = 'charakters': no such tokenizer\n"
    ):
        looked_at(job(tmp_path, BOTH, model__tokenizer_type="charakters"))
    bare = load_config(["--model.tokenizer_type=characters"])
    with pytest.raises(ConfigError, match="no such tokenizer\n  fix: name the module that has it"):
        looked_at(bare)


def test_an_error_in_a_conversation_is_a_bad_record(tmp_path) -> None:
    config = job(tmp_path, BOTH.replace("ids, counts = [], []", "ids, counts = None, []"))
    looked_at(config)
    with pytest.raises(
        RecordError, match=r"rows.jsonl.*encode_conversation: TypeError.*mine.py:\d"
    ):
        open_data("training", config, num_workers=1)
    config = job(tmp_path, BOTH.replace('row["lines"]', 'row["words"]'))
    with pytest.raises(
        RecordError, match=r"KeyError: 'words' \(.*mine.py:\d+\); the row has lines"
    ):
        looked_at(config)


def test_a_checkpoint_opens_its_tokenizer_with_its_module_alone(tmp_path) -> None:
    config = job(tmp_path, TOKENIZER, options__characters__lower="true")
    extend_by(config.experimental.custom_import)
    manifest = {
        "config": to_json(config),
        "tokenizer_path": config.model.tokenizer_path,
        "data_identity": {"model.tokenizer_path": "then"},
        "special_tokens": {"bos_token_id": None, "eos_token_id": 69},
    }
    place = NamedPath("CHECKPOINT", tmp_path)
    extend_only_by("")
    with pytest.raises(ConfigError, match=r"no such tokenizer.*\n  fix: --custom-import .*mine.py"):
        open_tokenizer(place, manifest, None)
    extend_by(config.experimental.custom_import)
    with pytest.raises(ConfigError, match="--tokenizer = .*: [0-9a-f]{16} instead of then"):
        open_tokenizer(place, manifest, None)
    own = build_tokenizer(config.model.tokenizer_path, tokenizer_keys(manifest["config"]))
    manifest["data_identity"]["model.tokenizer_path"] = own.fingerprint
    tokenizer, _ = open_tokenizer(place, manifest, None)
    assert tokenizer.encode("Aa") == [39, 39]  # by its options
    assert why_not_exported(tokenizer) == "Characters is not a kind that has such a file"


def test_an_error_in_the_count_of_lost_characters_is_a_bad_record(tmp_path) -> None:
    code = TOKENIZER.replace("def count_lost(self, text):", "def count_lost(self, text):\n"
                             "        assert 'Anna' not in text")  # fmt: skip
    plain = {"training__dataset_format": "", "training__dataset": "text"}
    config = job(tmp_path, code, **plain)
    looked_at(config)
    (tmp_path / "rows.jsonl").write_text("Anna\n")
    with pytest.raises(RecordError, match=r"tokenizer_type: the tokenizer fails on .*Anna.*Ass"):
        open_data("training", config, num_workers=1)
