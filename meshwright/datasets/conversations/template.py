"""The Jinja template that makes one text of a conversation: finding, compiling and rendering it."""

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshwright.config.job_config import BYTES
from meshwright.datasets.tokenizers.kinds import PATH_KEY, find_file
from meshwright.datasets.tokenizers.special_tokens import read_json_object
from meshwright.errors import ConfigError, check, config_error

TEMPLATE_KEY = "model.chat_template_path"
FILE_NAME = "chat_template.jinja"
CONFIG_NAME = "tokenizer_config.json"
FIX = f"fix: name a Jinja template in {TEMPLATE_KEY}"


def find_template(tokenizer_path: str, template_path: str = "") -> str:
    """Return the template in the file `template_path`, else the one beside the tokenizer.

    Beside it, chat_template.jinja goes before the "chat_template" of tokenizer_config.json, of
    which, if it names several, the "default" is meant.

    Raises:
        ConfigError: if there is none.
    """
    if template_path:
        return _read_template(Path(template_path))
    if tokenizer_path == BYTES:
        raise ConfigError(TEMPLATE_KEY, f"{PATH_KEY} = {BYTES!r}: has no chat template\n  {FIX}")
    tokenizer_file = find_file(tokenizer_path)
    beside = tokenizer_file.with_name(FILE_NAME)
    if beside.is_file():
        return _read_template(beside)
    try:
        found = read_json_object(tokenizer_file.with_name(CONFIG_NAME)).get("chat_template")
    except ValueError as error:
        raise config_error(PATH_KEY, tokenizer_path, str(error)) from error
    if isinstance(found, list):
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default")
        if not isinstance(found, str):
            names = ", ".join(map(str, named))
            raise ConfigError(
                TEMPLATE_KEY,
                f"{PATH_KEY} = {tokenizer_path!r}: {CONFIG_NAME} has the chat templates {names}, "
                f"and none of them is the default\n  {FIX}",
            )
    if not isinstance(found, str) or not found.strip():
        raise ConfigError(
            TEMPLATE_KEY,
            f"{PATH_KEY} = {tokenizer_path!r}: no chat template beside it, neither {FILE_NAME} nor "
            f'"chat_template" in {CONFIG_NAME}\n  {FIX}',
        )
    return found


def _read_template(file: Path) -> str:
    try:
        template = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = str(error.strerror) if isinstance(error, OSError) else "is no UTF-8 text"
        raise config_error(TEMPLATE_KEY, str(file), reason) from error
    check(bool(template.strip()), TEMPLATE_KEY, str(file), "is empty")
    return template


def compile_template(source: str, now: datetime) -> jinja2.Template:
    """Compile a template, in a sandbox with the functions that transformers offers to them.

    `render` takes, besides the usual, `generation_marks`: two strings that are put around the text
    that the template writes between {% generation %} and {% endgeneration %}.

    Args:
        now: the time that `strftime_now` formats.

    Raises:
        ConfigError: if it is no Jinja template.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = now.strftime
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            TEMPLATE_KEY,
            f"{TEMPLATE_KEY}: the chat template is no Jinja template: line {error.lineno}: {error}",
        ) from error


class _GenerationBlocks(Extension):
    """{% generation %} ... {% endgeneration %} around the model's text."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as a plain set)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    @jinja2.pass_context
    def _mark(self, context: Context, caller: Callable[[], str]) -> str:
        start, end = context["generation_marks"]
        return f"{start}{caller()}{end}"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Not Jinja's own, which escapes <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)
