"""Keys of config.json: each is read as transformers reads it, or rejected by name."""

import pytest

from meshwright.models.family import FIXED
from tests.campaigns import config_keys
from tests.campaigns.config_keys import draw, judge
from tests.helpers.families import family_of
from tests.helpers.hf import CASES, save_transformers

CONTEXT = "original_max_position_embeddings"


@pytest.mark.parametrize("number", range(6))
def test_a_drawn_key_is_read_or_rejected(number, tmp_path) -> None:
    case, name, config = draw(49, 6)[number]
    verdict, why = judge(save_transformers(tmp_path, CASES[case]), config, name)
    assert verdict != "wrong", f"{case}: {why}"


@pytest.mark.parametrize("case", ["llama-scaled", "qwen3-gqa", "mixtral-gqa"])
@pytest.mark.parametrize(
    ("key", "value"),
    [("is_causal", False), ("is_causal", None), ("per_layer_config", {"0": {"head_dim": 4}})],
)
def test_a_key_that_no_config_class_lists_is_rejected(case, key, value, tmp_path) -> None:
    folder = save_transformers(tmp_path, CASES[case])
    config = family_of(CASES[case]).hf.write_config(CASES[case], 64)
    verdict, why = judge(folder, config | {key: value}, key)
    assert verdict == "rejected"
    assert f"config.json: {key} is {value!r}" in why
    assert judge(folder, config | {key: FIXED[key]} if FIXED[key] else config, key)[0] == "equal"


def test_the_context_of_stretched_wavelengths_is_said_once(tmp_path) -> None:
    """transformers takes the one outside of the table; before, ours was the other."""
    folder = save_transformers(tmp_path, args := CASES["llama-scaled"])
    config = family_of(args).hf.write_config(args, 64)
    same = args.rope_scaling.original_seq_len
    assert judge(folder, config | {CONTEXT: same}, CONTEXT)[0] == "equal"
    verdict, why = judge(folder, config | {CONTEXT: 2 * same}, CONTEXT)
    assert verdict == "rejected"
    assert f"{CONTEXT} is {2 * same}, and rope_scaling.{CONTEXT} {same}" in why
    plain = CASES["llama-gqa"]  # where nothing is stretched, it says nothing
    folder = save_transformers(tmp_path / "plain", plain)
    config = family_of(plain).hf.write_config(plain, 64)
    assert judge(folder, config | {CONTEXT: 7}, CONTEXT)[0] == "equal"


def test_the_keys_that_are_drawn_are_those_that_transformers_reads() -> None:
    for family in ("llama", "qwen3_moe"):
        found = config_keys.keys_of(family)
        assert {"is_causal", "attention_chunk_size", "sliding_window", "hidden_act"} <= {*found}
