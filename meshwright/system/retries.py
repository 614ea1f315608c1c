"""Which errors of storage may pass, and reads that wait for that. No torch."""

import errno
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TypeVar

from meshwright.system.errors import ConfigError, StorageError, first_line
from meshwright.system.log import busy, logger

T = TypeVar("T")

RETRY_AFTER_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Seconds before each further attempt after a read error that may pass."""

ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors that are answers: there is no such file."""

LASTING = frozenset(
    {None, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}
)
"""Numbers of errors that stay until a person does something; None: it has no number."""

CLIENTS = {"aiohttp", "fsspec", "http", "httpcore", "httpcore2", "httpx", "httpx2", "requests"}
CLIENTS |= {"urllib", "urllib3", "botocore", "aiobotocore", "gcsfs", "google"}
"""Modules whose errors are of a connection, unless they say otherwise. By name, because to import
them takes a tenth of the time to a command's first word."""

TRY_LATER = (408, 425, 429)
"""Answers of a server to a request that is right; those from 500 are others."""

OF_CONNECTIONS = {"ConnectionError", "HTTPClientError", "IncompleteReadError", "ChecksumError"}
OF_CONNECTIONS |= {"CredentialRetrievalError", "MetadataRetrievalError", "TransportError"}
"""Classes of botocore's and google.auth's errors that may pass, the ones of a server that renews
credentials among them. Their others are of credentials and settings."""

CREDENTIALS_FIX = (
    "correct the credentials of the storage (for s3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "AWS_PROFILE, or the role of this machine), or let them read it"
)


def may_pass(error: BaseException | None) -> bool:
    """Return whether the error, or its cause, is one of a network or a file system that may be gone
    later.

    `datasets` makes a `FileNotFoundError` of a hub that doesn't answer, and hides the cause.
    """
    passes: bool | None = None
    while error is not None:
        module = type(error).__module__
        if (status := _http_status(error)) is not None:
            return status >= 500 or status in TRY_LATER
        if _is_of_settings(error):
            return False
        if "OfflineModeIsEnabled" in repr(error):  # a variable of the user's
            return False
        is_of_network = module.partition(".")[0] in CLIENTS
        if is_of_network or isinstance(error, ConnectionError | TimeoutError):
            passes = True
        elif isinstance(error, OSError) and passes is None:
            # pyarrow's error of a damaged file is an OSError without a number
            is_answer = isinstance(error, (*ABSENT, PermissionError))
            passes = not is_answer and error.errno not in LASTING
        error = error.__cause__ or error.__context__
    return bool(passes)


def _http_status(error: BaseException) -> int | None:
    """Return a server's answer to the request that failed with `error`; None: there is none."""
    response = getattr(error, "response", error)
    if isinstance(response, dict):  # botocore's
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    elif type(error).__module__ == "urllib.error":
        status = getattr(error, "code", None)
    else:
        status = getattr(response, "status_code", None)
    return status if isinstance(status, int) else None


def _is_of_settings(error: BaseException) -> bool:
    """Return whether a client has found no credentials, or rejects its own settings."""
    is_of_client = type(error).__module__.startswith(("botocore", "google.auth"))
    return is_of_client and not OF_CONNECTIONS & {base.__name__ for base in type(error).__mro__}


def _is_denied(error: BaseException | None) -> bool:
    """Return whether a storage rejects this user's credentials, or its client has none."""
    while error is not None:
        if _http_status(error) in (400, 401, 403) or _is_of_settings(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def read_patiently(path: Path | str, read: Callable[[], T]) -> T:
    """Return `read()`, which reads `path`; call it again after growing waits if that fails.

    A server that restarts or a stale handle says nothing about a file's content. A permission is
    not waited for, since it takes a person to give it. An error that doesn't pass is raised.

    Raises:
        StorageError: if the errors stay.
        ConfigError: if this user may not read it.
    """
    is_address = "://" in str(path)
    for wait_s in (*RETRY_AFTER_S, None):
        try:
            # a client of object storage may wait and try again by itself
            with busy(f"reading {path}") if is_address else nullcontext():
                return read()
        except (*ABSENT, ConfigError):
            raise
        except PermissionError as error:
            what = f"{path} cannot be read: {error.strerror or error}"
            fix = CREDENTIALS_FIX if is_address else "let this user read it"
            raise ConfigError("", f"{what}\n  fix: {fix}") from error
        except Exception as error:  # whatever a client of a storage raises
            if is_address and not may_pass(error) and _is_denied(error):
                what = f"{path} cannot be read: {first_line(error)}"
                raise ConfigError("", f"{what}\n  fix: {CREDENTIALS_FIX}") from error
            if not may_pass(error) or getattr(error, "has_waited", False):
                raise
            reason = getattr(error, "strerror", None) or first_line(error)
            what = f"{path} cannot be read: {reason}"
            if wait_s is None:
                fix = "run the same command again when the storage answers"
                failed = StorageError(f"{what}\n  fix: {fix}")
                failed.has_waited = True
                raise failed from error
            logger.warning("%s; trying again in %g s", what, wait_s)
            time.sleep(wait_s)
    raise AssertionError
