"""Checkpoints without a job."""

import json
import zlib
from pathlib import Path

from meshwright.checkpoint.commit import MANIFEST, FileRecord

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


def set_manifest(checkpoint: Path, **values: object) -> None:
    """Change a manifest, and its checksum with it."""
    path = checkpoint / MANIFEST
    manifest = {**json.loads(path.read_text()), **values, "crc32": "00000000"}
    crc32 = zlib.crc32(json.dumps(manifest, indent=2).encode())
    path.write_text(json.dumps({**manifest, "crc32": f"{crc32:08x}"}, indent=2))
