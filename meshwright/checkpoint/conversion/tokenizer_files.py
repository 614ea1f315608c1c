"""The files of a tokenizer in an exported folder, by the names that Hugging Face has.

transformers, vLLM and llama.cpp read a `tokenizer.json` as it stands. From a bare `tokenizer.model`
they make one of their own: of a sentencepiece model with other ids (transformers 5.23 decodes no
line end by the one class that gives the same), of a tiktoken file none at all.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers

from meshwright.checkpoint.conversion.hf_folder import GENERATION_CONFIG
from meshwright.config.section import BYTES
from meshwright.datasets.tokenizers.huggingface import (
    HuggingFaceTokenizer,
    merges,
    of_ranks,
    with_specials,
)
from meshwright.datasets.tokenizers.kinds import SentencePieceTokenizer, Tokenizer, find_file
from meshwright.datasets.tokenizers.special_tokens import (
    BESIDE,
    NAMES,
    SETTINGS,
    SPACE,
    read_beside,
)
from meshwright.system.errors import config_error

JSON, MODEL, ADDED = "tokenizer.json", "tokenizer.model", "added_tokens.json"


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
        if file.name in (JSON, MODEL):
            beside = (*BESIDE, ADDED, GENERATION_CONFIG)
            files |= {name: p for name in beside if (p := file.with_name(name)).is_file()}
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
        **tokenizer.special_names,
    }
    if made is not None:
        files[JSON] = made
        was = files.get(SETTINGS)
        for name in (NAMES, ADDED):
            files.pop(name, None)  # they are in the new ones
        if isinstance(was, Path):
            template = read_beside(was, SETTINGS).get("chat_template")
            settings |= {} if template is None else {"chat_template": template}
    files[SETTINGS] = json.dumps(settings, indent=2) + "\n"
    return files


def to_tokenizer_json(tokenizer: Tokenizer) -> str | None:
    """Return the content of a tokenizer.json that gives the same ids; None if it is one already.

    Raises:
        ValueError: if there is no such file.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.made
    if isinstance(tokenizer, SentencePieceTokenizer):
        made = _of_pieces(tokenizer)
    else:
        made = of_ranks({bytes([byte]): byte for byte in range(256)}, None)
    return with_specials(made, tokenizer.special_ids, tokenizer.bos_id).to_str(pretty=True)


def _of_pieces(tokenizer: SentencePieceTokenizer) -> tokenizers.Tokenizer:
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # here: of this kind alone

    model = ModelProto.FromString(tokenizer.content)
    trainer, normalizer, pieces = model.trainer_spec, model.normalizer_spec, model.pieces
    if trainer.model_type not in (trainer.UNIGRAM, trainer.BPE):
        kind = trainer.model_type
        raise ValueError(f"it is a sentencepiece model of kind {kind}, not unigram or BPE")
    unknown = next((i for i, piece in enumerate(pieces) if piece.type == piece.UNKNOWN), None)
    # the others are not found in text: sentencepiece has them out of its trie
    usual = [piece.type in (piece.NORMAL, piece.USER_DEFINED) for piece in pieces]
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
                merges=merges(ids, ids),
                unk_token=None if unknown is None else pieces[unknown].piece,
                fuse_unk=True,
                byte_fallback=trainer.byte_fallback,
            )
        )
    steps: list[Any] = []
    if normalizer.precompiled_charsmap:
        # It replaces what readers see as one character by the shortest of its parts that the map
        # has; sentencepiece looks up part after part, the longest first. So a mark that does not
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
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    made.normalizer = normalizers.Sequence(steps)
    strip = [decoders.Strip(" ", 1, 0)] if normalizer.add_dummy_prefix else []
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return made


SAMPLES = (
    'def f(x):\n    """Grüße, 世界"""\n\treturn  x**2  # 1234567\n\n\nclass  A:\n        pass\n',
    "plain ASCII text, it's what we've got; they'LL see",
    "汉字和标点。没有空格",
    "😀👩‍👩‍👧‍👦🇩🇪 é é Vie\u0323\u0302t",
    " ",
    " begins with a space, ends with one ",
    "   \n\n\n \t\t\r\n  \r\r\n",
    "0123456789" * 7 + " 1 22 333 4444",
    "\n" * 50 + "a" + " " * 99 + "b" + "\t" * 33,
    "a\x00b\x1c\x1d\x85\u2028\ufeff\u3000\xa0",
    "עברית العربية हिन्दी ไทย",
    "https://example.org/a_b?c=d&e=%20 <a href='x'>y</a> {\"k\": [1, 2.5e-3]}",
)
"""Texts that are hard on tokenizers: cuts, runs of white space, bytes without a piece."""


MOST_IDS = 20_000
"""Of a larger vocabulary, as many ids spread over it are sampled."""


def samples(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield `SAMPLES`, and texts of the pieces of the vocabulary, in their order and in another. No
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
