"""The end of a step, for routers: how evenly it loaded the experts, and the loads of the next."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.models.decoder import Decoder
from meshwright.models.router import mean_one


class Balance:
    """Loads of the experts in a rank's stages.

    Every sum goes over all ranks of the job: each token of a layer is on one of them.

    Args:
        bias_update_rate: as in the config's section `experts`; 0: biases stay.
    """

    def __init__(self, stages: Iterable[Decoder], bias_update_rate: float = 0.0) -> None:
        self._rate = bias_update_rate
        self._mixtures = {
            number: mixture for stage in stages for number, mixture in stage.mixtures().items()
        }
        table = next(iter(stages)).table
        self._specs = table.mixtures
        self._rows = {number: row for row, number in enumerate(table.mixtures)}
        self._last = torch.zeros(0)

    @property
    def loads(self) -> dict[int, list[int]]:
        """Tokens of each expert in the last step, by the number of the layer; waits for the
        device."""
        rows = zip(self._specs.items(), self._last.tolist(), strict=False)
        return {number: row[: spec.n_experts] for (number, spec), row in rows}

    @torch.no_grad()
    def sums(self, device: torch.device, copies: int) -> Tensor:
        """(layers with experts, 5) fp32, this rank's summands of figures; dense models have none.

        Args:
            copies: ranks that have the same layers.
        """
        found = torch.zeros(len(self._rows), 5, device=device)
        for number, mixture in self._mixtures.items():
            spread = mixture.bias.max() - mixture.bias.min()
            found[self._rows[number]] = torch.cat([mixture.figures, (spread / copies).view(1)])
        return found

    @torch.no_grad()
    def after_step(self, sums: Tensor, is_held_back: Tensor) -> Mapping[str, Tensor]:
        """Give routers the loads of the step, unless its update was held back, and begin the next.
        Collective, if the model has experts.

        Biases of experts with fewer tokens than the mean rise by the rate, those of others fall.
        Source: Wang et al. 2024, arXiv:2408.15664, algorithm 1. Loads are integers, so biases are
        bitwise identical on every mesh.

        Args:
            sums: of every rank, added up.
            is_held_back: () bool.

        Returns:
            Figures by name, each (), the same on every rank.
        """
        if not self._rows:
            return {}
        width = max(spec.n_experts for spec in self._specs.values())
        counts = torch.zeros(len(self._rows), width, dtype=torch.int64, device=sums.device)
        for number, mixture in self._mixtures.items():
            counts[self._rows[number], : len(mixture.counts)] = mixture.counts
        dist.all_reduce(counts)
        self._last = counts
        for number, mixture in self._mixtures.items():
            load = counts[self._rows[number], : len(mixture.counts)]
            mixture.load.copy_(torch.where(is_held_back, mixture.load, load))
            if self._rate and mixture.router.weight.requires_grad:
                missing = (load.sum() - load * len(load)).sign()
                moved = mixture.bias + self._rate * missing
                mixture.bias.copy_(torch.where(is_held_back, mixture.bias, moved))
            mixture.counts.zero_()
            mixture.figures.zero_()
        return self._figures(counts, sums)

    def _figures(self, counts: Tensor, sums: Tensor) -> dict[str, Tensor]:
        rows = [(counts[self._rows[n], : s.n_experts], s) for n, s in self._specs.items()]
        loads = torch.cat([mean_one(row) for row, _ in rows])
        tokens = torch.stack([row.sum() / spec.n_active for row, spec in rows]).unsqueeze(1)
        batch, sequence, z, entropy = (sums[:, :4] / tokens).mean(0)
        return {
            "experts/load_max": loads.max(),
            "experts/load_min": loads.min(),
            "experts/without_tokens": (loads == 0).sum(),
            "experts/entropy": entropy,
            "experts/bias_range": sums[:, 4].max(),
            "experts/balance_loss": batch,
            "experts/sequence_balance_loss": sequence,
            "experts/router_z_loss": z,
        }
