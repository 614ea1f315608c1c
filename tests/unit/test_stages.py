"""[[training.stages]]: one config per stage, its errors, and the place in the data at its start."""

from pathlib import Path

import pytest

from meshwright.config.changes import changes, config_defaults, to_json
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.config.stages import staged
from meshwright.system.errors import ConfigError
from meshwright.train.preflight import Plan, preflight
from meshwright.train.resume import place_in_data
from tests.helpers.texts import LENGTH, TEXTS, cached

TOML = """
[job]
dump_folder = "{folder}/out"

[model]
args = {{ dim = 16, n_layers = 1, n_heads = 2, n_kv_heads = 2, hidden_dim = 16, vocab_size = 258 }}
tokenizer_path = "bytes"

[training]
seq_len = 16
local_batch_size = 2
global_batch_size = 8
steps = 24
{training}

[checkpoint]
enable = true
last_save_in_hf = true

{stages}
"""

SOURCES = """
[[training.datasets]]
name = "a"
weight = 3
[[training.datasets]]
name = "b"
weight = 1
"""

THREE = """
[[training.stages]]
until_tokens = 1000
[[training.stages]]
until_tokens = 3072
weights = { a = 1, b = 4 }
global_batch_size = 16
lr = 4e-4
[[training.stages]]
seq_len = 32
global_batch_size = 4
decay_type = "cosine"
[[training.stages.datasets]]
name = "c"
weight = 1
"""


def config_of(folder: Path, stages: str = THREE, training: str = "", sources: str = SOURCES):
    path = folder / "config.toml"
    path.write_text(TOML.format(folder=folder, training=training, stages=sources + stages))
    return load_config(["--job.config_file", str(path)])


def test_each_stage_is_a_config(tmp_path) -> None:
    config = config_of(tmp_path)
    first, second, third = staged(config)
    # 128 tokens per step: the 8th is the first that reaches 1000; then 256 per step, from 1024 on
    assert [one.training.steps for one in (first, second, third)] == [8, 16, 24]
    plain = config_of(tmp_path, "")
    of_stage = {"training.stages", "lr_scheduler.total_steps", "checkpoint.last_save_in_hf"}

    def differ(one: JobConfig) -> dict[str, object]:
        found = changes(to_json(plain), to_json(one), config_defaults())
        return {key: new for key, _, new in found if key not in of_stage}

    assert differ(first) == {"training.steps": 8}
    assert differ(second) == {
        "training.steps": 16,
        "training.datasets.0.weight": 1,
        "training.datasets.1.weight": 4,
        "training.global_batch_size": 16,
        "optimizer.lr": 4e-4,
    }
    assert third.training.dataset == ""
    assert [source.name for source in third.training.datasets] == ["c"]
    assert (third.training.seq_len, third.training.global_batch_size) == (32, 4)
    assert third.lr_scheduler.decay_type == "cosine"
    # the end of a stage is not the end of the schedule, nor of the job
    assert {one.lr_scheduler.total_steps for one in (first, second, third)} == {24}
    ends = [one.checkpoint.last_save_in_hf for one in (first, second, third)]
    assert ends == [False, False, True]
    assert staged(plain) == [plain]


@pytest.mark.parametrize(
    ("stages", "training", "key", "words"),
    [
        ("[[training.stages]]\n[[training.stages]]", "", "0.until_tokens", "fix: give it"),
        ("[[training.stages]]\nuntil_tokens = 9", "", "0.until_tokens", "fix: leave it out"),
        (THREE.replace("3072", "1024"), "", "1.until_tokens", "fix: set it to more than 1024"),
        (THREE, "max_epochs = 2", "training.max_epochs", "fix: leave it out"),
        (THREE.replace("b = 4", "z = 4"), "", "1.weights", "name one of a, b"),
        (THREE.replace("until_tokens = 3072", "until_tokens = 30720"), "", "steps", "more than 124"),
    ],
)
def test_stages_that_cannot_follow_each_other_are_refused(
    stages: str, training: str, key: str, words: str, tmp_path
) -> None:
    with pytest.raises(ConfigError) as caught:
        staged(config_of(tmp_path, stages, training))
    assert caught.value.key.endswith(key)
    assert words in str(caught.value)


def test_a_job_with_stages_saves_and_has_a_batch(tmp_path) -> None:
    for word, new, key in (
        ("enable = true", "enable = false", "training.stages"),
        ("global_batch_size = 8", "", "training.global_batch_size"),
        ("weight = 1\n[[training.stages]]", "tokens = 9\n[[training.stages]]", "training.stages"),
    ):
        path = tmp_path / "config.toml"
        config_of(tmp_path)
        text = path.read_text()
        assert word in text.replace("\n\n", "\n")
        path.write_text(text.replace("\n\n", "\n").replace(word, new, 1))
        with pytest.raises(ConfigError) as caught:
            staged(load_config(["--job.config_file", str(path)]))
        assert caught.value.key == key


def test_an_error_names_the_stage_and_its_key(tmp_path) -> None:
    sources = ""
    stages = THREE.replace("weights = { a = 1, b = 4 }\n", "").replace('name = "c"', 'dataset = "no"')
    with pytest.raises(ConfigError) as caught:
        preflight(config_of(tmp_path, stages, sources=sources), 1)
    assert caught.value.key == "training.stages.2.datasets.0.dataset"
    assert str(caught.value).startswith("training.stages.2.datasets.0.dataset = 'no'")
    stages = THREE.replace("weights = { a = 1, b = 4 }\n", "").replace("size = 16", "size = 15")
    with pytest.raises(ConfigError) as caught:
        preflight(config_of(tmp_path, stages, sources=sources), 1)
    assert caught.value.key == "training.stages.1.global_batch_size"
