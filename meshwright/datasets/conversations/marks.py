"""Marks in a rendered text that tell each message's part, wherever the template puts it."""

import json
import re
from typing import NamedTuple

NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Unicode keeps them for marks within a program: no text that is interchanged should hold them."""


class Marks(NamedTuple):
    """Characters put into a text before it is rendered, and taken out after."""

    start: str
    """Before the assistant's text."""
    end: str
    """After it."""
    wall: str
    """Within text that looks like a special token and is not."""


def free_marks(messages: object) -> Marks:
    """Three characters that `messages` do not hold."""
    used = json.dumps(messages, ensure_ascii=False, default=str)
    free = [character for character in NONCHARACTERS if character not in used]
    if len(free) < 3:
        raise ValueError("holds nearly all of the noncharacters U+FDD0 to U+FDEF")
    return Marks(*free[:3])


def take_out(marked: str, marks: Marks) -> tuple[str, list[list[int]]]:
    """Return the text without marks, and where in it each of the three was."""
    places: dict[str, list[int]] = {mark: [] for mark in marks}
    parts, length = [], 0
    for part in re.split(f"([{''.join(marks)}])", marked):
        if part in places:
            places[part].append(length)
        else:
            parts.append(part)
            length += len(part)
    return "".join(parts), list(places.values())


def overlaps(places: list[tuple[int, int]], spans: list[tuple[int, int]]) -> list[bool]:
    """Return whether each of `places` has a character in one of `spans`; both ascend."""
    counts, remaining = [], iter([*spans, (2**62, 2**62)])
    start, end = next(remaining)
    for a, b in places:
        while a >= end:
            start, end = next(remaining)
        counts.append(b > start)
    return counts
