"""The project's English: the reader is spoken to, sentences are plain, examples come often."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import count_words

ROOT = Path(__file__).parents[2]
PAGES = [page for page in count_words.pages() if page.parent.name == "docs"]
CODE_BLOCK = re.compile(r"^```.*?^```\n?", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"^\|.*\n?", re.MULTILINE)
SENTENCE_ENDS = r"(?<=[.!?:])\s+|\n\n|\n\* |\n\d\. "
STAND_INS = r"\b(?:all that|those (?:that|of|which|who)|that of)\b"
IRREGULAR = r"\w+ed|\w+en|built|made|cut|kept|held|sent|read|found|put|set|told|lost|left"
PASSIVE = re.compile(rf"\b(?:is|are|was|were|be|been|being)\s+(?:not\s+)?(?:{IRREGULAR})\b")


def prose_of(file: Path) -> Iterator[str]:
    """Docstrings and comments of a module; the whole of another file."""
    text = file.read_text("utf-8")
    if file.suffix != ".py":
        yield text
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def messages_of(file: Path) -> Iterator[str]:
    """Strings of several words that are no docstrings: errors, lines of the log, help."""
    tree = ast.parse(file.read_text("utf-8"))
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in alone and " " in str(node.value):
            yield str(node.value)


@pytest.mark.parametrize(
    ("pattern", "prose_of"),
    [
        ("meshwright/**/*.py", prose_of),
        ("meshwright/**/*.py", messages_of),
        ("docs/**/*.md", prose_of),
        ("*.md", prose_of),
    ],
)
def test_stand_ins_for_nouns_are_rare(pattern: str, prose_of) -> None:
    """At most one in a thousand words, of "what" two."""
    prose = {file: " ".join(prose_of(file)) for file in ROOT.glob(pattern)}
    count = sum(len(text.split()) for text in prose.values())
    for words, most in ((r"\bwhat\b", 2), (STAND_INS, 1)):
        hits = {f: len(re.findall(words, text, re.IGNORECASE)) for f, text in prose.items()}
        assert 1000 * sum(hits.values()) <= most * count, {f: n for f, n in hits.items() if n}


def plain(text: str) -> str:
    """Sentences alone: no code, tables, headings, links' targets."""
    text = TABLE.sub("", CODE_BLOCK.sub("", text))
    text = re.sub(r"^(#|<!--).*\n|\]\([^)]*\)|`[^`]*`", "", text, flags=re.MULTILINE)
    return re.sub(r"https?:\S+", "", text)


CORPORA = count_words.corpora()


@pytest.mark.parametrize("target", count_words.TARGETS)
def test_words_are_as_frequent_as_in_the_docs_of_others(target: str) -> None:
    pattern, (least, most) = count_words.TARGETS[target]
    rates = {
        kind: count_words.rate(pattern, "\n".join(files.values()))
        for kind, files in CORPORA.items()
    }
    assert least is None or rates["pages"] >= least
    assert most is None or rates["pages"] <= most
    if least is None:  # help, errors and docstrings needn't say "you"
        in_code = count_words.MOST_IN_CODE.get(target, most)
        assert rates["code"] <= in_code
        assert rates["presets"] <= in_code


def test_sentences_are_joined() -> None:
    text = "\n".join(CORPORA["pages"].values())
    assert count_words.share_of_short_sentences(text) <= count_words.MOST_SHORT_SENTENCES


@pytest.mark.parametrize("term", count_words.TERMS)
def test_old_terms_are_gone(term: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}: {match[0]}"
        for files in CORPORA.values()
        for file, text in files.items()
        for match in re.finditer(term, text, re.IGNORECASE)
    ]
    assert not found, f"write: {count_words.TERMS[term]}"


def test_pages_speak_plainly_to_the_reader() -> None:
    """Targets measured at five other frameworks' docs."""
    texts = [page.read_text("utf-8") for page in PAGES]
    prose = "\n\n".join(map(plain, texts))
    words = len(prose.split())
    sentences = [part for part in re.split(SENTENCE_ENDS, prose) if part.split()]

    def share(pattern: str) -> float:
        return sum(bool(re.search(pattern, sentence)) for sentence in sentences) / len(sentences)

    def per_1000(pattern: str) -> float:
        return 1000 * len(re.findall(pattern, prose, re.IGNORECASE)) / words

    blocks = 1000 * sum(len(CODE_BLOCK.findall(text)) for text in texts) / words
    rows = (row for text in texts for row in TABLE.findall(text))
    in_tables = sum(len(re.findall(r"\S*\w\S*", row)) for row in rows)
    assert per_1000("for example") >= 0.8
    assert per_1000(STAND_INS) <= 0.15
    assert blocks >= 5
    assert share("[;:]") <= 0.30
    assert len(PASSIVE.findall(prose)) / len(sentences) <= 0.18
    assert in_tables / (words + in_tables) <= 0.20
    assert words + in_tables <= 26_500
    assert sum(len(s.split()) > 30 for s in sentences) / len(sentences) <= 0.02


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_says_what_it_is_about_and_shows_an_example(page: Path) -> None:
    text = page.read_text("utf-8")
    first = text.split("\n\n")[1]
    assert re.match(r"[\w`*]", first)
    assert not first.startswith("Read this")
    assert "```" in "".join(text.splitlines(keepends=True)[:30])
    assert not re.search(r"^Next: ", text, re.MULTILINE)  # the site's footer has it


def test_the_readme_is_read_in_minutes() -> None:
    """Words of sentences, tables and code together."""
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(re.findall(r"\S*\w\S*", text)) <= 1000


def test_a_release_is_told_in_300_words() -> None:
    _, *releases = (ROOT / "CHANGELOG.md").read_text("utf-8").split("\n## ")
    assert all(len(release.split()) <= 300 for release in releases)
