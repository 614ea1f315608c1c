"""A model that is saved: its family and tokenizer, and, to make text with it, its weights."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from meshwright.checkpoint.conversion.hf_folder import (
    CONFIG,
    GENERATION_CONFIG,
    find_family,
    is_hf_folder,
    read_args,
)
from meshwright.checkpoint.conversion.readers import HuggingFaceWeights
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.reader import CheckpointWeights, Weights
from meshwright.checkpoint.store import find_candidates, no_checkpoint, open_checkpoint, saved_args
from meshwright.datasets.tokenizers.kinds import (
    TOKENIZERS,
    Tokenizer,
    build_tokenizer,
    end_ids,
    prompt_tokens,
    text_ends,
)
from meshwright.datasets.tokenizers.special_tokens import OWN, TokenizerKeys, tokenizer_keys
from meshwright.models.args import DecoderArgs
from meshwright.models.config_json import text_config
from meshwright.models.decoder import Decoder
from meshwright.models.families import MODELS
from meshwright.models.family import Family
from meshwright.system import hardware
from meshwright.system.errors import ConfigError, check, config_error, first_line
from meshwright.system.files import NamedPath

SOURCE = "CHECKPOINT_OR_HF_FOLDER"

TRAINED_WITH = "name the tokenizer that the model was trained with: --tokenizer PATH"


@dataclass(frozen=True)
class TextSource:
    """The parts that make text."""

    args: DecoderArgs
    weights: Weights
    tokenizer: Tokenizer
    stop: frozenset[int]
    """Tokens that end a text."""
    trained_length: int
    """Tokens of a sequence in training; 0: not known."""


def saved_spec(place: NamedPath, manifest: Manifest) -> Family:
    """Return the family of the model that a checkpoint is of.

    The job's own module isn't imported unless the user names it: a checkpoint from elsewhere must
    not choose code to run.
    """
    name = manifest["model_name"]
    rule = f"is of a model {name!r}, which is not known here"
    place.check(name in MODELS, rule, _module_of(manifest))
    return MODELS[name]


def _module_of(manifest: Manifest) -> str:
    """Return the advice to name the module that the job had; "" if it had none."""
    module = manifest["config"].get("experimental", {}).get("custom_import", "")
    return f"--custom-import {shlex.quote(module)} (which the job named)" if module else ""


def open_tokenizer(
    place: NamedPath, manifest: Manifest, given: str | None
) -> tuple[Tokenizer, str]:
    """Open the tokenizer that the checkpoint was trained with; return its path as well.

    Args:
        given: its path; None: the path that the job had.

    Raises:
        ConfigError: if it isn't there, or another.
    """
    path = given or manifest["tokenizer_path"]
    keys = tokenizer_keys(manifest["config"])
    fix = "name the tokenizer that it was trained with: --tokenizer PATH"
    how = _module_of(manifest) if keys.name and keys.name not in TOKENIZERS else fix
    tokenizer = _build_tokenizer(path, keys, how)
    then, now = manifest["data_identity"].get("model.tokenizer_path"), tokenizer.fingerprint
    rule = f"is not what checkpoint {place.path} was trained with: {now} instead of {then}"
    check(now == then, "--tokenizer", path, rule, fix)
    used, found = manifest["special_tokens"], end_ids(tokenizer)
    rule = f"has other special tokens than in the training of {place.path}: {found}, not {used}"
    fix = "use the version of Meshwright that trained it"
    check(found == used, "--tokenizer", path, rule, fix)
    return tokenizer, path


def _build_tokenizer(path: str, keys: TokenizerKeys, fix: str) -> Tokenizer:
    try:
        return build_tokenizer(path, keys)
    except ConfigError as error:
        raise config_error("--tokenizer", path, first_line(error), fix) from None


@contextmanager
def open_source(place: NamedPath, tokenizer_path: str | None) -> Iterator[TextSource]:
    """Give the model that `place` means; a checkpoint is verified, and held meanwhile."""
    if not find_candidates(place):
        yield _open_hf(place, tokenizer_path)
        return
    with open_checkpoint(place, partial(print, file=sys.stderr)) as (found, manifest):
        tokenizer, _ = open_tokenizer(found, manifest, tokenizer_path)
        args = saved_args(found, manifest, saved_spec(found, manifest).args)
        args = replace(args, mtp_depth=0)  # text needs the next token only
        length = manifest["data_identity"].get("training.seq_len", 0)
        yield TextSource(args, CheckpointWeights(found), tokenizer, text_ends(tokenizer), length)


def _open_hf(place: NamedPath, tokenizer_path: str | None) -> TextSource:
    if not place.path.is_dir():
        raise no_checkpoint(place)
    fix = "name a job.dump_folder, a step's folder in it, or a model folder"
    place.check(is_hf_folder(place.path), f"holds neither a checkpoint nor {CONFIG}", fix)
    spec = find_family(place, list(MODELS.values()))
    args = read_args(place, spec.hf, spec.args)
    fix = "name it: --tokenizer PATH (or bytes)"
    tokenizer = _build_tokenizer(tokenizer_path or str(place.path), OWN, fix)
    if tokenizer_path:  # the folder's own may have tokens beyond the model's that no text needs
        check(
            tokenizer.vocab_size <= args.vocab_size,
            "--tokenizer",
            tokenizer_path,
            f"has {tokenizer.vocab_size} tokens, and the model a vocabulary of {args.vocab_size}",
            TRAINED_WITH,
        )
    weights = HuggingFaceWeights(place, spec.hf, args)
    length = text_config(place.read_json(CONFIG)).get("max_position_embeddings", 0)
    return TextSource(args, weights, tokenizer, text_ends(tokenizer) | _stops(place), length)


def _stops(place: NamedPath) -> frozenset[int]:
    """Tokens that generation_config.json says end a text: chats have their own."""
    if not (place.path / GENERATION_CONFIG).is_file():
        return frozenset()
    tokens: Any = place.read_json(GENERATION_CONFIG).get("eos_token_id")
    tokens = tokens if isinstance(tokens, list) else [tokens]
    return frozenset(token for token in tokens if isinstance(token, int))


@torch.no_grad()
def build_model(source: TextSource, seq_len: int, dtype_name: str) -> Decoder:
    """Return the model with its weights, on the first GPU, else on the CPU."""
    device = hardware.pick_device(0)
    if dtype_name == "auto":  # the device's fastest type
        dtype_name = "bfloat16" if device.type == "cuda" else "float32"
    with torch.device("meta"):
        model = Decoder(source.args, seq_len)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype_name))
    model.to_empty(device=device)
    model.init_buffers()
    model.init_state()
    source.weights.load(model.state_dict(keep_vars=True))
    return model


def encode_prompt(source: TextSource, text: str) -> list[int]:
    prompt = prompt_tokens(source.tokenizer, text)
    check(bool(prompt), "--prompt", text, "is no token, and the tokenizer has no BOS")
    check(
        max(prompt) < source.args.vocab_size,
        "--prompt",
        text,
        f"has token {max(prompt)}, and the model a vocabulary of {source.args.vocab_size}",
        TRAINED_WITH,
    )
    return prompt
