"""The load of experts over all ranks at the end of a step: biases of routers, and metrics."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.models.decoder import Decoder
from meshwright.models.router import mean_one


class Balance:
    """The end of a step for the routers in a rank's stages.

    Every sum goes over all ranks of the job: each token of a layer is on one of them.
    """

    def __init__(self, stages: Sequence[Decoder]) -> None:
        self._specs = stages[0].table.mixtures
        self._mixtures = {n: own for stage in stages for n, own in stage.mixtures().items()}
        self._loads: dict[int, Tensor] = {}

    @property
    def loads(self) -> dict[int, list[int]]:
        """Tokens of each expert in the last step, by the number of the layer; waits for the
        device."""
        return {number: load.tolist() for number, load in self._loads.items()}

    @torch.no_grad()
    def sums(self, device: torch.device, *, tells_biases: bool = True) -> Tensor:
        """(layers with experts, 5) fp32, this rank's summands of metrics; dense models have none.

        Args:
            tells_biases: whether the range of biases is this rank's to tell. One of the ranks
                with the same layers does: a sum of its parts would be rounded.
        """
        found = torch.zeros(len(self._specs), 5, device=device)
        for row, number in zip(found, self._specs, strict=True):
            if (mixture := self._mixtures.get(number)) is not None:
                row[:4] = mixture.figures
                if tells_biases:
                    row[4] = mixture.bias.max() - mixture.bias.min()
        return found

    @torch.no_grad()
    def after_step(self, sums: Tensor, skip_update: Tensor) -> Mapping[str, Tensor]:
        """Give routers the loads of the step, unless its update was held back, and start the next.
        Collective, if the model has experts.

        Biases of experts with fewer tokens than the mean rise by the rate, those of others fall.
        Source: Wang et al. 2024, arXiv:2408.15664, algorithm 1. Loads are integers, so biases are
        bitwise identical on every mesh.

        Args:
            sums: of every rank, added up.
            skip_update: () bool.

        Returns:
            Metrics by name, each (), the same on every rank.
        """
        if not self._specs:
            return {}
        counts = {  # of layers in other stages none
            number: torch.zeros(spec.n_experts, dtype=torch.int64, device=sums.device)
            for number, spec in self._specs.items()
        }
        counts |= {number: mixture.counts for number, mixture in self._mixtures.items()}
        whole = torch.cat([*counts.values()])
        dist.all_reduce(whole)
        parts = whole.split([len(count) for count in counts.values()])
        self._loads = loads = dict(zip(self._specs, parts, strict=True))
        for number, mixture in self._mixtures.items():
            load = loads[number]
            mixture.load.copy_(torch.where(skip_update, mixture.load, load))
            if mixture.bias_update_rate and mixture.router.weight.requires_grad:
                missing = (load.sum() - load * len(load)).sign()
                moved = mixture.bias + mixture.bias_update_rate * missing
                mixture.bias.copy_(torch.where(skip_update, mixture.bias, moved))
            mixture.counts.zero_()
            mixture.figures.zero_()
        relative = torch.cat([mean_one(load) for load in loads.values()])
        tokens = torch.stack([loads[n].sum() / spec.n_active for n, spec in self._specs.items()])
        batch, sequence, z, entropy = (sums[:, :4] / tokens.unsqueeze(1)).mean(0)
        return {
            "experts/load_max": relative.max(),
            "experts/load_min": relative.min(),
            "experts/without_tokens": (relative == 0).sum(),
            "experts/entropy": entropy,
            "experts/bias_range": sums[:, 4].max(),
            "experts/balance_loss": batch,
            "experts/sequence_balance_loss": sequence,
            "experts/router_z_loss": z,
        }
