"""Readers of local files give the rows of json, pyarrow and open, or a fault with its place."""

import errno
import gzip
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from meshwright.datasets import files, readers
from meshwright.datasets.data_file import ChangedError
from meshwright.datasets.files import PACKED, SUFFIXES, Range, RowPlace, resolve
from meshwright.datasets.readers import END, Layout, cut, read
from meshwright.datasets.rows import LocalDocuments
from meshwright.datasets.storage import stat
from meshwright.datasets.tables import Unreadable
from meshwright.system.errors import ConfigError, RecordError
from meshwright.system.files import warn_once
from tests.helpers.texts import entry

SEED = 32
BOM = b"\xef\xbb\xbf"
LETTERS = ["a", "bc", " ", "\n", "\r\n", "\r", "\n\n", "\0", "\t", "é", "\u2028", "\x85", "😀", '"']
BAD_LINES = [
    *(b"{", b'{"text": "a"', b"[1, 2]", b"3", b"null", b'"text"', b"{'text': 'a'}", b"\xff\xfe"),
    *(
        b'{"text": "caf\xe9"}',
        b'{"text": "\xed\xa0\x80"}',
        b"[" * 100_000,
        b'{"n": 1' + b"0" * 5000,
    ),
]


def random_text(chance: random.Random) -> str:
    return "".join(chance.choices(LETTERS, k=chance.choice([0, 1, 5, 40, 300])))


def random_row(chance: random.Random) -> dict[str, Any]:
    text: Any = random_text(chance)
    if chance.random() < 0.1:
        text += "\ud800"  # half of a surrogate pair: json writes and reads it
    if chance.random() < 0.1:
        text = chance.choice([None, 3, [], {"k": 1}, float("inf"), 10**30])
    row = {"text": text, "n": chance.randrange(9)}
    return dict(chance.sample(list(row.items()), chance.randint(0, 2)))


def random_lines(chance: random.Random) -> bytes:
    lines = []
    for _ in range(chance.choice([0, 1, 3, 30])):
        line = json.dumps(random_row(chance), ensure_ascii=chance.random() < 0.5)
        content = line.encode("utf-8", "surrogatepass")
        if chance.random() < 0.1:
            content = chance.choice([*BAD_LINES, b"", b" \t", content[: len(content) // 2]])
        lines.append(content)
    end = chance.choice([b"\n", b"\r\n"])
    start, last = chance.choice([b"", BOM]), chance.choice([b"", end])
    return start + end.join(lines) + last * bool(lines)


def expected_lines(content: bytes) -> list[tuple[int, Any]]:
    """By Python's own json: numbers of lines, with a row or None for a fault."""
    found: list[tuple[int, Any]] = []
    for number, line in enumerate(content.removeprefix(BOM).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError):
            row = None
        found.append((number, row if isinstance(row, dict) else None))
    return found


def compress(path: Path, content: bytes) -> None:
    codec = PACKED.get(path.suffix)
    if codec is None:
        path.write_bytes(content)
        return
    with pyarrow.CompressedOutputStream(str(path), codec) as file:
        file.write(content)


def rows_of(
    path: Path, layout: Layout, after: RowPlace | None = None
) -> list[tuple[RowPlace, Any]]:
    """Places, and rows or words that say why there is none."""
    found = read(Range(stat(str(path))), layout, after)
    return [(p, f"{words}: {row}" if isinstance(row, str) else row) for p, words, row in found]


def check_everywhere(path: Path, layout: Layout, whole: list[tuple[RowPlace, Any]]) -> None:
    """The rest from every place on is the rest of the whole; so is the sum of all parts."""
    file = stat(str(path))
    for index, (place, _) in list(enumerate(whole))[:: len(whole) // 6 + 1]:
        rest = rows_of(path, layout, RowPlace(*json.loads(json.dumps(place))))
        assert rest == whole[index + 1 :], (path, place)
    values = [row for _, _, row in read(Range(file), layout)]
    for size in (file.size // 60 + 1, file.size // 7 + 1, file.size // 2 + 1):
        parts = cut([file], layout, size)
        cut_rows = [row for part in parts for piece in part for *_, row in read(piece, layout)]
        assert cut_rows == values, (path, size)


@pytest.fixture(params=[3, 1 << 18], ids=["small chunks", "chunks"])
def chunk(request, monkeypatch) -> int:
    monkeypatch.setattr(files, "CHUNK", request.param)
    monkeypatch.setattr(readers, "CHUNK", request.param)
    return int(request.param)


@pytest.mark.parametrize("number", range(60))
def test_lines_of_json(number: int, chunk: int, tmp_path: Path) -> None:
    chance = random.Random(SEED * 1000 + number)
    content, packed = random_lines(chance), chance.choice(["", "", *PACKED])
    if chunk < 100 and packed:
        content = content[:300]
    path = tmp_path / f"a.jsonl{packed}"
    compress(path, content)
    found = rows_of(path, Layout("json"))
    assert [None if isinstance(row, str) else row for _, row in found] == [
        row for _, row in expected_lines(content)
    ]
    for (line, _), (_, row) in zip(expected_lines(content), found, strict=True):
        assert isinstance(row, dict) or row.startswith(f"{path}:{line}: ")
    if len(content) < 3000:
        check_everywhere(path, Layout("json"), found)


@pytest.mark.parametrize("number", range(60))
def test_texts(number: int, chunk: int, tmp_path: Path) -> None:
    chance = random.Random(SEED * 2000 + number)
    text = "".join(random_text(chance) for _ in range(chance.choice([0, 1, 4])))
    separator = chance.choice(["", "\n", "\n\n", "bc", "aa", "\r"])
    content = chance.choice([b"", BOM]) + text.encode()
    is_bad = chance.random() < 0.15
    if is_bad:
        at = chance.randint(0, len(content))
        content = content[:at] + b"\xff" + content[at:]
    path = tmp_path / f"a.txt{chance.choice(['', '', '.zst'])}"
    compress(path, content)
    found = rows_of(path, Layout("text", separator=separator))
    content = content.removeprefix(BOM)
    pieces = [content]
    if separator == "\n\n":
        pieces = [b""]
        for line in content.split(b"\n"):
            if line.strip():
                pieces[-1] += line + b"\n"
            else:
                pieces.append(b"")
    elif separator:
        pieces = content.split(separator.encode())
    if separator:
        pieces = [piece.strip(b"\r\n") for piece in pieces if piece.strip(b"\r\n")]
    want: list[str | None] = []
    for piece in pieces:
        try:
            is_text = piece.count(0) * 4 <= len(piece)
            want.append(piece.decode() if is_text else None)
        except UnicodeDecodeError:
            want.append(None)
    assert [None if isinstance(row, str) else row["text"] for _, row in found] == want
    check_everywhere(path, Layout("text", separator=separator), found)


def write_parquet(table: pyarrow.Table, path: Path, rows: int) -> None:
    parquet.write_table(table, path, row_group_size=rows)


def write_arrow_file(table: pyarrow.Table, path: Path, rows: int) -> None:
    with pyarrow.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def write_arrow_stream(table: pyarrow.Table, path: Path, rows: int) -> None:
    with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


@pytest.mark.parametrize("write", [write_parquet, write_arrow_file, write_arrow_stream])
@pytest.mark.parametrize("number", range(14))
def test_tables(number: int, write: Callable[..., None], tmp_path: Path, monkeypatch) -> None:
    chance = random.Random(SEED * 3000 + number)
    monkeypatch.setattr(readers, "BATCH_BYTES", chance.choice([1, 1000, 1 << 22]))
    count = chance.choice([0, 1, 5, 40])
    texts = [chance.choice([None, random_text(chance)]) for _ in range(count)]
    table = pyarrow.table({"text": pyarrow.array(texts, pyarrow.string()), "n": list(range(count))})
    is_parquet = write is write_parquet
    layout = Layout("parquet" if is_parquet else "arrow", chance.choice([None, ("text",)]))
    path = tmp_path / "a.table"
    write(table, path, chance.choice([1, 3, 100]))
    others = {"n": Unreadable("is not read")} if layout.columns else {}
    found = rows_of(path, layout)
    assert [row for _, row in found] == [row | others for row in table.to_pylist()]
    check_everywhere(path, layout, found)


def test_a_table_with_a_text_that_is_not_utf8(tmp_path: Path) -> None:
    texts = pyarrow.array([b"a", b"caf\xe9", b"c"], pyarrow.binary()).cast(
        pyarrow.string(), safe=False
    )
    write_parquet(pyarrow.table({"text": texts}), tmp_path / "a.parquet", 10)
    found = [row for _, row in rows_of(tmp_path / "a.parquet", Layout("parquet"))]
    assert [found[0], found[2]] == [{"text": "a"}, {"text": "c"}]
    with pytest.raises(ValueError, match="its 'text' is damaged text: Invalid UTF8 sequence"):
        found[1]["text"]
    for text_of in (str, repr, lambda row: f"{[*row.values()]}"):  # of a whole row
        with pytest.raises(ValueError, match="a column is damaged text"):
            text_of(found[1])


PEAK = """
import re, sys
from meshwright.datasets.files import Range
from meshwright.datasets.storage import stat
from meshwright.datasets.readers import Layout, read
peaks = []
for path in sys.argv[1:]:
    assert sum(1 for _ in read(Range(stat(path)), Layout("parquet", ("text",)))) > 9
    # not ru_maxrss, which begins with that of the process that started this one
    peaks.append(int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]))
print(peaks[1] - peaks[0])
"""


def test_memory_does_not_depend_on_the_size_of_a_row_group(tmp_path: Path) -> None:
    """200 MB of text in one row group, beside 1 MB of it."""
    for name, count in (("small", 10), ("large", 2000)):
        texts = [f"{n}" + "x" * 100_000 for n in range(count)]
        table = pyarrow.table({"text": texts})
        path = tmp_path / f"{name}.parquet"
        options = {"compression": "none", "use_dictionary": False}
        # a page is read as a whole: of 1 MB, as in files of usual documents
        parquet.write_table(table, path, write_batch_size=10, **options)
    paths = [str(tmp_path / f"{name}.parquet") for name in ("small", "large")]
    process = subprocess.run(
        [sys.executable, "-c", PEAK, *paths], capture_output=True, text=True, check=True
    )
    # in KiB: batches of 4 MiB a few times, and what the allocator keeps, but no whole row group
    assert int(process.stdout) < 100_000


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.99])
@pytest.mark.parametrize("packed", PACKED)
def test_a_packed_file_that_is_cut_off_ends_with_a_fault(packed, kept, tmp_path, chunk) -> None:
    """The rows before it are there, and the same ones from every place on."""
    path, lines = tmp_path / f"a.jsonl{packed}", [b'{"text": "%d"}' % n for n in range(200)]
    compress(path, b"\n".join(lines))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    found = rows_of(path, Layout("json"))
    if not kept:  # an empty file has no rows
        assert found == []
        return
    assert [row for _, row in found[:-1]] == [json.loads(line) for line in lines[: len(found) - 1]]
    assert found[-1][0] == END
    assert "cannot be read" in str(found[-1][1])
    for place in (found[0][0], found[-2][0]) if len(found) > 1 else ():
        rest = rows_of(path, Layout("json"), place)
        assert [row for _, row in rest] == [row for p, row in found if p > place or p == END]
    assert list(read(Range(stat(str(path))), Layout("json"), END)) == []


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_damaged_table_ends_with_a_fault(suffix: str, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    table = pyarrow.table({"text": [str(chance.random()) for _ in range(500)]})
    write = write_parquet if suffix == ".parquet" else write_arrow_file
    path, layout = tmp_path / f"a{suffix}", Layout(suffix[1:])
    write(table, path, 50)
    content = path.read_bytes()
    for _ in range(30):
        damaged = bytearray(content)
        at = chance.randrange(len(content))
        damaged[at : at + 8] = chance.randbytes(8)
        path.write_bytes(damaged[: chance.choice([at + 8, len(content)])])
        found = rows_of(path, layout)  # raises nothing
        ends = [row for place, row in found if place == END]
        assert ends in ([], [found[-1][1]] if found else [])


def test_one_long_line(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "' + b"b" * 20_000_000 + b'"}\n{"text": "c"}\n')
    rows = [row for _, row in rows_of(path, Layout("json"))]
    assert [len(row["text"]) for row in rows] == [1, 20_000_000, 1]

    monkeypatch.setattr(readers, "LONGEST", 1 << 20)
    found = rows_of(path, Layout("json"))
    assert [row for _, row in found] == [rows[0], f"{path}:2: longer than 1 MiB", rows[2]]
    check_everywhere(path, Layout("json"), found)
    text = Layout("text")
    assert [str(row) for _, row in rows_of(path, text)] == [
        f"{path}: cannot be read: longer than 1 MiB"
    ]


def test_what_is_too_long_does_not_depend_on_the_place(tmp_path: Path, monkeypatch) -> None:
    path, layout = tmp_path / "a.txt", Layout("text", separator="||")
    path.write_bytes(b"||".join(b"a" * size for size in (3, 22, 19, 20, 21, 1, 20, 30, 21)))
    monkeypatch.setattr(readers, "LONGEST", 20)
    for chunk in (3, 7, 16, 64):
        monkeypatch.setattr(files, "CHUNK", chunk)
        found = rows_of(path, layout)
        assert [isinstance(row, dict) for _, row in found] == [1, 0, 1, 1, 0, 1, 1, 0, 0]
        check_everywhere(path, layout, found)


@pytest.mark.parametrize(
    ("content", "want"),
    [
        (b'[{"text": "a"}, {"text": "b"}]', [{"text": "a"}, {"text": "b"}]),
        (BOM + b'[\n{"text": "a"},\n3]', [{"text": "a"}, "row 1: not a JSON object, but 3"]),
        (b'{\n"text": "a"\n}\n', [{"text": "a"}]),
        (b'\n\n{"text": "a"}\n', [{"text": "a"}]),
        (b"[]", []),
        (b'[{"text": "a"}', ["cannot be read: Expecting"]),
        (b"[" * 100_000, ["cannot be read: nested too deeply"]),
        (b"  \n", []),
    ],
)
def test_a_file_of_one_value(content: bytes, want: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    found = rows_of(path, Layout("json"))
    assert len(found) == len(want)
    for (_, row), wanted in zip(found, want, strict=True):
        assert wanted in str(row) if isinstance(wanted, str) else row == wanted
    if END not in dict(found):
        check_everywhere(path, Layout("json"), found)


def test_links_and_names_that_are_no_data(tmp_path: Path, caplog, monkeypatch) -> None:
    inner, far = tmp_path / "data/inner", tmp_path / "far"
    for folder in (inner, far, tmp_path / "data/.git", tmp_path / "data/_temporary"):
        folder.mkdir(parents=True)
        for name in ("a.jsonl", ".a.jsonl", "_a.jsonl", "notes.txt", "b.jsonl.zst"):
            (folder / name).write_text("x")
    (tmp_path / "data/linked").symlink_to(far)
    (inner / "up").symlink_to(tmp_path / "data")
    (far / "back").symlink_to(far)
    (far / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    want = [
        f"data/{folder}/{name}"
        for folder in ("inner", "linked")
        for name in ("a.jsonl", "b.jsonl.zst")
    ]
    found = resolve(str(tmp_path / "data"), SUFFIXES["json"])
    assert [str(Path(file.path).relative_to(tmp_path)) for file in found] == want
    assert [file.size for file in found] == [1] * 4
    assert "read already" in caplog.text
    for pattern in (
        "data/**/*.jsonl*",
        "data/*/*.jsonl*",
        "data/*//*.jsonl*",
        "data/inner/../*/*.jsonl*",
        "data/*/**/*.jsonl*",
        "data/inn*/../*/*.jsonl*",
    ):
        found = resolve(f"{tmp_path}/{pattern}", ())
        assert [Path(f.path).name for f in found] == ["a.jsonl", "b.jsonl.zst"] * 2, pattern
    (far / "cache-1f.arrow").write_text("x")
    assert resolve(str(far), SUFFIXES["arrow"]) == []
    assert resolve(str(far / "*.arrow"), ()) == []
    assert len(resolve(str(far / "cache-1f.arrow"), ())) == 1
    assert len(resolve(str(far / "_a*"), ())) == 1
    assert resolve(str(tmp_path / "none/**"), ()) == []
    patterns = "data", "data/**/*", "data/*/*.jsonl"

    def locked(folder: str) -> Iterator[os.DirEntry[str]]:
        if folder.endswith("inner"):
            raise OSError(number, "the reason", folder)
        return scandir(folder)

    scandir = os.scandir
    monkeypatch.setattr("os.scandir", locked)
    number = errno.EACCES
    for pattern in patterns:
        warn_once.cache_clear()
        caplog.clear()
        found = resolve(str(tmp_path / pattern), SUFFIXES["json"])
        assert {Path(file.path).parent.name for file in found} == {"linked"}
        assert "inner: the reason; left out" in caplog.text
    number = errno.ESTALE  # it is there later
    for pattern in patterns:
        with pytest.raises(OSError, match="the reason"):
            resolve(str(tmp_path / pattern), SUFFIXES["json"])


def test_a_file_that_changes_under_the_job(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' * 1000)
    file = stat(str(path))
    rows = read(Range(file), Layout("json"))
    assert next(rows)[2] == {"text": "a"}
    path.rename(tmp_path / "b.jsonl")
    assert len(list(rows)) == 999  # it was open
    with pytest.raises(ChangedError, match=r"a.jsonl: has gone since the job started"):
        next(read(Range(file), Layout("json")))
    path.write_text("{}")
    with pytest.raises(ChangedError, match=r"a.jsonl: had 14000 bytes at the start, and has 2 now"):
        next(read(Range(file), Layout("json")))


def test_zeros_behind_a_gzip_member_are_padding(tmp_path: Path) -> None:
    """As gzip itself takes them: of tapes, and of block devices."""
    rows = [{"text": "a" * 99 + str(number)} for number in range(4000)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    halves = [gzip.compress(half) for half in (lines[: 1 << 18], lines[1 << 18 :])]
    path = tmp_path / "a.jsonl.gz"
    for zeros in (1, 512):
        path.write_bytes(halves[0] + bytes(zeros) + halves[1] + bytes(zeros))
        found = rows_of(path, Layout("json"))
        assert [row for _, row in found] == rows
    check_everywhere(path, Layout("json"), found[-40:])
    path.write_bytes(gzip.compress(lines) + b"no zeros")
    *_, (_, last) = rows_of(path, Layout("json"))
    assert "cannot be read after" in str(last)


@pytest.mark.skipif(shutil.which("zstd") is None, reason="needs the program zstd")
def test_a_file_of_zstd_long_gets_a_command_that_works(tmp_path: Path) -> None:
    """Its window is larger than what is read here, and it is no bad record: it is whole."""
    lines = "".join(json.dumps({"text": str(n)}) + "\n" for n in range(30_000))
    path, plain = tmp_path / "it's.jsonl.zst", tmp_path / "it's.jsonl"
    # content of unknown size, so that the window is what was asked for
    subprocess.run(["zstd", "-q", "--long=28", "-o", path], input=lines.encode(), check=True)
    source = entry(dataset="json", dataset_path=str(path))
    with pytest.raises(ConfigError) as caught:
        list(LocalDocuments(source, [stat(str(path))]).read(0, 1))
    assert not isinstance(caught.value, RecordError)
    message, fix = str(caught.value).split("\n  fix: ")
    assert "is made by `zstd --long`, with a window of more than 128 MiB" in message
    command, _ = fix.split(", and name that file")
    subprocess.run(command, shell=True, check=True)
    assert plain.read_text() == lines
