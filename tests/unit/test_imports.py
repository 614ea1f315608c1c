"""Imports: without the garbage collector, which is afterwards as it was; and what a job needs."""

import gc
import subprocess
import sys

import pytest

from meshwright.imports import uncollected


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
    show = "import sys, meshwright.train, meshwright.preflight; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    assert "meshwright.set_up" in run.stdout.split()
    assert not SELDOM & {*run.stdout.split()}


@pytest.mark.parametrize("is_asked_for", [True, False])
def test_a_job_that_exports_at_its_end_imports_that_at_its_start(is_asked_for: bool) -> None:
    show = (
        "import sys; from meshwright.config.loader import load_config;"
        "from meshwright.final_export import prepare_export;"
        f"prepare_export(load_config(['--checkpoint.last_save_in_hf={is_asked_for}'.lower(),"
        "'--model.tokenizer_path=x'])[0]); print(*sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    assert ("meshwright.exchange.export_job" in run.stdout.split()) == is_asked_for
