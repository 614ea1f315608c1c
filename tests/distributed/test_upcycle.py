"""Models with experts that begin as copies of a dense model's feed-forwards: made by hand, on one
process and on meshes, of each format."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.checkpoint.conversion.initial_load import check_initial, family_there
from meshwright.checkpoint.conversion.readers import load_upcycled, open_initial, open_weights
from meshwright.checkpoint.on_ranks import AllRanks
from meshwright.config.job_config import Checkpoint
from meshwright.models.args import DecoderArgs
from meshwright.models.decoder import Decoder
from meshwright.models.families import MODELS
from meshwright.models.families.llama import LlamaArgs
from meshwright.models.families.mixtral import MixtralArgs
from meshwright.models.families.olmoe import OlmoeArgs
from meshwright.models.families.qwen3 import Qwen3Args
from meshwright.models.families.qwen3_moe import Qwen3MoeArgs
from meshwright.parallelisms.initialize import fill_normal
from meshwright.parallelisms.rules.degrees import shards_experts_apart
from meshwright.system.errors import ConfigError
from tests.helpers.families import family_of
from tests.helpers.hf import load_hf, save_checkpoint, save_transformers
from tests.helpers.job import mesh
from tests.helpers.tiny import parallel_model, whole

DENSE = Qwen3Args(32, 3, 4, 2, 24, 259, head_dim=8)
SPARSE = Qwen3MoeArgs(
    32, 3, 4, 2, 24, 259, head_dim=8, n_experts=4, n_active=2, expert_dim=24, n_dense_layers=1
)
MIXTRAL = MixtralArgs(32, 2, 4, 2, 24, 259, n_experts=4, n_active=2)
LLAMA = LlamaArgs(32, 2, 4, 2, 24, 259, rope_theta=1000000.0)
NOISE, SEED = 0.25, 7


def load(parameters: dict, args: DecoderArgs, options: Checkpoint) -> None:
    """As a job does it."""
    with open_initial(options, AllRanks(dist.group.WORLD)) as initial:
        there = family_there(options, args, family_of(args))
        noise = options.initial_load_upcycle_noise
        load_upcycled(open_weights(initial, *there), args.table, noise, SEED, parameters)


def by_hand(dense: Decoder, args: DecoderArgs) -> dict[str, torch.Tensor]:
    source, found = dict(dense.named_parameters()), {}
    for name, parameter in args.table.parameters.items():
        fresh = torch.empty(parameter.shape)
        if parameter.std is not None:
            fill_normal(fresh, parameter.std, SEED, name, parameter.shape, (0,) * fresh.dim())
        if ".router." in name:
            found[name] = fresh
        elif ".experts." in name:
            copied = source[name.replace(".experts", "") + ".weight"].detach()
            noise = torch.empty(parameter.shape)
            std = parameter.std * NOISE
            fill_normal(noise, std, SEED, name, parameter.shape, (0,) * fresh.dim())
            assert torch.allclose(noise, fresh * NOISE, rtol=1e-6)
            found[name] = torch.stack([copied] * len(fresh)) + noise
        else:
            found[name] = source[name].detach()
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("dense")
    hf = save_transformers(folder / "hf", DENSE)
    ours = save_checkpoint(folder / "ours" / "checkpoint", load_hf(hf, DENSE), DENSE)
    return {"hf": hf, "ours": ours.parent, "llama": save_transformers(folder / "llama", LLAMA)}


def options_of(folders: dict[str, Path], kind: str, noise: float = NOISE) -> Checkpoint:
    return Checkpoint(
        initial_load_path=str(folders[kind]),
        initial_load_in_hf=kind != "ours",
        initial_load_upcycle_noise=noise,
    )


MESHES = mesh(dp_shard=2, ep=1), mesh(dp_shard=2, ep=2), mesh(tp=2, ep=1), mesh(pp=2, ep=1)


@pytest.mark.ranks(2)
def test_experts_are_noisy_copies_of_the_same_bits_on_every_mesh(folders: dict[str, Path]) -> None:
    want = by_hand(load_hf(folders["hf"], DENSE), SPARSE)
    for dims in MESHES:
        if dims.has_own_experts and not shards_experts_apart():
            continue
        for kind in ("hf", "ours"):
            model, _ = parallel_model(dims, SPARSE, seed=1, microbatches=(dims.pp, 1))
            options = options_of(folders, kind)
            check_initial(options, SPARSE, MODELS["qwen3_moe"])
            load(model.state_dict(keep_vars=True), SPARSE, options)
            for name, parameter in model.named_parameters():
                assert torch.equal(whole(parameter), want[name]), f"{dims}, {kind}: {name}"


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_a_rank_may_keep_a_part_of_each_expert(folders: dict[str, Path]) -> None:
    """Of fewer experts than ranks share them, FSDP2 cuts each within."""
    args = dataclasses.replace(SPARSE, n_experts=2)
    want = by_hand(load_hf(folders["hf"], DENSE), args)
    model, _ = parallel_model(mesh(dp_shard=4, ep=2), args, seed=1)
    load(model.state_dict(keep_vars=True), args, options_of(folders, "hf"))
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), want[name]), name
        if ".experts." in name:
            assert parameter.to_local().shape[1] < parameter.shape[1]


@pytest.mark.ranks(1)
def test_without_noise_the_model_is_the_dense_one(folders: dict[str, Path]) -> None:
    for kind, dense, args in (("hf", DENSE, SPARSE), ("llama", LLAMA, MIXTRAL)):
        options = options_of(folders, kind, noise=0)
        model = Decoder(args, seq_len=64)
        model.init_buffers()
        model.init_state()
        load(dict(model.named_parameters()), args, options)
        tokens = torch.randint(259, (2, 64), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            want, got = load_hf(folders[kind], dense)(tokens), model(tokens)
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


REFUSED = {
    "upcycle_noise = 0.25: the model has no experts": DENSE,
    "upcycle_noise = 0.25: no dense family has": OlmoeArgs(32, 2, 4, 4, 24, 259),
    "fix: set model.args.expert_dim = 24": dataclasses.replace(SPARSE, expert_dim=12),
    "fix: set model.args.normalize_experts = true": dataclasses.replace(
        SPARSE, normalize_experts=False
    ),
    "fix: set model.args.n_layers = 3": dataclasses.replace(SPARSE, n_layers=2),
}


def test_models_that_cannot_be_copied_are_refused(folders, tmp_path) -> None:
    for message, args in REFUSED.items():
        with pytest.raises(ConfigError, match=message):
            check_initial(options_of(folders, "hf"), args, family_of(args))
    sparse = save_checkpoint(tmp_path / "checkpoint", Decoder(SPARSE, 64), SPARSE).parent
    with pytest.raises(ConfigError, match="holds weights of the family 'qwen3_moe'"):
        check_initial(options_of({"ours": sparse}, "ours"), SPARSE, MODELS["qwen3_moe"])
