"""Print how the project's English compares with the field's: rates per 1,000 words and old terms.

python -m scripts.count_words

The targets come from seven other projects' README and docs (torchtitan, LitGPT, nanochat,
KempnerForge, OLMo-core, accelerate, uv). `tests/unit/test_words.py` holds them.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
GENERATED = {"config_reference.md", "commands.md"}
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
SENTENCE_END = re.compile(r"(?<=[.!?:])\s+")

TARGETS = {
    "contractions": (
        r"\w(?:n't|'re|'ll|'ve)\b|\b(?:it|that|there|what|here|let)'s\b",
        (1.5, 5.0),
    ),
    "you, your": (r"\byou(?:r|rs|'re|'ll|'ve)?\b", (8.0, None)),
    "should": (r"\bshould\b", (0.5, None)),
    "another": (r"\banother\b", (None, 0.6)),
    "names (verb)": (
        r"\b(?:it|that|which|and|error|message|log|line|file|table|key|config|TOML|x) names\b",
        (None, 0.3),
    ),
    ", too": (r", too\b", (None, 0.3)),
    "begin": (r"\bbeg(?:in|ins|an|un|inning)\b", (None, 0.3)),
    "of its own, of yours": (
        r"\bof (?:(?:its|your|our|their|his) own|yours|ours|theirs)\b",
        (None, 0.0),
    ),
    "is refused": (r"\b(?:is|are|be|was|were) refused\b", (None, 0.1)),
    "alone": (r"\balone\b", (None, 0.2)),
    "beside": (r"\bbeside\b", (None, 0.0)),
}
"""Pattern, and least and most occurrences in 1,000 words of the pages."""

MOST_IN_CODE = {"another": 1.5, "names (verb)": 0.6, "of its own, of yours": 0.3, "beside": 0.1}
"""Most in 1,000 words of docstrings, comments and messages, where it isn't the most of the pages:
"another rank" and "the key that names it" say there what no other word does."""

MOST_SHORT_SENTENCES = 0.30
"""Of the pages: the share of sentences with at most 8 words."""

TERMS = {
    r"\brefus(?:es?|ed|al)\b": "rejected, not supported, raises an error",
    r"\bwhole (?:logits|batch|tensors?|gradients)\b": "full, unsharded",
    r"\bbad steps?\b": "skipped step, non-finite step, loss spike",
    r"\bpassed over\b": "skipped",
    r"\bcomplete or absent\b": "atomic",
    r"\bwithout memory\b": "fake tensors, meta tensors",
    r"(?<!<)\bfigures?\b": "metric, number, result",
    r"\btexts\b": "text data, corpus",
    r"\baveraged weights\b|\brunning means?\b": "EMA, weight averaging",
    r"\bfolders? of Hugging Face\b": "Hugging Face checkpoint or model directory",
    r"\bfirst weights\b": "initialize from",
    r"\b(?:dataset|data) of the hub\b": "Hub dataset",
    r"\blikeliest\b": "greedy decoding, most likely",
    r"\binner width\b|\bfeed-forwards\b": "FFN size, MLP",
    r"\bnorms of queries and keys\b": "QK-norm",
    r"\bloads of experts\b": "expert load, tokens per expert",
    r"\bplanted\b": "injected",
    r"\b(?:is|are|be|was|were|not|never) cut\b(?! short)": "sharded, split, truncated",
    r"\bcut (?:in|into|along)\b": "sharded over, split into",
    r"\bcopies \(HSDP\)": "replicas",
    r"\bfloors\b|\bthe house\b": "layers, package layout",
    r"\btokenis|\bcolour|\bneighbour|\bmodell|\blicence|\brecognis": "American spelling",
}
"""Terms that nobody in the field uses, with what to write."""


def pages() -> list[Path]:
    """README.md and the pages of docs/ that people write."""
    return [
        ROOT / "README.md",
        *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in GENERATED),
    ]


def prose_of_page(page: Path) -> str:
    """The sentences of a page: no code, tables, pictures or comments."""
    text = FENCE.sub("", page.read_text("utf-8"))
    lines = (line for line in text.splitlines() if not line.lstrip().startswith(("|", "<", "![")))
    return re.sub(r"`[^`]*`", "x", "\n".join(lines))


def strings_of_module(file: Path) -> Iterator[str]:
    """Docstrings, comments, and string constants of several words: errors, log lines, help."""
    text = file.read_text("utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")


def prose_of_module(file: Path) -> str:
    """All of them, without code between backquotes."""
    return re.sub(r"`[^`]*`", "x", "\n\n".join(strings_of_module(file)))


def comments_of_toml(file: Path) -> str:
    """The comments of a preset."""
    return "\n".join(re.findall(r"#\s?(.*)", file.read_text("utf-8")))


def corpora() -> dict[str, dict[Path, str]]:
    """Prose by kind and file."""
    code, presets = ROOT / "meshwright", ROOT / "train_configs"
    return {
        "pages": {page: prose_of_page(page) for page in pages()},
        "code": {file: prose_of_module(file) for file in sorted(code.rglob("*.py"))},
        "presets": {file: comments_of_toml(file) for file in sorted(presets.glob("*.toml"))},
    }


def rate(pattern: str, text: str) -> float:
    """Occurrences per 1,000 words."""
    return 1000 * len(re.findall(pattern, text, re.IGNORECASE)) / len(text.split())


def share_of_short_sentences(text: str) -> float:
    """The share of sentences with 2 to 8 words among those with 2 or more."""
    plain = re.sub(r"[#*>-]\s", "", text)
    lengths = [len(part.split()) for part in SENTENCE_END.split(plain)]
    sentences = [length for length in lengths if length > 1]
    return sum(length <= 8 for length in sentences) / len(sentences)


def main() -> None:
    """Print the table of rates, the share of short sentences, and where old terms are."""
    texts = corpora()
    joined = {kind: "\n".join(files.values()) for kind, files in texts.items()}
    print(f"{'per 1,000 words':22}" + "".join(f"{kind:>9}" for kind in joined) + "  of pages")
    print(f"{'words':22}" + "".join(f"{len(text.split()):9,}" for text in joined.values()))
    for name, (pattern, (least, most)) in TARGETS.items():
        rates = "".join(f"{rate(pattern, text):9.2f}" for text in joined.values())
        print(f"{name:22}{rates}  {least if least is not None else 0} to {most or least or 0}")
    shares = "".join(f"{share_of_short_sentences(text):9.1%}" for text in joined.values())
    print(f"{'sentences <= 8 words':22}{shares}  at most {MOST_SHORT_SENTENCES:.0%}")
    for pattern, better in TERMS.items():
        for files in texts.values():
            for file, text in files.items():
                for found in re.findall(pattern, text, re.IGNORECASE):
                    print(f"{file.relative_to(ROOT)}: {found!r}: {better}")


if __name__ == "__main__":
    main()
