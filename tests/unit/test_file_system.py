"""Files that appear whole."""

from pathlib import Path

import pytest

from meshwright.file_system import whole_file


def test_a_file_is_whole_or_as_before(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(TypeError), whole_file(path) as file:
        file.writelines([b"half", None])
    assert path.read_text() == "old"
    with whole_file(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [*tmp_path.iterdir()] == [path]
