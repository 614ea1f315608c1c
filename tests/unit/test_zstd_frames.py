"""A .zst file that was cut off is an error, not a shorter file."""

import pytest

from meshwright.config.job_config import Source
from meshwright.datasets.entry import Entry
from meshwright.datasets.sources import open_local
from meshwright.datasets.zstd_frames import MAGIC, CutError, check_whole
from meshwright.errors import ConfigError


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


@pytest.mark.parametrize("streamed", [False, True])
def test_a_source_with_a_cut_file_is_refused(tmp_path, streamed: bool) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(FRAMES["window"][:-4])
    source = Source(dataset="json", dataset_path=str(tmp_path))
    entry = Entry("training", "a", source)
    with pytest.raises(ConfigError, match="a.jsonl.zst: cannot be read: the file is cut off"):
        open_local("json", entry, streamed)
