"""Initial values: a function of seed, name and index, and normally distributed."""

import math
from unittest.mock import Mock

import pytest
import torch

from meshwright.parallelisms import initialize
from meshwright.parallelisms.initialize import fill_normal
from meshwright.train.build import warn_of_tokenizer


def whole(shape, seed=0, name="w") -> torch.Tensor:
    values = torch.empty(shape)
    fill_normal(values, 1.0, seed, name, shape, (0,) * len(shape))
    return values


@pytest.mark.parametrize(
    ("shape", "offset", "box"),
    [
        ((1000, 70), (990, 63), (10, 7)),
        ((70_000,), (65_530,), (20,)),
        ((5, 14, 6), (1, 2, 0), (3, 4, 6)),
        ((3, 70_000), (1, 5), (2, 69_000)),
    ],
)
def test_a_box_equals_the_same_part_of_the_whole(shape, offset, box) -> None:
    part = torch.empty(box)
    fill_normal(part, 1.0, 0, "w", shape, offset)
    where = tuple(slice(o, o + n) for o, n in zip(offset, box, strict=True))
    assert torch.equal(part, whole(shape)[where])


@pytest.mark.parametrize("block", [1, 100, 1 << 22])
def test_blocks_of_any_size_give_equal_bits(monkeypatch, block: int) -> None:
    """GPUs take larger ones."""
    want = whole((700, 3))
    monkeypatch.setitem(initialize.BLOCKS, "cpu", block)
    assert torch.equal(whole((700, 3)), want)


def test_name_and_seed_matter() -> None:
    base = whole((100, 10))
    assert not torch.isclose(base, whole((100, 10), seed=1)).any()
    assert not torch.isclose(base, whole((100, 10), name="v")).any()


def test_values_do_not_change_between_releases() -> None:
    """A run is to be repeatable with a later version, on another machine, on a GPU."""
    assert whole((2, 3)).tolist() == PINNED


PINNED = [
    [-1.145664930343628, 2.286067485809326, -0.29462292790412903],
    [0.9278504848480225, -0.41763657331466675, -1.6461267471313477],
]


def test_distribution_is_the_truncated_normal() -> None:
    values = whole((1000, 1000)).double()
    density = math.exp(-4.5) / math.sqrt(2 * math.pi)
    inside = math.erf(3 / math.sqrt(2))
    variance = 1 - 6 * density / inside  # of a standard normal cut at 3
    assert values.abs().max() <= 3.0
    assert abs(values.mean()) < 0.004  # 4 standard errors
    assert abs(values.var() - variance) < 0.005
    for quantile, want in ((0.1, -1.2754), (0.5, 0.0), (0.975, 1.9385)):
        assert abs(values.view(-1).kthvalue(int(quantile * 1e6)).values - want) < 0.01


def test_neighbours_are_independent() -> None:
    values = whole((1000, 1000))
    rows = torch.corrcoef(values[:20])
    columns = torch.corrcoef(values[:, :20].T)
    for matrix in (rows, columns):
        assert (matrix - torch.eye(20)).abs().max() < 0.15  # 1000 samples: 4.7 standard errors


def test_weights_of_another_tokenizer_are_a_warning(caplog) -> None:
    """Sizes of vocabularies may be equal: nothing else shows it but a high loss."""
    saved = {"tokenizer_path": "old.json", "data_identity": {"model.tokenizer_path": "abc"}}
    warn_of_tokenizer(saved, Mock(fingerprint="abc"))
    warn_of_tokenizer(saved | {"data_identity": {}}, Mock(fingerprint="abc"))
    assert caplog.messages == []
    warn_of_tokenizer(saved, Mock(fingerprint="def"))
    (said,) = caplog.messages
    assert said.startswith("the initial weights were trained with another tokenizer, old.json (abc")
