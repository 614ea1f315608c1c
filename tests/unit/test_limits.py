"""How long ranks wait for each other."""

from unittest.mock import MagicMock

import pytest

from meshwright.config.job_config import JobConfig
from meshwright.train import job as train


@pytest.mark.parametrize(
    ("section", "key", "limits"),
    [
        ("compile", "enable", ["init_timeout_seconds"]),
        ("training", "mask_documents", ["init_timeout_seconds"]),
        ("training", "deterministic", []),
    ],
)
def test_validation_that_compiles_may_take_as_long_as_the_first_step(
    monkeypatch: pytest.MonkeyPatch, section: str, key: str, limits: list[str]
) -> None:
    """Masks have compiled kernels in a job that is not compiled, too."""
    eager: dict[str, dict[str, bool]] = {"compile": {"enable": False}}
    config, given = JobConfig.model_validate(eager | {section: {key: True}}), list[str]()
    job = MagicMock()
    job.plan.config = config
    job.validate.return_value = {"loss/validation": 1.0}
    monkeypatch.setattr(train, "_set_limit", lambda job, stop, key: given.append(key))
    assert "loss/validation" in train._validate(job, MagicMock(), 7)
    assert given == limits
