"""Imports: without the garbage collector, which is afterwards as it was; and what a job needs."""

import gc
import subprocess
import sys

import pytest

from meshwright.system.modules import has_torch, is_installed, uncollected
from tests.helpers.jobs import CONFIG


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_off_within_and_as_it_was_afterwards(is_on: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if is_on else gc.disable)()
        with uncollected():
            assert not gc.isenabled()
            new = [object()]
            new.append(new)
        assert gc.isenabled() == is_on
        assert not any(each is new for each in gc.get_objects())  # full collections pass it over
    finally:
        (gc.enable if before else gc.disable)()


def test_a_folder_with_the_name_of_a_package_is_none(tmp_path, monkeypatch) -> None:
    """As wandb/, which W&B makes: the job ended with "module 'wandb' has no attribute 'init'"."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "folder_of_files").mkdir()
    assert not is_installed("folder_of_files")
    assert not is_installed("never_heard_of")
    assert is_installed("json")
    (tmp_path / "one_file.py").touch()
    assert is_installed("one_file")


def test_importing_the_package_ends_nothing_and_imports_little() -> None:
    program = "import sys; sys.platform = 'darwin'; import meshwright; print(len(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) < 150  # torch has thousands


SELDOM = {  # each takes tens of milliseconds or more of the time to the first step
    *("torch.distributed.pipelining", "torch._inductor.compile_fx", "torchao"),
    *("tensorboard", "wandb", "datasets", "pyarrow"),
    *("tokenizers", "sentencepiece", "transformers", "safetensors.torch"),
}
COMPILER_AND_MESHES = {  # 0.8 s together
    *("torch._dynamo", "sympy", "torch.distributed.tensor", "torch.distributed.fsdp"),
    "torch.distributed.checkpoint",
}
EXPORT = {f"meshwright.checkpoint.conversion.{name}" for name in ("export", "tokenizer_files")}
JOB = """
import sys, meshwright.train.job, meshwright.train.resolve
from meshwright.config.loader import load_config
from meshwright.train.end import prepare_export
from tests.helpers.resolved import resolved

class Sink:
    def write(self, figures): print("modules", *sys.modules)
    def close(self): pass

Sink().write({})
meshwright.train.job.run(resolved(load_config(sys.argv[1:]), 1), [Sink()])
for is_asked_for in ("false", "true"):
    words = [f"--checkpoint.last_save_in_hf={is_asked_for}", "--model.tokenizer_path=x"]
    prepare_export(load_config(words))
    Sink().write({})
"""


def test_an_eager_job_of_one_rank_imports_what_it_needs_when_it_does(tmp_path) -> None:
    words = ["--job.config_file", str(CONFIG), "--job.dump_folder", str(tmp_path)]
    words += ["--training.steps=2", "--compile.enable=false", "--metrics.log_freq=1"]
    words += ["--checkpoint.enable=true", "--optimizer.name=muon"]  # AdamW for the rest
    run = subprocess.run([sys.executable, "-c", JOB, *words], capture_output=True, text=True)
    lines = [line.split() for line in run.stdout.splitlines() if line.startswith("modules ")]
    assert len(lines) == 5, run.stderr
    start, first_step, second_step, without_export, with_export = map(set, lines)
    assert "meshwright.train.set_up" in start
    assert not SELDOM & start
    if not has_torch(2, 14):  # whose meshes themselves import the compiler
        assert not COMPILER_AND_MESHES & first_step
    # long before a save, at which packages may have been installed over those in use
    assert "meshwright.checkpoint.writer" in second_step - first_step
    assert not EXPORT & without_export
    assert with_export >= EXPORT


def test_a_plan_of_a_wrong_config_imports_no_torch() -> None:
    words = ["plan", str(CONFIG), "--device", "h100", "--world-size", "8", "--training.step", "3"]
    show = (
        "import sys; from meshwright.commands.main import main\n"
        f"sys.argv[1:] = {words}\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True)
    assert run.returncode == 2
    assert "training.step" in run.stderr
    assert run.stdout.split()[-1] == "False"
