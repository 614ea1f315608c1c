"""Reads a `tokenizer.json` as the file itself says.

The `tokenizers` library numbers added tokens one after the other, whatever ids the file gives them,
and keeps the file's BPE dropout. Here a token has the id that the file gives it, and the same text
always gives the same tokens; otherwise the file is rejected.
"""

import json
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import tokenizers

from meshwright.system.errors import first_line

MAX_UNUSED_IDS = 1_000_000
"""Most ids without a token in a file. More of them is a typo, and would fill the memory."""

PROBES = 8
"""Times that a text is encoded to find a tokenizer that draws random numbers."""


def parse(content: bytes) -> dict[str, Any]:
    """Return the JSON of a file of the `tokenizers` library.

    Raises:
        ValueError: if the file isn't one.
    """
    try:
        raw = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it isn't JSON: {first_line(error)}") from None
    if isinstance(raw, dict) and isinstance(raw.get("model"), dict) and "vocab" in raw["model"]:
        return raw
    keys = ", ".join(map(repr, list(raw)[:4])) if isinstance(raw, dict) else ""
    holds = f"an object of {keys or 'nothing'}" if isinstance(raw, dict) else type(raw).__name__
    raise ValueError(
        f"it's JSON of a different library: it holds {holds}, and no model with a vocab"
        "\n  fix: name a tokenizer.json that Hugging Face's tokenizers library has saved"
    )


class JsonFile(NamedTuple):
    """A `tokenizer.json` that is read."""

    tokenizer: tokenizers.Tokenizer
    raw: dict[str, Any]
    """Its JSON, as it is read here."""
    made: str | None
    """The same as text, where it isn't the file's."""


def load(content: bytes) -> JsonFile:
    """Read a file.

    Documents are split by the packing only, so truncation and padding are dropped, and so is
    dropout, which gives other tokens at each call. Ids that have no token get placeholders, since
    the library would give those ids to the added tokens that follow.

    Raises:
        ValueError: if it isn't a file of the library, a token can't have the id that the file gives
            it, or encoding is random.
    """
    raw = parse(content)
    read = {**raw, "truncation": None, "padding": None}
    if raw["model"].get("dropout"):
        read["model"] = {**raw["model"], "dropout": None}
    _check_ids(read)
    tokenizer = _build(read)
    if _misread(tokenizer, read):
        read = _without_holes(read)
        tokenizer = _build(read)
        if (token := _misread(tokenizer, read)) is not None:
            found = tokenizer.token_to_id(token["content"])
            raise ValueError(f"gives {token['content']!r} the id {token['id']}, but it's {found}")
    _check_repeats(tokenizer, pieces_of(read))
    return JsonFile(tokenizer, read, None if read == raw else json.dumps(read, ensure_ascii=False))


def _build(raw: dict[str, Any]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(raw, ensure_ascii=False))


def pieces_of(raw: dict[str, Any]) -> dict[str, int]:
    """Return the ids of the model's own pieces, without added tokens."""
    vocab = raw["model"]["vocab"]
    if isinstance(vocab, dict):
        return vocab
    return {piece: number for number, (piece, _) in enumerate(vocab)}  # Unigram's, with scores


def _check_ids(raw: dict[str, Any]) -> None:
    """Raise `ValueError` if an added token and another have one id, or one token two."""
    pieces, names = pieces_of(raw), dict[int, str]()
    by_id = {token_id: piece for piece, token_id in pieces.items()}
    for token in raw.get("added_tokens") or []:
        name, token_id = token["content"], token["id"]
        if not isinstance(token_id, int):
            raise ValueError(f"gives {name!r} the id {token_id!r}, which isn't a whole number")
        other = names.setdefault(token_id, name)
        rival = by_id.get(token_id, other) if other == name else other
        if rival != name:
            raise ValueError(
                f"gives the id {token_id} to two tokens, {rival!r} and the added {name!r}"
                "\n  fix: correct the id in added_tokens, or take the tokenizer.json of the source"
            )
        if pieces.get(name, token_id) != token_id:
            raise ValueError(
                f"gives {name!r} two ids, {pieces[name]} in the vocabulary and {token_id} in "
                "added_tokens\n  fix: correct one, or take the tokenizer.json of the source"
            )
    last, count = max([*names, *by_id], default=0), len({*names, *by_id})
    if last - count > MAX_UNUSED_IDS:
        raise ValueError(f"has {count:,} tokens, and ids up to {last:,}: one of them is a typo")


def _misread(tokenizer: tokenizers.Tokenizer, raw: dict[str, Any]) -> dict[str, Any] | None:
    """Return the first added token to which the library gives a different id than the file."""
    added: list[dict[str, Any]] = raw.get("added_tokens") or []
    wrong = (token for token in added if tokenizer.token_to_id(token["content"]) != token["id"])
    return next(wrong, None)


def _without_holes(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON with a token for each id, so that the library's numbers are the file's."""
    pieces, added = pieces_of(raw), {token["id"]: token for token in raw["added_tokens"]}
    taken, size = set(pieces.values()), max(pieces.values(), default=-1) + 1
    model, names = raw["model"], {*pieces, *(token["content"] for token in added.values())}
    if isinstance(model["vocab"], dict):  # Unigram's is a list, which has no holes
        free = [number for number in range(size) if number not in taken]
        named = {number: added.get(number) or _placeholder(number, names) for number in free}
        inside = {token["content"]: number for number, token in named.items()}
        model = {**model, "vocab": {**model["vocab"], **inside}}
    tail = range(size, max(added) + 1)
    filled = added | {i: _placeholder(i, names) for i in tail if i not in added}
    return {**raw, "model": model, "added_tokens": [filled[i] for i in sorted(filled)]}


def _placeholder(number: int, names: set[str]) -> dict[str, Any]:
    """Return an added token that no text has; it's special, so it's never found in text."""
    name = f"<|unused_{number}|>"
    while name in names:
        name = f"<{name}>"
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": name, **flags, "special": True}


def without_pieces(raw: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the JSON with other strings for the pieces `names` of the model, which no text has."""
    model, pieces = raw["model"], pieces_of(raw)
    all_names = {*pieces, *(token["content"] for token in raw["added_tokens"])}
    renamed = {name: _placeholder(pieces[name], all_names)["content"] for name in names}
    if isinstance(model["vocab"], dict):
        vocab: Any = {renamed.get(piece, piece): number for piece, number in pieces.items()}
    else:
        vocab = [[renamed.get(piece, piece), score] for piece, score in model["vocab"]]
    model = {**model, "vocab": vocab}
    if "merges" in model:
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & {*names}]
    added = [token for token in raw["added_tokens"] if token["content"] not in renamed]
    return {**raw, "model": model, "added_tokens": added}


def _check_repeats(tokenizer: tokenizers.Tokenizer, pieces: Iterable[str]) -> None:
    """Raise `ValueError` if a text of the vocabulary's pieces isn't encoded alike each time."""
    text = " ".join(sorted(pieces, key=len, reverse=True)[:64])
    try:
        encoded = [tokenizer.encode(text, add_special_tokens=False).ids for _ in range(PROBES)]
    except Exception:  # a word without a piece: documents with one are bad records
        return
    if any(ids != encoded[0] for ids in encoded):
        raise ValueError("encodes the same text differently each time\n  fix: turn sampling off")


def around_document(raw: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return the ids that the file's post-processor puts before and after a single text."""
    return _around(raw.get("post_processor"))


def _around(step: Any) -> tuple[list[int], list[int]]:
    kind = step["type"] if isinstance(step, dict) else None
    if kind == "Sequence":  # each wraps the result of the one before
        before, after = list[int](), list[int]()
        for inner in step["processors"]:
            first, last = _around(inner)
            before, after = first + before, after + last
        return before, after
    if kind in ("BertProcessing", "RobertaProcessing"):
        return [step["cls"][1]], [step["sep"][1]]
    if kind == "TemplateProcessing":
        return _of_template(step)
    return [], []


def _of_template(step: dict[str, Any]) -> tuple[list[int], list[int]]:
    parts, tokens = step["single"], step["special_tokens"]
    texts = [number for number, part in enumerate(parts) if "Sequence" in part]
    if len(texts) != 1:
        raise ValueError("its post-processor's template has no place for the text, or several")
    before = [token_id for part in parts[: texts[0]] for token_id in _ids_of(part, tokens)]
    after = [token_id for part in parts[texts[0] + 1 :] for token_id in _ids_of(part, tokens)]
    return before, after


def _ids_of(part: dict[str, Any], tokens: dict[str, Any]) -> list[int]:
    ids: list[int] = tokens[part["SpecialToken"]["id"]]["ids"]
    return ids
