"""QK-clip: on any mesh weights are those of a loop in plain PyTorch, clipped at the same steps."""

import math

import pytest
import torch
import torch.nn.functional as F

from meshwright.models.args import DecoderArgs
from meshwright.models.families import MODELS
from meshwright.models.latent import LatentArgs
from meshwright.models.loss import IGNORE, Batch
from meshwright.parallelisms.rules.degrees import ParallelDims
from meshwright.train.optim.qk_clip import QKClip, clip_factors, row_factors
from tests.helpers.families import small
from tests.helpers.job import (
    DEEP,
    DOCUMENTS,
    PP,
    SCHEDULES,
    Job,
    assert_equal,
    global_batch,
    job_of,
    mesh,
)
from tests.helpers.plain import watch_logits
from tests.helpers.rounding import CONDITION, adamw, gradient_bound
from tests.helpers.slow import slow_but
from tests.helpers.tiny import SEQ_LEN, TIED, TINY, plain_model

STEPS = (1, 2, 3)
INTERVAL = 2
BOUND = len(STEPS) * CONDITION * gradient_bound()
"""Of a weight, relative: updates are about as large as it is, and factors as exact as logits."""
# tokens go through all experts: otherwise rounding chooses others
ALL = {"n_experts": 2, "n_active": 2, "n_groups": 1, "n_active_groups": 1}
LATENT, NO_QUERY_LATENT = (
    small(MODELS[name], 131, **ALL) for name in ("deepseek_v3", "deepseek_v2")
)
BIASED = small(MODELS["qwen2"], 131)
MESHES = {
    "one": (mesh(), {}),
    "microbatches": (mesh(), {"num_microbatches": 4}),
    "fsdp": (mesh(dp_shard=2), {}),
    "fsdp-tp": (mesh(dp_shard=2, tp=2), {}),
    "tied-cp-documents": (mesh(cp=2), {"args": TIED, "documents": DOCUMENTS}),
    "biases-tp": (mesh(tp=2), {"args": BIASED}),
    "window-cp": (mesh(cp=2), {"args": small(MODELS["mistral"], 131)}),
    "latent": (mesh(), {"args": LATENT}),
    "latent-fsdp-cp": (mesh(dp_shard=2, cp=2, ep=1), {"args": NO_QUERY_LATENT}),
    "latent-tp": (mesh(tp=2, ep=1), {"args": LATENT}),
    "no-positions-tp": (mesh(tp=2), {"args": small(MODELS["smollm3"], 131)}),
    "1F1B": (PP, SCHEDULES["1F1B"] | {"args": DEEP}),
    "DualPipeV": (PP, SCHEDULES["DualPipeV"] | {"args": DEEP}),
    "offloaded": (mesh(dp_shard=2), {"enable_cpu_offload": True}),
    "compiled": (mesh(dp_shard=2), {"compile_backend": "eager"}),
}


def _train(dims: ParallelDims, options: dict, threshold: float) -> tuple[list[dict], dict]:
    """Figures of each step, and the weights after the last."""
    torch.compiler.reset()
    job, documents = job_of(dims, {"args": TINY, "balance_loss": 0.0} | options)
    _sharpen(dict(job.model.named_parameters()))
    clip = QKClip(job.model, job.meshes, job.model.stages[0].table, threshold, INTERVAL)
    figures = []
    for step in STEPS:
        batches = job.part(Batch(*global_batch(step), documents))
        result = job.take_step(step, batches, qk_clip=clip)
        figures.append({name: x.item() for name, x in result.figures.items()})
    return figures, job.weights()


@torch.no_grad()
def _sharpen(parameters: dict[str, torch.Tensor]) -> None:
    """Make logits of fresh weights large, and different from head to head."""
    for name, parameter in parameters.items():
        if ".attention.wq" in name and name.endswith("weight"):
            parameter.mul_(16)


def _factor(largest: torch.Tensor, threshold: float) -> float:
    return min(1.0, threshold / largest.max().item())


@torch.no_grad()
def _clip(
    model: torch.nn.Module, args: DecoderArgs, noted: dict[str, torch.Tensor], threshold: float
) -> list[float]:
    """Head by head, and return the factors."""
    factors = []
    for layer, largest in noted.items():
        attention, heads = model.get_submodule(f"{layer}.attention"), largest.split(1)
        if isinstance(args, LatentArgs):
            plain, turned = args.qk_nope_head_dim, args.qk_rope_head_dim
            query = attention.wq_b if args.q_lora_rank else attention.wq
            queries = query.weight.view(args.n_heads, plain + turned, -1)
            keys = attention.wkv_b.weight.view(args.n_heads, plain + args.v_head_dim, -1)
            for head, own in enumerate(heads):
                factors.append(_factor(own, threshold))
                queries[head, :plain] *= math.sqrt(factors[-1])
                queries[head, plain:] *= factors[-1]
                keys[head, :plain] *= math.sqrt(factors[-1])
            continue
        for key, own in enumerate(largest.chunk(args.n_kv_heads)):
            factors.append(_factor(own, threshold))
            for linear, count in ((attention.wq, len(own)), (attention.wk, 1)):
                for parameter in linear.parameters():  # a bias, too
                    rows = parameter.view(-1, args.table.head_dim, *parameter.shape[1:])
                    rows[key * count : (key + 1) * count] *= math.sqrt(factors[-1])
    return factors


def reference(options: dict) -> tuple[float, list[dict], dict]:
    """By plain PyTorch: a threshold that the logits of some heads exceed, figures, and weights."""
    args, documents = options.get("args", TINY), options.get("documents")
    model = plain_model(args)
    _sharpen(dict(model.named_parameters()))
    optimizer, figures, noted = adamw(model), [], dict[str, torch.Tensor]()

    def note(layer: str, logits: torch.Tensor) -> None:
        noted[layer] = logits.amax((0, 2, 3))  # of each head

    watch_logits(model, documents, note)
    for step in STEPS:
        tokens, labels = global_batch(step)
        logits = model(tokens, documents=documents).flatten(0, 1)
        F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE).backward()
        optimizer.step()
        optimizer.zero_grad()
        figures.append({})
        if step == INTERVAL:
            largest = max(own.max().item() for own in noted.values())
            threshold = 0.8 * largest
            factors = _clip(model, args, noted, threshold)
            assert 0 < sum(factor < 1 for factor in factors) < len(factors)
            figures[-1] = {"qk_clip/max_logit": largest, "qk_clip/smallest_factor": min(factors)}
    return threshold, figures, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("dims", "options"), slow_but("fsdp-tp", MESHES))
def test_weights_are_those_of_plain_pytorch(on_ranks, dims, options) -> None:
    threshold, want_figures, want = reference(options)
    stages: dict[str, torch.Tensor] = {}
    for figures, weights in on_ranks(dims.num_ranks, _train, dims, options, threshold):
        clipped = [{k: x for k, x in of.items() if k.startswith("qk_clip/")} for of in figures]
        for got, wanted in zip(clipped, want_figures, strict=True):
            assert got == pytest.approx(wanted, rel=BOUND)
        stages |= weights
    assert stages.keys() == want.keys()
    for name, weight in stages.items():
        assert (weight - want[name]).norm() <= BOUND * want[name].norm(), name


def test_a_skipped_step_clips_nothing_and_clipped_heads_are_the_same_to_the_bit(on_ranks) -> None:
    on_ranks(1, _skip)


def _skip() -> None:
    job = Job(mesh())
    clip = QKClip(job.model, job.meshes, TINY.table, 1e-9, 1)
    before, positions = job.weights(), torch.arange(SEQ_LEN)
    clip.measure(job.batches(1), positions)
    figures = clip.apply(torch.tensor(True))
    assert figures["qk_clip/smallest_factor"] == 1
    assert_equal(job.weights(), before)
    clip.measure(job.batches(1), positions)
    assert clip.apply(torch.tensor(False))["qk_clip/smallest_factor"] < 1
    changed = {name for name, weight in job.weights().items() if not weight.equal(before[name])}
    assert changed == {
        n for n in before if n.endswith(("attention.wq.weight", "attention.wk.weight"))
    }
    clip.measure(job.batches(1), positions)
    assert clip.apply(torch.tensor(True))["qk_clip/max_logit"].item() == pytest.approx(
        1e-9, rel=1e-5
    )


def test_logits_that_are_no_numbers_clip_nothing() -> None:
    largest = torch.tensor([math.inf, 1, math.nan, 3, -math.inf, -4, 2, 8])
    factors = clip_factors(largest, 4, 4.0)
    assert factors.tolist() == [1, 1, 1, 0.5]
    rows = row_factors(factors, ((1, 0.5), (2, 1.0)), 24)
    assert rows[-6:].tolist() == pytest.approx([math.sqrt(0.5), 0.5, 0.5] * 2)
    assert rows[:-6].eq(1).all()
