"""Folders of Meta's and torchtitan's, made of a transformers model by what is published of them."""

import dataclasses
import io
import json
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from transformers import LlamaForCausalLM

from meshwright.models.families.llama import LlamaArgs
from tests.helpers.hf import SMALL

EVEN = dataclasses.replace(SMALL, vocab_size=258)  # two files hold half of each dimension
PARAMS = {
    "dim": 32,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 2,
    "multiple_of": 2,  # int(int(8 * 32 / 3) * 0.77) = 65, so 66
    "ffn_dim_multiplier": 0.77,
    "norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 258,
}
NAMES = {  # transformers' convert_llama_weights_to_hf.py, read the other way
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.": "",
}
ROWS = ("wq", "wk", "wv", "w1", "w3", "output")  # fairscale's ColumnParallelLinear
COLUMNS = ("wo", "w2")  # its RowParallelLinear


def interleaved(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """Its weights by Meta's names, queries and keys in the order that Meta rotates them in."""
    config, found = model.config, {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach().clone()
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name:
                count, width = getattr(config, heads), tensor.shape[1]
                halves = tensor.view(count, 2, tensor.shape[0] // count // 2, width)
                tensor = halves.transpose(1, 2).reshape(-1, width)
        for theirs, meta in NAMES.items():
            name = name.replace(theirs, meta)
        found[name] = tensor
    return found


def save_meta(
    folder: Path,
    tensors: dict[str, Tensor],
    files: int = 1,
    embedding_dim: int = 0,
    params: dict[str, object] = PARAMS,
) -> Path:
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(params))
    for rank in range(files):
        pieces = {"rope.freqs": torch.ones(4)}
        for name, tensor in tensors.items():
            module = name.split(".")[-2]
            if module in ROWS:
                tensor = tensor.chunk(files, 0)[rank]
            elif module in COLUMNS:
                tensor = tensor.chunk(files, 1)[rank]
            elif module == "tok_embeddings":
                tensor = tensor.chunk(files, embedding_dim)[rank]
            pieces[name] = tensor.clone()
        torch.save(pieces, folder / f"consolidated.{rank:02}.pth")
    return folder


def save_torchtitan(
    folder: Path, tensors: dict[str, Tensor], *, is_nested: bool = False, is_renamed: bool = False
) -> Path:
    """What its trainer saves, optimizer and all."""
    if is_renamed:
        for part in ("wq", "wk", "wv"):
            tensors = {
                k.replace(f".{part}.", f".qkv_linear.{part}."): v for k, v in tensors.items()
            }
        tensors = {k.replace("output.", "lm_head."): v for k, v in tensors.items()}
    rest = {
        "optimizer": {
            "state": {name: {"exp_avg": torch.zeros_like(v)} for name, v in tensors.items()},
            "param_groups": {"lr": 1e-3},
        },
        "train_state": {"step": torch.tensor(7), "ntokens_seen": torch.tensor(9)},
        "dataloader": {"dp_rank_0": b"bytes", "world_size": 1},
        "lr_scheduler": {"last_epoch": 7},
        "losses": io.BytesIO(b"bytes"),
    }
    model = {**tensors, "freqs_cis": torch.ones(8, 4, dtype=torch.complex64)}
    state = {"model": model, **rest} if is_nested else {**model, **rest}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def args_words(args: LlamaArgs) -> list[str]:
    """Command line for a job of the model."""
    names = ("n_layers", "hidden_dim", "vocab_size")
    return [word for n in names for word in (f"--model.args.{n}", str(getattr(args, n)))]
