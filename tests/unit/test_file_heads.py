"""`meshwright check` looks at the head of each local file, within half a second."""

import gzip
import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from meshwright.datasets.sources import faults as faulty_files
from meshwright.system.errors import ConfigError
from tests.helpers.cli import check_job


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
JSONL = b'{"text": "a b"}\n'


@pytest.mark.parametrize(
    ("dataset", "files", "says"),
    [
        ("json", {"a.jsonl": b""}, "a.jsonl: is empty"),
        ("json", {"a.jsonl": b"", "b.jsonl": JSONL}, ""),
        ("json", {"a.jsonl": b"\n{'text'}\n"}, "a.jsonl:2: not JSON: "),
        (
            "json",
            {"a.jsonl": b'{"txt": "a"}\n'},
            "a.jsonl:1: no column 'text', but txt",
        ),
        ("json", {"a.jsonl": b"[1]\n"}, "a.jsonl:1: not a JSON object, but [1]"),
        ("json", {"a.jsonl": JSONL, "b.jsonl": b"{]\n"}, "b.jsonl:1: not JSON: "),
        ("json", {"a.json": b'[\n{"text": "a"}\n]'}, ""),
        ("json", {"a.jsonl": b'{"text": "' + b"a" * 2**17 + b'"}\n'}, ""),
        ("json", {"a.jsonl.gz": gzip.compress(JSONL)}, ""),
        ("json", {"a.jsonl.gz": gzip.compress(b"{}\n")}, "a.jsonl.gz:1: no column 'text'"),
        ("json", {"a.jsonl.gz": JSONL}, "a.jsonl.gz: cannot be read: Not a gzipped file"),
        ("text", {"a.txt": b"a\nb\xe9c\n"}, "a.txt:2: not UTF-8: byte 2, 0xe9"),
        ("text", {"a.txt": "\u00e9".encode() * 2**15 + b"a"}, ""),
        ("parquet", {"a.parquet": b"PAR1 and no more"}, "a.parquet: not a whole Parquet file"),
        ("parquet", {"a.parquet": parquet_of(TABLE)}, "a.parquet: no column 'text'"),
        ("arrow", {"a.arrow": b"no more"}, "a.arrow: not an Arrow file"),
        ("arrow", {"a.arrow": arrow_of(TABLE, pyarrow.ipc.new_file)}, "a.arrow: no column 'text'"),
        (
            "arrow",
            {"a.arrow": arrow_of(TABLE, pyarrow.ipc.new_stream)},
            "a.arrow: no column 'text'",
        ),
    ],
)
def test_a_check_looks_at_the_head_of_each_file(dataset, files, says, tmp_path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    toml = f"""extends = "debug_model"\nvalidation.enable = false
training = {{ dataset = "{dataset}", dataset_path = "." }}\n"""
    (tmp_path / "a.toml").write_text(toml)
    if not says:
        check_job([tmp_path / "a.toml"])
        return
    with pytest.raises(ConfigError) as caught:
        check_job([tmp_path / "a.toml"])
    assert f"{tmp_path}/{says}" in str(caught.value)
    assert "a.toml:3: training.dataset_path = " in str(caught.value)


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


def test_bad_records_that_may_be_passed_over_are_no_fault_of_the_head(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text("{]\n")
    words = ["--training.dataset=json", f"--training.dataset_path={tmp_path}"]
    words += ["--training.dataset_mode=streamed", "--training.max_bad_records=1"]
    check_job(["debug_model", "--validation.enable=false", *words])


def test_files_that_are_looked_at_are_spread_over_all(tmp_path, monkeypatch):
    monkeypatch.setattr(faulty_files, "MOST_HEADS", 2)
    seen = []
    monkeypatch.setitem(faulty_files.HEADS, "json", lambda path, column: seen.append(path))
    files = [str(tmp_path / f"{n}.jsonl") for n in range(5)]
    for file in files:
        Path(file).write_text("{}\n")
    source = SimpleNamespace(dataset="json", dataset_format="", dataset_column="text")
    assert faulty_files.find_head_fault(SimpleNamespace(source=source), files) == ""
    assert seen == [files[0], files[3]]
