"""`meshwright generate`: text from a checkpoint, or from a model folder of Hugging Face."""

import math
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from meshwright.checkpoint.conversion.hf_folder import (
    CONFIG,
    GENERATION_CONFIG,
    is_hf_folder,
    read_args,
)
from meshwright.checkpoint.conversion.readers import HuggingFaceWeights
from meshwright.checkpoint.find import find_candidates, no_checkpoint, open_checkpoint, saved_args
from meshwright.checkpoint.weights import CheckpointWeights
from meshwright.commands.saved import open_tokenizer, saved_spec
from meshwright.datasets.tokenizers.kinds import Tokenizer, build_tokenizer, prompt_tokens
from meshwright.models.args import DecoderArgs
from meshwright.models.decoder import Decoder
from meshwright.models.families import MODELS
from meshwright.models.generation import NotFiniteError, generate, greedy, sampler
from meshwright.system import device as hardware
from meshwright.system.errors import ConfigError, check, config_error
from meshwright.system.files import Place
from meshwright.train.resolve_model import extend_by

SOURCE = "CHECKPOINT_OR_HF_FOLDER"


@dataclass(frozen=True)
class Source:
    """The parts that make text."""

    args: DecoderArgs
    weights: CheckpointWeights | HuggingFaceWeights
    tokenizer: Tokenizer
    stop: frozenset[int]
    """Tokens that end a text."""


def run(given: Namespace) -> None:
    """Print the prompt and its continuation.

    Raises:
        ConfigError: if there is no model, or an option is out of bounds.
    """
    positive = "must be positive"
    check(given.max_new_tokens > 0, "--max-new-tokens", given.max_new_tokens, positive)
    is_finite = math.isfinite(given.temperature) and given.temperature >= 0
    check(is_finite, "--temperature", given.temperature, "must be 0 or more")
    check(0 < given.top_p <= 1, "--top-p", given.top_p, "must be above 0 and at most 1")
    check(0 <= given.seed < 2**63, "--seed", given.seed, "must be 0 or more, and below 2^63")
    extend_by(given.custom_import, "--custom-import")
    with _open(Place(SOURCE, given.source), given.tokenizer) as source:
        prompt = _encode(source, given.prompt)
        model = _build(source, len(prompt) + given.max_new_tokens, given.dtype)
    is_greedy = given.temperature == 0
    choose = greedy if is_greedy else sampler(given.temperature, given.top_p, given.seed)
    follow = partial(generate, max_new_tokens=given.max_new_tokens, choose=choose, stop=source.stop)
    _print_text(source, given.prompt, follow(model, prompt))


def _encode(source: Source, text: str) -> list[int]:
    prompt = prompt_tokens(source.tokenizer, text)
    check(bool(prompt), "--prompt", text, "is no token, and the tokenizer has no BOS")
    check(
        max(prompt) < source.args.vocab_size,
        "--prompt",
        text,
        f"has token {max(prompt)}, and the model a vocabulary of {source.args.vocab_size}",
        "name the tokenizer that the model was trained with: --tokenizer PATH",
    )
    return prompt


def _print_text(source: Source, prompt: str, tokens: Iterator[int]) -> None:
    """Print `prompt` and the text of `tokens`, as they come."""
    tokenizer, new = source.tokenizer, list[int]()
    shown = tokenizer.decode(tokenizer.encode(prompt))
    print(shown, end="", flush=True)
    try:
        for token in tokens:
            if token in source.stop:
                break
            new.append(token)
            text = tokenizer.decode([*tokenizer.encode(prompt), *new])
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character may be incomplete yet
                print(text[len(shown) :], end="", flush=True)
                shown = text
    except NotFiniteError as error:
        print(flush=True)
        fix = "generate from another checkpoint"
        raise ConfigError("", f"{SOURCE}: {error}\n  fix: {fix}") from None
    text = tokenizer.decode([*tokenizer.encode(prompt), *new])
    print(text[len(shown) :])


@contextmanager
def _open(place: Place, tokenizer_path: str | None) -> Iterator[Source]:
    """Give the model that `place` means; a checkpoint is verified, and held meanwhile."""
    if not find_candidates(place):
        yield _open_hf(place, tokenizer_path)
        return
    with open_checkpoint(place, partial(print, file=sys.stderr)) as (found, manifest):
        tokenizer, _ = open_tokenizer(found, manifest, tokenizer_path)
        args = saved_args(found, manifest, saved_spec(found, manifest).args)
        yield Source(args, CheckpointWeights(found), tokenizer, _eos(tokenizer))


def _open_hf(place: Place, tokenizer_path: str | None) -> Source:
    if not place.path.is_dir():
        raise no_checkpoint(place)
    fix = "name a job.dump_folder, a step's folder in it, or a model folder"
    place.check(is_hf_folder(place.path), f"holds neither a checkpoint nor {CONFIG}", fix)
    family = place.read_json(CONFIG).get("model_type")
    specs = [spec for spec in MODELS.values() if family == spec.hf.model_type]
    known = ", ".join(spec.hf.model_type for spec in MODELS.values())
    place.check(bool(specs), f"is of a model {family!r}, not of one of {known}")
    spec = specs[0]
    args = read_args(place, spec.hf, spec.args)
    path = tokenizer_path or str(place.path)
    try:
        tokenizer = build_tokenizer(path)
    except ConfigError as error:
        reason = str(error).partition("\n")[0]
        fix = "name it: --tokenizer PATH (or bytes)"
        raise config_error("--tokenizer", path, reason, fix) from None
    weights_there = HuggingFaceWeights(place, spec.hf, args)
    return Source(args, weights_there, tokenizer, _eos(tokenizer) | _stops(place))


def _eos(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset() if tokenizer.eos_id is None else frozenset({tokenizer.eos_id})


def _stops(place: Place) -> frozenset[int]:
    """Tokens that generation_config.json says end a text: chats have one of their own."""
    if not (place.path / GENERATION_CONFIG).is_file():
        return frozenset()
    tokens: Any = place.read_json(GENERATION_CONFIG).get("eos_token_id")
    tokens = tokens if isinstance(tokens, list) else [tokens]
    return frozenset(token for token in tokens if isinstance(token, int))


@torch.no_grad()
def _build(source: Source, seq_len: int, dtype_name: str) -> Decoder:
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
    source.weights.load(dict(model.named_parameters()))
    return model
