"""Rules are judged as far as the facts are known, all of them together, and without a file."""

import builtins
import os
from pathlib import Path

import pytest

from meshwright.config.changes import differences, to_json
from meshwright.config.combinations import OTHERS
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.config.rules import Check, Facts, Idle, Rule, broken_rules, check_rules, idle_keys
from meshwright.system.errors import CombinedConfigError, ConfigError, config_error
from meshwright.train.facts import look
from meshwright.train.resolve import OPEN_KEYS, resolve
from meshwright.train.rules import RULES

TABLE = (
    Rule(
        "training.steps",
        lambda c, _: c.training.steps > 5 and "five",
        "is more than {detail} of {config.schedule_steps}",
        "lower {training.steps}",
    ),
    Rule("training.seed", lambda _, facts: facts.ranks > 1, "is for one rank", needs="world_size"),
    Check(lambda c, facts: [config_error("job.dump_folder", facts.ranks, "x")], needs="world_size"),
    Idle("optimizer.eps optimizer.lr", lambda c, _: True, "first"),
    Idle("optimizer.lr", lambda c, _: True, "second"),
)


@pytest.mark.parametrize(
    ("steps", "ranks", "said"),
    [
        (5, None, []),
        (6, None, ["training.steps = 6: is more than five of 6\n  fix: lower 6"]),
        (5, 1, ["job.dump_folder = 1: x"]),
        (6, 2, ["training.steps = 6", "training.seed = 0: is for one", "job.dump_folder = 2: x"]),
    ],
)
def test_rows_are_judged_where_their_facts_are_known(steps, ranks, said) -> None:
    config, facts = JobConfig(training={"steps": steps}), Facts(world_size=ranks)
    errors = broken_rules(config, facts, TABLE)
    assert len(errors) == len(said)
    assert all(str(error).startswith(text) for error, text in zip(errors, said, strict=True))


def test_all_broken_rows_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        check_rules(JobConfig(training={"steps": 6}), Facts(world_size=2), TABLE)
    assert [error.key for error in caught.value.errors] == [
        "training.steps", "training.seed", "job.dump_folder"
    ]  # fmt: skip
    check_rules(JobConfig(training={"steps": 5}), Facts(), TABLE)


@pytest.mark.parametrize(
    ("degrees", "says"),
    [
        ({"data_parallel_shard_degree": 1}, "there is one data-parallel rank"),
        ({"data_parallel_shard_degree": 4, "expert_parallel_degree": 2}, "rows of each other"),
        ({"data_parallel_shard_degree": 2}, ""),
        ({"data_parallel_shard_degree": 1, "data_parallel_replicate_degree": 2}, ""),
    ],
)
def test_a_sentry_needs_ranks_that_compute_the_same(degrees, says) -> None:
    config = JobConfig(parallelism=degrees, sentry={"interval": 100})
    errors = broken_rules(config, Facts(world_size=4), OTHERS)
    assert [says in str(error) for error in errors] == [True] * bool(says)
    config = JobConfig(parallelism=degrees)
    assert broken_rules(config, Facts(world_size=4), OTHERS) == []


def test_advice_never_follows_advice() -> None:
    """Code that adds a fix to an error of other code knows less of the cause."""
    cause = config_error("training.seq_len", 4, "is too long", "lower it")
    for error in (
        config_error("training.steps", 1, str(cause), "raise it"),
        ConfigError("", f"{config_error('a', 1, str(cause), 'b')}\n  fix: c"),
    ):
        assert str(error).endswith("training.seq_len = 4: is too long\n  fix: lower it")
    several = CombinedConfigError([cause, cause])
    assert str(several) == f"{cause}\n{cause}"


def test_a_key_without_effect_is_told_once_if_it_is_not_the_default() -> None:
    (line,) = idle_keys(JobConfig(optimizer={"lr": 0.5}), Facts(), TABLE)
    assert line == "optimizer.lr = 0.5 has no effect: first"


def test_facts_that_rows_need_exist() -> None:
    needs = {name for row in RULES if not isinstance(row, Idle) for name in row.needs.split()}
    assert needs >= {"world_size", "model", "device_type", "tokenizer"}
    facts = look(load_config(["debug_model"]), 1)
    assert all(hasattr(facts, name) for name in needs)


def test_resolving_opens_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(["debug_model", f"--job.dump_folder={tmp_path}"])
    facts = look(config, 2)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a file is opened")

    for owner in (builtins, Path):
        monkeypatch.setattr(owner, "open", refuse)
    for name in ("stat", "scandir", "listdir", "open"):
        monkeypatch.setattr(os, name, refuse)
    job = resolve(config, facts)
    monkeypatch.undo()
    assert job.config.parallelism.data_parallel_shard_degree == 2
    assert resolve(job.config, facts).config == job.config


def test_the_keys_that_are_sent_to_other_ranks_are_those_that_are_filled_in(tmp_path: Path) -> None:
    words = ["--model.tokenizer_path=bytes", "--model.args.vocab_size=258", "--training.steps=9"]
    words += [f"--job.dump_folder={tmp_path}", "--parallelism.pipeline_parallel_degree=2"]
    config = load_config(words)  # which leaves all of them open
    job = resolve(config, look(config, 4))
    open_keys = {f"{section}.{key}" for section, keys in OPEN_KEYS.items() for key in keys}
    filled_in = {one.key for one in differences(to_json(config), to_json(job.config))}
    assert filled_in == open_keys
    assert {section: set(keys) for section, keys in job.filled_in.items()} == {
        section: set(keys) for section, keys in OPEN_KEYS.items()
    }
