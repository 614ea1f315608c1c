"""`meshwright check` looks at the head of each local file, within half a second."""

import gzip
import io
from collections.abc import Callable
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from meshwright.datasets import named_sources
from meshwright.datasets.files import local_files
from meshwright.datasets.named_sources import head_fault
from meshwright.system.errors import ConfigError
from tests.helpers.cli import check_job
from tests.helpers.texts import entry


def parquet_of(table: pyarrow.Table) -> bytes:
    file = io.BytesIO()
    parquet.write_table(table, file)
    return file.getvalue()


def arrow_of(table: pyarrow.Table, open_writer: Callable[..., Any]) -> bytes:
    file = io.BytesIO()
    with open_writer(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


TABLE = pyarrow.table({"content": ["a b"], "context": ["c"]})
TABLE_AS_FILE = arrow_of(TABLE, pyarrow.ipc.new_file)
JSONL = b'{"text": "a b"}\n'


@pytest.mark.parametrize(
    ("dataset", "files", "says"),
    [
        ("json", {"a.jsonl": b""}, "a.jsonl: is empty"),
        ("json", {"a.jsonl": b"", "b.jsonl": JSONL}, ""),
        ("json", {"a.jsonl": JSONL, "b.jsonl": b"\n{]\n"}, "b.jsonl:2: not JSON: "),
        ("json max_bad_records=1", {"a.jsonl": b"{]\n"}, ""),
        ('json dataset_where=["score>1"]', {"a.jsonl": JSONL}, "a.jsonl:1: no column 'score'"),
        ("json", {"a.json": b'[\n{"text": "a"}\n]'}, ""),
        ("json", {"a.jsonl": b'{"text": "' + b"a" * 2**17 + b'"}\n'}, ""),
        ("json", {"a.jsonl.gz": gzip.compress(JSONL)}, ""),
        ("json", {"a.jsonl.gz": gzip.compress(b"{}\n")}, "a.jsonl.gz:1: no column 'text'"),
        ("text", {"a.txt": "\u00e9".encode() * 2**15 + b"a"}, ""),
        ("parquet", {"a.parquet": b"PAR1 and no more"}, "a.parquet: cannot be read: Parquet magic"),
        ("arrow", {"a.arrow": TABLE_AS_FILE}, "a.arrow, row 0 of batch 0: no column 'text'"),
    ],
)
def test_a_check_looks_at_the_head_of_each_file(dataset, files, says, tmp_path) -> None:
    """By the readers, whose faults are in test_sources.py."""
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    dataset, *keys = dataset.split()
    words = [f"dataset={dataset}", f"dataset_path={tmp_path}", *keys]
    job = ["debug_model", "--validation.enable=false", *(f"--training.{word}" for word in words)]
    if not says:
        check_job(job)
        return
    with pytest.raises(ConfigError, match="training.dataset_") as caught:
        check_job(job)
    assert f"{tmp_path}/{says}" in str(caught.value)


def test_columns_of_tables_are_found_by_their_whole_names(tmp_path) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet_of(TABLE))
    (tmp_path / "a.arrow").write_bytes(arrow_of(TABLE, pyarrow.ipc.new_stream))
    data = ["debug_model", "--validation.enable=false", f"--training.dataset_path={tmp_path}"]
    for dataset in ("parquet", "arrow"):
        words = [*data, f"--training.dataset={dataset}", "--training.dataset_column"]
        for column in ("content", "context"):
            check_job([*words, column])
        with pytest.raises(ConfigError, match="no column 'text'"):
            check_job([*words, "text"])


@pytest.mark.parametrize(
    ("dataset", "name", "fix"),
    [
        ("json", "a.parquet", 'set training.dataset = "parquet"'),
        ("arrow", "a.jsonl", 'set training.dataset = "json"'),
        ("json", "a.csv", "write its rows as JSON lines"),
        ("json", "a.data", "correct it, or set training.max_bad_records"),
    ],
)
def test_a_file_of_another_kind_is_not_a_bad_record(dataset, name, fix, tmp_path) -> None:
    (tmp_path / name).write_bytes(parquet_of(TABLE))
    words = [f"--training.dataset={dataset}", f"--training.dataset_path={tmp_path / name}"]
    with pytest.raises(ConfigError, match=f"cannot be read: .*\n  fix: {fix}"):
        check_job(["debug_model", "--validation.enable=false", *words])


def test_the_advice_is_on_the_file_that_cannot_be_read(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    (tmp_path / "b.csv").write_text("text\na")
    words = ["--training.dataset=json", f"--training.dataset_path={tmp_path}/*"]
    with pytest.raises(ConfigError, match="b.csv: cannot be read: .*\n  fix: write its rows as"):
        check_job(["debug_model", "--validation.enable=false", *words])


def test_files_that_are_looked_at_are_spread_over_all(tmp_path, monkeypatch):
    monkeypatch.setattr(named_sources, "MOST_HEADS", 2)
    for number in range(5):
        (tmp_path / f"{number}.jsonl").write_text(
            '{"text": 1}\n' if number in (1, 2, 4) else JSONL.decode()
        )
    source = entry(dataset="json", dataset_path=str(tmp_path))
    files = local_files(source)
    assert head_fault(source, files) is None
    assert "4.jsonl:1: 'text' holds 1" in str(head_fault(source, files[4:]))


def test_conversations_without_a_chat_template_are_refused_before_they_are_read(tmp_path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}')
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    data = ("training.dataset=json", f"training.dataset_path={tmp_path}/rows.jsonl")
    job = ["debug_model", *(f"--{key}" for key in (*data, "training.dataset_format=messages"))]
    with pytest.raises(ConfigError, match="no chat_template.jinja next to it"):
        check_job(job)
    check_job([*job, f"--model.chat_template_path={tmp_path}/chat.jinja"])


def test_a_folder_that_is_taken_for_a_size_is_named(tmp_path, monkeypatch) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no such size\n  fix: write ./mine for the folder"):
        check_job(["debug_model", "--model.flavor=mine"])
