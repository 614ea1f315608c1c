#!/usr/bin/env bash
# Build the pages of docs/ as a site into site/; open site/index.html. mkdocs and its theme, the extra `docs`, are taken
# from the active environment, or put into .venv-docs. Without them and without a network there is no site.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=python
if ! "$python" -c 'import material' 2>/dev/null; then
    python=.venv-docs/bin/python
    source scripts/environment.sh
    [ -x "$python" ] || "$(find_python)" -m venv .venv-docs
    read -r -a packages < <("$python" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
    "$python" -c 'import material' 2>/dev/null ||
        "$python" -m pip install --quiet --disable-pip-version-check --retries 1 --timeout 10 "${packages[@]}" || {
        echo "meshwright: no site: ${packages[*]} cannot be installed" >&2
        exit 0
    }
fi
NO_MKDOCS_2_WARNING=1 "$python" -m mkdocs build --quiet --strict --site-dir "${1:-site}"
