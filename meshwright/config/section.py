"""The base class of a section, and the types of its values: paths, and numbers filled in later."""

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def check_is_path(value: str) -> str:
    """Reject an address: taken for a path, "s3://bucket" is a folder called "s3:"."""
    if match := ADDRESS.match(value):
        fix = "mount it as a file system, or copy it, and name the path"
        fix = "leave out file://" if match[1].lower() == "file" else fix
        rule = "starts an address, and a path of this machine's file systems is needed"
        raise ValueError(f"{match[0]} {rule}\n  fix: {fix}")
    return value


LOCAL_PATH = "local path"

LocalPath = Annotated[str, AfterValidator(check_is_path), LOCAL_PATH]

INPUT_PATH = "input path"

InputPath = Annotated[LocalPath, INPUT_PATH]
"""A path that the job reads. Relative in a TOML: to that TOML's folder; on the command line: to
the working directory. The loader makes it absolute."""

LOGIN = re.compile(r"(?i)https?://[^/]*@|[^/]+://[^/]*:[^/]*@")


def check_address(value: str) -> str:
    """Reject an address of a local file, or one with a user or a password in it."""
    if LOGIN.match(value):
        rule = "holds a login, which logs, checkpoints and reports would show"
        fix = "leave it out: clients of storages find yours in the environment or their own files"
        raise ValueError(f"{rule}\n  fix: {fix}")
    return check_is_path(value) if value.lower().startswith("file://") else value


DataPath = Annotated[str, AfterValidator(check_address), LOCAL_PATH, INPUT_PATH]
"""An `InputPath` that may be an address of object storage."""

BYTES = "bytes"
"""Stands where a tokenizer's path would, for the one that has no file."""

CHAT_TEMPLATES = ("llama2", "llama3", "llama3.1", "mixtral", "olmo2", "qwen2.5", "qwen3")
"""Chat templates that are shipped. As a mark of an `InputPath`: it may be one of these names."""

MODULE_OBJECT = re.compile(r"[A-Za-z_][\w.]*(?<!\.py):\w+")
"""`package.module:function` stands where a path to a Python file and its function would."""

PATH_OR_NAME = "path or name"
"""Marks an `InputPath` that may be a name instead: without a slash, and without .py at its end."""


def is_path(value: str) -> bool:
    """Return whether the value of a key that takes a path or a name is a path."""
    return "/" in value or value.partition(":")[0].endswith(".py")


OUTPUT_PATH = "output path"

OrFilledIn = Annotated[int, Field(ge=-1)]
"""A positive number, or -1 for the one that follows from the rest of the config (0 is rejected
where it is filled in)."""


class Section(BaseModel):
    """A TOML table: no key is ignored, no type is guessed, nothing changes after it is read."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # or an infinite number of [options.NAME] would be null
        protected_namespaces=(),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_fits(cls, value: object) -> object:
        """Reject a number that TOML hasn't: tensors and files hold 64 bits."""
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError("must be a number of 64 bits, so below 2^63")
        return value
