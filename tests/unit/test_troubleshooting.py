"""docs/troubleshooting.md quotes messages that exist, keys that exist, and leads somewhere."""

import re
from pathlib import Path

import pytest

from meshwright.config.job_config import JobConfig

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
CODE = "\n".join(path.read_text("utf-8") for path in (ROOT / "meshwright").rglob("*.py"))
ROWS = re.findall(r"^\| (`.*?) \|", TEXT, re.MULTILINE)
QUOTES = [quote for row in ROWS for quote in re.findall(r"`([^`]+)`", row)]
KEYS = set(re.findall(r"`([a-z_]+\.[a-z_]+)`", TEXT)) - {"metrics.jsonl", "skipped_steps.jsonl"}


@pytest.mark.parametrize("quote", QUOTES)
def test_the_console_says_so(quote: str) -> None:
    """Dots, and N for a number, stand for a part that varies."""
    parts = [part.strip() for part in re.split(r"\.\.\.|\bN\b", quote)]
    joined = re.sub(r'"\s*\n\s*f?"', "", CODE)  # strings over several lines
    for part in filter(None, parts):
        assert part in joined, part


def test_keys_and_sections_are_there() -> None:
    assert len(QUOTES) > 15
    assert len(KEYS) >= 5
    for key in KEYS:
        section, name = key.split(".")
        assert name in JobConfig.model_fields[section].annotation.model_fields, key
    for page, anchor in re.findall(r"\]\((\w+\.md)#([\w-]+)\)", TEXT):
        titles = re.findall(r"^#+ (.*)$", (ROOT / "docs" / page).read_text("utf-8"), re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
        assert anchor in slugs, (page, anchor)
