"""`meshwright export`: a checkpoint as a model folder of Hugging Face."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from meshwright.checkpoint.export import Job, export, tokenizer_files
from meshwright.checkpoint.find import find_checkpoint, read_manifest, saved_args
from meshwright.checkpoint.hf_folder import GENERATION_CONFIG, Place
from meshwright.checkpoint.weights import CheckpointWeights
from meshwright.cli.saved import open_tokenizer, saved_spec
from meshwright.config.job_config import BYTES
from meshwright.datasets.tokenizers import find_file, kind_of
from meshwright.errors import ConfigError, check

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
JSON, MODEL = "tokenizer.json", "tokenizer.model"
FILES = (
    *(JSON, MODEL, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", GENERATION_CONFIG),
)
"""What a folder of Hugging Face's has beside weights and config.json."""


def main(arguments: Sequence[str]) -> None:
    """Export, and say what was compared.

    Raises:
        ConfigError: if the checkpoint cannot be exported.
    """
    parser = argparse.ArgumentParser("meshwright export", allow_abbrev=False)
    parser.add_argument(
        "checkpoint", type=Path, help="a step's folder, or a dump folder: its newest"
    )
    parser.add_argument("out", type=Path, help="the folder to make")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--max-shard-size", default="5GB", help="of a file: a number and KB, MB, GB"
    )
    parser.add_argument("--tokenizer", help="where it is now, if no longer where the job read it")
    given = parser.parse_args(arguments)
    max_shard_bytes = _bytes(given.max_shard_size)
    place = find_checkpoint(Place("CHECKPOINT", given.checkpoint))
    if place is None:
        raise ConfigError("", f"CHECKPOINT = {str(given.checkpoint)!r}: holds no checkpoint")
    print(f"checkpoint: {place.path}")
    manifest = read_manifest(place)
    tokenizer, path = open_tokenizer(place, manifest, given.tokenizer)
    special = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    files: dict[str, Path] = {}
    if path == BYTES:
        print("the tokenizer is bytes: there is no file to copy")
    else:
        file = find_file(path)
        is_json = kind_of(file, file.read_bytes()).__name__ == "HuggingFaceTokenizer"
        files = tokenizer_files(file, JSON if is_json else MODEL, FILES)
        print(f"tokenizer: {', '.join(files)} of {file.parent}")
    spec = saved_spec(place, manifest)
    job = Job(
        weights=CheckpointWeights(place),
        form=spec.hf,
        args=saved_args(place, manifest, spec.args),
        seq_len=int(manifest["data_identity"]["training.seq_len"]),
        dtype=getattr(torch, given.dtype),
        max_shard_bytes=max_shard_bytes,
        special_tokens={key: token for key, token in special.items() if token is not None},
        other_files=files,
    )
    export(job, given.out.absolute(), print)


def _bytes(size: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]B)", size)
    fix = "write a number and KB, MB or GB, as 5GB"
    check(match is not None, "--max-shard-size", size, "is no size of a file", fix)
    assert match is not None
    count = round(float(match[1]) * UNITS[match[2]])
    check(count > 0, "--max-shard-size", size, "must be positive", fix)
    return count
