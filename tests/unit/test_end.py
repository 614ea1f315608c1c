"""How a job ends that cannot read its data."""

import pytest

from meshwright.config.job_config import Checkpoint
from meshwright.system.errors import ConfigError, DataError, StorageError, TrainingError
from meshwright.train.end import raise_data_error
from meshwright.train.stop import _as_plain

GONE = StorageError("the hub does not answer\n  fix: again")
BAD = ConfigError("training.dataset_path", "not JSON")


@pytest.mark.parametrize(
    ("error", "is_new", "enable", "kind"),
    [
        (BAD, False, True, ConfigError),  # started again, it would go in circles
        (BAD, True, True, DataError),
        (GONE, False, True, StorageError),
        (GONE, False, False, StorageError),  # there is nothing to lose
        (GONE, True, True, DataError),
        (GONE, True, False, TrainingError),
    ],
)
def test_only_what_may_pass_is_started_again_without_a_step(error, is_new, enable, kind) -> None:
    config = Checkpoint(enable=enable)
    told = _as_plain(error)  # by the rank that has it
    with pytest.raises(kind, match="rank 1: ") as caught:
        raise_data_error(config, {1: told}, 7, is_new=is_new)
    assert type(caught.value) is kind
    assert str(caught.value).count("fix: ") <= 1
