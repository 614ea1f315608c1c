"""The chat templates that are shipped write what the published ones do; and what the loss counts
where a template does not show it by itself."""

import hashlib
import itertools
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from meshwright.config.loader import load_config
from meshwright.config.section import CHAT_TEMPLATES
from meshwright.datasets.tokenizers import chat as chat_module
from meshwright.datasets.tokenizers.chat import ChatTemplate, take_out
from meshwright.datasets.tokenizers.jinja_templates import compile_template
from meshwright.datasets.tokenizers.kinds import build_tokenizer, find_template
from meshwright.system.errors import ConfigError, RecordError
from tests.helpers.tokenizer_files import byte_level_json

SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"]
SPECIALS += ["<|eot_id|>", "[INST]", "[/INST]"]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None = None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant"} | ({} if content is None else {"content": content}) | more


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


SYSTEM = {"role": "system", "content": " be\n brief "}
PLAIN = [
    [user("hi"), assistant("ho")],
    [SYSTEM, user(" hi\n"), assistant("\n ho ")],
    [SYSTEM, user("a"), assistant("b"), user("c"), assistant("d <é> &'\"")],
    [user("a"), assistant("b"), user("c")],
]
WITH_TOOLS = [
    *([user("sum?"), assistant(**extra, tool_calls=[call("add", x="ü", y=1)]),
       {"role": "tool", "content": "<3>"}, assistant("3")] for extra in ({}, {"content": ""})),
    [SYSTEM, user("sum?"), assistant(tool_calls=[call("add")]), {"role": "tool", "content": "3"},
     assistant("3"), user("and?"), assistant("no")],
    [user("a"), assistant("b", reasoning_content="\nr1\n"), user("c"),
     assistant("d", reasoning_content="r2")],
]  # fmt: skip
WITH_CALLS = [
    [user("a"), assistant("<think>\nr1\n</think>\n\nb"), user("c"), assistant("<think>2</think>d")],
    [user("sum?"), assistant("so", tool_calls=[call("add", x=1), call("add", x=2)]),
     {"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}, assistant("7")],
    [user("sum?"), assistant("so", reasoning_content="r1", tool_calls=[call("add", x=1)]),
     user("<tool_response>\n1\n</tool_response>"), assistant("1", reasoning_content="r2")],
]  # fmt: skip
TOOL = {"type": "function", "function": {"name": "add", "description": "a <b>", "parameters": {}}}

TRL = "huggingface/trl@f2cd5771:trl/chat_templates"
PUBLISHED = {
    # name: which conversations, source of the published template, hash of what it writes of them
    "llama2": (
        [*PLAIN],
        "meta-llama/Llama-2-13b-chat-hf, tokenizer_config.json",
        "472896dbe690d8fb",
    ),
    "llama3": ([*PLAIN], f"{TRL}/llama3.jinja", "c03dd5db8be37264"),
    "llama3.1": (
        [*PLAIN, *WITH_TOOLS],
        f"{TRL}/llama3_1.jinja and llama3_2.jinja",
        "e575d09a86439a93",
    ),
    "mixtral": (
        PLAIN[:1] + PLAIN[3:],
        "ggml-org/llama.cpp:tests/test-chat-template.cpp",
        "d254653b62a41131",
    ),
    "olmo2": ([*PLAIN], "allenai/OLMo-2-1124-7B-SFT, tokenizer_config.json", "6d26701d8f421e44"),
    "qwen2.5": ([*PLAIN, *WITH_TOOLS, *WITH_CALLS], f"{TRL}/qwen2_5.jinja", "6692f437e339a1ed"),
    "qwen3": ([*PLAIN, *WITH_TOOLS, *WITH_CALLS], f"{TRL}/qwen3.jinja", "f291abba7a5bec20"),
}


def digest(source: str, conversations: list[Any]) -> str:
    """Hash of what a template writes of conversations, with and without tools and the header of the
    next answer."""
    template, found = compile_template(source), hashlib.sha256()
    for messages in conversations:
        for tools in (None, [TOOL, TOOL]):
            for prompt in (False, True):
                text = template.render(
                    messages=messages,
                    tools=tools,
                    documents=None,
                    add_generation_prompt=prompt,
                    bos_token="<s>",
                    eos_token="</s>",
                )
                found.update(take_out(text)[0].encode() + b"\0")
    return found.hexdigest()[:16]


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_a_shipped_template_writes_what_the_published_one_does(name: str) -> None:
    conversations, source, expected = PUBLISHED[name]
    assert digest(find_template("", name), conversations) == expected, source


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("templates")
    byte_level_json(folder / "tokenizer.json", SPECIALS)
    return folder


def learned(chat: ChatTemplate, folder: Path, messages: Any, **more: Any) -> list[str]:
    """The text of each run of tokens on which loss counts."""
    tokenizer = build_tokenizer(str(folder))
    ids, counts = chat.encode(messages, "a.jsonl:7", **more)
    runs = itertools.groupby(zip(ids, counts, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([i for i, _ in run]) for does_count, run in runs if does_count]


NUM_SHOWN = {"mixtral": 2, "llama3.1": 7, "qwen2.5": 9, "qwen3": 3}
"""Conversations of which prefixes show what the assistant wrote."""


def without_blocks(source: str) -> str:
    return source.replace(" generation %}", " if true %}").replace("endgeneration", "endif")


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_blocks_mark_what_the_assistant_adds_to_the_prompt(name, folder, monkeypatch) -> None:
    """A shipped template without its blocks shows the same by prefixes, where it shows it."""
    monkeypatch.setattr(chat_module, "shipped_templates", list)
    source = find_template("", name)
    tokenizer, count = build_tokenizer(str(folder)), 0
    marked, bare = (ChatTemplate(tokenizer, s) for s in (source, without_blocks(source)))
    for messages in PUBLISHED[name][0]:
        with suppress(RecordError):
            expected = bare.encode(messages)
            assert marked.encode(messages) == expected
            count += 1
    assert count == NUM_SHOWN.get(name, 4)


def test_a_template_of_a_family_needs_no_blocks_if_a_shipped_one_writes_the_same(folder) -> None:
    """As Qwen 3's own: it drops thoughts before the last question, so prefixes show nothing."""
    own = ChatTemplate(build_tokenizer(str(folder)), without_blocks(find_template("", "qwen3")))
    messages = [user("a"), assistant("b", reasoning_content="r"), user("c"), assistant("d")]
    assert learned(own, folder, messages) == ["b<|im_end|>", "<think>\n\n</think>\n\nd<|im_end|>"]
    messages[1]["weight"] = 0
    assert learned(own, folder, messages) == ["<think>\n\n</think>\n\nd<|im_end|>"]
    other = ChatTemplate(build_tokenizer(str(folder)), own._source + "!")
    with pytest.raises(RecordError, match="a.jsonl:7: the conversation shows .* otherwise"):
        learned(other, folder, messages)


def test_the_name_of_a_shipped_template_is_no_path(tmp_path: Path) -> None:
    toml = tmp_path / "a.toml"
    for value, expected in (
        ("qwen3", "qwen3"),
        ("chat.jinja", f"{tmp_path}/chat.jinja"),
        ("./qwen3", f"{tmp_path}/qwen3"),
    ):
        toml.write_text(f'[model]\nchat_template_path = "{value}"\n')
        assert load_config([f"--job.config_file={toml}"]).model.chat_template_path == expected
    with pytest.raises(ConfigError, match="or one of llama2, llama3, llama3.1, mixtral, olmo2, "):
        find_template("bytes")


CHATML = """\
{% for message in messages %}
{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}
{{- (message.content or '') + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"""
BLOCKS = """\
{% for message in messages %}
{{ message.role + ': ' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
{%- else %}{{ message.content }}{% endif %}
{{- '\n' }}
{%- endfor %}"""
TALK = [user("a"), assistant("bad"), user("c"), assistant("good")]


@pytest.mark.parametrize("template", [CHATML, BLOCKS])
@pytest.mark.parametrize("zeros", [(), (1,), (3,), (1, 3)])
def test_a_message_of_weight_0_is_not_learned(folder: Path, template: str, zeros: Any) -> None:
    """As OpenAI and axolotl have it; the tokens are the same."""
    chat = ChatTemplate(build_tokenizer(str(folder)), template)
    weighted = [m | {"weight": int(n not in zeros)} if n % 2 else m for n, m in enumerate(TALK)]
    if len(zeros) == 2:
        with pytest.raises(RecordError, match="has no token that the assistant wrote"):
            chat.encode(weighted)
        return
    end = "<|im_end|>" if template is CHATML else ""
    left = [m["content"] + end for n, m in enumerate(TALK) if n % 2 and n not in zeros]
    assert learned(chat, folder, weighted) == left
    assert chat.encode(weighted)[0] == chat.encode(TALK)[0]
    assert not chat.unread


def test_blocks_that_are_not_one_a_message_tell_no_weights(folder: Path) -> None:
    twice = BLOCKS.replace(
        "{% endgeneration %}", "{% endgeneration %}{% generation %}{% endgeneration %}"
    )
    chat = ChatTemplate(build_tokenizer(str(folder)), twice)
    assert learned(chat, folder, TALK) == ["bad", "good"]
    with pytest.raises(RecordError, match="4 {% generation %} blocks for 2 messages"):
        chat.encode([TALK[0], TALK[1] | {"weight": 0}, *TALK[2:]])


DUMPS = "{% for message in messages %}{{ message | tojson }}{% endfor %}{{ tools | tojson }}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tool_calls", [call("f")]),
        ("function_call", {"name": "f"}),
        *((name, "thought") for name in ("reasoning_content", "thinking", "reasoning")),
    ],
)
def test_what_the_template_drops_is_a_bad_record(folder: Path, key: str, value: Any) -> None:
    """Or the model would learn to answer a question for a tool with nothing."""
    plain = CHATML.replace("tool_calls", "nothing")
    messages = [user("a"), assistant("", **{key: value})]
    expected = rf"has {key if key != 'thinking' else '.*'}, which the chat template does not write"
    if key == "reasoning":
        expected = "has reasoning, which the chat template does not write"
    with pytest.raises(RecordError, match=expected) as caught:
        ChatTemplate(build_tokenizer(str(folder)), plain).encode(messages, "a.jsonl:7")
    assert "fix: remove it from the data, or set model.chat_template_path to" in str(caught.value)
    # of a whole message, every key is written, though the template names none
    dumps = ChatTemplate(
        build_tokenizer(str(folder)), BLOCKS.replace("message.content", "message | tojson")
    )
    assert json.dumps(value) in learned(dumps, folder, messages)[0]
    empty = [user("a"), assistant("b", **{key: type(value)()})]
    assert ChatTemplate(build_tokenizer(str(folder)), plain).encode(empty)


def test_of_two_different_thoughts_none_is_dropped(folder: Path) -> None:
    chat = ChatTemplate(build_tokenizer(str(folder)), "{{ messages[0].thinking }}" + BLOCKS)
    with pytest.raises(RecordError, match="different reasoning_content and thinking"):
        chat.encode([assistant("a", thinking="b", reasoning_content="c")])
    for others in ({"reasoning_content": "b"}, {"reasoning_content": ""}, {"reasoning": "b"}):
        ids, _ = chat.encode([assistant("a", thinking="b", **others)])
        assert build_tokenizer(str(folder)).decode(ids).startswith("b")


def test_tools_that_the_template_drops_are_a_bad_record(folder: Path) -> None:
    chat = ChatTemplate(build_tokenizer(str(folder)), CHATML)
    with pytest.raises(RecordError, match="has tools, which the chat template does not write"):
        chat.encode(TALK, tools=[TOOL])
    assert chat.encode(TALK, tools=[])


def test_messages_of_a_role_that_the_template_drops_are_a_bad_record(folder: Path) -> None:
    only = (
        "{% if message.role in ('user', 'assistant') %}"
        + BLOCKS.split("%}", 1)[1].rsplit("{%- endfor", 1)[0]
    )
    source = "{% for message in messages %}" + only + "{% endif %}{% endfor %}"
    chat = ChatTemplate(build_tokenizer(str(folder)), source)
    assert learned(chat, folder, TALK) == ["bad", "good"]
    with pytest.raises(
        RecordError, match="has messages of the role 'tool', which the chat template"
    ):
        chat.encode([*TALK, {"role": "tool", "content": "3"}])


def test_other_keys_that_the_template_does_not_read_are_counted(folder: Path) -> None:
    chat = ChatTemplate(build_tokenizer(str(folder)), CHATML)
    messages = [user("a") | {"name": "x"}, assistant("b", id=1), assistant("c", id=2, refusal=None)]
    for _ in range(2):
        chat.encode(messages, options={"enable_thinking": False})
    assert chat.unread == {"name": 2, "id": 4, "enable_thinking": 2}


def test_variables_of_a_row_reach_the_template(folder: Path) -> None:
    chat = ChatTemplate(build_tokenizer(str(folder)), "{{ date }}" + BLOCKS)
    ids, _ = chat.encode(TALK, options={"date": "<|im_end|> today "})
    text = build_tokenizer(str(folder)).decode(ids)
    assert text.startswith("<|im_end|> today ")
    assert build_tokenizer(str(folder)).special_ids["<|im_end|>"] not in ids
    with pytest.raises(RecordError, match="has a template variable 'messages', which is its own"):
        chat.encode(TALK, options={"messages": []})


def test_a_special_token_in_the_name_of_a_parameter_is_text(folder: Path) -> None:
    chat = ChatTemplate(build_tokenizer(str(folder)), "{{ tools | tojson }}" + BLOCKS)
    ids, _ = chat.encode(TALK, tools=[{"<|im_end|>": {"<s>": "</s>"}}])
    assert not {*ids} & {*build_tokenizer(str(folder)).special_ids.values()}


PARTS = CHATML.replace(
    "{{- (message.content or '')",
    "{%- set text = message.content if message.content is string else "
    "message.content | map(attribute='text') | join('|') %}{{- text",
)


def test_content_in_parts(folder: Path) -> None:
    """Goes to the template as it is, if that reads parts."""
    parts = [{"type": "text", "text": text} for text in ("b", "c")]
    messages = [user("a"), {"role": "assistant", "content": parts}]
    chat = ChatTemplate(build_tokenizer(str(folder)), PARTS)
    assert learned(chat, folder, messages) == ["b|c<|im_end|>"]
    for template in (CHATML, CHATML.replace("message.content or ''", "message.content | string")):
        chat = ChatTemplate(build_tokenizer(str(folder)), template)
        with pytest.raises(RecordError, match="has content in parts|is rejected by the chat temp"):
            chat.encode(messages)


HEADER = "{{ '<|im_start|>assistant\n' }}"
ALWAYS = CHATML.replace("{%- if add_generation_prompt %}", "").replace(
    f"{HEADER}{{%- endif %}}", HEADER
)


@pytest.mark.parametrize(
    "template",
    [
        ALWAYS,
        # without a special token before the header, and with roles that begin alike
        ALWAYS.replace("<|im_start|>", "<|im_"),
        ALWAYS.replace("<|im_start|>", "## "),
    ],
)
def test_the_header_of_the_next_answer_is_not_learned(folder: Path, template: str) -> None:
    """Of a template that always ends with it, as if an answer were to follow."""
    chat = ChatTemplate(build_tokenizer(str(folder)), template)
    assert learned(chat, folder, TALK) == ["bad<|im_end|>", "good<|im_end|>"]
    assert learned(chat, folder, TALK[:2]) == ["bad<|im_end|>"]
    assert learned(chat, folder, TALK[:3]) == ["bad<|im_end|>"]
    ids, counts = chat.encode(TALK)
    assert build_tokenizer(str(folder)).decode(ids).endswith("assistant\n")
    assert not counts[-1]
    with pytest.raises(RecordError, match="always ends with the header of an answer"):
        chat.encode([user("a"), assistant("", tool_calls=[call("f")])])
