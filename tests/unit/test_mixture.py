"""Layers with experts on one process: the choice, the losses of a router, grouped matmuls, and the
state that is no parameter."""

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import DeepseekV3Config, GptOssConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from meshwright.checkpoint.conversion.hf_folder import check_hf_folder
from meshwright.checkpoint.conversion.initial_load import family_there
from meshwright.commands.prove.cases import can_run, default_cases, every_mesh
from meshwright.commands.prove.router_accounting import RouterAccounting
from meshwright.commands.prove.shrink import shrink
from meshwright.config.job_config import Checkpoint
from meshwright.config.loader import load_config
from meshwright.config.optimizer import Optimizer
from meshwright.config.parallelism import ActivationCheckpoint
from meshwright.models.decoder import Decoder
from meshwright.models.families import MODELS
from meshwright.models.families.mixtral import MixtralArgs
from meshwright.models.families.qwen3_moe import Qwen3MoeArgs
from meshwright.models.mixture import Mixture, grouped_matmul, leaves_memory
from meshwright.models.router import BalanceLosses, choose_experts
from meshwright.models.table import FeedForwardSpec, LayerSpec, MixtureSpec
from meshwright.parallelisms.activation_checkpoint import apply_ac
from meshwright.parallelisms.data_parallel import compute_in_fp32
from meshwright.parallelisms.expert_load import Balance
from meshwright.parallelisms.initialize import initialize
from meshwright.system.errors import ConfigError
from meshwright.system.files import NamedPath
from meshwright.train.optim.registry import settings_of
from meshwright.train.resolve_model import resolve_model
from tests.helpers.resolved import resolved
from tests.helpers.tiny import BiasedArgs

SMALL = MixtralArgs(32, 2, 4, 4, 24, 131, n_experts=6, n_active=2)
SPEC = MixtureSpec(32, 24, 8, 3, normalizes=True, std=0.3, out_std=0.3)
GROUPED = dataclasses.replace(
    SPEC,
    scores="sigmoid",
    normalizer_eps=1e-20,
    scale=2.5,
    n_groups=4,
    n_active_groups=2,
    shared=FeedForwardSpec(32, 48, 0.3, 0.3),
)
BIASED = dataclasses.replace(SPEC, activation="clamped_swiglu", bias_std=0.3)


def mixture_of(spec: MixtureSpec) -> Mixture:
    torch.manual_seed(0)
    mixture = Mixture(spec)
    for parameter in mixture.parameters():
        nn.init.normal_(parameter, std=0.3)
    for name, state in spec.state.items():
        getattr(mixture, name).fill_(state.value)
    mixture.counts.zero_()
    mixture.figures.zero_()
    return mixture


def test_equal_scores_go_to_the_first_expert() -> None:
    scores = torch.randint(-2, 3, (500, 16)).float() / 4
    scores[0, :8], scores[0, 8:] = 0.0, -0.0
    want = scores.sort(dim=-1, descending=True, stable=True).indices[:, :5]
    assert torch.equal(choose_experts(scores, 5, 1, 1), want)
    assert not torch.equal(scores.topk(5).indices, want)  # so the test can fail


@pytest.mark.parametrize("counts", [[3, 0, 1, 7, 0], [0] * 5], ids=["some", "none"])
@pytest.mark.parametrize("widths", [(32, 24), (30, 22)], ids=["grouped", "loop"])
def test_a_grouped_matmul_is_a_matmul_for_each_expert(widths, counts) -> None:
    """Groups of 0 rows and of 1 included, and no rows at all."""
    (rows_in, out), counts = widths, torch.tensor(counts)
    rows = torch.randn(int(counts.sum()), rows_in, requires_grad=True)
    weight = torch.randn(5, out, rows_in, requires_grad=True)
    got = grouped_matmul(rows, weight, counts.cumsum(0).int(), is_transposed=True)
    parts = rows.split(counts.tolist())
    want = torch.cat([F.linear(part, own) for part, own in zip(parts, weight, strict=True)])
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)
    upstream = torch.randn(out).expand_as(got)  # torch refuses its strides if it has no rows
    grads = torch.autograd.grad(got, (rows, weight), upstream)
    for a, b in zip(grads, torch.autograd.grad(want, (rows, weight), upstream), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    assert not grads[1][1].any()


def test_a_group_without_rows_is_0_where_torch_leaves_memory_as_it_was(monkeypatch) -> None:
    a, b, ends = torch.randn(11, 32).t(), torch.randn(11, 24), torch.tensor([3, 3, 11]).int()
    want = grouped_matmul(a, b, ends)
    old_memory = want.where(want != 0, torch.nan)
    assert not leaves_memory(a.device)
    for capability in ((9, 0), (10, 0)):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda _, c=capability: c)
        assert leaves_memory(torch.device("cuda")) == (capability == (10, 0))
    rows = grouped_matmul(b, want.mT, ends)
    monkeypatch.setattr("meshwright.models.mixture.leaves_memory", lambda device: True)
    assert torch.equal(grouped_matmul(b, want.mT, ends), rows)
    monkeypatch.setattr(F, "grouped_mm", lambda *_, **__: old_memory.clone())
    assert torch.equal(grouped_matmul(a, b, ends), want)


@pytest.mark.parametrize("spec", [SPEC, GROUPED], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("losses", [(0.3, 0, 0), (0.1, 0.2, 0.3)])
def test_a_routers_losses_have_the_gradients_of_autograd(spec, losses) -> None:
    mixture, x = mixture_of(spec), torch.randn(3, 16, 32)
    mixture.load.copy_(torch.arange(8) + 1)
    upstream = torch.randn(3, 16, 32)
    plain, choice, *_ = mixture(x)
    logits = mixture.router(x.flatten(0, 1))
    scores = logits.softmax(-1) if spec.scores == "softmax" else logits.sigmoid()
    share = (scores / scores.sum(-1, keepdim=True)).view(3, 16, 8)
    batch, sequence, z = losses
    counted = torch.rand(48) < 0.7
    share = share * counted.view(3, 16, 1)
    chosen = F.one_hot(choice.flatten(0, 1), 8).sum(1) * counted.unsqueeze(1)
    counts = chosen.view(3, 16, 8).sum(1)  # (B, E)
    by_sequence = (8 * counts / counts.sum(1, keepdim=True)).unsqueeze(1)
    by_batch = 8 * mixture.load / mixture.load.sum()
    own = (share * (batch * by_batch + sequence * by_sequence)).sum()
    own = own + z * logits[counted].logsumexp(-1).square().sum()
    wanted = torch.autograd.grad((plain * upstream).sum() + own, mixture.router.weight)[0]
    mixture.losses = BalanceLosses(batch, sequence, z)
    out, _, figures, _ = mixture(x, counted=counted)
    (got,) = torch.autograd.grad((out * upstream).sum(), mixture.router.weight)
    assert torch.equal(out, plain)
    assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-5)
    assert figures[0].item() == pytest.approx((share * by_batch).sum().item(), rel=1e-5)
    if sequence:
        assert figures[1].item() == pytest.approx((share * by_sequence).sum().item(), rel=1e-5)


def test_sigmoid_groups_bias_scale_and_a_shared_expert_equal_deepseek() -> None:
    config = DeepseekV3Config(
        hidden_size=32,
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        experts_implementation="eager",
    )
    ours = mixture_of(GROUPED)
    ours.bias.copy_(torch.randn(8) / 4)

    def exported(own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            "gate.weight": own["router.weight"],
            "experts.gate_up_proj": torch.cat([own["experts.w1"], own["experts.w3"]], 1),
            "experts.down_proj": own["experts.w2"],
            "shared_experts.gate_proj.weight": own["shared.w1.weight"],
            "shared_experts.down_proj.weight": own["shared.w2.weight"],
            "shared_experts.up_proj.weight": own["shared.w3.weight"],
        }

    theirs = DeepseekV3MoE(config)
    theirs.gate.e_score_correction_bias.copy_(ours.bias)
    assert_equal(ours, theirs, exported)


def test_biases_and_a_clamped_activation_equal_gpt_oss() -> None:
    config = GptOssConfig(
        hidden_size=32,
        intermediate_size=24,
        num_local_experts=8,
        num_experts_per_tok=3,
        experts_implementation="eager",
    )

    def exported(own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        gate_up = torch.stack([own["experts.w1"], own["experts.w3"]], 2)  # (E, F, 2, D)
        biases = torch.stack([own["experts.b1"], own["experts.b3"]], 2)
        return {
            "router.weight": own["router.weight"],
            "router.bias": own["router.bias"],
            "experts.gate_up_proj": gate_up.flatten(1, 2).mT,
            "experts.gate_up_proj_bias": biases.flatten(1, 2),
            "experts.down_proj": own["experts.w2"].mT,
            "experts.down_proj_bias": own["experts.b2"],
        }

    # so that inputs are clamped
    assert_equal(mixture_of(BIASED), GptOssMLP(config), exported, scale=5)


def assert_equal(
    ours: Mixture,
    theirs: nn.Module,
    exported: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    scale: float = 1.0,
) -> None:
    """Outputs, and gradients of the input and of every parameter, as `exported` has them."""
    theirs.load_state_dict(exported(dict(ours.named_parameters())), strict=False)
    xs = [(torch.randn(2, 16, ours.spec.dim) * scale).requires_grad_()]
    xs.append(xs[0].detach().clone().requires_grad_())
    got, want = ours(xs[0])[0], theirs(xs[1])
    want = want[0] if isinstance(want, tuple) else want
    upstream = torch.randn_like(got)
    for out in (got, want):
        out.backward(upstream)
    pairs = {"output": (got, want), "input": (xs[0].grad, xs[1].grad)}
    grads = exported({name: parameter.grad for name, parameter in ours.named_parameters()})
    pairs |= {name: (grads[name], p.grad) for name, p in theirs.named_parameters()}
    for name, (a, b) in pairs.items():
        assert (a - b).abs().max() <= 1e-5 * b.abs().max(), name


def model_of(bias_update_rate: float = 0.0) -> Decoder:
    model = Decoder(SMALL, 16)
    initialize(model, 0)
    for mixture in model.mixtures().values():
        mixture.bias_update_rate = bias_update_rate
    return model


def test_state_is_in_the_table_and_only_first_values_reset_it() -> None:
    model = model_of()
    persistent = model.state_dict().keys() - dict(model.named_parameters()).keys()
    assert persistent == model.table.state.keys()
    state = model.state_dict()
    for name, declared in model.table.state.items():
        assert state[name].shape == declared.shape
        assert str(state[name].dtype) == f"torch.{declared.dtype}"
        assert (state[name] == declared.value).all()
    model.layers["0"].feed_forward.bias.fill_(3)
    model.init_buffers()  # as after a load
    assert (model.layers["0"].feed_forward.bias == 3).all()
    model.init_state()
    assert not model.layers["0"].feed_forward.bias.any()


@pytest.mark.parametrize("mode", ["none", "full"])
def test_tokens_count_once_in_training_and_never_in_validation(mode) -> None:
    model = model_of()
    if mode == "full":
        apply_ac(model.layers, ActivationCheckpoint(mode="full"))
    tokens = torch.randint(131, (2, 16))
    with torch.no_grad():
        model(tokens)
    for _ in range(2):
        model(tokens).sum().backward()
    for mixture in model.mixtures().values():
        assert mixture.counts.sum() == 2 * 2 * 16 * SMALL.n_active


def test_recomputation_keeps_the_chosen_experts(monkeypatch) -> None:
    """Where the router would choose others the second time, as rounding may make it."""
    model, tokens = model_of(), torch.randint(131, (2, 16))
    model(tokens).square().mean().backward()
    want = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    apply_ac(model.layers, ActivationCheckpoint(mode="full"))
    loss = model(tokens).square().mean()
    for mixture in model.mixtures().values():
        mixture.bias.copy_(-torch.arange(6) * 10)  # which counts in the choice alone
    loss.backward()
    for parameter, grad in zip(model.parameters(), want, strict=True):
        assert torch.allclose(parameter.grad, grad, rtol=1e-5, atol=1e-9)


def test_a_step_that_is_held_back_moves_neither_bias_nor_load(monkeypatch) -> None:
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: None)
    model = model_of(bias_update_rate=0.01)
    balance = Balance([model])
    for skip_update in (True, False):
        model(torch.randint(131, (2, 16))).sum().backward()
        counts = {n: mixture.counts.clone() for n, mixture in model.mixtures().items()}
        sums = balance.sums(torch.device("cpu"))
        figures = balance.after_step(sums, torch.tensor(skip_update))
        for number, mixture in model.mixtures().items():
            assert not mixture.counts.any()
            moved = 0 if skip_update else 0.01 * (counts[number].float().mean() > counts[number])
            moved = moved - (0 if skip_update else 0.01 * (counts[number] > 2 * 16 * 2 / 6))
            assert torch.allclose(mixture.bias, moved + torch.zeros(6))
            assert torch.equal(
                mixture.load, torch.ones(6).long() if skip_update else counts[number]
            )
        assert balance.loads == {number: own.tolist() for number, own in counts.items()}
        loads = torch.stack([*counts.values()]) * 6 / (2 * 16 * 2)
        assert figures["experts/load_max"].item() == pytest.approx(loads.max().item())
        assert figures["experts/load_min"].item() == pytest.approx(loads.min().item())
        assert figures["experts/without_tokens"].item() == (loads == 0).sum().item()


def test_the_range_of_biases_has_one_process_bits_on_any_number_of_ranks(monkeypatch) -> None:
    """An eighth from each of eight ranks adds up to 0.006000001."""
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: None)
    model = model_of()
    for mixture in model.mixtures().values():
        mixture.bias[0] = 0.006
    balance, device = Balance([model]), torch.device("cpu")
    ranks = [balance.sums(device, tells_biases=rank == 0) for rank in range(8)]
    figures = balance.after_step(sum(ranks[1:], ranks[0]), torch.tensor(False))
    assert figures["experts/bias_range"] == torch.tensor(0.006)


def test_metrics_of_routers_are_means_over_tokens_and_layers(monkeypatch) -> None:
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: None)
    model, logits = model_of(), list[torch.Tensor]()
    for mixture in model.mixtures().values():
        mixture.router.register_forward_hook(lambda _, __, out: logits.append(out.detach()))
    tokens = torch.randint(131, (2, 16))
    for _ in range(2):  # microbatches
        model(tokens).sum().backward()
    balance, layers = Balance([model]), torch.stack(logits)
    figures = balance.after_step(balance.sums(torch.device("cpu")), torch.tensor(False))
    shares = layers.softmax(-1)
    entropy = -(shares * shares.log()).sum(-1).mean()
    assert figures["experts/entropy"].item() == pytest.approx(entropy.item(), rel=1e-5)
    z = layers.logsumexp(-1).square().mean()
    assert figures["experts/router_z_loss"].item() == pytest.approx(z.item(), rel=1e-5)
    # even loads before the first step: the loss is 1, its least value
    assert figures["experts/balance_loss"].item() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_proof_counts_loads_and_biases_once_more(monkeypatch, is_frozen) -> None:
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: None)
    model, accounting = model_of(bias_update_rate=0.01), RouterAccounting(0.01)
    model.layers["0"].feed_forward.router.weight.requires_grad_(not is_frozen)
    local = SimpleNamespace(stages=[model])
    balance, seen = Balance([model]), list[tuple[int, torch.Tensor]]()
    model.routing = SimpleNamespace(
        given=lambda *_: None, note=lambda layer, choice, _: seen.append((layer, choice))
    )
    for fault in (None, None, "load", "bias"):
        seen.clear()
        for _ in range(2):  # microbatches
            model(torch.randint(131, (2, 16))).sum().backward()
        if fault == "load":
            with torch.no_grad():  # as a validation that counts
                model.layers["1"].feed_forward.counts += 1
        if fault == "bias":
            model.layers["1"].feed_forward.bias += 0.01
        balance.after_step(balance.sums(torch.device("cpu")), torch.tensor(False))
        layers = {number for number, _ in seen}
        choices = {n: torch.cat([c for number, c in seen if number == n]) for n in layers}
        wrong = accounting.wrong_counts(
            local, choices, torch.ones(len(choices[0]), 1, *choices[0].shape[1:2], dtype=torch.bool)
        )
        assert wrong == ([f"layers.1.feed_forward.{fault}"] if fault else [])


@pytest.mark.parametrize("name", ["layers.1", "layers.1.feed_forward"])
def test_a_layer_with_experts_may_compute_in_fp32_beside_bf16(name) -> None:
    model, x = model_of(), torch.randn(2, 16, 32).bfloat16()
    part = model.get_submodule(name)
    inputs = model.get_buffer("rope_0")[:, :16].unbind(0) if name == "layers.1" else ()
    wanted, choice, figures, _ = part(x.float(), *inputs)
    compute_in_fp32(model, [name], torch.bfloat16)
    found = part(x, *inputs)
    assert found[0].dtype is torch.bfloat16
    assert torch.equal(found[0], wanted.bfloat16())
    assert torch.equal(found[1], choice)
    assert torch.equal(found[2], figures)


@functools.cache
def resolved_with(*words: str, world_size: int = 4) -> object:
    given = ["--model.tokenizer_path=bytes", *words]
    return resolved(load_config(given), world_size)


MOE = "--model.name=qwen3_moe"
EP = "--parallelism.expert_parallel_degree="
EARLY = "--optimizer.early_step_in_backward=true --training.max_norm=inf"
SPLIT_BACKWARD = """--parallelism.pipeline_parallel_degree=2 --activation_checkpoint.mode=full
--parallelism.pipeline_parallel_schedule=ZBVZeroBubble --compile.enable=false
--training.global_batch_size=16"""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{EP}2", "the model has no experts"),
        ("--experts.balance_loss=0.1", "experts.balance_loss = 0.1: the model has no experts"),
        (f"{MOE} {EP}3", "(?s)must divide the 4 ranks .* use 1, 2 or 4"),
        (f"{MOE} {EP}4 --model.args.n_experts=6 --model.args.n_active=2", "use 1 or 2"),
        (f"{MOE} --model.args.n_active=17", "n_active = 17: must be at most n_experts = 16"),
        (f"{MOE} --model.args.n_active=1", "the router does not learn"),
        (f"{MOE} --model.args.n_dense_layers=6", "below n_layers = 6"),
        ("--model.name=olmoe --model.args.head_dim=48", "dim / n_heads = 32: use 32"),
        (f"{MOE} --checkpoint.initial_load_upcycle_noise=0.1", "noise = 0.1: nothing is loaded"),
        (f"{MOE} --float8.enable=true --float8.emulate=true", "experts in float8 are not"),
        (f"{MOE} {EARLY}", "is not proved to train experts"),
        (f"{MOE} {SPLIT_BACKWARD}", "goes backward twice"),
    ],
)
def test_bad_input_is_refused_in_one_line(words, message) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolved_with(*words.split())
    assert "fix:" in str(caught.value) or "use" in str(caught.value)


def test_what_a_familys_files_cannot_say_is_refused_before_training(monkeypatch, tmp_path) -> None:
    of_debug = dataclasses.asdict(MODELS["qwen3_moe"].flavors["debugmodel"])
    flavors = {"debugmodel": BiasedArgs(**of_debug)}
    family = dataclasses.replace(MODELS["qwen3_moe"], args=BiasedArgs, flavors=flavors)
    monkeypatch.setitem(MODELS, "biased", dataclasses.replace(family, name="biased"))
    with pytest.raises(ConfigError, match="last_save_in_hf = true: qwen3_moe has no experts with"):
        resolved_with("--model.name=biased", "--checkpoint.last_save_in_hf=true")
    args = resolved_with("--model.name=biased").model_args
    with pytest.raises(ConfigError, match="cannot hold this model: qwen3_moe has no experts with"):
        check_hf_folder(NamedPath("HF", tmp_path), family.hf, args)
    with pytest.raises(ConfigError, match=r"upcycle_noise = 0.1: qwen3_moe has no experts with"):
        family_there(Checkpoint(initial_load_upcycle_noise=0.1), args, family)


def test_biases_of_experts_do_not_decay() -> None:
    found = {
        name: settings_of(name, one, Optimizer(weight_decay=0.1)).weight_decay
        for name, one in BIASED.parameters.items()
    }
    biases = {"router.bias", *(f"experts.b{number}" for number in (1, 2, 3))}
    assert {name for name, decay in found.items() if decay == 0} == biases


def test_torch_before_2_12_cannot_shard_experts_over_another_mesh(monkeypatch) -> None:
    def pretend(version: str) -> None:
        for module in ("system.modules", "parallelisms.rules.degrees"):
            monkeypatch.setattr(f"meshwright.{module}.torch_version", lambda: version)

    own = load_config(["--model.tokenizer_path=bytes", MOE, EP + "2"])
    pretend("2.12.1+cu130")
    resolved(own, 2)
    pretend("2.11.0")
    with pytest.raises(ConfigError, match="which torch 2.11.0 cannot"):
        resolved(own, 2)
    config = load_config([MOE])  # prove takes the meshes that are left
    args = resolve_model(config)[1]
    small = shrink(config, args)
    for cases in (default_cases(config, small, args), every_mesh(small, args)):
        assert cases
        assert all(map(can_run, cases))


@pytest.mark.parametrize("groups", [(3, 1), (16, 1), (8, 2), (4, 5)])
def test_groups_that_cannot_be_are_refused(groups) -> None:
    n_groups, n_active_groups = groups
    with pytest.raises(ValueError, match=f"n_groups = {n_groups}: "):
        dataclasses.replace(SPEC, n_groups=n_groups, n_active_groups=n_active_groups)


def test_active_parameters_are_those_that_a_token_meets() -> None:
    args = Qwen3MoeArgs(2048, 48, 32, 4, 6144, 151936, head_dim=128)
    assert round(args.table.num_active_params / 1e9, 3) == 3.353
    layer = LayerSpec(SMALL.table.layers[0].attention, BIASED, "pre", 1e-5)
    table = dataclasses.replace(SMALL.table, layers=(layer,))
    idle = 5 * (3 * 24 * 32 + 24 + 32 + 24)  # 8 experts, of which a token meets 3
    assert table.num_params - table.num_active_params == idle
    assert table.parameters["layers.0.feed_forward.experts.b2"].role == "bias"
