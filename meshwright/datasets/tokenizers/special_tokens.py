"""Known of a tokenizer before it is built: what the config says of it, and files next to it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.system.files import NamedPath


class TokenizerKeys(NamedTuple):
    """What a config says of a tokenizer, apart from its path."""

    bos: str | None = None
    """Token before a document. "": none; None: the tokenizer's own."""
    eos: str | None = None
    """Token after a document, in the same way."""
    name: str = ""
    """Of the tokenizer of the user's module; "": its file says what it is."""
    options: str = ""
    """[options.NAME] of that, as JSON; "": the config has none."""


def tokenizer_keys(config: Mapping[str, Any]) -> TokenizerKeys:
    """Return what the sections `model` and `options` of a config, as plain data, say of the
    tokenizer."""
    model = config.get("model", {})
    name = model.get("tokenizer_type", "")
    options = config.get("options", {}).get(name)
    written = json.dumps(options, sort_keys=True) if options else ""
    return TokenizerKeys(model.get("bos_token"), model.get("eos_token"), name, written)


SPACE = "\u2581"
"""A space in a piece of the kinds that aren't byte-level."""

OWN = TokenizerKeys()
"""The tokenizer's own."""

PATH_KEY, TEMPLATE_KEY = "model.tokenizer_path", "model.chat_template_path"
NAME_KEY = "model.tokenizer_type"
"""Of a tokenizer of the user's module."""

SETTINGS, NAMES = "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
BESIDE = (SETTINGS, NAMES, TEMPLATE)
"""Files next to a tokenizer that say how it is used."""


def shipped_template(name: str) -> Path:
    """Return the file of a chat template that is shipped: one of `CHAT_TEMPLATES`."""
    return Path(__file__).parent / "templates" / f"{name}.jinja"


def special_names(tokenizer_file: Path) -> dict[str, str | None]:
    """Return the tokens that files next to `tokenizer_file` call `bos_token` and so on; None: the
    family has no such token. The first file that names one decides.

    Raises:
        ConfigError: if one of them can't be read.
    """
    names: dict[str, str | None] = {}
    for file in (SETTINGS, NAMES):
        for name, token in read_beside(tokenizer_file, file).items():
            if isinstance(token, dict):  # older files hold a description of the token
                token = token.get("content")
            if name.endswith("_token") and (token is None or isinstance(token, str)):
                names.setdefault(name, token)
    return names


def read_beside(tokenizer_file: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in the file `name` next to a tokenizer; empty if there is none.

    Raises:
        ConfigError: if it can't be read.
    """
    is_there = tokenizer_file.with_name(name).is_file()
    return NamedPath(PATH_KEY, tokenizer_file.parent).read_json(name) if is_there else {}


def well_formed(text: str) -> str:
    """`text` with U+FFFD for every half of a surrogate pair that stands alone.

    JSON can hold such halves ("\\ud83d"), which end the run in tokenizers and sentencepiece.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
