"""Which tokens sample i holds depends on the config and i: not on ranks, batches or resumes."""

import dataclasses
import itertools
import json
from pathlib import Path

import datasets
import pytest
import torch

from meshwright.config.job_config import Training
from meshwright.datasets import DATASETS
from meshwright.datasets.loader import BatchShape, Loader
from meshwright.datasets.order import permuted
from meshwright.datasets.packing import Cursor, Packer
from meshwright.datasets.sources import ShuffledDocuments
from meshwright.errors import ConfigError

BOS, EOS = 1, 2


class Letters:
    """A token a character."""

    vocab_size, bos_id, eos_id = 300, BOS, EOS

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


# of every length around that of a sample, one of many samples, one without text
TEXTS = ["a", "bc", "defghij", "k" * 57, "", "lmnop", "qrst", "uvwxyz" * 3, "ABCDEFGHI"]
LENGTH = 8


def documents(seed: int = 0) -> ShuffledDocuments:
    return ShuffledDocuments(len(TEXTS), TEXTS.__getitem__, seed)


def samples(n: int, cursor: Cursor = Cursor()) -> list[tuple[list[int], Cursor]]:
    """The first `n` samples from `cursor` on, each with the cursor behind it."""
    packer = Packer(documents(), Letters(), LENGTH, cursor)
    return [(packer.next_sample(), packer.cursor) for _ in range(n)]


@pytest.fixture(params=[1, 3, 64])
def lanes(request, monkeypatch) -> int:
    """Fewer lanes than documents, and more."""
    monkeypatch.setattr("meshwright.datasets.packing.MAX_LANES", request.param)
    return request.param


def test_no_token_is_lost(lanes: int) -> None:
    """All that the lanes gave, with what the last cursor leaves in them, is every document."""
    got = samples(300)
    out = [token for sample, _ in got for token in sample]
    cursor = got[-1][1]
    for (epoch, position), used in cursor.lanes:
        text = next(documents().read(epoch, position))
        out += [BOS, *map(ord, text), EOS][used:]
    epoch, position = cursor.next_document
    begun = [text for e in range(epoch) for text in documents().read(e, 0)]
    begun += itertools.islice(documents().read(epoch, 0), position)
    assert epoch >= 3
    assert sorted(out) == sorted(t for text in begun for t in (BOS, *map(ord, text), EOS))


def test_one_lane_is_the_plain_concatenation(monkeypatch) -> None:
    monkeypatch.setattr("meshwright.datasets.packing.MAX_LANES", 1)
    stream = [
        token
        for epoch in range(3)
        for text in documents().read(epoch, 0)
        for token in (BOS, *map(ord, text), EOS)
    ]
    got = [token for sample, _ in samples(len(stream) // LENGTH) for token in sample]
    assert got == stream[: len(got)]


def test_neighbouring_samples_come_from_different_documents() -> None:
    texts = [letter * 1000 for letter in "abcdefghijklmnopqrstuvwxyz"]
    packer = Packer(
        ShuffledDocuments(len(texts), texts.__getitem__, 0), Letters(), LENGTH, Cursor()
    )
    batch = {packer.next_sample()[-1] for _ in range(16)}
    assert len(batch) == 16


@pytest.mark.parametrize("num_documents", [1, 2, 5])
def test_few_documents_are_not_read_many_times_over(num_documents: int) -> None:
    """Samples of an epoch are distinct, however few the documents: one large file, say."""
    texts = ["".join(chr(300 + 1000 * d + i) for i in range(900)) for d in range(num_documents)]
    source = ShuffledDocuments(num_documents, texts.__getitem__, 0)
    packer = Packer(source, Letters(), LENGTH, Cursor())
    batch = [tuple(packer.next_sample()) for _ in range(100 * num_documents)]
    assert len(set(batch)) == len(batch)


def test_data_that_has_shrunk_is_noticed() -> None:
    cursor = samples(60)[-1][1]
    shrunk = ShuffledDocuments(1, TEXTS.__getitem__, 0)
    with pytest.raises(ConfigError, match="holds less than when the checkpoint was saved"):
        Packer(shrunk, Letters(), LENGTH, cursor)


def test_resuming_at_any_sample_gives_the_same_stream(lanes: int) -> None:
    want = samples(80)  # several epochs
    for i, (_, cursor) in enumerate(want):
        assert cursor.sample == i + 1
        saved = json.loads(json.dumps(dataclasses.asdict(cursor)))
        assert samples(79 - i, Cursor.from_json(saved)) == want[i + 1 :]


def test_epochs_differ_in_order_and_hold_the_same() -> None:
    first, second = (list(documents().read(epoch, 0)) for epoch in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second) == sorted(TEXTS)
    assert first != list(documents(seed=1).read(0, 0))


@pytest.mark.parametrize("n", [1, 2, 3, 17, 64, 1000])
def test_permuted_is_a_permutation(n: int) -> None:
    assert sorted(permuted(i, n, seed=3, epoch=1) for i in range(n)) == list(range(n))


def test_permutation_is_not_regular() -> None:
    order = torch.tensor([permuted(i, 1000, 0, 0) for i in range(1000)]).double()
    lags = torch.stack([order[:-1], order[1:]])
    assert abs(torch.corrcoef(lags)[0, 1]) < 0.15  # 1000 pairs: 4.7 standard errors
    assert (order == torch.arange(1000)).sum() < 10


def test_an_epoch_of_less_than_a_sample_is_an_error() -> None:
    short = ShuffledDocuments(1, ["a"].__getitem__, 0)
    with pytest.raises(ConfigError, match="less than one sample of 9 tokens"):
        Packer(short, Letters(), 9, Cursor()).next_sample()
    empty = ShuffledDocuments(0, [].__getitem__, 0)
    with pytest.raises(ConfigError, match="an epoch holds no document"):
        Packer(empty, Letters(), 8, Cursor()).next_sample()


def read_steps(dp_size: int, local: int, accumulate: int, n: int, cursor=Cursor()) -> list:
    """The global batches of `n` steps, put together from all ranks, and the cursors after them."""
    loaders = [
        Loader(
            documents(),
            Letters(),
            LENGTH - 1,
            BatchShape(local, accumulate, rank, dp_size),
            cursor=cursor,
            pin_memory=False,
        )
        for rank in range(dp_size)
    ]
    steps = []
    for _ in range(n):
        parts = [next(loader) for loader in loaders]
        rows = [
            [*map(int, tokens), int(labels[-1])]
            for microbatch in range(accumulate)
            for part in parts
            for tokens, labels in zip(
                part.batches[microbatch].tokens, part.batches[microbatch].labels, strict=True
            )
        ]
        for part in parts:
            for batch in part.batches:
                assert torch.equal(
                    batch.tokens[:, 1:], batch.labels[:, :-1]
                )  # each predicts the next
        assert len({part.cursor for part in parts}) == 1
        steps.append((rows, parts[0].cursor))
    for loader in loaders:
        loader.close()
    return steps


@pytest.mark.parametrize(("dp_size", "local", "accumulate"), [(1, 4, 2), (2, 2, 2), (4, 2, 1)])
def test_global_batches_do_not_depend_on_their_split(dp_size, local, accumulate) -> None:
    want = read_steps(1, 8, 1, n=6)
    assert read_steps(dp_size, local, accumulate, n=6) == want
    assert [row for rows, _ in want for row in rows] == [sample for sample, _ in samples(48)]


def test_resume_on_another_number_of_ranks() -> None:
    want = read_steps(1, 8, 1, n=6)
    assert read_steps(4, 1, 2, n=3, cursor=want[2][1]) == want[3:]


def test_an_error_while_reading_ahead_reaches_the_reader() -> None:
    short = ShuffledDocuments(1, ["a"].__getitem__, 0)
    shape = BatchShape(1, 1, 0, 1)
    loader = Loader(short, Letters(), 8, shape, cursor=Cursor(), pin_memory=False)
    with pytest.raises(ConfigError, match="less than one sample"):
        next(loader)


def test_the_standard_library_is_text_and_without_its_tests() -> None:
    texts = list(DATASETS["python_stdlib"].open(Training()).read(0, 0))
    assert sum(map(len, texts)) > 3_000_000
    assert any("class JSONDecoder" in text for text in texts)
    assert len(texts) == len(list(DATASETS["python_stdlib"].open(Training()).read(1, 0)))


ROWS = [{"text": f"document {i}", "other": i} for i in range(7)]


def write(kind: str, folder: Path) -> None:
    rows = datasets.Dataset.from_list(ROWS)
    if kind == "json":
        lines = [json.dumps(row) + "\n" for row in ROWS]
        (folder / "a.jsonl").write_text("".join(lines[:4]))
        (folder / "b.jsonl").write_text("".join(lines[4:]))
    elif kind == "parquet":
        rows.to_parquet(folder / "a.parquet")
    elif kind == "arrow":
        rows.save_to_disk(folder)
    else:
        for i, row in enumerate(ROWS):
            (folder / f"{i}.txt").write_text(row["text"])


@pytest.fixture
def hf_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf_cache")
    return tmp_path


@pytest.mark.parametrize("kind", ["json", "parquet", "text", "arrow"])
def test_local_files(kind: str, hf_cache: Path) -> None:
    folder = hf_cache / "data"
    folder.mkdir()
    write(kind, folder)
    source = DATASETS[kind].open(Training(dataset=kind, dataset_path=str(folder)))
    want = [row["text"] for row in ROWS]
    first = list(source.read(0, 0))
    assert sorted(first) == want
    assert first != want  # shuffled
    assert list(source.read(0, 4)) == first[4:]


def test_globs_and_columns(hf_cache: Path) -> None:
    write("json", hf_cache)
    training = Training(dataset="json", dataset_path=f"{hf_cache}/b*.jsonl")
    assert len(list(DATASETS["json"].open(training).read(0, 0))) == 3
    with pytest.raises(ConfigError, match="choose from text, other"):
        DATASETS["json"].open(training.model_copy(update={"dataset_column": "txt"}))


def test_a_row_without_text_is_named(hf_cache: Path) -> None:
    (hf_cache / "a.jsonl").write_text('{"text": "a"}\n{"text": null}\n')
    source = DATASETS["json"].open(Training(dataset="json", dataset_path=str(hf_cache)))
    with pytest.raises(ConfigError, match="row 1 holds None, which is not text"):
        list(source.read(0, 0))


def test_a_broken_file_is_a_config_error(hf_cache: Path) -> None:
    (hf_cache / "a.parquet").write_bytes(b"not parquet")
    with pytest.raises(ConfigError, match="cannot be opened: .*[Pp]arquet"):
        DATASETS["parquet"].open(Training(dataset="parquet", dataset_path=str(hf_cache)))


def test_c4_is_streamed_from_a_local_copy(hf_cache: Path) -> None:
    folder = hf_cache / "c4"
    folder.mkdir()
    write("json", folder)
    source = DATASETS["c4"].open(Training(dataset="c4", dataset_path=str(folder)))
    assert list(source.read(0, 0)) == [row["text"] for row in ROWS]
    assert list(source.read(1, 5)) == [row["text"] for row in ROWS[5:]]


def test_c4_out_of_reach_is_a_config_error(hf_cache: Path) -> None:
    with pytest.raises(ConfigError, match="training.dataset = 'c4': cannot be opened"):
        DATASETS["c4"].open(Training(dataset="c4"))
