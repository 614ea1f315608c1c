"""The config on the console, in few lines; the record of a job's processes, and its end there."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from meshwright.config.loader import load_config
from meshwright.datasets.opening import open_data
from meshwright.datasets.stream import steps_of_data
from meshwright.metrics import sinks
from meshwright.metrics.report.run import read_run
from meshwright.metrics.sinks import HISTORY, note_event, note_missing_end, set_aside_run
from meshwright.system.log import log_to_console
from meshwright.system.processes import Launch
from meshwright.train import announce, start_facts
from meshwright.train.announce import announce_end, note_failure
from tests.helpers.files import no_room
from tests.helpers.resolved import resolved


@pytest.mark.parametrize(
    ("rank", "noted"), [(0, [(7, "failed: bad"), (4, "failed: KeyError")]), (1, [])]
)
def test_an_error_that_ends_a_job_is_noted_once(rank, noted, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(announce, "dist", SimpleNamespace(get_rank=lambda: rank))
    job = SimpleNamespace(dump_folder=str(tmp_path))
    plan = SimpleNamespace(config=SimpleNamespace(job=job), resume_step=4)
    for error, step in ((ValueError("bad\nand more"), 7), (KeyError(), 0)):
        with pytest.raises(type(error)), note_failure(plan, lambda step=step: step):
            raise error
    with note_failure(plan, lambda: 9):
        pass
    file = tmp_path / HISTORY
    events = map(json.loads, file.read_text().splitlines() if file.exists() else [])
    assert [(event["step"], event["reason"]) for event in events] == noted


END_WORDS = ["--model.tokenizer_path=bytes", "--training.steps=50", "--checkpoint.enable"]


@pytest.mark.parametrize(
    ("others", "commands"),
    [
        ([], ["generate {0} --prompt \"...\"", "export {0} MODEL_FOLDER"]),
        (["--checkpoint.folder=a/b"], ["generate {0} --prompt \"...\"",
                                       "export {0} MODEL_FOLDER"]),
        (["--checkpoint.last_save_in_hf", "--experimental.custom_import={0}/sink.py"],
         ["generate {0} --prompt \"...\""]),
        (["--checkpoint.load_only"], []),
    ],
)  # fmt: skip
def test_the_commands_at_the_end_can_be_copied_on_a_narrow_console(
    others, commands, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("MESHWRIGHT_COLUMNS", "40")
    log_to_console()
    (tmp_path / "sink.py").write_text("SINKS = {}")
    others = [word.format(tmp_path) for word in others]
    words = [f"--job.dump_folder={tmp_path}", *END_WORDS, *others]
    announce_end(resolved(load_config(words), 1), 1000, (20, 3.5), 30, 1.0)
    said = capsys.readouterr().out.splitlines()
    expected = [f"  meshwright {command.format(tmp_path)}" for command in commands]
    assert [line for line in said if "generate" in line or "export" in line] == expected


def test_the_tokens_of_the_end_are_those_of_its_time(tmp_path, caplog) -> None:
    caplog.set_level("INFO", "meshwright")
    plan = resolved(load_config([f"--job.dump_folder={tmp_path}", *END_WORDS]), 1)
    training = plan.config.training
    per_step = training.global_batch_size * training.seq_len
    for resumed_step, earlier in ((0, ""), (20, f"; {30 * per_step:,} since step 1")):
        caplog.clear()
        resumed = dataclasses.replace(plan, resume_step=resumed_step)
        announce_end(resumed, 30 * per_step, None, 30, 1.0)
        tokens = f"{(30 - resumed_step) * per_step:,}"
        assert caplog.messages[0] == f"finished: {tokens} tokens in 0:00:01{earlier}"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--model.name=llama", ""),
        ('--model.frozen=["layers.*", "tok_*"]', ", 524,544 of them trained"),
        ("--model.name=qwen3_moe", ", {:,} of them active for a token"),
    ],
)
def test_a_job_says_how_many_parameters_are_trained_or_active(
    option, words, monkeypatch, caplog
) -> None:
    caplog.set_level("INFO", "meshwright")
    ranks = SimpleNamespace(get_rank=lambda: 1, get_world_size=lambda: 1)
    monkeypatch.setattr(announce, "dist", ranks)
    plan = resolved(load_config(["--model.tokenizer_path=bytes", option]), 1)
    announce.announce(plan, torch.device("cpu"), Launch())
    table = plan.model_args.table
    said = f"debugmodel: {table.num_params:,} parameters{words.format(table.num_active_params)}"
    assert f"{plan.config.model.name} {said}" in caplog.messages


def test_a_start_says_how_much_data_there_is_and_what_is_left_out(tmp_path, caplog) -> None:
    caplog.set_level("INFO", "meshwright")
    folder = tmp_path / "texts"
    (folder / ".git").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "c.md", "d.html", "e.TXT", ".f.txt", "g", ".git/h.txt"):
        (folder / name).write_text(f"{name} says this and that. " * 30)
    keys = {"seq_len": 64, "global_batch_size": 2, "local_batch_size": 2, "max_epochs": 2}
    keys |= {"dataset": "text", "dataset_path": folder, "token_cache_folder": tmp_path / "cache"}
    words = (f"--training.{key}={value}" for key, value in keys.items())
    config = load_config(["--model.tokenizer_path=bytes", *words])
    sources = open_data("training", config, num_workers=1)
    caplog.clear()
    announce.announce_data("data", sources)
    tokens = sources[0].cache.num_tokens
    assert caplog.messages == [
        f"data: text: 3 files (2 .txt, 1 .md), 3 documents, {tokens:,} tokens; "
        "left out: 1 .TXT, 1 .html, 1 .txt, 1 without suffix"
    ]
    plan = dataclasses.replace(resolved(config, 1), data_steps=steps_of_data(config, sources))
    steps = 2 * (tokens // 65) // 2
    said = announce._describe_steps(plan, sources)
    start = f"to train: {steps * 2 * 64:,} tokens in {steps} steps"
    assert said == f"{start}, 2 epochs (training.max_epochs = 2)"
    resumed = announce._describe_steps(dataclasses.replace(plan, resume_step=steps - 1), sources)
    # in the data from the first sample on, maybe
    assert resumed.startswith(f"to train: 128 tokens in 1 step of {steps}, {2 / steps:.3g} epochs")


WRITTEN = """
[training]
global_batch_size = -1
local_batch_size = 2
mixed_precision_param = "auto"
[parallelism]
tensor_parallel_degree = 2
"""


def test_the_written_config_runs_on_any_mesh(tmp_path, monkeypatch) -> None:
    """What it leaves open stays open, with its value in a comment, also for the report."""
    (tmp_path / "a.toml").write_text(f'extends = "debug_model"\n{WRITTEN}')
    config = load_config([str(tmp_path / "a.toml"), f"--job.dump_folder={tmp_path / 'out'}"])
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(
        announce, "dist", SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 4)
    )
    plan = resolved(config, 4)
    announce.announce(plan, torch.device("cpu"), Launch())
    text = (tmp_path / "out" / "config.toml").read_text()
    dtype = plan.config.training.mixed_precision_param
    assert "\nglobal_batch_size = -1  # 4 on 4 ranks\n" in text
    assert "\ndata_parallel_shard_degree = -1  # 2 on 4 ranks\n" in text
    assert f"\nmixed_precision_param = \"auto\"  # '{dtype}' on 4 ranks\n" in text
    assert '\nenable = "auto"  # false on 4 ranks\n' in text
    again = load_config([str(tmp_path / "out" / "config.toml")])
    assert again.model_dump(exclude={"job"}) == config.model_dump(exclude={"job"})
    for ranks in (2, 4, 8, 64):
        assert resolved(again, ranks).config.training.global_batch_size == ranks
    ranks = SimpleNamespace(
        get_rank=lambda: 0, get_world_size=lambda: 4, all_gather_object=lambda rows, own: None
    )
    monkeypatch.setattr(start_facts, "dist", ranks)
    start_facts.note_start(plan, torch.device("cpu"), [], [], [], is_new_stage=False)
    (tmp_path / "out" / "metrics.jsonl").touch()
    shown = read_run(tmp_path / "out").config
    assert shown["training"]["global_batch_size"] == 4
    assert shown["training"]["mixed_precision_param"] == dtype
    assert shown["parallelism"]["data_parallel_shard_degree"] == 2


def test_a_resume_goes_on_with_the_history_and_a_new_job_begins_it_anew(tmp_path) -> None:
    def events() -> list:
        rows = map(json.loads, (tmp_path / "history.jsonl").read_text().splitlines())
        return [(row["event"], row["step"]) for row in rows]

    note_event(tmp_path, 0, "start", {"ranks": 2})
    note_event(tmp_path, 30, "end", {"reason": "stopped"})
    note_event(tmp_path, 20, "start", {"ranks": 4})
    assert events() == [("start", 0), ("end", 30), ("start", 20)]
    (tmp_path / "metrics.jsonl").touch()
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"event": "end", "st')  # as a loss of power leaves it
    note_event(tmp_path, 25, "start", {"ranks": 4})
    assert read_run(tmp_path).resumed_steps == [20, 25]
    note_event(tmp_path, 0, "start", {"ranks": 2})
    assert events() == [("start", 0)]


def test_a_job_that_starts_over_keeps_the_figures_of_the_run_before(tmp_path, caplog) -> None:
    caplog.set_level("INFO", "meshwright")
    (tmp_path / "metrics.jsonl").touch()
    set_aside_run(tmp_path)  # it was killed before its first step
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    for number in (1, 2):
        for name in ("metrics.jsonl", "config.toml"):
            (tmp_path / name).write_text(f"{number}")
        set_aside_run(tmp_path)
    earlier = [tmp_path / f"earlier_run_{number}" for number in (1, 2)]
    assert sorted(tmp_path.iterdir()) == earlier
    for name in ("metrics.jsonl", "config.toml"):
        assert [(folder / name).read_text() for folder in earlier] == ["1", "2"]
    assert caplog.messages == [f"the earlier run's metrics are now in {path}" for path in earlier]


def test_a_full_disk_is_a_warning(tmp_path, caplog) -> None:
    note_event(tmp_path / "not there", 3, "end", {})
    assert "history.jsonl cannot be written" in caplog.text
    note_event(tmp_path, 3, "start", {})
    before = (tmp_path / "history.jsonl").read_text()
    with no_room(len(before) + 10):  # of the next line the beginning would fit
        note_event(tmp_path, 4, "end", {})
    assert (tmp_path / "history.jsonl").read_text() == before
    assert caplog.text.count("history.jsonl cannot be written") == 2


def test_the_end_of_a_process_that_could_not_note_it_is_added_once(tmp_path, monkeypatch) -> None:
    since = 1000.04  # a file has tenths of seconds, so a start may look older than it is
    monkeypatch.setattr(sinks.time, "time", lambda: since)
    note_missing_end(tmp_path, 3, "killed before it began", since)
    assert not (tmp_path / "history.jsonl").exists()
    note_event(tmp_path, 0, "start", {})
    note_missing_end(tmp_path, 3, "killed before it began", since + 100)
    for _ in range(2):
        note_missing_end(tmp_path, 7, "hung", since)
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["event"], row["step"]) for row in rows] == [("start", 0), ("end", 7)]
    assert rows[1]["reason"] == "hung"
