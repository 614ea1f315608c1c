"""Draw the loss of one or more runs from their metrics.jsonl (pip install 'meshwright[docs]').

python scripts/plot_loss.py docs/loss_curve.svg outputs/debug_model/metrics.jsonl ...
"""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("output", type=Path)
parser.add_argument("runs", type=Path, nargs="+")
args = parser.parse_args()

plt.rcParams["svg.hashsalt"] = "meshwright"  # the same file for the same data
figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
for run in args.runs:
    rows = [json.loads(line) for line in run.read_text().splitlines()]
    axes.plot([r["step"] for r in rows], [r["loss/train"] for r in rows], label=run.parent.name)
axes.set(xlabel="optimizer step", ylabel="loss (nats per token)")
axes.grid(alpha=0.3)
axes.legend(frameon=False)
figure.savefig(args.output, metadata={"Date": None})
