"""Tensors of a checkpoint, mostly the model's, without the rest that a resume needs."""

import warnings
from collections.abc import Callable, Mapping

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from meshwright.checkpoint.place import Place
from meshwright.checkpoint.reader import SafeCheckpointReader
from meshwright.checkpoint.state import MODEL
from meshwright.errors import ConfigError


class CheckpointWeights:
    """Tensors in a step's folder, of ours or of any torch.distributed.checkpoint.

    Args:
        saved_name: a tensor's name there; by default our model's name.

    Raises:
        ConfigError: if it cannot be read.
    """

    def __init__(self, place: Place, saved_name: Callable[[str], str] = MODEL.__add__) -> None:
        self._place, self._saved_name = place, saved_name
        try:
            self._reader = SafeCheckpointReader(place.path)
        except Exception as error:  # a damaged pickle raises any exception
            raise self._unreadable(error) from None

    def load(self, parameters: Mapping[str, Tensor]) -> None:
        """Fill `parameters`, plain or sharded, by their names in the plain model, in place.

        Not collective.

        Raises:
            ConfigError: if one is missing, has another shape, or cannot be read.
        """
        state = {self._saved_name(name): tensor.detach() for name, tensor in parameters.items()}
        saved = self._reader.read_metadata().state_dict_metadata
        for name, tensor in state.items():
            self._place.check(name in saved, f"the checkpoint has no {name}")
            shape = tuple(getattr(saved[name], "size", ()))
            self._place.check(
                shape == tuple(tensor.shape),
                f"{name} has shape {shape} there, not {tuple(tensor.shape)}",
            )
        try:
            with warnings.catch_warnings():  # that there is but one process; on ranks it is not so
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                dcp.load(state, storage_reader=self._reader, no_dist=True)
        except (CheckpointException, OSError, RuntimeError) as error:
            raise self._unreadable(error) from None

    def read(self, name: str) -> Tensor:
        """Return the whole parameter `name`, in the type it was saved in.

        Raises:
            ConfigError: as `load`'s.
        """
        saved_name = self._saved_name(name)
        saved = self._reader.read_metadata().state_dict_metadata.get(saved_name)
        self._place.check(saved is not None, f"the checkpoint has no {saved_name}")
        assert isinstance(saved, TensorStorageMetadata)
        try:
            tensor = torch.empty(saved.size, dtype=saved.properties.dtype)
        except RuntimeError as error:  # a tensor that is larger than any memory
            raise self._unreadable(error) from None
        self.load({name: tensor})
        return tensor

    def _unreadable(self, error: BaseException) -> ConfigError:
        causes = list(error.failures.values()) if isinstance(error, CheckpointException) else []
        reason = causes[0][0] if causes else error
        return self._place.error(f"cannot be read: {reason}")
