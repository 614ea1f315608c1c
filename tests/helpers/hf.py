"""Model folders of Hugging Face, made by transformers; and checkpoints without a job."""

import dataclasses
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.checkpoint import commit
from meshwright.checkpoint.hf_folder import Place
from meshwright.checkpoint.hf_read import HuggingFaceWeights
from meshwright.datasets.tokenizers import build_tokenizer
from meshwright.models.llama import LlamaArgs, RopeScaling, hf
from meshwright.models.llama.model import Llama
from tests.helpers.checkpoints import BARE, records_of

# 259 rows: uneven on 2 and on 4 ranks, and room for the byte tokenizer's 258
SMALL = LlamaArgs(dim=32, n_layers=3, n_heads=4, n_kv_heads=2, hidden_dim=66, vocab_size=259)
SCALED = RopeScaling(factor=8.0, original_seq_len=16)
CASES = {
    "gqa": SMALL,
    "mha": dataclasses.replace(SMALL, n_kv_heads=4, rope_theta=10000.0, norm_eps=1e-6),
    "tied": dataclasses.replace(SMALL, tie_embeddings=True),
    "scaled": dataclasses.replace(SMALL, rope_scaling=SCALED),
    "mha-tied-scaled": dataclasses.replace(
        SMALL, n_kv_heads=4, tie_embeddings=True, rope_scaling=SCALED
    ),
}


def transformers_model(args: LlamaArgs = SMALL, seed: int = 0) -> LlamaForCausalLM:
    """With weights large enough that attention is not flat, norms among them."""
    rope = {"rope_type": "default", "rope_theta": args.rope_theta}
    if args.rope_scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": args.rope_scaling.factor,
            "low_freq_factor": args.rope_scaling.low_freq_factor,
            "high_freq_factor": args.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": args.rope_scaling.original_seq_len,
        }
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.dim,
        intermediate_size=args.hidden_dim,
        num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_kv_heads,
        rms_norm_eps=args.norm_eps,
        tie_word_embeddings=args.tie_embeddings,
        rope_parameters=rope,
        bos_token_id=256,
        eos_token_id=257,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return model.eval()


def save_transformers(folder: Path, args: LlamaArgs = SMALL, max_shard_size: str = "30KB") -> Path:
    transformers_model(args).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def load_hf(folder: Path, args: LlamaArgs = SMALL) -> Llama:
    """On this process alone."""
    model = Llama(args, seq_len=64)
    model.init_buffers()
    weights = HuggingFaceWeights(Place("folder", folder), hf, args)
    weights.load(dict(model.named_parameters()))
    return model


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor, as safetensors itself reads it."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    args: LlamaArgs,
    step: int = 5,
    tokenizer_path: str = "bytes",
    prefix: str = "model.",
) -> Path:
    """The model's part of a checkpoint. Collective, if there are ranks."""
    state = {f"{prefix}{name}": p.detach() for name, p in model.named_parameters()}
    writer = dcp.FileSystemWriter(commit.unfinished_folder(folder, step))
    dcp.save(state, storage_writer=writer, no_dist=not dist.is_initialized())
    manifest = BARE | {
        "step": step,
        "model_name": "llama",
        "model_args": dataclasses.asdict(args),
        "tokenizer_path": tokenizer_path,
        "data_identity": {
            "training.seq_len": 64,
            "model.tokenizer_path": build_tokenizer(tokenizer_path).fingerprint,
        },
    }
    if not dist.is_initialized() or dist.get_rank() == 0:
        unfinished = commit.unfinished_folder(folder, step)
        commit.publish(unfinished, manifest, records_of(unfinished))
    return commit.step_folder(folder, step)
