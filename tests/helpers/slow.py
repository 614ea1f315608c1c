"""Cases that `./run_tests.sh` leaves out and `./run_tests.sh --all` runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """Return parameters that are marked slow; a case of several values is a tuple."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=pytest.mark.slow) for case in values]


def slow_but(everyday: str, table: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Return the cases of a table, by name: all but the everyday ones are slow."""
    names = everyday.split()
    assert {*names} <= table.keys()
    return [
        pytest.param(*values, id=name, marks=() if name in names else pytest.mark.slow)
        for name, values in table.items()
    ]
