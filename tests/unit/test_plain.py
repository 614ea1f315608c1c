"""The plain decoder and optimizers that `prove` trusts, against transformers, torch and our own."""

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.commands.prove import plain_decoder, reference
from meshwright.commands.prove.checked import Checked
from meshwright.commands.prove.plain_batch import read_batch
from meshwright.commands.prove.plain_decoder import FORMS, UNCOUNTED, angles
from meshwright.commands.prove.plain_optimizer import PlainMuon, optimizers, schedule
from meshwright.commands.prove.reference_steps import STEP_BOUND, STORED_BOUND, decay_bound
from meshwright.commands.prove.weights import BRANCH_SCALE, calm_post_norms
from meshwright.config.job_config import Average, JobConfig
from meshwright.config.loader import load_config
from meshwright.config.optimizer import Muon, Optimizer, ParameterGroup
from meshwright.config.training import BadSteps, Experts, LRScheduler, Training
from meshwright.datasets.samples import Sample
from meshwright.models.args import DecoderArgs
from meshwright.models.decoder import Decoder
from meshwright.models.families import FAMILIES, MODELS
from meshwright.models.loss import IGNORE
from meshwright.train.optim.schedules import warmup_stable_decay
from tests.helpers.families import cases, family_of, small, two_of_each
from tests.helpers.hf import in_transformers, random_model, their_tensors
from tests.helpers.plain import Recorded, plain_loss, some_batch

CASES = cases(vocab_size=131)
PROVE = Path(reference.__file__).parent


def assert_close(got: torch.Tensor, want: torch.Tensor, name: str, bound: float = 1e-5) -> None:
    error = (got - want).norm() / want.norm()
    assert error <= bound, f"{name}: {error:.1e}"


@pytest.mark.parametrize("args", two_of_each(CASES))
def test_every_family_is_the_plain_decoder(args: DecoderArgs) -> None:
    model, routing = random_model(args), Recorded()
    model.routing, batch = routing, some_batch(args.vocab_size, with_documents=True)
    labels = batch.labels.where(batch.labels >= 0, IGNORE)
    loss = model(batch.tokens, labels, documents=batch.documents.int()) / (labels >= 0).sum()
    loss.backward()
    want, gradients, _ = plain_loss(model, batch, routing)
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, gradients[name], name)


@pytest.mark.parametrize("args", CASES.values(), ids=CASES.keys())
def test_every_family_has_the_plain_shapes(args: DecoderArgs) -> None:
    with torch.device("meta"):
        model = Decoder(args, 8)
    checked, name = Checked(), family_of(args).name
    reference.compare_shapes(checked, name, model)
    assert checked.failures == []
    del model.layers["1"].attention.wo
    model.norm = torch.nn.LayerNorm(3, bias=False)
    reference.compare_shapes(checked, name, model)
    names = [f"layers.1.attention.wo.{kind}" for kind in ("bias", "weight")]
    first, *others = [name for name in names if name in args.table.parameters]
    line = f"shape of {first}: absent instead of ({args.dim},"
    assert checked.failures[0].startswith(line)
    assert checked.failures[0].endswith(f"), and {1 + len(others)} more")


def test_spikes_are_the_plain_ones() -> None:
    for limit, window in ((6.0, 128), (1.0, 2), (2.5, 30)):
        checked, config = Checked(), BadSteps(spike_std=limit, spike_window=window)
        reference.compare_spikes(checked, config)
        assert checked.failures == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "spikes", lambda values, *_: [False] * len(values))
        reference.compare_spikes(checked, config)
    assert checked.failures == ["loss spike in step 36 of 80: one instead of none"]
    reference.compare_spikes(checked := Checked(), BadSteps())
    assert checked.failures == []


@pytest.mark.parametrize(
    "name",
    [
        "llama-mha-tied-scaled",
        "olmo2-gqa",
        "qwen3_moe-dense-first",
        "deepseek_v2-groups",
        "deepseek_v2-mscale",
        "deepseek_v3-gqa",
        "deepseek_v3-mscale",
    ],
)
def test_the_plain_decoder_is_transformers(name: str) -> None:
    model, routing = random_model(CASES[name]), Recorded()
    theirs = in_transformers(model).double()
    model.routing, batch = routing, some_batch(model.args.vocab_size)
    model(batch.tokens)
    logits = theirs(batch.tokens).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=UNCOUNTED)
    loss.backward()
    want, gradients, _ = plain_loss(model, batch, routing)
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)  # their angles are in fp32
    found = {name: p.grad for name, p in theirs.named_parameters()}
    for name, gradient in their_tensors(model, gradients).items():
        assert_close(found[name], gradient, name, 1e-6)


def test_every_family_and_dimension_that_ships_is_known() -> None:
    assert {f"meshwright.models.families.{name}" for name in FORMS} == {*FAMILIES}
    known = re.findall(r'"(\w+)"', Path(plain_decoder.__file__).read_text())
    # of the table of parameters alone, which the weights follow
    shapes = {"vocab_size", "hidden_dim", "n_experts", "n_active", "expert_dim", "n_dense_layers"}
    for name in FORMS:
        fields = {field.name for field in dataclasses.fields(MODELS[name].args)}
        assert fields <= {*known} | shapes, name


def test_every_key_that_changes_a_step_is_read_or_named_as_not_checked() -> None:
    """A new one is to be decided on."""
    files = ("plain_decoder", "plain_optimizer", "reference", "reference_steps")
    text = "".join((PROVE / f"{name}.py").read_text() for name in files)
    elsewhere = {
        "early_step_in_backward",  # which cases have, and the reference has not
        *("muon", "groups"),  # tables
    }
    for section in (Optimizer, Muon, ParameterGroup, LRScheduler, Experts, Average, BadSteps):
        for key in section.model_fields:
            is_read = re.search(rf'[."]{key}\b', text) is not None
            assert is_read != (key in elsewhere) or key in ("muon", "groups"), (section, key)


def test_the_plain_files_import_nothing_that_they_judge() -> None:
    for name in ("plain_decoder", "plain_optimizer"):
        text = (PROVE / f"{name}.py").read_text()
        modules = re.findall(r"^\s*(?:from|import) (meshwright\.\S+)", text, re.MULTILINE)
        own = ("meshwright.config.", "meshwright.commands.prove.plain_decoder")
        assert modules
        assert all(module.startswith(own) for module in modules), modules


def test_muon_by_singular_values_is_torchs() -> None:
    """Which multiplies in bf16: to its rounding."""
    torch.manual_seed(0)
    for shape in ((6, 4), (4, 10)):
        weight = torch.randn(shape)
        theirs, ours = (
            torch.nn.Parameter(weight.clone().to(t)) for t in (torch.float, torch.double)
        )
        muon = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1, momentum=0.9)
        group = {"params": [ours], "lr": 0.1, "weight_decay": 0.1, "heads": 1}
        plain = PlainMuon([group], Muon(momentum=0.9, lr_scale="spectral"))
        for _ in range(3):
            theirs.grad = torch.randn(shape)
            ours.grad = theirs.grad.double()
            muon.step()
            plain.step()
        assert_close(theirs.detach() - weight, ours.detach() - weight, str(shape), 0.02)


@pytest.mark.parametrize("seed", range(40))
def test_schedules_are_the_plain_one(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*choices: object) -> object:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    steps = draw(1, 7, 100, 10_000)
    ratio = draw(None, 0.0, 0.1, 0.55, 1.0)
    config = LRScheduler(
        warmup_steps=draw(0, 1, 5, 200),
        total_steps=draw(None, 50, 20_000),
        decay_ratio=ratio,
        decay_start=draw(None, 5, 60, 9_000) if ratio is None else None,
        decay_type=draw("linear", "sqrt", "cosine"),
        min_lr_factor=draw(0.0, 0.1, 1.0),
    )
    total = config.total_steps or steps
    for step in {1, 2, 5, 6, steps // 2, steps - 1, steps, steps + 3} - {0, -1}:
        got = warmup_stable_decay(step, total, config)
        assert got == pytest.approx(schedule(step, steps, config), abs=1e-12), (step, config)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--model.flavor=llama3.1_405b --training.seq_len=16384",
        "--model.name=qwen3 --model.flavor=qwen3_0.6b --training.seq_len=40960",
        "--model.args.rope_theta=10.0 --model.args.head_dim=256",
        "--model.args.rope_theta=1e9",
        "--model.args.rope_scaling.factor=64.0 --model.args.rope_scaling.high_freq_factor=1.5",
    ],
)
def test_the_rotary_table_is_within_rounding(words: str) -> None:
    config, checked = load_config(words.split()), Checked()
    args = reference.resolve_model(config)[1]
    few = dataclasses.replace(args, n_layers=1, vocab_size=8, hidden_dim=8)  # the same angles
    with torch.device("meta"):
        decoder = Decoder(few, config.training.seq_len)
    assert decoder.tok_embeddings.weight.is_meta
    reference.compare_rope(checked, config.model.name, decoder)
    assert checked.failures == []
    # and with a base that is 0.1 % off it is not
    wrong = dataclasses.replace(args, rope_theta=args.rope_theta * 1.001)
    with pytest.MonkeyPatch.context() as patch:
        values = dataclasses.asdict(wrong)
        patch.setattr(reference, "angles", lambda name, _, *at: angles(name, values, *at))
        reference.compare_rope(checked, config.model.name, decoder)
    assert checked.failures[0].startswith("RoPE at position ")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("", []),
        ("--optimizer.name=muon", ["optimizer.muon.dtype = bfloat16"]),
        (
            "--optimizer.name=muon --optimizer.muon.steps=20 --optimizer.muon.dtype=float32",
            ["updates by Muon in 20 steps, in which rounding grows"],
        ),
        (
            "--training.dtype=bfloat16 --float8.enable=true",
            ["training.dtype = bfloat16", "float8.enable"],
        ),
        (
            '--optimizer.name=Lion --optimizer.groups=[{parameters=["a"],optimizer="Adam"}]',
            ['updates by your optimizer "Lion"'],
        ),
    ],
)
def test_options_without_a_plain_counterpart_are_named(words: str, named: list[str]) -> None:
    assert reference.not_modeled(load_config(words.split())) == named


def test_an_optimizer_of_the_users_own_leaves_out_its_parameters_alone() -> None:
    group = ParameterGroup(parameters=["b"], optimizer="Lion")
    weights = {name: torch.ones(2, 2) for name in "ab"}
    found = [one for one, _ in optimizers(weights, {}, Optimizer(groups=[group]))]
    assert isinstance(found[0], torch.optim.AdamW)
    assert found[1] is None


def test_a_model_of_the_users_own_is_not_checked(monkeypatch) -> None:
    monkeypatch.setitem(MODELS, "mine", dataclasses.replace(MODELS["llama"], name="mine"))
    config = JobConfig(model={"name": "mine"})
    checked = reference.compare_with_plain(config, config)
    assert checked.verdict == "not checked"
    assert checked.row.startswith('not checked: the model "mine" is not one of llama')
    assert math.isclose(checked.errors["learning rate"], 0.0)


@pytest.mark.parametrize("mask_documents", [False, True])
def test_a_plain_batch_knows_padding_and_where_documents_begin(mask_documents: bool) -> None:
    sample = Sample(np.arange(1, 10, dtype=np.uint32), lengths=[4, 3, 2], padding=2)
    batch = read_batch([sample], Training(mask_documents=mask_documents), 2)
    assert batch.is_token.tolist() == [[True] * 7 + [False]]
    labels = [2, 3, 4, 5, 6, 7, 8, plain_decoder.UNCOUNTED]
    if mask_documents:
        labels[3] = labels[6] = plain_decoder.UNCOUNTED
    assert batch.labels.tolist() == [labels]
    second = batch.further[1]  # depth
    if mask_documents:
        assert second.tokens.tolist() == [[3, 4, 0, 0, 7, 0, 0, 0]]
        assert second.is_token.tolist() == [[True, True, False, False, True] + [False] * 3]
    else:
        assert second.tokens.tolist() == [[3, 4, 5, 6, 7, 0, 0, 0]]
        assert second.labels.tolist() == [[4, 5, 6, 7, 8] + [plain_decoder.UNCOUNTED] * 3]


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("llama", r"never"),
        ("olmo2", r"layers\.\d\.(attention|ffn)_norm\.weight"),
        ("gemma2", r"layers\.\d\.post_(attention|ffn)_norm\.weight"),
        # full_every = 2, and norms are at the beginning in layers with linear attention
        ("olmo_hybrid", r"layers\.1\.(attention|ffn)_norm\.weight"),
    ],
)
def test_a_proof_calms_the_norms_at_the_end_of_blocks_only(name: str, ends: str) -> None:
    model = random_model(small(MODELS[name], vocab_size=131))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    calm_post_norms(model)
    for n, after in model.named_parameters():
        offset = int(model.table.parameters[n].is_offset)
        if re.fullmatch(ends, n):
            assert_close(after + offset, (before[n] + offset) * BRANCH_SCALE, n)
        elif n != "tok_embeddings.weight":
            assert torch.equal(after, before[n]), n
    is_scaled = not torch.equal(before["tok_embeddings.weight"], model.tok_embeddings.weight)
    assert is_scaled == name.startswith("olmo")


@pytest.mark.parametrize("seed", range(5))
def test_the_bound_of_adam_holds_where_decay_cancels_the_gradient(seed: int) -> None:
    torch.manual_seed(seed)
    start, decay = torch.randn(1000) * 0.02, 0.1
    optimizers = []
    for dtype in (torch.float32, torch.float64):
        weight = nn.Parameter(start.to(dtype, copy=True))
        optimizers.append(torch.optim.Adam([weight], lr=1e-3, weight_decay=decay, foreach=False))
    single, double = (adam.param_groups[0]["params"][0] for adam in optimizers)
    for step in range(1, 5):
        before = double.detach().clone()
        with torch.no_grad():
            single.copy_(double)  # as a step of prove begins with the trainer's weights
            double.copy_(single)
        gradient = -decay * single.detach() * (1 + 1e-4 * torch.randn(1000))
        single.grad, double.grad = gradient, gradient.double()
        for adam in optimizers:
            adam.step()
        change = double.detach() - before
        error = (single.detach().double() - double.detach()).norm() / change.norm()
        stored = STORED_BOUND * before.norm() / change.norm()
        assert error < STEP_BOUND + stored + decay_bound(optimizers[1], change)
        assert error > STEP_BOUND + stored, step  # which holds for AdamW
