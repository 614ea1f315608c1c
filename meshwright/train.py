"""The job: build, loop, close."""

import contextlib
import dataclasses
import gc
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

import meshwright
from meshwright import hardware
from meshwright.agreement import check_agreement
from meshwright.bad_steps import BadStepLog
from meshwright.build import (
    build_loader,
    build_model,
    build_reporter,
    build_validation,
    learning_rate,
    set_first_values,
)
from meshwright.checkpoint import commit
from meshwright.checkpoint.exclude import DATALOADER, left_out
from meshwright.checkpoint.manager import CheckpointManager
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.state import TrainingTensors
from meshwright.config.changes import to_json
from meshwright.config.checks import check_device
from meshwright.config.job_config import Checkpoint, JobConfig
from meshwright.config.loader import config_errors, load_config, to_toml
from meshwright.datasets.global_order import Cursor, bad_records
from meshwright.datasets.loader import Loader, num_bad_records, whole_cursor
from meshwright.datasets.opening import OpenSource, open_training_data, open_validation_data
from meshwright.errors import (
    EXIT_CONFIG,
    EXIT_DATA,
    EXIT_INTERRUPTED,
    EXIT_SAVE,
    EXIT_STOPPED,
    EXIT_TRAINING,
    ConfigError,
    DataError,
    SaveError,
    TrainingError,
)
from meshwright.launch.process import LAUNCHER, die_with_parent
from meshwright.launch.stop import StopRequest
from meshwright.log import log_to_console, log_to_file, logger
from meshwright.metrics.record import Sink
from meshwright.optim.early_step import EarlyStep
from meshwright.optim.groups import describe
from meshwright.optim.optimizers import build_optimizer, set_learning_rate
from meshwright.parallelisms import ring_attention
from meshwright.parallelisms.activation_checkpoint import find_ops
from meshwright.parallelisms.memory import check_memory
from meshwright.parallelisms.meshes import build_meshes
from meshwright.parallelisms.process_group import barrier, set_timeout, start_process_group
from meshwright.preflight import Plan, check_first_weights, drift_of, preflight
from meshwright.profiling import build_profiler
from meshwright.step import train_step


def main() -> None:
    """Run the job that the command line describes; leave with its exit code."""
    if dist.is_torchelastic_launched():  # torchrun gives every rank a session of its own, so
        # nothing else would end it; without torchrun it may outlive its shell
        die_with_parent(int(os.environ.get(LAUNCHER, os.getppid())))
    log_to_console()
    code = 0
    try:
        if not _run_command_line():
            code = EXIT_STOPPED
    except ConfigError as error:
        print(f"meshwright: {error}", file=sys.stderr)
        code = EXIT_CONFIG
    except TrainingError as error:
        logger.error("stopped: %s", error)
        code = EXIT_TRAINING
    except DataError as error:
        logger.error("stopped: %s", error)
        code = EXIT_DATA
    except SaveError as error:
        logger.error("stopped: %s", error)
        code = EXIT_SAVE
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except Exception:
        logger.exception("failed")
        code = 1
    with contextlib.suppress(OSError):  # a full disk, where they go to files
        sys.stdout.flush()
        sys.stderr.flush()
    if (
        code in (EXIT_CONFIG, EXIT_TRAINING, EXIT_SAVE, EXIT_DATA)
        and int(os.environ.get("RANK", "0")) > 0
    ):
        time.sleep(SAID_BY_FIRST_S)
    # gloo's threads abort some ranks during interpreter teardown, after all is done or reported
    os._exit(code)


SAID_BY_FIRST_S = 5
"""What stops one rank stops all; the others leave the first the time to say it once."""


@record  # an exception reaches the launcher, which shows that of the first rank to fail
def _run_command_line() -> bool:
    config, provenance = load_config(sys.argv[1:])
    with config_errors(provenance):
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        return run(preflight(config, world_size, looks_at_files=False))


CHECKED = "MESHWRIGHT_CHECKED"
"""Set in the environment where `meshwright check` has spoken to the same console."""


def run(plan: Plan, extra_sinks: Sequence[Sink] = ()) -> bool:
    """Train from the start or the last checkpoint to the last step, or until asked to stop.

    Args:
        extra_sinks: get every record after the sinks that the config asks for.

    Returns:
        Whether the last step is done.

    Raises:
        TrainingError: if a step was bad beyond what is allowed; or if it was asked to stop, and
            would not go on from there when started again.
    """
    config = plan.config
    if config.training.deterministic:
        hardware.make_deterministic()
    device = hardware.pick_device(
        int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get(hardware.GPUS_EXPECTED, "0"))
    )
    dtype = getattr(torch, config.training.mixed_precision_param)
    head_dim = plan.model_args.table.rope.head_dim
    check_device(
        config,
        device.type,
        has_ring_kernel=ring_attention.is_available(device.type, dtype, head_dim),
        # pytorch pull request 180666; a TorchVersion compares as a version, not as text
        waits_for_offload=torch.__version__ >= "2.13",
        fp32_modules=plan.fp32_modules,
    )
    if device.type == "cuda":
        check_memory(config, plan.least_bytes, hardware.memory_gib(device))
    find_ops(config.activation_checkpoint.saved_ops)
    start_process_group(device, config.comm.init_timeout_seconds)
    sources, held_out = open_training_data(config), open_validation_data(config)
    check_agreement(plan, [*sources, *held_out])
    checkpoints = CheckpointManager(plan.checkpoint_folder, config.checkpoint)
    checkpoints.claim()
    try:
        return _train(plan, device, checkpoints, sources, held_out, extra_sinks)
    finally:
        checkpoints.release()


def _train(
    plan: Plan,
    device: torch.device,
    checkpoints: CheckpointManager,
    sources: Sequence[OpenSource],
    held_out: Sequence[OpenSource],
    extra_sinks: Sequence[Sink],
) -> bool:
    """Resume or begin, train, and close; return whether the last step is done."""
    config, dump_folder = plan.config, Path(plan.config.job.dump_folder)
    steps = config.training.steps
    found = checkpoints.find()
    plan = dataclasses.replace(plan, resume_step=found["step"] if found else 0)
    if found is not None:
        drift_of(plan, found).check()
    else:
        checkpoints.tell(lambda: check_first_weights(plan))
    if plan.resume_step >= steps:
        logger.info(
            "nothing to do: %s holds step %d of %d. To go on, raise training.steps; "
            "to start over, use another job.dump_folder.",
            plan.checkpoint_folder,
            plan.resume_step,
            steps,
        )
        dist.destroy_process_group()
        return True
    log_to_file(dump_folder / "logs", dist.get_rank())
    _announce(plan, device)
    if found is not None and dist.get_rank() == 0:
        drift_of(plan, found).log(_is_said(plan))
    torch.manual_seed(config.training.seed)
    gc.disable()  # a collection on one rank makes all others wait: they collect together

    meshes = build_meshes(plan.dims, device.type)
    set_timeout(meshes, config.comm.init_timeout_seconds)
    model = build_model(plan, meshes, device)
    optimizer = build_optimizer(model.named_parameters(), config.optimizer)
    checkpoints.guard(optimizer)
    early = EarlyStep(optimizer) if config.optimizer.early_step_in_backward else None
    tensors = TrainingTensors(model, optimizer, dist.get_rank())
    saved: Mapping[str, Any] = found or {"step": 0, "tokens_seen": 0, "bad_steps": None}
    cursor = Cursor()
    if found is None:
        set_first_values(plan, model)
    else:
        cursor = _place_in_data(plan, found, sources)
        checkpoints.load(tensors, found)
        for stage in model.stages:
            stage.init_buffers()
    loader = build_loader(plan, sources, meshes, device, cursor)
    reporter = build_reporter(plan, device, extra_sinks, saved["step"], saved["tokens_seen"])
    validate = build_validation(plan, held_out, meshes, device) if held_out else None
    bad_steps = BadStepLog(
        config.bad_steps,
        device,
        is_early=early is not None,
        folder=dump_folder,
        sources=[source.entry.name for source in sources],
        step=saved["step"],
        cursor=cursor,
        saved=saved["bad_steps"],  # checkpoints from before have none
    )
    lr_at = learning_rate(config)
    max_bad_records = config.training.max_bad_records
    reduction = config.parallelism.fsdp_reduce_gradients
    step, is_last = saved["step"], False

    with (
        build_profiler(config.profiling, dump_folder, dist.get_rank(), saved["step"]) as profiler,
        StopRequest(dump_folder, config.job.max_run_seconds) as stop,
        checkpoints,
    ):
        data_time_s = _look_ahead(loader, stop, step, steps)
        is_over = stop.is_over(step)
        while not is_over:
            data = next(loader, None)
            if data is None:
                check_has_data(step + 1)
                is_last = True
                break
            step += 1
            batches = [batch.to(device, non_blocking=True) for batch in data.batches]
            lr = lr_at(step)
            set_learning_rate(optimizer, lr)
            result = train_step(
                model,
                batches,
                optimizer,
                early,
                step=step,
                max_norm=config.training.max_norm,
                meshes=meshes,
                health=bad_steps.health,
                phases=reporter.phases,
                reduce_every_microbatch=reduction == "every_microbatch",
            )
            reporter.count(step, data_time_s)
            bad_steps.count(step, data.cursor)

            data_time_s = _look_ahead(loader, stop, step, steps)
            is_first, is_last = step == saved["step"] + 1, step == steps or data.is_last
            is_over = stop.is_over(step) or is_last
            is_validated = validate is not None and (is_last or step % config.validation.freq == 0)
            is_logged = is_first or is_over or is_validated or step % config.metrics.log_freq == 0
            if is_logged or checkpoints.is_due(step, is_over):
                bad_steps.look()
            if is_logged:
                figures = {
                    "loss/train": result.loss.item(),
                    "optim/grad_norm": result.grad_norm.item(),
                    "optim/lr": lr,
                }
                figures |= {f"data/epochs/{k}": count for k, count in data.epochs.items()}
                figures |= bad_steps.figures
                if max_bad_records:
                    figures["data/bad_records"] = passed_over = num_bad_records(data.cursor)
                    if passed_over > max_bad_records:
                        stop.fail(_too_many_bad_records(passed_over, max_bad_records), step)
                if validate is not None and is_validated:
                    with reporter.paused("validation"):
                        set_timeout(meshes, config.comm.init_timeout_seconds)  # it compiles anew
                        figures |= validate(
                            model, partial(stop.is_over, step), partial(stop.fail, last_step=step)
                        )
                    is_over = stop.is_over(step) or is_last
                reporter.report(step, figures)
            is_due = checkpoints.is_due(step, is_over)
            if is_due:
                with reporter.paused("checkpoint"):
                    cursor = whole_cursor(data.cursor)
                    loss = result.loss.item()
                    manifest = _manifest(
                        plan, step, reporter.tokens_seen, cursor, sources, loss, bad_steps.state()
                    )
                    checkpoints.save(step, tensors, manifest, is_over)
            if is_first and not is_due:
                checkpoints.reserve(tensors)
            checkpoints.poll()
            if is_first or is_validated:
                set_timeout(meshes, config.comm.train_timeout_seconds)
            if step % config.training.gc_freq == 0:
                gc.collect(1)
            if profiler is not None:
                profiler.step()

    loader.close()
    bad_steps.close()
    reporter.close()
    if stop.reason:
        stop.heeded()
    if failures := stop.failures(step):
        _raise_data_error(config, failures, step, is_new=step > saved["step"])
    if not is_last:
        if step > saved["step"]:
            _check_goes_on(config.checkpoint, f"after step {step} of {steps}: {stop.reason}")
        words = "stopped after step %d of %d: %s; start it again to go on"
        logger.info(words, step, steps, stop.reason)
    else:
        if step < steps:
            logger.info("the data ends here: training.max_epochs = %d", config.training.max_epochs)
        logger.info("finished: %s tokens", f"{reporter.tokens_seen:,}")
    barrier()  # the first rank to leave with an error has torchrun end the others
    dist.destroy_process_group()
    return is_last


def _look_ahead(loader: Loader, stop: StopRequest, step: int, steps: int) -> float:
    """Have the data of the two steps after `step` at hand, or tell the other ranks that this one
    cannot: they hear of it while they take the first of the two. Returns the seconds waited."""
    start, wanted = time.perf_counter(), min(2, steps - step)
    count = loader.fetch(wanted)
    if count < wanted and loader.error is not None:
        stop.fail(loader.error, step + count)
    return time.perf_counter() - start


def _too_many_bad_records(count: int, allowed: int) -> ConfigError:
    """What ends a job whose ranks have passed over too many records, though none by itself has."""
    key = "training.max_bad_records"
    return ConfigError(
        key, f"{key} = {allowed}: {count} records have been passed over so far\n  fix: raise it"
    )


def _raise_data_error(
    config: JobConfig, failures: Mapping[int, Exception], step: int, *, is_new: bool
) -> None:
    """End a job whose ranks `failures` cannot read the data of the step after `step`.

    Args:
        is_new: this process has trained, so to start it again leads further. If not, it is an error
            as at any start, for else a scheduler would start it for ever.
    """
    rank, error = min(failures.items())
    what = f"the data cannot be read after step {step}: rank {rank}: {error}"
    if not is_new:
        raise ConfigError(getattr(error, "key", ""), what)
    _check_goes_on(config.checkpoint, what)
    raise DataError(f"{what}\n  it is saved; what may pass is over when the job is started again")


def _is_said(plan: Plan) -> bool:
    """Whether `meshwright check`, which verifies no content, saw the same checkpoint."""
    load_step = plan.config.checkpoint.load_step
    return CHECKED in os.environ and plan.resume_step == commit.choose_step(
        plan.checkpoint_folder, load_step
    )


def _check_goes_on(config: Checkpoint, stopped: str) -> None:
    """Raise if a job that was stopped and is started again with the same words does not go on from
    there: what starts it again by itself would do so for ever.
    """
    if not config.enable:
        raise TrainingError(f"{stopped}; what was trained is lost: checkpoint.enable = false")
    if config.load_step != -1:
        raise TrainingError(
            f"{stopped}; it is saved, but checkpoint.load_step = {config.load_step} would begin "
            "from there again: leave it out to go on"
        )


def _announce(plan: Plan, device: torch.device) -> None:
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


def check_has_data(step: int) -> None:
    """The data may end before `step`, unless that is the first."""
    if step == 1:
        raise ConfigError(
            "training.max_epochs",
            "training.max_epochs: gives less than one global batch"
            "\n  fix: raise it, add data, or lower training.global_batch_size",
        )


def _place_in_data(plan: Plan, saved: Manifest, sources: Sequence[OpenSource]) -> Cursor:
    """Where a resume goes on reading; it means something only in the data it was noted for."""
    if DATALOADER in left_out(plan.config.checkpoint, saved):
        return Cursor()
    for source in sources:
        was = saved["data_content"].get(source.entry.name)
        if was != source.content:
            raise source.entry.error(
                "dataset",
                f"its content is not what it was when the checkpoint was saved: {source.content} "
                f"now, {was} then",
                "restore the data (of a streamed source training.stream_shards and "
                "training.shuffle_window too), or use another job.dump_folder",
            )
    cursor = Cursor.from_json(saved["data"])
    allowed = plan.config.training.max_bad_records
    if (passed_over := sum(bad_records(cursor).values())) > allowed:
        raise _too_many_bad_records(passed_over, allowed)
    return cursor.reweighted() if drift_of(plan, saved).is_reweighted else cursor


def _manifest(
    plan: Plan,
    step: int,
    tokens_seen: int,
    cursor: Cursor,
    sources: Sequence[OpenSource],
    loss: float,
    bad_steps: dict[str, Any],
) -> dict[str, Any]:
    """What a checkpoint holds beside tensors."""
    return {
        "step": step,
        "tokens_seen": tokens_seen,
        "loss": loss if math.isfinite(loss) else None,
        "bad_steps": bad_steps,
        "data": dataclasses.asdict(cursor),
        "data_identity": plan.data_identity,
        "data_content": {source.entry.name: source.content for source in sources},
        "model_name": plan.config.model.name,
        "model_args": dataclasses.asdict(plan.model_args),
        "tokenizer_path": plan.config.model.tokenizer_path,
        "frozen": sorted(plan.frozen),
        "mesh": dataclasses.asdict(plan.dims),
        "versions": {"meshwright": meshwright.__version__, "torch": torch.__version__},
        "config": to_json(plan.config),
    }
