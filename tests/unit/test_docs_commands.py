"""Every command and TOML that README, docs and presets print is read by its own parser."""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from meshwright.commands.experiment.spec import read_spec
from meshwright.commands.ladder.rungs import read_ladder
from meshwright.commands.main import COMMANDS, build_parser
from meshwright.config.command_line import parse
from meshwright.config.fields import find_field
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config, preset_names
from meshwright.system.errors import ConfigError
from tests.helpers.cli import check_job

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md"]
PAGES += [ROOT / "tests/campaigns/README.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
HEADS = [*sorted((ROOT / "train_configs").glob("*.toml")), *sorted(ROOT.glob("examples/*.yaml"))]
HEADS += [ROOT / "multinode_trainer.slurm", ROOT / "run_llama_train.sh"]
OURS = r"meshwright(?= )|\./run_\w+\.sh|python(?= )|sbatch(?= )|scripts/\w+"
OTHERS = {
    *(
        "apt-get",
        "aws",
        "cat",
        "cd",
        "cp",
        "echo",
        "eval",
        "flock",
        "git",
        "grep",
        "gsutil",
        "head",
        "hf",
        "mkdir",
    ),
    *("make", "mkdocs", "nohup", "pip", "pkill", "pre-commit", "python3", "rclone", "source"),
    *("less", "lm_eval", "sed", "sort", "tail", "tensorboard", "torchrun", "touch"),
}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ASSIGNMENT = re.compile(r"[A-Z_]+=.*", re.DOTALL)
PRINTED = {name for page in PAGES for name in re.findall(r"<!-- file: (\S+) -->", page.read_text())}
"""Files that a page lets its reader make."""
ANSWER = "# meshwright: "
"""The console's answer to the command above: it is wrong, to show that."""


def printed(file: Path) -> Iterator[tuple[str, str]]:
    """Lines of a shell and their answers: of blocks, of code within text, of heads of files."""
    text = file.read_text("utf-8")
    if file.suffix != ".md":
        comments = re.findall(r"^#\s*(.*?(?<!\\)$)", re.sub(r" \\\n#\s*", " ", text), re.MULTILINE)
        for line in comments:
            if re.match(rf"([A-Z_]+=\S+ )*({OURS})", line) and "[" not in line:
                yield re.sub(r"\s{3,}.*", "", line), ""
        return
    for language, block in BLOCK.findall(text):
        lines = [line.strip() for line in block.replace("\\\n", " ").splitlines()]
        for line, following in zip(lines, [*lines[1:], ""], strict=True):
            is_shell = language == "bash" and line and not line.startswith("#")
            if is_shell or (not language and re.match(OURS, line) and "[-h]" not in line):
                yield line, following.removeprefix(ANSWER) if following.startswith(ANSWER) else ""
    for code in re.findall(r"`([^`]+)`", BLOCK.sub("", text)):
        line = " ".join(code.split())
        if re.match(OURS, line) and " " in line:
            yield line, ""


def simple_commands(line: str) -> Iterator[list[str]]:
    """The commands of a line, without redirections."""
    line = re.sub(r"\[(-[^\]]*)\]", r"\1", line)  # [--option]
    line = re.sub(r"(?<=[\w}])\|[\w|]+", "", line)  # a|b
    for inner in re.findall(r"\$\((.*?)\)", line):
        yield from simple_commands(inner)
    lexer = shlex.shlex(re.sub(r"\$\(.*?\)", "", line), posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    is_redirected = False
    for word in [*lexer, ";"]:
        if set(word) <= set("|&;"):
            yield words
            words, is_redirected = [], False
        elif set(word) <= set("<>"):
            is_redirected = True
        elif not is_redirected:
            words.append(word)


CASES = [
    pytest.param(words, answer, id=f"{file.name}: {' '.join(words)}"[:100])
    for file in [*PAGES, *HEADS]
    for line, answer in printed(file)
    for words in simple_commands(line)
]


@pytest.mark.parametrize(("words", "answer"), CASES)
def test_a_printed_command_is_understood(words: list[str], answer: str) -> None:
    if answer:
        with pytest.raises(ConfigError, match=re.escape(answer)):
            understand(words)
    else:
        understand(words)


def test_commands_are_found() -> None:
    assert len(CASES) > 200
    (page,) = [file for file in PAGES if file.name == "tutorial.md"]
    assert sum("meshwright" in line for line, _ in printed(page)) >= 6


TOMLS = [
    pytest.param(block, id=f"{page.name} {number}")
    for page in PAGES
    for number, (language, block) in enumerate(BLOCK.findall(page.read_text("utf-8")))
    if language == "toml"
]


@pytest.mark.parametrize("text", TOMLS)
def test_a_printed_toml_has_keys_and_values_that_are_valid(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(text.replace('"debug_model.toml"', '"debug_model"'))
    (tmp_path / "mix.txt").write_text("1.0 a.jsonl\n")
    for key, read in (("budget", read_spec), ("rungs", read_ladder)):
        if re.search(rf"^base = .*\n{key} =", text):
            read(tmp_path / "a.toml")
            return
    load_config([str(tmp_path / "a.toml")])


KEY = re.compile(r"(?:--)?((\w+)\.[\w.]+)(?:(?: = |=| )([^ ]{2,}|\[.*\]))?")
FOREIGN = {"compare.md"}
"""Pages with keys of others."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_key_within_a_text_is_there_and_takes_its_value(page: Path) -> None:
    """`section.key`, `section.key = value`, `--section.key value`."""
    for code in re.findall(r"`([^`]+)`", BLOCK.sub("", page.read_text("utf-8"))):
        match = KEY.fullmatch(" ".join(code.split()))
        if not match or match[2] not in JobConfig.model_fields or page.name in FOREIGN:
            continue
        is_file = match[1].endswith((".py", ".json", ".jsonl"))
        assert is_file or find_field(tuple(match[1].split("."))), code
        if match[3] and "1e5" not in match[3]:  # the sign of that one is the point
            load_config(["debug_model", f"--{match[1]}={match[3].strip(chr(34))}"])


def test_jobs_of_different_pages_have_different_folders() -> None:
    """A reader who follows one page after the other gets no job that is refused."""
    found = [
        (folder, page.name)
        for page in PAGES
        for language, block in BLOCK.findall(page.read_text("utf-8"))
        if language == "toml"
        for folder in re.findall(r'^dump_folder = "(.*?)"', block, re.MULTILINE)
    ]
    assert len(found) >= 4
    assert len({folder for folder, _ in found}) == len(found), found


def test_a_printed_module_is_python() -> None:
    """Those with a name are run by test_extension.py."""
    pages = [page.read_text("utf-8") for page in PAGES]
    blocks = [
        block for page in pages for language, block in BLOCK.findall(page) if language == "python"
    ]
    assert len(blocks) >= 7
    for block in blocks:
        compile(block, "block", "exec")


def test_the_first_job_of_one_s_own_runs_after_the_first_command(tmp_path: Path) -> None:
    """The README's: in a folder of its own, and validated on data of its own."""
    blocks = BLOCK.findall((ROOT / "README.md").read_text("utf-8"))
    (text,) = [block for language, block in blocks if language == "toml"]
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / "my_job.toml").write_text(text)
    check_job([tmp_path / "my_job.toml", "--ngpu", 2])
    mine = load_config([str(tmp_path / "my_job.toml")])
    assert mine.job.dump_folder != load_config(["debug_model"]).job.dump_folder
    assert mine.training.validation_fraction > 0


def test_commands_that_messages_and_docstrings_name_are_there() -> None:
    text = "".join(path.read_text("utf-8") for path in (ROOT / "meshwright").rglob("*.py"))
    groups = "|".join({name.split()[0] for name in COMMANDS if " " in name})
    named = {*re.findall(rf"(?:`|fix: )meshwright ((?:(?:{groups}) )?[a-z]+)", text)}
    assert len(named) > 10
    assert named <= COMMANDS.keys()


def understand(words: list[str]) -> None:
    """Raise if a command is not there, or does not take these words."""
    config: list[str] = []
    while words and ASSIGNMENT.fullmatch(words[0]):
        variable, *words = words
        if variable.startswith("CONFIG_FILE="):
            config = [variable.partition("=")[2]]
    name, *rest = words or ["cd"]
    if name == "srun":
        understand(rest)
    elif name == "meshwright":
        _check_command(rest)
    elif name == "./run_llama_train.sh":
        _check_command(["train", *config, *rest])
    elif name == "sbatch" and "--wrap" in rest:
        understand(rest[-1].split())
    elif name == "sbatch":
        _check_command(["train", *config, *rest[rest.index("multinode_trainer.slurm") + 1 :]])
    elif name == "python":
        _check_python(rest)
    elif "/" in name and not name.startswith("/"):
        assert (ROOT / name).is_file()
    else:
        assert name in OTHERS or name.startswith("/")


def _check_command(words: Sequence[str]) -> None:
    words = [word for word in words if word not in ("...", "CONFIG")]
    if not words or words[0] in ("--version", "COMMAND"):
        return
    names = [name for name in COMMANDS if words[: len(name.split())] == name.split()]
    name = max(names, key=len)  # of "config diff" and "config"
    rest = words[len(name.split()) :]
    if not rest or "--help" in rest:  # its name alone, in a text
        return
    given = parse(build_parser(name, rest), rest)
    if COMMANDS[name].takes_config and ("section", "key") not in given.overrides:
        values = [f"--{'.'.join(key)}={value}" for key, value in given.overrides.items()]
        _check_config(given.config, values)


def _check_config(config: str, overrides: Sequence[str]) -> None:
    """A preset must be there; in the place of a user's own TOML the debug model's stands."""
    is_own = not config or (config.endswith(".toml") and not config.startswith("train_configs/"))
    if not is_own:
        assert config in preset_names() or (ROOT / config).is_file()
    path = str(ROOT / config) if "/" in config else config
    load_config(["debug_model" if is_own else path, *overrides])


def _check_python(words: Sequence[str]) -> None:
    if words[:2] == ["-m", "meshwright"]:
        _check_command(words[2:])
    elif words[0] == "-m" and "." in words[1]:
        file = ROOT / words[1].replace(".", "/")
        assert file.is_dir() or file.with_suffix(".py").is_file()
    elif words[0].endswith(".py") and words[0] not in PRINTED:
        text = (ROOT / words[0]).read_text("utf-8")
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            name = option.removeprefix("--").replace("-", "[-_]")
            assert "." in option or re.search(rf"\b{name}\b", text), option
