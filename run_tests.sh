#!/usr/bin/env bash
# Set up if need be, then test; arguments go to pytest.
#
#   ./run_tests.sh                         everything
#   ./run_tests.sh tests/unit -k rope
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/scripts/environment.sh"
prepare_environment test
cd "$here"
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} # an active environment need not hold meshwright
exec "$python" -m pytest "$@"
