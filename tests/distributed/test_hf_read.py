"""Hugging Face model directories on meshes: in as on one process, and out of what several ranks
saved."""

from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.conversion.readers import HuggingFaceWeights
from meshwright.checkpoint.reader import CheckpointWeights
from meshwright.models.args import DecoderArgs
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.rules.degrees import ParallelDims
from meshwright.system.files import NamedPath
from tests.helpers.cli import checkpoint as checkpoint_tool
from tests.helpers.cli import export
from tests.helpers.families import family_of
from tests.helpers.hf import CASES, load_hf, save_checkpoint, save_transformers, tensors_of
from tests.helpers.job import assert_equal, mesh
from tests.helpers.slow import slow
from tests.helpers.tiny import parallel_model, whole

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
    wanted = load_hf(folder, args).state_dict()

    def assert_as_wanted(model: LocalModel, what: str) -> None:
        for name, tensor in model.state_dict(keep_vars=True).items():
            assert torch.equal(whole(tensor), wanted[name]), f"{what}: {name}"

    for name, dims in MESHES[ranks].items():
        model = build(dims, args)
        weights = HuggingFaceWeights(NamedPath("folder", folder), family_of(args).hf, args)
        weights.load(model.state_dict(keep_vars=True))
        assert_as_wanted(model, name)
        checkpoint = save_checkpoint(saved / name, model, args)
        torch.distributed.barrier()
        model = build(dims, args)
        CheckpointWeights(NamedPath("folder", checkpoint)).load(model.state_dict(keep_vars=True))
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
        export([str(folder / mesh_name), str(folder / f"{mesh_name}-out"), "--dtype", "float32"])
        assert_equal(tensors_of(folder / f"{mesh_name}-out"), was)
