"""The plan in every preset's header."""

import pytest

from meshwright.planning.devices import find_device
from tests.helpers.presets import DEVICE, PEAK, command, fingerprint, peak_gib, presets

PRESETS = dict(presets())


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_header_has_the_plan_of_its_config(path) -> None:
    """`python -m benchmarks.planning --presets` writes it."""
    text = path.read_text()
    found = PEAK.search(text)
    assert found is not None
    assert found[3] == fingerprint(text), "the config was changed after it was planned"
    assert f"\n#   {command(path, PRESETS[path])}\n" in text
    assert float(found[1]) < find_device(DEVICE).memory_gib


def test_a_plan_in_a_header_is_still_the_plan() -> None:
    path = next(path for path in PRESETS if path.stem == "llama3_1b")
    found = PEAK.search(path.read_text())
    assert found is not None
    assert f"{peak_gib(path, PRESETS[path]):.1f}" == found[1]
