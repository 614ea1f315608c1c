"""`meshwright init`: what it writes can be checked and trained, whatever the texts are like."""

import gzip
import json
import random
import shlex
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from meshwright.commands import init
from meshwright.config.loader import load_config
from meshwright.datasets.opening import open_data
from meshwright.system.errors import ConfigError
from tests.helpers.cli import check_job, command
from tests.helpers.jobs import records, train_alone

write_toml = command("init")

TEXTS = [
    f"Text {number} of many. " + "It says little, and says it often. " * 20 for number in range(60)
]


KINDS = {  # files and their texts
    "files": {f"{n}.md": text for n, text in enumerate(TEXTS)} | {"page.html": "left out"},
    "one file": {"all.txt": "<|endoftext|>".join(TEXTS)},
    "paragraphs": {"all.txt": "\n\n".join(TEXTS)},
    "rows": {
        "rows.jsonl": "".join(
            json.dumps({"id": str(n), "body": text}) + "\n" for n, text in enumerate(TEXTS)
        )
    },
    "code": {f"deep/{n}.rs": text for n, text in enumerate(TEXTS)},
    "table": {},
}


def write(kind: str, folder: Path) -> None:
    for name, text in KINDS[kind].items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    if kind == "table":
        table = pyarrow.table({"text": TEXTS, "number": [*range(len(TEXTS))]})
        pyarrow.parquet.write_table(table, folder / "table.parquet")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "my texts").mkdir()
    return tmp_path


@pytest.mark.parametrize("gpus", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_toml_passes_its_check(kind, gpus, folder, monkeypatch, capsys) -> None:
    monkeypatch.setattr(init, "count_gpus", lambda: gpus)
    write(kind, folder / "my texts")
    write_toml(["jobs.toml", "--from", "my texts"])
    said = capsys.readouterr().out
    assert said.startswith("looking at my texts ...\n")
    assert ("left out: 1 .html" in said) == (kind == "files")
    assert said.endswith("meshwright check jobs.toml\nmeshwright train jobs.toml\n")
    check_job(["jobs.toml", "--ngpu", 2])
    assert "jobs.toml can run" in capsys.readouterr().out
    config = load_config(["jobs.toml"])
    (source,), (held_out,) = open_data("training", config), open_data("validation", config)
    # the separators, the columns and the files are right: each text is a document
    assert source.cache.num_documents + held_out.cache.num_documents == len(TEXTS)
    assert config.job.dump_folder == "outputs/jobs"
    assert (config.training.seq_len == 1024) == (gpus > 0)


@pytest.mark.parametrize("gpus", range(1, 10))
def test_the_batch_is_of_whole_microbatches(gpus, monkeypatch) -> None:
    monkeypatch.setattr(init, "count_gpus", lambda: gpus)
    batch = init.scale_for(1_000_000).batch
    assert batch % (init.GPU_BATCH * gpus) == 0
    assert batch >= 4 * init.GPU_BATCH


def test_commands_to_copy_are_words_of_a_shell(folder, capsys) -> None:
    write_toml(["my job.toml"])
    words = [shlex.split(line) for line in capsys.readouterr().out.splitlines()[-2:]]
    assert words == [["meshwright", name, "my job.toml"] for name in ("check", "train")]


def test_the_toml_trains_and_validates(folder) -> None:
    write("one file", folder / "my texts")
    write_toml(["--from", "my texts/all.txt"])
    small = (
        "--model.args.n_layers=1",
        "--validation.num_samples=2",
        "--training.global_batch_size=2",
        "--training.steps=2",
    )
    train_alone(folder / "out", *small, config=folder / "my_job.toml")
    last = records(folder / "out")[-1]
    assert last["step"] == 2
    assert last["validation/loss"] > 0


def test_a_file_that_is_there_stays(folder) -> None:
    (folder / "my_job.toml").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        write_toml([])
    assert (folder / "my_job.toml").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("chat.jsonl", '{"messages": [{"role": "user", "content": "Hi"}]}\n', "preset fine_tune"),
        ("rows.jsonl", "no JSON\n", "rows.jsonl:1: not JSON"),
        ("rows.jsonl", '{"text": 3}\n', "no column holds text"),
        ("rows.jsonl", "\n\n", "no column holds text"),
        ("rows.jsonl", "", "no text is there"),
        ("a.txt", "Too short.\n" * 20, "and a sequence of the preset takes 257"),
        ("a.npy", "tokens", "holds tokens"),
        ("a.csv", "id,text\n" * 999, "is a table, not texts\n  fix: .* docs/data.md#csv"),
        ("a.txt", "\udce9" * 999, "a.txt: not UTF-8: .* 0xe9: .*\n  fix: name other"),
        ("", "", "exists, but holds no"),
        ("left/_a.txt", "A line.\n" * 999, "is there\n  fix: .* begin with . or _ are left out"),
    ],
)
def test_other_content_is_refused(name, content, says, folder) -> None:
    path = Path("my texts", name or "nothing.txt")
    path.parent.mkdir(exist_ok=True)
    if name:
        path.write_text(content, "utf-8", "surrogateescape")
    with pytest.raises(ConfigError, match=says):
        write_toml(["--from", path.parent if path.parent.name == "left" else path])
    assert not (folder / "my_job.toml").exists()


@pytest.mark.parametrize("first", [[], [None], [""], [None, ""]])
@pytest.mark.parametrize("more", [{}, {"id": "a name"}])
def test_rows_without_text_may_come_before_one_with_text(first, more, folder) -> None:
    rows = [more | {"text": text} for text in [*first, *TEXTS, "\ud83d"]]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert init.look_at("rows.jsonl").source.dataset_column == "text"


def test_a_file_that_cannot_be_made_is_named(folder) -> None:
    with pytest.raises(ConfigError, match="fix: make it: mkdir -p "):
        write_toml(["there/a.toml"])
    with pytest.raises(ConfigError, match="(?s)OUT.* '/proc/a.toml': cannot be written.*fix: "):
        write_toml(["/proc/a.toml"])


def test_the_epochs_are_of_the_documents_that_are_not_held_out(folder) -> None:
    write("files", folder / "my texts")
    found = init.look_at("my texts")
    write_toml(["--from", "my texts"])
    (source,) = open_data("training", load_config(["my_job.toml"]))
    assert abs(found.num_to_train / source.cache.num_tokens - 1) < 0.05


def test_documents_that_are_all_on_one_side_are_not_held_out(folder) -> None:
    text = " ".join(f"{number} is a number." for number in range(300))
    for number in range(25):  # a hash of the text decides, so copies stay together
        (folder / "my texts" / f"{number}.txt").write_text(text)
    assert init.look_at("my texts").held_out == 0


def test_the_tokens_of_a_packed_file_are_not_its_bytes(folder, monkeypatch) -> None:
    rng = random.Random(5)
    words = [f"{rng.randrange(16**4):x}" for _ in range(3000)]
    rows = "".join(
        json.dumps({"text": " ".join(rng.choices(words, k=200))}) + "\n" for _ in range(100)
    )
    (folder / "all.jsonl").write_text(rows)
    (folder / "all.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    want = init.look_at("all.jsonl").num_tokens
    monkeypatch.setattr(init, "SAMPLE_BYTES", 10_000)
    assert 0.7 * want < init.look_at("all.jsonl.gz").num_tokens < 1.5 * want


def test_too_few_documents_are_not_held_out(folder, capsys) -> None:
    (folder / "my texts" / "a.txt").write_text(" ".join(TEXTS))
    write_toml(["--from", "my texts"])
    config = load_config(["my_job.toml"])
    assert not config.validation.enable
    assert config.training.validation_fraction == 0
    check_job(["my_job.toml"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("my_job.toml can run")
