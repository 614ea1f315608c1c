"""Folders of Hugging Face's, Meta's and torchtitan's on meshes: in as on one process, and out of
what several ranks saved."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.checkpoint.conversion.readers import HuggingFaceWeights
from meshwright.checkpoint.reader import CheckpointWeights
from meshwright.config.loader import load_config
from meshwright.models.args import DecoderArgs
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.rules.degrees import ParallelDims
from meshwright.system.files import Place
from meshwright.train.build import build_model, initialize_weights
from meshwright.train.resolve import resolve
from tests.helpers.cli import checkpoint as checkpoint_tool
from tests.helpers.cli import export
from tests.helpers.families import family_of
from tests.helpers.foreign import EVEN, args_words, interleaved, save_meta, save_torchtitan
from tests.helpers.hf import (
    CASES,
    load_hf,
    save_checkpoint,
    save_transformers,
    tensors_of,
    transformers_model,
)
from tests.helpers.job import assert_equal, mesh
from tests.helpers.slow import slow
from tests.helpers.tiny import meshes_of, parallel_model, whole

MESHES = {
    2: {"fsdp": mesh(dp_shard=2), "tp": mesh(tp=2), "pp": mesh(pp=2)},
    4: {"hsdp": mesh(2, 2), "fsdp-tp": mesh(dp_shard=2, tp=2), "pp-tp": mesh(tp=2, pp=2)},
}

EVERYDAY = ("llama-gqa", "qwen3_moe-gqa")


def build(dims: ParallelDims, args: DecoderArgs) -> LocalModel:
    """With other values than the folder's."""
    model, _ = parallel_model(dims, args, seed=1, microbatches=(dims.pp, 1))
    return model


def _compare(ranks: int, folder: Path, case: str, saved: Path) -> None:
    """Fill from Hugging Face's folder, save a checkpoint, and fill from that."""
    args = CASES[case]
    wanted = {name: p.detach() for name, p in load_hf(folder, args).named_parameters()}

    def assert_as_wanted(model: LocalModel, what: str) -> None:
        for name, parameter in model.named_parameters():
            assert torch.equal(whole(parameter), wanted[name]), f"{what}: {name}"

    for name, dims in MESHES[ranks].items():
        if dims.pp > 1 and args.tie_embeddings:
            continue
        model = build(dims, args)
        weights = HuggingFaceWeights(Place("folder", folder), family_of(args).hf, args)
        weights.load(dict(model.named_parameters()))
        assert_as_wanted(model, name)
        checkpoint = save_checkpoint(saved / name, model, args)
        torch.distributed.barrier()
        model = build(dims, args)
        CheckpointWeights(Place("folder", checkpoint)).load(dict(model.named_parameters()))
        assert_as_wanted(model, f"{name}, from a checkpoint")


@pytest.mark.parametrize(
    "case", [*EVERYDAY, *slow(*(case for case in CASES if case not in EVERYDAY))]
)
def test_import_and_export_on_two_ranks(on_ranks, tmp_path, case) -> None:
    _check(on_ranks, 2, tmp_path, case, ["pp"])


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.endswith(("-gqa", "-tied"))])
def test_import_and_export_on_four_ranks(on_ranks, tmp_path, case) -> None:
    _check(on_ranks, 4, tmp_path, case, ["fsdp-tp", "pp-tp"])


def _check(on_ranks, ranks: int, folder: Path, case: str, exported: list[str]) -> None:
    save_transformers(folder / "hf", CASES[case])
    on_ranks(ranks, _compare, ranks, folder / "hf", case, folder)
    saved = [folder / name for name in MESHES[ranks] if (folder / name).is_dir()]
    for other in saved[1:]:  # of other meshes, and equal
        checkpoint_tool(["diff", str(saved[0]), str(other)])
    was = tensors_of(folder / "hf")
    for mesh_name in exported:
        if "pp" in mesh_name and CASES[case].tie_embeddings:
            continue
        export([str(folder / mesh_name), str(folder / f"{mesh_name}-out"), "--dtype", "float32"])
        assert_equal(tensors_of(folder / f"{mesh_name}-out"), was)


TOML = Path(__file__).parents[1] / "integration" / "tiny.toml"
TOKENS = torch.arange(2 * 50).view(2, 50) * 7 % EVEN.vocab_size
AXES = {
    1: {"one": []},
    2: {
        "fsdp": [],
        "tp": ["--parallelism.tensor_parallel_degree", "2"],
        "pp": ["--parallelism.pipeline_parallel_degree", "2"],
    },
}


def make(kind: str, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    if kind.startswith("meta"):
        save_meta(folder, tensors, files=int(kind[5]), embedding_dim=int(kind[-1]))
    else:
        options = {"is_nested": "nested" in kind, "is_renamed": "renamed" in kind}
        save_torchtitan(folder, tensors, **options)


KINDS = (
    *("meta-1-embedding-0", "meta-2-embedding-0", "meta-2-embedding-1"),
    *("torchtitan-flat", "torchtitan-nested", "torchtitan-flat-renamed"),
)


def _start(ranks: int, folder: Path) -> None:
    """Start a job on each mesh, up to its first step, and compare weights and logits."""
    wanted = torch.load(folder / "wanted.pt")
    for kind in KINDS:
        for axes, options in AXES[ranks].items():
            words = ["--job.config_file", str(TOML), "--job.dump_folder", str(folder / "out")]
            words += ["--checkpoint.initial_load_path", str(folder / kind), *args_words(EVEN)]
            config = load_config([*words, "--model.tokenizer_path", "bytes", *options])
            plan = resolve(config, ranks)
            meshes = meshes_of(plan.dims, "cpu")
            model = build_model(plan, meshes, torch.device("cpu"))
            initialize_weights(plan, model, dist.group.WORLD)
            parameters = dict(model.named_parameters())
            assert axes == "pp" or parameters.keys() == wanted["tensors"].keys()
            for name, parameter in parameters.items():
                same = torch.equal(whole(parameter), wanted["tensors"][name])
                assert same, f"{kind}, {axes}: {name}"
            if axes == "one":
                logits = model.stages[0](TOKENS)
                difference = (logits - wanted["logits"]).abs().max()
                assert difference <= 1e-5 * wanted["logits"].abs().max(), kind


@pytest.mark.parametrize("ranks", [*slow(1), 2])
def test_a_job_starts_from_a_folder_of_metas_or_torchtitans(on_ranks, tmp_path, ranks) -> None:
    theirs = transformers_model(EVEN)
    tensors = interleaved(theirs)
    for kind in KINDS:
        make(kind, tmp_path / kind, tensors)
    with torch.no_grad():
        torch.save({"tensors": tensors, "logits": theirs(TOKENS).logits}, tmp_path / "wanted.pt")
    on_ranks(ranks, _start, ranks, tmp_path)
