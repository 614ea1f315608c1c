"""What differs between a job and the one that saved its checkpoint, and what is said of it."""

import dataclasses
import json
import logging
import math
import re
import tomllib
from pathlib import Path
from unittest.mock import Mock

import pytest

from meshwright.checkpoint import listing
from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.resume_diff import ResumeDiff
from meshwright.config.changes import (
    ABSENT,
    Difference,
    changed,
    differences,
    from_json,
    shown,
    to_json,
)
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.system.errors import ConfigError
from meshwright.system.log import log_to_console, log_to_file, logger
from meshwright.system.modules import code_of
from meshwright.train.resume import place_in_data
from tests.helpers.checkpoints import publish
from tests.helpers.resolved import resolved

STEP = 5
BASE = (
    "--checkpoint.enable",
    *("--model.tokenizer_path", "bytes", "--model.args.vocab_size", "258"),
    *("--training.local_batch_size", "2", "--training.seq_len", "64"),
)


def test_differences_go_into_tables_and_lists_of_tables() -> None:
    old = {"a": {"b": 1, "c": [1, 2], "gone": 0}, "parts": [{"w": 1}, {"w": 2}], "same": [{"x": 1}]}
    new = {"a": {"b": 2, "c": [1], "new": None}, "parts": [{"w": 3}], "same": [{"x": 1}], "d": {}}
    assert [*differences(old, new)] == [
        Difference("a.b", 1, 2),
        Difference("a.c", [1, 2], [1]),
        Difference("a.new", ABSENT, None),
        Difference("a.gone", 0, ABSENT),
        Difference("parts.0.w", 1, 3),
        Difference("parts.1", {"w": 2}, ABSENT),
        Difference("d", ABSENT, {}),
    ]
    assert [*differences(new, new)] == []


@pytest.fixture
def resume(tmp_path: Path):
    """Save with some settings, then look at a resume with others."""

    def save(words: tuple[str, ...], manifest: dict) -> None:
        plan = resolved(load_config([*BASE, "--job.dump_folder", str(tmp_path), *words]), 1)
        of_job = {
            "model_name": plan.config.model.name,
            "model_args": dataclasses.asdict(plan.model_args),
            "data_identity": plan.data_identity,
            "frozen": sorted(plan.frozen),
            "config": to_json(plan.config),
        }
        publish(plan.checkpoint_folder, STEP, **of_job | manifest)

    def look(*words: str, saved_with: tuple[str, ...] = (), **manifest: object) -> ResumeDiff:
        if not listing.saved_steps(tmp_path / "checkpoint"):
            save(saved_with, manifest)
        words = (*BASE, "--job.dump_folder", str(tmp_path), *words)
        return resolved(load_config(words), 1).resume_diff

    return look


def said(drift: ResumeDiff, caplog) -> list[tuple[int, str]]:
    caplog.set_level(logging.INFO, "meshwright")
    drift.log()
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_the_same_job_says_nothing(resume, caplog) -> None:
    infinite = ("--training.max_norm", "inf")
    drift = resume(*infinite, saved_with=infinite)
    assert said(drift, caplog) == []
    text = json.dumps(to_json(drift.config), allow_nan=False)
    assert JobConfig.model_validate(from_json(json.loads(text))) == drift.config
    assert from_json({"options": {"least": "-Infinity"}}) == {"options": {"least": -math.inf}}


def test_changed_keys_are_listed_in_one_line(resume, caplog) -> None:
    drift = resume(
        *("--training.max_norm", "inf", "--training.dtype", "bfloat16", "--compile.enable=false"),
        *("--model.frozen", '["norm.weight"]', "--metrics.log_freq", "5"),
        *("--optimizer.groups", "[{parameters=['*norm.weight'], lr_scale=0.5}]"),
    )
    ((level, text),) = said(drift, caplog)
    head, _, changed = text.partition(": ")
    assert (level, head) == (logging.INFO, "resuming step-5 with changed keys")
    assert changed == (
        "model.frozen = ['norm.weight'] (was []), training.max_norm = inf (was 1.0), "
        "training.dtype = 'bfloat16' (was 'float32'), optimizer.groups.0 = {parameters = "
        "['*norm.weight'], lr_scale = 0.5} (was absent), "
        "compile.enable = false (was true), metrics.log_freq = 5 (was 10)"
    )


def error_of(resume, *words: str, **saved: object) -> str:
    with pytest.raises(ConfigError) as error:
        resume(*words, **saved)
    return str(error.value)


def test_all_that_cannot_work_is_named_at_once(resume, tmp_path) -> None:
    error = error_of(
        resume,
        *("--model.args.dim", "64", "--training.seed", "1"),
        saved_with=("--model.frozen", '["norm.weight"]'),
    )
    checkpoint = tmp_path / "checkpoint" / "step-5"
    assert error.splitlines() == [
        f"model.args.dim = 64: checkpoint {checkpoint} was saved with 256",
        "  training.seed = 1: it was saved with 0",
        "  model.frozen = []: it has no optimizer state for what was frozen: norm.weight",
        "  its place in the data is valid only for the same samples in the same order: a resume "
        "would repeat some and skip others",
        "  fix: use another job.dump_folder, or the values it was saved with",
    ]
    error = error_of(resume, "--training.seed", "1")
    assert 'set checkpoint.exclude_from_loading = ["dataloader", "optimizer"], to start' in error


GIVEN = ("--model.args.head_dim", "32")


@pytest.mark.parametrize(
    ("saved_with", "other"),
    [((), ("--model.args.head_dim", "64")), (GIVEN, ("--model.args.n_heads", "4"))],
)
def test_the_same_width_of_heads_may_be_given_or_follow(resume, saved_with, other) -> None:
    """A head of the debug model has 256 / 8."""
    for words in ((), GIVEN, ("--model.args.n_heads", "8")):
        assert resume(*words, saved_with=saved_with).model == []
    error = error_of(resume, *other)
    assert re.search(r"model.args.head_dim = 64: .* saved with 32\n", error)


def test_edited_code_of_the_users_is_listed(resume, tmp_path, caplog) -> None:
    module = tmp_path / "mine.py"
    module.write_text("SINKS = {}")
    own = ("--experimental.custom_import", str(module))
    saved = {"saved_with": own, "own_code": code_of(str(module))}
    assert said(resume(*own, **saved), caplog) == []
    module.write_text("SINKS = {} ")
    assert said(resume(*own), caplog) == [
        (
            logging.INFO,
            "resuming step-5 with changed keys: "
            f"experimental.custom_import = {str(module)!r} (its code was edited)",
        )
    ]


def test_a_job_whose_data_has_ended_is_done(resume) -> None:
    """With the same data and batch: others end elsewhere, for which the weights alone are not
    enough."""
    once, mixture = ("--training.max_epochs", "1"), parts("weight=1", "weight=3")
    ended = {"model_only": True, "data_ended": True, "saved_with": (*mixture, *once)}
    assert resume(*mixture, *once, **ended).is_done
    for words in (
        (*mixture, "--training.max_epochs", "2"),
        (*mixture, *once, "--training.global_batch_size", "4"),
        (*parts("weight=1", "weight=2"), *once),
    ):
        assert "holds the weights only" in error_of(resume, *words)


def parts(*of_each: str) -> tuple[str, str]:
    tables = [f"{{dataset='sympy_source', name='{n}', {text}}}" for n, text in enumerate(of_each)]
    return "--training.datasets", f"[{', '.join(tables)}]"


def test_a_part_of_a_mixture_that_differs_is_named(resume) -> None:
    saved = parts("weight=1", "weight=3")
    other = parts("weight=1", "weight=2, dataset_split='validation'")
    error = error_of(resume, *other, saved_with=saved)
    assert error.startswith("training.datasets.1.dataset_split = 'validation': checkpoint ")
    assert "was saved with 'train'\n" in error
    assert "weight" not in error
    assert "training.datasets.1 = absent: checkpoint" in error_of(resume, *parts("weight=1"))
    budgets = parts("tokens=1_000_000_000_000", "tokens=1_000_000_000_000")
    assert error_of(resume, *budgets).startswith("training.datasets.0.tokens = 1000000000000: ")


def test_a_mixture_may_go_on_with_other_weights(resume, caplog) -> None:
    saved = parts("weight=1", "weight=3")
    drift = resume(*parts("weight=1", "weight=2"), saved_with=saved)
    assert drift.is_reweighted
    assert [text for _, text in said(drift, caplog)] == [
        "resuming step-5 with changed keys: training.datasets.1.weight = 2.0 (was 3.0)"
    ]
    assert not resume(*saved).is_reweighted
    manifest = read_manifest(drift.checkpoint)
    manifest["data"] = {"sample": 8, "counts": [2, 6], "places": {}}
    plan = Mock(config=drift.config, checkpoint_folder=drift.checkpoint.parent)
    plan.begins_stage_with.return_value = False
    for is_reweighted, begin in ((True, (2, 6)), (False, ())):
        plan.resume_diff.is_reweighted = is_reweighted
        assert place_in_data(plan, manifest, []).weighted_from == begin


def test_a_mixture_may_go_on_with_other_loss_weights(resume, caplog) -> None:
    saved = parts("weight=1", "weight=3")
    drift = resume(*parts("weight=1", "weight=3, loss_weight=2"), saved_with=saved)
    assert not drift.is_reweighted
    assert [text for _, text in said(drift, caplog)] == [
        "resuming step-5 with changed keys: training.datasets.1.loss_weight = 2.0 (was 1.0)"
    ]


def test_a_stage_begins_with_what_it_is_without_a_warning(resume, caplog) -> None:
    one = "{until_tokens=640, lr=1e-4, datasets=[{dataset='sympy_source', weight=1}]}"
    stages = (
        "--compile.enable=false",
        "--training.global_batch_size=2",
        "--training.stages",
        f"[{one}, {{}}]",
    )
    drift = resume(*stages, "--training.max_norm=2", saved_with=stages)
    assert [text.partition(": ")[2] for _, text in said(drift, caplog)] == [
        "training.max_norm = 2.0 (was 1.0)"
    ]
    # no stage says these: its place would be one in other data, as on any other step
    assert "training.seed = 1: " in error_of(resume, *stages, "--training.seed=1")


EXCLUDE = ("--checkpoint.exclude_from_loading", '["dataloader"]')


def test_other_data_may_be_begun_with_its_first_sample(resume, caplog) -> None:
    drift = resume(*EXCLUDE, "--training.seed", "1", "--training.dataset_split", "validation")
    assert [text.partition(": ")[2] for _, text in said(drift, caplog)] == [
        "training.dataset_split = 'validation' (was 'train'), training.seed = 1 (was 0), "
        "checkpoint.exclude_from_loading = ['dataloader'] (was [])",
    ]
    assert "model.args.dim = 64: " in error_of(resume, *EXCLUDE, "--model.args.dim", "64")


def test_what_is_left_out_is_left_out_once(resume) -> None:
    """A job that is started again goes on where it was, though its config still says so."""
    error = error_of(resume, *EXCLUDE, "--training.seed", "1", saved_with=EXCLUDE)
    assert error.endswith("or set checkpoint.load_step to its step, to start with the first sample")
    named = ("--checkpoint.load_step", str(STEP))
    assert resume(*EXCLUDE, *named, "--training.seed", "1").data == []


MUON = ("--optimizer.name", "muon")


@pytest.mark.parametrize("saved_with", [(), MUON])
def test_an_optimizer_of_another_kind_is_refused_before_a_rank_starts(resume, saved_with) -> None:
    other = () if saved_with else MUON
    error = error_of(resume, *other, saved_with=saved_with)
    assert re.search(
        "(?s)^optimizer.name = .*a different optimizer.*fix: use that, or start", error
    )
    resume(*other, "--checkpoint.exclude_from_loading", '["optimizer"]')
    assert resume(*other, "--training.steps", str(STEP)).is_done
    resume(*saved_with)
    adam_for_all = "[{parameters=['*'], optimizer='Adam'}]"  # whose state is AdamW's
    if not saved_with:
        resume(*MUON, "--optimizer.groups", adam_for_all)


def test_what_was_frozen_may_be_trained_with_a_fresh_optimizer(resume) -> None:
    frozen = ("--model.frozen", '["norm.weight"]')
    assert "no optimizer state for what was frozen" in error_of(resume, saved_with=frozen)
    assert resume("--checkpoint.exclude_from_loading", '["optimizer"]').trained_now == []


def test_a_config_of_another_version_is_no_obstacle(resume, caplog) -> None:
    """It lacks keys and a section, has some that are gone, and values of other types."""
    config = to_json(JobConfig()) | {"fp8": {"enable": True}, "comm": 3}
    del config["validation"], config["optimizer"]["eps"]
    config["optimizer"]["momentum"] = 0.9
    config["training"] = {"steps": "many"}
    identity = {"training.seq_len": 64, "model.tokenizer_path": "bytes"}  # the rest as by default
    words = ("--optimizer.beta1", "0.8", "--validation.enable")
    drift = resume(*words, config=config, data_identity=identity)
    ((_, text),) = said(drift, caplog)
    for change in (
        "optimizer.beta1 = 0.8 (was 0.9)",
        "training.steps = 10000 (was 'many')",
        "optimizer.momentum = absent (was 0.9)",
        "fp8 = absent (was {enable = true})",
        "validation.enable = true (was absent)",
    ):
        assert change in text
    assert "optimizer.eps" not in text


def test_what_another_process_has_said_goes_to_the_file_alone(resume, capsys, tmp_path) -> None:
    drift = resume("--training.steps", "20", "--metrics.log_freq", "5")
    try:
        log_to_console()
        log_to_file(tmp_path, 0)
        drift.log(is_printed=True)
        assert capsys.readouterr().out == ""
        drift.log()
    finally:
        for handler in logger.handlers:
            handler.close()
    assert capsys.readouterr().out.count("resuming step-5 with") == 1
    assert (tmp_path / "rank_0.log").read_text().count("resuming step-5 with") == 2


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"training": {"steps": -5}}, "training.steps = -5: should be greater than 0"),
        ({"training": {"steps": "many"}}, "training.steps = 'many': must be a whole number"),
        (
            {"training": {"stepz": 5}},
            "unknown key training.stepz\n  fix: did you mean",
        ),
        ({"trainin": {"steps": 5}}, "unknown section trainin\n  fix: did you mean training?"),
    ],
)
def test_a_change_is_checked(update, message) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        changed(JobConfig(), update)


def test_a_change_keeps_what_was_given() -> None:
    """Some rules ask whether a key was given at all, such as `model.name` beside a folder."""
    before = changed(JobConfig(), {"model": {"flavor": "debugmodel"}})
    after = changed(before, {"model": {"frozen": ["norm.*"]}, "training": {"steps": 5}})
    assert after.model.model_fields_set == {"flavor", "frozen"}
    assert after.training.model_fields_set == {"steps"}
    assert changed(after, {}) == after


@pytest.mark.parametrize("table", [{"a b": 1}, {"a.b": [True, {"c-d": "e"}]}, {"é": {}, "f_1": []}])
def test_a_table_is_shown_as_a_toml_has_it(table) -> None:
    assert tomllib.loads(f"key = {shown(table | {'none': None})}") == {"key": table}
