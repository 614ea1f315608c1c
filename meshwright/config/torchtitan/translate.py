"""From the table of a torchtitan TOML to the table of one of ours, with a note for each key.

The translated table states torchtitan's defaults where ours differ, so it means what it meant.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from meshwright.config.fields import set_value
from meshwright.config.parallelism import Float8
from meshwright.config.torchtitan import rules
from meshwright.system.errors import CombinedConfigError, ConfigError

Table = dict[str, Any]


class Job:
    """A TOML of torchtitan's on its way to ours, in dotted keys.

    Attributes:
        given: keys that no rule has taken yet; the keys left at the end mean the same here.
        notes: a key of theirs, and its name or meaning here.
        origins: our key, and the key of theirs that it comes from, where they differ.
    """

    def __init__(self, given: Table) -> None:
        self.given = given
        self.ours: Table = {}
        self.notes: list[tuple[str, str]] = []
        self.origins: dict[str, str] = {}

    @property
    def table(self) -> Table:
        """The TOML as ours."""
        table: Table = {}
        for key, value in (self.ours | self.given).items():
            set_value(table, tuple(key.split(".")), value)
        return table

    def is_on(self, key: str) -> bool:
        return self.given.get(key) is True

    def number(self, key: str, default: int) -> int:
        """Return a whole number from which other keys follow."""
        value = self.given.get(key, default)
        if type(value) is not int:
            raise ConfigError(key, f"{key} = {value!r}: must be a whole number")
        return value

    def note(self, key: str, text: str) -> None:
        self.notes.append((key, text))

    def put(self, key: str, value: Any, origin: str, text: str) -> None:
        """Give our `key` a value that comes from `origin`, unless `key` is given too."""
        if key != origin:
            if key in self.given:
                self.note(origin, f"without effect: {key} is given too")
                return
            self.origins[key] = origin
        self.ours[key] = value
        self.note(origin, text)


def error_of(key: str, value: object, rule: str, fix: str) -> ConfigError:
    """Return the error of a key of theirs."""
    return ConfigError(key, f"{key} = {value!r} (torchtitan's): {rule}\n  fix: {fix}")


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values. A table is entered only if theirs, or `model.args`, has it."""
    for name, value in table.items():
        is_table = not prefix or prefix.startswith("quantize.") or name in ("dataloader", "args")
        if isinstance(value, Mapping) and value and is_table:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


NAMES = {name for name, _ in rules.FLAVORS}

MICROBATCH = "parallelism.pipeline_parallel_microbatch_size"


def is_torchtitan(raw: Mapping[str, Any]) -> bool:
    """Return whether a table names its model, or its tokenizer's folder, as torchtitan does."""
    model = raw.get("model", {})
    name, flavor = model.get("name", rules.DEFAULT_NAME), model.get("flavor", "debugmodel")
    if not (isinstance(name, str) and isinstance(flavor, str)):
        return False
    if name in rules.OTHER_MODELS:
        return True
    if name not in NAMES:
        return False
    # there is a debugmodel of both
    is_theirs = name == rules.DEFAULT_NAME or flavor != "debugmodel"
    return "hf_assets_path" in model or (
        "name" in model and is_theirs and _find_flavor(name, flavor) is not None
    )


def translate(raw: Mapping[str, Any], folder: Path) -> Job:
    """Turn a TOML of torchtitan's into one of ours; keys of ours in it count as they are.

    Args:
        folder: where relative paths start: torchtitan's start at the working directory.

    Raises:
        ConfigError: for every key that asks for a feature that Meshwright lacks.
    """
    job = Job(dict(flat(raw)))
    _refuse(job)
    _model(job)
    _tokenizer(job, folder)
    for section, default in (("training", "c4_test"), ("validation", "c4_validation")):
        _dataset(job, section, default, folder)
    _validation(job)
    _pipeline(job)
    _schedule(job)
    _compile(job)
    _float8(job)
    _tables(job)
    noted = {key for key, _ in job.notes} | (job.ours | job.given).keys()
    for key in [key for key, _ in flat(raw) if key not in noted]:
        job.note(key, "without effect: nothing here follows from it")
    return job


def _refuse(job: Job) -> None:
    errors = []
    for key, (harmless, rule, fix) in rules.REFUSED.items():
        if key not in job.given:
            continue
        value = job.given.pop(key)
        if value == harmless:
            job.note(key, "without effect: it asks for nothing")
        else:
            errors.append(error_of(key, value, rule, fix))
    if errors:
        raise CombinedConfigError(errors)


def _find_flavor(name: str, flavor: str) -> tuple[tuple[str, str, Table], bool] | None:
    """Return our name, flavor and args, and whether documents are kept apart."""
    for ending in ("", *rules.DOCUMENT_MASKS):
        found = rules.FLAVORS.get((name, flavor.removesuffix(ending)))
        if found and flavor.endswith(ending):
            return found, bool(ending)
    return None


def _model(job: Job) -> None:
    name = job.given.pop("model.name", rules.DEFAULT_NAME)
    flavor = job.given.pop("model.flavor", "debugmodel")
    found = _find_flavor(name, flavor)
    if found is None:
        sizes = [size for theirs, size in rules.FLAVORS if theirs == name]
        key, value = ("model.flavor", flavor) if sizes else ("model.name", name)
        fix = f"choose from {', '.join(sizes or sorted(NAMES))}"
        raise error_of(key, value, "no such model here", fix)
    (ours, size, args), keeps_apart = found
    job.put("model.name", ours, "model.name", f"{name!r} is {ours!r}")
    stated = ", ".join(f"{key} = {value}" for key, value in args.items())
    text = f"{flavor!r} is {size!r}" + (f" with {stated}" if stated else "")
    job.put("model.flavor", size, "model.flavor", text)
    for key, value in args.items():
        given = any(other.startswith(f"model.args.{key}") for other in job.given)
        if not given:
            job.ours[f"model.args.{key}"] = value
    if keeps_apart:
        text = f"{flavor!r} keeps documents apart: training.mask_documents"
        job.put("training.mask_documents", True, "model.flavor", text)


def _tokenizer(job: Job, folder: Path) -> None:
    theirs, ours = "model.hf_assets_path", "model.tokenizer_path"
    path = str(folder / str(job.given.pop(theirs, "tests/assets/tokenizer")))
    job.put(ours, path, theirs, f"here {ours}, from the working directory")
    key = "checkpoint.initial_load_path"
    if job.is_on("checkpoint.initial_load_in_hf") and not job.given.get(key):
        job.given.pop(key, None)
        job.put(key, path, "checkpoint.initial_load_in_hf", f"reads {theirs}: {key}")


def _dataset(job: Job, section: str, default: str, folder: Path) -> None:
    key = f"{section}.dataset"
    is_used = section == "training" or job.is_on("validation.enable")
    if job.given.get(f"{key}s") or not (is_used or key in job.given):
        return
    name = job.given.setdefault(key, default)
    others = {
        "c4_test": ("json", f"{key}_path", str(folder / "tests/assets/c4_test")),
        "c4_validation": ("c4", f"{key}_split", "validation"),
    }
    if isinstance(name, str) and name in others:
        ours, beside, value = others[job.given.pop(key)]
        job.put(key, ours, key, f"{name!r} is {ours!r}, with {beside}")
        job.given.setdefault(beside, value)


def _validation(job: Job) -> None:
    key, ours = "validation.steps", "validation.num_samples"
    steps, batch = job.number(key, -1), job.number("validation.local_batch_size", 8)
    trained, length = job.number("training.seq_len", 2048), job.number("validation.seq_len", 2048)
    if length != trained and job.is_on("validation.enable"):
        text = f"sequences have training.seq_len = {trained}, not {length}"
        job.note("validation.seq_len", text)
    for name in ("steps", "local_batch_size", "seq_len"):
        job.given.pop(f"validation.{name}", None)
    if steps == -1:  # all of the data, as here
        return
    shards = max(job.number("parallelism.data_parallel_shard_degree", -1), 1)
    ranks = job.number("parallelism.data_parallel_replicate_degree", 1) * shards
    text = f"x {batch} sequences x {ranks} data-parallel ranks (-1 counts as 1)"
    job.put(ours, steps * batch * ranks, key, f"{text}: {ours} = {steps * batch * ranks}")


def _pipeline(job: Job) -> None:
    """A pipeline cuts their `local_batch_size` into microbatches; ours is a microbatch."""
    size = job.number(MICROBATCH, 1)
    job.given.pop(MICROBATCH, None)
    if job.given.get("parallelism.pipeline_parallel_degree", 1) == 1:
        return
    key, whole = "training.local_batch_size", "training.global_batch_size"
    batch = job.number(key, 8)
    job.given.pop(key, None)
    job.put(key, size, key, f"a pipeline's microbatch: {size}, by {MICROBATCH}")
    if job.given.get(whole, -1) != -1:
        return
    job.given.pop(whole, None)
    shards = job.number("parallelism.data_parallel_shard_degree", -1)
    if shards == -1:
        rule = f"with a pipeline it is {batch} x data-parallel ranks, and their number is open"
        raise error_of(whole, -1, rule, "give the number of sequences")
    ranks = job.number("parallelism.data_parallel_replicate_degree", 1) * shards
    job.put(whole, batch * ranks, whole, f"{batch} x {ranks} data-parallel ranks = {batch * ranks}")


def _schedule(job: Job) -> None:
    steps = job.number("lr_scheduler.total_steps", job.number("training.steps", 10000))
    key = "lr_scheduler.warmup_steps"
    if job.number(key, 200) > steps > 0:
        job.given.pop(key, None)
        job.put(key, steps, key, f"lowered to {steps}, the steps of the schedule, as there")
    warmup = min(job.number(key, 200), steps)
    key, ratio = "lr_scheduler.decay_ratio", job.given.get("lr_scheduler.decay_ratio")
    if isinstance(ratio, float) and warmup + round(steps * ratio) > steps > 0:
        del job.given[key]
        job.note(key, "leaves no room for the warm-up: decay begins after that, as there")


def _compile(job: Job) -> None:
    key = "compile.components"
    if not job.is_on("compile.enable") and job.given.pop(key, None) is not None:
        job.note(key, "without effect: compile.enable is off")
    components = job.given.pop(key, ["model"])
    if not isinstance(components, list):
        return
    if "model" not in components:
        job.given["compile.enable"] = False
        job.note(key, "the model alone can be compiled: compile.enable = false")
    elif components != ["model"]:
        job.note(key, "blocks of the model are compiled, each by itself; the loss is not")


def _float8(job: Job) -> None:
    key = "model.converters"
    converters = job.given.pop(key, [])
    if not converters:
        return
    if not isinstance(converters, list) or any(one not in rules.FLOAT8 for one in converters):
        rule = "only float8 layers are supported, not MX, and not mixtures of experts"
        raise error_of(key, converters, rule, f'set it to ["{rules.FLOAT8[0]}"], or to []')
    job.put("float8.enable", True, key, "float8.enable = true")
    prefix = "quantize.linear.float8."
    left_out = job.given.get(f"{prefix}filter_fqns")
    if isinstance(left_out, list):
        names = [name for name in left_out if name not in ("output", rules.SMALL_LAYERS)]
        small = Float8().filter_fqns if rules.SMALL_LAYERS in left_out else []
        job.given[f"{prefix}filter_fqns"] = names + small  # the output is never in float8
    for name in ("recipe_name", "filter_fqns", "emulate"):
        theirs, ours = f"{prefix}{name}", f"float8.{name}"
        if theirs in job.given:
            value = job.given.pop(theirs)
            job.put(ours, value, theirs, f"here {ours} = {value!r}")


def _tables(job: Job) -> None:
    """Apply the tables of keys, values and defaults."""
    for theirs, ours in rules.RENAMED.items():
        if theirs in job.given:
            job.put(ours, job.given.pop(theirs), theirs, f"here {ours}")
    for key, values in rules.VALUES.items():
        value = job.given.get(key)
        if isinstance(value, str) and value in values:
            del job.given[key]
            job.put(key, values[value], key, f"{value!r} is {values[value]!r}")
    for key in list(job.given):
        for pattern, why in rules.IDLE.items():
            if fnmatchcase(key, pattern):
                del job.given[key]
                job.note(key, f"without effect: {why}")
                break
    for key, (value, beside, wanted) in rules.DEFAULTS.items():
        keys = job.ours | job.given
        if key not in keys and keys.get(beside) == wanted:
            job.ours[key] = value
            job.note(key, f"{value!r}, torchtitan's default, is stated")
