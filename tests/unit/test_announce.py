"""The config on the console, in few lines; the end of a job in the history of its run."""

import json
from types import SimpleNamespace

import pytest

from meshwright import announce, history
from meshwright.announce import announce_end, compact_toml, note_failure
from meshwright.config.loader import load_config
from meshwright.datasets.tokenizers.kinds import build_tokenizer
from meshwright.preflight import preflight


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_that_ends_a_job_is_noted_once_with_its_step(rank, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(announce, "dist", SimpleNamespace(get_rank=lambda: rank))
    job = SimpleNamespace(dump_folder=str(tmp_path))
    plan = SimpleNamespace(config=SimpleNamespace(job=job), resume_step=4)

    def fail(error: Exception, step: int) -> None:
        with note_failure(plan, SimpleNamespace(step=step)):
            raise error

    for error, step in ((ValueError("bad\nand more"), 7), (KeyError(), 0)):
        with pytest.raises(type(error)):
            fail(error, step)
    with note_failure(plan, SimpleNamespace(step=9)):
        pass
    file = tmp_path / history.FILE
    noted = map(json.loads, file.read_text().splitlines() if file.exists() else [])
    ends = [(event["step"], event["reason"]) for event in noted]
    assert ends == ([(7, "failed: bad"), (4, "failed: KeyError")] if rank == 0 else [])


@pytest.mark.parametrize("is_saved", [True, False])
def test_the_commands_at_the_end_name_the_checkpoint_of_the_last_step(
    is_saved, tmp_path, caplog
) -> None:
    """Which is not that of `training.steps` where the data has ended before."""
    caplog.set_level("INFO", "meshwright")
    words = [f"--job.dump_folder={tmp_path}", "--model.tokenizer_path=bytes", "--checkpoint.enable"]
    words += ["--training.steps=50", f"--checkpoint.load_only={not is_saved}".lower()]
    reporter = SimpleNamespace(tokens_seen=1000, best_validation=(20, 3.5))
    announce_end(preflight(load_config(words)[0], 1), reporter, 30, 1.0)
    said = [record.getMessage() for record in caplog.records]
    last = f"{tmp_path}/checkpoint/step-30"
    commands = [
        f'  meshwright generate {last} --prompt "..."',
        f"  meshwright export {last} MODEL_FOLDER",
    ]
    assert said[-2:] == commands if is_saved else not any("step-" in line for line in said)


def test_the_tokens_around_a_document_are_named() -> None:
    line = announce._describe_tokenizer(build_tokenizer("bytes"))
    assert line == "tokenizer: 258 tokens, BOS 256, EOS 257"


def test_a_table_takes_a_line_and_a_long_one_is_broken_between_keys() -> None:
    text = '[job]\ndump_folder = "out"\nmax_run_seconds = 50\n\n[training]\n'
    text += "".join(f"a_long_key_number_{n} = {n}\n" for n in range(8))
    first, *others = compact_toml(text)
    assert first == '[job] dump_folder = "out", max_run_seconds = 50'
    assert len(others) == 3
    assert all(len(line) <= 88 for line in others)
    numbers = [item.split(" = ")[1].split()[0] for item in ", ".join(others).split(", ")]
    assert numbers == [str(n) for n in range(8)]


def test_values_of_every_kind_fit_into_their_line() -> None:
    text = """[training]
max_norm = inf
lr = 1e-3
deterministic = true
fp32_modules = [
    "output",
]
[[training.datasets]]
name = "ä"
weight = 0.5
"""
    assert compact_toml(text) == [
        '[training] max_norm = inf, lr = 0.001, deterministic = true, fp32_modules = ["output"]',
        '  datasets = [{name = "ä", weight = 0.5}]',
    ]
