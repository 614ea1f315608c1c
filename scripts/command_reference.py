"""Print docs/commands.md, every command and its options.

python -m scripts.command_reference > docs/commands.md
"""

import argparse
from collections.abc import Iterator
from textwrap import fill

from meshwright.commands.main import GROUPS, Command, Parser, build_parser, example

HEAD = """# Command line

Every command with its options and an example. Made from the code by
`python -m scripts.command_reference`. The command `meshwright` is in the environment that
`./run_llama_train.sh` sets up:

```bash
source .venv/bin/activate
meshwright check debug_model --training.steps 30
```

`CONFIG` is the path of a TOML or the name of a preset (`meshwright config --presets` lists them).
If you leave it out, `train` and `check` use `$CONFIG_FILE` or `debug_model`, and `config` shows the
defaults. The other commands need it. Commands with a `CONFIG` also take `--section.key VALUE` for
[any key](config_reference.md). If a value starts with `-`, write an equals sign:
`--optimizer.lr=-1e5`. A mistake in a config or a command line ends with exit code 2 and one
message. `train` has [more exit codes](exit_codes.md#exit-codes)."""


def page() -> Iterator[str]:
    """Lines of Markdown."""
    yield HEAD
    for title, group in GROUPS.items():
        yield f"\n## {title}"
        for name, command in group.items():
            yield from section(name, command)


def section(name: str, command: Command) -> Iterator[str]:
    """Lines of one command: its purpose, usage, example and options."""
    parser = build_parser(name)
    yield f"\n### {name}\n"
    yield f"{command.purpose[0].upper()}{command.purpose[1:]}.\n"
    words = [f"meshwright {name}", *map(usage, options(parser))]
    whole = " ".join(word.replace(" ", "\xa0") for word in words)  # broken between options
    lines = fill(whole, 74, subsequent_indent="    ", break_on_hyphens=False)
    yield "```text\n" + lines.replace("\xa0", " ") + "\n```\n"
    yield f"Example: `{example(name)}`."
    yield ""
    for action in options(parser):
        if action.metavar != "CONFIG":  # explained at the top
            yield f"* `{form(action)}`: {action.help}"


def options(parser: Parser) -> list[argparse.Action]:
    """Options and arguments but argparse's own --help, arguments last."""
    actions = [a for a in parser._actions if a.help and not isinstance(a, argparse._HelpAction)]
    return sorted(actions, key=lambda action: not action.option_strings)


def form(action: argparse.Action) -> str:
    """An option with its value, or an argument, the same in every version of Python."""
    value = action.metavar or "|".join(action.choices or ()) or action.dest.upper()
    value = value if isinstance(value, str) else " ".join(value)
    return " ".join([*action.option_strings[-1:], *([] if action.nargs == 0 else [value])])


def usage(action: argparse.Action) -> str:
    """The form, in brackets if you may leave it out."""
    is_needed = action.required if action.option_strings else action.nargs != "?"
    if not is_needed:
        return f"[{form(action)}]"
    return f"{form(action)} ..." if action.nargs == "+" else form(action)


if __name__ == "__main__":
    print("\n".join(page()))
