"""A .zst file that was cut off is an error, not a shorter file."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from meshwright.datasets.sources.faults import MAGIC, CutError, check_whole

from meshwright.config.training import Source
from meshwright.datasets.files import Entry
from meshwright.datasets.hub import StreamedRows
from meshwright.datasets.sources import open_local
from meshwright.system.errors import ConfigError


def block(content: bytes, kind: int, is_last: bool, size: int | None = None) -> bytes:
    size = len(content) if size is None else size
    return (size << 3 | kind << 1 | is_last).to_bytes(3, "little") + content


def frame(descriptor: int, header: bytes, *blocks: bytes, checksum: bytes = b"") -> bytes:
    return MAGIC.to_bytes(4, "little") + bytes([descriptor]) + header + b"".join(blocks) + checksum


TEXT = b'{"text": "abc"}\n'
FRAMES = {
    "window": frame(0, b"\x58", block(TEXT, 0, False), block(TEXT, 2, True)),
    "size and checksum": frame(0x24, b"\x20", block(TEXT, 0, True), checksum=b"abcd"),
    "a byte, repeated": frame(0xC0, b"\x58" + bytes(8), block(b"x", 1, True, size=70_000)),
    "dictionary": frame(0x63, bytes(4) + bytes(2), block(TEXT, 0, True)),
    "skippable": (0x184D2A53).to_bytes(4, "little") + b"\x03\0\0\0abc",
}


def test_whole_files_are_whole_and_no_beginning_of_one_is(tmp_path) -> None:
    path = tmp_path / "a.zst"
    path.write_bytes(b"".join(FRAMES.values()))
    check_whole(path)
    for content in FRAMES.values():
        path.write_bytes(content)
        check_whole(path)
        for end in range(len(content)):
            path.write_bytes(content[:end])
            with pytest.raises(CutError):
                check_whole(path)


@pytest.mark.parametrize(
    "content",
    [b"no zstd at all", FRAMES["window"] + b"junk, junk", frame(0, b"\x58", block(b"", 3, True))],
)
def test_other_bytes_are_none(tmp_path, content: bytes) -> None:
    (tmp_path / "a.zst").write_bytes(content)
    with pytest.raises(CutError):
        check_whole(tmp_path / "a.zst")


def test_a_source_with_a_cut_file_is_refused(tmp_path) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(FRAMES["window"][:-4])
    source = Source(dataset="json", dataset_path=str(tmp_path))
    entry = Entry("training", "a", source)
    for _ in range(2):
        with pytest.raises(ConfigError, match="a.jsonl.zst: cannot be read: the file is cut off"):
            open_local("json", entry, streamed=False)


class Rows:
    """Stands for `datasets`' rows of 6 files, one row each."""

    num_shards = 6

    def __init__(self) -> None:
        self._next = 0

    def shard(self, num_shards: int, index: int) -> "Rows":
        return self

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["shard_idx"]

    def state_dict(self) -> dict[str, int]:
        return {"shard_idx": self._next}

    def __iter__(self) -> Iterator[dict[str, str]]:
        while self._next < self.num_shards:
            self._next += 1
            yield {"text": "abc"}


@pytest.mark.parametrize(("cut", "readable"), [(0, 0), (1, 0), (2, 1), (5, 4)])
def test_a_stream_checks_each_file_before_it_reads_it(tmp_path, cut: int, readable: int) -> None:
    """Not all at the start: that would read every byte of a large source on every rank."""
    files = [str(tmp_path / f"{number}.jsonl.zst") for number in range(6)]
    for number, file in enumerate(files):
        Path(file).write_bytes(FRAMES["window"][: -4 if number == cut else None])
    entry = Entry("training", "a", Source(dataset="json", dataset_path=str(tmp_path)))
    rows = StreamedRows(Rows(), entry, lambda row, place: row["text"], files)
    reader = rows.read(0, 1)
    for _ in range(readable):
        assert reader.state["shard_idx"] < cut
        next(reader)
    with pytest.raises(ConfigError, match=f"{cut}.jsonl.zst: cannot be read: the file is cut off"):
        reader.state  # noqa: B018
    resumed = rows.read(0, 1, {"shard_idx": 4})
    if cut < 3:  # and none that is read no more
        assert resumed.state == {"shard_idx": 4}
        assert [*resumed] == ["abc", "abc"]
    with pytest.raises(ConfigError, match=f"{cut}.jsonl.zst"):  # in a window that has many files
        list(rows.read(0, 1))
