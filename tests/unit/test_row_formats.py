"""Rows of known formats become conversations, and nothing of them is lost in silence."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from meshwright.datasets.conversations import FORMATS, MEANT, Conversation
from meshwright.datasets.rows import LocalDocuments, RowReader
from meshwright.datasets.storage import stat
from meshwright.system.errors import FIX, RecordError
from tests.helpers.texts import entry

HELLO = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
ROLE = ("user", "assistant")
SYSTEM = {"role": "system", "content": "be brief"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"x": None}}}
SHARED = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]
ALPACA = {"instruction": "hello", "output": "hi"}
ROWS: dict[str, dict[str, Any]] = {
    "alpaca": ALPACA,
    "sharegpt": {"conversations": SHARED},
    "messages": {"messages": HELLO},
}


def reader(name: str, kind: str = "json") -> RowReader:
    """Of rows of a format; a name that is none is a column."""
    key = "dataset_format" if name in FORMATS else "dataset_column"
    return RowReader(entry(dataset=kind, **{key: name}))


def read(name: str, row: dict[str, Any]) -> Any:
    return reader(name)(row, "a.jsonl:1")


@pytest.mark.parametrize(
    ("name", "row", "wanted"),
    [
        ("alpaca", ALPACA | {"input": "", "text": "x"}, HELLO),
        ("alpaca", ALPACA | {"input": None}, HELLO),
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
            "alpaca",
            ALPACA | {"history": [["a", "b"], ["c", "d"]]},
            [
                *({"role": ROLE[n % 2], "content": text} for n, text in enumerate("abcd")),
                *HELLO,
            ],
        ),
        (
            "sharegpt",
            {"id": 1, "conversations": [{"from": "system", "value": "be brief"}, *SHARED]},
            [SYSTEM, *HELLO],
        ),
        ("sharegpt", {"conversations": SHARED, "system": "be brief"}, [SYSTEM, *HELLO]),
        (
            "sharegpt",
            {
                "conversations": [
                    SHARED[0],
                    {"from": "function_call", "value": '{"name": "add", "arguments": {}}'},
                    {"from": "observation", "value": "3"},
                    SHARED[1] | {"weight": 0},
                ]
            },
            [
                HELLO[0],
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {"type": "function", "function": {"name": "add", "arguments": {}}}
                    ],
                },
                {"role": "tool", "content": "3"},
                HELLO[1] | {"weight": 0},
            ],
        ),
        # whole messages, whatever their keys
        ("messages", {"messages": [turn | {"name": "x"} for turn in HELLO]},
         [turn | {"name": "x"} for turn in HELLO]),
        ("messages", {"messages": HELLO, "system": "be brief"}, [SYSTEM, *HELLO]),
        ("messages", {"messages": [SYSTEM, *HELLO], "system": "be brief"}, [SYSTEM, *HELLO]),
        ("text", {"text": [SYSTEM, *HELLO], "chosen": None, "id": 1}, [SYSTEM, *HELLO]),
        ("messages", {"messages": [HELLO[0], {"role": "assistant", "tool_calls": [CALL]}]},
         [HELLO[0], {"role": "assistant", "tool_calls": [CALL]}]),
        ("messages", {"messages": [
            {"role": "user", "content": [{"type": "text", "text": "hello"}]}, HELLO[1]]},
         [{"role": "user", "content": [{"type": "text", "text": "hello"}]}, HELLO[1]]),
    ],
)  # fmt: skip
def test_rows_become_conversations(name: str, row: dict[str, Any], wanted: object) -> None:
    assert read(name, row) == Conversation(wanted)
    assert read(name, row).place == "a.jsonl:1"


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
@pytest.mark.parametrize("name", [*ROWS, "text"])
def test_tools_and_template_variables_of_a_row(name: str, tools: object) -> None:
    row = ROWS.get(name, {"text": HELLO}) | {"tools": tools, "chat_template_kwargs": {"a": 1}}
    assert read(name, row) == Conversation(HELLO, TOOLS, {"a": 1})
    assert read(name, row | {"tools": "[]"}).tools is None


@pytest.mark.parametrize("name", [*ROWS, "text"])
def test_a_column_of_a_known_format_that_is_not_used_is_a_bad_record(name: str) -> None:
    used = FORMATS[name].columns if name in FORMATS else FORMATS["messages"].columns
    row = ROWS.get(name, {"text": HELLO})
    for column in sorted(MEANT - used):
        for value in (False, 0, "x", ["x"]):
            found = read(name, row | {column: value})
            assert isinstance(found, RecordError)
            message, _, fix = str(found).partition(FIX)
            assert f"has a column {column!r}, which its conversation would lose" in message
            assert fix == (
                "remove the column, or give dataset_format your own function that reads it"
            )
        for value in (None, "", [], {}):
            assert read(name, row | {column: value}) == Conversation(HELLO)


@pytest.mark.parametrize("name", ROWS)
def test_any_other_column_that_is_not_used_is_counted(name: str) -> None:
    to_item = reader(name)
    for number in range(5):
        to_item(ROWS[name] | {"id": number, "source": "web" if number > 2 else None}, "")
    assert to_item.unused == {"id": 5, "source": 2}


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("alpaca", {"instruction": "hello"}, "its 'output' is None, not a text"),
        ("alpaca", ALPACA | {"history": ["a"]}, "its 'history' is ['a'], not a list of pairs"),
        ("alpaca", ALPACA | {"input": ["a"]}, "its 'input' is ['a'], not a text"),
        ("alpaca", ALPACA | {"input": 0}, "its 'input' is 0, not a text"),
        ("sharegpt", {"conversations": [{"from": ["human"], "value": ""}]}, "from is ['human']"),
        ("sharegpt", {"conversations": [SHARED[0] | {"content": "x"}]},
         "a turn has 'content' as well as from and value"),
        ("sharegpt", {"conversations": HELLO}, "its turns are of {role, content}, not of {from, "
         "value} (training.dataset_format = 'sharegpt')\n  fix: set dataset_format = \"\" and "
         "dataset_column = \"conversations\""),
        ("sharegpt", {"conversations": [{"from": "bot", "value": ""}]}, "from is 'bot', not one"),
        ("sharegpt", {"messages": []}, "'conversations' is no list of tables; it has messages"),
        ("sharegpt", {"conversations": [{"from": "function_call", "value": "add(1)"}]},
         "a function_call is 'add(1)', not JSON"),
        *(("sharegpt", {"conversations": [{"from": "function_call", "value": value}]},
           f"a function_call is {value!r}, not {{name, arguments}}")
          for value in ("3", "[]", "[3]", '{"arguments": {}}')),
        ("messages", {"messages": HELLO, "tools": "add"}, "its 'tools' is 'add', not JSON"),
        ("messages", {"messages": HELLO, "tools": ["add"]}, "its 'tools' is ['add'], not a list"),
        ("messages", {"messages": HELLO, "system": 3}, "its 'system' is 3, not a text"),
        ("messages", {"messages": [SYSTEM, *HELLO], "system": "no"},
         "has a column 'system' and a different first message of that role"),
        ("messages", {"messages": []}, "the conversation has no message"),
        ("messages", {"messages": "[]"}, "its 'messages' is '[]', not a list of tables "
         "(training.dataset_format = 'messages')\n  fix: give dataset_format your own function "
         "that returns json.loads(row['messages'])"),
        ("messages", {"messages": SHARED}, "its 'messages' has turns of {from, value}, not of "
         "{role, content} (training.dataset_format = 'messages')\n  fix: rename the column to "
         'conversations, and set dataset_format = "sharegpt"'),
        ("messages", {"messages": [{"role": None}]}, "message 1: its role is None, not a text"),
        ("text", {"text": {"messages": HELLO}, "system": "x"}, "has a column 'system'"),
        ("messages", {"messages": [{"role": "user", "content": None}]},
         "message 1 (user) has neither content nor tool_calls"),
        ("messages", {"messages": [HELLO[0], {"role": "assistant", "content": {"a": 1}}]},
         "message 2 (assistant): its content is {a = 1}, not a text"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
         "message 1 (user): a part of its content is of type 'image', not a text"),
        ("messages", {"messages": [HELLO[0], HELLO[1] | {"weight": 0.5}]},
         "message 2 (assistant): its weight is 0.5, not 0 or 1"),
        ("messages", {"messages": [HELLO[0] | {"weight": 1}, HELLO[1]]},
         "message 1 (user): its weight is 1, but the loss counts only the assistant's text"),
        ("messages", {"messages": [HELLO[0], HELLO[1] | {"train": False}]},
         "message 2 (assistant): its 'train' is not heeded (training.dataset_format = 'messages')"
         "\n  fix: write \"weight\": 0 or 1 instead of 'train'"),
        ("text", {"text": SHARED}, "its 'text' has turns of {from, value}, not of {role, content} "
         "(training.dataset_column = 'text')\n  fix: rename the column to conversations, and set "
         'dataset_format = "sharegpt"'),
        ("text", {"text": b"hello"}, "'text' holds b'hello', which is neither text nor a list of "
         "{role, content} (training.dataset_column = 'text')\n  fix: give dataset_format your "
         "own function that returns row['text'].decode()"),
        ("text", {"text": ["a", "b"]}, "'text' holds ['a', 'b'], which is neither text nor a list "
         "of {role, content} (training.dataset_column = 'text')\n  fix: give dataset_format your "
         "own function that returns '\\n'.join(row['text'])"),
    ],
)  # fmt: skip
def test_rows_of_another_format_are_named(name: str, row: dict[str, Any], message: str) -> None:
    found = read(name, row)
    assert isinstance(found, RecordError)
    assert message in str(found)


def test_a_function_may_give_messages_with_tools(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def f(row): return row['it']\n")
    to_item = RowReader(entry(dataset="json", dataset_format=f"{file}:f"))
    whole = {"messages": HELLO, "tools": TOOLS, "chat_template_kwargs": {"a": 1}}
    assert to_item({"it": whole}, "") == Conversation(HELLO, TOOLS, {"a": 1})
    assert to_item({"it": HELLO, "chosen": "x"}, "") == Conversation(HELLO)
    assert "a conversation has no 'tool'" in str(to_item({"it": whole | {"tool": 1}}, ""))


def test_the_fix_for_turns_of_another_format_works() -> None:
    row = {"conversations": HELLO}
    assert isinstance(read("sharegpt", row), RecordError)
    assert read("conversations", row) == Conversation(HELLO)
    fix = str(read("conversations", {"conversations": SHARED})).partition(FIX)[2]
    assert fix == 'set dataset_format = "sharegpt"'
    assert read("text", {"text": {"messages": HELLO}}) == Conversation(HELLO)


@pytest.mark.parametrize("key", ["dataset_format", "dataset_column"])
def test_a_table_gives_what_its_json_lines_give(tmp_path: Path, key: str) -> None:
    """But for nulls, which a table has wherever another row has a key: in calls, for example."""
    rows = [
        {"messages": [HELLO[0], {"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": {"x": 1}}}]}], "tools": TOOLS},
        {"messages": [HELLO[0], HELLO[1] | {"weight": 0, "tool_calls": [
            {"function": {"name": "g", "arguments": {"y": "z"}}}]}]},
    ]  # fmt: skip
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "a.parquet")
    pairs = pyarrow.list_(table.schema.field("messages").type.value_type, 2)
    table = table.set_column(0, "messages", table["messages"].cast(pairs))
    parquet.write_table(table, tmp_path / "pairs.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for kind, name in (("json", "a.jsonl"), ("parquet", "a.parquet"), ("parquet", "pairs.parquet")):
        source = entry(dataset=kind, **{key: "messages"})
        documents = LocalDocuments(source, [stat(str(tmp_path / name))])
        found = list(documents.read(0, 1))
        assert found == [Conversation(row["messages"], row.get("tools")) for row in rows]


def test_explicit_nulls_of_json_lines_stay() -> None:
    """An argument that is null, a default that is null: text of its own."""
    messages = [HELLO[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert read("messages", {"messages": messages}).messages == messages
