"""Random tokenizer.json files, whose ids must be the file's own.

    python -m tests.campaigns.tokenizer_files --count 60 --seed 1
    python -m tests.campaigns.tokenizer_files --count 60 --seed 1 --only 17      (that one again)

Draws a model (BPE of bytes, with byte fallback or of letters, WordPiece, words, Unigram),
normalizers, added tokens, a template, dropout, and then other ids: holes in the vocabulary and
before added tokens, and clashes. The same tokenizer with dense ids and without dropout, which
`tokenizers` reads rightly, encodes texts to names of tokens, and the file's JSON says their ids.
What is read must give those, in an exported folder by transformers, too; a clash must be rejected
with its cause. Prints a line for each file, and exits with 1 if one is wrong.
"""

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from meshwright.checkpoint.conversion.tokenizer_files import tokenizer_files
from meshwright.checkpoint.conversion.tokenizer_proof import prove_tokenizer
from meshwright.datasets.tokenizers.kinds import build_tokenizer, text_ends
from meshwright.system.errors import ConfigError, RecordError
from meshwright.system.files import NamedPath

WORDS = [
    *("the", "cat", "sat", "on", "a", "mat", "ünd", "der", "Hund", "lief"),
    *("12", "34", "one", "two", "(three)", "it's", "x_y"),
]
CLASHES = {
    "two tokens with one id": "to two tokens",
    "one token with two ids": "two ids",
    "an added token with a piece's id": "to two tokens",
}


@dataclass
class Drawn:
    """A file, and what its texts must become."""

    what: str
    raw: dict[str, Any]
    dense: Tokenizer
    ids: dict[str, int]
    """The file's, by text of a token."""
    before: list[str] = field(default_factory=list)
    cause: str = ""
    """A part of the message that rejects it; "": it must be read."""


def draw(seed: int, number: int) -> Drawn:
    """The file of that number: a function of the arguments."""
    chance = random.Random(f"{seed} {number}")
    kind = chance.choice(sorted(MODELS))
    dense = MODELS[kind](chance)
    words = [kind]
    if chance.random() < 0.4 and kind not in ("bytes", "fallback", "unigram"):
        chosen = chance.choice(["NFC", "Lowercase", "NFKD", "StripAccents"])
        dense.normalizer = getattr(normalizers, chosen)()
        words.append(chosen)
    specials = ["<|begin|>", "</s>", "<|im_end|>"][: chance.randint(1, 3)]
    usual = chance.sample(["<tool_call>", "    ", "zzz"], chance.randint(0, 2))
    added = [AddedToken(token, normalized=False, special=True) for token in specials]
    added += [AddedToken(token, normalized=False) for token in usual]
    chance.shuffle(added)
    for token in added:
        dense.add_special_tokens([token]) if token.special else dense.add_tokens([token])
    raw = json.loads(dense.to_str())
    ids = dense.get_vocab(with_added_tokens=True)
    before = specials[:1] if specials[0] == "<|begin|>" and chance.random() < 0.6 else []
    drawn = Drawn("", raw, dense, dict(ids), before)
    if before:
        words.append("template")
    if kind in ("bytes", "fallback", "letters") and chance.random() < 0.4:
        raw["model"]["dropout"] = 0.3
        words.append("dropout")
    if chance.random() < 0.3:
        raw["truncation"] = {
            "direction": "Right",
            "max_length": 3,
            "strategy": "LongestFirst",
            "stride": 0,
        }
        words.append("truncation")
    if chance.random() < 0.6:
        words += _move_ids(chance, drawn)
    if before:
        raw["post_processor"] = _template(before[0], drawn.ids[before[0]])
    if chance.random() < 0.25:
        what = chance.choice(sorted(CLASHES))
        _clash(chance, what, drawn)
        drawn.cause = CLASHES[what]
        words.append(what)
    drawn.what = ", ".join(words)
    return drawn


def _of_bytes(chance: random.Random) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=chance.random() < 0.5)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    return made


def _with_fallback(chance: random.Random) -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopt"]
    pieces += ["ab", "cat", "at"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [("a", "b"), ("a", "t"), ("c", "at")]
    options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence(steps)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(parts)
    return made


def _of_letters(chance: random.Random) -> Tokenizer:
    unknown = chance.choice([None, "[UNK]"])
    letters = [*([unknown] if unknown else []), *"acehimnostu12"]
    vocab = {piece: number for number, piece in enumerate(letters)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=unknown))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def _of_words(chance: random.Random) -> Tokenizer:
    vocab = {word: number for number, word in enumerate(["[UNK]", *WORDS])}
    made = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    split = chance.choice([pre_tokenizers.Whitespace, pre_tokenizers.WhitespaceSplit])
    made.pre_tokenizer = split()
    return made


def _of_word_pieces(chance: random.Random) -> Tokenizer:
    pieces = ["[UNK]", *"theca", *(f"##{c}" for c in "theacason"), "cat"]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    return made


def _unigram(chance: random.Random) -> Tokenizer:
    pieces = [("<unk>", 0.0), *((c, -4.0) for c in "▁abcdefghijklmnopqrstu</s>|_")]
    pieces += [("cat", -2.0), ("▁the", -2.5)]
    made = Tokenizer(models.Unigram(list(dict(pieces).items()), unk_id=0))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return made


MODELS = {
    "bytes": _of_bytes,
    "fallback": _with_fallback,
    "letters": _of_letters,
    "words": _of_words,
    "word pieces": _of_word_pieces,
    "unigram": _unigram,
}


def _template(token: str, token_id: int) -> dict[str, Any]:
    """BOS before a text, as Llama's files have it."""
    text = {"Sequence": {"id": "A", "type_id": 0}}
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    pair = [first, text, {"Sequence": {"id": "B", "type_id": 1}}]
    tokens = {token: {"id": token, "ids": [token_id], "tokens": [token]}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": pair,
        "special_tokens": tokens,
    }


def _move_ids(chance: random.Random, drawn: Drawn) -> list[str]:
    """Make holes in the vocabulary, if it can have some, and before added tokens."""
    words, model = [], drawn.raw["model"]
    if isinstance(model["vocab"], dict) and chance.random() < 0.5:
        pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
        start = chance.randrange(len(pieces))
        gap = chance.choice([1, 1, 3, 40])
        model["vocab"] = {p: i + gap * (i >= start) for i, p in enumerate(pieces)}
        words.append(f"{gap} holes in the vocabulary")
    shift = max(_pieces(model).values()) + 1 + chance.choice([0, 0, 1, 5, 300])
    for token in drawn.raw["added_tokens"]:
        token["id"] = _pieces(model).get(token["content"], shift)
        shift += (token["content"] not in _pieces(model)) * chance.choice([1, 1, 2, 7])
    chance.shuffle(drawn.raw["added_tokens"])
    drawn.ids = _pieces(model) | {t["content"]: t["id"] for t in drawn.raw["added_tokens"]}
    return [*words, "moved ids"]


def _pieces(model: dict[str, Any]) -> dict[str, int]:
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        return dict(vocab)
    return {piece: number for number, (piece, _) in enumerate(vocab)}


def _clash(chance: random.Random, what: str, drawn: Drawn) -> None:
    added, pieces = drawn.raw["added_tokens"], _pieces(drawn.raw["model"])
    token = chance.choice(added)
    match what:
        case "two tokens with one id":
            added.append({**token, "content": "<|another|>"})
        case "one token with two ids":
            piece = chance.choice(sorted(pieces))
            added.append({**token, "content": piece, "id": max(drawn.ids.values()) + 3})
        case _:
            others = [i for piece, i in pieces.items() if piece != token["content"]]
            token["id"] = chance.choice(others)


def texts(chance: random.Random) -> list[str]:
    """Texts of known words, of others, and with what looks like special tokens."""
    some = [" ".join(chance.choices(WORDS, k=chance.randint(1, 9))) for _ in range(12)]
    return [*some, "Ünd ÉÀ ñ ﬁ", "汉字 😀", "zzz    cat <tool_call>", "  \n\t the"]


def judge(drawn: Drawn, folder: Path, chance: random.Random) -> tuple[str, str]:
    """Return what became of the file, and what is wrong with that; "": nothing."""
    (folder / "tokenizer.json").write_text(json.dumps(drawn.raw), "utf-8")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    try:
        ours = build_tokenizer(str(folder))
    except ConfigError as error:
        cause = str(error).partition("\n")[0]
        is_right = bool(drawn.cause) and drawn.cause in str(error) and "fix: " in str(error)
        return f"rejected: {cause[-70:]}", "" if is_right else f"should be read: {error}"
    if drawn.cause:
        return "read", f"should be rejected: {drawn.cause}"
    if ours.before != [drawn.ids[token] for token in drawn.before]:
        return "read", f"begins documents with {ours.before}, and not {drawn.before}"
    for text in texts(chance):
        dense = drawn.dense.encode(text, add_special_tokens=False).ids
        want = [drawn.ids[str(drawn.dense.id_to_token(i))] for i in dense]
        for _ in range(3):
            if (got := ours.encode(text)) != want:
                return "read", f"gives {got} for {text!r}, and the file {want}"
    for token, token_id in ours.special_ids.items():
        if token_id != drawn.ids.get(token, token_id):  # of a hole
            return "read", f"{token!r} is {token_id}, and {drawn.ids[token]} in the file"
        try:
            ids = ours.encode(f"cat {token} cat{token}")
        except RecordError:
            continue
        if token_id in ids:
            return "read", f"the text {token!r} becomes a special token"
    return "read", _exported(ours, folder)


def _exported(ours: Any, folder: Path) -> str:
    """What is wrong with the tokenizer in an exported folder, as transformers reads it."""
    out = folder / "out"
    out.mkdir()
    (out / "config.json").write_text((folder / "config.json").read_text())
    for name, content in tokenizer_files(ours, str(folder), seq_len=64).items():
        text = content if isinstance(content, str) else content.read_text("utf-8")
        (out / name).write_text(text, "utf-8")
    try:
        prove_tokenizer(ours, NamedPath("OUT", out), text_ends(ours), lambda line: None)
    except ConfigError as error:
        return f"the export: {error}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int)
    given = parser.parse_args()
    numbers = range(given.count) if given.only is None else [given.only]
    found, began = Counter[str](), time.monotonic()
    for number in numbers:
        drawn = draw(given.seed, number)
        with tempfile.TemporaryDirectory() as folder:
            chance = random.Random(f"texts {given.seed} {number}")
            result, wrong = judge(drawn, Path(folder), chance)
        print(f"{number:3} {drawn.what}: {result}{f'  WRONG: {wrong}' if wrong else ''}")
        found["wrong" if wrong else re.split(r"\W", result)[0]] += 1
    counts = ", ".join(f"{found[name]} {name}" for name in ("read", "rejected", "wrong"))
    print(f"{len(numbers)} files, seed {given.seed}: {counts}, in {time.monotonic() - began:.0f} s")
    return found["wrong"] > 0


if __name__ == "__main__":
    sys.exit(main())
