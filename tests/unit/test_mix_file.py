"""A mixture from a file of weighted paths."""

from pathlib import Path

import pytest

from meshwright.config.loader import load_config
from meshwright.datasets.named_sources import entries
from meshwright.system.errors import ConfigError


def mixed(folder: Path, text: str, *words: str) -> list[tuple[str, str, float]]:
    (folder / "mix.txt").write_text(text)
    words = (f"--training.mix_file={folder}/mix.txt", "--training.dataset=json", *words)
    training = load_config(words).training
    assert training.mix_file == ""
    return [
        (entry.name, entry.source.dataset_path, source.weight)
        for entry, source in zip(entries(training, "training"), training.datasets, strict=True)
    ]


def test_each_line_is_a_source(tmp_path: Path) -> None:
    text = "# weight path\n0.7 web/*.jsonl\n\n 3  my code/**/*.zst\n1e-1 /far\n2 s3://b/c/*\n"
    assert mixed(tmp_path, text) == [
        ("web/*.jsonl", f"{tmp_path}/web/*.jsonl", 0.7),
        ("my code/**/*.zst", f"{tmp_path}/my code/**/*.zst", 3.0),
        ("/far", "/far", 0.1),
        ("s3://b/c/*", "s3://b/c/*", 2.0),
    ]


def test_it_is_the_same_as_tables(tmp_path: Path) -> None:
    (tmp_path / "mix.txt").write_text("0.7 a.jsonl\n0.3 b.jsonl\n")
    shared = 'dataset = "json"\ndataset_column = "body"\n'
    (tmp_path / "file.toml").write_text(f'[training]\nmix_file = "mix.txt"\n{shared}')
    tables = "".join(
        f'[[training.datasets]]\nname = "{name}"\ndataset_path = "{name}"\n'
        f"weight = {weight}\n{shared}"
        for name, weight in (("a.jsonl", 0.7), ("b.jsonl", 0.3))
    )
    (tmp_path / "tables.toml").write_text(tables)
    by_file, by_tables = (load_config([str(tmp_path / f"{n}.toml")]) for n in ("file", "tables"))
    assert by_file.training == by_tables.training


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        ("web/*.jsonl 0.7\n", (), "mix.txt:1: 'web/*.jsonl 0.7' is not a weight and a path"),
        ("\n0 a\n", (), "mix.txt:2: '0 a' is not"),
        ("inf a\n", (), "'inf a' is not"),
        ("0.5\n", (), "'0.5' is not"),
        ("# none\n", (), "names no files"),
        ("1 a\n", ("--training.dataset_path=b",), "is given beside training.dataset_path"),
        ("1 a\n", ('--training.datasets=[{"dataset": "c4"}]',), "beside training.datasets"),
    ],
)
def test_a_file_that_is_no_mixture_is_refused(text, words, says, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        mixed(tmp_path, text, *words)
    assert says in str(caught.value)


def test_a_mixture_needs_a_file_and_a_kind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mix_file: /no/such: cannot be read: No such"):
        load_config(["--training.mix_file=/no/such", "--training.dataset=json"])
    with pytest.raises(ConfigError, match=r"needs training.dataset\n  fix: say of which kind"):
        load_config([f"--training.mix_file={tmp_path}"])
