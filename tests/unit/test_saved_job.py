import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.config.changes import to_json
from meshwright.config.job_config import Checkpoint
from meshwright.config.loader import load_config
from meshwright.datasets.identity import SourceFacts
from meshwright.datasets.opening import open_data
from meshwright.datasets.shards import StreamedSource
from meshwright.datasets.sources import DATASETS
from meshwright.datasets.stream import Cursor
from meshwright.metrics.observers import Observer
from meshwright.system.errors import ConfigError
from meshwright.system.modules import code_of, import_user_module
from meshwright.train.best_validation import BestValidation, best_of
from meshwright.train.build_observers import load_observers
from meshwright.train.resolve import ResolvedJob
from meshwright.train.resume import manifest_of, place_in_data
from tests.helpers.checkpoints import BARE, publish
from tests.helpers.cli import command
from tests.helpers.resolved import resolved
from tests.helpers.texts import OWN_DATASET
from tests.helpers.tokenizer_files import byte_level_json

OLD, NEW = "1" * 40, "2" * 40
FORGOTTEN = (
    "the best validation loss so far, 3.5000 at step 20, no longer counts: it was measured with "
    "other "
)

BYTES = ("--model.tokenizer_path", "bytes")


def opened(*words: str) -> StreamedSource:
    base = ["--training.dataset_mode", "streamed", "--training.seq_len", "8"]
    (source,) = open_data("training", load_config([*base, *words]))
    return source


def place_of(source: StreamedSource, content: str, **more: object) -> Cursor:
    """Where a job resumes that was saved with `content`."""
    plan = SimpleNamespace(
        config=SimpleNamespace(
            checkpoint=Checkpoint(), training=SimpleNamespace(max_bad_records=0)
        ),
        begins_stage_with=lambda saved: False,
        resume_diff=SimpleNamespace(is_reweighted=False),
    )
    data = {"sample": 3, "counts": [3], "places": {}}
    saved = BARE | {"data_content": {source.entry.name: content}, "data": data} | more
    return place_in_data(plan, saved, [source])


def check_is_noticed(source: StreamedSource, before: str, fix: str = "fix: ", **more: str) -> None:
    with pytest.raises(ConfigError, match=f"its content is not what it was(.|\n)*{fix}"):
        place_of(source, before, **more)


def test_a_dataset_that_has_changed_names_the_commit_to_pin(tmp_path: Path) -> None:
    source = opened(*BYTES, *lines(tmp_path))
    source = replace(source, facts=SourceFacts(commit=NEW))
    pin = f"fix: set training.dataset_revision = '{OLD}'; or restore"
    for revision, fix in ((OLD, pin), (NEW, "fix: restore"), ("", "fix: restore")):
        revisions = {source.entry.name: revision}
        check_is_noticed(source, "old", fix, data_revisions=revisions)


def noted(
    plan: ResolvedJob,
    held_out: Sequence[StreamedSource] = (),
    best: tuple[int, float] | None = None,
) -> dict[str, Any]:
    """A manifest."""
    facts = {"step": 1, "tokens_seen": 0, "cursor": Cursor(), "loss": 1.0}
    validation = BestValidation(plan.config.checkpoint)
    validation.load_state_dict(best)
    observers = {"best_validation": validation}
    return {"bad_steps": {}, **manifest_of(plan, [], held_out, observers=observers, **facts)}


def test_the_code_that_runs_is_noted_not_the_file_of_today(tmp_path) -> None:
    module = tmp_path / "own.py"
    module.write_text("SINKS = {}")
    own = ("--experimental.custom_import", str(module))
    plan = resolved(load_config([*BYTES, "--training.local_batch_size=2", *own]), 1)
    before = code_of(str(module))
    module.write_text("raise RuntimeError")
    assert noted(plan)["own_code"] == before


def lines(folder: Path, text: str = "a document") -> tuple[str, ...]:
    (folder / "data.jsonl").write_text(json.dumps({"text": text}) + "\n")
    return ("--training.dataset", "json", "--training.dataset_path", str(folder / "data.jsonl"))


def test_other_data_is_refused_before_ranks_start(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("meshwright.commands.train.exit_when_asked", lambda: None)
    monkeypatch.setattr("os.execv", lambda *_: pytest.fail("ranks start"))
    words = [*BYTES, *lines(tmp_path, "a document " * 99), "--training.seq_len=8", "--ngpu=1"]
    words += ["--checkpoint.enable", "--training.global_batch_size=8"]
    words += [f"--training.token_cache_folder={tmp_path}/caches", f"--job.dump_folder={tmp_path}"]
    plan = resolved(load_config([word for word in words if word != "--ngpu=1"]), 1)
    saved = noted(plan) | {"data_content": {"json": "other"}}
    publish(tmp_path / "checkpoint", saved.pop("step"), **saved)
    with pytest.raises(ConfigError, match="its content is not what it was"):
        command("train")(words)


def test_a_stream_of_own_code_that_has_changed_is_other_data(tmp_path, monkeypatch) -> None:
    module = tmp_path / "own.py"
    module.write_text(OWN_DATASET.format("the text before"))
    monkeypatch.setitem(DATASETS, "own", import_user_module(str(module)).DATASETS["own"])
    words = (*BYTES, "--training.dataset", "own")
    words += ("--experimental.custom_import", str(module))
    source = opened(*words)
    assert place_of(source, source.content).sample == 3
    module.write_text(OWN_DATASET.format("the text after"))
    check_is_noticed(opened(*words), source.content)


def test_a_stream_with_another_chat_template_or_eos_is_other_data(tmp_path: Path) -> None:
    tokenizer = byte_level_json(tmp_path / "tokenizer.json", ["<bos>", "<eos>", "<end>"])
    beside = tmp_path / "tokenizer_config.json"
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": "{{ messages }}"}
    words = ("--model.tokenizer_path", str(tokenizer), *lines(tmp_path))
    beside.write_text(json.dumps(names))
    source = opened(*words)
    assert place_of(opened(*words), source.content).sample == 3
    check_is_noticed(opened(*words, "--model.eos_token=<end>"), source.content)
    beside.write_text(json.dumps(names | {"chat_template": "{{ messages[0] }}"}))
    check_is_noticed(opened(*words), source.content)


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["--validation.freq=7", "--job.description=b", "--training.local_batch_size=4"], ""),
        (["--validation.num_samples=4", "--validation.freq=7"], "validation.num_samples"),
        (["--training.seq_len=32"], "training.seq_len"),
        (
            ['--validation.datasets=[{dataset = "sympy_source"}]', "--validation.dataset="],
            "validation.dataset, validation.datasets",
        ),
    ],
)
def test_the_best_validation_counts_as_long_as_the_data_is_the_same(words, keys, caplog) -> None:
    caplog.set_level("INFO", "meshwright")

    def plan_of(*more: str):
        base = ["--model.tokenizer_path=bytes", "--validation.enable=true"]
        return resolved(load_config([*base, *more]), 1)

    saved, here = plan_of("--training.local_batch_size=2"), plan_of(*words)
    manifest = BARE | {
        "best_validation": [20, 3.5],
        "config": to_json(saved.config),
        "data_identity": saved.data_identity,
    }
    assert best_of(manifest, saved, []) == (20, 3.5)
    assert best_of(manifest, here, []) == (None if keys else (20, 3.5))
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [FORGOTTEN + keys] * bool(keys)
    manifest["data_identity"] = saved.data_identity | {"model.tokenizer_path": "another's"}
    assert best_of(manifest, saved, []) is None


def test_the_best_validation_counts_as_long_as_its_texts_are_the_same(tmp_path, caplog) -> None:
    caplog.set_level("INFO", "meshwright")
    plan = resolved(load_config([*BYTES, "--training.local_batch_size=2"]), 1)
    before, after = (opened(*BYTES, *lines(tmp_path, text)) for text in ("one text", "another"))
    saved = noted(plan, [before], best=(20, 3.5))
    assert best_of(saved, plan, [before]) == (20, 3.5)
    assert best_of(saved, plan, [after]) is None
    more = replace(after, entry=replace(after.entry, name="more"))
    assert best_of(saved, plan, [before, more]) is None
    said = [r.getMessage() for r in caplog.records]
    assert said.count(FORGOTTEN + "content of the validation data") == 2
    assert best_of(saved, plan, []) == (20, 3.5)  # it is not validated now


def test_an_observer_gets_the_state_that_a_checkpoint_has_under_its_name() -> None:
    class Counter(Observer):
        count = 0

        def load_state_dict(self, state: int) -> None:
            self.count = state

    old, new, without = Counter(), Counter(), Counter()
    saved = {"old": 3, "without": None, "step": 10}
    load_observers({"old": old, "new": new, "without": without}, saved)
    assert [one.count for one in (old, new, without)] == [3, 0, 0]
