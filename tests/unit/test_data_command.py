"""`meshwright data`: facts of the data, samples as text, caches and their removal."""

import json
import os
import threading
import time
import tracemalloc
from pathlib import Path

import pytest

from meshwright.commands import data_views
from meshwright.config.loader import load_config
from meshwright.config.stages import staged
from meshwright.datasets.opening import open_data
from meshwright.datasets.samples import SampleRules
from meshwright.datasets.stream import Cursor, SampleStream
from meshwright.system import lease
from meshwright.system.errors import ConfigError
from tests.helpers.checkpoints import publish
from tests.helpers.cli import command

data = command("data")

PART = """
[[training.datasets]]
name = "{name}"
dataset = "json"
dataset_path = "{name}.jsonl"
"""


def write(folder: Path, mode: str = "cached") -> Path:
    """A config of two files whose documents say which file and which row they are."""
    for name in ("first", "second"):
        rows = ({"text": f"{name} {number:04d}\n" * 5} for number in range(100))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = PART.format(name="first") + f'weight = 3\ndataset_mode = "{mode}"\n'
    return write_config(folder, f"{first}{PART.format(name='second')}weight = 1\n")


def write_config(folder: Path, data: str, batch: int = 4) -> Path:
    """A config of [training] with these keys of its data."""
    model = '[model]\ntokenizer_path = "bytes"\nargs = { vocab_size = 258 }\n'
    training = f"[training]\nseq_len = 69\nsteps = 40\nglobal_batch_size = {batch}\n"
    config = folder / "config.toml"
    config.write_text(f'{model}{training}token_cache_folder = "{folder}/caches"\n{data}')
    return config


def test_the_overview_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data([write(tmp_path)])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    rows = rows[[row[0] for row in rows].index("source") :]  # the log is before it
    # 5 lines of 11 bytes for each of 100 documents, with BOS and EOS
    facts = ["100", f"{100 * (5 * 11 + 2):,}", f"{55 / 57:.2f}", "0", "75.00%"]
    assert rows[1][:6] == ["first", *facts]
    assert rows[1][6] == f"{40 * 4 * 0.75 / (5700 // 70):.2f}"
    assert rows[2][:2] == ["second", "100"]
    assert rows[2][5] == "25.00%"
    assert rows[-4] == ["first", *["57"] * 5]
    assert [row[0] for row in rows[-2:]] == ["first:", "second:"]
    assert Path(rows[-1][1]).is_dir()


@pytest.mark.parametrize("mode", ["cached", "streamed"])
def test_the_samples_of_a_step_are_those_of_the_job(mode, tmp_path, capsys) -> None:
    path = write(tmp_path, mode)
    config = load_config(["--job.config_file", str(path)])
    sources, rules = open_data("training", config), SampleRules(70, config.training.seed)
    stream = SampleStream(sources, Cursor(), rules, batch=1, slots=[0])
    want = [stream.next_sample() for _ in range(4 * 7)][4 * 6 :]
    capsys.readouterr()
    data([path, "--step", "7"])
    texts = capsys.readouterr().out.split("--- step 7, sample ")[1:]
    assert [text.split(":")[0] for text in texts] == ["0", "1", "2", "3"]
    for text, sample in zip(texts, want, strict=True):
        assert sample is not None
        told = bytes(i for i in sample.tokens.tolist() if i < 256).decode()
        assert text.partition("\n")[2] == f"{told}\n"
        name = "first" if "first" in told else "second"
        assert text.partition(": ")[2].startswith(name)


def test_samples_of_a_source_by_their_indices(tmp_path, capsys) -> None:
    path = write(tmp_path)
    data([path, "--samples", "second", "3", "5"])
    texts = capsys.readouterr().out.split("--- sample ")[1:]
    assert [text.partition("\n")[0] for text in texts] == [f"{n} of second" for n in (3, 4, 5)]
    assert all("second" in text.partition("\n")[2] for text in texts)
    config = load_config(["--job.config_file", str(path)])
    sources = open_data("training", config)
    tracemalloc.start()  # no end is in sight: each is made when it is printed
    next(data_views.of_source(config, sources, 1, "second", "0", "1000000"))
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()


def test_a_stage_is_read_from_its_own_checkpoints(tmp_path, capsys) -> None:
    path = write(tmp_path, "streamed")
    stages = "[[training.stages]]\nuntil_tokens = 5520\n\n[[training.stages]]\n"
    own = PART.replace("training.", "training.stages.").format(name="second") + "weight = 1\n"
    saved = f'[checkpoint]\nenable = true\n[job]\ndump_folder = "{tmp_path}/out"\n'
    path.write_text(path.read_text() + stages + own + saved)
    config = load_config(["--job.config_file", str(path)])
    (source,) = open_data("training", staged(config)[1])
    place = {"sample": 8, "counts": [8], "places": {}}  # of one source: stage 1 has two
    facts = {"stage": 2, "data": place, "data_content": {"second": source.content}}
    publish(tmp_path / "out" / "checkpoint", 22, **facts)
    other = {"data_content": {"second": "other"}}  # of before the file was changed
    publish(tmp_path / "out" / "checkpoint", 21, **facts | other)
    (tmp_path / "out" / "checkpoint" / "step-20").mkdir()  # damaged: another one tells a place
    capsys.readouterr()
    data([path, "--samples", "second", "30", "30"])
    data([path, "--step", "20"])
    data([path, "--stage", "2", "--step", "23"])
    names = [line for line in capsys.readouterr().out.splitlines() if line.startswith("--- ")]
    assert names[0] == "--- sample 30 of second"
    assert [name.split(":")[0] for name in names[1:5]] == [
        f"--- step 20, sample {n}" for n in range(4)
    ]
    assert names[5:] == [f"--- step 23, sample {n}: second {8 + n}" for n in range(4)]
    with pytest.raises(ConfigError, match="is not from 1 to 20\n  fix: --stage 2 has later ones"):
        data([path, "--step", "21"])
    with pytest.raises(ConfigError, match="no checkpoint of stage 2 before it"):
        data([path, "--stage", "2", "--step", "22"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--samples", "third", "1", "2"], "is not one of first, second"),
        (["--samples", "first", "2", "1"], "are not two indices"),
        (["--step", "41"], "is not from 1 to 40$"),
        (["--step", "1", "--training.global_batch_size=-1"], "follows the number of ranks"),
        (["--remove", "none"], "is no cache in"),
        (["--remove", "../first.jsonl"], "is no cache in"),
    ],
)
def test_a_wrong_word_is_named(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        data([write(tmp_path), *words])


def test_a_config_that_is_missing_is_asked_for() -> None:
    for name, words in ("data", []), ("data", ["--step", "1"]), ("tokenize", []):
        with pytest.raises(ConfigError, match="CONFIG: not given"):
            command(name)(words)


def test_caches_are_listed_and_removed(tmp_path, capsys) -> None:
    path = write(tmp_path)
    data([path])
    capsys.readouterr()
    data([path, "--caches"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line][1:]
    assert sorted(row[-1] for row in rows) == ["first", "second"]
    assert all("complete" in row for row in rows)
    data(["--caches", "--training.token_cache_folder", tmp_path / "caches"])
    assert rows[0][0] in capsys.readouterr().out  # of no job
    with pytest.raises(ConfigError, match="no such dataset"):
        data([path, "--caches", "--training.dataset=bogus"])
    (tmp_path / "caches" / "not-a-cache").mkdir()
    name = rows[0][0]
    data([path, "--remove", name])
    assert sorted(os.listdir(tmp_path / "caches")) == sorted(["not-a-cache", rows[1][0]])
    with pytest.raises(ConfigError, match="is no cache in"):
        data([path, "--remove", "not-a-cache"])


@pytest.mark.parametrize("skew_s", [-3600, 3600])
def test_a_cache_that_another_machine_writes_is_not_removed(skew_s, tmp_path, monkeypatch) -> None:
    """Whatever its clock says; and once it is silent, the cache is removed."""
    for name, seconds in {"BEAT_S": 0.1, "LEASE_S": 0.6, "STUCK_S": 0.1}.items():
        monkeypatch.setattr(lease, name, seconds)
    monkeypatch.setattr(data_views, "POLL_S", 0.02)
    path = write(tmp_path)
    data([path])
    [name] = [n for n in os.listdir(tmp_path / "caches") if n.startswith("json")][:1]
    files = [tmp_path / "caches" / name / f"{number}.lease" for number in range(9)]
    touched = files[-1]
    owner = {"host": "other", "machine": "other", "pid": 1, "job": "", "nonce": "0" * 12}
    for file in files:  # one of each worker
        file.write_text(json.dumps(owner))
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(0.1):
            os.utime(touched, (time.time() + skew_s,) * 2)

    os.utime(touched, (time.time() + skew_s,) * 2)

    writer = threading.Thread(target=beat)
    writer.start()
    try:
        with pytest.raises(ConfigError, match="a job is writing to"):
            data([path, "--remove", name])
    finally:
        is_over.set()
        writer.join()
    alive = lease.Lease(touched.with_name("10.lease"))  # of this machine: nothing to wait for
    assert alive.take()
    with pytest.raises(ConfigError, match=f"a job is writing to .*process {os.getpid()} on "):
        data([path, "--remove", name])
    alive.give_back()
    for file in files:
        file.write_text(json.dumps(owner))
    begun = time.monotonic()
    data([path, "--remove", name])
    assert time.monotonic() - begun < 9 * 0.6  # their silence is waited for together
    assert not touched.parent.exists()
