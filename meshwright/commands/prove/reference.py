"""The one-process reference of `prove`, compared with plain PyTorch.

Every case equals the reference, so a fault that one process has as well would pass all of them.
"""

import dataclasses
import math
import time
from contextlib import closing

import torch

from meshwright.commands.prove.cases import reference_case
from meshwright.commands.prove.checked import Checked
from meshwright.commands.prove.plain_decoder import FORMS, angles
from meshwright.commands.prove.plain_optimizer import SHIPPED, kept_share, schedule
from meshwright.commands.prove.ranks import RankError, RankPool
from meshwright.commands.prove.reference_steps import UNIT, bound_of_muon, compare_steps
from meshwright.config.job_config import JobConfig
from meshwright.models.args import DecoderArgs
from meshwright.models.decoder import Decoder
from meshwright.train.optim.optimizers import learning_rate
from meshwright.train.optim.registry import average_decay
from meshwright.train.resolve_model import resolve_model

FP64 = 1e-12
"""Relative error of a few operations in fp64, and of a difference from 1 in them."""


def check_reference(config: JobConfig, small: JobConfig) -> Checked:
    """Compare in a process of its own.

    Args:
        config: the user's, for the rotary table and the schedule at their real length.
        small: from `shrink`.
    """
    start = time.perf_counter()
    checked = Checked()
    with closing(RankPool(1)) as pool:
        try:
            (checked,) = pool.run(compare_with_plain, config, small)
        except RankError as error:
            checked.fail("stopped:", [str(error)])
    checked.seconds = time.perf_counter() - start
    return checked


def compare_with_plain(config: JobConfig, small: JobConfig) -> Checked:
    """Compare on this one process, which is a group."""
    checked, small = Checked(), reference_case(small).config
    family, args = resolve_model(config)
    _compare_schedule(checked, config)
    if family.name not in FORMS:
        line = f'the model "{family.name}" is not one of {", ".join(FORMS)}'
        checked.not_checked.append(line)
        return checked
    checked.not_checked += not_modeled(config)
    compare_rope(checked, args, config.training.seq_len)
    compare_steps(checked, small)
    return checked


def not_modeled(config: JobConfig) -> list[str]:
    """Return what a config asks for and plain PyTorch does not do."""
    optimizer = config.optimizer
    used = {optimizer.name, *(group.optimizer for group in optimizer.groups)} - {None}
    muon = optimizer.muon
    found = {
        f'updates by your optimizer "{name}"': name not in SHIPPED
        for name in sorted(map(str, used))
    }
    found |= {
        f"updates by Muon in {muon.steps} steps, in which rounding grows": "muon" in used
        and bound_of_muon(muon.coefficients[0], muon.steps) >= 0.1,
        f"optimizer.muon.dtype = {muon.dtype}": "muon" in used and muon.dtype != "float32",
        f"training.dtype = {config.training.dtype}": config.training.dtype != "float32",
        "float8.enable": config.float8.enable,
        "bad_steps.spike_std": config.bad_steps.spike_std > 0,
    }
    return [text for text, is_asked_for in found.items() if is_asked_for]


def _compare_schedule(checked: Checked, config: JobConfig) -> None:
    """Compare the learning rate at up to 2000 steps of the job, and the share of the EMA."""
    steps, peak = config.training.steps, config.optimizer.lr
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


def compare_rope(checked: Checked, args: DecoderArgs, seq_len: int) -> None:
    """Compare the model's table of cosines and sines at the user's length.

    An angle is a position times a frequency, theta^-e. In fp32, rounding e changes theta^-e by the
    factor e ln(theta) x `UNIT`; the product, and the mixing of `rope_scaling`, round a few times
    more.
    """
    with torch.device("meta"):
        decoder = Decoder(args, seq_len)
    for name in ("cos", "sin"):
        cache = torch.empty(decoder.get_buffer(name).shape, dtype=torch.float32)
        decoder.register_buffer(name, cache, persistent=False)
    decoder.init_buffers()
    own = dataclasses.asdict(args)
    scaling = own.get("rope_scaling")
    spread = 1.0
    if scaling:
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        spread += scaling["factor"] * high / (high - low)
    roundings = (math.log(own["rope_theta"]) + 4) * spread
    for first in range(0, seq_len, 4096):
        positions = torch.arange(first, min(first + 4096, seq_len), dtype=torch.float64)
        angle = angles(own, positions)
        bound = UNIT * (4 + roundings * angle)
        for cache, want in ((decoder.cos, angle.cos()), (decoder.sin, angle.sin())):
            error = (cache[first : first + len(angle)] - want).abs()
            if (wrong := (~(error <= bound)).nonzero()).numel():
                row, pair = wrong[0].tolist()
                text = f"{cache[first + row, pair]:.7g} instead of {want[row, pair]:.7g}"
                checked.fail(
                    "RoPE", [f"at position {first + row}: pair {pair} of a head has {text}"]
                )
                return
