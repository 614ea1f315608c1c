"""The beginnings of campaigns that need no processes."""

from pathlib import Path

import pytest
import torch

from tests.campaigns import chat_rows, consumers, table_schemas
from tests.campaigns.consumer_programs import Wanted, with_transformers


@pytest.mark.parametrize("name", chat_rows.FORMATS)
def test_rows_of_chat_formats_give_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    verdicts = chat_rows.run(tmp_path, name, 8, seed=5)
    assert {template for _, template, verdict in verdicts if verdict == "equal"} == {
        *chat_rows.TEMPLATES
    }


def test_schemas_of_tables_are_read_or_rejected(tmp_path: Path) -> None:
    verdicts = table_schemas.run(tmp_path, range(25), seed=1)
    assert min(verdicts["read"], verdicts["rejected"]) >= 5


def test_what_differs_in_an_export_shows_in_its_cell(tmp_path: Path) -> None:
    consumers.make_exports(tmp_path, ["llama"], seed=1)
    for kind in consumers.TOKENIZERS:
        wanted = Wanted(**torch.load(tmp_path / f"llama-{kind}.pt", weights_only=False))
        assert str(with_transformers(wanted)).startswith("equal; ")
    wanted = wanted._replace(logprobs=wanted.logprobs + 0.25, ids=[[0], *wanted.ids[1:]])
    wanted.tokens[wanted.prompt + 3] = 0
    (wanted.folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    cell = with_transformers(wanted)
    assert (cell.ids, cell.chats, cell.greedy) == (39, 0, 3)
    assert str(cell).startswith("ids 39; chats 0; greedy 3; ")
    assert (cell.apart or 0) > 0.2
