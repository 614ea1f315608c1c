"""Model folders of Hugging Face: in, out, and what is wrong with them."""

import json
import tomllib
from dataclasses import asdict
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright.checkpoint.conversion.hf_folder import check_args, find_family, find_tensors
from meshwright.models.config_json import FULL, SLIDING, Dimension
from meshwright.models.families import MODELS
from meshwright.models.rope_scaling import Yarn
from meshwright.system.errors import ConfigError
from meshwright.system.files import NamedPath
from tests.helpers.cli import export
from tests.helpers.families import family_of, two_of_each
from tests.helpers.hf import (
    CASES,
    load_hf,
    save_as_published,
    save_checkpoint,
    save_transformers,
    tensors_of,
    transformers_model,
)
from tests.helpers.job import assert_equal

V3_FORM = MODELS["deepseek_v3"].hf


@pytest.mark.parametrize("args", two_of_each(CASES))
def test_in_and_out_again_is_equal_to_the_bit(args, tmp_path, capsys) -> None:
    theirs = transformers_model(args)
    save_as_published(theirs, tmp_path / "hf", args, "30KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    ours = load_hf(tmp_path / "hf", args)
    tokens = torch.arange(2 * 50).view(2, 50) * 7 % args.vocab_size
    want = theirs(tokens).logits
    assert (ours(tokens) - want).abs().max() <= 1e-5 * want.abs().max()

    checkpoint = save_checkpoint(tmp_path, ours, args)
    out = tmp_path / "out"
    options = ["--dtype", "float32", "--max-shard-size", "30KB"]
    export([str(checkpoint), str(out), *options])
    assert len(list(out.glob("*.safetensors"))) > 2
    assert_equal(tensors_of(out), tensors_of(tmp_path / "hf"))
    again = AutoModelForCausalLM.from_pretrained(out, config=theirs.config)
    assert torch.equal(again(tokens).logits, want)
    said = capsys.readouterr().out
    count = len(family_of(args).hf.tensors(args))
    assert f"compared {count} tensors with the checkpoint's to the bit: equal" in said
    assert "compared logits of 256 tokens, in fp32, with transformers" in said


@pytest.mark.parametrize("args", CASES.values(), ids=CASES.keys())
def test_both_spellings_of_the_rotation_are_read(args, tmp_path) -> None:
    form = family_of(args).hf
    written = form.write_config(args, 64)
    wanted = {name: getattr(args.resolved, name) for name in form.read_config(written)}

    def read(config: dict) -> dict:
        return {name: found.value for name, found in form.read_config(config).items()}

    assert read(written) == wanted  # rope_theta, rope_scaling
    save_transformers(tmp_path, args)
    new = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in new
    assert read(new) == wanted


@pytest.mark.parametrize("name", MODELS)
def test_an_absent_key_has_the_default_of_transformers(name) -> None:
    form = MODELS[name].hf
    absent = ("rope_theta", "rope_scaling", "head_dim", "num_key_value_heads", "rms_norm_eps")
    absent += ("tie_word_embeddings",)
    written = form.write_config(CASES[f"{name}-gqa"], 64)
    written = {key: value for key, value in written.items() if key not in absent}
    written.pop("rope_parameters", None)
    spellings = ({}, {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 5}})
    for rope in spellings[:1] if form.nests_rope else spellings:
        found = {key: one.value for key, one in form.read_config(written | rope).items()}
        theirs = AutoConfig.for_model(**written, **rope)
        tables = theirs.rope_parameters
        tables = tables if form.nests_rope else dict.fromkeys((FULL, SLIDING), tables)
        assert found["rope_theta"] == tables[FULL]["rope_theta"]
        assert found.get("local_theta", found["rope_theta"]) == tables[SLIDING]["rope_theta"]
        assert found["n_kv_heads"] == theirs.num_key_value_heads
        assert found["norm_eps"] == theirs.rms_norm_eps
        assert found["tie_embeddings"] == theirs.tie_word_embeddings
        width = theirs.hidden_size // theirs.num_attention_heads
        if "kv_lora_rank" not in found:  # heads whose widths are keys of their own
            assert found["head_dim"] == (getattr(theirs, "head_dim", None) or width)


def test_what_follows_from_the_config_may_be_in_the_files_too(tmp_path) -> None:
    """A tied model's output once more, if it is the embedding; and rotary frequencies."""
    args = CASES["llama-tied"]
    folder = save_transformers(tmp_path, args, max_shard_size="1GB")
    stored = tensors_of(folder)
    assert "lm_head.weight" not in stored
    want = dict(load_hf(folder, args).named_parameters())
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(stored, folder / "model.safetensors")
    for name, parameter in load_hf(folder, args).named_parameters():
        assert torch.equal(parameter, want[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_exactly(tmp_path, dtype) -> None:
    transformers_model().to(dtype).save_pretrained(tmp_path, max_shard_size="30KB")
    assert {tensor.dtype for tensor in tensors_of(tmp_path).values()} == {dtype}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.arange(50).view(1, 50)
    want = theirs(tokens).logits
    assert (load_hf(tmp_path)(tokens) - want).abs().max() <= 1e-5 * want.abs().max()


def test_biases_of_the_choice_stay_fp32_beside_weights_in_bf16(tmp_path) -> None:
    args = CASES["deepseek_v3-gqa"]
    folder = save_transformers(tmp_path / "hf", args)
    checkpoint = save_checkpoint(tmp_path, load_hf(folder, args), args)
    export([str(checkpoint), str(tmp_path / "half"), "--dtype", "bfloat16"])
    before, state = tensors_of(folder), set[str]()
    for key, tensor in tensors_of(tmp_path / "half").items():
        state |= {key} if key.endswith(".e_score_correction_bias") else set()
        want = before[key] if key in state else before[key].bfloat16()
        assert tensor.dtype == want.dtype, key
        assert torch.equal(tensor, want), key
    assert len(state) == len(args.table.mixtures)


@pytest.mark.parametrize("case", ["qwen3_next-gqa", "qwen3_5_text-gqa"])
def test_tensors_that_transformers_leaves_out_are_named(tmp_path, caplog, case) -> None:
    """The published files of these families have layers for MTP by names that it has no use for."""
    args = CASES[case]
    folder = save_transformers(tmp_path / "hf", args, max_shard_size="1GB")
    want = load_hf(folder, args).state_dict()
    tensors = load_file(folder / "model.safetensors")
    extra = {"mtp.fc.weight": torch.ones(32, 64), "mtp.norm.weight": torch.ones(32)}
    save_file(tensors | extra, folder / "model.safetensors", {"format": "pt"})
    assert_equal(load_hf(folder, args).state_dict(), want)
    assert "2 tensors of mtp.*, mtp.fc.weight the first, left out" in caplog.text


def test_layers_that_predict_further_tokens_are_named_and_left_out(tmp_path, caplog) -> None:
    """DeepSeek-V3's files have one, after the last layer, and transformers leaves it out, too."""
    args = CASES["deepseek_v3-gqa"]
    folder = save_transformers(tmp_path / "hf", args, max_shard_size="1GB")
    want = load_hf(folder, args).state_dict()
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    extra = {"model.layers.3.eh_proj.weight": torch.ones(32, 64)}
    save_file(tensors | extra, folder / "model.safetensors", {"format": "pt"})
    assert_equal(load_hf(folder, args).state_dict(), want)
    assert "1 tensors, model.layers.3.eh_proj.weight the first, left out" in caplog.text
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    assert find_family(NamedPath("folder", folder), [*MODELS.values()]) is MODELS["deepseek_v3"]
    extra = {"model.layers.2.eh_proj.weight": torch.ones(32, 64)}
    save_file(tensors | extra, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="layers.2.eh_proj.weight, for which the model has no"):
        load_hf(folder, args)


@pytest.mark.parametrize("name", ["gemma3_text", "olmo3"])
def test_an_older_scaling_that_is_no_table_is_rejected(name: str) -> None:
    form = MODELS[name].hf
    written = form.write_config(CASES[f"{name}-gqa"], 64)
    with pytest.raises(ValueError, match="^rope_scaling is 'yarn', not a table$"):
        form.read_config({**written, "rope_scaling": "yarn"})


def test_odd_spellings_of_deepseek_are_read_as_transformers_reads_them(tmp_path) -> None:
    """Or rejected by their key."""
    written = V3_FORM.write_config(CASES["deepseek_v3-mscale"], 64)

    def value(key: str, **changes: object) -> object:
        return V3_FORM.read_config({**written, **changes})[key].value

    absent = {k: v for k, v in written.items() if k not in ("head_dim", "q_lora_rank")}
    assert V3_FORM.read_config(absent)["q_lora_rank"].value == 1536
    assert value("q_lora_rank", q_lora_rank=None) == 0
    assert V3_FORM.read_config({**written, "model_type": "kimi_k2"})["n_groups"].value == 4
    old = {**written["rope_scaling"], "type": "yarn"}
    del old["rope_type"]
    assert value("rope_scaling", rope_scaling=old) == CASES["deepseek_v3-mscale"].rope_scaling
    plain = {"rope_type": "default", "factor": 8.0, "low_freq_factor": 1.0}  # which says nothing
    assert value("rope_scaling", rope_scaling=plain) is None
    for key, wrong in {
        "head_dim": 3,
        "first_k_dense_replace": -1,
        "n_group": 1.5,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "rope_interleave": False,
        "attention_bias": True,
        "kv_lora_rank": 0,
    }.items():
        with pytest.raises(ValueError, match=f"^{key} is {wrong}|^{key} is '{wrong}'"):
            V3_FORM.read_config({**written, key: wrong})
    v2 = MODELS["deepseek_v2"].hf
    grouped = v2.write_config(CASES["deepseek_v2-groups"], 64)
    assert grouped["topk_method"] == "group_limited_greedy"
    assert v2.read_config({**grouped, "topk_method": "greedy"})["n_groups"].value == 1
    with pytest.raises(ValueError, match="topk_method is 'noaux_tc'"):
        v2.read_config({**grouped, "topk_method": "noaux_tc"})


@pytest.mark.parametrize("name", ["qwen3_moe-dense-first", "mixtral-gqa"])
def test_fused_experts_are_written_and_read(name, tmp_path, capsys) -> None:
    """As transformers has them in memory; a missing or a surplus tensor is refused."""
    args = CASES[name]
    theirs = transformers_model(args)
    theirs.save_pretrained(tmp_path / "hf")
    checkpoint = save_checkpoint(tmp_path, load_hf(tmp_path / "hf", args), args)
    out = tmp_path / "out"
    export([str(checkpoint), str(out), "--dtype", "float32", "--fused", "--max-shard-size", "30KB"])
    config = json.loads((out / "config.json").read_text())
    assert config["transformers_version"] == "5.0.0"  # 4.x doesn't read stacked experts
    now = tensors_of(out)
    assert now.keys() == {name for name, _ in theirs.named_parameters()}
    for key, parameter in theirs.named_parameters():
        assert torch.equal(now[key], parameter), key
    again = load_hf(out, args)
    for key, parameter in load_hf(tmp_path / "hf", args).named_parameters():
        assert torch.equal(parameter, dict(again.named_parameters())[key]), key


@pytest.mark.parametrize("fused", [[], ["--fused"]], ids=["one-by-one", "fused"])
def test_a_missing_or_surplus_expert_is_refused(fused, tmp_path) -> None:
    args = CASES["olmoe-gqa"]
    theirs = transformers_model(args)
    theirs.save_pretrained(tmp_path / "hf")
    checkpoint = save_checkpoint(tmp_path, load_hf(tmp_path / "hf", args), args)
    export([str(checkpoint), str(tmp_path / "out"), *fused])
    file = tmp_path / "out" / "model.safetensors"
    whole = load_file(file)
    key = next(name for name in whole if ".mlp.experts." in name and "down_proj" in name)
    for content, message in (
        ({k: v for k, v in whole.items() if k != key}, f"{key}, our layers.0.*is in none of"),
        (whole | {key.replace("layers.0", "layers.7"): whole[key].clone()}, "has no place"),
    ):
        save_file(content, file, {"format": "pt"})
        with pytest.raises(ConfigError, match=message):
            load_hf(tmp_path / "out", args)


def test_an_export_of_biases_is_refused(tmp_path) -> None:
    """Which would choose other experts than training did."""
    args = CASES["mixtral-gqa"]
    model = load_hf(save_transformers(tmp_path / "hf", args), args)
    model.layers["1"].feed_forward.bias[2] = 0.1
    checkpoint = save_checkpoint(tmp_path, model, args)
    with pytest.raises(ConfigError, match="layers.1.feed_forward.bias.*no place"):
        export([str(checkpoint), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_file_that_may_not_be_read_is_not_damaged(tmp_path) -> None:
    """safetensors would say that there is none."""
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    denied = Mock(side_effect=PermissionError(13, "Permission denied"))
    with (
        patch.object(Path, "open", denied),
        pytest.raises(ConfigError, match="model.safetensors cannot be read: Permission denied"),
    ):
        find_tensors(NamedPath("folder", tmp_path))


def test_the_fix_of_a_stretched_rotation_is_a_toml_that_has_it() -> None:
    yarn = Yarn(factor=4.0, original_seq_len=16, truncate=False)
    args = MODELS["gpt_oss"].flavors["debugmodel"]
    with pytest.raises(ConfigError) as error:
        check_args(args, {"rope_scaling": Dimension("rope_scaling", yarn)}, "config.json")
    toml = tomllib.loads(str(error.value).partition("fix: set ")[2])
    given = {key: value for key, value in asdict(yarn).items() if value is not None}
    assert toml == {"model": {"args": {"rope_scaling": given}}}
