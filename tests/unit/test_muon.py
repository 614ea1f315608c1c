"""Muon on one process: torch's own, roles of parameters, and bad input."""

import dataclasses

import pytest
import torch
from torch import nn

from meshwright.checkpoint.state import TrainingTensors
from meshwright.config.job_config import JobConfig
from meshwright.config.optimizer import Muon, Optimizer, ParameterGroup
from meshwright.models.parameter import Parameter
from meshwright.system.errors import ConfigError
from meshwright.train.optim.matrices import orthogonalise
from meshwright.train.optim.optimizers import build_optimizer
from meshwright.train.optim.registry import OPTIMIZERS, MatrixWise, check_optimizers
from meshwright.train.optim.update import set_learning_rate, update
from meshwright.train.resolve_model import extend_by
from tests.campaigns.new_user import example
from tests.helpers.optimizers import set_gradients
from tests.helpers.resolved import resolved
from tests.helpers.tiny import TINY, plain_model

GO = torch.tensor(False)
TABLE = TINY.table.parameters


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    ("scale", "of_torch"), [("match_rms_adamw",) * 2, ("spectral", "original")]
)
def test_it_is_torchs_on_one_process(nesterov, scale, of_torch) -> None:
    """But for rounding: torch uses fused operations, and norms in bf16."""
    model, theirs = plain_model(), plain_model()
    own = Muon(momentum=0.9, nesterov=nesterov, steps=4, lr_scale=scale)
    config = Optimizer(name="muon", lr=0.01, weight_decay=0.2, muon=own)
    optimizer = build_optimizer(model.named_parameters(), config, TABLE)
    matrices = [p for name, p in theirs.named_parameters() if TABLE[name].role == "matrix"]
    options = {"momentum": 0.9, "nesterov": nesterov, "ns_steps": 4, "adjust_lr_fn": of_torch}
    muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.2, **options)
    others = [p for name, p in theirs.named_parameters() if TABLE[name].role != "matrix"]
    decays = [0.2 if p.ndim > 1 else 0.0 for p in others]
    groups = [{"params": [p], "weight_decay": d} for p, d in zip(others, decays, strict=True)]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for seed in range(3):
        set_learning_rate(optimizer, 0.01)
        set_gradients(model, seed)
        set_gradients(theirs, seed)
        update(optimizer, GO)
        muon.step()
        adamw.step()
    start = dict(plain_model().named_parameters())
    for (name, got), want in zip(model.named_parameters(), theirs.parameters(), strict=True):
        if TABLE[name].role == "matrix":
            error = (got - want).norm() / (want - start[name]).norm()
            assert error < 2**-7, name  # an element of bf16 that falls to the other side: 2**-8
        else:
            assert torch.equal(got, want), name


def test_gradients_are_divided_before_their_running_mean() -> None:
    """By a power of 2, which rounds nothing; a mean of gradients divided alike looks the same."""
    models = plain_model(), plain_model()
    config = Optimizer(name="muon", lr=0.01)
    optimizers = [build_optimizer(model.named_parameters(), config, TABLE) for model in models]
    for seed, divisor in enumerate((1.0, 4.0)):
        for model in models:
            set_gradients(model, seed)
        for parameter in models[1].parameters():
            assert parameter.grad is not None
            parameter.grad /= divisor
        update(optimizers[0], GO, torch.tensor(divisor))
        update(optimizers[1], GO)
    for (name, got), want in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(got, want), name


def test_singular_values_come_near_to_one() -> None:
    torch.manual_seed(0)
    for shape in ((3, 32, 32), (2, 16, 64), (2, 64, 16)):
        found = torch.linalg.svdvals(orthogonalise(torch.randn(shape), Muon(steps=8)))
        assert ((found > 0.6) & (found < 1.3)).all()
    assert not orthogonalise(torch.zeros(1, 4, 4), Muon()).any()


def test_experts_and_heads_are_matrices_each() -> None:
    """(E, F, D) as E matrices, and the rows of a head as one."""
    config = Optimizer(name="muon", lr=0.1, weight_decay=0.0, muon=Muon(dtype="float32"))
    experts = nn.Parameter(torch.zeros(3, 6, 4))
    experts.grad = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0))
    table = {"w": Parameter((3, 6, 4), "colwise", 0.02)}
    assert table["w"].role == "experts"
    update(build_optimizer([("w", experts)], config, table), GO)
    alone = [nn.Parameter(torch.zeros(6, 4)) for _ in range(3)]
    for one, gradient in zip(alone, experts.grad, strict=True):
        one.grad = gradient.clone()
    one_by_one = {str(i): Parameter((6, 4), "colwise", 0.02) for i in range(3)}
    optimizer = build_optimizer([(str(i), p) for i, p in enumerate(alone)], config, one_by_one)
    update(optimizer, GO)
    assert torch.equal(experts, torch.stack([*alone]))

    name = "layers.0.attention.wq.weight"
    split = config.model_copy(update={"muon": Muon(dtype="float32", split_heads=True)})
    assert [TABLE[name.replace("wq", kind)].heads for kind in ("wq", "wk", "wo")] == [4, 2, 1]
    queries = nn.Parameter(torch.zeros(TABLE[name].shape))
    queries.grad = torch.randn(queries.shape, generator=torch.Generator().manual_seed(1))
    given = queries.grad.clone()
    update(build_optimizer([(name, queries)], split, TABLE), GO)
    want = orthogonalise(given.view(4, 8, 32), Muon()).view(32, 32)
    scale = 0.1 * 0.2 * 32**0.5
    torch.testing.assert_close(queries.detach(), -scale * want, rtol=1e-5, atol=1e-6)


def test_the_role_chooses_and_a_group_overrules() -> None:
    groups = [
        ParameterGroup(parameters=["layers.0.*.w[123].weight"], optimizer="AdamW"),
        ParameterGroup(parameters=["output.weight"], optimizer="muon"),
    ]
    config = Optimizer(name="muon", groups=groups)
    found = check_optimizers(config, TABLE)
    assert found["tok_embeddings.weight"] == found["norm.weight"] == "AdamW"
    assert found["layers.0.feed_forward.w1.weight"] == "AdamW"
    assert found["output.weight"] == found["layers.0.attention.wo.weight"] == "muon"
    assert check_optimizers(Optimizer(name="Adam"), TABLE)["norm.weight"] == "Adam"
    assert check_optimizers(Optimizer(name="muon"), TABLE)["output.weight"] == "AdamW"
    assert {one.role for one in TABLE.values()} == {"embedding", "output", "norm", "matrix"}


def group(pattern: str, optimizer: str) -> dict[str, object]:
    return {"groups": [ParameterGroup(parameters=[pattern], optimizer=optimizer)]}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "Muon"}, "optimizer.name = 'Muon': no such optimizer\n  fix: did you mean muon"),
        (group("norm.*", "muons"), "groups.0.optimizer = 'muons': no such optimizer"),
        (group("norm.*", "muon"), r"optimizer = 'muon': is for matrices, and norm.weight has"),
        ({"early_step_in_backward": True}, "early_step_in_backward = true: muon needs whole"),
    ],
)
def test_bad_input_is_one_error(options, says) -> None:
    config = Optimizer(**{"name": "muon"} | options)
    job = JobConfig(model={"tokenizer_path": "bytes"}, training={"max_norm": float("inf")})
    with pytest.raises(ConfigError, match=says):  # before any rank starts
        resolved(job.model_copy(update={"optimizer": config}), 1)


def test_a_parameter_whose_role_is_unknown_needs_a_group() -> None:
    table = {"conv.weight": Parameter((4, 4, 3, 3), "colwise", 0.02)}
    with pytest.raises(ConfigError, match=r"conv.weight of shape .* has no role .*\n  fix: add"):
        check_optimizers(Optimizer(name="muon"), table)
    assert check_optimizers(Optimizer(), table) == {"conv.weight": "AdamW"}
    chosen = Optimizer(name="muon", **group("conv.*", "Adam"))
    assert check_optimizers(chosen, table) == {"conv.weight": "Adam"}


def test_coefficients_are_three() -> None:
    with pytest.raises(ValueError, match="must be three numbers.*these are 2"):
        Muon(coefficients=[1.0, 2.0])


def test_state_that_is_asked_for_changes_no_weight(monkeypatch) -> None:
    """torch takes a step of gradients 0 for it, of which a direction may be no number."""
    nan = MatrixWise(lambda matrices, _: matrices / matrices.norm(), lambda *_: 1.0)
    monkeypatch.setitem(OPTIMIZERS, "nan", nan)
    model = plain_model()
    optimizer = build_optimizer(model.named_parameters(), Optimizer(name="nan"), TABLE)
    saved = TrainingTensors(model, optimizer, 0).state_dict()
    assert not saved["optimizer.state.layers.0.attention.wq.weight.momentum"].any()
    for (name, got), want in zip(model.named_parameters(), plain_model().parameters(), strict=True):
        assert torch.equal(got, want), name


def test_a_module_of_the_users_adds_one(tmp_path, monkeypatch) -> None:
    """The one of docs/extending.md."""
    (tmp_path / "mine.py").write_text(example("optimizer"), "utf-8")
    monkeypatch.setattr("meshwright.train.optim.registry.OPTIMIZERS", OPTIMIZERS)
    before = dict(OPTIMIZERS)
    try:
        extend_by(str(tmp_path / "mine.py"))
        (name,) = OPTIMIZERS.keys() - before.keys()
        config = Optimizer(name=name, lr=0.5, weight_decay=0.0, muon=Muon(momentum=0.0))
        weight = nn.Parameter(torch.zeros(2, 2))
        weight.grad = torch.tensor([[3.0, -4.0], [0.0, 1.0]])
        table = {"w": dataclasses.replace(TABLE["layers.0.feed_forward.w1.weight"], shape=(2, 2))}
        update(build_optimizer([("w", weight)], config, table), GO)
        largest = weight.grad / 4.0
        torch.testing.assert_close(weight.detach(), -0.5 * largest)
    finally:
        for added in OPTIMIZERS.keys() - before.keys():
            del OPTIMIZERS[added]
