"""One rank's part of the model."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from meshwright.config.training import Training
from meshwright.models.decoder import Decoder
from meshwright.models.loss import Batch, SummedLoss
from meshwright.models.parameter import block_of
from meshwright.parallelisms.expert_load import Balance
from meshwright.parallelisms.meshes import Meshes
from meshwright.parallelisms.rules.stages import stages_of_rank
from meshwright.parallelisms.shards import is_fsdp

if TYPE_CHECKING:
    from meshwright.parallelisms.pipeline import Pipeline


class LocalModel(nn.Module):
    """This rank's stages, and a view of all their parameters under the plain model's names.

    It has no forward: a step calls `stages[0]`, or `pipeline` where there is one.
    """

    stages: tuple[Decoder, ...]
    """In the order of the model; without a pipeline one, the whole model."""
    pipeline: "Pipeline | None"
    balance: Balance
    """The part of a step that evens out the expert load."""

    def __init__(self, stages: Sequence[Decoder], pipeline: "Pipeline | None" = None) -> None:
        super().__init__()
        self.stages, self.pipeline = tuple(stages), pipeline
        self.balance = Balance(stages)
        self.layers = nn.ModuleDict()
        for stage in stages:
            self.layers.update(dict(stage.layers.items()))
            for name, child in stage.named_children():
                if name != "layers":
                    self.add_module(name, child)

    def named_parameters_once(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters with their names, without the last stage's copy of the embedding:
        over the ranks of a pipeline each has one place."""
        copies = {s.tok_embeddings.weight for s in self.stages if s.has_copy and s.tok_embeddings}
        yield from (pair for pair in self.named_parameters() if pair[1] not in copies)

    def take_mtp_losses(self, device: torch.device) -> Tensor:
        """Return the losses of each depth in this step, (k,) fp32, zeros where the last stage
        isn't; and start the next step."""
        losses = torch.zeros(self.stages[0].table.mtp_depth, device=device)
        for stage in self.stages if len(losses) else ():
            losses += stage.mtp_losses
            stage.mtp_losses.zero_()
        return losses

    def forward_all(
        self, batches: Sequence[Batch], positions: Tensor, take: Callable[[Tensor, Batch], None]
    ) -> None:
        """Forward of every microbatch, for its loss: to be called without gradients. Collective.

        After the last call, `reset_after_no_grad` is due.

        Args:
            batches: tokens and labels are (B, S/cp).
            positions: (S/cp,) int64 of the tokens.
            take: called with the summed loss of each microbatch, where the last stage is.
        """
        if self.pipeline is not None:
            self.pipeline.forward_all(batches, positions, take)
            return
        for batch in batches:
            loss = self.stages[0](
                batch.tokens, batch.labels, positions=positions, documents=batch.documents
            )
            take(loss, batch)

    @contextmanager
    def with_loss(self, make: Callable[[SummedLoss], SummedLoss]) -> Iterator[None]:
        """Within, the last stage computes what `make` makes of its loss."""
        outputs = [stage.output for stage in self.stages if stage.output is not None]
        before = [output.loss for output in outputs]
        for output in outputs:
            output.loss = make(output.loss)
        try:
            yield
        finally:
            for output, loss in zip(outputs, before, strict=True):
                output.loss = loss


def allocate(model: nn.Module, parameters: torch.device, buffers: torch.device) -> None:
    """Give tensors of `model` on meta memory on these devices; values are arbitrary."""

    def empty(like: Tensor, device: torch.device) -> Tensor:
        # not `empty_like`: of tensors on meta it imports torch's symbolic shapes, which takes 0.2 s
        return torch.empty(like.shape, dtype=like.dtype, device=device)

    if is_fsdp(model):
        model.to_empty(device=parameters)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                own = nn.Parameter(empty(parameter, parameters), parameter.requires_grad)
                module.register_parameter(name, own)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, empty(buffer, buffers))


Allocate = Callable[[nn.Module, torch.device, torch.device], None]
"""Does the work of `allocate`; planning gives fake memory."""


def build_local_model(
    build: Callable[[], Decoder],
    prepare: Callable[[Decoder], None],
    stage_modules: Sequence[Sequence[str]],
    *,
    frozen: Collection[str] = (),
    fp32_modules: Collection[str] = (),
    meshes: Meshes,
    training: Training,
    schedule: str,
    device: torch.device,
) -> LocalModel:
    """Build this rank's stages on meta, cut and prepare them. Values are arbitrary yet. Collective.

    Args:
        build: the whole model.
        prepare: parallelises a stage that is on meta, and gives it memory.
        stage_modules: names of the modules of every stage; one stage: no pipeline.
        frozen: names of parameters that aren't trained.
        fp32_modules: names of modules whose parameters are fp32.
        schedule: of the pipeline, if there is one.
        device: of activations.
    """
    num_stages, stages = len(stage_modules), dict[int, Decoder]()
    for index in stages_of_rank(meshes.pp.get_local_rank(), meshes.pp.size(), num_stages, schedule):
        with torch.device("meta"):
            stages[index] = build()
        keep_modules(stages[index], stage_modules[index])
        for name, parameter in stages[index].named_parameters():
            if not name.startswith(tuple(f"{module}." for module in fp32_modules)):
                parameter.data = parameter.data.to(getattr(torch, training.dtype))
        prepare(stages[index])
        # not before: torch's SequenceParallel makes norms anew, trainable (2.13). FSDP2 asks which
        # parameters are trained no sooner than in the first forward.
        for name, parameter in stages[index].named_parameters():
            parameter.requires_grad_(name not in frozen)
    if num_stages == 1:
        return LocalModel([stages[0]])
    from meshwright.parallelisms.pipeline import Pipeline  # torch's part takes a while

    table = next(iter(stages.values())).table
    trained = {block_of(name) for name in table.parameters if name not in frozen}
    used = (index for index, modules in enumerate(stage_modules) if trained.intersection(modules))
    pipeline = Pipeline(
        stages,
        num_stages,
        meshes,
        training,
        schedule=schedule,
        first_trained=next(used),
        device=device,
    )
    return LocalModel([*stages.values()], pipeline)


def keep_modules(model: Decoder, names: Sequence[str]) -> None:
    """Make `model` the stage that has the modules `names`, in place; best on the meta device."""
    for name in list(model.layers):
        if f"layers.{name}" not in names:
            del model.layers[name]
    for name, _ in list(model.named_children()):
        if name != "layers" and name not in names:
            setattr(model, name, None)
    model.has_copy = "tok_embeddings" in names and "layers.0" not in names
