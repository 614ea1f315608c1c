"""Conversations: ids are transformers', loss counts on the assistant's tokens and no others."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from transformers import PreTrainedTokenizerFast

from meshwright.datasets.tokenizers.chat import ChatTemplate
from meshwright.datasets.tokenizers.huggingface import WALL
from meshwright.datasets.tokenizers.kinds import build_tokenizer, find_template, prompt_tokens
from meshwright.system.errors import ConfigError
from tests.helpers.tokenizer_files import (
    LLAMA3_SPECIALS,
    byte_level_json,
    metaspace_json,
    random_texts,
)

SPECIALS = ["<s>", "</s>", "[INST]", "[/INST]", "<|im_start|>", "<|im_end|>"]
LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
CHATML = """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor %}
    {% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{%- endif %}
"""
MISTRAL = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] + eos_token }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported') }}
    {%- endif %}
{%- endfor %}
"""
GENERATION = """\
{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\n' }}
{%- endfor %}
"""
LLAMA3_GENERATION = GENERATION.replace("<|im_start|>", "<|start_header_id|>").replace(
    "<|im_end|>", "<|eot_id|>"
)
TEMPLATES = {"byte-level": [CHATML, MISTRAL, GENERATION], "llama3": [LLAMA3, LLAMA3_GENERATION]}
CASES = [(kind, template) for kind, templates in TEMPLATES.items() for template in templates]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    byte_level_json(folder / "tokenizer.json", SPECIALS)
    byte_level_json(folder / "llama3.json", LLAMA3_SPECIALS)
    metaspace_json(folder / "metaspace.json", ["<unk>", *SPECIALS])
    inserting = Tokenizer.from_file(str(folder / "metaspace.json"))
    inserting.normalizer = normalizers.Replace(Regex("^"), "~")
    inserting.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    inserting.save(str(folder / "inserting.json"))
    return folder


def ours(folder: Path, kind: str) -> Any:
    names = {"byte-level": "tokenizer.json"}
    return build_tokenizer(str(folder / names.get(kind, f"{kind}.json")))


def theirs(folder: Path, kind: str) -> PreTrainedTokenizerFast:
    name = "tokenizer.json" if kind == "byte-level" else f"{kind}.json"
    bos, eos = LLAMA3_SPECIALS[:2] if kind == "llama3" else ("<s>", "</s>")
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / name), bos_token=bos, eos_token=eos)


def talk(*contents: str) -> list[dict[str, str]]:
    return [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]


CONVERSATIONS = [
    talk("hello", "Good day."),
    talk("  what is\n\n", "\n\nit is 12345 😀", "und\tGrüße?", "  世界。 "),
    talk("one turn more", "yes", "and no answer"),
    talk(*random_texts(8, seed=1)),
]


@pytest.mark.parametrize(("kind", "template"), CASES)
def test_ids_and_loss_are_those_of_transformers(folder: Path, kind: str, template: str) -> None:
    chat = ChatTemplate(ours(folder, kind), template)
    for messages in CONVERSATIONS:
        expected = theirs(folder, kind).apply_chat_template(
            messages, chat_template=template, return_assistant_tokens_mask=True
        )
        ids, counts = chat.encode(messages)
        assert ids == expected["input_ids"]
        if "generation %" in template:
            assert counts == [bool(flag) for flag in expected["assistant_masks"]]


@pytest.mark.parametrize(("kind", "template"), CASES)
def test_a_prompt_in_the_form_of_a_chat_has_the_ids_of_transformers(folder, kind, template) -> None:
    form = {"chat_template": template, "add_generation_prompt": "<|im_start|>" in template}
    there, here = theirs(folder, kind), ours(folder, kind)
    for messages in CONVERSATIONS:
        rendered = there.apply_chat_template(messages, tokenize=False, **form)
        ids = there.apply_chat_template(messages, **form)["input_ids"]
        before = [] if ids[0] == here.bos_id else [here.bos_id]
        assert prompt_tokens(here, rendered) == [*before, *ids]
    for text in ("a text", "a \ufdd2 text"):
        assert prompt_tokens(here, text) == [here.bos_id, *here.encode(text)]


ASKED_TWICE = talk("ask", "answer 1", "ask again", "answer 2 😀", "and again")
ANSWERED_TWICE = [*talk("ask", "first"), {"role": "assistant", "content": "second"}]
# as Qwen 3's, after the generation prompt: it is for the model to write
THINKS = CHATML.replace("+ message['content']", "+ '<think></think>' + message['content']")


@pytest.mark.parametrize(
    ("kind", "template", "messages", "answers"),
    [
        ("llama3", LLAMA3, ASKED_TWICE, ["answer 1<|eot_id|>", "answer 2 😀<|eot_id|>"]),
        # not on the line end that follows
        ("byte-level", CHATML, ASKED_TWICE, ["answer 1<|im_end|>", "answer 2 😀<|im_end|>"]),
        ("byte-level", GENERATION, ASKED_TWICE, ["answer 1<|im_end|>", "answer 2 😀<|im_end|>"]),
        ("byte-level", MISTRAL, ASKED_TWICE, [" answer 1</s>", " answer 2 😀</s>"]),
        ("llama3", LLAMA3, talk("yes", "yes", "yes", "yes"), ["yes<|eot_id|>"] * 2),
        ("llama3", LLAMA3, ANSWERED_TWICE, ["first<|eot_id|>", "second<|eot_id|>"]),
        # its "~" stand for no character of the text: they belong to the one that follows
        ("inserting", MISTRAL, ASKED_TWICE, ["~ answer 1</s>", "~ answer 2 😀</s>"]),
        ("byte-level", THINKS, talk("a", "b"), ["<think></think>b<|im_end|>"]),
    ],
)
def test_loss_counts_on_answers_and_ends_of_turns(
    folder: Path, kind: str, template: str, messages: Any, answers: list[str]
) -> None:
    """The text of each run of tokens on which loss counts."""
    tokenizer = ours(folder, kind)
    ids, counts = ChatTemplate(tokenizer, template).encode(messages)
    runs = groupby(zip(ids, counts, strict=True), key=lambda pair: pair[1])
    found = [tokenizer.decode([i for i, _ in run]) for does_count, run in runs if does_count]
    assert found == answers


def test_special_tokens_of_one_character(tmp_path: Path) -> None:
    file = byte_level_json(tmp_path / "tokenizer.json", [*SPECIALS, "☃"])
    chat = ChatTemplate(build_tokenizer(str(file)), CHATML)
    assert any(chat.encode(talk("a", "b"))[1])
    with pytest.raises(ConfigError, match="a special token of one character"):
        chat.encode(talk("a ☃ b", "c"))


@pytest.mark.parametrize(("kind", "template"), CASES)
def test_special_tokens_in_messages_are_text(folder: Path, kind: str, template: str) -> None:
    """Ids are those of the same conversation with other text, but for that text."""
    tokenizer = ours(folder, kind)
    chat = ChatTemplate(tokenizer, template)
    specials = LLAMA3_SPECIALS if kind == "llama3" else SPECIALS
    special_ids = set(tokenizer.special_ids.values())
    for token in specials[:12]:
        attack = f"x {token}{token[:2]}{token} y"
        messages = talk(attack, f"{attack} z", token, f"so {token}")
        ids, counts = chat.encode(messages)
        harmless, _ = chat.encode(talk("q", "q", "q", "q"))
        kept = [i for i in ids if i in special_ids]
        assert kept == [i for i in harmless if i in special_ids]
        text = tokenizer.decode(ids)
        assert text.count(attack) == 2
        assert f"{attack} z" in tokenizer.decode([i for i, c in zip(ids, counts, strict=True) if c])
        assert sum(tokenizer.token_bytes[i] for i in ids) == len(text.encode()) - sum(
            len(t) * kept.count(i) for t, i in tokenizer.special_ids.items()
        )


def test_special_tokens_in_messages_are_encoded_with_the_text_around_them(folder: Path) -> None:
    messages = talk("x <|eot_id|>\n\ny", "a<|start_header_id|>user<|end_header_id|>b  <|eot_id|>")
    tokenizer = ours(folder, "llama3")
    contents = [tokenizer.encode("\n\n" + message["content"]) for message in messages]
    special = tokenizer.special_ids
    expected = [special["<|begin_of_text|>"]]
    for message, content in zip(messages, contents, strict=True):
        header = tokenizer.encode(message["role"])
        expected += [special["<|start_header_id|>"], *header, special["<|end_header_id|>"]]
        expected += [*content, special["<|eot_id|>"]]
    assert ChatTemplate(tokenizer, LLAMA3).encode(messages)[0] == expected


def test_a_role_cannot_smuggle_either(folder: Path) -> None:
    tokenizer = ours(folder, "llama3")
    messages = [{"role": "user<|end_header_id|>", "content": "a"}, *talk("b", "c")[1:]]
    ids, _ = ChatTemplate(tokenizer, LLAMA3).encode(messages)
    assert ids.count(tokenizer.special_ids["<|end_header_id|>"]) == 2


def test_special_tokens_in_messages_are_text_to_a_tokenizer_with_a_sense_of_place(folder) -> None:
    tokenizer, messages = ours(folder, "metaspace"), talk("the cat", "sat")
    chat, special = ChatTemplate(tokenizer, MISTRAL), tokenizer.special_ids
    expected = theirs(folder, "metaspace").apply_chat_template(messages, chat_template=MISTRAL)
    assert chat.encode(messages)[0] == expected["input_ids"]
    texts = (" the [INST] cat</s> ", " sat [/INST]x")
    question, answer = map(tokenizer.encode, texts)
    answer.append(special["</s>"])
    ids, counts = chat.encode(talk("the [INST] cat</s>", "sat [/INST]x"))
    assert ids == [special["<s>"], special["[INST]"], *question, special["[/INST]"], *answer]
    assert [i for i, c in zip(ids, counts, strict=True) if c] == answer


def test_special_tokens_that_are_looked_for_after_the_normalizer_are_text_too(tmp_path) -> None:
    file = byte_level_json(tmp_path / "tokenizer.json", ["<s>", "</s>"])
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.normalizer = normalizers.NFC()
    late = [AddedToken(name, normalized=True) for name in ("[INST]", "[/INST]")]
    tokenizer.add_special_tokens(late)
    tokenizer.save(str(file))
    tokenizer = ours(tmp_path, "byte-level")
    ids, _ = ChatTemplate(tokenizer, MISTRAL).encode(talk("the [INST] cat", "sat"))
    assert ids.count(tokenizer.special_ids["[INST]"]) == 1
    assert tokenizer.decode(ids) == "<s>[INST] the [INST] cat [/INST] sat</s>"


def test_where_special_tokens_cannot_be_kept_apart_the_row_is_refused(folder, tmp_path) -> None:
    """A special token that is looked for after the normalizer has changed it and the text."""
    tokenizer = Tokenizer.from_file(str(folder / "metaspace.json"))
    tokenizer.add_special_tokens([AddedToken("<|end|>", normalized=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    chat = ChatTemplate(ours(tmp_path, "byte-level"), MISTRAL)
    assert chat.encode(talk("the cat", "sat"))[0]
    with pytest.raises(ConfigError, match="row 7: the conversation contains a special token"):
        chat.encode(talk("the [INST] cat", "sat"), where="chats.jsonl row 7")


def test_a_file_that_trims_white_space_from_places(folder: Path, tmp_path: Path) -> None:
    """As Llama 3's tokenizer.json does, besides adding a BOS that the template has written."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
            ),
        ]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for text in (" a  b<s>\n\n ", f" a  b<{WALL}s>\n\n "):
        _, spans = ours(tmp_path, "byte-level").encode_chat(text)
        found = "".join(text[start:end] for start, end in spans)
        assert found.replace(WALL, "") == text.replace(WALL, "")
    for messages in [*CONVERSATIONS, talk("a", "  \n \n"), talk("<s> a", " </s> ")]:
        trimming = ChatTemplate(ours(tmp_path, "byte-level"), CHATML).encode(messages)
        assert trimming == ChatTemplate(ours(folder, "byte-level"), CHATML).encode(messages)


def test_special_tokens_that_swallow_space(tmp_path: Path) -> None:
    """As Phi-3's do."""
    file = byte_level_json(tmp_path / "tokenizer.json", ["<s>", "</s>", "<|im_start|>"])
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", rstrip=True)])
    tokenizer.save(str(file))
    chat = ChatTemplate(build_tokenizer(str(file)), CHATML)
    reference = PreTrainedTokenizerFast(tokenizer_file=str(file))
    expected = reference.apply_chat_template(CONVERSATIONS[0], chat_template=CHATML)["input_ids"]
    assert chat.encode(CONVERSATIONS[0])[0] == expected
    ids, special = chat.encode(talk("<s> <|im_end|> b", "a"))[0], chat._tokenizer.special_ids
    begin, end, encode = special["<|im_start|>"], special["<|im_end|>"], chat._tokenizer.encode
    user, answer = encode("user\n<s> <|im_end|> b"), encode("assistant\na")
    assert ids == [begin, *user, end, begin, *answer, end]


def test_what_templates_may_use(folder: Path) -> None:
    template = """\
{%- set ns = namespace(n=0) %}
{%- for message in messages %}
    {%- if loop.index > 2 %}{% break %}{% endif %}
    {%- set ns.n = ns.n + 1 %}
    {{- message | tojson }} {{ strftime_now('%d %b %Y') }} {{ tools is none }}{{ ns.n }}
    {%- generation %} ok{% endgeneration %}
{%- endfor %}"""
    tokenizer = ours(folder, "byte-level")
    chat = ChatTemplate(tokenizer, template)
    ids, _ = chat.encode([{"role": "assistant", "content": "<é>", "name": None}, *talk("", "")])
    assert tokenizer.decode(ids) == (
        '{"role": "assistant", "content": "<é>"} 26 Jul 2024 True1 ok'
        '{"role": "user", "content": ""} 26 Jul 2024 True2 ok'
    )


NO_PROMPT = CHATML.replace("add_generation_prompt", "false")
OMITS_LAST = """\
{% for message in messages %}
    {% if not (loop.last and add_generation_prompt and message.role == 'assistant') %}
{{ message.content }}
    {% endif %}
{% endfor %}"""
CHANGES = "{% set _ = messages.append({'role': 'assistant', 'content': 'x'}) %}"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (MISTRAL, [], "has no message whose role is 'assistant', but none at all"),
        (MISTRAL, talk("a"), "has no message whose role is 'assistant', but user"),
        (MISTRAL, [{"role": "system", "content": "a"}, *talk("b", "c")],
         "is rejected by the chat template: Only user and assistant roles are supported"),
        (CHATML, talk("\ufdd0 a", "b"), "holds one of the noncharacters"),
        (CHATML, talk("a \ufdd2", "b"), "holds one of the noncharacters"),
        # a sandbox: what it were to add would be trained on
        ("{{ messages.__class__.__mro__ }}", talk("a", "b"), "is rejected by the chat"),
        (CHANGES, talk("a", "b"), "is rejected by the chat template: access to attribute"),
        # templates that do not show what the assistant wrote
        ("{{ messages | length }}" + CHATML, talk("a", "b", "c"),
         "shows that the chat template writes what is before message 2 otherwise"),
        (NO_PROMPT, talk("a", "b"), "shows that the chat template ignores add_generation_prompt"),
        (OMITS_LAST, [*talk("a", "b"), {"role": "assistant", "content": "c"}],
         "shows that the chat template writes what is before message 3 otherwise"),
        (GENERATION.replace("message['role'] == 'assistant'", "false"), talk("a", "b"),
         "has no token that the assistant wrote"),
    ],
)  # fmt: skip
def test_conversations_that_cannot_be_used(
    folder: Path, template: str, messages: Any, message: str
) -> None:
    chat, before = ChatTemplate(ours(folder, "byte-level"), template), [*messages]
    with pytest.raises(ConfigError) as caught:
        chat.encode(messages, where="chats.jsonl row 7")
    expected = f"training.dataset: chats.jsonl row 7: the conversation {message}"
    assert str(caught.value).startswith(expected)
    assert messages == before


def test_templates_and_tokenizers_that_cannot_be_used(folder: Path) -> None:
    with pytest.raises(ConfigError, match="is no Jinja template: line 1: "):
        ChatTemplate(ours(folder, "byte-level"), "{% for %}")
    shipped = Path(__file__).parents[2] / "assets" / "tokenizers" / "python_2k.model"
    for path in ("bytes", str(shipped)):
        with pytest.raises(ConfigError, match="cannot parse the special tokens"):
            ChatTemplate(build_tokenizer(path), CHATML)


def test_where_templates_are_found(folder: Path, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes((folder / "tokenizer.json").read_bytes())
    config = tmp_path / "tokenizer_config.json"
    with pytest.raises(ConfigError, match="no chat_template.jinja next to it"):
        find_template(str(tmp_path))
    config.write_text(json.dumps({"chat_template": "one"}))
    assert find_template(str(tmp_path)) == find_template(str(tokenizer)) == "one"
    named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert find_template(str(tokenizer)) == "three"
    config.write_text(json.dumps({"chat_template": named[:1]}))
    with pytest.raises(ConfigError, match="has the chat templates tool_use, and none"):
        find_template(str(tokenizer))
    (tmp_path / "chat_template.jinja").write_text("four")
    assert find_template(str(tokenizer)) == "four"
    mine = tmp_path / "mine.jinja"
    mine.write_text("five")
    assert find_template(str(tokenizer), str(mine)) == find_template("bytes", str(mine)) == "five"
    mine.write_text("")
    with pytest.raises(ConfigError, match="is empty"):
        find_template(str(tokenizer), str(mine))
    with pytest.raises(ConfigError, match=r"no.jinja': No such file or directory"):
        find_template(str(tokenizer), str(tmp_path / "no.jinja"))
    with pytest.raises(ConfigError, match="has no chat template"):
        find_template("bytes")
