"""Tries a tokenizer of the user's module on a little text before a job starts: what ours are held
to by tests."""

from collections.abc import Iterator

from meshwright.datasets.tokenizers.kinds import Tokenizer
from meshwright.datasets.tokenizers.special_tokens import NAME_KEY
from meshwright.system.errors import PASSED_ON, ConfigError, RecordError, config_error
from meshwright.system.modules import describe_error, file_of

SAMPLES = ("Once upon a time", " two  spaces\n\tand a tab", "naïve café, 東京, 🙂", "x = 1\r\n")


def check_contract(tokenizer: Tokenizer, name: str) -> None:
    """Raise `ConfigError` for the first thing in which a tokenizer isn't as `Tokenizer` says.

    Args:
        name: in the table of the module.
    """
    try:
        broken = next(_broken(tokenizer), "")
    except (ConfigError, *PASSED_ON):
        raise
    except BaseException as error:  # whatever the user's code raises
        broken = f"raises {describe_error(error, file_of(type(tokenizer)))}"
    if broken:
        fix = "correct it; docs/extending.md has an example"
        raise config_error(NAME_KEY, name, f"its tokenizer {broken}", fix)


def _broken(tokenizer: Tokenizer) -> Iterator[str]:
    size, special_ids = tokenizer.vocab_size, set(tokenizer.special_ids.values())
    ends = {*tokenizer.before, *tokenizer.after}
    if not all(token_id in range(size) for token_id in special_ids | ends):
        yield f"has a special token outside its vocabulary of {size}"
    if ends - special_ids:
        yield f"puts {min(ends - special_ids)} around documents, which `special_ids` hasn't"
    if not (isinstance(tokenizer.fingerprint, str) and tokenizer.fingerprint):
        yield "has no text as `fingerprint`"
    if tokenizer.token_bytes is not None and len(tokenizer.token_bytes) != size:
        yield f"has {len(tokenizer.token_bytes)} `token_bytes` for a vocabulary of {size}"
    for text in (*SAMPLES, *(f"a {token} in text" for token in tokenizer.special_ids)):
        try:
            ids = tokenizer.encode(text)
        except RecordError:  # it has no tokens for it, and says so
            continue
        if not (isinstance(ids, list) and all(type(token_id) is int for token_id in ids)):
            yield f"encodes {text!r} as {ids!r:.60}, and no list of int"
        if not all(token_id in range(size) for token_id in ids):
            yield f"encodes {text!r} as {ids!r:.60}, with an id outside its vocabulary of {size}"
        if ids != tokenizer.encode(text):
            yield f"encodes {text!r} otherwise the second time"
        if named := ends.intersection(ids):
            yield f"makes the special token {min(named)} of the text {text!r}"
        if not isinstance(tokenizer.decode(ids), str):
            yield f"decodes {ids!r:.60} as no text"
        lost = tokenizer.count_lost(text)
        if not (isinstance(lost, tuple) and [*map(type, lost)] == [int, int]):
            yield f"gives {lost!r:.60} as `count_lost` of {text!r}, and no two numbers"
