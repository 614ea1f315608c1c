"""The command `meshwright`."""

import sys
from pkgutil import resolve_name

from meshwright.errors import EXIT_CONFIG, ConfigError, did_you_mean

CONFIG = "--job.config_file CONFIG [--section.key value ...]"
COMMANDS = {
    "check": (
        "meshwright.cli.check_job:main",
        f"RANKS {CONFIG}",
        "silent if the job can run; where it resumes with other settings, it names them",
    ),
    "config": (
        "meshwright.cli.show_config:main",
        f"[--help] {CONFIG}",
        "the whole config, as TOML; with --help what every key means",
    ),
    "tokenize": (
        "meshwright.cli.tokenize_data:main",
        f"[--workers N] [--verify] [--quiet] {CONFIG}",
        "make the token caches that the job reads, ahead of it; or check them to the last byte",
    ),
    "checkpoint": (
        "meshwright.cli.checkpoint:main",
        "ls FOLDER | show CHECKPOINT [--tensors] | verify CHECKPOINT_OR_FOLDER |\n"
        "      diff A B [--tensors]",
        "what is saved, whether it is whole, in what two differ; exit code 1 if damaged, different",
    ),
    "export": (
        "meshwright.cli.export:main",
        "CHECKPOINT OUT [--dtype bfloat16|float32] [--max-shard-size 5GB] "
        "[--tokenizer PATH]\n      [--without-tokenizer]",
        "a checkpoint as a model folder of Hugging Face, compared with it before it gets its name",
    ),
    "generate": (
        "meshwright.cli.generate:main",
        "CHECKPOINT_OR_HF_FOLDER --prompt TEXT [--max-new-tokens N] [--temperature T] [--top-p P] "
        "[--seed N]\n      [--dtype auto|bfloat16|float32] [--tokenizer PATH]",
        "what a model writes, on one device; without a temperature the likeliest token each time",
    ),
    "plan": (
        "meshwright.cli.plan:main",
        "CONFIG --world-size N --device h100|h200|a100|b200|mi300x|cpu|GiB [--rank R | "
        "--all-stages]\n      [--json] [--html FILE] [--search] [--calibrate] "
        "[--section.key value ...]",
        "its memory, traffic and step time on devices that are not there",
    ),
    "prove": (
        "meshwright.cli.prove:main",
        f"[--every-mesh] [--output FOLDER] {CONFIG}",
        "train it in small on many meshes, on this machine's CPU, and compare with one process",
    ),
}
"""By name: what runs it, its arguments, and what it is for. Named by string, for only some of them
need torch, which takes a second to load."""


def main() -> None:
    """Run one command; a `ConfigError` becomes its message and exit code 2."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h"):
        print("usage: meshwright COMMAND ...\n")
        for name, (_, usage, purpose) in COMMANDS.items():
            print(f"  meshwright {name} {usage}\n      {purpose}")
        return
    try:
        if name not in COMMANDS:
            raise ConfigError("", f"unknown command {name}\n  fix: {did_you_mean(name, COMMANDS)}")
        resolve_name(COMMANDS[name][0])(arguments)
    except ConfigError as error:
        print(f"meshwright: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)


if __name__ == "__main__":
    main()
