"""`meshwright diverge`: planted differences are named, and what only changes rounding is not."""

import dataclasses
import json
import math
import os
import subprocess
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from meshwright.checkpoint.reader import compare
from meshwright.commands.diverge import replays, verdict
from meshwright.commands.diverge.checkpoints import Element, Place, lone_element, suspects
from meshwright.commands.diverge.command import EXIT_UNEXPLAINED
from meshwright.commands.diverge.facts import Fact, compare_facts
from meshwright.commands.diverge.flips import likely_bits, size_of, stands_out, steps_alike
from meshwright.commands.diverge.records import OtherStep, compare_rows
from meshwright.commands.diverge.trace import first_other_value
from meshwright.commands.diverge.tries import Flip, flip_bits
from meshwright.commands.diverge.verdict import Comparison, Verdict
from meshwright.commands.replay.compared import ComparedStep, ComparedSteps
from meshwright.commands.replay.recorded import read_recorded
from meshwright.system import errors
from meshwright.system.errors import ConfigError
from tests.campaigns import divergence
from tests.campaigns.divergence import TWO, documents, on_ranks, other_code
from tests.campaigns.new_user import commands
from tests.helpers.cli import command
from tests.helpers.jobs import train_alone, train_on_ranks, wait_for

diverge = command("diverge")

ROOT = Path(__file__).parents[2]
SHORT = ["--training.steps", 2, "--checkpoint.interval", 1, "--checkpoint.keep_latest_k", 0]


def _result(capsys: pytest.CaptureFixture[str], code: int, *words: object) -> dict:
    """What the command prints as JSON when it exits with `code`."""
    capsys.readouterr()
    if code:
        with pytest.raises(SystemExit) as ended:
            diverge([*words, "--json"])
        assert ended.value.code == code
    else:
        diverge([*words, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on one process."""
    folder = tmp_path_factory.mktemp("base") / "run"
    train_alone(folder, *SHORT)
    return folder


def test_a_key_is_named_and_a_run_equals_itself(base: Path, tmp_path: Path, capsys) -> None:
    train_alone(tmp_path / "other", *SHORT, "--optimizer.beta2", 0.5)
    result = _result(capsys, 1, base, tmp_path / "other")
    assert result["verdict"]["names"] == ["optimizer.beta2"]
    assert result["verdict"]["kind"] == "key"
    assert result["facts"][0] == {
        "name": "optimizer.beta2",
        "a": "0.95",
        "b": "0.5",
        "effect": "key",
    }
    diverge([base, base])
    out = capsys.readouterr().out
    assert "equal bits in 2 steps" in out
    assert "verdict         equal in every bit, to step 2" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "^A, B: not given"),
        (["BASE", "nowhere"], "RUN_DIR = '.*nowhere': no such folder"),
        (["BASE", "BASE", "--code-b", "BASE"], "^--code-b = .*: holds no meshwright/commands/div"),
        (["BASE", "CUT"], "^B = .*: has no step in common with A"),
    ],
)
def test_what_cannot_be_compared_is_one_error(base: Path, tmp_path: Path, words, message) -> None:
    for path in base.iterdir():
        (tmp_path / path.name).symlink_to(path)
    for name in ("steps", "metrics"):
        (tmp_path / f"{name}.jsonl").unlink()
        (tmp_path / f"{name}.jsonl").write_text('{"step": 7}\n')
    folders = {"BASE": base, "CUT": tmp_path}
    with pytest.raises(ConfigError, match=message):
        diverge([folders.get(word, word) for word in words])


def test_the_exit_code_of_an_unexplained_difference_means_nothing_else() -> None:
    names = [name for name in vars(errors) if name.startswith("EXIT_") and name != "EXIT_CODES"]
    assert EXIT_UNEXPLAINED not in {1, *(getattr(errors, name) for name in names)}


@pytest.mark.slow
@pytest.mark.parametrize(("value", "bit"), [("gradient", 6), ("weight", 22), ("exp_avg", 3)])
def test_a_flipped_bit_is_named_with_its_element_and_rank(
    value: str, bit: int, tmp_path: Path, capsys
) -> None:
    """Of one rank of two; the replay on two ranks gives the bits of the run without it, and of the
    run with it once the same bit is flipped."""
    name = "layers.1.attention.wq.weight"
    on_ranks(tmp_path / "a", *TWO)
    on_ranks(tmp_path / "b", *TWO, FLIP=f"{value} 6 1 77 {bit} {name}")
    for folders, run in ((("a", "b"), "B"), (("b", "a"), "A")):
        verdict = _result(capsys, 1, *(tmp_path / one for one in folders))["verdict"]
        found = [verdict[key] for key in ("kind", "run", "since", "step", "rank")]
        assert found == ["tensor", run, 6, 6, 1]
        assert (verdict["names"], verdict["element"]) == ([name, value], [18, 13])
        assert f"bit {bit} of the {value}" in verdict["text"]
        assert verdict["host"]
        if value != "weight":
            return


@pytest.mark.slow
def test_a_replica_takes_each_try_of_updates_that_are_collective(tmp_path: Path, capsys) -> None:
    """Muon brings matrices together, and only the first replica looks at its state."""
    words = ["--parallelism.data_parallel_replicate_degree", 2, "--optimizer.name", "muon"]
    words += ["--parallelism.data_parallel_shard_degree", 1]
    on_ranks(tmp_path / "a", *words)
    on_ranks(tmp_path / "b", *words, FLIP="exp_avg 6 0 7 22 layers.1.attention_norm.weight")
    verdict = _result(capsys, 1, tmp_path / "a", tmp_path / "b")["verdict"]
    assert verdict["names"] == ["layers.1.attention_norm.weight", "exp_avg"]
    assert (verdict["step"], verdict["element"]) == (6, [7])


@pytest.mark.slow
def test_a_bit_of_a_collective_is_named_with_its_rank(tmp_path: Path, capsys) -> None:
    """Of the second rank: the first, which writes the record, has the right norm."""
    on_ranks(tmp_path / "a", *TWO)
    on_ranks(tmp_path / "b", *TWO, FLIP="collective 6 1 0 14")
    verdict = _result(capsys, 1, tmp_path / "a", tmp_path / "b")["verdict"]
    assert [verdict[key] for key in ("kind", "run", "step", "rank")] == ["tensor", "B", 6, 1]
    assert "bit 14 of the sum of squares of all gradients on rank 1" in verdict["text"]


@pytest.mark.slow
def test_a_rate_that_no_loss_of_its_step_shows_is_named(tmp_path: Path, capsys) -> None:
    """Step 7 of the run that was to end there decays further, which changes its update only."""
    divergence.alone(tmp_path / "a")
    for steps in (7, 8):
        divergence.alone(tmp_path / "b", "--training.steps", steps)
    verdict = _result(capsys, 1, tmp_path / "a", tmp_path / "b")["verdict"]
    assert (verdict["kind"], verdict["names"]) == ("key", ["training.steps"])


@pytest.mark.slow
def test_patched_code_is_named_by_the_first_buffer_that_it_changes(tmp_path: Path, capsys) -> None:
    """Tables of cos and sin in bf16: the records differ by 2e-6 at most, as by rounding."""
    code = other_code(tmp_path, 0)
    divergence.alone(tmp_path / "a")
    divergence.alone(tmp_path / "b", code=code)
    result = _result(capsys, 1, tmp_path / "a", tmp_path / "b", "--code-b", code)
    assert result["verdict"]["kind"] == "module"
    assert result["verdict"]["names"][0].startswith("rope")
    assert any("models/attention.py" in one["text"] for one in result["stages"])
    result = _result(capsys, 0, tmp_path / "a", tmp_path / "b")
    assert "--code-b" in result["verdict"]["text"]


def test_the_patch_that_the_page_prints_is_the_one_of_the_test(tmp_path: Path) -> None:
    (patch,) = (one for one in commands(ROOT / "docs/replay.md") if one.startswith("sed "))
    changed = other_code(tmp_path, 0) / "meshwright/models/attention.py"
    file = tmp_path / patch.split()[-1]
    file.parent.mkdir(parents=True)
    file.write_bytes((ROOT / "meshwright/models/attention.py").read_bytes())
    subprocess.run(patch, shell=True, cwd=tmp_path, check=True)
    assert file.read_text() == changed.read_text()


@pytest.mark.slow
def test_a_changed_document_is_named_with_its_row(tmp_path: Path, capsys) -> None:
    for name, changed in (("a", -1), ("b", 41)):
        words = documents(tmp_path / f"{name}.jsonl", changed)
        divergence.alone(tmp_path / name, *words)
    verdict = _result(capsys, 1, tmp_path / "a", tmp_path / "b")["verdict"]
    assert (verdict["kind"], verdict["names"]) == ("data", ["json 41"])
    assert "a.jsonl:42" in verdict["text"]


@pytest.mark.slow
def test_another_mesh_and_two_resumes_are_rounding_only(tmp_path: Path, capsys) -> None:
    divergence.alone(tmp_path / "a")
    on_ranks(tmp_path / "b", "--parallelism.tensor_parallel_degree", 2)
    assert _result(capsys, 0, tmp_path / "a", tmp_path / "b")["verdict"]["kind"] == "rounding"
    for steps in (3, 6, 8):
        divergence.alone(tmp_path / "c", "--training.steps", steps)
    assert _result(capsys, 0, tmp_path / "a", tmp_path / "c")["verdict"]["kind"] == "equal"


def test_facts_are_told_apart_by_what_they_can_do() -> None:
    def start(**changed: object) -> dict:
        config = {
            "optimizer": {"lr": changed.pop("lr", 1e-3)},
            "training": {"local_batch_size": changed.pop("size", 2), "steps": changed.pop("n", 9)},
            "job": {"dump_folder": changed.pop("folder", "a")},
            "parallelism": {"data_parallel_shard_degree": changed.pop("shard", 2)},
        }
        facts = {"source": "1", "kernels": {"threads": 2}, "data_content": {"json": "x"}}
        return {"config": config, **facts, **changed}

    def effects(**changed: object) -> list[tuple[str, str]]:
        found = compare_facts(start(), start(**changed), has_other_rates=False)
        return [(fact.name, fact.effect) for fact in found]

    assert effects() == []
    assert effects(lr=2e-3, size=1) == [
        ("optimizer.lr", "key"),
        ("training.local_batch_size", "rounding"),
    ]
    assert effects(data_content={"json": "y"}) == [("data_content.json", "data")]
    assert effects(source="2", kernels={"threads": 1}) == [
        ("source", "code"),
        ("kernels.threads", "rounding"),
    ]
    assert effects(n=12, shard=-1) == [("training.steps", "rounding")], "merely longer"
    (steps,) = compare_facts(start(), start(n=12), has_other_rates=True)
    assert steps.effect == "key"
    assert effects(config=start()["config"] | {"sentry": {"interval": 9}}) == [
        ("sentry", "rounding")
    ], "training is bitwise the same with it"
    assert not Fact("sentry.interval", "0", "9", "rounding").changes_bits
    assert not Fact("job.dump_folder", "a", "b", "rounding").changes_bits
    assert Fact("mesh", "a", "b", "rounding").changes_bits


def _comparison(base: Path, **known: object) -> Comparison:
    """Of a run with itself, with what the records and checkpoints should say."""
    run = read_recorded(base)
    comparison = Comparison(run, run, None, 0, lambda *_: None)
    for name, value in known.items():
        setattr(comparison, name, value)
    return comparison


def test_an_interval_is_replayed_for_a_large_difference_behind_a_small_one(
    base: Path, monkeypatch
) -> None:
    """Both lie behind the same checkpoint, and the small one came back as recorded."""
    taken = list[int]()

    def of_interval(_: Comparison, before: int, other: OtherStep) -> Verdict | None:
        taken.append(other.step)
        return Verdict("run", "") if other.step == 40 else None

    monkeypatch.setattr(Comparison, "_of_interval", of_interval)
    comparison = _comparison(base, _expects_bits=False, _limit=1e-4)
    others = [OtherStep(5, ["loss"], 2e-6), OtherStep(40, ["loss"], 0.1)]
    assert comparison._of_steps(others).kind == "run"
    assert taken == [5, 40]


def test_without_sums_of_bits_in_between_the_step_is_one_of_several(base: Path) -> None:
    """A bit may change no loss for some steps, and the weights' bits are in logged steps only."""
    said = list[str]()
    rows = {1: {"weights": []}, 7: {}, 8: {"weights": []}}
    run = Mock(steps=rows, groups=["x"])
    comparison = _comparison(base, a=run, b=run, say=lambda _, text: said.append(text))
    other = OtherStep(8, ["loss"], 1e-3)
    for begin, words in ((4, "in one of steps 5 to 8, first"), (7, "in step 8, first")):
        found = comparison._went_wrong("B", other, begin, [])
        assert words in found.text
        assert (found.since, found.step) == (begin + 1, 8)
    comparison._say_records([other], [1, 7, 8])
    rows[7]["weights"] = []
    comparison._say_records([other], [1, 7, 8])
    comparison._say_records([other], [8])
    found = comparison._went_wrong("B", other, 4, [])
    assert "in step 8, first" in found.text
    assert (found.since, found.step) == (8, 8)
    assert [text.partition(";")[0] for text in said] == [
        "equal losses and norms to step 7",
        "equal bits to step 7",
        "first other bits in step 8: loss (1.0e-03)",
    ]


def test_steps_are_taken_again_from_a_checkpoint_that_both_have(base: Path, monkeypatch) -> None:
    """Also if the runs have met again by a later one; with rounding, from before the last step that
    is still the same."""
    monkeypatch.setattr(verdict, "first_other", lambda *_: None)
    exact = _comparison(base, _expects_bits=True, _folders=(base, base), _saved=[4, 8])
    assert [exact._around(step - 1, step) for step in (3, 6, 9)] == [
        (0, None),
        (4, None),
        (8, None),
    ]
    rounded = _comparison(base, _expects_bits=False, _saved=[4, 8])
    assert [rounded._around(step, 6) for step in (0, 4, 5)] == [(0, 8), (4, 8), (4, 8)]


@pytest.mark.parametrize(
    ("causes", "found", "most"),
    [
        ([{"c"}], ["c"], 7),
        ([{"a"}, {"h"}], ["a", "h"], 13),
        ([{"c", "d"}], ["c", "d"], 7),
        ([set()], list("abcdefgh"), 15),
        ([{"x"}], [], 1),
    ],
)
def test_keys_that_change_a_step_are_found_by_halves(causes, found, most) -> None:
    taken = list[object]()

    class Replays:
        def is_changed_by(self, keys: Sequence[str]) -> bool:
            taken.append(keys)
            return any(cause <= set(keys) for cause in causes)

    assert verdict._causes(Replays(), list("abcdefgh")) == found  # type: ignore[arg-type]
    assert len(taken) <= most


@pytest.mark.slow
def test_keys_that_change_nothing_are_not_named(tmp_path: Path, capsys) -> None:
    """A norm that nothing is clipped to, next to one key that counts; by itself it is no cause."""
    norm, decay = "--training.max_norm", ["--optimizer.weight_decay", 0.5]
    train_alone(tmp_path / "a", *SHORT, norm, 1e6)
    train_alone(tmp_path / "b", *SHORT, norm, 2e6, *decay, "--training.max_bad_records", 3)
    result = _result(capsys, 1, tmp_path / "a", tmp_path / "b")
    assert result["verdict"]["names"] == ["optimizer.weight_decay"]
    assert "training.max_norm" in [fact["name"] for fact in result["facts"]]
    words = ["--parallelism.tensor_parallel_degree", 2]
    train_on_ranks(tmp_path / "mesh", *SHORT, norm, 2e6, *words)
    result = _result(capsys, 0, tmp_path / "a", tmp_path / "mesh")
    assert result["verdict"]["kind"] == "rounding"


def test_a_run_whose_history_is_of_an_earlier_version_is_one_error(
    base: Path, tmp_path: Path
) -> None:
    for path in base.iterdir():
        (tmp_path / path.name).symlink_to(path)
    starts = [json.loads(line) for line in (base / "history.jsonl").read_text().splitlines()]
    for row in starts:
        row.pop("kernels", None)
    (tmp_path / "history.jsonl").unlink()
    (tmp_path / "history.jsonl").write_text("\n".join(map(json.dumps, starts)))
    for folders, name in (((base, tmp_path), "B"), ((tmp_path, base), "A")):
        with pytest.raises(ConfigError, match=f"^{name} = .*: its history.jsonl has no kernels"):
            diverge(folders)


def test_a_replay_leaves_out_what_only_watches(base: Path, tmp_path: Path) -> None:
    """Statistics of layers take one more forward, which a trace would take for the step's."""
    start = json.loads((base / "history.jsonl").read_text().splitlines()[0])
    start["config"]["metrics"]["layer_stats_freq"] = 1
    start["config"]["sentry"]["interval"] = 1
    recorded = read_recorded(base)
    recorded = dataclasses.replace(recorded, run=dataclasses.replace(recorded.run, history=[start]))
    given = Namespace(overrides={}, scan=False)
    config = recorded.config(2, 0, 1, given, tmp_path)
    assert (config.metrics.layer_stats_freq, config.sentry.interval) == (0, 0)


def test_steps_behind_a_flip_are_of_the_same_config_ranks_and_stage(base: Path) -> None:
    start = json.loads((base / "history.jsonl").read_text().splitlines()[0]) | {"event": "start"}
    others = [{}, {"stage": 2}, {"ranks": 2}, {"config": {**start["config"], "x": 1}}]
    recorded = read_recorded(base)
    steps = {step: {} for step in range(4)}
    runs = []
    for other in others:
        history = [start, start | {"step": 2} | other]
        run = dataclasses.replace(recorded.run, history=history)
        runs.append(dataclasses.replace(recorded, run=run, steps=steps))
    for a, b, wanted in ((0, 0, [True, True, False]), (0, 1, [True, False, False]),
                         (2, 0, [True, False, False]), (0, 3, [True, False, False])):  # fmt: skip
        taken = replays.Replays(runs[a], runs[b], None, 0, 2)
        assert [taken._is_as_last(step) for step in (2, 3, 4)] == wanted


def test_the_process_of_other_code_ends_with_an_error_here(
    base: Path, tmp_path: Path, monkeypatch
) -> None:
    worker, pid = tmp_path / "meshwright/commands/diverge/worker.py", tmp_path / "pid"
    worker.parent.mkdir(parents=True)
    # a package that is installed comes before one without this file
    (tmp_path / "meshwright/__init__.py").touch()
    worker.write_text(
        f"import os, time\ndef main(*_):\n    os.mkdir({str(pid)!r} + str(os.getpid()))\n"
        "    time.sleep(60)\n"
    )
    started = list[Path]()

    def fail(_: object) -> list:
        started.extend(wait_for(lambda: [*tmp_path.glob("pid*")], "a worker"))
        raise ConfigError("", "not here")

    monkeypatch.setattr(replays, "take_all", fail)
    run = read_recorded(base)
    interval = replays.Replays(run, run, tmp_path, 0, 1)
    with interval, pytest.raises(ConfigError, match="not here"):
        interval._work([], [replays.Interval("", 1, 1)])
    with pytest.raises(ProcessLookupError):
        os.kill(int(started[0].name.removeprefix("pid")), 0)


def test_lines_of_a_record_differ_in_any_bit_and_in_what_is_not_finite() -> None:
    row = {"loss": 2.0, "grad_norm": 1.0, "norms": [1.0, 2.0], "weights": ["0a", "0b"]}
    groups = ["x", "y"]
    assert compare_rows(row, row, groups) == {}
    other = row | {"loss": None, "norms": [1.0, 2.5], "weights": ["0a", "0c"]}
    assert compare_rows(row, other, groups) == {
        "loss": float("inf"),
        "gradient norm of y": 0.2,
        "weights of y": 0.0,
    }
    assert compare_rows(row, {"loss": 2.0, "grad_norm": 1.0}, groups) == {}, "an older record"
    # a skipped step: its replay has the number itself, and so have lists of older records
    taken = row | {"loss": math.nan, "norms": [math.nan, math.inf]}
    for recorded in (taken, row | {"loss": None, "norms": [None, None]}):
        assert compare_rows(taken, recorded, groups) == {}
    assert compare_rows(taken, row, groups)["loss"] == math.inf


def test_each_metric_has_its_own_bound() -> None:
    """Ten times the difference of the twin."""
    wanted = {step: {"step": step, "loss": 2.0, "grad_norm": 1.0} for step in (1, 2)}
    taken = {1: {"loss": 2.0, "grad_norm": 1.00005}, 2: {"loss": 2.00004, "grad_norm": 1.0}}

    def first(of_loss: float, of_norm: float) -> int | None:
        twin = {"loss": 2.0 * (1 + of_loss), "grad_norm": 1 + of_norm}
        steps = [ComparedStep(row, None, twin) for row in wanted.values()]
        return ComparedSteps("float32", steps).first_other(taken, wanted)

    assert first(1e-6, 1e-5) == 2
    assert first(1e-5, 1e-6) == 1
    assert first(1e-5, 1e-5) is None
    assert first(1.0, 1e-6) is None, "beyond the horizon nothing can be told"


def test_the_second_largest_difference_is_of_a_different_element() -> None:
    a = torch.zeros(5000, dtype=torch.float32)
    b = a.clone()
    b[17] = 1.0
    assert (found := compare("x", a, b)) is not None
    assert (found.largest, found.second, found.index) == (1.0, 0.0, (17,))
    b[4000] = -0.25
    assert (found := compare("x", a, b)) is not None
    assert (found.largest, found.second, found.index) == (1.0, 0.25, (17,))


def _element(value: str, times: float, size: float, name: str = "layers.0.w") -> Element:
    place = Place(name, value, (3,), 0, has_replicas=False)
    return Element(place, distance=size, size=size, times=times)


def test_an_element_is_named_only_if_it_stands_out_clearly() -> None:
    """What follows from a flipped bit stands out, too, above all in small tensors; in one value."""
    flipped = [_element("exp_avg", 1e4, 1e-3), _element("weight", 1e4, 2e-5)]
    after = [_element("exp_avg", 1e4, 2e-4, "norm"), _element("weight", 1e4, 1e-4, "norm")]
    assert lone_element(flipped, is_known=False) == flipped[0]
    assert lone_element([*flipped, *after], is_known=False) is None
    assert lone_element([*flipped, *after], is_known=True) == flipped[0]
    assert lone_element([_element("exp_avg", 2, 1e-3), flipped[1]], is_known=True) is None
    assert lone_element([flipped[1], after[0]], is_known=True) is None, "one value each"
    assert lone_element(flipped[1:], is_known=True) == flipped[1], "no other tensor differs"
    ulps = [_element(value, math.inf, 1e-7) for value in ("exp_avg", "weight")]
    assert lone_element(ulps, is_known=True) is None


def test_the_weights_that_stand_out_most_are_suspected() -> None:
    found = [_element("weight", times, 1e-3, f"layers.{times}.w") for times in (2, 9, 5)]
    assert [one.times for one in suspects([*found, _element("exp_avg", 99, 1e-3)])] == [9, 5, 2]


def test_the_bits_tried_first_are_those_that_explain_the_distance() -> None:
    for bit in range(3, 23):
        first, *others = likely_bits(1.0, 2.0 ** (bit - 23))
        assert first == bit
        assert len(others) == 2
    assert 30 in likely_bits(1.0, math.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_a_bit_is_flipped_and_flipped_back(dtype: torch.dtype) -> None:
    """The sign, too; of more bits than the type has none."""
    number = torch.tensor([3.0]).to(dtype)
    size = 8 * dtype.itemsize
    for bit in range(size + 1):
        flip_bits(changed := number.clone(), bit)
        assert torch.equal(changed, number) == (bit == size)
        flip_bits(changed, bit)
        assert torch.equal(changed, number)


def test_steps_are_alike_as_far_as_they_begin_with_the_same_weights() -> None:
    def rows(*weights: str | None) -> dict[int, dict]:
        return {n: {"weights": w} if w else {} for n, w in enumerate(weights)}

    assert steps_alike([rows("a", "b", "c", "d"), rows("a", "b", "x", "y")], range(4)) == [0, 1, 2]
    assert steps_alike([rows("a", None, "c"), rows("a", None, "c")], range(3)) == [0]
    assert steps_alike([rows("a"), {}], range(3)) == []


def test_a_flip_stands_out_if_its_element_is_much_further_off_than_others() -> None:
    first, other = (Place("w", "weight", index, 0, False) for index in ((1,), (2,)))
    sure = [Flip(first, 3, size=10.5), Flip(first, 4, size=9.0), Flip(other, 3, size=1.0)]
    assert stands_out(sure)
    assert stands_out(sure[:2]), "two bits of one element"
    assert stands_out([])
    assert not stands_out([Flip(first, 3, size=9.5), *sure[1:]])


def test_an_element_is_off_later_by_what_a_flip_can_explain() -> None:
    """In the same direction, and not by much more; in other values it counts for or against it."""
    changes = {"weight": torch.ones(4).double(), "exp_avg": torch.ones(4).double()}
    later = {
        "weight": torch.tensor([2.0, 2.0, 2.0, -2.0]).double(),
        "exp_avg": torch.tensor([1.0, -1.0, 9.0, 1.0]).double(),
    }
    size = size_of(changes, later, "exp_avg").tolist()
    assert [math.isnan(one) for one in size] == [False, True, True, False]
    assert size[0] > 1 > 0 > size[3]
    assert size_of(changes, {}, "exp_avg").tolist() == [0, 0, 0, 0], "no checkpoint"


def _entry(kind: str, name: str, values: list[float]) -> dict[str, dict]:
    entry = {"kind": kind, "name": name, "shape": [2, 2], "eps": 1.2e-7}
    return {f"{kind} {name}": entry | {"values": torch.tensor(values).double()}}


def test_the_first_value_beyond_ten_times_the_twin_is_named_with_its_element() -> None:
    a = _entry("output", "x 0", [1, 1, 1, 1]) | _entry("gradient", "w", [1, 1, 1, 1])
    twin = _entry("output", "x 0", [1, 1, 1, 1.00001]) | _entry("gradient", "w", [1, 1, 1, 1])
    b = _entry("output", "x 0", [1, 1, 1, 1.00008]) | _entry("gradient", "w", [1, 1, 1.00001, 1])
    found = first_other_value(a, b, twin)
    assert found is not None
    assert (found.kind, found.name, found.element) == ("gradient", "w", [1, 0])
    assert first_other_value(a, a, twin) is None
    without = first_other_value(a, b)
    assert without is not None
    assert without.words == "the output of x 0"
