"""[[training.stages]]: one config per stage, its errors, and the place in the data at its start."""

import json
import os
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.commands.options import of_stage
from meshwright.config.changes import changed, changes, config_defaults, to_json
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.config.stages import staged
from meshwright.datasets.cached_source import CachedSource
from meshwright.datasets.opening import open_data
from meshwright.datasets.shards import ShardPlace
from meshwright.datasets.stream import Cursor
from meshwright.system.errors import ConfigError
from meshwright.system.processes import Launch
from meshwright.train import announce
from meshwright.train.resolve import ResolvedJob
from meshwright.train.resume import place_in_data
from tests.helpers.cli import command
from tests.helpers.resolved import resolved, resolved_on_rank
from tests.helpers.texts import TEXTS, cached, weighted

TOML = """
[job]
dump_folder = "{folder}/out"

[model]
args = {{ dim = 16, n_layers = 1, n_heads = 2, n_kv_heads = 2, hidden_dim = 16, vocab_size = 258 }}
tokenizer_path = "bytes"

[training]
seq_len = 16
local_batch_size = 2
global_batch_size = 8
steps = 24
{training}

[checkpoint]
enable = true
last_save_in_hf = true

{stages}
"""

SOURCES = """
[[training.datasets]]
name = "a"
weight = 3
[[training.datasets]]
name = "b"
weight = 1
"""

THREE = """
[[training.stages]]
until_tokens = 1000
[[training.stages]]
until_tokens = 3072
weights = { a = 1, b = 4 }
global_batch_size = 16
lr = 4e-4
[[training.stages]]
seq_len = 32
global_batch_size = 4
decay_type = "cosine"
[[training.stages.datasets]]
name = "c"
weight = 1
"""


def config_of(folder: Path, stages: str = THREE, training: str = "", sources: str = SOURCES):
    path = folder / "config.toml"
    path.write_text(TOML.format(folder=folder, training=training, stages=sources + stages))
    return load_config(["--job.config_file", str(path)])


def test_each_stage_is_a_config(tmp_path) -> None:
    config = config_of(tmp_path)
    first, second, third = staged(config)
    # 128 tokens per step: the 8th is the first that reaches 1000; then 256 per step, from 1024 on
    assert [one.training.steps for one in (first, second, third)] == [8, 16, 24]
    plain = config_of(tmp_path, "")
    of_stage = {"training.stages", "lr_scheduler.total_steps", "checkpoint.last_save_in_hf"}

    def differ(one: JobConfig) -> dict[str, object]:
        found = changes(to_json(plain), to_json(one), config_defaults())
        return {key: new for key, _, new in found if key not in of_stage}

    assert differ(first) == {"training.steps": 8}
    assert differ(second) == {
        "training.steps": 16,
        "training.datasets.0.weight": 1,
        "training.datasets.1.weight": 4,
        "training.global_batch_size": 16,
        "optimizer.lr": 4e-4,
    }
    assert third.training.dataset == ""
    assert [source.name for source in third.training.datasets] == ["c"]
    assert (third.training.seq_len, third.training.global_batch_size) == (32, 4)
    assert third.lr_scheduler.decay_type == "cosine"
    # the end of a stage is not the end of the schedule, nor of the job
    assert {one.lr_scheduler.total_steps for one in (first, second, third)} == {24}
    ends = [one.checkpoint.last_save_in_hf for one in (first, second, third)]
    assert ends == [False, False, True]
    assert staged(plain) == [plain]


@pytest.mark.parametrize(
    ("stages", "training", "key", "words"),
    [
        ("[[training.stages]]\n[[training.stages]]", "", "0.until_tokens", "fix: give it"),
        ("[[training.stages]]\nuntil_tokens = 9", "", "0.until_tokens", "fix: leave it out"),
        (THREE.replace("3072", "1024"), "", "1.until_tokens", "fix: set it to more than 1024"),
        (THREE, "max_epochs = 2", "training.max_epochs", "fix: leave it out"),
        (THREE.replace("b = 4", "z = 4"), "", "1.weights", "name one of a, b"),
        (THREE.replace("= 3072", "= 30720"), "", "steps", "more than 124"),
    ],
)
def test_stages_that_cannot_follow_each_other_are_refused(
    stages: str, training: str, key: str, words: str, tmp_path
) -> None:
    with pytest.raises(ConfigError) as caught:
        staged(config_of(tmp_path, stages, training))
    assert caught.value.key.endswith(key)
    assert words in str(caught.value)


def test_a_job_with_stages_saves_and_has_a_batch_and_no_budgets(tmp_path) -> None:
    config = config_of(tmp_path)
    tokens = SOURCES.replace("weight = 1\n", "tokens = 9\n")
    for wrong, key in (
        (changed(config, {"checkpoint": {"enable": False}}), "training.stages"),
        (changed(config, {"training": {"global_batch_size": -1}}), "training.global_batch_size"),
        (config_of(tmp_path, sources=tokens), "training.stages"),
    ):
        with pytest.raises(ConfigError) as caught:
            staged(wrong)
        assert caught.value.key == key


def test_an_error_names_the_stage_and_its_key(tmp_path) -> None:
    stages = THREE.replace("weights = { a = 1, b = 4 }\n", "")
    for good, bad, key in (
        ('name = "c"', 'dataset = "no"', "2.datasets.0.dataset"),
        ("size = 16", "size = 15", "1.global_batch_size"),
    ):
        with pytest.raises(ConfigError) as caught:
            resolved(config_of(tmp_path, stages.replace(good, bad), sources=""), 1)
        assert caught.value.key == f"training.stages.{key}"
        assert str(caught.value).startswith(f"training.stages.{key} = ")


MORE = THREE.replace("seq_len = 32\n", "").replace(
    'name = "c"\nweight = 1',
    'name = "b"\nweight = 1\n[[training.stages.datasets]]\nname = "c"\nweight = 1',
)


def saved_by(plan: ResolvedJob, sources: list[CachedSource], cursor: Cursor) -> Any:
    """The parts of its manifest that concern the place in the data."""
    return {
        "step": plan.config.training.steps,
        "stage": plan.stage_number,
        "data": asdict(cursor),
        "data_identity": plan.data_identity,
        "data_content": {source.entry.name: source.content for source in sources},
        "data_revisions": {},
        "config": to_json(plan.config),
    }


def test_a_source_continues_in_the_next_stage(tmp_path) -> None:
    plans = resolved_on_rank(config_of(tmp_path, MORE), 1).training_stages
    a, b, c = (cached(tmp_path, (*TEXTS, name), name) for name in "abc")
    at = Cursor(sample=64, counts=(48, 16))
    # other weights hold from here on
    found = place_in_data(plans[1], saved_by(plans[0], [a, b], at), [a, b])
    assert found == Cursor(64, (48, 16), {}, weighted_from=(48, 16))
    # the third stage has b and c; their samples alone count, by which ranks read a streamed one
    found = place_in_data(plans[2], saved_by(plans[1], [a, b], at), [b, c])
    assert found == Cursor(16, (16, 0), {}, weighted_from=(16, 0))
    # a source of that name with other text is another
    other = cached(tmp_path, TEXTS[1:], "b")
    found = place_in_data(plans[2], saved_by(plans[1], [a, other], at), [b, c])
    assert found.counts == (0, 0)
    # records that were passed over count in the whole job
    shards = {name: {0: ShardPlace(bad_records=count)} for name, count in (("a", 2), ("b", 3))}
    saved = saved_by(plans[1], [a, b], Cursor(64, (48, 16), shards, bad_records=1))
    found = place_in_data(plans[2], saved, [b, c])
    assert (found.bad_records, found.places) == (1 + 2, {"b": shards["b"]})
    # data that stays goes on as if there were no stage, but with another length from the start
    at = Cursor(64, (48, 16), shards, weighted_from=(1, 2))
    for change, want in (("lr = 1e-3", at), ("seq_len = 32", Cursor(bad_records=2 + 3))):
        stages = f"[[training.stages]]\nuntil_tokens = 1000\n[[training.stages]]\n{change}"
        plans = resolved_on_rank(config_of(tmp_path, stages), 1).training_stages
        assert place_in_data(plans[1], saved_by(plans[0], [a, b], at), [a, b]) == want


def test_a_stage_tells_other_files_from_files_that_have_changed(tmp_path) -> None:
    """Both under the name of a source of the stage before."""
    rows = "[[{}datasets]]\nname = 'x'\ndataset = 'json'\ndataset_path = '{}.jsonl'\nweight = 1\n"
    stages = "[[training.stages]]\nuntil_tokens = 1000\n[[training.stages]]\nlr = 1e-3\n"
    training = f'token_cache_folder = "{tmp_path}/caches"'

    def opened(name: str, text: str) -> tuple[ResolvedJob, Any, list[Any]]:
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}))
        sources = rows.format("training.", "a") + stages + rows.format("training.stages.", name)
        first, second = resolved(config_of(tmp_path, "", training, sources), 1).training_stages
        assert first.data_identity == second.data_identity
        saved = saved_by(first, open_data("training", first.config), Cursor(64, (64,)))
        return second, saved, open_data("training", second.config)

    second, saved, sources = opened("a", "one " * 50)
    assert place_in_data(second, saved, sources) == Cursor(64, (64,))
    assert place_in_data(*opened("b", "two " * 50)) == Cursor(0, (0,), {}, weighted_from=(0,))
    second, _, sources = opened("a", "three " * 50)
    with pytest.raises(ConfigError, match="its content is not what it was"):
        place_in_data(second, saved, sources)


def test_the_stage_follows_from_the_step_or_is_asked_for(tmp_path) -> None:
    plan = resolved_on_rank(config_of(tmp_path), 1)
    assert [one.starts_after for one in plan.training_stages] == [0, 8, 16]
    assert [plan.stage_at(step).stage_number for step in (0, 7, 8, 15, 16, 24)] == [
        1,
        1,
        2,
        2,
        3,
        3,
    ]
    assert of_stage(plan.written, 2) == staged(plan.written)[1]
    with pytest.raises(ConfigError, match="the job has 3 stages"):
        of_stage(plan.written, 4)
    assert of_stage(config_of(tmp_path, ""), 1).training.steps == 24


def test_a_checkpoint_of_a_stage_that_has_moved_is_refused(tmp_path) -> None:
    second = resolved_on_rank(config_of(tmp_path), 1).training_stages[1]
    for step, stage, begins in ((8, 1, True), (9, 2, False), (8, 2, False)):
        assert second.begins_stage_with({"step": step, "stage": stage}) is begins
    for step, stage in ((10, 1), (8, 3)):
        with pytest.raises(ConfigError, match="ends that they had"):
            second.begins_stage_with({"step": step, "stage": stage})


def test_a_warmup_may_end_in_a_later_stage(tmp_path) -> None:
    own = THREE.replace("decay_type", "warmup_steps = 30\ndecay_type")  # the first two reach it
    for warmup, stages, is_idle in ((20, THREE, False), (30, THREE, True), (0, own, False)):
        job = config_of(tmp_path, stages)
        config = changed(job, {"lr_scheduler": {"warmup_steps": warmup}})
        notes = resolved_on_rank(config, 1).notes
        assert any("is never reached" in note for note in notes) == is_idle


def test_an_option_that_one_stage_uses_has_an_effect(tmp_path) -> None:
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n')
    rows = 'dataset = "json"\ndataset_path = "c.jsonl"\ndataset_mode = "{}"\nweight = 1\n'
    training = f'token_cache_folder = "{tmp_path}"'
    for mode, is_idle in (("cached", False), ("streamed", True)):
        stages = "[[training.stages]]\nuntil_tokens = 1000\n[[training.stages]]\n"
        stages += "[[training.stages.datasets]]\n" + rows.format(mode)
        sources = "[[training.datasets]]\n" + rows.format("streamed")
        config = config_of(tmp_path, stages, training, sources)
        config = changed(config, {"validation": {"enable": False}})
        plan = resolved(config, 1)
        assert any("token_cache_folder" in note for note in plan.notes) == is_idle
        assert plan.written == config


def test_check_looks_at_every_stage(tmp_path, capsys) -> None:
    config_of(tmp_path)
    command("check")([tmp_path / "config.toml", "--ngpu", "2"])
    printed = capsys.readouterr().out
    assert "stage 1 to step 8" in printed
    assert "stage 3 to step 24" in printed
    assert "8 steps of 128 tokens, stage 3" in printed
    path = tmp_path / "config.toml"
    path.write_text(path.read_text().replace("seq_len = 32", "local_batch_size = 3"))
    with pytest.raises(ConfigError, match="toml:[0-9]*: training.stages.2.global_batch_size = 4: "):
        command("plan")([path, "--stage", "3", "--world-size", "1", "--device", "cpu"])
    path.write_text(re.sub("until_tokens = .*", "", path.read_text()))  # a fault of no stage alone
    for stage in "3", "9":
        with pytest.raises(ConfigError, match=r"toml:\d+: training.stages.0.until_tokens: "):
            command("plan")([path, "--stage", stage, "--world-size", "1", "--device", "cpu"])


def test_held_out_documents_of_every_stage_are_tokenised_ahead(tmp_path, monkeypatch) -> None:
    for name in "ab":
        texts = [" ".join([name, *TEXTS, str(number)]) for number in range(40)]
        rows = [json.dumps({"text": text}) + "\n" for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    rows = 'dataset = "json"\ndataset_path = "{}.jsonl"\nweight = 1\n'
    stages = "[[training.stages]]\nuntil_tokens = 1000\n[[training.stages]]\n"
    stages += f"[[training.stages.datasets]]\n{rows.format('b')}[validation]\nenable = true\n"
    training = f'validation_fraction = 0.3\ntoken_cache_folder = "{tmp_path}/caches"'
    config_of(tmp_path, stages, training, f"[[training.datasets]]\n{rows.format('a')}")
    command("tokenize")([tmp_path / "config.toml", "--workers", "1"])
    assert len([*(tmp_path / "caches").iterdir()]) == 4
    shutil.rmtree(tmp_path / "caches")
    monkeypatch.setattr("os.environ", dict(os.environ))
    monkeypatch.setattr("meshwright.commands.train.exit_when_asked", lambda: None)
    monkeypatch.setattr("os.execv", lambda *_: None)  # ranks, which would make what is not there
    monkeypatch.setattr("signal.pthread_sigmask", lambda *_: None)  # other tests' would stay held
    command("train")([tmp_path / "config.toml", "--ngpu", "1"])
    assert len([*(tmp_path / "caches").iterdir()]) == 4


def test_a_stage_says_its_own_steps_and_how_often_it_reads_its_data(
    tmp_path, caplog, monkeypatch
) -> None:
    caplog.set_level("INFO", "meshwright")
    ranks = SimpleNamespace(get_rank=lambda: 1, get_world_size=lambda: 1)
    monkeypatch.setattr(announce, "dist", ranks)
    sources = weighted([cached(tmp_path, (*TEXTS, name), name) for name in "ab"], (1, 4))
    second = resolved_on_rank(config_of(tmp_path), 1).training_stages[1]
    announce.announce(replace(second, resume_step=8), torch.device("cpu"), Launch(), sources)
    assert "stage 2 of 3: steps 9 to 16 of 24; the eta is its own" in caplog.messages
    each = zip((1 / 5, 4 / 5), sources, strict=True)
    reads = [8 * 16 * share / source.samples_per_epoch(17) for share, source in each]
    epochs = " to ".join(f"{count:.3g}" for count in sorted(reads))
    assert f"to train: 2,048 tokens in 8 steps of 16, {epochs} epochs" in caplog.messages


def test_an_error_in_the_data_of_a_stage_names_its_line(tmp_path) -> None:
    data = '[[training.stages.datasets]]\nname = "a"\n'
    stage = "[[training.stages]]\n"
    toml = tmp_path / "a.toml"
    toml.write_text(f"{stage}until_tokens = 9\n{data}{stage}{data}{data}weigh = 1\n")
    with pytest.raises(ConfigError, match=r"a.toml:10: unknown key training.stages.1.datasets.1.w"):
        load_config([str(toml)])
