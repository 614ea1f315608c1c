"""Export a checkpoint as a Hugging Face model directory, and compare the two."""

import importlib
import json
import math
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from meshwright.checkpoint.conversion.hf_folder import CONFIG, GENERATION_CONFIG, INDEX
from meshwright.checkpoint.conversion.readers import HuggingFaceWeights, halves, own_part
from meshwright.checkpoint.conversion.tokenizer_files import turn_end
from meshwright.checkpoint.conversion.tokenizer_proof import prove_tokenizer
from meshwright.checkpoint.listing import UNFINISHED
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.reader import CheckpointWeights
from meshwright.checkpoint.state import MODEL
from meshwright.checkpoint.store import saved_args
from meshwright.datasets.tokenizers.kinds import Tokenizer, end_ids, text_ends
from meshwright.models.decoder import Decoder
from meshwright.models.family import Family, ForeignTensor
from meshwright.parallelisms.local_model import keep_modules
from meshwright.parallelisms.parallelize import quiet_torchao
from meshwright.parallelisms.rules.stages import split_evenly
from meshwright.system.files import NamedPath, make_folder, sync_file, sync_folder
from meshwright.system.modules import is_installed

NUM_TOKENS = 256

TOLERANCE = 1e-3
"""Of the largest logit: both sides compute in fp32 on the same weights, in another order; a wrong
permutation, rotation or constant gives more by far."""


class Export:
    """An export of a checkpoint.

    Args:
        place: of the step's folder.
        other_files: of the tokenizer: files to copy, or their content, by their names in the
            folder; none: it is left out.
        prefix: of the names of the weights there; state that isn't trained has that of the model.
        is_fused: write experts stacked, as transformers 5 has them in memory; otherwise one by one,
            as the hub does.
        has_mtp: write the layers for multi-token prediction.

    Raises:
        ConfigError: if the checkpoint can't be read.
    """

    def __init__(
        self,
        place: NamedPath,
        manifest: Manifest,
        family: Family,
        tokenizer: Tokenizer,
        other_files: Mapping[str, Path | str],
        *,
        dtype: torch.dtype,
        max_shard_size: str = "5GB",
        prefix: str = MODEL,
        is_fused: bool = False,
        has_mtp: bool = True,
    ) -> None:
        self.form, self.args = family.hf, saved_args(place, manifest, family.args)
        if not has_mtp:
            self.args = replace(self.args, mtp_depth=0)
        why_not = self.form.why_not(self.args)
        fix = "leave these layers out: --without-mtp" if self.args.mtp_depth else ""
        place.check(not why_not, f"cannot be a Hugging Face directory: {why_not}", fix)
        untrained = self.args.table.state  # without a mean
        self.weights = CheckpointWeights(
            place, lambda name: (MODEL if name in untrained else prefix) + name
        )
        has_part = any(name.startswith(prefix) for name in self.weights.saved)
        fix = "leave the average out: a job keeps it with checkpoint.average.decay"
        place.check(has_part, f"the checkpoint has no {prefix.strip('.')}", fix)
        self.seq_len = int(manifest["data_identity"]["training.seq_len"])
        self.dtype, self.max_shard_size, self.is_fused = dtype, max_shard_size, is_fused
        self.untrained, self.factors = untrained, self.args.folded_factors
        self.tokenizer, self.other_files = tokenizer, other_files
        self.ends_of_text = sorted(text_ends(tokenizer))
        special = end_ids(tokenizer)
        self.special_tokens = {key: token for key, token in special.items() if token is not None}

    def read(self, name: str) -> Tensor:
        """Return one of our tensors in the type that the folder has it in: weights in `dtype`, with
        the factors that the model has besides them, and state as it is."""
        tensor = self.weights.read(name)
        if name in self.factors:
            tensor = tensor * self.factors[name]
        return tensor if name in self.untrained else tensor.to(self.dtype)


def export(job: Export, out: Path, say: Callable[[str], None]) -> None:
    """Write the folder `out`, which appears when it is complete and has been compared.

    In memory there are at most the tensors of a file, or one layer in fp32; while transformers
    computes logits, the whole model in fp32.

    Args:
        say: is called with a line for each thing done.

    Raises:
        ConfigError: if `out` exists, can't be written, or then differs from the checkpoint.
    """
    place = NamedPath("OUT", out)
    place.check(not out.exists(), "exists already", "choose a different folder, or remove it")
    unfinished = out.with_name(f"{out.name}.{secrets.token_hex(8)}{UNFINISHED}")
    try:
        make_folder(out.parent)
        unfinished.mkdir()
        try:
            _write(job, unfinished, say)
            _verify(job, NamedPath("OUT", unfinished), say)
            unfinished.rename(out)
            sync_folder(out.parent)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        reason = error.strerror or error
        raise place.error(f"cannot be written: {reason}", "choose a different folder") from None
    say(f"exported to {out}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _write(job: Export, folder: Path, say: Callable[[str], None]) -> None:
    for name, content in job.other_files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if isinstance(content, str):
            (folder / name).write_text(content, "utf-8")
        else:
            shutil.copyfile(content, folder / name)
    config = job.form.write_config(job.args, job.seq_len) | dict(job.special_tokens)
    config["torch_dtype"] = _name(job.dtype)
    # the oldest that reads these tensors: 4.x would draw new experts in the place of stacked ones
    config["transformers_version"] = "5.0.0" if job.is_fused else "4.56.0"
    _write_json(folder / CONFIG, config)
    if (of_turn := turn_end(job.tokenizer, folder)) is not None:
        job.ends_of_text = sorted({*job.ends_of_text, of_turn})
    stops: Any = job.ends_of_text
    ends = {"eos_token_id": stops[0] if len(stops) == 1 else stops} if stops else {}
    was = {}
    if GENERATION_CONFIG in job.other_files:  # settings of sampling
        was = NamedPath("OUT", folder).read_json(GENERATION_CONFIG)
    _write_json(folder / GENERATION_CONFIG, was | job.special_tokens | ends)
    tensors = job.form.tensors(job.args, is_fused=job.is_fused)
    _check_state(job, tensors)
    _write_weights(job, folder, tensors)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    say(f"wrote {len(tensors)} tensors, {size:,} bytes, as {_name(job.dtype)}")
    for path in (*sorted(folder.rglob("*"), reverse=True), folder):  # files before their folder
        if path.is_dir():
            sync_folder(path)
            continue
        with open(path, "rb") as file:
            sync_file(file.fileno(), path)


def _check_state(job: Export, tensors: Mapping[str, ForeignTensor]) -> None:
    """Check that no tensor matters for which the folder has no place.

    Raises:
        ConfigError: if experts were chosen by biases as well.
    """
    for name in job.untrained.keys() - tensors.keys():
        place = NamedPath("CHECKPOINT", Path(name))
        place.check(
            not name.endswith(".bias") or not job.weights.read(name).any(),
            "is a bias that counts in the choice of experts, and the family's files have no place "
            "for it",
            "train with experts.balance_loss instead of experts.bias_update_rate",
        )


def _write_weights(job: Export, folder: Path, tensors: Mapping[str, ForeignTensor]) -> None:
    """Write every tensor to `folder`, and the index if that takes several files."""
    shapes = {
        name: shape
        for theirs in tensors.values()
        for name, shape in (theirs.parts | dict.fromkeys(theirs.copies, theirs.shape)).items()
    }
    split = split_state_dict_into_shards_factory(
        shapes,
        get_storage_size=lambda shape: math.prod(shape) * job.dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=job.max_shard_size,
    )
    for file, names in split.filename_to_tensors.items():
        wanted, found = {*names}, dict[str, Tensor]()
        for name, foreign in tensors.items():
            if not wanted.isdisjoint((*foreign.parts, *foreign.copies)):
                for part, tensor in _read(job, name, foreign).items():
                    if part not in found:
                        found[part] = torch.empty(shapes[part], dtype=tensor.dtype)
                    place = own_part(found[part], foreign)
                    place.copy_(tensor.view_as(place))
        try:  # transformers asks for the format
            save_file({name: found[name] for name in names}, folder / file, {"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{file}: {error}") from None
        shutil.copymode(folder / CONFIG, folder / file)  # safetensors lets nobody else read it
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _write_json(folder / INDEX, index)


def _read(job: Export, name: str, foreign: ForeignTensor) -> dict[str, Tensor]:
    """Return one of our tensors by the names that the files have for it."""
    tensor = job.read(name)
    if foreign.slices:
        return dict(zip(foreign.slices, tensor, strict=True))
    if foreign.head_dim is not None:
        tensor = halves(tensor, foreign.head_dim, foreign.rotated)
    return dict.fromkeys((foreign.name, *foreign.copies), tensor)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _verify(job: Export, place: NamedPath, say: Callable[[str], None]) -> None:
    """Read the written files back."""
    written = HuggingFaceWeights(place, job.form, job.args)
    tensors = job.form.tensors(job.args)
    dtypes = set[torch.dtype]()

    def put(target: Tensor, values: Tensor) -> None:
        dtypes.add(values.dtype)
        target.copy_(values)

    for name, foreign in tensors.items():
        want = job.read(name)
        dtypes.clear()
        written.load({name: (got := torch.empty(foreign.shape, dtype=want.dtype))}, put)
        place.check(
            dtypes == {want.dtype} and torch.equal(_bits(got), _bits(want)),
            f"{name} differs from the checkpoint",
            "export again; if it stays so, the disk or meshwright is at fault",
        )
        del want, got
    rounded = "" if job.dtype == torch.float32 else f", rounded to {_name(job.dtype)},"
    say(f"compared {len(tensors)} tensors with the checkpoint's{rounded} to the bit: equal")
    if not is_installed("transformers"):
        say("did not compare logits: transformers is not installed")
    else:
        _verify_logits(job, place, say)
    if job.other_files:
        prove_tokenizer(job.tokenizer, place, job.ends_of_text, say)


def _bits(tensor: Tensor) -> Tensor:
    """So that a NaN equals itself, and zero doesn't equal minus zero."""
    return tensor.contiguous().view(torch.uint8)


@torch.no_grad()
def _verify_logits(job: Export, place: NamedPath, say: Callable[[str], None]) -> None:
    """Hold logits of transformers with the folder against ours with the checkpoint's weights,
    rounded as the folder's."""
    tokens = (torch.arange(NUM_TOKENS) * 7919 % job.args.vocab_size).unsqueeze(0)
    want = _logits_of_ours(job, tokens)
    got, by = _logits_of_transformers(job, place, tokens)
    difference, largest = (got - want).abs().max().item(), want.abs().max().item()
    place.check(
        largest > 0,  # equal on both sides, and no comparison
        "the checkpoint's logits are all 0: the model was not trained",
        "export a different checkpoint",
    )
    place.check(
        difference <= TOLERANCE * largest,
        f"its logits by {by} differ by {difference:.2e} from the checkpoint's, of which the "
        f"largest is {largest:.2e}",
    )
    say(
        f"compared logits of {NUM_TOKENS} tokens, in fp32, with {by}: largest difference "
        f"{difference:.2e}, largest logit {largest:.2e}"
    )


def _logits_of_ours(job: Export, tokens: Tensor) -> Tensor:
    """In fp32, with one layer in memory at a time; where embeddings are tied, with all."""
    args, x = replace(job.args, mtp_depth=0), tokens
    count = 1 if args.tie_embeddings else args.n_layers
    for modules in split_evenly([1] * args.n_layers, count, embedding=0, output=0):
        with torch.device("meta"):
            stage = Decoder(args, NUM_TOKENS)
        keep_modules(stage, modules)
        stage.to_empty(device="cpu")
        stage.init_buffers()
        stage.init_state()
        there = job.form.tensors(job.args)
        for name, tensor in stage.state_dict().items():
            if name in there:
                values = job.read(name)
                if name in job.factors:  # which our model multiplies by itself
                    values = values.float() / job.factors[name]
                tensor.copy_(values)
        x = stage(x)
    return x


def _logits_of_transformers(job: Export, place: NamedPath, tokens: Tensor) -> tuple[Tensor, str]:
    transformers: Any = importlib.import_module("transformers")  # only to compare with
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    by = f"transformers {transformers.__version__}"
    try:
        with quiet_torchao():  # which transformers imports here
            # one expert after the other: its grouped matmul takes aligned widths only
            config = transformers.AutoConfig.from_pretrained(
                place.path, local_files_only=True, experts_implementation="eager"
            )
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                place.path,
                config=config,
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except Exception as error:  # a model that this version doesn't take
        fix = "try a different version of transformers"
        raise place.error(f"{by} cannot load it: {error}", fix) from None
    # its models have no layers for MTP
    wrong = {
        kind: unexpected
        for kind, names in report.items()
        if (
            unexpected := sorted(
                name for name in map(str, names) if not job.form.is_of_predictor(name, job.args)
            )
        )
    }
    place.check(not wrong, f"transformers does not find some of its tensors in it: {wrong}")
    logits: Tensor = model(tokens).logits
    return logits, by
