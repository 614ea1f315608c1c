"""The shortest forms of the campaigns of `tests/campaigns`, which attack whole jobs for hours."""

import ast
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.campaigns import divergence, mutations, signals
from tests.helpers.jobs import ROOT, ended, environment

pytestmark = pytest.mark.slow
FAULTS = ["stray_files", *["full"] * (os.geteuid() == 0)]
CASES = {  # words, and the end of the output
    "carried_rates": (["--widths", "32", "64", "--steps=12"], r"best: \S+, \S+, in .* min\n$"),
    "consumers": (
        ["--only=transformers", "--family=qwen3", "--seed=3"],
        r"(\| transformers .* \| (bytes|pieces) \| equal; \de-0[5-9] \|\n){2}$",
    ),
    "documents": (["--runs=1", "--seed=1"], "10 of 10 right, each in at most .* processor\n$"),
    "every_mesh": (["gpt_oss", "--cases=1"], "gpt_oss: 1 of 1 cases equal one process\n$"),
    "hangs": (["--ranks=2", "--limit=5", "--cases=save:stop"], r"save +stop +0 +save .*\n$"),
    "interruptions": (
        # a kill during a save in the background
        ["--kills=1", f"--file-faults={len(FAULTS)}", "--steps=30", "--seed=40"]
        + [f"--only={fault}" for fault in FAULTS],
        "all as they should be, in .* s\n$",
    ),
    "moved_jobs": (["--jobs=1", "--seed=1"], "  0 equal .*\n1 jobs, seed 1: 0 wrong .*\n$"),
    "real_arms": (
        ["nulls", "--count=1", "--only", "log_freq"],
        "log_freq +identical +1\n1 null arms, seed 0: 0 of 1 verdicts are wrong\nin .* s\n$",
    ),
    "random_configs": (
        ["--configs=2", "--seed=11", "--most-ranks=2"],
        "(.* equal .*\n){2}.* in .*\n2 configs, seed 11: 0 wrong\n$",
    ),
    "rounds": (["--rounds=2"], r"(\| round-\d .*\n){2}\d+ runs, the longest of .*\n$"),
}


def run(module: str, *words: object, folder: Path) -> str:
    result = subprocess.run(
        [sys.executable, "-m", module, *map(str, words)],
        env=environment(TMPDIR=folder, PYTHONPATH=ROOT),
        capture_output=True,
        text=True,
        timeout=580,
    )
    return ended(result, 0).stdout


@pytest.mark.parametrize("name", CASES)
def test_the_job_stands_a_short_campaign(name: str, tmp_path: Path) -> None:
    words, end = CASES[name]
    output = run(f"tests.campaigns.{name}", *words, folder=tmp_path)
    assert re.search(end, output), output


def test_every_patch_of_the_divergence_campaign_has_its_place() -> None:
    for file, old, _ in divergence.CODE:
        assert (ROOT / "meshwright" / file).read_text("utf-8").count(old) == 1, (file, old)


QUICK = (  # of faults that other frameworks had
    *("norm_of_copies", "clipped_by_the_norm_of_a_stage", "averaged_once_more"),
    *("mean_of_the_means_of_microbatches", "gradient_not_divided_in_a_pipeline"),
    *("vocabulary_that_tp_does_not_divide", "keys_gathered_in_another_order"),
    *("validation_reads_on", "second_epoch_without_its_first_part", "muon_of_shards"),
    *("layers_numbered_anew_on_each_stage", "moments_lost_at_a_resume"),
)
QUICK_TOO = (
    *("tp_ranks_begin_alike", "label_off_at_a_cp_boundary", "places_of_other_ranks_not_saved"),
    *("documents_that_never_reach_the_layers", "gradient_of_states_not_summed_over_vocabulary"),
    *("rotary_cache_cast_with_the_inputs", "rows_come_back_in_another_order"),
    *("loads_not_summed_over_tp", "norm_of_heads_not_summed_over_tp"),
    *("attention_across_documents_under_cp", "router_gradient_not_summed_over_tp"),
)
LATER = (
    *("softmax_of_own_rows", "output_keeps_the_last_chunk", "upper_ids_clamped"),
    *("positions_not_restarted_under_cp", "swapped_microbatches", "validation_counts_padding"),
    *("sums_in_bf16", "microbatches_added_up_in_bf16"),
    *("another_epsilon_for_shards", "weights_of_shards_kept_in_bf16"),
    *("mean_of_the_first_stage_alone", "rows_saved_in_another_order"),
    "a_token_goes_to_its_worst_expert",
)
THIS_YEAR = (  # that commands find; tests/unit/test_faults.py has the others
    *("rates_of_groups_lost_at_a_resume", "moments_shifted_by_the_padding_of_shards"),
    *("gathered_weights_of_the_step_before", "labels_without_their_mask"),
    *("early_step_at_every_microbatch", "copies_reduced_with_the_first_microbatch"),
    *("norm_in_the_type_of_gradients", "norm_gradients_summed_over_tp_in_bf16"),
    *("tokens_counted_once_a_tp_rank", "flops_of_this_ranks_layers"),
    *("schedule_overrides_the_rates_of_groups", "rope_scaling_dropped"),
    "embedding_read_from_the_output",
)
CLEAN = ("norm_of_copies", "moments_lost_at_a_resume", "microbatches_added_up_in_bf16")


@pytest.mark.parametrize(
    ("words", "end"),
    [
        (["--only", *QUICK], "12 cases: 12 found, 12 of them named\n"),
        (["--only", *QUICK_TOO], "11 cases: 11 found, 11 of them named\n"),
        (["--only", *LATER], "13 cases: 13 found, 13 of them named\n"),
        (["--only", *THIS_YEAR], "13 cases: 13 found, 13 of them named\n"),
        (["--clean", "--only", *CLEAN], "3 cases: 0 found, 0 of them named\n"),
    ],
)
def test_faults_of_others_are_named(words: list[str], end: str, tmp_path: Path) -> None:
    output = run("tests.faults", *words, folder=tmp_path)
    assert output.endswith(end), output


def test_every_mutation_of_the_package_is_a_program() -> None:
    """Else each would be caught, by the first import."""
    for mutation in mutations.draw(seed=38):
        ast.parse(mutation.of((ROOT / mutation.file).read_bytes()))


def test_a_new_user_s_page_is_run_as_printed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\necho one > file\ncat file\nfalse\ntest a = b\n```\n\n```\none ...\ntwo\n```\n"
    )
    words = ["tests.campaigns.new_user", "--skip", "fal*", "--may-fail", "test *", page]
    output = run(*words, folder=tmp_path)
    assert "    one\n[" in output
    assert re.findall("printed otherwise: (.*)", output) == ["two"]


@pytest.mark.parametrize("command", ["false", "(exit 2)"])
def test_a_new_user_s_page_ends_at_a_command_that_fails(command: str, tmp_path: Path) -> None:
    """One that may exit with 1 and exits with 2, too."""
    page = tmp_path / "page.md"
    page.write_text(f"```bash\n{command}\necho more\n```\n")
    words = ["tests.campaigns.new_user", "--may-fail", "(exit *", str(page)]
    result = subprocess.run(
        [sys.executable, "-m", *words],
        env=environment(TMPDIR=tmp_path, PYTHONPATH=ROOT),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended(result, 1).stderr == f"failed: {command}\n"


CELLS = (  # of signals that decide most
    signals.Cell("INT", "group", "step", "pipe"),  # Ctrl-C ends `| tee`, too
    signals.Cell("HUP", "group", "step", "terminal"),  # a window is closed
    signals.Cell("TERM", "launcher", "setup", "nohup"),
    signals.Cell("USR1", "launcher", "export", "nohup"),
)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[signals.Cell, signals.Result]:
    """The cells wait more than they compute."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        patch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("signals")))
        with ThreadPoolExecutor(2) as pool:
            done = pool.map(lambda cell: signals.run(cell, ROOT, ranks=1, save_s=1.0), CELLS)
            return dict(zip(CELLS, done, strict=True))


@pytest.mark.parametrize("cell", CELLS, ids=" ".join)
def test_a_signal_saves_the_step_and_leaves_no_process(results, cell: signals.Cell) -> None:
    assert signals.fault(cell, results[cell]) == "", results[cell]
