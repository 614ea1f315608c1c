"""One rank of a job in this process, by the trainer's own functions, without data, memory or a GPU.

Fake tensors are on the CPU, because torch's CPU build has no others. Where the project's code or
torch asks for the device, `as_gpu` puts in the answer of a GPU; the rest is the same code. The test
of the simulated GPU compares the two.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from meshwright.commands.plan import torch_names
from meshwright.commands.plan.ledger import HOST, Ledger, Record
from meshwright.commands.plan.torch_names import (
    MASK_BLOCK,
    FakeTensorMode,
    below_autograd,
    flex_attention_operator,
)
from meshwright.commands.plan.trace import Scope, Trace, TraceEntry
from meshwright.config.changes import changed
from meshwright.config.job_config import JobConfig
from meshwright.config.section import BYTES
from meshwright.config.training import Training, WeightedSource
from meshwright.models import attention, decoder, loss
from meshwright.models.attention import repeat_heads
from meshwright.models.loss import Batch
from meshwright.parallelisms import context_parallel, expert_parallel, parallelize
from meshwright.parallelisms.fused_attention import KERNELS
from meshwright.parallelisms.local_model import LocalModel, allocate
from meshwright.parallelisms.meshes import Meshes, build_meshes
from meshwright.system.errors import check
from meshwright.system.modules import has_torch
from meshwright.train.bad_steps import BadStepDetector
from meshwright.train.build import build_trainer
from meshwright.train.facts import look
from meshwright.train.optim import gradients
from meshwright.train.optim.update import update
from meshwright.train.resolve import ResolvedJob, resolve
from meshwright.train.trainer import Trainer

CPU = torch.device("cpu")

DEFAULTS = JobConfig()


@dataclass(frozen=True)
class Simulation:
    """The first update of one rank, and its step 2, when the optimizer has its state."""

    record: Record
    """Of both; with the optimizer in backward of step 2 only."""
    entries: list[TraceEntry]
    """In the order of the program."""
    simulated: int
    """Microbatches."""
    left_out: int = 0
    """Microbatches of the step that repeat one of them."""

    @property
    def repeated(self) -> int:
        """The microbatch that stands for the ones left out."""
        return max(1, self.simulated - 1)

    @property
    def num_groups(self) -> int:
        """Process groups that communicate: one for each axis."""
        return len({entry.axis for entry in self.entries if entry.axis})

    def whole_step(self) -> Iterator[tuple[int, TraceEntry]]:
        """Yield every entry, with how many times the whole step has it."""
        for entry in self.entries:
            yield (1 + self.left_out if entry.at.microbatch == self.repeated else 1), entry


def simulate(
    resolved: ResolvedJob, rank: int, *, is_gpu: bool, imbalance: float = 1.0
) -> Simulation:
    """Simulate a step of `rank` on fake tensors.

    Args:
        is_gpu: choose kernels as on a GPU.
        imbalance: rows of the rank's experts over the mean of all ranks, in every layer; more than
            `worst_imbalance` counts as that.
    """
    dealt = partial(deal, imbalance=min(imbalance, worst_imbalance(resolved)))
    torch_names.start_fake_process_group(rank, resolved.dims.num_ranks)
    try:
        meshes = build_meshes(resolved.dims, "cpu")
        with (
            as_gpu() if is_gpu else nullcontext(),
            torch_names.static_pipelines(),
            mock.patch.object(expert_parallel, "on_host", dealt),
            # the compiler joins casts to other operators, so `entry_seconds` counts them
            mock.patch.object(parallelize, "apply_float8", return_value=""),
            mock.patch.object(parallelize, "share_float8_scales"),
        ):
            return run_step(
                resolved, meshes, FakeTensorMode(allow_non_fake_inputs=True), is_gpu=is_gpu
            )
    finally:
        dist.destroy_process_group()


def worst_imbalance(resolved: ResolvedJob) -> float:
    """Return `simulate`'s imbalance if every token goes to the same experts, on one rank if they
    fit there; 1: no rank can have more rows than others."""
    mixtures = resolved.model_args.table.mixtures.values()
    return min([max(resolved.dims.ep, 1.0), *(one.n_experts / one.n_active for one in mixtures)])


def deal(splits: Tensor, num_rows: int, imbalance: float = 1.0) -> list[list[int]]:
    """Do `on_host` where tensors have no values: as many rows to every rank, and `imbalance` times
    as many from each."""
    size = splits.shape[1]
    each = [num_rows // size + (rank < num_rows % size) for rank in range(size)]
    return [each, [math.ceil(imbalance * rows) for rows in each]]


def run_step(
    resolved: ResolvedJob, meshes: Meshes, fake: FakeTensorMode | None, *, is_gpu: bool = False
) -> Simulation:
    """Take a step of this rank with a ledger.

    Args:
        is_gpu: offloaded tensors aren't in the planned memory.
        fake: mode of the tensors; None: real ones.
    """
    simulated, num_microbatches = num_simulated(resolved), resolved.config.num_microbatches
    is_early, mode = resolved.config.optimizer.early_step_in_backward, fake or nullcontext()
    # a CPU plans for itself: there, offloaded tensors are in the memory that is planned
    is_offloaded = is_gpu and resolved.config.training.enable_cpu_offload
    if resolved.dims.pp > 1:  # a schedule is made for a number of microbatches
        samples = resolved.config.training.global_batch_size // num_microbatches * simulated
        shorter = changed(resolved.config, {"training": {"global_batch_size": samples}})
        resolved = replace(resolved, config=shorter)
    scope = Scope()
    trace = Trace(meshes, scope, resolved.float8_layers)
    ledger = Ledger(scope, trace.see, fake, has_copies=not is_gpu)

    def note_shards(tensors: Iterable[Tensor | None], purpose: str) -> None:
        there = (tensor for tensor in tensors if isinstance(tensor, Tensor))
        ledger.note(there, HOST if is_offloaded else purpose)

    with (
        torch_names.resizes_seen(ledger.resize),
        torch_names.shadows_marked(ledger.mark_shadow),
        scope,
        ledger,
    ):
        trainer = eager_trainer(resolved, meshes, mode)
        model, optimizer = trainer.model, trainer.optimizer
        scope.name_modules(model.stages)
        note_shards(model.parameters(), "parameters")
        if trainer.average is not None:
            note_shards(trainer.average.tensors.values(), "parameters")
        for stage in model.stages:  # the model itself has none
            ledger.note(stage.buffers(), "parameters")

        def note_gradients(*_: object) -> None:
            for group in optimizer.param_groups:
                note_shards((p.grad for p in group["params"]), "gradients")

        optimizer.register_step_pre_hook(note_gradients)
        with mode:
            detector = BadStepDetector(CPU, resolved.config.bad_steps)
            batches = make_batches(resolved, num_microbatches)
            kept = list(_pipeline_buffers(resolved, model, num_microbatches - simulated))
            ledger.note(kept, "communication buffers")
            for batch in batches:
                ledger.note((x for x in vars(batch).values() if x is not None), "activations")
            if not is_early:  # it would have all gradients at once
                ledger.begin()  # the first update is in the plan: making its state takes memory
            _give_state(model, optimizer)
            for state in optimizer.state.values():
                note_shards(state.values(), "optimizer")
            trace.entries.clear()
            if is_early:
                ledger.begin()
            # statistics of layers and QK-clip aren't of every step: of these, the copy of the
            # weights counts
            if trainer.layer_stats is not None:
                keep_weights = trainer.layer_stats.keep_weights
                optimizer.register_step_pre_hook(lambda *_: keep_weights())
            step = replace(trainer, layer_stats=None, qk_clip=None).step
            step(2, batches[:simulated], detector)
        ledger.settle()
    return Simulation(ledger.record, trace.entries, simulated, num_microbatches - simulated)


def num_simulated(resolved: ResolvedJob) -> int:
    """Return how many microbatches stand for all of a step.

    The first makes the sums of gradients, the second adds to them, and the last reduces them. In a
    pipeline, 1F1B and its kin reach a steady state; GPipe and schedules that go as a V don't, or
    late, and are simulated whole.
    """
    ranks, schedule = resolved.dims.pp, resolved.config.parallelism.pipeline_parallel_schedule
    if ranks == 1:
        return min(resolved.config.num_microbatches, 3)
    steady = {"1F1B": ranks + 2, "Interleaved1F1B": 3 * ranks}.get(schedule)
    # microbatches are left out in whole rounds over the ranks, as Interleaved1F1B takes them
    left_out = max(0, resolved.config.num_microbatches - steady) // ranks * ranks if steady else 0
    return resolved.config.num_microbatches - left_out


def eager_trainer(
    resolved: ResolvedJob, meshes: Meshes, mode: AbstractContextManager[Any]
) -> Trainer:
    """Build the trainer of this rank, with eager blocks: its tensors in `mode`, and meshes and
    modules outside."""
    eager = {"compile": {"enable": False}, "parallelism": {"enable_async_tensor_parallel": False}}
    resolved = replace(resolved, config=changed(resolved.config, eager))

    def allocate_in_mode(model: nn.Module, parameters: torch.device, buffers: torch.device) -> None:
        with mode:
            allocate(model, parameters, buffers)

    return build_trainer(resolved, meshes, CPU, allocate=allocate_in_mode)


def make_batches(resolved: ResolvedJob, count: int) -> list[Batch]:
    """Return `count` microbatches, with three documents in each sequence if they are masked."""
    training, found = resolved.config.training, list[Batch]()
    shape = (training.local_batch_size, training.seq_len)
    for _ in range(count):
        tokens = torch.zeros(shape, dtype=torch.int64)
        documents = None
        if training.mask_documents:
            documents = (torch.arange(shape[1]) * 3 // shape[1]).int().repeat(shape[0], 1)
        future = {}
        if depth := resolved.model_args.mtp_depth:
            for name in ("future_tokens", "future_labels"):
                future[name] = torch.zeros(shape[0], depth, shape[1], dtype=torch.int64)
        found.append(Batch(tokens, torch.zeros_like(tokens), documents, **future))
    return found


def _give_state(model: LocalModel, optimizer: torch.optim.Optimizer) -> None:
    """Make the state that the optimizer has after its first step, by an update without one."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    update(optimizer, torch.ones((), dtype=torch.bool))
    optimizer.zero_grad()


def _pipeline_buffers(resolved: ResolvedJob, model: LocalModel, left_out: int) -> Iterator[Tensor]:
    """Yield the memory that a pipeline keeps for each of `left_out` microbatches.

    torch before 2.15 makes buffers for the activations and gradients that a stage receives, for
    every microbatch at the start; and a step makes one batch of all.
    """
    if model.pipeline is None:
        return
    training, last = resolved.config.training, len(resolved.pipeline_modules) - 1
    batch = (training.local_batch_size, training.seq_len // resolved.dims.cp)
    received = sum((index > 0) + (index < last) for index in model.pipeline.stages)
    for _ in range(left_out * 2):
        yield torch.empty(batch, dtype=torch.int64)
    for _ in range(0 if has_torch(2, 15) else left_out * received):
        yield torch.empty_like(model.pipeline.activation, device=CPU)


def plan_job(config: JobConfig, world_size: int, *, is_gpu: bool) -> ResolvedJob:
    """Check `config` for `world_size` ranks, but not for files, and not for memory.

    Raises:
        ConfigError: if the job can't run, or if only the compiler knows its memory.
    """
    mode, key = config.activation_checkpoint.mode, "activation_checkpoint.mode"
    rule = "only the compiler knows what it keeps"
    fix = 'plan mode = "none" for the most, and "full" for the least'
    check(mode != "memory_budget", key, mode, rule, fix)
    rule = "a plan counts the casts and the speed of float8 on GPUs only"
    fix = "plan without it: weights, gradients and optimizer take the same memory"
    check(is_gpu or not config.float8.enable, "float8.enable", True, rule, fix)
    checkpoint = config.checkpoint
    data = {*WeightedSource.model_fields, "datasets", "max_epochs", "max_bad_records"}
    sections = ("validation", "checkpoint", "metrics", "profiling", "sentry")
    config = config.model_copy(update={name: getattr(DEFAULTS, name) for name in sections})
    config = changed(
        config,
        {
            "job": {"max_run_seconds": 0, "dump_folder": tempfile.gettempdir()},
            "model": {"tokenizer_type": "", "tokenizer_path": BYTES, "chat_template_path": ""},
            "training": {n: getattr(DEFAULTS.training, n) for n in data & {*Training.model_fields}},
            "checkpoint": {
                name: getattr(checkpoint, name) for name in ("enable", "async_mode", "average")
            },
        },
    )
    # a plan is also of jobs that don't fit
    facts = look(config, world_size, expects_gpus=is_gpu, device_memory_gib=math.inf)
    facts = replace(facts, missing_packages=facts.missing_packages - {"torchao"})  # not needed
    return resolve(config, facts)


aten = torch.ops.aten

_on_cpu = F.scaled_dot_product_attention


@contextmanager
def as_gpu() -> Iterator[None]:
    """Within, attention, norms, document masks, the gradient norm and the loss's blocks are a
    GPU's."""
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (gradients, "CPU_CHUNK", 1 << 60),  # GPUs take the norm of a whole gradient
        (F, "scaled_dot_product_attention", _attention),
        (F, "rms_norm", RMSNorm.apply),
        (context_parallel, "KERNELS", {"cpu": KERNELS["flash"]}),
        (decoder, "block_mask", _block_mask),
        (decoder, "makes_blocks", lambda device: True),
        (attention, "flex_attention", flex_attention_operator),
        (loss, "BLOCKS", {"cpu": loss.BLOCKS["cuda"]}),
    )
    with ExitStack() as stack:
        for one in replaced:
            stack.enter_context(mock.patch.object(*one))
        yield


def _attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, enable_gqa: bool, **mask: Any
) -> Tensor:
    """Do `F.scaled_dot_product_attention` by the kernel of a GPU: flash attention for 16-bit types
    (cuDNN's, which newer GPUs take, keeps the same tensors), memory-efficient attention for fp32.
    """
    if "attn_mask" in mask:
        return _on_cpu(q, k, v, **mask, scale=scale, enable_gqa=enable_gqa)
    if q.dtype == torch.float32:
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        kernel = aten._scaled_dot_product_efficient_attention
        return kernel(q, k, v, None, True, **mask, scale=scale)[0]
    output, _ = KERNELS["flash"].forward(q, k, v, mask["is_causal"], scale)
    return output


class RMSNorm(torch.autograd.Function):
    """`F.rms_norm` by the kernel of a GPU, which keeps its input and one number per row. On CPUs
    several operators keep tensors of the input's size in fp32 (torch 2.13)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> Tensor:
        with below_autograd():
            output, scale = aten._fused_rms_norm(x, shape, weight, eps)
        ctx.save_for_backward(x, scale, weight)
        ctx.shape = shape
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor, None]:
        x, scale, weight = ctx.saved_tensors
        of_x, of_weight = aten._fused_rms_norm_backward(
            grad, x, ctx.shape, scale, weight, [True, True]
        )
        return of_x, None, of_weight, None


def _block_mask(
    documents: Tensor,
    positions: Tensor | None = None,
    window: int | None = None,
    keys: Tensor | None = None,
) -> BlockMask:
    """Make a mask of the size of `attention.block_mask`, without the dense one that the
    compiler spares a GPU.

    Its lists of blocks are as wide as a row of queries sees blocks with a window, by which
    `trace` knows how many pairs are computed. (torch's are as wide as all keys: a few bytes more.)
    """
    batch, seq_len = documents.shape
    num_queries = seq_len if positions is None else positions.shape[-1]
    num_keys = seq_len if keys is None else len(keys)
    rows, columns = -(-num_queries // MASK_BLOCK), -(-num_keys // MASK_BLOCK)
    if window is not None:
        columns = min(columns, 1 + -(-(window - 1) // MASK_BLOCK))
    counts = documents.new_zeros(batch, 1, rows, dtype=torch.int32)
    indices = documents.new_zeros(batch, 1, rows, columns, dtype=torch.int32)
    return BlockMask.from_kv_blocks(
        counts,
        indices,
        counts.clone(),
        indices.clone(),
        BLOCK_SIZE=MASK_BLOCK,
        mask_mod=lambda b, head, query, key: documents[b, query] == documents[b, key],
        seq_lengths=(num_queries, num_keys),
    )
