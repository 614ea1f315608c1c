"""Our Llama against that of transformers: same weights, same logits, same gradients."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.models.counting import flops_per_token, num_params
from meshwright.models.llama import FLAVORS, LlamaArgs, RopeScaling
from meshwright.models.llama.model import Llama
from tests.helpers.tiny import SEQ_LEN, TIED, TINY, plain_llama

GQA = LlamaArgs(dim=64, n_layers=2, n_heads=8, n_kv_heads=2, hidden_dim=96, vocab_size=131)
SCALED = RopeScaling(factor=8.0, original_seq_len=16)  # S = 32 lies beyond it
CASES = {
    "gqa": GQA,
    "mha": dataclasses.replace(GQA, n_kv_heads=8, rope_theta=10000.0),
    "tied": dataclasses.replace(GQA, tie_embeddings=True),
    "scaled-rope": dataclasses.replace(GQA, rope_scaling=SCALED),
}
NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def their_name(name: str) -> str:
    module = name.removesuffix(".weight")
    if module.startswith("layers."):
        _, layer, inner = module.split(".", 2)
        return f"model.layers.{layer}.{NAMES[inner]}.weight"
    return f"{NAMES[module]}.weight"


def halves(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of wq or wk as transformers wants them: it rotates (i, i + H/2), Meta (2i, 2i + 1)."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def transformers_llama(ours: Llama) -> LlamaForCausalLM:
    args = ours.args
    rope = {"rope_type": "default", "rope_theta": args.rope_theta}
    if args.rope_scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": args.rope_scaling.factor,
            "low_freq_factor": args.rope_scaling.low_freq_factor,
            "high_freq_factor": args.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": args.rope_scaling.original_seq_len,
        }
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=args.vocab_size,
            hidden_size=args.dim,
            intermediate_size=args.hidden_dim,
            num_hidden_layers=args.n_layers,
            num_attention_heads=args.n_heads,
            num_key_value_heads=args.n_kv_heads,
            rms_norm_eps=args.norm_eps,
            tie_word_embeddings=args.tie_embeddings,
            rope_parameters=rope,
        )
    )
    state = {}
    for name, parameter in ours.named_parameters():
        is_rotated = name.endswith(("wq.weight", "wk.weight"))
        state[their_name(name)] = halves(parameter, args.head_dim) if is_rotated else parameter
    if args.tie_embeddings:
        state["lm_head.weight"] = ours.tok_embeddings.weight
    theirs.load_state_dict(state)
    return theirs


def assert_close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    error = (got - want).abs().max() / want.abs().max()
    assert error <= 1e-5, f"{what}: {error:.2e} of the largest value"


@pytest.mark.parametrize("args", CASES.values(), ids=CASES.keys())
def test_logits_and_gradients_equal_transformers(args: LlamaArgs) -> None:
    torch.manual_seed(0)
    ours = Llama(args, seq_len=32)
    ours.init_buffers()
    for parameter in ours.parameters():  # larger than initial weights: attention is not flat
        torch.nn.init.normal_(parameter, std=0.3)
    theirs = transformers_llama(ours)
    tokens = torch.randint(args.vocab_size, (3, 32))
    labels = torch.randint(args.vocab_size, (3, 32))
    logits, their_logits = ours(tokens), theirs(tokens).logits
    assert_close(logits, their_logits, "logits")
    for output in (logits, their_logits):
        F.cross_entropy(output.flatten(0, 1), labels.flatten()).backward()
    their_gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        is_rotated = name.endswith(("wq.weight", "wk.weight"))
        got = halves(parameter.grad, args.head_dim) if is_rotated else parameter.grad
        assert_close(got, their_gradients[their_name(name)], name)


@pytest.mark.parametrize("args", CASES.values(), ids=CASES.keys())
def test_packed_documents_equal_transformers(args: LlamaArgs) -> None:
    """Which is told of them by a mask of four dimensions, and by positions."""
    torch.manual_seed(0)
    ours = Llama(args, seq_len=32)
    ours.init_buffers()
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs = transformers_llama(ours)
    lengths = [(5, 20, 7), (32,), (1, 30, 1)]
    tokens = torch.randint(args.vocab_size, (3, 32))
    documents, positions = torch.empty(3, 32, dtype=torch.int32), torch.empty(3, 32).long()
    sees = torch.zeros(3, 1, 32, 32, dtype=torch.bool)
    for row, parts in enumerate(lengths):
        start = 0
        for number, length in enumerate(parts):
            own = slice(start, start + length)
            documents[row, own] = number
            positions[row, own] = torch.arange(length)
            sees[row, 0, own, own] = torch.ones(length, length).tril().bool()
            start += length
    unseen = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
    logits = ours(tokens, documents=documents)
    theirs_out = theirs(tokens, attention_mask=unseen, position_ids=positions).logits
    assert_close(logits, theirs_out, "logits")
    (logits.square().mean() + theirs_out.square().mean()).backward()
    their_gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        is_rotated = name.endswith(("wq.weight", "wk.weight"))
        got = halves(parameter.grad, args.head_dim) if is_rotated else parameter.grad
        assert_close(got, their_gradients[their_name(name)], name)


@pytest.mark.parametrize("args", [TINY, *CASES.values()])
def test_counts_equal_those_of_the_model(args: LlamaArgs) -> None:
    model = Llama(args, SEQ_LEN)
    assert num_params(args) == sum(p.numel() for p in model.parameters())
    model.init_buffers()
    # attention as plain matrix products: torch has no count of its fused kernel on the CPU
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, SEQ_LEN, dtype=torch.int64)).sum().backward()
    assert counter.get_total_flops() == 2 * SEQ_LEN * flops_per_token(args, SEQ_LEN)


@pytest.mark.parametrize("args", [TINY, *CASES.values()])
def test_parameter_names_equal_those_of_the_model(args: LlamaArgs) -> None:
    model = Llama(args, SEQ_LEN)
    assert list(args.parameter_names()) == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize(
    ("flavor", "billions"),
    [
        ("llama2_7b", 6.738),
        ("llama2_13b", 13.016),
        ("llama2_70b", 68.977),
        ("llama3_1b", 1.236),
        ("llama3_3b", 3.213),
        ("llama3_8b", 8.030),
        ("llama3.1_8b", 8.030),
        ("llama3_70b", 70.554),
        ("llama3.1_70b", 70.554),
        ("llama3.1_405b", 405.853),
    ],
)
def test_flavors_have_their_published_size(flavor: str, billions: float) -> None:
    """Parameter counts as the model cards on the Hugging Face hub give them."""
    assert round(num_params(FLAVORS[flavor]) / 1e9, 3) == billions


def test_first_loss_is_about_the_logarithm_of_the_vocabulary() -> None:
    tokens = torch.randint(TINY.vocab_size, (8, SEQ_LEN + 1))
    logits = plain_llama()(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert abs(loss.item() - torch.tensor(TINY.vocab_size).log().item()) < 0.7


@pytest.mark.parametrize("args", [TINY, TIED])
def test_modules_are_named_as_they_are(args) -> None:
    names = [name for name, _ in Llama(args, 4).named_modules()]
    assert args.module_names == [name for name in names if name not in ("", "layers")]
