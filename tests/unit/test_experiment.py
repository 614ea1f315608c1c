"""`meshwright experiment`: verdicts, bad input, and workers with runs that take milliseconds."""

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import chdir
from pathlib import Path
from statistics import stdev

import pytest

from meshwright.checkpoint.lease import FILE as JOB_LEASE
from meshwright.commands.experiment import arms, worker
from meshwright.commands.experiment import verdict as verdicts
from meshwright.commands.experiment.arms import register
from meshwright.commands.experiment.command import EXIT_FAILED
from meshwright.commands.experiment.registry import Arm, config_of, load
from meshwright.commands.experiment.results import Key, has_ended
from meshwright.commands.experiment.spec import Document, read_spec
from meshwright.commands.experiment.verdict import Pair, alpha_of, half_width, judge, least_pairs
from meshwright.commands.main import run
from meshwright.system.errors import EXIT_CONFIG, ConfigError
from meshwright.system.files import text_of
from meshwright.system.lease import Lease
from meshwright.train.facts import look
from meshwright.train.resolve import resolve
from tests.campaigns import rounds
from tests.helpers import fake_train
from tests.helpers.fake_train import BASE
from tests.helpers.jobs import wait_for

ROOT = Path(__file__).parents[2]
MARGIN = 0.002


def judged(*differences: float, number: int = 1, margin: float = MARGIN) -> verdicts.Verdict:
    return judge([Pair(d, d == 0) for d in differences], alpha_of(number), margin)


@pytest.mark.parametrize("count", [3, 5, 12])
def test_the_interval_ends_where_the_evidence_reaches_1_over_alpha(count: int) -> None:
    """By the martingale itself, not its inverse: the Bayes factor of a t statistic for a Gaussian
    mixture over effect / spread."""
    t, g = half_width(count, 0.025), verdicts.MIXTURE_WIDTH
    v, prior = count - 1, 1 + count * g
    log_e = -0.5 * math.log(prior) + count / 2 * (
        math.log1p(t * t / v) - math.log1p(t * t / (v * prior))
    )
    assert log_e == pytest.approx(math.log(1 / 0.025))


def test_three_pairs_can_decide_the_first_arms_and_four_the_eleventh() -> None:
    assert [least_pairs(alpha_of(n)) for n in (1, 2, 3, 11, 12, 54)] == [3, 3, 4, 4, 5, 5]
    assert sum(map(alpha_of, range(1, 10_000))) < verdicts.ALPHA


def test_of_sequences_without_effect_few_get_a_verdict() -> None:
    """All looks at 3 to 10 pairs together; tests/campaigns/verdicts.py has 40,000."""
    draw = random.Random(7)
    words = [judged(*(draw.gauss(0, 1) for _ in range(10))).word for _ in range(600)]
    assert sum(word in ("better", "worse") for word in words) <= 600 * alpha_of(1)
    assert words.count("open") > 550
    words = [judged(*(draw.gauss(4, 1) for _ in range(10))).word for _ in range(100)]
    assert words.count("worse") == 100


def test_verdicts() -> None:
    assert judged(0.03, 0.031, 0.0305).word == "worse"
    better = judged(-0.03, -0.031, -0.0305, 5.0)
    assert (better.word, better.num_pairs) == ("better", 3)  # the fourth doesn't take it back
    assert judged(1e-5, -2e-5, 1e-5).word == "equal"
    assert judged(0.0, 0.0).word == "identical"
    assert judged(0.0, 1e-9).word == "open"
    assert judged(math.inf, -0.03, math.inf).word == "diverged"
    once = judged(-0.03, math.inf, -0.031, -0.0305)
    assert (once.word, once.num_diverged) == ("better", 1)
    assert judged().seeds_needed == 3
    assert judged(0.1, number=3).seeds_needed == 4


def test_the_seeds_needed_decide_if_mean_and_spread_stay() -> None:
    some = judged(0.02, 0.05, 0.005, 0.04)
    assert some.word == "open"
    assert some.seeds_needed is not None
    count, spread = some.seeds_needed, stdev([0.02, 0.05, 0.005, 0.04])
    reach = [half_width(n, 0.025) * spread / math.sqrt(n) for n in (count - 1, count)]
    assert reach[0] >= some.mean > reach[1]
    assert judged(1.0, -1.0, 1.0, -1.0, margin=1e-9).seeds_needed is None


HEAD = 'base = "tiny.toml"\nbudget = {steps = 24}\nranks = 1\nseeds = 4\n'


class Lab:
    """A folder with a base and an experiment."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "lab.toml"
        (folder / "tiny.toml").write_text(BASE)
        (folder / "text.txt").write_text("to be, or not to be, that is the question " * 60)
        self.runs = folder / "outputs" / "lab"

    def write(self, text: str, head: str = HEAD) -> "Lab":
        self.file.write_text(head + text)
        return self

    def __call__(self, name: str, *words: str) -> int:
        try:
            run(["experiment", name, str(self.file), *words])
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    def results(self) -> dict[tuple[str, int], dict]:
        rows = map(json.loads, (self.runs / "results.jsonl").read_text().splitlines())
        return {(row["arm"], row["seed"]): row for row in rows}


@pytest.fixture
def lab(tmp_path, monkeypatch) -> Lab:
    monkeypatch.setattr(worker, "CHILD", fake_train.CHILD)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(worker, "POLL_S", 0.05)
    return Lab(tmp_path)


ARMS = """
[arms.hot]
"optimizer.lr" = "x2"
[arms.silent]
"metrics.log_freq" = 7
[arms.wild]
optimizer.lr = 2.0
"""


def test_an_experiment_is_decided_and_its_json_is_stable(lab, capsys) -> None:
    assert lab.write(ARMS)("run", "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    summary = json.loads(line)
    arms = {arm["arm"]: arm for arm in summary["arms"]}
    assert [arm["verdict"] for arm in arms.values()] == ["better", "identical", "diverged"]
    assert [arm["number"] for arm in arms.values()] == [1, 2, 3]
    assert {*summary} == {
        *("experiment", "folder", "metric", "margin", "steps", "is_decided", "finished"),
        *("diverged", "failed", "base", "screening", "arms"),
    }
    assert {*arms["hot"]} == {
        *(
            "arm",
            "number",
            "on",
            "from",
            "keys",
            "verdict",
            "num_pairs",
            "num_diverged",
            "mean",
            "spread",
        ),
        *("low", "high", "seeds_needed", "alpha", "unpaired"),
    }
    results = lab.results()
    assert len(results) == summary["finished"] + summary["diverged"] == 3 + 3 + 2 + 2
    keys = {"training.seed": "0", "optimizer.lr": "0.008"}
    late = [fake_train.loss_at(keys, step) for step in (18, 20, 22, 24)]
    assert results["hot", 0]["value"] == pytest.approx(sum(late) / 4, rel=1e-12)
    assert results["wild", 0]["exit_code"] == 3
    assert lab("show") == 0
    out = capsys.readouterr().out
    assert f"; base: {summary['base']['mean']:.4f}, spread " in out
    assert "worse: diverges" in out
    assert "identical: the same bits" in out


def test_arms_are_added_and_stand_on_each_other(lab, capsys) -> None:
    lab.write(ARMS)("run")
    verdict = lab_verdicts(lab, capsys)["hot"]
    assert lab("add", "hotter", "on=hot", "optimizer.lr=x2") == 0
    assert "hotter is compared with hot" in capsys.readouterr().out
    assert lab("run") == 0
    assert lab.results()["hotter", 0]["value"] < lab.results()["hot", 0]["value"]
    assert lab_verdicts(lab, capsys)["hot"] == verdict
    with pytest.raises(ConfigError, match="the folder has this arm with other keys"):
        lab("add", "hotter", "on=hot", "optimizer.lr=1e-3")
    assert (
        lab("add", "hotter", "on=hot", "optimizer.lr=x2") == 0
    )  # as a script does that is run again
    with pytest.raises(ConfigError, match="is hot again"):
        lab("add", "same", "optimizer.lr=0.008")


def lab_verdicts(lab: Lab, capsys) -> dict[str, dict]:
    capsys.readouterr()
    lab("show", "--json")
    return {arm["arm"]: arm for arm in json.loads(capsys.readouterr().out)["arms"]}


def test_the_page_has_intervals_tables_and_seeds_and_needs_no_network(lab, tmp_path) -> None:
    lab.write(ARMS)("run")
    lab("show", "--output", str(tmp_path / "page.html"))
    text = (tmp_path / "page.html").read_text()
    assert 'name="viewport"' in text
    assert "http" not in text
    (strips, *_) = re.findall(r"<h2>Differences from the base</h2>(.*?)<h2>", text, re.DOTALL)
    assert re.findall(r'aria-label="(.*?)"', strips) == [
        *("hot: better", "silent: identical", "wild: diverged")
    ]
    lines = re.findall(r"M(-?[\d.]+),10H(-?[\d.]+)", strips)
    assert [tuple(map(float, line)) for line in lines][1] == (500, 500)  # no difference: the middle
    low, high = map(float, lines[0])
    assert low < high < 500  # left is better
    curves = re.findall(r'<polyline class="curve (\w+)"', text)
    # the mean and three seeds of one arm, two of another; the third has no validations
    assert curves == ["c0", *["thin"] * 3, "c0", *["thin"] * 2]
    assert "<td>optimizer.lr = &#x27;x2&#x27;</td>" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("b", "optimizer.lr"), "KEY=VALUE = 'optimizer.lr': isn't one"),
        (("b", "optimizer.lr=1", "optimizer.lr=2"), "'optimizer.lr=2': isn't one.*each key once"),
        (("b", "optimizer.lr=nan"), "b: optimizer.lr = 'NaN': should be a valid number"),
        (("b/c", "optimizer.lr=1"), "^NAME = 'b/c': can't name an arm"),
        (("b", "from=x", "optimizer.lr=1"), "^from = 'x': must be a whole number"),
        (("b", "optimizer.lr=x1"), "^NAME = 'b': is base again: no value differs"),
    ],
)
def test_bad_words_of_add_are_one_error(lab, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        lab.write(ARMS)("add", *words)
    assert not lab.runs.exists()


def test_a_whole_run_has_the_schedule_and_the_last_checkpoint_of_its_config(
    lab, monkeypatch
) -> None:
    taken, train = list[dict](), worker.Worker._train

    def note(*words: object) -> int:
        taken.append(words[-1])
        return train(*words)

    monkeypatch.setattr(worker.Worker, "_train", note)
    lab.write("[arms.silent]\n'metrics.log_freq' = 7\n")("run")
    assert len(taken) == 4
    own = {"training.seed", "training.steps", "validation.freq", "checkpoint.keep_latest_k"}
    assert {key for settings in taken for key in settings} == own


def test_a_copy_of_the_folder_trains_its_own_base(lab, tmp_path_factory) -> None:
    """It trained the base of the folder that it was copied from, as that was by then."""
    (lab.folder / "tiny.toml").write_text(BASE.replace('= "text.txt"', f'= "{ROOT}/README.md"'))
    (lab.folder / "other.toml").write_text('extends = "tiny.toml"\noptimizer.lr = 1e-3\n')
    arms = f'[arms.a]\nbase = "other.toml"\n[arms.b]\nbase = "{lab.folder}/other.toml"\n'
    register(read_spec(lab.write(arms + '"optimizer.lr" = 2e-3\n').file))
    copy = shutil.copytree(lab.folder, tmp_path_factory.mktemp("there") / "copy")
    document = read_spec(copy / lab.file.name)
    known = load(document).arms
    files = [document.file.parent / known[name].config for name in ("base", "a", "b")]
    assert files == [copy / "tiny.toml", copy / "other.toml", lab.folder / "other.toml"]


def test_a_base_behind_a_link_is_the_one_that_the_path_means(lab, tmp_path_factory) -> None:
    """`..` of a link is the folder that holds what it points to."""
    there = tmp_path_factory.mktemp("there")
    (there / "sub").mkdir()
    far = f'extends = "{lab.folder}/tiny.toml"\noptimizer.lr = 1e-3\n'
    (there / "far.toml").write_text(far)
    (lab.folder / "link").symlink_to(there / "sub")
    document = read_spec(lab.write('[arms.a]\nbase = "link/../far.toml"\n').file)
    register(document)
    assert (lab.folder / load(document).arms["a"].config).resolve() == there / "far.toml"


def test_nested_keys_of_all_runs_are_keys(lab) -> None:
    """The experiment would set its own frequency otherwise."""
    lab.write(ARMS + "[common.validation]\nfreq = 8\n")("run")
    assert [step for step, _ in lab.results()["base", 0]["curve"]] == [8, 16, 24]


def test_a_long_name_of_a_draw_is_cut(lab) -> None:
    keys = [f"'optimizer.{'long_' * 8}{n}' = [1]\n" for n in range(5)]
    ((one,), (two,)) = (
        read_spec(lab.write(f"[grid]\n{''.join(lines)}").file).requests()
        for lines in (keys, [*keys[:4], keys[4].replace("[1]", "[2]")])
    )
    assert len(one.name) < 150
    assert one.name[:100] == two.name[:100]
    assert one.name != two.name


def test_draws_make_arms(lab) -> None:
    lab.write(
        """
        [grid]
        "optimizer.lr" = [4e-3, 8e-3]
        "optimizer.weight_decay" = [0.1, 0.0]
        [list]
        "lr_scheduler.warmup_steps" = [2, 5]
        [random]
        count = 2
        "optimizer.lr" = {log = [1e-4, 1e-2]}
        """
    )
    names = [one.name for one in read_spec(lab.file).requests()]
    assert names[:2] == ["lr=0.004,weight_decay=0.1", "lr=0.004,weight_decay=0.0"]
    more = [one.asked for one in read_spec(lab.file).requests()][-2:]
    lab.file.write_text(lab.file.read_text().replace("count = 2", "count = 3"))
    assert [one.asked for one in read_spec(lab.file).requests()][-3:-1] == more
    assert lab("run") in (0, 3)
    kept = json.loads((lab.runs / "experiment.json").read_text())
    # two of the draws are the base
    assert len(kept["arms"]) == 1 + 3 + 1 + 3


def test_budgets_become_steps_once(lab, capsys) -> None:
    head = HEAD.replace("steps = 24", "tokens = 4096")  # 8 sequences of 64 tokens
    lab.write('[arms.wide]\n"training.global_batch_size" = 16\n', head)("run")
    results = lab.results()
    assert (results["base", 0]["steps"], results["wide", 0]["steps"]) == (8, 4)
    assert "paired by seed only: other data" in capsys.readouterr().out
    lab.file = lab.folder / "timed.toml"
    lab.runs = lab.folder / "outputs" / "timed"
    lab.write(ARMS, HEAD.replace("steps = 24", "seconds = 8"))("run")
    # a step takes half a second
    assert {row["steps"] for row in lab.results().values()} == {16}
    assert not (lab.runs / "budget").exists()
    assert "8 s are 16 steps of 0.5 s" in capsys.readouterr().out
    lab.file = lab.folder / "short.toml"
    lab.write(ARMS, HEAD.replace("steps = 24", "seconds = 2"))("run")
    text = "2 s are 4 steps of 0.5 s on this machine; runs take 12, one for each of their validatio"
    assert text in capsys.readouterr().out


def test_the_base_is_timed_though_its_schedule_has_an_end(lab, monkeypatch) -> None:
    (lab.folder / "tiny.toml").write_text(BASE + "[lr_scheduler]\ntotal_steps = 99\n")
    train, checked = worker.Worker._train, []

    def checked_train(self: worker.Worker, arm: Arm, folder: Path, settings: dict) -> int:
        with chdir(lab.folder):
            config = config_of(arm.config, arm.keys | settings)
            resolve(config, look(config, 1))
        checked.append(folder.name)
        return train(self, arm, folder, settings)

    monkeypatch.setattr(worker.Worker, "_train", checked_train)
    lab.write("[arms.a]\noptimizer.lr = 1e-3\n", HEAD.replace("steps = 24", "seconds = 8"))("run")
    assert checked[0] == "budget"


SCREEN = "[list]\n'optimizer.lr' = [1e-3, 7e-3]\n[screen]\nsteps = 0.5\nkeep = 1\nseeds = [100]\n"


def test_a_crash_in_a_screening_is_run_again_and_drops_no_arm(lab, capsys, monkeypatch) -> None:
    monkeypatch.setattr(worker, "ATTEMPTS", 1)
    lab.runs.mkdir(parents=True)
    (lab.runs / "crash").touch()  # of the first run
    text = SCREEN.replace("1e-3, 7e-3", "7e-3, 1e-3")
    assert lab.write(text)("run", "--json") == EXIT_FAILED
    summary = json.loads(capsys.readouterr().out)
    assert (summary["screening"]["dropped"], summary["is_decided"]) == ({}, False)
    assert lab("run", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert [(arm["arm"], arm["verdict"]) for arm in summary["arms"]] == [("lr=0.007", "better")]


def test_a_run_of_a_screening_can_be_resumed_and_keeps_the_schedule_of_its_base(lab) -> None:
    """The base saves only the weights at the end, and its schedule is longer than the budget."""
    base = lab.folder / "tiny.toml"
    base.write_text(
        BASE + "[checkpoint]\nlast_save_model_only = true\n[lr_scheduler]\ntotal_steps = 99\n"
    )
    arm = lab.write(SCREEN) and register(read_spec(lab.file)).arms["lr=0.007"]
    given = str(lab.folder / arm.config), arm.keys, 24
    assert worker.settings_of_part(*given) == {"checkpoint.last_save_model_only": False}
    base.write_text(BASE)
    both = {"checkpoint.last_save_model_only": False, "lr_scheduler.total_steps": 24}
    assert worker.settings_of_part(*given) == both


def test_a_screening_goes_on_whose_list_has_the_value_of_the_base(lab, capsys) -> None:
    """4e-3 is the base's, so that it is no arm."""
    document = lab.write(SCREEN.replace("1e-3, 7e-3", "4e-3, 7e-3")) and read_spec(lab.file)
    assert list(register(document).arms) == ["base", "lr=0.007"]
    assert list(register(document).arms) == ["base", "lr=0.007"]
    lab("show")
    assert "; base: no run yet\n" in capsys.readouterr().out


def test_a_screening_keeps_the_best_and_judges_them_on_fresh_seeds(lab, capsys) -> None:
    rates = [1e-3, 2e-3, 3e-3, 5e-3, 6e-3, 7e-3]
    text = (
        f"[list]\n'optimizer.lr' = {rates}\n[screen]\nsteps = 0.5\nkeep = 1\nseeds = [100, 101]\n"
    )
    lab.write(text)("run", "--json")
    summary = json.loads(capsys.readouterr().out)
    assert [(arm["arm"], arm["number"], arm["verdict"]) for arm in summary["arms"]] == [
        ("lr=0.007", 1, "better")
    ]
    assert summary["screening"] == {
        "part": 0.0,
        "left": ["lr=0.007"],
        "dropped": {
            # rounds of 3, 6 and 12 steps: 6 arms become 3, then 2, then 1
            **{f"lr={rate}": 0.125 for rate in (0.003, 0.002, 0.001)},
            "lr=0.005": 0.25,
            "lr=0.006": 0.5,
        },
    }
    results = lab.results()
    steps = {arm: row["steps"] for (arm, seed), row in results.items() if seed == 100}
    assert steps == {f"lr={r}": n for r, n in zip(rates, (3, 3, 3, 6, 12, 12), strict=True)}
    starts = (lab.runs / "lr=0.007/seed-100/history.jsonl").read_text().splitlines()
    resumed = [row["step"] for row in map(json.loads, starts) if row["event"] == "start"]
    assert resumed == [0, 3, 6]
    assert {seed for arm, seed in results if arm == "base"} == {0, 1, 2}
    assert lab("add", "other", "optimizer.weight_decay=0.0") == 0
    capsys.readouterr()
    lab("show", "--json")
    assert json.loads(capsys.readouterr().out)["arms"][1]["number"] == 2  # after `keep`
    with pytest.raises(ConfigError, match="the screening started without it"):
        lab.write(text.replace("0.001,", "0.001, 9e-3,"))("run")


def test_a_crash_is_run_again_and_not_judged(lab, capsys) -> None:
    lab.runs.mkdir(parents=True)
    (lab.runs / "crash").touch()
    assert lab.write(ARMS)("run") == 0
    assert "exit code 1 (1)" in capsys.readouterr().out
    assert {row["status"] for row in lab.results().values()} == {"finished", "diverged"}


def test_a_run_that_was_killed_after_its_last_step_has_not_ended(tmp_path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n')
    history = tmp_path / "history.jsonl"
    start = '{"event": "start", "step": 0, "unix_s": 0}\n'
    history.write_text(start)
    assert not has_ended(tmp_path, 2)
    end = '{"event": "end", "step": 2, "unix_s": 0, "reason": "finished"}\n'
    history.write_text(start + end)
    assert [has_ended(tmp_path, steps) for steps in (2, 3)] == [True, False]


def test_a_run_whose_folder_a_living_job_has_is_not_judged(lab, capsys, monkeypatch) -> None:
    """As of a killed worker whose job still ends: the run is taken again, and hasn't failed."""
    monkeypatch.setattr(worker, "ATTEMPTS", 1)
    checkpoints = lab.runs / "base/seed-0/checkpoint"
    checkpoints.mkdir(parents=True)
    (lab.runs / "crash").write_text(str(EXIT_CONFIG))
    with Lease(checkpoints / JOB_LEASE):
        assert lab.write(ARMS)("run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["failed"] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[arms.a]\n"optimizer.lr" = 4e-3', r"lab.toml:\d+: .*is base again: no value differs"),
        ('[arms.a]\n"training.seed" = 4', r"lab.toml:6.*can't vary here: the experiment pairs"),
        ('[arms.a]\n"validation.num_samples" = 4', "one validation judges all arms"),
        (
            '[arms.a]\n"training.seq_len" = 32',
            "validated otherwise: by a different training.seq_len",
        ),
        ('[arms.a]\n"optimizer.lrr" = 4', r"lab.toml:6: a: optimizer.lrr: unknown key"),
        ('[arms.a]\n"optimizer.lr" = "x2"\n[arms.b]\n"optimizer.lr" = 8e-3', "b.*is a again"),
        ("[arms.a]\nlr = 2", r"arms.a.lr = 2: is no key of a config"),
        ('[arms.a]\non = "b"\n"optimizer.lr" = 2', "there is no such arm"),
        ('[arms.a]\n"optimizer.decay" = "x2"', "base has no positive number there"),
        ('[arms.base]\n"optimizer.lr" = 2', "can't name an arm"),
        ('[arms."results.jsonl"]\n"optimizer.lr" = 2', "can't name an arm"),
        ('[grid]\n"optimizer.lr" = 4', "should be a valid list"),
        (
            '[random]\ncount = 0\n"optimizer.lr" = [1, 2]',
            "random.count = 0: should be greater than 0",
        ),
        ('[random]\ncount = 2\n"optimizer.lr" = {log = [0, 1]}', "isn't a range to draw from"),
        (
            "[random]\ncount = 2\noptimizer.lr = {log = [1e-4, 1e-2]}",
            'is a table, and no key of a config\n.*put quotes around the key: "optimizer.lr" =',
        ),
        (
            "[random]\ncount = 2\nmodel.args.dim = [64, 128]",
            'put quotes around the key: "model.args.dim" =',
        ),
        (
            '[random]\ncount = 2\n"optimizer.lr" = {loguniform = [1e-4, 1e-2]}',
            "isn't a range to draw from",
        ),
        ("[arms.a]\n'optimizer.lr' = 2024-01-01", r"lab.toml:6: a: optimizer.lr = .*valid number"),
        ("[common]\n'optimizer.lr' = 2024-01-01", r"lab.toml:6: base: optimizer.lr = .*valid numb"),
        ("[common.training]\nsteps = 4", "lab.toml:6: common.training.steps = 4: can't vary here"),
        ('[arms.a]\nbase = "nope.toml"', "lab.toml:6: nope.toml: neither a file"),
        ("[random]\ncount = 2", "lab.toml has no arm to train"),
        (
            "[random]\ncount = 10_000_000\n'optimizer.lr' = [1, 2]",
            "random.count = .*or equal to 1000",
        ),
        (f"[grid]\n'a.b' = {[*range(40)]}\n'a.c' = {[*range(40)]}", "grid = 1600: more than 1,000"),
        (
            '[arms.a]\n"optimizer.lr" = 1e-3\noptimizer.lr = 2e-3',
            "lab.toml:5: arms.a = .*has optimizer.lr twice, once with quotes",
        ),
        (
            '[common]\n"training.steps" = 9\n[common.training]\nsteps = 8',
            "has training.steps twice",
        ),
        ("[screen]\nseeds = [-1]", r"lab.toml:6: screen.seeds.0 = -1: should be greater than"),
        ("[screen]\nseeds = [3]", r"lab.toml:6: .*seeds 0 to 3 are the verdict's"),
        ('[arms.a]\non = "b"\n[arms.b]\n[screen]', "can't change one that may be dropped"),
        ('[common]\n"training.steps" = 4', "the budget decides it"),
        ('[arms.a]\nfrom = 19\n"optimizer.lr" = 1', r"lab.toml:6: .*must be at most 18, where"),
        (
            '[arms.a]\nfrom = "x"\n"optimizer.lr" = 1',
            "lab.toml:6: arms.a.from = 'x': must be a whole",
        ),
        ('[arms.a]\nfrom = 6\n"optimizer.name" = "muon"', "saved with a different optimizer"),
        ('[arms.a]\nfrom = 6\n"model.args.dim" = 64', r"step-6 of base.* was saved with 32"),
        (
            '[arms.a]\nfrom = 6\n"optimizer.lr" = 1\n[screen]\nseeds = [9]',
            "a screening doesn't train the base",
        ),
        ('[common]\n"validation.enable" = false', "doesn't validate"),
        ('[common]\n"training.global_batch_size" = -1', "follows the number of ranks"),
    ],
)
def test_bad_arms_are_rejected_before_anything_runs(lab, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        lab.write(text)("run")
    assert not lab.runs.exists()


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ('metric = "validation/accuracy"', "the base doesn't log it"),
        ("seed = 4", r"unknown key seed\n.*fix: did you mean seeds\?"),
        ("budget.minutes = 4", "unknown key budget.minutes"),
        ("budget.tokens = 4", "needs steps, tokens or seconds, and only one of them"),
        ("seeds = 1", "greater than or equal to 2"),
        ('base = "tinny.toml"', "lab.toml:4: tinny.toml: .*did you mean tiny.toml"),
        ('folder = "s3://runs/lab"', "lab.toml:5: folder = .*: is an address"),
    ],
)
def test_a_bad_experiment_is_rejected(lab, head: str, message: str) -> None:
    key = head.partition(" =")[0]
    lines = [line for line in HEAD.splitlines() if not line.startswith(f"{key} =")]
    if key == "budget.tokens":
        lines = [line.replace("{steps = 24}", "{steps = 24, tokens = 4}") for line in lines]
    elif key == "budget.minutes":
        lines = [line.replace("{steps = 24}", "{minutes = 4}") for line in lines]
    else:
        lines.append(head)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        lab.write(ARMS, "\n".join(lines) + "\n")("run")
    assert not lab.runs.exists()


BRANCHES = """
[arms.late]
from = 12
"optimizer.lr" = "x2"
[arms.silent]
from = 8
"metrics.log_freq" = 7
"""


def test_branches_start_from_a_checkpoint_of_the_base_of_the_same_seed(lab, capsys) -> None:
    assert lab.write(BRANCHES)("run", "--json") == 0
    arms = {arm["arm"]: arm for arm in json.loads(capsys.readouterr().out)["arms"]}
    assert [(arm["from"], arm["verdict"]) for arm in arms.values()] == [
        *((12, "better"), (8, "identical"))
    ]
    for seed in (0, 1):
        folders = [lab.runs / name / f"seed-{seed}" for name in ("base", "late", "silent")]
        firsts = [json.loads(text_of(one / "metrics.jsonl").split("\n")[0]) for one in folders]
        assert [row["step"] for row in firsts] == [1, 13, 9]
    with pytest.raises(ConfigError, match="the folder has this arm with other keys"):
        lab.write(BRANCHES.replace("12", "16"))("run")


def starts_of(folder: Path) -> list[tuple[int, int]]:
    """From where and to where each process of a run trained, if it ended as it should."""
    events = [json.loads(line) for line in text_of(folder / "history.jsonl").splitlines()]
    assert [one["event"] for one in events] == ["start", "end"] * (len(events) // 2)
    steps = [one["step"] for one in events]
    return [*zip(steps[::2], steps[1::2], strict=True)]


def test_a_branch_whose_checkpoint_is_gone_trains_its_start_itself(lab, capsys) -> None:
    """As its reference, which may be a branch as well."""
    lab.write(BRANCHES)("run")
    assert lab("add", "later", "on=late", "from=16", "metrics.log_freq=7") == 0
    shutil.rmtree(lab.runs / "base/seed-0/checkpoint")
    assert lab("run") == 0
    assert starts_of(lab.runs / "later/seed-0") == [(0, 12), (12, 16), (16, 24)]
    assert starts_of(lab.runs / "later/seed-1") == [(12, 16), (16, 24)]
    later = lab_verdicts(lab, capsys)["later"]
    assert (later["verdict"], later["from"], later["num_pairs"]) == ("identical", 16, 2)


def test_the_same_change_at_another_step_is_another_arm(lab) -> None:
    text = BRANCHES + '[arms.later]\nfrom = 16\n"optimizer.lr" = "x2"\n'
    arms = register(read_spec(lab.write(text).file)).arms
    assert [arm.branch for arm in arms.values()] == [0, 12, 8, 16]
    with pytest.raises(ConfigError, match="'again': is late again: no value differs"):
        lab("add", "again", "from=12", "optimizer.lr=x2")


def test_branches_that_would_keep_a_checkpoint_every_few_steps_keep_none(lab) -> None:
    head = HEAD.replace("steps = 24", "steps = 600")
    experiment = register(read_spec(lab.write(BRANCHES, head).file))
    assert worker.settings_of_origin(experiment, experiment.arms["base"], {}) == {}
    lab.file = lab.folder / "rarer.toml"
    experiment = register(read_spec(lab.write(BRANCHES.replace("= 8", "= 24"), head).file))
    kept = worker.settings_of_origin(
        experiment, experiment.arms["base"], {"checkpoint.interval": 6}
    )
    assert kept == {"checkpoint.keep_every_n_steps": 12}


@pytest.mark.slow
def test_a_branch_that_changes_nothing_has_the_bits_of_its_base(
    tmp_path, capsys, monkeypatch
) -> None:
    """By real runs: the branch resumes, and its seeds have other weights and batches. One of them
    trains its start itself."""
    lab = Lab(tmp_path).write(BRANCHES[BRANCHES.index("[arms.silent]") :])
    branch_off = worker.branch_off

    def kept_by_seed_0(document: Document, arm: Arm, key: Key) -> bool:
        if arm.branch and key.seed == 1:
            folder = lab.runs / "base/seed-1/checkpoint"
            shutil.rmtree(folder / "step-8", ignore_errors=True)
        return branch_off(document, arm, key)

    monkeypatch.setattr(worker, "branch_off", kept_by_seed_0)
    assert lab("run", "--json") == 0
    (arm,) = json.loads(capsys.readouterr().out)["arms"]
    assert (arm["verdict"], arm["num_pairs"]) == ("identical", 2)
    assert starts_of(lab.runs / "silent/seed-0") == [(8, 24)]
    assert starts_of(lab.runs / "silent/seed-1") == [(0, 8), (8, 24)]


def test_a_branch_and_its_base_are_judged_by_the_same_validations(lab, capsys) -> None:
    """Also the latest that there may be: the base has a validation where it starts."""
    lab.write(BRANCHES[BRANCHES.index("[arms.silent]") :].replace("8", "18"))
    assert lab("run", "--json") == 0
    (arm,) = json.loads(capsys.readouterr().out)["arms"]
    assert (arm["verdict"], arm["mean"]) == ("identical", 0)


def test_a_budget_in_seconds_has_no_branches(lab) -> None:
    with pytest.raises(ConfigError, match="a branch needs a budget in steps or tokens"):
        lab.write(BRANCHES, HEAD.replace("steps = 24", "seconds = 8"))("run")
    assert not lab.runs.exists()


def test_an_experiment_without_arms_is_rejected(lab) -> None:
    with pytest.raises(
        ConfigError, match=r"lab.toml has no arm to train\n  fix: add \[arms.NAME\]"
    ):
        lab.write("")("run")
    assert not lab.runs.exists()
    assert lab("add", "hot", "optimizer.lr=x2") == 0
    assert lab("run") == 0


def test_an_arm_of_a_job_on_gpus_is_added_from_a_node_without(lab, monkeypatch) -> None:
    """It is resolved for GPUs, as the base. But no worker runs it here."""
    monkeypatch.setattr(arms, "has_gpus", lambda: True)
    register(read_spec(lab.write(ARMS).file))
    monkeypatch.undo()
    seen = []
    monkeypatch.setattr(arms, "look", lambda *a, **known: seen.append(known) or look(*a, **known))
    assert lab("add", "hotter", "optimizer.lr=x3") == 0
    assert {known["expects_gpus"] for known in seen} == {True}
    with pytest.raises(ConfigError, match="its runs are on GPUs, which this node's wouldn't be"):
        lab("run")


def test_a_folder_of_another_experiment_is_rejected(lab, capsys) -> None:
    lab.write(ARMS)("run")
    with pytest.raises(
        ConfigError, match=r"a different experiment's: budget.steps = 24 there, 30 now"
    ):
        lab.write(ARMS, HEAD.replace("24", "30"))("run")
    with pytest.raises(ConfigError, match="the folder has this arm with other keys"):
        lab.write(ARMS.replace("2.0", "3.0"))("run")
    lab.write(ARMS, HEAD.replace("seeds = 4", "seeds = 5"))  # seeds may be added
    assert lab("run") == 0
    lab.write(ARMS.partition("[arms.silent]")[0])("show", "--json")  # arms may be taken out
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [arm["arm"] for arm in summary["arms"]] == ["hot"]


def test_a_damaged_result_is_one_error_and_judged_again(lab) -> None:
    lab.write(ARMS)("run")
    results, file = lab.results(), lab.runs / "hot/seed-1/result.json"
    for text in ("", "[]", '{"arm": "hot"}', '{"a": 1}'):
        file.write_text(text)
        with pytest.raises(
            ConfigError, match="hot/seed-1/result.json: is damaged: .*\n  fix: remove"
        ):
            lab("show")
    file.unlink()
    lab("run")
    assert lab.results()["hot", 1]["value"] == results["hot", 1]["value"]
    assert (file.parent / "pids.txt").read_text().count("\n") == 1  # it isn't trained again


@pytest.mark.slow
def test_the_printed_loop_keeps_what_is_better_and_can_be_started_again(lab) -> None:
    verdicts = {
        "optimizer.lr=x1.5": "better",
        "optimizer.lr=x1000": "diverged",
        "optimizer.weight_decay=0.1": "rejected",
        "metrics.log_freq=7": "identical",
    }
    changes = {}
    for change in verdicts:
        key, _, value = change.partition("=")
        changes.setdefault(key, []).append(value)
    code = re.sub(r"(?<=CHANGES = ){.*?}", repr(changes), rounds.loop(), flags=re.DOTALL)
    command = f'#!/bin/sh\nexec {sys.executable} -m tests.helpers.experiment_worker "$@"\n'
    lab.write("")
    printed = []
    for _ in range(2):
        done = rounds.play(lab.folder, code, command, "lab.toml", "8", "4")
        assert done.returncode == 0
        printed.append(done.stdout.splitlines())
    assert printed[0] == printed[1]
    rows, best = [line.split() for line in printed[0]], "base"
    for number, (name, change, verdict, *facts) in enumerate(rows, 1):
        assert name == f"round-{number}"
        # the same change of the same arm, once more, is rejected as well
        assert verdict in (verdicts[change], "rejected")
        best = name if verdict == "better" else best
        assert verdict == "rejected" or facts[-1] == best
    assert {verdict for _, _, verdict, *_ in rows} == {*verdicts.values()}
    assert len(printed[0]) == 8


def worker_of(lab: Lab) -> subprocess.Popen:
    environment = os.environ | {fake_train.STEP_S: "0.02"}
    words = [sys.executable, "-m", "tests.helpers.experiment_worker"]
    words += ["experiment", "run", str(lab.file)]
    return subprocess.Popen(words, env=environment, cwd=ROOT)


@pytest.mark.slow
def test_the_run_of_a_killed_worker_ends_with_it_and_the_next_one_resumes_it(lab) -> None:
    first = worker_of(lab.write(ARMS))
    pids = lab.runs / "base" / "seed-0" / "pids.txt"
    log = pids.with_name("metrics.jsonl")
    wait_for(lambda: text_of(log).count("\n") >= 3, "a run's third step")
    first.kill()
    first.wait()
    child = int(pids.read_text().split()[0])
    for _ in range(100):
        if not Path(f"/proc/{child}").exists():
            break
        time.sleep(0.02)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    second, third = worker_of(lab), worker_of(lab)
    assert (second.wait(60), third.wait(60)) == (0, 0)
    starts = [json.loads(line) for line in (pids.parent / "history.jsonl").open()]
    assert [row["event"] for row in starts] == ["start", "start", "end"]
    assert starts[1]["step"] > 0
    for (arm, seed), row in lab.results().items():
        if row["status"] == "finished" and (arm, seed) != ("base", 0):
            folder = lab.runs / arm / f"seed-{seed}"
            assert len((folder / "pids.txt").read_text().split()) == 1, (arm, seed)


def test_a_worker_that_is_asked_to_stop_passes_it_on(lab) -> None:
    one = worker_of(lab.write(ARMS))
    wait_for((lab.runs / "base/seed-0/metrics.jsonl").exists, "a run's first step")
    one.send_signal(signal.SIGTERM)
    assert one.wait(30) == 75
    assert not (lab.runs / "results.jsonl").exists()
