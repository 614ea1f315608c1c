"""The files of a tokenizer in an exported folder, by the names that Hugging Face has."""

import json
from pathlib import Path

from meshwright.checkpoint.conversion.hf_folder import GENERATION_CONFIG
from meshwright.checkpoint.conversion.tokenizer_json import (
    special_names,
    to_tokenizer_json,
)
from meshwright.config.section import BYTES
from meshwright.datasets.tokenizers.huggingface import HuggingFaceTokenizer
from meshwright.datasets.tokenizers.kinds import (
    SentencePieceTokenizer,
    Tokenizer,
    find_file,
)
from meshwright.system.errors import config_error
from meshwright.system.files import Place

JSON, MODEL, SETTINGS = "tokenizer.json", "tokenizer.model", "tokenizer_config.json"

FILES = (
    *(JSON, MODEL, SETTINGS, "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", GENERATION_CONFIG),
)
"""Files of a Hugging Face folder besides its weights and config.json."""


def tokenizer_files(tokenizer: Tokenizer, path: str) -> dict[str, Path | str]:
    """Return the files of a tokenizer, or their content, by the names that Hugging Face has.

    A file with any other name is taken alone: the files next to it may belong to another.

    Args:
        path: where it was found, or "bytes".

    Raises:
        ConfigError: if transformers could not be given the same ids.
    """
    files: dict[str, Path | str] = {}
    if path != BYTES:
        file = find_file(path)
        if file.name in FILES:
            files |= {name: p for name in FILES if (p := file.with_name(name)).is_file()}
        for name in (JSON, MODEL):
            files.pop(name, None)
        match tokenizer:
            case HuggingFaceTokenizer(made=None):
                files[JSON] = file
            case SentencePieceTokenizer():
                files[MODEL] = file  # llama.cpp prefers it
            case _:  # llama.cpp would take it for a sentencepiece model, so it is out of the way
                files[f"original/{MODEL}"] = file
    try:
        made = to_tokenizer_json(tokenizer)
    except Exception as error:  # whatever tokenizers makes of it
        fix = "export without it: --without-tokenizer"
        raise config_error("--tokenizer", path, f"cannot be made a {JSON}: {error}", fix) from None
    if made is None and SETTINGS in files:
        return files
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # which takes tokenizer.json as it stands
        "add_bos_token": tokenizer.bos_id is not None,
        "clean_up_tokenization_spaces": False,
        **special_names(tokenizer),
    }
    if made is not None:
        files[JSON] = made
        was = files.pop(SETTINGS, None)
        for name in ("special_tokens_map.json", "added_tokens.json"):
            files.pop(name, None)  # they are in the new ones
        if isinstance(was, Path):
            template = Place("--tokenizer", was.parent).read_json(SETTINGS).get("chat_template")
            settings |= {} if template is None else {"chat_template": template}
    files[SETTINGS] = json.dumps(settings, indent=2) + "\n"
    return files
