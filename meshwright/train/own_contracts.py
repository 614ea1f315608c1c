"""Tries the optimizers, losses and metrics of the user's module on small tensors, before a job
starts: what ours are held to by tests."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.config.optimizer import Optimizer
from meshwright.models.parameter import Parameter
from meshwright.system.errors import ConfigError, config_error
from meshwright.system.modules import describe_error, import_user_module
from meshwright.train.losses import bound
from meshwright.train.metric_table import OF_RECORDS, Metric
from meshwright.train.optim.optimizers import build_optimizer, check_state
from meshwright.train.optim.registry import ElementWise, MatrixWise
from meshwright.train.optim.update import update
from meshwright.train.own_metrics import Shard, StepParts

ROWS, COLUMNS = 4, 6
"""Of the matrices that optimizers update."""

ALIKE = 1e-4
"""Relative difference of two ways to one result in fp32. A contract that is broken shows more."""

Options = Mapping[str, Any]


class BrokenError(Exception):
    """An entry breaks its contract; the text says how."""


def check_contracts(module: str, key: str, options: Options, config: Optimizer) -> None:
    """Try every optimizer, loss and metric of the user's module.

    Args:
        module: as `import_user_module` takes it.
        key: of the config, that names the module.
        options: of the module, by name.
        config: settings for the optimizers.

    Raises:
        ConfigError: for the first entry that breaks its contract.
    """
    own, trials = import_user_module(module), dict[tuple[str, str], Callable[[], None]]()
    for name, entry in getattr(own, "OPTIMIZERS", {}).items():
        trials["OPTIMIZERS", name] = partial(_try_optimizer, name, entry, options, config)
    for name, loss in getattr(own, "LOSSES", {}).items():
        trials["LOSSES", name] = partial(_try_loss, bound(loss, options.get(name)))
    for name, metric in getattr(own, "METRICS", {}).items():
        trials["METRICS", name] = partial(_try_metric, name, metric, options.get(name))
    for (table, name), run in trials.items():
        try:
            run()
            continue
        except BrokenError as error:
            what = str(error)
        except ConfigError as error:  # of the optimizer itself
            what = str(error).partition("\n")[0].removeprefix("optimizer.name: ")
            what = what.removeprefix("its function ")
        except Exception as error:  # whatever the user's code raises
            what = f"raises {describe_error(error, str(own.__file__))}"
        rule = f"{table} has {name!r}, which {what}"
        raise config_error(key, module, rule, "correct it; docs/extending.md has an example")


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _is_alike(got: Tensor, want: Tensor) -> bool:
    return torch.allclose(got.double(), want.double(), rtol=ALIKE, atol=ALIKE * 1e-2)


def _updated(
    name: str, rows: slice, options: Options, config: Optimizer, *, factor: float = 1.0
) -> tuple[Tensor, torch.optim.Optimizer, nn.Parameter]:
    """Take two steps with some rows of a matrix, and return them.

    Args:
        factor: on the gradients, by which the update is told to divide them.
    """
    parameter = nn.Parameter(_random(ROWS, COLUMNS)[rows].clone())
    settings = config.model_copy(update={"name": name, "groups": []})
    table = {"weight": Parameter((ROWS, COLUMNS), "colwise", 0.02)}
    optimizer = build_optimizer([("weight", parameter)], settings, table, None, options)
    divisor = None if factor == 1 else torch.tensor(factor)
    for seed in (1, 2):
        parameter.grad = _random(ROWS, COLUMNS, seed=seed)[rows] * factor
        update(optimizer, torch.tensor(False), divisor)
    return parameter.detach(), optimizer, parameter


def _try_optimizer(
    name: str, entry: ElementWise | MatrixWise, options: Options, config: Optimizer
) -> None:
    """Hold an optimizer to the contract of `optim/optimizers.py`."""
    if isinstance(entry, MatrixWise):
        factor = entry.scale(ROWS, COLUMNS, options.get(name, config.muon))
        if not isinstance(factor, int | float):
            raise BrokenError(f"has {factor!r:.40} as its factor for a matrix, and no number")
    whole, optimizer, parameter = _updated(name, slice(ROWS), options, config)
    check_state(optimizer, [("weight", parameter)])
    if torch.equal(whole, _random(ROWS, COLUMNS)):
        raise BrokenError("changes no weight")
    if not whole.isfinite().all():
        raise BrokenError("makes weights that aren't finite")
    before = [whole.clone(), *(v.clone() for v in optimizer.state[parameter].values())]
    parameter.grad = _random(ROWS, COLUMNS, seed=3)
    update(optimizer, torch.tensor(True))
    if not all(map(torch.equal, before, [parameter, *optimizer.state[parameter].values()])):
        raise BrokenError("ignores `found_inf`: a skipped step changes weights or state")
    divided, *_ = _updated(name, slice(ROWS), options, config, factor=4.0)
    if not _is_alike(divided, whole):
        raise BrokenError("ignores `grad_scale`: gradients aren't clipped")
    if isinstance(entry, ElementWise):
        halves = [_updated(name, rows, options, config)[0] for rows in (slice(2), slice(2, ROWS))]
        if not _is_alike(torch.cat(halves), whole):
            raise BrokenError(
                "updates an element by others of its matrix, of which a rank has a part: make it a "
                "MatrixWise"
            )


def _try_loss(loss: Callable[..., Tensor]) -> None:
    """The loss of a token follows from that token only, so that chunks don't change it."""
    tokens, vocabulary = 5, 11
    states, logits = _random(tokens, 4), _random(tokens, vocabulary)
    targets = torch.arange(tokens)
    logits.requires_grad_()
    losses = loss(states, logits, targets)
    if not isinstance(losses, Tensor) or losses.shape != (tokens,):
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise BrokenError(f"gives {shape} for {tokens} tokens, instead of the loss of each")
    if not losses.isfinite().all():
        raise BrokenError("gives losses that aren't finite")
    if not losses.requires_grad:
        raise BrokenError("has no gradient by the logits")
    alone = torch.cat(
        [loss(states[i : i + 1], logits[i : i + 1], targets[i : i + 1]) for i in targets]
    )
    if not _is_alike(alone, losses):
        raise BrokenError("gives a token another loss next to others, and chunks would change it")


def _try_metric(name: str, metric: Metric, options: Any) -> None:
    """Sums have one shape on every rank, also where a rank has nothing, and give one number."""
    if name.startswith(OF_RECORDS):  # one of the two would be lost
        raise BrokenError(
            'starts as the built-in metrics do: write another name, such as "own/NAME"'
        )
    shard = Shard("layers.0.attention.wq.weight", _random(2, 3), _random(2, 3, seed=1))
    some, none = (metric.measure(StepParts(own, ()), options) for own in ([shard], []))
    for sums in (some, none):
        if not isinstance(sums, Tensor) or sums.dim() != 1:
            raise BrokenError("doesn't measure one tensor of one dimension")
        if sums.dtype not in (torch.float32, torch.int64):
            raise BrokenError(f"measures {sums.dtype}, and only float32 and int64 are added up")
    if some.shape != none.shape or some.dtype != none.dtype:
        raise BrokenError("measures other sums on a rank that has no shard, so they don't add up")
    result = metric.result(some, options)
    if not isinstance(result, Tensor) or result.dim() != 0:
        raise BrokenError("makes no tensor without dimensions of its sums")
