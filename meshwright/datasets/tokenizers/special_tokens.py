"""Special tokens in text: their places, and their names in the files beside a tokenizer."""

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple


class Ends(NamedTuple):
    """Tokens around a document as the config names them. "": none; None: the tokenizer's own."""

    bos: str | None = None
    eos: str | None = None


SPACE = "\u2581"
"""A space in a piece of the kinds that are not byte-level."""

OWN = Ends()
"""The tokenizer's own."""

NAME_FILES = ("tokenizer_config.json", "special_tokens_map.json")


def special_names(tokenizer_file: Path) -> dict[str, str | None]:
    """Return the tokens that files beside `tokenizer_file` call `bos_token` and so on; None: the
    family has no such token. The first of `NAME_FILES` that names one decides.

    Raises:
        ValueError: if one of them cannot be read.
    """
    names: dict[str, str | None] = {}
    for file in map(tokenizer_file.with_name, NAME_FILES):
        for name, token in read_json_object(file).items():
            if isinstance(token, dict):  # older files hold a description of the token
                token = token.get("content")
            if name.endswith("_token") and (token is None or isinstance(token, str)):
                names.setdefault(name, token)
    return names


def read_json_object(file: Path) -> dict[str, object]:
    """Return the object in the JSON `file`; empty if there is no such file.

    Raises:
        ValueError: if it does not hold a JSON object.
    """
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name} beside it cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file.name} beside it holds no JSON object")
    return value


TIKTOKEN_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) (\d+)")


def is_tiktoken(content: bytes) -> bool:
    """Return whether the first line is a base64 token and its rank, unlike in other models."""
    return TIKTOKEN_LINE.fullmatch(content.split(b"\n", 1)[0].rstrip(b"\r")) is not None


def any_of(tokens: Collection[str]) -> str:
    """Return a pattern that matches each of `tokens`, the longest that fits."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return "|".join(map(re.escape, longest_first)) or r"(?!)"  # (?!): never


def well_formed(text: str) -> str:
    """`text` with U+FFFD for every half of a surrogate pair that stands alone.

    JSON can hold such halves ("\\ud83d"), which end the run in tokenizers and sentencepiece.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
