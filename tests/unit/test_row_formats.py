from typing import Any

import pytest

from meshwright.datasets.rows import row_reader
from meshwright.system.errors import RecordError
from tests.helpers.texts import entry

HELLO = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
SYSTEM = {"role": "system", "content": "be brief"}


def read(name: str, row: dict[str, Any]) -> object:
    return row_reader(entry(dataset="json", dataset_format=name))(row, "a.jsonl:1")


@pytest.mark.parametrize(
    ("name", "row", "wanted"),
    [
        ("alpaca", {"instruction": "hello", "input": "", "output": "hi", "text": "x"}, HELLO),
        ("alpaca", {"instruction": "hello", "output": "hi", "input": None}, HELLO),
        (
            "alpaca",
            {"instruction": "add", "input": "1 2", "output": "3", "system": "be brief"},
            [
                SYSTEM,
                {"role": "user", "content": "add\n\n1 2"},
                {"role": "assistant", "content": "3"},
            ],
        ),
        (
            "sharegpt",
            {
                "id": 1,
                "conversations": [
                    {"from": "system", "value": "be brief"},
                    {"from": "human", "value": "hello"},
                    {"from": "gpt", "value": "hi", "weight": 1},
                ],
            },
            [SYSTEM, *HELLO],
        ),
        ("messages", {"messages": [turn | {"name": "x"} for turn in HELLO]}, HELLO),
    ],
)
def test_rows_become_conversations(name: str, row: dict[str, Any], wanted: object) -> None:
    assert read(name, row) == wanted


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("alpaca", {"instruction": "hello"}, "its 'output' is None, not a text"),
        ("sharegpt", {"conversations": [{"from": "tool", "value": ""}]}, "from is 'tool', not one"),
        ("sharegpt", {"messages": []}, "'conversations' is no list of tables; it has messages"),
        ("messages", {"messages": [{"role": "user", "content": None}]}, "its 'content' is None"),
    ],
)
def test_rows_of_another_format_are_named(name: str, row: dict[str, Any], message: str) -> None:
    found = read(name, row)
    assert isinstance(found, RecordError)
    assert message in str(found)
