"""The commands of README and docs run in their order, as a reader would type them.

`tests/helpers/small_meshwright.py` lowers steps; `python -m tests.campaigns.new_user` does not.
"""

import os
import shutil
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.campaigns.new_user import commands, example
from tests.helpers.jobs import ROOT, environment

FIRST = ["README", "quickstart", "tutorial", "fine_tuning", "export", "monitoring", "checkpoints"]
FIRST += [
    "exit_codes",
    "troubleshooting",
    "continue_pretraining",
    "sweep",
    "loss_spikes",
    "replay",
    "evaluate",
]
STORIES = {
    "a job of one's own": FIRST,
    "other jobs": [
        "configuration",
        "extending",
        "parallelism",
        "experts",
        "data_order",
        "mesh",
        "clusters",
        "compare",
        "upgrading",
    ],
    "pages to look up": [
        "README of docs",
        "architecture",
        "data",
        "mixtures",
        "packing",
        "tokenizers",
        "glossary",
        "hyperparameters",
        "experiments",
        "ladder",
        "containers",
        "correctness",
        "commands",
        "config_reference",
        "python",
    ],
}
FILES = {"README": ROOT / "README.md", "README of docs": ROOT / "docs/README.md"}
ELSEWHERE = {
    "the network": ("git clone *", "pip install *", "apt-get *", "hf *", "lm_eval *", "*Llama-3*"),
    "a gated tokenizer": ("meshwright check llama3*", "meshwright train llama3*"),
    "GPUs, Slurm, other frameworks": (
        "*sbatch *",
        "srun *",
        "scripts/gpu_smoke.sh*",
        "*benchmarks/*",
    ),
    "the environment of the tests": ("source .venv/bin/activate*",),
    "a reader who looks on": ("nohup *", "tail -f *", "tensorboard *", "less *", "pkill *"),
    "a rank that hangs": ("grep -A 12 *",),
    "a file of the reader's": ("meshwright tokenize *",),
    "tests/distributed/test_prove.py": ("meshwright prove *",),
    "tests/unit/test_extension.py": ("MLFLOW_TRACKING_URI=*",),
    "tests/integration/test_python.py": ("meshwright train outputs/notebook/*",),
    "tests/unit/test_linux_corpus.py": ("*linux_corpus*",),
    "tests/distributed/test_replay_command.py": ("meshwright replay *", "* --documents *"),
    "tests/distributed/test_diverge.py": (
        "meshwright diverge *",
        "*flipped_train.py *",
        "*patched*",
    ),
    "tests/distributed/test_rewind.py": ("* --training.exclude *",),
    "tests/unit/test_experiment.py": ("meshwright experiment *",),
    "tests/unit/test_ladder.py": ("meshwright ladder *",),
    "tests/unit/test_search.py": ("* --search*",),
    "tests/integration/test_campaigns.py": ("python -m tests.faults*",),
}
"""Commands that this test does not run: what they need, or the test that runs them."""


def page(name: str) -> Path:
    return FILES.get(name, ROOT / f"docs/{name}.md")


def is_elsewhere(line: str) -> bool:
    return any(fnmatchcase(line, pattern) for names in ELSEWHERE.values() for pattern in names)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As a clone, with files that pages take for granted."""
    clone = tmp_path / "clone"
    (clone / "bin").mkdir(parents=True)
    for name in ("assets", "benchmarks", "docs", "train_configs"):
        (clone / name).symlink_to(ROOT / name)
    (clone / "my_exaone4.py").write_text(example("exaone4") + example("model"), "utf-8")
    (clone / "my_sigmoid.py").write_text(example("sigmoid"), "utf-8")
    (clone / "my_adafactor.py").write_text(example("adafactor"), "utf-8")
    (clone / "my_largest.py").write_text(example("optimizer"), "utf-8")
    small = f'exec {sys.executable} -m tests.helpers.small_meshwright {{}}"$@"\n'
    for name, words in (("bin/meshwright", ""), ("run_llama_train.sh", "train ")):
        (clone / name).write_text(f"#!/bin/sh\n{small.format(words)}")
        (clone / name).chmod(0o755)
    (clone / "outputs").mkdir()
    for name in ("a", "b", "run", "adamw", "muon"):
        (clone / "outputs" / name).symlink_to("my_job")
    return clone


@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES)
def test_the_commands_of_pages_run_in_their_order(story: str, folder: Path) -> None:
    path = f"{folder / 'bin'}:{sys.prefix}/bin:{os.environ['PATH']}"
    variables = environment(PYTHONPATH=ROOT, CONFIG_FILE="") | {"PATH": path}
    for name in STORIES[story]:
        for aside in folder.glob("outputs/my_job/checkpoint/*.aside*"):
            shutil.rmtree(aside)  # two pages go back more often than one job may
        for line in commands(page(name)):
            if is_elsewhere(line):
                continue
            done = subprocess.run(
                ["bash", "-c", line],
                cwd=folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=300,
            )
            # a comparison ends with 1 if it found a difference
            is_told = " diff " in line and done.returncode == 1
            assert done.returncode == 0 or is_told, f"{name}: {line}\n{done.stdout}{done.stderr}"


def test_every_page_is_in_a_story() -> None:
    told = [page(name) for names in STORIES.values() for name in names]
    assert sorted(told) == sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def test_every_reason_is_needed_and_its_test_is_there() -> None:
    lines = [line for names in STORIES.values() for name in names for line in commands(page(name))]
    for reason, patterns in ELSEWHERE.items():
        assert not reason.startswith("tests/") or (ROOT / reason).is_file()
        for pattern in patterns:
            assert any(fnmatchcase(line, pattern) for line in lines), pattern
    assert sum(not is_elsewhere(line) for line in lines) > 60
