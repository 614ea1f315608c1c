"""How many GPUs and cores this machine has for a job, also where its driver is ill."""

import os
import re
import resource
import tempfile
from argparse import Namespace
from contextlib import nullcontext, suppress
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from meshwright.commands.main import run
from meshwright.commands.train import FIRST_MINUTE
from meshwright.config.loader import load_config
from meshwright.models.families.llama import FLAVORS
from meshwright.system import machine
from meshwright.system.errors import ConfigError
from meshwright.system.machine import allow_files, count_cores, count_gpus, count_ranks, given_rank
from meshwright.system.processes import Launch, Requests
from meshwright.train.main import _run_command_line
from meshwright.train.resolve_model import resolve_model
from tests.helpers.cli import command
from tests.helpers.jobs import ROOT

MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"
ILL = f"echo '{MISMATCH}'; exit 18"
LISTS_TWO = "echo 'GPU 0: H100 (UUID: GPU-a)'; echo '  MIG 1g'; echo 'GPU 1: H100 (UUID: GPU-b)'"


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Write an `nvidia-smi` that runs a line of shell; none is found before."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "_is_torch_for_amd", lambda: False)
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}")

    def write(line: str) -> None:
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{line}\n")
        (folder / "nvidia-smi").chmod(0o755)

    return write


def test_gpus_of_a_healthy_driver_are_counted_or_those_that_are_visible(
    smi, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    assert count_gpus() == 0  # there is no nvidia-smi
    for name in ("nvidia0", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert count_gpus() == 2  # but their devices
    smi(LISTS_TWO)
    assert count_gpus() == 2
    for visible, count in (
        *(("0,1", 2), ("", 0), ("0,-1,2", 1), ("-1", 0), (" 0, 1 ", 2), ("GPU-a,MIG-b", 2)),
        *(("NoDevFiles", 0), ("none", 0), ("void", 0), ("0,,1", 1)),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert count_gpus() == count, visible


def test_more_ranks_than_gpus_are_an_error_before_anything_starts(smi, monkeypatch) -> None:
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("ranks start"))
    smi(LISTS_TWO)
    with pytest.raises(ConfigError, match="NGPU = 3: there are 2 GPUs\n  fix: lower it, or hide"):
        run(["train", "debug_model", "--ngpu=3"])


@pytest.mark.parametrize("preset", ["debug_model", "debug_qwen3"])
def test_the_debug_model_on_a_gpu_names_a_preset_of_its_size(
    preset: str, smi, tmp_path, monkeypatch, capsys
) -> None:
    # other tests' signals would stay held
    monkeypatch.setattr("signal.pthread_sigmask", lambda *_: None)
    monkeypatch.setattr(os, "execv", lambda *_: None)
    monkeypatch.setattr("meshwright.commands.train.exit_when_asked", lambda: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    smi(LISTS_TWO)
    (tmp_path / "a.txt").write_text("a document " * 999)
    data = ["--training.dataset=text", f"--training.dataset_path={tmp_path}/a.txt"]
    data += ["--model.tokenizer_path=bytes", "--model.args={}", "--validation.enable=false"]
    folders = [f"--training.token_cache_folder={tmp_path}", f"--job.dump_folder={tmp_path}/out"]
    command("train")([preset, *data, *folders])
    assert (FIRST_MINUTE in capsys.readouterr().out) == (preset == "debug_model")


def test_the_preset_of_that_size_needs_no_network_and_no_gated_tokenizer() -> None:
    (preset,) = re.findall(r"CONFIG_FILE=(\S+) ./run_llama_train.sh$", FIRST_MINUTE)
    config = load_config([str(ROOT / preset)])
    assert (config.training.dataset, config.training.dataset_path) == ("sympy_source", "")
    assert Path(config.model.tokenizer_path).is_relative_to(ROOT / "assets")
    assert Path(config.model.tokenizer_path).is_file()
    assert resolve_model(config)[1] == FLAVORS["llama3_1b"]


def test_a_machine_without_room_for_temporary_files_is_an_error(smi, monkeypatch) -> None:
    """Otherwise importing torch is a page of traceback."""
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("ranks start"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc"])
    with pytest.raises(ConfigError, match="No usable temporary directory .*\n  fix: export TMPDIR"):
        run(["train", "debug_model"])


def test_a_driver_that_fails_is_an_error_before_anything_starts(smi, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("ranks start"))
    smi(ILL)
    with pytest.raises(ConfigError) as error:
        run(["train", "debug_model", f"--job.dump_folder={tmp_path / 'out'}"])
    first, fix = str(error.value).splitlines()
    assert first == f"nvidia-smi -L: failed with exit code 18: {MISMATCH}"
    assert fix.startswith("  fix: repair the driver")
    assert fix.endswith("CUDA_VISIBLE_DEVICES=")
    assert not (tmp_path / "out").exists()


def test_a_driver_that_hangs_is_an_error(smi, monkeypatch) -> None:
    """Its child keeps the pipe open, so there is no end to wait for."""
    monkeypatch.setattr(machine, "NVIDIA_SMI_S", 0.2)
    smi("/bin/sleep 5 & wait")
    with pytest.raises(ConfigError, match="does not answer within 0.2 s"):
        count_gpus()


def test_a_check_of_named_ranks_asks_no_driver(smi, monkeypatch) -> None:
    smi(ILL)
    given = Namespace(ngpu="8", nnodes="4")
    assert count_ranks(given, start_here=False) == machine.Ranks(8, 4, None)
    monkeypatch.setenv("NGPU", "3")
    given.ngpu = None
    assert count_ranks(given, start_here=False).per_machine == 3
    for start_here, ngpu in ((False, ""), (True, "8")):
        given.ngpu = ngpu
        with pytest.raises(ConfigError, match="version mismatch"):
            count_ranks(given, start_here=start_here)


@pytest.mark.parametrize(
    "words",
    [
        "check debug_model --ngpu 2",
        "config debug_model",
        "plan debug_model --world-size 2 --device nothing",
        "report {folder}",
    ],
)
def test_a_command_that_starts_no_ranks_asks_no_driver(smi, tmp_path, words) -> None:
    smi(f"touch {tmp_path / 'asked'}; {ILL}")
    with suppress(ConfigError):  # of a device and a folder that are not
        run([word.format(folder=tmp_path) for word in words.split()])
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(("hip", "count"), [("'6.4.43482'", 3), ("None", 0)])
def test_a_torch_for_rocm_counts_by_itself(tmp_path, monkeypatch, hip, count) -> None:
    """Of a laptop with an AMD processor, whose GPU no other torch can use, it isn't asked."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cuda = "cuda = type('', (), {'device_count': staticmethod(lambda: 3)})"
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(cuda)
    (tmp_path / "torch/version.py").write_text(f"hip: Optional[str] = {hip}\n")
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "torch/__init__.py"))
    monkeypatch.setattr(machine, "find_spec", lambda _: spec)
    monkeypatch.setattr(machine, "_count_nvidia_gpus", lambda: 0)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert count_gpus() == count
    (tmp_path / "torch/__init__.py").write_text("raise OSError('no driver')")
    if count:
        with pytest.raises(ConfigError, match="torch cannot count the GPUs: OSError: no driver"):
            count_gpus()


WHOLE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("outer", "inner", "count", "num_bytes"),
    [
        (("max 100000", "max"), ("max 100000", "max"), 96, WHOLE),
        (("800000 100000", f"{2**30}"), ("max 100000", "max"), 8, 2**30),
        (("800000 100000", "max"), ("250000 100000", "max"), 2, WHOLE),
        ((), ("50000 100000", f"{2**29}"), 1, 2**29),
        ((), (), 96, WHOLE),
        (None, None, 96, WHOLE),  # a kernel without control groups
    ],
)
def test_cores_and_memory_are_those_that_every_control_group_above_grants(
    monkeypatch, tmp_path, outer, inner, count, num_bytes
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(96)))
    (tmp_path / "pod" / "job").mkdir(parents=True)
    for quotas, folder in ((outer, "pod"), (inner, "pod/job")):
        for file, quota in zip(("cpu.max", "memory.max"), quotas or (), strict=False):
            (tmp_path / folder / file).write_text(f"{quota}\n")
    if outer is not None:
        (tmp_path / "own").write_text("3:cpuset:/elsewhere\n0::/pod/job\n")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "OWN_CGROUP", tmp_path / "own")
    assert (count_cores(), machine.machine_bytes()) == (count, num_bytes)


def test_a_rank_has_all_variables_of_a_launcher_or_none(monkeypatch) -> None:
    """Scripts for Slurm often set WORLD_SIZE, and start no launcher."""
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name in given:
        monkeypatch.delenv(name, raising=False)
    assert given_rank() == 0
    monkeypatch.setenv("MASTER_ADDR", "node1")  # a leftover that nobody reads
    assert given_rank() == 0
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert given_rank() == 1
    for name, wrong, words in (
        ("RANK", None, "RANK = '': is not set"),
        ("MASTER_PORT", None, "MASTER_PORT = '': is not set"),
        ("WORLD_SIZE", "two", "WORLD_SIZE = 'two': must be a number"),
        ("RANK", "2", "RANK = 2: WORLD_SIZE = 2: must be less"),
    ):
        with monkeypatch.context() as patch:
            patch.delenv(name) if wrong is None else patch.setenv(name, wrong)
            with pytest.raises(ConfigError, match=words):
                given_rank()


@pytest.mark.parametrize(
    ("host", "has_store", "warns"),
    [("a.invalid", True, False), ("a.invalid", False, True), ("::1", False, False)],
)
def test_a_machine_that_is_not_known_yet_is_waited_for(
    host, has_store, warns, monkeypatch, caplog
) -> None:
    """Of a cluster of containers, names are known once the first one runs; torch asks again."""
    caplog.set_level("WARNING", "meshwright")
    given = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": host, "MASTER_PORT": 29500}
    for name, value in (given | {"TORCHELASTIC_USE_AGENT_STORE": has_store}).items():
        monkeypatch.setenv(name, str(value))
    assert given_rank() == 1
    assert ("MASTER_ADDR = 'a.invalid': this machine does not know" in caplog.text) == warns


def test_machines_with_unequal_numbers_of_ranks_are_named(monkeypatch) -> None:
    """Where their number suits the config, they train; a launcher checks it for equal machines."""
    debug = str(Path(__file__).parents[2] / "train_configs/debug_model.toml")
    monkeypatch.setattr("sys.argv", ["train.py", "--job.config_file", debug])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    for own, ranks, words in ((1, 3, "NGPU = 1: the 2 nodes have 3 ranks in all"), (3, 6, "16")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(own))
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        with pytest.raises(ConfigError, match=words):
            _run_command_line(Launch(is_checked=True), Requests())


@pytest.mark.parametrize(
    ("limits", "ranks", "left"),
    [
        ((1024, 4096), 512, 2096),  # gloo of 512 ranks opens 1,568
        ((1024, 4096), 8, 1024),
        ((1024, 4096), 1024, 4096),  # enough for gloo
        ((24, resource.RLIM_INFINITY), 2, 56),
        ((24, 24), 2, 0),
    ],
)
def test_a_low_limit_of_open_files_is_raised_or_refused(limits, ranks, left, monkeypatch) -> None:
    """With too few, ranks that meet print pages of C++ and hang, and torchrun says nothing."""
    now = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda _: now[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: now.append(wanted))
    with nullcontext() if left else pytest.raises(ConfigError, match="ulimit -n = 24: 2 ranks"):
        allow_files(ranks)
        assert now[-1] == (left, limits[1])
