"""Exit with 1 unless two checkpoints hold the same tensors, bit by bit.

python tests/helpers/compare_checkpoints.py A B
"""

import sys

import torch
import torch.distributed.checkpoint as dcp


def tensors(folder: str) -> dict[str, torch.Tensor]:
    reader = dcp.FileSystemReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    state = {k: torch.empty(m.size, dtype=m.properties.dtype) for k, m in saved.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


a, b = map(tensors, sys.argv[1:])
if differ := [k for k in a.keys() | b.keys() if k not in a or k not in b or not a[k].equal(b[k])]:
    sys.exit(f"differ: {sorted(differ)}")
assert any(key.startswith("model.") for key in a)
assert any(key.startswith("optimizer.") for key in a)
