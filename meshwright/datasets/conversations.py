"""Conversations, and how a row of a known format becomes one.

Nothing of a row is lost in silence. Whole messages go to the chat template. A column that a known
format defines, and that isn't used, makes the row a bad record; any other is counted.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from meshwright.system.errors import FIX, shortened

Message = dict[str, Any]
"""A turn: its "role", its "content", and whatever else its chat template reads."""


@dataclass(frozen=True)
class Conversation:
    """Turns, and what else the chat template is given.

    Raises:
        ValueError: if a message can't be used.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the functions that the assistant may call."""
    options: dict[str, Any] = field(default_factory=dict)
    """Other variables of the template, for example `enable_thinking`."""
    place: str = field(default="", compare=False)
    """File and row, for the message of an error."""

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError("the conversation has no message")
        for number, message in enumerate(self.messages, 1):
            _check_message(message, f"message {number}")

    @property
    def texts(self) -> list[str]:
        contents = [message.get("content") or "" for message in self.messages]
        parts = ([c] if isinstance(c, str) else [part["text"] for part in c] for c in contents)
        return [*itertools.chain.from_iterable(parts)]


Document = str | Conversation
"""An empty text is no document."""

OPTIONS = "chat_template_kwargs"
"""Column of a row, as TRL has it, with variables of the template."""

BESIDE = frozenset({"system", "tools", OPTIONS})
"""Columns that every format reads in addition to the turns."""

MEANT = frozenset(
    {
        "system",
        "system_prompt",
        "tools",
        "functions",
        "history",
        "weight",
        OPTIONS,
        "label",
        "kto_tag",
        "chosen",
        "rejected",
        "image",
        "images",
        "video",
        "videos",
        "audio",
        "audios",
    }
)
"""Columns that formats of OpenAI, TRL, axolotl, LLaMA-Factory or ShareGPT define, and without which
a different conversation would be learned."""

OTHER_WEIGHTS = ("train", "training", "train_detail", "loss", "trainable")
"""Keys by which other programs leave a message out of the loss."""

ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
"""Speakers as ShareGPT and its like call them, and the roles of chat templates."""


def from_alpaca(row: Mapping[str, Any]) -> Conversation:
    """`instruction`, `input` (may be empty or absent) and `output`; `history`, if there is one: the
    pairs of question and answer before."""
    history = row.get("history") or []
    if not isinstance(history, list) or not all(map(_is_pair, history)):
        raise ValueError(f"its 'history' is {shortened(history)}, not a list of pairs of strings")
    instruction = _text(row, "instruction")
    given = "" if row.get("input") is None else _text(row, "input")
    prompt = f"{instruction}\n\n{given}" if given else instruction
    pairs = [*history, (prompt, _text(row, "output"))]
    roles = "user", "assistant"
    turns = [{"role": r, "content": c} for pair in pairs for r, c in zip(roles, pair, strict=True)]
    return _with_columns(row, turns)


def from_sharegpt(row: Mapping[str, Any]) -> Conversation:
    """`conversations`: a list of {from: human, gpt, system, function_call or observation; value}.
    The value of a function_call is JSON: {name, arguments}, or a list of such."""
    turns = []
    for turn in _tables(row, "conversations"):
        speaker = turn.get("from")
        if speaker is None and "role" in turn:
            fix = 'set dataset_format = "" and dataset_column = "conversations"'
            raise ValueError(
                f"its turns are of {{role, content}}, not of {{from, value}}{FIX}{fix}"
            )
        if not isinstance(speaker, str) or speaker not in ROLES:
            raise ValueError(f"from is {speaker!r}, not one of {', '.join(ROLES)}")
        value, rest = _text(turn, "value"), {k: turn[k] for k in turn if k not in ("from", "value")}
        if twice := rest.keys() & {"role", "content"}:
            raise ValueError(f"a turn has {min(twice)!r} as well as from and value")
        content: Message = {"content": value}
        if speaker == "function_call":
            functions = [{"type": "function", "function": call} for call in _calls(value)]
            content = {"content": "", "tool_calls": functions}
        turns.append({"role": ROLES[speaker], **content, **rest})
    return _with_columns(row, turns)


def _calls(text: str) -> list[dict[str, Any]]:
    """Return the calls that the value of a function_call holds."""
    calls = _from_json("a function_call", text)
    calls = calls if isinstance(calls, list) else [calls]
    are_calls = is_list_of_tables(calls) and all(isinstance(c.get("name"), str) for c in calls)
    if not calls or not are_calls:
        raise ValueError(f"a function_call is {shortened(text)}, not {{name, arguments}}")
    return calls


def from_messages(row: Mapping[str, Any], column: str = "messages") -> Conversation:
    """`messages`: a list of {role, content}, as chat interfaces have them."""
    turns = _tables(row, column)
    if any("from" in turn and "role" not in turn for turn in turns):
        rename = "" if column == "conversations" else "rename the column to conversations, and "
        rule = f"its {column!r} has turns of {{from, value}}, not of {{role, content}}"
        raise ValueError(f'{rule}{FIX}{rename}set dataset_format = "sharegpt"')
    return _with_columns(row, turns)


@dataclass(frozen=True)
class Format:
    """A known format of rows."""

    read: Callable[[Mapping[str, Any]], Conversation]
    columns: frozenset[str]
    """Those that it uses."""


FORMATS: dict[str, Format | Callable[[dict[str, Any], Any], object]] = {
    "alpaca": Format(from_alpaca, BESIDE | {"instruction", "input", "output", "history"}),
    "sharegpt": Format(from_sharegpt, BESIDE | {"conversations"}),
    "messages": Format(from_messages, BESIDE | {"messages"}),
}
"""By the name that `dataset_format` gives. Those of the user's module are functions: from a row and
the options of [options.NAME] to what `as_document` takes."""


def unused_columns(row: Mapping[str, Any], used: Iterable[str]) -> list[str]:
    """Return the columns with a value that a format doesn't use.

    Raises:
        ValueError: if one of them is of `MEANT`.
    """
    unused = [key for key, value in row.items() if key not in used and not _is_empty(value)]
    if lost := sorted(MEANT.intersection(unused)):
        raise ValueError(
            f"has a column {lost[0]!r}, which its conversation would lose"
            f"{FIX}remove the column, or give dataset_format your own function that reads it"
        )
    return unused


def note_of_unused(counts: Counter[str]) -> str:
    """Return a line about columns of rows, and keys of messages, that aren't used."""
    names = ", ".join(f"{name!r} ({count:,})" for name, count in counts.most_common())
    return f"columns and keys of messages that are not used, with the number of each: {names}"


def as_document(value: object, words: str, code: str = "") -> Document:
    """Return the document that a value is: a text; or a conversation, a list of messages, or a
    table with `messages` and possibly `tools` and `chat_template_kwargs`.

    Args:
        words: for the message of an error, what the value is of: "'text' holds".
        code: the same in a function that the user could write; "": the user's function gave it.

    Raises:
        ValueError: if it is neither, or a message can't be used.
    """
    if isinstance(value, str | Conversation):
        return value
    if isinstance(value, dict) and "messages" in value:
        if others := [key for key in value if key not in ("messages", "tools", OPTIONS)]:
            raise ValueError(f"a conversation has no {others[0]!r}")
        return _with_columns(value, _tables(value, "messages"))
    if is_list_of_tables(value):
        return Conversation(value)
    shown = "null" if value is None else shortened(value)
    what = f"{words} {shown}, which is neither text nor a list of {{role, content}}"
    fix = f"{FIX}give dataset_format your own function that returns "
    fix = fix if code else f"{FIX}let it return one text: "
    code = code or "it"
    if isinstance(value, bytes):
        what += f"{fix}{code}.decode()"
    elif isinstance(value, list) and all(isinstance(item, str) for item in value):
        what += f"{fix}'\\n'.join({code})"
    raise ValueError(what)


def without_nulls(value: Any) -> Any:
    """Return a value without the keys that have none: a table has null wherever one of its rows
    lacks a key of another, and templates ask whether a key is there."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return value


def _with_columns(row: Mapping[str, Any], turns: list[Message]) -> Conversation:
    """Return the conversation of these turns with the other columns of their row."""
    if system := row.get("system"):
        first = turns[0] if turns else {}
        if first.get("role") != "system":
            turns = [{"role": "system", "content": _text(row, "system")}, *turns]
        elif first.get("content") != system:
            raise ValueError("has a column 'system' and a different first message of that role")
    tools, options = row.get("tools") or None, row.get(OPTIONS) or {}
    if isinstance(tools, str):
        tools = _from_json("its 'tools'", tools) or None
    if tools is not None and not is_list_of_tables(tools):
        raise ValueError(f"its 'tools' is {shortened(tools)}, not a list of tables, or its JSON")
    if not isinstance(options, dict):
        raise ValueError(f"its {OPTIONS!r} is {shortened(options)}, not a table")
    return Conversation(turns, tools, options)


def _check_message(message: Message, words: str) -> None:
    if not isinstance(role := message.get("role"), str):
        raise ValueError(f"{words}: its role is {shortened(role)}, not a text")
    words = f"{words} ({role})"
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                what = f"of type {kind!r}" if isinstance(kind, str) else shortened(part)
                raise ValueError(f"{words}: a part of its content is {what}, not a text")
    elif content is None and not message.get("tool_calls"):
        raise ValueError(f"{words} has neither content nor tool_calls")
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"{words}: its content is {shortened(content)}, not a text")
    weight = message.get("weight")
    if weight not in (None, 0, 1):
        raise ValueError(f"{words}: its weight is {shortened(weight)}, not 0 or 1")
    if weight == 1 and role != "assistant":
        raise ValueError(f"{words}: its weight is 1, but the loss counts only the assistant's text")
    if others := [key for key in OTHER_WEIGHTS if message.get(key) is not None]:
        fix = f'write "weight": 0 or 1 instead of {others[0]!r}'
        raise ValueError(f"{words}: its {others[0]!r} is not heeded{FIX}{fix}")


def _text(row: Mapping[str, Any], key: str) -> str:
    if not isinstance(row.get(key), str):
        raise ValueError(f"its {key!r} is {shortened(row.get(key))}, not a text")
    return str(row[key])


def _tables(row: Mapping[str, Any], key: str) -> list[Message]:
    if is_list_of_tables(turns := row.get(key)):
        return turns
    if turns is None:
        raise ValueError(f"its {key!r} is no list of tables; it has {', '.join(row)}")
    fix = f"{FIX}give dataset_format your own function that returns json.loads(row[{key!r}])"
    fix = fix if isinstance(turns, str) else ""
    raise ValueError(f"its {key!r} is {shortened(turns)}, not a list of tables{fix}")


def is_list_of_tables(value: object) -> TypeGuard[list[dict[str, Any]]]:
    """Return whether a value is what a conversation is in a row."""
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _is_pair(value: object) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(isinstance(text, str) for text in value)
    )


def _is_empty(value: object) -> bool:
    return value is None or value in ("", [], {})


def _from_json(words: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{words} is {shortened(text)}, not JSON") from error
