"""The command line: one table of commands, every one of them with help, in any order of words."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import tomli
from torch.distributed.run import parse_args

import meshwright
from meshwright.commands import train
from meshwright.commands.main import COMMANDS, GROUPS, example, main, run
from meshwright.commands.options import write_output
from meshwright.commands.train import MALLOC, environment
from meshwright.config.loader import load_config
from meshwright.system import machine
from meshwright.system.errors import (
    EXIT_CODES,
    EXIT_CONFIG,
    EXIT_HANG,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    ConfigError,
)
from meshwright.system.machine import Ranks
from meshwright.system.processes import LAUNCH, WAITING
from scripts import command_reference
from tests.helpers.cli import check_job, command
from tests.helpers.resolved import resolved

ROOT = Path(__file__).parents[2]
DEBUG = str(ROOT / "train_configs" / "debug_model.toml")
SHELL = "import sys; sys.argv[0] = 'meshwright'; from meshwright.__main__ import start; start()"


def test_help_of_every_command(capsys) -> None:
    for name in COMMANDS:
        with pytest.raises(SystemExit) if name != "config" else nullcontext() as end:
            run([*name.split(), "--help"])
        assert name == "config" or end.value.code == 0
        said = capsys.readouterr().out
        assert f"usage: meshwright {name}" in said
        assert f"\nexample:\n  {example(name)}\n" in said


def test_the_list_of_commands_is_grouped_and_fits_a_console(capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["meshwright"])
    main()
    lines = capsys.readouterr().out.splitlines()
    places = [lines.index(title) for title in GROUPS]
    for start, end, group in zip(places, [*places[1:], None], GROUPS.values(), strict=True):
        rows = lines[start:end]
        assert all(any(row.startswith(f"  {name} ") for row in rows) for name in group)
    assert max(map(len, lines)) < 80
    run(["checkpoint"])
    assert "usage: meshwright checkpoint COMMAND ...\n" in capsys.readouterr().out


FIRST_WORDS = {
    "check debug_model": "debug_model can run",
    "config debug_model": "[job]",
    "data debug_model": "reading",
    "export . x": "exporting",
    "generate . --prompt x": "reading",
    "plan debug_model --device cpu --world-size 2": "planning",
    "prove debug_model": "proving",
    "tokenize debug_model": "reading",
}
SLOW = {"torch", "numpy", "ssl", "multiprocessing", "datasets", "jinja2", "tokenizers"}
UNTIL_A_WORD = """
import os, sys
from meshwright.commands import check  # once for all
from meshwright.commands.main import run
class Console:
    def write(self, text):
        found = sorted({*sys.argv[1].split()} & sys.modules.keys())
        os.write(1, f"{found} {text.splitlines()[0]}\\n".encode())
        os._exit(0)
    flush = isatty = lambda self: False
for words in sys.argv[2:]:
    if os.fork() == 0:
        sys.stdout = sys.stderr = Console()
        run(words.split())
    os.wait()
"""


def test_a_command_imports_nothing_slow_before_its_first_word() -> None:
    """Each takes 0.1 to 2 s, at which a user of a mistaken or a slow command waits at nothing."""
    ran = subprocess.run(
        [sys.executable, "-c", UNTIL_A_WORD, " ".join(SLOW), *FIRST_WORDS],
        capture_output=True,
        text=True,
    )
    found = dict(zip(FIRST_WORDS, ran.stdout.splitlines(), strict=True))
    for words, first in FIRST_WORDS.items():
        assert found[words].startswith(f"[] {first}"), (words, found[words])


def test_what_is_printed_survives_head() -> None:
    for words in ("config --help", "schema"):
        piped = f'"{sys.executable}" -c "{SHELL}" {words} | head -n 1'
        result = subprocess.run(["bash", "-c", piped], capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (0, ""), words
        assert len(result.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("streams", "says"),
    [
        ("> /dev/full", "stdout cannot be written: No space left on device\n  fix: make room"),
        (">&- <&-", ""),
        ("$'caf\\xe9'", "'caf\\udce9' is no text in UTF-8\n  fix: set LC_ALL=C.UTF-8"),
    ],
)
def test_streams_that_take_nothing(streams: str, says: str, tmp_path) -> None:
    a_note = "--lr_scheduler.warmup_steps 999"
    words = f"check debug_model --job.dump_folder {tmp_path}/out {a_note} {streams}"
    told = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -c "{SHELL}" {words}'], capture_output=True, text=True
    )
    assert told.returncode == (2 if says else 0)
    assert told.stderr.startswith(f"meshwright: {says}" if says else "")
    assert "Traceback" not in told.stderr


CTRL_C = """
import os, runpy, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
runpy.run_path(sys.argv[2], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("door", "imports"),
    [("meshwright/__main__.py", "commands.main"), ("train.py", "train.__main__")],
)
def test_ctrl_c_in_the_first_imports_says_nothing(door: str, imports: str) -> None:
    words = [sys.executable, "-c", CTRL_C, f"meshwright.{imports}", str(ROOT / door)]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")  # to a shell it is 130


ASKED = """
import os, sys, time
from meshwright import __main__
from meshwright.commands import main
def work():
    try:
        os.kill(os.getpid(), int(sys.argv[1]))
        time.sleep(9)
    except SystemExit:  # as code of the user's may raise it
        print("a bad record")
    finally:
        print("removed")
main.run = lambda words: work()
__main__.start()
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_request_to_end_removes_what_is_unfinished(number: signal.Signals) -> None:
    words = [sys.executable, "-c", ASKED, str(int(number))]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (EXIT_INTERRUPTED, "removed\n", "")


def test_ctrl_c_while_train_becomes_torchrun() -> None:
    words = [sys.executable, "-m", "meshwright.launch"]
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # as `train` does
    try:
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        process.send_signal(signal.SIGINT)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    said = "meshwright: SIGINT: stopped before the first step"
    assert process.communicate()[1].startswith(said)
    assert process.returncode == EXIT_INTERRUPTED


def test_a_file_of_a_command_is_written_whole_or_not_at_all(tmp_path, monkeypatch) -> None:
    def fill(self: Path, text: str, encoding: str) -> None:
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", fill)
    page = tmp_path / "a.html"
    with pytest.raises(ConfigError, match="a.html': cannot be written: No space .*\n  fix: choose"):
        write_output(page, "a page", "--html")
    assert not page.exists()
    read_only = OSError(errno.EROFS, os.strerror(errno.EROFS))  # which unlink says of any file
    for name in ("write_text", "unlink"):
        monkeypatch.setattr(Path, name, Mock(side_effect=read_only))
    with pytest.raises(
        ConfigError, match="a.html': cannot be written: Read-only .*\n  fix: choose"
    ):
        write_output(page, "a page", "--html")


def test_version_and_unknown_commands(monkeypatch, capsys) -> None:
    told = f"meshwright {meshwright.__version__}\n"
    unknown = "meshwright: unknown command chek\n  fix: did you mean check?\n"
    for word, code, said in (("--version", 0, (told, "")), ("chek", 2, ("", unknown))):
        monkeypatch.setattr("sys.argv", ["meshwright", word])
        with pytest.raises(SystemExit) if code else nullcontext() as end:
            main()
        assert not code or end.value.code == code
        assert tuple(capsys.readouterr()) == said
    with pytest.raises(ConfigError, match="did you mean checkpoint ls?"):
        run(["checkpoint", "lss"])


def test_ctrl_c_is_no_traceback_nor_is_a_full_disk(monkeypatch, capsys) -> None:
    full, gone = (OSError(code, "said", "a file") for code in (errno.ENOSPC, errno.ESTALE))
    ends = Mock(side_effect=[KeyboardInterrupt, full, gone])
    monkeypatch.setattr("meshwright.commands.config.schema", ends)
    monkeypatch.setattr("sys.argv", ["meshwright", "schema"])
    for code in (EXIT_INTERRUPTED, EXIT_CONFIG):
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == code
    assert capsys.readouterr().err == "meshwright: a file: said\n"
    with pytest.raises(OSError, match="said"):  # exit code 1: a scheduler may try again
        main()


@pytest.mark.parametrize(
    "words",
    [
        [DEBUG, "--training.steps", "9", "--compile.enable"],
        ["--training.steps", "9", DEBUG, "--compile.enable"],
        ["--compile.enable=true", "--training.steps=9", DEBUG],
        ["--job.config_file", DEBUG, "--training.steps=9", "--compile.enable", "true"],
        ["debug_model", "--training.steps=9", "--compile.enable", "true"],
    ],
)
def test_the_config_is_a_plain_argument_anywhere(words) -> None:
    config = load_config(words)
    assert (config.training.steps, config.compile.enable) == (9, True)
    assert config.job.config_file == DEBUG


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([DEBUG, "--job.config_file", DEBUG], "given together with --job.config_file"),
        ([DEBUG, "--steps", "3"], "did you mean --training.steps?"),
        ([DEBUG, "other.toml"], "'other.toml': expected CONFIG or --section.key value"),
        (["4", DEBUG], "fix: leave it out; CONFIG is 4"),
        ([DEBUG, "-training.steps", "3"], "fix: write --training.steps"),
        ([DEBUG, "\N{EM DASH}training.steps", "3"], "fix: write --training.steps"),
        (["--config", DEBUG], "fix: name only the TOML on the command line"),
        (["https://example.org/a.toml"], "fix: fetch the file"),
        (["--nnode", "2"], "'--nnode': no such option\n  fix: write --nnodes"),
        (["bsae.toml"], "neither a file here nor a preset\n  fix: did you mean base.toml?"),
        (["--ngpu", "0", DEBUG], "--ngpu = '0': must be a positive number"),
        ("generate --prompt a", "_FOLDER: not given\n  fix: see meshwright generate --help"),
        ("plan debug_model --device cpu", "--world-size: not given\n  fix: write --world-size N"),
        ("plan debug_model", "--world-size, --device: not given\n  fix: write --world-size N --"),
        ("train --log_rnk=1", "'--log_rnk=1': no such option\n  fix: write --log-rank=1"),
        ("generate a --max_new_tokens 5 --prompt b", "fix: write --max-new-tokens"),
        ("prove a --ranks 2", "fix: leave it out; the options of meshwright prove are --"),
        (
            "generate a --prompt b --ngpu 2",
            "'--ngpu': not understood\n  fix: leave it out; the options",
        ),
        ("data a --step 1 --caches", "--caches: not allowed with argument --step\n  fix: "),
        ("checkpoint ls a --long", "'--long': not understood\n  fix: leave it out; the options"),
    ],
)
def test_words_that_are_not_understood(words, says, tmp_path, monkeypatch) -> None:
    """Of `check`, and of other commands."""
    monkeypatch.chdir(tmp_path)
    Path("base.toml").touch()
    with pytest.raises(ConfigError) as caught:
        run(words.split() if isinstance(words, str) else ["check", *words])
    assert says in str(caught.value)


def test_config_shows_where_each_value_is_from(tmp_path, capsys) -> None:
    own = tmp_path / "own.toml"
    parts = '[[training.datasets]]\nname = "a"\n[[training.datasets]]\nweight = 2\n'
    groups = '[optimizer]\ngroups = [{ parameters = ["norm.*"], lr_scale = 0.5 }]\n'
    stages = "[[training.stages]]\nuntil_tokens = 9\nlr = 0.5\nseq_len = 64\ntotal_steps = 9\n"
    stages += "weights = { a = 3.5 }\n[[training.stages]]\n"
    text = f'extends = "{DEBUG}"\n[training]\nseq_len = 128\n{parts}{groups}{stages}'
    own.write_text(text)
    text = "a separator\u2028of lines that TOML has not"
    command("config")([own, "--training.steps", 9, "--job.description", text])
    out = capsys.readouterr().out
    origins = dict(re.findall(r"(?m)^(\w+ = \S+) .*# (?:.*/)?(\S+)$", out))
    for value, origin in (
        ("seq_len = 128", "own.toml:3"),
        ("steps = 9", "--training.steps"),
        ("warmup_steps = 20", "debug_model.toml:34"),
        ("beta1 = 0.9", "default"),
        ("lr_scale = 0.5", "own.toml:9"),
        ('name = "a"', "own.toml:5"),
        ("weight = 2.0", "own.toml:7"),
        ("a = 3.5", "own.toml:15"),
    ):
        assert origins[value] == origin
    assert all(" = " in line or line.startswith("[") for line in out.split("\n") if line)
    assert tomli.loads(out)["training"]["steps"] == 9
    assert tomli.loads(out)["job"]["description"] == text


def test_config_diff_shows_keys_that_differ_and_exits_with_1(capsys) -> None:
    command("config diff")([DEBUG, DEBUG])
    assert capsys.readouterr().out == "equal\n"
    with pytest.raises(SystemExit) as end:
        command("config diff")(["debug_model", "debug_model_2d"])
    assert end.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("parallelism.tensor_parallel_degree")
    assert lines[at + 1] == "  A: 1 (default)"
    assert re.fullmatch(r"  B: 2 \(.*debug_model_2d.toml:12\)", lines[at + 2])


def test_config_diff_fits_80_columns(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    path = "/" + "/".join(["folder"] * 9)
    for name in "ab":
        Path(f"{name * 20}.toml").write_text(f'[job]\ndump_folder = "{path}/{name}"\n')
    with pytest.raises(SystemExit):
        command("config diff")(["a" * 20 + ".toml", "b" * 20 + ".toml"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert f"  B: '{path}/b'" in lines


def test_help_of_a_section_or_a_key_shows_it_alone(capsys) -> None:
    command("config")(["--help", "comm"])
    out = capsys.readouterr().out
    assert "--comm.init_timeout_seconds INT (default: 300)" in out
    assert "--training" not in out
    command("config")(["--help", "compile.enable"])
    assert "--compile.enable true|false|auto (default: 'auto')" in capsys.readouterr().out
    command("config")(["--help", "training.deterministic"])
    assert "true|false (default: false)" in capsys.readouterr().out
    command("config")(["--help", "optimizer.lr"])
    assert "--optimizer.lr FLOAT" in (out := capsys.readouterr().out)
    assert "--optimizer.eps" not in out
    for wrong in ("lr", "training.lr", "optimizer.lrr"):
        with pytest.raises(ConfigError, match="no such section or key\n  fix: did you mean optim"):
            command("config")(["--help", wrong])


def test_files_that_cannot_be_written_are_refused_before_work(tmp_path) -> None:
    for words, says in (
        (["plan", "--html", tmp_path / "no/a.html", "debug_model"], "there is no folder"),
        (["plan", "--html", tmp_path, "debug_model"], "cannot be"),
        (["report", "--output", tmp_path / "no/a.html", "debug_model"], "there is no folder"),
        (["report", "--output", tmp_path, "debug_model"], "cannot be"),
        (["export", "a", "s3://bucket/a"], "is an address"),
        (["prove", "--output", "gs://bucket/a"], "is an address"),
        (["prove", "--every-mesh"], "CONFIG: not given\n  fix: name a TOML"),
    ):
        with pytest.raises(ConfigError, match=says):
            run([*map(str, words)])


def test_every_exit_code_is_documented() -> None:
    text = (ROOT / "docs/exit_codes.md").read_text()
    for code in (*EXIT_CODES.values(), EXIT_HANG, EXIT_STOPPED, EXIT_INTERRUPTED):
        assert f"| {code} |" in text, code


def test_every_command_is_documented() -> None:
    """Otherwise: python -m scripts.command_reference > docs/commands.md"""
    shipped = (ROOT / "docs/commands.md").read_text("utf-8").splitlines()
    assert shipped == "\n".join(command_reference.page()).splitlines()


INTEL, AMD = "vendor_id\t: GenuineIntel\n", "vendor_id\t: AuthenticAMD\n"
FLOAT8 = ["--float8.enable=true", "--float8.emulate=true"]
TYPE = "--training.mixed_precision_param"
BF16, FP32, AUTO = (f"{TYPE}={name}" for name in ("bfloat16", "float32", "auto"))


@pytest.mark.parametrize(
    ("cpu", "words", "advice"),
    [
        ("flags\t: fpu avx2 fma", [BF16], ["float32"]),
        ("flags\t: fpu avx512f avx512_bf16", [BF16], []),
        (f"{AMD}flags\t: fpu avx512_bf16", [BF16], []),
        (f"{INTEL}flags\t: fpu avx512_bf16", [BF16], ["float32"]),
        (f"{INTEL}flags\t: fpu avx512_bf16 amx_bf16", [BF16], []),
        ("Features\t: fp asimd bf16", [BF16], []),
        ("Features\t: fp asimd", [BF16], ["float32"]),
        ("cpu : POWER9", [BF16], []),
        ("flags\t: fpu avx2 fma", [], []),
        ("flags\t: fpu avx2 fma", [FP32], []),
        ("flags\t: fpu avx2 fma", [AUTO], []),
        # of other machines nothing is known, as on a cluster's login node
        ("flags\t: fpu avx2 fma", [BF16, "--ngpu=8"], []),
        ("flags\t: fpu avx2 fma", [BF16, "--nnodes=2"], []),
        ("a GPU", [BF16], []),
        ("a GPU", [FP32], ["bfloat16"]),
    ],
)
def test_a_type_that_the_device_is_slow_in_is_told(
    cpu, words, advice, monkeypatch, tmp_path, capsys
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{cpu}\n\nprocessor\t: 1\n{cpu}\n")
    monkeypatch.setattr(machine, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0" if cpu == "a GPU" else "")
    check_job([DEBUG, *words])
    said = "".join(capsys.readouterr())
    assert re.findall(r'fix: training.mixed_precision_param = "(\w+)"', said) == advice


@pytest.mark.parametrize(
    ("cpu", "words", "dtype", "why"),
    [
        ("flags\t: fpu avx2 fma", [], "float32", "no instructions for bfloat16"),
        (f"{INTEL}flags\t: fpu avx512_bf16", [], "float32", "no AMX for bfloat16"),
        (f"{AMD}flags\t: fpu avx512_bf16", [], "bfloat16", "has fast instructions for it"),
        ("flags\t: fpu avx2 fma", ["--training.dtype=bfloat16"], "bfloat16", ""),
        ("flags\t: fpu avx2 fma", FLOAT8, "bfloat16", ""),
        ("a GPU", [], "bfloat16", ""),
    ],
)
def test_a_type_that_nobody_asked_for_is_one_that_the_cpu_has(
    cpu, words, dtype, why, monkeypatch, tmp_path
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{cpu}\n")
    monkeypatch.setattr(machine, "CPU_INFO", tmp_path / "cpuinfo")
    given = ["--model.tokenizer_path=bytes", f"--job.dump_folder={tmp_path}", *words]
    plan = resolved(load_config(given), 1, expects_gpus=cpu == "a GPU")
    assert plan.config.training.mixed_precision_param == dtype
    reason = plan.reasons["training.mixed_precision_param"]
    if not why:  # the CPU isn't asked
        assert not reason
        return
    assert reason.startswith(f'training.mixed_precision_param = "auto": {dtype}, since')
    assert why in reason
    assert reason in plan.notes


@pytest.mark.parametrize("command", ["prove", "plan --world-size=3 --device=cpu"])
def test_a_command_that_needs_no_gpu_hides_them(command: str, monkeypatch) -> None:
    """A driver takes seconds of each of its processes."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ConfigError, match="tensor_parallel_degree"):
        run([*command.split(), DEBUG, "--parallelism.tensor_parallel_degree=3"])
    assert machine.count_gpus() == 0


def test_check_takes_the_config_that_train_takes(monkeypatch, capsys) -> None:
    check_job(["--training.steps", 50])
    monkeypatch.setenv("CONFIG_FILE", "debug_qwen3")
    check_job([])
    out = capsys.readouterr().out
    assert re.findall(r"(?m)^(\w+) can run: ", out) == ["debug_model", "debug_qwen3"]


@pytest.mark.parametrize(
    ("gpus", "nodes", "cores", "places", "numactl", "is_bound"),
    [
        (8, 2, 4, (0, 1), "true", True),
        (0, 2, 4, (0, 1), "true", False),
        (8, 1, 4, (0, 0), "true", False),
        (8, 2, 2, (0, 1), "true", False),
        (8, 2, 4, (-1, -1), "true", False),  # as a virtual machine says: it does not know
        (8, 2, 4, (), "true", False),
        (8, 2, 4, (0, 1), "false", False),  # it may not bind
        (8, 2, 4, (0, 1), None, False),
    ],
)
def test_ranks_stay_beside_their_gpus(
    monkeypatch, tmp_path, gpus, nodes, cores, places, numactl, is_bound
) -> None:
    for node in range(nodes):
        (tmp_path / f"node{node}").mkdir()
    others = [("0x1013", "0x030000", -1), ("0x10de", "0x068000", -1)]  # a virtual display, a switch
    for number, facts in enumerate([*others, *(("0x10de", "0x030200", node) for node in places)]):
        (device := tmp_path / "pci" / str(number)).mkdir(parents=True)
        for name, value in zip(train.FACTS, facts, strict=True):
            (device / name).write_text(f"{value}\n")
    monkeypatch.setattr(train, "PCI_DEVICES", tmp_path / "pci")
    monkeypatch.setattr(train, "NUMA_NODES", tmp_path)
    monkeypatch.setattr(train.os, "sched_getaffinity", lambda _: {*range(cores)})
    monkeypatch.setattr(train.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(train.shutil, "which", lambda _: numactl)
    assert bool(train._numa_binding(Ranks(8, 1, gpus))) == is_bound
    assert parse_args([*train._numa_binding(Ranks(8, 1, gpus)), "x"]).numa_binding in (None, "node")


CPU, GPU = Ranks(2, 1, 0), Ranks(1, 1, 1)
OMP = "OMP_NUM_THREADS"


def chosen(ranks: Ranks, **own: str) -> dict[str, str]:
    """What is chosen beside `own`; the list that the job logs must be the same."""
    new = environment(ranks, own)
    told = json.loads(new.pop(LAUNCH))
    assert dict(word.split("=", 1) for word in told["host_settings"].split()) == new
    assert (told["is_checked"], told["num_gpus"]) == (True, ranks.gpus)
    return new


@pytest.mark.parametrize(("cores", "threads"), [(7, 3), (1, 1)])
def test_cpu_ranks_share_the_cores_and_keep_freed_memory(cores, threads, monkeypatch) -> None:
    monkeypatch.setattr(train, "count_cores", lambda: cores)
    assert chosen(CPU) == {OMP: str(threads)} | WAITING | MALLOC
    assert all(int(size) > 1 << 30 for size in MALLOC.values())


@pytest.mark.parametrize(
    ("ranks", "own", "names"),
    [
        *(
            (CPU, {name: "3"}, {OMP, *WAITING, *MALLOC} - {name})
            for name in (OMP, *WAITING, *MALLOC)
        ),
        (CPU, {"OMP_WAIT_POLICY": "active"}, {OMP, *MALLOC}),
        *((CPU, {name: "x"}, {OMP, *WAITING}) for name in ("GLIBC_TUNABLES", "LD_PRELOAD")),
        *((CPU, {name: ""}, {OMP, *WAITING, *MALLOC}) for name in ("GLIBC_TUNABLES", "LD_PRELOAD")),
        (GPU, {}, {OMP, "PYTORCH_ALLOC_CONF", *WAITING}),
        (GPU, {"PYTORCH_ALLOC_CONF": "x"}, {OMP, *WAITING}),
        (GPU, {"PYTORCH_CUDA_ALLOC_CONF": "x"}, {OMP, *WAITING}),
    ],
)
def test_threads_waiting_and_memory_are_chosen_where_the_user_has_not(ranks, own, names) -> None:
    assert {*chosen(ranks, **own)} == names
