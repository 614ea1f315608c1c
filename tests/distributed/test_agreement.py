"""AllRanks that would train different jobs together, or into different folders."""

import dataclasses
import json
import os
import pickle
import socket
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import datasets
import pytest
import torch
import torch.distributed as dist

from meshwright.checkpoint import integrity, lease, store
from meshwright.checkpoint.index import INDEX
from meshwright.checkpoint.manager import CheckpointManager
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.checkpoint.on_ranks import AllRanks
from meshwright.config.job_config import Checkpoint
from meshwright.config.loader import load_config
from meshwright.datasets import files, opening
from meshwright.datasets.samples import SampleRules
from meshwright.datasets.stream import Cursor, SampleStream
from meshwright.system import modules
from meshwright.system.errors import ConfigError, in_ranges
from meshwright.system.processes import Launch
from meshwright.train import agreement
from meshwright.train.agreement import RankFacts, check_agreement, check_same, take_choices
from meshwright.train.announce import announce
from meshwright.train.facts import look
from meshwright.train.resolve import resolve, with_choices
from meshwright.train.resume import library_versions
from meshwright.train.set_up import _open_data
from tests.helpers.checkpoints import publish
from tests.helpers.resolved import resolved, resolved_on_rank

ROOT = Path(__file__).parents[2]
TEXT = "".join(json.dumps({"text": f"text {number} " * 20}) + "\n" for number in range(50))


def data(folder: Path, text: str = TEXT, name: str = "a.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def words_of(folder: Path, data: Path, cache: str = "cache", **more: str) -> list[str]:
    """Of a job on lines of JSON; `__` stands for the dot of a key."""
    keys = {
        "job.config_file": "tests/integration/tiny.toml",
        "model.tokenizer_path": "bytes",
        "training.dataset": "json",
        "training.dataset_path": str(data),
        "training.token_cache_folder": str(folder / cache),
        "job.dump_folder": str(folder / "out"),
    }
    keys |= {key.replace("__", "."): value for key, value in more.items()}
    return [word for key, value in keys.items() for word in (f"--{key}", value)]


def difference(folder: Path, case: str) -> str:
    """What two ranks say, of which the second differs in `case`."""
    rank = dist.get_rank()
    is_other = rank == 1
    more, own = {}, data(folder / str(rank))  # a copy on each machine
    if is_other and case in ("cached data", "streamed, of equal size"):
        data(folder / str(rank), TEXT.replace("text 7 ", "text 8 "))
    if case.startswith("streamed"):
        more["training__dataset_mode"] = "streamed"
    if is_other and case == "streamed, of other size":
        data(folder / str(rank), TEXT + TEXT)
    if is_other and case == "a key":
        more["optimizer__lr"] = "1e-4"
    config = load_config(words_of(folder, own, f"cache{rank}", **more))
    plan = resolved(config, 2)
    others = {"tokenizer": {"tokenizer": Other()}, "own code": {"own_code": "other"}}
    others["folder"] = {"model_args": dataclasses.replace(plan.model_args, tie_embeddings=True)}
    if is_other:
        plan = dataclasses.replace(plan, **others.get(case, {}))
    code = "0" if is_other and case == "code" else agreement.source_hash()
    libraries = {"tokenizers": "0"} if is_other and case == "library" else library_versions()
    missing = NO_FLA if is_other and case == "kernel" else ""
    with (
        patch.object(agreement, "why_chunks", lambda *_: missing if case == "kernel" else None),
        patch.object(agreement, "version", lambda: "fla 0.6.0"),
        patch.object(agreement, "source_hash", lambda: code),
        patch.object(agreement, "library_versions", lambda: libraries),
    ):
        try:
            check_agreement(plan)
            manager = CheckpointManager(plan.checkpoint_folder, plan.config.checkpoint)
            with patch.object(manager.ranks, "on_first", lambda ask: ask()):  # each its own
                _open_data(plan, manager)
        except ConfigError as error:
            return str(error)
    return ""


class Other:
    fingerprint, bos_id, eos_id, special_names = "bytes", 256, None, {}
    before, after = [256], []


NO_FLA = "fla is not installed"

CASES = {
    "": "",
    "streamed": "",
    "cached data": "training.dataset: ",
    "streamed, of equal size": "training.dataset: ",
    "streamed, of other size": "training.dataset: ",
    "a key": "optimizer.lr: ",
    "folder": "model.flavor: ",
    "tokenizer": "model.tokenizer_path: ",
    "code": "code: ",
    "library": "code: ",
    "kernel": "code: ",
    "own code": "experimental.custom_import: ",
}


def every_difference(folder: Path) -> dict[str, str]:
    return {case: difference(folder / str(number), case) for number, case in enumerate(CASES)}


def test_ranks_that_differ_are_named_with_what_they_differ_in(on_ranks, tmp_path) -> None:
    host, (first, second) = socket.gethostname(), on_ranks(2, every_difference, tmp_path)
    assert first == second
    for case, part in CASES.items():
        if not part:
            assert first[case] == ""
            continue
        head, line, fix = first[case].splitlines()
        assert head == "ranks do not run the same job:"
        assert line.startswith(f"  {part}rank 1 (on {host}): "), line
        assert f"; rank 0 (on {host}): " in line
        assert fix.startswith("  fix: ")
    assert f"rank 1 (on {host}): 0.0001; rank 0 (on {host}): 0.004" in first["a key"]
    assert f"in chunks: {NO_FLA}; rank 0 (on {host}): " in first["kernel"]
    assert first["kernel"].splitlines()[1].endswith(", fla 0.6.0")


SLOW, NO_COMPILER = "this CPU has no instructions for it", "there is no C++ compiler"


def choices_of(folder: Path) -> dict[str, object]:
    """The values that this rank trains with, or its error, where the second node is poorer."""
    words = words_of(folder, data(folder), training__mixed_precision_param="auto")
    is_other, found = dist.get_rank() == 1, dict[str, object]()
    group = dist.group.WORLD
    assert group is not None
    for case, option in (("type", "--compile.enable=false"), ("compiler", "--compile.enable=auto")):
        more = [option, *(["--training.steps=100000000"] if case == "compiler" else [])]
        with (
            patch("meshwright.train.facts.why_bf16_is_slow", lambda: SLOW if is_other else ""),
            patch("meshwright.train.facts.why_no_compiler", lambda _: NO_COMPILER * is_other),
        ):
            config = load_config([*words, *more])
            own = resolve(config, look(config, 2, device_type="cpu"))
        check_agreement(own)
        values = own.config.training.mixed_precision_param, own.config.compile.enable
        try:
            job = take_choices(own, AllRanks(group))
            found[case] = values, job.config.training.mixed_precision_param, job.filled_in
        except ConfigError as error:
            found[case] = values, str(error)
    return found


def test_ranks_take_the_choices_of_the_first_that_they_would_not_make(on_ranks, tmp_path) -> None:
    first, second = on_ranks(2, choices_of, tmp_path)
    assert [of_rank["type"][0][0] for of_rank in (first, second)] == ["bfloat16", "float32"]
    assert first["type"][1:] == second["type"][1:]
    assert second["type"][1] == "bfloat16"
    assert [of_rank["compiler"][0][1] for of_rank in (first, second)] == [True, False]
    said = f"compile.enable = true: {NO_COMPILER}\n  fix: set compile.enable = false"
    assert first["compiler"][1] == second["compiler"][1] == said


def test_a_job_with_its_own_choices_is_the_same_job(tmp_path) -> None:
    """So are the choices of another rank that makes them alike."""
    job = resolved_on_rank(load_config(words_of(tmp_path, data(tmp_path))), 2)
    again = with_choices(job, [stage.filled_in for stage in job.training_stages])
    assert (again.config, again.filled_in, again.least_bytes) == (
        job.config,
        job.filled_in,
        job.least_bytes,
    )
    assert resolved_on_rank(job.config, 2).config == job.config


def test_a_digest_is_gathered_and_if_ranks_differ_the_few_are_named(monkeypatch) -> None:
    """Whichever ranks come first: one machine with old code is named, not all others."""
    sent, there = [], []

    def gather(gathered: list, mine: object) -> None:
        sent.append(mine)
        gathered[:] = there or [mine] * 4

    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    check_same({"config": "x" * 4000})
    assert len(pickle.dumps(sent)) < 100
    there += [RankFacts(host, {"code": code}) for host, code in zip("abcd", "1222", strict=True)]
    with pytest.raises(ConfigError) as error:
        check_same({})
    assert "code: rank 0 (on a): 1; rank 1-3 (on b, c, d): 2\n" in str(error.value)


def test_a_key_of_a_later_stage_is_compared(monkeypatch, tmp_path) -> None:
    """A job that resumes there would otherwise train on with two rates."""
    facts: list[dict[str, str]] = []
    monkeypatch.setattr(agreement, "check_same", facts.append)
    text, file = data(tmp_path / "data"), tmp_path / "job.toml"
    for rate in (0.001, 0.002):
        stages = f"[[training.stages]]\nuntil_tokens = 400\n[[training.stages]]\nlr = {rate}\n"
        tiny = f'extends = "{ROOT}/tests/integration/tiny.toml"\n[checkpoint]\nenable = true\n'
        file.write_text(tiny + stages)
        more = {"job__config_file": str(file), "training__global_batch_size": "4"}
        check_agreement(resolved(load_config(words_of(tmp_path, text, **more)), 2))
    first, second = (one["config"] for one in facts)
    found = [*agreement._differences("config", second, first)]
    assert found == [("training.stages.1.lr", "0.002", "0.001")]


def test_ranks_that_all_lack_the_kernel_run_the_same_job(monkeypatch, tmp_path) -> None:
    """Whatever path of theirs, or number of a process, the import's error has."""
    facts: list[dict[str, str]] = []
    monkeypatch.setattr(agreement, "check_same", facts.append)
    plan = resolved(load_config(words_of(tmp_path, data(tmp_path / "data"))), 2)
    for number in (1, 2):
        why = f"fla cannot be imported: [Errno 13] Permission denied: '/cache/tmp.pid_{number}'"
        monkeypatch.setattr(agreement, "why_chunks", lambda *_, why=why: why)
        check_agreement(plan)
    assert facts[0] == facts[1]
    assert facts[0]["code"].endswith(", linear attention in chunks: fla cannot be imported")


def test_ranks_in_words() -> None:
    assert in_ranges([7, 0, 1, 2, 3]) == "0-3, 7"
    assert in_ranges([5]) == "5"


def own_folder(folder: Path) -> tuple[str, float]:
    """What ranks say that have a folder of the same name each; one of them has a checkpoint."""
    mine = folder / str(dist.get_rank())
    if dist.get_rank() == 0:
        publish(mine / "checkpoint", 5)
    dist.barrier()
    with patch.object(lease, "SEEN_WITHIN_S", 0.3):
        reads = CheckpointManager(mine / "checkpoint", Checkpoint(enable=True, load_only=True))
        reads.take_lease()  # it writes nothing that others have to see
        reads.release()
        try:
            CheckpointManager(mine / "checkpoint", Checkpoint(enable=True)).take_lease()
        except ConfigError as error:
            return str(error)
    return ""


def shared_by_all(folder: Path) -> tuple[object, int]:
    """The step that is found, and how often this rank looked at a checkpoint's files."""
    rank, looks = dist.get_rank(), []
    if rank == 0:
        publish(folder, 5)
    dist.barrier()

    def noting(checkpoint: Path) -> dict:
        looks.append(checkpoint)
        return inspect(checkpoint)

    inspect = integrity.inspect
    manager = CheckpointManager(folder, Checkpoint(enable=True))
    manager.take_lease()
    with patch.object(store, "inspect", noting), manager.open() as found:
        assert found is not None
    manager.release()
    return found.manifest["step"], len(looks)


def test_the_first_rank_chooses_a_checkpoint_in_a_folder_that_all_see(on_ranks, tmp_path) -> None:
    host, (first, second) = socket.gethostname(), on_ranks(2, own_folder, tmp_path)
    assert second == first.replace(str(tmp_path / "0"), str(tmp_path / "1"))
    assert f"rank 1 (on {host}) does not see what rank 0 writes there" in first
    left = {path.name for path in tmp_path.rglob("*")}
    assert left == {"0", "checkpoint", "step-5", INDEX, MANIFEST}
    assert on_ranks(2, shared_by_all, tmp_path / "shared") == [(5, 1), (5, 0)]
    assert {path.name for path in (tmp_path / "shared").iterdir()} == {"step-5"}


@pytest.mark.ranks(2)
def test_only_the_first_rank_looks_at_files_for_the_notes_on_a_job(tmp_path) -> None:
    plan = resolved(load_config(["debug_model", f"--job.dump_folder={tmp_path}"]), 2)
    with patch("meshwright.train.resolve.validation_note", return_value="") as note:
        announce(plan, torch.device("cpu"), Launch())
    assert note.called == (dist.get_rank() == 0)


@pytest.mark.parametrize("name", ["a.py", "a.cpp"])
def test_the_code_is_all_that_is_run(monkeypatch, tmp_path, name) -> None:
    monkeypatch.setattr("meshwright.system.modules.PACKAGE", tmp_path)
    hashes = set()
    for text in ("", "1"):
        (tmp_path / name).write_text(text)
        hashes.add(modules.source_hash.__wrapped__())
    assert len(hashes) == 2


def opened(folder: Path, mode: str) -> tuple[int, list[str], list[int]]:
    """How often this rank looked for files, what its sources hold, and its first tokens."""
    looked: list[str] = []
    find_files, load = files.resolve, datasets.load_dataset

    def note(path: str, suffixes: Sequence[str]) -> list[files.DataFile]:
        looked.append(path)
        return find_files(path, suffixes)

    def load_builder(name: str, subset: str | None, revision: str | None = None) -> object:
        looked.append(name)
        address = f"hf://datasets/{name}@{'1' * 40}/a.jsonl"
        return SimpleNamespace(config=SimpleNamespace(data_files={"train": [address]}))

    def load_hub(path: str, split: str, streaming: bool, **_: object) -> object:
        looked.append(path)
        lines = str(folder / "data" / "a.jsonl")
        return load("json", data_files=lines, split=split, streaming=streaming)

    keys = {"training__dataset_mode": mode}
    if mode == "hub":
        keys = {"training__dataset": "owner/name", "training__dataset_path": ""}
    config = load_config(words_of(folder, folder / "data", **keys))
    with (
        patch.object(files, "resolve", note),
        patch.object(datasets, "load_dataset_builder", load_builder),
        patch.object(datasets, "load_dataset", load_hub),
    ):
        plan = resolved_on_rank(config, dist.get_world_size())
        manager = CheckpointManager(plan.checkpoint_folder, plan.config.checkpoint)
        with patch.dict(os.environ, LOCAL_RANK=str(dist.get_rank())):
            sources, held_out = _open_data(plan, manager)
    rules = SampleRules(17, seed=0)
    stream = SampleStream(sources, Cursor(), rules, batch=1, slots=[0])
    sample = stream.next_sample()
    assert sample is not None
    contents = [source.content for source in (*sources, *held_out)]
    return len(looked), contents, sample.tokens.tolist()


@pytest.mark.ranks(2)
def test_the_first_rank_of_each_machine_looks_at_its_files(tmp_path: Path) -> None:
    data(tmp_path / "data")
    dist.barrier()
    words = words_of(tmp_path, tmp_path / "data", training__dataset_mode="streamed")
    plan = resolved_on_rank(load_config(words), 2)
    manager = CheckpointManager(plan.checkpoint_folder, plan.config.checkpoint)
    there = patch.object(opening, "_hash", lambda *_: f"of machine {dist.get_rank()}")
    with there, patch.dict(os.environ, LOCAL_RANK="0"), pytest.raises(ConfigError, match="rank 1"):
        _open_data(plan, manager)


@pytest.mark.parametrize("mode", ["cached", "streamed", "hub"])
def test_only_the_first_rank_looks_for_files(on_ranks, tmp_path, mode) -> None:
    data(tmp_path / "data")
    first, *others = on_ranks(4, opened, tmp_path, mode)
    assert first[0] > 0
    assert [of_rank[0] for of_rank in others] == [0, 0, 0]
    assert all(of_rank[1:] == first[1:] for of_rank in others)
