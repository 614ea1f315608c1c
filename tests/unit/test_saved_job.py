from types import SimpleNamespace

import pytest

from meshwright.config.job_config import Checkpoint, Source
from meshwright.datasets.entry import Entry
from meshwright.errors import ConfigError
from meshwright.saved_job import place_in_data

OLD, NEW = "1" * 40, "2" * 40


def error_of(**saved: object) -> str:
    """What a resume says where the data has changed since."""
    entry = Entry("training", "name", Source(dataset="owner/name"))
    source = SimpleNamespace(entry=entry, content="new", revision=NEW)
    plan = SimpleNamespace(config=SimpleNamespace(checkpoint=Checkpoint()))
    manifest = {"data_content": {"name": "old"}, "config": {}, **saved}
    with pytest.raises(ConfigError, match="new now, old then") as error:
        place_in_data(plan, manifest, [source])
    return str(error.value)


def test_a_dataset_that_has_changed_names_the_commit_to_pin() -> None:
    pin = f"fix: set training.dataset_revision = '{OLD}'; or restore"
    assert pin in error_of(data_revisions={"name": OLD})
    assert "fix: restore" in error_of(data_revisions={"name": NEW})
    assert "fix: restore" in error_of(data_revisions={"name": ""})
    assert "fix: restore" in error_of()  # saved by a version that noted none
