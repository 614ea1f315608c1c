"""Where a document of a token cache comes from: its file and row."""

import numpy as np
import numpy.typing as npt

from meshwright.datasets.encoding import NO_LOSS
from meshwright.datasets.foreign_tokens import TokenFiles
from meshwright.datasets.recipe import TokenizationSpec
from meshwright.datasets.token_cache.cache import CachedDocument, TokenCache
from meshwright.datasets.token_cache.writing import open_source
from meshwright.datasets.token_parts import load_index
from meshwright.system.errors import RecordError


def document_tokens(cache: TokenCache, document: CachedDocument) -> npt.NDArray[np.int64]:
    raw = cache.tokens(document.begin, document.end)
    return raw.astype(np.int64) & ~NO_LOSS


def locate(recipe: TokenizationSpec, cache: TokenCache, document: CachedDocument) -> str:
    """Return the place of a document in words, such as "a.jsonl, line 138": the part of the data
    that it was tokenized from is read again.

    Raises:
        ConfigError: if the data can't be read, or isn't what it was.
    """
    part, before = cache.place_of(document)
    documents, encoder = open_source(recipe)
    if isinstance(documents, TokenFiles):
        return f"{part.tokens}, document {before}"
    may_be_bad = load_index(part).num_bad > 0
    for place, item in documents.placed(part.number):
        if isinstance(item, RecordError) or not item:
            continue
        try:
            is_here = before == 0
            tokens = encoder.encode(item) if is_here or may_be_bad else None
        except RecordError:  # it was skipped
            continue
        if is_here and tokens is not None:
            if np.array_equal(tokens.astype(np.int64) & ~NO_LOSS, document_tokens(cache, document)):
                return place
            break
        before -= 1
    rule = "its documents are not what they were when they were tokenized"
    raise recipe.entry.error("dataset", rule, "restore the data")
