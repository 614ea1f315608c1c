"""Parameter groups by name, and every optimizer of the table held to its contract."""

import io

import pytest
import torch
from torch import nn

from meshwright.checkpoint.state import TrainingTensors
from meshwright.commands.prove.shrink import shrink
from meshwright.config.job_config import JobConfig
from meshwright.config.optimizer import Optimizer, ParameterGroup
from meshwright.models.decoder import Decoder
from meshwright.models.families.llama import FLAVORS
from meshwright.system.errors import ConfigError
from meshwright.train.optim import registry
from meshwright.train.optim.in_backward import OptimizerInBackward
from meshwright.train.optim.optimizers import build_optimizer, check_state, found
from meshwright.train.optim.registry import OPTIMIZERS, ElementWise, fitted_groups, names_by_group
from meshwright.train.optim.update import set_learning_rate, update
from tests.helpers.optimizers import GROUPS, plain_groups, set_gradients
from tests.helpers.resolved import resolved
from tests.helpers.tiny import SEQ_LEN, TINY, plain_model

GO, HOLD = torch.tensor(False), torch.tensor(True)
NAMES = list(TINY.table.parameters)
LRS = (1e-2, 3e-3, 5e-4)


def options(name: str, **values: object) -> Optimizer:
    config = Optimizer(lr=LRS[0], weight_decay=0.1, groups=GROUPS, **values)
    return config.model_copy(update={"name": name})  # unchecked: the recipe's is no name of ours


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies of all that an update may change."""
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}.{key}"] = value.clone()
    return found


@pytest.fixture(params=OPTIMIZERS)
def name(request: pytest.FixtureRequest) -> str:
    """An entry of the table."""
    return str(request.param)


@pytest.fixture
def element_wise(name: str) -> str:
    if not isinstance(OPTIMIZERS[name], ElementWise):
        pytest.skip("the contract asks it of others alone")
    return name


def build(model: Decoder, config: Optimizer) -> torch.optim.Optimizer:
    return build_optimizer(model.named_parameters(), config, TINY.table.parameters)


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("decay_norm_and_bias", [False, True])
def test_groups_are_those_of_plain_torch(element_wise, is_early, decay_norm_and_bias) -> None:
    model, theirs = plain_model(), plain_model()
    config = options(element_wise, decay_norm_and_bias=decay_norm_and_bias)
    optimizer = build(model, config)
    groups = plain_groups(theirs, 0.1, norm_decay=0.1 if decay_norm_and_bias else 0.0)
    plain = found(OPTIMIZERS[element_wise].build)([group for group, _ in groups], config)
    assert plain.defaults.get("betas") in (None, (config.beta1, config.beta2))
    assert plain.defaults.get("eps") in (None, config.eps)
    early = OptimizerInBackward(optimizer) if is_early else None
    tokens = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN)
    for lr in LRS:
        set_learning_rate(optimizer, lr)
        if early is not None:
            early.begin(GO)
        for each in (model, theirs):
            each(tokens).square().mean().backward()
        if early is None:
            update(optimizer, GO)
        for group, (_, scale) in zip(plain.param_groups, groups, strict=True):
            group["lr"] = lr * scale
        plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
    for (key, got), want in zip(model.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(got, want), key


def test_an_update_that_is_held_back_changes_no_bit(name) -> None:
    model = plain_model()
    optimizer = build(model, options(name))
    set_gradients(model, 1)
    update(optimizer, HOLD)  # the first too, which makes the state
    first = tensors_of(model, optimizer)
    for key, parameter in plain_model().named_parameters():
        assert torch.equal(first.pop(key), parameter), key
    assert not any(state.any() for state in first.values())
    first |= dict(plain_model().named_parameters())
    update(optimizer, GO)
    before = tensors_of(model, optimizer)
    assert all(not torch.equal(before[key], first[key]) for key in first)
    for parameter in model.parameters():
        parameter.grad.fill_(float("nan"))
    update(optimizer, HOLD)
    after = tensors_of(model, optimizer)
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_gradients_are_divided_on_the_way(name) -> None:
    def trained(steps: list[tuple[float, torch.Tensor | None]]) -> dict[str, torch.Tensor]:
        """By steps, each with a factor on the gradients, and a divisor."""
        model = plain_model()
        optimizer = build(model, options(name))
        for seed, (factor, divisor) in enumerate(steps):
            set_gradients(model, seed)
            for parameter in model.parameters():
                parameter.grad *= factor
            update(optimizer, GO, divisor)
        return tensors_of(model, optimizer)

    four = torch.tensor(4.0)
    want = trained([(1, None), (1, None)])
    for steps in ([(4, four), (4, four)], [(4, four), (1, None)]):  # none is left to the next step
        found = trained(steps)
        assert all(torch.equal(found[key], want[key]) for key in want)


def test_every_state_is_saved_and_comes_back_into_other_groups(name) -> None:
    """A checkpoint of a job with one group for all, as from before there were groups."""
    old_model, model = plain_model(), plain_model(seed=1)
    one_group = options(name, decay_norm_and_bias=True).model_copy(update={"groups": []})
    old = build(old_model, one_group)
    new = build(model, options(name))
    num_kinds = 1 if isinstance(OPTIMIZERS[name], ElementWise) else 2
    assert (len(old.param_groups), len(new.param_groups)) == (num_kinds, 3 + num_kinds)
    set_gradients(old_model, 1)
    update(old, GO)
    saved = TrainingTensors(old_model, old, 0).state_dict()
    wanted = {
        f"optimizer.state.{key}.{slot}"
        for key, parameter in old_model.named_parameters()
        for slot in old.state[parameter]
    }
    assert {key for key in saved if key.startswith("optimizer.")} == wanted
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    TrainingTensors(model, new, 0).load_state_dict(torch.load(file, weights_only=True))
    want, got = tensors_of(old_model, old), tensors_of(model, new)
    assert all(torch.equal(want[key], got[key]) for key in want)
    set_learning_rate(new, 1.0)
    found = {(group["lr"], group["weight_decay"]) for group in new.param_groups}
    assert found == {(0.25, 0.1), (0.5, 0.0), (1.0, 0.0), (1.0, 0.1)}


def test_state_that_a_checkpoint_would_drop_is_an_error(name) -> None:
    model = plain_model()
    optimizer = build(model, options(name))
    set_gradients(model, 1)
    update(optimizer, GO)
    optimizer.state[model.norm.weight]["count"] = 3
    with pytest.raises(TypeError, match=r"optimizer state.norm.weight.count is of type int"):
        TrainingTensors(model, optimizer, 0).state_dict()


def test_a_group_may_decay_norms() -> None:
    own = Optimizer(groups=[ParameterGroup(parameters=["*norm*"], weight_decay=0.3)])
    assert registry.settings_of("norm.weight", TINY.table.parameters["norm.weight"], own)[1:] == (
        1.0,
        0.3,
    )


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        ([["layer.*"]], r"groups.0.parameters = 'layer.\*': matches no parameter\n  fix: their"),
        ([["norm.*"], ["*norm.weight", "bias"]], "groups.1.parameters = 'bias': matches no"),
        ([["*norm.weight"], ["norm.*"]], r"groups.1.parameters = \['norm.\*'\]: .*before it"),
    ],
)
def test_a_group_that_gets_no_parameter_is_refused(patterns, says) -> None:
    with pytest.raises(ConfigError, match=says):
        names_by_group([ParameterGroup(parameters=each) for each in patterns], NAMES)


def test_groups_of_a_larger_model_are_fitted_to_a_smaller() -> None:
    """As `meshwright prove` does."""
    patterns = [["layers.7.*"], ["layers.[0-3]*", "layers.9.*"], ["layers.*"], ["norm.*"]]
    groups = [ParameterGroup(parameters=each, lr_scale=0.5) for each in patterns]
    fitted = fitted_groups(groups, NAMES)
    assert [group.parameters for group in fitted] == [["layers.[0-3]*"], ["norm.*"]]
    assert len(names_by_group(fitted, NAMES)) == 2
    large = FLAVORS["llama3_8b"]
    resolved(shrink(JobConfig(optimizer=Optimizer(groups=groups)), large), 1)


def test_a_step_of_torchs_unfused_optimizer_is_as_torchs(element_wise) -> None:
    """It updates parameters in place, which autograd allows only where it does not record."""
    model, theirs = plain_model(), plain_model()
    kind = type(build(model, options(element_wise)))
    (of_torch,) = kind.__bases__  # `without_compiler` makes a subclass
    if of_torch is torch.optim.Optimizer:
        pytest.skip("torch has none of this kind")
    for each, optimizer in ((model, kind), (theirs, of_torch)):
        optimizer = optimizer(each.parameters(), lr=0.01)
        for seed in range(2):
            set_gradients(each, seed)
            optimizer.step()
            optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in each.parameters())
    assert all(map(torch.equal, model.parameters(), theirs.parameters()))


class Factored(torch.optim.Optimizer):
    """As somebody may write who doesn't know of shards: a state for each row."""

    def __init__(self, parameters, lr: float, state) -> None:
        super().__init__(parameters, {"lr": lr})
        self._new_state = state

    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["r"] = self._new_state(parameter)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (lambda p: p.new_zeros(p.shape[0]), "keeps 'r' of tok_embeddings.weight: of shape (131,)"),
        (lambda p: 3, "keeps 'r' of tok_embeddings.weight: int"),
        (torch.zeros_like, ""),
        (lambda p: torch.zeros(()), ""),
    ],
)
def test_state_that_no_checkpoint_gives_back_is_rejected(monkeypatch, state, words: str) -> None:
    """Instead of a checkpoint that can't be resumed."""
    entry = ElementWise(lambda groups, config: Factored(groups, config.lr, state))
    monkeypatch.setitem(OPTIMIZERS, "factored", entry)
    model = plain_model()
    optimizer = build(model, options("factored"))
    set_gradients(model, 0)
    update(optimizer, GO)
    if not words:
        check_state(optimizer, model.named_parameters())
        return
    with pytest.raises(ConfigError) as caught:
        check_state(optimizer, model.named_parameters())
    assert words in str(caught.value)
    assert "MatrixWise with `state`" in str(caught.value)
