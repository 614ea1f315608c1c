"""A tokenizer as a `tokenizer.json`, which transformers, vLLM and llama.cpp read as it stands.

From a bare `tokenizer.model` they make one of their own: of a sentencepiece model with other ids
(transformers 5 takes it for a kind of its own; as its older class it drops a space at the start),
of a tiktoken file none at all.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from meshwright.datasets.tokenizers.huggingface import HuggingFaceTokenizer
from meshwright.datasets.tokenizers.kinds import ByteTokenizer, Tokenizer
from meshwright.datasets.tokenizers.sentencepiece_file import SPACE, SentencePieceTokenizer
from meshwright.datasets.tokenizers.tiktoken_file import SPLIT_PATTERN, TiktokenTokenizer

BOS, EOS = "<s>", "</s>"
"""Of the byte tokenizer."""


def to_tokenizer_json(tokenizer: Tokenizer) -> str | None:
    """Return the content of a tokenizer.json that gives the same ids; None if it is one already.

    Raises:
        ValueError: if there is no such file.
    """
    match tokenizer:
        case HuggingFaceTokenizer():
            return None
        case ByteTokenizer():
            made = _of_ranks({bytes([byte]): byte for byte in range(256)}, None)
        case TiktokenTokenizer():
            made = _of_ranks(tokenizer.ranks, SPLIT_PATTERN)
        case SentencePieceTokenizer():
            made = _of_pieces(tokenizer)
        case _:
            raise ValueError(f"a {type(tokenizer).__name__} is not known to be one")
    specials = _specials(tokenizer)
    in_order = [name for _, name in sorted(specials.items())]
    made.add_special_tokens([AddedToken(name, normalized=False) for name in in_order])
    for token_id, name in specials.items():
        if made.token_to_id(name) != token_id:
            raise ValueError(f"{name!r} would have the id {made.token_to_id(name)}, not {token_id}")
    if tokenizer.bos_id is not None:
        bos = specials[tokenizer.bos_id]
        made.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"],
            pair=[bos, "$A", bos, "$B"],
            special_tokens=[(bos, tokenizer.bos_id)],
        )
    return made.to_str(pretty=True)


def special_names(tokenizer: Tokenizer) -> dict[str, str]:
    """Return bos_token, eos_token and unk_token, as tokenizer_config.json wants them."""
    match tokenizer:
        case ByteTokenizer():
            return {"bos_token": BOS, "eos_token": EOS}
        case SentencePieceTokenizer():
            ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
            ids["unk_token"] = tokenizer.unknown_id
            pieces = tokenizer.special_pieces
            return {name: pieces[i] for name, i in ids.items() if i is not None and i in pieces}
        case TiktokenTokenizer() | HuggingFaceTokenizer():
            return dict(tokenizer.special_names)
    raise ValueError(f"a {type(tokenizer).__name__} is not known")


def _of_ranks(ranks: dict[bytes, int], split_pattern: str | None) -> tokenizers.Tokenizer:
    """Return a byte-level BPE. With a pattern, no token reaches over the end of a match."""
    names = _byte_names()
    named = {"".join(names[byte] for byte in token): rank for token, rank in ranks.items()}
    in_order = sorted(named, key=named.__getitem__)
    merges = _merges(in_order, named)
    made = tokenizers.Tokenizer(models.BPE(vocab=named, merges=merges, ignore_merges=True))
    steps: list[Any] = []
    if split_pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split_pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    return made


def _merges(pieces: Iterable[str], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Return every pair of pieces that makes a piece, in the order in which pieces are
    preferred."""
    merges = []
    for piece in pieces:
        splits = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        pairs = [pair for pair in splits if pair[0] in ids and pair[1] in ids]
        merges += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def _byte_names() -> list[str]:
    """Return the character that stands for each byte in a byte-level vocabulary: GPT-2's table."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _of_pieces(tokenizer: SentencePieceTokenizer) -> tokenizers.Tokenizer:
    settings = tokenizer.settings
    pieces = tokenizer.pieces
    ids = {piece: number for number, (piece, _) in enumerate(pieces)}
    unknown = tokenizer.unknown_id
    if settings.is_unigram:
        never = min(score for _, score in pieces) - 1000.0  # sentencepiece has them out of its trie
        scored = [
            (piece, score if tokenizer.is_usual(number) else never)
            for number, (piece, score) in enumerate(pieces)
        ]
        made = tokenizers.Tokenizer(
            models.Unigram(scored, unk_id=unknown, byte_fallback=settings.has_byte_fallback)
        )
    else:
        order = sorted(range(len(pieces)), key=lambda number: (-pieces[number][1], number))
        usual = [pieces[number][0] for number in order if tokenizer.is_usual(number)]
        made = tokenizers.Tokenizer(
            models.BPE(
                vocab=ids,
                merges=_merges(usual, {piece: ids[piece] for piece in usual}),
                unk_token=None if unknown is None else pieces[unknown][0],
                fuse_unk=True,
                byte_fallback=settings.has_byte_fallback,
            )
        )
    steps: list[Any] = []
    if settings.charsmap:
        # it looks up the two characters of a line end as one; sentencepiece looks up each
        steps.append(normalizers.Replace("\r\n", "\n\n"))
        steps.append(normalizers.Precompiled(settings.charsmap))
    if settings.drops_extra_spaces:
        edges = normalizers.Replace(Regex(r"\A +| +\z"), "")
        steps += [edges, normalizers.Replace(Regex(" {2,}"), " ")]
    if settings.has_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    made.normalizer = normalizers.Sequence(steps)
    strip = [decoders.Strip(" ", 1, 0)] if settings.has_dummy_prefix else []
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return made


SAMPLES = (
    'def f(x):\n    """Grüße, 世界"""\n\treturn  x**2  # 1234567\n\n\nclass  A:\n        pass\n',
    "plain ASCII text, it's what we've got; they'LL see",
    "汉字和标点。没有空格",
    "😀👩‍👩‍👧‍👦🇩🇪 é é",
    " ",
    " begins with a space, ends with one ",
    "   \n\n\n \t\t\r\n  ",
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
    specials = _specials(tokenizer)
    step = max(1, tokenizer.vocab_size // MOST_IDS)
    ids = [i for i in range(0, tokenizer.vocab_size, step) if i not in specials]
    scattered = [ids[i * 7919 % len(ids)] for i in range(len(ids))]
    texts = [*SAMPLES]
    for order in (ids, scattered):
        texts += [tokenizer.decode(order[i : i + 64]) for i in range(0, len(order), 64)]
    for text in (text.replace("\N{REPLACEMENT CHARACTER}", "") for text in texts):
        if not any(name in text for name in specials.values()):
            yield text


def _specials(tokenizer: Tokenizer) -> dict[int, str]:
    """Special tokens, by id."""
    match tokenizer:
        case ByteTokenizer():
            return {256: BOS, 257: EOS}
        case SentencePieceTokenizer():
            return tokenizer.special_pieces
        case TiktokenTokenizer() | HuggingFaceTokenizer():
            return {token_id: name for name, token_id in tokenizer.special_ids.items()}
    raise ValueError(f"a {type(tokenizer).__name__} is not known")
