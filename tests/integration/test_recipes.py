"""The modules of docs/extending.md train, by the keys that the page gives."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.train.resolve_model import extend_only_by
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


ON_A_MESH = {
    "parallelism.tensor_parallel_degree": 2,
    "parallelism.data_parallel_shard_degree": 2,
}


@pytest.mark.slow
def test_everything_that_computes_is_proved_on_a_mesh_of_two_axes() -> None:
    """A model with parts of its own, a loss, a metric, a schedule, and two optimizers."""
    kinds = ("model", "loss", "metric", "schedule", "adafactor")
    module = together("lion", *(RECIPES[kind][0] for kind in kinds))
    Path("mine.py").write_text(module)
    keys: dict[str, Any] = {"experimental.custom_import": "mine.py"}
    for kind in kinds:
        keys |= RECIPES[kind][1]
    keys["optimizer.groups"] = [{"parameters": ["*norm*"], "optimizer": "lion"}]
    proof = mw.prove(mw.load("debug_model", ON_A_MESH | keys), quick=True)
    assert proof["summary"] == "3 of 3 cases equal one process", proof


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
