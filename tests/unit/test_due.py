"""The decisions that follow a step, and how long ranks wait for each other."""

from unittest.mock import MagicMock

import pytest

from meshwright.config.loader import load_config
from meshwright.train import job as train
from meshwright.train.job import due_after

KEYS = {
    "validation.enable": "true",
    "validation.freq": "6",
    "checkpoint.enable": "true",
    "checkpoint.interval": "4",
    "metrics.log_freq": "5",
    "training.gc_freq": "7",
}


def due(step: int, keys: dict[str, str] | None = None, **moment: bool) -> set[str]:
    config = load_config([f"--{key}={value}" for key, value in (KEYS | (keys or {})).items()])
    of_moment = {"is_first": False, "is_last": False, "is_asked_to_stop": False} | moment
    decided = due_after(step, config, **of_moment)
    names = ("stop", "validate", "log", "save", "collect_garbage", "look")
    return {name for name in names if getattr(decided, name)}


@pytest.mark.parametrize(
    ("decided", "wanted"),
    [
        (due(3), set()),
        (due(4), {"save", "look"}),
        (due(5), {"log", "look"}),
        (due(6), {"validate", "log", "look"}),
        (due(7), {"collect_garbage"}),
        (due(1, is_first=True), {"log", "look"}),
        # a job that ends saves once, at its end, and validates if it is done
        (due(4, is_last=True), {"stop", "validate", "log", "look"}),
        (due(4, is_asked_to_stop=True), {"stop", "log", "look"}),
        (due(4, keys={"checkpoint.enable": "false"}), set()),
        (due(6, keys={"validation.enable": "false"}), set()),
        (due(4, keys={"checkpoint.load_only": "true"}), set()),
        (due(1, keys={"checkpoint.enable_first_step_checkpoint": "true"}), {"save", "look"}),
        (due(3, keys={"checkpoint.enable_first_step_checkpoint": "true"}), set()),
    ],
)
def test_a_step_is_followed_by_all_that_is_due(decided: set[str], wanted: set[str]) -> None:
    assert decided == wanted


@pytest.mark.parametrize(
    ("key", "limits"),
    [
        ("compile.enable", ["init_timeout_seconds"]),
        ("training.mask_documents", ["init_timeout_seconds"]),  # compiled kernels, eager or not
        ("training.deterministic", []),
    ],
)
def test_validation_that_compiles_may_take_as_long_as_the_first_step(
    monkeypatch: pytest.MonkeyPatch, key: str, limits: list[str]
) -> None:
    given, job = list[str](), MagicMock()
    eager = [] if key == "compile.enable" else ["--compile.enable=false"]
    job.plan.config = load_config([*eager, f"--{key}=true"])
    job.validate.return_value = {"loss/validation": 1.0}
    monkeypatch.setattr(train, "_set_limit", lambda job, stop, key: given.append(key))
    assert "loss/validation" in train._validate(job, MagicMock(), 7)
    assert given == limits
