"""From a plan to the parts of a job."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from meshwright.batch import Batch
from meshwright.config.job_config import JobConfig
from meshwright.datasets.loader import BatchShape, Loader, padded_samples, to_batches
from meshwright.datasets.named_sources import weights
from meshwright.datasets.opening import CachedSource, OpenSource
from meshwright.datasets.sample import Sample, SampleRules
from meshwright.datasets.sample_stream import Cursor, SampleStream
from meshwright.datasets.tokenizers.kinds import prompt_tokens
from meshwright.errors import ConfigError
from meshwright.exchange.initial_on_ranks import open_initial
from meshwright.log import logger
from meshwright.models.decoder import Decoder
from meshwright.models.initialize import initialize
from meshwright.optim.schedules import warmup_stable_decay
from meshwright.parallelisms.local_model import (
    Allocate,
    LocalModel,
    ModelParts,
    allocate,
    build_local_model,
)
from meshwright.parallelisms.meshes import Meshes
from meshwright.parallelisms.parallelize import parallelize
from meshwright.preflight import Plan
from meshwright.sampling import continue_prompts
from meshwright.validation import evaluate


def build_model(
    plan: Plan, meshes: Meshes, device: torch.device, *, allocate: Allocate = allocate
) -> LocalModel:
    """Build this rank's part of the model, parallelised; its values are arbitrary. Collective."""
    config, training = plan.config, plan.config.training
    applied: list[str] = []

    def prepare(stage: Decoder) -> None:
        applied.extend(
            parallelize(
                stage,
                meshes,
                training=training,
                parallelism=config.parallelism,
                recomputation=config.activation_checkpoint,
                compilation=config.compile,
                float8_options=config.float8,
                fp32_modules=plan.fp32_modules,
                float8_layers=plan.float8_layers,
            )
        )
        allocate(stage, torch.device("cpu") if training.enable_cpu_offload else device, device)

    model = build_local_model(
        partial(Decoder, plan.model_args, training.seq_len),
        prepare,
        ModelParts(plan.stage_modules, plan.frozen, plan.fp32_modules),
        meshes=meshes,
        training=training,
        schedule=config.parallelism.pipeline_parallel_schedule,
        device=device,
    )
    if model.pipeline is not None:
        logger.info("%s", model.pipeline.summary)
    for line in dict.fromkeys(applied):  # of all stages
        logger.info("%s", line)
    return model


def initialize_weights(plan: Plan, model: LocalModel) -> None:
    """Give parameters and buffers their values at step 0. Collective.

    Raises:
        ConfigError: if their source is not the one that preflight saw.
    """
    config = plan.config.checkpoint
    if not config.initial_load_path:
        for stage in model.stages:
            initialize(stage, plan.config.training.seed)
        return
    from meshwright.exchange.weight_readers import open_weights

    start = time.perf_counter()
    with open_initial(config) as initial:
        reader = open_weights(initial, plan.spec, plan.model_args)
        reader.load(dict(model.named_parameters()))
    for stage in model.stages:
        stage.init_buffers()
    path = initial.place.path
    logger.info("first weights from %s in %.1f s", path, time.perf_counter() - start)


def build_loader(
    plan: Plan,
    sources: Sequence[OpenSource],
    meshes: Meshes,
    device: torch.device,
    cursor: Cursor,
) -> Loader:
    """Return this rank's batches, from `cursor` on."""
    training, shape = plan.config.training, _batch_shape(plan, meshes)
    stream = SampleStream(
        sources,
        weights(training.datasets),
        cursor,
        SampleRules(
            training.seq_len + 1, training.seed, training.max_epochs, training.max_bad_records
        ),
        batch=shape.global_batch_size,
        slots=shape.slots,
    )
    return Loader(
        stream,
        shape,
        mask_documents=training.mask_documents,
        pin_memory=device.type == "cuda",
    )


Fail = Callable[[Exception], None]
"""Notes that this rank cannot continue, so that all ranks stop."""
Validate = Callable[[LocalModel, Callable[[], bool], Fail], dict[str, float]]
"""Evaluates a model: figures by name. It asks between its steps whether it is to stop."""


def build_validation(
    plan: Plan, sources: Sequence[OpenSource], meshes: Meshes, device: torch.device
) -> Validate:
    """Return a function that evaluates a model on `sources`. Collective.

    It omits the figures of a source that it was stopped in. Streamed sources are read here, once,
    and kept: whether they hold enough shows before the first step, and no later validation waits
    for a network.

    Raises:
        ConfigError: if a source holds fewer samples than it is to give.
    """
    training, shape = plan.config.training, _batch_shape(plan, meshes)
    token_bytes = torch.tensor(plan.tokenizer.token_bytes, device=device)

    rules = SampleRules(
        training.seq_len + 1,
        seed=None,  # as they lie
        max_epochs=1,
        max_bad_records=training.max_bad_records,
    )

    def read(source: OpenSource) -> Iterator[list[Sample]]:
        stream = SampleStream(
            [source], [1], Cursor(), rules, batch=shape.global_batch_size, slots=shape.slots
        )
        num_samples = plan.config.validation.num_samples
        if isinstance(source, CachedSource) and num_samples == -1:
            num_samples = source.cache.num_tokens // rules.length
        return padded_samples(stream, shape, num_samples)

    kept = {
        source.entry.key: list(read(source))
        for source in sources
        if not isinstance(source, CachedSource)
    }

    def steps(source: OpenSource) -> Iterator[list[Batch]]:
        for samples in kept[source.entry.key] if source.entry.key in kept else read(source):
            batches = to_batches(samples, shape.local_batch_size, training.mask_documents)
            yield [batch.send(device) for batch in batches]

    def validate(model: LocalModel, is_stopped: Callable[[], bool], fail: Fail) -> dict[str, float]:
        figures: dict[str, float] = {}
        for source in sources:
            prefix = "validation/" + f"{source.entry.name}/" * (len(sources) > 1)
            result = evaluate(
                model, _until_stopped(steps(source), is_stopped, fail), meshes, token_bytes
            )
            if is_stopped():
                break
            figures |= {
                f"{prefix}loss": result.loss,
                f"{prefix}perplexity": result.perplexity,
                f"{prefix}bits_per_byte": result.bits_per_byte,
            }
        return figures

    return validate


WriteTexts = Callable[[LocalModel, Callable[[], bool]], dict[str, str]]
"""Continues prompts: texts by prompt; none if it was stopped."""


def build_sampling(plan: Plan, meshes: Meshes) -> WriteTexts:
    """Return a function that continues `validation.sample_prompts`."""
    validation, training, tokenizer = plan.config.validation, plan.config.training, plan.tokenizer
    prompts = [prompt_tokens(tokenizer, text) for text in validation.sample_prompts]

    def write_texts(model: LocalModel, is_stopped: Callable[[], bool]) -> dict[str, str]:
        continued = continue_prompts(
            model,
            prompts,
            meshes,
            shape=(training.local_batch_size, training.seq_len),
            num_tokens=validation.sample_tokens,
            eos_id=tokenizer.eos_id,
            mask_documents=training.mask_documents,
            is_stopped=is_stopped,
        )
        return {
            text: tokenizer.decode([*tokenizer.encode(text), *tokens])
            for text, tokens in zip(validation.sample_prompts, continued or [], strict=False)
        }

    return write_texts


def _until_stopped(
    steps: Iterator[list[Batch]], is_stopped: Callable[[], bool], fail: Fail
) -> Iterator[list[Batch]]:
    """Those steps that all ranks have. Collective."""
    while True:
        batches: list[Batch] | None = None
        try:
            batches = next(steps, None)
        except (ConfigError, OSError) as error:
            fail(error)
        is_stopped()  # sends this rank's vote
        if is_stopped() or batches is None:  # after all have been heard
            return
        yield batches


def _batch_shape(plan: Plan, meshes: Meshes) -> BatchShape:
    return BatchShape(
        local_batch_size=plan.config.training.local_batch_size,
        num_microbatches=plan.num_microbatches,
        dp_rank=meshes.dp.get_local_rank(),
        dp_size=plan.dims.dp,
    )


def learning_rate(config: JobConfig) -> Callable[[int], float]:
    """Return the learning rate at each step, counted from 1."""
    schedule = config.lr_scheduler
    fraction = partial(
        warmup_stable_decay,
        steps=schedule.total_steps or config.training.steps,
        warmup_steps=schedule.warmup_steps,
        decay_ratio=schedule.decay_ratio,
        decay_type=schedule.decay_type,
        min_lr_factor=schedule.min_lr_factor,
    )
    return lambda step: config.optimizer.lr * fraction(step)
