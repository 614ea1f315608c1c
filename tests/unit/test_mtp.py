"""Multi-token prediction: its layers, its targets, and its weights in DeepSeek's files."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from meshwright.checkpoint.conversion.initial_load import check_initial
from meshwright.commands.prove.plain_decoder import UNCOUNTED, PlainBatch
from meshwright.commands.saved import SOURCE, build_model, open_source
from meshwright.config.job_config import Checkpoint
from meshwright.config.loader import load_config
from meshwright.datasets.encoding import NO_LOSS
from meshwright.datasets.loader import to_batches
from meshwright.datasets.samples import Sample
from meshwright.models.args import DecoderArgs
from meshwright.models.delta import DeltaArgs
from meshwright.models.families import MODELS
from meshwright.models.loss import IGNORE, PADDING
from meshwright.parallelisms.initialize import initialize
from meshwright.system.errors import ConfigError
from meshwright.system.files import NamedPath
from meshwright.train.trainer import StepResult, Trainer
from tests.helpers.cli import export
from tests.helpers.families import SEQ_LEN, cases, family_of
from tests.helpers.hf import (
    CASES,
    load_hf,
    random_model,
    save_checkpoint,
    save_transformers,
    tensors_of,
)
from tests.helpers.job import assert_equal
from tests.helpers.plain import MTP_WEIGHT, Recorded, plain_loss, some_batch
from tests.helpers.resolved import resolved
from tests.helpers.slow import slow_but

SMALL = cases(vocab_size=131)
ARGS = dataclasses.replace(CASES["deepseek_v3-gqa"], mtp_depth=1)


def with_further(batch: PlainBatch, vocab_size: int, depth: int) -> PlainBatch:
    """Random tokens and labels of each depth, the last of which are beyond the documents."""
    ahead = []
    for places in range(1, depth + 1):
        tokens, labels = torch.randint(vocab_size, (2, *batch.tokens.shape))
        is_token = torch.ones_like(tokens, dtype=torch.bool)
        is_token[:, -places:] = False
        labels[~is_token | (labels % 5 == 0)] = UNCOUNTED
        ahead.append(PlainBatch(tokens * is_token, labels, is_token, batch.documents))
    return dataclasses.replace(batch, further=ahead)


@pytest.mark.parametrize(
    "args",
    slow_but(
        "deepseek_v3-groups gemma3_text-tied", {name: (args,) for name, args in SMALL.items()}
    ),
)
def test_layers_for_mtp_are_the_plain_ones(args: DecoderArgs) -> None:
    args = dataclasses.replace(args, mtp_depth=2)
    model, routing = random_model(args), Recorded()
    batch = some_batch(args.vocab_size, with_documents=True)
    batch = with_further(batch, args.vocab_size, 2)
    labels = batch.labels.where(batch.labels >= 0, IGNORE)
    future = torch.stack([ahead.labels for ahead in batch.further], 1)
    is_token = torch.stack([ahead.is_token for ahead in batch.further], 1)
    counts = (future >= 0).sum((0, 2))
    num_labels = (labels >= 0).sum()
    model.routing = routing
    loss = model(
        batch.tokens,
        labels,
        documents=batch.documents.int(),
        future_tokens=torch.stack([ahead.tokens for ahead in batch.further], 1),
        future_labels=future.where(future >= 0, IGNORE).where(is_token, PADDING),
        future_scales=(MTP_WEIGHT / 2 * num_labels / counts).expand(len(labels), -1),
    )
    loss = loss / num_labels
    loss.backward()
    want, gradients, further = plain_loss(model, batch, routing)
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    means = (model.mtp_losses / counts).tolist()
    assert means == pytest.approx([loss.item() for loss in further], rel=1e-5)
    # norms of nearly zero queries and keys of linear attention magnify rounding
    bound = 5e-5 if isinstance(args, DeltaArgs) else 1e-5
    for name, parameter in model.named_parameters():
        error = (parameter.grad - gradients[name]).norm() / gradients[name].norm()
        assert error <= bound, f"{name}: {error:.1e}"


@pytest.mark.parametrize("mask_documents", [True, False])
def test_further_tokens_and_labels_stay_inside_documents(mask_documents: bool) -> None:
    raw = np.arange(1, 10, dtype=np.uint32)
    raw[2] |= NO_LOSS
    raw[8] = NO_LOSS  # padding
    sample = Sample(raw, lengths=[5, 3, 1], padding=1)
    batch = to_batches([sample], 1, mask_documents, mtp_depth=2)[0]
    tokens, labels = (part[0].tolist() for part in (batch.future_tokens, batch.future_labels))
    if mask_documents:
        assert tokens == [[2, 3, 4, 5, 0, 7, 8, 0], [3, 4, 5, 0, 0, 8, 0, 0]]
        first = [IGNORE, 4, 5, IGNORE, PADDING, 8, IGNORE, PADDING]
        second = [4, 5, IGNORE, PADDING, PADDING, IGNORE, PADDING, PADDING]
    else:
        assert tokens == [[2, 3, 4, 5, 6, 7, 8, 0], [3, 4, 5, 6, 7, 8, 0, 0]]
        first = [IGNORE, 4, 5, 6, 7, 8, IGNORE, PADDING]
        second = [4, 5, 6, 7, 8, IGNORE, PADDING, PADDING]
    assert labels == [first, second]
    assert to_batches([sample], 1, mask_documents)[0].future_tokens is None


def deepseek_layer(args) -> dict[str, torch.Tensor]:
    """The tensors of a layer for MTP by the names and shapes of DeepSeek-V3's files."""
    dim, heads, layer = args.dim, args.n_heads, f"model.layers.{args.n_layers}"
    latent, query = args.kv_lora_rank, args.qk_nope_head_dim + args.qk_rope_head_dim
    wide = args.qk_nope_head_dim + args.v_head_dim
    shapes = {
        "enorm.weight": (dim,),
        "hnorm.weight": (dim,),
        "eh_proj.weight": (dim, 2 * dim),
        "shared_head.norm.weight": (dim,),
        "input_layernorm.weight": (dim,),
        "post_attention_layernorm.weight": (dim,),
        "self_attn.q_a_proj.weight": (args.q_lora_rank, dim),
        "self_attn.q_a_layernorm.weight": (args.q_lora_rank,),
        "self_attn.q_b_proj.weight": (heads * query, args.q_lora_rank),
        "self_attn.kv_a_proj_with_mqa.weight": (latent + args.qk_rope_head_dim, dim),
        "self_attn.kv_a_layernorm.weight": (latent,),
        "self_attn.kv_b_proj.weight": (heads * wide, latent),
        "self_attn.o_proj.weight": (dim, heads * args.v_head_dim),
        "mlp.gate.weight": (args.n_experts, dim),
        "mlp.gate.e_score_correction_bias": (args.n_experts,),
    }
    widths = {f"experts.{expert}": args.expert_dim for expert in range(args.n_experts)}
    widths["shared_experts"] = args.expert_dim * args.n_shared_experts
    for part, width in widths.items():
        shapes[f"mlp.{part}.gate_proj.weight"] = shapes[f"mlp.{part}.up_proj.weight"] = width, dim
        shapes[f"mlp.{part}.down_proj.weight"] = dim, width
    return {f"{layer}.{name}": torch.randn(shape) for name, shape in shapes.items()}


def published_folder(folder: Path, *, has_layer: bool = True) -> dict[str, torch.Tensor]:
    """Write a folder as DeepSeek publishes its own; return the tensors in it."""
    torch.manual_seed(0)
    save_transformers(folder, ARGS, max_shard_size="1GB")
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = int(has_layer)
    (folder / "config.json").write_text(json.dumps(config))
    tensors, layer = tensors_of(folder), f"model.layers.{ARGS.n_layers}"
    if has_layer:
        tensors |= deepseek_layer(ARGS)
        tensors[f"{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{layer}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


def test_deepseeks_layer_is_read_and_written_to_the_bit(tmp_path) -> None:
    """transformers has none, so its tensors are written by hand."""
    published = published_folder(tmp_path / "hf")
    model, layer = load_hf(tmp_path / "hf", ARGS), f"model.layers.{ARGS.n_layers}"
    block = model.layers[str(ARGS.n_layers)]
    assert torch.equal(block.eh_proj.weight, published[f"{layer}.eh_proj.weight"])
    assert torch.equal(block.head_norm.weight, published[f"{layer}.shared_head.norm.weight"])
    assert torch.equal(
        block.feed_forward.bias, published[f"{layer}.mlp.gate.e_score_correction_bias"]
    )
    checkpoint = save_checkpoint(tmp_path, model, ARGS)
    export([str(checkpoint), str(tmp_path / "kept"), "--dtype", "float32"])
    assert_equal(tensors_of(tmp_path / "kept"), published)
    config = json.loads((tmp_path / "kept" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1

    with open_source(NamedPath(SOURCE, checkpoint), None) as source:
        generating = build_model(source, 16, "float32")
    assert generating.layers.keys() == model.layers.keys() - {str(ARGS.n_layers)}
    tokens = torch.arange(10).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(generating(tokens), model(tokens))

    export([str(checkpoint), str(tmp_path / "dropped"), "--dtype", "float32", "--without-mtp"])
    others = {name: tensor for name, tensor in published.items() if not name.startswith(layer)}
    assert_equal(tensors_of(tmp_path / "dropped"), others)
    config = json.loads((tmp_path / "dropped" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 0


def test_a_layer_with_another_embedding_is_rejected(tmp_path) -> None:
    published = published_folder(tmp_path)
    name = f"model.layers.{ARGS.n_layers}.embed_tokens.weight"
    save_file(published | {name: published[name] + 1}, tmp_path / "model.safetensors")
    message = f"{name} differs from model.embed_tokens.weight.*\n  fix: set model.args.mtp_depth"
    with pytest.raises(ConfigError, match=message):
        load_hf(tmp_path, ARGS)


@pytest.mark.parametrize(
    ("has_layer", "is_new", "depth", "message"),
    [
        (True, False, 1, ""),
        (True, False, 0, ""),  # it is left out
        (False, True, 1, ""),
        (
            False,
            False,
            1,
            "model.args.mtp_depth = 1: .* holds weights of mtp_depth = 0\n"
            "  fix: set it to 0, or checkpoint.initial_load_new_mtp = true to train new ones",
        ),
        (
            True,
            False,
            2,
            "model.args.mtp_depth = 2: .* holds weights of mtp_depth = 1\n  fix: set it to 1",
        ),
        (
            True,
            True,
            1,
            "initial_load_new_mtp = true: .* holds weights of mtp_depth = 1\n  fix: leave it out",
        ),
        (
            False,
            True,
            0,
            "load_new_mtp = true: .* has no layers for MTP\n  fix: set model.args.mtp_depth = 1",
        ),
    ],
)
def test_new_layers_must_be_asked_for(tmp_path, has_layer, is_new, depth, message) -> None:
    published_folder(tmp_path, has_layer=has_layer)
    config = Checkpoint(
        initial_load_path=str(tmp_path), initial_load_in_hf=True, initial_load_new_mtp=is_new
    )
    args = dataclasses.replace(ARGS, mtp_depth=depth)
    if not message:
        check_initial(config, args, MODELS["deepseek_v3"])
        return
    with pytest.raises(ConfigError, match=message):
        check_initial(config, args, MODELS["deepseek_v3"])


def test_other_families_have_no_place_for_it(tmp_path) -> None:
    args = dataclasses.replace(CASES["llama-gqa"], mtp_depth=1)
    model = random_model(args, 64)
    initialize(model, 0)
    checkpoint = save_checkpoint(tmp_path, model, args)
    message = "llama has no layers for MTP .*\n  fix: leave these layers out: --without-mtp"
    with pytest.raises(ConfigError, match=message):
        export([str(checkpoint), str(tmp_path / "out")])
    export([str(checkpoint), str(tmp_path / "out"), "--without-mtp"])
    assert family_of(args).hf.model_type == "llama"
    assert not any("eh_proj" in name for name in tensors_of(tmp_path / "out"))


def test_depths_count_in_flops_and_parameters() -> None:
    args = MODELS["deepseek_v3"].flavors["deepseek_v3"]
    plain, mtp = args.table, dataclasses.replace(args, mtp_depth=1).table
    layer = plain.by_block["layers.60"].values()
    more = sum(p.numel for p in layer) + 2 * 7168 * 7168 + 3 * 7168
    assert mtp.num_params - plain.num_params == more
    # a layer, the projection of two vectors to one, and the output once more
    products = sum(p.numel * p.token_share for p in layer) + 2 * 7168**2 + 129280 * 7168
    pairs = 6 * 128 * (192 + 128) * SEQ_LEN
    difference = mtp.flops_per_token(SEQ_LEN) - plain.flops_per_token(SEQ_LEN)
    assert difference == round(6 * products) + pairs


@pytest.mark.parametrize(
    "word",
    [
        '--training.datasets=[{name="a",weight=1},{name="b",weight=1,loss_weight=2.0}]',
        "--metrics.layer_stats_freq=10",
        "--sentry.interval=10",
        "--model.args.mup_base_dim=64",
    ],
)
def test_options_that_no_proof_covers_are_rejected(word: str) -> None:
    config = load_config(["--model.args.mtp_depth=1", word])
    with pytest.raises(ConfigError, match=r"MTP\n  fix: leave it out, or set model.args.mtp_depth"):
        resolved(config, 1)


def test_a_depth_without_targets_has_no_loss_in_the_record() -> None:
    """Where a step's documents are too short for it; what isn't finite otherwise is kept."""
    trainer = SimpleNamespace(lr_at=lambda step: 0.1, norm_groups=[], by_source=None)
    nan = torch.tensor(float("nan"))

    def names(norm: float) -> set[str]:
        depths = {"loss/mtp_1": torch.tensor(2.0), "loss/mtp_2": nan}
        result = StepResult(torch.tensor(3.0), torch.tensor(norm), depths, None)
        return {*Trainer.figures_of(trainer, 1, result)}  # type: ignore[arg-type]

    usual = {"loss/train", "optim/grad_norm", "optim/lr", "loss/mtp_1"}
    assert names(1.0) == usual
    assert names(float("nan")) == {*usual, "loss/mtp_2"}
