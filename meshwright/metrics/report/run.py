"""Reads the files of a dump folder. No torch: a report can be made anywhere."""

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.config.changes import LEFT_OPEN
from meshwright.system.errors import check, where_it_ends
from meshwright.system.files import text_of

Row = Mapping[str, Any]

TOKENS = "data/tokens"
"""The metric that counts the tokens of all steps so far."""


@dataclass(frozen=True)
class Run:
    """A run, as its files have it; absent parts are empty."""

    folder: Path
    records: Sequence[Row]
    """Logged steps, in rising order, without values that aren't finite."""
    history: Sequence[Row]
    """Starts and ends of processes."""
    skipped: Sequence[Row]
    """Steps that were left out."""
    texts: Sequence[Row]
    """Text that the model wrote at validations."""
    config_text: str
    """TOML."""
    proof: Row | None
    """`proof.json` of `meshwright prove`."""
    loads: Row | None
    """The tokens of each expert in one step: its "step", and "layers"."""

    @property
    def starts(self) -> list[Row]:
        """Starts of processes, in order."""
        return [row for row in self.history if row["event"] == "start"]

    @property
    def resumed_steps(self) -> list[int]:
        """Steps after which another process resumed, or another stage started."""
        return [int(row["step"]) for row in self.starts[1:]]

    @cached_property
    def config(self) -> dict[str, Any]:
        """The values of every key; none, if config.toml can't be read. A key that is left
        open there has its value of the last start."""
        try:
            written = tomllib.loads(self.config_text)
        except tomllib.TOMLDecodeError:
            return {}
        used = self.starts[-1].get("config", {}) if self.starts else {}
        for section, keys in written.items():
            for key, value in keys.items():
                if isinstance(value, int | str) and value in LEFT_OPEN:
                    keys[key] = used.get(section, {}).get(key, value)
        return written

    def series(self, name: str, x: str = "step") -> list[tuple[int, float]]:
        """Return the steps, or values of `x`, and the values of a chart."""
        return [(int(row[x]), float(row[name])) for row in self.records if name in row and x in row]

    def values(self, name: str) -> list[float]:
        return [value for _, value in self.series(name)]

    def names(self, prefix: str) -> list[str]:
        """Return the metrics whose names start with `prefix`, in the order of appearance."""
        seen = dict.fromkeys(name for row in self.records for name in row)
        return [name for name in seen if name.startswith(prefix)]

    def last(self, name: str) -> Any:
        """Return the newest value of a metric; None if there is none."""
        return next((row[name] for row in reversed(self.records) if name in row), None)


def read_run(folder: Path) -> Run:
    """Read a dump folder.

    Raises:
        ConfigError: if it holds no metrics.jsonl.
    """
    metrics = folder / "metrics.jsonl"
    check(folder.is_dir(), "RUN_DIR", str(folder), "no such folder", where_it_ends(folder))
    rule, fix = "holds no metrics.jsonl", "name the job.dump_folder of a run"
    check(metrics.is_file(), "RUN_DIR", str(folder), rule, fix)
    records = [
        {
            name: value
            for name, value in row.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        for row in rows_of(metrics)
    ]
    return Run(
        folder,
        records=sorted(records, key=lambda row: row["step"]),
        history=[row for row in rows_of(folder / "history.jsonl") if "event" in row],
        skipped=rows_of(folder / "skipped_steps.jsonl"),
        texts=[row for row in rows_of(folder / "samples.jsonl") if "text" in row],
        config_text=text_of(folder / "config.toml"),
        proof=_table(folder / "proof" / "proof.json"),
        loads=_table(folder / "experts.json"),
    )


def rows_of(file: Path) -> list[dict[str, Any]]:
    """Lines of JSON that have a step; a line that a kill cut short is left out."""
    rows = []
    for line in text_of(file).splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def _table(file: Path) -> Row | None:
    try:
        table = json.loads(text_of(file))
    except ValueError:
        return None
    return table if isinstance(table, dict) else None
