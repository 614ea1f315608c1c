"""`meshwright check`: find the faults that would keep a job from running, without starting it."""

import os
import shlex
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from meshwright.checkpoint.conversion.hf_folder import declared_ends
from meshwright.checkpoint.conversion.initial_load import LOAD_KEY
from meshwright.checkpoint.lease import running_here
from meshwright.commands.options import add_ranks
from meshwright.config.loader import Written, read
from meshwright.config.provenance import shown_path
from meshwright.config.section import BYTES
from meshwright.config.training import Training
from meshwright.datasets.tokenizers.kinds import SentencePieceTokenizer
from meshwright.system.errors import as_toml, config_error, numbered
from meshwright.system.files import NamedPath
from meshwright.system.log import log_to_console, logger
from meshwright.system.machine import Ranks, count_ranks, why_bf16_is_slow
from meshwright.train.facts import look, look_at_files
from meshwright.train.resolve import ResolvedJob, resolve

DEFAULT_PRESET = "debug_model"

add_options = add_ranks


def run(given: Namespace) -> None:
    """Print that the job can run on the given number of ranks, after the notes on it.

    Raises:
        ConfigError: if it can't.
    """
    ranks = count_ranks(given, start_here=False)
    resolved = check_job(given, ranks)
    parameters = f"{resolved.model_args.table.num_params:,} parameters"
    can_run = f"{given.config} can run: {parameters}, {numbered(ranks.total, 'rank')}"
    if resolved.resume_diff is not None and resolved.resume_diff.is_done:
        print(f"{given.config} has nothing to do")
        return
    for stage in resolved.training_stages:
        config = stage.config
        num_steps = config.training.steps - max(stage.starts_after, resolved.resume_step)
        steps = f"{numbered(num_steps, 'step')} of {config.tokens_per_step:,} tokens"
        if stage is resolved and resolved.resume_step > 0:
            steps += f" after step {resolved.resume_step:,}"
        parts = [can_run, steps]
        if len(resolved.training_stages) > 1:
            parts.append(f"stage {stage.stage_number} to step {config.training.steps:,}")
        print(", ".join(parts))
    # last, since its libraries take a fifth of a second to import
    if not resolved.config.checkpoint.last_save_in_hf and (why := _export_fault(resolved)):
        logger.warning("an export would be rejected without --without-tokenizer: %s", why)


def check_job(given: Namespace, ranks: Ranks, device_type: str | None = None) -> ResolvedJob:
    """Check that a job can run, and log how "auto" was decided for compilation, which options have
    no effect, whether a different type would be much faster, how the job differs from the one that
    saved the checkpoint to resume from, and whether its folder differs from its TOML's.

    Args:
        given: without CONFIG, gets that of $CONFIG_FILE, or the debug model.
        device_type: "cuda" or "cpu", if it trains on this machine.

    Raises:
        ConfigError: for every fault.
    """
    given.config = given.config or os.environ.get("CONFIG_FILE") or DEFAULT_PRESET
    log_to_console()
    written = read(given)
    config = written.config()
    facts = look(
        config,
        ranks.total,
        expects_gpus=ranks.gpus != 0,
        device_type=device_type,
        is_inherited=written.provenance.is_inherited,
    )
    resolved = resolve(config, look_at_files(config, facts))
    if resolved.config.checkpoint.last_save_in_hf and (why := _export_fault(resolved)):
        fix = "set it to false, and export with --without-tokenizer"
        raise config_error("checkpoint.last_save_in_hf", True, f"would fail: {why}", fix)
    notes = sorted(
        resolved.notes, key=lambda text: "has no effect" not in text
    )  # last ones are read
    slow = _slow_type(ranks, resolved.config.training)
    user = running_here(resolved.checkpoint_folder) if resolved.needs_folder else ""
    for text in (*_inherited(written), *_other_eos(resolved), *notes):
        logger.info("%s", text)
    if slow:
        logger.warning("%s", slow)
    if resolved.resume_diff is not None:
        resolved.resume_diff.log()
        if resolved.resume_diff.is_done:  # ranks take seconds to say so
            logger.info(
                "%s holds step %d, the last", resolved.checkpoint_folder, resolved.resume_step
            )
    _warn_of_move(given, resolved)
    if user:
        words = "a job that runs uses %s: %s\n  fix: start another when it has ended"
        logger.warning(words, resolved.checkpoint_folder, user)
    return resolved


def _export_fault(resolved: ResolvedJob) -> str:
    """Return why the tokenizer couldn't be exported; "" if nothing is known against it."""
    is_copied = not isinstance(resolved.tokenizer, SentencePieceTokenizer)
    if is_copied and not resolved.config.model.tokenizer_type:
        return ""
    # not at the top: it imports the libraries of tokenizers
    from meshwright.checkpoint.conversion.tokenizer_files import why_not_exported

    return why_not_exported(resolved.tokenizer)


def _other_eos(resolved: ResolvedJob) -> Iterator[str]:
    """Say that the model folder to start from ends text at a different token than the tokenizer."""
    config, eos_id = resolved.config.checkpoint, resolved.tokenizer.eos_id
    if config.initial_load_in_hf and eos_id is not None and not resolved.resume_step:
        declared = declared_ends(NamedPath(LOAD_KEY, Path(config.initial_load_path)))
        if declared and eos_id not in declared:
            yield (
                f"the tokenizer's EOS is {eos_id}, and {config.initial_load_path} ends text at "
                f"{', '.join(map(str, sorted(declared)))}: model.eos_token sets it"
            )


def _inherited(written: Written) -> Iterator[str]:
    """Say which tokenizer the job takes and why, unless its own TOML or the command line names one;
    and which inherited keys are left out, since a model folder is in the place of their model."""
    provenance, key, flavor = written.provenance, "model.tokenizer_path", "model.flavor"
    model, others = written.raw.get("model", {}), dict(provenance.left_out)
    where, path = provenance.origin(key), model.get("tokenizer_path")
    named = others.pop(key, "")
    if path and where == "default":
        instead = f", not the one of {named}" if named else ""
        yield f"{key} = {_shown(path)}, the folder of {flavor} ({provenance.of(flavor)}){instead}"
    elif path and provenance.is_inherited(key):
        yield f"{key} = {_shown(path)}, inherited from {where}"
    if others:
        names = ", ".join(f"{name} ({where})" for name, where in others.items())
        yield f"{flavor} = {_shown(model['flavor'])}: leaves out what is inherited: {names}"


def _shown(path: str) -> str:
    """Return the path of a tokenizer or a folder as a person would write it here."""
    return as_toml(path if path == BYTES else shown_path(Path(path)))


def _warn_of_move(given: Namespace, resolved: ResolvedJob) -> None:
    """Warn if a job wrote the TOML, and its folder was moved since, or is looked for from another
    working directory: `job.dump_folder` doesn't lead there."""
    job, path = resolved.config.job, Path(resolved.config.job.config_file)
    is_of_job = path.name == "config.toml" and (path.parent / "history.jsonl").exists()
    is_there = os.path.realpath(path.parent) == os.path.realpath(job.dump_folder)
    if is_of_job and not is_there and ("job", "dump_folder") not in given.overrides:
        folder, fix = shown_path(path.parent), "to continue that one, add --job.dump_folder %s"
        words = f"this job uses job.dump_folder = %r, not %s, where its TOML is\n  fix: {fix}"
        logger.warning(words, job.dump_folder, folder, shlex.quote(folder))


def _slow_type(ranks: Ranks, training: Training) -> str:
    """Return advice on the type of a job's matmuls, or nothing.

    Where the GPUs weren't counted, or there are more nodes, this one's CPU says nothing.
    """
    dtype, is_this_cpu = training.mixed_precision_param, ranks.gpus == 0 and ranks.machines == 1
    if ranks.gpus and dtype == "float32":
        reason, faster = "GPUs since A100 multiply up to 16 times faster in bfloat16", "bfloat16"
    elif is_this_cpu and dtype == "bfloat16" and (slow := why_bf16_is_slow()):
        reason, faster = slow, "float32"
    else:
        return ""
    key, weights = "training.mixed_precision_param", ""
    if faster == "float32" and training.dtype == "bfloat16":  # which float32 can't compute with
        weights = ' and training.dtype = "float32"'
    return f'{key} = "{dtype}": {reason}\n  fix: {key} = "{faster}"{weights}'
