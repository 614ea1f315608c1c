"""`meshwright config migrate`: a TOML of torchtitan's as one of ours."""

from argparse import Namespace
from textwrap import fill

import tomli_w

from meshwright.config.loader import load_given
from meshwright.errors import check


def run(given: Namespace) -> None:
    """Print the translated TOML, under a note for each key whose name or meaning is another here.

    Raises:
        ConfigError: if the TOML is not torchtitan's, or asks for a feature that Meshwright lacks.
    """
    config, provenance = load_given(given)
    fix = "name a TOML with its model.name and model.flavor, as qwen3 and 8B"
    check(bool(provenance.notes), "CONFIG", given.config, "is not torchtitan's", fix)
    print("# Translated from torchtitan 0.2.2's keys. Absent keys have Meshwright's defaults.\n#")
    for note in provenance.notes:
        print(fill(note, 100, initial_indent="# ", subsequent_indent="#     "))
    table = config.model_dump(exclude_unset=True, exclude_none=True)
    table.get("job", {}).pop("config_file", None)
    sections = {name: section for name, section in table.items() if section}
    print(f"\n{tomli_w.dumps(sections)}", end="")
