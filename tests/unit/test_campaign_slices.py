"""The beginnings of campaigns that need no processes."""

from pathlib import Path

import pytest

from tests.campaigns import chat_rows, table_schemas


@pytest.mark.parametrize("name", chat_rows.FORMATS)
def test_rows_of_chat_formats_give_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    verdicts = chat_rows.run(tmp_path, name, 8, seed=5)
    assert {template for _, template, verdict in verdicts if verdict == "equal"} == {
        *chat_rows.TEMPLATES
    }


def test_schemas_of_tables_are_read_or_rejected(tmp_path: Path) -> None:
    verdicts = table_schemas.run(tmp_path, range(25), seed=1)
    assert min(verdicts["read"], verdicts["rejected"]) >= 5
