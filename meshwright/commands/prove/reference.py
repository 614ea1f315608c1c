"""The one-process reference of `prove`, compared with plain PyTorch.

Every case equals the reference, so a fault that one process has as well would pass all of them.
"""

import dataclasses
import math
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from meshwright.commands.prove.cases import reference_case
from meshwright.commands.prove.checked import Checked
from meshwright.commands.prove.plain_decoder import FORMS, amplitude, angles, frequencies, shapes
from meshwright.commands.prove.plain_optimizer import (
    SCHEDULES,
    SHIPPED,
    kept_share,
    schedule,
    spikes,
)
from meshwright.commands.prove.ranks import RankError, RankPool
from meshwright.commands.prove.reference_steps import TOO_WIDE, UNIT, bound_of_muon, compare_steps
from meshwright.commands.prove.weights import in_short_chunks
from meshwright.config.job_config import JobConfig
from meshwright.config.training import BadSteps
from meshwright.models.decoder import Decoder
from meshwright.train.bad_steps import BadStepDetector
from meshwright.train.losses import CROSS_ENTROPY
from meshwright.train.optim.registry import average_decay
from meshwright.train.optim.schedules import learning_rate
from meshwright.train.resolve_model import resolve_model

SHAPE = "shape"
"""The quantity of `compare_shapes`."""

FP64 = 1e-12
"""Relative error of a few operations in fp64, and of a difference from 1 in them."""


def check_reference(config: JobConfig, small: JobConfig, backend: str = "gloo") -> Checked:
    """Compare in a separate process.

    Args:
        config: the user's, for the rotary table and the schedule at their real length.
        small: from `shrink`.
        backend: of the process, as `RankPool` takes it.
    """
    checked = Checked()
    with closing(RankPool(1, backend=backend)) as pool:
        try:
            (checked,) = pool.run(compare_with_plain, config, small)
        except RankError as error:
            checked.fail("stopped:", [str(error)])
    return checked


@in_short_chunks
def compare_with_plain(config: JobConfig, small: JobConfig) -> Checked:
    """Compare on this process only."""
    start, checked = time.perf_counter(), Checked()
    family, args = resolve_model(config)
    _compare_schedule(checked, config)
    if family.name not in FORMS:
        line = f'the model "{family.name}" is not one of {", ".join(FORMS)}'
        checked.not_checked.append(line)
        return checked
    checked.not_checked += not_modeled(config)
    compare_spikes(checked, config.bad_steps)
    with torch.device("meta"):
        decoder = Decoder(args, config.training.seq_len)
    compare_rope(checked, family.name, decoder)
    compare_shapes(checked, family.name, decoder)
    has_own_loss = config.training.loss != CROSS_ENTROPY
    if SHAPE not in checked.lines and not has_own_loss:  # else plain PyTorch couldn't take them
        compare_steps(checked, reference_case(small).config)
    checked.seconds = time.perf_counter() - start
    return checked


def not_modeled(config: JobConfig) -> list[str]:
    """Return the options of a config that plain PyTorch doesn't have."""
    optimizer = config.optimizer
    used = {optimizer.name, *(group.optimizer for group in optimizer.groups)} - {None}
    muon = optimizer.muon
    found = {
        f'updates by your optimizer "{name}"': name not in SHIPPED
        for name in sorted(map(str, used))
    }
    found |= {
        f"updates by Muon in {muon.steps} steps, in which rounding grows": "muon" in used
        and bound_of_muon(muon.coefficients[0], muon.steps) >= TOO_WIDE,
        f"optimizer.muon.dtype = {muon.dtype}": "muon" in used and muon.dtype != "float32",
        f"training.dtype = {config.training.dtype}": config.training.dtype != "float32",
        "float8.enable": config.float8.enable,
        f'steps with your loss "{config.training.loss}"': config.training.loss != CROSS_ENTROPY,
    }
    return [text for text, is_asked_for in found.items() if is_asked_for]


def _compare_schedule(checked: Checked, config: JobConfig) -> None:
    """Compare the learning rate at up to 2000 steps of the job, and the share of the EMA."""
    steps, peak = config.training.steps, config.optimizer.lr
    if config.lr_scheduler.name not in SCHEDULES:
        checked.not_checked.append(
            f'the learning rate of your schedule "{config.lr_scheduler.name}"'
        )
        return
    lr_at, count = learning_rate(config, steps), min(steps, 2000)
    for number in range(count):
        step = 1 + number * (steps - 1) // max(count - 1, 1)
        want = peak * schedule(step, steps, config.lr_scheduler)
        bound = FP64 * peak / (want or peak)
        checked.number("learning rate", f"of step {step} of {steps}", lr_at(step), want, bound)
    if config.training.global_batch_size > 0:  # otherwise the number of ranks decides
        got = average_decay(config) or 0.0
        want = kept_share(config.checkpoint.average, config.tokens_per_step) or 0.0
        checked.number("share", "that a step keeps of the EMA", got, want, FP64)


def compare_spikes(checked: Checked, config: BadSteps) -> None:
    """Compare which of many steps are loss spikes, if the config looks for some.

    Losses are random around 5. Once a window is full, every fifth is set to a multiple of the
    allowed distance: after the largest, which must not widen it, one follows that is just above.
    """
    if not config.spike_std:
        return
    window = min(config.spike_window, 100)
    values = 5 + 0.1 * torch.randn(window + 50, generator=torch.Generator().manual_seed(0))
    multiples = torch.tensor([0.5, 3.0, 1.2, 1.2, 0.8]).repeat(2)
    values[window::5] = 5 + 0.1 * config.spike_std * multiples
    update = {"policy": "skip", "budget": len(values), "spike_window": window}
    detector = BadStepDetector(values.device, config.model_copy(update=update))
    is_finite, labels = torch.tensor(True), torch.tensor(1)
    wanted = spikes(values.tolist(), config.spike_std, window)
    for step, (value, want) in enumerate(zip(values, wanted, strict=True), 1):
        got = bool(detector.judge(step, value, torch.ones(()), is_finite, labels))
        if got != want:
            words = "one instead of none" if got else "none instead of one"
            checked.fail("loss spike", [f"in step {step} of {len(values)}: {words}"])


def compare_shapes(checked: Checked, name: str, decoder: Decoder) -> None:
    """Compare the names and shapes of the user's weights."""
    wanted = shapes(name, dataclasses.asdict(decoder.args))
    got = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
    wrong = [name for name in sorted({*wanted, *got}) if wanted.get(name) != got.get(name)]
    if wrong:
        first, more = wrong[0], f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        text = f"{got.get(first, 'absent')} instead of {wanted.get(first, 'absent')}{more}"
        checked.fail(SHAPE, [f"of {first}: {text}"])


def compare_rope(checked: Checked, family: str, decoder: Decoder) -> None:
    """Compare the tables of cosines and sines of a decoder on meta, at the user's length: that of
    each layer, where they differ."""
    for name, rope in decoder.rope_caches.items():
        cache = torch.empty(2, decoder.seq_len, rope.head_dim // 2, dtype=torch.float32)
        decoder.register_buffer(name, cache, persistent=False)
    decoder.init_buffers()
    names = {rope: name for name, rope in decoder.rope_caches.items()}
    own = dataclasses.asdict(decoder.args)
    compared = set[tuple[str, float, tuple[float, ...]]]()
    for number, layer in enumerate(decoder.table.layers):
        if layer.attention.rope is None:
            continue
        name = names[layer.attention.rope]
        of_layer = family, own, number
        wanted = name, amplitude(*of_layer), tuple(frequencies(*of_layer).tolist())
        if wanted in compared:
            continue
        compared.add(wanted)
        if wrong := _wrong_angle(family, own, number, decoder.get_buffer(name)):
            checked.fail("RoPE", [f"{wrong}, in layer {number}"])
            return


def _wrong_angle(family: str, args: Mapping[str, Any], layer: int, cache: Tensor) -> str:
    """Return the first entry of a layer's table, (2, S, H/2), that is wrong; "": all are right.

    An angle is a position times a frequency, theta^-e. In fp32, rounding e changes theta^-e by the
    factor e ln(theta) x `UNIT`; the product, and the mixing of `rope_scaling`, round a few times
    more.
    """
    scaling, spread = args.get("rope_scaling"), 1.0
    if scaling and "low_freq_factor" in scaling:
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        spread += scaling["factor"] * high / (high - low)
    elif scaling:
        spread += scaling["factor"]
    roundings = (math.log(args["rope_theta"]) + 4) * spread
    scale = amplitude(family, args, layer)
    for first in range(0, cache.shape[1], 4096):
        last = min(first + 4096, cache.shape[1])
        positions = torch.arange(first, last, dtype=torch.float64)
        angle = angles(family, args, positions, layer)
        bound = UNIT * (4 + roundings * angle) * scale
        for half, want in zip(cache, (angle.cos() * scale, angle.sin() * scale), strict=True):
            error = (half[first:last] - want).abs()
            if (wrong := (~(error <= bound)).nonzero()).numel():
                row, pair = wrong[0].tolist()
                values = f"{half[first + row, pair]:.7g} instead of {want[row, pair]:.7g}"
                return f"at position {first + row}: pair {pair} of a head has {values}"
    return ""
