"""Which tokens sample i holds depends on the config and i alone."""

import dataclasses
import itertools
import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.config.training import Training
from meshwright.datasets.encoding import Encoder
from meshwright.datasets.loader import (
    Loader,
    StepData,
    padded_samples,
    slots_of,
    to_batches,
    whole_cursor,
)
from meshwright.datasets.opening import open_data
from meshwright.datasets.order import permutation, permuted
from meshwright.datasets.rows import Item
from meshwright.datasets.samples import CachedSamples, SampleRules
from meshwright.datasets.stream import (
    Cursor,
    EndOfData,
    OpenSource,
    SampleStream,
    Shard,
    ShardPlace,
    bad_records,
    find_samples,
    merged,
    steps_of_data,
)
from meshwright.datasets.tokenizers.kinds import ByteTokenizer
from meshwright.models.loss import IGNORE, Batch
from meshwright.system.errors import (
    ConfigError,
    DataError,
    RecordError,
    StopRequested,
    StorageError,
)
from tests.helpers.texts import BOS, EOS, LENGTH, TEXTS, cached, encode, streamed, weighted

LETTERS = tuple(letter * 50 for letter in "abcdefghijklmnopqrstuvwxyz")


@pytest.fixture
def small_blocks(monkeypatch) -> None:
    """Of 4 documents, so that there are several."""
    for module in ("token_cache.cache", "token_cache.writing"):
        monkeypatch.setattr(f"meshwright.datasets.{module}.BLOCK_DOCUMENTS", 4)


# order


@pytest.mark.parametrize("n", [1, 2, 3, 17, 64, 1000])
def test_permuted_is_a_permutation(n: int) -> None:
    assert sorted(permuted(i, n, seed=3, epoch=1) for i in range(n)) == list(range(n))
    assert sorted(permutation(n, 3, 1)) == list(range(n))


def test_permutations_are_not_regular() -> None:
    for order in ([permuted(i, 1000, 0, 0) for i in range(1000)], permutation(1000, 0).tolist()):
        values = torch.tensor(order).double()
        lags = torch.stack([values[:-1], values[1:]])
        assert abs(torch.corrcoef(lags)[0, 1]) < 0.15  # 1000 pairs: 4.7 standard errors
        assert (values == torch.arange(1000)).sum() < 10


def test_the_order_is_the_same_everywhere() -> None:
    """Fixed for good: another numpy or machine may not give other data to a run that resumes."""
    assert [permuted(i, 10, 0, 0) for i in range(10)] == [6, 5, 2, 9, 0, 3, 4, 1, 7, 8]
    assert permutation(10, 1, 2, 3).tolist() == [1, 9, 0, 5, 6, 8, 3, 7, 2, 4]


# samples of a cache


def test_an_epoch_holds_every_token_once(tmp_path, small_blocks) -> None:
    source = cached(tmp_path)
    samples = CachedSamples(source.cache, LENGTH, seed=0)
    want = Counter(token for text in TEXTS for token in encode(text))
    left_out = sum(want.values()) % LENGTH
    for epoch in range(4):
        numbers = range(epoch * samples.samples_per_epoch, (epoch + 1) * samples.samples_per_epoch)
        got = Counter(int(token) for n in numbers for token in samples.read(n).tokens)
        assert got <= want
        assert (want - got).total() == left_out


def test_without_a_seed_samples_are_the_plain_concatenation(tmp_path, small_blocks) -> None:
    samples = CachedSamples(cached(tmp_path).cache, LENGTH, seed=None)
    stream = [token for text in TEXTS for token in encode(text)]
    got = [samples.read(n).tokens.tolist() for n in range(samples.samples_per_epoch)]
    assert list(itertools.chain(*got)) == stream[: len(got) * LENGTH]


def test_documents_and_samples_are_shuffled_anew_each_epoch(tmp_path, small_blocks) -> None:
    samples = CachedSamples(cached(tmp_path, LETTERS).cache, 52, seed=0)
    assert samples.samples_per_epoch == 26  # a document a sample: which is where?
    epochs = [
        [int(samples.read(26 * epoch + n).tokens[1]) for n in range(26)] for epoch in range(3)
    ]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    # two documents a sample: who shares one with whom?
    samples = CachedSamples(cached(tmp_path, LETTERS).cache, 104, seed=0)
    neighbours = [
        {
            tuple(sorted((int(sample.tokens[1]), int(sample.tokens[53]))))
            for sample in map(samples.read, range(13 * epoch, 13 * epoch + 13))
        }
        for epoch in range(2)
    ]
    assert neighbours[0] != neighbours[1]
    other = CachedSamples(cached(tmp_path, LETTERS).cache, 52, seed=1)
    assert [int(other.read(n).tokens[1]) for n in range(26)] != epochs[0]


def test_the_samples_of_a_single_document_are_shuffled_anew_each_epoch(tmp_path) -> None:
    text = "".join(map(chr, range(32, 127)))
    samples = CachedSamples(cached(tmp_path, (text,)).cache, 1, seed=0)
    epochs = [[int(samples.read(97 * epoch + n).tokens[0]) for n in range(97)] for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    same = sum(a == b for a, b in zip(*epochs, strict=True))
    assert same < 10


# samples of a stream


def on_one_rank(
    source: OpenSource, length: int = LENGTH, cursor: Cursor = Cursor(), **rules: int
) -> SampleStream:
    rules = SampleRules(length, **({"seed": 0} | rules))
    return SampleStream([source], cursor, rules, batch=1, slots=[0])


def take(source: OpenSource, n: int, cursor: Cursor = Cursor()) -> list:
    """Samples from `cursor` on, each with the cursor behind it."""
    order = on_one_rank(source, cursor=cursor)
    return [(order.next_sample().tokens.tolist(), order.cursor) for _ in range(n)]


@pytest.mark.parametrize("window", [1, 2, 100])
def test_a_stream_resumes_at_any_sample(window: int) -> None:
    source = streamed(num_shards=2, window=window)
    want = take(source, 120)  # several epochs of each shard
    assert all(place.epoch >= 3 for place in want[-1][1].places["stream"].values())
    for i, (_, cursor) in enumerate(want):
        saved = json.loads(json.dumps(dataclasses.asdict(cursor)))
        assert take(source, 119 - i, Cursor.from_json(saved)) == want[i + 1 :]


@pytest.mark.parametrize("kind", ["cached", "streamed"])
def test_a_sample_can_be_looked_up_by_its_index(kind, tmp_path, monkeypatch) -> None:
    source = cached(tmp_path) if kind == "cached" else streamed()
    want, rules = take(source, 60), SampleRules(LENGTH, seed=0)
    opened, read = set(), Shard.next_sample
    monkeypatch.setattr(Shard, "next_sample", lambda s: opened.add(s._number) or read(s))
    for first, last, known in ((0, 0, 0), (7, 8, 0), (41, 59, 0), (41, 43, 41), (50, 52, 30)):
        before = (known, want[known - 1][1]) if known else (0, Cursor())
        found = find_samples(source, first, last, rules, before)
        assert [sample.tokens.tolist() for sample in found] == [
            tokens for tokens, _ in want[first : last + 1]
        ]
        assert len(opened) <= last - first + 1  # no other shard is read
        opened.clear()


def test_a_stream_holds_every_token_once_an_epoch() -> None:
    source = streamed(num_shards=1, window=3)
    order, tokens = on_one_rank(source, 1, max_epochs=3), Counter()

    def read_on() -> None:
        while True:
            tokens[int(order.next_sample().tokens[0])] += 1

    with pytest.raises(EndOfData):
        read_on()
    want = Counter(token for text in TEXTS for token in encode(text))
    assert tokens == Counter({token: 3 * count for token, count in want.items()})


def test_a_window_shuffles_and_differs_each_epoch() -> None:
    source = streamed(LETTERS, num_shards=1, window=10)
    order = on_one_rank(source, 52)
    letters = [int(order.next_sample().tokens[1]) for _ in range(52)]
    first, second = letters[:26], letters[26:]
    assert sorted(first) == sorted(second) == [ord(text[0]) for text in LETTERS]
    assert first != second
    assert sorted(first[:10]) == sorted(second[:10]) == [ord(text[0]) for text in LETTERS[:10]]
    assert [letter + 10 for letter in first[:10]] != first[10:20]  # nor two windows alike


def test_a_rank_reads_only_its_own_shards() -> None:
    opened = set()
    source = streamed(LETTERS, num_shards=8, window=1, get=lambda i: opened.add(i) or LETTERS[i])
    take_slots = {"batch": 4, "slots": [1]}
    order = SampleStream([source], Cursor(), SampleRules(length=8, seed=0), **take_slots)
    for _ in range(40):
        order.next_sample()
    shards = {i for i in range(8) for n in opened if 26 * i // 8 <= n < 26 * (i + 1) // 8}
    assert shards == {1, 5}  # sample 1 of a batch of 4 is from these in turn
    assert set(order.cursor.places["stream"]) == {1, 5}


def test_too_little_in_a_shard_is_an_error() -> None:
    with pytest.raises(ConfigError, match="less than one sample of 8 tokens"):
        take(streamed(("a",), num_shards=1), 1)
    with pytest.raises(ConfigError, match="holds no text.*\n  fix: lower"):
        take(streamed((), num_shards=1), 1)


# the loader


def sources_of(kind: str, folder: Path) -> tuple[list[OpenSource], list[float]]:
    if kind == "cached":
        return [cached(folder)], [1]
    if kind == "streamed":
        return [streamed(LETTERS, num_shards=6)], [1]
    return [cached(folder), streamed(LETTERS, num_shards=4), cached(folder, LETTERS, "letters")], [
        0.5,
        0.3,
        0.2,
    ]


def read_steps(
    sources: Sequence[OpenSource],
    weights: Sequence[float],
    split: tuple[int, int, int],
    n: int,
    cursor: Cursor = Cursor(),
    **rules: int,
) -> list[tuple[list[list[int]], Cursor]]:
    """The global batches of `n` steps, put together from all ranks, and the cursors after them."""
    dp_size, local, accumulate = split
    loaders = []
    for rank in range(dp_size):
        batch = local * accumulate * dp_size
        whole = {"batch": batch, "slots": slots_of(rank, dp_size, local, batch)}
        parts = weighted(sources, weights)
        order = SampleStream(parts, cursor, SampleRules(LENGTH, 0, **rules), **whole)
        loaders.append(Loader(order, local, mask_documents=False, pin_memory=False))
    steps = []
    for _ in range(n):
        parts: list[StepData | None] = [next(loader, None) for loader in loaders]
        if parts[0] is None:
            assert parts == [None] * dp_size
            break
        rows = [
            [*map(int, tokens), int(labels[-1])]
            for microbatch in range(accumulate)
            for part in parts
            for tokens, labels in zip(
                part.batches[microbatch].tokens, part.batches[microbatch].labels, strict=True
            )
        ]
        steps.append((rows, merged([part.cursor for part in parts])))
        is_over = [loader.fetch(2) == 0 and loader.error is None for loader in loaders]
        assert [loader.is_at_end for loader in loaders] == is_over
        assert len(set(is_over)) == 1
    for loader in loaders:
        loader.close()
    return steps


@pytest.mark.parametrize("kind", ["cached", "streamed", "mixture"])
def test_epochs_after_a_resume_are_those_without_it(kind, tmp_path) -> None:
    """Of every shard that was read before, too."""
    sources, weights = sources_of(kind, tmp_path)
    options = {"rules": SampleRules(LENGTH, seed=0), "batch": 4, "slots": range(4)}
    whole = SampleStream(weighted(sources, weights), Cursor(), **options)
    for _ in range(350):
        whole.next_sample()
    resumed = SampleStream(weighted(sources, weights), whole.cursor, **options)
    whole.next_sample()
    resumed.next_sample()
    assert resumed.epochs == whole.epochs


@pytest.mark.parametrize("kind", ["cached", "streamed", "mixture"])
@pytest.mark.parametrize("split", [(1, 4, 3), (2, 2, 3), (4, 3, 1), (6, 2, 1), (12, 1, 1)])
def test_global_batches_do_not_depend_on_their_split(kind, split, tmp_path) -> None:
    sources, weights = sources_of(kind, tmp_path)
    want = read_steps(sources, weights, (1, 12, 1), n=20)  # several epochs
    assert read_steps(sources, weights, split, n=20) == want


@pytest.mark.parametrize("kind", ["cached", "streamed", "mixture"])
def test_three_resumes_on_other_numbers_of_ranks(kind, tmp_path) -> None:
    sources, weights = sources_of(kind, tmp_path)
    want = read_steps(sources, weights, (1, 12, 1), n=24)
    got = read_steps(sources, weights, (1, 6, 2), n=5)
    for split in ((4, 1, 3), (2, 6, 1), (3, 2, 2)):
        saved = json.loads(json.dumps(dataclasses.asdict(got[-1][1])))
        got += read_steps(sources, weights, split, n=6, cursor=Cursor.from_json(saved))
    assert got == want[: len(got)]
    assert len(got) == 23


def test_other_weights_hold_from_a_resume_on(tmp_path) -> None:
    """Nothing makes up for what was drawn before, and no source repeats or skips a sample."""
    sources, weights = sources_of("mixture", tmp_path)
    cursor = read_steps(sources, weights, (2, 2, 3), 4)[-1][1]
    other, steps = [0.1, 0.1, 0.8], 6
    begin = dataclasses.replace(cursor, weighted_from=cursor.counts)
    runs = [read_steps(sources, other, split, steps, begin) for split in ((1, 4, 3), (4, 3, 1))]
    assert runs[0] == runs[1]
    for n, (_, after) in enumerate(runs[0], 1):
        for share, before, count in zip(other, cursor.counts, after.counts, strict=True):
            assert abs(count - before - share * 12 * n) < 1
    rows = [row for step, _ in runs[0] for row in step]
    samples = CachedSamples(sources[0].cache, LENGTH, seed=0)
    for index in range(cursor.counts[0], after.counts[0]):
        assert samples.read(index).tokens.tolist() in rows
    # and they hold after the next resume, too
    noted = Cursor.from_json(json.loads(json.dumps(dataclasses.asdict(runs[0][1][1]))))
    assert read_steps(sources, other, (2, 2, 3), steps - 2, noted) == runs[0][2:]


@pytest.mark.parametrize("kind", ["cached", "streamed", "mixture"])
def test_an_epoch_limit_ends_all_ranks_at_the_same_step(kind, tmp_path) -> None:
    sources, weights = sources_of(kind, tmp_path)
    want = read_steps(sources, weights, (1, 4, 1), n=100, max_epochs=2)
    assert 1 < len(want) < 99
    assert read_steps(sources, weights, (4, 1, 1), n=100, max_epochs=2) == want
    endless = read_steps(sources, weights, (1, 4, 1), n=len(want) + 1)
    assert endless[:-1] == want
    # a resume behind the last step finds nothing left
    assert read_steps(sources, weights, (2, 2, 1), 1, cursor=want[-1][1], max_epochs=2) == []


def test_an_epoch_limit_is_met_by_ranks_that_read_other_shards() -> None:
    source = streamed(("a" * 20, "b" * 100), num_shards=2, window=1)
    want = read_steps([source], [1], (1, 2, 1), n=50, max_epochs=1)
    assert 0 < len(want) < 50
    assert read_steps([source], [1], (2, 1, 1), n=50, max_epochs=1) == want


@pytest.mark.parametrize("weights", [[1.0], [0.5, 0.3, 0.2], [1.0, 7.0], [2.0, 1.0, 1.0, 5.0]])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_step_at_which_an_epoch_limit_ends_the_job_is_known(weights, batch, tmp_path) -> None:
    """Of a mixture, to within the draws between two of the source that ends it."""
    sources = [
        cached(tmp_path, LETTERS[: 2 + 3 * number], f"letters{number}")
        for number in range(len(weights))
    ]
    parts = [{"dataset": "text", "weight": weight} for weight in weights]
    config = JobConfig(
        training=Training(
            max_epochs=2,
            seq_len=LENGTH - 1,
            global_batch_size=batch,
            datasets=parts if len(parts) > 1 else [],
        )
    )
    known = steps_of_data(config, weighted(sources, weights))
    taken = len(read_steps(sources, weights, (1, batch, 1), n=1000, max_epochs=2))
    assert 0 < taken < 1000
    apart = math.ceil((sum(weights) / min(weights) + 1) / batch) if len(weights) > 1 else 0
    assert known - apart <= taken <= known
    # from a place in the data; and from one where the data, or its weights, begin
    mixed = weighted(sources, weights)
    order = SampleStream(mixed, Cursor(), SampleRules(LENGTH, 0, 2), batch=batch, slots=[])
    for _ in range(2 * batch):
        order.next_sample()
    at, start = order.cursor, Cursor()
    assert steps_of_data(config, mixed, 2, at) == known
    assert steps_of_data(config, mixed, 9, start) == 9 + known
    assert steps_of_data(config, mixed, 9, Cursor(1000)) == 9  # all is read
    again = dataclasses.replace(at, weighted_from=at.counts)
    left, order = 0, SampleStream(mixed, again, SampleRules(LENGTH, 0, 2), batch=batch, slots=[])
    with suppress(EndOfData):
        while order.next_sample() is None:
            left += 1
    assert 2 + left // batch <= steps_of_data(config, mixed, 2, again) <= 2 + left // batch + apart
    assert steps_of_data(config, [*sources[1:], streamed()]) == 0
    endless = config.model_copy(update={"training": Training(seq_len=LENGTH)})
    assert steps_of_data(endless, sources) == 0


def batches_of(source: OpenSource, mask_documents: bool) -> list[Batch]:
    rules = SampleRules(LENGTH, seed=0, max_epochs=1)
    order = SampleStream([source], Cursor(), rules, batch=4, slots=range(4))
    loader = Loader(order, 4, mask_documents=mask_documents, pin_memory=False)
    return [batch for data in loader for batch in data.batches]


def test_batches_of_a_mixture_tell_the_source_of_each_sequence(tmp_path) -> None:
    """Or the loss by source would be another source's; batches of one source tell none."""
    sources = weighted([cached(tmp_path / c, (c * 50,) * 9, c) for c in "abc"], [1, 2, 1])
    order = SampleStream(sources, Cursor(), SampleRules(LENGTH, 0), batch=8, slots=range(4))
    loader = Loader(order, 2, mask_documents=True, pin_memory=False)
    seen = Counter()
    for batch in (batch for _ in range(5) for batch in next(loader).batches):
        for tokens, source in zip(batch.tokens.tolist(), batch.sources.tolist(), strict=True):
            assert {*tokens} - {BOS, EOS} <= {ord("abc"[source])}
            seen[source] += 1
    assert seen.keys() == {0, 1, 2}
    loader.close()
    assert batches_of(sources[1], mask_documents=False)[0].sources is None


def test_loss_counts_on_every_token_of_a_text() -> None:
    """Its EOS included: a model that never learns to end would write on and on."""
    tokens = Encoder(ByteTokenizer(), Mock()).encode("some text")
    assert tokens.tolist() == encode("some text")


def test_labels_are_the_next_tokens_and_cross_no_masked_boundary(tmp_path) -> None:
    plain = batches_of(cached(tmp_path), mask_documents=False)
    masked = batches_of(cached(tmp_path), mask_documents=True)
    crossings = 0
    for want, got in zip(plain, masked, strict=True):
        assert want.documents is None
        assert torch.equal(want.tokens[:, 1:], want.labels[:, :-1])
        assert torch.equal(got.tokens, want.tokens)
        begins = want.labels == BOS
        assert torch.equal(got.labels, torch.where(begins, IGNORE, want.labels))
        crossings += int(begins.sum())
        number = (got.tokens == BOS).long()
        number[:, 0] = 0
        assert torch.equal(got.documents.long(), number.cumsum(1))
    assert crossings > 3
    assert any((batch.labels == EOS).any() for batch in masked)


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_padded_samples_are_the_same_samples_on_any_number_of_ranks(dp_size, tmp_path) -> None:
    """7 samples in steps of 4: the eighth has no label."""
    rows, labels = [], 0
    for rank in range(dp_size):
        local, rules = 4 // dp_size, SampleRules(LENGTH, seed=None)
        slots = slots_of(rank, dp_size, local, 4)
        order = SampleStream([cached(tmp_path)], Cursor(), rules, batch=4, slots=slots)
        padded = padded_samples(order, 7)
        steps = [to_batches(samples, local, False) for samples in padded]
        assert [[batch.tokens.shape for batch in step] for step in steps] == [
            [(4 // dp_size, LENGTH - 1)]
        ] * 2
        for step in steps:
            for batch in step:
                rows += batch.tokens[(batch.labels != IGNORE).all(1)].tolist()
                labels += int((batch.labels != IGNORE).sum())
    samples = CachedSamples(cached(tmp_path).cache, LENGTH, seed=None)
    assert sorted(rows) == sorted(samples.read(n).tokens[:-1].tolist() for n in range(7))
    assert labels == 7 * (LENGTH - 1)


@pytest.mark.parametrize("weights", [[1, 1], [0.75, 0.25], [0.9, 0.1]])
def test_a_stream_in_a_mixture_is_read_whole(weights, tmp_path) -> None:
    """Draws are periodic: by the job's number of the sample, some shards would never be read."""
    source = streamed(LETTERS, num_shards=8, window=2)
    letters = {ord(text[0]) for text in LETTERS}
    sources, rules = [cached(tmp_path), source], SampleRules(LENGTH, seed=0)
    order = SampleStream(weighted(sources, weights), Cursor(), rules, batch=8, slots=range(8))
    seen = set[int]()
    while order.epochs["stream"] < 1:
        seen |= set(order.next_sample().tokens.tolist())
    assert letters <= seen


@pytest.mark.parametrize(("num_ranks", "max_epochs"), [(1, 1), (4, 0), (4, 1)])
def test_what_each_rank_reads_whole_is_said(num_ranks, max_epochs, caplog) -> None:
    rules, slots = SampleRules(LENGTH, 0, max_epochs), range(8 // num_ranks)
    source = streamed(name=f"stream {num_ranks} {max_epochs}")  # a warning is given once
    SampleStream([source], Cursor(), rules, batch=8, slots=slots)
    said = f"each of {num_ranks} ranks reads and tokenizes it whole"
    assert (said in caplog.text) == (num_ranks > 1 and max_epochs > 0)


BAD = (3, 4, 11, 17)


def with_errors(texts: tuple[str, ...], bad: Collection[int]) -> Callable[[int], Item]:
    def get(index: int) -> Item:
        if index in bad:
            return RecordError("training.dataset_path", f"row {index} is bad")
        return texts[index]

    return get


@pytest.mark.parametrize("split", [(1, 12, 1), (2, 2, 3), (4, 3, 1)])
def test_records_are_passed_over_on_any_mesh_and_after_resumes(split) -> None:
    """As if they held no text, and counted once each epoch, whoever reads them."""
    source = streamed(LETTERS, num_shards=6, window=3, get=with_errors(LETTERS, BAD))
    blank = tuple("" if n in BAD else text for n, text in enumerate(LETTERS))
    want = [rows for rows, _ in read_steps([streamed(blank, 6, 3)], [1], (1, 12, 1), 18)]
    begin = Cursor(bad_records=5)  # of stages before
    first = read_steps([source], [1], (1, 12, 1), 18, begin, max_bad_records=100)
    assert [rows for rows, _ in first] == want
    counts = [bad_records(cursor) for _, cursor in first]
    assert counts == sorted(counts)
    assert counts[-1] > 5 + len(BAD)  # in the second epoch again
    got = read_steps([source], [1], split, 7, begin, max_bad_records=100)
    saved = json.loads(json.dumps(dataclasses.asdict(got[-1][1])))
    got += read_steps([source], [1], (2, 3, 2), 11, Cursor.from_json(saved), max_bad_records=100)
    assert [rows for rows, _ in got] == want
    assert [bad_records(cursor) for _, cursor in got] == counts


def test_no_more_records_are_passed_over_than_may_be(caplog) -> None:
    for allowed, error in ((4, None), (3, "is bad"), (0, "is bad")):
        source = streamed(LETTERS, num_shards=1, window=26, get=with_errors(LETTERS, BAD))
        order = on_one_rank(source, max_epochs=1, max_bad_records=allowed)
        samples = iter(order.next_sample, None)
        with pytest.raises(RecordError if error else EndOfData, match=error):
            list(samples)
        assert bad_records(order.cursor) == min(allowed, 4)
        numbers = [message.partition(":")[0] for message in caplog.messages]
        assert numbers == [f"skipped a record ({n + 1})" for n in range(allowed)]
        caplog.clear()


def test_shards_share_max_documents_and_bad_records_are_none_of_them() -> None:
    source = streamed(LETTERS, num_shards=2, window=26, get=with_errors(LETTERS, BAD))
    nine = source.entry.source.model_copy(update={"max_documents": 9})
    source = dataclasses.replace(source, entry=dataclasses.replace(source.entry, source=nine))
    samples, found = on_one_rank(source, 52, max_epochs=1, max_bad_records=9), list[int]()
    with pytest.raises(EndOfData):
        found.extend(int(sample.tokens[1]) for sample in iter(samples.next_sample, None))
    assert sorted(map(chr, found)) == [*"abcfgnopq"]  # 5 from the first shard, 4 from the second
    words = ["--training.dataset_mode=streamed", "--training.max_documents=3"]
    (source,) = open_data("training", load_config(["debug_model", *words]))
    assert source.num_shards == 3  # none has no document


def test_bad_records_of_a_shard_that_two_ranks_read_count_once(monkeypatch) -> None:
    places = {0: ShardPlace(bad_records=2), 1: ShardPlace(bad_records=3)}
    cursors = [Cursor(places={"stream": {0: places[0]}}), Cursor(places={"stream": places})]

    def gather(gathered: list, mine: object) -> None:
        gathered[:] = cursors

    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    assert bad_records(whole_cursor(cursors[0])) == 5


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    found = []
    monkeypatch.setattr("time.sleep", found.append)
    return found


def rows_of(failures: list[Exception]) -> list:
    """Rows of a shard whose sixth document fails with each of these, the last one first."""

    def get(index: int) -> str:
        if index == 5 and failures:
            raise failures.pop()
        return LETTERS[index]

    source = streamed(LETTERS, num_shards=1, window=4, get=get)
    return [rows for rows, _ in read_steps([source], [1], (1, 1, 1), 30)]


def test_what_may_pass_is_tried_again_from_its_place(waits) -> None:
    want, failures = rows_of([]), [OSError(116, "Stale file handle")] * 8
    with pytest.raises(
        StorageError, match="0 of 1 cannot be read: document 5 .* Stale file handle"
    ):
        rows_of(failures)
    assert waits == [1, 2, 4, 8, 16, 32]
    assert len(failures) == 1
    assert rows_of(failures) == want
    assert waits == [1, 2, 4, 8, 16, 32, 1]


def test_a_hub_that_does_not_answer_is_asked_again(waits) -> None:
    want, failures = rows_of([]), [FileNotFoundError("no data files")] * 2
    failures[0].__context__ = ConnectionError("connection reset")
    assert rows_of(failures) == want
    assert waits == [1, 2]


class Panic(BaseException):
    """As Rust's, which is no `Exception`."""


@pytest.mark.parametrize("end", [Panic("index out of range"), SystemExit(3)])
def test_whatever_ends_the_thread_that_reads_is_said(end: BaseException) -> None:
    source = streamed(("abcdef",) * 6, num_shards=1, window=1)
    order = on_one_rank(dataclasses.replace(source, encoder=Mock(encode=Mock(side_effect=end))))
    loader = Loader(order, 1, mask_documents=False, pin_memory=False)
    waiting = threading.Thread(target=loader.fetch, args=(9,), daemon=True)
    waiting.start()
    waiting.join(10)
    assert not waiting.is_alive()
    assert isinstance(loader.error, DataError)
    assert f"ended: {type(end).__name__}: {end}" in str(loader.error)


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (Panic("index 3"), RecordError, "fails on a text that starts with 'ab': Panic"),
        (StopRequested("SIGTERM"), StopRequested, "SIGTERM"),
    ],
)
def test_a_panic_of_a_tokenizer_is_a_bad_record_but_no_request_to_stop(
    error, kind, says, monkeypatch
) -> None:
    monkeypatch.setattr(ByteTokenizer, "encode", Mock(side_effect=error))
    with pytest.raises(kind, match=says):
        Encoder(ByteTokenizer(), Mock()).encode("ab")


def test_steps_before_an_error_are_handed_out() -> None:
    """Though they are read ahead."""
    texts = ("abcdef",) * 6
    source = streamed(texts, num_shards=1, window=1, get=with_errors(texts, [3]))
    loader = Loader(on_one_rank(source), 1, mask_documents=False, pin_memory=False)
    assert loader.fetch(2) == 2
    next(loader)
    assert loader.error is None
    assert loader.fetch(5) == 2
    assert str(loader.error) == "row 3 is bad"
    next(loader), next(loader)
    with pytest.raises(RecordError, match="row 3 is bad"):
        next(loader)
