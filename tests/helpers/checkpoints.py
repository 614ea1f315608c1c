"""Checkpoints without a job."""

import zlib
from pathlib import Path

from meshwright.checkpoint.commit import FileRecord

BARE = {
    **{key: {} for key in ("data", "data_identity", "data_content", "model_args", "mesh")},
    "tokens_seen": 0,
    "loss": 1.5,
    "frozen": [],
    "versions": {},
    "config": {},
}
"""A manifest, but for the step."""


def records_of(folder: Path) -> dict[str, FileRecord]:
    """What would have been noted of the files in `folder` when they were written."""
    return {
        path.name: {"bytes": path.stat().st_size, "crc32": f"{zlib.crc32(path.read_bytes()):08x}"}
        for path in folder.iterdir()
    }
