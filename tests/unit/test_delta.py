"""The gated delta rule in chunks against its recurrence and transformers, and its dimensions."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import OlmoHybridConfig
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from meshwright.config.loader import load_config
from meshwright.models.delta_rule import CHUNK, gated_delta_rule
from meshwright.models.families import MODELS, olmo_hybrid
from meshwright.models.generation import _cached
from meshwright.system.errors import ConfigError
from tests.helpers.delta import recurrence
from tests.helpers.hf import CASES, random_model
from tests.helpers.resolved import resolved
from tests.helpers.slow import slow

BATCH, KEY_HEADS, HEADS, K, V = 2, 2, 4, 16, 24


def inputs(seq_len: int, strongest: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seq_len)

    def draw(*shape: int) -> Tensor:
        return torch.randn(BATCH, seq_len, *shape, generator=generator)

    keys = [draw(KEY_HEADS, K), draw(KEY_HEADS, K)]
    decay = -torch.rand(BATCH, seq_len, HEADS, generator=generator) * strongest
    return [*keys, draw(HEADS, V), decay, draw(HEADS).sigmoid()]


def results(rule: Callable[..., tuple[Tensor, Tensor]], given: list[Tensor], *more: object):
    """What tokens read, the last state, and the gradients of the inputs."""
    given = [x.clone().requires_grad_() for x in given]
    found = rule(*given, *more)
    loss = sum(x.double().square().sum() for x in found)
    return [*found, *torch.autograd.grad(loss, given)]


def assert_equal(got: list[Tensor], want: list[Tensor], bound: float) -> None:
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        error = (one.double() - other.double()).abs().max() / other.double().abs().max()
        assert error <= bound, f"result {number}: {error:.1e} of the largest value"


@pytest.mark.parametrize("strongest", [0.01, 30.0])
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("seq_len", [9, *slow(CHUNK, 3 * CHUNK + 11)])
def test_chunks_equal_the_recurrence(seq_len, has_documents, strongest) -> None:
    given, documents = inputs(seq_len, strongest), None
    if has_documents:  # of one token, and with ends on and off the ends of chunks
        starts = torch.zeros(BATCH, seq_len, dtype=torch.int64)
        starts[0, 2:4] = starts[1, CHUNK::CHUNK] = starts[1, 7::41] = 1
        documents = starts.cumsum(1)
    wanted = results(recurrence, [x.double() for x in given], documents)
    assert_equal(results(gated_delta_rule, given, documents), wanted, 1e-5)


def test_chunks_equal_those_of_transformers() -> None:
    def theirs(*given: Tensor) -> tuple[Tensor, Tensor]:
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return torch_chunk_gated_delta_rule(*given, **options)

    given = inputs(2 * CHUNK + 9, 1.0)
    assert_equal(results(gated_delta_rule, given), results(theirs, given), 1e-5)


def test_a_state_goes_on_where_the_sequence_was_cut() -> None:
    given = inputs(CHUNK + 20, 1.0)
    whole, last = gated_delta_rule(*given)
    first, state = gated_delta_rule(*(x[:, :50] for x in given))
    rest, end = gated_delta_rule(*(x[:, 50:] for x in given), state=state)
    assert_equal([torch.cat([first, rest], 1), end], [whole, last], 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("case", ["qwen3_5_text-gqa", "qwen3_next-gqa", "olmo_hybrid-gqa"])
def test_a_kept_state_gives_the_logits_of_the_whole_sequence(case) -> None:
    model = random_model(CASES[case], seq_len=40)
    tokens = torch.randint(CASES[case].vocab_size, (1, 40))
    with _cached(model, 40):
        parts = [model(tokens[:, :30])]
        for place in range(30, 40):
            parts.append(model(tokens[:, place : place + 1], positions=torch.tensor([place])))
    assert_equal([torch.cat(parts, 1)], [model(tokens)], 1e-5)


NEXT = "--model.name=qwen3_next"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("linear_num_value_heads=6", "linear_num_value_heads = 6: must be a multiple of .*: use 4"),
        ("linear_key_head_dim=0", "linear_key_head_dim = 0: must be positive"),
        ("linear_conv_kernel_dim=0", "linear_conv_kernel_dim = 0: must be positive"),
        ("full_every=7", "full_every = 7: must be at most n_layers = 6.*: use 6"),
        ("partial_rotary_factor=0.0", "partial_rotary_factor = 0.0: must be in"),
        ("partial_rotary_factor=0.15", "partial_rotary_factor = 0.15: .* even number"),
        ("shared_expert_dim=0", "shared_expert_dim = 0: must be positive"),
    ],
)
def test_dimensions_that_do_not_fit_are_one_line(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolved(load_config(["--model.tokenizer_path=bytes", NEXT, f"--model.args.{words}"]), 1)
    assert "Traceback" not in str(caught.value)


def test_tensor_parallelism_must_divide_the_key_heads() -> None:
    words = ["--parallelism.tensor_parallel_degree=4", "--model.args.linear_num_key_heads=2"]
    with pytest.raises(ConfigError, match="4: does not divide linear_num_key_heads = 2\n.*1 or 2"):
        resolved(load_config(["--model.tokenizer_path=bytes", NEXT, *words]), 4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_attention_heads": 6, "hidden_size": 96},
        {"linear_num_key_heads": 5, "linear_key_head_dim": 10},
        {"linear_num_key_heads": 15},
        {"rope_parameters": {"rope_theta": None, "rope_type": "default"}},
        {"rope_parameters": None, "rope_theta": None},
        {"rope_theta": 500000.0},
    ],
)
def test_keys_that_an_olmo_hybrid_lacks_are_transformers_own(changes: dict[str, object]) -> None:
    theirs = OlmoHybridConfig(**changes)
    found = MODELS["olmo_hybrid"].hf.read_config({"model_type": "olmo_hybrid", **changes})
    theta = theirs.rope_parameters["rope_theta"]
    assert found["rotates"].value == (theta is not None)
    assert found["rope_theta"].value == (theta or 10000.0)
    keys = (*olmo_hybrid.HEADS, *olmo_hybrid.WIDTHS, "linear_conv_kernel_dim")
    for key in (*keys, "linear_allow_neg_eigval"):
        assert found[key].value == getattr(theirs, key), key
    assert found["full_every"].value == theirs.layer_types.index("full_attention") + 1
