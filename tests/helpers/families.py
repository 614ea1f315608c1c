"""Every registered family, small: a family that is added gets their tests."""

import dataclasses
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from meshwright.models.args import DecoderArgs, ExpertArgs, WindowArgs
from meshwright.models.delta import DeltaArgs
from meshwright.models.families import MODELS
from meshwright.models.families.deepseek import DeepseekArgs
from meshwright.models.family import Family
from meshwright.models.latent import LatentArgs
from meshwright.models.rope_scaling import LinearScaling, RopeScaling, Yarn
from tests.helpers.slow import slow_but

SEQ_LEN = 32
"""Of the tests of parity; a window of as many tokens changes nothing."""

SCALED = {
    "llama3": RopeScaling(factor=8.0, original_seq_len=16),
    "linear": LinearScaling(factor=8.0),
    "yarn": Yarn(factor=4.0, original_seq_len=16, beta_fast=2.0, beta_slow=0.3),
}
"""By rope_type; so that the short contexts of tests have pairs of every kind."""


def family_of(args: DecoderArgs) -> Family:
    return next(family for family in MODELS.values() if type(args) is family.args)


def small(family: Family, vocab_size: int, **changes: object) -> DecoderArgs:
    """Odd where that finds mistakes: 66 inner rows and 131 of the vocabulary, say, leave uneven
    shards on 2 or on 4 ranks, and heads of an own width are not dim / n_heads wide."""
    debug = family.flavors["debugmodel"]
    dimensions = {
        "dim": 32,
        "n_layers": 3,
        "n_heads": 4,
        "n_kv_heads": 2,
        "hidden_dim": 66,
        "vocab_size": vocab_size,
        "head_dim": 10 if debug.head_dim else None,
        **debug.small(),
    }
    found = dimensions | changes
    if isinstance(debug, DeltaArgs):  # norms of what a state gives, which may be near zero
        found |= {"norm_eps": 1e-3}
    if isinstance(debug, LatentArgs):  # widths of a head are its own keys
        found |= {"n_kv_heads": found["n_heads"], "head_dim": None}
    return dataclasses.replace(debug, **found)


def cases(vocab_size: int) -> dict[str, DecoderArgs]:
    """Sizes of every family, by name, with all that one may have and another not."""
    found = {}
    for name, family in MODELS.items():
        variants = {
            "gqa": {},
            "mha": {"n_kv_heads": 4, "rope_theta": 10000.0, "norm_eps": 1e-4},
            "tied": {"tie_embeddings": True},
        }
        if family.hf.stretched_rope_type:
            variants["scaled"] = {"rope_scaling": SCALED[family.hf.stretched_rope_type]}
            variants["mha-tied-scaled"] = variants["mha"] | variants["tied"] | variants["scaled"]
        if isinstance(family.flavors["debugmodel"], WindowArgs):
            variants |= {f"window-{size}": {"window": size} for size in (2, SEQ_LEN - 1, SEQ_LEN)}
        if isinstance(family.flavors["debugmodel"], ExpertArgs):
            variants["few"] = {"n_experts": 3, "n_active": 2}
        if isinstance(family.flavors["debugmodel"], DeepseekArgs):
            variants["few"] |= {"n_groups": 1, "n_active_groups": 1, "n_dense_layers": 0}
            groups = {"n_groups": 4, "n_active_groups": 2}
            variants["groups"] = groups | {"routed_scaling_factor": 2.0, "v_head_dim": 10}
            ranks = {"q_lora_rank": 0 if family.flavors["debugmodel"].q_lora_rank else 18}
            yarn = dataclasses.replace(SCALED["yarn"], mscale=0.7, mscale_all_dim=0.9)
            variants["mscale"] = ranks | {"rope_scaling": yarn}
        if name == "olmo_hybrid":
            variants["rotating"] = {"rotates": True, "linear_allow_neg_eigval": False}
        if name == "gpt_oss":
            variants["unscaled"] = {"rope_scaling": None}
        if name == "qwen3_moe":
            variants["dense-first"] = {"n_dense_layers": 1, "normalize_experts": False}
        for variant, changes in variants.items():
            found[f"{name}-{variant}"] = small(family, vocab_size, **changes)
    return found


def two_of_each(cases: Mapping[str, DecoderArgs]) -> list[Any]:
    """Return parameters of pytest: the first case of each family, and its last, which has most of
    its own; the others are slow."""
    everyday: list[str] = []
    for _, names in groupby(cases, lambda name: name.partition("-")[0]):
        first, *others = names
        everyday += [first, *others[-1:]]
    return slow_but(" ".join(everyday), {name: [args] for name, args in cases.items()})
