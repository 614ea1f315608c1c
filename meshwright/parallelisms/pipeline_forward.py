"""Forward through the stages of a pipeline, without a backward to follow.

Not by torch's schedule: its `eval` sends every rank through the training order, backward slots
included, and from torch 2.13 on sets all stages up anew at each change between `step` and `eval`.
Here nothing that training keeps is touched.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshwright.batch import Batch
from meshwright.models.decoder import Decoder


def forward_all(
    stages: Mapping[int, Decoder],
    ranks: Sequence[int],
    batches: Sequence[Batch],
    positions: Tensor,
    activation: Tensor,
    *,
    group: ProcessGroup,
    take: Callable[[Tensor, Batch], None],
) -> None:
    """Send every microbatch through all stages; at each beat every one moves on by one stage.

    So in beat t stage s has microbatch t - s. All messages of a beat are exchanged at once and
    in the order of stages, hence two ranks cannot wait for each other. Collective over `group`.

    Args:
        stages: this rank's, by index.
        ranks: of each stage, within `group`.
        positions: (S/cp,) int64 of the tokens.
        activation: (B, S/cp/tp, D), a stage's output; only its shape and type count.
        take: called with the summed loss of each microbatch, on the rank of the last stage.
    """
    rank = dist.get_rank(group)
    inputs: dict[int, Tensor] = {}  # of the next beat, by stage
    for beat in range(len(batches) + len(ranks) - 1):
        outputs: dict[int, Tensor] = {}
        for index, stage in stages.items():
            if 0 <= beat - index < len(batches):
                batch = batches[beat - index]
                x = batch.tokens if index == 0 else inputs.pop(index)
                # a row for each sequence, as in training, where torch cuts them into microbatches:
                # compiled blocks are then given the same shapes
                rows = positions.expand(len(batch.tokens), -1)
                outputs[index] = stage(x, batch.labels, positions=rows, documents=batch.documents)
                if index == len(ranks) - 1:
                    take(outputs.pop(index), batch)
        operations: list[dist.P2POp] = []
        for index in range(len(ranks) - 1):  # from each stage to the next
            if not 0 <= beat - index < len(batches):
                continue
            source, target = ranks[index], ranks[index + 1]
            if rank == source == target:
                inputs[index + 1] = outputs[index]
            elif rank == source:
                sent = outputs[index].contiguous()
                operations.append(
                    dist.P2POp(dist.isend, sent, group=group, tag=index, group_peer=target)
                )
            elif rank == target:
                inputs[index + 1] = torch.empty_like(activation, device=positions.device)
                operations.append(
                    dist.P2POp(
                        dist.irecv, inputs[index + 1], group=group, tag=index, group_peer=source
                    )
                )
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
