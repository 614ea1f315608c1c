"""The catalogue of faults: every patch has its place, and each fault a case of its own."""

import py_compile
from pathlib import Path

import pytest

from tests.faults.catalogue import FAULTS
from tests.faults.fault import Fault
from tests.faults.probe import plant


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: Fault, tmp_path: Path) -> None:
    plant(fault, tmp_path)
    py_compile.compile(str(tmp_path / "meshwright" / fault.file), doraise=True)
    assert fault.old != fault.new


def test_a_fault_whose_place_has_changed_is_an_error(tmp_path: Path) -> None:
    changed = Fault("x", "", "train/trainer.py", "no such line", "", {}, "")
    with pytest.raises(ValueError, match="has changed"):
        plant(changed, tmp_path)


def test_names_are_different() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
