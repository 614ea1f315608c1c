"""The facts that a job writes into a checkpoint's manifest, and reads when it resumes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import meshwright
from meshwright.checkpoint.manifest import DATALOADER, Manifest, excluded_parts
from meshwright.config.changes import to_json
from meshwright.datasets.stream import Cursor, OpenSource, bad_records
from meshwright.datasets.tokenizers.kinds import end_ids
from meshwright.metrics.observers import Observer
from meshwright.system.errors import ConfigError, config_error
from meshwright.system.modules import torch_version
from meshwright.train.resolve import ResolvedJob


def manifest_of(
    resolved: ResolvedJob,
    sources: Sequence[OpenSource],
    validation_sources: Sequence[OpenSource],
    *,
    step: int,
    tokens_seen: int,
    cursor: Cursor,
    loss: float,
    observers: Mapping[str, Observer],
) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Args:
        cursor: where the next step's samples start, of all ranks.
        observers: by name, under which each has its state in the manifest.
    """
    return {
        "step": step,
        "tokens_seen": tokens_seen,
        "loss": loss if math.isfinite(loss) else None,
        "best_validation": None,
        **{
            name: state
            for name, observer in observers.items()
            if (state := observer.state_dict()) is not None
        },
        "data": dataclasses.asdict(cursor),
        "data_identity": resolved.data_identity,
        "data_content": {source.entry.name: source.content for source in sources},
        "validation_content": {source.entry.name: source.content for source in validation_sources},
        "data_revisions": {source.entry.name: source.facts.commit for source in sources},
        "model_name": resolved.config.model.name,
        "model_args": dataclasses.asdict(resolved.model_args),
        "tokenizer_path": resolved.config.model.tokenizer_path,
        "special_tokens": end_ids(resolved.tokenizer),
        "frozen": sorted(resolved.frozen),
        "own_code": resolved.own_code,
        "mesh": dataclasses.asdict(resolved.dims),
        "versions": {
            "meshwright": meshwright.__version__,
            "torch": torch_version(),
            **library_versions(),
        },
        "config": to_json(resolved.config),
        "stage": resolved.stage_number,
    }


def library_versions() -> dict[str, str]:
    """Return the versions that tokens depend on, and places in streamed data."""
    return {name: version(name) for name in ("tokenizers", "datasets")}


def place_in_data(resolved: ResolvedJob, saved: Manifest, sources: Sequence[OpenSource]) -> Cursor:
    """Return where a resume continues to read.

    Raises:
        ConfigError: if the data is other data now, or too many records were skipped.
    """
    if DATALOADER in excluded_parts(resolved.config.checkpoint, saved):
        return Cursor()
    begins_stage = resolved.begins_stage_with(saved)
    for source in sources:
        was = saved["data_content"].get(source.entry.name)
        if was != source.content and not (begins_stage and _is_new(source, saved)):
            commit = saved["data_revisions"].get(source.entry.name, "")
            pin = ""
            if commit not in ("", source.facts.commit):
                pin = f"set {source.entry.key}.dataset_revision = {commit!r}; or "
            raise source.entry.error(
                "dataset",
                f"its content is not what it was when the checkpoint was saved: {source.content} "
                f"now, {was} then",
                f"{pin}restore the data (dataset_mode too, and of a streamed source "
                "training.stream_shards, training.shuffle_window, your own code, the chat "
                "template, BOS and EOS), "
                "use another job.dump_folder, or start with the first sample "
                "(checkpoint.exclude_from_loading)",
            )
    if begins_stage:
        return _place_in_stage(resolved, saved, sources)
    cursor = Cursor.from_json(saved["data"])
    allowed = resolved.config.training.max_bad_records
    if (passed_over := bad_records(cursor)) > allowed:
        raise too_many_bad_records(passed_over, allowed)
    # earlier draws aren't made up for
    if resolved.resume_diff is not None and resolved.resume_diff.is_reweighted:
        return dataclasses.replace(cursor, weighted_from=cursor.counts)
    return cursor


def _is_new(source: OpenSource, saved: Manifest) -> bool:
    """Return whether the job that saved read no source of that name from the same place."""
    training = saved["config"]["training"]
    tables = {t.get("name") or t["dataset"]: t for t in training["datasets"] or [training]}
    keys = source.entry.source.model_dump().items()
    return not keys <= tables.get(source.entry.name, {}).items()


def _place_in_stage(
    resolved: ResolvedJob, saved: Manifest, sources: Sequence[OpenSource]
) -> Cursor:
    """Return where the first step of a stage starts to read: in a source that the stage before had
    too, where that one stopped."""
    cursor = Cursor.from_json(saved["data"])
    content = {source.entry.name: source.content for source in sources}
    if (saved["data_identity"], saved["data_content"]) == (resolved.data_identity, content):
        return cursor
    if saved["data_identity"]["training.seq_len"] != resolved.config.training.seq_len:
        return Cursor(bad_records=bad_records(cursor))
    before = dict(zip(saved["data_content"], cursor.counts, strict=True))
    kept = dict(content.items() & saved["data_content"].items())
    counts = tuple(before[name] if name in kept else 0 for name in content)
    places = {name: place for name, place in cursor.places.items() if name in kept}
    # if a streamed source is the only one, sample i of the job is its own i-th: ranks read by that
    begin = Cursor(sum(counts), counts, places, weighted_from=counts)
    return dataclasses.replace(begin, bad_records=bad_records(cursor) - bad_records(begin))


def too_many_bad_records(count: int, allowed: int) -> ConfigError:
    """Return the error of ranks that have skipped too many records together."""
    rule = f"{count} records have been skipped so far"
    return config_error("training.max_bad_records", allowed, rule, "raise it")
