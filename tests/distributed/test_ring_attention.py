"""Ring attention against torch's attention to the whole sequence, and what it costs."""

import functools
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from meshwright.commands.prove.cases import KEYS
from meshwright.config.job_config import JobConfig
from meshwright.config.loader import load_config
from meshwright.models.document_mask import dense_mask
from meshwright.parallelisms import ring_attention
from meshwright.parallelisms.context_parallel import attend, local_positions
from meshwright.parallelisms.rules.degrees import ParallelDims
from meshwright.train.build import build_model
from meshwright.train.preflight import preflight
from tests.helpers.tiny import SEQ_LEN, TINY, meshes_of, parallel_model

DEBUG = Path(__file__).parents[2] / "train_configs/debug_model.toml"


def _ring(cp: int):
    """The cp axis over all ranks, and attention around it."""
    mesh = meshes_of(ParallelDims(dp_replicate=1, dp_shard=1, cp=cp), "cpu").cp
    name = mesh.get_group().group_name
    return mesh, functools.partial(ring_attention.ring_attention, group_name=name)


def _inputs(dtype: torch.dtype, seq_len: int = 32) -> list[torch.Tensor]:
    """Queries, keys and values of grouped heads, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, seq_len, 8) for heads in (4, 2, 2, 4)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def _attend_to_the_whole(cp: int, dtype: torch.dtype, tolerance: float) -> None:
    mesh, around = _ring(cp)
    *inputs, grad = _inputs(dtype)
    positions = local_positions(grad.shape[2], mesh, grad.device)

    whole = [part.float().requires_grad_() for part in inputs]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    wants = [expected, *torch.autograd.grad(expected, whole, grad.float())]

    own = [part[:, :, positions].requires_grad_() for part in inputs]
    output, logsumexp = around(*own)
    assert logsumexp.dtype == torch.float32
    assert not logsumexp.requires_grad  # backward has no gradient through it
    gets = [output, *torch.autograd.grad(output, own, grad[:, :, positions])]
    for name, got, want in zip("oqkv", gets, wants, strict=True):
        assert got.dtype == dtype
        want = want[:, :, positions]
        error = ((got.float() - want).norm() / want.norm()).item()
        assert error < tolerance, f"{name}: {error}"


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)], ids=str
)
@pytest.mark.parametrize("cp", [2, 4])
def test_it_is_attention_to_the_whole_sequence(on_ranks, cp, dtype, tolerance) -> None:
    on_ranks(cp, _attend_to_the_whole, cp, dtype, tolerance)


def _check_as_an_operator() -> None:
    _, around = _ring(2)
    q, k, v, _ = (part.requires_grad_() for part in _inputs(torch.float32))
    name = around.keywords["group_name"]
    torch.library.opcheck(ring_attention.ring_attention, (q, k, v, name))
    # as attention has them: heads in front of positions by a transposition
    q, k, v = (part.transpose(1, 2).contiguous().transpose(1, 2).detach() for part in (q, k, v))
    torch.library.opcheck(ring_attention.ring_attention, (q, k, v, name))
    saved = (*around(q, k, v), name)
    torch.library.opcheck(ring_attention.ring_attention_backward, (q, q, k, v, *saved))


def test_what_it_tells_the_compiler_is_so(on_ranks) -> None:
    """Shapes, strides, types, aliases and gradients, by torch's own check of operators."""
    on_ranks(2, _check_as_an_operator)


def _built_to_go_around(config: JobConfig) -> list[bool]:
    plan = preflight(config, 2)
    model = build_model(plan, meshes_of(plan.dims, "cpu"), torch.device("cpu"))
    cores = [block.attention.core for block in model.stages[0].layers.values()]
    return [core.forward.keywords["ring"] is not None for core in cores]


def test_the_config_decides(on_ranks) -> None:
    axes = [f"--parallelism.{KEYS[axis]}={n}" for axis, n in (("dp_shard", 1), ("cp", 2))]
    for attention, want in (("ring", True), ("gather", False), ("auto", False)):
        words = [*axes, f"--parallelism.context_parallel_attention={attention}"]
        config = load_config(["--job.config_file", str(DEBUG), *words])
        for built in on_ranks(2, _built_to_go_around, config):
            assert built == [want] * 6, attention


def _attend_to_documents() -> None:
    mesh, ring = _ring(2)
    *inputs, _ = _inputs(torch.float32)
    positions = local_positions(32, mesh, inputs[0].device)
    own = [part[:, :, positions] for part in inputs]
    documents = (torch.arange(32) >= 11).long().expand(2, -1)
    mask = dense_mask(documents, positions)
    name = ring.keywords["group_name"]
    assert torch.equal(
        attend(*own, mask, scale=0.3, mesh=mesh, ring=name),
        attend(*own, mask, scale=0.3, mesh=mesh, ring=None),
    )


def test_documents_are_gathered(on_ranks) -> None:
    on_ranks(2, _attend_to_documents)


def _messages() -> Counter[str]:
    _, around = _ring(4)
    q, k, v, grad = _inputs(torch.float32)
    with torch.profiler.profile() as profile:
        output, _ = around(*(part.requires_grad_() for part in (q, k, v)))
        output.backward(grad)
    return Counter(event.name for event in profile.events() if event.name.startswith("gloo:"))


def _attend_after_others_set_torchs_options() -> None:
    torch_ring._cp_options.enable_load_balance = False
    torch_ring._cp_options.convert_to_f32 = False
    _attend_to_the_whole(2, torch.float32, 1e-6)


def test_torchs_own_context_parallelism_may_have_been_used_before(on_ranks) -> None:
    """Its options are the process's."""
    on_ranks(2, _attend_after_others_set_torchs_options)


def test_no_rank_holds_all_keys(on_ranks) -> None:
    """They move on 3 times in forward and again in backward, where gradients do 4 times."""
    for messages in on_ranks(4, _messages):
        assert messages == {"gloo:all_to_all": 3 + 3 + 4}


def _flops() -> tuple[int, int]:
    _, around = _ring(2)
    q, k, v, grad = _inputs(torch.float32)
    whole = [part.clone().repeat_interleave(4 // part.shape[1], 1) for part in (q, k, v)]
    counts = []
    for inputs, attention in ((whole, _products), ([q, k, v], lambda *qkv: around(*qkv)[0])):
        for part in inputs:
            part.requires_grad_()
        with FlopCounterMode(display=False) as counter:
            attention(*inputs).backward(grad)
        counts.append(counter.get_total_flops())
    return counts[0], counts[1]


def _products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def test_flops_are_those_of_its_products(on_ranks) -> None:
    """2 ranks with S positions each: each has twice the products of S with S, and in backward one
    more, for kernels compute scores again."""
    for plain, around in on_ranks(2, _flops):
        assert around == 2 * plain * 7 // 6


class CountCalls(TorchDispatchMode):
    """How often each operator is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))


def _rounds(options: dict[str, object]) -> tuple[int, int]:
    """Rounds of the ring, forward and backward, in one forward and backward of a model."""
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=2)
    model, meshes = parallel_model(dims, context_parallel_attention="ring", **options)
    tokens = torch.arange(SEQ_LEN // 2).unsqueeze(0)
    positions = local_positions(SEQ_LEN, meshes.cp, tokens.device)
    with CountCalls() as count:
        model.stages[0](tokens, positions=positions).sum().backward()
    names = ("meshwright::ring_attention", "meshwright::ring_attention_backward")
    return count.calls[names[0]], count.calls[names[1]]


@pytest.mark.parametrize(
    ("options", "times"),
    [
        ({}, 1),
        ({"ac_mode": "full"}, 2),
        ({"ac_mode": "selective"}, 1),  # by op
        ({"ac_mode": "selective", "saved_ops": ["aten.mm"]}, 2),
    ],
    ids=["none", "full", "op", "op-mm"],
)
def test_by_op_keys_do_not_go_around_again(on_ranks, options, times) -> None:
    for forward, backward in on_ranks(2, _rounds, options):
        assert forward == times * TINY.n_layers
        assert backward == TINY.n_layers


def _messages_within_budget(memory_budget: float) -> int:
    """Messages of the rings in a compiled forward and backward."""
    torch._dynamo.reset()
    options = {"ac_mode": "memory_budget", "memory_budget": memory_budget}
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=2)
    model, meshes = parallel_model(
        dims, context_parallel_attention="ring", compile_backend="aot_eager", **options
    )
    tokens = torch.arange(SEQ_LEN // 2).unsqueeze(0)
    positions = local_positions(SEQ_LEN, meshes.cp, tokens.device)
    with torch.profiler.profile() as profile:
        model.stages[0](tokens, positions=positions).sum().backward()
    return sum(event.name == "gloo:all_to_all" for event in profile.events())


def test_a_budget_knows_what_a_ring_costs(on_ranks) -> None:
    """Cheaper operations are computed again before it: one message forward, three in backward."""
    assert on_ranks(2, _messages_within_budget, 0.4) == [(1 + 3) * TINY.n_layers] * 2
    assert on_ranks(2, _messages_within_budget, 0.0) == [(1 + 1 + 3) * TINY.n_layers] * 2


def test_torch_is_asked_whether_there_is_a_kernel(monkeypatch) -> None:
    asked = []

    def can_use(params: torch.backends.cuda.SDPAParams) -> bool:
        asked.append((params.query.dtype, params.query.shape[-1], params.is_causal))
        return params.query.dtype == torch.bfloat16

    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", can_use)
    empty = torch.empty  # of no GPU
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **(k | {"device": "cpu"})))
    assert ring_attention.is_available("cuda", torch.bfloat16, 48)
    assert not ring_attention.is_available("cuda", torch.float32, 48)
    assert not ring_attention.is_available("cuda", torch.bfloat16, 20)
    assert asked == [(torch.bfloat16, 48, True), (torch.float32, 48, True)]
    assert ring_attention.is_available("cpu", torch.float32, 48)


def test_kernels_of_gpus_take_what_a_ring_gives_them() -> None:
    """Without a GPU: names, types and shapes."""
    of_gpu = functools.partial(torch.empty, device="cuda", dtype=torch.bfloat16)
    with FakeTensorMode():
        q, k = of_gpu(2, 4, 32, 64), of_gpu(2, 2, 32, 64)
        forward, backward = ring_attention.kernels(q)
        first_keys, last_queries = of_gpu(2, 2, 16, 64), of_gpu(2, 4, 16, 64)
        rounds = [(q, k, True), (q, first_keys, False), (last_queries, k, False)]
        for queries, keys, is_causal in rounds:
            output, logsumexp, *_ = forward(queries, keys, keys, is_causal=is_causal)
            assert output.shape == queries.shape
            assert (logsumexp.shape, logsumexp.dtype) == (queries.shape[:-1], torch.float32)
            gradients = backward(
                query=queries,
                key=keys,
                value=keys,
                out=output,
                logsumexp=logsumexp,
                is_causal=is_causal,
                grad_out=output,
            )
            assert [grad.shape for grad in gradients] == [queries.shape, keys.shape, keys.shape]
