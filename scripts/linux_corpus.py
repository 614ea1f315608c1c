"""Make a corpus of hundreds of millions of tokens, the same everywhere: the source of Linux 6.1.

It comes from one package of Debian, which is checked by its hash. No network is used:

    apt-get download linux-source-6.1=6.1.176-1       # 139 MB; elsewhere: snapshot.debian.org
    python -m scripts.linux_corpus linux-source-6.1_6.1.176-1_all.deb linux_corpus
    python -m scripts.linux_corpus --check linux_corpus       # are these the files of the package?

The folder then holds JSON lines of {"text", "path"}, one for each text file of the kernel, in the
order of the package: 74,703 documents of 868 MB, about 525 million tokens of the debug presets'
tokenizer. Train on them with dataset = "json" and dataset_path = "linux_corpus". Generated tables
of AMD's registers, 30 % of the package's bytes, and files that are not UTF-8 are left out.
"""

import argparse
import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

PACKAGE = "9305d1a151b8e83dcb88aa11361e7b9513f0c252bdf7f5647e4542762d99c094"
"""SHA-256 of linux-source-6.1_6.1.176-1_all.deb, as Debian's signed index has it."""

CORPUS = "c7a2b84e84e14a2f9112fcee6d658f7539eb52674ec498c7b3278bb951146989"
"""SHA-256 of the files that this script writes, one after the other."""

SUFFIXES = (".c", ".h", ".S", ".rst", ".txt", ".rs", ".py", ".pl", ".sh", ".dts", ".dtsi", ".yaml")
NAMES = ("Kconfig", "Makefile", "README")
GENERATED = "drivers/gpu/drm/amd/include/"
LONGEST = 1 << 19
"""Bytes of a file that is kept: longer ones are tables."""

SHARD_BYTES = 1 << 26
BLOCK = 1 << 20


def main() -> None:
    """Run the command line; exit with 2 if a hash is another."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", nargs="?", type=Path, help="Debian's package, downloaded")
    parser.add_argument("folder", type=Path, help="of the corpus; it must not be there yet")
    parser.add_argument("--check", action="store_true", help="only compare the hash of the corpus")
    given = parser.parse_args()
    if not given.check:
        if given.package is None:
            parser.error("name the package and a folder")
        if (found := hash_of([given.package])) != PACKAGE:
            fix = "apt-get download linux-source-6.1=6.1.176-1, or snapshot.debian.org"
            fail(f"{given.package}: its SHA-256 is {found}, not {PACKAGE}\n  fix: {fix}")
        write(documents(given.package), given.folder)
    shards = sorted(given.folder.glob("linux_*.jsonl"))
    if (found := hash_of(shards)) != CORPUS:
        fail(f"{given.folder}: its SHA-256 is {found}, not {CORPUS}\n  fix: make it again")
    size = sum(shard.stat().st_size for shard in shards)
    print(f"{given.folder}: {len(shards)} files, {size:,} bytes, as published: SHA-256 {CORPUS}")


def fail(message: str) -> None:
    """Print a message, and exit with 2."""
    print(f"linux_corpus: {message}", file=sys.stderr)
    sys.exit(2)


def hash_of(paths: list[Path]) -> str:
    """Return the SHA-256 of the content of files, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
    return digest.hexdigest()


def documents(package: Path) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each file that is wanted, in the order of the package."""
    with package.open("rb") as opened:
        data = member(opened, "data.tar")
    with tarfile.open(fileobj=io.BytesIO(data)) as outer:
        (source,) = (entry for entry in outer if entry.name.endswith("linux-source-6.1.tar.xz"))
        with tarfile.open(fileobj=outer.extractfile(source), mode="r|xz") as inner:
            for entry in inner:
                path = entry.name.partition("/")[2]
                if entry.isfile() and is_wanted(path, entry.size):
                    content = inner.extractfile(entry)
                    assert content is not None
                    with suppress(UnicodeDecodeError):
                        yield path, content.read().decode()


def is_wanted(path: str, size: int) -> bool:
    """Return whether a file of the kernel is text that people have written."""
    name = path.rpartition("/")[2]
    is_text = name.endswith(SUFFIXES) or name.startswith(NAMES)
    return is_text and 0 < size <= LONGEST and not path.startswith(GENERATED)


def member(archive: BinaryIO, name: str) -> bytes:
    """Return a file of an `ar` archive, as Debian's packages are. Source: man 5 deb, man 5 ar."""
    assert archive.read(8) == b"!<arch>\n"
    while header := archive.read(60):
        size = int(header[48:58])
        content = archive.read(size + size % 2)[:size]
        if header[:16].decode().startswith(name):
            return content
    raise ValueError(f"the package has no {name}")


def write(found: Iterator[tuple[str, str]], folder: Path) -> None:
    """Write documents as JSON lines, to files of about `SHARD_BYTES`."""
    folder.mkdir(parents=True)
    number, file = 0, None
    for path, text in found:
        if file is None:
            file = (folder / f"linux_{number:02}.jsonl").open("w", encoding="utf-8", newline="\n")
            number += 1
        file.write(json.dumps({"text": text, "path": path}, ensure_ascii=False) + "\n")
        if file.tell() >= SHARD_BYTES:
            file.close()
            file = None
    if file is not None:
        file.close()


if __name__ == "__main__":
    main()
