"""Compares the tokenizer of an exported folder, as others read it, with the one of training."""

import importlib
import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import tokenizers

from meshwright.datasets.tokenizers.chat import take_out
from meshwright.datasets.tokenizers.huggingface import HuggingFaceTokenizer
from meshwright.datasets.tokenizers.jinja_templates import TODAY, compile_template
from meshwright.datasets.tokenizers.kinds import Tokenizer, end_ids, find_template
from meshwright.datasets.tokenizers.special_tokens import SETTINGS
from meshwright.system.errors import ConfigError, RecordError
from meshwright.system.files import NamedPath, sync_file
from meshwright.system.modules import is_installed

LEAVE_OUT = "export without it (--without-tokenizer), and encode text as training did"

SAMPLES = (
    'def f(x):\n    """Grüße, 世界"""\n\treturn  x**2  # 1234567\n\n\nclass  A:\n        pass\n',
    "plain ASCII text, it's what we've got; they'LL see",
    "汉字和标点。没有空格",
    "😀👩‍👩‍👧‍👦🇩🇪 é é Vie\u0323\u0302t",
    " ",
    " starts with a space, ends with one ",
    "   \n\n\n \t\t\r\n  \r\r\n",
    "0123456789" * 7 + " 1 22 333 4444",
    "\n" * 50 + "a" + " " * 99 + "b" + "\t" * 33,
    "a\x00b\x1c\x1d\x85\u2028\ufeff\u3000\xa0",
    "עברית العربية हिन्दी ไทย",
    "https://example.org/a_b?c=d&e=%20 <a href='x'>y</a> {\"k\": [1, 2.5e-3]}",
)
"""Text that are hard on tokenizers: cuts, runs of white space, bytes without a piece."""

MOST_IDS = 20_000
"""Of a larger vocabulary, as many ids spread over it are sampled."""


def samples(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield `SAMPLES`, and text of the pieces of the vocabulary, in their order and in another. No
    text holds a special token."""
    specials, special_ids = tokenizer.special_ids, set(tokenizer.special_ids.values())
    step = max(1, tokenizer.vocab_size // MOST_IDS)
    ids = [i for i in range(0, tokenizer.vocab_size, step) if i not in special_ids]
    scattered = [ids[i * 7919 % len(ids)] for i in range(len(ids))]
    texts = [*SAMPLES]
    for order in (ids, scattered):
        texts += [tokenizer.decode(order[i : i + 64]) for i in range(0, len(order), 64)]
    for text in (text.replace("\N{REPLACEMENT CHARACTER}", "") for text in texts):
        if not any(name in text for name in specials):
            yield text


def first_difference(tokenizer: Tokenizer, encode: Callable[[str], list[int]]) -> str | int:
    """Return the first of `samples` for which `encode` gives other ids, in words; without one, how
    many ids were compared. Text that the tokenizer can't encode are bad records in training."""
    count = 0
    for text in samples(tokenizer):
        try:
            want = tokenizer.encode(text)
        except RecordError:
            continue
        got = encode(text)
        if got != want:
            pairs = enumerate(zip(want, got, strict=False))
            where = next((i for i, (a, b) in pairs if a != b), min(len(want), len(got)))
            return (
                f"other ids for {text[:40]!r}: from the {where + 1}. on {got[where : where + 4]}, "
                f"and {want[where : where + 4]} in training"
            )
        count += len(want)
    return count


def prove_tokenizer(
    tokenizer: Tokenizer, place: NamedPath, stops: Collection[int], say: Callable[[str], None]
) -> None:
    """Compare ids, special tokens and conversations.

    transformers 5 has a list of model types (qwen2 and phi3 are in it) whose tokenizers it rebuilds
    by a class of that list, whatever the folder names. If that gives other ids, the folder gets a
    class of its own, for which transformers reads tokenizer.json.

    Args:
        place: of the folder.
        stops: the tokens that end a text.

    Raises:
        ConfigError: if something differs.
    """
    try:
        encode, auto, library = _read(place.path)
    except Exception as error:  # whatever a library makes of a file
        raise place.error(f"its tokenizer cannot be read: {error}", LEAVE_OUT) from None
    found = first_difference(tokenizer, encode)
    if isinstance(found, str) and auto is not None and type(auto).__name__ not in AS_IT_STANDS:
        say(f"{library} rebuilds it as {type(auto).__name__}: {CLASS_FILE} keeps it as it stands")
        _add_class(place.path)
        encode, auto, library = _read(place.path)
        found = first_difference(tokenizer, encode)
    place.check(isinstance(found, int), f"its tokenizer by {library} gives {found}", LEAVE_OUT)
    if auto is not None:
        _compare_special(tokenizer, place, stops, auto)
        _compare_conversations(tokenizer, place, auto, say)
    say(f"compared {found:,} ids of {library} with the tokenizer of training: equal")


def _read(folder: Path) -> tuple[Callable[[str], list[int]], Any, str]:
    """From text to ids, without special tokens; transformers' tokenizer; and the library used."""
    if not is_installed("transformers"):
        plain = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        library = f"tokenizers {tokenizers.__version__} (transformers is not installed)"
        return lambda text: plain.encode(text, add_special_tokens=False).ids, None, library
    transformers: Any = importlib.import_module("transformers")  # only to compare with
    transformers.logging.set_verbosity_error()
    auto = transformers.AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    library = f"transformers {transformers.__version__} (AutoTokenizer)"
    return lambda text: auto(text, add_special_tokens=False)["input_ids"], auto, library


AS_IT_STANDS = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Classes of transformers 5 and 4 that read tokenizer.json without changing it."""

CLASS_FILE = "tokenization.py"

CLASS = '''"""The tokenizer of tokenizer.json as it stands, for trust_remote_code=True."""

from transformers import PreTrainedTokenizerFast


class Tokenizer(PreTrainedTokenizerFast):
    pass
'''


def _add_class(folder: Path) -> None:
    """Name a class in the folder: without trust_remote_code transformers doesn't run its code, and
    takes the `tokenizer_class` of tokenizer_config.json then."""
    settings = json.loads((folder / SETTINGS).read_text("utf-8"))
    settings["auto_map"] = {"AutoTokenizer": [None, f"{Path(CLASS_FILE).stem}.Tokenizer"]}
    for name, text in ((SETTINGS, json.dumps(settings, indent=2) + "\n"), (CLASS_FILE, CLASS)):
        with open(folder / name, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            sync_file(file.fileno(), folder / name)


def _compare_special(
    tokenizer: Tokenizer, place: NamedPath, stops: Collection[int], auto: Any
) -> None:
    """Compare ids of special tokens, by their names and in a text."""
    for name, want in end_ids(tokenizer).items():
        got = getattr(auto, name)
        is_right = want is None or got == want or (name == "eos_token_id" and got in stops)
        place.check(is_right, f"its {name} by AutoTokenizer is {got}, and {want} in training")
    for token, want in tokenizer.special_ids.items():
        got = auto.convert_tokens_to_ids(token)
        rule = f"its {token!r} by AutoTokenizer is {got}, and {want} in training"
        place.check(got == want, rule, LEAVE_OUT)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        text = SAMPLES[0].join(["", *tokenizer.special_names.values(), ""])
        try:
            ids, _ = tokenizer.encode_chat(text, has_walls=False)
        except RecordError:  # as above
            return
        rule = "its tokenizer by AutoTokenizer gives other ids for code around special tokens"
        is_right = auto(text, add_special_tokens=False)["input_ids"] == ids
        place.check(is_right, rule, LEAVE_OUT)


TURNS = ("What does this do?", SAMPLES[0], "  Grüße,\r\n\r\n世界  ", "A list:\n\n- one\n- two\n")
"""Contents of a conversation, the user's first."""


def _compare_conversations(
    tokenizer: Tokenizer, place: NamedPath, auto: Any, say: Callable[[str], None]
) -> None:
    """Compare three conversations in the folder's chat template, if it has one."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return
    try:
        template = compile_template(find_template(str(place.path)))
    except ConfigError:
        return
    turns = [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(TURNS)]
    count = 0
    for messages in (turns[:2], turns, turns[:3]):
        names = tokenizer.special_names | {"messages": messages, "tools": None, "documents": None}
        try:
            text, _ = take_out(template.render(**names, add_generation_prompt=False))
            want = tokenizer.encode_chat(text, has_walls=False)[0]
        except Exception:  # the template is a program, and takes other conversations
            continue
        given = {"return_dict": True, "strftime_now": TODAY.strftime}
        got = auto.apply_chat_template(messages, tokenize=True, **given)["input_ids"]
        rule = f"its chat template by AutoTokenizer gives other ids for {len(messages)} messages"
        place.check(got == want, rule, LEAVE_OUT)
        count += 1
    if count:
        say(f"compared {count} conversations in the chat template: equal")
