"""Layers that multiply in float8: which they are, and which jobs cannot have them."""

import dataclasses
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch._inductor
from torch import Tensor

from meshwright.commands.plan.simulate import plan_job
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.config.parallelism import ActivationCheckpoint, Compile, Float8, Parallelism
from meshwright.config.training import Training
from meshwright.models.decoder import Decoder
from meshwright.models.families.llama import LlamaArgs
from meshwright.parallelisms import data_parallel
from meshwright.parallelisms.activation_checkpoint import apply_ac
from meshwright.parallelisms.parallelize import apply_float8, parallelize
from meshwright.parallelisms.rules.precision import find_float8_layers
from meshwright.system import hardware
from meshwright.system.errors import ConfigError
from tests.helpers.operators import Operators
from tests.helpers.resolved import broken, resolved
from tests.helpers.tiny import TINY, plain_model

ON = Float8(enable=True, emulate=True)
LARGE = dataclasses.replace(TINY, dim=64, hidden_dim=96)  # multiples of 16, alone and cut in two
BATCH, ODD = (Training(seq_len=length, local_batch_size=1) for length in (16, 9))
WORDS = ("--model.tokenizer_path=bytes", "--model.args.vocab_size=258", "--float8.enable=true")

COMPILED = "--compile.enable=true"
ASYNC = "--parallelism.enable_async_tensor_parallel=true"


def layers_of(
    options: Float8 = ON, fp32_modules: tuple[str, ...] = (), args=TINY, **sections
) -> list[str]:
    config = JobConfig(float8=options, **sections)
    return find_float8_layers(config, args.table, fp32_modules)


def test_matrices_of_blocks_but_keys_and_values() -> None:
    found = layers_of()
    names = ("attention.wq", "attention.wo", *(f"feed_forward.w{n}" for n in (1, 2, 3)))
    assert found == [f"layers.{block}.{name}" for block in range(TINY.n_layers) for name in names]
    everything = layers_of(Float8(enable=True, emulate=True, filter_fqns=[]))
    assert len(everything) == len(found) + 2 * TINY.n_layers
    assert layers_of(Float8()) == []
    in_fp32 = ("layers.1", "layers.0.attention.wq")
    assert layers_of(fp32_modules=in_fp32) == [
        name for name in found if not name.startswith(in_fp32)
    ]


BY_TENSORS, BY_CONTEXT = (
    Parallelism(tensor_parallel_degree=4),
    Parallelism(context_parallel_degree=2),
)


@pytest.mark.parametrize(
    ("options", "sections", "says"),
    [
        ({"filter_fqns": ["wkv"]}, {}, "filter_fqns = 'wkv': is part of no layer's name"),
        ({"filter_fqns": ["layers"]}, {}, "leaves no layer"),
        ({"emulate": False}, {}, "a rank's part of layers.0.feed_forward.w1 is 66 x 32"),
        ({"emulate": False}, {"args": LARGE, "training": ODD}, "a rank has 9 tokens of a microb"),
        ({"emulate": False}, {"args": LARGE, "parallelism": BY_TENSORS}, "w1 is 24 x 64"),
        ({"emulate": False}, {"args": LARGE, "parallelism": BY_CONTEXT}, "a rank has 8 tokens"),
    ],
)
def test_layers_that_float8_cannot_have_are_refused(options, sections, says: str) -> None:
    assert layers_of(Float8(enable=True), args=LARGE, training=BATCH)
    sections = {"training": BATCH, "args": TINY} | sections
    args, options = sections.pop("args"), ON.model_copy(update=options)
    assert says in broken(JobConfig(float8=options, **sections), model=args)


def test_float8_needs_a_gpu_that_has_it_or_emulation() -> None:
    config = JobConfig(float8=Float8(enable=True))
    assert "compute capability 8.9" in broken(config, has_float8=False)
    assert not broken(config, has_float8=True)
    assert not broken(JobConfig(float8=ON), has_float8=False)


@pytest.mark.parametrize(
    ("capability", "hip", "wanted"),
    [((8, 6), None, False), ((8, 9), None, True), ((9, 0), None, True), ((9, 4), "6.2", False)],
)
def test_gpus_that_multiply_in_float8(monkeypatch, capability, hip, wanted: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert hardware.has_float8(torch.device("cuda")) == wanted
    assert not hardware.has_float8(torch.device("cpu"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--training.mixed_precision_param=float32"], "results of float8 products are bfloat16"),
        ([COMPILED, "--activation_checkpoint.mode=memory_budget"], "memory_budget': is not known"),
        ([COMPILED, ASYNC, "--parallelism.tensor_parallel_degree=2"], "not known to work with fl"),
    ],
)
def test_combinations_that_are_refused(words: list[str], says: str) -> None:
    assert says in broken(load_config([*WORDS, *words]))
    assert not broken(load_config([*WORDS, COMPILED, ASYNC]))  # idle on one rank


def test_jobs_that_cannot_have_it(monkeypatch) -> None:
    with pytest.raises(ConfigError, match="speed of float8 on GPUs only"):
        plan_job(load_config([*WORDS]), 1, is_gpu=False)
    split = ["--parallelism.pipeline_parallel_degree=2"]
    split += ["--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"]  # backward in two passes

    def pretend(version: str) -> None:
        for module in ("system.modules", "parallelisms.rules.stages"):
            monkeypatch.setattr(f"meshwright.{module}.torch_version", lambda: version)

    pretend("2.13.0")
    resolved(load_config([*WORDS, *split]), 2)
    pretend("2.11.0+cu130")
    with pytest.raises(ConfigError, match="torch 2.11.* cannot in float8 layers"):
        resolved(load_config([*WORDS, *split]), 2)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="torchao is not installed\n  fix: pip install"):
        resolved(load_config([*WORDS]), 1)


def float8_model(recipe: str, args: LlamaArgs = TINY, emulate: bool = True) -> Decoder:
    model = plain_model(args)
    options = Float8(enable=True, recipe_name=recipe, emulate=emulate)
    apply_float8(model, layers_of(options, args=args, training=BATCH), options)
    return model.bfloat16()


def rounded(x: Tensor, dim: int) -> Tensor:
    """`x` (float32) to e4m3 and back, with a power of two as the scale of each row along `dim`."""
    largest = x.abs().amax(dim, keepdim=True)
    scale = 2.0 ** (448 / largest).log2().floor()
    _, exponent = torch.frexp(x * scale)
    step = 2.0 ** (exponent.clamp(min=-5) - 4)  # 3 bits after the leading one; subnormals below
    return (x * scale / step).round() * step / scale


def test_products_are_those_of_rounded_rows() -> None:
    model = float8_model("rowwise")
    layer = model.layers["0"].feed_forward.w1
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 32, generator=generator).mul(3).bfloat16().requires_grad_()
    out = layer(x)
    grad = torch.randn(out.shape, generator=generator).bfloat16()
    out.backward(grad)
    a, w, g = x.detach().float(), layer.weight.detach().float(), grad.float()
    for got, wanted in (
        (out, rounded(a, 1) @ rounded(w, 1).t()),
        (x.grad, rounded(g, 1) @ rounded(w, 0)),
        (layer.weight.grad, rounded(g, 0).t() @ rounded(a, 0)),
    ):
        assert torch.allclose(got.detach().float(), wanted, rtol=2**-8, atol=1e-7)
    assert not torch.allclose(out.detach().float(), a @ w.t(), rtol=2**-6)


@pytest.mark.parametrize(("recipe", "is_equal"), [("rowwise", True), ("tensorwise", False)])
def test_a_tokens_result_depends_on_others_only_with_one_scale(recipe, is_equal) -> None:
    layer = float8_model(recipe).layers["0"].feed_forward.w1
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole, halves = layer(x), torch.cat([layer(part) for part in x.chunk(2)])
    assert torch.equal(whole, halves) == is_equal


def test_a_rank_without_rows_of_a_weight_measures_the_others() -> None:
    """It would raise before the all-reduce that other ranks wait in."""
    from meshwright.parallelisms.float8 import WeightScales

    class Layer:
        dtype = torch.float8_e4m3fn

        def __init__(self, rows: int) -> None:
            self.weight = torch.full((rows, 16), -7.0)

    layers = [Layer(0), Layer(2)]
    WeightScales(dict.fromkeys(layers), Mock(**{"size.return_value": 1}))(None, [torch.zeros(1)])
    assert layers[1].weight_scale == 64  # 448 / 7


def test_names_and_weights_stay() -> None:
    model = float8_model("rowwise")
    assert [*dict(model.named_parameters())] == [*dict(plain_model().named_parameters())]
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    assert {name for name, kind in kinds.items() if kind == "Float8Layer"} == {*layers_of()}
    assert kinds["output"] == "Projection"


@pytest.mark.parametrize(
    ("backend", "recipe", "keeps_casts"),
    [("inductor", "rowwise", True), ("aot_eager", "rowwise", False),
     ("inductor", "tensorwise", False), ("inductor", "", False)],
)  # fmt: skip
def test_compiled_rows_are_rounded_as_eager_ones(monkeypatch, backend, recipe, keeps_casts) -> None:
    """Of blocks; torch raises for an option that it does not know."""
    assert "emulate_precision_casts" in torch._inductor.list_options()
    model, seen = plain_model(), list[dict]()
    for block in model.layers.values():
        monkeypatch.setattr(block, "compile", lambda **options: seen.append(options))
    monkeypatch.setattr(model.output.loss, "compile", lambda name: None)
    monkeypatch.setattr(data_parallel, "apply_fsdp", lambda *_: "")
    alone = SimpleNamespace(size=lambda: 1, device_type="cuda")
    options = ON.model_copy(update={"recipe_name": recipe}) if recipe else Float8()
    parallelize(
        model,
        SimpleNamespace(world=alone, tp=alone, cp=alone, ep=None, stage=alone),
        JobConfig(
            training=Training(mixed_precision_param="bfloat16"),
            compile=Compile(enable=True, backend=backend),
            activation_checkpoint=ActivationCheckpoint(mode="none"),
            float8=options,
        ),
        float8_layers=layers_of(options),
    )
    assert [("options" in options) for options in seen] == [keeps_casts] * TINY.n_layers


@pytest.mark.parametrize(("recipe", "name"), [("rowwise", "amax"), ("tensorwise", "max")])
def test_by_op_scales_are_not_computed_again(recipe: str, name: str) -> None:
    pytest.importorskip("torchao")
    counts = []
    for mode in ("none", "selective"):
        model = plain_model(LARGE)
        float8 = Float8(enable=True, emulate=True, recipe_name=recipe)
        apply_float8(model, layers_of(float8, args=LARGE), float8)
        apply_ac(model.layers, ActivationCheckpoint(mode=mode))
        with Operators() as operators:
            model(torch.arange(32).view(2, 16)).square().sum().backward()
        counts.append(operators.counts[f"aten.{name}"])
    assert counts[0] == counts[1] > 0
