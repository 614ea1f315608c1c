"""Rows of the usual data sets for fine-tuning, as conversations; `dataset_format` names them."""

from collections.abc import Callable
from typing import Any

from meshwright.datasets.entry import Messages

ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model"), "assistant"),
    "system": "system",
}
"""Speakers as ShareGPT and its like call them, and the roles of chat templates."""


def from_alpaca(row: dict[str, Any]) -> Messages:
    """`instruction`, `input` (may be empty or absent) and `output`; `system`, if there is one."""
    instruction, given = _text(row, "instruction"), row.get("input") or ""
    prompt = f"{instruction}\n\n{given}" if given else instruction
    turns = [{"role": "system", "content": _text(row, "system")}] if row.get("system") else []
    return [
        *turns,
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": _text(row, "output")},
    ]


def from_sharegpt(row: dict[str, Any]) -> Messages:
    """`conversations`: a list of {from: human, gpt or system; value}."""
    turns = []
    for turn in _list(row, "conversations"):
        speaker = turn.get("from")
        if speaker not in ROLES:
            raise ValueError(f"from is {speaker!r}, not one of {', '.join(ROLES)}")
        turns.append({"role": ROLES[speaker], "content": _text(turn, "value")})
    return turns


def from_messages(row: dict[str, Any]) -> Messages:
    """`messages`: a list of {role, content}, as chat interfaces have them."""
    return [
        {"role": _text(turn, "role"), "content": _text(turn, "content")}
        for turn in _list(row, "messages")
    ]


FORMATS: dict[str, Callable[[dict[str, Any]], Messages]] = {
    "alpaca": from_alpaca,
    "sharegpt": from_sharegpt,
    "messages": from_messages,
}
"""By the name that `dataset_format` gives."""


def _text(row: dict[str, Any], key: str) -> str:
    if not isinstance(row.get(key), str):
        raise ValueError(f"its {key!r} is {row.get(key)!r}, not a text")
    return str(row[key])


def _list(row: dict[str, Any], key: str) -> list[dict[str, Any]]:
    turns = row.get(key)
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError(f"its {key!r} is no list of tables; it has {', '.join(row)}")
    return turns
