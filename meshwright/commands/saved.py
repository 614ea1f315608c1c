"""A checkpoint's model family and tokenizer."""

import shlex

from meshwright.checkpoint.manifest import Manifest
from meshwright.datasets.tokenizers.kinds import Tokenizer, build_tokenizer, special_ids
from meshwright.models.families import MODELS
from meshwright.models.family import Family
from meshwright.system.errors import ConfigError, check, config_error
from meshwright.system.files import Place


def saved_spec(place: Place, manifest: Manifest) -> Family:
    """Return the family of the model that a checkpoint is of.

    The job's own module is not imported unless the user names it: a checkpoint from elsewhere must
    not choose code to run.
    """
    name = manifest["model_name"]
    module = manifest["config"].get("experimental", {}).get("custom_import", "")
    fix = f"--custom-import {shlex.quote(module)} (which the job named)" if module else ""
    place.check(name in MODELS, f"is of a model {name!r}, which is not known here", fix)
    return MODELS[name]


def open_tokenizer(place: Place, manifest: Manifest, given: str | None) -> tuple[Tokenizer, str]:
    """Open the tokenizer that the checkpoint was trained with; return its path, too.

    Args:
        given: its path; None: the path that the job had.

    Raises:
        ConfigError: if it is not there, or another.
    """
    path = given or manifest["tokenizer_path"]
    fix = "name the tokenizer that it was trained with: --tokenizer PATH"
    try:
        tokenizer = build_tokenizer(path)
    except ConfigError as error:
        reason = str(error).partition("\n")[0]
        raise config_error("--tokenizer", path, reason, fix) from None
    trained_with = manifest["data_identity"].get("model.tokenizer_path")
    check(
        tokenizer.fingerprint == trained_with,
        "--tokenizer",
        path,
        f"is not what checkpoint {place.path} was trained with: {tokenizer.fingerprint} instead of "
        f"{trained_with}",
        fix,
    )
    found = special_ids(tokenizer)
    used = manifest["special_tokens"]
    check(
        found == used,
        "--tokenizer",
        path,
        f"has other special tokens than checkpoint {place.path} was trained with: {found} instead "
        f"of {used}",
        "put the tokenizer_config.json of training beside it",
    )
    return tokenizer, path
