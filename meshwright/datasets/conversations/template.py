"""The Jinja template that makes one text of a conversation: compiling and rendering it."""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshwright.datasets.conversations.template_file import TEMPLATE_KEY
from meshwright.system.errors import ConfigError


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
