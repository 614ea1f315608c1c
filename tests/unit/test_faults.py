"""The catalogue of faults: every patch has its place, and each fault a case of its own."""

import dataclasses
from pathlib import Path

import pytest

from tests.faults.catalogue import FAULTS
from tests.faults.probe import patched, plant


def test_every_fault_can_be_planted(tmp_path: Path) -> None:
    for fault in FAULTS:
        compile(patched(fault), fault.name, "exec")
        assert all(old != new for old, new in fault.patch), fault.name
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) > 60
    first = FAULTS[0]
    plant(first, tmp_path)
    assert (tmp_path / "meshwright" / first.file).read_text() == patched(first)
    changed = dataclasses.replace(first, patch=[("no such line", "")])
    with pytest.raises(ValueError, match="has changed"):
        patched(changed)
