"""The modules of docs/extending.md train, by the keys that the page gives."""

import math
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.commands.prove.bounds import bounds_of
from meshwright.commands.prove.cases import build_case
from meshwright.commands.prove.compare import compare
from meshwright.commands.prove.measure import measure
from meshwright.commands.prove.measurement import LAST_RESUMED_STEP
from meshwright.commands.prove.prove import record_references
from meshwright.commands.prove.reference import compare_with_plain
from meshwright.commands.prove.shrink import shrink
from meshwright.config.changes import changed
from meshwright.train.resolve_model import TABLES, extend_only_by, resolve_model
from tests.campaigns.new_user import example
from tests.helpers.jobs import CONFIG

STEPS = 3
SMALL = {"training.steps": STEPS, "metrics.enable_tensorboard": False, "metrics.log_freq": 1}

RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "loss": ("loss", {"training.loss": "smooth", "options.smooth.z": 1e-3}),
    "metric": ("metric", {}),
    "optimizer": ("optimizer", {"optimizer.name": "largest"}),
    "lion": ("lion", {"optimizer.name": "lion", "options.lion.beta2": 0.98}),
    "adafactor": ("adafactor", {"optimizer.name": "adafactor", "options.adafactor.decay": -0.7}),
    "schedule": ("schedule", {"lr_scheduler.name": "stairs"}),
    "dataset": (
        "dataset_options",
        {
            "training.dataset": "stanzas",
            "training.dataset_path": "poem.txt",
            "options.stanzas.separator": "--",
        },
    ),
    "tokenizer": (
        "tokenizer",
        {
            "model.tokenizer_type": "characters",
            "model.tokenizer_path": "poem.txt",
            "options.characters.lower": True,
            "training.dataset": "text",
            "training.dataset_path": "poem.txt",
        },
    ),
    "model": ("sigmoid", {"model.name": "sigmoid", "model.flavor": "debugmodel"}),
    "sink": ("sink", {}),
}
"""By the kind of part: its example, and the keys that use it."""


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    Path("poem.txt").write_text("--".join(f"stanza {i} of a long poem" for i in range(400)))
    yield
    extend_only_by("")


def losses_of(folder: str, keys: dict[str, Any]) -> list[float]:
    job = mw.load(CONFIG, SMALL | {"job.dump_folder": folder} | keys)
    with mw.Session(job) as session:
        return [step.loss for step in session.steps(STEPS)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses without a module."""
    return losses_of(str(tmp_path_factory.mktemp("plain")), {})


def together(*names: str) -> str:
    """One module that has these examples."""
    tables = "|".join(TABLES)
    parts = [re.sub(rf"^({tables}) = ", r"\1 |= ", example(name), flags=re.M) for name in names]
    return "\n".join([*(f"{table} = {{}}" for table in TABLES), *parts])


COMPUTES = ("model", "loss", "metric", "optimizer", "lion", "adafactor", "schedule")
ALL = ("model", "loss", "metric", "schedule", "adafactor")
DOUBLE = ("counts[1] += shard.gradient.numel()", "counts[1] += 1")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*COMPUTES, "all", "a metric that counts shards"])
def test_a_recipe_equals_one_process_on_a_mesh_of_two_axes(kind: str, on_ranks, tmp_path) -> None:
    """As `meshwright prove` compares them: with plain PyTorch, as far as that knows the parts, and
    steps, validation, checkpoint and resume with one process."""
    code, keys = "", dict[str, Any]()
    if kind == "all":  # with two optimizers
        code = together("lion", *(RECIPES[one][0] for one in ALL))
        keys["optimizer.groups"] = [{"parameters": ["*norm*"], "optimizer": "lion"}]
    elif kind in RECIPES:
        code = example(RECIPES[kind][0])
    else:
        code = example("metric").replace(*DOUBLE)
    for one in ALL if kind == "all" else {kind} & {*RECIPES}:
        keys |= RECIPES[one][1]
    (tmp_path / "mine.py").write_text(code)
    keys["experimental.custom_import"] = str(tmp_path / "mine.py")
    config = mw.load("debug_model", keys)
    small = shrink(config, resolve_model(config)[1])
    args = small.model.args | {"n_layers": 3}
    small = changed(small, {"training": {"steps": LAST_RESUMED_STEP}, "model": {"args": args}})
    case = build_case("mesh", small, {"dp_shard": 2, "tp": 2})
    reference, file = record_references(partial(on_ranks, 1), small, {"fp32"}, tmp_path)["fp32"]
    (checked,) = on_ranks(1, compare_with_plain, config, small)
    assert checked.failures == []
    ranks = on_ranks(case.world_size, measure, case.config, case.world_size, file)
    failures = compare(reference, ranks, bounds_of(case)).failures
    if kind in RECIPES or kind == "all":
        assert failures == []
    else:
        assert "optim/zero_share" in "".join(failures)


@pytest.mark.slow
@pytest.mark.parametrize("kind", RECIPES)
def test_a_recipe_trains_and_has_an_effect(kind: str, plain: list[float]) -> None:
    name, keys = RECIPES[kind]
    Path("mine.py").write_text(example(name))
    losses = losses_of("own", {"experimental.custom_import": "mine.py"} | keys)
    assert all(map(math.isfinite, losses))
    records = mw.read_metrics("own")
    assert all(("optim/zero_share" in record) == (kind == "metric") for record in records)
    assert Path("own/losses.csv").exists() == (kind == "sink")
    assert (losses == plain) == (kind in ("metric", "sink"))
