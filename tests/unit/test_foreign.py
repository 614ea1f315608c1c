"""Folders of Meta's and torchtitan's, which aren't read: one message says what to do instead."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

from meshwright.checkpoint.conversion.initial_load import find_initial
from meshwright.checkpoint.listing import UNFINISHED, unfinished_folder
from meshwright.config.job_config import Checkpoint
from meshwright.system.errors import ConfigError


def refusal(folder) -> str:
    with pytest.raises(ConfigError) as caught:
        find_initial(Checkpoint(initial_load_path=str(folder)))
    return str(caught.value)


def test_a_folder_of_metas_names_the_safetensors_to_download(tmp_path) -> None:
    (tmp_path / "params.json").write_text(json.dumps({"dim": 32, "n_layers": 3, "n_heads": 4}))
    torch.save({"norm.weight": torch.ones(32)}, tmp_path / "consolidated.00.pth")
    said = refusal(tmp_path)
    assert said.startswith(f"checkpoint.initial_load_path = '{tmp_path}': holds Meta's own format")
    assert "`hf download meta-llama/Llama-3.1-8B --exclude 'original/*' --local-dir FOLDER`" in said
    assert "set checkpoint.initial_load_in_hf = true" in said


@pytest.mark.parametrize("name", ["checkpoint/step-7", "checkpoint", "."])
def test_a_checkpoint_of_torchtitans_names_its_converter(tmp_path, name) -> None:
    state = {"norm.weight": torch.ones(32), "train_state": {"step": torch.tensor(7)}}
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint/step-7", no_dist=True)
    said = refusal(tmp_path / name)
    assert "has no checkpoint.json: it is torchtitan's, or was copied in part" in said
    assert "scripts/checkpoint_conversion/convert_to_hf.py, and set checkpoint.initial" in said


def test_what_holds_no_checkpoint_has_a_fix(tmp_path) -> None:
    (tmp_path / "a.safetensors").touch()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text("{}")
    for name, fix in {
        "nowhere": f"{tmp_path} exists, but holds no nowhere",
        "a.safetensors": "name its folder: ",
        "hf": "set checkpoint.initial_load_in_hf = true if it is a Hugging Face directory",
        ".": "name a job.dump_folder, or a step's folder in it",
        unfinished_folder(tmp_path, 7).name: "choose another step's folder",
    }.items():
        if name.endswith(UNFINISHED):
            (tmp_path / name).mkdir()
        assert fix in refusal(tmp_path / name).partition("\n  fix: ")[2], name
