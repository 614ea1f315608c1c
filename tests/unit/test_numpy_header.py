"""Headers of numpy's that are longer than numpy writes them."""

from pathlib import Path

import numpy as np

from meshwright.datasets.foreign_tokens import open_array
from meshwright.datasets.storage import stat


def test_a_long_header_is_read_whole(tmp_path: Path) -> None:
    words = b"{'descr': '<u2', 'fortran_order': False, 'shape': (3,), }".ljust(4085) + b"\n"
    file = tmp_path / "tokens.npy"
    content = b"\x93NUMPY\x01\x00" + len(words).to_bytes(2, "little") + words
    file.write_bytes(content + np.array([1, 2, 3], np.uint16).tobytes())
    found = open_array(stat(str(file)), "<u2")
    assert (found.num_tokens, found.offset) == (3, len(content))
