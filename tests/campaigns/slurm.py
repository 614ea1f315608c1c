"""Runs `multinode_trainer.slurm` on a real Slurm: wrong starts, then ends at random moments.

python -m tests.campaigns.slurm --ends 30 --seed 1          # as root on Debian 12; 40 minutes

Wrong starts must be rejected at once with the command to use. After each end (a signal, the time
limit, a kill, a power cut, requeue, a node set down) the job must go on by itself, lose no step
beyond the last checkpoint, and compute the losses of an undisturbed run to the bit.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("slurm_cluster.sh")
CLUSTER = Path(os.environ.get("CLUSTER", "/srv/meshwright-slurm"))
REPOSITORY, OUTPUT = CLUSTER / "repository", CLUSTER / "home/out"
INTERVAL = 5
"""Steps between checkpoints."""
CONFIG = f"""
extends = "debug_model"
model.args = {{ n_layers = 2, dim = 64, n_heads = 4 }}
training = {{ steps = 100_000, seq_len = 128, global_batch_size = 8, validation_fraction = 0.0 }}
compile.enable = false
validation.enable = false
metrics.log_freq = 1
checkpoint = {{ interval = {INTERVAL}, keep_latest_k = 3 }}
"""
SIZES = ["--cpus-per-task=1", "--gpus-per-node=0"]
WAIT_S = 300
GRACEFUL = ("usr1", "term", "usr1_to_all", "limit", "requeue")
"""Ends before which the job is told: it saves its last step."""


class WrongError(Exception):
    """The job did not do as the docs promise."""


def cluster(*words: object, check: bool = True) -> str:
    result = subprocess.run(
        ["bash", SCRIPT, *map(str, words)],
        env=os.environ | {"CLUSTER": str(CLUSTER)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if check and result.returncode:
        raise WrongError(f"{words}: {result.stdout}{result.stderr}")
    return result.stdout + result.stderr


def as_user(*words: object, folder: Path = REPOSITORY, **variables: str) -> str:
    """Run words on the login node in an environment that a user has activated."""
    given = [f"{name}={value}" for name, value in variables.items()]
    venv = [f"VIRTUAL_ENV={sys.prefix}", f"PATH={sys.prefix}/bin:/usr/bin:/bin"]
    return cluster("as", "env", f"--chdir={folder}", *venv, *given, *words, check=False)


def submit(*words: object, **variables: str) -> str:
    """Submit the script with the config; return the job's number."""
    given = {"CONFIG_FILE": f"{CLUSTER}/home/job.toml", "NGPU": "1"} | variables
    return as_user("sbatch", "--parsable", *words, **given).split()[-1]


def facts(job: str) -> dict[str, str]:
    """Return what scontrol says of a job, by name."""
    return dict(re.findall(r"(\w+)=(\S*)", cluster("as", "scontrol", "show", "job", job)))


def wait_for(what: str, is_true: Callable[[], bool], seconds: float = WAIT_S) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > end:
            raise WrongError(f"{seconds:.0f} s passed before {what}")
        time.sleep(0.5)


def console(job: str) -> str:
    files = [*REPOSITORY.glob(f"slurm-{job}.out"), *(CLUSTER / "home").glob(f"slurm-{job}.out")]
    return files[0].read_text("utf-8", "replace") if files else ""


def wrong_starts() -> int:
    """Start jobs as users do by mistake; return how many were not rejected rightly."""
    trainer, two = "multinode_trainer.slurm", ["--nodes=2", *SIZES]
    launcher, wrong = REPOSITORY / "run_llama_train.sh", 0
    batches = {
        "no config": ([*two, "--export=NONE", trainer], "no config is named"),
        "no environment": ([*two, "--export=NONE", trainer, "debug_model"], "no environment"),
        "two tasks a node": ([*two, "--ntasks-per-node=2", trainer], "4 tasks for 2 nodes"),
        "the launcher": ([*two, "run_llama_train.sh"], "sbatch multinode_trainer.slurm CONFIG"),
        "wrapped": ([*two, "--wrap", launcher], "this Slurm job has 2 nodes"),
    }
    for name, (words, message) in batches.items():
        job = submit(*words)
        wait_for(f"{name} ends", lambda job=job: facts(job)["JobState"] == "FAILED", 60)
        run_s = facts(job)["RunTime"]
        if facts(job)["ExitCode"] != "2:0" or message not in console(job):
            wrong += 1
            print(f"WRONG {name}: {facts(job)['ExitCode']} {console(job)}")
        print(f"{name}: rejected after {run_s}", flush=True)
    given = {"CONFIG_FILE": f"{CLUSTER}/home/job.toml"}
    python = [f"{sys.prefix}/bin/python", "train.py", "--job.config_file", given["CONFIG_FILE"]]
    directly = {
        "salloc, srun": ["salloc", "-N2", "srun", launcher],
        "a task per rank": ["srun", "-n2", *python],
    }
    for name, words in directly.items():
        began = time.monotonic()
        output = as_user(*words, **given)
        seconds = time.monotonic() - began
        if "srun has started this command 2 times" not in output or "step" in output:
            wrong += 1
            print(f"WRONG {name}: {output}")
        print(f"{name}: rejected after {seconds:.1f} s")
    return wrong


def kill(job: str, process: str, chance: random.Random) -> None:
    """Kill a rank or the launcher on one of the job's nodes."""
    node = chance.choice(
        cluster("as", "scontrol", "show", "hostnames", facts(job)["NodeList"]).split()
    )
    pattern = {"rank": "-m meshwright.train ", "launcher": "-m meshwright.launch "}[process]
    # a launcher's command line holds its ranks', too
    pids = cluster("on", node, "pgrep", "-f", f"^[^ ]*python[^ ]* -u -P {pattern}").split()
    cluster("on", node, "kill", "-KILL", chance.choice(pids))


def end_by(how: str, job: str, chance: random.Random) -> None:
    """End the running slice of a job."""
    nodes = cluster("as", "scontrol", "show", "hostnames", facts(job)["NodeList"]).split()
    node = chance.choice(nodes)
    match how:
        case "usr1" | "term":
            cluster("as", "scancel", "-s", how.upper(), job)
        case "usr1_to_all":
            cluster("as", "scancel", "--full", "-s", "USR1", job)
        case "limit":
            cluster("on", "login", "scontrol", "update", f"JobId={job}", "TimeLimit=1")
        case "requeue":
            cluster("as", "scontrol", "requeue", job)
        case "rank" | "launcher":
            kill(job, how, chance)
        case "cut":
            cluster("cut", node[-1])
        case "down":
            cluster(
                "on", "login", "scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test"
            )
    began = facts(job)["StartTime"]
    wait_for(
        f"{how} ends the slice",
        lambda: facts(job)["JobState"] != "RUNNING" or facts(job)["StartTime"] != began,
    )
    match how:
        case "limit":
            wait_for("the job is queued again", lambda: facts(job)["JobState"] == "PENDING")
            cluster("on", "login", "scontrol", "update", f"JobId={job}", "TimeLimit=UNLIMITED")
        case "cut":
            cluster("mend", node[-1])
        case "down":
            # unless the node has come back by itself
            resume = ["scontrol", "update", f"NodeName={node}", "State=RESUME"]
            cluster("on", "login", *resume, check=False)


def rows(folder: Path) -> dict[int, dict[str, float]]:
    """Return the logged steps of a run; none yet without a file."""
    try:
        lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    except FileNotFoundError:
        return {}
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {r["step"]: r for r in records if "loss/train" in r}


def starts(folder: Path) -> list[int]:
    """Return the steps at which processes of the run began to train."""
    lines = (folder / "history.jsonl").read_text("utf-8").splitlines()
    return [e["step"] for e in map(json.loads, lines) if e["event"] == "start"]


def random_ends(count: int, chance: random.Random) -> int:
    """End a job of two nodes in random ways; return its last step.

    Raises:
        WrongError: if it does not go on, or loses a step.
    """
    job = submit("--nodes=2", *SIZES, "multinode_trainer.slurm", "--job.dump_folder", OUTPUT)
    kinds = [*GRACEFUL, "rank", "launcher", "cut", "down"]
    for number in range(count):
        how = kinds[number % len(kinds)] if number < len(kinds) else chance.choice(kinds)
        begun = number + 1
        wait_for(
            "the job trains",
            lambda begun=begun: (
                (OUTPUT / "history.jsonl").exists() and len(starts(OUTPUT)) >= begun
            ),
        )
        first = starts(OUTPUT)[-1]
        # three starts in a row without a new checkpoint would end the job
        saves = first + INTERVAL + 1
        wait_for("it saves", lambda saves=saves: max(rows(OUTPUT), default=0) > saves)
        time.sleep(chance.uniform(0, 8))
        reached = max(rows(OUTPUT))
        end_by(how, job, chance)
        wait_for(f"the job goes on after {how}", lambda begun=begun: len(starts(OUTPUT)) > begun)
        resumed = starts(OUTPUT)[-1]
        kept = resumed if how in GRACEFUL else resumed + INTERVAL
        print(f"{number}: {how} after step {reached}, resumed at {resumed}", flush=True)
        if kept < reached:
            raise WrongError(f"{how} after step {reached} lost steps: resumed at {resumed}")
    wait_for("the last slice trains", lambda: max(rows(OUTPUT)) > starts(OUTPUT)[-1] + 5)
    cluster("as", "scancel", job)
    return max(rows(OUTPUT))


def compare(last: int) -> int:
    """Train without an end up to step `last`; return how many losses or norms differ in a bit."""
    folder = CLUSTER / "undisturbed"
    words = ["--job.dump_folder", folder, "--ngpu", "2", "--checkpoint.enable=false"]
    run = subprocess.Popen(
        [sys.executable, "-m", "meshwright", "train", CLUSTER / "home/job.toml", *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_for("the undisturbed run", lambda: max(rows(folder), default=0) >= last, 3600)
    finally:
        run.terminate()
        run.wait()
    ended, reference = rows(OUTPUT), rows(folder)
    keys = ("loss/train", "grad_norm", "lr")
    wrong = [
        step
        for step in range(1, last + 1)
        if any(ended[step].get(k) != reference[step].get(k) for k in keys)
    ]
    print(f"{last} steps, {len(wrong)} of them unlike an undisturbed run's {wrong[:5]}")
    return len(wrong)


def main() -> None:
    """Run the campaign and exit with 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ends", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    print(f"seed {given.seed}")
    cluster("start", 3)
    try:
        shutil.rmtree(REPOSITORY, ignore_errors=True)
        ignored = shutil.ignore_patterns(".git", "outputs", ".venv*", "__pycache__", "site")
        shutil.copytree(ROOT, REPOSITORY, ignore=ignored)
        shutil.rmtree(OUTPUT, ignore_errors=True)
        shutil.rmtree(CLUSTER / "undisturbed", ignore_errors=True)
        (CLUSTER / "home/job.toml").write_text(CONFIG)
        subprocess.run(["chown", "-R", "slurmuser", REPOSITORY, CLUSTER / "home"], check=True)
        wrong = wrong_starts()
        wrong += compare(random_ends(given.ends, random.Random(given.seed)))
    finally:
        cluster("stop")
    print(f"{wrong} wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
