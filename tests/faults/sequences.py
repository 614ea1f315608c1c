"""Matrices and sequences in parts: tensor and context parallelism, documents."""

from tests.faults.fault import NO_THREAD, Fault

WITH_DOCUMENTS = ["--training.mask_documents=true"]


def _left_out(layout: str) -> tuple[str, str]:
    """Return the patch after which parameters of `layout` are plain copies on tp ranks."""
    old = (
        '        plan[module] = styles[parameter.layout]\n        if parameter.layout == "colwise"'
    )
    return old, f'        if parameter.layout != "{layout}":\n            {old.lstrip()}'


SEQUENCES = (
    Fault(
        "replicated_weight_not_summed_over_tp",
        "NVIDIA/Megatron-LM#1446, EleutherAI/gpt-neox#1257",
        "parallelisms/tensor_parallel.py",
        *_left_out("on_sequence"),
        {"tp": 2},
        "norm.weight",
    ),
    Fault(
        "norm_of_heads_not_summed_over_tp",
        "NVIDIA/Megatron-LM#7452, finding 11 (there of a gated delta net)",
        "parallelisms/tensor_parallel.py",
        *_left_out("on_heads"),
        {"tp": 2},
        "q_norm.weight",
        ["--model.name=qwen3"],
    ),
    Fault(
        "norm_over_heads_of_this_rank",
        "EleutherAI/gpt-neox#1424, axonn-ai/yalis#36",
        "parallelisms/tensor_parallel.py",
        "square_sum = functools.reduce(torch.add, all_gather(own, self.mesh).unbind(0))",
        "square_sum = own[0] * self.mesh.size()",
        {"tp": 2},
        "loss:",
        ["--model.name=olmo2"],
    ),
    Fault(
        "gathered_logits_in_a_vocabulary_parallel_loss",
        "NVIDIA/Megatron-LM#7452, finding 2",
        "parallelisms/tensor_parallel.py",
        "return both[:, 0].logsumexp(0), both[:, 1].amax(0)",
        "return both[:, 0].logsumexp(0) + both.new_tensor(self.mesh.size()).log(), "
        "both[:, 1].amax(0)",
        {"tp": 2},
        "loss:",
    ),
    Fault(
        "vocabulary_that_tp_does_not_divide",
        "NVIDIA/Megatron-LM#1754",
        "parallelisms/tensor_parallel.py",
        "rows_per_rank = -(-weight.shape[0] // self.mesh.size())",
        "rows_per_rank = weight.shape[0] // self.mesh.size()",
        {"tp": 2},
        "loss:",
    ),
    Fault(
        "gradient_of_states_not_summed_over_vocabulary",
        "modelscope/ms-swift#9947, NovaSky-AI/SkyRL#1886",
        "parallelisms/tensor_parallel.py",
        "return whole.to_local(grad_placements=[Partial()])",
        "return whole.to_local(grad_placements=[Replicate()])",
        {"tp": 2},
        "gradient of layers.",
    ),
    Fault(
        "label_off_at_a_cp_boundary",
        "NVIDIA-BioNeMo/bionemo-recipes#1449, alibaba/ChatLearn#343",
        "parallelisms/context_parallel.py",
        "    return Batch(batch.tokens[:, positions], batch.labels[:, positions], batch.documents)",
        "    labels, half = batch.labels[:, positions], len(positions) // 2\n"
        "    labels[:, half - 1] = batch.tokens[:, positions[half]]\n"
        "    return Batch(batch.tokens[:, positions], labels, batch.documents)",
        {"cp": 2},
        "loss:",
    ),
    Fault(
        "positions_begin_at_zero_on_each_cp_rank",
        "NVIDIA/Megatron-LM#5243",
        "train/trainer.py",
        "total = model(batch.tokens, batch.labels, positions=positions, documents",
        "total = model(batch.tokens, batch.labels, documents",
        {"cp": 2},
        "loss:",
    ),
    Fault(
        "keys_gathered_in_another_order",
        "THUDM/slime#1871",
        "parallelisms/context_parallel.py",
        "*late.flip(0).unbind(0)]",
        "*late.unbind(0)]",
        {"cp": 2},
        "loss:",
    ),
    Fault(
        "backward_with_own_keys_alone",
        "huggingface/diffusers#14265",
        "parallelisms/context_parallel.py",
        "keys, values = _in_order(parts.unflatten(1, (2, *k.shape))).unbind(0)",
        "parts = parts[mesh.get_local_rank()].expand_as(parts)\n"
        "        keys, values = _in_order(parts.unflatten(1, (2, *k.shape))).unbind(0)",
        {"cp": 2},
        "attention.wk.weight",
    ),
    Fault(
        "gradient_of_keys_not_summed_over_cp",
        NO_THREAD,
        "parallelisms/context_parallel.py",
        "    return reduce_scatter(torch.cat(parts), mesh)",
        "    return parts[mesh.get_local_rank()]",
        {"cp": 2},
        "attention.wk.weight",
    ),
    Fault(
        "attention_across_documents_under_cp",
        "huggingface/trl#6843",
        "parallelisms/context_parallel.py",
        "    width = v.shape[-1]\n    is_flash = ",
        "    width, mask = v.shape[-1], None\n    is_flash = ",
        {"cp": 2},
        "loss:",
        WITH_DOCUMENTS,
    ),
    Fault(
        "documents_that_never_reach_the_layers",
        "hiyouga/LlamaFactory#10787 (there under cp; here in a pipeline)",
        "parallelisms/pipeline.py",
        '            inputs["documents"] = torch.cat(documents)\n',
        "            documents.clear()\n",
        {"pp": 2},
        "loss:",
        WITH_DOCUMENTS,
    ),
)
