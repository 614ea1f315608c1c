"""Every family against transformers and its own table: a registered family gets these tests."""

import dataclasses
import hashlib
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import GptOssConfig, PreTrainedModel

from meshwright.config.job_config import JobConfig
from meshwright.models import delta_net
from meshwright.models.args import DecoderArgs, WindowArgs
from meshwright.models.decoder import Decoder
from meshwright.models.delta import DeltaArgs
from meshwright.models.families import MODELS
from meshwright.models.families.llama import LlamaArgs
from meshwright.models.latent import LatentSpec
from meshwright.models.table import AttentionSpec
from meshwright.parallelisms.initialize import _fill_in_turn, initialize
from tests.helpers.delta import recurrence
from tests.helpers.families import cases, small, two_of_each
from tests.helpers.hf import in_transformers, random_model, their_tensors
from tests.helpers.slow import slow, slow_but
from tests.helpers.tiny import SEQ_LEN

CASES = cases(vocab_size=131)
every_case = pytest.mark.parametrize("args", CASES.values(), ids=CASES.keys())
two_cases = pytest.mark.parametrize("args", two_of_each(CASES))


def assert_gradients_equal(ours: Decoder, theirs: PreTrainedModel, bound: float = 1e-5) -> None:
    gradients = {name: p.grad for name, p in ours.named_parameters()}
    wanted = {name: p.grad for name, p in theirs.named_parameters()}
    for name, got in their_tensors(ours, gradients).items():
        assert_close(got, wanted[name], name, bound)


def assert_close(got: torch.Tensor, want: torch.Tensor, what: str, bound: float = 1e-5) -> None:
    error = (got - want).abs().max() / want.abs().max()
    assert error <= bound, f"{what}: {error:.2e} of the largest value"


LONG = [case for case in CASES if case.endswith(("-gqa", "-scaled"))]


@pytest.mark.parametrize(
    ("args", "seq_len"),
    [*((args, 32) for args in CASES.values()), *((CASES[case], 300) for case in LONG)],
    ids=[*CASES, *(f"{case}-300" for case in LONG)],
)
def test_logits_loss_and_gradients_equal_transformers(args: DecoderArgs, seq_len: int) -> None:
    ours = random_model(args, seq_len)
    theirs = in_transformers(ours)
    tokens, labels = torch.randint(args.vocab_size, (2, 3, seq_len))
    logits, their_logits = ours(tokens), theirs(tokens).logits
    assert_close(logits, their_logits, "logits")
    losses = [F.cross_entropy(x.flatten(0, 1), labels.flatten()) for x in (logits, their_logits)]
    assert_close(losses[0], losses[1], "loss")
    for loss in losses:
        loss.backward()
    assert_gradients_equal(ours, theirs)


WINDOWED = [
    name
    for name, family in MODELS.items()
    if any(layer.attention.window for layer in family.flavors["debugmodel"].table.layers)
]


@pytest.mark.parametrize(
    ("name", "window"),
    slow_but("gemma3_text-1", {f"{n}-{w}": (n, w) for n in WINDOWED for w in (1, 33)}),
)
def test_windows_of_one_token_and_beyond_the_sequence_equal_transformers(name, window) -> None:
    """Windows next to the sequence's 32 tokens, and of 2, are among the cases.

    In a window of one token, without sinks, the softmax of queries and keys is 1 whatever these
    are, so their gradients are zeros, up to rounding: a relative error would be 0 / 0."""
    args = small(MODELS[name], 131, window=window)
    ours = random_model(args)
    theirs = in_transformers(ours)
    tokens = torch.randint(args.vocab_size, (2, 32))
    logits, their_logits = ours(tokens), theirs(tokens).logits
    assert_close(logits, their_logits, "logits")
    (logits.square().mean() + their_logits.square().mean()).backward()
    wanted = {n: p.grad for n, p in theirs.named_parameters()}
    for own, got in their_tensors(ours, {n: p.grad for n, p in ours.named_parameters()}).items():
        layer = args.table.layers[int(own.split(".")[2])] if ".layers." in own else None
        is_of_scores = ".q_" in own or ".k_" in own
        sinks = layer and layer.attention.sink_std
        if layer and layer.attention.window == 1 and is_of_scores and sinks is None:
            of_values = own.replace(".q_", ".v_").replace(".k_", ".v_").replace("v_norm", "v_proj")
            assert got.abs().max() <= 1e-5 * wanted[of_values].abs().max(), own
        else:
            assert_close(got, wanted[own], own)


@two_cases
def test_packed_documents_equal_transformers(args: DecoderArgs) -> None:
    """Which is told of them by a mask of four dimensions, and by positions; where layers differ,
    by a mask for each kind, since it would forget the windows."""
    ours = random_model(args)
    theirs = in_transformers(ours)
    tokens = torch.randint(args.vocab_size, (3, 32))
    documents = torch.tensor([[0] * 5 + [1] * 20 + [2] * 7, [0] * 32, [0] + [1] * 30 + [2]])
    if isinstance(args, DeltaArgs):  # which takes no mask: it is given one document at a time
        assert_documents_equal(ours, theirs, tokens, documents)
        return
    sees = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
    positions = sees[:, 0].sum(-1) - 1
    windows = {layer.attention.window for layer in args.table.layers}
    masks = {
        "full_attention" if window is None else "sliding_attention": torch.zeros(
            sees.shape
        ).masked_fill(~sees.triu(1 - (window or 32)), torch.finfo(torch.float32).min)
        for window in windows
    }
    unseen = masks if isinstance(args, WindowArgs) else masks.popitem()[1]
    logits = ours(tokens, documents=documents.int())
    theirs_out = theirs(tokens, attention_mask=unseen, position_ids=positions).logits
    assert_close(logits, theirs_out, "logits")
    (logits.square().mean() + theirs_out.square().mean()).backward()
    assert_gradients_equal(ours, theirs)


def assert_documents_equal(
    ours: Decoder, theirs: PreTrainedModel, tokens: torch.Tensor, documents: torch.Tensor
) -> None:
    logits = ours(tokens, documents=documents.int())
    own = [(row, of == n) for row, of in enumerate(documents) for n in of.unique()]
    alone = torch.cat([theirs(tokens[row, at].unsqueeze(0)).logits[0] for row, at in own])
    assert_close(logits.flatten(0, 1), alone, "logits")
    (logits.square().mean() + alone.square().mean()).backward()
    # transformers' own rule is off by up to 3.9e-5 here; ours by 1e-5 at most (test_delta.py)
    assert_gradients_equal(ours, theirs, bound=5e-5)


def products(q: torch.Size, count: int) -> int:
    return 2 * count * q.numel() * q[2]


aten = torch.ops.aten
WITH_SINKS = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, *_, **__: products(q, 2),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda q, *_, **__: products(q, 4),
}
"""Products of that kernel, which is called for its logarithms."""


@two_cases
def test_the_table_is_that_of_the_model(args: DecoderArgs, monkeypatch) -> None:
    model, table = Decoder(args, SEQ_LEN), args.table
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert [*table.parameters] == [*shapes]  # in the same order
    assert {name: parameter.shape for name, parameter in table.parameters.items()} == shapes
    names = [name for name, _ in model.named_modules()]
    assert table.module_names == [name for name in names if name not in ("", "layers")]
    assert table.num_params == sum(p.numel() for p in model.parameters())
    model.init_buffers()
    model.init_state()
    # attention as plain matrix products: torch has no count of its fused kernel on the CPU
    monkeypatch.setattr(delta_net, "gated_delta_rule", recurrence)  # which the table counts
    counter = FlopCounterMode(display=False, custom_mapping=WITH_SINKS)
    with sdpa_kernel(SDPBackend.MATH), counter:
        model(torch.zeros(2, SEQ_LEN, dtype=torch.int64)).sum().backward()
    # values of latent attention are filled up with zeros that no kernel would need to multiply
    monkeypatch.setattr(LatentSpec, "value_dim", property(lambda spec: spec.head_dim))
    layers = [
        replace(one, attention=replace(one.attention, window=None))
        if isinstance(one.attention, AttentionSpec)
        else one
        for one in table.layers
    ]
    every_pair = replace(table, layers=tuple(layers)).flops_per_token(SEQ_LEN)  # as it counts
    assert counter.get_total_flops() == 2 * SEQ_LEN * every_pair
    linear = [one.attention for one in layers if not isinstance(one.attention, AttentionSpec)]
    of_matrices = table.flops_per_token(0) + 3 * sum(one.num_flops(1) for one in linear)
    halves = 2 * table.flops_per_token(SEQ_LEN, is_causal=True)
    assert abs(halves - (table.flops_per_token(SEQ_LEN) + of_matrices)) <= 1


@every_case
def test_initial_values_are_those_of_the_table(args: DecoderArgs) -> None:
    model = Decoder(args, SEQ_LEN)
    initialize(model, seed=0)
    for name, parameter in model.named_parameters():
        std = args.table.parameters[name].std
        factor = parameter + args.table.parameters[name].is_offset
        if args.table.parameters[name].alternates:
            assert factor.tolist() == [1, -1] * (args.dim // 2), name
        elif quantile := args.table.parameters[name].quantile:
            assert quantile(0.0001) <= parameter.min() < parameter.max() <= quantile(0.9999), name
        elif std is None:
            assert (factor == 1).all(), name
        elif parameter.numel() > 1000:
            # of a normal cut at 3 deviations: 0.98 of it
            assert abs(parameter.std() / std - 0.9866) < 0.1, name


def _first_loss(args: DecoderArgs) -> float:
    """Minus that of equal probabilities."""
    model = Decoder(args, SEQ_LEN)
    initialize(model, seed=0)
    generator = torch.Generator().manual_seed(0)
    logits = model(torch.randint(args.vocab_size, (8, SEQ_LEN), generator=generator))
    loss = logits.logsumexp(-1).mean() - logits.mean()  # of labels that are drawn at random
    return loss.item() - math.log(args.vocab_size)


@pytest.mark.parametrize("vocab_size", [2048, *slow(131)])
@pytest.mark.parametrize("name", MODELS)
def test_first_loss_is_about_the_logarithm_of_the_vocabulary(name: str, vocab_size: int) -> None:
    size = {"dim": 256, "head_dim": 64, "hidden_dim": 128, "n_layers": 2}
    untied, tied = (
        _first_loss(small(MODELS[name], vocab_size, tie_embeddings=is_tied, **size))
        for is_tied in (False, True)
    )
    assert abs(untied) < 0.7
    assert abs(tied - untied) < 0.3


@pytest.mark.parametrize("vocab_size", [259, 2048])
@pytest.mark.parametrize("dim", [64, 256, 1024, 4096])
@pytest.mark.parametrize("name", ["llama", "olmo2"])
def test_a_tied_table_does_not_predict_its_own_tokens(name: str, dim: int, vocab_size: int) -> None:
    """The worst that blocks can do is nothing: then the last state is the token's own row."""
    args = small(MODELS[name], vocab_size, tie_embeddings=True, dim=dim, n_layers=1)
    std = args.table.parameters["tok_embeddings.weight"].std
    generator = torch.Generator().manual_seed(0)
    rows = std * torch.randn(vocab_size, dim, generator=generator)
    norm = torch.empty(dim)
    _fill_in_turn(norm, (0,))
    logits = F.rms_norm(rows, (dim,), norm, args.norm_eps) @ rows.T
    loss = logits.logsumexp(-1).mean() - logits.mean()  # of labels that are drawn at random
    of_noise = (std * dim**0.5) ** 2 / 2  # logits of variance v add v / 2; an untied output's, too
    assert loss.item() - math.log(vocab_size) < 0.3 + of_noise


def test_names_and_initial_values_of_llama_do_not_change_between_releases() -> None:
    """A run is to be repeatable, and a checkpoint to load, with a later version."""
    for is_tied, pinned in ((False, "29b3516aefe49682"), (True, "26e9fb0b9b8039f5")):
        args = LlamaArgs(32, 3, 4, 2, 66, 131, tie_embeddings=is_tied)
        model, digest = Decoder(args, SEQ_LEN), hashlib.sha256()
        initialize(model, seed=7)
        for name, parameter in model.named_parameters():
            digest.update(name.encode())
            digest.update(parameter.detach().numpy().tobytes())
        assert digest.hexdigest()[:16] == pinned


SIZES = """
llama2_7b 6.738, llama2_13b 13.016, llama2_70b 68.977, llama3_1b 1.236, llama3_3b 3.213,
llama3_8b 8.030, llama3.1_8b 8.030, llama3_70b 70.554, llama3.1_70b 70.554,
llama3.1_405b 405.853, qwen3_0.6b 0.596, qwen3_1.7b 1.721, qwen3_4b 4.022, qwen3_8b 8.191,
qwen3_14b 14.768, qwen3_32b 32.762, olmo2_1b 1.485, olmo2_7b 7.299, olmo2_13b 13.716,
olmo2_32b 32.234, qwen3_30b_a3b 30.532, qwen3_235b_a22b 235.094, olmoe_1b_7b 6.919,
mixtral_8x7b 46.703, olmo3_7b 7.298, olmo3_32b 32.234, gemma2_2b 2.614,
gemma2_9b 9.241705984, gemma2_27b 27.227128320,
gemma3_270m 0.268, gemma3_1b 1.000, gemma3_4b 3.880, gemma3_12b 11.766, gemma3_27b 27.009,
smollm3_3b 3.075, qwen2.5_0.5b 0.494032768, qwen2.5_1.5b 1.543714304,
qwen2.5_3b 3.085938688, qwen2.5_7b 7.615616512, qwen2.5_14b 14.770033664,
qwen2.5_32b 32.763876352, qwen2.5_72b 72.706203648, mistral_7b_v0.1 7.241732096,
mistral_7b_v0.3 7.248023552, granite3.1_2b 2.533531648, granite3.1_8b 8.170848256,
deepseek_v2_lite 15.706, deepseek_v2 235.741, deepseek_v3 671.026, kimi_k2 1026.408,
moonlight_16b_a3b 15.960, qwen3_next_80b_a3b 79.674, gpt_oss_20b 20.91, gpt_oss_120b 116.83
"""
PUBLISHED = dict(map(str.split, SIZES.split(",")))
"""Billions of parameters; with nine decimals, to the digit."""


@pytest.mark.parametrize("family", MODELS.values(), ids=MODELS.keys())
def test_flavors_have_their_published_size(family) -> None:
    """Parameter counts as the headers of the files on the Hugging Face hub give them; a size of
    your own has none."""
    for flavor, args in family.flavors.items():
        if flavor in PUBLISHED:
            decimals = len(PUBLISHED[flavor].partition(".")[2])
            assert f"{args.table.num_params / 1e9:.{decimals}f}" == PUBLISHED[flavor], flavor


CONSTANTS = """
llama2 1e-5 1e4, llama3 1e-5 5e5, qwen2.5_0.5b 1e-6 1e6, qwen2.5_1.5b 1e-6 1e6, qwen2.5_3b 1e-6 1e6,
qwen2.5_7b 1e-6 1e6, qwen2.5 1e-5 1e6, qwen3_next 1e-6 1e7, qwen3.5 1e-6 1e7, qwen3_ 1e-6 1e6,
olmo2 1e-6 5e5, olmo3 1e-6 5e5, olmo_hybrid 1e-6 none, olmoe 1e-5 1e4, mistral_7b_v0.1 1e-5 1e4,
mistral_7b_v0.3 1e-5 1e6, mixtral 1e-5 1e6, gemma2 1e-6 1e4, gemma3 1e-6 1e6, smollm3 1e-6 5e6,
granite3.1_2b 1e-5 5e6, granite3.1_8b 1e-5 1e7, deepseek 1e-6 1e4, moonlight 1e-5 5e4,
kimi 1e-6 5e4, gpt_oss 1e-5 1.5e5
"""
"""What a flavor's name begins with (the first counts), epsilon of norms, and theta of RoPE."""

STRETCHED = """
llama3_1b llama3 32 8192, llama3_3b llama3 32 8192, llama3.1 llama3 8 8192,
gemma3_4b linear 8 none, gemma3_12b linear 8 none, gemma3_27b linear 8 none,
deepseek yarn 40 4096, kimi yarn 32 4096, gpt_oss yarn 32 4096
"""
"""The same, the kind of stretching, its factor, and the context before it."""


def published(table: str, flavor: str) -> list[str] | None:
    rows = [row.split() for row in table.split(",")]
    return next((row[1:] for row in rows if flavor.startswith(row[0])), None)


@pytest.mark.parametrize("family", MODELS.values(), ids=MODELS.keys())
def test_flavors_have_their_published_constants(family) -> None:
    """As in the config.json of the models on the Hugging Face hub: no count of parameters depends
    on them. A size of your own has none."""
    for flavor, args in family.flavors.items():
        if (constants := published(CONSTANTS, flavor)) is None:
            continue
        written = family.hf.write_config(args, 0)
        rope = written.get("rope_parameters", {})
        theta = written.get("rope_theta", rope.get("rope_theta"))
        eps, *thetas = constants
        assert written["rms_norm_eps"] == float(eps), flavor
        assert [theta] == [None if text == "none" else float(text) for text in thetas], flavor
        scaling = written.get("rope_scaling") or {}
        kind, factor, before = published(STRETCHED, flavor) or [None] * 3
        assert scaling.get("rope_type") == kind, flavor
        if kind is not None:
            assert scaling["factor"] == float(factor), flavor
            context = scaling.get("original_max_position_embeddings", "none")
            assert str(context) == before, flavor


def test_the_largest_gpt_oss_is_the_one_that_transformers_has_by_default() -> None:
    family = MODELS["gpt_oss"]
    ours = GptOssConfig(**family.hf.write_config(family.flavors["gpt_oss_120b"], 0)).to_dict()
    theirs = GptOssConfig(architectures=ours["architectures"]).to_dict()
    assert {key for key in theirs if ours[key] != theirs[key]} <= {"max_position_embeddings"}


@pytest.mark.parametrize("family", MODELS.values(), ids=MODELS.keys())
def test_a_default_is_that_of_the_nearest_class(family) -> None:
    """dataclasses give a field that two bases have the default of the farther one."""
    for field in dataclasses.fields(family.args):
        if field.default is not dataclasses.MISSING:
            assert field.default == getattr(family.args, field.name), field.name


def test_a_family_that_is_not_named_is_the_first() -> None:
    assert next(iter(MODELS)) == JobConfig().model.name == "llama"
