"""Private names of torch (and of Python) that the package uses: each new one is a decision.

Each is behind one function or one import, with a comment on its failure if torch removes it. The
`_scaled_dot_product_...` are operators, and have no other names.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import meshwright

PACKAGE = Path(meshwright.__file__).parent

KNOWN = {
    "checkpoint/reader.py": "_StorageInfo",
    "commands/completion.py": "_actions",  # argparse's
    "parallelisms/shards.py": "torch.distributed.tensor._utils",
    "models/document_mask.py": "torch._C._dynamo",
    "parallelisms/cpu_kernels/attention.py": "torch._inductor torch._inductor.codecache",
    "parallelisms/activation_checkpoint.py": "torch._dynamo torch._functorch",
    "parallelisms/data_parallel.py": "_comm_ctx _fsdp_param_group _get_fsdp_state",
    "train/optim/gradients.py": "_foreach_norm",
    "parallelisms/meshes.py": "_C _functional_collectives _distributed_c10d _set_pg_timeout",
    "parallelisms/context_parallel.py": (
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward "
        "_scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_flash_attention_for_cpu_backward"
    ),
    "parallelisms/tensor_parallel.py": (
        "_inductor _micro_pipeline_tp torch._inductor.config torch.distributed._symmetric_memory"
    ),
    "commands/plan/simulate.py": (
        "_fused_rms_norm _fused_rms_norm_backward "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention"
    ),
    "commands/plan/ledger.py": "_local_tensor",
    "commands/plan/torch_names.py": (
        "_AutoDispatchBelowAutograd _C _PipelineSchedule _autograd _cdata _current_autograd_node "
        "_get_sequence_nr _identity _inference_mode _propagate_tensor_meta_non_cached _sequence_nr "
        "_type "
        "torch._subclasses.fake_tensor torch.distributed._tools.fake_collectives "
        "torch.distributed.tensor._sharding_prop torch.testing._internal.distributed.fake_pg "
        "torch.utils._python_dispatch torch.utils._pytree"
    ),
    "metrics/profiling.py": "_record_memory_history _snapshot",
    "commands/prove/ranks.py": "_Options _devices _threads _timeout",
}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def own_names(trees: list[ast.Module]) -> Iterator[str]:
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def used_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            yield node.module or ""
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("torch"))


def test_private_names_are_these() -> None:
    files = {file: ast.parse(file.read_text("utf-8")) for file in sorted(PACKAGE.rglob("*.py"))}
    own = {*own_names([*files.values()])}
    found = {}
    for file, tree in files.items():
        if names := {name for name in used_names(tree) if is_private(name) and name not in own}:
            found[file.relative_to(PACKAGE).as_posix()] = names
    assert found == {file: set(names.split()) for file, names in KNOWN.items()}
