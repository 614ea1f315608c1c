"""Tries the optimizers, losses and metrics of the user's module on small tensors, before a job
starts: what ours are held to by tests."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.checkpoint.state import RNG, TrainingTensors
from meshwright.config.optimizer import Optimizer
from meshwright.models.args import DecoderArgs
from meshwright.models.loss import IGNORE, Batch
from meshwright.models.parameter import Parameter
from meshwright.system.errors import ConfigError, config_error
from meshwright.system.modules import describe_error, file_of, import_user_module
from meshwright.train.losses import bound
from meshwright.train.metric_table import OF_RECORDS, Metric
from meshwright.train.optim.optimizers import build_optimizer, check_state
from meshwright.train.optim.registry import OPTIMIZERS, ElementWise, MatrixWise
from meshwright.train.optim.update import update
from meshwright.train.own_metrics import Shard, StepParts

MATRICES, ROWS, COLUMNS = 2, 4, 6
"""That optimizers update."""

ALIKE = 1e-4
"""Relative difference of two ways to one result in fp32. A contract that is broken shows more."""

Options = Mapping[str, Any]


class BrokenError(Exception):
    """An entry breaks its contract; the text says how."""


def check_contracts(
    module: str, key: str, options: Options, config: Optimizer, args: DecoderArgs
) -> None:
    """Try every optimizer, loss and metric of the user's module.

    Args:
        module: as `import_user_module` takes it.
        key: of the config, that names the module.
        options: of the module, by name.
        config: settings for the optimizers.
        args: of the model whose logits a loss gets.

    Raises:
        ConfigError: for the first entry that breaks its contract.
    """
    own, trials = import_user_module(module), dict[tuple[str, str], Callable[[], None]]()
    for name, entry in getattr(own, "OPTIMIZERS", {}).items():
        trials["OPTIMIZERS", name] = partial(_try_optimizer, name, entry, options, config)
    for name, loss in getattr(own, "LOSSES", {}).items():
        trials["LOSSES", name] = partial(_try_loss, bound(loss, options.get(name)), args)
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


class _Trial:
    """A small model and its optimizer: a matrix and a vector, or a stack of matrices.

    Args:
        name: of the optimizer.
        part: of the first dimension, that this rank would have.
        factor: on the gradients, by which the update is told to divide them.
    """

    def __init__(
        self,
        name: str,
        options: Options,
        config: Optimizer,
        part: slice = slice(None),
        factor: float = 1.0,
    ) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {"weight": (ROWS, COLUMNS), "bias": (ROWS,)}
        if isinstance(OPTIMIZERS[name], MatrixWise):
            self._shapes = {"weight": (MATRICES, ROWS, COLUMNS)}
        self._part, self._factor = part, factor
        parameters = {k: nn.Parameter(_random(*shape)[part]) for k, shape in self._shapes.items()}
        self.model = nn.ParameterDict(parameters)
        settings = config.model_copy(update={"name": name, "groups": []})
        table = {key: Parameter(shape, "colwise", 0.02) for key, shape in self._shapes.items()}
        self.optimizer = build_optimizer(parameters.items(), settings, table, None, options)

    def steps(self, *seeds: int, are_skipped: bool = False) -> Tensor:
        """Take steps with random gradients; return the weights after them, in a row."""
        for seed in seeds:
            for name, shape in self._shapes.items():
                self.model[name].grad = _random(*shape, seed=seed)[self._part] * self._factor
            divisor = None if self._factor == 1 else torch.tensor(self._factor)
            update(self.optimizer, torch.tensor(are_skipped), divisor)
        return torch.cat([weight.detach().flatten() for weight in self.model.values()])

    def saved(self) -> dict[str, Tensor]:
        """Return copies of the tensors that a checkpoint has, without those of random numbers."""
        state = TrainingTensors(self.model, self.optimizer, 0).state_dict()
        return {k: value.clone() for k, value in state.items() if not k.startswith(RNG)}

    def load(self, saved: dict[str, Tensor]) -> None:
        """Resume from them, as a job does."""
        tensors = TrainingTensors(self.model, self.optimizer, 0)
        tensors.load_state_dict(tensors.state_dict() | saved)


def _try_optimizer(
    name: str, entry: ElementWise | MatrixWise, options: Options, config: Optimizer
) -> None:
    """Hold an optimizer to the contract of `optim/optimizers.py`."""
    is_of_matrices = isinstance(entry, MatrixWise)
    if isinstance(entry, MatrixWise):
        factor = entry.scale(ROWS, COLUMNS, options.get(name, config.muon))
        if not isinstance(factor, int | float):
            raise BrokenError(f"has {factor!r:.40} as its factor for a matrix, and no number")
    trial = partial(_Trial, name, options, config)
    one = trial()
    start = one.steps()
    one.steps(1, 2)
    check_state(one.optimizer, one.model.items())
    saved = one.saved()
    whole = one.steps(3)
    if torch.equal(whole, start):
        raise BrokenError("changes no weight")
    if not whole.isfinite().all():
        raise BrokenError("makes weights that aren't finite")
    before = one.saved()
    one.steps(4, are_skipped=True)
    if any(not torch.equal(value, before[key]) for key, value in one.saved().items()):
        raise BrokenError(
            "changes its state in place, where only what it returns counts"
            if is_of_matrices
            else "ignores `found_inf`: a skipped step changes weights or state"
        )
    if not _is_alike(trial(factor=4.0).steps(1, 2, 3), whole):
        raise BrokenError("ignores `grad_scale`: gradients aren't clipped")
    resumed = trial()
    try:
        resumed.load(saved)
    except Exception as error:
        what = describe_error(error, file_of(type(one.optimizer)))
        raise BrokenError(
            "can't resume: torch asks for its state by `step(closure=None)` without `found_inf` "
            f"and `grad_scale`, which raises {what}"
        ) from error
    if not _is_alike(resumed.steps(3), whole):
        raise BrokenError("goes on otherwise after a resume: keep all that changes in its state")
    size = MATRICES if is_of_matrices else ROWS
    halves = [trial(part=part) for part in (slice(size // 2), slice(size // 2, size))]
    for half in halves:
        half.steps(1, 2, 3)
    for key, value in one.model.items():
        if not _is_alike(torch.cat([half.model[key] for half in halves]), value):
            raise BrokenError(
                "updates a matrix by others of its stack, such as other experts'"
                if is_of_matrices
                else "updates an element by others of its matrix, of which a rank has a part: make "
                "it a MatrixWise"
            )


def _try_loss(loss: Callable[..., Tensor], args: DecoderArgs) -> None:
    """The loss of a token follows from that token only, so that chunks don't change it."""
    tokens = min(5, args.vocab_size)
    states, logits = _random(tokens, args.dim), _random(tokens, args.vocab_size)
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
    """Sums have one shape and type on every rank, also where a rank has nothing, and give one
    number."""
    if name.startswith(OF_RECORDS):  # one of the two would be lost
        raise BrokenError(
            'starts as the built-in metrics do: write another name, such as "own/NAME"'
        )
    shard = Shard("layers.0.attention.wq.weight", _random(2, 3), _random(2, 3, seed=1))
    labels = torch.tensor([[1, 2, IGNORE]])
    batch = Batch(labels.clamp(min=0), labels)
    some, *others = (
        metric.measure(StepParts(shards, batches), options)
        for shards, batches in (([shard], [batch]), ([], [batch]), ([shard], []), ([], []))
    )
    for sums in (some, *others):
        if not isinstance(sums, Tensor) or sums.dim() != 1:
            raise BrokenError("doesn't measure one tensor of one dimension")
        if sums.dtype not in (torch.float32, torch.int64):
            raise BrokenError(f"measures {sums.dtype}, and only float32 and int64 are added up")
    if any(sums.shape != some.shape or sums.dtype != some.dtype for sums in others):
        raise BrokenError(
            "measures sums of another shape or type on a rank that has no shard or no batch, so "
            "they don't add up"
        )
    result = metric.result(some, options)
    if not isinstance(result, Tensor) or result.dim() != 0:
        raise BrokenError("makes no tensor without dimensions of its sums")
