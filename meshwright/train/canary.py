"""A microbatch that all data-parallel ranks compute alike, as sums of the bits of its results.

It isn't of the data: each rank makes the same tokens from the number of the step. Gradients aren't
reduced, so a rank that computes wrongly differs from the others. The stages of a pipeline get
activations and gradients of their own: no stage waits for another, or is given its errors.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from meshwright.config.training import Training
from meshwright.models.decoder import Decoder
from meshwright.models.loss import Batch
from meshwright.models.parameter import block_of
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.meshes import Meshes
from meshwright.parallelisms.sequence_parts import local_part, local_positions
from meshwright.parallelisms.shards import is_fsdp, local_shard
from meshwright.parallelisms.shared_memory import fsdp_groups
from meshwright.train.fingerprints import bit_sum


class Canary:
    """The microbatch on this rank's part of a model. Training is bitwise the same with it.

    It holds the gradients of one block at a time: each is freed once its bits are added up.

    Attributes:
        names: of the sums, in the order in which the results are computed.
        blocks: of the sums of weights.
    """

    def __init__(self, model: LocalModel, meshes: Meshes, training: Training) -> None:
        self._model, self._meshes, self._training = model, meshes, training
        self.device = torch.device(meshes.world.device_type)
        self.names = list[str]()
        for stage in model.stages:
            blocks = dict.fromkeys(block_of(name) for name, _ in stage.named_parameters())
            forward = [block for block in blocks if block.startswith("layers.")]
            forward += ["output"] if stage.output is not None else []
            self.names += [f"forward of {block}" for block in forward]
            self.names += [f"backward of {block}" for block in reversed(blocks)]
        parameters = model.named_parameters()
        self.blocks = list(dict.fromkeys(block_of(name) for name, _ in parameters))
        self._sums = torch.zeros(len(self.names), dtype=torch.int64, device=self.device)

    def sums(self, step: int) -> Tensor:
        """Return the sums of bits, in the order of `names`: (N,) int64. Collective, but over no
        data-parallel rank except to gather parameters.

        Args:
            step: tells microbatches apart.
        """
        generator = torch.Generator(self.device).manual_seed(step)
        self._sums.zero_()
        for stage in self._model.stages:
            with _buffers_kept(stage), self._noted(stage):
                self._compute(stage, generator)
        return self._sums.clone()

    def weight_sums(self) -> Tensor:
        """Return the sums of the bits of this rank's weights, in the order of `blocks`: int64."""
        sums = torch.zeros(len(self.blocks), dtype=torch.int64, device=self.device)
        for name, parameter in self._model.named_parameters():
            of_shard = bit_sum(local_shard(parameter)).to(self.device)
            sums[self.blocks.index(block_of(name))] += of_shard
        return sums

    def _compute(self, stage: Decoder, generator: torch.Generator) -> None:
        """Forward and backward of a stage, without a reduction of gradients."""
        batch = self._batch(stage, generator)
        positions = local_positions(self._training.seq_len, self._meshes.cp, self.device)
        batch = local_part(batch, positions)
        x = batch.tokens
        if stage.tok_embeddings is None or stage.has_copy:
            x = self._activation(generator).requires_grad_()
            first = next(iter(stage.layers))
            x.register_hook(lambda gradient: self._add(f"backward of layers.{first}", gradient))
        with _deterministic_attention(self.device):
            out = stage(x, batch.labels, positions=positions, documents=batch.documents)
            if stage.output is not None:
                self._add("forward of output", out)
                gradient = torch.full_like(out, 1 / batch.labels.numel())
            else:
                gradient = self._activation(generator)
            with _deterministic_kernels(self.device):
                out.backward(gradient)

    def _batch(self, stage: Decoder, generator: torch.Generator) -> Batch:
        """Return a microbatch of random tokens, two documents in each sequence."""
        training = self._training
        shape = training.local_batch_size, training.seq_len
        vocab_size = stage.table.vocab_size
        tokens = torch.randint(vocab_size, shape, generator=generator, device=self.device)
        documents = None
        if training.mask_documents:
            documents = torch.zeros(shape, dtype=torch.int32, device=self.device)
            documents[:, shape[1] // 2 :] = 1
        return Batch(tokens, tokens.roll(-1, 1), documents)

    def _activation(self, generator: torch.Generator) -> Tensor:
        """Return what a stage of the pipeline could get from another: (B, S/cp/tp, D)."""
        assert self._model.pipeline is not None
        like = self._model.pipeline.activation
        return torch.randn(like.shape, generator=generator, device=self.device, dtype=like.dtype)

    def _add(self, name: str, result: Tensor) -> None:
        self._sums[self.names.index(name)] += bit_sum(local_shard(result)).to(self.device)

    @contextmanager
    def _noted(self, stage: Decoder) -> Iterator[None]:
        """Within, add up the bits of what blocks compute, and reduce no gradient."""
        assert is_fsdp(stage)  # as there are several ranks
        stage.set_requires_gradient_sync(False)
        stage.set_reshard_after_backward(True)
        stage.set_is_last_backward(True)
        # FSDP2 has gathered them before, and keeps the objects, though not their memory; modules of
        # one group all have it
        gathered = {
            own.sharded_param: own.unsharded_param
            for group in fsdp_groups(stage)
            for own in group.fsdp_params
        }
        hooks = [
            gathered[parameter].register_post_accumulate_grad_hook(
                self._take_gradient(f"backward of {block_of(name)}")
            )
            for name, parameter in stage.named_parameters()
            if parameter.requires_grad
        ]
        blocks = dict(stage.layers.items())
        for name, block in blocks.items():
            stage.layers[name] = _Watched(block, name, self._add)
        try:
            yield
        finally:
            stage.layers.update(blocks)
            for hook in hooks:
                hook.remove()
            stage.set_requires_gradient_sync(True)

    def _take_gradient(self, name: str) -> Callable[[Tensor], None]:
        def take(parameter: Tensor) -> None:
            assert parameter.grad is not None  # this is called when it has one
            self._add(name, parameter.grad)
            parameter.grad = None

        return take


class _Watched(nn.Module):
    """A block, and around it what adds up the bits of its output and of the output's gradient.

    A hook on the block itself would be compiled with it, anew.
    """

    def __init__(self, block: nn.Module, name: str, add: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self.block, self.feed_forward = block, block.feed_forward
        self._name, self._add = f"layers.{name}", add

    def forward(self, *inputs: Tensor | None) -> Tensor | tuple[Tensor, ...]:
        """Return what the block does."""
        result: Tensor | tuple[Tensor, ...] = self.block(*inputs)
        out = result if isinstance(result, Tensor) else result[0]
        self._add(f"forward of {self._name}", out)
        if out.requires_grad:
            out.register_hook(lambda gradient: self._add(f"backward of {self._name}", gradient))
        return result


@contextmanager
def _buffers_kept(stage: Decoder) -> Iterator[None]:
    """Undo what forward notes in buffers, as the counts of routers."""
    kept = [(buffer, buffer.clone()) for buffer in stage.buffers()]
    try:
        yield
    finally:
        for buffer, before in kept:
            buffer.copy_(before)


@contextmanager
def _deterministic_attention(device: torch.device) -> Iterator[None]:
    """Within, leave out cuDNN's attention on GPUs, whose backward isn't deterministic. Compiled
    blocks keep the kernel that they were traced with."""
    if device.type != "cuda":
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel  # with torch's compiler

    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(kernels, set_priority=True):
        yield


@contextmanager
def _deterministic_kernels(device: torch.device) -> Iterator[None]:
    """Within, take deterministic kernels on GPUs, where torch has some. For backward only: compiled
    blocks would be compiled anew for a forward within."""
    if device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        yield
        return
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        with warnings.catch_warnings(action="ignore"):  # of kernels that have no such way
            yield
    finally:
        torch.use_deterministic_algorithms(False)
