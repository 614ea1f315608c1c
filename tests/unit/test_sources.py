"""Documents from files: all of them, in any number of pieces, or one clear error."""

import gzip
import io
import json
import os
import re
from functools import partial
from http.client import IncompleteRead
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from meshwright.config.loader import load_config
from meshwright.datasets import sympy_source
from meshwright.datasets.encoding import NO_LOSS
from meshwright.datasets.files import local_files
from meshwright.datasets.identity import commit_of, hash_documents
from meshwright.datasets.named_sources import check_files, check_path, sympy_note
from meshwright.datasets.opening import open_data
from meshwright.datasets.recipe import TokenizationSpec
from meshwright.datasets.rows import Document, Documents, IndexedDocuments, unreadable
from meshwright.datasets.samples import CachedSamples
from meshwright.datasets.sources import DatasetSpec, by_suffix, find_dataset, openable
from meshwright.datasets.token_cache.tokenizing import open_cache
from meshwright.datasets.tokenizers.kinds import build_tokenizer
from meshwright.system.errors import ConfigError, RecordError, StorageError
from meshwright.system.retries import may_pass, read_patiently
from tests.helpers.texts import entry, tokenization
from tests.helpers.tokenizer_files import byte_level_json

ROWS = [{"text": f"document {i}", "other": i} for i in range(7)]
TEXTS = [row["text"] for row in ROWS]


def open_documents(**keys: object) -> Documents:
    """For local files it makes no difference whether they are to be streamed."""
    return find_dataset(keys["dataset"]).open(entry(**keys), streamed=False)


def read_all(documents: Documents, num_shards: int = 1) -> list[Document]:
    found = [doc for shard in range(num_shards) for doc in documents.read(shard, num_shards)]
    for item in found:
        if isinstance(item, RecordError):
            raise item
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """For data; what `datasets` makes of it goes elsewhere."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf_cache")
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def write(kind: str, folder: Path) -> None:
    rows = datasets.Dataset.from_list(ROWS)
    if kind == "json":
        lines = [json.dumps(row) + "\n" for row in ROWS]
        (folder / "a.jsonl").write_text("".join(lines[:4]))
        (folder / "b.jsonl").write_text("".join(lines[4:]))
    elif kind == "parquet":
        rows.to_parquet(folder / "a.parquet")
    elif kind == "arrow":
        rows.save_to_disk(folder)
    else:
        for i, row in enumerate(ROWS):
            (folder / f"{i}.txt").write_text(row["text"])


@pytest.mark.parametrize("kind", ["json", "parquet", "text", "arrow"])
def test_local_files(kind: str, folder: Path) -> None:
    write(kind, folder)
    documents = open_documents(dataset=kind, dataset_path=str(folder))
    assert read_all(documents) == TEXTS
    assert read_all(documents, documents.max_shards) == TEXTS
    assert documents.max_shards == {"json": 2, "text": 7}.get(kind, 1)
    assert [doc for n in range(documents.parts) for doc in documents.read_part(n)] == TEXTS


def test_what_save_to_disk_wrote_is_named(folder: Path) -> None:
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(folder)
    one_of = "is a DatasetDict with its splits\n  fix: name one of them, for .* "
    with pytest.raises(ConfigError, match=one_of + re.escape(f"{folder}/train")):
        open_documents(dataset="arrow", dataset_path=str(folder))
    assert read_all(open_documents(dataset="arrow", dataset_path=f"{folder}/train")) == TEXTS
    with pytest.raises(ConfigError, match='save_to_disk.*\n  fix: set dataset = "arrow"'):
        open_documents(dataset=f"{folder}/train")


@pytest.mark.parametrize("kind", ["json", "parquet", "text", "arrow"])
def test_a_reader_begins_again_where_it_was(kind: str, folder: Path) -> None:
    write(kind, folder)
    documents = open_documents(dataset=kind, dataset_path=str(folder))
    for count in range(8):
        reader = documents.read(0, 1)
        first = [next(reader) for _ in range(count)]
        state = json.loads(json.dumps(reader.state()))
        again = documents.read(0, 1, state)
        # a job may be resumed twice before it has come to the next window
        assert json.loads(json.dumps(again.state())) == state
        assert first + list(again) == TEXTS


class AnsweredError(OSError):
    """As a client's, of a server that answers with an error."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.response = SimpleNamespace(status_code=status)


class OfflineModeIsEnabled(ConnectionError):  # noqa: N818  as huggingface_hub's
    pass


def hidden(cause: Exception) -> Exception:
    """As `datasets` reports a hub that does not answer."""
    error = FileNotFoundError("Couldn't find any data file")
    error.__context__, error.__suppress_context__ = cause, True
    return error


def of_botocore(name: str, bases: tuple[str, ...] = (), status: int = 0) -> Exception:
    """As botocore's errors are; `tests/campaigns/object_storage.py` meets the real ones."""
    above = Exception
    for base in (*bases, name):
        above = type(base, (above,), {"__module__": "botocore.exceptions"})
    error = above("no")
    if status:
        error.response = {"ResponseMetadata": {"HTTPStatusCode": status}}
    return error


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (of_botocore("NoCredentialsError"), False),
        (of_botocore("ProfileNotFound"), False),
        (of_botocore("EndpointConnectionError", ("ConnectionError",)), True),
        (of_botocore("ReadTimeoutError", ("HTTPClientError",)), True),
        (of_botocore("CredentialRetrievalError"), True),  # a job of days renews them
        (of_botocore("ClientError", status=403), False),
        (of_botocore("ClientError", status=503), True),
        (hidden(AnsweredError(503)), True),
        (hidden(AnsweredError(429)), True),
        (hidden(AnsweredError(404)), False),
        (hidden(ConnectionRefusedError(111, "Connection refused")), True),
        (hidden(OfflineModeIsEnabled()), False),
        (AnsweredError(401), False),
        (OSError("Unexpected end of stream"), False),  # pyarrow's of a file that is cut
        (OSError(28, "No space left on device"), False),
        (OSError(116, "Stale file handle"), True),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (IncompleteRead(b""), True),
        (FileNotFoundError(), False),
        (UnicodeDecodeError("utf-8", b"", 0, 1, ""), False),
        (ConfigError("", "no cause"), False),
    ],
)
def test_errors_that_may_pass(error: Exception, passes: bool) -> None:
    assert may_pass(error) is passes
    wrapped = ConfigError("training.dataset", "cannot be opened")
    wrapped.__cause__ = error
    assert may_pass(wrapped) is passes


@pytest.mark.parametrize(
    "error", [of_botocore("NoCredentialsError"), of_botocore("ClientError", status=403)]
)
def test_credentials_that_a_storage_rejects_end_at_once(error, monkeypatch) -> None:
    """Its client may hide the answer behind an error of the system's."""
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it waits"))
    system = OSError(5, "signature")
    system.__cause__ = error
    for seen in (error, system, PermissionError(13, "no")):
        with pytest.raises(ConfigError, match="s3://a/b cannot be read: .*\n  fix: .*AWS_PROFILE"):
            read_patiently("s3://a/b", Mock(side_effect=seen))


@pytest.mark.parametrize(
    ("number", "kind"),
    [(116, StorageError), (36, ConfigError), (None, ConfigError), (13, ConfigError)],
)
def test_an_error_that_stays_asks_for_no_other_start(number: int | None, kind: type) -> None:
    assert type(unreadable(entry(dataset="json"), OSError(number, "why"))) is kind


def test_a_stream_that_cannot_be_looked_at_now_is_started_again(folder: Path, monkeypatch) -> None:
    write("json", folder)
    stale = Mock(side_effect=OSError(116, "Stale file handle"))
    monkeypatch.setattr("meshwright.datasets.identity.hash_some_bytes", stale)
    keys = "dataset=json", f"dataset_path={folder}", "dataset_mode=streamed"
    words = [f"--training.{key}" for key in keys]
    config = load_config([*words, "--model.tokenizer_path=bytes"])
    with pytest.raises(StorageError, match="Stale file handle\n  fix: run the same command again"):
        open_data("training", config)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a long text"}] * 3 + [{"text": "a"}],
         r"one of 2 shards of it holds less than one sample of 17 tokens\n  fix: lower"),
        ([{"text": "a long text"}] * 3 + [{"words": "a"}], r"b.jsonl:1: no column 'text', but w"),
        ([{"text": "a long text of one sample"}] * 4, ""),
    ],
)  # fmt: skip
def test_a_stream_too_short_for_its_shards_ends_before_a_step(rows, message, tmp_path) -> None:
    for name, lines in (("a", rows[:-1]), ("b", rows[-1:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in lines))
    words = [f"--training.dataset_path={tmp_path}", "--training.seq_len=16"]
    words += ["--training.dataset=json", "--training.dataset_mode=streamed"]
    config = load_config([*words, "--model.tokenizer_path=bytes", "--training.stream_shards=2"])
    if not message:
        (source,) = open_data("training", config)
        assert source.num_shards == 2
        return
    with pytest.raises(ConfigError, match=message):
        open_data("training", config)


def test_a_validation_reads_only_shards_that_its_samples_need(tmp_path: Path) -> None:
    for name, text in (("a", "a long text of one sample"), ("b", "a")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    keys = f"dataset_path={tmp_path}", "dataset=json", "dataset_mode=streamed"
    words = ["--model.tokenizer_path=bytes", "--training.seq_len=16", "--training.stream_shards=2"]
    words += ["--validation.enable=true", *(f"--validation.{key}" for key in keys)]
    config = load_config(words)
    (source,) = open_data("validation", config)
    assert source.num_shards == 2


def test_indexed_documents_are_cut_evenly() -> None:
    documents = IndexedDocuments(10, str)
    parts = [list(documents.read(shard, 4)) for shard in range(4)]
    assert [len(part) for part in parts] == [2, 3, 2, 3]
    assert sum(parts, []) == list(map(str, range(10)))  # noqa: RUF017


FORMAT = """
def numbered(row):
    return f"{row['other']}: {row['text']}"

def turns(row):
    return [{"role": "user", "content": row["text"]}, {"role": "assistant", "content": "yes"}]

def fails(row):
    return row["nothing"]

def leaves(row):
    raise SystemExit(3)

constant = 3
"""


def test_a_function_makes_documents_of_rows(folder: Path, monkeypatch) -> None:
    write("json", folder)
    (folder / "my_formats.py").write_text(FORMAT)
    monkeypatch.syspath_prepend(folder)
    keys = {"dataset": "json", "dataset_path": str(folder / "*.jsonl")}
    want = [f"{i}: document {i}" for i in range(7)]
    for name in ("my_formats:numbered", f"{folder}/my_formats.py:numbered"):
        assert read_all(open_documents(**keys, dataset_format=name)) == want
    turns = read_all(open_documents(**keys, dataset_format="my_formats:turns"))
    assert turns[2].messages[0] == {"role": "user", "content": "document 2"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_formats2:turn", "has no function turn\n  fix: did you mean turns"),
        ("no_such_module:f", "cannot be imported: ModuleNotFoundError"),
        ("/no/such.py:f", "cannot be imported: FileNotFoundError"),
        ("alpacca", "no such format\n  fix: did you mean alpaca"),
        ("my_formats2:constant", "has no function constant"),
    ],
)
def test_a_function_that_is_not_there(name, message, folder: Path, monkeypatch) -> None:
    write("json", folder)
    (folder / "my_formats2.py").write_text(FORMAT)
    monkeypatch.syspath_prepend(folder)
    keys = {"dataset": "json", "dataset_path": str(folder / "*.jsonl"), "dataset_format": name}
    with pytest.raises(ConfigError, match=f"training.dataset_format = .*{message}"):
        check_path(entry(**keys), find_dataset("json"))


@pytest.mark.parametrize(("name", "end"), [("fails", "KeyError: 'nothing'"), ("leaves", "SystemE")])
def test_a_function_that_fails_names_the_row(name: str, end: str, folder: Path) -> None:
    write("json", folder)
    (folder / "formats.py").write_text(FORMAT)
    keys = {"dataset": "json", "dataset_path": str(folder / "*.jsonl")}
    documents = open_documents(**keys, dataset_format=f"{folder}/formats.py:{name}")
    line = FORMAT.splitlines().index(f"def {name}(row):") + 2
    places = re.escape(f"({folder}/formats.py:{line}); the row has text, other")
    with pytest.raises(ConfigError, match=f"a.jsonl:1: {end}.*{places}.*dataset_format"):
        read_all(documents)


@pytest.mark.parametrize("value", [None, {"k": 1}, ["text"]])
def test_a_row_without_text_is_named(value, folder: Path) -> None:
    (folder / "a.jsonl").write_text(json.dumps({"text": value}) + "\n")
    documents = open_documents(dataset="json", dataset_path=str(folder))
    with pytest.raises(ConfigError, match="a.jsonl:1: 'text' holds .* which is neither text nor"):
        read_all(documents)


GZIPPED = gzip.compress(b'{"text": "abc"}\n' * 9000)
OTHER_TABLE = io.BytesIO()
parquet.write_table(pyarrow.table({"body": ["a"]}), OTHER_TABLE)
BROKEN = {
    "not parquet": ("m.parquet", b"not parquet", ": cannot be read: Parquet magic bytes"),
    "other columns": (
        "m.parquet",
        OTHER_TABLE.getvalue(),
        ", row 0 of row group 0: no column 'text'",
    ),
    "not arrow": ("m.arrow", b"not arrow", ": cannot be read: "),
    "not JSON": ("m.jsonl", b'{"text": "a"}\n{"text": \n', ":2: not JSON: Expecting value"),
    "no object": ("m.jsonl", b'{"text": "a"}\n\n[1, 2]\n', ":3: not a JSON object, but [1, 2]"),
    "not UTF-8 in JSON": ("m.jsonl", b'{"text": "caf\xe9"}\n', ":1: not UTF-8: byte 14, 0xe9"),
    "other JSON": ("m.jsonl", b'{"body": "a"}\n', ":1: no column 'text', but body"),
    "a number": ("m.json", b'{"text": "a"}\n{"text": 3}\n', ":2: 'text' holds 3, which is"),
    "cut gzip": ("m.json.gz", GZIPPED[:-200], ": cannot be read: Compressed file ended"),
    "damaged gzip": ("m.json.gz", GZIPPED[:-6] + bytes(6), ": cannot be read: CRC check failed"),
    "UTF-16": ("m.txt", "two words".encode("utf-16-le"), ": 9 of 18 bytes are 0: it is UTF-16"),
    "not UTF-8": ("m.txt", b"two\ncaf\xe9 au lait", ": not UTF-8: line 2, byte 4, 0xe9"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_the_error_names_the_broken_file(fault: str, folder: Path) -> None:
    """And the line, between files that are in order."""
    name, content, message = BROKEN[fault]
    (folder / name).write_bytes(content)
    kind = {".parquet": "parquet", ".arrow": "arrow", ".txt": "text"}.get(Path(name).suffix, "json")
    for good in "a", "z":
        path = folder / f"{good}.{kind if kind != 'text' else 'txt'}"
        if kind == "parquet":
            parquet.write_table(pyarrow.table({"text": ["fine"]}), path)
        elif kind == "arrow":
            with pyarrow.ipc.new_stream(path, pyarrow.schema({"text": pyarrow.string()})):
                pass
        else:
            path.write_text('{"text": "fine"}\n' if kind == "json" else "fine")
    with pytest.raises(ConfigError) as caught:
        read_all(open_documents(dataset=kind, dataset_path=str(folder)))
    assert f"{folder / name}{message}" in str(caught.value)
    is_of_column = "column" in message or "holds" in message
    assert caught.value.key == f"training.dataset_{'column' if is_of_column else 'path'}"


def test_a_name_that_is_no_text_is_named(folder: Path) -> None:
    (folder / os.fsdecode(b"caf\xe9.txt")).write_text("one")
    with pytest.raises(ConfigError, match=r"caf.udce9.txt' is no name in UTF-8\n  fix: rename it"):
        local_files(entry(dataset="text", dataset_path=str(folder)))


def test_a_path_that_is_there_is_no_pattern(folder: Path) -> None:
    inner = folder / "run[1]?*"
    inner.mkdir()
    for name in ("a[0].jsonl", "a0.jsonl", "b.jsonl"):
        (inner / name).write_text(json.dumps({"text": name}) + "\n")
    cases = {
        inner: ["a0.jsonl", "a[0].jsonl", "b.jsonl"],
        inner / "a[0].jsonl": ["a[0].jsonl"],
        inner / "a*.jsonl": ["a0.jsonl", "a[0].jsonl"],
        inner / "[ab].jsonl": ["b.jsonl"],
    }
    for path, want in cases.items():
        documents = open_documents(dataset="json", dataset_path=str(path))
        assert read_all(documents) == want, path


COPIED = [
    "c4",
    "fineweb-edu",
    "someone/something",
]


@pytest.mark.parametrize("name", COPIED)
def test_datasets_of_the_hub_are_read_from_a_local_copy(name: str, folder: Path) -> None:
    write("json", folder)
    for streamed in (True, False):
        source = entry(dataset=name, dataset_path=str(folder))
        documents = find_dataset(name).open(source, streamed)
        assert read_all(documents) == TEXTS


@pytest.mark.parametrize("name", ["c4", "slimpajama", "someone/something"])
def test_the_hub_out_of_reach_is_a_config_error(name: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"training.dataset = '{name}': cannot be opened"):
        find_dataset(name).open(entry(dataset=name), streamed=True)


def test_the_source_of_sympy_is_the_published_one(caplog) -> None:
    """Whatever Python runs: the docs' losses are of it."""
    texts = read_all(open_documents(dataset="sympy_source"))
    held_out = read_all(open_documents(dataset="sympy_source", dataset_split="validation"))
    assert (len(texts), len(held_out)) == (778, 41)
    assert not {*texts} & {*held_out}
    if not sympy_source.version_note():
        assert sum(len(text.encode()) for text in [*texts, *held_out]) == 16_141_585
        assert "published" not in caplog.text


def test_another_source_of_sympy_is_told_in_one_line(tmp_path, monkeypatch, caplog) -> None:
    (tmp_path / "sympy/core/tests").mkdir(parents=True)
    for name in ("__init__.py", "core/__init__.py", "core/add.py", "core/tests/test_add.py"):
        (tmp_path / "sympy" / name).write_text("" if "__init__" in name else f"# {name}\n")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "sympy")])
    monkeypatch.setattr(sympy_source, "find_spec", lambda _: spec)
    monkeypatch.setattr(sympy_source, "version", lambda _: sympy_source.VERSION)
    assert read_all(open_documents(dataset="sympy_source")) == ["# core/add.py\n"]
    assert "sympy isn't the published source of sympy 1.14.0" in caplog.text
    monkeypatch.setattr(sympy_source, "version", lambda _: "1.15.1")
    caplog.clear()
    open_documents(dataset="sympy_source")
    assert not caplog.text  # `check` and the job say it at each start
    said = "sympy 1.15.1 is installed, so losses differ from the docs', of 1.14.0"
    assert sympy_note(load_config(["debug_model"])) == said
    assert sympy_note(load_config(["debug_model", "--training.dataset", "c4"])) == said
    hub = ["debug_model", "--training.dataset", "c4", "--validation.dataset", "c4"]
    assert sympy_note(load_config(hub)) == ""
    monkeypatch.setattr(sympy_source, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="sympy is not installed.*\n  fix: python -m pip install"):
        open_documents(dataset="sympy_source")


OLD = {"dataset_revision": "main"}
TOKENS = {"dataset": "tokens", "dataset_path": __file__}


def check(source: Any) -> None:
    check_path(source, find_dataset(source.source.dataset))
    check_files(source)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dataset": "sympy_source", "dataset_split": "test"}, "only train and validation"),
        ({"dataset": "sympy_source", "dataset_subset": "en"}, "has no subsets"),
        ({"dataset": "sympy_source", "dataset_path": "/tmp"}, "reads no path"),
        ({"dataset": "json"}, "needs it"),
        ({"dataset": "json", "dataset_path": "/no/such"}, "no such file or folder"),
        ({"dataset": "c4", "dataset_path": "/no/such"}, "no such file"),
        ({"dataset": "c4", "dataset_path": "/no/[such]"}, "fix: rename the folder"),
        ({"dataset": "json", "dataset_path": __file__, **OLD}, "dataset 'json' has no revisions"),
        ({"dataset": "c4", "dataset_path": __file__, **OLD}, "a local copy has no revisions"),
        (
            {"dataset": "json", "dataset_path": __file__, "dataset_split": "test"},
            "has only train\n",
        ),
        ({**TOKENS, "dataset_mode": "streamed"}, "tokens are read where they lie"),
        ({**TOKENS, "max_documents": 3}, "holds tokens, .*\n  fix: leave it out, or bound"),
    ],
)
def test_what_a_dataset_does_not_read(keys, message) -> None:
    with pytest.raises(ConfigError, match=message):
        check(entry(**keys))


def test_whatever_changes_the_documents_changes_the_hash_of_documents(folder: Path) -> None:
    write("json", folder)
    files = local_files(entry(dataset="json", dataset_path=str(folder)))
    (folder / "formats.py").write_text(FORMAT)
    keys = {"dataset": "json", "dataset_path": str(folder)}
    formatted = keys | {"dataset_format": f"{folder}/formats.py:numbered"}
    seen = [hash_documents(entry(**keys), files)]
    assert hash_documents(entry(**keys), files) == seen[0]
    seen.append(hash_documents(entry(**keys, dataset_column="other"), files))
    seen.append(hash_documents(entry(**keys), files[:1]))
    seen.append(hash_documents(entry(**formatted), files))
    (folder / "formats.py").write_text(FORMAT.replace("other", "text"))
    seen.append(hash_documents(entry(**formatted), files))
    with open(folder / "a.jsonl", "a") as file:
        file.write('{"text": "more"}\n')
    seen.append(hash_documents(entry(**keys), local_files(entry(**keys))))
    assert len(set(seen)) == len(seen)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_conversations_from_file_to_labels(folder: Path) -> None:
    """Rows of messages, the tokenizer's own template, the cache: only the answers have loss."""
    answers = ["four", "it is  blue 😀", "yes"]
    rows = [
        [
            {"role": "system", "content": "be short"},
            {"role": "user", "content": f"question {i} <|im_end|>"},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": answer.upper()},
        ]
        for i, answer in enumerate(answers)
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    tokenizer_file = byte_level_json(folder / "tokenizer.json", ["<|im_start|>", "<|im_end|>"])
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    keys = {"dataset": "json", "dataset_path": str(folder / "a.jsonl")}
    spec = TokenizationSpec(entry(**keys, dataset_column="messages"), str(tokenizer_file))
    cache = open_cache(spec, folder / "cache", num_workers=1)
    assert cache.num_documents == 3
    sample = CachedSamples(cache, cache.num_tokens, seed=None).read(0)
    decode = build_tokenizer(str(tokenizer_file)).decode
    with_loss = decode(sample.tokens[sample.raw < NO_LOSS].tolist())
    assert with_loss == "".join(f"{a}<|im_end|>{a.upper()}<|im_end|>" for a in answers)
    text = decode(sample.tokens.tolist())
    assert text.count("<|im_start|>") == 15
    assert text.count("question") == 3
    assert sample.documents[-1] == 2


def test_the_subset_of_a_local_copy(folder: Path) -> None:
    for name in ("en", "de"):
        (folder / name).mkdir()
        (folder / name / "a.jsonl").write_text(json.dumps({"text": f"language {name}"}) + "\n")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: en\n  data_files: en/*.jsonl\n  default: true\n"
        "- config_name: de\n  data_files: de/*.jsonl\n---\n"
    )
    keys = {"dataset": "someone/languages", "dataset_path": str(folder)}
    assert read_all(open_documents(**keys)) == ["language en"]
    assert read_all(open_documents(**keys, dataset_subset="de")) == ["language de"]
    with pytest.raises(ConfigError, match="cannot be opened: .*fr"):
        open_documents(**keys, dataset_subset="fr")


COMMITS = ("1" * 40, "2" * 40)


@pytest.fixture
def hub(monkeypatch) -> dict[str, object]:
    """In place of the hub: its newest commit is the second; what was asked of it."""
    asked: dict[str, object] = {}

    class Builder:
        def __init__(self, commit: str) -> None:
            self.config = self
            self.data_files = {"train": [f"hf://datasets/owner/name@{commit}/a.jsonl"]}

    def load_builder(name: str, subset: str | None, revision: str | None = None) -> Builder:
        return Builder(revision or COMMITS[1])

    def load(path: str, **options: object) -> datasets.Dataset:
        asked.update(options)
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset_builder", load_builder)
    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked


def test_a_revision_of_the_hub_is_pinned_and_known(hub, folder: Path) -> None:
    recipe = partial(tokenization, dataset="owner/name")
    pinned, newest = recipe(dataset_revision=COMMITS[0]), recipe()
    assert (commit_of(pinned.files), commit_of(newest.files)) == COMMITS
    assert pinned.id != newest.id
    assert newest.id == recipe(dataset_revision=COMMITS[1]).id
    pinned.open(streamed=False)
    assert hub["revision"] == COMMITS[0]
    newest.open(streamed=False)
    assert hub["revision"] is None
    rule = r"dataset_split = 'dev': no such split\n  fix: choose from train"
    with pytest.raises(ConfigError, match=rule):
        _ = recipe(dataset_split="dev").id


def test_a_cache_that_cannot_be_made_names_its_variable() -> None:
    """As below a home that is read-only; the error is of the first folder that is missing."""
    folder = str(Path(datasets.config.HF_DATASETS_CACHE).parents[1])
    rule = "the cache of Hugging Face.*\n  fix: set .* HF_HOME"
    with pytest.raises(ConfigError, match=rule), openable(entry(dataset="c4")):
        raise PermissionError(13, "Permission denied", folder)


def test_rare_suffixes_are_added_up() -> None:
    """A folder of shards may have thousands: data.0001, data.0002, ..."""
    paths = ["a.txt", *(f"data.{number:04}" for number in range(1000))]
    assert by_suffix([*paths, "b.txt"]) == ["2 .txt", "1 .0000", "1 .0001", "1 .0002", "997 others"]


def test_a_dataset_says_in_known_words_whether_it_has_a_path() -> None:
    with pytest.raises(ValueError, match="path = 'needed': choose from none, optional, required"):
        DatasetSpec(print, print, path="needed")
