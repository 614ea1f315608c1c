"""Write the text of training samples, as a job in DUMP_FOLDER reads them.

python scripts/show_samples.py DUMP_FOLDER SOURCE FIRST LAST

SOURCE is a dataset's name and FIRST to LAST are indices in it, as skipped_steps.jsonl has them. Of
a streamed source, what it gave since the last checkpoint before FIRST is read again.
"""

import argparse
from pathlib import Path

from meshwright.checkpoint import commit
from meshwright.config.loader import load_config
from meshwright.datasets.encoding import SampleRules
from meshwright.datasets.opening import open_training_data
from meshwright.datasets.stream import Cursor, find_samples
from meshwright.datasets.tokenizers.kinds import build_tokenizer

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("dump_folder", type=Path)
parser.add_argument("source")
parser.add_argument("first", type=int)
parser.add_argument("last", type=int)
args = parser.parse_args()

config = load_config(["--job.config_file", str(args.dump_folder / "config.toml")])
sources = open_training_data(config)
names = [source.entry.name for source in sources]
if args.source not in names or not 0 <= args.first <= args.last:
    parser.error(f"SOURCE is one of {', '.join(names)}, and 0 <= FIRST <= LAST")
number = names.index(args.source)

before = (0, Cursor())
checkpoints = args.dump_folder / config.checkpoint.folder
for step in commit.saved_steps(checkpoints):
    cursor = Cursor.from_json(commit.inspect(commit.step_folder(checkpoints, step))["data"])
    if cursor.counts[number] <= args.first:
        before = (cursor.counts[number], cursor)

tokenizer = build_tokenizer(config.model.tokenizer_path)
rules = SampleRules(config.training.seq_len + 1, config.training.seed)
samples = find_samples(sources[number], args.first, args.last, rules, before)
for index, sample in enumerate(samples, args.first):
    print(f"--- sample {index} of {args.source}")
    print(tokenizer.decode(sample.tokens.tolist()))
