"""Latent attention: its dimensions' errors, YaRN's factors, kept latents, and heads of Muon."""

import math

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from meshwright.config.loader import load_config
from meshwright.models import generation
from meshwright.models.families import MODELS
from meshwright.models.generation import CachedLatents, generate, greedy
from meshwright.models.rope_scaling import Yarn
from meshwright.system.errors import ConfigError
from tests.helpers.families import small
from tests.helpers.hf import random_model
from tests.helpers.resolved import resolved

V3 = "--model.name=deepseek_v3"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{V3} --model.args.n_kv_heads=4", "n_kv_heads = 4: latent attention has .* use 8"),
        (f"{V3} --model.args.head_dim=64", "head_dim = 64: .* = 48 wide: leave it out"),
        (f"{V3} --model.args.qk_rope_head_dim=15", "qk_rope_head_dim = 15: must be even"),
        (f"{V3} --model.args.v_head_dim=64", "v_head_dim = 64: must be at most .*: use 48"),
        (f"{V3} --model.args.kv_lora_rank=0", "kv_lora_rank = 0: must be positive"),
        (f"{V3} --model.args.q_lora_rank=-1", "q_lora_rank = -1: must be 0 or positive: use 0"),
        (f"{V3} --model.args.n_dense_layers=6", "n_dense_layers = 6: .* = 6: use 5"),
        (f"{V3} --model.args.n_groups=3", "n_groups = 3: groups of n_experts = 16 must be"),
        (f"{V3} --model.args.n_shared_experts=0", "n_shared_experts = 0: must be positive"),
        (
            f"{V3} --parallelism.tensor_parallel_degree=4 --model.args.expert_dim=50",
            r"4: does not divide expert_dim \* n_shared_experts = 50",
        ),
        ("--model.name=deepseek_v2 --model.args.normalize_experts=true", "never normalizes"),
    ],
)
def test_dimensions_that_do_not_fit_are_one_line(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolved(load_config(["--model.tokenizer_path=bytes", *words.split()]), 4)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("mscale", [None, 0.707, 1.0])
@pytest.mark.parametrize("mscale_all_dim", [None, 0.707, 1.0])
def test_factors_of_yarn_are_those_of_transformers(mscale, mscale_all_dim) -> None:
    yarn = Yarn(40.0, 64, mscale=mscale, mscale_all_dim=mscale_all_dim)
    args = small(MODELS["deepseek_v3"], vocab_size=131, rope_scaling=yarn)
    config = AutoConfig.for_model(**MODELS["deepseek_v3"].hf.write_config(args, 64))
    _, amplitude = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    assert yarn.amplitude == pytest.approx(amplitude, rel=1e-12)
    growth = 0.1 * (mscale_all_dim or 0) * math.log(40) + 1
    scale = args.table.layers[0].attention.scale
    assert scale == pytest.approx(growth**2 / math.sqrt(10), rel=1e-12)


def test_generation_keeps_latents_and_rotated_keys_alone(monkeypatch) -> None:
    kept = list[CachedLatents]()

    class Noted(CachedLatents):
        def __init__(self, max_len: int) -> None:
            super().__init__(max_len)
            kept.append(self)

    monkeypatch.setattr(generation, "CachedLatents", Noted)
    args = small(MODELS["deepseek_v3"], vocab_size=131)
    model = random_model(args, seq_len=32)
    for block in model.layers.values():
        block.attention.wkv_b.register_forward_pre_hook(
            lambda _, inputs: wide.append(inputs[0].shape[1:])
        )
    wide = list[torch.Size]()
    assert len([*generate(model, range(5), max_new_tokens=7, choose=greedy)]) == 7
    assert [tuple(cache._kept.shape) for cache in kept] == [(1, 12, 14)] * args.n_layers
    assert {shape[1] for shape in wide} == {10}
    assert all(
        isinstance(block.attention.seen, torch.nn.Identity) for block in model.layers.values()
    )


def test_muon_splits_the_matrices_of_heads() -> None:
    table = small(MODELS["deepseek_v3"], vocab_size=131).table.parameters
    heads = {
        name.removeprefix("layers.0.attention."): parameter.heads
        for name, parameter in table.items()
        if name.startswith("layers.0.attention.") and parameter.role == "matrix"
    }
    one = dict.fromkeys(("wq_a.weight", "wkv_a.weight", "wo.weight"), 1)
    assert heads == one | {"wq_b.weight": 4, "wkv_b.weight": 4}
