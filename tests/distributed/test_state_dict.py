"""What a checkpoint holds: under which names, and that it brings back the same bits."""

from collections.abc import Collection

import torch
import torch.distributed.checkpoint as dcp

from meshwright.checkpoint.state import TrainingTensors
from meshwright.parallelisms.local_model import LocalModel
from meshwright.parallelisms.meshes import Meshes
from meshwright.parallelisms.parallel_dims import ParallelDims
from meshwright.step import Health, train_step
from tests.distributed.test_step import adamw, frozen, global_batch
from tests.helpers.tiny import TINY, parallel_llama, whole


class Job:
    """A model, its meshes and its optimizer."""

    def __init__(self, dims: ParallelDims, seed: int = 0, **options: object) -> None:
        self.model: LocalModel
        self.meshes: Meshes
        self.model, self.meshes = parallel_llama(dims, seed=seed, **options)
        self.optimizer = adamw(self.model)
        self.tensors = TrainingTensors(self.model, self.optimizer, rank=0)

    def take_step(self, step: int) -> None:
        dp = self.meshes.dp
        train_step(
            self.model,
            [tuple(part.chunk(dp.size())[dp.get_local_rank()] for part in global_batch(step))],
            self.optimizer,
            step=step,
            max_norm=0.5,
            meshes=self.meshes,
            health=Health.on(torch.device("cpu")),
        )

    def save(self, folder: str) -> None:
        dcp.save(self.tensors.state_dict(), checkpoint_id=folder)

    def load(self, folder: str) -> None:
        state = self.tensors.state_dict()
        dcp.load(state, checkpoint_id=folder)
        self.tensors.load_state_dict(state)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: whole(p).clone() for name, p in self.model.named_parameters()}


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


def keys(trained: Collection[str]) -> set[str]:
    """Of a checkpoint of the tiny model, `trained` being the names of its trained parameters."""
    states = ("step", "exp_avg", "exp_avg_sq")
    return {
        "rng.cpu.rank_0",
        *(f"model.{name}" for name in TINY.parameter_names()),
        *(f"optimizer.state.{name}.{state}" for name in trained for state in states),
    }


def _resume_frozen(folder: str) -> None:
    options = frozen("tok_embeddings.*", "layers.0.*", "*norm.weight")
    dims = ParallelDims(dp_replicate=1, dp_shard=2)
    job = Job(dims, **options)
    job.take_step(1)
    trained = set(TINY.parameter_names()) - options["frozen"]
    assert job.tensors.state_dict().keys() == keys(trained)
    job.save(folder)
    job.take_step(2)
    resumed = Job(dims, seed=1, **options)
    resumed.load(folder)
    resumed.take_step(2)
    assert_equal(resumed.weights(), job.weights())


def test_frozen_parameters_are_saved_without_optimizer_state(on_ranks, tmp_path) -> None:
    on_ranks(2, _resume_frozen, str(tmp_path / "a"))
