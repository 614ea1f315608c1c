"""The console's lines."""

import os
import signal
import subprocess
import sys
import time
from unittest.mock import Mock

import pytest

from meshwright.system import log
from meshwright.system.log import busy, log_to_console, logger, print_error


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_COLUMNS", "60")


def test_long_messages_are_wrapped_and_long_words_stay_whole(narrow, capsys) -> None:
    log_to_console()
    path = "/a/path/that/is/longer/than/a/line/of/this/console/is/wide/and/stays/whole"
    logger.info("some words that do not fit into one line, and %s after them all", path)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 60] == [" " * 11 + path]
    assert " ".join(" ".join(lines).split()[1:]).startswith("some words that do not fit into one")
    long = "a message that is a good deal longer than the console is wide " * 2
    try:
        raise ValueError(long)
    except ValueError:
        logger.exception("failed")
    assert long in capsys.readouterr().out  # a traceback keeps its lines


def test_a_width_that_is_no_number_is_passed_over(monkeypatch, capsys) -> None:
    monkeypatch.setenv("MESHWRIGHT_COLUMNS", "wide")
    log_to_console()
    logger.info("word " * 100)
    assert 80 < max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_errors_are_wrapped_but_for_the_config_s_own_lines(narrow, capsys) -> None:
    excerpt = f"    steps = {'9' * 60}"
    carets = f"            {'^' * 60}"
    print_error(f"a.toml:3: steps: {'a long rule ' * 6}\n{excerpt}\n{carets}\n  fix: {'b ' * 40}")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("meshwright: a.toml:3: steps: a long rule")
    assert excerpt in lines
    assert carets in lines
    others = [line for line in lines if line not in (excerpt, carets)]
    assert max(map(len, others)) <= 60
    assert " ".join(" ".join(others).split()).count("a long rule") == 6
    assert lines[-1].startswith("    b ")


@pytest.mark.parametrize(
    ("environment", "is_launched", "says_everything"),
    [
        (("0", "0", ""), False, True),
        (("1", "1", ""), False, False),  # plain torchrun shows every rank
        (("1", "1", "1"), False, True),
        (("1", "1", ""), True, True),  # shown for --log-rank 1 alone
        (("8", "0", ""), True, False),  # another machine
    ],
)
def test_what_all_ranks_say_is_shown_once(
    environment, is_launched, says_everything, monkeypatch, capsys
) -> None:
    for name, value in zip(("RANK", "LOCAL_RANK", "LOG_RANK"), environment, strict=True):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    log_to_console(is_launched=is_launched)
    logger.info("the banner")
    logger.warning("careful")
    said = [line[9:] for line in capsys.readouterr().out.splitlines()]
    assert said == ["the banner", "careful"][not says_everything :]


def test_what_takes_long_says_so(monkeypatch, capsys) -> None:
    monkeypatch.setattr(log, "SPEAK_EVERY_S", 0.05)
    log_to_console()
    start = time.monotonic()
    with busy("validating", lambda: "3 of 9 batches"):
        time.sleep(0.18)
    lines = capsys.readouterr().out.splitlines()
    assert 1 <= len(lines) <= (time.monotonic() - start) / 0.05
    assert all(line.endswith("validating: 0 s so far, 3 of 9 batches") for line in lines)
    time.sleep(0.1)
    assert capsys.readouterr().out == ""  # over


STREAMS = """
import os
from meshwright.system.log import steady_streams
steady_streams()
print("Stö\N{GREEK SMALL LETTER SIGMA}e", flush=True)
os.execv("/bin/sh", ["sh", "-c", "echo from a rank && echo and more >&2"])
"""


@pytest.mark.parametrize(
    ("ends", "encoding", "said"),
    [
        ("", "latin-1", "Stö\\u03c3e\nfrom a rank\n"),
        (">&- 2>&- <&-", "latin-1", ""),  # a rank that could not write would end with 2
    ],
)
def test_nothing_that_is_printed_fails(ends: str, encoding: str, said: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"\"{sys.executable}\" -c '{STREAMS}' {ends}"],
        env=os.environ | {"PYTHONIOENCODING": encoding},
        capture_output=True,
    )
    assert done.returncode == 0
    assert done.stdout.decode(encoding) == said


HOSTILE = "a\x1b]0;title\x07 \x1b[2J\x9b1m \x1b[31mred\x1b[0m\tb \udcffł"
SHOWN = "a\\x1b]0;title\\x07 \\x1b[2J\\x9b1m \x1b[31mred\x1b[0m\tb \\udcffł"
HOSTILE += " s3://me:se@ret@bucket/a HTTPS://token@host\n"
SHOWN += " s3://*********@bucket/a HTTPS://*****@host\n"


def test_a_document_does_not_steer_a_terminal_and_passwords_are_hidden(tmp_path, capsys) -> None:
    main, terminal = os.openpty()
    os.set_blocking(main, False)
    code = "from meshwright.system.log import *; steady_streams(); steady_streams()  # two commands"
    code += f"\nprint({HOSTILE!r}, end='')"
    code += "; sys.stdout.isatty() and os._exit(0)"  # a terminal has each line at once
    command = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    subprocess.run(command, stdout=terminal, check=True, env=environment)
    assert os.read(main, 1000).decode().replace("\r", "") == SHOWN.replace("ł", r"\u0142")
    pipe = {"stdout": subprocess.PIPE, "stderr": terminal}
    in_file = subprocess.run(command, **pipe, check=True).stdout
    # of `data --samples`, the text is the data
    assert in_file.decode() == HOSTILE.replace("\udcff", "\\udcff")
    log_to_console()
    log.log_to_file(tmp_path, 0)
    logger.info("%s", HOSTILE[:-1])
    assert capsys.readouterr().out.endswith(SHOWN)
    assert (tmp_path / "rank_0.log").read_text().endswith(SHOWN)
    print_error(HOSTILE)
    assert capsys.readouterr().err.startswith(f"meshwright: {SHOWN}")


def test_a_rank_without_a_file_for_its_log_trains(tmp_path, monkeypatch, capsys) -> None:
    """The file is a colleague's, whose job one continues; or the disk is full."""
    monkeypatch.setattr("faulthandler.register", (register := Mock()))
    (tmp_path / "rank_3.log").mkdir()
    log_to_console()
    log.log_to_file(tmp_path, 3)
    assert "rank_3.log cannot be written: Is a directory" in capsys.readouterr().out
    register.assert_called_once_with(signal.SIGUSR2)  # which would end the rank
