"""Checks of `[training]` and `[validation]` that read no document. Free of torch."""

from collections.abc import Sequence

from meshwright.config.job_config import Training, Validation, WeightedSource
from meshwright.datasets import DATASETS, find_dataset
from meshwright.datasets.faulty_files import find_head_fault
from meshwright.datasets.named_sources import entries, is_streamed
from meshwright.datasets.sources import check_path
from meshwright.datasets.tokenizers.kinds import Tokenizer, prompt_tokens
from meshwright.errors import ConfigError, check, did_you_mean


def check_sources(section: Training | Validation, key: str, *, looks_at_files: bool = True) -> None:
    """Check that datasets are known, that their local files are there, and that figures can tell
    them apart.

    Args:
        looks_at_files: also at the first row of each.
    """
    is_single = "dataset" in section.model_fields_set and section.dataset
    check(
        not (section.datasets and is_single),
        f"{key}.dataset",
        section.dataset,
        f"is given beside [[{key}.datasets]]",
        f'leave out one of the two ({key}.dataset = "" if a TOML that this one extends gives it)',
    )
    names = set[str]()
    for entry in entries(section, key):
        name = entry.source.dataset
        spec = find_dataset(name)
        if spec is None:
            fix = f'{did_you_mean(name, DATASETS)} (one of the hub is written "owner/name")'
            raise entry.error("dataset", "no such dataset", fix)
        check_path(entry, spec)
        passes_over = is_streamed(entry) and getattr(section, "max_bad_records", 0) > 0
        if looks_at_files and spec.path == "required" and not passes_over:
            fault = find_head_fault(entry, spec.files(entry))
            lacks_column = f"no column {entry.source.dataset_column!r}" in fault
            fix = (
                f"set {entry.key}.dataset_column" if lacks_column else "correct it, or leave it out"
            )
            check(not fault, f"{entry.key}.dataset_path", entry.source.dataset_path, fault, fix)
        if entry.name in names:
            message = f"{entry.key}.name: another dataset is called {entry.name} too"
            raise ConfigError(f"{entry.key}.name", f"{message}\n  fix: give it another name")
        names.add(entry.name)


def check_mixture(sources: Sequence[WeightedSource]) -> None:
    """Each part of a mixture has a weight, or each has a budget."""
    with_weight = [source.weight is not None for source in sources]
    with_tokens = [source.tokens is not None for source in sources]
    for number, (weight, tokens) in enumerate(zip(with_weight, with_tokens, strict=True)):
        key = f"training.datasets.{number}"
        if weight == tokens:
            what = "has both weight and tokens" if weight else "has neither weight nor tokens"
            raise ConfigError(key, f"{key}: {what}\n  fix: give one of the two")
        if tokens != with_tokens[0]:
            raise ConfigError(
                key, f"{key}: weights and tokens are mixed\n  fix: give all the same of the two"
            )


def check_budgets(training: Training) -> None:
    """The job takes no more tokens than its sources are to give."""
    budget = sum(source.tokens or 0 for source in training.datasets)
    per_step = training.global_batch_size * training.seq_len
    check(
        budget == 0 or training.steps * per_step <= budget,
        "training.steps",
        training.steps,
        f"takes {training.steps * per_step:,} tokens, but training.datasets give {budget:,}",
        f"set it to {budget // per_step}, or raise their tokens",
    )


def check_sample_prompts(validation: Validation, tokenizer: Tokenizer, seq_len: int) -> None:
    """Each prompt is another, has a token, and fits a sequence with the tokens that follow it."""
    for number, prompt in enumerate(validation.sample_prompts):
        key, length = f"validation.sample_prompts.{number}", len(prompt_tokens(tokenizer, prompt))
        is_new = prompt not in validation.sample_prompts[:number]
        check(is_new, key, prompt, "is there already, and gives the same text", "write it once")
        check(length > 0, key, prompt, "is no token, and the tokenizer has no BOS", "write a text")
        check(
            length + validation.sample_tokens <= seq_len,
            key,
            prompt,
            f"its {length} tokens and validation.sample_tokens = {validation.sample_tokens} are "
            f"more than training.seq_len = {seq_len}",
            "shorten it, or lower validation.sample_tokens",
        )


def check_validation_data(validation: Validation) -> None:
    """All of a dataset can be read only if it is known how much that is."""
    key, count = "validation.num_samples", validation.num_samples
    streamed = [entry.name for entry in entries(validation, "validation") if is_streamed(entry)]
    check(
        count > 0 or (count == -1 and not streamed),
        key,
        count,
        f"{streamed[0]} is streamed: it has no known end" if streamed else "must be positive or -1",
        "set a number of sequences",
    )
