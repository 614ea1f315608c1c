"""Jobs that start from weights that are there: on real processes, and what keeps them from it."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.system.errors import ConfigError
from tests.helpers.checkpoints import Trap
from tests.helpers.cli import check_job, export
from tests.helpers.cli import checkpoint as checkpoint_tool
from tests.helpers.files import flip_bit
from tests.helpers.hf import SMALL, load_hf, save_checkpoint, save_transformers
from tests.helpers.jobs import CONFIG, ROOT, losses, train_alone, train_on_ranks

INDEX = "model.safetensors.index.json"
MODEL = {
    "model.tokenizer_path": "bytes",
    "model.args.n_layers": SMALL.n_layers,
    "model.args.hidden_dim": SMALL.hidden_dim,
    "model.args.vocab_size": SMALL.vocab_size,
}


def words(**changed: object) -> list[str]:
    keys = MODEL | {key.replace("__", "."): value for key, value in changed.items()}
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


def test_a_job_starts_from_weights_and_later_from_its_own_checkpoint(tmp_path, capsys) -> None:
    folder = save_transformers(tmp_path / "folder")
    checkpoints, other = tmp_path / "other" / "checkpoint", ROOT / "assets/tokenizers"
    tokenizer = str(other / "python_2k.model")
    checkpoint = save_checkpoint(checkpoints, load_hf(folder), SMALL, tokenizer_path=tokenizer)
    starts = {
        "hf": words(checkpoint__initial_load_path=folder, checkpoint__initial_load_in_hf=True),
        "ours": words(checkpoint__initial_load_path=tmp_path / "other"),
    }
    figures = {}
    for train, (name, options) in zip((train_on_ranks, train_alone), starts.items(), strict=True):
        done = train(tmp_path / name, *options, "--training.steps", 2)
        figures[name] = losses(tmp_path / name)
        assert "initial weights from" in done.stdout
        warns = "initial weights were trained with another tokenizer" in done.stdout
        assert warns == (name == "ours")
    assert figures["hf"].keys() == {1, 2}
    # weights of zero give log(259) = 5.56, fresh ones about 6.06
    assert 5.58 < figures["hf"][1][0] < 5.85  # by Python, whose sources are the data
    for step, both in figures["hf"].items():
        assert both == pytest.approx(figures["ours"][step], rel=1e-5)

    for path in (folder, checkpoint):  # needed no more
        shutil.rmtree(path)
    done = train_alone(tmp_path / "hf", *starts["hf"], "--training.steps", 3)
    assert "resumed from" in done.stdout
    assert "initial weights from" not in done.stdout
    assert losses(tmp_path / "hf").keys() == {1, 2, 3}

    by_two_ranks = str(tmp_path / "hf" / "checkpoint" / "step-2")
    for command in ("verify", "show"):
        checkpoint_tool([command, by_two_ranks])
    export([by_two_ranks, str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert "step-2: good" in said
    numel = SMALL.table.num_params
    assert f"llama, {numel:,} parameters" in said  # and not those of the optimizer
    assert "compared logits of 256 tokens, in fp32, with transformers" in said


@pytest.mark.slow
def test_damaged_weights_are_passed_over_or_refused_on_every_rank(tmp_path) -> None:
    """Sizes are as they were, so only their content shows it."""
    model = load_hf(save_transformers(tmp_path / "hf"))
    checkpoints = tmp_path / "other" / "checkpoint"
    good, bad = (save_checkpoint(checkpoints, model, SMALL, step) for step in (5, 10))
    flip_bit(bad / "__0_0.distcp", 8 * 50_000)
    options = words(checkpoint__initial_load_path=tmp_path / "other")
    done = train_on_ranks(tmp_path / "out", *options, "--training.steps", 1)
    assert f"skipped {bad}, which is damaged: the content of __0_0.distcp" in done.stdout
    assert f"initial weights from {good}" in done.stdout
    damaged = words(checkpoint__initial_load_path=bad)
    done = train_on_ranks(tmp_path / "b", *damaged, "--training.steps", 1, code=2)
    said = "checkpoint.initial_load_path"
    assert f"{said} = {str(bad)!r}: is damaged: the content of __0_0.distcp" in done.stderr
    assert not (tmp_path / "b" / "metrics.jsonl").exists()


def edit(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def shard(folder: Path, tensor: str) -> Path:
    index = json.loads((folder / INDEX).read_text())
    return folder / index["weight_map"][tensor]


def no_weights(folder: Path) -> None:
    for file in [*folder.glob("*.safetensors*")]:
        file.unlink()


def only_pickle(folder: Path) -> None:
    no_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(Path("trap_was_run"))))


NORM = "model.layers.1.input_layernorm.weight"


def header(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Change the header of a file, and leave the tensors."""

    def rewrite(folder: Path) -> None:
        file = shard(folder, NORM)
        content = file.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        table = json.loads(content[8:end])
        change(table)
        text = json.dumps(table).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])

    return rewrite


def tensors(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Change the tensors, in a file that is in order."""

    def rewrite(folder: Path) -> None:
        found = load_file(shard(folder, NORM))
        change(found)
        save_file(found, shard(folder, NORM), {"format": "pt"})

    return rewrite


def drop_tensor(folder: Path) -> None:
    tensors(lambda found: found.pop(NORM))(folder)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    weight_map.pop(NORM)
    edit(folder / INDEX, weight_map=weight_map)


def add_tensor(folder: Path) -> None:
    """One that the index gives to a file; others in a file are left out."""
    tensors(lambda found: found.update({"a.bias": found[NORM].clone()}))(folder)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    edit(folder / INDEX, weight_map=weight_map | {"a.bias": weight_map[NORM]})


def cut(end: int) -> Callable[[Path], object]:
    """The file of a tensor, at a byte."""
    return lambda folder: shard(folder, NORM).write_bytes(shard(folder, NORM).read_bytes()[:end])


def config(**values: object):
    return lambda folder: edit(folder / "config.json", **values)


LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 4.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A folder that is right."""
    folder = save_transformers(tmp_path_factory.mktemp("sound") / "hf")
    options = words(checkpoint__initial_load_path=folder, checkpoint__initial_load_in_hf=True)
    check_job(["--ngpu", "2", "--job.config_file", str(CONFIG), *options])
    return folder


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (lambda f: (f / INDEX).unlink(), ("no model.safetensors.index.json", "fix: download")),
        (only_pickle, ("pytorch_model.bin", "pickles", "can run code", "fix: ")),
        (no_weights, ("holds neither model.safetensors nor",)),
        (drop_tensor, (NORM, "our layers.1.attention_norm.weight", "is in none of its files")),
        (header(lambda t: t.update(x=t.pop(NORM))), ("says that", NORM, "but it isn't")),
        (header(lambda t: t[NORM].update(shape=[8, 4])), (NORM, "has shape (8, 4), not (32,)")),
        (
            tensors(lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)})),
            (f"{NORM} in model-0", "is of type F8_E4M3, not F32, BF16, F16"),
        ),
        (add_tensor, ("a.bias, for which the model",)),
        (cut(-10), ("is damaged, or", "file not fully covered", "fix: download or export")),
        (lambda f: shard(f, NORM).unlink(), ("is missing, which model.safetensors.index.json",)),
        (lambda f: edit(f / INDEX, weight_map={NORM: "../x"}), ("no weight_map of tensors to",)),
        (lambda f: (f / "config.json").write_text("{"), ("config.json cannot be read",)),
        (config(model_type="mistral"), ("model_type is 'mistral', not 'llama'",)),
        (config(attention_bias=True), ("attention_bias is True; this model has False only",)),
        (config(layer_types=["sliding_attention"]), ("layer_types is ['sliding_attention']",)),
        (config(layer_types=True), ("layer_types is True; this model has",)),
        (config(hidden_act="gelu"), ("hidden_act is 'gelu'",)),
        (config(head_dim=16), ("head_dim = 8: ", "has head_dim = 16\n  fix: set model.args.head")),
        (config(rms_norm_eps="a"), ("rms_norm_eps is 'a', not a number",)),
        (config(hidden_size="32"), ("hidden_size is '32', not a positive integer",)),
        (
            config(quantization_config={"quant_method": "gptq"}),
            ("quant_method is 'gptq'; can read weights that are not quantized",),
        ),
        (config(rope_parameters={"rope_type": "yarn"}), ("rope_type is 'yarn'",)),
        (config(rope_parameters="yarn"), ("rope_parameters is 'yarn', not a table",)),
        (config(partial_rotary_factor=0.5), ("partial_rotary_factor is 0.5, which this model",)),
        # of each kind of layers, as transformers 5 has it
        (config(rope_parameters={"full_attention": LLAMA3}), ("full_attention is {",)),
        (
            config(num_hidden_layers=4, rms_norm_eps=1e-6),
            (
                "model.args.n_layers = 3: ",
                "config.json has num_hidden_layers = 4\n  fix: set model.args.n_layers = 4\n",
                "model.args.norm_eps = 1e-05: ",
                "has rms_norm_eps = 1e-06\n  fix: set model.args.norm_eps = 1e-06",
            ),
        ),
        (
            config(rope_parameters=LLAMA3),
            ("model.args.rope_scaling = none: ", "fix: set model.args.rope_scaling = {factor = 4"),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_folder_that_is_wrong_is_refused_before_any_rank_starts(
    sound, tmp_path, monkeypatch, damage, parts
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "hf"
    shutil.copytree(sound, folder)
    options = words(checkpoint__initial_load_path=folder, checkpoint__initial_load_in_hf=True)
    job = ["--ngpu", "2", "--job.config_file", str(CONFIG), "--job.dump_folder", f"{tmp_path}/out"]
    damage(folder)
    with pytest.raises(ConfigError) as caught:
        check_job([*job, *options])
    for part in parts:
        assert part in str(caught.value)
    assert str(folder) in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "trap_was_run").exists()


def test_the_kind_of_the_folder_is_not_guessed(tmp_path) -> None:
    folder = save_transformers(tmp_path / "hf")
    checkpoint = save_checkpoint(tmp_path / "other" / "checkpoint", load_hf(folder), SMALL)
    job = ["--ngpu", "2", "--job.config_file", CONFIG, "--job.dump_folder", tmp_path / "out"]

    def message(path: Path | str, in_hf: bool, **changed: object) -> str:
        options = {"checkpoint__initial_load_path": path, "checkpoint__initial_load_in_hf": in_hf}
        with pytest.raises(ConfigError) as caught:
            check_job([*job, *words(**options, **changed)])
        return str(caught.value)

    for path in (checkpoint, checkpoint.parent, tmp_path / "other"):
        options = words(checkpoint__initial_load_path=path)
        check_job([*job, *options])
        assert "fix: set checkpoint.initial_load_in_hf = false" in message(path, True)
    said = message(folder, False)
    assert "holds no checkpoint" in said
    assert "fix: set checkpoint.initial_load_in_hf = true" in said
    assert "no such folder" in message(tmp_path / "nowhere", False)
    said = message(checkpoint, False, model__args__n_layers=4)
    assert "model.args.n_layers = 4: " in said
    assert "fix: set model.args.n_layers = 3" in said
    assert "initial_load_path is not given" in message("", True)
    other = {"model__name": "qwen3", "model__args__head_dim": 8}
    said = message(checkpoint, False, **other)
    assert "holds weights of the family 'llama'" in said
    assert 'fix: set model.name = "llama"' in said
    said = message(folder, True, **other)
    assert "model_type is 'llama', not 'qwen3'\n  fix: set model.name" in said
    unfinished = checkpoint.rename(checkpoint.with_name("step-5.unfinished"))
    assert "is not a complete checkpoint" in message(unfinished, False)
