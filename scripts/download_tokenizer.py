"""Fetch the tokenizer of a model from the Hugging Face hub, and nothing else of it.

    python scripts/download_tokenizer.py meta-llama/Llama-3.1-8B --hf_token hf_...

Without --hf_token, HF_TOKEN or what `hf auth login` stored is used. HF_ENDPOINT names another hub.
"""

import argparse
import sys
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
)

from meshwright.datasets.tokenizers.kinds import BESIDE, FILE_NAMES, build_tokenizer
from meshwright.system.errors import EXIT_CONFIG, ConfigError

WANTED = (*FILE_NAMES, *BESIDE)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("repository", help="on the hub, such as meta-llama/Llama-3.1-8B")
    parser.add_argument("--local_dir", type=Path, default=Path("assets/tokenizer"))
    parser.add_argument("--hf_token", help="of an account that may read the repository")
    args = parser.parse_args()
    folder = args.local_dir / args.repository.rpartition("/")[2]
    try:
        for file in download(args.repository, folder, args.hf_token):
            print(f"written: {file}")
        describe(folder)
    except (ConfigError, OSError) as error:
        print(f"download_tokenizer: {error}", file=sys.stderr)
        return EXIT_CONFIG
    return 0


def download(repository: str, folder: Path, token: str | None) -> list[Path]:
    """Write what `WANTED` names and `repository` holds into `folder`.

    Raises:
        ConfigError: if it cannot be had.
    """
    hub = HfApi(token=token)
    try:
        inside = {file.rfilename for file in hub.model_info(repository).siblings or []}
        if not inside & set(FILE_NAMES):
            raise ConfigError("", f"{repository}: holds no {', '.join(FILE_NAMES)}")
        return [
            Path(hub.hf_hub_download(repository, name, local_dir=folder))
            for name in WANTED
            if name in inside
        ]
    except HFValidationError as error:
        raise ConfigError("", f"{repository!r} is no name of a repository: {error}") from error
    except GatedRepoError as error:
        raise ConfigError(
            "",
            f"{repository}: is gated\n  fix: accept its licence at {hub.endpoint}/{repository}, "
            "and give the token of that account with --hf_token",
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            "",
            f"{repository}: no such repository on {hub.endpoint}, or a private one\n"
            "  fix: check its name; for a private one, give --hf_token",
        ) from error
    except HfHubHTTPError as error:
        reason = error.server_message or str(error).split("\n")[0]
        raise ConfigError("", f"{repository}: {hub.endpoint} refused: {reason}") from error
    except (HTTPError, OSError) as error:  # before there was any answer
        raise ConfigError(
            "",
            f"{repository}: {hub.endpoint} cannot be reached, or {folder} written: {error}\n"
            "  fix: check the network, the proxy and HF_ENDPOINT; or copy the files by hand",
        ) from error


def describe(folder: Path) -> None:
    """Open what was written, to prove it, and say how to use it."""
    tokenizer = build_tokenizer(str(folder))
    print(f"vocabulary: {tokenizer.vocab_size}")
    for name, token_id in (("BOS", tokenizer.bos_id), ("EOS", tokenizer.eos_id)):
        what = "none" if token_id is None else f"{tokenizer.decode([token_id])} = {token_id}"
        print(f"{name}: {what}")
    print(f'put into the TOML, under [model]:\n  tokenizer_path = "{folder}"')


if __name__ == "__main__":
    sys.exit(main())
