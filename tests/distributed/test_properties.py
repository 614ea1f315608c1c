"""`causal`, `reach` and `isolation` hold of every family, and say what doesn't where one is broken.

`tests/faults` plants more, with the finder "properties".
"""

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.commands.prove import properties
from meshwright.commands.prove.properties import (
    LOGITS_BOUND,
    Property,
    measure_properties,
    visible_keys,
)
from meshwright.commands.prove.shrink import shrink
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.models import attention
from meshwright.models.families import MODELS
from meshwright.train.resolve_model import resolve_model
from tests.helpers.slow import slow_but

DOCUMENTS = "--training.mask_documents=true"
CONFIGS = {
    **{name: [(f"--model.name={name}",)] for name in MODELS},
    "documents": [(DOCUMENTS,)],
    "documents and experts": [("--model.name=qwen3_moe", DOCUMENTS)],
    "documents and states": [("--model.name=qwen3_next", DOCUMENTS)],
    "tied": [("--model.args.tie_embeddings=true",)],
}


def small_job(*words: str) -> JobConfig:
    config = load_config([*words])
    return shrink(config, resolve_model(config)[1])


@pytest.mark.parametrize("words", slow_but("llama qwen3_moe documents", CONFIGS))
def test_every_family_has_the_properties(on_ranks, words) -> None:
    (measured,) = on_ranks(1, measure_properties, small_job(*words))
    assert [one.name for one in measured] == ["causal", "reach", "isolation"]
    assert [one.failures for one in measured] == [[], [], []]
    causal, reach, isolation = measured
    assert reach.error == causal.error == 0
    assert isolation.error < LOGITS_BOUND / 10
    if DOCUMENTS in words:  # packed sequences have another kernel than documents alone
        assert isolation.error > 0


def in_windows(window: int):
    """Return attention in which a query sees the last `window` keys."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        keys = visible_keys(q.shape[2], window, None)
        return attention.masked_attention(q, k, v, keys, scale=scale)

    return attend


def measure_windows(window: int, declared: int | None) -> list[Property]:
    """Measure a model whose layers have windows, in which `declared` is what its spec says."""
    with (
        patch.object(attention, "causal_attention", in_windows(window)),
        patch.object(properties, "window_of", lambda layer: declared),
    ):
        return measure_properties(small_job())


@pytest.mark.parametrize(
    ("window", "declared", "line"),
    [
        (4, 4, ""),
        (1, 1, ""),
        (5, 4, "layer 0: query 31 sees keys 27-31 instead of keys 28-31; 28 of 32 queries"),
        (3, 4, "layer 0: query 31 sees keys 29-31 instead of keys 28-31; 29 of 32 queries"),
        (4, None, "layer 0: query 31 sees keys 28-31 instead of keys 0-31; 28 of 32 queries"),
    ],
)
def test_a_window_that_is_off_by_one_in_every_layer_is_named(
    on_ranks, window: int, declared: int | None, line: str
) -> None:
    (measured,) = on_ranks(1, measure_windows, window, declared)
    assert [one.name for one in measured if one.failures] == (["reach"] if line else [])
    reach = measured[1]
    if line:
        assert reach.failures[0].startswith(line)
        assert reach.failures[-1] == "and 3 more"  # 5 layers and the decoder; 3 are named
    else:
        assert reach.detail.endswith(f"the last {window} in layers 0-4")


def measure_attention_to_all() -> list[Property]:
    def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)

    with patch.object(attention, "causal_attention", attend):
        return measure_properties(small_job())


def test_attention_to_later_tokens_is_named(on_ranks) -> None:
    ((causal, *_),) = on_ranks(1, measure_attention_to_all)
    (failure,) = causal.failures
    assert failure.startswith("the logits at position 0 change with tokens after 0, relative error")


def test_visible_keys_are_causal_in_their_window_and_document() -> None:
    documents = torch.tensor([0, 0, 1, 1, 1])
    keys = visible_keys(5, 2, documents).int().tolist()
    assert keys == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    assert torch.equal(visible_keys(5, None, None), torch.ones(5, 5, dtype=torch.bool).tril())
