"""`meshwright generate`: text from a checkpoint, or from a Hugging Face model directory."""

import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from itertools import takewhile

from meshwright.commands.options import CHECKPOINT, add_saved_model, input_path
from meshwright.config.command_line import Parser
from meshwright.datasets.tokenizers.kinds import Tokenizer
from meshwright.system.errors import ConfigError, check
from meshwright.system.files import NamedPath
from meshwright.train.resolve_model import extend_by


def add_options(parser: Parser) -> None:
    parser.add_argument(
        "source",
        type=input_path,
        metavar="CHECKPOINT_OR_HF_FOLDER",
        help=f"{CHECKPOINT}; or a Hugging Face model directory",
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="text to continue")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        default=100,
        help="most tokens to generate (default: 100)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        default=0.0,
        help="0: greedy decoding; higher values give more varied text (default: 0)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        default=1.0,
        help="nucleus sampling: from the most likely tokens with total probability P (default: 1)",
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", default=0, help="seed of the sampling (default: 0)"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="auto: bfloat16 on a GPU, float32 on a CPU (default: auto)",
    )
    add_saved_model(parser)


def check_sampling(
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    option: Callable[[str], str] = lambda name: name,
) -> None:
    """Raise `ConfigError` if an option of the sampling is out of bounds, or has no effect.

    Args:
        option: returns the name that the user knows of an argument.
    """
    key = option("max_new_tokens")
    check(max_new_tokens > 0, key, max_new_tokens, "must be positive")
    key, is_finite = option("temperature"), math.isfinite(temperature) and temperature >= 0
    check(is_finite, key, temperature, "must be 0 or more")
    check(0 < top_p <= 1, option("top_p"), top_p, "must be above 0 and at most 1")
    check(0 <= seed < 2**63, option("seed"), seed, "must be 0 or more, and below 2^63")
    for name, value, usual in (("top_p", top_p, 1), ("seed", seed, 0)):
        rule = "has no effect without a temperature: the most likely token is taken each time"
        fix = f"add {option('temperature')} 0.8"
        check(temperature > 0 or value == usual, option(name), value, rule, fix)


def run(given: Namespace) -> None:
    """Print the prompt and its continuation.

    Raises:
        ConfigError: if there is no model, or an option is out of bounds.
    """
    check_sampling(
        given.max_new_tokens,
        given.temperature,
        given.top_p,
        given.seed,
        lambda name: f"--{name.replace('_', '-')}",
    )
    print(f"reading {given.source} ...", file=sys.stderr, flush=True)  # stdout is only for the text
    # not at the top: torch takes a second
    from meshwright.commands.saved import SOURCE, build_model, encode_prompt, open_source
    from meshwright.models.generation import NoCoreError, NotFiniteError, generate, greedy, sampler

    extend_by(given.custom_import, "--custom-import")
    with open_source(NamedPath(SOURCE, given.source), given.tokenizer) as source:
        prompt = encode_prompt(source, given.prompt)
        length = len(prompt) + given.max_new_tokens
        if 0 < source.trained_length < length:
            trained = f"the model was trained on sequences of {source.trained_length:,}"
            print(f"{length:,} tokens are asked for, and {trained}", file=sys.stderr, flush=True)
        model = build_model(source, length, given.dtype)
    is_greedy = given.temperature == 0
    choose = greedy if is_greedy else sampler(given.temperature, given.top_p, given.seed)
    follow = partial(generate, max_new_tokens=given.max_new_tokens, choose=choose, stop=source.stop)
    try:
        _print_text(source.tokenizer, source.stop, given.prompt, follow(model, prompt))
    except NoCoreError as error:
        raise ConfigError("", f"{SOURCE}: {error}\n  fix: give it one") from None
    except NotFiniteError as error:
        print(flush=True)
        fix = "generate from a different checkpoint"
        raise ConfigError("", f"{SOURCE}: {error}\n  fix: {fix}") from None


def _print_text(
    tokenizer: Tokenizer, stop: frozenset[int], prompt: str, tokens: Iterator[int]
) -> None:
    """Print `prompt` and the text of `tokens`, as they come."""
    ids = tokenizer.encode(prompt)
    shown = tokenizer.decode(ids)
    print(shown, end="", flush=True)
    for token in takewhile(lambda token: token not in stop, tokens):
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character may be incomplete yet
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print(tokenizer.decode(ids)[len(shown) :])
