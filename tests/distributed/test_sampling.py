"""Texts of a model in training: the same on every mesh, and those of a plain loop."""

import dataclasses
import functools

import pytest
import torch

from meshwright.models.families.llama import LlamaArgs
from meshwright.train.validation import NextToken
from tests.distributed.test_validation import (
    CP,
    FSDP,
    NUM_TOKENS,
    PP,
    PROMPTS,
    TP,
    args_of,
    job_of,
    texts_of,
)
from tests.helpers.job import SCHEDULES
from tests.helpers.slow import slow_but
from tests.helpers.tiny import TIED, plain_model


@functools.cache
def reference(args: LlamaArgs) -> list[list[int]]:
    """The likeliest tokens, by a plain model that sees no padding."""
    model, texts = plain_model(args), []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        texts.append(tokens[len(prompt) :])
    return texts


def _texts(dims, options: dict, eos_id: int) -> list:
    """Without and with an end, and with the mask of packed documents."""
    job = job_of(dims, options)
    texts = [texts_of(job), texts_of(job, eos_id=eos_id), texts_of(job, mask_documents=True)]
    outputs = [stage.output for stage in job.model.stages if stage.output is not None]
    assert not any(isinstance(output.loss, NextToken) for output in outputs)
    return texts


MESHES = {
    "fsdp": (FSDP, {}),
    "tied-tp": (TP, {"args": TIED}),
    "cp": (CP, {}),
    "DualPipeV": (PP, SCHEDULES["DualPipeV"]),
    "pp-tp": (dataclasses.replace(PP, tp=2), SCHEDULES["ZBVZeroBubble"]),
    "pp-cp": (dataclasses.replace(PP, cp=2), SCHEDULES["Interleaved1F1B"]),
}


@pytest.mark.parametrize(("dims", "options"), slow_but("tied-tp cp DualPipeV", MESHES))
def test_texts_are_those_of_plain_pytorch(on_ranks, dims, options) -> None:
    want = reference(args_of(dims, options))
    eos_id = want[1][3]
    cut = [text[: text.index(eos_id)] if eos_id in text else text for text in want]
    assert len(cut[1]) <= 3 < max(map(len, cut))
    for whole, ended, masked in on_ranks(dims.num_ranks, _texts, dims, options, eos_id):
        assert whole == masked == want
        assert ended == cut


def _stopped(dims) -> tuple[object, int]:
    asked = iter([False, False, True, True])
    return texts_of(job_of(dims, {}), is_stopped=lambda: next(asked)), len(list(asked))


def test_a_job_that_is_asked_to_stop_does_not_wait_for_texts(on_ranks) -> None:
    assert on_ranks(2, _stopped, FSDP) == [(None, 1)] * 2
