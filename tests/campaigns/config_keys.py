"""Set each key of config.json that transformers reads to other values, and judge the model.

python -m tests.campaigns.config_keys --count 300 --seed 1      (--all: every key and value)

The keys are those of each family's config class, those of its rotation, and every one that
transformers' own source reads from a config where these families pass (found by its text). right:
the logits are transformers', or the key is rejected by name. A config that transformers rejects
itself is not judged.
"""

import argparse
import json
import random
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import model_type_to_module_name

from meshwright.checkpoint.conversion.hf_folder import find_family, read_args
from meshwright.checkpoint.conversion.readers import HuggingFaceWeights
from meshwright.models.decoder import Decoder
from meshwright.models.families import MODELS
from meshwright.system.errors import ConfigError
from meshwright.system.files import NamedPath
from tests.campaigns.model_folders import TOKENS, equal, logits
from tests.helpers.families import family_of
from tests.helpers.hf import CASES, save_transformers

SOURCES = (
    *("modeling_rope_utils.py", "masking_utils.py", "modeling_layers.py", "configuration_utils.py"),
    *("integrations/moe.py", "integrations/sdpa_attention.py"),
)
"""Of transformers, beside the file of a family's model."""

READS = re.compile(r"""config\.([a-z]\w+)|getattr\(\s*[\w.]*config\w*,\s*["']([a-z]\w+)["']""")

SEEN = ("is_causal", "original_max_position_embeddings", "per_layer_config", "attention_chunk_size")
"""Keys that no config class lists."""

VALUES: tuple[Any, ...] = (None, True, False, 1, 2, 0.5, "gelu", {"0": {"head_dim": 4}})

ROPE = ("rope_type", "type", "factor", "rope_theta", "low_freq_factor", "high_freq_factor")
ROPE += ("original_max_position_embeddings", "partial_rotary_factor", "attention_factor", "mscale")
ROPE += ("beta_fast", "long_factor", "full_attention")

BESIDE = {"architectures", "auto_map", "transformers_version", "model_type", "id2label", "label2id"}
"""Of the file, not of the function."""


@cache
def keys_of(model_type: str) -> list[str]:
    """Return every key of a family's config.json that transformers looks at."""
    folder = Path(transformers.__file__).parent
    module = model_type_to_module_name(model_type)  # of gemma3_text it is gemma3
    files = (f"models/{module}/modeling_{module}.py", *SOURCES)
    found = {name for f in files for m in READS.findall((folder / f).read_text()) for name in m}
    methods = {name for name in dir(transformers.PreTrainedConfig) if name[0] != "_"}
    found = {name for name in found if name and name not in methods}
    return sorted((found | {*AutoConfig.for_model(model_type).to_dict(), *SEEN}) - BESIDE)


def changes(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every change of a config: its name and the new content."""
    for key in keys_of(config["model_type"]):
        usual = config.get(key)
        own = [usual * 2, usual + 1] if type(usual) in (int, float) else []
        for value in (*VALUES, *own):
            if (value, type(value)) != (usual, type(usual)) or key not in config:
                yield f"{key} = {value!r}", config | {key: value}
    for table in ("rope_scaling", "rope_parameters"):
        for key in ROPE:
            for value in (None, True, 0.5, 2, 100.0, "llama3", "linear", "yarn", {"factor": 2}):
                usual = config.get(table) or {"rope_type": "default", "rope_theta": 10000.0}
                yield f"{table}.{key} = {value!r}", config | {table: usual | {key: value}}


def ours(folder: Path) -> Tensor:
    """Return what we compute from a folder, if it is not rejected."""
    place = NamedPath("model.flavor", folder)
    family = find_family(place, list(MODELS.values()))
    args = read_args(place, family.hf, family.args)
    weights = HuggingFaceWeights(place, family.hf, args)
    model = Decoder(args, seq_len=64)
    model.init_buffers()
    model.init_state()
    with torch.no_grad():
        weights.load(model.state_dict())
        found: Tensor = model(TOKENS)
    return found


def judge(folder: Path, config: dict[str, Any], name: str) -> tuple[str, str]:
    """Return "equal", "rejected", "not judged" or "wrong", and why."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        found = ours(folder)
    except ConfigError as error:
        return "rejected", str(error).partition("\n")[0].replace(str(folder), "FOLDER")
    try:
        want = logits(folder)
    except Exception as error:  # whatever it raises for a config that it cannot use
        return "not judged", f"transformers: {type(error).__name__}"
    if not equal(found, want):
        distance = (found - want).abs().max() / want.abs().max()
        return "wrong", f"{name}: logits differ by {distance:.2g} of the largest"
    return "equal", ""


@cache
def folder_of(case: str, root: Path) -> tuple[Path, dict[str, Any]]:
    folder = save_transformers(root / case, CASES[case], max_shard_size="1GB")
    # as an export writes it: without keys that hide others
    return folder, family_of(CASES[case]).hf.write_config(CASES[case], 64)


def every_change(cases: list[str]) -> list[tuple[str, str, dict[str, Any]]]:
    """Return case, name and content of every change."""
    configs = {case: family_of(CASES[case]).hf.write_config(CASES[case], 64) for case in cases}
    return [(case, *change) for case in cases for change in changes(configs[case])]


def draw(seed: int, count: int) -> list[tuple[str, str, dict[str, Any]]]:
    """Return `count` of the changes."""
    return random.Random(seed).sample(every_change(sorted(CASES)), count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--case", help="of tests/helpers/hf.py, e.g. llama-scaled, with --all")
    given = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # the models are small
    print(f"seed {given.seed}, transformers {transformers.__version__}")
    cases = [given.case] if given.case else sorted(CASES)
    counts = Counter[str]()
    with tempfile.TemporaryDirectory() as root:
        for case, name, config in (
            every_change(cases) if given.all else draw(given.seed, given.count)
        ):
            folder, _ = folder_of(case, Path(root))
            verdict, why = judge(folder, config, name)
            counts[verdict] += 1
            if verdict == "wrong":
                print(f"{case:20} {verdict:10} {name}: {why}")
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    raise SystemExit(counts["wrong"] > 0)


if __name__ == "__main__":
    main()
