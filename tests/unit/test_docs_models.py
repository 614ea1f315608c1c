"""The worked example of docs/extending.md is a family that works."""

import re
import sys
from pathlib import Path

import pytest

from meshwright.models.families import MODELS
from meshwright.models.family import Family
from tests.helpers.families import small
from tests.unit import test_families

DOCS = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture
def family(tmp_path, monkeypatch) -> Family:
    """The module in the text, as a user would add it."""
    text = DOCS.read_text("utf-8")
    (code,) = re.findall(r"<!-- test: mistral -->\n```python\n(.*?)```", text, re.DOTALL)
    assert len(code.splitlines()) < 250
    assert "parallelisms" not in code
    (tmp_path / "mistral_of_the_docs.py").write_text(code, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    import mistral_of_the_docs  # type: ignore[import-not-found]

    assert "torch" not in vars(mistral_of_the_docs)
    monkeypatch.setitem(MODELS, "mistral", mistral_of_the_docs.FAMILY)
    yield mistral_of_the_docs.FAMILY
    del sys.modules["mistral_of_the_docs"]


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}], ids=["untied", "tied"])
def test_the_example_passes_the_tests_of_families(family, changes) -> None:
    args = small(family, vocab_size=131, **changes)
    test_families.test_the_table_is_that_of_the_model(args)
    test_families.test_logits_loss_and_gradients_equal_transformers(args)
    test_families.test_packed_documents_equal_transformers(args)


def test_the_size_is_the_published_one(family) -> None:
    assert round(family.flavors["mistral_7b"].table.num_params / 1e9, 3) == 7.248
