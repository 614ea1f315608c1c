"""Collects what an export needs: a checkpoint's weights and dimensions, and tokenizer files."""

import json
from pathlib import Path

import torch

from meshwright.checkpoint import state
from meshwright.checkpoint.conversion.export import Job
from meshwright.checkpoint.conversion.hf_folder import GENERATION_CONFIG
from meshwright.checkpoint.conversion.tokenizer_json import (
    samples,
    special_names,
    to_tokenizer_json,
)
from meshwright.checkpoint.find import saved_args
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.reader import CheckpointWeights
from meshwright.config.section import BYTES
from meshwright.datasets.tokenizers.huggingface import HuggingFaceTokenizer
from meshwright.datasets.tokenizers.kinds import (
    SentencePieceTokenizer,
    Tokenizer,
    end_of_chat,
    find_file,
    special_ids,
)
from meshwright.models.family import Family
from meshwright.system.errors import config_error
from meshwright.system.files import Place

JSON, MODEL, SETTINGS = "tokenizer.json", "tokenizer.model", "tokenizer_config.json"

FILES = (
    *(JSON, MODEL, SETTINGS, "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", GENERATION_CONFIG),
)
"""Files of a Hugging Face folder besides its weights and config.json."""


def export_job(
    place: Place,
    manifest: Manifest,
    family: Family,
    tokenizer: Tokenizer,
    files: dict[str, Path | str],
    *,
    dtype: torch.dtype,
    max_shard_bytes: int,
    prefix: str = state.MODEL,
    is_fused: bool = False,
) -> Job:
    """Return the job of exporting a checkpoint.

    Args:
        place: of the step's folder.
        prefix: of the names of the weights there; state that is not trained has that of the model.
        files: of the tokenizer, by name; none: it is left out.

    Raises:
        ConfigError: if the checkpoint cannot be read.
    """
    special = special_ids(tokenizer)
    args = saved_args(place, manifest, family.args)
    untrained = args.table.state  # without a mean

    def saved_name(name: str) -> str:
        return (state.MODEL if name in untrained else prefix) + name

    return Job(
        weights=CheckpointWeights(place, saved_name),
        form=family.hf,
        args=args,
        seq_len=int(manifest["data_identity"]["training.seq_len"]),
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        is_fused=is_fused,
        special_tokens={key: token for key, token in special.items() if token is not None},
        ends_of_text=sorted(
            {i for i in (tokenizer.eos_id, end_of_chat(tokenizer)) if i is not None}
        ),
        other_files=files,
        encode=tokenizer.encode if files else None,
        texts=samples(tokenizer),
    )


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
