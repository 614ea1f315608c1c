"""training.packing = "best_fit": whole documents, little padding, the same on any mesh."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from meshwright.commands.data import check_data
from meshwright.commands.prove import data as proof_data
from meshwright.commands.prove.measurement import SAVED_STEP
from meshwright.config.changes import changed, changes, config_defaults
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.config.training import Training
from meshwright.datasets import packing
from meshwright.datasets.cached_source import CachedSource
from meshwright.datasets.encoding import NO_LOSS
from meshwright.datasets.loader import to_batches
from meshwright.datasets.opening import find_data, open_data
from meshwright.datasets.packing import PackedSamples, best_fit, open_packing, stored_packing
from meshwright.datasets.samples import Sample, SampleRules
from meshwright.datasets.stream import Cursor, find_samples
from meshwright.datasets.token_parts import DamagedCacheError
from meshwright.models.loss import IGNORE, PADDING
from meshwright.system.errors import ConfigError
from tests.helpers.cli import command
from tests.helpers.resolved import resolved
from tests.helpers.texts import LENGTH, TEXTS, cached, encode
from tests.unit.test_sample_stream import read_steps

SEED = 11


def simple_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """The lengths in each bin: every bin is looked at for every piece."""
    bins: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        rooms = [capacity - sum(bin_) for bin_ in bins]
        fitting = [room for room in rooms if room >= length]
        if fitting:
            bins[rooms.index(min(fitting))].append(length)
        else:
            bins.append([length])
    return bins


@pytest.mark.parametrize("capacity", [1, 7, 64, 513])
def test_best_fit_is_the_simple_one(capacity: int) -> None:
    random = np.random.default_rng(SEED)
    for count in (1, 2, 50, 400):
        lengths = random.integers(1, capacity + 1, count)
        bins = best_fit(lengths, capacity)
        filled = np.bincount(bins, weights=lengths).astype(int).tolist()
        # of bins with equal room, any may be taken: how full they become is the same
        want = [sum(bin_) for bin_ in simple_best_fit(lengths.tolist(), capacity)]
        assert sorted(filled) == sorted(want)


def pieces_of(sample: Sample) -> list[tuple[int, ...]]:
    """The pieces of documents in a sample, without its padding."""
    assert len(sample.raw) == sum(sample.lengths) == LENGTH
    lengths = sample.lengths[: -1 if sample.padding else None]
    ends = np.cumsum(lengths)
    assert ends[-1] == LENGTH - sample.padding
    return [tuple(piece.tolist()) for piece in np.split(sample.tokens[: ends[-1]], ends[:-1])]


def pieces_in(documents: Iterable[list[int]]) -> Counter[tuple[int, ...]]:
    """The documents, those that are longer than a sample cut."""
    return Counter(
        tuple(document[begin : begin + LENGTH])
        for document in documents
        for begin in range(0, len(document), LENGTH)
    )


def with_packing(folder: Path, texts: tuple[str, ...] = TEXTS, name: str = "texts") -> CachedSource:
    source = cached(folder, texts, name)
    return replace(source, packing=open_packing(source.cache, LENGTH))


@pytest.fixture
def small_windows(monkeypatch) -> None:
    """Of 4 documents, so that there are several."""
    for module in ("token_cache.cache", "token_cache.writing"):
        monkeypatch.setattr(f"meshwright.datasets.{module}.BLOCK_DOCUMENTS", 2)
    monkeypatch.setattr(packing, "WINDOW", 2)


def test_an_epoch_holds_every_document_once_and_whole(tmp_path, small_windows) -> None:
    source = with_packing(tmp_path)
    samples = PackedSamples(source.cache, source.packing, seed=SEED)
    want = pieces_in(encode(text) for text in TEXTS)
    orders = []
    for epoch in range(3):
        first = epoch * samples.samples_per_epoch
        numbers = range(first, first + samples.samples_per_epoch)
        order = [tuple(pieces_of(samples.read(number))) for number in numbers]
        got = Counter(piece for pieces in order for piece in pieces)
        assert got == want
        orders.append(order)
    assert orders[0] != orders[1] != orders[2]
    # a sample keeps its documents, not their order
    assert len({pieces for order in orders for pieces in order}) > len(set(orders[0]))
    assert sorted(map(sorted, orders[0])) == sorted(map(sorted, orders[1]))
    assert {len(pieces) for pieces in orders[0]} > {1}


def test_a_packing_that_is_not_whole_or_of_other_tokens_is_made_again(
    tmp_path, monkeypatch, small_windows
) -> None:
    cache = cached(tmp_path).cache
    first = open_packing(cache, LENGTH)
    assert len(first.bin_starts) == 3  # 9 documents, of which one is empty, in windows of 4
    file = cache.folder / f"packed-{LENGTH}"
    content = file.read_bytes()
    for size in (None, 20):
        file.unlink() if size is None else file.write_bytes(content[:size])
        assert open_packing(cache, LENGTH).window(0).tobytes() in content
        assert file.read_bytes() == content
    file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(ConfigError, match="damaged\n  fix: delete"):
        open_packing(cache, LENGTH).window(0)
    assert open_packing(cache, LENGTH, again=True).window(0).tobytes() in content
    index = file.with_suffix(".npz")
    index.unlink()
    index.mkdir()  # it cannot be read, nor replaced
    assert open_packing(cache, LENGTH).window(0).tobytes() in content
    index.rmdir()
    cache.content = "other"
    file.unlink()
    with monkeypatch.context() as full:  # without room for files it stays in memory
        full.setattr(packing, "whole_file", Mock(side_effect=PermissionError(13, "denied")))
        found = open_packing(cache, LENGTH)
    with pytest.raises(DamagedCacheError):
        stored_packing(cache, LENGTH)
    open_packing(cache, LENGTH)
    stored = stored_packing(cache, LENGTH)
    assert found.bin_starts.tolist() == stored.bin_starts.tolist() == first.bin_starts.tolist()
    for window in range(len(stored.bin_starts) - 1):
        assert found.window(window).tolist() == stored.window(window).tolist()


def test_the_small_job_of_prove_goes_on_in_the_next_epoch() -> None:
    for kind in ("cut", "best_fit"):
        training = Training(packing=kind, seq_len=31, global_batch_size=8)
        source = proof_data.open_source(training, 256, SEED)
        left = source.samples_per_epoch(32) - proof_data.first_cursor([source], training).sample
        assert 0 <= left - SAVED_STEP * 8 < 8, kind


@pytest.mark.parametrize("split", [(2, 2, 1), (4, 1, 1), (1, 1, 4), (2, 1, 2)])
def test_batches_do_not_depend_on_their_split_nor_on_resumes(
    split, tmp_path, small_windows
) -> None:
    source = with_packing(tmp_path)
    sources = [source, with_packing(tmp_path, ("x" * 5, "yz", "w" * 21), "more")]
    whole = read_steps(sources, [0.6, 0.4], (1, 4, 1), 12)
    assert read_steps(sources, [0.6, 0.4], split, 12) == whole
    assert read_steps(sources, [0.6, 0.4], split, 7, whole[4][1]) == whole[5:]
    limited = read_steps([source], [1], (1, 1, 1), 1000, max_epochs=2)
    assert len(limited) == 2 * source.packing.bin_starts[-1]


@pytest.mark.parametrize("mask_documents", [False, True])
def test_padding_has_no_loss(mask_documents, tmp_path, small_windows) -> None:
    source = with_packing(tmp_path)
    samples = PackedSamples(source.cache, source.packing, seed=SEED)
    found = [samples.read(number) for number in range(samples.samples_per_epoch)]
    assert any(sample.padding for sample in found)
    (batch,) = to_batches(found, len(found), mask_documents)
    for row, sample in enumerate(found):
        own = LENGTH - sample.padding
        assert batch.labels[row, own - 1 :].tolist() == [IGNORE, *[PADDING] * sample.padding][:-1]
        labels = batch.labels[row, : own - 1]
        starts = np.cumsum(sample.lengths)[: -1 if not sample.padding else -2] - 1
        want = torch.from_numpy(sample.tokens[1:own].copy())
        if mask_documents:
            assert batch.documents is not None
            assert batch.documents[row].tolist() == sample.documents[:-1].tolist()
            want[starts] = IGNORE
        assert torch.equal(labels, want)
    assert int(batch.tokens.max()) < NO_LOSS


def test_conversations_keep_their_labels(tmp_path) -> None:
    turns = tuple(
        [{"role": "user", "content": "u" * n}, {"role": "assistant", "content": "a" * n}]
        for n in (1, 2, 3)
    )
    source = with_packing(tmp_path, turns)
    samples = PackedSamples(source.cache, source.packing, seed=SEED)
    found = [samples.read(number) for number in range(samples.samples_per_epoch)]
    for sample in found:
        has_loss = sample.tokens == ord("a")
        assert (sample.raw < NO_LOSS).tolist() == has_loss.tolist()
    assert sum(int((sample.raw < NO_LOSS).sum()) for sample in found) == 6


def test_a_window_of_usual_documents_has_under_one_percent_of_padding() -> None:
    """Short posts, by the mean and deviation of the logarithm of their tokens."""
    capacity, count = 2049, packing.WINDOW << 10
    drawn = np.random.default_rng(SEED).lognormal(5.0, 0.6, count).astype(np.int64) + 2
    pieces = drawn[drawn < capacity]  # whole samples of longer ones would only lower the share
    bins = int(best_fit(pieces, capacity).max()) + 1
    assert 0 <= 1 - pieces.sum() / (bins * capacity) < 0.005


def words_of(folder: Path, packing: str = "best_fit") -> list[str]:
    rows = (json.dumps({"text": text}) for text in TEXTS if text)
    (folder / "texts.jsonl").write_text("\n".join(rows))
    words = ["--model.tokenizer_path=bytes", "--model.args.vocab_size=258"]
    training = {
        "dataset": "json",
        "dataset_path": folder / "texts.jsonl",
        "seq_len": 7,
        "token_cache_folder": folder / "caches",
        "packing": packing,
    }
    return words + [f"--training.{key}={value}" for key, value in training.items()]


def config_of(folder: Path, packing: str = "best_fit") -> JobConfig:
    return load_config(words_of(folder, packing))


def test_a_job_opens_its_data_packed(tmp_path) -> None:
    config = config_of(tmp_path)
    (source,) = open_data("training", config)
    assert isinstance(source, CachedSource)
    (again,) = open_data("training", config, find_data(config), looks_at_files=True)
    rules = SampleRules(LENGTH, SEED)
    first, second = (
        [sample.raw.tolist() for sample in find_samples(s, 0, 30, rules, (0, Cursor()))]
        for s in (source, again)
    )
    assert first == second
    pieces = [min(len(encode(t)) - at, 8) for t in TEXTS for at in range(0, len(encode(t)), 8)]
    assert source.samples(rules).samples_per_epoch == len(simple_best_fit(pieces, LENGTH))
    (cut,) = open_data("training", config_of(tmp_path, "cut"))
    assert isinstance(cut, CachedSource)
    assert cut.packing is None
    assert cut.content == source.content
    with pytest.raises(ConfigError) as caught:
        check_data(changed(config, {"training": {"dataset_mode": "streamed"}}))
    assert caught.value.key == "training.packing"
    assert 'fix: set training.dataset_mode = "cached"' in str(caught.value)


def test_the_data_command_prints_no_padding(tmp_path, capsys) -> None:
    words = [*words_of(tmp_path), "--training.global_batch_size=8"]
    command("data")(words)
    assert "sequences, with" in capsys.readouterr().out
    command("data")([*words, "--step", "1"])
    printed = capsys.readouterr().out
    assert "defghij" in printed
    assert "\0" not in printed


def test_the_packing_belongs_to_the_data_of_a_resume(tmp_path) -> None:
    packed, cut = (resolved(config_of(tmp_path, kind), 1) for kind in ("best_fit", "cut"))
    (difference,) = changes(cut.data_identity, packed.data_identity, config_defaults())
    assert difference == ("training.packing", "cut", "best_fit")
