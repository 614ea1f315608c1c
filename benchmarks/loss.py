"""Time and peak memory of a step, as the vocabulary grows: what the loss costs.

One process trains a Llama (dim 512, 8 layers, 8 heads, 4 of keys, FFN 1408, sequence 512, batch 4)
on random tokens, by the trainer's own step. Another checkout beside it, in turns, shows what a
change has brought.

    python benchmarks/loss.py --vocab-size 128256 --against ../before
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

SEQ_LEN, BATCH = 512, 4
DIMENSIONS = {"dim": 512, "n_layers": 8, "n_heads": 8, "n_kv_heads": 4, "hidden_dim": 1408}


def measure(steps: int, warm_up: int, words: list[str]) -> dict[str, float]:
    """Train in this process: median seconds of a step, the resident peak, and the loss."""
    import torch
    import torch.distributed as dist

    from meshwright.config.loader import load_config
    from meshwright.models.batch import Batch
    from meshwright.parallelisms.meshes import build_meshes
    from meshwright.parallelisms.shards import local_box
    from meshwright.train.bad_steps import BadStepDetector
    from meshwright.train.build import build_model
    from meshwright.train.optim.optimizers import build_optimizer
    from meshwright.train.preflight import preflight
    from meshwright.train.trainer import StepOptions, train_step

    torch.set_num_threads(2)
    plan, cpu = preflight(load_config(words), 1), torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", f"file://{folder}/meet", world_size=1, rank=0)
        meshes = build_meshes(plan.dims, "cpu")
        model = build_model(plan, meshes, cpu)
        for parameter in model.parameters():  # any values will do
            torch.nn.init.normal_(local_box(parameter.detach())[0], std=0.02)
        model.stages[0].init_buffers()
        optimizer = build_optimizer(model.named_parameters(), plan.config.optimizer)
        generator, seconds = torch.Generator().manual_seed(0), []
        for step in range(1, warm_up + steps + 1):
            size = plan.model_args.vocab_size
            tokens = torch.randint(size, (BATCH, SEQ_LEN + 1), generator=generator)
            start = time.perf_counter()
            result = train_step(
                model,
                [Batch(tokens[:, :-1], tokens[:, 1:])],
                optimizer,
                step=step,
                meshes=meshes,
                detector=BadStepDetector(cpu),
                options=StepOptions(max_norm=1.0),
            )
            seconds.append(time.perf_counter() - start)
        dist.destroy_process_group()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    state = 16 * plan.model_args.table.num_params  # weights, gradients, two moments in fp32
    return {
        "step_s": median(seconds[warm_up:]),
        "first_step_s": seconds[0],
        "peak_gb": peak / 1e9,
        "above_state_gb": (peak - state) / 1e9,
        "loss": result.loss.item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab-size", type=int, default=128256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--compile", choices=["off", "on", "both"], default="both")
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--measure", action="store_true", help="in this process, and print JSON")
    options, others = parser.parse_known_args()
    if options.measure:
        print(json.dumps(measure(options.steps, options.warm_up, others)))
        os._exit(0)  # gloo's threads can abort a process that ends
    here = Path(__file__).parents[1]
    roots = [root for root in (options.against, here) if root is not None]
    keys = {f"model.args.{name}": size for name, size in DIMENSIONS.items()} | {
        "model.args.vocab_size": options.vocab_size,
        "model.tokenizer_path": "bytes",
        "training.seq_len": SEQ_LEN,
        "training.local_batch_size": BATCH,
    }
    words = [f"--{key}={value}" for key, value in keys.items()] + others
    for is_on in {"off": [False], "on": [True], "both": [False, True]}[options.compile]:
        for _ in range(options.rounds):
            for root in roots:
                command = [sys.executable, __file__, "--measure", f"--steps={options.steps}"]
                command += [f"--warm-up={options.warm_up}", *words]
                command.append(f"--compile.enable={str(is_on).lower()}")
                environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "2"}
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, check=False
                )
                if done.returncode:
                    sys.exit(done.stderr)
                figures = json.loads(done.stdout.splitlines()[-1])
                shown = ", ".join(f"{name} {figure:.3f}" for name, figure in figures.items())
                mode = "compiled" if is_on else "eager"
                print(f"{root.name or root}, vocabulary {options.vocab_size}, {mode}: {shown}")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
