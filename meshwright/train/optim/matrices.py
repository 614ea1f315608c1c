"""Optimizers whose update of a matrix follows from the whole of it, wherever its parts are."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshwright.config.optimizer import Muon
from meshwright.parallelisms.shards import Box, boxes_of_ranks, is_dtensor, local_shard, part_of_box
from meshwright.system.errors import ConfigError
from meshwright.train.optim.registry import MatrixWise

MOMENTUM = "momentum"
"""State of a matrix: the EMA of its gradients, in its type and layout."""

OWNED = "owned_"
"""Before the name of a state that a matrix's owner only has."""


@dataclass(frozen=True)
class MatrixFunction(MatrixWise):
    """An entry of the registry, whose function is imported, with its options."""

    direction: Callable[..., Any]
    options: Any = None

    def updates_of(
        self, matrices: Tensor, state: Mapping[str, Tensor], *weights: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the updates of B matrices (B, R, C), and their new state.

        Args:
            weights: one tensor (B, R, C), if the entry looks at them.

        Raises:
            ConfigError: if these haven't the shapes of the matrices and of the state.
        """
        if self.state is None:
            found = self.direction(matrices, self.options, *weights), dict[str, Tensor]()
        else:
            found = self.direction(matrices, self.options, state, *weights)
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)):
            raise _broken("returns no pair of the updates and the new state by name")
        updates, new = found
        wanted = {"the updates": tuple(matrices.shape)}
        wanted |= {f"state {name!r}": tuple(value.shape) for name, value in state.items()}
        results = {"the updates": updates} | {f"state {name!r}": one for name, one in new.items()}
        for name in [*wanted, *results]:
            one, want = results.get(name), wanted.get(name)
            have = tuple(one.shape) if isinstance(one, Tensor) else None
            if have != want:
                shown = f"with shape {have}" if have is not None else f"as {one!r:.40}"
                raise _broken(f"returns {name} {shown}, and {want} is declared")
        return updates, new


def _broken(rule: str) -> ConfigError:
    return ConfigError("optimizer.name", f"optimizer.name: its function {rule}")


class Move(NamedTuple):
    """A part of a matrix on its way. Ranks are those in the group."""

    matrix: int
    sender: int
    receiver: int
    box: Box


class Exchange:
    """Brings the parts of every matrix to one rank, its owner, and parts of the results back.

    So a result is computed once, from the same numbers in the same layout on every mesh; replicas
    get the same bits. A rank sends its shard and receives its shard: a gather by every rank would
    bring each of them all matrices.

    Args:
        matrices: parameters, (..., R, C), in the same order on every rank.
        group: the ranks that hold them; None: this one only.

    Attributes:
        owned: the numbers of the matrices that this rank owns.
    """

    def __init__(self, matrices: Sequence[Tensor], group: ProcessGroup | None) -> None:
        self._group = group
        ranks = [0] if group is None else dist.get_process_group_ranks(group)
        self._size, self._me = len(ranks), 0 if group is None else dist.get_rank(group)
        self._shapes = [tuple(matrix.shape) for matrix in matrices]
        self._boxes: list[dict[int, Box]] = []
        """Of each matrix, by rank in the group."""
        place = {rank: number for number, rank in enumerate(ranks)}
        for matrix in matrices:
            whole: Box = ((0,) * matrix.dim(), tuple(matrix.shape))
            boxes: Mapping[int, Box] = dict.fromkeys(ranks, whole)
            if is_dtensor(matrix):
                boxes = boxes_of_ranks(matrix.shape, matrix.device_mesh, matrix.placements)
            self._boxes.append({place[rank]: box for rank, box in boxes.items()})
        owners = self._share_out()
        self.owned = [i for i, owner in enumerate(owners) if owner == self._me]
        self._in, self._back = list[Move](), list[Move]()
        """The moves that concern this rank."""
        for i, (boxes, owner) in enumerate(zip(self._boxes, owners, strict=True)):
            there = [Move(i, rank, owner, boxes[rank]) for rank in first_copies(boxes, owner)]
            back = [Move(i, owner, rank, box) for rank, box in boxes.items()]
            self._in += [move for move in there if self._me in move[1:3]]
            self._back += [move for move in back if self._me in move[1:3]]

    def _share_out(self) -> list[int]:
        """Give each matrix, the costliest first, to the rank that has least to compute so far."""
        cost = [math.prod(shape) * min(shape[-2:]) for shape in self._shapes]
        loads, owners = [0] * self._size, [0] * len(cost)
        for index in sorted(range(len(cost)), key=lambda i: -cost[i]):
            owners[index] = min(self._boxes[index], key=lambda rank: (loads[rank], rank))
            loads[owners[index]] += cost[index]
        return owners

    def gather(self, parts: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return each matrix that this rank owns, by index, from parts of one type. Collective."""
        if self._size == 1:
            return dict(enumerate(parts))
        found = {i: parts[0].new_empty(self._shapes[i]) for i in self.owned}
        for move, part in self._swap(self._in, lambda move: parts[move.matrix], parts[0]):
            part_of_box(found[move.matrix], move.box).copy_(part)
        return found

    def scatter(self, wholes: Mapping[int, Tensor], like: Tensor) -> list[Tensor]:
        """Return this rank's part of every matrix; `wholes` are this rank's, of the type and on the
        device of `like`. Collective."""
        if self._size == 1:
            return [wholes[index] for index in range(len(self._shapes))]
        moved = self._swap(self._back, lambda m: part_of_box(wholes[m.matrix], m.box), like)
        found = {move.matrix: part for move, part in moved}
        return [found[index] for index in range(len(self._shapes))]

    def _swap(
        self, moves: Sequence[Move], content: Callable[[Move], Tensor], like: Tensor
    ) -> Iterator[tuple[Move, Tensor]]:
        """Send the `content` of moves, and yield moves to this rank with theirs."""
        # a sort keeps the order of two ranks' moves, so both sides have the same
        sent = sorted((m for m in moves if m.sender == self._me), key=lambda m: m.receiver)
        awaited = sorted((m for m in moves if m.receiver == self._me), key=lambda m: m.sender)
        out_sizes, in_sizes = [0] * self._size, [0] * self._size
        for move in sent:
            out_sizes[move.receiver] += math.prod(move.box[1])
        for move in awaited:
            in_sizes[move.sender] += math.prod(move.box[1])
        outgoing = torch.cat([like.new_empty(0), *(content(m).reshape(-1) for m in sent)])
        incoming = like.new_empty(sum(in_sizes))
        dist.all_to_all_single(incoming, outgoing, in_sizes, out_sizes, self._group)
        pieces = incoming.split([math.prod(move.box[1]) for move in awaited])
        for move, piece in zip(awaited, pieces, strict=True):
            yield move, piece.view(move.box[1])


def first_copies(boxes: Mapping[int, Box], owner: int) -> set[int]:
    """Return the ranks, one for each different part, that give it to the owner: the nearest."""
    nearest: dict[Box, int] = {}
    for rank in sorted(boxes, key=lambda rank: (abs(rank - owner), rank)):
        nearest.setdefault(boxes[rank], rank)
    return set(nearest.values())


class MatrixOptimizer(torch.optim.Optimizer):
    """Momentum, then a function of whole matrices, then decoupled weight decay.

    Everything but that function works on this rank's shards, in operations that are rounded once:
    a fused multiply-add would round otherwise at the end of a vector, and so depend on the mesh.

    Args:
        groups: with `lr` and `weight_decay`.
        function: of whole matrices.
        config: momentum, and the type in which it is sent.
        heads: number of matrices that a parameter consists of, row by row, if it is several.
        ranks: that hold the same layers; None: this one only.
    """

    found_inf: Tensor
    """() fp32, while `optimizers.update` updates: not 0: hold it back."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        function: MatrixFunction,
        config: Muon,
        heads: Mapping[nn.Parameter, int],
        ranks: ProcessGroup | None,
    ) -> None:
        super().__init__(groups, {})
        self._function, self._config, self._heads = function, config, heads
        # now, since planning takes steps with fake tensors only
        self._trained = [p for g in groups for p in g["params"] if p.requires_grad]
        self._exchange = Exchange(self._trained, ranks)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix. Collective over the ranks that hold the same layers.

        `found_inf` and `grad_scale` count as of torch's fused optimizers. Without the first, it is
        torch that asks for the state, by a step of gradients 0: that makes it, and updates nothing,
        since the function may have no value there, and other stages don't join.
        """
        self._make_state()
        if not self._trained or not hasattr(self, "found_inf"):
            return
        skip_update = self.found_inf > 0
        parts = [self._smoothed(parameter, skip_update) for parameter in self._trained]
        wholes = self._exchange.gather(parts)
        weights = self._exchange.gather(self._weights()) if self._function.has_weights else {}
        for i, whole in wholes.items():
            seen = [weights.pop(i)] if self._function.has_weights else []
            wholes[i] = self._direction(self._trained[i], skip_update, whole, *seen)
        updates = dict(zip(self._trained, self._exchange.scatter(wholes, parts[0]), strict=True))
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                scale = self._function.scale(*self._size(parameter), self._function.options)
                factor = group["lr"] * scale
                value = local_shard(parameter)
                update = updates[parameter].to(value) * factor
                decayed = value * (1 - group["lr"] * group["weight_decay"])
                _replace(value, decayed.sub_(update), skip_update)

    def _make_state(self) -> None:
        """Make the state that isn't there yet, of zeros."""
        if self._function.state is None:
            for parameter in self._trained:
                if MOMENTUM not in self.state[parameter]:
                    self.state[parameter][MOMENTUM] = torch.zeros_like(parameter)
            return
        for parameter in (self._trained[index] for index in self._exchange.owned):
            rows, columns = self._size(parameter)
            count = parameter.numel() // (rows * columns)
            for name, shape in self._function.state(rows, columns).items():
                if OWNED + name not in self.state[parameter]:
                    zeros = torch.zeros(count, *shape, device=_device_of(parameter))
                    self.state[parameter][OWNED + name] = zeros

    def _smoothed(self, parameter: nn.Parameter, skip_update: Tensor) -> Tensor:
        """Return this rank's part of the matrix, where it is sent: the gradient, or the running
        mean, which takes the gradient in."""
        if self._function.state is not None:
            return self._gradient(parameter).to(_device_of(parameter), torch.float32)
        momentum, mean = self._config.momentum, local_shard(self.state[parameter][MOMENTUM])
        if parameter.grad is None:
            smoothed = torch.zeros_like(mean)
        else:
            share = self._gradient(parameter) * (1 - momentum)
            new = mean * momentum + share
            smoothed = new * momentum + share if self._config.nesterov else new
            _replace(mean, new, skip_update)
        return smoothed.to(_device_of(parameter), getattr(torch, self._config.dtype))

    def _weights(self) -> list[Tensor]:
        """Return this rank's parts of the weights: copies, since the function may write there."""
        parts = ((local_shard(p).detach(), _device_of(p)) for p in self._trained)
        return [part.to(device, torch.float32, copy=True) for part, device in parts]

    def _gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return this rank's part of the gradient, divided as `grad_scale` says."""
        if parameter.grad is None:
            return torch.zeros_like(local_shard(parameter))
        gradient = local_shard(parameter.grad)
        if (divisor := getattr(self, "grad_scale", None)) is not None:
            gradient /= divisor
        return gradient

    def _direction(self, parameter: nn.Parameter, skip_update: Tensor, *wholes: Tensor) -> Tensor:
        # always (B, R, C) of the same numbers, and so the same kernels multiply it on any mesh
        matrices, *weights = (whole.view(-1, *self._size(parameter)) for whole in wholes)
        kept = self.state[parameter].items()
        state = {k.removeprefix(OWNED): value for k, value in kept if k.startswith(OWNED)}
        updates, new = self._function.updates_of(matrices, state, *weights)
        for name, value in new.items():
            _replace(state[name], value, skip_update.to(value.device))
        return updates.view(wholes[0].shape)

    def _size(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Return R and C of the matrices that a parameter consists of."""
        return parameter.shape[-2] // self._heads.get(parameter, 1), parameter.shape[-1]


def _device_of(parameter: nn.Parameter) -> torch.device:
    """Return where whole matrices are computed: the device, also of weights on the host."""
    if is_dtensor(parameter):
        return torch.device(parameter.device_mesh.device_type)
    return parameter.device


def _replace(old: Tensor, new: Tensor, skip_update: Tensor) -> None:
    # bitwise unchanged if held back, also by numbers that aren't finite
    old.copy_(torch.where(skip_update, old, new))


def orthogonalise(matrices: Tensor, config: Muon) -> Tensor:
    """Bring all singular values of each matrix near to 1, with the same singular vectors.

    With the usual coefficients they come to lie between about 0.7 and 1.2, but those below about
    1e-3 of the matrix's norm. Newton-Schulz iteration of degree 5. Source: Jordan 2024,
    kellerjordan.github.io/posts/muon.

    Args:
        matrices: (B, R, C), in the type of the products; so is the result.
    """
    a, b, c = config.coefficients
    is_tall = matrices.size(1) > matrices.size(2)
    x = matrices.mT.contiguous() if is_tall else matrices
    # row by row: torch cuts the sum of a whole matrix up over threads, whose number then shows
    norm = torch.linalg.vector_norm(torch.linalg.vector_norm(x.float(), dim=2), dim=1)
    x = x / norm.clamp(min=1e-7).to(x.dtype).view(-1, 1, 1)  # as torch.optim.Muon
    for _ in range(config.steps):
        squared = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(squared, squared, squared, beta=b, alpha=c), x, beta=a)
    return x.mT.contiguous() if is_tall else x
