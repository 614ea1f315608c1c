"""Looks at files on a file system or in object storage, and reads bytes of the latter.

Web servers are asked by Python itself, since each of their answers says which content it is of;
other storage by fsspec.
"""

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from meshwright.datasets.data_file import DataFile, is_address, read_or_say_why
from meshwright.system.errors import ConfigError

TIMEOUT_S = 60.0
"""After so long without a byte, a request to a server has failed."""

AT_ONCE = 16
"""Requests that look at many files."""


def stat(path: str) -> DataFile:
    """Look at one file.

    Raises:
        FileNotFoundError: if there is none.
        StorageError: if the storage doesn't answer.
        ConfigError: if it may not be read, or a package is missing.
    """
    if not is_address(path):
        state = os.stat(path)
        return DataFile(path, state.st_size, str(state.st_mtime_ns))
    return read_or_say_why(path, lambda: look(path))


def stat_all(paths: Sequence[str]) -> list[DataFile]:
    """Look at many files, in object storage by many requests at once."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(stat, paths))


def find_files(address: str, suffixes: tuple[str, ...]) -> list[str]:
    """Return the files that an address stands for: itself, the ones below it that end in one of
    `suffixes`, or its glob. A name below it that starts with "." or "_" is left out.

    Raises:
        ConfigError: if files can't be listed there.
    """
    scheme = address.partition("://")[0]
    if scheme in ("http", "https"):
        if not address.endswith(suffixes):
            fix = f"name one file, which ends in {' or '.join(suffixes)}"
            raise ConfigError("", f"{address}: a web server does not list files\n  fix: {fix}")
        return [address]
    files, is_glob = file_system(address), "*" in address or "?" in address
    listed = read_or_say_why(
        address, lambda: list((files.glob if is_glob else files.find)(address))
    )
    names = sorted(name if "://" in name else f"{scheme}://{name.lstrip('/')}" for name in listed)
    if names == [address] or is_glob:
        return names
    return [
        name
        for name in names
        if name.endswith(suffixes)
        and not any(part[0] in "._" for part in name[len(address) :].strip("/").split("/"))
    ]


def file_system(address: str) -> Any:
    """Return the fsspec file system of an address; fsspec keeps one of each."""
    import fsspec  # type: ignore[import-untyped]  # here: local files need none

    scheme = address.partition("://")[0]
    try:
        return fsspec.filesystem(scheme)
    except ImportError as error:
        what = f"{scheme}:// needs a package that is not installed\n  fix: {error}"
        raise ConfigError("", what) from error
    except (ValueError, TypeError) as error:  # TypeError: as ftp, which wants more than addresses
        fix = "use s3://, gs://, hf:// or https://, or mount it and name the path"
        what = f"{scheme}:// is no storage that fsspec opens by an address"
        raise ConfigError("", f"{what}\n  fix: {fix}") from error


STAMPS = (
    "ETag",
    "etag",
    "md5Hash",
    "blob_id",
    "checksum",
    "LastModified",
    "last_modified",
    "mtime",
)
"""Fields of fsspec's descriptions that a change of the content changes, the surest first."""


def look(address: str) -> DataFile:
    if address.startswith(("http://", "https://")):
        return ask(address, 0, 1)[1]
    files = file_system(address)
    files.invalidate_cache()
    info = files.info(address)
    if info.get("type") == "directory":
        raise IsADirectoryError(f"{address} is a folder")
    stamp = next((f"{name} {info[name]}" for name in STAMPS if info.get(name)), "")
    return DataFile(address, int(info["size"]), stamp)


CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)")


def ask(address: str, begin: int, size: int) -> tuple[bytes, DataFile]:
    """Return the bytes of a range that a web server gives, and the whole content as it says.

    Source: RFC 9110, sections 14 (ranges) and 8.8 (validators).
    """
    # not at the top: with ssl they take a tenth of the time to a command's first word
    import urllib.error
    import urllib.parse
    import urllib.request

    headers = {"Range": f"bytes={begin}-{begin + size - 1}", "Accept-Encoding": "identity"}
    # spaces and umlauts as browsers send them; what is written so already stays
    url = urllib.parse.quote(address, safe="%/:?#[]@!$&'()*+,;=~|")
    request = urllib.request.Request(url, headers=headers)
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code in (404, 410):
            raise FileNotFoundError(f"{address}: the server has no such file") from error
        if error.code in (401, 403):
            raise PermissionError(f"the server answers {error.code} {error.reason}") from error
        if error.code != 416:  # nothing is that far behind
            raise
        answer = error
    with answer:
        said = CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        if answer.status not in (206, 416) or said is None or int(said[1] or begin) != begin:
            what = f"{address}: its server gives no ranges of bytes"
            raise ConfigError("", f"{what}\n  fix: download the file")
        stamp = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        content = answer.read() if answer.status == 206 else b""
        return content, DataFile(address, int(said[3]), str(stamp))
