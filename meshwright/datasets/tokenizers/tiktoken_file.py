"""A `tokenizer.model` of tiktoken, as Meta has it since 2024."""

import hashlib
import re
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import tiktoken

from meshwright.datasets.tokenizers.special_tokens import any_of, split_at_specials
from meshwright.datasets.tokenizers.tiktoken_ranks import read_ranks

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Of Meta's files: no token reaches over the end of a match."""


NUM_SPECIALS = 256


NAMED_SPECIALS = (  # Meta's of July 2024; in April some were reserved still, under the same ids
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)


MAX_RUN = 999_000
"""Characters of white space that tiktoken gets in one run. Its regular expressions give up (a
panic, which is no Exception) on more than a million, the limit of fancy_regex; seen in 0.14."""


_SPACES = (
    r"[\t\v\f \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"  # of Rust's \s, those
)


# that are no line ends: runs that end in one are matched by \s*[\r\n]+, which reads any length
_LONG_RUN = re.compile(rf"(?<!{_SPACES}){_SPACES}{{{MAX_RUN + 1},}}+(?![\r\n])")


class TiktokenTokenizer:
    """A byte-level BPE from a file of ranks, with Meta's split pattern and special tokens."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        self.fingerprint = hashlib.sha256(content).hexdigest()[:16]
        self.ranks = ranks = read_ranks(content)
        self.special_ids = {token: len(ranks) + i for i, token in enumerate(special_tokens())}
        self._encoding = tiktoken.Encoding(
            path.name,
            pat_str=SPLIT_PATTERN,
            mergeable_ranks=ranks,
            special_tokens=self.special_ids,
        )
        self._sizes = [len(token) for token in sorted(ranks, key=ranks.__getitem__)]
        self._specials = any_of(self.special_ids)
        self.vocab_size = len(ranks) + len(self.special_ids)
        self.special_names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
        self.bos_id: int | None = self.special_ids["<|begin_of_text|>"]
        self.eos_id: int | None = self.special_ids["<|end_of_text|>"]

    @cached_property
    def token_bytes(self) -> list[int]:
        return self._sizes + [0] * len(self.special_ids)

    def encode(self, text: str) -> list[int]:
        if len(text) <= MAX_RUN:
            return self._encoding.encode_ordinary(text)
        return [i for part in cut_long_runs(text) for i in self._encoding.encode_ordinary(part)]

    def decode(self, ids: list[int]) -> str:
        return self._encoding.decode([i for i in ids if i < self.vocab_size])

    def encode_chat(self, text: str, breaks: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for start, end, is_special in split_at_specials(text, self._specials, breaks):
            if is_special:
                ids.append(self.special_ids[text[start:end]])
                spans.append((start, end))
            else:
                part = self.encode(text[start:end])
                ids += part
                spans += self._spans(text[start:end], part, start)
        return ids, spans

    def _spans(self, text: str, ids: list[int], offset: int) -> Iterator[tuple[int, int]]:
        """Characters of which `ids`, the tokens of `text`, hold at least a byte."""
        character = [i for i, c in enumerate(text, offset) for _ in c.encode("utf-8")]
        ends = list(accumulate(self._sizes[i] for i in ids))
        for start, end in zip([0, *ends], ends, strict=False):
            yield character[start], character[end - 1] + 1


def special_tokens() -> list[str]:
    """In the order of their ids."""
    reserved = NUM_SPECIALS - len(NAMED_SPECIALS)  # 0, 1 and 2 are among the named
    return [*NAMED_SPECIALS, *(f"<|reserved_special_token_{3 + i}|>" for i in range(reserved))]


def cut_long_runs(text: str) -> Iterator[str]:
    """`text` in parts that tiktoken can read; uncut unless it could not."""
    done = 0
    for run in _LONG_RUN.finditer(text):
        for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
            yield text[done:cut]
            done = cut
    yield text[done:]
