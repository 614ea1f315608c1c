"""Chat templates: a Jinja environment as transformers has it, and the shipped ones."""

import json
import re
from collections.abc import Callable
from datetime import datetime
from functools import cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshwright.config.section import CHAT_TEMPLATES
from meshwright.datasets.tokenizers.special_tokens import TEMPLATE_KEY, shipped_template
from meshwright.system.errors import ConfigError

START, END = "\ufdd0", "\ufdd1"
"""Marks put into a text when it is rendered, before and after the words of the assistant:
noncharacters."""

TODAY = datetime(2024, 7, 26)
"""For templates that write the date, so that a conversation is the same tokens tomorrow. It is the
date that Meta's templates fall back to."""

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def has_generation_blocks(source: str) -> bool:
    """Return whether a template says by itself which part of its text the assistant writes."""
    return _GENERATION.search(source) is not None


@cache
def shipped_templates() -> list[jinja2.Template]:
    """Return the templates that are shipped. Each has {% generation %} blocks."""
    return [compile_template(shipped_template(name).read_text("utf-8")) for name in CHAT_TEMPLATES]


def compile_template(source: str) -> jinja2.Template:
    """Compile a template, in a sandbox with the functions that transformers offers to them.

    The text of {% generation %} blocks gets `START` and `END` around it. `strftime_now` formats
    `TODAY`.

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
    environment.globals["strftime_now"] = TODAY.strftime
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

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{START}{caller()}{END}"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Not Jinja's own, which escapes <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)
