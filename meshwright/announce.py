"""What a job says when it starts."""

import dataclasses
import os
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright import hardware
from meshwright.config.loader import to_toml
from meshwright.log import logger
from meshwright.optim.groups import describe
from meshwright.preflight import Plan

CHECKED = "MESHWRIGHT_CHECKED"
"""Set in the environment where `meshwright check` has spoken to the same console."""


def announce(plan: Plan, device: torch.device) -> None:
    """Say once what is going to run, and keep it beside the results."""
    config, args = plan.config, plan.model_args
    if config.job.description:
        logger.info("%s", config.job.description)
    logger.info("config, where it differs from the defaults:\n%s", to_toml(config, True).strip())
    for text in plan.idle_options:
        logger.info("%s", text, extra={"is_said": CHECKED in os.environ})
    degrees = dataclasses.asdict(plan.dims).items()
    logger.info(
        "%s %s: %s parameters; %d ranks (%s) on %s; torch %s",
        config.model.name,
        config.model.flavor,
        f"{args.table.num_params:,}",
        dist.get_world_size(),
        " x ".join(f"{axis} {degree}" for axis, degree in degrees if degree > 1) or "no mesh",
        hardware.device_name(device),
        torch.__version__,
    )
    num_dims = {name: len(shape) for name, shape in args.parameter_shapes().items()}
    logger.info("%s", describe(config.optimizer, num_dims, plan.frozen))
    if dist.get_rank() == 0:
        path = Path(config.job.dump_folder) / "config.toml"
        unfinished = path.with_suffix(".tmp")
        try:
            unfinished.write_text(to_toml(config), "utf-8")
            unfinished.replace(path)
        except OSError as error:  # a full disk: training can go on
            logger.warning("%s cannot be written: %s", path, error)
            unfinished.unlink(missing_ok=True)
