"""Imports without the garbage collector, which is afterwards as it was."""

import gc

import pytest

from meshwright.imports import uncollected


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_off_within_and_as_it_was_afterwards(is_on: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if is_on else gc.disable)()
        with uncollected():
            assert not gc.isenabled()
            new = [object()]
            new.append(new)
        assert gc.isenabled() == is_on
        assert not any(each is new for each in gc.get_objects())  # full collections pass it over
    finally:
        (gc.enable if before else gc.disable)()
