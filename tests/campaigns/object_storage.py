"""Checks a config whose data is on S3, with good, absent and wrong credentials.

A real client (s3fs, botocore) asks a real server (moto).


pip install s3fs "moto[s3,iam]" flask flask-cors        # in an environment of its own
python -m tests.campaigns.object_storage                # a minute

Whatever is wrong with the credentials must end `check` at once with exit code 2 and the cause, and
no wait may pass without a word.
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import boto3  # type: ignore[import-not-found]

from meshwright.system.errors import EXIT_CONFIG

REGION = "us-east-1"
CONFIG = """
extends = "debug_model"
job.dump_folder = "{folder}/out"
model.tokenizer_path = "bytes"
training = {{ dataset = "json", dataset_path = "s3://data/{files}", validation_fraction = 0.0 }}
"""
CASES = {  # the server that checks signatures, variables, files, exit code, message
    "good": (
        False,
        {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"},
        "*.jsonl",
        0,
        "can run",
    ),
    "absent": (True, {}, "*.jsonl", EXIT_CONFIG, "Unable to locate credentials"),
    "half": (True, {"AWS_ACCESS_KEY_ID": "{id}"}, "*.jsonl", EXIT_CONFIG, "AWS_SECRET_ACCESS_KEY"),
    "unknown id": (
        True,
        {"AWS_ACCESS_KEY_ID": "AKIANOBODY", "AWS_SECRET_ACCESS_KEY": "{secret}"},
        "*.jsonl",
        EXIT_CONFIG,
        "Access Key Id you provided does not exist",
    ),
    "unknown id, one file": (
        True,
        {"AWS_ACCESS_KEY_ID": "AKIANOBODY", "AWS_SECRET_ACCESS_KEY": "{secret}"},
        "0.jsonl",
        EXIT_CONFIG,
        "Access Key Id you provided does not exist",
    ),
    "wrong secret": (
        True,
        {"AWS_ACCESS_KEY_ID": "{id}", "AWS_SECRET_ACCESS_KEY": "wrong"},
        "*.jsonl",
        EXIT_CONFIG,
        "signature we calculated does not match",
    ),
    "unknown profile": (
        True,
        {"AWS_PROFILE": "nobody"},
        "*.jsonl",
        EXIT_CONFIG,
        "config profile .nobody. could not be found",
    ),
}
MOST_S = 30
"""An attempt at S3 takes seconds, and no second attempt follows."""


def start_server(checks_signatures: bool) -> tuple[subprocess.Popen[bytes], str]:
    """Start moto; return its process and address. It lets the first requests pass unchecked."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    unchecked = {"INITIAL_NO_AUTH_ACTION_COUNT": "5"} if checks_signatures else {}
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)],
        env=os.environ | unchecked,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for _ in range(300):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            time.sleep(0.2)
    return server, f"http://127.0.0.1:{port}"


def fill(address: str) -> dict[str, str]:
    """Make a bucket with two files, and a user; return the user's credentials. Five requests."""
    given = {"endpoint_url": address, "region_name": REGION}
    given |= {"aws_access_key_id": "a", "aws_secret_access_key": "b"}
    s3, iam = boto3.client("s3", **given), boto3.client("iam", **given)
    s3.create_bucket(Bucket="data")
    rows = "\n".join(json.dumps({"text": f"row {i} " * 20}) for i in range(300))
    for name in ("0.jsonl", "1.jsonl"):
        s3.put_object(Bucket="data", Key=name, Body=rows)
    iam.create_user(UserName="user")
    key = iam.create_access_key(UserName="user")["AccessKey"]
    return {"id": key["AccessKeyId"], "secret": key["SecretAccessKey"]}


def main() -> None:
    """Run each case and exit with 1 if one is wrong."""
    servers = {checks: start_server(checks) for checks in (False, True)}
    keys = {checks: fill(address) for checks, (_, address) in servers.items()}
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, (checks, variables, files, code, message) in CASES.items():
            config = Path(folder) / "job.toml"
            config.write_text(CONFIG.format(folder=folder, files=files))
            env = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
            env |= {k: v.format(**keys[checks]) for k, v in variables.items()}
            env |= {"AWS_ENDPOINT_URL": servers[checks][1], "HOME": folder, "AWS_REGION": REGION}
            env |= {"AWS_EC2_METADATA_DISABLED": "true"}
            began = time.monotonic()
            done = subprocess.run(
                [sys.executable, "-m", "meshwright", "check", config, "--ngpu", "2"],
                env=env,
                capture_output=True,
                text=True,
            )
            seconds, output = time.monotonic() - began, done.stdout + done.stderr
            joined = " ".join(output.split())
            is_right = done.returncode == code and re.search(message, joined)
            if not is_right or "Traceback" in output or seconds > MOST_S:
                wrong += 1
                print(f"WRONG {name}: exit code {done.returncode}\n{output}")
            print(f"{name}: exit code {done.returncode} after {seconds:.1f} s", flush=True)
    for server, _ in servers.values():
        server.terminate()
    print(f"{len(CASES)} cases: {wrong} wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
