"""Which tokens see which, where sequences are made of several documents."""

import warnings

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask

from meshwright.models import attention, decoder
from meshwright.models.attention import (
    block_mask,
    dense_mask,
    masked_attention,
    positions_in_document,
)
from meshwright.models.decoder import Decoder
from meshwright.models.families import MODELS
from meshwright.models.loss import Batch
from meshwright.parallelisms.initialize import initialize
from tests.helpers.families import small
from tests.helpers.packed import packed
from tests.helpers.slow import slow_but
from tests.helpers.tiny import SEQ_LEN, plain_model

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 2, 3, 3, 3]], dtype=torch.int32)
WITHIN = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 0, 0, 1, 2]])
PART = torch.tensor([1, 2, 5])


def test_positions_begin_at_0_in_every_document() -> None:
    assert torch.equal(positions_in_document(DOCUMENTS), WITHIN)
    assert torch.equal(positions_in_document(DOCUMENTS, PART), WITHIN[:, PART])
    assert torch.equal(positions_in_document(DOCUMENTS, PART.expand(2, -1)), WITHIN[:, PART])
    a_part_of_a_stream = DOCUMENTS + 7
    assert torch.equal(positions_in_document(a_part_of_a_stream), WITHIN)


@pytest.mark.parametrize("window", [None, 1, 2, 6])
def test_a_token_sees_itself_and_what_comes_before_in_its_document(window) -> None:
    want = (DOCUMENTS[:, None, :, None] == DOCUMENTS[:, None, None, :]).tril()
    if window is not None:
        want = want.triu(1 - window)
    assert torch.equal(dense_mask(DOCUMENTS, None, window), want)
    assert torch.equal(dense_mask(DOCUMENTS, PART, window), want[:, :, PART])
    assert torch.equal(dense_mask(DOCUMENTS, PART.expand(2, -1), window), want[:, :, PART])


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("part", [None, "cp", "pp"])
@pytest.mark.parametrize("num_keys", slow_but("odd", {"blocks": [256], "odd": [300]}))
def test_blocks_are_the_same_mask(num_keys, part, window) -> None:
    """What GPUs get; only its forward works on CPUs, where it is compiled by nobody."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.rand(2, num_keys, generator=generator) < 0.02
    documents = starts.cumsum(1, dtype=torch.int32)
    positions = None
    if part is not None:  # the two chunks of the second of two ranks
        positions = torch.arange(num_keys // 4, 3 * num_keys // 4)
    if part == "pp":
        positions = positions.expand(2, -1)
    queries = num_keys if positions is None else positions.shape[-1]
    q = torch.randn(2, 4, queries, 16, generator=generator)
    k, v = torch.randn(2, 2, 2, num_keys, 16, generator=generator)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        got = masked_attention(q, k, v, block_mask(documents, positions, window), scale=0.2)
    want = masked_attention(q, k, v, dense_mask(documents, positions, window), scale=0.2)
    torch.testing.assert_close(got, want)


def test_blocks_rotate_by_positions_in_documents() -> None:
    """Which no loss shows: what rotary attention sees are differences of positions."""
    llama, batch, seen = plain_model(), packed(1), []
    llama.layers["1"].register_forward_pre_hook(lambda module, inputs: seen.extend(inputs[1:3]))
    llama(batch.tokens, positions=torch.arange(SEQ_LEN), documents=batch.documents)
    within = positions_in_document(batch.documents)
    assert torch.equal(torch.stack(seen), llama.get_buffer("rope_0")[:, within])


@pytest.mark.parametrize("has_documents", [False, True])
def test_gpus_get_windows_as_blocks_made_once(monkeypatch, has_documents) -> None:
    """Simulated: the CPU runs flex attention's forward. With positions of a rank's part, too."""
    args = small(MODELS["olmo3"], 131)
    tokens = torch.randint(131, (2, 32), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 12 + [1] * 20, [0] * 32]) if has_documents else None
    model = Decoder(args, 32)
    initialize(model, seed=0)
    with torch.no_grad():
        want = model(tokens, documents=documents)
    made = []

    def build(*given: object) -> BlockMask:
        made.append(given[2])
        return block_mask(*given)

    monkeypatch.setattr(decoder, "makes_blocks", lambda _: True)
    monkeypatch.setattr(decoder, "block_mask", build)
    for positions in (None, torch.arange(32)):
        made.clear()
        with torch.no_grad():
            got = model(tokens, documents=documents, positions=positions)
        torch.testing.assert_close(got, want)
        assert sorted(made, key=str) == [7, None][: 1 + has_documents]


def test_a_batch_goes_to_a_device_as_a_whole() -> None:
    batch = packed(1)
    moved = batch.to(torch.device("meta"))
    for part in (moved.tokens, moved.labels, moved.documents):
        assert part.is_meta
    assert Batch(batch.tokens, batch.labels).to(torch.device("meta")).documents is None


def test_blocks_of_other_documents_are_not_compiled_anew(monkeypatch) -> None:
    """Forward, on the CPU and without code of its own: as near as that gets to a GPU's."""
    monkeypatch.setattr(decoder, "makes_blocks", lambda _: True)
    torch._dynamo.reset()
    counters.clear()
    compiled, plain = plain_model(), plain_model()
    for block in compiled.layers.values():
        block.compile(fullgraph=True, backend="aot_eager")
    for step in (1, 2, 3):
        batch = packed(step)
        with torch.no_grad():
            got = compiled(batch.tokens, positions=torch.arange(SEQ_LEN), documents=batch.documents)
            with monkeypatch.context() as patch:
                patch.setattr(decoder, "makes_blocks", lambda _: False)
                want = plain(batch.tokens, documents=batch.documents)
        torch.testing.assert_close(got, want)
    assert counters["stats"]["unique_graphs"] == 1


def test_blocks_of_validation_need_no_graph_of_their_own(monkeypatch) -> None:
    """The graph that makes them is for one mode of gradients."""
    has_gradients = []
    create = lambda *_, **__: has_gradients.append(torch.is_grad_enabled())  # noqa: E731
    monkeypatch.setattr(attention, "create_block_mask", create)
    block_mask(DOCUMENTS)
    with torch.no_grad():
        block_mask(DOCUMENTS)
    assert has_gradients == [False, False]
