"""Files of other kinds than a source reads: archives, tables, documents, other compression."""

import re
import shlex
from collections.abc import Sequence
from contextlib import suppress

from meshwright.datasets.data_file import DataFile
from meshwright.datasets.files import PACKED, chunks
from meshwright.system.errors import config_error

TABLES = tuple(f"{name}{packed}" for name in (".csv", ".tsv") for packed in ("", *PACKED))
"""Endings of tables as text: their first line has the columns."""

TABLE_FIX = "write its rows as JSON lines, as docs/data.md#csv does"

FIRST_BYTES = {
    rb"(?s).{257}ustar": ("a tar archive", "unpack it: tar -xf {}"),
    rb"PK\x03\x04": ("a zip archive, or a document of an office program", "unpack it: unzip {}"),
    rb"\xfd7zXZ\x00": ("compressed by xz", "unpack it: xz -dk {}"),
    rb"7z\xbc\xaf\x27\x1c": ("a 7z archive", "unpack it: 7z x {}"),
    rb"Rar!\x1a\x07": ("a rar archive", "unpack it: unrar x {}"),
    rb"\x1f\x8b\x08": ("compressed by gzip", "give its name the ending .gz: mv {0} {0}.gz"),
    rb"\x28\xb5\x2f\xfd": ("compressed by zstd", "give its name the ending .zst: mv {0} {0}.zst"),
    rb"BZh[1-9]1AY&SY": ("compressed by bzip2", "give its name the ending .bz2: mv {0} {0}.bz2"),
    rb"%PDF-": ("a PDF", "take the text from it: pdftotext {}"),
    rb"SQLite format 3\x00": ("a database of SQLite", "write its rows as JSON lines"),
}
"""By a pattern of the first bytes after decompression: the kind of a file, and a fix."""

MOST_LOOKED_AT = 4


def check_kind(files: Sequence[DataFile], key: str) -> None:
    """Raise `ConfigError` of `key` if the first bytes of one of `files`, of which some are looked
    at, show that it holds neither text nor rows."""
    for file in files[:: -(-len(files) // MOST_LOOKED_AT) or 1]:
        first = b""
        with suppress(OSError, ValueError, EOFError):  # its reader names the fault
            first = next(chunks(file), b"")
        for pattern, (kind, fix) in FIRST_BYTES.items():
            if re.match(pattern, first):
                fix = fix.format(shlex.quote(file.path))
                raise config_error(key, file.path, f"is {kind}, which isn't read", fix)
