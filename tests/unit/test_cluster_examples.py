"""Examples for clusters, Slurm's script among them: they start our launcher as it wants to be."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.run import config_from_args, parse_args

from meshwright.commands.main import build_parser
from meshwright.commands.train import _log_ranks, _patience, _rendezvous, _rendezvous_alone
from meshwright.config.command_line import parse
from meshwright.config.loader import find_config
from meshwright.datasets.cached_source import CachedSource
from meshwright.datasets.shards import StreamedSource
from meshwright.system.errors import (
    EXIT_CONFIG,
    EXIT_DATA,
    EXIT_HANG,
    EXIT_SAVE,
    EXIT_SICK,
    EXIT_STOPPED,
    EXIT_TRAINING,
    ConfigError,
)
from meshwright.system.machine import NetworkPlace, Ranks, count_ranks, find_place

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
AGAIN = [EXIT_DATA, EXIT_HANG, EXIT_STOPPED]
RUNTIME, TRAIN_JOB = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
SKY = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
MASTER = {"PET_MASTER_ADDR": "node-0", "PET_MASTER_PORT": "29400"}
KUBERNETES = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "auto", **MASTER}
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}
CASES = {
    "kubernetes": (TRAIN_JOB["spec"]["trainer"]["args"][0], KUBERNETES, "node-0:29400"),
    "skypilot": (SKY["run"], SKYPILOT, "10.0.0.1:29500"),
}


def made_programs(folder: Path, **scripts: str) -> dict[str, str]:
    """Make programs in `folder`; return an environment that finds them first."""
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize("cluster", CASES)
def test_the_launcher_gets_the_machines(cluster: str, tmp_path: Path, monkeypatch) -> None:
    script, given, endpoint = CASES[cluster]
    told = 'printf "%s\\n" "$@"; echo; env'
    environment = made_programs(tmp_path, **{"meshwright": told, "run_llama_train.sh": told})
    words = ["bash", "-euo", "pipefail", "-c", script]
    out = subprocess.check_output(words, env=environment | given, cwd=tmp_path, text=True)
    words, _, variables = out.partition("\n\n")
    found = dict(line.split("=", 1) for line in variables.splitlines() if "=" in line)
    assert not any(name.startswith("PET_") for name in found)
    for name in ("NNODES", "NGPU", "RDZV_ENDPOINT", "RDZV_ID"):
        monkeypatch.delenv(name, raising=False)
        if name in found:
            monkeypatch.setenv(name, found[name])
    command = words.removeprefix("train\n").splitlines()
    options = parse(build_parser("train", command), command)
    assert Path(find_config(options.config)).name == "llama3_8b.toml"
    assert options.overrides == {("job", "dump_folder"): "/shared/llama3-8b"}
    ranks = count_ranks(options)
    assert ranks.machines == 2
    rendezvous = _rendezvous(options, ranks)
    assert f"--rdzv-endpoint={endpoint}" in rendezvous
    assert "--rdzv-id=llama3-8b" in rendezvous


def test_machines_meet_at_a_host_and_a_port() -> None:
    """Without a port they would wait at another one than was opened for them."""
    for endpoint in ("", "node1", "node1:", ":29500", "node1:port", "node1:99999"):
        words = ["--nnodes", "2", "--rdzv-endpoint", endpoint]
        options = parse(build_parser("train", words), words)
        with pytest.raises(
            ConfigError, match="must be host:port .*\n  fix: write .*:29500"
        ) as caught:
            _rendezvous(options, count_ranks(options))
        assert f"RDZV_ENDPOINT = {endpoint!r}" in str(caught.value)


def test_one_machine_waits_for_no_other_that_kubeflow_names(monkeypatch) -> None:
    """torchrun takes its variables for options, and would wait for 10 minutes without a word."""
    monkeypatch.setenv("PET_NNODES", "2")
    words = _rendezvous_alone(NetworkPlace(address="127.0.0.1"))
    assert parse_args([*words, "train.py"]).nnodes == "1"


def test_the_ranks_whose_log_is_shown() -> None:
    for given, want in (("0 1", "0,1"), ("0,,1,", "0,1"), ("1", "1")):
        options = parse(build_parser("train", []), ["--log-rank", given])
        assert _log_ranks(options, Ranks(2, 1, 0)) == want
    with pytest.raises(ConfigError, match="must be ranks from 0 to 0"):
        _log_ranks(parse(build_parser("train", []), ["--log-rank", ","]), Ranks(1, 1, 0))


def test_a_job_starts_again_on_the_codes_that_slurm_s_does() -> None:
    """Kubernetes on others, too: the machines that are left exit with 1 if one is lost."""
    assert SKY["resources"]["job_recovery"]["recover_on_exit_codes"] == AGAIN
    (job,) = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"]
    (rule,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["operator"]) == ("FailJob", "In")
    assert rule["onExitCodes"]["values"] == [
        EXIT_CONFIG,
        EXIT_TRAINING,
        EXIT_SAVE,
        EXIT_SICK,
    ]
    assert TRAIN_JOB["spec"]["runtimeRef"]["name"] == RUNTIME["metadata"]["name"]


def test_machines_wait_until_the_others_have_made_their_tokens(monkeypatch) -> None:
    """Also for the machine that they meet at, which torchrun gives 60 seconds."""
    monkeypatch.setattr("meshwright.commands.train.count_cores", lambda: 4)
    sources = [Mock(CachedSource, cache=Mock(num_tokens=n)) for n in (10**9, 10**7 + 1)]
    ranks = Ranks(per_machine=1, machines=2, gpus=0)
    words = _patience(ranks, [*sources, Mock(StreamedSource)], NetworkPlace(is_host=True))
    backend = ["--nnodes", "2", "--rdzv-backend", "c10d"]
    config, *_ = config_from_args(parse_args([*backend, *words, "train.py"]))
    given = RendezvousParameters("c10d", "node0:1", "id", 1, 2, **config.rdzv_configs)
    for name in ("join_timeout", "read_timeout"):
        assert given.get_as_int(name) == 600 + 2526  # 1.01 billion tokens by 4 cores
    assert given.get_as_bool("is_host") is True
    assert _patience(Ranks(per_machine=8, machines=1, gpus=8), sources, NetworkPlace()) == []


def test_a_machine_that_cannot_look_up_its_own_name_is_refused(monkeypatch) -> None:
    """Otherwise the others would try that name for minutes."""
    monkeypatch.setattr("socket.getfqdn", lambda: "node7.invalid")
    with pytest.raises(ConfigError, match=r"host name = node7\.invalid.*\n  fix: .*/etc/hosts"):
        find_place("node0", {})


SCRIPT = ROOT / "multinode_trainer.slurm"
PROGRAMS = {
    "srun": 'test "$RDZV_ENDPOINT" = node1:29517 || exit 99\necho "$CONFIG_FILE $*"; exit "$CODE"',
    # the names of a thousand nodes come in several parts
    "scontrol": """case "$1 $2" in
        "show job") echo "JobId=$3 $STATE" ;;
        requeue*) echo "again $2"; exit "${REFUSED:-0}" ;;
        *) echo node1; sleep 0.1; echo node2 ;;
    esac""",
}
SLURM = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_NTASKS": "2"}
SLURM |= {"SLURM_JOB_ID": "17", "CONFIG_FILE": "job.toml", "CODE": "0", "STATE": "JobState=RUNNING"}


def run_script(folder: Path, *words: str, **given: str) -> subprocess.CompletedProcess[str]:
    """Run the script as Slurm would, with programs of the cluster that print what they are told."""
    (folder / "scripts").mkdir(exist_ok=True)
    (folder / "scripts/environment.sh").write_text("prepare_environment() { :; }\n")
    env = os.environ | SLURM | {"SLURM_SUBMIT_DIR": str(folder)}
    env |= made_programs(folder, **PROGRAMS) | given
    return subprocess.run(["bash", SCRIPT, *words], env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("code", "state", "again"),
    [
        *((code, "JobState=RUNNING", True) for code in (75, 5, 6, 1, 137)),
        *((code, "JobState=RUNNING", False) for code in (0, 2, 3, 4, 130)),
        (75, "JobState=COMPLETING Reason=TimeLimit", True),
        (143, "JobState=CANCELLED Reason=None", False),
        (75, "JobState=COMPLETING Reason=None", False),  # preempted: Slurm does it
    ],
)
def test_it_starts_again_only_if_that_may_help(tmp_path, code, state, again) -> None:
    job = run_script(tmp_path, CODE=str(code), STATE=state)
    assert job.returncode == code
    assert job.stdout.splitlines()[1:] == ["again 17"] * again


def test_a_job_that_may_not_be_requeued_keeps_its_code(tmp_path) -> None:
    job = run_script(tmp_path, CODE="75", REFUSED="1")
    assert job.returncode == 75
    assert "submit it once more to resume" in job.stderr


@pytest.mark.parametrize(
    ("words", "given", "message"),
    [
        ([], {"CONFIG_FILE": ""}, "no config is named.*\n  fix: sbatch .* CONFIG"),
        (["--training.steps", "3"], {"CONFIG_FILE": ""}, "no config is named"),
        ([], {"SLURM_NTASKS": "4"}, "4 tasks for 2 nodes.*\n  fix: .*--ntasks-per-node=1"),
        ([], {"SLURM_SUBMIT_DIR": "/"}, "/ is not the repository\n  fix: cd to it"),
    ],
)
def test_a_wrong_start_is_rejected_before_anything_runs(tmp_path, words, given, message) -> None:
    job = run_script(tmp_path, *words, **given)
    assert (job.returncode, job.stdout) == (2, "")
    assert re.search(message, job.stderr)


def test_a_task_of_an_array_has_its_own_config_and_words(tmp_path) -> None:
    own = {"CONFIG_FILE": "sweep/lr_%a.toml", "SLURM_ARRAY_TASK_ID": "3"}
    job = run_script(tmp_path, "--job.dump_folder", "out/%a", SLURM_ARRAY_JOB_ID="16", **own)
    assert job.stdout.startswith("sweep/lr_3.toml ")
    assert job.stdout.endswith("--job.dump_folder out/3\n")
    assert run_script(tmp_path, "out/%a").stdout.endswith("out/%a\n")  # outside of an array


def test_nothing_is_installed_within_a_slurm_job(tmp_path) -> None:
    """A compute node may have no network, and all nodes would install at once."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in ("pyproject.toml", "requirements.txt", "run_llama_train.sh"):
        shutil.copy(ROOT / name, tmp_path)
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "SLURM_JOB_ID": "17"}
    words = ["bash", tmp_path / "run_llama_train.sh"]
    job = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert job.returncode == 2
    assert "no environment" in job.stderr
    assert not (tmp_path / ".venv").exists()
    (tmp_path / "scripts/environment.sh").unlink()  # sbatch runs a copy in another folder
    job = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert job.returncode == 2
    assert "fix: for Slurm, cd to the repository, then sbatch" in job.stderr
