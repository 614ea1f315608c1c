"""Commands of `meshwright`, called in the test's own process."""

from collections.abc import Callable, Sequence

from meshwright.commands.main import run


def command(name: str) -> Callable[[Sequence[object]], None]:
    """Return a function that runs the command `name` with the words that it is given."""

    def call(words: Sequence[object]) -> None:
        run([*name.split(), *map(str, words)])

    return call


check_job = command("check")
checkpoint = command("checkpoint")
export = command("export")
generate_text = command("generate")
