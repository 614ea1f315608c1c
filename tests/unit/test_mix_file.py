"""A mixture: from a file of weighted paths; its sources are drawn by their shares, in an order that
never changes."""

import math
import random
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest

from meshwright.config.loader import load_config
from meshwright.datasets.named_sources import entries
from meshwright.datasets.order import Mixture
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
        ("1 a\n", ("--training.dataset_path=b",), "is given together with training.dataset_path"),
        ("1 a\n", ('--training.datasets=[{"dataset": "c4"}]',), "together with training.datasets"),
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


@pytest.mark.parametrize(
    "weights",
    [[1], [1, 1], [0.7, 0.2, 0.1], [5, 3, 2, 7, 11], [1e-3, 1], [0.1] * 10, [3e9, 1e9, 7]],
)
def test_shares_are_within_one_sample_at_any_moment(weights: list[float]) -> None:
    mixture, total = Mixture(weights), sum(weights)
    for n in range(1, 3000):
        mixture.draw()
        assert sum(mixture.counts) == n
        for count, weight in zip(mixture.counts, weights, strict=True):
            assert abs(count - weight * n / total) < 1


def drawn_by_looking_at_all(weights: Sequence[float], counts: list[int], draws: int) -> list[int]:
    """The definition, as the first release computed it: looks at every source at each draw."""
    fractions = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    whole = [int(fraction * scale) for fraction in fractions]
    total, counts, drawn = sum(whole), list(counts), []
    slack = Fraction(total, max(2 * len(weights) - 2, 1))
    for n in range(sum(counts) + 1, sum(counts) + 1 + draws):
        behind = [weight * n - count * total for weight, count in zip(whole, counts, strict=True)]
        late = [k for k, distance in enumerate(behind) if distance >= slack]
        if len(weights) == 1:
            late = [0]
        chosen = min(late, key=lambda k: (total - slack - behind[k]) / whole[k])
        counts[chosen] += 1
        drawn.append(chosen)
    return drawn


RNG = random.Random(0)
KINDS = {
    "equal": lambda: 1,
    "small numbers, with ties": lambda: RNG.randint(1, 5),
    "fractions": RNG.random,
    "token budgets of any size": lambda: 10 ** RNG.uniform(-6, 12),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_is_that_of_the_definition(kind: str) -> None:
    """To the sample, also from the middle on: a run of before resumes in the same order."""
    for sources in range(1, 13):
        weights = [KINDS[kind]() for _ in range(sources)]
        want = drawn_by_looking_at_all(weights, [0] * sources, 240)
        mixture = Mixture(weights)
        drawn = [mixture.draw() for _ in range(120)]
        resumed = Mixture(weights, mixture.counts)
        assert drawn + [resumed.draw() for _ in range(120)] == want, weights
        assert resumed.counts == [want.count(source) for source in range(sources)]
