"""Steps of the trainer on one process, and the same steps in plain PyTorch.

Before each step plain PyTorch gets the trainer's weights, and after it the trainer's gradients, so
errors of one step don't grow into the next, and each quantity fails on its own.
"""

import dataclasses
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor, nn

from meshwright.commands.prove.bounds import BOUNDS
from meshwright.commands.prove.checked import NAMED, Checked
from meshwright.commands.prove.data import documents_of, parts_of
from meshwright.commands.prove.job import ProofJob
from meshwright.commands.prove.measure import different
from meshwright.commands.prove.plain_batch import compare_batch, compare_documents, read_batch
from meshwright.commands.prove.plain_decoder import UNCOUNTED, Plain, Router
from meshwright.commands.prove.plain_optimizer import (
    SCHEDULES,
    clip_qk,
    kept_share,
    optimizers,
    schedule,
)
from meshwright.commands.prove.weights import stretch_of
from meshwright.config.job_config import JobConfig
from meshwright.datasets.samples import SampleRules
from meshwright.models.loss import IGNORE
from meshwright.parallelisms.routing_replay import Choices, record_choices
from meshwright.parallelisms.shards import local_shard
from meshwright.system.hardware import ordered_attention
from meshwright.train.build import build_stream
from meshwright.train.trainer import StepResult
from meshwright.train.validation import evaluate, figures_of

NUM_STEPS = 4
"""The last has momentum of three steps, and loads and biases of experts that steps have made."""

UNIT = 2.0**-24
"""Unit roundoff of fp32: the largest relative error of one rounding."""

STEP_BOUND = 256 * UNIT
"""Relative error of an optimizer's step; benchmarks/results/proof.md derives it."""

STORED_BOUND = 4 * UNIT
"""Relative error of a sum that is rounded where it is kept."""


LOGIT_BOUND = 1e-5
"""Relative error of the largest logit of a head in fp32, as of the loss."""

TOO_WIDE = 0.1
"""A bound that would pass a wrong step of Muon."""

ROUTER_LOSSES = ("balance_loss", "sequence_balance_loss", "router_z_loss")
"""Metrics of the losses in `Router.losses`, in their order."""


def bound_of_muon(a: float, steps: int) -> float:
    """Return the bound on the relative error of Muon's step.

    Each Newton-Schulz step multiplies small singular values by `a`, and with them the
    rounding errors in singular values of 0.
    """
    return 16 * UNIT * max(a, 1.0) ** steps


def compare_steps(checked: Checked, config: JobConfig) -> None:
    """Compare a few steps, the validation after them, and a step that is skipped.

    Args:
        config: of the small job on one process, in fp32.
    """
    with tempfile.TemporaryDirectory() as root:
        steps = Steps(checked, config, Path(root))
        for step in range(1, NUM_STEPS + 1):
            steps.compare(step)
        steps.compare_validation()
        steps.compare_skipped(NUM_STEPS + 1)
        steps.close()


@dataclass(frozen=True)
class State:
    """The trainer's state between two steps, in fp64, by name."""

    weights: dict[str, Tensor]
    means: dict[str, Tensor]
    """Of weights; empty without an average."""
    loads: dict[str, Tensor]
    """Tokens of each expert in the last step, by number of the layer."""
    biases: dict[str, Tensor]


class Steps:
    """A trainer, and the same step in plain PyTorch.

    Args:
        config: as of `compare_steps`.
        root: folder for the trainer's files.
    """

    def __init__(self, checked: Checked, config: JobConfig, root: Path) -> None:
        self._job = job = ProofJob(config, 1, root)
        self._checked, self._config = checked, job.resolved.config
        training, args = self._config.training, job.resolved.model_args
        self._trainer, self._detector = job.trainer, job.running.detector
        self._token_bytes = torch.tensor(job.resolved.tokenizer.token_bytes)
        self._documents = [
            document
            for _, seed in parts_of(training)
            for document in documents_of(training, args.vocab_size, seed)
        ]
        rules = SampleRules(training.seq_len + 1, training.seed)
        data = job.data
        self._stream = build_stream(job.resolved, data.sources, job.meshes, data.begin, rules)

        self._args = dataclasses.asdict(args)
        stretch = torch.linspace(*stretch_of(args.table), training.seq_len)
        self._plain = Plain(job.resolved.family.name, self._args, stretch)
        self._weights = {
            name: weight.clone().requires_grad_(not self._is_frozen(name))
            for name, weight in self._state().weights.items()
        }
        plain_optimizers = optimizers(self._weights, self._args, self._config.optimizer)
        self._optimizers = dict(zip(self._weights, plain_optimizers, strict=True))

    def compare(self, step: int) -> None:
        """Compare a step, counted from 1."""
        trainer, before = self._trainer, self._state()
        if step == 1 and before.means:
            exact = dict.fromkeys(before.means, 0.0)
            self._checked.tensors("EMA", "before step 1", before.means, before.weights, exact)
        batches = next(self._job.running.loader).batches
        # the samples of the same global batch, read once more
        samples = [self._stream.next_sample() for _ in range(self._stream.batch)]
        read = [sample for sample in samples if sample is not None]
        self._batch = read_batch(read, self._config.training, self._args["mtp_depth"])
        compare_batch(self._checked, step, batches, self._batch)
        self._batches = [batch.to(self._job.running.device) for batch in batches]
        compare_documents(self._checked, step, read, self._documents)
        gradients: dict[str, Tensor] = {}
        rates: dict[str, float] = {}
        names = {parameter: name for name, parameter in trainer.model.named_parameters()}

        def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    rates[names[parameter]] = group["lr"]
                    if parameter.grad is not None:
                        gradients[names[parameter]] = _copy(parameter.grad)

        hook = trainer.optimizer.register_step_pre_hook(keep)
        order = ordered_attention(self._job.running.attention)
        with order, record_choices(trainer.model.stages, self._job.meshes) as choices:
            result = trainer.step(step, self._batches, self._detector)
        hook.remove()
        after = self._state()
        routers = self._compare_backward(step, before, choices, result, gradients)
        self._compare_routers(step, before, after, routers, result)
        if (got := result.figures.get("qk_clip/max_logit")) is not None:
            want = torch.cat(self._plain.largest_logits).max().item()
            place = f"of step {step}"
            self._checked.number("largest logit", place, got.item(), want, LOGIT_BOUND)
        self._compare_update(step, before, after, gradients, rates)

    def compare_validation(self) -> None:
        """Compare a validation on the last batch, with the weights and with their means."""
        state, average = self._state(), self._trainer.average
        self._compare_figures("validation", state, state.weights)
        if average is not None:
            with average.in_place():
                self._compare_figures("validation of the EMA", state, state.means)

    def compare_skipped(self, step: int) -> None:
        """Compare the state before and after a step without a label, whose loss is no number."""
        before = {k: tensor.clone() for k, tensor in self._trainer.tensors.state_dict().items()}
        batches = [
            dataclasses.replace(batch, labels=torch.full_like(batch.labels, IGNORE))
            for batch in self._batches
        ]
        self._trainer.step(step, batches, self._detector)
        if wrong := different(self._trainer.tensors.state_dict(), before):
            self._checked.fail("skipped step:", [f"changes {', '.join(wrong[:NAMED])}"])

    def close(self) -> None:
        """Stop reading ahead."""
        self._job.close()

    def _is_frozen(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._config.model.frozen)

    def _state(self) -> State:
        model, average = self._trainer.model, self._trainer.average
        means = {} if average is None else average.tensors
        mixtures = {f"layer {n}": m for s in model.stages for n, m in s.mixtures().items()}
        return State(
            {name: _copy(parameter) for name, parameter in model.named_parameters()},
            {name: _copy(mean) for name, mean in means.items()},
            {name: _copy(mixture.load) for name, mixture in mixtures.items()},
            {name: _copy(mixture.bias) for name, mixture in mixtures.items()},
        )

    def _routers(self, state: State, choices: Choices) -> dict[int, Router]:
        return {
            layer: Router(state.loads[f"layer {layer}"], state.biases[f"layer {layer}"], ids.cpu())
            for layer, ids in choices.items()
        }

    def _compare_backward(
        self,
        step: int,
        before: State,
        choices: Choices,
        result: StepResult,
        gradients: Mapping[str, Tensor],
    ) -> dict[int, Router]:
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.copy_(before.weights[name])
        routers = self._routers(before, choices)
        loss, further, own = self._plain.losses(
            self._weights, self._batch, routers, self._config.experts
        )
        trained = {name: w for name, w in self._weights.items() if w.requires_grad}
        total = loss + own
        if further:
            total = total + self._config.training.mtp_loss_weight * torch.stack(further).mean()
        plain_gradients = torch.autograd.grad(total, [*trained.values()])
        wanted = dict(zip(trained, plain_gradients, strict=True))
        norm = math.sqrt(sum(gradient.square().sum().item() for gradient in plain_gradients))
        place, bounds = f"of step {step}", BOUNDS["fp32"]
        self._checked.number("loss", place, result.loss.item(), loss.item(), bounds.loss)
        for depth, want in enumerate(further, 1):
            got = result.figures[f"loss/mtp_{depth}"].item()
            self._checked.number(f"loss at depth {depth}", place, got, want.item(), bounds.loss)
        self._checked.number(
            "gradient norm", place, result.grad_norm.item(), norm, bounds.grad_norm
        )
        limits = dict.fromkeys(wanted, bounds.gradient)
        self._checked.tensors("gradient", f"at step {step}", gradients, wanted, limits)
        return routers

    def _compare_routers(
        self,
        step: int,
        before: State,
        after: State,
        routers: Mapping[int, Router],
        result: StepResult,
    ) -> None:
        if not routers:
            return
        place, bounds, options = f"of step {step}", BOUNDS["fp32"], self._config.experts
        loads: dict[str, Tensor] = {}
        biases: dict[str, Tensor] = {}
        means = [0.0, 0.0, 0.0]
        for layer, router in routers.items():
            name, counts = f"layer {layer}", router.counts.double()
            loads[name], biases[name] = counts, before.biases[name]
            if not self._is_frozen(f"layers.{layer}.feed_forward.router.weight"):
                below_mean = (counts.mean() - counts).sign()
                biases[name] = biases[name] + options.bias_update_rate * below_mean
            if not router.gap <= bounds.choice_gap:
                text = f"scores of other experts are higher by {router.gap:.1e}"
                self._checked.fail("experts chosen", [f"in {name} at step {step}: {text}"])
            tokens = counts.sum().item() / router.chosen.shape[-1]
            for index, loss in enumerate(router.losses):
                means[index] += loss.item() / tokens / len(routers)
        exact, rounded = dict.fromkeys(loads, 0.0), dict.fromkeys(loads, STORED_BOUND)
        sizes = {n: bias.abs() + options.bias_update_rate for n, bias in before.biases.items()}
        at = f"at step {step}"
        self._checked.tensors("load of experts", at, after.loads, loads, exact)
        self._checked.tensors("bias of experts", at, after.biases, biases, rounded, sizes)
        for name, want in zip(ROUTER_LOSSES, means, strict=True):
            if name != "sequence_balance_loss" or options.sequence_balance_loss:
                got = result.figures[f"experts/{name}"].item()
                self._checked.number(name, place, got, want, bounds.loss)

    def _compare_update(
        self,
        step: int,
        before: State,
        after: State,
        gradients: Mapping[str, Tensor],
        rates: Mapping[str, float],
    ) -> None:
        """Let plain optimizers take the trainer's own gradients, and compare weights and means."""
        config, checked = self._config, self._checked
        for name, weight in self._weights.items():
            weight.grad = gradients.get(name)
        nn.utils.clip_grad_norm_(self._weights.values(), config.training.max_norm)
        lr = self._trainer.lr_at(step)
        if config.lr_scheduler.name in SCHEDULES:
            lr = config.optimizer.lr * schedule(step, config.training.steps, config.lr_scheduler)
        for name, (optimizer, own) in self._optimizers.items():
            want = lr * own.lr_scale
            checked.number("learning rate", f"of step {step} of {name}", rates[name], want, 1e-9)
            if optimizer is not None:
                optimizer.param_groups[0]["lr"] = want
                optimizer.step()
        clipped = self._clip_qk(step)
        known: dict[str, Tensor] = {}
        changes: dict[str, Tensor] = {}
        limits: dict[str, float] = {}
        muon = config.optimizer.muon
        for name, (optimizer, own) in self._optimizers.items():
            if optimizer is None:
                continue
            bound = STEP_BOUND
            if own.optimizer == "muon":
                bound = max(bound, bound_of_muon(muon.coefficients[0], muon.steps))
                if bound >= TOO_WIDE:
                    continue
            known[name] = self._weights[name].detach()
            changes[name] = known[name] - before.weights[name]
            limits[name] = bound + _stored(known[name], changes[name])
            if own.optimizer == "Adam":
                limits[name] += decay_bound(optimizer, changes[name])
            if name in clipped:
                limits[name] += LOGIT_BOUND * _ratio(known[name], changes[name])
        got = {name: after.weights[name] for name in known}
        checked.tensors("update", f"at step {step}", got, known, limits, changes)

        share = kept_share(config.checkpoint.average, config.tokens_per_step)
        if share is not None:
            wanted = {
                name: share * mean + (1 - share) * after.weights[name]
                for name, mean in before.means.items()
            }
            moves = {name: mean - before.means[name] for name, mean in wanted.items()}
            limits = {n: STEP_BOUND + _stored(mean, moves[n]) for n, mean in wanted.items()}
            checked.tensors("EMA", f"at step {step}", after.means, wanted, limits, moves)

    def _clip_qk(self, step: int) -> set[str]:
        """Let plain PyTorch clip as the step did, and return the names of the weights."""
        optimizer = self._config.optimizer
        if optimizer.qk_clip_threshold is None or step % optimizer.qk_clip_interval:
            return set()
        largest = self._plain.largest_logits
        return clip_qk(self._weights, largest, self._args, optimizer.qk_clip_threshold)

    def _compare_figures(self, what: str, state: State, weights: dict[str, Tensor]) -> None:
        model, meshes = self._trainer.model, self._job.meshes
        order = ordered_attention(self._job.running.attention)
        token_bytes = self._token_bytes.to(self._job.running.device)
        with order, record_choices(model.stages, meshes) as choices:
            sums = evaluate(model, [self._batches], meshes, token_bytes)
        got, labels = figures_of(*sums), self._batch.labels
        # a validation has no weights of losses, and doesn't evaluate predictors
        own = {layer: chosen for layer, chosen in choices.items() if layer < self._args["n_layers"]}
        routers = self._routers(state, own)
        batch = dataclasses.replace(self._batch, loss_weights=None, further=())
        with torch.no_grad():
            loss, *_ = self._plain.losses(weights, batch, routers, self._config.experts)
        counted = labels[labels != UNCOUNTED]
        bits = loss.item() * len(counted) / math.log(2) / self._token_bytes[counted].sum().item()
        wanted = {"loss": loss.item(), "perplexity": math.exp(loss.item()), "bits_per_byte": bits}
        # the perplexity's error is the loss's, times the loss
        bound = BOUNDS["fp32"].later_loss * max(1.0, loss.item())
        for name, want in wanted.items():
            self._checked.number(what, name, got[name], want, bound)


def _copy(tensor: Tensor) -> Tensor:
    return local_shard(tensor).detach().cpu().double().clone()


def decay_bound(adam: torch.optim.Optimizer, change: Tensor) -> float:
    """Return how far off Adam's step may be, relative to `change`, because weight decay was added
    to a gradient that it cancels; benchmarks/results/proof.md derives it."""
    (group,) = adam.param_groups
    (weight,) = group["params"]
    if not group["weight_decay"] or weight not in adam.state:
        return 0.0
    state = adam.state[weight]
    root = (state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))).sqrt()
    decayed = group["lr"] * group["weight_decay"] * weight.detach() / (root + group["eps"])
    return STORED_BOUND * _ratio(decayed, change)


def _stored(whole: Tensor, change: Tensor) -> float:
    """Return the error of rounding a sum where it is kept, relative to the change of it."""
    return STORED_BOUND * _ratio(whole, change)


def _ratio(whole: Tensor, change: Tensor) -> float:
    """Return the norm of a sum over that of the change of it; 0 if it doesn't change."""
    norm = change.norm().item()
    return whole.norm().item() / norm if norm else 0.0
