"""Statistics of layers: plain PyTorch's on any mesh, and training is to the bit what it is without
them."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from meshwright.models.args import DecoderArgs
from meshwright.models.families import MODELS
from meshwright.models.loss import IGNORE, Batch
from meshwright.models.parameter import block_of
from meshwright.parallelisms.rules.degrees import ParallelDims
from meshwright.train.layer_stats import LayerStats
from tests.campaigns.new_user import example
from tests.helpers.families import small
from tests.helpers.job import (
    DEEP,
    DOCUMENTS,
    PP,
    SCHEDULES,
    assert_equal,
    global_batch,
    job_of,
    mesh,
)
from tests.helpers.plain import watch_logits
from tests.helpers.rounding import adamw
from tests.helpers.slow import slow_but
from tests.helpers.tiny import MIXED, TIED, TINY, plain_model

STEPS = (1, 2)
FROZEN = frozenset(["layers.1.attention_norm.weight"])
GEMMA = small(MODELS["gemma2"], 131, window=6)  # every other layer, and soft caps
MESHES = {
    "one": (mesh(), {}),
    "microbatches": (mesh(), {"num_microbatches": 4}),
    "fsdp": (mesh(dp_shard=2), {"frozen": FROZEN}),
    "tied-tp": (mesh(tp=2), {"args": TIED}),
    "cp-documents": (mesh(cp=2), {"documents": DOCUMENTS}),
    "1F1B": (PP, SCHEDULES["1F1B"] | {"args": DEEP}),
    "DualPipeV": (PP, SCHEDULES["DualPipeV"] | {"args": DEEP}),
    "offloaded": (mesh(dp_shard=2), {"enable_cpu_offload": True}),
    "experts": (mesh(dp_shard=2, ep=2), {"args": MIXED}),
    "latent-cp": (mesh(cp=2), {"args": small(MODELS["deepseek_v2"], 131)}),
    "window-and-cap": (mesh(cp=2), {"args": GEMMA}),
    "compiled": (mesh(dp_shard=2), {"compile_backend": "eager"}),
    "pp-cp-tp": (dataclasses.replace(PP, cp=2, tp=2), SCHEDULES["1F1B"] | {"args": DEEP}),
}


def _train(dims: ParallelDims, options: dict, *, has_stats: bool) -> tuple:
    """Losses, weights, figures of two steps, and the number of graphs compiled for them."""
    torch.compiler.reset()
    counters.clear()
    # the plain model has no loss of routers
    job, documents = job_of(dims, {"args": TINY, "balance_loss": 0.0} | options)
    spec, frozen = job.model.stages[0].table, options.get("frozen", ())
    stats = LayerStats(job.model, job.meshes, spec, frozen, 1) if has_stats else None
    results = []
    for step in STEPS:
        batches = job.part(Batch(*global_batch(step), documents))
        results.append(job.take_step(step, batches, layer_stats=stats))
    figures = [{name: x.item() for name, x in result.figures.items()} for result in results]
    losses = [(result.loss.item(), result.grad_norm.item()) for result in results]
    return losses, job.weights(), figures, counters["stats"]["unique_graphs"]


def _with_and_without(dims: ParallelDims, options: dict) -> list[dict[str, float]]:
    losses, weights, figures, num_graphs = _train(dims, options, has_stats=True)
    want_losses, want_weights, _, want_graphs = _train(dims, options, has_stats=False)
    assert losses == want_losses
    assert_equal(weights, want_weights)
    assert num_graphs == want_graphs
    return [{n: x for n, x in of.items() if n.startswith("layer_stats/")} for of in figures]


def _rms(tensors: list[torch.Tensor]) -> float:
    return torch.cat([x.detach().double().flatten() for x in tensors]).square().mean().sqrt().item()


@torch.no_grad()
def _forward(
    model: torch.nn.Module, tokens: torch.Tensor, documents: torch.Tensor | None
) -> dict[str, float]:
    """RMS of results of modules, and the largest of all logits at once."""
    figures = dict[str, float]()

    def note(name: str, _: object, __: object, output: torch.Tensor | tuple) -> None:
        output = output[0] if isinstance(output, tuple) else output
        figures[f"activation_rms/{name}"] = _rms([output])

    def see(layer: str, logits: torch.Tensor) -> None:
        figures[f"max_attention_logit/{layer}"] = logits.max().item()

    hooks = [
        module.register_forward_hook(functools.partial(note, name))
        for name, module in model.named_modules()
        if name in ("tok_embeddings", "norm") or (name.count(".") == 1 and "layers." in name)
    ]
    hooks += watch_logits(model, documents, see)
    model(tokens, documents=documents)
    for hook in hooks:
        hook.remove()
    return figures


def reference(options: dict) -> list[dict[str, float]]:
    """By plain PyTorch."""
    model, documents = plain_model(options.get("args", TINY)), options.get("documents")
    frozen = options.get("frozen", ())
    named = {name: p for name, p in model.named_parameters() if name not in frozen}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in named)
    optimizer, found = adamw(model), []
    for step in STEPS:
        tokens, labels = global_batch(step)
        figures = _forward(model, tokens[:1], None if documents is None else documents[:1])
        logits = model(tokens, documents=documents).flatten(0, 1)
        F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE).backward()
        before = {name: p.detach().clone() for name, p in named.items()}
        optimizer.step()
        for group in dict.fromkeys(map(block_of, named)):
            own = [name for name in named if block_of(name) == group]
            figures[f"gradient_rms/{group}"] = _rms([named[name].grad for name in own])
            updates = _rms([named[name] - before[name] for name in own])
            weights = _rms([before[name] for name in own])
            figures[f"update_over_weight/{group}"] = updates / weights
        optimizer.zero_grad()
        found.append({f"layer_stats/{name}": value for name, value in figures.items()})
    return found


@pytest.mark.parametrize(("dims", "options"), slow_but("tied-tp", MESHES))
def test_statistics_are_plain_pytorch_s_and_training_is_the_same(on_ranks, dims, options) -> None:
    results = on_ranks(dims.num_ranks, _with_and_without, dims, options)
    assert all(result == results[0] for result in results)
    for got, want in zip(results[0], reference(options), strict=True):
        assert got == pytest.approx(want, rel=1e-5)


def test_a_core_of_the_user_takes_what_it_likes_and_has_no_logits(on_ranks) -> None:
    (figures,) = on_ranks(1, _figures_of_own_attention)
    assert "layer_stats/activation_rms/layers.1" in figures
    assert not [name for name in figures if "logit" in name]


def _figures_of_own_attention() -> dict[str, float]:
    """With a core that isn't told the scale."""
    module: dict[str, Any] = {}
    code = example("sigmoid").replace("mask, *, scale", "mask, scale=0.25")
    exec(code.replace(", mask, scale=self.head_dim**-0.5)", ", mask)"), module)
    shape = {field.name: getattr(TINY, field.name) for field in dataclasses.fields(DecoderArgs)}
    args = module["SigmoidArgs"](**shape)
    *_, figures, _ = _train(mesh(), {"args": args}, has_stats=True)
    return figures[0]
