"""`checkpoint.rewind_to` and `training.exclude`: back before a spike, and on without its cause."""

import json
from pathlib import Path

import numpy as np
import pytest

from meshwright.commands.train import _open_data
from meshwright.config.loader import load_config
from meshwright.datasets.encoding import NO_LOSS
from meshwright.datasets.excluded import find_excluded
from meshwright.datasets.opening import open_data
from meshwright.datasets.samples import Sample, SampleRules
from meshwright.datasets.stream import Cursor, SampleStream
from meshwright.system.errors import ConfigError
from meshwright.train.facts import look, look_at_files
from meshwright.train.resolve import resolve
from tests.helpers.jobs import CONFIG, losses, records, train_alone, train_on_ranks

OVERRIDES = ["--training.seq_len=64", "--training.global_batch_size=8"]


def _opened(*words: str) -> tuple:
    config = load_config([str(CONFIG), *OVERRIDES, *words])
    return config, open_data("training", config)


def _samples(config, sources, exclude: list[str], count: int) -> list:
    training = config.training
    rules = SampleRules(training.seq_len + 1, training.seed)
    excluded = find_excluded(exclude, sources)
    slots = range(count)
    stream = SampleStream(sources, Cursor(), rules, batch=count, slots=slots, excluded=excluded)
    return [stream.next_sample() for _ in range(count)]


def _is_marked(sample: Sample) -> np.ndarray:
    return sample.raw.astype(np.uint32) & np.uint32(NO_LOSS) > 0


@pytest.mark.parametrize("packing", ["cut", "best_fit"])
def test_exactly_the_tokens_of_the_document_are_no_targets(packing: str) -> None:
    config, (source,) = _opened(f"--training.packing={packing}")
    samples = source.samples(SampleRules(65, config.training.seed))
    owners = [
        [
            source.cache.document_at(at).number
            for begin, end in samples.ranges(index)
            for at in range(begin, end)
        ]
        for index in range(200)
    ]
    number = owners[7][0]
    before = _samples(config, [source], [], 200)
    after = _samples(config, [source], [f"sympy_source document {number}"], 200)
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        assert np.array_equal(old.tokens, new.tokens)
        is_new_mark = _is_marked(new) & ~_is_marked(old)
        wanted = [owner == number for owner in owners[index]]
        assert is_new_mark[: len(wanted)].tolist() == wanted
        assert not is_new_mark[len(wanted) :].any()
    assert any(_is_marked(new).any() for new in after)


def test_excluded_samples_have_no_targets_in_any_source() -> None:
    for mode in ("cached", "streamed"):
        config, sources = _opened(f"--training.dataset_mode={mode}")
        found = _samples(config, sources, ["sympy_source sample 3-4"], 8)
        marked = [bool(_is_marked(sample).all()) for sample in found]
        assert marked == [index in (3, 4) for index in range(8)]


@pytest.mark.parametrize(
    ("entry", "mode", "message"),
    [
        (
            "sympy_source",
            "cached",
            r"^training.exclude.0 = .*then document or sample, then numbers",
        ),
        (
            "other document 1",
            "cached",
            "no source is called other\n  fix: name one of sympy_source",
        ),
        ("sympy_source document 999999", "cached", "the source has [0-9,]+ documents, from 0 on"),
        ("sympy_source document 5-4", "cached", "the last number is before the first"),
        ("sympy_source document 5", "streamed", "is streamed, so its documents have no numbers"),
    ],
)
def test_what_excludes_nothing_is_an_error(entry: str, mode: str, message: str) -> None:
    _, sources = _opened(f"--training.dataset_mode={mode}")
    with pytest.raises(ConfigError, match=message):
        find_excluded([entry], sources, are_all=True)


def test_a_later_stage_may_have_other_sources() -> None:
    """Those of the stage that is over aren't there when the job resumes, and nothing is wrong."""
    stages = '[{until_tokens=1024}, {datasets=[{name="b", dataset="sympy_source", weight=1}]}]'
    words = [f"--training.stages={stages}", '--training.exclude=["sympy_source sample 3"]']
    config = load_config([str(CONFIG), *OVERRIDES, *words])
    later = resolve(config, look_at_files(config, look(config, 1))).next_stage
    assert later is not None
    assert [source.entry.name for source in _open_data(later)] == ["b"]
    config = load_config([str(CONFIG), *OVERRIDES, words[1].replace("sympy", "simpy")])
    with pytest.raises(ConfigError, match="no source is called simpy_source"):
        _open_data(resolve(config, look_at_files(config, look(config, 1))))


def test_a_run_goes_back_once_and_on_without_the_samples_on_any_mesh(tmp_path: Path) -> None:
    """Steps before the first excluded sample stay; a restart goes on, and doesn't go back again."""
    keep = ["--checkpoint.keep_latest_k", 0]
    train_on_ranks(tmp_path, *keep, "--training.steps", 12)
    first = losses(tmp_path)
    exclude = ["--training.exclude", '["sympy_source sample 56-71"]']  # all of steps 8 and 9
    back = [*keep, "--checkpoint.rewind_to", 7, *exclude]
    train_alone(tmp_path, *back, "--training.steps", 12)
    second = losses(tmp_path)
    assert [row["step"] for row in records(tmp_path, "history") if row["event"] == "start"] == [
        0,
        5,
    ]
    assert records(tmp_path, "history")[-2]["config"]["training"]["exclude"]
    asides = sorted(path.name for path in (tmp_path / "checkpoint").glob("*.aside*"))
    assert asides == ["step-10.aside0", "step-12.aside0"]
    for step in (1, 2, 3, 4, 5):
        assert second[step] == first[step]
    for step in (6, 7):
        assert second[step] == pytest.approx(first[step], rel=1e-5)
    assert [second[step][0] for step in (8, 9)] == [None, None]  # no label is left
    assert not (tmp_path / "skipped_steps.jsonl").exists()
    assert second[10][0] != pytest.approx(first[10][0], rel=1e-5)
    again = train_on_ranks(tmp_path, *back, "--training.steps", 14)  # as a scheduler's restart
    assert "rewind_to = 7: this run went back already, and continues" in again.stdout
    starts = [row["step"] for row in records(tmp_path, "history") if row["event"] == "start"]
    assert starts == [0, 5, 12]
    assert {step: losses(tmp_path)[step] for step in second} == second
    ended = train_alone(tmp_path, *back, "--training.steps", 14)
    assert "nothing to do" in ended.stdout
    assert "went back already; to go back again, name another step" in ended.stdout
    done = train_alone(tmp_path, *keep, "--checkpoint.rewind_to", 2, code=2)
    assert "checkpoint.rewind_to = 2: no checkpoint in" in done.stderr
    assert "fix: name a later step" in done.stderr
    done = train_alone(tmp_path / "new", *keep, "--checkpoint.rewind_to", 2, code=2)
    assert "fix: leave it out" in done.stderr


def test_half_a_batch_is_the_mean_of_the_rest(tmp_path: Path) -> None:
    """The labels that are left count fully, on one rank and on two."""
    words = ["--training.steps", 1, "--training.exclude", '["sympy_source sample 0-3"]']
    train_alone(tmp_path / "one", *words)
    train_on_ranks(tmp_path / "two", *words)
    train_alone(tmp_path / "all", "--training.steps", 1)
    one, two, every = (losses(tmp_path / name)[1] for name in ("one", "two", "all"))
    assert one == pytest.approx(two, rel=1e-5)
    assert one[0] == pytest.approx(every[0], rel=0.05)
    assert one[1] > 1.1 * every[1]  # of half as many sequences, so noisier
    assert json.loads((tmp_path / "one/history.jsonl").read_text().splitlines()[0])["step"] == 0


def test_a_step_whose_targets_are_all_excluded_leaves_the_weights(tmp_path: Path) -> None:
    """It isn't a bad step, of which the default allows none."""
    words = ["--training.steps", 2, "--training.exclude", '["sympy_source sample 0-7"]']
    train_on_ranks(tmp_path, *words)
    before, empty, after = records(tmp_path, "steps")
    assert empty["loss"] is None
    assert (empty["weights"], empty["step"]) == (before["weights"], 1)
    assert after["weights"] != before["weights"]
    assert not (tmp_path / "skipped_steps.jsonl").exists()
