"""The running mean of the weights on one process, and its keys."""

import pytest
import torch

from meshwright.checkpoint.state import AVERAGE, ModelTensors, TrainingTensors
from meshwright.config.job_config import JobConfig
from meshwright.config.optimizer import Optimizer
from meshwright.parallelisms.local_model import LocalModel
from meshwright.system.errors import ConfigError
from meshwright.train.optim.average import Average
from meshwright.train.optim.optimizers import build_optimizer
from meshwright.train.optim.registry import average_decay
from tests.helpers.resolved import resolved
from tests.helpers.tiny import TINY, plain_model

GO, HOLD = torch.tensor(False), torch.tensor(True)


def local_model(seed: int = 0) -> LocalModel:
    return LocalModel([plain_model(seed=seed)])


def set_weights(model: LocalModel, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def test_it_follows_the_weights_but_for_steps_held_back() -> None:
    model = local_model()
    set_weights(model, 1.0)
    average = Average(model, 0.75)
    average.begin()
    for value, skip_update in ((2.0, GO), (float("nan"), HOLD), (4.0, GO)):
        set_weights(model, value)
        average.after_update(skip_update)
    want = 0.75 * (0.75 * 1 + 0.25 * 2) + 0.25 * 4
    assert average.tensors.keys() == dict(model.named_parameters()).keys()
    for mean in average.tensors.values():
        assert (mean == want).all()
        assert mean.dtype == torch.float32
    # frozen weights are their own mean, to the bit, however long
    model = local_model()
    average = Average(model, 0.99999)
    average.begin()
    for _ in range(3):
        average.after_update(GO)
    for name, parameter in model.named_parameters():
        assert torch.equal(average.tensors[name], parameter)


def test_a_model_in_bf16_has_a_mean_in_fp32_which_it_gets_in_place_and_back() -> None:
    model = local_model()
    model.to(torch.bfloat16)
    set_weights(model, 1.0)
    average = Average(model, 0.999)
    average.begin()
    set_weights(model, 1.0078125)  # the next number of bf16: the mean moves by less
    average.after_update(GO)
    kept = {name: mean.clone() for name, mean in average.tensors.items()}
    assert all(((mean > 1) & (mean < 1.0001)).all() for mean in kept.values())
    with average.in_place():
        assert all((parameter == 1).all() for parameter in model.parameters())
    assert all((parameter == 1.0078125).all() for parameter in model.parameters())
    assert all(torch.equal(mean, kept[name]) for name, mean in average.tensors.items())
    with pytest.raises(RuntimeError), average.in_place():  # the weights come back all the same
        raise RuntimeError
    assert all((parameter == 1.0078125).all() for parameter in model.parameters())


def test_it_is_saved_and_begins_anew_where_it_was_not() -> None:
    model, other = local_model(), local_model(seed=1)
    average, another = Average(model, 0.5), Average(other, 0.5)
    average.begin()
    set_weights(model, 0.5)
    average.after_update(GO)
    saved, loaded = (
        TrainingTensors(
            m,
            build_optimizer(m.named_parameters(), Optimizer(), TINY.table.parameters),
            0,
            a.tensors,
        )
        for m, a in ((model, average), (other, another))
    )
    state = {name: tensor.clone() for name, tensor in saved.state_dict().items()}
    loaded.load_state_dict(dict(state))
    for name, mean in another.tensors.items():
        assert torch.equal(mean, average.tensors[name])
        assert torch.equal(mean, state[AVERAGE + name])
    for name in average.tensors:
        del state[AVERAGE + name]
    loaded.load_state_dict(state)
    assert all((mean == 0.5).all() for mean in another.tensors.values())
    alone = ModelTensors(model, torch.bfloat16, average.tensors).state_dict()
    for name, mean in average.tensors.items():
        assert torch.equal(alone[AVERAGE + name], mean.bfloat16())


def config_of(**average: object) -> JobConfig:
    tables = {
        "model": {"tokenizer_path": "bytes"},
        "training": {"seq_len": 128, "global_batch_size": 8},
        "checkpoint": {"average": average},
    }
    return JobConfig.model_validate(tables)


def test_a_window_of_tokens_gives_the_decay() -> None:
    assert average_decay(config_of()) is None
    assert average_decay(config_of(decay=0.9)) == 0.9
    assert average_decay(config_of(window_tokens=8 * 128 * 4)) == 0.75
    resolved(config_of(window_tokens=1025), 1)
    with pytest.raises(
        ConfigError, match=r"= 1024: is no more than .*\n  fix: raise it above 1024"
    ):
        resolved(config_of(window_tokens=1024), 1)
    with pytest.raises(ConfigError, match="window_tokens = 9000: checkpoint.average.decay gives"):
        resolved(config_of(window_tokens=9000, decay=0.5), 1)
