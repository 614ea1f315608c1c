"""Sums over ranks and microbatches: of gradients, of their norm, of losses and labels."""

from tests.faults.fault import Fault

REDUCTIONS = (
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
        "pytorch/pytorch#170862, Modalities/modalities#206",
        "train/trainer.py",
        "return Sums(*(part.view_as(own) for part, own in zip(parts, self, strict=True)))",
        "return self._replace(loss=parts[0].view_as(self.loss))",
        {"dp_shard": 2},
        "gradient norm:",
    ),
    Fault(
        "norm_without_a_stage",
        "pytorch/torchtitan#596, EleutherAI/gpt-neox#297",
        "train/trainer.py",
        "sums = Sums(loss / meshes.tp.size(), squares, ",
        "squares *= meshes.pp.get_local_rank() > 0 or meshes.pp.size() == 1\n"
        "    sums = Sums(loss / meshes.tp.size(), squares, ",
        {"pp": 2},
        "gradient norm:",
    ),
    Fault(
        "clipped_by_the_norm_of_a_stage",
        "pytorch/torchtitan#596, Modalities/modalities#313",
        "train/trainer.py",
        "divisor_to_clip(grad_norm, options.max_norm) if is_clipped",
        "divisor_to_clip(squares[0].sqrt(), options.max_norm) if is_clipped",
        {"pp": 2},
        "update:",
    ),
    Fault(
        "averaged_once_more",
        "pytorch/torchtitan#2323, verl-project/verl-SpeCo#29",
        "parallelisms/data_parallel.py",
        "            module.set_gradient_divide_factor(1.0)\n",
        "",
        {"dp_shard": 2},
        "gradient of layers.0.attention.wq.weight",
    ),
    Fault(
        "copies_not_reduced_after_accumulation",
        "pytorch/torchtitan#4505, pytorch/pytorch#125484 (described as a hazard)",
        "train/trainer.py",
        "model.set_requires_all_reduce(is_last)",
        "model.set_requires_all_reduce(index == 0)",
        {"dp_replicate": 2, "dp_shard": 2},
        "gradient of",
        num_microbatches=2,
    ),
    Fault(
        "labels_of_this_rank_alone",
        "pytorch/torchtitan#1842, pytorch/torchtitan#2206",
        "train/trainer.py",
        "dist.all_reduce(num_labels, group=meshes.loss.get_group())",
        "num_labels *= meshes.loss.size()",
        {"dp_shard": 2},
        "loss:",
    ),
    Fault(
        "mean_of_the_means_of_microbatches",
        "meta-pytorch/torchtune#1875, PrimeIntellect-ai/prime-rl#583",
        "train/trainer.py",
        "        share = total / num_labels\n",
        "        share = total / (has_loss(batch.labels).sum() * len(batches))\n",
        {},
        "loss:",
        num_microbatches=2,
    ),
    Fault(
        "tokens_counted_twice_under_cp",
        "pytorch/torchtitan#2983 (in a metric; here it divides the loss)",
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
        "mean = loss.double() / num_labels.clamp(min=1)\n"
        "    return torch.stack([mean, num_labels > 0, num_bytes.double()])",
        {"dp_shard": 2},
        "validation/loss:",
    ),
    Fault(
        "sums_in_bf16",
        "hiyouga/LlamaFactory#9769, pytorch/pytorch#106395",
        "parallelisms/data_parallel.py",
        "            reduce_dtype=getattr(torch, training.mixed_precision_reduce),",
        "            reduce_dtype=dtype,",
        {"dp_replicate": 2, "dp_shard": 2},
        "gradient of",
        kind="bf16 sums",
    ),
    Fault(
        "microbatches_added_up_in_bf16",
        "ISEEKYAN/Megatron-LM#149",
        "parallelisms/pipeline.py",
        "        accumulate_in_reduce_dtype(self.submod)\n",
        "",
        {"pp": 2, "dp_shard": 2},
        "gradient of",
        kind="bf16 sums",
        n_layers=5,
        sections={"parallelism": {"pipeline_parallel_schedule": "ZBVZeroBubble"}},
    ),
    Fault(
        "rotary_cache_cast_with_the_inputs",
        "huggingface/transformers#25681, NVIDIA/TransformerEngine#1245",
        "parallelisms/data_parallel.py",
        "            cast_forward_inputs=False,",
        "            cast_forward_inputs=True,",
        {"dp_shard": 2},
        "gradient of layers.0.attention.w",
        kind="bf16 sums",
    ),
    Fault(
        "gradient_not_divided_in_a_pipeline",
        "pytorch/torchtitan#2972",
        "parallelisms/pipeline.py",
        "        return loss / self._num_labels\n",
        "        return (loss / self._num_labels - loss).detach() + loss\n",
        {"pp": 2},
        "gradient norm:",
    ),
    Fault(
        "gradient_divided_by_microbatches",
        "pytorch/torchtitan#1733, areal-project/AReaL#1273",
        "parallelisms/pipeline.py",
        "            scale_grads=False,",
        "            scale_grads=True,",
        {"pp": 2},
        "gradient norm:",
    ),
    Fault(
        "pipeline_keeps_the_last_microbatch",
        "NVIDIA-NeMo/Automodel#3530",
        "parallelisms/pipeline.py",
        "    def backward_weight_one_chunk(self,",
        "    def backward_one_chunk(self, *given: object, **named: object) -> None:\n"
        "        from meshwright.parallelisms.shared_memory import fsdp_groups\n"
        "        for group in fsdp_groups(self.submod):\n"
        "            for one in group.fsdp_params:\n"
        "                one.unsharded_accumulated_grad = None\n"
        '                if hasattr(one, "_unsharded_param"):\n'
        "                    one._unsharded_param.grad = None\n"
        "        super().backward_one_chunk(*given, **named)\n"
        "\n"
        "    def backward_weight_one_chunk(self,",
        {"pp": 2},
        "gradient norm:",
    ),
)
