"""A TOML with every key of torchtitan's debug model trains as it is, but for sizes and places."""

import json
from pathlib import Path

from tests.helpers.jobs import ROOT, losses, train_alone

TOML = ROOT / "tests" / "torchtitan" / "debug_model.toml"


def test_a_debug_job_of_torchtitan_trains(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"row {i} of c4 " * 9}) + "\n" for i in range(40)))
    keys = {
        "model.hf_assets_path": ROOT / "assets" / "tokenizers" / "python_2k.model",
        "training.dataset_path": rows,
        "training.seq_len": 32,
        "training.local_batch_size": 2,
        "training.steps": 3,
        "debug.seed": 1,
        "model.args.n_layers": 2,
        "checkpoint.enable": "true",
    }
    words = [f"--{key}={value}" for key, value in keys.items()]
    done = train_alone(tmp_path / "dump", *words, config=TOML, XDG_CACHE_HOME=tmp_path / "cache")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "line 23, model.flavor: 'debugmodel' is 'debugmodel' with n_heads = 16" in (
        " ".join(done.stdout.split())
    )
    assert losses(tmp_path / "dump").keys() == {1, 2, 3}
    saved = json.loads(
        (tmp_path / "dump" / "checkpoint" / "step-3" / "checkpoint.json").read_text()
    )
    assert saved["model_args"]["n_heads"] == saved["model_args"]["n_kv_heads"] == 16
    assert saved["model_args"]["rope_scaling"]["factor"] == 8.0
    assert saved["config"]["training"]["seed"] == 1
