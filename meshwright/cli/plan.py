"""`meshwright plan`: memory, traffic and step time of a job, on this machine, without a GPU."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.config.loader import config_errors, load_config
from meshwright.errors import ConfigError, check, did_you_mean

FLAGS = ("--all-stages", "--json", "--search", "--calibrate", "--no-remedies")
OPTIONS = ("--world-size", "--device", "--rank", "--html", "--workers")


@dataclass
class Words:
    """The command line, taken apart."""

    config: str = ""
    options: dict[str, str] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)
    overrides: list[str] = field(default_factory=list)
    """Keys of the config."""


def main(arguments: Sequence[str]) -> None:
    """Plan the job that the arguments name, and print the plan.

    Raises:
        ConfigError: if the job cannot run.
    """
    words = _parse(arguments)
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print is no part of the plan
        text = _answer(words)
    print(text)


def _answer(words: Words) -> str:
    # not at the top: it needs torch, which --help does not
    from meshwright.planning import command

    device = words.options.get("--device", "")
    check(bool(device), "--device", device, "is needed", "--device h100, cpu, 80, ...")
    if "--calibrate" in words.flags:
        return command.calibrate(device)
    check(bool(words.config), "CONFIG", words.config, "is needed", "name a TOML")
    world_size = _number(words, "--world-size", 1)
    check(world_size > 0, "--world-size", world_size, "is needed", "--world-size 8")
    workers = _number(words, "--workers", 1) or len(os.sched_getaffinity(0))
    config, provenance = load_config(["--job.config_file", words.config, *words.overrides])
    with config_errors(provenance):
        if "--search" in words.flags:
            return command.search(config, world_size, device, workers, "--json" in words.flags)
        return command.plan(
            config,
            world_size,
            device,
            rank=_number(words, "--rank", 0),
            all_stages="--all-stages" in words.flags,
            as_json="--json" in words.flags,
            html=Path(words.options["--html"]) if "--html" in words.options else None,
            tries_remedies="--no-remedies" not in words.flags,
            workers=workers,
        )


def _parse(arguments: Sequence[str]) -> Words:
    words, rest = Words(), list(arguments)
    while rest:
        word = rest.pop(0)
        name, _, value = word.partition("=")
        if word in FLAGS:
            words.flags.add(word)
        elif name in OPTIONS:
            check(bool(value or rest), name, value, "needs a value")
            words.options[name] = value or rest.pop(0)
        elif name == "--job.config_file":
            words.config = value or (rest.pop(0) if rest else "")
        elif word.startswith("--") and "." in name:
            words.overrides.append(word)
            if not value and rest and not rest[0].startswith("--"):
                words.overrides.append(rest.pop(0))
        elif not word.startswith("-") and not words.config:
            words.config = word
        else:
            fix = did_you_mean(word, [*FLAGS, *OPTIONS])
            raise ConfigError("", f"unknown argument {word}\n  fix: {fix}")
    return words


def _number(words: Words, option: str, least: int) -> int:
    value = words.options.get(option, "0")
    is_number = value.isdecimal() and (int(value) >= least or option not in words.options)
    check(is_number, option, value, f"must be a number from {least} on")
    return int(value)
