"""Every rule of a job: of the config, the mesh, the device, data and optimizers.
Free of torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from meshwright.config import combinations
from meshwright.config.fields import value_of
from meshwright.config.job_config import JobConfig
from meshwright.config.rules import Check, Facts, Row, Rule
from meshwright.datasets.named_sources import (
    check_budgets,
    check_mixture,
    check_sample_prompts,
    check_sources,
    check_validation,
)
from meshwright.datasets.tokenizers.special_tokens import NAME_KEY, PATH_KEY
from meshwright.parallelisms.rules import compile_choice, degrees, precision, stages
from meshwright.system.errors import ConfigError, Mistakes, check
from meshwright.train.facts import JobFacts
from meshwright.train.metric_table import METRICS
from meshwright.train.optim.registry import (
    average_decay,
    check_optimizers,
    find_names,
    names_by_group,
)


def _judge(judge: Callable[..., object], *arguments: object) -> Sequence[ConfigError]:
    """Return the errors that a function raises."""
    mistakes = Mistakes()
    with mistakes.collect():
        judge(*arguments)
    return mistakes.errors


def _prompts(config: JobConfig, facts: JobFacts) -> Sequence[ConfigError]:
    if not config.validation.enable:
        return []
    prompts = config.validation, facts.tokenizer, config.training.seq_len
    return _judge(check_sample_prompts, *prompts)


DATA: tuple[Row[JobFacts], ...] = (
    Check(lambda c, _: _judge(check_sources, c.training, "training")),
    Check(lambda c, _: _judge(check_mixture, c.training.datasets)),
    Check(lambda c, _: _judge(check_validation, c)),
    Check(_prompts, needs="tokenizer"),
)


def find_frozen(config: JobConfig, names: Sequence[str]) -> frozenset[str]:
    """Return the names of the parameters that `model.frozen` matches, of `names`."""
    key, patterns = "model.frozen", config.model.frozen
    frozen = frozenset[str]().union(*(find_names(key, pattern, names) for pattern in patterns))
    check(len(frozen) < len(names), key, patterns, "leaves no parameter to train")
    return frozen


def _check_vocabulary(config: JobConfig, facts: JobFacts) -> None:
    assert facts.tokenizer is not None
    size, most = facts.tokenizer.vocab_size, facts.spec.vocab_size
    key = NAME_KEY if config.model.tokenizer_type else PATH_KEY
    rule = f"its vocabulary of {size} is larger than the model's, {most}"
    check(size <= most, key, value_of(config, key), rule, f"set model.args.vocab_size = {size}")


def _not_exported(config: JobConfig, facts: JobFacts) -> str:
    assert facts.family is not None
    assert facts.model is not None
    model = facts.model
    if not config.checkpoint.export_mtp:
        model = replace(model, mtp_depth=0)
    return facts.family.hf.why_not(model) if config.checkpoint.last_save_in_hf else ""


MODEL: tuple[Row[JobFacts], ...] = (
    Check(lambda c, facts: _judge(find_frozen, c, list(facts.spec.parameters)), needs="model"),
    Check(
        lambda c, facts: _judge(names_by_group, c.optimizer.groups, list(facts.spec.parameters)),
        needs="model",
    ),
    Check(
        lambda c, facts: _judge(check_optimizers, c.optimizer, facts.spec.parameters),
        needs="model",
    ),
    Rule(
        "checkpoint.last_save_in_hf",
        _not_exported,
        "{detail}",
        "leave it out; without layers for MTP: set checkpoint.export_mtp = false",
        needs="model",
    ),
    Rule(
        "validation.sample_prompts",
        lambda c, facts: (
            c.validation.enable
            and c.validation.sample_prompts
            and not all("core" in one.attention.bare_modules for one in facts.spec.layers)
        ),
        "this model's layers have no `core` that could keep earlier tokens",
        "leave it out",
        needs="model",
    ),
    Rule(
        "optimizer.early_step_in_backward",
        lambda c, _: c.optimizer.early_step_in_backward and ", ".join(METRICS),
        "leaves no gradients to the metrics of your module: {detail}",
        "leave it out",
    ),
    Check(lambda c, facts: _judge(_check_vocabulary, c, facts), needs="tokenizer model"),
    Check(lambda c, _: _judge(check_budgets, c.training), needs="world_size"),
    Check(lambda c, _: _judge(average_decay, c), needs="world_size"),
)

WITHOUT_DATA: tuple[Row[Facts], ...] = (
    *combinations.RULES,
    *degrees.RULES,
    *precision.RULES,
    *compile_choice.RULES,
    *stages.RULES,
)
"""Rules that need the model and the device at most."""

RULES: tuple[Row[Any], ...] = (*WITHOUT_DATA, *DATA, *MODEL)
"""Every rule of a config whose -1 and "auto" are filled in, in the order of the messages."""
