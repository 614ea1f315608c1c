"""Random rows of every chat format through three templates: their tokens are those of transformers'
`apply_chat_template`, and nothing of a row is lost in silence.

    python -m tests.campaigns.chat_rows --rows 200 --seed 1
"""

import argparse
import itertools
import json
import random
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet
from transformers import PreTrainedTokenizerFast

from meshwright.datasets.conversations import MEANT, Conversation
from meshwright.datasets.rows import LocalDocuments
from meshwright.datasets.storage import stat
from meshwright.datasets.tokenizers.chat import ChatTemplate
from meshwright.datasets.tokenizers.kinds import build_tokenizer, find_template
from meshwright.system.errors import RecordError
from tests.helpers.texts import entry
from tests.helpers.tokenizer_files import byte_level_json

SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"]
SPECIALS += ["<|eot_id|>"]
GENERIC = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.name or '') }}
{%- if message.reasoning_content %}{{ '(' + message.reasoning_content + ')' }}{% endif %}
{%- set parts = message.content %}
{{- parts if parts is string else parts | map(attribute='text') | join }}
{%- for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
TEMPLATES = {"generic": GENERIC, "llama3.1": "", "qwen3": ""}
FORMATS = ("alpaca", "sharegpt", "messages", "column")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
NAMED = {
    "messages",
    "conversations",
    "instruction",
    "input",
    "output",
    "history",
    "system",
    "tools",
}
NAMED |= {"chat_template_kwargs"}
WORD = re.compile(r"w\d+x")


class Rows:
    """Draws rows. Every text in a row is a word of its own, so that a lost one is noticed."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self._numbers = chance, itertools.count()

    def word(self) -> str:
        return f"w{next(self._numbers)}x{self.chance.choice(['', ' ü', chr(10), ' {}'])}"

    def often(self, share: float) -> bool:
        return self.chance.random() < share

    def call(self) -> dict[str, Any]:
        arguments = {"x": self.chance.choice([self.word(), 1, None, ["y"], {"z": self.word()}])}
        return {"type": "function", "function": {"name": self.word(), "arguments": arguments}}

    def tool(self) -> dict[str, Any]:
        return {
            "type": "function",
            "function": {"name": self.word(), "parameters": {"type": "object"}},
        }

    def turns(self) -> list[dict[str, Any]]:
        """Messages of OpenAI's form."""
        found = [{"role": "system", "content": self.word()}] * self.often(0.3)
        for _ in range(self.chance.randint(1, 3)):
            found.append({"role": "user", "content": self.word()})
            if self.often(0.3):
                found += [self.answer(True), {"role": "tool", "content": self.word()}]
            found.append(self.answer(False))
        return found

    def answer(self, calls: bool) -> dict[str, Any]:
        found: dict[str, Any] = {"role": "assistant", "content": self.word()}
        if calls:
            found["tool_calls"] = [self.call()]
            found["content"] = self.chance.choice(["", None])
        if self.often(0.3):
            name = self.chance.choice(["reasoning_content", "reasoning", "thinking"])
            found[name] = self.word()
        if self.often(0.2):
            found["weight"] = self.chance.choice([0, 1])
        if self.often(0.1):
            found[self.chance.choice(["name", "id", "refusal"])] = self.word()
        if self.often(0.1) and found["content"]:
            found["content"] = [{"type": "text", "text": found["content"]}]
        return found

    def row(self, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return a row of a format, and the messages that it means."""
        tools = [self.tool()] if self.often(0.4) else None
        if name == "alpaca":
            system, pairs = (
                self.word() * self.often(0.4),
                [(self.word(), self.word())] * self.often(0.4),
            )
            asked, given, answer = self.word(), self.word() * self.often(0.5), self.word()
            row = {"instruction": asked, "output": answer, "input": given or None, "system": system}
            row["history"] = [list(pair) for pair in pairs]
            pairs.append((f"{asked}\n\n{given}" if given else asked, answer))
            turns = [{"role": "system", "content": system}] if system else []
            for question, reply in pairs:
                turns += [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": reply},
                ]
        elif name == "sharegpt":
            row, turns = self.sharegpt()
        else:
            turns = self.turns()
            row = {"messages": turns}
            if self.often(0.2) and turns[0]["role"] != "system":
                row["system"] = self.word()
                turns = [{"role": "system", "content": row["system"]}, *turns]
        if tools:
            row["tools"] = self.chance.choice([tools, json.dumps(tools)])
        if self.often(0.2):
            row["chat_template_kwargs"] = {"enable_thinking": self.often(0.5)}
        for column in ("id", "source"):
            if self.often(0.3):
                row[column] = self.word()
        if self.often(0.1):
            row[self.chance.choice(sorted(MEANT - NAMED))] = "x"
        return row, turns

    def sharegpt(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        shared, turns, system = [], [], self.word() * self.often(0.4)
        if system:
            turns.append({"role": "system", "content": system})
        for _ in range(self.chance.randint(1, 3)):
            asked, answer = self.word(), self.word()
            shared.append({"from": self.chance.choice(["human", "user"]), "value": asked})
            turns.append({"role": "user", "content": asked})
            if self.often(0.3):
                function, result = self.call()["function"], self.word()
                shared += [
                    {"from": "function_call", "value": json.dumps(function)},
                    {"from": "observation", "value": result},
                ]
                calls = [{"type": "function", "function": function}]
                turns += [{"role": "assistant", "content": "", "tool_calls": calls},
                          {"role": "tool", "content": result}]  # fmt: skip
            shared.append({"from": self.chance.choice(["gpt", "assistant"]), "value": answer})
            turns.append({"role": "assistant", "content": answer})
            if self.often(0.2):
                shared[-1]["weight"] = turns[-1]["weight"] = self.chance.choice([0, 1])
        return {"conversations": shared} | ({"system": system} if system else {}), turns


def read(folder: Path, name: str, row: dict[str, Any], kind: str) -> tuple[Any, Counter[str]]:
    """Return what the source makes of a file with one row, and the columns that it counts."""
    if kind == "json":
        path = folder / "a.jsonl"
        path.write_text(json.dumps(row) + "\n")
    else:
        path = folder / "a.parquet"
        parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    key = {"dataset_column": "messages"} if name == "column" else {"dataset_format": name}
    documents = LocalDocuments(entry(dataset=kind, **key), [stat(str(path))])
    [found] = documents.read(0, 1)
    return found, documents.unused


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [*map(without_nulls, value)] if isinstance(value, list) else value


class Judge:
    """Holds one template against transformers."""

    def __init__(self, folder: Path, name: str) -> None:
        byte_level_json(folder / "tokenizer.json", SPECIALS)
        self._name, self._tokenizer = name, build_tokenizer(str(folder))
        self._source = TEMPLATES[name] or find_template("", name)
        self._chat = ChatTemplate(self._tokenizer, self._source)
        self._theirs = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
        )

    def judge(self, row: dict[str, Any], turns: list[Any], found: Any, unused: Any) -> str:
        """Return "equal" or "rejected"; raise what is wrong."""
        if isinstance(found, RecordError):
            assert "has a column" in str(found), str(found)
            lost = str(found).partition("has a column ")[2].split("'")[1]
            assert row[lost], str(found)
            return "rejected"
        assert isinstance(found, Conversation), found
        tools = row.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools
        self._chat.unread.clear()
        try:
            ids, counts = self._chat.encode(
                found.messages, found.place, tools=found.tools, options=found.options
            )
        except RecordError as error:
            self._check_cause(str(error), turns)
            return "rejected"
        options = {"date_string": "26 Jul 2024"} | (row.get("chat_template_kwargs") or {})
        expected = self._theirs.apply_chat_template(
            turns, tools=tools, chat_template=self._source, **options
        )
        text = self._tokenizer.decode(ids)
        assert ids == expected["input_ids"], (text, self._tokenizer.decode(expected["input_ids"]))
        counted = {**unused, **self._chat.unread}
        kept = [m | dict.fromkeys(THOUGHTS if self._name == "qwen3" else ()) for m in turns]
        for message in [row, *kept, *(tools or [])]:
            for key, value in message.items():
                for word in WORD.findall(json.dumps(value)) if message is not row else ():
                    assert word in text or key in counted, (key, word, text)
        for key in {*row} - NAMED:
            assert key in counted or self._name == "", (key, counted)
        learned = self._tokenizer.decode([i for i, c in zip(ids, counts, strict=True) if c])
        for message in turns:
            is_learned = message["role"] == "assistant" and message.get("weight") != 0
            for word in WORD.findall(json.dumps(message.get("content"))):
                assert (word in learned) == is_learned, (word, learned)
        return "equal"

    def _check_cause(self, message: str, turns: list[Any]) -> None:
        """Check that the row has what the message says of it."""
        assert re.match(
            r"training.dataset: \S*/a\.(jsonl:1|parquet, row 0 of row group 0): ", message
        )
        weights = {m.get("weight") for m in turns if m["role"] == "assistant"}
        keys = {key for m in turns for key in m}
        if "no token that the assistant wrote" in message:
            assert weights == {0}, message
        elif "content in parts" in message:
            assert any(isinstance(m.get("content"), list) for m in turns), message
        else:
            lost = message.partition("the conversation has ")[2].partition(",")[0]
            assert self._name == "llama3.1", message
            assert lost in THOUGHTS, message
            assert keys & {*THOUGHTS}, message


def run(folder: Path, name: str, count: int, seed: int) -> Counter[tuple[str, str, str]]:
    """Judge `count` rows of a format by every template, and return how many ended how."""
    rows, verdicts = Rows(random.Random(f"{seed} {name}")), Counter[tuple[str, str, str]]()
    judges = {template: Judge(folder, template) for template in TEMPLATES}
    for number in range(count):
        row, turns = rows.row(name)
        for kind in ("json", "parquet"):
            try:
                found, unused = read(folder, name, row, kind)
            except pyarrow.ArrowInvalid:  # text and parts in one column: no table has that
                continue
            meant = turns if kind == "json" else without_nulls(turns)
            for template, judge in judges.items():
                try:
                    verdict = judge.judge(row, meant, found, unused if name != "column" else row)
                except AssertionError as error:
                    raise SystemExit(
                        f"{name}, {template}, {kind}, row {number}: {row}\n{error}"
                    ) from error
                verdicts[name, template, verdict] += 1
    return verdicts


def main() -> None:
    """Run all formats, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200, help="of each format")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    print(f"seed {given.seed}")
    with tempfile.TemporaryDirectory() as folder:
        for name in FORMATS:
            for (_, template, verdict), count in run(
                Path(folder), name, given.rows, given.seed
            ).items():
                print(f"{name:10} {template:10} {verdict:10} {count}")


if __name__ == "__main__":
    main()
