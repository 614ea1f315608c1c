"""Collectives and bytes of one optimizer step on 4 ranks, against what the step cannot do without.

The debug model, one microbatch, bf16 parameters, fp32 sums, as its TOML has it. Every collective
is seen as it is called, in forward, backward and what follows; bytes are those that a rank must
receive (n ranks, payload P the whole tensor: all-gather and reduce-scatter P (n-1)/n, all-reduce
twice that). The minimum is derived in docs/parallelisms.md.

    python benchmarks/collectives.py
"""

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.commands.prove.ranks import RankPool
from meshwright.config.loader import load_config
from meshwright.models.batch import Batch
from meshwright.models.families.llama import LlamaArgs
from meshwright.parallelisms.initialize import initialize
from meshwright.parallelisms.meshes import Meshes, build_meshes
from meshwright.train.bad_steps import BadStepDetector
from meshwright.train.preflight import Plan, preflight
from meshwright.train.trainer import Trainer

PRESETS = Path(__file__).parents[1] / "train_configs"
RANKS = 4
KINDS = {  # what an operation of c10d or of the functional collectives does
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "all_gather_single": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "send": "send",
    "recv_": "receive",
}
SILENT = ("wait_tensor", "_wrap_tensor_autograd")
SCALARS = "any, of scalars"
FEW_BYTES = 8
Key = tuple[str, str]
"""(axis, kind)"""


class Watch(TorchDispatchMode):
    """Counts collectives, and the bytes that this rank receives in them, by axis and kind."""

    def __init__(self, meshes: Meshes) -> None:
        super().__init__()
        self.counts: Counter[Key] = Counter()
        self.bytes: Counter[Key] = Counter()
        self._axes = {dist.group.WORLD.group_name: SCALARS}
        for name in ("loss", "fsdp", "tp", "cp"):
            mesh = getattr(meshes, name)
            for dim, group in zip(mesh.mesh_dim_names, mesh.get_all_groups(), strict=True):
                if group.size() > 1:
                    self._axes[group.group_name] = dim

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls collectives on local tensors, which come by again
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name not in SILENT:
            self._note(KINDS[name], args, result)
        return result

    def _note(self, kind: str, args: Any, result: Any) -> None:
        leaves = tree_leaves(args)
        groups = [leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject)]
        names = [leaf for leaf in leaves if isinstance(leaf, str)]
        group = next(
            (
                name
                for name in [*(dist.ProcessGroup.unbox(g).group_name for g in groups[:1]), *names]
                if name in self._axes
            ),
            "",
        )
        tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
        payload = max(tensor.nbytes for tensor in tensors)
        size = next(g.size() for g in _groups() if g.group_name == group) if group else 1
        if size == 1:
            return
        times = {"all-reduce": 2.0}.get(kind, 1.0)
        key = (self._axes[group] if payload > FEW_BYTES else SCALARS, kind)
        self.counts[key] += 1
        self.bytes[key] += round(times * payload * (size - 1) / size)


def _groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)


def watch_step(preset: str) -> tuple[dict[Key, int], dict[Key, int]]:
    """Counts and bytes of the second step: the first also sets up."""
    plan = _plan(preset)
    training, device = plan.config.training, torch.device("cpu")
    meshes = build_meshes(plan.dims, "cpu")
    trainer = Trainer(plan, meshes, device)
    for stage in trainer.model.stages:
        initialize(stage, training.seed)
    generator = torch.Generator().manual_seed(meshes.dp.get_local_rank())
    shape = (training.local_batch_size, training.seq_len)
    watch = Watch(meshes)
    for step in (1, 2):
        batch = torch.randint(plan.model_args.vocab_size, shape, generator=generator)
        watch.counts.clear()
        watch.bytes.clear()
        with watch:
            trainer.step(step, [Batch(batch, batch)], BadStepDetector(device))
    return dict(watch.counts), dict(watch.bytes)


def _plan(preset: str) -> Plan:
    words = ["--job.config_file", str(PRESETS / f"{preset}.toml")]
    words += ["--training.mixed_precision_param", "bfloat16", "--compile.enable=false"]
    # through shared memory, FSDP2's are no operators
    config, _ = load_config(words)
    return preflight(config, RANKS)


def minimum(plan: Plan) -> tuple[dict[Key, int], dict[Key, int]]:
    """Counts and bytes that docs/parallelisms.md derives."""
    args, dims, training = plan.model_args, plan.dims, plan.config.training
    counts: Counter[Key] = Counter()
    volume: Counter[Key] = Counter()

    def add(axis: str, kind: str, count: int, payload: float, size: int) -> None:
        times = 2 if kind == "all-reduce" else 1
        if size > 1:
            counts[axis, kind] += count
            volume[axis, kind] += round(count * times * payload * (size - 1) / size)

    _add_fsdp(add, args, dims.dp_shard * dims.cp, dims.dp_replicate, dims.tp)
    tokens = training.local_batch_size * training.seq_len // dims.cp
    activation = 2 * tokens * args.dim  # bytes
    # in forward and in backward, each block gathers before and scatters after two pairs of products
    add("tp", "all-gather", 4 * args.n_layers + 2, activation, dims.tp)
    add("tp", "reduce-scatter", 4 * args.n_layers + 2, activation, dims.tp)
    add("tp", "all-gather", 1, 8 * tokens * dims.tp, dims.tp)  # the loss: log-sum, label's logit
    add("tp", "all-reduce", 1, 2 * (2 * args.n_layers + 1) * args.dim, dims.tp)  # norm gradients
    keys = 2 * 2 * tokens * dims.cp * args.n_kv_heads // dims.tp * args.table.head_dim
    add("cp", "all-gather", 2 * args.n_layers, keys, dims.cp)
    add("cp", "reduce-scatter", args.n_layers, keys, dims.cp)
    add(SCALARS, "all-reduce", 1, 8, dims.dp * dims.cp)  # number of labels
    add(SCALARS, "all-reduce", 1, 8, RANKS)  # loss and norm
    return dict(counts), dict(volume)


def _add_fsdp(add: Any, args: LlamaArgs, shards: int, copies: int, tp: int) -> None:
    """Parameters in forward and, but for what stays, in backward; gradients once."""
    block = args.table.num_params_of("layers.0")
    ends = args.vocab_size * args.dim
    groups = [ends / tp, *[block / tp + 2 * args.dim] * args.n_layers, ends / tp + args.dim]
    for number, size in enumerate(groups):
        is_once = number == 0 or number >= len(groups) - 2  # the embedding, and those that stay
        add("fsdp", "all-gather", 1 if is_once else 2, 2 * size, shards)
        add("fsdp", "reduce-scatter", 1, 4 * size, shards)
        add("dp_replicate", "all-reduce", 1, 4 * size / shards, copies)


def main() -> None:
    """Print a table a preset."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    pool = RankPool(RANKS)
    for preset in ("debug_model", "debug_model_2d", "debug_model_hsdp", "debug_model_cp"):
        counts, volume = pool.run(watch_step, preset)[0]
        least_counts, least_volume = minimum(_plan(preset))
        print(f"\n{preset}, {RANKS} ranks, one step\n")
        print("| axis | collective | calls | minimum | KiB received | minimum |")
        print("|---|---|---|---|---|---|")
        for axis, kind in sorted({*counts, *least_counts}):
            key = (axis, kind)
            got, least = volume.get(key, 0) / 1024, least_volume.get(key, 0) / 1024
            print(
                f"| {axis} | {kind} | {counts.get(key, 0)} | {least_counts.get(key, 0)} "
                f"| {got:,.2f} | {least:,.2f} |"
            )
    pool.close()


if __name__ == "__main__":
    main()
