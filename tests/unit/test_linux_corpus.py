"""scripts/linux_corpus.py: one package, one corpus, each known by a hash."""

import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path

import pytest

from meshwright.config.loader import load_config
from meshwright.datasets.named_sources import check_files, entries
from scripts import linux_corpus

FILES = {
    "linux-source-6.1/init/main.c": b"int main;\n" * 9,
    "linux-source-6.1/Kconfig": "# f\u00fcr\n".encode(),
    "linux-source-6.1/README.latin1": b"\xe9\n",
    "linux-source-6.1/drivers/gpu/drm/amd/include/registers.h": b"#define A 1\n",
    "linux-source-6.1/logo.ppm": b"P3",
    "linux-source-6.1/fs/large.c": b"0," * (linux_corpus.LONGEST // 2 + 1),
    "linux-source-6.1/fs/empty.h": b"",
}


def tar_of(files: dict[str, bytes], mode: str) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode=mode) as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def ar_of(files: dict[str, bytes]) -> bytes:
    made = b"!<arch>\n"
    for name, content in files.items():
        made += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        made += content + b"\n" * (len(content) % 2)
    return made


@pytest.fixture
def package(tmp_path: Path, monkeypatch) -> Path:
    source = {"./usr/src/linux-source-6.1.tar.xz": tar_of(FILES, "w:xz")}
    parts = {
        "debian-binary": b"2.0\n",
        "control.tar.xz": b"odd",
        "data.tar.xz": tar_of(source, "w:xz"),
    }
    (tmp_path / "a.deb").write_bytes(ar_of(parts))
    content = hashlib.sha256((tmp_path / "a.deb").read_bytes()).hexdigest()
    monkeypatch.setattr(linux_corpus, "PACKAGE", content)
    return tmp_path / "a.deb"


def run(monkeypatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["linux_corpus", *map(str, words)])
    linux_corpus.main()


def test_a_package_gives_one_corpus_that_can_be_checked(
    package, monkeypatch, tmp_path, capsys
) -> None:
    folder = tmp_path / "corpus"
    monkeypatch.setattr(linux_corpus, "SHARD_BYTES", 100)
    with pytest.raises(SystemExit, match="2"):  # of another package, as far as its hash tells
        run(monkeypatch, package, folder)
    shards = sorted(folder.iterdir())
    assert [shard.name for shard in shards] == ["linux_00.jsonl", "linux_01.jsonl"]
    rows = [json.loads(line) for shard in shards for line in shard.read_text("utf-8").splitlines()]
    assert [row["path"] for row in rows] == ["init/main.c", "Kconfig"]
    assert rows[1]["text"] == "# f\u00fcr\n"
    whole = b"".join(shard.read_bytes() for shard in shards)
    monkeypatch.setattr(linux_corpus, "CORPUS", hashlib.sha256(whole).hexdigest())
    run(monkeypatch, "--check", folder)
    assert "2 files" in capsys.readouterr().out
    words = ["debug_model", "--training.dataset=json", f"--training.dataset_path={folder}"]
    check_files(*entries(load_config(words).training, "training"))
    with shards[1].open("a") as file:
        file.write(" ")
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "--check", folder)
    assert "fix: make it again" in capsys.readouterr().err


def test_another_package_is_rejected(package, monkeypatch, tmp_path, capsys) -> None:
    package.write_bytes(package.read_bytes() + b"\n")
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, package, tmp_path / "corpus")
    assert "fix: apt-get download linux-source-6.1=" in capsys.readouterr().err
    assert not (tmp_path / "corpus").exists()
