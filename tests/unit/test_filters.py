"""Which rows of a source are taken: by a condition, by number, by the part that is held out."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from meshwright.config.training import Source
from meshwright.datasets.files import SourceEntry
from meshwright.datasets.identity import hash_documents
from meshwright.datasets.rows import Item, conditions
from meshwright.datasets.samples import SampleRules
from meshwright.datasets.shards import Shard, ShardPlace, StreamedSource
from meshwright.datasets.sources import find_dataset
from meshwright.datasets.token_cache.tokenizing import open_cache
from meshwright.system.errors import ConfigError, RecordError
from tests.helpers.cli import check_job
from tests.helpers.texts import entry, tokenization

ROWS = [
    {
        "text": "t" * n,
        "lang": "en" if n % 3 else "de",
        "score": None if n == 5 else n / 10,
        "meta": {"n": n},
        "is_good": n % 4 == 0,
        "flat.n": n,
    }
    for n in range(1, 31)
]


@pytest.fixture(params=["json", "parquet"])
def data(request, tmp_path: Path) -> dict[str, str]:
    if request.param == "json":
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    return {"dataset": request.param, "dataset_path": str(tmp_path)}


def items(held_out: float = 0.0, is_held_out: bool = False, **keys: Any) -> list[Item]:
    part = replace(entry(**keys), held_out=held_out, is_held_out=is_held_out)
    documents = find_dataset(keys["dataset"]).open(part, False)
    return [item for part in range(documents.parts) for item in documents.read_part(part)]


@pytest.mark.parametrize(
    ("where", "holds"),
    [
        (["lang == 'en'"], lambda row: row["lang"] == "en"),
        (
            ['lang != "en"', "meta.n >= 9"],
            lambda row: row["lang"] != "en" and row["meta"]["n"] >= 9,
        ),
        (["len(text)<=7"], lambda row: len(row["text"]) <= 7),
        (["score != null"], lambda row: row["score"] is not None),
        (["score == None", "len(lang) == 2"], lambda row: row["score"] is None),
        ([" meta.n > -1 "], lambda row: True),
        (["flat.n < 9"], lambda row: row["flat.n"] < 9),  # a column's own name has the dot
        (["is_good == true"], lambda row: row["is_good"]),
        (["is_good == false"], lambda row: not row["is_good"]),
    ],
)
def test_rows_for_which_all_conditions_hold_are_taken(where, holds, data) -> None:
    found = items(**data, dataset_where=where)
    assert [text for text in found if text] == [row["text"] for row in ROWS if holds(row)]


def test_a_condition_that_cannot_be_answered_makes_a_bad_record(data) -> None:
    found = items(**data, dataset_where=["score >= 2"])
    bad = [item for item in found if isinstance(item, RecordError)]
    assert len(bad) == 1
    assert "'score' is None: '>=' not supported" in str(bad[0])
    found = items(**data, dataset_where=["scor >= 2"])
    assert all("no column 'scor', but " in str(item) for item in found)


@pytest.mark.parametrize(
    "text", ["lang", "lang = 'en'", "lang == en", "== 3", "len(a == 3", "a < "]
)
def test_a_condition_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"training\.dataset_where\.1 = .*\n  fix: write it like"):
        conditions(entry(dataset_where=["a == 1", text]))


def test_a_held_out_part_is_the_same_in_any_order_and_kind_of_file(tmp_path: Path) -> None:
    chance = random.Random(7)
    texts = [f"document {chance.random()}" for _ in range(2000)]
    texts += texts[:50]  # duplicates
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    chance.shuffle(texts)
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", row_group_size=100)
    sides = []
    for kind in ("json", "parquet"):
        keys = {"dataset": kind, "dataset_path": str(tmp_path)}
        trained = [text for text in items(0.1, False, **keys) if text]
        held_out = [text for text in items(0.1, True, **keys) if text]
        assert sorted(trained + held_out) == sorted(texts)
        assert set(trained).isdisjoint(held_out)
        assert 0.08 < len(held_out) / len(texts) < 0.12  # 2000 of 0.1: sigma is 0.007
        sides.append(sorted(held_out))
    assert sides[0] == sides[1]


def test_a_side_has_a_cache_of_its_own(data) -> None:
    source = Source(**data)
    sides = [
        SourceEntry("t", "", source, *held) for held in ((), (0.1, False), (0.1, True), (0.2, True))
    ]
    assert len({hash_documents(side, []) for side in sides}) == 4
    later = [{"max_documents": 3}, {"dataset_where": ["a == 1"]}]
    assert len({hash_documents(entry(**data, **k), []) for k in [{}, *later]}) == 3


def shards(data: dict[str, str], place: list[ShardPlace], **keys: Any) -> list[Shard]:
    spec = tokenization(**data, **keys)
    source = StreamedSource(spec.entry, spec.open(streamed=True), spec.encoder(), len(place), 4)
    rules = SampleRules(8, 0, max_epochs=2)

    def never(error: RecordError) -> None:
        raise error

    return [Shard(source, n, rules=rules, pass_over=never, place=p) for n, p in enumerate(place)]


@pytest.mark.parametrize("most", [1, 4, 5, 9])
def test_a_stream_ends_after_its_part_of_max_documents(most: int, data) -> None:
    """Those that a condition leaves out do not count; the same after a resume anywhere."""
    keys = {"max_documents": most, "dataset_where": ["lang == 'en'"]}
    taken = [row["text"] for row in ROWS if row["lang"] == "en"][:most]
    num_tokens = sum(len(text) + 2 for text in taken)  # with BOS and EOS
    places, samples = [ShardPlace()], []
    while True:
        (shard,) = shards(data, places[-1:], **keys)
        try:
            samples.append(shard.next_sample().tokens)
        except Exception:
            break
        places.append(ShardPlace(**json.loads(json.dumps(vars(shard.place)))))
    assert len(samples) == 2 * num_tokens // 8
    assert max(place.window for place in places) == (len(taken[-1]) - 1) // 4  # all are full
    (whole,) = shards(data, [ShardPlace()], **keys)
    assert all((whole.next_sample().tokens == tokens).all() for tokens in samples)


FRACTION = ["--training.validation_fraction=0.1", "--validation.enable=true"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (['--training.dataset_where=["a == 1"]'], "dataset 'sympy_source' has no rows"),
        (["--training.dataset_separator=x"], "dataset 'sympy_source' is not \"text\""),
        (
            [*FRACTION, "--validation.dataset=c4"],
            "is given together with a dataset of [validation]",
        ),
    ],
)
def test_a_filter_that_a_source_does_not_have_is_refused(words, says) -> None:
    with pytest.raises(ConfigError) as caught:
        check_job(["debug_model", *words])
    assert says in str(caught.value)


@pytest.mark.parametrize("most", [1, 4, 5])
def test_a_cache_ends_after_max_documents(most: int, data, tmp_path) -> None:
    """Its bytes are those of the documents that it has."""
    keys = {"max_documents": most, "dataset_where": ["lang == 'en'"]}
    taken = [row["text"] for row in ROWS if row["lang"] == "en"][:most]
    cache = open_cache(tokenization(**data, **keys), tmp_path / "_cache", num_workers=1)
    assert cache.num_documents == len(taken)
    assert cache.tokens(0, cache.num_tokens).tolist() == [
        token for text in taken for token in (256, *text.encode(), 257)
    ]
    assert abs(cache.num_bytes - sum(map(len, taken))) <= 2 * len(ROWS)
