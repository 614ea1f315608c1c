"""Exit with 1 unless two checkpoints hold the same tensors, bit by bit.

python tests/helpers/compare_checkpoints.py A B
"""

import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    reader = dcp.FileSystemReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    state = {k: torch.empty(m.size, dtype=m.properties.dtype) for k, m in saved.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def assert_same_tensors(ours: Path, theirs: Path) -> None:
    """Those of model and optimizer, and whatever else there is."""
    a, b = tensors(ours), tensors(theirs)
    assert any(key.startswith("model.") for key in a)
    assert any(key.startswith("optimizer.") for key in a)
    differ = [k for k in a.keys() | b.keys() if k not in a or k not in b or not a[k].equal(b[k])]
    assert not differ, f"differ: {sorted(differ)}"


if __name__ == "__main__":
    assert_same_tensors(*map(Path, sys.argv[1:]))
