"""Which experts tokens go through: recorded on one mesh, and taken again on any.

The choice of the highest scores is no continuous function: where two are nearly equal, rounding may
turn them, and the loss with them.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.models.decoder import Decoder, Routing
from meshwright.models.table import MixtureSpec
from meshwright.parallelisms.meshes import Meshes
from meshwright.parallelisms.sequence_parts import local_positions

Choices = Mapping[int, Tensor]
"""By number of the layer: the experts of each token, (sequences, S, K) int64, with sequences of
the global batch in their order."""


class _Recording(Routing):
    def __init__(self) -> None:
        self._calls = defaultdict[int, list[Tensor]](list)

    def note(self, layer: int, choice: Tensor, gap: Tensor | None) -> None:
        self._calls[layer].append(choice)

    def whole(self, model: Decoder, meshes: Meshes) -> dict[int, Tensor]:
        """Return the choices of all ranks, from a stage of each. Collective over the job."""
        parts = {layer: torch.stack(calls) for layer, calls in self._calls.items()}
        # ranks whose layers have no experts learn it from the others
        shape = [0, 0, 0] if not parts else [*next(iter(parts.values())).shape[:3]]
        sizes = torch.tensor(shape, device=meshes.world.device_type)
        dist.all_reduce(sizes, dist.ReduceOp.MAX)
        calls, size, own_len = sizes.tolist()
        seq_len = own_len * meshes.cp.size() * meshes.tp.size()
        found = {}
        for layer, spec in model.table.mixtures.items():
            shape = [calls * meshes.dp.size() * size, seq_len, spec.n_active]
            found[layer] = torch.zeros(shape, dtype=torch.int64, device=sizes.device)
            if layer in parts:
                at = _positions(seq_len, meshes, sizes.device)
                _of_rank(found[layer], size, meshes)[:, :, at] = parts[layer]
            dist.all_reduce(found[layer])  # each token is on one rank
        return found


class Replay(Routing):
    """Prescribes choices to a rank, and counts tokens whose router has chosen others.

    Every schedule takes the microbatches of a stage in their order.

    Attributes:
        num_tokens: of this rank so far, over its layers.
        num_others: () int64: those whose router would have chosen other experts, as a set.
        gap: () fp32: by how much, at most, their scores differ from those of the given experts.
    """

    def __init__(self, choices: Choices, meshes: Meshes) -> None:
        self._choices, self._meshes = choices, meshes
        self._calls = Counter[int]()
        self._given: dict[int, Tensor] = {}
        self.num_tokens, device = 0, meshes.world.device_type
        self.num_others = torch.zeros((), dtype=torch.int64, device=device)
        self.gap = torch.zeros((), device=device)

    def given(self, layer: int, num_sequences: int) -> Tensor:
        """As `Routing`'s.

        Raises:
            ValueError: if there are fewer choices than sequences, or none of the layer.
        """
        number, whole = self._calls[layer], self._choices.get(layer)
        self._calls[layer] += 1
        wanted = (number + 1) * num_sequences * self._meshes.dp.size()
        there = 0 if whole is None else len(whole)
        if whole is None or there < wanted:
            raise ValueError(
                f"layer {layer}: choices of {there} sequences, but {wanted} go through"
            )
        own = _of_rank(whole[:wanted], num_sequences, self._meshes)[number]
        at = _positions(whole.shape[1], self._meshes, whole.device)
        self._given[layer] = own[:, at].to(self.gap.device)
        return self._given[layer]

    def note(self, layer: int, choice: Tensor, gap: Tensor | None) -> None:
        assert gap is not None  # the experts were given
        differ = choice.sort().values != self._given[layer].sort().values
        self.num_others += differ.any(-1).sum()
        self.num_tokens += choice[..., 0].numel()
        self.gap = torch.maximum(self.gap, gap)


def _of_rank(whole: Tensor, size: int, meshes: Meshes) -> Tensor:
    """(sequences, S, K) -> (microbatches, size, S, K), a view: the sequences of this rank."""
    return whole.unflatten(0, (-1, meshes.dp.size(), size))[:, meshes.dp.get_local_rank()]


def _positions(seq_len: int, meshes: Meshes, device: torch.device) -> Tensor:
    """(S / (cp tp),) int64: where the tokens that this rank routes are in their sequences."""
    own = local_positions(seq_len, meshes.cp, device)
    return own.chunk(meshes.tp.size())[meshes.tp.get_local_rank()]


def _check(layer: int, chosen: Tensor, spec: MixtureSpec) -> None:
    """Check that `chosen`, of one layer, are different experts of it for each token."""
    is_whole = chosen.ndim == 3 and chosen.shape[2] == spec.n_active and chosen.dtype == torch.int64
    ids = chosen.sort().values
    is_expert = (ids >= 0) & (ids < spec.n_experts)
    if not is_whole or not is_expert.all() or (ids.diff() == 0).any():
        raise ValueError(
            f"layer {layer}: choices are (sequences, S, {spec.n_active}) int64, for each token "
            f"different experts of 0 to {spec.n_experts - 1}"
        )


@contextmanager
def routed(stages: Sequence[Decoder], routing: Routing) -> Iterator[None]:
    """Within, `routing` records or prescribes the choices of routers, and nothing else does."""
    before = [stage.routing for stage in stages]
    for stage in stages:
        stage.routing = routing
    try:
        yield
    finally:
        for stage, own in zip(stages, before, strict=True):
            stage.routing = own


@contextmanager
def record_choices(stages: Sequence[Decoder], meshes: Meshes) -> Iterator[dict[int, Tensor]]:
    """Record which experts the tokens of all forwards within go through.

    Recomputation isn't recorded. Collective over the job.

    Args:
        stages: of a `LocalModel`; its forwards within have one shape.

    Yields:
        `Choices` of all ranks, empty up to the end.
    """
    recording, found = _Recording(), dict[int, Tensor]()
    with routed(stages, recording):
        yield found
    found.update(recording.whole(stages[0], meshes))


@contextmanager
def replay_choices(stages: Sequence[Decoder], choices: Choices, meshes: Meshes) -> Iterator[Replay]:
    """Let tokens of the forwards within go through the experts `choices`, and not the router's.

    The scores that weight the experts, and the gradients, are the router's own: from IDs a
    model learns as it would by itself. For example, training then takes the experts of a rollout
    (Ma et al. 2025, arXiv:2510.11370).

    Args:
        stages: of a `LocalModel`, on any mesh.
        choices: the same on every rank; the forwards within start at the first sequence.

    Yields:
        How often, and how far, routers would have chosen otherwise.

    Raises:
        ValueError: if choices are none of the model.
    """
    for layer, spec in stages[0].table.mixtures.items():
        if layer in choices:
            _check(layer, choices[layer], spec)
    replay = Replay(choices, meshes)
    with routed(stages, replay):
        yield replay
