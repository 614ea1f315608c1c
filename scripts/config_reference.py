"""Print docs/config_reference.md, every key of the config.

python -m scripts.config_reference > docs/config_reference.md
"""

from collections.abc import Iterator

from meshwright.config.fields import Entry, entries, summary
from meshwright.config.job_config import JobConfig

HEAD = """# Every key of the config

Made from `meshwright/config/job_config.py` by `python -m scripts.config_reference`;
`meshwright config --help SECTION` prints the same. How a config
is put together: [configuration](configuration.md)."""


def page() -> Iterator[str]:
    """Lines of Markdown; a key that means the same in two sections is explained in the first."""
    yield HEAD
    explained = dict[Entry, str]()
    for section in JobConfig.model_fields:
        yield f"\n## {section}\n"
        yield summary(section).removeprefix(f"[{section}] ") + "\n"
        yield "| key | type | default | meaning |"
        yield "|---|---|---|---|"
        for entry in entries(section):
            if explained.setdefault(entry, section) != section:
                continue
            kind = entry.kind.replace("|", " | ")  # a long one breaks there
            cells = (f"`{entry.name}`", kind, f"`{entry.default}`", entry.text)
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
        for other in JobConfig.model_fields:
            same = [e.name for e in entries(section) if explained[e] == other != section]
            if same:
                yield f"\nAs in [{other}](#{other}): `{'`, `'.join(same)}`."


if __name__ == "__main__":
    print("\n".join(page()))
