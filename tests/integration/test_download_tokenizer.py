"""scripts/download_tokenizer.py as a process, against a server that stands in for the hub."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from meshwright.datasets.tokenizers.kinds import find_template
from tests.helpers.tokenizer_files import byte_level_json, tiktoken_model

ROOT = Path(__file__).parents[2]
COMMIT = "0" * 40
Download = Callable[..., subprocess.CompletedProcess[str]]


class Hub(BaseHTTPRequestHandler):
    """Repositories: name -> file name -> content. "gated" in a name asks for the token."""

    repositories: dict[str, dict[str, bytes]]

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def answer(self, with_body: bool) -> None:
        path = self.path.split("?")[0].removeprefix("/").removeprefix("api/models/")
        name = "/".join(path.split("/")[:2])
        rest = "/".join(path.split("/")[2:])
        files = self.repositories.get(name)
        if self.headers.get("Authorization") == "Bearer hf_bad":
            self.reply(401, b"", {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif files is None:
            self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif not rest.startswith("resolve/"):
            siblings = [{"rfilename": file} for file in files]
            info = {"id": name, "sha": COMMIT, "siblings": siblings}
            self.reply(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
        elif "gated" in name and self.headers.get("Authorization") != "Bearer hf_good":
            self.reply(401, b"", {"X-Error-Code": "GatedRepo"})
        else:
            content = files[rest.split("/", 2)[2]]
            tag = hashlib.sha1(content).hexdigest()
            self.reply(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}, with_body)

    def reply(
        self, status: int, body: bytes, headers: dict[str, str], with_body: bool = True
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body and self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("hub")
    specials = ["<|begin_of_text|>", "<|eot_id|>"]
    tokenizer = byte_level_json(folder / "tokenizer.json", specials).read_bytes()
    original = tiktoken_model(folder / "tokenizer.model", folder / "tokenizer.json").read_bytes()
    config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "chat_template": "hi"}
    both = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": json.dumps(config).encode(),
        "original/tokenizer.model": original,
        "model-00001-of-00002.safetensors": b"large",
        "README.md": b"text",
    }
    Hub.repositories = {
        "org/both": both,
        "org/gated": both,
        "org/original": {"original/tokenizer.model": original},
        "org/weights": {"model.safetensors": b"large"},
        "org/broken": {"tokenizer.json": b"{}"},
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def download(endpoint: str, tmp_path: Path) -> Download:
    def run(*arguments: str, endpoint: str = endpoint) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        environment |= {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path / "home"),
            "PYTHONPATH": str(ROOT),
            "NO_PROXY": "127.0.0.1",
        }
        return subprocess.run(
            [sys.executable, str(ROOT / "scripts/download_tokenizer.py"), *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def test_a_tokenizer_and_nothing_else(download: Download, tmp_path: Path) -> None:
    done = download("org/both")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "assets/tokenizer/both"
    written = {"tokenizer.json", "tokenizer_config.json", "original/tokenizer.model"}
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert {file for file in files if not file.startswith(".cache/")} == written
    assert all(f"{file}\n" in done.stdout for file in written)
    assert "vocabulary: 402\n" in done.stdout
    assert "BOS: <|begin_of_text|> = 400\nEOS: <|eot_id|> = 401\n" in done.stdout
    assert '  tokenizer_path = "assets/tokenizer/both"\n' in done.stdout
    assert find_template(str(folder)) == "hi"


def test_only_the_original_file(download: Download, tmp_path: Path) -> None:
    done = download("org/original", "--local_dir", str(tmp_path / "here"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here/original/original/tokenizer.model").is_file()
    assert "EOS: <|end_of_text|> = 401\n" in done.stdout


def test_a_gated_repository(download: Download) -> None:
    refused = download("org/gated")
    assert refused.returncode == 2
    assert "org/gated: is gated\n  fix: accept its licence at " in refused.stderr
    assert download("org/gated", "--hf_token", "hf_good").returncode == 0
    wrong = download("org/gated", "--hf_token", "hf_bad")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "refused: Invalid credentials in Authorization header" in wrong.stderr


@pytest.mark.parametrize(
    ("repository", "message"),
    [
        ("org/nothing", "no such repository on"),
        ("org/weights", "org/weights: holds no tokenizer.json, tokenizer.model"),
        ("org/broken", "not a HuggingFaceTokenizer"),
        ("gpt/../..", "is no name of a repository"),
        ("a/b/c", "is no name of a repository"),
    ],
)
def test_what_cannot_be_had(download: Download, repository: str, message: str) -> None:
    done = download(repository)
    assert (done.returncode, done.stdout.count("vocabulary")) == (2, 0)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_no_network(download: Download) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and nobody listens
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}"
        done = download("org/both", endpoint=nowhere)
    assert done.returncode == 2
    assert f"org/both: {nowhere} cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr
