"""The faults: where each was published, the patch of our code, and the case that must find it."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Fault:
    """A fault of another framework, at the place where we would make it."""

    name: str
    thread: str
    """Where it was published."""
    file: str
    """In the package."""
    old: str
    new: str
    mesh: dict[str, int]
    """Of the shortest case of `prove` that must find it."""
    named: str
    """Part of a line of the verdict that names the quantity, or the parameter, that is wrong."""
    words: list[str] = field(default_factory=list)
    """Of the config, in addition to the debug model's."""
    num_microbatches: int = 0
    kind: Any = "fp32"


FAULTS = (
    Fault(
        "norm_of_copies",
        "pytorch/torchtitan#2318, ByteDance-Seed/VeOmni#184",
        "train/optim/gradients.py",
        "replicas = math.prod(size for size, placement in pairs if placement.is_replicate())",
        "replicas = math.prod(size for size, placement in pairs if placement.is_partial())",
        {"dp_replicate": 2},
        "gradient norm:",
    ),
    Fault(
        "norm_of_this_rank",
        "pytorch/pytorch#170862",
        "train/trainer.py",
        "return Sums(*(part.view_as(own) for part, own in zip(parts, self, strict=True)))",
        "return Sums(parts[0].view_as(self.loss), self.squares)",
        {"dp_shard": 2},
        "gradient norm:",
    ),
    Fault(
        "norm_without_a_stage",
        "EleutherAI/gpt-neox#297",
        "train/trainer.py",
        "sums = Sums(loss / meshes.tp.size(), squares).over_ranks()",
        "sums = Sums(loss / meshes.tp.size(), squares * (meshes.pp.get_local_rank() > 0))"
        ".over_ranks()",
        {"pp": 2},
        "gradient norm:",
    ),
    Fault(
        "replicated_weight_not_summed_over_tp",
        "pytorch/torchtitan#2387, NVIDIA/Megatron-LM#7452",
        "parallelisms/tensor_parallel.py",
        '        plan[module] = styles[parameter.layout]\n        if parameter.layout == "colwise"',
        '        if parameter.layout != "on_sequence":\n'
        "            plan[module] = styles[parameter.layout]\n"
        '        if parameter.layout == "colwise"',
        {"tp": 2},
        "norm.weight",
    ),
    Fault(
        "gathered_logits_in_a_vocabulary_parallel_loss",
        "NVIDIA/Megatron-LM#7452",
        "parallelisms/tensor_parallel.py",
        "return both[:, 0].logsumexp(0), both[:, 1].amax(0)",
        "return both[:, 0].logsumexp(0) + both.new_tensor(self.mesh.size()).log(), "
        "both[:, 1].amax(0)",
        {"tp": 2},
        "loss:",
    ),
    Fault(
        "labels_of_this_rank_alone",
        "pytorch/torchtitan#1842",
        "train/trainer.py",
        "dist.all_reduce(num_labels, group=meshes.loss.get_group())",
        "num_labels *= meshes.loss.size()",
        {"dp_shard": 2},
        "loss:",
    ),
    Fault(
        "tokens_counted_twice_under_cp",
        "pytorch/torchtitan#2990",
        "train/trainer.py",
        "    num_labels = count_labels(batches, meshes)\n    mark",
        "    num_labels = count_labels(batches, meshes) * meshes.cp.size()\n    mark",
        {"cp": 2},
        "loss:",
    ),
    Fault(
        "validation_by_mean_of_means",
        "pytorch/torchtitan#4167",
        "train/validation.py",
        "return torch.stack([loss.double(), num_labels.double(), num_bytes.double()])",
        "return torch.stack([loss.double() / num_labels, num_labels > 0, num_bytes.double()])",
        {"dp_shard": 2},
        "validation/loss:",
    ),
    Fault(
        "label_off_at_a_cp_boundary",
        "pytorch/torchtitan#1522",
        "parallelisms/context_parallel.py",
        "    return Batch(batch.tokens[:, positions], batch.labels[:, positions], batch.documents)",
        "    labels, half = batch.labels[:, positions], len(positions) // 2\n"
        "    labels[:, half - 1] = batch.tokens[:, positions[half]]\n"
        "    return Batch(batch.tokens[:, positions], labels, batch.documents)",
        {"cp": 2},
        "loss:",
    ),
    Fault(
        "gradient_of_keys_not_summed_over_cp",
        "pytorch/torchtitan#1522",
        "parallelisms/context_parallel.py",
        "    return reduce_scatter(torch.cat(parts), mesh)",
        "    return parts[mesh.get_local_rank()]",
        {"cp": 2},
        "attention.wk.weight",
    ),
    Fault(
        "stages_begin_alike",
        "a class of the list of issues, without a thread that was read",
        "parallelisms/initialize.py",
        "        std = model.table.parameters[name].std\n",
        "        std = model.table.parameters[name].std\n"
        "        for place, layer in enumerate(model.layers):\n"
        '            name = name.replace(f"layers.{layer}.", f"layers.{place}.")\n',
        {"pp": 2},
        "initial layers.",
    ),
    Fault(
        "tp_ranks_begin_alike",
        "a class of the list of issues, without a thread that was read",
        "parallelisms/initialize.py",
        "tuple(parameter.shape), offset)",
        "tuple(parameter.shape), (0,) * len(offset))",
        {"tp": 2},
        "initial ",
    ),
    Fault(
        "moments_lost_at_a_resume",
        "pytorch/torchtitan#848",
        "checkpoint/state.py",
        "if saved := _below(OPTIMIZER, state):",
        "if (saved := _below(OPTIMIZER, state)) and len(saved) < 0:",
        {"dp_shard": 2},
        "not as it was saved: optimizer.",
    ),
    Fault(
        "copies_not_reduced_after_accumulation",
        "pytorch/torchtitan#1929",
        "train/trainer.py",
        "model.set_requires_all_reduce(is_last)",
        "model.set_requires_all_reduce(index == 0)",
        {"dp_replicate": 2, "dp_shard": 2},
        "gradient of",
        num_microbatches=2,
    ),
    Fault(
        "sums_in_bf16",
        "a class of the list of issues, without a thread that was read",
        "parallelisms/data_parallel.py",
        "            reduce_dtype=getattr(torch, training.mixed_precision_reduce),",
        "            reduce_dtype=dtype,",
        {"dp_replicate": 2, "dp_shard": 2},
        "gradient of",
        kind="bf16 sums",
    ),
    Fault(
        "muon_of_shards",
        "deepspeedai/DeepSpeed#8437",
        "train/optim/matrices.py",
        "        wholes = {\n",
        "        found = [p.unsqueeze(0) for p in parts]\n"
        "        found = [self._direction_of(p, self._config)[0] for p in found]\n"
        "        self._exchange.scatter = lambda *_: found  # type: ignore[method-assign]\n"
        "        wholes = {\n",
        {"tp": 2},
        "update:",
        ["--optimizer.name=muon"],
    ),
)
