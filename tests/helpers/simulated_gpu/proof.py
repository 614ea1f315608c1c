"""The ranks of `meshwright prove --gpu` on a simulated GPU: every tensor is where it is used.

python -m tests.helpers.simulated_gpu.proof GUARD FOLDER WORD ...    prints the device of each loss

No number is right: what the host reads of a fake tensor is 1, and tensors on one device are equal.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers.simulated_gpu.guard import load_guard


def main() -> None:
    library, folder, *words = sys.argv[1:]
    load_guard(Path(library))
    # not before: torch asks once whether there is CUDA, and FSDP2 and others take its names
    from tests.helpers.simulated_gpu import fake_cuda

    fake_cuda.install()
    from tests.helpers.simulated_gpu.proof import measure_all

    print(measure_all(Path(folder), words))


def measure_all(folder: Path, words: list[str]) -> str:
    """Measure a reference and a case with its choices of experts, the properties, and the steps
    that plain PyTorch is to take too; return the device of the model."""
    import torch
    import torch.distributed as dist

    # registers what collectives give for fake tensors
    import torch.distributed._tools.fake_collectives
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.distributed.tensor import _utils as sharding
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode

    from meshwright.commands.prove import job, measure, properties, reference_steps
    from meshwright.commands.prove.cases import reference_case
    from meshwright.commands.prove.checked import Checked
    from meshwright.commands.prove.shrink import GLOBAL_BATCH, ON_GPUS, shrink
    from meshwright.config.changes import changed
    from meshwright.config.loader import load_config
    from meshwright.parallelisms import routing_replay
    from meshwright.train import set_up
    from meshwright.train.resolve_model import resolve_model
    from tests.helpers.simulated_gpu import fake_cuda

    aten = torch.ops.aten

    class Reads(TorchDispatchMode):
        """Answers what the host asks of fake tensors."""

        def __torch_dispatch__(
            self,
            func: Any,
            types: Any,
            args: tuple[Any, ...] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:
            is_fake = any(isinstance(arg, FakeTensor) for arg in args)
            first = args[0] if args else None
            if is_fake and isinstance(first, torch.Tensor):
                if func is aten._local_scalar_dense.default:
                    return 1.0 if first.is_floating_point() else 1
                if func is aten.equal.default:
                    aten.eq.Tensor(*args)  # fails where devices differ
                    return True
                if func is aten.nonzero.default:
                    return first.new_empty((0, first.dim()), dtype=torch.int64)
            return func(*args, **(kwargs or {}))

    class Measuring(measure._Measuring):
        """Without files."""

        def _save(self) -> None:
            state = self._job.state_dict()
            self._at_save = {name: measure._copy(tensor) for name, tensor in state.items()}
            whole = {
                n: torch.empty(tensor.shape, dtype=tensor.dtype) for n, tensor in state.items()
            }
            measure.different(state, whole)

    class Steps(reference_steps.Steps):
        """Without plain PyTorch, whose tensors are all copies on the CPU."""

        def _compare_backward(self, *_: Any) -> Any:
            return {}

        def _compare_routers(self, *_: Any) -> None:
            pass

        def _compare_update(self, *_: Any) -> None:
            pass

    gather = routing_replay._Recording.whole

    def whole_of_batch(recording: Any, model: Any, meshes: Any) -> dict[int, torch.Tensor]:
        gather(recording, model, meshes)  # whose shapes, which the host has read, are all 1
        layers = model.table.mixtures.items()
        shape = GLOBAL_BATCH, ON_GPUS.seq_len
        return {
            layer: torch.zeros(*shape, spec.n_active, dtype=torch.int64, device="cuda")
            for layer, spec in layers
        }

    FakeTensorMode.avoid_device_init = True
    torch.set_num_threads(1)
    new_group = dist.new_group
    replaced: list[tuple[Any, str, Any]] = [
        (dist, "new_group", lambda *args, backend=None, **options: new_group(*args, **options)),
        (dist, "get_backend", lambda *_: "nccl"),
        (job, "_hash", lambda *_: ""),
        (measure.RouterAccounting, "wrong_counts", lambda *_: []),  # of copies on the CPU
        (job.ProofJob, "resume", lambda _: None),
        (routing_replay, "_check", lambda *_: None),
        (routing_replay._Recording, "whole", whole_of_batch),
        (set_up, "note_start", lambda *_, **__: None),
        (fake_cuda.Event, "elapsed_time", lambda *_: 1.0),
        (reference_steps, "Steps", Steps),
    ]
    reals = [
        (sharding, "compute_local_shape_and_global_offset"),
        (properties, "build_meshes"),
        (job, "_meshes"),
        (reference_steps, "read_batch"),
        (reference_steps, "compare_documents"),
    ]
    for module, name, value in replaced:
        setattr(module, name, value)
    for module, name in reals:
        setattr(module, name, fake_cuda.real(getattr(module, name)))

    os.environ["LOCAL_RANK"] = "0"
    config = load_config(words)
    small = shrink(config, resolve_model(config)[1], ON_GPUS)
    small = changed(small, {"training": {"steps": measure.LAST_RESUMED_STEP}})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    case = reference_case(small).config
    with FakeTensorMode(allow_non_fake_inputs=True), Reads():
        first = Measuring(case, 1, folder, {})
        first.run()
        choices = {
            step: ({layer: ids.cpu() for layer, ids in of_step.items()}, is_token)
            for step, (of_step, is_token) in first.choices.items()
        }
        second = Measuring(case, 1, folder, choices)
        second.run()
        for kind, tensors in second.tensors.items():
            whole = {name: tensor.cpu() for name, tensor in first.tensors[kind].items()}
            measure._compare_shards(tensors, whole)
        properties.measure_properties(small)
        steps = Steps(Checked(), case, folder)
        steps.compare(1)
        steps.compare_skipped(2)
        devices = {str(p.device) for _, p in second._job.model.named_parameters()}
    return " ".join(sorted(devices))


if __name__ == "__main__":
    main()
