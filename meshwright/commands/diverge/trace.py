"""What one step computes, value by value in the order of computation, to be compared with the same
step of a different code or config. On one process.

Of each tensor at most `MOST_VALUES` are kept, evenly spaced, so that a trace is small next to the
model.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.models.loss import Batch
from meshwright.train.running_job import RunningJob

MOST_VALUES = 1 << 15

LEAST = {"rate": 0.0, "initial weight": 0.0, "token": 0.0, "update": 1e-5}
"""Relative differences that are taken for rounding even if the twin has none. The update of a
weight is the difference of two nearly equal numbers."""

LEAST_OTHERS = 1e-7
"""Of the other kinds: an ulp of float32 is 6e-8 to 1.2e-7."""

Entry = dict[str, Any]
"""Of a trace: "kind", "name", "shape" of the tensor, "values" (N,) or (sequences, N) fp64, "eps" of
the type it was computed in."""


@dataclass
class Trace:
    """Watches step `step` of a job; nothing if that is 0."""

    step: int
    entries: dict[str, Entry] = field(default_factory=dict)
    """By kind and name."""
    _before: dict[str, Tensor] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)

    def begin(self, job: RunningJob, step: int, batches: list[Batch]) -> None:
        """Note what the step starts with, and watch its modules."""
        if step != self.step:
            return
        (model,) = job.trainer.model.stages
        self._add("rate", "the learning rate", torch.tensor([job.trainer.lr_at(step)]).double())
        for batch in batches:
            self._add("token", "the tokens", batch.tokens, len(batch.tokens))
            self._add("token", "the targets", batch.labels, len(batch.tokens))
        for name, buffer in model.named_buffers():
            self._add("buffer", name, buffer)
        for name, parameter in model.named_parameters():
            kind = "initial weight" if step == 1 else "weight"
            self._add(kind, name, parameter)
            self._before[name] = _sampled(parameter)
        for name, module in model.named_modules():
            size = len(batches[0].tokens)
            self._watch(name or "the model", module, size)
        if job.trainer.early is None:  # which has no gradients left
            hook = lambda *_: self._add_gradients(model)  # noqa: E731
            self._handles.append(job.trainer.optimizer.register_step_pre_hook(hook))

    def end(self, job: RunningJob, step: int) -> None:
        """Note what the step has changed."""
        if step != self.step:
            return
        for handle in self._handles:
            handle.remove()
        parameters = dict(job.trainer.model.stages[0].named_parameters())
        for name, parameter in parameters.items():
            for key, value in job.trainer.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.dim():
                    self._add("state", f"{key} of {name}", value)
        for name, parameter in parameters.items():
            self._add("update", name, parameter)
            self.entries[f"update {name}"]["values"] -= self._before[name]

    def _add_gradients(self, model: nn.Module) -> None:
        for name, parameter in reversed([*model.named_parameters()]):
            if parameter.grad is not None:
                self._add("gradient", name, parameter.grad)

    def _watch(self, name: str, module: nn.Module, size: int) -> None:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            for index, value in enumerate(_floats((args, kwargs))):
                self._add("input", f"{name} {index or ''}".strip(), value, size)

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            for index, value in enumerate(_floats(output)):
                self._add("output", f"{name} {index or ''}".strip(), value, size)

        self._handles += [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after),
        ]

    def _add(self, kind: str, name: str, tensor: Tensor, size: int = 0) -> None:
        """Add a tensor; of one that each microbatch has, its sequences, or its sum.

        Args:
            size: sequences of a microbatch.
        """
        is_batch = size > 0 and tensor.dim() > 0 and len(tensor) == size
        values = _sampled(tensor, is_batch=is_batch)
        known = self.entries.get(f"{kind} {name}")
        if known is None:
            eps = torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0
            shape = [*tensor.shape[is_batch:]]
            entry = {"kind": kind, "name": name, "shape": shape, "values": values, "eps": eps}
            self.entries[f"{kind} {name}"] = entry
        elif is_batch:
            known["values"] = torch.cat([known["values"], values])
        elif tensor.dim() == 0:
            known["values"] += values


def _floats(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _floats(one)


def _stride(numel: int) -> int:
    return math.ceil(numel / MOST_VALUES) or 1


def _sampled(tensor: Tensor, *, is_batch: bool = False) -> Tensor:
    """Return evenly spaced elements, in each sequence if it is a microbatch, fp64."""
    flat = tensor.detach().flatten(1 if is_batch and tensor.dim() > 1 else 0)
    flat = flat.unsqueeze(1) if is_batch and flat.dim() == 1 else flat
    return flat[..., :: _stride(flat.shape[-1])].double().cpu()


WORDS = {
    "rate": "",
    "token": "the batch:",
    "buffer": "the buffer",
    "initial weight": "the initial value of",
    "weight": "the value of",
    "input": "what goes into",
    "output": "the output of",
    "gradient": "the gradient of",
    "state": "the optimizer's",
    "update": "the update of",
}
"""Of each kind."""

NO_TWIN: Mapping[str, Entry] = {}


@dataclass(frozen=True)
class OtherValue:
    """A value of a step that differs by more than rounding."""

    kind: str
    name: str
    difference: float
    """Norm of the difference over the norm."""
    bound: float
    element: list[int]
    """Where it is largest, of those that were kept; of a microbatch the sequence is first."""

    @property
    def words(self) -> str:
        """The value. What reaches a module in a different way, though all modules before it give
        the same, was made between modules, by the one that holds them."""
        return f"{WORDS[self.kind]} {self.name}".strip()


def first_other_value(
    a: Mapping[str, Entry], b: Mapping[str, Entry], twin: Mapping[str, Entry] = NO_TWIN
) -> OtherValue | None:
    """Return the first value that differs by more than ten times the twin's rounding."""
    for key, entry in a.items():
        if (other := b.get(key)) is None or other["values"].shape != entry["values"].shape:
            return OtherValue(entry["kind"], entry["name"], math.inf, 0.0, [])
        least = LEAST.get(entry["kind"], LEAST_OTHERS)
        rounding = _distance(entry, twin[key]) if key in twin else 0.0
        bound = 10 * max(rounding, least)
        if entry["kind"] in ("input", "output", "gradient") and entry["eps"] > 1e-3:
            bound = max(bound, entry["eps"])
        if not (difference := _distance(entry, other)) <= bound:
            apart = (entry["values"] - other["values"]).abs().nan_to_num(nan=math.inf)
            place = [int(i) for i in torch.unravel_index(apart.argmax(), apart.shape)]
            inner = place[-1] * _stride(math.prod(entry["shape"]))
            shape = torch.Size(entry["shape"] or [1])
            element = [int(i) for i in torch.unravel_index(torch.tensor(inner), shape)]
            return OtherValue(entry["kind"], entry["name"], difference, bound, place[:-1] + element)
    return None


def _distance(a: Entry, b: Entry) -> float:
    left, right = a["values"], b["values"]
    if left.shape != right.shape:  # of a microbatch that isn't split by sequences
        return 0.0
    if torch.equal(left.nan_to_num(), right.nan_to_num()):
        return 0.0
    return float((left - right).norm() / right.norm().clamp(min=1e-30))
