"""The files of a tokenizer in an exported folder, by the names that Hugging Face has.

transformers, vLLM and llama.cpp read a `tokenizer.json` as it stands. From a bare sentencepiece
`tokenizer.model` they make their own, in some versions with other ids.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from meshwright.checkpoint.conversion.hf_folder import GENERATION_CONFIG
from meshwright.checkpoint.conversion.tokenizer_proof import first_difference, samples
from meshwright.config.section import BYTES
from meshwright.datasets.tokenizers.chat import ChatTemplate
from meshwright.datasets.tokenizers.huggingface import HuggingFaceTokenizer, any_of
from meshwright.datasets.tokenizers.kinds import (
    ByteTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    build_tokenizer,
    find_file,
    find_template,
)
from meshwright.datasets.tokenizers.special_tokens import (
    BESIDE,
    NAMES,
    SETTINGS,
    SPACE,
    TEMPLATE,
    read_beside,
)
from meshwright.system.errors import ConfigError, config_error

JSON, MODEL, ADDED = "tokenizer.json", "tokenizer.model", "added_tokens.json"


def tokenizer_files(
    tokenizer: Tokenizer, path: str, *, seq_len: int, chat_template_path: str = ""
) -> dict[str, Path | str]:
    """Return the files of a tokenizer, or their content, by the names that Hugging Face has.

    A file with any other name is taken by itself: the files next to it may belong to another.

    Args:
        path: where it was found, or "bytes".
        seq_len: tokens of a sequence in training.
        chat_template_path: the job's, which replaces the tokenizer's own.

    Raises:
        ConfigError: if transformers couldn't be given the same ids, or the template is gone.
    """
    files: dict[str, Path | str] = {}
    if path not in ("", BYTES):
        file = find_file(path)
        if file.name in (JSON, MODEL):
            beside = (*BESIDE, ADDED, GENERATION_CONFIG)
            files |= {name: p for name in beside if (p := file.with_name(name)).is_file()}
        files[JSON if isinstance(tokenizer, HuggingFaceTokenizer) else MODEL] = file
        if file.name == JSON and (model := file.with_name(MODEL)).is_file():
            files |= _same_model(tokenizer, model)
    try:
        made = to_tokenizer_json(tokenizer)
    except Exception as error:  # whatever tokenizers makes of it
        fix = "export without it: --without-tokenizer"
        raise config_error("--tokenizer", path, f"cannot be made a {JSON}: {error}", fix) from None
    if made is not None:
        files[JSON] = made
    was = files.get(SETTINGS)
    settings = read_beside(was, SETTINGS) if isinstance(was, Path) else {}
    for name in (NAMES, ADDED):
        if made is not None:
            files.pop(name, None)  # they are in the new ones
    if chat_template_path:
        files[TEMPLATE] = settings["chat_template"] = find_template(path, chat_template_path)
    files[SETTINGS] = json.dumps(_settings(tokenizer, settings, seq_len), indent=2) + "\n"
    return files


def _settings(tokenizer: Tokenizer, was: dict[str, Any], seq_len: int) -> dict[str, Any]:
    """Return the content of tokenizer_config.json.

    transformers 5 rebuilds a tokenizer of most classes by code of the class, with its own
    normalizer and pre-tokenizer, whatever tokenizer.json says (Llama 2's gives other ids then). The
    class here takes tokenizer.json as it stands, in every version.
    """
    has_token: Callable[[str], bool] = tokenizer.special_ids.__contains__
    if isinstance(tokenizer, HuggingFaceTokenizer):
        has_token = tokenizer.has_token
    kept = {k: v for k, v in was.items() if k not in OF_CLASS and not k.endswith("_token")}
    for key in ("additional_special_tokens", "extra_special_tokens"):
        if isinstance(listed := was.get(key), list):
            contents = (one.get("content") if isinstance(one, dict) else one for one in listed)
            kept[key] = [token for token in contents if token and has_token(token)]
    names = {**tokenizer.special_names}
    if "eos_token" in names:
        names.setdefault("pad_token", names["eos_token"])
    if len(tokenizer.before) <= 1:  # transformers builds a template of BOS only from it
        kept["add_bos_token"] = bool(tokenizer.before)
    return {
        "clean_up_tokenization_spaces": False,
        # without token_type_ids, which models like ours don't take
        "model_input_names": ["input_ids", "attention_mask"],
        **kept,
        **names,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": seq_len,
    }


OF_CLASS = {
    "tokenizer_class",
    "auto_map",
    "backend",
    "tokenizer_file",
    "name_or_path",
    "is_local",
    "added_tokens_decoder",
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "legacy",
    "from_slow",
    "special_tokens_map_file",
    "processor_class",
    "vocab_file",
}
"""Keys of tokenizer_config.json that say how a class builds a tokenizer; tokenizer.json says it."""


def _same_model(tokenizer: Tokenizer, file: Path) -> dict[str, Path | str]:
    """Return the sentencepiece model next to a tokenizer.json, if it gives its ids: llama.cpp
    prefers it."""
    try:
        model = build_tokenizer(str(file))
    except ConfigError:  # a file of a different kind
        return {}
    is_same = all(model.encode(text) == tokenizer.encode(text) for text in samples(tokenizer))
    return {MODEL: file} if is_same else {}


def turn_end(tokenizer: Tokenizer, folder: Path) -> int | None:
    """Return the special token that ends the assistant's turn in the chat template of an exported
    folder; None if there is no such template or token."""
    try:
        chat = ChatTemplate(tokenizer, find_template(str(folder)))
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        ids, counts = chat.encode(turns)
    except ConfigError:  # no template, or one for other conversations
        return None
    last = next(i for i, is_counted in zip(ids[::-1], counts[::-1], strict=True) if is_counted)
    return last if last in tokenizer.special_ids.values() else None


def why_not_exported(tokenizer: Tokenizer) -> str:
    """Return why an export would reject this tokenizer; "" if nothing is known against it.

    Sentencepiece chooses the leftmost of pairs with equal scores, and a tokenizer.json has an order
    of all pairs. Normalizers differ in rare marks.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer | ByteTokenizer):
        return ""
    try:
        made = tokenizers.Tokenizer.from_str(to_tokenizer_json(tokenizer) or "")
    except Exception as error:  # whatever the library makes of it
        return str(error)

    def encode(text: str) -> list[int]:
        ids: list[int] = made.encode(text, add_special_tokens=False).ids
        return ids

    found = first_difference(tokenizer, encode)
    return "" if isinstance(found, int) else f"a {JSON} made of it gives {found}"


def to_tokenizer_json(tokenizer: Tokenizer) -> str | None:
    """Return the content of a tokenizer.json that gives the same ids; None if it is one already.

    Raises:
        ValueError: if there is no such file.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.made
    if not isinstance(tokenizer, SentencePieceTokenizer | ByteTokenizer):
        raise ValueError(f"{type(tokenizer).__name__} is not a kind that has such a file")
    made = _of_pieces(tokenizer) if isinstance(tokenizer, SentencePieceTokenizer) else _of_bytes()
    return _with_specials(made, tokenizer.special_ids, tokenizer.bos_id).to_str(pretty=True)


def _of_pieces(tokenizer: SentencePieceTokenizer) -> tokenizers.Tokenizer:
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # here: only of this kind

    model = ModelProto.FromString(tokenizer.content)
    trainer, normalizer, pieces = model.trainer_spec, model.normalizer_spec, model.pieces
    if trainer.model_type not in (trainer.UNIGRAM, trainer.BPE):
        kind = trainer.model_type
        raise ValueError(f"it is a sentencepiece model of kind {kind}, not unigram or BPE")
    unknown = next((i for i, piece in enumerate(pieces) if piece.type == piece.UNKNOWN), None)
    # the others aren't found in text: sentencepiece has them out of its trie
    usual = [piece.type == piece.NORMAL for piece in pieces]
    defined = [piece.piece for piece in pieces if piece.type == piece.USER_DEFINED]
    if trainer.model_type == trainer.UNIGRAM:
        never = min(piece.score for piece in pieces) - 1000.0
        scored = [
            (piece.piece, piece.score if is_usual else never)
            for piece, is_usual in zip(pieces, usual, strict=True)
        ]
        made = tokenizers.Tokenizer(
            models.Unigram(scored, unk_id=unknown, byte_fallback=trainer.byte_fallback)
        )
    else:
        order = sorted(range(len(pieces)), key=lambda number: (-pieces[number].score, number))
        ids = {pieces[number].piece: number for number in order if usual[number]}
        made = tokenizers.Tokenizer(
            models.BPE(
                vocab={piece.piece: number for number, piece in enumerate(pieces)},
                merges=_merges(ids, ids),
                unk_token=None if unknown is None else pieces[unknown].piece,
                fuse_unk=True,
                byte_fallback=trainer.byte_fallback,
            )
        )
    steps: list[Any] = []
    if normalizer.precompiled_charsmap:
        # It replaces what readers see as one character by the shortest of its parts that the map
        # has; sentencepiece looks up part after part, the longest first. So a mark that doesn't
        # combine with a character before it is still lost, if the map replaces that.
        if tokenizer.encode("e\u0323\u0302") == tokenizer.encode("\u1ec7"):
            steps.append(normalizers.NFC())
        if tokenizer.encode("a\ra") == tokenizer.encode("a\na"):
            steps.append(normalizers.Replace(Regex(r"\r(?=\r*\n)"), "\n"))
        steps.append(normalizers.Precompiled(normalizer.precompiled_charsmap))
    if normalizer.remove_extra_whitespaces:
        edges = normalizers.Replace(Regex(r"\A +| +\z"), "")
        steps += [edges, normalizers.Replace(Regex(" {2,}"), " ")]
    if normalizer.add_dummy_prefix:
        # not before the symbols themselves, which are normalized to be found in normalized text
        steps.append(normalizers.Replace(Regex(rf"\A(?!(?:{any_of(defined)})\z)"), SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    made.normalizer = normalizers.Sequence(steps)
    made.add_tokens([AddedToken(symbol, normalized=True) for symbol in defined])
    strip = [decoders.Strip(" ", 1, 0)] if normalizer.add_dummy_prefix else []
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return made


def _of_bytes() -> tokenizers.Tokenizer:
    """Return a byte-level BPE whose pieces are the bytes, by their numbers."""
    # the character that stands for each byte: GPT-2's table
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    names = [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
    vocab = {name: byte for byte, name in enumerate(names)}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def _merges(pieces: Iterable[str], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return every pair of pieces that makes a piece, in the order in which pieces are
    preferred."""
    found = []
    for piece in pieces:
        splits = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        pairs = [pair for pair in splits if pair[0] in ids and pair[1] in ids]
        found += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return found


def _with_specials(
    made: tokenizers.Tokenizer, specials: Mapping[str, int], bos_id: int | None
) -> tokenizers.Tokenizer:
    """Add special tokens, of which one starts a text.

    Raises:
        ValueError: if one would have a different id.
    """
    in_order = sorted(specials, key=specials.__getitem__)
    made.add_special_tokens([AddedToken(name, normalized=False) for name in in_order])
    for name, token_id in specials.items():
        if made.token_to_id(name) != token_id:
            raise ValueError(f"{name!r} would have the id {made.token_to_id(name)}, not {token_id}")
    if bos_id is not None:
        bos = next(name for name, token_id in specials.items() if token_id == bos_id)
        made.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, bos_id)]
        )
    return made
