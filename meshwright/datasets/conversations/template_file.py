"""The file of a chat template: the user's, or the one beside the tokenizer."""

from pathlib import Path

from meshwright.config.section import BYTES
from meshwright.datasets.tokenizers.kinds import PATH_KEY, find_file
from meshwright.datasets.tokenizers.special_tokens import read_json_object
from meshwright.system.errors import ConfigError, check, config_error

TEMPLATE_KEY = "model.chat_template_path"


FILE_NAME = "chat_template.jinja"


CONFIG_NAME = "tokenizer_config.json"


FIX = f"fix: name a Jinja template in {TEMPLATE_KEY}"


def find_template(tokenizer_path: str, template_path: str = "") -> str:
    """Return the template in the file `template_path`, else the one beside the tokenizer.

    Beside it, chat_template.jinja goes before the "chat_template" of tokenizer_config.json, of
    which, if it names several, the "default" is meant.

    Raises:
        ConfigError: if there is none.
    """
    if template_path:
        return _read_template(Path(template_path))
    if tokenizer_path == BYTES:
        raise ConfigError(TEMPLATE_KEY, f"{PATH_KEY} = {BYTES!r}: has no chat template\n  {FIX}")
    tokenizer_file = find_file(tokenizer_path)
    beside = tokenizer_file.with_name(FILE_NAME)
    if beside.is_file():
        return _read_template(beside)
    try:
        found = read_json_object(tokenizer_file.with_name(CONFIG_NAME)).get("chat_template")
    except ValueError as error:
        raise config_error(PATH_KEY, tokenizer_path, str(error)) from error
    if isinstance(found, list):
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default")
        if not isinstance(found, str):
            names = ", ".join(map(str, named))
            raise ConfigError(
                TEMPLATE_KEY,
                f"{PATH_KEY} = {tokenizer_path!r}: {CONFIG_NAME} has the chat templates {names}, "
                f"and none of them is the default\n  {FIX}",
            )
    if not isinstance(found, str) or not found.strip():
        raise ConfigError(
            TEMPLATE_KEY,
            f"{PATH_KEY} = {tokenizer_path!r}: no chat template beside it, neither {FILE_NAME} nor "
            f'"chat_template" in {CONFIG_NAME}\n  {FIX}',
        )
    return found


def _read_template(file: Path) -> str:
    try:
        template = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = str(error.strerror) if isinstance(error, OSError) else "is no UTF-8 text"
        raise config_error(TEMPLATE_KEY, str(file), reason) from error
    check(bool(template.strip()), TEMPLATE_KEY, str(file), "is empty")
    return template
