"""A saved model in this process, and the text that it writes."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Literal

from torch import nn

from meshwright.api.surroundings import restored_process, usual_torch
from meshwright.commands.generate import check_sampling
from meshwright.commands.saved import build_model, open_source
from meshwright.datasets.tokenizers.kinds import Tokenizer, prompt_tokens, text_ends
from meshwright.models.decoder import Decoder
from meshwright.models.generation import generate as generate_tokens
from meshwright.models.generation import greedy, sampler
from meshwright.system.errors import ConfigError, check
from meshwright.system.files import NamedPath
from meshwright.train.resolve_model import extend_by

UNKNOWN_LENGTH = 4096
"""Longest sequence of a model whose folder doesn't tell how long they were in training."""


def load_model(
    source: str | Path,
    *,
    tokenizer: str | None = None,
    max_len: int | None = None,
    dtype: Literal["auto", "bfloat16", "float32"] = "auto",
    custom_import: str = "",
) -> tuple[nn.Module, Tokenizer]:
    """Return a saved model and its tokenizer, on the first GPU, else on the CPU.

    Args:
        source: a dump folder (its newest checkpoint), a step's folder, or a Hugging Face directory.
        tokenizer: its path, if it is no longer where the job read it.
        max_len: longest sequence that the model will see; None: as long as in training.
        dtype: of the weights; auto: bfloat16 on a GPU, float32 on a CPU.
        custom_import: your module that has the model's family. A checkpoint runs no code that you
            don't name.

    Returns:
        The model, (B, S) token ids -> (B, S, V) logits, and the tokenizer.

    Raises:
        ConfigError: if there is no model, or it is damaged.
    """
    check(max_len is None or max_len > 0, "max_len", max_len, "must be positive")
    with restored_process(), usual_torch(), _named_as_here():
        extend_by(custom_import, "custom_import")
        with open_source(NamedPath("source", Path(source)), tokenizer) as opened:
            length = max_len or opened.trained_length or UNKNOWN_LENGTH
            return build_model(opened, length, dtype), opened.tokenizer


@contextmanager
def _named_as_here() -> Iterator[None]:
    """Let errors name the arguments of `load_model` instead of a command's options."""
    try:
        yield
    except ConfigError as error:
        said = str(error).replace("--custom-import ", "custom_import = ")
        raise ConfigError(error.key, said.replace("--tokenizer", "tokenizer")) from error


def generate(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int = 100,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> str:
    """Return `prompt` and its continuation, up to the end of the text or `max_new_tokens`.

    Args:
        model: of `load_model`, or a session's.
        temperature: 0: greedy decoding; above, tokens are sampled.
        top_p: sample from the most likely tokens whose probabilities sum to this.
        seed: of the sampling.

    Raises:
        ConfigError: if an argument is out of bounds, or the text would be longer than the model's
            longest sequence.
        NotFiniteError: if the model gives no probabilities.
    """
    assert isinstance(model, Decoder)
    check_sampling(max_new_tokens, temperature, top_p, seed)
    choose = greedy if temperature == 0 else sampler(temperature, top_p, seed)
    tokens = prompt_tokens(tokenizer, prompt)
    check(bool(tokens), "prompt", prompt, "is no token, and the tokenizer has no BOS")
    length, longest = len(tokens) + max_new_tokens, model.seq_len
    rule = f"makes {length} tokens with the prompt, and the model is made for {longest}"
    fix = f"load_model(..., max_len={length}), or lower it"
    check(length <= longest, "max_new_tokens", max_new_tokens, rule, fix)
    stop = text_ends(tokenizer)
    with usual_torch():
        new = generate_tokens(
            model, tokens, max_new_tokens=max_new_tokens, choose=choose, stop=stop
        )
        written = [*takewhile(lambda token: token not in stop, new)]
    return tokenizer.decode([*tokenizer.encode(prompt), *written])
