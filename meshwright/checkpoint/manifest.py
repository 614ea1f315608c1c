"""The manifest of a checkpoint, `checkpoint.json`: typed and versioned. Free of torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import (
    AfterValidator,
    ConfigDict,
    NonNegativeInt,
    TypeAdapter,
    ValidationError,
    with_config,
)
from typing_extensions import TypedDict
from zlib_ng.zlib_ng import crc32

from meshwright.config.job_config import Checkpoint
from meshwright.system.errors import ConfigError
from meshwright.system.retries import ABSENT, read_patiently

MANIFEST = "checkpoint.json"

VERSION = 1
"""Of the format."""


def check_file_name(name: str) -> str:
    """Raise `ValueError` unless a file of this name is in the folder itself: it may be forged."""
    if Path(name).name != name or name in ("", ".."):
        raise ValueError(f"it names {name!r}, which is no file of its folder")
    return name


@with_config(ConfigDict(strict=True))
class FileRecord(TypedDict):
    """A file, as the rank that wrote it saw it on its way to the disk."""

    bytes: NonNegativeInt
    crc32: str


@with_config(ConfigDict(strict=True, extra="allow"))
class Manifest(TypedDict):
    """A checkpoint's facts, all but its tensors. Scripts may add their own keys."""

    version: int
    crc32: str
    """Of the JSON with "00000000" in the place of this."""
    step: int
    tokens_seen: int
    loss: float | None
    """None: it wasn't finite."""
    bad_steps: dict[str, Any] | None
    """State of the detector of skipped steps."""
    best_validation: list[float] | None
    """The step with the lowest validation loss so far, and that loss."""
    data: dict[str, Any]
    """The place in the data."""
    data_identity: dict[str, Any]
    """Everything, apart from the documents, that determines the samples."""
    data_content: dict[str, Any]
    """Fingerprints of the documents, by source."""
    model_name: str
    model_args: dict[str, Any]
    tokenizer_path: str
    frozen: list[str]
    """Names of parameters."""
    mesh: dict[str, int]
    """Degrees by axis."""
    versions: dict[str, str]
    config: dict[str, Any]
    files: dict[Annotated[str, AfterValidator(check_file_name)], FileRecord]
    data_revisions: dict[str, str]
    """Commits of Hub dataset, by source; "" for others."""
    validation_content: dict[str, str]
    """As `data_content`, of the data that the job is validated on."""
    special_tokens: dict[str, int | None]
    """Ids of BOS and EOS; None: documents have none."""
    own_code: str
    """Hash of the module of `experimental.custom_import`; "": there was none."""
    model_only: NotRequired[bool]
    """It holds the weights only. Absent: all that a resume needs."""
    stage: NotRequired[int]
    """Of `training.stages`, from 1 on."""
    data_ended: NotRequired[bool]
    """There was no data for one more step."""


_ADAPTER = TypeAdapter(Manifest)

NO_JOB: dict[str, Any] = {
    "tokens_seen": 0,
    "loss": None,
    "bad_steps": None,
    "best_validation": None,
    "data": {},
    "data_identity": {},
    "data_content": {},
    "data_revisions": {},
    "validation_content": {},
    "model_name": "",
    "model_args": {},
    "tokenizer_path": "",
    "special_tokens": {},
    "frozen": [],
    "mesh": {},
    "versions": {},
    "config": {},
    "own_code": "",
}
"""The manifest, apart from `step`, of tensors that no job saved: of a proof or a benchmark."""


class DamagedError(ConfigError):
    """A checkpoint isn't as it was saved.

    Args:
        what: the damage.
    """

    def __init__(self, checkpoint: Path, what: str) -> None:
        super().__init__(
            "checkpoint.load_step",
            f"checkpoint.load_step: checkpoint {checkpoint} is damaged: {what}"
            "\n  fix: choose another step in checkpoint.load_step, or -1 for the newest good one",
        )
        self.checkpoint, self.what = checkpoint, what

    def __reduce__(self) -> tuple[type["DamagedError"], tuple[Path, str]]:  # type: ignore[override]
        return DamagedError, (self.checkpoint, self.what)


def from_json(text: bytes) -> Manifest:
    """Parse and check a manifest.

    Raises:
        ValueError, RecursionError: if it is damaged.
        ConfigError: if it is of a version that isn't known here.
    """
    raw = json.loads(text)
    if not isinstance(raw, dict):
        raise ValueError("is no table")
    if text != to_json(raw):
        raise ValueError("has changed since it was written")
    version = raw.get("version")
    if isinstance(version, int) and version > VERSION:
        raise ConfigError(
            "checkpoint.folder",
            f"{MANIFEST} is of version {version}; this meshwright reads up to {VERSION}"
            "\n  fix: update meshwright",
        )
    try:
        return _ADAPTER.validate_python(raw)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ValueError(f"{key}: {first['msg'].lower()}") from None


def to_json(manifest: Mapping[str, Any]) -> bytes:
    """Serialise. The key `crc32` is computed over the same JSON with `crc32` set to "00000000"."""
    blank = json.dumps({**manifest, "crc32": "00000000"}, indent=2).encode()
    return json.dumps({**manifest, "crc32": f"{crc32(blank):08x}"}, indent=2).encode()


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the manifest in the folder `checkpoint`.

    Raises:
        DamagedError: if it isn't there, or has changed since it was written.
        StorageError: if it can't be read now.
        ConfigError: if it is of a version that isn't known here.
    """
    path = checkpoint / MANIFEST
    try:
        text = read_patiently(path, path.read_bytes)
    except ABSENT as error:
        raise DamagedError(checkpoint, f"{MANIFEST} cannot be read: {error.strerror}") from None
    try:
        return from_json(text)
    except ConfigError as error:
        raise ConfigError(error.key, f"checkpoint {checkpoint}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise DamagedError(checkpoint, f"{MANIFEST}: {error}") from None


OPTIMIZER, DATALOADER = "optimizer", "dataloader"


def excluded_parts(config: Checkpoint, manifest: Manifest) -> frozenset[str]:
    """Return the parts that `exclude_from_loading` leaves out of the checkpoint with `manifest`.

    A checkpoint that was saved with the same setting is loaded in full, so that restarts keep their
    progress, unless `load_step` names it.
    """
    wanted = frozenset(config.exclude_from_loading)
    if config.load_step != -1:
        return wanted
    if manifest.get("model_only"):  # there is none to load, whatever was saved with
        return wanted
    section = manifest["config"].get("checkpoint")
    before = section.get("exclude_from_loading") if isinstance(section, dict) else None
    return wanted.difference(before if isinstance(before, list) else ())
