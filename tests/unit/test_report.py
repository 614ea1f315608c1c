"""`meshwright report`: a run as one HTML file."""

import dataclasses
import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config, to_toml
from meshwright.metrics.report.document import Chart, Curve, draw, short, thin, ticks
from meshwright.metrics.report.page import _totals
from meshwright.metrics.report.run import read_run
from meshwright.metrics.report.tables import loads_map
from meshwright.metrics.sinks import LoadsFile
from meshwright.system.errors import ConfigError
from scripts import pictures
from tests.helpers.cli import command

report = command("report")

VOID = {"meta", "line", "polyline", "polygon", "path", "br"}


class Checked(HTMLParser):
    """Fails at a tag that is not closed, and collects the addresses of other files."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.text += data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [
        {
            "step": step,
            "loss/train": 8 - step / 10,
            "optim/lr": 1e-3,
            "time/step_s": 0.5,
            "time/forward_backward_s": 0.4,
            "time/optimizer_s": 0.05,
            "time/wps": 1000.0 + step,
            "data/tokens": step * 4096,
            "optim/grad_norm": None if step == 8 else 1.5,
        }
        for step in (1, *range(2, 41, 2))
    ]
    rows[10] |= {"validation/loss": 6.25, "time/validation_s": 4.0}
    rows[20] |= {"validation/loss": 6.5, "time/validation_s": 4.0, "time/checkpoint_s": 3.0}
    lines(tmp_path / "metrics.jsonl", rows)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 41, "lo')  # killed here
    start = {"event": "start", "ranks": 2, "host": "<node>", "mesh": "dp_shard 2"}
    lines(
        tmp_path / "history.jsonl",
        [
            {**start, "step": 0, "unix_s": 100.0, "config": {"optimizer": {"lr": 1e-3}}},
            {**start, "step": 30, "unix_s": 900.0, "config": {"optimizer": {"lr": 5e-4}}},
            {"event": "end", "step": 40, "unix_s": 990.0, "reason": "finished"},
        ],
    )
    skipped = {"step": 7, "reason": "non-finite loss on rank 1", "loss": None, "grad_norm": 3.0}
    lines(tmp_path / "skipped_steps.jsonl", [skipped | {"samples": {"stdlib": [48, 55]}}])
    texts = [(step, f"{step}\n  <b>") for step in (20, 30, 40)]
    lines(tmp_path / "samples.jsonl", [{"step": s, "prompt": "", "text": t} for s, t in texts])
    (tmp_path / "config.toml").write_text(to_toml(JobConfig()))
    return tmp_path


def lines(file: Path, rows: list) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def page_of(*words: object) -> tuple[str, str]:
    """A report, and its text; fails if it is not whole or needs another file."""
    report([*map(str, words)])
    page = Path(words[-1] if "--output" in words else f"{words[0]}/report.html").read_text()
    checked = Checked()
    checked.feed(page)
    assert (checked.open, checked.addresses) == ([], [])
    assert "http" not in page
    return page, checked.text


def test_a_report_is_one_whole_file_with_everything_in_it(folder, capsys) -> None:
    with open(folder / "metrics.jsonl", "a") as file:  # by other writers
        file.write('\n{"step": 42, "loss/train": NaN, "time/step_s": Infinity, "a": 1e999}\n')
        file.write('{"step": 43, "time/forward_backward_s": null}\n')
    assert read_run(folder).series("loss/train")[-1] == (40, 4.0)
    page, text = page_of(folder)
    assert capsys.readouterr().out.split() == [str(folder / "report.html")]
    assert page.count('class="chart"') == 5  # no memory, no bits per byte in these records
    assert page.count('class="seam"') == page.count('class="skipped"') == 5
    for words in ("finished", "step 40: finished", "resumed 1x", "2 on <node>", "6.2500"):
        assert words in text
    assert "optimizer.lr: 0.001 -> 0.0005" in text  # changed at the resume
    assert "non-finite loss on rank 1" in text
    assert "stdlib 48 to 55" in text
    assert "Step 20:20\n  <b>Step 40:40\n  <b>All are in samples.jsonl" in text
    # 40 steps of 0.5 s, two validations, one save
    assert "0:00:31" in text
    assert "forward + backward0:00:1651.6%" in text
    assert "forward + backwardoptimizerother" in text  # the legend of the chart
    begun = {"event": "start", "unix_s": 1.0, "is_new_stage": True}
    lines(folder / "history.jsonl", [{**begun, "step": step} for step in (0, 10)])
    page, text = page_of(folder)
    assert "resumed" not in page  # a stage that begins
    assert "Dashed lines: resumes and new stages" in text


def test_a_report_has_a_chart_of_each_statistic_of_layers(folder) -> None:
    names = [f"layer_stats/max_attention_logit/layers.{layer}" for layer in range(8)]
    rows = [{"step": step, **dict.fromkeys(names, 2.0)} for step in (10, 20)]
    lines(folder / "metrics.jsonl", rows)
    page, text = page_of(folder)
    assert page.count('class="chart"') == 2  # of six layers, and of two
    assert "Largest attention logit" in text
    assert "layers.7" in text


def test_a_proof_in_the_folder_is_shown(folder) -> None:
    (folder / "proof").mkdir()
    case = {"name": "tp 2", "ranks": 2, "errors": {"loss": 1e-7, "gradient": 0.5}}
    cases = [case | {"verdict": verdict} for verdict in ("equal", "FAILED", "not run")]
    proof = {"proved": False, "summary": "1 < 4 cases"}
    for shown, first in ((1, "warn"), (2, "bad"), (3, "bad")):  # it is written after each case
        proof |= {"cases": cases[:shown]}
        (folder / "proof" / "proof.json").write_text(json.dumps(proof))
        page, text = page_of(folder)
        assert f'<p class="{first}">1 &lt; 4 cases</p>' in page
    assert "FAILED" in text
    proof = {"proved": True, "summary": "1 of 1 cases", "cases": cases[:1]}
    (folder / "proof" / "proof.json").write_text(json.dumps(proof))
    page, _ = page_of(folder)
    whole = '<h2>Proof</h2><p class="good">1 of 1 cases</p>'
    assert whole in page
    alone = pictures.keep(page, ["Proof"])  # as the picture of docs/correctness.md has it
    assert (alone.count("<h2>"), alone.count("<details open>")) == (1, 1)
    assert whole in alone
    proof |= {"proved": False, "reference": {"verdict": "FAILED"}}
    (folder / "proof" / "proof.json").write_text(json.dumps(proof))
    page, _ = page_of(folder)
    assert '<p class="bad">1 of 1 cases; one process against plain PyTorch: FAILED</p>' in page
    proof["reference"]["verdict"] = "equal"
    proof["properties"] = [
        {"name": "reach", "verdict": "FAILED"},
        {"name": "causal", "verdict": "equal"},
    ]
    (folder / "proof" / "proof.json").write_text(json.dumps(proof))
    page, _ = page_of(folder)
    assert '<p class="bad">1 of 1 cases; one process against plain PyTorch: equal; ' in page
    assert "equal; FAILED on one process: reach</p>" in page


def test_loads_of_experts_are_a_map_of_layers_and_experts(folder) -> None:
    loads = LoadsFile(folder / "experts.json", lambda: {1: [0, 4, 2, 2], 3: [0, 0, 0, 99]})
    loads.write({"step": 40, "loss/train": 1.0})
    drawn = loads_map(read_run(folder))
    # layer 1 has a mean of 2; all of layer 3 go to the last expert
    cells = dict(re.findall('<path d="([^"]*)" fill-opacity="([^"]*)"/>', drawn))
    places = {darkness: re.findall("M(. .)", path) for path, darkness in cells.items()}
    assert places == {
        "0.0": ["0 0", "0 1", "1 1", "2 1"],
        "0.5": ["2 0", "3 0"],
        "1.0": ["1 0", "3 1"],
    }
    _, text = page_of(folder)
    assert "Step 40. A row for each layer, 1 to 3, a column for each of 4 experts" in text
    LoadsFile(folder / "experts.json", lambda: {"<script>": [1]}).write({"step": 40})  # another's
    assert "<script>" not in loads_map(read_run(folder))


def test_many_resumes_of_a_long_run_take_no_time(folder) -> None:
    rows = [{"step": step, "time/step_s": 1.0} for step in range(1, 20_001)]
    starts = [{"event": "start", "step": step, "unix_s": 0.0} for step in range(0, 20_000, 20)]
    run = dataclasses.replace(read_run(folder), records=rows, history=starts)
    began = time.process_time()
    assert _totals(run)["other in steps"] == 20_000
    assert time.process_time() - began < 1  # 20 s with a look at each resume for each record


def test_a_run_that_has_only_begun_has_a_report_but_not_a_folder_without(tmp_path) -> None:
    for path in (str(tmp_path), "/"):
        with pytest.raises(ConfigError, match="RUN_DIR = .*: holds no metrics.jsonl\n  fix: "):
            report([path])
    with pytest.raises(ConfigError, match="RUN_DIR = 10: .*\n  fix: "):
        report([str(tmp_path)] * 10)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"no such folder\n  fix: name its folder: .* is a file"):
        report([str(tmp_path / "metrics.jsonl")])
    report([str(tmp_path)])
    assert "running, or ended without a word" in (tmp_path / "report.html").read_text()


def test_a_transient_sentry_event_is_a_note_and_a_sick_rank_is_the_end(folder) -> None:
    sick = "failed: rank 1 (on n3, GPU 2, GPU-8a): computes wrongly"
    rank = {"rank": 1, "host": "<n3>", "gpu": ""}
    event = {"event": "sentry", "step": 10, "ranks": [rank], "part": "forward of layers.0"}
    with open(folder / "history.jsonl", "a") as file:
        file.write(json.dumps(event | {"verdict": "transient"}) + "\n")
        rank["gpu"] = "2, GPU-8a"
        file.write(json.dumps(event | {"step": 20, "verdict": "sick"}) + "\n")
        file.write(json.dumps({"event": "end", "step": 20, "unix_s": 1e3, "reason": sick}) + "\n")
    _, text = page_of(folder)
    assert "10note: transientrank 1 on <n3>forward of layers.0" in text
    assert "20sick: the job endedrank 1 on <n3>, GPU 2, GPU-8aforward of layers.0" in text
    assert sick in text


@pytest.mark.parametrize("wrong", ['"leyers": {"1": [1, 2]}', '"layers": {"1": []}'])
def test_a_file_of_a_run_that_is_damaged_is_one_error(wrong, folder) -> None:
    (folder / "experts.json").write_text(f'{{"step": 40, {wrong}}}')
    with pytest.raises(ConfigError, match=r"RUN_DIR = .*: a file in it is .*\n  fix: "):
        page_of(folder)


def test_a_long_curve_keeps_its_extremes() -> None:
    points = [(step, 1.0) for step in range(10_000)]
    points[5_013] = (5_013, 9.0)
    kept = thin(points)
    assert len(kept) <= 800
    assert (5_013, 9.0) in kept
    assert [step for step, _ in kept] == sorted(step for step, _ in kept)


def test_charts_have_round_ticks_stacked_areas_and_any_curve() -> None:
    assert ticks(1.2, 1.9) == pytest.approx([1.2, 1.4, 1.6, 1.8])
    short_ones = [short(value) for value in (0, 0.25, 12_345, 8_190_000, 2e-5)]
    assert short_ones == ["0", "0.25", "12.3k", "8.19M", "2e-05"]
    for points in ([(5, 0.0)], [(1, 3.0), (2, 3.0)], [(1, 1e-9), (2, 1e9)]):
        assert "nan" not in draw(Chart("t", "", [Curve("a", points)])), points
    assert draw(Chart("t", "", [Curve("a", [])])) == ""
    curves = [Curve("a", [(0, 1.0), (10, 1.0)]), Curve("b", [(0, 3.0), (10, 3.0)])]
    drawn = draw(Chart("t", "s", curves, is_stacked=True))
    # the sum is drawn first; the lower area then covers its own part
    areas = re.findall('class="area (c.)" points="([^"]*)"', drawn)
    assert [color for color, _ in areas] == ["c1", "c0"]
    heights = [300 - float(points.split(",")[1].split()[0]) for _, points in areas]
    assert heights[0] == pytest.approx(4 * heights[1], rel=1e-2)


def run_of(folder: Path, losses: list[float], *overrides: str, tokens: int = 4096) -> Path:
    folder.mkdir(parents=True)
    names = ("step", "loss/train", "validation/loss", "data/tokens")
    figures = ((n, loss, loss + 1, n * tokens) for n, loss in enumerate(losses, 1))
    rows = [dict(zip(names, row, strict=True)) for row in figures]
    lines(folder / "metrics.jsonl", rows)
    (folder / "config.toml").write_text(to_toml(load_config(["debug_model", *overrides])))
    return folder


def test_several_runs_are_compared_where_weights_and_batches_were_equal(tmp_path, capsys) -> None:
    a = run_of(tmp_path / "a/run", [8.0, 7.0, 6.0, 5.0])
    b = run_of(tmp_path / "b/run", [8.0, 7.5, 6.0, 4.75], "--optimizer.lr=1e-4")
    c = run_of(tmp_path / "c/run", [8.5, 7.0], "--training.seed=7", "--optimizer.lr=1e-4")
    d = run_of(tmp_path / "d/run", [8.0], "--training.global_batch_size=32", tokens=8192)
    report([*map(str, (a, b))])
    assert capsys.readouterr().out.split() == [str(a / "compare.html")]
    page, text = page_of(a, b, c, d, "--output", tmp_path / "c.html")
    assert page.count('class="chart"') == 3  # losses, and the difference: no speed in these records
    assert "b/run4+0 at step 10.5 at step 2-0.25 from step 4" in text
    assert "c/run is not compared: a different training.seed." in text
    assert "d/run is not compared: a different training.global_batch_size." in text
    assert "optimizer.lr0.0020.00010.00010.002" in text  # a row of configs, a column for each
    # runs of other batches have tokens on their axis
    assert 'aria-label="Training loss, tokens 4096 to 16384"' in page
