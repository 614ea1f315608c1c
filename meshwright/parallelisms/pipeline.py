"""Pipeline parallelism: each rank has some of the layers, and microbatches travel through them."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from meshwright.config.training import Training
from meshwright.models.decoder import Decoder
from meshwright.models.layers import Embedding
from meshwright.models.loss import Batch
from meshwright.parallelisms.data_parallel import accumulate_in_reduce_dtype
from meshwright.parallelisms.meshes import Meshes
from meshwright.parallelisms.rules.stages import SCHEDULES, stages_of_rank
from meshwright.parallelisms.shards import is_dtensor
from meshwright.system.modules import has_torch


class Stage(PipelineStage):
    """A stage of torch's, with three differences.

    If it has a weight in several places (`meets_weight_again`), it computes all gradients at once.
    Weight gradients that are computed apart from input gradients are added up in FSDP2's
    `reduce_dtype`, as others are. And it sends no first message to a stage on its own rank:
    schedules that go through the ranks as a V have neighboring stages on one rank; torch 2.11 lets
    them greet by messages like others, and gloo has no connection from a rank to itself. 2.13 does
    not call this.

    Attributes:
        is_known: the graph of a microbatch has been looked at, or needs no look.
    """

    is_known = False

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(*args, **kwargs)
        if not self.is_known and isinstance(output, Tensor) and output.grad_fn is not None:
            self.is_known = True
            if meets_weight_again(output.grad_fn, self.submod.parameters()):
                self.dw_builder = _nothing_left
        return output

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        accumulate_in_reduce_dtype(self.submod)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        messages = super()._get_init_p2p_neighbors_ops()
        return [message for message in messages if message.group_peer != self.group_rank]


def meets_weight_again(end: Node, weights: Iterable[Tensor]) -> bool:
    """Return whether the way back through a graph, from its end to an input that is no weight,
    comes from one place of a weight to another: of an embedding that is tied and MTP looks up
    tokens in, or of a module of the user's.

    Torch then can't compute gradients of inputs and of weights one after the other: from the later
    place it goes through all layers to the earlier one, and frees them, before it has the gradients
    of their weights (`stage_backward_weight` of torch 2.13).
    """
    numbers = {id(weight): number for number, weight in enumerate(weights)}
    known: dict[Node, tuple[bool, int]] = {}  # does it lead to an input; bits of weights behind it
    waiting = [end]
    while waiting:
        node = waiting[-1]
        behind = [following for following, _ in node.next_functions if following is not None]
        if unknown := [following for following in behind if following not in known]:
            waiting += unknown
            continue
        waiting.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            number = numbers.get(id(leaf))
            known[node] = (True, 0) if number is None else (False, 1 << number)
            continue
        on_way = beside = 0
        for is_on_way, found in (known[following] for following in behind):
            on_way |= found if is_on_way else 0
            beside |= 0 if is_on_way else found
        is_on_way = any(known[following][0] for following in behind)
        if on_way & beside:
            return True
        known[node] = (is_on_way, on_way | beside)
    return False


def _nothing_left() -> Callable[[], None]:
    """Tell torch's stage that its first backward computes the gradients of weights too."""
    return lambda: None


class Pipeline:
    """This rank's part of a schedule of `torch.distributed.pipelining`.

    The model was split by layer, not traced, so whatever a layer does (casts, custom kernels) it
    still does.

    Args:
        stages: this rank's, by index.
        num_stages: over all ranks.
        first_trained: index of the first stage that has a parameter to train.
    """

    def __init__(
        self,
        stages: dict[int, Decoder],
        num_stages: int,
        meshes: Meshes,
        training: Training,
        *,
        schedule: str,
        first_trained: int,
        device: torch.device,
    ) -> None:
        mesh, local_batch_size = meshes.pp, training.local_batch_size
        num_microbatches = training.global_batch_size // (local_batch_size * meshes.dp.size())
        # shapes are given: torch would find them by an extra forward and backward of every stage
        seq_len = training.seq_len // meshes.cp.size()
        dim = next(iter(stages.values())).table.dim
        with torch.device("meta"):
            tokens = torch.empty(local_batch_size, seq_len, dtype=torch.int64)
            loss = torch.empty((), requires_grad=True)
            activation = torch.empty(  # (B, S/cp/tp, D)
                local_batch_size,
                seq_len // meshes.tp.size(),
                dim,
                dtype=getattr(torch, training.mixed_precision_param),
            )
        # Nothing before `first_trained` needs a gradient. Schedules that split backward get one all
        # the same: torch finds no gradients of weights where the input needs none (2.13). And 2.12
        # sends one from every stage.
        sends_all = SCHEDULES[schedule].splits_backward or (
            has_torch(2, 12) and not has_torch(2, 13)
        )
        needs_gradient = 1 if sends_all else first_trained + 1
        indices = range(num_stages)
        passed_on = [activation.detach().requires_grad_(i >= needs_gradient) for i in indices]
        wrapped = [
            Stage(
                module,
                index,
                num_stages,
                device,
                input_args=passed_on[index] if index else tokens,
                output_args=passed_on[index + 1] if index < num_stages - 1 else loss,
                group=mesh.get_group(),
            )
            for index, module in stages.items()
        ]
        for stage in wrapped:
            # the first stage computes all at once anyway
            stage.is_known = stage.is_first or not SCHEDULES[schedule].splits_backward
        cls = get_schedule_class(schedule)
        self._num_labels = torch.empty(())
        self.schedule = cls(
            wrapped[0] if issubclass(cls, PipelineScheduleSingle) else wrapped,
            num_microbatches,
            loss_fn=lambda loss, _: loss / self._num_labels,
            scale_grads=False,  # the loss is divided once, by the global number of labels
        )
        self.stages, self._group = stages, mesh.get_group()
        self._ranks = [
            rank
            for index in indices
            for rank in range(mesh.size())
            if index in stages_of_rank(rank, mesh.size(), num_stages, schedule)
        ]
        self.activation = activation
        """A stage's output, on meta."""
        self.summary = (
            f"pipeline: {num_stages} stages on {mesh.size()} ranks, {schedule}, "
            f"{num_microbatches} microbatches"
        )
        """A line for the log."""
        self._has_last = num_stages - 1 in stages
        self._copied = self._copied_embedding(num_stages)
        # the first call of an NCCL group needs all of its ranks (torch's batch_isend_irecv), and a
        # schedule's first messages are between two
        dist.all_reduce(torch.zeros((), device=device), group=self._group)

    def run(self, batches: Sequence[Batch], positions: Tensor, num_labels: Tensor) -> Tensor:
        """Forward and backward of every microbatch, gradients communicated once at the end.
        Collective over the pp axis.

        Args:
            batches: the same on all its ranks; tokens and labels are (B, S/cp).
            positions: (S/cp,) int64 of the tokens.
            num_labels: () labels that count, over all data-parallel ranks and microbatches; or the
                sum of their weights.

        Returns:
            () fp32: sum of the losses, divided by `num_labels`; zero on ranks without the last
                stage.
        """
        # torch wants one batch, and cuts it into microbatches along the first dimension
        tokens = torch.cat([batch.tokens for batch in batches])
        labels = torch.cat([batch.labels for batch in batches])
        # of every stage; the last takes the labels
        inputs = {"labels": labels, "positions": positions.expand(len(tokens), -1)}
        for name in batches[0].optional:
            inputs[name] = torch.cat([getattr(batch, name) for batch in batches])
        self._num_labels = num_labels
        losses: list[Tensor] = []
        try:
            self.schedule.step(
                tokens,
                **inputs,
                target=labels,  # without it torch computes no loss
                losses=losses,
                return_outputs=False,
            )
        except RuntimeError as error:
            if (cause := error.__cause__) is None:
                raise
            # torch's error says in which stage; callers ask for a timeout, or a lack of memory
            cause.add_note(str(error))
            raise cause from None
        self._sum_copied_gradients(tokens.device)
        if not self._has_last:
            return torch.zeros((), device=tokens.device)
        return torch.stack([loss.detach() for loss in losses]).sum()

    def _copied_embedding(self, num_stages: int) -> tuple[Embedding, int] | None:
        """Return this rank's embedding, and the rank of the group that has the other, if the first
        stage and the last have it: if it is tied, or predictors look up tokens. None: it has none.
        """
        ends = {0: self._ranks[-1], num_stages - 1: self._ranks[0]}
        for index, other in ends.items():
            stage = self.stages.get(index)
            if stage is not None and stage.table.copies_embedding:
                assert stage.tok_embeddings is not None
                return stage.tok_embeddings, other
        return None

    @torch.no_grad()
    def _sum_copied_gradients(self, device: torch.device) -> None:
        """Add the gradient of the other copy of the embedding to this one's, so that both get the
        same update: a sum of two has the same bits in either order."""
        if self._copied is None:
            return
        embedding, other = self._copied
        gradient = embedding.weight.grad
        if gradient is None:  # it is frozen
            return
        local = gradient.to_local() if is_dtensor(gradient) else gradient
        mine = local.to(device).contiguous()  # offloaded gradients are on the host
        theirs = torch.empty_like(mine)
        message = partial(dist.P2POp, group=self._group, group_peer=other)
        for work in dist.batch_isend_irecv(
            [message(dist.isend, mine), message(dist.irecv, theirs)]
        ):
            work.wait()
        local.add_(theirs.to(local.device))

    def forward_all(
        self, batches: Sequence[Batch], positions: Tensor, take: Callable[[Tensor, Batch], None]
    ) -> None:
        """As `LocalModel.forward_all`; at each beat every microbatch moves on by one stage.

        So in beat t stage s has microbatch t - s. All messages of a beat are exchanged at once and
        in the order of stages, hence two ranks can't wait for each other.
        """
        rank, ranks = dist.get_rank(self._group), self._ranks
        message = partial(dist.P2POp, group=self._group)
        inputs: dict[int, Tensor] = {}  # of the next beat, by stage
        for beat in range(len(batches) + len(ranks) - 1):
            outputs: dict[int, Tensor] = {}
            for index, stage in self.stages.items():
                if 0 <= beat - index < len(batches):
                    batch = batches[beat - index]
                    x = batch.tokens if index == 0 else inputs.pop(index)
                    # a row for each sequence, as in training, where torch cuts them into
                    # microbatches: compiled blocks are then given the same shapes
                    rows = positions.expand(len(batch.tokens), -1)
                    out = stage(x, batch.labels, positions=rows, documents=batch.documents)
                    if index == len(ranks) - 1:
                        take(out, batch)
                    else:
                        outputs[index] = out.contiguous()
            messages: list[dist.P2POp] = []
            for index, (source, target) in enumerate(pairwise(ranks)):  # from each to the next
                if not 0 <= beat - index < len(batches):
                    continue
                if rank == source == target:
                    inputs[index + 1] = outputs[index]
                elif rank == source:
                    messages.append(
                        message(dist.isend, outputs[index], tag=index, group_peer=target)
                    )
                elif rank == target:
                    size = len(batches[beat - index].tokens)
                    received = torch.empty_like(self.activation[:size], device=positions.device)
                    inputs[index + 1] = received
                    messages.append(message(dist.irecv, received, tag=index, group_peer=source))
            for work in dist.batch_isend_irecv(messages) if messages else ():
                work.wait()
