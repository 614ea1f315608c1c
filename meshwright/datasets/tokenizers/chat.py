"""Conversations to token ids, and which of them the assistant wrote."""

import itertools
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2

from meshwright.datasets.tokenizers.huggingface import WALL, HuggingFaceTokenizer, any_of
from meshwright.datasets.tokenizers.jinja_templates import (
    END,
    START,
    compile_template,
    has_generation_blocks,
    shipped_templates,
)
from meshwright.datasets.tokenizers.kinds import Tokenizer
from meshwright.datasets.tokenizers.special_tokens import PATH_KEY, TEMPLATE_KEY, well_formed
from meshwright.system.errors import FIX, ConfigError, RecordError, first_line

DATA_KEY = "training.dataset"

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the assistant's thoughts. transformers hands them on under the first two."""

MEANT = frozenset({*REASONING, "tool_calls", "function_call", "tools"})
"""Keys of a message, and `tools`, without which the assistant would learn a different answer."""


class _Input(NamedTuple):
    """The variables of a template."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    options: dict[str, Any]

    def until(self, count: int) -> "_Input":
        """Return the same with the first messages only."""
        return self._replace(messages=self.messages[:count])

    def without(self, keys: Collection[str]) -> "_Input":
        """Return the same without keys of its messages, and without `tools` if it is among them."""
        messages = [{k: m[k] for k in m if k not in keys} for m in self.messages]
        return _Input(messages, None if "tools" in keys else self.tools, self.options)


class _UnclearError(ValueError):
    """The text of a template doesn't show which part of it the assistant wrote."""


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


class ChatTemplate:
    """Makes token ids of conversations as transformers' `apply_chat_template` does, but safely.

    Only the template writes special tokens (BOS among them: add none). A special token's text
    inside a message stays text; where a kind of tokenizer can't do that, it is an error.

    Loss counts on the assistant's text: the template's {% generation %} blocks; if it
    has none, its text for an assistant's message after the generation prompt, up to and
    with the token that ends the turn; if that can't be told, the blocks of a shipped template that
    writes the same text. A message of weight 0 is left out. A token that only in part is the
    assistant's counts.

    Args:
        template: Jinja source, as `find_template` gives it.

    Raises:
        ConfigError: if the tokenizer can't be used for chat, or the template not compiled.
    """

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            what = "cannot parse the special tokens of a chat template"
            fix = "use a tokenizer.json, or give your own tokenizer an encode_conversation"
            kind = type(tokenizer).__name__
            raise ConfigError(PATH_KEY, f"{PATH_KEY}: a {kind} {what}\n  fix: {fix}")
        self._tokenizer, self._source = tokenizer, template
        self._template = compile_template(template)
        self._has_generation_blocks = has_generation_blocks(template)
        self._too_short = [token for token in tokenizer.special_ids if len(token) == 1]
        specials = any_of(tokenizer.special_ids)
        self._special = re.compile(specials)
        self._special_start = re.compile(f"(?=(?:{specials}))(.)", re.DOTALL)
        self._space_after_turn = re.compile(rf"(?:{specials})(\s+)\Z")
        self._written_roles = set[str]()
        self.unread = Counter[str]()
        """Messages that have a key, by its name, which the template doesn't read."""

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        where: str = "",
        *,
        tools: list[dict[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], list[bool]]:
        """Return the ids of the whole conversation, and for each whether loss counts on it.

        Args:
            messages: each with "role"; all their keys are handed to the template.
            where: file and row, for the message of an error.
            tools: JSON schemas of functions, for the template.
            options: further variables of the template.

        Raises:
            RecordError: if the assistant writes nothing in it, the template rejects it, drops a
                part of it, or doesn't show which text is the assistant's.
        """
        try:
            roles = [message["role"] for message in messages]
            if "assistant" not in roles:
                there = ", ".join(roles) or "none at all"
                raise ValueError(f"has no message whose role is 'assistant', but {there}")
            given = _Input(
                [self._wall_off(_as_template_reads(message)) for message in messages],
                self._wall_off(tools),
                self._wall_off(dict(options or {})),
            )
            if taken := given.options.keys() & {*_Input._fields, "add_generation_prompt"}:
                raise ValueError(f"has a template variable {min(taken)!r}, which is its own")
            self._check_nothing_lost(given)
            text, written = take_out(self._mark(given))
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
        """`value` with a wall inside of every special token in its strings, so that it can't be
        parsed."""
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
            return {self._wall_off(key): self._wall_off(item) for key, item in value.items()}
        return value

    def _render(
        self, given: _Input, *, prompt: bool = False, by: jinja2.Template | None = None
    ) -> str:
        """Return the text, with the marks for {% generation %} in it.

        Args:
            prompt: add the header of the next answer.
            by: a different template.
        """
        try:
            return (by or self._template).render(
                messages=given.messages,
                tools=given.tools,
                documents=None,
                add_generation_prompt=prompt,
                **self._tokenizer.special_names | given.options,
            )
        except Exception as error:  # a template is a program: TypeError and all are its errors
            raise ValueError(f"is rejected by the chat template: {first_line(error)}") from error

    def _check_nothing_lost(self, given: _Input) -> None:
        """Raise if the template drops what the assistant would have to learn; count other keys."""
        self._check_parts(given)
        self._check_roles(given)
        counts = Counter(k for m in given.messages for k, v in m.items() if v not in ("", [], {}))
        counts["tools"] = int(bool(given.tools))
        reads_thoughts = any(map(self._names, REASONING))
        meant = {key for key in +counts if key in MEANT and not self._names(key)}
        meant -= {*REASONING} if reads_thoughts else set()
        others = {*counts} - MEANT - {"role", "content", "weight"}
        whole = self._render(given) if meant or others else ""
        # a template may write whole messages, without the names of their keys
        if lost := [key for key in sorted(meant) if self._render(given.without({key})) == whole]:
            raise ValueError(
                f"has {lost[0]}, which the chat template does not write"
                f"{FIX}remove it from the data, or set {TEMPLATE_KEY} to a template that writes it"
            )
        # one look for all of them, since most templates read none
        if others and self._render(given.without(others)) != whole:
            others = {key for key in others if self._render(given.without({key})) == whole}
        self.unread.update({key: counts[key] for key in others})
        self.unread.update(key for key in given.options if not self._names(key))

    def _names(self, key: str) -> bool:
        """Return whether the source of the template has a name."""
        return re.search(rf"\b{re.escape(key)}\b", self._source) is not None

    def _check_roles(self, given: _Input) -> None:
        """Some templates pass over messages of a role that they don't know."""
        for role in {message["role"] for message in given.messages} - self._written_roles:
            others = [message for message in given.messages if message["role"] != role]
            try:
                is_written = self._render(given._replace(messages=others)) != self._render(given)
            except ValueError:  # it needs them, or rejects all of it, as is said later
                is_written = True
            if not is_written:
                raise ValueError(
                    f"has messages of the role {role!r}, which the chat template does not write"
                    f"{FIX}remove them from the data, or set {TEMPLATE_KEY} to a template for them"
                )
            self._written_roles.add(role)

    def _check_parts(self, given: _Input) -> None:
        """Some templates take content in parts for none, or write it as Python does."""
        texts = {
            k: _text_of(m)
            for k, m in enumerate(given.messages)
            if isinstance(m.get("content"), list)
        }
        if not texts:
            return
        plain, parted = [*given.messages], [*given.messages]
        for number, text in texts.items():
            plain[number] = plain[number] | {"content": text}
            parted[number] = parted[number] | {"content": [{"type": "text", "text": text}]}
        try:
            expected = self._render(given._replace(messages=plain))
        except ValueError:  # it is a template of parts only
            return
        if self._render(given._replace(messages=parted)) != expected:
            raise ValueError(
                f"has content in parts, which the chat template does not read"
                f"{FIX}write each content as one text, or set {TEMPLATE_KEY} to a template of parts"
            )

    def _mark(self, given: _Input) -> str:
        """Return the text, with marks around what the assistant wrote and is to learn."""
        if self._has_generation_blocks:
            return _without_weightless(self._render(given), given.messages)
        try:
            return self._mark_by_prefixes(given)
        except _UnclearError:
            whole = self._render(given)
            for template in shipped_templates():
                try:
                    marked = self._render(given, by=template)
                except ValueError:
                    continue
                if take_out(marked)[0] == whole:
                    return _without_weightless(marked, given.messages)
            raise

    def _mark_by_prefixes(self, given: _Input) -> str:
        """Return the text, with marks around the part that each message of the assistant adds."""
        whole = self._render(given)
        parts, done = [], 0
        for k, message in enumerate(given.messages):
            if message["role"] != "assistant":
                continue
            before = self._render(given.until(k), prompt=True)
            ignores_prompt = self._render(given.until(k)) == before
            last = k + 1 == len(given.messages)
            after = whole if last else self._render(given.until(k + 1))
            if ignores_prompt:
                after = self._without_next_header(given, k, before, after)
            if not (len(before) >= done and after.startswith(before) and whole.startswith(after)):
                raise _UnclearError(
                    f"shows that the chat template writes what is before message {k + 1} otherwise "
                    "when that does not follow, so the assistant's words cannot be told"
                    f"{FIX}give {TEMPLATE_KEY} a template with {{% generation %}} blocks"
                )
            written = after[len(before) :]
            if ignores_prompt:
                self._check_header(given.until(k + 1), written)
            space = self._space_after_turn.search(written)
            stop = len(after) - (len(space[1]) if space else 0)
            marks = (START, END) if message.get("weight") != 0 else ("", "")
            parts += [whole[done : len(before)], marks[0], whole[len(before) : stop], marks[1]]
            done = stop
        return "".join([*parts, whole[done:]])

    def _without_next_header(self, given: _Input, k: int, before: str, after: str) -> str:
        """Return the text up to the end of message k, of a template that ignores
        `add_generation_prompt`: it may write the header of the next answer after each message.

        Args:
            before: the text of the messages before it.
            after: the text with it.
        """
        more = given.until(k + 2)
        if k + 1 == len(given.messages):
            more = given._replace(messages=[*given.messages, {"role": "user", "content": "?"}])
        try:
            pairs = zip(after, self._render(more), strict=False)
        except ValueError:
            return after
        size = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        header = after[size:]
        if not header or not before.endswith(header):
            return after
        # headers of roles may start alike: the turn ends with the first special token behind it
        text = _text_of(given.messages[k]).strip()
        at = after.find(text, len(before), size) if text else -1
        if at < 0:
            raise _UnclearError(
                "shows that the chat template always ends with the header of an answer, so the end "
                f"of message {k + 1} cannot be told"
                f"{FIX}give {TEMPLATE_KEY} a template with {{% generation %}} blocks"
            )
        tokens = list(self._special.finditer(after, at + len(text)))
        return after[: min([size, *(token.end() for token in tokens)])]

    def _check_header(self, given: _Input, written: str) -> None:
        """A template that ignores `add_generation_prompt` may write its header among the answer."""
        *before_it, message = given.messages
        if not (text := _text_of(message).strip()):  # a call: any other answer has the same header
            text = "?"
            probe = given._replace(messages=[*before_it, {"role": "assistant", "content": text}])
            written = self._render(probe)[len(self._render(given.until(len(before_it)))) :]
        header = written[: max(written.find(text), 0)]
        if header.strip():
            raise _UnclearError(
                f"shows that the chat template ignores add_generation_prompt, so its {header!r} "
                "would count as the assistant's"
                f"{FIX}give {TEMPLATE_KEY} a template that heeds it or has "
                "{% generation %} blocks"
            )


def _as_template_reads(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as `apply_chat_template` hands it on: keys without a value are absent, and
    thoughts have every name."""
    there = {key: value for key, value in message.items() if value is not None}
    named = {name: there[name] for name in REASONING if there.get(name)}
    if not named:
        return there
    first, *others = named.values()
    if any(other != first for other in others):
        raise ValueError(f"has a message with different {' and '.join(named)}")
    return there | {"thinking": first, "reasoning_content": first}


def _text_of(message: Mapping[str, Any]) -> str:
    """Return the content of a message as one text."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _without_weightless(marked: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a text without the marks of messages whose weight is 0."""
    weights = [message.get("weight") for message in messages if message["role"] == "assistant"]
    if 0 not in weights:
        return marked
    parts, depth, block = list[str](), 0, -1
    for part in re.split(f"([{START}{END}])", marked):
        depth -= part == END
        block += part == START and depth == 0
        if part not in (START, END) or (block < len(weights) and weights[block] != 0):
            parts.append(part)
        depth += part == START
    if block + 1 != len(weights):
        raise ValueError(
            f"has a message of weight 0, but {block + 1} {{% generation %}} blocks for "
            f"{len(weights)} messages of the assistant, so it cannot be told which is left out"
        )
    return "".join(parts)
