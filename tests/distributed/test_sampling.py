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


MESHES = {
    "fsdp": (FSDP, {}),
    "tied-tp": (TP, {"args": TIED}),
    "cp": (CP, {}),
    "DualPipeV": (PP, SCHEDULES["DualPipeV"]),
    "pp-tp": (dataclasses.replace(PP, tp=2), SCHEDULES["ZBVZeroBubble"]),
    "pp-cp": (dataclasses.replace(PP, cp=2), SCHEDULES["Interleaved1F1B"]),
}


@pytest.mark.parametrize(("dims", "options"), slow_but("tied-tp cp DualPipeV", MESHES))
@pytest.mark.ranks("dims")
def test_texts_are_those_of_plain_pytorch(dims, options) -> None:
    """Without and with an end, and with the mask of packed documents."""
    want = reference(args_of(dims, options))
    eos_id = want[1][3]
    cut = [text[: text.index(eos_id)] if eos_id in text else text for text in want]
    assert len(cut[1]) <= 3 < max(map(len, cut))
    job = job_of(dims, options)
    assert texts_of(job) == texts_of(job, mask_documents=True) == want
    assert texts_of(job, eos_id=eos_id) == cut
    outputs = [stage.output for stage in job.model.stages if stage.output is not None]
    assert not any(isinstance(output.loss, NextToken) for output in outputs)


@pytest.mark.ranks(2)
def test_a_job_that_is_asked_to_stop_does_not_wait_for_texts() -> None:
    asked = iter([False, False, True, True])
    assert texts_of(job_of(FSDP, {}), is_stopped=lambda: next(asked)) is None
    assert len([*asked]) == 1
