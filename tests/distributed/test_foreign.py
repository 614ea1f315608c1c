"""Jobs that start from folders of Meta's and torchtitan's, as one process does and on two ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.config.loader import load_config
from meshwright.train.build import build_model, initialize_weights
from meshwright.train.preflight import preflight
from tests.helpers.foreign import EVEN, args_words, interleaved, save_meta, save_torchtitan
from tests.helpers.hf import transformers_model
from tests.helpers.slow import slow
from tests.helpers.tiny import meshes_of, whole

TINY = Path(__file__).parents[1] / "integration" / "tiny.toml"
TOKENS = torch.arange(2 * 50).view(2, 50) * 7 % EVEN.vocab_size
MESHES = {
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
        for mesh, options in MESHES[ranks].items():
            words = ["--job.config_file", str(TINY), "--job.dump_folder", str(folder / "out")]
            words += ["--checkpoint.initial_load_path", str(folder / kind), *args_words(EVEN)]
            config = load_config([*words, "--model.tokenizer_path", "bytes", *options])
            plan = preflight(config, ranks)
            meshes = meshes_of(plan.dims, "cpu")
            model = build_model(plan, meshes, torch.device("cpu"))
            initialize_weights(plan, model, dist.group.WORLD)
            parameters = dict(model.named_parameters())
            assert mesh == "pp" or parameters.keys() == wanted["tensors"].keys()
            for name, parameter in parameters.items():
                same = torch.equal(whole(parameter), wanted["tensors"][name])
                assert same, f"{kind}, {mesh}: {name}"
            if mesh == "one":
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
