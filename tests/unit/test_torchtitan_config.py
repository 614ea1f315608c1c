import itertools
import json
import re
import tomllib
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from meshwright.commands.main import run as run_command
from meshwright.config.changes import to_json
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config, parse_config, read
from meshwright.config.parallelism import Float8
from meshwright.config.torchtitan import rules
from meshwright.config.torchtitan.translate import is_torchtitan, translate
from meshwright.system.errors import ConfigError
from meshwright.train.resolve import resolve
from meshwright.train.resolve_model import resolve_model

FOLDER = Path(__file__).parents[1] / "torchtitan"
KEYS: dict[str, Any] = json.loads((FOLDER / "defaults.json").read_text())
"""Of torchtitan 0.2.2, with their defaults, as `torchtitan.config.JobConfig()` gives them."""
OURS = {f"{section}.{key}": value for section, table in JobConfig() for key, value in table}
SPECIAL = {  # by functions of translate.py
    *("model.name", "model.flavor", "training.dataset", "validation.dataset"),
    *("validation.steps", "validation.local_batch_size", "validation.seq_len"),
    "parallelism.pipeline_parallel_microbatch_size",
    "compile.components",
    "model.converters",
}


def load(tmp_path: Path, text: str, *overrides: str) -> tuple[JobConfig, list[str]]:
    path = tmp_path / "theirs.toml"
    path.write_text(text)
    words = ["--job.config_file", str(path), *overrides]
    return load_config(words), notes_of(words)


def notes_of(words: list[str]) -> list[str]:
    return read(parse_config(words)).notes


def given(table: dict[str, Any], **model: Any) -> str:
    return tomli_w.dumps({"model": {"name": "llama3", "flavor": "debugmodel", **model}, **table})


def test_a_key_with_our_name_has_our_default_or_theirs_is_stated() -> None:
    for key in KEYS.keys() & OURS.keys() - SPECIAL - {"job.config_file", "job.description"}:
        theirs = KEYS[key]
        if key == "training.mixed_precision_param":  # on GPUs, for which their TOMLs are
            theirs = {"bfloat16": "auto"}[theirs]
        if key in rules.DEFAULTS:
            assert rules.DEFAULTS[key][0] == theirs, key
        else:
            assert theirs == OURS[key] or (theirs is None and not OURS[key]), key


def with_key(key: str, value: object, **others: Any) -> dict[str, Any]:
    """A config of theirs that gives one key."""
    raw: dict[str, Any] = {"model": {"name": "llama3", "flavor": "8B"}, **others}
    *tables, name = key.split(".")
    table = raw
    for part in tables:
        table = table.setdefault(part, {})
    table[name] = value
    return raw


def test_each_key_alone_is_kept_noted_or_refused(tmp_path: Path) -> None:
    """With torchtitan's default, so nothing can be asked for that is not here."""
    for key, value in KEYS.items():
        has_rule = key in {*rules.RENAMED, *rules.REFUSED} or any(
            fnmatchcase(key, pattern) for pattern in rules.IDLE
        )
        assert (key in OURS) != has_rule or key in SPECIAL, key
        if value is None or key == "job.config_file":
            continue
        found = translate(with_key(key, value), tmp_path)
        JobConfig.model_validate(found.table)
        section, *rest = key.split(".")
        is_kept = len(rest) == 1 and rest[0] in found.table.get(section, {})
        assert is_kept or key in {name for name, _ in found.notes}, key


@pytest.mark.parametrize(
    ("name", "ranks", "overrides"),
    [
        ("debug_model", 8, ["--training.dataset_path", "a.jsonl"]),
        ("llama3_8b", 8, []),
        ("llama3_70b", 256, []),
        ("llama3_405b", 512, ["--parallelism.enable_async_tensor_parallel", "false"]),
    ],
)
def test_files_with_every_key_of_theirs_pass_the_check_and_are_migrated(
    name: str, ranks: int, overrides: list[str], tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"text": "a"}\n')
    folder = tmp_path / ("a-name-of-many-parts-" * 5)  # which no comment may break
    folder.symlink_to(FOLDER)
    toml = str(folder / f"{name}.toml")
    wanted, notes = load_config([toml]), notes_of([toml])
    assert any(re.match(r"line \d+, model\.flavor: ", note) for note in notes)
    words = ["--model.tokenizer_path", "bytes", "--job.dump_folder", str(tmp_path), *overrides]
    resolve(load_config([toml, *words]), ranks)
    of_words = notes_of([toml, "--validation.steps", "-1"])
    assert any(note.startswith("--validation.steps: without effect") for note in of_words)

    run_command(["config", "migrate", toml])
    migrated = tmp_path / "ours.toml"
    migrated.write_text(capsys.readouterr().out)
    config = load_config([str(migrated)])
    assert not notes_of([str(migrated)])
    for section in JobConfig.model_fields.keys() - {"job"}:
        assert getattr(config, section) == getattr(wanted, section)
    comments = " ".join(migrated.read_text().split("\n\n[", 1)[0].replace("\n#", "").split())
    for note in notes:
        assert note in comments


def test_check_lists_the_changes_by_line_and_how_to_migrate(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    table = {"training": {"dataset": "sympy_source"}, "checkpoint": {"interval": 7}}
    text = given({**table, "compile": {"enable": False, "components": ["model"]}})
    (tmp_path / "theirs.toml").write_text(text)
    run_command(["check", "../here/../theirs.toml", "--ngpu", "2", "--model.tokenizer_path=bytes"])
    said = re.sub(r"\n {9,}", " ", capsys.readouterr().out)
    assert "  line 2, model.name: 'llama3' is 'llama'\n" in said
    assert "this lists them: meshwright config migrate ../here/../theirs.toml\n" in said
    assert said.count("theirs.toml") == 3  # once more at the end
    why = "compile.components: without effect: compile.enable is off"
    assert any(note.endswith(why) for note in notes_of(["../theirs.toml"]))


def test_a_key_that_was_not_written_has_no_line_and_ours_are_not_migrated(tmp_path) -> None:
    with pytest.raises(ConfigError, match="is not torchtitan's"):
        run_command(["config", "migrate", "debug_model"])
    (toml := tmp_path / "theirs.toml").write_text(given({"training": {"steps": 5}}))
    assert any(note.startswith("training.dataset: ") for note in notes_of([str(toml)]))


def test_float8_keys_are_translated(tmp_path: Path) -> None:
    words = ["--job.config_file", str(FOLDER / "llama3_405b.toml")]
    config = load_config(words)
    # every matrix of a block, with one scale, as torchtitan does without a recipe's name
    wanted = {"enable": True, "recipe_name": "tensorwise", "filter_fqns": [], "emulate": False}
    assert config.float8.model_dump() == wanted
    with pytest.raises(ConfigError, match="enable_async_tensor_parallel .* float8.enable"):
        resolve(config, 512)
    assert load_config([*words, "--model.converters", "[]"]).float8 == Float8()
    theirs = {
        "recipe_name": "rowwise",
        "filter_fqns": ["output", "auto_filter_small_kn", "layers.0."],
        "emulate": True,
    }
    table = {"quantize": {"linear": {"float8": theirs}}}
    for name in ("float8", "quantize.linear.float8"):
        config, _ = load(tmp_path, given(table, converters=[name]))
        left_out = ["layers.0.", *Float8().filter_fqns]
        assert config.float8 == Float8(enable=True, filter_fqns=left_out, emulate=True)
    for wrong, converters, says in (
        ({"recipe_name": "rowwise_with_gw_hp"}, ["float8"], "hp': should be 'rowwise'"),
        ({"filter_fqns": "output"}, ["float8"], "filter_fqns = 'output': should be a valid list"),
        *(({}, others, "only float8 layers") for others in (["mx"], [{}], "float8")),
    ):
        table["quantize"]["linear"]["float8"] = theirs | wrong
        with pytest.raises(ConfigError, match=says):
            load(tmp_path, given(table, converters=converters))


def test_flavors_mean_what_they_mean_there(tmp_path: Path) -> None:
    """Sizes as torchtitan's own table gives them, worked out by its formulas."""
    expected = {
        "debugmodel": (256, 6, 16, 16, 768, 2048, 8.0),
        "8B": (4096, 32, 32, 8, 14336, 128256, 8.0),
        "70B": (8192, 80, 64, 8, 28672, 128256, 8.0),
        "405B": (16384, 126, 128, 8, 53248, 128256, 8.0),
    }
    for flavor, sizes in expected.items():
        config, _ = load(tmp_path, given({}, flavor=flavor))
        _, args = resolve_model(config)
        names = ["dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "vocab_size"]
        found = *(getattr(args, name) for name in names), args.rope_scaling.factor
        assert found == sizes
    config, _ = load(tmp_path, given({}, flavor="8B_flex"))
    assert (config.model.flavor, config.training.mask_documents) == ("llama3.1_8b", True)


def test_values_are_renamed_and_defaults_of_theirs_stated(tmp_path: Path) -> None:
    table: dict[str, Any] = {
        "checkpoint": {
            "enable": True,
            "async_mode": "async_with_pinned_mem",
            "initial_load_path": "weights",
        },
        "debug": {"seed": 7, "deterministic": True},
        "validation": {"enable": True, "steps": 5, "local_batch_size": 4, "seq_len": 512},
        "parallelism": {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 3},
    }
    config, notes = load(tmp_path, given(table, hf_assets_path="there"), "--debug.seed", "3")
    assert "sequences have training.seq_len = 2048, not 512" in " ".join(notes)
    assert config.checkpoint.async_mode == "thread"
    assert (config.training.seed, config.training.deterministic) == (3, True)
    assert config.validation.num_samples == 5 * 4 * 2 * 3
    assert (config.validation.dataset, config.validation.dataset_split) == ("c4", "validation")
    # paths start at the working directory, not beside the TOML
    assert config.training.dataset == "json"
    assert config.training.dataset_path == str(Path.cwd() / "tests/assets/c4_test")
    assert config.model.tokenizer_path == str(Path.cwd() / "there")
    assert config.checkpoint.initial_load_path == str(Path.cwd() / "weights")

    assert config.activation_checkpoint.mode == "selective"
    assert config.activation_checkpoint.selective_ac_option == "2"
    assert config.validation.freq == 10
    assert config.checkpoint.last_save_model_only
    assert config.optimizer.decay_norm_and_bias
    assert not config.metrics.enable_tensorboard
    assert any("validation.freq: 10" in note for note in notes)
    for degree, ranks in (("replicate", 2), ("shard", 1)):  # there one and -1, which counts as one
        del table["parallelism"][f"data_parallel_{degree}_degree"]
        config, _ = load(tmp_path, given(table))
        assert config.validation.num_samples == 5 * 4 * ranks


def test_a_schedule_that_does_not_fit_is_shortened_as_there(tmp_path: Path) -> None:
    schedule = {"warmup_steps": 2, "decay_ratio": 0.8}
    for steps, *shortened in ((10, 2, 0.8), (3, 2, None), (1, 1, None)):  # 3: it decays on one step
        table = {"training": {"steps": steps}, "lr_scheduler": schedule}
        config, notes = load(tmp_path, given(table))
        found = config.lr_scheduler
        assert [found.warmup_steps, found.decay_ratio] == shortened
        assert any("leaves no room for the warm-up" in note for note in notes) == (steps < 10)


def test_a_pipeline_cuts_the_local_batch(tmp_path: Path) -> None:
    parallelism = {"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 4}
    table = {"parallelism": parallelism, "training": {"local_batch_size": 8}}
    config, _ = load(tmp_path, given(table))
    assert (config.training.local_batch_size, config.training.global_batch_size) == (1, 32)
    parallelism["pipeline_parallel_microbatch_size"] = 2
    config, _ = load(tmp_path, given(table))
    assert (config.training.local_batch_size, config.training.global_batch_size) == (2, 32)
    del parallelism["data_parallel_shard_degree"]
    with pytest.raises(ConfigError, match="their number is open"):
        load(tmp_path, given(table))


def test_what_is_not_here_is_refused_all_at_once(tmp_path: Path) -> None:
    table = {"comm": {"mode": "fake_backend"}, "fault_tolerance": {"enable": True}}
    with pytest.raises(ConfigError) as error:
        load(tmp_path, given(table))
    lines = str(error.value).splitlines()
    named = [line.split(": ")[1].split(" = ")[0] for line in lines if "(torchtitan's)" in line]
    assert named == ["comm.mode", "fault_tolerance.enable"]
    assert sum(line.startswith("  fix: ") for line in lines) == 2


def test_a_mistake_is_reported_at_the_line_of_their_key(tmp_path: Path) -> None:
    text = given({"training": {"steps": 0}, "debug": {"seed": -1}})
    line = text.splitlines().index("seed = -1") + 1
    with pytest.raises(ConfigError, match=rf"theirs.toml:{line}: training.seed = -1"):
        load(tmp_path, text)


def test_whose_a_config_is() -> None:
    for name, flavor, is_theirs in (
        *(("llama3", "", True), ("llama3", "8B", True), ("deepseek_v3", "16B", True)),
        *(("qwen3", "0.6B", True), ("qwen3", "debugmodel", False), ("llama", "llama3_8b", False)),
        *(("llama3", "llama3_8b", False), ("", "8B", False), ("", "", False)),
    ):
        model = {"name": name, "flavor": flavor}
        given = {key: value for key, value in model.items() if value}
        assert is_torchtitan({"model": given}) == is_theirs, given
    assert is_torchtitan({"model": {"hf_assets_path": "x"}})
    for path in (FOLDER.parents[1] / "train_configs").glob("*.toml"):
        assert not is_torchtitan(tomllib.loads(path.read_text()))


def test_a_value_of_another_type_is_a_config_error_at_most(tmp_path: Path) -> None:
    for key, value in itertools.product(KEYS, ("x", 1.5, True, [], {"a": 1})):
        degrees = {"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 2}
        raw = with_key(key, value, parallelism=degrees)
        if is_torchtitan(raw):
            with suppress(ConfigError):
                translate(raw, tmp_path)


def test_a_config_of_ours_may_extend_one_of_theirs(tmp_path: Path) -> None:
    (tmp_path / "theirs.toml").write_text(given({"training": {"steps": 5}}))
    ours = tmp_path / "ours.toml"
    ours.write_text('extends = "theirs.toml"\n[model]\ntokenizer_path = "bytes"\n')
    config = load_config(["--job.config_file", str(ours)])
    assert (config.model.name, config.training.steps) == ("llama", 5)
    assert config.model.tokenizer_path == "bytes"
    assert to_json(config)["optimizer"]["decay_norm_and_bias"]
