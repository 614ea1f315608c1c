"""The stages of a job: `[[training.stages]]` as one config for each."""

from typing import Any

from meshwright.config.changes import changed
from meshwright.config.job_config import JobConfig
from meshwright.config.training import Source, Stage
from meshwright.system.errors import CombinedConfigError, ConfigError, check, config_error

PLACES = {
    key: name
    for name, section in JobConfig()
    for key in Stage.model_fields
    if name in ("training", "optimizer", "lr_scheduler") and key in type(section).model_fields
}
"""The section of each key that a stage may replace."""

SAID_BY_STAGES = (
    *(f"{section}.{key}" for key, section in PLACES.items()),
    *(f"training.{key}" for key in ("steps", *Source.model_fields)),
)
"""Keys in which the configs of two stages may differ."""


def staged(config: JobConfig) -> list[JobConfig]:
    """Return the config of each stage; [`config`] if there are none.

    `training.steps` of each is the last step of the stage, counted from the start of the job.

    Raises:
        ConfigError: if the stages can't follow each other.
    """
    stages, total = config.training.stages, config.training.steps
    if not stages:
        return [config]
    _check_job(config)
    found, step, tokens = list[JobConfig](), 0, 0
    for number, stage in enumerate(stages):
        one, key = _resolved(config, stage, number), f"training.stages.{number}"
        is_last = number == len(stages) - 1
        _check_end(f"{key}.until_tokens", stage.until_tokens, tokens, is_last)
        if stage.until_tokens is not None:
            num_steps = -(-(stage.until_tokens - tokens) // one.tokens_per_step)
            step, tokens = step + num_steps, tokens + num_steps * one.tokens_per_step
            one = changed(
                one,
                {
                    "training": {"steps": step},
                    # of the last stage only
                    "checkpoint": {"last_save_model_only": False, "last_save_in_hf": False},
                },
            )
        found.append(one)
    rule = f"stage {len(stages)} starts after step {step}"
    check(step < total, "training.steps", total, rule, f"set it to more than {step}")
    return found


def _check_job(config: JobConfig) -> None:
    """Check the rest of the job: each stage continues from the checkpoint of the one before."""
    training, key = config.training, "training.stages"
    if not config.checkpoint.saves:
        rule = "each stage starts with the checkpoint of the one before, and nothing is saved"
        fix = "set checkpoint.enable = true, and checkpoint.load_only = false"
        raise ConfigError(key, f"{key}: {rule}\n  fix: {fix}")
    epochs, batch = training.max_epochs, training.global_batch_size
    rule = "with stages, tokens end a stage, not the data"
    check(not epochs, "training.max_epochs", epochs, rule, "leave it out")
    rule = "the tokens of a step decide where stages end"
    check(batch >= 1, "training.global_batch_size", batch, rule, "set it")
    sources = [source for stage in training.stages for source in stage.datasets]
    if any(source.tokens for source in (*training.datasets, *sources)):
        rule = "a budget of tokens is one of the whole job, which stages divide"
        raise ConfigError(key, f"{key}: {rule}\n  fix: give weight in place of tokens")


def _check_end(key: str, until: int | None, tokens: int, is_last: bool) -> None:
    if is_last and until is not None:
        fix = "leave it out, or add a stage"
        raise config_error(key, until, "the last stage lasts until training.steps", fix)
    if not is_last and until is None:
        raise ConfigError(key, f"{key}: not given, and another stage follows\n  fix: give it")
    if until is not None and until <= tokens:
        rule = f"the stages before it take {tokens:,} tokens"
        raise config_error(key, until, rule, f"set it to more than {tokens}")


def _resolved(config: JobConfig, stage: Stage, number: int) -> JobConfig:
    schedule = config.lr_scheduler.total_steps or config.training.steps
    update: dict[str, dict[str, Any]] = {
        "training": {"stages": []},
        "optimizer": {},
        "lr_scheduler": {"total_steps": schedule},  # which the end of a stage doesn't move
    }
    for key, section in PLACES.items():
        if (value := getattr(stage, key)) not in (None, []):
            update[section][key] = value
    if stage.datasets:
        update["training"] |= {name: f.get_default() for name, f in Source.model_fields.items()}
        update["training"]["dataset"] = ""
    if stage.weights:
        update["training"]["datasets"] = _reweighted(config, stage, number)
    return changed(config, update)


def _reweighted(config: JobConfig, stage: Stage, number: int) -> list[Any]:
    key, datasets = f"training.stages.{number}.weights", config.training.datasets
    names = [source.name or source.dataset for source in datasets]
    if stage.datasets:
        rule = "the stage has its own data sets"
        raise config_error(key, stage.weights, rule, "give their weights there")
    for name in stage.weights:
        rule = f"no source of training.datasets is called {name}"
        fix = f"name one of {', '.join(names)}" if names else "add training.datasets"
        check(name in names, key, stage.weights, rule, fix)
    return [
        source.model_copy(update={"weight": stage.weights.get(name, source.weight)})
        for name, source in zip(names, datasets, strict=True)
    ]


def error_of_stage(error: ConfigError, config: JobConfig, number: int) -> ConfigError:
    """Return an error of the config of stage `number` (from 0) under the keys of the stage."""
    if not config.training.stages:
        return error
    stage = config.training.stages[number]
    found = [_under_stage(one, stage, number) for one in getattr(error, "errors", [error])]
    return found[0] if len(found) == 1 else CombinedConfigError(found)


def _under_stage(error: ConfigError, stage: Stage, number: int) -> ConfigError:
    section, _, key = error.key.partition(".")
    first = key.partition(".")[0]
    is_own = PLACES.get(first) == section and getattr(stage, first, None) not in (None, [])
    if is_own:
        renamed = f"training.stages.{number}.{key}"
        return ConfigError(renamed, str(error).replace(error.key, renamed))
    return ConfigError(error.key, f"stage {number + 1}: {error}" if number else str(error))
