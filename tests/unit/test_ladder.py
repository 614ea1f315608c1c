"""`meshwright ladder`: the law, the rungs, bad input, and runs that take milliseconds."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshwright.commands.ladder.law import fit, quantile, why_no_law
from meshwright.commands.ladder.rungs import Ladder, read_ladder
from meshwright.commands.main import run
from meshwright.models.families import MODELS
from meshwright.system.errors import ConfigError
from tests.campaigns import laws
from tests.unit.test_experiment import Lab, lab  # noqa: F401

LADDER = """
base = "tiny.toml"
ranks = 1
rungs = [16, 24, 32, 40, 48]
predict = [64]
tokens_per_parameter = 0.5
"""


def test_quantiles_are_student_s() -> None:
    """By published tables."""
    assert [round(quantile(0.95, n), 3) for n in (1, 2, 5, 30)] == [12.706, 4.303, 2.571, 2.042]


def test_a_law_without_noise_is_found() -> None:
    x = np.log(1e10) + np.log(3) * np.arange(6)[:, None]
    law = fit(x, 1.7 + 400 * np.exp(-0.23 * x[:, 0]))
    found = law.parameters()
    assert found["E"].value == pytest.approx(1.7, rel=1e-3)
    assert found["alpha"].value == pytest.approx(0.23, rel=1e-3)
    assert law.coefficients() == [pytest.approx(400, rel=0.02)]
    n, d = np.meshgrid(np.log([1e6, 3e6, 1e7, 3e7]), np.log([1e8, 1e9, 1e10]))
    x = np.stack((n.ravel(), d.ravel()), 1)
    # Hoffmann et al.'s, their section D.3
    law = fit(x, 1.69 + 406.4 * np.exp(-0.34 * x[:, 0]) + 410.7 * np.exp(-0.28 * x[:, 1]))
    values = {name: interval.value for name, interval in law.parameters().items()}
    assert values == pytest.approx({"E": 1.69, "alpha": 0.34, "beta": 0.28}, rel=1e-3)


@pytest.mark.slow
def test_intervals_hold() -> None:
    """tests/campaigns/laws.py has 200."""
    draw = np.random.default_rng(3)
    held = [laws.compare(laws.of_compute(draw))[1]["loss"] for _ in range(12)]
    assert sum(held) >= 10  # of 12 at 95 %: fewer in 2 of 100


def test_an_outlier_moves_a_law_little() -> None:
    """One loss is 30 errors too high. By least squares the prediction moves by 0.6 %."""
    x = np.log(1e10) + np.log(2) * np.arange(12)[:, None]
    errors = 1e-3 * np.random.default_rng(3).standard_normal(12)
    losses = (2 + 300 * np.exp(-0.25 * x[:, 0])) * np.exp(errors)
    further = np.log([1e10 * 2**13])
    before = fit(x, losses).loss_at(further)
    losses[4] *= 1.03
    assert fit(x, losses).loss_at(further) == pytest.approx(before, rel=0.001)


@pytest.mark.parametrize("kind", ["noise", "rising", "no longer falling"])
def test_losses_without_a_law_are_refused(kind: str) -> None:
    one = laws.lawless(np.random.default_rng(5))[kind]
    assert "law" in why_no_law(one.x, one.losses)


@pytest.mark.parametrize("name", MODELS)
def test_every_family_has_models_of_other_widths(name: str) -> None:
    """The base's width gives the base, and half and twice of it a model of the same shape."""
    base = MODELS[name].flavors["debugmodel"]
    assert {key: getattr(base, key) for key in base.of_width(base.dim)} == base.of_width(base.dim)
    sizes = []
    for dim in (base.dim // 2, base.dim, 2 * base.dim):
        args = replace(base, **base.of_width(dim))
        assert args.dim / args.n_layers == pytest.approx(base.dim / base.n_layers, rel=0.01)
        assert args.table.head_dim == base.table.head_dim
        for key in {"hidden_dim", "expert_dim", "shared_expert_dim"} & vars(args).keys():
            wanted = getattr(base, key) / base.dim
            assert getattr(args, key) / args.dim == pytest.approx(wanted), key
        sizes.append(args.table.num_params)
    # matrices grow by 4, and at most from 2 layers with experts to 5; embeddings by 2
    assert 2 < sizes[1] / sizes[0] < 10
    assert 2 < sizes[2] / sizes[1] < 10
    with pytest.raises(ValueError, match=r"must be a multiple of 32, .*: use 32"):
        base.of_width(33)


def ladder(*words: str) -> int:
    try:
        run(["ladder", *words])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def read(lab: Lab, text: str = LADDER) -> Ladder:  # noqa: F811
    lab.file.write_text(text)
    return read_ladder(lab.file)


def test_a_ladder_is_trained_and_predicts_the_next_rung(lab, tmp_path: Path, capsys) -> None:  # noqa: F811
    read(lab)
    with pytest.raises(ConfigError, match="holds no ladder yet"):
        ladder("show", str(lab.file))
    assert ladder(str(lab.file)) == 0
    out = capsys.readouterr().out
    assert out.index("dim=48,tokens=0.5x: predicted") < out.index("dim=48,tokens=0.5x, seed 0")
    assert "L = E + A / C^alpha, with errors of " in out
    file = tmp_path / "page.html"
    assert ladder("show", str(lab.file), "--json", "--output", str(file)) == 0
    summary = json.loads(capsys.readouterr().out)
    *rungs, further = summary["rungs"]
    assert [rung["dim"] for rung in rungs] == [16, 24, 32, 40, 48]
    assert (further["dim"], further["loss"], further["runs"]) == (64, None, 0)
    predicted = further["predicted"]
    truth = 2 + 30 * further["tokens"] ** -0.25
    assert predicted["low"] < truth < predicted["high"]
    assert predicted["value"] == pytest.approx(truth, rel=0.02)
    assert summary["law"]["alpha"]["low"] < 0.125 < summary["law"]["alpha"]["high"]  # of compute
    assert (summary["no_law"], summary["failed"]) == (None, [])
    text = file.read_text()
    assert "http" not in text
    assert "<td>64</td>" in text
    assert text.count('class="dot') == 5 + 2  # losses, and what was predicted
    # the next rung is trained later, and only it
    lab.file.write_text(LADDER.replace("48]", "48, 64]").replace("predict = [64]", ""))
    assert ladder("run", str(lab.file), "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert again["rungs"][-1]["loss"] == pytest.approx(truth, abs=0.01)
    assert again["rungs"][-1]["predicted"] == predicted
    pids = lab.runs / "dim=16,tokens=0.5x" / "seed-0" / "pids.txt"
    assert pids.read_text().count("\n") == 1


@pytest.mark.slow
def test_a_ladder_without_a_law_predicts_nothing(lab, capsys) -> None:  # noqa: F811
    read(lab, "lr_power = 0.5\n" + LADDER)
    assert ladder("run", str(lab.file), "--json") == 3
    summary = json.loads(capsys.readouterr().out)
    assert "law" in summary["no_law"]
    assert summary["rungs"][-1]["predicted"] is None


def test_rungs_follow_the_rules(lab) -> None:  # noqa: F811
    """The base has width 32, 8 sequences a step and a learning rate of 4e-3."""
    rungs = read(lab, LADDER.replace("[64]", "[128]") + "seeds = 2\n").rungs
    base, large = rungs[2], read(lab, LADDER.replace("[64]", "[128]")).further[0]
    assert base.keys["optimizer.lr"] == 4e-3
    assert base.keys["training.global_batch_size"] == 8
    factor = large.parameters / base.parameters
    assert large.keys["optimizer.lr"] == pytest.approx(4e-3 * factor ** (-1 / 3), rel=1e-3)
    assert large.keys["training.global_batch_size"] == round(8 * factor ** (2 / 3))
    assert large.keys["model.args.n_layers"] == 8
    for rung in (*rungs, large):
        assert rung.tokens == pytest.approx(rung.parameters / 2, rel=0.05)
        assert rung.keys["training.global_batch_size"] % rung.keys["training.local_batch_size"] == 0
    both = read(lab, LADDER.replace("= 0.5", "= [0.5, 1, 2]"))
    assert (both.terms, len(both.rungs), len(both.further)) == (["N", "D"], 15, 3)
    x = both.variables(both.rungs[0])
    assert np.exp(x) == pytest.approx([both.rungs[0].parameters, both.rungs[0].tokens])
    assert math.exp(read(lab).variables(base)[0]) == pytest.approx(base.flops)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("rungs = [16,", "rungs = [12,", r"lab.toml:4: rungs = 12: .*multiple of 8"),
        ("[64]", "[48]", r"lab.toml:5: predict = \[48\]: \[48\] is trained as a rung"),
        ("16, 24, ", "", "can't be judged: it takes 5"),
        ("[16, 24, 32, 40, 48]", "[16, 16, 24, 32, 48]", "has a value twice"),
        ("rungs =", "rung =", r"unknown key rung\n.*did you mean rungs"),
        ("= 0.5", "= 0.0", "tokens_per_parameter"),
        ("= 0.5", "= [0.5, 0.5]", "has a value twice"),
        ("= 0.5", "= nan", r"^\S*lab.toml:6: tokens_per_parameter.0 = nan: .* finite number[^:]*$"),
        ("= 0.5", "= 0.5\nlr_power = 1e9", "lab.toml:7: lr_power = .*less than or equal to 4"),
        ("= 0.5", "= 0.5\nbudget = 3", "lab.toml:7: unknown key budget.*fix: choose from base"),
        ("ranks = 1", "[common]\n'training.steps' = 4\n[x]", "unknown key x|the budget decides"),
        ("tiny.toml", "tinny.toml", "did you mean tiny.toml"),
    ],
)
def test_a_bad_ladder_is_rejected_before_anything_runs(lab, before, after, message) -> None:  # noqa: F811
    lab.file.write_text(LADDER.replace(before, after))
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        ladder("run", str(lab.file))
    assert not lab.runs.exists()


@pytest.mark.slow
def test_a_rung_that_diverges_leaves_no_law(lab, capsys) -> None:  # noqa: F811
    text = "lr_power = -3.0\n" + LADDER.replace("ranks", 'common."optimizer.lr" = 0.9\nranks')
    read(lab, text)
    assert ladder("run", str(lab.file)) == 3
    assert "dim=16,tokens=0.5x diverged: lower optimizer.lr" in capsys.readouterr().out
