"""Imports: without the garbage collector, which is afterwards as it was; and what a job needs."""

import gc
import subprocess
import sys

import pytest

from meshwright.system.modules import uncollected
from tests.helpers.jobs import CONFIG
from tests.helpers.slow import slow


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


SELDOM = {  # each takes tens of milliseconds or more of the time to the first step
    *("torch.distributed.pipelining", "torch._inductor.compile_fx", "torchao"),
    *("tensorboard", "wandb", "datasets", "pyarrow"),
    *("tokenizers", "sentencepiece", "tiktoken", "transformers", "safetensors.torch"),
}


def test_a_job_imports_nothing_that_few_jobs_need() -> None:
    show = "import sys, meshwright.train.job, meshwright.train.preflight; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    assert "meshwright.train.set_up" in run.stdout.split()
    assert not SELDOM & {*run.stdout.split()}


COMPILER_AND_MESHES = {  # 0.8 s together
    *("torch._dynamo", "sympy", "torch.distributed.tensor", "torch.distributed.fsdp"),
    "torch.distributed.checkpoint",
}


@pytest.mark.parametrize("saves", [True, *slow(False)])
def test_an_eager_job_of_one_rank_imports_neither_compiler_nor_meshes_before_its_first_step(
    tmp_path, saves: bool
) -> None:
    words = ["--job.config_file", str(CONFIG), "--job.dump_folder", str(tmp_path)]
    words += ["--training.steps=2", "--compile.enable=false", "--metrics.log_freq=1"]
    words += [f"--checkpoint.enable={saves}".lower()]
    show = (
        "import sys; from meshwright.config.loader import load_config;"
        "from meshwright.train.preflight import preflight; from meshwright.train.job import run;"
        "show = lambda: print('modules', *sys.modules);"
        "sink = type('', (), {'write': lambda *_: show(), 'close': lambda _: None});"
        f"run(preflight(load_config({words}), 1), [sink()])"
    )
    run = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    lines = [line.split() for line in run.stdout.splitlines() if line.startswith("modules ")]
    at_first_step, at_second = map(set, lines)
    assert not COMPILER_AND_MESHES & at_first_step
    # long before a save, at which packages may have been installed over those in use
    assert ("meshwright.checkpoint.writer" in at_second) == saves


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


@pytest.mark.parametrize("is_asked_for", [True, *slow(False)])
def test_a_job_that_exports_at_its_end_imports_that_at_its_start(is_asked_for: bool) -> None:
    show = (
        "import sys; from meshwright.config.loader import load_config;"
        "from meshwright.train.end import prepare_export;"
        f"prepare_export(load_config(['--checkpoint.last_save_in_hf={is_asked_for}'.lower(),"
        "'--model.tokenizer_path=x'])); print(*sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    needed = {f"meshwright.checkpoint.conversion.{name}" for name in ("export", "tokenizer_files")}
    assert needed & {*run.stdout.split()} == (needed if is_asked_for else set())
