"""Degrees of parallelism: the only place that orders the axes of the mesh. Free of torch."""

from dataclasses import asdict, dataclass

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Outermost first: neighbouring ranks, which share a node, get the axes that communicate most."""


@dataclass(frozen=True)
class ParallelDims:
    """Ranks along each axis of the mesh."""

    dp_replicate: int
    dp_shard: int
    pp: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def dp(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_ranks(self) -> int:
        """Ranks of the job."""
        return self.dp * self.pp * self.cp * self.tp

    def __str__(self) -> str:
        """Return the axes that have more than one rank, as "dp_shard 4 x tp 2"."""
        return " x ".join(f"{axis} {size}" for axis, size in asdict(self).items() if size > 1)
