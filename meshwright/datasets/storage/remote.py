"""How object storage is asked: web servers by Python itself, others by fsspec.

Each answer of a web server says which content it is of.
"""

import re
import urllib.error
import urllib.request
from functools import lru_cache
from typing import Any

from meshwright.system.errors import ConfigError

PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "az": "adlfs",
}
"""That fsspec needs, by the beginning of an address."""


@lru_cache(8)
def file_system(address: str) -> Any:
    """Return the fsspec file system of an address."""
    return of_scheme(address.partition("://")[0])


@lru_cache(8)
def of_scheme(scheme: str) -> Any:
    import fsspec  # type: ignore[import-untyped]  # here: local files need none

    try:
        return fsspec.filesystem(scheme)
    except ImportError as error:
        package = PACKAGES.get(scheme, "")
        fix = f"pip install {package}" if package else f"install the package that {error} names"
        what = f"{scheme}:// needs a package that is not installed"
        raise ConfigError("", f"{what}\n  fix: {fix}") from error
    except ValueError as error:
        fix = "use s3://, gs://, hf:// or https://, or mount it and name the path"
        raise ConfigError(
            "", f"{scheme}:// is no storage that fsspec knows\n  fix: {fix}"
        ) from error


STAMPS = (
    "ETag",
    "etag",
    "md5Hash",
    "blob_id",
    "generation",
    "LastModified",
    "last_modified",
    "mtime",
)
"""Fields of fsspec's descriptions that another content changes, the surest first."""


def look(address: str, timeout_s: float) -> tuple[int, str]:
    """Return the size of a file, and a stamp that another content changes."""
    if address.startswith(("http://", "https://")):
        _, stamp, size = ask(address, 0, 1, timeout_s)
        return size, stamp
    files = file_system(address)
    files.invalidate_cache()
    found = files.info(address)
    if found.get("type") == "directory":
        raise IsADirectoryError(f"{address} is a folder")
    stamp = next((f"{name} {found[name]}" for name in STAMPS if found.get(name)), "")
    return int(found["size"]), stamp


def get(address: str, begin: int, size: int, timeout_s: float) -> tuple[bytes, str]:
    """Return the bytes of a range, and the stamp of the content.

    Raises:
        ConnectionError: if not all of them come.
        OSError: as `ask`.
    """
    content, stamp, whole = ask(address, begin, size, timeout_s)
    if len(content) != max(min(size, whole - begin), 0):
        raise ConnectionError(f"{len(content)} of {size} bytes came")
    return content, stamp


CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)")


def ask(address: str, begin: int, size: int, timeout_s: float) -> tuple[bytes, str, int]:
    """Return the bytes of a range, the stamp of the content, and its whole size.

    Source: RFC 9110, sections 14 (ranges) and 8.8 (validators).
    """
    headers = {"Range": f"bytes={begin}-{begin + size - 1}", "Accept-Encoding": "identity"}
    request = urllib.request.Request(address, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            said = CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
            if answer.status != 206 or said is None or int(said[1]) != begin:
                raise ConfigError(
                    "", f"{address}: its server gives no ranges of bytes\n  fix: download the file"
                )
            return answer.read(), _stamp_of(answer.headers), int(said[3])
    except urllib.error.HTTPError as error:
        said = CONTENT_RANGE.fullmatch(error.headers.get("Content-Range", ""))
        if error.code == 416 and said is not None:  # nothing is that far behind
            return b"", _stamp_of(error.headers), int(said[3])
        if error.code in (404, 410):
            raise FileNotFoundError(f"{address}: the server has no such file") from error
        if error.code in (401, 403):
            raise PermissionError(f"the server answers {error.code} {error.reason}") from error
        raise


def _stamp_of(headers: Any) -> str:
    return str(headers.get("ETag") or headers.get("Last-Modified") or "")
