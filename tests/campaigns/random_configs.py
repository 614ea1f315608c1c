"""Random configs on random meshes, each held against one process as `meshwright prove` does.

    python -m tests.campaigns.random_configs --configs 60 --seed 1
    python -m tests.campaigns.random_configs --configs 60 --seed 1 --skip 40      (the last 20)
    python -m tests.campaigns.random_configs --configs 60 --seed 1 --only 17      (that one again)
    python -m tests.campaigns.random_configs --configs 60 --seed 1 --experts      (all with experts)

Draws a family, a mesh, a schedule, policies, precision, documents, packing, accumulation, frozen,
tied and grouped parameters, activation checkpointing, compilation, offload and more, as words of a
command line. Families differ in windows, sinks, latent and linear attention; the width of windows,
stretched rotations, MTP and QK-clip are drawn where a family has them. Half have Muon, and half
compute in bf16. Where no product depends on the mesh, most of these have weights in bf16, or Muon
in bf16. A config that a real job would reject is drawn again. Prints the seed, a line for each
config and how many had what, and exits with 1 if one is wrong.
"""

import argparse
import dataclasses
import itertools
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.commands.prove.bounds import BF16, Bounds, bounds_of
from meshwright.commands.prove.cases import HSDP, SHARING, Case, Kind, build_case
from meshwright.commands.prove.compare import compare
from meshwright.commands.prove.measure import measure
from meshwright.commands.prove.measurement import LAST_RESUMED_STEP, Reference
from meshwright.commands.prove.prove import record_references
from meshwright.commands.prove.ranks import RankError, RankPool
from meshwright.commands.prove.shrink import GLOBAL_BATCH, shrink
from meshwright.commands.prove.user_options import own_options, user_types
from meshwright.config.changes import changed
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.models.families import MODELS
from meshwright.parallelisms.rules.degrees import KEYS, shards_experts_apart
from meshwright.parallelisms.rules.stages import SCHEDULES
from meshwright.system.errors import ConfigError
from meshwright.train.resolve_model import resolve_model
from tests.helpers.resolved import resolved

Maybe = Callable[..., list[str]]
PATIENCE_S = 600
COMPILED = 0.06
"""Odds: a compiled config takes ten times as long."""
ARGS = "--model.args.{}={}"
SPARSE = [name for name, one in MODELS.items() if one.flavors["debugmodel"].table.mixtures]
DENSE = [name for name in MODELS if name not in SPARSE]
TRIES = 100
"""Of a family, whose rules may reject the mesh whatever else is drawn."""
KEPT_ARGS = ("window", "full_every")
"""Args that the small job keeps as they are drawn; a proof has its own."""
FROZEN = (["tok_embeddings.*"], ["layers.0.*"], ["*norm.weight"], ["*.wq.*", "*.w2.*"])
GROUPS = """[{parameters = ["*norm.weight"], lr_scale = 0.5}, \
{parameters = ["*.wv.*", "layers.1.*"], weight_decay = 0.3, optimizer = "AdamW"}]"""
FP32 = (["output"], ["norm"], ["layers.*.attention_norm"], ["layers.1", "output"])


@dataclass(frozen=True)
class Drawn:
    """A config that can be run."""

    number: int
    words: list[str]
    small: JobConfig
    case: Case


def draw(seed: int, number: int, most_ranks: int, has_experts: bool | None = None) -> Drawn:
    """The config of that number: a function of the arguments, from torch 2.12 on.

    Args:
        has_experts: whether the model has experts; None: two of five have.
    """
    chance = random.Random(f"{seed} {number}")
    mesh = _mesh(chance, most_ranks)
    if has_experts is None:
        has_experts = chance.random() < 0.4
    if has_experts:
        sharing = math.prod(mesh.get(axis, 1) for axis in SHARING)
        ep = chance.choice([n for n in (1, 2, 2, 4, 4, 8) if n <= sharing])
        mesh |= {"ep": ep} if ep > 1 and shards_experts_apart() else {}  # torch 2.11 can't
    for attempt in itertools.count():  # until all the rest goes together with the mesh
        if attempt % TRIES == 0:
            family = chance.choice(SPARSE if has_experts else DENSE)
        words = [f"--model.name={family}", *_words(chance, mesh)]
        words += _words_of_layers(chance, _fields(family))
        microbatches = _microbatches(chance, mesh)
        words += _words_of_experts(chance, family, mesh.get("ep", 1)) if has_experts else []
        try:
            config = load_config(words)
            case, small = _case(config, mesh, microbatches, f"config {number}")
            resolved(case.config, case.world_size, device_type="cpu")
        except ConfigError:
            continue
        break
    return Drawn(number, words, small, case)


def _case(
    config: JobConfig, mesh: dict[str, int], microbatches: int, name: str
) -> tuple[Case, JobConfig]:
    """`config` on `mesh`, and what it is compared with."""
    _, args = resolve_model(config)
    small = shrink(config, args)
    drawn = {name: value for name, value in config.model.args.items() if name in KEPT_ARGS}
    model = {"args": small.model.args | drawn}
    small = changed(small, {"training": {"steps": LAST_RESUMED_STEP}, "model": model})
    options, training = own_options(config), config.training
    kept = training.model_dump(include={"mixed_precision_reduce", "loss_chunk_tokens"})
    options["training"] |= {key: value for key, value in kept.items() if value}
    kind = _kind(config, mesh)
    per_rank = config.parallelism.pipeline_parallel_stages_per_rank
    options["parallelism"]["pipeline_parallel_stages_per_rank"] = per_rank
    case = build_case(name, small, mesh, num_microbatches=microbatches, kind=kind, **options)
    return case, small


def _kind(config: JobConfig, mesh: dict[str, int]) -> Kind:
    """Return which reference and bounds the case has. Other kinds than "user types" replace the
    types of weights and of Muon by fp32."""
    if config.training.mixed_precision_param != "bfloat16":
        return "fp32"
    if config.compile.is_on or {"cp", "tp", "ep"} & mesh.keys():
        return "bf16"
    types = {*user_types(config)} - {"mixed_precision_reduce"}
    is_wide = config.training.mixed_precision_reduce == "float32"
    if types and is_wide:
        return "user types"
    return "bf16 sums" if is_wide else "bf16"


def _bounds(case: Case) -> Bounds:
    """Return the proof's bounds. If n ranks add gradients up in bf16, there are n - 1 roundings
    more: the reference adds them up in fp32."""
    bounds, p = bounds_of(case), case.config.parallelism
    if case.config.training.mixed_precision_reduce != "bfloat16":
        return bounds
    copies = p.data_parallel_replicate_degree * p.data_parallel_shard_degree
    num_sums = copies * p.context_parallel_degree - 1
    return dataclasses.replace(bounds, gradient=bounds.gradient + num_sums * BF16)


def _mesh(chance: random.Random, most_ranks: int) -> dict[str, int]:
    sizes = [size for size in (1, 2, 2, 4, 4, 4, 4, 4, 8) if size <= most_ranks]
    world_size, mesh = chance.choice(sizes), dict[str, int]()
    while math.prod(mesh.values()) < world_size:
        axis = chance.choice([*KEYS, "dp_shard", "pp"])
        mesh[axis] = 2 * mesh.get(axis, 1)
    return {axis: mesh[axis] for axis in KEYS if axis in mesh}


def _microbatches(chance: random.Random, mesh: dict[str, int]) -> int:
    dp = math.prod(mesh.get(axis, 1) for axis in HSDP)
    return chance.choice([n for n in (1, 2, 4, 8) if n * dp <= GLOBAL_BATCH])


def _words(chance: random.Random, mesh: dict[str, int]) -> list[str]:
    """Words of a command line."""

    def maybe(odds: float, *words: str) -> list[str]:
        return [*words] if chance.random() < odds else []

    words = [f"--parallelism.{KEYS[axis]}={mesh[axis]}" for axis in KEYS if axis in mesh]
    policy = chance.choice(["default", "always", "never"])
    words += maybe(0.6, f"--parallelism.fsdp_reshard_after_forward={policy}")
    if "pp" in mesh:
        words.append(f"--parallelism.pipeline_parallel_schedule={chance.choice([*SCHEDULES])}")
        words += maybe(0.2, "--parallelism.pipeline_parallel_stages_per_rank=2")
    else:
        words += maybe(0.3, "--parallelism.fsdp_prefetch_layers=2")
        words += maybe(0.3, "--parallelism.fsdp_cpu_backend=gloo")
        words += maybe(0.3, "--parallelism.fsdp_reduce_gradients=every_microbatch")
    return words + _model_words(chance, maybe)


def _model_words(chance: random.Random, maybe: Maybe) -> list[str]:
    words = maybe(0.4, "--training.mask_documents=true")
    streamed = ["--training.dataset_mode=streamed", "--training.stream_shards=8"]
    words += maybe(0.2, *streamed) or maybe(0.25, "--training.packing=best_fit")
    words += maybe(0.25, ARGS.format("tie_embeddings", "true"))
    words += maybe(0.3, ARGS.format("n_kv_heads", chance.choice([1, 8])))
    words += maybe(0.25, f"--model.frozen={chance.choice(FROZEN)}")
    words.append(f"--optimizer.name={chance.choice(['Adam', 'AdamW', 'muon', 'muon'])}")
    words += maybe(0.25, f"--optimizer.groups={GROUPS}", "--optimizer.decay_norm_and_bias=true")
    words += maybe(0.2, "--optimizer.muon.split_heads=true")
    words += maybe(0.2, "--optimizer.muon.lr_scale=spectral")
    words += maybe(0.2, "--checkpoint.average.decay=0.9")
    early = ["--training.max_norm=inf", "--optimizer.early_step_in_backward=true"]
    words += maybe(0.15, *early) or [f"--training.max_norm={chance.choice(['0.5', '1', 'inf'])}"]
    words += maybe(0.2, "--training.enable_cpu_offload=true")
    words.append(f"--training.seed={chance.randrange(1000)}")
    if chance.random() < 0.55:
        words.append("--training.mixed_precision_param=bfloat16")
        words += maybe(0.6, "--training.dtype=bfloat16")
        words += maybe(0.5, "--optimizer.muon.dtype=float32")  # by default it is bfloat16
        words += maybe(0.2, "--training.mixed_precision_reduce=bfloat16")
        words += maybe(0.5, f"--training.fp32_modules={chance.choice(FP32)}")
        words += maybe(0.2, "--float8.enable=true", "--float8.emulate=true")
    else:
        words.append("--training.mixed_precision_param=float32")
        # in bf16, the output's gradient is rounded once per chunk
        words += maybe(0.3, f"--training.loss_chunk_tokens={chance.choice([5, 48])}")
    is_compiled = chance.random() < COMPILED
    modes = ["none", "full", "selective", "selective"] + is_compiled * ["memory_budget"] * 2
    mode = chance.choice(modes)
    words.append(f"--activation_checkpoint.mode={mode}")
    if mode == "selective":
        option = chance.choice(["op", "1", "2"])
        words.append(f"--activation_checkpoint.selective_ac_option={option}")
    words.append(f"--compile.enable={str(is_compiled).lower()}")
    if is_compiled:
        backend = chance.choice(["aot_eager", "aot_eager", "eager", "inductor"])
        words.append(f"--compile.backend={backend}")
    return words


def _fields(family: str) -> set[str]:
    """Return the names of a family's keys in `model.args`."""
    return {field.name for field in dataclasses.fields(MODELS[family].args)}


def _words_of_layers(chance: random.Random, fields: set[str]) -> list[str]:
    """Return words of what only some families have, and of layers for MTP or QK-clip."""
    # a window of one token has no gradient of queries and keys, unless there are sinks
    choices = {
        "window": (2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32),
        "full_every": (1, 2, 2, 3, 5),
        "q_lora_rank": (0, 64),
    }
    words = [ARGS.format(name, chance.choice(choices[name])) for name in choices if name in fields]
    if "rope_scaling" in fields and chance.random() < 0.3:
        words.append(ARGS.format("rope_scaling.factor", chance.choice([2.0, 32.0])))
        words.append(ARGS.format("rope_scaling.original_seq_len", chance.choice([16, 8192])))
    match chance.choice(["MTP", "QK-clip", "", ""]):
        case "MTP":
            words.append(ARGS.format("mtp_depth", chance.choice([1, 2])))
        case "QK-clip":
            words.append("--optimizer.qk_clip_threshold=1.0")
            words.append(f"--optimizer.qk_clip_interval={chance.choice([1, 2])}")
    return words


def _words_of_experts(chance: random.Random, family: str, ep: int) -> list[str]:
    num_active = chance.choice((1, 2, 3))
    words = [ARGS.format("n_active", num_active)]
    # one expert's share of one is 1: its router has no gradient
    choices = ("true", "false", "") if num_active > 1 else ("false",)
    if normalizes := chance.choice(choices):
        words.append(ARGS.format("normalize_experts", normalizes))
    if "n_dense_layers" in _fields(family):
        words.append(ARGS.format("n_dense_layers", chance.choice((0, 1))))
    for key, weight in (
        ("balance_loss", 0.1),
        ("sequence_balance_loss", 0.1),
        ("router_z_loss", 0.01),
        ("bias_update_rate", 0.01),
    ):
        words.append(f"--experts.{key}={chance.choice((0, weight))}")
    return [*words, f"--parallelism.expert_parallel_degree={ep}"]


class Judge:
    """Runs configs on ranks that it keeps, and compares them with one process."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._pools = folder, dict[int, RankPool]()
        self._references: dict[str, tuple[Reference, Path]] = {}

    def failures(self, drawn: Drawn) -> list[str]:
        """What is wrong; nothing if it is equal."""
        case, n = drawn.case, drawn.case.world_size
        try:
            reference, file = self._reference(drawn)
            ranks = self._pool(n).run(measure, case.config, n, file)
        except RankError as error:
            self.close()
            return [f"stopped: {error}"]
        return compare(reference, ranks, _bounds(case)).failures

    def close(self, kept: int = 0) -> None:
        """End the ranks, but for the pool of size `kept` and the single one: while they idle, they
        take time from those that work."""
        for size in [size for size in self._pools if not kept or size not in (1, kept)]:
            self._pools.pop(size).close()

    def _reference(self, drawn: Drawn) -> tuple[Reference, Path]:
        key = f"{drawn.case.kind} {drawn.small.model_dump_json()}"
        if key not in self._references:
            folder = self._folder / str(len(self._references))
            folder.mkdir(exist_ok=True)
            kind = drawn.case.kind
            made = record_references(self._pool(1).run, drawn.small, {kind}, folder)
            self._references[key] = made[kind]
        return self._references[key]

    def _pool(self, world_size: int) -> RankPool:
        if world_size not in self._pools:
            self._pools[world_size] = RankPool(world_size, PATIENCE_S)
        return self._pools[world_size]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="number of the config to run, from 0")
    parser.add_argument("--skip", type=int, default=0, help="the first so many")
    parser.add_argument("--most-ranks", type=int, default=8)
    parser.add_argument("--experts", action="store_true", help="only models with experts")
    options = parser.parse_args()
    print(f"seed {options.seed}, up to {options.most_ranks} ranks", flush=True)
    numbers = range(options.skip, options.configs) if options.only is None else [options.only]
    experts = options.experts or None
    drawn = [draw(options.seed, number, options.most_ranks, experts) for number in numbers]
    drawn.sort(key=lambda d: (d.case.world_size, str(d.case.mesh)))  # groups are made once
    wrong = [number for number, failures in run(drawn) if failures]
    print(*_counts(drawn), sep=", ")
    print(f"{len(drawn)} configs, seed {options.seed}: {len(wrong)} wrong {wrong or ''}".rstrip())
    sys.stdout.flush()
    sys.exit(1 if wrong else 0)


def _counts(drawn: Sequence[Drawn]) -> Iterator[str]:
    """Yield how many of the cases have each kind, and what a net with holes would let through."""
    configs = [one.case.config for one in drawn]
    for kind, count in Counter(one.case.kind for one in drawn).items():
        yield f"{count} in {kind}"
    for family, count in Counter(c.model.name for c in configs).items():
        yield f"{count} {family}"
    has = {
        "several microbatches": [c.num_microbatches > 1 for c in configs],
        "weights in bf16": [c.training.dtype == "bfloat16" for c in configs],
        "Muon in bf16": [
            one.case.kind == "user types" and "muon.dtype" in user_types(one.case.config)
            for one in drawn
        ],
        "every microbatch reduced": [
            c.parallelism.fsdp_reduce_gradients == "every_microbatch" for c in configs
        ],
        "an update in backward": [c.optimizer.early_step_in_backward for c in configs],
        "offload": [c.training.enable_cpu_offload for c in configs],
        "windows": ["window" in c.model.args for c in configs],
        "MTP": [c.model.args["mtp_depth"] > 0 for c in configs],
        "QK-clip": [c.optimizer.qk_clip_threshold is not None for c in configs],
    }
    for what, found in has.items():
        yield f"{sum(found)} with {what}"


def run(configs: list[Drawn]) -> Iterator[tuple[int, list[str]]]:
    """Judge one after the other, and print a line for each."""
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(Path(folder))
        for drawn in configs:
            judge.close(kept=drawn.case.world_size)
            start = time.perf_counter()
            failures = judge.failures(drawn)
            seconds = time.perf_counter() - start
            verdict, training = "WRONG" if failures else "equal", drawn.case.config.training
            words = [*drawn.words, f"--training.local_batch_size={training.local_batch_size}"]
            kind = f"{drawn.case.world_size} ranks, {drawn.case.kind}"
            print(f"{drawn.number:4} {verdict} {seconds:5.1f} s, {kind}:", *words, flush=True)
            for failure in failures:
                print(f"     {failure}", flush=True)
            yield drawn.number, failures
        judge.close()


if __name__ == "__main__":
    main()
