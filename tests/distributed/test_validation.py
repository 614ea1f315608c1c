"""Evaluation and texts on several ranks: the same as on one, and training notices neither."""

import dataclasses
import functools
import math
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from meshwright.config.loader import load_config
from meshwright.config.training import Source
from meshwright.datasets.cached_source import CachedSource
from meshwright.datasets.files import SourceEntry
from meshwright.metrics.sinks import validation_loss
from meshwright.models.families.llama import LlamaArgs
from meshwright.models.loss import IGNORE, Batch
from meshwright.parallelisms.rules.degrees import ParallelDims
from meshwright.train import validation as parts
from meshwright.train.sample_texts import NextToken, continue_prompts
from meshwright.train.validation import evaluate, figures_of
from tests.distributed.test_compile import Graphs
from tests.helpers.fsdp import groups_of
from tests.helpers.job import DEEP, SCHEDULES, Job, assert_equal, global_batch, mesh
from tests.helpers.operators import Operators
from tests.helpers.packed import one_by_one, packed
from tests.helpers.resolved import resolved
from tests.helpers.slow import slow_but
from tests.helpers.tiny import SEQ_LEN, TIED, TINY, plain_model

FSDP, TP, CP, PP = (mesh(**{axis: 2}) for axis in ("dp_shard", "tp", "cp", "pp"))
PACKED = [packed(1), packed(2)]
TOKEN_BYTES = (torch.arange(TINY.vocab_size) + 1) % 5  # token 0 has some, too


def args_of(dims: ParallelDims, options: dict) -> LlamaArgs:
    return options.get("args", DEEP if dims.pp > 1 else TINY)


def job_of(dims: ParallelDims, options: dict) -> Job:
    num_microbatches = 4 if dims.pp > 1 else 2
    return Job(
        dims, num_microbatches=num_microbatches, **{"args": args_of(dims, options)} | options
    )


def data() -> list[Batch]:
    """Global batches of an evaluation. Of the last only one sequence is there: most ranks have
    nothing to count in it."""
    last = Batch(*global_batch(9))
    last.labels[:3] = last.labels[4:] = IGNORE
    return [Batch(*global_batch(8)), last]


def evaluation_of(job: Job, batches: list[Batch]) -> tuple[float, int, int]:
    return evaluate(job.model, map(job.part, batches), job.meshes, TOKEN_BYTES)


PROMPTS = [[5], [7, 11, 2, 90, 3], [130, 1, 4], [9, 9], [64, 8, 21, 20]]
NUM_TOKENS = SEQ_LEN - max(map(len, PROMPTS))


def texts_of(
    job: Job,
    *,
    num_tokens: int = NUM_TOKENS,
    stop: frozenset[int] = frozenset(),
    mask_documents: bool = False,
    is_stopped: Callable[[], bool] = lambda: False,
) -> list[list[int]] | None:
    """Tokens after each of `PROMPTS`; a microbatch may have fewer sequences."""
    return continue_prompts(
        job.model,
        PROMPTS,
        job.meshes,
        shape=job.part(data()[0])[0].tokens.shape,
        num_tokens=num_tokens,
        stop=stop,
        mask_documents=mask_documents,
        is_stopped=is_stopped,
    )


# --- what it finds ---


@functools.cache
def reference(args: LlamaArgs, is_packed: bool) -> tuple[float, int, int]:
    """Loss, labels and bytes, by a plain model in fp64."""
    batches = PACKED if is_packed else data()
    model = plain_model(args).double()
    total, num_labels, num_bytes = 0.0, 0, 0
    with torch.no_grad():
        for batch in batches:
            counted = batch.labels[batch.labels != IGNORE]
            if batch.documents is None:
                logits = model(batch.tokens).flatten(0, 1)
                loss = F.cross_entropy(logits, batch.labels.flatten(), ignore_index=IGNORE)
            else:
                loss = one_by_one(model, batch)
            total += loss.item() * len(counted)
            num_labels += len(counted)
            num_bytes += int(TOKEN_BYTES[counted].sum())
    return total / num_labels, num_labels, num_bytes


def _evaluations(dims: ParallelDims, options: dict) -> list[tuple[float, int, int]]:
    """Of sequences, of packed ones, and of none that counts."""
    job = job_of(dims, options)
    nothing = Batch(data()[0].tokens, torch.full_like(data()[0].labels, IGNORE))
    return [evaluation_of(job, batches) for batches in (data(), PACKED, [nothing])]


MESHES = {
    "fsdp": (FSDP, {}),
    "tied-tp": (TP, {"args": TIED}),
    "tp-chunks": (TP, {"loss_chunk_tokens": 5}),
    "cp": (CP, {}),
    "DualPipeV": (PP, SCHEDULES["DualPipeV"]),
    "pp-tp": (dataclasses.replace(PP, tp=2), SCHEDULES["ZBVZeroBubble"]),
    "pp-cp": (dataclasses.replace(PP, cp=2), SCHEDULES["Interleaved1F1B"]),
}


@pytest.mark.parametrize(("dims", "options"), slow_but("fsdp tied-tp cp DualPipeV", MESHES))
def test_evaluation_equals_plain_pytorch(on_ranks, dims, options) -> None:
    evaluations = on_ranks(dims.num_ranks, _evaluations, dims, options)
    assert all(evaluation[:2] == evaluations[0][:2] for evaluation in evaluations)
    wants = [reference(args_of(dims, options), is_packed) for is_packed in (False, True)]
    *seen, nothing = evaluations[0]
    for got, (loss, num_labels, num_bytes) in zip(seen, wants, strict=True):
        assert got[1:] == (num_labels, num_bytes)
        figures = figures_of(*got)
        assert figures["loss"] == pytest.approx(loss, rel=1e-6)
        assert figures["perplexity"] == pytest.approx(math.exp(figures["loss"]), rel=1e-12)
        bits = loss * num_labels / math.log(2)
        assert figures["bits_per_byte"] == pytest.approx(bits / num_bytes, rel=1e-6)
    assert nothing == (0, 0, 0)
    assert all(map(math.isnan, figures_of(*nothing).values()))


def test_a_source_that_was_not_read_to_its_end_has_no_figures(monkeypatch) -> None:
    plan = resolved(load_config(["--job.config_file", "tests/integration/tiny.toml"]), 1)
    monkeypatch.setattr(parts, "evaluate", lambda *_: (1.0, 1, 1))
    sources = [CachedSource(SourceEntry("validation", name, Source()), Mock()) for name in "ab"]
    validate = parts.Validation(plan, sources, Mock(), torch.device("cpu"))
    is_stopped = Mock(side_effect=[False, True])
    figures = validate(Mock(), is_stopped, Mock())
    assert {name.split("/")[1] for name in figures} == {"a"}


def test_the_loss_of_several_sets_is_their_mean_beside_each(monkeypatch) -> None:
    """Whatever their sizes: it's one number to judge runs by."""
    resolved_job = resolved(load_config(["--job.config_file", "tests/integration/tiny.toml"]), 1)
    sums = Mock(side_effect=[(2.0, 2, 1), (30.0, 10, 1)])
    monkeypatch.setattr(parts, "evaluate", sums)
    sources = [CachedSource(SourceEntry("validation", name, Source()), Mock()) for name in "ab"]
    validate = parts.Validation(resolved_job, sources, Mock(), torch.device("cpu"))
    figures = validate(Mock(), lambda: False, Mock())
    losses = {name: value for name, value in figures.items() if name.endswith("/loss")}
    assert losses == {"validation/a/loss": 1, "validation/b/loss": 3, "validation/loss": 2}
    assert validation_loss(figures | {"validation/loss": 2.5}) == 2.5
    assert validation_loss({"validation/a/loss": 1.0, "validation/b/loss": 3.0}) == 2


def test_a_source_without_a_label_says_why_it_has_no_loss(monkeypatch, caplog) -> None:
    plan = resolved(load_config(["--job.config_file", "tests/integration/tiny.toml"]), 1)
    monkeypatch.setattr(parts, "evaluate", Mock(side_effect=[(0.0, 0, 0), (0.0, 1, 1)]))
    names = ("chats", "text")
    sources = [CachedSource(SourceEntry("validation", name, Source()), Mock()) for name in names]
    validate = parts.Validation(plan, sources, Mock(), torch.device("cpu"))
    assert math.isnan(validate(Mock(), lambda: False, Mock())["validation/chats/loss"])
    (said,) = caplog.messages
    assert said.startswith("validation on chats has no loss: none of its labels counts")


def test_a_tokenizer_that_does_not_tell_its_bytes_has_loss_and_perplexity(monkeypatch) -> None:
    """It was accepted, and the job ended at its first validation."""
    plan = resolved(load_config(["--job.config_file", "tests/integration/tiny.toml"]), 1)
    words = Mock(wraps=plan.tokenizer, vocab_size=plan.tokenizer.vocab_size, token_bytes=None)
    plan = dataclasses.replace(plan, tokenizer=words)
    monkeypatch.setattr(parts, "evaluate", lambda *_: (1.0, 1, 0))
    sources = [CachedSource(SourceEntry("validation", "a", Source()), Mock())]
    validate = parts.Validation(plan, sources, Mock(), torch.device("cpu"))
    figures = validate(Mock(), lambda: False, Mock())
    assert figures.keys() == {"validation/loss", "validation/perplexity"}


def test_few_samples_do_not_depend_on_the_seed_and_all_come_as_they_lie(monkeypatch) -> None:
    words = ["--job.config_file", "tests/integration/tiny.toml", "--training.seed=7"]
    source = CachedSource(SourceEntry("validation", "a", Source()), Mock(num_tokens=1 << 20))
    seeds = []
    monkeypatch.setattr(parts, "build_stream", lambda *given: seeds.append(given[-1].seed))
    for num_samples in (5, -1):
        plan = resolved(load_config([*words, f"--validation.num_samples={num_samples}"]), 1)
        parts.Validation(plan, [source], Mock(), torch.device("cpu"))._read(source)
    assert seeds == [0, None]


def test_a_perplexity_beyond_a_float_is_infinite() -> None:
    assert figures_of(1e4, num_labels=1, num_bytes=0)["perplexity"] == math.inf


@functools.cache
def reference_texts(args: LlamaArgs) -> list[list[int]]:
    """The likeliest tokens, by a plain model that sees no padding."""
    model, texts = plain_model(args), []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        texts.append(tokens[len(prompt) :])
    return texts


@pytest.mark.parametrize(("dims", "options"), slow_but("cp DualPipeV", MESHES))
@pytest.mark.ranks("dims")
def test_texts_are_those_of_plain_pytorch(dims, options) -> None:
    """Without and with an end, and with the mask of packed documents."""
    want = reference_texts(args_of(dims, options))
    eos_id = want[1][3]
    cut = [text[: text.index(eos_id)] if eos_id in text else text for text in want]
    assert len(cut[1]) <= 3 < max(map(len, cut))
    job = job_of(dims, options)
    assert texts_of(job) == texts_of(job, mask_documents=True) == want
    assert texts_of(job, stop=frozenset({eos_id})) == cut
    outputs = [stage.output for stage in job.model.stages if stage.output is not None]
    assert not any(isinstance(output.loss, NextToken) for output in outputs)


@pytest.mark.ranks(2)
def test_a_job_that_is_asked_to_stop_does_not_wait_for_texts() -> None:
    asked = iter([False, False, True, True])
    assert texts_of(job_of(FSDP, {}), is_stopped=lambda: next(asked)) is None
    assert len([*asked]) == 1


# --- that training does not notice it ---


def _state(job: Job) -> dict[str, torch.Tensor]:
    """All that a step could find changed: weights, optimizer, buffers, random numbers."""
    state = job.weights()
    names = {parameter: name for name, parameter in job.model.named_parameters()}
    for parameter, slots in job.optimizer.state.items():
        for slot, tensor in slots.items():
            state[f"{names[parameter]}.{slot}"] = local(tensor).clone()
    for number, stage in enumerate(job.model.stages):
        state |= {f"{number}.{name}": buffer.clone() for name, buffer in stage.named_buffers()}
    return state | {"random": torch.get_rng_state()}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _training(dims: ParallelDims, options: dict, is_evaluated: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    job = job_of(dims, options)
    for step in (1, 2):
        if is_evaluated:
            for _ in range(step):  # before the first step, and one after another before the second
                evaluation_of(job, data())
                assert texts_of(job, num_tokens=2)
            assert all(parameter.grad is None for parameter in job.model.parameters())
        job.take_step(step)
    return _state(job)


TRAINING = {
    "fsdp-never": (FSDP, {"reshard_after_forward": "never"}),
    "offload": (FSDP, {"enable_cpu_offload": True}),
    "tied-bf16": (FSDP, {"args": TIED, "param_dtype": torch.bfloat16}),
    "tp": (TP, {}),
    "cp-op": (CP, {"ac_mode": "selective"}),
    "Interleaved1F1B": (PP, SCHEDULES["Interleaved1F1B"]),
    "pp-fsdp-always": (
        dataclasses.replace(FSDP, pp=2),
        SCHEDULES["ZBVZeroBubble"] | {"reshard_after_forward": "always"},
    ),
    "pp-early": (PP, SCHEDULES["1F1B"] | {"is_early": True}),
    "compiled-op": (FSDP, {"compile_backend": "aot_eager", "ac_mode": "selective"}),
    "compiled-pp": (PP, SCHEDULES["1F1B"] | {"compile_backend": "aot_eager"}),
}


@pytest.mark.parametrize(
    ("dims", "options"),
    slow_but("fsdp-never offload tp cp-op Interleaved1F1B pp-early", TRAINING),
)
@pytest.mark.ranks("dims")
def test_training_is_to_the_bit_that_without_evaluation_and_texts(dims, options) -> None:
    states, graphs = [], []
    for is_evaluated in (True, False):
        counter = Graphs()
        states.append(_training(dims, options, is_evaluated))
        graphs.append(counter.new())
    assert_equal(*states)
    # all evaluations have one graph in common
    assert graphs[0] - graphs[1] == ("compile_backend" in options)


def _gathered_in_steps(dims: ParallelDims, options: dict, is_evaluated: bool) -> list[int]:
    """All-gathers of each step."""
    job = job_of(dims, options)
    counts = []
    for step in (1, 2, 3):
        with Operators() as counter:
            job.take_step(step)
        counts.append(counter.counts["c10d._allgather_base_"])
        if is_evaluated:
            evaluation_of(job, data())
            texts_of(job, num_tokens=2)
        for stage in job.model.stages:
            assert not fully_shard.state(stage)._comm_ctx.post_forward_order
        assert all(group.is_sharded for group in groups_of(job.model))
    return counts


@pytest.mark.parametrize(
    ("dims", "options"),
    [(FSDP, {}), (dataclasses.replace(FSDP, pp=2), SCHEDULES["1F1B"])],
    ids=["fsdp", "pp"],
)
@pytest.mark.ranks("dims")
def test_a_step_after_an_evaluation_gathers_no_more(dims, options) -> None:
    got, want = (_gathered_in_steps(dims, options, is_evaluated) for is_evaluated in (True, False))
    assert got == want
