"""Text to token ids and back, whatever the tokenizer file; and the chat template next to it."""

import hashlib
import os
import re
from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

from meshwright.config.own_options import options_of
from meshwright.config.section import BYTES, CHAT_TEMPLATES
from meshwright.datasets.tokenizers.special_tokens import (
    BESIDE,
    NAME_KEY,
    OWN,
    PATH_KEY,
    SETTINGS,
    SPACE,
    TEMPLATE,
    TEMPLATE_KEY,
    TokenizerKeys,
    read_beside,
    shipped_template,
    well_formed,
)
from meshwright.system.errors import (
    PASSED_ON,
    ConfigError,
    UnknownNameError,
    check,
    config_error,
    did_you_mean,
    where_it_ends,
)
from meshwright.system.files import LFS_FIX, LFS_POINTER, LFS_RULE, is_lfs_pointer
from meshwright.system.modules import describe_error, file_of

OF_PRESETS = {
    "llama2": "meta-llama/Llama-2-7b-hf",
    "llama3": "meta-llama/Meta-Llama-3-8B",
    "llama3.1": "meta-llama/Llama-3.1-8B",
    "llama3.2": "meta-llama/Llama-3.2-1B",
    "mixtral": "mistralai/Mixtral-8x7B-v0.1",
    "olmoe": "allenai/OLMoE-1B-7B-0924",
    "olmo2": "allenai/OLMo-2-1124-7B",
    "olmo3": "allenai/Olmo-3-1025-7B",
    "olmo_hybrid": "allenai/Olmo-Hybrid-7B",
    "qwen3": "Qwen/Qwen3-8B",
    "qwen3_next": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "qwen3.5": "Qwen/Qwen3.5-9B",
    "gpt_oss": "openai/gpt-oss-20b",
    "gemma2": "google/gemma-2-2b",
    "gemma3": "google/gemma-3-1b-pt",
    "smollm3": "HuggingFaceTB/SmolLM3-3B-Base",
    "deepseek_v2": "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek_v3": "deepseek-ai/DeepSeek-V3-Base",
    "qwen2.5": "Qwen/Qwen2.5-7B",
    "mistral_v0.1": "mistralai/Mistral-7B-v0.1",
    "mistral_v0.3": "mistralai/Mistral-7B-v0.3",
    "granite": "ibm-granite/granite-3.1-8b-base",
}
"""Repositories on the Hugging Face hub, by the folder in assets/tokenizers that presets name."""

FILE_NAMES = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")


class Tokenizer(Protocol):
    """The interface that data and generation use."""

    vocab_size: int
    """One more than the largest id."""
    bos_id: int | None
    """Token before every document; None if the family has none."""
    eos_id: int | None
    """Token after every document; None if the family has none."""
    fingerprint: str
    """Of the file: equal where ids mean the same."""
    loses_text: bool
    """Some characters may have no token, or only the unknown one."""

    @property
    def before(self) -> list[int]:
        """Tokens before every document: BOS, if the family has one; of some families, two."""

    @property
    def after(self) -> list[int]:
        """Tokens after every document, of which EOS is the last."""

    @property
    def special_names(self) -> dict[str, str]:
        """Special tokens by the names that Hugging Face has: bos_token, eos_token and so on. The
        files next to a tokenizer may have a different EOS: of chats, it ends a turn."""

    @property
    def special_ids(self) -> dict[str, int]:
        """Ids of all special tokens: no text has one of them."""

    @property
    def token_bytes(self) -> list[int] | None:
        """Bytes of UTF-8 text that each of the `vocab_size` ids stands for; 0 for special tokens.
        None if the tokenizer doesn't tell.

        Over the ids of a text they add up to its bytes, exactly for byte-level kinds. Others count
        the text as they normalise it, with a space before it.
        """

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text` only, without BOS and EOS; the spelling of a special token is
        text."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`; ids from `vocab_size` on, of a larger model, have none."""

    def count_lost(self, text: str) -> tuple[int, int]:
        """Return how many characters of `text`, apart from white space, have no token but the
        unknown one, and how many there are."""


MEMBERS = [name for name in dir(Tokenizer) if name[0] != "_"] + [*Tokenizer.__annotations__]


class _OneTokenEnds:
    """Documents start with BOS and end with EOS, where there are such tokens."""

    bos_id: int | None
    eos_id: int | None

    @property
    def before(self) -> list[int]:
        return [] if self.bos_id is None else [self.bos_id]

    @property
    def after(self) -> list[int]:
        return [] if self.eos_id is None else [self.eos_id]


class TokenizerBase(_OneTokenEnds):
    """What a tokenizer of the user's module has, unless it says otherwise: no special tokens, and a
    token for every text."""

    bos_id = eos_id = None
    loses_text = False
    special_names: ClassVar[dict[str, str]] = {}
    special_ids: ClassVar[dict[str, int]] = {}
    token_bytes: list[int] | None = None

    def count_lost(self, text: str) -> tuple[int, int]:
        return 0, len(text)


class ByteTokenizer(_OneTokenEnds):
    """UTF-8 bytes, then BOS and EOS: needs no file."""

    vocab_size = 258
    bos_id: int | None = 256
    eos_id: int | None = 257
    fingerprint = BYTES
    loses_text = False
    special_ids: ClassVar = {"<s>": 256, "</s>": 257}

    @property
    def special_names(self) -> dict[str, str]:
        names = ("bos_token", self.bos_id, "<s>"), ("eos_token", self.eos_id, "</s>")
        return {name: token for name, token_id, token in names if token_id is not None}

    @cached_property
    def token_bytes(self) -> list[int]:
        return [1] * 256 + [0] * 2

    def encode(self, text: str) -> list[int]:
        return list(well_formed(text).encode("utf-8"))

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def count_lost(self, text: str) -> tuple[int, int]:
        return 0, len(text)


class SentencePieceTokenizer(_OneTokenEnds):
    """A `tokenizer.model` of sentencepiece. Control tokens in text are just text to it."""

    def __init__(self, path: Path) -> None:
        import sentencepiece  # here: `check` waits for no library of a different kind

        self.content = path.read_bytes()
        self.fingerprint = hashlib.sha256(self.content).hexdigest()[:16]
        self._model = sentencepiece.SentencePieceProcessor(model_proto=self.content)
        self.vocab_size: int = self._model.vocab_size()
        # sentencepiece says -1 for a token it lacks
        ends = (self._model.bos_id(), self._model.eos_id())
        self.bos_id, self.eos_id = (None if token_id < 0 else token_id for token_id in ends)
        self.loses_text = not any(map(self._model.is_byte, range(self.vocab_size)))

    @property
    def special_names(self) -> dict[str, str]:
        ids = {"bos": self.bos_id, "eos": self.eos_id, "unk": self._model.unk_id()}
        pieces = ((name, self._model.id_to_piece(i)) for name, i in ids.items() if i is not None)
        return {f"{name}_token": piece for name, piece in pieces}

    @cached_property
    def special_ids(self) -> dict[str, int]:
        ids, model = range(self.vocab_size), self._model
        return {model.id_to_piece(i): i for i in ids if model.is_control(i) or model.is_unknown(i)}

    @cached_property
    def token_bytes(self) -> list[int]:
        ids = list(range(self.vocab_size))
        pieces = zip(self._model.id_to_piece(ids), self._model.is_byte(ids), strict=True)
        sizes = [1 if is_byte else len(p.replace(SPACE, " ").encode()) for p, is_byte in pieces]
        # an unknown piece stands for a run of characters of any length, so for none in particular
        for token_id in self.special_ids.values():
            sizes[token_id] = 0
        return sizes

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(well_formed(text))
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._model.decode([i for i in ids if i < self.vocab_size])
        return text

    def count_lost(self, text: str) -> tuple[int, int]:
        pieces = self._model.encode(well_formed(text), out_type="proto").pieces
        lost = "".join(piece.surface for piece in pieces if piece.id == self._model.unk_id())
        sizes = (sum(not character.isspace() for character in part) for part in (lost, text))
        return next(sizes), next(sizes)


TOKENIZERS: dict[str, Callable[[str, Any], Tokenizer]] = {}
"""The tokenizers of the user's module, by name: from `model.tokenizer_path` and the options of
[options.NAME] to the tokenizer, which may be a `TokenizerBase`."""


def build_tokenizer(path: str, keys: TokenizerKeys = OWN) -> Tokenizer:
    """Build the tokenizer in the file `path`, or in the folder `path` under its usual name; or the
    user's of that name.

    Raises:
        ConfigError: if there is none, or it can't be read, or lacks BOS or EOS of `keys`.
    """
    if keys.name:
        return _build_own(path, keys)
    if path == BYTES:
        return _with_ends(ByteTokenizer(), keys, path)
    file = find_file(path)
    beside = [file, *(file.with_name(name) for name in BESIDE)]
    found = (file.stat() for file in beside if file.exists())
    return _build(file, keys, tuple((it.st_mtime_ns, it.st_size, it.st_ino) for it in found))


def _build_own(path: str, keys: TokenizerKeys) -> Tokenizer:
    """Build a tokenizer of the user's module."""
    name, options = keys.name, options_of(keys.name, keys.options)
    rule, fix = "no such tokenizer", did_you_mean(name, TOKENIZERS) if TOKENIZERS else ""
    fix = fix or "name the module that has it, in experimental.custom_import"
    if name not in TOKENIZERS:
        raise UnknownNameError(NAME_KEY, str(config_error(NAME_KEY, name, rule, fix)))
    build = TOKENIZERS[name]
    try:
        tokenizer = build(path, options)
        missing = [member for member in MEMBERS if not hasattr(tokenizer, member)]
        rule = f"its tokenizer has no {', '.join(missing)}"
        rule = "its function returns None, and no tokenizer" if tokenizer is None else rule
        check(not missing, NAME_KEY, name, rule, "correct it; docs/extending.md has an example")
        return _with_ends(tokenizer, keys, name)
    except (ConfigError, *PASSED_ON):
        raise
    except BaseException as error:  # whatever the user's code raises
        what = describe_error(error, file_of(build))
        raise config_error(NAME_KEY, name, f"cannot be built: {what}", "correct it") from error


@lru_cache(4)  # every source needs it, and a vocabulary of 128k takes seconds
def _build(file: Path, ends: TokenizerKeys, states: tuple[tuple[int, int, int], ...]) -> Tokenizer:
    """`states` of the file and of the ones next to it: if one changes, it is another tokenizer."""
    content = file.read_bytes()
    check(bool(content.strip()), PATH_KEY, str(file), "is empty", "download it again")
    check(LFS_POINTER.match(content) is None, PATH_KEY, str(file), LFS_RULE, LFS_FIX)
    is_json = file.suffix == ".json" or content.lstrip().startswith(b"{")
    name = "HuggingFaceTokenizer" if is_json else "SentencePieceTokenizer"
    _reject_tiktoken(file, content)
    try:
        if not is_json:
            return _with_ends(SentencePieceTokenizer(file), ends, str(file))
        from meshwright.datasets.tokenizers.huggingface import HuggingFaceTokenizer  # as above

        return HuggingFaceTokenizer(file, ends)  # it finds them by itself
    except ConfigError:
        raise
    except Exception as error:  # tokenizers raises bare Exception, sentencepiece RuntimeError
        reason = str(error).strip() or type(error).__name__
        raise config_error(PATH_KEY, str(file), f"not a {name}: {reason}") from error


def _reject_tiktoken(file: Path, content: bytes) -> None:
    """Raise `ConfigError` if the first line is a base64 token and its rank, as tiktoken's are."""
    if re.fullmatch(rb"[A-Za-z0-9+/]+={0,2} \d+", content.split(b"\n", 1)[0].rstrip(b"\r")):
        raise config_error(
            PATH_KEY,
            str(file),
            "is a tiktoken file, which holds neither the pattern that splits text nor the special "
            "tokens of its model",
            "name the tokenizer.json of the same model: its Hugging Face repository has one",
        )


def _with_ends(tokenizer: Tokenizer, keys: TokenizerKeys, path: str) -> Tokenizer:
    """Return a tokenizer of a different kind without the tokens that `keys` leave out."""
    for name, token in (("bos", keys.bos), ("eos", keys.eos)):
        if token == "":
            setattr(tokenizer, f"{name}_id", None)
        elif token is not None:
            what = f"only a tokenizer.json can have another; {path} has its own"
            raise config_error(f"model.{name}_token", token, what, 'leave it out, or set it to ""')
    return tokenizer


def end_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """Return the tokens around a document, as Hugging Face names them."""
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}


def end_of_chat(tokenizer: Tokenizer) -> int | None:
    """Return the token that the files next to a tokenizer name as EOS: of chats, it ends a turn."""
    return tokenizer.special_ids.get(tokenizer.special_names.get("eos_token", ""))


def text_ends(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end a text: of documents, and of turns in a chat."""
    ends = tokenizer.eos_id, end_of_chat(tokenizer)
    return frozenset(token for token in ends if token is not None)


def prompt_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return `text` as the start of a document; empty if it is no token and there is no BOS.

    A special token's spelling is the token, as in a conversation, where the tokenizer can do that.
    """
    chat = getattr(tokenizer, "encode_chat", None)
    ids = chat(well_formed(text), has_walls=False)[0] if chat else tokenizer.encode(text)
    before = tokenizer.before
    return ids if ids[: len(before)] == before else [*before, *ids]


def find_file(path: str) -> Path:
    """Return the tokenizer's file, if `path` is one or a folder that holds one.

    Raises:
        ConfigError: if there is none.
    """
    if not path:
        fix = f"name a tokenizer.model, a tokenizer.json or their folder; or {BYTES!r}"
        raise ConfigError(PATH_KEY, f"{PATH_KEY}: not given\n  fix: {fix}")
    file = Path(path)
    if file.is_dir():
        inside = [file / name for name in FILE_NAMES if (file / name).is_file()]
        rule = f"holds no {' or '.join(FILE_NAMES[:2])}"
        check(bool(inside), PATH_KEY, path, rule, "name the file itself")
        return inside[0]
    if not file.is_file():
        fix = _download(file) or where_it_ends(file)
        raise config_error(PATH_KEY, path, "no such file or folder", fix)
    return file


def _download(file: Path) -> str:
    """Return the command that fetches the tokenizer of a preset; "" for any other."""
    folder = file.parent
    repository = OF_PRESETS.get(folder.name, "")
    if not repository or folder.parent.name != "tokenizers":
        return ""
    # the ones next to it name BOS, EOS and the chat template; of several, a missing one is no error
    names = " ".join(dict.fromkeys((file.name, *BESIDE)))
    return f"hf download {repository} {names} --local-dir {os.path.relpath(folder)}"


def find_template(tokenizer_path: str, template_path: str = "") -> str:
    """Return the template in the file `template_path`, or the shipped one of that name; otherwise
    the one next to the tokenizer: chat_template.jinja, or the "chat_template" of
    tokenizer_config.json; of several, the "default".

    Raises:
        ConfigError: if there is none.
    """
    if template_path in CHAT_TEMPLATES:
        return shipped_template(template_path).read_text("utf-8")
    if template_path:
        return _read_template(Path(template_path))

    def missing(what: str) -> ConfigError:
        message = f"{PATH_KEY} = {tokenizer_path!r}: {what}"
        fix = f"name a Jinja template in {TEMPLATE_KEY}, or one of {', '.join(CHAT_TEMPLATES)}"
        return ConfigError(TEMPLATE_KEY, f"{message}\n  fix: {fix}")

    if tokenizer_path == BYTES:
        raise missing("has no chat template")
    tokenizer_file = find_file(tokenizer_path)
    if (beside := tokenizer_file.with_name(TEMPLATE)).is_file():
        return _read_template(beside)
    found = read_beside(tokenizer_file, SETTINGS).get("chat_template")
    if isinstance(found, list):
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default")
        if not isinstance(found, str):
            names = ", ".join(map(str, named))
            raise missing(f"{SETTINGS} has the chat templates {names}, and none is the default")
    if not isinstance(found, str) or not found.strip():
        raise missing(f'no {TEMPLATE} next to it, and no "chat_template" in {SETTINGS}')
    return found


def _read_template(file: Path) -> str:
    try:
        check(not is_lfs_pointer(file), TEMPLATE_KEY, str(file), LFS_RULE, LFS_FIX)
        template = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = str(error.strerror) if isinstance(error, OSError) else "is no UTF-8 text"
        raise config_error(TEMPLATE_KEY, str(file), reason) from error
    check(bool(template.strip()), TEMPLATE_KEY, str(file), "is empty")
    return template
