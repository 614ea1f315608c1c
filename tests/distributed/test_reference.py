"""The one-process reference of `prove` equals plain PyTorch, and a difference is named."""

from unittest.mock import patch

import pytest

from meshwright.commands.prove.checked import Checked
from meshwright.commands.prove.reference import compare_with_plain
from meshwright.commands.prove.shrink import shrink
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.models.args import ExpertArgs
from meshwright.models.families import MODELS
from meshwright.train.optim import registry, schedules
from meshwright.train.resolve_model import resolve_model
from tests.campaigns.random_references import words_of
from tests.helpers.slow import slow_but

GROUPS = (
    "--optimizer.groups="
    '[{parameters=["*norm.weight"],lr_scale=0.5,weight_decay=0.2},'
    '{parameters=["layers.1.*"],optimizer="muon"}]'
)
WEIGHTED = [f'{{name="{n}",weight=1,loss_weight={n}.5}}' for n in (1, 3)]
EMA = "--checkpoint.average.decay=0.999"
ROUTER = "--experts.sequence_balance_loss=0.1 --experts.bias_update_rate=0.01"
DECAY = "--lr_scheduler.decay_ratio=0.4 --lr_scheduler.decay_type=cosine"
CONFIGS = {
    **{name: [f"--model.name={name}"] for name in MODELS},
    "tied": [f"--model.args.tie_embeddings=true {EMA} {DECAY}"],
    "documents": ["--training.mask_documents=true --training.packing=best_fit"],
    "streamed": ["--training.dataset_mode=streamed --optimizer.name=Adam"],
    "frozen": ['--model.frozen=["tok_embeddings.*","layers.0.*"]'],
    "groups": [GROUPS],
    "muon": ["--optimizer.name=muon --optimizer.muon.split_heads=true"],
    "muon, linear attention": [
        "--model.name=qwen3_5_text --optimizer.name=muon --optimizer.muon.split_heads=true"
    ],
    "experts": [
        f"--model.name=qwen3_moe --optimizer.name=muon --experts.router_z_loss=0.01 {ROUTER} {EMA} "
        "--training.packing=best_fit --optimizer.muon.nesterov=false"
    ],
    "mtp": [
        "--model.name=deepseek_v3 --model.args.mtp_depth=2 --training.mask_documents=true "
        f"--training.packing=best_fit --training.mtp_loss_weight=0.7 {ROUTER}"
    ],
    "mtp, tied": ["--model.args.mtp_depth=1 --model.args.tie_embeddings=true"],
    "small rate": ["--optimizer.lr=1e-6"],
    "qk-clip": [
        "--model.name=qwen2 --model.flavor=qwen2.5_7b --optimizer.qk_clip_threshold=100 "
        f"--optimizer.qk_clip_interval=9 {EMA}"
    ],
    "qk-clip, latents": ["--model.name=deepseek_v3 --optimizer.qk_clip_threshold=0.7"],
    "mup": ["--model.args={mup_base_dim=64}"],
    "loss weights": [f"--training.datasets=[{','.join(WEIGHTED)}]"],
    "long": ["--model.flavor=llama3.1_8b --training.seq_len=8192"],
}


def of(words: list[str]) -> tuple[JobConfig, JobConfig]:
    config = load_config(words)
    return config, shrink(config, resolve_model(config)[1])


@pytest.mark.parametrize("words", slow_but("experts groups", CONFIGS))
def test_the_reference_is_plain_pytorch(on_ranks, words: str) -> None:
    (checked,) = on_ranks(1, compare_with_plain, *of(words.split()))
    assert checked.verdict == "equal", checked.row  # a new family needs its form in `FORMS`
    errors = checked.errors
    assert 0 < errors["loss"] < 1e-6
    assert 0 < errors["gradient"] < 1e-5  # other arithmetic, and no bit more than rounding
    assert errors["update"] > 0
    assert (errors.get("EMA", 0.0) > 0) == (EMA in words)
    args = resolve_model(load_config(words.split()))[1]
    assert ("balance_loss" in errors) == isinstance(args, ExpertArgs)


@pytest.mark.parametrize("number", slow_but("0", {str(n): [n] for n in range(8)}))
def test_random_configs_are_plain_pytorch(on_ranks, number: int) -> None:
    """More: `python -m tests.campaigns.random_references`."""
    words = words_of(7, number)
    (checked,) = on_ranks(1, compare_with_plain, *of(words))
    assert checked.failures == [], words


def without_decay(name: str, *others: object) -> registry.Settings:
    found = registry.settings_of(name, *others)
    return found._replace(weight_decay=0.0) if name == "tok_embeddings.weight" else found


def a_step_late(*job: object):
    lr_at = registry_learning_rate(*job)
    return lambda step: lr_at(max(step - 1, 1))


registry_learning_rate = schedules.learning_rate
FAULTS = {
    "decay": ("meshwright.train.optim.optimizers.settings_of", without_decay),
    "rate": ("meshwright.train.build.learning_rate", a_step_late),
}


def compare_with_fault(name: str, config: JobConfig, small: JobConfig) -> Checked:
    with patch(*FAULTS[name]):
        return compare_with_plain(config, small)


@pytest.mark.parametrize(
    ("name", "line", "others"),
    [
        ("decay", "update of tok_embeddings.weight at step 1: ", []),
        ("rate", "learning rate of step 2 of layers.0.attention_norm.weight: ", ["update"]),
    ],
)
def test_a_fault_that_one_process_has_is_named(on_ranks, name: str, line: str, others) -> None:
    """More: `tests/faults` with the finder "reference"."""
    (checked,) = on_ranks(1, compare_with_fault, name, *of([]))
    assert checked.failures[0].startswith(line)
    assert [*checked.lines][1:] == others
