"""Model folders of Hugging Face, made by transformers; and checkpoints without a job."""

import dataclasses
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from meshwright.checkpoint import commit, listing
from meshwright.checkpoint.conversion.readers import HuggingFaceWeights, halves, own_part
from meshwright.datasets.tokenizers.kinds import build_tokenizer, end_ids
from meshwright.models.args import DecoderArgs
from meshwright.models.decoder import Decoder
from meshwright.models.families.olmo_hybrid import OlmoHybridArgs
from meshwright.system.files import NamedPath
from tests.helpers.checkpoints import BARE, records_of
from tests.helpers.families import cases, family_of

# 259 rows: uneven on 2 and on 4 ranks, and room for the byte tokenizer's 258
CASES = cases(vocab_size=259)
SMALL = CASES["llama-gqa"]
PUBLISHED_NORMS = {
    "input_layernorm": "attention_layer_norm",
    "post_attention_layernorm": "feedforward_layer_norm",
}
"""Of layers of an OLMo Hybrid with linear attention, by transformers' names."""


def _unfilled(args: DecoderArgs, **special: int) -> PreTrainedModel:
    written = family_of(args).hf.write_config(args, 64) | special
    # its grouped implementation cannot do with widths that are no multiples of 16 bytes
    config = AutoConfig.for_model(**written, experts_implementation="eager")
    return AutoModelForCausalLM.from_config(config)


def transformers_model(args: DecoderArgs = SMALL, seed: int = 0) -> PreTrainedModel:
    """With weights large enough that attention is not flat, norms among them."""
    model = _unfilled(args, bos_token_id=256, eos_token_id=257)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        fill(name, parameter, generator)
    state = family_of(args).hf.state.values()
    for name, buffer in model.named_buffers():
        if any(name.endswith(theirs.rpartition("{}")[2]) for theirs in state):
            nn.init.normal_(buffer, std=0.3, generator=generator)
    return model.eval()


@torch.no_grad()
def fill(name: str, parameter: nn.Parameter, generator: torch.Generator | None = None) -> None:
    """Filters are larger, and decays weaker: the norm of a result near zero magnifies rounding."""
    nn.init.normal_(parameter, std=1.2 if ".conv" in name else 0.3, generator=generator)
    if "a_log" in name.lower():
        parameter -= 2


def random_model(args: DecoderArgs, seq_len: int = 32) -> Decoder:
    """With larger values than initial ones, so that attention is not flat, norms among them."""
    torch.manual_seed(0)
    model = Decoder(args, seq_len)
    model.init_buffers()
    model.init_state()
    for name, parameter in model.named_parameters():
        fill(name, parameter)
    for buffer in state_in_files(model).values():
        nn.init.normal_(buffer, std=0.3)
    return model


def state_in_files(ours: Decoder) -> dict[str, torch.Tensor]:
    """Tensors that are no parameters, but in a folder of Hugging Face."""
    names = family_of(ours.args).hf.tensors(ours.args)
    return {name: buffer for name, buffer in ours.named_buffers() if name in names}


def in_transformers(ours: Decoder) -> PreTrainedModel:
    """The same function, by the config.json and the names that an export would write."""
    theirs = _unfilled(ours.args)
    tensors = their_tensors(ours, dict(ours.named_parameters()) | state_in_files(ours))
    state = {name for name, _ in theirs.named_buffers() if name in tensors}
    assert {name for name, _ in theirs.named_parameters()} == tensors.keys() - state
    theirs.load_state_dict(tensors, strict=False)  # a tied output has two names there
    return theirs


def their_tensors(ours: Decoder, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`tensors` by transformers' names, and in its order of rows."""
    found = {}
    for name, foreign in family_of(ours.args).hf.tensors(ours.args, is_fused=True).items():
        if name not in tensors:  # state has no gradient
            continue
        tensor = tensors[name].detach()
        if foreign.head_dim:
            tensor = halves(tensor, foreign.head_dim, foreign.rotated)
        whole = found.setdefault(foreign.name, torch.empty(*foreign.parts.values()))
        place = own_part(whole, foreign)
        place.copy_(tensor.view_as(place))
    return _in_memory(found) if isinstance(ours.args, OlmoHybridArgs) else found


def _in_memory(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As transformers has the tensors of an OLMo Hybrid's files (its conversion_mapping.py)."""
    found = {}
    for name, tensor in tensors.items():
        if "q_conv1d" in name:
            others = [tensors[name.replace("q_conv1d", f"{part}_conv1d")] for part in "kv"]
            found[name.replace("q_conv1d", "conv1d")] = torch.cat([tensor, *others])
        elif "_conv1d" not in name:
            for theirs, published in PUBLISHED_NORMS.items():
                name = name.replace(published, theirs)
            found[name] = tensor
    return found


def _published(model: PreTrainedModel, args: OlmoHybridArgs) -> dict[str, torch.Tensor]:
    """The inverse."""
    state, found = model.state_dict(), dict[str, torch.Tensor]()
    keys = args.linear_num_key_heads * args.linear_key_head_dim
    for name, tensor in state.items():
        if args.tie_embeddings and name == "lm_head.weight":
            continue
        if "conv1d" in name:
            parts = tensor.split([keys, keys, len(tensor) - 2 * keys])
            names = (name.replace("conv1d", f"{part}_conv1d") for part in "qkv")
            found |= {name: part.clone() for name, part in zip(names, parts, strict=True)}
            continue
        if ".".join([*name.split(".")[:3], "linear_attn", "A_log"]) in state:
            for theirs, published in PUBLISHED_NORMS.items():
                name = name.replace(theirs, published)
        found[name] = tensor
    return found


def save_as_published(
    model: PreTrainedModel, folder: Path, args: DecoderArgs, max_shard_size: str
) -> None:
    """Save a folder with the names that its publisher gives to tensors. Those that transformers
    5.24 saves of an OLMo Hybrid are others: of the norms in layers of both kinds, and of filters
    in three equal parts, whatever the widths of queries, keys and values are."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if isinstance(args, OlmoHybridArgs):
        for file in folder.glob("model*"):
            file.unlink()
        save_torch_state_dict(_published(model, args), folder, max_shard_size=max_shard_size)


def save_transformers(
    folder: Path, args: DecoderArgs = SMALL, max_shard_size: str = "30KB"
) -> Path:
    save_as_published(transformers_model(args), folder, args, max_shard_size)
    return folder


def load_hf(folder: Path, args: DecoderArgs = SMALL) -> Decoder:
    """On this process alone."""
    model = Decoder(args, seq_len=64)
    model.init_buffers()
    model.init_state()
    weights = HuggingFaceWeights(NamedPath("folder", folder), family_of(args).hf, args)
    weights.load(model.state_dict())
    return model


def words_of_job(tmp_path: Path, folder: Path, *more: str) -> list[str]:
    """Return the words of a job on one rank with this model folder and a few rows of text."""
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "a b c"}\n' * 99)
    job = {
        "job.dump_folder": tmp_path / "out",
        "model.flavor": folder,
        "model.tokenizer_path": "bytes",
        "training.dataset": "json",
        "training.dataset_path": data,
    }
    return [*(f"--{key}={value}" for key, value in job.items()), "--ngpu", "1", *more]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor, as safetensors itself reads it."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    args: DecoderArgs,
    step: int = 5,
    tokenizer_path: str = "bytes",
    prefix: str = "model.",
) -> Path:
    """The model's part of a checkpoint. Collective, if there are ranks."""
    state = {f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()}
    writer = dcp.FileSystemWriter(listing.unfinished_folder(folder, step))
    dcp.save(state, storage_writer=writer, no_dist=not dist.is_initialized())
    tokenizer = build_tokenizer(tokenizer_path)
    manifest = BARE | {
        "step": step,
        "model_name": family_of(args).name,
        "model_args": dataclasses.asdict(args),
        "tokenizer_path": tokenizer_path,
        "data_identity": {
            "training.seq_len": 64,
            "model.tokenizer_path": tokenizer.fingerprint,
        },
        "special_tokens": end_ids(tokenizer),
    }
    if not dist.is_initialized() or dist.get_rank() == 0:
        unfinished = listing.unfinished_folder(folder, step)
        commit.publish(unfinished, manifest, records_of(unfinished))
    return listing.step_folder(folder, step)
