"""Conversations to token ids, and which of them the assistant wrote."""

import json
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshwright.datasets.tokenizers.huggingface import WALL, HuggingFaceTokenizer, any_of
from meshwright.datasets.tokenizers.kinds import Tokenizer
from meshwright.datasets.tokenizers.special_tokens import PATH_KEY, TEMPLATE_KEY, well_formed
from meshwright.system.errors import ConfigError, RecordError, first_line

START, END = "\ufdd0", "\ufdd1"
"""Marks put into a text before it is rendered, before and after the words of the assistant: other
noncharacters than `WALL`."""


def take_out(marked: str) -> tuple[str, bytes]:
    """Return the text without `START` and `END`, and 1 for each of its characters between them."""
    parts, written, depth = list[str](), bytearray(), 0
    for part in re.split(f"([{START}{END}])", marked):
        if part in (START, END):
            depth += 1 if part == START else -1
        else:
            parts.append(part)
            written += bytes([depth > 0]) * len(part)
    return "".join(parts), bytes(written)


DATA_KEY = "training.dataset"

TODAY = datetime(2024, 7, 26)
"""For templates that write the date, so that a conversation is the same tokens tomorrow. It is the
date that Meta's templates fall back to."""

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class ChatTemplate:
    """Makes token ids of conversations as transformers' `apply_chat_template` does, but safely.

    The template alone writes special tokens (BOS among them: add none). A special token's text
    inside a message stays text; where a kind of tokenizer cannot do that, it is an error.

    Loss counts on the assistant's text: the template's {% generation %} blocks; if it
    has none, its text for an assistant's message after the generation prompt, up to and
    with the token that ends the turn. A token that only in part is the assistant's counts.

    Args:
        template: Jinja source, as `find_template` gives it.

    Raises:
        ConfigError: if the tokenizer cannot be used for chat, or the template not compiled.
    """

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            what = "cannot parse the special tokens of a chat template"
            fix = "use a tokenizer.json"
            kind = type(tokenizer).__name__
            raise ConfigError(PATH_KEY, f"{PATH_KEY}: a {kind} {what}\n  fix: {fix}")
        self._tokenizer = tokenizer
        self._template = compile_template(template)
        self._has_generation_blocks = _GENERATION.search(template) is not None
        self._too_short = [token for token in tokenizer.special_ids if len(token) == 1]
        specials = any_of(tokenizer.special_ids)
        self._special_start = re.compile(f"(?=(?:{specials}))(.)", re.DOTALL)
        self._space_after_turn = re.compile(rf"(?:{specials})(\s+)\Z")

    def encode(
        self, messages: list[dict[str, str]], where: str = ""
    ) -> tuple[list[int], list[bool]]:
        """Return the ids of the whole conversation, and for each whether loss counts on it.

        Args:
            messages: each with "role" and "content"; other keys are handed to the template.
            where: file and row, for the message of an error.

        Raises:
            RecordError: if the assistant writes nothing in it, the template refuses it, or the
                assistant's text cannot be told from the rest.
        """
        try:
            roles = [message["role"] for message in messages]
            if "assistant" not in roles:
                there = ", ".join(roles) or "none at all"
                raise ValueError(f"has no message whose role is 'assistant', but {there}")
            safe = [self._wall_off(message) for message in messages]
            render = self._render if self._has_generation_blocks else self._mark_by_prefixes
            text, written = take_out(render(safe))
            ids, spans = self._tokenizer.encode_chat(text)
            # a token that stands for nothing is of what follows
            counts = [1 in written[start : max(end, start + 1)] for start, end in spans]
            if not any(counts):
                raise ValueError("has no token that the assistant wrote, so no loss")
            return ids, counts
        except ValueError as error:
            at = f"{where}: " if where else ""
            raise RecordError(DATA_KEY, f"{DATA_KEY}: {at}the conversation {error}") from error

    def _wall_off(self, value: Any) -> Any:
        """`value` with a wall inside of every special token in its strings, so that it cannot be
        parsed; without the keys that it has no value for: a table's column holds None where a row
        lacks a key, and templates ask whether the key is there."""
        if isinstance(value, str):
            value = well_formed(value)
            if any(mark in value for mark in (START, END, WALL)):
                raise ValueError("holds one of the noncharacters U+FDD0 to U+FDD2")
            if any(token in value for token in self._too_short):
                raise ValueError("holds a special token of one character, which no wall can split")
            return self._special_start.sub(rf"\1{WALL}", value)
        if isinstance(value, list):
            return [self._wall_off(item) for item in value]
        if isinstance(value, dict):
            there = {key: item for key, item in value.items() if item is not None}
            return {key: self._wall_off(item) for key, item in there.items()}
        return value

    def _render(self, messages: list[Any], prompt: bool = False) -> str:
        """Return the text, with the marks for {% generation %} in it."""
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=prompt,
                **self._tokenizer.special_names,
            )
        except Exception as error:  # a template is a program: TypeError and all are its errors
            raise ValueError(f"is refused by the chat template: {first_line(error)}") from error

    def _mark_by_prefixes(self, messages: list[Any]) -> str:
        """Return the text, with marks around the part that each message of the assistant adds."""
        whole = self._render(messages)
        parts, done = [], 0
        for k, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:k], prompt=True)
            last = k + 1 == len(messages)
            after = whole if last else self._render(messages[: k + 1])
            if not (len(before) >= done and after.startswith(before) and whole.startswith(after)):
                raise ValueError(
                    f"shows that the chat template writes what is before message {k + 1} otherwise "
                    "when that does not follow, so the assistant's words cannot be told"
                    f"\n  fix: give {TEMPLATE_KEY} a template with {{% generation %}} blocks"
                )
            written = after[len(before) :]
            self._check_header(messages[:k], message["content"], written, before)
            space = self._space_after_turn.search(written)
            stop = len(after) - (len(space[1]) if space else 0)
            parts += [whole[done : len(before)], START, whole[len(before) : stop], END]
            done = stop
        return "".join([*parts, whole[done:]])

    def _check_header(self, before_it: list[Any], content: str, written: str, before: str) -> None:
        """A template that ignores `add_generation_prompt` writes its header among the answer."""
        header = written[: max(written.find(content.strip()), 0)]
        if header.strip() and self._render(before_it) == before:
            raise ValueError(
                f"shows that the chat template ignores add_generation_prompt, so its {header!r} "
                "would count as the assistant's"
                f"\n  fix: give {TEMPLATE_KEY} a template that heeds it or has "
                "{% generation %} blocks"
            )


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
