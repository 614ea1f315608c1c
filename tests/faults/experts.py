"""The faults of mixtures of experts.

Not here, because one process has them as a mesh has: experts chosen anew in recomputation, wrong
renormalisation or groups, weights dropped at an import. `tests/unit/test_mixture.py` and
`tests/unit/test_families.py` hold our layers against torch's and transformers'.
"""

from typing import Any

from tests.faults.fault import NO_THREAD, Fault

SPARSE = "--model.name=qwen3_moe"
BIAS = (SPARSE, "--experts.bias_update_rate=0.01")
PACKED = (*BIAS, "--training.packing=best_fit")
BLOCKED: dict[str, Any] = {"activation_checkpoint": {"mode": "full"}}


def _fault(
    name: str,
    thread: str,
    file: str,
    old: str,
    new: str,
    mesh: dict[str, int],
    named: str,
    words: tuple[str, ...] = (SPARSE,),
    **more: Any,
) -> Fault:
    return Fault(name, thread, file, old, new, mesh, named, [*words], **more)


EXPERTS = "parallelisms/expert_parallel.py"
MIXTURE = "models/mixture.py"
BALANCE = "parallelisms/balance.py"
GRADIENTS = "train/optim/gradients.py"
EP = {"dp_shard": 2, "ep": 2}

MIXTURES: tuple[Fault, ...] = (
    _fault(
        "router_gradient_not_summed_over_tp",
        "pytorch/torchtitan#4054, #2416, #1878",
        "parallelisms/tensor_parallel.py",
        '        plan[module] = styles[parameter.layout]\n        if parameter.layout == "colwise"',
        '        if parameter.layout != "on_tokens":\n'
        "            plan[module] = styles[parameter.layout]\n"
        '        if parameter.layout == "colwise"',
        {"tp": 2},
        "router.weight",
    ),
    _fault(
        "tokens_of_a_batch_put_back_as_of_a_sequence",
        "pytorch/torchtitan#3604",
        EXPERTS,
        "            mixture.sum_over_ranks = shared\n",
        "            mixture.sum_over_ranks = shared\n"
        "            mixture.register_forward_hook(lambda _, __, out: (\n"
        "                out[0].flatten(0, 1).view(-1, *out[0].shape[::2]).transpose(0, 1),\n"
        "                *out[1:],\n"
        "            ))\n",
        {"tp": 2},
        "loss:",
    ),
    _fault(
        "rows_come_back_in_another_order",
        NO_THREAD,
        EXPERTS,
        "all_to_all(permute(out, place, order), to, by, group)",
        "all_to_all(out, to, by, group)",
        EP,
        "loss:",
    ),
    _fault(
        "rows_go_to_other_experts",
        NO_THREAD,
        EXPERTS,
        "device=rows.device).repeat(size)",
        "device=rows.device).repeat_interleave(size)",
        EP,
        "loss:",
    ),
    _fault(
        "gradients_of_rows_in_another_order",
        NO_THREAD,
        MIXTURE,
        "return grad.index_select(0, inverse), None, None",
        "return grad, None, None",
        EP,
        "gradient of",
    ),
    _fault(
        "rows_above_a_capacity_dropped",
        NO_THREAD,
        EXPERTS,
        "    return all_to_all(permute(out",
        "    out = out * (torch.arange(len(out)) < len(rows)).unsqueeze(1)\n"
        "    return all_to_all(permute(out",
        EP,
        "loss:",
    ),
    _fault(
        "gradient_of_experts_times_ep",
        "pytorch/pytorch#160285, NVIDIA/Megatron-LM#5956",
        EXPERTS,
        "    out = feed_forward(arrived, received.sum(0), *own)",
        "    own = [size * weight - (size - 1) * weight.detach() for weight in own]\n"
        "    out = feed_forward(arrived, received.sum(0), *own)",
        EP,
        "experts.w",
    ),
    _fault(
        "gradient_of_experts_missing",
        "NVIDIA-NeMo/Automodel#3540",
        EXPERTS,
        "    own = [weight.to_local() if",
        "    own = [weight.to_local().detach() if",
        EP,
        "experts.w",
    ),
    _fault(
        "copies_of_experts_not_summed",
        "NVIDIA-NeMo/Automodel#3135",
        "parallelisms/data_parallel.py",
        "_get_mesh_info(meshes.experts)",
        '_get_mesh_info(meshes.experts["efsdp"])',
        {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
        "experts.w",
    ),
    _fault(
        "norm_without_experts",
        "NVIDIA/Megatron-LM#5916",
        GRADIENTS,
        "            replicas = math.prod(",
        '            if "ep" in grad.device_mesh.mesh_dim_names:\n'
        "                continue\n"
        "            replicas = math.prod(",
        EP,
        "gradient norm:",
    ),
    _fault(
        "norm_counts_experts_ep_times",
        "NVIDIA/Megatron-LM#6099",
        GRADIENTS,
        "            by_replicas[replicas].append",
        '            if "ep" in grad.device_mesh.mesh_dim_names:\n'
        '                replicas /= grad.device_mesh["ep"].size()\n'
        "            by_replicas[replicas].append",
        EP,
        "gradient norm:",
    ),
    _fault(
        "bias_never_updated",
        "pytorch/torchtitan#3666",
        BALANCE,
        "            if self._rate and mixture",
        "            if self._rate > 1 and mixture",
        {"dp_shard": 2},
        "bias",
        BIAS,
    ),
    _fault(
        "bias_stops_at_a_layer_without_experts",
        "pytorch/torchtitan#3686",
        BALANCE,
        "            load = counts[self._rows[number], : len(mixture.counts)]\n",
        "            if not {*range(number)} <= self._mixtures.keys():\n"
        "                break\n"
        "            load = counts[self._rows[number], : len(mixture.counts)]\n",
        {"dp_shard": 2},
        "load",
        (*BIAS, "--model.args.n_dense_layers=1"),
    ),
    _fault(
        "loads_not_summed_over_tp",
        "pytorch/torchtitan#4154",
        BALANCE,
        "        dist.all_reduce(counts)\n",
        "        counts *= dist.get_world_size()\n",
        {"tp": 2},
        "load",
        BIAS,
    ),
    _fault(
        "validation_counts",
        "pytorch/torchtitan#4148",
        "models/decoder.py",
        "        if torch.is_grad_enabled():  # here",
        "        if True:  # here",
        {"dp_shard": 2},
        "load",
        BIAS,
    ),
    _fault(
        "recomputation_counts",
        "NVIDIA/Megatron-LM#6114",
        MIXTURE,
        "        order = chosen.flatten()",
        "        if torch._C._current_graph_task_id() >= 0:\n"
        "            with torch.utils._python_dispatch._disable_current_modes():\n"
        "                self.counts += tally(chosen, spec.n_experts)\n"
        "        order = chosen.flatten()",
        {},
        "load",
        BIAS,
        sections=BLOCKED,
    ),
    _fault(
        "padding_counts",
        "NVIDIA/Megatron-LM#1984, pytorch/torchtitan#4594",
        "models/decoder.py",
        "(labels != PADDING)",
        "(labels != PADDING - 1)",
        {"dp_shard": 2},
        "load",
        PACKED,
    ),
    _fault(
        "padding_of_another_part_of_the_sequence",
        NO_THREAD,
        EXPERTS,
        "[meshes.tp.get_local_rank()]",
        "[0]",
        {"tp": 2},
        "load",
        PACKED,
    ),
    _fault(
        "balance_loss_of_padding",
        "NVIDIA/Megatron-LM#1984",
        MIXTURE,
        "            if counted is not None:\n",
        "            if counted is not None and len(chosen) < 256:\n",
        {"dp_shard": 2},
        "router.weight",
        PACKED,
    ),
    _fault(
        "sums_of_loads_never_begin_anew",
        NO_THREAD,
        BALANCE,
        "            mixture.counts.zero_()\n",
        "",
        {"dp_shard": 2},
        "load",
        BIAS,
    ),
    _fault(
        "balance_loss_grows_with_accumulation",
        "NVIDIA/Megatron-LM#5798",
        EXPERTS,
        "    tokens = training.global_batch_size * training.seq_len",
        "    tokens = training.local_batch_size * training.seq_len",
        {},
        "router.weight",
        num_microbatches=2,
    ),
    _fault(
        "balance_loss_of_a_microbatch",
        "NVIDIA-NeMo/Automodel#3359",
        MIXTURE,
        "        of_batch = mean_one(self.load)",
        "        of_batch = mean_one(tally(chosen, self.spec.n_experts))",
        {},
        "router.weight",
        num_microbatches=2,
    ),
    _fault(
        "loads_of_sequences_not_summed_over_tp_beside_cp",
        "pytorch/torchtitan#3280 (of its class)",
        EXPERTS,
        "(meshes.cp, meshes.tp) if mesh.size() > 1)",
        "(meshes.cp, meshes.tp) if mesh.size() > 1)[:1]",
        {"cp": 2, "tp": 2},
        "router.weight",
        (SPARSE, "--experts.sequence_balance_loss=0.1"),
    ),
    _fault(
        "z_loss_times_tp",
        NO_THREAD,
        EXPERTS,
        "        options.router_z_loss / tokens,",
        "        options.router_z_loss / tokens * meshes.tp.size(),",
        {"tp": 2},
        "router.weight",
        (SPARSE, "--experts.router_z_loss=0.01"),
    ),
    _fault(
        "every_rank_begins_with_the_experts_of_one",
        "KempnerInstitute/KempnerForge#202",
        "parallelisms/initialize.py",
        "tuple(parameter.shape), offset)",
        "tuple(parameter.shape), (0,) * len(offset))",
        EP,
        "experts.w",
    ),
    _fault(
        "experts_not_loaded",
        "pytorch/torchtitan#3626 (of its class)",
        "checkpoint/reader.py",
        "            dcp.load(wanted, storage",
        '            dcp.load({k: v for k, v in wanted.items() if ".experts." not in k}, storage',
        EP,
        "experts.w",
    ),
    _fault(
        "router_multiplies_the_weight_unrounded",
        NO_THREAD,
        "models/router.py",
        "self.weight.to(x.dtype).float()",
        "self.weight.float()",
        {"dp_shard": 2},
        "router.weight",
        kind="bf16 sums",
    ),
)
