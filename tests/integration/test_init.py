"""`meshwright init`: what it writes can be checked and trained, whatever the texts are like."""

import gzip
import io
import json
import lzma
import random
import re
import shlex
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from meshwright.commands import corpus, init
from meshwright.config.loader import load_config
from meshwright.datasets import readers
from meshwright.datasets.named_sources import check_files, entries
from meshwright.datasets.opening import open_data
from meshwright.system.errors import ConfigError, RecordError
from tests.helpers.cli import check_job, command
from tests.helpers.jobs import ROOT, records, train_alone

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


def keys_of(path: str) -> dict[str, object]:
    """The keys that the TOML would have for the data."""
    return {name: value for name, value, _ in corpus.look_at(path, Path.cwd()).keys}


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


def test_the_tutorial_prints_what_init_writes(folder, monkeypatch, capsys) -> None:
    """Of its own text, which is the same on every Python."""
    monkeypatch.setattr(init, "count_gpus", lambda: 0)
    monkeypatch.setattr(init, "count_cores", lambda: 2)
    page = (ROOT / "docs/tutorial.md").read_text("utf-8")
    (script,) = re.findall(r"<!-- file: my_texts.py -->\n```python\n(.*?)```", page, re.DOTALL)
    exec(script, {})
    write_toml(["--from", "my_texts"])
    printed, toml = re.findall(r"```\w*\n((?:looking at|# A first job).*?)```", page, re.DOTALL)
    assert capsys.readouterr().out.split() == printed.split()
    _, _, written = Path("my_job.toml").read_text("utf-8").partition("\n")  # where its schema is
    assert written.split() == toml.split()


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
        (
            "chat.jsonl",
            '{"messages": [{"role": "user", "content": "Hi"}]}\n',
            "set .*_format = .messages., as docs",
        ),
        ("rows.jsonl", "no JSON\n", "rows.jsonl:1: not JSON"),
        ("rows.jsonl", '{"text": 3}\n', "'text' holds 3, which is neither text nor"),
        ("rows.jsonl", "\n\n", "holds no text"),
        ("rows.jsonl", "", "is empty"),
        ("a.txt", "Too short.\n" * 20, "and a sequence of the preset takes 257"),
        ("a.npy", "tokens", "holds tokens"),
        ("a.csv", "id,text\n" * 999, "is a table, not text\n  fix: .* docs/data.md#csv"),
        (
            "qa.json",
            '[{"instruction": "Why?", "input": "", "output": "So."}]',
            'no column .text., but instruction, .*\n  fix: set .*dataset_format = "alpaca"',
        ),
        (
            "squad.json",
            '{"version": "1", "data": [{"a": "b"}]}',
            "fix: .* jq -c '.data\\[\\]' .*squad",
        ),
        ("strings.json", '["a", "b"]', 'fix: write lines like {"text": "..."}'),
        ("a.txt", "\udce9" * 999, "a.txt: not UTF-8: .* 0xe9: .*\n  fix: correct it"),
        ("", "", "exists, but holds no"),
        (
            "left/_a.txt",
            "A line.\n" * 999,
            "no such file or folder\n  fix: .* start with . or _ are left out",
        ),
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
    assert "dataset_column" not in keys_of("rows.jsonl")


def test_a_file_that_cannot_be_made_is_named(folder) -> None:
    with pytest.raises(ConfigError, match="fix: make it: mkdir -p "):
        write_toml(["there/a.toml"])
    with pytest.raises(ConfigError, match="(?s)OUT.* '/proc/a.toml': cannot be written.*fix: "):
        write_toml(["/proc/a.toml"])


def test_the_tokens_of_a_packed_file_are_not_its_bytes(folder, monkeypatch) -> None:
    rng = random.Random(5)
    words = [f"{rng.randrange(16**4):x}" for _ in range(3000)]
    rows = "".join(
        json.dumps({"text": " ".join(rng.choices(words, k=200))}) + "\n" for _ in range(100)
    )
    (folder / "all.jsonl").write_text(rows)
    (folder / "all.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    want = corpus.look_at("all.jsonl", folder).num_to_train
    monkeypatch.setattr(corpus, "SAMPLE_BYTES", 10_000)
    assert 0.7 * want < corpus.look_at("all.jsonl.gz", folder).num_to_train < 1.5 * want


def test_too_few_documents_are_not_held_out(folder, capsys) -> None:
    (folder / "my texts" / "a.txt").write_text(" ".join(TEXTS))
    write_toml(["--from", "my texts"])
    config = load_config(["my_job.toml"])
    assert not config.validation.enable
    assert config.training.validation_fraction == 0
    check_job(["my_job.toml"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("my_job.toml can run")


SENTENCES = [
    f"{number} is a number, and {'here is more ' * (number % 5)}about it." for number in range(400)
]
PAGES = "\n".join(textwrap.wrap(" ".join(SENTENCES), 70))


@pytest.mark.parametrize(
    ("text", "separator", "says"),
    [
        ("\r\n\r\n".join(SENTENCES), "\n\n", "is the text between empty lines"),
        ("\n \t\n".join(SENTENCES), "\n\n", "is the text between empty lines"),
        ("\n".join(SENTENCES), "\n", "is a line"),
        (PAGES, "", "is a file, whose lines end where those of a page would"),
        (PAGES.replace("\n", "\r\n"), "", "is a file, whose lines end where"),
        # all that a look at the head of the file would see is one document
        ("\n".join(" ".join(SENTENCES[n:] * 3) for n in range(30)), "\n", "is a line"),
        (
            "A foreword.\n" * 3 + " ".join(SENTENCES * 20) + "\n\n".join(SENTENCES),
            "\n\n",
            "between",
        ),
    ],
)
def test_the_separator_is_found_whatever_ends_a_line(text, separator, says, folder) -> None:
    (folder / "all.txt").write_bytes(text.encode())
    assert keys_of("all.txt").get("dataset_separator", "") == separator
    assert says in corpus.look_at("all.txt", folder).description


def test_the_median_document_is_told(folder) -> None:
    """Of a few large ones, the mean says little."""
    (folder / "all.txt").write_text("\n".join([*["x" * 10] * 50, *["y" * 9000] * 49]))
    found = corpus.look_at("all.txt", folder).description
    assert "the median document has 10 bytes: it is a line" in found


def test_columns_that_are_not_read_are_named(folder) -> None:
    rows = [{"id": 1, "prompt": text, "completion": text * 2} for text in SENTENCES]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert keys_of("rows.jsonl")["dataset_column"] == "completion"
    found = corpus.look_at("rows.jsonl", folder).description
    assert "columns left out: id, prompt; a function as " in found
    for extra in ({"messages": []}, {"instruction": "", "output": ""}):  # rendered already
        rows = [{"text": text, **extra} for text in SENTENCES]
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        assert "dataset_column" not in keys_of("rows.jsonl")


def packed(kind: str, path: Path) -> None:
    """Write a file of a kind that no source reads."""
    text = "\n\n".join(SENTENCES).encode()
    if kind.startswith("tar"):
        with tarfile.open(path, f"w:{kind.removeprefix('tar')}") as file:
            entry = tarfile.TarInfo("home/book.txt")
            entry.size = len(text)
            file.addfile(entry, io.BytesIO(text))
    elif kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("book.txt", text)
    else:
        path.write_bytes(
            {"xz": lzma.compress, "gz": gzip.compress, "pdf": b"%PDF-1.4 ".__add__}[kind](text)
        )


@pytest.mark.parametrize(
    ("name", "kind", "says", "fix"),
    [
        ("a.tar.gz", "targz", "a tar archive", "tar -xf"),
        ("a.txt", "tar", "a tar archive", "tar -xf"),  # by its content, whatever its name
        ("a.txt.bz2", "tarbz2", "a tar archive", "tar -xf"),
        ("a.zip", "zip", "a zip archive", "unzip"),
        ("a.txt.xz", "xz", "compressed by xz", "xz -dk"),
        ("a.txt", "gz", "compressed by gzip", "mv"),
        ("a.pdf", "pdf", "a PDF", "pdftotext"),
    ],
)
def test_a_file_of_another_kind_is_named(name, kind, says, fix, folder) -> None:
    """By init, and by check: a tar's header would be trained on."""
    packed(kind, folder / name)
    with pytest.raises(ConfigError, match=f"is {says}.*\n  fix: .*{fix} "):
        write_toml(["--from", folder / name])
    for dataset in ("text", "json"):
        words = ["debug_model", "--training.dataset", dataset, "--validation.enable=false"]
        with pytest.raises(
            ConfigError, match=f"training.dataset_path.* is {says}.*\n  fix: .*{fix} "
        ):
            check_job([*words, "--training.dataset_path", folder / name])


@pytest.mark.parametrize(
    ("rows", "given", "fix"),
    [
        ([{"instruction": "a", "output": "b"}], "messages", 'dataset_format = "alpaca"'),
        ([{"messages": []}], "sharegpt", 'dataset_format = "messages"'),
        ([{"question": "a", "answer": "b"}], "alpaca", 'dataset_format = "file.py:function"'),
    ],
)
def test_rows_of_another_format_name_theirs(rows, given, fix, folder) -> None:
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = [
        "fine_tune",
        "--training.dataset=json",
        "--training.dataset_path",
        folder / "rows.jsonl",
    ]
    config = load_config([*map(str, words), f"--training.dataset_format={given}"])
    with pytest.raises(RecordError, match=f"\n  fix: set training.{fix}"):
        check_files(*entries(config.training, "training"))


@pytest.mark.parametrize(
    ("dataset", "fix"), [("json", "jq -c '.[]'"), ("text", "set training.dataset_separator")]
)
def test_a_file_that_is_too_long_for_one_value_can_be_split(
    dataset, fix, folder, monkeypatch
) -> None:
    monkeypatch.setattr(readers, "LONGEST", 1000)
    (folder / "a.json").write_text(json.dumps([{"text": text} for text in SENTENCES], indent=1))
    (folder / "a.txt").write_text(" ".join(SENTENCES))
    path = folder / ("a.json" if dataset == "json" else "a.txt")
    words = ["debug_model", f"--training.dataset={dataset}", f"--training.dataset_path={path}"]
    with pytest.raises(RecordError, match=re.escape(fix)):
        check_files(*entries(load_config(words).training, "training"))
