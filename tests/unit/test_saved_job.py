from types import SimpleNamespace

import pytest

from meshwright.config.changes import to_json
from meshwright.config.job_config import Checkpoint, Source
from meshwright.config.loader import load_config
from meshwright.datasets.entry import Entry
from meshwright.errors import ConfigError
from meshwright.preflight import preflight
from meshwright.saved_job import best_of, place_in_data

OLD, NEW = "1" * 40, "2" * 40
FORGOTTEN = (
    "the best validation loss so far, 3.5000 at step 20, counts no longer: it was measured with "
    "other "
)


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


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["--validation.freq=7", "--job.description=b", "--training.local_batch_size=4"], ""),
        (["--validation.num_samples=4", "--validation.freq=7"], "validation.num_samples"),
        (["--training.seq_len=32"], "training.seq_len"),
        (
            ['--validation.datasets=[{dataset = "python_stdlib"}]', "--validation.dataset="],
            "validation.dataset, validation.datasets",
        ),
    ],
)
def test_the_best_validation_counts_as_long_as_the_data_is_the_same(words, keys, caplog) -> None:
    caplog.set_level("INFO", "meshwright")

    def plan_of(*more: str):
        base = ["--model.tokenizer_path=bytes", "--validation.enable=true"]
        return preflight(load_config([*base, *more])[0], 1)

    saved, here = plan_of("--training.local_batch_size=2"), plan_of(*words)
    manifest = {
        "best_validation": [20, 3.5],
        "config": to_json(saved.config),
        "data_identity": saved.data_identity,
    }
    assert best_of(manifest, saved) == (20, 3.5)
    assert best_of(manifest, here) == (None if keys else (20, 3.5))
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [FORGOTTEN + keys] * bool(keys)
    manifest["data_identity"] = saved.data_identity | {"model.tokenizer_path": "another's"}
    assert best_of(manifest, saved) is None
