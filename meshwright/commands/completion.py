"""`meshwright completion`: a script by which bash or zsh completes commands, options and keys."""

from argparse import Namespace
from typing import get_args, get_origin

from meshwright.commands import main
from meshwright.config.command_line import Parser
from meshwright.config.fields import all_keys, is_flag
from meshwright.config.loader import preset_names

SCRIPT = """\
# meshwright completion for {shell}: source it, or put it where your shell looks for completions.
{before}
_meshwright() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} last=${{COMP_WORDS[COMP_CWORD-1]}} name words=
    name=${{COMP_WORDS[1]}}
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{first}" -- "$word"))
        return
    fi
    case $last in
{values}
    esac
    if [ -n "$words" ]; then
        COMPREPLY=($(compgen -W "$words" -- "$word"))
        return
    fi
    case "$name ${{COMP_WORDS[2]:-}}" in
{options}
    esac
    case $word in
        -*) COMPREPLY=($(compgen -W "$words" -- "$word")) ;;
        *) COMPREPLY=($(compgen -f -- "$word") $(compgen -W "$words" -- "$word")) ;;
    esac
}}
complete -o filenames -F _meshwright meshwright
"""


def add_options(parser: Parser) -> None:
    """Options of `meshwright completion`."""
    parser.add_argument("shell", choices=("bash", "zsh"))


def run(given: Namespace) -> None:
    """Print the script."""
    keys = [".".join(key) for key, _ in all_keys()]
    every_key = " ".join(f"--{key}" for key in keys if key != "job.config_file")
    options, seconds = [], dict[str, list[str]]()
    for name, command in main.COMMANDS.items():
        first, _, second = name.partition(" ")
        words = _words_of(name)
        if command.takes_config:
            words += [every_key, *preset_names()]
        if second:
            seconds.setdefault(first, []).append(second)
        options.append((f'"{name}"*' if second else f'"{name} "*', words))
    # of two words before those of one
    options.sort(key=lambda option: -option[0].rstrip('"*').count(" "))
    lines = []
    for pattern, words in options:
        first = pattern.strip('"*').split()[0]
        more = seconds.get(first, []) if pattern.endswith(' "*') else []
        lines.append(f'        {pattern}) words="{" ".join([*words, *more])}" ;;')
    for first, more in seconds.items():
        if first not in main.COMMANDS:
            lines.append(f'        "{first} "*) words="{" ".join(more)}" ;;')
    names = dict.fromkeys(name.split()[0] for name in main.COMMANDS)
    before = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit"
    print(
        SCRIPT.format(
            shell=given.shell,
            before=before if given.shell == "zsh" else "",
            first=" ".join([*names, "--help", "--version"]),
            values="\n".join(_values()),
            options="\n".join(lines),
        ),
        end="",
    )


def _words_of(name: str) -> list[str]:
    """Options and choices of a command."""
    words: list[str] = []
    # argparse has no public list of a parser's actions; it keeps them there since Python 2.7
    for action in main.build_parser(name)._actions:
        words += action.option_strings
        words += map(str, action.choices or ())
    return words


def _values() -> list[str]:
    """By key: the values that it may have."""
    lines = []
    for key, field in all_keys():
        choices = ["true", "false"] if is_flag(field) else []
        is_list = get_origin(field.annotation) is list
        for part in (field.annotation, *get_args(field.annotation)) if not is_list else ():
            choices += [choice for choice in get_args(part) if isinstance(choice, str)]
        if choices:
            lines.append(f'        --{".".join(key)}) words="{" ".join(choices)}" ;;')
    return lines
