"""Keys of sources that have no effect on the data that a config names. Free of torch."""

from collections.abc import Iterator

from meshwright.config.changes import shown
from meshwright.config.job_config import JobConfig, Source, Training
from meshwright.datasets import find_dataset
from meshwright.datasets.named_sources import entries, is_streamed


def idle_source_options(config: JobConfig) -> Iterator[str]:
    """Say which keys differ from their default and have no effect, and why.

    Args:
        config: whose datasets are known.
    """
    training = entries(config.training, "training")
    held_out = entries(config.validation, "validation") if config.validation.enable else []
    have_rows = set()
    for entry in (*training, *held_out):
        spec = find_dataset(entry.source.dataset)
        assert spec is not None
        have_rows.add(spec.path != "none" and not spec.has_tokens)
        why, keys = "is read by dataset_format", ["dataset_column"]
        if spec.path == "none":
            why, keys = "has no rows", ["dataset_column", "dataset_format"]
        elif spec.has_tokens:
            why, keys = "holds tokens", ["dataset_column", "dataset_format"]
        elif not entry.source.dataset_format:
            continue
        for key in keys:
            value = getattr(entry.source, key)
            if value != Source.model_fields[key].default:
                yield f"{entry.key}.{key} = {shown(value)} has no effect: {entry.name} {why}"
    if have_rows == {False} and config.model.chat_template_path:
        path = config.model.chat_template_path
        yield f"model.chat_template_path = {shown(path)} has no effect: no source has conversations"
    are_streamed = {is_streamed(entry) for entry in training}
    any_streamed = are_streamed | {is_streamed(entry) for entry in held_out}
    unused = []
    if True not in are_streamed:
        unused += [(key, "no source is streamed") for key in ("shuffle_window", "stream_shards")]
    if True not in any_streamed:  # a cache is not made of bad records
        unused.append(("max_bad_records", "no source is streamed"))
    if any_streamed == {True}:
        unused.append(("token_cache_folder", "every source is streamed"))
    for key, why in unused:
        value = getattr(config.training, key)
        if value != Training.model_fields[key].default:
            yield f"training.{key} = {shown(value)} has no effect: {why}"
