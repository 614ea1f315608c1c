"""Folders of Meta's and torchtitan's that are not what a job is to start from."""

import dataclasses
import json
import math
import pickle
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from meshwright.checkpoint.conversion.initial_load import (
    check_initial,
    find_initial,
)
from meshwright.checkpoint.conversion.readers import MetaWeights
from meshwright.config.job_config import Checkpoint
from meshwright.models.decoder import Decoder
from meshwright.models.families import MODELS
from meshwright.models.families.llama import FAMILY, LlamaArgs, read_params
from meshwright.models.rope_scaling import RopeScaling
from meshwright.system.errors import ConfigError
from meshwright.system.files import Place
from tests.helpers.checkpoints import Trap
from tests.helpers.foreign import EVEN, PARAMS, interleaved, save_meta, save_torchtitan
from tests.helpers.hf import save_checkpoint, transformers_model
from tests.helpers.tiny import plain_model

TENSORS = interleaved(transformers_model(EVEN))


def check(folder: Path, args: LlamaArgs = EVEN) -> None:
    spec, config = MODELS["llama"], Checkpoint(initial_load_path=str(folder))
    check_initial(config, args, spec)


def refusal(folder: Path, args: LlamaArgs = EVEN) -> str:
    with pytest.raises(ConfigError) as caught:
        check(folder, args)
    assert str(folder) in str(caught.value)
    assert not Path("trap_was_run").exists()
    return str(caught.value)


def test_dimensions_that_params_do_not_name_follow() -> None:
    """The feed-forward width is truncated and then rounded up."""
    given = {"dim": 34, "n_layers": 1, "n_heads": 1, "multiple_of": 1}
    found = {name: dimension.value for name, dimension in read_params(given).items()}
    assert found["hidden_dim"] == 90  # of 90.67
    assert (found["n_kv_heads"], found["head_dim"], found["rope_theta"]) == (1, 34, 10000.0)
    assert found["rope_scaling"] is None
    given |= {"ffn_dim_multiplier": 1.3, "multiple_of": 4, "use_scaled_rope": True}
    assert read_params(given)["hidden_dim"].value == 120  # 117, not 117.87
    assert read_params(given)["rope_scaling"].value == RopeScaling()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"n_layers": 4}, ("model.args.n_layers = 4: ", "json has n_layers = 3\n  fix: set model")),
        ({"norm_eps": 1e-6}, ("fix: set model.args.norm_eps = 1e-05",)),
        ({"hidden_dim": 64}, ("by dim, multiple_of and ffn_dim_multiplier, = 66\n  fix: set",)),
        ({"n_layers": 4, "norm_eps": 1e-6}, ("n_layers = 3\n", "norm_eps = 1e-05")),
        ({"vocab_size": 256}, ("fix: set model.args.vocab_size = 258",)),
        ({"rope_scaling": RopeScaling()}, ("choose a model.flavor without",)),
        ({"n_heads": 8}, ("fix: set model.args.n_heads = 4",)),
    ],
)
def test_params_of_another_model_are_refused(tmp_path, changes, parts) -> None:
    folder = save_meta(tmp_path / "meta", TENSORS)
    check(folder)
    said = refusal(folder, dataclasses.replace(EVEN, **changes))
    assert all(part in said for part in parts), said


def first(folder: Path) -> Path:
    return folder / "consolidated.00.pth"


def params(**changed: object):
    return lambda folder: (folder / "params.json").write_text(json.dumps(PARAMS | changed))


def old_format(folder: Path) -> None:
    tensors = torch.load(first(folder))
    torch.save(tensors, first(folder), _use_new_zipfile_serialization=False)


TRAP = Trap(Path("trap_was_run"))


def edit(**changed: object):
    """Change tensors of the first file; None takes one away."""

    def change(folder: Path) -> None:
        tensors = torch.load(first(folder))
        for name, value in changed.items():
            tensors.pop(name.replace("__", "."), None)
            if value is not None:
                tensors[name.replace("__", ".")] = value
        torch.save(tensors, first(folder))

    return change


DAMAGED = "00.pth is no dict of tensors, or is damaged"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (old_format, DAMAGED),
        (lambda f: first(f).write_bytes(pickle.dumps(TRAP)), DAMAGED),
        (edit(x=TRAP), DAMAGED),
        (edit(x=[1]), DAMAGED),
        (lambda f: torch.save([torch.ones(2)], first(f)), DAMAGED),
        (lambda f: first(f).write_bytes(first(f).read_bytes()[:-100]), DAMAGED),
        (lambda f: (f / "consolidated.01.pth").unlink(), "has shape (129, 32) in its 1 files"),
        (edit(norm__weight=None), "norm.weight is not in consolidated.00.pth"),
        (edit(norm__weight=torch.ones(31)), "norm.weight has shape (31,), (32,) in its 2"),
        (edit(norm__weight=torch.ones(32).int()), "is of torch.int32, not of torch.float32"),
        (
            edit(layers__3__ffn_norm__weight=torch.ones(32)),
            "holds layers.3.ffn_norm.weight, for wh",
        ),
        (edit(output__weight=None), "or set model.args.tie_embeddings = true"),
        (lambda f: (f / "params.json").write_text("{"), "params.json cannot be read"),
        (params(dim="32"), "dim is '32', not a positive integer"),
        (params(quantization_args={"group_size": 32}), "another kind"),
        (params(ffn_dim_multiplier=math.inf), "ffn_dim_multiplier is inf, not a positive"),
        (params(norm_eps="a"), "norm_eps is 'a', not a number"),
    ],
)
def test_a_folder_of_metas_that_is_wrong_is_refused(tmp_path, monkeypatch, damage, says) -> None:
    monkeypatch.chdir(tmp_path)
    folder = save_meta(tmp_path / "meta", TENSORS, files=2)
    check(folder)
    damage(folder)
    assert says in refusal(folder)


def load_meta(folder: Path, args: LlamaArgs) -> Decoder:
    model = Decoder(args, seq_len=64)
    MetaWeights(Place("folder", folder), FAMILY, args).load(dict(model.named_parameters()))
    return model


def test_tied_embeddings_must_be_equal_where_they_are_written_twice(tmp_path) -> None:
    tied = dataclasses.replace(EVEN, tie_embeddings=True)
    twice = TENSORS | {"output.weight": TENSORS["tok_embeddings.weight"]}
    once = {name: tensor for name, tensor in twice.items() if name != "output.weight"}
    for number, tensors in enumerate((twice, once)):
        folder = save_meta(tmp_path / str(number), tensors, files=2, embedding_dim=1)
        check(folder, tied)
        found = load_meta(folder, tied).tok_embeddings.weight
        assert torch.equal(found, TENSORS["tok_embeddings.weight"])
    folder = save_meta(tmp_path / "differ", TENSORS, files=2)
    assert "output.weight differs from tok_embeddings.weight" in (said := refusal(folder, tied))
    assert "fix: set model.args.tie_embeddings = false" in said
    config = Checkpoint(initial_load_path=str(folder))
    check_initial(config, tied, MODELS["llama"], is_tie_given=True)


def test_bf16_is_read_into_fp32_as_it_is(tmp_path) -> None:
    rounded = {name: tensor.bfloat16() for name, tensor in TENSORS.items()}
    model = load_meta(save_meta(tmp_path / "meta", rounded, files=2), EVEN)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, rounded[name].float()), name


def test_a_checkpoint_of_torchtitans_of_another_model_is_refused(tmp_path) -> None:
    folder = save_torchtitan(tmp_path / "checkpoint" / "step-7", TENSORS, is_nested=True)
    check(folder)
    check(tmp_path)  # its newest, as of a dump folder
    said = refusal(folder, dataclasses.replace(EVEN, n_layers=2, hidden_dim=64))
    assert "model.layers.0.feed_forward.w1.weight has shape (66, 32) there, not (64, 32)" in said
    said = refusal(folder, dataclasses.replace(EVEN, n_layers=2))
    assert "model.layers.2.attention.wk.weight has no place in the model" in said
    said = refusal(folder, dataclasses.replace(EVEN, n_layers=4))
    assert "model.layers.3.attention_norm.weight is not there" in said
    tied = dataclasses.replace(EVEN, tie_embeddings=True)
    said = refusal(folder, tied)
    assert "model.output.weight differs from model.tok_embeddings.weight" in said
    assert "fix: set model.args.tie_embeddings = false" in said
    twice = TENSORS | {"output.weight": TENSORS["tok_embeddings.weight"].clone()}
    for renamed in (False, True):  # torchtitan saves the embedding under both names
        check(save_torchtitan(tmp_path / f"twice {renamed}", twice, is_renamed=renamed), tied)
    fused = dict(TENSORS)
    fused["layers.0.attention.qkv_linear.wqkv.weight"] = fused.pop("layers.0.attention.wq.weight")
    said = refusal(save_torchtitan(tmp_path / "fused", fused))
    assert "layers.0.attention.wq.weight is not there" in said
    assert "layers.0.attention.qkv_linear.wqkv.weight has no place" in said


def test_an_index_that_names_code_or_is_damaged_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = save_torchtitan(tmp_path / "torchtitan", TENSORS)
    content = (folder / ".metadata").read_bytes()
    for damaged in (pickle.dumps(TRAP), content[:-50], b"", pickle.dumps({"a": 1})):
        (folder / ".metadata").write_bytes(damaged)
        assert ".metadata cannot be read" in refusal(folder)


def test_a_damaged_checkpoint_of_ours_is_not_taken_for_torchtitans(tmp_path) -> None:
    checkpoint = save_checkpoint(tmp_path, plain_model(EVEN), EVEN)
    config = Checkpoint(initial_load_path=str(checkpoint))
    assert find_initial(config).kind == "ours"
    ranks = torch.nn.ParameterDict({"rank_0": torch.ones(2)})
    checkpoint = save_checkpoint(tmp_path / "b", ranks, EVEN, prefix="rng.cpu.")
    (checkpoint / "checkpoint.json").unlink()
    assert "is a checkpoint of meshwright's that is damaged" in refusal(checkpoint)


def test_files_of_metas_are_in_the_order_of_their_numbers(tmp_path) -> None:
    """In another order the parts of a matrix would be joined wrongly, without a word."""
    whole = load_meta(save_meta(tmp_path / "whole", TENSORS, files=2), EVEN).state_dict()
    for old, new in (("00", "9"), ("01", "10")):
        file = tmp_path / "whole" / f"consolidated.{old}.pth"
        file.rename(file.with_name(f"consolidated.{new}.pth"))
    found = load_meta(tmp_path / "whole", EVEN).state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in whole.items())


def test_a_file_of_metas_that_may_not_be_read_is_not_damaged(tmp_path, monkeypatch) -> None:
    folder = save_meta(tmp_path / "meta", TENSORS)
    error = PermissionError(13, "Permission denied")
    monkeypatch.setattr(torch, "load", Mock(side_effect=error))
    assert "consolidated.00.pth cannot be read: Permission denied" in refusal(folder)
